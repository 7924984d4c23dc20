"""kvpress' pipeline: a context is read under a press, then questions about it are answered one by one."""

from __future__ import annotations

import contextlib
import copy
import logging
import uuid
from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import AutoModelForCausalLM, Pipeline
from transformers.cache_utils import Cache, DynamicCache
from transformers.pipelines import PIPELINE_REGISTRY

from kvkeep.cache.hf_layers import handed
from kvkeep.compat.kvpress.presses import BasePress
from kvkeep.errors import InputError

TASK = "kv-press-text-generation"
"""The name of the pipeline in ``transformers.pipeline``."""

_log = logging.getLogger(__name__)


class KVPressTextGenerationPipeline(Pipeline):
    """Answers questions about a context whose cache a press has bounded.

    ``pipeline(context, question="…", press=SnapKVPress(0.5))`` returns ``{"answer": "…"}``, and with
    ``questions=["…", "…"]`` ``{"answers": […]}``. Each question finds the memory as the context left it.
    """

    def _sanitize_parameters(
        self,
        question: str | None = None,
        questions: Sequence[str] | None = None,
        answer_prefix: str | None = None,
        press: BasePress | None = None,
        max_new_tokens: int = 50,
        max_context_length: int | None = None,
        enable_thinking: bool = False,
        cache: Cache | None = None,
        **unknown: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return the arguments of the three steps, see `preprocess`, `_forward` and `postprocess`.

        Without a question, an empty one is asked: the model goes on by itself.

        Raises:
            InputError: both a question and questions are given, the list of questions is empty, or another argument is
                unknown or out of range.
        """
        if unknown:
            raise InputError(f"The pipeline has no argument {next(iter(unknown))!r}.")
        if question is not None and questions is not None:
            raise InputError("Give a question or questions, not both.")
        if questions is not None and not len(questions):
            raise InputError("The list of questions is empty; leave questions away to let the model go on by itself.")
        for name, number in (("max_new_tokens", max_new_tokens), ("max_context_length", max_context_length)):
            if number is not None and number < 1:
                raise InputError(f"{name}={number} is below 1.")
        asked = {
            # without a question the model goes on by itself
            "questions": [question or ""] if questions is None else list(questions),
            "answer_prefix": answer_prefix or "",
            "max_context_length": max_context_length,
            "enable_thinking": enable_thinking,
        }
        return asked, {"press": press, "max_new_tokens": max_new_tokens, "cache": cache}, {"single": questions is None}

    def preprocess(  # type: ignore[override]  # narrower than transformers' signature, as every pipeline is
        self,
        context: str,
        questions: Sequence[str],
        answer_prefix: str,
        max_context_length: int | None,
        enable_thinking: bool = False,
    ) -> dict[str, Any]:
        """Return the token ids of the context, under ``context_ids``, and of each question, under ``questions_ids``,
        with the chat template around both. Of the context the first ``max_context_length`` tokens stay.

        Raises:
            InputError: the context is no text, or the chat template changes a message's end.
        """
        if not isinstance(context, str):
            raise InputError(f"The context is a text, not {type(context).__name__}.")
        context, after = self._in_template(context, enable_thinking)
        ids = self._ids(context)
        if max_context_length is not None and ids.shape[1] > max_context_length:
            _log.warning("The context was cut from %d to %d tokens.", ids.shape[1], max_context_length)
            ids = ids[:, :max_context_length]
        return {"context_ids": ids, "questions_ids": [self._ids(text + after + answer_prefix) for text in questions]}

    def _in_template(self, context: str, enable_thinking: bool) -> tuple[str, str]:
        """Return the beginning of a chat up to the end of the context, and the text after a question, which ends with
        the beginning of an answer. Without a chat template, they are the context with the token that begins a text
        before it, and a line break.

        Raises:
            InputError: the template changes the end of a message.
        """
        tokenizer: Any = self.tokenizer  # which transformers declares to be of many kinds, or none
        if tokenizer.chat_template is None:
            return (tokenizer.bos_token or "") + context, "\n"
        mark = uuid.uuid4().hex  # which no context has
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": context + mark}],
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=enable_thinking,
        )
        before, found, after = text.partition(mark)
        if not found:
            raise InputError("The chat template changes the end of a message, so no question can follow a context.")
        return before, after

    def _ids(self, text: str) -> Int[Tensor, "1 T"]:
        """Return the token ids of a text that has its special tokens already."""
        tokenizer: Any = self.tokenizer
        ids = tokenizer.encode(text, add_special_tokens=False)
        return torch.tensor([ids], dtype=torch.int64)

    @torch.no_grad()
    def _forward(  # type: ignore[override]  # see `preprocess`
        self,
        model_inputs: dict[str, Any],
        press: BasePress | None = None,
        max_new_tokens: int = 50,
        cache: Cache | None = None,
    ) -> list[str]:
        """Read the context into the cache, under the press, and return the answer to each question.

        Raises:
            InputError: there is no context.
        """
        context = model_inputs["context_ids"].to(self.model.device)
        if not context.shape[1]:
            raise InputError("The context has no token.")
        cache = DynamicCache(config=self.model.config) if cache is None else cache  # a press bounds it in place
        with press(self.model) if press is not None else contextlib.nullcontext():
            self.model(context, **handed(self.model, cache), logits_to_keep=1)
        questions = [question.to(context.device) for question in model_inputs["questions_ids"]]
        # a bounded cache cannot take an answer back, so all questions but the last get a copy
        copies = [copy.deepcopy(cache) for _ in questions[1:]]
        pairs = zip(questions, [*copies, cache], strict=True)
        return [self._answer(context, question, held, max_new_tokens) for question, held in pairs]

    def _answer(self, context: Tensor, question: Tensor, cache: Cache, max_new_tokens: int) -> str:
        """Return the text that the model finds most likely after a context and a question, greedily.

        Args:
            context: token ids that the cache has read.
            question: token ids that follow.
            cache: holds the context, and afterwards the question and the answer as well.
            max_new_tokens: the most tokens of the answer.

        Raises:
            InputError: the question has no token.
        """
        if not question.shape[1]:
            raise InputError("The question has no token, and neither has the text after it. Ask something.")
        # `generate` is given the whole text, and feeds what the cache has not seen
        ids = torch.cat([context, question], dim=1)
        model, tokenizer = cast(Any, self.model), cast(Any, self.tokenizer)
        config = model.generation_config
        # a single row needs no padding; without an id for it `generate` would warn
        ends = config.eos_token_id if config.pad_token_id is None else config.pad_token_id
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **handed(model, cache),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=ends[0] if isinstance(ends, list) else ends,
        )
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    def postprocess(  # type: ignore[override]  # see `preprocess`
        self, model_outputs: list[str], single: bool
    ) -> dict[str, Any]:
        """Return the only answer under ``answer`` if ``single``, else all, as a list, under ``answers``."""
        return {"answer": model_outputs[0]} if single else {"answers": model_outputs}


if TASK not in PIPELINE_REGISTRY.get_supported_tasks():  # kvpress itself may have been imported
    PIPELINE_REGISTRY.register_pipeline(TASK, KVPressTextGenerationPipeline, pt_model=AutoModelForCausalLM)
