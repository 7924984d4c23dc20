"""Files of snapshots: what was saved is loaded bit for bit, in any process, and a file is never torn."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from snapshot_models import POLICIES, bounded, feed, ids, model
from sweeps import sweep

from kvkeep import BoundedCache, Snapshot, SnapshotError
from kvkeep.result_files import write_whole
from kvkeep.snapshot.snapshot import packed_bits
from kvkeep.types import MemoryUsage

HERE = Path(__file__).parent


def taken(name="llama", policy="h2o:recent=2", stop=25, **options):
    cache = bounded(model(name), policy, **options)
    feed(model(name), cache, ids(1), 0, stop)
    return cache.snapshot(tokens=ids(1)[0, :stop])


def equal(one, other):
    assert one.fingerprint == other.fingerprint
    assert (one.tokens is None) == (other.tokens is None)
    assert one.tokens is None or torch.equal(one.tokens, other.tokens)
    for mine, theirs in zip(one.contents.layers, other.contents.layers, strict=True):
        assert (mine.cut, mine.capacity, mine.budget) == (theirs.cut, theirs.capacity, theirs.budget)
        assert torch.equal(mine.positions, theirs.positions)
        assert mine.tensors.keys() == theirs.tensors.keys()
        held = mine.positions >= 0
        for name, tensor in mine.tensors.items():
            found = theirs.tensors[name]
            assert torch.equal(tensor[held], found[held]) if name in mine.cut else torch.equal(tensor, found), name
    assert one.contents.states.keys() == other.contents.states.keys()
    for number, state in one.contents.states.items():
        again = other.contents.states[number]
        assert state.flags == again.flags
        assert all(torch.equal(tensor, again.tensors[place]) for place, tensor in state.tensors.items())


STOPS = [(policy, stop) for policy in POLICIES for stop in (5, 20, 26)]


@pytest.mark.parametrize(("policy", "stop"), sweep(STOPS, lambda case: STOPS.index(case) % 4 == 2))
def test_what_is_loaded_is_what_was_saved(policy, stop, tmp_path):
    snapshot = taken(policy=policy, stop=stop)
    snapshot.save(tmp_path / "one.kvkeep")
    found = Snapshot.load(tmp_path / "one.kvkeep")
    equal(snapshot, found)
    again = BoundedCache.from_snapshots(model().config, [snapshot])
    loaded = BoundedCache.from_snapshots(model().config, [found])
    assert torch.equal(*(feed(model(), one, ids(1), stop, 32) for one in (again, loaded)))
    assert [path.name for path in tmp_path.iterdir()] == ["one.kvkeep"]


@pytest.mark.parametrize("name", ["gemma2", "falcon-h1", "lfm2"])
def test_windows_and_states_are_saved(name, tmp_path):
    snapshot = taken(name)
    snapshot.save(tmp_path / "one.kvkeep")
    found = Snapshot.load(tmp_path / "one.kvkeep")
    equal(snapshot, found)
    caches = [BoundedCache.from_snapshots(model(name).config, [one]) for one in (snapshot, found)]
    assert torch.equal(*(feed(model(name), cache, ids(1), 25, 32) for cache in caches))


def test_half_precision_and_slot_positions_are_saved(tmp_path):
    half = model(dtype=torch.bfloat16)
    cache = bounded(half, "streaming_llm:sinks=2", layer_budget=[1.0, 2.0], prefill_chunk=6)
    feed(half, cache, ids(1), 0, 25)
    snapshot = cache.snapshot()
    snapshot.save(tmp_path / "one.kvkeep")
    found = Snapshot.load(tmp_path / "one.kvkeep")
    equal(snapshot, found)
    assert found.fingerprint.dtype == "bfloat16"
    assert found.fingerprint.layer_budget == (1.0, 2.0)
    again = BoundedCache.from_snapshots(half.config, [found])
    assert torch.equal(*(feed(half, one, ids(1), 25, 32) for one in (cache, again)))


def test_the_file_is_safetensors_and_its_tensors_are_aligned(tmp_path):
    snapshot = taken(policy="spatten")
    snapshot.save(tmp_path / "one.kvkeep")
    with safe_open(tmp_path / "one.kvkeep", "pt") as file:
        names = set(file.keys())
        assert file.get_tensor("tokens").tolist() == snapshot.tokens.tolist()
    assert {"layers.0.store.keys", "layers.0.occupied", "layers.1.state.importance"} <= names


@pytest.mark.parametrize("policy", ["h2o", "adakv", "scissorhands", "streaming_llm:sinks=4"])
@pytest.mark.parametrize("budget", [1000, 4000])
def test_a_file_has_the_size_of_what_is_occupied(policy, budget, tmp_path):
    """Two thousand tokens, in a block that they fill or half fill."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    import kvkeep

    config = LlamaConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
    )
    made = kvkeep.attach(AutoModelForCausalLM.from_config(config).eval())
    cache = BoundedCache(made.config, policy, budget)
    tokens = ids(1, columns=2100)
    feed(made, cache, tokens, 0, 2010, prompt=2000)
    snapshot = cache.snapshot(tokens=tokens[0, :2010])
    snapshot.save(tmp_path / "one.kvkeep")
    size = (tmp_path / "one.kvkeep").stat().st_size
    memory: MemoryUsage = cache.memory()
    assert size <= 1.02 * memory.occupied_bytes + 4 * 2010
    assert budget == 1000 or size < 0.6 * memory.allocated_bytes


