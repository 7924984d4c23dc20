"""What transformers does by itself and a user did not ask for: talking, and asking a service on the network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log and progress bars for a while; errors of kvkeep say what matters."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


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
