"""The work of ``kvkeep remember``: a text is read once, and its memory is written to a file.

Bad input is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import typer

from kvkeep import budget as budgets
from kvkeep.cache.layer_layout import DEFAULT_BUDGET, Layout, default_policy
from kvkeep.cli import console
from kvkeep.cli.files import read_text
from kvkeep.cli.loading import check_weights, with_source, words_for_memory, writer_of
from kvkeep.cli.progress import reading
from kvkeep.cli.remember import RememberOptions
from kvkeep.engine.admission import check_room
from kvkeep.engine.dispatcher import Uninterrupted
from kvkeep.engine.engine import Engine
from kvkeep.engine.passages import Passages, smallest
from kvkeep.engine.request import Result
from kvkeep.errors import BudgetError, InputError, KVKeepError
from kvkeep.models import threads
from kvkeep.models.adapters import check_folders
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.device import enough_memory, parse_device
from kvkeep.models.load import find, quiet
from kvkeep.models.tiny import embedded
from kvkeep.models.tokenization import Opening, Writer, check_length, noted, opened
from kvkeep.policies import LATER
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import label, parse, spec
from kvkeep.result_files import command
from kvkeep.snapshot.fidelity import ALL, Fidelity
from kvkeep.snapshot.fidelity import noted as noted_fidelity
from kvkeep.snapshot.snapshot import Snapshot

ENOUGH = 0.9
"""A fidelity below which the search for a larger budget is proposed."""
ROOM = 2048
"""Tokens of questions and answers for which a policy that keeps everything has room by default."""


@dataclass(frozen=True)
class _Text:
    """A text that has passed all checks, with its tokens.

    Attributes:
        ids: its token ids.
        opening: how questions follow it.
        policy: the eviction policy, as it was named.
        layout: the eviction policy, and how budgets are spread over the model's layers.
        budget: tokens per layer and head.
    """

    ids: list[int]
    opening: Opening
    policy: Policy
    layout: Layout
    budget: int

    @property
    def keeps_all(self) -> bool:
        """Return whether the budget has room for all tokens of the text, so that reading it evicts none."""
        return self.layout.keeps_all(self.budget, len(self.ids))


def serve(request: RememberOptions) -> None:
    """Read a text and write its memory to a file.

    Raises:
        KVKeepError: the request or the model cannot be used, a step failed, or the file cannot be written.
        Exit: the user pressed Ctrl-C; a note says whether the file was written.
    """
    written = False
    try:
        with quiet(), threads.restored(), enough_memory(parse_device(request.device)):
            writer, made = _made(request)
            request.check_output()
            with Uninterrupted():  # so that the note is true
                noted_fidelity(made.snapshot, made.fidelity).save(request.output)
                written = True
            _report(request, writer, made)
    except KeyboardInterrupt as interrupt:
        console.note(f"stopped; {request.output} was {'' if written else 'not '}written")
        raise typer.Exit(console.INTERRUPTED) from interrupt


def _made(request: RememberOptions) -> tuple[Writer, _Made]:
    """Check the options, read the text, and return the model and the memory."""
    policy = None if request.policy is None else parse(request.policy)
    if isinstance(request.budget, int):
        budgets.check(request.budget)
    check_weights(request)
    check_folders(request.adapter)
    content = read_text(request.text, kind="text", purpose="Give the model some text to remember.")
    name = request.model or embedded()
    console.progress(f"loading {name} …")
    checkpoint = find(name, allow_pickle=request.allow_pickle)
    text = _prepare(checkpoint, request, policy or default_policy(checkpoint.config, LATER), content)
    writer = writer_of(checkpoint, request, request.adapter, merge=True)
    if request.fidelity is not None:
        return writer, _searched(request, writer, text)
    return writer, _Reader(request, writer, text).read(text.budget)


@dataclass(frozen=True)
class _Made:
    """A memory that was made of a text.

    Attributes:
        text: the text, with the budget of the memory.
        snapshot: the memory.
        result: what the engine says of the reading.
        fidelity: how much it keeps of what the text tells; ``None`` if that was not measured.
        unmeasured: the reason why not.
        seconds: of the readings, and of the measurements.
        tried: the fidelity under each budget that was tried.
    """

    text: _Text
    snapshot: Snapshot
    result: Result
    fidelity: Fidelity | None
    unmeasured: str
    seconds: tuple[float, float]
    tried: Mapping[int, float] = field(default_factory=dict)


class _Reader:
    """Reads a text under budgets, and measures what each memory keeps of it.

    Args:
        request: the options.
        writer: the model.
        text: the text.
    """

    def __init__(self, request: RememberOptions, writer: Writer, text: _Text) -> None:
        self._request, self._writer, self._text = request, writer, text
        self._passages: Passages | None = None

    def read(self, budget: int) -> _Made:
        """Read the text under a budget, measure its memory unless the user has forbidden it, and return both.

        Raises:
            KVKeepError: the budget cannot be used, or a step failed.
        """
        request, writer, text = self._request, self._writer, replace(self._text, budget=budget)
        engine = Engine(
            writer.model,
            writer.checkpoint.tokenizer,
            policy=text.policy,
            budget=budget,
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
        read = time.perf_counter()
        fidelity, why = self._fidelity(snapshot, text, named)
        return _Made(text, snapshot, result, fidelity, why, (read - start, time.perf_counter() - read))

    def _fidelity(self, snapshot: Snapshot, text: _Text, adapter: str | None) -> tuple[Fidelity | None, str]:
        """Return the fidelity of a memory and ``""``; or ``None`` and the reason why there is none."""
        if self._request.no_fidelity:
            return None, "--no-fidelity"
        if text.keeps_all and self._request.kv_bits is None:
            return ALL, ""
        working = console.Heartbeat.working(lambda: "measuring what the memory keeps of the text …")
        try:
            with working, enough_memory(self._writer.model.device, "Give --no-fidelity, or a smaller budget."):
                if self._passages is None:
                    self._passages = Passages(self._writer, text.ids, adapter=adapter)
                return self._passages.measure(snapshot, text.policy), ""
        except KVKeepError as error:  # the memory is of use without a number
            return None, str(error)


def _searched(request: RememberOptions, writer: Writer, text: _Text) -> _Made:
    """Return the memory of about the smallest budget (at most a tenth more) that reaches the asked fidelity.

    If none below the text's length does, the memory has room for the whole text, and a note says so.

    Raises:
        InputError: the policy protects more tokens than the text has, or the fidelity cannot be measured.
        KVKeepError: a step failed.
    """
    reader, wanted = _Reader(request, writer, text), cast(float, request.fidelity)
    whole, made, tried = len(text.ids), dict[int, _Made](), dict[int, float]()
    least = smallest(lambda budget: _has_room(text.layout, budget), 1, whole, factor=1.0)  # exactly, as it costs little
    if not _has_room(text.layout, least):
        raise InputError(
            f"{text.policy} protects more tokens than the {whole} that the text has, so no budget evicts any. Leave "
            "--fidelity out, or let the policy protect fewer."
        )

    def reaches(budget: int) -> bool:
        console.progress(f"reading under a budget of {budget} …")
        read = reader.read(budget)
        if read.fidelity is None:
            raise InputError(f"No fidelity was measured: {read.unmeasured}. Give --budget in place of --fidelity.")
        tried[budget] = read.fidelity.share
        if enough := read.fidelity.share >= wanted:
            made.clear()  # a larger memory, which nobody needs any more
            made[budget] = read
        return enough

    budget = smallest(reaches, least, whole)
    if budget not in made:  # the whole text, which need not be read to know that it reaches it
        made[budget] = reader.read(budget)
        if tried:  # as of a text that is longer than the model can quote from
            most = max(tried)
            console.note(
                f"the memory has room for the whole text, since {most} of its {whole} tokens keep "
                f"{tried[most]:.0%}, less than {wanted:.0%}"
            )
    return replace(made[budget], tried=tried)


def _has_room(layout: Layout, budget: int) -> bool:
    """Return whether every layer's budget has room for what the policy protects."""
    try:
        layout.check_pins(budget, ())
    except BudgetError:
        return False
    return True


