"""Which requests an engine takes, and how many rows it has: a request that cannot run is refused before it waits."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from kvkeep import budget as budgets
from kvkeep.cache.layer_layout import Layout
from kvkeep.engine import budget_guard
from kvkeep.engine.detokenizer import StopText
from kvkeep.engine.drops import Drops, check_drop, drops_of, most_held
from kvkeep.engine.grammar import Grammars
from kvkeep.engine.host_copies import COPIES, Staging, block_bytes, bound
from kvkeep.engine.kv_blocks import keeps_states
from kvkeep.engine.kv_manager import KVManager
from kvkeep.engine.prompt_encoding import ConversationHistory, PromptEncoder
from kvkeep.engine.request import Request, checked_guard, usable
from kvkeep.engine.sampling_params import Biases, SamplingParams
from kvkeep.engine.sequence import Sequence
from kvkeep.errors import BudgetError, CapacityError, InputError, UnsupportedOperationError, show_bytes
from kvkeep.models.adapters import adapters_of, merged_into
from kvkeep.models.checkpoint import Model, Tokenizer, position_limit, trained_length
from kvkeep.models.device import device_of
from kvkeep.models.generation_config import ends_of
from kvkeep.models.rotary import LengthRule
from kvkeep.models.support import placeholders
from kvkeep.models.weight_hash import fingerprint
from kvkeep.pins import Spans, count, end, spans, without
from kvkeep.policies._keep_prompt import keeping, keeps_whole
from kvkeep.policies.base import Policy
from kvkeep.snapshot.contents import STATEFUL
from kvkeep.snapshot.fingerprint import Fingerprint, hash_of_config, name_of_config, name_of_policy, policy_named, rule
from kvkeep.snapshot.snapshot import Snapshot

# Room for a request's tokens in its budget, and for one row in bytes.


def check_room(layout: Layout, budget: int, prompt_tokens: int, new_tokens: int) -> None:
    """Refuse a request whose prompt and new tokens need more slots per head than the policy can give them.

    Return without an error for a policy that evicts generated tokens, once its budget is checked. One that grows evicts
    the prompt alone: its prompt is cut first, and then all new tokens must fit.

    Args:
        layout: the policy, and how the budget is spread over the model's layers.
        budget: tokens per head.
        prompt_tokens: length of the prompt.
        new_tokens: the most tokens that are generated; the last one takes no slot.

    Raises:
        CapacityError: there are too few slots.
        BudgetError: the policy protects more than a layer's budget.
    """
    policy = layout.policy
    if policy.evicts and not policy.grows:
        layout.slots(budget)  # refuses a budget that the policy cannot work with
        return
    room = layout.room(budget)
    if room is None:  # every layer's budget holds its sliding window
        return
    # a policy that grows evicts the prompt down to `room` less its reserve, then keeps all that it generates
    kept = min(prompt_tokens, room - policy.grows.room) if policy.grows else prompt_tokens
    needed = kept + new_tokens - 1
    if needed <= room:
        return
    # where layers differ, or the policy keeps a reserve, a budget of `needed` would not give so many slots
    uneven = room != budget
    where = f"a budget of {budget} gives some layer only {room}" if uneven else f"the budget is {room}"
    remedies = ["raise the `budget`" if uneven or policy.grows else f"give `budget={needed}`"]
    if kept <= room:
        remedies.append(f"ask for at most {room - kept + 1} new tokens")
    raise CapacityError(
        f"{policy} does not evict generated tokens: {prompt_tokens} tokens of the prompt and {new_tokens} new ones "
        f"need {needed} slots, and {where}. {' or '.join(remedies).capitalize()}."
    )


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes of main memory, swap included, the process may still take. Return ``None`` for devices
    other than the CPU, which report an exhausted memory themselves, and where the system does not say.

    Without this number a process that allocates too much main memory is killed instead of being told. A limit on the
    process and others together, as containers have, counts as well.
    """
    source = Path("/proc/meminfo")
    if device.type != "cpu" or not source.exists():
        return None
    free = 1024 * sum(map(int, re.findall(r"^(?:MemAvailable|SwapFree): *(\d+) kB$", source.read_text(), re.MULTILINE)))
    return min([free, *_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def _limits(root: Path, groups: Path) -> Iterator[int]:
    """Yield, for each control group (cgroup v2) with a limit that contains this process, the bytes that it may still
    use, without swap. Yield nothing where there are no such groups.

    Args:
        root: the folder of the group that contains all others.
        groups: the file that names the groups of this process.
    """
    try:
        # the line of version 2, which has one hierarchy for everything
        own = next((line[3:] for line in groups.read_text().splitlines() if line.startswith("0::/")), None)
        folder = None if own is None else root / own.strip("/")
        for group in [] if folder is None else (folder, *folder.parents):
            if not group.is_relative_to(root):  # folders above the root are no groups
                return
            limit = _read(group / "memory.max")
            if limit.isdecimal():  # else it is "max": no limit
                # pages of files count as used, and the kernel gives these back when memory runs short
                cached = re.search(r"^inactive_file (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
                yield max(0, int(limit) - int(_read(group / "memory.current") or 0) + int(cached[1] if cached else 0))
    except (OSError, ValueError):  # the system has no control groups, or another layout of their files
        return


def _read(file: Path) -> str:
    """Return the content of a file without trailing white space, or an empty text if there is no file."""
    return file.read_text().strip() if file.is_file() else ""


def check_host_rows(host_rows: int, row_bytes: int, *, beside: int, pinned: bool = False) -> None:
    """Refuse ``host_rows`` if that many swapped-out sequences do not fit into the free main memory.

    Return without an error if ``host_rows`` is 0, or the free memory is unknown.

    Args:
        host_rows: the most that wait.
        row_bytes: bytes of a row.
        beside: rows that are about to be allocated in main memory as well.
        pinned: whether they wait in blocks of pinned memory.

    Raises:
        BudgetError: there is no room.
    """
    free = free_bytes(torch.device("cpu")) if host_rows else None
    # a sequence takes whole blocks of pinned memory
    each = -(-row_bytes // block_bytes(row_bytes)) * block_bytes(row_bytes) if pinned else row_bytes
    if free is None or host_rows * each + beside * row_bytes <= free:
        return
    fits = max(0, (free - beside * row_bytes) // each)
    rows = f" beside {beside} rows" if beside else ""
    raise BudgetError(
        f"host_rows={host_rows} takes up to {show_bytes(host_rows * each)} of main memory{rows}, and "
        f"{show_bytes(free)} are free. Give `host_rows={fits}` or less, or a smaller `budget`."
    )


def share_room(staging: Staging | None, kv_memory: int | None, row_bytes: int, count: int) -> int | None:
    """Divide a memory limit on the device between the rows and the staging copies of swapped sequences.

    Set ``staging.most_bytes`` to what the rows leave, up to the most that the copies can use. Without copies or
    without a limit change nothing, and return ``kv_memory``.

    Args:
        staging: the copies; ``None``: there are none.
        kv_memory: the limit in bytes; ``None``: there is none.
        row_bytes: bytes of a row.
        count: rows.

    Returns:
        The most bytes that the rows may take; ``None``: no limit.
    """
    if staging is None or kv_memory is None:
        return kv_memory
    staging.most_bytes = min(max(0, kv_memory - count * row_bytes), COPIES * bound(row_bytes))
    return kv_memory - staging.most_bytes


def largest_budget(model: Model, policy: Policy, below: int, memory: int, **options: Any) -> int | None:
    """Return the largest budget below ``below`` with which one row fits into the memory. Return ``None`` if no budget
    does, or if the policy refuses even one of those that are tried.

    Args:
        model: the model, attached.
        policy: the policy that the row is made for.
        below: a budget that is too large.
        memory: bytes.
        options: as for `KVManager`.
    """

    @cache  # a manager runs the model once
    def size(budget: int) -> int:
        return KVManager(model, policy, budget, **options).row_bytes

    low, high = policy.least, below
    try:
        while low < high - 1 and size(low) <= memory:  # bytes grow linearly with the budget, but for rounding
            share = (memory - size(low)) / (size(high) - size(low))
            # strictly between the two, so that every round narrows the range
            guess = min(high - 1, max(low + 1, low + int(share * (high - low))))
            low, high = (guess, high) if size(guess) <= memory else (low, guess)
        return low if low < below and size(low) <= memory else None
    except BudgetError:  # the policy protects more than `Policy.least`
        return None


# The model and the settings of an engine, as its snapshots name them.


@dataclass(eq=False)
class Identity:
    """The model and the settings of an engine.

    Attributes:
        model: the model, attached.
        tokenizer: the engine's, if it has one.
        chunk: prompt tokens per step; ``None``: a whole prompt.
        dtype: dtype of the keys; ``None`` before there are rows.
    """

    model: Model
    tokenizer: Tokenizer | None
    chunk: int | None
    dtype: str | None = None

    def weights(self, adapter: str | None = None) -> str:
        """Return a hash of the model's weights as they are now, with an adapter; ``None``: the base model.

        Of a model whose adapters kvkeep has not loaded, the weights are hashed with those that are active.
        """
        if (named := adapters_of(self.model)) is None:  # adapters from elsewhere count as they are active
            return fingerprint(self.model)
        return named.weights_hash(adapter)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of the adapters that kvkeep has loaded into the model; ``()`` without any."""
        named = adapters_of(self.model)
        return () if named is None else named.names

    def adapter_of(self, adapter: str | None, made: Fingerprint | None) -> str | None:
        """Return the name of the adapter under which a request or a session runs, after checking that the model has it;
        ``None``: the base model.

        Args:
            adapter: its name, if it was named.
            made: the fingerprint of the memory that is continued, if one is. If no adapter was named, it is the one
                with the weights that the memory was made with, whatever it was called.

        Raises:
            InputError: the model has no such adapter.
        """
        names = self.adapters
        if adapter is not None and adapter not in names:
            there = f"there are {', '.join(names)}" if names else "it has none; name them when it is loaded"
            raise InputError(f"The model has no adapter {adapter!r:.80}: {there}.")
        if adapter is not None or made is None or not names:
            return adapter
        # the adapter of the same name is hashed first: hashing another one takes time, and it rarely is the right one
        likeliest = sorted((None, *names), key=lambda name: name != made.adapter)
        # if none has these weights, `made` is refused later, when it is compared with the base model
        return next((name for name in likeliest if self.weights(name) == made.weights), None)

    @cached_property
    def _tokenizer_hash(self) -> str | None:
        """Return a hash of the tokenizer's tokens and their ids, or ``None`` without a vocabulary."""
        if self.tokenizer is None or not hasattr(self.tokenizer, "get_vocab"):
            return None
        words = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        return hashlib.sha256(repr(words).encode()).hexdigest()[:16]  # 64 bits, as all hashes of a fingerprint

    @cached_property
    def _config(self) -> str:
        """Return a hash of the model's configuration."""
        return hash_of_config(self.model.config)

    def checked(self, layout: Layout) -> Layout:
        """Return the layout itself, after checking that its head profile, if it has one, belongs to the model's
        weights.

        Raises:
            InputError: the profile was made with other weights.
        """
        if layout.profile is not None:
            layout.profile.check_weights(self.weights)
        return layout

    def fingerprint(self, layout: Layout, budget: int, adapter: str | None = None) -> Fingerprint:
        """Return the fingerprint (model, policy, budget and settings) that a snapshot of this engine must match.

        Args:
            layout: the policy, and how the budget is spread over the layers.
            budget: tokens kept per layer and head.
            adapter: the adapter that runs; ``None``: the base model, or one that was merged into the weights.
        """
        return Fingerprint(
            model=name_of_config(self.model.config),
            config=self._config,
            policy=name_of_policy(layout.policy),
            budget=budget,
            layer_budget=rule(layout.layer_budget),
            head_budget=layout.head_budget,
            dtype=self.dtype,
            positions=layout.positions,
            chunk=self.chunk,
            kv_bits=layout.kv_bits,
            weights=self.weights(adapter),
            tokenizer=self._tokenizer_hash,
            adapter=merged_into(self.model) if adapter is None else adapter,
        )


class Settled(NamedTuple):
    """What a request or a session runs under.

    Attributes:
        policy: the eviction policy.
        budget: tokens kept per layer and head.
        adapter: the model's adapter; ``None``: the base model.
    """

    policy: Policy
    budget: int
    adapter: str | None


def made_of(snapshot: Snapshot | None) -> Fingerprint | None:
    """Return the fingerprint of a snapshot; ``None`` without one."""
    return None if snapshot is None else snapshot.fingerprint


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
        options: of the cache: ``layer_budget``, ``head_budget``, ``positions``, ``kv_bits`` and, for a model that reads
            prompts whole, ``prefill_chunk``; see `KVManager`.
        guard: of requests that have none.

    Attributes:
        identity: the model and the settings, as snapshots name them.
        words: turns texts into token ids.
        rule: how the model's rotary frequencies follow the length of a text.

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
        # of a model that reads prompts whole, the layers with slots take the chunks
        self._chunk, self._guard = options.get("prefill_chunk", chunk), checked_guard(guard)
        self._limit = position_limit(model)
        self._end_ids = frozenset(ends_of(model, tokenizer))
        self.rule = LengthRule.of(model)
        self._vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
        self._placeholders = placeholders(model)
        self._states = keeps_states(model)
        self.identity = Identity(model, tokenizer, self._chunk)
        self.grammars = Grammars(tokenizer, self._vocabulary, self._end_ids)
        self.words = PromptEncoder(model, tokenizer, self._limit, self._end_ids)
        # a head profile is an option of the engine, the same for all policies: it is checked once
        self._layouts = {policy: self.identity.checked(Layout.of(model.config, policy, **options))}
        self._layouts[policy].slots(budget)  # checked and spread now, so that no request waits for it
        if guard is not None:
            # refuses a policy under which no request can have a guard
            budget_guard.levels(self._layouts[policy], budget, ())

    def check(self, request: Request, number: int, past: ConversationHistory | None = None) -> Sequence:
        """Check a request, and return the sequence that runs it, with the prompt as token ids.

        Args:
            request: the request.
            number: the number of the generation.
            past: tokens read before, which the request continues. A snapshot of the request takes their place.

        Raises:
            KVKeepError: the engine cannot run the request; see `Engine.add`.
        """
        policy, budget, adapter = self.settle(
            *(request.policy, request.budget, made_of(request.snapshot), request.adapter),
            keep_prompt=request.keep_prompt,
        )
        request = request if adapter == request.adapter else request.replaced(adapter=adapter)
        if request.snapshot is not None:
            past = ConversationHistory.of(request.snapshot)
        if past is not None:  # its guard may have chosen a smaller budget than was asked for
            budget = budget_guard.chosen(self._layout(policy), budget, past.budgets)
        if past and past.ids and request.prompt_logprobs is not None:
            raise InputError("`prompt_logprobs` needs the whole prompt to be read, and this turn continues a memory.")
        turn_ends = self.words.turn_ends if self.words.is_chat(request) else frozenset()
        prompt = self.words.continued(request, past or ConversationHistory())
        if past and (why := self.rule.refusal(len(past.ids), len(prompt))) is not None:
            raise InputError(why)
        # from here on the request holds token ids only, so that no later step applies the chat template again
        if prompt is not request.prompt:
            noted = request.noted_messages or (*(past.messages if past else ()), *(request.messages or ()))
            request = request.replaced(prompt=prompt, messages=None, tools=(), noted_messages=noted)
        # the budget is chosen at the end of the first prompt; a later turn keeps it. Sessions and prefixes have a past,
        # if an empty one, so the engine's own guard chooses nothing for them
        if not past and request.guard is None and self._guard is not None:
            request = request.replaced(guard=self._guard)
        levels = self._levels(policy, budget, request, past or ConversationHistory())
        drops = self._drops(request, past or ConversationHistory())
        total = len(prompt) + request.sampling.max_new_tokens - 1  # the last token is never fed
        check_room(self._layout(policy), budget, most_held(drops, len(prompt)), request.sampling.max_new_tokens)
        if self._limit is not None and total > self._limit:
            raise InputError(
                f"The model has learned positions for {self._limit} tokens; the request needs {total}. Shorten the "
                "prompt or ask for fewer new tokens."
            )
        self._check_tokens(prompt, request.sampling)
        if request.stop and self._tokenizer is None:
            raise InputError("Stop texts need a tokenizer: make the engine with one.")
        ends = self._ends(request, turn_ends)
        decode = partial(self._decode, special=not request.skip_special_tokens)
        keeps = request.include_stop_str_in_output
        tail = StopText(decode, request.stop, keeps=keeps) if self._tokenizer else None
        # looked at when the request gets a row: reading a file may take long
        load = None if request.snapshot is None else partial(getattr, request.snapshot, "contents")
        bound = None if request.structured_outputs is None else self.grammars.constraint(request)
        found = Sequence(number, request, policy, budget, ends, tail, bound, levels=levels, load=load)
        found.drops = drops
        if past is not None:
            found.held, found.held_pins = len(past.ids), past.pins
        return found

    def _drops(self, request: Request, past: ConversationHistory) -> Drops:
        """Return the drops of the memory that a request continues, and then its own, after checking its own.

        Raises:
            InputError: a token is dropped that is pinned or was not read, nothing would be left, or no token of the
                prompt follows; the request has drops and a guard; or see `check_drops`.
            UnsupportedOperationError: the model has layers with a state.
        """
        asked, prompt = cast(Drops, request.drops), cast(GenericSequence[int], request.prompt)
        if asked or request.reposition is not None:
            self.check_drops(request.reposition)
        if not asked:
            return past.drops
        if request.guard is not None:
            raise InputError("`guard` chooses a budget for a whole prompt, of which nothing is dropped. Leave it out.")
        if asked[0].after < len(past.ids) or asked[-1].after >= len(prompt):
            raise InputError(
                f"A drop comes after {asked[0].after if asked[0].after < len(past.ids) else asked[-1].after} tokens: "
                f"give one from {len(past.ids)} to {len(prompt) - 1}, behind which a token of the prompt follows."
            )
        pins, before = spans((*past.pins, *cast(Spans, request.pins))), past.dropped
        dropped = count(before)
        for drop in asked:
            gone = without(drop.spans, before)
            check_drop(gone, read=drop.after, dropped=dropped, pins=pins)
            dropped += count(gone)
        return drops_of((*past.drops, *asked))

    @property
    def moves_up(self) -> bool:
        """Return whether tokens move up when others are evicted, as they do under slot positions."""
        return self._layout(self._policy).positions == "slot"

    def fits(self, prompt_tokens: int, sampling: SamplingParams) -> bool:
        """Return whether the model was trained for as many positions as a prompt of this length and its answer need.

        Under slot positions, and if the model does not say how long its texts were, the answer is ``True``.
        """
        longest = None if self.moves_up else trained_length(self._model.config)
        return longest is None or prompt_tokens + sampling.max_new_tokens - 1 <= longest

    def check_drops(self, reposition: bool | None = None) -> None:
        """Refuse to drop tokens of a memory that cannot forget them, or to place those behind them as it cannot.

        Args:
            reposition: whether the tokens behind are to move up; ``None``: whatever the engine's positions do.

        Raises:
            InputError: ``reposition`` is false under slot positions, where tokens move up, or true under true ones,
                where they do not.
            UnsupportedOperationError: the model has layers with a state.
        """
        if self._states:
            raise UnsupportedOperationError(STATEFUL)
        moves = self.moves_up
        if reposition not in (None, moves):
            raise InputError(
                "reposition=false cannot be honoured: under slot positions each token stands at its rank among those "
                "that are held. Leave it out."
                if moves
                else "reposition=true needs slot positions: keys are stored rotated to their true ones. Leave it out, "
                "or start with positions=slot."
            )

    def _ends(self, request: Request, turn_ends: frozenset[int]) -> frozenset[int]:
        """Return the ids of the tokens that end a request: the model's end tokens, the request's own stop tokens, and
        ``turn_ends``, with which the chat template ends an answer. With ``ignore_end`` these are its own alone.

        Raises:
            InputError: one of its own is outside of the vocabulary, or every token is one that ends it, and it asks for
                ``min_new_tokens``.
        """
        own = cast(tuple[int, ...], request.stop_token_ids)
        if own and own[-1] >= self._vocabulary:  # they are sorted
            raise InputError(
                f"stop_token_ids={own[-1]} is no token: the model's vocabulary has {self._vocabulary}. Leave it out."
            )
        ends = frozenset(own) if request.ignore_end else self._end_ids.union(own, turn_ends)
        if request.sampling.min_new_tokens and len(ends) >= self._vocabulary:
            raise InputError(
                "stop_token_ids has all tokens, so none is left for min_new_tokens. Leave one of them out."
            )
        return ends

    def _check_tokens(self, prompt: GenericSequence[int], sampling: SamplingParams) -> None:
        """Refuse tokens outside of the vocabulary, and tokens of the prompt that stand for images or the like.

        Raises:
            InputError: a token of the prompt or of the logit bias is outside of the vocabulary, or one of the prompt
                stands for no text.
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

    def _levels(self, policy: Policy, budget: int, request: Request, past: ConversationHistory) -> tuple[int, ...]:
        """Return the budgets among which a request with a guard chooses, in ascending order; an empty tuple without a
        guard. With or without one, check its pins first, and whether a prompt that is to stay whole fits.

        Raises:
            InputError: a pin lies outside of the tokens that the request adds to ``past``, or it has a guard, and
                continues a memory, is read in several chunks, or has a policy for which no budget can be chosen.
            BudgetError: some layer's budget is too small for pinned and protected tokens together, or for a prompt
                that stays whole.
        """
        pins, n = cast(Spans, request.pins), len(cast(GenericSequence[int], request.prompt))
        before = len(past.ids)
        if pins and end(pins) > n:
            raise InputError(
                f"The pins end at position {end(pins)}, and the prompt has {n} tokens. Pin tokens of the prompt only."
            )
        if pins and pins[0][0] < before:
            raise InputError(
                f"The pins begin at position {pins[0][0]}, and the memory has read {before} tokens already, of "
                "which some may be gone. Pin later tokens, or pin these when the memory is made."
            )
        if pins:
            self.check_pins(policy, budget, spans((*past.pins, *pins)))
        if keeps_whole(policy):
            self._layout(policy).check_read(budget, spans((*past.pins, *pins, (before, n))))
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
        return budget_guard.levels(self._layout(policy), budget, pins)

    def check_pins(self, policy: Policy, budget: int, pins: Spans) -> None:
        """Refuse pins that the budget does not hold beside the tokens that the policy protects.

        Raises:
            BudgetError: some layer's budget is too small for pinned and protected tokens together.
        """
        self._layout(policy).check_pins(budget, pins)

    def can_pin(self, pins: Spans, policy: str | Policy | None, budget: int | None, *, share: float) -> bool:
        """Return whether pins take at most a share of a budget, and the policy evicts and can hold them under it.

        A policy or a budget that is ``None`` is the engine's.

        Raises:
            KVKeepError: there is no such policy, or the budget is out of range.
        """
        settled = self.settle(policy, budget)
        if not settled.policy.evicts or count(pins) > share * settled.budget:
            return False
        try:
            self.check_pins(settled.policy, settled.budget, pins)
        except BudgetError:
            return False
        return True

    def settle(
        self,
        policy: str | Policy | None,
        budget: int | None,
        made: Fingerprint | None = None,
        adapter: str | None = None,
        *,
        keep_prompt: bool | float | None = None,
    ) -> Settled:
        """Resolve the policy, the budget and the adapter of a request or a session, and check them against its
        snapshot.

        What is ``None`` comes from ``made``, the fingerprint of a memory that is continued, or else from the engine. An
        engine's adapter is none. The policy that is returned has ``keep_prompt`` as one of its options.

        Raises:
            KVKeepError: the budget is more than the engine's, the model has no such adapter, or the memory belongs to
                another model, adapter, policy or setting.
        """
        adapter = self.identity.adapter_of(adapter, made)
        if made is not None:
            policy = policy_named(made.policy) if policy is None else policy
            budget = made.budget if budget is None else budget
        found = self._policy if policy is None else usable(policy)
        # a memory says of itself whether it keeps prompts
        found = keeping(found, keep_prompt, self._policy.keep_prompt if made is None else None)
        number = self._budget if budget is None else budgets.check_one(budget)
        if number > self._budget:
            raise BudgetError(
                f"A budget of {number} is more than the engine's {self._budget}: its rows have memory for no more. "
                "Ask for less, or give the engine a larger `budget`."
            )
        if made is not None:
            made.check(self.fingerprint(found, number, adapter))
        return Settled(found, number, adapter)

    def fingerprint(self, policy: Policy, budget: int, adapter: str | None) -> Fingerprint:
        """Return the fingerprint that a snapshot made with this policy, budget and adapter has."""
        return self.identity.fingerprint(self._layout(policy), budget, adapter)

    def weights_hash(self, adapter: str | None) -> str:
        """Return a hash of the model's weights as they are now, with an adapter."""
        return self.identity.weights(adapter)

    def make_rows(self, policy: Policy) -> KVManager:
        """Allocate the engine's rows for a policy, after checking that they fit into the free memory, with the
        sequences that may wait in main memory. Return their KV manager. Fingerprints name the dtype of its keys from
        then on.

        Raises:
            BudgetError: not one row fits into ``kv_memory``, or there is no free memory for the rows or for the
                sequences that wait.
        """
        rows = KVManager(self._model, policy, self._budget, **self._options)
        count = self._rows_that_fit(rows)
        free = free_bytes(device_of(self._model))
        if free is not None and count * rows.row_bytes > free:
            raise BudgetError(
                f"Out of memory: {policy} with a budget of {self._budget} takes {show_bytes(rows.row_bytes)} per row, "
                f"and {count} of them do not fit into the {show_bytes(free)} that are free. Use fewer rows or a "
                "smaller `budget`."
            )
        # rows on a device take no main memory
        beside, pinned = 0 if free is None else count, self._staging is not None
        check_host_rows(self._host_rows, rows.row_bytes, beside=beside, pinned=pinned)
        rows.allocate(count, most_bytes=self._bytes_of_rows(rows, count))
        self.identity.dtype = rows.dtype
        return rows

    def replace(self, rows: KVManager, policy: Policy) -> KVManager:
        """Free the memory of rows, none of which is in use, and return new rows for a policy.

        If the new rows cannot be allocated, allocate the old ones again, empty, and raise the error.

        Raises:
            BudgetError: see `make_rows`.
        """
        count = rows.count
        rows.allocate(0)  # before there is memory for others
        try:
            return self.make_rows(policy)
        except BaseException:
            rows.allocate(count, most_bytes=self._bytes_of_rows(rows, count))
            raise

    def _bytes_of_rows(self, rows: KVManager, count: int) -> int | None:
        """Return the most bytes that ``count`` rows may take beside the staging copies, whose limit is set as well;
        ``None`` without a limit.
        """
        return share_room(self._staging, self._kv_memory, rows.row_bytes, count)

    def _rows_that_fit(self, rows: KVManager) -> int:
        """Return how many rows of this kind the engine allocates: the wanted number (by default `DEFAULT_ROWS`), and
        with ``kv_memory`` at most as many as that holds (by default so many).

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
        """Return the layout of rows for a policy, after a check that a row fits. Layouts are cached.

        Raises:
            KVKeepError: the policy does not go together with the model, the engine's options or its memory.
        """
        if policy not in self._layouts:
            layout = Layout.of(self._model.config, policy, **self._options)
            layout.slots(self._budget)  # its rows are made for the engine's budget
            if self._kv_memory is not None:
                # refuses a policy under which not one row fits
                self._rows_that_fit(KVManager(self._model, policy, self._budget, **self._options))
            # clients may name any number of policies, and each layout takes memory
            if len(self._layouts) >= MOST_POLICIES:
                self._layouts.clear()
            self._layouts[policy] = layout
        return self._layouts[policy]

    def text_of(self, token_ids: GenericSequence[int]) -> str:
        """Return the text of tokens without special ones and without any white space, for comparisons of two texts;
        empty without a tokenizer.
        """
        return "".join(self._decode(token_ids, special=False).split()) if self._tokenizer else ""

    def _decode(self, token_ids: GenericSequence[int], *, special: bool) -> str:
        """Return the text of token ids, with special tokens only if ``special``."""
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not special))
