"""kvkeep runs any Hugging Face decoder model in a fixed amount of KV memory.

model = kvkeep.attach(AutoModelForCausalLM.from_pretrained(name))
cache = kvkeep.BoundedCache(model.config, policy="h2o", budget=1024)
model.generate(**inputs, past_key_values=cache)
"""

from kvkeep.budget import from_ratio as budget_from_ratio
from kvkeep.cache import BoundedCache
from kvkeep.errors import (
    BudgetError,
    CapacityError,
    InputError,
    KVKeepError,
    ModelFileError,
    PolicyError,
    ShapeError,
    UnsupportedModelError,
    UnsupportedOperationError,
)
from kvkeep.layer import Layer
from kvkeep.memory import Memory
from kvkeep.models.hf import attach
from kvkeep.policies.base import Policy, option
from kvkeep.registry import available as policies
from kvkeep.registry import parse, spec
from kvkeep.statistic import Mass, Nothing, Statistic
from kvkeep.types import AttentionOptions, Budget, Phase, Report, State, View
from kvkeep.version import __version__

__all__ = [
    "AttentionOptions",
    "BoundedCache",
    "Budget",
    "BudgetError",
    "CapacityError",
    "InputError",
    "KVKeepError",
    "Layer",
    "Mass",
    "Memory",
    "ModelFileError",
    "Nothing",
    "Phase",
    "Policy",
    "PolicyError",
    "Report",
    "ShapeError",
    "State",
    "Statistic",
    "UnsupportedModelError",
    "UnsupportedOperationError",
    "View",
    "__version__",
    "attach",
    "budget_from_ratio",
    "option",
    "parse",
    "policies",
    "spec",
]
