"""Pages of ``--help``: usage, description, examples, and the options in groups, in the width of the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvkeep.cli import console
from kvkeep.cli.examples import EXAMPLES
from kvkeep.cli.options import OUTPUT

_WIDEST = 120
_OPTIONS, _ARGUMENTS, _COMMANDS = "Options", "Arguments", "Commands"
ORDER = {_ARGUMENTS: -1, OUTPUT: 1, _OPTIONS: 2}
"""Places of groups among the others, which stand in the order of the parameters."""


def show(command: Any, ctx: Any) -> None:
    """Print the page of a command or a group."""
    screen = console.out()
    screen.width = min(screen.width, _WIDEST)
    screen.print(Text.assemble(("Usage: ", "bold"), " ".join((ctx.command_path, *pieces(command)))))
    for paragraph in (command.help or "").split("\n\n"):
        screen.print()
        screen.print(_text(paragraph))
    _show_examples(screen, examples(command, ctx.command_path.partition(" ")[2]))
    rows: dict[str, list[tuple[Text, Text]]] = {}
    for title, name, text in (*_commands(command), *parameters(command, ctx)):
        rows.setdefault(title, []).append((name, text))
    width = max((name.cell_len for found in rows.values() for name, _ in found), default=0)
    for title in sorted(rows, key=lambda title: ORDER.get(title, 0)):
        _show_section(screen, title, rows[title], width)


def pieces(command: Any) -> Iterator[str]:
    """The words after a command, as in ``[MODEL] [OPTIONS]``."""
    if hasattr(command, "commands"):
        yield "COMMAND"
    for param in command.params:
        if param.param_type_name == "argument":
            name = param.metavar or param.name.upper()
            yield name if param.required else f"[{name}]"
    yield "[OPTIONS]"


def examples(command: Any, path: str) -> Mapping[str, str]:
    """Return lines to type for a command, named without ``kvkeep``; a command of another package brings its own."""
    return EXAMPLES.get(path) or getattr(command, "examples", {})


def _show_examples(screen: Console, found: Mapping[str, str]) -> None:
    if found:
        screen.print()
        screen.print(Text("Examples", "bold"))
    for line, remark in found.items():
        screen.print(Padding(Text(f"{remark}:"), (0, 0, 0, 2), expand=False))
        screen.print(Text(f"    {line}", "cyan"), soft_wrap=True)  # so that it can be copied


def _show_section(screen: Console, title: str, rows: Iterable[tuple[Text, Text]], width: int) -> None:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, width=width)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(name, text)
    screen.print()
    screen.print(Text(title, "bold"))
    screen.print(Padding(grid, (0, 0, 0, 2), expand=False))


def _commands(command: Any) -> Iterator[tuple[str, Text, Text]]:
    """The subcommands of a group: group, name, first sentence."""
    for name, found in getattr(command, "commands", {}).items():
        if not found.hidden:
            first = (found.help or "").split("\n\n")[0]
            yield getattr(found, "rich_help_panel", None) or _COMMANDS, Text(name, "cyan"), _text(first)


def parameters(command: Any, ctx: Any) -> Iterator[tuple[str, Text, Text]]:
    """The arguments and options of a command: group, names, description."""
    for param in command.get_params(ctx):
        if getattr(param, "hidden", False):
            continue
        if param.param_type_name == "argument":
            yield _ARGUMENTS, Text(param.metavar or param.name.upper(), "cyan"), _text(param.help or "")
        else:
            panel = getattr(param, "rich_help_panel", None) or _OPTIONS
            yield panel, _names(param), _text(" ".join(filter(None, (param.help, _default(param)))))


def _names(param: Any) -> Text:
    """The names of an option: ``-p, --prompt TEXT``; long names stand below each other."""
    short = [name for name in param.opts if not name.startswith("--")]
    long = [name for name in param.opts if name.startswith("--")]
    first = f"{short[0]}, " if short else "    "
    found = Text.assemble((first + " / ".join((*long, *param.secondary_opts)), "cyan"))
    if not param.is_flag and param.metavar:
        found.append(f" {param.metavar}", "dim")
    return found


def _default(param: Any) -> str:
    """The default of an option in words; nothing for ``None``, and for flags that are off."""
    value = getattr(param, "default", None)
    if param.required:
        return "Required."
    if param.is_flag:
        return f"Default: {param.opts[0]}." if value is True else ""
    return "" if value is None or callable(value) or not getattr(param, "show_default", True) else f"Default: {value}."


def _text(paragraph: str) -> Text:
    """A paragraph with rich's marks, on one line that the terminal wraps."""
    return Text.from_markup(" ".join(textwrap.dedent(paragraph).split()), emoji=False)
