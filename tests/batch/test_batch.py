"""Batch jobs: bad lines are named, and a job that is killed at any moment ends with exactly the right lines."""

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import model_folders
import processes
import pytest
import torch
from commands import completions, result_of, run, write
from sweeps import sweep
from typer.testing import CliRunner

from kvkeep.batch.input import COMPLETION, parse
from kvkeep.batch.output import OutputFile
from kvkeep.cli.main import app
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError
from kvkeep.models import packed_weights
from kvkeep.policies import DEFAULT
from kvkeep.policies.registry import parse as parse_policy
from kvkeep.policies.registry import spec

POLICY = spec(parse_policy(DEFAULT))
"""The default policy, as files have it."""


@pytest.fixture
def ten(tmp_path):
    """Ten prompts of different lengths, the third line empty."""
    entries = [
        {"prompt": "Once upon a time " * (1 + i % 3), "id": i, "options": {"max_new_tokens": 3 + i % 4}}
        for i in range(10)
    ]
    return write(tmp_path / "in.jsonl", *entries[:2], "", *entries[2:])


@pytest.mark.slow
def test_every_line_is_answered_and_other_fields_are_carried_through(ten, tmp_path):
    target = tmp_path / "out.jsonl"
    result = run("-i", ten, "-o", target, "--budget", 24, "--max-rows", 3, "--raw")
    assert result.exit_code == 0, result.output
    found = completions(target)
    assert sorted(found) == [1, 2, *range(4, 12)]
    assert sorted(entry["id"] for entry in found.values()) == list(range(10))
    for entry in found.values():
        assert entry[COMPLETION]["new_tokens"] == 3 + entry["id"] % 4 or entry[COMPLETION]["finish_reason"] == "stop"
    one = write(tmp_path / "one.jsonl", {"prompt": "Once upon a time " * 2, "options": {"max_new_tokens": 4}})
    assert run("-i", one, "-o", tmp_path / "one.out", "--budget", 24, "--raw").exit_code == 0
    assert completions(tmp_path / "one.out")[1][COMPLETION]["text"] == found[2][COMPLETION]["text"]


@pytest.mark.slow
def test_a_second_run_does_nothing_and_other_settings_are_refused(ten, tmp_path):
    target = tmp_path / "out.jsonl"
    assert run("-i", ten, "-o", target, "--budget", 24).exit_code == 0
    before = target.read_bytes()
    assert run("-i", ten, "-o", target, "--budget", 24).exit_code == 0
    assert target.read_bytes() == before
    other = run("-i", ten, "-o", target, "--budget", 23)
    assert (other.exit_code, "budget=24" in other.output) == (2, True)
    write(ten, {"prompt": "Something else."})
    changed = run("-i", ten, "-o", target, "--budget", 24)
    assert (changed.exit_code, "Line 1 of the input is not the one" in changed.output) == (2, True)
    foreign = write(tmp_path / "foreign.jsonl", {"id": 1})
    assert "no completion" in run("-i", ten, "-o", foreign).output
    assert target.read_bytes() == before


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--budget", 23), "written with budget=24, and this job has budget=23"),
        (("--temperature", 0.5), "written with the default temperature, and this job has temperature=0.5"),
        (("--max-new-tokens", 7), "max_new_tokens=7"),
        (("--policy", "tova"), f'policy="{POLICY}", and this job has policy="tova"'),
        (("--prefill-chunk", 4), "prefill_chunk=4"),
        (("--positions", "slot"), 'positions="slot"'),
        (("--layer-budget", "ramp:0.1"), 'layer_budget="ramp:0.1"'),
        (("--dtype", "float32"), 'dtype="float32"'),
        (("--raw",), "raw=true"),
    ],
)
def test_a_job_does_not_go_on_with_other_settings(ten, tmp_path, options, words):
    target = tmp_path / "out.jsonl"
    made_by = {"format": 3, "model": "embedded", "policy": POLICY, "budget": 24}
    write(target, {"id": 0, COMPLETION: {"line": 1, "digest": "x", "made_by": made_by}})
    before = target.read_bytes()
    given = {"--budget": 24, **dict([options if len(options) == 2 else (options[0], "")])}
    result = run("-i", ten, "-o", target, *(word for pair in given.items() for word in pair if word != ""))
    assert (result.exit_code, words in " ".join(result.output.split())) == (2, True), result.output
    assert target.read_bytes() == before


