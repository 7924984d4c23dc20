"""Change single lines of the library, and ask whether a test notices.

python tools/mutants.py --count 100 --seed 0 --output FILE    goes on where FILE ends; prints those that no test notices

A mutant is one change in one function of src/kvkeep: a comparison, an operator, a truth value, a whole number, a
condition that is turned around, or a call without effect on its result that is left out. Which ones are tried depends
on the seed and the source alone. Each is written into a copy of the repository, where tests run until the first one
fails: those that import the file, those of its package, and for what a policy or the cache computes the contracts and
the papers' loops as well. Annotations, messages, docstrings and Triton's kernels are left alone.

``--against FOLDER`` asks the same of another version: each mutant that survives is made in the file of that version
that has the same line, and its tests run there.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/kvkeep")
ALSO = {
    "policies": ("contracts", "papers", "conformance"),
    "cache": ("contracts", "papers", "conformance", "parity"),
    "kv": ("cache", "contracts", "conformance"),
    "backends": ("conformance", "contracts"),
}
TIMEOUT_S = 900
NO_TESTS = 5
"""Exit code of pytest if all tests that it found are left out, as slow ones are."""
HANGS = ("-o", "faulthandler_timeout=120")
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult}


@dataclass(frozen=True)
class Mutant:
    """A change of one line.

    Attributes:
        file: relative to the repository.
        line: its number, from 1.
        old: the line, without white space around it.
        new: the expression that replaces one of the line.
        place: columns of the replaced expression, from 0.
    """

    file: str
    line: int
    old: str
    new: str
    place: tuple[int, int]

    def apply(self, root: Path) -> None:
        """Write the changed line."""
        path = root / self.file
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        line = lines[self.line - 1].encode()
        start, end = self.place
        lines[self.line - 1] = (line[:start] + self.new.encode() + line[end:]).decode()
        path.write_text("".join(lines), encoding="utf-8")


def mutants(root: Path) -> list[Mutant]:
    """Return all mutants of the package, in the order of files and lines."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        if "triton" in path.parts or "tiny" in path.parts:
            continue
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node, new in changes(function):
                    if node.lineno == node.end_lineno:
                        place = (node.col_offset, node.end_col_offset or 0)
                        name = str(path.relative_to(root))
                        found.append(Mutant(name, node.lineno, lines[node.lineno - 1].strip(), new, place))
    return sorted(set(found), key=lambda mutant: (mutant.file, mutant.line, mutant.place, mutant.new))


def changes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[ast.expr, str]]:
    """Yield expressions of a function's body, each with one that replaces it."""
    skipped: set[int] = set()
    for statement in function.body:
        for node in ast.walk(statement):
            if id(node) in skipped:
                continue
            if isinstance(node, ast.Raise | ast.JoinedStr | ast.AnnAssign | ast.FunctionDef | ast.Assert):
                skipped.update(map(id, ast.walk(node.annotation if isinstance(node, ast.AnnAssign) else node)))
            elif isinstance(node, ast.expr) and (new := changed(node)) is not None:
                yield node, new


