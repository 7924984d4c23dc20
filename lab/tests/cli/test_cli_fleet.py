"""``kvkeep fleet``: what it prints, and bad input as one line and exit code 2; figures: lab/tests/fleet."""

from __future__ import annotations

import json
import re

import model_folders
import pytest
from typer.testing import CliRunner

from kvkeep.cli.main import app


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["fleet", str(model_folders.folder()), *map(str, arguments)])


def fleet(*arguments: object):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result


def as_json(*arguments: object):
    return json.loads(fleet(*arguments, "--json").stdout)


def refused(*arguments: object) -> str:
    """The one line that a bad input gets."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


LOAD = ("--rate", "20", "--prompt-tokens", "5-9", "-n", "4", "--requests", "40", "--device", "cuda")
DEVICE = ("--memory", "100MB", "--bandwidth", "10MB/s", "--budget", "8", "--policy", "h2o", "--rows", "4")
TALKS = ("--turns", "2", "--between", "3", "--host-memory", "30kB")


@pytest.mark.long
def test_a_fleet_is_shown_in_80_columns():
    shown = fleet(*LOAD, *DEVICE, *TALKS).stdout
    assert max(map(len, shown.splitlines())) <= 80
    names = ("devices", "rows of each", "first token, p99", "time per token, p50", "rows ↔ main memory", "on the disk")
    for name in names:
        assert re.search(rf"^{name}.* \S", shown, flags=re.MULTILINE), name
    assert "20 users per second, 5-9 + 4 tokens, 2 turns, 3 s between them" in " ".join(shown.split())
    assert fleet(*LOAD, *DEVICE, *TALKS).stdout == shown


def test_a_fleet_as_json():
    found = as_json(*LOAD, *DEVICE, *TALKS)
    ours, theirs = found["bounded"], found["paged"]
    assert found["load"]["rate"] == 20
    assert (ours["rows"], theirs["rows"]) == (4, 256)
    assert ours["keeps_the_limits"]
    assert ours["devices"] >= 1
    assert 0 < ours["first_token_s"]["p50"] <= ours["first_token_s"]["p99"] <= found["limits"]["first_token_s"]
    assert ours["memory_bytes"] <= found["memory_bytes"]
    assert min(ours["rows_to_host_bytes_per_s"], ours["host_to_disk_bytes_per_s"]) > 0
    assert ours["host_bytes"] <= 30_000 < ours["host_bytes"] + ours["disk_bytes"]
    assert as_json(*LOAD, *DEVICE, *TALKS) == found
    assert as_json(*LOAD, *DEVICE, *TALKS, "--seed", "1")["bounded"] != ours


def test_more_devices_are_tried_as_asked():
    one, four = (as_json(*LOAD, *DEVICE, "--devices", n)["bounded"] for n in (1, 4))
    assert (one["devices"], four["devices"]) == (1, 4)
    assert one["first_token_s"]["p99"] >= four["first_token_s"]["p99"]


def test_a_number_of_devices_that_misses_the_limits_is_noted():
    shown = fleet(*LOAD, *DEVICE, "--devices", "1", "--first-token", "0.001")
    assert "kvkeep: the limits are missed with 1 device." in shown.stderr


def test_a_fleet_with_a_trace_and_measured_steps(tmp_path):
    trace, steps = tmp_path / "trace.jsonl", tmp_path / "steps.json"
    line = {"prompt_tokens": 6, "new_tokens": 3, "session": "a"}
    trace.write_text("".join(json.dumps({**line, "planned": at, "error": None}) + "\n" for at in (9.0, 9.5, 30)))
    decode = [{"rows": n, "seconds": 0.01 * n} for n in (1, 4)]
    steps.write_text(json.dumps({"decode": decode, "prompt": [{"tokens": n, "seconds": 0.001 * n} for n in (1, 9)]}))
    memory = ("--memory", "100MB", "--budget", "8", "--policy", "h2o")
    found = as_json("--input", trace, "--steps", steps, *memory)
    assert found["load"]["words"] == "3 messages of a trace, in 1 conversation"
    assert found["bounded"]["messages"] == 3
    assert found["bounded"]["per_token_s"]["p50"] == pytest.approx(0.01)
    assert any("do not tell what a slot costs" in note for note in found["notes"])


def test_more_devices_than_conversations_write_no_more_tokens(tmp_path):
    trace = tmp_path / "trace.jsonl"
    line = {"prompt_tokens": 6, "new_tokens": 3}
    trace.write_text("".join(json.dumps({**line, "at": at}) + "\n" for at in (0, 0, 20, 20)))
    found = {n: as_json("--input", trace, *DEVICE, "--devices", n)["bounded"] for n in (4, 40)}
    assert found[40]["new_tokens_per_s"] == found[4]["new_tokens_per_s"] == pytest.approx(12 / 20, rel=0.05)
    assert found[40]["read_tokens_per_s"] == found[4]["read_tokens_per_s"]
    assert found[40]["busy"] == pytest.approx(found[4]["busy"] / 10)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "an arrival --rate"),
        *(((*LOAD,), "needs the --memory"), ((*LOAD, "--memory", "1GB"), "give the --bandwidth of a device")),
        ((*LOAD, *DEVICE, "--first-token", "1e-9"), "No number of devices carries this load"),
        ((*LOAD, *DEVICE, "--prompt-tokens", "9-5"), "--prompt-tokens 9-5 is out of range"),
        ((*LOAD, *DEVICE, "-n", "some"), "--max-new-tokens some is no length"),
        ((*LOAD, *DEVICE, "--between", "0"), "--between 0 is out of range"),
        ((*LOAD, *DEVICE, "--rate", "nan"), "--rate nan is no arrival rate"),
        *(((*LOAD, *DEVICE, "--rate", rate), "is no arrival rate") for rate in ("0", "-1", "1e-320", "1e300", "inf")),
        ((*LOAD, *DEVICE, "--rows", "900000"), "do not fit"),
        ((*LOAD, *DEVICE, "--devices", "0"), "--devices 0"),
        ((*LOAD, *DEVICE, "--compute", "400"), "--compute '400' is no number of operations"),
        ((*LOAD, *DEVICE, "--bus", "4"), "--bus '4' is not a size per second"),
        ((*LOAD, *DEVICE, "--measure"), "--bandwidth and --measure were both given"),
        ((*LOAD, *DEVICE, "--steps", "/nowhere"), "cannot be read"),
        ((*LOAD, *DEVICE, "--input", "/dev/null"), "has no line"),
    ],
)
def test_fleets_that_are_refused(arguments, words):
    assert words in refused(*arguments)


def test_lengths_of_a_file_are_not_also_options(tmp_path):
    file, rate = tmp_path / "a.jsonl", ("--rate", "5", "--requests", "20", "--devices", "1")
    file.write_text('{"prompt_tokens": 5, "max_tokens": 2}\n{"prompt_tokens": 6, "max_tokens": 3}\n')
    said = refused(*rate, *DEVICE, "--input", file, "--prompt-tokens", "9")
    assert "--prompt-tokens was given, and every line of" in said
    assert "--max-new-tokens was given, and" in refused(*rate, *DEVICE, "--input", file, "-n", "9")
    asked = as_json(*rate, *DEVICE, "--input", file)["load"]
    assert asked["words"] == "5 users per second, lengths of a file"
    assert asked["turns"] == "1"
    assert not asked.keys() & {"prompt_tokens", "new_tokens"}
    file.write_text('{"prompt_tokens": 5, "max_tokens": 2}\n{"prompt_tokens": 6}\n')
    asked = as_json(*rate, *DEVICE, "--input", file, "-n", "3")["load"]
    assert asked["new_tokens"] == "3"
    assert "prompt_tokens" not in asked


def test_a_trace_of_another_format_names_its_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"at": 1, "prompt_tokens": 2, "max_tokens": 1}\n{"text": "x"}\n')
    assert "line 2: it has no prompt_tokens" in refused("--input", file, *DEVICE)
    file.write_text('{"at": 1, "prompt_tokens": 2, "max_tokens": 1}\n')
    assert "--rate was given, and" in refused(*LOAD, *DEVICE, "--input", file)
    said = refused(*DEVICE, "--input", file, "--requests", "20")
    assert "--requests was given, and" in said
    assert "all its messages are simulated" in said
