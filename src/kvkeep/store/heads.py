"""A policy's state of each head: one tensor for all of a head's slots, and for the tokens that have left them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.errors import PolicyError
from kvkeep.types import State


def empty(axes: Mapping[str, str], keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> State:
    """The state of heads that have seen no token: zeros in float32.

    Args:
        axes: the policy's `summaries`, name → axes.
        keys: keys of the heads.
        values: values of the heads.

    Raises:
        PolicyError: an axis is neither the keys' nor the values'.
    """
    sizes = {"D": keys.shape[-1], "E": values.shape[-1]}
    found = {}
    for name, letters in axes.items():
        if unknown := set(letters.split()) - sizes.keys():
            raise PolicyError(
                f"A summary of the policy has the axes {letters!r}, and a head has no {min(unknown)!r}. An axis is D, "
                "the head dim of keys, or E, that of values, with spaces between: 'D E'."
            )
        shape = (*keys.shape[:2], *(sizes[axis] for axis in letters.split()))
        found[name] = keys.new_zeros(shape, dtype=torch.float32)
    return found


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
    keys, values = (torch.empty((1, 1, 0, dim), device="meta") for dim in (key_dim, value_dim))
    return sum(tensor.numel() for tensor in empty(axes, keys, values).values())
