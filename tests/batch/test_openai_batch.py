"""OpenAI's batch files: answered in their own format beside other lines, resumed after a kill, errors in a file."""

import json
import os
import random
import signal
import time
from pathlib import Path

import processes
import pytest
from commands import result_of, run, write

from kvkeep import result_files
from kvkeep.batch.input import BadLine, InputLine, parse
from kvkeep.batch.output import OutputFile
from kvkeep.batch.survey import Survey
from kvkeep.engine import Engine
from kvkeep.engine.request import Event
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError
from kvkeep.openai.requests import CHAT, COMPLETIONS

SMALL = ("--budget", 24, "-n", 3)


def chat(name, words="Hello", **body):
    messages = [{"role": "user", "content": words}]
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": {"messages": messages, **body}}


def text(name, prompt="Once upon a time", **body):
    return {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": {"prompt": prompt, **body}}


def answers(path):
    """Answers by custom_id; completions of other lines by their number."""
    entries = [json.loads(raw) for raw in path.read_bytes().splitlines()]
    found = {entry["custom_id"] if "response" in entry else entry["completion"]["line"]: entry for entry in entries}
    assert len(found) == len(entries)
    return found


def texts(entry):
    body = entry["response"]["body"]
    return [choice.get("text", choice.get("message", {}).get("content")) for choice in body["choices"]]


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.mark.slow
def test_each_line_is_answered_in_its_own_format(tmp_path, target):
    messages = [{"role": "user", "content": "Hello"}]
    lines = [chat("a", model="gpt", max_tokens=4), text("b"), {"messages": messages, "id": 3}, {"prompt": "Hello"}]
    source = write(tmp_path / "in.jsonl", *lines)
    result = run("-i", source, "-o", target, *SMALL)
    assert result.exit_code == 0, result.said
    assert "lines name the model gpt; embedded answers all lines" in result.said
    found = answers(target)
    assert set(found) == {"a", "b", 3, 4}
    entry = found["a"]
    assert list(entry) == ["id", "custom_id", "response", "error", "kvkeep", "made_by"]
    assert (entry["error"], entry["response"]["status_code"]) == (None, 200)
    assert entry["response"]["body"]["object"] == "chat.completion"
    assert entry["response"]["body"]["usage"]["completion_tokens"] == 4
    assert texts(entry)[0].startswith(found[3]["completion"]["text"])
    assert (found[3]["id"], "custom_id" in found[3]) == (3, False)
    assert found["b"]["response"]["body"]["object"] == "text_completion"
    raw = write(tmp_path / "raw.jsonl", {"prompt": "Once upon a time"})
    assert run("-i", raw, "-o", tmp_path / "raw.out", "--raw", *SMALL).exit_code == 0
    assert texts(found["b"]) == [answers(tmp_path / "raw.out")[1]["completion"]["text"]]
    before = target.read_bytes()
    assert run("-i", source, "-o", target, *SMALL).exit_code == 0
    assert target.read_bytes() == before


@pytest.mark.slow
def test_several_texts_for_one_prompt(tmp_path, target):
    source = write(
        tmp_path / "in.jsonl",
        text("a", n=3, temperature=5.0, max_tokens=8),
        text("b", ["Once", [5, 6, 7]], n=2, logprobs=1, temperature=0),
        chat("c", n=2, seed=5, temperature=5.0, max_tokens=8),
        chat("d", n=2, seed=5, temperature=5.0, max_tokens=8),
    )
    result = run("-i", source, "-o", target, *SMALL, "--max-rows", 2)
    assert result.exit_code == 0, result.said
    found = answers(target)
    assert len(set(texts(found["a"]))) == 3
    assert texts(found["c"]) == texts(found["d"])
    assert len(set(texts(found["c"]))) == 2
    choices = found["b"]["response"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert all("".join(choice["logprobs"]["tokens"]) == choice["text"] for choice in choices)
    assert "".join(choices[2]["logprobs"]["tokens"]) == choices[3]["text"]  # greedy


@pytest.mark.long
def test_parts_of_characters_have_log_probabilities(tmp_path, target):
    form = {"structured_outputs": {"choice": ["a 😀"]}, "max_tokens": 32}
    source = write(tmp_path / "in.jsonl", chat("a", logprobs=True, **form), text("b", logprobs=2, **form))
    assert run("-i", source, "-o", target, *SMALL).exit_code == 0
    a, b = (answers(target)[name]["response"]["body"] for name in "ab")
    content = a["choices"][0]["logprobs"]["content"]
    assert len(content) == a["usage"]["completion_tokens"] > len("a 😀")
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "a 😀"
    assert {len(named) for named in b["choices"][0]["logprobs"]["top_logprobs"]} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("first", [chat("a"), text("a"), chat("a", tools=[1]), {"custom_id": "a", "body": {}}])
def test_a_name_that_occurs_twice_is_refused_before_anything_runs(tmp_path, target, first):
    source = write(tmp_path / "in.jsonl", chat("b"), first, text("a", "Tom"))
    faulty = "tools" in first["body"] or "url" not in first
    result = run("-i", source, "-o", target, *SMALL)
    assert (result.exit_code, target.exists()) == (2, False)
    assert (f"Line {2 if faulty else 3} cannot be run" in result.said, "Nothing was generated" in result.said) == (
        True,
        True,
    )
    assert run("-i", source, "-o", target, *SMALL, "--skip-bad").exit_code == 0
    aside = [json.loads(raw) for raw in Path(f"{target}.bad").read_bytes().splitlines()]
    assert [entry["custom_id"] for entry in aside] == ["a"] * (1 + faulty)
    assert "its custom_id is that of line 2, too" in aside[-1]["response"]["body"]["error"]["message"]
    assert set(answers(target)) == ({"b"} if faulty else {"a", "b"})


@pytest.mark.slow
def test_bad_lines_go_to_a_file_of_errors_each_in_its_format(tmp_path, target):
    source = write(tmp_path / "in.jsonl", chat("a"), chat("b", tools=[1]), text("c", [10**6]), "{nope", {"prompt": ""})
    refused = run("-i", source, "-o", target, *SMALL)
    assert refused.exit_code == 2
    assert "Line 2 cannot be run: the parameter tools[0] is not like" in refused.said
    result = run("-i", source, "-o", target, *SMALL, "--skip-bad")
    assert result.exit_code == 0, result.said
    assert list(answers(target)) == ["a"]
    b, c, nope, empty = [json.loads(raw) for raw in Path(f"{target}.bad").read_bytes().splitlines()]
    assert list(b) == ["id", "custom_id", "response", "error"]
    assert (b["custom_id"], b["error"], b["response"]["status_code"]) == ("b", None, 400)
    assert b["response"]["body"]["error"]["type"] == "invalid_request_error"
    assert b["response"]["body"]["error"]["param"] == "tools[0]"
    assert (c["custom_id"], "token 1000000" in c["response"]["body"]["error"]["message"]) == ("c", True)
    assert (nope["line"], nope["text"], empty["line"]) == (4, "{nope", 5)
    write(source, chat("a"), chat("b"))
    assert run("-i", source, "-o", target, *SMALL, "--skip-bad").exit_code == 0
    assert set(answers(target)) == {"a", "b"}
    assert Path(f"{target}.bad").exists()  # "{nope" is nowhere else


@pytest.mark.long
def test_errors_of_lines_that_were_mended_go_away(tmp_path, target):
    source, aside = write(tmp_path / "in.jsonl", chat("a"), chat("b", tools=[1])), Path(f"{target}.bad")
    assert run("-i", source, "-o", target, *SMALL, "--skip-bad").exit_code == 0
    assert aside.exists()
    write(source, chat("a"), chat("b"))
    assert run("-i", source, "-o", target, *SMALL).exit_code == 0
    assert (set(answers(target)), aside.exists()) == ({"a", "b"}, False)


def test_lines_that_the_engine_refuses(tmp_path, target):
    source = write(tmp_path / "in.jsonl", chat("a"), chat("b", budget=99), chat("c", policy="full", max_tokens=999))
    result = run("-i", source, "-o", target, *SMALL, "--skip-bad")
    assert result.exit_code == 0, result.said
    assert list(answers(target)) == ["a"]
    aside = [json.loads(raw) for raw in Path(f"{target}.bad").read_bytes().splitlines()]
    assert [entry["custom_id"] for entry in aside] == ["b", "c"]


@pytest.mark.parametrize(
    "content", ["my notes\n", '{"id": "batch_req_1_x", "custom_id": 1, "response": {}, "error": 1}\n']
)
def test_a_foreign_file_in_the_place_of_errors_stays(tmp_path, target, content):
    aside = Path(f"{target}.bad")
    aside.write_text(content)
    source = write(tmp_path / "in.jsonl", chat("a"))
    assert run("-i", source, "-o", target, *SMALL).exit_code == 0
    assert aside.read_text() == content


# ------------------------------------------------------------------ lines that fail


def failing(monkeypatch, numbers):
    """Let requests of these numbers end with an error."""
    step = Engine.step

    def failed(event):
        result = result_of(finish_reason="error", error="the step ran into a wall.", token_ids=())
        return Event(event.id, None, "", result)

    def with_failures(self):
        return [failed(e) if e.result and e.id in numbers else e for e in step(self)]

    monkeypatch.setattr(Engine, "step", with_failures)


@pytest.mark.slow
def test_a_line_fails_with_any_of_its_requests_and_is_tried_again(tmp_path, target, monkeypatch):
    source = write(
        tmp_path / "in.jsonl",
        chat("a", n=3, temperature=1),
        {"prompt": "Hello"},
        chat("b", n=2, seed=1, temperature=1),
        {"prompt": "Tom"},
    )
    failing(monkeypatch, {1, 6})
    result = run("-i", source, "-o", target, *SMALL, "--max-rows", 2)
    assert result.exit_code == 1
    assert "2 of 4 lines failed, first line 1: the step ran into a wall" in result.said
    assert set(answers(target)) == {2, "b"}
    a, tom = [json.loads(raw) for raw in Path(f"{target}.bad").read_bytes().splitlines()]
    assert (a["custom_id"], a["response"]["status_code"]) == ("a", 500)
    assert a["response"]["body"]["error"]["type"] == "server_error"
    assert (tom["line"], tom["reason"]) == (4, "the step ran into a wall.")
    monkeypatch.undo()
    assert run("-i", source, "-o", target, *SMALL).exit_code == 0
    assert set(answers(target)) == {"a", 2, "b", 4}
    assert not Path(f"{target}.bad").exists()


def test_bad_lines_and_lines_that_fail_share_a_file(tmp_path, target, monkeypatch):
    source = write(tmp_path / "in.jsonl", chat("a", tools=[1]), chat("b"), chat("c"))
    failing(monkeypatch, {1})
    assert run("-i", source, "-o", target, *SMALL, "--skip-bad").exit_code == 1
    aside = [json.loads(raw) for raw in Path(f"{target}.bad").read_bytes().splitlines()]
    assert [(e["custom_id"], e["response"]["status_code"]) for e in aside] == [("a", 400), ("c", 500)]


def test_a_file_of_errors_that_cannot_be_written_costs_no_answer(tmp_path, target, monkeypatch):
    Path(f"{target}.bad").write_text("my notes\n")
    source = write(tmp_path / "in.jsonl", chat("a"), chat("b"))
    failing(monkeypatch, {0})
    result = run("-i", source, "-o", target, *SMALL)
    assert (result.exit_code, "holds something else" in result.said) == (1, True)
    assert "1 of 2 lines failed" in result.said
    assert set(answers(target)) == {"b"}


@pytest.mark.slow
def test_errors_of_a_job_to_standard_output(tmp_path):
    source = write(tmp_path / "in.jsonl", chat("a"), chat("b", tools=[1]))
    out, err = tmp_path / "stdout", tmp_path / "stderr"
    args = ("generate", "-i", source, "-o", "-", *SMALL, "--skip-bad")
    process = processes.kvkeep(*args, closed=set(), out=out, err=err)
    process.join()
    assert process.exitcode == 0, err.read_text()
    assert set(answers(out)) == {"a"}
    (entry,) = [json.loads(line) for line in err.read_text().splitlines() if line.startswith("{")]
    assert (entry["custom_id"], entry["response"]["status_code"]) == ("b", 400)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_lines_that_are_in_the_file_of_errors_alone_are_not_lost(tmp_path, target, monkeypatch, fails):
    aside = Path(f"{target}.bad")
    source = write(tmp_path / "in.jsonl", chat("a"), {"prompt": "Hello", "seed": 7})
    assert run("-i", source, "-o", target, *SMALL, "--skip-bad").exit_code == 0
    before = aside.read_bytes()
    write(source, chat("a"), {"prompt": "Tom"})
    if fails:
        failing(monkeypatch, {0})
    result = run("-i", source, "-o", target, *SMALL)
    assert (result.exit_code, "holds something else" in result.said) == (int(fails), fails)
    assert aside.read_bytes() == before


# ------------------------------------------------------------------ going on


MIXED = [
    chat("a", n=2, temperature=1),
    {"prompt": "Hello", "id": 1},
    text("c", logprobs=1),
    {"prompt": "b", "url": "x"},
]
RAW = [json.dumps(line).encode() for line in MIXED]
LINES = [parse(n, raw, lambda prompt, raw=False: [1], SamplingParams()) for n, raw in enumerate(RAW, start=1)]


def go_on(path):
    """Write the lines that are missing, as a job does."""
    survey = Survey()
    for line in LINES:
        assert survey.add(line) is None
    with OutputFile.open(path) as output:
        output.agree({"model": "m", "policy": "h2o", "budget": 24})
        output.check(survey.digests, survey.batch_lines)
        for line in LINES:
            if line.number not in output.done:
                output.write(line, *(result_of() for _ in line.requests))
        return output.finish()


def test_an_output_of_two_formats_that_was_cut_at_any_byte_is_completed(tmp_path, monkeypatch):
    monkeypatch.setattr(result_files, "sync", lambda file: None)
    monkeypatch.setattr(time, "time", lambda: 1.0)
    path = tmp_path / "out.jsonl"
    assert go_on(path) == {1, 2, 3, 4}
    whole = path.read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in sorted({*range(120), *range(120, len(whole), 23), *(end + k for end in ends for k in range(-2, 4))}):
        for rest in (b"", b"\0" * 7):
            path.write_bytes(whole[:cut] + (rest if whole[:cut] else b""))
            if rest and whole[:cut].endswith(b"\n"):
                continue  # zeros after a whole line: see test_output
            assert go_on(path) == {1, 2, 3, 4}, whole[:cut]
            assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())


@pytest.mark.parametrize(
    "foreign",
    [
        b'{"id": "batch_req_1_0123", "x": 1}',
        b'{"id": "batch_req_7',
        b'{"id": 1}\n',
        b'{"id": "batch_req_1_' + b"0" * 32 + b'"}\n',
        b'{"id": "batch_req_' + b"9" * 9999 + b"_" + b"0" * 32 + b'", "made_by": {}}\n',
        b'{"id": "batch_req_1_' + b"0" * 32 + b'", "made_by": [1]}\n',
    ],
)
def test_a_file_that_looks_like_answers_is_left_alone(tmp_path, foreign):
    path = tmp_path / "out.jsonl"
    path.write_bytes(foreign)
    with pytest.raises(InputError):
        go_on(path)
    assert path.read_bytes() == foreign


@pytest.mark.slow
def test_a_job_of_two_formats_that_is_killed_goes_on(tmp_path, target, comparable):
    entries = [chat(f"c{i}", f"A dog {i}", n=1 + i % 3, temperature=2.0) for i in range(12)]
    entries += [{"prompt": f"Tom {i}", "id": i} for i in range(12)]
    random.Random(1).shuffle(entries)
    source = write(tmp_path / "in.jsonl", *entries)
    args = ["generate", "-i", str(source), "-o", str(target), "--budget", "16", "--max-rows", "4", "-n", "10"]
    args += comparable.words  # kills change which rows are beside a text
    size, rng = 0, random.Random(3)
    for _ in range(3):
        process = processes.kvkeep(*args)
        enough = size + rng.randrange(1200)
        while not target.exists() or target.stat().st_size <= enough:
            assert process.exitcode is None, "the job ended before it was killed"
            time.sleep(0.002)
        process.kill()
        process.join()
        size = target.stat().st_size
    assert run(*args[1:]).exit_code == 0
    found = answers(target)
    assert len(found) == len(entries)
    unbroken = tmp_path / "unbroken.jsonl"  # goes on after one line, which says in which way the weights are laid out:
    unbroken.write_bytes(target.read_bytes().splitlines(keepends=True)[0])  # it is measured, and ways round differently
    assert run(*args[1:3], "-o", unbroken, *args[5:]).exit_code == 0
    other = answers(unbroken)
    for name, entry in found.items():
        same = texts if isinstance(name, str) else lambda one: one["completion"]["text"]
        assert same(entry) == same(other[name])


@pytest.mark.slow
def test_ctrl_c_between_the_texts_of_a_line_costs_that_line_alone(tmp_path, target, monkeypatch):
    lines = [{"prompt": "Hello"}, *(chat(name, n=3, temperature=1) for name in "abc")]
    source = write(tmp_path / "in.jsonl", *lines)
    kept = OutputFile.write
    monkeypatch.setattr(OutputFile, "write", lambda self, *a: (kept(self, *a), os.kill(os.getpid(), signal.SIGINT))[0])
    result = run("-i", source, "-o", target, *SMALL, "--max-rows", 2)
    assert (result.exit_code, "goes on from there" in result.said) == (130, True)
    assert 1 <= len(answers(target)) < 4
    monkeypatch.undo()
    assert run("-i", source, "-o", target, *SMALL, "--max-rows", 2).exit_code == 0
    assert set(answers(target)) == {1, "a", "b", "c"}


def test_a_full_disk_loses_nothing():
    with pytest.raises(InputError, match="No space left"), OutputFile.open(Path("/dev/full")) as output:
        output.write(LINES[0], result_of(), result_of())


def test_a_line_whose_body_has_changed_is_not_confused(tmp_path, target):
    source = write(tmp_path / "in.jsonl", chat("a"), chat("b"))
    assert run("-i", source, "-o", target, *SMALL).exit_code == 0
    before = target.read_bytes()
    write(source, chat("a", max_tokens=2), chat("b"))
    result = run("-i", source, "-o", target, *SMALL)
    assert (result.exit_code, "Line 1 of the input is not the one" in result.said) == (2, True)
    other = run("-i", source, "-o", target, "--budget", 23, "-n", 3)
    assert (other.exit_code, "written with budget=24" in other.said) == (2, True)
    assert target.read_bytes() == before


def test_fields_of_others_in_lines_are_honoured_or_named(tmp_path, target):
    unread = {"response_format": {"type": "text", "baz": 1}, "chat_template_kwargs": {"enable_thinking": False}}
    lines = [
        chat("a", guided_choice=["yes", "no"], foo=1, bar=2),
        chat("b", truncate_prompt_tokens=3),
        chat("c", **unread),
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = run("-i", source, "-o", target, "-n", 3)
    assert found.exit_code == 0, found.said
    named = ["response_format.baz", "chat_template_kwargs.enable_thinking"]
    assert f"unknown and ignored: bar, {named[1]}, foo, {named[0]}" in " ".join(found.said.split())
    first, second, third = sorted(map(json.loads, target.read_text().splitlines()), key=lambda line: line["custom_id"])
    assert first["response"]["body"]["choices"][0]["message"]["content"] in ("yes", "no")
    assert first["ignored"] == ["foo", "bar"]
    assert "ignored" not in second
    assert third["ignored"] == named
    assert second["response"]["body"]["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "prompt", "new"), [({"max_tokens": 4}, 16, 4), ({}, 19, 1), ({"max_tokens": 30}, 1, 30)]
)
def test_a_prompt_is_cut_to_what_the_model_takes_as_in_a_server(body, prompt, new):
    line = text("a", prompt=list(range(5, 45)), truncate_prompt_tokens=-1, **body)
    defaults = SamplingParams(max_new_tokens=7)
    found = parse(1, json.dumps(line).encode(), lambda ids, raw: ids, defaults, max_model_len=20)
    assert (len(found.request.prompt), found.request.sampling.max_new_tokens) == (prompt, new)
    assert found.request.prompt[-1] == 44


@pytest.mark.long
def test_the_model_says_how_long_a_cut_prompt_is(tmp_path, target):
    line = text("a", prompt=[*range(5, 405)] * 6, truncate_prompt_tokens=-1, max_tokens=2)
    source = write(tmp_path / "in.jsonl", line)
    assert run("-i", source, "-o", target, "--budget", 24, "--prefill-chunk", 512).exit_code == 0
    assert answers(target)["a"]["response"]["body"]["usage"]["prompt_tokens"] == 2046
    unlimited = ("--budget", 24, "--positions", "slot", "--policy", "streaming_llm", "--prefill-chunk", 512)
    assert run("-i", source, "-o", tmp_path / "slots.jsonl", *unlimited).exit_code == 0
    assert answers(tmp_path / "slots.jsonl")["a"]["response"]["body"]["usage"]["prompt_tokens"] == 2400


# ------------------------------------------------------------------ hostile lines


VALUES = [None, True, 0, -1, 1.5, "", "x", [], ["x"], {}, {"a": 1}, "9" * 400, 10**400, "\ud83d", [[[]]], "\0", "POST"]


@pytest.mark.whole
@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_wrong_values_in_every_field(name):
    for value in VALUES:
        line = {**chat("a"), name: value}
        found = parse(1, json.dumps(line).encode(), lambda prompt, raw=False: [1], SamplingParams())
        if name == "custom_id" and isinstance(value, str) and value:
            assert isinstance(found, InputLine)
        elif (name, value) != ("method", "POST"):
            assert isinstance(found, BadLine)
            assert 0 < len(found.reason) < 400


@pytest.mark.whole
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({**chat("a"), "method": "GET"}, 'its method is "GET"; give "POST"'),
        ({**chat("a"), "method": "post"}, 'its method is "post"'),
        ({**chat("a"), "url": "/v1/embeddings"}, "its url is"),
        ({**chat("a"), "url": "https://host.example/v1/chat/completions"}, "its url is"),
        ({**chat("a"), "url": COMPLETIONS}, "the parameter messages is unknown"),
        ({**text("a"), "url": CHAT}, "the parameter prompt is unknown"),
        ({**chat("a"), "max_tokens": 5}, 'its field "max_tokens" is none of'),
        ({**chat("a"), "prompt": "x"}, 'its field "prompt" is none of'),
        ({"custom_id": "a", "method": "POST"}, "has no url"),
        ({"body": {"messages": []}}, "has no custom_id"),
        (chat("a", n=2), "the parameter n is 2, and all texts are equal without a temperature"),
        ({"url": "x", "text": "y"}, 'either "prompt" or "messages"'),
        ({"body": "y"}, 'either "prompt" or "messages"'),
    ],
)
def test_lines_that_are_nearly_of_the_format(line, words):
    found = parse(1, json.dumps(line).encode(), lambda prompt, raw=False: [1], SamplingParams())
    assert isinstance(found, BadLine)
    assert words in found.reason


