"""How a dataclass of options becomes a command.

A command is a frozen dataclass, a subclass of `CommandOptions`, and the name of a function that takes one of them. Its
docstring is the text of ``--help``, its fields are made by `option` and `argument`::

    @dataclass(frozen=True, kw_only=True)
    class ShortenOptions(CommandOptions):
        \"\"\"Shorten a text.\"\"\"

        text: str = option("The text, a UTF-8 file.", "-f", metavar="FILE")
        budget: int = option("Tokens that stay.", "-b", default="1K", read=parse_tokens)

    shorten = command(ShortenOptions, "my_package.shorten:run")

The function is imported when the command runs, so a module of options stays cheap to import.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

import typer

from kvkeep.cli.console import one_line_errors

_DESCRIPTION = "option"
"""The key of an option in the metadata of a field."""
_ATTRIBUTES = "\n\nAttributes:"
WORKERS, OUTPUT = "Workers", "Output"
"""The last groups on the pages of help."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """Describes an option of a command, or a word without a flag.

    Attributes:
        help: what it does, in one line.
        flags: names of one letter, and long names if they do not follow from the field.
        default: the value, as it would be typed, where none is given; ``...`` if one must be given.
        metavar: stands for the value on the pages of help.
        group: its heading on the pages of help.
        rare: whether only ``--help-all`` shows it.
        read: makes the value from the text and the flag; raises an `InputError`. ``None`` where typer reads the text.
        reads_none: whether `read` is called without a value, too.
        complete: proposes values for a beginning.
        least, most: the range of a number.
        name: the name of typer's parameter, if the field has another one.
        type: what typer reads, if that follows neither from the field nor from `read`.
        is_argument: whether it has no flag.
        more: other arguments of `typer.Option`.
    """

    help: str
    flags: tuple[str, ...] = ()
    default: Any = ...
    metavar: str | None = None
    group: str | None = None
    rare: bool = False
    read: Callable[[Any, str], Any] | None = None
    reads_none: bool = False
    complete: Callable[[str], list[tuple[str, str]]] | None = None
    least: int | float | None = None
    most: int | float | None = None
    name: str | None = None
    type: Any = None
    is_argument: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    def value(self, given: Any, flag: str) -> Any:
        """Return the value for what typer has read.

        Raises:
            InputError: the text is no such value.
        """
        if self.read is None or (given is None and not self.reads_none):
            return given
        return self.read(given, flag)

    def flag(self, name: str) -> str:
        """Return the long name of the option, for the name of typer's parameter."""
        return next((flag for flag in self.flags if flag.startswith("--")), f"--{name.rstrip('_').replace('_', '-')}")

    def info(self, name: str, kind: Any) -> Any:
        """Return typer's description.

        Args:
            name: of typer's parameter.
            kind: what typer reads.
        """
        shown: dict[str, Any] = {
            "help": self.help,
            "metavar": self.metavar,
            "autocompletion": self.complete,
            "min": self.least,
            "max": self.most,
            "hidden": self.rare,
            **({"rich_help_panel": self.group} if self.group else {}),
            **self.more,
        }
        if self.is_argument:
            return typer.Argument(**shown)
        flags = self.flags
        if flags and not any(flag.startswith("--") for flag in flags):
            flags = (self.flag(name), *flags)
        if not flags and (name.endswith("_") or (kind is bool and self.default is False)):
            flags = (self.flag(name),)  # otherwise typer would add --no-…
        return typer.Option(*flags, **shown)


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    """An option of a certain command.

    Attributes:
        field: the name of the field.
        name: the name of typer's parameter.
        type: what typer reads.
        option: the description.
    """

    field: str
    name: str
    type: Any
    option: Option

    def for_typer(self) -> inspect.Parameter:
        """Return the parameter of a function, as typer reads it."""
        default = inspect.Parameter.empty if self.option.default is ... else self.option.default
        annotated: Any = Annotated  # as a value, since mypy takes it for an annotation otherwise
        annotation = annotated[self.type, self.option.info(self.name, self.type)]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def option(described: Option | str, *flags: str, **changes: Any) -> Any:
    """Return the field of an option.

    Args:
        described: an option that several commands share, or what this one does.
        flags: see `Option`.
        changes: attributes of `Option`.
    """
    if flags:
        changes["flags"] = flags
    base = Option(help=described) if isinstance(described, str) else described
    found = dataclasses.replace(base, **changes)
    metadata = {_DESCRIPTION: found}
    if found.default is ...:
        return field(metadata=metadata)
    if found.read is None:
        return field(default=found.default, metadata=metadata)
    return field(default_factory=lambda: found.value(found.default, ""), metadata=metadata)


def argument(described: Option | str, **changes: Any) -> Any:
    """Return the field of a word without a flag; see `option`."""
    return option(described, is_argument=True, **changes)


DEBUG = Option(help="Show the traceback of an error.", default=False, group=OUTPUT)


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """The options of a command, read from the command line."""

    inherited_first: ClassVar[bool] = False
    """Whether pages of help show inherited options before a class's own."""
    debug: bool = option(DEBUG)

    @classmethod
    def prepare(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what typer has read, before texts become values.

        Args:
            given: the values by the names of typer's parameters.

        Raises:
            InputError: something that the command needs is not there.
        """
        return given

    def checked(self) -> CommandOptions:
        """Return the options, after all checks that concern several of them.

        Raises:
            InputError: they exclude each other, or one is missing.
        """
        return self


_O = TypeVar("_O", bound=CommandOptions)


def command(options: type[_O], run: str | Callable[[_O], str]) -> Callable[..., None]:
    """Return a command as typer takes it.

    Args:
        options: its options.
        run: ``module:function``, imported when the command runs; or what returns it for the options that were given.
    """
    parameters = list(_parameters(options))

    def work(**typed: Any) -> None:
        given = options.prepare(typed)
        values = {one.field: one.option.value(given[one.name], one.option.flag(one.name)) for one in parameters}
        asked: Any = options(**values).checked()
        module, _, function = (run if isinstance(run, str) else run(asked)).partition(":")
        getattr(import_module(module), function)(asked)

    work.__doc__ = inspect.cleandoc(options.__doc__ or "").partition(_ATTRIBUTES)[0]
    work.__name__ = options.__name__
    described = [one.for_typer() for one in parameters]
    work.__annotations__ = {one.name: one.annotation for one in described}
    work.__dict__["__signature__"] = inspect.Signature(described)
    return one_line_errors(work)


def _parameters(options: type[CommandOptions]) -> Iterator[_Parameter]:
    """Yield the options of a command in the order of its pages: words, own options, inherited ones."""
    hints = get_type_hints(options)
    fields = {one.name: one for one in dataclasses.fields(options) if _DESCRIPTION in one.metadata}
    classes = [one for one in options.__mro__ if issubclass(one, CommandOptions)]
    if options.inherited_first:
        classes = [*classes[-2::-1], CommandOptions]
    order = [name for one in classes for name in inspect.get_annotations(one) if name in fields]
    words = [name for name in fields if fields[name].metadata[_DESCRIPTION].is_argument]
    for name in dict.fromkeys((*words, *order)):
        found: Option = fields[name].metadata[_DESCRIPTION]
        kind = hints[name] if found.read is None else str if found.default not in (None, ...) else str | None
        if found.read is not None and found.default is ...:
            kind = str
        yield _Parameter(field=name, name=found.name or name, type=found.type or kind, option=found)
