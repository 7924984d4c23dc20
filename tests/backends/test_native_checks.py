"""What the native kernel's functions check before they hand bare addresses to C++; torch does whatever they refuse."""

import dataclasses

import pytest
import torch

from kvkeep.attention_stats import Mass, Nothing
from kvkeep.backends import Added, AttentionInputs, FusedStep, NativeBackend, Ring, SlotLimits
from kvkeep.backends.native import bindings, native, ops
from kvkeep.backends.native.bindings import KeyRotation
from kvkeep.kv import ranking
from kvkeep.kv.slot_codec import KeyTransform, blank
from kvkeep.types import AttentionOptions, Slots

pytestmark = [
    pytest.mark.skipif(native().library is None, reason=native().detail),
    pytest.mark.usefixtures("no_checked_annotations"),
]

B, HK, G, S, D, E = 2, 3, 2, 9, 8, 6
HUGE = 2**40
INTS = [torch.int8, torch.int16, torch.int32]


class Library:
    """Stands where the kernel stands, and says whether it was called; it must not be, so it never computes."""

    def __init__(self):
        self.called = False

    def __getattr__(self, name):
        def function(call):
            self.called = True
            return 0

        return function


@pytest.fixture
def library(monkeypatch):
    found = Library()
    monkeypatch.setattr(bindings, "native", lambda: type("Found", (), {"library": found}))
    return found


def attention(**changes):
    given = {
        "query": torch.randn(B, HK * G, 1, D, generator=torch.Generator().manual_seed(0)),
        "keys": torch.randn(B, HK, S, D, generator=torch.Generator().manual_seed(1)),
        "values": torch.randn(B, HK, S, E, generator=torch.Generator().manual_seed(2)),
        "now": torch.tensor([[5], [7]]),
        "positions": torch.arange(S, dtype=torch.int32).expand(B, HK, S).contiguous(),
        "options": AttentionOptions(scaling=0.3),
        "wanted": ops.WantedReport(),
        **changes,
    }
    tensors = [given.pop(name) for name in ("query", "keys", "values", "now", "positions")]
    return ops.attend(*tensors, **given)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_attention_converts_positions_of_any_whole_type(dtype):
    want = attention()
    found = attention(now=torch.tensor([[5], [7]], dtype=dtype), positions=torch.arange(S).expand(B, HK, S).to(dtype))
    assert all(torch.equal(one, two) for one, two in zip(found, want, strict=True))


def options(**changes):
    return {"options": AttentionOptions(scaling=0.3, **changes)}


def wanted(**changes):
    return {"wanted": ops.WantedReport(**changes)}


def turn(angles=None, back=None):
    return {"turn": KeyRotation(torch.zeros(S + 1, 6) if angles is None else angles, back)}


def test_angles_that_fit_are_taken(library):
    assert attention(**turn(), wanted=None) is not None
    assert attention(**turn(back=torch.zeros(B, 6)), wanted=None) is not None
    assert library.called


TENSORS = {
    "angles of fewer ranks": turn(torch.zeros(S, 6)),
    "angles of more dims than a head has": turn(torch.zeros(S + 1, D + 2)),
    "cosines without sines": turn(torch.zeros(S + 1, 5)),
    "angles of another type": turn(torch.zeros(S + 1, 6, dtype=torch.float64)),
    "angles that are not dense": turn(torch.zeros(S + 1, 8)[:, :6]),
    "angles on another device": turn(torch.zeros(S + 1, 6, device="meta")),
    "positions of fewer rows to turn back from": turn(back=torch.zeros(B - 1, 6)),
    "fewer dims to turn back": turn(back=torch.zeros(B, 4)),
    "positions of queries as floats": {"now": torch.tensor([[5.0], [7.0]])},
    "positions of queries as truths": {"now": torch.tensor([[True], [True]])},
    "a position for every head": {"now": torch.zeros(B, HK, dtype=torch.int64)},
    "positions of one row only": {"now": torch.tensor([[5]])},
    "positions as floats": {"positions": torch.zeros(B, HK, S)},
    "positions of fewer slots": {"positions": torch.zeros(B, HK, S - 1, dtype=torch.int32)},
    "positions of fewer heads": {"positions": torch.zeros(B, HK - 1, S, dtype=torch.int32)},
    "positions of one row": {"positions": torch.zeros(1, HK, S, dtype=torch.int32)},
    "two query rows": {"query": torch.zeros(B, HK * G, 2, D)},
    "query heads that are no multiple": {"query": torch.zeros(B, HK * G + 1, 1, D)},
    "a query of another width": {"query": torch.zeros(B, HK * G, 1, D + 1)},
    "whole numbers as queries": {"query": torch.zeros(B, HK * G, 1, D, dtype=torch.int32)},
    "fewer values than keys": {"values": torch.zeros(B, HK, S - 1, E)},
    "values of fewer rows": {"values": torch.zeros(B - 1, HK, S, E)},
    "no slot": {
        "keys": torch.zeros(B, HK, 0, D),
        "values": torch.zeros(B, HK, 0, E),
        "positions": torch.zeros(B, HK, 0, dtype=torch.int32),
    },
    "keys on another device": {"keys": torch.zeros(B, HK, S, D, device="meta")},
    "sparse keys": {"keys": torch.zeros(B, HK, S, D).to_sparse()},
    "positions of queries on another device": {"now": torch.zeros(B, 1, dtype=torch.int64, device="meta")},
    "sinks of fewer heads": options(sinks=torch.zeros(HK)),
    "sinks on another device": options(sinks=torch.zeros(HK * G, device="meta")),
    "sinks that are trained": options(sinks=torch.zeros(HK * G, requires_grad=True)),
    "counts of fewer rows": wanted(counts=torch.ones(B - 1, dtype=torch.int64)),
    "counts on another device": wanted(counts=torch.ones(B, dtype=torch.int64, device="meta")),
    "gains of fewer rows": wanted(gain=torch.ones(1)),
    "newest of fewer rows": wanted(last=torch.ones(1, dtype=torch.int64)),
}


