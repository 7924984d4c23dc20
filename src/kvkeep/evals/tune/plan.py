"""A search as the user asks for it, checked before weights are read."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch

from kvkeep.errors import InputError, KVKeepError, PolicyError
from kvkeep.evals import task
from kvkeep.evals.arms import PolicyArm, split_arms
from kvkeep.evals.forward import PLAIN, Setup
from kvkeep.evals.grid import RequestedBudget
from kvkeep.evals.task import Options, check_positions, past_training
from kvkeep.evals.tune.documents import UserQuestion, own, planted
from kvkeep.evals.tune.measure import (
    CASES,
    PIECE,
    POLICIES,
    SHARES,
    Answers,
    Arm,
    Case,
    Ladder,
    Losses,
    Measure,
    budgets_of,
    ladder,
)
from kvkeep.evals.tune.search import LIMITS, VERSION, Limits
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.planning.families import outline
from kvkeep.planning.plan import Setting
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import parse, spec
from kvkeep.result_files import in_full

CONTEXT = 1024
"""Default tokens of a text; fewer if the model was trained for fewer."""

FACTS = 16
"""Default number of facts that are planted in a text."""

SHORTEST, LONGEST = 32, 2**20
"""Fewest and most tokens of a text."""

_EVERY = 2**20
"""Stands for all: more windows than a text has, and a budget that is never too small."""


@dataclass(frozen=True)
class QuickDefaults:
    """The defaults of a first look.

    Attributes:
        context: tokens of a text.
        facts: facts planted in a text.
        policies: how many of the case's policies are searched.
        shares: budgets, as shares of a text.
        limits: how many documents are used.
    """

    context: int
    facts: int
    policies: int
    shares: tuple[float, ...]
    limits: Limits


QUICK = QuickDefaults(256, 6, 3, (0.1, 0.3, 0.7), Limits(questions=24, windows=4, apart=False))
"""A table in about a minute, of a model with 135 million parameters on two cores."""


@dataclass(frozen=True, kw_only=True)
class TuneArguments:
    """What the user asks for.

    Attributes:
        case: one of `CASES`.
        text: content of a text file; ``None`` for the package's own sentences.
        questions: the user's questions; empty for planted facts.
        context: tokens of a text; ``None`` for the default.
        facts: facts planted in a text; ``None`` for the default.
        seed: chooses facts and texts.
        limit: questions of the confirmation, or texts; ``None`` for the default.
        policies: a list of policies; ``None`` for those of the case.
        budgets: shares of a text or numbers of tokens; empty for the default.
        setup: how all caches are made.
        head_budgets: rules that divide budgets among heads, each of which is searched; ``None``: the policy's own.
        quick: whether defaults are those of a first look, see `QUICK`.
    """

    case: str
    text: str | None = None
    questions: Sequence[UserQuestion] = ()
    context: int | None = None
    facts: int | None = None
    seed: int = 0
    limit: int | None = None
    policies: str | None = None
    budgets: Sequence[float | int] = ()
    setup: Setup = PLAIN
    head_budgets: Sequence[str | None] = (None,)
    quick: bool = False

    def __post_init__(self) -> None:
        """Check all arguments, as far as that needs no model.

        Raises:
            InputError: a number is out of range, there is no such case, or questions are given for a stream.
            PolicyError: a policy does not exist, or evicts nothing.
        """
        case = _case(self.case)
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit={self.limit} leaves nothing to measure; give 1 or more.")
        for budget in self.budgets:
            RequestedBudget(ratio=budget) if isinstance(budget, float) else RequestedBudget(tokens=budget)  # checks it
        Options(seed=self.seed, text=self.text, facts=self.planted)  # checks them
        if self.questions and case == "stream":
            raise InputError("`questions` are for the cases later and inside; a stream is measured by its loss.")
        if self.context is not None and self.context < SHORTEST:
            raise InputError(f"context={self.context} is too short to search in; give {SHORTEST} or more.")
        if self.context is not None and self.context > LONGEST:
            raise InputError(f"context={self.context} is more than a search can read; give {LONGEST} or less.")
        for arm in self.chosen():
            if not arm.policy.evicts:
                raise PolicyError(
                    f"{spec(arm.policy)} evicts nothing: it is what the others are compared with. Leave it out."
                )

    @property
    def planted(self) -> int:
        """Return the number of facts in a text."""
        return (QUICK.facts if self.quick else FACTS) if self.facts is None else self.facts

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a text, for a model that was trained for as many."""
        return (QUICK.context if self.quick else CONTEXT) if self.context is None else self.context

    @property
    def sizes(self) -> Limits:
        """Return limits on a search's documents: the defaults (`QUICK`'s if ``quick``), and the user's ``limit``."""
        return replace(QUICK.limits if self.quick else LIMITS, given=self.limit)

    def chosen(self) -> list[PolicyArm]:
        """Return the policies to search, each with the bits and the rule for heads that its name says.

        They are those of the user, or else those of the case, for a first look only the first few of these.

        Raises:
            PolicyError: the user's list is empty, or a policy in it is wrong.
            InputError: slots cannot have the bits that it names.
            BudgetError: the number of the rule that it names is out of range.
        """
        if self.policies is not None:
            return split_arms(self.policies)
        default = POLICIES[_case(self.case)]
        return split_arms(",".join(default[: QUICK.policies] if self.quick else default))


