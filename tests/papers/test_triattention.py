"""TriAttention: keys that the prompt's mean query would meet at many distances."""

import math

import pytest
import torch
from phases import phase_of
from transformers import GPT2Config, HunYuanDenseV1Config, LlamaConfig

import kvkeep
from kvkeep import AttentionOptions, Layer, PolicyError, parse
from kvkeep.rotary import Rotation

from .cases import CHAT, DECODE, Case, D, family, variant
from .lockstep import choose, compare, make_layer, retained, step_layer
from .rules_rounds import TriAttention

CASES = [
    *family("triattention:buffer=4,recent=3,sinks=1", budgets=(3, 5, 16)),
    *variant("triattention", budgets=(9, 24)),
]
FREQUENCIES = (1.0, 0.3, 0.05)
ROTATION = Rotation(torch.tensor(FREQUENCIES))  # of four pairs, so that two dims stay
TURNED = [
    Case("triattention:buffer=4,recent=3,sinks=1", 16, (24, *DECODE)),
    Case("triattention:buffer=4,recent=0,sinks=0,octaves=3", 8, (25, *DECODE[:20]), chunk=7, pads=(0, 9)),
    Case("triattention:buffer=2,octaves=0", 12, CHAT, heads=1, group=4, pads=(4, 0)),
    Case("triattention:buffer=3", (9, 16), (1,) * 40, pause=5),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_rotation_it_is_the_product_with_the_mean_query(case):
    compare(case)


def turned(x, rotation=ROTATION):
    return rotation.apply(x[None], torch.arange(x.shape[1])[None, None])[0]


@pytest.mark.parametrize("mode", ["true", "slot"])
@pytest.mark.parametrize("case", TURNED, ids=str)
def test_keeps_what_the_mean_query_meets(case, mode, monkeypatch):
    """The rule computes with complex numbers before the rotation; the layer is fed what a model rotated."""
    monkeypatch.setattr(TriAttention, "frequencies", FREQUENCIES)
    streams, turns = choose(case)
    layer = make_layer(case)
    layer._rotation, layer.rotary = (None, ROTATION) if mode == "true" else (ROTATION, ROTATION)
    rotated = [type(one)(turned(one.queries), turned(one.keys), one.values) for one in streams]
    for turn in turns:
        step_layer(layer, rotated, case, turn.tokens, turn.real)
        assert retained(layer) == turn.kept


@pytest.mark.parametrize("mode", ["true", "slot"])
def test_a_factor_of_yarn_changes_no_choice(mode):
    """Queries and keys both have it, so it is a common factor of all scores."""
    streams, turns = choose(TURNED[0])
    kept = []
    for scaling in (1.0, 3.0):
        rotation = Rotation(torch.tensor([*FREQUENCIES, 0.01]), scaling=scaling)
        layer = make_layer(TURNED[0])
        layer._rotation, layer.rotary = (None if mode == "true" else rotation), rotation
        rotated = [type(one)(turned(one.queries, rotation), turned(one.keys, rotation), one.values) for one in streams]
        kept.append([])
        for turn in turns:
            step_layer(layer, rotated, TURNED[0], turn.tokens, turn.real)
            kept[-1].append(retained(layer))
    assert kept[0] == kept[1]


def test_far_positions_keep_their_distances():
    """Angles are worked out at distances, not at positions, so a long stream loses no digits that matter."""
    rule = TriAttention(4, 1, sinks=0, octaves=0)
    rule.frequencies = (1.0,)
    rule.queries[0], rule.keys[0] = [[1.0, 0.0]], {1_000_000: [1.0, 0.0]}
    assert rule.scores(0, [1_000_000], 1_000_002)[1_000_000] == pytest.approx(math.cos(3))


LLAMA = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 61, "intermediate_size": 32}

HUNYUAN = HunYuanDenseV1Config(**LLAMA, head_dim=8)
"""Its keys go through a norm behind their rotation."""


@pytest.mark.parametrize("config", [GPT2Config(n_layer=2), HUNYUAN], ids=["gpt2", "hunyuan"])
def test_a_model_without_rotary_positions_is_refused(config):
    with pytest.raises(kvkeep.UnsupportedModelError, match=r"triattention needs rotary positions .* for example"):
        kvkeep.BoundedCache(config, "triattention", 16)
    layers = kvkeep.BoundedCache(LlamaConfig(**LLAMA), "triattention", 16).bounded_layers()
    assert all(layer.rotary is not None for layer in layers.values())


