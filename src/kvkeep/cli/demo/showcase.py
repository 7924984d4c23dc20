"""The work of ``kvkeep demo``: two scenes on the embedded model, and what to try next."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Int
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

from kvkeep import budget as budgets
from kvkeep.cache import BoundedCache
from kvkeep.cli import console
from kvkeep.cli.demo import SEED, STORY_BUDGET
from kvkeep.engine import Engine, Event, Request, Result
from kvkeep.engine.sampling import Sampling
from kvkeep.models import text
from kvkeep.models.load import embedded, find, read_weights
from kvkeep.models.quiet import quiet
from kvkeep.models.tiny.recall import Question, question
from kvkeep.registry import parse

OPENING = "Once upon a time, there was a little dog named Max. He lived in a big house near the forest."
STORY_TOKENS = 500
ANSWER_TOKENS = 8
KEEP_RATIO = 0.2
DISTANCE_TOKENS = 1500
PROMPT_TOKENS = 1990
POLICIES = (
    *("full", "topk_dynamic", "snapkv", "adakv", "pyramidkv", "nacl", "tova", "topk", "ahakv:sinks=4", "keydiff"),
    *("h2o", "h2o_avg", "keyformer", "scissorhands", "scissorhands_release", "spatten", "knorm", "random"),
    *("sparse_fixed", "sparse_strided", "streaming_llm", "local"),
)
NEXT = (
    ("generate -p 'Tell me a story.' --budget 64 --compare", "a bounded and a full cache side by side"),
    ("policies", "what each policy keeps, and when it fails"),
    ("eval --tasks recall --budgets 10%,20%,60% --output results", "measure all of this"),
)


def run(seed: int) -> None:
    """Show everything.

    Raises:
        ModelFileError: the embedded model is missing or corrupted.
    """
    screen = console.out()
    started = time.perf_counter()
    with quiet(), one_thread():
        checkpoint = find(embedded())
        writer = text.Writer(checkpoint, read_weights(checkpoint, device="cpu"))
        parameters = sum(p.numel() for p in writer.model.parameters()) / 1e6
        screen.print(
            f"The embedded model: {parameters:.1f} million parameters, trained on texts of "
            f"{checkpoint.trained_length} tokens, on the CPU.\n"
        )
        tell_story(screen, writer, seed)
        ask_everyone(screen, writer, seed)
    show_next(screen)
    screen.print(Text(f"\n{console.show_seconds(time.perf_counter() - started)} in all", "dim"))


@contextmanager
def one_thread() -> Iterator[None]:
    """The model is so small that two threads mostly wait for each other, and for whatever else the machine does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tell_story(screen: Console, writer: text.Writer, seed: int) -> None:
    """The first scene: a story goes on while the cache holds the same few tokens."""
    _title(screen, f"1  A story in a cache of {STORY_BUDGET} tokens")
    prompt = text.encode(writer.checkpoint, OPENING, raw=True)[0].tolist()
    sampling = Sampling(max_new_tokens=STORY_TOKENS, temperature=0.8, top_p=0.95, seed=seed)
    engine = Engine(writer.model, writer.checkpoint.tokenizer, budget=STORY_BUDGET, rows=1, prefill_chunk=None)
    with Page(screen, engine) as page:
        for seen, event in enumerate(engine.stream(Request(prompt=prompt, sampling=sampling)), start=len(prompt)):
            page.write(event, seen)
    screen.print("  Each head holds the newest tokens and the heaviest of the older ones, however long the text.\n")


def ask_everyone(screen: Console, writer: text.Writer, seed: int) -> None:
    """The second scene: one question about a fact far back, under each policy."""
    asked, prompt = _question(writer, seed)
    tokens = prompt.shape[1]
    budget = budgets.from_ratio(KEEP_RATIO, tokens)
    _title(screen, f"2  A question about a fact {DISTANCE_TOKENS} tokens ago, with {KEEP_RATIO:.0%} of the cache")
    fact = asked.facts[-1]
    screen.print(f"A text of {tokens} tokens with {len(asked.facts)} facts. One of them: {_stated(asked)!r}")
    screen.print(f"Asked at the end: {asked.prompt.rsplit('. ', 1)[-1]!r} The answer is {fact.value!r}.")
    if seed == SEED:
        screen.print(
            "This question was chosen because the full cache answers it and the newest tokens alone do not; another "
            "--seed may ask one of which neither is true."
        )
    screen.print()
    table = console.table("policy", "budget", "answer", "", "KV memory", "of full")
    table.columns[2].no_wrap, table.columns[2].max_width = True, 24
    for column in (1, 4, 5):
        table.columns[column].justify = "right"
    full_bytes = 0
    with Live(table, console=screen, auto_refresh=False) as live:  # a low screen sees the head until all are there
        for answer in _answers(writer, prompt, budget):
            full_bytes = full_bytes or answer.held_bytes
            verdict = Text("right", "green") if asked.right(answer.text) else Text("wrong", "red")
            reply = console.printable(" ".join(answer.text.split())) or "(nothing)"
            share = f"{answer.held_bytes / full_bytes:.0%}"
            held = console.show_bytes(answer.held_bytes)
            table.add_row(answer.policy, str(answer.budget), reply, verdict, held, share)
            live.update(table, refresh=screen.is_terminal)
    _end_line(screen)
    screen.print()


