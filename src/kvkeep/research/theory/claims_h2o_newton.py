"""H2O's claims about Newton's method on its regression, Algorithm 4 (App. D.22)."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from kvkeep.research.theory.claim import Claim, Outcome, judge
from kvkeep.research.theory.claims_h2o_regression import ENOUGH, point
from kvkeep.research.theory.newton import algorithm_4, errors, minimum, subsample, weights_alone
from kvkeep.research.theory.regression import SoftmaxRegression, draw


def _start() -> tuple[SoftmaxRegression, Tensor, Tensor]:
    """A problem, its minimum and a point at a distance of 0.3."""
    problem = draw(12, 3, radius=1.0, least=ENOUGH, seed=0)
    best = minimum(problem)
    return problem, best, best + 0.3 * point(3, 0)


def _sign() -> Outcome:
    problem, best, x = _start()
    up, down = (errors(algorithm_4(problem, x, sign=sign), best, 3) for sign in (1, -1))
    by = f"from 0.3 to {up[-1]:.2f} in 3 steps; with a minus to {down[-1]:.0e}"
    return judge(by, printed=up[-1] < 0.3, corrected=down[-1] < 0.3)


def _iterations() -> Outcome:
    problem = draw(900, 3, radius=1.0, least=ENOUGH, seed=3)
    best = minimum(problem)
    x, epsilon, reached = best + 0.3 * point(3, 0), 1e-6, 0
    steps = math.floor(math.log(0.3 / epsilon)) + 1
    noise, used = torch.Generator().manual_seed(0), []

    def sample(D: Tensor) -> Tensor:
        sampled = subsample(D, problem.A, 0.25, 0.1, noise)
        used.append(int((sampled > 0).sum()))
        return sampled

    for _ in range(10):
        reached += errors(algorithm_4(problem, x, sample=sample), best, steps)[-1] <= epsilon
    by = f"{reached} of 10 runs reach 1e-06 within {steps} steps, with up to {max(used)} of {len(problem.b)} rows"
    return judge(by, printed=reached >= 9)


def _ninth() -> Outcome:
    problem, best, x = _start()
    path = [0.3, *errors(algorithm_4(problem, x, curvature=weights_alone), best, 3)]
    left = max(after / before for before, after in itertools.pairwise(path))
    return judge(f"a step leaves at most {left:.1%} of the error, allowed is 1/9", printed=left <= 1.0 / 9.0)


def _epsilon_1() -> Outcome:
    """The worst that an inner matrix within ``1 ± ε_1`` can be is ``1 - ε_1`` of the right one."""
    problem, best, x = _start()

    def factor(epsilon: float) -> float:
        path = errors(algorithm_4(problem, x, sample=lambda D: (1.0 - epsilon) * D), best, 3)
        return path[2] / path[1]

    wide, narrow = factor(0.6), factor(1.0 / (1.0 + math.e))
    by = f"with 0.6 a step leaves {wide:.2f} of the error, with 1/(1+e) {narrow:.3f}; asked for is 1/e"
    return judge(by, printed=wide <= 1.0 / math.e, corrected=narrow <= 1.01 / math.e)


_STEPS = "tests/research/test_newton.py::"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "h2o-algorithm-4",
        "H2O, Algorithm 4, line 9",
        "x + H^(-1)g is a step to the minimum.",
        f"{_STEPS}test_the_printed_plus_doubles_the_error",
        _sign,
    ),
    Claim(
        "h2o-theorem-d49",
        "H2O, Theorem D.49",
        "log(‖x_0 - x*‖/ε) steps with sampled rows end within ε, with probability 1 - δ.",
        f"{_STEPS}test_the_iterations_of_theorem_d49",
        _iterations,
    ),
    Claim(
        "h2o-weights-alone",
        "H2O, Lemma D.47, Part 2, in Algorithm 4",
        "A step with W² alone leaves at most a ninth of the error.",
        f"{_STEPS}test_the_weights_alone_contract",
        _ninth,
    ),
    Claim(
        "h2o-epsilon-1",
        "H2O, Algorithm 4, line 6",
        "Any constant ε_1 is small enough for that number of steps.",
        f"{_STEPS}test_epsilon_1_has_to_be_small",
        _epsilon_1,
    ),
)
