"""``kvkeep demo``: two scenes on the embedded model, in under a minute, and what to try next.

Names of kvkeep are loaded when they are first used, so importing this module imports no torch.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import kvkeep
from kvkeep.cli import console
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.startup import fast_imports
from kvkeep.models.threads import restored, use
from kvkeep.policies import DEFAULT

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from kvkeep.models.tiny.recall import Question
    from kvkeep.models.tokenization import Writer

STORY_BUDGET = 128
SEED = 2
"""A question that the full cache answers, and the newest tokens alone do not."""
STORY_SEED = 1
"""A story that does not end early."""
OPENING = "Once upon a time, there was a little dog named Max. He lived in a big house near the forest."
STORY_TOKENS = 500
ANSWER_TOKENS = 8
KEEP_RATIO = 0.2
DISTANCE_TOKENS = 1500
PROMPT_TOKENS = 1990
"""With the answer, and what the chat template adds, not more than the 2048 that the model was trained for."""
KINDS = {
    "keep everything": ("full", "topk_dynamic"),
    "see the question": (
        *(DEFAULT, "snapkv", "adakv", "pyramidkv", "nacl", "restkv", "defensivekv", "blend"),
        *("tova", "topk", "ahakv:sinks=4", "rkv", "vase"),
    ),
    "sum up attention": ("h2o", "h2o_avg", "keyformer", "scissorhands", "scissorhands_release", "spatten"),
    "look at keys": ("reread", "expected_attention", "triattention", "leverage", "keydiff", "knorm"),
    "look at places": ("sparse_fixed", "sparse_strided", "streaming_llm", "local"),
    "choose blindly": ("random",),
}
"""How policies choose → policies."""
POLICIES = tuple(name for names in KINDS.values() for name in names)

WHY = (
    "Why many are wrong: the fact was read long before anybody asked for it. Policies that see the question go by the "
    "attention of the last tokens, and these attend to the fact. Sums of attention were collected before the question "
    "came; keys, places and chance know nothing of it. Such a policy is right only where the fact stands out. It has "
    "other uses, e.g. streams; kvkeep policies names them."
)
NEXT = (
    ("generate -p 'Tell me a story.' --budget 64 --compare", "a bounded and a full cache side by side"),
    ("policies", "what each policy keeps, and when it fails"),
    ("eval --tasks recall --budgets 10%,20%,60% --output results", "measure all of this"),
)


@one_line_errors
def demo(
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Another story and another question.")] = SEED,
) -> None:
    """Show a story in 128 tokens of memory, and what each policy still knows of a long text.

    Runs the embedded model on the CPU; nothing is downloaded.
    """
    with fast_imports():
        from kvkeep.models.load import find, quiet, read_weights
        from kvkeep.models.tiny import embedded
        from kvkeep.models.tokenization import Writer

    screen = console.out()
    started = time.perf_counter()
    with quiet(), restored():
        checkpoint = find(embedded())
        writer = Writer(checkpoint, read_weights(checkpoint, device="cpu"))
        use(writer.model)
        parameters = sum(p.numel() for p in writer.model.parameters()) / 1e6
        screen.print(
            f"The embedded model: {parameters:.1f} million parameters, trained on texts of "
            f"{checkpoint.trained_length} tokens, on the CPU.\n"
        )
        tell_story(screen, writer, seed)
        ask_everyone(screen, writer, seed)
    show_next(screen)
    screen.print(Text(f"\n{console.show_seconds(time.perf_counter() - started)} in all", "dim"))


def tell_story(screen: Console, writer: Writer, seed: int) -> None:
    """Show the first scene: a story goes on while the cache holds the same few tokens."""
    from kvkeep.models.tokenization import encode

    _title(screen, f"1  A story in a cache of {STORY_BUDGET} tokens")
    prompt = encode(writer.checkpoint, OPENING, raw=True)[0].tolist()  # a story goes on; nobody is answered
    sampling = kvkeep.SamplingParams(
        max_new_tokens=STORY_TOKENS, temperature=0.8, top_p=0.95, seed=STORY_SEED if seed == SEED else seed
    )
    engine = kvkeep.Engine(writer.model, writer.checkpoint.tokenizer, budget=STORY_BUDGET, rows=1, prefill_chunk=None)
    with Page(screen, engine) as page:
        for seen, event in enumerate(  # the first new token comes when the prompt alone has been read
            engine.stream(kvkeep.Request(prompt=prompt, sampling=sampling)), start=len(prompt)
        ):
            page.write(event, seen)
    screen.print(
        "  Each head holds the newest tokens, and the most attended of the older ones, however long the text.\n"
    )


OTHER_COLUMNS = 59  # width of the table of policies without its answers


def ask_everyone(screen: Console, writer: Writer, seed: int) -> None:
    """Show the second scene: one question about a fact far back, under each policy."""
    asked, prompt = _question(writer, seed)
    tokens = prompt.shape[1]
    budget = kvkeep.budget_from_ratio(KEEP_RATIO, tokens)
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
    # names are indented by two, see `_add`
    table.columns[0].min_width = 2 + max(len(name) for name in POLICIES if name != DEFAULT)
    room = max(8, min(24, screen.width - OTHER_COLUMNS))  # an answer that is too long is cut; names, numbers never
    table.columns[2].no_wrap, table.columns[2].max_width = True, room
    for column in (1, 4, 5):
        table.columns[column].justify = "right"
    full_bytes, kind = 0, ""
    with Live(table, console=screen, auto_refresh=False) as live:  # a low screen sees the head until all are there
        for answer in _answers(writer, prompt, budget):
            full_bytes = full_bytes or answer.held_bytes  # the full cache comes first
            if kind != (kind := _kind(answer.policy)):
                table.add_row(Text(kind, "dim"))
            _add(table, answer, right=asked.right(answer.text), full_bytes=full_bytes)
            live.update(table, refresh=screen.is_terminal)
    _end_line(screen)
    screen.print(f"\nThe default is {DEFAULT}.", soft_wrap=True)
    screen.print(f"{WHY}\n")


def _kind(policy: str) -> str:
    """Return the key of `KINDS` under which a policy of the demo stands, in words how it chooses tokens."""
    return next(kind for kind, names in KINDS.items() if policy in names)


def _add(table: Table, answer: Answer, *, right: bool, full_bytes: int) -> None:
    """Add a row with a policy's answer to the table.

    Args:
        table: the table.
        answer: the answer.
        right: whether it is right.
        full_bytes: bytes of the full cache, of which the row shows a share.
    """
    table.add_row(
        "  the default" if answer.policy == DEFAULT else f"  {answer.policy}",
        str(answer.budget),
        console.printable(" ".join(answer.text.split())) or "(nothing)",
        Text("right", "green") if right else Text("wrong", "red"),
        console.show_bytes(answer.held_bytes),
        f"{answer.held_bytes / full_bytes:.0%}",
    )


def show_next(screen: Console) -> None:
    """Print the commands of `NEXT` with their purposes, with kvkeep's program as this shell can call it."""
    _title(screen, "3  What to try next")
    script = Path(sys.argv[0])
    program = os.path.relpath(script) if script.name == "kvkeep" else "python -m kvkeep"
    program = "kvkeep" if shutil.which("kvkeep") else program
    for command, purpose in NEXT:
        screen.print(Text(f"  {program} {command}", "bold"), soft_wrap=True)
        screen.print(Text("    " + purpose, "dim"))


