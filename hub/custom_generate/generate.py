"""Generate text in a fixed amount of KV memory: the method that transformers runs for ``custom_generate``."""

from typing import Any

from transformers import PreTrainedModel

import kvkeep
from kvkeep.cache.hf_layers import CACHE_ARGUMENTS, handed

OPTIONS = ("prefill_chunk", "layer_budget", "head_budget", "positions", "kv_bits", "pins")
"""Arguments of `kvkeep.BoundedCache` that are passed on when they are given."""


def generate(model: PreTrainedModel, *, policy: str | None = None, budget: int = 1024, **kwargs: Any) -> Any:
    """Return what ``model.generate`` returns, with a bounded cache.

    Args:
        model: a decoder of transformers. It stays attached to kvkeep's attention, and computes what it did before
            where no bounded cache is used.
        policy: which tokens stay, such as ``"h2o"`` or ``"snapkv:window=16"``; by default kvkeep's own choice.
        budget: tokens kept per layer and KV head.
        kwargs: arguments of ``generate``, and those of `kvkeep.BoundedCache` that `OPTIONS` names.

    Raises:
        kvkeep.InputError: a cache is given as well.
        kvkeep.KVKeepError: an option cannot be used, or the model cannot be attached.
    """
    if any(kwargs.get(name) is not None for name in CACHE_ARGUMENTS):
        raise kvkeep.InputError(
            "This method makes the cache itself. Leave the cache away, or call kvkeep.attach(model) and "
            "model.generate without custom_generate, with a kvkeep.BoundedCache of your own."
        )
    settings = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    settings |= {} if policy is None else {"policy": policy}
    kvkeep.attach(model)
    cache = kvkeep.BoundedCache(model.config, budget=budget, **settings)
    return model.generate(**kwargs, **handed(model, cache))
