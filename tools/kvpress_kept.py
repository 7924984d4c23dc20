"""Write the tokens that kvpress keeps of a prompt on the embedded model: ``tests/compat/kvpress_kept.json``.

    make peers && .venv-peer-kvpress/bin/python tools/kvpress_kept.py

The tests hold `kvkeep.compat.kvpress` to these sets. kvpress is installed apart, since it needs an older transformers.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "tests" / "compat" / "kvpress_kept.json"
TOKENS = [(i * i * 7 + 31 * i) % 3000 + 50 for i in range(160)]
"""A prompt without two equal neighbours, so that scores rarely tie."""

PRESSES = (
    "KnormPress(0.5)",
    "KeyDiffPress(0.5)",
    "TOVAPress(0.5)",
    "ObservedAttentionPress(0.5)",
    "StreamingLLMPress(0.3)",
    "ExpectedAttentionPress(0.5)",
    "ExpectedAttentionPress(0.7, epsilon=0.02)",
    "SnapKVPress(0.5)",
    "SnapKVPress(0.8, window_size=16, kernel_size=7)",
    "PyramidKVPress(0.5, window_size=8, beta=8)",
    "PyramidKVPress(0.3, window_size=8)",
    "PyramidKVPress(0.5)",
    "LeverageScorePress(0.5)",
    "ComposedPress([KnormPress(0.25)])",
    "AdaKVPress(SnapKVPress(0.5, window_size=8))",
    "PerLayerCompressionPress(KnormPress(), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])",
    "BlockPress(KeyDiffPress(0.5), block_size=32)",
)


def model(attention: str) -> Any:
    """Return the embedded model in float32."""
    folder = ROOT / "src" / "kvkeep" / "models" / "tiny"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


@torch.no_grad()
def cached(model: Any, press: Any = None) -> Any:
    """Return the cache of the prompt, cut by the press."""
    cache = DynamicCache()
    if press is None:
        model(torch.tensor([TOKENS]), past_key_values=cache)
        return cache
    with press(model):
        model(torch.tensor([TOKENS]), past_key_values=cache)
    return cache


def positions(model: Any, layer: int, full: Any, cut: Any) -> list[list[int]]:
    """Return the positions that each head of a layer keeps."""
    attention = model.model.layers[layer].self_attn
    if (masked := getattr(attention, "masked_key_indices", None)) is not None:  # AdaKVPress masks instead of evicting
        attention.masked_key_indices = None
        gone = [set(masked[2][masked[1] == head].tolist()) for head in range(full.layers[layer].keys.shape[1])]
        return [[i for i in range(len(TOKENS)) if i not in places] for places in gone]
    kept, every = cut.layers[layer].keys[0].double(), full.layers[layer].keys[0].double()
    return torch.cdist(kept, every).argmin(dim=-1).sort(dim=-1).values.tolist()


def mask(places: list[int]) -> str:
    """Return positions as the bits of a hexadecimal number."""
    return f"{sum(1 << place for place in places):x}"


def main() -> None:
    """Write the file."""
    kept = {}
    torch.manual_seed(0)  # for presses with random sketches
    for text in PRESSES:
        used = model("eager" if "Observed" in text else "sdpa")
        full, cut = cached(used), cached(used, eval(text, vars(kvpress)))
        layers = range(used.config.num_hidden_layers)
        kept[text] = [[mask(places) for places in positions(used, layer, full, cut)] for layer in layers]
    made = {"kvpress": version("kvpress"), "transformers": transformers.__version__, "tokens": TOKENS, "kept": kept}
    TARGET.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
