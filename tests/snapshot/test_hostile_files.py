"""Files that no snapshot has: each is refused in one message, quickly, and before memory is allocated."""

import json
import os
import random
import resource
import struct

import pytest
import torch
from safetensors.torch import save
from snapshot_models import bounded, feed, ids, model

from kvkeep import BoundedCache, Snapshot, SnapshotError
from kvkeep.snapshot.snapshot import SnapshotAbout

ROOM = 2**33


def written(path, policy="h2o:recent=2", name="llama"):
    cache = bounded(model(name), policy)
    feed(model(name), cache, ids(1), 0, 25)
    cache.snapshot(tokens=ids(1)[0, :25]).save(path)
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return written(tmp_path_factory.mktemp("good") / "one.kvkeep").read_bytes()


@pytest.fixture(autouse=True)
def little_memory():
    """An allocation of a hostile size fails, whatever the machine."""
    if not os.path.exists("/proc/self/statm"):
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def parts(data):
    """The header, its description, and the bytes of the tensors."""
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    return header, json.loads(header["__metadata__"]["kvkeep"]), data[8 + n :]


def joined(header, about, tensors):
    if about is not None:
        header["__metadata__"] = {"kvkeep": json.dumps(about)}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors


def refused(tmp_path, data):
    path = tmp_path / "bad.kvkeep"
    path.write_bytes(data)
    with pytest.raises(SnapshotError) as found:
        Snapshot.load(path)
    message = str(found.value)
    assert "\n" not in message
    assert len(message) < 500
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is empty"),
        (b"{}", "only 2 bytes"),
        (b"hello, world", "no safetensors file"),
        (b"\xff" * 100, "no safetensors file"),
        (b"PK\x03\x04" + bytes(200), "no safetensors file"),
        (struct.pack("<Q", 2**60) + b"{}", "no safetensors file"),
        (struct.pack("<Q", 10**7) + b"{}", "its header alone should have 10000000: it was cut off"),
        (struct.pack("<Q", 6) + b"{xxxx}", "its header cannot be read"),
        (struct.pack("<Q", 2 * 10**5) + b'{"a":' + b"[" * 2 * 10**5, "its header cannot be read"),
        (save({"weight": torch.zeros(3)}), "no memory of kvkeep"),
        (save({"weight": torch.zeros(3)}, {"kvkeep": "x"}), "its description cannot be read"),
        (save({"weight": torch.zeros(3)}, {"kvkeep": "[]"}), "its description is no JSON object"),
        (save({"weight": torch.zeros(3)}, {"kvkeep": "{}"}), "it has no fingerprint"),
    ],
)
def test_foreign_files(data, message, tmp_path):
    assert message in refused(tmp_path, data)


def test_a_truncated_file_is_refused_wherever_it_ends(good, tmp_path):
    rng = random.Random(1)
    for n in [*range(9), 8 + len(parts(good)[0]), len(good) - 1, *(rng.randrange(len(good)) for _ in range(60))]:
        refused(tmp_path, good[:n])
    assert "it was cut off or is damaged" in refused(tmp_path, good + b"x")


LAYER = "layers.0.store.keys"


def entry(name, **changes):
    def change(header, about):
        header[name] = {**header[name], **changes}

    return change


def layer(**changes):
    def change(header, about):
        about["layers"][0] |= changes

    return change


def number(**changes):
    def change(header, about):
        for one in about["layers"]:
            one["numbers"] |= changes

    return change


def made(**changes):
    def change(header, about):
        about["fingerprint"] |= changes

    return change


def renamed(old, new):
    def change(header, about):
        header[new] = header.pop(old)

    return change


def moved(name, by):
    def change(header, about):
        header[name]["data_offsets"] = [at + by for at in header[name]["data_offsets"]]

    return change


def about(**changes):
    def change(header, found):
        found |= changes

    return change


