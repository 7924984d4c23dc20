"""Folders of results that were damaged or made to do harm: exit code 2 and one line, or a table; never a traceback."""

import json
import random
import re

import model_folders
import pytest
import result_folders
from result_folders import CONTENTS, KINDS, put
from typer.testing import CliRunner

from kvkeep import plots
from kvkeep.cli import eval_run
from kvkeep.cli.main import app
from kvkeep.errors import InputError, KVKeepError
from kvkeep.evals import curves
from kvkeep.evals import report as reports
from kvkeep.evals.records import Records
from kvkeep.result_files import Lock
from kvkeep_lab.analysis import report
from kvkeep_lab.analysis.groups import MEASUREMENTS
from kvkeep_lab.analysis.report import AnalysisFolder
from kvkeep_lab.cli.analyze import analysis as analysis_cli

QUICK = ("--tasks", "perplexity", "--policies", "local", "--limit", 2, "--window", 40, "--budgets", "12", "--no-plots")
OUTPUT = "`output`"
EVIL = "\x1b]0;owned\x07\x9b31m\u202e[bold]<b>"


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})


def refused(*arguments):
    """The one line of what cannot be used."""
    result = invoke(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def report_of(folder):
    return refused("eval", "--report", folder, "--no-plots")


def said_of(function, *arguments):
    """The message of the error that a function raises on purpose; nothing if it raises none."""
    try:
        function(*arguments)
    except KVKeepError as error:
        return str(error)
    return ""


# kvkeep eval: results.jsonl


@pytest.mark.parametrize("kind", [kind for kind in CONTENTS if kind != "empty"])
def test_results_that_hold_no_rows_are_refused_and_stay_as_they_are(tmp_path, kind):
    folder = result_folders.evaluation(tmp_path)
    (folder / "results.jsonl").write_bytes(CONTENTS[kind])
    said = report_of(folder)
    assert said == refused("eval", model_folders.folder(), *QUICK, "-o", folder)
    assert f"Line 1 of {folder / 'results.jsonl'} is no row of results" in said
    assert "choose another folder" in said
    assert (folder / "results.jsonl").read_bytes() == CONTENTS[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["results.jsonl", "run.json"])
def test_what_is_no_file_is_refused(tmp_path, name, kind):
    folder = result_folders.evaluation(tmp_path)
    result_folders.replaced(folder / name, kind)
    with pytest.raises(InputError, match=rf"{name} .*[Cc]hoose another"):
        Records(folder).check(result_folders.RUN)
    assert name == "run.json" or name in report_of(folder)


ENTRIES = {
    "task": (["recall"], None, 1, {}, "x" * 2000, ...),
    "case": ([], 3, ...),
    "policy": ({"a": 1}, True, ...),
    "budget": ({}, 20, None, "", "many", "%", "nan%", "-5%", "0%", "1e999%", "٣", ...),
    "seed": ("0", 1.5, None, True, [0], -1, 2**70, ...),
    "setup": (None, 5),
    "budget_tokens": ("8", None, 0, -1, float("nan"), 10**400, ...),
    "text_tokens": ([], 0, True, float("inf"), ...),
    "score": (None, 3, "0.5", [], ...),
    "score.perplexity": ("12", True, [1], {}, float("nan"), 10**30, ...),
    "memory": (None, [], ...),
    "memory.full_bytes": ("1", None, -1, True, ...),
    "memory.allocated_bytes": ({}, float("-inf"), ...),
}


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in ENTRIES.items() for value in values])
def test_an_entry_of_another_kind_is_refused_with_its_line(tmp_path, path, value):
    good = result_folders.row()
    folder = result_folders.evaluation(tmp_path, [good, put(good, path, value), good])
    with pytest.raises(InputError, match=r"Line 2 of \S+results.jsonl is no row of results: .* remove that line"):
        Records(folder)


