"""Advice from measurements, by the rules in docs/choose-a-policy.md.

`R1` and `R2` choose budget and policy by the cost of smaller caches on this very text. The other rules warn. A rule
without its measurement says nothing; without that of `R1` there is no advice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvkeep.research.analysis.groups.budget_claims import GAIN, TOLERANCE
from kvkeep.research.analysis.measure import Result
from kvkeep.results import command

Results: TypeAlias = Mapping[str, Result]
"""Measurement → its result; without skipped ones."""

NEAR = 0.05
"""Policies count as equal if they keep at most this much less of a second reading than the best one."""

HALF = 0.5
"""Share of the advantage of a second reading below which the far past counts as lost."""

SPARSE = 0.9
"""A layer with a smaller share of small weights looks at many tokens."""

PERSISTENT = 0.2
"""Least excess of the persistence ratio over its chance level, the size of the pivotal set."""

SKEWED = 0.25
"""Distance (Kolmogorov and Smirnov's) of retained positions from an even spread that counts as a bias."""

ANSWERS = 0.3
"""Share of questions that the full cache has to answer before other policies' answers say anything."""

HARM = 1.1
"""Least ratio of the perplexities with heavy hitters hidden and with random keys hidden."""

WINDOWS = ("local", "streaming_llm")
"""Policies that keep recent tokens and ignore attention."""

REPEATS = 0.1
"""Least excess of repeated three-token groups over the full cache's."""

FIRST_TOKEN_SMALL = 0.5
"""Size of the first token's value, relative to the others', below which AhaKV's value prior may evict it."""


@dataclass(frozen=True)
class Advice:
    """A recommendation with its reasons.

    Attributes:
        short: one or two sentences.
        policy: the policy's string; ``full`` if no bounded cache is safe; empty if nothing is known.
        budget: the budget in words.
        command: a command that follows the advice; empty if there is none.
        reasons: the rules that chose, with their numbers.
        risks: the rules that warn, with their numbers.
    """

    short: str
    policy: str
    budget: str
    command: str
    reasons: tuple[str, ...]
    risks: tuple[str, ...]


@dataclass(frozen=True)
class _Choice:
    """A policy at a budget, with its cost and the share of a second reading that it keeps."""

    policy: str
    share: float
    cost: float
    error: float
    kept: float


def advise(results: Results, model: str) -> Advice:
    """Apply every rule.

    Args:
        results: the results of the measurements.
        model: the model as a command line names it; empty for the embedded one.
    """
    risks = tuple(found for rule in WARNINGS if (found := rule(results)) is not None)
    budgets = results.get("budgets")
    if budgets is None:
        return Advice(
            "There is no advice: it rests on what smaller caches cost on this text, which was not measured.",
            "",
            "",
            "",
            ("R1: the measurement 'budgets' is missing or was skipped.",),
            risks,
        )
    choices = _choices(budgets)
    able = [choice for choice in choices if choice.cost + choice.error <= TOLERANCE]
    if not able:
        return _keep_all(choices, risks)
    able, out = _without_windows(able, results)
    share = min(choice.share for choice in able)
    best, why = _best([choice for choice in able if choice.share == share], budgets["gain"] >= GAIN)
    return _advice(best, why + out, choices, budgets=budgets, risks=risks, model=model)


def _choices(budgets: Result) -> list[_Choice]:
    found = []
    for policy, cells in budgets["policies"].items():
        for number, share in enumerate(budgets["budgets"]):
            if cells["excess"][number] is not None:
                kept = cells["kept"][number]
                found.append(
                    _Choice(
                        policy,
                        share,
                        cells["excess"][number],
                        cells["error"][number],
                        math.nan if kept is None else kept,
                    )
                )
    return found


def _without_windows(able: list[_Choice], results: Results) -> tuple[list[_Choice], str]:
    """Part of rule R1: leave out windows of recent tokens where these are not safe and there is an alternative."""
    others = [choice for choice in able if choice.policy not in WINDOWS]
    if not others or len(others) == len(able) or _heavy_hitters_matter(results) is None:
        return able, ""
    return others, " Windows of recent tokens were left out, see R5."


def _best(able: list[_Choice], tells: bool) -> tuple[_Choice, str]:
    """Rule R2: the policy that keeps most of the far past; of equals the cheapest, then the first by name."""
    cheapest = min(able, key=lambda choice: (choice.cost, choice.policy))
    if not tells or any(math.isnan(choice.kept) for choice in able):
        return cheapest, f"R2: passages that come again tell nothing here, so the cheapest one: {cheapest.policy}."
    most = max(choice.kept for choice in able)
    equal = [choice for choice in able if choice.kept >= most - NEAR]
    best = min(equal, key=lambda choice: (choice.cost, choice.policy))
    others = ", ".join(f"{choice.policy} {choice.kept:.0%}" for choice in able if choice is not best) or "nobody else"
    return best, (
        f"R2: of those it keeps most of the advantage of a second reading, {best.kept:.0%}, or within "
        f"{NEAR:.0%} of the most and costs least ({others})."
    )


def _keep_all(choices: list[_Choice], risks: tuple[str, ...]) -> Advice:
    """The advice if rule R1 finds no policy."""
    best = min(choices, key=lambda choice: choice.cost, default=None)
    near = (
        "" if best is None else f" The nearest is {best.policy} at {best.share:.0%} with {math.expm1(best.cost):+.1%}."
    )
    return Advice(
        "Keep the full cache: no policy here stays within 2 % of its perplexity at any of the budgets." + near,
        "full",
        "as long as the text",
        "",
        (f"R1: no policy is within 2 % of the full cache's perplexity.{near}",),
        risks,
    )


def _advice(
    best: _Choice, why: str, choices: list[_Choice], *, budgets: Result, risks: tuple[str, ...], model: str
) -> Advice:
    tokens = round(best.share * budgets["n_tokens"])
    first = (
        f"R1: {best.share:.0%} is the smallest budget at which a policy stays within 2 % of the full cache's "
        f"perplexity ({budgets['perplexity']:.3g}); {best.policy} {math.expm1(best.cost):+.1%} there."
    )
    careful = _careful(best, choices, budgets["gain"] >= GAIN)
    return Advice(
        f"For text that goes on, {best.policy} with {best.share:.0%} of the text ({tokens} of {budgets['n_tokens']} "
        f"tokens).{careful[0]}",
        best.policy,
        f"{best.share:.0%} of the text",
        command("kvkeep generate", *filter(None, [model]), "--policy", best.policy, "--budget", tokens),
        (first, why),
        (*careful[1], *risks),
    )


def _careful(best: _Choice, choices: list[_Choice], tells: bool) -> tuple[str, tuple[str, ...]]:
    """Rule R3: details from far back."""
    if not tells or math.isnan(best.kept) or best.kept >= HALF:
        return "", ()
    safe = [choice for choice in choices if choice.kept >= HALF and choice.share >= best.share]
    lost = f"R3: {best.policy} at {best.share:.0%} keeps {best.kept:.0%} of the advantage of a second reading"
    if not safe:
        return (
            " Details from far back are lost: keep the full cache where they matter.",
            (f"{lost}, and nothing here keeps half of it: details from far back are lost at every budget.",),
        )
    share = min(choice.share for choice in safe)
    chosen = max((choice for choice in safe if choice.share == share), key=lambda choice: choice.kept)
    return (
        f" Where details from far back matter, {chosen.policy} with {share:.0%}.",
        (f"{lost}; {chosen.policy} at {share:.0%} is the smallest that keeps half ({chosen.kept:.0%}).",),
    )


def _dense_layers(results: Results) -> str | None:
    layers = _get(results, "sparsity", "sparsity_by_layer")
    dense = [] if layers is None else [number for number, share in enumerate(layers) if share < SPARSE]
    if not dense:
        return None
    names = ", ".join(map(str, dense))
    return (
        f"R4: some layers look at many tokens (less than {SPARSE:.0%} of their weights are small) and lose first: "
        f"{names}. Give them more with --layer-budget."
    )


def _heavy_hitters_matter(results: Results) -> str | None:
    full, heavy, drawn = (_get(results, "removal", "perplexity", key) for key in ("full", "heavy", "random"))
    if None in (full, heavy, drawn) or heavy < HARM * drawn:
        return None
    return (
        f"R5: hiding the heaviest fifth of the keys multiplies perplexity by {heavy / full:.3g}, hiding a random fifth "
        f"by {drawn / full:.3g}: a window of recent tokens that drops them is not safe on other texts."
    )


def _importance_fades(results: Results) -> str | None:
    ratio, size = (_get(results, "persistence", key) for key in ("ratio", "size"))
    if ratio is None or size is None or ratio - size >= PERSISTENT or size > 1.0 - PERSISTENT:
        return None  # if nearly every token was pivotal once, no ratio can stand out
    return (
        f"R6: {ratio:.0%} of the tokens that matter late mattered early, and chance alone gives {size:.0%}: what was "
        "important does not stay so. Prefer policies that look at recent rows."
    )


def _early_tokens_crowd(results: Results) -> str | None:
    kept = _get(results, "retained", "policies", "h2o", "ks")
    if kept is None or kept < SKEWED:
        return None
    return (
        f"R7: what H2O retains is {kept:.2f} away from an even spread over positions (0 is even): sums favour early "
        "tokens. Prefer ahakv, tova or h2o:decay=0.99 for long texts."
    )


def _questions_fail(results: Results) -> str | None:
    found = _get(results, "recall_depth", "policies") or {}
    right = {name: cells.get("accuracy") for name, cells in found.items()}
    full = right.pop("full", None)
    if full is None or full < ANSWERS:
        return None
    low = {name: share for name, share in right.items() if share is not None and share < HALF * full}
    if not low:
        return None
    said = ", ".join(f"{name} {share:.0%}" for name, share in low.items())
    return f"R8: of questions about a fact the full cache answers {full:.0%}, and less than half of that: {said}."


def _first_token_is_small(results: Results) -> str | None:
    size = _get(results, "value_prior", "first_token_size")
    if size is None or size >= FIRST_TOKEN_SMALL:
        return None
    return (
        f"R9: the first token's value has {size:.0%} of the others' size: give AhaKV sinks=4, or it drops that token."
    )


def _writing_repeats(results: Results) -> str | None:
    found = _get(results, "diversity", "policies") or {}
    shares = {name: _get(found, name, "repeated", "3") for name in found}
    full = shares.pop("full", None)
    more = {name: share for name, share in shares.items() if None not in (share, full) and share - full > REPEATS}
    if not more:
        return None
    said = ", ".join(f"{name} {share:.0%}" for name, share in more.items())
    return f"R10: what the model writes repeats itself more than under the full cache ({full:.0%}): {said}."


def _get(results: Results, *path: str) -> Any:
    """The value at the end of a path; ``None`` if a key on it is missing."""
    place: Any = results
    for key in path:
        place = place.get(key) if isinstance(place, Mapping) else None
    return place


WARNINGS: tuple[Callable[[Results], str | None], ...] = (
    _dense_layers,
    _heavy_hitters_matter,
    _importance_fades,
    _early_tokens_crowd,
    _questions_fail,
    _first_token_is_small,
    _writing_repeats,
)
"""Rules R4 to R10."""
