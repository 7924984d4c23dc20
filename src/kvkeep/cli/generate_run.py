"""The work of ``kvkeep generate`` for one prompt, and what it shares with other commands that generate text.

These are saved memories, which bring their settings, and checks of requests. Importing this module imports torch and
transformers.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvkeep import budget as budgets
from kvkeep import engine as engines
from kvkeep.cache.layer_layout import Layout, default_budget, rule_for_layers
from kvkeep.cli import console
from kvkeep.cli.files import refuse_device
from kvkeep.cli.generate import GenerateOptions, GenerationOptions, word_of_prompt
from kvkeep.cli.loading import check_weights, source_of, writer_of
from kvkeep.cli.progress import ProgressBar, reading
from kvkeep.config import NAME, Config
from kvkeep.engine.admission import check_room
from kvkeep.engine.budget_guard import levels
from kvkeep.engine.engine import Engine
from kvkeep.engine.prompt_encoding import ConversationHistory
from kvkeep.engine.request import Result, checked_guard, json_structure
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError, KVKeepError, ModelFileError, SnapshotError
from kvkeep.models import threads, tokenization
from kvkeep.models.adapters import check_folders, merged_into
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.device import enough_memory, parse_device
from kvkeep.models.load import find, process_group, quiet
from kvkeep.models.message_tokens import system_spans
from kvkeep.models.tiny import embedded
from kvkeep.pins import Spans, spans
from kvkeep.policies._head_budgets import PROFILE
from kvkeep.policies._keep_prompt import keeping
from kvkeep.policies.base import Policy, share_kept
from kvkeep.policies.registry import available, label, parse, spec, split
from kvkeep.result_files import in_full
from kvkeep.snapshot.fingerprint import Fingerprint, hash_of_config, name_of_policy, policy_named, rule
from kvkeep.snapshot.snapshot import Snapshot
from kvkeep.types import MemoryUsage


@dataclass(frozen=True)
class SavedMemory:
    """A memory from a file.

    Attributes:
        file: its name in messages.
        snapshot: the memory.
        digest: a hash of the file's content.
    """

    file: str
    snapshot: Snapshot
    digest: str

    @classmethod
    def read(cls, file: str, *, shown: str | None = None) -> SavedMemory:
        """Return the memory of a file that ``kvkeep remember`` or ``kvkeep chat`` has written.

        Args:
            file: its name.
            shown: its name in messages; by default the same.

        Raises:
            SnapshotError: the file cannot be read, or holds no memory whose tokens are known.
        """
        snapshot = Snapshot.load(file)
        ConversationHistory.of(snapshot)  # refuses a memory without token ids
        with in_full(file).open("rb") as content:
            return cls(shown or file, snapshot, hashlib.file_digest(content, "sha256").hexdigest()[:16])

    def check_adapter(self, adapters: Mapping[str, str]) -> None:
        """Refuse to continue the memory of an adapter without one, or the other way round, before weights are read.

        Which adapter it is, its weights tell later.

        Raises:
            SnapshotError: the memory was made with an adapter and none is given, or without one.
        """
        made = self.snapshot.fingerprint
        if made.adapter is not None and not adapters:
            raise SnapshotError(
                f"{self.file} is a memory of {made.model} with the adapter {made.adapter}. Give that adapter, too: "
                f"--adapter {made.adapter}=FOLDER"
            )
        if made.adapter is None and adapters:
            raise SnapshotError(
                f"{self.file} is a memory of {made.model} without an adapter. Leave --adapter out, or read the text "
                "again with it."
            )

    def check_model(self, checkpoint: Checkpoint, *, named: bool = True) -> None:
        """Refuse another model before its weights are read.

        Args:
            checkpoint: the model.
            named: whether the user has named it.

        Raises:
            SnapshotError: the memory was made with a model of another configuration.
        """
        made = self.snapshot.fingerprint
        if made.config == hash_of_config(checkpoint.config):
            return
        if not named:
            raise SnapshotError(
                f"No MODEL was given, and {self.file} was made with {made.model}. That is not "
                f"{title_of(self.source)}, or has changed. Give the MODEL that it was made with."
            )
        raise SnapshotError(
            f"{self.file} is a memory of the model {made.model}, and {checkpoint.name} has another configuration. "
            f"Give the model that it was made with, or read the text again with {checkpoint.name}."
        )

    @property
    def source(self) -> str | None:
        """Return the model that has made the memory, as a command takes it; ``None`` for the embedded model.

        Raises:
            SnapshotError: the file's note holds no name.
        """
        return source_of(self.snapshot, self.file)


def find_model(request: GenerationOptions, memory: SavedMemory | None) -> Checkpoint:
    """Find the model of a request, without its weights, and check that it is that of its memory, if it has one.

    Raises:
        InputError: weights may be pickles, and the file of the memory names the model.
        KVKeepError: there is no such model, kvkeep cannot run it, or it is not the memory's.
    """
    name = request.model or embedded()
    if memory is not None and not request.names_model and request.allow_pickle:
        raise InputError(
            f"--allow-pickle is for a model that you name, and {memory.file} names {title_of(request.model)}. Give "
            "that as the MODEL if you trust its files."
        )
    try:
        checkpoint = find(name, allow_pickle=request.allow_pickle)
    except ModelFileError as error:
        if memory is None or request.names_model:
            raise
        raise ModelFileError(
            f"No MODEL was given, and {memory.file} was made with {title_of(request.model)}. {error} Give the MODEL by "
            "the name that it has now."
        ) from error
    if memory is not None:
        memory.check_model(checkpoint, named=request.names_model)
    return checkpoint


def title_of(model: str | None) -> str:
    """Return the name of a model for a message; ``None`` is the embedded model."""
    return model or "the embedded model"


_G = TypeVar("_G", bound=GenerationOptions)


def with_memory_settings(request: _G, memory: SavedMemory | None) -> _G:
    """Return the request with the settings of its memory, the only valid ones; without a memory the request itself.

    A request without a model gets the memory's.

    Raises:
        InputError: an option was given that is not the memory's.
        SnapshotError: the memory's policy is not registered, and the user has not named it.
    """
    if memory is None:
        return request
    made = memory.snapshot.fingerprint
    for flag, given, own in _settings(request, made):
        if given is not None and given != own:
            shown = "none" if own is None else own
            raise InputError(
                f"{flag} {given} is not that of {memory.file}, {shown}, and a memory means nothing under other "
                f"settings. Leave {flag} out."
            )
    if not request.names_policy:
        policy_named(made.policy)  # a file may name any module, which the user has not named
    return replace(
        request,
        model=memory.source if request.model is None else request.model,
        names_model=request.model is not None,
        policy=request.policy if request.names_policy else made.policy,
        budget=made.budget,
        prefill_chunk=made.chunk,
        layer_budget=made.layer_budget if isinstance(made.layer_budget, str) else list(made.layer_budget),
        head_budget=made.head_budget,
        kv_bits=made.kv_bits,
        positions="slot" if made.positions == "slot" else "true",  # the field's type has these words alone
        dtype=made.dtype or request.dtype,
    )


def _settings(request: GenerationOptions, made: Fingerprint) -> list[tuple[str, object, object]]:
    """Return the options that a memory decides: flag, given value (``None``: it was not given), the memory's value."""
    layer_budget = None if request.layer_budget is None else rule(request.layer_budget)
    return [
        ("--policy", name_of_policy(parse(request.policy)) if request.names_policy else None, made.policy),
        ("--budget", request.budget, made.budget),
        ("--prefill-chunk", request.prefill_chunk, made.chunk),
        ("--layer-budget", layer_budget, made.layer_budget),
        ("--head-budget", request.head_budget, made.head_budget),
        ("--kv-bits", request.kv_bits, made.kv_bits or "16"),
        ("--keep-prompt", share_kept(request.keep_prompt), _keep_prompt_of(made)),
        ("--positions", request.positions, made.positions),
        ("--dtype", None if request.dtype == "auto" else request.dtype, made.dtype or request.dtype),
    ]


