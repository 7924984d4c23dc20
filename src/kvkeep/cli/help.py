"""The classes of commands and groups: mistakes are one line with a remedy, and pages of help are ours."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from kvkeep.cli import console, usage_errors
from kvkeep.cli.options import OUTPUT, WORKERS
from kvkeep.cli.shell_completion import joined_words

# An example or more for every command: a line to type, and what it does.

EXAMPLES: dict[str, dict[str, str]] = {
    "": {
        "kvkeep demo": "See it work; nothing is downloaded",
        'kvkeep generate -p "Once upon a time" --budget 64': "Continue a text with the embedded model in 64 tokens",
        "kvkeep generate MODEL -f report.txt --budget 1024": "The same with your model: a folder, or a hub name",
        "kvkeep chat MODEL": "Talk with it; the conversation is saved",
        "kvkeep plan MODEL --memory 24GiB --budget 1024": "How many rows of it fit into a memory",
    },
    "demo": {
        "kvkeep demo": "Show both scenes",
        "kvkeep demo --seed 5": "Another story and another question",
    },
    "generate": {
        'kvkeep generate -p "Once upon a time" --budget 64': "Continue a text with the embedded model in 64 tokens",
        "kvkeep generate MODEL -f report.txt --policy snapkv": "Your model, a prompt from a file, another policy",
        'kvkeep generate MODEL -p "Hello" --system "Be brief."': "A chat model with a system message",
        "kvkeep generate MODEL -f report.txt -b 1024 --compare": "Beside the full cache",
        "cat report.txt | kvkeep generate MODEL -": "A prompt from standard input",
        "kvkeep generate --memory report.kvkeep -p Why": "A question about a text that was read before",
        "kvkeep generate --config kvkeep.toml -f report.txt": "With the settings that kvkeep tune has found",
        "kvkeep generate MODEL -i prompts.jsonl -o answers.jsonl": "A batch job that resumes after a stop",
    },
    "remember": {
        "kvkeep remember MODEL -f report.txt -o report.kvkeep": "Read a text once, to ask about it later",
        "kvkeep remember -f report.txt -o b.kvkeep --budget 4K": "In 4096 tokens of the embedded model",
    },
    "chat": {
        "kvkeep chat MODEL": "Begin a conversation",
        "kvkeep chat MODEL --session trip": "Continue one, or begin it under this name",
        "kvkeep chat --memory report.kvkeep": "Talk about a text that was read before",
        "kvkeep chat --list": "List the saved ones",
    },
    "serve": {
        "kvkeep serve MODEL --budget 2048 --kv-memory 8GiB": "Answer OpenAI's API at http://127.0.0.1:8000/v1",
        "kvkeep serve MODEL --host 0.0.0.0 --key-file keys": "For others, who need one of these keys",
        "kvkeep serve --config server.toml --check": "Check a file of settings",
    },
    "eval": {
        "kvkeep eval MODEL -o results": "Measure four policies at four budgets",
        "kvkeep eval --tasks recall --limit 5 -o results": "A first look at the embedded model",
        "kvkeep eval --report results": "Show the table and draw the plots again",
    },
    "lm-eval": {
        "kvkeep lm-eval -M kvkeep -t arc_easy -a budget=20%": "A task, scored under eviction",
        "kvkeep lm-eval ls tasks": "List its tasks",
    },
    "tune": {
        "kvkeep tune MODEL --text report.txt": "For questions that come after the text was cut",
        "kvkeep tune MODEL --text report.txt --case stream": "For text that goes on",
        "kvkeep tune MODEL --questions mine.jsonl --target 0.95": "For your own questions",
        "kvkeep generate --config tuned/kvkeep.toml -f report.txt": "Use what was found",
    },
    "calibrate": {
        "kvkeep calibrate MODEL --text report.txt -o heads.json": "Measure which heads need the far past",
    },
    "explain": {
        "kvkeep explain -f report.txt -p Why -o page.html": "A page about the embedded model and three policies",
        "kvkeep explain MODEL -f report.txt -p Why --terminal": "Your model, and the text in the terminal",
        "kvkeep explain -f report.txt -p Why --plots pictures": "Strips and maps for a paper, as PNG files",
    },
    "plan": {
        "kvkeep plan MODEL --memory 24GiB --budget 1024": "How many rows fit",
        "kvkeep plan MODEL -b 20% --bandwidth 100GB/s": "How fast they can be at most",
    },
    "policies": {
        "kvkeep policies": "List all policies",
        "kvkeep policies show h2o": "Options, source and known bad cases of one",
    },
    "policies list": {"kvkeep policies --json": "All policies, for programs"},
    "policies show": {"kvkeep policies show h2o": "Options, source and known bad cases"},
    "memory": {
        "kvkeep memory report.kvkeep": "Model, policy, size, and what each layer holds",
        "kvkeep memory report.kvkeep --json": "The positions of every head, for programs",
    },
    "env": {"kvkeep env": "Print it for a bug report", "kvkeep env --json": "For programs"},
}
"""Command without ``kvkeep`` → line → remark. MODEL stands for a folder or a hub name."""


# Pages of ``--help``: usage, description, examples, and the options in groups, in the width of the terminal.

_WIDEST = 120
_MOST_EXAMPLES = 3
"""Examples on a page that does not show everything."""
_OPTIONS, _ARGUMENTS, _COMMANDS = "Options", "Arguments", "Commands"
ORDER = {_ARGUMENTS: -1, WORKERS: 1, OUTPUT: 2, _OPTIONS: 3}
"""Places of groups among the others, which stand in the order of the parameters."""


ALL = "--help-all"
"""Shows the options that few people need, too."""


def show(command: Any, ctx: Any, *, everything: bool = False) -> None:
    """Print the page of help of a command or a group, at most `_WIDEST` columns wide.

    Args:
        command: the command.
        ctx: its context.
        everything: whether options that few people need are shown, too.
    """
    screen = console.out()
    screen.width = min(screen.width, _WIDEST)
    screen.print(Text.assemble(("Usage: ", "bold"), " ".join((ctx.command_path, *pieces(command)))))
    for paragraph in (command.help or "").split("\n\n"):
        screen.print()
        screen.print(_text(paragraph))
    lines = list(examples(command, ctx.command_path.partition(" ")[2]).items())
    _show_examples(screen, lines if everything else lines[:_MOST_EXAMPLES])
    rows: dict[str, list[tuple[Text, Text]]] = {}
    for title, name, text in (*_commands(command), *parameters(command, ctx, everything=everything)):
        rows.setdefault(title, []).append((name, text))
    width = max((name.cell_len for group in rows.values() for name, _ in group), default=0)
    for title in sorted(rows, key=lambda title: ORDER.get(title, 0)):
        _show_section(screen, title, rows[title], width)


def pieces(command: Any) -> Iterator[str]:
    """Yield the words that follow a command in its usage line, as in ``[MODEL] [OPTIONS]``."""
    if hasattr(command, "commands"):
        yield "COMMAND"
    for param in command.params:
        if param.param_type_name == "argument":
            name = param.metavar or param.name.upper()
            yield name if param.required else f"[{name}]"
    yield "[OPTIONS]"


def examples(command: Any, path: str) -> Mapping[str, str]:
    """Return lines to type → what they do, for a command whose name without ``kvkeep`` is ``path``; perhaps none.

    A command of another package brings its own.
    """
    return EXAMPLES.get(path) or getattr(command, "examples", {})


def _show_examples(screen: Console, lines: Sequence[tuple[str, str]]) -> None:
    """Print example commands (line, remark), each on a line that can be copied; nothing if there are none."""
    if lines:
        screen.print()
        screen.print(Text("Examples", "bold"))
    for line, remark in lines:
        screen.print(Padding(Text(f"{remark}:"), (0, 0, 0, 2), expand=False))
        screen.print(Text(f"    {line}", "cyan"), soft_wrap=True)  # so that it can be copied


def _show_section(screen: Console, title: str, rows: Iterable[tuple[Text, Text]], width: int) -> None:
    """Print a part of a help page under its title: names in a column of ``width`` characters, texts right of it."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, width=width)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(name, text)
    screen.print()
    screen.print(Text(title, "bold"))
    screen.print(Padding(grid, (0, 0, 0, 2), expand=False))


