"""The model's ``generation_config.json``: which of its settings kvkeep uses.

kvkeep uses the tokens that end a text, beside those of config.json and the tokenizer, and those that may not be
generated. It leaves out all other settings, so that a single prompt, a batch and a session give the same text. `remark`
names the settings that are left out.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from kvkeep.errors import InputError, ModelFileError
from kvkeep.models.chat_templates import control_tokens, turn_ends
from kvkeep.models.files import optional

GENERATION_CONFIG = "generation_config.json"

OWN = frozenset(
    {"do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "max_length"}
)
"""Settings for which kvkeep has options of its own."""

KEPT = frozenset(
    {
        *("eos_token_id", "pad_token_id", "bos_token_id"),
        *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"),
    }
)
"""Settings that kvkeep obeys, or that change no text of a single row."""

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
    """Refuse a ``generation_config.json`` that cannot be used, before weights are read; do nothing without one.

    Args:
        name: a folder, or a hub name.

    Raises:
        ModelFileError: the file is not a JSON object, transformers refuses its values, or its end tokens or banned
            tokens are no token ids.
    """
    path = optional(name, GENERATION_CONFIG)
    if path is None:
        return
    problem = f"{name}: Its {GENERATION_CONFIG} cannot be used"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        ends = fields.get("eos_token_id")
        BannedTokens.of(GenerationConfig.from_dict(dict(fields)))
    except Exception as error:  # whatever transformers raises for its values
        raise ModelFileError(f"{problem} ({error!s:.200}). Remove it, or download the model again.") from error
    # 2**63: ids become tensors of 64 bits
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(isinstance(end, int) and not isinstance(end, bool) and abs(end) < 2**63 for end in ends):
        raise ModelFileError(
            f"{problem} (eos_token_id is {ends!s:.60}). Give the number of a token, or a list of numbers."
        )


def remark(model: PreTrainedModel) -> str | None:
    """Return a sentence about the settings of the model's generation config that kvkeep ignores; ``None`` if it
    ignores none.
    """
    asked = _asked(model)
    differs = _listed({name: value for name, value in asked.items() if name not in SAME_TEXT})
    same = _listed({name: value for name, value in asked.items() if name in SAME_TEXT})
    start = f"the model's {GENERATION_CONFIG} also asks for"
    if differs:
        rest = f" ({same} changes no text)" if same else ""
        return f"{start} {differs}, which kvkeep leaves out: the text may differ from what its makers intend{rest}."
    return f"{start} {same}, which kvkeep leaves out: it changes no text." if same else None


def ends_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *, chat: bool = False
) -> set[int]:
    """Return the ids of the tokens that end a text of this model.

    Args:
        model: its generation config names some.
        tokenizer: names one more. Those of the model's configuration count if they are special tokens here, since
            transformers fills in a number where the file has none; without a tokenizer they do not count.
        chat: whether the text is an answer in a conversation, which the chat template ends with a token of its own.
    """
    found = _listed_ids(getattr(model.generation_config, "eos_token_id", None))
    if tokenizer is None:
        return found
    text = model.config.get_text_config(decoder=True)
    for config in (model.config, text):
        found |= _listed_ids(getattr(config, "eos_token_id", None)) & control_tokens(tokenizer)
    own = getattr(tokenizer, "eos_token_id", None)
    if own != getattr(tokenizer, "unk_token_id", None):  # of a token that the vocabulary does not have
        found |= {token for token in _listed_ids(own) if 0 <= token < text.vocab_size}
    return found | turn_ends(tokenizer) if chat else found


def _listed_ids(ids: object) -> set[int]:
    """Return the token ids of a setting that holds one, several or none, as a set."""
    listed = ids if isinstance(ids, list | tuple) else [ids]
    return {token for token in listed if isinstance(token, int) and not isinstance(token, bool)}


class BannedTokens(NamedTuple):
    """The tokens that a generation config forbids.

    Attributes:
        always: tokens that are never generated (``suppress_tokens``, and words of one token).
        first: tokens with which no answer begins (``begin_suppress_tokens``).
        words: sequences of two or more tokens whose last one may not follow the others (``bad_words_ids``).
    """

    always: frozenset[int] = frozenset()
    first: frozenset[int] = frozenset()
    words: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, config: Any, vocabulary: int | None = None) -> BannedTokens:
        """Read the banned tokens from a generation config, as transformers does: a single-token word that is an end
        token stays allowed.

        Args:
            config: the generation config.
            vocabulary: number of tokens of the model, if it is known.

        Raises:
            InputError: a value is no list of token ids, or nothing is left to generate.
        """
        always, first = (_token_ids(name, getattr(config, name, None)) for name in (_SUPPRESS, _BEGIN_SUPPRESS))
        listed = getattr(config, _BAD_WORDS, None)
        if not isinstance(listed, list | tuple | None):
            raise InputError(f"{_BAD_WORDS} is {listed!r:.60}. Give a list of lists of token ids.")
        words = {_token_ids(_BAD_WORDS, word) for word in listed or ()}
        if () in words:
            raise InputError(f"{_BAD_WORDS} has a word without tokens. Leave it out.")
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        single = {word[0] for word in words if len(word) == 1} - set(ends)
        longer = tuple(sorted(word for word in words if len(word) > 1))
        banned = single.union(always)
        if vocabulary is not None and banned.union(first).issuperset(range(vocabulary)):
            raise InputError(
                f"{_SUPPRESS}, {_BEGIN_SUPPRESS} and {_BAD_WORDS} of the generation config ban all {vocabulary} tokens "
                "of the model. Remove them from its generation_config."
            )
        return cls(frozenset(banned), frozenset(first), longer)


_SUPPRESS, _BEGIN_SUPPRESS, _BAD_WORDS = "suppress_tokens", "begin_suppress_tokens", "bad_words_ids"


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    """Return the value of a setting that must be a list of token ids, as a tuple; ``()`` for ``None``. The setting is
    named for the message.

    Raises:
        InputError: it is something else.
    """
    listed = () if value is None else value
    # ids that the model lacks are let through, as they ban nothing; what takes more than 64 bits no tensor could hold
    if not isinstance(listed, list | tuple) or not all(
        isinstance(token, int) and not isinstance(token, bool) and abs(token) < 2**63 for token in listed
    ):
        raise InputError(f"{name} is {value!r:.60}. Give a list of token ids.")
    return tuple(listed)


def _asked(model: PreTrainedModel) -> dict[str, object]:
    """Return the settings of a model's generation config, by name, that differ from transformers' defaults and that
    kvkeep neither obeys nor has options for.
    """
    usual = GenerationConfig._get_default_generation_params()
    given = model.generation_config.to_diff_dict()
    return {
        name: value
        for name, value in given.items()
        if name not in OWN | KEPT | {"transformers_version"}
        and not name.startswith("_")
        and value != usual.get(name, False)  # a setting that transformers does not know is off by default
    }


def _listed(values: dict[str, object]) -> str:
    """Format settings as ``name=value``, joined by commas."""
    parts = [f"{name}={value!r:.40}" for name, value in sorted(values.items())]
    return ", ".join(parts)
