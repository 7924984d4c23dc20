"""The options of one line of a batch job, and the request that they make."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from kvkeep.engine.request import Request, Structure
from kvkeep.engine.sampling_params import Sampling
from kvkeep.errors import InputError
from kvkeep.pins import Spans, spans

OPTIONS = "options"
"""The field of a line that holds its options."""

_SAMPLING = {field.name for field in dataclasses.fields(Sampling)}
_REQUEST = {"policy", "budget", "stop", "ignore_end", "structured_outputs", "logprobs", "pins", "guard"}
_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("max_new_tokens", "top_k", "seed", "budget", "logprobs"), (int,)),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "guard"), (int, float)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (int, float)),
    "logit_bias": (dict,),
    "structured_outputs": (Structure, dict),
    "policy": (str,),
    "stop": (str, list),
    "pins": (list,),
    "ignore_end": (bool,),
}
_ALIASES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
"""Names that other tools have for options."""
_SHOWN = 60
"""Most characters of a value in a message."""


def request_of(number: int, prompt: Sequence[int], options: object, defaults: Sampling, pinned: Spans = ()) -> Request:
    """The request of a line. It is drawn with the job's seed and the line's number, or with the line's own seed.

    Args:
        number: the line's number in the file.
        prompt: token ids.
        options: the line's own options.
        defaults: sampling options, where the line has none of its own.
        pinned: spans of the prompt that are never evicted, beside the line's own.

    Raises:
        InputError: an option is unknown, has another type, or is out of range.
    """
    if not isinstance(options, dict):
        raise InputError('its "options" are no JSON object')
    for name, value in options.items():
        _check(name, value)
    rest = {name: value for name, value in options.items() if name in _REQUEST}
    if "stop" in rest:
        rest["stop"] = (rest["stop"],) if isinstance(rest["stop"], str) else tuple(rest["stop"])
        if not all(isinstance(text, str) for text in rest["stop"]):
            raise InputError('its option "stop" is no text or list of texts')
    if "guard" in rest:
        rest["guard"] = float(rest["guard"])
    rest["pins"] = spans((*spans(rest.get("pins", ())), *pinned))
    chosen = {name: value for name, value in options.items() if name in _SAMPLING}
    chosen |= {name: float(value) for name, value in chosen.items() if float in _TYPES[name]}
    if "logit_bias" in chosen:
        chosen["logit_bias"] = {_token(name): value for name, value in chosen["logit_bias"].items()}
    sampling = dataclasses.replace(defaults, **chosen)
    return Request(prompt=prompt, sampling=sampling, sequence=0 if "seed" in options else number - 1, **rest)


def _token(name: object) -> int:
    """A token id, which JSON writes as a text."""
    if not str(name).isdecimal() or not str(name).isascii():
        raise InputError(f'its option "logit_bias" has {str(name)[:_SHOWN]!r} in place of a token id')
    return int(str(name)[:20])


def check_place(fields: Mapping[str, object]) -> None:
    """Refuse names of options among the other fields of a line, where they would have no effect.

    Args:
        fields: the fields of a line but its prompt and its options.

    Raises:
        InputError: a field has the name of an option.
    """
    found = {name: value for name, value in fields.items() if name in _TYPES or name in _ALIASES}
    if not found:
        return
    names = " and ".join([", ".join([*found][:-1]), [*found][-1]] if len(found) > 1 else found)
    belongs, them = ("belongs", "it is") if len(found) == 1 else ("belong", "they are")
    options = {_ALIASES.get(name, name): _short(value) for name, value in found.items()}
    raise InputError(
        f'{names} {belongs} into "{OPTIONS}": {json.dumps({OPTIONS: options}, ensure_ascii=False)}. If {them} data of '
        'your own, rename or nest: {"metadata": {…}}'
    )


def _short(value: object) -> object:
    """A value as a message shows it."""
    return value if len(json.dumps(value)) <= _SHOWN else "…"


def _check(name: str, value: object) -> None:
    """Check the name and the type of an option."""
    if name not in _TYPES:
        raise InputError(f'there is no option "{name}"; there are {", ".join(sorted(_TYPES))}')
    if not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and _TYPES[name] != (bool,)):
        raise InputError(f"its option {name}={json.dumps(value)} is no {_TYPES[name][-1].__name__}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise InputError(f"its option {name} is too large a number")
