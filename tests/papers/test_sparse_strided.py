"""The strided pattern of the Sparse Transformer: newest tokens and a grid, alone and with heavy hitters."""

import pytest

from .by_hand import row, step
from .cases import CHAT, DECODE, Case, family, variant
from .lockstep import choose, compare, lockstep, played
from .oracles import rule

CASES = [
    *family("sparse_strided"),
    *variant("sparse_strided:stride=3", budgets=(2, 5, 16)),
    *variant("sparse_strided:h2=0.5", budgets=(4, 5, 16)),
    Case("sparse_strided:h2=0.25,stride=5", (12, 16), CHAT, pads=(0, 4), pause=5),
    Case("sparse_strided:h2=0.5", 12, (40, *DECODE), inputs="drift", heads=1, group=4),
    Case("sparse_strided", 16, (40, *(1,) * 200), heads=1),
    Case("sparse_strided:h2=0.5", 16, (40, *(1,) * 200), heads=1),
]

TIES = [
    Case("sparse_strided:h2=0.5", budget, (24, *DECODE), inputs=inputs, group=group)
    for budget, inputs, group in ((5, "twins", 1), (16, "twins", 4), (7, "constant", 2), (8, "hard", 2))
]


@pytest.mark.long
@pytest.mark.parametrize("case", [*CASES, *TIES], ids=str)
def test_keeps_the_pattern_and_the_heavy_hitters(case):
    compare(case)


def test_the_stride_follows_from_the_last_prompt():
    """40 tokens and 16 slots: 8 newest and every fifth before them, at most 8 of those."""
    first, *later = [turn for _, turn in lockstep(Case("sparse_strided", 16, (40, *DECODE)))]
    assert first.kept == [[[4, 9, 14, 19, 24, 29, *range(32, 40)]] * 2] * 2
    for turn in later:
        seen = turn.seen[0]
        grid = [j for j in range(seen - 8) if j % 5 == 4][-8:]
        assert turn.kept == [[[*grid, *range(seen - 8, seen)]] * 2] * 2


def test_without_a_prompt_the_stride_is_two():
    *_, (_, turn) = lockstep(Case("sparse_strided", 6, (1,) * 30))
    assert turn.kept == [[[21, 23, 25, 27, 28, 29]] * 2] * 2


def test_a_stride_of_one_is_the_sliding_window():
    case = Case("sparse_strided:stride=1", 9, (24, *DECODE))
    assert played(case, case.policy) == played(case, "local")


def test_the_heads_agree_on_the_pattern_and_differ_in_the_heavy_hitters():
    case = Case("sparse_strided:h2=0.5,stride=4", 12, (40, *DECODE), heads=4, group=1)
    heavy = set()
    for _, turn in lockstep(case):
        for row_kept, seen in zip(turn.kept, turn.seen, strict=True):
            grid = [j for j in range(seen - 3) if j % 4 == 3][-3:]
            pattern = {*grid, *range(seen - 3, seen)}
            assert all(pattern <= set(kept) and len(kept) == 12 for kept in row_kept)
            heavy.update(tuple(sorted(set(kept) - pattern)) for kept in row_kept)
    assert len(heavy) > 4


def test_tokens_outside_of_the_pattern_go_even_if_there_is_room():
    """The four newest stay, and one of the six before them."""
    assert step(rule("sparse_strided:stride=5", 8, 1), [row(*[0.1] * 10)]) == [4, 6, 7, 8, 9]


def test_a_wider_grid_after_a_second_prompt_keeps_what_is_still_there():
    """The grid of every third token becomes one of every fourth: 20 tokens, then 28, for 14 slots."""
    case = Case("sparse_strided", 14, (20, 8), pads=(0,))
    _, (first, second) = choose(case)
    assert first.kept[0][0] == [2, 5, 8, 11, *range(13, 20)]
    assert second.kept[0][0] == [11, 15, 19, *range(21, 28)]
