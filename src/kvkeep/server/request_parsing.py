"""Bodies as requests to the engine."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from kvkeep import budget as budgets
from kvkeep.engine.request import Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError, KVKeepError
from kvkeep.openai import requests as openai
from kvkeep.openai.messages import ParameterError, ToolUse
from kvkeep.openai.requests import CHAT, COMPLETIONS, ParsedBody, Prompt, in_words_of
from kvkeep.parameters import TRUNCATE_PROMPT_TOKENS
from kvkeep.pins import spans
from kvkeep.server.schemas import CompletionBody, Generating, check_policy
from kvkeep.server.settings import ServerSettings

_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
_APART = 2**40
"""Choices of one prompt are drawn by numbers so far apart."""
_FEW = 16
"""New tokens of a completion that does not say how many, as in OpenAI's API."""
_HONOURED = ("stream", "stream_options", "echo")


@runtime_checkable
class BodyEncoder(Protocol):
    """What parsing needs of a model: its tokens, and how it calls tools."""

    @property
    def tool_use(self) -> ToolUse:
        """Return the form in which the model writes calls of tools."""

    def encode(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        raw: bool = False,
        bounded: bool = True,
        template: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt."""


@dataclass(frozen=True)
class ParsedRequest:
    """A body, ready to run.

    Attributes:
        parameters: the body's parameters as OpenAI's API has them.
        requests: ``n`` for each prompt, in the prompts' order.
        prompts: the token ids of each prompt; of a session's turn not known before it runs.
        echo: whether answers begin with their prompts.
        scores_only: whether no new token is asked for.
        adapter: the adapter that answers; ``None``: the base model.
    """

    parameters: ParsedBody
    requests: tuple[Request, ...]
    prompts: tuple[Sequence[int], ...] = ()
    echo: bool = False
    scores_only: bool = False
    adapter: str | None = None

    @property
    def is_chat(self) -> bool:
        """Return whether the answer is a chat's."""
        return self.parameters.url == CHAT

    @property
    def wants_logprobs(self) -> bool:
        """Return whether log-probabilities are asked for."""
        return "logprobs" in self.parameters.options


def parse_request(url: str, body: Generating, served: BodyEncoder, settings: ServerSettings) -> ParsedRequest:
    """Parse the body of a chat or a completion into requests to the engine. Tokenizing takes time, so call it in a
    thread.

    Raises:
        KVKeepError: a parameter cannot be honoured, or a prompt cannot be encoded.
        RefusalError: no such model runs.
    """
    adapter = settings.adapter_of(body.model)
    parameters, echo, scores_only = _read(url, body, served)
    raw, told = url == COMPLETIONS, parameters.described
    whole, how = parameters.truncate is None, parameters.template
    prompts = tuple(
        parameters.truncated(
            served.encode(prompt, tools=told, raw=raw, bounded=whole, template=how), settings.max_model_len
        )
        for prompt in parameters.prompts
    )
    defaults = sampling_of(parameters, settings)
    made: list[Request] = []
    for ids in prompts:
        wishes: dict[str, Any] = {**own_options(body, ids), "prompt": ids, "chat": not raw, "adapter": adapter}
        fitting = fitted(defaults, parameters, len(ids), settings)
        if echo and "logprobs" in parameters.options:
            wishes["prompt_logprobs"] = parameters.options["logprobs"]
        # each text of a prompt is drawn with random numbers of its own
        made += [
            make_request(parameters, fitting, {**wishes, "sequence": index * _APART}) for index in range(parameters.n)
        ]
    return ParsedRequest(parameters, tuple(made), prompts, echo=echo, scores_only=scores_only, adapter=adapter)


def parse_turn(
    body: Generating, served: BodyEncoder, settings: ServerSettings, *, before: int, adapter: str | None
) -> ParsedRequest:
    """Parse the body of a chat into the next turn of a session.

    Args:
        body: the body.
        served: counts the tokens of the messages.
        settings: of the server.
        before: tokens of the conversation so far.
        adapter: the session's.

    Raises:
        KVKeepError: a parameter cannot be honoured, or belongs to the session and not to a turn.
        RefusalError: no such model runs, or the session has another adapter.
    """
    settings.check_adapter(body.model, adapter)
    parameters, *_ = _read(CHAT, body, served, tells=not before)
    if parameters.n != 1:
        raise ParameterError("n", "is more than 1, and a session goes on with one answer; fork it for more")
    for name in ("policy", "budget", "keep_ratio"):
        if getattr(body, name) is not None:
            raise ParameterError(name, "belongs to the session; give it when the session is made")
    whole = [*(parameters.template.keys() - {"chat_template_kwargs"})]
    if parameters.truncate is not None:
        whole.append(TRUNCATE_PROMPT_TOKENS.name)
    if whole:
        raise ParameterError(min(whole), "belongs to a whole conversation, and a session has its beginning already")
    wishes = {**own_options(body, ()), **_conversation(parameters)}
    tokens = before + _counted(parameters, served, settings)
    sampling = fitted(sampling_of(parameters, settings), parameters, tokens, settings)
    return ParsedRequest(parameters, (make_request(parameters, sampling, wishes),), adapter=adapter)


def _read(url: str, body: Generating, served: BodyEncoder, *, tells: bool = True) -> tuple[ParsedBody, bool, bool]:
    """Read a body as OpenAI's parameters. Also return whether the answer echoes its prompts, and whether it has no
    new token.

    Raises:
        ParameterError: ``stream_options`` are given without ``stream``, or a parameter cannot be honoured.
    """
    fields = body.openai_fields()
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    scores_only = echo and body.max_tokens == 0
    if scores_only:  # the engine scores prompts as it draws; the answer leaves the token out
        fields["max_tokens"] = 1
    if body.stream_options is not None and not body.stream:
        raise ParameterError("stream_options", "has no effect without stream: true")
    return openai.read(url, fields, honoured=_HONOURED, tells=tells, use=served.tool_use), echo, scores_only


def sampling_of(parameters: ParsedBody, settings: ServerSettings) -> SamplingParams:
    """Return the sampling parameters that apply where a body says nothing: OpenAI's defaults, and a random seed."""
    most = settings.max_new_tokens if parameters.url == CHAT or parameters.unbounded else _FEW
    return SamplingParams(max_new_tokens=most, temperature=1.0, seed=secrets.randbits(62))


def fitted(sampling: SamplingParams, parameters: ParsedBody, tokens: int, settings: ServerSettings) -> SamplingParams:
    """Return the sampling parameters with ``max_new_tokens`` limited to what the server's length limit leaves after
    the prompt.

    Without a limit of the server, return them as they are.

    Raises:
        InputError: the prompt is too long, or more new tokens are asked for than there are positions.
    """
    most = settings.max_model_len
    if most is None:
        return sampling
    wanted, room = parameters.options.get("max_new_tokens", 1), most - tokens
    if wanted > room:
        name = parameters.spelling.get("max_new_tokens", "max_tokens")
        remedy = f"Give {name}: {room} or less." if room > 0 else "Shorten the prompt."
        raise InputError(f"This server takes {most} tokens; the prompt has {tokens}, and {wanted} follow. {remedy}")
    return dataclasses.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))


