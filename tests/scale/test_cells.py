"""``kvkeep eval --ray-workers`` on a cluster that dies as a die decides: the rows are those of one process."""

import itertools
import json
import random
import signal
from collections import Counter
from dataclasses import replace

import model_folders
import pytest
import torch
from raycells import CELLS, Real, invoke, rows
from rich.console import Console
from typer.testing import CliRunner

from kvkeep import parse
from kvkeep.cli.main import app
from kvkeep.errors import CapacityError, InputError, pip_install
from kvkeep.evals.forward import PLAIN
from kvkeep.evals.grid import Cell, Planned
from kvkeep.evals.records import Records
from kvkeep.evals.run import CellPiece, CellRunner, PartQueue, PartSource, versions
from kvkeep.evals.task import Options
from kvkeep.evals.tasks import TASKS
from kvkeep.head_profile import Profile
from kvkeep.models import load as loading
from kvkeep.models.tokenization import Writer
from kvkeep.scale import driver
from kvkeep.scale.worker import ModelFacts, ModelWorker

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_the_rows_and_tables_are_those_of_one_process_whoever_dies(seed, on, whole, tmp_path):
    cluster = on(Real(seed, deaths=seed % 4))
    found = invoke(tmp_path, "--ray-workers", 1 + seed % 3)
    assert found.exit_code == 0, found.output
    assert [list(row) for row in rows(tmp_path)] == [list(row) for row in rows(whole[0])]
    assert rows(tmp_path) == rows(whole[0])
    assert (tmp_path / "run.json").read_text() == (whole[0] / "run.json").read_text()
    assert found.stdout == whole[1]
    assert {path.name for path in tmp_path.iterdir()} == {"results.jsonl", "run.json"}
    assert found.stderr.count("died and is replaced") == seed % 4
    assert cluster.most == 1  # nobody holds a cell that another one could run
    assert not any(actor.alive for actor in cluster.actors)


@pytest.mark.long
def test_json_has_the_rows_and_the_number_of_workers(on, whole, tmp_path):
    on(Real(1))
    found = json.loads(invoke(tmp_path, "--ray-workers", 2, "--json").stdout)
    assert found["workers"] == 2
    assert [row["policy"] for row in found["rows"]] == [row["policy"] for row in rows(whole[0])]


@pytest.mark.slow
@pytest.mark.parametrize("ray", [pytest.param((), marks=pytest.mark.slow), ("--ray-workers", 3)])
def test_a_command_that_was_stopped_anywhere_goes_on(ray, on, whole, tmp_path, monkeypatch):
    append = Records.append
    for at, left in enumerate((1, 2)):

        def stop(self, row, count=itertools.count(), left=left):  # noqa: B008  one for each round
            if (at := next(count)) == left and left % 2:
                raise KeyboardInterrupt
            append(self, row)
            if at == left:
                signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(Records, "append", stop)
            on(Real(at))
            found = invoke(tmp_path, "--ray-workers", 2)
        assert found.exit_code == 130
        assert "run the same command again to go on" in found.stderr
    before = rows(tmp_path)
    assert 3 <= len(before) < CELLS
    cluster = on(Real(9))
    assert invoke(tmp_path, *ray).exit_code == 0
    assert sum(cluster.ran.values()) == (CELLS - len(before) if ray else 0)
    assert rows(tmp_path) == rows(whole[0])


@pytest.mark.slow
def test_rows_that_were_there_are_kept_and_counted(on, tmp_path):
    assert invoke(tmp_path, "--shard", "2/3").exit_code == 0
    before = rows(tmp_path)
    cluster = on(Real(3))
    found = invoke(tmp_path, "--ray-workers", 2)
    assert found.exit_code == 0
    assert sum(cluster.ran.values()) == CELLS - len(before)
    assert all(row in rows(tmp_path) for row in before)
    again = invoke(tmp_path, "--ray-workers", 2)
    assert "1 worker for 0 cells that are not done" in again.stderr
    assert again.stdout == found.stdout
    assert len(rows(tmp_path)) == CELLS


