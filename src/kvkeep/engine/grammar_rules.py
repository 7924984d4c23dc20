"""The rules of a Lark grammar, and which of them have no text that ends.

The grammar engine compiles a rule each of whose alternatives leads back to it, and an answer that enters the rule fails
or goes on for ever. What is not understood here counts as a text that ends: the engine refuses what is wrong otherwise.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from kvkeep.engine.schemas import has_values


@dataclass
class _Part:
    """A part of an alternative.

    Attributes:
        rule: the rule that it names; an empty text for what always ends, such as a text or a regular expression.
        needed: whether the alternative has the part in every case.
    """

    rule: str
    needed: bool = True


_Rules: TypeAlias = "dict[str, list[list[_Part]]]"
"""Rule → its alternatives → their parts. Groups are rules, too, with names that no rule of a grammar has."""

_START = "start"
_GROUP = "("
"""Stands between the rule in which a group is and the group's number."""
_COLON = ("mark", ":")

# ".." stands between the ends of a range of characters; left out as a gap, it leaves two texts, which end as well
_TOKEN = re.compile(
    r"""
    (?P<gap>[ \t\r]+|(?:\#|//)[^\n]*|\.\.)
    |(?P<line>\n)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[imslux]*|<[^<>\s]+>|@[\w-]+)
    |(?P<json>%(?:json|regex|llguidance)\b\s*)
    |(?P<statement>%[a-z]+)
    |(?P<label>->[ \t]*[\w!?-]+)
    |(?P<name>!?[?_]?[A-Za-z][\w-]*)
    |(?P<times>[+*?]|~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?|\{[ \t]*\d*[ \t]*(?:,[ \t]*\d*[ \t]*)?\})
    |(?P<mark>::|[()\[\]|:.,={}~&]|-?\d[\d.e+-]*)
    """,
    re.VERBOSE,
)


class _UnknownSyntaxError(Exception):
    """A grammar is written in a way that is not known here."""


def endless_rule(grammar: str) -> str | None:
    """Return the name of a rule that an answer may enter and that has no text that ends. Return ``None`` if there is
    none, or the grammar is not understood here.

    Args:
        grammar: a grammar in llguidance's variant of Lark.
    """
    try:
        rules = _rules_of(grammar)
    except _UnknownSyntaxError:
        return None
    endless = _entered(rules) - _with_ends(rules)
    rule, seen = next((name for name in rules if name in endless), None), set[str]()
    # the first one may only lead to the rule that its writer has to mend, which holds itself
    while rule is not None and rule not in seen and (inner := _endless_part(rules[rule], endless)) is not None:
        seen.add(rule)
        rule = inner
    return rule and rule.partition(_GROUP)[0]  # a group has no name that its writer knows


def _endless_part(alternatives: list[list[_Part]], endless: set[str]) -> str | None:
    """Return the rule of the first needed part that is one of the ``endless`` rules; ``None`` if there is none, as for
    a schema, which stands as a rule without alternatives.
    """
    return next((part.rule for parts in alternatives for part in parts if part.needed and part.rule in endless), None)


def _with_ends(rules: _Rules) -> set[str]:
    """Return the names of the rules that have a text that ends."""
    # for each alternative the number of its needed parts without a known end: linear in the size of the grammar
    owners, left, ready = list[str](), list[int](), list[str]()
    users = defaultdict[str, list[int]](list)
    for name, alternatives in rules.items():
        for parts in alternatives:
            needed = {part.rule for part in parts if part.needed and part.rule in rules}
            for rule in needed:
                users[rule].append(len(owners))
            owners.append(name)
            left.append(len(needed))
            if not needed:
                ready.append(name)
    found = set[str]()
    while ready:
        if (name := ready.pop()) in found:
            continue
        found.add(name)
        for number in users[name]:
            left[number] -= 1
            if left[number] == 0:
                ready.append(owners[number])
    return found


