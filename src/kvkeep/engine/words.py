"""Texts and conversations of requests as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvkeep.engine.request import Request
from kvkeep.errors import InputError
from kvkeep.models import text
from kvkeep.models.load import Checkpoint, Model, Tokenizer


class Words:
    """Turns the texts of requests into token ids.

    Args:
        model: the model, attached.
        tokenizer: the engine's, if it has one.
        limit: the number of positions that the model has learned, if it is limited.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer | None, limit: int | None) -> None:
        self._model, self._tokenizer, self._limit = model, tokenizer, limit

    def ids_of(self, request: Request) -> tuple[int, ...]:
        """Return the token ids of a request. A text or a conversation goes through the chat template.

        Raises:
            InputError: there is no tokenizer or no chat template, or the template fails.
        """
        if request.messages is None and not isinstance(request.prompt, str):
            return tuple(cast(Sequence[int], request.prompt))
        checkpoint = self._checkpoint(request)
        if isinstance(request.prompt, str):
            ids = text.encode(checkpoint, request.prompt, raw=request.raw)
        else:
            ids = text.encode_chat(checkpoint, request.messages or ())
        return tuple(ids[0].tolist())

    def _checkpoint(self, request: Request) -> Checkpoint:
        """Return the model's configuration together with the tokenizer.

        Raises:
            InputError: there is no tokenizer.
        """
        if self._tokenizer is None:
            what = "messages need" if request.prompt is None else "a text needs"
            raise InputError(
                f"The engine has no tokenizer, and {what} one: make it with Engine(model, tokenizer), or give token "
                "ids as the prompt."
            )
        name = getattr(self._tokenizer, "name_or_path", None) or type(self._tokenizer).__name__
        return Checkpoint(name, self._model.config, self._tokenizer, self._limit, allow_pickle=False)
