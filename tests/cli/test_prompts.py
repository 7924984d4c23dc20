"""``kvkeep generate``: where the prompt comes from, system messages, and a summary that is true."""

from __future__ import annotations

import json
import re
from pathlib import Path

import model_folders
import pytest
import torch
from typer.testing import CliRunner

import kvkeep
from kvkeep.cache.layer_layout import Layout, rule_for_layers
from kvkeep.cli.generate_run import _percent
from kvkeep.cli.main import app
from kvkeep.engine.admission import check_room
from kvkeep.errors import InputError
from kvkeep.models.load import find, load, quiet
from kvkeep.models.message_tokens import system_spans
from kvkeep.models.tokenization import encode_chat

PROMPT = "the quick brown fox jumps over the lazy dog and the cat"
PROMPT_TOKENS = 12
NEW = 5
FED = PROMPT_TOKENS + NEW - 1
"""Tokens that the model reads; the last new one is not among them."""


def generate(*words: object, model: Path | None = None, stdin: bytes | None = None, exit_code: int = 0):
    folder = model_folders.folder() if model is None else model
    with model_folders.one_thread():
        result = CliRunner().invoke(app, ["generate", str(folder), *map(str, words)], input=stdin)
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result


def chat_model(folder: Path, template: str = model_folders.TEMPLATE) -> Path:
    model_folders.copy(folder)
    model_folders.edit_json(folder / "tokenizer_config.json", chat_template=template)
    return folder


# system messages


def test_a_system_message_stands_before_the_prompt(tmp_path: Path):
    folder = chat_model(tmp_path / "chat")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    found = json.loads(generate("-p", "hello", "--system", "be brief", "-n", 3, "--json", model=folder).stdout)
    assert found["prompt_tokens"] == encode_chat(find(folder), messages).shape[1]
    plain = json.loads(generate("-p", "hello", "-n", 3, "--json", model=folder).stdout)
    assert found["prompt_tokens"] > plain["prompt_tokens"]


def test_a_system_message_from_beside_a_prompt_file(tmp_path: Path):
    folder = chat_model(tmp_path / "chat")
    generate("-", "--system", "be brief", "-n", 1, model=folder, stdin=b"hello")


DEAF = "{% for m in messages %}{% if m.role == 'user' %}<s>{{ m.content }}</s>{% endif %}{% endfor %}"
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + DEAF


@pytest.mark.parametrize("template", [DEAF, STRICT], ids=["deaf", "strict"])
def test_a_template_without_system_messages(template: str, tmp_path: Path):
    folder = chat_model(tmp_path / "chat", template)
    options = ("-n", 1, "--json", "--budget", 100)
    found = generate("-p", "hello", "--system", "be brief", *options, model=folder)
    want = generate("-p", "be brief\n\nhello", *options, model=folder)
    assert json.loads(found.stdout)["prompt_tokens"] == json.loads(want.stdout)["prompt_tokens"]
    assert "no system role" not in found.stderr


def pinned_text(folder: Path, messages: list[dict[str, str]]) -> list[str]:
    """The text of each pinned span."""
    checkpoint = find(folder)
    ids = encode_chat(checkpoint, messages)[0].tolist()
    return [checkpoint.tokenizer.decode(ids[start:stop]).strip() for start, stop in system_spans(checkpoint, messages)]