@pytest.mark.parametrize("path", ["seed", "score.perplexity", "budget"])
def test_a_whole_last_line_that_is_no_row_is_not_cut_off(tmp_path, path):
    found = [result_folders.row(), put(result_folders.row(budget="12"), path, [])]
    folder = result_folders.evaluation(tmp_path, found)
    before = (folder / "results.jsonl").read_bytes()
    assert f"Line 2 of {folder / 'results.jsonl'}" in report_of(folder)
    assert repr(path) in refused("eval", model_folders.folder(), *QUICK, "-o", folder)
    assert (folder / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("score.by_depth", [[0, 2]] * 9),
        ("score.by_depth", [[0, "2"]] * 10),
        ("score.by_depth", [1] * 10),
        ("score.by_depth", ...),
        ("score.kept", [0.1] * 9),
        ("score.kept", [None] * 10),
        ("score.kept", "0123456789"),
        ("score.accuracy", "1"),
        ("score.accuracy", ...),
    ],
)
def test_what_plots_of_recall_need_is_checked(tmp_path, path, value):
    folder = result_folders.evaluation(tmp_path, [put(result_folders.row("recall"), path, value)])
    assert repr(path) in report_of(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data * 3,
        lambda data: data + b'{"task": "perple',
        lambda data: data + b"\x00" * 50,
        lambda data: data + b"{",
        lambda data: data.replace(b'"setup": "", ', b""),
        lambda data: data.replace(b'"local"', b'"a policy of tomorrow"'),
        lambda data: data + result_folders.lines([{**result_folders.row(), "task": "a task of tomorrow", "score": {}}]),
    ],
)
def test_harmless_changes_are_read(tmp_path, change):
    folder = result_folders.evaluation(tmp_path)
    path = folder / "results.jsonl"
    path.write_bytes(change(path.read_bytes()))
    result = invoke("eval", "--report", folder, "--no-plots")
    assert result.exit_code == 0, result.output
    assert "12.5" in result.stdout


# kvkeep eval: run.json


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_run_json_that_says_nothing_is_refused(tmp_path, kind):
    folder = result_folders.evaluation(tmp_path)
    (folder / "run.json").write_bytes(CONTENTS[kind])
    assert "run.json" in refused("eval", model_folders.folder(), *QUICK, "-o", folder)
    assert (folder / "run.json").read_bytes() == CONTENTS[kind]
    assert invoke("eval", "--report", folder, "--no-plots").exit_code == 0


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("tasks", value) for value in (None, [], ["perplexity"], "perplexity", 1, ...)),
        *(("tasks.perplexity", value) for value in (None, [], "1", 2)),
        *((key, value) for key in ("model", "weights", "dtype") for value in (None, {}, ["m"], 1, ...)),
        *(("tasks.perplexity.version", value) for value in (None, "1", [1], 10**400, float("nan"), ...)),
        ("model", "m" * 5000),
    ],
)
def test_a_run_json_of_other_kinds_is_another_run(tmp_path, path, value):
    folder = result_folders.evaluation(tmp_path)
    (folder / "run.json").write_text(json.dumps(put(result_folders.RUN, path, value)))
    with pytest.raises(InputError, match=rf"hoose another {OUTPUT} folder") as error:
        Records(folder).check(result_folders.RUN)
    assert len(str(error.value)) < 1000


def test_the_folder_of_an_analysis_is_not_overwritten_by_an_evaluation(tmp_path):
    folder = result_folders.analysis(tmp_path)
    before = (folder / "run.json").read_bytes()
    assert "does not say which tasks" in refused("eval", model_folders.folder(), *QUICK, "-o", folder)
    assert (folder / "run.json").read_bytes() == before


# kvkeep analyze


def rerun(folder, novel):
    return ("analyze", model_folders.folder(), "--text", novel, "-o", folder, "--max-tokens", 80)


@pytest.fixture
def novel(tmp_path):
    path = tmp_path / "fox.txt"
    path.write_text("the quick brown fox jumps over the lazy dog and the cat. " * 20)
    return path


