"""``kvkeep tune``: what it prints and writes, how it goes on, and every bad input as one line and exit code 2."""

import functools
import io
import json
import re
import time
import tomllib

import model_folders
import processes
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvkeep import Engine
from kvkeep.cli import console, tune_run
from kvkeep.cli.main import app
from kvkeep.config import Config
from kvkeep.evals.tune import measure
from kvkeep.evals.tune.plan import TuneArguments, lay_out
from kvkeep.evals.tune.search import Progress, TuneRecords
from kvkeep.models import load as loading
from kvkeep.models.load import quiet

TEXT = "the quick brown fox jumps over the lazy dog and the cat. " * 60
STREAM = ("--case", "stream", "--context", 64, "--policies", "local,tova", "--budgets", "20%,40")
QUESTIONS = [{"question": f"what does the fox of {n} do", "answer": str(n)} for n in range(40)]


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"text": f"a fox is {n}.", **one}) + "\n" for n, one in enumerate(QUESTIONS)))
    return file


def invoke(*arguments, model=None, columns=160):
    where = [str(model or model_folders.folder())]
    return CliRunner().invoke(app, ["tune", *where, *map(str, arguments)], env={"COLUMNS": str(columns)})


def tune(*arguments, **options):
    result = invoke(*arguments, **options)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments, **options):
    """The one line that a bad input gets."""
    result = invoke(*arguments, **options)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    lines = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
    assert lines[-1].startswith("error: ")
    return lines[-1]


@pytest.fixture
def answers(monkeypatch):
    """Replies are right where the budget suffices: leverage needs 12 tokens, tova 30. Some questions have no answer."""
    needs, asked = {"leverage": 12, "tova": 30, "full": 0}, []

    def run(self, writer, arm, budget, units):
        asked.append((arm.name, budget, units))
        marks = ["1" if budget >= needs[arm.name] else "0"]
        return ["0" if unit % 10 == 9 else marks[0] * round(self.per_unit) for unit in units]

    monkeypatch.setattr(measure.Answers, "run", run)
    return asked


SEARCH = ("--policies", "leverage,tova", "--budgets", "8,12,20,30,40", "--target", "0.8", "--no-plots")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_a_table_a_file_and_a_curve(text, tmp_path, columns):
    result = tune(*STREAM, "--text", text, "--target", "0.5", "-o", tmp_path / "out", columns=columns)
    assert all(len(line) <= columns for line in result.stdout.splitlines())
    assert "local" in result.stdout
    assert "chosen" in result.stdout
    assert "95 % confidence" in " ".join(result.stdout.split())
    found = Config.read(tmp_path / "out" / "kvkeep.toml")
    assert found.model == str(model_folders.folder())
    assert found.policy in ("local", "tova")
    assert (tmp_path / "out" / "curve.png").read_bytes().startswith(b"\x89PNG")
    notes = tomllib.loads((tmp_path / "out" / "kvkeep.toml").read_text())["tuned"]
    assert notes["case"] == "stream"
    assert notes["at_least"] >= 0.5


def test_rules_for_heads_are_searched_side_by_side(text, tmp_path):
    rules = ("--policies", "h2o", "--head-budget", "uniform,global:0.2", "--target", "0.5", "--no-plots")
    found = json.loads(tune(*STREAM, *rules, "--text", text, "-o", tmp_path / "out", "--json").stdout)
    assert {one["head_budget"] for one in found["searched"]} == {"uniform", "global:0.2"}
    assert Config.read(found["config"]).head_budget == found["chosen"]["head_budget"]


def test_an_arm_in_other_words_is_searched_once():
    wanted = TuneArguments(case="stream", policies="local,tova,local@16", text=TEXT, context=64)
    ladders = lay_out(loading.find(model_folders.folder()), "m", wanted).ladders
    assert [ladder[0].arm.name for ladder in ladders] == ["local", "tova"]


def test_the_smallest_memory_is_chosen_and_questions_without_an_answer_are_counted(mine, tmp_path, answers):
    found = json.loads(tune("--questions", mine, *SEARCH, "-o", tmp_path / "out", "--json").stdout)
    assert (found["chosen"]["policy"], found["chosen"]["budget"]) == ("leverage", 12)
    assert found["asked"] - found["answered"] >= 2
    assert found["chosen"]["kept"] == 1.0
    assert found["chosen"]["at_least"] >= 0.8
    assert Config.read(found["config"]).budget == 12
    shown = tune("--questions", mine, *SEARCH, "-o", tmp_path / "out").stdout
    assert "that the full cache cannot answer are left out" in shown


