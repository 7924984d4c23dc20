"""What was kept, what was forgotten, and why: ``kvkeep.explain(...)`` records it and makes a page.

The room has the name of its function, so the module itself can be called.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """A module that is called like its function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `kvkeep.explain.explain.explain` with these arguments, and return its record."""
        from kvkeep.explain.explain import explain  # imports torch and transformers

        return explain(*args, **kwargs)


# the only way to call a module: Python looks for `__call__` in the class
sys.modules[__name__].__class__ = _Callable
