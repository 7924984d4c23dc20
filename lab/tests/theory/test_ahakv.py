"""AhaKV's algorithm and its expectations: what is printed, where it fails or stops, what holds instead.

The errata are those of the project's notes on the paper; "found here" marks what they do not list.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch

from kvkeep.planning.cost import LayerShape, full_bytes
from kvkeep_lab.theory import ahakv
from kvkeep_lab.theory.ahakv import algorithm_1, gain, prefill_scores, refine, sg_softmax, top_k, value_prior
from kvkeep_lab.theory.claims_ahakv import recent_rows
from kvkeep_lab.theory.loops import dot, softmax


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(n: int, g: torch.Generator, d: int = 6) -> list[list[float]]:
    return torch.randn(n, d, generator=g, dtype=torch.float64).tolist()


# -- Algorithm 1 -------------------------------------------------------------------------------------------------------


def test_algorithm_1_by_its_definitions():
    """The prompt's choice and twenty generated tokens, written out with logits instead of powers of probabilities."""
    g, n, B, B_r, scaling = draw(0), 20, 9, 3, 6**-0.5
    Q, K, V = (vectors(n + 20, g) for _ in range(3))
    steep = math.sqrt(2 * math.log(n / B))

    def sharpened(i: int, visible: list[int]) -> dict[int, float]:
        row = softmax([steep * scaling * dot(Q[i], K[j]) for j in visible])
        return dict(zip(visible, row, strict=True))

    rows = [sharpened(i, list(range(i + 1))) for i in range(n - B_r, n)]
    nu = [dot(v, v) for v in V[:n]]
    gamma = [sum(nu[max(0, j - 2) : j + 3]) / len(nu[max(0, j - 2) : j + 3]) for j in range(n)]
    F = {j: gamma[j] / max(gamma) * sum(row.get(j, 0.0) for row in rows) for j in range(n)}
    S = sorted(sorted(range(n - B_r), key=lambda j: -F[j])[: B - B_r] + list(range(n - B_r, n)))
    expected = [S]
    for t in range(n, n + 20):
        S = [*S, t]
        row = sharpened(t, S)
        F = {j: F.get(j, 0.0) + row.get(j, 0.0) for j in (*F, t)}
        S = sorted(sorted(S[:-B_r], key=lambda j: -F[j])[: B - B_r] + S[-B_r:])
        expected.append(S)
    assert list(algorithm_1(Q, K, V, prompt=n, B=B, B_r=B_r, scaling=scaling)) == expected


def test_top_k_by_hand():
    F = {0: 0.5, 3: 0.2, 4: 0.5, 7: 0.9, 8: 0.1, 9: 0.0}
    assert top_k(F, [0, 3, 4, 7, 8, 9], B=4, B_r=2) == [4, 7, 8, 9]  # 0 and 4 are equal: the older goes
    assert top_k(F, [0, 3, 4, 7, 8, 9], B=3, B_r=0) == [0, 4, 7]
    assert top_k(F, [0, 3, 4], B=4, B_r=2) == [0, 3, 4]
    assert top_k(F, [0, 3], B=5, B_r=3) == [0, 3]


def test_the_value_prior_by_hand():
    """Squared norms 4, 1, 0, 9, 0 with a kernel of 3: means 5/2, 5/3, 10/3, 3, 9/2, divided by the largest."""
    V = [[2.0, 0.0], [0.0, 1.0], [0.0, 0.0], [3.0, 0.0], [0.0, 0.0]]
    weights = [5 / 9, 10 / 27, 20 / 27, 2 / 3, 1.0]
    assert value_prior(V, 3) == pytest.approx(weights)
    assert refine({1: 1.0, 4: 2.0, 5: 1.0, 8: 1.0, 9: 3.0}, V, 3) == pytest.approx(
        dict(zip((1, 4, 5, 8, 9), (5 / 9, 20 / 27, 20 / 27, 2 / 3, 3.0), strict=True))
    )


def test_line_11_wastes_slots():
    """Erratum: TopK(F_s) over all tokens takes recent ones twice and does not see the values."""
    n, B, B_r = 24, 10, 4
    g = draw(1)
    rows = [dict.fromkeys(range(i + 1), 1 / (i + 1)) for i in range(n)]
    for i in range(n - B_r, n):
        rows[i] = {j: p * (5.0 if j >= n - B_r else 1.0) for j, p in rows[i].items()}
    V = vectors(n, g)
    F_s = {j: sum(sg_softmax(rows[i], gain(n, B)).get(j, 0.0) for i in range(n - B_r, n)) for j in range(n)}
    literal = {*sorted(F_s, key=F_s.__getitem__)[-(B - B_r) :], *range(n - B_r, n)}
    assert len(literal) < B
    kept = top_k(prefill_scores(rows, V, B=B, B_r=B_r), range(n), B=B, B_r=B_r)
    assert len(kept) == B
    small = [[0.0] * 6 if j in kept[:3] else v for j, v in enumerate(V)]
    other = top_k(prefill_scores(rows, small, B=B, B_r=B_r, kernel=1), range(n), B=B, B_r=B_r)
    assert not set(kept[:3]) & set(other)


