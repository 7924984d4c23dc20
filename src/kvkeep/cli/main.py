"""The application: its subcommands, and an entry point that shows no traceback after Ctrl-C or for closed pipes."""

from __future__ import annotations

import functools
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from types import FrameType
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.main import get_command

from kvkeep.cli import console, demo, distributed, env, lm_eval, memory, policies, usage_errors
from kvkeep.cli.calibrate import CalibrateOptions
from kvkeep.cli.chat import ChatOptions
from kvkeep.cli.eval import EvalOptions
from kvkeep.cli.explain import ExplainOptions
from kvkeep.cli.generate import GenerateOptions
from kvkeep.cli.help import Command, Group, Noting, Passing
from kvkeep.cli.options import command
from kvkeep.cli.plan import PlanOptions
from kvkeep.cli.remember import RememberOptions
from kvkeep.cli.serve import ServeOptions
from kvkeep.cli.tune import TuneOptions
from kvkeep.errors import ADDRESS, one_line
from kvkeep.version import __version__

# Commands that other packages add to ``kvkeep``, through entry points of the group ``kvkeep.commands``.
#
# The name of an entry point is the name of the command. Its object is a function with typer's annotations, a
# `typer.Typer` with subcommands, or a `Plugin` that holds one of them::
#
#     [project.entry-points."kvkeep.commands"]
#     shorten = "my_package.commands:shorten"
#
# A package is imported when its command runs, or when all commands are listed. So importing it should be cheap: no
# torch.

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
        """Return the object that typer makes of this command, with the given name and with its examples."""
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
        """Raise an error that says why the command cannot be loaded; for a shell's completions return ``args``."""
        if ctx.resilient_parsing:  # a shell asks for completions
            return args
        raise usage_errors.CommandLineError(self.callback() if self.callback else "")


class Application(Group):
    """The outermost group: the commands of kvkeep, and those that other packages add.

    A name of kvkeep's own is never looked up elsewhere: reading the entry points of all packages takes longer than
    typer needs for all commands.
    """

    @property
    def commands(self) -> MutableMapping[str, Any]:
        """Return all commands by name, in a new mapping. This imports the packages that add some."""
        return {**self._own, **{name: self._added(name) for name in self._points}}

    @commands.setter
    def commands(self, own: MutableMapping[str, Any]) -> None:  # the constructor of typer's class sets it
        self._own = own

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name, or ``None``. Of other packages only the named command is loaded."""
        if cmd_name in self._own:
            return self._own[cmd_name]
        return self._added(cmd_name) if cmd_name in self._points else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the name that the words begin with, its command, and the words after it.

        Raises:
            CommandLineError: there is no such command, or it belongs to kvkeep-lab, which is not installed.
        """
        name = args[0]
        if name in LAB_COMMANDS and not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            raise usage_errors.CommandLineError(
                f"kvkeep {name} is a command of kvkeep-lab, which is not installed: {_INSTALL_LAB}."
            )
        return super().resolve_command(ctx, args)

    @functools.cached_property
    def _points(self) -> dict[str, EntryPoint]:
        """Return the entry points of other packages' commands by name; the first for a name that several packages have.

        kvkeep's own names cannot be taken.
        """
        found: dict[str, EntryPoint] = {}
        for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
            if point.name not in self._own:
                found.setdefault(point.name, point)
        return found

    @functools.cached_property
    def _loaded(self) -> dict[str, Any]:
        """Return the mapping, empty at first, in which `_added` keeps imported commands of other packages by name."""
        return {}

    def _added(self, name: str) -> Any:
        """Return the command of another package that has this name. Its package is imported on the first call only."""
        if name not in self._loaded:
            self._loaded[name] = load(self._points[name])
        return self._loaded[name]


def load(point: EntryPoint) -> Any:
    """Return the command of an entry point. If it cannot be loaded, return one that reports this when it is called."""
    try:
        found = point.load()
        if not (isinstance(found, Plugin) or callable(found)):  # an application of typer can be called, too
            raise TypeError(f"{point.value} is no function")
        return (found if isinstance(found, Plugin) else Plugin(command=found)).build(point.name)
    except Exception as error:  # whatever a foreign package raises while it is imported
        package = point.dist.name if point.dist else point.value
        said = f"kvkeep {point.name} comes from {package} and cannot be loaded: {one_line(error)}"
        # `escape`: a help text is read as markup
        return Broken(name=point.name, callback=lambda: said, help=escape(said), rich_help_panel=OTHERS)


def _nothing() -> None:
    """Do nothing: a group needs a callback."""


# The application, and its entry point.

