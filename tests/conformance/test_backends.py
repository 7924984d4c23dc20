"""Every backend against the definition: attention in float64, and what a policy asks it to report."""

import itertools

import pytest
import torch
from sweeps import sweep

from kvkeep.attention_stats import Low, Mass, Nothing
from kvkeep.backends import AttentionInputs, Backend, SecondReading, reference
from kvkeep.errors import InputError
from kvkeep.rotary import Rotation
from kvkeep.types import AttentionOptions, Slots

from .bounds import check
from .cases import (
    BACKENDS,
    DTYPES,
    GREAT_SINK,
    GREAT_SINK_AND_ALL,
    NOW,
    OF_CHUNK,
    OF_TOKEN,
    ON_CHUNK,
    ON_TOKEN,
    ROWS,
    SLOW,
    asked,
    backend_of,
    chunk,
    on,
    token,
)

PLAIN = AttentionOptions(scaling=0.2)


@pytest.mark.long
@pytest.mark.parametrize(("name", "statistic", "option"), list(asked(ON_TOKEN, OF_TOKEN)))
def test_a_token(name, statistic, option):
    backend = backend_of(name)
    for dtype in DTYPES if name not in SLOW else DTYPES[:1]:
        given = token(70, 40, 3, dtype, E=24)
        check(backend, *on(name, given, ON_TOKEN[statistic], OF_TOKEN[option]))


@pytest.mark.parametrize(("name", "statistic", "option"), list(asked(ON_CHUNK, OF_CHUNK)))
def test_a_chunk(name, statistic, option):
    check(backend_of(name), *on(name, chunk(pads=5, E=48), ON_CHUNK[statistic], OF_CHUNK[option]))


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_no_tokens_is_refused(window):
    with pytest.raises(InputError, match=f"window={window} hides .* Give 1 or more, or None"):
        AttentionOptions(scaling=0.2, window=window)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_gain_of_0_counts_keys_behind_the_window(backend, softcap):
    """As `Mass` has it, whatever keys a kernel need not read for the output."""
    options = AttentionOptions(scaling=0.2, window=9, softcap=softcap)
    for rows, gain in ((7, torch.tensor([0.0, 1.5])), (-1, torch.tensor([0.0, 0.0]))):
        check(
            backend, *on(backend.name, chunk(T=150, S=70, D=16, G=1, Hk=1, pads=5), Mass(rows=rows, gain=gain), options)
        )


@pytest.mark.parametrize("statistic", [Mass(), Mass(gain=2.5), Low(live=True)], ids=["mass", "gain", "low"])
def test_a_sink_that_takes_nearly_all(backend, statistic):
    """Kernels make the report of a gain from the logits, so it does not underflow with the probabilities."""
    if statistic.fields == ("mass",) and statistic.gain != 1.0 and backend.name in ("torch", "dummy"):
        pytest.skip("its report of a gain underflows with the probabilities")
    fast = backend.name not in SLOW
    for option, dtype in itertools.product((GREAT_SINK, GREAT_SINK_AND_ALL), DTYPES if fast else DTYPES[:1]):
        given = token(70, 40, 3, dtype, E=24) if fast else token(40, 24, 6, dtype, Hk=1, E=40)
        check(backend, *on(backend.name, given, statistic, option))


SHAPES = [
    (name, D, G)
    for name, D, G in itertools.product(BACKENDS, [7, 32, 33, 64, 80, 128, 256], [1, 2, 3, 7])
    if name not in SLOW or (D + G) % 2
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "D", "G"), SHAPES)
def test_shapes_of_a_token(name, D, G):
    sizes = list(itertools.product((1, 17, 257), DTYPES))
    Hk, sizes = (2, sizes) if name not in SLOW else (1, [sizes[(D + 2 * G) % 9]])
    for S, dtype in sizes:
        given = token(S, D, G, dtype, Hk=Hk)
        check(backend_of(name), *on(name, given, Mass(), AttentionOptions(scaling=D**-0.5)))


GROUPS, LENGTHS = itertools.cycle([1, 2, 7]), itertools.cycle([33, 2, 33, 33, 2])
CHUNKS = [(next(LENGTHS), *shape, next(GROUPS)) for shape in itertools.product([1, 17, 257], [32, 80, 128, 256])]


@pytest.mark.long
@pytest.mark.parametrize(("T", "S", "D", "G"), CHUNKS)
def test_shapes_of_a_chunk(backend, T, S, D, G):
    given = chunk(T, S, D, G, Hk=1 if G == 7 else 2, pads=min(5, T - 1), B=1 if G == 7 else 2)
    check(backend, *on(backend.name, given, Mass() if D > 80 else Low(), AttentionOptions(scaling=D**-0.5)))


