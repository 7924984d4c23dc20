"""The cache that transformers' models and ``generate`` work with: one `Layer` for each layer of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import BatchEncoding, PreTrainedConfig
from transformers.cache_utils import DynamicCache

from kvkeep.cache.hf_layers import (
    BoundedLayer,
    HandingLayer,
    PhasedCache,
    beside_state,
    handing_part,
    refuse_rollback,
    state_part,
    usual,
)
from kvkeep.cache.layer import Layer
from kvkeep.cache.layer_layout import Layout, caches_latents
from kvkeep.cache.row_snapshot import (
    CacheSettings,
    FeedingWeights,
    RowSnapshots,
    check_has_layers,
    check_kind,
    check_whole,
    checked_row,
    identities,
)
from kvkeep.cache.shared_budget import SharedBudget
from kvkeep.cache.token_history import Decodes, Ids, TokenHistory, device_of, padded, rows_of
from kvkeep.errors import InputError, PolicyError, UnsupportedOperationError
from kvkeep.kv.lost_mass import LostShares, shares
from kvkeep.kv.slot_codec import KeyTransform
from kvkeep.pins import spans_of_rows
from kvkeep.policies import DEFAULT
from kvkeep.policies._keep_prompt import keeping
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import parse
from kvkeep.snapshot.fingerprint import policy_named
from kvkeep.snapshot.snapshot import Snapshot
from kvkeep.types import MemoryUsage, Phase

_Cache = TypeVar("_Cache", bound="BoundedCache")


class BoundedCache(PhasedCache):
    """A KV cache in a fixed amount of memory, for any attached model.

    Args:
        config: the model's configuration. The model must be attached (`kvkeep.attach`) before it is run.
        policy: a policy or its string, e.g. ``"h2o:recent=512"``; by default `kvkeep.policies.DEFAULT`.
        budget: tokens kept per layer and KV head, one number or one per row of the batch. Layers with a sliding
            window keep at most the window.
        prefill_chunk: bounds memory to ``budget + prefill_chunk`` tokens during the prompt; ``None`` takes the whole
            prompt at once. Pass ``prefill_chunk_size`` to ``generate`` too, to bound the model's activations as well.
        sequences: identity of each row for policies with randomness; rows get the same stream if not given.
        layer_budget: how the budget is spread over the layers: ``uniform``, ``ramp:0.2``, ``pyramid:20`` or one weight
            per layer; by default the policy's own rule. See `kvkeep.budget.per_layer`.
        head_budget: how the budget is divided among KV heads: ``uniform``, ``ada:0.2`` (by scores at the end of a
            prompt, within each layer), ``global:0.2`` (over all layers with full attention) or ``profile:FILE`` (by a
            file); by default by the policy's own rule. See ``docs/heads.md``.
        positions: ``true``, or ``slot``: tokens are attended at their rank in the cache, so that a stream may be longer
            than the model's trained length. By default the policy's own mode, where the model allows it.
        kv_bits: bits of keys and values in the slots: ``"8"``, ``"4"`` or ``"k8v4"`` (keys in 8, values in 4). By
            default, and with 16, slots have the model's dtype. See ``docs/quantised.md``.
        pins: spans of positions that no policy may evict, such as ``[(0, 120)]`` for the first 120 tokens (padding not
            counted), or a list of spans for each row. A layer with a sliding window forgets them with the window.
        keep_prompt: ``True``: no token of a prompt is evicted, only generated ones are. A share such as 0.5: the policy
            cuts a prompt to this share of the budget first, and what stays is kept. ``False``: neither; ``None``: as
            the policy's string says, if it does. See `kvkeep.policies._keep_prompt`.

    Raises:
        BudgetError: the budget is out of range or smaller than what the policy, the pins and ``keep_prompt`` protect.
        InputError: ``config`` is no configuration, ``sequences`` are no whole numbers, ``positions`` names no mode,
            ``kv_bits`` no number of bits, or ``pins`` are no spans.
        UnsupportedOperationError: the policy does not work with ``prefill_chunk`` or with sliding windows.
        PolicyError: the policy string is wrong.
        UnsupportedModelError: the model has layers whose cache cannot be bounded.
    """

    def __init__(  # noqa: PLR0913  the choices of a user
        self,
        config: PreTrainedConfig,
        policy: str | Policy = DEFAULT,
        budget: int | Sequence[int] = 1024,
        *,
        prefill_chunk: int | None = None,
        sequences: Sequence[int] | None = None,
        layer_budget: str | Sequence[float] | None = None,
        positions: str | None = None,
        head_budget: str | None = None,
        kv_bits: str | int | None = None,
        pins: Sequence[tuple[int, int]] | Sequence[Sequence[tuple[int, int]]] = (),
        keep_prompt: bool | float | None = None,
    ):
        if not isinstance(config, PreTrainedConfig):
            raise InputError(
                f"BoundedCache takes a model's configuration, not {type(config).__name__}: pass model.config."
            )
        sequences = None if sequences is None else identities(sequences)
        self.policy = parse(policy) if isinstance(policy, str) else policy
        if not isinstance(self.policy, Policy):
            raise PolicyError(f"{policy!r} is neither a policy nor the name of one.")
        self.policy = keeping(self.policy, keep_prompt)
        self.budget = budget
        spread: dict[str, Any] = {"layer_budget": layer_budget, "head_budget": head_budget}
        rules: dict[str, Any] = {"prefill_chunk": prefill_chunk, "positions": positions, "kv_bits": kv_bits}
        layout = Layout.of(config, self.policy, **rules, **spread)
        self.policy = layout.policy  # with `head_budget` applied to it
        self._first = min(layout.windows, default=0)  # with it a step begins; layers before it have no slots
        pinned = spans_of_rows(pins)
        together = SharedBudget.by_layer(layout.sharing)
        layers: list[Any] = DynamicCache(config=config).layers
        before: Layer | None = None
        each = zip(layout.windows.items(), layout.policies, layout.spread(budget), strict=True)
        for (number, window), own, numbers in each:
            bounded = Layer(
                own,
                numbers,
                index=number,
                window=window,
                prefill_chunk=prefill_chunk,
                sequences=sequences,
                rotation=layout.rotations.get(number) if layout.positions == "slot" else None,
                before=before,
                together=together.get(number),
                pins=pinned,
                kv_bits=layout.kv_bits,
                checked=True,
            )
            bounded.rotary = layout.rotations.get(number) if layout.undoes else None
            bounded.heads, before = layout.heads, bounded  # only policies that prune through the layers follow `before`
            layers[number] = beside_state(BoundedLayer(bounded), layers[number])
        super().__init__(layers=layers)
        self.latent = caches_latents(config)
        self._history = TokenHistory()
        self.row_snapshots = RowSnapshots(CacheSettings.of(config, budget, layout, prefill_chunk), self._history)

    def continue_with(
        self, ids: Ids, attention_mask: Tensor | None = None, *, tokenizer: Decodes | None = None
    ) -> BatchEncoding:
        """Compare a whole conversation with the tokens that the cache holds, and return the model inputs for the new
        tokens.

        ``model(**cache.continue_with(ids))`` and ``model.generate(**cache.continue_with(ids))`` feed the new tokens
        only, as a prompt. From its first call on, the cache records the ids of all tokens that an attached model feeds.

        Args:
            ids: token ids of the whole conversation: one row or several, or a tokenizer's output.
            attention_mask: 0 where a token of ``ids`` is padding.
            tokenizer: decodes the text around the first difference, for the error.

        Returns:
            ``input_ids`` (the new tokens, with padding on the left), ``attention_mask`` (over all columns that the
            cache has seen, and these), ``position_ids`` of the new tokens, and the cache under the name that
            transformers gives it. The tensors are on the device of ``ids``; for lists, on that of the slots.

        Raises:
            InputError: the conversation does not begin with the tokens that the cache has seen, or has no token beyond
                them; the ids of some of these are not known; or ``ids`` are no token ids, or do not fit the mask.
            ShapeError: the batch has another number of rows.
            BrokenCacheError: a step failed in some layer.

        Cost:
            5 bytes for each token, padding included, on the device of the ids that are fed.
        """
        self._check_whole()
        held, history = self._columns, self._history
        if history.columns < held:
            raise InputError(
                f"The cache holds {held} tokens, and the ids of {held - history.columns} are not known: they were fed "
                "before the first continue_with, or past an attached model. Call reset() and begin with continue_with, "
                "or call cache.note(ids) before each run."
            )
        history.forget_after(held)
        rest, real = padded(history.rest_of(rows_of(ids, attention_mask), tokenizer))
        history.records, history.prompt_columns = True, held + rest.shape[1]
        all_real = torch.cat([history.table()[1].cpu(), real], dim=1) if held else real
        # padding has no position, and 0 is one that every model has
        places = (all_real.cumsum(dim=1) - 1).clamp(min=0)[:, held:]
        inputs = {"input_ids": rest, "attention_mask": all_real.long(), "position_ids": places}
        return BatchEncoding({**inputs, usual(): self}).to(device_of(ids, self._device))

    def note(self, ids: Int[Tensor, "B T"], attention_mask: Tensor | None = None) -> None:
        """Record the ids of tokens that are about to be fed. Before the first `continue_with`, do nothing.

        An attached model calls this method itself.

        Args:
            ids: the token ids.
            attention_mask: 0 where a column is padding, of all columns or of the new ones; ``None``: nowhere. One of
                more than two axes is not looked at.
        """
        if self._history.records:
            real = torch.ones_like(ids, dtype=torch.bool)
            # a mask of more axes says which tokens see each other, and not which are padding
            if attention_mask is not None and attention_mask.ndim == 2:
                real = attention_mask[:, -ids.shape[1] :].to(ids.device).bool()
            self._history.add(ids, real, held=self._columns)

    @property
    def records(self) -> bool:
        """Return whether token ids are recorded, which begins with the first `continue_with`."""
        return self._history.records

    def phase_at(self, columns: int) -> Phase | None:
        """Return `Phase.PREFILL` while ``columns`` lies within a prompt that `continue_with` has returned; else
        ``None``.
        """
        return Phase.PREFILL if columns < self._history.prompt_columns else None

    def reset(self) -> None:
        """Empty all slots and forget the token ids. The same memory is used again where `Layer.reset` allows it."""
        super().reset()  # type: ignore[no-untyped-call]
        self._history.clear()
        self.row_snapshots.awaited = None

    def reorder_cache(self, beam_idx: Int[Tensor, " B"]) -> None:
        """Replace row ``i`` by what row ``beam_idx[i]`` was, for all rows (beam search)."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]  # annotated there as a LongTensor
        self._history.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, next to itself."""
        super().batch_repeat_interleave(repeats)
        if self._history.rows:
            self._history.select_rows(torch.arange(self._history.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Int[Tensor, " n"]) -> None:
        """Keep only the rows ``indices``, in that order. An index may occur several times."""
        super().batch_select_indices(indices)
        self._history.select_rows(indices)

    @property
    def _columns(self) -> int:
        """Return the number of columns that all layers have seen, padding included."""
        first = self.bounded_layers().get(self._first)
        return first.columns if first else 0

    @property
    def _device(self) -> torch.device:
        """Return the device of the slots; the CPU before the first step and in a model without slots."""
        first = self.bounded_layers().get(self._first)
        return first.seen.device if first and first.allocated else torch.device("cpu")

    def _check_whole(self) -> None:
        """Refuse to go on after a step that failed half way, see `check_whole`."""
        check_whole(self.bounded_layers().values())

    def bounded_layers(self) -> dict[int, Layer]:
        """Return the layers with slots, by their number in the model. State-space and linear layers are left out."""
        parts = enumerate(map(handing_part, self.layers))
        return {i: part.layer for i, part in parts if isinstance(part, BoundedLayer)}

    @property
    def position_mode(self) -> str:
        """Return ``true``, or ``slot`` if tokens are attended at their rank in the cache."""
        return self.row_snapshots.settings.positions

    @property
    def weights(self) -> FeedingWeights | None:
        """Return the weights of the model that has fed the cache; ``None`` before an attached model has run."""
        return self.row_snapshots.weights

    def feeds(self, weights: FeedingWeights) -> None:
        """Note which weights are about to feed the cache, and refuse others than those of a restored snapshot. An
        attached model calls this method itself.

        Raises:
            SnapshotError: the cache holds a snapshot that was made with other weights.
            InputError: the profile of the heads' budgets was made with other weights.
        """
        self.row_snapshots.feeds(weights)

    def transform_keys(self, transforms: Mapping[int, KeyTransform]) -> None:
        """Set what is done to keys of 4 bits before they are coded, by layer number. An attached model calls it.

        Rows that hold tokens keep theirs.
        """
        layers = self.bounded_layers()
        for number in layers.keys() & transforms.keys():
            layers[number].transform_keys(transforms[number])

    def check_adapters(self) -> None:
        """Refuse to go on if the model's adapters were switched since the cache was last fed. An attached model calls
        this method itself.

        Raises:
            SnapshotError: the cache holds tokens that were read with other adapters.
            UnsupportedOperationError: each row has an adapter of its own.
        """
        self.row_snapshots.check_adapters(fresh=self.get_seq_length() == 0)

    def snapshot(self, row: int = 0, *, tokens: Any = None) -> Snapshot:
        """Return a copy of the memory of one row, which later steps of the cache do not change.

        Args:
            row: the row's index.
            tokens: ids of the tokens that the row has seen, without padding. By default the ids that the cache has
                recorded: from the first `continue_with` on.

        Raises:
            InputError: there is no such row, or ``tokens`` are no ids of one row.
            SnapshotError: nothing is cached yet, ``tokens`` are not as many as the row has seen, or adapters were
                switched since.
            BrokenCacheError: a step failed in some layer.
            UnsupportedOperationError: no layer has slots, or it is not known any more which budget the row has.
        """
        return self.row_snapshots.take(list(self.bounded_layers().values()), self._states(), row, tokens)

    def restore(self, row: int, snapshot: Snapshot) -> None:
        """Replace the memory of one row by that of a snapshot. Other rows stay as they are.

        A cache that was never fed gets one row for each of its budgets, one if it has a single budget. In a cache with
        one row, this also repairs the damage of a failed step.

        Raises:
            InputError: there is no such row.
            SnapshotError: the snapshot belongs to another model, policy, budget or other settings.
            BrokenCacheError: a step failed in some layer of a cache with several rows.
            UnsupportedOperationError: no layer has slots, or it is not known any more which budget the row has.
        """
        check_kind([snapshot])
        layers = list(self.bounded_layers().values())
        check_has_layers(layers)
        rows = len(layers[0].seen) if layers[0].allocated else len(layers[0].budgets)
        row = checked_row(row, rows)
        if rows > 1:
            check_whole(layers)  # a cache with a single row is mended
        snapshot.fingerprint.check(self.row_snapshots.fingerprint(layers[0], row))
        self.row_snapshots.put(layers, self._states(), {row: snapshot}, rows)

    @classmethod
    def from_snapshots(
        cls: type[_Cache], config: Any, snapshots: Sequence[Snapshot], *, policy: Policy | None = None
    ) -> _Cache:
        """Return a cache whose rows are snapshots, in this order, with their policy, budgets and settings.

        Feed it with `continue_with`, which knows how far each row is. Without recorded token ids, give the model an
        ``attention_mask`` in which shorter rows have padding on the left.

        Args:
            config: the model's configuration.
            snapshots: the rows. A snapshot may be given several times.
            policy: the policy itself, where its string alone does not name it.

        Raises:
            InputError: there are no snapshots.
            SnapshotError: they have different settings, or belong to another model.
        """
        if not snapshots:
            raise InputError("There are no snapshots to make rows of; give at least one.")
        check_kind(snapshots)
        made = snapshots[0].fingerprint
        cache = cls(
            config,
            policy_named(made.policy) if policy is None else policy,
            [snapshot.fingerprint.budget for snapshot in snapshots],
            prefill_chunk=made.chunk,
            layer_budget=made.layer_budget,
            head_budget=made.head_budget,
            positions=made.positions,
            kv_bits=made.kv_bits,
        )
        layers = list(cache.bounded_layers().values())
        for row, snapshot in enumerate(snapshots):
            # rows of one cache may differ in their budgets, and in nothing else
            snapshot.fingerprint.check(replace(made, budget=snapshot.fingerprint.budget))
            check_has_layers(layers)
            # `config` may be that of another model than the one that the snapshots name
            snapshot.fingerprint.check(cache.row_snapshots.fingerprint(layers[0], row))
        cache.row_snapshots.put(layers, cache._states(), dict(enumerate(snapshots)), len(snapshots))
        return cache

    def _states(self) -> dict[int, object]:
        """Return each layer's state (alone or beside slots), by the layer's number in the model."""
        return {i: state for i, layer in enumerate(self.layers) if (state := state_part(layer)) is not None}

    def positions(self, layer: int = 0) -> Int[Tensor, "B Hk capacity"]:
        """Return the true position of the token in each slot of a layer, -1 for an empty slot.

        The tensor is live: do not change it. Where heads have budgets of their own it is a copy.

        Args:
            layer: the layer's number in the model.

        Raises:
            UnsupportedOperationError: the layer has no slots, or nothing has been cached yet.
        """
        bounded = self.bounded_layers().get(layer)
        if bounded is None or not bounded.allocated:
            raise UnsupportedOperationError(
                f"Layer {layer} holds no slots yet. Run the model once, and ask for one of the layers "
                f"{list(self.bounded_layers())}."
            )
        return bounded.store.positions

    def lost_mass(self) -> dict[int, LostShares]:
        """Return the share of attention mass that evicted tokens carried, by the layer's number in the model, for each
        row and KV head; see `LostMass`. Before the first step the mapping is empty.
        """
        layers = {number: layer for number, layer in self.bounded_layers().items() if layer.allocated}
        return {number: shares(layer.block.lost) for number, layer in layers.items()}

    def memory(self) -> MemoryUsage:
        """Return the memory usage of all layers with slots, summed over real tensors."""
        return sum((layer.memory() for layer in self.bounded_layers().values()), MemoryUsage())

    def begin(self, layer_idx: int) -> HandingLayer | None:
        """Prepare a layer for new tokens: set their phase, and return the layer, or ``None`` if it has no slots.

        With the first layer a step begins: refuse one after a failed step.

        Raises:
            BrokenCacheError: the previous step failed in some layer, so the layers have seen different tokens.
        """
        if layer_idx == self._first:
            self._check_whole()
        return super().begin(layer_idx)

    def activate_past_recording(self) -> None:
        """Refuse assisted decoding, which would have to roll the cache back.

        Raises:
            UnsupportedOperationError: always.
        """
        refuse_rollback()

    def __repr__(self) -> str:
        return f"BoundedCache(policy='{self.policy}', budget={self.budget}, layers={len(self.layers)})"