@dataclass(frozen=True)
class Answer:
    """A policy's answer to the question.

    Attributes:
        policy: the policy's name and options.
        budget: tokens per layer and head.
        text: the reply.
        held_bytes: keys, values and everything else that the cache holds.
    """

    policy: str
    budget: int
    text: str
    held_bytes: int


def _answers(writer: Writer, prompt: Int[Tensor, "1 T"], budget: int) -> Iterator[Answer]:
    """Yield the answer to a prompt under each of `POLICIES`, as soon as it is there. The full cache comes first."""
    tokens = prompt.shape[1]
    generate = cast("Callable[..., Tensor]", writer.model.generate)
    for name in POLICIES:
        policy = kvkeep.parse(name)
        room = budget if policy.evicts else tokens + ANSWER_TOKENS
        cache = kvkeep.BoundedCache(writer.model.config, policy, room)
        writer.read(prompt[:, :-1], cache)  # cuts the text to the budget; the reply sees nothing else
        from kvkeep.cache.hf_layers import handed  # imports torch

        given = handed(writer.model, cache)
        reply = generate(prompt, **given, max_new_tokens=ANSWER_TOKENS, do_sample=False)[0, tokens:]
        yield Answer(name, room, writer.text_of(reply.tolist()), cache.memory().allocated_bytes)


