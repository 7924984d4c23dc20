"""What the pages and ``--help`` show works: every command that needs no network, every piece of Python, every option.

The README's own snippets, those of the engine's page and the examples run in ``tests/docs``.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import memories
import model_folders
import pytest
import result_folders
from transformers import LlamaConfig
from typer.main import get_command
from typer.testing import CliRunner

from kvkeep.cli import help as help_pages
from kvkeep.cli.help import EXAMPLES
from kvkeep.cli.loading import with_source
from kvkeep.cli.main import app
from kvkeep.head_profile import Profile

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
ELSEWHERE = ("README.md", "engine.md", "index.md", "scale.md", "server.md", "sessions.md", "tensor-parallel.md")
"""Pages whose Python runs in ``tests/docs``, ``tests/parallel``, ``tests/scale`` and ``tests/server``."""
ANYWHERE = {
    "generate": ["-n", "3"],
    "eval": ["--tasks", "agreement", "--limit", "1", "--no-plots"],
    "calibrate": ["--documents", "0", "--context", "200"],
    "demo": ["--help"],
    "tune": ["--help"],
    "remember": ["--overwrite"],
    "explain": ["--overwrite", "-n", "3"],
    "serve": ["--check"],
    "bench-server": ["--help"],
    "lm-eval": ["--help"],
}
"""Options that make a command short, or that it needs here."""
NEEDS_MORE = ("--load-in", "--device cuda", "--ray-workers", "--ray-replicas")
"""Options that need packages or devices that a first user may not have."""


def fences(page: Path, language: str = r"\w*") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands() -> list[str]:
    """The commands of all pages, and of all examples."""
    shown = [line for page in PAGES for block in fences(page) for line in block.replace("\\\n", " ").splitlines()]
    shown += [line for examples in EXAMPLES.values() for line in examples]
    shown += [
        line for name, command in get_command(app).commands.items() for line in help_pages.examples(command, name)
    ]
    lines = [re.sub(r"\s+", " ", line.partition(" # ")[0]).strip() for line in shown]
    return sorted({line for line in lines if re.match(r"(cat \S+ \| )?kvkeep ", line)})


def words_of(line: str) -> list[str]:
    """The words of a command for a small model in a folder with files of these names."""
    folder = str(model_folders.folder())
    names = {"Qwen/Qwen3-0.6B": folder, "MODEL": folder, "path/to/model": folder, "opt-30b": folder}
    names["path/to/config.json"] = f"{folder}/config.json"
    words = [names.get(word, word) for word in shlex.split(line.rpartition("| ")[2])]
    if words[1] == "eval" and re.search("Qwen/Qwen3-0.6B|MODEL .*%", line):
        words.remove(folder)  # budgets in percent are too small for texts of its length
    read = {"--report", "--merge", "--leaderboard"} & {*words}
    return words[1:] if read else [*words[1:], *ANYWHERE.get(words[1], [])]


def cases() -> list[object]:
    """The commands; measurements on the embedded model are slow."""
    slow = [
        re.match("kvkeep (eval|analyze|calibrate) ", line) and not re.search("MODEL|--report", line)
        for line in commands()
    ]
    return [
        pytest.param(line, marks=[pytest.mark.slow] if late else [], id=line)
        for line, late in zip(commands(), slow, strict=True)
    ]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the files that the pages name."""
    monkeypatch.chdir(tmp_path)
    for name, times in (("report.txt", 8), ("novel.txt", 8), ("lighthouse.txt", 8), ("book.txt", 200)):
        (tmp_path / name).write_text("the quick brown fox jumps over the lazy dog and the cat " * times)
    (tmp_path / "full_attention_heads.tsv").write_text("0.5\t1\n0\t0.25\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a report of some words"}\n')
    (tmp_path / "keys").write_text("anna 0123456789abcdef\n")
    (tmp_path / "tuned").mkdir()
    for name in ("kvkeep.toml", "tuned/kvkeep.toml"):
        (tmp_path / name).write_text('policy = "h2o"\nbudget = 40\n')
    (tmp_path / "server.toml").write_text('budget = 64\nkv-memory = "1MiB"\n')
    (tmp_path / "questions.jsonl").write_text('{"prompt": "what is it about"}\n')
    (tmp_path / "trace.jsonl").write_text(
        "".join(json.dumps({"at": n, "prompt_tokens": 9, "new_tokens": 3}) + "\n" for n in range(9))
    )
    decode = [{"rows": n, "seconds": 0.01 + 0.001 * n} for n in (1, 8)]
    prompt = [{"tokens": n, "seconds": 0.01 + 0.001 * n} for n in (8, 64)]
    (tmp_path / "steps.txt").write_text(json.dumps({"decode": decode, "prompt": prompt}))
    monkeypatch.setenv("KVKEEP_SESSIONS", str(tmp_path / "sessions"))
    with_source(memories.snapshot(), str(model_folders.folder())).save(tmp_path / "report.kvkeep")
    return tmp_path


