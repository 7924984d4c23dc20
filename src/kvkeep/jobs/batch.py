"""Lines of OpenAI's batch files: ``custom_id``, ``method``, ``url`` and ``body`` in the input, answers in the output.

The number and the fingerprint of an input line are part of its answer's ``id``, by which a later run knows the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvkeep.errors import InputError
from kvkeep.openai import requests, responses
from kvkeep.openai.requests import CHAT, COMPLETIONS, Asked

BEGINNING = '{"id": "batch_req_%d_%s", '
"""The first characters of an answer to the line of this number and fingerprint."""

_ID = re.compile(r"batch_req_([0-9]{1,18})_([0-9a-f]{32})", re.ASCII)
_FIELDS = ("custom_id", "method", "url", "body")


def is_batch_line(fields: Mapping[str, Any]) -> bool:
    """Whether the fields of a line are a request in OpenAI's format, perhaps a faulty one."""
    if "prompt" in fields or "messages" in fields:
        return {"custom_id", "url", "body"} <= fields.keys()
    return isinstance(fields.get("body"), dict) or ("custom_id" in fields and ("url" in fields or "method" in fields))


def custom_id_of(fields: Mapping[str, Any]) -> str | None:
    """The name that the user has given a request, if it is a text."""
    found = fields.get("custom_id")
    return found if isinstance(found, str) else None


def read(fields: Mapping[str, Any]) -> Asked:
    """Read the request of a line.

    Raises:
        InputError: a field is missing, unknown or wrong, or see `kvkeep.openai.requests.read`.
    """
    if missing := [name for name in _FIELDS if fields.get(name) is None]:
        raise InputError(f"it is in OpenAI's format and has no {missing[0]}; there must be {', '.join(_FIELDS)}")
    if not isinstance(fields["custom_id"], str) or not fields["custom_id"]:
        raise InputError("its custom_id is no text")
    if fields["method"] != "POST":
        raise InputError(f'its method is {json.dumps(fields["method"]):.40}; give "POST"')
    if fields["url"] not in (CHAT, COMPLETIONS):
        raise InputError(f"its url is {json.dumps(fields['url']):.80}; there are {CHAT} and {COMPLETIONS}")
    if others := sorted(fields.keys() - set(_FIELDS)):
        known = ", ".join(_FIELDS)
        raise InputError(f'its field {json.dumps(others[0]):.80} is none of {known}; parameters belong into "body"')
    return requests.read(fields["url"], fields["body"])


def line(
    number: int, digest: str, custom_id: str | None, body: Mapping[str, Any], *, status: int = 200
) -> dict[str, Any]:
    """A line of the output.

    Args:
        number: the number of the input's line.
        digest: the fingerprint of the input's line.
        custom_id: the name that the user has given the request.
        body: the answer, or an error.
        status: HTTP status.
    """
    response = {"status_code": status, "request_id": f"req_{digest}", "body": body}
    return {"id": f"batch_req_{number}_{digest}", "custom_id": custom_id, "response": response, "error": None}


def error_line(
    number: int, digest: str, custom_id: str | None, reason: str, *, failed: bool, param: str | None
) -> dict[str, Any]:
    """A line of the file of errors.

    Args:
        number: the number of the input's line.
        digest: the fingerprint of the input's line.
        custom_id: the name that the user has given the request.
        reason: why there is no answer.
        failed: whether the request could be run, and failed.
        param: the parameter that is wrong.
    """
    status = 500 if failed else 400
    body = responses.error(reason, status=status, param=param)
    return line(number, digest, custom_id, body, status=status)


def is_error_line(fields: Mapping[str, Any]) -> bool:
    """Whether fields are those of `error_line`."""
    if fields.keys() != {"id", "custom_id", "response", "error"} or origin(fields) is None:
        return False
    return isinstance(fields["response"], dict) and fields["response"].get("status_code") in (400, 500)


def origin(fields: Mapping[str, Any]) -> tuple[int, str] | None:
    """The number and the fingerprint of the input's line that a line of the output answers."""
    found = _ID.fullmatch(str(fields.get("id")))
    return (int(found[1]), found[2]) if found else None
