"""What the docs show runs: the README's code, the page's own policy, the examples, the commands."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import memories
import model_folders
import pytest
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli import chat_run
from kvkeep.cli.loading import with_source
from kvkeep.cli.main import app
from kvkeep.testing import LAWS, Case

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [path for folder in (".", "docs", "docs/*", "lab/log") for path in sorted(ROOT.glob(f"{folder}/*.md"))]


SHORT = {"SHORT": kvkeep.SamplingParams(max_new_tokens=3)}


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_the_readmes_code_runs(capsys):
    code, engine = blocks(README, "python")
    assert code.count("kvkeep.load()") == code.count("=200") == engine.count("2 * 2**30") == 1
    names = {"prompts": ["the quick brown fox", "the lazy dog"]}
    exec(code.replace("kvkeep.load()", f"kvkeep.load({str(model_folders.folder())!r})").replace("=200", "=4"), names)
    assert re.search(r"Once upon a time \w.*\nMemoryUsage\(allocated_bytes=", capsys.readouterr().out, re.DOTALL)
    exec(engine.replace("2 * 2**30", "2 * 2**20").replace("run(prompts)", "run(prompts, SHORT)"), names | SHORT)
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()} >= {"0", "1"}


@pytest.mark.long
def test_the_engines_page_runs(capsys):
    exec("".join(blocks((ROOT / "docs/engine.md").read_text(), "python")), {})
    said = capsys.readouterr().out
    assert said.count(" length ") + said.count(" stop ") == 5
    assert len(said.splitlines()[-1]) > 100  # the texts of the coroutines


@pytest.mark.slow
def test_the_page_of_kept_memory_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec("".join(blocks((ROOT / "docs/sessions.md").read_text(), "python")), {})
    assert re.findall("One day it|In winter it", capsys.readouterr().out) == ["One day it", "In winter it"]
    assert kvkeep.Snapshot.load("report.kvkeep").tokens is not None
    assert kvkeep.Snapshot.load("tower.kvkeep").note["opening"]["tail"].endswith("It is 300 steps high.")
    assert kvkeep.Snapshot.load("conversations/anna.kvkeep").note["messages"][0]["content"].startswith("The dog")


def test_the_page_of_tuning_runs(capsys):
    exec("".join(blocks((ROOT / "docs/tune.md").read_text(), "python")), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.long
def test_the_batch_file_of_the_engines_page_is_answered_as_shown(tmp_path):
    page = (ROOT / "docs/engine.md").read_text()
    (lines,), (shown,) = blocks(page, "jsonl"), blocks(page, "json")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines)
    done = CliRunner().invoke(app, ["generate", "-i", str(source), "-o", str(target)])
    assert done.exit_code == 0, done.output
    one, two = sorted(map(json.loads, target.read_text().splitlines()), key=lambda entry: entry["custom_id"])
    assert re.findall(r'"(\w+)":', shown.split('"object"')[0]) == [*list(one)[:3], *one["response"]]
    assert re.findall(r'"(\w+)":', shown.split("}}")[1]) == [*one][3:]
    assert one["response"]["body"]["object"] in shown
    assert len(two["response"]["body"]["choices"]) == 2


def test_the_pages_own_policy_is_lawful():
    (code,) = blocks((ROOT / "docs/index.md").read_text(), "python")
    names = {}
    exec(code, names)
    for law in LAWS.values():
        law(names["EveryOther"](sinks=1), Case())


@pytest.mark.parametrize("command", [line for block in blocks(README, "sh") for line in block.splitlines()])
def test_the_readmes_commands_exist(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        return
    prompt = tmp_path / "report.txt"
    prompt.write_text("a report of some words " * (50 if words[1] == "tune" else 1))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a report of some words"}\n')
    with_source(memories.snapshot(), str(model_folders.folder())).save(tmp_path / "report.kvkeep")
    monkeypatch.setenv("KVKEEP_SESSIONS", str(tmp_path / "sessions"))
    folder = str(model_folders.folder())
    arguments = [{"Qwen/Qwen3-0.6B": folder, "report.txt": str(prompt)}.get(word, word) for word in words[1:]]
    if words[1] == "generate":
        arguments += ["--max-new-tokens", "3"]
    if words[1] == "remember":
        arguments += ["--overwrite"]
    if words[1] == "serve":
        pytest.importorskip("fastapi")
        arguments += ["--check"]
    if words[1] == "tune":
        arguments += ["--help"]  # its searches are in tests/evals/tune
    if words[1] == "eval":
        arguments += ["--tasks", "agreement", "--limit", "1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("name", kvkeep.available_policies())
def test_the_page_of_policies_lists_every_policy(name):
    page = (ROOT / "docs/policies.md").read_text()
    assert f"| [`{name}`](#{name}) |" in page
    assert f"\n## `{name}`\n" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def anchors(page):
    """The anchors of a page's headings, as the site and the repository's host make them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings_that_exist(page):
    """The site's build checks the links within the site; those between it and the log are checked here alone."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", prose):
        other = page.parent / target if target else page
        assert anchor in anchors(other), (target, anchor)


@pytest.mark.slow
def test_the_generated_page_is_up_to_date():
    done = subprocess.run(
        [sys.executable, "-c", "import policies_page as p; assert p.PAGE.read_text() == p.page(), 'run make docs'"],
        cwd=ROOT / "tools",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_pages_that_compare_agree_on_the_date_and_on_the_numbers():
    page = (ROOT / "docs/reference/compared.md").read_text()
    (read,) = re.findall(r"were read on (\d{4}-\d\d-\d\d)", page)
    assert f"as of {read}" in README.replace("\n", " ")
    models, here = re.findall(r"(\d+) model types of transformers", README + page)
    assert models == here
    policies = str(sum(policy.evicts for policy in kvkeep.available_policies().values()))  # `full` evicts nothing
    assert f"| eviction policies | {policies} |" in README
    assert f"| {policies} policies |" in page
    assert f"You study eviction**: {policies} policies" in README


def test_what_can_be_typed_into_a_chat_exists():
    for name in ("docs/sessions.md", "docs/tutorials/remembered-document.md"):
        typed = set(re.findall(r"(?<=`)/[a-z]+(?=[ `])", (ROOT / name).read_text()))
        assert typed
        assert typed <= set(chat_run.COMMANDS), name
