"""Files of questions: what is read, what is refused, and which replies are right."""

import pytest

from kvkeep.errors import InputError
from kvkeep.evals.tune.documents import UserQuestion, read_questions

GOOD = '{"question": "Who?", "answer": "Ada"}'


def read(content, text="a text"):
    return read_questions(content, "mine.jsonl", text)


def test_a_question_has_the_common_text_or_its_own():
    one, two = read(GOOD + '\n\n{"text": "own", "question": "When?", "answer": [1866, "in 1866"], "note": 1}')
    assert one == UserQuestion("a text", "Who?", ("Ada",))
    assert two == UserQuestion("own", "When?", ("1866", "in 1866"))


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x85", "\x0b"])
def test_lines_end_where_json_lines_do(sign):
    """Some signs end a line of text, and stand in a string of JSON as they are."""
    one, two = read(f'{{"question": "a{sign if sign != chr(11) else " "}b", "answer": "x"}}\r\n{GOOD}\r\n')
    assert one.question.startswith("a")
    assert two == UserQuestion("a text", "Who?", ("Ada",))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no questions"),
        ("{", "Line 1 of mine.jsonl is no JSON"),
        ("[1]", "is no JSON object"),
        (GOOD + '\n{"question": "Who?"}', "Line 2 of mine.jsonl has no answer"),
        ('{"questoin": "Who?", "answer": "x"}', "Did you mean 'question' by 'questoin'"),
        ('{"question": " ", "answer": "x"}', "empty or no text"),
        ('{"question": "Who?", "answer": []}', "empty or no text"),
        ('{"question": "Who?", "answer": true}', "empty or no text"),
        ('{"question": {}, "answer": "x"}', "empty or no text"),
        ('{"question": "Who?", "answer": NaN}', "is no JSON"),
        ('{"question": "\\ud800", "answer": "x"}', "is no JSON"),
        ("[" * 10000, "is no JSON"),
    ],
)
def test_a_line_that_is_no_question(content, said):
    with pytest.raises(InputError) as error:
        read(content)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_question_without_any_text():
    with pytest.raises(InputError, match=r"Line 1 of mine\.jsonl has no text"):
        read(GOOD, None)


@pytest.mark.parametrize("reply", ["Ada", "It was ADA.", "\n\n ada, of course\nBob"])
def test_a_right_reply(reply):
    assert UserQuestion("", "", ("Ada",)).right(reply)


@pytest.mark.parametrize("reply", ["", "Adam", "Bob\nAda"])
def test_a_wrong_reply(reply):
    assert not UserQuestion("", "", ("Ada",)).right(reply)


def test_answers_of_several_words_and_of_signs():
    assert UserQuestion("", "", ("New York",)).right("In new  york!")
    assert not UserQuestion("", "", ("New York",)).right("York, the new")
    assert UserQuestion("", "", ("°",)).right("5 °")
