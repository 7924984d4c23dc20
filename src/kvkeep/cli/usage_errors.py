"""Mistakes in a command line: each becomes one line that says what is wrong and what to type instead."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from kvkeep.cli.console import count
from kvkeep.errors import KVKeepError

# Values of options as the user gave them, for messages about them.


def given(param: Any, words: Sequence[str], ctx: Any) -> str:
    """Return the text that was given for a parameter: in the command line, else a variable, else a file of settings.

    The last one in the command line counts; ``""`` if there is none.

    Args:
        param: typer's parameter.
        words: all words after the command.
        ctx: the context of the command.
    """
    found = ""
    for word, following in zip(words, (*words[1:], ""), strict=False):
        for name in param.opts:
            if word == name:
                found = following
            elif word.startswith(f"{name}=") or (len(name) == 2 and word.startswith(name)):  # as in -n8
                found = word.removeprefix(name).removeprefix("=")
    prefix = getattr(ctx, "auto_envvar_prefix", None)
    variable = os.environ.get(f"{prefix}_{param.name.upper()}", "") if prefix else ""
    return found or variable or str((ctx.default_map or {}).get(param.name, ""))


UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The base of typer's errors about words of the command line, which typer itself does not export."""

_BREAKS = ("–", "—", "−")
"""Dashes that word processors write for two hyphens."""
_CURLY = "“”„‘’"
"""Quotes of word processors, which shells do not know."""
_MOST_SHOWN = 40
_ALIKE = 0.7
"""How alike two options must be for one to be a misspelling of the other."""
_NEARLY_EQUAL = 0.9
"""The same, where another command has an option of the misspelt name."""

_OTHER_NAMES = {
    "--batch-size": "--max-rows",
    "--bf16": "--dtype bfloat16",
    "--cache-size": "--budget",
    "--compression-ratio": "--budget 20%",
    "--cpu": "--device cpu",
    "--cuda": "--device cuda",
    "--file": "--prompt-file",
    "--fp16": "--dtype float16",
    "--gpu": "--device cuda",
    "--keep-ratio": "--budget 20%",
    "--kv-budget": "--budget",
    "--load-in-4bit": "--load-in 4bit",
    "--load-in-8bit": "--load-in 8bit",
    "--max-length": "--max-new-tokens",
    "--max-tokens": "--max-new-tokens",
    "--memory": "--kv-memory",
    "--output-dir": "--output",
    "--system-prompt": "--system",
    "--text": "--prompt",
}
"""Names of options in other tools."""

_OTHER_COMMANDS = {
    "analyse": "kvkeep analyze",
    "bench": "kvkeep eval",
    "benchmark": "kvkeep eval",
    "complete": "kvkeep generate",
    "help": "kvkeep --help",
    "info": "kvkeep env",
    "list": "kvkeep policies",
    "read": "kvkeep remember",
    "run": "kvkeep generate",
    "talk": "kvkeep chat",
    "test": "kvkeep eval",
    "version": "kvkeep --version",
}
"""Names of commands in other tools."""


class CommandLineError(KVKeepError):
    """The words of the command line cannot be used; the message names the remedy."""


@contextmanager
def explained(ctx: Any, words: Sequence[str]) -> Iterator[None]:
    """Raise a `CommandLineError` in place of typer's errors about the words of a command.

    Args:
        ctx: the context of the command.
        words: all words after the command.
    """
    if ctx.resilient_parsing:  # a shell asks for completions
        yield
        return
    try:
        yield
    except UsageError as error:
        if not getattr(error, "message", "") and not hasattr(error, "param"):
            raise  # a command without words shows its help
        raise CommandLineError(message(error, ctx, words)) from error


def message(error: Any, ctx: Any, words: Sequence[str]) -> str:
    """Return the message of one of typer's errors in kvkeep's words, with what to type instead."""
    # typer does not export its errors' classes, so attributes tell them apart
    said = str(error.message).rstrip(".")
    if hasattr(error, "possibilities"):
        return _unknown_option(error.option_name, ctx)
    if hasattr(error, "option_name"):
        return _bad_value(error.option_name, ctx)
    if "unexpected extra argument" in said:
        return _unexpected(ctx, words)
    param = getattr(error, "param", None)
    if param is None:
        return f"{said}. {_see(ctx)}"
    if hasattr(error, "param_type"):
        return f"{ctx.command_path} needs {_missing(ctx)}. {_see(ctx)}"
    return (
        _bad_number(param, said, given(param, words, ctx))
        or f"{_name(param)}: {said}{'' if said.endswith('?') else '.'}"
    )