def test_attention_leaves_to_torch_what_does_not_fit(library):
    for name, changes in TENSORS.items():
        assert attention(**changes) is None, name
        assert not library.called, name


def test_a_window_longer_than_any_text_hides_nothing():
    assert torch.equal(attention(**options(window=2**70))[0], attention()[0])


def written(**changes):
    given = {
        "keys": torch.zeros(B, HK, S, D),
        "values": torch.zeros(B, HK, S, E),
        "positions": torch.full((B, HK, S), -1, dtype=torch.int32),
        "new_keys": torch.ones(B, HK, 1, D),
        "new_values": torch.ones(B, HK, 1, E),
        "now": torch.tensor([[5], [7]]),
        **changes,
    }
    slot = ops.write(
        given["keys"],
        given["values"],
        given["positions"],
        new=(given["new_keys"], given["new_values"]),
        now=given["now"],
    )
    return slot, given["positions"]


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_write_converts_positions_of_any_whole_type(dtype):
    slot, positions = written(now=torch.tensor([[5], [7]], dtype=dtype))
    assert slot is not None
    assert positions[:, :, 0].tolist() == [[5] * HK, [7] * HK]


WRITES = {
    "a position as a float": {"now": torch.tensor([[5.0], [7.0]])},
    "one position for two rows": {"now": torch.tensor([[5]])},
    "slots of another type": {"positions": torch.full((B, HK, S), -1)},
    "fewer positions than keys": {"positions": torch.full((B, HK - 1, S), -1, dtype=torch.int32)},
    "more positions than keys": {"positions": torch.full((B, HK, S + 1), -1, dtype=torch.int32)},
    "new keys of another width": {"new_keys": torch.ones(B, HK, 1, D - 1)},
    "new values of fewer heads": {"new_values": torch.ones(B, HK - 1, 1, E)},
    "two new keys": {"new_keys": torch.ones(B, HK, 2, D)},
    "no slot": {
        "keys": torch.zeros(B, HK, 0, D),
        "values": torch.zeros(B, HK, 0, E),
        "positions": torch.zeros(B, HK, 0, dtype=torch.int32),
    },
}


def test_write_leaves_to_torch_what_does_not_fit(library):
    for name, changes in WRITES.items():
        assert written(**changes)[0] is None, name
        assert not library.called, name


def codes(bits, slots, dim, heads=HK):
    return blank(torch.zeros(B, heads, 1, dim), slots, bits)


def coded(keys=None, values=None, transform=None, **new):
    """Whether a write and attention are taken over keys of 4 bits and values of 8."""
    keys, values = keys or codes(4, S, D), values or codes(8, S, E)
    given = {"codes": bindings.Coding(keys, values, transform or KeyTransform(EXPONENTS, NORMALS))}
    positions = torch.full((B, HK, S), -1, dtype=torch.int32)
    new = {"new_keys": torch.ones(B, HK, 1, D), "new_values": torch.ones(B, HK, 1, E), **new}
    slot = ops.write(
        keys.numbers, values.numbers, positions, new=(*new.values(),), now=torch.tensor([[5], [7]]), **given
    )
    read = attention(keys=keys.numbers, values=values.numbers, positions=positions, wanted=None, **given)
    return slot is not None, read is not None


