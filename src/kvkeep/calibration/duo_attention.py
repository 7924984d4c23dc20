"""Patterns of DuoAttention (arXiv:2410.10819) as profiles.

A pattern is a folder with ``full_attention_heads.tsv``, a line for each layer with a trained number for each KV head,
and ``config.json``, which says with how many first and newest tokens the other heads were trained.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kvkeep.budget import MOST
from kvkeep.cache.layer_layout import windows_of
from kvkeep.errors import InputError
from kvkeep.head_profile import MOST_BYTES, Profile, describe
from kvkeep.result_files import as_text, in_full, parse

HEADS, CONFIG = "full_attention_heads.tsv", "config.json"

_DEFAULT = {"sink_size": 64, "recent_size": 256}
"""DuoAttention's own defaults."""


def imported(path: str, config: Any, *, name: str, sparsity: float | None = None) -> Profile:
    """Return a DuoAttention pattern, read from its file, as a profile of heads.

    Args:
        path: the file of numbers, or its folder.
        config: configuration of the model that the pattern belongs to.
        name: name of the model.
        sparsity: this share of the heads needs nothing, and the others need all of the past, as DuoAttention deploys
            its patterns; of equal heads the first need nothing. ``None``: the pattern's numbers.

    Raises:
        InputError: the file cannot be read, holds no pattern, or one of another model.
    """
    place = in_full(path)
    file = place / HEADS if place.is_dir() else place
    numbers = _numbers(file)
    heads = numbers if sparsity is None else _split(numbers, sparsity)
    layers, about = len(windows_of(config)), describe(config)
    # a configuration without KV heads has as many as query heads, and one without either cannot be compared
    if len(heads) != layers or len(heads[0]) != (about["kv_heads"] or about["query_heads"] or len(heads[0])):
        raise InputError(
            f"{file} has {len(heads)} layers of {len(heads[0])} heads, and {name} has {layers} of "
            f"{about['kv_heads'] or about['query_heads']} KV heads. Give the model that the pattern was trained for."
        )
    sizes = _sizes(file.parent / CONFIG)
    return Profile(
        model={"name": as_text(name), **about, "layers": len(heads), "kv_heads": len(heads[0])},
        heads=heads,
        least=sum(sizes.values()),
        sinks=sizes["sink_size"],
        measured={"source": "DuoAttention", "file": as_text(file.name), "sparsity": sparsity, **sizes},
    )


def _numbers(file: Path) -> tuple[tuple[float, ...], ...]:
    """Return the numbers of a pattern, limited to [0, 1] as DuoAttention limits them.

    Raises:
        InputError: the file cannot be read, or holds no table of numbers.
    """
    # bytes that are no text are no numbers either, and the error names their line
    lines = _read(file).decode("utf-8-sig", "replace").splitlines()
    rows: list[tuple[float, ...]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            if (row := _row(line)) is None:
                raise InputError(f"Line {number} of {file} is no row of numbers, so the file is no pattern of heads.")
            rows.append(row)
    if not rows or len({len(row) for row in rows}) != 1:
        raise InputError(f"{file} is no pattern of heads: it has no table with the same number of heads in each line.")
    return tuple(rows)


def _row(line: str) -> tuple[float, ...] | None:
    """Return the numbers of a line, limited to [0, 1]; ``None`` if it holds something else."""
    try:
        found = [float(word) for word in line.split()]
    except ValueError:  # a word is no number
        return None
    return None if any(map(math.isnan, found)) else tuple(min(1.0, max(0.0, value)) for value in found)


def _read(file: Path) -> bytes:
    """Return the bytes of a pattern's file.

    Raises:
        InputError: there is no such file, it cannot be read, or it is larger than any pattern.
    """
    try:
        if file.exists() and not file.is_file():  # a pipe would never end
            raise InputError(f"{file} is no file. Give the {HEADS} of a pattern, or its folder.")
        if (size := file.stat().st_size) > MOST_BYTES:
            raise InputError(f"{file} has {size} bytes, and no pattern has more than {MOST_BYTES}.")
        return file.read_bytes()
    except OSError as error:
        raise InputError(
            f"The pattern {file} cannot be read: {error.strerror}. Give a {HEADS} of DuoAttention, or its folder."
        ) from error


def _split(numbers: tuple[tuple[float, ...], ...], sparsity: float) -> tuple[tuple[float, ...], ...]:
    """Return 0 for the heads with the smallest numbers, a share ``sparsity`` of all layers' heads, 1 for the others."""
    flat = [value for row in numbers for value in row]
    # of equal numbers the first go, see `imported`
    none = set(sorted(range(len(flat)), key=lambda at: (flat[at], at))[: round(sparsity * len(flat))])
    split = [float(at not in none) for at in range(len(flat))]
    width = len(numbers[0])
    return tuple(tuple(split[at : at + width]) for at in range(0, len(flat), width))


def _sizes(file: Path) -> dict[str, int]:
    """Return ``sink_size`` and ``recent_size``: how many first and newest tokens limited heads saw in the pattern's
    training; without a file, DuoAttention's defaults.

    Raises:
        InputError: the file cannot be read, or does not hold these numbers; or both are 0.
    """
    if not file.exists():
        return dict(_DEFAULT)
    try:
        found = parse(_read(file))
        sizes = {name: found[name] for name in _DEFAULT}
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):  # of `_read`, a ValueError that says already what happened
            raise
        raise InputError(f"{file} does not say {' and '.join(_DEFAULT)} of the pattern.") from error
    # their sum is a profile's `least`, which is from 1 to MOST
    if not all(type(size) is int and 0 <= size <= MOST // 2 for size in sizes.values()) or not any(sizes.values()):
        raise InputError(f"{file} does not say {' and '.join(_DEFAULT)} of the pattern.")
    return sizes
