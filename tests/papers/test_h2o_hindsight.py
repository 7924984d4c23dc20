"""H2O with numbers from the future: the global statistic (Figure 2d) and attention without heavy hitters (2c)."""

from __future__ import annotations

import pytest
import torch
from phases import phase_of
from torch import Tensor

from kvkeep import AttentionOptions, Layer, parse
from kvkeep.types import Phase
from kvkeep_lab.hindsight import H2OGlobal, HiddenKeys, Keys, MassTotals, Totals

from . import rules_hindsight as rules
from .cases import CHAT, DECODE, Case, Stream, make_streams, masks
from .lockstep import GARBAGE, LAYER, retained, step_layer, step_loops
from .lockstep import phase_of as lockstep_phase
from .loops import Sequence, TooCloseError

CASES = [
    Case("recent=8", 16, (24, *DECODE), pads=(0,)),
    Case("recent=0", 5, (1,) * 64, group=1),
    Case("recent=0", 1, (24, *DECODE), inputs="drift", pads=(0,)),
    Case("recent=2", 5, (24, *DECODE), inputs="drift", group=4, heads=1),
    Case("recent=2,sinks=2", 6, (24, *DECODE), pads=(0, 7, 23), heads=1),
    Case("recent=1,sinks=1", 5, (25, *DECODE), chunk=3, pads=(9, 0, 6), heads=1),
    Case("recent=3", (12, 7), CHAT, pads=(0, 4), pause=5, inputs="drift"),
    Case("recent=1", 6, (24, *DECODE), inputs="twins"),
    Case("recent=2", 7, (24, *DECODE), inputs="constant"),
    Case("recent=1", 6, (24, *DECODE), inputs="sink"),
    Case("recent=1", 8, (24, *DECODE), inputs="hard", group=1),
]
"""The policy's text is that of its options alone: it has no name in the registry."""


def options_of(case: Case) -> dict[str, int]:
    return {name: int(number) for name, number in (item.split("=") for item in case.policy.split(","))}


def whole(streams: list[Stream], name: str) -> tuple[Tensor, Tensor]:
    """All rows side by side, padded on the left with garbage, and which columns are real."""
    parts = [getattr(stream, name) for stream in streams]
    n = max(part.shape[1] for part in parts)
    columns = torch.full((len(parts), parts[0].shape[0], n, parts[0].shape[2]), GARBAGE)
    real = torch.zeros(len(parts), n, dtype=torch.bool)
    for row, part in enumerate(parts):
        columns[row, :, n - part.shape[1] :] = part
        real[row, n - part.shape[1] :] = True
    return columns, real


def run_whole(layer: MassTotals | HiddenKeys, case: Case, streams: list[Stream]) -> tuple[Tensor, Tensor]:
    """A pass over whole texts: the outputs ``(B, Hq, T, E)``, and which columns are real."""
    (q, real), (k, _), (v, _) = (whole(streams, name) for name in ("queries", "keys", "values"))
    return layer.step(q, k, v, options=AttentionOptions(scaling=case.scaling), phase=phase_of(q), real=real), real


def measure(case: Case, streams: list[Stream]) -> Totals:
    layer = MassTotals()
    _, real = run_whole(layer, case, streams)
    return Totals({LAYER: layer.mass}, real.sum(dim=1))


def column_sums(case: Case, stream: Stream) -> list[list[float]]:
    return rules.column_sums(stream.queries.tolist(), stream.keys.tolist(), case.scaling)


def play(case: Case, streams: list[Stream]) -> tuple[list[list[list[list[int]]]], list[list[Tensor]]]:
    """The loops: per turn, row and head the kept positions; per turn and row the outputs."""
    sequences = [
        Sequence(
            rules.H2OGlobal(case.budget_of(row), case.heads, totals=column_sums(case, stream), **options_of(case)),
            case.scaling,
        )
        for row, stream in enumerate(streams)
    ]
    kept, outputs = [], []
    for real in masks(case):
        tokens = [range(s.seen, s.seen + n) for s, n in zip(sequences, real.sum(dim=1).tolist(), strict=True)]
        rows = zip(sequences, streams, tokens, strict=True)
        phase = lockstep_phase(tokens, real)
        outputs.append([step_loops(sequence, stream, case, mine, phase) for sequence, stream, mine in rows])
        kept.append([sequence.kept for sequence in sequences])
    return kept, outputs


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeps_what_the_whole_text_looks_at(case):
    for seed in range(20):
        streams = make_streams(case, seed)
        try:
            kept, outputs = play(case, streams)
            break
        except TooCloseError:
            continue
    else:
        raise AssertionError("no seed keeps the decisions apart")
    policy = H2OGlobal(totals=measure(case, streams), **options_of(case))
    budget = case.budget if isinstance(case.budget, int) else list(case.budget)
    rows = range(len(streams))
    layer = Layer(policy, budget, index=LAYER, prefill_chunk=case.chunk, sequences=rows)
    seen = [0] * len(rows)
    for turn, real in enumerate(masks(case)):
        tokens = [range(n, n + int(real[row].sum())) for row, n in enumerate(seen)]
        out = step_layer(layer, streams, case, tokens, real)
        assert retained(layer) == kept[turn], f"turn {turn}"
        for row in rows:
            torch.testing.assert_close(out[row][:, real[row]].double(), outputs[turn][row], atol=2e-5, rtol=1e-5)
        seen = [mine.stop for mine in tokens]


