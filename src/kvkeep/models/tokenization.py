"""Prompts and conversations as tokens, and a model together with its tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvkeep.cache.hf_layers import handed
from kvkeep.errors import InputError
from kvkeep.models.chat_templates import fill, reads
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.device import enough_memory
from kvkeep.models.files import explained
from kvkeep.models.special_tokens import special_tokens_of
from kvkeep.snapshot.snapshot import Snapshot


def encode(
    checkpoint: Checkpoint, prompt: str, *, raw: bool = False, add_special_tokens: bool = True
) -> Int[Tensor, "1 T"]:
    """Return the token ids of a prompt, put into the chat template as the user's message if there is a template.

    Args:
        checkpoint: the model and its tokenizer.
        prompt: the text; with a template, the user's message.
        raw: leave the chat template out. What the tokenizer puts before a text, such as the token that begins one, is
            not put there twice: a client that fills in the template itself has written it already.
        add_special_tokens: whether the tokenizer puts its own tokens around a text without chat template.

    Raises:
        InputError: the prompt is empty or no valid text, or the tokenizer does not belong to the model.
        ModelFileError: the tokenizer fails.
    """
    if not (prompt if raw else prompt.strip()):  # white space as it is can be continued
        raise InputError("The prompt is empty. Give some text.")
    _check_text(prompt)
    if raw:
        ids = _encoded(checkpoint, prompt, add_special_tokens=add_special_tokens)
        return _begun_once(checkpoint, prompt, ids) if add_special_tokens else ids
    if checkpoint.tokenizer.chat_template is None:
        return _encoded_as_quoted(
            checkpoint, special_tokens_of(checkpoint.tokenizer).quote(prompt), bare=not add_special_tokens
        )
    return encode_chat(checkpoint, [{"role": "user", "content": prompt}])


def encode_chat(
    checkpoint: Checkpoint,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
) -> Int[Tensor, "1 T"]:
    """Return the token ids of a conversation, up to the beginning of the model's answer.

    Args:
        checkpoint: the model and its tokenizer.
        messages: each with ``role`` and ``content``.
        tools: functions of which the template tells the model.
        chat_template_kwargs: more variables of the template.
        add_generation_prompt: end with the beginning of an answer; otherwise with the end of the last message.
        continue_final_message: end within the last message, after its text.
        add_special_tokens: whether the tokenizer puts its own tokens around what the template has written.

    Raises:
        InputError: there is no chat template, the template fails, or a message is no valid text; the last message is to
            be continued, and calls tools or is not shown; ``reasoning_effort`` is given, and the template does not read
            it; or the tokenizer does not belong to the model.
        ModelFileError: the tokenizer fails.
    """
    if checkpoint.tokenizer.chat_template is None:
        raise InputError(f"The tokenizer of {checkpoint.name} has no chat template; give a prompt instead of messages.")
    for message in messages:
        _check_text(message["content"])
    # a field of OpenAI's requests, of which a user expects something; other variables are a template's own affair
    if (effort := "reasoning_effort") in (chat_template_kwargs or {}) and not reads(checkpoint.tokenizer, effort):
        raise InputError(
            f"{effort} has no effect: the chat template of {checkpoint.name} does not read it. Leave it out."
        )
    given = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
    if continue_final_message:
        text = _unfinished(checkpoint, messages, tools, {**given, "add_generation_prompt": False})
    else:
        text = fill(checkpoint.tokenizer, messages, tools, variables=given)
    return _encoded_as_quoted(checkpoint, text, bare=not add_special_tokens)


def _unfinished(
    checkpoint: Checkpoint,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    """Render a conversation, and cut it off after the text of its last message, so that the model goes on with it.

    Raises:
        InputError: the template fails, or does not show the last message; or that calls tools.
    """
    *before, last = messages
    mark = unused_mark(messages, "end")
    marked = f"{last['content']}{mark} "  # a template that strips messages strips the space, too
    found, _, rest = fill(
        checkpoint.tokenizer, [*before, {**last, "content": marked}], tools, variables=variables
    ).rpartition(mark)
    if not found or last.get("tool_calls"):
        why = "calls tools" if last.get("tool_calls") else "is not shown by the chat template"
        raise InputError(
            f"continue_final_message=True cannot be followed: the last message {why}. Leave it out, or use `raw=True` "
            "and write the whole prompt."
        )
    return found if rest.startswith(" ") else found.rstrip()


def unused_mark(messages: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return a word that no message contains."""
    texts = [message["content"] for message in messages]
    return next(mark for n in itertools.count() if not any((mark := f"kvkeep{n}{name}") in text for text in texts))


