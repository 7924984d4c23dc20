"""Shards, merged folders and leaderboards: nothing is lost, and nothing that cannot be compared is mixed."""

import json
import re
import shutil

import model_folders
import processes
import pytest
import result_folders
from typer.testing import CliRunner

from kvkeep.cli.main import app
from kvkeep.errors import InputError
from kvkeep.evals import leaderboard
from kvkeep.evals.records import Records
from kvkeep.evals.records import merge as merge_folders
from kvkeep.evals.records import read as read_folders

QUICK = ("--tasks", "passkey", "--policies", "full,local,h2o", "--budgets", "20%,50%", "--limit", 3, "--context", 350)
_MEASURED = ("wall_s",)


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def invoke(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)], env={"COLUMNS": "120"})


def run(folder, *arguments):
    result = invoke(model_folders.folder(), *QUICK, "--no-plots", "-o", folder, *arguments)
    assert result.exit_code == 0, result.output
    return result


def rows(folder):
    found = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return sorted(({key: value for key, value in row.items() if key not in _MEASURED} for row in found), key=json.dumps)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with model_folders.one_thread():
        run(folder)
    return folder


def refused(result, *words):
    assert result.exit_code == 2
    assert result.stderr.count("\n") <= 4
    assert "Traceback" not in result.output
    said = " ".join(result.stderr.split())
    assert all(word in said for word in words), said


@pytest.mark.slow
def test_shards_merge_into_the_whole_run(whole, tmp_path):
    for number in (1, 2, 3):
        run(tmp_path / str(number), "--shard", f"{number}/3")
    sizes = [len(rows(tmp_path / str(number))) for number in (1, 2, 3)]
    assert sum(sizes) == 5
    assert max(sizes) - min(sizes) <= 1
    merge = ("--merge", ",".join(str(tmp_path / str(n)) for n in (3, 1, 2)), "-o", tmp_path / "all", "--no-plots")
    first, again = invoke(*merge), invoke(*merge)
    assert first.exit_code == again.exit_code == 0, first.output
    assert rows(tmp_path / "all") == rows(whole)
    before = (tmp_path / "all" / "results.jsonl").read_text().splitlines()
    run(tmp_path / "all")  # the merged folder is that of the whole run, which brings its rows into the plan's order
    assert sorted((tmp_path / "all" / "results.jsonl").read_text().splitlines()) == sorted(before)


def test_a_share_without_cells_is_no_error(tmp_path):
    run(tmp_path / "a", "--shard", "9/9")
    assert not (tmp_path / "a" / "results.jsonl").read_text()
    merged = invoke("--merge", tmp_path / "a", "-o", tmp_path / "b")
    assert merged.exit_code == 0


@pytest.mark.parametrize("shard", ["0/3", "4/3", "3", "a/b", "-1/3", "1/0", "1/3/5", "", "²/3", "1/" + "9" * 5000])
def test_a_share_that_does_not_exist(shard, tmp_path):
    refused(invoke(model_folders.folder(), *QUICK, "-o", tmp_path, "--shard", shard), "--shard")


@pytest.mark.slow
def test_other_protocols_settings_and_models_are_refused(whole, tmp_path):
    run(tmp_path / "later", "--ask", "later")
    for mode in ("--merge", "--leaderboard"):
        result = invoke(mode, f"{whole},{tmp_path / 'later'}", "-o", tmp_path / "out")
        refused(result, "questions of passkey were asked inside in the first and later in the second")
    run(tmp_path / "few", "--limit", 2)
    refused(invoke("--merge", f"{whole},{tmp_path / 'few'}", "-o", tmp_path / "out"), "'items' of passkey is 3")
    assert not (tmp_path / "out").exists()
    # nor into a folder that already has the other protocol
    refused(invoke("--merge", whole, "-o", tmp_path / "later"), "cannot be in one table")


