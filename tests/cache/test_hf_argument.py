"""The cache under the name that a model's forward gives it."""

import warnings
from inspect import signature

import pytest
import torch
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM

import kvkeep
from kvkeep.cache.hf_layers import CACHE_ARGUMENTS, handed, handed_over, taken_as, usual


class Old:
    def forward(self, input_ids, past_key_values=None): ...


class New:
    def forward(self, input_ids, cache=None): ...


class Both:
    def forward(self, input_ids, cache=None, past_key_values=None): ...


class Wrapper:
    def forward(self, *args, **kwargs): ...


class Called:
    def __call__(self, input_ids, cache=None): ...


@pytest.mark.parametrize(
    ("kind", "name"), [(Old, "past_key_values"), (New, "cache"), (Both, "cache"), (Wrapper, None), (Called, "cache")]
)
def test_the_name_is_read_off_forward(kind, name):
    assert taken_as(kind) == name
    assert handed(kind(), "memory") == {name or usual(): "memory"}


def test_the_usual_name_is_transformers():
    assert usual() in signature(GenerationMixin.prepare_inputs_for_generation).parameters


@pytest.mark.parametrize("name", CACHE_ARGUMENTS)
def test_a_cache_is_found_under_either_name(name):
    assert handed_over({"input_ids": 1, name: "memory"}) == "memory"
    assert handed_over({name: None}) is None
    assert handed_over({}) is None


@pytest.mark.parametrize("name", CACHE_ARGUMENTS)
def test_users_may_give_either_name_that_their_transformers_knows(name):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)).eval()
    if name == "cache" and usual() != "cache":
        pytest.skip("this version of transformers knows the older name only")
    kvkeep.attach(model)
    cache = kvkeep.BoundedCache(model.config, "h2o", 6)
    ids = torch.arange(3, 20)[None]
    model.generate(ids, **{name: cache}, max_new_tokens=4, do_sample=False)
    assert (cache.positions(0) >= 0).sum(dim=-1).tolist() == [[6, 6]]


def test_kvkeep_itself_gives_the_name_that_is_not_deprecated():
    model, tokenizer = kvkeep.load()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = kvkeep.Engine(model, tokenizer, policy="h2o", budget=16, rows=2)
        engine.generate("The dog ran to the", kvkeep.SamplingParams(max_new_tokens=3))
        kvkeep.BoundedCache(model.config, "h2o", 16).continue_with(torch.tensor([[3, 4]]))
