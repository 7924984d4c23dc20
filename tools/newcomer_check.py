"""Run the README from top to bottom as a newcomer: a new environment, an empty home, without a compiler and with one.

python tools/newcomer_check.py                 make an environment, install torch and this clone, run everything
python tools/newcomer_check.py --venv DIR      run with an environment that exists

The embedded model stands for models of the hub, and budgets of memory and new tokens are small. Commands of ``make``
are left to `make demo` and `make test` themselves.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
COMPILER = re.compile(r"(.*-)?(c\+\+|g\+\+|gcc|cc|clang(\+\+)?|c89|c99)(-[\d.]+)?$")
MORE = {"generate": "--max-new-tokens 3", "eval": "--tasks agreement --limit 1", "serve": "--check", "tune": "--help"}
"""Options that make a command short, by its name."""


def install(folder: Path) -> Path:
    """Make an environment with this clone in it, and return its folder."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    for what in ([TORCH], [f"{ROOT}[server]"]):
        subprocess.run([str(venv / "bin" / "pip"), "install", "--quiet", *what], check=True)
    return venv


def tools_without_compiler(folder: Path) -> str:
    """Make a folder of links to all programs on PATH that are no compiler, and return it."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            link = folder / program.name
            if not COMPILER.match(program.name) and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def steps(readme: str, model: str) -> list[list[str]]:
    """The README's commands, each as words, in its order; its Python runs in one process, as the last step."""
    found, code = [], []
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", readme, flags=re.DOTALL | re.MULTILINE):
        if language == "python":
            code.append(block)
        for line in block.splitlines() if language == "sh" else ():
            words = shlex.split(line.replace("Qwen/Qwen3-0.6B", model), comments=True)
            if words and words[0] == "kvkeep":
                found.append([*words, *MORE.get(words[1], "").split()])
    text = "\n".join(code).replace("Qwen/Qwen3-0.6B", model).replace("4096", "4").replace("2 * 2**30", "16 * 2**20")
    return [*found, ["python", "-c", 'prompts = ["the quick brown fox", "the lazy dog"]\n' + text]]


def run(words: list[str], folder: Path, environment: dict[str, str]) -> bool:
    """Run a command, print a line about it, and return whether it ended well without a traceback."""
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, input="/quit\n", check=False
    )
    well = done.returncode == 0 and "Traceback" not in done.stderr
    print("ok    " if well else "FAILED", shlex.join(words[:6])[:90].splitlines()[0], flush=True)
    if not well:
        print(done.stdout[-1000:], done.stderr[-2000:], sep="\n")
    return well


def check(venv: Path, folder: Path, path: str) -> bool:
    """Run all steps in an empty home with these programs on PATH."""
    home, place = folder / "home", folder / "place"
    for new in (home, place):
        new.mkdir(parents=True)
    (place / "report.txt").write_text("The tower is 300 steps high. " * 40)
    (place / "prompts.jsonl").write_text('{"prompt": "a report of some words"}\n')
    environment = {"HOME": str(home), "PATH": f"{venv / 'bin'}{os.pathsep}{path}", "HF_HUB_OFFLINE": "1"}
    environment |= {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
    where = "import kvkeep.models, pathlib; print(pathlib.Path(kvkeep.models.__file__).parent / 'tiny')"
    python = str(venv / "bin" / "python")
    asked = subprocess.run([python, "-c", where], env=environment, capture_output=True, text=True, check=True)
    wanted = steps((ROOT / "README.md").read_text(), asked.stdout.strip())
    ends = [run([str(venv / "bin" / words[0]), *words[1:]], place, environment) for words in wanted]
    return all(ends)


def main() -> int:
    """Run the README twice, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, help="an environment with kvkeep[server]; without it, a new one is made")
    given = parser.parse_args().venv
    if given is not None and not (given / "bin" / "kvkeep").exists():
        parser.error(f"{given} has no bin/kvkeep. Give an environment with kvkeep, or leave --venv out.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv = given.absolute() if given else install(folder)
        well = True
        for title, path in (
            ("without a compiler", tools_without_compiler(folder / "programs")),
            ("as PATH is", os.environ["PATH"]),
        ):
            print(f"== {title}")
            well &= check(venv, folder / title.replace(" ", "-"), path)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
