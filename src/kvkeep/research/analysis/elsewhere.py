"""Claims of the papers that one pass over one text cannot check, and where this project looks at them."""

from __future__ import annotations

from kvkeep.research.analysis.measure import Claim


def _line(text: str, source: str, paper: str, where: str) -> Claim:
    return Claim(text, source, paper, f"not measured here: {where}", "cannot tell")


ELSEWHERE = (
    _line(
        "Eviction works together with 4-bit quantisation",
        "H2O, Table 6; Scissorhands, Table 4",
        "both together are no worse than either",
        "slots are kept in the model's dtype",
    ),
    _line(
        "Streams far beyond the trained length",
        "H2O, Figure 5",
        "perplexity stays low over millions of tokens",
        "python bench/stream.py",
    ),
    _line(
        "More tokens per second",
        "H2O, Tables 3 to 5; AhaKV, Figure 8",
        "up to 3 times FlexGen's; up to 1.9 times lower latency",
        "python bench/throughput.py",
    ),
    _line(
        "Accuracy on few-shot tasks and long texts",
        "H2O, Figure 4; Scissorhands, Figure 3; AhaKV, Table 1",
        "kept at 20 % (H2O), 15 to 30 % (Scissorhands), with 1000 tokens (AhaKV)",
        "kvkeep eval, with tasks of this model's size",
    ),
    _line(
        "The theorems",
        "H2O, section 4; Scissorhands, Theorems 3.1 and 4.1; AhaKV, section 3",
        "proved",
        "kvkeep theory",
    ),
)