TURNS = itertools.cycle([1, 2, 7])
LARGE = [
    (name, *shape, next(TURNS))
    for name in BACKENDS
    if name not in SLOW
    for shape in itertools.product([1, 33, 512], [1, 257, 4096], [32, 64, 80, 128, 256])
]


@pytest.mark.parametrize(
    ("name", "T", "S", "D", "G"),
    sweep(LARGE, lambda case: case[1:4] in {(512, 257, 64), (33, 4096, 80), (1, 4096, 128)}),
)
def test_large_shapes(name, T, S, D, G):
    """One head of one row; its last key is as far from a multiple of any tile as its length allows."""
    options = AttentionOptions(scaling=D**-0.5, window=300 if S == 257 else None)
    given = chunk(T, S, D, G, Hk=1, B=1, pads=min(5, T - 1), dtype=DTYPES[(T + D) % 3])
    low = G == 2 and T < 512  # in more rows too many keys are so near to the threshold that rounding may decide
    asked = Low(live=D > 64 and S > 1) if low else Mass(rows=40, gain=1.3 if D == 80 else 1.0)
    check(backend_of(name), *on(name, given, asked, options))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("statistic", ["window", "live"])
def test_half_precision_of_a_chunk(backend, statistic, dtype):
    asked = ON_CHUNK[statistic]
    check(backend, *on(backend.name, chunk(dtype=dtype, pads=3), asked, PLAIN))
    check(backend, *on(backend.name, chunk(dtype=dtype, D=24, E=8, G=1), asked, OF_CHUNK["softcap"]))


@pytest.mark.parametrize("make", [lambda: token(30, 16, 2, torch.float64), lambda: chunk(D=16, dtype=torch.float64)])
def test_double_precision(backend, make):
    check(backend, *on(backend.name, make(), Mass(), PLAIN))


def test_a_chunk_whose_heads_share_positions(backend):
    check(backend, *on(backend.name, chunk(S=40, pads=4, shared=True), Mass(), PLAIN))
    check(backend, *on(backend.name, chunk(S=40, pads=4, shared=True), Low(live=True), OF_CHUNK["window"]))


def test_positions_that_heads_share_and_views_of_larger_tensors(backend):
    """As without a bounded cache: positions are int64, expanded over the rows, and one row of them is for all heads."""
    query, (keys, values, _), now = on(backend.name, token(30, 32, 2))[0]
    keys, values = keys.nan_to_num(), values.nan_to_num()
    shared = torch.arange(NOW - 29, NOW + 1, device=keys.device).expand(ROWS, 30)[:, None]
    own = Slots(keys, values, shared.int().expand(ROWS, 2, 30).contiguous())
    whole, report = backend.attend(AttentionInputs(query, own, now, statistic=Mass(), options=PLAIN))
    wide = torch.zeros(ROWS, 2, 40, 48, device=keys.device)
    wide[:, :, :30, :32] = keys
    spaced = query.transpose(1, 2).contiguous().transpose(1, 2)
    part = slice(1, 4)
    views = Slots(wide[part, :, :30, :32], values[part], shared[part])
    out, some = backend.attend(AttentionInputs(spaced[part], views, now[part], statistic=Mass(), options=PLAIN))
    same = {"rtol": 0, "atol": 0} if backend.name in ("native", "triton") else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(out, whole[part], **same)  # kernels: to the bit, whatever runs beside a row
    torch.testing.assert_close(some.mass, report.mass[part], **same)


def test_a_last_axis_that_is_not_dense(backend):
    for query, (keys, values, positions), now in (chunk(S=40, pads=2), token(40, 32, 2)):
        spread = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (keys, values))
        given = query, Slots(*spread, positions), now
        check(backend, *on(backend.name, given, Mass(rows=9), AttentionOptions(scaling=0.3)))


def test_a_chunk_s_row_is_the_same_alone_and_among_others(backend):
    query, slots, now = on(backend.name, chunk(S=70))[0]
    out, report = backend.attend(AttentionInputs(query, slots, now, statistic=Mass(), options=PLAIN))
    one = backend.attend(
        AttentionInputs(query[1:], Slots(*(tensor[1:] for tensor in slots)), now[1:], statistic=Mass(), options=PLAIN)
    )
    same = {"rtol": 0, "atol": 0} if backend.name == "triton" else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(one[0], out[1:], **same)
    torch.testing.assert_close(one[1].mass, report.mass[1:], **same)


def test_mass_of_all_rows_adds_up_to_the_number_of_rows(backend):
    query, slots, now = on(backend.name, chunk(S=100, pads=33))[0]  # the second row is nothing but padding
    _, report = backend.attend(AttentionInputs(query, slots, now, statistic=Mass(), options=PLAIN))
    torch.testing.assert_close(report.mass.sum(-1).cpu(), torch.tensor([[33.0, 33.0], [0.0, 0.0]]))
    assert (report.mass[slots.positions < 0] == 0).all()


