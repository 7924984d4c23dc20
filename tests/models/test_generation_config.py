"""What a model's generation config asks for: kvkeep's options rule, and what is left out is named."""

import json
from pathlib import Path

import model_folders
import pytest
import torch
from sweeps import sweep
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli.main import app
from kvkeep.models.generation_config import KEPT, OWN, SAME_TEXT, BannedTokens
from kvkeep.models.load import quiet

PROMPT = "the quick brown fox"

NAMED = {
    "constraints": [{"token_ids": [3]}],
    "diversity_penalty": 0.5,
    "dola_layers": "high",
    "early_stopping": True,
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "exponential_decay_length_penalty": [2, 1.5],
    "force_words_ids": [[3]],
    "forced_bos_token_id": 4,
    "forced_eos_token_id": 4,
    "guidance_scale": 1.5,
    "length_penalty": 2.0,
    "max_time": 1e-9,
    "min_length": 50,
    "min_new_tokens": 50,
    "no_repeat_ngram_size": 1,
    "num_beam_groups": 2,
    "num_beams": 4,
    "penalty_alpha": 0.6,
    "remove_invalid_values": True,
    "sequence_bias": [[[5], 10.0]],
    "stop_strings": ["e", "a"],
    "token_healing": True,
    "top_h": 0.4,
    "typical_p": 0.5,
    "watermarking_config": {"greenlist_ratio": 0.5, "bias": 9.0},
}
NO_MATTER = {
    "assistant_confidence_threshold": 0.9,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "assistant_lookbehind": 5,
    "cache_config": {"backend": "quanto"},
    "cache_implementation": "hybrid",
    "disable_compile": True,
    "is_assistant": True,
    "low_memory": True,
    "max_cache_len": 3,
    "max_matching_ngram_size": 2,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "output_attentions": True,
    "output_hidden_states": True,
    "output_logits": True,
    "output_scores": True,
    "prefill_chunk_size": 1,
    "prompt_lookup_num_tokens": 3,
    "renormalize_logits": True,
    "return_dict_in_generate": True,
    "speculation_type": "mtp",
    "target_lookbehind": 5,
    "use_cache": False,
    "use_mtp": True,
}
REFUSED = {"compile_config": {"mode": "default"}, "continuous_batching_config": {}, "num_return_sequences": 3}
"""By transformers itself, whose own ``generate`` has no use for them."""
SILENT = {
    "do_sample": True,
    "max_length": 3,
    "max_new_tokens": 1,
    "min_p": 0.9,
    "repetition_penalty": 9.0,
    "temperature": 9.0,
    "top_k": 3,
    "top_p": 0.1,
}


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def generate(folder: Path):
    return CliRunner().invoke(app, ["generate", str(folder), "-p", PROMPT, "-n", "4", "--json"])


def asking(target: Path, **wishes: object) -> Path:
    folder = model_folders.copy(target)
    model_folders.edit_json(folder / "generation_config.json", **wishes)
    return folder


@pytest.fixture(scope="module")
def plain() -> list[int]:
    with model_folders.one_thread():
        return json.loads(generate(model_folders.folder()).stdout)["token_ids"]


EVERY = {**NAMED, **NO_MATTER, **SILENT}
KNOWN = set(GenerationConfig().to_dict())
"""What this transformers knows; the rest of a file it does not read."""


@pytest.mark.long
@pytest.mark.parametrize("name", sweep(EVERY, lambda name: name in NAMED or len(name) % 2))
def test_no_wish_of_the_makers_changes_the_text_or_ends_it(name: str, tmp_path: Path, plain: list[int]):
    result = generate(asking(tmp_path / "m", **{name: EVERY[name]}))
    assert result.exit_code == 0, result.output or result.exception
    assert json.loads(result.stdout)["token_ids"] == plain
    said = " ".join(result.stderr.split())
    assert (f"also asks for {name}=" in said) == (name in KNOWN and name not in SILENT)
    assert ("the text may differ" in said) == (name in KNOWN and name in NAMED)
    assert ("it changes no text" in said) == (name in KNOWN and name in NO_MATTER)


