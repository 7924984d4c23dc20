"""Experiments for the laws: random inputs, a run through a real layer, and a replay without slots."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.backends import reference
from kvkeep.cache.eviction import head_budgets, limit
from kvkeep.cache.layer import Layer
from kvkeep.head_sharding import ALONE, Heads
from kvkeep.kv import ranking
from kvkeep.kv.block import empty
from kvkeep.kv.cascade import Cascade
from kvkeep.kv.slot_codec import KV_BITS, decode, encode, encode_keys, hadamard
from kvkeep.pins import Spans, table
from kvkeep.policies.base import Policy
from kvkeep.types import EMPTY, AttentionOptions, Budget, Phase, Queries, Report, Slots, View


@dataclass(frozen=True)
class Case:
    """The shape of an experiment: a prompt and then generated tokens, all random.

    Attributes:
        rows: rows of the batch; row ``i`` is padded on the left by ``i * padding`` columns.
        heads: KV heads.
        group: query heads per KV head.
        dim: head dimension.
        prompt: columns of the prompt.
        steps: generated tokens after the prompt.
        budget: slots that may stay occupied.
        chunk: prefill chunk, ``None`` for the whole prompt.
        padding: padding of row 1. It must leave every row at least one real token.
        seed: seed of the random tensors.
        pins: spans of positions that may not be evicted, in every row.
        kv_bits: bits of keys and values in the slots; ``None``: those of the model's dtype.
    """

    rows: int = 2
    heads: int = 2
    group: int = 2
    dim: int = 8
    prompt: int = 20
    steps: int = 12
    budget: int = 8
    chunk: int | None = None
    padding: int = 3
    seed: int = 0
    pins: Spans = ()
    kv_bits: str | None = None

    @property
    def options(self) -> AttentionOptions:
        """Options with a scaling that makes attention clearly uneven."""
        return AttentionOptions(scaling=2.0 * self.dim**-0.5)


@dataclass
class Tape:
    """The inputs of a layer: queries, keys and values of all columns, and which columns are real."""

    query: Tensor
    keys: Tensor
    values: Tensor
    real: Tensor

    @classmethod
    def random(cls, case: Case) -> Tape:
        """Standard normal tensors of the case's shape."""
        generator = torch.Generator().manual_seed(case.seed)
        columns = case.prompt + case.steps

        def normal(heads: int) -> Tensor:
            return torch.randn(case.rows, heads, columns, case.dim, generator=generator)

        real = torch.arange(columns) >= torch.arange(case.rows)[:, None] * case.padding
        return cls(normal(case.heads * case.group), normal(case.heads), normal(case.heads), real)

    def at(self, columns: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of some columns."""
        return self.query[:, :, columns], self.keys[:, :, columns], self.values[:, :, columns]

    def row(self, index: int) -> Tape:
        """One row without its padding."""
        real = self.real[index]
        query, keys, values = (t[index : index + 1, :, real] for t in (self.query, self.keys, self.values))
        return Tape(query, keys, values, real[None, real])

    def held(self, kv_bits: str | None, *, exact: int | None = None) -> Tape:
        """The tape with keys and values as slots of so many bits give them back.

        Args:
            kv_bits: see `Case`.
            exact: columns from this one on are not in slots yet; ``None``: all are.
        """
        if kv_bits is None:
            return self
        key_bits, value_bits = KV_BITS[kv_bits]
        keys = hadamard(decode(encode_keys(self.keys, key_bits), torch.float32))
        values, n = decode(encode(self.values, value_bits), torch.float32), exact
        if n is not None:
            keys[:, :, n:], values[:, :, n:] = self.keys[:, :, n:], self.values[:, :, n:]
        return Tape(self.query, keys, values, self.real)


@dataclass
class Moment:
    """A layer after a step, with its sorted positions ``(B, Hk, S)`` and its output ``(B, Hq, T, E)``."""

    positions: Tensor
    out: Tensor
    layer: Layer


def run(policy: Policy, case: Case, tape: Tape | None = None, *, heads: Heads = ALONE) -> Iterator[Moment]:
    """Feed a case to a real layer: the prompt, then one token at a time."""
    tape = Tape.random(case) if tape is None else tape
    layer = Layer(policy, case.budget, index=1, prefill_chunk=case.chunk, pins=[case.pins], kv_bits=case.kv_bits)
    layer.heads = heads
    columns = tape.real.shape[1]
    bounds = [0, *range(columns - case.steps, columns + 1)]
    for start, stop in itertools.pairwise(bounds):
        if start == stop:
            continue
        at = slice(start, stop)
        real = None if bool(tape.real.all()) else tape.real[:, at]
        new, phase = tape.at(at), Phase.PREFILL if start == 0 else Phase.DECODE
        out = layer.step(*new, options=case.options, phase=phase, real=real)
        yield Moment(layer.store.positions.sort(dim=-1).values, out, layer)


def replay(policy: Policy, case: Case, tape: Tape) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Run a policy without slots on one unpadded row. Yield kept positions, output and margin after each step.

    Each step gathers the kept tokens from the whole history in position order, attends in float64 and sorts.
    """
    n, heads = tape.keys.shape[2], tape.keys.shape[1]
    memory = {name: torch.full((1, heads, n + 1), start, dtype=torch.float64) for name, start in policy.slots.items()}
    of_heads = empty(policy.summaries, tape.keys.double(), tape.values.double())
    kept = torch.empty((1, heads, 0), dtype=torch.int32)
    prompt, turn = n - case.steps, 0
    size = case.chunk or prompt
    starts = [*range(0, prompt, size), *range(prompt, n)]
    outputs: list[Tensor] = []
    budget: Budget = case.budget
    cascade = (policy.cascades or Cascade)(1)
    margin = float("inf")
    for start, stop in zip(starts, [*starts[1:], n], strict=True):
        phase = Phase.PREFILL if start < prompt else Phase.DECODE
        turn = stop if phase is Phase.PREFILL else turn
        positions = torch.cat([kept, torch.arange(start, stop, dtype=torch.int32).expand(1, heads, -1)], dim=-1)
        index = positions.long().masked_fill(positions == EMPTY, n)  # the last column of `memory` belongs to nobody
        past, alive = cascade.enter(1, positions[:, 0])
        seen = tape.held(case.kv_bits, exact=start if phase is Phase.PREFILL else None)
        view = replace(_view(case, seen, positions, stop - start, turn, phase), budget=budget, past=past, alive=alive)
        now, slots = torch.arange(start, stop)[None], Slots(view.keys, view.values, positions)
        query = tape.query[:, :, start:stop]
        out, report = reference.attend(
            query,
            slots,
            now,
            statistic=policy.wants(view),
            options=replace(case.options, top=policy.focuses.top(policy, view) if policy.focuses else None),
        )
        if policy.asks and phase is Phase.PREFILL:
            view = replace(view, queries=Queries(query, now))
        if policy.rereads and phase is Phase.PREFILL:
            length = torch.tensor([[stop]])
            again = reference.reread(query, slots, now, length=length, rotation=None, options=case.options)
            report = Report({**report.sums, "again": again})
        if policy.cascades:
            cascade.add(positions[:, 0], report)
        of_slots = {name: history.gather(-1, index) for name, history in memory.items()}
        state = policy.observe(of_slots | of_heads, view, report)
        of_heads = {name: state[name] for name in of_heads}
        for name, history in memory.items():
            history.scatter_(-1, index, state[name].double())
        if policy.spreads and phase is Phase.PREFILL:
            budget = head_budgets(policy, view, state)
        view = replace(view, budget=budget)
        sinks, recent = policy.protected(budget)
        score = policy.score(view, state).double()
        score = ranking.protect(score, positions, view.seen, sinks=sinks, recent=recent, pins=view.pins)
        kept, step_margin = _best(score, positions, limit(policy, view, state))
        margin = min(margin, step_margin)
        outputs.append(out)
        if stop >= prompt:
            yield kept, torch.cat(outputs, dim=2), margin
            outputs = []


def _view(case: Case, tape: Tape, positions: Tensor, new: int, prompt: int, phase: Phase) -> View:
    index = positions.long().clamp(min=0)[..., None].expand(-1, -1, -1, case.dim)
    return View(
        positions=positions,
        keys=tape.keys.gather(2, index),
        values=tape.values.gather(2, index),
        seen=positions.amax(dim=(1, 2)).long() + 1,
        budget=case.budget,
        new=torch.tensor([new]),
        prompt=torch.tensor([prompt]),
        phase=phase,
        layer=1,
        sequences=torch.zeros(1, dtype=torch.int64),
        past=torch.zeros(1, 0),
        alive=torch.zeros(1, 0, dtype=torch.bool),
        pins=table([case.pins], torch.device("cpu")) if case.pins else None,
    )


def _best(score: Tensor, positions: Tensor, stays: Budget) -> tuple[Tensor, float]:
    """The best tokens of each head by (score, position), in position order, and the margin of the closest decision."""
    heads = positions.shape[1]
    numbers = [stays] * heads if isinstance(stays, int) else stays[0].expand(heads).tolist()
    kept, margin = [], float("inf")
    for head, n in enumerate(numbers):
        slots = zip(score[0, head].tolist(), positions[0, head].tolist(), strict=True)
        ranked = sorted(slot for slot in slots if slot[1] != EMPTY)
        excess = max(0, len(ranked) - n)
        if 0 < excess < len(ranked):
            gap = ranked[excess][0] - ranked[excess - 1][0]
            margin = min(margin, gap / max(1.0, abs(ranked[excess - 1][0])))
        kept.append(sorted(position for _, position in ranked[excess:]))
    width = max(map(len, kept))
    return torch.tensor([[head + [EMPTY] * (width - len(head)) for head in kept]], dtype=torch.int32), margin
