"""``kvkeep policies`` lists the eviction policies, and ``kvkeep policies show NAME`` tells all about one."""

from __future__ import annotations

import ast
import importlib
import inspect
import types
import typing
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvkeep.cli import console, shell_completion
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.help import Command, Group
from kvkeep.cli.options import Json
from kvkeep.cli.startup import fast_imports
from kvkeep.policies import (
    CONVERSATION,
    DEFAULT,
    ENTRY_POINT_GROUP,
    FALLBACK,
    LATER,
    builtin_names,
    builtin_source,
    builtin_summary,
)
from kvkeep.policies._names import check_name

_SECTIONS = ("Source", "Differs", "Fails when")

STARTS = {
    "a prompt that ends with its question, an answer up to its length (the default)": DEFAULT,
    "a stream without end, of which the recent part matters": "streaming_llm",
    "a text that is asked about later": LATER,
    "a conversation": CONVERSATION,
}
"""Purpose → the policy to start from."""

KINDS = {
    "choose at the end of a prompt": ("snapkv", "adakv", "pyramidkv", "nacl", "restkv", "defensivekv", "blend"),
    "follow the attention of the newest tokens": ("tova", "topk", "ahakv", "rkv", "vase"),
    "add up attention": ("h2o", "h2o_avg", "keyformer", "scissorhands", "scissorhands_release", "spatten"),
    "guess what later tokens will attend to": ("reread", "expected_attention", "triattention"),
    "look at keys alone": ("leverage", "keydiff", "knorm"),
    "look at positions alone": ("streaming_llm", "local", "sparse_fixed", "sparse_strided"),
    "to compare with": ("full", "topk_dynamic", "random"),
}
"""What policies decide by → their names. Policies of other packages are listed last."""


_ROLES = {
    DEFAULT: ", the default of prompts",
    LATER: ", the default of remembered texts, whose questions come later",
    CONVERSATION: ", the default of conversations",
    FALLBACK: ", the default of conversations and remembered texts on models without rotary positions",
}
"""Policies that commands take where none is named."""


class _ListByDefault(Group):
    """A group whose default subcommand is ``list``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; with ``list`` before them if there are none, or the first is an option (not ``--help``)."""
        asked = ctx.resilient_parsing  # a shell asks for completions
        written = bool(args) and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if asked or written else ["list", *args])


app = typer.Typer(cls=_ListByDefault, help="List the eviction policies (also without a subcommand), or show one.")


@app.command("list", cls=Command)
@one_line_errors
def list_policies(json: Json = False) -> None:
    """List the eviction policies: four to start from, then each with a line on what it keeps."""
    lines = _summaries()
    if json:
        starts = [{"purpose": purpose, "policy": policy} for purpose, policy in STARTS.items()]
        entries = [{"name": name, "summary": line} for name, line in lines.items()]
        console.write_json({"start": starts, "policies": entries})
        return
    screen = console.out()
    screen.print(Text("to start from", "bold"))
    for purpose, policy in STARTS.items():
        screen.print(Text(f"{purpose}:"))
        screen.print(Text(f"  --policy {policy}", "cyan"), soft_wrap=True)
    width = max(map(len, lines))
    for kind, names in _by_kind(lines).items():
        screen.print(Text(f"\n{kind}", "bold"))
        screen.print(Padding(_lines({name: lines[name] for name in names}, width), (0, 0, 0, 2)))
    screen.print(Text("\nkvkeep policies show NAME: options, source, known bad cases", "dim"))


def _summaries() -> dict[str, str]:
    """Return all policies: name → a line on what it keeps. Torch is imported only if other packages have some."""
    if not entry_points(group=ENTRY_POINT_GROUP):
        return {name: builtin_summary(name) for name in builtin_names()}
    with fast_imports():
        from kvkeep.policies.registry import available, describe

        return {name: describe(name) for name in available()}


def _by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """Return policies' names by their kind in `KINDS`, in its order, then those of other packages.

    A kind without names is left out.
    """
    known = {name for group in KINDS.values() for name in group}
    groups = {kind: [name for name in group if name in names] for kind, group in KINDS.items()}
    groups["of other packages"] = [name for name in names if name not in known]
    return {kind: group for kind, group in groups.items() if group}


