"""An engine's arguments from a ``kvkeep.toml``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import nn

from kvkeep.config import Config
from kvkeep.errors import InputError
from kvkeep.models.load import load_with_tokenizer

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Any]
"""The path of a ``kvkeep.toml``, or its content as a mapping."""


def configured(
    source: Source, model: nn.Module | str | os.PathLike[str] | None, options: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of an engine.

    Args:
        source: the settings.
        model: a loaded model, or the name of another one than the settings'; without either, the embedded one.
        options: further arguments of the engine, which go before the settings.

    Raises:
        InputError: the settings cannot be read, or one of them is unknown or of the wrong kind.
        KVKeepError: the model cannot be loaded, see `kvkeep.load`.
    """
    if not isinstance(source, str | os.PathLike | Mapping):
        raise InputError(f"{source!r:.80} is no configuration; give the path of a kvkeep.toml, or a mapping.")
    found = Config.of(source) if isinstance(source, Mapping) else Config.read(source)
    settings = found.settings()
    name, dtype, load_in = (settings.pop(key, None) for key in ("model", "dtype", "load_in"))
    if isinstance(model, nn.Module):
        return {"model": model, **settings, **options}
    loaded, tokenizer = load_with_tokenizer(name if model is None else model, dtype=dtype or "auto", load_in=load_in)
    return {"model": loaded, "tokenizer": tokenizer, **settings, **options}