def test_every_wish_that_transformers_knows_has_been_decided_on():
    known = {name for name in GenerationConfig().to_dict() if not name.startswith("_")} - {"transformers_version"}
    assert set(NO_MATTER) == SAME_TEXT - set(REFUSED)
    assert set(SILENT) == set(OWN)
    assert known - OWN - KEPT - SAME_TEXT - {"decoder_start_token_id"} == set(NAMED) | {"num_return_sequences"}


@pytest.mark.parametrize("name", REFUSED)
def test_wishes_that_transformers_refuses_end_in_one_line(name: str, tmp_path: Path):
    if name == "continuous_batching_config" and "speculation_type" not in KNOWN:
        pytest.skip("older transformers take it")
    result = generate(asking(tmp_path / "m", **{name: REFUSED[name]}))
    assert result.exit_code == 2, result.output or result.exception
    assert result.stderr.count("\n") == 1
    assert "generation_config.json cannot be used" in result.stderr


def test_wishes_are_named_together_in_one_line(tmp_path: Path):
    result = generate(asking(tmp_path / "m", cache_implementation="static", num_beams=4, stop_strings=["x" * 999]))
    said = " ".join(result.stderr.split())
    assert said.startswith("note: the model's generation_config.json also asks for num_beams=4, stop_strings=['xxx")
    assert "makers intend (cache_implementation='static' changes no text)." in said
    assert len(said) < 400