EXPONENTS, NORMALS = KeyTransform.blank(torch.zeros(B, HK, 1, D), (4, 8))
CODES = {
    "scales of another type": {"keys": codes(4, S, D)._replace(scales=torch.zeros(B, HK, S, 2))},
    "scales of fewer slots": {"values": codes(8, S, E)._replace(scales=codes(8, S - 1, E).scales)},
    "half a group": {"keys": codes(4, S, D)._replace(scales=torch.zeros(B, HK, S, 3).half())},
    "codes of another width": {"keys": codes(4, S, D + 2)},
    "codes of fewer heads": {"keys": codes(4, S, D, HK - 1)},
    "bits that nobody knows": {"keys": codes(4, S, D)._replace(bits=5)},
    "normals of another type": {"transform": KeyTransform(EXPONENTS, NORMALS.half())},
    "normals of fewer heads": {"transform": KeyTransform(EXPONENTS, NORMALS[:, 1:])},
    "exponents of another type": {"transform": KeyTransform(EXPONENTS.int(), NORMALS)},
}


def test_codes_are_read_and_written_if_they_fit(library):
    assert coded() == (True, True)
    assert library.called
    library.called = False
    for name, changes in CODES.items():
        assert coded(**changes) == (False, False), name
        assert not library.called, name


def test_new_tokens_must_fit_the_codes_that_they_become(library):
    assert coded(keys=codes(8, S, D), transform=KeyTransform()) == (True, True)
    for name, new in {
        "whole numbers": {"new_keys": torch.ones(B, HK, 1, D).int(), "new_values": torch.ones(B, HK, 1, E).int()},
        "two types": {"new_values": torch.ones(B, HK, 1, E).half()},
        "another width": {"new_keys": torch.ones(B, HK, 1, D - 1)},
        "fewer heads": {"new_values": torch.ones(B, HK - 1, 1, E)},
    }.items():
        assert coded(**new) == (False, True), name


def test_queries_and_positions_must_fit_the_codes(library):
    given = bindings.Coding(codes(8, S, D), codes(8, S, E), KeyTransform())
    plain = {"keys": given.keys.numbers, "values": given.values.numbers, "codes": given, "wanted": None}
    assert attention(**plain) is not None
    library.called = False
    for name, changes in {
        "whole numbers as queries": {"query": torch.zeros(B, HK * G, 1, D, dtype=torch.int32)},
        "query heads that are no multiple": {"query": torch.zeros(B, HK * G + 1, 1, D)},
        "positions as floats": {"positions": torch.zeros(B, HK, S)},
        "positions of fewer slots": {"positions": torch.zeros(B, HK, S - 1, dtype=torch.int32)},
    }.items():
        assert attention(**plain, **changes) is None, name
        assert not library.called, name


def prompt(**changes):
    """A prompt behind no slots, in the kernel or not at all."""
    given = {
        "query": torch.zeros(B, HK * G, S, D),
        "keys": torch.zeros(B, HK, S, D),
        "values": torch.zeros(B, HK, S, E),
        "positions": torch.arange(S, dtype=torch.int32).expand(B, HK, S).contiguous(),
        "now": torch.arange(S).expand(B, S),
        "options": AttentionOptions(scaling=0.3),
        "statistic": Nothing(),
        **changes,
    }
    slots = Slots(given["keys"], given["values"], given["positions"])
    asked = {"options": given["options"], "statistic": given["statistic"]}
    return ops.attend_prefill(AttentionInputs(given["query"], slots, given["now"], **asked))


PROMPTS = {
    "positions of fewer rows": {"now": torch.arange(S)[None]},
    "positions of queries as floats": {"now": torch.arange(S).expand(B, S).float()},
    "values of another type": {"values": torch.zeros(B, HK, S, E).half()},
    "fewer values than keys": {"values": torch.zeros(B, HK, S - 1, E)},
    "query heads that are no multiple": {"query": torch.zeros(B, HK * G + 1, S, D)},
    "sinks of fewer heads": options(sinks=torch.zeros(HK)),
    "a gain of 0 within a window": {**options(window=3), "statistic": Mass(gain=torch.tensor([0.0, 2.0]))},
}


def test_prompts_that_do_not_fit_are_left_to_torch(library):
    assert prompt() is not None
    assert library.called
    library.called = False
    for name, changes in PROMPTS.items():
        assert prompt(**changes) is None, name
        assert not library.called, name


