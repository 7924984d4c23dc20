"""Rotary frequencies that follow the length of a text: neighbours, earlier runs and pieces change nothing."""

import copy
import functools
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PhimoeConfig, PreTrainedModel

import kvkeep
from kvkeep.models.attention import attached
from kvkeep.models.rotary import LengthRule, rotate_by_text
from kvkeep.rotary import TextRotation

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"),
    reason="with older versions only longrope is right; docs/models.md says so",
)
BORDER = 48
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": BORDER,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 4.0, 9.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
OF_PHI = {"max_position_embeddings": 192, "original_max_position_embeddings": BORDER}
CONFIGS = {
    "llama longrope": LlamaConfig(**SIZES, max_position_embeddings=192, rope_parameters={**LONG, "factor": 4.0}),
    "llama dynamic": LlamaConfig(**SIZES, max_position_embeddings=BORDER, rope_parameters=DYNAMIC),
    "phi3": Phi3Config(**SIZES, **OF_PHI, rope_parameters=LONG),
    "phimoe": PhimoeConfig(
        **SIZES, **OF_PHI, num_local_experts=2, rope_parameters={**LONG, "short_mscale": 1.1, "long_mscale": 1.3}
    ),
}
if hasattr(transformers, "InternLM3Config"):  # the oldest transformers lacks them
    CONFIGS["internlm3"] = transformers.InternLM3Config(
        **SIZES, head_dim=8, max_position_embeddings=BORDER, rope_parameters=DYNAMIC
    )
if hasattr(transformers, "MiniCPM3Config"):
    CONFIGS["minicpm3"] = transformers.MiniCPM3Config(
        **SIZES | {"num_key_value_heads": 4},
        **LATENT,
        max_position_embeddings=192,
        rope_parameters={**LONG, "factor": 4.0},
    )
SHORT, OVER, BEYOND = (
    torch.randint(1, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (12, 40, 100)
)
NEW = 16


def model_of(kind: str, layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[kind])
    config.num_hidden_layers = layers
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


@functools.cache
def alone(kind: str, ids: tuple[int, ...]) -> list[int]:
    """What transformers generates from one prompt, on a fresh model."""
    given = torch.tensor([ids])
    output = model_of(kind).generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=NEW, use_cache=True
    )
    return output[0, len(ids) :].tolist()


def texts(engine: kvkeep.Engine, *prompts: Sequence[int]) -> list[list[int]]:
    sampling = kvkeep.SamplingParams(max_new_tokens=NEW)
    results = engine.generate([kvkeep.Request(prompt=ids, sampling=sampling) for ids in prompts])
    assert [result.error for result in results] == [None] * len(prompts)
    return [list(result.token_ids) for result in results]


@pytest.mark.long
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("chunk", [None, 7])
def test_neighbours_earlier_texts_and_chunks_change_nothing(kind: str, chunk: int | None):
    want = [alone(kind, tuple(ids)) for ids in (SHORT, BEYOND, OVER)]
    engine = kvkeep.Engine(model_of(kind), policy="full", budget=192, rows=3, prefill_chunk=chunk)
    assert texts(engine, SHORT, BEYOND, OVER) == want  # beside each other; one grows over the border
    assert [texts(engine, ids)[0] for ids in (SHORT, BEYOND, SHORT, OVER)] == [*want[:2], want[0], want[2]]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama longrope", "llama dynamic", "phi3"])
def test_a_common_beginning_is_shared_on_one_side_of_the_border_only(kind: str):
    engine = kvkeep.Engine(model_of(kind), policy="full", budget=192, rows=1, prefill_chunk=8, prefix_memory=2**24)
    long, longer = BEYOND, [*BEYOND, 5]
    assert texts(engine, BEYOND[:20]) == [alone(kind, tuple(BEYOND[:20]))]
    sampling = kvkeep.SamplingParams(max_new_tokens=NEW)
    cached = []
    for ids in (long, longer, BEYOND[:30]):
        (result,) = engine.generate([kvkeep.Request(prompt=ids, sampling=sampling)])
        assert list(result.token_ids) == alone(kind, tuple(ids))
        cached.append(result.cached_tokens)
    assert cached == [0, 0 if "dynamic" in kind else 96, 16]