@dataclass(frozen=True)
class TunePlan:
    """A search that has passed all checks that need no weights.

    Attributes:
        case: the case.
        measure: runs candidates.
        ladders: what is searched.
        full_bytes: memory of a row in a full cache of the longest text and what follows it.
        settings: everything that results depend on, except the weights.
        notes: notes for the user.
    """

    case: Case
    measure: Measure
    ladders: Sequence[Ladder]
    full_bytes: int
    settings: dict[str, Any]
    notes: Sequence[str]


def lay_out(checkpoint: Checkpoint, name: str, wanted: TuneArguments, dtype: torch.dtype | None = None) -> TunePlan:
    """Return the plan of a search, checked; no weights are needed.

    Args:
        checkpoint: configuration and tokenizer.
        name: the model's name in results.
        wanted: what is asked for.
        dtype: the cache's dtype; by default the checkpoint's.

    Raises:
        InputError: something cannot be used with this model.
        PolicyError: a policy does not exist, or evicts nothing.
    """
    case = _case(wanted.case)
    arms = _arms(checkpoint, wanted)
    measure = _measure(checkpoint, case, wanted)
    check_positions(checkpoint, measure.room, "the search", "context")
    ladders, full_bytes = _ladders(checkpoint, arms, wanted, measure, dtype)
    notes = past_training(checkpoint, measure.room, "the search")
    if wanted.text is None and not wanted.questions:
        notes.append("the texts are the package's own plain sentences, which say little about yours; give a `text`.")
    notes += [
        f"{arm.label} is left out: it protects more tokens than any of the budgets has, or takes more memory than a "
        "full cache."
        for arm, steps in zip(arms, ladders, strict=True)
        if not steps
    ]
    return TunePlan(case, measure, ladders, full_bytes, _settings(name, wanted, measure), notes)


def _case(name: str) -> Case:
    """Return the name of a case after a check that it is one.

    Raises:
        InputError: there is no such case.
    """
    if name not in CASES:
        raise InputError(f"case={name!r} is no case; use {', '.join(CASES[:-1])} or {CASES[-1]}.")
    return next(case for case in CASES if case == name)  # `name` itself is any text to a type checker


def _arms(checkpoint: Checkpoint, wanted: TuneArguments) -> list[Arm]:
    """Return the arms, each once: each policy with the setup, under each rule for heads.

    Default policies that cannot run so on this model are left out.

    Raises:
        KVKeepError: a policy that the user named cannot run so.
        InputError: none of the case's policies runs on this model.
    """
    arms: dict[str, Arm] = {}
    for chosen in wanted.chosen():
        # a rule that a policy's name says is its only one
        rules = wanted.head_budgets if chosen.head_budget is None else (chosen.head_budget,)
        for setup in dict.fromkeys(chosen.over(replace(wanted.setup, head_budget=rule)) for rule in rules):
            try:
                setup.cache(checkpoint, chosen.policy, [_EVERY])  # raises for what no budget can mend
                arm = Arm(spec(chosen.policy), setup, _differences(checkpoint, chosen.policy, setup))
                arms.setdefault(arm.name, arm)  # several may say the same in other words: h2o, h2o@16
            except KVKeepError:
                if wanted.policies is not None:  # the user has named it
                    raise
    if not arms:
        raise InputError("None of the policies of this case runs on this model with these options. Name `policies`.")
    return list(arms.values())


def _differences(checkpoint: Checkpoint, policy: Policy, setup: Setup) -> str:
    """Return the options that differ from the policy's own, as text.

    A file of head budgets is shown by two hashes, of its profile and of its text, since the file may change.
    """
    found = setup.differences(checkpoint, policy)
    file = (setup.head_budget or "").partition("profile:")[2]
    # eight digits of the hash, without the name of its kind
    return f"{found}, {_hash(in_full(file).read_text('utf-8', 'replace'))[7:15]}" if file else found


