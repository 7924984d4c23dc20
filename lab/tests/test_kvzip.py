"""KVzip against transformers' own attention to a text that stands there twice."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

import kvkeep
from kvkeep_lab import kvzip

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
N = 30


def made(config, attention):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(6)
    return model


@pytest.fixture(scope="module")
def model():
    return kvkeep.attach(made(LlamaConfig(**SIZES), "sdpa"))


IDS = torch.randint(3, 61, (2, N), generator=torch.Generator().manual_seed(5))


def definition(chunk, *, first=0):
    """The attention of each chunk behind the whole text to that text, by transformers: layer → (B, Hk, N)."""
    eager, found = made(LlamaConfig(**SIZES), "eager"), []
    for piece in IDS.split(chunk, dim=1):
        with torch.inference_mode():
            seen = eager(torch.cat([IDS, piece], dim=1), output_attentions=True).attentions
        found.append([p[:, :, N + first :, :N].unflatten(1, (2, 2)).amax(dim=(2, 3)) for p in seen])
    return [torch.stack(parts).amax(dim=0) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("chunk", [7, 30, 100])
def test_scores_are_those_of_a_second_reading(model, chunk):
    cache = kvzip.read(model, IDS, budget=40, chunk=chunk)
    for layer, want in zip(cache.bounded_layers().values(), definition(chunk), strict=True):
        assert layer.store.positions[:, :, :N].tolist() == [[list(range(N))] * 2] * 2
        torch.testing.assert_close(layer.state["peak"][:, :, :N], want, rtol=1e-3, atol=1e-5)


def test_the_best_stay_and_generation_goes_on_within_the_budget(model):
    cache = kvzip.read(model, IDS, budget=12, policy=kvzip.KVzip(sinks=2, recent=3))
    for layer, want in zip(cache.bounded_layers().values(), definition(N), strict=True):
        best = want[:, :, 2 : N - 3].topk(7, dim=-1).indices.add(2).sort(dim=-1).values
        kept = [[[0, 1, *head, *range(N - 3, N)] for head in row] for row in best.tolist()]
        assert layer.store.positions.sort(dim=-1).values[:, :, 1:].tolist() == kept
        assert layer.store.capacity == 13
    longer = torch.cat([IDS, IDS[:, :4]], dim=1)
    options = {"attention_mask": torch.ones_like(longer), "max_new_tokens": 20, "do_sample": False}
    out = model.generate(longer, past_key_values=cache, pad_token_id=0, eos_token_id=None, **options)
    assert out.shape == (2, N + 24)
    assert all(int((cache.positions(layer) >= 0).sum(dim=-1).max()) == 12 for layer in cache.bounded_layers())


def test_the_first_layer_is_read_again_without_reading_it(model):
    """There the queries of both readings are the same, so `reread` has KVzip's scores, the first query aside."""
    cache = kvkeep.BoundedCache(model.config, "reread", 40)
    with torch.inference_mode():
        model(IDS, past_key_values=cache)
    again = cache.layers[0].layer.state["again"][:, :, :N]
    torch.testing.assert_close(again, definition(N, first=1)[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("ids", "options", "error", "message"),
    [
        (IDS[:, :0], {"budget": 9}, kvkeep.InputError, "no text to read"),
        (IDS, {"budget": 3}, kvkeep.BudgetError, "protects 4 first"),
        (IDS, {"budget": 0}, kvkeep.BudgetError, "below 1"),
        (IDS, {"budget": 9, "chunk": 0}, kvkeep.BudgetError, "chunk is below 1"),
    ],
)
def test_what_cannot_be_read_is_refused(model, ids, options, error, message):
    with pytest.raises(error, match=message):
        kvzip.read(model, ids, **options)


def test_a_sliding_window_cannot_be_read_twice():
    model = kvkeep.attach(made(MistralConfig(**SIZES, sliding_window=8), "sdpa"))
    with pytest.raises(kvkeep.UnsupportedModelError, match="cannot be read twice"):
        kvzip.read(model, IDS, budget=9)


def test_a_snapshot_names_the_budget_that_was_kept(model):
    cache = kvzip.read(model, IDS, budget=20)
    other = kvkeep.BoundedCache(model.config, cache.policy, [20, 20])
    for row in (0, 1):
        other.restore(row, cache.snapshot(row))
    for one, again in zip(cache.bounded_layers().values(), other.bounded_layers().values(), strict=True):
        assert torch.equal(one.block.store.positions, again.block.store.positions)
        assert one.block.store.capacity == again.block.store.capacity == 21
