"""H2O's claims about its Algorithms 1 and 2, persisting sparsity (App. D.16) and the size of a cache."""

from __future__ import annotations

import math
import random

from kvkeep.planning import cost
from kvkeep.research.theory.claim import Claim, Outcome, judge
from kvkeep.research.theory.h2o import (
    CONCAVE,
    algorithm_1_literal,
    algorithm_2_literal,
    h2_eviction,
    row_of_algorithm_2,
)
from kvkeep.research.theory.loops import Vector, softmax
from kvkeep.research.theory.sparsity import goodness

TINY = 1e-12


def gauss(n: int, d: int, seed: int, *, scale: float = 1.0) -> list[Vector]:
    """Random vectors with normal components."""
    noise = random.Random(seed)
    return [[noise.gauss(0.0, scale) for _ in range(d)] for _ in range(n)]


# -- the algorithms ----------------------------------------------------------------------------------------------------


def _with_a_sink(seed: int) -> tuple[list[Vector], list[Vector]]:
    return [[1.0]] * 40, [[5.0], *gauss(39, 1, seed, scale=2.0)]


def _algorithm_1() -> Outcome:
    entered = {"printed": 0, "meant": 0}
    for seed in range(5):
        Q, K = _with_a_sink(seed)
        for name, sets in (("printed", algorithm_1_literal(Q, K, 6)), ("meant", h2_eviction(Q, K, 6))):
            entered[name] += sum(i in S for i, S in enumerate(sets) if i >= 6)
    by = "of 170 tokens that meet a full cache {printed} get in; {meant} if a row is over S ∪ {{i}}".format(**entered)
    return judge(by, printed=entered["printed"] > 0, corrected=entered["meant"] > 0)


def _rows() -> Outcome:
    worst = right = 0.0
    for seed in range(10):
        Q, K = gauss(20, 4, seed), gauss(20, 4, seed + 100)
        S = sorted(random.Random(seed).sample(range(19), 5))
        row = row_of_algorithm_2(Q, K, S, 19)
        worst = max(worst, math.fsum(row))
        right = max(right, abs(math.fsum(row[s] for s in S) - 1.0))
    by = f"printed rows sum to as much as {worst:.2f}; to 1 within {right:.0e} over S alone"
    return judge(by, printed=worst <= 1.0 + TINY, corrected=right <= TINY)


def _new_token() -> Outcome:
    """Whether the key of the newest token has a part in what becomes of it."""
    moved = {"printed": 0, "meant": 0}
    for seed in range(30):
        Q, K = _with_a_sink(seed)
        other = [*K[:-1], [7.0]], [*K[:-1], [-7.0]]
        for name, algorithm in (("printed", algorithm_2_literal), ("meant", h2_eviction)):
            high, low = ([*algorithm(Q, keys, 6)][-1] for keys in other)
            moved[name] += high != low
    by = "a loud or a silent key changes {printed} of 30 printed decisions, {meant} with a row over S ∪ {{i}}".format(
        **moved
    )
    return judge(by, printed=moved["printed"] > 0, corrected=moved["meant"] > 0)


def _accumulation() -> Outcome:
    """The row sums of Algorithm 2 leave out all rows before the cache is full."""
    K, Q = [[3.0], [0.0], [1.0]], [[1.0], [1.0], [-1.0]]
    received = 1.0 + softmax([3.0, 0.0])[0]
    printed, meant = (list(algorithm(Q, K, 2))[-1] for algorithm in (algorithm_2_literal, h2_eviction))
    by = f"token 0 of 3 has received {received:.2f} when the cache is full; printed, {printed} stay, meant, {meant}"
    return judge(by, printed=0 in printed, corrected=0 in meant)


def _any_h() -> Outcome:
    differ = total = 0
    for seed in range(5):
        Q, K = gauss(40, 4, seed, scale=2.0), gauss(40, 4, seed + 50)
        z, *others = (list(h2_eviction(Q, K, 6, h=h)) for h in CONCAVE.values())
        total += 2 * len(z)
        differ += sum(a != b for other in others for a, b in zip(z, other, strict=True))
    return judge(f"{differ} of {total} sets differ between z, √(z+1) and log(z+1)", printed=differ == 0)


# -- sparsity, and a number --------------------------------------------------------------------------------------------


def _sparsity() -> Outcome:
    n, k, alpha = 3, 4, 0.5

    def union(each: int) -> int:
        extras = [set(range(k + each * row, k + each * (row + 1))) for row in range(n)]
        rows = [[float(j < k or j in extra) for j in range(k + each * n)] for extra in extras]
        return len(goodness(rows, 0.5).union)

    printed, meant = union(int(alpha * k * n)), union(int(alpha * k))
    by = f"αkn = {alpha * k * n:.0f}: rows with αkn extras have {printed} together, rows with αk have {meant}"
    return judge(by, printed=printed <= alpha * k * n, corrected=meant <= alpha * k * n)


def _opt_30b() -> Outcome:
    size = 128 * cost.full_bytes((cost.LayerShape(56, 128, 128),) * 48, 1024, 2)
    return judge(f"{size / 1e9:.1f} GB", printed=round(size / 1e10) == 18)


_RUNS = "tests/research/test_h2o.py::"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "h2o-algorithm-1",
        "H2O, Algorithm 1, lines 8, 9",
        "A new token competes with the kept ones by its attention.",
        f"{_RUNS}test_line_9_freezes_the_first_tokens",
        _algorithm_1,
    ),
    Claim(
        "h2o-rows",
        "H2O, Algorithm 2, line 8; Definition D.10",
        "o_i is the normalised attention over the kept tokens.",
        f"{_RUNS}test_rows_are_no_probabilities",
        _rows,
    ),
    Claim(
        "h2o-new-token",
        "H2O, Algorithm 2, lines 8 to 11",
        "Whether a new token stays depends on the attention it receives.",
        f"{_RUNS}test_the_new_key_has_no_part",
        _new_token,
    ),
    Claim(
        "h2o-accumulation",
        "H2O, Algorithm 2, line 9; Remark D.15",
        "õ_i is the attention that each token has received so far.",
        f"{_RUNS}test_rows_before_the_cache_is_full_are_lost",
        _accumulation,
    ),
    Claim(
        "h2o-any-h",
        "H2O, Remark D.14",
        "Every rising h in the score function evicts the same tokens.",
        f"{_RUNS}test_no_choice_of_h_changes_what_goes",
        _any_h,
    ),
    Claim(
        "h2o-claim-d34",
        "H2O, Claim D.34 and its proof",
        "In (α, τ, k)-good rows the supports have at most αkn tokens outside of the core together.",
        "tests/research/test_sparsity.py::test_the_bound_for_one_row",
        _sparsity,
    ),
    Claim(
        "h2o-cache-size",
        "H2O, Section 1",
        "OPT-30B at batch 128 and 1024 tokens has a cache of 180 GB.",
        "tests/planning/test_cost.py::test_h2o_180_gb",
        _opt_30b,
    ),
)
