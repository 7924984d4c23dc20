"""Requests to the hub: whether it answers, asked before transformers retries for every file, and one never made."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import constants, get_session

from kvkeep.errors import ModelFileError

UNREACHABLE = "The hub cannot be reached"
PATIENCE_S = 2.0
"""How long the hub may take to answer; HF_HUB_ETAG_TIMEOUT, the hub's own variable, replaces it."""
_lock = threading.Lock()
_blocks = 0
"""How many blocks of `cached_if_unreachable` have switched the hub off."""


@contextmanager
def cached_if_unreachable(name: str) -> Iterator[None]:
    """Within this block only the local cache is read if the hub does not answer; files of a folder need neither.

    Raises:
        ModelFileError: the cache lacks a part of the model.
    """
    if Path(name).exists() or (not constants.HF_HUB_OFFLINE and _answers()):
        yield
        return
    change = 0 if is_forbidden() else 1
    _switch(change)
    try:
        yield
    except ModelFileError as error:
        if UNREACHABLE in str(error):
            raise
        raise ModelFileError(
            f"{UNREACHABLE}, and the local cache lacks a part of {name}, or it is damaged. Load the model once with a "
            "network, or give a local folder."
        ) from error
    finally:
        _switch(-change)


def is_forbidden() -> bool:
    """Whether the user has forbidden every request to the hub (HF_HUB_OFFLINE)."""
    return _blocks == 0 and constants.HF_HUB_OFFLINE


def _switch(change: int) -> None:
    global _blocks
    if not change:
        return
    with _lock:
        _blocks += change
        constants.HF_HUB_OFFLINE = _blocks > 0


def _answers() -> bool:
    """Whether the hub answers at all, with an error or not.

    A thread asks, since a search for the hub's address has no time limit of its own.
    """
    patience = PATIENCE_S
    with suppress(KeyError, ValueError):
        patience = float(os.environ["HF_HUB_ETAG_TIMEOUT"])
    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # whatever a client, a proxy or a resolver raises
            get_session().head(constants.ENDPOINT, timeout=patience)
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience)
    return answered.is_set()


@contextmanager
def no_conversion_service() -> Iterator[None]:
    """Keep transformers from asking a public service to convert weights that are not safetensors."""
    key = "DISABLE_SAFETENSORS_CONVERSION"
    before = os.environ.get(key)
    os.environ[key] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before
