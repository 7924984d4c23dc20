"""The rotary embedding that a model's configuration describes, for caches with slot positions."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvkeep.errors import InputError, UnsupportedModelError
from kvkeep.rotary.ranks import Rotation

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
    """The model's rotation if attention sees slot positions; ``None`` if it sees true positions.

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
    """The rotation of a model's keys.

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
