"""The next step after an analysis, and its risks, by the rules in docs/choose-a-policy.md.

``kvkeep tune`` chooses policy and budget: it has the only rules for that. The rules here warn. A rule without its
measurement says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvkeep.result_files import command
from kvkeep_lab.analysis.groups.budget_claims import GAIN, TOLERANCE
from kvkeep_lab.analysis.measure import Result

Results: TypeAlias = Mapping[str, Result]
"""Measurement → its result; without skipped ones."""

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

REPEATS = 0.1
"""Least excess of repeated three-token groups over the full cache's."""

FIRST_TOKEN_SMALL = 0.5
"""Size of the first token's value, relative to the others', below which AhaKV's value prior may evict it."""


@dataclass(frozen=True)
class Advice:
    """The next step and the risks.

    Attributes:
        short: the next step in a sentence.
        command: the command for it.
        risks: the rules that warn, with their numbers.
    """

    short: str
    command: str
    risks: tuple[str, ...]


def advise(results: Results, model: str) -> Advice:
    """Apply every rule.

    Args:
        results: the results of the measurements.
        model: the model as a command line names it; empty for the embedded one.
    """
    return Advice(
        "kvkeep tune finds the policy and the budget for this model and text: the smallest memory that keeps a share "
        "of the full cache's quality, for questions that come later (or --case inside, or stream).",
        # the page knows the name of the text's file and not its folder, so a path would be wrong nearly everywhere
        command("kvkeep tune", *filter(None, [model]), "--text", "FILE"),
        tuple(found for rule in WARNINGS if (found := rule(results)) is not None),
    )


def _far_past_is_lost(results: Results) -> str | None:
    """Return a warning of budgets that cost no perplexity, and the past all the same; ``None`` if there are none."""
    found = results.get("budgets")
    if found is None or found["gain"] < GAIN:
        return None
    lost = [
        f"{policy} at {found['budgets'][number]:.0%} keeps {cells['kept'][number]:.0%}"
        for policy, cells in found["policies"].items()
        for number, cost in enumerate(cells["excess"])
        if cost is not None and cost + cells["error"][number] <= TOLERANCE and _below_half(cells["kept"][number])
    ]
    if not lost:
        return None
    return (
        f"R3: within 2 % of the full cache's perplexity, and yet of the advantage of a second reading {', '.join(lost)}"
        ": details from far back are lost there, and a loss per token hardly shows it."
    )


def _below_half(kept: float | None) -> bool:
    return kept is not None and kept < HALF


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
    """Return the value at the end of a path; ``None`` if a key on it is missing."""
    place: Any = results
    for key in path:
        place = place.get(key) if isinstance(place, Mapping) else None
    return place


WARNINGS: tuple[Callable[[Results], str | None], ...] = (
    _far_past_is_lost,
    _dense_layers,
    _heavy_hitters_matter,
    _importance_fades,
    _early_tokens_crowd,
    _questions_fail,
    _first_token_is_small,
    _writing_repeats,
)
"""Rules R3 to R10."""
