"""Tables of the quality benchmarks, from rows that are made up."""

import json
import subprocess
import sys
from pathlib import Path

import model_folders
import pytest

BENCH = Path(__file__).parents[2] / "bench"
if not BENCH.is_dir():
    pytest.skip("the benchmarks are not part of this copy", allow_module_level=True)
sys.path.insert(0, str(BENCH))

import hard  # noqa: E402
import heads  # noqa: E402
import kvzip  # noqa: E402
import long_answers  # noqa: E402
import pretrained  # noqa: E402
import quality  # noqa: E402
import split_texts  # noqa: E402
import tune  # noqa: E402

from kvkeep.head_profile import Profile  # noqa: E402
from kvkeep.models.load import find  # noqa: E402
from kvkeep.models.tiny import embedded  # noqa: E402

for name in [name for name in sys.modules if name.partition(".")[0] == "lib"]:
    del sys.modules[name]  # other tests import the scripts' folder anew
sys.path.remove(str(BENCH))


def row(policy, budget, right, case="context=1024,ask=later"):
    asked = [[text, i, int(right(text, i))] for text in range(10) for i in range(8)]
    return {"task": "recall", "case": case, "policy": policy, "budget": budget, "seed": 0, "score": {"asked": asked}}


ROWS = [
    row("full", "100%", lambda text, i: i > 0),
    row("blend", "10%", lambda text, i: i > 1),
    row("leverage", "10%", lambda text, i: i > 1 and text),
    row("local", "10%", lambda text, i: i > 6),
    row("local", "4%", lambda text, i: False),
    {**row("h2o", "10%", lambda text, i: True), "setup": "positions=slot"},
]


def saved(folder, rows):
    folder.mkdir(parents=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def test_tables_have_what_stays_and_mark_what_is_not_clearly_worse(tmp_path):
    saved(tmp_path / "main-later", ROWS)
    ((title, body),) = quality.tables(tmp_path).items()
    assert title == "later, 1024 tokens: 70 of 80 questions about 10 texts are answered by the full cache"
    assert [line[0] for line in body] == ["`blend`", "`leverage`", "`local`"]
    ten = 1 + quality.BUDGETS.index("10%")
    assert body[0][ten].startswith("**86 (")
    assert body[1][ten].startswith("**77 (")  # one text less: no clear difference
    assert body[2][ten].startswith("14 (")
    assert body[2][1].startswith("0 (")  # the best of its column, but nothing
    written = quality.markdown(title, body).splitlines()
    assert written[2] == "| policy | 4% | 10% |"  # columns without a cell are left out
    assert len(written) == 7


def test_a_group_with_as_many_questions_does_not_replace_the_main_table(tmp_path):
    saved(tmp_path / "main-later", ROWS)
    saved(tmp_path / "heads-later", [ROWS[0], {**ROWS[1], "setup": "head-budget=profile:heads.json"}])
    ((_, body),) = quality.tables(tmp_path).items()
    assert [line[0] for line in body] == ["`blend`", "`leverage`", "`local`", "`blend` with a profile of heads"]


def test_the_other_policies_have_a_place_of_their_own(tmp_path, monkeypatch, capsys):
    """So a run of one group leaves the tables of the others as they are."""
    page = tmp_path / "page.md"
    marks = [*quality.MARKS, *quality.MARKS_OF_REST]
    page.write_text("{}\nold\n{}\nbetween\n{}\nold\n{}\n".format(*marks))
    saved(tmp_path / "rest-later", ROWS)
    given = ["quality.py", "--output", str(tmp_path), "--groups", "rest", "--collect", "--write", str(page)]
    monkeypatch.setattr("sys.argv", given)
    quality.main()
    written = page.read_text()
    assert written.startswith("{}\nold\n{}\nbetween\n{}\n\n**later, 1024 tokens".format(*marks))
    assert written.count("old") == 1
    assert "later, 1024 tokens" in capsys.readouterr().out


def test_a_group_is_run_alone():
    groups = [step.group for step in quality.steps(["later", "inside"], 400, 128)]
    assert {"main", "rest"} == set(groups)


def test_a_page_gets_the_tables_between_its_marks(tmp_path):
    saved(tmp_path / "main-later", ROWS)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{quality.MARKS[0]}\nold\n{quality.MARKS[1]}\nafter\n")
    quality.replaced(page, quality.MARKS, "new")
    assert page.read_text() == f"before\n{quality.MARKS[0]}\n\nnew\n\n{quality.MARKS[1]}\nafter\n"
    (other := tmp_path / "other.md").write_text("no marks\n")
    with pytest.raises(SystemExit, match="has no marks"):
        quality.replaced(other, quality.MARKS, "new")
    assert other.read_text() == "no marks\n"


def test_the_loss_after_a_cut_is_compared_text_by_text(tmp_path):
    def losses(policy, budget, by_text):
        return {"policy": policy, "budget": budget, "score": {"nll_by_text": by_text}}

    saved(tmp_path / "continuation", [losses("full", "100%", [1.0, 2.0, 3.0]), losses("local", "10%", [1.1, 2.2, 3.3])])
    title, body = quality.losses(tmp_path)
    assert title.endswith("3 texts")
    assert body[0][1 + quality.BUDGETS.index("10%")] == "0.200 (-0.048–0.448)"  # ± 4.303 · 0.1 / √3
    assert quality.losses(tmp_path / "nothing")[1] == []


def test_the_commands_are_run_in_folders_of_their_protocols(tmp_path, monkeypatch, capsys):
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, **options: commands.append(command))
    monkeypatch.setattr(sys, "argv", ["quality.py", "--output", str(tmp_path)])
    quality.main()
    places = [(c[c.index("--output") + 1].rpartition("/")[2], c[c.index("--context") + 1]) for c in commands]
    assert len(set(map(tuple, commands))) == len(commands) == 10
    assert places[:2] == [("main-later", "1024"), ("main-later", "2040")]
    assert {folder for folder, _ in places} == {"main-later", "rest-later", "main-inside", "rest-inside"}
    for command in commands:  # a folder takes one number of questions
        assert command[command.index("--limit") + 1] == ("400" if "main" in command[-1] else "128")