def _keep_prompt_of(made: Fingerprint) -> float | None:
    """Return the share of its budget that the prompts of a memory keep; ``None`` for a policy of another package, which
    a file must not import.
    """
    return parse(made.policy).keep_prompt if split(made.policy)[0] in available() else None


def with_keep_prompt(request: _G) -> _G:
    """Return a request whose policy carries ``--keep-prompt`` as an option; the request itself if it was not given.

    Raises:
        PolicyError: there is no such policy.
    """
    if request.keep_prompt is None:
        return request
    return replace(request, policy=spec(keeping(parse(request.policy), request.keep_prompt)))


def with_file_settings(request: GenerateOptions) -> GenerateOptions:
    """Return the request with the settings of its ``kvkeep.toml`` where an option was not given; itself without a file.

    Raises:
        InputError: the file cannot be used.
    """
    if (file := request.config) is None:
        return request
    if not file:
        raise InputError(f"--config is empty. Give the {NAME} that kvkeep tune has written, or leave it out.")
    refuse_device(file, "configuration")
    found = Config.read(file).settings()
    # a file's weights are read as a tuple; the option that they stand for is typed as a list
    if isinstance(weights := found.get("layer_budget"), tuple):
        found["layer_budget"] = list(weights)
    if "kv_bits" in found:  # a number or a word in the file, a word on the command line
        found["kv_bits"] = str(found["kv_bits"])
    if request.keep_ratio is not None:  # a share, which the user has given as the budget
        found.pop("budget", None)
    named = request.names_policy or "policy" in found
    return replace(
        request, **{name: value for name, value in found.items() if _is_open(request, name)}, names_policy=named
    )