def _commands(command: Any) -> Iterator[tuple[str, Text, Text]]:
    """Yield the subcommands that are not hidden: the title that each stands under, name, first paragraph."""
    for name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            first = (child.help or "").split("\n\n")[0]
            yield getattr(child, "rich_help_panel", None) or _COMMANDS, Text(name, "cyan"), _text(first)


def parameters(command: Any, ctx: Any, *, everything: bool = False) -> Iterator[tuple[str, Text, Text]]:
    """Yield the arguments and options of a command: the title that each stands under, names, description.

    Args:
        command: the command.
        ctx: its context.
        everything: whether options that few people need are among them.
    """
    params = command.get_params(ctx)
    if not everything and any(getattr(param, "hidden", False) for param in params):
        yield _OPTIONS, Text(f"    {ALL}", "cyan"), Text("Show all options and examples.")
    for param in params:
        if getattr(param, "hidden", False) and not everything:
            continue
        if param.param_type_name == "argument":
            yield _ARGUMENTS, Text(param.metavar or param.name.upper(), "cyan"), _text(param.help or "")
        else:
            panel = getattr(param, "rich_help_panel", None) or _OPTIONS
            yield panel, _names(param), _text(" ".join(filter(None, (param.help, _default(param)))))


def _names(param: Any) -> Text:
    """Return the names of an option and its metavar: ``-p, --prompt TEXT``. Long names are joined with slashes."""
    short = [name for name in param.opts if not name.startswith("--")]
    long = [name for name in param.opts if name.startswith("--")]
    first = f"{short[0]}, " if short else "    "
    found = Text.assemble((first + " / ".join((*long, *param.secondary_opts)), "cyan"))
    if not param.is_flag and param.metavar:
        found.append(f" {param.metavar}", "dim")
    return found


