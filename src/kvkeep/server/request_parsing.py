"""Bodies as requests to the engine."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from kvkeep import budget as budgets
from kvkeep.engine.request import Request, check_name
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.engine.session import Session
from kvkeep.errors import InputError, KVKeepError
from kvkeep.openai import requests as openai
from kvkeep.openai.messages import ParameterError, ToolUse
from kvkeep.openai.requests import CHAT, COMPLETIONS, ParsedBody, Prompt, in_words_of
from kvkeep.parameters import SYSTEM_SHARE, TRUNCATE_PROMPT_TOKENS
from kvkeep.pins import Spans, spans, within
from kvkeep.policies.base import Policy
from kvkeep.server.message_drops import message_drops
from kvkeep.server.schemas import ChatBody, CompletionBody, Generating, check_policy
from kvkeep.server.settings import CONVERSATION, ServerSettings, full_name

_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
_APART = 2**40
"""Choices of one prompt are drawn by numbers so far apart."""
_FEW = 16
"""New tokens of a completion that does not say how many, as in OpenAI's API."""
_HONOURED = ("stream", "stream_options", "echo")  # in the routes; for batch files `read` refuses them


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

    def message_pins(
        self,
        prompt: Prompt,
        places: Collection[int] | None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
    ) -> Spans:
        """Return the spans of a conversation's tokens that hold some of its messages; ``None``: the system's."""

    def message_starts(
        self,
        messages: Sequence[Mapping[str, Any]],
        places: Collection[int],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
    ) -> dict[int, int]:
        """Return how many of a conversation's tokens come before messages."""

    def can_pin(self, pins: Spans, *, policy: str | Policy | None, budget: int | None, share: float) -> bool:
        """Return whether pins take at most a share of a budget, and its policy evicts and can hold them."""


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


def parse_request(
    url: str, body: Generating, served: BodyEncoder, settings: ServerSettings, owner: str = ""
) -> ParsedRequest:
    """Parse the body of a chat or a completion into requests to the engine. Tokenizing takes time, so call it in a
    thread.

    Args:
        url: the route.
        body: the body.
        served: encodes prompts.
        settings: of the server.
        owner: whose conversation a chat is; ``""``: nobody's.

    Raises:
        KVKeepError: a parameter cannot be honoured, or a prompt cannot be encoded.
        RefusalError: no such model runs.
    """
    adapter = settings.adapter_of(body.model)
    parameters, echo, scores_only = _read(url, body, served)
    raw, told = url == COMPLETIONS, parameters.described
    whole, how = parameters.truncate is None, parameters.template  # a prompt that is cut may be of any length
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
        wishes["pins"] = message_pins(parameters, body, served, settings, {"policy": body.policy, **wishes}, len(ids))
        wishes["cache_salt"] = digest(body.cache_salt) or None
        wishes |= message_drops(parameters, body, served)
        fitting = fitted(defaults, parameters, len(ids), settings)
        if echo and "logprobs" in parameters.options:
            wishes["prompt_logprobs"] = parameters.options["logprobs"]
        # each text of a prompt is drawn with random numbers of its own
        made += [
            make_request(
                parameters,
                fitting,
                {**wishes, **({} if raw else kept_by(owner, body.user, parameters)), "sequence": index * _APART},
            )
            for index in range(parameters.n)
        ]
    return ParsedRequest(parameters, tuple(made), prompts, echo=echo, scores_only=scores_only, adapter=adapter)


def kept_by(owner: str, user: str | None, parameters: ParsedBody) -> dict[str, Any]:
    """Return the options by which the memory of a chat's request is kept, so that the next turn goes on from it; none
    if no session can keep it.

    Args:
        owner: the owner of the key; ``""``: nothing is kept.
        user: whom of those behind the key the body names; ``None``: nobody.
        parameters: the parameters of its body.
    """
    if (name := conversation_name(owner)) is None:
        return {}
    (messages,) = parameters.prompts
    # an answer that goes on with the last message is no message of its own, which could be noted behind it
    noted = () if isinstance(messages, str) or parameters.template.get("continue_final_message") else messages
    return {"owner": f"{owner}/{digest(user)}", "keep_as": name, "noted_messages": noted}


def conversation_name(owner: str) -> str | None:
    """Return a new random name for the session that keeps a chat of an owner; ``None`` for the owner ``""``, and if no
    session can have such a name.
    """
    name = full_name(owner, f"{CONVERSATION}{secrets.token_hex(12)}")
    try:
        return check_name(name) if owner else None
    except InputError:  # an owner whose name is none of a file
        return None


def digest(word: str | None) -> str:
    """Return a hash of a client's word, which may be long or a secret; an empty text for ``None`` and for ``""``."""
    return hashlib.sha256(word.encode("utf-8", "surrogatepass")).hexdigest()[:32] if word else ""