@pytest.mark.parametrize(("every", "cells"), [(False, "10%,20%,50%"), (True, "5%,10%,20%,50%")])
def test_a_pretrained_model_is_measured_by_one_command(every, cells, tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda words: asked.append(words) or subprocess.CompletedProcess(words, 0))
    folder = str(model_folders.folder("gemma3"))
    told = ["pretrained.py", folder, "--text", "test.txt", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", told + ["--all"] * every)
    with pytest.raises(SystemExit) as ended:
        pretrained.main()
    (words,), names = asked, pretrained.policies(folder, every=every)
    assert (ended.value.code, words[words.index("--policies") + 1]) == (0, ",".join(names))
    assert words[words.index("--budgets") + 1] == cells
    assert ("vase" in names) == every
    assert "spatten" not in names  # refuses layers with windows
    assert ("spatten is left out: " in capsys.readouterr().err) == every


def test_rules_of_the_tables_that_a_model_cannot_run_are_left_out(capsys):
    names = pretrained.policies(str(model_folders.folder("gpt2")), every=False)
    assert pretrained.LATER not in names  # it wants rotary positions
    assert {"full", "h2o", "local"} <= {*names} < {*pretrained.MAIN}
    assert f"{pretrained.LATER} is left out: " in capsys.readouterr().err


@pytest.mark.parametrize("promises", [True, False])
def test_the_exhaustive_search_asks_no_more_than_the_other_one(promises, tmp_path, monkeypatch):
    from types import SimpleNamespace

    plan = SimpleNamespace(measure=None, ladders=[], settings={})
    result = SimpleNamespace(promises=promises, sizes=SimpleNamespace(confirm=(0, 4)))
    monkeypatch.setattr(tune, "lay_out", lambda *_: plan)
    monkeypatch.setattr(tune, "tune", lambda *_, **__: result)
    monkeypatch.setattr(tune, "CachedMeasure", lambda *_: None)
    asked = []
    monkeypatch.setattr(tune, "Confirmation", lambda *_, promises=True: asked.append(promises))
    monkeypatch.setattr(tune, "show", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["tune.py", "--output", str(tmp_path)])
    tune.main()
    assert asked == [promises]


def test_policies_are_all_there_and_known():
    from kvkeep.evals.arms import split_policies
    from kvkeep.policies.registry import available, spec

    names = {spec(policy).partition(":")[0] for policy in split_policies(",".join([*quality.MAIN, *quality.REST]))}
    assert set(available()) - names <= {"topk_dynamic", "scissorhands_release"}


def test_where_the_full_cache_fails_all_questions_count(tmp_path):
    easy, hopeless = hard.KINDS[:2]
    rows = [row(policy, "10%", lambda text, i: i > 3) for policy in hard.POLICIES[1:]]
    saved(tmp_path / easy.name, [row("full", "100%", lambda text, i: i > 0), *rows])
    saved(tmp_path / hopeless.name, [row("full", "100%", lambda text, i: i > 6), *rows])
    saved(tmp_path / hard.KINDS[2].name, rows[:2])  # not finished
    first, second = hard.lines(tmp_path)
    assert first[1] == "70 of 80"
    assert first[2].startswith("57 (")
    assert second[1] == "10 of 80"
    assert second[2].startswith("50 (")
    assert second[2].endswith(")*")


def test_a_profile_is_compared_with_equal_heads_over_the_same_questions(tmp_path):
    rule = "head-budget=profile:heads-1.json"
    mine = [
        row("full", "100%", lambda text, i: i > 0),
        row("blend", "10%", lambda text, i: i > 3),
        {**row("blend", "10%", lambda text, i: i > 1), "setup": rule},
        {**row("blend", "10%", lambda text, i: True), "setup": "head-budget=profile:heads-2.json"},
        row("leverage", "10%", lambda text, i: True),  # not measured with the profile
    ]
    saved(tmp_path / "later", mine)
    ((line, change),) = heads.found(tmp_path, rule)
    assert line[:3] == ["blend", "later 1024", "10%"]
    assert [cell.partition(" ")[0] for cell in line[3:]] == ["57", "86", "+29", "70"]
    assert change.only == (20, 0)
    assert change.clear


def test_results_of_a_profile_are_named_by_its_content(tmp_path):
    (tmp_path / "heads.json").write_text("one")
    first = heads.held(tmp_path / "out", tmp_path / "heads.json")
    assert heads.held(tmp_path / "out", tmp_path / "heads.json") == first
    (tmp_path / "heads.json").write_text("two")
    assert heads.held(tmp_path / "out", tmp_path / "heads.json") != first
    assert first.read_text() == "one"


@pytest.mark.slow
@pytest.mark.parametrize("profile", [True, False], ids=["profile", "rule"])
def test_results_under_a_profile_or_a_rule_are_found_again(tmp_path, profile, capsys, monkeypatch):
    shape = find(embedded()).config
    layers, kv_heads = shape.num_hidden_layers, shape.num_key_value_heads
    file = tmp_path / "heads.json"
    Profile(model={"layers": layers, "kv_heads": kv_heads}, heads=((0.5,) * kv_heads,) * layers, least=5).save(file)
    chosen = ["--profile", str(file)] if profile else ["--rule", "ada:0.2"]
    options = ["--questions", "2", "--context", "512", "--protocols", "later", "--policies", "h2o", "--budgets", "10%"]
    monkeypatch.setattr(sys, "argv", ["heads.py", "--output", str(tmp_path / "out"), *chosen, *options])
    heads.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cells"] == 1


@pytest.mark.slow
def test_with_room_for_a_text_that_was_read_twice_all_answers_stay(capsys, monkeypatch):
    words = ["--questions", "8", "--contexts", "340", "--budgets", "100%", "2%", "--policies", "local"]
    monkeypatch.setattr(sys, "argv", ["kvzip.py", *words])
    kvzip.main()
    lines = json.loads(capsys.readouterr().out.splitlines()[-1])["lines"]
    assert [line[:3] for line in lines] == [
        ["340", budget, rule] for budget in ("100%", "2%") for rule in ("kvzip", "local")
    ]
    assert lines[0][3].startswith("100 (")
    assert lines[2][3].startswith("0 (")


def test_a_text_is_in_one_half_whatever_else_there_is(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"<{number}>" * 9)
    every = split_texts.halves([folder])
    for number in range(12):
        assert [name for name, text in every.items() if f"<{number}>" in text] == [split_texts.half(f"{number}.txt")]
    words = [folder, tmp_path / "a wrong name", "--output", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["split_texts.py", *map(str, words)])
    with pytest.raises(SystemExit):
        split_texts.main()
    assert not (tmp_path / "out").exists()
    (folder / "0.txt").unlink()
    assert split_texts.halves([folder]) == {name: text.replace("<0>", "").strip() for name, text in every.items()}


@pytest.mark.long
def test_long_answers_go_on_where_they_stopped_and_leave_out_what_does_not_fit(tmp_path, monkeypatch, capsys):
    text, rows = tmp_path / "novel.txt", tmp_path / "runs" / "rows.jsonl"
    text.write_text("The ferry to Marel leaves at seven, and nobody waits for it in winter. " * 8)
    words = ["long_answers.py", str(embedded()), "--text", str(text), "--output", str(tmp_path / "runs")]
    words += ["--prompts", "8", "--new", "12", "--dtype", "float32"]

    def run(*more):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        long_answers.main()
        printed = capsys.readouterr()
        return printed.err, [line[1:4] for line in json.loads(printed.out.splitlines()[-1])["lines"]]

    said, lines = run("--limit", "1", "--budgets", "12,8", "--policies", "local")
    assert "a budget of 8 cannot hold it with a prompt of 8" in said
    assert sorted(lines) == [["12", "local", ""], ["12", "local", "kept"], ["8", "local", ""]]
    rows.write_text(rows.read_text().rsplit("\n", 2)[0] + '\n{"policy": "loc')  # killed while it wrote the last line
    said, again = run("--limit", "1", "--budgets", "12,8", "--policies", "local")
    assert sorted(again) == sorted(lines)
    assert "1 of 1" in said
    # what was not asked for is not shown, and what was measured otherwise does not count
    said, lines = run("--limit", "1", "--budgets", "16", "--policies", "h2o:recent=2")
    assert sorted(lines) == [["16", "h2o:recent=2", ""], ["16", "h2o:recent=2", "kept"]]
    said, lines = run("--limit", "2", "--budgets", "16", "--policies", "h2o:recent=2,h2o:keep_prompt=0.5")
    assert "3 of 4" in said
    assert [line[2] for line in lines].count("cut to 50%") == 1
    said, again = run("--limit", "2", "--budgets", "16", "--policies", "h2o:recent=2,h2o:keep_prompt=0.5")
    assert again == lines
    assert "own answers" not in said