def _is_open(request: GenerateOptions, name: str) -> bool:
    """Return whether the command line leaves a setting open, so that a file of settings decides it."""
    if name == "policy":
        return not request.names_policy
    given: Any = getattr(request, name)
    return given is None or (name == "dtype" and given == "auto")


# A request for one prompt, checked before weights are read, and its model.
#
# Importing this module imports torch and transformers.


@dataclass(frozen=True)
class PreparedRequest:
    """A request that has passed all checks, with its model.

    Attributes:
        request: the options of the command.
        checkpoint: the model's configuration and tokenizer.
        writer: the model.
        prompt: token ids, or a text.
        policy: the eviction policy.
        budget: tokens per layer and head.
        layout: how the budget is spread over the model's layers.
        sampling: how tokens are chosen.
        pins: spans of the prompt that are never evicted.
        memory: the memory that the prompt follows; the prompt is then a text.
    """

    request: GenerateOptions
    checkpoint: Checkpoint
    writer: tokenization.Writer
    prompt: Sequence[int] | str
    policy: Policy
    budget: int
    layout: Layout
    sampling: SamplingParams
    pins: Spans = ()
    memory: SavedMemory | None = None

    @property
    def asked(self) -> engines.Request:
        """Return the prompt as a request to an engine, with the memory that it follows, if any."""
        schema = self.request.json_schema
        form = None if schema is None else json_structure(schema)
        # without a memory the engine was made with the policy, and the prompt is token ids already
        if self.memory is None:
            return engines.Request(
                prompt=self.prompt,
                adapter=self.adapter,
                chat=not self.request.raw,
                sampling=self.sampling,
                pins=self.pins,
                structured_outputs=form,
            )
        return engines.Request(
            prompt=self.prompt,
            raw=self.request.raw,
            sampling=self.sampling,
            snapshot=self.memory.snapshot,
            adapter=self.adapter,
            policy=self.policy,  # the engine would not load a policy's module because a snapshot names it
            structured_outputs=form,
        )

    @property
    def adapter(self) -> str | None:
        """Return the adapter that the request names; ``None`` without one, or if it was merged into the weights."""
        return next(iter(self.request.adapter), None) if merged_into(self.writer.model) is None else None

    @property
    def name(self) -> str:
        """Return the name of the policy with its preset or options, as people read it."""
        return label(self.policy)

    @property
    def position_mode(self) -> str:
        """Return the mode of positions: ``true``, as in the text, or ``slot``, ranks in the cache."""
        return self.layout.positions


