"""A decode step that is told nothing but the new tokens, as long as all else is what it was in the step before."""

from __future__ import annotations

import weakref

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.backends import Repeat
from kvkeep.store import Block
from kvkeep.types import AttentionOptions


class Repeating:
    """The last decode step of a layer. It keeps no memory alive, and copies of it are ``None``: they have other blocks.

    Args:
        call: the step for other tokens.
        options: what the model's attention asked for.
    """

    def __init__(self, call: Repeat, options: AttentionOptions) -> None:
        self._call, self._asked, self._held = call, _asked(options), False

    def hold(self, block: Block) -> None:
        """Note on which block, with one budget for all rows, the step has worked.

        Later calls change nothing: steps of another kind may follow on a block whose tensors have been replaced.
        """
        if self._held:
            return
        self._block, self._store, self._budget = weakref.ref(block), weakref.ref(block.store), block.budget
        self._held = True

    def is_same(
        self,
        block: Block,
        options: AttentionOptions,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
    ) -> bool:
        """Whether a step differs from the last one in its tokens alone."""
        if self._block() is not block or self._store() is not block.store or block.budget != self._budget:
            return False
        return block.pins is None and _asked(options) == self._asked and self._call.takes(query, keys, values)

    def __call__(
        self,
        query: Float[Tensor, "B Hq 1 D"],
        keys: Float[Tensor, "B Hk 1 D"],
        values: Float[Tensor, "B Hk 1 E"],
        positions: Int[Tensor, "B 1"],
    ) -> Float[Tensor, "B Hq 1 E"] | None:
        """Append, attend, observe and evict, see `kvkeep.eviction.fused`."""
        return self._call(query, keys, values, positions)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _asked(options: AttentionOptions) -> tuple[object, ...]:
    return options.scaling, options.window, options.softcap, options.sinks, options.top
