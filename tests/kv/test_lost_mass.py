"""The attention that evicted tokens carried, compared with a definition of plain loops."""

import itertools
import math

import pytest
import torch

import kvkeep
from kvkeep import backends
from kvkeep.backends.native import native
from kvkeep.cache.layer import Layer
from kvkeep.kv.lost_mass import LostMass, mean, shares
from kvkeep.testing import Case, Tape
from kvkeep.types import AttentionOptions, Phase

POLICIES = ["h2o:recent=3", "h2o:recent=2,decay=0.9", "snapkv:window=2,decode=score", "snapkv:window=3", "tova"]
POLICIES += ["scissorhands", "keyformer", "ahakv:recent=2", "adakv:window=2", "spatten", "sparse_fixed:h2=0.5"]
SILENT = ["local", "streaming_llm", "knorm", "random", "scissorhands_release", "sparse_fixed"]
CASE = Case(rows=2, heads=2, group=2, prompt=24, steps=20, budget=9, padding=4)


def fed(policy, backend, monkeypatch, *, chunk=None, window=None, pins=()):
    """A layer that has seen a prompt and generated tokens, and after each step (phase, view, mass, positions kept)."""
    monkeypatch.setenv(backends.SWITCH, backend)
    found = []

    class Spy(type(policy)):
        def observe(self, state, view, report):
            found.append((view.phase, view.positions.clone(), report.sums.get("mass"), view.seen.clone()))
            return super().observe(state, view, report)

    if backend == "reference":
        spy = object.__new__(Spy)
        spy.__dict__.update(policy.__dict__)
        policy = spy
    layer = Layer(policy, CASE.budget, index=1, window=window, pins=pins)
    tape = Tape.random(CASE)
    bounds = [*range(0, CASE.prompt, chunk or CASE.prompt), *range(CASE.prompt, CASE.prompt + CASE.steps + 1)]
    steps = []
    for start, stop in itertools.pairwise(bounds):
        phase = Phase.PREFILL if start < CASE.prompt else Phase.DECODE
        options = AttentionOptions(scaling=CASE.options.scaling, window=window)
        layer.step(*tape.at(slice(start, stop)), options=options, phase=phase, real=tape.real[:, start:stop])
        if found:
            steps.append((*found.pop(), layer.store.positions.clone()))
    return layer, steps


def by_hand(steps, window):
    """Evicted mass and all mass of each phase, row and head, token by token."""
    sums = torch.zeros(CASE.rows, CASE.heads, 4, dtype=torch.float64)
    for phase, positions, mass, seen, kept in steps:
        first = 0 if phase is Phase.PREFILL else 2
        if mass is None:  # a generated token, of which the policy asks nothing
            continue
        for row in range(CASE.rows):
            for head in range(CASE.heads):
                stays = set(kept[row, head].tolist())
                for slot, position in enumerate(positions[row, head].tolist()):
                    expired = window is not None and position <= int(seen[row]) - window
                    if position >= 0 and not expired:
                        worth = float(mass[row, head, slot])
                        sums[row, head, first + 1] += worth
                        sums[row, head, first] += worth * (position not in stays)
    return sums


@pytest.mark.parametrize(("chunk", "window"), [(None, None), (7, None), (None, 12)])
@pytest.mark.parametrize("policy", POLICIES)
def test_sums_are_those_of_plain_loops(policy, chunk, window, monkeypatch):
    found = kvkeep.parse(policy)
    if found.cascades and (chunk or window):
        pytest.skip("prunes through the layers")
    layer, steps = fed(found, "reference", monkeypatch, chunk=chunk, window=window, pins=[((1, 3),)])
    wanted = by_hand(steps, window)
    torch.testing.assert_close(layer.block.lost.double(), wanted, rtol=1e-4, atol=1e-5)
    assert (wanted[..., 0] > 0).any()


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_every_backend_counts_the_same(backend, policy, window, monkeypatch):
    if backend == "native" and native().library is None:
        pytest.skip(native().detail)
    policy = kvkeep.parse(policy)
    if policy.cascades and window:
        pytest.skip("prunes through the layers")
    wanted, _ = fed(policy, "reference", monkeypatch, window=window)
    found, _ = fed(policy, backend, monkeypatch, window=window)
    assert torch.equal(found.store.positions.sort(dim=-1).values, wanted.store.positions.sort(dim=-1).values)
    torch.testing.assert_close(found.block.lost, wanted.block.lost, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("policy", SILENT)
def test_a_statistic_without_a_mass_shows_nothing(policy, monkeypatch):
    layer, _ = fed(kvkeep.parse(policy), "torch", monkeypatch)
    assert mean([layer.block.lost[0]]) == LostMass(None, None)
    assert shares(layer.block.lost).prompt.isnan().all()


def test_a_prompt_that_fits_loses_nothing():
    layer = Layer(kvkeep.parse("h2o"), 64)
    tape = Tape.random(CASE)
    layer.step(*tape.at(slice(0, 24)), options=CASE.options, phase=Phase.PREFILL)
    assert mean([layer.block.lost[0]]) == LostMass(0.0, None)
    layer.reset()
    assert mean([layer.block.lost[0]]) == LostMass()


def test_a_mean_leaves_out_layers_and_heads_without_a_mass():
    layers = [torch.tensor([[1.0, 4.0, 0.0, 0.0], [3.0, 4.0, 0.0, 0.0]]), torch.zeros(2, 4)]
    assert mean(layers) == LostMass(0.5, None)
    assert mean([]) == LostMass()
    assert mean([torch.full((1, 4), math.nan)]) == LostMass()
