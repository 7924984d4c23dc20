"""A server that is killed under load and started again has its saved sessions, whole."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress

import pytest

from .running import WAIT_S, httpx
from .test_cli_serve import start

TALK = "/v1/chat/completions"


def turn(client, name, text, **more):
    body = {"messages": [{"role": "user", "content": text}], "session_id": name, "max_tokens": 3, "temperature": 0}
    answer = client.post(TALK, json={**body, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def keep_busy(url, number, running):
    """Talk, stream and save until the server is gone."""
    with suppress(httpx.HTTPError), httpx.Client(base_url=url, timeout=WAIT_S) as client:
        while True:
            if number % 2:
                turn(client, f"saved-{number % 4}", "The dog ran.")
                client.post(f"/v1/sessions/saved-{number % 4}/save")
            else:
                client.post("/v1/completions", json={"prompt": "A cat", "max_tokens": 20, "ignore_eos": True})
            running[number].set()


@pytest.mark.slow
def test_a_killed_server_has_its_saved_sessions_when_it_is_started_again(tmp_path):
    folder = tmp_path / "sessions"
    words = ("--session-dir", folder, "--budget", "64", "--no-access-log")
    process, url, err = start(tmp_path, *words)
    running = [threading.Event() for _ in range(6)]
    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        for name in ("quiet", "saved-1", "saved-3", "forgotten"):
            assert client.post("/v1/sessions", json={"id": name}).status_code == 201
            turn(client, name, "Once upon a time there was a dog.")
        for name in ("quiet", "saved-1", "saved-3"):
            assert client.post(f"/v1/sessions/{name}/save").status_code == 200
        quiet = client.get("/v1/sessions/quiet").json()
        busy = [threading.Thread(target=keep_busy, args=(url, n, running)) for n in range(len(running))]
        for one in busy:
            one.start()
        assert all(one.wait(WAIT_S) for one in running)
        os.kill(process.pid, signal.SIGKILL)
        process.join(WAIT_S)
        for one in busy:
            one.join(WAIT_S)
            assert not one.is_alive()
    err.unlink()
    process, url, err = start(tmp_path, *words)
    try:
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            assert {one["id"] for one in client.get("/v1/sessions").json()["data"]} >= {"quiet", "saved-1", "saved-3"}
            found = client.get("/v1/sessions/quiet").json()
            assert (found["messages"], found["seen_tokens"]) == (quiet["messages"], quiet["seen_tokens"])
            for name in ("quiet", "saved-1", "saved-3"):
                messages = client.get(f"/v1/sessions/{name}").json()["messages"]
                assert [one["role"] for one in messages] == ["user", "assistant"] * (len(messages) // 2)
                used = turn(client, name, "And then?")["usage"]
                assert used["prompt_tokens_details"]["cached_tokens"] > 0
    finally:
        process.kill()
        process.join(WAIT_S)
    assert "Traceback" not in err.read_text()


def drops_of(number, messages):
    """Every second user lets each turn leave the memory once the turn after it has been asked."""
    last = len(messages) - 1
    return {str(turn): [turn - 2, turn - 1] for turn in range(2, last + 1, 2)} if number % 2 else {}


def talk_whole(url, number, answered, messages):
    """Talk, with all earlier messages sent each time, until the server is gone; note each answered turn."""
    with suppress(httpx.HTTPError), httpx.Client(base_url=url, timeout=WAIT_S) as client:
        for turn_number in range(len(messages) // 2, 50):
            text = f"There was a dog called {number} by the sea. What did it do on day {turn_number} of the year?"
            asked = [*messages, {"role": "user", "content": text}]
            body = {"messages": asked, "max_tokens": 3, "temperature": 0, "user": f"user {number}"}
            body |= {"drop_message": drops_of(number, asked)} if number % 2 and len(asked) > 2 else {}
            found = client.post(TALK, json=body).json()
            messages[:] = [*asked, found["choices"][0]["message"]]
            answered[number] = found["usage"]["prompt_tokens"]


@pytest.mark.slow
def test_a_killed_server_has_every_conversation_that_was_answered(tmp_path):
    words = ("--session-dir", tmp_path / "sessions", "--budget", "1024", "--no-access-log")
    answered, messages = {}, {number: [] for number in range(4)}
    rng = random.Random(3)
    for _ in range(6):
        process, url, err = start(tmp_path, *words)
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            for number, before in answered.items():
                asked = [*messages[number], {"role": "user", "content": "And then?"}]
                body = {"messages": asked, "max_tokens": 1, "temperature": 0, "user": f"user {number}"}
                body |= {"drop_message": drops_of(number, asked)} if number % 2 and len(asked) > 2 else {}
                used = client.post(TALK, json=body).json()["usage"]
                # of the last answer a few tokens may be read again, since its text may become other tokens
                assert used["prompt_tokens_details"]["cached_tokens"] >= before, number
                assert (used["kvkeep"]["dropped_tokens"] > 0) == bool(number % 2 and len(asked) > 2)
        busy = [threading.Thread(target=talk_whole, args=(url, n, answered, messages[n])) for n in messages]
        for one in busy:
            one.start()
        time.sleep(rng.uniform(1, 4))
        os.kill(process.pid, signal.SIGKILL)
        process.join(WAIT_S)
        for one in busy:
            one.join(WAIT_S)
            assert not one.is_alive()
        assert "Traceback" not in err.read_text()
        err.unlink()
    assert len(answered) == len(messages)
