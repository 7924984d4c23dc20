"""Slot positions: keys at their rank in the cache, against the same computed from the whole history."""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import kvkeep
from kvkeep.cache.layer_layout import Layout
from kvkeep.rotary import Rotation, ranks

SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, num_hidden_layers=1, num_key_value_heads=2),
    "llama3": LlamaConfig(
        **SMALL,
        num_hidden_layers=1,
        num_key_value_heads=1,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "yarn": LlamaConfig(
        **SMALL,
        num_hidden_layers=1,
        num_key_value_heads=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "qwen3": Qwen3Config(**SMALL, num_hidden_layers=1, num_key_value_heads=2, head_dim=8),
    "neox": GPTNeoXConfig(**SMALL, num_hidden_layers=1),
}
CLASSES = {"qwen3": Qwen3ForCausalLM, "neox": GPTNeoXForCausalLM}


def build(name):
    torch.manual_seed(3)
    model = CLASSES.get(name, LlamaForCausalLM)(CONFIGS[name]).eval()
    return kvkeep.attach(model)


def test_ranks_count_the_tokens_that_are_held():
    positions = torch.tensor([[[7, -1, 3, 40, -1, 0]]])
    assert ranks(positions).tolist() == [[[2, -1, 1, 3, -1, 0]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_undo_is_the_inverse_even_four_million_tokens_on(dtype):
    rotation = Rotation(1.0 / 10_000 ** (torch.arange(0, 12, 2) / 12), scaling=1.3)
    x = torch.randn(1, 2, 50, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = torch.arange(4_000_000, 4_000_050)[None, None]
    back = rotation.undo(rotation.apply(x, positions), positions)
    assert torch.equal(back[..., 12:], x[..., 12:])
    torch.testing.assert_close(back, x, rtol=0, atol=6e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_token_loses_its_rotation_as_many_do(dtype):
    rotation = Rotation(1.0 / 10_000 ** (torch.arange(0, 12, 2) / 12), scaling=1.3)
    query, keys = (torch.randn(3, heads, 1, 16).to(dtype) for heads in (4, 2))
    for positions in (torch.tensor([[7], [-1], [4_000_000]]), torch.tensor([[8], [0], [4_000_001]])):
        for _ in range(2):  # the second time the angles are at hand
            found = rotation.unrotated(query, keys, positions)
            assert torch.equal(found[0], rotation.undo(query, positions[:, None]))
            assert torch.equal(found[1], rotation.undo(keys, positions[:, None]))


def test_a_table_of_angles_grows_with_the_cache():
    rotation = Rotation(1.0 / 10_000 ** (torch.arange(0, 12, 2) / 12), scaling=1.3)
    for n in (5, 3, 9):
        table = rotation.table(n, torch.bfloat16)
        assert len(table) >= n
        assert torch.equal(table, rotation.angles(torch.arange(len(table)), torch.bfloat16))
    assert rotation.table(4, torch.bfloat16) is table


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_a_stream_in_slot_positions_is_the_short_text_that_is_left(name):
    """In a model of one layer keys depend on their own token alone, so what is left is a text of its own."""
    model = build(name)
    ids = torch.randint(97, (1, 60), generator=torch.Generator().manual_seed(1))
    cache = kvkeep.BoundedCache(model.config, "streaming_llm:sinks=2", 7, positions="slot")
    model(ids[:, :40], past_key_values=cache)
    for t in range(40, 60):
        logits = model(ids[:, t : t + 1], past_key_values=cache).logits
        left = torch.cat([ids[:, :2], ids[:, t - 5 : t + 1]], dim=1)
        torch.testing.assert_close(logits[:, -1], model(left).logits[:, -1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [None, 5])
def test_heads_are_ranked_on_their_own(chunk):
    """Each head holds its own tokens, and holds their keys as they were before the rotation."""
    model = build("llama")
    ids = torch.randint(97, (2, 30), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    at = (mask.cumsum(1) - 1).clamp(min=0)
    slot = kvkeep.BoundedCache(model.config, "h2o", 6, positions="slot", prefill_chunk=chunk)
    for part in (slice(0, 24), *(slice(t, t + 1) for t in range(24, 30))):
        model(ids[:, part], attention_mask=mask[:, : part.stop], position_ids=at[:, part], past_key_values=slot)
    raw = model.model.layers[0].self_attn.k_proj(model.model.layers[0].input_layernorm(model.model.embed_tokens(ids)))
    raw = raw.view(2, 30, 2, 8).transpose(1, 2)
    layer = slot.bounded_layers()[0]
    held = slot.positions(0)
    assert len({tuple(sorted(head.tolist())) for head in held.flatten(0, 1)}) > 1
    for row, pad in ((0, 0), (1, 4)):
        for head in range(2):
            here = held[row, head] >= 0
            want = raw[row, head, held[row, head, here].long() + pad]
            torch.testing.assert_close(layer.store.slots().keys[row, head, here], want, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_enough_budget_is_the_full_cache():
    model = build("llama")
    ids = torch.randint(97, (2, 30), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    full = model(ids, attention_mask=mask).logits
    cache = kvkeep.BoundedCache(model.config, "tova", 40, positions="slot")
    parts = [model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache).logits]
    parts += [
        model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache).logits for t in range(20, 30)
    ]
    torch.testing.assert_close(torch.cat(parts, 1)[mask.bool()], full[mask.bool()], rtol=1e-4, atol=1e-5)


def test_the_policy_asks_for_slots_and_the_user_decides():
    config = CONFIGS["llama"]

    def mode(config, *policy, **options):
        return kvkeep.BoundedCache(config, *policy, 8, **options).position_mode

    assert mode(config, "streaming_llm") == "slot"
    assert mode(config, "streaming_llm", positions="true") == "true"
    assert mode(config, "h2o") == "true"
    assert mode(config, "h2o", positions="slot") == "slot"
    assert mode(GPT2Config(n_layer=1), "streaming_llm") == "true"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(n_layer=1), "'gpt2' model has no rotary embeddings"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "'dynamic'"),
    ],
)
def test_models_that_cannot_are_refused(config, message):
    with pytest.raises(kvkeep.UnsupportedModelError, match=message):
        kvkeep.BoundedCache(config, "h2o", 8, positions="slot")


def test_frequencies_are_the_models_own():
    for name, config in CONFIGS.items():
        model = build(name)
        own = next(m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
        rotation = Layout.of(config, kvkeep.parse("h2o"), positions="slot").rotations[0]
        assert torch.equal(rotation.frequencies, own.inv_freq)
        assert rotation.scaling == own.attention_scaling


def test_a_misspelt_mode_is_refused():
    with pytest.raises(kvkeep.InputError, match="'slots' is not a mode"):
        kvkeep.BoundedCache(CONFIGS["llama"], "h2o", 8, positions="slots")
