"""Tools of several measurements: means, numbers as text, the loss on windows of the text, lines in pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.cache.hf_layers import PhasedCache, handed
from kvkeep.evals import task
from kvkeep_lab.analysis.measure import Axes, Skipped, Subject


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are neither ``None`` nor NaN; ``None`` if there are none."""
    defined = [value for value in values if value is not None and not math.isnan(value)]
    return sum(defined) / len(defined) if defined else None


def show(value: float | None, digits: int = 2) -> str:
    """Return a number as text; ``none`` if there is no number."""
    return "none" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Return a share as text, in percent; ``none`` if there is no number."""
    return "none" if value is None else f"{100 * value:.1f} %"


def in_bins(values: Float[Tensor, "*m n"], bins: int) -> Float[Tensor, "*m bins"]:
    """Return means over ``bins`` parts of the last axis, whose sizes differ by one place at most.

    With more parts than places, empty ones have NaN.
    """
    edges = (torch.arange(bins + 1) * values.shape[-1]) // bins
    sums = torch.nn.functional.pad(values.double().cumsum(dim=-1), (1, 0))
    return (sums[..., edges[1:]] - sums[..., edges[:-1]]) / (edges[1:] - edges[:-1])


# -- the model's loss on windows of the text ---------------------------------------------------------------------------


def windows(subject: Subject, *, rows: int, length: int, room: int = 0) -> Int[Tensor, "N T"]:
    """Return windows spread evenly over the text, each after the begin token if the text has one.

    Args:
        subject: the model and its text.
        rows: number of windows; fewer if they would overlap.
        length: tokens of each window; fewer if the text or the model's table of positions is shorter.
        room: positions that must stay free for generated tokens.

    Raises:
        Skipped: the model has too few positions.
    """
    begin, body = _without_begin(subject)
    limit = subject.writer.checkpoint.position_limit
    free = length if limit is None else min(length, limit - room)
    length = min(free - len(begin), len(body))
    if length < 2:
        raise Skipped(f"the model has {limit} positions, too few for a window of text and {room} new tokens")
    rows = max(1, min(rows, len(body) // length))
    last = len(body) - length
    starts = [0] if rows == 1 else [last * row // (rows - 1) for row in range(rows)]
    return torch.stack([torch.cat([begin, body[start : start + length]]) for start in starts])


def _without_begin(subject: Subject) -> tuple[Int[Tensor, " b"], Int[Tensor, " n"]]:
    has_begin = int(subject.tokens[0]) == subject.tokenizer.bos_token_id
    return subject.tokens[:has_begin], subject.tokens[has_begin:]


@torch.inference_mode()
def loss(model: Any, ids: Int[Tensor, "B T"], cache: PhasedCache | None = None) -> float:
    """Return the mean loss in nats of every token but the first of each row, in one pass."""
    ids = ids.to(model.device)
    given: dict[str, Any] = {"use_cache": False} if cache is None else {**handed(model, cache), "use_cache": True}
    logits: Tensor = model(input_ids=ids, **given).logits
    return float(task.nll(logits[:, :-1], ids[:, 1:]).double().mean())


def guesses(model: Any) -> float:
    """Return the loss in nats of a uniform guess over the vocabulary."""
    return math.log(model.config.get_text_config(decoder=True).vocab_size)


# -- lines in pictures -------------------------------------------------------------------------------------------------

Line: TypeAlias = tuple[Sequence[float], Sequence[float | None]]
"""Places and values; ``None`` for a missing value."""

_MARKS = "osD^vXP*"
_DASHES = ("-", "--", "-.", ":")
_COLOURS = ("#1f5fa8", "#b3400e", "#2f7d32", "#6a3d9a", "#444444", "#8a6d00", "#a0246e", "#007a7a")


def lines(axes: Axes, series: Mapping[str, Line], *, x: str, y: str) -> None:
    """Draw lines that are legible without colour: each has a marker, a dash and a name.

    Args:
        axes: the axes to draw on.
        series: name → places and values.
        x: label of the horizontal axis, with its unit.
        y: label of the vertical axis, with its unit.
    """
    for number, (name, (places, values)) in enumerate(series.items()):
        points = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
        if not points:
            continue
        axes.plot(
            [place for place, _ in points],
            [value for _, value in points],
            marker=_MARKS[number % len(_MARKS)],
            linestyle=_DASHES[number % len(_DASHES)],
            color=_COLOURS[number % len(_COLOURS)],
            markersize=4,
            markevery=max(1, len(points) // 12),
            linewidth=1.4,
            label=name,
        )
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.25)
    axes.legend(fontsize=8)


def by_layer(axes: Axes, series: Mapping[str, Sequence[float | None]], *, y: str) -> None:
    """Draw lines with one value per layer."""
    drawn: dict[str, Line] = {name: ([float(n) for n in range(len(values))], values) for name, values in series.items()}
    lines(axes, drawn, x="layer", y=y)
    axes.set_xticks(range(max(map(len, series.values()))))