@pytest.fixture
def unchecked(monkeypatch):
    """A folder is taken for one of the same run."""
    monkeypatch.setattr(AnalysisFolder, "check", lambda folder, manifest: None)
    monkeypatch.setattr(analysis_cli.load, "read_weights", None)


def only(path, *names):
    """An analysis of these measurements."""
    kept = ["run.json", *(f"{name}.json" for name in names)]
    return result_folders.analysis(path, *(other for other in result_folders.FINISHED if other not in kept))


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("name", ["run.json", "sparsity.json"])
def test_a_file_of_an_analysis_that_is_no_object_is_refused(tmp_path, kind, name):
    folder = result_folders.analysis(tmp_path)
    (folder / name).write_bytes(CONTENTS[kind])
    with pytest.raises(InputError, match=rf"{name} .*(Remove it|choose another {OUTPUT})"):
        report.write(AnalysisFolder(folder))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["run.json", "sparsity.json"])
def test_what_is_no_file_of_an_analysis_is_refused(tmp_path, name, kind):
    folder = result_folders.analysis(tmp_path)
    result_folders.replaced(folder / name, kind)
    with pytest.raises(InputError, match=name):
        report.write(AnalysisFolder(folder))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((name, value) for name in ("n_tokens", "n_layers", "seed") for value in (None, "<b>", 1.5, True, ...)),
        *((name, value) for name in ("model", "text_name", "torch") for value in (None, 3, [], ...)),
        *(("notes", value) for value in (None, "note", [1], {"a": 1}, ...)),
    ],
)
def test_a_run_json_of_other_kinds_is_no_analysis(tmp_path, path, value):
    folder = result_folders.analysis(tmp_path)
    (folder / "run.json").write_text(json.dumps(put(result_folders.FINISHED["run.json"], path, value)))
    with pytest.raises(InputError, match=rf"run.json does not say what was run: (its|it has no) '{path}'"):
        report.write(AnalysisFolder(folder))


@pytest.mark.parametrize("kind", MEASUREMENTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("value", [..., None, "text", [], {}, 1], ids=repr)
def test_a_result_of_another_kind_is_refused_with_its_file(tmp_path, monkeypatch, kind, value):
    monkeypatch.setattr(plots, "available", lambda: False)
    content = result_folders.FINISHED[f"{kind.name}.json"]
    folder = only(tmp_path, kind.name)
    for path in ("result", next(iter(content["result"]))):
        path = path if path == "result" else f"result.{path}"
        (folder / f"{kind.name}.json").write_text(json.dumps(put(content, path, value)))
        said = said_of(report.read, AnalysisFolder(folder))
        assert said or path != "result"
        assert not said or (
            f"{kind.name}.json" in said and "Remove it, and the same command measures it again." in said
        )


@pytest.mark.parametrize("kind", MEASUREMENTS, ids=lambda kind: kind.name)
def test_an_empty_result_is_refused(tmp_path, kind):
    folder = result_folders.analysis(tmp_path)
    content = put(result_folders.FINISHED[f"{kind.name}.json"], "result", {})
    (folder / f"{kind.name}.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"{kind.name}.json does not hold what the measurement {kind.name} writes"):
        report.read(AnalysisFolder(folder))


@pytest.mark.parametrize("skipped", [3, None, ["why"]])
def test_a_reason_that_is_no_sentence_is_refused(tmp_path, skipped):
    folder = result_folders.analysis(tmp_path)
    (folder / "sparsity.json").write_text(json.dumps({"version": 1, "skipped": skipped}))
    with pytest.raises(InputError, match="holds neither a result nor why there is none"):
        report.read(AnalysisFolder(folder))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "1" * 400, '"\\ud800"', "[" * 200 + "]" * 200])
def test_what_json_cannot_hold_is_refused_when_it_is_read(tmp_path, value):
    folder = result_folders.analysis(tmp_path)
    path = folder / "sparsity.json"
    path.write_text(path.read_text().replace('"result": {', f'"result": {{"more": {value}, ', 1))
    with pytest.raises(InputError, match=r"sparsity.json cannot be read"):
        report.read(AnalysisFolder(folder))


