"""The file of query statistics that TriAttention (arXiv:2604.04921) reads, measured on any model with rotary positions.

The format is that of the official code (WeianMao/triattention, ``scripts/calibrate.py``): for each layer and query head
the mean of the queries before their rotation, as complex numbers of the rotated pairs, and the mean of their lengths.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.attention_probe import LayerStep, Probe, wrap_layers
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.hf_layers import handed
from kvkeep.cache.layer import Layer
from kvkeep.cache.layer_layout import windows_of
from kvkeep.cache.rotary_probe import Rotations, rotations_for
from kvkeep.errors import InputError, UnsupportedModelError
from kvkeep.models.tokenization import Writer
from kvkeep.result_files import in_full, write_whole
from kvkeep.rotary import Rotation
from kvkeep.types import Phase


class QueryMeans(Probe):
    """Adds up the queries of one layer before their rotation, and lets the layer take its steps.

    Args:
        rotation: the layer's rotary embedding.

    Attributes:
        layer: takes the steps; another one for each text.
    """

    layer: Layer

    def __init__(self, rotation: Rotation) -> None:
        self._rotation, self._count = rotation, 0
        self._pairs = self._lengths = torch.zeros(())

    @property
    def columns(self) -> int:
        """Return the number of columns that the layer has seen."""
        return self.layer.columns

    def take(self, step: LayerStep) -> Float[Tensor, "B Hq T E"]:
        """Add the queries of whole texts to the sums, let the layer take the step, and return its output.

        Raises:
            UnsupportedModelError: the layer rotates a part of each head only.
        """
        if 2 * len(self._rotation.frequencies) != step.query.shape[-1]:
            raise UnsupportedModelError(
                f"This model rotates {2 * len(self._rotation.frequencies)} of {step.query.shape[-1]} dims of a head, "
                "which the format of TriAttention's statistics cannot say. Use triattention without a calibration."
            )
        plain = self._rotation.paired(self._rotation.undo(step.query, step.positions[:, None])).double()
        found = torch.complex(*plain.chunk(2, dim=-1))
        # the sums begin as single zeros and take their shape from the first text
        self._pairs = self._pairs + found.sum(dim=(0, 2)).cpu()
        self._lengths = self._lengths + found.abs().sum(dim=(0, 2)).cpu()
        self._count += step.query.shape[0] * step.query.shape[2]
        return step.run(self.layer)

    def entries(self) -> list[dict[str, Float[Tensor, " F"]]]:
        """Return the statistics of each query head, over all texts so far, by the official names.

        These are the real and the imaginary part of the mean query of each rotated pair, and the mean of its length.
        """
        mean, length = self._pairs / self._count, self._lengths / self._count
        return [
            {"q_mean_real": x.real.float(), "q_mean_imag": x.imag.float(), "q_abs_mean": y.float()}
            for x, y in zip(mean, length, strict=True)
        ]


@torch.inference_mode()
def statistics(writer: Writer, texts: Sequence[Int[Tensor, " _"]]) -> dict[str, Any]:
    """Run the texts through the model, and return the content of a file of query statistics.

    It has ``metadata``, and in ``stats`` an entry for each layer and query head, such as ``layer00_head00``.

    Args:
        writer: the model.
        texts: token ids of each text.

    Raises:
        UnsupportedModelError: some layer has no rotary positions, or rotates a part of each head only, which the
            official format cannot say; or kvkeep cannot undo the rotation.
    """
    model, config = writer.model, writer.model.config
    rotations = rotations_for(config, "triattention", turns=True, foresees=True)
    probes = {number: QueryMeans(_rotation(rotations, number)) for number in windows_of(config)}
    for ids in texts:
        # the probes add up over all texts, each of which needs a cache of its own
        cache = BoundedCache(config, "full", len(ids))
        cache.phase = Phase.PREFILL
        of_layer = {layer: probes[number] for number, layer in cache.bounded_layers().items()}
        for layer, probe in of_layer.items():
            probe.layer = layer
        wrap_layers(cache, of_layer.__getitem__)
        model(input_ids=ids[None].to(model.device), **handed(model, cache), use_cache=True, logits_to_keep=1)
    each = [(layer, head, entry) for layer, probe in probes.items() for head, entry in enumerate(probe.entries())]
    stats = {f"layer{layer:02d}_head{head:02d}": entry for layer, head, entry in each}
    heads = [[layer, head] for layer, head, _ in each]
    return {"metadata": _metadata(writer, len(texts), heads, rotations), "stats": stats}


def _rotation(rotations: Rotations, layer: int) -> Rotation:
    """Return the rotation of the layer of a number.

    Raises:
        UnsupportedModelError: the layer has no rotary positions.
    """
    if (rotation := rotations.get(layer)) is None:
        raise UnsupportedModelError(
            f"Layer {layer} has no rotary positions, and TriAttention's statistics are about rotated pairs. Use "
            "triattention without a calibration, or another policy."
        )
    return rotation


def _metadata(writer: Writer, texts: int, heads: list[list[int]], rotations: Rotations) -> dict[str, Any]:
    """Return the metadata that the official loader asks of a file beside the numbers.

    Args:
        writer: the model.
        texts: number of texts.
        heads: layer and query head of each entry of the file.
        rotations: the rotation of each layer.
    """
    config = writer.model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    # models whose layers differ have a dict for each kind of layer; the file has room for one
    rope = next((part for part in rope.values() if isinstance(part, dict)), rope)
    first = next(filter(None, rotations.values()))
    return {
        "num_traces": texts,
        "head_dim": 2 * len(first.frequencies),
        "dtype": writer.dtype,
        # texts were read as they are, with the full cache
        "use_chat_template": False,
        "system_prompt": "",
        "prompt_template": "",
        "kv_budget": 0,
        "attn_implementation": "sdpa",
        # pairs of neighbours (0, 1), (2, 3), … have 0, 2, … as their first dims
        "rope_style": "interleaved" if first.dims is not None and first.dims[:2] == (0, 2) else "half",
        "rope_type": rope.get("rope_type") or "default",
        "sampled_heads": heads,
    }


def save(content: dict[str, Any], path: Path) -> None:
    """Write query statistics to the file ``path``, whole or not at all; an older one is replaced.

    Raises:
        InputError: it cannot be written.
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    try:
        write_whole(in_full(path), buffer.getvalue())
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}. Give another `output`.") from error
