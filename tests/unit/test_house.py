"""The house keeps its shape: imports point down, each third-party package has one room, files stay readable."""

import ast
from pathlib import Path

import kvkeep

SRC = Path(kvkeep.__file__).parent
TESTING = "testing"

# the lower floor first; rooms on one floor never import each other
FLOORS = [
    {"version", "types", "errors", "noise"},
    {"runs", "scores", "statistic", "memory", "budget", "chunks", "rotation", "native", "theory"},
    {"results", "attention", "store", "policies"},
    {"registry", "eviction", "rope"},
    {"layer", "layout"},
    {"cache"},
    {"models", "plots"},
    {"engine"},
    {"server", "evals"},
    {"analysis"},
    {"cli"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
ABOVE_ALL = {TESTING, "__init__", "__main__"}

ONE_ROOM = {
    "transformers": {"models", "cache", "layout", "rope"},
    "tokenizers": {"models"},
    "huggingface_hub": {"models"},
    "triton": {"attention"},
    "fastapi": {"server"},
    "matplotlib": {"plots"},
    "typer": {"cli"},
    "rich": {"cli"},
}


def room(path):
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports(path):
    """Every imported module name, wherever in the file the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module == "kvkeep":
                yield from (f"kvkeep.{alias.name}" for alias in node.names)


FILES = sorted(SRC.rglob("*.py"))


def test_every_room_has_a_floor():
    assert {room(path) for path in FILES} <= set(FLOOR) | ABOVE_ALL


def test_imports_point_down():
    wrong = []
    for path in FILES:
        here = room(path)
        if here in ABOVE_ALL:
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "kvkeep" or len(parts) == 1 or parts[1] == here:
                continue
            there = parts[1]
            if there not in FLOOR or FLOOR[there] >= FLOOR[here]:
                wrong.append(f"{path.relative_to(SRC)} imports {name}")
    assert wrong == []


def test_a_third_party_package_has_one_room():
    wrong = [
        f"{path.relative_to(SRC)} imports {name}"
        for path in FILES
        for name in imports(path)
        if name.split(".")[0] in ONE_ROOM and room(path) not in ONE_ROOM[name.split(".")[0]]
    ]
    assert wrong == []


def test_public_names():
    assert len(kvkeep.__all__) <= 40
    assert sorted(kvkeep.__all__) == kvkeep.__all__
    for name in kvkeep.__all__:
        assert getattr(kvkeep, name) is not None


def test_the_names_that_type_checkers_see_are_those_that_are_loaded():
    tree = ast.parse((SRC / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname or alias.name: f"{node.module}:{alias.name}" for node in block.body for alias in node.names}
    assert seen == {name: f"kvkeep.{home}" for name, home in kvkeep._HOME.items()}
    assert set(kvkeep.__all__) == {*seen, "__version__"}


def test_files_and_policies_stay_small():
    lines = {str(path.relative_to(SRC)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: n for name, n in lines.items() if n > 310} == {}
    policies = {name: n for name, n in lines.items() if name.startswith("policies/") and "/_" not in name}
    del policies["policies/base.py"]
    assert {name: n for name, n in policies.items() if n > 60} == {}