def chat(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


STRIPS = "{% for m in messages %}<s>{{ m.role }} {{ m.content | trim }}</s>{% endfor %}"
SHOUTS = "{% for m in messages %}<s>{{ m.content | upper }}</s>{% endfor %}"
TWICE = "{% for m in messages %}<s>{{ m.content }} {{ m.content }}</s>{% endfor %}"


@pytest.mark.parametrize("template", [model_folders.TEMPLATE, STRIPS], ids=["plain", "strips"])
@pytest.mark.parametrize(
    ("messages", "found"),
    [
        (chat(("system", "be brief"), ("user", "be brief and be quick")), ["be brief"]),
        (chat(("user", "be brief"), ("system", "be brief")), ["be brief"]),
        (chat(("system", " the cat "), ("user", "hello"), ("system", "the dog")), ["the cat", "the dog"]),
        (chat(("user", "hello")), []),
        (chat(("system", "kvkeepsystemmessage the cat"), ("user", "kvkeepsystemmessagex")), None),
    ],
)
def test_the_tokens_of_system_messages_are_found(template, messages, found, tmp_path: Path):
    folder = chat_model(tmp_path / "chat", template)
    texts = pinned_text(folder, messages)
    assert len(texts) == sum(message["role"] == "system" for message in messages)
    if found is not None:
        assert texts == found


@pytest.mark.parametrize("template", [SHOUTS, TWICE], ids=["shouts", "twice"])
def test_a_template_that_changes_a_system_message_is_refused(template, tmp_path: Path):
    folder = chat_model(tmp_path / "chat", template)
    with pytest.raises(InputError, match="does not show the system message in one piece"):
        pinned_text(folder, chat(("system", "be brief"), ("user", "hello")))


def test_a_system_message_is_pinned(tmp_path: Path):
    folder = chat_model(tmp_path / "chat")
    words = ("-p", PROMPT, "--system", "be brief", "-n", 3, "--json", "--policy", "h2o:recent=2", "-b", 8)
    found = json.loads(generate(*words, "--pin-system", model=folder).stdout)
    messages = chat(("system", "be brief"), ("user", PROMPT))
    assert [tuple(pin) for pin in found["pins"]] == list(system_spans(find(folder), messages))
    assert json.loads(generate(*words, model=folder).stdout)["pins"] == []
    result = generate("-p", PROMPT, "--system", PROMPT, "--pin-system", "-b", 8, model=folder, exit_code=2)
    assert re.search(r"\d+ tokens are pinned, and .* more than the budget of 8\. Raise the budget", result.stderr)


# the prompt


def test_a_dash_is_standard_input_for_every_option():
    texts = {generate(*words, "-n", 3, stdin=PROMPT.encode()).stdout for words in (["-p", "-"], ["-f", "-"], ["-"])}
    assert texts == {generate("-p", PROMPT, "-n", 3).stdout}


def test_a_prompt_may_look_like_an_option_if_it_is_joined():
    generate("--prompt=--budget", "-n", 1)
    generate("-p--budget", "-n", 1)
    generate("--prompt=-", "-n", 1, stdin=b"a text")


def test_a_prompt_of_several_words_may_begin_with_a_files_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.txt").write_text("x")
    generate("-p", "report.txt is a file", "-n", 1)
    generate("-", "-n", 1, stdin=b"report.txt")
    assert "--prompt-file report.txt" in generate("-p", "report.txt", exit_code=2).stderr


def test_a_model_that_may_be_a_word_of_the_prompt(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model, remedy in (("world", True), ("openai/gpt2", False), ("./world", False)):
        result = CliRunner().invoke(app, ["generate", "-p", "Hello", model])
        assert result.exit_code == 2
        assert ("needs quotes: -p 'Hello world'" in result.stderr) == remedy


# policies that keep every token


@pytest.mark.parametrize("policy", ["full", "topk_dynamic"])
def test_too_few_slots_are_refused_before_weights_are_read(policy: str, tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"")
    line = generate("-p", PROMPT, "--policy", policy, "-b", FED - 1, "-n", NEW, model=folder, exit_code=2).stderr
    assert f"need {FED} slots, and the budget is {FED - 1}" in line
    assert f"Give --budget {FED} or ask for at most {NEW - 1} new tokens." in line


@pytest.mark.parametrize("policy", ["full", "topk_dynamic"])
@pytest.mark.parametrize("budget", [FED - 1, FED])
def test_the_remedies_are_enough(policy: str, budget: int):
    config = find(model_folders.folder()).config
    layout = Layout.of(config, kvkeep.parse(policy))
    check_room(layout, FED, PROMPT_TOKENS, NEW)
    check_room(layout, FED - 1, PROMPT_TOKENS, NEW - 1)
    for room, new in ((FED - 1, NEW), (PROMPT_TOKENS - 1, 1)):
        with pytest.raises(kvkeep.CapacityError):
            check_room(layout, room, PROMPT_TOKENS, new)
    result = generate("-p", PROMPT, "--policy", policy, "-b", budget, "-n", NEW - (budget < FED))
    assert f"{policy} keeps every token" in result.stderr


def test_the_engine_names_the_same_remedies():
    with quiet():
        model, tokenizer = load(model_folders.folder())
    engine = kvkeep.Engine(model, tokenizer, policy="full", budget=FED - 1, rows=1)
    with pytest.raises(kvkeep.CapacityError, match=rf"Give `budget={FED}` or ask for at most {NEW - 1} new tokens\."):
        engine.add(kvkeep.Request(prompt=PROMPT, sampling=kvkeep.SamplingParams(max_new_tokens=NEW)))


@pytest.mark.parametrize(("room", "words"), [(4, "ask for at most 5 new tokens"), (0, "ask for at most 1 new tokens")])
def test_the_remedy_for_a_policy_that_grows(room: int, words: str):
    layout = Layout.of(find(model_folders.folder()).config, kvkeep.parse(f"snapkv:decode=grow,room={room},window=2"))
    with pytest.raises(kvkeep.CapacityError, match=words):
        check_room(layout, 10, 100, 50)


# the summary


def evicted(policy: str, budget: int, family: str) -> bool:
    """Whether a head of a cache lost a token in such a run."""
    with quiet(), torch.inference_mode():
        model, tokenizer = load(model_folders.folder(family))
        layers = rule_for_layers(budget, FED + 1)
        cache = kvkeep.BoundedCache(model.config, policy, budget=budget, layer_budget=layers)
        inputs = tokenizer(PROMPT, return_tensors="pt")
        model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    held = [head for layer in range(len(cache.layers)) for head in positions(cache, layer)]
    return any(set(range(FED)) - set(head) for head in held)


def positions(cache: kvkeep.BoundedCache, layer: int) -> list[list[int]]:
    try:
        return [head.tolist() for head in cache.positions(layer)[0]]
    except (kvkeep.KVKeepError, AttributeError, IndexError, TypeError):  # a layer without slots
        return []


SMALL = {"ahakv": "ahakv:recent=4"} | {
    name: f"{name}:window=4" for name in ("adakv", "defensivekv", "pyramidkv", "restkv", "snapkv")
}
"""Policies that protect more tokens than this text has, with less of them."""


FEW = ("full", "h2o", "snapkv")
POLICIES = [
    pytest.param(SMALL.get(name, name), marks=[] if name in FEW else pytest.mark.slow)
    for name in kvkeep.available_policies()
]


@pytest.mark.parametrize("family", ["llama", "lfm2"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_summary_is_true(policy: str, family: str):
    chosen = kvkeep.parse(policy)
    if family == "lfm2" and (chosen.unrotates or chosen.asks or chosen.rereads):
        pytest.skip("kvkeep does not know how lfm2 turns its keys")
    for budget in (FED + 2, FED, FED - 1):
        words = ("-p", PROMPT, "--policy", policy, "-b", budget, "-n", NEW)
        folder = model_folders.folder(family)
        if budget < FED and not kvkeep.parse(policy).evicts:
            assert "does not evict" in generate(*words, model=folder, exit_code=2).stderr
            continue
        said = " ".join(generate(*words, model=folder).stderr.split())
        if "nothing was evicted" in said or "keeps every token" in said:
            assert not evicted(policy, budget, family)
            assert "compression" not in said
        factor = re.search(r"compression ([\d.]+)×", said)
        assert factor is None or float(factor[1]) >= 0.9
        if budget < FED:
            assert "nothing was evicted" not in said


def test_a_short_text():
    said = " ".join(generate("-p", PROMPT, "-n", NEW).stderr.split())
    total = PROMPT_TOKENS + NEW
    assert f"held; nothing was evicted: the text of {total} tokens is not longer than the budget" in said
    assert "compression" not in said


def test_a_text_that_just_exceeds_its_budget():
    said = " ".join(generate("-p", PROMPT, "-n", NEW, "-b", FED - 1).stderr.split())
    assert "so short a text needs no budget" in said


def test_a_prompt_that_is_cut_to_a_share_of_its_budget():
    words = ("-p", PROMPT, "-n", NEW, "-b", PROMPT_TOKENS + NEW, "--keep-prompt", 0.5, "--policy", "h2o:recent=2")
    said = " ".join(generate(*words).stderr.split())
    assert "of the attention at the prompt's end" in said
    assert "nothing was evicted" not in said


def test_a_comparison_says_so_too():
    result = generate("-p", PROMPT, "-n", NEW, "--compare")
    assert "nothing was evicted" in " ".join(result.stderr.split())
    result = generate("-p", PROMPT, "-n", NEW, "-b", 6, "--compare")
    assert "nothing was evicted" not in result.stderr


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.0, "0 %"), (1e-9, "less than 0.01 %"), (0.0012, "0.12 %"), (0.0996, "10 %"), (0.996, "100 %"), (1.0, "100 %")],
)
def test_shares_of_attention_are_shown_as_percent(share: float, shown: str):
    assert _percent(share) == shown


def test_the_summary_says_what_was_lost_and_which_budget_was_chosen():
    text = "Anna has a red ball. " * 30
    said = " ".join(generate("-p", text, "-n", 3, "-b", 64, "--policy", "h2o", "--guard", 1).stderr.split())
    assert "budget 16 of 64, chosen by --guard" in said
    assert re.search(r"lost \d+ % of the attention at the prompt's end, \S+.* % in each new token's step", said)
    said = " ".join(generate("-p", text, "-n", 3, "-b", 64, "--policy", "h2o", "--guard", 0).stderr.split())
    assert re.search(r"the whole budget of 64 loses \d+ % of the attention, more than --guard 0; raise --budget", said)
    said = generate("-p", text, "-n", 3, "-b", 64, "--policy", "local").stderr
    assert "lost" not in said