def _lines(lines: dict[str, str], width: int) -> Table:
    """Return a table with a row for each name and its line, the names in a column of at least the given width."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, min_width=width)
    grid.add_column(overflow="fold")
    for name, line in lines.items():
        grid.add_row(name, console.printable(line))
    return grid


@app.command("show", cls=Command)
@one_line_errors
def show_policy(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of the policy, perhaps with a preset or options, e.g. snapkv:default.",
            metavar="NAME",
            autocompletion=shell_completion.policies,
        ),
    ],
    json: Json = False,
) -> None:
    """Show what a policy keeps, its source, its options and its BibTeX entry."""
    entry = _describe_builtin(name) or _describe_asked(name)
    if json:
        console.write_json(entry)
    else:
        _print(entry)


def _describe_builtin(text: str) -> dict[str, Any] | None:
    """Return what the page of a policy of this package shows, as plain data, without an import of torch.

    Args:
        text: its name, perhaps with a preset (``snapkv:default``); for other options and other packages' policies
            return ``None``.
    """
    name, colon, preset = text.partition(":")
    if name not in builtin_names():
        return None
    entry = _describe_source(name)
    if not colon:
        return entry
    options = entry["presets"].get(preset)
    return None if options is None else {**entry, "asked": {"name": text, "options": options}}


def label_of(text: str) -> str:
    """Return a policy's string as people read it: with the name of a preset in place of that preset's options.

    Return another string as it is. Policies of other packages import torch.
    """
    name, _, options = text.partition(":")
    if name not in builtin_names():
        with fast_imports():
            from kvkeep.policies.registry import label
        return label(text)
    kept = [option for option in options.split(",") if option.startswith("keep_prompt=")]
    meant = {*options.split(",")} - {*kept}
    for preset, spec in _describe_source(name)["presets"].items():
        if {*spec.partition(":")[2].split(",")} == meant:
            return ",".join([f"{name}:{preset}", *kept])
    return text


def _describe_asked(text: str) -> dict[str, Any]:
    """Return what the page of a policy shows, as plain data, with the options that were asked for. This imports torch.

    Raises:
        PolicyError: there is no such policy, or an option is wrong.
    """
    check_name(text)
    with fast_imports():
        from kvkeep.policies.registry import class_of, label, parse, spec, split

        asked = parse(text)  # an unknown name gets a suggestion, a wrong option its reason
    kind, options = split(text)
    entry = _describe(kind, class_of(kind))
    if options.strip():
        entry["asked"] = {"name": label(asked), "options": spec(asked)}
    return entry


def _describe_source(name: str) -> dict[str, Any]:
    """Return a policy's docstring, options, presets and BibTeX entry as plain data, for a policy of this package.

    Its file is read as text, since importing it imports torch.
    """
    source = builtin_source(name)
    (kind,) = (part.name for part in source.body if isinstance(part, ast.ClassDef))
    summary, sections = _split(ast.get_docstring(source) or "")
    found = _attributes(source, kind)
    presets = {preset: f"{name}:{text}" for preset, text in found.pop("presets", {}).items()}
    bibtex = found.pop("bibtex", "")
    return {
        "name": name,
        "summary": summary,
        **sections,
        "options": [*found.values()],
        "presets": presets,
        "bibtex": bibtex,
    }


def _attributes(source: ast.Module, kind: str) -> dict[str, Any]:
    """Return the options of a class in a policy's file by name, those of its bases first; also its presets and BibTeX.

    Return an empty mapping for a class of another package.
    """
    for part in source.body:
        if isinstance(part, ast.ImportFrom) and kind in {name.name for name in part.names}:
            package, _, module = (part.module or "").rpartition(".")
            return _attributes(builtin_source(module), kind) if package == "kvkeep.policies" else {}
    (own,) = (part for part in source.body if isinstance(part, ast.ClassDef) and part.name == kind)
    found: dict[str, Any] = {}
    for base in reversed(own.bases):
        found |= _attributes(source, ast.unparse(base)) if isinstance(base, ast.Name) else {}
    for part in own.body:
        if not isinstance(part, ast.AnnAssign) or part.value is None:
            continue
        name, value = ast.unparse(part.target), part.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "option":
            default, text = (_value(argument) for argument in value.args)
            found[name] = {"name": name, "type": _show_type(_value(part.annotation)), "default": default, "help": text}
        elif name in {"presets", "bibtex"} and isinstance(value, ast.Attribute):  # another policy's
            found[name] = _attributes(source, ast.unparse(value.value))[name]
        elif name in {"presets", "bibtex"}:
            found[name] = _value(value)
    return found


def _value(expression: ast.expr) -> Any:
    """Return the value of an expression of a policy's file: a plain value, an arithmetic one such as 7 / 19, a type."""
    return eval(ast.unparse(expression), {"Literal": Literal})  # text of this package alone: nothing foreign runs


