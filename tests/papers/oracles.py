"""Every policy as its own plain rule, written from the papers, each with its source.

The rules are slow and literal on purpose: dictionaries by position, explicit buffers, Python integers.
"""

from __future__ import annotations

from .loops import Rule
from .rules_expected import ExpectedAttention
from .rules_keys import KeyDiff, KNorm
from .rules_leverage import Blend, Leverage
from .rules_mass import H2O, TOVA, H2OAvg, TopK
from .rules_prompt import NACL, AdaKV, DefensiveKV, ReSTKV, SnapKV
from .rules_random import Random
from .rules_reread import Reread
from .rules_rounds import RKV, TriAttention, VaSE
from .rules_scissorhands import Scissorhands, ScissorhandsRelease
from .rules_softmax import AhaKV, Keyformer
from .rules_sparse import SparseFixed, SparseStrided
from .rules_window import Full, Local, StreamingLLM

RULES: dict[str, type[Rule]] = {
    "adakv": AdaKV,
    "ahakv": AhaKV,
    "blend": Blend,
    "defensivekv": DefensiveKV,
    "expected_attention": ExpectedAttention,
    "full": Full,
    "h2o": H2O,
    "h2o_avg": H2OAvg,
    "keydiff": KeyDiff,
    "keyformer": Keyformer,
    "knorm": KNorm,
    "leverage": Leverage,
    "local": Local,
    "nacl": NACL,
    "pyramidkv": SnapKV,  # within one layer; the layers differ in their budgets (policies.md §8)
    "random": Random,
    "reread": Reread,
    "restkv": ReSTKV,
    "rkv": RKV,
    "scissorhands": Scissorhands,
    "scissorhands_release": ScissorhandsRelease,
    "snapkv": SnapKV,
    "sparse_fixed": SparseFixed,
    "sparse_strided": SparseStrided,
    "streaming_llm": StreamingLLM,
    "topk": TopK,
    "tova": TOVA,
    "triattention": TriAttention,
    "vase": VaSE,
}


def rule(text: str, budget: int, heads: int, **identity: int) -> Rule:
    """Build the rule that a policy string such as ``h2o:recent=3`` names, without the package's registry."""
    name, _, tail = text.partition(":")
    options = dict(item.split("=") for item in tail.split(",") if item)
    return RULES[name](budget, heads, **{key: _value(value) for key, value in options.items()}, **identity)


def _value(text: str) -> int | float | bool | str | None:
    """An option's text as a Python value: ``none``, true or false, a whole number, a number, or a choice."""
    words = {"none": None, "true": True, "false": False}
    if text in words:
        return words[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
