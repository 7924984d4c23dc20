"""What the prefill kernels take, from tensors: tiles, strides, and which parts of the work they may leave out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kvkeep.backends.triton import blocks, prefill_tiles, switch
from kvkeep.statistic import Nothing, Statistic
from kvkeep.types import AttentionOptions

TORCH_ROWS = 1024
"""From so many rows on torch's attention computes the output of a prompt; shorter ones are not worth a look for
padding."""

TORCH_SHARE = 4
"""All rows' log-sum-exp comes with our output; torch's is used where less than a 4th of the rows count."""


@dataclass(frozen=True, eq=False)
class Prefill:
    """One call's tensors, and the kernels on them.

    Attributes:
        query: with a dense last axis, like keys and values.
        keys: the last ``T`` are the queries' own.
        values: the keys' values.
        query_positions: -1 for padding.
        key_positions: -1 for empty; for all heads, or the same for all.
        options: of the model's attention.
    """

    query: Float[Tensor, "B Hq T D"]
    keys: Float[Tensor, "B Hk S D"]
    values: Float[Tensor, "B Hk S E"]
    query_positions: Int[Tensor, "B T"]
    key_positions: Int[Tensor, "B #Hk S"]
    options: AttentionOptions

    def prefers_torch(self, statistic: Statistic) -> bool:
        """Whether torch's attention is likely to be the faster one, the log-sum-exp of the counted rows included."""
        T = self.query.shape[2]
        few = isinstance(statistic, Nothing) or (
            isinstance(statistic.rows, int) and 0 <= statistic.rows * TORCH_SHARE <= T
        )
        return few and T >= TORCH_ROWS and self.query.is_cuda and self._flashes() and self.fits_torch()

    def _flashes(self) -> bool:
        """Whether torch has flash attention for this; otherwise it would make the whole matrix of probabilities."""
        half = self.query.dtype in (torch.bfloat16, torch.float16)
        return half and self.query.shape[-1] == self.values.shape[-1]

    def fits_torch(self) -> bool:
        """Whether columns are positions, for all that torch's attention knows is a causal mask over columns."""
        plain = self.options.window is None and self.options.softcap is None and self.options.sinks is None
        if not plain or self.query.shape[2] != self.keys.shape[2]:
            return False
        if self.query.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        columns = torch.arange(self.query.shape[2], device=self.query.device)
        return bool((self.query_positions == columns).all() & (self.key_positions == columns).all())

    def by_torch(self) -> Float[Tensor, "B Hq T E"]:
        """The output of torch's attention, which chooses among its own kernels."""
        return scaled_dot_product_attention(
            self.query, self.keys, self.values, is_causal=True, scale=self.options.scaling, enable_gqa=True
        )

    def forward(self) -> tuple[Float[Tensor, "B Hq T E"], Float[Tensor, "B Hq T"]]:
        """Output and log-sum-exp, in base 2, of all rows, sinks included."""
        B, Hq, T, _ = self.query.shape
        out = self.query.new_empty((B, Hq, T, self.values.shape[-1]))
        lse = torch.empty((B, Hq, T), dtype=torch.float32, device=self.query.device)
        self._run_forward(out, lse, sinks=self.options.sinks, gain=None, bounds=None)
        return out, lse

    def log_sum_exp(
        self, bounds: Int[Tensor, "B 2"], gain: Float[Tensor, " B"] | None = None
    ) -> Float[Tensor, "B Hq T"]:
        """Log-sum-exp of the rows within bounds, infinite elsewhere; under a gain without the sinks."""
        lse = torch.full(self.query.shape[:3], torch.inf, dtype=torch.float32, device=self.query.device)
        self._run_forward(None, lse, sinks=self.options.sinks if gain is None else None, gain=gain, bounds=bounds)
        return lse

    def columns(
        self,
        lse: Float[Tensor, "B Hq T"],
        weights: Float[Tensor, "B T"],
        bounds: Int[Tensor, "B 2"],
        *,
        gain: Float[Tensor, " B"] | None = None,
        shares: Float[Tensor, "B #Hk T"] | None = None,
    ) -> Float[Tensor, "fields B Hk S"]:
        """Weighed sums of the probabilities of each key; with ``shares`` a second field, see `prefill.columns`."""
        from kvkeep.backends.triton import prefill  # imports Triton

        B, Hk, S, D = self.keys.shape
        Hq, T = self.query.shape[1:3]
        tile = prefill_tiles.columns(D, self.query)
        count, pieces = _ceil(S, tile.slots), _ceil(T, tile.rows) * (Hq // Hk if shares is None else 1)
        splits = min(pieces, prefill_tiles.splits(count * Hk, self.query))
        sums = torch.empty((splits, 1 if shares is None else 2, B, Hk, S), dtype=torch.float32, device=lse.device)
        share = weights if shares is None else shares.float().contiguous()
        share_strides = (0, 0) if shares is None else (share.stride(0), share.stride(1) if share.shape[1] > 1 else 0)
        window = self.options.window
        with torch.cuda.device_of(self.query):
            prefill.columns[(count * B * Hk, splits)](
                *(self.query, self.keys, lse, weights.contiguous(), share, _or(gain, lse), bounds),
                bounds if window is None else self._last_rows(tile.slots, window),
                *(self.query_positions, self.key_positions, sums),
                *(*self.query.stride()[:3], *self.keys.stride()[:3], *self._position_strides(), *share_strides),
                *(count, Hk, T, S, window or 0, *self._factors()),
                **self._shapes(tile, GAINED=gain is not None, LOW=shares is not None),
            )
        return sums[0] if splits == 1 else sums.sum(dim=0)

    def visible(self) -> Int[Tensor, "B #Hk T"]:
        """How many keys each row sees, sliding windows aside."""
        ordered = self.key_positions.sort(dim=-1).values.long()
        rows = self.query_positions[:, None].expand(-1, ordered.shape[1], -1).long().contiguous()
        return torch.searchsorted(ordered, rows, right=True) - (ordered < 0).sum(dim=-1, keepdim=True)

    def _run_forward(
        self,
        out: Tensor | None,
        lse: Float[Tensor, "B Hq T"],
        *,
        sinks: Float[Tensor, " Hq"] | None,
        gain: Float[Tensor, " B"] | None,
        bounds: Int[Tensor, "B 2"] | None,
    ) -> None:
        from kvkeep.backends.triton import prefill  # imports Triton

        B, Hq, T, D = self.query.shape
        E, S, window = self.values.shape[-1], self.keys.shape[2], self.options.window
        tile = prefill_tiles.forward(max(D, E), self.query)
        count = _ceil(T, tile.rows)
        with torch.cuda.device_of(self.query):
            prefill.forward[(count * B * Hq,)](
                *(self.query, self.keys, self.values, _or(out, lse), lse, _or(sinks, lse), _or(gain, lse)),
                *(_or(bounds, lse), lse if window is None else self._first_slots(tile.rows, window)),
                *(self.query_positions, self.key_positions),
                *(
                    *self.query.stride()[:3],
                    *self.keys.stride()[:3],
                    *self.values.stride()[:3],
                    *_or(out, lse).stride()[:3],
                ),
                *(*self._position_strides(), count, Hq, T, S, window or 0, *self._factors()),
                **self._shapes(tile, GAINED=gain is not None, E=E, BLOCK_E=blocks.power(E)),
                SUNK=sinks is not None,
                MIXED=out is not None,
                BOUNDED=bounds is not None,
            )

    def _shapes(self, tile: prefill_tiles.Tile, **more: int) -> dict[str, Any]:
        """What the kernels are compiled for."""
        D = self.query.shape[-1]
        return {
            "G": self.query.shape[1] // self.keys.shape[1],
            "D": D,
            "BLOCK_D": blocks.power(D),
            "BLOCK_T": tile.rows,
            "BLOCK_S": tile.slots,
            "CAPPED": self.options.softcap is not None,
            "WINDOWED": self.options.window is not None,
            "WIDE": switch.interprets(),
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            **more,
        }

    def _factors(self) -> tuple[float, float]:
        """``inner`` and ``outer`` of `prefill.visible_logits`."""
        if self.options.softcap is None:
            return self.options.scaling * math.log2(math.e), 1.0
        return self.options.scaling / self.options.softcap, self.options.softcap * math.log2(math.e)

    def _position_strides(self) -> tuple[int, int, int]:
        k = self.key_positions
        return self.query_positions.stride(0), k.stride(0), k.stride(1) if k.shape[1] > 1 else 0

    def _first_slots(self, rows: int, window: int) -> Int[Tensor, "B tiles"]:
        """Column of the first key of the chunk that the window of any row of each tile of rows still holds."""
        q = self.query_positions
        T = q.shape[1]
        oldest = (
            pad(q.masked_fill(q < 0, 2**31 - 1), (0, -T % rows), value=2**31 - 1).view(len(q), -1, rows).amin(dim=-1)
        )
        found = torch.searchsorted(_rising(q), (oldest - window).contiguous(), right=True)
        return (found + self.keys.shape[2] - T).to(torch.int32)

    def _last_rows(self, slots: int, window: int) -> Int[Tensor, "B Hk tiles"]:
        """The row after the last that sees any of each tile of keys through the window."""
        B, Hk, S, _ = self.keys.shape
        newest = pad(self.key_positions, (0, -S % slots), value=-1).unflatten(-1, (-1, slots)).amax(dim=-1)
        limit = (newest.long() + window - 1).flatten(1)
        found = torch.searchsorted(_rising(self.query_positions), limit.contiguous(), right=True).view_as(newest)
        return found.expand(B, Hk, -1).to(torch.int32).contiguous()


def _rising(queries: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Positions in which padding repeats the row before it, so that they never fall."""
    return queries.long().cummax(dim=1).values.contiguous()


def _ceil(n: int, block: int) -> int:
    return -(-n // block)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer for an argument that the kernel was told not to look at."""
    return other if tensor is None else tensor
