"""Rules without an end, in grammars that are drawn at random, and beside a way to find them that reads no text."""

from __future__ import annotations

import random

import pytest

from kvkeep.engine.grammar_rules import endless_rule

NAMES = ["start", "a", "b", "c"]
TIMES = {"": 1, "?": 0, "*": 0, "+": 1, "{0,2}": 0, "{2}": 2, " ~ 1..3": 1}


def drawn(draw, depth=0):
    """A part of a rule: a text, a rule, a schema or a group, and how often it may come."""
    kind = draw.choice(["text", "rule", "rule", "group"] if depth < 2 else ["text", "rule"])
    if kind == "group":
        kind = [[drawn(draw, depth + 1) for _ in range(draw.randint(1, 2))] for _ in range(draw.randint(1, 2))]
    elif kind == "rule":
        kind = draw.choice(NAMES)
    else:
        kind = draw.choice(['"x | a"', "/[a)]/", '%json {"a": 1}', "<[3]>", "DIGIT"])
    return kind, draw.choice(list(TIMES))


def written(alternatives):
    return " | ".join(" ".join(f"{text(kind)}{times}" for kind, times in parts) for parts in alternatives)


def text(kind):
    return kind if isinstance(kind, str) else f"({written(kind)})"


def ends(alternatives, known):
    return any(all(TIMES[times] == 0 or part_ends(kind, known) for kind, times in parts) for parts in alternatives)


def part_ends(kind, known):
    return ends(kind, known) if not isinstance(kind, str) else kind not in NAMES or kind in known


def rules_in(alternatives):
    for parts in alternatives:
        for kind, _ in parts:
            yield from rules_in(kind) if not isinstance(kind, str) else ({kind} & {*NAMES})


@pytest.mark.parametrize("seed", range(200))
def test_a_drawn_grammar_has_the_rules_without_an_end_that_its_parts_have(seed):
    draw = random.Random(seed)
    rules = {
        name: [[drawn(draw) for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(1, 2))] for name in NAMES
    }
    known, entered = set(), {"start"}
    for _ in NAMES:
        known |= {name for name in NAMES if ends(rules[name], known)}
        entered |= {inner for name in entered for inner in rules_in(rules[name])}
    grammar = "\n".join(f"{name}: {written(rules[name])}" for name in NAMES) + '\nDIGIT: "1".."9"'
    found = endless_rule(grammar)
    assert (found is None) == (entered <= known)
    assert found is None or found in entered - known


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        "start",
        "start: (",
        "start: a)\na: a",
        'start: "x',
        "start: %json {",
        "start: " + "(" * 60_000,
        "start: " + "(" * 60_000 + "a" + ")" * 60_000,
        "start: " + "[" * 60_000 + "start" + "]" * 60_000,
        "\n".join(f"r{n}: r{n + 1}" for n in range(20_000)),
        'start: %json {"a": ' + "[" * 60_000,
        "start: a::0x0\na::_ : a",
        '"\\' * 60_000,
        "/\\" * 60_000,
        "@{ start: start @}",
    ],
)
def test_what_is_not_understood_counts_as_a_text_that_ends(grammar):
    assert endless_rule(grammar) is None


def test_the_rule_that_holds_itself_is_named():
    for grammar, rule in {
        'start: "x" start': "start",
        '%import common.INT\n%override start: "x" start': "start",
        'start: "x" %json {"$ref": "#"}': "start",
        'start: a\na: ("x" a)+': "a",
        "start: start{1,2}": "start",
        "start: start{0,2}": None,
        "start: start ~ 0..2": None,
        "start: start?": None,
        "start: [start]": None,
        "start: A\nA: A": None,
    }.items():
        assert endless_rule(grammar) == rule, grammar


def test_syntax_that_is_not_known_counts_as_a_text_that_ends():
    for line in ("b", '"x": b', "b: (", "b: b)", "b: @{ b @}", "b: %json {", "b: + b", "§", "%override"):
        assert endless_rule(f"start: start\n{line}") is None, line
    assert endless_rule("start: start\nb: b") == "start"


@pytest.mark.long
def test_long_grammars_take_no_more_than_a_look_at_each_part():
    chain = "\n".join(f"r{n}: r{n + 1} | r{n + 1} r{n}" for n in range(10_000))
    assert endless_rule(f"start: r0\n{chain}\nr10000: start") is not None
    assert endless_rule(f'start: r0\n{chain}\nr10000: "x"') is None
