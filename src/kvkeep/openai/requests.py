"""Bodies of OpenAI's requests as prompts and options of kvkeep; no model, tokenizer or file is needed.

A parameter that asks for something that kvkeep cannot do is an error. Parameters that only label a request are taken,
and so are others whose value asks for nothing, such as ``"tools": []``. ``null`` is the same as no value.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvkeep.engine.request import Structure, json_structure, structure_of
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError, KVKeepError
from kvkeep.openai.messages import BY_WORDS, ParameterError, ToolUse, messages_of, short, whole_text
from kvkeep.openai.tools import Tools, tools_of
from kvkeep.parameters import LOGIT_BIAS, REQUEST_CACHE_PARAMETERS, SAMPLING_PARAMETERS
from kvkeep.pins import spans

# The form of an answer in OpenAI's and vLLM's words: ``response_format`` and ``structured_outputs``.

_FORMATS = ("text", "json_object", "json_schema")


def form_of(given: Mapping[str, Any]) -> Structure | None:
    """Return the form that a body's ``response_format`` or ``structured_outputs`` asks for; ``None`` for free text.

    Raises:
        ParameterError: the form cannot be read, or both fields name one.
    """
    found = format_of("response_format", given.get("response_format"))
    try:
        other = structure_of(given.get("structured_outputs"))
    except InputError as error:
        raise ParameterError("structured_outputs", f"is refused: {error}") from error
    if found and other:
        raise ParameterError("structured_outputs", "and response_format both name a form; give one of them")
    return found or other


def format_of(name: str, given: Mapping[str, Any] | None) -> Structure | None:
    """Return the form that a ``response_format`` asks for, also as ``/v1/responses`` writes it; ``None`` for free
    text.

    Args:
        name: the parameter's name.
        given: its value.

    Raises:
        ParameterError: the value cannot be read.
    """
    kind = "text" if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind not in _FORMATS:
        raise ParameterError(f"{name}.type", f"is {short(kind)}; there are {', '.join(_FORMATS)}")
    if kind == "json_object":
        return json_structure({"type": "object"})
    place = f"{name}.json_schema"
    described = given.get("json_schema") if "schema" not in given else given
    if not isinstance(described, dict) or described.get("schema") is None:
        raise ParameterError(place, 'has no schema; give {"name": "…", "schema": {…}}')
    try:
        return json_structure(described["schema"])
    except InputError as error:
        raise ParameterError(f"{place}.schema", f"is refused: {error}") from error


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MOST_CHOICES = 128
"""Most texts that one body may ask for."""

Prompt: TypeAlias = str | list[int] | list[dict[str, Any]]
"""A text to continue as it is, token ids, or the messages of a conversation."""

_WHOLE, _FLAG, _TEXT = (int,), (bool,), (str,)
_OTHER_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_COMMON: Mapping[str, tuple[type, ...]] = {
    **{_OTHER_NAMES.get(name, name): parameter.json_types for name, parameter in SAMPLING_PARAMETERS.items()},
    **{parameter.name: parameter.json_types for parameter in REQUEST_CACHE_PARAMETERS},
    "n": _WHOLE,
    **dict.fromkeys(("stream", "ignore_eos"), _FLAG),
    **dict.fromkeys(("model", "user"), _TEXT),
    "store": _FLAG,
    "metadata": (dict,),
    "stop": (str, list),
    **dict.fromkeys(("stream_options", "response_format", "structured_outputs"), (dict,)),
}
_TYPES: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    CHAT: {
        **_COMMON,
        **dict.fromkeys(("max_completion_tokens", "top_logprobs"), _WHOLE),
        **dict.fromkeys(("logprobs", "parallel_tool_calls"), _FLAG),
        **dict.fromkeys(("messages", "tools", "functions", "modalities"), (list,)),
        **dict.fromkeys(("audio", "prediction", "web_search_options"), (dict,)),
        **dict.fromkeys(("tool_choice", "function_call"), (str, dict)),
        **dict.fromkeys(("service_tier", "reasoning_effort", "verbosity"), _TEXT),
        **dict.fromkeys(("safety_identifier", "prompt_cache_key", "prompt_cache_retention"), _TEXT),
    },
    COMPLETIONS: {
        **_COMMON,
        "prompt": (str, list),
        **dict.fromkeys(("logprobs", "best_of"), _WHOLE),
        "echo": _FLAG,
        "suffix": _TEXT,
    },
}
_IN_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}
_ASKS_FOR_NOTHING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("stream", "echo"), (False,)),
    "functions": ([],),
    "function_call": ("none", "auto"),
    **dict.fromkeys(("audio", "prediction", "web_search_options", "reasoning_effort", "verbosity"), ()),
    "stream_options": ({},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
}
"""Values of parameters with which a body asks for nothing that kvkeep cannot do."""
_SAME = (
    "temperature",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "policy",
    "budget",
    "guard",
)
_OPTIONS = {**{name: name for name in _SAME}, "ignore_eos": "ignore_end", "min_tokens": "min_new_tokens"}
_NO_LIMIT = -1
"""The number of new tokens by which clients of other servers ask for as many as there may be."""
_OFF: Mapping[str, tuple[float, ...]] = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
"""Values with which a parameter leaves all tokens to be drawn."""


@dataclass(frozen=True)
class ParsedBody:
    """A body that was read.

    Attributes:
        url: `CHAT` or `COMPLETIONS`.
        prompts: each is continued on its own.
        n: texts for each prompt.
        options: the body's options, by kvkeep's names, as a line of a batch job has them.
        unset: sampling options that the body turns off.
        spelling: option → the parameter's name, where the two differ.
        model: the model that the body names.
        tools: the tools that the model may call.
        begins_with_call: whether an answer is either a text or calls, and no text comes before them.
        form: the parameter that gives the answer its form, if one does.
        unbounded: whether an answer is as long as it may be: ``"max_tokens": -1``.
    """

    url: str
    prompts: tuple[Prompt, ...]
    n: int
    options: Mapping[str, Any]
    unset: frozenset[str]
    spelling: Mapping[str, str]
    model: str | None
    tools: Tools | None = None
    begins_with_call: bool = False
    form: str | None = None
    unbounded: bool = False

    @property
    def described(self) -> tuple[dict[str, Any], ...]:
        """Return the tools that the chat template describes to the model; ``()`` if it describes none."""
        return self.tools.described if self.tools and self.tools.use.by_template else ()


def read(
    url: str, body: object, *, honoured: Collection[str] = (), tells: bool = True, use: ToolUse = BY_WORDS
) -> ParsedBody:
    """Read a body of a chat or a completion, after a check of every parameter.

    Args:
        url: the route that it was sent to.
        body: the JSON object.
        honoured: parameters that the caller itself honours, whatever they ask for.
        tells: whether the model is told about tools; otherwise it knows them from an earlier turn.
        use: how the model uses tools.

    Raises:
        ParameterError: a parameter has another type, is unknown, or asks for something that kvkeep cannot do.
        InputError: the route is unknown, or the body is no object.
    """
    if url not in _TYPES:
        raise InputError(f"there is no route {url:.80}; there are {CHAT} and {COMPLETIONS}")
    if not isinstance(body, dict):
        raise InputError("the body is no JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        _check(name, value, _TYPES[url], honoured)
    form, tools = form_of(given), tools_of(given, use) if url == CHAT else None
    messages = messages_of(given, use) if url == CHAT else []
    told = tools.told(messages) if tools and tells and not use.by_template else messages
    prompts = (told,) if url == CHAT else _prompts(given)
    n = given.get("n", 1)
    if not 1 <= n * len(prompts) <= MOST_CHOICES:
        raise ParameterError("n", f"asks for {short(n * len(prompts))} texts; there may be 1 to {MOST_CHOICES}")
    if given.get("best_of", n) != n:
        raise ParameterError("best_of", "is not n; all texts that are drawn are returned")
    length, spelling = _length(given)
    same = {_OPTIONS[name]: value for name, value in given.items() if name in _OPTIONS}
    shares, unset = _shares(given)
    options = length | same | shares | _stop(given) | _biases(given) | _logprobs(url, given) | _pins(given)
    structure = tools.structure(form) if tools else form
    if structure is not None:
        options["structured_outputs"] = structure
    begins = tools is not None and (tools.choice == "required" or form is not None)
    if "min_tokens" in given:
        spelling["min_new_tokens"] = "min_tokens"
    names = ("structured_outputs", "response_format")
    named = "tools" if tools else next((name for name in names if structure is not None and given.get(name)), None)
    unbounded = _NO_LIMIT in (given.get("max_tokens"), given.get("max_completion_tokens"))
    return ParsedBody(url, prompts, n, options, unset, spelling, given.get("model"), tools, begins, named, unbounded)


def in_words_of(asked: ParsedBody, error: Exception) -> Exception:
    """Return an option's error that names the body's parameter in place of the option."""
    text = str(error)
    for option, name in asked.spelling.items():
        text = text.replace(option, name)
    names = [*asked.options, *asked.spelling.values()]
    param = next((name for name in names if text.startswith((f"{name}=", f"{name} "))), None)
    return InputError(text) if param is None else ParameterError(param, f"is refused: {text}")


def _check(name: str, value: object, types: Mapping[str, tuple[type, ...]], honoured: Collection[str]) -> None:
    """Check that a parameter is known and has the right type.

    Refuse a parameter that kvkeep cannot honour, unless its value asks for nothing or the caller honours it
    (``honoured``).

    Raises:
        ParameterError: a check fails.
    """
    if name not in types:
        alike = difflib.get_close_matches(name[:80], types, 1)
        raise ParameterError(name[:80], f"is unknown; {f'perhaps {alike[0]}' if alike else 'leave it out'}")
    wanted = types[name]
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):  # True is an int to Python
        raise ParameterError(name, f"is {short(value)} and not {_IN_WORDS.get(wanted[-1], 'an object')}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ParameterError(name, "is too large a number")
    if name not in honoured and name in _ASKS_FOR_NOTHING and value not in _ASKS_FOR_NOTHING[name]:
        raise ParameterError(name, f"cannot be {short(value)} here; leave it out")


def _prompts(given: Mapping[str, Any]) -> tuple[str | list[int], ...]:
    """Return the prompts of a body as a tuple. A body has one text, texts, token ids, or lists of token ids.

    Raises:
        ParameterError: there is no prompt, or one is empty or of another form.
    """
    prompt = given.get("prompt")
    prompts = [prompt] if isinstance(prompt, str) or (prompt and _are_ids(prompt)) else prompt
    if not prompts:
        raise ParameterError("prompt", "has no text")
    for text_or_ids in prompts:
        if text_or_ids == "":
            raise ParameterError("prompt", "is an empty text")
        if not isinstance(text_or_ids, str) and not (text_or_ids and _are_ids(text_or_ids)):
            raise ParameterError("prompt", "is no text, no list of texts, and no list of token ids")
    return tuple(
        whole_text("prompt", text_or_ids) if isinstance(text_or_ids, str) else text_or_ids for text_or_ids in prompts
    )


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _length(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the option ``max_new_tokens``, and the name that the body uses for it; empty if the body does not set
    it.

    Raises:
        ParameterError: two names of the option have different values.
    """
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    if len({given[name] for name in names}) > 1:
        raise ParameterError("max_tokens", "and max_completion_tokens differ; give one of them")
    if not names or given[names[0]] == _NO_LIMIT:
        return {}, {}
    return {"max_new_tokens": given[names[0]]}, {"max_new_tokens": names[0]}


