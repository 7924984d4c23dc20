"""Measure how much code there is, and how far a reader has to walk through it.

python tools/code_measures.py                               src/kvkeep
python tools/code_measures.py src/kvkeep lab/src/kvkeep_lab   two packages, taken together
python tools/code_measures.py --docstrings                  the docstrings that begin with a noun phrase as well
python tools/code_measures.py --files                       the files that run for three tokens as well
python tools/code_measures.py --json                        everything, for a program

The definitions:

- Lines of code: lines that are not blank, hold more than a comment, and lie in no string that stands alone: a
  docstring, for example.
- Comment lines: lines with a comment, also behind code.
- Import edge: one module imports another one of the same packages, anywhere in its file: inside of functions and under
  ``if TYPE_CHECKING`` as well. ``from package import name`` is an edge to the submodule of that name if there is one,
  else to the package. That a submodule's import runs its package's ``__init__`` is no edge.
- Circle: a group of modules that import each other, directly or through others. Its loops are counted as well: two
  loops that share a module are one circle.
- Longest chain: the most modules in a row of which each imports the next. A circle counts as one.
- Function: ``def`` and ``async def``, nested ones and methods included; its length goes from ``def`` to its last line.
  Functions in files that import triton are counted apart.
- Class name in several files: exceptions (names that end in Error or Warning) aside.
- Noun phrase: the first word of a function's docstring is an article, a determiner, a pronoun, a number or a question
  word ("The bytes of a row", "Whether it runs"). The wider count also takes plural nouns, nouns by their endings,
  possessives, names and formulas ("Tokens that stay"); of words in -s it cannot always tell a noun from a verb.
- Files that run: files of the package of which a function (no module or class body) is called by `Engine.add` of a text
  and the steps until its third token, on the embedded model, after another engine has done the same.
- Calls in `Engine.add`: functions of the package that are entered, generators each time they go on.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import json
import re
import sys
import threading
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
LONG_FUNCTION = 60
WIDTH = 80
Graph = Mapping[str, frozenset[str]]

NOUN_PHRASE_WORDS = """
the a an this that these those it its they their he she we you i my our your one two three four five six seven eight
nine ten all any both each every either neither some no none several many most more few much such another other
everything nothing something anything who whom whose what which where when why how whether
"""
NOUN_ENDINGS = ("tion", "sion", "ment", "ness", "ity", "ance", "ence", "ship", "ism", "ist", "logy")
VERBS_WITH_NOUN_ENDINGS = "mention position condition transition comment implement balance reference"
VERBS_IN_S = """
adds agrees allows answers asks attends begins calls checks compares continues copies counts drops ends evicts gives
holds has keeps lets lists loads makes marks means measures moves names needs notes prints puts raises reads refuses
releases removes replaces reports returns runs says sends sets shows starts stops stores takes tells turns waits wants
writes yields
"""


@dataclass(frozen=True)
class Module:
    """A Python file of a package."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Return the file's syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Return all functions of the file, nested ones included."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    def code_lines(self) -> int:
        """Count the lines that are not blank, only a comment, or part of a string that stands alone."""
        skipped: set[int] = set()
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for token in self.comments():
            if token.line.lstrip().startswith("#"):
                skipped.add(token.start[0])
        lines = enumerate(self.text.splitlines(), start=1)
        return sum(1 for number, line in lines if line.strip() and number not in skipped)

    def comments(self) -> list[tokenize.TokenInfo]:
        """Return the file's comments."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [token for token in tokens if token.type == tokenize.COMMENT]

    def uses_triton(self) -> bool:
        """Say whether the file imports triton, also inside of functions."""
        return any(name.partition(".")[0] == "triton" for name, _ in self.imported())

    def imported(self) -> Iterator[tuple[str, str | None]]:
        """Yield each imported module's full name, and the name that is taken from it."""
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                source = ".".join([*above, node.module] if node.module else above)
                yield from ((source, alias.name) for alias in node.names)