def _prepare(checkpoint: Checkpoint, request: RememberOptions, policy: Policy, content: str) -> _Text:
    """Return a text with its tokens, policy and budget, after a check that the model and the budget have room for it.

    Raises:
        KVKeepError: there is no room, or the text cannot be encoded.
    """
    ids, opening = opened(checkpoint, content, system=request.system, raw=request.raw)
    check_length(checkpoint, len(ids), 1)  # 1: the least; the model does not read the last new token
    if request.fidelity is not None and not policy.evicts:
        raise InputError(f"{policy} keeps all of a text, and --fidelity is for policies that evict. Leave one out.")
    budget = request.budget or (DEFAULT_BUDGET if policy.evicts else len(ids) + ROOM)
    if isinstance(budget, float):
        budget = budgets.from_ratio(budget, len(ids))
    spread: dict[str, Any] = {"layer_budget": request.layer_budget, "head_budget": request.head_budget}
    layout = Layout.of(checkpoint.config, policy, positions=request.positions, kv_bits=request.kv_bits, **spread)
    if request.fidelity is None:  # otherwise the search asks for the budgets that there are
        check_room(layout, budget, len(ids), 1)
    trained = checkpoint.trained_length
    if trained and len(ids) > trained and layout.positions == "true":
        console.note(
            f"{len(ids)} tokens are more than the {trained} that the model was trained for. --positions slot gives "
            "tokens their rank in the memory instead."
        )
    return _Text(ids, opening, policy, layout, budget)


