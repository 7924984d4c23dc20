"""Base of policies that go by the mean query of a head, from the prompts so far or from a file."""

from __future__ import annotations

import functools
import os
import stat
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.errors import PolicyError
from kvkeep.policies._rounds import Rounds
from kvkeep.policies.base import option
from kvkeep.types import Queries, Report, State, Turning, View

# The mean query of a head in pairs of dims that are rotated together, from a prompt or from a file.

_REMEDY = "Pass a file that kvkeep calibrate has written for triattention, or the official code of TriAttention."


@dataclass(frozen=True, eq=False)
class Means:
    """What is known of the queries before their rotation.

    Attributes:
        query: the mean query.
        excess: the mean length of each rotated pair, less the length of the mean; zeros in the second half.
    """

    query: Float[Tensor, "*H D"]
    excess: Float[Tensor, "*H D"]


def pairs(x: Float[Tensor, "*H D"], half: int) -> Float[Tensor, "*H D"]:
    """Return the length of each rotated pair of dims in the first ``half`` dims, and zeros in the rest."""
    found = torch.zeros_like(x)
    found[..., :half] = torch.hypot(x[..., :half], x[..., half : 2 * half])
    return found


def read(path: str, layer: int) -> Means:
    """Return the query means of one layer from a calibration file as it was when it was last checked: tensors with a
    row for each of the layer's query heads, in order.

    Raises:
        PolicyError: the file cannot be read, or lacks heads of the layer.
    """
    heads = heads_of(path)
    mine = {head: means for (number, head), means in heads.items() if number == layer}
    if not mine or sorted(mine) != list(range(len(mine))):
        lacks = f"some heads of layer {layer}" if mine else f"layer {layer}"
        raise PolicyError(
            f"calibration={path}: the file has no figures for {lacks}. "
            "It must cover every query head of every layer of this model."
        )
    ordered = [mine[head] for head in range(len(mine))]
    return Means(torch.stack([m.query for m in ordered]), torch.stack([m.excess for m in ordered]))


_Status = tuple[int, int, int]
"""What tells two contents of a file apart: its inode, its time in nanoseconds and its size."""
_checked: dict[str, _Status] = {}
"""Calibration files → their status when a policy was last checked. Steps do not look at the file system."""


def check_file(path: str) -> None:
    """Refuse a path that is no calibration of TriAttention's. A file that is new or has changed is read now, and serves
    all steps from now on.

    Raises:
        PolicyError: there is no such file, or it is no calibration.
    """
    try:
        found = os.stat(os.path.expanduser(path))
    except (OSError, ValueError):  # the name may be too long, or no name
        found = None
    if found is None or not stat.S_ISREG(found.st_mode):
        raise PolicyError(f"calibration={path:.200}: there is no such file. Leave it out for the prompt's own queries.")
    status = found.st_ino, found.st_mtime_ns, found.st_size
    _heads_in(path, status)
    _checked[path] = status  # last: requests that run go on with what they have if the new file is broken


def heads_of(path: str) -> dict[tuple[int, int], Means]:
    """Return the query means of all heads, by layer and query head, as the calibration file had them when it was last
    checked.

    Raises:
        PolicyError: the file cannot be read, or is no calibration of TriAttention's.
    """
    if path not in _checked:
        check_file(path)
    return _heads_in(path, _checked[path])


