"""What `SamplingParams` takes: numbers of every kind inside their ranges, and nothing else."""

import json
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest
import torch

from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError

pytestmark = pytest.mark.usefixtures("no_checked_annotations")

HOT = {"temperature": 1.0}


WRONG = [
    ({"max_new_tokens": "5"}, "'5' is not a whole number"),
    ({"max_new_tokens": True}, "True is not a whole number"),
    ({"max_new_tokens": 5.0}, "5.0 is not a whole number"),
    ({"max_new_tokens": None}, "None is not a whole number"),
    ({"max_new_tokens": 0}, "0 asks for no token"),
    ({"max_new_tokens": -(10**5000)}, "thousands of digits asks for no token"),
    ({"max_new_tokens": 2**31}, "larger than 2147483647"),
    ({"temperature": "hot"}, "'hot' is not a finite number"),
    ({"temperature": "1"}, "'1' is not a finite number"),
    ({"temperature": True}, "True is not"),
    ({"temperature": None}, "None is not"),
    ({"temperature": float("nan")}, "nan is not"),
    ({"temperature": float("inf")}, "inf is not"),
    ({"temperature": 10**400}, "1000.*… is not"),
    ({"temperature": 10**5000}, "thousands of digits is not"),
    ({"temperature": 1 + 2j}, r"\(1\+2j\) is not"),
    ({"temperature": -0.1}, "outside 0 … 1000"),
    ({"temperature": 1e300}, "outside 0 … 1000"),
    ({**HOT, "top_p": 1e-50}, r"top_p=1e-50 is outside \[1e-06, 1\].*Temperature 0"),
    ({**HOT, "top_p": 0}, "outside"),
    ({**HOT, "top_p": 1.01}, "outside"),
    ({**HOT, "top_p": [0.5]}, "is not a finite number"),
    ({**HOT, "top_p": False}, "is not a finite number"),
    ({**HOT, "top_k": 0}, "leaves no token"),
    ({**HOT, "top_k": 2.5}, "not a whole number"),
    ({**HOT, "top_k": "many" * 99}, "…"),
    ({**HOT, "min_p": 0.0}, r"outside \(0, 1\]"),
    ({**HOT, "min_p": {}}, "is not a finite number"),
    ({"repetition_penalty": 1e-300}, "outside 0.01 … 100"),
    ({"repetition_penalty": 1e300}, "outside 0.01 … 100"),
    ({"repetition_penalty": -1.0}, "outside 0.01 … 100"),
    ({"repetition_penalty": 0}, "outside 0.01 … 100"),
    ({"repetition_penalty": "1"}, "is not a finite number"),
    ({"repetition_penalty": None}, "is not a finite number"),
    ({"presence_penalty": 2.1}, "outside -2 … 2"),
    ({"frequency_penalty": "much"}, "is not a finite number"),
    ({"logit_bias": "5"}, "does not map token ids"),
    ({"logit_bias": 5}, "does not map token ids"),
    ({"logit_bias": [5]}, "does not map token ids"),
    ({"logit_bias": {"5": 1}}, "'5' is not a whole number"),
    ({"logit_bias": {-1: 1}}, "outside 0"),
    ({"logit_bias": {5: float("nan")}}, "is not a finite number"),
    ({"logit_bias": {5: 101}}, "outside -100 … 100"),
    ({"logit_bias": dict.fromkeys(range(1025), 1)}, "there may be 1024"),
    ({"seed": 1.5}, "1.5 is not a whole number"),
    ({"seed": np.float64(1.0)}, "is not a whole number"),
    ({"seed": -1}, "outside 0"),
    ({"seed": 2**63}, "outside 0"),
    ({"seed": 10**5000}, "thousands of digits is outside"),
    ({"top_p": 0.5}, "no effect"),
    ({"logit_bias": [(5, 1, 2)]}, "does not map token ids"),
    ({"logit_bias": {5: -100.5}}, "outside -100 … 100"),
]


def test_what_is_no_number_or_out_of_range_is_refused():
    for given, word in WRONG:
        with pytest.raises(InputError, match=word):
            SamplingParams(**given)


@pytest.mark.parametrize("five", [np.int64(5), np.uint8(5), torch.tensor(5)], ids=lambda five: str(type(five)))
def test_whole_numbers_of_other_kinds_become_pythons(five):
    found = asdict(SamplingParams(max_new_tokens=five, temperature=1, top_k=five, seed=five))
    assert {type(found[name]) for name in ("max_new_tokens", "top_k", "seed")} == {int}
    assert json.loads(json.dumps(found))["max_new_tokens"] == 5


@pytest.mark.parametrize("half", [np.float32(0.5), np.float64(0.5), Fraction(1, 2)], ids=lambda half: str(type(half)))
def test_numbers_of_other_kinds_become_pythons(half):
    found = SamplingParams(temperature=half, top_p=half, min_p=half, repetition_penalty=half)
    assert json.loads(json.dumps(asdict(found)))["top_p"] == 0.5


def test_the_ends_of_the_ranges_are_inside():
    SamplingParams(temperature=1000, top_p=1e-6, top_k=10**400, min_p=1, repetition_penalty=100, seed=2**63 - 1)
    SamplingParams(temperature=5e-324, top_p=1, min_p=5e-324, repetition_penalty=0.01, max_new_tokens=2**31 - 1)
