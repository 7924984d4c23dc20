"""`kvkeep.explain`: a text and a question under some policies, as an object that becomes a page or JSON."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from typing import Any

from kvkeep import budget as budgets
from kvkeep.attention_probe import keeps_states
from kvkeep.cache.layer_layout import Layout, default_budget, default_policy, rule_for_layers
from kvkeep.errors import InputError, PolicyError, UnsupportedModelError
from kvkeep.explain import runs
from kvkeep.explain.explanation import MOST_MOMENTS, Explanation, PolicyRun
from kvkeep.explain.runs import ExplainPrompt, pieces
from kvkeep.models.attention import attached
from kvkeep.models.checkpoint import Checkpoint, Model, Tokenizer, position_limit, trained_length
from kvkeep.models.device import enough_memory
from kvkeep.models.generation_config import ends_of
from kvkeep.models.load import load_with_tokenizer
from kvkeep.models.special_tokens import added_tokens
from kvkeep.models.support import unwrapped
from kvkeep.models.tokenization import SEPARATOR, check_length, encode, opened
from kvkeep.policies import DEFAULT, LATER
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import parse

CASES: dict[str, str] = {"inside": DEFAULT, "later": LATER}
"""When the question is read, and the policy that is shown by default: that of ``kvkeep generate`` and of ``kvkeep
remember`` on most models."""
NEW_TOKENS = 32
MOST_NEW_TOKENS = 54
"""What is left of the page's moments when the prompt has 200 of them."""

MOST_POLICIES = 6  # columns of the page
_MOST_CHUNKS = MOST_MOMENTS - MOST_NEW_TOKENS
_MOST_TOKENS = 2**17  # a browser gets an element and numbers for each


@dataclass(frozen=True)
class ExplainArguments:
    """The arguments of `explain`, checked as far as they can be without a model.

    Attributes:
        policies: the policies that are shown.
        budget: tokens per head, a share of the prompt's, or ``None`` for the default.
        chunk: tokens of the prompt that are read at a time; ``None``: all.
        new_tokens: the most tokens of an answer.
        case: ``inside`` or ``later``.
    """

    policies: list[Policy]
    budget: int | float | None
    chunk: int | None
    new_tokens: int
    case: str


