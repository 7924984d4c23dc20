"""Hostile folders, disks, workers and users of ``kvkeep analyze --ray-workers``; see `test_analysis`."""

import errno
import json
import random
import shutil
import signal

import pytest
from rayanalyses import NAMES, ended, invoke, made, records, same
from raycells import Real

from kvkeep import result_files
from kvkeep.errors import InputError
from kvkeep.result_files import Lock
from kvkeep.scale import driver, worker_pool
from kvkeep.scale.driver import Outcome
from kvkeep_lab.analysis.groups.removal import Removal
from kvkeep_lab.analysis.report import AnalysisFolder
from kvkeep_lab.cli.analyze import analysis

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "no_pictures")]

RAY = ("--ray-workers", 2)


@pytest.mark.parametrize("seed", range(8))
def test_an_analysis_that_is_stopped_again_and_again_by_chance_ends_as_one_process_does(
    seed, on, text, analysed, tmp_path, monkeypatch
):
    draw, write, rounds = random.Random(seed), AnalysisFolder.write, 0
    while rounds < 12:
        rounds += 1
        at, how = draw.randrange(1, 9), draw.choice(("signal", "twice", "before", "disk"))
        seen = [0]

        def stop(self, name, value, at=at, how=how, seen=seen):
            seen[0] += 1
            if seen[0] == at and how == "before":
                raise KeyboardInterrupt
            if seen[0] == at and how == "disk":
                with self.writing():
                    raise OSError(errno.ENOSPC, "No space left on device")
            found = write(self, name, value)
            if seen[0] == at:
                for _ in range({"signal": 1, "twice": 2}.get(how, 0)):
                    signal.raise_signal(signal.SIGINT)
            return found

        before = {kind.name for kind in made(tmp_path)}
        cluster = on(Real(draw.random(), deaths=draw.randrange(4)))
        ray = () if draw.random() < 0.2 else ("--ray-workers", draw.randint(1, 4))
        with monkeypatch.context() as patch:
            patch.setattr(AnalysisFolder, "write", stop)
            found = invoke(text, tmp_path, *ray)
        ended(cluster)
        assert found.exit_code in (0, 2, 130)
        assert (found.exit_code == 0) or not found.stdout
        assert "Traceback" not in found.output
        assert {kind.name for kind in made(tmp_path)} >= before
        if found.exit_code == 0:
            break
    on(Real(seed))
    assert invoke(text, tmp_path, *RAY).exit_code == 0
    same(tmp_path, analysed)


def test_a_full_disk_keeps_what_is_written_and_the_same_command_goes_on(on, text, analysed, tmp_path, monkeypatch):
    sync, calls = result_files.sync, []

    def full(file):
        calls.append(file)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    cluster = on(Real(1))
    with monkeypatch.context() as patch:
        patch.setattr(result_files, "sync", full)
        found = invoke(text, tmp_path, *RAY)
    assert (found.exit_code, found.stdout) == (2, "")
    assert "No space left on device. Finished measurements are safe." in found.said
    ended(cluster)
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", *(f"{kind.name}.json" for kind in made(tmp_path))}
    assert len(made(tmp_path)) == 2
    on(Real(2))
    assert invoke(text, tmp_path, *RAY).exit_code == 0
    same(tmp_path, analysed)


@pytest.mark.parametrize("phase", ["joined", "room_for", "begin first", "begin", "run", "take"])
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_ctrl_c_in_any_phase_ends_with_130_and_loses_nothing(on, text, analysed, tmp_path, monkeypatch, phase, words):
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
        before(driver if phase == "joined" else analysis, phase)
    elif phase == "begin first":
        before(cluster, "begun")
    elif phase == "begin":
        begun = cluster.begun
        monkeypatch.setattr(cluster, "begun", lambda call: (len(cluster.actors) > 1 and press(), begun(call))[1])
    elif phase == "run":
        before(cluster, "answered")
    else:
        before(Outcome, "take")
    found = invoke(text, tmp_path, *RAY, *words)
    assert pressed
    assert (found.exit_code, found.stdout) == (130, "")
    assert "run the same command again to go on" in found.said
    ended(cluster)
    on(Real(6))
    assert invoke(text, tmp_path, *RAY).exit_code == 0
    same(tmp_path, analysed)


