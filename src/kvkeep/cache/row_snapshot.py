"""The part of a cache that takes snapshots of its rows and puts them back."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvkeep.budget import by_head, check_rows, largest
from kvkeep.cache.layer import Layer
from kvkeep.cache.layer_layout import Layout
from kvkeep.cache.token_history import TokenHistory, rows_of
from kvkeep.errors import BrokenCacheError, InputError, ShapeError, SnapshotError, UnsupportedOperationError
from kvkeep.head_profile import Profile
from kvkeep.kv.block import Block
from kvkeep.kv.pooled_store import PooledStore
from kvkeep.kv.row_copy import RowCopy
from kvkeep.kv.store import inference
from kvkeep.policies.base import Policy
from kvkeep.snapshot.contents import Contents, check, mine, put, take, whole
from kvkeep.snapshot.fingerprint import Fingerprint, hash_of_config, name_of_config, name_of_policy, rule
from kvkeep.snapshot.snapshot import Snapshot


@runtime_checkable
class FeedingWeights(Protocol):
    """The weights of the model that feeds a cache."""

    def __call__(self) -> str | None:
        """Return the hash of the weights; ``None`` if the model is gone."""

    def adapters(self) -> str | None:
        """Return the state of the model's adapters, empty without adapters; ``None`` if the model is gone."""


@dataclass(frozen=True)
class CacheSettings:
    """The arguments that a cache was made with, as far as its snapshots need them.

    Attributes:
        config: the model's configuration.
        policy: the policy.
        budgets: one number, or one per row.
        layer_budget: rule by which the budget is spread over the layers, or one weight per layer.
        head_budget: rule by which heads share a layer's budget; ``None``: the policy's own.
        positions: ``true`` or ``slot``.
        chunk: tokens of the prompt that are taken at once.
        kv_bits: bits of keys and values in the slots; ``None``: the model's dtype.
        profile: the profile of the budgets of heads, if there is one.
    """

    config: Any
    policy: Policy
    budgets: tuple[int, ...]
    layer_budget: str | tuple[float, ...]
    head_budget: str | None
    positions: Literal["true", "slot"]
    chunk: int | None
    kv_bits: str | None
    profile: Profile | None

    @functools.cached_property
    def config_hash(self) -> str:
        """Return the hash of the configuration, computed on first use."""
        return hash_of_config(self.config)

    @classmethod
    def of(cls, config: Any, budget: int | Sequence[int], layout: Layout, chunk: int | None) -> CacheSettings:
        """Gather the arguments of a cache as its snapshots need them, with numbers of any library as Python's own.

        Args:
            config: the model's configuration.
            budget: the cache's budget, one number or one per row.
            layout: has the policy and the rules.
            chunk: the cache's ``prefill_chunk``.

        Raises:
            BudgetError: the budget is out of range, or no whole numbers.
        """
        return cls(
            config=config,
            policy=layout.policy,
            budgets=check_rows(budget),
            layer_budget=rule(layout.layer_budget),
            head_budget=layout.head_budget,
            positions=layout.positions,
            chunk=None if chunk is None else int(chunk),
            kv_bits=layout.kv_bits,
            profile=layout.profile,
        )

    def budget_of(self, layer: Layer, row: int) -> int:
        """Return the budget, tokens per layer and head, that the user gave a row, even if rows were selected since.

        Args:
            layer: the cache's first layer.
            row: the row's index.

        Raises:
            UnsupportedOperationError: rows with budgets of their own were selected, and it is not clear which is whose.
        """
        if len(set(self.budgets)) == 1:
            return self.budgets[0]
        if not layer.moves:
            return self.budgets[row]
        # selected rows have taken their budgets along, by whose sum each of them is recognised
        heads, sum_of_row = layer.store.positions.shape[1], layer.block.budget_of(row)
        sums = map(sum, by_head(layer.budgets, heads))
        candidates = {budget for budget, total in zip(self.budgets, sums, strict=True) if total == sum_of_row}
        if len(candidates) != 1:
            raise UnsupportedOperationError(
                "Rows with budgets of their own were selected, and it is not known any more which budget this row has."
            )
        return candidates.pop()


