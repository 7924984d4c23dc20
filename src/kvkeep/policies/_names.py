"""Names of policies, refused where no package has one, before a policy is imported: that imports torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import entry_points

from kvkeep.errors import PolicyError, closest
from kvkeep.policies import ENTRY_POINT_GROUP, builtin_names

REFERENCE = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)(?::(.*))?", re.DOTALL)
"""``module:Class``, perhaps with options."""

_MOST_SHOWN = 20
"""Names that are listed beside a guess; a longer list would hide it."""


def check_name(text: str) -> None:
    """Refuse the string of a policy whose name no package has. Options are not checked, and ``module:Class`` passes.

    Raises:
        PolicyError: there is no policy of this name.
    """
    name = text.strip().partition(":")[0]
    known = [*builtin_names(), *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))]
    if name not in known and not REFERENCE.fullmatch(text.strip()):
        raise unknown(name, known)


def unknown(name: str, known: Iterable[str]) -> PolicyError:
    """Return the error for the name of a policy that is not among the known ones: it explains ``module:Class`` if the
    name looks like a path or a module, and otherwise names the closest known one.
    """
    if re.search(r"[/\\]|\w\.\w", name):  # a path, or a module without a class
        return PolicyError(
            f"Unknown policy {name!r}. A policy of your own is MODULE:CLASS, with dots between folders and "
            "without .py: my_package.my_module:MyPolicy."
        )
    return PolicyError(f"Unknown policy {name!r}.{did_you_mean(name, known)}")


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return a hint for a wrong name, to end a message with: the closest known one, if there is one, and the list of
    all if it is short or none is close.
    """
    names = list(known)
    by_lower_case = {name.lower(): name for name in names}
    close = closest(wrong.lower(), by_lower_case)
    hint = f" Did you mean {by_lower_case[close]!r}?" if close else ""
    return hint if hint and len(names) > _MOST_SHOWN else f"{hint} Known: {', '.join(names) or 'none'}."
