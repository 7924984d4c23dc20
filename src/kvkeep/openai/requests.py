"""Bodies of OpenAI's requests as prompts and options of kvkeep; no model, tokenizer or file is needed.

A parameter of this or another server's API that asks for something that kvkeep cannot do is an error. Parameters that
only label a request are taken, and so are others whose value asks for nothing, such as ``"tools": []``. ``null`` is the
same as no value. Names that nobody knows are ignored; the answer names them.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvkeep.engine.request import Structure, json_structure, stop_ids, structure_of
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError, KVKeepError
from kvkeep.openai.messages import BY_WORDS, ParameterError, ToolUse, messages_of, short, unknown_fields, whole_text
from kvkeep.openai.tools import Tools, tools_of
from kvkeep.parameters import (
    ADD_SPECIAL_TOKENS,
    ENDING_PARAMETERS,
    LOGIT_BIAS,
    REQUEST_CACHE_PARAMETERS,
    SAMPLING_PARAMETERS,
    TEMPLATE_PARAMETERS,
    TRUNCATE_PROMPT_TOKENS,
)
from kvkeep.pins import spans

# The form of an answer, under the names that it has in OpenAI's API, vLLM, SGLang and llama.cpp.

_FORMATS = ("text", "json_object", "json_schema")
_KINDS_OF_FORM = {
    **dict.fromkeys(("guided_json", "json_schema"), "json"),
    "guided_json_object": "json_object",
    **dict.fromkeys(("guided_regex", "regex"), "regex"),
    "guided_choice": "choice",
    **dict.fromkeys(("guided_grammar", "grammar", "ebnf"), "grammar"),
}
"""Names of fields that give a form by itself → the kind of form in ``structured_outputs``."""


def form_of(given: Mapping[str, Any]) -> tuple[str | None, Structure | None]:
    """Return the name of the field by which a body asks for a form of its answer (a schema, an expression, a grammar),
    and this form; two ``None`` if the answer is free text.

    Raises:
        ParameterError: the form cannot be read, or several fields name one.
    """
    found = {
        "response_format": format_of("response_format", given.get("response_format")),
        "structured_outputs": _form("structured_outputs", given.get("structured_outputs")),
        **{name: _form(name, {kind: given[name]}, kind) for name, kind in _KINDS_OF_FORM.items() if name in given},
    }
    named = [(name, form) for name, form in found.items() if form is not None]
    if len(named) > 1:
        raise ParameterError(named[-1][0], f"and {named[0][0]} both name a form; give one of them")
    return named[0] if named else (None, None)


def _form(name: str, given: Any, kind: str | None = None) -> Structure | None:
    """Return the form of an answer that a field other than ``response_format`` asks for; ``None`` if it asks for none.

    Args:
        name: the field's name in the body.
        given: kinds of forms → values, as in ``structured_outputs``.
        kind: the only kind, if the field gives one by itself; an empty text or ``false`` then asks for none.

    Raises:
        ParameterError: the form is refused.
    """
    if kind is not None and given[kind] in ("", False):
        return None
    try:
        return structure_of(given)
    except InputError as error:
        # the engine speaks of structured_outputs, which this body does not have
        reason = str(error).replace(f"structured_outputs has {kind}=", f"{name}=")
        raise ParameterError(name, f"is refused: {reason}") from error


def format_of(name: str, given: Mapping[str, Any] | None) -> Structure | None:
    """Return the form of an answer that a value like ``{"type": "json_schema", …}`` asks for; ``None`` for free text.

    Args:
        name: the parameter: ``response_format``, or ``text.format`` of ``/v1/responses``, with the schema beside the
            type.
        given: its value.

    Raises:
        ParameterError: the value cannot be read.
    """
    kind = "text" if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind not in _FORMATS:
        raise ParameterError(f"{name}.type", f"is {short(kind)}; there are {', '.join(_FORMATS)}")
    # for messages: `/v1/responses` has the schema beside the type, other bodies have it under json_schema
    nested = name == "response_format" or "json_schema" in given
    place = f"{name}.json_schema" if nested else name
    if kind == "json_object" and given.get("schema") is None:
        return json_structure({"type": "object"})
    # a schema beside json_object, too, is one that the answer has to follow
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
_FORM: tuple[type, ...] = (str, bool, list, dict)
_COMMON: Mapping[str, tuple[type, ...]] = {
    **{_OTHER_NAMES.get(name, name): parameter.json_types for name, parameter in SAMPLING_PARAMETERS.items()},
    **{parameter.name: parameter.json_types for parameter in REQUEST_CACHE_PARAMETERS},
    "n": _WHOLE,
    **dict.fromkeys(("stream", "ignore_eos"), _FLAG),
    **dict.fromkeys(("model", "user"), _TEXT),
    "stop": (str, list),
    **dict.fromkeys(("stream_options", "response_format", "structured_outputs"), (dict,)),
    **dict.fromkeys(_KINDS_OF_FORM, _FORM),
    **{
        parameter.name: parameter.json_types
        for parameter in (*ENDING_PARAMETERS, TRUNCATE_PROMPT_TOKENS, ADD_SPECIAL_TOKENS)
    },
}
_TYPES: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    CHAT: {
        **_COMMON,
        **{parameter.name: parameter.json_types for parameter in TEMPLATE_PARAMETERS},
        **dict.fromkeys(("max_completion_tokens", "top_logprobs"), _WHOLE),
        **dict.fromkeys(("logprobs", "parallel_tool_calls"), _FLAG),
        **dict.fromkeys(("messages", "tools"), (list,)),
        "tool_choice": (str, dict),
    },
    COMPLETIONS: {
        **_COMMON,
        "prompt": (str, list),
        **dict.fromkeys(("logprobs", "best_of"), _WHOLE),
        "echo": _FLAG,
    },
}
_ANYWHERE = {name for types in _TYPES.values() for name in types}
_IN_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}
_ASKS_FOR_NOTHING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("stream", "echo"), (False,)),
    "stream_options": ({},),
}
"""Values of parameters with which a body asks for nothing that kvkeep cannot do."""
LABELS = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    "prompt_cache_options",
    *("request_id", "rid", "guided_decoding_backend", "cache_prompt", "id_slot", "keep_alive", "timings_per_token"),
)
"""Fields that describe a request, or say how a server should work, and never change the answer."""
_UNBUILT: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(  # whatever they say but nothing
        (
            *("audio", "prediction", "web_search_options", "moderation", "suffix", "input"),
            *("bad_words", "bad_words_ids", "allowed_token_ids", "prompt_logprobs", "logits_processors", "documents"),
            *("chat_template", "mm_processor_kwargs", "structural_tag", "guided_whitespace_pattern", "cache_salt"),
            *("kv_transfer_params", "vllm_xargs", "thinking_token_budget", "logprob_token_ids", "stop_regex"),
            *("custom_logit_processor", "custom_params", "session_params", "lora_path", "lora"),
            *("samplers", "image_data", "reasoning_format", "dry_sequence_breakers", "grammar_triggers", "n_keep"),
            *("options", "format", "template", "system", "images", "context", "no_repeat_ngram_size", "conversation"),
            *("negative_prompt", "guidance_scale", "transforms", "prediction_tokens", "instructions"),
            "context_management",
            *("exponential_decay_length_penalty", "forced_decoder_ids", "suppress_tokens", "custom_token_bans"),
        ),
        (),
    ),
    **dict.fromkeys(
        (
            *("use_beam_search", "return_tokens_as_token_ids", "return_token_ids", "early_stopping", "background"),
            *("include_logprobs", "post_sampling_probs", "return_hidden_states", "safe_prompt", "raw", "watermark"),
            *("details", "decoder_input_details", "return_full_text", "ban_eos_token", "return_tokens"),
        ),
        (False,),
    ),
    **dict.fromkeys(
        (
            *(
                "spaces_between_special_tokens",
                "include_reasoning",
                "separate_reasoning",
                "stream_reasoning",
                "add_bos",
            ),
            *("do_sample", "parse_tool_calls", "add_bos_token"),
        ),
        (True,),
    ),
    **dict.fromkeys(
        (
            *(
                "mirostat",
                "mirostat_mode",
                "dynatemp_range",
                "dry_multiplier",
                "xtc_probability",
                "n_probs",
                "min_keep",
            ),
            *("priority", "top_a", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "smoothing_factor", "n_discard"),
        ),
        (0,),
    ),
    **dict.fromkeys(("length_penalty", "num_beams", "typical_p", "tfs", "tfs_z", "encoder_repetition_penalty"), (1,)),
    "truncation_side": ("left",),
    "truncation": ("disabled",),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "top_n_sigma": (-1,),
    "reasoning_budget": (-1,),
    "session_id": (),
    "keep_ratio": (),
    "pin_system": (False,),
    "pin_messages": ([],),
    "drop_message": ({}, []),
    "reposition": (False, []),
}
"""Fields of this and other servers that change an answer and are not built → the values that change nothing."""
_RENAMED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(
        ("max_new_tokens", "n_predict", "num_predict", "max_length", "max_output_tokens"), ("max_tokens", ())
    ),
    **dict.fromkeys(("min_new_tokens", "min_length"), ("min_tokens", ())),
    "repeat_penalty": ("repetition_penalty", (1,)),
    "random_seed": ("seed", ()),
    **dict.fromkeys(("stop_sequences", "stop_words", "stop_strings", "stopping_strings"), ("stop", ())),
    "eos_token_id": ("stop_token_ids", ()),
    "no_stop_trim": ("include_stop_str_in_output", (False,)),
    **dict.fromkeys(("truncate", "truncation_length", "num_ctx"), ("truncate_prompt_tokens", ())),
    **dict.fromkeys(("enable_thinking", "think", "thinking", "thinking_budget"), ("chat_template_kwargs", ())),
    "reasoning": ("reasoning_effort", ({},)),
    "functions": ("tools", ()),
    **dict.fromkeys(
        ("adapter", "adapters", "adapter_id", "adapter_source", "lora_name", "lora_request"), ("model", ())
    ),
    "function_call": ("tool_choice", ("none", "auto")),
}
"""Names that other servers have for a field → its name here, and the values that change nothing."""
_ELSEWHERE: Mapping[str, tuple[Any, ...]] = {
    **_ASKS_FOR_NOTHING,
    "tool_choice": ("none", "auto"),
    "best_of": (1,),
    **dict.fromkeys(("parallel_tool_calls", "skip_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("logprobs", "ignore_eos", "include_stop_str_in_output", "continue_final_message"), (False,)),
    "add_special_tokens": (False,),
    "repetition_detection": (False, {"max_pattern_size": 0}),
}
"""Fields of one route → the values that change nothing on another one."""
OWN = (
    *(parameter.name for parameter in REQUEST_CACHE_PARAMETERS),
    *("keep_ratio", "session_id", "cache_salt", "pin_system", "pin_messages", "return_memory", "structured_outputs"),
    *("drop_message", "reposition", *_KINDS_OF_FORM),
    *(parameter.name for parameter in (*ENDING_PARAMETERS, TRUNCATE_PROMPT_TOKENS, ADD_SPECIAL_TOKENS)),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
)
"""Fields beyond OpenAI's API. A name that is nearly one of them is a mistake."""
_PARTS: Mapping[str, tuple[str, ...]] = {
    "stream_options": ("include_usage", "continuous_usage_stats", "include_obfuscation"),
    "response_format": ("type", "json_schema", "schema", "name", "description", "strict"),
    "response_format.json_schema": ("name", "description", "schema", "strict"),
    "text": ("format", "verbosity"),
    "text.format": ("type", "name", "description", "schema", "strict", "json_schema"),
    "reasoning": ("effort", "summary", "generate_summary"),
}
"""Fields that are objects → their own fields that are known."""
_ALIKE = 0.8
"""Similarity to a name of kvkeep from which an unknown field is refused: fields of other servers are less alike."""


