"""Attention of many query rows on a GPU: which kernels run, what they take, and how the report is put together.

The output is one pass of `prefill.forward`, or torch's own attention where it can compute it and is preferred. The
report is `prefill.columns` over the rows that count. Nothing here waits for the device, except one check for padding
before torch's attention is used, where the caller has not said that there is none (`kvkeep.types.Fresh`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad, scaled_dot_product_attention

from kvkeep.attention_stats import Low, LowRows, Mass, MassAndLast, Nothing, Statistic
from kvkeep.backends.base import AttentionInputs
from kvkeep.backends.triton import launch
from kvkeep.types import AttentionOptions, Fresh, Report, Slots

# Torch's own causal attention, and the log-sum-exp of its rows where torch has it.
#
# Torch has the numbers from its fused kernels, under operators that are not part of its public interface. So they are
# tried once for each device and kind of kernel, against the definition; where they do not give what they should, or do
# not exist, there is no log-sum-exp, and our kernel works it out.

LOG2E = math.log2(math.e)
MOST_WRONG = 1e-3
"""Largest error of a log-sum-exp of the trial, in half precision: a wrong base or layout errs by far more."""


def causal(
    query: Float[Tensor, "B Hq T D"], keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T D"], scaling: float
) -> tuple[Float[Tensor, "B Hq T D"], Float[Tensor, "B Hq T"] | None]:
    """Compute a whole prompt's causal attention with torch. Return the output, and for each row the logarithm in base 2
    of its sum of exponentials; ``None`` in its place if torch does not give it.
    """
    kind = _kind(query, keys, values, scaling)
    if kind is not None and _is_right(kind, query.device, query.dtype):
        out, lse = _CALLS[kind](query, keys, values, scaling)
        return out, lse.reshape(query.shape[:3]) * LOG2E
    return _plain(query, keys, values, scaling), None


def gives_sums(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> bool:
    """Return whether `causal` also gives the log-sum-exp, and by cuDNN, which is faster than kvkeep's kernel."""
    kind = _kind(query, keys, values, scaling)
    return kind == SDPBackend.CUDNN_ATTENTION.value and _is_right(kind, query.device, query.dtype)


