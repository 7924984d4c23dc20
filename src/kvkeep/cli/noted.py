"""Commands that note the words that the user gave, for the function that does the work."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from kvkeep.cli.commands import Command

_OPTIONS: ContextVar[frozenset[str]] = ContextVar("options", default=frozenset())
_WORDS: ContextVar[tuple[str, ...]] = ContextVar("words", default=())


class Noting(Command):
    """A command that notes which options were given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words, and note the options among them."""
        left = super().parse_args(ctx, args)
        sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
        _OPTIONS.set(frozenset(name for name, source in sources.items() if source and source.name != "DEFAULT"))
        return left


class Passing(Command):
    """A command that reads none of its words but ``--help`` alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Note all words."""
        alone = not args or args in (["--help"], ["-h"]) or ctx.resilient_parsing
        _WORDS.set(() if alone else tuple(args))
        return super().parse_args(ctx, (args or ["--help"]) if alone else [])


def is_given(option: str) -> bool:
    """Whether the user gave an option, by the name of its parameter."""
    return option in _OPTIONS.get()


def words() -> tuple[str, ...]:
    """The words after a command that passes them on."""
    return _WORDS.get()
