"""kvkeep runs any Hugging Face decoder model in a fixed amount of KV memory.

    model, tokenizer = kvkeep.load(name)
    cache = kvkeep.BoundedCache(model.config, budget=1024)
    model.generate(**inputs, past_key_values=cache)

Names are loaded when they are first used, so that ``kvkeep --version`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvkeep.version import __version__

if TYPE_CHECKING:
    from kvkeep.attention_stats import Mass, Nothing, Statistic
    from kvkeep.budget import from_ratio as budget_from_ratio
    from kvkeep.cache.bounded_cache import BoundedCache
    from kvkeep.cache.layer import Layer
    from kvkeep.engine.engine import Engine
    from kvkeep.engine.request import Event, Request, Result
    from kvkeep.engine.sampling_params import SamplingParams
    from kvkeep.errors import (
        BrokenCacheError,
        BudgetError,
        CapacityError,
        InputError,
        KVKeepError,
        ModelFileError,
        PolicyError,
        ShapeError,
        SnapshotError,
        UnsupportedModelError,
        UnsupportedOperationError,
    )
    from kvkeep.explain.explain import explain
    from kvkeep.models.attention import attach
    from kvkeep.models.compile import compile_layers
    from kvkeep.models.load import load_with_tokenizer as load
    from kvkeep.models.packed_weights import pack_weights
    from kvkeep.models.prepare import fuse_modules
    from kvkeep.policies.base import Policy, option
    from kvkeep.policies.registry import available as available_policies
    from kvkeep.policies.registry import parse, spec
    from kvkeep.snapshot.snapshot import Snapshot
    from kvkeep.types import AttentionOptions, Budget, MemoryUsage, Report, State, View

_HOME = {
    "AttentionOptions": "types:AttentionOptions",
    "BoundedCache": "cache.bounded_cache:BoundedCache",
    "BrokenCacheError": "errors:BrokenCacheError",
    "Budget": "types:Budget",
    "BudgetError": "errors:BudgetError",
    "CapacityError": "errors:CapacityError",
    "Engine": "engine.engine:Engine",
    "Event": "engine.request:Event",
    "InputError": "errors:InputError",
    "KVKeepError": "errors:KVKeepError",
    "Layer": "cache.layer:Layer",
    "Mass": "attention_stats:Mass",
    "MemoryUsage": "types:MemoryUsage",
    "ModelFileError": "errors:ModelFileError",
    "Nothing": "attention_stats:Nothing",
    "Policy": "policies.base:Policy",
    "PolicyError": "errors:PolicyError",
    "Report": "types:Report",
    "Request": "engine.request:Request",
    "Result": "engine.request:Result",
    "SamplingParams": "engine.sampling_params:SamplingParams",
    "ShapeError": "errors:ShapeError",
    "Snapshot": "snapshot.snapshot:Snapshot",
    "SnapshotError": "errors:SnapshotError",
    "State": "types:State",
    "Statistic": "attention_stats:Statistic",
    "UnsupportedModelError": "errors:UnsupportedModelError",
    "UnsupportedOperationError": "errors:UnsupportedOperationError",
    "View": "types:View",
    "attach": "models.attention:attach",
    "budget_from_ratio": "budget:from_ratio",
    "compile_layers": "models.compile:compile_layers",
    "explain": "explain.explain:explain",
    "fuse_modules": "models.prepare:fuse_modules",
    "load": "models.load:load_with_tokenizer",
    "option": "policies.base:option",
    "pack_weights": "models.packed_weights:pack_weights",
    "parse": "policies.registry:parse",
    "available_policies": "policies.registry:available",
    "spec": "policies.registry:spec",
}
"""Public name → where it lives."""

__all__ = [
    "AttentionOptions",
    "BoundedCache",
    "BrokenCacheError",
    "Budget",
    "BudgetError",
    "CapacityError",
    "Engine",
    "Event",
    "InputError",
    "KVKeepError",
    "Layer",
    "Mass",
    "MemoryUsage",
    "ModelFileError",
    "Nothing",
    "Policy",
    "PolicyError",
    "Report",
    "Request",
    "Result",
    "SamplingParams",
    "ShapeError",
    "Snapshot",
    "SnapshotError",
    "State",
    "Statistic",
    "UnsupportedModelError",
    "UnsupportedOperationError",
    "View",
    "__version__",
    "attach",
    "available_policies",
    "budget_from_ratio",
    "compile_layers",
    "explain",
    "fuse_modules",
    "load",
    "option",
    "pack_weights",
    "parse",
    "spec",
]


def __getattr__(name: str) -> object:
    """Import the module of a public name when the name is first used, and return what it stands for."""
    name = "SamplingParams" if name == "Sampling" else name  # what scripts called it before 0.1.0
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    # setdefault: importing kvkeep.explain has put the package itself here, which can be called; it stays
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    """Return all public names, those that are not loaded yet included."""
    return __all__
