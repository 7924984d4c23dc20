"""The claims of Scissorhands (Liu et al., arXiv:2305.17118); checks run in float64 from a fixed seed."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvkeep.planning.cost import LayerShape, full_bytes
from kvkeep_lab.theory import claims_drift, drift, transformer
from kvkeep_lab.theory.claim import Claim, ClaimOutcome, claim, judge
from kvkeep_lab.theory.scissorhands import AlgorithmReading, algorithm_1
from kvkeep_lab.theory.transformer import Transformer, random_matrix, random_unit

_TESTS = "lab/tests/theory/test_scissorhands.py::test_"

ROUNDING = 1e-12
"""The rounding error that float64 may add to one side of an inequality."""


def generator() -> torch.Generator:
    """Return a generator with the fixed seed of all checks."""
    return torch.Generator().manual_seed(0)


def simple(d: int) -> Transformer:
    """Return a transformer with identities for all weights and no MLP."""
    one, nothing = torch.eye(d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
    return Transformer(one, one, one, one, nothing, nothing)


def pivotal_step(g: torch.Generator, d: int = 64, before: int = 24) -> transformer.TokenStep:
    """Return a step that meets the premises of Theorem 3.1.

    Tokens are nearly orthogonal, weights are identities but for ``W_Q``, and the MLP is small.
    """
    basis = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64)).Q[:before]
    X = torch.nn.functional.normalize(basis + 0.005 * random_unit(before, d, g))
    x = torch.nn.functional.normalize(3 * X[3] + 2 * X[7] + X[11], dim=0)
    Q = 60 * torch.eye(d, dtype=torch.float64)
    mlp = {"one": random_matrix(2 * d, d, 0.01, g), "two": random_matrix(d, 2 * d, 1.0, g)}
    return transformer.take_step(replace(simple(d), Q=Q, **mlp), X, x)


@claim("scissorhands-recent-window", "Scissorhands, Algorithm 2", f"{_TESTS}printed_slice_drops_recent")
def _recent_window() -> ClaimOutcome:
    """I[: -r] ← 0 keeps the r newest tokens from being dropped."""
    g = generator()
    q, k = torch.randn(2, 120, 8, generator=g, dtype=torch.float64).tolist()
    lost = []
    for printed in (True, False):
        sets = list(algorithm_1(q, k, 16, w=4, r=4, m=4, scaling=0.5, reading=AlgorithmReading(printed_slice=printed)))
        lost.append(sum(not set(range(t - 3, t + 1)) <= set(S) for t, S in enumerate(sets) if t >= 3))
    return judge(
        f"as printed {lost[0]} of 120 steps lose recent tokens, with I[-r:] {lost[1]}",
        printed=lost[0] == 0,
        corrected=lost[1] == 0,
    )


@claim("scissorhands-absolute-value", "Scissorhands, Theorem 3.1", f"{_TESTS}theorem_31_and_absolute_value")
def _absolute_value() -> ClaimOutcome:
    """x_ℓ A x_ℓ^T ≥ max x_j A x_ℓ^T / ε, without an absolute value, makes the next score follow α_ℓ to within 3ε."""
    X = torch.tensor([[1.0, 0.0], [-0.6, 0.8]], dtype=torch.float64)
    step = transformer.take_step(simple(2), X, torch.tensor([0.0, 1.0], dtype=torch.float64))
    over = float((step.error() - 3 * step.epsilon(printed=True)).amax())
    good = pivotal_step(generator())
    share = float((good.error() / (3 * good.epsilon())).amax())
    within = bool((step.error() <= 3 * step.epsilon() + ROUNDING).all()) and share <= 1
    return judge(
        f"as printed off by {over:.2f} where ε may be 0; with |x_j A x_ℓ^T| at most {share:.0%} of the 3ε is used",
        printed=over <= ROUNDING,
        corrected=within,
    )


@claim("scissorhands-middle-term", "Scissorhands, Theorem 3.1, Equation 3", f"{_TESTS}middle_term_of_the_same_token")
def _middle_term() -> ClaimOutcome:
    """The bounds made of α_ℓ hold the next score on x_j."""
    step = pivotal_step(generator())
    over = float((step.error_of_another() - 3 * step.epsilon()[:, None]).amax())
    return judge(
        f"with x_j off by {over:.2f} beyond the 3ε; with x_ℓ never",
        printed=over <= ROUNDING,
        corrected=bool((step.error() <= 3 * step.epsilon()).all()),
    )


@claim("scissorhands-lemma-b1", "Scissorhands, Lemma B.1", f"{_TESTS}lemma_b1")
def _lemma_b1() -> ClaimOutcome:
    """Unit vectors with inner product 1 - δ differ by at most √(2δ) ‖y‖ on any y."""
    g = generator()
    most = 0.0
    for _ in range(200):
        x, z, y = random_unit(3, 8, g)
        for direction in (y, x - z):
            left, right = transformer.lemma_b1(x, z, direction)
            most = max(most, left / right)
    return judge(f"the left side reaches {most:.6f} of the right in 400 draws: it is tight", printed=most <= 1 + 1e-9)


@claim("scissorhands-lemma-b2", "Scissorhands, Lemma B.2", f"{_TESTS}lemma_b2")
def _lemma_b2() -> ClaimOutcome:
    """a_t W_Q W_K^T x_ℓ^T is α_ℓ x_ℓ A x_ℓ^T to within ε x_ℓ A x_ℓ^T."""
    left, right = pivotal_step(generator()).lemma_b2()
    return judge(f"at most {float((left / right).amax()):.0%} of the allowance", printed=bool((left <= right).all()))


@claim("scissorhands-lemma-b3", "Scissorhands, Lemma B.3", f"{_TESTS}lemma_b3_and_the_largest")
def _lemma_b3() -> ClaimOutcome:
    """Attention moves by at most 2 √(t-1)/t λ_Q λ_K times the distance of the last tokens."""
    g = generator()
    model = replace(simple(8), Q=random_matrix(8, 8, 3.0, g), K=random_matrix(8, 8, 3.0, g))
    X, Y = random_unit(10, 8, g), random_unit(10, 8, g)
    Y[-1] = X[-1]
    left, right = drift.lemma_b3(model, X, Y)
    _, printed = drift.lemma_b3(model, X, Y, printed=True)
    return judge(
        f"with equal last tokens attention moves by {left:.3f}, printed bound {printed:.0f}, corrected {right:.1f}",
        printed=left <= printed,
        corrected=left <= right,
    )


def _opposite() -> drift.Drop:
    """Drop half of the attention, with a token opposite to the one that stays."""
    X = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    x = torch.tensor([0.0, 1.0], dtype=torch.float64)
    return drift.lemma_b4(simple(2), x, X, torch.tensor([True, False]))


@claim("scissorhands-lemma-b4", "Scissorhands, Lemma B.4", f"{_TESTS}lemma_b4_and_its_factor")
def _lemma_b4() -> ClaimOutcome:
    """Dropping keys moves the output by at most λ_V λ_O times the dropped mass."""
    drop = _opposite()
    allowed = drop.gain * drop.mass
    return judge(
        f"opposite tokens: error {drop.error:.2f}, printed bound {allowed:.2f}; twice that is reached",
        printed=drop.error <= allowed,
        corrected=drop.error <= 2 * allowed + ROUNDING,
    )


@claim("scissorhands-twice-the-mass", "Scissorhands, proof of Lemma B.4", f"{_TESTS}twice_the_dropped_mass")
def _twice_the_mass() -> ClaimOutcome:
    """Renormalising over the kept keys moves attention by exactly twice the dropped mass."""
    g = generator()
    gap = 0.0
    for _ in range(50):
        X, kept = random_unit(20, 8, g), torch.rand(20, generator=g) < 0.5
        kept[0] = True
        model = replace(simple(8), Q=random_matrix(8, 8, 50.0, g))
        drop = drift.lemma_b4(model, X[0], X, kept)
        gap = max(gap, abs(drop.distance - 2 * drop.mass))
    return judge(f"‖α̃ - β‖_1 is 2 Σ β to {gap:.0e} in 50 draws", printed=gap < ROUNDING)


@claim("scissorhands-lemma-b5", "Scissorhands, Lemma B.5", f"{_TESTS}lemma_b5")
def _lemma_b5() -> ClaimOutcome:
    """The MLP stretches no distance by more than 1 + λ_1 λ_2."""
    g = generator()
    most = 0.0
    for _ in range(100):
        model = replace(simple(8), one=random_matrix(16, 8, 2.0, g), two=random_matrix(8, 16, 1.5, g))
        left, right = drift.lemma_b5(model, *random_unit(2, 8, g))
        most = max(most, left / right)
    return judge(f"at most {most:.0%} of the bound in 100 draws", printed=most <= 1)


@claim("scissorhands-similarity", "Scissorhands, Section 5", f"{_TESTS}heaviest_keys_keep_the_mass")
def _similarity() -> ClaimOutcome:
    """Of all sets of B keys, those with the highest scores give the output most similar to the full one."""
    weights = torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64)
    V = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    cosine = torch.nn.functional.cosine_similarity(V, weights @ V, dim=1)
    top, best = float(cosine[0]), float(cosine.amax())
    return judge(
        f"of three keys the heaviest gives cosine {top:.2f}, another {best:.2f}; the retained mass is the largest",
        printed=top >= best,
        corrected=bool(weights[0] == weights.amax()),
    )


def kv_gib(layers: int, width: int) -> float:
    """Return the KV cache in GiB of 128 sequences of 2 048 tokens in float16."""
    return 128 * full_bytes([LayerShape(1, width, width)] * layers, 2048, 2) / 2**30


@claim("scissorhands-kv-table", "Scissorhands, Table 1", f"{_TESTS}the_table_of_cache_sizes")
def _kv_table() -> ClaimOutcome:
    """At batch 128 and 2 048 tokens the cache takes 1152, 640 and 950 GB (OPT-175B, LLaMA-65B, BLOOM)."""
    opt, llama, bloom = kv_gib(96, 12288), kv_gib(80, 8192), kv_gib(70, 14336)
    return judge(
        f"OPT-175B {opt:.0f} and LLaMA-65B {llama:.0f} as printed; BLOOM is {bloom:.0f}, printed 950",
        printed=(opt, llama, bloom) == (1152, 640, 950),
        corrected=(opt, llama, bloom) == (1152, 640, 980),
    )


CLAIMS: tuple[Claim, ...] = (
    _recent_window,
    _absolute_value,
    _middle_term,
    _lemma_b1,
    _lemma_b2,
    _lemma_b3,
    _lemma_b4,
    _twice_the_mass,
    _lemma_b5,
    *claims_drift.CLAIMS,
    _similarity,
    _kv_table,
)
"""In the order of the paper."""
