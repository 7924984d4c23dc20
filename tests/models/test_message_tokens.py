"""Each message of a conversation has tokens of its own, those by which the template begins and ends it included."""

import copy

import pytest

from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.message_tokens import message_starts, system_spans
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
