"""JSON schemas of answers: written without needless white space, refused with a reason, and such that answers end."""

import pytest

from kvkeep.engine import schemas
from kvkeep.engine.schemas import COMPACT, compact, has_values
from kvkeep.errors import InputError

SELF = {"$ref": "#"}
TURNS = {"$defs": {"one": {"$ref": "#/$defs/o~1ther"}, "o/ther": {"$ref": "#/$defs/one"}}}
"""Two definitions that refer to each other, and to nothing else."""
ONE = {"$ref": "#/$defs/one"}


def test_a_schema_is_a_mapping_its_text_or_true():
    schema = {"type": "array", "items": {"type": "integer"}}
    assert compact(schema) == {**schema, "x-guidance": COMPACT}
    assert compact('{"type": "array", "items": {"type": "integer"}}') == compact(schema)
    assert compact(True) == {"x-guidance": COMPACT}
    found = compact({"x-guidance": {"item_separator": ","}}, item_separator=";", lenient=True)
    assert found == {"x-guidance": {**COMPACT, "item_separator": ",", "lenient": True}}


def test_what_is_no_schema_is_refused():
    for given, said in [
        (False, "The JSON schema false is no JSON object; give one such as"),
        ("[1]", r"The JSON schema \[1\] is no JSON object"),
        ("{", "The JSON schema cannot be read"),
        ({"minimum": float("nan")}, "The JSON schema cannot be read"),
        ({"default": object()}, "The JSON schema cannot be read"),
        ({"x-guidance": 3}, "has an x-guidance that is no JSON object; leave it out"),
    ]:
        with pytest.raises(InputError, match=said):
            compact(given)


ENDLESS = {
    "itself": SELF,
    "each other": {**TURNS, **ONE},
    "a needed property": {"type": "object", "properties": {"a": SELF}, "required": ["a"]},
    "a list's items": {"type": "array", "minItems": 1, "items": SELF},
    "the items behind the first": {"type": "array", "minItems": 2, "prefixItems": [{}], "items": SELF},
    "a list's first item": {"type": "array", "minItems": 1, "prefixItems": [SELF]},
    "one of all": {"allOf": [{"type": "object"}, SELF]},
    "each of several": {"anyOf": [SELF, {"$ref": "#/anyOf/0"}]},
    "each of several, one of which counts": {"oneOf": [SELF]},
    "a name of the web": {"$defs": {"a b": {"$ref": "#/$defs/a%20b"}}, "$ref": "#/$defs/a%20b"},
}


def test_a_schema_of_which_no_value_ends_is_refused():
    for name, schema in ENDLESS.items():
        assert not has_values(schema), name
        with pytest.raises(InputError, match=r"refers to itself \(\$ref\) .* no JSON that follows it ever ends"):
            compact(schema)


ENDING = {
    "a property that may be left out": {"type": "object", "properties": {"a": SELF}},
    "a needed property that is not described": {"type": "object", "properties": [], "required": ["a", 3]},
    "an empty list": {"type": "array", "minItems": 0, "prefixItems": [SELF], "items": SELF},
    "a first item before the others": {"type": "array", "minItems": 1, "prefixItems": [{}], "items": SELF},
    "another kind": {"type": ["object", "null"], "properties": {"a": SELF}, "required": ["a"]},
    "a place that there is not": {"anyOf": [{"$ref": "#/anyOf/7"}, {"$ref": "#/anyOf/x"}, {"$ref": "#/type/x"}]},
    "a number of thousands of digits": {"$ref": f"#/allOf/{'9' * 5000}", "allOf": [{}]},
    "an anchor": {"$ref": "#there"},
    "another file": {"$ref": "http://127.0.0.1:9/x.json"},
}


def test_a_schema_of_which_some_value_ends_stays_as_it_is():
    for name, schema in ENDING.items():
        assert has_values(schema), name
        assert compact(schema) == {**schema, "x-guidance": COMPACT}, name


def test_branches_that_never_end_become_false_and_values_stay():
    plain = {"const": ONE, "enum": [ONE], "default": ONE, "examples": [ONE]}
    schema = {**TURNS, "type": "object", "properties": {"x": ONE, "y": {"anyOf": [ONE, plain]}}}
    assert compact(schema) == {
        "$defs": {"one": False, "o/ther": False},
        "type": "object",
        "properties": {"x": False, "y": {"anyOf": [False, plain]}},
        "x-guidance": COMPACT,
    }


def test_references_of_a_schema_that_is_too_deep_are_left_to_the_grammar_engine():
    deep = {"anyOf": [SELF]}
    for _ in range(60):
        deep = {"not": [deep]}
    assert has_values({**deep, "$ref": "#"})


def test_of_a_schema_with_very_many_parts_the_rest_counts_as_ending(monkeypatch):
    long = {"allOf": [{}] * 20, "anyOf": [SELF]}
    assert not has_values(long)
    monkeypatch.setattr(schemas, "_MOST_STEPS", 20)
    assert has_values(long)