def explain(  # noqa: PLR0913  the choices of a user
    model: Model | str | os.PathLike[str] | None,
    text: str,
    *,
    question: str = "",
    case: str = "inside",
    policies: Sequence[str | Policy] | None = None,
    budget: int | float | None = None,
    tokenizer: Tokenizer | None = None,
    prefill_chunk: int | None = None,
    max_new_tokens: int = NEW_TOKENS,
    raw: bool = False,
    name: str | None = None,
    command: str | None = None,
    progress: Callable[[float], object] = lambda share: None,
) -> Explanation:
    """Read a text and answer a question under some policies; return a record of what each head held, dropped and
    missed.

    ``kvkeep.explain(None, text, question="Who?").to_html()`` is a page about the embedded model. By default the record
    is that of ``kvkeep generate``: the same policy, budget and chunks, so the same tokens.

    Args:
        model: a model of transformers, or the name or folder of one; ``None`` for the embedded model.
        text: the text.
        question: follows the text, after a blank line.
        case: ``inside``: the question ends the text, as in ``kvkeep generate``. ``later``: the question comes after the
            text was cut, as in ``kvkeep remember``.
        policies: policies or their strings, at most six; by default that of the case, see `CASES`.
        budget: tokens kept per layer and KV head, or a share of the prompt's tokens as a float in (0, 1]; by default
            1024, or all if there are fewer.
        tokenizer: the model's tokenizer, if ``model`` is no name.
        prefill_chunk: tokens of the prompt that are read at a time, by default all. What is read at a time is one
            moment of the page.
        max_new_tokens: the most tokens of an answer.
        raw: leave the tokenizer's chat template out.
        name: the model's name on the page; by default its own.
        command: the command that the page shows; by default this call.
        progress: called with the share of the work that is done, as far as time follows the products of numbers.

    Returns:
        The record, with ``to_html``, ``to_json`` and a page in notebooks.

    Raises:
        InputError: the text is empty or too short or too long, or an argument is out of range.
        PolicyError: a policy does not exist.
        BudgetError: the budget is out of range, or smaller than what a policy protects.
        UnsupportedOperationError: a policy does not work with prompts in chunks.
        UnsupportedModelError: a part of the model keeps a state instead of slots.

    Cost:
        One run per policy and one under the full cache. Attention is computed twice, in float32, and the keys and
        values of the whole text are kept while it runs. Threads wait for each other. A model is in evaluation mode and
        attached meanwhile, and afterwards what it was.
    """
    asked = check(policies, budget, case=case, prefill_chunk=prefill_chunk, max_new_tokens=max_new_tokens)
    message = _joined(text, question, strip=asked.case == "later")  # `opened` strips the text, too
    if asked.case == "later" and not question.strip():
        raise InputError("A question that comes later is missing. Give one.")
    with _ready(model, tokenizer) as (found, checkpoint):
        if policies is None and case == "later":
            asked = replace(asked, policies=[default_policy(checkpoint.config, LATER)])
        prompt, notes = _prompt(checkpoint, found, message, text, asked, raw=raw)
        slots = _slots(asked, len(prompt.ids), notes)
        _check_runs(checkpoint, asked.policies, slots, prompt)
        rooms = [_room(policy, slots, prompt) for policy in asked.policies]
        work = runs.WorkDone(found, prompt, rooms, progress)
        with enough_memory(found.device):
            ledgers = [
                runs.bounded(found, policy, room, prompt, work)
                for policy, room in zip(asked.policies, rooms, strict=True)
            ]
            answer, missed = runs.full(found, prompt, ledgers, work)
        ids, tokens = prompt.ids.tolist(), checkpoint.tokenizer
        return Explanation(
            model=name or checkpoint.name,
            question=question,
            command=command or _call(checkpoint.name, question, asked, raw=raw),
            notes=notes,
            tokens=pieces(tokens, ids),
            case=asked.case,
            chunk=prompt.chunk,
            prompt_ends=list(accumulate(prompt.sizes)),
            budget=slots,
            heads=ledgers[0].answered.heads,
            answer=pieces(tokens, answer),
            runs=[
                PolicyRun(
                    str(policy),
                    ledger,
                    other,
                    pieces(tokens, ledger.answered.ids),
                    _agreement(ledger.answered.ids, answer),
                    _parting(ledger.answered.ids, answer),
                )
                for policy, ledger, other in zip(asked.policies, ledgers, missed, strict=True)
            ],
            special=frozenset(token.content for token in added_tokens(tokens).values() if token.special),
        )


def check(
    policies: Sequence[str | Policy] | None,
    budget: int | float | None,
    *,
    case: str,
    prefill_chunk: int | None,
    max_new_tokens: int,
) -> ExplainArguments:
    """Return the arguments of `explain`, checked as far as no model is needed; policies are parsed, and those of the
    case stand in for ``None``.

    Raises:
        KVKeepError: see `explain`.
    """
    if case not in CASES:
        raise InputError(f"case={case!r:.40} is neither {' nor '.join(CASES)}.")
    if policies is None:
        policies = [CASES[case]]
    if isinstance(policies, str) or not policies:  # a text is a sequence, too, of letters
        raise PolicyError('`policies` is a list of one to six policies, e.g. ["h2o", "snapkv"].')
    made = [parse(policy) if isinstance(policy, str) else policy for policy in policies]
    if any(not isinstance(policy, Policy) for policy in made):
        raise PolicyError(f"{next(policy for policy in made if not isinstance(policy, Policy))!r:.80} is no policy.")
    if len(made) > MOST_POLICIES or len({str(policy) for policy in made}) < len(made):
        raise InputError(f"`policies` names {len(made)}; give up to {MOST_POLICIES} different ones.")
    if isinstance(budget, float):
        budgets.from_ratio(budget, 1)  # checks the share; the number of tokens is not known yet
    elif budget is not None:
        budget = budgets.check_one(budget)
    chunk = None if prefill_chunk is None else budgets.check_one(prefill_chunk, "prefill_chunk")
    new_tokens = budgets.check_one(max_new_tokens, "max_new_tokens")
    if not 1 <= new_tokens <= MOST_NEW_TOKENS:
        raise InputError(
            f"max_new_tokens={new_tokens} is outside 1 … {MOST_NEW_TOKENS}: the page has {MOST_MOMENTS} moments, and "
            "most of them are the prompt's. Ask for fewer new tokens."
        )
    return ExplainArguments(made, budget, chunk, new_tokens, case)


