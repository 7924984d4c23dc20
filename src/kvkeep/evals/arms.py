"""Lists of policies, as options name them: ``full,h2o:recent=32,sinks=4,tova@8``.

Importing this module imports torch, and nothing of transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.errors import InputError, PolicyError
from kvkeep.kv_bits import check_bits
from kvkeep.policies import _head_budgets
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import available, parse

if TYPE_CHECKING:
    from kvkeep.evals.forward import Setup


class PolicyArm(NamedTuple):
    """A policy of a list, and what the list says about its caches.

    Attributes:
        policy: the policy.
        kv_bits: bits of keys and values, see `KV_BITS`, or ``"16"``; ``None`` where the list names none.
        head_budget: how the budget is divided among heads; ``None`` where the list names no rule.
    """

    policy: Policy
    kv_bits: str | None = None
    head_budget: str | None = None

    def over(self, setup: Setup) -> Setup:
        """Return a copy of ``setup`` with this arm's bits and rule for heads, as far as it names them.

        The bits ``16`` stand for the model's dtype, so they become ``None``.
        """
        return replace(
            setup,
            kv_bits=check_bits(self.kv_bits or setup.kv_bits),
            head_budget=self.head_budget or setup.head_budget,
        )


def split_policies(text: str) -> list[Policy]:
    """Return the policies of a list as in `split_arms`, none of which may name bits or a rule for heads.

    Raises:
        PolicyError: the list is empty, or a policy in it is wrong or names bits or a rule for heads.
        InputError: slots cannot have the bits that it names.
        BudgetError: the number of the rule that it names is out of range.
    """
    arms = split_arms(text)
    for policy, *named in arms:
        if any(named):
            words = "".join(f"@{word}" for word in named if word)
            raise PolicyError(f"{policy}{words} names {words[1:]}, which has no effect here. Write {policy}.")
    return [arm.policy for arm in arms]


def split_arms(text: str) -> list[PolicyArm]:
    """Return the policies of a list, each with what it names beside the policy, each once.

    A bare ``option=value`` continues a policy, so ``h2o:recent=32,sinks=4,local`` has two. ``h2o@4bit`` or ``h2o@4``
    names bits, see `kvkeep.kv_bits.check_bits`; ``h2o@global:0.2`` a rule by which heads share the budget, see
    `kvkeep.cache.BoundedCache`; ``h2o@ada@8`` both.

    Raises:
        PolicyError: the list is empty, or a policy in it is wrong.
        InputError: slots cannot have that number of bits.
        BudgetError: a rule's number is out of range.
    """
    pieces: list[str] = []
    for piece in filter(None, (part.strip() for part in text.split(","))):
        if "=" in piece and ":" not in piece and pieces:
            # the first option follows a colon, those behind it or behind a preset commas; `module:Class` has a colon
            name = pieces[-1].partition(":")[0]
            own = 0 if name in available() else 1
            pieces[-1] += ("," if pieces[-1].count(":") > own else ":") + piece
        else:
            pieces.append(piece)
    if not pieces:
        raise PolicyError("The list of policies is empty; write e.g. full,local,h2o:recent=32,tova.")
    return list(dict.fromkeys(map(_arm, pieces)))


def _arm(text: str) -> PolicyArm:
    """Return what ``POLICY@BITS@RULE`` says; bits and rule, in any order, are ``None`` if none are named.

    Raises:
        PolicyError: the text names bits or a rule twice, or its policy is wrong.
        InputError: slots cannot have these bits, or there is no such rule.
        BudgetError: the rule's number is out of range.
    """
    policy, *words = (word.strip() for word in text.split("@"))
    named: dict[str, str] = {}
    for word in words:
        if word.partition(":")[0] in (*_head_budgets.RULES, _head_budgets.PROFILE):
            _head_budgets.parsed(word)  # checks it
            kind, value = "head_budget", word
        else:
            kind, value = "kv_bits", _bits(text, word)
        if kind in named:
            raise PolicyError(f"{text!r:.80} names {kind} twice; write {policy}@{named[kind]} or {policy}@{value}.")
        named[kind] = value
    return PolicyArm(parse(policy), **named)


def _bits(text: str, word: str) -> str:
    """Return the bits that a word of an arm says: a name of `KV_BITS`, or ``16`` for the model's dtype.

    Raises:
        InputError: slots cannot have that number of bits, or the word is meant for a rule that does not exist.
    """
    try:
        # `check_bits` returns nothing for 16, and here nothing means that no bits were named
        return check_bits(word.removesuffix("bit")) or "16"
    except InputError as error:
        rules = ", ".join(_head_budgets.RULES)
        raise InputError(
            f"{text!r:.80}: {word!r:.40} after @ is neither a number of bits (8, 4, k8v4, 16) nor a rule for heads "
            f"({rules} or {_head_budgets.PROFILE}:FILE)."
        ) from error
