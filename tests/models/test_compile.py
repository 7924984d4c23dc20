"""Compiled layers: which, how often, the same tokens, and what happens where something cannot be compiled."""

import os
import shutil
import sys
from collections import Counter

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list as programs_of
from transformers import AutoModelForCausalLM, BloomConfig, Gemma2Config, GPT2Config, LlamaConfig, OPTConfig
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli import generate_batch_workers
from kvkeep.cli.main import app
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.models.compile import compile_layers
from kvkeep.models.packed_weights import PackedLinear, pack_weights
from kvkeep.models.prepare import prepare

NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **NO_ENDS}
GROUPED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 48}
CONFIGS = {
    "llama": LlamaConfig(**GROUPED),
    "gemma2": Gemma2Config(**GROUPED, head_dim=8, sliding_window=10),
    "gpt2": GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=128, **NO_ENDS),
    "opt": OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32),
}
CXX = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
torchs_own_warnings = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model(name="llama"):
    """Random weights whose logits are far apart, so that rounding decides nothing."""
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    for parameter in made.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(8)
    prepare(made, fused=False)  # fused modules are not compiled
    return kvkeep.attach(made)


def said(caplog):
    """Lines of kvkeep's own log."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("kvkeep")]


def tokens(made, **options):
    asked = [
        Request(prompt=[(7 * i + 3 * j) % 61 for j in range(1 + 8 * i)], sampling=SamplingParams(max_new_tokens=4 + i))
        for i in range(3)
    ]
    found = Engine(made, policy="h2o", budget=9, rows=3, prefill_chunk=8, **options).generate(asked)
    assert len({result.token_ids for result in found}) == len(asked)
    return [result.token_ids for result in found]


class Watched:
    """A backend that compiles nothing and notes which programs are made, and which run."""

    def __init__(self):
        self.made, self.ran = 0, Counter()

    def __call__(self, graph, inputs):
        self.made += 1

        def run(*arguments):
            self.ran.update({tuple(x.shape) for x in arguments if isinstance(x, torch.Tensor) and x.ndim == 3})
            return graph(*arguments)

        return run


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama", ["input_layernorm", "mlp", "post_attention_layernorm"]),
        (
            "gemma2",
            [
                "input_layernorm",
                "mlp",
                "post_attention_layernorm",
                "post_feedforward_layernorm",
                "pre_feedforward_layernorm",
            ],
        ),
        ("gpt2", ["mlp"]),
        ("opt", []),
    ],
)
def test_norms_and_feed_forward_layers_are_compiled_and_nothing_else(name, kinds, caplog):
    made = model(name)
    count = compile_layers(made, backend="eager")
    found = [place for place, module in made.named_modules() if module._compiled_call_impl is not None]
    assert count == len(found) == 2 * len(kinds)
    assert sorted({place.rpartition(".")[2] for place in found}) == kinds
    assert not [place for place in found if "attn" in place]
    assert said(caplog) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "graphs"), [("llama", False), ("gemma2", True), ("gpt2", False)])
def test_tokens_are_those_of_the_plain_model(name, graphs):
    made, backend = model(name), Watched()
    plain = tokens(made, graphs=graphs)
    assert compile_layers(made, backend=backend)
    backend.ran.clear()
    assert tokens(made, graphs=graphs) == plain
    assert len(backend.ran) > 2


@pytest.mark.slow
def test_a_recorded_step_runs_what_was_compiled_for_every_number_of_rows():
    made, backend = model(), Watched()
    compile_layers(made, backend=backend)
    backend.ran.clear()
    engine = Engine(made, policy="h2o", budget=12, rows=7, prefill_chunk=6, graphs=True)
    engine.generate([Request(prompt=[i], sampling=SamplingParams(max_new_tokens=3 + 3 * i)) for i in range(7)])
    assert {size for _, size in engine._runner.graphs._steps} == {1, 2, 4, 6, 7}
    assert {(size, 1, 32) for size in (1, 2, 4, 6, 7)} <= set(backend.ran)
    assert engine._runner.graphs.refused == {}


@pytest.mark.slow
def test_programs_do_not_grow_with_the_numbers_of_rows_and_tokens():
    made, backend = model(), Watched()
    layer = made.model.layers[0]
    compile_layers(made, backend=backend)
    kinds = [type(layer.mlp).forward.__code__, type(layer.input_layernorm).forward.__code__]
    assert [len(programs_of(code)) for code in kinds] == [1, 1]
    with torch.inference_mode():
        for rows, length in [(1, 1), (2, 1), (3, 1), (8, 1), (1, 7), (1, 5), (3, 7), (4, 6), (32, 1), (2, 33)]:
            for layer in made.model.layers:
                layer.mlp(layer.input_layernorm(torch.ones(rows, length, 32)))
    assert [len(programs_of(code)) for code in kinds] == [4, 4]
    tokens(made)
    tokens(made, graphs=True)
    assert backend.made == 2 * 4


def test_what_cannot_be_compiled_stays_plain_and_one_line_says_why(caplog):
    def missing(graph, inputs):
        raise RuntimeError("there is no compiler.\nInstall one.")

    made = model()
    plain = tokens(made)
    assert compile_layers(made, backend=missing) == 0
    assert tokens(made) == plain
    (line,) = said(caplog)
    assert "LlamaMLP, LlamaRMSNorm: " in line
    assert "there is no compiler. Install one)" in line
    assert "\n" not in line


@pytest.mark.slow
@torchs_own_warnings
def test_without_a_compiler_for_the_cpu(caplog):
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert compile_layers(model("gpt2")) == 0
    (line,) = said(caplog)
    assert "no-such-compiler" in line


def test_a_kind_that_takes_more_than_vectors_stays_plain(caplog):
    made = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4, **NO_ENDS))
    assert compile_layers(made, backend="eager") == 0
    (line,) = said(caplog)
    assert "BloomMLP: TypeError" in line


def test_a_kind_that_cannot_be_compiled_as_a_whole_stays_plain(caplog, monkeypatch):
    made = model()
    kind = type(made.model.layers[0].mlp)
    forward = kind.forward

    def breaking(self, x):
        torch._dynamo.graph_break()
        return forward(self, x)

    monkeypatch.setattr(kind, "forward", breaking)
    assert compile_layers(made, backend="eager") == 2 * 2
    (line,) = said(caplog)
    assert "LlamaMLP: Unsupported" in line


@pytest.mark.parametrize("answer", [lambda x: (x, x), lambda x: x[..., :1]], ids=["a pair", "another width"])
def test_a_kind_that_makes_no_vector_of_a_vector_stays_plain(caplog, monkeypatch, answer):
    made = model()
    kind = type(made.model.layers[0].mlp)
    monkeypatch.setattr(kind, "forward", lambda self, x: answer(x))
    assert compile_layers(made, backend="eager") == 2 * 2
    (line,) = said(caplog)
    assert "LlamaMLP: it does not turn one vector per token into another" in line


def test_layers_with_hooks_stay_plain():
    made = model()
    first, second = made.model.layers
    first.mlp.up_proj.register_forward_hook(lambda *_: None)
    second.input_layernorm.forward = second.input_layernorm.forward
    assert compile_layers(made, backend="eager") == 2 * 3 - 2
    assert first.mlp._compiled_call_impl is None
    assert second.input_layernorm._compiled_call_impl is None


@pytest.mark.slow
@needs_onednn
def test_packed_layers_stay_plain_and_compiled_ones_are_not_packed(caplog):
    made, other = model(), model()
    plain = tokens(made)
    assert pack_weights(made) == 2 * 7 + 1
    assert compile_layers(made, backend="eager") == 2 * 2
    assert made.model.layers[0].mlp._compiled_call_impl is None
    assert said(caplog) == []
    assert tokens(made) == plain
    assert compile_layers(other, backend="eager") == 2 * 3
    assert pack_weights(other) == 2 * 4 + 1
    assert not any(isinstance(part, PackedLinear) for part in other.model.layers[0].mlp.modules())
    assert tokens(other) == plain


@pytest.mark.slow
@torchs_own_warnings
@pytest.mark.skipif(shutil.which(CXX) is None, reason=f"inductor needs {CXX}")
def test_inductor_computes_what_torch_computes():
    made = model("gpt2")
    layer = made.transformer.h[1].mlp
    with torch.inference_mode(), torch._inductor.config.patch({"cpp.simdlen": 1}):  # no search for instructions
        x = torch.randn(5, 1, 32, generator=torch.Generator().manual_seed(1))
        plain = layer(x)
        assert compile_layers(made) == 2
        found = layer(x)
    assert len(programs_of(type(layer).forward.__code__)) == 1
    torch.testing.assert_close(found, plain)


@pytest.mark.slow
def test_a_batch_job_compiles_when_it_is_asked_to(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(generate_batch_workers, "compile_layers", lambda made: asked.append(made) or 9)
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "Once upon a time", "options": {"max_new_tokens": 2}}\n')

    def run(*options):
        return CliRunner().invoke(app, ["generate", *map(str, options)])

    for number, (options, calls) in enumerate([((), 0), (("--compile",), 1)]):
        asked.clear()
        result = run("--input", source, "--output", tmp_path / f"{number}.jsonl", "--budget", 16, *options)
        assert result.exit_code == 0, result.output
        assert len(asked) == calls
        assert ("9 layers compiled" in result.stderr) == bool(calls)
    result = run("--prompt", "Once", "--compile")
    assert result.exit_code == 2
    assert "--compile" in result.stderr
    assert "--input" in result.stderr
