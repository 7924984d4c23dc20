"""A request for one prompt, checked before weights are read, and its model.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep import budget as budgets
from kvkeep import engine as engines
from kvkeep.cache.layer_layout import Layout
from kvkeep.cli import console
from kvkeep.cli.generate.request import Request
from kvkeep.cli.loading import check_weights, writer_of
from kvkeep.cli.memories import Memory, settled
from kvkeep.engine import Engine
from kvkeep.engine.admission import check_room
from kvkeep.engine.budget_guard import levels
from kvkeep.engine.request import checked_guard, json_structure
from kvkeep.engine.sampling_params import Sampling
from kvkeep.errors import InputError
from kvkeep.models import tokenization
from kvkeep.models.chat_templates import system_spans
from kvkeep.models.load import Checkpoint, embedded, find
from kvkeep.pins import Spans
from kvkeep.planning.plan import default_budget
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import parse, spec


@dataclass(frozen=True)
class Job:
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

    request: Request
    checkpoint: Checkpoint
    writer: tokenization.Writer
    prompt: Sequence[int] | str
    policy: Policy
    budget: int
    layout: Layout
    sampling: Sampling
    pins: Spans = ()
    memory: Memory | None = None

    @property
    def asked(self) -> engines.Request:
        """The prompt as a request to an engine."""
        schema = self.request.json_schema
        form = None if schema is None else json_structure(schema)
        if self.memory is None:
            return engines.Request(prompt=self.prompt, sampling=self.sampling, pins=self.pins, structured_outputs=form)
        return engines.Request(
            prompt=self.prompt,
            raw=self.request.raw,
            sampling=self.sampling,
            memory=self.memory.snapshot,
            policy=self.policy,
            structured_outputs=form,
        )

    @property
    def name(self) -> str:
        """The policy as the user would write it."""
        return spec(self.policy)

    @property
    def position_mode(self) -> str:
        """``true`` or ``slot``."""
        return "true" if self.layout.rotation is None else "slot"


def prepare(request: Request) -> Job:
    """Check a request, cheap tests first, and load its model.

    Raises:
        KVKeepError: the request or the model cannot be used.
    """
    sampling = sampling_of(request)
    if request.json_schema is not None:
        json_structure(request.json_schema)
    memory = None if request.memory is None else Memory.read(request.memory)
    request = settled(request, memory)
    policy = parse(request.policy)
    budgets.check(1 if request.budget is None else request.budget)
    if request.keep_ratio is not None:
        budgets.from_ratio(request.keep_ratio, tokens=1)
    checked_guard(request.guard)
    check_weights(request)
    name = request.model or embedded()
    console.progress(f"loading {name} …")
    checkpoint = find(name, allow_pickle=request.allow_pickle)
    if memory is not None:
        memory.check_model(checkpoint)
    prompt = _encode(checkpoint, request) if memory is None else request.prompt
    pins = system_spans(checkpoint, messages_of(request)) if request.pin_system else ()
    tokens = len(prompt) if memory is None else memory.snapshot.seen + 1  # and those of the question
    tokenization.check_length(checkpoint, tokens, sampling.max_new_tokens)
    budget = _choose_budget(request, policy, tokens)
    spread: dict[str, Any] = {"layer_budget": request.layer_budget, "head_budget": request.head_budget}
    layout = Layout.of(checkpoint.config, policy, positions=request.positions, kv_bits=request.kv_bits, **spread)
    check_room(layout, budget, tokens, sampling.max_new_tokens)  # checks the numbers, too
    layout.check_pins(budget, pins)
    if request.guard is not None:
        levels(layout, budget, pins)
    writer = writer_of(checkpoint, request)
    return Job(request, checkpoint, writer, prompt, policy, budget, layout, sampling, pins, memory)


def sampling_of(request: Request) -> Sampling:
    """The sampling options of a request.

    Raises:
        InputError: a number is out of range.
    """
    return Sampling(
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        seed=request.seed,
    )


def engine_for(writer: tokenization.Writer, request: Request, **options: Any) -> Engine:
    """An engine for a request, for one prompt or many.

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


def _choose_budget(request: Request, policy: Policy, prompt_tokens: int) -> int:
    if request.keep_ratio is not None:
        return budgets.from_ratio(request.keep_ratio, prompt_tokens)
    if request.budget is not None:
        return request.budget
    return default_budget(policy, prompt_tokens + request.max_new_tokens)


def _encode(checkpoint: Checkpoint, request: Request) -> list[int]:
    """The token ids of the prompt, after the system message if there is one.

    Raises:
        InputError: there is no chat template, or it leaves the system message out.
    """
    plain: list[int] = tokenization.encode(checkpoint, request.prompt, raw=request.raw)[0].tolist()
    if request.system is None:
        return plain
    if checkpoint.tokenizer.chat_template is None:
        raise InputError(
            f"The tokenizer of {checkpoint.name} has no chat template, so --system has no place. Put its text at the "
            "beginning of the prompt."
        )
    found: list[int] = tokenization.encode_chat(checkpoint, messages_of(request))[0].tolist()
    if found == plain:
        raise InputError(
            f"The chat template of {checkpoint.name} leaves out system messages, so --system has no effect. Put its "
            "text at the beginning of the prompt."
        )
    return found


def messages_of(request: Request) -> list[dict[str, str]]:
    """The conversation of a prompt after a system message."""
    return [{"role": "system", "content": request.system or ""}, {"role": "user", "content": request.prompt}]