def held(dtype=torch.int32):
    return torch.arange(S, dtype=dtype).expand(B, HK, S).contiguous()


SCORES = torch.randn(B, HK, S, generator=torch.Generator().manual_seed(3))
SEEN = torch.tensor([S, S])


def evicted(positions=None, score=SCORES, seen=SEEN, **changes):
    positions = held() if positions is None else positions
    done = ops.evict(positions, score, SlotLimits(seen, **{"sinks": 1, "recent": 2, "stay": 4, **changes}))
    return done, positions


SLOTS = {
    "positions of another type": {"positions": held(torch.int64)},
    "scores of fewer heads": {"score": SCORES[:, :1].contiguous()},
    "scores of another type": {"score": SCORES.double()},
    "tokens seen as floats": {"seen": SEEN.float()},
    "tokens seen by fewer rows": {"seen": SEEN[:1]},
    "limits as floats": {"stay": torch.full((B, 1), 4.0)},
    "limits of fewer rows": {"stay": torch.full((1, HK), 4)},
    "limits of fewer heads": {"stay": torch.full((B, HK - 1), 4)},
    "limits on another device": {"stay": torch.full((B, HK), 4, device="meta")},
    "prompts of fewer rows": {"prompt": SEEN[:1]},
    "prompts as floats": {"prompt": SEEN.float()},
    "recent tokens of fewer rows": {"recent": torch.tensor([[2]])},
    "recent tokens as floats": {"recent": torch.full((B, 1), 2.0)},
}


def test_eviction_leaves_to_torch_what_does_not_fit(library):
    for name, changes in SLOTS.items():
        assert evicted(**changes)[0] is None, name
        assert not library.called, name


def test_windows_and_counts_leave_to_torch_what_does_not_fit(library):
    assert ops.expire(held(torch.int64), SEEN, 3) is None
    assert ops.expire(held(), SEEN.float(), 3) is None
    assert ops.expire(held(), SEEN[:1], 3) is None
    assert ops.count_over(held(torch.int64), 4) is None
    assert ops.count_over(held(), torch.full((1, HK), 4)) is None
    assert not library.called


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_numbers_of_any_whole_type_mean_the_same(dtype):
    want = evicted(recent=torch.full((B, 1), 2), stay=torch.full((B, HK), 4))
    found = evicted(seen=SEEN.to(dtype), recent=torch.full((B, 1), 2).to(dtype), stay=torch.full((B, HK), 4).to(dtype))
    assert found[0]
    assert want[0]
    assert torch.equal(found[1], want[1])


@pytest.mark.parametrize("number", [HUGE, 2**31, 2**70], ids=["2^40", "2^31", "2^70"])
def test_numbers_beyond_32_bits_protect_everything_instead_of_nothing(number):
    """The first to go among protected slots is the oldest, as `scores.weakest` has it."""
    for protection in ({"sinks": number, "recent": 0}, {"sinks": 0, "recent": number}):
        done, positions = evicted(**protection)
        assert done
        assert torch.equal(positions, held().masked_fill(held() == 0, -1))
    assert ops.count_over(held(), number) == 0
    expired = held()
    assert ops.expire(expired, SEEN, number)
    assert torch.equal(expired, ranking.expire(held(), SEEN, 2**31 - 1))


def test_rows_of_numbers_that_had_to_be_converted_live_as_long_as_the_call(monkeypatch):
    """Their addresses are handed over: freed before the call, they would be read after something else is there."""
    call = ops._slots(held(), SEEN.int(), recent=torch.full((B, 1), 2).int(), limit=torch.full((B, HK), 4).int())
    assert [tensor.dtype for tensor in call.tensors[:3]] == [torch.int64] * 3
    given = {"recent": 2, "limit": 4, "prompt": SEEN.int()}
    assert ops._slots(held(), SEEN.int(), **given).tensors[-1].dtype == torch.int64


def tallied(**changes):
    """A decode step with a ring, or None."""
    ring = Ring((torch.zeros(B, HK, S),), torch.empty(B, HK, S), window=2, least=1, drop=2, budget=4)
    ring = dataclasses.replace(ring, **{name: value for name, value in changes.items() if hasattr(ring, name)})
    sums = changes.get("states", tuple(torch.zeros(B, HK, S) for _ in range(2)))
    return ops.step(
        (torch.zeros(B, HK * G, 1, D), torch.zeros(B, HK, 1, D), torch.zeros(B, HK, 1, E)),
        Slots(torch.zeros(B, HK, S, D), torch.zeros(B, HK, S, E), torch.full((B, HK, S), -1, dtype=torch.int32)),
        torch.tensor([[5], [7]]),
        options=AttentionOptions(0.5),
        wanted=changes.get("wanted", ops.WantedReport("low")),
        added=Added(sums, is_score=False, ring=ring, lost=changes.get("lost")),
        limits=SlotLimits(changes.get("seen", torch.tensor([6, 8])), prompt=changes.get("prompt")),
    )