@pytest.mark.parametrize("kind", ["llama longrope", "llama dynamic"])
def test_a_memory_is_not_continued_across_the_border(kind: str):
    engine = kvkeep.Engine(model_of(kind), policy="full", budget=192, rows=1)
    prefix, session = engine.prefix(SHORT), engine.session()
    session.read(SHORT)
    few = kvkeep.SamplingParams(max_new_tokens=2)
    assert engine.generate([kvkeep.Request(prompt=SHORT, snapshot=prefix, sampling=few)])[0].error is None
    with pytest.raises(kvkeep.InputError, match=f"in another way beyond {BORDER} tokens.* stands for 12 tokens"):
        engine.generate([kvkeep.Request(prompt=BEYOND, snapshot=prefix, sampling=few)])
    with pytest.raises(kvkeep.InputError, match="Give the whole text as one prompt"):
        session.ask(BEYOND, few)
    assert session.ask(SHORT, few).error is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["phi3", "phimoe"])
def test_a_text_that_grows_over_the_border_is_read_again_in_its_session_too(kind: str):
    engine = kvkeep.Engine(model_of(kind), policy="full", budget=192, rows=1)
    session = engine.session()
    session.read(OVER[:30])
    result = session.ask(OVER[30:], kvkeep.SamplingParams(max_new_tokens=NEW))
    assert list(result.token_ids) == alone(kind, tuple(OVER))
    again = session.ask(SHORT, kvkeep.SamplingParams(max_new_tokens=NEW))
    assert list(again.token_ids) == alone(kind, (*OVER, *result.token_ids, *SHORT))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama longrope", "llama dynamic"])
def test_rows_of_a_padded_batch_are_alone_in_generate_and_pieces_are_refused(kind: str):
    model = kvkeep.attach(model_of(kind))
    pad = len(BEYOND) - len(SHORT)
    ids = torch.tensor([[0] * pad + SHORT, BEYOND])
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    cache = kvkeep.BoundedCache(model.config, "full", budget=192)
    output = model.generate(ids, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=NEW)
    assert output[:, len(BEYOND) :].tolist() == [alone(kind, tuple(SHORT)), alone(kind, tuple(BEYOND))]
    other = kvkeep.BoundedCache(model.config, "full", budget=192)
    model(torch.tensor([BEYOND[:20]]), past_key_values=other)
    with pytest.raises(kvkeep.UnsupportedOperationError, match=f"beyond {BORDER} tokens"):
        model(torch.tensor([BEYOND[20:]]), past_key_values=other)


def test_an_attached_model_is_left_as_it_was():
    model = model_of("llama dynamic")
    with attached(model):
        assert rotate_by_text in model.model.rotary_emb._forward_hooks.values()
    assert not model.model.rotary_emb._forward_hooks
    assert LengthRule.of(model) == LengthRule((), (BORDER,))
    assert not LengthRule.of(nn.Linear(2, 2))


