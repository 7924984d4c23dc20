"""The house keeps its shape: imports point down and never in circles, third-party packages have one room each.

The lab, a package of its own, uses the library; the library knows nothing of the lab.
"""

import ast
import re
from pathlib import Path

import pytest

import kvkeep
import kvkeep_lab
from kvkeep import backends

SRC, LAB = Path(kvkeep.__file__).parent, Path(kvkeep_lab.__file__).parent
TESTING = "testing"

# the lower floor first; rooms on one floor never import each other
FLOORS = [
    {"version", "errors"},
    {"parallel"},
    {"types", "noise"},
    {"lazy", "history"},
    {"codes"},
    {"vectors"},
    {
        "runs",
        "scores",
        "statistic",
        "ranges",
        "copies",
        "memory",
        "budget",
        "pins",
        "loss",
        "rotary",
        "history",
    },
    {"results", "profile", "backends", "store"},
    {"policies"},
    {"division"},
    {"registry", "capacity", "eviction", "prefill", "asked", "repeating"},
    {"together"},
    {"held"},
    {"layer", "layout", "config", "argument"},
    {"handing"},
    {"hybrid"},
    {"snapshot"},
    {"cache"},
    {"models", "plots"},
    {"engine", "explain"},
    {"openai", "planning"},
    {"jobs", "server", "evals"},
    {"calibration", "scale"},
    {"cli"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
LAB_FLOORS = [{"theory", "hindsight", "loadtest"}, {"kvzip", "analysis", "fleet"}, {"cli"}]
LAB_FLOOR = {room: number for number, rooms in enumerate(LAB_FLOORS) for room in rooms}
ABOVE_ALL = {TESTING, "__init__", "__main__"}

ONE_ROOM = {
    "transformers": {"models", "cache", "argument", "handing", "hybrid", "layout", "rotary", "planning"},
    "tokenizers": {"models"},
    "huggingface_hub": {"models"},
    "triton": {"backends"},
    "fastapi": {"server"},
    "starlette": {"server"},
    "uvicorn": {"server"},
    "pydantic": {"server"},
    "prometheus_client": {"server"},
    "httpx": {"loadtest"},
    "llguidance": {"engine"},
    "lm_eval": {"evals"},
    "rouge_score": {"evals"},
    "datasets": {"evals"},
    "matplotlib": {"plots"},
    "ray": {"scale"},
    "pyarrow": {"scale"},
    "typer": {"cli"},
    "rich": {"cli"},
}


ALLOWED = {"planning": {"kvkeep.backends.torch"}}
"""Modules of single backends that a room may import: bytes are planned with the blocks that torch's backend makes."""


def inside(path):
    """A file's path within its package."""
    return path.relative_to(LAB if path.is_relative_to(LAB) else SRC)


def room(path):
    return inside(path).parts[0].removesuffix(".py")


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


OWN, OF_LAB = sorted(SRC.rglob("*.py")), sorted(LAB.rglob("*.py"))
FILES = [*OWN, *OF_LAB]


def module(path):
    """The name by which a file is imported."""
    package = LAB if path.is_relative_to(LAB) else SRC
    return ".".join((package.name, *inside(path).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module(path) for path in FILES}


def statements(node):
    """All nodes of a file but those that only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from statements(child)


def needs(path):
    """The modules of kvkeep that a module imports, also inside of functions.

    An import of a submodule does not need its package; a name that a package itself defines does.
    """
    found = set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return (found & MODULES) - {module(path)}


def test_every_room_has_a_floor():
    assert {room(path) for path in OWN} <= set(FLOOR) | ABOVE_ALL
    assert {room(path) for path in OF_LAB} <= set(LAB_FLOOR) | ABOVE_ALL


@pytest.mark.parametrize(("files", "floors"), [(OWN, FLOOR), (OF_LAB, LAB_FLOOR)], ids=["kvkeep", "kvkeep_lab"])
def test_imports_point_down(files, floors):
    wrong = []
    for path in files:
        here = room(path)
        if here in ABOVE_ALL:
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != module(path).split(".")[0] or len(parts) == 1 or parts[1] == here:
                continue
            there = parts[1]
            if there not in floors or floors[there] >= floors[here]:
                wrong.append(f"{inside(path)} imports {name}")
    assert wrong == []


def test_the_library_knows_nothing_of_the_lab():
    assert [module(path) for path in OWN if re.search(r"\bkvkeep_lab\b", path.read_text())] == []


def test_no_module_imports_itself_by_way_of_others():
    left = {module(path): needs(path) for path in FILES}
    while True:
        used = set().union(*left.values())
        inner = {name: others & left.keys() for name, others in left.items() if name in used and others & left.keys()}
        if inner == left:
            break
        left = inner
    assert sorted(left) == []  # what remains imports others and is imported by others that remain


def test_errors_of_the_library_name_arguments_and_not_flags():
    """`kvkeep.cli.console.with_flags` puts flags in their place."""
    wrong = [
        f"{inside(path)}:{node.lineno}: {flag}"
        for path in FILES
        if room(path) not in {"cli", "analysis"}  # analyses print commands to type
        if path.name != "build.py"  # compilers have flags, too
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "``" not in node.value
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", node.value)
    ]
    assert wrong == []


def test_a_third_party_package_has_one_room():
    wrong = [
        f"{inside(path)} imports {name}"
        for path in FILES
        for name in imports(path)
        if name.split(".")[0] in ONE_ROOM and room(path) not in ONE_ROOM[name.split(".")[0]]
    ]
    assert wrong == []


def test_only_stores_and_backends_know_how_slots_lie_in_memory():
    wrong = [
        f"{inside(path)}: {line.strip()}"
        for path in FILES
        if room(path) not in {"store", "backends"}
        for line in path.read_text().splitlines()
        if ".store.keys" in line or ".store.values" in line
    ]
    assert wrong == []


def test_nobody_outside_names_a_backend():
    """`backends.choose` decides who works; the definition may be asked by its functions."""
    kinds = {kind.__name__ for kind in backends.KINDS.values()}
    wrong = []
    for path in FILES:
        if room(path) == "backends":
            continue
        words = set(re.findall(r"\w+", path.read_text()))
        wrong += [f"{inside(path)} names {name}" for name in sorted(words & kinds)]
        rooms = {name for name in imports(path) if name.startswith("kvkeep.backends.")} - ALLOWED.get(room(path), set())
        wrong += [f"{inside(path)} imports {name}" for name in sorted(rooms)]
    assert wrong == []


def test_nobody_subclasses_a_layer():
    """A layer is a protocol with one method, `Stepper.step`: recorders wrap a layer, stand-ins have the method."""
    wrong = [
        f"{inside(path)}: {node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        if "Layer" in {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    ]
    assert wrong == []


def test_public_names():
    assert len(kvkeep.__all__) <= 41
    assert sorted(kvkeep.__all__) == kvkeep.__all__ == dir(kvkeep)
    for name in kvkeep.__all__:
        assert getattr(kvkeep, name) is not None


def test_the_names_that_type_checkers_see_are_those_that_are_loaded():
    tree = ast.parse((SRC / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname or alias.name: f"{node.module}:{alias.name}" for node in block.body for alias in node.names}
    assert seen == {name: f"kvkeep.{home}" for name, home in kvkeep._HOME.items()}
    assert set(kvkeep.__all__) == {*seen, "__version__"}


def test_files_and_policies_stay_small():
    lines = {module(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: n for name, n in lines.items() if n > 300} == {}
    policies = {name: n for name, n in lines.items() if name.startswith("kvkeep.policies.") and "._" not in name}
    del policies["kvkeep.policies.base"], policies["kvkeep.policies.base"]
    assert {name: n for name, n in policies.items() if n > 60} == {}


def test_only_one_file_names_the_argument_that_takes_a_cache():
    wrong = [
        f"{inside(path)}:{node.value.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "past_key_values"
    ]
    assert wrong == []  # `kvkeep.cache.hf_layers.handed` knows its name in this version of transformers