RINGS = {
    "no words": {"words": ()},
    "words of fewer slots": {"words": (torch.zeros(B, HK, S - 1),)},
    "whole numbers as words": {"words": (torch.zeros(B, HK, S, dtype=torch.int32),)},
    "words on another device": {"words": (torch.zeros(B, HK, S, device="meta"),)},
    "words with other strides": {"words": (torch.zeros(HK, B, S).transpose(0, 1),)},
    "a mass of fewer slots": {"mass": torch.empty(B, HK, S - 1)},
    "whole numbers as a mass": {"mass": torch.empty(B, HK, S, dtype=torch.int32)},
    "a mass on another device": {"mass": torch.empty(B, HK, S, device="meta")},
    "a mass with other strides": {"mass": torch.empty(HK, B, S).transpose(0, 1)},
    "one sum": {"states": (torch.zeros(B, HK, S),)},
    "no sum": {"states": ()},
    "a report without low": {"wanted": ops.WantedReport()},
    "no report": {"wanted": None},
    "a window for every head": {"window": torch.ones(B, HK + 1, dtype=torch.int64)},
    "bursts of fewer rows": {"drop": torch.ones(B - 1, 1, dtype=torch.int64)},
    "a budget as a float": {"budget": torch.ones(B, 1)},
}


def test_a_ring_is_taken_with_sizes_of_any_kind():
    assert tallied() is not None
    assert tallied(drop=0) is not None  # no policy passes its check with this, but nothing is divided by it
    assert tallied(budget=torch.tensor([[4], [3]], dtype=torch.int32), window=2**40) is not None


def test_a_step_leaves_to_others_a_ring_that_does_not_fit(library):
    for name, changes in RINGS.items():
        assert tallied(**changes) is None, name
        assert not library.called, name


def test_a_step_leaves_to_others_other_sums_and_limits_that_do_not_fit(library):
    for name, changes in {
        "lost mass of one number": {"lost": torch.zeros(B, HK, 1)},
        "lost mass in another type": {"lost": torch.zeros(B, HK, 2).double()},
        "a prompt of fewer rows": {"prompt": torch.tensor([6])},
        "tokens seen as floats": {"seen": torch.tensor([6.0, 8.0])},
    }.items():
        assert tallied(**changes) is None, name
        assert not library.called, name


def step_of(limits, *, ring=None, **asked):
    new = torch.ones(B, HK, 1, D), torch.ones(B, HK, 1, E)
    slots = Slots(torch.zeros(B, HK, S, D), torch.zeros(B, HK, S, E), torch.full((B, HK, S), -1, dtype=torch.int32))
    query, now, options = torch.ones(B, HK * G, 1, D), torch.tensor([[5], [7]]), AttentionOptions(0.5, **asked)
    added = Added((), is_score=False, ring=ring)
    return FusedStep(query, slots, new, now, Nothing(), options, added=added, limits=limits)


def test_a_step_is_replayed_only_if_the_kernel_needs_no_copies_of_what_changes():
    seen = torch.tensor([6, 8])
    assert isinstance(NativeBackend().repeat(step_of(SlotLimits(seen))), ops.NativeRepeat)
    assert NativeBackend().repeat(step_of(SlotLimits(seen), sinks=torch.zeros(HK * G))) is None
    assert NativeBackend().repeat(step_of(SlotLimits(seen.int()))) is None
    assert NativeBackend().repeat(step_of(SlotLimits(seen, prompt=seen.int()))) is None
    ring = Ring((torch.zeros(B, HK, S),), torch.empty(B, HK, S), window=2, least=1, drop=2, budget=4)
    assert NativeBackend().repeat(step_of(SlotLimits(seen), ring=ring)) is None


def test_what_the_kernel_does_not_take_torch_does_in_its_place():
    """Positions in another type."""
    backend, narrow, wide = NativeBackend(), held(), held(torch.int64)
    for positions in (narrow, wide):
        backend.expire(positions, SEEN, 4)
        backend.evict(positions, SCORES, SlotLimits(SEEN, sinks=0, recent=0, stay=3))
    assert torch.equal(narrow, wide.int())
    assert (narrow >= 0).sum(-1).unique().tolist() == [3]
    assert backend.is_over(wide, 2)
    assert not backend.is_over(wide, 3)
