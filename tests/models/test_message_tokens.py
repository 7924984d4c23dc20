"""Each message of a conversation has tokens of its own, those by which the template begins and ends it included."""

import copy

import model_folders
import pytest

from kvkeep.errors import InputError
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.message_tokens import message_spans, message_starts, system_spans
from kvkeep.models.special_tokens import SpecialTokens
from kvkeep.models.tokenization import encode_chat

OWN = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}<|end|>{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
FOLDS = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "<|{{ m.role }}|> {{ first if loop.first else '' }}{{ m.content }}<|end|>{% endfor %}" + ASKS
)
GROUPS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|user|>{% endif %}"
    "<result>{{ m.content }}</result>{% if loop.last or loop.nextitem.role != 'tool' %}<|end|>{% endif %}"
    "{% else %}<|{{ m.role }}|> {{ m.content }}<|end|>{% endif %}{% endfor %}" + ASKS
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The dog ran."},
    {"role": "assistant", "content": "Yes."},
    {"role": "tool", "content": "It ran."},
    {"role": "tool", "content": "It came back."},
]
PLAIN = [
    "<|system|> Be brief.<|end|>",
    "<|user|> The dog ran.<|end|>",
    "<|assistant|> Yes.<|end|>",
    "<|tool|> It ran.<|end|>",
    "<|tool|> It came back.<|end|>",
]
GROUPED = [*PLAIN[:3], "<|user|><result>It ran.</result>", "<result>It came back.</result><|end|>"]
CASES = {
    "plain": (OWN + ASKS, ["", *PLAIN, "<|assistant|>"]),
    "with a preamble": ("You are Rex. " + OWN + ASKS, ["You are Rex. ", *PLAIN, "<|assistant|>"]),
    "grouped": (GROUPS, ["", *GROUPED, "<|assistant|>"]),
    "folded": (FOLDS, ["<|user|> Be brief.\n\nThe dog ran.<|end|>", *PLAIN[2:], "<|assistant|>"]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_messages_are_found_by_the_template(case, comparable):
    template, wanted = case
    model, tokenizer = comparable.loaded
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    checkpoint = Checkpoint("tiny", model.config, tokenizer, None, allow_pickle=False)
    ids = encode_chat(checkpoint, TALK)[0]
    starts = message_starts(checkpoint, TALK, range(len(TALK) + 1))
    places = sorted({0, *starts.values()})
    texts = [
        tokenizer.decode(ids[start:stop].tolist()) for start, stop in zip(places, [*places[1:], None], strict=True)
    ]
    assert texts == [text for text in wanted if text]
    assert (1 in starts) == (template != FOLDS)


def test_an_empty_prompt_has_no_system_message(comparable):
    model, tokenizer = comparable.loaded
    assert system_spans(Checkpoint("tiny", model.config, tokenizer, None, allow_pickle=False), []) == ()


@pytest.fixture
def written():
    """A checkpoint for a template, whose tokenizer knows a few words and the token that ends a turn."""

    def of(template):
        tokenizer = copy.deepcopy(model_folders.tokenizer())
        tokenizer.add_tokens(["<|end|>"], special_tokens=True)
        tokenizer.chat_template = template
        config = model_folders.config_of("llama")
        config.vocab_size = len(tokenizer)
        return Checkpoint("tiny", config, tokenizer, None, allow_pickle=False)

    return of


def test_results_of_calls_in_one_turn_begin_where_the_next_result_does(written):
    found = written(GROUPS)
    ids = encode_chat(found, TALK)[0].tolist()
    starts = message_starts(found, TALK, [3, 4, 5])
    assert found.tokenizer.decode(ids[starts[3] : starts[4]]) == GROUPED[3]
    assert found.tokenizer.decode(ids[starts[4] : starts[5]]) == GROUPED[4]
    # the same template with other roles: the turn of the first one ends in another way once a second one follows
    others = written(GROUPS.replace("'tool'", "'user'"))
    talk = [TALK[0], {"role": "user", "content": "It ran."}, {"role": "user", "content": "It came back."}]
    assert message_starts(others, talk, [0, 1, 2, 3]).keys() == {0, 1, 3}


def test_a_message_that_contains_the_mark_is_found(written):
    talk = [{"role": "system", "content": "Say kvkeepsystemmessage."}, {"role": "user", "content": "the dog"}]
    found = written(OWN)
    [(start, stop)] = message_spans(found, talk, [0])
    ids = encode_chat(found, talk)[0].tolist()
    assert found.tokenizer.decode(ids[start:stop]).strip() == "Say kvkeepsystemmessage."
    assert message_spans(found, talk, []) == ()


def test_a_tokenizer_that_does_not_know_the_characters_of_its_tokens(written, monkeypatch):
    monkeypatch.setattr(SpecialTokens, "offsets", lambda self, tokenizer, text: [])
    with pytest.raises(
        InputError, match=r"tokenizer of tiny does not tell which characters .* needs a tokenizer\.json"
    ):
        message_spans(written(OWN), TALK, [0])
