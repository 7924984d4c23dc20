"""The model type ``kvkeep`` of lm-eval: every log-likelihood and every text comes from bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from kvkeep.evals.lm_eval import scoring
from kvkeep.evals.lm_eval.command import Arguments, bounded_of, sampling_of
from kvkeep.evals.lm_eval.scoring import ContextPair, EvaluationProtocol, GenerationPrompt
from kvkeep.evals.run import fingerprint
from kvkeep.version import __version__

_DEVICE = ("device", "cuda:0")
"""lm-eval's default device, also on machines without CUDA; kvkeep's own choice takes its place."""


class KVKeepLM(TemplateLM):  # type: ignore[misc]  # lm-eval is not installed where types are checked
    """A model in bounded memory, as lm-eval sees it.

    Args:
        options: model arguments, see `kvkeep.evals.lm_eval.command.Arguments`.

    Raises:
        KVKeepError: an argument, the model, the policy or the budget cannot be used.
    """

    def __init__(self, **options: Any) -> None:
        """Check all model arguments, then load the model."""
        super().__init__()
        self._asked = Arguments.of(options)
        self._bounded = bounded_of(self._asked)
        self._writer = self._bounded.writer
        self._checkpoint = self._writer.checkpoint
        self.tokenizer = self._checkpoint.tokenizer
        self._protocol = EvaluationProtocol(**self._asked.protocol())
        self._device = self._writer.model.device

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> KVKeepLM:
        """Return the model for a mapping of arguments.

        They take precedence over options of lm-eval of the same names.
        """
        more = {key: value for key, value in (additional_config or {}).items() if (key, value) != _DEVICE}
        return cls(**{**more, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> KVKeepLM:
        """Return the model for arguments written as ``name=value,name=value``."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # -- what lm-eval asks about a model

    @property
    def eot_token_id(self) -> int:
        """Return the id of the token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Return the id of the token that is put before a text without a context: the begin token, or else the end
        token.
        """
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def max_length(self) -> int:
        """Return the most tokens that a text may have. Longer texts lose their beginning, as usual in lm-eval."""
        return self._asked.max_length or self._checkpoint.trained_length or 2048  # lm-eval's own default

    @property
    def max_gen_toks(self) -> int:
        """Return the number of new tokens of a task that does not say how many."""
        return self._asked.max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """Return the name under which lm-eval caches requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")  # a part of a file's name

    @property
    def batch_size(self) -> int:
        """Return the number of contexts that are read at once, which is also the number of rows of the engine."""
        return self._bounded.rows

    def get_model_info(self) -> dict[str, Any]:
        """Return the protocol and all else that makes results comparable; lm-eval writes it into every result."""
        about = {"kvkeep": __version__, "model_sha": fingerprint(self._writer), "model_dtype": self._writer.dtype}
        return {**about, "protocol": str(self._protocol), **self._asked.described()}

    # -- texts and tokens

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the token ids of a text.

        A text that starts with the begin token gets no second one, unless ``add_special_tokens`` says so.
        """
        begin = str(self.tokenizer.decode(self.prefix_token_id))
        if add_special_tokens is None and begin and string.startswith(begin):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **options))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text, in the tokenizer's chat template.

        It ends with the start of the model's turn, or if ``add_generation_prompt`` is false, within the last message.
        """
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                # without a new turn lm-eval has begun the answer itself
                continue_final_message=not add_generation_prompt,
            )
        )

    # -- requests

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding would choose it, in lm-eval's
        order.
        """
        pairs = [self._pair(*request) for request in requests]
        return self._scored(self._bounded, pairs, [request[0] for request in requests], disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text: the sum over its windows.

        Each window begins with empty memory, and is fed in pieces of ``window_stride`` tokens.
        """
        windows = [self._windows(request.args[0]) for request in requests]
        pieces = self._asked.in_windows(self._bounded)
        found = iter(self._scored(pieces, list(itertools.chain(*windows)), None, disable_tqdm))
        totals = [sum(score for score, _ in itertools.islice(found, len(own))) for own in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each prompt, in the order of ``requests``, generated in continuous batches."""
        if not requests:
            return []
        wishes = [self._wish(*request.args) for request in requests]
        found = [""] * len(wishes)
        bar = tqdm(total=len(wishes), disable=disable_tqdm, desc="generating under eviction")
        for place, text in scoring.answers(self._bounded, wishes):
            found[place] = postprocess_generated_text(
                generation=text, stop=list(wishes[place].until), think_end_token=None
            )
            self.cache_hook.add_partial("generate_until", requests[place].args, found[place])
            bar.update()
        bar.close()
        return found

    # -- the way there

    def _pair(self, texts: tuple[str, str], context: Sequence[int], continuation: Sequence[int]) -> ContextPair:
        """Return a context and its continuation as tokens. The beginning of a context that is too long is left out.

        Args:
            texts: context and continuation as texts.
            context: token ids of the context.
            continuation: token ids of the continuation.
        """
        room = self.max_length + 1 - len(continuation)  # nothing follows the last token, so it is never fed
        self._asked.check_room(room, len(continuation), self.max_length)
        prompt, first, length = self._cut(texts[0], context, room)
        return ContextPair(prompt, tuple(continuation), first, length)

    def _cut(self, text: str, ids: Sequence[int], room: int) -> tuple[tuple[int, ...], int, int]:
        """Return a prompt's last tokens, how many of these are read before the eviction, and how many a budget refers
        to.

        Args:
            text: the prompt.
            ids: its tokens.
            room: most tokens that stay; the beginning of a longer prompt is left out.

        Raises:
            InputError: the question comes after the cut, and the prompt has no text before it.
        """
        lost = max(0, len(ids) - room)
        kept = tuple(ids[lost:])
        # the last token is read after the cut: its logits score the first token that follows
        if self._protocol.inside:
            return kept, max(1, len(kept) - 1), len(kept)
        first = self._protocol.first(text, ids, self.tok_encode) - lost
        if first < 1:
            raise self._protocol.no_cut(text, lost)
        return kept, first, first

    def _windows(self, text: str) -> list[ContextPair]:
        """Return disjoint windows of a text, cut as lm-eval cuts them, each as a context and the continuation to score.

        Every token of the text is in one continuation.
        """
        made = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        parts = map(make_disjoint_window, made)
        # nothing follows a window's last token, so it is never read
        return [ContextPair(tuple(a), tuple(b), len(a), len(a) + len(b) - 1) for a, b in parts]

    def _wish(self, prompt: str, options: dict[str, Any]) -> GenerationPrompt:
        """Return what lm-eval wants to be generated: the prompt's tokens, where it is cut, and the options."""
        until, sampling = sampling_of(options, self.max_gen_toks, str(self.tokenizer.decode(self.eot_token_id)))
        room = self.max_length - sampling.max_new_tokens
        self._asked.check_room(room, sampling.max_new_tokens, self.max_length)
        # an empty prompt still needs one token to predict from
        ids = self.tok_encode(prompt) or [self.prefix_token_id]
        return GenerationPrompt(*self._cut(prompt, ids, room), until, sampling)

    def _scored(
        self,
        bounded: scoring.BoundedModel,
        pairs: Sequence[ContextPair],
        texts: Sequence[tuple[str, str]] | None,
        disable_tqdm: bool,
    ) -> list[tuple[float, bool]]:
        """Return the scores of pairs of context and continuation in their order, with a progress bar."""
        found: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        bar = tqdm(total=len(pairs), disable=disable_tqdm, desc="scoring under eviction")
        for place, score in scoring.scores(bounded, pairs):
            found[place] = score
            bar.update()
            if texts is not None:  # windows are no requests of lm-eval, whose cache gets their sum
                self.cache_hook.add_partial("loglikelihood", texts[place], score)
        bar.close()
        return found
