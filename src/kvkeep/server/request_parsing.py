"""Bodies as requests to the engine."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep import budget as budgets
from kvkeep.engine import Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError, KVKeepError, PolicyError
from kvkeep.openai import requests as openai
from kvkeep.openai.messages import ParameterError
from kvkeep.openai.requests import CHAT, COMPLETIONS, ParsedBody, in_words_of
from kvkeep.pins import spans
from kvkeep.policies.registry import available, parse
from kvkeep.server.model import ServedModel
from kvkeep.server.schemas import CompletionBody, Generating
from kvkeep.server.settings import ServerSettings

_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
_APART = 2**40
"""Choices of one prompt are drawn by numbers so far apart."""
_FEW = 16
"""New tokens of a completion that does not say how many, as in OpenAI's API."""
_HONOURED = ("stream", "stream_options", "echo")


@dataclass(frozen=True)
class ParsedRequest:
    """A body, ready to run.

    Attributes:
        asked: the body as it was read.
        requests: ``n`` for each prompt, in the prompts' order.
        prompts: the token ids of each prompt; of a session's turn not known before it runs.
        echo: whether answers begin with their prompts.
        scores_only: whether no new token is asked for.
    """

    asked: ParsedBody
    requests: tuple[Request, ...]
    prompts: tuple[Sequence[int], ...] = ()
    echo: bool = False
    scores_only: bool = False

    @property
    def is_chat(self) -> bool:
        """Whether the answer is a chat's."""
        return self.asked.url == CHAT

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return "logprobs" in self.asked.options


def job_of(url: str, body: Generating, served: ServedModel, settings: ServerSettings) -> ParsedRequest:
    """The requests of a body. Tokenizing may take time, so this belongs into a thread.

    Raises:
        KVKeepError: a parameter cannot be honoured, or a prompt cannot be encoded.
    """
    asked, echo, scores_only = _read(url, body, served)
    prompts = tuple(served.encode(prompt, tools=asked.described, raw=url == COMPLETIONS) for prompt in asked.prompts)
    defaults = sampling_of(asked, settings)
    made: list[Request] = []
    for ids in prompts:
        wishes: dict[str, Any] = {**own_options(body, ids), "prompt": ids}
        fitting = fitted(defaults, asked, len(ids), settings)
        if echo and "logprobs" in asked.options:
            wishes["prompt_logprobs"] = asked.options["logprobs"]
        made += choices(_request(asked, fitting, wishes), asked.n)
    return ParsedRequest(asked, tuple(made), prompts, echo=echo, scores_only=scores_only)


def turn_of(body: Generating, served: ServedModel, settings: ServerSettings, *, before: int) -> ParsedRequest:
    """The turn of a session: its messages continue the conversation.

    Args:
        body: the body.
        served: counts the tokens of the messages.
        settings: of the server.
        before: tokens of the conversation so far.

    Raises:
        KVKeepError: a parameter cannot be honoured.
    """
    asked, *_ = _read(CHAT, body, served, tells=not before)
    if asked.n != 1:
        raise ParameterError("n", "is more than 1, and a session goes on with one answer; fork it for more")
    for name in ("policy", "budget", "keep_ratio"):
        if getattr(body, name) is not None:
            raise ParameterError(name, "belongs to the session; give it when the session is made")
    wishes = {**own_options(body, ()), **_conversation(asked)}
    tokens = before + _counted(asked, served, settings)
    sampling = fitted(sampling_of(asked, settings), asked, tokens, settings)
    return ParsedRequest(asked, (_request(asked, sampling, wishes),))


def _read(url: str, body: Generating, served: ServedModel, *, tells: bool = True) -> tuple[ParsedBody, bool, bool]:
    """A body as OpenAI's parameters; whether its prompts are echoed, and nothing else is asked for."""
    fields = body.openai_fields()
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    scores_only = echo and body.max_tokens == 0
    if scores_only:
        fields["max_tokens"] = 1
    if body.stream_options is not None and not body.stream:
        raise ParameterError("stream_options", "has no effect without stream: true")
    return openai.read(url, fields, honoured=_HONOURED, tells=tells, use=served.tool_use), echo, scores_only


def sampling_of(asked: ParsedBody, settings: ServerSettings) -> SamplingParams:
    """How tokens are chosen where a body does not say it: as in OpenAI's API, with a seed of its own."""
    most = settings.max_new_tokens if asked.url == CHAT else _FEW
    return SamplingParams(max_new_tokens=most, temperature=1.0, seed=secrets.randbits(62))