def test_ctrl_c_after_measurements_have_failed_does_not_say_that_all_others_are_written(
    on, text, tmp_path, monkeypatch
):
    take = Outcome.take

    def failing(self, answer, write):
        self.failed[1] = "its worker died 4 times"
        take(self, answer, write)
        if not shown.pressed:
            shown.pressed = True
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(shown, "pressed", False)
    monkeypatch.setattr(Outcome, "take", failing)
    monkeypatch.setattr(analysis, "counted", shown)
    on(Real(7))
    found = invoke(text, tmp_path, *RAY)
    assert "All other results are written" not in found.said
    assert (found.exit_code, found.stdout) == (130, "")


class shown:  # noqa: N801  stands for a function
    """A bar that is not drawn."""

    pressed = False

    def __init__(self, total):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __call__(self, name, done):
        pass


@pytest.mark.parametrize("content", ["torn", "[]", '{"version": 1, "result": 3}'])
def test_a_file_that_is_damaged_while_workers_begin_is_named(on, text, tmp_path, monkeypatch, content):
    begin = worker_pool.WorkerPool.begin

    def late(self, stopped):
        begin(self, stopped)
        tmp_path.mkdir(exist_ok=True)
        (tmp_path / "run.json").write_text((tmp_path / "run.json").read_text())
        (tmp_path / "sparsity.json").write_text(content)

    on(Real(0))
    assert invoke(text, tmp_path, only=["residual"]).exit_code == 0
    monkeypatch.setattr(worker_pool.WorkerPool, "begin", late)
    cluster = on(Real(0))
    found = invoke(text, tmp_path, *RAY)
    assert (found.exit_code, found.stdout) == (2, "")
    assert "Remove it, and the same command measures it again." in found.said
    assert not cluster.ran
    ended(cluster)
    assert (tmp_path / "sparsity.json").read_text() == content


def test_a_folder_that_is_removed_meanwhile_is_an_error_in_one_line(on, text, tmp_path, monkeypatch):
    write, folder = AnalysisFolder.write, tmp_path / "out"

    def gone(self, name, value):
        found = write(self, name, value)
        if name != "run.json":
            shutil.rmtree(folder, ignore_errors=True)
        return found

    monkeypatch.setattr(AnalysisFolder, "write", gone)
    cluster = on(Real(0))
    found = invoke(text, folder, *RAY)
    assert found.exit_code == 2
    assert "cannot be written" in found.said
    ended(cluster)


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"seed": 4}, {"n_tokens": 7}, {"kind": "kvkeep eval"}])
def test_a_folder_of_another_run_is_refused_and_left_alone(on, text, tmp_path, changes):
    from model_folders import edit_json

    assert invoke(text, tmp_path, only=["sparsity"]).exit_code == 0
    edit_json(tmp_path / "run.json", **changes)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    cluster = on(Real(0))
    found = invoke(text, tmp_path, *RAY)
    assert found.exit_code == 2
    assert "another run" in found.said
    assert not cluster.ran
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_another_run_has_is_refused_before_workers_begin(on, text, tmp_path):
    cluster = on(Real(0))
    with Lock(tmp_path, str(tmp_path)):
        found = invoke(text, tmp_path, *RAY)
    assert found.exit_code == 2
    assert not cluster.actors
    assert not list(tmp_path.iterdir())


def test_results_beside_a_refusal_are_written(on, text, analysed, tmp_path, monkeypatch):
    def refuse(self, subject, progress):
        raise InputError("There is no room.")

    monkeypatch.setattr(Removal, "runs", refuse)
    for seed in range(4):
        folder, cluster = tmp_path / str(seed), on(Real(seed))
        found = invoke(text, folder, "--ray-workers", 4, "--json")
        assert (found.exit_code, found.stdout) == (2, "")
        assert "There is no room." in found.said
        ended(cluster)
        good = {name: record for name, record in records(analysed[0]).items() if (folder / f"{name}.json").exists()}
        assert records(folder) == good
        assert "removal" not in good


@pytest.mark.parametrize(("left", "workers"), [(1, 1), (1, 7), (3, 7), (0, 7)])
def test_there_are_no_more_workers_than_measurements(on, text, analysed, tmp_path, left, workers):
    shutil.copytree(analysed[0], tmp_path, dirs_exist_ok=True)
    for name in NAMES[:left]:
        (tmp_path / f"{name}.json").unlink()
    cluster = on(Real(0))
    found = invoke(text, tmp_path, "--ray-workers", workers, "--json")
    assert found.exit_code == 0
    assert len(cluster.actors) == json.loads(found.stdout)["workers"] == max(1, min(left, workers))
    same(tmp_path, analysed)
