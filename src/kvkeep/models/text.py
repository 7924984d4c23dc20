"""Between texts and tokens: prompts and conversations in, text out, and a model with its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvkeep.errors import InputError
from kvkeep.models.device import enough_memory
from kvkeep.models.load import Checkpoint, explained
from kvkeep.models.templates import fill


def encode(checkpoint: Checkpoint, prompt: str, *, raw: bool = False) -> Int[Tensor, "1 T"]:
    """Turn a prompt into token ids, through the chat template if the tokenizer has one.

    Args:
        checkpoint: the model that is meant.
        prompt: the text; with a template, the user's message.
        raw: leave the chat template out.

    Raises:
        InputError: the prompt is empty, no valid text, or the tokenizer does not belong to the model.
        ModelFileError: the tokenizer fails.
    """
    if not prompt.strip():
        raise InputError("The prompt is empty. Give some text with --prompt, --prompt-file or on standard input.")
    _check_text(prompt)
    if checkpoint.tokenizer.chat_template is None or raw:
        return _encoded(checkpoint, prompt)
    return encode_chat(checkpoint, [{"role": "user", "content": prompt}])


def encode_chat(checkpoint: Checkpoint, messages: Sequence[Mapping[str, str]]) -> Int[Tensor, "1 T"]:
    """Turn a conversation into token ids, up to where the model is to answer.

    Args:
        checkpoint: the model that is meant.
        messages: each with ``role`` and ``content``.

    Raises:
        InputError: there is no chat template, it cannot be used on these messages, or there is no valid text.
        ModelFileError: the tokenizer fails.
    """
    if checkpoint.tokenizer.chat_template is None:
        raise InputError(f"The tokenizer of {checkpoint.name} has no chat template; give a prompt instead of messages.")
    for message in messages:
        _check_text(message["content"])
    return _encoded(checkpoint, fill(checkpoint.tokenizer, messages), add_special_tokens=False)


def _check_text(text: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):  # what is left of bytes that are no UTF-8
        raise InputError("The prompt is not UTF-8 text. Convert it, e.g. with iconv.")


def _encoded(checkpoint: Checkpoint, text: str, **options: bool) -> Int[Tensor, "1 T"]:
    """The tokens of a text, all of which the model knows."""
    with explained(checkpoint.name, "Its tokenizer cannot read the prompt"):
        ids: Tensor = checkpoint.tokenizer(text, return_tensors="pt", **options)["input_ids"]
    if ids.numel() == 0:
        raise InputError("The prompt has no tokens. Give some text.")
    vocabulary: int = checkpoint.config.get_text_config(decoder=True).vocab_size
    if int(ids.max()) >= vocabulary:
        raise InputError(
            f"The tokenizer of {checkpoint.name} gives token {int(ids.max())}, and the model knows only {vocabulary}. "
            "The two do not belong together."
        )
    return ids.long()


def check_length(checkpoint: Checkpoint, prompt_tokens: int, new_tokens: int) -> None:
    """Refuse what would run over the end of a learned position table.

    Raises:
        InputError: prompt and new tokens together are longer than the table.
    """
    limit = checkpoint.position_limit
    room = 0 if limit is None else limit - prompt_tokens + 1  # the last new token is not run through the model
    if limit is None or new_tokens <= room:
        return
    remedy = f"ask for at most {room} new tokens" if room > 0 else f"shorten the prompt to less than {limit}"
    raise InputError(
        f"{checkpoint.name} has learned positions for {limit} tokens; {prompt_tokens} of the prompt and {new_tokens} "
        f"new ones are more. No eviction policy changes that: {remedy}, or choose a model with rotary positions."
    )


@dataclass(frozen=True)
class Writer:
    """A loaded model with its tokenizer.

    Attributes:
        checkpoint: where it comes from, with its tokenizer.
        model: the model, attached.
    """

    checkpoint: Checkpoint
    model: PreTrainedModel

    @property
    def dtype(self) -> str:
        """The dtype of the weights, as the user writes it."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """Where the model runs, as the user writes it."""
        return str(self.model.device)

    @torch.inference_mode()
    def read(self, prompt: Int[Tensor, "1 T"], cache: Cache) -> None:
        """Run tokens through the model for what they leave in the cache.

        Raises:
            InputError: the device's memory is too small.
        """
        with enough_memory(self.model.device):
            self.model(input_ids=prompt.to(self.model.device), past_key_values=cache, logits_to_keep=1)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self.checkpoint.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def show_token(self, token_id: int) -> str:
        """One token as a person should see it, special or not; half a character shows as U+FFFD."""
        return str(self.checkpoint.tokenizer.decode([token_id]))
