"""Policies that look at the output projection: the same against loops, and found in the modules of models."""

import pytest
import torch
from torch import nn

from kvkeep import AttentionOptions
from kvkeep.backends import QuantizedTensor
from kvkeep.models.attention import OutputOf
from kvkeep.models.packed_weights import PackedLinear
from kvkeep.policies.restkv import ReSTKV

from .cases import CHAT, DECODE, Case, E, make_streams, masks
from .lockstep import lockstep, make_layer, make_rule, phase_of, retained, step_layer, step_loops
from .loops import Sequence, TooCloseError

CASES = [
    Case("restkv:window=4", 12, (40, *DECODE[:9])),
    Case("restkv:window=3,kernel=1", 12, (40,), chunk=15, pads=(9, 0)),
    Case("restkv:window=4,kernel=3", 12, CHAT, heads=1, group=4),
    Case("defensivekv:window=4,first=0.0", 12, (40, *DECODE[:9])),
    Case("defensivekv:window=3,first=0.2", 12, (40,), chunk=15, pads=(9, 0)),
    Case("defensivekv:window=4,kernel=1,first=0.0", 12, CHAT, heads=3, group=1),
]


class Attention(nn.Module):
    """A module that attends, with its projection under some name."""

    def __init__(self, case, name="o_proj", wide=20):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(wide, case.heads * case.group * E)
        setattr(self, name, nn.Linear(case.heads * case.group * E, wide))


def played(case, module):
    """What loops and a layer keep after every turn, with the projection of a module."""
    weights = module.o_proj.weight.detach().double().unflatten(1, (case.heads * case.group, E)).transpose(0, 1)
    for seed in range(20):
        streams = make_streams(case, seed)
        sequences = [Sequence(make_rule(case, row), case.scaling) for row in range(len(streams))]
        for sequence in sequences:
            sequence.rule.output = weights.tolist()
        try:
            return streams, sequences, list(turns(case, streams, sequences))
        except TooCloseError:
            continue
    raise AssertionError


def turns(case, streams, sequences):
    for real in masks(case):
        tokens = [range(s.seen, s.seen + n) for s, n in zip(sequences, real.sum(dim=1).tolist(), strict=True)]
        for one, stream, mine in zip(sequences, streams, tokens, strict=True):
            step_loops(one, stream, case, mine, phase_of(tokens, real))
        yield real, tokens, [one.kept for one in sequences]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_projection_counts(case, monkeypatch):
    module = Attention(case)
    streams, _, wanted = played(case, module)
    output = OutputOf(module, case.heads * case.group)
    monkeypatch.setattr(
        f"{step_layer.__module__}.AttentionOptions",
        lambda **given: AttentionOptions(**given, output=output),
    )
    layer, found = make_layer(case), []
    for real, tokens, kept in wanted:
        step_layer(layer, streams, case, tokens, real)
        assert retained(layer) == kept
        found.append(kept)
    monkeypatch.undo()
    plain = [turn.kept for _, turn in lockstep(case)]
    assert plain != found


def test_the_error_is_exact():
    """Leaving one token out and rescaling the others moves the projected output by exactly the score."""
    case = Case("restkv:window=1,kernel=1", 16, (12,), heads=1, group=1)
    module = Attention(case)
    _, (sequence, _), _ = played(case, module)
    shares, values = sequence.rows[0][-1], torch.tensor(sequence._values[0], dtype=torch.float64)
    weight = module.o_proj.weight.detach().double()
    output = sum(a * values[j] for j, a in shares.items()) @ weight.T
    step = type("Last", (), {"rows": [shares], "values": values.tolist()})
    found = sequence.rule.worth(step)
    for gone in shares:
        rest = sum(a / (1 - shares[gone]) * values[j] for j, a in shares.items() if j != gone) @ weight.T
        assert found[gone] == pytest.approx(float((output - rest).norm()))
    assert ReSTKV.projects


@pytest.mark.parametrize("name", ["o_proj", "out_proj", "dense", "c_proj", "wo"])
def test_norms_are_those_of_the_projection(name):
    case = Case("restkv", 40, (1,), heads=2, group=3)
    module, x = Attention(case, name), torch.randn(2, 2, 7, E, generator=torch.Generator().manual_seed(0))
    weight = getattr(module, name).weight.detach().unflatten(1, (2, 3, E))
    each = torch.einsum("bhse,mhge->bhgsm", x, weight)
    output = OutputOf(module, 6)
    torch.testing.assert_close(output.lengths(x), each.sum(dim=2).norm(dim=-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.sizes(x), each.abs().sum(dim=-1).mean(dim=2), rtol=1e-5, atol=1e-5)


def test_packed_weights_are_read_as_well():
    module = Attention(Case("restkv", 40, (1,)))
    x, output = torch.randn(1, 2, 5, E, generator=torch.Generator().manual_seed(0)), OutputOf(module, 4)
    before = output.lengths(x), output.sizes(x)
    module.o_proj = PackedLinear(module.o_proj, 2)
    torch.testing.assert_close((output.lengths(x), output.sizes(x)), before)


def test_quantized_weights_are_read_as_well():
    module = Attention(Case("restkv", 40, (1,), heads=2, group=8))
    x, output = torch.randn(1, 2, 5, E, generator=torch.Generator().manual_seed(0)), OutputOf(module, 16)
    module.o_proj.weight = nn.Parameter(QuantizedTensor.quantize(module.o_proj.weight, 8), False)
    found = output.lengths(x), output.sizes(x)
    module.o_proj.weight = nn.Parameter(module.o_proj.weight.dequantize())
    torch.testing.assert_close((output.lengths(x), output.sizes(x)), found)


def test_the_factor_follows_the_weights():
    module, x = Attention(Case("restkv", 40, (1,))), torch.randn(1, 2, 5, E)
    output = OutputOf(module, 4)
    before = output.lengths(x)
    with torch.no_grad():
        module.o_proj.weight.mul_(2.0)
    torch.testing.assert_close(output.lengths(x), 2 * before)
    module.o_proj.weight = nn.Parameter(module.o_proj.weight.detach() * 2)
    torch.testing.assert_close(output.lengths(x), 4 * before)


@pytest.mark.parametrize("what", ["other name", "other shape", "meta", "whole numbers"])
def test_a_projection_that_cannot_be_read_leaves_the_norms_of_the_values(what):
    module = Attention(Case("restkv", 40, (1,)), "strange" if what == "other name" else "o_proj")
    if what == "other shape":
        module.o_proj = nn.Linear(7, 20)
    elif what == "meta":
        module.o_proj.to("meta")
    elif what == "whole numbers":
        module.o_proj.weight = nn.Parameter(torch.zeros(20, 4 * E, dtype=torch.int8), requires_grad=False)
    x = torch.randn(1, 2, 5, E)
    output = OutputOf(module, 4)
    torch.testing.assert_close(output.lengths(x), x.norm(dim=-1))
    torch.testing.assert_close(output.sizes(x), x.abs().sum(dim=-1))


def test_a_projection_of_nothing_leaves_ties():
    """Weights of 0: no token changes the output, and nothing fails."""
    module = Attention(Case("restkv", 40, (1,)))
    nn.init.zeros_(module.o_proj.weight)
    x = torch.randn(1, 2, 5, E)
    assert (OutputOf(module, 4).lengths(x) == 0).all()
    assert (OutputOf(module, 4).sizes(x) == 0).all()
