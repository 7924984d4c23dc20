"""``kvkeep calibrate``: what it prints and writes, how it goes on, and every bad input as one line and exit code 2."""

import json

import model_folders
import pytest
from typer.testing import CliRunner

from kvkeep.calibration import head_losses
from kvkeep.calibration.head_losses import LossMeter
from kvkeep.cli import calibrate_run
from kvkeep.cli.main import app
from kvkeep.head_profile import Profile

TEXT = "the quick brown fox jumps over the lazy dog and the cat. " * 20
QUICK = ("--context", 80, "--documents", 0, "--recent", 6)
PROFILE = Profile(model={"layers": 2, "kv_heads": 2}, heads=((0.0, 1.0), (0.0, 1.0)), least=8)


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "novel.txt").write_text(TEXT)
    return tmp_path


def invoke(*arguments, family="llama", width=80):
    where = [] if family is None else [str(model_folders.folder(family))]
    return CliRunner().invoke(app, ["calibrate", *where, *map(str, arguments)], env={"COLUMNS": str(width)})


def refused(*arguments, family="llama"):
    """The one line that a bad input gets."""
    result = invoke(*arguments, family=family)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    line = result.stderr.rstrip("\n").rpartition("\n")[2]
    assert "rror: " in line, result.stderr
    return line


def names(place):
    return sorted(path.name for path in place.iterdir())


def test_a_profile_and_a_table(place):
    result = invoke("--text", "novel.txt", "-o", "heads.json", *QUICK)
    assert result.exit_code == 0, result.output
    assert names(place) == ["heads.json", "novel.txt"]
    profile = Profile.load("heads.json")
    assert profile.least == 10
    assert "layer  head 0  head 1" in result.stdout
    assert "heads limited together" in result.stdout
    assert "need nothing but 10 first and newest tokens" in " ".join(result.stdout.split())
    assert " ".join(result.stderr.split()) == (
        "note: calibration: 80 tokens are more than the 40 that the model was trained for."
    )
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_quick_calibration_is_small(place, monkeypatch):
    seen = []
    monkeypatch.setattr(calibrate_run, "calibrate", lambda job, *_: seen.append(job.settings) or PROFILE)
    assert invoke("--quick", "--recent", 6, "-o", "heads.json").exit_code == 0
    assert (seen[0].context, seen[0].documents, seen[0].windows) == (40, 0, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--context", 60), "--context 60 is too short"),
        (("--case", "late"), "neither later nor inside"),
    ],
)
def test_numbers_are_checked_before_the_model_is_looked_for(place, monkeypatch, words, said):
    monkeypatch.setattr(calibrate_run, "find", None)
    assert said in refused("-o", "heads.json", *words)


def test_a_text_without_room_for_the_facts_speaks_of_no_option_that_there_is_not(place):
    said = refused("-o", "heads.json", "--context", 100, "--recent", 6)
    assert "have no room for 16 facts. Give a longer --context." in said


def test_json_is_the_profile(place):
    result = invoke("--text", "novel.txt", "-o", "heads.json", "--json", *QUICK)
    found = json.loads(result.stdout)
    assert found.pop("file") == "heads.json"
    assert found == json.loads((place / "heads.json").read_text())


@pytest.mark.slow
def test_the_profile_is_used_by_other_commands(place):
    folder = str(model_folders.folder())
    assert invoke("--text", "novel.txt", "-o", "heads.json", *QUICK).exit_code == 0
    words = ["generate", folder, "-p", "the quick", "-n", "3", "--budget", "24", "--policy", "leverage"]
    done = CliRunner().invoke(app, [*words, "--head-budget", "profile:heads.json"])
    assert done.exit_code == 0, done.output
    other = str(model_folders.folder("gpt2"))
    done = CliRunner().invoke(app, [words[0], other, *words[2:], "--head-budget", "profile:heads.json"])
    assert done.exit_code == 2
    assert "The profile belongs to another model" in done.stderr


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(place, monkeypatch):
    command = ("--text", "novel.txt", "-o", "heads.json", *QUICK)
    done, original = [], LossMeter.losses

    def losses(self, sets):
        if done:
            raise KeyboardInterrupt
        done.append(sets)
        return original(self, sets)

    monkeypatch.setattr(LossMeter, "losses", losses)
    stopped = invoke(*command)
    assert stopped.exit_code == 130
    assert "run the same command again to go on" in " ".join(stopped.stderr.split())
    assert names(place) == ["heads.json.part", "novel.txt"]
    monkeypatch.setattr(LossMeter, "losses", original)
    (place / "novel.txt").write_text(TEXT + "and more of it")
    assert "another calibration: text was" in refused(*command)
    (place / "novel.txt").write_text(TEXT)
    assert "another calibration: recent was 6 and is 7 now" in refused(*command[:-1], 7)
    assert invoke(*command).exit_code == 0
    assert names(place) == ["heads.json", "novel.txt"]


