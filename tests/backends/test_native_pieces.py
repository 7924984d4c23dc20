"""Prompts whose keys are read a piece at a time: weights that are kept, holes, logits that rise from piece to piece."""

import pytest
import torch
from conformance.cases import OF_CHUNK, chunk

from kvkeep.attention_stats import Low, LowRows, Mass, MassAndLast, Nothing
from kvkeep.backends import AttentionInputs, SecondReading, reference
from kvkeep.backends.native import NativeBackend, native, ops
from kvkeep.backends.reference import ReferenceBackend
from kvkeep.backends.torch import TorchBackend
from kvkeep.rotary import Rotation
from kvkeep.types import AttentionOptions, Slots

pytestmark = pytest.mark.skipif(native().library is None, reason=native().detail)

PLAIN = AttentionOptions(scaling=0.2)
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def by_kernel(query, slots, now, statistic, options=PLAIN):
    found = ops.attend_prefill(AttentionInputs(query, slots, now, options, statistic))
    assert found is not None
    return found[:2]


def check(query, slots, now, statistic, options=PLAIN, backend=None):
    """Outputs and sums are those of a backend in double precision; counts differ next to the threshold only."""
    out, report = by_kernel(query, slots, now, statistic, options)
    wide = query.double(), slots._replace(keys=slots.keys.double(), values=slots.values.double()), now
    want, expected = (backend or TorchBackend()).attend(AttentionInputs(*wide, statistic=statistic, options=options))
    real = (now >= 0)[:, None, :, None].expand_as(want)
    close = {"rtol": 2.0**-8, "atol": 2e-5} if query.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(out[real].double(), want[real].double(), **close)
    for name, found in report.sums.items():
        if name.startswith("low"):
            assert (found != expected.sums[name]).float().mean() < 1e-3
        else:
            torch.testing.assert_close(found, expected.sums[name].float(), rtol=1e-4, atol=1e-6)


def with_holes(query, slots, now):
    """Panels of 64 keys that are empty or almost so, at both ends of a piece, in its middle, and a whole piece."""
    empty = torch.zeros(slots.positions.shape[2], dtype=torch.bool)
    for begin, end in ((0, 64), (130, 255), (330, 400), (500, 830)):
        empty[begin:end] = True
    positions = slots.positions.masked_fill(empty, -1)
    positions[:, 1:] = slots.positions[:, 1:]  # other heads have none
    return query, slots._replace(positions=positions), now


def counted(last):
    return [
        Mass(),
        Mass(rows=5, gain=2.5, decay=0.9, last=last),
        MassAndLast(last=last),
        Low(live=True),
        Low(rows=11, theta=2.0),
        LowRows(rows=33, words=2, last=torch.tensor([last, last - 3]), due=7),
    ]


@BOTH
@pytest.mark.parametrize("number", range(6))
def test_panels_that_are_skipped_within_a_piece(dtype, number):
    given = with_holes(*chunk(T=37, S=900, D=48, E=80, G=2, pads=3, dtype=dtype))
    statistic = counted(int(given[2].max()))[number]
    for options in (PLAIN, OF_CHUNK["all"], AttentionOptions(scaling=0.1, window=400, softcap=2.0)):
        check(*given, statistic, options)


@pytest.mark.slow
@pytest.mark.parametrize("option", OF_CHUNK)
@pytest.mark.parametrize("number", range(6))
def test_sums_of_bfloat16_are_those_of_the_loops(number, option):
    for T, S, D, G in ((5, 259, 33, 2), (50, 7, 64, 2), (1, 600, 16, 2)):
        given = chunk(T=T, S=S, D=D, G=G, pads=min(2, T - 1), dtype=torch.bfloat16)
        check(*given, counted(int(given[2].max()))[number], OF_CHUNK[option], ReferenceBackend())