@pytest.mark.long
def test_names_of_files_are_those_that_the_user_gave(on, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model_folders.folder())
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog and the cat. " * 10)
    shape = loading.find("model").config
    heads = ((0.5,) * shape.num_key_value_heads,) * shape.num_hidden_layers
    model = {"layers": shape.num_hidden_layers, "kv_heads": shape.num_key_value_heads}
    Profile(model=model, heads=heads, least=5).save(tmp_path / "heads.json")
    one = {
        "premise": "The dog ran",
        "choice1": "it saw a cat.",
        "choice2": "it slept.",
        "question": "cause",
        "label": 0,
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "copa.jsonl").write_text("".join(json.dumps({**one, "idx": n}) + "\n" for n in range(3)))
    words = (
        "--head-budget",
        "profile:heads.json",
        "--text",
        "text.txt",
        "--data",
        "data",
        "--shots",
        0,
        "--policies",
        "full,h2o",
    )
    for folder, ray in (("one", ()), ("far", ("--ray-workers", 2))):
        on(Real(4))
        found = invoke(folder, *words, *ray, tasks=("--tasks", "perplexity,choice", "--parts", "copa"), model="model")
        assert found.exit_code == 0, found.output
    assert rows(tmp_path / "far") == rows(tmp_path / "one")
    assert {row["options"]["head_budget"] for row in rows(tmp_path / "far")} == {None, "profile:heads.json"}
    assert {row["task"] for row in rows(tmp_path / "far")} == {"perplexity", "choice"}
    assert {row["model"] for row in rows(tmp_path / "far")} == {"model"}


