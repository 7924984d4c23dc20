"""Wrong shapes and types are found in any call, also after others like it have passed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import beartype
import jaxtyping
import pytest
import torch
from annotations import FIRST_CALLS, NTH, begin_test, kind
from jaxtyping import Float, TypeCheckError
from torch import Tensor

checked = jaxtyping.jaxtyped(typechecker=beartype.beartype)  # as the import hook writes it, see annotations.py


@checked
def give(
    first: Float[Tensor, "B S"], result: object, *, second: Float[Tensor, "S"] | None = None
) -> Float[Tensor, "B"]:
    return result


@checked
def listed(values: list[Float[Tensor, "S"]]) -> int:
    return len(values)


@checked
def named(values: Mapping[str, Float[Tensor, "S"]]) -> dict[str, int]:
    return dict.fromkeys(values, 0)


@checked
def chosen(mode: Literal["sum", "max"], sign: Literal[-1, 1] = 1) -> str:
    return mode * sign


@checked
@dataclass(frozen=True)
class Pair:
    left: Float[Tensor, "S"]
    right: Float[Tensor, "S"]

    def __len__(self) -> int:
        return len(self.left)

    @checked
    def sum(self, weights: Float[Tensor, "S"]) -> Float[Tensor, ""]:
        return (self.left * weights).sum()


@pytest.fixture(autouse=True, params=["first call", "after others"])
def earlier_calls(request):
    begin_test()  # not all tests are looked at
    if request.param == "after others":
        for rows, tokens in ((2, 3), (4, 5)):
            give(torch.zeros(rows, tokens), torch.zeros(rows), second=torch.zeros(tokens))
            give(torch.zeros(rows, tokens), torch.zeros(rows))
        listed([torch.zeros(2), torch.zeros(2)])
        named({"a": torch.zeros(2), "b": torch.zeros(2)})
        chosen("sum", 1)
        Pair(torch.zeros(2), torch.zeros(2)).sum(torch.zeros(2))


GOOD = torch.zeros(2, 3)


@pytest.mark.parametrize(
    "call",
    {
        "result of another length": lambda: give(GOOD, torch.zeros(4)),
        "result of another dtype": lambda: give(GOOD, torch.zeros(2, dtype=torch.long)),
        "result of another type": lambda: give(GOOD, None),
        "results in a list": lambda: give(GOOD, [torch.zeros(2)]),
        "an axis that differs": lambda: give(GOOD, torch.zeros(2), second=torch.zeros(5)),
        "one argument for another": lambda: give(torch.zeros(3), torch.zeros(3), second=GOOD),
        "an axis too many": lambda: give(torch.zeros(2, 3, 1), torch.zeros(2)),
        "an integer": lambda: give(torch.zeros(2, 3, dtype=torch.int), torch.zeros(2)),
        "no tensor": lambda: give([[0.0]], torch.zeros(1)),
        "a list of integers": lambda: listed([torch.zeros(2, dtype=torch.int)]),
        "a list of lists": lambda: listed([[0.0]]),
        "another key": lambda: named({0: torch.zeros(2)}),
        "another value": lambda: named({"a": 0}),
        "another choice": lambda: chosen("min"),
        "another number": lambda: chosen("sum", 0),
        "fields that differ": lambda: Pair(torch.zeros(2), torch.zeros(3)),
        "a method's argument": lambda: Pair(torch.zeros(2), torch.zeros(2)).sum(torch.zeros(2, 1)),
    }.values(),
)
def test_is_found(call):
    with pytest.raises(TypeCheckError):
        call()


def test_is_not_looked_for_where_it_is_switched_off(no_checked_annotations):
    assert give([0], 0) == 0


def test_is_not_looked_for_in_tests_that_are_not_looked_at():
    begin_test(checking=False)
    assert give([0], 0) == 0
    begin_test()
    with pytest.raises(TypeCheckError):
        give([0], 0)


def test_a_result_is_checked_without_another_call():
    calls = []

    @checked
    def count(value: Float[Tensor, "S"]) -> object:
        calls.append(value)
        return [None] if len(calls) % 2 else [0, None]

    for _ in range(6):
        count(torch.zeros(3))
    assert len(calls) == 6


@checked
def doubled(value: int) -> int:
    return 2 * value


@checked
def total(values: Float[Tensor, "S"]) -> float:
    return float(sum(values))


@pytest.mark.parametrize(("function", "right", "wrong"), [(doubled, 1, "a"), (total, torch.zeros(2), [1.0])])
def test_the_first_calls_of_each_test_are_looked_at_and_some_of_the_others(function, right, wrong):
    for _ in range(2):
        begin_test()
        for _ in range(FIRST_CALLS - 1):
            function(right)
        with pytest.raises(TypeCheckError):
            function(wrong)
        found = []
        for _ in range(4 * NTH):
            try:
                found.append(function(wrong))
            except TypeCheckError:
                found.append(None)
        assert found.count(None) == 4


def test_values_of_one_kind():
    assert kind((torch.zeros(2, 3), 1, "a")) == kind((torch.ones(2, 3), 2, "b"))
    for one, other in ((torch.zeros(2), torch.zeros(3)), (1, True), (int, float), ([0], [""]), ((0, ""), ("", 0))):
        assert kind(one) != kind(other)
