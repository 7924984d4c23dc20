"""The work of ``kvkeep remember``: a text is read once, and its memory is written to a file.

Bad input is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from shlex import quote as quoted
from typing import Any

import typer

from kvkeep import budget as budgets
from kvkeep.cache.layer_layout import DEFAULT_BUDGET, Layout, default_policy
from kvkeep.cli import console
from kvkeep.cli.files import read_text
from kvkeep.cli.loading import check_weights, with_source, writer_of
from kvkeep.cli.options import adapter_words
from kvkeep.cli.progress import reading
from kvkeep.cli.remember import RememberOptions
from kvkeep.engine.admission import check_room
from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Result
from kvkeep.models import threads
from kvkeep.models.adapters import check_folders
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.device import enough_memory, parse_device
from kvkeep.models.load import embedded, find, quiet
from kvkeep.models.tokenization import Opening, Writer, check_length, noted, opened
from kvkeep.policies import LATER
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import label, parse, spec

ROOM = 2048
"""Tokens of questions and answers for which a policy that keeps everything has room by default."""


@dataclass(frozen=True)
class _Text:
    """A text that has passed all checks, with its tokens.

    Attributes:
        ids: its token ids.
        opening: how questions follow it.
        policy: the eviction policy.
        budget: tokens per layer and head.
        position_mode: ``true`` or ``slot``.
    """

    ids: list[int]
    opening: Opening
    policy: Policy
    budget: int
    position_mode: str


def serve(request: RememberOptions) -> None:
    """Read a text and write its memory to a file.

    Raises:
        KVKeepError: the request or the model cannot be used, a step failed, or the file cannot be written.
        Exit: the user pressed Ctrl-C; no file was written.
    """
    try:
        with quiet(), threads.restored(), enough_memory(parse_device(request.device)):
            _serve(request)
    except KeyboardInterrupt as interrupt:
        console.note(f"stopped; {request.output} was not written")
        raise typer.Exit(console.INTERRUPTED) from interrupt


def _serve(request: RememberOptions) -> None:
    """Check the options, read the text and write its memory."""
    policy = None if request.policy is None else parse(request.policy)
    budgets.check(1 if request.budget is None else request.budget)
    check_weights(request)
    check_folders(request.adapter)
    content = read_text(request.text, kind="text", purpose="Give the model some text to remember.")
    name = request.model or embedded()
    console.progress(f"loading {name} …")
    checkpoint = find(name, allow_pickle=request.allow_pickle)
    text = _prepare(checkpoint, request, policy or default_policy(checkpoint.config, LATER), content)
    writer = writer_of(checkpoint, request, request.adapter, merge=True)
    engine = Engine(
        writer.model,
        checkpoint.tokenizer,
        policy=text.policy,
        budget=text.budget,
        rows=1,
        prefill_chunk=request.prefill_chunk,
        layer_budget=request.layer_budget,
        head_budget=request.head_budget,
        kv_bits=request.kv_bits,
        positions=request.positions,
    )
    start = time.perf_counter()
    named = next(iter(engine.adapters), None)  # quantised weights, into which nothing is merged
    with engine.session(adapter=named) as session, reading(writer.model, len(text.ids)):
        result = session.read(text.ids)
        snapshot = with_source(noted(session.snapshot(), text.opening), request.model)
    seconds = time.perf_counter() - start
    request.check_output()
    snapshot.save(request.output)
    _report(request, writer, text, result, seconds)


def _prepare(checkpoint: Checkpoint, request: RememberOptions, policy: Policy, content: str) -> _Text:
    """Return the text with its tokens, after a check that the model and the budget have room for them.

    Raises:
        KVKeepError: there is no room, or the text cannot be encoded.
    """
    ids, opening = opened(checkpoint, content, system=request.system, raw=request.raw)
    check_length(checkpoint, len(ids), 1)
    budget = request.budget or (DEFAULT_BUDGET if policy.evicts else len(ids) + ROOM)
    spread: dict[str, Any] = {"layer_budget": request.layer_budget, "head_budget": request.head_budget}
    layout = Layout.of(checkpoint.config, policy, positions=request.positions, kv_bits=request.kv_bits, **spread)
    check_room(layout, budget, len(ids), 1)
    mode = layout.positions
    trained = checkpoint.trained_length
    if trained and len(ids) > trained and mode == "true":
        console.note(
            f"{len(ids)} tokens are more than the {trained} that the model was trained for. --positions slot gives "
            "tokens their rank in the memory instead."
        )
    return _Text(ids, opening, policy, budget, mode)


def _report(request: RememberOptions, writer: Writer, text: _Text, result: Result, seconds: float) -> None:
    """Print what was written, as JSON or in words."""
    size, memory = request.output.stat().st_size, result.memory_usage
    if request.json:
        console.write_json(
            {
                "file": str(request.output),
                "file_bytes": size,
                "model": writer.checkpoint.name,
                **({"adapter": next(iter(request.adapter))} if request.adapter else {}),
                "dtype": writer.dtype,
                "device": writer.device,
                "policy": spec(text.policy),
                "budget": text.budget,
                "prefill_chunk": request.prefill_chunk,
                "layer_budget": request.layer_budget or text.policy.defaults.layer_budget,
                "head_budget": request.head_budget,
                "kv_bits": request.kv_bits,
                "positions": text.position_mode,
                "tokens": len(text.ids),
                "seconds": seconds,
                "memory": {**asdict(memory), "compression": memory.compression},
            }
        )
        return
    full = console.show_bytes(memory.full_bytes)
    kept = f"compression {console.show_factor(memory.full_bytes / size)}" if memory.full_bytes > size else "all is kept"
    words = adapter_words(request.adapter) + (["--load-in", request.load_in] if request.load_in else [])
    weights = "".join(f"{quoted(word)} " for word in words)
    screen = console.out()
    screen.print(
        console.facts(
            {
                "text": f"{console.count(len(text.ids), 'token')} read in {console.show_seconds(seconds)}",
                "policy": f"{label(text.policy)}, budget {text.budget}; {writer.dtype} on {writer.device}",
                "memory": f"{console.show_bytes(size)} in {request.output}; {full} in a full cache, {kept}",
            }
        )
    )
    file = quoted(str(request.output))
    screen.print(f"\n    kvkeep generate {weights}--memory {file} -p QUESTION", soft_wrap=True)  # to be copied
