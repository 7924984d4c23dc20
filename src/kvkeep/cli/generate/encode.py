"""The prompts of a batch job's lines as token ids; after a memory, the ids that follow its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeGuard, cast

from kvkeep.batch.input import BadLine, Line, after, parse
from kvkeep.cli.generate.request import Request
from kvkeep.cli.memories import Memory
from kvkeep.engine.prompt_encoding import Past, question_of
from kvkeep.engine.request import Request as Asked
from kvkeep.engine.sampling_params import Sampling
from kvkeep.errors import InputError
from kvkeep.models import tokenization
from kvkeep.models.chat_templates import system_spans
from kvkeep.models.load import Checkpoint
from kvkeep.openai.requests import Prompt
from kvkeep.pins import Spans

Read: TypeAlias = Callable[[int, bytes], Line | BadLine]


def reader(checkpoint: Checkpoint, request: Request, defaults: Sampling, memory: Memory | None) -> Read:
    """A function that reads a line with the model's tokenizer. Every line follows the memory, if there is one.

    Raises:
        InputError: the memory is a conversation's.
    """
    past = None if memory is None else _past_of(memory)

    def encode(prompt: Prompt, *, raw: bool = False) -> Sequence[int]:
        if _are_ids(prompt):
            return _known(checkpoint, prompt)
        raw = raw or request.raw
        if isinstance(prompt, str):
            asked = Asked(prompt=prompt, raw=raw)
        else:
            asked = Asked(messages=cast(list[dict[str, str]], prompt))
        return _encode(checkpoint, asked) if past is None else _encode_after(checkpoint, asked, past)

    def pinned(prompt: Prompt) -> Spans:
        return system_spans(checkpoint, prompt) if request.pin_system else ()

    def read(number: int, raw: bytes) -> Line | BadLine:
        line = parse(number, raw, encode, defaults, pinned=pinned)
        return line if memory is None else after(line, memory.snapshot, request.policy)

    return read


def _past_of(memory: Memory) -> Past:
    """The tokens of a remembered text.

    Raises:
        InputError: the memory is a conversation's.
    """
    past = Past.of(memory.snapshot)
    if past.messages:
        raise InputError(
            f"{memory.file} is the memory of a conversation, and a batch job asks about a text that kvkeep remember "
            "has read. Ask it one question at a time: leave --input out, and give -p QUESTION."
        )
    return past


def _are_ids(prompt: Prompt) -> TypeGuard[list[int]]:
    return not isinstance(prompt, str) and isinstance(prompt[0], int)


def _encode(checkpoint: Checkpoint, asked: Asked) -> list[int]:
    if asked.messages is not None:
        chat: list[int] = tokenization.encode_chat(checkpoint, asked.messages)[0].tolist()
        return chat
    found: list[int] = tokenization.encode(checkpoint, str(asked.prompt), raw=asked.raw)[0].tolist()
    return found


def _encode_after(checkpoint: Checkpoint, asked: Asked, past: Past) -> list[int]:
    """The token ids that follow a remembered text, or a text that was read as it is."""
    if past.opening is not None:
        question, more = question_of(asked, past.opening)
        return past.opening.rest(checkpoint, question, past.ids, more)
    messages = asked.messages
    if messages is None and not asked.raw and checkpoint.tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": str(asked.prompt)}]
    if messages is not None:
        chat: list[int] = tokenization.encode_next(checkpoint, (), messages)[0].tolist()
        return chat
    plain: list[int] = tokenization.encode_rest(checkpoint, str(asked.prompt))[0].tolist()
    return plain


def _known(checkpoint: Checkpoint, ids: list[int]) -> list[int]:
    """Token ids, after a check that the model has all of them."""
    vocabulary: int = checkpoint.config.get_text_config(decoder=True).vocab_size
    if max(ids) >= vocabulary:
        raise InputError(f"The prompt has token {max(ids)}, and the model knows only {vocabulary}.")
    return ids
