"""Texts that are generated after prompts, in the engine's continuous batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Request
from kvkeep.engine.sampling_params import Sampling
from kvkeep.errors import InputError
from kvkeep.evals.harness.scoring import Bounded


@dataclass(frozen=True)
class Wish:
    """A prompt to continue.

    Attributes:
        ids: its tokens.
        first: tokens that are read at once and then cut; the others follow.
        length: tokens to which a budget in percent refers.
        until: texts that end the answer; they are no part of it.
        sampling: how tokens are chosen, and how many.
    """

    ids: tuple[int, ...]
    first: int
    length: int
    until: tuple[str, ...]
    sampling: Sampling


def answers(bounded: Bounded, wishes: Sequence[Wish]) -> Iterator[tuple[int, str]]:
    """Continue all prompts; yields each answer with the place of its prompt as soon as it is there.

    Raises:
        InputError: a step of the engine failed.
    """
    budgets = [bounded.tokens(wish.length, len(wish.ids) + wish.sampling.max_new_tokens) for wish in wishes]
    setup = {key: getattr(bounded.setup, key) for key in ("positions", "layer_budget", "head_budget", "prefill_chunk")}
    tokenizer = bounded.writer.checkpoint.tokenizer
    with Engine(
        bounded.writer.model,
        tokenizer,
        policy=bounded.policy,
        budget=max(budgets),
        rows=min(bounded.rows, len(wishes)),
        **setup,
    ) as engine:
        requests = (_request(engine, i, wish, budgets[i]) for i, wish in enumerate(wishes))
        for place, result in engine.run(requests):
            if result.error:
                raise InputError(f"An answer could not be generated: {result.error}.")
            yield place, result.text


def _request(engine: Engine, number: int, wish: Wish, budget: int) -> Request:
    """The request that continues a prompt's memory. Its first part is read, and cut, when a row is free for it."""
    options: dict[str, Any] = {"stop": wish.until, "sampling": wish.sampling, "sequence": number}
    if not 0 < wish.first < len(wish.ids):
        return Request(prompt=wish.ids, budget=budget, **options)
    memory = engine.prefix(wish.ids[: wish.first], budget=budget)
    return Request(prompt=wish.ids[wish.first :], memory=memory, **options)