@pytest.mark.slow
def test_the_same_command_again_measures_nothing_and_another_target_only_the_rest(mine, tmp_path, answers):
    command = ("--questions", mine, *SEARCH, "-o", tmp_path / "out", "--json")
    first = json.loads(tune(*command).stdout)
    (tmp_path / "out" / "kvkeep.toml").unlink()
    before = len(answers)
    assert json.loads(tune(*command).stdout) == first
    assert len(answers) == before
    assert (tmp_path / "out" / "kvkeep.toml").exists()
    tune(*command, "--target", "0.5")
    assert len({(name, unit) for name, _, units in answers if name == "full" for unit in units}) <= 40


@pytest.mark.slow
def test_a_search_that_was_stopped_goes_on(mine, tmp_path, answers, monkeypatch):
    whole = json.loads(tune("--questions", mine, *SEARCH, "-o", tmp_path / "whole", "--json").stdout)
    run, count = measure.Answers.run, []

    def stop(self, *arguments):
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return run(self, *arguments)

    monkeypatch.setattr(measure.Answers, "run", stop)
    command = ("--questions", mine, *SEARCH, "-o", tmp_path / "out", "--json")
    stopped = invoke(*command)
    assert stopped.exit_code == 130 or isinstance(stopped.exception, KeyboardInterrupt)
    assert "run the same command again" in stopped.stderr
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert len(lines) == 2
    with (tmp_path / "out" / "results.jsonl").open("a") as file:
        file.write('{"tune": "lever')  # a power cut
    again = json.loads(tune(*command).stdout)
    assert again["chosen"] == whole["chosen"]


def test_a_target_that_nothing_reaches_names_the_best(mine, tmp_path, answers):
    small = ("--policies", "tova", "--budgets", "8,12", "--target", "0.8", "--no-plots")
    said = refused("--questions", mine, *small, "-o", tmp_path / "out")
    assert "The best finalist was tova at 1" in said
    assert "keep the full cache" in said
    assert not (tmp_path / "out" / "kvkeep.toml").exists()


def test_its_bar_fits_80_columns_with_what_is_measured_and_the_time_left(monkeypatch):
    drawn = io.StringIO()
    screen = Console(file=drawn, force_terminal=True, width=80)
    monkeypatch.setattr(console, "err", lambda: screen)
    with tune_run._progress() as on_block:
        for units in (120, 130, 140):
            on_block(Progress("keydiff:document", 1790, units, 1036))
            time.sleep(0.05)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.getvalue())
    last = [line for line in re.split("[\r\n]", plain) if line.strip()][-1]
    assert "keydiff:document at 179" in last
    assert re.search(r"140 of about 1036 documents read +\d+% [0-9-]:[0-9-]{2}:[0-9-]{2}", last)
    assert len(last.rstrip()) <= 80


@pytest.mark.long
def test_too_few_questions_make_a_table_that_promises_nothing(mine, tmp_path, answers):
    few = ("--target", "0.98", "--no-plots", "--policies", "leverage,tova", "--budgets", "8,12,20,30,40")
    shown = tune("--questions", mine, *few, "-o", tmp_path / "own").stdout
    said = " ".join(shown.split())
    assert "leverage with a budget of 12 kept 100.0% of the full cache's quality here" in said
    assert (
        "36 questions cannot promise 0.98: if all are right, they show that 89.7% or more is kept. That takes 191 "
        "questions that the full cache answers." in said
    )
    assert Config.read(tmp_path / "own" / "kvkeep.toml").budget == 12
    assert "cannot promise" in (tmp_path / "own" / "kvkeep.toml").read_text()
    found = json.loads(tune("--questions", mine, *few, "-o", tmp_path / "own", "--json").stdout)
    assert (found["promises"], found["chosen"]["budget"]) == (False, 12)
    assert all(one["at_least"] is not None for one in found["searched"])
    planted = ("--context", 400, "--facts", 4, "--limit", 32, "-o", tmp_path / "planted")
    said = " ".join(tune(*few, *planted).stdout.split())
    assert "cannot promise 0.98: if all are right" in said
    assert "texts that the full cache answers" in said