def prepare(request: GenerateOptions) -> PreparedRequest:
    """Check a request, cheap tests first, load its model, and return both with the prompt's tokens and the budget.

    Raises:
        KVKeepError: the request or the model cannot be used.
    """
    sampling = sampling_of(request)
    if request.json_schema is not None:
        json_structure(request.json_schema)
    memory = None if request.memory is None else SavedMemory.read(request.memory)
    if memory is not None:
        memory.check_adapter(request.adapter)
    request = with_keep_prompt(with_memory_settings(request, memory))
    policy = parse(request.policy)
    budgets.check(1 if request.budget is None else request.budget)  # 1 passes: the default comes later
    if request.keep_ratio is not None:
        budgets.from_ratio(request.keep_ratio, tokens=1)  # checks the share before the model is loaded
    checked_guard(request.guard)
    check_weights(request)
    check_folders(request.adapter)
    console.progress(f"loading {title_of(request.model)} …")
    checkpoint = find_model(request, memory)
    prompt = _encode(checkpoint, request) if memory is None else request.prompt
    pins = system_spans(checkpoint, messages_of(request)) if request.pin_system else ()
    tokens = len(prompt) if memory is None else memory.snapshot.seen + 1  # a question has at least one
    tokenization.check_length(checkpoint, tokens, sampling.max_new_tokens)
    budget = _choose_budget(request, policy, tokens)
    if memory is None:
        request = with_rule_for_layers(request, rule_for_layers(budget, tokens + sampling.max_new_tokens))
    spread: dict[str, Any] = {"layer_budget": request.layer_budget, "head_budget": request.head_budget}
    layout = Layout.of(checkpoint.config, policy, positions=request.positions, kv_bits=request.kv_bits, **spread)
    check_room(layout, budget, tokens, sampling.max_new_tokens)  # checks the numbers, too
    layout.check_pins(budget, pins)
    if memory is None:  # else the engine checks it, which knows the tokens of the question
        layout.check_read(budget, spans((*pins, (0, tokens))))
    if request.guard is not None:
        levels(layout, budget, pins)  # refuses a policy that cannot be guarded
    writer = writer_of(checkpoint, request, request.adapter, merge=True)
    return PreparedRequest(request, checkpoint, writer, prompt, policy, budget, layout, sampling, pins, memory)


def with_rule_for_layers(request: GenerateOptions, rule: str | None) -> GenerateOptions:
    """Return the options with ``rule`` for layers, unless the user has named one or a profile, which is one as well."""
    named = request.layer_budget is not None or str(request.head_budget).startswith(PROFILE)
    return request if named else replace(request, layer_budget=rule)


def sampling_of(request: GenerationOptions) -> SamplingParams:
    """Return the sampling options of a request.

    Raises:
        InputError: a number is out of range.
    """
    return SamplingParams(
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        seed=request.seed,
        repetition_detection=request.repetition_detection,
    )


def engine_for(writer: tokenization.Writer, request: GenerationOptions, **options: Any) -> Engine:
    """Return a new engine with the options of a request, for one prompt or many.

    Args:
        writer: the model.
        request: the options of the command.
        options: options of `Engine` that replace the request's.
    """
    asked = {
        "policy": request.policy,
        "prefill_chunk": request.prefill_chunk,
        "layer_budget": request.layer_budget,
        "head_budget": request.head_budget,
        "kv_bits": request.kv_bits,
        "positions": request.positions,
        "guard": request.guard,
    }
    return Engine(writer.model, writer.checkpoint.tokenizer, **{**asked, **options})


def _choose_budget(request: GenerateOptions, policy: Policy, prompt_tokens: int) -> int:
    """Return the budget in tokens: a share of the prompt, the number given, or the default."""
    if request.keep_ratio is not None:
        return budgets.from_ratio(request.keep_ratio, prompt_tokens)
    if request.budget is not None:
        return request.budget
    return default_budget(policy, prompt_tokens + request.max_new_tokens)


