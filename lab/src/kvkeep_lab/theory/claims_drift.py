"""The claims around Theorem 4.1 of Scissorhands, in the order of its proof: generation, and the dropped mass."""

from __future__ import annotations

import functools

import torch

from kvkeep_lab.theory import drift
from kvkeep_lab.theory.claim import Claim, ClaimOutcome, claim, judge
from kvkeep_lab.theory.drift import Drift, PowerLaw, generate
from kvkeep_lab.theory.transformer import Transformer, random_matrix, random_unit

_TESTS = "lab/tests/theory/test_drift.py::test_"


def contracting(qk: float, g: torch.Generator, *, d: int = 16, mlp: float = 0.5) -> Transformer:
    """Return a transformer that just meets Theorem 4.1's condition, with ``λ_Q λ_K = qk`` and ``λ_1 λ_2 = mlp``."""
    vo = 0.5 / ((1 + mlp) * (1 + qk))
    Q, K, V, O = (random_matrix(d, d, norm**0.5, g) for norm in (qk, qk, vo, vo))  # noqa: E741
    return Transformer(Q, K, V, O, random_matrix(2 * d, d, mlp**0.5, g), random_matrix(d, 2 * d, mlp**0.5, g))


@functools.cache
def _runs() -> list[Drift]:
    """Return runs under three sizes of weights: 12 unit vectors as prompt, 48 new tokens, 20 of 58 keys at the end."""
    g = torch.Generator().manual_seed(0)
    found = []
    for qk in (1.0, 10.0, 100.0):
        found.append(generate(contracting(qk, g), random_unit(12, 16, g), 48, 20))
    return found


@claim("scissorhands-recursion", "Scissorhands, proof of Theorem 4.1", f"{_TESTS}the_recursion")
def _recursion() -> ClaimOutcome:
    """x_{t+1} drifts by at most (1 + λ_1λ_2) λ_Vλ_O (2 dropped mass + (2 λ_Qλ_K + 1) drift so far)."""
    runs = _runs()
    some = [run.bound > 0 for run in runs]
    share = max(float((run.apart / run.bound)[mask].amax()) for run, mask in zip(runs, some, strict=True))
    zero = all(not run.apart[~mask].any() for run, mask in zip(runs, some, strict=True))
    return judge(f"at most {share:.0%} of the bound in 144 steps", printed=share <= 1 and zero)


@claim(
    "scissorhands-twice-the-largest", "Scissorhands, proof of Theorem 4.1", f"{_TESTS}twice_the_largest_dropped_mass"
)
def _twice_the_largest() -> ClaimOutcome:
    """If λ_Vλ_O (1 + λ_1λ_2)(1 + λ_Qλ_K) ≤ 1/2, the drift is at most twice the largest dropped mass."""
    share = max(float(run.apart.amax() / (2 * run.dropped.amax())) for run in _runs())
    return judge(f"at most {share:.1%} of the bound in three runs", printed=share <= 1)


@claim("scissorhands-unit-tokens", "Scissorhands, Theorem 4.1, premises", f"{_TESTS}premises_exclude_each_other")
def _unit_tokens() -> ClaimOutcome:
    """Generated tokens of length 1 and power-law attention can meet the condition on the weights."""
    runs = _runs()
    longest = max(float(run.lengths.amax()) for run in runs)
    uneven = max(float(run.uneven[1:].amax()) for run in runs)
    return judge(
        f"generated tokens have length {longest:.3f} at most, and look at all keys alike (largest over smallest "
        f"weight {uneven:.3f}), so no power law either",
        printed=longest >= 1,
    )


@claim(
    "scissorhands-dropped-mass", "Scissorhands, Theorem B.3, last line but one", f"{_TESTS}dropped_mass_in_closed_form"
)
def _mass() -> ClaimOutcome:
    """The dropped mass tends to M(q) = 1 + (k-2) q - (k-1) q^((k-2)/(k-1))."""
    g = torch.Generator().manual_seed(0)
    gap = 0.0
    for k, u in ((3.0, 50.0), (4.0, 20.0)):
        law = PowerLaw(k, u)
        for q in (0.2, 0.5, 0.8):
            gap = max(gap, abs(float(law.sampled_dropped_mass(q, 2000, 50, g).mean()) - law.dropped_mass(q)))
    limit = max(abs(drift.line_before(q, 3.0) - drift.dropped_mass(q, 3.0)) for q in (0.05, 0.2, 0.5, 0.9))
    return judge(
        f"M(q) is that line to {limit:.0e}; Monte Carlo is within {gap:.3f} of the same with an end u",
        printed=gap < 0.005 and limit < 1e-12,
    )


