"""What only Triton's kernels of a prompt have: tiles, splits, torch's output, and what they leave to torch."""

import dataclasses
from unittest.mock import Mock

import pytest
import torch
from conformance.bounds import check
from conformance.cases import chunk

import kvkeep
from kvkeep import backends
from kvkeep.attention_stats import LastHit, Low, Mass, MassAndLast, Nothing
from kvkeep.backends import AttentionInputs
from kvkeep.backends.torch import TorchBackend
from kvkeep.noise import Gumbel
from kvkeep.types import AttentionOptions, Fresh, Phase, Slots, Top

pytest.importorskip("triton")
from kvkeep.backends.triton import TritonBackend, launch, prefill_ops

if not launch.interprets():
    pytest.skip("kernels run compiled here, not interpreted", allow_module_level=True)

PLAIN = AttentionOptions(scaling=0.3)


class Kernels(TritonBackend):
    """Attention by the kernels of a prompt, or not at all."""

    def __init__(self, output="auto"):
        super().__init__()
        self.output = output

    def attend(self, inputs):
        found = prefill_ops.attend(inputs, output=self.output)
        assert found is not None
        return found


def flat(given):
    """The same as the kernels' functions take it."""
    query, (keys, values, positions), now = given
    return query, keys, values, now, positions


def attend(given, statistic):
    query, slots, now = given
    return Kernels().attend(AttentionInputs(query, slots, now, statistic=statistic, options=PLAIN))


@pytest.mark.long
@pytest.mark.parametrize("statistic", [Mass(), Mass(gain=2.0), Low(live=True)], ids=["mass", "gain", "low"])
def test_one_row_that_sees_nothing(statistic):
    query, slots, now = chunk(T=1, S=20)
    slots.positions.fill_(-1)
    for at in (now, torch.full_like(now, -1)):
        out, report = attend((query, slots, at), statistic)
        assert (out == 0).all()
        assert all((field == 0).all() for field in report.sums.values())


ALL = AttentionOptions(scaling=0.5, window=3, softcap=2.0, sinks=torch.tensor([0.3]))


def test_a_short_prompt_of_one_head_with_every_option():
    given = chunk(T=4, S=3, D=16, G=1, Hk=1, B=1, pads=1)
    for statistic, options in (
        (MassAndLast(rows=3, last=17, gain=1.5), ALL),
        (Low(rows=2, theta=0.7, live=True), ALL),
    ):
        check(Kernels(), given, statistic, options)


def test_tiles_outside_of_the_window_are_left_out():
    given = chunk(T=150, S=70, G=1, Hk=1, D=16, pads=20)
    work = prefill_ops.Prefill(*flat(given), AttentionOptions(scaling=0.3, window=24))
    *_, q, k = flat(given)
    seen = (k[:, 0, None] >= 0) & (k[:, 0, None] <= q[..., None]) & (k[:, 0, None] > q[..., None] - 24)
    seen[:, :, :70] = False
    for row in range(2):
        for tile, start in enumerate(work._first_slots(16, 24)[row].tolist()):
            columns = seen[row, 16 * tile : 16 * tile + 16].any(dim=0).nonzero()
            assert start == (columns.min() if len(columns) else 220)
        for tile, end in list(enumerate(work._last_rows(64, 24)[row, 0].tolist()))[2:]:
            assert end == seen[row, :, 64 * tile : 64 * tile + 64].any(dim=1).nonzero().max() + 1


def whole_prompt(**shape):
    """Columns are positions."""
    query, slots, _ = chunk(S=0, shared=True, **shape)
    now = torch.arange(query.shape[2]).repeat(2, 1)
    return query, slots._replace(positions=now[:, None].to(torch.int32)), now


@pytest.fixture
def torchs(monkeypatch):
    """Outputs that torch's attention has computed."""
    calls = []
    theirs = prefill_ops.causal
    monkeypatch.setattr(prefill_ops, "causal", lambda *given: calls.append(1) or theirs(*given))
    return calls


