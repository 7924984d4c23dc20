"""The layout of a snapshot's file: names, dtypes, and the description in the header.

A file is safetensors. Its metadata has one entry, ``kvkeep``, a JSON object: the fingerprint, and for each layer the
numbers that need no tensor. Only occupied slots are stored; a bit for each slot up to the last occupied one says which
these are. ``docs/sessions.md`` draws the layout.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.snapshot.contents import Contents
from kvkeep.snapshot.fingerprint import Fingerprint


class Parts(NamedTuple):
    """Everything that a file holds, see `kvkeep.Snapshot`."""

    contents: Contents
    fingerprint: Fingerprint
    tokens: Int[Tensor, " n"] | None
    pending: int
    note: Mapping[str, Any]


KEY = "kvkeep"
"""The entry of the metadata."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The dtypes of safetensors that a snapshot may have."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

TOKENS, OCCUPIED = "tokens", "occupied"

LAYER = re.compile(r"layers\.(\d{1,4})\.(occupied|[a-z]{1,20}(?:\.[A-Za-z0-9_]{1,60})?)")
SHARED = re.compile(r"shared\.([a-z]{1,20})")
STATE = re.compile(r"states\.(\d{1,4})\.([a-z_]{1,40})(?:\.(\d{1,4}))?")
"""Names of tensors: of a layer with slots, of the tables that layers share, and of a layer with a state."""

SCALES = ("store.key_scales", "store.value_scales")
"""Tensors that slots of codes have besides their numbers, see `kvkeep.kv.slot_codec`."""

CUT = ("store.keys", "store.values", "store.positions", *SCALES)
"""Tensors with one entry per slot, besides the policy's state."""


def is_cut(name: str, whole: Collection[str] = ()) -> bool:
    """Whether a layer's tensor has one entry per slot. State that each head has once is named in ``whole``."""
    return name in CUT or (name.startswith("state.") and name not in whole)