def test_a_completion_says_what_it_was_made_with(tmp_path):
    options = {"policy": "local", "max_new_tokens": 2}
    source = write(tmp_path / "in.jsonl", {"prompt": "Hello", "options": options}, {"prompt": "Hello"})
    target = tmp_path / "out.jsonl"
    assert run("-i", source, "-o", target, "--budget", 20, "--seed", 3, "-n", 4).exit_code == 0
    one, two = (completions(target)[line][COMPLETION] for line in (1, 2))
    settings = {"format": 3, "model": "embedded", "policy": POLICY, "budget": 20, "seed": 3, "max_new_tokens": 4}
    settings["layer_budget"] = "uniform"  # the budget holds every line
    layout = one["made_by"].pop("weight_layout")
    assert [type(one) for one in layout] == [bool, bool]
    assert two["made_by"].pop("weight_layout") == layout
    weights = one["made_by"].pop("weights")
    assert (len(weights), two["made_by"].pop("weights")) == (16, weights)
    assert one["made_by"] == two["made_by"] == settings
    assert (one["options"], two.get("options")) == (options, None)


@pytest.mark.slow
def test_a_repetition_ends_the_lines_that_ask_for_it(tmp_path):
    rule = {"max_pattern_size": 1, "min_count": 3}
    lines = [
        {"prompt": "Hello", "options": {"logit_bias": {"50": 100}, **own}}
        for own in ({}, {"repetition_detection": rule})
    ]
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    words = ["-i", source, "-o", target, "--budget", 20, "-n", 9]
    assert run(*words, "--repetition-detection", "max_pattern_size=1,min_count=5").exit_code == 0
    ended = {line: found[COMPLETION] for line, found in completions(target).items()}
    assert [(ended[line]["finish_reason"], ended[line]["new_tokens"]) for line in (1, 2)] == [
        ("repetition", 5),
        ("repetition", 3),
    ]
    assert ended[1]["made_by"]["repetition_detection"]["min_count"] == 5
    assert run(*words).exit_code == 2  # other settings


@pytest.mark.parametrize(
    ("said", "known"),
    [([True, False], True), ([False, True], True), ([False, False], True), ("x", False), ([1, 0], False)],
)
def test_a_job_goes_on_with_the_weights_laid_out_as_before(tmp_path, said, known):
    source = write(tmp_path / "in.jsonl", {"prompt": "Hello"}, {"prompt": "Good evening"})
    target = tmp_path / "out.jsonl"
    job = ("-i", source, "-o", target, "--budget", 20, "-n", 4, "--threads", 1)
    assert run(*job).exit_code == 0
    first = next(iter(completions(target).values()))
    first[COMPLETION]["made_by"]["weight_layout"] = said
    target.write_text(json.dumps(first) + "\n")
    assert run(*job).exit_code == 0
    number = 3 - first[COMPLETION]["line"]
    found = completions(target)[number][COMPLETION]["made_by"]["weight_layout"]
    assert [type(one) for one in found] == [bool, bool]
    if known and said[1] and not packed_weights._works(torch.bfloat16):  # here oneDNN packs none, whatever was said
        said = [said[0], False]
    assert not known or found == said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["-", "pipe"])
def test_prompts_through_a_pipe(ten, tmp_path, name):
    target, pipe = tmp_path / "out.jsonl", tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: name == "-" or pipe.write_bytes(ten.read_bytes()))
    writer.start()
    source = name if name == "-" else str(pipe)
    args = ["generate", "-i", source, "-o", str(target), "--budget", "24", "--json"]
    result = CliRunner().invoke(app, args, input=ten.read_bytes())
    writer.join()
    assert result.exit_code == 0, result.output
    assert sorted(completions(target)) == [1, 2, *range(4, 12)]
    assert json.loads(result.stdout)["done"] == 10


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["ahakv", "snapkv", "streaming_llm:sinks=70"])
def test_the_default_budget_holds_what_policies_protect(tmp_path, policy):
    entries = [{"prompt": "Hello", "options": {"max_new_tokens": 2}}]
    source = write(tmp_path / "in.jsonl", *entries)
    assert run("-i", source, "-o", tmp_path / "one.jsonl", "--policy", policy).exit_code == 0
    entries[0]["options"]["policy"] = policy
    source = write(tmp_path / "in.jsonl", *entries)
    result = run("-i", source, "-o", tmp_path / "two.jsonl")
    assert result.exit_code == 0, result.output
    assert len(completions(tmp_path / "two.jsonl")) == 1


