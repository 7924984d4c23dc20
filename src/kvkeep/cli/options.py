"""Options of commands: how a dataclass of them becomes a command, and those that several commands share."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_type_hints

import typer

from kvkeep import parameters
from kvkeep.cli import shell_completion
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.files import not_empty, refuse_device
from kvkeep.cli.startup import fast_imports, imported
from kvkeep.cli.usage_errors import CommandLineError, exists, quoted
from kvkeep.errors import BudgetError, InputError
from kvkeep.kv_bits import check_bits
from kvkeep.models import folder, threads
from kvkeep.models.dtype_names import check_dtype
from kvkeep.parameters import MAX_TOKENS, MEMORY, Parameter
from kvkeep.policies import CONVERSATION, DEFAULT, LATER
from kvkeep.policies._names import check_name
from kvkeep.result_files import in_full, parse

# How a dataclass of options becomes a command.
#
# A command is a frozen dataclass, a subclass of `CommandOptions`, and the name of a function that takes one of them.
# Its docstring is the text of ``--help``, its fields are made by `option` and `argument`::
#
#     @dataclass(frozen=True, kw_only=True)
#     class ShortenOptions(CommandOptions):
#         """Shorten a text."""
#
#         text: str = option("The text, a UTF-8 file.", "-f", metavar="FILE")
#         budget: int = option("Tokens that stay.", "-b", default="1K", read=parse_tokens)
#
#     shorten = command(ShortenOptions, "my_package.shorten:run")
#
# The function is imported when the command runs, so a module of options stays cheap to import.

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
        """Return the option's value for what typer has read, which is the same where no `read` makes it.

        Args:
            given: what typer has read; ``None`` if nothing was given.
            flag: the option's name, for messages.

        Raises:
            InputError: the text is no such value.
        """
        if self.read is None or (given is None and not self.reads_none):
            return given
        return self.read(given, flag)

    def flag(self, name: str) -> str:
        """Return the option's long name: the one that it was given, else ``--`` and the name of typer's parameter."""
        # a field may end with an underscore, since its name would be that of a built-in
        return next((flag for flag in self.flags if flag.startswith("--")), f"--{name.rstrip('_').replace('_', '-')}")

    def info(self, name: str, kind: Any) -> Any:
        """Return the option as typer describes it: a `typer.Option` or `typer.Argument` with its flags and its help.

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
            "hidden": self.rare,  # our pages show hidden options with --help-all
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
        """Return the option as a keyword parameter of a function, with an annotation that typer reads."""
        default = inspect.Parameter.empty if self.option.default is ... else self.option.default
        annotated: Any = Annotated  # as a value, since mypy takes it for an annotation otherwise
        annotation = annotated[self.type, self.option.info(self.name, self.type)]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def option(described: Option | str, *flags: str, **changes: Any) -> Any:
    """Return a field of a dataclass that describes an option of a command.

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
    # a default is written as a user would type it, and read in the same way
    return field(default_factory=lambda: found.value(found.default, ""), metadata=metadata)


def argument(described: Option | str, **changes: Any) -> Any:
    """Return a field of a dataclass that describes a word without a flag; see `option`."""
    return option(described, is_argument=True, **changes)


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """The options of a command, read from the command line."""

    inherited_first: ClassVar[bool] = False
    """Whether pages of help show inherited options before a class's own."""

    @classmethod
    def prepare(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what typer has read, before texts become values; unchanged by default.

        A command overrides this to check or add to it.

        Args:
            given: the values by the names of typer's parameters.

        Raises:
            InputError: in a command that overrides this: something that the command needs is missing.
        """
        return given

    def checked(self) -> CommandOptions:
        """Return the options, after checks that concern several options; unchanged by default.

        A command with such checks overrides this.

        Raises:
            InputError: in a command that overrides this: options exclude each other, or an option is missing.
        """
        return self

    def check_values(self) -> None:
        """Refuse values of the checked options for which transformers need not be imported, which takes seconds.

        By default nothing is refused. What needs torch comes after what does not.

        Raises:
            KVKeepError: in a command that overrides this: a value cannot be used.
        """


_O = TypeVar("_O", bound=CommandOptions)


def command(options: type[_O], run: str | Callable[[_O], str]) -> Callable[..., None]:
    """Return a command as typer takes it: a function of its options that checks them, and runs what ``run`` names.

    Args:
        options: the class of its options.
        run: ``module:function``, imported when the command runs; or what returns it for the options that were given.
    """
    parameters = list(_parameters(options))

    def work(**typed: Any) -> None:
        given = with_gguf(options.prepare(typed))
        values = {
            parameter.field: parameter.option.value(given[parameter.name], parameter.option.flag(parameter.name))
            for parameter in parameters
        }
        asked: Any = options(**values).checked()
        with fast_imports():
            asked.check_values()
        imported(run if isinstance(run, str) else run(asked))(asked)

    work.__doc__ = inspect.cleandoc(options.__doc__ or "").partition(_ATTRIBUTES)[0]
    work.__name__ = options.__name__
    described = [parameter.for_typer() for parameter in parameters]
    work.__annotations__ = {parameter.name: parameter.annotation for parameter in described}
    work.__dict__["__signature__"] = inspect.Signature(described)  # typer reads it in place of **typed
    return one_line_errors(work)


def _parameters(options: type[CommandOptions]) -> Iterator[_Parameter]:
    """Yield the options of a command in the order of its pages: words without flags, own options, inherited ones.

    Inherited ones come before its own where the class says so.
    """
    hints = get_type_hints(options)
    fields = {entry.name: entry for entry in dataclasses.fields(options) if _DESCRIPTION in entry.metadata}
    classes = [cls for cls in options.__mro__ if issubclass(cls, CommandOptions)]
    if options.inherited_first:
        classes.reverse()
    order = [name for cls in classes for name in inspect.get_annotations(cls) if name in fields]
    words = [name for name in fields if fields[name].metadata[_DESCRIPTION].is_argument]
    for name in dict.fromkeys((*words, *order)):
        found: Option = fields[name].metadata[_DESCRIPTION]
        # `read` gets a text from typer, and `None` only where that is the default
        kind = hints[name] if found.read is None else str if found.default not in (None, ...) else str | None
        if found.read is not None and found.default is ...:
            kind = str
        yield _Parameter(field=name, name=found.name or name, type=found.type or kind, option=found)


# Options that several commands share.

_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_MAX_BYTES = 2**63 - 1  # torch counts bytes in 64 bits
_BYTES: dict[str, int] = {
    "B": 1,
    **{f"{prefix}B": 1000**power for prefix, power in (("k", 1), ("K", 1), ("M", 2), ("G", 3), ("T", 4))},
    **{f"{prefix}iB": 1024**power for prefix, power in (("K", 1), ("M", 2), ("G", 3), ("T", 4))},
}


def given(model: str | None) -> str | None:
    """Return the name of a model as it is, after a check that it is neither empty nor a text of several words.

    ``None`` is returned as it is. An empty name would come from a variable that a script has not set.

    Raises:
        CommandLineError: the name is a text of several words, and no path.
        typer.BadParameter: the name is empty.
    """
    if model is not None and not model.strip():
        raise typer.BadParameter("it is empty; leave it out for the embedded model")
    if model is None or not any(letter.isspace() for letter in model) or exists(model) or _is_path(model):
        return model
    raise CommandLineError(f"A text of several words is no model. Did you mean kvkeep generate -p {quoted(model)}?")


def with_gguf(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what typer has read, with the file of ``--gguf`` as a part of the model's name; unchanged without one.

    Raises:
        InputError: the file's name is empty.
    """
    file, model = given.get("gguf"), given.get("model")
    if file is None:
        return given
    if not file.strip():
        raise InputError("--gguf is empty. Give the name of a file, or leave it out.")
    if model is None:
        return {**given, "model": file}
    return {**given, "model": folder.with_gguf_file(model, file)}


def _is_path(name: str) -> bool:
    """Return whether a text looks like a path, or a hub name. Nothing is looked up."""
    # a text with a slash, such as "Now and/or later?", mostly ends like a sentence
    return name.startswith((".", "/", "~")) or ("/" in name and not name.endswith((".", "?", "!")))


def parse_tokens(text: str, option: str) -> int:
    """Return the number of tokens that a text means: ``1024``, ``4K`` (4 × 1024), ``4k`` (4 × 1000), ``1M``, ``1.5k``.

    0 and numbers below it pass.

    Raises:
        InputError: the text is not a whole number, or the number is larger than any position.
    """
    digits, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    try:
        number = int(digits) * unit if digits.lstrip("+-").isdecimal() else float(digits) * unit
        tokens = int(number)
    except (ValueError, OverflowError):  # no number, "nan", "inf": two unequal ones are refused below
        tokens, number = 0, 0.5
    if tokens != number:
        raise InputError(f"{option} {text!r} is not a whole number of tokens; write e.g. 1024, 4K (4096) or 4k (4000).")
    if tokens > MAX_TOKENS:
        raise InputError(f"{option} {text} is larger than {MAX_TOKENS}, the last position there is.")
    return tokens


def parse_number(text: str, option: str) -> float:
    """Return the number that a text means; ``nan`` and ``inf`` pass.

    Raises:
        InputError: the text is not a number.
    """
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{option}: {text!r} is not a number.") from None


def parse_share(text: str, option: str, *, why: str) -> float:
    """Return the share between 0 and 1, both excluded, that a text means: ``0.9`` or ``90%``.

    Args:
        text: the number or percentage.
        option: the option's name.
        why: a sentence for the error, on why there is no share of 1.

    Raises:
        InputError: the text is no such share.
    """
    number = parse_number(text[:-1], option) / 100 if text.endswith("%") else parse_number(text, option)
    if not 0 < number < 1:
        raise InputError(f"{option} {text} is not a share between 0 and 1, such as 0.9 or 90%. {why}")
    return number


def parse_kept_tokens(text: str, option: str) -> int:
    """Return the number of tokens, 1 or more, that the text of a budget means; see `parse_tokens`.

    Raises:
        InputError: the text is no number of tokens.
        BudgetError: the number is below 1.
    """
    tokens = parse_tokens(text, option)
    if tokens < 1:
        raise BudgetError(f"{option} {text} keeps no token; the smallest budget is 1.")
    return tokens


def parse_budget(text: str, option: str) -> float | int:
    """Return the budget that a text means: ``20%`` becomes the keep ratio 0.2, a number of tokens an int.

    Raises:
        InputError: the text is neither a share nor a number of tokens.
        BudgetError: the share is outside 0 … 100 %, or the number is below 1.
    """
    if not text.endswith("%"):
        return parse_kept_tokens(text, option)
    percent = parse_number(text[:-1], option)
    if not 0 < percent <= 100:
        raise BudgetError(f"{option} {text} is outside 0 … 100%. It is the share of the text's tokens that stay.")
    return percent / 100


def parse_bytes(text: str, option: str, *, example: str = "24GiB (2^30 each) or 24GB (10^9 each)") -> int:
    """Return the number of bytes that a text with a unit means: ``24GiB``, ``24 GB``, ``512MiB``.

    Args:
        text: the text.
        option: the option's name, for messages.
        example: what to write instead, for messages.

    Raises:
        InputError: the text is not a number with a unit, or the size is not above 0 or is larger than any machine.
    """
    found = re.fullmatch(r"\s*([+-]?[0-9]*\.?[0-9]+)\s*([kKMGT]?i?B)\s*", text)
    if found is None or found[2] not in _BYTES:
        raise InputError(f"{option} {text!r} is not a size with a unit; write e.g. {example}.")
    number = float(found[1]) * _BYTES[found[2]]
    if number > _MAX_BYTES:
        raise InputError(f"{option} {text} is more than any machine has, 2^63 bytes; write e.g. {example}.")
    size = round(number)
    if size < 1:
        raise InputError(f"{option} {text} is not above 0; write e.g. {example}.")
    return size


def parse_layer_budget(text: str, option: str = "--layer-budget") -> str | list[float]:
    """Return the value of ``--layer-budget``: a rule as it is, or a weight per layer from a file of persistence
    ratios.

    Raises:
        InputError: there is no such rule, or the file cannot be read or holds no persistence ratios.
        BudgetError: the rule's parameter is out of range.
    """
    from kvkeep.budget import RULES, calibrated, per_layer  # imports torch

    name, _, file = text.partition(":")
    if name in RULES:
        per_layer(text, budget=1, layers=1)  # checks the parameter
        return text
    if name != "calibrated":
        raise InputError(
            f"{option} {text!r} is no rule; use uniform, ramp:0.2, pyramid:20, taper:0.5, sliding:0.25 or "
            "calibrated:FILE."
        )
    refuse_device(file, "file of ratios")
    try:
        content = parse(in_full(file).read_bytes())
        numbers = [float(ratio) for ratio in _persistence(content)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{option} {text}: {file or 'no file'} is no JSON list of persistence ratios by layer ({error})."
        ) from error
    if not all(0.0 <= number <= 1.0 for number in numbers):
        raise InputError(f"{option} {text}: a persistence ratio is a share from 0 to 1.")
    return calibrated(numbers)


def parse_layer_weights(text: str, option: str) -> str | tuple[float, ...]:
    """Return the value of ``--layer-budget`` like `parse_layer_budget`, with weights as a tuple, which can be a key."""
    found = parse_layer_budget(text, option)
    return tuple(found) if isinstance(found, list) else found


def _persistence(content: Any) -> list[Any]:
    """Return ratios by layer from a list, an object with a list, or ``kvkeep analyze``'s ``persistence.json``.

    They are not checked. Other content raises a `KeyError`, `TypeError` or `ValueError`.
    """
    if not isinstance(content, dict):
        return list(content)
    if content.get("name") != "persistence":
        return list(content["persistence"])
    found = content["result"]
    ratios = found["by_prefix"][str(found["read"])]["ratio"]
    return [1.0 if ratio is None else ratio for ratio in ratios]  # where nothing mattered late, nothing was missed


def parse_positions(text: str, option: str) -> Literal["true", "slot"]:
    """Return the value of ``--positions``, checked.

    Raises:
        InputError: there is no such mode.
    """
    if text not in ("true", "slot"):
        raise InputError(f"{option} {text!r} is not a mode; use true or slot.")
    return cast(Literal["true", "slot"], text)


def parse_chunk(text: str, option: str) -> int:
    """Return the number of tokens, 1 or more, that the text of a chunk means; see `parse_tokens`.

    Raises:
        InputError: the text is not a whole number of 1 or more.
    """
    tokens = parse_tokens(text, option)
    if tokens < 1:
        raise InputError(f"{option} {text} takes no token; give 1 or more, or leave the option out.")
    return tokens


def parse_kv_bits(text: str, option: str) -> str:
    """Return the value of ``--kv-bits`` by its one name; ``"16"`` stays, so that it differs from no value.

    Raises:
        InputError: slots cannot have so many bits.
    """
    return check_bits(text) or "16"


def parse_head_budget(text: str, option: str) -> str:
    """Return the value of ``--head-budget`` as it is, after a check; a profile's file is read for that.

    Raises:
        BudgetError: there is no such rule, or its number is out of range.
        InputError: the profile cannot be read.
    """
    from kvkeep.head_profile import Profile
    from kvkeep.policies._head_budgets import PROFILE, parsed  # imports torch

    if parsed(text)[0] == PROFILE:
        Profile.load(text.partition(":")[2])
    return text


def parse_keep_prompt(text: str, option: str) -> bool | float:
    """Return the value of ``--keep-prompt``: true, false or a share.

    Raises:
        InputError: the text is none of them, or the share is out of range.
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        share = float(text)
    except ValueError:
        share = 0.0  # refused below
    if not parameters.KEEP_PROMPT.allows(share) or share != share:  # not NaN either
        raise InputError(
            f"{option} {text!r:.60} is neither true nor false nor a share; give true for the whole prompt, or a number "
            "above 0 and at most 1 such as 0.5: the prompt is cut to half of the budget, and stays."
        )
    return share


def parse_system(text: str, option: str) -> str:
    """Return a system message as it is, after a check.

    Raises:
        InputError: the text is empty, or only white space.
    """
    return not_empty(text, option, "Leave it out, or give some text.")


def items(text: str, option: str) -> list[str]:
    """Return the items of a list with commas, without white space around them; empty ones are left out.

    Raises:
        InputError: no item is left.
    """
    found = list(filter(None, (item.strip() for item in text.split(","))))
    if not found:
        raise InputError(f"{option} is an empty list; leave it out for the default.")
    return found


def parse_budgets(text: str | None, option: str) -> tuple[float | int, ...]:
    """Return the budgets of a list with commas, shares as floats and tokens as ints; ``()`` for ``None``.

    Raises:
        InputError: the list is empty, or an item is neither a share nor a number of tokens.
        BudgetError: an item is out of range.
    """
    return () if text is None else tuple(parse_budget(item, option) for item in items(text, option))


def parse_repetition_detection(text: str, option: str) -> bool | Mapping[str, int]:
    """Return the rule by which a repetitive text ends: name → number, as in ``name=8,other=3``.

    Return ``True`` and ``False`` for ``on`` and ``off``. Names and ranges are not checked.

    Raises:
        InputError: the text is no rule.
    """
    if text in ("on", "off"):
        return text == "on"
    pairs = [item.partition("=")[::2] for item in items(text, option)]
    if not all(name.strip() and value.strip().isdecimal() for name, value in pairs):
        raise InputError(
            f"{option} {text!r:.80} is no rule; give on, off, or numbers such as "
            f"{','.join(f'{name}={value}' for name, value in parameters.REPETITION_RULE.items())}."
        )
    # Python refuses numbers of thousands of digits; 20 are out of range as well, and are refused by name
    return {name.strip(): int(value.strip()[:20]) for name, value in pairs}


def parse_switch(text: str, option: str) -> bool:
    """Return whether an option is ``on``.

    Raises:
        InputError: the text is neither ``on`` nor ``off``.
    """
    if text not in ("on", "off"):
        raise InputError(f"{option}={text!r:.40} is neither on nor off.")
    return text == "on"


def described(parameter: Parameter, **changes: Any) -> Option:
    """Return the option of a command that a parameter of the library becomes.

    Args:
        parameter: what it is.
        changes: what a command line has besides, see `Option`.
    """
    if parameter.words:
        changes.setdefault("complete", shell_completion.words(*parameter.words))
    shown = {"metavar": parameter.metavar, "group": parameter.group, "rare": parameter.rare}
    return Option(**{"help": parameter.help, "default": parameter.default, **shown, **changes})


MODEL_WORD = Option(
    help="A hub name, folder or GGUF file. Default: the embedded one.",
    default=None,
    metavar="MODEL",
    complete=shell_completion.models,
    is_argument=True,
    more={"show_default": False, "callback": given},
)
DTYPE = described(parameters.DTYPE)
DEVICE = described(parameters.DEVICE)
LOAD_IN = described(parameters.LOAD_IN)
THREADS = described(
    parameters.THREADS, read=lambda number, flag: threads.check(number), reads_none=True, type=int | None
)
GGUF = described(parameters.GGUF)


def parse_adapters(given: list[str] | None, option: str) -> Mapping[str, str]:
    """Return the folders of adapters by their names, in the order in which they were given.

    Raises:
        InputError: one is not like NAME=FOLDER, its name cannot be used, or two have one name.
    """
    found: dict[str, str] = {}
    for text in given or ():
        name, equals, folder = text.partition("=")
        if not equals or not folder.strip():
            raise InputError(f"{option} {text!r:.100} names no folder; give NAME=FOLDER, such as sql=./sql-lora.")
        if re.fullmatch(parameters.ADAPTER_NAME, name, re.ASCII) is None:
            raise InputError(
                f"{option}: {name!r:.80} is no name for an adapter. It has 1 to 64 letters, digits, dots, - and _, and "
                "begins with a letter or digit."
            )
        if name in found:
            raise InputError(f"{option}: two adapters have the name {name}. Give each a name of its own.")
        found[name] = folder
    return found


def check_policy(text: str) -> None:
    """Refuse a policy that does not exist, or with options that it does not have.

    Raises:
        PolicyError: there is no such policy.
    """
    if text in (DEFAULT, LATER, CONVERSATION):  # they exist: torch need not be imported for that
        return
    check_name(text)
    from kvkeep.policies.registry import parse  # imports torch

    parse(text)


def check_policies(text: str, *, alone: bool = False) -> None:
    """Refuse a list of policies that is empty, or with one that does not exist or has wrong options.

    Args:
        text: the list, with commas.
        alone: whether policies may not name bits or a rule for heads.

    Raises:
        KVKeepError: the list cannot be used.
    """
    for piece in filter(None, (part.strip() for part in text.split(","))):
        if "=" not in piece or ":" in piece:  # others are options of the policy before
            check_name(piece.partition("@")[0])
    from kvkeep.evals.arms import split_arms, split_policies  # imports torch

    (split_policies if alone else split_arms)(text)


def check_one_adapter(adapters: Mapping[str, str], what: str) -> None:
    """Refuse several adapters for a command that runs with one at most.

    Args:
        adapters: folders by names.
        what: what runs, for the message: ``a prompt``.

    Raises:
        InputError: there are several.
    """
    if len(adapters) > 1:
        raise InputError(
            f"--adapter names {' and '.join(adapters)}, and {what} runs with one. Leave the others out. A file of "
            "prompts (generate --input) and a server take several, which lines and requests name as their model."
        )


ADAPTER = described(parameters.ADAPTER, read=parse_adapters, reads_none=True, type=list[str] | None, default=None)
ALLOW_PICKLE = described(parameters.ALLOW_PICKLE)
POLICY = described(parameters.POLICY, complete=shell_completion.policies)
BUDGET = described(parameters.BUDGET, flags=("-b",), read=parse_kept_tokens)
PREFILL_CHUNK = described(parameters.PREFILL_CHUNK, read=parse_chunk)
LAYER_BUDGET = described(parameters.LAYER_BUDGET, read=parse_layer_budget)
HEAD_BUDGET = described(parameters.HEAD_BUDGET, read=parse_head_budget)
KEEP_PROMPT = described(parameters.KEEP_PROMPT, read=parse_keep_prompt)
KV_BITS = described(parameters.KV_BITS, read=parse_kv_bits)
POSITIONS = described(parameters.POSITIONS, read=parse_positions)
MAX_NEW_TOKENS = described(parameters.MAX_NEW_TOKENS, flags=("-n",), default="256", read=parse_tokens)
TEMPERATURE = described(parameters.TEMPERATURE, flags=("-t",))
PIN_SYSTEM = described(parameters.PIN_SYSTEM, read=parse_switch)
REPETITION_DETECTION = described(parameters.REPETITION_DETECTION, default="off", read=parse_repetition_detection)
MAX_ROWS = Option(
    help="Sequences at once. Default: 16; with --kv-memory as many as it holds.",
    default=None,
    metavar="N",
    group=MEMORY,
)
NO_PLOTS = Option(
    help="Draw no plots; they need matplotlib (extra: plots).",
    flags=("--no-plots",),
    name="no_plots",
    type=bool,
    default=False,
    read=lambda off, flag: not off,
    group=OUTPUT,
    rare=True,
)
"""Its field says whether plots are drawn."""
JSON = Option(help="Print one JSON object and nothing else.", default=False, group=OUTPUT)
NO_DEFAULT = {"show_default": False}
"""For an option whose help says its default."""
RAY_ADDRESS = Option(
    help="The cluster, or auto for the one of this machine. Default: RAY_ADDRESS, or processes of this machine alone.",
    default=None,
    metavar="HOST:PORT",
    rare=True,
)
"""Where workers of Ray run."""

Json = Annotated[bool, JSON.info("json", bool)]
"""The annotation of ``--json`` in commands that are written as functions, for they have few options."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(CommandOptions):
    """The options of a command that loads a model.

    Attributes:
        model: a folder or a name on the hub; ``None`` for the embedded model.
        dtype, device: as they were typed.
        load_in: the value of ``--load-in``.
        threads: of torch; ``None`` to leave their number as it is.
        gguf: the value of ``--gguf``; ``model`` is that file already.
        allow_pickle: whether weights may be read from pickles.
    """

    model: str | None = argument(MODEL_WORD)
    dtype: str = option(DTYPE)
    device: str = option(DEVICE)
    load_in: str | None = option(LOAD_IN)
    threads: int | None = option(THREADS)
    gguf: str | None = option(GGUF)
    allow_pickle: bool = option(ALLOW_PICKLE)

    def check_values(self) -> None:
        """Refuse a model that does not exist, and a dtype or a device that cannot be used.

        Raises:
            KVKeepError: one of them cannot be used.
        """
        if self.model is not None:
            folder.check(self.model)
        check_dtype(self.dtype)
        if self.device != "auto":
            from kvkeep.models.device import parse_device  # imports torch

            parse_device(self.device)


@dataclass(frozen=True, kw_only=True)
class CacheOptions(ModelOptions):
    """The options of a command that runs a model with one policy."""

    prefill_chunk: int | None = option(PREFILL_CHUNK)
    layer_budget: str | list[float] | None = option(LAYER_BUDGET)
    head_budget: str | None = option(HEAD_BUDGET)
    kv_bits: str | None = option(KV_BITS)
    positions: Literal["true", "slot"] | None = option(POSITIONS)


# ``--ray-workers`` and ``--ray-address``: how many workers of Ray share the work of a command, and where they run.

MOST_WORKERS = 1024  # each is a process with the whole model; more are a mistake


def check_address(text: str | None, what: str, *, asked: bool) -> None:
    """Refuse an address that is empty, or that is given without a number of what runs there.

    Args:
        text: the value of ``--ray-address``, if it was given.
        what: what runs there, such as ``workers``; ``--ray-`` before it is the option that says how many.
        asked: whether that option was given.

    Raises:
        InputError: the address is empty, or was given without that number.
    """
    if text is None:
        return
    if not asked:
        raise InputError(f"--ray-address is where the {what} of --ray-{what} run; give --ray-{what} N, too.")
    if not text.strip():
        raise InputError(
            f"--ray-address is empty. Give host:port, or leave it out: the {what} then run on this machine."
        )


def check_workers(number: int | None, address: str | None) -> None:
    """Refuse a number of workers out of range, and an address without workers.

    Args:
        number: the value of ``--ray-workers``, if it was given.
        address: that of ``--ray-address``.

    Raises:
        InputError: the number or the address is refused.
    """
    check_address(address, "workers", asked=number is not None)
    if number is not None and not 1 <= number <= MOST_WORKERS:
        raise InputError(f"--ray-workers {number} is out of range; give 1 to {MOST_WORKERS}.")
