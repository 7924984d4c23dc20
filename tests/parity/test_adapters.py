"""A memory belongs to the adapters that were active when it was made: prefixes, snapshots, sessions, caches."""

import pytest
import torch
from models import build

import kvkeep
from kvkeep.models.weight_hash import adapters, fingerprint

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
SAMPLING = kvkeep.SamplingParams(max_new_tokens=6)
IDS = torch.randint(1, 60, (1, 40), generator=torch.Generator().manual_seed(1))


def lora(**more):
    return peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM", **more)


def adapted():
    torch.manual_seed(0)
    model = peft.get_peft_model(build("llama"), lora(), adapter_name="a")
    model.add_adapter("b", lora())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(4.0)
    return kvkeep.attach(model.eval())


def expected(model):
    return model.generate(IDS, do_sample=False, max_new_tokens=6, attention_mask=torch.ones_like(IDS))[0, 40:].tolist()


PROMPT = IDS[0].tolist()


def ask(engine, ids=PROMPT, **more):
    return engine.generate([kvkeep.Request(prompt=ids, sampling=SAMPLING, ignore_end=True, **more)])[0]


def scaled(model):
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["a"] = 3.0


SWITCHES = {
    "another adapter": lambda model: model.set_adapter("b"),
    "both adapters": lambda model: model.base_model.set_adapter(["a", "b"]),
    "no adapter": lambda model: model.base_model.disable_adapter_layers(),
    "another scaling": scaled,
    "merged": lambda model: model.merge_adapter(),
}


@pytest.mark.parametrize("how", SWITCHES)
def test_whatever_changes_the_adapter_changes_the_fingerprint(how):
    model = adapted()
    before, state = fingerprint(model), adapters(model)
    SWITCHES[how](model)
    assert fingerprint(model) != before
    assert adapters(model) != state


def test_coming_back_to_an_adapter_or_adding_an_idle_one_keeps_its_memories():
    model = adapted()
    before = fingerprint(model)
    model.set_adapter("b")
    model.set_adapter("a")
    assert fingerprint(model) == before
    model.add_adapter("c", lora())
    assert fingerprint(model) == before
    with torch.no_grad():
        model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.lora_A.b").weight.mul_(-1)
    assert fingerprint(model) == before
    with torch.no_grad():
        model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.lora_A.a").weight.mul_(-1)
    assert fingerprint(model) != before


def test_modules_that_an_adapter_replaces_whole_are_noticed():
    model = peft.get_peft_model(build("llama"), lora(modules_to_save=["lm_head"]), adapter_name="a").eval()
    model.add_adapter("b", lora(modules_to_save=["lm_head"]))
    a = fingerprint(model)
    model.set_adapter("b")
    assert fingerprint(model) != a


@pytest.mark.parametrize("part", ["", "model"])
def test_adapters_within_a_plain_model_are_noticed(part):
    model = kvkeep.attach(build("llama"))
    inner = peft.inject_adapter_in_model(lora(), model.get_submodule(part), adapter_name="a")
    found = {fingerprint(model)}
    assert adapters(model)
    scaled(model)
    found.add(fingerprint(model))
    for module in inner.modules():
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            module.enable_adapters(False)
    found.add(fingerprint(model))
    assert len(found) == 3


@pytest.mark.long
def test_common_beginnings_belong_to_the_adapter():
    model = adapted()
    engine = kvkeep.Engine(model, policy="full", budget=64, rows=1, prefill_chunk=8, prefix_memory=2**24)
    cached = []
    for adapter in ("a", "b", "a", "b"):
        model.set_adapter(adapter)
        result = ask(engine)
        assert list(result.token_ids) == expected(model)
        cached.append(result.cached_tokens)
    assert cached == [0, 0, 32, 32]
    with model.disable_adapter():
        assert list(ask(engine).token_ids) == expected(model)


def test_snapshots_and_sessions_are_refused_under_another_adapter():
    model = adapted()
    engine = kvkeep.Engine(model, policy="full", budget=128, rows=1)
    snapshot, session = engine.prefix(IDS[0, :30].tolist()), engine.session()
    session.ask(IDS[0].tolist(), SAMPLING)
    model.set_adapter("b")
    with pytest.raises(kvkeep.SnapshotError, match="weights or adapters"):
        ask(engine, IDS[0, 30:].tolist(), snapshot=snapshot)
    assert "weights or adapters" in session.ask([5, 6], SAMPLING).error
    with pytest.raises(kvkeep.SnapshotError, match="weights or adapters"):
        engine.session(snapshot=snapshot)
    with pytest.raises(kvkeep.SnapshotError, match="weights or adapters"):
        session.rewind(snapshot)
    model.set_adapter("a")
    assert session.ask([5, 6], SAMPLING).error is None
    assert list(ask(engine, IDS[0, 30:].tolist(), snapshot=snapshot).token_ids) == expected(model)


def test_a_switch_ends_the_requests_that_have_begun_and_no_others():
    model = adapted()
    engine = kvkeep.Engine(model, policy="full", budget=64, rows=1, prefill_chunk=8, prefix_memory=2**24)
    first, second = (
        engine.add(kvkeep.Request(prompt=IDS[0].tolist(), sampling=SAMPLING, ignore_end=True)) for _ in "12"
    )
    engine.step()
    model.set_adapter("b")
    results = {}
    while engine.busy:
        results |= {event.id: event.result for event in engine.step() if event.result}
    assert results[first].finish_reason == "error"
    assert "adapters were switched" in results[first].error
    assert list(results[second].token_ids) == expected(model)


def test_a_cache_is_refused_after_a_switch():
    model = adapted()
    cache = kvkeep.BoundedCache(model.config, "full", budget=64)
    model(IDS[:, :20], past_key_values=cache)
    model.set_adapter("b")
    with pytest.raises(kvkeep.SnapshotError, match="adapters were switched"):
        model(IDS[:, 20:21], past_key_values=cache)
    with pytest.raises(kvkeep.SnapshotError, match="adapters were switched"):
        cache.snapshot(tokens=IDS[0, :20])
    model.set_adapter("a")
    snapshot = cache.snapshot(tokens=IDS[0, :20])
    model.set_adapter("b")
    with pytest.raises(kvkeep.SnapshotError, match="weights or adapters"):
        cache.restore(0, snapshot)
    cache.reset()
    model(IDS, past_key_values=cache)
    restored = kvkeep.BoundedCache.from_snapshots(model.config, [snapshot])
    with pytest.raises(kvkeep.SnapshotError, match="was made with the weights"):
        model(IDS[:, 20:], past_key_values=restored)


def test_an_adapter_for_each_row_is_refused():
    model, ids = adapted(), IDS.expand(2, -1)
    cache = kvkeep.BoundedCache(model.config, "full", budget=64)
    with pytest.raises(kvkeep.UnsupportedOperationError, match="adapters of their own"):
        model.generate(input_ids=ids, past_key_values=cache, max_new_tokens=2, adapter_names=["a", "b"])


def test_adapters_that_choose_their_weights_by_the_prompt_are_refused():
    model = peft.get_peft_model(build("llama"), lora(alora_invocation_tokens=[5, 6]))
    with pytest.raises(kvkeep.UnsupportedModelError, match="aLoRA"):
        kvkeep.Engine(model)
