"""Keys and values of a prompt as they were before anything was evicted, so that a longer prompt need not be read whole.

A policy chooses what stays when a prompt has been read. The next prompt of a conversation begins with the same tokens
and ends with another question, for which another choice may be better. With a `PromptKV` only the rest of it is read,
and the policy chooses among all tokens, as it would if everything was read again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvkeep.policies.base import Policy
from kvkeep.types import Slots, State, bytes_of

_MAIN = torch.device("cpu")
_LAST = torch.iinfo(torch.int32).max
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LayerKV:
    """One layer's part of a `PromptKV`.

    Attributes:
        slots: keys, values and positions of the tokens, in order, with one row and one head's positions. Tokens that a
            sliding window has passed may be missing.
        state: the policy's state of these tokens once they were read.
    """

    slots: Slots
    state: State

    def first(self, tokens: int) -> LayerKV:
        """Return the part of the prompt's first ``tokens`` tokens, as far as they are there. Nothing is copied."""
        keys, values, positions = self.slots
        n = int((positions < tokens).sum())
        slots = Slots(keys[:, :, :n], values[:, :, :n], positions[..., :n])
        return LayerKV(slots, {name: x[..., :n] for name, x in self.state.items()})


@dataclass(frozen=True, eq=False)
class PromptKV:
    """The keys and values of a prompt's tokens in all layers with slots, none of them evicted, in main memory.

    Attributes:
        layers: in order.
        tokens: the number of tokens of the prompt.
    """

    layers: tuple[LayerKV, ...]
    tokens: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(bytes_of((*layer.slots, *layer.state.values())) for layer in self.layers)

    @property
    def whole(self) -> bool:
        """Return whether all layers have all tokens, so that it can be cut back to any of its beginnings."""
        return all(layer.slots.keys.shape[2] == self.tokens for layer in self.layers)

    def first(self, tokens: int) -> PromptKV:
        """Return the part of the first ``tokens`` tokens, which must be all of them if it is not `whole`. Nothing is
        copied.
        """
        return self if tokens == self.tokens else PromptKV(tuple(layer.first(tokens) for layer in self.layers), tokens)


def rows_to_read(policy: Policy) -> int | None:
    """Return how many of a prompt's last tokens must be read for a policy to choose among all of them, although the
    others were read before; ``None`` if it needs to see all of them.

    A policy says it by ``end_rows``. For others 1 is enough, if they keep no state and look at no queries.
    """
    if policy.end_rows is not None:
        return policy.end_rows
    # a policy with cascades asks what the layer before says of every token, not of the last row alone
    return None if policy.slots or policy.summaries or policy.asks or policy.cascades else 1


class PromptReading:
    """A prompt that is read into a row: its beginning, which was read before, and what to keep of it.

    Args:
        before: the beginning; ``None``: it has none, or lies in the row.
        nbytes: bytes of main memory that the prompt will take; 0: nothing of it is kept.

    Attributes:
        nbytes: bytes of main memory that are taken, or are about to be.
    """

    def __init__(self, before: PromptKV | None = None, *, nbytes: int = 0) -> None:
        self.before, self.nbytes = before, nbytes
        self._layers: dict[int, LayerKV] = {}

    @property
    def known(self) -> int:
        """Return the number of tokens that were read before, and do not lie in the row."""
        return 0 if self.before is None else self.before.tokens

    def note(self, layer: int, found: LayerKV) -> None:
        """Keep one layer's part of the prompt, in place of an earlier one. Layers with slots are counted from 0."""
        self._layers[layer] = found

    def read(self) -> None:
        """Give up the beginning that was read before: the prompt has been read, so all of it lies in the row."""
        self.before = None

    def give_up(self) -> None:
        """Drop the parts of the prompt that were kept, and keep none any more."""
        self._layers, self.nbytes = {}, 0

    def taken(self, tokens: int, layers: int) -> PromptKV | None:
        """Return the whole prompt as it was read, its known beginning included, and keep neither any longer; ``None``
        if a layer or the prompt's end is missing.

        Args:
            tokens: the length of the prompt.
            layers: number of layers with slots.
        """
        found, self._layers, self.before = self._layers, {}, None
        parts = tuple(found[index] for index in sorted(found))
        # a part that ends before the last token was noted by a run that read less than the whole prompt
        if len(parts) != layers or any(int(part.slots.positions[0, 0, -1]) != tokens - 1 for part in parts):
            return None
        return PromptKV(parts, tokens)


