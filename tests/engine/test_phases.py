"""What tokens are is said, not guessed: a last piece of one token is prompt, and a text can be read again."""

import pytest
import torch

import kvkeep
from kvkeep.cache.layer import Layer
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.types import AttentionOptions, Phase

from .models import DEVICE, alone, model
from .test_equal import POLICIES, prompt_of

OPTIONS = AttentionOptions(scaling=0.3)


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_of_seventeen_tokens_in_pieces_of_eight(policy):
    """Its last piece has one token, and that is prompt for every policy, in the engine as in the cache."""
    parsed = kvkeep.parse(policy)
    budget = 14 if parsed.evicts else 64
    engine = Engine(model("llama"), policy=policy, budget=budget, rows=2, prefill_chunk=8)
    prompt = prompt_of(4, 17)
    (found,) = engine.generate([Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=5))])
    assert found.token_ids == alone("llama", prompt, 5, policy, budget, 8)
    if parsed.cascades:
        return
    cache = kvkeep.BoundedCache(model("llama").config, policy, budget, prefill_chunk=8)  # cut by the layers themselves
    with torch.inference_mode():
        logits = model("llama")(input_ids=torch.tensor([prompt], device=DEVICE), past_key_values=cache).logits
    assert int(logits[0, -1].argmax()) == found.token_ids[0]
    blocks = [layer.block for layer in cache.bounded_layers().values()]
    assert [block.prompt.tolist() for block in blocks] == [[17]] * len(blocks)


def test_a_prompt_that_evicts_only_once_needs_no_slot_for_its_last_piece():
    engine = Engine(model("llama"), policy="snapkv:window=4,decode=grow", budget=12, rows=1, prefill_chunk=8)
    (found,) = engine.generate([Request(prompt=prompt_of(4, 17), sampling=SamplingParams(max_new_tokens=1))])
    assert found.finish_reason == "length"


def test_generate_takes_its_first_call_for_a_prompt():
    cache = kvkeep.BoundedCache(model("llama").config, "h2o", 8)
    phases, step = [], Layer.step

    def spy(layer, *args, phase, **options):
        phases.append(phase)
        return step(layer, *args, phase=phase, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Layer, "step", spy)
        ids = torch.tensor([[5]], device=DEVICE)
        model("llama").generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=3, pad_token_id=0
        )
    assert phases[:6] == [Phase.PREFILL] * 3 + [Phase.DECODE] * 3
    assert phases[6:] in ([], [Phase.DECODE] * 3)  # a fused model makes its last step without the layers


def random_tokens(n, seed):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, n, 8, generator=g) for heads in (4, 2, 2)]


@pytest.mark.parametrize("policy", ["h2o", "snapkv:window=4", "tova", "scissorhands", "keydiff", "local"])
def test_probes_are_reported_and_leave_no_token(policy):
    layer = Layer(kvkeep.parse(policy), 12)
    layer.step(*random_tokens(20, 1), options=OPTIONS, phase=Phase.PREFILL)
    before = {name: tensor.clone() for name, tensor in layer.block.per_row().items()}
    query, keys, values = random_tokens(5, 2)
    out = layer.step(query, keys, values, options=OPTIONS, phase=Phase.PROBE)
    after = layer.block.per_row()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed <= {f"state.{name}" for name in layer.policy.slots}
    if policy == "h2o":  # what the slots received from all probes is added to their mass
        slots = layer.store.slots()
        logits = query.unflatten(1, (2, 2)) @ slots.keys[:, :, None].mT * 0.3
        own = query.unflatten(1, (2, 2)) @ keys[:, :, None].mT * 0.3
        own = own.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        empty = (slots.positions < 0)[:, :, None, None]
        p = torch.cat([logits.masked_fill(empty, -torch.inf), own], dim=-1).softmax(dim=-1)
        mass = p[..., : slots.positions.shape[-1]].mean(dim=2).sum(dim=2)
        torch.testing.assert_close(after["state.mass"] - before["state.mass"], mass.masked_fill(empty[:, :, 0, 0], 0.0))
        want = p @ torch.cat([slots.values, values], dim=2)[:, :, None]
        torch.testing.assert_close(out, want.flatten(1, 2))


def test_probes_and_layers_that_prune_together():
    layer = Layer(kvkeep.parse("spatten"), 12)
    layer.step(*random_tokens(20, 1), options=OPTIONS, phase=Phase.PREFILL)
    with pytest.raises(kvkeep.UnsupportedOperationError, match="read a text again"):
        layer.step(*random_tokens(3, 2), options=OPTIONS, phase=Phase.PROBE)
    layer.step(*random_tokens(1, 2), options=OPTIONS, phase=Phase.DECODE)


def test_generated_tokens_come_one_at_a_time():
    layer = Layer(kvkeep.parse("h2o"), 12)
    with pytest.raises(kvkeep.ShapeError, match="one at a time"):
        layer.step(*random_tokens(3, 2), options=OPTIONS, phase=Phase.DECODE)
