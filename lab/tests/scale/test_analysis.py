"""``kvkeep analyze --ray-workers`` on a cluster that dies as a die decides: the results are those of one process."""

import itertools
import json
import random
import shutil
import signal

import model_folders
import pytest
import torch
from rayanalyses import APART, NAMES, TEXT, TOKENS, WALKED, ended, invoke, made, records, same
from raycells import Real
from rich.console import Console
from typer.testing import CliRunner

from kvkeep.cli.main import app
from kvkeep.errors import InputError, UnsupportedModelError, pip_install
from kvkeep.models import load as loading
from kvkeep.models.tokenization import Writer
from kvkeep.result_files import Lock
from kvkeep.scale import worker_pool
from kvkeep_lab.analysis import run as running
from kvkeep_lab.analysis.groups import MEASUREMENTS
from kvkeep_lab.analysis.groups.removal import Removal
from kvkeep_lab.analysis.groups.sparsity import Sparsity
from kvkeep_lab.analysis.job import find
from kvkeep_lab.analysis.report import AnalysisFolder
from kvkeep_lab.analysis.run import LONG, MeasurementPiece, MeasurementRunner, cut
from kvkeep_lab.cli.analyze import analysis

pytestmark = pytest.mark.usefixtures("one_thread", "no_pictures")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_the_folder_is_that_of_one_process_whoever_dies(seed, on, text, analysed, tmp_path):
    mortal = seed % 2 == 1
    cluster = on(Real(seed, deaths=0 if mortal else seed, life=1 if mortal else 10**6))
    found = invoke(text, tmp_path, "--ray-workers", (1, 1, 3, 2)[seed % 4])
    assert found.exit_code == 0, found.output
    same(tmp_path, analysed, found.stdout)
    assert not mortal or "died and is replaced; 1 of its measurement groups run again" in found.said
    assert cluster.most == 1  # nobody holds a group that another one could make
    ended(cluster)


@pytest.mark.slow
def test_each_result_is_written_once_and_as_it_comes(on, text, tmp_path, monkeypatch):
    write, cluster, seen = AnalysisFolder.write, on(Real(3, deaths=2)), []

    def noted(self, name, value):
        seen.append((name, sum(cluster.ran.values())))
        return write(self, name, value)

    monkeypatch.setattr(AnalysisFolder, "write", noted)
    assert invoke(text, tmp_path, "--ray-workers", 2, only=["sparsity", *APART]).exit_code == 0
    names = [name for name, _ in seen]
    assert len(set(names)) == len(names) == 4 + len(("run.json", "analysis.json"))
    assert names[0] == "run.json"
    assert min(ran for name, ran in seen if name in {f"{one}.json" for one in APART}) < 4


@pytest.mark.slow
def test_json_has_the_results_and_the_number_of_workers(on, text, analysed, tmp_path):
    on(Real(1))
    found = json.loads(invoke(text, tmp_path, "--ray-workers", 2, "--json").stdout)
    assert found.pop("workers") == 2
    assert found.keys() == {"output", "page", "run", "measurements", "claims", "recommendation"}
    assert list(found["measurements"]) == [kind.name for kind in find(NAMES)]


@pytest.mark.slow
@pytest.mark.parametrize("ray", [(), ("--ray-workers", 3)])
def test_a_command_that_was_stopped_anywhere_goes_on(ray, on, text, analysed, tmp_path, monkeypatch):
    write = AnalysisFolder.write
    for at, left in enumerate((1, 3)):

        def stop(self, name, value, count=itertools.count(), left=left):  # noqa: B008  one for each round
            if (number := next(count)) == left and left == 1:
                raise KeyboardInterrupt
            found = write(self, name, value)
            if number == left:
                signal.raise_signal(signal.SIGINT)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(AnalysisFolder, "write", stop)
            cluster = on(Real(at))
            found = invoke(text, tmp_path, "--ray-workers", 2)
        assert found.exit_code == 130
        assert "run the same command again to go on" in found.stderr
        ended(cluster)
    before = {kind.name: (tmp_path / f"{kind.name}.json").read_bytes() for kind in made(tmp_path)}
    assert 3 <= len(before) < len(NAMES)
    on(Real(9))
    assert invoke(text, tmp_path, *ray).exit_code == 0
    same(tmp_path, analysed)
    assert all((tmp_path / f"{name}.json").read_bytes() == content for name, content in before.items())


@pytest.mark.slow
def test_results_that_were_there_are_kept(on, text, analysed, tmp_path):
    assert invoke(text, tmp_path, only=["sparsity", "removal"]).exit_code == 0
    before = (tmp_path / "removal.json").read_bytes()
    cluster = on(Real(3))
    assert invoke(text, tmp_path, "--ray-workers", 2).exit_code == 0
    assert sum(cluster.ran.values()) == len(
        cut([kind for kind in find(NAMES) if kind not in (Sparsity, Removal)], TOKENS, 2)
    )
    assert (tmp_path / "removal.json").read_bytes() == before
    same(tmp_path, analysed)
    cluster = on(Real(3))
    again = invoke(text, tmp_path, "--ray-workers", 2)
    assert "1 worker for 0 measurements that are not done" in again.stderr
    assert (again.exit_code, again.stdout) == (0, analysed[1])
    assert not cluster.ran


