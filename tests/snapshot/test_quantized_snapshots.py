"""Memory of 8 and 4 bits as an object: saved and restored bit for bit, and refused where other bits are."""

import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from snapshot_models import bounded, feed, ids, model

from kvkeep import BoundedCache, Snapshot
from kvkeep.errors import SnapshotError
from kvkeep.kv_bits import KV_BITS
from kvkeep.snapshot import snapshot as snapshots


@pytest.fixture(params=["llama", "gemma2", "falcon-h1"])
def net(request):
    return model(request.param)


IDS = ids(1)


def fed(net, kv_bits, *, positions=None):
    """A cache after a prompt and some generated tokens."""
    cache = bounded(net, kv_bits=kv_bits, positions=positions)
    feed(net, cache, IDS, 0, 25)
    return cache


def future(net, cache):
    return feed(net, cache, IDS, 25, 32)


def slots_of(cache):
    return [layer.block.per_row() for layer in cache.bounded_layers().values()]


@pytest.mark.parametrize("kv_bits", KV_BITS)
def test_a_file_gives_back_every_code_and_the_same_future(net, kv_bits, tmp_path):
    cache = fed(net, kv_bits)
    cache.snapshot().save(tmp_path / "memory")
    other = BoundedCache.from_snapshots(net.config, [Snapshot.load(tmp_path / "memory")])
    assert other.snapshot().fingerprint.kv_bits == kv_bits
    for one, two in zip(slots_of(cache), slots_of(other), strict=True):
        held = one["store.positions"] >= 0
        assert torch.equal(one["store.positions"], two["store.positions"])
        for name in ("keys", "key_scales", "values", "value_scales"):
            name = f"store.{name}"
            assert one[name].dtype == two[name].dtype
            assert torch.equal(one[name][held], two[name][held])
    assert torch.equal(future(net, cache), future(net, other))


@pytest.mark.parametrize("positions", ["true", "slot"])
def test_a_row_of_a_batch_is_restored_with_its_codes(positions):
    net = model("llama")
    cache = fed(net, "4", positions=positions)
    kept = cache.snapshot()
    want = future(net, cache)
    cache.restore(0, kept)
    assert torch.equal(future(net, cache), want)


def test_memory_of_other_bits_is_refused():
    net = model("llama")
    cache = fed(net, "4")
    for kv_bits, shown in (("8", "8"), (None, "None")):
        with pytest.raises(SnapshotError, match=rf"kv_bits \(4 in the snapshot, {shown} here\)"):
            bounded(net, kv_bits=kv_bits).restore(0, cache.snapshot())
    plain = fed(net, None)
    with pytest.raises(SnapshotError, match=r"kv_bits \(None in the snapshot, 8 here\)"):
        bounded(net, kv_bits="8").restore(0, plain.snapshot())


def test_a_file_is_smaller_by_the_bits(tmp_path):
    """At head dim 8 scale and offset are as much as eight numbers of 4 bits; at 64 see `test_bytes_of_a_token`."""
    sizes = {}
    for kv_bits in (None, *KV_BITS):
        fed(model("llama"), kv_bits).snapshot().save(tmp_path / "memory")
        sizes[kv_bits] = (tmp_path / "memory").stat().st_size
    assert max(sizes["4"], sizes["k8v4"]) < sizes[None]
    assert sizes["8"] < sizes[None]


WRONG = {
    "bits that do not exist": (rb"\"kv_bits\":\"4\"", rb"\"kv_bits\":\"5\"", "kv_bits are '5'"),
    "other bits": (rb"\"kv_bits\":\"4\"", rb"\"kv_bits\":\"8\"", "has needless exponents of its keys"),
    "no dtype": (rb"\"dtype\":\"float32\"", rb"\"dtype\":\"save___\"", "dtype is 'save___'"),
    "scales of another name": (b"key_scales", b"key_scalez", "has 1 of two tensors of scales"),
    "scales of another dtype": (b'"F16"', b'"I16"', "dtype"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_changed_file_is_refused(case, tmp_path):
    old, new, said = WRONG[case]
    file = tmp_path / "memory"
    fed(model("llama"), "4").snapshot().save(file)
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new))
    with pytest.raises(SnapshotError, match=said):
        snapshots.load(file)


