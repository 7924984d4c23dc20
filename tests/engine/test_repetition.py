"""A text that repeats itself ends if the request asks for that: the rule, what it lets pass, and how to ask for it."""

import random

import pytest
import real_folders

import kvkeep
from kvkeep.cli.options import parse_repetition_detection
from kvkeep.engine.sampling_params import RepetitionDetectionParams
from kvkeep.engine.sequence import RepetitionDetector
from kvkeep.errors import InputError
from kvkeep.parameters import REPETITION_RULE

pytestmark = pytest.mark.usefixtures("no_checked_annotations")


def end_of(tokens, **rule):
    """The number of tokens after which a text ends; ``None`` if it goes on."""
    detector = RepetitionDetector(RepetitionDetectionParams(**rule))
    return next((count for count, token in enumerate(tokens, start=1) if detector.add(token)), None)


def slow_end_of(tokens, max_pattern_size, min_pattern_size, min_count, min_repeated_tokens):
    """The rule, as it is documented: the last tokens are one pattern, several times in a row."""
    for count in range(1, len(tokens) + 1):
        for size in range(max(1, min_pattern_size), max_pattern_size + 1):
            length = max(min_count * size, min_repeated_tokens)
            last = tokens[count - length : count]
            if length <= count and all(token == last[place % size] for place, token in enumerate(last)):
                return count
    return None


def test_the_rule_is_the_documented_one():
    draw = random.Random(5)
    for _ in range(300):
        letters = draw.choice([1, 2, 3])
        tokens = [draw.randrange(letters) for _ in range(30)] + [draw.randrange(2)] * draw.randrange(9)
        largest = draw.randint(1, 6)
        rule = {
            "max_pattern_size": largest,
            "min_pattern_size": draw.randint(0, largest),
            "min_count": draw.randint(2, 4),
            "min_repeated_tokens": draw.choice([0, 0, 9]),
        }
        assert end_of(tokens, **rule) == slow_end_of(tokens, **rule), (tokens, rule)


@pytest.mark.parametrize(("size", "end"), [(1, 201), (30, 201), (66, 201), (100, 301), (256, 769), (257, None)])
def test_a_loop_ends_after_200_tokens_or_three_times(size, end):
    tokens = [-1, *list(range(size)) * (2000 // size)]
    assert end_of(tokens, **REPETITION_RULE) == end


def test_texts_that_only_look_alike_go_on():
    rows = [token for row in range(300) for token in (1, 2, 3, 10 + row, 4, 5, 6)]  # a list with numbers
    ruler, zeros = [7] * 150, [8, 9] * 64
    assert end_of([*rows, *ruler, 1, *zeros, *rows], **REPETITION_RULE) is None


@pytest.fixture(scope="module")
def engine():
    with kvkeep.Engine(*kvkeep.load(), budget=64, rows=2) as made:
        yield made


def said(engine, rule, **sampling):
    token = engine.tokenizer.encode(" dog", add_special_tokens=False)[-1]
    sampling = {"max_new_tokens": 40, "logit_bias": {token: 100}, "repetition_detection": rule, **sampling}
    (result,) = engine.generate(kvkeep.Request(prompt="the", sampling=kvkeep.SamplingParams(**sampling)))
    return result.finish_reason, len(result.token_ids)


@pytest.mark.long
def test_a_repetition_ends_a_request_of_the_engine(engine):
    rule = {"max_pattern_size": 2, "min_count": 5}
    assert said(engine, rule) == ("repetition", 5)
    assert said(engine, RepetitionDetectionParams(**rule)) == ("repetition", 5)
    assert said(engine, rule, min_new_tokens=9) == ("repetition", 10)
    assert said(engine, rule, max_new_tokens=5) == ("length", 5)
    assert said(engine, True, max_new_tokens=300) == ("repetition", 200)
    for off in (None, False, {}, {"max_pattern_size": 0}):
        assert said(engine, off) == ("length", 40)


def test_a_session_keeps_the_turn_that_a_repetition_has_ended(engine):
    session = engine.session()
    token = engine.tokenizer.encode(" dog", add_special_tokens=False)[-1]
    rule = {"max_pattern_size": 2, "min_count": 4}
    sampling = kvkeep.SamplingParams(logit_bias={token: 100}, repetition_detection=rule)
    result = session.ask("the cat", sampling)
    assert (result.finish_reason, session.token_ids[-4:]) == ("repetition", (token,) * 4)
    assert session.ask("and", sampling).finish_reason == "repetition"


WRONG = [
    ("on", "is no rule; give True"),
    (5, "is no rule"),
    ({"max_pattern_size": 4}, "min_count=0 is no repetition"),
    ({"max_pattern_size": 4, "min_count": 1}, "min_count=1 is no repetition"),
    ({"max_pattern_size": 4, "min_count": 3, "min_pattern_size": 5}, "min_pattern_size=5 is more than"),
    ({"max_pattern_size": -1}, "max_pattern_size=-1 is outside 0"),
    ({"max_pattern_size": 10**9, "min_count": 2}, "outside 0"),
    ({"max_pattern_size": "4"}, "is not a whole number"),
    ({"size": 4}, "there is no 'size', but max_pattern_size"),
    ({4: 4}, "there is no 4, but"),
    ({"": 4}, "there is no '', but"),
    ({0: 4}, "there is no 0, but"),
]


def test_what_is_no_rule_is_refused():
    for rule, word in WRONG:
        with pytest.raises(InputError, match=f"repetition_detection.*{word}"):
            kvkeep.SamplingParams(repetition_detection=rule)


def test_the_command_line_reads_on_off_and_numbers():
    assert parse_repetition_detection("on", "--r") is True
    assert parse_repetition_detection("off", "--r") is False
    assert parse_repetition_detection(f"max_pattern_size={' ' * 30}8, min_count=3", "--r") == {
        "max_pattern_size": 8,
        "min_count": 3,
    }
    for wrong in ("yes", "8", "max_pattern_size=", "=3", "max_pattern_size=-3", "max_pattern_size=3.5", ","):
        with pytest.raises(InputError, match="--r"):
            parse_repetition_detection(wrong, "--r")


@pytest.mark.real
@pytest.mark.parametrize("name", real_folders.NAMES)
def test_endless_loops_of_pretrained_models_end(name):
    engine = kvkeep.Engine(*kvkeep.load(real_folders.folder(name)), budget=1024, rows=1)
    sampling = kvkeep.SamplingParams(max_new_tokens=1024, repetition_detection=True)
    request = kvkeep.Request(prompt="yes, yes, yes, yes, yes, yes, yes,", raw=True, sampling=sampling)
    (result,) = engine.generate(request)
    assert result.finish_reason == "repetition"