@pytest.mark.slow
def test_names_of_files_are_those_that_the_user_gave(on, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model_folders.folder())
    shutil.copy(text, "novel.txt")
    for folder, ray in (("one", ()), ("far", ("--ray-workers", 2))):
        on(Real(4))
        assert invoke("novel.txt", folder, *ray, model="model", only=["sparsity", "removal"]).exit_code == 0
    found = json.loads((tmp_path / "far" / "run.json").read_text())
    assert (found["model"], found["text_name"]) == ("model", "novel.txt")
    assert (tmp_path / "far" / "run.json").read_bytes() == (tmp_path / "one" / "run.json").read_bytes()
    assert records(tmp_path / "far") == records(tmp_path / "one")


def test_a_text_from_standard_input_reaches_the_workers(on, tmp_path):
    on(Real(1))
    words = [
        str(model_folders.folder()),
        "--text",
        "-",
        "-o",
        str(tmp_path),
        "--only",
        "sparsity",
        "--ray-workers",
        "1",
    ]
    found = CliRunner().invoke(app, ["analyze", *words, "--max-tokens", "100", "--json"], input=TEXT)
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["run"]["text_name"] == "standard input"


@pytest.mark.slow
def test_measurements_that_kill_their_workers_fail_and_no_others(on, text, analysed, tmp_path):
    groups = cut(find(NAMES), TOKENS, 2)
    number = next(at for at, group in enumerate(groups, start=1) if group == [Removal])
    cluster = on(Real(2, deadly={number}))
    found = invoke(text, tmp_path, "--ray-workers", 2)
    assert (found.exit_code, found.stdout) == (2, "")
    assert "1 measurement has no result (removal): its worker died 4 times" in found.said
    assert records(tmp_path) == {name: one for name, one in records(analysed[0]).items() if name != "removal"}
    ended(cluster)
    on(Real(2))
    assert invoke(text, tmp_path, "--ray-workers", 2).exit_code == 0
    same(tmp_path, analysed)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UnsupportedModelError("This attention cannot be shown."), "This attention cannot be shown."),
        (MemoryError("no room"), "Out of memory on cpu."),
        (ValueError("a defect"), "ValueError: a defect"),
    ],
)
def test_a_measurement_that_fails_ends_the_run_in_one_line(on, text, tmp_path, monkeypatch, error, said):
    def runs(self, subject, progress):
        raise error

    monkeypatch.setattr(Removal, "runs", runs)
    cluster = on(Real(0))
    found = invoke(text, tmp_path, "--ray-workers", 1, only=["sparsity", "removal", "score_change"])
    assert (found.exit_code, found.stdout) == (2, "")
    last = found.stderr.splitlines()[-1]
    assert last.startswith("error: On ")
    assert said in last
    assert {kind.name for kind in made(tmp_path)} == {"sparsity"}  # the walk is first, removal the longest run
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "sparsity.json"}
    ended(cluster)


def test_a_model_that_cannot_be_analysed_is_refused_before_there_is_a_folder(on, text, tmp_path, monkeypatch):
    def look(model, token):
        raise UnsupportedModelError("Layers differ in their heads.")

    monkeypatch.setattr(running, "look", look)
    cluster = on(Real(0))
    found = invoke(text, tmp_path / "out", "--ray-workers", 2)
    assert (found.exit_code, found.stderr.splitlines()[-1]) == (2, "error: Layers differ in their heads.")
    assert not (tmp_path / "out").exists()
    ended(cluster)


def test_other_weights_versions_and_words_are_refused(on, text, tmp_path, monkeypatch):
    assert invoke(text, tmp_path / "out", only=["sparsity"]).exit_code == 0
    model_folders.edit_json(tmp_path / "out" / "run.json", weights="other")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    cluster = on(Real(0))
    found = invoke(text, tmp_path / "out", "--ray-workers", 2, only=["sparsity", "removal"])
    assert found.exit_code == 2
    assert "the model's weights was other" in found.said
    assert not cluster.ran
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before

    seen = itertools.count()
    monkeypatch.setattr(analysis, "words", lambda checkpoint, tokens: (str(next(seen)),))
    on(Real(0))
    found = invoke(text, tmp_path / "new", "--ray-workers", 2)
    assert found.exit_code == 2
    assert "another tokenizer under the model's name" in found.said
    assert not (tmp_path / "new").exists()