class RowSnapshots:
    """What a cache knows of the memory in its rows: the settings, the model's weights, the ids of the tokens.

    It has no layers of its own: the cache hands them to each call, so that a copy of a cache never reaches the
    layers of the original.

    Args:
        settings: the arguments of the cache.
        history: the ids of the tokens that the cache was fed; it belongs to the cache.

    Attributes:
        weights: the weights of the model that has fed the cache; ``None`` before an attached model runs.
        awaited: hash of the weights of a restored snapshot; the next model that feeds the cache must have them.
    """

    def __init__(self, settings: CacheSettings, history: TokenHistory) -> None:
        self.settings, self._history = settings, history
        self.weights: FeedingWeights | None = None
        self.awaited: str | None = None
        self._adapters: str | None = None  # when the cache was fed; none before

    def take(self, layers: Sequence[Layer], states: Mapping[int, object], row: int, tokens: Any) -> Snapshot:
        """Return a snapshot of one row: a copy of its memory in all layers, with settings and token ids.

        Args:
            layers: the layers with slots.
            states: the layers with a state, by their number in the model.
            row: the row's index.
            tokens: ids of the tokens that the row has seen; ``None``: the recorded ones, if all are.

        Raises:
            KVKeepError: see `BoundedCache.snapshot`.
        """
        check_has_layers(layers)
        check_whole(layers)
        if not layers[0].columns:
            raise SnapshotError("The cache holds no tokens yet, so there is nothing to copy. Run the model first.")
        self.check_adapters()
        row = checked_row(row, len(layers[0].seen))
        contents = take([layer.block for layer in layers], row, states=states)
        contents = whole(contents, layers[0].heads)  # with the heads of other processes
        ids = self._recorded_ids(layers[0], row, contents.seen) if tokens is None else ids_of_row(tokens)
        # of a prompt that `continue_with` has announced, and of which a part was fed
        pending = max(0, self._history.prompt_columns - layers[0].columns)
        return Snapshot(contents, self.fingerprint(layers[0], row), ids, pending)

    def put(
        self, layers: Sequence[Layer], states: Mapping[int, object], snapshots: Mapping[int, Snapshot], rows: int
    ) -> None:
        """Overwrite rows of a cache with snapshots, and the recorded token ids with theirs. If one does not fit,
        nothing changes.

        Without a model that has fed the cache, the next one must have the weights of the snapshots. All layers count as
        intact then.

        Args:
            layers: the layers with slots.
            states: the layers with a state, by their number in the model.
            snapshots: the new memory of some rows, by their number.
            rows: number of rows of the cache.

        Raises:
            SnapshotError: the snapshots do not fit the layers; or other rows stay, and adapters were switched since.
        """
        self.check_adapters(fresh=len(snapshots) == rows)
        heads = layers[0].heads
        snapshots = {row: replace(copy, contents=mine(copy.contents, heads)) for row, copy in snapshots.items()}
        # asked first, since it depends on what the rows have seen until now
        ids = self._ids_after(layers[0], snapshots, rows)
        try:
            made = next(iter(snapshots.values())).fingerprint
            dtype = getattr(torch, made.dtype) if made.dtype else None
            blocks = blocks_for(layers, [snapshot.contents for snapshot in snapshots.values()], rows, dtype=dtype)
            for snapshot in snapshots.values():
                check(snapshot.contents, blocks, states)
        except ShapeError as error:
            raise SnapshotError(f"The snapshot cannot be used here. {error}") from error
        # tokens of an announced prompt that the rows that stay have not been fed yet
        stays = max(0, self._history.prompt_columns - layers[0].columns) if len(snapshots) < rows else 0
        seen = blocks[0].seen.tolist()
        # as if the rows had been fed together, with padding in front of the shorter ones
        columns = max(snapshots[row].seen if row in snapshots else seen[row] for row in range(rows))
        for layer, block in zip(layers, blocks, strict=True):
            layer.hold(block, columns=columns)
            # layers that do not agree on their moves count as left half way
            layer.mend(layers[0].moves)
        for row, snapshot in snapshots.items():
            put(snapshot.contents, blocks, row, states=states)
        for layer in layers:
            layer.find_lead()
        self._history.begin_again(ids, columns=columns, device=blocks[0].seen.device)
        self._history.prompt_columns = columns + max([stays, *(snapshot.pending for snapshot in snapshots.values())])
        # no model has fed the cache yet, or it is gone; the next one is checked when it comes
        if self.weights is None or self.weights() is None:
            known = (snapshot.fingerprint.weights for snapshot in snapshots.values())
            self.awaited = next(filter(None, known), self.awaited)

    def feeds(self, weights: FeedingWeights) -> None:
        """Note which weights are about to feed the cache, and refuse others than those of the restored memory.

        Raises:
            SnapshotError: the cache holds a snapshot that was made with other weights.
            InputError: the profile of the heads' budgets was made with other weights.
        """
        if self.settings.profile is not None:
            self.settings.profile.check_weights(weights)
        if self.awaited is not None and (here := weights()) != self.awaited:
            raise SnapshotError(
                f"The memory in the cache was made with the weights {self.awaited}, and this model has {here}. It "
                "means nothing to this model: load the weights that it was made with, or read the text again."
            )
        self.weights, self.awaited = weights, None

    def check_adapters(self, *, fresh: bool = False) -> None:
        """Refuse to go on with a memory if the model's adapters were switched since; otherwise note how they are now.

        Do nothing before an attached model has fed the cache.

        Args:
            fresh: whether nothing in the cache is older than this call.

        Raises:
            SnapshotError: the memory belongs to other adapters.
            UnsupportedOperationError: each row has an adapter of its own.
        """
        if self.weights is None or (here := self.weights.adapters()) is None:
            return
        if not fresh and self._adapters is not None and here != self._adapters:
            raise SnapshotError(
                "The model's adapters were switched, scaled, or turned on or off after it had read the tokens in the "
                "cache. They mean nothing to it now: switch back, or begin again with reset() or a new cache."
            )
        self._adapters = here

    def fingerprint(self, layer: Layer, row: int) -> Fingerprint:
        """Return the fingerprint of one row: model, policy, budget and settings. ``layer`` is the cache's first one."""
        made = self.settings
        return Fingerprint(
            model=name_of_config(made.config),
            config=made.config_hash,
            policy=name_of_policy(made.policy),
            budget=made.budget_of(layer, row),
            layer_budget=made.layer_budget,
            head_budget=made.head_budget,
            dtype=str(layer.store.dtype).removeprefix("torch.") if layer.allocated else None,
            positions=made.positions,
            chunk=made.chunk,
            kv_bits=made.kv_bits,
            # of a restored memory that no model has fed yet: the weights that it was made with
            weights=self.awaited if self.weights is None else self.weights(),
        )

    def _ids_after(self, layer: Layer, snapshots: Mapping[int, Snapshot], rows: int) -> list[Tensor] | None:
        """Return the token ids of all rows, without padding, as they will be once these snapshots are in place;
        ``None`` if those of any row are unknown.
        """
        seen = layer.seen.tolist() if layer.allocated else [0] * rows
        ids = [
            snapshots[row].tokens if row in snapshots else self._recorded_ids(layer, row, seen[row])
            for row in range(rows)
        ]
        known = [row_ids for row_ids in ids if row_ids is not None]
        return known if len(known) == rows else None

    def _recorded_ids(self, layer: Layer, row: int, seen: int) -> Tensor | None:
        """Return the ids of the ``seen`` tokens that a row has seen, without padding, on the CPU; ``None`` if not all
        were recorded.
        """
        if not seen:
            return torch.empty(0, dtype=torch.int32)
        columns, history = layer.columns, self._history
        if history.columns < columns:
            return None
        ids, real = (table[row, :columns] for table in history.table())
        return ids[real].cpu() if int(real.sum()) == seen else None