@contextmanager
def _ready(model: Any, tokenizer: Tokenizer | None) -> Iterator[tuple[Any, Checkpoint]]:
    """Attach the model while the context lasts, and yield it with its checkpoint. A name, or ``None`` for the embedded
    model, is loaded first.

    Raises:
        InputError: ``model`` is a model, and ``tokenizer`` is ``None``.
    """
    name = "the embedded model" if model is None else str(model)
    if model is None or isinstance(model, str | os.PathLike):
        model, tokenizer = load_with_tokenizer(model)
    elif tokenizer is None:
        raise InputError("A model without a tokenizer cannot read a text. Pass `tokenizer`, or the name of a model.")
    else:
        name = str(unwrapped(model).config.name_or_path or type(model).__name__)
    with attached(model) as found:
        yield found, Checkpoint(name, found.config, tokenizer, position_limit(found), allow_pickle=False)


def _joined(text: str, question: str, *, strip: bool) -> str:
    """Return text and question as the user's message.

    Args:
        text: the text.
        question: follows the text after a blank line; an empty one is left out.
        strip: drop white space around the text.

    Raises:
        InputError: one of them is no text, or the text is empty or has a zero byte.
    """
    if not isinstance(text, str) or not isinstance(question, str):
        raise InputError("`text` and `question` are texts, in UTF-8.")
    if not text.strip():
        raise InputError("The text is empty. Give some text to read.")
    if "\0" in text:
        place = text.index("\0")
        raise InputError(f"The text has a zero byte at character {place}: a binary file. Give plain text.")
    shown = text.strip() if strip else text
    return shown if not question.strip() else f"{shown}{SEPARATOR}{question}"


