"""The claims as data: each has a test, each check gives the verdict that the project's notes on the papers give."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvkeep_lab.theory import CLAIMS
from kvkeep_lab.theory.claim import ClaimOutcome, judge

ROOT = Path(__file__).parents[3]

HOLDS, CORRECTED, FAILS = "holds", "holds with a correction", "fails"

EXPECTED = {
    # observables D, policies 4: the theory of H2O
    "h2o-algorithm-1": (CORRECTED, "policies 4.1: 1"),
    "h2o-rows": (CORRECTED, "policies 4.1: 2"),
    "h2o-new-token": (CORRECTED, "policies 4.1: 2"),
    "h2o-accumulation": (CORRECTED, "policies 4.1: 3"),
    "h2o-any-h": (HOLDS, "policies 4.2"),
    "h2o-score-function": (HOLDS, "observables D1"),
    "h2o-definition-d1": (HOLDS, "observables D1"),
    "h2o-examples": (HOLDS, "observables D1"),
    "h2o-remark-d5": (HOLDS, "observables D1"),
    "h2o-attention-scheme": (CORRECTED, "found here"),
    "h2o-theorem-d17": (HOLDS, "observables D2"),
    "h2o-corollary-d18": (HOLDS, "observables D2"),
    "h2o-lemma-d19": (HOLDS, "found here"),
    "h2o-claim-d34": (CORRECTED, "observables D4: αkn for αk"),
    "h2o-cache-size": (HOLDS, "observables A13"),
    "h2o-lemma-d29": (HOLDS, "observables D3, with γ the right way round"),
    "h2o-definition-d28": (CORRECTED, "observables D3: opt_{i-1} for opt_{i+1}"),
    "h2o-lemma-d29-step-1": (CORRECTED, "observables D3: not monotonicity"),
    "h2o-lemma-d29-line-3": (CORRECTED, "observables D3: the stray term"),
    "h2o-lemma-d30": (CORRECTED, "found here: f̃ from below"),
    "h2o-theorem-d32": (HOLDS, "observables D3"),
    "h2o-mild-assumption": (FAILS, "observables D3: θ̂ is far from α/10n"),
    "h2o-definition-d38": (CORRECTED, "observables D3: refers to itself"),
    "h2o-lemma-d44": (HOLDS, "observables D5"),
    "h2o-lemma-d44-part-5": (CORRECTED, "observables D5: sign"),
    "h2o-lemmas-d45-d46": (HOLDS, "observables D5"),
    "h2o-hessian": (HOLDS, "observables D5"),
    "h2o-lemma-d47-part-1": (CORRECTED, "found here: no bound on b"),
    "h2o-lemma-d47-part-2": (CORRECTED, "found here: no bound on b"),
    "h2o-lemma-d48-u": (HOLDS, "observables D5"),
    "h2o-lemma-d48": (HOLDS, "observables D5"),
    "h2o-algorithm-4": (CORRECTED, "observables D6: sign"),
    "h2o-theorem-d49": (HOLDS, "observables D6"),
    "h2o-weights-alone": (HOLDS, "observables D6: about 1/9"),
    "h2o-epsilon-1": (CORRECTED, "found here"),
    # observables E and B, policies 5: the errata of Scissorhands
    "scissorhands-recent-window": (CORRECTED, "policies 5.2: the slice"),
    "scissorhands-absolute-value": (CORRECTED, "observables E2: absolute value missing"),
    "scissorhands-middle-term": (CORRECTED, "observables E2: x_j for x_ℓ"),
    "scissorhands-lemma-b1": (HOLDS, "observables E2"),
    "scissorhands-lemma-b2": (HOLDS, "observables E2"),
    "scissorhands-lemma-b3": (CORRECTED, "observables E3: printed with the last token only"),
    "scissorhands-lemma-b4": (CORRECTED, "observables E3: the factor 2"),
    "scissorhands-twice-the-mass": (HOLDS, "observables E3: exact identity"),
    "scissorhands-lemma-b5": (HOLDS, "observables E3"),
    "scissorhands-recursion": (HOLDS, "observables E4: (a)"),
    "scissorhands-twice-the-largest": (HOLDS, "observables E4: (b)"),
    "scissorhands-unit-tokens": (FAILS, "found here"),
    "scissorhands-dropped-mass": (HOLDS, "observables E4: M(q), and the preceding line is right"),
    "scissorhands-equation-11": (CORRECTED, "observables E4: the last step needs q ≥ 1/2"),
    "scissorhands-theorem-4-1": (FAILS, "observables E4: negative under strong compression"),
    "scissorhands-bracket": (HOLDS, "observables E4: below one, and negative"),
    "scissorhands-delta": (FAILS, "observables E4: claimed ≤, used as ≥"),
    "scissorhands-delta-form": (CORRECTED, "found here"),
    "scissorhands-probability": (CORRECTED, "found here; observables E4: mostly vacuous"),
    "scissorhands-similarity": (CORRECTED, "observables B4: mass, not cosine"),
    "scissorhands-kv-table": (CORRECTED, "observables B7: BLOOM"),
    # observables F, policies 6: AhaKV
    "ahakv-positional-bias": (HOLDS, "observables F1"),
    "ahakv-recent-accumulation": (CORRECTED, "policies 6.5: r + 1 rows"),
    "ahakv-entropy-identity": (CORRECTED, "found here"),
    "ahakv-moments": (HOLDS, "observables F2"),
    "ahakv-entropy-of-attention": (CORRECTED, "observables F2: log i - 1/2"),
    "ahakv-expected-entropy": (CORRECTED, "observables F2: for σ² well below 2 log i"),
    "ahakv-sg-softmax": (CORRECTED, "policies 6.1: the lost exponential"),
    "ahakv-gain": (HOLDS, "observables F3"),
    "ahakv-twice-scaled": (CORRECTED, "policies 6.2: 1/√d twice"),
    "ahakv-small-ratios": (CORRECTED, "policies 6.3: i ≤ k and small ratios"),
    "ahakv-line-11": (CORRECTED, "policies 6.5: F_s for F̂_s"),
    "ahakv-cache-size": (HOLDS, "observables C6"),
}
"""Claim → its verdict, and where the verdict comes from."""


def test_every_claim_is_expected_once():
    names = [claim.name for claim in CLAIMS]
    assert len(names) == len(set(names))
    assert set(names) == set(EXPECTED)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_the_check_gives_the_verdict(claim):
    outcome = claim.check()
    verdict, source = EXPECTED[claim.name]
    assert outcome.verdict == verdict, f"{source}: {outcome.by}"
    assert any(character.isdigit() for character in outcome.by)
    assert len(outcome.by) <= 160
    assert claim.check() == outcome


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_the_test_of_a_claim_exists(claim):
    path, _, name = claim.test.partition("::")
    functions = [node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in functions
    assert len(f"pytest {claim.test}") <= 80


@pytest.mark.parametrize(
    ("printed", "corrected", "verdict"),
    [(True, False, HOLDS), (True, True, HOLDS), (False, True, CORRECTED), (False, False, FAILS)],
)
def test_judge(printed, corrected, verdict):
    assert judge("by 1", printed=printed, corrected=corrected) == ClaimOutcome(verdict, "by 1")