_WIDTHS = {"COLUMNS": 20, "LINES": 1, "JUPYTER_COLUMNS": 20, "JUPYTER_LINES": 1, "TERMINAL_WIDTH": 20}
"""Environment variables with the size of a terminal, and the smallest sizes for which rich leaves no text out."""
_ENDINGS = ("SIGTERM", "SIGHUP")  # Ctrl-C is left to Python, which raises KeyboardInterrupt

app = typer.Typer(
    name="kvkeep",
    cls=Application,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add(name: str, run: Callable[..., None], panel: str, cls: type[Command] = Command, **settings: Any) -> None:
    """Make a function a subcommand of kvkeep, in a panel of the help page; ``settings`` are of click's context."""
    app.command(name, cls=cls, rich_help_panel=panel, context_settings=settings or None)(run)


_add("demo", demo.demo, RUN)
_add("generate", command(GenerateOptions, lambda asked: asked.run), RUN)
_add("remember", command(RememberOptions, "kvkeep.cli.remember_run:serve"), RUN)
_add("chat", command(ChatOptions, lambda asked: asked.run), RUN)
_add("serve", command(ServeOptions, "kvkeep.cli.serve_run:run"), RUN, auto_envvar_prefix="KVKEEP")
_add("eval", command(EvalOptions, lambda asked: asked.run), MEASURE, Noting)
_add("lm-eval", lm_eval.lm_eval, MEASURE, Passing)
_add("tune", command(TuneOptions, "kvkeep.cli.tune_run:serve"), MEASURE)
_add("calibrate", command(CalibrateOptions, "kvkeep.cli.calibrate_run:serve"), MEASURE)
_add("explain", command(ExplainOptions, "kvkeep.cli.explain_run:serve"), LOOK)
_add("plan", command(PlanOptions, "kvkeep.cli.plan_run:serve"), LOOK)
app.add_typer(policies.app, name="policies", rich_help_panel=LOOK)
_add("memory", memory.memory, LOOK)
_add("env", env.env, LOOK)


def _print_version(value: bool) -> bool:
    """Print the version and end, if the option is given."""
    if value:
        typer.echo(f"kvkeep {__version__}")
        raise typer.Exit
    return value


@app.callback()
def kvkeep(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run any Hugging Face decoder model in a fixed amount of KV memory.

    Say how many tokens each layer and head may keep (--budget). A policy decides which tokens stay, and memory stays
    the same however long the text gets. Every command has its own page: kvkeep generate --help.
    """


def run() -> None:
    """Run the command ``kvkeep`` with the words of ``sys.argv``, and end the process with its exit code.

    Ctrl-C (exit code 130) and a standard stream that is closed or full (1) leave no traceback.
    """
    _open_closed_streams()
    _forget_odd_widths()
    _end_tidily()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" instead of failing
    try:
        try:
            with distributed.quiet_followers(sys.argv[1:]):
                app()
        finally:
            sys.stdout.flush()  # here, since a failure while Python ends would be a traceback
    except KeyboardInterrupt:
        sys.exit(console.INTERRUPTED)
    except OSError as error:
        if error.filename is not None or error.strerror is None:
            raise  # no stream: a file, which has a name, or the network
        if not isinstance(error, BrokenPipeError) and not _is_full():
            console.error(f"The system refused what this command needs: {error.strerror}.")
            sys.exit(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the last flush does not fail again
        if not isinstance(error, BrokenPipeError):
            console.error(f"Standard output cannot be written: {error.strerror}.")
        sys.exit(1)


def _is_full() -> bool:
    """Return whether standard output still holds text that it cannot write."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _forget_odd_widths() -> None:
    """Remove environment variables that give a terminal an impossible size; rich would believe them, or fail."""
    for name, smallest in _WIDTHS.items():
        size = os.environ.get(name)
        if size is not None and not (re.fullmatch("[0-9]{1,4}", size) and int(size) >= smallest):
            del os.environ[name]


def _end_tidily() -> None:
    """Make signals that end the process raise `SystemExit`, so that temporary files are removed.

    A signal that the parent process ignores stays ignored.
    """
    for name in _ENDINGS:
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    """End the process at a signal, with the exit code that shells expect."""
    sys.exit(128 + number)


def _open_closed_streams() -> None:
    """Open a standard stream that the caller has closed, so that no other file gets its number and its text.

    Reading the new standard input and writing to the new standard output fail, as with a closed stream. Text for
    standard error is dropped, since nobody could read of its failure.
    """
    for name, flags, mode in (
        ("stdin", os.O_WRONLY, "r"),
        ("stdout", os.O_RDONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, flags), mode))  # noqa: SIM115  as long as the process
