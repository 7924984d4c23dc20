"""What the native kernel promises for many tokens per row, beside what every backend must do."""

import pytest
import torch
from conformance.cases import OF_CHUNK, ON_CHUNK, chunk

from kvkeep.attention_stats import LastHit, Low, LowRows, Mass, MassAndLast, Nothing
from kvkeep.backends import AttentionInputs, reference
from kvkeep.backends.native import NativeBackend, bindings, native, ops
from kvkeep.backends.torch import TorchBackend
from kvkeep.noise import Gumbel
from kvkeep.types import AttentionOptions, Slots

pytestmark = pytest.mark.skipif(native().library is None, reason=native().detail)

PLAIN = AttentionOptions(scaling=0.2)
WORDS = LowRows(rows=40, words=2, last=torch.tensor([1090, 1087]), due=7)
KNOWN = [Nothing(), Mass(), Mass(rows=9, gain=2.5, decay=0.9, last=1090), MassAndLast(last=1090), Low(live=True), WORDS]


def by_kernel(query, slots, now, statistic, options=PLAIN):
    found = ops.attend_prefill(AttentionInputs(query, slots, now, options, statistic))
    assert found is not None
    return found


@pytest.mark.long
@pytest.mark.parametrize("statistic", KNOWN, ids=lambda one: type(one).__name__)
def test_every_known_statistic_comes_from_the_kernel_and_is_that_of_torch(statistic):
    """Larger than what the loops of the judge can do: many panels of keys, blocks of rows, parts and heads."""
    given = chunk(T=512, S=579, D=80, G=3, Hk=3, pads=3)
    for options in (PLAIN, OF_CHUNK["window"], AttentionOptions(scaling=0.1, window=200, softcap=2.0)):
        out, report = by_kernel(*given, statistic, options)
        query, slots, now = given
        wide = query.double(), slots._replace(keys=slots.keys.double(), values=slots.values.double()), now
        want, expected = TorchBackend().attend(AttentionInputs(*wide, statistic=statistic, options=options))
        real = (now >= 0)[:, None, :, None].expand_as(want)
        torch.testing.assert_close(out[real].double(), want[real], rtol=1e-5, atol=5e-6)
        for name, found in report.sums.items():
            if name.startswith("low"):
                assert (found != expected.sums[name]).float().mean() < 1e-3  # only next to the threshold
            else:
                torch.testing.assert_close(found, expected.sums[name].float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("statistic", KNOWN, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(("D", "E", "G"), [(64, 64, 3), (80, 48, 1), (20, 130, 7), (128, 96, 2), (256, 33, 5)])
def test_bfloat16_is_exact_whatever_products_the_processor_has(D, E, G, statistic):
    """Products of narrow numbers are exact, and weights lose far less than the output's own rounding."""
    query, slots, now = chunk(T=150, S=211, D=D, E=E, G=G, pads=3, dtype=torch.bfloat16)
    wide = query.double(), slots._replace(keys=slots.keys.double(), values=slots.values.double()), now
    sinks = torch.linspace(-2.0, 3.0, 2 * G)
    for options in (
        AttentionOptions(scaling=D**-0.5, sinks=sinks),
        AttentionOptions(scaling=0.3, window=90, softcap=2.0, sinks=sinks),
    ):
        out, report = by_kernel(query, slots, now, statistic, options)
        want, expected = TorchBackend().attend(AttentionInputs(*wide, statistic=statistic, options=options))
        real = (now >= 0)[:, None, :, None].expand_as(want)
        torch.testing.assert_close(out[real].double(), want[real], rtol=2.0**-8, atol=2e-5)
        for name, found in report.sums.items():
            if name.startswith("low"):
                assert (found != expected.sums[name]).float().mean() < 1e-3  # only next to the threshold
            else:
                torch.testing.assert_close(found, expected.sums[name].float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("S", [255, 256, 257, 300, 511, 513, 769])
def test_keys_are_read_a_piece_at_a_time(S, dtype):
    """256 of them. The largest logit comes first, in the middle or last; a row may see nothing of a whole piece."""
    query, slots, now = chunk(T=7, S=S, D=64, G=3, pads=2, dtype=dtype)
    n = S + 7
    for scales in (torch.linspace(0.1, 9.0, n), torch.linspace(9.0, 0.1, n), (n // 2 - torch.arange(n)).abs() < 3):
        keys = (slots.keys.float() * scales.float()[:, None]).to(dtype)
        wide = query.double(), slots._replace(keys=keys.double(), values=slots.values.double()), now
        for statistic in (Nothing(), Mass(), Mass(rows=2, gain=2.5, decay=0.9, last=int(now.max())), Low(live=True)):
            for options in (PLAIN, AttentionOptions(scaling=0.2, window=S // 3)):
                out, report = by_kernel(query, slots._replace(keys=keys), now, statistic, options)
                want, expected = TorchBackend().attend(AttentionInputs(*wide, statistic=statistic, options=options))
                close = {"rtol": 2.0**-8, "atol": 2e-5} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
                real = (now >= 0)[:, None, :, None].expand_as(want)
                torch.testing.assert_close(out[real].double(), want[real], **close)
                for name, found in report.sums.items():
                    if not name.startswith("low"):
                        torch.testing.assert_close(found, expected.sums[name].float(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_are_counted_get_the_same_outputs_as_others(dtype):
    """They are read in smaller blocks, which keep their weights."""
    given = chunk(T=200, S=600, D=64, G=3, pads=3, dtype=dtype)
    plain, _ = by_kernel(*given, Nothing())
    for statistic in (Mass(), Mass(rows=9, last=int(given[2].max())), Low(live=True)):
        assert torch.equal(by_kernel(*given, statistic)[0], plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_that_come_after_some_rows_of_a_block_get_nothing_of_them(dtype):
    """Their weights must be zeros, not what another block has left in the same memory."""
    for S in range(0, 64, 4):
        query, slots, now = chunk(T=150, S=S, D=16, G=1, dtype=dtype)
        wide = query.double(), slots._replace(keys=slots.keys.double(), values=slots.values.double()), now
        for statistic in (Mass(), Mass(gain=1.5)):
            _, report = by_kernel(query, slots, now, statistic)
            _, expected = TorchBackend().attend(AttentionInputs(*wide, statistic=statistic, options=PLAIN))
            torch.testing.assert_close(report.mass, expected.mass.float(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [3, 290, 599, 650])
def test_a_number_that_is_none_spoils_the_rows_that_see_it_whatever_its_piece(dtype, number, place):
    query, slots, now = chunk(T=100, S=600, D=64, G=1, B=1, dtype=dtype)
    slots.keys[:, :, place, 5] = number
    for statistic in (Nothing(), Mass()):
        out, _ = by_kernel(query, slots, now, statistic)
        want, _ = TorchBackend().attend(AttentionInputs(query, slots, now, statistic=statistic, options=PLAIN))
        sees = reference.visible(now, slots.positions, None)[..., place, None]  # torch spoils the other rows, too
        assert torch.equal(out.isnan(), want.isnan() & sees)


@pytest.mark.parametrize("statistic", [Mass(), Low(live=True)], ids=lambda one: type(one).__name__)
def test_so_many_keys_that_a_blocks_logits_leave_the_cache(statistic):
    """Blocks do not shrink below some rows, or all keys would be read from memory for every few of them."""
    query, slots, now = chunk(T=45, S=12000, D=16, G=2, Hk=2, pads=3)
    out, report = by_kernel(query, slots, now, statistic)
    want, expected = TorchBackend().attend(AttentionInputs(query, slots, now, statistic=statistic, options=PLAIN))
    real = (now >= 0)[:, None, :, None].expand_as(want)
    torch.testing.assert_close(out[real], want[real], rtol=1e-4, atol=1e-5)
    for name, found in report.sums.items():
        far = (found - expected.sums[name].float()).abs() > 1e-6 + 1e-3 * found.abs()
        assert far.float().mean() < 1e-3  # only next to the threshold of what is low


@pytest.mark.parametrize("statistic", KNOWN, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neither_the_number_of_threads_nor_other_rows_change_anything(dtype, statistic):
    query, slots, now = chunk(T=200, S=100, D=64, G=2, Hk=3, B=2, dtype=dtype)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            found.append(by_kernel(query, slots, now, statistic))
        finally:
            torch.set_num_threads(1)
    alone = [
        by_kernel(query[i : i + 1], Slots(*(x[i : i + 1] for x in slots)), now[i : i + 1], of_row(statistic, i))
        for i in (0, 1)
    ]
    found.append((torch.cat([out for out, _ in alone]), _joined([report for _, report in alone])))
    for out, report in found[1:]:
        assert torch.equal(out, found[0][0])
        for name, tensor in report.sums.items():
            assert torch.equal(tensor, found[0][1].sums[name])


def of_row(statistic, row):
    """The statistic of one row of the batch."""
    if not isinstance(statistic, LowRows):
        return statistic
    return LowRows(rows=40, words=2, last=statistic.last[row : row + 1], due=7)


def _joined(reports):
    first = reports[0]
    return type(first)({name: torch.cat([report.sums[name] for report in reports]) for name in first.sums})


@pytest.mark.parametrize("statistic", [LastHit(), Mass(noise=Gumbel(1, 1, torch.arange(2)))], ids=["last hit", "noise"])
def test_what_the_kernel_does_not_know_is_left_to_torch(statistic, monkeypatch):
    asked, honest = [], TorchBackend.attend
    monkeypatch.setattr(TorchBackend, "attend", lambda *one, **more: asked.append(1) or honest(*one, **more))
    NativeBackend().attend(AttentionInputs(*chunk(), statistic=ON_CHUNK["window"], options=PLAIN))
    assert asked == []
    NativeBackend().attend(AttentionInputs(*chunk(), statistic=statistic, options=PLAIN))
    assert asked == [1]


WRONG = {
    "double precision": lambda q, k, v, p, n: (q.double(), k.double(), v.double(), p, n),
    "different dtypes": lambda q, k, v, p, n: (q.half(), k, v, p, n),
    "positions of queries as floats": lambda q, k, v, p, n: (q, k, v, p, n.float()),
    "positions of fewer queries": lambda q, k, v, p, n: (q, k, v, p, n[:, 1:]),
    "positions of queries on another device": lambda q, k, v, p, n: (q, k, v, p, n.to("meta")),
    "positions of slots as floats": lambda q, k, v, p, n: (q, k, v, p.float(), n),
    "positions of fewer slots": lambda q, k, v, p, n: (q, k, v, p[:, :, 1:], n),
    "fewer values": lambda q, k, v, p, n: (q, k, v[:, :, 1:], p, n),
    "other head dims": lambda q, k, v, p, n: (q, k[..., 1:], v, p, n),
    "heads that are no multiple": lambda q, k, v, p, n: (q[:, :3], k, v, p, n),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_what_would_make_the_kernel_read_elsewhere_is_refused(change):
    query, (keys, values, positions), now = chunk(S=40)
    assert bindings.readable(query, keys, values, now, positions, options=PLAIN)
    q, k, v, p, n = change(query, keys, values, positions, now)
    assert not bindings.readable(q, k, v, n, p, options=PLAIN)


def test_tensors_and_options_that_the_kernel_does_not_take():
    query, (keys, values, positions), now = chunk(S=40)

    def taken(query=query, keys=keys, options=PLAIN):
        slots = Slots(keys, values, positions)
        return ops.attend_prefill(AttentionInputs(query, slots, now, options, Mass())) is not None

    assert taken()
    assert not taken(keys=keys.mT.contiguous().mT)
    assert not taken(options=AttentionOptions(scaling=0.2, sinks=torch.zeros(3)))
    with torch.enable_grad():
        assert not taken(query.clone().requires_grad_())


def test_a_window_skips_panels_that_nobody_sees():
    """Keys behind the window are not even read: what lies there may be anything."""
    query, (keys, values, positions), now = chunk(T=512, S=1, D=64, G=1, B=1)
    given = Slots(keys, values, positions)
    out, report = by_kernel(query[:, :, 300:], given, now[:, 300:], Mass(), AttentionOptions(scaling=0.2, window=30))
    keys[:, :, :200], values[:, :, :200] = torch.nan, torch.nan
    same, again = by_kernel(query[:, :, 300:], given, now[:, 300:], Mass(), AttentionOptions(scaling=0.2, window=30))
    assert torch.equal(out, same)
    assert torch.equal(report.mass, again.mass)


def test_padding_and_rows_that_see_nothing_are_zeros():
    query, slots, now = chunk(T=40, S=30, pads=12)
    out, report = by_kernel(query, slots, now, Mass())
    assert not out[-1, :, :12].any()
    blind, _ = by_kernel(query, slots._replace(positions=torch.full_like(slots.positions, -1)), now, Nothing())
    assert not blind.any()
    torch.testing.assert_close(report.mass.sum(dim=-1)[1], torch.tensor([28.0, 28.0]))


def test_numbers_that_are_none_stay_so_whatever_their_bits():
    query, slots, now = chunk(T=40, S=30)
    query[:, :, 7] = torch.tensor(0x7FC00123, dtype=torch.int32).view(torch.float32)
    out, _ = by_kernel(query, slots, now, Nothing())
    assert out[:, :, 7].isnan().all()
    assert out[:, :, 8].isfinite().all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["queries", "keys"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_that_are_no_numbers_stay_so(dtype, number, where):
    """Otherwise a model whose numbers overflow would read its prompt as if there were no attention, and say nothing."""
    query, slots, now = chunk(T=40, S=30, dtype=dtype)
    (query if where == "queries" else slots.keys).fill_(number)
    for options in (PLAIN, OF_CHUNK["window"]):
        out, report = by_kernel(query, slots, now, Mass(), options)
        want, expected = TorchBackend().attend(AttentionInputs(query, slots, now, statistic=Mass(), options=options))
        real = (now >= 0)[:, None, :, None].expand_as(out)
        assert torch.equal(out.isnan() & real, want.isnan() & real)
        assert out[real].isnan().any()
        seen = reference.visible(now, slots.positions, options.window).any(dim=2)  # others may not even be read
        assert torch.equal(report.mass.isnan()[seen], expected.mass.isnan()[seen])
