"""Completions for shells: names of policies and their options, models that are at hand, and words of other options.

Only options of a policy import torch; everything else answers at once.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

Completion = tuple[str, str]
"""A word and a remark on it."""

_WORDS, _NUMBER = "COMP_WORDS", "COMP_CWORD"
_REMARK = 60
_BREAKS = (":", "=")
"""Characters at which bash ends a word, though they belong to it."""


def policies(incomplete: str) -> list[Completion]:
    """Return completions of a policy's name, or after a colon of its options with their values."""
    name, colon, tail = incomplete.partition(":")
    return (
        _options(name, tail) if colon else [(policy, "") for policy in _policy_names() if policy.startswith(incomplete)]
    )


def policy_list(incomplete: str) -> list[Completion]:
    """Return completions of a comma-separated list of policies: the whole list, with its last policy completed."""
    items = incomplete.split(",")
    starts = [len(items) - 1]
    with_options = [i for i, item in enumerate(items[:-1]) if ":" in item]
    if with_options and all("=" in item for item in items[with_options[-1] : -1]):
        starts.append(with_options[-1])  # the comma may stand between two options of that policy
    found = []
    for start in starts:
        before = "".join(f"{item}," for item in items[:start])
        found += [(before + word, remark) for word, remark in policies(",".join(items[start:]))]
    return found


def models(incomplete: str) -> list[Completion]:
    """Return completions of a model: GGUF files and folders with a model near the typed path, and cached hub models.

    Folders are those in the typed folder, and one level below.
    """
    typed = Path(incomplete) if incomplete.endswith("/") or not incomplete else Path(incomplete).parent
    found: list[Completion] = []
    with contextlib.suppress(OSError):  # there is no such folder: nothing to propose
        inside = sorted(typed.expanduser().iterdir())
        found += [(_as_typed(path, incomplete), "GGUF file") for path in inside if path.suffix == ".gguf"]
        for path in (folder for top in inside if top.is_dir() for folder in (top, *_folders(top))):
            if (path / "config.json").is_file():
                found.append((_as_typed(path, incomplete), "folder"))
    found += [(name, "in the local cache") for name in _cached_models()]
    return [(name, remark) for name, remark in found if name.startswith(incomplete)]


def snapshots(incomplete: str) -> list[Completion]:
    """Return completions of a snapshot's file: saved memories in the typed folder, and folders to go on in."""
    typed = Path(incomplete) if incomplete.endswith("/") or not incomplete else Path(incomplete).parent
    found: list[Completion] = []
    with contextlib.suppress(OSError):  # there is no such folder: nothing to propose
        for path in sorted(typed.expanduser().iterdir()):
            if path.suffix == ".kvkeep" or (path.is_dir() and not path.name.startswith(".")):
                found.append((_as_typed(path, incomplete) + "/" * path.is_dir(), ""))
    return [(name, remark) for name, remark in found if name.startswith(incomplete)]


def words(*known: str) -> Callable[[str], list[Completion]]:
    """Return a function that completes a word from a fixed list."""

    def complete(incomplete: str) -> list[Completion]:
        return [(word, "") for word in known if word.startswith(incomplete)]

    return complete


@contextlib.contextmanager
def joined_words() -> Iterator[None]:
    """Join the words that bash has split at colons and equals signs, and print completions as bash expects them.

    The words are in environment variables, which are changed. For other shells, or without completion, do nothing.
    Bash replaces only what follows the last of these characters.
    """
    number = os.environ.get(_NUMBER, "")
    if os.environ.get("_KVKEEP_COMPLETE") != "complete_bash" or _WORDS not in os.environ or not number.isdecimal():
        yield
        return
    joined = _join(os.environ[_WORDS].split("\n")[: int(number) + 1])
    os.environ[_WORDS], os.environ[_NUMBER] = "\n".join(joined), str(len(joined) - 1)
    current = joined[-1]
    cut = max(current.rfind(character) for character in _BREAKS) + 1
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            yield
    finally:
        for line in said.getvalue().splitlines():
            sys.stdout.write(f"{line[cut:] if line.startswith(current[:cut]) else line}\n")


def _join(given: list[str]) -> list[str]:
    """Return the words of a command line with those joined that the shell broke at characters such as ``:`` and
    ``=``.
    """
    joined: list[str] = []
    broken = False
    for word in given:
        is_break = word != "" and not word.strip("".join(_BREAKS))
        if joined and (is_break or (broken and word)):  # an empty word is a new one, after a space
            joined[-1] += word
        else:
            joined.append(word)
        broken = is_break
    return joined


def _policy_names() -> list[str]:
    """Return the names of all policies, without importing one."""
    from kvkeep.policies import ENTRY_POINT_GROUP, builtin_names

    return [*builtin_names(), *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))]


def _options(name: str, tail: str) -> list[Completion]:
    """Return completions ``name:preset`` of a policy's presets, and ``name:option=value`` of options not yet given."""
    import dataclasses

    from kvkeep.errors import PolicyError
    from kvkeep.policies.registry import class_of

    try:
        cls = class_of(name)
    except PolicyError:
        return []
    fields = dataclasses.fields(cls)
    done, comma, part = tail.rpartition(",")
    given = re.findall(r"(\w+)=", done)
    found = [(f"{name}:{preset}", _short(meaning)) for preset, meaning in cls.presets.items()]
    for field in fields:
        if field.name in given or not field.name.startswith(part.partition("=")[0]):
            continue
        for value in _values(str(field.type), field.default):
            found.append((f"{name}:{done}{comma}{field.name}={value}", _short(str(field.metadata.get("help", "")))))
    return [completion for completion in found if completion[0].startswith(f"{name}:{tail}")]


def _values(kind: str, default: object) -> list[str]:
    """Return the values to propose for an option: all of a choice or a switch, otherwise its default, ``""`` for none.

    Args:
        kind: the option's annotation, as text.
        default: its default.
    """
    if "Literal" in kind:
        return re.findall(r"['\"]([^'\"]+)['\"]", kind)
    if isinstance(default, bool):
        return ["true", "false"]
    return ["" if default is None else str(default)]


def _short(remark: str) -> str:
    """Return a remark, cut to `_REMARK` characters so that it fits beside its word: shells take no line breaks."""
    return remark if len(remark) <= _REMARK else f"{remark[: _REMARK - 1].rstrip()}…"


def _folders(path: Path) -> list[Path]:
    """Return the folders in a folder; none if it cannot be read."""
    with contextlib.suppress(OSError):  # a folder of somebody else
        return [entry for entry in sorted(path.iterdir()) if entry.is_dir()]
    return []


def _as_typed(path: Path, incomplete: str) -> str:
    """Return a path with ``~/`` or ``./`` in front if the user has begun to write it so."""
    if incomplete.startswith("~"):
        with contextlib.suppress(ValueError, RuntimeError):  # somebody else's home, or the user has none
            return f"~/{path.relative_to(Path.home())}"
    return f"./{path}" if incomplete.startswith("./") else str(path)


def _cached_models() -> list[str]:
    """Return the hub names of the models in the local cache, sorted."""
    # the places that huggingface_hub knows, without its import
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or home) / "hub"
    return sorted(path.name.removeprefix("models--").replace("--", "/") for path in Path(cache).glob("models--*"))