def prepare(line: str, place: Path) -> None:
    """Write the folders and files that only some commands read."""
    if "--report" in line:
        result_folders.evaluation(place / "results")
    if "--leaderboard" in line:
        for name in ("results", "other-model"):
            result_folders.evaluation(place / name)
    if "--merge" in line:
        for number in (1, 2, 3):
            made = ["-o", f"part-{number}", "--shard", f"{number}/3", "--policies", "full,local,h2o", *ANYWHERE["eval"]]
            done = CliRunner().invoke(app, ["eval", str(model_folders.folder()), "--budgets", "50%", *made])
            assert done.exit_code == 0, done.output
    if "profile:" in line:
        heads = {"model": {"layers": 2, "kv_heads": 2}, "heads": ((0.0, 1.0), (0.0, 1.0)), "least": 8}
        Profile(**heads).save(place / "heads.json")
    if " config.json" in line:
        shape = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
        shape.to_json_file(str(place / "config.json"))


@pytest.mark.slow
@pytest.mark.parametrize("line", cases())
def test_the_command_runs(line, place):
    if any(option in line for option in NEEDS_MORE):
        pytest.skip("needs a package or a device")
    prepare(line, place)
    words = words_of(line)
    if package := {"serve": "fastapi", "lm-eval": "lm_eval"}.get(words[0]):
        pytest.importorskip(package)
    if "--system" in words:
        words[1] = str(model_folders.copy(place / "chat"))
        model_folders.edit_json(place / "chat" / "tokenizer_config.json", chat_template=model_folders.TEMPLATE)
    with model_folders.one_thread():
        done = CliRunner().invoke(app, words, input=(place / "report.txt").read_text() if "|" in line else None)
    assert done.exit_code == 0, done.output


def test_there_are_commands_and_examples():
    found = commands()
    assert len(found) > 30
    assert sum("MODEL" in line for line in found) >= 10


def options_by_command() -> dict[str, set[str]]:
    """The options of each command; those of ``policies`` with its subcommands."""
    found: dict[str, set[str]] = {}
    for name, command in get_command(app).commands.items():
        nested = [command, *getattr(command, "commands", {}).values()]
        params = [param for one in nested for param in one.params]
        found[name] = {"--help", *(name for param in params for name in (*param.opts, *param.secondary_opts))}
    return found


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "lab" / "log").glob("*.md"))],
    ids=lambda page: page.name,
)
def test_commands_in_the_text_have_the_options_that_it_names(page):
    options = options_by_command()
    for line in re.findall(r"`(kvkeep [^`]+)`", page.read_text()):
        _, name, *words = line.split()
        if name.startswith("-") or name == "COMMAND":
            continue
        assert name in options, line
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options[name], line


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "code"),
    [
        (page.name, code)
        for page in (*PAGES, ROOT / "docs" / "reference" / "api.md")
        if page.name not in ELSEWHERE
        for code in fences(page, "python")
    ],
    ids=lambda value: value if value.endswith(".md") else "code",
)
def test_python_of_the_pages_runs(page, code, place):
    if "results.jsonl" in code:
        asked = {"asked": [[0, 0, True], [0, 1, True], [1, 0, False]]}
        cells = [("full", "100%"), ("leverage", "10%"), ("h2o", "10%")]
        plain = result_folders.row("recall", score=asked)
        found = [{**plain, "policy": policy, "budget": budget} for policy, budget in cells]
        result_folders.evaluation(place / "results", found)
    exec(code.replace("Qwen/Qwen3-0.6B", str(model_folders.folder())), {})
