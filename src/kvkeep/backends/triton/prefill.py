"""Triton kernels for many query rows: attention with its log-sum-exp, and column sums of its probabilities.

Layout: queries ``(B, Hq, T, D)``, keys ``(B, Hk, S, D)`` and values ``(B, Hk, S, E)`` with any strides but a dense last
axis; positions ``(B, T)`` and ``(B, Hk or 1, S)``. The last ``T`` keys are the queries' own in their order, so keys
after ``S - T + t`` are in the future of row ``t``, and tiles of them are not read. Positions decide everything else.

Logits and their log-sum-exp are float32 in base 2, also in memory: ``exp2`` is the hardware's, and a row that sees
one key gives it a probability of exactly 1. With ``u = 2**-24`` and ``A = scaling · max Σ_d |q_d k_d|``, a logit is
off by at most ``ε = (D + 16)·u·A``; a soft cap does not enlarge this, but adds ``4·u·softcap``. A probability is off
by a factor of ``1 ± 2·(ε + (log2 S + |lse| + 4)·u)`` to first order. Nothing is added atomically, so equal inputs give
equal bits.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from kvkeep.backends.triton.decode import finite, product

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(2**31 - 1)
PRECISION = tl.constexpr("tf32x3")
"""Float32 enters the matrix units as three parts of 11 bits; ``ieee`` would keep whole tiles in registers."""


@triton.jit
@no_type_check
def load_rows(start, rows, stride, n, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Load vectors, ``(BLOCK, BLOCK_DIM)``: those of `rows`; 0 for rows from `n` on and dims from `DIM` on."""
    dims = tl.arange(0, BLOCK_DIM)
    inside = (rows < n)[:, None] & (dims < DIM)[None, :]
    lines = rows.to(tl.int64) * stride  # a prompt of 64 heads passes 2^31 elements at 262 144 tokens
    return tl.load(start + lines[:, None] + dims[None, :], mask=inside, other=0.0)


@triton.jit
@no_type_check
def load_positions(start, slots, S):
    """Load the positions of keys. An empty slot gets a position after every query's, so that no query sees it."""
    positions = tl.load(start + slots, mask=slots < S, other=-1).to(tl.int32)
    return tl.where(positions < 0, NEVER, positions)


