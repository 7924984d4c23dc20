"""Texts that end a generation, and texts that only look like the beginning of one."""

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.engine import Engine, Request, detokenizer
from kvkeep.engine.detokenizer import StopText, TokenTexts
from kvkeep.engine.sampling_params import SamplingParams

PIECES = ("a", "b", "\n", ".", "ab", "ba.b", "\na")


def letters(ids):
    return "".join(PIECES[i] for i in ids)


@given(
    tokens=st.lists(st.integers(0, 6), max_size=30),
    endings=st.lists(st.text("ab\n.", min_size=1, max_size=5), max_size=3),
)
def test_equals_a_search_in_the_whole_text(tokens, endings):
    tail = StopText(letters, endings)
    pieces, stopped = [], False
    for n, token in enumerate(tokens, start=1):
        piece, stopped = tail.add(token)
        pieces.append(piece)
        whole = letters(tokens[:n])
        found = [whole.find(stop) for stop in endings if stop in whole]
        assert stopped == bool(found)
        if stopped:
            assert "".join(pieces) == tail.text == whole[: min(found)]
            break
        assert whole.startswith("".join(pieces))
    pieces.append(tail.end())
    if not stopped:
        assert "".join(pieces) == tail.text == letters(tokens)


class Spelled:
    """A tokenizer of three entries, the last of which changes the text before it."""

    entries = ("a", b"\xc3", "e\u0301")

    def decode(self, ids, skip_special_tokens):
        text = "".join(str(self.entries[i], "latin-1") if i == 1 else self.entries[i] for i in ids)
        return unicodedata.normalize("NFC", text)

    def convert_ids_to_tokens(self, token):
        return self.entries[token]

    def encode(self, text, add_special_tokens):
        return [0]


def test_a_token_is_read_from_its_entry_or_from_what_it_adds_to_a_text():
    texts = TokenTexts(Spelled())
    assert texts.bytes_of(1) == b"\xc3"
    assert texts.bytes_of(2) == "é".encode()
    assert texts.after(None, 2) == "é"
    assert texts.after(0, 0) == "a"
    Spelled.entries = ("a", b"\xc3", "\u0301")
    assert texts.after(0, 2) == "\u0301"  # together they are one character, which does not begin with the first


def test_nothing_is_said_after_a_stop_text():
    tail = StopText(letters, ["b"])
    assert tail.add(0) == ("a", False)
    assert tail.add(1) == ("", True)
    assert tail.add(0) == ("", True)
    assert tail.end() == ""
    assert tail.text == "a"


@pytest.fixture(scope="module")
def loaded(comparable):
    return comparable.loaded


def test_the_engine_stops_there(loaded):
    network, tokenizer = loaded
    prompt = tokenizer("Once upon a time there was a little", return_tensors="pt")["input_ids"][0].tolist()
    free = Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=40), ignore_end=True)
    engine = Engine(network, tokenizer, policy="local", budget=64, rows=2)
    whole = engine.generate([free])[0]
    stop = whole.text[12:17]
    bound = Request(
        prompt=prompt, sampling=SamplingParams(max_new_tokens=40), stop=("never said", stop), ignore_end=True
    )
    events = list(engine.stream(bound))
    result = events[-1].result
    assert result.finish_reason == "stop"
    assert result.text == whole.text[: whole.text.index(stop)] == "".join(e.text for e in events)
    assert len(result.token_ids) < 40
    assert whole.finish_reason == "length"


def test_the_models_own_end(loaded):
    network, tokenizer = loaded
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tamsin's trowel is red. What colour is Tamsin's trowel?"}],
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    engine = Engine(network, tokenizer, policy="full", budget=128, rows=1)
    stopped, ignored = engine.generate(
        [Request(prompt=chat, sampling=SamplingParams(max_new_tokens=30), ignore_end=flag) for flag in (False, True)]
    )
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids[-1] == network.generation_config.eos_token_id
    assert ignored.token_ids[: len(stopped.token_ids)] == stopped.token_ids
    assert len(ignored.token_ids) == 30


def lines_run(work):
    """Lines of `kvkeep.engine.detokenizer` that run: a measure that no other load on the machine changes."""
    count = 0

    def watch(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename != detokenizer.__file__:
            return None
        count += event == "line"
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("stop", [lambda n: "a" * n + "b", lambda n: "ab" * n + "."], ids=["a letter", "two letters"])
def test_the_work_grows_with_the_length_of_a_stop_text_and_not_with_its_square(stop):
    def run(n):
        tail = StopText(letters, [stop(n)])
        for token in ["ab\n.".index(letter) for letter in 3 * (stop(n)[:-1] + "\n")]:
            tail.add(token)
        tail.end()
        return tail

    short, long = (lines_run(lambda n=n: run(n)) for n in (100, 400))
    assert long < 4.5 * short
    assert run(100).text == 3 * (stop(100)[:-1] + "\n")


def test_what_is_held_back_is_not_copied_again_with_every_token():
    """A stop text of as many characters as there are tokens: nothing is joined or cut before it is decided."""
    tail = StopText(letters, ["a" * 50 + "b"])
    assert [tail.add(0) for _ in range(50)] == [("", False)] * 50
    assert len(tail._held) == 50
    assert tail.add(0) == ("a", False)
    assert tail.add(1) == ("", True)
    assert tail.text == "a"