def _encode(checkpoint: Checkpoint, request: GenerateOptions) -> list[int]:
    """Return the token ids of the prompt, after the system message if there is one.

    Raises:
        InputError: there is a system message and no chat template.
    """
    if request.system is None:
        plain: list[int] = tokenization.encode(checkpoint, request.prompt, raw=request.raw)[0].tolist()
        return plain
    if checkpoint.tokenizer.chat_template is None:
        raise InputError(
            f"The tokenizer of {checkpoint.name} has no chat template, so --system has no place. Put its text at the "
            "beginning of the prompt."
        )
    found: list[int] = tokenization.encode_chat(checkpoint, messages_of(request))[0].tolist()
    return found


def messages_of(request: GenerationOptions) -> list[dict[str, str]]:
    """Return two messages: the system message, which is empty if there is none, and the prompt as the user's."""
    return [{"role": "system", "content": request.system or ""}, {"role": "user", "content": request.prompt}]


# The summary of a finished prompt, and notes on it.


_ENDS = {
    "stop": "the model ended its text",
    "length": "stopped at --max-new-tokens",
    "repetition": "stopped by --repetition-detection",
}
"""Why a text has ended, in words."""


def summarise(job: PreparedRequest, result: Result) -> dict[str, str]:
    """Return the lines of the summary of a finished prompt, name → text: policy, prompt, new tokens, memory, losses."""
    new = len(result.token_ids)
    speed = f"{console.show_speed(result.tpot_s)}, " if result.tpot_s else ""
    end = _ENDS.get(result.finish_reason, "stopped")
    room = _budget(job, result) if job.policy.evicts else f"room for {console.count(job.budget, 'token')}"
    lost, read = _lost(result), result.prompt_tokens - result.cached_tokens
    after = f", after {console.count(result.cached_tokens, 'remembered token')}" if result.cached_tokens else ""
    return {
        "policy": f"{job.name}, {room}; {job.writer.dtype} on {job.writer.device}",
        "prompt": f"{console.count(read, 'token')} in {console.show_seconds(result.ttft_s or 0.0)}{after}",
        "new": f"{console.count(new, 'token')}, {speed}{end}",
        "KV memory": _memory(job, result),
        **({"lost": lost} if lost and not nothing_evicted(job, result) else {}),
    }


def _budget(job: PreparedRequest, result: Result) -> str:
    """Return the budget in words, with the smaller one that ``--guard`` has chosen, if it has."""
    if result.budget == job.budget:
        return f"budget {job.budget}"
    return f"budget {result.budget} of {job.budget}, chosen by --guard"


def _lost(result: Result) -> str:
    """Return in words the shares of attention that evicted tokens carried; empty if they are not known."""
    lost = result.lost_mass
    parts = [] if lost.prompt is None else [f"{_percent(lost.prompt)} of the attention at the prompt's end"]
    if lost.decode is not None:
        parts.append(f"{_percent(lost.decode)} in each new token's step")
    return ", ".join(parts)


def _percent(share: float) -> str:
    """Return a share in percent as text: ``12 %``, with two digits where it is small: ``0.12 %``."""
    if share < 1e-4:
        return "less than 0.01 %" if share > 0 else "0 %"
    # from 9.95 % on, which is shown as 10, whole numbers have two digits; `.2g` would make 1e+02 of 99.6
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"


def remark(job: PreparedRequest, result: Result) -> None:
    """Print notes if the budget breaks ``--guard``, or the text is longer than the model was trained for."""
    total = result.prompt_tokens + len(result.token_ids)
    lost, guard = result.lost_mass.prompt, job.request.guard
    if lost is not None and guard is not None and result.guarded is False:
        console.note(
            f"the whole budget of {job.budget} loses {_percent(lost)} of the attention, more than --guard {guard:g}; "
            "raise --budget."
        )
    trained = job.checkpoint.trained_length
    if trained and total > trained:
        console.note(f"{total} tokens are more than the {trained} that the model was trained for.")


def nothing_evicted(job: PreparedRequest, result: Result) -> str | None:
    """Return why the policy evicted nothing; ``None`` if it did, or may have."""
    fed = result.prompt_tokens + len(result.token_ids) - 1  # the last token is never fed
    if not job.policy.evicts:
        return f"{job.name} keeps every token"
    if job.layout.policy.spreads or job.layout.profile:
        return None  # a head may have less than the budget
    if not job.layout.keeps_all(result.budget, fed):
        return None
    if job.layout.room(result.budget) is None:
        return "nothing was evicted: every layer's sliding window fits the budget"
    return f"nothing was evicted: the text of {console.count(fed + 1, 'token')} is not longer than the budget"