def check_whole(layers: Iterable[Layer]) -> None:
    """Refuse layers of which one has a step that failed half way, or which have not all made the same steps.

    Raises:
        BrokenCacheError: a step has not ended in some layer, or the layers have seen different numbers of columns or
            had their rows selected different numbers of times.
    """
    layers = list(layers)
    if any(layer.broken for layer in layers):
        raise BrokenCacheError("a step failed between its beginning and its end")
    if len({(layer.columns, layer.moves) for layer in layers}) > 1:
        raise BrokenCacheError("a step, or a selection of rows, ended between two layers")


def check_has_layers(layers: Sequence[Layer]) -> None:
    """Refuse a cache without layers that have slots.

    Raises:
        UnsupportedOperationError: there are no layers.
    """
    if not layers:
        raise UnsupportedOperationError("This model has no layers with slots, so there is no memory to copy.")


def check_kind(snapshots: Sequence[object]) -> None:
    """Refuse objects that are no snapshots.

    Raises:
        InputError: an object is no `Snapshot`.
    """
    for given in snapshots:
        if not isinstance(given, Snapshot):
            raise InputError(f"{type(given).__name__} is no Snapshot; cache.snapshot and Snapshot.load return one.")


def checked_row(row: object, rows: int) -> int:
    """Return a row's index as a Python integer, after checking its range.

    Raises:
        InputError: there is no such row.
    """
    try:
        number = operator.index(row)  # type: ignore[arg-type]
    except TypeError:
        number = -1  # refused below, with the same message
    if not 0 <= number < rows:
        raise InputError(f"row={row!r:.40} is not one of the cache's rows, 0 to {rows - 1}.")
    return number


