"""A decode step that is told nothing but the new tokens, as long as all else is what it was in the step before."""

from __future__ import annotations

import weakref

from kvkeep.backends import Repeat
from kvkeep.kv.block import Block
from kvkeep.types import AttentionOptions


class Repeating:
    """The last decode step of a layer. It keeps no memory alive, and copies of it are ``None``: they have other blocks.

    Args:
        call: the step for other tokens.
        options: what the model's attention asked for.

    Attributes:
        call: appends, attends, observes and evicts, see `kvkeep.eviction.fused`.
    """

    def __init__(self, call: Repeat, options: AttentionOptions) -> None:
        self.call, self._asked, self._held = call, _asked(options), False

    def hold(self, block: Block) -> None:
        """Note on which block, with one budget for all rows, the step has worked.

        Later calls change nothing: steps of another kind may follow on a block whose tensors have been replaced.
        """
        if self._held:
            return
        self._block, self._store, self._budget = weakref.ref(block), weakref.ref(block.store), block.budget
        self._seen = weakref.ref(block.seen)  # a kernel writes it
        self._held = True

    def is_same(self, block: Block, options: AttentionOptions) -> bool:
        """Whether a step on this block with these options may differ from the last one in its tokens alone."""
        if self._block() is not block or self._store() is not block.store or block.budget != self._budget:
            return False
        if self._seen() is not block.seen:
            return False
        return block.pins is None and _asked(options) == self._asked

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _asked(options: AttentionOptions) -> tuple[object, ...]:
    return options.scaling, options.window, options.softcap, options.sinks, options.top