class LayerPrompts:
    """The readings of the rows of a run, as one layer sees them.

    Args:
        layer: the layer's place among those with slots.
        readings: of each row; ``None``: nothing was read before, and nothing is kept. A row with a beginning is alone,
            or all rows have the same one.

    Attributes:
        known: tokens that were read before, and do not lie in the rows.
    """

    def __init__(self, layer: int, readings: Sequence[PromptReading | None]) -> None:
        self._layer, self._readings = layer, readings
        begun = {None if reading is None else reading.before for reading in readings}
        before = begun.pop() if len(begun) == 1 else None
        self._before = None if before is None else before.layers[layer]
        self.known = 0 if before is None else before.tokens

    def beside(self, chunk: Slots) -> Slots:
        """Return the tokens that were read before, repeated for each row and on the chunk's device, followed by a chunk
        of new ones; the chunk itself if none were.
        """
        if self._before is None:
            return chunk
        rows, pairs = len(chunk.keys), zip(self._before.slots, chunk, strict=True)
        both = ((old.to(new.device).expand(rows, *old.shape[1:]), new) for old, new in pairs)
        return Slots(*(torch.cat(parts, dim=2) for parts in both))

    def restore(self, state: State) -> None:
        """Overwrite the state of the tokens that were read before, which come first, with the one that they had then.

        Do nothing if none were.
        """
        if self._before is not None:
            for name, held in self._before.state.items():
                state[name][..., : held.shape[-1]] = held.to(state[name].device)

    def note(self, policy: Policy, slots: Slots, state: State) -> None:
        """Copy all tokens of the rows' prompts, before the policy evicts any of them, into the readings that keep them.

        Where a copy fails, its reading keeps nothing. Where a token was evicted before, the layer's part stays missing.

        Args:
            policy: whose state of slots it is.
            slots: the tokens of a row's slots, followed by those that were just read; padding has no position.
            state: the state after the tokens were observed.
        """
        for row, reading in enumerate(self._readings):
            if reading is None or not reading.nbytes:
                continue
            try:
                found = _copied(policy, slots, state, row)
            except Exception as error:  # most likely there is no memory for a copy: the next turn takes longer
                _log.warning("A prompt was not kept: %r", error)
                reading.give_up()
                continue
            if found is not None:
                reading.note(self._layer, found)


def _copied(policy: Policy, slots: Slots, state: State, row: int) -> LayerKV | None:
    """Return a copy of a row's tokens and their state, in the order of positions and in main memory; ``None`` if the
    heads do not all hold the same tokens, because one was evicted.
    """
    of, heads = slice(row, row + 1), slots.keys.shape[1]
    held = slots.positions[row].expand(heads, -1)
    order = held.masked_fill(held < 0, _LAST).argsort(dim=-1, stable=True)[None]
    there = (held >= 0).sum(dim=-1)
    n = int(there[0])
    order = order[..., :n]
    # if nothing was evicted, all heads have as many tokens as the first one, and the same ones
    if bool((there != n).any()) or bool((held.gather(-1, order[0]) != held[0].gather(0, order[0, 0])).any()):
        return None
    keys, values = (
        x[of].gather(2, order[..., None].expand(-1, -1, -1, x.shape[-1])) for x in (slots.keys, slots.values)
    )
    positions = held[None, :1].gather(-1, order[:, :1])
    kept = {name: state[name][of].expand(-1, heads, -1).gather(-1, order) for name in policy.slots}
    copies = Slots(*(x.to(_MAIN) for x in (keys, values, positions)))
    return LayerKV(copies, {name: x.to(_MAIN) for name, x in kept.items()})
