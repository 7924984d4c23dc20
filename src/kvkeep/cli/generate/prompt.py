"""Where the prompt of ``kvkeep generate`` comes from, and words that were meant to be a prompt."""

from __future__ import annotations

from kvkeep.cli import torchrun
from kvkeep.cli.files import STANDARD_INPUT, not_empty, read_text
from kvkeep.cli.usage import exists, quoted, quotes_missing, shown
from kvkeep.errors import InputError

_PURPOSE = "Give the model some text to continue."


def standard_input(
    model: str | None, source: str | None, prompt: str | None, file: str | None
) -> tuple[str | None, str | None]:
    """The model and the prompt file; an argument ``-``, alone or after the model, is the prompt file ``-``.

    Raises:
        InputError: another word follows the model, or there is another prompt.
    """
    if source is None and model == STANDARD_INPUT:
        model, source = None, STANDARD_INPUT
    if source is None:
        return model, file
    if source != STANDARD_INPUT:
        if prompt is not None:
            parts = (prompt, source) if model is None or exists(model) else (prompt, model, source)
            raise InputError(f"Unexpected argument {shown(source)}. {quotes_missing(' '.join(parts))}")
        raise InputError(
            f"Unexpected argument {shown(source)}: after the model only - may follow. For a prompt: -p {quoted(source)}"
        )
    if file is not None:
        raise InputError("- and --prompt-file were both given; one prompt is enough.")
    return model, STANDARD_INPUT


def read_prompt(prompt: str | None, file: str | None, *, model: str | None = None) -> str:
    """The prompt, from ``--prompt`` or a file.

    Args:
        prompt: the text; ``-`` is standard input.
        file: path; ``-`` is standard input.
        model: the model, which may be a prompt or a file that somebody forgot to announce.

    Raises:
        InputError: there is no prompt, there are two, or the file cannot be read.
    """
    if prompt == STANDARD_INPUT and file is None:
        prompt, file = None, STANDARD_INPUT
    if prompt is not None and file is not None:
        raise InputError("--prompt and --prompt-file were both given; one prompt is enough.")
    if prompt is not None:
        _check_no_file(prompt)
        return not_empty(prompt, "The prompt", _PURPOSE)
    if file is None:
        raise InputError(f"There is no prompt. {_advice(model)}")
    if file == STANDARD_INPUT:
        torchrun.refuse_standard_input()
    return read_text(file, kind="prompt file", purpose=_PURPOSE)


def read_schema(file: str | None) -> str | None:
    """The JSON schema of a file; ``None`` without a file.

    Raises:
        InputError: the file cannot be read.
    """
    if file is None:
        return None
    return read_text(file, kind="JSON schema", purpose='Give a schema such as {"type": "object"}.')


def word_of_prompt(model: str | None, prompt: str | None) -> str | None:
    """The remedy where a model that cannot be found may be the second word of a prompt without quotes."""
    if not model or not prompt or "/" in model or " " in prompt or exists(model):
        return None
    return quotes_missing(f"{prompt} {model}")


def _advice(model: str | None) -> str:
    """How to give a prompt; a word in the model's place may have been meant as one."""
    if model is not None and exists(model, folder=False):
        return f"{model} is a file, not a model; to continue its text: --prompt-file {quoted(model)}"
    if model is not None and "/" not in model and not model.startswith("-") and not exists(model):
        return f"If {quoted(model)} is the prompt: -p {quoted(model)}"
    return "Give --prompt TEXT, --prompt-file FILE, or - for standard input."


def _check_no_file(prompt: str) -> None:
    """Refuse the name of a file in place of its text."""
    if not any(letter.isspace() for letter in prompt) and exists(prompt, folder=False):
        raise InputError(f"The prompt is the name of a file. To read the file: --prompt-file {quoted(prompt)}")
