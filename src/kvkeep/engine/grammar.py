"""Grammars for a tokenizer: tried in a process of their own, compiled once, and kept for later requests.

The grammar engine bounds most of its work, but not all: ``{"multipleOf": 1234567}`` takes it 40 seconds and 1 GB. So
every new grammar is first compiled in a process with bounded time and memory.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.engine.grammar_rules import endless_rule
from kvkeep.engine.request import NAMES, Request, Structure
from kvkeep.errors import InputError, KVKeepError, pip_install
from kvkeep.models.checkpoint import Tokenizer
from kvkeep.models.sandbox import SandboxProcess
from kvkeep.models.special_tokens import added_tokens

# The tokens that may come next in an answer of a given form: a state per request, and a mask over all rows.

_BITS = 32
"""Tokens of one word of a mask."""
TOO_COMPLEX = "The grammar of the answer became too complex"
_NO_TOKEN = "NoExtensionBias"
"""The grammar engine's word for a place from which no text leads to an end."""
_ENDLESS = "no text that ends: a part of it holds itself in every case, so no token can follow"


class Constraint:
    """The place in a grammar that a request has reached.

    Args:
        matcher: llguidance's state.
        vocabulary: the number of tokens that it knows.
        avoided: tokens that end a text, and are allowed only where nothing else is.

    Attributes:
        error: why no token can follow, if the grammar engine has failed.
    """

    def __init__(self, matcher: Any, vocabulary: int, avoided: Sequence[int] = ()) -> None:
        self._matcher, self.vocabulary, self._avoided = matcher, vocabulary, avoided
        self.error: str | None = None

    @property
    def complete(self) -> bool:
        """Return whether the tokens taken so far are a complete answer, so that no further token can follow."""
        return bool(self._matcher.is_stopped())

    def fill(self, words: Int[Tensor, " words"]) -> None:
        """Set the bits of the tokens that the grammar allows next, and clear all others.

        Bits of tokens that end a text are cleared as well if those are to be avoided and another token is allowed. If
        the grammar engine fails, all bits are cleared and ``error`` is set.

        Args:
            words: a row of int32 in main memory, a bit for each token; overwritten in place.
        """
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())
        if self._matcher.is_error():
            self.error = self._matcher.get_error()
            words.zero_()
            return
        # where nothing but an end may follow, it may follow after all
        before = words.clone() if self._avoided else words
        for token in self._avoided:
            words[token // _BITS] &= ~_bit(token)
        if self._avoided and not words.any():
            words.copy_(before)

    def take(self, token: int) -> None:
        """Advance the place in the grammar by a generated token.

        Raises:
            KVKeepError: the grammar does not allow the token.
        """
        if not self._matcher.consume_token(token):
            raise KVKeepError(failure(self._matcher.get_error()))


def failure(error: str) -> str:
    """Return the message for a request whose grammar can go on with no token, from the grammar engine's own error."""
    if _NO_TOKEN in error:
        return f"The form of the answer has {_ENDLESS}."
    why = " ".join(error.partition("<state>")[0].split())  # behind that stands the grammar engine's own state
    return f"{TOO_COMPLEX} ({why:.100}). Use a simpler one."


def masked(logits: Float[Tensor, "n V"], constraints: Sequence[Constraint | None]) -> Float[Tensor, "n V"]:
    """Return the logits with minus infinity at the tokens that the grammar of their row forbids.

    Args:
        logits: the logits of each row.
        constraints: the place in the grammar of each row; ``None``: all tokens are allowed.
    """
    bound = [(i, constraint) for i, constraint in enumerate(constraints) if constraint is not None]
    if not bound:
        return logits
    V = logits.shape[-1]  # words are whole, and the tokenizer may have more tokens than the model
    words = torch.zeros(len(bound), -(-bound[0][1].vocabulary // _BITS), dtype=torch.int32)
    for row, (_, constraint) in zip(words, bound, strict=True):
        constraint.fill(row)
    index = torch.tensor([i for i, _ in bound], device=logits.device)
    allowed = _bits(words.to(logits.device))[:, :V]
    return logits.index_copy(0, index, logits[index].masked_fill(~allowed, -torch.inf))


def _bits(words: Int[Tensor, "n words"]) -> Bool[Tensor, "n V"]:
    """Unpack 32-bit words into booleans, the lowest bit first: one boolean per token of the vocabulary."""
    places = torch.arange(8, dtype=torch.uint8, device=words.device)
    return (words.view(torch.uint8)[..., None] >> places & 1).bool().flatten(1)


def _bit(token: int) -> int:
    """Return a token's bit within its 32-bit word, as a signed integer."""
    # the words are int32, whose highest bit is the sign
    found = 1 << token % _BITS
    return found - (1 << _BITS) if token % _BITS == _BITS - 1 else found


TIMEOUT_S = 5.0
MEMORY_BYTES = 2**27
"""What a new grammar may take to compile, in the process that tries it; then it is refused."""
MOST = 32
"""Grammars that are kept."""
MOST_WAITING = 8
"""New grammars that may wait to be compiled."""

_START_S = 60.0
"""Seconds in which that process must have read the tokenizer."""
_HIDDEN = "\U0010fffd"
"""Stands around the number of a special token in place of its text; no text has this character."""
_QUOTED = r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|(?://|\#)[^\n]*'
"""A text, a regular expression or a comment of a grammar."""
_WITH_RULES = ("grammar", "lark")
_LONGEST = 160
"""Characters of the grammar engine's error that a message has."""
_MOST_TRIED = 200
"""Grammars that one process tries, since its memory fills up."""
_STATES = 50_000
"""Most states of a grammar's lexer, of 1 to 2 kB each."""


class FormError(InputError):
    """The form of an answer cannot be used.

    Attributes:
        param: the field of a request that names the form.
    """

    param = "structured_outputs"


class Grammars:
    """The grammars that answers of one tokenizer have followed lately.

    Args:
        tokenizer: the engine's, if it has one.
        vocabulary: the number of tokens that the model knows.
        ends: tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int, ends: Collection[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, tuple(sorted(ends))
        self._found: OrderedDict[Structure, Any] = OrderedDict()
        # two, so that kept grammars are found while another one compiles
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._waiting = 0
        self._known: Any = None
        self._worker = SandboxProcess(Path(__file__).with_name("grammar_probe.py"), MEMORY_BYTES)
        self._tried = 0
        weakref.finalize(self, self._worker.end)  # an engine that was not closed leaves no process behind

    def constraint(self, request: Request) -> Constraint | None:
        """Return the initial state of a request's grammar, compiled if it is new; ``None`` if the request has no
        grammar.

        Raises:
            FormError: llguidance is not installed, or cannot use the tokenizer or the grammar.
            InputError: too many new grammars wait to be compiled.
        """
        asked = request.structured_outputs
        if asked is None:
            return None
        assert isinstance(asked, Structure)  # a request turns a mapping into one when it is made
        matcher = self._kept(asked)
        if matcher is None:
            with self._place(), self._compiling:
                # another thread may have compiled it in the meantime
                matcher = self._kept(asked) or self._compile(asked)
            self._keep(asked, matcher)
        # a copy, since the kept matcher stays at the beginning of an answer
        return Constraint(matcher.deep_copy(), self._known.vocab_size, self._ends if request.ignore_end else ())

    def close(self) -> None:
        """End the process that tries grammars, and forget all grammars. Another request starts the process again."""
        with self._compiling, self._lock:
            self._worker.end()
            self._found.clear()

    def _kept(self, asked: Structure) -> Any:
        """Return the matcher of a grammar that was compiled before, or ``None``. Never wait for a compilation."""
        with self._lock:
            if asked in self._found:
                self._found.move_to_end(asked)
            return self._found.get(asked)

    def _keep(self, asked: Structure, matcher: Any) -> None:
        """Keep a matcher, and drop the least recently used ones beyond the limit."""
        with self._lock:
            self._found[asked] = matcher
            while len(self._found) > MOST:
                self._found.popitem(last=False)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Reserve one of the few slots for grammars being compiled, so that slow ones do not hold many threads.

        Raises:
            InputError: too many grammars wait already.
        """
        with self._lock:
            if self._waiting >= MOST_WAITING:
                raise InputError(
                    f"{self._waiting} new grammars wait to be compiled already. Try again in some seconds."
                )
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    def _compile(self, asked: Structure) -> Any:
        """Return the matcher of a grammar, compiled here after it was tried in the other process.

        Raises:
            FormError: see `constraint`.
        """
        known = self._tokens()  # before the import, since it says what to install if llguidance is missing
        import llguidance

        grammar = self._grammar(asked)
        limits = llguidance.LLParserLimits(max_lexer_states=_STATES)
        return llguidance.LLMatcher(known, grammar, log_level=0, limits=limits)

    def _tokens(self) -> Any:
        """Return llguidance's view of the tokenizer, made on the first call.

        Raises:
            FormError: see `constraint`.
        """
        if self._known is None:
            try:
                import llguidance
            except ImportError as error:
                raise FormError(
                    f"Structured output needs llguidance, which is not installed: {pip_install('structured')}."
                ) from error
            try:
                self._known = llguidance.LLTokenizer(*self._description)
            except (AttributeError, ValueError, TypeError) as error:
                raise FormError(
                    "Structured output needs a fast tokenizer with an end token, and the one of this model cannot be "
                    f"used ({error!s:.100}). Leave `structured_outputs` out."
                ) from error
        return self._known

    @property
    def _description(self) -> tuple[str, int, list[int]]:
        """Return the tokenizer as JSON, the size of the vocabulary, and the ids of the end tokens.

        Raises:
            AttributeError: there is no fast tokenizer.
        """
        backend: Any = self._tokenizer.backend_tokenizer if self._tokenizer is not None else None
        ends = self._ends or (getattr(self._tokenizer, "eos_token_id", None),)
        # a model may have spare tokens, and a tokenizer more than the model; `None` raises here, see above
        size = max(self._vocabulary, backend.get_vocab_size(with_added_tokens=True))
        return without_special_texts(backend.to_str()), size, [token for token in ends if token is not None]

    def _grammar(self, asked: Structure) -> str:
        """Translate a form into a grammar of llguidance, in the process with bounded time and memory.

        Raises:
            FormError: the grammar is wrong, takes too much time or memory, or has a rule with no text that ends.
        """
        what = NAMES[asked.kind]
        found = self._ask({"kind": asked.kind, "text": self._by_ids(asked)})
        if found is None:
            raise FormError(
                f"The {what} takes more than {TIMEOUT_S:g} s or {MEMORY_BYTES >> 20} MiB to compile. Use a simpler one."
            )
        if "error" in found:
            raise FormError(f"The {what} cannot be used: {_shown(found['error'])}.")
        grammar: str = found["grammar"]
        if asked.kind in _WITH_RULES and (rule := endless_rule(grammar)) is not None:
            # GBNF calls Lark's first rule root
            name = "root" if rule == "start" and rule not in asked.text else rule
            raise FormError(
                f"The {what} cannot be used: its rule {name:.60} has no text that ends, as each of its alternatives "
                "leads back to it or to another such rule. Give it one that does not."
            )
        return grammar

    def _by_ids(self, asked: Structure) -> str:
        """Return the text of a form for llguidance. In a grammar (GBNF or Lark) the names of special tokens outside of
        quotes and comments are replaced by their ids, as ``<[5]>``.
        """
        ids = {name: token for token, name in special_texts(self._tokenizer)}
        if asked.kind not in _WITH_RULES or not ids:
            return asked.text
        # the longest first: one name may begin with another; and names in quotes or comments stay as they are
        names = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
        return re.sub(
            rf"{_QUOTED}|(?P<name>{names})",
            lambda found: f"<[{ids[found['name']]}]>" if found["name"] else found[0],
            asked.text,
        )

    def _ask(self, asked: dict[str, str]) -> dict[str, Any] | None:
        """Return the answer of the process that tries grammars: the grammar or an error. The process is started if it
        does not run, and anew after `_MOST_TRIED` questions.

        Return ``None`` if the answer took too long or the process ended.

        Raises:
            FormError: the process cannot be started.
        """
        if self._tried >= _MOST_TRIED:
            self._worker.end()
        try:
            if not self._worker.runs:
                self._tried = 0
                tokenizer, vocabulary, ends = self._description
                about = {"tokenizer": tokenizer, "vocabulary": vocabulary, "ends": ends}
                if self._worker.ask(json.dumps(about), _START_S) is None:
                    raise OSError("it does not read the tokenizer")
            self._tried += 1
            return self._worker.ask(json.dumps(asked), TIMEOUT_S)
        except OSError as error:
            raise FormError(f"The process that tries grammars cannot be used ({error!s:.160}).") from error


def special_texts(tokenizer: Tokenizer | None) -> list[tuple[int, str]]:
    """Return the ids and the texts of a tokenizer's special tokens."""
    return [(token, entry.content) for token, entry in added_tokens(tokenizer).items() if entry.special]


def without_special_texts(description: str) -> str:
    """Return a tokenizer's JSON in which special tokens have names that no text contains.

    A text that a form forces would otherwise become that token, which no form allows: a choice of ``<|im_end|>``.
    """
    file = json.loads(description)
    hidden = {one["content"]: f"{_HIDDEN}{one['id']}{_HIDDEN}" for one in file["added_tokens"] if one["special"]}
    for one in file["added_tokens"]:
        one["content"] = hidden.get(one["content"], one["content"])
    model = file["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden.get(text, text): token for text, token in model["vocab"].items()}
    else:  # of Unigram
        model["vocab"] = [[hidden.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    return json.dumps(file)


def _shown(error: str) -> str:
    """Return what is wrong with a grammar in one line, from the grammar engine's own error."""
    if _NO_TOKEN in error:
        return _ENDLESS
    # lines before it draw the place in the expression, and lines after " 1 |" that in the grammar
    known = re.search(r"regex parse error:.*\nerror: (.+)", error, flags=re.DOTALL)
    line = " ".join((known[1] if known else error.partition("<state>")[0]).split("\n   1 |")[0].split())
    return (line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …").rstrip(".")
