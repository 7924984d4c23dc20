"""The papers' claims about small caches, and the rules by which a text agrees with them."""

from __future__ import annotations

import math

from kvkeep_lab.analysis.measure import ClaimLine, Reading, Result, Verdict

TOLERANCE = math.log(1.02)
"""Nats per token that count as next to nothing: 2 % of perplexity."""

GAIN = 0.3
"""Least advantage of a second reading under the full cache, in nats per token; the rest of a smaller one is noise."""


def reading(result: Result) -> Reading:
    """Return the reading: it agrees if H2O at a fifth costs at most `TOLERANCE`, and cannot tell if that cannot run."""
    cost = _excess(result, "h2o", 0.2)
    names, budget = smallest(result)
    if budget is None:
        meaning = "No policy here is within 2 % of the full cache's perplexity at any of these budgets."
    else:
        meaning = f"{budget:.0%} is the smallest budget here within 2 % of the full cache's perplexity, with {names}."
    if result["gain"] >= GAIN:
        again = f"Of the advantage of a second reading ({result['gain']:.2f} nats), H2O keeps "
        again += f"{_kept(result, 'h2o', 0.2)} and local {_kept(result, 'local', 0.2)}."
    else:
        again = f"A second reading is hardly easier under the full cache ({result['gain']:.2f} nats)."
        meaning += " Nothing follows about the far past: the full cache hardly uses it."
    return Reading(
        paper="H2O is on a par with the full cache at a fifth of its size; Scissorhands keeps OPT's perplexity down to "
        "half to three quarters of it; windows of recent tokens alone lose much.",
        here=f"H2O at 20 % {_costs(cost)}; local {_costs(_excess(result, 'local', 0.2))}. {again}",
        meaning=meaning,
        verdict=_below(cost),
    )


def claims(result: Result) -> tuple[ClaimLine, ...]:
    """Return one claim of each paper, and one against a window of recent tokens."""
    h2o, local = _excess(result, "h2o", 0.2), _excess(result, "local", 0.2)
    half, aha, four = (_excess(result, *cell) for cell in (("scissorhands", 0.5), ("ahakv", 0.04), ("h2o", 0.04)))
    return (
        ClaimLine(
            "A fifth of the cache is enough for H2O",
            "H2O, Figure 4",
            "on a par with the full cache at 20 % on most tasks",
            f"perplexity: {_costs(h2o)}",
            _below(h2o),
        ),
        ClaimLine(
            "Heavy hitters beat a window of recent tokens of the same size",
            "H2O, Figure 4; Scissorhands, Table 3",
            "far better than local at every small budget",
            f"at 20 %, H2O {_costs(h2o)}, local {_costs(local)}",
            _less(result, ("h2o", 0.2), ("local", 0.2)),
        ),
        ClaimLine(
            "Scissorhands keeps perplexity at half of the cache",
            "Scissorhands, Figure 3",
            "kept down to 50 % (OPT-13B) or 75 % (OPT-66B)",
            f"at 50 % {_costs(half)}",
            _below(half),
        ),
        ClaimLine(
            "AhaKV is the better one in the smallest caches",
            "AhaKV, Figure 4",
            "ahead of H2O at 4 %",
            f"at 4 %, AhaKV {_costs(aha)}, H2O {_costs(four)}",
            _less(result, ("ahakv", 0.04), ("h2o", 0.04)),
        ),
    )


def smallest(result: Result) -> tuple[str, float | None]:
    """Return the policies at the smallest budget at which any stays within `TOLERANCE`, and that budget.

    A policy's cost and standard error count together. No policy at any budget: an empty text and ``None``.
    """
    for column, budget in enumerate(result["budgets"]):
        names = [
            name
            for name, found in result["policies"].items()
            if found["excess"][column] is not None and found["excess"][column] + found["error"][column] <= TOLERANCE
        ]
        if names:
            return ", ".join(names), budget
    return "", None


def _cell(result: Result, key: str, name: str, budget: float) -> float | None:
    found = result["policies"].get(name)
    value: float | None = None if found is None else found[key][result["budgets"].index(budget)]
    return value


def _excess(result: Result, name: str, budget: float) -> float | None:
    return _cell(result, "excess", name, budget)


def _kept(result: Result, name: str, budget: float) -> str:
    kept = _cell(result, "kept", name, budget)
    return "an unknown part" if kept is None else f"{kept:.0%}"


def _costs(excess: float | None) -> str:
    return "cannot run" if excess is None else f"costs {math.expm1(excess):+.1%}"


def _below(excess: float | None) -> Verdict:
    return "cannot tell" if excess is None else "agree" if excess <= TOLERANCE else "differ"


def _less(result: Result, one: tuple[str, float], other: tuple[str, float]) -> Verdict:
    """Return agreement if the first costs less than the other by more than two standard errors of both.

    It is "differ" if the first costs more by as much, and "cannot tell" in between or if one of them cannot run.
    """
    costs = [_excess(result, *cell) for cell in (one, other)]
    errors = [_cell(result, "error", *cell) for cell in (one, other)]
    if costs[0] is None or costs[1] is None:
        return "cannot tell"
    margin = 2 * math.hypot(*(error or 0.0 for error in errors))
    gap = costs[1] - costs[0]
    return "agree" if gap > margin else "differ" if gap < -margin else "cannot tell"
