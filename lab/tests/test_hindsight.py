"""Passes with hindsight through whole models, against transformers' own attention."""

import copy
import re
import textwrap

import pytest
import torch
from parity.models import WINDOW, build, padded_batch

import kvkeep
from kvkeep.errors import InputError, ShapeError, UnsupportedOperationError
from kvkeep.testing import LAWS, Case
from kvkeep_lab import hindsight
from kvkeep_lab.hindsight import H2OGlobal, Keys, Totals

FAMILIES = ["llama", "qwen2-window", "gemma2", "gpt2", "opt", "gpt-oss"]


def eager(model, ids, mask=None, four_d=None):
    """Logits and probabilities of transformers' own attention."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    padding = {} if mask is None else {"position_ids": positions(mask)}
    with torch.no_grad():
        return model(ids, attention_mask=mask if four_d is None else four_d, output_attentions=True, **padding)


def positions(mask):
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


def group_mean(model, probabilities):
    heads = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
    rows, _, n, _ = probabilities.shape
    return probabilities.view(rows, heads, -1, n, n).mean(dim=2)


def text(n=30, rows=2):
    return torch.randint(3, 61, (rows, n), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", FAMILIES)
def test_totals_are_the_column_sums_of_the_models_own_attention(family):
    model = build(family)
    ids, mask = padded_batch()
    want = eager(model, ids, mask).attentions
    totals = hindsight.measure(kvkeep.attach(model), ids, mask.bool())
    assert totals.lengths.tolist() == mask.sum(dim=1).tolist()
    assert list(totals.mass) == list(range(len(want)))
    for layer, p in enumerate(want):
        for row, real in enumerate(mask.bool()):
            sums = group_mean(model, p)[row][:, real][:, :, real].sum(dim=1)
            n = int(real.sum())
            torch.testing.assert_close(totals.mass[layer][row, :, :n], sums, rtol=1e-4, atol=1e-5)
            assert not totals.mass[layer][row, :, n:].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_hiding_nothing_is_the_model_itself(family):
    model = build(family)
    ids, mask = padded_batch()
    want = eager(model, ids, mask).logits
    kvkeep.attach(model)
    keys = hindsight.measure(model, ids, mask.bool()).heaviest(0.0)
    cache = hindsight.without(model, keys)
    got = model(ids, attention_mask=mask, position_ids=positions(mask), past_key_values=cache).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recent", [0, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2-window", "gemma2", "gpt-oss"])
def test_hidden_keys_are_masked_as_a_mask_would(family, recent):
    """The same keys in all layers and heads, against the model's own attention under a 4-D mask."""
    model, n = build(family), 30
    ids = text(n)
    hidden = torch.rand(2, n, generator=torch.Generator().manual_seed(6)) < 0.3
    distance = torch.arange(n)[:, None] - torch.arange(n)
    layers = model.config.num_hidden_layers
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * layers
    heads = model.config.num_key_value_heads
    keys = Keys({layer: hidden[:, None].expand(2, heads, n) for layer in range(layers)})
    sees = (distance >= 0) & ~(hidden[:, None] & (distance > recent))
    masks = {
        "full_attention": torch.zeros(2, 1, n, n).masked_fill(~sees[:, None], torch.finfo(torch.float32).min),
        "sliding_attention": torch.zeros(2, 1, n, n).masked_fill(
            ~(sees & (distance < WINDOW))[:, None], torch.finfo(torch.float32).min
        ),
    }
    want = eager(model, ids, four_d=masks if len(set(types)) > 1 else masks[types[0]]).logits
    kvkeep.attach(model)
    with torch.no_grad():
        got = model(ids, past_key_values=hindsight.without(model, keys, recent=recent)).logits
        full = model(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert (got - full).abs().max() > 1e-3


@pytest.mark.parametrize("chunk", [1, None])
def test_two_passes_hold_the_heaviest_and_the_recent(chunk):
    """What stays is known beforehand: the last tokens, and before them the largest totals."""
    model = kvkeep.attach(build("llama"))
    ids = text(40, rows=3)
    totals = hindsight.measure(model, ids)
    oracle = H2OGlobal(totals=totals, recent=3, sinks=1)
    cache = kvkeep.BoundedCache(model.config, oracle, 8, prefill_chunk=chunk, sequences=range(3))
    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)
        for t in range(30, 40):
            model(ids[:, t : t + 1], past_key_values=cache)
    for layer, mass in totals.mass.items():
        for row in range(3):
            for head, kept in enumerate(cache.positions(layer)[row].tolist()):
                order = sorted(range(1, 37), key=mass[row, head].tolist().__getitem__)
                assert sorted(j for j in kept if j >= 0) == sorted([0, *order[-4:], 37, 38, 39])


