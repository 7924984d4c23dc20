"""``kvkeep bench-server`` against a tiny server that misbehaves."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

pytest.importorskip("httpx")

from kvkeep.cli.main import app
from kvkeep_lab.fleet.load import read_trace
from kvkeep_lab.loadtest.client import RequestOutcome
from kvkeep_lab.loadtest.percentiles import percentile, spread
from kvkeep_lab.loadtest.running import summary

MODELS = {"data": [{"id": "fake"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("KVKEEP_", "OPENAI_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


def piece(text):
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def events(*found, end="data: [DONE]\n\n"):
    return "".join(f"data: {json.dumps(one) if isinstance(one, dict) else one}\n\n" for one in found) + end


GOOD = events({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, *map(piece, "abc"), USAGE)


@contextmanager
def fake(*answers, wait_s=0.0, models=MODELS):
    """A server that gives these answers in turn: a stream, a status, or a function that gets the handler."""
    bodies, keys = [], []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words):
            pass

        def reply(self, status, kind, body):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", len(body))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            keys.append(self.headers["Authorization"])
            self.reply(200, "application/json", json.dumps(models).encode())

        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = answers[(len(bodies) - 1) % len(answers)]
            time.sleep(wait_s)
            if callable(answer):
                answer(self)
            elif isinstance(answer, int):
                self.reply(answer, "application/json", b'{"error": {"message": "No \\u001b[31m room."}}')
            else:
                self.reply(200, "text/event-stream", answer.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", bodies, keys
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(url, *words, code=0, width=80):
    asked = ["bench-server", url, "--rate", "inf", "--warmup", "0", *map(str, words)]
    found = CliRunner().invoke(app, asked, env={"COLUMNS": str(width)})
    assert found.exit_code == code, (found.output, found.exception)
    assert "Traceback" not in found.output
    return found


def numbers(url, *words, **options):
    return json.loads(run(url, "--json", *words, **options).stdout)


def test_answers_are_counted_and_timed():
    with fake(GOOD) as (url, bodies, _):
        found = numbers(url, "--requests", 6, "--max-new-tokens", 7, "--ignore-end")
        assert (found["completed"], found["errors"], found["model"]) == (6, {}, "fake")
        assert (found["prompt_tokens"], found["new_tokens"], found["tokens_counted_by"]) == (30, 18, "server")
        assert found["ttft_s"]["p50"] <= found["ttft_s"]["p99"] <= found["ttft_s"]["max"] < 30
        assert all(one["max_tokens"] == 7 and one["ignore_eos"] and one["stream"] for one in bodies)
        assert len({one["messages"][0]["content"] for one in bodies}) == 6
        lines = run(url, "--requests", 2).stdout.splitlines()
        assert max(map(len, lines)) <= 80
        assert "errors: none" in lines[-1]
        run(url, "--requests", 2, "--completions")
        assert len(bodies[-1]["prompt"].split()) == 128
        assert "ignore_eos" not in bodies[-1]


def test_the_output_is_a_trace_of_conversations(tmp_path):
    """A turn is what is new in it, though a chat's prompt is the whole conversation."""
    file, words = tmp_path / "rows.jsonl", ("--turns", 3, "--requests", 1)
    usage = [{"choices": [], "usage": {"prompt_tokens": n, "completion_tokens": 3}} for n in (5, 12, 20)]
    answers = [events(*map(piece, "abc"), one) for one in usage]
    with fake(*answers) as (url, *_):
        run(url, "-o", file, *words)
        (turns,) = read_trace(file).turns
        assert [(turn.prompt, turn.new) for turn in turns] == [(5, 3), (12 - 8, 3), (20 - 15, 3)]
        assert [json.loads(line)["prompt_tokens"] for line in file.read_text().splitlines()] == [5, 12, 20]
        run(url, "-o", file, *words, "--completions")  # each message is sent alone
        assert sorted(turn.prompt for (turn,) in read_trace(file).turns) == [5, 12, 20]
    with fake(GOOD) as (url, *_):
        run(url, "-o", file, "--turns", 2, "--requests", 3)
        assert [len(turns) for turns in read_trace(file).turns] == [2, 2, 2]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (429, "status 429"),
        (events(piece("a"), end=""), "stream ended early"),
        (events("{"), "no JSON in the stream"),
        (events("[" * 100_000), "no JSON in the stream"),
        (events("[]"), "no JSON object in the stream"),
        (events({"error": {"message": "lost"}}), "error in the stream"),
        (events({"choices": [5]}), "no chunk of OpenAI's API in the stream"),
        (events({"usage": {"prompt_tokens": "many"}}), "no chunk of OpenAI's API in the stream"),
        (events(), "no text"),
        (lambda handler: handler.connection.shutdown(socket.SHUT_RDWR), "connection lost"),
        (lambda handler: time.sleep(1), "timeout"),
    ],
)
def test_failures_are_counted_by_their_kinds(answer, kind):
    with fake(GOOD, answer) as (url, *_):
        found = numbers(url, "--requests", 4, "--timeout", 0.5)
        assert (found["completed"], found["errors"]) == (2, {kind: 2})
    with fake(answer) as (url, *_):
        said = run(url, "--requests", 1, "--timeout", 0.5, code=1)
        assert f"1 of 1 (1 {kind})" in said.stdout


