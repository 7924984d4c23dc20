"""Workers and what is checked before they start, without Ray."""

import asyncio
import contextlib
import json
import socket
import threading

import pytest
from commands import run, write

import kvkeep
from kvkeep.batch.input import BadLine, parse
from kvkeep.batch.survey import Survey
from kvkeep.cli import generate_batch, generate_batch_workers, serve_run
from kvkeep.cli.generate import BatchOptions, GenerateOptions
from kvkeep.cli.serve import ServeOptions
from kvkeep.engine import Engine
from kvkeep.errors import InputError, pip_install
from kvkeep.models import chat_templates
from kvkeep.scale import cluster, driver
from kvkeep.scale.cluster import Need, Node, check_ray, check_room, check_versions, last_words, share
from kvkeep.scale.worker import Built, EngineFacts, LineWorker
from kvkeep.server.settings import ServerSettings

VERSIONS = {"kvkeep": "1", "torch": "2"}


def node(name="10.0.0.1", cpus=4, gpus=0, memory=10**10, versions=VERSIONS):
    return Node(name, cpus, gpus, memory, versions)


@pytest.fixture(scope="module")
def model(comparable):
    return comparable.loaded


class Making:
    """An engine on the embedded model."""

    def __init__(self, model):
        self.model = model

    def __call__(self, like):
        network, tokenizer = self.model
        engine = Engine(network, tokenizer, budget=32, rows=2)

        def encode(prompt, *, raw=False):
            return tokenizer(prompt if isinstance(prompt, str) else prompt[0]["content"])["input_ids"]

        return Built(engine, lambda n, raw: parse(n, raw, encode, kvkeep.SamplingParams(max_new_tokens=3)), None, "w")


def answers(one, *lines):
    async def all_of_them():
        return await asyncio.gather(*(one.run(n, raw, {"format": 3}) for n, raw in enumerate(lines, start=1)))

    return asyncio.run(all_of_them())


def test_a_worker_answers_lines_side_by_side(model):
    one = LineWorker(Making(model))
    facts = one.begin(None)
    assert isinstance(facts, EngineFacts)
    assert (facts.rows, facts.weights) == (2, "w")
    raw = [b'{"prompt": "Once upon a time", "id": %d}' % n for n in range(5)]
    bad = b'{"prompt": "x", "options": {"budget": 999}}'
    batch = json.dumps(
        {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": ["A dog", "A cat"], "max_tokens": 2},
        }
    ).encode()
    found = answers(one, *raw, bad, b"{", batch)
    assert [answer.number for answer in found] == list(range(1, 9))
    texts = {json.loads(answer.whole)["completion"]["text"] for answer in found[:5]}
    assert len(texts) == 1
    assert all(answer.new == 3 for answer in found[:5])
    assert "999" in found[5].reason
    assert "no JSON" in found[6].reason
    assert len(json.loads(found[7].whole)["response"]["body"]["choices"]) == 2


def test_a_worker_says_why_it_cannot_begin():
    def fail(like):
        raise InputError("There is no such model.")

    assert LineWorker(fail).begin(None) == "There is no such model."


def test_a_worker_judges_shapes_as_its_engine_does(model):
    one = LineWorker(Making(model))
    one.begin(None)
    survey = Survey()
    read = one._built.read
    for number, raw in enumerate((b'{"prompt": "a"}', b'{"prompt": "b", "options": {"budget": 99}}'), start=1):
        assert not isinstance(read(number, raw), BadLine)
        survey.add(read(number, raw))
    refused = survey.check(one.judge, list(survey.digests))
    assert list(refused) == [2]
    assert "99" in refused[2]


def test_an_engine_that_breaks_reaches_its_lines_and_serves_the_next(model, monkeypatch):
    one = LineWorker(Making(model))
    one.begin(None)
    step, failures = Engine.step, [MemoryError("gone")]

    def fails(self):
        if failures:
            raise failures.pop()
        return step(self)

    monkeypatch.setattr(Engine, "step", fails)
    with pytest.raises(MemoryError, match="gone"):
        answers(one, b'{"prompt": "a"}')
    (answer,) = answers(one, b'{"prompt": "a"}')
    assert answer.whole is not None


