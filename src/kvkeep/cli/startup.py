"""How a command starts in a short time: imports without garbage collection."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import torch and transformers in this context without garbage collection.

    What an import makes stays, and looking through all of it again and again takes a fifth of the time. Afterwards it
    is left out of collections. If transformers has been imported or collections are off, the context changes nothing.
    """
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def imported(function: str) -> Any:
    """Import a module without garbage collection, and return the function that ``module:function`` names."""
    module, _, name = function.partition(":")
    with fast_imports():
        return getattr(import_module(module), name)