def _other(whole, folder, **changes):
    shutil.copytree(whole, folder)
    manifest = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**manifest, **changes}))
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    own = {key: value for key, value in changes.items() if key == "model"}
    (folder / "results.jsonl").write_text("".join(json.dumps({**line, **own}) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("changes", [{"model": "m"}, {"weights": "w"}, {"dtype": "bfloat16"}])
def test_another_model_is_not_merged(whole, tmp_path, changes):
    other = _other(whole, tmp_path / "other", **changes)
    refused(invoke("--merge", f"{whole},{other}", "-o", tmp_path / "out"), "cannot be in one table")


def test_equal_cells_with_other_scores_are_counted(whole, tmp_path):
    other = _other(whole, tmp_path / "other")
    lines = [json.loads(line) for line in (other / "results.jsonl").read_text().splitlines()]
    lines[0]["score"]["score"] = 0.123
    (other / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records, doubled = merge_folders([whole, other], tmp_path / "out")
    assert doubled == 1
    assert rows(tmp_path / "out") == rows(whole)
    assert len(records.rows) == 5


def test_a_leaderboard_of_two_models_in_both_forms(whole, tmp_path):
    evil = "<script>alert(1)</script> | \x1b[31m"
    other = _other(whole, tmp_path / "other", model=evil)
    result = invoke("--leaderboard", f"{whole},{other}", "-o", tmp_path / "page", "--json")
    assert result.exit_code == 0, result.output
    page, text = (tmp_path / "page" / name for name in leaderboard.FILES)
    shown = page.read_text()
    assert shown.count("<tr>") == 1 + 2 * 5
    assert "<script" not in shown
    assert "\x1b" not in shown + text.read_text()
    assert not re.search(r"(src|href)=", shown)  # self-contained
    table = [line for line in text.read_text().splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert "passkey, % found (inside)" in table[0]
    assert json.loads(result.stdout)["pages"] == [str(page), str(text)]
    assert invoke("--leaderboard", whole, "-o", tmp_path / "page").exit_code == 0  # written anew


@pytest.mark.slow
def test_a_line_with_fewer_cases_says_so(whole, tmp_path):
    run(tmp_path / "more", "--context", "350,450", "--policies", "h2o", "--budgets", "20%")
    found = leaderboard.board(read_folders([whole, tmp_path / "more"]))
    cells = {(policy, budget): cell for _, policy, budget, cell, _ in found.lines}
    assert "of 2 cases" not in cells["h2o", "20%"]
    assert cells["local", "20%"].endswith("1 of 2 cases")


def test_other_weights_of_one_name_and_foreign_files_are_refused(whole, tmp_path):
    other = _other(whole, tmp_path / "other", weights="w")
    refused(invoke("--leaderboard", f"{whole},{other}", "-o", tmp_path), "other weights under the name")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "leaderboard.md").write_text("mine")
    refused(invoke("--leaderboard", whole, "-o", tmp_path / "mine"), "no leaderboard of kvkeep")
    assert not (tmp_path / "mine" / "leaderboard.html").exists()


def test_folders_that_are_none(whole, tmp_path):
    for option in ("--merge", "--leaderboard"):
        refused(invoke(option, tmp_path / "none", "-o", tmp_path / "out"), "no run.json")
        refused(invoke(option, " , ", "-o", tmp_path / "out"), option)
        refused(invoke(option, whole), "--output")
        refused(invoke(option, whole, "-o", tmp_path / "out", "--dry-run"), "exclude each other")
    refused(invoke("--merge", whole, "--leaderboard", whole, "-o", tmp_path / "out"), "exclude each other")
    with pytest.raises(InputError, match="no finished cells"):
        leaderboard.board([])
    refused(invoke("--merge", whole / "run.json", "-o", tmp_path / "out"), "is no folder")
    refused(invoke("--leaderboard", whole, "-o", whole / "run.json"), "is no folder")
    refused(invoke("--report", whole, "--shard", "1/2"), "exclude each other")


def test_a_torn_line_is_left_out_and_a_folder_can_be_merged_into_itself(whole, tmp_path):
    torn = _other(whole, tmp_path / "torn")
    with (torn / "results.jsonl").open("r+b") as file:
        file.truncate((torn / "results.jsonl").stat().st_size - 30)
    assert invoke("--merge", torn, "-o", tmp_path / "out", "--no-plots").exit_code == 0
    assert len(rows(tmp_path / "out")) == 4
    merged = invoke("--merge", f"{whole},{torn},{torn}/", "-o", torn, "--no-plots")  # a torn line is cut off
    assert merged.exit_code == 0, merged.output
    assert rows(torn) == rows(whole)


def test_a_folder_that_is_being_written_is_no_output(whole, tmp_path):
    merge = ("--merge", whole, "-o", tmp_path / "out", "--no-plots")
    assert invoke(*merge).exit_code == 0
    with Records(tmp_path / "out").locked():
        refused(invoke(*merge), "Another run is writing")


@pytest.mark.parametrize("grades", [[1e308, -1e308], [2], ["x"], 5, [True, None]])
def test_grades_of_a_hostile_row_are_refused(whole, tmp_path, grades):
    other = _other(whole, tmp_path / "other")
    lines = [json.loads(line) for line in (other / "results.jsonl").read_text().splitlines()]
    lines[1]["score"]["grades"] = grades
    (other / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for mode in ("--merge", "--leaderboard"):
        refused(invoke(mode, other, "-o", tmp_path / "out"), "Line 2", "grades")


@pytest.mark.slow
def test_the_same_share_twice_and_a_share_that_is_missing(whole, tmp_path):
    for name, shard in (("a", "1/2"), ("b", "1/2")):
        run(tmp_path / name, "--shard", shard)
    out = tmp_path / "out"
    records, doubled = merge_folders([tmp_path / "a", tmp_path / "b", tmp_path / "a"], out)
    assert doubled == 0
    assert len(records.rows) == 3
    assert rows(out) == rows(tmp_path / "a")
    run(out)  # the same command without --shard runs what is missing
    assert rows(out) == rows(whole)


@pytest.mark.slow
@pytest.mark.parametrize("end", [b'{"task": "pass', b'{"task": "passkey"}', b"\0" * 40])
def test_a_torn_share_is_merged_without_its_last_line_and_completed(whole, tmp_path, end):
    torn = _other(whole, tmp_path / "torn")
    kept = (torn / "results.jsonl").read_bytes().splitlines(keepends=True)[:3]
    (torn / "results.jsonl").write_bytes(b"".join(kept) + end)
    assert invoke("--merge", torn, "-o", tmp_path / "out", "--no-plots").exit_code == 0
    assert len(rows(tmp_path / "out")) == 3
    run(tmp_path / "out")
    assert rows(tmp_path / "out") == rows(whole)


@pytest.mark.slow
def test_ten_thousand_rows(tmp_path):
    many = [
        result_folders.row(policy=f"h2o:recent={number}", budget=budget, seed=seed)
        for number in range(1000)
        for budget in ("20%", "12")
        for seed in range(5)
    ]
    folder = result_folders.evaluation(tmp_path / "many", many)
    for doubled in (False, True):  # nothing is written the second time
        records, other = merge_folders([folder], tmp_path / "out")
        assert (len(records.rows), other) == (10_000, 0)
        assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 10_000, doubled
    assert len(leaderboard.board(read_folders([folder])).lines) == 2000


@pytest.mark.parametrize("key", ["policy", "case", "setup"])
def test_hostile_names_are_text_on_both_pages(tmp_path, key):
    evil = '</td><script>alert(1)</script><img src=x onerror="1"> [a](javascript:b) `|\u202e\x1b]0;x\x07'
    own = [result_folders.row(**{key: evil}), result_folders.row("agreement", **{key: evil})]
    folder = result_folders.evaluation(tmp_path / "evil", own)
    page, text = leaderboard.write(leaderboard.board(read_folders([folder])), tmp_path / "page")
    assert not re.search(r"<(script|img)|[\x1b\x07\u202e]", page.read_text() + text.read_text().replace("\\<", ""))
    lines = [line for line in text.read_text().splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


@pytest.mark.slow
def test_two_processes_merge_into_one_folder(whole, tmp_path):
    other = tmp_path / "out"
    words = ("eval", "--merge", whole, "-o", other, "--no-plots")
    both = [processes.kvkeep(*words, err=tmp_path / f"{number}.err") for number in range(2)]
    for process in both:
        process.join(120)
    codes = [process.exitcode for process in both]
    assert 0 in codes
    assert set(codes) <= {0, 2}
    for number, code in enumerate(codes):
        said = (tmp_path / f"{number}.err").read_text()
        assert "Traceback" not in said
        assert ("Another run is writing" in said) == (code == 2)
    assert rows(other) == rows(whole)


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_without_a_lost_or_doubled_cell(whole, tmp_path):
    out = tmp_path / "out"
    process = processes.kvkeep("eval", model_folders.folder(), *QUICK, "--no-plots", "-o", out)
    while process.is_alive() and not (out.is_dir() and (out / "results.jsonl").exists()):
        process.join(0.01)
    process.kill()
    process.join()
    before = (out / "results.jsonl").read_bytes()
    run(out)
    after = (out / "results.jsonl").read_bytes()
    assert after.startswith(before[: before.rfind(b"\n") + 1])
    assert rows(out) == rows(whole)