def rewritten(file, change):
    """Change the tensors of a file; ``change`` gets a name and a tensor, and returns a tensor, or ``None`` for none."""
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    changed = {name: change(name, tensor) for name, tensor in load_file(file).items()}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file, about)


@pytest.mark.parametrize("name", ["key_scales", "value_scales"])
@pytest.mark.parametrize(("place", "number"), [(-2, math.nan), (-2, math.inf), (-2, -1.0), (-1, math.nan)])
def test_scales_and_offsets_that_no_code_has_are_refused(name, place, number, tmp_path):
    """They would make the logits of the next step NaN."""
    file = tmp_path / "memory"
    fed(model("llama"), "4").snapshot().save(file)

    def change(key, tensor):
        if key.endswith(name):
            tensor[..., place] = number
        return tensor

    rewritten(file, change)
    with pytest.raises(SnapshotError, match="scales that are negative or no numbers"):
        snapshots.load(file)


def test_a_file_with_codes_of_4_bits_without_offsets_is_refused_with_a_remedy(tmp_path):
    file = tmp_path / "memory"
    fed(model("llama"), "k8v4").snapshot().save(file)
    rewritten(file, lambda key, x: x[..., ::2].contiguous() if key.endswith("value_scales") else x)
    with pytest.raises(SnapshotError, match=r"an earlier version wrote it.*read the text again"):
        snapshots.load(file)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("key_normals", lambda x: x + math.nan, "normals of no reflections"),
        ("key_normals", lambda x: x + 1, "normals of no reflections"),
        ("key_normals", lambda x: x.half(), "normals that are no float32"),
        ("key_exponents", lambda x: x.fill_(16), "exponents of its keys beyond 15"),
        ("key_exponents", lambda x: x.int(), "exponents that are no int8"),
    ],
)
def test_transforms_that_change_products_are_refused(name, change, said, tmp_path):
    file = tmp_path / "memory"
    fed(model("llama"), "4").snapshot().save(file)
    rewritten(file, lambda key, x: change(x) if key.endswith(name) else x)
    with pytest.raises(SnapshotError, match=said):
        snapshots.load(file)


@pytest.mark.parametrize("name", ["key_exponents", "key_normals"])
def test_a_file_without_what_was_done_to_keys_is_refused_with_a_remedy(name, tmp_path):
    file = tmp_path / "memory"
    fed(model("llama"), "4").snapshot().save(file)
    rewritten(file, lambda key, x: None if key.endswith(name) else x)
    with pytest.raises(SnapshotError, match=r"an earlier version wrote it.*read the text again"):
        snapshots.load(file)


@pytest.mark.parametrize(
    "change", [lambda x: x.repeat(1, 2, 1), lambda x: x[:1], lambda x: x[:, :0], lambda x: x[0, 0]]
)
def test_normals_of_another_shape_are_refused(change, tmp_path):
    file, net = tmp_path / "memory", model("llama")
    fed(net, "4").snapshot().save(file)
    rewritten(file, lambda key, x: change(x).contiguous() if key.endswith("key_normals") else x)
    with pytest.raises(SnapshotError, match="key_normals of a row has the shape"):
        BoundedCache.from_snapshots(net.config, [Snapshot.load(file)])


def test_a_file_cut_anywhere_is_refused(tmp_path):
    file = tmp_path / "memory"
    fed(model("llama"), "4").snapshot().save(file)
    content = file.read_bytes()
    for end in range(0, len(content), len(content) // 23):
        file.write_bytes(content[:end])
        with pytest.raises(SnapshotError):
            snapshots.load(file)