@functools.lru_cache(maxsize=4)  # each layer asks, in each step
def _heads_in(path: str, status: _Status) -> dict[tuple[int, int], Means]:
    """Read all query means from a calibration file, by layer and query head; again only if its status is another one.

    Raises:
        PolicyError: the file cannot be read, or is no calibration of TriAttention's.
    """
    del status  # it is only the key under which the cache knows the content
    try:
        with warnings.catch_warnings(action="ignore"):
            content = torch.load(os.path.expanduser(path), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch raises for a file that it did not write
        raise PolicyError(f"calibration={path}: torch cannot read this file. {_REMEDY}") from error
    try:
        found = {_head_of(name): _means_of(entry) for name, entry in content["stats"].items()}
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise PolicyError(
            f"calibration={path}: the file lacks q_mean_real, q_mean_imag or q_abs_mean of a head, or they are no "
            f"finite numbers, one for each pair of dims. {_REMEDY}"
        ) from error
    if len({means.query.shape for means in found.values()}) > 1:
        raise PolicyError(f"calibration={path}: the file has heads of different dims. {_REMEDY}")
    return found


def _head_of(name: str) -> tuple[int, int]:
    """Return the numbers of the layer and the query head that a name such as ``layer00_head01`` stands for.

    Raises:
        ValueError: the name has another form.
    """
    layer, head = name.removeprefix("layer").split("_head")
    return int(layer), int(head)


def _means_of(entry: Mapping[str, Tensor]) -> Means:
    """Return the query means of a head, from its entry in a file.

    Raises:
        ValueError: its numbers are not finite, or not one for each pair of dims.
    """
    several = [entry[key].detach() for key in ("q_mean_real", "q_mean_imag", "q_abs_mean")]
    if any(not x.is_floating_point() or x.ndim != 1 or x.shape != several[0].shape for x in several):
        raise ValueError
    real, imaginary, length = (x.float() for x in several)
    query = torch.cat([real, imaginary])
    # see `Means`: the second half of the dims belongs to the same pairs
    excess = torch.cat([length - torch.hypot(real, imaginary), torch.zeros_like(length)])
    if not (query.isfinite().all() and excess.isfinite().all()):
        raise ValueError
    return Means(query, excess)


@dataclass(frozen=True, kw_only=True)
class MeanQueries(Rounds):
    """Adds up the queries of prompts before their rotation, and the lengths of their rotated pairs."""

    calibration: str | None = option(
        None,
        "file with the mean queries of this model, which `kvkeep calibrate` or the official code has written",
        file=True,
    )

    summaries: ClassVar[Mapping[str, str]] = {"query": "D", "length": "D", "count": ""}
    asks: ClassVar[bool] = True

    @property
    def unrotates(self) -> bool:
        """Return ``True``: the policy needs queries before their rotation, to turn them to later positions itself."""
        return True

    @property
    def needs_rotary(self) -> bool:
        """Return ``True``: scores are made of rotation angles, so a model without rotary positions is refused."""
        return True

    def check(self, budget: int) -> None:
        """Refuse a budget that is too small, and a file that is no calibration.

        Raises:
            BudgetError: the budget is too small.
            PolicyError: the file is no calibration.
        """
        super().check(budget)
        if self.calibration is not None:
            check_file(self.calibration)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state with a prompt's queries added to their running mean. Generated tokens change nothing."""
        if view.queries is None:
            return state
        queries, positions = view.queries
        vectors = paired(view, queries).float().unflatten(1, (view.keys.shape[1], -1))
        counts = (positions >= 0)[:, None, None, :, None]
        lengths = pairs(vectors, half_of(view))
        number = counts.sum(dim=(2, 3, 4)) * vectors.shape[2]
        total = state["count"] + number
        weight = 1.0 / total.clamp(min=1.0)[..., None]

        def mean(before: Tensor, new: Tensor) -> Tensor:
            """Return a running mean with the new queries added."""
            # NaN would stay in the mean for ever
            added = new.masked_fill(~counts, 0.0).nan_to_num(0.0, 0.0, 0.0).sum(dim=(2, 3))
            after: Tensor = before + (added - before * number[..., None]) * weight
            return after

        return state | {
            "query": mean(state["query"], vectors),
            "length": mean(state["length"], lengths),
            "count": total.float(),
        }

    def means(self, view: View, state: State) -> Means:
        """Return the query means of each KV head of this process: from the calibration file, as the mean over the
        head's group of query heads, or from the prompts so far.

        Raises:
            PolicyError: the file belongs to another model.
        """
        if self.calibration is None:
            query = state["query"]
            return Means(query, (state["length"] - pairs(query, half_of(view))).clamp(min=0.0))
        found, (_, mine, _, dim) = read(self.calibration, view.layer), view.keys.shape
        heads = mine * view.heads.ranks
        # the last check: the file's numbers are about pairs, and all dims of a head belong to one
        if found.query.shape[1] != dim or len(found.query) % heads or 2 * half_of(view) != dim:
            raise PolicyError(
                f"calibration={self.calibration}: the file has {len(found.query)} heads of {found.query.shape[1]} dims "
                f"per layer, which does not go with this model's {heads} KV heads of {dim}."
            )
        query, excess = (
            view.heads.mine(part.unflatten(0, (heads, -1)).mean(dim=1).to(view.keys.device)[None])
            for part in (found.query, found.excess)
        )
        return Means(query, excess)


def paired(view: View, x: Float[Tensor, "*A D"]) -> Float[Tensor, "*A D"]:
    """Return vectors with the dims of each rotated pair in two halves. Products of two such vectors stay the same."""
    return x if view.rotation is None else view.rotation.paired(x)


def half_of(view: View) -> int:
    """Return how many pairs of dims are rotated; 0 for a model without rotary positions."""
    return 0 if view.rotation is None else len(view.rotation.frequencies)


# What queries that are still to come would attend to, if they were spread like those of the prompt.


def moments(queries: Queries, heads: int, sinks: int) -> tuple[Float[Tensor, "B Hk G D"], Float[Tensor, "B Hk G D D"]]:
    """Return the mean and the covariance of the queries of each query head, in groups of each of ``heads`` KV heads;
    those of padding and of the first ``sinks`` tokens are left out.
    """
    vectors = queries.vectors.float().unflatten(1, (heads, -1))
    counts = (queries.positions >= sinks)[:, None, None, :, None]
    number = counts.sum(dim=3).clamp(min=1)
    mean = vectors.masked_fill(~counts, 0.0).sum(dim=3) / number
    apart = (vectors - mean[:, :, :, None]).masked_fill(~counts, 0.0)
    return mean, apart.mT @ apart / number[..., None]


def met(view: View, ahead: Int[Tensor, " n"]) -> Float[Tensor, "B Hk S D"]:
    """Return the keys as queries ``ahead`` positions after the next token would see them, averaged over ``ahead``:
    their product with an unrotated query is the mean logit.
    """
    if view.rotation is None:
        return view.keys.float()
    far = view.seen[:, None, None] - (0 if view.turned else view.positions)
    cos, sin = _average(view.rotation, far, ahead)
    half = cos.shape[-1]
    held = paired(view, view.keys).float()
    # yaRN scales queries and keys alike; keys that are stored rotated have their factor already
    keys = held * view.rotation.scaling ** (1 if view.turned else 2)
    one, two, rest = keys[..., :half], keys[..., half : 2 * half], held[..., 2 * half :]
    return torch.cat([one * cos + two * sin, two * cos - one * sin, rest], dim=-1)


def _average(
    rotation: Turning, far: Int[Tensor, "B #Hk #S"], ahead: Int[Tensor, " n"]
) -> tuple[Float[Tensor, "B #Hk #S F"], Float[Tensor, "B #Hk #S F"]]:
    """Return the cosines and sines of the rotation angles at the distances ``far``, each averaged over what the steps
    ``ahead`` add to the distance.
    """
    frequencies = rotation.on(far.device)
    # a turn is a factor e^(i angle): the mean over the steps is taken once for all distances
    start = torch.polar(torch.ones_like(frequencies), far[..., None].float() * frequencies)
    steps = ahead[:, None] * frequencies
    turn = start * torch.polar(torch.ones_like(steps), steps).mean(dim=0)
    return turn.real, turn.imag