def test_a_picture_that_cannot_be_drawn_is_the_files_fault(tmp_path):
    folder = only(tmp_path)
    content = put(result_folders.FINISHED["removal.json"], "result.shares", [0.1])
    (folder / "removal.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"removal.json does not hold"):
        report.write(AnalysisFolder(folder))


def test_a_damaged_measurement_is_refused_before_weights_are_read(tmp_path, novel, unchecked):
    folder = result_folders.analysis(tmp_path / "out")
    (folder / "sparsity.json").write_text('{"version": 1, "result": {"sparsity": []}}')
    assert "sparsity.json does not hold what the measurement" in refused(*rerun(folder, novel))


# one writer


def test_a_second_run_on_a_folder_is_refused_before_weights_are_read(tmp_path, novel, unchecked, monkeypatch):
    monkeypatch.setattr(eval_run, "read_weights", None)
    evaluation = result_folders.evaluation(tmp_path / "eval", [])
    analysis = result_folders.analysis(tmp_path / "analysis")
    commands = {
        evaluation: ("eval", model_folders.folder(), *QUICK, "-o", evaluation),
        analysis: rerun(analysis, novel),
    }
    for folder, command in commands.items():
        with Lock(folder, "held"):
            said = refused(*command)
        assert f"Another run is writing to {folder}." in said
        assert "wait for the other one to end, or give another output" in said


def test_a_message_gets_no_escape_sequences_from_a_folder(tmp_path):
    folder = result_folders.evaluation(tmp_path)
    (folder / "run.json").write_text(json.dumps({**result_folders.RUN, "model": EVIL}))
    said = refused("eval", model_folders.folder(), *QUICK, "-o", folder)
    assert r"the model was \x1b]0;owned\x07\x9b31m\u202e[bold]<b> and is" in said


def test_a_report_needs_no_lock(tmp_path):
    folder = result_folders.evaluation(tmp_path)
    with Lock(folder, "held"):
        assert invoke("eval", "--report", folder, "--no-plots").exit_code == 0


# what is shown


def test_a_terminal_gets_no_escape_sequences_from_a_folder(tmp_path):
    names = {"policy": EVIL, "case": f"{EVIL}\n", "setup": EVIL}
    folder = result_folders.evaluation(tmp_path, [result_folders.row(**names), result_folders.row("recall", **names)])
    shown = invoke("eval", "--report", folder, "--no-plots")
    assert shown.exit_code == 0
    assert r"\x1b]0;owned\x07\x9b31m\u202e[bold]<b>" in shown.stdout
    plain = invoke("eval", "--report", folder, "--no-plots", "--json")
    assert json.loads(plain.stdout)["rows"][0]["policy"] == EVIL
    for output in (shown.output, plain.output.replace("\u202e", "")):  # the object is for programs: direction stays
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", output)


def test_a_page_and_its_terminal_get_neither_markup_nor_escape_sequences(tmp_path, novel, monkeypatch):
    found = result_folders.FINISHED
    folder = result_folders.analysis(tmp_path / "out", "budgets.json")
    policies = {EVIL: found["budgets.json"]["result"]["policies"]["local"]}
    (folder / "budgets.json").write_text(json.dumps(put(found["budgets.json"], "result.policies", policies)))
    run = {**found["run.json"], "text_name": "<script>alert(1)</script>", "notes": ["<img src=x>"]}
    (folder / "run.json").write_text(json.dumps(run))
    monkeypatch.setattr(plots, "available", lambda: False)
    monkeypatch.setattr(AnalysisFolder, "check", lambda folder, manifest: None)
    monkeypatch.setattr(analysis_cli, "run", lambda *arguments: None)
    shown = invoke(*rerun(folder, novel))
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown.output)
    text = (folder / "index.html").read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert "[bold]<b>" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize("name", ["$\\frac{$", "_hidden", "\x1b[31m", "a\n" * 400, ""])