@pytest.mark.slow
@pytest.mark.parametrize("wishes", [{"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0}, {"pad_token_id": 3}])
def test_what_is_transformers_default_is_no_wish(wishes: dict[str, object], tmp_path: Path):
    assert "asks for" not in generate(asking(tmp_path / "m", **wishes)).stderr


def test_ends_are_the_makers(tmp_path: Path, plain: list[int]):
    result = json.loads(generate(asking(tmp_path / "m", eos_token_id=[299, plain[1]])).stdout)
    assert result["token_ids"] == plain[:2]
    assert result["finish_reason"] == "stop"


def transformers_text(folder: Path) -> list[int]:
    """What transformers itself generates with the folder's generation config."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    return model.generate(ids, do_sample=False, max_new_tokens=4)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "a longer word", "all"])
def test_tokens_that_the_makers_ban_are_not_generated(name: str, tmp_path: Path, plain: list[int]):
    wishes: dict[str, dict[str, object]] = {
        "suppress_tokens": {"suppress_tokens": [plain[0], 10**6, -1]},
        "begin_suppress_tokens": {"begin_suppress_tokens": plain[:1]},
        "bad_words_ids": {"bad_words_ids": [[plain[1]], [7]]},
        "a longer word": {"bad_words_ids": [plain[:3], plain[1:2] + plain[:1], [299] * 300]},
    }
    wishes["all"] = {key: value for wish in wishes.values() for key, value in wish.items()}
    folder = asking(tmp_path / "m", **wishes[name])
    result = generate(folder)
    found = json.loads(result.stdout)["token_ids"]
    assert found != plain
    assert "asks for" not in result.stderr
    if name in {"begin_suppress_tokens", "bad_words_ids"}:  # transformers refuses ids beyond the vocabulary
        assert found == transformers_text(folder)


@pytest.mark.slow
def test_a_banned_end_token_ends_as_transformers_does(tmp_path: Path, plain: list[int]):
    """A bad word that is an end token may still end the text; a suppressed one may not."""
    word = asking(tmp_path / "word", eos_token_id=plain[1], bad_words_ids=[[plain[1]]])
    suppressed = asking(tmp_path / "suppressed", eos_token_id=plain[1], suppress_tokens=[plain[1]])
    assert json.loads(generate(word).stdout)["token_ids"] == plain[:2] == transformers_text(word)
    assert json.loads(generate(suppressed).stdout)["token_ids"] == transformers_text(suppressed) != plain[:2]


@pytest.mark.slow
def test_the_form_of_an_answer_goes_before_banned_tokens():
    model, tokenizer = kvkeep.load(model_folders.folder())
    model.generation_config.suppress_tokens = tokenizer.convert_tokens_to_ids(["a", "c"])
    engine = kvkeep.Engine(model, tokenizer, budget=64, rows=1)
    texts = []
    for choice in (["a", "b"], ["a"]):
        request = kvkeep.Request(prompt=PROMPT, raw=True, structured_outputs={"choice": choice})
        texts += engine.generate([request])
    assert [result.text for result in texts] == ["b", "a"], texts


@pytest.mark.parametrize(
    "wishes",
    [
        {"suppress_tokens": "x"},
        {"suppress_tokens": ["1"]},
        {"begin_suppress_tokens": [True]},
        {"suppress_tokens": [10**30]},
        {"bad_words_ids": [5]},
        {"bad_words_ids": [[]]},
        {"bad_words_ids": {"5": 1}},
    ],
    ids=str,
)
def test_banned_tokens_that_are_none_are_refused(wishes: dict[str, object], tmp_path: Path):
    result = generate(asking(tmp_path / "m", **wishes))
    assert result.exit_code == 2, result.output or result.exception
    assert f"generation_config.json cannot be used ({next(iter(wishes))} " in " ".join(result.stderr.split())
    assert result.stderr.count("\n") == 1


def test_a_ban_of_all_tokens_is_refused(tmp_path: Path):
    result = generate(asking(tmp_path / "m", suppress_tokens=list(range(150)), begin_suppress_tokens=list(range(300))))
    assert result.exit_code == 2, result.output or result.exception
    assert "ban all 296 tokens of the model" in " ".join(result.stderr.split())


def test_a_model_configuration_of_old_with_options_of_sampling(tmp_path: Path, plain: list[int]):
    """Before there were generation configs, such options stood in config.json."""
    folder = model_folders.copy(tmp_path / "m", "generation_config.json")
    model_folders.edit_json(folder / "config.json", temperature=9.0, do_sample=True, num_beams=3, typical_p=0.3)
    result = generate(folder)
    assert result.exit_code == 0, result.output or result.exception
    assert json.loads(result.stdout)["token_ids"] == plain


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("options", [[], ["-t", "1"], ["--compare"]], ids=["greedy", "drawn", "compared"])
def test_logits_that_are_no_numbers_are_an_error(bad: float, options: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVKEEP_FUSED", "0")  # the kernel does not ask torch
    honest = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: honest(self, x) * 0 + bad)
    arguments = ["generate", str(model_folders.folder()), "-p", PROMPT, "-n", "4", *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output or result.exception
    assert "error: The text ends after 0 new tokens, since a step failed. The model's logits are NaN" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_generation_config_that_cannot_be_used_is_refused_before_weights_are_read(tmp_path: Path):
    folder = asking(tmp_path / "m", eos_token_id="</s>")
    (folder / "model.safetensors").write_bytes(b"")
    with quiet():
        result = generate(folder)
    assert result.exit_code == 2
    assert "generation_config.json cannot be used (eos_token_id is ['</s>'])" in " ".join(result.stderr.split())


def test_bad_words_that_are_no_lists_of_tokens_are_refused():
    def banned(words):
        return BannedTokens.of(GenerationConfig(eos_token_id=1, bad_words_ids=words))

    config = GenerationConfig(eos_token_id=1)
    config.bad_words_ids = "ab"
    with pytest.raises(kvkeep.InputError, match=r"bad_words_ids is 'ab'\. Give a list of lists of token ids"):
        BannedTokens.of(config)
    config.bad_words_ids = [[3], []]
    with pytest.raises(kvkeep.InputError, match="bad_words_ids has a word without tokens"):
        BannedTokens.of(config)
    assert banned([[3], [5, 4], [1], [4, 5]]) == BannedTokens(frozenset({3}), frozenset(), ((4, 5), (5, 4)))
