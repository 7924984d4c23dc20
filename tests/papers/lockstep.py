"""Runs a `kvkeep.Layer` and the plain loops side by side and compares them after every step.

Inputs are drawn from a seed. A seed under which some decision of the loops is neither an exact tie nor clear by
`loops.MARGIN` is passed over and the next one is taken; the package has no part in that choice, and once a seed
is chosen every difference is a failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvkeep import AttentionOptions, CapacityError, Layer, parse
from kvkeep.types import Phase

from .cases import Case, E, Stream, make_streams, masks
from .loops import OverBudgetError, Rule, Sequence, TooCloseError
from .oracles import rule

LAYER = 3
FIRST_SEQUENCE = 10
"""Identity of row 0; the next rows count on."""

GARBAGE = 37.0
"""What the padded columns hold: large, so that it would be noticed."""


# -- the two sides -----------------------------------------------------------------------------------------------------


def make_layer(case: Case) -> Layer:
    """The package's side."""
    budget = case.budget if isinstance(case.budget, int) else list(case.budget)
    ids = [FIRST_SEQUENCE + row for row in range(len(case.pads))]
    return Layer(parse(case.policy), budget, index=LAYER, prefill_chunk=case.chunk, sequences=ids)


def make_rule(case: Case, row: int) -> Rule:
    return rule(case.policy, case.budget_of(row), case.heads, layer=LAYER, sequence=FIRST_SEQUENCE + row)


def phase_of(tokens: list[range], real: Tensor) -> Phase:
    """The first turn is a prompt; a later one of one column brings generated tokens."""
    return Phase.DECODE if real.shape[1] == 1 and any(mine.start for mine in tokens) else Phase.PREFILL


def step_loops(sequence: Sequence, stream: Stream, case: Case, tokens: range, phase: Phase) -> Tensor:
    """Feed one row its real tokens of one turn, ``chunk`` at a time. Returns ``(Hq, tokens, E)`` in float64."""
    parts = [torch.empty(case.heads * case.group, 0, E, dtype=torch.float64)]
    size = case.chunk or max(1, len(tokens))
    for start in range(tokens.start, tokens.stop, size):
        piece = slice(start, min(start + size, tokens.stop))
        out = sequence.feed(
            stream.queries[:, piece].tolist(),
            stream.keys[:, piece].tolist(),
            stream.values[:, piece].tolist(),
            decode=phase is Phase.DECODE,
        )
        parts.append(torch.tensor(out, dtype=torch.float64))
    return torch.cat(parts, dim=1)


def step_layer(layer: Layer, streams: list[Stream], case: Case, tokens: list[range], real: Tensor) -> Tensor:
    """Feed all rows one turn, padded columns filled with garbage. Returns ``(B, Hq, T, E)``."""

    def padded(name: str) -> Tensor:
        whole = [getattr(stream, name) for stream in streams]
        columns = torch.full((len(whole), whole[0].shape[0], real.shape[1], whole[0].shape[2]), GARBAGE)
        for row, part in enumerate(whole):
            columns[row, :, real[row]] = part[:, tokens[row].start : tokens[row].stop]
        return columns

    return layer.step(
        padded("queries"),
        padded("keys"),
        padded("values"),
        options=AttentionOptions(scaling=case.scaling),
        phase=phase_of(tokens, real),
        real=None if bool(real.all()) else real,
    )


# -- the comparison ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """What the loops did in one turn.

    Attributes:
        real: which columns are real.
        tokens: per row, the positions of its new tokens.
        kept: per row and KV head, the positions held after the turn, ascending.
        outputs: per row, the attention output ``(Hq, tokens, E)`` in float64.
        sequences: the rows themselves, as they are after the last turn.
    """

    real: Tensor
    tokens: list[range]
    kept: list[list[list[int]]]
    outputs: list[Tensor]
    sequences: list[Sequence]

    @property
    def seen(self) -> list[int]:
        """Tokens of each row so far."""
        return [tokens.stop for tokens in self.tokens]


def play(case: Case, streams: list[Stream]) -> list[Turn]:
    """Run the loops alone, row by row."""
    sequences = [Sequence(make_rule(case, row), case.scaling) for row in range(len(streams))]
    turns = []
    for real in masks(case):
        tokens = [range(s.seen, s.seen + n) for s, n in zip(sequences, real.sum(dim=1).tolist(), strict=True)]
        rows = zip(sequences, streams, tokens, strict=True)
        phase = phase_of(tokens, real)
        outputs = [step_loops(sequence, stream, case, mine, phase) for sequence, stream, mine in rows]
        turns.append(Turn(real, tokens, [sequence.kept for sequence in sequences], outputs, sequences))
    return turns


def choose(case: Case) -> tuple[list[Stream], list[Turn]]:
    """The inputs of the first seed under which every decision of the loops is clear or an exact tie, played."""
    for seed in range(100):
        streams = make_streams(case, seed)
        try:
            return streams, play(case, streams)
        except TooCloseError:
            continue
    raise AssertionError(f"{case}: no seed keeps the decisions apart")


def lockstep(case: Case, chosen: tuple[list[Stream], list[Turn]] | None = None) -> Iterator[tuple[Layer, Turn]]:
    """Compare retained positions after every turn, and the outputs; yield both sides for further checks."""
    streams, turns = choose(case) if chosen is None else chosen
    layer = make_layer(case)
    outputs: list[list[Tensor]] = [[] for _ in streams]
    for number, turn in enumerate(turns):
        out = step_layer(layer, streams, case, turn.tokens, turn.real)
        assert retained(layer) == turn.kept, f"turn {number}"
        for row, real in enumerate(turn.real):
            outputs[row].append(out[row][:, real])
        yield layer, turn
    for row, found in enumerate(outputs):
        expected = torch.cat([turn.outputs[row] for turn in turns], dim=1)
        torch.testing.assert_close(torch.cat(found, dim=1).double(), expected, atol=2e-5, rtol=1e-5)


def compare(case: Case) -> None:
    """Run `lockstep` to its end."""
    for _ in lockstep(case):
        pass


def played(case: Case, policy: str) -> list[list[list[list[int]]]]:
    """What another policy of the loops keeps on the inputs of a case, after every turn."""
    streams, _ = choose(case)
    return [turn.kept for turn in play(replace(case, policy=policy), streams)]


def refuse_last_turn(case: Case) -> None:
    """The loops and the package take all turns but the last, and refuse that one; the layer stays as it was."""
    streams = make_streams(case, 0)
    with pytest.raises(OverBudgetError):
        play(case, streams)
    layer, fits = make_layer(case), replace(case, turns=case.turns[:-1])
    for turn in play(fits, streams):
        step_layer(layer, streams, case, turn.tokens, turn.real)
    before = retained(layer)
    real = masks(case)[-1]
    tokens = [range(stop, stop + n) for stop, n in zip(turn.seen, real.sum(dim=1).tolist(), strict=True)]
    with pytest.raises(CapacityError):
        step_layer(layer, streams, case, tokens, real)
    assert retained(layer) == before


def retained(layer: Layer) -> list[list[list[int]]]:
    """The positions that each row and head holds, ascending."""
    return [[sorted(j for j in head if j >= 0) for head in row] for row in layer.store.positions.tolist()]
