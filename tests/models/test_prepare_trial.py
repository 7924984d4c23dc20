"""What a trial on random numbers must not miss, and what neither trial nor measurement may disturb."""

import copy
import threading
from collections import Counter

import pytest
import torch
from test_fused_layers import WHOLE, both, steps
from test_prepare import SIZES, fused_copy, generated, made
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Ministral3Config, Ministral3ForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP
from transformers.models.seed_oss.modeling_seed_oss import SeedOssConfig, SeedOssMLP

import kvkeep
from kvkeep.backends.native import layer_ops, native
from kvkeep.cache.hf_layers import handed
from kvkeep.models import fused_layers
from kvkeep.models.fused_decoder import FusedDecoder
from kvkeep.models.fused_layers import FusedLayer
from kvkeep.models.fused_modules import FusedGate
from kvkeep.models.prepare import fuse_modules, restore_modules

pytestmark = pytest.mark.skipif(native().library is None, reason="no native kernel")


def logits_of(model, first=0, *, rows=3, tokens=6, mask=None, **options):
    """Logits of decode steps with given tokens, the first of them at a position of choice."""
    cache = kvkeep.BoundedCache(model.config, "h2o", 8, **options)
    ids, found = torch.arange(rows * 12).view(rows, 12) % 90 + 3, []
    with torch.inference_mode():
        for step in range(1 + tokens):
            begin = first if step == 0 else first + 11 + step
            given = {**handed(model, cache), "use_cache": True}
            if first:
                given["position_ids"] = torch.arange(begin, begin + ids.shape[1]).expand(rows, -1)
            if mask is not None:
                given["attention_mask"] = nn.functional.pad(mask, (0, step), value=1)
            found.append(model(ids, **given).logits[:, -1:])
            ids = (torch.arange(rows)[:, None] * 7 + step * 5) % 90 + 3
    return torch.cat(found, dim=1)


def pair(plain):
    """A plain model and a fused copy, both attached; weights are large enough to tell positions apart."""
    for weight in plain.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, 0, 0.1)
    model, _ = fused_copy(plain)
    return kvkeep.attach(plain), kvkeep.attach(model)


def test_queries_that_are_scaled_by_their_position():
    torch.manual_seed(0)
    plain, model = pair(Ministral3ForCausalLM(Ministral3Config(**SIZES, head_dim=16)).eval())
    for first in (0, 20_000, 200_000):
        torch.testing.assert_close(logits_of(model, first), logits_of(plain, first), rtol=0, atol=1e-4)


def test_part_of_a_head_is_rotated_in_pairs_of_halves():
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        **{**SIZES, "head_dim": 16, "n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    )
    plain, model = pair(Glm4MoeForCausalLM(config).eval())
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=0, atol=1e-4)


class LimitedMLP(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=10)) * self.up_proj(x))


class LimitedUpMLP(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(min=-10, max=10))


@pytest.mark.parametrize("kind", [LimitedMLP, LimitedUpMLP])
def test_a_gate_with_a_limit_stays(kind):
    layer = kind(made().config).eval()
    for weight in layer.parameters():
        nn.init.normal_(weight, 0, 0.02)
    fuse_modules(layer)
    assert not isinstance(layer, FusedGate)


def test_a_feed_forward_layer_drops_in_training():
    layer = SeedOssMLP(SeedOssConfig(**SIZES, residual_dropout=0.5)).eval()
    fuse_modules(layer)
    assert isinstance(layer, FusedGate)
    with torch.no_grad():
        assert (layer.train()(torch.ones(1, 1, 64)) == 0).any()
        assert not (layer.eval()(torch.ones(1, 1, 64)) == 0).any()


class ScaledLayer(LlamaDecoderLayer):
    """As long as its scale is 1 it is Llama's."""

    def __init__(self, *args):
        super().__init__(*args)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * self.scale


class ToldLayer(LlamaDecoderLayer):
    def forward(self, *args, more=None, **kwargs):
        out = super().forward(*args, **kwargs)
        return out if more is None else out + more


def replaced(kind):
    model = made()
    for index, layer in enumerate(model.model.layers):
        other = kind(model.config, index).eval()
        other.load_state_dict(layer.state_dict(), strict=False)
        model.model.layers[index] = other
    return model


