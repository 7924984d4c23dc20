"""Attention over unordered slots that reports what the policy asked for.

`attend` is the implementation that the cache uses; `reference` is the definition that every implementation is
tested against.
"""

from kvkeep.attention.cpu import attend

__all__ = ["attend"]
