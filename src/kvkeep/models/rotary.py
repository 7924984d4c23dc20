"""Rotary frequencies that follow the length of a text (longrope, dynamic NTK): each text gets those of its own length.

transformers chooses them by the largest position in a batch, and keeps them for the next run. A forward hook on the
rotary embedding computes them for each text instead, so that they depend neither on its neighbours, nor on earlier
runs, nor on the pieces in which its prompt is read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from kvkeep.rotary import lengths_read


@dataclass(frozen=True)
class LengthRule:
    """How a model's rotary frequencies follow the length of a text.

    Attributes:
        switches: lengths beyond which other frequencies hold (longrope).
        grows: lengths beyond which every length has its own frequencies (dynamic NTK).
        read_again: the length beyond which a text that has grown is read again from its beginning, as the ``generate``
            of the Phi family does; ``None``: its older keys stay as they are.
    """

    switches: tuple[int, ...] = ()
    grows: tuple[int, ...] = ()
    read_again: int | None = None

    @classmethod
    def of(cls, model: nn.Module) -> LengthRule:
        """Return a model's rule, which is empty for most models."""
        parts = [part for part in model.modules() if follows_length(part)]
        borders = {(kind, border) for part in parts for kind, border in map(_kind, *_each(part))}
        switches, grows = (sorted(n for one, n in borders if one == kind) for kind in ("longrope", "dynamic"))
        again = getattr(getattr(model, "config", None), "original_max_position_embeddings", None)
        return cls(tuple(switches), tuple(grows), again if again in switches else None)

    def __bool__(self) -> bool:
        return bool(self.switches or self.grows)

    def key(self, n: int) -> Hashable:
        """Return a value that is equal for text lengths with equal rotary frequencies."""
        return tuple(n > border for border in self.switches), tuple(n if n > border else 0 for border in self.grows)

    def refusal(self, past: int, n: int, *, of: int = 0) -> str | None:
        """Return the reason why a memory of ``past`` tokens cannot be continued to ``n`` tokens; ``None`` if it can.

        Args:
            past: tokens that the memory stands for.
            n: tokens of the whole text that continues it, those of the memory included.
            of: tokens of the longer text from which the memory was cut back; 0: none.
        """
        if not past or self.key(past) == self.key(n) == self.key(max(past, of)):
            return None
        border = min(border for border in (*self.switches, *self.grows) if max(n, of) > border)
        if self.key(past) == self.key(n):
            return (
                f"This model rotates keys by the length of the whole text, in another way beyond {border} tokens. The "
                f"memory was made in a text of {of} tokens, and its keys would be wrong in one of {n}. Give the whole "
                "text as one prompt."
            )
        return (
            f"This model rotates keys by the length of the whole text, in another way beyond {border} tokens. The "
            f"memory stands for {past} tokens, and the new ones bring the text to {n}, where its keys would be wrong. "
            f"Give the whole text as one prompt, or keep it within {border} tokens."
        )


def follows_length(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding whose frequencies follow the length of the text in each run."""
    kinds = getattr(module, "rope_type", None)
    return any(map(_follows, kinds.values() if isinstance(kinds, Mapping) else [kinds]))


def _follows(kind: object) -> bool:
    """Return whether the frequencies of this type of rotary embedding depend on the length of the text."""
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def _each(module: Any) -> tuple[list[Any], list[str | None]]:
    """Return the types of layers for which a rotary embedding depends on the length, as two columns for `map`: the
    embedding, and the type.
    """
    kinds = module.rope_type
    types = [name for name, kind in kinds.items() if _follows(kind)] if isinstance(kinds, Mapping) else [None]
    return [module] * len(types), types


def _kind(module: Any, layer_type: str | None) -> tuple[str, int]:
    """Return, for a rotary embedding that follows the length, ``longrope`` or ``dynamic``, and the length in tokens
    beyond which its frequencies for a type of layer change.
    """
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if kind == "longrope":
        parameters = module.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        return kind, int(parameters["original_max_position_embeddings"])
    return "dynamic", int(module.original_max_seq_len)


def _rotate_by_text(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return a rotary embedding's output anew, with the frequencies of each text's own length; ``None``, which leaves
    it as it is, for a type of layer that does not follow the length. A forward hook.
    """
    given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
    x, positions, layer_type = given["x"], given["position_ids"], given.get("layer_type")
    if not _follows(module.rope_type if layer_type is None else module.rope_type[layer_type]):
        return None
    kind, border = _kind(module, layer_type)
    more = {} if layer_type is None else {"layer_type": layer_type}
    shown = _shown_lengths(positions)
    # one length for all with the same frequencies: within the border 1, and beyond it, for longrope, the next one
    beyond = torch.where(shown > border, border + 1 if kind == "longrope" else shown, 1).flatten()
    tensors = output if isinstance(output, tuple) else (output,)
    found = [tensor.flatten(-3, -2).clone() for tensor in tensors]
    flat = positions.flatten(-2)
    for n in beyond.unique().tolist():  # `forward` below, since a call would come to this hook again
        at = (beyond == n).nonzero()[:, 0]
        own = flat[..., at]
        own = torch.cat([own, torch.full_like(own[..., :1], n - 1)], dim=-1)  # the last column stands for the length
        if kind == "dynamic":
            module.forward(x, torch.zeros_like(own[..., None, :1]), **more)  # forgets the length of the run before
        part = module.forward(x, own[..., None, :], **more)
        for whole, piece in zip(found, part if isinstance(part, tuple) else (part,), strict=True):
            whole.index_copy_(-2, at, piece.flatten(-3, -2)[..., :-1, :])
    made = tuple(whole.view_as(tensor) for whole, tensor in zip(found, tensors, strict=True))
    return made if isinstance(output, tuple) else made[0]


# a compiled model breaks its graph here, since the number of lengths is not known beforehand
rotate_by_text: Callable[..., Any] = torch.compiler.disable(_rotate_by_text)


def _shown_lengths(positions: Int[Tensor, "*A B T"]) -> Int[Tensor, "B T"]:
    """Return the length of the text to which each token belongs: as `kvkeep.rotary.reading` has told it, else by the
    largest position in its row.
    """
    ends = positions.amax(dim=-1, keepdim=True).expand_as(positions) + 1
    ends = ends.flatten(0, -3).amax(dim=0) if ends.dim() > 2 else ends
    told = lengths_read()
    return ends if told is None or told.shape != ends.shape else told.to(ends)