@pytest.mark.parametrize("statistic", [Nothing(), Mass(rows=6), Mass(rows=6, gain=2.0), Low(rows=4)], ids=str)
def test_the_output_may_be_torch_s(statistic, torchs):
    check(Kernels("torch"), whole_prompt(), statistic, PLAIN)
    assert torchs


@pytest.mark.long
@pytest.mark.parametrize(
    ("output", "given", "options"),
    [
        ("torch", chunk(pads=1, S=1), PLAIN),
        ("torch", whole_prompt(), AttentionOptions(scaling=0.3, sinks=torch.tensor([0.3, -1.0, 2.0, 5.0]))),
        ("auto", whole_prompt(), PLAIN),
    ],
    ids=["its mask would be wrong", "sinks", "short"],
)
def test_the_output_is_ours_where_torch_s_does_not_fit(output, given, options, torchs):
    check(Kernels(output), given, Mass(rows=6), options)
    assert not torchs


def test_torch_is_preferred_for_long_prompts_of_which_few_rows_count(monkeypatch):
    monkeypatch.setattr(prefill_ops, "TORCH_ROWS", 8)
    work = prefill_ops.Prefill(*flat(whole_prompt(dtype=torch.bfloat16)), PLAIN)
    on_gpu = type("OnGPU", (torch.Tensor,), {"is_cuda": property(lambda self: True)})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    there = dataclasses.replace(work, query=work.query.as_subclass(on_gpu))
    ask = {"few": Mass(rows=8), "many": Mass(rows=9), "all": Mass(), "each": Mass(rows=torch.tensor([1, 1]))}
    assert {name: there.prefers_torch(one) for name, one in ask.items()} == {
        "few": True,
        "many": False,
        "all": False,
        "each": False,
    }
    assert there.prefers_torch(Nothing())
    assert not work.prefers_torch(Nothing())
    assert not dataclasses.replace(there, query=there.query.float()).prefers_torch(Nothing())  # torch has no flash
    assert not dataclasses.replace(there, values=there.values[..., :8]).prefers_torch(Nothing())  # attention for these
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # it could not look for padding
    assert not there.prefers_torch(Nothing())
    assert dataclasses.replace(there, fresh=True).prefers_torch(Nothing())  # it need not look
    monkeypatch.setattr(prefill_ops, "gives_sums", lambda *given: True)
    assert dataclasses.replace(there, fresh=True).prefers_torch(Mass())


def test_a_kernel_of_torch_is_only_used_if_its_sums_are_natural_logarithms_of_every_row(monkeypatch):
    found = {}
    for name, change in {
        "right": lambda out, lse: (out, lse),
        "to base 2": lambda out, lse: (out, lse * 1.4426950408889634),
        "of fewer rows": lambda out, lse: (out, lse[:, :, 1:]),
        "another output": lambda out, lse: (out[:, 1:], lse),
    }.items():
        monkeypatch.setitem(prefill_ops._CALLS, 99, lambda *given, change=change: change(*lse_of(*given)))
        found[name] = prefill_ops._is_right.__wrapped__(99, torch.device("cpu"), torch.float32)
    assert found == {"right": True, "to base 2": False, "of fewer rows": False, "another output": False}


def test_a_prompt_without_padding_is_told_and_not_looked_at(monkeypatch):
    query, slots, now = whole_prompt()
    monkeypatch.setattr(prefill_ops.Prefill, "fits_torch", lambda work: work.fresh)
    told = []
    monkeypatch.setattr(prefill_ops, "causal", lambda *given: told.append(1) or (query * 0, None))
    prefill_ops.attend(AttentionInputs(query, slots, now, statistic=Nothing(), options=PLAIN), output="torch")
    assert not told
    prefill_ops.attend(AttentionInputs(query, Fresh(*slots), now, statistic=Nothing(), options=PLAIN), output="torch")
    assert told