@torch.no_grad()
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("kind", ["llama longrope", "phi3"])
def test_keys_lose_the_rotation_of_the_length_at_which_they_were_read(kind, chunk, monkeypatch):
    """In a model of one layer a key depends on its own token alone, whatever the length of the text."""
    model, found, undo = model_of(kind, layers=1), [], TextRotation.undo
    first = model.model.layers[0]

    def noted(rotation, x, positions):
        out = undo(rotation, x, positions)
        found.append((out, positions))
        return out

    monkeypatch.setattr(TextRotation, "undo", noted)
    engine = kvkeep.Engine(model, policy="keydiff:rotated=false", budget=40, rows=3, prefill_chunk=chunk)
    prompts = SHORT, BEYOND, OVER
    lines = texts(engine, *prompts)
    whole = [torch.tensor([*ids, *line]) for ids, line in zip(prompts, lines, strict=True)]
    project, heads = first.self_attn, model.config.num_key_value_heads
    keys = []
    for ids in whole:
        x = first.input_layernorm(model.model.embed_tokens(ids))
        qkv = project.qkv_proj(x) if kind == "phi3" else project.k_proj(x)
        keys.append((qkv[:, 32:48] if kind == "phi3" else qkv).view(len(ids), heads, 8))
    checked = 0
    for out, positions in found:
        for row in range(len(out)):
            at = positions[row].expand(heads, -1).long()
            for head in range(heads):
                held = at[head] >= 0
                mine = out[row, head, held]
                near = [ids[at[head, held], head] for ids in keys if int(at[head].max()) < len(ids)]
                assert any(torch.allclose(mine, want, rtol=1e-4, atol=1e-5) for want in near)
                checked += 1
    assert checked > 20


def test_memories_that_grew_over_the_border_are_not_read_on_where_rotations_are_undone():
    model = kvkeep.attach(model_of("llama longrope"))
    cache = kvkeep.BoundedCache(model.config, "leverage", 60)
    ids = torch.tensor([OVER])
    with torch.no_grad():
        model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=NEW)
        with pytest.raises(kvkeep.UnsupportedOperationError, match=f"changes beyond {BORDER} tokens"):
            model(torch.tensor([SHORT]), past_key_values=cache)


@pytest.mark.parametrize(
    ("kind", "policy", "positions", "why"),
    [
        ("llama longrope", "h2o", "slot", "'longrope' embeddings, which change with the length"),
        ("llama longrope", "expected_attention", None, "the length of the text to come"),
        ("llama dynamic", "leverage", None, "others for each length"),
    ],
)
def test_what_cannot_follow_the_length_is_refused(kind, policy, positions, why):
    with pytest.raises(kvkeep.UnsupportedModelError, match=why):
        kvkeep.BoundedCache(CONFIGS[kind], policy, 64, positions=positions)


def test_a_memory_cut_out_of_a_longer_text_is_refused_where_its_keys_were_rotated_in_another_way():
    rule = LengthRule(switches=(48,))
    assert rule.refusal(30, 40, of=47) is None
    assert "text of 60 tokens" in rule.refusal(30, 40, of=60)
    assert rule.refusal(50, 70, of=60) is None
    assert "beyond 48" in LengthRule(grows=(48,)).refusal(30, 40, of=60)


@pytest.mark.parametrize("budget", [24, 192])
@pytest.mark.parametrize("kind", ["llama longrope", "llama dynamic"])
def test_a_shorter_chat_goes_on_from_no_keys_of_a_longer_text(kind: str, budget: int):
    def asked(engine: kvkeep.Engine, ids: Sequence[int], name: str) -> kvkeep.Result:
        sampling = kvkeep.SamplingParams(max_new_tokens=4)
        request = kvkeep.Request(prompt=ids, sampling=sampling, owner="anna", keep_as=name)
        return engine.generate(request)[0]

    settings = {"policy": "tova", "budget": budget, "rows": 1}
    engine = kvkeep.Engine(model_of(kind), conversation_memory=2**24, **settings)
    asked(engine, BEYOND[:60], "long")
    found = asked(engine, [*BEYOND[:30], *SHORT], "short")
    expected = asked(kvkeep.Engine(model_of(kind), **settings), [*BEYOND[:30], *SHORT], "fresh")
    assert (found.cached_tokens, found.token_ids) == (0, expected.token_ids)


def test_a_type_of_layer_that_does_not_follow_the_length_keeps_its_angles():
    module = SimpleNamespace(rope_type={"full_attention": "dynamic", "sliding_attention": "default"})
    assert rotate_by_text(module, (None, None, "sliding_attention"), {}, (torch.ones(1), torch.ones(1))) is None
