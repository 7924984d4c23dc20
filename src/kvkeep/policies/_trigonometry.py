"""The mean query of a head in pairs of dims that are rotated together, from a prompt or from a file."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.errors import PolicyError

_REMEDY = "Pass a calibration that the official code of TriAttention has written."


@dataclass(frozen=True, eq=False)
class Means:
    """What is known of the queries before their rotation.

    Attributes:
        query: the mean query.
        excess: the mean length of each rotated pair, less the length of the mean; zeros in the second half.
    """

    query: Float[Tensor, "*H D"]
    excess: Float[Tensor, "*H D"]


def pairs(x: Float[Tensor, "*H D"], half: int) -> Float[Tensor, "*H D"]:
    """The length of each rotated pair in the first ``half`` dims, and zeros behind them."""
    found = torch.zeros_like(x)
    found[..., :half] = torch.hypot(x[..., :half], x[..., half : 2 * half])
    return found


def read(path: str, layer: int) -> Means:
    """The calibration of a layer, one line for each query head.

    Raises:
        PolicyError: the file cannot be read, or lacks heads of the layer.
    """
    heads = heads_of(path)
    mine = {head: means for (number, head), means in heads.items() if number == layer}
    if not mine or sorted(mine) != list(range(len(mine))):
        lacks = f"some heads of layer {layer}" if mine else f"layer {layer}"
        raise PolicyError(
            f"calibration={path}: the file has no figures for {lacks}. "
            "It must cover every query head of every layer of this model."
        )
    ordered = [mine[head] for head in range(len(mine))]
    return Means(torch.stack([m.query for m in ordered]), torch.stack([m.excess for m in ordered]))


@functools.lru_cache(maxsize=4)
def heads_of(path: str) -> dict[tuple[int, int], Means]:
    """All heads of a file, by layer and query head.

    Raises:
        PolicyError: the file cannot be read, or is none of TriAttention's.
    """
    if not Path(path).expanduser().is_file():
        raise PolicyError(f"calibration={path}: there is no such file. Leave it out for the prompt's own queries.")
    try:
        with warnings.catch_warnings(action="ignore"):
            content = torch.load(Path(path).expanduser(), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch raises for a file that it did not write
        raise PolicyError(f"calibration={path}: torch cannot read this file. {_REMEDY}") from error
    found = {}
    try:
        for name, entry in content["stats"].items():
            layer, head = (int(part) for part in name.removeprefix("layer").split("_head"))
            real, imaginary, length = (entry[key].float() for key in ("q_mean_real", "q_mean_imag", "q_abs_mean"))
            query = torch.cat([real, imaginary])
            excess = torch.cat([length - torch.hypot(real, imaginary), torch.zeros_like(length)])
            if not (query.isfinite().all() and excess.isfinite().all()):
                raise ValueError
            found[layer, head] = Means(query, excess)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise PolicyError(
            f"calibration={path}: the file lacks q_mean_real, q_mean_imag or q_abs_mean of a head, or they are no "
            f"finite numbers. {_REMEDY}"
        ) from error
    return found