CHANGES = {
    "a shape of 2^60": (entry(LAYER, shape=[2**60, 2**60]), "no proper shape"),
    "an empty shape of 2^60": (entry(LAYER, shape=[0, 2**60]), "no proper shape"),
    "another shape": (entry(LAYER, shape=[7, 8]), "asks for"),
    "a shape with more axes": (entry(LAYER, shape=[1] * 20), "no proper shape"),
    "a negative shape": (entry(LAYER, shape=[-1, -128]), "no proper shape"),
    "a shape of floats": (entry(LAYER, shape=[16.0, 8.0]), "no proper shape"),
    "a shape of truths": (entry(LAYER, shape=[True, 8]), "no proper shape"),
    "a foreign dtype": (entry(LAYER, dtype="F8_E4M3"), "which no snapshot has"),
    "a dtype that is no text": (entry(LAYER, dtype=[]), "which no snapshot has"),
    "positions that may be NaN": (entry("layers.0.store.positions", dtype="F32"), "is no list of int32"),
    "keys of another dtype": (entry(LAYER, dtype="I32"), "its fingerprint says float32"),
    "state of another dtype": (entry("layers.0.state.mass", dtype="I32"), "is no list of float32"),
    "an entry without a dtype": (lambda header, about: header[LAYER].pop("dtype"), "is not described"),
    "an entry that is a list": (lambda header, about: header.update({LAYER: []}), "is not described"),
    "offsets that go back": (entry(LAYER, data_offsets=[600, 0]), "no proper place"),
    "offsets beyond the end": (moved(LAYER, 10**12), "overlap or leave gaps"),
    "offsets that overlap": (moved(LAYER, -8), "no proper place|overlap or leave gaps"),
    "a name with a path": (renamed(LAYER, "../../etc/passwd"), "which no snapshot has"),
    "a layer that is not there": (renamed(LAYER, "layers.2.store.keys"), "which no snapshot has"),
    "a layer of another spelling": (renamed(LAYER, "layers.00.store.keys"), "which no snapshot has"),
    "no keys": (renamed(LAYER, "layers.0.store.other"), "lacks store.keys"),
    "tables of an earlier version": (renamed("tokens", "shared.tokens"), "an earlier version kept spatten's sums"),
    "a state that nobody knows": (renamed("tokens", "states.0.conv_states"), "state 0 is not described"),
    "too many slots": (layer(used=2**31), "the number of slots of layer 0"),
    "too large a block": (layer(used=2**33, capacity=2**33), "the capacity of layer 0"),
    "slots that are nearly all empty": (layer(used=8), "has not one bit for each slot"),
    "no heads": (layer(heads=0), "the number of heads of layer 0 is 0"),
    "a text in place of heads": (layer(heads="2"), "the number of heads of layer 0 is '2'"),
    "a small budget": (layer(budget=7), "more than its budget of 14"),
    "a budget of nothing": (layer(budget=0), "the budget of layer 0 is 0"),
    "budgets of other heads": (layer(budget=[8, 8, 8]), "3 budgets for 2 heads"),
    "a budget that is a float": (layer(budget=8.0), "the budget of layer 0 is 8.0"),
    "no counters": (layer(numbers={}), "lacks counters"),
    "a layer that is a number": (lambda header, about: about.update(layers=[1, 2]), "layer 0 is not described"),
    "positions that nobody has seen": (number(seen=20, prompt=20), "one token id for each of 20 tokens"),
    "no tokens": (number(seen=0, prompt=0), "the number of tokens of layer 0 is 0"),
    "a long prompt": (number(prompt=26), "a prompt longer than its text"),
    "a counter of 2^70": (number(sequences=2**70), "its description cannot be read|'sequences' of layer 0"),
    "layers of different length": (
        layer(numbers={"seen": 24, "prompt": 20, "sequences": 0}),
        "different numbers of tokens",
    ),
    "no layers": (about(layers=[]), "it describes no layers"),
    "a thousand layers": (about(layers=[{}] * 5000), "it describes no layers"),
    "a prompt without end": (about(pending=2**60), "pending is"),
    "states in a list": (about(states=[]), "does not describe its states"),
    "a state of a strange number": (about(states={"-1": []}), "is no number of a layer"),
    "a setting that is a text": (about(states={"0": [["a", None, "b"]]}), "the state of layer 0 is not described"),
    "a later format": (made(version=3), "it has format 3, and this kvkeep reads formats up to 2; update kvkeep"),
    "shares of windows as they were": (
        made(version=1, layer_budget="sliding:0.25", budget=100),  # more than its layers have
        "gave layers with windows other shares",
    ),
    "shares of windows without a budget": (made(version=1, layer_budget="sliding:0.25", budget="8"), "the budget of"),
    "an unknown part": (made(more=1), "does not have the parts of this format"),
    "a policy that is a list": (made(policy=["h2o"]), "the policy of its fingerprint is"),
    "a policy without end": (made(policy="x" * 10**6), "the policy of its fingerprint is"),
    "a budget of 2^62": (made(budget=2**62), "its budget is"),
    "a third position mode": (made(positions="none"), "its positions mode is 'none'"),
    "weights of layers": (made(layer_budget=[1, "a"]), "the layer_budget of its fingerprint"),
    "no fingerprint": (about(fingerprint=None), "it has no fingerprint"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_whose_header_lies(name, good, tmp_path):
    change, message = CHANGES[name]
    header, found, tensors = parts(good)
    change(header, found)
    said = refused(tmp_path, joined(header, found, tensors))
    assert any(part in said for part in message.split("|")), said


@pytest.mark.parametrize("rule", ["uniform", "sliding:0.25"])
def test_a_file_of_the_first_format_opens(rule, good, tmp_path):
    """One with a rule for windows as well, if its layers have as many slots as under equal budgets."""
    header, found, tensors = parts(good)
    made(layer_budget=rule)(header, found)
    good = joined(header, found, tensors)
    made(version=1)(header, found)
    (tmp_path / "first.kvkeep").write_bytes(joined(header, found, tensors))
    (tmp_path / "good.kvkeep").write_bytes(good)
    first, second = (Snapshot.load(tmp_path / name) for name in ("first.kvkeep", "good.kvkeep"))
    assert not first.fingerprint.differences(second.fingerprint)


def overwritten(good, name, index, value, kind="<i"):
    """A file in which one number of a tensor is another one."""
    header, found, tensors = parts(good)
    start = header[name]["data_offsets"][0] + index * struct.calcsize(kind)
    return joined(header, found, tensors[:start] + struct.pack(kind, value) + tensors[start + struct.calcsize(kind) :])


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("layers.0.store.positions", 0, 25, "positions outside of the 25 tokens seen"),
        ("layers.0.store.positions", 0, -1, "positions outside of the 25 tokens seen"),
        ("layers.1.store.positions", 3, 2**31 - 1, "positions outside of the 25 tokens seen"),
        ("layers.0.store.positions", 0, 24, "holds a position twice in a head"),
        ("tokens", 4, -7, "a token id is negative"),
    ],
)
def test_a_file_whose_tensors_lie(name, index, value, message, good, tmp_path):
    assert message in refused(tmp_path, overwritten(good, name, index, value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (entry("tokens", dtype="F32"), "it has not one token id for each of 25 tokens"),
        (entry("tokens", shape=[5, 5]), "it has not one token id for each of 25 tokens"),
        (number(seen=20, prompt=20), "it has not one token id for each of 20 tokens"),
        (None, "a token id is negative"),
    ],
)
def test_ids_that_lie_are_refused_where_nothing_else_is_read(change, message, good, tmp_path):
    data = overwritten(good, "tokens", 4, -7)
    if change is not None:
        header, found, tensors = parts(good)
        change(header, found)
        data = joined(header, found, tensors)
    assert message in refused(tmp_path, data)
    with pytest.raises(SnapshotError, match=message):
        SnapshotAbout.read(tmp_path / "bad.kvkeep")