@pytest.mark.parametrize("inputs", ["random", "twins", "hard"])
def test_totals_are_the_column_sums_of_full_attention(inputs):
    case = Case("", 1, (30,), inputs=inputs, pads=(0, 7))
    streams = make_streams(case, 0)
    totals = measure(case, streams)
    assert totals.lengths.tolist() == [30, 23]
    for row, stream in enumerate(streams):
        n = stream.keys.shape[1]
        torch.testing.assert_close(
            totals.mass[LAYER][row, :, :n].double(),
            torch.tensor(column_sums(case, stream), dtype=torch.float64),
            rtol=1e-5,
            atol=1e-5,
        )
        assert not totals.mass[LAYER][row, :, n:].any()


@pytest.mark.parametrize(("inputs", "budget", "recent"), [("random", 16, 8), ("random", 5, 0), ("drift", 12, 4)])
def test_the_official_static_mask_leaves_slots_empty_until_its_heavy_hitters_have_come(inputs, budget, recent):
    """policies.md §4.5-D: it sees a part of what the policy holds, and all of it in the end."""
    n, n_heavy = 60, budget - recent
    case = Case("", budget, (1,) * n, inputs=inputs, pads=(0,), group=1)
    (stream,) = streams = make_streams(case, 0)
    layer = Layer(H2OGlobal(totals=measure(case, streams), recent=recent), budget, index=LAYER)
    sums, fewer, equal = column_sums(case, stream), 0, 0
    heavy = [sorted(range(n), key=totals.__getitem__)[-n_heavy:] for totals in sums]
    for i, real in enumerate(masks(case)):
        before = retained(layer)[0] if i else [[], []]
        step_layer(layer, streams, case, [range(i, i + 1)], real)
        for head, totals in enumerate(sums):
            sees, masked = {*before[head], i}, rules.static_mask(totals, n_heavy, recent, i)
            assert masked <= sees
            fewer += masked < sees
            if max(heavy[head]) < i - recent and i >= budget:
                assert masked == sees
                equal += 1
    assert fewer
    assert equal


# -- examples with known answers ---------------------------------------------------------------------------------------


def looks(policy, targets: list[int], budget: int, *, prompt: int = 6) -> list[list[int]]:
    """One head; token t's query takes key ``targets[t]`` if it is there, else spreads. What is kept after each turn."""
    n = len(targets)
    keys = torch.eye(n)[None, None]
    queries = 1000.0 * torch.eye(n)[targets][None, None]
    options = AttentionOptions(scaling=1.0)
    if policy is None:
        adding = MassTotals()
        adding.step(queries, keys, keys, options=options, phase=Phase.PREFILL)
        policy = H2OGlobal(totals=Totals({0: adding.mass}, torch.tensor([n])), recent=1)
    layer, kept = Layer(policy, budget), []
    for at in (slice(0, prompt), *(slice(t, t + 1) for t in range(prompt, n))):
        layer.step(
            queries[:, :, at], keys[:, :, at], keys[:, :, at], options=options, phase=phase_of(queries[:, :, at])
        )
        kept.append(retained(layer)[0][0])
    return kept


def test_local_and_global_statistic_differ_where_importance_comes_late():
    """In the prompt 0 is looked at three times, 2 twice and 4 once; everything after it looks at 4."""
    targets = [0, 0, 2, 2, 4, 0, 4, 4, 4, 4]
    assert looks(parse("h2o:recent=1"), targets, 3) == [[0, 2, t] for t in range(5, 10)]
    assert looks(None, targets, 3) == [[0, 4, t] for t in range(5, 10)]


def test_local_and_global_statistic_agree_where_importance_persists():
    targets = [0, 0, 2, 2, 4, 0, 0, 2, 2, 0]
    expected = [[0, 2, t] for t in range(5, 10)]
    assert looks(parse("h2o:recent=1"), targets, 3) == expected
    assert looks(None, targets, 3) == expected


