"""H2O's claims about the dynamic guarantee (App. D.10 to D.14, Theorem 4.4)."""

from __future__ import annotations

import itertools
import math
from functools import cache

from kvkeep_lab.theory.claim import Claim, ClaimOutcome, claim, judge
from kvkeep_lab.theory.claims_h2o import gauss
from kvkeep_lab.theory.dynamic import (
    Dynamic,
    Guarantee,
    current,
    exact,
    expand,
    measure,
    run,
    theorem_bound,
    tracked,
)
from kvkeep_lab.theory.submodular import GREEDY

_HERE = "lab/tests/theory/test_dynamic.py::"

TOKENS, BUDGET, RUNS = 8, 2, 4


def _head(seed: int) -> tuple[list[list[float]], list[list[float]]]:
    return gauss(TOKENS, 3, seed, scale=1.5), gauss(TOKENS, 3, seed + 100, scale=1.5)


def _fixed(*weights: float) -> Dynamic:
    return lambda Z, i: lambda T: math.fsum(weights[s - 1] for s in T)


@cache
def _sums(*, printed: bool = False) -> list[Guarantee]:
    """Return runs that decide by the attention received so far, with all keys present."""
    return [measure(exact(*_head(seed)), TOKENS, BUDGET, printed=printed) for seed in range(RUNS)]


@cache
def _rows() -> list[Guarantee]:
    """Return runs that decide by the newest row alone."""
    return [measure(current(*_head(seed)), TOKENS, BUDGET) for seed in range(RUNS)]


def _holding(found: list[Guarantee]) -> tuple[int, int]:
    steps = [step for guarantee in found for step in guarantee.steps]
    return sum(step.holds for step in steps), len(steps)


@claim("h2o-lemma-d29", "H2O, Lemma D.29", f"{_HERE}test_lemma_d29_along_a_run")
def _exact() -> ClaimOutcome:
    """With θ and γ as a run has them, each set has (1-1/e)((1-θ)(1-γ))^(i+1) of the next best."""
    found = [*_sums(), *_rows()]
    held, total = _holding(found)
    worst = min(step.value / step.now for guarantee in found for step in guarantee.steps)
    promised = max(guarantee.steps[-1].bound / guarantee.steps[-1].best for guarantee in found)
    by = (
        f"{held} of {total} steps; sets reach {worst:.0%} of their best or more, promised at the end are {promised:.1%}"
    )
    return judge(by, printed=held == total)


@claim("h2o-definition-d28", "H2O, Definition D.28", f"{_HERE}test_definition_d28_looks_the_wrong_way")
def _direction() -> ClaimOutcome:
    """Condition 2, opt_i ≥ (1-γ) opt_(i-1), is what the induction needs."""
    (printed, total), (meant, _) = _holding(_sums(printed=True)), _holding(_sums())
    by = f"the bound holds in {printed} of {total} steps with the printed condition, in {meant} with opt_(i+1)"
    return judge(by, printed=printed == total, corrected=meant == total)


@claim("h2o-lemma-d29-step-1", "H2O, proof of Lemma D.29, line 1", f"{_HERE}test_the_first_step_is_not_monotonicity")
def _first_step() -> ClaimOutcome:
    """f(S_(i+1)) ≥ f(S_i) because f is monotone."""
    f, S = _fixed(5.0, 4.0, 1.0), frozenset({1, 2})
    before, forced = f(S, 3)(S), f(S, 3)(expand(f, S, 3, 2, keep_newest=True))
    rises = total = 0
    for seed in range(RUNS):
        g = tracked(*_head(seed), BUDGET)
        sets = run(g, TOKENS, BUDGET)
        total += TOKENS
        rises += sum(g(sets[i], i)(sets[i + 1]) >= g(sets[i], i)(sets[i]) - 1e-12 for i in range(1, TOKENS + 1))
    by = (
        f"monotone f falls from {before:.0f} to {forced:.0f} if token i has to stay; "
        f"if it may go, f does not fall in {rises} of {total} steps"
    )
    return judge(by, printed=forced >= before, corrected=rises == total)