def _plain(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Return causal attention by the fastest of torch's kernels."""
    out: Tensor = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
    return out


def _kind(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> int | None:
    """Return the number in `SDPBackend` of the kernel that torch would choose; ``None`` if it does not give the
    log-sum-exp, or torch does not tell.
    """
    choice = getattr(torch, "_fused_sdp_choice", None)
    if choice is None or not query.is_cuda:
        return None
    try:
        found = int(choice(query, keys, values, is_causal=True, scale=scaling, enable_gqa=True))
    except (RuntimeError, TypeError):  # no kernel takes these tensors, or this version of torch asks for others
        return None
    return found if found in _CALLS else None


def _by_cudnn(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return causal attention by cuDNN, and the log-sum-exp of each query head and row, to base e."""
    # only torch's private operators return the log-sum-exp, which the report needs
    # then: no bias, the log-sum-exp, no dropout, causal, no debug mask
    call = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = call(query, keys, values, None, True, 0.0, True, False, scale=scaling)
    return out, lse


def _by_flash(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return causal attention by torch's flash attention, and the log-sum-exp of each query head and row, to base e."""
    # then: no dropout, causal, no debug mask
    call = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = call(query, keys, values, 0.0, True, False, scale=scaling)
    return out, lse


_CALLS: dict[int, Callable[[Tensor, Tensor, Tensor, float], tuple[Any, Any]]] = {
    SDPBackend.CUDNN_ATTENTION.value: _by_cudnn,
    SDPBackend.FLASH_ATTENTION.value: _by_flash,
}


@functools.cache
def _is_right(kind: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether one of `_CALLS` runs and its log-sum-exp is right and in natural logarithms, as a trial shows that
    is made once.

    The host waits for the trial.
    """
    with torch.inference_mode(), torch.random.fork_rng([]):
        generator = torch.Generator().manual_seed(0)
        query, keys, values = (
            torch.randn((1, heads, 128, 64), generator=generator).to(device, dtype) for heads in (4, 2, 2)
        )
        try:
            out, lse = _CALLS[kind](query, keys, values, 0.1)
        except (AttributeError, RuntimeError, TypeError, ValueError):  # another version of torch
            return False
        if lse.numel() != 4 * 128 or out.shape != query.shape:
            return False
        logits = query.float() @ keys.float().repeat_interleave(2, dim=1).mT * 0.1
        hidden = torch.ones(128, 128, dtype=torch.bool, device=device).triu(1)
        want = logits.masked_fill(hidden, -math.inf).logsumexp(dim=-1)
        return bool(((lse.reshape(want.shape) - want).abs() <= MOST_WRONG).all())


Output = Literal["auto", "torch", "triton"]
TORCH_ROWS = 1024
"""The fewest rows for which torch's attention may compute the output; fewer are not worth the check for padding."""
TORCH_SHARE = 4
"""Where torch does not give the log-sum-exp, it computes the output only if at most a 4th of the rows count."""


def attend(inputs: AttentionInputs, *, output: Output = "auto") -> tuple[Float[Tensor, "B Hq T E"], Report] | None:
    """Compute `Backend.attend` for a prefill; return ``None``, and log why, if no kernel can do it, see `unknown`.

    ``output`` says who computes the output. ``triton``: our kernel. ``torch``: torch's attention where it can, for a
    whole prompt without padding, soft cap, sinks and window, else our kernel. ``auto``: torch's where it can, in half
    precision on a GPU, if the prompt is long, and few rows count or cuDNN also gives the log-sum-exp of all rows.

    Cost:
        see `prefill.forward` and `prefill.columns`; with a gain on the logits, or torch's output without the
        log-sum-exp, the logits of the counted rows once more. Extra memory: the sums, and a number per query head and
        row.
    """
    query, slots, now, options, statistic = inputs
    if (reason := unknown(query, slots, statistic, options)) is not None:
        launch.notice(reason)
        return None
    query, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, slots.keys, slots.values))
    found = (query, keys, values, now.contiguous(), slots.positions.contiguous())
    work = Prefill(*found, options, fresh=isinstance(slots, Fresh))
    if work.fits_torch() if output == "torch" else output == "auto" and work.prefers_torch(statistic):
        out, lse = causal(query, keys, values, options.scaling)
    else:
        out, lse = work.forward()
    return out, Report(_sums(work, statistic, lse))


def unknown(query: Tensor, slots: Slots, statistic: Statistic, options: AttentionOptions) -> str | None:
    """Return why the kernels cannot compute this attention; ``None`` if they can."""
    if options.top is not None:
        return "attention to the largest probabilities only"
    if type(statistic) not in (Nothing, Low, LowRows, Mass, MassAndLast):
        return f"the statistic {type(statistic).__name__}"
    if isinstance(statistic, Mass) and statistic.noise is not None:
        return "noise on the logits"
    if slots.values.shape[-1] < launch.MIN_DIM:
        return f"values of fewer than {launch.MIN_DIM} channels"
    return launch.misfit(query, slots.keys, slots.values)


def _sums(work: Prefill, statistic: Statistic, lse: Tensor | None) -> dict[str, Float[Tensor, "B Hk S"]]:
    """Compute the statistic's fields; ``lse`` is the log-sum-exp of all rows under the model's softmax, if known."""
    if isinstance(statistic, Nothing):
        return {}
    queries = work.query_positions
    selected = statistic.selects(queries)
    bounds = bounds_of(selected)
    gain = _gain(statistic, queries) if isinstance(statistic, Mass) else None
    if gain is not None or lse is None:  # a gain makes another softmax, with sums of its own
        lse = work.log_sum_exp(bounds, gain)
    if isinstance(statistic, Low):
        n = work.visible() if statistic.live else (queries + 1)[:, None]
        if isinstance(statistic, LowRows):
            return _rows(work, statistic, lse, shares=n * statistic.theta)
        fields = work.columns(lse, selected.float(), bounds, shares=n * statistic.theta)
        return {"mass": fields[0], "low": fields[1]}
    mass = cast(Mass, statistic)
    (found,) = work.columns(lse, mass.weights(selected, queries), bounds, gain=gain)
    if not isinstance(statistic, MassAndLast):
        return {"mass": found}
    newest = selected & (queries == torch.as_tensor(statistic.last, device=queries.device).view(-1, 1))
    (last,) = work.columns(lse, mass.weights(newest, queries), bounds_of(newest), gain=gain)
    return {"mass": found, "last": last}


def _gain(statistic: Mass, queries: Int[Tensor, "B T"]) -> Float[Tensor, " B"] | None:
    """Return the statistic's factor on the logits for each row of the batch; ``None`` if it is 1 for all."""
    if isinstance(statistic.gain, float) and statistic.gain == 1.0:
        return None
    return torch.as_tensor(statistic.gain, dtype=torch.float32, device=queries.device).expand(len(queries)).contiguous()


def _rows(
    work: Prefill, statistic: LowRows, lse: Tensor, *, shares: Float[Tensor, "B #Hk T"]
) -> dict[str, Float[Tensor, "B Hk S"]]:
    """Return the fields of `LowRows`, each summed over its own rows.

    The sums set different bits of a word, so they are exact in any order.
    """
    weights = statistic.weights(statistic.selects(work.query_positions), work.query_positions)
    found = {name: work.columns(lse, rows, bounds_of(rows != 0), shares=shares) for name, rows in weights.items()}
    return {name: sums[0] if name in ("mass", "due") else sums[1] for name, sums in found.items()}


def bounds_of(selected: Bool[Tensor, "B T"]) -> Int[Tensor, "B 2"]:
    """Return the first of the counted rows and the one after the last; ``(T, 0)`` if no row counts."""
    T = selected.shape[1]
    rows = torch.arange(T, dtype=torch.int32, device=selected.device)
    first = torch.where(selected, rows, T).amin(dim=1)
    end = torch.where(selected, rows + 1, 0).amax(dim=1)
    return torch.stack([first, end], dim=1)


@dataclass(frozen=True, eq=False)
class Prefill:
    """The tensors of one call, and the kernels on them.

    Attributes:
        query: dense in the last axis, like keys and values.
        keys: the last ``T`` are the queries' own.
        values: values of the keys.
        query_positions: -1 for padding.
        key_positions: -1 for empty slots; per head, or one for all heads.
        options: of the model's attention.
        fresh: whether the keys are known to be the queries' own, without padding.
    """

    query: Float[Tensor, "B Hq T D"]
    keys: Float[Tensor, "B Hk S D"]
    values: Float[Tensor, "B Hk S E"]
    query_positions: Int[Tensor, "B T"]
    key_positions: Int[Tensor, "B #Hk S"]
    options: AttentionOptions
    fresh: bool = False

    def prefers_torch(self, statistic: Statistic) -> bool:
        """Return whether torch's attention can compute the output of this prompt, and is likely faster than kvkeep's
        kernel, including the extra work for the report.
        """
        T, rows = self.query.shape[2], 0 if isinstance(statistic, Nothing) else statistic.rows
        few = isinstance(rows, int) and 0 <= rows * TORCH_SHARE <= T  # -1: all rows count
        if T < TORCH_ROWS or not self.query.is_cuda or not self._flashes():
            return False
        sums = gives_sums(self.query, self.keys, self.values, self.options.scaling)
        return (few or sums) and self.fits_torch()

    def _flashes(self) -> bool:
        """Return whether torch's flash attention takes dtype and head dims; else it would build the whole matrix."""
        return self.query.dtype in (torch.bfloat16, torch.float16) and self.query.shape[-1] == self.values.shape[-1]

    def fits_torch(self) -> bool:
        """Return whether torch's attention can compute the output: there is no window, soft cap or sink, and the keys
        are the queries' own at positions 0, 1, 2 ..., as torch's mask is causal over columns. Without ``fresh`` a GPU
        is waited for; while a graph is captured the answer then is ``False``.
        """
        plain = self.options.window is None and self.options.softcap is None and self.options.sinks is None
        if not plain or self.query.shape[2] != self.keys.shape[2]:
            return False
        # while a graph is captured, the host cannot wait for the answer
        if self.fresh or (self.query.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self.fresh
        columns = torch.arange(self.query.shape[2], device=self.query.device)
        return bool((self.query_positions == columns).all() & (self.key_positions == columns).all())

    def forward(self) -> tuple[Float[Tensor, "B Hq T E"], Float[Tensor, "B Hq T"]]:
        """Return output and log-sum-exp, in base 2, of all rows, sinks included."""
        out = self.query.new_empty((*self.query.shape[:3], self.values.shape[-1]))
        lse = torch.empty(self.query.shape[:3], dtype=torch.float32, device=self.query.device)
        self._run_forward(out, lse, sinks=self.options.sinks)
        return out, lse

    def log_sum_exp(self, bounds: Int[Tensor, "B 2"], gain: Float[Tensor, " B"] | None) -> Float[Tensor, "B Hq T"]:
        """Return the log-sum-exp (base 2) of the logits that each query within ``bounds`` sees.

        Tiles of queries outside of the bounds stay infinite. With a gain, sinks are left out.
        """
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
        """Return for each key the sum over rows of the group's mean probability, weighted; with ``shares`` also a
        weighted count of the rows that give it little.

        Args:
            lse: log-sum-exp of the rows in base 2, under the gain if there is one.
            weights: weight of each row, not below 0.
            bounds: the first row with a weight and the one after the last, see `bounds_of`; others are not read.
            gain: see `log_sum_exp`.
            shares: a row gives a key little if the key's mean probability is below 1 over this number.
        """
        from kvkeep.backends.triton import prefill  # imports Triton

        B, Hk, S, D = self.keys.shape
        Hq, T = self.query.shape[1:3]
        tile, window = launch.columns_tile(D, self.query), self.options.window
        # little is judged by the mean of a group, so with shares a piece has all query heads of the group
        count, pieces = -(-S // tile.slots), -(-T // tile.rows) * (Hq // Hk if shares is None else 1)
        # more would have nothing to do; without the batch size, since a row's bits must not depend on other rows
        splits = min(pieces, launch.splits(count * Hk, self.query))
        sums = torch.empty((splits, 1 if shares is None else 2, B, Hk, S), dtype=torch.float32, device=lse.device)
        oldest = self._oldest(tile.rows)
        share = weights if shares is None else shares.float().contiguous()
        share_strides = (0, 0) if shares is None else (share.stride(0), share.stride(1) if share.shape[1] > 1 else 0)
        with torch.cuda.device_of(self.query):
            prefill.columns[(count * B * Hk, splits)](
                *(self.query, self.keys, lse, weights.contiguous(), share, _or(gain, lse), bounds),
                bounds if window is None else _where_flat(gain, T, self._last_rows(tile.slots, window)),
                *(oldest, self.query_positions, self.key_positions, sums),
                *(*self.query.stride()[:3], *self.keys.stride()[:3], *self._position_strides(), *share_strides),
                *(count, oldest.shape[1], Hk, T, S, window or 0, *self._factors()),
                **self._shapes(tile, GAINED=gain is not None, LOW=shares is not None),
            )
        return sums[0] if splits == 1 else sums.sum(dim=0)

    def visible(self) -> Int[Tensor, "B #Hk T"]:
        """Return the number of occupied slots that are not after each query row, so sliding windows aside."""
        ordered = self.key_positions.sort(dim=-1).values.long()
        rows = self.query_positions[:, None].expand(-1, ordered.shape[1], -1).long().contiguous()
        return torch.searchsorted(ordered, rows, right=True) - (ordered < 0).sum(dim=-1, keepdim=True)

    def _run_forward(
        self,
        out: Tensor | None,
        lse: Float[Tensor, "B Hq T"],
        *,
        sinks: Float[Tensor, " Hq"] | None,
        gain: Float[Tensor, " B"] | None = None,
        bounds: Int[Tensor, "B 2"] | None = None,
    ) -> None:
        """Run `prefill.forward`, which fills ``out`` (if given) and ``lse``; with ``bounds`` only in tiles of rows that
        touch them.
        """
        from kvkeep.backends.triton import prefill  # imports Triton

        (B, Hq, T, D), S, E, window = self.query.shape, *self.values.shape[2:], self.options.window
        tile = launch.forward_tile(max(D, E), self.query)
        count = -(-T // tile.rows)
        strides = (tensor.stride()[:3] for tensor in (self.query, self.keys, self.values, _or(out, lse)))
        with torch.cuda.device_of(self.query):
            prefill.forward[(count * B * Hq,)](
                *(self.query, self.keys, self.values, _or(out, lse), lse, _or(sinks, lse), _or(gain, lse)),
                _or(bounds, lse),
                lse if window is None else _where_flat(gain, 0, self._first_slots(tile.rows, window)),
                *(self.query_positions, self.key_positions),
                *(stride for three in strides for stride in three),
                *(*self._position_strides(), count, Hq, T, S, window or 0, *self._factors()),
                **self._shapes(tile, GAINED=gain is not None, E=E, BLOCK_E=launch.power(E)),
                SUNK=sinks is not None,
                MIXED=out is not None,
                BOUNDED=bounds is not None,
            )

    def _shapes(self, tile: launch.Tile, **more: int) -> dict[str, Any]:
        """Return the arguments for which kernels are compiled, those of the tile among them, and ``more`` of them."""
        return {
            "G": self.query.shape[1] // self.keys.shape[1],
            "D": self.query.shape[-1],
            "BLOCK_D": launch.power(self.query.shape[-1]),
            "BLOCK_T": tile.rows,
            "BLOCK_S": tile.slots,
            "CAPPED": self.options.softcap is not None,
            "WINDOWED": self.options.window is not None,
            "WIDE": launch.interprets(),
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            **more,
        }

    def _factors(self) -> tuple[float, float]:
        """Return ``inner`` and ``outer`` of `prefill.logits`: the factor of products, and the soft cap, both so that
        logits are to base 2.
        """
        scaling, cap = self.options.scaling, self.options.softcap
        return (scaling * LOG2E, 1.0) if cap is None else (scaling / cap, cap * LOG2E)

    def _position_strides(self) -> tuple[int, int, int]:
        """Return the strides of query and key positions; 0 along heads that share them."""
        k = self.key_positions
        return self.query_positions.stride(0), k.stride(0), k.stride(1) if k.shape[1] > 1 else 0

    def _first_slots(self, rows: int, window: int) -> Int[Tensor, "B tiles"]:
        """Return for each tile of ``rows`` queries the column, in `keys`, of the first key of the chunk that is in the
        window of any of them. Keys that were held before stand in columns before the chunk.
        """
        found = torch.searchsorted(_rising(self.query_positions), self._oldest(rows) - window, right=True)
        return (found + self.keys.shape[2] - self.query.shape[2]).to(torch.int32)

    def _oldest(self, rows: int) -> Int[Tensor, "B tiles"]:
        """Return the first position in each tile of rows; a tile without one gets a number above all positions."""
        q, T = self.query_positions, self.query_positions.shape[1]
        padded = pad(q.masked_fill(q < 0, 2**31 - 1), (0, -T % rows), value=2**31 - 1)
        return padded.view(len(q), -1, rows).amin(dim=-1)

    def _last_rows(self, slots: int, window: int) -> Int[Tensor, "B Hk tiles"]:
        """Return for each tile of keys the row after the last one that sees any of its keys through the window.

        It is found by the positions of rows. A tile without keys counts as one whose newest key has position -1.
        """
        B, Hk, S, _ = self.keys.shape
        newest = pad(self.key_positions, (0, -S % slots), value=-1).unflatten(-1, (-1, slots)).amax(dim=-1)
        limit = (newest.long() + window - 1).flatten(1)
        found = torch.searchsorted(_rising(self.query_positions), limit.contiguous(), right=True).view_as(newest)
        return found.expand(B, Hk, -1).to(torch.int32).contiguous()


def _rising(queries: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Return positions that never fall: a padded query repeats the position of the query before it."""
    return queries.long().cummax(dim=1).values.contiguous()


def _where_flat(gain: Float[Tensor, " B"] | None, limit: int, limits: Int[Tensor, "B *n"]) -> Int[Tensor, "B *n"]:
    """Return the limits of the tiles that are read, but ``limit`` in rows with a gain of 0: to those no key is behind
    a window, see `prefill.widened`.
    """
    return limits if gain is None else limits.masked_fill((gain == 0).view(-1, *(1,) * (limits.ndim - 1)), limit)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return the tensor, or another one as a stand-in for an argument that the kernel does not read."""
    return other if tensor is None else tensor
