"""Hostile folders, disks, workers and users of ``kvkeep eval --ray-workers``; see `test_cells`."""

import contextlib
import errno
import json
import shutil
import signal

import pytest
from raycells import CELLS, Real, invoke, rows

from kvkeep import result_files
from kvkeep.cli import eval_run
from kvkeep.errors import CapacityError, InputError
from kvkeep.evals.forward import PLAIN
from kvkeep.evals.records import Records
from kvkeep.evals.tasks import TASKS
from kvkeep.result_files import Lock
from kvkeep.scale import driver, worker_pool
from kvkeep.scale.driver import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

RAY = ("--ray-workers", 2)


def ended(cluster):
    assert not any(actor.alive for actor in cluster.actors)


def test_a_full_disk_keeps_the_rows_before_it_and_the_same_command_goes_on(on, whole, tmp_path, monkeypatch):
    left, sync = [3], result_files.sync

    def full(file):
        if str(file.name).endswith(".jsonl"):
            left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    cluster = on(Real(1))
    with monkeypatch.context() as patch:
        patch.setattr(result_files, "sync", full)
        found = invoke(tmp_path, *RAY)
    assert (found.exit_code, found.stdout) == (2, "")
    assert "No space left on device. The 3 rows written before are safe." in found.said
    ended(cluster)
    assert 3 <= len(rows(tmp_path)) <= 4
    on(Real(2))
    assert invoke(tmp_path, *RAY).exit_code == 0
    assert rows(tmp_path) == rows(whole[0])


def test_a_disk_that_is_full_at_the_end_leaves_all_rows_in_the_order_of_their_ends(on, whole, tmp_path, monkeypatch):
    def full(self, rows):
        raise OSError(errno.ENOSPC, "No space left on device")

    cluster = on(Real(3))
    with monkeypatch.context() as patch:
        patch.setattr(result_files.RowFile, "replace", full)
        found = invoke(tmp_path, "--ray-workers", 3)
    assert found.exit_code == 2
    assert f"The {CELLS} rows written before are safe" in found.said
    ended(cluster)
    assert sorted(map(json.dumps, rows(tmp_path))) == sorted(map(json.dumps, rows(whole[0])))
    cluster = on(Real(3))
    found = invoke(tmp_path, *RAY)
    assert (found.exit_code, found.stdout) == (0, whole[1])
    assert rows(tmp_path) == rows(whole[0])
    assert not cluster.ran


def test_a_folder_that_another_run_has_is_refused_before_workers_begin(on, tmp_path):
    cluster = on(Real(0))
    with Lock(tmp_path, str(tmp_path)):
        found = invoke(tmp_path, *RAY)
    assert found.exit_code == 2
    assert not cluster.actors
    assert not list(tmp_path.iterdir())


def test_a_run_that_takes_the_folder_while_workers_begin_is_not_disturbed(on, whole, tmp_path, monkeypatch):
    begin = worker_pool.WorkerPool.begin
    with contextlib.ExitStack() as stack:

        def late(self, stopped):
            begin(self, stopped)
            stack.enter_context(Lock(tmp_path, str(tmp_path)))

        monkeypatch.setattr(worker_pool.WorkerPool, "begin", late)
        cluster = on(Real(0))
        found = invoke(tmp_path, *RAY)
    assert found.exit_code == 2
    assert "another" in found.said
    ended(cluster)
    assert not cluster.ran


def test_rows_of_a_run_that_ended_while_workers_began_are_not_made_again(on, whole, tmp_path, monkeypatch):
    begin = worker_pool.WorkerPool.begin

    def late(self, stopped):
        begin(self, stopped)
        monkeypatch.setattr(worker_pool.WorkerPool, "begin", begin)
        shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)

    monkeypatch.setattr(worker_pool.WorkerPool, "begin", late)
    cluster = on(Real(0))
    found = invoke(tmp_path, *RAY)
    assert (found.exit_code, found.stdout) == (0, whole[1])
    assert not cluster.ran
    assert rows(tmp_path) == rows(whole[0])


def test_a_folder_that_is_removed_meanwhile_is_an_error_in_one_line(on, tmp_path, monkeypatch):
    append, folder = Records.append, tmp_path / "out"

    def gone(self, row):
        append(self, row)
        shutil.rmtree(folder, ignore_errors=True)

    monkeypatch.setattr(Records, "append", gone)
    cluster = on(Real(0))
    found = invoke(folder, *RAY)
    assert found.exit_code == 2
    assert "Results cannot be written" in found.said
    assert "rows written before are safe" not in found.said
    ended(cluster)