def modules(root: Path) -> list[Module]:
    """Read all Python files of a package's folder."""
    if not (root / "__init__.py").is_file():
        raise SystemExit(f"{root} is no package: it has no __init__.py.")
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = (root.name, *path.relative_to(root).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path, path.read_text()))
    return found


def import_graph(every: Iterable[Module]) -> dict[str, frozenset[str]]:
    """Return, for each module, the modules among these that it imports."""
    by_name = {module.name: module for module in every}
    graph = {}
    for module in by_name.values():
        needed = set()
        for source, name in module.imported():
            submodule = f"{source}.{name}"
            needed.add(submodule if submodule in by_name else source)
        graph[module.name] = frozenset((needed & by_name.keys()) - {module.name})
    return graph


def groups(graph: Graph) -> list[tuple[str, ...]]:
    """Return the modules in groups that import each other, a group after those that it needs (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[tuple[str, ...]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for needed in sorted(graph[name]):
            if needed not in order:
                visit(needed)
            if needed in stack:
                low[name] = min(low[name], low[needed])
        if low[name] == order[name]:
            start = stack.index(name)
            found.append(tuple(sorted(stack[start:])))
            del stack[start:]

    sys.setrecursionlimit(max(sys.getrecursionlimit(), 4 * len(graph)))  # a frame for each module of a chain
    for name in sorted(graph):
        if name not in order:
            visit(name)
    return found


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """Return the groups of more than one module."""
    return sorted(group for group in groups(graph) if len(group) > 1)


def loops(graph: Graph, circle: Iterable[str]) -> list[tuple[str, ...]]:
    """Return each way round a circle that meets no module twice; it begins at its alphabetically first module."""
    inside = set(circle)
    found: list[tuple[str, ...]] = []

    def walk(path: tuple[str, ...]) -> None:
        for needed in sorted(graph[path[-1]] & inside):
            if needed == path[0]:
                found.append(path)
            elif needed > path[0] and needed not in path:
                walk((*path, needed))

    for name in sorted(inside):
        walk((name,))
    return found


def longest_chain(graph: Graph) -> list[tuple[str, ...]]:
    """Return the longest row of groups of which each imports the next."""
    chains: dict[str, list[tuple[str, ...]]] = {}
    best: list[tuple[str, ...]] = []
    for group in groups(graph):
        below = {needed for name in group for needed in graph[name]} - set(group)
        rest = max((chains[name] for name in sorted(below)), key=len, default=[])
        chains.update({name: [group, *rest] for name in group})
        best = max(best, [group, *rest], key=len)
    return best


def long_functions(every: Iterable[Module], triton: bool) -> list[tuple[int, str]]:
    """Return length and name of the functions over 60 lines, in files with or without triton, the longest first."""
    found = []
    for module in every:
        for node in module.functions:
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LONG_FUNCTION and module.uses_triton() == triton:
                found.append((lines, f"{module.name}.{node.name}"))
    return sorted(found, reverse=True)


def shared_class_names(every: Iterable[Module]) -> dict[str, list[str]]:
    """Return the class names that several files define, with the modules; exceptions aside."""
    homes = defaultdict(set)
    for module in every:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.endswith(("Error", "Warning")):
                homes[node.name].add(module.name)
    return {name: sorted(found) for name, found in sorted(homes.items()) if len(found) > 1}


def public_names(module: Module) -> list[str]:
    """Read a package's ``__all__`` from its ``__init__.py``; without one there are none."""
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


def first_word(docstring: str) -> str:
    """Return a docstring's first word, without the punctuation behind it."""
    return docstring.split()[0].rstrip(",.:;")


def begins_with_noun_phrase(docstring: str) -> bool:
    """Say whether a docstring's first word is an article, determiner, pronoun, number or question word."""
    word = first_word(docstring)
    return word.lower() in NOUN_PHRASE_WORDS.split() or word.isdigit()