def totals_for(heads=2, texts=1, n=60, layers=(0, 1)):
    mass = torch.rand(texts, 1, n, generator=torch.Generator().manual_seed(7)).expand(texts, heads, n)
    return Totals(dict.fromkeys(layers, mass), torch.full((texts,), n))


WHOLE = [name for name in LAWS if name != "processes_share_the_heads"]
"""Laws of a model that one process runs: what was measured has all heads, and other numbers of heads are refused."""


@pytest.mark.parametrize("options", [{}, {"recent": 0}, {"recent": 2, "sinks": 2}], ids=str)
@pytest.mark.parametrize("law", WHOLE)
def test_the_oracle_is_lawful(law, options):
    for chunk in (None, 5):
        LAWS[law](H2OGlobal(totals=totals_for(), **options), Case(rows=3, chunk=chunk))


def run(model, totals, *, n=12, **options):
    cache = kvkeep.BoundedCache(model.config, H2OGlobal(totals=totals, recent=1), 4, **options)
    with torch.no_grad():
        model(text(n), past_key_values=cache)


@pytest.mark.parametrize(
    ("totals", "options", "message"),
    [
        (totals_for(n=11), {}, "goes on for 1 tokens that were not measured"),
        (totals_for(heads=1), {}, "1 KV heads were measured, the cache has 2"),
        (totals_for(layers=(0,)), {}, "Layer 1 was not measured, only \\[0\\]"),
        (totals_for(texts=2), {}, r"2 texts were measured.*numbered \[0, 0\].*sequences=range\(n\)"),
        (totals_for(texts=2), {"sequences": [1, 2]}, r"numbered \[1, 2\]"),
    ],
    ids=["longer", "heads", "layer", "texts", "ids"],
)
def test_a_text_that_was_not_measured_is_an_error(totals, options, message):
    with pytest.raises(InputError, match=message):
        run(kvkeep.attach(build("llama")), totals, **options)


def test_totals_of_one_text_serve_all_rows_and_those_of_two_are_told_apart():
    model = kvkeep.attach(build("llama"))
    run(model, totals_for(texts=1))
    run(model, totals_for(texts=2), sequences=range(2))


def test_a_share_out_of_range_is_an_error():
    with pytest.raises(InputError, match=r"share=1\.5 is outside"):
        totals_for().heaviest(1.5)


@pytest.mark.parametrize("keys", [totals_for(texts=1), totals_for(texts=2, heads=4), totals_for(texts=2, n=11)])
def test_keys_of_other_texts_are_an_error(keys):
    model = kvkeep.attach(build("llama"))
    with pytest.raises(ShapeError, match="Measure these texts first"), torch.no_grad():
        model(text(12), past_key_values=hindsight.without(model, keys.heaviest(0.5)))


def test_a_pass_with_hindsight_takes_the_whole_text_at_once():
    model = kvkeep.attach(build("llama"))
    cache = hindsight.without(model, totals_for(texts=2).heaviest(0.5))
    with torch.no_grad():
        model(text(12), past_key_values=cache)
        assert cache.get_seq_length() == 12
        for mask in (None, torch.ones(2, 13)):
            with pytest.raises(UnsupportedOperationError, match="whole texts at once"):
                model(text(1), attention_mask=mask, past_key_values=cache)


def test_the_modules_example_runs():
    code = textwrap.dedent("\n".join(re.findall(r"^    .*$", hindsight.__doc__, flags=re.MULTILINE)))
    names = {"model": kvkeep.attach(build("llama")), "ids": text(24)}
    names |= {"torch": torch, "hindsight": hindsight, "BoundedCache": kvkeep.BoundedCache}
    exec(code, names)
    assert names["logits"].shape == (2, 24, 61)
