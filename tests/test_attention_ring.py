"""A ring of bits in floats: every row has a place, takes the one of the row that left it, and is counted exactly."""

import pytest
import torch

from kvkeep.attention_stats import BITS, ones, ring, ring_span


def test_each_place_is_one_bit_of_one_word_and_a_float_holds_them_all():
    bits = ring(torch.arange(3 * BITS)[None], 3)[0]
    assert (bits != 0).sum(dim=1).eq(1).all()
    words = bits.sum(dim=0)
    assert words.tolist() == [-1] * 3  # all bits and the sign
    order = torch.randperm(3 * BITS)
    assert bits.float()[order].cumsum(dim=0)[-1].equal(words.float())
    assert bits.float().int().equal(bits)


@pytest.mark.parametrize("words", [1, 2, 4])
def test_a_row_takes_the_place_of_the_row_that_came_a_ring_before(words):
    rows = torch.arange(words * BITS)[None]
    assert ring(rows, words).equal(ring(rows + 7 * words * BITS, words))
    assert not ring(torch.tensor([[-1, -5]]), words).any()


@pytest.mark.parametrize(
    ("first", "stop"), [(0, 0), (0, 1), (3, 40), (-9, 4), (90, 131), (60, 400), (10**9, 10**9 + 50)]
)
def test_a_span_is_the_last_of_its_rows(first, stop):
    words = 2
    want = ring(torch.arange(max(first, 0, stop - words * BITS), stop)[None], words).sum(dim=1).int()
    assert ring_span(torch.tensor([first]), torch.tensor([stop]), words).equal(want)


def test_ones_are_counted():
    words = torch.cat([torch.arange(-40, 40), 2 ** torch.arange(24), -(2 ** torch.arange(25))]).int()
    assert ones(words).tolist() == [f"{n & (2**BITS - 1):b}".count("1") for n in words.tolist()]