def _memory(job: PreparedRequest, result: Result) -> str:
    """Return in words the bytes that were held, and those of a full cache or why nothing was evicted."""
    memory = result.memory_usage
    held, full = console.show_bytes(memory.allocated_bytes), console.show_bytes(memory.full_bytes)
    if reason := nothing_evicted(job, result):
        return f"{held} held; {reason}"
    if memory.compression < 1:
        return f"{held} held, {full} in a full cache: so short a text needs no budget"
    return f"{held} held, {full} in a full cache, compression {console.show_factor(memory.compression)}"


# Two continuations of one prompt side by side: where they differ, how far they agree, what they cost.

_NARROW = 60
"""On a terminal with fewer columns the texts are shown one above the other."""


@dataclass(frozen=True)
class Side:
    """One of the two runs.

    Attributes:
        name: the policy, or ``full cache``.
        budget: tokens that it may keep, in words.
        result: the text and its tokens.
        held_bytes: keys, values and everything else that its cache holds.
    """

    name: str
    budget: str
    result: Result
    held_bytes: int


@dataclass(frozen=True)
class TextDifference:
    """How two sequences of tokens differ.

    Attributes:
        first_index: index of the first new token that differs, from 0; ``None`` if none does. It is the shorter
            length if one sequence begins with the other.
        bounded_token: the bounded cache's token there; ``None`` if its text had ended.
        full_token: the full cache's token there; ``None`` if its text had ended.
        compared_tokens: length of the shorter sequence.
        equal_tokens: equal tokens at equal places, up to that length.
        agreement_ratio: ``equal_tokens / compared_tokens``.
    """

    first_index: int | None
    bounded_token: str | None
    full_token: str | None
    compared_tokens: int
    equal_tokens: int
    agreement_ratio: float


def measure(bounded: Sequence[int], full: Sequence[int], show_token: Callable[[int], str]) -> TextDifference:
    """Return how the new tokens of two runs differ; neither may be empty.

    Args:
        bounded: token ids under the budget.
        full: token ids of the full cache.
        show_token: returns a token as text.
    """
    pairs = list(zip(bounded, full, strict=False))
    equal = sum(a == b for a, b in pairs)
    first = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))

    def token(ids: Sequence[int]) -> str | None:
        return show_token(ids[first]) if first < len(ids) else None

    return TextDifference(
        first_index=None if first == max(len(bounded), len(full)) else first,
        bounded_token=token(bounded),
        full_token=token(full),
        compared_tokens=len(pairs),
        equal_tokens=equal,
        agreement_ratio=equal / len(pairs),
    )


def show(bounded: Side, full: Side, difference: TextDifference, lost: str) -> None:
    """Print both texts, the figures, and in words what the bounded cache has lost, if anything is known of that."""
    screen = console.out()
    screen.print(_texts(screen, bounded, full))
    screen.print(_figures(bounded, full))
    screen.print()
    screen.print(console.facts(_verdict(bounded, full, difference) | ({"lost": lost} if lost else {})))


def _texts(screen: Console, bounded: Side, full: Side) -> RenderableType:
    """Return both texts side by side, or one above the other in a narrow terminal, with what they share marked."""
    common = _common_length(bounded.result.text, full.result.text)
    panels = [
        Panel(_marked(side.result.text, common), title=Text(side.name), subtitle=Text(side.budget))
        for side in (bounded, full)
    ]
    grid = Table.grid(expand=True)
    if screen.width < _NARROW:
        grid.add_column()
        for panel in panels:
            grid.add_row(panel)
    else:
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(*panels)
    return grid


