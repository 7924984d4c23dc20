"""The base of Scissorhands: bursts of dropped tokens, and the bits of a window of rows as per-slot state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.attention_stats import BITS, ones, ring, ring_span, word_names
from kvkeep.budget import between, column, smaller
from kvkeep.errors import BudgetError
from kvkeep.kv import ranking
from kvkeep.pins import Spans
from kvkeep.policies.base import Bursts, Policy, option
from kvkeep.types import EMPTY, Budget, Report, State, View

LONGEST = 100
"""Rows of the longest window that is used by default."""


@dataclass(frozen=True, kw_only=True)
class BurstPolicy(Policy):
    """Drops several tokens whenever a row is over budget: the worst ones in a window of the last rows.

    Among generated tokens, bursts are ``drop`` steps apart, and the window is no longer than that. The first row of the
    next window is therefore known in advance. Right after a prompt it may be a row of the prompt.
    """

    window: int | None = option(None, "rows of the history window; at most 100 and half of the budget if not given")
    recent: int | None = option(None, "newest tokens that are never dropped; 10, or a quarter of a small budget")
    drop: int | None = option(None, "tokens dropped at a time; half of the budget if not given")

    @property
    def slots(self) -> Mapping[str, float]:  # type: ignore[override]  # a longer window needs more
        """Return the per-slot state: the bits of the window's rows, 25 to a float, and the mass of this window and of
        the next one.
        """
        return dict.fromkeys((*word_names(self.words), "mass", "due"), 0.0)

    @property
    def words(self) -> int:
        """Return the number of floats that hold the bits."""
        return -(-(LONGEST if self.window is None else self.window) // BITS)

    def sizes(self, budget: Budget) -> tuple[Budget, Budget, Budget]:
        """Return ``(window, recent, drop)`` under a budget: rows of the window, protected newest tokens, and tokens
        of a burst.
        """
        half = between(1, budget // 2, None)
        drop = half if self.drop is None else self.drop
        window = between(1, smaller(half, drop), LONGEST) if self.window is None else self.window
        recent = between(0, budget // 4, 10) if self.recent is None else self.recent
        return window, recent, drop

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: 0, and the recent window."""
        return 0, self.sizes(budget)[1]

    def check(self, budget: int) -> None:
        """Refuse sizes that do not fit each other.

        Raises:
            BudgetError: a burst is larger than the number of unprotected tokens, or the window is longer than a burst.
        """
        super().check(budget)
        window, recent, drop = self.sizes(budget)
        # + 1: a burst comes when one token is over the budget; max: it leaves one token even where none is protected
        if drop < 1 or window < 1 or drop + max(1, int(recent)) > budget + 1:
            raise BudgetError(
                f"{self} drops {drop} at a time and protects {recent}, too much for a budget of {budget}."
            )
        if window > drop:
            raise BudgetError(
                f"{self} looks back over {window} rows, but drops only {drop} tokens at a time; with a window of "
                f"at most {drop} the rows of one window are never needed for the next."
            )

    def _needed(self, budget: int, pins: Spans) -> int:
        """Return the slots needed for pinned and protected tokens, with room for a window of rows after each burst."""
        # - 1: the window's last row is that of the token over the budget, which has the slot beyond it
        return super()._needed(budget, pins) + int(self.sizes(budget)[0]) - 1

    def stays(self, view: View, state: State) -> Budget:
        """Return how many tokens may stay in each row: the budget while it is met; else enough bursts of ``drop``
        tokens go to meet it, but no protected token.
        """
        return self._stays(view, held(view))[:, None]

    def _stays(self, view: View, n: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        """Return how many of the ``n`` tokens of each head stay, for each row. If they are more than the budget, so
        many bursts of ``drop`` tokens go that they fit into it, but no protected token and not the last one; otherwise
        return the budget.
        """
        _, recent, drop = self.sizes(view.budget)
        limit, least, drop = _flat(view.budget), _flat(between(1, recent, None)), _flat(drop)
        if view.pins is not None:
            first = view.positions[:, :1]  # protected tokens are the same in all heads
            held = ranking.protects(first, view.seen, recent=recent, pins=view.pins) & (first >= 0)
            least = held.sum(dim=(1, 2)).clamp(min=1)
        over = n - limit
        goes = torch.minimum(drop * -(-over // drop), n - least)
        return torch.where(over > 0, n - goes, limit)

    bursts: ClassVar[Bursts | None] = Bursts(stays, waits=True)

    def _ring(self, budget: Budget) -> tuple[Budget, Budget, Budget]:
        """Return the sizes by which a kernel keeps the window: its rows, the fewest tokens that a burst leaves, and
        the tokens of a burst.
        """
        window, recent, drop = self.sizes(budget)
        return window, between(1, recent, None), drop

    def due(self, view: View) -> Int[Tensor, " B"]:
        """Return how many of the newest rows of attention seen so far will lie in the window of the next burst, if only
        generated tokens follow: 0 if the window begins later.
        """
        n, window = held(view), _flat(self.sizes(view.budget)[0])
        stay = torch.minimum(n, self._stays(view, n))
        # the next burst comes budget + 1 - stay rows later; what the window has beyond these is seen already
        return (stay + (window - _flat(view.budget) - 1)).clamp(min=0)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state with a bit set for each of this step's rows in which a token was insignificant, and with
        their mass added to the sums of this window and of the next one, which restart at their first row.
        """
        window, due = _flat(self.sizes(view.budget)[0]), self.due(view)
        bits = self._new_bits(view)
        found = _of_one_row(report, bits, due) if view.is_decode else report.sums
        # the ring reuses the bit of a row that has left the window: it is cleared before the new row's is set
        words = {name: found[name] + (state[name].int() & ~new) for name, new in bits.items()}
        # a window whose first row is one of this step's has no past: its sum starts anew
        reaches_back = {name: (n > view.new)[:, None, None] for name, n in (("mass", window), ("due", due))}
        return {**state, **words} | {name: found[name] + state["due"] * back for name, back in reaches_back.items()}

    def _new_bits(self, view: View) -> dict[str, Int[Tensor, "B 1 1"]]:
        """Return a mask of the bits that stand for this step's rows, by the name of each word that has some."""
        if view.is_decode:
            found = ring((view.seen - 1).masked_fill(view.new < 1, EMPTY)[:, None], self.words)[:, 0]
        else:
            found = ring_span(view.seen - view.new, view.seen, self.words)
        bits = zip(word_names(self.words), found[:, :, None, None].unbind(dim=1), _are_set(found), strict=True)
        return {name: word for name, word, is_set in bits if is_set}

    def low(self, view: View, state: State) -> Int[Tensor, "B Hk S"]:
        """Return in how many of the last ``window`` rows each token was insignificant, from the bits in the state."""
        window = column(self.sizes(view.budget)[0], view.seen)
        bits = ring_span(view.seen - window, view.seen, self.words)[:, :, None, None].unbind(dim=1)
        counts = [ones(state[name].int() & mine) for name, mine in zip(word_names(self.words), bits, strict=True)]
        return torch.stack(counts).sum(dim=0)


def held(view: View) -> Int[Tensor, " B"]:
    """Return how many tokens each head of a row holds, new ones included. All heads hold the same number."""
    return (view.positions[:, 0] >= 0).sum(dim=-1)


def when_outgrown(view: View, stay: Int[Tensor, "B Hk"]) -> Int[Tensor, "B Hk"]:
    """Return ``stay``, at most the budget, in rows that have seen more tokens than their budget; elsewhere the
    budget.
    """
    limit = column(view.budget, view.seen)[:, None]
    return torch.where(view.seen[:, None] > limit, torch.minimum(stay, limit), limit)


def _of_one_row(
    report: Report, bits: dict[str, Int[Tensor, "B 1 1"]], due: Int[Tensor, " B"]
) -> dict[str, Float[Tensor, "B Hk S"]]:
    """Return the report on a generated token's row in the form of a report on a prompt's window, as a mapping:
    ``mass``; ``due``, which is 0 in rows whose next window has not begun; and under each word's name the new bit of the
    tokens that are low.
    """
    masses = {"mass": report.mass, "due": report.mass * (due > 0)[:, None, None]}
    return masses | {name: report.low * bit for name, bit in bits.items()}


def _are_set(words: Int[Tensor, "B words"]) -> list[bool]:
    """Return for each word whether any row has a bit in it. On a device other than a CPU the answer would cost a
    wait, so it is always ``True``.
    """
    found: list[bool] = [True] * words.shape[1] if words.device.type != "cpu" else words.any(dim=0).tolist()
    return found


def _flat(budget: Budget) -> int | Int[Tensor, " B"]:
    """Return a budget as one number, or as a tensor with one number per row in one axis."""
    return budget.view(-1) if isinstance(budget, Tensor) else budget