def test_a_token_is_kept_for_what_is_still_to_come():
    """4 is not looked at in the prompt at all, its own row included."""
    targets = [0, 0, 2, 2, 0, 0, 4, 4, 4, 4, 4]
    assert looks(parse("h2o:recent=1"), targets, 3)[0] == [0, 2, 5]
    assert looks(None, targets, 3)[0] == [0, 4, 5]


# -- without chosen keys -----------------------------------------------------------------------------------------------


def hide(case: Case, streams: list[Stream], keys: Keys, recent: int) -> list[Tensor]:
    """The package: outputs of the real tokens, per row."""
    out, real = run_whole(HiddenKeys(keys.chosen[LAYER], recent), case, streams)
    return [out[row][:, real[row]].double() for row in range(len(streams))]


@pytest.mark.parametrize("recent", [0, 3])
@pytest.mark.parametrize("choice", ["heaviest", "lightest", "drawn"])
@pytest.mark.parametrize("inputs", ["random", "hard"])
def test_hidden_keys_are_seen_by_their_own_row_and_the_next_few(inputs, choice, recent):
    """observables.md A4: the top k % by column sums are masked for all rows i > j."""
    case = Case("", 1, (40,), inputs=inputs, pads=(0, 11))
    streams = make_streams(case, 0)
    keys = getattr(measure(case, streams), choice)(0.2)
    for row, (stream, found) in enumerate(zip(streams, hide(case, streams, keys, recent), strict=True)):
        chosen = [set(head.nonzero().flatten().tolist()) for head in keys.chosen[LAYER][row]]
        n = stream.keys.shape[1]
        if choice == "heaviest":
            sums = column_sums(case, stream)
            assert chosen == [set(sorted(range(n), key=lambda j, s=s: (s[j], j))[-(n // 5) :]) for s in sums]
        assert {len(head) for head in chosen} == {n // 5}
        expected = rules.attend_where(
            stream.queries.tolist(),
            stream.keys.tolist(),
            stream.values.tolist(),
            lambda h, i, j, chosen=chosen: j not in chosen[h] or i - j <= recent,
            case.scaling,
        )
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_lightest_and_heaviest_by_hand():
    totals = Totals({0: torch.tensor([[[3.0, 1.0, 2.0, 1.0, 0.5, 0.0]]])}, torch.tensor([5]))
    chosen = {share: totals.heaviest(share).chosen[0][0, 0].nonzero().flatten().tolist() for share in (0.0, 0.2, 0.6)}
    assert chosen == {0.0: [], 0.2: [0], 0.6: [0, 2, 3]}  # of two equal keys the newer is the heavier
    assert totals.lightest(0.4).chosen[0][0, 0].nonzero().flatten().tolist() == [3, 4]
    assert totals.heaviest(0.2).others().chosen[0][0, 0].tolist() == [False, *[True] * 5]


def test_drawn_keys_depend_on_the_seed_and_nothing_else():
    totals = Totals({0: torch.rand(2, 2, 50), 1: torch.rand(2, 2, 50)}, torch.tensor([50, 50]))
    other = Totals({0: torch.rand(2, 2, 50)}, torch.tensor([50, 50]))
    one, again = totals.drawn(0.3).chosen[0], other.drawn(0.3).chosen[0]
    assert torch.equal(one, again)
    assert not torch.equal(one, totals.drawn(0.3, seed=1).chosen[0])
    assert not torch.equal(one, totals.drawn(0.3).chosen[1])
    assert not torch.equal(one[0], one[1])


def test_masking_the_heavy_hitter_sends_its_rows_elsewhere():
    """All rows look at token 0; hidden, its rows spread over what is left, and only row 0 sees it."""
    n = 5
    keys = torch.eye(n)[None, None]
    queries = 1000.0 * torch.eye(n)[[0] * n][None, None]
    adding, options = MassTotals(), AttentionOptions(scaling=1.0)
    adding.step(queries, keys, keys, options=options, phase=Phase.PREFILL)
    heavy = Totals({0: adding.mass}, torch.tensor([n])).heaviest(0.2)
    out = HiddenKeys(heavy.chosen[0], 0).step(queries, keys, keys, options=options, phase=Phase.PREFILL)
    expected = [[1.0, 0, 0, 0, 0]] + [[0.0, *([1 / i] * i), *([0.0] * (n - 1 - i))] for i in range(1, n)]
    torch.testing.assert_close(out[0, 0], torch.tensor(expected))
