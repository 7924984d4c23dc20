"""The bits of keys and values in slots: their names, and the sizes that follow. `kvkeep.kv.slot_codec` codes them.

Importing this module imports no torch: commands refuse a name, and plans count bytes, without it.
"""

from __future__ import annotations

from typing import TypeAlias

from kvkeep.errors import InputError, UnsupportedModelError

KV_BITS = {"8": (8, 8), "4": (4, 4), "k8v4": (8, 4)}
"""Bits of a key's numbers and of a value's, by the name of the setting."""

Bits: TypeAlias = tuple[int, int] | None
"""Bits of a key's numbers and of a value's, see `KV_BITS`; ``None``: both have the model's dtype."""

TRANSFORMS = EXPONENTS, NORMALS = "key_exponents", "key_normals"
"""The names of `KeyTransform.exponents` and `KeyTransform.normals` among the tensors of a store."""

MOST_EXPONENT = 15
"""The largest size of an exponent."""

HALVES = {8: 1, 4: 2}
"""Numbers in float16 that a group of channels has by number of bits: its scale, and at 4 bits its offset."""

SCALED = 4
"""Bits of the keys that have exponents and normals; keys of 8 bits do without."""


def check_bits(kv_bits: object) -> str | None:
    """Return the name in `KV_BITS` of a setting that a user gave: ``"8"``, ``"4"`` or ``"k8v4"``.

    Return ``None`` for 16 and for ``None``, which both mean the model's dtype. A number may be given as a text.

    Raises:
        InputError: there is no such setting.
    """
    if kv_bits is None or (isinstance(kv_bits, int | str) and not isinstance(kv_bits, bool)):
        name = str(kv_bits)
        if name in KV_BITS or name in ("None", "16"):
            return name if name in KV_BITS else None
    raise InputError(
        f"kv_bits={kv_bits!r:.40} is no number of bits that slots can have: give 8, 4, k8v4 (keys in 8 bits, values "
        "in 4), or 16 for the model's dtype."
    )


def transforms_keys(kv_bits: str | None) -> bool:
    """Return whether slots of these bits transform keys, and so store exponents and normals: those with keys of 4 bits.

    Args:
        kv_bits: a name of `KV_BITS`; ``None``: the model's dtype.
    """
    return kv_bits is not None and KV_BITS[kv_bits][0] == SCALED


def check_dim(dim: int, bits: int) -> None:
    """Refuse an odd head dim at 4 bits, where two numbers share a byte.

    Raises:
        UnsupportedModelError: the head dim is odd, and two numbers go into a byte.
    """
    if bits == 4 and dim % 2:
        raise UnsupportedModelError(
            f"The model's head dim is {dim}, and at 4 bits two channels share a byte. Give `kv_bits=8`, which takes "
            "every head dim."
        )


def group_size(dim: int) -> int:
    """Return how many channels share a scale: 64 or 32 if the head dim is a multiple of it, otherwise all.

    Kernels read whole vectors of a group, and of half a group at 4 bits, so no other divisor will do.
    """
    return next((size for size in (64, 32) if dim % size == 0), dim)


def n_normals(dim: int) -> int:
    """Return how many normals, and so reflections, keys of 4 bits have, see `kvkeep.kv.slot_codec.KeyTransform`.

    One if all channels are one group, whose offset takes what the reflection collects. None with several groups, each
    with an offset of its own: there reflections gained nothing (measured on gemma-3-270m).
    """
    return 1 if dim == group_size(dim) else 0


def scale_halves(dim: int, bits: int) -> int:
    """Return how many numbers in float16 a quantized vector of ``dim`` channels has beside its codes: `HALVES` for each
    group of channels.
    """
    return dim // group_size(dim) * HALVES[bits]
