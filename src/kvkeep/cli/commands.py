"""The classes of commands and groups: mistakes are one line with a remedy, and pages of help are ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvkeep.cli import console, pages, usage
from kvkeep.cli.complete import joined_words

_INSTALL = "--install-completion"
NAME = "kvkeep"
"""The command, also where it runs as ``python -m kvkeep``."""


class Command(TyperCommand):
    """A command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words after the command."""
        if "--help" in args and not ctx.resilient_parsing:
            args = ["--help"]  # whatever else is still missing or wrong
        with usage.explained(ctx, tuple(args)):
            if not ctx.resilient_parsing:
                usage.check(ctx, args, group=False)
            return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the command's page."""
        pages.show(self, ctx)


class Group(TyperGroup):
    """Commands under one name; the outermost is the application."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words up to the subcommand."""
        with usage.explained(ctx, tuple(args)):
            if not ctx.resilient_parsing:
                usage.check(ctx, args, group=True)
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the subcommand."""
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            raise usage.CommandLineError(usage.unknown_command(self, ctx, args))
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the group's page."""
        pages.show(self, ctx)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line and end the process, with exit code 2 after a mistake."""

        def work() -> Any:
            return super(Group, self).main(
                args, NAME, complete_var, standalone_mode=False, windows_expand_args=windows_expand_args, **extra
            )

        if not standalone_mode:
            return work()
        try:
            with joined_words():
                code = work()
        except usage.CommandLineError as error:
            console.error(str(error))
            sys.exit(console.BAD_INPUT)
        except usage.UsageError as error:
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