def test_a_file_for_bad_lines_that_cannot_be_written(tmp_path):
    source = write(tmp_path / "in.jsonl", {"prompt": "Hello"}, "{nope")
    (tmp_path / "out.jsonl.bad").mkdir()
    result = run("-i", source, "-o", tmp_path / "out.jsonl", "--skip-bad")
    assert (result.exit_code, "out.jsonl.bad" in result.output) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{nope", "no JSON"),
        ("[1]", "no JSON object"),
        ({"text": "x"}, 'either "prompt" or "messages"'),
        ({"prompt": "x", "messages": []}, 'either "prompt" or "messages"'),
        ({"promt": "x"}, 'either "prompt" or "messages", and has "promt"'),
        ({"prompt": 3}, "no text"),
        ({"prompt": ""}, "empty"),
        ({"messages": [{"role": "user"}]}, '"messages" are no list'),
        ({"prompt": "x", "completion": 1}, "rename it"),
        ({"prompt": "x", "options": {"max_token": 3}}, 'no option "max_token"'),
        ({"prompt": "x", "max_new_tokens": 5}, '{"options": {"max_new_tokens": 5}}'),
        ({"prompt": "x", "stop": ["a"], "seed": 7}, 'stop and seed belong into "options"'),
        ({"prompt": "x", "options": {"max_new_tokens": True}}, "max_new_tokens=true"),
        ({"prompt": "x", "options": {"temperature": "hot"}}, "temperature"),
        ({"prompt": "x", "options": {"temperature": -1}}, "temperature=-1"),
        ({"prompt": "x", "options": {"stop": [1]}}, '"stop"'),
        ({"prompt": "x", "options": [1]}, "no JSON object"),
        ({"prompt": "x", "options": {"policy": "h20"}}, "h2o"),
        ({"prompt": "x", "options": {"temperature": 10**400}}, "too large a number"),
        ({"prompt": "x\ud83d"}, "half of a character"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "half of a character"),
        ({"prompt": "x", "options": {"\ud83d": 1}}, "no option"),
        ("[" * 100_000, "nested too deeply"),
        ({"prompt": "x", "options": {"budget": 99}}, "99 is more than"),
        ({"prompt": "x" * 400, "options": {"policy": "full"}}, "does not evict"),
    ],
)
def test_bad_lines_are_named_or_set_aside(tmp_path, line, reason):
    source = write(tmp_path / "in.jsonl", {"prompt": "Hello", "options": {"max_new_tokens": 2}}, line)
    target = tmp_path / "out.jsonl"
    refused = run("-i", source, "-o", target, "--budget", 20)
    assert refused.exit_code == 2
    assert "Line 2 cannot be run" in refused.output
    assert reason in " ".join(refused.output.split())
    assert "Traceback" not in refused.output
    assert not target.exists() or not target.read_bytes()
    skipped = run("-i", source, "-o", target, "--budget", 20, "--skip-bad")
    assert skipped.exit_code == 0, skipped.output
    assert list(completions(target)) == [1]
    (aside,) = map(json.loads, Path(f"{target}.bad").read_text().splitlines())
    assert aside["line"] == 2
    assert aside["text"] == (line if isinstance(line, str) else json.dumps(line))


@pytest.mark.slow
def test_options_that_do_not_go_together(tmp_path):
    source = write(tmp_path / "in.jsonl", {"prompt": "Hello"})
    for args, reason in [
        (("-i", source), "needs --output"),
        (("-o", source, "-p", "x"), "give --input"),
        (("-i", source, "-o", tmp_path / "x", "-p", "x"), "single one"),
        (("-i", tmp_path / "none", "-o", tmp_path / "x"), "cannot be read"),
        (("-i", source, "-o", tmp_path / "none" / "x"), f"There is no folder {tmp_path / 'none'}; make it"),
        (("-i", source, "-o", tmp_path), "Is a directory. Give the name of a file in that folder."),
        (("-i", source, "-o", tmp_path / "x", "--max-rows", 0), "--max-rows 0"),
        (("-i", source, "-o", tmp_path / "x", "--kv-memory", "1kB"), "Not one row fits"),
        (("-i", source, "-o", tmp_path / "x", "--kv-memory", "lots"), "--kv-memory"),
        (("-i", write(tmp_path / "empty.jsonl"), "-o", tmp_path / "x"), "has no lines. Give one JSON object per line"),
        (("-i", write(tmp_path / "bad.jsonl", "[]"), "-o", tmp_path / "x", "--skip-bad"), "can be run. Line 1: it is"),
    ]:
        result = run(*args)
        assert result.exit_code == 2, result.output
        assert reason in " ".join(result.output.split())