# -- positional bias ---------------------------------------------------------------------------------------------------


def test_harmonic_numbers():
    exact = [Fraction(0), *itertools.accumulate(Fraction(1, i) for i in range(1, 9))]
    assert ahakv.harmonic(8).tolist() == pytest.approx([float(h) for h in exact])


@pytest.mark.parametrize(("n", "rows"), [(12, None), (12, 1), (12, 5), (12, 12), (5, 9)])
def test_expected_mass_is_the_column_sum_of_uniform_rows(n: int, rows: int | None):
    uniform = torch.ones(n, n, dtype=torch.float64).tril()
    uniform /= uniform.sum(dim=1, keepdim=True)
    last = uniform if rows is None else uniform[max(0, n - rows) :]
    torch.testing.assert_close(ahakv.expected_mass(n, rows=rows), last.sum(dim=0))


def close_in_the_mean(drawn: torch.Tensor, expected: torch.Tensor) -> bool:
    error = drawn.std(dim=0) / math.sqrt(len(drawn))
    return bool(((drawn.mean(dim=0) - expected).abs() < 4.5 * error + 1e-12).all())


def test_accumulated_mass_falls():
    """Equation 4 holds: ``E[S_j] = H_n - H_{j-1}``, steps of exactly ``-1/j``; drawn attention agrees."""
    n = 24
    attention = ahakv.random_attention(n, 6, 1500, draw(0))
    expected = ahakv.expected_mass(n)
    assert close_in_the_mean(attention.sum(dim=1), expected)
    assert not close_in_the_mean(attention.sum(dim=1), expected + 0.05)
    assert expected.diff().tolist() == pytest.approx([-1 / j for j in range(1, n)])
    assert float(attention.mean(dim=0)[7, 7]) == pytest.approx(1 / 8, rel=0.1)


def test_recent_accumulation_is_flat():
    """Equation 5 (erratum): ``n - r … n`` are r + 1 rows. With r it is flat up to ``n - r + 1``, and falls after."""
    n, r = 24, 6
    attention = ahakv.random_attention(n, 6, 1500, draw(1))
    assert recent_rows(attention, r, printed=True).shape[1] == r + 1
    rows = recent_rows(attention, r, printed=False)
    assert rows.shape[1] == r
    expected = ahakv.expected_mass(n, rows=r)
    assert close_in_the_mean(rows.sum(dim=1), expected)
    assert expected[: n - r + 1].unique().shape == (1,)
    assert (expected[n - r :].diff() < 0).all()
    assert not close_in_the_mean(recent_rows(attention, r, printed=True).sum(dim=1), expected)


def test_the_average_still_falls():
    """Divided by the number of rows that see it, the first token's expectation is ``H_n / n``, the last one's 1/n."""
    average = ahakv.expected_average(16)
    assert average[0] == pytest.approx(float(ahakv.harmonic(16)[-1]) / 16)
    assert average[-1] == pytest.approx(1 / 16)
    assert (average.diff() < 0).all()


# -- entropy -----------------------------------------------------------------------------------------------------------


def test_the_entropy_of_a_row():
    """Equation 7 with both sums over the whole row; printed with sums of different length (found here)."""
    w = torch.randn(5, 9, generator=draw(0), dtype=torch.float64)
    p = w.softmax(dim=-1)
    torch.testing.assert_close(ahakv.entropy(w), -(p * p.log()).sum(dim=-1))
    e = w.exp()
    printed = e.sum(dim=-1).log() - (e * w)[:, :-1].sum(dim=-1) / e[:, :-1].sum(dim=-1)
    assert ((printed - ahakv.entropy(w)).abs() > 1e-3).all()
    assert (ahakv.entropy(w) <= math.log(9)).all()
    assert float(ahakv.entropy(torch.zeros(9, dtype=torch.float64))) == pytest.approx(math.log(9))


@pytest.mark.parametrize(("mu", "sigma"), [(0.0, 1.0), (-0.5, 0.3), (1.0, 2.0)])
def test_the_moments(mu: float, sigma: float):
    """Equations 23 and 28 hold, by integration."""
    x = mu + sigma * torch.linspace(-14, 14, 20_001, dtype=torch.float64)
    density = torch.exp(torch.distributions.Normal(mu, sigma).log_prob(x))
    moment = math.exp(mu + sigma**2 / 2)
    assert float(torch.trapezoid(x.exp() * density, x)) == pytest.approx(moment)
    assert float(torch.trapezoid(x * x.exp() * density, x)) == pytest.approx((mu + sigma**2) * moment)


