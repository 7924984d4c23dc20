"""A question to a remembered text is the same prompt as both together, token for token, whatever the tokenizer does."""

from __future__ import annotations

import functools
from dataclasses import asdict, replace

import model_folders
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvkeep.errors import InputError
from kvkeep.models import tokenization as openings
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.tokenization import (
    SEPARATOR,
    Opening,
    check_system,
    encode,
    encode_chat,
    encode_rest,
    opened,
    opening_of,
)

TEXT = "The quick brown fox jumps over the lazy dog.\n\nIt is called café-1984, isn't it? 漢字 …  and so on"
QUESTIONS = [
    "What?",
    "what is it",
    "  two spaces",
    "\n\na line",
    "1984",
    "…",
    ".",
    "é",
    "漢",
    "'s",
    "‘s",
    "</s>",
    "a" * 50,
]
TRIMMING = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]\n{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
TEMPLATES = {"plain": model_folders.TEMPLATE, "trims": TRIMMING, "none": None}


def byte_level(alone):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not alone)
    inner.decoder = decoders.ByteLevel()
    return inner, pre_tokenizers.ByteLevel.alphabet()


def metaspace():
    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return inner, []


@functools.cache
def checkpoint(kind, template):
    inner, alphabet = {"bytes": lambda: byte_level(False), "whole": lambda: byte_level(True), "words": metaspace}[
        kind
    ]()
    trainer = trainers.BpeTrainer(
        vocab_size=360 if alphabet else 120,
        special_tokens=["<s>", "</s>", "<unk>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    inner.train_from_iterator([TEXT, TEXT + SEPARATOR + "What is it?\n", "user assistant [user]\n"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATES[template]
    config = model_folders.config_of("llama")
    config.vocab_size = len(tokenizer)
    return Checkpoint("tested", config, tokenizer, None, allow_pickle=False)


def together(found, text, question, system=None, more=()):
    """The tokens of the prompt that a user would have written without a memory."""
    whole = f"{text.strip()}{SEPARATOR}{question}"
    if found.tokenizer.chat_template is None:
        return encode(found, whole, raw=True)[0].tolist()
    before = [] if system is None else [{"role": "system", "content": system}]
    return encode_chat(found, [*before, {"role": "user", "content": whole}, *more])[0].tolist()


@pytest.mark.parametrize("kind", ["bytes", "whole", "words"])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("times", [2, 90])
def test_a_text_and_its_question_are_one_message(kind, template, times):
    found, text = checkpoint(kind, template), "\n " + " ".join([TEXT] * times) + " \n"
    ids, opening = opened(found, text)
    assert len(opening.tail) <= max(len(TEXT), 2048 * 4)
    for question in QUESTIONS:
        assert ids + opening.rest(found, question, ids) == together(found, text, question)


def test_most_of_the_text_is_remembered():
    ids, _ = opened(checkpoint("bytes", "plain"), TEXT * 20)
    assert len(together(checkpoint("bytes", "plain"), TEXT * 20, "What?")) - len(ids) < 40


def test_the_system_message_and_further_messages():
    found = checkpoint("bytes", "plain")
    ids, opening = opened(found, TEXT, system="Be brief.")
    more = ({"role": "assistant", "content": "A fox."}, {"role": "user", "content": "Why?"})
    assert ids + opening.rest(found, "What?", ids, more) == together(found, TEXT, "What?", "Be brief.", more)
    assert opening.messages("What?")[0] == {"role": "system", "content": "Be brief."}


@settings(max_examples=30, deadline=None)
@given(st.text(min_size=1, max_size=60), st.text(min_size=1, max_size=30))
def test_any_text_and_any_question(text, question):
    found = checkpoint("bytes", "trims")
    try:
        ids, opening = opened(found, text * 3)
        rest = opening.rest(found, question, ids)
    except InputError:
        return  # half of a character, only white space, or too short
    assert ids + rest == together(found, text * 3, question)


def test_a_date_in_the_template_may_change():
    found = checkpoint("bytes", "plain")
    ids, opening = opened(found, TEXT)
    want = opening.rest(found, "What?", ids)
    later = checkpoint.__wrapped__("bytes", "plain")
    later.tokenizer.chat_template = "{{ bos_token }}It is the 24th of November. " + model_folders.TEMPLATE
    assert opening.rest(later, "What?", ids) == want


def test_a_question_that_changes_remembered_tokens_is_refused():
    found = checkpoint("bytes", "plain")
    ids, opening = opened(found, TEXT)
    other = [*ids[:-2], ids[-1], ids[-2]]
    with pytest.raises(InputError, match="the memory does not fit"):
        opening.rest(found, "What?", other)


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_an_empty_text(text):
    with pytest.raises(InputError, match="The text is empty"):
        opened(checkpoint("bytes", "plain"), text)


def test_a_text_without_a_token_that_stays():
    with pytest.raises(InputError, match="too short to be remembered"):
        opened(checkpoint("bytes", "none"), "W")


def test_an_empty_question():
    ids, opening = opened(checkpoint("bytes", "plain"), TEXT)
    with pytest.raises(InputError, match="The question is empty"):
        opening.rest(checkpoint("bytes", "plain"), " \n", ids)


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content | upper }}", "{{ messages | tojson }}"],
)
def test_templates_that_do_not_show_the_text(template):
    found = checkpoint.__wrapped__("bytes", "plain")
    found.tokenizer.chat_template = template
    with pytest.raises(InputError, match="does not show a message as it is"):
        opened(found, TEXT)