def changed(node: ast.expr) -> str | None:
    """Return the replacement of an expression, if it has one."""
    other = copy.deepcopy(node)
    match other:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            other.ops = [COMPARISONS[type(operator)]()]
        case ast.BinOp(op=operator) if type(operator) in OPERATORS:
            other.op = OPERATORS[type(operator)]()
        case ast.BoolOp(op=operator):
            other.op = ast.Or() if isinstance(operator, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            return f"bool({ast.unparse(other.operand)})"
        case ast.Constant(value=bool(value)):
            other.value = not value
        case ast.Constant(value=int(value)):
            other.value = value + 1
        case ast.IfExp():
            other.body, other.orelse = other.orelse, other.body
        case _:
            return None
    return f"({ast.unparse(other)})"


def tests_of(root: Path, file: str) -> list[str]:
    """Return the test files and folders that look at a file of the package: first those that name it or import it,
    where most mutants end, then those that mirror its package.
    """
    package, *rest = Path(file).relative_to(PACKAGE).parts
    stem = Path(file).stem
    home = ".".join(Path(file).relative_to("src").parent.parts)
    imports = re.compile(rf"^ *(?:from|import) {home}\.{stem}\b|^ *from {home} import .*\b{stem}\b", re.MULTILINE)
    every = sorted((root / "tests").rglob("test_*.py"), key=lambda path: (stem.strip("_") not in path.stem, path))
    own = [
        str(path.relative_to(root))
        for path in every
        if stem.strip("_") in path.stem or imports.search(path.read_text(encoding="utf-8"))
    ]
    folders = [package, *ALSO.get(package, ())] if rest else [] if own else ["cache"]
    return [*own, *(f"tests/{folder}" for folder in folders if (root / "tests" / folder).is_dir())]


def survives(root: Path, mutant: Mutant) -> bool:
    """Return whether no test fails with the change, which is undone."""
    path = root / mutant.file
    source = path.read_text(encoding="utf-8")
    mutant.apply(root)
    try:
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow and not real",  # as CI
            *HANGS,
            *tests_of(root, mutant.file),
        ]
        places = os.pathsep.join([str(root / "src"), str(root / "lab" / "src")])
        environment = {**os.environ, "PYTHONPATH": places}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # all files but the changed one need not be compiled again
        outcome = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
        )
        return outcome.returncode in (0, NO_TESTS)
    except (SyntaxError, subprocess.TimeoutExpired):
        return False  # a test that never ends notices, too
    finally:
        path.write_text(source, encoding="utf-8")


def twin(root: Path, mutant: Mutant) -> Mutant | None:
    """Return the same change in another version of the repository: in the only line there that is equal."""
    places = [
        (path, number)
        for path in (root / "src").rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.strip() == mutant.old
    ]
    if len(places) != 1:
        return None
    path, number = places[0]
    line = path.read_text(encoding="utf-8").splitlines()[number - 1]
    source = (ROOT / mutant.file).read_text(encoding="utf-8").splitlines()[mutant.line - 1]
    moved = (len(line) - len(line.lstrip())) - (len(source) - len(source.lstrip()))
    start, end = mutant.place
    return Mutant(str(path.relative_to(root)), number, mutant.old, mutant.new, (start + moved, end + moved))


def main() -> None:
    """Try mutants, and print those that survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="a line of JSON for each mutant that was tried")
    parser.add_argument("--against", type=Path, help="another version of the repository, for mutants that survive")
    options = parser.parse_args()
    chosen = random.Random(options.seed).sample(mutants(ROOT), options.count)
    tried = options.output.read_text().splitlines() if options.output.exists() else []
    with tempfile.TemporaryDirectory() as temporary, options.output.open("a") as output:
        ours, other = Path(temporary) / "ours", Path(temporary) / "other"
        keep = shutil.ignore_patterns(".venv*", ".git", "dist", "site", "__pycache__")
        shutil.copytree(ROOT, ours, ignore=keep)
        if options.against:
            shutil.copytree(options.against, other, ignore=keep)
        for mutant in chosen[len(tried) :]:
            row = {**asdict(mutant), "survives": survives(ours, mutant)}
            if row["survives"] and options.against and (earlier := twin(other, mutant)):
                row["survived_before"] = survives(other, earlier)
            output.write(json.dumps(row) + "\n")
            output.flush()
            tried.append(json.dumps(row))
    rows = [json.loads(line) for line in tried]
    left = [row for row in rows if row["survives"]]
    print(f"{len(rows) - len(left)} of {len(rows)} are noticed")
    for row in left:
        print(f"{row['file']}:{row['line']}: {row['old']}  ->  {row['new']}  before: {row.get('survived_before')}")


if __name__ == "__main__":
    main()
