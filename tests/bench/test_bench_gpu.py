"""bench/gpu.py in its smallest form on a CPU: every part, their order, resuming, and what it says without a GPU."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from kvkeep.backends.torch import TorchBackend

BENCH = Path(__file__).parents[2] / "bench"
if not BENCH.is_dir():
    pytest.skip("the benchmarks are not part of this copy", allow_module_level=True)


pytestmark = pytest.mark.usefixtures("scripts")


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", *arguments])
    assert import_module("gpu").main() == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return "\n".join(lines), json.loads(last)


@pytest.mark.slow
def test_all_parts(monkeypatch, capsys, tmp_path):
    out = tmp_path / "gpu.json"
    text, data = run(monkeypatch, capsys, "--out", str(out))
    assert data["notes"] == []
    assert list(data["parts"]) == ["k", "a", "h", "c", "d", "b", "f", "e"]
    parts = data["parts"]
    assert len(parts["k"]) == 6 + 8 + 2 * 5 + 1  # outputs, fields of reports, policies, recorded steps
    assert all(one["error"] <= one["limit"] for one in parts["k"])
    assert [(one["rows"], one["bytes"]) for one in parts["a"]] == [
        (1, 2 * 8 * 2 * 16 * 4 + 8 * 2 * 8),
        (2, 2 * (2 * 8 * 2 * 16 * 4 + 8 * 2 * 8)),
    ]
    assert [one["bits"] for one in parts["h"]] == 2 * ["16", "8", "4", "k8v4"]
    assert all(one["faster"] > 0 and one["bytes"] < parts["h"][4]["bytes"] for one in parts["h"][5:])
    assert [one["name"] for one in parts["c"]] == ["SDPA", "local", "h2o", "ahakv", "scissorhands", "tova"]
    assert parts["c"][1]["vs local"] == 1.0
    assert parts["d"][0]["vs SDPA"]["SDPA"] == 1.0
    assert [(one["name"], one["attended"]) for one in parts["b"]] == [
        *(("kvkeep local", 9), ("kvkeep h2o", 9), ("DynamicCache", 13), ("StaticCache", 13))
    ]
    assert all(one["tokens_per_s"] > 0 and one["rows"] == 2 for one in parts["b"])
    assert [one["history"] for one in parts["f"]] == [16, 16, 32, 32]
    assert {one["name"]: one["tokens"] for one in parts["e"]} == {"kvkeep h2o": 6, "transformers": 6}
    assert all(one["complete"] for one in parts["e"])
    for title in ("(k)", "(a)", "(b)", "(c)", "(d)", "(e)", "(f)", "(h)", "targets"):
        assert title in text
    assert json.loads(out.read_text())["parts"].keys() == parts.keys()


@pytest.mark.slow
def test_a_kernel_that_is_wrong_is_named(monkeypatch, capsys):
    import_module("gpu")
    check = import_module("lib.gpu_check")

    class Wrong(TorchBackend):
        def attend(self, inputs):
            out, report = super().attend(inputs)
            return (out * torch.nan if out.dtype == torch.float16 else out), report

    monkeypatch.setattr(check, "choose", lambda device, dtype: Wrong())
    _, data = run(monkeypatch, capsys, "--only", "k")
    wrong = [one["name"] for one in data["parts"]["k"] if one["error"] > one["limit"]]
    assert wrong == ["token, float16, head dim 256, Low: output", "prompt, float16, head dim 64, Low: output"]
    assert data["notes"] == [f"k: WRONG, so no other figure means anything: {'; '.join(wrong)}"]


@pytest.mark.slow
def test_what_is_done_is_not_done_again(monkeypatch, capsys, tmp_path):
    out = tmp_path / "gpu.json"
    run(monkeypatch, capsys, "--only", "d,a", "--out", str(out))
    gpu = import_module("gpu")
    done = []
    monkeypatch.setattr(
        gpu, "PARTS", {name: (room, lambda b, n=name: done.append(n) or []) for name, (room, _) in gpu.PARTS.items()}
    )
    _, data = run(monkeypatch, capsys, "--out", str(out))
    assert done == ["k", "h", "c", "b", "f", "e"]
    assert list(data["parts"]) == ["a", "d"]
    done.clear()
    run(monkeypatch, capsys, "--out", str(out), "--only", "a")
    assert done == ["a"]


def test_a_write_that_fails_leaves_the_parts_of_before(monkeypatch, capsys, tmp_path):
    gpu, out = import_module("gpu"), tmp_path / "gpu.json"
    out.write_text(json.dumps({"device": "dry run", "parts": {}}))
    before = out.read_text()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    monkeypatch.setitem(gpu.PARTS, "a", (gpu.layer, lambda bench: [{"rows": 1, "slots": 8, "share": 0.5}]))
    monkeypatch.setattr(gpu.layer, "lines", lambda *_: ("a", [""], []))
    with pytest.raises(OSError, match="No space"):
        run(monkeypatch, capsys, "--only", "a", "--out", str(out))
    assert out.read_text() == before


def test_a_part_that_fails_and_a_time_that_is_over_are_noted(monkeypatch, capsys):
    gpu = import_module("gpu")

    def fails(bench):
        raise ValueError("no such thing")

    monkeypatch.setitem(gpu.PARTS, "a", (gpu.layer, fails))
    _, data = run(monkeypatch, capsys, "--only", "a,c", "--limit-s", "0")
    assert data["parts"] == {}
    assert data["notes"] == [
        "a: failed: ValueError: no such thing",
        "c: SDPA and what follows was not run: the time was over",
    ]


@pytest.mark.slow
def test_a_cell_that_fails_does_not_take_the_others_with_it(monkeypatch, capsys):
    gpu, model = import_module("gpu"), import_module("lib.gpu_model")
    honest = model.dense_step

    def dense_step(bench, kind, rows, tokens):
        if kind == "DynamicCache":
            raise RuntimeError("no kernel image is available\nfor this device")
        return honest(bench, kind, rows, tokens)

    monkeypatch.setattr(model, "dense_step", dense_step)
    _, data = run(monkeypatch, capsys, "--only", "b")
    assert [one["name"] for one in data["parts"]["b"]] == ["kvkeep local", "kvkeep h2o", "StaticCache"]
    assert data["notes"] == ["b: DynamicCache, 12: failed: RuntimeError: no kernel image is available"]
    assert gpu.targets(data["parts"]) == data["targets"]


def test_a_device_that_is_lost_ends_it_with_what_there_is(monkeypatch, capsys):
    import_module("gpu")
    layer, shared = import_module("lib.gpu_layer"), import_module("lib.gpu")
    honest, tidy = layer._bandwidth, shared.Bench.tidy
    lost = []

    def bandwidth(bench, rows, slots):
        if rows == 2:
            lost.append(1)
            raise RuntimeError("an illegal memory access was encountered")
        return honest(bench, rows, slots)

    def fails(bench):
        if lost:
            raise RuntimeError("an illegal memory access was encountered")
        tidy(bench)

    monkeypatch.setattr(layer, "_bandwidth", bandwidth)
    monkeypatch.setattr(shared.Bench, "tidy", fails)
    _, data = run(monkeypatch, capsys, "--only", "a,c")
    assert [one["rows"] for one in data["parts"]["a"]] == [1]
    assert data["notes"] == [
        "a: 2 x 8: failed: RuntimeError: an illegal memory access was encountered",
        "c: SDPA and what follows was not run: the device does not answer any more",
    ]


@pytest.mark.slow
def test_a_step_that_is_too_large_to_be_recorded_is_tried_with_fewer_rows(monkeypatch):
    model, shared = import_module("lib.gpu_model"), import_module("lib.gpu")
    bench = shared.Bench(torch.device("cpu"), shared.DRY)
    graphs = import_module("kvkeep.engine.cuda_graphs")
    honest = graphs.Graphs._record

    def record(self, policy, size, rows):
        if size > 1:
            raise graphs.WaitError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return honest(self, policy, size, rows)

    monkeypatch.setattr(graphs.Graphs, "_record", record)
    cell = model._largest_batch(bench, "local", 8)[0]
    assert cell["rows"] == 1
    assert bench.notes == []


@pytest.mark.slow
def test_what_does_not_fit_is_tried_with_fewer_rows():
    model, shared = import_module("lib.gpu_model"), import_module("lib.gpu")
    bench = shared.Bench(torch.device("cpu"), shared.DRY)
    tried = []

    def run(rows):
        tried.append(rows)
        if rows > 70:
            raise torch.OutOfMemoryError
        return {"rows": rows}

    assert model.shrinking(bench, 100, run) == {"rows": 61}
    assert tried == [100, 85, 72, 61]
    assert model.shrinking(bench, 1000, run) is None
    assert model.shrinking(bench, 0, run) is None
    tried.clear()
    bench.end = 0.0
    assert model.shrinking(bench, 1000, run) is None
    assert tried == [1000]  # each attempt takes its time


def test_targets():
    gpu = import_module("gpu")
    parts = {
        "a": [
            {"rows": 64, "slots": 1024, "share": 0.8},
            {"rows": 64, "slots": 2048, "share": 0.7},
            {"rows": 1, "slots": 2048, "share": 0.1},
        ],
        "b": [
            {"name": "kvkeep h2o", "attended": 1025, "mbu": 0.7, "tokens_per_s": 500.0},
            {"name": "DynamicCache", "attended": 32769, "mbu": 0.7, "tokens_per_s": 10.0},
            {"name": "StaticCache", "attended": 32769, "mbu": 0.7, "tokens_per_s": 20.0},
        ],
        "c": [{"name": "h2o", "vs local": 1.04}],
        "d": [
            {"vs SDPA": {"SDPA + window": 1.1, "SDPA + all rows": 1.5}},
            {"vs SDPA": {"SDPA + window": 1.3, "SDPA + all rows": 1.4}},
        ],
        "h": [
            {"rows": 1, "bits": "8", "faster": 0.5},
            {"rows": 64, "bits": "8", "faster": 1.7},
            {"rows": 64, "bits": "4", "faster": 2.1},
        ],
    }
    found = [(one["measured"], one["met"]) for one in gpu.targets(parts).values()]
    assert found == [
        *((0.7, False), (1.04, True), (0.7, True), (25.0, True), (1.3, False)),
        *((1.5, True), (1.7, True), (2.1, False)),
    ]
    assert gpu.targets({}) == {}


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert import_module("gpu").main() == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_parts_have_names():
    gpu = import_module("gpu")
    assert gpu.letters("a,d") == ["a", "d"]
    with pytest.raises(gpu.argparse.ArgumentTypeError, match="there are a,b,c,d,e,f,h,k"):
        gpu.letters("a,x")
