"""The fixed pattern of the Sparse Transformer: the current block and the ends of the blocks before it."""

import pytest

from .cases import CHAT, DECODE, Case, family, variant
from .lockstep import compare, lockstep, played

CASES = [
    *family("sparse_fixed"),
    *variant("sparse_fixed:summary=3", budgets=(5, 12, 16)),
    *variant("sparse_fixed:h2=0.5", budgets=(4, 5, 16)),
    Case("sparse_fixed:h2=0.25,summary=2", (12, 16), CHAT, pads=(0, 4), pause=5),
    Case("sparse_fixed:h2=0.5", 12, (40, *DECODE), inputs="drift", heads=1, group=4),
    Case("sparse_fixed", 16, (40, *(1,) * 200), heads=1),
    Case("sparse_fixed:h2=0.5,summary=2", 16, (40, *(1,) * 200), heads=1),
]

TIES = [
    Case("sparse_fixed:h2=0.5", budget, (24, *DECODE), inputs=inputs, group=group)
    for budget, inputs, group in ((5, "twins", 1), (16, "twins", 4), (7, "constant", 2), (8, "hard", 2))
]


@pytest.mark.parametrize("case", [*CASES, *TIES], ids=str)
def test_keeps_the_pattern_and_the_heavy_hitters(case):
    compare(case)


@pytest.mark.long
@pytest.mark.parametrize("summary", [1, 3])
def test_a_block_is_whole_until_the_next_one_begins(summary):
    """16 slots, blocks of 8: a whole block leaves 8 slots to summaries, and the next block adds one to those."""
    for _, turn in lockstep(Case(f"sparse_fixed:summary={summary}", 16, (29, *(1,) * 99))):
        seen = turn.seen[0]
        start = (seen - 1) // 8 * 8
        n_ends = min(8 + summary, 16 - (seen - start))
        ends = [j for j in range(start) if j % 8 >= 8 - summary][-n_ends:]
        assert turn.kept == [[[*ends, *range(start, seen)]] * 2] * 2


def test_the_first_token_of_a_block_pushes_out_the_block_before():
    sizes = [len(turn.kept[0][0]) for _, turn in lockstep(Case("sparse_fixed:summary=1", 8, (1,) * 25))]
    assert sizes == [1, 2, 3, 4, 5, 6, 7, 8, 3, 4, 5, 6, 4, 5, 6, 7, 5, 6, 7, 8, 6, 7, 8, 8, 6]


def test_the_heads_agree_on_the_pattern_and_differ_in_the_heavy_hitters():
    heavy = set()
    for _, turn in lockstep(Case("sparse_fixed:h2=0.5", 16, (40, *DECODE), heads=4, group=1)):
        for row_kept, seen in zip(turn.kept, turn.seen, strict=True):
            start = (seen - 1) // 4 * 4
            pattern = {*[j for j in range(start) if j % 4 == 3][-4:], *range(start, seen)}
            assert all(pattern <= set(kept) and len(kept) <= 16 for kept in row_kept)
            heavy.update(tuple(sorted(set(kept) - pattern)) for kept in row_kept)
    assert len(heavy) > 4


@pytest.mark.parametrize("summary", [4, 9])
def test_a_summary_as_long_as_the_block_is_the_sliding_window(summary):
    case = Case(f"sparse_fixed:summary={summary}", 8, (24, *DECODE))
    assert played(case, case.policy) == played(case, "local")