def _measure(checkpoint: Checkpoint, case: Case, wanted: TuneArguments) -> Measure:
    """Return what measures candidates, with its data: answers to the user's questions or to questions about planted
    facts, or for a stream the losses of text that goes on.
    """
    if wanted.questions:
        return Answers(own(checkpoint, wanted.questions, wanted.seed), later=case == "later")
    context = wanted.tokens
    if wanted.context is None and checkpoint.trained_length is not None:
        context = min(context, checkpoint.trained_length)
    if case == "stream":
        check_positions(checkpoint, context, "the search", "context")
        options = Options(seed=wanted.seed, text=wanted.text)
        # the package's own text never ends: enough windows to choose and to confirm by default
        rows = task.windows(checkpoint, options, rows=_EVERY if wanted.text else 2 * LIMITS.windows, length=context)
        # windows in the order of the text would let its beginning choose and its end confirm
        return Losses(rows[random.Random(wanted.seed).sample(range(len(rows)), len(rows))])
    documents = planted(checkpoint, wanted.text, context=context, facts=wanted.planted, seed=wanted.seed)
    return Answers(documents, later=case == "later")


def _ladders(
    checkpoint: Checkpoint, arms: Sequence[Arm], wanted: TuneArguments, measure: Measure, dtype: torch.dtype | None
) -> tuple[list[Ladder], int]:
    """Return the candidates of every arm, and the bytes of a row in a full cache with room for question and reply.

    Candidates that take no less memory than that are left out, so a ladder may be empty.

    Raises:
        InputError: no policy runs with any of the budgets, or none saves memory with one of them.
    """
    shape = outline(checkpoint.name)

    def setting(arm: Arm, budget: int) -> Setting:
        """Return what a row's bytes are counted from, after a check of the budget.

        Raises:
            KVKeepError: the arm cannot run with this budget.
        """
        arm.setup.cache(checkpoint, parse(arm.policy), [budget])  # refuses a budget that is too small
        own_dtype = dtype or shape.dtype or torch.float32
        return Setting(
            outline=shape,
            policy=parse(arm.policy),
            budget=budget,
            layer_budget=_listed(arm.setup.layer_budget),
            head_budget=arm.setup.head_budget,
            kv_bits=arm.setup.kv_bits,
            positions=cast(Literal["true", "slot"] | None, arm.setup.positions),  # `cache` above has checked it
            context=measure.length,  # the bytes of a bounded row do not depend on it, nor on the chunk
            chunk=measure.length,
            dtype=own_dtype,
            weights_dtype=own_dtype,
        )

    numbers = _budgets(wanted, measure)
    made = [ladder(arm, numbers, lambda arm, budget: setting(arm, budget).bounded().row_bytes) for arm in arms]
    if not any(made):
        raise InputError(
            f"No policy here runs with a budget of {', '.join(map(str, numbers))}: it protects more. Give larger "
            "`budgets`."
        )
    # any arm does: a full cache depends on the model and the tokens alone, here with question and reply
    largest = replace(setting(arms[0], measure.room), context=measure.room, chunk=measure.room)
    full = largest.full().row_bytes
    smaller = [tuple(step for step in steps if step.row_bytes < full) for steps in made]
    if not any(smaller):
        raise InputError(
            f"Under every policy here, with a budget of {', '.join(map(str, numbers))}, a row takes no less memory "
            f"than in a full cache of all {measure.room} tokens. Give smaller `budgets`, longer texts, or other "
            "policies."
        )
    return smaller, full


def _budgets(wanted: TuneArguments, measure: Measure) -> list[int]:
    """Return the budgets of all arms in tokens, each once, the smallest first.

    Those that leave nothing to evict are left out.

    Raises:
        InputError: no budget is left.
    """
    given = wanted.budgets or (QUICK.shares if wanted.quick else SHARES)
    numbers = {budget if isinstance(budget, int) else budgets_of(measure.length, [budget])[0] for budget in given}
    # two pieces must lie beyond the budget: earlier ones cannot differ
    most = measure.length - 2 * PIECE if measure.kind == "loss" else measure.room
    found = sorted(number for number in numbers if number <= most)
    if not found:
        raise InputError(f"All `budgets` are larger than {most}, so nothing would be evicted. Give smaller ones.")
    return found


def _listed(rule: str | tuple[float, ...] | None) -> str | list[float] | None:
    """Return a layer budget as JSON can hold it."""
    return list(rule) if isinstance(rule, tuple) else rule


def _settings(name: str, wanted: TuneArguments, measure: Measure) -> dict[str, Any]:
    """Return what ``run.json`` says about a search, as far as it is known without weights; texts and questions of the
    user are shown as hashes.
    """
    asked = [(question.text, question.question, question.answers) for question in wanted.questions]
    return {
        "model": name,
        "case": wanted.case,
        "text": "own" if wanted.text is None else _hash(wanted.text),
        "questions": _hash(repr(asked)) if asked else "planted",
        "context": measure.length,
        "facts": wanted.planted,
        "seed": wanted.seed,
        "version": VERSION,
    }


def _hash(text: str) -> str:
    """Return a short hash of a text: ``sha256:`` and 16 digits."""
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