def test_one_key_that_takes_all(backend):
    query, slots, now = on(backend.name, chunk(S=70))[0]
    query.zero_()[..., 0] = 40.0
    slots.keys[..., 0] = 0.0
    slots.keys[:, :, 3, 0] = 40.0
    slots.positions[:, :, 3] = 0
    out, report = check(backend, (query, slots, now), Mass(), PLAIN)
    torch.testing.assert_close(report.mass[:, :, 3].cpu(), torch.full((2, 2), 33.0))
    torch.testing.assert_close(out, slots.values[:, :, 3:4].repeat_interleave(2, dim=1).expand_as(out))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # an interpreter's
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_key_breaks_its_head_alone(backend, bad):
    query, slots, now = on(backend.name, token(40, 32, 2))[0]
    whole, report = backend.attend(AttentionInputs(query, slots, now, statistic=Mass(), options=PLAIN))
    slots.keys[0, 1, 5] = bad
    out, broken = backend.attend(AttentionInputs(query, slots, now, statistic=Mass(), options=PLAIN))
    assert out[0, 2:].isnan().all()
    assert broken.mass[0, 1].isnan().any()
    assert torch.equal(out[0, :2], whole[0, :2])
    assert torch.equal(out[1:], whole[1:])
    assert torch.equal(broken.mass[1:], report.mass[1:])


@pytest.mark.parametrize("name", ["native", "triton", "reference"])
def test_a_padded_query_gives_zeros(name):
    backend = backend_of(name)
    query, slots, now = on(name, token(40, 32, 2))[0]
    out, report = backend.attend(AttentionInputs(query, slots, now, statistic=Mass(), options=PLAIN))
    assert (out[now[:, 0] < 0] == 0).all()
    assert (report.mass[now[:, 0] < 0] == 0).all()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *((name, token(40, 32, 2)) for name in ("native", "triton", "reference")),
        *((name, chunk(T=2, S=20)) for name in ("triton", "reference")),
    ],
)
@pytest.mark.parametrize("statistic", [Mass(), Mass(gain=2.0), Low(live=True)], ids=["mass", "gain", "low"])
def test_a_query_that_sees_nothing_gives_zeros(name, given, statistic):
    backend, (query, (keys, values, positions), now) = backend_of(name), on(name, given)[0]
    slots = Slots(keys.nan_to_num(), values.nan_to_num(), torch.full_like(positions, -1))
    for at in (torch.full_like(now, 7), torch.full_like(now, -1)):
        out, report = backend.attend(AttentionInputs(query, slots, at, statistic=statistic, options=PLAIN))
        assert (out == 0).all()
        assert all((field == 0).all() for field in report.sums.values())


@pytest.mark.parametrize("option", OF_CHUNK)
def test_a_prompt_that_is_read_again(backend, option):
    """Every backend against the definition: whole matrices in float64, the queries turned ahead."""
    (query, slots, now), options = on(backend.name, chunk(pads=5), OF_CHUNK[option])
    slots = slots._replace(keys=slots.keys.nan_to_num())
    rotation = Rotation(torch.tensor([1.0, 0.1, 0.01]))
    inputs = AttentionInputs(query, slots, now, options)
    again = SecondReading(torch.full((2, 1), 77, device=now.device), rotation)
    want = reference.reread(inputs, again)
    torch.testing.assert_close(backend.reread(inputs, again).double(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", OF_CHUNK)
def test_both_readings_at_once(backend, option, dtype):
    """The output and the report are those of the first reading alone, and the rest is that of the second one."""
    (query, slots, now), options = on(backend.name, chunk(dtype=dtype, pads=5), OF_CHUNK[option])
    slots = slots._replace(keys=slots.keys.nan_to_num())
    rotation, length = Rotation(torch.tensor([1.0, 0.1, 0.01])), torch.full((2, 1), 77, device=now.device)
    at_once = type(backend).attend_twice is not Backend.attend_twice  # else it is one after the other
    for statistic in (Nothing(), Mass(rows=3), Mass(gain=2.0), Low()) if at_once else (Mass(rows=3),):
        asked = {"statistic": statistic, "options": options}
        out, report, again = backend.attend_twice(
            AttentionInputs(query, slots, now, **asked), SecondReading(length=length, rotation=rotation)
        )
        want = backend.attend(AttentionInputs(query, slots, now, **asked))
        assert torch.equal(out, want[0])
        assert all(torch.equal(report.sums[name], field) for name, field in want[1].sums.items())
        second = reference.reread(
            AttentionInputs(query, slots, now, options=options), SecondReading(length=length, rotation=rotation)
        )
        torch.testing.assert_close(again.double(), second, rtol=1e-4, atol=1e-6)
