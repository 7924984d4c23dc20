import json
import random
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep.errors import ModelFileError
from kvkeep.models import tiny
from kvkeep.models.tiny import recall
from kvkeep.models.tiny.recall import HELD_OUT, SENTENCES, Question, draw_facts, own_filler, question

FOLDER = Path(tiny.__file__).parent

KINDS = [kind.name for kind in HELD_OUT.kinds]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(tiny.path()).eval()


def test_folder_is_small_and_complete():
    files = {f.name: f.stat().st_size for f in tiny.path().iterdir() if f.is_file()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md"} <= set(files)
    assert sum(files.values()) < 25e6


def test_corrupted_weights_are_refused(tmp_path):
    weights = tmp_path / tiny.WEIGHTS
    good = (tiny.path() / tiny.WEIGHTS).read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    expected = (tiny.path() / tiny.CHECKSUM).read_text().split()[0]
    with pytest.raises(ModelFileError, match=r"corrupted.*install kvkeep again"):
        tiny.check(weights, expected)


def test_missing_weights_are_refused(tmp_path):
    with pytest.raises(ModelFileError, match="missing"):
        tiny.check(tmp_path / tiny.WEIGHTS, "0")


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_a_missing_checksum_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setattr(tiny, "__file__", str(tmp_path / "__init__.py"))
    if text is not None:
        (tmp_path / tiny.CHECKSUM).write_text(text)
    with pytest.raises(ModelFileError, match=r"missing or empty.*install kvkeep again"):
        tiny.path()


def test_architecture():
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_attention_heads"] >= 2 * config["num_key_value_heads"]
    assert config["max_position_embeddings"] >= 2048
    assert config["vocab_size"] == 4096
    assert config["tie_word_embeddings"]
    assert config["dtype"] == "bfloat16"
    assert config["hidden_act"] == "silu"  # SwiGLU; RoPE and RMSNorm are what the class has
    assert config["rope_parameters"]["rope_theta"] == 100_000
    assert config["pad_token_id"] not in (None, config["eos_token_id"], config["bos_token_id"])


def test_weights_are_bfloat16():
    with safe_open(FOLDER / tiny.WEIGHTS, "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118  no mapping


def test_parameters(model):
    assert 5e6 <= sum(p.numel() for p in model.parameters()) <= 12e6


def test_digits_are_single_tokens(tokenizer):
    assert len(tokenizer(" 4821").input_ids) == 4


def test_chat_template(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes."}], tokenize=False
    )
    assert text == "<|begin|><|user|> Hello.<|end|><|assistant|> Yes.<|end|>"


def test_text_survives_the_tokenizer(tokenizer):
    text = 'He said: "It\'s 1 of 12 naïve – tests…"\n\tYes.'
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.long
def test_answers_briefly_and_stops(model, tokenizer):
    stopped = 0
    for seed in range(12):
        asked = question(seed, kind=KINDS[seed % 4], depth=seed / 12, n_facts=4, tokens=120)
        ids = tokenizer.apply_chat_template(
            asked.messages(), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**ids, max_new_tokens=10)
        stopped += tokenizer.eos_token_id in out[0, ids["input_ids"].shape[1] :].tolist()
    assert stopped >= 10


@pytest.mark.slow
def test_finds_facts_far_back(model, tokenizer):
    """Colours, places and numbers, as far back as 900 tokens; the card has the figures of all kinds."""
    right = 0
    for seed in range(12):
        asked = question(seed, kind=("colour", "place", "number")[seed % 3], depth=seed / 12, n_facts=8, tokens=900)
        ids = tokenizer.apply_chat_template(
            asked.messages(), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**ids, max_new_tokens=8)[0, ids["input_ids"].shape[1] :]
        right += asked.right(tokenizer.decode(out, skip_special_tokens=True))
    assert right >= 9


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_question(kind):
    assert question(3, kind=kind) == question(3, kind=kind)
    assert question(3, kind=kind) != question(4, kind=kind)


@pytest.mark.parametrize("depth", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_fact_stands_where_it_should(kind, depth):
    asked = question(5, kind=kind, depth=depth, tokens=1500)
    assert abs(asked.depth - depth) < 0.06
    assert asked.answer in asked.prompt
    assert asked.answer in asked.choices
    assert 1400 < 1.45 * len(asked.prompt.split()) <= 1510


def test_keys_are_distinct_and_shared():
    facts = draw_facts(HELD_OUT, random.Random(1), 16, KINDS)
    assert len({(f.kind.name, f.owner, f.thing) for f in facts}) == 16
    assert len({f.owner for f in facts}) < 16
    assert len({f.thing for f in facts}) < 16


def test_a_corrected_fact_is_said_twice_and_the_last_counts():
    asked = question(9, kind="place", depth=0.8, corrected=True)
    target = asked.facts[-1]
    about = [s for s in asked.prompt.split(". ") if target.owner in s and target.thing in s and " in the " in s]
    assert len(about) == 2
    assert target.value in about[1]
    assert target.value not in about[0]


def test_a_correction_is_never_what_was_said_before():
    rng = random.Random(0)
    facts = draw_facts(HELD_OUT, rng, 16, KINDS)
    assert all(recall._other_value(fact, rng) != fact.value for fact in facts for _ in range(30))


def test_filler_has_no_held_out_names():
    words = {w.strip(".,'") for s in SENTENCES for w in s.split()}
    assert not words & set(HELD_OUT.names)
    taken = [s for s, _ in zip(own_filler(random.Random(0)), range(200), strict=False)]
    assert set(taken[:80]) == set(SENTENCES[:]) or len(SENTENCES) != 80


@pytest.mark.parametrize(("reply", "right"), [(" amber", True), ("Amber.", True), ("amber red", False), ("", False)])
def test_only_the_exact_answer_is_right(reply, right):
    assert Question("", "amber", "colour", 0.5, (), ()).right(reply) is right