def test_bits_that_lie(good, tmp_path):
    assert "16 tokens in 17 occupied slots" in refused(
        tmp_path, overwritten(good, "layers.0.occupied", 0, 255, kind="<B")
    ) or "occupied slots" in refused(tmp_path, overwritten(good, "layers.0.occupied", 0, 0, kind="<B"))


def test_ten_thousand_tensors(good, tmp_path):
    header, found, tensors = parts(good)
    for i in range(10_000):
        header[f"layers.0.more.x{i}"] = {"dtype": "U8", "shape": [0], "data_offsets": [len(tensors)] * 2}
    path = tmp_path / "many.kvkeep"
    path.write_bytes(joined(header, found, tensors))
    with pytest.raises(SnapshotError, match="cannot be used here"):
        bounded(model()).restore(0, Snapshot.load(path))


def test_tables_that_spatten_had_beside_the_slots_are_refused(good, tmp_path):
    header, found, tensors = parts(good)
    header["shared.tokens"] = {"dtype": "U8", "shape": [0], "data_offsets": [len(tensors)] * 2}
    assert "read the text again" in refused(tmp_path, joined(header, found, tensors))


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_is_refused_or_harmless(seed, good, tmp_path):
    """A changed key or value cannot be noticed; everything else is, or does no harm."""
    rng = random.Random(seed)
    path = tmp_path / "damaged.kvkeep"
    for _ in range(60):
        data = bytearray(good)
        for _ in range(rng.choice([1, 1, 3, 20])):
            data[rng.randrange(len(data) if rng.random() < 0.3 else min(len(data), 3000))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            found = Snapshot.load(path)
            cache = bounded(model())
            cache.restore(0, found)
            feed(model(), cache, ids(2), 25, 27)
        except SnapshotError:
            continue


@pytest.mark.parametrize(
    "change",
    [
        lambda flags: flags.append(["__class__", None, 1]),
        lambda flags: flags.append(["number_of_states", None, 2**40]),
        lambda flags: flags.append(["conv_states", 0, True]),
        lambda flags: [flag.__setitem__(2, 2**40) for flag in flags if flag[0] == "conv_kernel_size"],
        lambda flags: [flag.__setitem__(2, not flag[2]) for flag in flags if flag[0].startswith("is_")],
        lambda flags: [flag.__setitem__(1, 7) for flag in flags],
    ],
)
def test_a_state_that_lies(change, tmp_path):
    header, found, tensors = parts(written(tmp_path / "one.kvkeep", name="lfm2").read_bytes())
    change(found["states"]["0"])
    (tmp_path / "one.kvkeep").write_bytes(joined(header, found, tensors))
    with pytest.raises(SnapshotError):
        BoundedCache.from_snapshots(model("lfm2").config, [Snapshot.load(tmp_path / "one.kvkeep")])


def test_places_without_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    for name, message in (
        ("pipe", "no regular file"),
        ("", "no regular file|Is a directory"),
        ("none", "No such file"),
    ):
        with pytest.raises(SnapshotError, match=message):
            Snapshot.load(tmp_path / name)
    with pytest.raises(SnapshotError, match="No such file"):
        Snapshot.load(tmp_path / "link")
    with pytest.raises(SnapshotError, match="null"):
        Snapshot.load("a\0b")


def test_the_policy_of_a_file_is_never_a_module(good, tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    header, found, tensors = parts(good)
    for policy in ("evil:Policy", "evil", "os:system", "h2o:recent=-1", ""):
        found["fingerprint"]["policy"] = policy
        (tmp_path / "one.kvkeep").write_bytes(joined(header, found, tensors))
        with pytest.raises(SnapshotError, match="policy"):
            BoundedCache.from_snapshots(model().config, [Snapshot.load(tmp_path / "one.kvkeep")])


def test_a_block_is_no_larger_than_the_budget_allows(good, tmp_path):
    header, found, tensors = parts(good)
    for one in found["layers"]:
        one["capacity"] = 2**31
    (tmp_path / "one.kvkeep").write_bytes(joined(header, found, tensors))
    cache = BoundedCache.from_snapshots(model().config, [Snapshot.load(tmp_path / "one.kvkeep")])
    assert cache.memory().allocated_bytes < 10_000


def test_a_budget_that_no_memory_holds(good, tmp_path):
    header, found, tensors = parts(good)
    found["fingerprint"]["budget"] = 2**36
    (tmp_path / "one.kvkeep").write_bytes(joined(header, found, tensors))
    with pytest.raises(SnapshotError, match="memory"):
        BoundedCache.from_snapshots(model().config, [Snapshot.load(tmp_path / "one.kvkeep")])