def check(ctx: Any, words: Sequence[str], *, group: bool) -> None:
    """Refuse words that typer would misread: long options with one hyphen, other dashes, options without a value.

    Args:
        ctx: the context of the command.
        words: all words after the command.
        group: whether a subcommand follows, whose options are not known here.

    Raises:
        CommandLineError: the words have such a mistake.
    """
    known = dict(_options(ctx))
    waiting = None
    for word in words:
        name = word.partition("=")[0]
        if word == "--" or (group and not word.startswith(("-", *_BREAKS))):
            return
        if waiting:
            if word in known:
                example = f"{waiting} {known[waiting].metavar or 'VALUE'}"
                raise CommandLineError(f"{waiting} has no value, since {word} follows it. Write {example}.")
            waiting = None
        elif word in known:
            waiting = None if known[word].is_flag else word
        elif len(name) == 2 and name in known and word != name:
            raise CommandLineError(f"Names of one letter take no equals sign: write {name} {quoted(word[3:])}")
        elif word.startswith(_BREAKS) and _undashed(word)[:1].isalpha():
            raise CommandLineError(f"{word} begins with a dash. Write options with hyphens: --{_undashed(word)}.")
        elif len(name) > 2 and f"-{name}" in known:
            raise CommandLineError(f"{name} needs two hyphens: -{word}.")


def unknown_command(group: Any, ctx: Any, words: Sequence[str]) -> str:
    """Return the error message for the unknown command ``words[0]``, with what was probably meant."""
    name, path = words[0], ctx.command_path
    # `name`: every command begins with an empty text
    begun = [command for command in group.commands if name and command.startswith(name.lower())]
    close = begun or difflib.get_close_matches(name.lower(), list(group.commands), n=1)
    said = f"{path} has no command {shown(name)}."
    if close:
        return f"{said} Did you mean {path} {close[0]}?"
    if ctx.parent is not None:  # only kvkeep policies has names that a user may type in place of a command
        return f"{said} Did you mean {path} show {quoted(name)}?" if "show" in group.commands else f"{said} {_see(ctx)}"
    if remedy := _OTHER_COMMANDS.get(name.lower()):
        return f"{said} Did you mean {remedy}?"
    if exists(name, folder=False):
        return f"{said} To continue the text of that file: kvkeep generate --prompt-file {quoted(name)}"
    if exists(name) or ("/" in name and " " not in name):
        return f"{said} To run that model: kvkeep generate {quoted(name)} -p TEXT"
    if " " in name or len(words) > 1:
        return f"{said} To continue a text: kvkeep generate -p {quoted(' '.join(words) if ' ' not in name else name)}"
    return f"{said} kvkeep --help lists all commands."


def text_of(words: Sequence[str]) -> str | None:
    """Return the words from ``--prompt`` to the next option as one text; ``None`` without that option.

    The shell has split them for want of quotes.
    """
    start = next((i + 1 for i, word in enumerate(words) if word in ("-p", "--prompt")), None)
    if start is None:
        return None
    end = next((i for i in range(start, len(words)) if words[i].startswith("-")), len(words))
    return " ".join(words[start:end])


def quotes_missing(text: str) -> str:
    """Return the advice to quote a prompt that the shell has split: ``-p`` with the text in quotes."""
    return f"Text of several words needs quotes: -p {quoted(text.strip(_CURLY))}"


def exists(name: str, *, folder: bool = True) -> bool:
    """Return whether a file of this name exists, or a folder if ``folder`` is set."""
    try:
        return name != "" and (Path(name).is_file() or (folder and Path(name).is_dir()))
    except (OSError, ValueError):  # too long for a name, or no text
        return False


def shown(word: str) -> str:
    """Return a word in quotes, shortened if it is long. An option has no quotes."""
    short = word if len(word) <= _MOST_SHOWN else f"{word[: _MOST_SHOWN - 1]}…"
    return short if word.startswith("-") and " " not in word else repr(short)