def _default(param: Any) -> str:
    """Return ``Default: …`` or ``Required.`` for an option; empty for ``None``, hidden defaults, flags that are off."""
    value = getattr(param, "default", None)
    if param.required:
        return "Required."
    if param.is_flag:
        return f"Default: {param.opts[0]}." if value is True else ""
    return "" if value is None or callable(value) or not getattr(param, "show_default", True) else f"Default: {value}."


def _text(paragraph: str) -> Text:
    """Return a paragraph with rich's markup as text on one line, which the terminal wraps."""
    return Text.from_markup(" ".join(textwrap.dedent(paragraph).split()), emoji=False)


_INSTALL = "--install-completion"
NAME = "kvkeep"
"""The command, also where it runs as ``python -m kvkeep``."""


class Command(TyperCommand):
    """A command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command, and return those that are left; mistakes are explained.

        ``--help`` and ``--help-all`` win over whatever is wrong with the others.
        """
        if "--help" in args and not ctx.resilient_parsing:
            args = ["--help"]  # whatever else is still missing or wrong
        if ALL in args and not ctx.resilient_parsing:
            show(self, ctx, everything=True)
            ctx.exit()
        with usage_errors.explained(ctx, tuple(args)):
            if not ctx.resilient_parsing:
                usage_errors.check(ctx, args, group=False)
            return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the command's page."""
        show(self, ctx)


class Group(TyperGroup):
    """Commands under one name; the outermost is the application."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options up to the subcommand, and return the other words. Mistakes are explained."""
        with usage_errors.explained(ctx, tuple(args)):
            if not ctx.resilient_parsing:
                usage_errors.check(ctx, args, group=True)
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the name that the words begin with, its subcommand, and the words after it.

        Raises:
            CommandLineError: there is no such command.
        """
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            raise usage_errors.CommandLineError(usage_errors.unknown_command(self, ctx, args))
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the group's page."""
        show(self, ctx)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line and end the process, with exit code 2 after a mistake.

        With ``standalone_mode=False`` return what the command returns, and let errors pass. The program is always
        called `NAME`.
        """

        def work() -> Any:
            return super(Group, self).main(
                args, NAME, complete_var, standalone_mode=False, windows_expand_args=windows_expand_args, **extra
            )

        if not standalone_mode:
            return work()
        try:
            with joined_words():
                code = work()
        except usage_errors.CommandLineError as error:
            console.error(str(error))
            sys.exit(console.BAD_INPUT)
        except usage_errors.UsageError as error:
            if said := getattr(error, "message", ""):  # otherwise help was shown for want of words
                console.error(f"{said} See {NAME} --help.")
            sys.exit(getattr(error, "exit_code", console.BAD_INPUT))
        except typer.Abort:
            sys.exit(1)
        except OSError as error:
            if _INSTALL not in (sys.argv if args is None else args) or error.filename is None:
                raise
            console.error(f"{error.filename} cannot be used: {error.strerror}. kvkeep --show-completion prints it all.")
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


# Commands that note the words that the user gave, for the function that does the work.

_GIVEN_OPTIONS: ContextVar[frozenset[str]] = ContextVar("options", default=frozenset())
_WORDS: ContextVar[tuple[str, ...]] = ContextVar("words", default=())


class Noting(Command):
    """A command that notes which options were given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words, and store which options the user has given, see `is_given`."""
        left = super().parse_args(ctx, args)
        sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
        _GIVEN_OPTIONS.set(frozenset(name for name, source in sources.items() if source and source.name != "DEFAULT"))
        return left


class Passing(Command):
    """A command that reads none of its words but ``--help`` alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Store all words for `words`, and parse none of them but a lone ``--help``."""
        alone = not args or args in (["--help"], ["-h"]) or ctx.resilient_parsing
        _WORDS.set(() if alone else tuple(args))
        return super().parse_args(ctx, (args or ["--help"]) if alone else [])


def is_given(option: str) -> bool:
    """Return whether the user gave an option of a `Noting` command in any way, by the name of its parameter."""
    return option in _GIVEN_OPTIONS.get()


def words() -> tuple[str, ...]:
    """Return the words after the `Passing` command that runs; ``()`` for another command."""
    return _WORDS.get()