@pytest.mark.slow
def test_a_torn_line_is_written_again(ten, tmp_path):
    target = tmp_path / "out.jsonl"
    assert run("-i", ten, "-o", target, "--budget", 24).exit_code == 0
    whole = target.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 40, whole.index(b"\n") + 5, 3):
        target.write_bytes(whole[:cut])
        assert run("-i", ten, "-o", target, "--budget", 24).exit_code == 0
        assert sorted(completions(target)) == [1, 2, *range(4, 12)]
        assert len(target.read_text().splitlines()) == 10


@pytest.mark.parametrize("text", ['{"my": "notes"}', "{\n}", "notes", '{"prompt": "Hello"}\n', "[" * 100_000])
def test_a_file_that_is_no_output_is_left_alone(tmp_path, text):
    source, target = write(tmp_path / "in.jsonl", {"prompt": "Hello"}), tmp_path / "notes"
    target.write_text(text)
    result = run("-i", source, "-o", target, "--budget", 24)
    assert result.exit_code == 2
    assert "is no completion" in " ".join(result.output.split())
    assert target.read_text() == text


@pytest.mark.slow
def test_an_output_of_another_input_is_refused_before_anything_is_generated(ten, tmp_path):
    target, lines = tmp_path / "out.jsonl", ten.read_text().splitlines()
    assert run("-i", ten, "-o", target, "--budget", 24).exit_code == 0
    whole = target.read_text()
    for text, reason in [
        ("\n".join(lines[:5]), "completion of line 6"),
        ("\n".join([*lines[:-1], '{"prompt": "another"}']), "Line 11 of the input is not the one"),
    ]:
        ten.write_text(text)
        result = run("-i", ten, "-o", target, "--budget", 24)
        assert result.exit_code == 2
        assert reason in " ".join(result.output.split())
        assert target.read_text() == whole


@pytest.mark.slow
def test_half_a_character_in_a_field_comes_through(tmp_path):
    source = write(tmp_path / "in.jsonl", {"prompt": "Hello", "id": "\ud83d", "options": {"max_new_tokens": 2}})
    for _ in range(2):
        result = run("-i", source, "-o", tmp_path / "out.jsonl")
        assert result.exit_code == 0, result.output
    assert completions(tmp_path / "out.jsonl")[1]["id"] == "\ud83d"


@pytest.mark.long
@pytest.mark.parametrize("begun", ["uniform", None])
def test_a_job_goes_on_with_the_rule_for_layers_with_which_it_began(begun, tmp_path):
    """An appended line may be longer than the budget, and an output may be older than the choice of a rule."""
    words = (str(model_folders.folder("gemma3")), "-b", 90, "-n", 4)
    lines = [{"prompt": "the quick brown fox " * times} for times in (3, 4, 40)]
    target, source = tmp_path / "out.jsonl", write(tmp_path / "in.jsonl", *lines[:2])
    assert run(*words, "-i", source, "-o", target).exit_code == 0
    assert '"layer_budget": "uniform"' in target.read_text()
    if begun is None:
        target.write_text(target.read_text().replace('"layer_budget": "uniform", ', ""))
    result = run(*words, "-i", write(source, *lines), "-o", target)
    assert result.exit_code == 0, result.output
    made = [entry[COMPLETION]["made_by"].get("layer_budget") for entry in completions(target).values()]
    assert made == [begun] * 3


