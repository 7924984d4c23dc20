"""The claims of AhaKV (Gu et al.), in the order of the paper; checks run in float64 from a fixed seed."""

from __future__ import annotations

import math

import torch

from kvkeep.planning.cost import LayerShape, full_bytes
from kvkeep_lab.theory import ahakv
from kvkeep_lab.theory.ahakv import gain, prefill_scores, sg_softmax, top_k
from kvkeep_lab.theory.claim import Claim, ClaimOutcome, claim, judge
from kvkeep_lab.theory.loops import attend, total

_TESTS = "lab/tests/theory/test_ahakv.py::test_"


def generator() -> torch.Generator:
    """Return a generator with the fixed seed of all checks."""
    return torch.Generator().manual_seed(0)


def _standard_errors(drawn: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest distance, in standard errors, of the mean over draws (the first axis) from the expectation."""
    error = drawn.std(dim=0) / math.sqrt(drawn.shape[0])
    return float(((drawn.mean(dim=0) - expected).abs() / error).amax())


@claim("ahakv-positional-bias", "AhaKV, Equation 4", f"{_TESTS}accumulated_mass_falls")
def _bias() -> ClaimOutcome:
    """Under exchangeable logits E[S_j] = H_n - H_(j-1): accumulated attention falls by E[a_jj] = 1/j."""
    n = 32
    mass = ahakv.random_attention(n, 8, 1000, generator()).sum(dim=1)
    expected = ahakv.expected_mass(n)
    off = _standard_errors(mass, expected)
    return judge(
        f"from {expected[0]:.2f} for the first of {n} tokens to {expected[-1]:.2f}; 1000 draws agree to {off:.1f} "
        "standard errors",
        printed=off < 4,
    )


def recent_rows(attention: torch.Tensor, r: int, *, printed: bool) -> torch.Tensor:
    """Return the rows that Equation 5 sums: ``n - r … n`` as printed, which are ``r + 1``, or the ``r`` newest."""
    n = attention.shape[-1]
    return attention[..., n - r - int(printed) :, :]


@claim("ahakv-recent-accumulation", "AhaKV, Equation 5", f"{_TESTS}recent_accumulation_is_flat")
def _recent() -> ClaimOutcome:
    """Summing rows n-r … n, the nearest r, gives every token the same expectation."""
    n, r = 32, 8
    attention = ahakv.random_attention(n, 8, 1000, generator())
    expected = ahakv.expected_mass(n, rows=r)
    off = _standard_errors(recent_rows(attention, r, printed=False).sum(dim=1), expected)
    rows = recent_rows(attention, r, printed=True).shape[1]
    older = expected[: n - r + 1]
    return judge(
        f"these are {rows} rows for r = {r}; over {r} it is {older[0]:.3f} for every token before the window and falls "
        f"inside it ({off:.1f} standard errors)",
        printed=rows == r,
        corrected=off < 4 and bool((older == older[0]).all()),
    )


@claim("ahakv-entropy-identity", "AhaKV, Equation 7", f"{_TESTS}the_entropy_of_a_row")
def _identity() -> ClaimOutcome:
    """H_i = log Σ_{j≤i} e^w - Σ_{j≤i-1} w e^w / Σ_{j≤i-1} e^w."""
    w = torch.randn(20, generator=generator(), dtype=torch.float64)
    p = w.softmax(dim=0)
    entropy = float(-(p * p.log()).sum())
    e = w.exp()
    printed = float(e.sum().log() - (e * w)[:-1].sum() / e[:-1].sum())
    return judge(
        f"with sums of different length off by {abs(printed - entropy):.3f} in a row of 20; with equal ones exact",
        printed=abs(printed - entropy) < 1e-12,
        corrected=abs(float(ahakv.entropy(w)) - entropy) < 1e-12,
    )


@claim("ahakv-moments", "AhaKV, Equations 23 and 28", f"{_TESTS}the_moments")
def _moments() -> ClaimOutcome:
    """For normal x, E[e^x] = e^(μ+σ²/2) and E[x e^x] = (μ+σ²) e^(μ+σ²/2)."""
    # The trapezoid rule over 12 standard deviations is exact to rounding.
    mu, sigma = 0.3, 1.2
    x = mu + sigma * torch.linspace(-12, 12, 4001, dtype=torch.float64)
    density = (-((x - mu) ** 2) / (2 * sigma**2)).exp() / (sigma * math.sqrt(2 * math.pi))
    first = float(torch.trapezoid(x.exp() * density, x)) / math.exp(mu + sigma**2 / 2)
    second = float(torch.trapezoid(x * x.exp() * density, x)) / ((mu + sigma**2) * math.exp(mu + sigma**2 / 2))
    off = max(abs(first - 1), abs(second - 1))
    return judge(f"integrals agree to {off:.0e}", printed=off < 1e-9)


@claim("ahakv-entropy-of-attention", "AhaKV, Equation 8", f"{_TESTS}equation_8_forgets_the_scale")
def _equation_8() -> ClaimOutcome:
    """The attention of Equation 1 has expected entropy log i - d/2."""
    i, d = 512, 64
    logits = ahakv.random_logits(i, d, 200, generator())
    found = float(ahakv.entropy(logits).mean())
    printed, corrected = math.log(i) - d / 2, ahakv.expected_entropy(i, 1.0)
    return judge(
        f"i = 512, d = 64: entropy {found:.2f}, printed {printed:.2f}; logits divided by √d have variance 1, and "
        f"log i - 1/2 is {corrected:.2f}",
        printed=abs(found - printed) < 0.1,
        corrected=abs(found - corrected) < 0.1,
    )


@claim("ahakv-expected-entropy", "AhaKV, Equations 8 and 10", f"{_TESTS}expected_entropy_and_its_limit")
def _entropy() -> ClaimOutcome:
    """Rows of i normal logits of variance σ² have expected entropy log i - σ²/2."""
    g = generator()
    near = {i: ahakv.mean_entropy(i, 1.0, 400, g) - ahakv.expected_entropy(i, 1.0) for i in (64, 512)}
    far = ahakv.mean_entropy(512, 8.0, 400, g) - ahakv.expected_entropy(512, 8.0)
    return judge(
        f"σ² = 1: above by {near[64]:.3f} at i = 64, {near[512]:.3f} at 512; while e^σ² is far below i: at σ² = 8, "
        f"i = 512 it is {far:.2f} too low",
        printed=False,
        corrected=all(abs(gap) < 0.05 for gap in near.values()) and far > 0.5,
    )


@claim("ahakv-sg-softmax", "AhaKV, Equation 9", f"{_TESTS}sg_softmax_lost_its_exponential")
def _sg_softmax() -> ClaimOutcome:
    """SG-softmax λx / Σ e^(λx) is a distribution."""
    x = torch.randn(10, generator=generator(), dtype=torch.float64)
    lam = 1.7
    printed = float((lam * x / (lam * x).exp().sum()).sum())
    p = {j: float(value) for j, value in enumerate(x.softmax(dim=0))}
    right = sum(sg_softmax(p, lam).values())
    return judge(
        f"the printed row adds up to {printed:.2f}; with e^(λx) above as well to {right:.2f}",
        printed=abs(printed - 1) < 1e-12,
        corrected=abs(right - 1) < 1e-12,
    )


@claim("ahakv-gain", "AhaKV, Equations 11 and 12", f"{_TESTS}the_gain_aims_at_log_k")
def _gain() -> ClaimOutcome:
    """λ√d = √(2 log(i/k)) brings the expected entropy to log k."""
    g = generator()
    gaps = [
        ahakv.mean_entropy(i, gain(i, k) ** 2, 300, g) - math.log(k) for i, k in ((4096, 720), (8192, 1000), (4096, 64))
    ]
    return judge(
        f"entropy minus log k: {gaps[0]:+.2f} at i/k = 4096/720, {gaps[1]:+.2f} at 8192/1000 (ratios as in the paper); "
        f"{gaps[2]:+.2f} at 4096/64",
        printed=abs(gaps[0]) < 0.1 and abs(gaps[1]) < 0.1,
    )


@claim("ahakv-twice-scaled", "AhaKV, Algorithm 1, lines 6 and 8", f"{_TESTS}algorithm_1_scales_twice")
def _twice_scaled() -> ClaimOutcome:
    """SG-softmax with λ of Equation 12 on logits already divided by √d brings the entropy to log B."""
    i, k, d = 3600, 720, 128
    g = generator()
    literal = ahakv.printed_scale(i, k, d)
    flat = ahakv.mean_entropy(i, literal**2, 100, g)
    meant = ahakv.mean_entropy(i, gain(i, k) ** 2, 100, g)
    return judge(
        f"n 3600, B 720, d 128: gain {literal:.2f}, entropy {flat:.2f} (uniform: {math.log(i):.2f}); with 1/√d once "
        f"{gain(i, k):.2f} and {meant:.2f}, log B is {math.log(k):.2f}",
        printed=abs(flat - math.log(k)) < 0.1,
        corrected=abs(meant - math.log(k)) < 0.1,
    )


@claim("ahakv-small-ratios", "AhaKV, Equation 12", f"{_TESTS}the_gain_at_small_ratios")
def _small_ratios() -> ClaimOutcome:
    """λ = √(2 log(i/k)/d) sharpens attention for any number i of tokens."""
    k = 100
    undefined = math.log(50 / k) < 0
    below, at = gain(160, k, clamp=False), math.exp(0.5) * k
    clamped = min(gain(i, k) for i in range(1, 500))
    return judge(
        f"no root for i < k, and a gain below 1 up to i/k = √e (at 1.6: {below:.2f}): flatter; with at least 1 it is "
        "defined everywhere",
        printed=not undefined and below >= 1,
        corrected=clamped >= 1 and gain(int(at) + 1, k) > 1,
    )


@claim("ahakv-line-11", "AhaKV, Algorithm 1, line 11", f"{_TESTS}line_11_wastes_slots")
def _line_11() -> ClaimOutcome:
    """TopK(F_s, B_s) beside the B_r recent tokens fills the budget by refined scores."""
    n, B, B_r = 40, 12, 6
    g = generator()
    q, k, v = (torch.randn(n, 8, generator=g, dtype=torch.float64).tolist() for _ in range(3))
    rows = [attend(q[i], k, range(i + 1), 1.0) for i in range(n)]
    F = total(sg_softmax(row, gain(n, B)) for row in rows[-B_r:])
    best = sorted(F, key=F.__getitem__, reverse=True)[: B - B_r]
    printed = {*best, *range(n - B_r, n)}
    kept = top_k(prefill_scores(rows, v, B=B, B_r=B_r), range(n), B=B, B_r=B_r)
    return judge(
        f"TopK(F_s) over all tokens fills {len(printed)} of {B} slots and ignores the values; TopK(F̂_s) over the older "
        f"ones fills {len(kept)}",
        printed=len(printed) == B,
        corrected=len(kept) == B,
    )


@claim("ahakv-cache-size", "AhaKV, Section 1", f"{_TESTS}the_size_of_a_cache")
def _cache_size() -> ClaimOutcome:
    """LLaMA-2-7B at batch 8 and 32K tokens has a KV cache of 128 GB."""
    gib = 8 * full_bytes([LayerShape(32, 128, 128)] * 32, 32768, 2) / 2**30
    return judge(f"{gib:.0f} GiB", printed=gib == 128)


CLAIMS: tuple[Claim, ...] = (
    _bias,
    _recent,
    _identity,
    _moments,
    _equation_8,
    _entropy,
    _sg_softmax,
    _gain,
    _twice_scaled,
    _small_ratios,
    _line_11,
    _cache_size,
)
