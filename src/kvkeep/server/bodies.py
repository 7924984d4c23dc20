"""Bodies of requests: bounded in size and time, strict JSON, and checked by their schema."""

from __future__ import annotations

import asyncio
import difflib
import json
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError

from kvkeep.errors import InputError, show_bytes
from kvkeep.openai.messages import MAX_DEPTH, decoded
from kvkeep.server.errors import RefusalError, parameter, refusal_of
from kvkeep.server.schema import Body
from kvkeep.server.settings import Settings

_B = TypeVar("_B", bound=Body)
_LARGE = 2**18
"""Bytes of a body that is parsed in a thread of its own, so that other clients do not wait."""
_ALIKE = 0.8


async def body_of(request: Request, kind: type[_B], settings: Settings, *, empty: bool = False) -> _B:
    """Read the body of a request.

    Args:
        request: the request.
        kind: the schema of the body.
        settings: the largest size, and the time.
        empty: whether no body is the same as ``{}``.

    Raises:
        RefusalError: the body is too large, comes too slowly, is no JSON object, or does not follow the schema.
    """
    raw = await received(request, settings)
    if empty and not raw.strip():
        raw = b"{}"
    if len(raw) < _LARGE:
        return checked(kind, _fields(raw))
    return checked(kind, await asyncio.to_thread(_fields, raw))


async def received(request: Request, settings: Settings) -> bytes:
    """The bytes of a body.

    Raises:
        RefusalError: it is too large, or comes too slowly.
    """
    most, parts, size = settings.max_body_bytes, [], 0
    declared = request.headers.get("content-length", "0")
    too_large = RefusalError(
        413,
        f"The body is larger than {show_bytes(most)}, the most that this server reads. Send less.",
        code="too_large",
    )
    if declared.isdecimal() and int(declared[:20]) > most:
        raise too_large
    try:
        async with asyncio.timeout(settings.read_timeout_s):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > most:
                    raise too_large
    except TimeoutError as error:
        seconds = settings.read_timeout_s
        raise RefusalError(408, f"The body did not come within {seconds:g} s. Send the request again.") from error
    return b"".join(parts)


def _fields(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body."""
    try:
        return decoded(raw)
    except json.JSONDecodeError as error:
        reason = f"is no JSON: {error}"
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}"
    except RecursionError:
        reason = f"is nested too deeply, more than {MAX_DEPTH} levels"
    except InputError as error:
        reason = f"cannot be read: {error}"
    raise RefusalError(400, f"The body {reason}. Send one JSON object.")


def checked(kind: type[_B], fields: dict[str, Any]) -> _B:
    """The fields of a body after the checks of its schema. Unknown fields are ignored, misspelt ones of kvkeep are not.

    Raises:
        RefusalError: a field has another type, or is a misspelt name of kvkeep.
    """
    for name in fields.keys() - kind.model_fields.keys():
        alike = difflib.get_close_matches(name[:80], kind.own, 1, _ALIKE)
        if alike:
            raise parameter(name[:80], f"is unknown; did you mean {alike[0]}?")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _first(error) from error


def _first(error: ValidationError) -> RefusalError:
    """The first mistake that a schema has found."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = [part for part in found["loc"] if isinstance(part, int) or part.isidentifier()]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")[:80]
    reason = found["msg"][:1].lower() + found["msg"][1:]
    if not name:
        return refusal_of(InputError(f"the body cannot be used: {reason}"))
    return parameter(name, f"is refused: {reason}")