@BOTH
@pytest.mark.parametrize("step", [3.0, 7.9, 8.1, 20.0, -7.9, -20.0])
def test_logits_that_rise_or_fall_from_piece_to_piece(dtype, step):
    """What has been summed is scaled down for much larger logits only; a gain makes smaller ones large."""
    query, slots, now = chunk(T=20, S=1500, D=32, G=2, pads=2, dtype=dtype)
    keys, query = slots.keys.clone(), query.clone()
    keys[..., 0] = (torch.arange(1520) // 256 * step / 4).to(dtype)
    query[..., 0] = 4.0
    given = query, slots._replace(keys=keys), now
    options = AttentionOptions(scaling=1.0, sinks=torch.tensor([0.3, -1.0, 2.0, 5.0]))
    for statistic in (Nothing(), Mass(), Mass(gain=0.3), Mass(gain=2.5), Mass(gain=30.0), Low(live=True)):
        out, report = by_kernel(*given, statistic, options)
        wide = query.double(), slots._replace(keys=keys.double(), values=slots.values.double()), now
        want, expected = TorchBackend().attend(AttentionInputs(*wide, statistic=statistic, options=options))
        real = (now >= 0)[:, None, :, None].expand_as(want)
        torch.testing.assert_close(out[real].double(), want[real], rtol=2.0**-8, atol=2e-4)
        if statistic.fields and isinstance(statistic, Mass):
            torch.testing.assert_close(report.mass, expected.mass.float(), rtol=2e-3, atol=1e-6)


@BOTH
def test_weights_lose_less_than_two_to_the_minus_sixteen(dtype):
    """Exponentials and halves together, far below what the sums of many rows would hide."""
    query, slots, now = chunk(T=2, S=2046, D=16, G=1, B=1, dtype=dtype)
    keys = torch.zeros_like(slots.keys)
    keys[..., 0] = (torch.arange(2048) * -0.01).to(dtype)  # as logits they are exact
    given = torch.ones_like(query), slots._replace(keys=keys), now
    _, report = by_kernel(*given, Mass(rows=1, last=int(now.max())), AttentionOptions(scaling=1.0))
    there = (slots.positions >= 0) & (slots.positions <= now.max())
    want = keys[..., 0].double().masked_fill(~there, -torch.inf).softmax(dim=-1)
    torch.testing.assert_close(report.mass.double(), want, rtol=2e-5, atol=1e-12)


@BOTH
def test_weights_below_what_a_float_holds_are_zeros(dtype):
    """The last keys' exponentials are below the smallest float."""
    query, slots, now = chunk(T=8, S=300, D=16, G=1, B=1, dtype=dtype)
    keys = torch.zeros_like(slots.keys)
    keys[..., 0] = torch.linspace(0.0, -120.0, 308).to(dtype)
    query = torch.ones_like(query)
    options = AttentionOptions(scaling=1.0)
    check(query, slots._replace(keys=keys), now, Mass(), options)
    _, report = by_kernel(query, slots._replace(keys=keys), now, Mass(), options)
    tiny = torch.finfo(torch.float32).tiny
    assert ((report.mass == 0) | (report.mass > tiny / 64)).all()
    assert not report.mass[..., keys[0, 0, :, 0] < -100].any()


@BOTH
def test_the_rows_that_are_counted_change_no_output_under_a_gain(dtype):
    given = chunk(T=200, S=600, D=64, G=3, pads=3, dtype=dtype)
    plain, _ = by_kernel(*given, Mass(gain=2.5, rows=0))
    for rows in (3, 9, -1):
        assert torch.equal(by_kernel(*given, Mass(gain=2.5, rows=rows))[0], plain)


@BOTH
def test_a_row_alone_gets_what_it_gets_beside_others_of_another_gain(dtype):
    query, slots, now = chunk(T=60, S=700, D=64, G=2, B=2, dtype=dtype)
    gains = torch.tensor([0.5, 40.0])
    out, report = by_kernel(query, slots, now, Mass(gain=gains))
    for i in (0, 1):
        row = slice(i, i + 1)
        alone, own = by_kernel(query[row], Slots(*(x[row] for x in slots)), now[row], Mass(gain=gains[row]))
        assert torch.equal(alone, out[row])
        assert torch.equal(own.mass, report.mass[row])


@BOTH
@pytest.mark.parametrize("option", OF_CHUNK)
def test_a_second_reading_of_many_pieces(dtype, option):
    query, slots, now = with_holes(*chunk(T=30, S=900, D=32, G=2, pads=3, dtype=dtype))
    rotation, length = Rotation(torch.tensor([1.0, 0.1, 0.01])), torch.full((2, 1), int(now.max()) + 1)
    for statistic in (Nothing(), Mass(), Mass(gain=2.0, rows=4), Low()):
        asked = {"statistic": statistic, "options": OF_CHUNK[option]}
        out, report, again = NativeBackend().attend_twice(
            AttentionInputs(query, slots, now, **asked), SecondReading(length=length, rotation=rotation)
        )
        want, expected = by_kernel(query, slots, now, statistic, OF_CHUNK[option])
        assert torch.equal(out, want)
        assert all(torch.equal(report.sums[name], field) for name, field in expected.sums.items())
        second = reference.reread(
            AttentionInputs(query, slots, now, options=OF_CHUNK[option]),
            SecondReading(length=length, rotation=rotation),
        )
        torch.testing.assert_close(again.double(), second, rtol=1e-4, atol=1e-6)
