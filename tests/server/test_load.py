"""Many clients at once, of whom some leave: every row comes back, and every answer is what its request gets alone."""

from __future__ import annotations

import asyncio
import gc
import random
import resource
from contextlib import suppress
from pathlib import Path

import model_folders
import pytest

import kvkeep

from .running import WAIT_S, checkpoint, httpx, model, serve

WORDS = ("dog", "cat", "tower", "garden", "Tom", "Anna", "rain", "boat")
MOST_GROWTH = 32 * 2**20
"""Bytes by which a process may grow over a thousand requests: what the allocator has not given back."""
POLICIES = (None, None, "h2o", "tova")


def bodies(count):
    """Requests of many kinds, by their numbers."""
    made = []
    for number in range(count):
        draw = random.Random(number)
        prompt = " ".join(draw.choices(WORDS, k=draw.choice((3, 8, 40))))
        body = {"prompt": prompt, "max_tokens": draw.randint(1, 12), "seed": number % 7, "ignore_eos": True}
        body |= {"temperature": draw.choice((0, 1))}
        policy = draw.choice(POLICIES)
        made.append({**body, **({} if policy is None else {"policy": policy})})
    return made


def expected(made):
    """The texts that the requests get alone, one after the other."""
    found = {}
    folder = str(model_folders.folder())
    with kvkeep.Engine(model(folder), checkpoint(folder).tokenizer, budget=48, rows=1) as engine:
        for number, body in enumerate(made):
            sampling = kvkeep.SamplingParams(
                max_new_tokens=body["max_tokens"], temperature=float(body["temperature"]), seed=body["seed"]
            )
            own = {"policy": body.get("policy"), "ignore_end": True, "sampling": sampling}
            (result,) = engine.generate(kvkeep.Request(prompt=body["prompt"], raw=True, **own))
            found[number] = result.text
    return found


def resident_bytes():
    """The memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def clients(url, made, at_once):
    """Send all requests, so many at once. One in five leaves: before the answer, or after its first piece."""
    answers, left, lock = {}, iter(enumerate(made)), asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once + 16)
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits) as client:

        async def one(number, body):
            async with lock:
                kind = random.Random(-number).random()
                if kind < 0.1:
                    await leave(client, body, kind)
                elif kind < 0.2:
                    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                        async for _ in answer.aiter_lines():
                            break
                else:
                    answer = await client.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    answers[number] = answer.json()["choices"][0]["text"]

        await asyncio.gather(*(one(number, body) for number, body in left))
    return answers


async def leave(client, body, kind):
    """Give up after a moment."""
    with suppress(TimeoutError, httpx.HTTPError):
        await asyncio.wait_for(client.post("/v1/completions", json={**body, "max_tokens": 5000}), kind)


@pytest.mark.long
@pytest.mark.parametrize("count", [24, pytest.param(1000, marks=pytest.mark.slow)])
def test_all_rows_come_back_and_answers_are_those_of_a_single_client(count):
    made = bodies(count)
    with serve(rows=8, budget=48, max_queue=500, folder=str(model_folders.folder())) as server:
        before = server.engine.memory_usage().allocated_bytes
        if count > 500:  # the first ones pay for imports, buffers and threads
            asyncio.run(clients(server.url, made[:200], 64))
            assert server.idle()
        resident = resident_bytes()
        answers = asyncio.run(clients(server.url, made, 64))
        assert server.idle()
        assert count <= 500 or resident_bytes() - resident < MOST_GROWTH
        health = server.client.get("/health").json()
        assert (health["rows_free"], health["waiting"]) == (8, 0)
        assert server.engine.memory_usage().allocated_bytes == before
    assert count * 0.7 < len(answers) < count * 0.9
    want = expected(made)
    wrong = {number: (text, want[number]) for number, text in answers.items() if text != want[number]}
    assert wrong == {}