def _describe(name: str, cls: type[Any]) -> dict[str, Any]:
    """Return a policy's docstring, options, presets and BibTeX entry as plain data, from its class.

    The docstring is that of its module, or else of the class.
    """
    with fast_imports():
        from kvkeep.policies.base import own_options

    summary, sections = _split(inspect.getdoc(importlib.import_module(cls.__module__)) or inspect.getdoc(cls) or "")
    kinds = typing.get_type_hints(cls)
    options = [
        {
            "name": field.name,
            "type": _show_type(kinds[field.name]),
            "default": field.default,
            "help": field.metadata.get("help", ""),
        }
        for field in own_options(cls)
    ]
    presets = {preset: f"{name}:{text}" for preset, text in cls.presets.items()}
    return {"name": name, "summary": summary, **sections, "options": options, "presets": presets, "bibtex": cls.bibtex}


def _split(doc: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's first line, and its paragraphs that begin with a word of `_SECTIONS`, by that word.

    The word is in small letters, with underscores; each paragraph is one line.
    """
    first, *rest = doc.splitlines() or [""]
    sections: dict[str, str] = {}
    key = None
    for line in rest:
        word, colon, tail = line.partition(":")
        if colon and word in _SECTIONS:
            key = word.lower().replace(" ", "_")
            sections[key] = tail.strip()
        elif not line.strip():
            key = None
        elif key is not None:
            sections[key] += f" {line.strip()}"
    return first, sections


def _show_type(kind: Any) -> str:
    """Return in words how the values of an annotation are written: ``integer or none``, ``mean or max``."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(_show_type(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    names = {int: "integer", float: "number", bool: "true or false", str: "text", types.NoneType: "none"}
    return names.get(kind, str(kind))


def _print(entry: dict[str, Any]) -> None:
    """Print a policy's page: what it does, its source, its options and its BibTeX entry."""
    screen = console.out()
    screen.print(Text.assemble((entry["name"], "bold"), "  ", entry["summary"]))
    screen.print()
    if asked := entry.get("asked"):
        short = "" if asked["name"] == asked["options"] else f"{asked['name']} stands for "
        screen.print(Text(f"{short}{asked['options']}{_ROLES.get(asked['name'], '')}", "bold"), soft_wrap=True)
        screen.print()
    sections = {title: entry.get(title.lower().replace(" ", "_")) for title in _SECTIONS}
    screen.print(console.facts({title: body for title, body in sections.items() if body}))
    screen.print()
    _print_options(entry)
    if entry["bibtex"]:
        screen.print()
        screen.print(entry["bibtex"], soft_wrap=True)


def _print_options(entry: dict[str, Any]) -> None:
    """Print the table of a policy's options, its presets and an example; without options only that there are none."""
    screen = console.out()
    if not entry["options"]:
        screen.print("No options.")
        return
    options = console.table("option", "values", "default", "")
    for option in entry["options"]:
        options.add_row(option["name"], option["type"], _show_value(option["default"]), option["help"])
    screen.print(options)
    example = entry["options"][0]["name"]
    screen.print()
    for preset, meaning in entry["presets"].items():
        screen.print(Text(f"preset: {entry['name']}:{preset} is {meaning}"))
    screen.print(Text(f"use: --policy {entry['name']}:{example}=VALUE", "dim"))


def _show_value(value: object) -> str:
    """Return an option's value as users write it: ``true`` for ``True``, ``none`` for ``None``."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
