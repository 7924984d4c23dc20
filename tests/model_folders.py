"""Tiny model folders for the tests of the command line: random weights and a byte-level tokenizer, made once."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPVisionConfig,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    LlavaConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from kvkeep.models.load import quiet
from kvkeep.models.support import auto_class

TRAINED_LENGTH = 40
POSITIONS = 32
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@contextmanager
def one_thread() -> Iterator[None]:
    """Models this small are computed faster by one thread than by several that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(["the quick brown fox jumps over the lazy dog and the cat"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def config_of(family: str) -> PreTrainedConfig:
    common = {"vocab_size": len(tokenizer()), "bos_token_id": 0, "eos_token_id": None}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    if family == "llama":
        return LlamaConfig(
            **common, **sizes, intermediate_size=48, num_key_value_heads=2, max_position_embeddings=TRAINED_LENGTH
        )
    if family == "qwen3":
        shape = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
        return Qwen3Config(**common, **sizes, **shape, max_position_embeddings=512)
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        shape = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 100}
        return Gemma3TextConfig(**common, **sizes, **shape, layer_types=kinds, max_position_embeddings=512)
    if family == "gpt2":
        return GPT2Config(**common, n_embd=32, n_head=4, n_layer=2, n_positions=POSITIONS)
    if family == "opt":
        return OPTConfig(**common, **sizes, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=POSITIONS)
    if family == "lfm2":
        kinds = ["conv", "full_attention"]
        return Lfm2Config(**common, **sizes, intermediate_size=48, num_key_value_heads=2, layer_types=kinds)
    if family == "llava":
        tower = {"image_size": 16, "patch_size": 8, "projection_dim": 32, "intermediate_size": 48}
        text, image = config_of("llama"), CLIPVisionConfig(**sizes, **tower)
        return LlavaConfig(text_config=text, vision_config=image, image_token_index=2, image_seq_length=4)
    if family == "falcon":
        return FalconConfig(**common, **sizes)
    raise ValueError(f"{family} is no family of these folders")


@functools.cache
def folder(family: str = "llama") -> Path:
    """A model folder of the family; not to be changed, see `copy`."""
    path = Path(tempfile.mkdtemp(prefix="kvkeep-test-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    torch.manual_seed(0)
    config = config_of(family)
    model = auto_class(config).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
    with quiet():
        model.save_pretrained(path)
        tokenizer().save_pretrained(path)
    return path


def copy(target: Path, *without: str, family: str = "llama") -> Path:
    """A copy of a model folder that a test may damage."""
    shutil.copytree(folder(family), target, ignore=shutil.ignore_patterns(*without))
    return target


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
