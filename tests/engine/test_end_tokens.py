"""A text ends with the end tokens of the model's files and of its tokenizer, a chat's also with the template's."""

import model_folders
import pytest

import kvkeep
from kvkeep.models.chat_templates import turn_ends

CHAT = [{"role": "user", "content": "the cat"}]
FILES = ("config.json", "generation_config.json")


def loaded(folder, *, configs=(), end=None, template=model_folders.TEMPLATE):
    """A model whose only end tokens are those that are named here.

    Args:
        folder: where it lies.
        configs: the files that name ``</s>``.
        end: the tokenizer's end token.
        template: its chat template.
    """
    model_folders.copy(folder)
    token = model_folders.tokenizer().convert_tokens_to_ids("</s>")
    for file in FILES:
        model_folders.edit_json(folder / file, eos_token_id=token if file in configs else None)
    model_folders.edit_json(folder / "tokenizer_config.json", eos_token=end)
    model, tokenizer = kvkeep.load(folder)
    tokenizer.chat_template = template
    return model, tokenizer


def said(model, tokenizer, *, end="</s>", **asked):
    """What a model says that always wants this token."""
    token = tokenizer.convert_tokens_to_ids(end)
    sampling = kvkeep.SamplingParams(max_new_tokens=3, logit_bias={token: 100})
    [result] = kvkeep.Engine(model, tokenizer, budget=32, rows=1).generate([kvkeep.Request(**asked, sampling=sampling)])
    return result.finish_reason, len(result.token_ids), result.text, result.end_token


ENDED, GOES_ON = ("stop", 1, "", True), ("length", 3, "", False)


@pytest.mark.parametrize("named", [{"configs": FILES[:1]}, {"configs": FILES[1:]}, {"end": "</s>"}])
def test_the_files_of_a_model_and_its_tokenizer_name_end_tokens(named, tmp_path):
    model = loaded(tmp_path / "m", **named, template=None)
    assert said(*model, prompt="the cat") == ENDED
    assert said(*model, prompt=(5, 6, 7)) == ENDED
    assert said(*model, prompt="the cat", ignore_end=True)[:2] == GOES_ON[:2]


def test_a_chat_ends_with_the_turn(tmp_path):
    model = loaded(tmp_path / "m")
    for asked in ({"messages": CHAT}, {"prompt": "the cat"}, {"prompt": (5, 6, 7), "chat": True}):
        assert said(*model, **asked) == ENDED
    for asked in ({"prompt": "the cat", "raw": True}, {"prompt": (5, 6, 7)}, {"messages": CHAT, "ignore_end": True}):
        assert said(*model, **asked)[:2] == GOES_ON[:2]


def test_a_session_reads_the_end_of_a_turn_once(tmp_path):
    model, tokenizer = loaded(tmp_path / "m")
    end = tokenizer.convert_tokens_to_ids("</s>")
    with kvkeep.Engine(model, tokenizer, budget=64, rows=1) as engine:
        session = engine.session()
        sampling = kvkeep.SamplingParams(max_new_tokens=3, logit_bias={end: 100})
        session.ask(kvkeep.Request(messages=CHAT, sampling=sampling))
        session.ask(kvkeep.Request(messages=CHAT, sampling=sampling))
    text = tokenizer.decode(list(session.token_ids))
    assert text.count("</s>") == 4, text
    assert "</s></s>" not in text


def test_an_end_token_that_is_an_ordinary_one_is_no_part_of_the_text(tmp_path):
    folder = model_folders.copy(tmp_path / "m")
    token = model_folders.tokenizer().convert_tokens_to_ids("a")
    model_folders.edit_json(folder / "generation_config.json", eos_token_id=token)
    assert said(*kvkeep.load(folder), end="a", prompt="the cat", raw=True) == ENDED


TURNS = {
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}": {"</s>"},
    "{% for m in messages %}{{ m.content }} </s>{% endfor %}": {"</s>"},
    "{% for m in messages %}{% if m.role == 'user' %}<s>{% endif %}{{ m.content }}{% endfor %}": {"<s>"},
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}": set(),
    "{% for m in messages %}{{ m.content }}{% if loop.last %}</s>{% else %}<s>{% endif %}{% endfor %}": {"</s>"},
    "{{ messages[0].content }}": set(),
    "{{ raise_exception('no') }}": set(),
    "{% for m in messages %}{{ m.content }}{% endfor %}": set(),
}


@pytest.mark.parametrize("template", TURNS)
def test_the_end_of_a_turn_is_a_control_token(template):
    inner = model_folders.tokenizer()
    tokenizer = type(inner)(tokenizer_object=inner._tokenizer, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    assert set(tokenizer.convert_ids_to_tokens(sorted(turn_ends(tokenizer)))) == TURNS[template]
