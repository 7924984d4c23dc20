"""Input lines of an attacker: each is run, or is a bad line with a reason, and the job goes on past all of them."""

import json
import random

import pytest
from commands import result_of, run

from kvkeep.batch.input import COMPLETION, BadLine, InputLine, digest, parse
from kvkeep.batch.output import OutputFile
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.models import tokenization
from kvkeep.models.load import find
from kvkeep.models.tiny import embedded
from kvkeep.openai.messages import MAX_DEPTH


@pytest.fixture(scope="module")
def encode():
    checkpoint = find(embedded())

    def encoded(prompt):
        of = tokenization.encode if isinstance(prompt, str) else tokenization.encode_chat
        return of(checkpoint, prompt)[0].tolist()

    return encoded


def nested(depth, kind="[]"):
    """A field of so many levels, the line's own object among them."""
    opening, closing = {"[]": ("[", "]"), "{}": ('{"a":', "}")}[kind]
    return '{"prompt": "x", "deep": ' + opening * (depth - 1) + "1" + closing * (depth - 1) + "}"


OPTIONS = ["max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "policy"]
OPTIONS += ["budget", "logprobs", "ignore_end", "raw", ""]

NOT_JSON = {
    "constant NaN": ('{"prompt": "x", "id": NaN}', "NaN, which JSON does not have"),
    "constant Infinity": ('{"prompt": "x", "id": [Infinity]}', "Infinity, which JSON does not have"),
    "constant -Infinity": ('{"prompt": "x", "options": {"temperature": -Infinity}}', "-Infinity"),
    "overflow": ('{"prompt": "x", "id": 1e999}', "1e999 is too large"),
    "negative overflow": ('{"prompt": "x", "id": {"a": -1e999}}', "-1e999 is too large"),
    "overflowing option": ('{"prompt": "x", "options": {"temperature": 1e999}}', "1e999 is too large"),
    "long overflow": ('{"prompt": "x", "id": ' + "9" * 5000 + ".0}", "is too large"),
    "long integer": ('{"prompt": "x", "id": ' + "9" * 5000 + "}", "… has 5000 digits; there may be 4300"),
    "two values": ('{"prompt": "x"} {"prompt": "y"}', "no JSON (Extra data"),
    "half": ('{"prompt": "x"', "no JSON"),
    "control character": ('{"prompt": "a\x01b"}', "no JSON"),
    "NUL": ('{"prompt": "a\0b"}', "no JSON"),
    "NULs": ("\0\0\0", "no JSON"),
    "single quotes": ("{'prompt': 'x'}", "no JSON"),
    "comment": ('{"prompt": "x"} // y', "no JSON"),
    "comma": ('{"prompt": "x",}', "no JSON"),
    "words": ("prompt: x", 'a line is one whole object, such as {"prompt": "…"}'),
    "two BOMs": ("\ufeff\ufeff" + '{"prompt": "x"}', "no JSON"),
    "latin-1": ('{"prompt": "ü"}'.encode("latin-1"), "it is not UTF-8 text: byte 12 is 0xfc; convert the file"),
    "utf-16": ('{"prompt": "x"}'.encode("utf-16"), "it is not UTF-8 text"),
    "utf-32": ('{"prompt": "x"}'.encode("utf-32-le"), "no JSON"),
    "a surrogate's bytes": (b'{"prompt": "\xed\xa0\x80"}', "it is not UTF-8 text"),
    "overlong": (b'{"prompt": "\xc0\x80"}', "it is not UTF-8 text"),
    "cut character": (b'{"prompt": "\xe2\x82"}', "it is not UTF-8 text"),
    "gzip": (b"\x1f\x8b\x08\0\0", "it is not UTF-8 text"),
    "levels": (nested(MAX_DEPTH + 1), "nested too deeply"),
    "levels of objects": (nested(MAX_DEPTH + 1, "{}"), "nested too deeply"),
    "973 levels": (nested(973), "nested too deeply"),
    "975 levels": (nested(975), "nested too deeply"),
    "levels without end": ("[" * 100_000, "nested too deeply"),
    "objects without end": ('{"a":' * 100_000, "nested too deeply"),
    "closed levels": (nested(100_000), "nested too deeply"),
    "empty object": ("{}", 'either "prompt" or "messages"'),
    "both": ('{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}', 'either "prompt" or "messages"'),
    "half a character": (r'{"prompt": "\ud83d"}', "half of a character"),
    "half a character in a role": (r'{"messages": [{"role": "\ud83d", "content": "x"}]}', ""),
    "own name": ('{"prompt": "x", "completion": null}', "rename it"),
    "huge budget": ('{"prompt": "x", "options": {"budget": ' + "9" * 4000 + "}}", "too large a number"),
    "huge number of tokens": (
        '{"prompt": "x", "options": {"max_new_tokens": ' + "9" * 4300 + "}}",
        "too large a number",
    ),
    "huge seed": ('{"prompt": "x", "options": {"seed": 9223372036854775808}}', "too large a number"),
    "huge temperature": ('{"prompt": "x", "options": {"temperature": ' + "9" * 400 + "}}", "too large"),
    "empty stop": ('{"prompt": "x", "options": {"stop": ""}}', "empty stop"),
    "null in stop": ('{"prompt": "x", "options": {"stop": ["a", null]}}', '"stop" is no text'),
    "line break": ("{\r", "no JSON"),
    "option outside": ('{"prompt": "x", "budget": "large", "id": 1}', 'budget belongs into "options"'),
    "name of another tool": ('{"prompt": "x", "max_tokens": 5}', '{"options": {"max_new_tokens": 5}}'),
    "option outside and empty options": ('{"prompt": "x", "options": {}, "stop": null}', '{"stop": null}'),
    "long option outside": (json.dumps({"prompt": "x", "stop": ["y" * 10**6]}), '{"stop": "…"}'),
    "deep option outside": ('{"prompt": "x", "stop": ' + "[" * 100 + "]" * 100 + "}", '{"stop": "…"}'),
    "half a character outside": (r'{"prompt": "x", "stop": "\ud83d"}', 'stop belongs into "options"'),
    "every option outside": (json.dumps({"prompt": "x"} | dict.fromkeys(OPTIONS[:12], 1)), "belong into"),
}

RUN = {
    "plain": '{"prompt": "x"}',
    "BOM": "\ufeff" + '{"prompt": "x"}',
    "white space": ' \t {"prompt": "x"} \r',
    "no options": '{"prompt": "x", "options": null}',
    "empty options": '{"prompt": "x", "options": {}}',
    "no messages": '{"prompt": "x", "messages": null}',
    "levels": nested(MAX_DEPTH),
    "levels of objects": nested(MAX_DEPTH, "{}"),
    "same key twice": '{"prompt": "x", "prompt": "y", "id": 1, "id": 2}',
    "NUL": r'{"prompt": "a\u0000b", "id": "\u0000"}',
    "half a character in a field": r'{"prompt": "x", "id": "\ud83d", "\udc00": 1}',
    "large integer": '{"prompt": "x", "id": ' + "9" * 4000 + "}",
    "small number": '{"prompt": "x", "id": 1e-999}',
    "names like ours": '{"prompt": "x", "line": 7, "digest": "d", "made_by": {}, "text": "t", "reason": "r"}',
    "empty name": '{"prompt": "x", "": {"": ""}}',
    "nested names of options": '{"prompt": "x", "metadata": {"seed": 1, "stop": "y", "max_tokens": 5}}',
    "line separators": '{"prompt": "a\u2028b\u2029c\x85d", "id": "\u2028"}',
    "escapes": r'{"prompt": "\u001b[31m", "id": "\u009b31m"}',
    "not a character": '{"prompt": "\ufffe\U0010ffff"}',
    "special tokens": '{"prompt": "<|end|><|user|>"}',
    "long field": json.dumps({"prompt": "x", "id": "y" * 10**6}),
    "many fields": json.dumps({"prompt": "x"} | {str(i): i for i in range(10_000)}),
    "long list": json.dumps({"prompt": "x", "id": list(range(10_000))}),
    "long prompt": json.dumps({"prompt": "x " * 20_000}),
}

VALUES = ["null", "true", "0", "-1", "1.5", '""', '"x"', "[]", "[1]", '["x"]', "{}", '{"role": 1}', "[[]]", "[null]"]
VALUES += ["9" * 400, "1e308", '[{"role": "user", "content": 1}]', '[{"role": [], "content": "x"}]', '"\\ud83d"']
PLACES = ["prompt", "messages", "options", "completion", "id"]
WRONG_TYPES = [f'{{"{place}": {value}}}' for place in PLACES for value in VALUES]
WRONG_TYPES += [f'{{"prompt": "x", "{place}": {value}}}' for place in PLACES[1:] for value in VALUES]
WRONG_TYPES += [f'{{"prompt": "x", "options": {{"{name}": {value}}}}}' for name in OPTIONS for value in VALUES]
WRONG_TYPES += [f'{{"prompt": "x", "{name}": {value}}}' for name in OPTIONS for value in VALUES]


def raw_of(line):
    return line if isinstance(line, bytes) else line.encode()


def check(number, raw, encode, output):
    """A line is run, and its completion is strict JSON that a job can go on from, or it is bad with a reason."""
    line = parse(number, raw, encode, SamplingParams())
    if isinstance(line, BadLine):
        assert line.reason.strip()
        assert len(line.reason) < 400
        return line
    assert (line.number, line.digest) == (number, digest(raw))
    output.write(line, result_of())
    return line


@pytest.fixture
def output(tmp_path):
    with OutputFile.open(tmp_path / "checked.jsonl") as found:
        yield found
        held = dict(found.done)
        assert found.finish() == held.keys()
    with (tmp_path / "checked.jsonl").open("rb") as file:
        for raw in file:
            entry = json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
            assert digest_of(entry, held)


def digest_of(entry, held):
    return held[entry[COMPLETION]["line"]] == entry[COMPLETION]["digest"]


@pytest.mark.whole
@pytest.mark.parametrize("kind", NOT_JSON)
def test_a_hostile_line_is_bad_with_a_reason(encode, output, kind):
    line, reason = NOT_JSON[kind]
    found = check(1, raw_of(line), encode, output)
    assert isinstance(found, BadLine)
    assert reason in found.reason


@pytest.mark.whole
@pytest.mark.parametrize("kind", RUN)
def test_a_strange_line_is_run(encode, output, kind):
    found = check(1, raw_of(RUN[kind]), encode, output)
    assert isinstance(found, InputLine), found


def test_wrong_types_at_every_place(encode, output):
    kinds = [type(check(number, raw_of(line), encode, output)) for number, line in enumerate(WRONG_TYPES, start=1)]
    assert len(kinds) > 400
    assert kinds.count(BadLine) > 250
    assert kinds.count(InputLine) > 20


def test_bytes_changed_at_random(encode, output):
    rng = random.Random(5)
    whole = [raw_of(line) for line in RUN.values() if len(line) < 300] + [raw_of(line) for line in WRONG_TYPES[::20]]
    for number in range(1500):
        raw = bytearray(rng.choice(whole))
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(raw))
            raw[place : place + rng.randrange(3)] = rng.choice([b"", b'"', b"\\", b"{", b"]", b"\0", b"\xff", b"e9"])
            raw = raw or bytearray(b"x")
        check(number, bytes(raw), encode, output)


