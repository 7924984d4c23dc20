"""Jobs and datasets on Ray: the lines are those of one engine, whatever dies on the way. `make test-ray` runs these."""

import json
import os
import random
import re
import signal
import sys
from pathlib import Path

import pytest
import rayjobs
from commands import run, write

import kvkeep
from kvkeep.scale import cluster, worker
from kvkeep.scale.ray_data import Stage, generate
from kvkeep.scale.worker import Built
from kvkeep.scale.worker_pool import WorkerPool

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings are no errors of ours

LINES = 1000


@pytest.fixture(scope="module")
def whole(ray, tmp_path_factory, comparable):
    """A thousand lines, and what one engine makes of them."""
    folder = tmp_path_factory.mktemp("jobs")
    source = rayjobs.inputs(folder / "in.jsonl", LINES)
    code, said = rayjobs.run(source, folder / "one.jsonl", *comparable.words)
    assert code == 0, said
    return source, rayjobs.texts(folder / "one.jsonl")


def test_five_killed_workers_lose_nothing_and_repeat_nothing(whole, tmp_path, comparable):
    source, expected = whole
    target, chance = tmp_path / "out.jsonl", random.Random(7)
    job = rayjobs.start(source, target, "--ray-workers", "3", *comparable.words)
    for killed in range(5):
        aim = rayjobs.count(target) + chance.randrange(10, 120)
        rayjobs.wait_for(lambda: rayjobs.count(target) >= aim, job)  # noqa: B023  called before the next round
        assert rayjobs.kill(chance.choice(rayjobs.wait_for(lambda: rayjobs.workers(job), job))) or killed
    code, said = rayjobs.finish(job)
    assert code == 0, said
    assert said.count("died and is replaced") >= 4
    assert "raylet" not in said  # Ray would print its own words to standard output
    assert rayjobs.texts(target) == expected


def test_a_killed_driver_and_a_stopped_one_are_resumed(whole, tmp_path, comparable):
    source, expected = whole
    target = tmp_path / "out.jsonl"
    for end in (signal.SIGKILL, signal.SIGINT):
        before = rayjobs.count(target)
        job = rayjobs.start(source, target, "--ray-workers", "2", *comparable.words)
        rayjobs.wait_for(lambda: rayjobs.count(target) > before + 100, job)  # noqa: B023
        others = rayjobs.family(job.pid)
        job.send_signal(end)
        code, said = rayjobs.finish(job)
        assert code == (-9 if end == signal.SIGKILL else 130), said
        rayjobs.wait_for(lambda: not rayjobs.alive(others))  # noqa: B023
    assert "the same command goes on from there" in said
    code, said = rayjobs.run(source, target, "--ray-workers", "4", *comparable.words, "--json")
    assert code == 0, said
    found = json.loads(said.splitlines()[0])
    assert (found["done"], found["lines"], found["workers"]) == (LINES, LINES, 4)
    assert rayjobs.texts(target) == expected


