"""The precision of logits: those of a model in half precision are float32, as its last product is added up."""

import copy

import gguf_files
import model_folders
import pytest
import torch
from gguf_files import Q

import kvkeep
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.models.load import load, quiet
from kvkeep.models.prepare import prepare
from kvkeep.models.quantized_weights import is_packable

MOST = 1e-4
"""How far a log-probability may be off. Rounding logits to bfloat16 changes it by some thousandths."""

pytestmark = pytest.mark.skipif(not is_packable(torch.device("cpu")), reason="needs the native kernel")


@pytest.fixture(autouse=True)
def _silent_and_fast():
    with quiet(), model_folders.one_thread():
        yield


def prompt(tokens, seed=0):
    return tuple(torch.randint(2, 250, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist())


class Watched:
    """A model in bfloat16 that keeps what its last layer was given.

    Args:
        model: the model.
    """

    def __init__(self, model):
        prepare(kvkeep.attach(model))
        self.model, self.head = model, model.get_output_embeddings()
        self.hidden = []
        self.head.register_forward_pre_hook(lambda _, args: self.hidden.append(args[0].clone()))

    @torch.inference_mode()
    def check(self, found):
        """Check log-probabilities of tokens against those behind all that was kept, from a product in float32."""
        logits = torch.cat([x.flatten(0, -2) for x in self.hidden]).float() @ self.head.weight.float().dequantize().T
        softcap = getattr(self.model.config, "final_logit_softcapping", None)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        lines = logits.log_softmax(dim=-1)
        off = [float((lines[:, entry.token_id] - entry.value).abs().min()) for entry in found]
        assert max(off) < MOST


def plain(name, _):
    return Watched(copy.deepcopy(gguf_files.model(name)).bfloat16())  # others look at the model in float32


def packed(name, path):
    return Watched(load(gguf_files.write(path / "model.gguf", name, quantized=Q.Q8_0), "bfloat16")[0])


KINDS = [(plain, "llama"), (plain, "llama tied"), (plain, "gemma2"), (packed, "llama"), (packed, "gemma2")]
kinds = pytest.mark.parametrize(("made", "name"), KINDS, ids=lambda part: getattr(part, "__name__", part))


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 3, 20, 40])
@kinds
def test_log_probabilities_are_those_of_a_product_in_float32(made, name, rows, tmp_path):
    watched = made(name, tmp_path)
    engine = Engine(watched.model, budget=64, rows=rows)
    sampling = SamplingParams(max_new_tokens=4)
    prompts = [prompt(9 + row % 5, row) for row in range(rows)]
    asked = [Request(prompt=one, sampling=sampling, logprobs=0, ignore_end=True) for one in prompts]
    for result in engine.generate(asked):
        watched.check(result.logprobs)


@kinds
@pytest.mark.parametrize("tokens", [9, 40])
def test_those_of_prompts_are_too(made, name, tokens, tmp_path):
    watched = made(name, tmp_path)
    asked = Request(prompt=prompt(tokens), sampling=SamplingParams(max_new_tokens=1), prompt_logprobs=0)
    (result,) = Engine(watched.model, budget=64, rows=1).generate(asked)
    assert len(result.prompt_logprobs) == tokens - 1
    watched.check(result.prompt_logprobs)
