"""A policy's state of each head: one tensor for all of a head's slots, and for the tokens that have left them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.types import State


def empty(axes: Mapping[str, str], keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> State:
    """The state of heads that have seen no token: zeros in float32.

    Args:
        axes: the policy's `summaries`, name → axes.
        keys: keys of the heads.
        values: values of the heads.
    """
    sizes = {"D": keys.shape[-1], "E": values.shape[-1]}
    shapes = {name: (*keys.shape[:2], *(sizes[axis] for axis in letters.split())) for name, letters in axes.items()}
    return {name: keys.new_zeros(shape, dtype=torch.float32) for name, shape in shapes.items()}


def places(axes: Mapping[str, str]) -> dict[str, str]:
    """The names under which rows that several policies share hold a state of heads: name → axes and a number.

    States of the same axes share a tensor, in the order in which a policy names them.
    """
    found: dict[str, str] = {}
    for name, letters in axes.items():
        found[name] = f"{letters}#{sum(place.partition('#')[0] == letters for place in found.values())}"
    return found


def shared(axes: Mapping[str, str]) -> dict[str, str]:
    """The same states under the names of `places`: place → axes."""
    return {place: axes[name] for name, place in places(axes).items()}


def numbers(axes: Mapping[str, str], *, key_dim: int, value_dim: int) -> int:
    """How many numbers the state of one head has."""
    sizes, count = {"D": key_dim, "E": value_dim}, 0
    for letters in axes.values():
        product = 1
        for axis in letters.split():
            product *= sizes[axis]
        count += product
    return count
