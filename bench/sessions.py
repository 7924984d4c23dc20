"""What does memory that outlives a request save?

    python bench/sessions.py [--full] [--budget 256] [--repeats 3] [--policy h2o] [--only turns]

Six questions, each a ratio within one run: the speed of a restore against that of a plain copy; a question to a text
that was read before, against reading it again; the size of a file against its occupied bytes; sessions that take turns
on few rows, against the same turns as requests without a past; a late turn of a conversation of 200, against an early
one; eight answers to one prompt, against eight prompts.
Short by default; --full takes the sizes of the targets.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from lib import arguments, finish, interleaved, median_ms, positive, show, speed_model

import kvkeep
from kvkeep.engine import scheduler
from kvkeep.engine.dispatcher import AsyncEvents

QUESTION = 16
"""Tokens of a question."""

LONG = 200
"""Turns of a long conversation."""

PARTS = ("restore", "question", "size", "turns", "conversation", "answers")
"""The questions: methods of `Bench`."""


@dataclass(frozen=True)
class Sizes:
    """How large the questions are."""

    text: int
    sessions: int
    turns: int
    rows: int
    prompt: int
    answers: int


SHORT = Sizes(text=2048, sessions=16, turns=3, rows=4, prompt=1024, answers=8)
FULL = Sizes(text=32768, sessions=1000, turns=10, rows=8, prompt=8192, answers=8)


@dataclass(frozen=True)
class Finding:
    """A ratio and what it should be."""

    what: str
    ratio: float
    aim: str
    detail: str


class Bench:
    """The engine and the texts of all questions."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.sizes, self.options = FULL if options.full else SHORT, options
        self.model = speed_model(getattr(torch, options.dtype), options.layers)
        kvkeep.pack_weights(self.model, if_faster=True)
        self._random = torch.Generator().manual_seed(1)
        self.engine = kvkeep.Engine(
            self.model, policy=options.policy, budget=options.budget, rows=self.sizes.rows, prefill_chunk=options.chunk
        )

    def tokens(self, n: int) -> list[int]:
        found: list[int] = torch.randint(0, self.model.config.vocab_size, (n,), generator=self._random).tolist()
        return found

    def restore(self) -> Finding:
        """A row from main memory, against a plain copy of as many bytes."""
        budget = 16 * self.options.budget
        engine = kvkeep.Engine(self.model, policy=self.options.policy, budget=budget, rows=1, prefill_chunk=512)
        memory, rows, policy = engine.prefix(self.tokens(budget)).contents, engine._kv, engine.policy
        source = torch.ones(memory.nbytes, dtype=torch.uint8)  # zeros would be one page, which is read from the cache
        target = torch.zeros_like(source)
        times = interleaved(
            {
                "restore": lambda: rows.begin(0, policy=policy, budget=budget, contents=memory),
                "copy": lambda: target.copy_(source),
            },
            10 * self.options.repeats,
        )
        rows.end(0)
        ratio = statistics.median(times["copy"]) / statistics.median(times["restore"])
        detail = f"{memory.nbytes / 1e6:.1f} MB in {median_ms(times['restore']):.2f} ms"
        return Finding("restore, of the speed of a copy", ratio, ">= 0.6", detail)

    def question(self) -> Finding:
        """The first token of an answer about a text that is remembered, against reading the text again."""
        text, question, one = (
            self.tokens(self.sizes.text),
            self.tokens(QUESTION),
            kvkeep.SamplingParams(max_new_tokens=1),
        )
        memory = self.engine.prefix(text)
        again = [seconds(lambda: self.engine.generate(kvkeep.Request(prompt=text + question, sampling=one)))]
        asked = kvkeep.Request(prompt=question, snapshot=memory, sampling=one)
        known = [seconds(lambda: self.engine.generate(asked)) for _ in range(3 * self.options.repeats)]
        detail = f"{self.sizes.text} tokens: {median_ms(known):.1f} ms, read again {1e3 * again[0]:.0f} ms"
        return Finding("first token of a question, times faster", again[0] / statistics.median(known), ">= 100", detail)

    def size(self) -> Finding:
        """A file, against the occupied bytes of its memory and its token ids."""
        text = self.tokens(2 * self.options.budget)
        memory = self.engine.generate(kvkeep.Request(prompt=text, sampling=kvkeep.SamplingParams(max_new_tokens=1)))[
            0
        ].memory_usage
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "text.kvkeep"
            self.engine.prefix(text).save(path)
            found = path.stat().st_size
        wanted = memory.occupied_bytes + 4 * len(text)
        return Finding("size of a file, of its occupied bytes", found / wanted, "<= 1.02", f"{found / 1e6:.2f} MB")

    def turns(self) -> list[Finding]:
        """Sessions that take turns in random order on few rows, against the same turns without sessions.

        Without sessions a client sends its whole conversation with each turn, or, to see what a memory that comes and
        goes costs, none of it.
        """
        sizes, new = self.sizes, kvkeep.SamplingParams(max_new_tokens=QUESTION)
        order = [i for i in range(sizes.sessions) for _ in range(sizes.turns)]
        random.Random(1).shuffle(order)
        texts = [self.tokens(QUESTION) for _ in order]
        sessions = [self.engine.session() for _ in range(sizes.sessions)]
        before = self.engine.memory_usage().allocated_bytes

        async def one(gate: asyncio.Semaphore, answer: Callable[[], AsyncEvents]) -> None:
            async with gate:
                async for _ in answer():
                    pass

        async def all_of(answers: Sequence[Callable[[], AsyncEvents]]) -> None:
            gate = asyncio.Semaphore(2 * sizes.rows)
            await asyncio.gather(*(one(gate, answer) for answer in answers))

        alone = [partial(self.engine.astream, kvkeep.Request(prompt=text, sampling=new)) for text in texts]
        turns = [partial(sessions[i].asend, text, new) for i, text in zip(order, texts, strict=True)]
        whole = [
            partial(self.engine.astream, kvkeep.Request(prompt=one, sampling=new)) for one in self.sent(order, texts)
        ]
        plain, held = seconds(lambda: asyncio.run(all_of(alone))), seconds(lambda: asyncio.run(all_of(turns)))
        stateless = seconds(lambda: asyncio.run(all_of(whole)))
        bytes_each = max(session.nbytes for session in sessions)
        grown = self.engine.memory_usage().allocated_bytes / before
        detail = f"{len(order)} turns of {sizes.sessions} sessions, {bytes_each / 1e6:.2f} MB each, {sizes.rows} rows"
        return [
            Finding("throughput of sessions, of whole conversations", stateless / held, ">= 0.9", detail),
            Finding(
                "throughput of sessions, of turns without a past", plain / held, "", f"{held / len(order):.4f} s each"
            ),
            Finding("memory of the rows afterwards", grown, "1", "of the memory before"),
        ]

    def sent(self, order: list[int], texts: list[list[int]]) -> list[list[int]]:
        """The prompts of a client that sends its whole conversation with each turn."""
        past: dict[int, list[int]] = {}
        prompts = []
        for session, text in zip(order, texts, strict=True):
            prompts.append(past.get(session, []) + text)
            past[session] = prompts[-1] + self.tokens(QUESTION)
        return prompts

    def conversation(self) -> list[Finding]:
        """The last turns of a long conversation, against those after its memory was full."""
        new, session, times, sizes = kvkeep.SamplingParams(max_new_tokens=QUESTION), self.engine.session(), [], []
        for _ in range(LONG):
            text = self.tokens(QUESTION)
            times.append(seconds(partial(session.ask, text, new)))
            sizes.append(session.snapshot().contents.nbytes)
        quarter = LONG // 4
        early, late = times[quarter : 2 * quarter], times[-quarter:]
        detail = f"{LONG} turns: {median_ms(early):.1f} ms and {median_ms(late):.1f} ms"
        return [
            Finding("a late turn of a conversation, of an early one", median_ms(late) / median_ms(early), "1", detail),
            Finding("its memory, of the memory then", sizes[-1] / sizes[quarter], "1", f"{sizes[-1] / 1e6:.2f} MB"),
        ]

    def answers(self) -> Finding:
        """Several answers to one prompt, against as many prompts."""
        prompt, shortest = self.tokens(self.sizes.prompt), scheduler.SHORTEST
        new = kvkeep.SamplingParams(max_new_tokens=QUESTION, temperature=1.0)
        asked = [kvkeep.Request(prompt=prompt, sampling=new, sequence=n) for n in range(self.sizes.answers)]
        together = seconds(lambda: self.engine.generate(asked))
        scheduler.SHORTEST = 2**62
        try:
            apart = seconds(lambda: self.engine.generate(asked))
        finally:
            scheduler.SHORTEST = shortest
        detail = f"{len(asked)} answers to {len(prompt)} tokens: {together:.2f} s, apart {apart:.2f} s"
        return Finding("several answers to one prompt, times faster", apart / together, ">= 5", detail)


def seconds(task: Callable[[], object]) -> float:
    """How long a task takes."""
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--full", action="store_true", help="the sizes of the targets; takes long")
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--budget", type=positive, default=256)
    parser.add_argument("--chunk", type=positive, default=512, help="prompt tokens per step")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="some of the questions")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    found: list[Finding] = []
    for part in options.only:
        answer = getattr(bench, part)()
        found += answer if isinstance(answer, list) else [answer]
    show(
        f"Sessions, {options.policy}, {options.dtype}, {options.budget} slots, prompts by {options.chunk}",
        ["", "ratio", "aim", ""],
        [[one.what, f"{one.ratio:.2f}", one.aim, one.detail] for one in found],
    )
    finish({"full": options.full, "findings": [vars(one) for one in found]})


if __name__ == "__main__":
    main()