@pytest.mark.parametrize(("real", "kind"), [(None, Fresh), (torch.tensor([[True] * 6]), Slots)])
def test_a_layer_tells_whether_there_may_be_padding(real, kind, monkeypatch):
    seen = []
    theirs = TorchBackend.attend

    def attend(backend, inputs):
        seen.append(type(inputs.slots))
        return theirs(backend, inputs)

    monkeypatch.setenv(backends.SWITCH, "torch")
    monkeypatch.setattr(TorchBackend, "attend", attend)
    layer = kvkeep.Layer(kvkeep.parse("local"), 8)
    for _ in range(2):  # what is kept lies beside the second chunk
        new = [torch.randn(1, 2, 6, 16) for _ in range(3)]
        layer.step(*new, options=AttentionOptions(0.2), phase=Phase.PREFILL, real=real)
    assert seen[0] is kind
    assert Fresh not in seen[1:]


def lse_of(query, keys, values, scaling, *, base=1.0):
    """What torch's kernels give: output, and natural logarithms."""
    out = prefill_ops._plain(query, keys, values, scaling)
    logits = query.float() @ keys.float().repeat_interleave(query.shape[1] // keys.shape[1], dim=1).mT * scaling
    return out, base * logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -torch.inf).logsumexp(dim=-1)


@pytest.mark.long
@pytest.mark.parametrize("base", [1.0, 1.4426950408889634])
def test_torchs_sums_are_taken_where_they_are_what_they_should_be(base, monkeypatch):
    monkeypatch.setattr(prefill_ops, "_kind", lambda *given: 99)
    monkeypatch.setitem(prefill_ops._CALLS, 99, lambda *given: lse_of(*given, base=base))
    prefill_ops._is_right.cache_clear()
    asked = []
    theirs = prefill_ops.Prefill.log_sum_exp
    monkeypatch.setattr(
        prefill_ops.Prefill, "log_sum_exp", lambda work, *given: asked.append(1) or theirs(work, *given)
    )
    check(Kernels("torch"), whole_prompt(), Mass(), PLAIN)
    assert bool(asked) == (base != 1.0)


def test_a_kernel_of_torch_that_has_changed_is_not_used(monkeypatch):
    for error in (AttributeError("no operator"), TypeError("arguments"), RuntimeError("no kernel")):
        monkeypatch.setitem(prefill_ops._CALLS, 99, Mock(side_effect=error))
        assert not prefill_ops._is_right.__wrapped__(99, torch.device("cpu"), torch.float32)


UNKNOWN = {
    "noise": {"statistic": Mass(noise=Gumbel(5, 1, torch.tensor([3, 4])))},
    "LastHit": {"statistic": LastHit()},
    "largest": {"options": AttentionOptions(scaling=1.0, top=Top(torch.tensor([1, 1]), True))},
}


def test_what_is_not_known_is_left_to_others():
    query, slots, now = chunk(T=2, S=3)
    for reason, changes in UNKNOWN.items():
        asked = {"statistic": Mass(), "options": PLAIN, **changes}
        assert prefill_ops.attend(AttentionInputs(query, slots, now, **asked)) is None
        assert reason in prefill_ops.unknown(query, slots, **asked)


def test_types_and_sizes_that_are_not_known_are_left_to_others():
    q, (k, v, positions), now = chunk(T=2, S=3)
    plain = {"statistic": Mass(), "options": PLAIN}
    wide = Slots(k.double(), v.double(), positions)
    assert "float64" in prefill_ops.unknown(q.double(), wide, **plain)
    assert "bfloat16" in prefill_ops.unknown(q, Slots(k.bfloat16(), v, positions), **plain)
    assert "256" in prefill_ops.unknown(q, Slots(k, torch.zeros(2, 2, 5, 257), positions), **plain)
    narrow = Slots(k, v[..., : launch.MIN_DIM - 1], positions)
    assert "values of fewer than" in prefill_ops.unknown(q, narrow, **plain)
    assert prefill_ops.attend(AttentionInputs(q.double(), wide, now, **plain)) is None
