"""Every backend under slot positions: attention to unrotated keys, each rotated to the rank of its token."""

import dataclasses
import itertools

import pytest
import torch

from kvkeep.attention_stats import Low, Mass
from kvkeep.backends import AttentionInputs, reference
from kvkeep.rotary import Rotation
from kvkeep.types import AttentionOptions, Slots, Top

from .cases import BACKENDS, NOW, SLOW, backend_of, chunk, on, token

PLAIN = AttentionOptions(scaling=0.1)
FAST = [name for name in BACKENDS if name not in SLOW]
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def rotation(turned, scaling=1.0):
    """Angles of that many dims; the fastest pair turns by one radian per position."""
    return Rotation(1.0 / 50 ** (torch.arange(0, turned, 2) / turned), scaling)


def unique(given, span=NOW, seed=0):
    """The same holes, and positions that no two tokens of a head share, up to `span` behind the query's."""
    query, (keys, values, positions), now = given
    g, S = torch.Generator().manual_seed(seed), positions.shape[-1]
    draws = [torch.randperm(span - 1, generator=g)[:S] for _ in range(positions.shape[:2].numel())]
    fresh = NOW - 1 - torch.stack(draws).view(positions.shape).int()
    fresh[..., S // 3] = NOW
    return query, Slots(keys, values, fresh.masked_fill(positions < 0, -1)), now


def turned(x, ranks, angles):
    """Vectors turned to their ranks, in float64."""
    cos, sin = angles.angles(ranks, x.dtype).double().chunk(2, dim=-1)
    F, x = cos.shape[-1], x.double()
    first, second, rest = x[..., :F], x[..., F : 2 * F], x[..., 2 * F :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def definition(given, angles, statistic, options):
    """A token's rank is the number of older tokens that its head holds."""
    query, (keys, values, positions), now = given
    held, G = positions >= 0, query.shape[1] // keys.shape[1]
    older = (held[..., None, :] & (positions[..., None, :] < positions[..., :, None])).sum(dim=-1)
    own = (held[..., None, :] & (positions[..., None, :] < now[:, None, :, None])).sum(dim=-1)
    q = turned(query, own.repeat_interleave(G, dim=1), angles)
    slots = Slots(turned(keys.nan_to_num(), older, angles), values.double().nan_to_num(), positions)
    return reference.attend(AttentionInputs(q, slots, now, statistic=statistic, options=options))


def check(name, given, angles, statistic=None, options=PLAIN):
    statistic = Mass() if statistic is None else statistic
    given, statistic, options = on(name, given, statistic, options)
    want, want_report = definition(given, angles, statistic, options)
    query, slots, now = given
    out, report = (
        backend_of(name)
        .at_ranks(angles)
        .attend(AttentionInputs(query, slots, now, statistic=statistic, options=options))
    )
    real = (now >= 0)[:, None, :, None].expand_as(want)
    error = ROUNDING[query.dtype]
    assert out.dtype == query.dtype
    torch.testing.assert_close(out[real].double(), want[real], rtol=error, atol=error)
    if name == "native":  # which does not round the turned keys
        error = ROUNDING[torch.float32]
    for field in statistic.fields:
        torch.testing.assert_close(report.sums[field].double(), want_report.sums[field].double(), rtol=0, atol=error)
    return out, report


SHAPES = [(7, 6), (32, 32), (33, 32), (64, 64), (80, 32), (96, 96), (96, 72), (128, 128), (200, 136)]


@pytest.mark.parametrize(("D", "F2"), SHAPES)
@pytest.mark.parametrize("name", FAST)
def test_shapes_of_a_token(name, D, F2):
    for (S, G), dtype in itertools.product([(1, 1), (17, 7), (70, 2), (257, 3)], ROUNDING):
        check(name, unique(token(S, D, G, dtype, E=24)), rotation(F2, scaling=1.0 if D % 3 else 1.2))


@pytest.mark.parametrize("name", sorted(SLOW))
def test_a_token(name):
    check(name, unique(token(17, 16, 2)), rotation(12))


@pytest.mark.parametrize("name", ["native", "torch"])
@pytest.mark.parametrize("span", [70, 300, NOW, NOW // 2])
def test_tokens_from_just_now_and_from_long_ago(name, span):
    """However far the tokens of a head are apart: the kernel counts near ones and sorts the others."""
    check(name, unique(token(17, 32, 2), span), rotation(32))
    query, slots, now = unique(token(17, 32, 2), span)
    later = torch.where(slots.positions == NOW, 2**31 - 2, slots.positions)
    check(name, (query, slots._replace(positions=later), torch.where(now < 0, -1, 2**31 - 2)), rotation(32))


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("F2", [32, 64])
@pytest.mark.parametrize("sinks", [0, 4, 16])
@pytest.mark.parametrize("hole", [None, 0, 15, 16, 40])
def test_tokens_that_follow_one_another(name, F2, sinks, hole):
    """Sinks, then a ring of recent tokens that begins anywhere; the kernel takes their ranks several at a time."""
    query, (keys, values, positions), now = token(83, 64, 2)
    S = positions.shape[-1]
    for row, head in itertools.product(*map(range, positions.shape[:2])):
        ring = torch.arange(NOW - (S - sinks) + 1, NOW + 1).roll(7 * row + 3 * head)
        positions[row, head] = torch.cat([torch.arange(sinks), ring])
    if hole is not None:
        positions[..., hole] = -1
        positions[0, 0, hole : hole + 20] = torch.arange(-1, 19)  # an empty slot, and what seems to follow it
        positions[0, 0, hole + 20 :] = -1
        positions[0, 0, :hole] = -1
    keys, values = (x.nan_to_num().masked_fill((positions < 0)[..., None], torch.nan) for x in (keys, values))
    check(name, (query, Slots(keys, values, positions), now), rotation(F2))


@pytest.mark.parametrize("name", FAST)
def test_options_and_statistics(name):
    sinks = torch.tensor([0.3, -1.0, 2.0, 5.0, -torch.inf, 0.0])
    all_at_once = AttentionOptions(scaling=0.1, window=3000, softcap=2.0, sinks=sinks)
    top = dataclasses.replace(PLAIN, top=Top(torch.full((6,), 4), renormalise=True))
    for statistic, options in itertools.product([Mass(), Mass(gain=1.5), Low(live=True)], [PLAIN, all_at_once, top]):
        check(name, unique(token(70, 64, 3)), rotation(64), statistic, options)


@pytest.mark.parametrize("name", FAST)
def test_a_chunk(name):
    query, slots, now = chunk(pads=5)
    slots = slots._replace(keys=slots.keys.nan_to_num(), values=slots.values.nan_to_num())
    check(name, (query, slots, now), rotation(32))


@pytest.mark.parametrize("name", FAST)
def test_a_chunk_whose_heads_share_positions(name):
    query, slots, now = chunk(S=40, shared=True)
    per_head = slots._replace(positions=slots.positions.expand(slots.keys.shape[:3]))
    backend, asked = backend_of(name).at_ranks(rotation(32)), {"statistic": Mass(), "options": PLAIN}
    out, report = backend.attend(AttentionInputs(query, slots, now, **asked))
    want, want_report = backend.attend(AttentionInputs(query, per_head, now, **asked))
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(report.mass, want_report.mass, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["native", "torch"])
def test_a_query_whose_own_token_is_not_held(name):
    query, slots, now = unique(token(40, 32, 2))
    slots = slots._replace(positions=slots.positions.masked_fill(slots.positions == NOW, -1))
    slots.positions[0] = -1
    given = query, slots._replace(keys=slots.keys.nan_to_num(), values=slots.values.nan_to_num()), now
    want, _ = definition(given, rotation(32), Mass(), PLAIN)
    out, _ = backend_of(name).at_ranks(rotation(32)).attend(AttentionInputs(*given, statistic=Mass(), options=PLAIN))
    torch.testing.assert_close(out[[1, 2, 4]].double(), want[[1, 2, 4]], rtol=1e-5, atol=1e-5)
    assert out[0].isfinite().all()