def _stop(given: Mapping[str, Any]) -> dict[str, Any]:
    if "stop" not in given:
        return {}
    texts = [given["stop"]] if isinstance(given["stop"], str) else given["stop"]
    if not all(isinstance(text, str) and text for text in texts):
        raise ParameterError("stop", "has an entry that is no text, or empty")
    return {"stop": [whole_text("stop", text) for text in texts]}


def _pins(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option ``pins``, spans of the prompt that are never evicted; an empty mapping if the body has none.

    Raises:
        ParameterError: the spans are refused.
    """
    try:
        return {"pins": [list(span) for span in spans(given["pins"])]} if "pins" in given else {}
    except InputError as error:
        raise ParameterError("pins", f"is refused: {error}") from error


def _biases(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option ``logit_bias``, token id → number added to its logit; an empty mapping if the body has none.

    Raises:
        ParameterError: a token id is no number, or a bias is out of range.
    """
    if not given.get("logit_bias"):
        return {}
    found: Mapping[str, object] = given["logit_bias"]
    for token, added in found.items():
        if not re.fullmatch("[0-9]{1,9}", token, re.ASCII):
            raise ParameterError("logit_bias", f"has {short(token)} in place of a token id")
        if isinstance(added, bool) or not isinstance(added, int | float) or not LOGIT_BIAS.allows(added):
            raise ParameterError("logit_bias", f"adds {short(added)} to a logit; give a number from -100 to 100")
    return {"logit_bias": {int(token): added for token, added in found.items()}}


def _logprobs(url: str, given: Mapping[str, Any]) -> dict[str, int]:
    """Return the option ``logprobs``: how many of the likeliest tokens are reported beside each token.

    Raises:
        ParameterError: the number is out of range, or given without ``logprobs``.
    """
    if url == COMPLETIONS:
        name, wanted, count = "logprobs", "logprobs" in given, given.get("logprobs", 0)
    else:
        name, wanted, count = "top_logprobs", given.get("logprobs", False), given.get("top_logprobs", 0)
        if count and not wanted:
            raise ParameterError(name, "has no effect without logprobs: true")
    if not 0 <= count <= 20:
        raise ParameterError(name, f"is {short(count)}, and there are 0 to 20")
    return {"logprobs": count} if wanted else {}


def _shares(given: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return ``top_k``, ``top_p`` and the like as options, and the names of those that the body turns off.

    At temperature 0, where none has an effect, return no options and count all as turned off.

    Raises:
        ParameterError: a value is out of range.
    """
    found = {name: given[name] for name in _OFF if name in given}
    on = {name: value for name, value in found.items() if value not in _OFF[name]}
    try:
        checked: dict[str, Any] = {name: value if name == "top_k" else float(value) for name, value in on.items()}
        SamplingParams(temperature=1.0, **checked)  # checks the numbers, also where they have no effect
    except KVKeepError as error:
        name = next((name for name in on if str(error).startswith(f"{name}=")), "top_p")
        raise ParameterError(name, f"is refused: {error}") from error
    if given.get("temperature") == 0:
        return {}, frozenset(_OFF)
    return on, frozenset(found.keys() - on.keys())
