"""Texts and conversations in sessions: only what is new is fed, and the memory stays what was read and written."""

import copy
from dataclasses import replace

import pytest

from kvkeep.engine import Engine, Request
from kvkeep.errors import InputError, SnapshotError

from .session_models import short

OWN = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}<|end|>{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEMPLATES = {
    "plain": OWN + ASKS,
    "with a beginning": "{{ bos_token }}" + OWN + ASKS,
    "trims": OWN.replace("m.content", "m.content | trim") + ASKS,
    "drops thoughts": OWN.replace("m.content", "m.content.split('</think>')[-1]") + ASKS,
    "rewrites earlier turns": OWN.replace(
        "m.content", "(m.content if loop.last else 'EARLIER') if m.role == 'user' else m.content"
    )
    + ASKS,
    "closes with text": OWN.replace("<|end|>", "\n") + ASKS,
    "wants turns": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns') }}{% endif %}{% endfor %}" + OWN + ASKS,
}


@pytest.fixture(scope="module")
def loaded(comparable):
    return comparable.loaded


def engine_of(loaded, template=None, **options):
    model, tokenizer = loaded
    if template is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template
    return Engine(model, tokenizer, policy="h2o", budget=64, rows=2, **options)


def text_of(session, loaded):
    return loaded[1].decode(session.token_ids)


@pytest.mark.long
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_turn_appends_its_own_text_and_nothing_else(template, loaded):
    engine = engine_of(loaded, template)
    session = engine.session()
    first = session.ask("The dog ran.", short(5))
    before = session.token_ids
    second = session.ask("And the cat?", short(5))
    close = "\n" if "<|end|>" not in template else "<|end|>"
    assert session.token_ids[: len(before)] == before
    new = loaded[1].decode(session.token_ids[len(before) : -5])
    assert new == f"{close}<|user|> And the cat?{close}<|assistant|>"
    assert second.cached_tokens == len(before) - 1
    roles = [message["role"] for message in session.messages]
    assert roles == ["user", "assistant"] * 2
    assert [session.messages[i]["content"] for i in (1, 3)] == [first.text, second.text]


def test_an_end_token_gives_way_to_the_templates_own_end(loaded):
    engine = engine_of(loaded)
    session = engine.session()
    result = session.ask("Once upon a time there was a dog.", short(40))
    assert result.finish_reason == "stop"
    session.ask("Why?", short(3))
    assert "<|end|><|end|>" not in text_of(session, loaded)
    assert f"{result.text}<|end|><|user|> Why?<|end|><|assistant|>" in text_of(session, loaded)


def test_a_stop_text_stays_in_the_memory_but_not_in_the_answer(loaded):
    engine = engine_of(loaded)
    session = engine.session()
    told = session.ask("Tell me about the dog.", short(20)).text
    word = told.split()[2]
    session = engine.session()
    result = session.ask(Request(prompt="Tell me about the dog.", stop=(word,), sampling=short(20)))
    assert word not in result.text
    assert session.messages[-1]["content"] == result.text
    assert word in text_of(session, loaded)
    assert session.ask("Why?", short(3)).cached_tokens == result.prompt_tokens + len(result.token_ids) - 1


def test_messages_are_the_new_part_of_the_conversation(loaded):
    engine = engine_of(loaded, TEMPLATES["plain"])
    session = engine.session()
    session.ask([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello."}], short(3))
    session.ask([{"role": "tool", "content": "42"}], short(3))
    assert text_of(session, loaded).startswith("<|system|> Be kind.<|end|><|user|> Hello.<|end|><|assistant|>")
    assert "<|end|><|tool|> 42<|end|><|assistant|>" in text_of(session, loaded)
    assert [message["role"] for message in session.messages] == ["system", "user", "assistant", "tool", "assistant"]


def test_a_question_to_a_text_that_was_read_begins_a_conversation_without_a_beginning(loaded):
    engine = engine_of(loaded, TEMPLATES["with a beginning"])
    text = "The code of the door is 4711."
    prefix = engine.prefix(text)
    session = engine.session(snapshot=prefix)
    session.ask("What is the code?", short(4))
    begin = loaded[1].bos_token
    told = text_of(session, loaded)
    assert told.startswith(f"{text}<|user|> What is the code?<|end|><|assistant|>")
    assert begin not in told.removeprefix(begin)
    again = engine.generate([Request(prompt="What is the code?", snapshot=prefix, sampling=short(4))])[0]
    assert again.token_ids == session.token_ids[-4:]
    raw = engine.generate([Request(prompt=" Question", raw=True, snapshot=prefix, sampling=short(4))])[0]
    assert raw.prompt_tokens < again.prompt_tokens


def test_raw_texts_and_token_ids_end_a_conversation(loaded):
    engine = engine_of(loaded, TEMPLATES["plain"])
    session = engine.session()
    session.ask("Hello.", short(2))
    session.ask(Request(prompt=" and more", raw=True, sampling=short(2)))
    assert session.messages == ()
    session.ask("Why?", short(2))
    assert "<|user|> Why?<|end|><|assistant|>" in text_of(session, loaded)
    assert len(session.messages) == 2


def test_a_tokenizer_without_a_template_continues_texts(loaded):
    model, tokenizer = loaded
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    session = Engine(model, plain, policy="h2o", budget=64).session()
    session.ask("Once upon", short(2))
    before = session.token_ids
    session.ask(" a time", short(2))
    assert session.token_ids[: len(before)] == before
    assert tokenizer.decode(session.token_ids[len(before) : -2]) == " a time"
    assert session.messages == ()
    with pytest.raises(InputError, match="template"):
        session.ask([{"role": "user", "content": "a"}])


def test_a_template_that_hides_answers_is_refused_and_nothing_is_lost(loaded):
    hides = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|> {{ m.content }}{% endif %}{% endfor %}<|assistant|>"
    )
    session = engine_of(loaded, hides).session()
    session.ask("Hello.", short(2))
    before = session.token_ids
    with pytest.raises(InputError, match="does not show the last answer"):
        session.ask("Why?", short(2))
    assert session.token_ids == before
    assert session.ask(Request(prompt=" more", raw=True, sampling=short(2))).finish_reason == "length"


def test_texts_that_look_like_the_marks_of_the_code_are_texts(loaded):
    session = engine_of(loaded, TEMPLATES["plain"]).session()
    session.ask("kvkeep0answer", short(2))
    session.ask("kvkeep0answer kvkeep1answer", short(2))
    assert "<|user|> kvkeep0answer kvkeep1answer<|end|>" in text_of(session, loaded)


@pytest.mark.parametrize("text", ["", "  ", "\ud800", "a\ud800"])
def test_texts_that_are_none_are_refused(text, loaded):
    session = engine_of(loaded).session()
    session.ask("Hello.", short(2))
    for asked in (text, [{"role": "user", "content": text}]):
        if isinstance(asked, str) or "\ud800" in text:
            with pytest.raises(InputError):
                session.ask(asked)
    with pytest.raises(InputError):
        session.read("")


def test_a_conversation_goes_on_from_the_disk(loaded, tmp_path):
    with engine_of(loaded, session_dir=tmp_path) as engine:
        session = engine.session(name="anna")
        session.ask("The dog is called Rex.", short(6))
        (twin,) = session.fork()
        want = twin.ask("What is it called?", short(6))
    with engine_of(loaded, session_dir=tmp_path) as engine:
        again = engine.session(name="anna")
        assert again.messages == session_messages(twin)[:2]
        result = again.ask("What is it called?", short(6))
        assert (result.text, result.token_ids, result.cached_tokens) == (want.text, want.token_ids, want.cached_tokens)


def session_messages(session):
    return tuple(map(dict, session.messages))


def test_a_rewind_takes_back_messages_as_well(loaded):
    session = engine_of(loaded).session()
    session.ask("Hello.", short(2))
    snapshot, before = session.snapshot(), text_of(session, loaded)
    want = session.ask("Why?", short(4))
    session.rewind(snapshot)
    assert text_of(session, loaded) == before
    assert len(session.messages) == 2
    assert session.ask("Why?", short(4)).token_ids == want.token_ids


def test_a_snapshot_with_a_foreign_note_is_refused(loaded):
    engine = engine_of(loaded)
    session = engine.session()
    session.ask("Hello.", short(2))
    snapshot = session.snapshot()
    for note in ({"pending": "x"}, {"pending": [-1]}, {"pending": [2**40]}, {"messages": [1]}, {"messages": "a"}):
        with pytest.raises(SnapshotError, match="note"):
            engine.session(snapshot=replace(snapshot, note=note))


@pytest.mark.parametrize("template", [TEMPLATES["plain"], TEMPLATES["drops thoughts"], TEMPLATES["with a beginning"]])
def test_messages_are_dropped_with_what_the_template_writes_around_them(template, loaded, tmp_path):
    texts = ["The dog ran.", "And the cat?", "It slept."]
    with engine_of(loaded, template, session_dir=tmp_path) as engine:
        session = engine.session(name="anna")
        for text in texts:
            session.ask(text, short(4))
        answers = [message["content"] for message in session.messages if message["role"] == "assistant"]
        gone = session.drop(messages=[2, 1, -4])
        assert len(gone) == 1  # they are neighbours
        told = loaded[1].decode(session.token_ids[gone[0][0] : gone[0][1]])
        assert told == f"<|assistant|>{answers[0]}<|end|><|user|> And the cat?<|end|>"
        assert session.drop(messages=[1]) == ()
        session.close()
        again = engine.session(name="anna")
        assert loaded[1].decode(session_span(again, again.drop(messages=[3]))).startswith("<|assistant|>")
        for place, why in [
            (5, "last answer"),
            (-1, "last answer"),
            (6, "no message 6"),
            (-7, "no message -7"),
            (True, "no message True"),
        ]:
            with pytest.raises(InputError, match=why):
                again.drop(messages=[place])
        assert again.messages[2]["content"] == "And the cat?"  # said it was, and the memory goes without it
        again.ask("Why?", short(3))
        again.drop(messages=[5])


def session_span(session, gone):
    ((start, stop),) = gone
    return session.token_ids[start:stop]


def test_messages_of_unknown_tokens_are_dropped_by_spans_alone(loaded):
    with engine_of(loaded, TEMPLATES["wants turns"]) as engine:
        session = engine.session()
        session.read("Once upon a time")
        session.ask("The dog ran.", short(3))
        with pytest.raises(InputError, match="Give spans of tokens instead"):
            session.drop(messages=[0])
        assert session.drop(spans=[(2, 4)]) == ((2, 4),)


def test_where_messages_begin_is_not_known_once_left_out_ones_were_recalled(loaded):
    with engine_of(loaded, TEMPLATES["plain"], conversation_memory=10**9, conversations="continue") as engine:
        messages = []
        for number, text in enumerate(["The dog ran.", "And the cat?", "It slept."]):
            messages.append({"role": "user", "content": text})
            chat = Request(messages=messages, owner="anna", keep_as=f"c{number}", sampling=short(4))
            messages.append({"role": "assistant", "content": engine.generate(chat)[0].text})
        session = engine.session()
        shorter = [messages[0], *messages[2:], {"role": "user", "content": "Why?"}]
        turn = session.ask(Request(messages=shorter, owner="anna", sampling=short(4)))
        ((_, stop),) = session.history.dropped
        assert turn.skipped_tokens == turn.dropped_tokens > 0
        with pytest.raises(InputError, match="Give spans of tokens instead"):
            session.drop(messages=[1])  # its place was counted without the message that was left out
        assert session.drop(spans=[(stop, stop + 2)]) == ((stop, stop + 2),)
        session.ask("And then?", short(4))
