"""The script that measures the code counts a small made-up package right."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
if not (ROOT / "tools" / "code_measures.py").is_file():
    pytest.skip("the tools are not part of this copy", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from tools import code_measures  # noqa: E402

FILES = {
    "__init__.py": '"""The package."""\n\nfrom house.top import Door, roof\n\n__all__ = ["Door", "roof"]\n',
    "top.py": "from house import middle\n\n\nclass Door:\n    pass\n\n\ndef roof():\n    return middle.floor()\n",
    "middle.py": (
        '"""Floors."""\n\n\n# why\nclass Door: ...\n\n\nclass HouseError(Exception): ...\n\n\n'
        'def floor():\n    """The floor of the house."""\n'
        "    from house.cellar import deep  # late\n\n    return deep()\n"
    ),
    "cellar/__init__.py": (
        "from __future__ import annotations\n\nfrom typing import TYPE_CHECKING\n\nfrom .ground import Stone\n\n"
        "if TYPE_CHECKING:\n    from house.top import Door\n\n\n"
        'def deep(door: Door | None = None):\n    """Return a stone."""\n    return Stone()\n'
    ),
    "cellar/ground.py": "class Stone:\n    pass\n\n\nclass HouseError(Exception): ...\n",
    "shed.py": "import house.cellar.ground\n\n\ndef long():\n" + "    print()\n" * 60,
}


@pytest.fixture
def house(tmp_path):
    """A package of six files."""
    for name, text in FILES.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "house"


@pytest.fixture
def found(house):
    return code_measures.static_measures([house])


def test_lines_are_counted_by_what_they_hold(found):
    assert found["files"] == 6
    assert found["lines"] == sum(len(text.splitlines()) for text in FILES.values())
    assert found["code_lines"] == 2 + 5 + 5 + 7 + 3 + 62
    assert found["comment_lines"] == 2


def test_imports_count_wherever_they_stand(found):
    assert found["import_edges"] == 6
    circle = ("house.cellar", "house.middle", "house.top")
    assert found["circles"] == [circle]
    assert found["loops"] == [("house.cellar", "house.top", "house.middle")]
    assert found["chain"] == [("house",), circle, ("house.cellar.ground",)]


def test_a_circle_may_have_several_loops():
    graph = {"a": frozenset("b"), "b": frozenset("ac"), "c": frozenset("b"), "d": frozenset("a")}
    assert code_measures.circles(graph) == [("a", "b", "c")]
    assert code_measures.loops(graph, "abc") == [("a", "b"), ("b", "c")]
    assert code_measures.longest_chain(graph) == [("d",), ("a", "b", "c")]


def test_names_and_lengths(found):
    assert found["long_functions"] == [(61, "house.shed.long")]
    assert found["shared_class_names"] == {"Door": ["house.middle", "house.top"]}
    assert found["shared_public_class_names"] == ["Door"]


@pytest.mark.parametrize("text", ["The bytes of a row.", "Whether it runs", "What it is", "One row", "3 rows", "A row"])
def test_noun_phrases(text):
    assert code_measures.begins_with_noun_phrase(text)
    assert code_measures.begins_without_verb(text)


@pytest.mark.parametrize("text", ["Return the row.", "Pass it on", "Copies a row", "Focus, then wait", "Mention it"])
def test_verbs(text):
    assert not code_measures.begins_with_noun_phrase(text)
    assert not code_measures.begins_without_verb(text)


@pytest.mark.parametrize("text", ["Tokens that stay", "Attention over rows", "Ada-KV's division", "``n`` rows"])
def test_the_wider_rules_know_plurals_endings_and_names(text):
    assert not code_measures.begins_with_noun_phrase(text)
    assert code_measures.begins_without_verb(text)


def test_the_table_fits_into_80_columns_and_the_rest_is_json(house, capsys):
    code_measures.main([str(house), "--static", "--docstrings"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "  house.middle.floor: The floor of the house." in lines
    code_measures.main([str(house), "--static", "--json"])
    assert json.loads(capsys.readouterr().out)["chain"][0] == ["house"]


def test_only_calls_of_the_packages_functions_count(tmp_path):
    path = tmp_path / "called.py"
    path.write_text("def twice():\n    return once() + once()\n\n\ndef once():\n    return len('a')\n")
    space: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    calls = code_measures.Calls(tmp_path, code_measures.Counter())
    with calls:
        space["twice"]()
        json.dumps({"elsewhere": 1})
    assert calls.by_file == {str(path): 3}


def test_what_is_no_package_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no package"):
        code_measures.main([str(tmp_path), "--static"])
