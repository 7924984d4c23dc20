"""Base of policies that go by the mean query of a head, from the prompts so far or from a file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.errors import PolicyError
from kvkeep.policies._rounds import Rounds
from kvkeep.policies._trigonometry import Means, heads_of, pairs, read
from kvkeep.policies.base import option
from kvkeep.types import Report, State, View


@dataclass(frozen=True, kw_only=True)
class MeanQueries(Rounds):
    """Adds up the queries of prompts before their rotation, and the lengths of their rotated pairs."""

    calibration: str | None = option(None, "file with the mean queries of this model, made by the official code")

    summaries: ClassVar[Mapping[str, str]] = {"query": "D", "length": "D", "count": ""}
    asks: ClassVar[bool] = True

    @property
    def unrotates(self) -> bool:
        """Queries at later positions follow from those without rotation."""
        return True

    @property
    def needs_rotary(self) -> bool:
        """Scores are made of angles."""
        return True

    def check(self, budget: int) -> None:
        """Refuse a small budget, and a file that is no calibration."""
        super().check(budget)
        if self.calibration is not None:
            heads_of(self.calibration)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Add a prompt's queries to their mean."""
        if view.queries is None:
            return state
        queries, positions = view.queries
        vectors = queries.float().unflatten(1, (view.keys.shape[1], -1))
        counts = (positions >= 0)[:, None, None, :, None]
        lengths = pairs(vectors, half_of(view))
        number = counts.sum(dim=(2, 3, 4)) * vectors.shape[2]
        total = state["count"] + number
        weight = 1.0 / total.clamp(min=1.0)[..., None]

        def mean(before: Tensor, new: Tensor) -> Tensor:
            added = new.masked_fill(~counts, 0.0).nan_to_num(0.0, 0.0, 0.0).sum(dim=(2, 3))
            after: Tensor = before + (added - before * number[..., None]) * weight
            return after

        return state | {
            "query": mean(state["query"], vectors),
            "length": mean(state["length"], lengths),
            "count": total.float(),
        }

    def means(self, view: View, state: State) -> Means:
        """The figures of the file, or of the prompts so far.

        Raises:
            PolicyError: the file belongs to another model.
        """
        if self.calibration is None:
            query = state["query"]
            return Means(query, (state["length"] - pairs(query, half_of(view))).clamp(min=0.0))
        found, (_, mine, _, dim) = read(self.calibration, view.layer), view.keys.shape
        heads = mine * view.heads.ranks
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


def half_of(view: View) -> int:
    """The number of pairs that are rotated."""
    return 0 if view.rotation is None else len(view.rotation.frequencies)
