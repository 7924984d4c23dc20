"""Seconds of one run of a model: from the limits of a plan, or from measured steps."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch

from kvkeep.engine.scheduler import OTHER_STEP_TOKENS, STEP_TOKENS
from kvkeep.errors import InputError
from kvkeep.planning.cost import Cost, ModelShape
from kvkeep.result_files import in_full

_MOST_POINTS = 10_000
_SMALLEST, _LARGEST = 1e-9, 10**12
_FIELDS = {
    "decode": (("rows",), "slots"),
    "prompt": (("tokens",), "past"),
    "mixed": (("rows", "tokens"), "slots"),
}
"""What a point of each list has beside its seconds, and what it may have."""


@runtime_checkable
class Steps(Protocol):
    """What runs of a model cost."""

    def seconds(self, rows: int, slots: float, tokens: int = 0, pairs: float = 0.0) -> float:
        """Return the seconds of a run.

        Args:
            rows: sequences that get a token in it.
            slots: tokens that these attend to, all rows together.
            tokens: prompt tokens that are read in it.
            pairs: pairs of a prompt token and a token that it attends to.
        """
        ...


@dataclass(frozen=True)
class Limits:
    """The shortest times that bandwidth and arithmetic allow.

    A run reads its weights and its slots once, and computes all its tokens; the longer of both counts, and attention of
    prompts comes on top.

    Attributes:
        weights: bytes of weights that a run of so many tokens reads.
        slot_bytes: bytes of a slot, in all layers.
        bandwidth: bytes per second.
        token_s: seconds of arithmetic for a token.
        pair_s: seconds of arithmetic for a pair of a prompt token and a token that it attends to.
    """

    weights: Callable[[int], float]
    slot_bytes: float
    bandwidth: float
    token_s: float
    pair_s: float

    @classmethod
    def of(
        cls, cost: Cost, slot_bytes: float, *, bandwidth: float, compute: float | None, device: str = "cuda"
    ) -> Limits:
        """Return the limits of a plan.

        Args:
            cost: of a kind of cache.
            slot_bytes: bytes of one of its slots.
            bandwidth: bytes per second.
            compute: operations per second. ``None``: as many as make a reading of the weights as long as the prompt
                tokens that the engine's schedule takes for that (`kvkeep.engine.scheduler.STEP_TOKENS`).
            device: type of device, which decides about these.
        """

        @cache
        def weights(tokens: int) -> float:
            return cost.read_bytes(tokens) - tokens * cost.row_bytes

        shape = cost.model
        per_token = 2.0 * shape.read(1)
        if compute is None:
            step_s = weights(1) / bandwidth
            compute = per_token * STEP_TOKENS.get(device, OTHER_STEP_TOKENS) / step_s
        return cls(weights, slot_bytes, bandwidth, per_token / compute, _pair_operations(shape) / compute)

    def seconds(self, rows: int, slots: float, tokens: int = 0, pairs: float = 0.0) -> float:
        """See `Steps.seconds`."""
        new = rows + tokens
        read_s = (self.weights(new) + slots * self.slot_bytes) / self.bandwidth
        return max(read_s, new * self.token_s) + pairs * self.pair_s


def _pair_operations(shape: ModelShape) -> float:
    """Return the operations of attention for a pair of tokens, in all layers."""
    return float(sum(2 * shape.query_heads * (layer.key_dim + layer.value_dim) for layer in shape.layers))


@dataclass(frozen=True)
class Fitted:
    """Straight lines through measured steps, by the least relative error, with no negative number.

    Attributes:
        decode: seconds of a decode step: fixed, of a row, of a slot.
        prompt: seconds of a run of prompts: fixed, of a token, of a pair of tokens.
        mixed: seconds that prompts add to a decode step in one run: fixed, of a token.
        error: the largest relative error of a point.
        ratios: seconds of single steps over those of the lines, in the order of time. A device's steps take them one
            after the other, again and again; empty: each step takes the time of its line.
        device: type of device on which they were measured, if the file says so.
    """

    decode: tuple[float, float, float]
    prompt: tuple[float, float, float]
    mixed: tuple[float, float]
    error: float
    device: str | None = None
    ratios: tuple[float, ...] = ()

    def seconds(self, rows: int, slots: float, tokens: int = 0, pairs: float = 0.0) -> float:
        """See `Steps.seconds`."""
        fixed, per_token, per_pair = self.prompt
        if not rows:
            return fixed + tokens * per_token + pairs * per_pair
        step = self.decode[0] + rows * self.decode[1] + slots * self.decode[2]
        return step + self.mixed[0] + tokens * self.mixed[1] + pairs * per_pair if tokens else step


def read_steps(path: str | Path) -> Fitted:
    """Read measured steps: a JSON object, or the output of a benchmark whose last line has one as ``steps``.

    It has ``decode``, a list of ``{"rows": 8, "seconds": 0.02}`` with ``slots`` (of all rows) if they differ, and
    ``prompt``, a list of ``{"tokens": 512, "seconds": 0.3}`` with ``past`` (tokens before them) if there are any. It
    may have ``mixed``, runs of both, ``{"rows": 8, "tokens": 64, "seconds": 0.05}``; without it prompt tokens take the
    time that they take alone, less the fixed one. It may have ``device``, its type, and ``ratios``, a list of the times
    of single steps over those of the lines: how a machine's speed moves.

    Raises:
        InputError: the file cannot be read, or has no such object.
    """
    try:
        raw = in_full(str(path)).read_text(encoding="utf-8-sig").strip()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no UTF-8 text.") from error
    found = _json(raw) or _json(raw.rpartition("\n")[2]) or {}
    found = found.get("steps", found)
    if not isinstance(found, dict) or not {"decode", "prompt"} <= set(found):
        raise InputError(f"{path} has no measured steps: a JSON object with the lists decode and prompt.")
    return fit(found, str(path))


def fit(steps: dict[str, Any], name: str) -> Fitted:
    """Return lines through measured steps.

    Args:
        steps: as in the file that `read_steps` reads.
        name: of the file, for errors.

    Raises:
        InputError: a list, a point, the ratios or the device is of another kind, or all points of a list are at one
            place.
    """
    decode, prompt = _points(name, steps, "decode"), _points(name, steps, "prompt")
    columns = [[1.0, step["rows"], step.get("slots", 0.0)] for step in decode]
    reading = [[1.0, n := step["tokens"], n * (step.get("past", 0.0) + n / 2)] for step in prompt]
    if not any("past" in step for step in prompt):
        reading = [[fixed, tokens, 0.0] for fixed, tokens, _ in reading]
    device = steps.get("device")
    if device is not None and not isinstance(device, str):
        raise InputError(f"{name}: device is no text.")
    first, off = _line(columns, [step["seconds"] for step in decode])
    second, also = _line(reading, [step["seconds"] for step in prompt])
    whole = Fitted(first, second, (0.0, second[1]), max(off, also), device, _ratios(name, steps.get("ratios")))
    return whole if steps.get("mixed") is None else _with_mixed(whole, _points(name, steps, "mixed"))


def _with_mixed(lines: Fitted, points: Sequence[dict[str, float]]) -> Fitted:
    """Return the same with a line through what prompts add to a decode step."""
    whole = [point["seconds"] for point in points]
    steps = [lines.seconds(round(point["rows"]), point.get("slots", 0.0)) for point in points]
    added = [max(1e-9, both - step) for both, step in zip(whole, steps, strict=True)]
    (fixed, per_token, _), _ = _line([[1.0, point["tokens"], 0.0] for point in points], added, beside=whole)
    found = [step + fixed + point["tokens"] * per_token for step, point in zip(steps, points, strict=True)]
    error = max(abs(estimate / both - 1) for estimate, both in zip(found, whole, strict=True))
    return replace(lines, mixed=(fixed, per_token), error=max(lines.error, error))


def _json(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _points(name: str, steps: dict[str, Any], kind: str) -> list[dict[str, float]]:
    """Return the points of a list, checked.

    Raises:
        InputError: the list or a point is of another kind, or all points are at one place.
    """
    keys, other = _FIELDS[kind]
    points = steps[kind]
    if not isinstance(points, list) or not 2 <= len(points) <= _MOST_POINTS:
        raise InputError(f"{name}: {kind} is no list of 2 to {_MOST_POINTS} points.")
    found = []
    for number, point in enumerate(points, 1):
        if not isinstance(point, dict) or not {*keys, "seconds"} <= set(point):
            raise InputError(f"{name}: point {number} of {kind} has no {' or no '.join((*keys, 'seconds'))}.")
        for field in (*keys, "seconds", other):
            value = point.get(field, 1)
            least = 0 if field == other else _SMALLEST
            if not _is_number(value) or not least <= value < _LARGEST:
                raise InputError(f"{name}: {field} of point {number} of {kind} is no number above 0.")
        found.append({field: float(point[field]) for field in (*keys, "seconds", other) if field in point})
    if len({point[keys[-1]] for point in found}) == 1:
        raise InputError(f"{name}: all points of {kind} have the same {keys[-1]}; a line needs two.")
    return found


def _ratios(name: str, ratios: object) -> tuple[float, ...]:
    """Return the ratios of single steps, checked; none for ``None``.

    Raises:
        InputError: they are no list of numbers above 0.
    """
    if ratios is None:
        return ()
    if not isinstance(ratios, list) or not 1 <= len(ratios) <= _MOST_POINTS:
        raise InputError(f"{name}: ratios is no list of 1 to {_MOST_POINTS} numbers.")
    for number, ratio in enumerate(ratios, 1):
        if not _is_number(ratio) or not _SMALLEST <= ratio < _LARGEST:
            raise InputError(f"{name}: number {number} of ratios is no number above 0.")
    return tuple(map(float, ratios))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _line(
    columns: Sequence[Sequence[float]], seconds: Sequence[float], beside: Sequence[float] | None = None
) -> tuple[tuple[float, float, float], float]:
    """Return the three numbers, none negative, with the least error in parts of ``beside``, and the largest error.

    ``beside`` is ``seconds`` by default.
    """
    weight = 1.0 / torch.tensor(beside or seconds, dtype=torch.float64)
    table = torch.tensor(columns, dtype=torch.float64) * weight[:, None]
    aim = torch.tensor(seconds, dtype=torch.float64) * weight
    best, least = torch.zeros(3, dtype=torch.float64), math.inf
    for used in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
        part = table[:, used]
        scale = part.norm(dim=0).clamp_min(1e-300)
        found = torch.linalg.lstsq(part / scale, aim, driver="gelsd").solution / scale
        whole = torch.zeros(3, dtype=torch.float64)
        whole[list(used)] = found
        off = (table @ whole - aim).norm().item()
        if bool((found >= 0).all()) and off < least - 1e-12:
            best, least = whole, off
    fixed, first, second = best.tolist()
    return (fixed, first, second), (table @ best - aim).abs().max().item()
