"""Writes the model folder of the package: weights, configuration, tokenizer, checksum and the log's drawing."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from kvkeep.models.tiny import CHECKSUM, WEIGHTS

from .model import CONTEXT, build
from .paths import LOG, PACKAGE
from .prepare import load_tokenizer
from .tokenizer import SPECIAL, save


def load_checkpoint(work: Path) -> LlamaForCausalLM:
    """The model of the checkpoint, with the running average of the weights."""
    model = build(0, "cpu")
    model.set_attn_implementation("sdpa")
    state = torch.load(work / "checkpoint.pt", map_location="cpu", weights_only=True)
    average = state["optimizer"]["average"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(average[name])
    return model.eval()


def export(work: Path, folder: Path = PACKAGE) -> None:
    """Write the model of the checkpoint into a folder, the package's own by default."""
    folder.mkdir(parents=True, exist_ok=True)
    model = load_checkpoint(work)
    model.generation_config = GenerationConfig(
        bos_token_id=SPECIAL.index("<|begin|>"),
        eos_token_id=SPECIAL.index("<|end|>"),
        pad_token_id=SPECIAL.index("<|pad|>"),
        do_sample=False,
        max_new_tokens=128,
    )
    model.save_pretrained(folder)
    save(load_tokenizer(work), folder, context=CONTEXT)
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    (folder / CHECKSUM).write_text(f"{digest}  {WEIGHTS}\n", encoding="ascii")
    if (work / "log.csv").exists() and folder == PACKAGE:
        shutil.copyfile(work / "log.csv", LOG)
        from .plot import draw

        draw(LOG, folder / "training.png")
    print(f"wrote {folder}: {sum(f.stat().st_size for f in folder.iterdir() if f.is_file()) / 1e6:.1f} MB")
