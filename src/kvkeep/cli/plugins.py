"""Commands that other packages add to ``kvkeep``, through entry points of the group ``kvkeep.commands``.

The name of an entry point is the name of the command. Its object is a function with typer's annotations, a
`typer.Typer` with subcommands, or a `Plugin` that holds one of them::

    [project.entry-points."kvkeep.commands"]
    shorten = "my_package.commands:shorten"

A package is imported when its command runs, or when all commands are listed. So importing it should be cheap: no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from rich.markup import escape
from typer.main import get_command

from kvkeep.cli import usage_errors
from kvkeep.cli.help import Command, Group
from kvkeep.errors import ADDRESS, one_line

ENTRY_POINT_GROUP = "kvkeep.commands"

LAB_COMMANDS = ("analyze", "bench-server", "fleet", "theory")
"""Commands of kvkeep-lab. Without it they are missing, and say where they are."""
_INSTALL_LAB = f"pip install '{ADDRESS}#subdirectory=lab', or pip install ./lab in a clone"

RUN, MEASURE, LOOK, OTHERS = "Run", "Measure", "Look up", "Of other packages"
"""Groups of commands on the page of ``kvkeep --help``."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A command of another package, and how the pages of help show it.

    Attributes:
        command: a function with typer's annotations, or an application with subcommands.
        panel: the group of commands that it stands in.
        examples: a line to type → what it does.
        cls: the class of a command that is a function.
    """

    command: Callable[..., Any] | typer.Typer
    panel: str = OTHERS
    examples: Mapping[str, str] = field(default_factory=dict)
    cls: type[Command] = Command

    def build(self, name: str) -> Any:
        """Return the command under its name, as typer makes it."""
        holder = typer.Typer(add_completion=False, callback=_nothing)  # with a callback it stays a group
        if isinstance(self.command, typer.Typer):
            holder.add_typer(self.command, name=name, rich_help_panel=self.panel)
        else:
            holder.command(name, cls=self.cls, rich_help_panel=self.panel)(self.command)
        made: Any = getattr(get_command(holder), "commands", {})[name]
        made.examples = dict(self.examples)
        return made


class Broken(Command):
    """Stands for a command that cannot be loaded, so that the others still work."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Say why the command cannot be loaded."""
        if ctx.resilient_parsing:
            return args
        raise usage_errors.CommandLineError(self.callback() if self.callback else "")


class Application(Group):
    """The outermost group: the commands of kvkeep, and those that other packages add.

    A name of kvkeep's own is never looked up elsewhere: reading the entry points of all packages takes longer than
    typer needs for all commands.
    """

    @property
    def commands(self) -> MutableMapping[str, Any]:
        """Return all commands by name. This loads the commands of other packages."""
        return {**self._own, **{name: self._added(name) for name in self._points}}

    @commands.setter
    def commands(self, own: MutableMapping[str, Any]) -> None:
        self._own = own

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name, or ``None``; of other packages only that one's is loaded."""
        if cmd_name in self._own:
            return self._own[cmd_name]
        return self._added(cmd_name) if cmd_name in self._points else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the subcommand."""
        name = args[0]
        if name in LAB_COMMANDS and not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            raise usage_errors.CommandLineError(
                f"kvkeep {name} is a command of kvkeep-lab, which is not installed: {_INSTALL_LAB}."
            )
        return super().resolve_command(ctx, args)

    @functools.cached_property
    def _points(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
            if point.name not in self._own:
                found.setdefault(point.name, point)
        return found

    @functools.cached_property
    def _loaded(self) -> dict[str, Any]:
        return {}

    def _added(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = load(self._points[name])
        return self._loaded[name]


def load(point: EntryPoint) -> Any:
    """Return the command of an entry point. If it cannot be loaded, the command says so when it is called."""
    try:
        found = point.load()
        plugin = found if isinstance(found, Plugin) else Plugin(command=found)
        if not callable(plugin.command):
            raise TypeError(f"{point.value} is no function")
        return plugin.build(point.name)
    except Exception as error:  # whatever a foreign package raises while it is imported
        package = point.dist.name if point.dist else point.value
        said = f"kvkeep {point.name} comes from {package} and cannot be loaded: {one_line(error)}"
        return Broken(name=point.name, callback=lambda: said, help=escape(said), rich_help_panel=OTHERS)


def _nothing() -> None:
    """Do nothing: a group needs a callback."""