def _entered(rules: _Rules) -> set[str]:
    """Return the names of the rules that an answer may enter, from the rule ``start`` on."""
    found, rest = set[str](), [_START]
    while rest:
        name = rest.pop()
        if name in rules and name not in found:
            found.add(name)
            rest += [part.rule for parts in rules[name] for part in parts]
    return found


def _rules_of(grammar: str) -> _Rules:
    """Return the rules of a grammar, but for terminals (in capitals), and those of the groups within them.

    Raises:
        _UnknownSyntaxError: the grammar is written in a way that is not known here.
    """
    rules: _Rules = {}
    # of the statements only %override defines a rule
    for is_break, line in groupby(_joined(_tokens(grammar)), key=lambda token: token[0] == "line"):
        tokens = list(line)
        if is_break or (tokens[0][0] == "statement" and tokens[0][1] != "%override"):
            continue
        kind, name = tokens.pop(0)
        if kind == "statement" and tokens:
            kind, name = tokens.pop(0)
        if kind != "name" or _COLON not in tokens:
            raise _UnknownSyntaxError(name)
        # terminals are regular expressions, which never hold themselves
        if name != name.upper():
            # "!" and "?" in front of a name are no part of it; before the colon there may be a priority and settings
            _read(name.lstrip("!?"), tokens[tokens.index(_COLON) + 1 :], rules)
    return rules


def _read(rule: str, body: list[tuple[str, str]], rules: _Rules) -> None:
    """Parse what stands behind the colon of a rule, and add the rule, and each group in it, to ``rules``.

    Raises:
        _UnknownSyntaxError: its brackets do not fit, or something is repeated that does not exist.
    """
    rules[rule] = [[]]
    inside = [rule]
    for kind, text in body:
        parts = rules[inside[-1]][-1]
        if kind == "name":
            parts.append(_Part(text.lstrip("!?")))
        elif text in ("(", "["):
            group = f"{rule}{_GROUP}{len(rules)}"
            rules[group] = [[]]
            parts.append(_Part(group, needed=text == "("))
            inside.append(group)
        elif text in (")", "]") and len(inside) > 1:
            inside.pop()
        elif text == "|":
            rules[inside[-1]].append([])
        elif kind == "times" and parts:
            # the first number is the least; with none, as in * and ?, the part may be missing
            least = re.search(r"-?\d+", text.partition(",")[0])
            parts[-1].needed &= text == "+" or (least is not None and int(least[0]) > 0)
        elif kind == "text":
            parts.append(_Part(""))
        elif kind == "endless":
            group = f"{rule}{_GROUP}{len(rules)}"
            rules[group] = []  # without an alternative nothing ends it
            parts.append(_Part(group))
        else:
            raise _UnknownSyntaxError(text)
    if len(inside) > 1:
        raise _UnknownSyntaxError(rule)


def _joined(tokens: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield a grammar's tokens without the ends of lines after which the same rule goes on with an alternative. Several
    other ends of lines become one.
    """
    lines = 0
    for token in tokens:
        if token[0] == "line":
            lines += 1
            continue
        if lines and token[1] != "|":
            yield "line", ""
        lines = 0
        yield token


def _tokens(grammar: str) -> Iterator[tuple[str, str]]:
    """Yield the kinds and texts of a grammar's tokens, without white space and comments.

    A JSON schema counts as a text, or is of the kind ``endless`` if no value that follows it ends.

    Raises:
        _UnknownSyntaxError: some characters begin no token.
    """
    place = 0
    while place < len(grammar):
        found = _TOKEN.match(grammar, place)
        if found is None:
            raise _UnknownSyntaxError(grammar[place])
        kind, text, place = str(found.lastgroup), found[0], found.end()
        if kind == "json":
            try:
                value, place = _JSON.raw_decode(grammar, place)
            except (ValueError, RecursionError) as error:
                raise _UnknownSyntaxError(text) from error
            text = text.strip()
            kind = "statement" if text == "%llguidance" else "text"
            if text == "%json" and not has_values(value):
                kind = "endless"
        if kind not in ("gap", "label"):
            yield kind, text


_JSON = json.JSONDecoder()
