"""Policies by name: ``parse("h2o:recent=32")`` returns the policy, ``spec(policy)`` the string.

A preset is a name for several options: ``snapkv:late``, or ``snapkv:late,recent=32``. Files have the options, by
``spec``; what people read has the preset, by ``label``.

Built-in policies are the modules of `kvkeep.policies`. Third-party policies come from the entry-point group
``kvkeep.policies`` (name → policy class), or are named by their module and class: ``my_module:MyPolicy:recent=4``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
import types
import typing
from importlib.metadata import entry_points
from typing import Any

from kvkeep.errors import PolicyError, one_line
from kvkeep.policies import ENTRY_POINT_GROUP, builtin_names
from kvkeep.policies._names import REFERENCE, did_you_mean, unknown
from kvkeep.policies.base import Policy, kinds_of, own_options

_REFERRED: dict[type[Policy], str] = {}
"""Classes that were named by module and class → that name."""


@functools.cache
def available() -> dict[str, type[Policy]]:
    """Return all registered policies, name → class: built-in ones first, then those of other packages.

    Raises:
        PolicyError: a third-party entry point cannot be loaded, is no policy, or takes a built-in name.
    """
    found = {name: _policy_of(importlib.import_module(f"kvkeep.policies.{name}")) for name in builtin_names()}
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        if point.name in found:
            raise PolicyError(f"Entry point {point.value!r} wants the policy name {point.name!r}, which is taken.")
        try:
            cls = point.load()
        except Exception as error:  # whatever a foreign package raises while it is imported
            raise PolicyError(f"Policy {point.name!r} cannot be loaded from {point.value!r}: {error}") from error
        if not (inspect.isclass(cls) and issubclass(cls, Policy)):
            raise PolicyError(f"Entry point {point.value!r} is not a subclass of kvkeep.policies.base.Policy.")
        found[point.name] = cls
    return found


def _policy_of(module: types.ModuleType) -> type[Policy]:
    """Return the one policy class that a module of `kvkeep.policies` defines."""
    # beside it, the module may have imported bases and other policies
    (cls,) = (
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Policy) and value.__module__ == module.__name__
    )
    return cls


def name_of(policy: Policy | type[Policy]) -> str:
    """Return the registered name of a policy, or ``module:Class`` if `class_of` has found it by that.

    Raises:
        PolicyError: the class is not registered.
    """
    cls = policy if isinstance(policy, type) else type(policy)
    for name, known in available().items():
        if known is cls:
            return name
    if cls in _REFERRED:
        return _REFERRED[cls]
    raise PolicyError(f"{cls.__name__} is not registered; add an entry point in the group {ENTRY_POINT_GROUP!r}.")


def parse(text: str) -> Policy:
    """Return the policy that ``name`` or ``name:option=value,option=value`` describes; the name may be
    ``module:Class``.

    The first word after the name may be a preset instead of an option.

    Raises:
        PolicyError: unknown name or option (with the nearest known one), or a value of the wrong kind.
    """
    name, tail = split(text)
    cls = class_of(name)
    try:
        return cls(**_options(name, cls, tail))
    except PolicyError:
        raise
    except Exception as error:  # whatever a foreign class raises while it is made
        raise PolicyError(f"Policy {name!r} cannot be made: {one_line(error):.300}") from error


def split(text: str) -> tuple[str, str]:
    """Split a policy's string into its name, which may be ``module:Class``, and the text of its options, which may be
    empty. Neither is checked.
    """
    name, _, tail = text.strip().partition(":")
    # registered names first: snapkv:late, a preset, has the form of module:Class as well
    if name not in available() and (found := REFERENCE.fullmatch(text.strip())):
        return f"{found[1]}:{found[2]}", found[3] or ""
    return name, tail


def class_of(name: str) -> type[Policy]:
    """Return the policy class of a registered name, or of ``module:Class``. The module may lie in the current
    directory.

    Raises:
        PolicyError: there is no such policy, module or class, or the class is no policy.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        if name not in available():
            raise unknown(name, available())
        return available()[name]
    found: object = _import(module)
    try:
        for part in attribute.split("."):  # a class may lie within another one
            found = getattr(found, part)
    except AttributeError:
        known = [key for key, value in vars(sys.modules[module]).items() if _is_policy(value) and value is not Policy]
        raise PolicyError(f"Module {module!r} has no {attribute!r}.{did_you_mean(attribute, known)}") from None
    if not _is_policy(found):
        raise PolicyError(f"{name!r} is not a subclass of kvkeep.Policy.")
    cls = typing.cast(type[Policy], found)
    _REFERRED.setdefault(cls, name)
    return cls


def _is_policy(value: object) -> bool:
    """Return whether a value is a policy class."""
    return inspect.isclass(value) and issubclass(value, Policy)