@claim("h2o-lemma-d29-line-3", "H2O, proof of Lemma D.29, lines 3, 4", f"{_HERE}test_the_third_line_has_a_stray_term")
def _stray() -> ClaimOutcome:
    """Line 4 follows from line 3, which ends with -i ε_0."""
    # Lines 3 and 4 of the proof at i = 5, with θ = γ = 0.01, ``opt_{i+1} = 3`` and ``opt_i = (1-γ) opt_{i+1}``.
    theta, gamma, i, best = 0.01, 0.01, 5, 3.0

    def third(epsilon: float) -> float:
        return (1 - theta) * (GREEDY * ((1 - theta) * (1 - gamma)) ** i * (1 - gamma) * best - i * epsilon)

    fourth = (1 - theta) * GREEDY * (1 - theta) ** i * (1 - gamma) ** (i + 1) * best
    by = f"with ε_0 = 0.1 line 3 is {third(0.1):.2f} and line 4 {fourth:.2f}; without the term {third(0.0):.2f}"
    return judge(by, printed=third(0.1) >= fourth - 1e-12, corrected=third(0.0) >= fourth - 1e-12)


@claim("h2o-lemma-d30", "H2O, Lemma D.30", f"{_HERE}test_lemma_d30_needs_both_sides")
def _approximate() -> ClaimOutcome:
    """The guarantee survives an approximate f̃ with f ≥ f̃ - ε_0, at the price of ε_0 a step."""
    lost = _fixed(1.0, 0.0, 0.0)
    nothing: Dynamic = lambda Z, i: lambda T: 0.0  # noqa: E731
    printed = measure(lost, 3, 1, approximate=nothing, printed=True)
    value, promised = printed.steps[-1].value, printed.steps[-1].bound
    along = [measure(exact(*_head(s)), TOKENS, BUDGET, approximate=tracked(*_head(s), BUDGET)) for s in range(RUNS)]
    held, total = _holding([*along, measure(lost, 3, 1, approximate=nothing)])
    by = (
        f"f̃ = 0 meets all conditions with ε_0 = {printed.epsilon:.0f}: value {value:.0f}, promised {promised:.2f}; "
        f"with |f - f̃| bounded, {held} of {total} steps hold"
    )
    return judge(by, printed=_holding([printed])[0] == 2, corrected=held == total)


@claim("h2o-theorem-d32", "H2O, Theorems 4.4 and D.32", f"{_HERE}test_theorem_d32_follows_from_lemmas")
def _theorem() -> ClaimOutcome:
    """If θ, γ ≤ α/10n and ε_0 ≤ β/10n, each set has (1-1/e)(1-α) opt - β."""
    slack = math.inf
    for n, alpha, beta in itertools.product((1, 10, 300), (0.01, 0.5, 0.99), (0.0, 1.0)):
        theta, epsilon = alpha / (10 * n), beta / (10 * n)
        for i in range(1, n + 1):
            induction = GREEDY * (1 - theta) ** (2 * i) - 2 * i * epsilon
            slack = min(slack, induction - theorem_bound(1.0, alpha, beta))
    return judge(f"at least {slack:.4f} opt above it for n up to 300, even with 2ε_0 per step", printed=slack >= 0.0)


@claim(
    "h2o-mild-assumption", "H2O, assumption of Theorems 4.4 and D.32", f"{_HERE}test_the_mild_assumption_is_far_away"
)
def _mild() -> ClaimOutcome:
    """θ and γ are at most α/10n, a mild assumption."""
    needed = _sums()[0].needed
    gamma = min(run.gamma for run in _sums())
    even = min(1.0 - (run.steps[0].now / run.steps[-1].best) ** (1 / (TOKENS - 1)) for run in _sums())
    theta = min(run.theta for run in _rows())
    by = (
        f"needed under {needed:.4f} for n = {TOKENS}; sums over rows: γ {gamma:.2f}, {even:.2f} if spread evenly; "
        f"the newest row alone: θ {theta:.2f}"
    )
    return judge(by, printed=min(gamma, theta) <= needed)


CLAIMS: tuple[Claim, ...] = (_exact, _direction, _first_step, _stray, _approximate, _theorem, _mild)