@pytest.mark.parametrize("fields", [{"url": "x", "method": "POST"}, {"body": {}}, {"custom_id": "a", "url": CHAT}])
def test_a_prompt_with_such_fields_is_a_line_of_its_own_kind(fields):
    line = parse(1, json.dumps({"prompt": "x", **fields}).encode(), lambda prompt: [1], SamplingParams())
    assert (line.asked, line.fields) == (None, fields)
    bad = parse(1, json.dumps({"prompt": "x", "seed": 1, **fields}).encode(), lambda prompt: [1], SamplingParams())
    assert (bad.custom_id, "seed belongs into" in bad.reason) == (None, True)


def test_names_of_any_characters_and_length(tmp_path, target):
    names = ["\ud83d", "\u2028", "\0", "x" * 10**6, '"', "é", "batch_req_1"]
    source = write(tmp_path / "in.jsonl", *(chat(name, max_tokens=1) for name in names))
    for _ in range(2):
        result = run("-i", source, "-o", target, *SMALL)
        assert result.exit_code == 0, result.said[:500]
    assert set(answers(target)) == set(names)


@pytest.mark.parametrize("model", ["\ud83d", "\x1b[31m", "x" * 10**5, "a`b=1`", "\n\n"])
def test_models_of_any_name_are_said_in_a_line(tmp_path, target, model):
    source = write(tmp_path / "in.jsonl", chat("a", model=model, max_tokens=1))
    result = run("-i", source, "-o", target, *SMALL)
    assert result.exit_code == 0, result.said
    assert "embedded answers all lines" in result.said
    assert "\x1b" not in result.output
    assert len(result.output) < 500


def test_what_is_kept_of_a_name_does_not_grow_with_its_length():
    survey = Survey()
    for number, name in enumerate(("x" * 10**6, "y" * 10**6), start=1):
        survey.add(parse(number, json.dumps(chat(name)).encode(), lambda prompt, raw=False: [1], SamplingParams()))
    assert all(len(key) < 100 for key in survey._names)
