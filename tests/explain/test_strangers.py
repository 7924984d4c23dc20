"""Models, texts and callers that nobody thought of: the record is made, or the reason is told in a sentence."""

import threading
from dataclasses import dataclass

import pytest
import torch
import transformers

import kvkeep
from explain.records import shown
from kvkeep import option
from kvkeep.errors import InputError
from kvkeep.policies.base import Policy

TEXT = "The lantern by the gate was crimson. The meadow was quiet. " * 6
SHORT = {"policies": ["h2o", "local"], "budget": 24, "max_new_tokens": 2, "prefill_chunk": 16}


@pytest.fixture(scope="module")
def tokenizer():
    return kvkeep.load()[1]


@pytest.fixture
def made(tokenizer):
    """Makes a tiny model of random weights."""

    def make(kind, config, *, layers=2, heads=4, **options):
        torch.manual_seed(0)
        sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
        sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 2}
        return getattr(transformers, kind)(getattr(transformers, config)(**sizes, **options))

    return make


@pytest.mark.parametrize(
    ("kind", "config", "options"),
    [
        ("Qwen2ForCausalLM", "Qwen2Config", {"heads": 14}),
        ("MistralForCausalLM", "MistralConfig", {"sliding_window": 20}),
        ("Gemma2ForCausalLM", "Gemma2Config", {"sliding_window": 20, "attn_logit_softcapping": 5.0}),
        ("Gemma3ForCausalLM", "Gemma3TextConfig", {"sliding_window": 20, "layers": 6}),
        (
            "GptOssForCausalLM",
            "GptOssConfig",
            {"sliding_window": 20, "num_local_experts": 2, "num_experts_per_tok": 1},
        ),
    ],
    ids=["seven-queries-a-key", "windows", "windows-and-caps", "windows-of-most-layers", "sinks"],
)
def test_families_of_models(made, tokenizer, kind, config, options):
    found = kvkeep.explain(made(kind, config, **options), TEXT, tokenizer=tokenizer, **SHORT)
    for run in found.runs:
        assert run.ledger.total[:, : run.ledger.read].isfinite().all()
        assert ((run.missed.lost >= 0) & (run.missed.lost < 1.0001)).all()
        assert run.ledger.rows[0].sum() == pytest.approx(1, abs=0.2)


@pytest.mark.long
def test_a_model_is_left_in_its_mode_with_its_attention_and_hooks(made, tokenizer):
    model = made("Qwen2ForCausalLM", "Qwen2Config").to(torch.bfloat16).train()
    model.model.layers[0].eval()

    def state():
        hooks = [list(part._forward_hooks) + list(part._forward_pre_hooks) for part in model.modules()]
        return hooks, [part.training for part in model.modules()], model.config._attn_implementation

    before = state()
    first = kvkeep.explain(model, TEXT, tokenizer=tokenizer, **SHORT)
    assert state() == before
    assert kvkeep.explain(model, TEXT, tokenizer=tokenizer, **SHORT).to_json() == first.to_json()
    with pytest.raises(InputError):
        kvkeep.explain(model, "a", tokenizer=tokenizer, raw=True)
    assert state() == before
    kvkeep.attach(model)
    attached = state()
    kvkeep.explain(model, TEXT, tokenizer=tokenizer, **SHORT)
    assert state() == attached


@pytest.mark.slow
def test_threads_with_one_model(made, tokenizer):
    model, found = made("Qwen2ForCausalLM", "Qwen2Config"), []

    def run():
        found.append(kvkeep.explain(model, TEXT, tokenizer=tokenizer, **SHORT).to_json())

    threads = [threading.Thread(target=run) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 3
    assert len(set(found)) == 1


@dataclass(frozen=True, kw_only=True)
class Hostile(Policy):
    """</script><script>window.broken = 1</script>"""

    mode: str = option("x", "</script>'\"&")

    def score(self, view, state):
        return view.positions.float()


def test_a_policy_whose_name_holds_a_script(made, tokenizer):
    policy = Hostile(mode="'\"</script><!--")
    model = made("Qwen2ForCausalLM", "Qwen2Config")
    page = kvkeep.explain(model, TEXT, tokenizer=tokenizer, **SHORT | {"policies": [policy]}).to_html()
    assert page.count("</script>") == 2
    assert shown(page)["runs"][0]["policy"] == str(policy)


@pytest.mark.usefixtures("no_checked_annotations")
def test_what_is_no_model(tokenizer):
    with pytest.raises(InputError, match="no model of transformers"):
        kvkeep.explain(torch.nn.Linear(1, 1), TEXT, tokenizer=tokenizer)


@pytest.mark.parametrize("text", ["a\r\nb\r\n" * 9, "\x01\x1b[31m\x7f" * 9, "👩‍👩‍👧 שלום" * 5, "</script>" * 9])
def test_texts_of_every_kind(made, tokenizer, text):
    model = made("Qwen2ForCausalLM", "Qwen2Config")
    found = kvkeep.explain(model, text, tokenizer=tokenizer, **SHORT)
    assert text in "".join(shown(found.to_html())["tokens"])


@pytest.mark.slow
def test_a_callback_may_explain_something_itself(tokenizer, made):
    model = made("LlamaForCausalLM", "LlamaConfig")
    inner = []

    def progress(share):
        if not inner:
            inner.append(kvkeep.explain(model, TEXT, tokenizer=tokenizer, **SHORT))

    outer = kvkeep.explain(model, TEXT, tokenizer=tokenizer, progress=progress, **SHORT)
    assert outer.answer == inner[0].answer
    assert model.config._attn_implementation != "kvkeep"


@pytest.mark.slow
def test_the_share_of_work_grows_to_its_end_as_the_work_does(tokenizer, made):
    """The full cache's pass is the longer, the longer the text: a bar that counted tokens would promise too much."""
    shares = []
    model = made("LlamaForCausalLM", "LlamaConfig")
    kvkeep.explain(model, TEXT * 12, tokenizer=tokenizer, progress=shares.append, **SHORT | {"prefill_chunk": 64})
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    chunks = -(-len(tokenizer(TEXT * 12)["input_ids"]) // 64)
    bounded, full = shares[2 * chunks - 1], shares[2 * chunks :]
    assert bounded < 0.5  # two of three passes
    assert full[-2] - full[-3] > 1.2 * (full[1] - full[0])  # a chunk that sees all costs more than one that sees few