@triton.jit
@no_type_check
def visible_logits(
    q, k, queries, keys, inner, outer, window, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Compute the logits of a tile to base 2, with minus infinity where the key is hidden from the query."""
    return shown(logits(q, k, inner, outer, CAPPED, WIDE), queries, keys, window, WINDOWED)


@triton.jit
@no_type_check
def logits(q, k, inner, outer, CAPPED: tl.constexpr, WIDE: tl.constexpr):
    """Compute the logits of a tile to base 2, without masking hidden keys."""
    x = product(q, tl.trans(k), WIDE, PRECISION) * inner
    if CAPPED:  # tanh by exp2; beyond 15 it is 1 in float32
        twice = tl.minimum(tl.maximum(x, -15.0), 15.0) * (2.0 * LOG2E)
        x = outer - 2.0 * outer / (tl.exp2(twice) + 1.0)
    return x


@triton.jit
@no_type_check
def shown(x, queries, keys, window, WINDOWED: tl.constexpr):
    """Return ``x`` where the query sees the key, and minus infinity elsewhere."""
    seen = keys[None, :] <= queries[:, None]
    if WINDOWED:
        seen = seen & (keys[None, :] > queries[:, None] - window)
    return tl.where(seen, x, float("-inf"))


@triton.jit
@no_type_check
def strengthened(inner, outer, gain, CAPPED: tl.constexpr):
    """Return `inner` and `outer` of `logits` for logits that are multiplied by ``gain`` after the soft cap, if there is
    one.
    """
    if CAPPED:
        outer = outer * gain
    else:
        inner = inner * gain
    return inner, outer


@triton.jit
@no_type_check
def widened(window, gain):
    """Return the window, or one that hides nothing at a gain of 0: a key behind it then counts as the others do, as 0
    to the power of 0 in `attention_stats.Mass`.
    """
    return tl.where(gain == 0.0, NEVER, window)


@triton.jit
@no_type_check
def forward(
    query, keys, values, out, lse, sinks, gain, bounds, starts, q_positions, k_positions,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_t, qp_b, kp_b, kp_h,
    tiles, Hq, T, S, window, inner, outer,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SUNK: tl.constexpr, GAINED: tl.constexpr, MIXED: tl.constexpr,
    BOUNDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the output (``MIXED``) and the log-sum-exp, in base 2, of every row by online softmax over tiles of
    keys.

    One program does ``BLOCK_T`` rows of a query head; the last rows, which see most, start first. A row that sees
    nothing gives zeros and minus infinity. ``GAINED`` multiplies the logits. Without ``MIXED`` values are not read.
    With ``BOUNDED`` only tiles that touch the rows ``bounds[b]`` are done; so the report gets the normaliser of a
    softmax that the model does not use.

    Bytes: queries and output once; keys and values once per ``BLOCK_T`` rows, from the second-level cache where heads
    of a group or tiles of rows run side by side. FLOPs: ``2·B·Hq·T·(S - T/2)·(D + E)``.
    Error: the output errs by the error of the probabilities (see the module) times the largest value. Half precision
    rounds each unnormalised probability once more, by ``2**-8`` (bfloat16) or ``2**-11`` of it, before the product.
    """
    tile, head = tiles - 1 - tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = head // Hq, head % Hq
    if BOUNDED:  # noqa: SIM102  the compiler decides it, not the device
        if (tile * BLOCK_T >= tl.load(bounds + 2 * b + 1)) | ((tile + 1) * BLOCK_T <= tl.load(bounds + 2 * b)):
            return
    wide_b, wide_h, wide_k = b.to(tl.int64), h.to(tl.int64), (h // G).to(tl.int64)
    rows = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    q = load_rows(query + wide_b * q_b + wide_h * q_h, rows, q_t, T, BLOCK_T, D, BLOCK_D)
    queries = tl.load(q_positions + b * qp_b + rows, mask=rows < T, other=-1).to(tl.int32)
    key_at, value_at = keys + wide_b * k_b + wide_k * k_h, values + wide_b * v_b + wide_k * v_h
    positions_at = k_positions + wide_b * kp_b + wide_k * kp_h
    end = tl.minimum(S, S - T + (tile + 1) * BLOCK_T)
    steps, before, jump = tl.cdiv(end, BLOCK_S), 0, 0
    if WINDOWED:  # skip tiles of the chunk that lie before the window of all rows
        before = tl.cdiv(S - T, BLOCK_S)
        jump = tl.maximum(tl.load(starts + b * tiles + tile) // BLOCK_S - before, 0)
        steps -= jump
    if GAINED:
        power = tl.load(gain + b)
        inner, outer = strengthened(inner, outer, power, CAPPED)
        window = widened(window, power)
    top = tl.full([BLOCK_T], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    if SUNK:
        top = tl.zeros([BLOCK_T], tl.float32) + tl.load(sinks + h).to(tl.float32) * LOG2E
        total += 1.0  # the sink's own weight, 2^(top - top)
    mixed = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for step in range(steps):
        at = step
        if WINDOWED:
            at = tl.where(step >= before, step + jump, step)
        slots = at * BLOCK_S + tl.arange(0, BLOCK_S)
        k = load_rows(key_at, slots, k_s, S, BLOCK_S, D, BLOCK_D)
        x = visible_logits(
            q, k, queries, load_positions(positions_at, slots, S), inner, outer, window, CAPPED, WINDOWED, WIDE
        )
        higher = tl.maximum(top, tl.max(x, 1))
        base = finite(higher)
        p = tl.exp2(x - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        if MIXED:
            v = load_rows(value_at, slots, v_s, S, BLOCK_S, E, BLOCK_E)
            mixed = mixed * fade[:, None] + product(p.to(v.dtype), v, WIDE, PRECISION)
        top = higher
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(lse + (wide_b * Hq + wide_h) * T + rows, top + tl.log2(total), mask=rows < T)
    if MIXED:
        dims = tl.arange(0, BLOCK_E)
        target = out + wide_b * o_b + wide_h * o_h + rows.to(tl.int64)[:, None] * o_t + dims[None, :]
        tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), (rows < T)[:, None] & (dims < E)[None, :])


@triton.jit
@no_type_check
def probabilities(
    q_at, lse_at, rows, q_t, T, k, queries, keys, inner, outer, window,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Recompute a tile of one query head's probabilities, rows x keys, from the stored log-sum-exp; 0 where the key is
    hidden.
    """
    q = load_rows(q_at, rows, q_t, T, BLOCK_T, D, BLOCK_D)
    x = visible_logits(q, k, queries, keys, inner, outer, window, CAPPED, WINDOWED, WIDE)
    lse = tl.load(lse_at + rows, mask=rows < T, other=0.0)
    return tl.exp2(x - finite(lse)[:, None])


@triton.jit
@no_type_check
def columns(
    query, keys, lse, weights, shares, gain, bounds, ends, oldest, q_positions, k_positions, sums,
    q_b, q_h, q_t, k_b, k_h, k_s, qp_b, kp_b, kp_h, s_b, s_h,
    tiles, row_tiles, Hk, T, S, window, inner, outer,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, GAINED: tl.constexpr, LOW: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Compute for each key the weighted sum over rows of the group's mean probability; with ``LOW`` also a weighted
    count.

    One program reads ``BLOCK_S`` keys of a KV head once and recomputes their probabilities for every ``splits``-th
    piece of the work. A piece is a tile of the rows ``bounds[b]``, of one query head or, with ``LOW``, of the group.
    The sums are ``(splits, 1 or 2, B, Hk, S)``; the caller adds up the splits in their order. With ``LOW`` the second
    field counts the rows that see a key, windows aside, and give it ``p · shares < 1``. ``oldest`` has the first
    position of each tile of rows: where no key is later, nothing is hidden. A weight is part of the exponent.

    Bytes: keys once, queries of the counted rows once per ``BLOCK_S`` keys, sums once. FLOPs: ``2·B·Hq·rows·S·D``, half
    for all rows of a causal chunk.
    Error: a sum errs as the probabilities do (see the module) plus ``(rows·G/BLOCK_T + log2 BLOCK_T)·u``, all relative
    to the sum, whose terms are positive. A count is exact unless ``p · shares`` is within that error of 1.
    """
    tile, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h, split, splits = head // Hk, head % Hk, tl.program_id(1), tl.num_programs(1)
    wide_b, wide_h, wide_q = b.to(tl.int64), h.to(tl.int64), tl.cast(q_h, tl.int64)
    slots = tile * BLOCK_S + tl.arange(0, BLOCK_S)
    k = load_rows(keys + wide_b * k_b + wide_h * k_h, slots, k_s, S, BLOCK_S, D, BLOCK_D)
    at = load_positions(k_positions + wide_b * kp_b + wide_h * kp_h, slots, S)
    newest = tl.max(at, 0)
    # rows before the tile's first key see none of its keys
    first = tl.maximum(tl.load(bounds + 2 * b), tile * BLOCK_S - (S - T)) // BLOCK_T
    end = tl.load(bounds + 2 * b + 1)
    if WINDOWED and not LOW:  # a key outside of the window may count as low
        end = tl.minimum(end, tl.load(ends + head * tiles + tile))
    count = tl.maximum(tl.cdiv(end, BLOCK_T) - first, 0)
    if GAINED:
        power = tl.load(gain + b)
        inner, outer = strengthened(inner, outer, power, CAPPED)
        window = widened(window, power)
    mass = tl.zeros([BLOCK_T, BLOCK_S], tl.float32)
    low = tl.zeros([BLOCK_T, BLOCK_S], tl.float32)
    q_at, lse_at = query + wide_b * q_b + wide_h * G * q_h, lse + (wide_b * Hk + wide_h) * G * T
    if LOW:
        for i in range(split, count, splits):
            rows = (first + i) * BLOCK_T + tl.arange(0, BLOCK_T)
            queries = tl.load(q_positions + b * qp_b + rows, mask=rows < T, other=-1).to(tl.int32)
            weight = tl.load(weights + wide_b * T + rows, mask=rows < T, other=0.0)
            share = tl.load(shares + wide_b * s_b + wide_h * s_h + rows, mask=rows < T, other=0.0)
            p = tl.zeros([BLOCK_T, BLOCK_S], tl.float32)
            for g in range(G):
                p += probabilities(
                    q_at + g * wide_q, lse_at + g * T, rows, q_t, T, k, queries, at, inner, outer, window,
                    D, BLOCK_D, BLOCK_T, CAPPED, WINDOWED, WIDE,
                )  # fmt: skip
            mass += p * weight[:, None]
            little = (p * (share / G)[:, None] < 1.0) & (at[None, :] <= queries[:, None])
            low += tl.where(little, weight[:, None], 0.0)
    else:
        for i in range(split, count * G, splits):
            rows = (first + i // G) * BLOCK_T + tl.arange(0, BLOCK_T)
            queries = tl.load(q_positions + b * qp_b + rows, mask=rows < T, other=-1).to(tl.int32)
            weight = tl.load(weights + wide_b * T + rows, mask=rows < T, other=0.0)
            q = load_rows(q_at + (i % G) * wide_q, rows, q_t, T, BLOCK_T, D, BLOCK_D)
            shift = tl.load(lse_at + (i % G) * T + rows, mask=rows < T, other=0.0)
            counts = (weight > 0.0) & (queries >= 0)
            # infinity: a row that does not count adds nothing
            shift = tl.where(counts, finite(shift) - tl.log2(tl.where(counts, weight, 1.0)), float("inf"))
            x = logits(q, k, inner, outer, CAPPED, WIDE)
            if WINDOWED:  # noqa: SIM114  the compiler decides it
                x = shown(x, queries, at, window, WINDOWED)
            elif tl.load(oldest + b * row_tiles + first + i // G).to(tl.int32) < newest:
                x = shown(x, queries, at, window, WINDOWED)
            mass += tl.exp2(x - shift[:, None])
    fields: tl.constexpr = 2 if LOW else 1
    size = (tl.num_programs(0) // tiles).to(tl.int64) * S  # of one field
    target = sums + split * fields * size + head.to(tl.int64) * S + slots
    tl.store(target, tl.sum(mass, 0) / G, mask=slots < S)
    if LOW:
        tl.store(target + size, tl.sum(low, 0), mask=slots < S)
