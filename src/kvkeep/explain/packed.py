"""Tables as short texts: small numbers, compressed, in base64. ``docs/explain.md`` says how to read them."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import torch
from torch import Tensor

SHADES = 255
"""Steps of a shade."""
HELD = 255
"""Stands for a token that was not dropped."""
_ROWS = 8
"""Rows of a table that are turned into shades at a time, in float64."""
MOST_MOMENTS = 254
"""Moments that a drop can be told by in one byte."""


def moments(dropped: Tensor) -> dict[str, Any]:
    """The moments of drops, one byte each; `HELD` where there is none."""
    return _table("uint8", dropped.masked_fill(dropped < 0, HELD).to(torch.uint8))


def shades(values: Tensor) -> dict[str, Any]:
    """Numbers of 0 or more, one byte each: the square root of the share of the largest, in 255 steps."""
    most = float(values.max()) if values.numel() else 0.0
    steps = torch.empty(values.shape, dtype=torch.uint8)
    for some, to in zip(values.split(_ROWS), steps.split(_ROWS), strict=True):
        to.copy_((some.double() / (most or 1.0)).sqrt_().mul_(SHADES).round_())
    return {**_table("uint8", steps), "largest": most}


def short_floats(values: Tensor) -> dict[str, Any]:
    """Floats in bfloat16, two bytes each: three digits, and the order of any two numbers never turns round."""
    return _table("bfloat16", values.to(torch.bfloat16).view(torch.int16))


def whole_numbers(values: Tensor) -> dict[str, Any]:
    """Whole numbers, four bytes each."""
    return _table("int32", values.to(torch.int32))


def unpacked(table: dict[str, Any]) -> Tensor:
    """Return a table's numbers; the opposite of the functions above, up to their rounding."""
    data = bytearray(zlib.decompress(base64.b64decode(table["data"])))
    kinds = {"uint8": torch.uint8, "bfloat16": torch.bfloat16, "int32": torch.int32}
    flat = torch.frombuffer(data, dtype=kinds[table["type"]]) if data else torch.zeros(0)
    found = flat.view(table["shape"])
    return (found.double() / SHADES).square() * table["largest"] if "largest" in table else found


def _table(kind: str, values: Tensor) -> dict[str, Any]:
    data = zlib.compress(values.contiguous().cpu().numpy().tobytes(), 9)
    return {"type": kind, "shape": list(values.shape), "data": base64.b64encode(data).decode("ascii")}