def _common_length(one: str, other: str) -> int:
    """Return the number of characters of the beginning that two texts share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _marked(text: str, common: int) -> Text:
    """Return the text for a terminal, in colour after its first ``common`` characters."""
    return Text.assemble(console.printable(text[:common]), (console.printable(text[common:]), "yellow"))


def _figures(bounded: Side, full: Side) -> Table:
    """Return the table of new tokens, speed and memory of both runs, a column for each."""
    figures = console.table("", bounded.name, full.name)
    for column in figures.columns[1:]:
        column.justify = "right"
    for name, values in {
        "new tokens": [str(len(side.result.token_ids)) for side in (bounded, full)],
        "time to first token": [console.show_seconds(side.result.ttft_s) for side in (bounded, full)],
        "speed after that": [console.show_speed(side.result.tpot_s) for side in (bounded, full)],
        "KV memory": [console.show_bytes(side.held_bytes) for side in (bounded, full)],
        "compression": [_compression(full.held_bytes / side.held_bytes) for side in (bounded, full)],
    }.items():
        figures.add_row(name, *values)
    return figures


def _compression(factor: float) -> str:
    """Return a compression as text; ``none`` below 1, for a short text may have filled less than the budget."""
    return console.show_factor(factor) if factor >= 1 else "none"


def _verdict(bounded: Side, full: Side, difference: TextDifference) -> dict[str, str]:
    """Return the lines on the first difference of both texts and on how many tokens are equal: name → text."""
    if difference.first_index is None:
        return {"first difference": f"none; all {difference.compared_tokens} tokens are equal"}
    ours, theirs = (
        "end of text" if token is None else repr(token) for token in (difference.bounded_token, difference.full_token)
    )
    return {
        "first difference": f"new token {difference.first_index + 1}: {ours} ({bounded.name}), {theirs} ({full.name})",
        "agreement": f"{difference.agreement_ratio:.0%}: {difference.equal_tokens} of "
        f"{console.count(difference.compared_tokens, 'token')} are equal, place by place",
    }


# The work of ``kvkeep generate`` for one prompt, which the engine runs as a batch of one.
#
# Bad input is refused before weights are read. Importing this module imports torch and transformers.


def serve(request: GenerateOptions) -> None:
    """Continue a prompt and print the text; with ``--compare`` also that of the full cache.

    Raises:
        KVKeepError: the request or the model cannot be used, or a step failed.
        Exit: the user pressed Ctrl-C; the text that was printed stays.
    """
    request = with_file_settings(request)
    try:
        with quiet(), threads.restored(), enough_memory(parse_device(request.device)), process_group():
            job = _prepared(request)
            if request.compare:
                _serve_comparison(job)
            else:
                _serve_one(job)
    except KeyboardInterrupt as interrupt:
        console.note("stopped before the end of the text")
        raise typer.Exit(console.INTERRUPTED) from interrupt


def _prepared(request: GenerateOptions) -> PreparedRequest:
    """Check a request and load its model, see `prepare`. If there is no such model, the error may advise quotes.

    Raises:
        ModelFileError: there is no such model.
    """
    try:
        return prepare(request)
    except ModelFileError as error:
        if remedy := word_of_prompt(request.model, request.prompt_words):
            raise ModelFileError(f"{remedy}. If {request.model} is the model: {error}") from error
        raise


def _run_bounded(job: PreparedRequest, on_text: Callable[[str], object]) -> Result:
    """Run the prompt under its policy and budget, and return the result; ``on_text`` gets each piece of text."""
    return _run(job.asked, engine_for(job.writer, job.request, budget=job.budget, rows=1), on_text)


def _run_full(job: PreparedRequest) -> Result:
    """Run the same prompt with a full cache, without options about the bounded cache, and return the result."""
    total = len(job.prompt) + job.sampling.max_new_tokens
    options = dict.fromkeys(("layer_budget", "head_budget", "positions", "kv_bits", "guard"))
    asked = replace(job.asked, pins=())
    return _run(asked, engine_for(job.writer, job.request, policy="full", budget=total, rows=1, **options), _ignore)


def _run(asked: engines.Request, engine: Engine, on_text: Callable[[str], object]) -> Result:
    """Continue a prompt, call ``on_text`` with each piece of text as soon as it is final, and return the result.

    Progress is shown, unless the text is seen in its place.

    Raises:
        KVKeepError: the engine refuses the prompt, or a step failed.
    """
    result, prompt_tokens = None, 0 if isinstance(asked.prompt, str) or asked.prompt is None else len(asked.prompt)
    with ExitStack() as held:
        held.enter_context(reading(engine.model, prompt_tokens))
        most = asked.sampling.max_new_tokens
        writing = ProgressBar("text", "bar", "percent", "bare left", text="writing", total=most)
        for number, event in enumerate(engine.stream(asked)):
            if number == 0:
                held.close()  # the prompt is read
                if on_text is _ignore or not _is_text_seen():
                    held.enter_context(writing)
            writing.advance(1)
            if event.text:
                on_text(event.text)
            result = event.result
    assert result is not None
    if result.finish_reason == "error":
        new = console.count(len(result.token_ids), "new token")
        raise KVKeepError(f"The text ends after {new}, since a step failed. {result.error}")
    return result


def _is_text_seen() -> bool:
    """Return whether text on standard output is seen where progress would be: on a terminal, or in one file with it."""
    try:
        return sys.stdout.isatty() or os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):  # a stream without a file
        return False


def _ignore(piece: str) -> None:
    """Print nothing."""


def _serve_one(job: PreparedRequest) -> None:
    """Generate one text and print it while it is made, then a summary; or print both as JSON at the end."""
    if job.request.json:
        result = _run_bounded(job, _ignore)
        console.write_json({**_describe(job), **_result(result), "memory": _measure(result.memory_usage)})
        return
    with console.streamed_text() as write:
        result = _run_bounded(job, write)
    screen = console.err()
    screen.print()
    screen.print(console.facts(summarise(job, result)))
    remark(job, result)


def _serve_comparison(job: PreparedRequest) -> None:
    """Generate a text under the budget and one with everything kept, and print both and how they differ."""
    console.progress(f"running {job.name} with a budget of {job.budget} …")
    bounded = _run_bounded(job, _ignore)
    console.progress("running the full cache …")
    full = _run_full(job)
    difference = measure(bounded.token_ids, full.token_ids, job.writer.show_token)
    full_bytes = full.memory_usage.full_bytes  # bytes of the tokens; the run's slots had room for more
    if job.request.json:
        console.write_json(
            {
                **_describe(job),
                **_result(bounded),
                "memory": _measure(bounded.memory_usage),
                "full": {**_result(full), "memory": {"allocated_bytes": full_bytes}},
                "comparison": asdict(difference),
            }
        )
        return
    left = Side(job.name, f"budget {bounded.budget}", bounded, bounded.memory_usage.allocated_bytes)
    right = Side("full cache", "keeps everything", full, full_bytes)
    reason = nothing_evicted(job, bounded)
    show(left, right, difference, "" if reason else _lost(bounded))
    if job.policy.evicts and reason:
        console.note(f"{reason}.")
    remark(job, bounded)


def _describe(job: PreparedRequest) -> dict[str, object]:
    """Return the settings of a run for JSON."""
    return {
        "model": job.checkpoint.name,
        **({"adapter": next(iter(job.request.adapter))} if job.request.adapter else {}),
        "dtype": job.writer.dtype,
        "device": job.writer.device,
        "policy": spec(job.policy),
        "budget": job.budget,
        "prefill_chunk": job.request.prefill_chunk,
        "layer_budget": job.request.layer_budget or job.policy.defaults.layer_budget,
        "head_budget": job.request.head_budget,
        "kv_bits": job.request.kv_bits,
        "positions": job.position_mode,
        "pins": job.pins,
        "guard": job.request.guard,
        "sampling": asdict(job.sampling),
        **({} if job.memory is None else {"memory_file": job.memory.file}),
    }


def _result(result: Result) -> dict[str, object]:
    """Return the text and the figures of a run for JSON."""
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "new_tokens": len(result.token_ids),
        "ttft_s": result.ttft_s,
        "tpot_s": result.tpot_s,
        "budget": result.budget,
        "lost_mass": asdict(result.lost_mass),
        "guarded": result.guarded,
    }


def _measure(memory: MemoryUsage) -> dict[str, object]:
    """Return the bytes of a run's memory, and its compression, for JSON."""
    return {**asdict(memory), "compression": memory.compression}