def ignored(
    given: Mapping[str, Any], known: Collection[str], own: Collection[str] = OWN, *, generates: bool = True
) -> tuple[str, ...]:
    """Return the names of a body's fields that nobody knows, also of fields in its objects and messages; refuse those
    that are not read here and would change the answer.

    Args:
        given: the body.
        known: the fields that are read on this route.
        own: the fields of kvkeep on this route, to whose names unknown ones are compared.
        generates: whether the body asks for new tokens, which the fields of other routes would change.

    Raises:
        ParameterError: a field is known, and would change the answer; or its name is nearly one of kvkeep's.
    """
    found = []
    for name, value in given.items():
        if name in known or name in LABELS:
            continue
        if value is None or _asks_for_nothing(name, value):  # clients write all fields, with such values
            continue
        if name in _RENAMED:
            raise ParameterError(name, f"is not built; give {_RENAMED[name][0]} in place of it")
        if name in _UNBUILT:
            raise ParameterError(name, f"cannot be {short(value)} here; leave it out")
        if generates and (route := next((url for url, types in _TYPES.items() if name in types), None)):
            raise ParameterError(name, f"is unknown here, as it belongs to {route}; leave it out")
        # cut, since a comparison takes time that grows with the square of the length
        if alike := difflib.get_close_matches(name[:80], own, 1, _ALIKE):
            raise ParameterError(name[:80], f"is unknown; did you mean {alike[0]}?")
        found.append(name)
    parts = [name for path, names in _PARTS.items() for name in _unknown_parts(given, known, path, names)]
    return (*found, *parts, *unknown_fields(given.get("messages")))