def own_options(body: Generating, ids: Sequence[int]) -> dict[str, Any]:
    """Return a body's fields of kvkeep's own (budget or ``keep_ratio``, pins, guard) as options of a request. The
    policy is checked too.

    Raises:
        KVKeepError: a field is out of range, or ``keep_ratio`` and ``budget`` are both given.
    """
    options: dict[str, Any] = {}
    if body.policy is not None:
        check_policy(body.policy)
    if body.keep_ratio is not None:
        if body.budget is not None:
            raise ParameterError("keep_ratio", "and budget both say how many tokens are kept; give one of them")
        options["budget"] = budgets.from_ratio(body.keep_ratio, len(ids))
    if body.pins is not None:
        options["pins"] = spans([(start, stop) for start, stop in body.pins])
    if body.guard is not None:
        options["guard"] = float(body.guard)
    return options


def make_request(parameters: ParsedBody, defaults: SamplingParams, wishes: Mapping[str, Any]) -> Request:
    """Build one request of a body. Options in ``wishes`` win over those of the body's parameters.

    Raises:
        KVKeepError: an option is out of range, in the words of the body.
    """
    options = parameters.options
    chosen = {name: value for name, value in options.items() if name in _SAMPLING}
    rest = {name: value for name, value in options.items() if name not in _SAMPLING}
    if "stop" in rest:
        rest["stop"] = tuple(rest["stop"])
    off: dict[str, Any] = dict.fromkeys(parameters.unset)
    try:
        sampling = dataclasses.replace(defaults, **{**off, **chosen})
        return Request(sampling=sampling, **{**rest, **wishes})
    except KVKeepError as error:
        raise in_words_of(parameters, error) from error


def sampling_request(
    served: BodyEncoder,
    fields: Mapping[str, Any],
    settings: ServerSettings,
    *,
    names: Mapping[str, str],
    own: Mapping[str, Any],
    before: int,
) -> tuple[ParsedBody, Request]:
    """Read a body whose parameters have other names as if it were a chat's, and build its request.

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
    try:
        parameters = openai.read(CHAT, given, tells=not before, use=served.tool_use)
    except ParameterError as error:
        if (name := names.get(error.param)) is None:
            raise
        raise ParameterError(name, str(error).removeprefix(f"the parameter {error.param} ")) from error
    spelling = {option: names.get(name, name) for option, name in parameters.spelling.items()}
    parameters = dataclasses.replace(parameters, spelling=spelling)
    tokens = before + _counted(parameters, served, settings)
    sampling = fitted(sampling_of(parameters, settings), parameters, tokens, settings)
    return parameters, make_request(parameters, sampling, {**own, **_conversation(parameters)})


def _conversation(parameters: ParsedBody) -> dict[str, Any]:
    """Return the messages of a turn, and the tools that the chat template describes, as options of a request."""
    return {"messages": parameters.prompts[0], "tools": parameters.described, **parameters.template}


def _counted(parameters: ParsedBody, served: BodyEncoder, settings: ServerSettings) -> int:
    """Return the number of tokens of a turn's messages; 0 if the server has no length limit, so that nobody needs
    it.
    """
    if not settings.max_model_len:
        return 0
    return len(served.encode(parameters.prompts[0], tools=parameters.described, template=parameters.template))