def test_a_layer_with_weights_of_its_own_stays():
    model, _ = fused_copy(replaced(ScaledLayer))
    assert not any(isinstance(layer, FusedLayer) for layer in model.modules())


def test_a_layer_that_is_told_more_than_in_its_trial_runs_as_before():
    plain = replaced(ToldLayer)
    model, _ = fused_copy(plain)
    assert all(isinstance(layer, FusedLayer) for layer in model.model.layers)
    found = []
    for one in (kvkeep.attach(plain), kvkeep.attach(model)):
        cache = kvkeep.BoundedCache(one.config, "h2o", 8)
        with torch.inference_mode():
            for ids in (torch.arange(3, 15)[None], torch.tensor([[5]])):
                out = one(ids, **handed(one, cache), use_cache=True, more=torch.ones(1)).logits
        found.append(out)
    torch.testing.assert_close(*found, rtol=0, atol=2e-5)


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_hooks_of_all_modules_are_called(register):
    plain, model = both("qwen3")
    calls = []
    for one in (plain, model):
        heard = Counter()
        handle = register(lambda module, *_, heard=heard: heard.update([id(module)]))
        try:
            steps(one)
        finally:
            handle.remove()
        calls.append([heard[id(module)] for module in one.modules()])
    assert calls[0] == calls[1]


class Listener:
    """Hears calls, and cannot be copied."""

    def __init__(self):
        self.heard, self.lock = 0, threading.Lock()

    def __call__(self, *_):
        self.heard += 1

    def hook(self, *_):
        self.heard += 1


@pytest.mark.parametrize("part", ["mlp", "self_attn.q_proj", "input_layernorm"])
def test_trials_do_not_call_hooks(part):
    model, listener = made(), Listener()
    for layer in model.model.layers:
        layer.get_submodule(part).register_forward_hook(listener.hook)
    fuse_modules(model)
    assert listener.heard == 0
    assert not any(isinstance(layer, FusedLayer) for layer in model.modules())


def test_a_model_may_be_fused_while_another_thread_runs_it():
    model, ended, failures = kvkeep.attach(made("qwen3")), threading.Event(), []
    expected = logits_of(model)

    def run():
        while not ended.is_set():
            try:
                torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=2e-5)
            except BaseException as error:
                failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(5):
            fuse_modules(model)
            restore_modules(model)
        fuse_modules(model)
    finally:
        ended.set()
        thread.join()
    assert not failures
    assert any(isinstance(layer, FusedLayer) for layer in model.modules())


@pytest.mark.parametrize("part", ["norm", "products", "gated"])
def test_a_module_that_gets_its_own_class_back_during_its_call_computes_on(part, monkeypatch):
    model = kvkeep.attach(made("qwen3"))
    expected = logits_of(model)
    fuse_modules(model)
    monkeypatch.setattr(layer_ops, part, lambda *_: restore_modules(model))  # as another thread may
    torch.testing.assert_close(logits_of(model), expected)
    assert not any(isinstance(module, FusedLayer) for module in model.modules())


@pytest.mark.long
@pytest.mark.parametrize(("home", "name"), [(FusedDecoder, "_embedded"), (fused_layers, "handed_over")])
def test_a_model_that_gets_its_own_classes_back_in_a_decode_step_goes_on(home, name, monkeypatch):
    model = kvkeep.attach(made("qwen3"))
    expected, real, calls = generated(model, tokens=12), getattr(home, name), []

    def restored(*args, **options):
        found = real(*args, **options)
        calls.append(found)
        restore_modules(model)  # as another thread may
        return found

    fuse_modules(model)
    monkeypatch.setattr(home, name, restored)
    assert generated(model, tokens=12) == expected
    assert calls


def state(cache):
    """Slots, positions and counts of every layer, and whether it is broken."""
    tensors = []
    for layer in cache.layers:
        held = layer.layer
        tensors += [held.store.keys, held.store.values, held.store.positions, held.seen, torch.tensor(held.broken)]
    return tensors