def test_a_number_of_tokens_that_is_none_is_a_failure_of_its_answer_alone():
    usages = [
        {"prompt_tokens": float("inf"), "completion_tokens": 3},
        {"prompt_tokens": 5, "completion_tokens": -3},
        {"prompt_tokens": 5, "completion_tokens": 10**400},
        {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": float("nan")}},
    ]
    with fake(GOOD, *(events(piece("a"), {"usage": usage}) for usage in usages)) as (url, *_):
        found = numbers(url, "--requests", 5)
    assert (found["completed"], found["errors"]) == (1, {"no chunk of OpenAI's API in the stream": 4})


def test_a_models_name_steers_no_terminal():
    with fake(GOOD, models={"data": [{"id": "red\x1b[31m\nerrors: 9"}]}) as (url, *_):
        said = run(url, "--requests", 1, width=200).stdout
    assert said.startswith("red\\x1b[31m\\nerrors: 9 at http")


def test_the_first_error_is_shown_without_its_escapes():
    with fake(429) as (url, *_):
        said = run(url, "--requests", 1, code=1).output
        assert "the first error: No [31m room." in " ".join(said.split())


def test_tokens_without_usage_are_pieces():
    with fake(events(*map(piece, "abcd"))) as (url, *_):
        found = run(url, "--requests", 1)
        assert "each piece of its streams counts as one" in " ".join(found.output.split())
        assert numbers(url, "--requests", 1)["new_tokens"] == 4


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_has_times_and_is_not_sent_back(name):
    """The server counts its tokens: without its times those of the answer would look far too short."""
    thought = [{"choices": [{"delta": {name: text}}]} for text in ("hm", "so")]
    with fake(events(*thought, piece("a"), USAGE), events(*thought, USAGE)) as (url, bodies, _):
        found = numbers(url, "--requests", 1, "--turns", 3)
    assert (found["completed"], found["new_tokens"]) == (3, 9)
    assert found["stall_s"] is not None
    assert [one["content"] for one in bodies[2]["messages"][1::2]] == ["a", ""]


@pytest.mark.slow
def test_waiting_counts_from_the_arrival():
    """All arrive at once, and nobody waits for another one to be sent."""
    with fake(GOOD, wait_s=0.3) as (url, *_):
        found = numbers(url, "--requests", 8)
        assert 0.3 <= found["ttft_s"]["p50"] < 8 * 0.3
        assert found["seconds"] < 8 * 0.3


def test_conversations_send_what_was_said():
    with fake(GOOD) as (url, bodies, _):
        numbers(url, "--requests", 1, "--turns", 3)
        assert [len(one["messages"]) for one in bodies] == [1, 3, 5]
        assert bodies[2]["messages"][1] == {"role": "assistant", "content": "abc"}


def test_halves_of_characters_are_sent_back_whole_or_as_a_mark():
    halves = events(*map(piece, ("a\ud83d", "\ude00b", "\ud83d")))
    with fake(halves, models={"data": [{"id": "half \ud83d"}]}) as (url, bodies, _):
        found = numbers(url, "--requests", 1, "--turns", 2)
    assert (found["completed"], found["errors"]) == (2, {})
    assert bodies[1]["messages"][1]["content"] == "a\U0001f600b\ufffd"
    assert bodies[1]["model"] == "half \ufffd"


@pytest.mark.slow
def test_keys_and_mistakes(tmp_path):
    with fake(GOOD) as (url, _, keys):
        run(url, "--requests", 1, "--api-key", "anna-anna")
        assert keys == ["Bearer anna-anna"]
        for words, said in (
            (("--rate", 0), "--rate 0 is no rate"),
            (("--requests", 0), "--requests 0 is outside"),
            (("--prompt-tokens", "x"), "--prompt-tokens x is no length"),
            (("-n", "0"), "--max-new-tokens 0 is out of range"),
            (("--timeout", "nan"), "--timeout nan is no time"),
            (("--warmup", "-1"), "--warmup -1"),
            (("--api-key", "schlüssel"), "--api-key has letters"),
            (("--sessions", "--completions"), "both given"),
            (("--input", tmp_path / "no"), "cannot be read"),
            (("--output", tmp_path), "cannot be written"),
        ):
            assert said in " ".join(run(url, *words, code=2).output.split()), words
        file = tmp_path / "each.jsonl"
        run(url, "--requests", 3, "--output", file)
        assert [len(json.loads(line)["times"]) for line in file.read_text().splitlines()] == [3, 3, 3]
    for models in ({}, {"data": []}, [], 5):
        with fake(GOOD, models=models) as (url, *_):
            assert "names no model" in " ".join(run(url, code=2).output.split())
    assert "does not answer" in run(url, code=2).output
    for wrong in ("ftp://x", "http://", "", "http://a:b", "127.0.0.1:99999999"):
        assert "is no URL" in " ".join(run(wrong, code=2).output.split()), wrong


def test_a_wrong_address_leaves_the_lines_of_an_earlier_run(tmp_path):
    file = tmp_path / "each.jsonl"
    file.write_text("of an earlier run\n")
    with fake(GOOD) as (url, *_):
        pass
    run(url, "--output", file, code=2)
    assert file.read_text() == "of an earlier run\n"
    with fake(GOOD) as (url, *_):
        run(url, "--requests", 2, "--output", file)
    assert [len(json.loads(line)["times"]) for line in file.read_text().splitlines()] == [3, 3]


def test_each_line_is_written_when_its_request_has_ended(tmp_path):
    """Turns come one after the other; Ctrl-C in the third would leave two lines."""
    file, lines = tmp_path / "each.jsonl", []

    def answer(handler):
        lines.append(file.read_text().count("\n"))
        handler.reply(200, "text/event-stream", GOOD.encode())

    with fake(answer) as (url, *_):
        run(url, "--requests", 1, "--turns", 3, "--output", file)
    assert lines == [0, 1, 2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_costs_the_lines_and_not_the_numbers():
    with fake(GOOD) as (url, *_):
        found = run(url, "--requests", 2, "--output", "/dev/full", code=2)
    assert "errors: none" in found.stdout
    assert "/dev/full lacks requests: No space left on device" in " ".join(found.stderr.split())


def test_percentiles_are_values_that_were_measured():
    ordered = [float(n) for n in range(1, 101)]
    assert [percentile(ordered, share) for share in (50.0, 90.0, 99.0, 100.0)] == [50, 90, 99, 100]
    assert percentile([3.0], 50.0) == 3
    assert spread([]) is None


def test_an_answer_of_one_token_has_no_time_per_token():
    one = RequestOutcome(planned=1.0, sent=1.5, times=[3.0], ended=4.0, new_tokens=1, prompt_tokens=2)
    two = RequestOutcome(planned=1.0, sent=1.0, times=[2.0, 4.0], ended=5.0, new_tokens=3, prompt_tokens=2)
    found = summary([one, two], seconds=4.0)
    assert (found["ttft_s"]["max"], found["tpot_s"]["max"], found["late_s"]["max"]) == (2.0, 1.0, 0.5)
    assert (found["stall_s"]["max"], found["new_tokens_per_s"]) == (2.0, 1.0)