def test_workers_that_do_not_fit_are_refused_with_what_would():
    check_room([node(), node("10.0.0.2", cpus=1)], Need(), 5)
    with pytest.raises(InputError, match=r"6 workers of 1 CPU each do not fit into the cluster, 5 would: 10.0"):
        check_room([node(), node("10.0.0.2", cpus=1)], Need(), 6)
    with pytest.raises(InputError, match=r"3 workers of 1 CPU and 4.00 GB each .* 2 would: .*10.0 GB of free memory"):
        check_room([node()], Need(memory=4 * 10**9), 3)
    with pytest.raises(InputError, match=r"1 worker of 1 CPU, 1 GPU and 4.00 GB does not fit into the cluster, none"):
        check_room([node()], Need(gpus=1, memory=4 * 10**9), 1)
    check_room([node(gpus=2)], Need(gpus=1), 2)


def test_workers_and_replicas_get_the_full_paths_of_files(tmp_path, monkeypatch):
    """They may start in another folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heads.json").write_text("")
    (tmp_path / "queries.pt").write_text("")
    wanted = {"policy": "triattention:calibration={}queries.pt", "head_budget": "profile:{}heads.json"}
    named, full = ({name: value.format(at) for name, value in wanted.items()} for at in ("", f"{tmp_path}/"))
    monkeypatch.setattr(generate_batch_workers, "room_for", lambda *args, **options: (Need(), "cpu"))
    monkeypatch.setattr(generate_batch_workers, "WorkerPool", lambda kind, recipe, *args, **options: recipe)
    batch = BatchOptions(input="a", output="b", skip_bad=False, max_rows=None, kv_memory=None, compile=False, workers=2)
    sizes = {"requests": 4, "longest": 9, "budget": 8}
    for memory, wanted in ((None, full), ("a.kvkeep", named)):
        asked = GenerateOptions(memory=memory, **named)
        made = generate_batch_workers.pool_of(asked, batch, memory=memory, **sizes).request
        assert {"policy": made.policy, "head_budget": made.head_budget} == wanted
    engine = serve_run._recipe(ServeOptions(**named), ServerSettings(name="a"), "cpu").engine
    assert full.items() <= engine.items()


def test_workers_share_the_cores_of_nodes():
    assert share([node(cpus=8)], 2) == 4
    assert share([node(cpus=8), node(cpus=2)], 3) == 2
    assert share([node(cpus=1)], 3) == 1
    assert share([], 3) == 1


def test_unequal_versions_are_refused_by_name():
    check_versions([node()], VERSIONS)
    with pytest.raises(InputError, match=r"The node 10.0.0.2 has torch 3, and this process has 2"):
        check_versions([node(), node("10.0.0.2", versions={**VERSIONS, "torch": "3"})], VERSIONS)
    with pytest.raises(InputError, match="has kvkeep None"):
        check_versions([node(versions={"torch": "2"})], VERSIONS)
    own = cluster.scout()
    assert own["versions"]["kvkeep"] == kvkeep.__version__
    check_versions([node(versions=own["versions"])])


def test_the_reason_of_a_death_is_short():
    class ActorError(Exception):
        cause = None

    text = "The actor died.\n\tclass_name: W\nWorker exit type: X Worker exit detail: Worker unexpectedly\nexits. Some"
    assert last_words(ActorError(text)) == "its process ended (Worker unexpectedly exits)"
    assert last_words(ValueError("one\n  two.")) == "two"
    assert last_words(ValueError()) == "ValueError"


@pytest.fixture
def with_ray(monkeypatch):
    monkeypatch.setattr(cluster, "need_ray", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    "address", ["nowhere", "ray://10.0.0.1:10001", ":6379", "host:", "host:99999", "host:x", "a:-1"]
)
def test_no_address_of_a_cluster(with_ray, address):
    with pytest.raises(InputError, match=r"`ray_address=.*` is no address of a cluster"):
        check_ray(address)


def test_an_address_without_a_cluster(with_ray):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"Nothing answers at `ray_address=127.0.0.1:{port}`"):
            check_ray(f"127.0.0.1:{port}")


@pytest.mark.parametrize("answer", [b"HTTP/1.0 400 Bad Request\r\n\r\n", b""])
def test_another_service_at_the_address_is_no_cluster(with_ray, answer):
    def serve():
        connection, _ = server.accept()
        with connection:
            connection.recv(64)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(InputError, match=f"What answers at `ray_address={address}` is no cluster of Ray"):
            check_ray(address)
        thread.join()


@pytest.fixture
def lines(tmp_path):
    return write(tmp_path / "in.jsonl", {"prompt": "Once"}), tmp_path / "out.jsonl"


@pytest.mark.long
def test_a_worker_can_fill_in_templates_before_its_first_line(lines, monkeypatch):
    """The process for that takes half a second to start, for which all lines of a worker would wait."""
    made = []

    def crew(trade, recipe, *arguments, **options):
        made.append(recipe)
        raise InputError("This is enough.")

    monkeypatch.setattr(generate_batch, "check_ray", lambda address: None)
    monkeypatch.setattr(driver, "joined", lambda address, cpus: contextlib.nullcontext())
    monkeypatch.setattr(generate_batch_workers, "room_for", lambda *args, **options: (Need(), "cpu"))
    monkeypatch.setattr(generate_batch_workers, "WorkerPool", crew)
    assert "This is enough." in run("-i", lines[0], "-o", lines[1], "--ray-workers", 1).said
    chat_templates._WORKER.end()
    built = made[0](None)
    assert chat_templates._WORKER.runs
    monkeypatch.setattr(
        chat_templates, "_WORKER", None
    )  # it has begun, but a line that fails is no failure of the worker
    assert isinstance(made[0](built.layout), Built)


@pytest.mark.slow
def test_workers_are_given_the_memory_that_their_rows_may_take(tmp_path, monkeypatch):
    given = []

    def room_for(count, nbytes, **options):
        given.append(nbytes)
        raise InputError("This is enough.")

    monkeypatch.setattr(generate_batch, "check_ray", lambda address: None)
    monkeypatch.setattr(driver, "joined", lambda address, cpus: contextlib.nullcontext())
    monkeypatch.setattr(generate_batch_workers, "room_for", room_for)
    source = write(tmp_path / "in.jsonl", *({"prompt": f"Once {n}"} for n in range(100)))
    for most in ("120kB", "240kB"):
        words = ("--ray-workers", 1, "--budget", 16, "--kv-memory", most)
        assert "This is enough." in run("-i", source, "-o", tmp_path / "out.jsonl", *words).said
    assert given[1] - given[0] == 120_000


@pytest.mark.usefixtures("no_ray")
def test_without_ray_the_error_names_the_extra(lines):
    result = run("-i", lines[0], "-o", lines[1], "--ray-workers", 2)
    assert result.exit_code == 2
    assert f"Ray is not installed: {pip_install('ray')}." in result.said
    assert not lines[1].exists()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--ray-workers", 0), "--ray-workers 0 is out of range"),
        (("--ray-workers", 10**6), "is out of range"),
        (("--ray-address", "auto"), "give --ray-workers N"),
        (("--ray-workers", 1, "--ray-address", " "), "--ray-address is empty"),
    ],
)
def test_options_that_make_no_job(lines, options, word):
    result = run("-i", lines[0], "-o", lines[1], *options)
    assert result.exit_code == 2
    assert word in result.said
    assert not lines[1].exists()


@pytest.mark.slow
def test_the_layout_of_weights_is_followed_without_a_measurement(monkeypatch):
    from kvkeep.models import packed_weights, prepare

    for like in [(False, False), (True, False), (False, True), (True, True)]:
        network, _ = kvkeep.load(dtype="float32")
        with monkeypatch.context() as patch:
            patch.setattr(packed_weights, "faster", lambda *args, **kwargs: 1 / 0)
            prepare.prepare_for_rows(network, 4, like)
        got = prepare.weight_layout(network)
        assert got[1] == like[1]
        assert got[0] <= like[0]
