"""The part of a cache that takes snapshots of its rows and puts them back."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from kvkeep.cache.hf_layers import PhasedCache, state_part
from kvkeep.cache.layer import Layer
from kvkeep.cache.token_history import TokenHistory, padded
from kvkeep.errors import InputError, ShapeError, SnapshotError, UnsupportedOperationError
from kvkeep.head_profile import Profile
from kvkeep.policies.base import Policy
from kvkeep.snapshot.contents import blocks_for, check, mine, put, take, whole
from kvkeep.snapshot.fingerprint import Fingerprint, name_of_config, name_of_policy, policy_named
from kvkeep.snapshot.snapshot import CacheSettings, Snapshot, check_kind, checked_row, ids_of_row

_Cache = TypeVar("_Cache", bound="SnapshotCache")


Weights: TypeAlias = Callable[[], str | None]
"""The hash of the weights of the model that feeds a cache; ``None`` if the model is gone."""


class SnapshotCache(PhasedCache):
    """A cache whose rows can be copied out, saved and restored.

    Attributes:
        weights: the weights of the model that has fed the cache; ``None`` before an attached model runs.
        awaited: hash of the weights of a restored snapshot; the next model that feeds the cache must have them.
    """

    policy: Policy
    position_mode: Literal["true", "slot"]
    weights: Weights | None = None
    _profile: Profile | None = None
    awaited: str | None = None
    _settings: CacheSettings
    _history: TokenHistory | None
    _prompt_columns: int

    @abc.abstractmethod
    def bounded_layers(self) -> dict[int, Layer]:
        """The layers with slots, by their number in the model."""

    @abc.abstractmethod
    def _check_whole(self) -> None:
        """Refuse a cache in which a step has not ended, or whose layers have seen different tokens."""

    def snapshot(self, row: int = 0, *, tokens: Any = None) -> Snapshot:
        """Copy the memory of one row. The cache can go on, and the copy stays what it is.

        Args:
            row: which row.
            tokens: ids of the tokens that the row has seen, without padding. By default the ids that the cache has
                recorded: from the first `continue_with` on.

        Raises:
            InputError: there is no such row.
            SnapshotError: nothing is cached yet, or ``tokens`` are not as many as the row has seen.
            BrokenCacheError: a step failed in some layer.
        """
        layers = self._fed_layers()
        row = checked_row(row, len(layers[0].seen))
        blocks = [layer.block for layer in layers]
        contents = take(blocks, row, cascade=self._settings.cascade, states=self._states())
        contents = whole(contents, layers[0].heads)
        ids = self._told(row, contents.seen) if tokens is None else ids_of_row(tokens)
        pending = max(0, self._prompt_columns - layers[0].columns)
        return Snapshot(contents, self._fingerprint(row), ids, pending)

    def restore(self, row: int, snapshot: Snapshot) -> None:
        """Replace the memory of one row by that of a snapshot. Other rows stay as they are.

        A cache that was never fed gets one row for each of its budgets, one if it has a single budget. In a cache with
        one row, this also repairs the damage of a failed step.

        Raises:
            InputError: there is no such row.
            SnapshotError: the snapshot belongs to another model, policy, budget or other settings.
            BrokenCacheError: a step failed in some layer.
        """
        check_kind([snapshot])
        layers = self._slot_layers()
        count = len(layers[0].seen) if layers[0].allocated else len(layers[0].budgets)
        row = checked_row(row, count)
        if count > 1:
            self._check_whole()  # a cache with a single row is mended
        snapshot.fingerprint.check(self._fingerprint(row))
        self._restore({row: snapshot}, count)

    @classmethod
    def from_snapshots(
        cls: type[_Cache], config: Any, snapshots: Sequence[Snapshot], *, policy: Policy | None = None
    ) -> _Cache:
        """A cache whose rows are snapshots, in this order, with the policy, budgets and settings that these have.

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
        made, make = snapshots[0].fingerprint, cast(Callable[..., _Cache], cls)
        cache = make(
            config,
            policy_named(made.policy) if policy is None else policy,
            [snapshot.fingerprint.budget for snapshot in snapshots],
            prefill_chunk=made.chunk,
            layer_budget=made.layer_budget,
            head_budget=made.head_budget,
            positions=made.positions,
            kv_bits=made.kv_bits,
        )
        for row, snapshot in enumerate(snapshots):
            snapshot.fingerprint.check(replace(made, budget=snapshot.fingerprint.budget))
            snapshot.fingerprint.check(cache._fingerprint(row))
        cache._restore(dict(enumerate(snapshots)), len(snapshots))
        return cache

    def feeds(self, weights: Weights) -> None:
        """Note the weights of the model that is about to feed the cache; an attached model calls it itself.

        Raises:
            SnapshotError: the cache holds a snapshot that was made with other weights.
            InputError: so was the profile of the budgets of heads.
        """
        if self._profile is not None:
            self._profile.check_weights(weights)
        if self.awaited is not None and (here := weights()) != self.awaited:
            raise SnapshotError(
                f"The memory in the cache was made with the weights {self.awaited}, and this model has {here}. It "
                "means nothing to this model: load the weights that it was made with, or read the text again."
            )
        self.weights, self.awaited = weights, None

    def _restore(self, rows: Mapping[int, Snapshot], count: int) -> None:
        """Put snapshots into rows of a cache with ``count`` rows. If they do not fit, nothing changes."""
        layers, states = self._slot_layers(), self._states()
        rows = {row: replace(one, contents=mine(one.contents, layers[0].heads)) for row, one in rows.items()}
        told = self._ids_after(rows, count)
        try:
            made = next(iter(rows.values())).fingerprint
            dtype = getattr(torch, made.dtype) if made.dtype else None
            blocks = blocks_for(layers, [snapshot.contents for snapshot in rows.values()], count, dtype=dtype)
            for snapshot in rows.values():
                check(snapshot.contents, blocks, states)
        except ShapeError as error:
            raise SnapshotError(f"The snapshot cannot be used here. {error}") from error
        others = blocks[0].seen.tolist()
        columns = max(rows[row].seen if row in rows else others[row] for row in range(count))
        for layer, block in zip(layers, blocks, strict=True):
            layer.hold(block, columns=columns)
            layer.mend(layers[0].moves)
        for row, snapshot in rows.items():
            put(snapshot.contents, blocks, row, cascade=self._settings.cascade, states=states)
        self._history = None if told is None else _history_of(told, columns, blocks[0].seen.device)
        self._prompt_columns = columns + max(snapshot.pending for snapshot in rows.values())
        if self.weights is None or self.weights() is None:
            self.awaited = next((s.fingerprint.weights for s in rows.values() if s.fingerprint.weights), self.awaited)

    def _ids_after(self, rows: Mapping[int, Snapshot], count: int) -> list[Tensor] | None:
        """The token ids of all rows once snapshots are in some of them; ``None`` if the ids of a row are not known."""
        layer = self._slot_layers()[0]
        seen = layer.seen.tolist() if layer.allocated else [0] * count
        ids = [rows[row].tokens if row in rows else self._told(row, seen[row]) for row in range(count)]
        known = [one for one in ids if one is not None]
        return known if len(known) == count else None

    def _told(self, row: int, seen: int) -> Tensor | None:
        """The recorded ids of the tokens that a row has seen; ``None`` if not all were recorded."""
        if not seen:
            return torch.empty(0, dtype=torch.int32)
        columns, history = self._slot_layers()[0].columns, self._history
        if history is None or history.columns < columns:
            return None
        ids, real = (table[row, :columns] for table in history.table())
        return ids[real].cpu() if int(real.sum()) == seen else None

    def _fingerprint(self, row: int) -> Fingerprint:
        """The model and the settings of one row."""
        layer, made = self._slot_layers()[0], self._settings
        weights = self.awaited if self.weights is None else self.weights()
        return Fingerprint(
            model=name_of_config(made.config),
            config=made.config_hash,
            policy=name_of_policy(self.policy),
            budget=made.budget_of(layer, row),
            layer_budget=made.layer_budget,
            head_budget=made.head_budget,
            dtype=str(layer.store.dtype).removeprefix("torch.") if layer.allocated else None,
            positions=self.position_mode,
            chunk=made.chunk,
            kv_bits=made.kv_bits,
            weights=weights,
        )

    def _slot_layers(self) -> list[Layer]:
        """The layers with slots.

        Raises:
            UnsupportedOperationError: there are none.
        """
        if not (layers := list(self.bounded_layers().values())):
            raise UnsupportedOperationError("This model has no layers with slots, so there is no memory to copy.")
        return layers

    def _fed_layers(self) -> list[Layer]:
        """The layers with slots, all of which have seen the same tokens.

        Raises:
            SnapshotError: nothing is cached yet.
            BrokenCacheError: a step failed in some layer.
        """
        layers = self._slot_layers()
        self._check_whole()
        if not layers[0].columns:
            raise SnapshotError("The cache holds no tokens yet, so there is nothing to copy. Run the model first.")
        return layers

    def _states(self) -> dict[int, object]:
        """The layers with a state, or the state beside a layer's slots, by their number in the model."""
        return {i: state for i, layer in enumerate(self.layers) if (state := state_part(layer)) is not None}


def _history_of(rows: Sequence[Tensor], columns: int, device: torch.device) -> TokenHistory:
    """The token ids of a batch, with padding on the left."""
    ids, real = padded([torch.empty(columns), *rows])
    history = TokenHistory()
    history.add(ids[1:].to(device), real[1:].to(device), held=0)
    return history