def begins_without_verb(docstring: str) -> bool:
    """Say whether a docstring's first word looks like no verb, by wider rules: plurals, endings, names, formulas."""
    word = first_word(docstring)
    lower = word.lower()
    if begins_with_noun_phrase(docstring) or not re.fullmatch(r"[A-Z][a-z]+", word):
        return True
    if lower.endswith(NOUN_ENDINGS):
        return lower not in VERBS_WITH_NOUN_ENDINGS.split()
    return lower.endswith("s") and not lower.endswith(("ss", "us", "is")) and lower not in VERBS_IN_S.split()


def docstrings(every: Iterable[Module]) -> list[tuple[str, str]]:
    """Return name and docstring of each function that has one."""
    found = []
    for module in every:
        for node in module.functions:
            if text := ast.get_docstring(node):
                found.append((f"{module.name}.{node.name}", text))
    return found


@dataclass
class Calls:
    """The functions of a package that were called, by file."""

    root: Path
    by_file: Counter[str]

    def count(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call; the interpreter's profiler calls this."""
        code: CodeType = frame.f_code
        # bodies of modules and classes are no functions: their names lie in dictionaries
        if event == "call" and code.co_flags & 1 and code.co_filename.startswith(f"{self.root}/"):
            self.by_file[code.co_filename] += 1

    def __enter__(self) -> Calls:
        threading.setprofile(self.count)
        sys.setprofile(self.count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def three_tokens(package: Any, root: Path) -> tuple[Calls, Calls]:
    """Generate three tokens on the embedded model; return the calls of `Engine.add`, and those of the steps."""
    model, tokenizer = package.load()
    for _ in range(2):  # the first engine imports what is imported late
        engine = package.Engine(model, tokenizer)
        sampling = package.SamplingParams(max_new_tokens=3)
        with Calls(root, Counter()) as add:
            engine.add("Once upon a time", sampling)
        with Calls(root, Counter()) as steps:
            tokens = 0
            while tokens < 3:
                tokens += len(engine.step())
    return add, steps


def run_measures(root: Path) -> dict[str, Any]:
    """Count what runs for three tokens, if the package has an engine."""
    sys.path.insert(0, str(root.parent))
    package = importlib.import_module(root.name)
    if Path(package.__file__ or "").parent != root:
        raise SystemExit(f"{root.name} was imported from {package.__file__}, not from {root}.")
    if not hasattr(package, "Engine"):
        return {}
    add, steps = three_tokens(package, root)
    files = sorted(add.by_file.keys() | steps.by_file.keys())
    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "calls_in_add": sum(add.by_file.values()),
        "files_in_add": len(add.by_file),
        "files_run": len(files),
        "lines_of_files_run": sum(len(Path(file).read_text().splitlines()) for file in files),
        "calls_in_steps": sum(steps.by_file.values()),
        "file_names": [Path(file).relative_to(root).as_posix() for file in files],
    }


def static_measures(roots: Iterable[Path]) -> dict[str, Any]:
    """Count what can be counted without running anything."""
    packages = [modules(root) for root in roots]
    every = [module for package in packages for module in package]
    graph = import_graph(every)
    shared = shared_class_names(every)
    public = {name for package in packages for name in public_names(package[0])}
    described = docstrings(every)
    nouns = [(name, text) for name, text in described if begins_with_noun_phrase(text)]
    lines = sum(len(module.text.splitlines()) for module in every)
    return {
        "files": len(every),
        "lines": lines,
        "code_lines": sum(module.code_lines() for module in every),
        "comment_lines": sum(len(module.comments()) for module in every),
        "import_edges": sum(map(len, graph.values())),
        "chain": longest_chain(graph),
        "circles": circles(graph),
        "loops": [loop for circle in circles(graph) for loop in loops(graph, circle)],
        "functions": sum(len(module.functions) for module in every),
        "long_functions": long_functions(every, triton=False),
        "long_triton_functions": long_functions(every, triton=True),
        "shared_class_names": shared,
        "shared_public_class_names": sorted(public & shared.keys()),
        "docstrings": len(described),
        "noun_phrases": [f"{name}: {text.splitlines()[0]}" for name, text in nouns],
        "without_verb": sum(begins_without_verb(text) for _, text in described),
    }


def share(part: int, whole: int) -> str:
    """Write a part in percent, with both numbers."""
    return f"{100 * part / max(whole, 1):.1f} % ({part} of {whole})"


def table(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table: a number for each measure."""
    shared, longest = found["shared_class_names"], found["long_functions"]
    rows = {
        "Python files": found["files"],
        "lines": found["lines"],
        "lines of code": found["code_lines"],
        "comment lines": share(found["comment_lines"], found["lines"]),
        "import edges": found["import_edges"],
        "longest import chain, modules": len(found["chain"]),
        "import circles (loops in them)": f"{len(found['circles'])} ({len(found['loops'])})",
        f"functions over {LONG_FUNCTION} lines, Triton aside": len(longest),
        f"functions over {LONG_FUNCTION} lines, Triton": len(found["long_triton_functions"]),
        "longest function, Triton aside": longest[0][0] if longest else f"at most {LONG_FUNCTION}",
        "class names in several files": len(shared),
        "  of them not private": sum(not name.startswith("_") for name in shared),
        "  of them in __all__": len(found["shared_public_class_names"]),
        "docstrings that begin with a noun phrase": share(len(found["noun_phrases"]), found["docstrings"]),
        "  that begin without a verb, wider rules": share(found["without_verb"], found["docstrings"]),
    }
    if run := found.get("run"):
        rows[f"Python calls in Engine.add (Python {run['python']})"] = run["calls_in_add"]
        rows["files that run in Engine.add"] = run["files_in_add"]
        rows["files that run for Engine.add + 3 tokens"] = run["files_run"]
        rows["  their lines"] = run["lines_of_files_run"]
        rows["  Python calls in the steps"] = run["calls_in_steps"]
    for name, value in rows.items():
        yield f"{name:<50}{value}"


def wrapped(title: str, entries: Iterable[str]) -> Iterator[str]:
    """Yield a heading and a list under it; entries that are too long go on in the next line."""
    yield from ("", f"{title}:")
    for entry in entries:
        line = "  "
        for word in entry.split(" "):
            if len(line) + len(word) >= WIDTH and line.strip():
                yield line.rstrip()
                line = "      "
            line += f"{word} "
        yield line.rstrip()


def report(found: dict[str, Any], options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table, and of the lists behind it."""
    yield from table(found)
    yield from wrapped("longest import chain", (" = ".join(group) for group in found["chain"]))
    yield from wrapped("loops of imports", (" -> ".join((*loop, loop[0])) for loop in found["loops"]))
    functions = [*found["long_functions"], *found["long_triton_functions"]]
    yield from wrapped("long functions", (f"{lines:4} {name}" for lines, name in functions))
    shared = found["shared_class_names"]
    yield from wrapped("class names in several files", [", ".join(f"{name} {len(shared[name])}" for name in shared)])
    yield from wrapped("of them in __all__", [", ".join(found["shared_public_class_names"])])
    if options.docstrings:
        yield from wrapped("docstrings that begin with a noun phrase", found["noun_phrases"])
    if options.files and "run" in found:
        yield from wrapped("files that run for Engine.add + 3 tokens", found["run"]["file_names"])


def main(arguments: list[str] | None = None) -> None:
    """Print the measures of the packages that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="*", type=Path, help="folders of packages; default src/kvkeep")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--docstrings", action="store_true", help="list the docstrings that begin with a noun phrase")
    parser.add_argument("--files", action="store_true", help="list the files that run for three tokens")
    parser.add_argument("--static", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    roots = [root.resolve() for root in options.package or [ROOT / "src" / "kvkeep"]]
    found = static_measures(roots)
    if not options.static and (run := run_measures(roots[0])):
        found["run"] = run
    print(json.dumps(found, indent=1) if options.json else "\n".join(report(found, options)))


if __name__ == "__main__":
    main()