def _prompt(
    checkpoint: Checkpoint, model: Any, message: str, text: str, asked: ExplainArguments, *, raw: bool
) -> tuple[ExplainPrompt, list[str]]:
    """Return the prompt, encoded and divided into the pieces in which it is read, and remarks on that for the page.

    Args:
        checkpoint: the model's.
        model: the model.
        message: text and question.
        text: the text alone.
        asked: the arguments.
        raw: leave the chat template out.

    Raises:
        InputError: the text is too short or too long.
    """
    ids, notes, chunk = encode(checkpoint, message, raw=raw)[0], list[str](), asked.chunk
    if len(ids) < 2:
        raise InputError("The text is a single token, of which nothing can be forgotten. Give a longer text.")
    if len(ids) > _MOST_TOKENS:
        raise InputError(f"The text has {len(ids)} tokens, more than the {_MOST_TOKENS} of a page. Give a part of it.")
    check_length(checkpoint, len(ids), asked.new_tokens)
    # every chunk is a moment, and drops are told by their moments in one byte
    if chunk is not None and len(ids) > chunk * _MOST_CHUNKS:
        chunk = -(-len(ids) // _MOST_CHUNKS)
        notes.append(
            f"Time is sampled: {len(ids)} tokens were read in chunks of {chunk} instead of {asked.chunk}, so that "
            f"there are at most {MOST_MOMENTS} moments."
        )
    trained = trained_length(checkpoint.config)
    if trained and len(ids) + asked.new_tokens > trained:
        notes.append(f"The text is longer than the {trained} tokens that the model was trained for.")
    parts = [len(ids)]
    if asked.case == "later":  # no chunk has tokens of both text and question
        first = len(opened(checkpoint, text, raw=raw)[0])
        parts = [first, len(ids) - first]
    sizes = tuple(size for part in parts for size in _in_chunks(part, chunk))
    ends = frozenset(ends_of(model, checkpoint.tokenizer, chat=not raw))
    return ExplainPrompt(ids, sizes, chunk, asked.new_tokens, ends), notes


def _in_chunks(tokens: int, chunk: int | None) -> list[int]:
    """Return the sizes of the pieces of at most ``chunk`` tokens into which so many tokens are divided; a single one if
    ``chunk`` is ``None``.
    """
    if chunk is None:
        return [tokens]
    return [min(chunk, tokens - first) for first in range(0, tokens, chunk)]


def _slots(asked: ExplainArguments, tokens: int, notes: list[str]) -> int:
    """Return the budget of the policies in tokens: the given one, the given share of the prompt, or the default.

    A small share grows to what the policies protect. Remarks are added to ``notes``: on such a share, and if nothing is
    evicted by default.
    """
    if isinstance(asked.budget, int):
        return asked.budget
    if asked.budget is None:
        evicting = [policy for policy in asked.policies if policy.evicts]
        if not evicting:
            return tokens + asked.new_tokens
        # one budget for all policies, which holds what each of them protects
        slots = default_budget(evicting[0], tokens + asked.new_tokens, evicting[1:])
        if slots >= tokens + asked.new_tokens:
            notes.append(f"Nothing is evicted: {slots} slots hold all of the text and the answer. Try a budget of 20%.")
        return slots
    slots = share = budgets.from_ratio(asked.budget, tokens)
    for policy in asked.policies:
        # again and again, since what a policy protects may grow with its budget
        while policy.evicts and (protected := int(sum(policy.protected(slots)))) > slots:
            slots = protected
    if slots > share:
        notes.append(f"The budget is {slots} tokens, so that every policy has room for the tokens that it protects.")
    return slots


def _room(policy: Policy, slots: int, prompt: ExplainPrompt) -> int:
    """Return the slots of each head under a policy: the budget, or for a policy that never evicts one for each token of
    the prompt and of the longest answer.
    """
    return slots if policy.evicts else prompt.length


def _check_runs(checkpoint: Checkpoint, policies: Sequence[Policy], slots: int, prompt: ExplainPrompt) -> None:
    """Refuse a model, policies and budgets that cannot run, before the first policy runs.

    Raises:
        KVKeepError: see `explain`.
    """
    refuse_states(checkpoint.name, checkpoint.config)
    for policy in policies:
        policy.check(_room(policy, slots, prompt))
        # some policies need a prompt in one piece
        chunk = None if len(prompt.sizes) == 1 else prompt.sizes[0]
        room = _room(policy, slots, prompt)
        layers = rule_for_layers(room, prompt.length)
        Layout.of(checkpoint.config, policy, prefill_chunk=chunk, layer_budget=layers).spread(room)


def _agreement(ids: Sequence[int], answer: Sequence[int]) -> float:
    """Return the share of positions at which two answers have the same token, of all positions of the longer one."""
    # over the longer one, so that a missing end counts as different
    return sum(a == b for a, b in zip(ids, answer, strict=False)) / max(len(ids), len(answer))


def _parting(ids: Sequence[int], answer: Sequence[int]) -> int | None:
    """Return the index of the first token of ``ids`` that differs from the answer's; ``None`` if both are equal.

    Where one of both ends earlier, they differ there; if that is ``ids``, its last token is named.
    """
    # an answer that ends earlier than the other differs where it ends: its last token is named
    differ = (index for index, (a, b) in enumerate(zip_longest(ids, answer)) if a != b)
    first = next(differ, None)
    return None if first is None else min(first, len(ids) - 1)


def _call(name: str, question: str, asked: ExplainArguments, *, raw: bool) -> str:
    """Return the Python call that makes the same explanation, for the page."""
    given: dict[str, object] = {"question": question}
    if asked.case != "inside":
        given["case"] = asked.case
    given["policies"] = [str(policy) for policy in asked.policies]
    if asked.budget is not None:
        given["budget"] = asked.budget
    if asked.chunk is not None:
        given["prefill_chunk"] = asked.chunk
    if asked.new_tokens != NEW_TOKENS:
        given["max_new_tokens"] = asked.new_tokens
    if raw:
        given["raw"] = raw
    model = None if name == "the embedded model" else name
    return f"kvkeep.explain({model!r}, text, {', '.join(f'{key}={value!r}' for key, value in given.items())})"


def refuse_states(name: str, config: Any) -> None:
    """Refuse a model with layers that keep a state, which cannot go back to the end of the prompt.

    Raises:
        UnsupportedModelError: the model has such layers.
    """
    if keeps_states(config):
        raise UnsupportedModelError(
            f"{name} has layers that keep a state instead of tokens, which cannot be compared with a full cache token "
            "by token. Take a model whose layers all have attention."
        )
