"""Eviction policies, one file each; the file's name is the policy's name.

A policy is a score: it never touches storage, attention, the model or the server. To add one, put a file into this
folder; `kvkeep.policies.registry` finds it.
"""

import ast
import pkgutil
from pathlib import Path

ENTRY_POINT_GROUP = "kvkeep.policies"
"""Where other packages name their policies."""

NO_POLICIES = ("base", "registry")
"""Modules of this package that hold no policy."""

DEFAULT = "snapkv:default"
"""The policy of caches, engines, plans and prompts for which none is named; `LATER` and `CONVERSATION` are others.

Few late rows and wide pooling find what a question at the end of a prompt asks for. Generated tokens compete with the
chosen ones, and the newest 64 stay, which long answers need. ``docs/choose-a-policy.md`` has the figures.
"""

LATER = "reread:later"
"""The policy of remembered texts, whose questions come after the text was cut to the budget.

It keeps what a second reading would look up, over the heads of all layers. ``docs/choose-a-policy.md`` has the
figures.
"""

CONVERSATION = "reread:chat"
"""The policy of conversations, in which any earlier message may be asked about in a later turn.

It is `LATER` for long answers as well: generated tokens compete, and the newest 64 stay. ``docs/server.md`` has the
figures.
"""

FALLBACK = "keydiff:later"
"""The policy that takes the place of `LATER` and `CONVERSATION` on models without rotary positions."""


def builtin_names() -> list[str]:
    """Return the names of the policies of this package in alphabetical order, without importing one."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return [name for name in modules if name not in NO_POLICIES and not name.startswith("_")]


def builtin_summary(name: str) -> str:
    """Return one line about the tokens that a built-in policy keeps, without importing the policy.

    It is the first line of the docstring in its file, which is read as text: importing a policy imports torch.
    """
    return (ast.get_docstring(builtin_source(name)) or "").partition("\n")[0]


def builtin_source(module: str) -> ast.Module:
    """Return the syntax tree of a module of this package, without importing it."""
    return ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8"))
