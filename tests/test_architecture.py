"""The architecture that docs/index.md describes: imports point down and never in circles, names are the field's terms.

The lab, a package of its own, uses the library; the library knows nothing of the lab.
"""

import ast
import functools
import re
import sys
import warnings
from collections import defaultdict
from pathlib import Path

import pytest

import kvkeep
import kvkeep_lab
from kvkeep import backends

ROOT = Path(__file__).parents[1]
if not (ROOT / "tools" / "code_measures.py").is_file():
    pytest.skip("the tools are not part of this copy", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from tools import code_measures  # noqa: E402

SRC, LAB = Path(kvkeep.__file__).parent, Path(kvkeep_lab.__file__).parent
TESTING = "testing"
LONG_LINES, LONGEST_LINES = 600, 900
"""Lines of a file above which a test warns, and above which it fails."""
SMALL_LINES = 80
"""Lines below which a module needs more than one importer, or an importer in another package."""
LONGEST_CHAIN = 25
"""Modules of the longest chain in which each imports the next."""
MOST_SHARED_PRIVATE_NAMES = 15
"""Private class names that may stand in several files."""
PLUG_INS = ("kvkeep.policies.", "kvkeep.evals.tasks.", "kvkeep.cli.")
"""Modules that are found by their names: a policy, a task or a command is one short file."""

# the lower floor first; packages on one floor never import each other
FLOORS = [
    {"version", "errors", "parameters"},
    {"head_sharding", "kv_bits", "pins", "result_files", "rotary"},
    {"types", "noise", "plots"},
    {"attention_stats", "budget"},
    {"kv", "head_profile"},
    {"backends", "policies"},
    {"config"},
    {"snapshot"},
    {"cache"},
    {"models"},
    {"engine", "attention_probe"},
    {"openai", "planning", "explain", "compat"},
    {"batch", "server", "evals"},
    {"calibration", "scale"},
    {"cli"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
LAB_FLOORS = [{"theory", "hindsight", "loadtest"}, {"kvzip", "analysis", "fleet"}, {"cli"}]
LAB_FLOOR = {room: number for number, rooms in enumerate(LAB_FLOORS) for room in rooms}
ABOVE_ALL = {TESTING, "__init__", "__main__"}
FOR_USERS = {
    "Heads": "a test of many processes in one puts threads in their place, as kvkeep.testing does",
    "Low": "a statistic of its own, which a policy of a user declares as well",
    "Mass": "a statistic of its own, which a policy of a user declares as well",
    "PhasedCache": "a cache of its own: the engine's rows and probes are joined in it",
    "SnapKVPress": "a class of kvpress, whose users ask with isinstance; PyramidKVPress is one there, too",
    "Stepper": "a protocol: whatever has the method is one, and none derives from it",
    "View": "what a policy of a user sees; its subclass copies keys and values when they are first looked at",
}
"""Classes that are of use without their only subclass, each with the reason."""

ONE_ROOM = {
    "transformers": {"models", "cache", "rotary", "planning", "compat"},
    "tokenizers": {"models"},
    "gguf": {"models"},
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
    "prompt_toolkit": {"cli"},
}


ALLOWED = {"planning": {"kvkeep.backends.torch"}, "cache": {"kvkeep.backends.base"}}
"""Modules of backends that a room may import: bytes are planned with the blocks that torch's backend makes, and the
cache hands the records of the contract to whichever backend was chosen."""


def inside(path):
    """A file's path within its package."""
    return path.relative_to(LAB if path.is_relative_to(LAB) else SRC)


def room(path):
    return inside(path).parts[0].removesuffix(".py")


@functools.cache
def imports(path):
    """Every imported module name, wherever in the file the import stands."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module)
            if node.module == "kvkeep":
                found += [f"kvkeep.{alias.name}" for alias in node.names]
    return found


OWN, OF_LAB = sorted(SRC.rglob("*.py")), sorted(LAB.rglob("*.py"))
FILES = [*OWN, *OF_LAB]


def module(path):
    """The name by which a file is imported."""
    package = LAB if path.is_relative_to(LAB) else SRC
    return ".".join((package.name, *inside(path).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module(path) for path in FILES}


@functools.cache
def modules_of(package):
    """The modules of a package; their texts are parsed in the first test that asks, and not in every run."""
    return code_measures.modules(package)


@functools.cache
def graph_of(package):
    """Each module of a package, and those that it imports: inside of functions and for type checkers alone, too."""
    return code_measures.import_graph(modules_of(package))


@functools.cache
def trees():
    """Each file of both packages, and its syntax tree."""
    return {one.path: one.tree for package in (SRC, LAB) for one in modules_of(package)}


@functools.cache
def nodes(path):
    """All nodes of a file's syntax tree."""
    return [*ast.walk(trees()[path])]


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


@pytest.mark.parametrize("package", [SRC, LAB], ids=lambda package: package.name)
def test_no_circle_of_imports(package):
    assert code_measures.circles(graph_of(package)) == []


@pytest.mark.parametrize("package", [SRC, LAB], ids=lambda package: package.name)
def test_chains_of_imports_are_short(package):
    chain = code_measures.longest_chain(graph_of(package))
    assert len(chain) <= LONGEST_CHAIN, "\n".join(" = ".join(group) for group in chain)


def test_errors_of_the_library_name_arguments_and_not_flags():
    """`kvkeep.cli.console.with_flags` puts flags in their place."""
    wrong = [
        f"{inside(path)}:{node.lineno}: {flag}"
        for path in FILES
        if room(path) not in {"cli", "analysis"}  # analyses print commands to type
        if path.name != "build.py"  # compilers have flags, too
        for node in nodes(path)
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
        if room(path) not in {"kv", "backends"}
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
        for node in nodes(path)
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


@pytest.mark.filterwarnings("default:.*does it have one subject")
def test_files_are_read_in_one_sitting():
    lines = {module(path): len(path.read_text().splitlines()) for path in FILES}
    for name, count in lines.items():
        if LONG_LINES < count <= LONGEST_LINES:
            warnings.warn(f"{name} has {count} lines; does it have one subject?", stacklevel=1)
    assert {name: count for name, count in lines.items() if count > LONGEST_LINES} == {}


def test_a_policy_is_one_short_file():
    """Docstrings and comments aside: what a policy is may take a page."""
    shared = ("base", "registry")
    own = [one for one in modules_of(SRC / "policies") if one.path.stem not in shared and one.path.stem[0] != "_"]
    assert {one.path.stem: count for one in own if (count := one.code_lines()) > SMALL_LINES - 20} == {}


def test_a_small_module_has_more_than_one_reader():
    importers = defaultdict(set)
    for name, needed in graph_of(SRC).items():
        for other in needed:
            importers[other].add(name)
    small = [
        f"{name}, of {count} lines, is imported by {users[0]} alone: one of both files is enough"
        for path in OWN
        if path.name != "__init__.py" and (name := module(path)) and not name.startswith(PLUG_INS)
        if (count := len(path.read_text().splitlines())) < SMALL_LINES and len(users := sorted(importers[name])) == 1
        if users[0].rpartition(".")[0] == name.rpartition(".")[0]
    ]
    assert small == []


def test_class_names_are_unique():
    shared = code_measures.shared_class_names(modules_of(SRC))
    assert {name: homes for name, homes in shared.items() if not name.startswith("_")} == {}
    assert len(shared) <= MOST_SHARED_PRIVATE_NAMES


def test_module_names_are_built_from_the_fields_words():
    """A new word is an edit of tests/words.txt, which a reviewer sees. A word that no module uses any more goes."""
    listed = Path(__file__).with_name("words.txt").read_text().split()
    plug_ins = {path for path in OWN if module(path).startswith(PLUG_INS[:2])}
    names = {part for path in OWN if path not in plug_ins for part in inside(path).with_suffix("").parts}
    used = {word for name in names for word in name.strip("_").split("_") if word}
    assert used - set(listed) == set(), "new words"
    assert set(listed) - used == set(), "words that no module uses"
    assert listed == sorted(set(listed))


def test_a_base_class_has_more_than_one_subclass():
    """Inheritance is for kinds of one thing; parts of one thing are composed. The lab's subclasses count as well."""
    homes, users = {}, defaultdict(set)
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                if path in OWN:
                    homes[node.name] = room(path)
                for base in node.bases:
                    users[ast.unparse(base).partition("[")[0].rpartition(".")[2]].add(node.name)
    lonely = {
        name: sorted(users[name])
        for name, home in homes.items()
        if home not in {"policies", "backends", "errors"} and len(users[name]) == 1 and name not in FOR_USERS
    }
    assert lonely == {}
    assert {name for name in FOR_USERS if len(users[name]) != 1 or name not in homes} == set()  # no reason is left over


def test_only_one_file_names_the_argument_that_takes_a_cache():
    wrong = [
        f"{inside(path)}:{node.value.lineno}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.keyword) and node.arg == "past_key_values"
    ]
    assert wrong == []  # `kvkeep.cache.hf_layers.handed` knows its name in this version of transformers