def calibration(path, *, layers=1, heads=4, half=D // 2, **changes):
    """A file in the format of the official code."""
    g = torch.Generator().manual_seed(0)
    names = ("q_mean_real", "q_mean_imag", "q_abs_mean")
    stats = {
        f"layer{layer:02d}_head{head:02d}": {name: torch.randn(half, generator=g).abs() * 2 for name in names}
        for layer in range(layers)
        for head in range(heads)
    }
    torch.save({"metadata": {"head_dim": 2 * half}, "stats": stats} | changes, path)
    return str(path)


def test_a_calibration_takes_the_place_of_the_prompts_queries(tmp_path):
    """The score is linear in the figures of a group's heads: their mean is the mean of the scores."""
    path = calibration(tmp_path / "means.pt")
    stats = torch.load(path)["stats"]
    rotation, n = Rotation(torch.tensor([1.0, 0.3, 0.05, 0.01])), 30
    layer = Layer(parse(f"triattention:buffer=4,recent=0,sinks=0,octaves=2,calibration={path}"), 10)
    layer.rotary = rotation
    g = torch.Generator().manual_seed(3)
    query, keys = torch.randn(1, 4, n, D, generator=g), torch.randn(1, 2, n, D, generator=g)
    at = torch.arange(n).view(1, 1, n)
    layer.step(query, rotation.apply(keys, at), keys, options=AttentionOptions(scaling=0.3), phase=phase_of(query))
    k = torch.complex(*keys[0].double().chunk(2, dim=-1))
    for head in range(2):
        scores = 0.0
        for g in (2 * head, 2 * head + 1):
            real, imaginary, length = (stats[f"layer00_head{g:02d}"][x].double() for x in stats["layer00_head00"])
            q = torch.complex(real, imaginary)
            for d in (1, 2, 4):
                angle = (n + d - torch.arange(n)).double()[:, None] * rotation.frequencies.double()
                scores = scores + (q * k[head].conj() * torch.polar(torch.ones_like(angle), angle)).real.sum(-1) / 3
            scores = scores + (k[head].abs() * (length - q.abs())).sum(-1)
        assert retained(layer)[0][head] == sorted(scores.topk(6).indices.tolist())


KINDS = ["missing", "garbage", "other", "empty", "not finite", "folder", "pickle"]
ODD = {
    "one length": {"q_abs_mean": torch.ones(1)},
    "another head": dict.fromkeys(("q_mean_real", "q_mean_imag", "q_abs_mean"), torch.ones(6)),
    "rows": dict.fromkeys(("q_mean_real", "q_mean_imag", "q_abs_mean"), torch.ones(1, 4)),
    "complex": {"q_mean_real": torch.ones(4, dtype=torch.complex64)},
    "sparse": {"q_mean_imag": torch.ones(4).to_sparse()},
    "whole": {"q_mean_imag": torch.ones(4, dtype=torch.int64)},
}


@pytest.mark.whole
@pytest.mark.parametrize("kind", [*KINDS, "a tensor", "a long name", *ODD])
def test_a_file_that_is_no_calibration_is_refused_in_a_line(tmp_path, kind):
    path = tmp_path / "file.pt"
    if kind == "garbage":
        path.write_bytes(b"\x80nonsense" * 9)
    elif kind == "other":
        torch.save({"weights": torch.zeros(3)}, path)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "not finite":
        calibration(
            path,
            stats={
                "layer00_head00": dict.fromkeys(("q_mean_real", "q_mean_imag"), torch.ones(4))
                | {"q_abs_mean": torch.full((4,), torch.nan)}
            },
        )
    elif kind in ODD:
        stats = torch.load(calibration(path))["stats"]
        stats["layer00_head01"] |= ODD[kind]
        torch.save({"stats": stats}, path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "a tensor":
        torch.save(torch.ones(3), path)
    elif kind == "a long name":
        path = tmp_path / ("x" * 5000 + "file.pt")
    elif kind == "pickle":
        torch.save({"stats": print}, path)
    with pytest.raises(PolicyError, match=r"calibration=.*: ") as error:
        Layer(parse(f"triattention:calibration={path}"), 16)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [{"heads": 3}, {"half": 3}, {"layers": 0}])
def test_a_calibration_of_another_model_is_refused(tmp_path, given):
    layer = Layer(parse(f"triattention:calibration={calibration(tmp_path / 'file.pt', **given)}"), 16)
    layer.rotary = Rotation(torch.tensor([1.0, 0.3, 0.05, 0.01]))
    x = torch.randn(1, 2, 30, D)
    with pytest.raises(PolicyError, match=r"calibration=.*file\.pt: "):
        layer.step(x, x, x, options=AttentionOptions(scaling=0.3), phase=phase_of(x))


def test_a_query_that_is_no_number_breaks_its_head_alone():
    g = torch.Generator().manual_seed(1)
    query, keys = torch.randn(2, 4, 30, 8, generator=g), torch.randn(2, 2, 30, 8, generator=g)
    layer = Layer(parse("triattention:recent=2,buffer=2"), 9)
    query[0, 0, 11] = torch.nan
    layer.step(query, keys, keys, options=AttentionOptions(scaling=0.3), phase=phase_of(query))
    assert [len(head) for row in retained(layer) for head in row] == [7] * 4
    assert all(state.isfinite().all() for state in layer.state.values())
