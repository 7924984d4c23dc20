"""A stage for pipelines of Ray Data: a dataset of prompts in, the same rows with their completions out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvkeep.batch.input import COMPLETION, OPTIONS, InputLine, reason_of, request_of
from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Request, Result
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError, KVKeepError
from kvkeep.models.load import load_with_tokenizer
from kvkeep.scale.cluster import need_ray
from kvkeep.scale.remote_files import bare
from kvkeep.scale.worker import Loop

_READ = ("prompt", "messages", OPTIONS)  # `_request` unpacks them in this order
_TEXTS = ("text", "finish_reason", "error")
_NUMBERS = ("prompt_tokens", "new_tokens")


def generate(
    dataset: Any,
    model: str | None = None,
    *,
    workers: int = 1,
    sampling: SamplingParams | None = None,
    raw: bool = False,
    dtype: str = "auto",
    resources: Mapping[str, Any] | None = None,
    batch_size: int = 256,
    **options: Any,
) -> Any:
    """Return a dataset of Ray whose prompts are continued, as a lazy stage: nothing runs before the dataset is read.

    A row has a ``prompt`` (a text) or ``messages``, and perhaps ``options`` as in a batch job's line, a structure or a
    text in JSON. It gets a column ``completion``: a structure of ``text``, ``finish_reason``, ``prompt_tokens``,
    ``new_tokens`` and ``error``. A row that cannot be run has the reason in ``error`` and no text; the others go on.
    Random tokens are drawn by the row's content, so they do not depend on the order of rows or on who runs them, and
    equal rows get equal texts. Ray Data runs a batch again if its worker dies.

    Args:
        dataset: a ``ray.data.Dataset``.
        model: a hub name or a folder that every node has; the embedded model by default.
        workers: number of engines, each in an actor of its own.
        sampling: how tokens are chosen, where a row's options do not say it.
        raw: whether texts are taken without the chat template.
        dtype: dtype of the weights, see `kvkeep.load`.
        resources: what a worker takes, as arguments of ``ray.remote``, e.g. ``{"num_gpus": 1}``; one CPU by default.
        batch_size: rows that a worker takes at once; several times the engine's rows, so that few of them idle at the
            end of a batch.
        options: of `kvkeep.Engine`, such as ``policy``, ``budget`` and ``rows``.

    Returns:
        A ``ray.data.Dataset`` with the column ``completion``.

    Raises:
        InputError: Ray is not installed, this is no dataset, or a number is below 1.
    """
    need_ray()
    from ray.data import Dataset

    if not isinstance(dataset, Dataset):
        raise InputError(f"`dataset` is a {type(dataset).__name__} and no ray.data.Dataset; see ray.data.from_items.")
    for name, number in {"workers": workers, "batch_size": batch_size}.items():
        if not isinstance(number, int) or number < 1:
            raise InputError(f"`{name}={number}` is out of range; give 1 or more.")
    made: dict[str, Any] = {"model": model, "sampling": sampling or SamplingParams(), "raw": raw, "dtype": dtype}
    return dataset.map_batches(
        Stage,
        batch_size=batch_size,
        batch_format="pyarrow",  # tables, to which `Stage` appends a column
        concurrency=workers,
        fn_constructor_kwargs={**made, "options": options},
        **{"num_cpus": 1, **(resources or {})},
    )


class Stage:
    """An engine that continues the prompts of batches of rows.

    Args:
        model: a hub name or a folder; the embedded model by default.
        sampling: how tokens are chosen, where a row's options do not say it.
        raw: whether texts are taken without the chat template.
        dtype: dtype of the weights.
        options: of the engine.
    """

    def __init__(
        self, model: str | None, sampling: SamplingParams, raw: bool, dtype: str, options: Mapping[str, Any]
    ) -> None:
        """Load the model, and start the engine's thread."""
        network, tokenizer = load_with_tokenizer(model, dtype=dtype)
        self._loop = Loop(Engine(network, tokenizer, **options))
        self._loop.start()
        self._sampling, self._raw = sampling, raw

    def __call__(self, batch: Any) -> Any:
        """Complete each row of an Arrow table, and return the table with a column ``completion``.

        Raises:
            InputError: the table has a column ``completion`` already.
        """
        import pyarrow

        if COMPLETION in batch.column_names:
            raise InputError(f'The dataset has a column "{COMPLETION}", the name of the result; rename it.')
        names = [name for name in _READ if name in batch.column_names]
        # all rows first, so that they share the engine's rows; then the answers
        waiting = [self._begun(row) for row in batch.select(names).to_pylist()]
        answers = [_completion(answer if isinstance(answer, str) else answer.result()) for answer in waiting]
        kinds = {name: pyarrow.string() for name in _TEXTS} | {name: pyarrow.int64() for name in _NUMBERS}
        return batch.append_column(COMPLETION, pyarrow.array(answers, pyarrow.struct(list(kinds.items()))))

    def _begun(self, row: Mapping[str, Any]) -> Any:
        """Queue a row's request, and return a future of its results; a text, the reason, if the row cannot run."""
        try:
            # number, fingerprint and fields are for output files, of which there is none
            line = InputLine(1, "", {}, _request(row, self._sampling, raw=self._raw))
        except (KVKeepError, ValueError) as error:
            return reason_of(error)
        return self._loop.put(line)


def _request(row: Mapping[str, Any], sampling: SamplingParams, *, raw: bool) -> Request:
    """Return the request of a row, with the row's options in place of those in ``sampling``.

    Args:
        row: has ``prompt`` or ``messages``, and perhaps ``options``.
        sampling: how tokens are chosen, where the options do not say it.
        raw: whether texts are taken without the chat template.

    Raises:
        InputError: the row has not just one of prompt and messages, a value for which JSON has no form, or a wrong
            option.
        ValueError: the options are a text that is no JSON.
    """
    prompt, messages, options = (bare(row.get(name)) for name in _READ)
    if (prompt is None) == (messages is None):
        raise InputError('it must have either "prompt" or "messages"')
    if isinstance(options, str):
        options = json.loads(options)
    if prompt is not None and not isinstance(prompt, str):
        raise InputError('its "prompt" is no text')
    sequence = _sequence(prompt, messages, options)
    # the prompt is set below as a text: any token stands for it while the options are checked
    asked = request_of(1, (0,), options or {}, sampling)
    if isinstance(options, dict) and "seed" in options:  # such a row draws as it would alone
        sequence = 0
    return dataclasses.replace(asked, prompt=prompt, messages=messages, raw=raw, sequence=sequence)


def _sequence(*content: Any) -> int:
    """Return the number that tells rows apart when tokens are drawn: 62 bits of a fingerprint of a row's content, as
    numbers of sequences are signed ones of 64 bits.

    Raises:
        InputError: JSON has no form for a value, such as bytes or a time.
    """
    try:
        text = json.dumps(content, sort_keys=True)
    except TypeError as error:
        raise InputError(f"one of its values has no form in JSON: {error}") from error
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def _completion(answer: list[Result] | str) -> dict[str, Any]:
    """Return the fields of the column ``completion`` for one row, from its single result or from a reason why it has
    none. All rows have the same fields, as Arrow requires; those that do not apply are ``None``.
    """
    if isinstance(answer, str):
        return {**dict.fromkeys((*_TEXTS, *_NUMBERS)), "error": answer}
    (result,) = answer
    numbers = dict(zip(_NUMBERS, (result.prompt_tokens, len(result.token_ids)), strict=True))
    return {"text": result.text, "finish_reason": result.finish_reason, **numbers, "error": None}