def test_a_quick_search_has_a_folder_of_its_own_and_few_documents(tmp_path, answers, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read = ("--dtype", "float32", "--allow-pickle")
    result = tune("--quick", "--policies", "leverage,tova", "--context", 500, "--no-plots", *read)
    assert "cannot promise" in " ".join(result.stdout.split())
    chosen = Config.read(tmp_path / "tuned-quick" / "kvkeep.toml")
    assert chosen.policy in ("leverage", "tova")
    settings = f"--policy {chosen.policy} --budget {chosen.budget} {' '.join(read)}"
    assert f"kvkeep remember {chosen.model} {settings} -f FILE -o FILE.kvkeep" in " ".join(
        result.stderr.split()
    )  # questions come later by default
    assert {unit for _, _, units in answers for unit in units} == set(range(4))
    assert len(answers) <= 16
    assert "the same texts" not in result.stderr
    result = tune("--quick", "--policies", "leverage,tova", "--context", 500, "--no-plots", "--target", 0.5)
    assert "with 95 % confidence" in result.stdout
    assert "the same texts choose and confirm, which flatters the choice" in " ".join(result.stderr.split())


def test_a_first_look_in_which_nothing_reaches_the_target_is_no_error(tmp_path, answers):
    few = (
        "--quick",
        "--policies",
        "tova",
        "--context",
        500,
        "--budgets",
        "12,20",
        "--no-plots",
        "-o",
        tmp_path / "out",
    )
    result = tune(*few)
    assert "below target" in result.stdout
    assert "No budget keeps 98 % of the full cache's quality. The best finalist was tova at 20" in " ".join(
        result.stderr.split()
    )
    assert json.loads(tune(*few, "--json").stdout)["config"] is None
    assert not (tmp_path / "out" / "kvkeep.toml").exists()


def test_a_single_document_is_a_table_too(tmp_path, answers):
    few = ("--context", 400, "--facts", 4, "--limit", 1, "--policies", "leverage", "--budgets", "12,20", "--no-plots")
    said = tune(*few, "-o", tmp_path / "out", "--json").stdout
    found = json.loads(said, parse_constant=pytest.fail)  # NaN is no JSON
    assert (found["promises"], found["chosen"]["at_least"]) == (False, None)
    tomllib.loads((tmp_path / "out" / "kvkeep.toml").read_text())
    said = " ".join(tune(*few, "-o", tmp_path / "out").stdout.split())
    assert "4 questions cannot promise 0.98. That takes 200 questions about 50 texts" in said


def test_a_weak_model_is_noted(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(
        measure.Answers, "run", lambda self, writer, arm, budget, units: ["01"[unit % 2] for unit in units]
    )
    said = " ".join(tune("--questions", mine, *SEARCH, "-o", tmp_path / "out").stderr.split())
    assert "questions, fewer than 70 %: the model is too weak for them" in said
    assert "Ask your own (--questions), or --case stream" in said


def test_what_takes_more_memory_than_the_full_cache_is_no_answer(tmp_path, answers):
    """State for each head may be larger than the slots of a short text."""
    file = tmp_path / "short.jsonl"
    file.write_text("".join(json.dumps({"text": f"{n}.", **one}) + "\n" for n, one in enumerate(QUESTIONS)))
    own = ("--questions", file, "--target", "0.8", "--no-plots", "--policies", "leverage", "-o", tmp_path / "out")
    said = refused(*own, "--budgets", "46,48")
    assert "a row takes no less memory than in a full cache of all" in said
    assert not answers
    found = json.loads(tune(*own, "--budgets", "30,46", "--json").stdout)
    assert {one["budget"] for one in found["searched"]} == {30}


def test_results_that_do_not_fit_the_questions_are_refused(mine, tmp_path, answers):
    command = ("--questions", mine, *SEARCH, "-o", tmp_path / "out")
    tune(*command)
    file = tmp_path / "out" / "results.jsonl"
    file.write_text(file.read_text().replace('["1", ', '["111", ', 1))
    assert "results do not fit together" in refused(*command)
    file.write_text(file.read_text().replace('["111", ', "[[1.5], ", 1))
    assert "results do not fit together" in refused(*command)


def test_losses_that_are_no_numbers_are_refused(text, tmp_path, monkeypatch):
    """As in float16, where a model may overflow."""
    honest = measure.feed_in_pieces
    monkeypatch.setattr(measure, "feed_in_pieces", lambda *given: honest(*given) * float("nan"))
    said = refused(*STREAM, "--text", text, "--no-plots", "-o", tmp_path / "out")
    assert "Under full the model's losses on this text are infinite or no numbers" in said


def test_a_full_cache_that_answers_too_little(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(measure.Answers, "run", lambda self, writer, arm, budget, units: ["0"] * len(units))
    said = refused("--questions", mine, *SEARCH, "-o", tmp_path / "out")
    assert "The full cache answers 0 of " in said
    assert "beyond the model" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--target", "1"), "--target 1 is not a share between 0 and 1"),
        (("--target", "98"), "--target 98 is not a share"),
        (("--target", "much"), "is not a number"),
        (("--target", "nan"), "is not a share"),
        (("--case", "late"), "is no case"),
        (("--policies", "full"), "full evicts nothing"),
        (("--policies", "h20"), "Did you mean 'h2o'"),
        (("--policies", ""), "list of policies is empty"),
        (("--budgets", " "), "--budgets is an empty list"),
        (("--budgets", "0"), "keeps no token"),
        (("--budgets", "120%"), "outside 0 … 100%"),
        (("--head-budget", "adda"), "Unknown head budget"),
        (("--head-budget", "profile:none.json"), "none.json"),
        (("--head-budget", ","), "--head-budget is an empty list"),
        (("--context", "3"), "--context 3 is too short"),
        (("--context", "10M"), "more than a search can read"),
        (("--limit", "0"), "--limit 0 leaves nothing"),
        (("--facts", "0"), "--facts 0 leaves nothing"),
        (("--questions", "none.jsonl"), "cannot be read"),
        (("--text", "none.txt"), "cannot be read"),
        (("--output", ""), "--output is empty"),
        (("--dtype", "float8"), "Unknown dtype"),
    ],
)
def test_bad_input_is_one_line(words, said, tmp_path):
    where = () if "--output" in words else ("-o", tmp_path / "out")
    assert said in refused(*words, *where)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words", [("--case", "late"), ("--limit", "0"), ("--facts", "0"), ("--context", "3"), ("--policies", "full")]
)
def test_numbers_are_checked_before_the_model_is_looked_for(words, tmp_path, monkeypatch):
    monkeypatch.setattr("kvkeep.cli.tune_run.find", None)
    refused(*words, "-o", tmp_path / "out", model="no/model")


