"""Refusals: the status, the message and the standard error object with which a request ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvkeep.engine.grammar import FormError
from kvkeep.errors import KVKeepError, PolicyError
from kvkeep.openai.messages import ParameterError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
# words of error messages, of the engine and of this server, whose classes do not tell these cases from others
_TOO_LONG = ("has learned positions for", "This server takes")
_BUSY = "wait to be compiled already"
_LONGEST = 500
"""Characters of a message; values of clients may be part of it."""


class RefusalError(Exception):
    """A request that is not answered.

    Attributes:
        status: the HTTP status.
        message: what happened, and what to do.
        param: the parameter that is wrong.
        code: a word for programs.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]} …"
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """Return the body of the answer: OpenAI's error object, with a type by the status, the message, ``param`` and
        ``code``.
        """
        kind = "server_error" if self.status >= 500 else _KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class GoneError(Exception):
    """The client has closed the connection, so nobody reads the answer."""


def refusal_of(error: KVKeepError) -> RefusalError:
    """Return the HTTP refusal for an error that the request caused: status 429 if too many grammars wait to be
    compiled, otherwise 400, with a code of its own if the prompt is too long. The message becomes a sentence.

    The refusal names the error's ``param`` if it has one, else ``policy`` for an error of policies, else the argument
    with which the message begins, as in ``guard=7 is …``.
    """
    text = str(error)
    # the name of a parameter or of a policy is written as it is
    sentence = text[:1].upper() + text[1:] if text.partition(" ")[0].isalpha() else text
    if not sentence.endswith((".", "!", "?")):
        sentence += "."
    if _BUSY in text:
        return RefusalError(429, sentence, code="queue_full", headers={"Retry-After": "5"})
    code = "context_length_exceeded" if any(words in text for words in _TOO_LONG) else None
    param = "policy" if isinstance(error, PolicyError) else _argument(text)
    return RefusalError(400, sentence, param=getattr(error, "param", None) or param, code=code)


@contextmanager
def in_words_of(form: str | None) -> Iterator[None]:
    """Put the client's own name of the parameter into a refusal of the form of an answer, such as a JSON schema, if the
    code in the context raises one: clients ask for a form under several names.

    Args:
        form: the name of the parameter in the client's body; ``None`` changes nothing.
    """
    try:
        yield
    except RefusalError as refusal:
        if refusal.param == FormError.param and form is not None:
            refusal.param = form
        raise


def unknown(name: str, value: str, remedy: str) -> RefusalError:
    """Return the refusal with status 404, and a code such as ``session_not_found``, for something that does not exist.

    Args:
        name: the kind of thing, such as ``session``, from which the error's code is made.
        value: the name by which the client has asked for it.
        remedy: a sentence that says what to do.
    """
    return RefusalError(404, f"There is no {name} {value[:80]!r}. {remedy}", code=f"{name}_not_found".replace(" ", "_"))


def parameter(name: str, reason: str) -> RefusalError:
    """Return the refusal with status 400 for a bad parameter. Its message is ``The parameter NAME REASON.``"""
    return refusal_of(ParameterError(name, reason))


def _argument(text: str) -> str | None:
    """Return the argument with which an error's message begins, such as ``guard`` in ``guard=7 is …``: the name before
    the first ``=``; ``None`` if there is none, or more than a name stands before it.
    """
    name, found, _ = text.partition("=")
    return name if found and name.isidentifier() else None