def test_workers_with_different_weights_or_dtypes_are_not_mixed(on, text, tmp_path, monkeypatch):
    about, number = MeasurementRunner.about, itertools.count()
    for key, said in (("weights", "different weights under one name"), ("dtype", "Give --dtype")):

        def differs(self, key=key):
            return {**about(self), key: str(next(number))}

        monkeypatch.setattr(MeasurementRunner, "about", differs)
        cluster = on(Real(0))
        found = invoke(text, tmp_path / key, "--ray-workers", 2, only=["sparsity", "removal"])
        assert found.exit_code == 2
        assert said in found.said
        assert not (tmp_path / key / "sparsity.json").exists()
        ended(cluster)


def test_a_run_that_takes_the_folder_while_workers_begin_is_not_disturbed(on, text, tmp_path, monkeypatch):
    begin, locks = worker_pool.WorkerPool.begin, []

    def late(self, stopped):
        begin(self, stopped)
        locks.append(Lock(tmp_path, str(tmp_path)))

    monkeypatch.setattr(worker_pool.WorkerPool, "begin", late)
    cluster = on(Real(0))
    found = invoke(text, tmp_path, "--ray-workers", 2)
    locks[0].release()
    assert found.exit_code == 2
    assert "another" in found.said.lower()
    assert not cluster.ran
    assert not list(tmp_path.iterdir())
    ended(cluster)


def test_results_of_a_run_that_ended_while_workers_began_are_not_made_again(on, text, analysed, tmp_path, monkeypatch):
    begin = worker_pool.WorkerPool.begin

    def late(self, stopped):
        begin(self, stopped)
        shutil.copytree(analysed[0], tmp_path, dirs_exist_ok=True)

    monkeypatch.setattr(worker_pool.WorkerPool, "begin", late)
    cluster = on(Real(0))
    found = invoke(text, tmp_path, "--ray-workers", 2)
    assert found.exit_code == 0
    assert not cluster.ran
    same(tmp_path, analysed, found.stdout)


@pytest.mark.slow
def test_a_bar_counts_the_measurements_of_all_workers(on, text, tmp_path, monkeypatch):
    screen = Console(stderr=True, force_terminal=True, width=120)
    monkeypatch.setattr("kvkeep.cli.console.err", lambda: screen)
    on(Real(6))
    stderr = invoke(text, tmp_path, "--ray-workers", 2, only=["sparsity", "residual", "score_change"]).stderr
    assert [f"{n}/3" in stderr for n in range(5)] == [True] * 4 + [False]


@pytest.mark.usefixtures("no_ray")
def test_without_ray_the_error_names_the_extra(text, tmp_path):
    found = invoke(text, tmp_path / "out", "--ray-workers", 2)
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
    ],
)
def test_options_that_go_with_no_workers(words, said, text, tmp_path):
    found = invoke(text, tmp_path / "out", *words)
    assert found.exit_code == 2
    assert said in found.said
    assert not (tmp_path / "out").exists()


# what workers are given


@pytest.mark.parametrize("seed", range(20))
def test_each_measurement_is_in_one_group_and_no_walk_is_repeated_without_need(seed):
    draw = random.Random(seed)
    kinds, workers = draw.sample(MEASUREMENTS, draw.randint(0, len(MEASUREMENTS))), draw.randint(1, 20)
    groups = cut(kinds, draw.choice((100, LONG)), workers)
    names = [kind.name for group in groups for kind in group]
    assert sorted(names) == sorted(kind.name for kind in kinds)
    assert all(groups)
    walks = [group for group in groups if any(kind.reads & {"attention", "mlp"} for kind in group)]
    assert groups[: len(walks)] == walks
    runs = [group[0].effort for group in groups[len(walks) :]]
    assert runs == sorted(runs, reverse=True)
    assert len(walks) <= 1 or len(groups) <= workers
    assert len(groups) >= min(workers, len(kinds))


def test_the_costly_readers_of_a_walk_are_parted_first():
    walked = find(WALKED)
    first, second = cut(walked, TOKENS, 2)
    assert (first[0].name, second[0].name) == ("repetition", "mlp_units")
    assert [len(group) for group in cut(walked, TOKENS, 99)] == [1] * len(walked)


def test_a_long_text_is_walked_by_all_workers():
    kinds = find(NAMES)
    assert [len(group) for group in cut(kinds, LONG, 3)] == [5, 1, 1, 1]
    assert [len(group) for group in cut(kinds, LONG + 1, 3)] == [2, 2, 1, 1, 1, 1]


def test_a_bench_makes_what_one_pass_makes():
    checkpoint = loading.find(model_folders.folder())
    writer = Writer(checkpoint, loading.read_weights(checkpoint))
    tokens = torch.arange(70) % 50
    bench = MeasurementRunner(writer, tokens, 0)
    (found,) = bench.run(MeasurementPiece(("sparsity",), writer.dtype))
    assert found["name"] == Sparsity.name
    assert Sparsity.reading(found["result"])
    assert bench.about().items() >= {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "dtype": "float32"}.items()
    with pytest.raises(InputError, match="computes in float32, and others in bfloat16"):
        bench.run(MeasurementPiece(("sparsity",), "bfloat16"))