def _import(module: str) -> types.ModuleType:
    """Import a module, found as ``python -m`` would find it, and return it.

    Raises:
        PolicyError: there is no such module, or its import fails.
    """
    before = sys.path[:]
    if not sys.flags.safe_path:
        sys.path.insert(0, "")
    try:
        importlib.invalidate_caches()  # the file may have been written after its folder was searched
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever a foreign module raises while it is imported
        # any error but that the module itself, or a package around it, was not found comes from within the module
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module}.".startswith(f"{missing}."):
            raise PolicyError(f"Module {module!r} cannot be imported: {one_line(error):.300}") from error
        hint = f" Leave out .py: {module[:-3]}." if module.endswith(".py") else did_you_mean(module, available())
        raise PolicyError(f"There is no policy and no module {module!r}.{hint}") from None
    finally:
        # what the module itself has put on the path stays
        if sys.path[:1] == [""] and sys.path[1:] == before:
            sys.path[:] = before


def _options(name: str, cls: type[Policy], tail: str) -> dict[str, Any]:
    """Return the option values in the text behind a policy's name, by name. Options that follow a preset override it.

    Raises:
        PolicyError: unknown option or preset, or a value of the wrong kind.
    """
    first, _, rest = (piece.strip() for piece in tail.partition(","))
    if first in cls.presets:
        return _given(name, cls, cls.presets[first]) | _given(name, cls, rest)
    return _given(name, cls, tail)


def _given(name: str, cls: type[Policy], tail: str) -> dict[str, Any]:
    """Return the values of options that are written ``name=value,name=value``, by name. An empty text gives none.

    Raises:
        PolicyError: unknown option, or a value of the wrong kind.
    """
    kinds = kinds_of(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    values: dict[str, object] = {}
    for item in filter(None, (part.strip() for part in tail.split(","))):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if key not in known:
            if key in cls.presets:
                raise PolicyError(f"Preset {key!r} of policy {name!r} comes first, without a value: {name}:{key},...")
            presets = [] if equals else list(cls.presets)
            kind = "option or preset" if presets else "option"
            shown = [*presets, *(option.name for option in own_options(cls))]
            raise PolicyError(f"Policy {name!r} has no {kind} {key!r}.{did_you_mean(key, shown)}")
        if not equals or not value:
            raise PolicyError(f"Option {key!r} of policy {name!r} has no value; write {name}:{key}=VALUE.")
        if key in values:
            raise PolicyError(f"Option {key!r} of policy {name!r} is given twice.")
        if key == "keep_prompt":  # elsewhere true and false are given, too
            value = {"true": "1", "false": "none"}.get(value.lower(), value)
        values[key] = _convert(value, kinds[key], f"{name}:{key}")
    return values


def spec(policy: Policy) -> str:
    """Return the name and the options of a policy as a string that `parse` turns into an equal policy.

    Options at their defaults are left out. A preset is written out, since files outlive its meaning.

    Raises:
        PolicyError: the policy's class is not registered.
    """
    name = name_of(policy)
    return f"{name}:{policy.changed}" if policy.changed else name


def label(policy: Policy | str) -> str:
    """Return a policy as people read it: with its preset if it has one, otherwise as `spec` writes it.

    Args:
        policy: the policy, or its string; one that cannot be read, of another version, is returned as it is.
    """
    if isinstance(policy, Policy):
        return _labelled(policy)
    if split(policy)[0] not in available():  # files may name modules, which are not imported for a name
        return policy
    try:
        return _labelled(parse(policy))
    except PolicyError:
        return policy


def _labelled(policy: Policy) -> str:
    """Return the label of a policy, even if its class is not registered."""
    try:
        name = name_of(policy)
    except PolicyError:  # a class that no package has registered
        return str(policy)
    return f"{name}:{policy.named}" if policy.named else name


def describe(name: str) -> str:
    """Return one line about the tokens that a policy keeps: the first line of its module's docstring, or an empty
    text.
    """
    doc = inspect.getdoc(importlib.import_module(class_of(name).__module__)) or ""
    return doc.splitlines()[0] if doc else ""


def _convert(text: str, kind: object, where: str) -> object:
    """Return an option's value, read from text as its declared type says. ``none`` is ``None`` if the option may be.

    Args:
        text: the value as a user writes it.
        kind: the declared type.
        where: names the option in messages.

    Raises:
        PolicyError: the text is no such value.
    """
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        if text.lower() == "none":
            return None
        # an option is of one type, or of one type and `None`
        (kind,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        if text not in choices:
            raise PolicyError(f"{where}={text!r} is not a choice.{did_you_mean(text, choices)}")
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise PolicyError(f"{where}={text!r} is neither true nor false.")
        return text.lower() == "true"
    if kind in (int, float):
        try:
            return int(text) if kind is int else float(text)
        except ValueError:
            article = "a whole number" if kind is int else "a number"
            raise PolicyError(f"{where}={text!r} is not {article}.") from None
    return text