def fitted(sampling: SamplingParams, asked: ParsedBody, tokens: int, settings: ServerSettings) -> SamplingParams:
    """How tokens are chosen, with no more of them than the model has positions for.

    Raises:
        InputError: the prompt is too long, or more new tokens are asked for than there are positions.
    """
    most = settings.max_model_len
    if most is None:
        return sampling
    wanted, room = asked.options.get("max_new_tokens", 1), most - tokens
    if wanted > room:
        name = asked.spelling.get("max_new_tokens", "max_tokens")
        remedy = f"Give {name}: {room} or less." if room > 0 else "Shorten the prompt."
        raise InputError(f"This server takes {most} tokens; the prompt has {tokens}, and {wanted} follow. {remedy}")
    return dataclasses.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))


def own_options(body: Generating, ids: Sequence[int]) -> dict[str, Any]:
    """The fields of kvkeep in a body as options of a request.

    Raises:
        KVKeepError: one is out of range.
    """
    found: dict[str, Any] = {}
    if body.policy is not None:
        check_policy(body.policy)
    if body.keep_ratio is not None:
        if body.budget is not None:
            raise ParameterError("keep_ratio", "and budget both say how many tokens are kept; give one of them")
        found["budget"] = budgets.from_ratio(body.keep_ratio, len(ids))
    if body.pins is not None:
        found["pins"] = spans([(one[0], one[1]) for one in body.pins])
    if body.guard is not None:
        found["guard"] = float(body.guard)
    return found


def check_policy(name: str) -> None:
    """Refuse a policy that is not registered: a client must not name modules of the server's machine.

    Raises:
        PolicyError: there is no such policy, or an option of it is unknown.
    """
    if name.partition(":")[0] not in available():
        parse(name.partition(":")[0])  # raises, with the names that are alike
        raise PolicyError(f"There is no policy {name[:60]!r}.")
    parse(name)


def _request(asked: ParsedBody, defaults: SamplingParams, wishes: Mapping[str, Any]) -> Request:
    """One request of a body.

    Raises:
        KVKeepError: an option is out of range, in the words of the body.
    """
    options = asked.options
    chosen = {name: value for name, value in options.items() if name in _SAMPLING}
    rest = {name: value for name, value in options.items() if name not in _SAMPLING}
    if "stop" in rest:
        rest["stop"] = tuple(rest["stop"])
    off: dict[str, Any] = dict.fromkeys(asked.unset)
    try:
        sampling = dataclasses.replace(defaults, **{**off, **chosen})
        return Request(sampling=sampling, **{**rest, **wishes})
    except KVKeepError as error:
        raise in_words_of(asked, error) from error


def choices(request: Request, n: int) -> list[Request]:
    """As many requests as texts are asked for, each with random numbers of its own."""
    return [dataclasses.replace(request, sequence=place * _APART) for place in range(n)]


def sampling_request(
    served: ServedModel,
    fields: Mapping[str, Any],
    settings: ServerSettings,
    *,
    names: Mapping[str, str],
    own: Mapping[str, Any],
    before: int,
) -> tuple[ParsedBody, Request]:
    """A body with other names than a chat's as a chat's, and its request.

    Args:
        served: counts the tokens of the messages.
        fields: the parameters by a chat's names; ``None`` is no value.
        settings: of the server.
        names: the name of a parameter in ``fields`` → its name in the body.
        own: options of kvkeep.
        before: tokens of the conversation so far.

    Raises:
        KVKeepError: a parameter is out of range, in the words of the body.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    asked = openai.read(CHAT, given, tells=not before, use=served.tool_use)
    spelling = {option: names.get(name, name) for option, name in asked.spelling.items()}
    asked = dataclasses.replace(asked, spelling=spelling)
    tokens = before + _counted(asked, served, settings)
    sampling = fitted(sampling_of(asked, settings), asked, tokens, settings)
    return asked, _request(asked, sampling, {**own, **_conversation(asked)})


def _conversation(asked: ParsedBody) -> dict[str, Any]:
    """The messages of a turn, and the tools that the chat template tells."""
    return {"messages": asked.prompts[0], "tools": asked.described}


def _counted(asked: ParsedBody, served: ServedModel, settings: ServerSettings) -> int:
    """The tokens of a turn's messages, where there is a limit."""
    return len(served.encode(asked.prompts[0], tools=asked.described)) if settings.max_model_len else 0
