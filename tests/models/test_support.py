"""Which models kvkeep can attend for, found before any weight is read or any layer runs."""

import model_folders
import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from kvkeep.errors import InputError, UnsupportedModelError
from kvkeep.head_sharding import Heads
from kvkeep.models.support import auto_class, check_cache, check_split, unwrapped


def empty(family: str = "llama"):
    config = model_folders.config_of(family)
    with torch.device("meta"):
        return auto_class(config).from_config(config)


def test_what_torch_compile_wraps_around_a_model_is_taken_off():
    model = empty()
    compiled = object.__new__(OptimizedModule)  # torch.compile itself imports for seconds
    vars(compiled)["_modules"] = {"_orig_mod": model}
    assert unwrapped(compiled) is model
    with pytest.raises(InputError, match="A Linear is no model of transformers"):
        unwrapped(nn.Linear(2, 2))


def test_a_model_with_a_cache_of_its_own_kind_is_refused():
    model = empty()
    check_cache(model)
    model._supports_default_dynamic_cache = lambda: True
    check_cache(model)
    model._supports_default_dynamic_cache = lambda: False
    with pytest.raises(UnsupportedModelError, match=r"^LlamaForCausalLM works with a cache of its own kind"):
        check_cache(model)


def test_a_model_whose_layers_keep_a_state_is_refused_where_it_is_split(monkeypatch):
    model, other = empty("lfm2"), empty()
    check_split(model)
    monkeypatch.setattr(Heads, "of", classmethod(lambda cls, config: Heads(0, 2, 2)))
    check_split(other)
    with pytest.raises(UnsupportedModelError, match=r"^Lfm2ForCausalLM has layers that keep a state"):
        check_split(model)