@pytest.mark.filterwarnings("ignore")
def test_any_name_can_be_drawn(tmp_path, name):
    found = [result_folders.row(policy=name, case=name), result_folders.row(policy="full", budget="100%", case=name)]
    folder = result_folders.evaluation(tmp_path, found)
    result = invoke("eval", "--report", folder)
    assert result.exit_code == 0, (result.output, result.exception)
    assert (folder / "quality.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("perplexity", [1e308, -1e308, 5e-324, 0.0])
@pytest.mark.filterwarnings("ignore")
def test_numbers_without_measure_are_drawn_or_refused(tmp_path, perplexity):
    score = {"perplexity": perplexity}
    found = [result_folders.row(score=score), result_folders.row(budget="12"), result_folders.row(seed=1, score=score)]
    result = invoke("eval", "--report", result_folders.evaluation(tmp_path, found))
    assert result.exit_code == 0 or (result.exit_code == 2 and "--no-plots" in result.stderr), result.exception


@pytest.mark.long
def test_too_many_panels_are_refused_at_once(tmp_path):
    found = [result_folders.row(case=f"window={n}") for n in range(plots.MOST_PANELS + 1)]
    folder = result_folders.evaluation(tmp_path, found)
    assert f"{plots.MOST_PANELS + 1} panels" in refused("eval", "--report", folder)
    assert invoke("eval", "--report", folder, "--no-plots").exit_code == 0


@pytest.mark.parametrize("name", ["quality.png", ".quality.png.new"])
def test_pictures_do_not_follow_links(tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = result_folders.evaluation(tmp_path / "out", [result_folders.row()])
    (folder / name).symlink_to(victim)
    assert invoke("eval", "--report", folder).exit_code == 0
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["index.html", "analysis.json", "sparsity.png"])
def test_files_of_an_analysis_do_not_follow_links(tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = only(tmp_path / "out", "sparsity")
    for link in (name, f".{name}.new"):
        (folder / link).symlink_to(victim)
    report.write(AnalysisFolder(folder))
    assert victim.read_text() == "precious"
    assert not (folder / name).is_symlink()


def test_a_manifest_does_not_follow_links(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = result_folders.evaluation(tmp_path / "out")
    (folder / ".run.json.new").symlink_to(victim)
    records = Records(folder)
    with records.locked():
        records.open(result_folders.RUN)
    assert victim.read_text() == "precious"


# at random


def show_and_resume(folder):
    records = Records(folder)
    reports.tables(records.rows)
    for panels in (curves.quality, curves.depth, curves.kept):
        panels(records.rows)
    records.check(result_folders.RUN)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_random_damage_never_ends_in_anything_but_a_table_or_one_line(tmp_path):
    drawn = random.Random(0)
    refusals = 0
    for number in range(150):
        folder = result_folders.evaluation(tmp_path / str(number))
        result_folders.mutate(folder / drawn.choice(["results.jsonl"] * 3 + ["run.json"]), drawn)
        said = said_of(show_and_resume, folder)
        refusals += bool(said)
        if number % 20 == 0:
            result = invoke("eval", "--report", folder, "--no-plots")
            assert result.exit_code == 0 or (result.exit_code == 2 and said and result.stderr.count("\n") == 1)
    assert 40 < refusals < 145


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_random_damage_of_an_analysis_is_refused_or_shown(tmp_path, monkeypatch):
    drawn = random.Random(0)
    refusals = 0
    for number in range(150):
        name = drawn.choice(MEASUREMENTS).name
        folder = only(tmp_path / str(number), name)
        result_folders.mutate(folder / drawn.choice([f"{name}.json"] * 9 + ["run.json"]), drawn)
        monkeypatch.setattr(plots, "available", lambda pictures=number % 20 == 0: pictures)
        refusals += bool(said_of(report.write, AnalysisFolder(folder)))
    assert 30 < refusals < 120
