"""The byte-level BPE tokenizer of 4 096 tokens, and its chat template."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")
VOCABULARY = 4096

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|> ' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""A space follows the role, so that the first word of a message is the same token as in running text."""

# A leading space belongs to the word or digit that follows; every digit is a token of its own.
_PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train(texts: Sequence[str]) -> Tokenizer:
    """Train the tokenizer on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sample(novels: Sequence[str], stories: Sequence[str], documents: Sequence[str], seed: int) -> list[str]:
    """Texts to train the tokenizer on: about half novels, the rest stories and recall documents."""
    rng = random.Random(seed)
    parts = [text[at : at + 60_000] for text in novels for at in [rng.randrange(max(1, len(text) - 60_000))]]
    return [*parts, *stories, *documents]


def save(tokenizer: Tokenizer, folder: Path, *, context: int) -> None:
    """Write the files that ``AutoTokenizer`` reads."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