def _unknown_parts(
    given: Mapping[str, Any], known: Collection[str], path: str, names: Collection[str]
) -> Iterator[str]:
    """Yield the names of fields that nobody knows in one of a body's objects, such as ``stream_options.foo``; none if
    the body has no such object, or its field is not read.

    Args:
        given: the body.
        known: the fields of the body that are read.
        path: the object, such as ``text.format``.
        names: its fields that are known.
    """
    first, *rest = path.split(".")
    part = given.get(first) if first in known else None
    for name in rest:
        part = part.get(name) if isinstance(part, dict) else None
    if isinstance(part, dict):
        yield from (f"{path}.{name}" for name, value in part.items() if name not in names and value is not None)


def _asks_for_nothing(name: str, value: object) -> bool:
    """Return whether a field that this route does not read has a value that changes nothing, such as an empty one;
    ``False`` for a field that nobody knows.
    """
    if name in _ANYWHERE:
        neutral = _ELSEWHERE.get(name, ())
    elif name in _RENAMED:
        neutral = _RENAMED[name][1]
    elif name in _UNBUILT:
        neutral = _UNBUILT[name]
    else:
        return False
    return value in ("", [], {}) or value in neutral  # an empty value asks for nothing, whatever the field


# options of the engine that have the name of the body's field, and those that do not
_SAME = (
    "temperature",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "repetition_detection",
    "policy",
    "budget",
    "guard",
    "keep_prompt",
)
_OPTIONS = {
    **{name: name for name in (*_SAME, "include_stop_str_in_output", "skip_special_tokens")},
    "ignore_eos": "ignore_end",
    "min_tokens": "min_new_tokens",
}
_NO_LIMIT = -1
"""The number of new tokens by which clients of other servers ask for as many as there may be."""
_NO_SEED = -1
"""The seed by which clients of other servers ask for another text each time."""
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
        template: how a prompt becomes tokens, by the arguments of `kvkeep.models.tokenization.encode_chat` or `encode`.
        truncate: the most tokens of a prompt, of which the last are kept; -1: as many as fit; ``None``: all.
        ignored: fields that nobody knows.
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
    template: Mapping[str, Any] = field(default_factory=dict)
    truncate: int | None = None
    ignored: tuple[str, ...] = ()

    unbounded: bool = False

    @property
    def shows_special(self) -> bool:
        """Return whether the texts of answers show special tokens: ``"skip_special_tokens": false``."""
        return not self.options.get("skip_special_tokens", True)

    def truncated(self, ids: list[int], most: int | None) -> list[int]:
        """Return the last tokens of a prompt, as many as ``truncate_prompt_tokens`` of the body says; all without it.

        With -1 there are as many as leave room for the answer within ``most``, but at least one.

        Args:
            ids: the whole prompt.
            most: tokens of a prompt and its answer together; ``None``: no limit.
        """
        if self.truncate is None:
            return ids
        # -1: what the answer leaves, but one token at least: a slice from -0 on would be the whole prompt
        room = len(ids) if most is None else max(1, most - self.options.get("max_new_tokens", 1))
        return ids[-(room if self.truncate < 0 else self.truncate) :]

    def unread(self, reads: Callable[[str], bool]) -> tuple[str, ...]:
        """Return the variables that the body gives the chat template and that it does not read, as names of fields,
        such as ``chat_template_kwargs.foo``.

        Args:
            reads: tells whether the template reads a variable.
        """
        variables: Mapping[str, Any] = self.template.get("chat_template_kwargs", {})
        return tuple(f"chat_template_kwargs.{name}" for name in variables if not reads(name))

    @property
    def described(self) -> tuple[dict[str, Any], ...]:
        """Return the body's tools, in OpenAI's form, for a chat template that describes them to the model; ``()``
        without tools, or if the template knows none.
        """
        return self.tools.described if self.tools and self.tools.use.by_template else ()