@pytest.mark.long
def test_a_file_that_a_policy_names_is_found_from_another_folder(on, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = loading.find(model_folders.folder()).config
    figures = dict.fromkeys(("q_mean_real", "q_mean_imag", "q_abs_mean"), torch.ones(shape.head_dim // 2))
    places = itertools.product(range(shape.num_hidden_layers), range(shape.num_attention_heads))
    torch.save({"stats": {f"layer{i:02}_head{j:02}": figures for i, j in places}}, "queries.pt")
    words = ("--policies", "full,triattention:calibration=queries.pt", "--budgets", 24)
    for folder, ray in (("one", ()), ("far", ("--ray-workers", 2))):
        on(Real(4))
        found = invoke(folder, *words, *ray, tasks=("--tasks", "perplexity"))
        assert found.exit_code == 0, found.output
    assert rows(tmp_path / "far") == rows(tmp_path / "one")
    assert {row["policy"] for row in rows(tmp_path / "far")} == {"full", "triattention:calibration=queries.pt"}

    # no policy's string can hold this folder's name, so it is refused before any worker starts
    (tmp_path / "a,b").mkdir()
    (tmp_path / "queries.pt").rename(tmp_path / "a,b" / "queries.pt")
    monkeypatch.chdir(tmp_path / "a,b")
    cluster = on(Real(4))
    found = invoke(tmp_path / "no", *words, "--ray-workers", 2, tasks=("--tasks", "perplexity"))
    assert (found.exit_code, cluster.actors) == (2, [])
    assert "has no comma" in " ".join(found.stderr.split())


def test_a_share_without_a_cell_is_no_error(on, tmp_path):
    on(Real(0))
    here = invoke(tmp_path / "here", "--shard", "30/40")
    there = invoke(tmp_path / "there", "--shard", "30/40", "--ray-workers", 2)
    assert (there.exit_code, there.stdout) == (here.exit_code, here.stdout) == (0, "")


def test_a_shard_runs_on_workers_as_well(on, whole, tmp_path):
    on(Real(4))
    assert invoke(tmp_path, "--ray-workers", 2, "--shard", "2/4").exit_code == 0
    assert rows(tmp_path) == rows(whole[0])[1::4]


@pytest.mark.slow
def test_a_cell_that_kills_its_workers_fails_and_no_other(on, whole, tmp_path):
    on(Real(2, deadly={7}))
    found = invoke(tmp_path, "--ray-workers", 2)
    assert found.exit_code == 2
    lost = rows(whole[0])[6]
    assert f"1 cell of {CELLS} has no row, first {lost['task']} {lost['case']}: {lost['policy']}" in found.said
    assert "its worker died 4 times" in found.said
    assert rows(tmp_path) == [row for row in rows(whole[0]) if row != lost]
    on(Real(2))
    assert invoke(tmp_path, "--ray-workers", 2).exit_code == 0
    assert sorted(map(json.dumps, rows(tmp_path))) == sorted(map(json.dumps, rows(whole[0])))


def test_what_one_process_refuses_ends_the_run_on_workers_too(on, tmp_path, monkeypatch):
    def run(self, writer, case, policy, budgets, *, setup=PLAIN):
        raise CapacityError("There is no room.")

    monkeypatch.setattr(TASKS["agreement"], "run", run)
    cluster = on(Real(0))
    found = invoke(tmp_path, "--ray-workers", 2)
    assert found.exit_code == 2
    assert "On " in found.said
    assert "There is no room." in found.said
    assert sum(cluster.ran.values()) < CELLS
    assert {row["task"] for row in rows(tmp_path)} <= {"perplexity"}


def test_a_model_that_a_worker_cannot_load_is_said(on, tmp_path, monkeypatch):
    def read_weights(*arguments, **options):
        raise InputError("There are no weights here.")

    monkeypatch.setattr(driver, "read_weights", read_weights)
    on(Real(0))
    found = invoke(tmp_path / "out", "--ray-workers", 2)
    assert (found.exit_code, found.stderr.splitlines()[-1]) == (2, "error: There are no weights here.")
    assert not (tmp_path / "out").exists()


def test_weights_of_another_run_are_refused_before_a_cell_runs(on, tmp_path):
    on(Real(0))
    assert invoke(tmp_path, "--ray-workers", 2, "--shard", "1/20").exit_code == 0
    model_folders.edit_json(tmp_path / "run.json", weights="other")
    cluster = on(Real(0))
    found = invoke(tmp_path, "--ray-workers", 2)
    assert found.exit_code == 2
    assert "the model's weights was other" in found.said
    assert not cluster.ran


def test_workers_in_two_dtypes_are_not_mixed(on, tmp_path, monkeypatch):
    made = itertools.count()

    class Half(Real):
        def answered(self, call):
            answer = super().answered(call)
            return answer if next(made) < 3 else type(answer)(answer.number, whole={**answer.whole, "dtype": "float16"})

    on(Half(0))
    found = invoke(tmp_path, "--ray-workers", 2)
    assert found.exit_code == 2
    assert "A worker computes in float16, others in float32" in found.said
    assert {row["dtype"] for row in rows(tmp_path)} == {"float32"}


@pytest.mark.long
def test_a_bar_counts_the_cells_of_all_workers(on, tmp_path, monkeypatch):
    screen = Console(stderr=True, force_terminal=True, width=120)
    monkeypatch.setattr("kvkeep.cli.console.err", lambda: screen)
    on(Real(6))
    stderr = invoke(tmp_path, "--ray-workers", 2, tasks=("--tasks", "perplexity")).stderr
    assert [f"{n}/5" in stderr for n in range(7)] == [True] * 6 + [False]


@pytest.mark.usefixtures("no_ray")
def test_without_ray_the_error_names_the_extra(tmp_path):
    found = invoke(tmp_path / "out", "--ray-workers", 2)
    assert (found.exit_code, found.stdout) == (2, "")
    assert f"Ray is not installed: {pip_install('ray')}." in found.said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ray-workers", 0), "--ray-workers 0 is out of range"),
        (("--ray-workers", 10**6), "is out of range"),
        (("--ray-address", "auto"), "give --ray-workers N"),
        (("--ray-workers", 1, "--ray-address", " "), "--ray-address is empty"),
        (("--ray-workers", 1, "--dry-run"), "--ray-workers runs cells"),
        (("--ray-workers", 1, "--merge", "a,b"), "--ray-workers runs cells"),
        (("--ray-workers", 1, "--leaderboard", "a"), "--ray-workers runs cells"),
    ],
)
def test_options_that_go_with_no_workers(words, said, tmp_path):
    found = invoke(tmp_path / "out", *words)
    assert found.exit_code == 2
    assert said in found.said
    assert not (tmp_path / "out").exists()


def test_report_runs_no_cells(tmp_path):
    found = CliRunner().invoke(app, ["eval", "--report", str(tmp_path), "--ray-workers", "1"])
    assert found.exit_code == 2
    assert "--ray-workers runs cells" in " ".join(found.output.split())


# a worker


def bench(**changes):
    checkpoint = loading.find(model_folders.folder())
    writer = Writer(checkpoint, loading.read_weights(checkpoint))
    options = Options(limit=2, window=40)
    task = TASKS["perplexity"].load(checkpoint, options)
    source = PartSource(TASKS["perplexity"], options, {**task.settings(), **changes})
    (case, lengths), *_ = task.cases().items()
    cell = Cell("perplexity", case, "local", "12", 0)
    planned = Planned(cell, parse("local"), PLAIN, (12, 12), tuple(lengths))
    return CellRunner(writer, "m", [source]), CellPiece(0, planned)


def test_a_worker_says_who_it_is_and_why_it_cannot_begin():
    made, piece = bench()
    facts = ModelWorker(lambda: made).begin(None)
    assert isinstance(facts, ModelFacts)
    assert (facts.about, facts.layout) == (made.about(), (False, False))
    assert (facts.weights, facts.about["dtype"]) == (facts.about["weights"], "float32")
    assert made.run(piece).items() >= {"model": "m", "policy": "local", **versions()}.items()

    def fail():
        raise InputError("There is no such model.")

    assert ModelWorker(fail).begin(None) == "There is no such model."


def test_a_worker_with_other_data_runs_nothing():
    made, piece = bench(text="another")
    with pytest.raises(InputError, match=r"The data of perplexity are not those of the command: .*'another'"):
        made.run(piece)
    made, piece = bench()
    for wrong in ((40,), (40, 39), ()):
        with pytest.raises(InputError, match="rows of another number or length"):
            made.run(CellPiece(0, replace(piece.planned, lengths=wrong)))


def test_a_worker_prepares_a_part_once_and_holds_one(monkeypatch):
    made, piece = bench()
    prepared = []
    monkeypatch.setattr(TASKS["perplexity"], "prepare", lambda self, writer: prepared.append(made._task))
    made._sources = [*made._sources, *made._sources]
    for part in (0, 0, 1, 1, 0):
        made.run(CellPiece(part, piece.planned))
    assert prepared == [None, None, None]  # the data of the part before are gone by then


# the cells that wait


@pytest.mark.parametrize("seed", range(30))
def test_each_cell_is_handed_out_once_and_parts_stay_together(seed):
    draw = random.Random(seed)
    sizes = [draw.randrange(6) for _ in range(draw.randrange(1, 9))]
    numbers = itertools.count(1)
    parts = [[next(numbers) for _ in range(size)] for size in sizes]
    part_of = {number: at for at, part in enumerate(parts) for number in part}
    queue, workers = PartQueue(parts), draw.randrange(1, 5)
    got, prepared, last = [], Counter(), {}
    while (number := queue.take(worker := draw.randrange(workers))) is not None:
        got.append(number)
        prepared[part_of[number]] += last.get(worker) != part_of[number]
        last[worker] = part_of[number]
    assert sorted(got) == sorted(part_of)
    assert all(queue.take(worker) is None for worker in range(workers))
    if workers == 1:
        assert got == sorted(part_of)
        assert set(prepared.values()) <= {1}
    assert all(times <= workers for times in prepared.values())


def test_workers_begin_with_parts_of_their_own_and_help_the_longest_at_the_end():
    queue = PartQueue([[1, 2], [3, 4, 5, 6], [7, 8, 9]])
    assert [queue.take(worker) for worker in (1, 2, 3)] == [1, 3, 7]
    assert [queue.take(1), queue.take(1)] == [2, 4]  # three are left of the second part, and two of the third
    assert [queue.take(4), queue.take(2), queue.take(3), queue.take(3)] == [8, 5, 9, 6]
    assert queue.take(1) is None


def test_a_worker_stays_with_the_part_that_it_helps():
    queue = PartQueue([range(1, 7), range(7, 13)])
    assert [queue.take(worker) for worker in (1, 2, 3, 3, 3)] == [1, 7, 2, 3, 4]
