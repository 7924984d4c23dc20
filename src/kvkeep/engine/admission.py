"""Which requests an engine takes, and how many rows it has: a request that cannot run is refused before it waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from kvkeep import budget as budgets
from kvkeep.cache.layer_layout import Layout
from kvkeep.engine import choice
from kvkeep.engine.asked import usable
from kvkeep.engine.generation import Generation
from kvkeep.engine.grammars import Grammars
from kvkeep.engine.identity import Identity
from kvkeep.engine.past import Past
from kvkeep.engine.prompts import checked_guard
from kvkeep.engine.request import Request
from kvkeep.engine.room import check_host_rows, check_room, free_bytes, largest_budget, share_room
from kvkeep.engine.rows import Rows
from kvkeep.engine.sampling import Biases, Sampling
from kvkeep.engine.staging import Staging
from kvkeep.engine.stops import StopText
from kvkeep.engine.words import Words
from kvkeep.errors import BudgetError, InputError, show_bytes
from kvkeep.models.device import device_of
from kvkeep.models.load import Model, Tokenizer, ends_of, position_limit
from kvkeep.models.support import placeholders
from kvkeep.pins import Spans, end, spans
from kvkeep.policies.base import Policy
from kvkeep.snapshot import Fingerprint, Snapshot
from kvkeep.snapshot.fingerprint import policy_named

DEFAULT_ROWS = 16

MOST_POLICIES = 64
"""Number of policies whose layout is remembered; others are made again when they are needed."""


class Admission:
    """Checks requests and makes rows.

    Args:
        model: the model, attached.
        tokenizer: the engine's, if it has one.
        policy: the policy of requests that do not name one.
        budget: the most tokens that a request may keep.
        rows: number of rows that the user wants.
        kv_memory: bytes that all rows may take together.
        host_rows: sequences that may wait in main memory after they have begun.
        staging: their copies on the device, which get bytes of ``kv_memory`` that the rows leave.
        chunk: prompt tokens per step; ``None``: a whole prompt.
        options: of the cache: ``layer_budget``, ``positions`` and ``prefill_chunk``, see `Rows`.
        guard: of requests that have none.

    Attributes:
        identity: the model and the settings, as snapshots name them.
        words: turns texts into token ids.

    Raises:
        KVKeepError: the policy does not go together with the model or the options.
    """

    def __init__(  # noqa: PLR0913  the choices of a user
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        *,
        policy: Policy,
        budget: int,
        rows: int | None,
        kv_memory: int | None,
        host_rows: int = 0,
        staging: Staging | None = None,
        chunk: int | None,
        options: dict[str, Any],
        guard: float | None = None,
    ) -> None:
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise InputError(f"A {type(tokenizer).__name__} is no tokenizer; give the object that AutoTokenizer loads.")
        self._model, self._tokenizer, self._policy, self._budget = model, tokenizer, policy, budget
        self._wanted, self._kv_memory, self._host_rows, self._options = rows, kv_memory, host_rows, options
        self._staging = staging
        self._chunk, self._guard = options.get("prefill_chunk", chunk), checked_guard(guard)
        self._limit = position_limit(model)
        self._end_ids = frozenset(ends_of(model))
        self._vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
        self._placeholders = placeholders(model)
        self.identity = Identity(model, tokenizer, self._chunk)
        self.grammars = Grammars(tokenizer, self._vocabulary, self._end_ids)
        self.words = Words(model, tokenizer, self._limit, self._end_ids)
        self._layouts = {policy: self.identity.checked(Layout.of(model.config, policy, **options))}

    def check(self, request: Request, number: int, past: Past | None = None) -> Generation:
        """Return the beginning of a request's generation.

        Args:
            request: the request.
            number: the number of the generation.
            past: the part of a sequence that it continues; it becomes a part of the prompt.

        Raises:
            KVKeepError: the engine cannot run the request; see `Engine.add`.
        """
        policy, budget = self.settle(request.policy, request.budget, request.memory)
        if request.memory is not None:
            past = Past.of(request.memory)
        if past is not None:
            budget = choice.chosen(self._layout(policy), budget, past.budgets)
        if past and past.ids and request.prompt_logprobs is not None:
            raise InputError("`prompt_logprobs` needs the whole prompt to be read, and this turn continues a memory.")
        prompt = self.words.continued(request, past or Past())
        if prompt is not request.prompt:
            request = dataclasses.replace(request, prompt=prompt, messages=None, tools=())
        if not past and request.guard is None:
            request = dataclasses.replace(request, guard=self._guard)
        levels = self._levels(policy, budget, request, past or Past())
        total = len(prompt) + request.sampling.max_new_tokens - 1  # the last token is never fed
        check_room(self._layout(policy), budget, len(prompt), request.sampling.max_new_tokens)
        if self._limit is not None and total > self._limit:
            raise InputError(
                f"The model has learned positions for {self._limit} tokens; the request needs {total}. Shorten the "
                "prompt or ask for fewer new tokens."
            )
        self._check_tokens(prompt, request.sampling)
        if request.stop and self._tokenizer is None:
            raise InputError("Stop texts need a tokenizer: make the engine with one.")
        ends = frozenset() if request.ignore_end else self._end_ids
        tail = StopText(self._decode, request.stop) if self._tokenizer else None
        load = None if request.memory is None else partial(getattr, request.memory, "contents")
        bound = self.grammars.constraint(request)
        found = Generation(number, request, policy, budget, ends, tail, bound, levels=levels, load=load)
        if past is not None:
            found.held, found.held_pins = len(past.ids), past.pins
        return found

    def _check_tokens(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Refuse tokens that the model does not have.

        Raises:
            InputError: a token of the prompt or of the bias is outside of the vocabulary, or stands for no text.
        """
        if max(prompt) >= self._vocabulary or min(prompt) < 0:
            raise InputError(f"The prompt has tokens outside of the model's vocabulary of {self._vocabulary}.")
        if (image := next((token for token in prompt if token in self._placeholders), None)) is not None:
            raise InputError(
                f"Token {image} of the prompt stands for {self._placeholders[image]}, and an engine takes text only. "
                "Leave it out, or give the processor's output to model.generate together with a BoundedCache."
            )
        largest = max((token for token, _ in cast(Biases, sampling.logit_bias)), default=0)
        if largest >= self._vocabulary:
            raise InputError(
                f"logit_bias={largest} is no token: the model's vocabulary has {self._vocabulary}. Leave it out."
            )

    def _levels(self, policy: Policy, budget: int, request: Request, past: Past) -> tuple[int, ...]:
        """Return the budgets among which a guarded request chooses, after a check of its pins.

        Raises:
            InputError: a pin lies outside of the prompt, or no budget can be chosen.
            BudgetError: some layer's budget is too small for pinned and protected tokens together.
        """
        pins, n = cast(Spans, request.pins), len(cast(Sequence[int], request.prompt))
        before = len(past.ids)
        if end(pins) > n:
            raise InputError(
                f"The pins end at position {end(pins)}, and the prompt has {n} tokens. Pin tokens of the prompt only."
            )
        if pins and pins[0][0] < before:
            raise InputError(
                f"The pins begin at position {pins[0][0]}, and the memory has read {before} tokens already, of "
                "which some may be gone. Pin later tokens, or pin these when the memory is made."
            )
        self.check_pins(policy, budget, spans((*past.pins, *pins)) if pins else ())
        if request.guard is None:
            return ()
        if before:
            raise InputError(
                "`guard` chooses a budget when a text is read from its beginning, and this request continues a memory. "
                "Leave `guard` out."
            )
        if self._chunk is not None and n > self._chunk:
            raise InputError(
                f"`guard` chooses a budget when a prompt has been read, and this one of {n} tokens is cut after chunks "
                f"of {self._chunk}. Leave `guard` or `prefill_chunk` out."
            )
        return choice.levels(self._layout(policy), budget, pins)

    def check_pins(self, policy: Policy, budget: int, pins: Spans) -> None:
        """Refuse pins of a session that the budget does not hold.

        Raises:
            BudgetError: some layer's budget is too small for pinned and protected tokens together.
        """
        self._layout(policy).check_pins(budget, pins)

    def settle(
        self, policy: str | Policy | None, budget: int | None, memory: Snapshot | None = None
    ) -> tuple[Policy, int]:
        """Return the policy and the budget of a request or a session; a memory brings its own.

        Raises:
            KVKeepError: the engine has no rows for them, or the memory belongs to others.
        """
        if memory is not None:
            made = memory.fingerprint
            policy = policy_named(made.policy) if policy is None else policy
            budget = made.budget if budget is None else budget
        found = self._policy if policy is None else usable(policy)
        number = self._budget if budget is None else budgets.check_one(budget)
        if number > self._budget:
            raise BudgetError(
                f"A budget of {number} is more than the engine's {self._budget}: its rows have memory for no more. "
                "Ask for less, or give the engine a larger `budget`."
            )
        if memory is not None:
            made.check(self.fingerprint(found, number))
        return found, number

    def fingerprint(self, policy: Policy, budget: int) -> Fingerprint:
        """Return what the memory of a sequence belongs to."""
        return self.identity.fingerprint(self._layout(policy), budget)

    def make_rows(self, policy: Policy) -> Rows:
        """Allocate the engine's rows for a policy.

        Raises:
            BudgetError: not one row fits into ``kv_memory``, or the rows do not fit into the free memory.
        """
        rows = Rows(self._model, policy, self._budget, **self._options)
        count = self._rows_that_fit(rows)
        free = free_bytes(device_of(self._model))
        if free is not None and count * rows.row_bytes > free:
            raise BudgetError(
                f"Out of memory: {policy} with a budget of {self._budget} takes {show_bytes(rows.row_bytes)} per row, "
                f"and {count} of them do not fit into the {show_bytes(free)} that are free. Use fewer rows or a "
                "smaller `budget`."
            )
        beside, pinned = 0 if free is None else count, self._staging is not None
        check_host_rows(self._host_rows, rows.row_bytes, beside=beside, pinned=pinned)
        rows.allocate(count, most_bytes=self._bytes_of_rows(rows, count))
        self.identity.dtype = rows.dtype
        return rows

    def replace(self, rows: Rows, policy: Policy) -> Rows:
        """Give up rows, all of which are free, and allocate others for a policy; if that fails, restore the old ones.

        Raises:
            BudgetError: not one row fits into the memory.
        """
        count = rows.count
        rows.allocate(0)  # before there is memory for others
        try:
            return self.make_rows(policy)
        except BaseException:
            rows.allocate(count, most_bytes=self._bytes_of_rows(rows, count))
            raise

    def _bytes_of_rows(self, rows: Rows, count: int) -> int | None:
        return share_room(self._staging, self._kv_memory, rows.row_bytes, count)

    def _rows_that_fit(self, rows: Rows) -> int:
        """Return how many rows of this kind the engine has.

        Raises:
            BudgetError: not one row fits into the memory.
        """
        if self._kv_memory is None:
            return self._wanted or DEFAULT_ROWS
        fits = self._kv_memory // rows.row_bytes
        if not fits:
            found = largest_budget(self._model, rows.policy, self._budget, self._kv_memory, **self._options)
            advice = "." if found is None else f", or a budget of {found} or less."
            raise BudgetError(
                f"Not one row fits: {rows.policy} with a budget of {self._budget} takes {rows.row_bytes} bytes "
                f"per row, and there are {self._kv_memory}. Give more memory{advice}"
            )
        return min(fits, self._wanted or fits)

    def _layout(self, policy: Policy) -> Layout:
        """Return the layout of rows for a policy.

        Raises:
            KVKeepError: the policy does not go together with the model, the engine's options or its memory.
        """
        if policy not in self._layouts:
            layout = Layout.of(self._model.config, policy, **self._options)
            layout.slots(self._budget)  # its rows are made for the engine's budget
            if self._kv_memory is not None:
                self._rows_that_fit(Rows(self._model, policy, self._budget, **self._options))
            if len(self._layouts) >= MOST_POLICIES:
                self._layouts.clear()
            self._layouts[policy] = layout
        return self._layouts[policy]

    def _decode(self, token_ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
