"""The kernel's second reading of a prompt, against whole matrices in float64: wide numbers are split into narrow ones
where the processor multiplies those in squares, and read twice or kept otherwise."""

import pytest
import torch
from conformance.cases import chunk

from kvkeep.attention_stats import Mass, Nothing
from kvkeep.backends import AttentionInputs
from kvkeep.backends.native import native, ops
from kvkeep.types import AttentionOptions

pytestmark = pytest.mark.skipif(native().library is None, reason=native().detail)

PLAIN = AttentionOptions(scaling=0.2)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def prompt(dtype=torch.float32, **shape):
    """Queries, slots and positions, and the queries of the second reading."""
    query, slots, now = chunk(**{"T": 40, "S": 90, "D": 64, "dtype": dtype} | shape)
    second = torch.randn(query.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    return query, slots._replace(keys=slots.keys.nan_to_num()), now, second


def shares(query, slots, now, second, options=PLAIN, statistic=None):
    found = ops.attend_twice(
        AttentionInputs(query, slots, now, statistic=statistic or Nothing(), options=options), second
    )
    assert found is not None
    return found[2]


def by_definition(query, slots, now, second, options=PLAIN):
    G, positions = query.shape[1] // slots.keys.shape[1], slots.positions.expand(slots.keys.shape[:3])
    keys = slots.keys.double().repeat_interleave(G, dim=1)
    there = positions.repeat_interleave(G, dim=1)[:, :, None]

    def logits(queries):
        found = queries.double() @ keys.mT * options.scaling
        return found if options.softcap is None else options.softcap * torch.tanh(found / options.softcap)

    at = now[:, None, :, None]
    seen = (there >= 0) & (there <= at)
    if options.window is not None:
        seen &= there > at - options.window
    first = logits(query).masked_fill(~seen, -torch.inf).logsumexp(dim=-1)
    if options.sinks is not None:
        first = torch.logaddexp(first, options.sinks.double()[None, :, None])
    again = logits(second).masked_fill(there < 0, -torch.inf)
    share = again - torch.logaddexp(again.logsumexp(dim=-1), first)[..., None]
    share = share.masked_fill(at < 1, -torch.inf)
    return share.unflatten(1, (-1, G)).flatten(2, 3).amax(dim=2).exp()


def check(*given, options=PLAIN, rtol=2e-5):
    torch.testing.assert_close(shares(*given, options).double(), by_definition(*given, options), rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("D", "E", "G"), [(64, 64, 3), (1, 1, 1), (33, 31, 2), (80, 48, 1), (95, 64, 9), (256, 33, 5)])
def test_shares_are_those_of_the_definition_for_every_head_dim(D, E, G, dtype):
    for T in (1, 2, 17, 70):
        check(*prompt(dtype, T=T, S=100, D=D, E=E, G=G), options=AttentionOptions(scaling=D**-0.5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("S", [64, 257, 300, 513])
def test_keys_are_read_a_piece_at_a_time(S, dtype):
    options = AttentionOptions(scaling=0.2, window=9, softcap=5.0, sinks=torch.tensor([0.3, -1.0, 2.0, 5.0]))
    for one in (PLAIN, options):
        check(*prompt(dtype, T=50, S=S, pads=5), options=one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_far_above_those_of_the_first_reading(dtype):
    """Relative to the first reading their exponentials are no floats."""
    query, slots, now, second = prompt(dtype)
    for size in (30.0, 100.0, 300.0):
        check(query * 1e-3, slots, now, second * size, rtol=1e-3)
    mixed = second * torch.tensor([1.0, 300.0]).to(dtype).repeat(20)[:, None]  # far ones beside near ones
    check(query, slots, now, mixed, rtol=1e-3)


def test_scalings_of_any_sign():
    """Keys that are not there stay so."""
    for dtype in DTYPES:
        for scaling in (0.0, -0.1, 1e-50):
            for more in ({}, {"softcap": 5.0}):
                check(*prompt(dtype, T=50, S=100), options=AttentionOptions(scaling=scaling, **more))


def test_numbers_in_float32_lose_nothing_in_products_of_narrow_ones():
    """Logits of 1,000 that differ in their seventh digit."""
    query, slots, now, second = prompt(D=32)
    growing = 1 + torch.arange(slots.keys.shape[2])[:, None] * 2.0**-20
    keys = torch.ones_like(slots.keys) * growing
    given = query, slots._replace(keys=keys), now, torch.ones_like(second) * 31.25
    options = AttentionOptions(scaling=1.0)
    found, want = shares(*given, options).double(), by_definition(*given, options)
    assert want.max() / want.min() > 1.05
    torch.testing.assert_close(found, want, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [torch.inf, -torch.inf])
def test_an_infinite_key_is_worth_nothing_and_leaves_the_others_theirs(number, dtype):
    query, slots, now, second = prompt(dtype)
    slots.keys[0, 1, 7, 3] = number
    there = slots.positions[0, 1] >= 0
    assert there[7]
    there[7] = False
    found = shares(query, slots, now, second)
    assert torch.equal(found[0, 1] > 0, there)
    assert found.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neither_threads_nor_other_rows_change_a_share(dtype):
    query, slots, now, second = prompt(dtype, T=130, S=300, pads=3)
    whole = shares(query, slots, now, second)
    torch.testing.assert_close(shares(query, slots, now, second, statistic=Mass(rows=3)), whole, rtol=2e-6, atol=0.0)
    one = slice(1, 2)
    alone = type(slots)(*(x[one] for x in slots))
    assert torch.equal(shares(query[one], alone, now[one], second[one]), whole[one])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(shares(query, slots, now, second), whole)
    finally:
        torch.set_num_threads(threads)