def read(
    url: str, body: object, *, honoured: Collection[str] = (), tells: bool = True, use: ToolUse = BY_WORDS
) -> ParsedBody:
    """Check every parameter of a chat's or a completion's body, and return its prompts (texts, token ids or messages;
    none is tokenized) and its options under kvkeep's names.

    Args:
        url: the route that it was sent to.
        body: the JSON object.
        honoured: parameters that the caller itself honours, whatever they ask for.
        tells: whether the model is told about tools; otherwise it knows them from an earlier turn.
        use: how the model uses tools.

    Raises:
        ParameterError: a parameter has another type, or asks for something that kvkeep cannot do.
        InputError: the route is unknown, or the body is no object.
    """
    if url not in _TYPES:
        raise InputError(f"there is no route {url:.80}; there are {CHAT} and {COMPLETIONS}")
    if not isinstance(body, dict):
        raise InputError("the body is no JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    types = _TYPES[url]
    unknown = ignored(given, types)
    given = {name: value for name, value in given.items() if name in types}
    for name, value in given.items():
        _check(name, value, types[name], honoured)
    (named, form), tools = form_of(given), tools_of(given, use) if url == CHAT else None
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
    options = (
        length | same | _seed(given) | shares | _stops(given) | _biases(given) | _logprobs(url, given) | _pins(given)
    )
    structure = tools.structure(form, named) if tools else form
    if structure is not None:
        options["structured_outputs"] = structure
    # see `Tools._start`: the grammar then has no text before a call
    begins = tools is not None and (tools.choice == "required" or form is not None)
    if "min_tokens" in given:
        spelling["min_new_tokens"] = "min_tokens"
    return ParsedBody(
        *(url, prompts, n, options, unset, spelling, given.get("model"), tools, begins, "tools" if tools else named),
        template=_template(url, given),
        truncate=_truncated(given),
        ignored=unknown,
        unbounded=_NO_LIMIT in (given.get("max_tokens"), given.get("max_completion_tokens")),
    )


def in_words_of(asked: ParsedBody, error: Exception) -> Exception:
    """Return a new error with an option's error message in which the names of options are those of the body: a
    `ParameterError` if the message begins with the name of one that the body gives, else an `InputError`.
    """
    text = str(error)
    for option, name in asked.spelling.items():
        text = text.replace(option, name)
    names = [*asked.options, *asked.spelling.values()]
    param = next((name for name in names if text.startswith((f"{name}=", f"{name} "))), None)
    return InputError(text) if param is None else ParameterError(param, f"is refused: {text}")


def _check(name: str, value: object, wanted: tuple[type, ...], honoured: Collection[str]) -> None:
    """Check a parameter's type, that a number is below 2**63, and that ``stream``, ``stream_options`` and ``echo`` ask
    for nothing unless the caller honours them.

    Args:
        name: the parameter's name.
        value: its value.
        wanted: the types that it may have.
        honoured: parameters that the caller of `read` honours itself, such as ``stream``.

    Raises:
        ParameterError: a check fails.
    """
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):  # True is an int to Python
        raise ParameterError(name, f"is {short(value)} and not {_IN_WORDS.get(wanted[-1], 'an object')}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ParameterError(name, "is too large a number")
    if name not in honoured and name in _ASKS_FOR_NOTHING and value not in _ASKS_FOR_NOTHING[name]:
        raise ParameterError(name, f"cannot be {short(value)} here; leave it out")


def _prompts(given: Mapping[str, Any]) -> tuple[str | list[int], ...]:
    """Return the prompts of a completion's body, each a text or a list of token ids. The body has one such prompt, or a
    list of them.

    Raises:
        ParameterError: there is no prompt, or one is empty, of another form, or has half of a character.
    """
    prompt = given.get("prompt")
    # an empty list has no prompts, though all of its entries are token ids
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
    """Return whether a value is a list of whole numbers from 0 to below 2**63, or an empty list. Whether a model has
    such tokens is not checked.
    """
    # type() and not isinstance: true and false are ints to Python
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _length(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the option ``max_new_tokens``, and this option → the name that the body uses for it; two empty mappings if
    the body has neither name, or asks for as many as possible with -1.

    Raises:
        ParameterError: two names of the option have different values.
    """
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    if len({given[name] for name in names}) > 1:
        raise ParameterError("max_tokens", "and max_completion_tokens differ; give one of them")
    if not names or given[names[0]] == _NO_LIMIT:
        return {}, {}
    return {"max_new_tokens": given[names[0]]}, {"max_new_tokens": names[0]}


def _seed(given: Mapping[str, Any]) -> dict[str, int]:
    """Return the option ``seed``, from 0 to below 2**63; empty if the body has none, or -1, with which clients of other
    servers ask for another text each time.

    Other negative seeds, which OpenAI's API allows, become seeds of their own: modulo 2**63.
    """
    if given.get("seed", _NO_SEED) == _NO_SEED:
        return {}
    return {"seed": given["seed"] % 2**63}


def _stops(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options ``stop`` and ``stop_token_ids``, both as lists, and each only if the body has it.

    Raises:
        ParameterError: a stop text is empty or no text, or a token id is refused.
    """
    found: dict[str, Any] = {}
    if "stop" in given:
        texts = [given["stop"]] if isinstance(given["stop"], str) else given["stop"]
        if not all(isinstance(text, str) and text for text in texts):
            raise ParameterError("stop", "has an entry that is no text, or empty")
        found["stop"] = [whole_text("stop", text) for text in texts]
    if "stop_token_ids" in given:
        try:
            found["stop_token_ids"] = list(stop_ids(given["stop_token_ids"]))
        except InputError as error:
            raise ParameterError("stop_token_ids", f"is refused: {error}") from error
    return found


def _template(url: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the further arguments with which a prompt is encoded, as `ParsedBody.template` has them: the template's
    variables and three flags, each only if it differs from the route's default.

    As in vLLM, ``add_generation_prompt`` and ``continue_final_message`` may also stand in ``chat_template_kwargs``, and
    take precedence there.

    Raises:
        ParameterError: a variable has the wrong type or half of a character, or two fields contradict each other.
    """
    variables = dict(given.get("chat_template_kwargs", {}))
    flags = {"add_special_tokens": given["add_special_tokens"]} if "add_special_tokens" in given else {}
    for name in ("add_generation_prompt", "continue_final_message"):
        value = variables.pop(name, given.get(name))
        if value is not None and not isinstance(value, bool):
            raise ParameterError(f"chat_template_kwargs.{name}", f"is {short(value)} and not true or false")
        if value is not None:
            flags[name] = value
    # false beside it is the default there, and is dropped
    if flags.get("continue_final_message") and flags.pop("add_generation_prompt", False):
        raise ParameterError(
            "add_generation_prompt", "begins a new answer, and continue_final_message none; give one of them"
        )
    if "reasoning_effort" in given:
        variables.setdefault("reasoning_effort", given["reasoning_effort"])
    try:
        json.dumps(variables, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ParameterError("chat_template_kwargs", "has half of a character") from error
    shown = {"chat_template_kwargs": variables} if variables else {}
    # a chat template writes the special tokens itself
    plain = {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": url != CHAT}
    return {**shown, **{name: value for name, value in flags.items() if value is not plain[name]}}


def _truncated(given: Mapping[str, Any]) -> int | None:
    """Return ``truncate_prompt_tokens``: how many of a prompt's last tokens are kept, or -1 for as many as fit;
    ``None`` if the body does not have it, so that all are kept.

    Raises:
        ParameterError: the number is 0 or out of range.
    """
    most: int | None = given.get(TRUNCATE_PROMPT_TOKENS.name)
    if most is not None and (not most or not TRUNCATE_PROMPT_TOKENS.allows(most)):
        raise ParameterError(TRUNCATE_PROMPT_TOKENS.name, f"is {short(most)}; give 1 or more tokens, or -1")
    return most


def _pins(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option ``pins``, spans of the prompt's positions that are never evicted, as lists ``[start, stop]`` in
    order; an empty mapping if the body does not have the field.

    Raises:
        ParameterError: the spans are refused.
    """
    try:
        return {"pins": [list(span) for span in spans(given["pins"])]} if "pins" in given else {}
    except InputError as error:
        raise ParameterError("pins", f"is refused: {error}") from error


def _biases(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option ``logit_bias``, token id as an int → number added to its logit; an empty mapping if the body
    has none.

    Raises:
        ParameterError: a token id is no whole number of at most 9 digits, or a bias is none from -100 to 100.
    """
    if not given.get("logit_bias"):
        return {}
    found: Mapping[str, object] = given["logit_bias"]
    for token, added in found.items():
        if not re.fullmatch("[0-9]{1,9}", token, re.ASCII):  # no vocabulary has ids of more digits
            raise ParameterError("logit_bias", f"has {short(token)} in place of a token id")
        if isinstance(added, bool) or not isinstance(added, int | float) or not LOGIT_BIAS.allows(added):
            raise ParameterError("logit_bias", f"adds {short(added)} to a logit; give a number from -100 to 100")
    return {"logit_bias": {int(token): added for token, added in found.items()}}


def _logprobs(url: str, given: Mapping[str, Any]) -> dict[str, int]:
    """Return the option ``logprobs``: how many of the likeliest tokens are reported for each new token, 0 to 20; an
    empty mapping if the body asks for no log-probabilities.

    A chat asks with ``logprobs: true`` and ``top_logprobs``, a completion with the number alone.

    Raises:
        ParameterError: the number is out of range, or ``top_logprobs`` is given without ``logprobs``.
    """
    if url == COMPLETIONS:
        name, wanted, count = "logprobs", "logprobs" in given, given.get("logprobs", 0)
    else:
        name, wanted, count = "top_logprobs", given.get("logprobs", False), given.get("top_logprobs", 0)
        if count and not wanted:
            raise ParameterError(name, "has no effect without logprobs: true")
    if not 0 <= count <= 20:  # OpenAI's limit
        raise ParameterError(name, f"is {short(count)}, and there are 0 to 20")
    return {"logprobs": count} if wanted else {}


def _shares(given: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return ``top_k``, ``top_p`` and ``min_p`` as options, as far as they leave out tokens, and the names of those
    that the body turns off, with a value such as ``top_p: 1``.

    If the body sets temperature 0, where none has an effect, return no options, and all three as turned off.

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