@pytest.mark.parametrize("what", ["full", "interrupted", "padding"])
def test_an_error_within_a_layer_leaves_the_cache_as_plain_modules_do(what, monkeypatch):
    results, errors = [], (kvkeep.KVKeepError, KeyboardInterrupt)
    for model in both():
        # a step that is one call cannot stop between its layers, and keydiff's is none
        policy = {"full": "full", "interrupted": "keydiff", "padding": "h2o"}[what]
        cache = kvkeep.BoundedCache(model.config, policy, 13)

        def run(ids, model=model, cache=cache, **more):
            with torch.inference_mode():
                return model(torch.tensor([ids]), **handed(model, cache), use_cache=True, **more).logits

        run(list(range(3, 15)))
        run([5])
        with monkeypatch.context() as patch:
            more = {}
            if what == "interrupted":

                def interrupt(*_, **__):
                    raise KeyboardInterrupt

                for name in ("step", "replayable"):
                    patch.setattr(cache.layers[1].stepper, name, interrupt)
            elif what == "padding":
                more = {"attention_mask": torch.ones(1, 5, dtype=torch.long)}
            with pytest.raises(errors) as raised:
                run([6], **more)
        after = type(raised.value), [copy.deepcopy(tensor) for tensor in state(cache)], cache.get_seq_length()
        try:
            again = run([7])
        except Exception as error:
            again = type(error)
        cache.reset()
        results.append((*after, again, run(list(range(3, 15)))))
    (kind, slots, length, again, fresh), (other_kind, *others) = results
    assert kind is other_kind
    assert length == others[1]
    for found, expected in zip(others[0], slots, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    if isinstance(again, torch.Tensor):
        torch.testing.assert_close(others[2], again, rtol=0, atol=2e-5)
    else:
        assert again is others[2]
    torch.testing.assert_close(others[3], fresh, rtol=0, atol=2e-5)


def test_the_attention_of_a_trial_is_not_the_models():
    model = made()
    seen, honest = [], fused_layers._record

    def record(module, *args, **kwargs):
        seen.append(model.config._attn_implementation)
        return honest(module, *args, **kwargs)

    before = model.config._attn_implementation
    fused_layers.AttentionInterface.register(fused_layers._RECORDER, record)
    try:
        fuse_modules(model)
    finally:
        fused_layers.AttentionInterface.register(fused_layers._RECORDER, honest)
    assert set(seen) == {before}


MORE = {"head_dim": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
MORE |= {"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "num_hidden_layers": 4}


def every():
    """All causal decoders of transformers, small and of random numbers, with large weights in what adds a bias."""
    for config_of, kind in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        try:
            config = config_of(**SIZES | MORE)
            with torch.device("meta"):
                shapes = kind(config)
            if sum(weight.numel() for weight in shapes.parameters()) > 10**7:
                continue
            torch.manual_seed(0)
            model = kind(config).float().eval()
            for name, weight in model.named_parameters():
                if name.endswith("bias") and weight.ndim == 1:
                    nn.init.normal_(weight, 0, 0.1)
        except Exception:  # it wants other sizes
            continue
        yield config.model_type, model


@pytest.mark.slow
def test_every_decoder_of_transformers_says_the_same():
    known = set()
    for name, made_one in every():
        if not any(isinstance(layer, FusedLayer) for layer in fused_copy(made_one)[0].modules()):
            continue
        try:
            plain, model = pair(made_one)
        except kvkeep.UnsupportedModelError:
            continue
        name = name.removesuffix("_text")  # gemma3's decoder is gemma3_text
        known.add(name)
        mask = torch.ones(3, 12, dtype=torch.long)
        mask[0, :5] = 0
        given = [{"rows": rows} for rows in (1, 3, 16, 17)]
        given += [{"mask": mask}, {"kv_bits": 8}]
        if not any(part.endswith("embed_positions") for part, _ in made_one.named_modules()):
            given += [{"first": 20_000}, {"first": 10**6}]
            given += [{"positions": "slot"}] if name in WHOLE else []
        for options in given:
            found, expected = (logits_of(one, tokens=40, **options) for one in (model, plain))
            limit = 3e-3 if "kv_bits" in options else 1e-4
            torch.testing.assert_close(found, expected, rtol=0, atol=limit * expected.abs().max().item(), msg=name)
        assert generated(model, tokens=40) == generated(plain, tokens=40), name
    assert known >= set(WHOLE)
