"""The routes that write no text: models, tokens, health and version, and the page at ``/``.

The page is a chat in the browser that shows what a conversation's memory holds. Its files need no key. Those in
``assets/vendor`` are other projects' as they publish them, see ``NOTICE``.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response

from kvkeep.errors import InputError
from kvkeep.models import tokenization
from kvkeep.openai import requests as openai
from kvkeep.openai.requests import CHAT
from kvkeep.policies.registry import available, label
from kvkeep.server.model import ServedModel
from kvkeep.server.request_queue import RequestQueue, in_thread
from kvkeep.server.schemas import DetokenizeBody, TokenizeBody, body_of, note_ignored
from kvkeep.server.settings import PAGE_FILES, ServerSettings
from kvkeep.server.sse import reply
from kvkeep.version import __version__


class InfoRoutes:
    """Answers questions about the server and the tokenizer.

    Args:
        served: the model.
        queue: knows how many requests run.
        settings: of the server.
    """

    def __init__(self, served: ServedModel, queue: RequestQueue, settings: ServerSettings) -> None:
        self._served, self._queue, self._settings = served, queue, settings

    @property
    def _longest(self) -> int | None:
        """Return the most tokens of a prompt and its answer together: the server's limit if it has one, otherwise the
        positions that the model was trained for; ``None`` if neither is known.
        """
        return self._settings.max_model_len or self._served.max_model_len

    async def models(self, request: Request) -> Response:
        """Answer with the list of models: this one, and this one with each of its adapters."""
        return reply({"object": "list", "data": [self._card(each) for each in (None, *self._settings.adapters)]})

    async def model(self, request: Request) -> Response:
        """Answer with the entry of the model that a path names; refuse another name."""
        return reply(self._card(self._settings.adapter_of(request.path_params["name"])))

    async def health(self, request: Request) -> Response:
        """Answer with the state of the server and its rows; the status is 503 while the server drains.

        With ``?check=live`` the status is 200 even then.
        """
        engine = self._served.engine
        ready = not self._queue.draining
        state = {
            "status": "ready" if ready else "draining",
            "rows": engine.rows,
            "rows_free": max(0, engine.rows - engine.n_running),  # sequences that take turns count as running, too
            "row_bytes": engine.row_bytes,
            "waiting": engine.n_waiting,
        }
        live = request.query_params.get("check") == "live"
        return reply(state, 200 if ready or live else 503)  # a server that drains is alive, but wants no requests

    async def version(self, request: Request) -> Response:
        """Answer with the version of kvkeep."""
        return reply({"version": __version__})

    async def tokenize(self, request: Request) -> Response:
        """Answer with the token ids of a text or a conversation, their number, and the server's limit of tokens."""
        body = await body_of(request, TokenizeBody, self._settings)
        ids, unread = await in_thread(lambda: self._ids(body))
        note_ignored(request, unread)
        return reply(
            {
                "tokens": ids,
                "count": len(ids),
                "max_model_len": self._longest,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """Answer with the text of tokens."""
        body = await body_of(request, DetokenizeBody, self._settings)
        text = await in_thread(lambda: self._served.text_of(self._served.known(body.tokens)))
        return reply({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """Answer with the tokenizer's class, size and special tokens, as clients that count tokens need them."""
        tokenizer = self._served.checkpoint.tokenizer
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        texts: dict[str, Any] = {name: _plain(getattr(tokenizer, name, None)) for name in names}
        limit = self._longest
        kind = {"tokenizer_class": type(tokenizer).__name__, "model_max_length": limit, "vocab_size": len(tokenizer)}
        return reply({**kind, **texts})

    def _card(self, adapter: str | None) -> dict[str, Any]:
        """Return the entry in the list of models for the model with an adapter, or, for ``None``, for the model
        alone.
        """
        length = {"max_model_len": self._longest}
        engine = self._served.engine
        own = {"policy": label(engine.policy), "budget": engine.budget, "rows": engine.rows}
        return {
            "id": self._settings.model_name(adapter),
            "object": "model",
            "created": self._served.created,
            "owned_by": "kvkeep",
            **({} if adapter is None else {"parent": self._settings.name}),
            **length,
            "kvkeep": {**own, "policies": sorted(available())},
        }

    def _ids(self, body: TokenizeBody) -> tuple[list[int], tuple[str, ...]]:
        """Return the token ids of a body's ``prompt`` or ``messages``, and the names of template variables in it that
        the chat template does not read.

        Messages go through the chat template, a prompt does not. An empty prompt has no tokens, not even special ones.

        Raises:
            KVKeepError: the body has both or neither, or messages that cannot be encoded.
        """
        if (body.prompt is None) == (body.messages is None):
            raise InputError("Give either a prompt or messages.")
        if body.messages is not None:
            given = body.model_dump(exclude={"model", "prompt"}, exclude_none=True)
            parsed = openai.read(CHAT, given, use=self._served.tool_use)
            (messages,) = parsed.prompts
            # unbounded: a text that is too long to be answered may be counted all the same
            ids = self._served.encode(messages, tools=parsed.described, bounded=False, template=parsed.template)
            return ids, parsed.unread(self._served.reads)
        if not body.prompt:
            return [], ()
        if body.add_special_tokens is False:  # not None, which stands for the default: true
            plain: list[int] = tokenization.encode_rest(self._served.checkpoint, body.prompt)[0].tolist()
            return plain, ()
        return self._served.encode(body.prompt, raw=True, bounded=False), ()


def _plain(token: object) -> str | None:
    """Return a setting of a tokenizer, such as a special token, as text; ``None`` stays ``None``."""
    return None if token is None else str(token)


# The page.

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    # texts become markup through the sanitiser alone
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Add a route for each file of the chat page at ``/``. The OpenAPI document does not show them."""
    for path in PAGE_FILES:
        app.add_api_route(path, _show, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)


async def _show(request: Request) -> Response:
    """Answer with the file of the chat page that the path names; the path must be one of `PAGE_FILES`."""
    name, kind = PAGE_FILES[request.url.path]
    return Response(files("kvkeep.server").joinpath("assets", name).read_bytes(), headers=_HEADERS, media_type=kind)