def test_bits_are_packed_and_unpacked():
    for n in range(20):
        bits = torch.rand(n) < 0.5
        packed = packed_bits(bits)
        assert len(packed) == -(-n // 8)
        assert np.array_equal(np.unpackbits(packed.numpy(), count=n, bitorder="little"), bits)


CONTINUE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(1)
from snapshot_models import feed, ids, model
from kvkeep import BoundedCache, Snapshot
for path in sys.argv[2:]:
    snapshot = Snapshot.load(path)
    made = model(dtype=getattr(torch, snapshot.fingerprint.dtype))
    cache = BoundedCache.from_snapshots(made.config, [snapshot])
    torch.save(feed(made, cache, ids(1), snapshot.seen, 36), path + ".logits")
"""


@pytest.mark.slow
@pytest.mark.parametrize("policies", sweep([POLICIES[::6], POLICIES], lambda some: some != POLICIES), ids=len)
def test_another_process_goes_on_as_this_one(policies, tmp_path):
    """Bit for bit, for every policy in one of the two position modes and dtypes."""
    want = {}
    for number, policy in enumerate(policies):
        made = model(dtype=(torch.float32, torch.bfloat16)[number % 2])
        positions = None if number % 4 < 2 else "slot"
        cache = bounded(made, policy, positions=positions)
        feed(made, cache, ids(1), 0, 24 + number % 5)
        path = str(tmp_path / f"{number}.kvkeep")
        cache.snapshot().save(path)
        want[path] = feed(made, cache, ids(1), 24 + number % 5, 36)
    subprocess.run([sys.executable, "-c", CONTINUE, str(HERE), *want], check=True)
    for path, logits in want.items():
        assert torch.equal(torch.load(path + ".logits"), logits), path


@pytest.mark.parametrize("policy", ["h2o:recent=2", "full"])
def test_a_memory_that_is_loaded_and_saved_has_the_same_bytes(tmp_path, policy):
    taken(policy=policy).save(tmp_path / "one")
    Snapshot.load(tmp_path / "one").save(tmp_path / "two")
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()


SAVE = """
import os, sys
from kvkeep import Snapshot
one, two = map(Snapshot.load, sys.argv[1:3])
for line in sys.stdin:
    if child := os.fork():
        print(child, flush=True)
        os.waitpid(child, 0)
        print("ended", flush=True)
        continue
    while True:
        two.save(sys.argv[3])
        one.save(sys.argv[3])
"""


@pytest.mark.slow
def test_a_killed_process_leaves_the_old_file_or_the_new_one(tmp_path):
    one, two = taken(stop=22), taken(stop=30)
    one.save(tmp_path / "one")
    two.save(tmp_path / "two")
    whole = {(tmp_path / name).read_bytes() for name in ("one", "two")}
    target, rng, found = tmp_path / "target.kvkeep", random.Random(3), set()
    one.save(target)
    command = [sys.executable, "-c", SAVE, *(str(tmp_path / name) for name in ("one", "two", "target.kvkeep"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for _ in range(20):
            parent.stdin.write("next\n")
            child = int(parent.stdout.readline())
            time.sleep(rng.random() / 20)
            os.kill(child, signal.SIGKILL)
            assert parent.stdout.readline() == "ended\n"
            found.add(target.read_bytes())
            assert found <= whole
        parent.stdin.close()
    assert found == whole
    for path in tmp_path.glob(".target*.new"):
        os.utime(path, (0, 0))
    one.save(target)
    assert not list(tmp_path.glob(".target*.new"))  # old leftovers go with the next save


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    one, two = taken(stop=22), taken(stop=30)
    target = tmp_path / "one.kvkeep"
    one.save(target)
    before = target.read_bytes()
    code = (
        "import resource, signal, sys\n"
        "from kvkeep import Snapshot, SnapshotError\n"
        "snapshot = Snapshot.load(sys.argv[1])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try:\n    snapshot.save(sys.argv[2])\n"
        "except SnapshotError as error:\n    print(error)\n"
    )
    two.save(tmp_path / "two.kvkeep")
    command = [sys.executable, "-c", code, str(tmp_path / "two.kvkeep"), str(target)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "cannot be saved to" in said
    assert "File too large. An older file of that name is as it was." in said
    assert target.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.kvkeep", "two.kvkeep"]

    def full(path, data):
        list(data)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvkeep.snapshot.snapshot.write_whole", full)
    with pytest.raises(SnapshotError, match="No space left on device"):
        two.save(target)


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing/one.kvkeep", "No such file"), (".", "folder"), ("x" * 300, "name too long"), ("a\0b", "null")],
)
def test_a_place_that_cannot_be_written_is_named(name, message, tmp_path):
    with pytest.raises(SnapshotError, match=message):
        taken().save(f"{tmp_path}/{name}")


def test_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SnapshotError, match="no regular file"):
        taken().save(tmp_path / "pipe")


def test_whole_writes_take_pieces(tmp_path):
    write_whole(tmp_path / "file", iter([b"one", b"two"]))
    assert (tmp_path / "file").read_bytes() == b"onetwo"