def _report(request: RememberOptions, writer: Writer, made: _Made) -> None:
    """Print what was written, as JSON or in words."""
    size, memory, text = request.output.stat().st_size, made.result.memory_usage, made.text
    if request.json:
        measured = None if made.fidelity is None else asdict(made.fidelity)
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
                "positions": text.layout.positions,
                "tokens": len(text.ids),
                "seconds": made.seconds[0],
                "memory": {**asdict(memory), "compression": memory.compression},
                "fidelity": measured,
                "fidelity_seconds": made.seconds[1],
                "budgets_tried": made.tried,
            }
        )
        return
    full = console.show_bytes(memory.full_bytes)
    kept = f"compression {console.show_factor(memory.full_bytes / size)}" if memory.full_bytes > size else "all is kept"
    screen = console.out()
    screen.print(
        console.facts(
            {
                "text": f"{console.count(len(text.ids), 'token')} read in {console.show_seconds(made.seconds[0])}",
                "policy": f"{label(text.policy)}, budget {text.budget}; {writer.dtype} on {writer.device}",
                "memory": f"{console.show_bytes(size)} in {request.output}; {full} in a full cache, {kept}",
                "fidelity": _fidelity_words(request, made),
            }
        )
    )
    words = words_for_memory(request, request.adapter, text.policy)
    line = command("kvkeep generate", *words, "--memory", request.output, "-p", "QUESTION")
    screen.print(f"\n    {line}", soft_wrap=True)  # to be copied


def _fidelity_words(request: RememberOptions, made: _Made) -> str:
    """Return in words what a memory keeps of the text, and how to get more where that is little."""
    if made.fidelity is None:
        return f"not measured: {made.unmeasured}"
    if request.fidelity is None and made.fidelity.share < ENOUGH:
        return f"{made.fidelity}; --fidelity {ENOUGH} finds the budget that keeps {ENOUGH:.0%}"
    return f"{made.fidelity}"