def _question(writer: Writer, seed: int) -> tuple[Question, Int[Tensor, "1 T"]]:
    """Return a question whose fact is about `DISTANCE_TOKENS` tokens before the end, and its prompt as token ids."""
    from kvkeep.models.tiny.recall import question
    from kvkeep.models.tokenization import encode

    tokenizer = writer.checkpoint.tokenizer
    asked = question(
        seed,
        kind="place",
        depth=1.0 - DISTANCE_TOKENS / PROMPT_TOKENS,
        n_facts=8,
        tokens=PROMPT_TOKENS,
        count=lambda sentence: len(tokenizer(sentence)["input_ids"]),
    )
    return asked, encode(writer.checkpoint, asked.prompt)


def _stated(asked: Question) -> str:
    """Return the sentence that states the asked fact."""
    fact = asked.facts[-1]
    return next(said for said in map(fact.say, fact.kind.statements) if said in asked.prompt)


def _end_line(screen: Console) -> None:
    """End the last line of a live display where the output is no terminal; on one, rich does it itself."""
    if not screen.is_terminal:
        screen.print()


def _title(screen: Console, title: str) -> None:
    """Print a heading."""
    screen.print(Text(title, "bold cyan"))


class Page:
    """A growing text with the size of the cache below it; on a terminal it is redrawn in place."""

    def __init__(self, screen: Console, engine: kvkeep.Engine) -> None:
        self._screen, self._engine, self._text, self._seen = screen, engine, Text(OPENING, "dim"), 0
        self._result: kvkeep.Result | None = None
        self._live = Live(console=screen, auto_refresh=False, vertical_overflow="visible")  # else cut at a low screen
        self._written = 0.0

    def __enter__(self) -> Page:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update(self._render(), refresh=True)
        self._live.stop()
        _end_line(self._screen)

    def write(self, event: kvkeep.Event, seen: int) -> None:
        """Add a piece of text; on a terminal the page is redrawn, at most ten times a second.

        Args:
            event: the new token.
            seen: tokens that the model has read by now.
        """
        self._text.append(console.printable(event.text), "default")
        self._seen, self._result = seen, event.result
        if self._screen.is_terminal and time.perf_counter() - self._written > 0.1:
            self._written = time.perf_counter()
            self._live.update(self._render(), refresh=True)

    def _render(self) -> RenderableType:
        """Return the story so far, with bars for the bytes of the bounded and of a full cache."""
        seen, held = self._seen, min(self._seen, STORY_BUDGET)
        memory = self._result.memory_usage if self._result else self._engine.memory_usage()
        bars = Table.grid(padding=(0, 2))
        ours, theirs = memory.allocated_bytes, memory.full_bytes
        bars.add_row("bounded cache", f"{held} of {seen} tokens", console.show_bytes(ours), _bar(ours, theirs))
        bars.add_row("full cache", f"{seen} tokens", console.show_bytes(theirs), _bar(theirs, ours))
        return Group(Panel(self._text), Padding(bars, (0, 2, 1, 2)))


def _bar(mine: int, other: int, width: int = 24) -> Text:
    """Return the bar of the first of two sizes, of one character or more. The larger size would fill the width.

    It is green unless ``mine`` is the larger one.
    """
    return Text("█" * max(1, round(width * mine / max(mine, other, 1))), "green" if mine <= other else "red")