def encode_next(
    checkpoint: Checkpoint,
    before: Sequence[Mapping[str, Any]],
    new: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Int[Tensor, "1 T"]:
    """Return the token ids of new messages that continue a memory, up to the beginning of the next answer.

    Args:
        checkpoint: the model and its tokenizer.
        before: the conversation so far, which ends with an answer; the token ids begin with what closes that answer.
            If it is empty, a conversation begins: the token ids lack the token that begins a text.
        new: new messages, each with ``role`` and ``content``.
        tools: functions of which the template tells the model, as far as it tells them after the last answer.
        chat_template_kwargs: more variables of the template.

    Raises:
        InputError: see `encode_chat`; or the template does not show where the last answer ends.
    """
    if not before:
        ids = encode_chat(checkpoint, new, tools, chat_template_kwargs=chat_template_kwargs)
        # the memory, which is not empty, has the beginning of the text already
        return ids[:, 1:] if int(ids[0, 0]) == checkpoint.tokenizer.bos_token_id and ids.shape[1] > 1 else ids
    for message in new:
        _check_text(message["content"])
    mark = unused_mark((*before, *new), "answer")
    # the last answer is in the memory as the tokens that were drawn, so the template says only what follows it
    shown = [*before[:-1], {**before[-1], "content": mark}, *new]
    text = fill(checkpoint.tokenizer, shown, tools, variables=chat_template_kwargs)
    if text.count(mark) != 1:
        raise InputError(
            f"The chat template of {checkpoint.name} does not show the last answer as it is, so a conversation cannot "
            "go on in its memory. Use `raw=True` (not over HTTP) and write what follows the answer yourself."
        )
    return _encoded_as_quoted(checkpoint, text.partition(mark)[2])


def encode_rest(checkpoint: Checkpoint, text: str) -> Int[Tensor, "1 T"]:
    """Return the token ids of a text that follows another one, without chat template and special tokens.

    Raises:
        InputError: see `encode`.
    """
    if not text:
        raise InputError("The text is empty. Give some text.")
    _check_text(text)
    return _encoded(checkpoint, text, add_special_tokens=False)


def _check_text(text: str) -> None:
    """Refuse a text that cannot be encoded as UTF-8.

    Raises:
        InputError: it cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError:  # it has surrogates, Python's stand-ins for bytes that are not UTF-8
        raise InputError("The prompt is not UTF-8 text. Convert it, e.g. with iconv.") from None


def _encoded(checkpoint: Checkpoint, text: str, **options: bool) -> Int[Tensor, "1 T"]:
    """Return the token ids of a text, checked against the model's vocabulary.

    Raises:
        InputError: there is no token, or one that the model does not have.
        ModelFileError: the tokenizer fails.
    """
    with explained(checkpoint.name, "Its tokenizer cannot read the prompt"):
        ids: Tensor = checkpoint.tokenizer(text, return_tensors="pt", **options)["input_ids"]
    return _checked(checkpoint, ids)


def _begun_once(checkpoint: Checkpoint, text: str, ids: Int[Tensor, "1 T"]) -> Int[Tensor, "1 n"]:
    """Return token ids without the special tokens that the tokenizer has put before a text which already begins with
    them; other ids as they are.
    """
    if not text.startswith(tuple(checkpoint.tokenizer.all_special_tokens)):
        return ids
    own = _encoded(checkpoint, text, add_special_tokens=False)[0].tolist()
    whole = ids[0].tolist()
    added = next((n for n in range(1, len(whole) - len(own) + 1) if whole[n : n + len(own)] == own), 0)
    return ids[:, added:] if added and own[:added] == whole[:added] else ids


def _encoded_as_quoted(checkpoint: Checkpoint, text: str, *, bare: bool = True) -> Int[Tensor, "1 T"]:
    """Return the token ids of a text in which control tokens may be quoted, see `kvkeep.models.special_tokens`.

    Args:
        checkpoint: the model and its tokenizer.
        text: the text.
        bare: leave out the tokens that the tokenizer puts around a text.
    """
    special = special_tokens_of(checkpoint.tokenizer)
    with explained(checkpoint.name, "Its tokenizer cannot read the prompt"):
        ids = special.encode(checkpoint.tokenizer, text, add_special_tokens=not bare)
    return _checked(checkpoint, torch.tensor([ids], dtype=torch.long))


def _checked(checkpoint: Checkpoint, ids: Int[Tensor, "1 T"]) -> Int[Tensor, "1 T"]:
    """Return token ids, after checking that there are some and that the model knows all of them.

    Raises:
        InputError: there are none, or one is not in the model's vocabulary.
    """
    if ids.numel() == 0:
        raise InputError("The prompt has no tokens. Give some text.")
    vocabulary: int = checkpoint.config.get_text_config(decoder=True).vocab_size
    if int(ids.max()) >= vocabulary:
        raise InputError(
            f"The tokenizer of {checkpoint.name} gives token {int(ids.max())}, and the model knows only {vocabulary}. "
            "The two do not belong together."
        )
    return ids.long()


def check_length(checkpoint: Checkpoint, prompt_tokens: int, new_tokens: int) -> None:
    """Refuse a text of so many tokens that is longer than the model's table of learned positions; without a table do
    nothing. The last new token needs no position.

    Raises:
        InputError: prompt and new tokens together are longer than the table.
    """
    limit = checkpoint.position_limit
    room = 0 if limit is None else limit - prompt_tokens + 1  # the model does not read the last new token
    if limit is None or new_tokens <= room:
        return
    remedy = f"ask for at most {room} new tokens" if room > 0 else f"shorten the prompt to less than {limit}"
    raise InputError(
        f"{checkpoint.name} has learned positions for {limit} tokens; {prompt_tokens} of the prompt and {new_tokens} "
        f"new ones are more. No eviction policy changes that: {remedy}, or choose a model with rotary positions."
    )


@dataclass(frozen=True)
class Writer:
    """A loaded model with its tokenizer.

    Attributes:
        checkpoint: the configuration and the tokenizer.
        model: the model, with kvkeep's attention attached.
    """

    checkpoint: Checkpoint
    model: PreTrainedModel

    @property
    def dtype(self) -> str:
        """Return the name of the weights' dtype."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """Return the name of the model's device."""
        return str(self.model.device)

    @torch.inference_mode()
    def read(self, prompt: Int[Tensor, "1 T"], cache: Cache) -> None:
        """Run tokens through the model to fill a cache. The output is dropped.

        Raises:
            InputError: the device's memory is too small.
        """
        with enough_memory(self.model.device):
            self.model(input_ids=prompt.to(self.model.device), **handed(self.model, cache), logits_to_keep=1)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self.checkpoint.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def show_token(self, token_id: int) -> str:
        """Return the text of one token, which may be special. Half a character is shown as U+FFFD."""
        return str(self.checkpoint.tokenizer.decode([token_id]))


# A text that is remembered before its questions are known, and the tokens of a question that follows it.
#
# The text and the question are one message of the user with a blank line between them, so a question to a remembered
# text is the same prompt as both together. The memory stands for those tokens that no question changes: the last tokens
# of the text may merge with what follows, and are read together with the question.

SEPARATOR = "\n\n"
"""Stands between the text and a question."""

_PROBES = ("What is it?", "a", "1", ".", "\n", "é", "“", "文")
"""Beginnings of questions that tokenizers treat in different ways."""
_WINDOW = 2048
_SURE = 8
"""Characters of a text's end that are looked at, and tokens that must then be those of the whole text."""
_MARGIN = 4
"""Tokens before the first one that a probe changes, which other questions might change."""


@dataclass(frozen=True)
class Opening:
    """The beginning of a user's message: a text that a question will follow.

    Attributes:
        tail: the last characters of the text, with the tokens that a question may change.
        skip: tokens of the tail that the memory has.
        system: the system message before the text.
        raw: whether the text and its questions are taken without the chat template.
    """

    tail: str
    skip: int = 0
    system: str | None = None
    raw: bool = False

    def messages(self, question: str) -> tuple[dict[str, str], ...]:
        """Return the conversation that ends with the remembered text and a question, as one message of the user."""
        before = () if self.system is None else ({"role": "system", "content": self.system},)
        return (*before, {"role": "user", "content": self._joined(question)})

    def rest(
        self, checkpoint: Checkpoint, question: str, before: Sequence[int], more: Sequence[Mapping[str, str]] = ()
    ) -> list[int]:
        """Return the token ids that follow those of the memory of a text: the end of the text, the question, further
        messages, and the beginning of the answer.

        Args:
            checkpoint: the model and its tokenizer.
            question: follows the text.
            before: the token ids of the memory.
            more: messages after the question.

        Raises:
            InputError: the question is empty or no valid text, or it changes tokens that the memory has.
        """
        if not question.strip():
            raise InputError("The question is empty. Give some text.")
        ids = self._ids(checkpoint, question, more)
        # fewer tokens than `opened` has compared; the tail's first one may differ where nothing stands before it
        known = min(_SURE // 2, self.skip - 1, len(before))
        if known > 0 and ids[self.skip - known : self.skip] != list(before[-known:]):
            raise InputError(
                f"The tokenizer of {checkpoint.name} reads the end of the remembered text in another way when this "
                "question follows, so the memory does not fit. Begin the question with another word."
            )
        return ids[self.skip :]

    def _joined(self, question: str) -> str:
        """Return the end of the text and a question, as one text."""
        return f"{self.tail}{SEPARATOR}{question}"

    def _ids(
        self, checkpoint: Checkpoint, question: str, more: Sequence[Mapping[str, str]] = (), *, whole: bool = False
    ) -> list[int]:
        """Return the token ids of the end of the text, a question and what follows it; with ``whole``, also of what the
        template writes before them.

        Raises:
            InputError: the template does not show the message as it is.
        """
        if self.raw:
            raw: list[int] = encode(checkpoint, self._joined(question), raw=True)[0].tolist()
            return raw
        filled = fill(checkpoint.tokenizer, [*self.messages(question), *more])
        # stripped, as many templates strip messages
        start = filled.find(special_tokens_of(checkpoint.tokenizer).quote(self._joined(question)).strip())
        if start < 0:
            raise InputError(
                f"The chat template of {checkpoint.name} does not show a message as it is, so no question can follow "
                "the text in it. Use `raw=True` to leave the template out."
            )
        found: list[int] = _encoded_as_quoted(checkpoint, filled if whole else filled[start:])[0].tolist()
        return found


def opening_of(found: object) -> Opening:
    """Return an `Opening` from the plain data in a snapshot's note, checked.

    Raises:
        InputError: the data are no opening.
    """
    if isinstance(found, Mapping) and found.keys() == {"tail", "skip", "system", "raw"}:
        tail, skip, system, raw = (found[name] for name in ("tail", "skip", "system", "raw"))
        # a blank tail is found nowhere
        fits = isinstance(tail, str) and tail.strip() and type(skip) is int and skip >= 0
        if fits and isinstance(raw, bool) and (system is None or isinstance(system, str)):
            return Opening(tail, skip, system, raw)
    raise InputError(f"{found!r:.80} is no opening of a message.")


def noted(snapshot: Snapshot, opening: Opening) -> Snapshot:
    """Return a snapshot with an opening in its note, so that questions can follow its text."""
    return replace(snapshot, note={**snapshot.note, "opening": asdict(opening)})


def opened(
    checkpoint: Checkpoint, text: str, *, system: str | None = None, raw: bool = False
) -> tuple[list[int], Opening]:
    """Return the token ids to remember for a text, those that no question changes, and the `Opening` with which
    questions go on. White space around the text is dropped.

    Args:
        checkpoint: the model and its tokenizer.
        text: the text.
        system: a system message before it.
        raw: leave the chat template out, as for a tokenizer without one.

    Raises:
        InputError: the text is empty or too short, no valid text, or the template does not show it; or there is a
            system message and no template that shows it.
    """
    text = text.strip()
    if not text:
        raise InputError("The text is empty. Give some text to remember.")
    asked, raw = raw, raw or checkpoint.tokenizer.chat_template is None
    opening = Opening(text, system=None if raw else system, raw=raw)
    if system is not None:
        check_system(checkpoint, system, raw=asked)
    whole = opening._ids(checkpoint, _PROBES[0], whole=True)
    # the end of the text is enlarged until its tokens agree with those of the whole text, since tokens may merge far
    # back
    for size in (_WINDOW * 4**power for power in itertools.count()):
        at_end = replace(opening, tail=text[-size:].lstrip())  # many templates strip messages
        found = [at_end._ids(checkpoint, probe) for probe in _PROBES]
        skip = max(0, min(_common(found[0], other) for other in found[1:]) - _MARGIN)
        left = len(found[0]) - skip
        same = _common(whole[::-1], found[0][::-1])
        if same >= left + _SURE or len(text) <= size:
            break
    if same < left or len(whole) <= left:
        raise InputError(f"The text of {len(text)} characters is too short to be remembered. Give a longer text.")
    return whole[: len(whole) - left], replace(at_end, skip=skip)


def check_system(checkpoint: Checkpoint, system: str, *, raw: bool = False) -> None:
    """Refuse a system message that the model would not see.

    Raises:
        InputError: there is no chat template, ``raw`` leaves it out, or it fails or does not show the message.
    """
    if raw or checkpoint.tokenizer.chat_template is None:
        why = "`raw` leaves the chat template out" if raw else f"{checkpoint.name} has no chat template"
        raise InputError(f"{why}, so there is no place for a `system` message. Begin the text with it.")
    fill(checkpoint.tokenizer, [{"role": "system", "content": system}, {"role": "user", "content": "a"}])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