@claim("scissorhands-equation-11", "Scissorhands, Theorem B.3, Equation 11", f"{_TESTS}equation_11_fails_below_a_half")
def _printed_mass() -> ClaimOutcome:
    """The dropped mass is at most (1-q)/(0.98 (1-ε)²) (k - (k-1)((1-ε)/(q-ε))^(1/(k-1)))."""
    shares = [n / 100 for n in range(5, 100)]
    broken = [q for q in shares if drift.printed_dropped_mass(q, 3.0) < drift.dropped_mass(q, 3.0)]
    before = all(drift.line_before(q, 3.0) >= drift.dropped_mass(q, 3.0) - 1e-12 for q in shares)
    printed, mass = drift.printed_dropped_mass(0.2, 3.0), drift.dropped_mass(0.2, 3.0)
    return judge(
        f"k = 3: too small for q ≤ {max(broken):.2f}; at q = 0.2 it is {printed:.2f}, and the mass {mass:.3f}; the "
        "line before is right",
        printed=not broken,
        corrected=before,
    )


@claim("scissorhands-theorem-4-1", "Scissorhands, Theorem 4.1, Equation 4", f"{_TESTS}theorem_4_1_goes_below_zero")
def _printed_error() -> ClaimOutcome:
    """E‖x_t - x̃_t‖ is at most 2.1 (1-q)/(1-ε)² (k - (k-1)((1-ε)/(q-ε))^(1/(k-1)))."""
    root = drift.bracket_root(3.0)
    return judge(
        f"k = 3: {drift.printed_error(0.2, 3.0):.2f} at q = 0.2; below 0, as no distance is, for all q < {root:.3f}",
        printed=drift.printed_error(0.2, 3.0) >= 0,
    )


@claim("scissorhands-bracket", "Scissorhands, Section 4.2", f"{_TESTS}the_bracket_is_below_one")
def _bracket() -> ClaimOutcome:
    """The factor k - (k-1)((1-ε)/(q-ε))^(1/(k-1)) is always less than one."""
    found = [drift.bracket(q / 100, k) for q in range(1, 100) for k in (2.5, 3.0, 4.0, 10.0)]
    return judge(f"from {min(found):.1f} to {max(found):.3f}: also far below 0", printed=max(found) < 1)


@claim("scissorhands-delta", "Scissorhands, proof of Theorem B.3", f"{_TESTS}delta_is_on_both_sides")
def _delta() -> ClaimOutcome:
    """Δ ≤ 0.98 b if u ≥ 5b, and so 1/Δ ≤ 1/(0.98 b)."""
    ratios = {(k, u): PowerLaw(k, u).delta_ratio for k in (3.0, 4.0) for u in (5.0, 20.0, 100.0)}
    return judge(
        f"Δ/b is {ratios[3, 5]:.3f} (k 3, u 5b), {ratios[3, 100]:.3f} (3, 100b), {ratios[4, 5]:.3f} (4, 5b), "
        f"{ratios[4, 100]:.4f} (4, 100b): on both sides, and the proof needs ≥",
        printed=max(ratios.values()) <= 0.98,
    )


@claim("scissorhands-delta-form", "Scissorhands, proof of Theorem B.3", f"{_TESTS}the_form_of_delta_has_a_wrong_sign")
def _delta_form() -> ClaimOutcome:
    """Δ = b - (k-1)(u/b)^(1-k) (b-u)/(b^(1-k) - u^(1-k))."""
    law = PowerLaw(3.0, 5.0)
    k, b, u = law.k, law.b, law.u
    corrected = 1 + (k - 1) * u ** (1 - k) * (b - u) / (b ** (1 - k) - u ** (1 - k)) / b
    return judge(
        f"k = 3, u = 5b: printed {law.printed_delta_ratio:.3f} b, integral {law.delta_ratio:.3f} b; with + it agrees",
        printed=abs(law.printed_delta_ratio - law.delta_ratio) < 1e-12,
        corrected=abs(corrected - law.delta_ratio) < 1e-12,
    )


@claim("scissorhands-probability", "Scissorhands, Theorem 4.1", f"{_TESTS}the_probability_lost_a_square")
def _probability() -> ClaimOutcome:
    """Too few small scores come with probability at most exp(-2 (t-1)(1-q)²/(1-ε)²)."""
    q, epsilon, t = 0.5, 0.01, 1000
    found = drift.sampled_failure(q, epsilon, t, 2000, torch.Generator().manual_seed(0))
    printed, right = drift.printed_failure(q, epsilon, t), drift.hoeffding_failure(q, epsilon, t)
    return judge(
        f"q = 0.5, ε = 0.01, 1000 tokens: misses in {found:.0%}, printed at most {printed:.0e}; with ε² {right:.0%}",
        printed=found <= printed,
        corrected=found <= right,
    )


CLAIMS: tuple[Claim, ...] = (
    _recursion,
    _twice_the_largest,
    _unit_tokens,
    _mass,
    _printed_mass,
    _printed_error,
    _bracket,
    _delta,
    _delta_form,
    _probability,
)