def show_next(screen: Console) -> None:
    """Three commands to go on with, as this shell can call them."""
    _title(screen, "3  What to try next")
    script = Path(sys.argv[0])
    program = os.path.relpath(script) if script.name == "kvkeep" else "python -m kvkeep"
    program = "kvkeep" if shutil.which("kvkeep") else program
    for command, purpose in NEXT:
        screen.print(Text(f"  {program} {command}", "bold"), soft_wrap=True)
        screen.print(Text("    " + purpose, "dim"))


@dataclass(frozen=True)
class Answer:
    """What a policy's cache made of the question.

    Attributes:
        policy: its string.
        budget: tokens per layer and head.
        text: the reply.
        held_bytes: everything that its cache holds.
    """

    policy: str
    budget: int
    text: str
    held_bytes: int


def _answers(writer: text.Writer, prompt: Int[Tensor, "1 T"], budget: int) -> Iterator[Answer]:
    """Each policy's reply; the full cache comes first."""
    tokens = prompt.shape[1]
    generate = cast(Callable[..., Tensor], writer.model.generate)
    for name in POLICIES:
        policy = parse(name)
        room = budget if policy.evicts else tokens + ANSWER_TOKENS
        cache = BoundedCache(writer.model.config, policy, room)
        writer.read(prompt[:, :-1], cache)  # cut to the budget here: what follows sees no more than that
        reply = generate(prompt, past_key_values=cache, max_new_tokens=ANSWER_TOKENS, do_sample=False)[0, tokens:]
        yield Answer(name, room, writer.text_of(reply.tolist()), cache.memory().allocated_bytes)


def _question(writer: text.Writer, seed: int) -> tuple[Question, Int[Tensor, "1 T"]]:
    """A question whose fact stands about `DISTANCE_TOKENS` before the end."""
    tokenizer = writer.checkpoint.tokenizer
    asked = question(
        seed,
        kind="place",
        depth=1.0 - DISTANCE_TOKENS / PROMPT_TOKENS,
        n_facts=8,
        tokens=PROMPT_TOKENS,
        count=lambda sentence: len(tokenizer(sentence)["input_ids"]),
    )
    return asked, text.encode(writer.checkpoint, asked.prompt)


def _stated(asked: Question) -> str:
    """The sentence that states the asked fact."""
    fact = asked.facts[-1]
    return next(said for said in map(fact.say, fact.kind.statements) if said in asked.prompt)


def _end_line(screen: Console) -> None:
    """End the last line of a live picture, which only a terminal does by itself."""
    if not screen.is_terminal:
        screen.print()


def _title(screen: Console, title: str) -> None:
    screen.print(Text(title, "bold cyan"))


class Page:
    """A text that is being written, with what the cache holds below it; on a terminal it changes in place."""

    def __init__(self, screen: Console, engine: Engine) -> None:
        self._screen, self._engine, self._text, self._seen = screen, engine, Text(OPENING, "dim"), 0
        self._result: Result | None = None
        self._live = Live(console=screen, auto_refresh=False, vertical_overflow="visible")
        self._written = 0.0

    def __enter__(self) -> Page:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update(self._render(), refresh=True)
        self._live.stop()
        _end_line(self._screen)

    def write(self, event: Event, seen: int) -> None:
        """Add a piece of text, after which the model has seen so many tokens; drawn ten times a second at most."""
        self._text.append(console.printable(event.text), "default")
        self._seen, self._result = seen, event.result
        if self._screen.is_terminal and time.perf_counter() - self._written > 0.1:
            self._written = time.perf_counter()
            self._live.update(self._render(), refresh=True)

    def _render(self) -> RenderableType:
        seen, held = self._seen, min(self._seen, STORY_BUDGET)
        memory = self._result.memory if self._result else self._engine.memory()
        bars = Table.grid(padding=(0, 2))
        ours, theirs = memory.allocated_bytes, memory.full_bytes
        bars.add_row("h2o", f"{held} of {seen} tokens", console.show_bytes(ours), _bar(ours, theirs))
        bars.add_row("full cache", f"{seen} tokens", console.show_bytes(theirs), _bar(theirs, ours))
        return Group(Panel(self._text), Padding(bars, (0, 2, 1, 2)))


def _bar(mine: int, other: int, width: int = 24) -> Text:
    """A bar as long as one size is beside the larger of two."""
    return Text("█" * max(1, round(width * mine / max(mine, other, 1))), "green" if mine <= other else "red")
