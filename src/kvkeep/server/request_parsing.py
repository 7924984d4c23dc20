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
        """Return how the model uses tools: the form of its calls, and whether its chat template tells it of tools."""

    def encode(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        raw: bool = False,
        bounded: bool = True,
        template: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt; see `kvkeep.server.model.ServedModel.encode`."""

    def message_pins(
        self,
        prompt: Prompt,
        places: Collection[int] | None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
    ) -> Spans:
        """Return the spans of a conversation's tokens that are the messages with the indexes ``places``; for ``None``
        the system messages.
        """

    def message_starts(
        self,
        messages: Sequence[Mapping[str, Any]],
        places: Collection[int],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
    ) -> dict[int, int]:
        """Return how many of a conversation's tokens come before each of the messages ``places``, index → tokens; an
        index is left out where the chat template does not tell it.
        """

    def can_pin(self, pins: Spans, *, policy: str | Policy | None, budget: int | None, share: float) -> bool:
        """Return whether pins take at most the share ``share`` of a budget, and a policy evicts tokens and can keep
        these. For ``None``, the engine's own policy and budget count.
        """


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
        """Return whether the body is a chat's; otherwise it is a completion's."""
        return self.parameters.url == CHAT

    @property
    def wants_logprobs(self) -> bool:
        """Return whether the body asks for log-probabilities of tokens."""
        return "logprobs" in self.parameters.options


def parse_request(
    url: str, body: Generating, served: BodyEncoder, settings: ServerSettings, owner: str = ""
) -> ParsedRequest:
    """Parse the body of a chat or a completion, but no session's turn, into requests to the engine: ``n`` for each
    prompt, tokenized and checked. Tokenizing takes time, so call it in a thread.

    Args:
        url: the route.
        body: the body.
        served: encodes prompts.
        settings: of the server.
        owner: the owner of the key, for whom the memory of a chat is kept for its next turn; ``""``: it is not kept.

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
    """Return the options of an engine's request by which the memory of a chat is kept as a session, with its messages,
    so that the client's next request, with the whole conversation, goes on from it. They are empty if no session can
    keep it.

    Args:
        owner: the owner of the key; ``""``: nothing is kept.
        user: ``user`` in the body, by which those behind one key are told apart; ``None``: not given.
        parameters: the parameters of the body.
    """
    if (name := conversation_name(owner)) is None:
        return {}
    (messages,) = parameters.prompts
    # an answer that goes on with the last message is no message of its own, which could be noted behind it
    noted = () if isinstance(messages, str) or parameters.template.get("continue_final_message") else messages
    return {"owner": f"{owner}/{digest(user)}", "keep_as": name, "noted_messages": noted}


def conversation_name(owner: str) -> str | None:
    """Return a new random name, with the owner's in front, for the session that keeps a chat; ``None`` for the owner
    ``""``, and if the owner's name makes it no name of a file.
    """
    name = full_name(owner, f"{CONVERSATION}{secrets.token_hex(12)}")
    try:
        return check_name(name) if owner else None
    except InputError:  # an owner whose name is none of a file
        return None


def digest(word: str | None) -> str:
    """Return 32 hexadecimal digits of a hash of a client's word, which may be long or a secret; ``""`` for ``None`` and
    for ``""``.
    """
    return hashlib.sha256(word.encode("utf-8", "surrogatepass")).hexdigest()[:32] if word else ""


def parse_turn(body: Generating, served: BodyEncoder, settings: ServerSettings, *, session: Session) -> ParsedRequest:
    """Parse the body of a chat into the next turn of a session, as one request with messages that the session appends;
    they are tokenized only when the turn runs. The session is not changed.

    Args:
        body: the body.
        served: counts the tokens of the messages.
        settings: of the server.
        session: the session, whose policy, budget and adapter apply.

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
    """Return the parameters of a body, checked; whether its answer begins with the prompt (``echo``); and whether it
    asks for the scores of the prompt alone: ``echo`` with ``max_tokens`` 0, which is read as 1.

    Args:
        url: the route.
        body: the body.
        served: tells how the model uses tools.
        tells: whether the model is told of tools; otherwise it knows them from an earlier turn.

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
    """Return the sampling parameters that apply where a body says nothing: temperature 1, a new random seed, and as
    many new tokens as the server's setting says for a chat or for -1, and 16 for a completion. What the body says is
    not in them.
    """
    most = settings.max_new_tokens if parameters.url == CHAT or parameters.unbounded else _FEW
    # 62 bits, as a seed is less than 2**63
    return SamplingParams(max_new_tokens=most, temperature=1.0, seed=secrets.randbits(62))


def fitted(sampling: SamplingParams, parameters: ParsedBody, tokens: int, settings: ServerSettings) -> SamplingParams:
    """Return default sampling parameters with at most as many ``max_new_tokens`` as the server's length limit leaves
    behind the prompt; without a limit, unchanged.

    Args:
        sampling: the defaults.
        parameters: the parameters of the body, whose own number of new tokens must fit.
        tokens: length of the prompt, with the conversation before it.
        settings: of the server.

    Raises:
        InputError: the prompt leaves no room for a token, or not for as many as the body asks for.
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
    """Return those of kvkeep's own fields that a body has as options of an engine's request: ``keep_ratio`` as a
    budget, pins, guard, ``keep_prompt``, ``return_memory``. The policy is checked, but neither it nor ``budget`` is
    among them.

    Args:
        body: the body.
        ids: token ids of the prompt, of whose number ``keep_ratio`` is a share.

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
    """Return the spans of a conversation's tokens that are never evicted: the pins of its body, messages that the body
    names, and system messages, if the body asks for that or they may be pinned unasked. Of a completion, and of a
    prompt that is cut, they are the body's pins alone.

    System messages are pinned unasked, if the server does so, where they take at most a quarter of the budget, and the
    policy can keep all pins.

    Args:
        parameters: the parameters of the body.
        body: the body if it is a chat; others name no messages.
        served: finds the tokens of messages.
        settings: say whether system messages are pinned unasked.
        own: the body's ``pins``, ``policy`` and ``budget``.
        tokens: length of the prompt, at which messages' pins are cut; ``None``: not known, nothing is cut.

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
    """Build one request to the engine.

    Args:
        parameters: the parameters of the body.
        defaults: sampling parameters, where the body has none.
        wishes: further options of the request, which win over those of the body.

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
    """Read the body of ``/v1/responses`` under a chat's names of its parameters, and return these parameters, checked,
    and its request: a turn with messages that are tokenized when it runs.

    Args:
        served: counts the tokens of the messages.
        fields: the parameters by a chat's names; ``None`` is no value.
        settings: of the server.
        names: the name of a parameter in ``fields`` → its name in the body.
        own: the body's own options of kvkeep, as `own_options` returns them, for the request.
        before: tokens of the conversation so far; 0: this turn is the first, so its system messages may be pinned.
        cache: the body's ``policy`` and ``budget``, by which it is decided whether they are.

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
    """Return a chat's messages, the tools that the chat template describes, and the template's further arguments as
    options of a session's turn.
    """
    return {"messages": parameters.prompts[0], "tools": parameters.described, **parameters.template}


def _counted(parameters: ParsedBody, served: BodyEncoder, settings: ServerSettings) -> int:
    """Return the number of tokens of a turn's messages, encoded as if they were a whole conversation; 0, uncounted, if
    the server has no length limit for which it is needed.
    """
    if not settings.max_model_len:
        return 0
    return len(served.encode(parameters.prompts[0], tools=parameters.described, template=parameters.template))