def parse_turn(body: Generating, served: BodyEncoder, settings: ServerSettings, *, session: Session) -> ParsedRequest:
    """Parse the body of a chat into the next turn of a session.

    Args:
        body: the body.
        served: counts the tokens of the messages.
        settings: of the server.
        session: the conversation so far.

    Raises:
        KVKeepError: a parameter cannot be honoured, or belongs to the session and not to a turn.
        RefusalError: no such model runs, or the session has another adapter.
    """
    before, adapter = len(session.token_ids), session.adapter
    settings.check_adapter(body.model, adapter)
    parameters, *_ = _read(CHAT, body, served, tells=not before)
    if parameters.n != 1:
        raise ParameterError("n", "is more than 1, and a session goes on with one answer; fork it for more")
    for name in ("policy", "budget", "keep_ratio", "keep_prompt"):
        if getattr(body, name) is not None:
            raise ParameterError(name, "belongs to the session; give it when the session is made")
    whole = [*(parameters.template.keys() - {"chat_template_kwargs"})]
    if parameters.truncate is not None:
        whole.append(TRUNCATE_PROMPT_TOKENS.name)
    if whole:
        # the first by name: `keys` has no order of its own, and equal bodies get equal answers
        raise ParameterError(min(whole), "belongs to a whole conversation, and a session has its beginning already")
    wishes = {**own_options(body, ()), **_conversation(parameters)}
    if not before:  # the first turn is a whole conversation, whose messages have known places
        own = {"policy": session.policy, "budget": session.budget, "pins": wishes.get("pins", ())}
        wishes["pins"] = message_pins(parameters, body, served, settings, own)
    elif isinstance(body, ChatBody) and body.pin_messages:
        raise ParameterError("pin_messages", "counts the messages of a whole conversation; give it in the first turn")
    if isinstance(body, ChatBody) and (body.drop_message or body.reposition):
        given = "drop_message" if body.drop_message else "reposition"
        raise ParameterError(given, "is for a whole conversation; a session drops with POST /v1/sessions/{id}/drop")
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
    # 62 bits, as a seed is less than 2**63
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
    """Return a body's fields of kvkeep's own (``keep_ratio`` as a budget, pins, guard, ``keep_prompt``,
    ``return_memory``) as options of a request. The policy is checked, but is none of them.

    Args:
        body: the body.
        ids: the prompt, of which ``keep_ratio`` is a share.

    Raises:
        KVKeepError: a field is out of range, or ``keep_ratio`` and ``budget`` are both given.
    """
    options: dict[str, Any] = {}
    if body.policy is not None:
        check_policy(body.policy)  # no option here: `openai.requests.read` has policy and budget already
    if body.keep_ratio is not None:
        if body.budget is not None:
            raise ParameterError("keep_ratio", "and budget both say how many tokens are kept; give one of them")
        options["budget"] = budgets.from_ratio(body.keep_ratio, len(ids))
    if body.pins is not None:
        options["pins"] = spans([(start, stop) for start, stop in body.pins])
    if body.guard is not None:
        options["guard"] = float(body.guard)
    if body.keep_prompt is not None:
        options["keep_prompt"] = body.keep_prompt
    if isinstance(body, ChatBody) and body.return_memory:
        options["return_memory"] = True
    return options


def message_pins(
    parameters: ParsedBody,
    body: Generating | None,
    served: BodyEncoder,
    settings: ServerSettings,
    own: Mapping[str, Any],
    tokens: int | None = None,
) -> Spans:
    """Return the pins of a conversation: those of the body, its messages that the body names, and the system's.

    System messages are pinned unasked if they take at most a quarter of the budget and the policy can hold all pins.

    Args:
        parameters: the parameters of the body.
        body: a chat; others name no messages.
        served: finds the tokens of messages.
        settings: say whether system messages are pinned unasked.
        own: the body's ``pins``, ``policy`` and ``budget``.
        tokens: length of the prompt, if it is known.

    Raises:
        KVKeepError: a message that the body names cannot be pinned.
    """
    asked: Spans = own.get("pins") or ()
    prompt, chat = parameters.prompts[0], body if isinstance(body, ChatBody) else None
    named, system = (chat.pin_messages, chat.pin_system) if chat else (None, None)
    if parameters.url != CHAT or isinstance(prompt, str):
        return asked
    if parameters.truncate is not None:
        if named or system:
            raise ParameterError(TRUNCATE_PROMPT_TOKENS.name, "moves the tokens of messages, so these are not pinned")
        return asked
    find = partial(served.message_pins, prompt, tools=parameters.described, template=parameters.template)
    found = find(named) if named else ()
    if system:
        found = spans((*found, *find(None)))
    elif system is None and settings.pin_system:
        with suppress(InputError):  # the template shows the message in another form
            fits = partial(served.can_pin, policy=own.get("policy"), budget=own.get("budget"))
            told = find(None)
            more = spans((*found, *told))
            if fits(told, share=SYSTEM_SHARE) and fits(spans((*asked, *more)), share=1.0):
                found = more
    # messages may end behind the prompt; pins of the body that do so are a mistake, which a request names
    return spans((*asked, *(found if tokens is None else within(found, tokens))))


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
    off: dict[str, Any] = dict.fromkeys(parameters.unset)  # a body may turn off what the server's defaults set
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
    cache: Mapping[str, Any],
) -> tuple[ParsedBody, Request]:
    """Read a body whose parameters have other names as if it were a chat's, and build its request.

    Args:
        served: counts the tokens of the messages.
        fields: the parameters by a chat's names; ``None`` is no value.
        settings: of the server.
        names: the name of a parameter in ``fields`` → its name in the body.
        own: options of kvkeep.
        before: tokens of the conversation so far.
        cache: the body's policy and budget.

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
    wishes = {**own, **_conversation(parameters)}
    if not before:
        wishes["pins"] = message_pins(parameters, None, served, settings, {**own, **cache})
    return parameters, make_request(parameters, sampling, wishes)


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
