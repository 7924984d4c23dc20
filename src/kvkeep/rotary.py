"""Rotary positions: keys moved to their ranks in the cache, and the rotary embedding of a model's configuration."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvkeep.errors import InputError, UnsupportedModelError

# Keys rotated to their ranks in the cache instead of their true positions.
#
# With ``true`` positions keys stay as the model rotated them. With ``slot`` positions (StreamingLLM) keys are stored
# unrotated. In each step the i-th oldest token of a head is rotated to position i, and the query to the end. No
# distance is then longer than the cache, however long the stream is.


@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotary embedding whose halves are rotated against each other (Llama, Mistral, Qwen, Gemma, GPT-NeoX, ...).

    Attributes:
        frequencies: radians per position, float32. The first ``2 F`` dims of a head are rotated, the rest is not.
        scaling: factor on the rotated vectors (YaRN).
    """

    frequencies: Float[Tensor, " F"]
    scaling: float = 1.0
    _there: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)
    _tables: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False)
    _latest: dict[torch.dtype, tuple[bytes, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def apply(self, x: Float[Tensor, "B H T D"], positions: Int[Tensor, "B #H T"]) -> Float[Tensor, "B H T D"]:
        """Return the vectors rotated to their positions."""
        first, second, rest = self._split(x)
        cos, sin = self._wide(self.angles(positions, x.dtype))
        return torch.cat([first * cos - second * sin, second * cos + first * sin, *rest], dim=-1).to(x.dtype)

    def ahead(self, x: Float[Tensor, "B H T D"], by: Int[Tensor, "B H"]) -> Float[Tensor, "B H T D"]:
        """Return rotated vectors as they would be ``by`` positions later; their lengths stay the same."""
        first, second, rest = self._split(x)
        angles = by[:, :, None, None].float() * self.on(x.device)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, *rest], dim=-1).to(x.dtype)

    def undo(self, x: Float[Tensor, "B H T D"], positions: Int[Tensor, "B #H T"]) -> Float[Tensor, "B H T D"]:
        """Return the vectors without the rotation of `apply`, with cosine and sine rounded exactly as the model
        rounds them.

        At position four million float32 angles are off by a quarter of a radian. With equal rounding the error cancels.
        """
        return self._undone(x, self._wide(self.angles(positions, x.dtype)))

    def unrotated(
        self, query: Float[Tensor, "B Hq T D"], keys: Float[Tensor, "B Hk T D"], positions: Int[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B Hq T D"], Float[Tensor, "B Hk T D"]]:
        """Return new queries and keys without the rotation to their true positions."""
        if positions.shape[1] > 1 or not positions.is_cpu:
            return self.undo(query, positions[:, None]), self.undo(keys, positions[:, None])
        angles = self.angles_now(positions, query.dtype)[:, None, None]
        both = self._undone(torch.cat([query, keys], dim=1), self._wide(angles))
        return both[:, : query.shape[1]], both[:, query.shape[1] :]

    def at_ranks(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk S D"],
        positions: Int[Tensor, "B #Hk S"],
        new: Int[Tensor, "B T"],
    ) -> tuple[Tensor, Tensor]:
        """Return unrotated queries and keys rotated to the ranks of their tokens in each KV head.

        Args:
            query: new queries.
            keys: all keys that can be attended, new ones included.
            positions: true positions of the keys, -1 = empty. One head's positions if all heads agree.
            new: true positions of the queries, -1 = padding.
        """
        first = new.amax(dim=1, keepdim=True) - (new >= 0).sum(dim=1, keepdim=True) + 1
        older = ((positions >= 0) & (positions < first[:, None])).sum(dim=-1, keepdim=True)
        own = older + (new - first).clamp(min=0)[:, None]
        own = own.repeat_interleave(query.shape[1] // positions.shape[1], dim=1)
        return self.apply(query, own), self.apply(keys, ranks(positions))

    def table(self, n: int, dtype: torch.dtype) -> Float[Tensor, "m F2"]:
        """Return the cosines and sines of positions 0 to at least ``n - 1``, on the CPU. They are cached."""
        known = self._tables.get(dtype)
        if known is None or len(known) < n:
            self._tables[dtype] = known = self.angles(torch.arange(n), dtype)
        return known

    def angles_now(self, positions: Int[Tensor, "B 1"], dtype: torch.dtype) -> Float[Tensor, "B F2"]:
        """Return `angles` of positions on the CPU. The last result is cached, as all layers of a step ask for it."""
        held = positions.contiguous()
        known, asked = self._latest.get(dtype), ctypes.string_at(held.data_ptr(), held.nbytes)
        if known is None or known[0] != asked:
            self._latest[dtype] = known = (asked, self.angles(positions[:, 0], dtype))
        return known[1]

    def angles(self, positions: Int[Tensor, "*A"], dtype: torch.dtype) -> Float[Tensor, "*A F2"]:
        """Return the cosines, then the sines, rounded to a dtype. Padding (position -1) counts as position 0."""
        angles = positions.clamp(min=0)[..., None].float() * self.on(positions.device)
        return (torch.cat([angles.cos(), angles.sin()], dim=-1) * self.scaling).to(dtype)

    def on(self, device: torch.device) -> Float[Tensor, " F"]:
        """Return the frequencies on a device. They are copied there only once."""
        if device not in self._there:
            self._there[device] = self.frequencies.to(device)
        return self._there[device]

    def _split(self, x: Float[Tensor, "B H T D"]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the two halves that rotate against each other, and the other dims, in float32 or wider."""
        half = len(self.frequencies)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        rest = x[..., 2 * half :]
        return x[..., :half], x[..., half : 2 * half], [rest] if rest.shape[-1] else []

    def _undone(self, x: Float[Tensor, "B H T D"], angles: tuple[Tensor, Tensor]) -> Float[Tensor, "B H T D"]:
        """Return vectors without a rotation that is given by its cosines and sines."""
        (first, second, rest), (cos, sin) = self._split(x), angles
        size = cos * cos + sin * sin
        unturned = [(first * cos + second * sin) / size, (second * cos - first * sin) / size]
        return torch.cat([*unturned, *rest], dim=-1).to(x.dtype)

    def _wide(self, angles: Float[Tensor, "*A F2"]) -> tuple[Float[Tensor, "*A F"], Float[Tensor, "*A F"]]:
        """Return the cosines and the sines, in float32 or wider."""
        cos, sin = angles.to(torch.promote_types(angles.dtype, torch.float32)).chunk(2, dim=-1)
        return cos, sin


def ranks(positions: Int[Tensor, "B H S"]) -> Int[Tensor, "B H S"]:
    """Return the rank of each token among the tokens of its head, oldest first; -1 for an empty slot."""
    order = positions.argsort(dim=-1)
    places = torch.empty_like(order)
    places.scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    empty = (positions < 0).sum(dim=-1, keepdim=True)
    return (places - empty).clamp(min=-1)


# The rotary embedding that a model's configuration describes, for caches with slot positions.

HALVES = {
    "gemma", "gemma2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "stablelm", "starcoder2",
}  # fmt: skip
"""Model types that rotate the two halves of a head against each other, in the same way in every layer."""

UNROTATED = {"biogpt", "bloom", "gpt2", "gpt_bigcode", "gpt_neo", "mpt", "opt", "xglm"}
"""Model types without rotation: positions are added to embeddings or to logits."""

FIXED = {"default", "linear", "llama3", "yarn"}
"""Types of rotary embedding whose frequencies do not depend on the length of the text."""


def rotation_for(config: PreTrainedConfig, asked: str | None, *, own: str) -> Rotation | None:
    """Return the model's rotation if attention is to see slot positions; ``None`` if true positions.

    Args:
        config: the model's configuration.
        asked: the mode that the user asked for, if any. If the model cannot have it, that is an error.
        own: the policy's mode, used if the user asked for none. If the model cannot have it, positions are true.

    Raises:
        InputError: ``asked`` is not a mode.
        UnsupportedModelError: slot positions were asked for, see `rotation_of`.
    """
    if asked not in (None, "true", "slot"):
        raise InputError(f"positions={asked!r} is not a mode; use 'true', 'slot' or None for the policy's own.")
    if (asked or own) != "slot":
        return None
    try:
        return rotation_of(config)
    except UnsupportedModelError:
        if asked is None:
            return None
        raise


def rotation_of(config: PreTrainedConfig) -> Rotation:
    """Return the rotation that a model applies to its keys.

    Raises:
        UnsupportedModelError: the model has no rotation, or one that kvkeep cannot undo.
    """
    config = config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None)
    kind = config.model_type
    if kind not in HALVES or not isinstance(parameters, dict) or "rope_theta" not in parameters:
        raise UnsupportedModelError(
            f"Slot positions need rotary embeddings that kvkeep knows how to undo; {kind!r} has none or others. Known: "
            f"{', '.join(sorted(HALVES))}. Use positions='true'."
        )
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in FIXED:
        raise UnsupportedModelError(
            f"Slot positions need frequencies that do not change with the length of the text; {rope_type!r} embeddings "
            "change. Use positions='true'."
        )
    if rope_type != "default":
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
        return Rotation(frequencies.float(), float(scaling))
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(dim * parameters.get("partial_rotary_factor", 1.0))
    steps = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    return Rotation(1.0 / (parameters["rope_theta"] ** steps))
