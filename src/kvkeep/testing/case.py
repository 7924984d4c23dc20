"""Experiments for the laws: random inputs, a run through a real layer, and a replay without slots."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.backends import AttentionInputs, SecondReading, reference
from kvkeep.cache.eviction import head_budgets, limit
from kvkeep.cache.layer import Layer
from kvkeep.cache.row_snapshot import new_block
from kvkeep.head_sharding import ALONE, Heads
from kvkeep.kv import ranking
from kvkeep.kv.block import empty
from kvkeep.kv.slot_codec import decode, encode, encode_keys, hadamard
from kvkeep.kv_bits import KV_BITS
from kvkeep.pins import Spans, table
from kvkeep.policies._keep_prompt import keeps_share, keeps_whole, reading, with_prompt
from kvkeep.policies.base import Policy
from kvkeep.snapshot.contents import Contents, put, take
from kvkeep.snapshot.fingerprint import Fingerprint
from kvkeep.snapshot.snapshot import Snapshot
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
        """Return the options of attention, with twice the usual scaling, so that attention is clearly uneven."""
        return AttentionOptions(scaling=2.0 * self.dim**-0.5)


@dataclass
class Tape:
    """The inputs of a layer: queries, keys and values of all columns, and which columns are no padding."""

    query: Tensor
    keys: Tensor
    values: Tensor
    real: Tensor

    @classmethod
    def random(cls, case: Case) -> Tape:
        """Return standard normal tensors of the case's shape, by its seed, for its prompt and generated tokens."""
        generator = torch.Generator().manual_seed(case.seed)
        columns = case.prompt + case.steps

        def normal(heads: int) -> Tensor:
            return torch.randn(case.rows, heads, columns, case.dim, generator=generator)

        real = torch.arange(columns) >= torch.arange(case.rows)[:, None] * case.padding
        return cls(normal(case.heads * case.group), normal(case.heads), normal(case.heads), real)

    def at(self, columns: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of some columns, as views; padding is not left out."""
        return self.query[:, :, columns], self.keys[:, :, columns], self.values[:, :, columns]

    def row(self, index: int) -> Tape:
        """Return the inputs of one row, as a batch of one, without the columns of its padding."""
        real = self.real[index]
        query, keys, values = (t[index : index + 1, :, real] for t in (self.query, self.keys, self.values))
        return Tape(query, keys, values, real[None, real])

    def held(self, kv_bits: str | None, *, exact: int | None = None) -> Tape:
        """Return the tape with keys and values as they are read from slots of so many bits.

        Args:
            kv_bits: see `Case`.
            exact: columns from this one on are not in slots yet; ``None``: all are.
        """
        if kv_bits is None:
            return self
        key_bits, value_bits = KV_BITS[kv_bits]
        # encoding turns keys with a Hadamard matrix, and the same matrix turns them back
        keys = hadamard(decode(encode_keys(self.keys, key_bits), torch.float32))
        values, n = decode(encode(self.values, value_bits), torch.float32), exact
        if n is not None:
            keys[:, :, n:], values[:, :, n:] = self.keys[:, :, n:], self.values[:, :, n:]
        return Tape(self.query, keys, values, self.real)


@dataclass
class Moment:
    """A layer after a step, with its sorted positions ``(B, Hk, S)`` and the output ``(B, Hq, T, E)`` of the step.

    The layer itself goes on: once the next step has run, it is another.
    """

    positions: Tensor
    out: Tensor
    layer: Layer


def run(policy: Policy, case: Case, tape: Tape | None = None, *, heads: Heads = ALONE) -> Iterator[Moment]:
    """Feed a case to a real layer, the prompt and then one token at a time, and yield a `Moment` after each step.

    Args:
        policy: the layer's policy.
        case: the experiment.
        tape: its inputs; by default `Tape.random`.
        heads: which of a model's heads the layer has, where several processes share them.
    """
    tape = Tape.random(case) if tape is None else tape
    # index 1 also in `replay`: noise is drawn by the layer's index
    layer = Layer(policy, case.budget, index=1, prefill_chunk=case.chunk, pins=[case.pins], kv_bits=case.kv_bits)
    layer.heads = heads
    columns = tape.real.shape[1]
    bounds = [0, *range(columns - case.steps, columns + 1)]
    for start, stop in itertools.pairwise(bounds):
        if start == stop:  # a case without a prompt
            continue
        at = slice(start, stop)
        # without a mask a layer takes ways that a mask rules out, such as recorded steps
        real = None if bool(tape.real.all()) else tape.real[:, at]
        new, phase = tape.at(at), Phase.PREFILL if start == 0 else Phase.DECODE
        out = layer.step(*new, options=case.options, phase=phase, real=real)
        yield Moment(layer.store.positions.sort(dim=-1).values, out, layer)


def replay(policy: Policy, case: Case, tape: Tape) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Run a policy without slots on one unpadded row. Yield kept positions, output and margin after each step.

    Each step gathers the kept tokens from the whole history in position order, attends in float64 and sorts. The margin
    is the smallest gap so far between the scores of the last token that was kept and the first that was evicted, as a
    share of large scores; infinite while nothing was evicted. Behind a decision with a tiny margin, rounding may have
    chosen, and later steps need not agree with those of a layer.

    Args:
        policy: the policy.
        case: the experiment; its rows and padding are not used.
        tape: the inputs of the row, such as `Tape.row` returns.
    """
    n, heads = tape.keys.shape[2], tape.keys.shape[1]
    memory = {name: torch.full((1, heads, n + 1), start, dtype=torch.float64) for name, start in policy.slots.items()}
    of_heads = empty(policy.summaries, tape.keys.double(), tape.values.double())
    kept = torch.empty((1, heads, 0), dtype=torch.int32)
    prompt, turn = max(0, n - case.steps), 0  # padding may be all of the prompt, and more
    starts = [*range(0, prompt, case.chunk or n), *range(prompt, n)]
    outputs: list[Tensor] = []
    budget: Budget = case.budget
    margin = float("inf")
    # the prompt chunk by chunk, with an eviction after each, as a layer does it within one step
    for start, stop in zip(starts, [*starts[1:], n], strict=True):
        phase = Phase.PREFILL if start < prompt else Phase.DECODE
        turn = stop if phase is Phase.PREFILL else turn
        positions = torch.cat([kept, torch.arange(start, stop, dtype=torch.int32).expand(1, heads, -1)], dim=-1)
        index = positions.long().masked_fill(positions == EMPTY, n)  # the last column of `memory` belongs to nobody
        seen = tape.held(case.kv_bits, exact=start if phase is Phase.PREFILL else None)
        view = replace(_view(case, seen, positions, stop - start, turn, phase), budget=budget)
        view = replace(view, pins=_pins_with_prompt(policy, view, prompt))
        now, slots = torch.arange(start, stop)[None], Slots(view.keys, view.values, positions)
        query = tape.query[:, :, start:stop]
        options = replace(case.options, top=policy.focuses.top(policy, view) if policy.focuses else None)
        out, report = reference.attend(AttentionInputs(query, slots, now, options, policy.wants(view)))
        if policy.asks and phase is Phase.PREFILL:
            view = replace(view, queries=Queries(query, now))
        if policy.rereads and phase is Phase.PREFILL:
            length = torch.tensor([[stop]])
            again = reference.reread(AttentionInputs(query, slots, now, case.options), SecondReading(length))
            report = Report({**report.sums, "again": again})
        of_slots = {name: history.gather(-1, index) for name, history in memory.items()}
        state = policy.observe(of_slots | of_heads, view, report)
        of_heads = {name: state[name] for name in of_heads}
        for name, history in memory.items():
            history.scatter_(-1, index, state[name].double())
        if policy.spreads and phase is Phase.PREFILL:
            budget = head_budgets(policy, view, state)
        view = reading(policy, replace(view, budget=budget), window=None)
        sinks, recent = policy.protected(view.budget)
        score = policy.score(view, state).double()
        score = ranking.protect(score, positions, view.seen, sinks=sinks, recent=recent, pins=view.pins)
        kept, step_margin = _best(score, positions, limit(policy, view, state))
        margin = min(margin, step_margin)
        outputs.append(out)
        if stop >= prompt:  # the chunks of a prompt are one step of `run`
            yield kept, torch.cat(outputs, dim=2), margin
            outputs = []


def _view(case: Case, tape: Tape, positions: Tensor, new: int, prompt: int, phase: Phase) -> View:
    """Return the `View` that a policy gets of the tape's tokens at these positions, one row long."""
    index = positions.long().clamp(min=0)[..., None].expand(-1, -1, -1, case.dim)  # an empty slot may hold any key
    return View(
        positions=positions,
        keys=tape.keys.gather(2, index),
        values=tape.values.gather(2, index),
        seen=positions.amax(dim=(1, 2)).long() + 1,  # the newest token is always there
        budget=case.budget,
        new=torch.tensor([new]),
        prompt=torch.tensor([prompt]),
        phase=phase,
        layer=1,
        sequences=torch.zeros(1, dtype=torch.int64),
        pins=table([case.pins], torch.device("cpu")) if case.pins else None,
    )


def _pins_with_prompt(policy: Policy, view: View, prompt: int) -> Tensor | None:
    """Return a table of the bounds of spans that may not be evicted: the pins of the view, and under a policy with
    `keep_prompt` the prompt, whole or what was left of it. ``None`` if there are none.
    """
    if keeps_whole(policy):
        return with_prompt(view.pins, torch.tensor([prompt]))
    return with_prompt(view.pins, view.prompt) if keeps_share(policy) and view.is_decode else view.pins


def _best(score: Tensor, positions: Tensor, stays: Budget) -> tuple[Tensor, float]:
    """Return the positions of each head's best tokens by (score, position), sorted, and the margin of the decision.

    The margin is the smallest of all heads, see `replay`. Heads that keep fewer tokens are filled up with `EMPTY`.

    Args:
        score: of each token of one row; higher stays.
        positions: of the tokens.
        stays: how many of them each head keeps.
    """
    heads = positions.shape[1]
    numbers = [stays] * heads if isinstance(stays, int) else stays[0].expand(heads).tolist()
    kept, margin = [], float("inf")
    for head, n in enumerate(numbers):
        slots = zip(score[0, head].tolist(), positions[0, head].tolist(), strict=True)
        ranked = sorted(slot for slot in slots if slot[1] != EMPTY)
        excess = max(0, len(ranked) - n)
        if 0 < excess < len(ranked):
            # relative to large scores, whose rounding is larger, too
            gap = ranked[excess][0] - ranked[excess - 1][0]
            margin = min(margin, gap / max(1.0, abs(ranked[excess - 1][0])))
        kept.append(sorted(position for _, position in ranked[excess:]))
    width = max(map(len, kept))
    return torch.tensor([[head + [EMPTY] * (width - len(head)) for head in kept]], dtype=torch.int32), margin


# A layer whose rows can be moved to another one by way of files, for the law about saved memory.


class Fed:
    """A layer and the columns that it has been fed.

    Args:
        policy: the layer's policy.
        case: the shape of the experiment.
    """

    def __init__(self, policy: Policy, case: Case) -> None:
        self.case = case
        options: dict[str, Any] = {"prefill_chunk": case.chunk, "kv_bits": case.kv_bits}
        self.layer = Layer(policy, case.budget, index=1, **options)

    def feed(self, tape: Tape, stop: int) -> Tensor:
        """Feed the layer the columns after those that it has, up to ``stop``: the prompt, or a generated token.

        Return the attention output, with 0 for padding.
        """
        start = self.layer.columns
        real = tape.real[:, start:stop]
        phase = Phase.PREFILL if start < self.case.prompt else Phase.DECODE
        out = self.layer.step(*tape.at(slice(start, stop)), options=self.case.options, phase=phase, real=real)
        return out.masked_fill(~real[:, None, :, None], 0)

    def move_to(self, other: Fed) -> None:
        """Save every row of the layer to a file, load it, and put it into another layer, which was never fed.

        The other layer changes, and then holds what this one holds.
        """
        rows = [take([self.layer.block], row) for row in range(self.case.rows)]
        read = [self._through_a_file(row) for row in rows]
        dtype = self.layer.store.dtype
        block = new_block(other.layer, [row.layers[0] for row in read], self.case.rows, dtype=dtype)
        for number, row in enumerate(read):
            put(row, [block], number)
        other.layer.hold(block, columns=self.layer.columns)
        other.layer.find_lead()  # which a block that was read from files does not have

    def _through_a_file(self, contents: Contents) -> Contents:
        """Return the contents of a row after they were saved to a file and loaded again."""
        settings: dict[str, Any] = {"budget": self.case.budget, "kv_bits": self.case.kv_bits}
        dtype = str(self.layer.store.dtype).removeprefix("torch.")
        made = Fingerprint(model="a law", config="", policy="", dtype=dtype, **settings)
        with tempfile.TemporaryDirectory() as folder:
            Snapshot(contents, made).save(Path(folder, "row"))
            return Snapshot.load(Path(folder, "row")).contents


# A layer whose KV heads are divided among processes, for the law about them. Threads stand for the processes.

PATIENCE_S = 20.0
"""Seconds for which a thread waits for another one, which hangs."""


@dataclass
class _Meeting:
    """Where threads lay down their tensors for each other, and ``None`` at the end of a step."""

    ranks: int
    laid: dict[int, Tensor | None] = field(default_factory=dict)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=PATIENCE_S)

    def exchange(self, rank: int, mine: Tensor | None) -> list[Tensor | None]:
        """Lay down the tensor of one simulated process, wait for the others, and return the tensors of all in order.

        The tensors must be of one shape and dtype, or all ``None``.
        """
        self.laid[rank] = mine
        self.barrier.wait()
        found = [self.laid[one] for one in range(self.ranks)]
        # nobody may lay down its next tensor before all have read this one
        self.barrier.wait()
        kinds = {None if one is None else (one.shape, one.dtype) for one in found}
        assert len(kinds) == 1, f"processes have not asked each other for the same: {kinds}"
        return found


