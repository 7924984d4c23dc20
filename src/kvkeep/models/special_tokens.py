"""Control tokens that only a chat template writes: the same characters in a user's text stay a text.

A tokenizer makes a control token of its characters wherever they stand, so ``<|im_end|><|im_start|>system`` in a
user's message would begin a system message. Here the characters are quoted before the template is filled in: a word
that nobody can guess stands in their place. A copy of the tokenizer, whose control tokens have other names, reads the
result.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerBase

from kvkeep.pins import Span

_SALT = f"kvkeep{secrets.token_hex(8)}"
_QUOTED = re.compile(f"{_SALT}q([0-9]+)x", re.IGNORECASE)  # a template may write a text in capitals


def added_tokens(tokenizer: object) -> Mapping[int, AddedToken]:
    """Return the tokens that were added to a tokenizer's vocabulary, by their ids; none if it does not tell them."""
    try:
        # the property of transformers' base class raises, which `getattr` with a default lets through
        added = getattr(tokenizer, "added_tokens_decoder", None)
    except NotImplementedError:
        return {}
    return added if isinstance(added, Mapping) else {}  # that of `MistralCommonBackend` is a method, which raises


class SpecialTokens:
    """The control tokens of a tokenizer, and the ids of texts in which some are quoted.

    Control tokens are those that the tokenizer marks as special, and other added ones that the chat template writes,
    such as ``<think>``. White space and words are none.

    Args:
        tokenizer: the tokenizer, with its chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        template = _template_text(tokenizer)
        added = {
            token.content: (number, token)
            for number, token in added_tokens(tokenizer).items()
            if token.content.strip()
            and (token.special or (not token.content[0].isalnum() and token.content in template))
        }
        self._ids = {text: number for text, (number, _) in added.items()}
        self._texts = tuple(added)
        self._numbers = {text: number for number, text in enumerate(self._texts)}
        self._pattern = re.compile(_any_of(self._texts))
        self._either = re.compile(f"(?i:{_QUOTED.pattern})|{self._pattern.pattern}")
        self._normalizes = any(token.normalized for _, token in added.values())
        self._copy: tuple[Backend, Mapping[int, int]] | None = None
        self._lock = threading.Lock()

    def quote(self, value: Any) -> Any:
        """Replace the characters of control tokens by unguessable words, in a text or in lists and dictionaries of
        texts.
        """
        if isinstance(value, str):
            return self._pattern.sub(lambda found: f"{_SALT}q{self._numbers[found[0]]}x", value)
        if isinstance(value, Mapping):
            return {self.quote(name): self.quote(part) for name, part in value.items()}
        return list(map(self.quote, value)) if isinstance(value, list | tuple) else value

    def is_quoted(self, text: str) -> bool:
        """Return whether a text has a quoted control token."""
        return _QUOTED.search(text) is not None

    def renamed(self, text: str) -> str:
        """Return a text as the copied tokenizer reads it: control tokens have new names, quoted ones their
        characters.
        """
        return self._either.sub(lambda found: self._text_of(found) if found[1] else self._name(found[0]), text)

    def encode(self, tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text. What is quoted in it becomes the tokens of its characters.

        Args:
            tokenizer: the tokenizer that the object was made for.
            text: a filled template, or a text that was quoted as a whole.
            add_special_tokens: whether the tokenizer puts its own tokens around the text.
        """
        if not self.is_quoted(text):
            ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
            # beside those of the text, the tokenizer may put one before it and one behind it
            if not self._normalizes or self._count(ids) <= len(self._pattern.findall(text)) + 2 * add_special_tokens:
                return ids  # a tokenizer that changes letters first can find control tokens that a text does not have
        if (copied := self._copied(tokenizer)) is None:
            return self._in_pieces(tokenizer, text, add_special_tokens=add_special_tokens)
        read, ids_of_names = copied
        found = read.encode(self.renamed(text), add_special_tokens=add_special_tokens).ids
        return [ids_of_names.get(token, token) for token in found]

    def offsets(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[Span] | None:
        """Return the characters of each token of a text, as spans (first, one past the last) of the text itself, or of
        the `renamed` text if something is quoted; ``None`` if the tokenizer does not tell.
        """
        if self.is_quoted(text):
            copied = self._copied(tokenizer)
            return copied and [*copied[0].encode(self.renamed(text), add_special_tokens=False).offsets]
        options: dict[str, Any] = {"add_special_tokens": False, "return_offsets_mapping": True}
        try:
            offsets: list[Span] = tokenizer(text, **options)["offset_mapping"]
        except (NotImplementedError, KeyError, TypeError):
            return None
        return offsets

    def _count(self, ids: list[int]) -> int:
        """Return how many of the tokens are control tokens."""
        control = set(self._ids.values())
        return sum(token in control for token in ids)

    def _text_of(self, quoted: re.Match[str]) -> str:
        """Return the characters that a match of `_QUOTED` stands for."""
        text: str = self._texts[int(quoted[1])]
        return text

    def _name(self, text: str) -> str:
        """Return the new name of a control token."""
        return f"{_SALT}n{self._numbers[text]}x"

    def _copied(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Backend, Mapping[int, int]] | None:
        """Return a copy of the tokenizer with renamed control tokens, and the tokenizer's own id for each id that a new
        name has in the copy; ``None`` if it cannot be copied, as one that is Python code.

        It is made when a text first has the characters of a control token.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        with self._lock:
            if self._copy is None and isinstance(backend, Backend):
                self._copy = self._made(backend.to_str())
        return self._copy

    def _made(self, described: str) -> tuple[Backend, Mapping[int, int]] | None:
        """Return a copy of a tokenizer, made from its JSON with renamed control tokens, and the original id for each id
        that a new name has in the copy; ``None`` if neither way of renaming works.
        """
        for rename in (_renamed_everywhere, _renamed_where_added):
            found = json.loads(described)
            rename(found, {text: self._name(text) for text in self._texts})
            try:
                read = Backend.from_str(json.dumps(found))
            except Exception:  # the library raises nothing narrower; a merge makes a name, for example
                continue
            known = read.get_vocab(with_added_tokens=True)
            return read, {known[self._name(text)]: number for text, number in self._ids.items()}
        return None

    def _in_pieces(self, tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, encoded in pieces that are cut inside each quoted control token, so that none
        is recognised. For tokenizers that cannot be copied.
        """
        first, *others = _QUOTED.split(text)  # a text, a number, a text, …
        pieces = [first]
        for number, rest in zip(others[::2], others[1::2], strict=True):
            quoted = self._texts[int(number)]
            pieces[-1] += quoted[:1]
            pieces.append(quoted[1:] + rest)
        ids: list[int] = tokenizer(pieces[0], add_special_tokens=add_special_tokens)["input_ids"]
        return ids + [
            token for piece in pieces[1:] for token in tokenizer(piece, add_special_tokens=False)["input_ids"]
        ]


def _renamed_everywhere(found: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens in a tokenizer's JSON, in place: the added ones, and in the model's vocabulary, from whose parts
    they could be put together.
    """
    _renamed_where_added(found, names)
    model = found["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {names.get(text, text): number for text, number in model["vocab"].items()}
    elif "vocab" in model:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


def _renamed_where_added(found: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens in the list of added tokens of a tokenizer's JSON, in place."""
    for token in found["added_tokens"]:
        if token["content"] in names:
            token["content"] = names[token["content"]]


def _template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a tokenizer's chat templates."""
    template = tokenizer.chat_template
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else template or ""


def _any_of(texts: Iterable[str]) -> str:
    """Return a regular expression that matches any of these texts, the longest first."""
    # grouped by their beginnings: an expression tries its alternatives one by one at every character of a text
    by_start: dict[str, list[str]] = {}
    for text in sorted(texts, key=len, reverse=True):
        by_start.setdefault(text[:2], []).append(text)
    groups = [
        f"{re.escape(start)}(?:{'|'.join(re.escape(text[2:]) for text in found)})" for start, found in by_start.items()
    ]
    return "|".join(groups) or "(?!)"  # which matches nothing


_KNOWN: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[object, SpecialTokens]] = WeakKeyDictionary()


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Return the `SpecialTokens` of a tokenizer, cached while its chat template and the size of its vocabulary stay the
    same.
    """
    state = (_template_text(tokenizer), len(tokenizer))
    known = _KNOWN.get(tokenizer)
    if known is None or known[0] != state:
        known = _KNOWN[tokenizer] = (state, SpecialTokens(tokenizer))
    return known[1]
