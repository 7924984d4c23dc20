"""Tiny random models that see images, and prompts for them: one image, then words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import GATED, VOCAB
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    SiglipVisionConfig,
)

IMAGE, VIDEO, START, END = VOCAB - 1, VOCAB - 2, VOCAB - 3, VOCAB - 4
SIDE, PATCH = 16, 4
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
QWEN = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}


def _qwen(kind: type[PreTrainedConfig], **more: Any) -> PreTrainedConfig:
    tower = {"depth": 2, "num_heads": 4, "patch_size": PATCH, "temporal_patch_size": 1, "spatial_merge_size": 2}
    return kind(text_config={**GATED, "rope_parameters": MROPE}, vision_config={**tower, **more}, **QWEN)


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llava": lambda: LlavaConfig(
        text_config=LlamaConfig(**GATED),
        vision_config=CLIPVisionConfig(**TOWER, projection_dim=32),
        image_token_index=IMAGE,
        image_seq_length=16,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config=MistralConfig(**GATED, sliding_window=None),
        vision_config=PixtralVisionConfig(**TOWER, head_dim=8),
        image_token_index=IMAGE,
        spatial_merge_size=2,
    ),
    "gemma3": lambda: Gemma3Config(
        text_config=Gemma3TextConfig(**GATED, head_dim=16, sliding_window=12),
        vision_config=SiglipVisionConfig(**TOWER),
        image_token_index=IMAGE,
        mm_tokens_per_image=4,
    ),
    "qwen2-vl": lambda: _qwen(Qwen2VLConfig, embed_dim=32, hidden_size=32, mlp_ratio=2),
    "qwen2.5-vl": lambda: _qwen(
        Qwen2_5_VLConfig,
        hidden_size=32,
        intermediate_size=48,
        out_hidden_size=32,
        window_size=8,
        fullatt_block_indexes=[1],
    ),
    "qwen3-vl": lambda: _qwen(
        Qwen3VLConfig,
        hidden_size=32,
        intermediate_size=48,
        out_hidden_size=32,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    ),
}


def build(name: str) -> PreTrainedModel:
    """A model of the family with random weights; its image tower has an attention of its own."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(2.0)
    return model


def prompt(name: str, rows: int = 1) -> dict[str, torch.Tensor]:
    """An image and words for each row; the second row is shorter and padded on the left."""
    generator = torch.Generator().manual_seed(2)
    grid = name.startswith("qwen")
    seen = 16 if name == "llava" else 4
    columns = []
    for row in range(rows):
        words = torch.randint(3, END, (12 - 3 * row,), generator=generator).tolist()
        image = [START, *[IMAGE] * seen, END] if grid else [IMAGE] * seen
        columns.append([0] * 3 * row + words[:4] + image + words[4:])
    ids = torch.tensor(columns)
    found = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if grid:
        found["pixel_values"] = torch.randn((rows * 16, 3 * PATCH * PATCH), generator=generator)
        found["image_grid_thw"] = torch.tensor([[1, 4, 4]] * rows)
        found["mm_token_type_ids"] = (ids == IMAGE).long()
    else:
        found["pixel_values"] = torch.randn((rows, 3, SIDE, SIDE), generator=generator)
    if name == "mistral3":
        found["image_sizes"] = torch.tensor([[SIDE, SIDE]] * rows)
    if name == "gemma3":
        found["token_type_ids"] = (ids == IMAGE).long()
    return found
