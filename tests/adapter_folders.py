"""Folders of LoRA adapters for the tiny models of the tests, as PEFT writes them: random weights, made once."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import model_folders
import pytest
import torch

from kvkeep.models.load import quiet
from kvkeep.models.support import auto_class

peft = pytest.importorskip("peft")

KINDS = {
    "a": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "b": {"target_modules": ["v_proj", "down_proj"], "use_rslora": True, "lora_alpha": 3},
    "dora": {"target_modules": ["q_proj", "up_proj"], "use_dora": True},
    "head": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "embed": {"target_modules": ["embed_tokens", "v_proj"]},
    "ranks": {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 9}},
}


@functools.cache
def folder(kind: str = "a", family: str = "llama") -> Path:
    """An adapter; not to be changed, see `copy`."""
    path = Path(tempfile.mkdtemp(prefix="kvkeep-adapter-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    adapted(kind, family).save_pretrained(path)
    return path


def adapted(kind: str, family: str = "llama"):
    """The model of PEFT with an adapter that changes what it writes."""
    base = model_folders.folder() if family == "llama" else model_folders.folder(family)
    with quiet():
        model = auto_class(model_folders.config_of(family)).from_pretrained(base)
    torch.manual_seed(sum(map(ord, kind)))
    config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **KINDS[kind])
    found = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.mul_(6.0)
            elif "lora_embedding" in name:
                parameter.mul_(2.0)
            elif "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return found.eval()


@functools.cache
def with_template() -> Path:
    """The model of the adapters, with a chat template."""
    path = Path(tempfile.mkdtemp(prefix="kvkeep-adapter-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    shutil.copytree(model_folders.folder(), path, dirs_exist_ok=True)
    (path / "chat_template.jinja").write_text(model_folders.TEMPLATE)
    return path


def copy(target: Path, kind: str = "a", **settings: object) -> Path:
    """A copy of an adapter with other settings in its configuration."""
    shutil.copytree(folder(kind), target)
    config = target / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))
    return target