def test_a_system_message_that_has_no_place():
    found = checkpoint.__wrapped__("bytes", "plain")
    with pytest.raises(InputError, match=r"^`raw` leaves the chat template out"):
        opened(found, TEXT, system="x", raw=True)
    found.tokenizer.chat_template = "{{ 1 // 0 }}"
    with pytest.raises(InputError, match="chat template fails"):
        check_system(found, "x")


def test_a_system_message_that_the_template_leaves_out_stands_before_the_text():
    found = checkpoint.__wrapped__("bytes", "plain")
    found.tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }}|{% endfor %}"
    ids, opening = opened(found, TEXT, system="be brief")
    ids += opening.rest(found, "What?", ids)
    assert found.tokenizer.decode(ids) == f"be brief\n\n{TEXT}\n\nWhat?|"


def test_openings_are_plain_data():
    opening = Opening("a tail", 2, "system", raw=False)
    assert opening_of(asdict(opening)) == opening


GOOD = asdict(Opening("a tail", 2))


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        {},
        {**GOOD, "skip": -1},
        {**GOOD, "skip": True},
        {**GOOD, "skip": 1.0},
        {**GOOD, "tail": 7},
        {**GOOD, "tail": " "},
        {**GOOD, "system": 7},
        {**GOOD, "raw": "yes"},
        {**GOOD, "more": 1},
    ],
    ids=str,
)
def test_data_that_are_no_opening(found):
    with pytest.raises(InputError, match="is no opening"):
        opening_of(found)


def test_an_opening_of_other_types_is_none():
    for change in ({"skip": -1}, {"tail": " "}, {"system": 7}, {"raw": "yes"}):
        with pytest.raises(InputError, match="is no opening of a message"):
            opening_of({**GOOD, **change})
    assert opening_of({**GOOD, "system": None}) == Opening("a tail", 2)


def test_an_effort_that_the_template_does_not_read_and_an_answer_that_calls_tools():
    found, talk = checkpoint("bytes", "plain"), [{"role": "user", "content": "What?"}]
    with pytest.raises(InputError, match="reasoning_effort has no effect: the chat template of tested does not read"):
        encode_chat(found, talk, chat_template_kwargs={"reasoning_effort": "low"})
    called = [*talk, {"role": "assistant", "content": "So", "tool_calls": [{"name": "f"}]}]
    with pytest.raises(InputError, match="continue_final_message=True cannot be followed: the last message calls tool"):
        encode_chat(found, called, continue_final_message=True)
    hidden = checkpoint.__wrapped__("bytes", "plain")
    hidden.tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(InputError, match="the last message is not shown by the chat template"):
        encode_chat(hidden, [*talk, {"role": "assistant", "content": "So"}], continue_final_message=True)
    with pytest.raises(InputError, match=r"The text is empty\. Give some text"):
        encode_rest(found, "")
    assert encode_rest(found, "What?").shape[0] == 1


def test_the_end_of_a_text_is_looked_at_anew_until_its_tokens_stay(monkeypatch):
    found, text = checkpoint("bytes", "none"), "a " * 40
    sizes = []
    monkeypatch.setattr(openings, "_WINDOW", 2)
    own = Opening._ids
    monkeypatch.setattr(
        Opening, "_ids", lambda self, *args, **more: (sizes.append(len(self.tail)), own(self, *args, **more))[1]
    )
    ids, opening = opened(found, text)
    assert ids + opening.rest(found, "What?", ids) == together(found, text, "What?")
    assert sizes[-1] > min(sizes)


def test_a_skip_of_another_text_is_noticed():
    found = checkpoint("bytes", "plain")
    ids, opening = opened(found, TEXT)
    with pytest.raises(InputError):
        replace(opening, skip=10**9).rest(found, "What?", ids)
    assert openings.SEPARATOR == "\n\n"