@dataclass(frozen=True)
class _Between(Heads):
    """The heads of a thread.

    Attributes:
        meeting: where it meets the others.
    """

    meeting: _Meeting = field(default_factory=lambda: _Meeting(1))

    def first(self, numbers: Tensor) -> Tensor:
        """Return the numbers of the first process, as `Heads.first` does."""
        return self._gathered(numbers)[0]

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        """Return the tensors of all simulated processes in order."""
        # a clone, since other threads read it while this one goes on
        return [one for one in self.meeting.exchange(self.rank, mine.clone()) if one is not None]


def run_shared(policy: Policy, case: Case, tape: Tape, ranks: int) -> Generator[list[Moment], None, None]:
    """Feed a case to layers that hold a part of the heads each, in a thread each, and yield their moments, in the order
    of the parts, after each step.

    Its threads live until it ends or is closed.

    Args:
        policy: the policy.
        case: the experiment; its heads are a multiple of the ranks.
        tape: its inputs.
        ranks: number of parts.
    """
    meeting = _Meeting(ranks)
    part = replace(case, heads=case.heads // ranks)
    runs = [
        run(policy, part, _cut(tape, rank, ranks), heads=_Between(rank, ranks, case.heads, meeting))
        for rank in range(ranks)
    ]
    with ThreadPoolExecutor(ranks) as threads:
        while True:
            moments = [moment for moment in threads.map(partial(_next, meeting), range(ranks), runs) if moment]
            if not moments:
                return
            yield moments


def _cut(tape: Tape, rank: int, ranks: int) -> Tape:
    """Return the part of the inputs that belongs to the heads of one of ``ranks`` processes."""
    query, keys, values = (x.chunk(ranks, dim=1)[rank] for x in (tape.query, tape.keys, tape.values))
    return Tape(query, keys, values, tape.real)


def _next(meeting: _Meeting, rank: int, moments: Iterator[Moment]) -> Moment | None:
    """Return the next moment of a thread; ``None`` at the end. If it fails, the other threads stop waiting for it."""
    try:
        found = next(moments, None)
        # ``None`` meets a tensor if another thread asks for one more exchange in this step: `exchange` refuses that
        meeting.exchange(rank, None)
        return found
    except threading.BrokenBarrierError:
        raise meeting.error or AssertionError("a process waits for another one, which hangs") from None
    except BaseException as error:
        meeting.error = meeting.error or error
        meeting.barrier.abort()
        raise


def held(moments: list[Moment]) -> list[list[list[int]]]:
    """Return the sorted positions that are held, by row, then by head over all parts of a layer in order.

    Args:
        moments: of the parts, after the same step.
    """
    rows = len(moments[0].positions)
    return [[_occupied(head) for one in moments for head in one.positions[row]] for row in range(rows)]


def _occupied(head: Tensor) -> list[int]:
    """Return the positions of a head's occupied slots."""
    found: list[int] = head[head >= 0].tolist()
    return found


def outputs(moments: list[Moment]) -> Tensor:
    """Return the attention outputs of all heads of a layer, joined from its parts, those of the first part first."""
    return torch.cat([one.out for one in moments], dim=1)