@pytest.mark.parametrize("d", [16, 64, 128])
def test_equation_8_forgets_the_scale(d: int):
    """Erratum: with Equation 1's 1/√d the variance of a logit is 1, so ``log i - 1/2``; ``- d/2`` is below 0."""
    logits = ahakv.random_logits(400, d, 300, draw(d))
    assert float(logits.var()) == pytest.approx(1.0, abs=0.1)
    found = float(ahakv.entropy(logits).mean())
    assert found == pytest.approx(ahakv.expected_entropy(400, 1.0), abs=0.06)
    assert ahakv.expected_entropy(400, float(d)) < 0 <= float(ahakv.entropy(math.sqrt(d) * logits).amin())


MEANS = [(1.0, 64, 3.684), (1.0, 512, 5.741), (2.0, 512, 5.258), (4.0, 512, 4.38), (8.0, 512, 3.17)]


@pytest.mark.parametrize(("variance", "i", "mean"), MEANS)
def test_expected_entropy_and_its_limit(variance: float, i: int, mean: float):
    """``log i - σ²/2`` is too low, by about the next term of the expansion while ``e^{σ²}`` is far below ``i``."""
    found = ahakv.mean_entropy(i, variance, 1500, draw(0))
    assert found == pytest.approx(mean, abs=0.05)
    gap = found - ahakv.expected_entropy(i, variance)
    if math.exp(variance) < i / 20:
        assert abs(gap - ahakv.entropy_correction(i, variance)) < 0.02
    else:
        assert gap > 0.1
        assert ahakv.entropy_correction(i, variance) > 0.3


def test_the_expected_entropy_turns_negative():
    """At ``σ² = 2 log i`` it is 0, and below beyond that, where no entropy can be."""
    assert ahakv.expected_entropy(100, 2 * math.log(100)) == pytest.approx(0.0)
    assert ahakv.expected_entropy(100, 128.0) < 0 < ahakv.mean_entropy(100, 128.0, 50, draw(0))


# -- the gain ----------------------------------------------------------------------------------------------------------


def test_sg_softmax_lost_its_exponential():
    """Equation 9 (erratum): ``λx / Σ e^{λx}`` has negative entries; with the exponential it is a softmax of ``λx``."""
    x, lam = [0.3, -1.2, 2.0, 0.7], 1.7
    whole = sum(math.exp(lam * value) for value in x)
    printed = [lam * value / whole for value in x]
    assert min(printed) < 0
    assert sum(printed) < 0.9
    p = dict(enumerate(softmax(x)))
    assert list(sg_softmax(p, lam).values()) == pytest.approx(softmax([lam * value for value in x]))
    assert list(sg_softmax(p, 0.0).values()) == pytest.approx([0.25] * 4)


@pytest.mark.parametrize(
    ("i", "k", "over"), [(4096, 720, 0.02), (8192, 1000, 0.02), (1024, 512, 0.0), (4096, 64, 0.47)]
)
def test_the_gain_aims_at_log_k(i: int, k: int, over: float):
    """Mean entropy under the gain minus ``log k``: near 0 at the paper's ratios, well above it when k is small."""
    assert ahakv.expected_entropy(i, gain(i, k) ** 2) == pytest.approx(math.log(k))
    found = ahakv.mean_entropy(i, gain(i, k) ** 2, 300, draw(0))
    assert found - math.log(k) == pytest.approx(over, abs=0.08)


def test_algorithm_1_scales_twice():
    """Lines 6 and 8 to the letter (erratum): λ of Equation 12 on logits that are divided by √d already is a gain of
    0.16, nearly uniform; once, it is 1.79, and the entropy is ``log B``."""
    i, k, d = 3600, 720, 128
    assert ahakv.printed_scale(i, k, d) == pytest.approx(0.16, abs=5e-3)
    assert ahakv.printed_scale(i, k, d) * math.sqrt(d) == pytest.approx(gain(i, k))
    assert gain(i, k) == pytest.approx(1.79, abs=5e-3)
    logits = ahakv.random_logits(i, d, 40, draw(0))
    literal = float(ahakv.entropy(ahakv.printed_scale(i, k, d) * logits).mean())
    meant = float(ahakv.entropy(gain(i, k) * logits).mean())
    assert math.log(i) - 0.05 < literal < math.log(i)
    assert meant == pytest.approx(math.log(k), abs=0.15)


def test_the_gain_at_small_ratios():
    """Equation 12 has no value below ``i = k`` and flattens below ``i / k = √e``; kvkeep's gain is at least 1."""
    with pytest.raises(ValueError, match="math domain"):
        ahakv.printed_scale(99, 100, 64)
    assert gain(100, 100, clamp=False) == gain(1, 100, clamp=False) == 0.0
    assert 0.9 < gain(160, 100, clamp=False) < 1.0
    assert gain(160, 100) == gain(100, 100) == gain(1, 100) == 1.0
    assert gain(16487, 10000) == pytest.approx(1.0, abs=1e-4)
    assert gain(16490, 10000) > 1.0


def test_the_size_of_a_cache():
    """Section 1: LLaMA-2-7B, batch 8, 32K tokens, float16: 128 GiB."""
    assert 8 * full_bytes([LayerShape(32, 128, 128)] * 32, 32768, 2) == 128 * 2**30