def quoted(text: str) -> str:
    """Return a text quoted for the shell, shortened if it is long."""
    return shlex.quote(text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…")


def _unknown_option(name: str, ctx: Any) -> str:
    """Return the message for an unknown option: that there is none, and which one may have been meant."""
    path, own = ctx.command_path, dict(_options(ctx))
    said = f"{path} has no option {shown(name)}."
    other = _OTHER_NAMES.get(name, "")
    if other.partition(" ")[0] in own:
        return f"{said} Here it is called {other}."
    if name in ("--model", "-m") and any(param.name == "model" for param in ctx.command.params):
        return f"{said} The model is the first word: {path} MODEL"
    if ctx.parent is not None and name in _names(ctx.find_root().command):
        return f"{said} It belongs to kvkeep alone: kvkeep {name}"
    having = [f"kvkeep {word}" for word, command in _commands(ctx) if name in _names(command)]
    if having and ctx.parent is None:
        return f"{said} Options follow the command: {having[0]} {name}"
    alike = _NEARLY_EQUAL if having else _ALIKE
    if close := difflib.get_close_matches(name.replace("_", "-").lower(), own, n=1, cutoff=alike):
        return f"{said} Did you mean {close[0]}?"
    if having:
        return f"{said} It belongs to {' and '.join(having[:2])}."
    return f"{said} {_see(ctx)}"


def _bad_value(name: str, ctx: Any) -> str:
    """Return the message for an option without its value, or with a value that it does not take."""
    param = dict(_options(ctx)).get(name)
    if param is None or param.is_flag:
        return f"{name} takes no value: write {name} alone."
    return f"{name} needs a value: {name} {param.metavar or 'VALUE'}"


def _bad_number(param: Any, said: str, value: str) -> str | None:
    """Return the message about a value that is no number, or out of range; ``None`` for another error.

    Args:
        param: the option or argument.
        said: typer's message.
        value: the text that was given.
    """
    name = _name(param)
    if "integer" in said:
        return f"{name} {shown(value)} is not a whole number; write e.g. {name} 8"
    if "number" in said or "float" in said:
        return f"{name} {shown(value)} is not a number; write e.g. {name} 0.5"
    if "greater than" in said or "less than" in said or "range" in said:
        return f"{name} {value} is out of range: {said[:1].lower()}{said[1:]}."
    return None


def _unexpected(ctx: Any, words: Sequence[str]) -> str:
    """Return the message about words that the command does not take."""
    above = getattr(ctx.parent.command, "commands", {})
    if named := [word for word in words if word in above]:
        return f"Options follow the command: {ctx.parent.command_path} {named[0]} … {words[0]}"
    text = text_of(words) or " ".join(word for word in words if not word.startswith("-"))
    if "--prompt" in dict(_options(ctx)) and " " in text:
        return quotes_missing(text)
    taken = sum(param.param_type_name == "argument" for param in ctx.command.params)
    place = "nothing but options" if not taken else f"{count(taken, 'word')} and options"
    return f"{ctx.command_path} takes {place}. {_see(ctx)}"


def _missing(ctx: Any) -> str:
    """Return in words the required parameters that were not given: ``--text FILE and --output DIR``."""
    wanted = [param for param in ctx.command.params if param.required and ctx.params.get(param.name) is None]
    named = [
        param.metavar or param.name.upper()
        if param.param_type_name == "argument"
        else f"{_name(param)} {param.metavar or 'VALUE'}"
        for param in wanted
    ]
    return " and ".join(named)


def _options(ctx: Any) -> Iterator[tuple[str, Any]]:
    """Yield the options of a command, each as often as it has names: name, option."""
    for param in ctx.command.get_params(ctx):
        if param.param_type_name == "option":
            yield from ((name, param) for name in (*param.opts, *param.secondary_opts))


def _commands(ctx: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and object of each command of the application, whichever command runs."""
    yield from getattr(ctx.find_root().command, "commands", {}).items()


def _names(command: Any) -> set[str]:
    """Return all names of a command's options and arguments, such as ``--budget`` and ``-b``."""
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)}


def _name(param: Any) -> str:
    """Return a parameter as it is typed: the longest name of an option, the metavar of an argument."""
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper())
    return str(max(param.opts, key=len))


def _see(ctx: Any) -> str:
    """Return the sentence that points at a command's help: ``See kvkeep plan --help.``"""
    return f"See {ctx.command_path} --help."


def _undashed(word: str) -> str:
    """Return a word without dashes in front, those that word processors make included."""
    return word.lstrip("-" + "".join(_BREAKS))