def test_questions_and_a_stream_do_not_go_together(mine, tmp_path):
    assert "--questions are for the cases later and inside" in refused(
        "--questions", mine, "--case", "stream", "-o", tmp_path / "out"
    )


@pytest.mark.long
def test_a_text_of_a_single_window_promises_nothing(text, tmp_path):
    options = ("--case", "stream", "--context", 1000, "--policies", "local", "--budgets", "20%,50%", "--target", "0.5")
    said = " ".join(tune("--text", text, *options, "--no-plots", "-o", tmp_path / "out").stdout.split())
    assert "tokens in a single text" in said
    assert "A single text cannot promise 0.5: it takes 6. Raise --limit, or give a longer --text" in said


def test_results_of_another_run_are_refused(text, mine, tmp_path, answers):
    tune("--questions", mine, *SEARCH, "-o", tmp_path / "out")
    assert "the case was later and is inside now" in refused(
        "--questions", mine, *SEARCH, "-o", tmp_path / "out", "--case", "inside"
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kvkeep.toml").write_text("policy = 'h2o'\n")
    said = refused("--questions", mine, *SEARCH, "-o", tmp_path / "other")
    assert "kvkeep.toml but no run.json" in said
    assert (tmp_path / "other" / "kvkeep.toml").read_text() == "policy = 'h2o'\n"


@pytest.mark.parametrize(
    "line",
    [
        '{"tune": 3, "budget": 1, "first": 0, "found": []}',
        '{"tune": "a", "budget": -1, "first": 0, "found": []}',
        '{"tune": "a", "budget": 1, "first": 0, "found": ["12"]}',
        '{"tune": "a", "budget": 1, "first": 0, "found": [["x"]]}',
        '{"tune": "a", "budget": 1, "first": 0}',
        "no JSON",
    ],
)
def test_a_damaged_line_is_named(line, mine, tmp_path, answers):
    tune("--questions", mine, *SEARCH, "-o", tmp_path / "out")
    with (tmp_path / "out" / "results.jsonl").open("a") as file:
        file.write(line + "\n")
    assert "is no row of results" in refused("--questions", mine, *SEARCH, "-o", tmp_path / "out")


def test_a_second_run_waits_for_the_first(mine, tmp_path, answers):
    records = TuneRecords(tmp_path / "out")
    with records.locked():
        said = refused("--questions", mine, *SEARCH, "-o", tmp_path / "out")
    assert "Another run is writing" in said


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on(mine, text, tmp_path):
    out = tmp_path / "out"
    command = ("tune", model_folders.folder(), "--text", text, *STREAM, "--target", "0.5", "--no-plots", "-o", out)
    process = processes.kvkeep(*command)
    while process.is_alive() and not ((out / "results.jsonl").exists() and (out / "results.jsonl").read_bytes()):
        time.sleep(0.01)
    process.kill()
    process.join()
    before = (out / "results.jsonl").read_bytes()
    tune("--text", text, *STREAM, "--target", "0.5", "--no-plots", "-o", out)
    after = (out / "results.jsonl").read_bytes()
    assert after.startswith(before[: before.rfind(b"\n") + 1])
    assert Config.read(out / "kvkeep.toml").policy in ("local", "tova")


# what was found is used


@functools.cache
def model():
    with quiet():
        return loading.load(str(model_folders.folder()))


def generate(*words):
    return CliRunner().invoke(app, ["generate", *map(str, words), "-p", "the fox", "-n", "2", "--json"])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kvkeep.toml"
    settings = Config(model=str(model_folders.folder()), policy="tova", budget=9, positions="true")
    path.write_text(settings.text())
    return path


def test_generate_takes_the_settings_and_flags_go_first(file):
    found = json.loads(generate("--config", file).stdout)
    assert (found["policy"], found["budget"]) == ("tova", 9)
    found = json.loads(generate("--config", file, "--policy", "local", "--budget", "7").stdout)
    assert (found["policy"], found["budget"]) == ("local", 7)
    assert json.loads(generate("--config", file, "--budget", "100%").stdout)["budget"] != 9


@pytest.mark.parametrize(
    ("content", "said"),
    [("polcy = 'h2o'", "Did you mean 'policy'?"), ("policy = 'os:path'", "names a module"), ("x", "is no TOML")],
)
def test_generate_refuses_a_wrong_file(file, content, said):
    file.write_text(content)
    result = generate("--config", file)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_generate_takes_no_settings_beside_a_memory(file):
    result = generate("--config", file, "--memory", "x.kvkeep")
    assert result.exit_code == 2
    assert "--config and --memory" in result.stderr


@pytest.mark.long
def test_serve_takes_the_settings(file):
    pytest.importorskip("fastapi")
    file.write_text(Config.read(file).text("", {"case": "later"}))
    process = processes.kvkeep("serve", "--config", file, "--check", err=file.with_name("errors"))
    process.join()
    assert process.exitcode == 0, file.with_name("errors").read_text()


@pytest.mark.slow
def test_an_engine_from_settings(file):
    ready, tokenizer = model()
    engine = Engine.from_config(file, model=ready, tokenizer=tokenizer, rows=1, budget=8)
    assert (engine.budget, type(engine.policy).__name__, engine.rows) == (8, "TOVA", 1)
    assert engine.generate("the fox")[0].text is not None
    assert Engine.from_config({"policy": "tova", "budget": 5}, model=str(model_folders.folder()), rows=1).budget == 5


@pytest.mark.parametrize("source", [{"polcy": 1}, {"budget": 0}, "none.toml"])
def test_settings_that_cannot_be_used(source):
    from kvkeep.errors import InputError

    with pytest.raises(InputError):
        Engine.from_config(source)