def ids_of_row(tokens: Any) -> Tensor:
    """Return the token ids of one row as an int32 tensor, after checking them.

    Raises:
        InputError: ``tokens`` are those of several rows, or no ids.
    """
    try:
        (row,) = rows_of(tokens, None)
    except (InputError, ValueError):
        row = torch.tensor([-1])  # refused below, with the same message
    if bool(((row < 0) | (row >= 2**31)).any()):
        raise InputError(f"tokens={tokens!r:.60} are not the token ids of one row.")
    return row.int()


def identities(sequences: Sequence[int]) -> list[int]:
    """Return the identities of rows, from which their random numbers come, as Python integers of 64 bits.

    Raises:
        InputError: ``sequences`` are no whole numbers of 64 bits.
    """
    try:
        numbers = list(map(operator.index, sequences))
    except TypeError:
        numbers = [2**63]  # refused below, with the same message
    if not all(-(2**63) <= number < 2**63 for number in numbers):
        raise InputError(f"sequences={sequences!r:.60} is no list of whole numbers below 2^63, one per row.")
    return numbers


# Blocks with room for rows that are put into them.


@inference
def new_block(
    layer: Layer,
    copies: Sequence[RowCopy],
    rows: int,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Block:
    """Allocate an empty block for a layer, with the slots that the layer's budgets need. It is not yet the layer's own.

    Args:
        layer: a layer without a block.
        copies: what will be put into the block; the first one gives the shapes.
        rows: rows of the block.
        device: where the block shall be; by default the first copy's device.
        dtype: the model's, which quantized slots do not show.

    Raises:
        ShapeError: the copies come from a store that is not the default one, or there is no memory for the block.
    """
    tensors = copies[0].tensors
    if not {"store.keys", "store.values"} <= tensors.keys():
        raise ShapeError("Rows of another store than the default one need a cache that holds such a store already.")
    keys, values = (tensor.to(device).expand(rows, -1, -1, -1) for tensor in layer.plan.like(copies[0], dtype))
    budget = largest(layer.budgets)
    try:
        block = layer.new_block(keys, values)
        _widen(block, layer, copies)
    except (MemoryError, RuntimeError) as error:
        raise ShapeError(f"There is no memory for {rows} rows with a budget of {budget} tokens.") from error
    return block


def _widen(block: Block, layer: Layer, copies: Sequence[RowCopy]) -> None:
    """Give a block as many slots per head as the copied blocks had, at most what its budget allows; never fewer than
    it has.

    Do nothing to a pool, which has room for every division of the budget already.
    """
    if not isinstance(block.store, PooledStore):
        # + 1: a decode step writes its token before it evicts another one
        block.widen(min(largest(layer.budgets) + 1, max(copy.capacity for copy in copies)))


@inference
def blocks_for(
    layers: Sequence[Layer], contents: Sequence[Contents], rows: int, *, dtype: torch.dtype | None = None
) -> list[Block]:
    """Return a block for each layer with enough slots for the contents: the layer's own, widened if need be, or a new
    one.

    A new block is not yet the layer's own.

    Args:
        layers: the layers with slots.
        contents: what will be put in.
        rows: rows of a new block.
        dtype: the model's, for a new block with quantized slots.

    Raises:
        ShapeError: the contents have another number of layers, or a new block cannot be made.
    """
    blocks = []
    for i, layer in enumerate(layers):
        copies = [copy.layers[i] for copy in contents if len(copy.layers) == len(layers)]
        if len(copies) < len(contents):
            raise ShapeError(f"It does not have {len(layers)} layers with slots, as this model has.")
        if not layer.allocated:
            blocks.append(new_block(layer, copies, rows, dtype=dtype))
            continue
        # + 1: a decode step writes its token before it evicts another one
        if any(max(copy.used, copy.most + 1) > layer.block.store.capacity for copy in copies):
            _widen(layer.block, layer, copies)
        blocks.append(layer.block)
    return blocks
