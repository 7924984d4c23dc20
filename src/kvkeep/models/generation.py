"""The model's ``generation_config.json``: which of its settings kvkeep uses.

kvkeep uses the tokens that end a text. It leaves out every other setting, so that a single prompt, a batch and a
session give the same text. `remark` names the settings that are left out.
"""

from __future__ import annotations

import json

from transformers import GenerationConfig, PreTrainedModel

from kvkeep.errors import ModelFileError
from kvkeep.models.files import optional

GENERATION_CONFIG = "generation_config.json"

OWN = frozenset(
    {"do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "max_length"}
)
"""Settings for which kvkeep has options of its own."""

KEPT = frozenset({"eos_token_id", "pad_token_id", "bos_token_id"})

SAME_TEXT = frozenset(
    {
        *("cache_implementation", "cache_config", "max_cache_len", "use_cache", "prefill_chunk_size", "low_memory"),
        *("compile_config", "disable_compile", "continuous_batching_config", "renormalize_logits"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "is_assistant", "num_assistant_tokens"),
        *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit", "use_mtp"),
        *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    }
)
"""Settings that change how a text is computed or what is reported beside it, but not the text."""


def check_generation_config(name: str) -> None:
    """Refuse a ``generation_config.json`` that cannot be used, before weights are read.

    Args:
        name: a folder, or a hub name.

    Raises:
        ModelFileError: the file is not a JSON object, or its end tokens are not whole numbers.
    """
    path = optional(name, GENERATION_CONFIG)
    if path is None:
        return
    problem = f"{name}: Its {GENERATION_CONFIG} cannot be used"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        ends = fields.get("eos_token_id")
        GenerationConfig.from_dict(dict(fields))
    except Exception as error:  # whatever transformers raises for its values
        raise ModelFileError(f"{problem} ({error!s:.200}). Remove it, or download the model again.") from error
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(isinstance(end, int) and not isinstance(end, bool) and abs(end) < 2**63 for end in ends):
        raise ModelFileError(
            f"{problem} (eos_token_id is {ends!s:.60}). Give the number of a token, or a list of numbers."
        )


def remark(model: PreTrainedModel) -> str | None:
    """A sentence on the settings that kvkeep leaves out; ``None`` if there are none."""
    asked = _asked(model)
    differs = _listed({name: value for name, value in asked.items() if name not in SAME_TEXT})
    same = _listed({name: value for name, value in asked.items() if name in SAME_TEXT})
    start = f"the model's {GENERATION_CONFIG} also asks for"
    if differs:
        rest = f" ({same} changes no text)" if same else ""
        return f"{start} {differs}, which kvkeep leaves out: the text may differ from what its makers intend{rest}."
    return f"{start} {same}, which kvkeep leaves out: it changes no text." if same else None


def ends_of(model: PreTrainedModel) -> set[int]:
    """The tokens that end a text of this model."""
    ids = model.generation_config.eos_token_id
    return set(ids) if isinstance(ids, list) else set() if ids is None else {ids}


def _asked(model: PreTrainedModel) -> dict[str, object]:
    """Settings that differ from transformers' defaults and for which kvkeep has no option."""
    usual = GenerationConfig._get_default_generation_params()
    given = model.generation_config.to_diff_dict()
    return {
        name: value
        for name, value in given.items()
        if name not in OWN | KEPT | {"transformers_version"}
        and not name.startswith("_")
        and value != usual.get(name, False)
    }


def _listed(values: dict[str, object]) -> str:
    """Names and values, separated by commas."""
    parts = [f"{name}={value!r:.40}" for name, value in sorted(values.items())]
    return ", ".join(parts)