@pytest.mark.slow
def test_messages_in_rows_that_follow_from_a_memory(tmp_path):
    chat = [{"role": "user", "content": "Tell me a story."}]
    source = write(tmp_path / "in.jsonl", *({"messages": chat, "options": {"max_new_tokens": 3}} for _ in range(4)))
    result = run("-i", source, "-o", tmp_path / "out.jsonl", "--budget", 16, "--kv-memory", "120kB", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["rows"] == min(4, 120_000 // told["row_bytes"]) > 0
    assert [told["lines"], told["done"]] == [4, 4]
    prompt = "<|user|> Tell me a story.<|end|><|assistant|>"
    raw = write(tmp_path / "raw.jsonl", {"prompt": prompt, "options": {"max_new_tokens": 3}})
    assert run("-i", raw, "-o", tmp_path / "raw.out", "--budget", 16, "--raw").exit_code == 0
    expected = completions(tmp_path / "raw.out")[1][COMPLETION]["text"]
    assert {e[COMPLETION]["text"] for e in completions(tmp_path / "out.jsonl").values()} == {expected}


@pytest.mark.parametrize("most", [[], ["--kv-memory", "1MiB"]])
@pytest.mark.parametrize("new", [2**31 - 1, 2**27])
def test_a_line_that_no_memory_holds_is_refused_by_its_number(new, most, tmp_path):
    lines = [{"prompt": "Hello", "options": {"max_new_tokens": n}} for n in (3, new, 5)]
    source = write(tmp_path / "in.jsonl", *lines)
    result = run("-i", source, "-o", tmp_path / "out.jsonl", "--policy", "full", *most)
    assert result.exit_code == 2, result.output
    told = " ".join(result.output.split())
    assert "Line 2 cannot be run: full keeps all of its" in told
    assert ("Not one row fits" if most else "Out of memory") in told


def test_a_full_disk_loses_nothing(tmp_path):
    line = parse(1, b'{"prompt": "a"}', lambda prompt: [1], SamplingParams())
    with pytest.raises(InputError, match="No space left"), OutputFile.open(Path("/dev/full")) as output:
        output.write(line, result_of())


@pytest.mark.slow
def test_ctrl_c_ends_after_a_line_and_says_how_to_go_on(ten, tmp_path, monkeypatch):
    target = tmp_path / "out.jsonl"
    kept = OutputFile.write
    monkeypatch.setattr(OutputFile, "write", lambda self, *a: (kept(self, *a), os.kill(os.getpid(), signal.SIGINT))[0])
    result = run("-i", ten, "-o", target, "--budget", 24, "--max-rows", 2)
    assert result.exit_code == 130
    assert "goes on from there" in result.output
    assert 1 <= len(completions(target)) < 10
    monkeypatch.undo()
    assert run("-i", ten, "-o", target, "--budget", 24).exit_code == 0
    assert sorted(completions(target)) == [1, 2, *range(4, 12)]


@pytest.mark.slow
def test_a_closed_pipe_ends_the_job_quietly(ten, tmp_path):
    errors = tmp_path / "errors"
    words = ("generate", "-i", ten, "-o", "-", "--budget", "24")
    process = processes.kvkeep(*words, out=processes.NOBODY, err=errors)
    process.join(timeout=120)
    assert process.exitcode == 1
    assert "Traceback" not in errors.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "n"), sweep([(2, 20), (10, 120)], lambda case: case[0] == 2))
def test_killed_at_random_moments(tmp_path, kills, n, comparable):
    entries = [
        {"prompt": f"There was a dog, and it had {i}", "n": i, "options": {"max_new_tokens": 12}} for i in range(n)
    ]
    source, target = write(tmp_path / "in.jsonl", *entries), tmp_path / "out.jsonl"
    rng = random.Random(3)
    args = ["generate", "-i", str(source), "-o", str(target), "--budget", "16", "--max-rows", "4", "--raw"]
    args += comparable.words
    sizes = []
    for i in range(kills):
        process = processes.kvkeep(*args)
        if i % 3 == 0:  # any time, while it loads or resumes as well
            time.sleep(rng.random() * 0.4)
            process.kill()
            process.join()
            continue
        enough = (sizes[-1] if sizes else 0) + rng.randrange(700)
        while not target.exists() or target.stat().st_size <= enough:
            assert process.exitcode is None, "the job ended before it was killed"
            time.sleep(0.002)
        time.sleep(rng.random() * 0.02)
        process.kill()
        process.join()
        sizes.append(target.stat().st_size)
    assert len(target.read_text().splitlines()) < n
    assert run(*args[1:]).exit_code == 0
    lines = [json.loads(text) for text in target.read_text().splitlines()]
    assert sorted(entry["n"] for entry in lines) == list(range(n))
    assert len({entry[COMPLETION]["line"] for entry in lines}) == n
    assert sizes == sorted(set(sizes))
    unbroken = tmp_path / "unbroken.jsonl"
    assert run("-i", source, "-o", unbroken, *args[5:]).exit_code == 0
    texts = {number: entry[COMPLETION]["text"] for number, entry in completions(unbroken).items()}
    assert {entry[COMPLETION]["line"]: entry[COMPLETION]["text"] for entry in lines} == texts
