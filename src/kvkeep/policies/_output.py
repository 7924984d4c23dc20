"""The part of a layer's output that one vector of its heads contributes."""

from jaxtyping import Float
from torch import Tensor

from kvkeep.types import View


def lengths(view: View, x: Float[Tensor, "B Hk S E"]) -> Float[Tensor, "B Hk S"]:
    """The Euclidean norm of what the heads of a group add to the layer's output, see `kvkeep.types.Output`."""
    if view.output is not None:
        return view.output.lengths(x)
    norms: Tensor = x.float().norm(dim=-1)
    return norms


def sizes(view: View, x: Float[Tensor, "B Hk S E"]) -> Float[Tensor, "B Hk S"]:
    """The sum of absolute values of what a head adds to the layer's output, see `kvkeep.types.Output`."""
    return x.float().abs().sum(dim=-1) if view.output is None else view.output.sizes(x)