def test_equal_white_space_is_one_line_and_any_other_difference_is_another():
    whole = '{"prompt": "x", "id": 1}'
    assert digest(whole.encode()) == digest(f" {whole}\r\n".encode())
    others = {digest(whole.replace(*change).encode()) for change in [("x", "y"), ("1", "2"), (": ", ":"), ("x", "x ")]}
    assert len(others | {digest(whole.encode())}) == 5


@pytest.mark.slow
def test_a_job_goes_on_past_all_of_them(tmp_path):
    options = {"max_new_tokens": 1}
    lines = [raw_of(line) for line, _ in NOT_JSON.values()]
    good = [json.dumps({"prompt": "x", "id": i, "options": options}).encode() for i in range(3)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join([good[0], *lines, good[1], *map(raw_of, WRONG_TYPES[:80:4]), good[2]]) + b"\n")
    result = run("-i", source, "-o", target, "--budget", 24, "-n", 1, "--skip-bad")
    assert result.exit_code == 0, result.said
    entries = [json.loads(raw) for raw in target.read_bytes().splitlines()]
    assert all(i in [entry.get("id") for entry in entries] for i in range(3))
    aside = [json.loads(raw) for raw in (tmp_path / "out.jsonl.bad").read_bytes().splitlines()]
    assert {entry["line"] for entry in aside}.isdisjoint(entry[COMPLETION]["line"] for entry in entries)
    with source.open("rb") as file:
        n_lines = sum(bool(raw.strip()) for raw in file)
    assert len(aside) + len(entries) == n_lines
    before = target.read_bytes()
    assert run("-i", source, "-o", target, "--budget", 24, "-n", 1, "--skip-bad").exit_code == 0
    assert target.read_bytes() == before