@pytest.fixture(scope="module")
def address(ray):
    """A cluster of two nodes on this machine."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
    made = Cluster(initialize_head=True, head_node_args=node)
    yield made.address, made
    made.shutdown()


@pytest.fixture
def small(tmp_path):
    lines = ({"prompt": f"A dog {n}", "id": n, "options": {"max_new_tokens": 3}} for n in range(12))
    return write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"


def test_a_job_on_a_running_cluster_writes_bad_lines_aside_and_is_done_the_second_time(address, small):
    source, target = small
    with source.open("a") as file:
        file.write('{"prompt": "x", "options": {"budget": 999999}}\n{"prompt"\n')
    options = ("-i", source, "-o", target, "--ray-workers", 2, "--ray-address", address[0])
    refused = run(*options)
    assert refused.exit_code == 2
    assert "Line 14" in refused.said
    assert rayjobs.count(target) == 0
    result = run(*options, "--skip-bad", "--budget", 64)
    assert result.exit_code == 0, result.said
    assert len(rayjobs.texts(target)) == 12
    assert (target.parent / "out.jsonl.bad").read_text().count("\n") == 2
    again = run(*options, "--skip-bad", "--budget", 64)
    assert "12 of 12 lines were done before" in again.said
    assert len(rayjobs.texts(target)) == 12


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--ray-workers", 9, "--threads", 1), "9 workers of 1 CPU"),
        (("--ray-workers", 2, "--budget", "4M", "--max-rows", 12), "do not fit into the cluster, "),
    ],
)
def test_workers_that_do_not_fit_start_nothing(address, small, options, word):
    result = run("-i", small[0], "-o", small[1], "--ray-address", address[0], *options)
    assert result.exit_code == 2
    assert word in result.said
    assert "would" in result.said
    assert rayjobs.count(small[1]) == 0


def test_another_version_of_kvkeep_on_a_node_is_refused(address, small, monkeypatch):
    real = cluster.scout()
    other = {**real["versions"], "kvkeep": "0.0.1"}
    with monkeypatch.context() as patch:
        patch.setattr("kvkeep.cli.cluster.check_versions", lambda found: cluster.check_versions(found, other))
        result = run("-i", small[0], "-o", small[1], "--ray-workers", 1, "--ray-address", address[0])
    assert result.exit_code == 2
    assert "has kvkeep" in result.said
    assert "0.0.1" in result.said
    assert rayjobs.count(small[1]) == 0


def test_an_output_that_cannot_be_written_is_said_before_a_worker_starts(address, small):
    result = run("-i", small[0], "-o", "/proc/out.jsonl", "--ray-workers", 1, "--ray-address", address[0])
    assert result.exit_code == 2
    assert "/proc/out.jsonl cannot be written" in result.said


class Deadly:
    """An engine whose process dies of some lines."""

    def __call__(self, like):
        import kvkeep
        from kvkeep.batch.input import parse
        from kvkeep.engine import Engine

        network, tokenizer = kvkeep.load()

        def read(number, raw):
            if b"deadly" in raw:
                os.kill(os.getpid(), signal.SIGKILL)
            return parse(number, raw, lambda prompt, *, raw=False: [5, 6, 7], kvkeep.SamplingParams(max_new_tokens=2))

        return Built(Engine(network, tokenizer, budget=16, rows=2), read, None, "w")


def test_a_line_that_kills_its_worker_fails_alone(address, ray):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file
    raw = [b'{"prompt": "%s"}' % (b"deadly" if n == 3 else b"kind") for n in range(10)]
    answers, notes = [], []
    with cluster.joined(address[0], cpus=2):
        crew = WorkerPool(worker.LINES, Deadly(), 2, cluster.Need(), tell=notes.append)
        crew.begin()
        todo = iter(enumerate(raw, start=1))
        crew.run(lambda place: next(todo, None), [{"format": 3}], answers.append)
        crew.close()
    assert sorted(answer.number for answer in answers) == list(range(1, 11))
    (failed,) = (answer for answer in answers if answer.whole is None)
    assert failed.number == 4
    assert "its worker died" in failed.reason
    assert notes


def test_a_node_that_goes_away_takes_no_line_with_it(address, whole, tmp_path, comparable):
    source, expected = whole
    target = tmp_path / "out.jsonl"
    extra = address[1].add_node(num_cpus=2, object_store_memory=100 * 2**20)
    address[1].wait_for_nodes()
    options = ("--ray-workers", "4", "--threads", "1", "--ray-address", address[0])
    job = rayjobs.start(source, target, *options, *comparable.words)
    rayjobs.wait_for(lambda: rayjobs.count(target) > 100, job)
    address[1].remove_node(extra, allow_graceful=False)
    code, said = rayjobs.finish(job)
    assert code == 0, said
    assert "died and is replaced" in said
    assert rayjobs.texts(target) == expected


def test_a_dataset_goes_through_a_stage(address, ray, tmp_path, comparable):
    from kvkeep.engine import Engine

    rows = [{"prompt": f"Once {n}", "id": n, "options": {"max_new_tokens": 2 + n % 3}} for n in range(30)]
    rows += [{"prompt": " ", "id": 30, "options": None}, {"prompt": None, "id": 31, "options": None}]
    rows += [{"prompt": "a", "id": 32, "options": {"max_new_tokens": 0}}]
    with cluster.joined(address[0], cpus=2):
        found = generate(
            ray.data.from_items(rows), workers=2, batch_size=8, budget=64, dtype=comparable.dtype
        ).take_all()
        with pytest.raises(cluster.InputError, match="`workers=0`"):
            generate(ray.data.from_items(rows), workers=0)
        with pytest.raises(cluster.InputError, match=r"no ray\.data\.Dataset"):
            generate(rows)
    assert sorted(one["id"] for one in found) == list(range(33))
    bad = {one["id"]: one["completion"]["error"] for one in found if one["completion"]["error"]}
    assert sorted(bad) == [30, 31, 32]
    engine = Engine(*comparable.loaded, budget=64)
    for one in found:
        if one["id"] < 30:
            (alone,) = engine.generate(
                one["prompt"], kvkeep.SamplingParams(max_new_tokens=one["options"]["max_new_tokens"])
            )
            assert one["completion"]["text"] == alone.text


@pytest.mark.parametrize("options", [None, {"seed": 1}], ids=str)
def test_a_row_with_a_value_that_is_no_json_fails_alone(options):
    pyarrow = pytest.importorskip("pyarrow")
    odd = {"prompt": None, "messages": [{"role": "user", "content": b"A dog"}], "options": options}
    stage = Stage(None, kvkeep.SamplingParams(max_new_tokens=2), False, "float32", {"budget": 64})
    found = stage(pyarrow.Table.from_pylist([odd, {"prompt": "A dog"}])).to_pylist()
    assert [one["completion"]["new_tokens"] for one in found] == [None, 2]
    assert "has no form in JSON" in found[0]["completion"]["error"]


def test_the_python_of_the_page_runs(address, ray, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "scale.md"
    code, _ = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)  # the other: test_serve.py
    code = code.replace('"Qwen/Qwen3-0.6B", workers=4', "None, workers=1")
    prompts = [{"prompt": f"Once {n}", "options": {"max_new_tokens": 2}} for n in range(3)]
    code = code.replace("prompts/", str(tmp_path / "prompts")).replace("answers/", str(tmp_path / "answers"))
    with cluster.joined(address[0], cpus=2):
        ray.data.from_items(prompts).write_parquet(str(tmp_path / "prompts"))
        exec(code, {})
        answers = ray.data.read_parquet(str(tmp_path / "answers")).take_all()
    assert [one["completion"]["new_tokens"] for one in answers] == [2] * 3


def test_parquet_and_folders_are_inputs(ray, tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = [{"prompt": "A", "id": 1, "options": {"max_new_tokens": 2}}, {"prompt": "B", "id": None, "options": None}]
    folder = tmp_path / "in"
    folder.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "b.parquet")
    (folder / "a.jsonl").write_text('{"prompt": "C"}')
    for name, count in ((folder / "b.parquet", 2), (folder, 3), (f"file://{folder}/b.parquet", 2)):
        target = tmp_path / "out.jsonl"
        result = run("-i", name, "-o", target, "--max-new-tokens", 1)
        assert result.exit_code == 0, result.said
        assert rayjobs.count(target) == count
        target.unlink()
    for name, word in (
        ("file:///no/such.jsonl", "does not exist"),
        ("ftq://a/b", "cannot be read"),
        (tmp_path / "no.pq", "exist"),
    ):
        result = run("-i", name, "-o", tmp_path / "out.jsonl")
        assert result.exit_code == 2
        assert word in result.said
    (tmp_path / "bad.parquet").write_text("no table")
    assert "cannot be read" in run("-i", tmp_path / "bad.parquet", "-o", tmp_path / "out.jsonl").said
    assert not (tmp_path / "out.jsonl").exists()