def test_probabilities_that_are_no_numbers_are_refused(place, monkeypatch):
    """As in float16, where a model may overflow."""
    honest = head_losses.read

    def read(*given):
        logits, heads = honest(*given)
        return [rows * float("nan") for rows in logits], heads

    monkeypatch.setattr(head_losses, "read", read)
    assert "next-token probabilities are no numbers" in refused("--text", "novel.txt", "-o", "heads.json", *QUICK)
    assert "heads.json" not in names(place)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-o", ""), "--output is empty"),
        (("-o", "-"), "not to standard output"),
        (("-o", "."), "is a folder"),
        (("-o", "novel.txt"), "exists. Give another --output, or --overwrite"),
        (("-o", "none/heads.json"), "There is no folder"),
        (("-o", "h.json", "--text", "nothing.txt"), "cannot be read"),
        (("-o", "h.json", "--text", "/dev/zero"), "is a device"),
        (("-o", "h.json", "--context", "0"), "too short"),
        (("-o", "h.json", "--context", "x"), "not a whole number"),
        (("-o", "h.json", "--context", "300"), "have no room for 16 facts"),
        (("-o", "h.json", "--sparsity", "0.5"), "belongs to --from-duo"),
        (("-o", "h.json", "--from-duo", "novel.txt", "--text", "novel.txt"), "--text has no use"),
        (("-o", "h.json", "--from-duo", "none"), "cannot be read"),
        (("-o", "h.json", "--from-duo", "novel.txt"), "Line 1"),
        (("-o", "h.json", "--dtype", "bf16"), "bfloat16"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_writes_nothing(place, arguments, said):
    assert said in refused(*arguments)
    assert names(place) == ["novel.txt"]


def test_learned_positions_are_a_limit(place):
    assert "has learned only 32" in refused("-o", "h.json", "--text", "novel.txt", *QUICK, family="gpt2")
    assert names(place) == ["novel.txt"]


def test_a_pattern_needs_a_model(place):
    (place / "full_attention_heads.tsv").write_text("0.5\t1\n0\t0.25\n")
    assert "needs the MODEL" in refused("-o", "h.json", "--from-duo", ".", family=None)
    result = invoke("-o", "h.json", "--from-duo", ".")
    assert result.exit_code == 0, result.output
    assert Profile.load("h.json").heads == ((0.5, 1.0), (0.0, 0.25))
    assert "need nothing but 320 first and newest tokens" in " ".join(result.stdout.split())
    assert "exists" in refused("-o", "h.json", "--from-duo", ".")
    assert invoke("-o", "h.json", "--from-duo", ".", "--sparsity", "0.5", "--overwrite").exit_code == 0
    assert Profile.load("h.json").heads == ((1.0, 1.0), (0.0, 0.0))


def test_layers_without_keys_are_left_out(place):
    result = invoke("--text", "novel.txt", "-o", "heads.json", *QUICK, family="lfm2")
    assert result.exit_code == 0, result.output
    assert len(Profile.load("heads.json").heads) == 1


def test_many_heads_are_shown_in_tenths(place):
    (place / "wide.tsv").write_text("\t".join(["0.04", *["0.5"] * 15]) + "\n")
    from rich.console import Console

    from kvkeep.cli import calibrate_run

    profile = Profile(model={"layers": 1, "kv_heads": 16}, heads=((0.0, *[0.5] * 14, 1.0),), least=5)
    screen = Console(width=80)
    with screen.capture() as shown:
        screen.print(calibrate_run._needs(profile))
    assert "– " + "5 " * 14 + "10" in shown.get()
