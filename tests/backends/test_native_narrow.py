"""Prompts in bfloat16, which some processors multiply in pairs or squares: odd scalings, sizes, threads with torch."""

import threading

import pytest
import torch
from conformance.cases import chunk

from kvkeep.attention_stats import Mass, Nothing
from kvkeep.backends import AttentionInputs
from kvkeep.backends.native import native, ops
from kvkeep.backends.torch import TorchBackend
from kvkeep.types import AttentionOptions

pytestmark = pytest.mark.skipif(native().library is None, reason=native().detail)

PLAIN = AttentionOptions(scaling=0.2)
SINKS = torch.tensor([0.3, -1.0, 2.0, 5.0])


def by_kernel(query, slots, now, statistic, options):
    found = ops.attend_prefill(AttentionInputs(query, slots, now, options, statistic))
    assert found is not None
    return found[0], found[1].sums.get("mass")


def check(query, slots, now, statistic, options):
    """Outputs and masses are those of torch in double precision."""
    out, mass = by_kernel(query, slots, now, statistic, options)
    wide = query.double(), slots._replace(keys=slots.keys.double(), values=slots.values.double()), now
    want, expected = TorchBackend().attend(AttentionInputs(*wide, statistic=statistic, options=options))
    torch.testing.assert_close(out.double(), want, rtol=2.0**-8, atol=2e-5)
    torch.testing.assert_close(mass, expected.mass.float(), rtol=1e-4, atol=1e-5)


def test_scalings_of_any_sign_and_size():
    given = chunk(T=40, S=90, D=64, dtype=torch.bfloat16)
    for scaling in (0.0, -0.2, 1e-50, -1e-50, 1e-40, 3.0):
        for more in ({}, {"window": 9, "sinks": SINKS}, {"softcap": 2.0}):
            check(*given, Mass(), AttentionOptions(scaling=scaling, **more))


def test_logits_of_any_size():
    """Where the largest logit is huge, its rounding alone is far above what an exponential can take."""
    query, slots, now = chunk(T=40, S=90, D=64, dtype=torch.bfloat16)
    for size in (1e-6, 1e2, 1e4, 1e5, 1e8, 1e15):
        given = query * size, slots._replace(keys=slots.keys * size), now
        for options in (PLAIN, AttentionOptions(scaling=0.2, window=9, sinks=SINKS)):
            check(*given, Mass(), options)
        check(*given, Mass(), AttentionOptions(scaling=0.2 / size / size, softcap=2.0))


def test_heads_of_odd_sizes():
    """Dims lie in pairs; the last one may be alone."""
    for D, E, G in ((1, 1, 1), (33, 31, 2), (65, 129, 5), (95, 64, 9)):
        for T in (2, 17):
            given = chunk(T=T, S=65, D=D, E=E, G=G, dtype=torch.bfloat16)
            check(*given, Mass(), AttentionOptions(scaling=D**-0.5))


def test_what_a_block_leaves_behind_does_not_reach_rows_that_see_nothing():
    query, slots, now = chunk(T=512, S=1, D=32, B=1, dtype=torch.bfloat16, pads=256)
    query[:, :, 256:] = torch.nan
    out, _ = by_kernel(query, slots, now, Nothing(), PLAIN)
    assert out[:, :, 256:].isnan().all()
    assert not out[:, :, :256].any()


def test_a_gain_multiplies_no_rounding_of_a_huge_logit():
    query, slots, now = chunk(T=40, S=90, D=64, dtype=torch.bfloat16)
    _, mass = by_kernel(query * 100, slots, now, Mass(gain=1e30), PLAIN)
    torch.testing.assert_close(mass.sum(dim=-1), torch.full((2, 2), 40.0))


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_that_multiply_with_torch_between_calls(threads):
    """Products of torch use the same registers for squares, and lay them out for themselves."""
    g = torch.Generator().manual_seed(0)
    asked = [chunk(T=70 + 20 * i, S=60 + i, D=64, dtype=torch.bfloat16, seed=i) for i in range(4)]
    pairs = [torch.randn(2, 96 + 32 * i, 96 + 32 * i, generator=g).bfloat16() for i in range(4)]

    def one(i):
        first = pairs[i][0] @ pairs[i][1]
        return first, *by_kernel(*asked[i], Mass(), PLAIN), pairs[i][1] @ pairs[i][0]

    alone, differing = [one(i) for i in range(4)], []

    def work(i):
        torch.set_num_threads(threads)
        for _ in range(10):
            if not all(map(torch.equal, one(i), alone[i])):
                differing.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not differing