@pytest.mark.parametrize("key", ["dtype", "model"])
def test_a_folder_of_another_dtype_or_model_is_refused_and_left_alone(on, tmp_path, key):
    from model_folders import edit_json

    on(Real(0))
    assert invoke(tmp_path, *RAY, "--shard", "1/20").exit_code == 0
    edit_json(tmp_path / "run.json", **{key: "bfloat16"})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    cluster = on(Real(0))
    found = invoke(tmp_path, *RAY)
    assert found.exit_code == 2
    assert "bfloat16" in found.said
    assert not cluster.ran
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_answers_beside_a_refusal_are_written(on, whole, tmp_path, monkeypatch):
    run = TASKS["agreement"].run

    def some(self, writer, case, policy, budgets, *, setup=PLAIN):
        if type(policy).__name__ == "Local":
            raise CapacityError("There is no room.")
        return run(self, writer, case, policy, budgets, setup=setup)

    taken, take = [], Outcome.take
    monkeypatch.setattr(Outcome, "take", lambda self, answer, write: (taken.append(answer), take(self, answer, write)))
    monkeypatch.setattr(TASKS["agreement"], "run", some)
    for seed in range(4):
        taken.clear()
        cluster, folder = on(Real(seed)), tmp_path / str(seed)
        found = invoke(folder, "--ray-workers", 4, "--json")
        assert (found.exit_code, found.stdout) == (2, "")
        assert "There is no room." in found.said
        ended(cluster)
        good = sum(answer.whole is not None for answer in taken)
        assert good < len(taken)
        assert len(rows(folder)) == good
        places = [rows(whole[0]).index(row) for row in rows(folder)]
        assert places == sorted(places)


# what fails


@pytest.mark.parametrize("error", [InputError("The file is gone."), ValueError("a defect"), OSError(5, "I/O error")])
def test_a_task_that_cannot_be_prepared_is_an_error_that_says_why(on, tmp_path, monkeypatch, error):
    def prepare(self, writer):
        raise error

    monkeypatch.setattr(TASKS["agreement"], "prepare", prepare)
    monkeypatch.setattr(worker_pool, "DEATHS", 3)
    cluster = on(Broken(1))
    found = invoke(tmp_path, *RAY)
    assert (found.exit_code, found.stdout) == (2, "")
    assert str(error) in found.stderr.split("error: ")[-1].replace("\n", " ")
    ended(cluster)
    assert {row["task"] for row in rows(tmp_path)} <= {"perplexity"}


class Broken(Real):
    """Workers whose defects travel as Ray's errors do."""

    def answered(self, call):
        try:
            return super().answered(call)
        except Exception as error:
            return Failed(error)

    def get(self, call, timeout=None):
        found = super().get(call, timeout)
        if isinstance(found, Failed):
            raise RuntimeError(f"ray::ModelWorker.run()\n  File x\n{type(found.error).__name__}: {found.error}")
        return found


class Failed:
    def __init__(self, error):
        self.error = error


# the user


@pytest.mark.parametrize("phase", ["joined", "room_for", "begin first", "begin", "run", "arrange"])
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_ctrl_c_in_any_phase_ends_with_130_and_loses_nothing(on, whole, tmp_path, monkeypatch, phase, words):
    cluster, pressed = Real(5), []

    def press():
        if not pressed:
            pressed.append(phase)
            signal.raise_signal(signal.SIGINT)

    def before(holder, name):
        known = getattr(holder, name)

        def pressing(*arguments, **options):
            press()
            return known(*arguments, **options)

        monkeypatch.setattr(holder, name, pressing)

    on(cluster)
    if phase in ("joined", "room_for"):
        before(driver if phase == "joined" else eval_run, phase)
    elif phase == "begin first":
        before(cluster, "begun")
    elif phase == "begin":
        begun = cluster.begun
        monkeypatch.setattr(cluster, "begun", lambda call: (len(cluster.actors) > 1 and press(), begun(call))[1])
    elif phase == "run":
        before(cluster, "answered")
    else:
        before(Records, "arrange")
    found = invoke(tmp_path, *RAY, *words)
    assert pressed
    assert (found.exit_code, found.stdout) == (130, "")
    assert "run the same command again to go on" in found.said
    ended(cluster)
    on(Real(6))
    assert invoke(tmp_path, *RAY).exit_code == 0
    assert rows(tmp_path) == rows(whole[0])


def test_ctrl_c_after_a_cell_has_failed_does_not_say_that_all_others_are_written(on, tmp_path, monkeypatch):
    append = Records.append

    def stop(self, row):
        append(self, row)
        signal.raise_signal(signal.SIGINT)

    take = Outcome.take

    def failing(self, answer, write):
        self.failed[1] = "its worker died 4 times"
        return take(self, answer, write)

    monkeypatch.setattr(Records, "append", stop)
    monkeypatch.setattr(Outcome, "take", failing)
    on(Real(7))
    found = invoke(tmp_path, *RAY)
    assert len(rows(tmp_path)) < CELLS - 1
    assert "All other rows are written" not in found.said
    assert (found.exit_code, found.stdout) == (130, "")


@pytest.mark.parametrize(("cells", "workers"), [(1, 1), (1, 7), (3, 7), (0, 7)])
def test_there_are_no_more_workers_than_cells(on, whole, tmp_path, cells, workers):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "results.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[: CELLS - cells]))
    cluster = on(Real(0))
    found = invoke(tmp_path, "--ray-workers", workers, "--json")
    assert found.exit_code == 0
    assert len(cluster.actors) == json.loads(found.stdout)["workers"] == max(1, min(cells, workers))
    assert sum(cluster.ran.values()) == cells
    assert rows(tmp_path) == rows(whole[0])
