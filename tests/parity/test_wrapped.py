"""Models as people wrap them: adapters of PEFT, ``torch.compile``, outputs that transformers offers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import build, padded_batch

import kvkeep

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers in an old way

NEW = 8


def adapted(config=None):
    """A small model with an adapter whose weights are not zero."""
    config = config or peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("llama"), config).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


def greedy(model, ids, **more):
    return model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False, **more)[:, ids.shape[1] :]


def test_an_adapted_model_is_attached_and_computes_what_it_did():
    model, (ids, _) = adapted(), padded_batch(rows=1)
    want = greedy(model, ids)
    assert kvkeep.attach(model) is model
    with model.disable_adapter():
        without = greedy(model, ids, past_key_values=kvkeep.BoundedCache(model.config, budget=64))
    assert torch.equal(greedy(model, ids, past_key_values=kvkeep.BoundedCache(model.config, budget=64)), want)
    assert not torch.equal(want, without)


def test_the_engine_runs_the_adapter():
    model, (ids, _) = adapted(), padded_batch(rows=1)
    want = greedy(kvkeep.attach(model), ids, past_key_values=kvkeep.BoundedCache(model.config, budget=9))
    request = kvkeep.Request(prompt=tuple(ids[0].tolist()), sampling=kvkeep.SamplingParams(max_new_tokens=NEW))
    engine = kvkeep.Engine(model, budget=9, rows=1, prefill_chunk=None)
    assert list(engine.generate([request])[0].token_ids) == want[0].tolist()


@pytest.mark.parametrize("make", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_a_learned_prompt_is_refused(make):
    model = peft.get_peft_model(build("llama"), make(task_type="CAUSAL_LM", num_virtual_tokens=3))
    for use in (kvkeep.attach, kvkeep.Engine):
        with pytest.raises(kvkeep.UnsupportedModelError, match="learned a prompt or a prefix"):
            use(model)


def test_what_is_no_model_is_refused(no_checked_annotations):
    with pytest.raises(kvkeep.InputError, match="A Linear is no model of transformers"):
        kvkeep.attach(torch.nn.Linear(2, 2))


def test_a_wrapper_that_is_not_known_is_refused_with_the_model_inside(no_checked_annotations):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrappers = {"module": torch.nn.DataParallel(build("llama"))}
    wrappers["base_model.model"] = peft.PeftMixedModel(build("llama"), config, "default")
    for inside, wrapper in wrappers.items():
        with pytest.raises(kvkeep.InputError, match=f"but holds one: give its part `{inside}`"):
            kvkeep.attach(wrapper)
        kvkeep.attach(wrapper.get_submodule(inside))


def test_an_engine_needs_a_model_with_logits():
    with pytest.raises(kvkeep.InputError, match="LlamaModel computes no logits"):
        kvkeep.Engine(build("llama").model)


COMPILED = """
import torch
import kvkeep
from models import build, padded_batch

how, (ids, _) = HOW, padded_batch(rows=1)
plain = kvkeep.attach(build("llama"))
cache = kvkeep.BoundedCache(plain.config, budget=10)
want = plain.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
model = build("llama")
if how == "forward":
    kvkeep.attach(model)
    model.forward = torch.compile(model.forward, backend="eager")
elif how == "module":
    model = kvkeep.attach(torch.compile(model, backend="eager"))
else:
    kvkeep.attach(model).compile(backend="eager")
cache = kvkeep.BoundedCache(model.config, budget=10)
assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False), want)
engine = kvkeep.Engine(model, budget=10, rows=1, prefill_chunk=None)
request = kvkeep.Request(prompt=tuple(ids[0].tolist()), sampling=kvkeep.SamplingParams(max_new_tokens=6))
assert list(engine.generate([request])[0].token_ids) == want[0, ids.shape[1]:].tolist()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["forward", "module", "in place"])
def test_compiled_models_generate_the_same(how):
    # in a process of its own: the compiler does not follow the type checks of the tests
    code, folder = COMPILED.replace("HOW", repr(how)), Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("where", ["call", "generate", "config"])
def test_attention_matrices_are_refused_rather_than_left_empty(where):
    model, (ids, _) = kvkeep.attach(build("llama")), padded_batch(rows=1)
    given = {"input_ids": ids, "past_key_values": kvkeep.BoundedCache(model.config, budget=64)}
    run = model.generate if where == "generate" else model
    if where == "config":
        model.config._output_attentions = True  # what a folder's config.json sets; the property refuses it by itself
    else:
        given["output_attentions"] = True
    if where == "generate":
        given |= {"max_new_tokens": 2, "return_dict_in_generate": True}
    with pytest.raises(kvkeep.UnsupportedModelError, match="output_attentions=True asks for a matrix"):
        run(**given)
