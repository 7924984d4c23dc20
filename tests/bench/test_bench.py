"""The benchmarks of speed, memory and peers, each in its smallest form and in this process; bytes by hand."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import weakref
from importlib import import_module
from pathlib import Path

import model_folders
import pytest
import torch
from transformers import LlamaConfig

import kvkeep
from kvkeep.models.packed_weights import PackedLinear
from kvkeep.models.tiny import embedded
from kvkeep.planning.bandwidth import Bandwidth

BENCH = Path(__file__).parents[2] / "bench"
if not BENCH.is_dir():
    pytest.skip("the benchmarks are not part of this copy", allow_module_level=True)

SMALL = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    eos_token_id=None,
)


@pytest.fixture(autouse=True)
def bench(scripts, monkeypatch):
    """The scripts with a small model."""
    monkeypatch.setattr(import_module("lib"), "SPEED_MODEL", SMALL)


def run(name, monkeypatch, capsys, *arguments):
    """What a script prints: lines for people, and its data."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--layers", "1", "--threads", "1", *arguments])
    import_module(name).main()
    *lines, last = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    return "\n".join(lines), json.loads(last)


@pytest.fixture
def here(monkeypatch):
    """Peers run in this process; continuous batching, which starts threads, and kvpress are not there."""
    cells, child = import_module("lib.cells"), import_module("peers.__main__")
    monkeypatch.setitem(sys.modules, "kvpress", None)
    monkeypatch.setitem(sys.modules, "openvino", None)

    def measure(system, work):
        if system.peer == "transformers_batch":
            return {"skipped": "not in this test"}
        return child.measure(system.peer, work)

    monkeypatch.setattr(cells, "run", measure)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_bench_runs_nothing_that_asks_for_more():
    """One script with a required argument would end the loop, and with it all that come after."""
    made = subprocess.run(["make", "-n", "bench"], cwd=BENCH.parent, capture_output=True, text=True, check=True).stdout
    names = {*re.findall(r"bench/(\w+)\.py", made)}
    assert {"decode", "quality", "stream"} < names
    for name in names:
        text = (BENCH / f"{name}.py").read_text()
        assert not re.search(r'required=True|add_argument\(\s*"[a-z]|\.is_available\(\)|find_spec\("ray"', text), name


def test_bytes_by_hand():
    lib, sizes = import_module("lib"), import_module("lib.sizes")
    model = lib.speed_model(torch.bfloat16, 1)
    attention, mlp, norms, logits = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 48, 3 * 32, 64 * 32
    assert sizes.weight_bytes(model) == 2 * (attention + mlp + norms + logits)
    assert sizes.token_bytes(SMALL, torch.float32) == 3 * 2 * (8 + 8) * 4
    # h2o: one float32 beside each position
    assert sizes.bounded_row_bytes(SMALL, torch.float32, "h2o", 9) == 3 * (10 * 2 * (16 * 4 + 4 + 4) + 24 + 16 * 2)


def test_a_filled_cache_is_one_that_has_seen_so_many_tokens():
    lib, sizes, peer = (import_module(name) for name in ("lib", "lib.sizes", "peers.kvkeep"))
    model = lib.speed_model(torch.float32, 3)
    cache = peer.filled_cache(model, "h2o", 6, rows=2, tokens=20)
    assert cache.memory().allocated_bytes == 2 * sizes.bounded_row_bytes(SMALL, torch.float32, "h2o", 6)
    held = cache.positions(1)
    assert held[..., 3:6].eq(torch.tensor([17, 18, 19])).all()
    assert held[..., :3].lt(17).all()
    assert held[..., :3].diff().gt(0).all()
    model(input_ids=torch.zeros((2, 1), dtype=torch.long), past_key_values=cache)
    assert (cache.positions(1) == 20).any(dim=-1).all()
    assert (cache.positions(1) >= 0).sum(dim=-1).eq(6).all()


@pytest.mark.parametrize("kind", ["dynamic", "static", "full"])
def test_dense_caches_are_filled_with_the_same_number_of_tokens(kind):
    lib, ours, theirs = (import_module(name) for name in ("lib", "peers.kvkeep", "peers.transformers"))
    model = lib.speed_model(torch.float32, 1, attach=kind == "full")
    make = {
        "dynamic": lambda: theirs.dynamic_cache(model, rows=2, tokens=5),
        "static": lambda: theirs.static_cache(model, rows=2, tokens=5, room=2),
        "full": lambda: ours.filled_cache(model, "full", 7, rows=2, tokens=5),
    }
    cache = make[kind]()
    assert int(cache.get_seq_length()) == 5
    model(input_ids=torch.zeros((2, 1), dtype=torch.long), past_key_values=cache)
    assert int(cache.get_seq_length()) == 6


@pytest.mark.long
def test_real(monkeypatch, capsys, here):
    words = ["--rows", "2", "--contexts", "20", "--budget", "8", "--new", "4", "--repeats", "1", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["real.py", str(model_folders.folder()), *words])
    import_module("real").main()
    *lines, last = capsys.readouterr().out.splitlines()
    (cell,) = json.loads(last)["cells"]
    assert max(map(len, lines)) <= 100
    ours = ["kvkeep 8", "kvkeep 20%", "kvkeep full"]
    assert [*cell["systems"]] == [*ours, "transformers", "llama.cpp", "OpenVINO GenAI", "the same, evicting", "vLLM"]
    assert "skipped" in cell["systems"]["OpenVINO GenAI"][0]
    full, theirs = (cell["systems"][name][0]["sample"] for name in ("kvkeep full", "transformers"))
    assert full == theirs


def test_pieces_of_a_text_that_is_too_short_for_all_rows_overlap(monkeypatch):
    real = import_module("real")

    class Letters:
        def encode(self, text, add_special_tokens):
            return list(range(100))

    assert real.pieces(Letters(), 2, 30) == [[*range(30)], [*range(30, 60)]]
    three = real.pieces(Letters(), 3, 50)
    assert [(piece[0], len(piece)) for piece in three] == [(0, 50), (25, 50), (50, 50)]
    # refused before anything is measured, also if only the last cell asks for it
    monkeypatch.setattr(real, "loaded", lambda model: real.LoadedModel(Letters(), "float32", 9))
    monkeypatch.setattr(real, "cell", lambda *_: pytest.fail("was measured"))
    monkeypatch.setattr(sys, "argv", ["real.py", "M", "--rows", "1", "--contexts", "30", "101"])
    with pytest.raises(SystemExit, match="has 100 tokens, too few for 1 rows of 101"):
        real.main()


def test_decode(monkeypatch, capsys):
    decode = import_module("decode")
    monkeypatch.setattr(decode, "measure_bandwidth", lambda device: Bandwidth(1e9, 5e8))
    words = ["--rows", "2", "--contexts", "20", "--repeats", "2", "--budgets", "50%", "8", "512"]
    text, data = run("decode", monkeypatch, capsys, *words)
    (cell,) = data["cells"]
    assert list(cell["systems"]) == ["DynamicCache", "StaticCache", "kvkeep full", "h2o 8 (40%)", "h2o 10 (50%)"]
    assert cell["groups"] == [list(cell["systems"])]
    assert "2 rows x 20 tokens, float32, steps interleaved" in text
    per_token = 2 * 2 * (8 + 8) * 4
    bytes_of = {name: system["bytes"] - data["weights"] for name, system in cell["systems"].items()}
    assert bytes_of["DynamicCache"] == bytes_of["kvkeep full"] == 21 * per_token
    assert bytes_of["h2o 8 (40%)"] == 9 * per_token
    one = cell["systems"]["h2o 8 (40%)"]
    assert len(one["ms"]) == 2
    assert one["mbu"] == pytest.approx(one["bytes"] / (sum(one["ms"]) / 2 / 1e3) / 1e9)


def test_decode_over_codes(monkeypatch, capsys):
    decode = import_module("decode")
    monkeypatch.setattr(decode, "measure_bandwidth", lambda device: Bandwidth(1e9, 5e8))
    words = ["--rows", "2", "--contexts", "20", "--repeats", "1", "--budgets", "8", "--bits", "16", "8", "k8v4"]
    _, data = run("decode", monkeypatch, capsys, *words)
    found = data["cells"][0]["systems"]
    assert list(found)[3:] == ["h2o 8 (40%)", "h2o 8 (40%), 8", "h2o 8 (40%), k8v4"]
    # two rows of two heads of 8 channels: codes and one scale for a key and for a value; with 4 bits an offset, too
    assert found["h2o 8 (40%), 8"]["bytes"] - data["weights"] == 2 * 2 * 9 * (8 + 2 + 8 + 2)
    assert found["h2o 8 (40%), k8v4"]["bytes"] - data["weights"] == 2 * 2 * 9 * (8 + 2 + 4 + 4)


def test_decode_with_compiled_layers(monkeypatch, capsys):
    decode = import_module("decode")
    monkeypatch.setattr(decode, "measure_bandwidth", lambda device: Bandwidth(1e9, 5e8))
    compiled = []
    monkeypatch.setattr(kvkeep, "compile_layers", lambda model: compiled.append(model) or 5)
    monkeypatch.setattr("kvkeep.models.packed_weights.faster", lambda layers, rows: True)
    words = ["--rows", "2", "--contexts", "20", "--repeats", "1", "--budgets", "8", "--compile"]
    text, data = run("decode", monkeypatch, capsys, *words)
    assert list(data["cells"][0]["systems"])[3:] == ["h2o 8 (40%)", "h2o 8 (40%), compiled"]
    assert "Layers compiled: 5" in text
    (model,) = compiled
    assert isinstance(model.lm_head, PackedLinear) == torch.backends.mkldnn.is_available()
    run("decode", monkeypatch, capsys, *words, "--no-pack")
    assert not isinstance(compiled[1].lm_head, PackedLinear)


@pytest.mark.slow
def test_decode_steps_for_a_gpu_with_compiled_layers():
    shared, model = import_module("lib.gpu"), import_module("lib.gpu_model")
    bench = shared.Bench(torch.device("cpu"), shared.DRY, compile=True)
    found = model.decode(bench)
    assert [one["name"] for one in found[:3]] == ["kvkeep local", "kvkeep h2o", "kvkeep h2o, compiled"]
    assert bench.notes == []
    compiled = [part for part in bench.compiled.modules() if part._compiled_call_impl is not None]
    assert len(compiled) == 2 * 3
    assert not [part for part in bench.model.modules() if part._compiled_call_impl is not None]


def test_a_twin_shares_weights_and_nothing_else():
    lib = import_module("lib")
    model = lib.speed_model(layers=1)
    kvkeep.pack_weights(model)
    other = lib.twin(model)
    ids = torch.tensor([[3, 1, 4]])
    torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert other.model.layers[0].mlp is not model.model.layers[0].mlp
    shared = zip(model.parameters(), other.parameters(), strict=True)
    assert all(one is two for one, two in shared)


def test_decode_takes_turns_when_caches_do_not_fit_together(monkeypatch, capsys):
    decode = import_module("decode")
    monkeypatch.setattr(decode, "measure_bandwidth", lambda device: Bandwidth(1e9, 5e8))
    alive, most = weakref.WeakSet(), []
    stepper = decode.stepper

    def counted(model, cache, token):
        alive.add(cache)
        most.append(len(alive))
        return stepper(model, cache, token)

    monkeypatch.setattr(decode, "stepper", counted)
    words = ["--rows", "1", "--contexts", "20", "--repeats", "3", "--budgets", "4", "--memory", str(21 * 128 / 2**30)]
    text, data = run("decode", monkeypatch, capsys, *words)
    (cell,) = data["cells"]
    assert cell["groups"] == [["DynamicCache"], ["StaticCache"], ["kvkeep full"], ["h2o 4 (20%)"]]
    assert most == [1] * 12  # four systems in three blocks, one cache at a time
    assert all(len(system["ms"]) == 3 for system in cell["systems"].values())
    assert "4 groups of systems in turn" in text


def test_kernel(monkeypatch, capsys):
    monkeypatch.setattr(import_module("kernel"), "BUFFER_BYTES", 2**16)
    words = ["--shapes", "1x5", "2x3", "--dtypes", "bfloat16", "--repeats", "2", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["kernel.py", *words])
    import_module("kernel").main()
    *lines, last = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    one, two = json.loads(last)["cells"]
    # keys and values of 64 numbers, a position and a mass, for 4 heads
    assert (one["bytes"], two["bytes"]) == (5 * 4 * (2 * 64 * 2 + 8), 6 * 4 * (2 * 64 * 2 + 8))
    assert one["moved"] == pytest.approx(one["bytes"] / (sum(one["attend_s"]) / 2))
    assert len(two["torch_s"]) == 2


def test_kernel_over_codes(monkeypatch, capsys):
    monkeypatch.setattr(import_module("kernel"), "BUFFER_BYTES", 2**16)
    words = ["--shapes", "2x3", "--dtypes", "float32", "--bits", "16", "8", "k8v4", "--repeats", "2", "--dim", "128"]
    monkeypatch.setattr(sys, "argv", ["kernel.py", *words, "--threads", "1"])
    import_module("kernel").main()
    *lines, last = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    found = {cell["bits"]: cell for cell in json.loads(last)["cells"]}
    # a key and a value of 128 channels, two scales each, a position and a mass, for 4 heads; at 4 bits two offsets, too
    assert found["8"]["bytes"] == 6 * 4 * (2 * (128 + 2 * 2) + 8)
    assert found["k8v4"]["bytes"] == 6 * 4 * (128 + 64 + 4 * 2 + 2 * 2 + 8)
    assert (found["16"]["ratio"], found["8"]["torch_s"]) == (1.0, [])


def test_products(monkeypatch, capsys):
    text, data = run("products", monkeypatch, capsys, "--rows", "1", "3", "--dtypes", "float32", "--repeats", "2")
    # queries and output 32 x 32, keys and values 32 x 16, three times 32 x 48; the head is a table of 64 x 32
    flop = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 64 * 32)
    assert [cell["flop"] for cell in data["cells"]] == [flop, 3 * flop]
    assert all(len(cell[f"{name}_s"]) == 2 for cell in data["cells"] for name in ("plain", "packed"))
    assert "3 rows" in text


@pytest.mark.slow
def test_joined(monkeypatch, capsys):
    words = ["--chunk", "6", "--prompts", "2", "--decoding", "2", "--budget", "8", "--repeats", "2"]
    text, data = run("joined", monkeypatch, capsys, *words)
    assert "2 x 6 prompt tokens, 2 rows decode" in text
    assert {name: len(times) for name, times in data["ms"].items()} == dict.fromkeys(data["ms"], 2)


def test_each_prompt_that_is_joined_is_read():
    """None of them waits for an equal one."""
    joined = import_module("joined")
    options = {"dtype": "float32", "layers": 1, "decoding": 2, "prompts": 3, "budget": 8, "chunk": 300}
    engine, prompts, _ = joined.engine_of(joined.argparse.Namespace(**options))
    assert [len(one.prompt) for one in prompts] == [300] * 3
    engine.close()


def test_overhead(monkeypatch, capsys):
    text, data = run("overhead", monkeypatch, capsys, "--rows", "2", "--budget", "40", "--repeats", "2")
    assert data["policies"]["local"]["step_ratio"] == data["policies"]["local"]["layer_ratio"] == 1.0
    assert {"h2o", "ahakv", "scissorhands"} <= data["policies"].keys()
    assert "2 rows x 40 slots" in text
    _, data = run("overhead", monkeypatch, capsys, "--budget", "40", "--repeats", "2", "--policies", "h2o+ada@4")
    assert data["policies"].keys() == {"local", "h2o+ada@4"}


@pytest.mark.slow
def test_mixed(monkeypatch, capsys):
    words = ["--each", "2", "--budget", "40", "--prompt", "3", "--new", "4", "--repeats", "2"]
    text, data = run("mixed", monkeypatch, capsys, *words)
    assert data["same"] == 8
    assert [len(seconds) for seconds in data["seconds"].values()] == [2, 2, 2]
    assert "8 of 8 requests have the same tokens" in text


@pytest.mark.slow
def test_sessions(monkeypatch, capsys):
    sessions = import_module("sessions")
    small = sessions.Sizes(text=40, sessions=3, turns=2, rows=2, prompt=300, answers=3)
    monkeypatch.setattr(sessions, "SHORT", small)
    monkeypatch.setattr(sessions, "LONG", 12)
    text, data = run("sessions", monkeypatch, capsys, "--budget", "16", "--chunk", "8", "--repeats", "1")
    ratios = {one["what"]: one["ratio"] for one in data["findings"]}
    assert len(ratios) == len(data["findings"]) == 9
    assert ratios["memory of the rows afterwards"] == 1
    assert all(ratio > 0 for ratio in ratios.values())
    assert "6 turns of 3 sessions" in text


@pytest.mark.long
def test_host_rows(monkeypatch, capsys):
    sizes = ("--rows", "1", "--requests", "3", "--prompt", "6", "--new", "12", "--budget", "8")
    text, data = run("host_rows", monkeypatch, capsys, *sizes)
    plain, turns = data["runs"]
    assert (plain["host_rows"], plain["swaps"], turns["host_rows"]) == (0, 0, 2)
    assert turns["swaps"] >= 1
    assert [one["staged"] for one in data["runs"]] == [False, False]  # on a CPU steps wait for all copies
    assert turns["copy_s"] > 0 == plain["copy_s"]
    assert all(len(one["first_s"]) == 3 and one["tokens_per_s"] > 0 for one in data["runs"])
    assert "slots in main memory" in text


def test_throughput(monkeypatch, capsys, here):
    # a token of one layer is 128 bytes: 24 + 6 take 29 * 128, so 1 MiB holds 282 rows of a dense cache
    words = ["--kv-mib", "1", "--workloads", "24+6", "--scale", "0.002", "--policy", "local"]
    text, data = run("throughput", monkeypatch, capsys, *words)
    (cell,) = data["cells"]
    assert cell["requests"] == round(0.002 * (2**20 // (7 * 2 * (64 + 4) + 24 + 16 * 2)))
    assert set(cell["tokens_per_s"]) == {"kvkeep local 20%", "kvkeep full", "transformers"}
    assert all(found[0]["new_tokens"] == 6 * cell["requests"] for found in cell["runs"].values() if "rows" in found[0])
    assert cell["runs"]["kvkeep full"][0]["sample"] == cell["runs"]["transformers"][0]["sample"]
    assert "kvpress SnapKV: import of kvpress halted" in text
    assert "make peers" in text
    assert "generate_batch: not in this test" in text


def test_batches_are_as_large_as_fits():
    throughput = import_module("throughput")
    options = throughput.argparse.Namespace(
        kv_mib=1, layers=1, dtype="float32", ratio=0.2, policy="h2o", chunk=512, limit_s=None, bits=["16", "4"]
    )
    systems = {system.name: system.options for system in throughput.systems(24, 6, options)}
    assert systems["transformers"]["rows"] == 2**20 // (29 * 128)
    assert systems["kvkeep full"]["budget"] == 29
    assert systems["kvkeep h2o 20%"]["budget"] == systems["kvkeep h2o 20%, 4"]["budget"] == 6
    assert [systems[f"kvkeep h2o 20%{bits}"]["kv_bits"] for bits in ("", ", 4")] == [None, "4"]


@pytest.mark.long
def test_throughput_with_fewer_bits(monkeypatch, capsys, here):
    words = ["--kv-mib", "1", "--workloads", "24+6", "--scale", "0.001", "--policy", "local", "--bits", "16", "4"]
    _, data = run("throughput", monkeypatch, capsys, *words)
    (cell,) = data["cells"]
    codes = 8 // 2 + 4  # half a byte for each channel, and a scale and an offset of two bytes
    transform = 2 * 8 * (1 + 4)  # an exponent and a normal's number for each channel of a row's keys
    assert cell["requests"] == round(0.001 * (2**20 // (7 * 2 * (2 * codes + 4) + 24 + 16 * 2 + transform)))
    plain, coded = (cell["runs"][f"kvkeep local 20%{bits}"][0] for bits in ("", ", 4"))
    assert (plain["requests"], plain["new_tokens"]) == (coded["requests"], coded["new_tokens"])


def test_systems_can_be_left_out():
    cells = import_module("lib.cells")
    systems = [cells.System("one", "kvkeep", {}), cells.System("two words", "kvpress", {})]
    parser = cells.leaving_out(cells.argparse.ArgumentParser())
    assert cells.asked(systems, parser.parse_args([])) == systems
    assert cells.asked(systems, parser.parse_args(["--without", "two words"])) == systems[:1]
    with pytest.raises(SystemExit, match="only one, two words"):
        cells.asked(systems, parser.parse_args(["--without", "three"]))


@pytest.mark.long
def test_latency(monkeypatch, capsys, here):
    words = ["--rows", "1", "2", "--contexts", "12", "--new", "3", "--budget", "16", "--chunk", "5"]
    text, data = run("latency", monkeypatch, capsys, *words)
    one, two = data["cells"]
    assert set(one["systems"]) - set(two["systems"]) == {"kvpress SnapKV"}  # it takes one prompt
    assert "generate_batch: not in this test" in text
    for cell in (one, two):
        (ours,), (dense,), (theirs,) = (cell["systems"][k] for k in ("kvkeep h2o 16", "kvkeep full", "transformers"))
        assert ours["sample"] == dense["sample"] == theirs["sample"]  # nothing is evicted
        assert len(ours["first_s"]) == len(theirs["first_s"]) == len(ours["tpot_s"]) == cell["rows"]
        assert max(ours["first_s"]) < ours["seconds"]
    assert "1 row x 12 tokens + 3 new" in text


def test_latency_is_summed_up_over_repeats(monkeypatch, capsys):
    latency = import_module("latency")
    monkeypatch.setattr(sys, "argv", ["latency.py", "--repeats", "3", "--decode-every", "7"])
    options = latency.parse_arguments()

    def fake(systems, work, repeats):
        """Three runs; the base is twice as slow, and the last system does not run, or fails in its second run."""
        assert {system.options["decode_every"] for system in systems if system.peer == "kvkeep"} == {7}
        runs = {
            s.name: [one_run((1 + (s.name == "transformers")) * (10 + 2 * n)) for n in range(repeats)] for s in systems
        }
        runs["kvkeep full"][1] = runs["generate_batch"][0] = {"skipped": "no room"}
        return runs

    monkeypatch.setattr(latency, "alternating", fake)
    latency.cell("folder", 8, 2048, options)
    text = " ".join(capsys.readouterr().out.split())
    assert "3 runs in turn: medians and quartiles over runs" in text
    for number in ("12 (11-13)", "24 (22-26)", "120 (110-130)", "240 (220-260)", "0.50x, 0.50x", "1.00x, 1.00x"):
        assert number in text, number
    assert "generate_batch: no room" in text
    assert "kvkeep full, run 2 of 3: no room" in text
    assert latency.with_quartiles([1.0, 9.0]) == "5 (3-7)"  # no quartile lies outside of what was measured
    assert import_module("lib").spread([0.001, 0.009]) == "5.00 (3.00-7.00)"
    assert [latency.digits(number) for number in (0.01234, 1.5, 99.96, 123.4, 12345)] == [
        *("0.0123", "1.5", "100", "123", "12345")
    ]


def one_run(median):
    """What a peer measures: three first tokens, and the times between tokens of three requests."""
    return {"first_s": [1.0, median, 99.0], "tpot_s": [0.0, median / 100, 1.0], "new_tokens": 50, "seconds": 5.0}


def test_a_paged_cache_has_room_for_all_rows():
    latency, batch = import_module("latency"), import_module("peers.transformers_batch")
    options = latency.argparse.Namespace(
        layers=1, dtype="float32", policy="h2o", budget=16, chunk=5, new=3, decode_every=None
    )
    pages = {system.name: system.options for system in latency.systems(3, 40, options)}["generate_batch"]
    per_request = -(-(40 + 3) // batch.PAGE_TOKENS)
    assert pages["kv_bytes"] // (batch.PAGE_TOKENS * pages["token_bytes"]) >= 3 * per_request


def test_latency_over_histories(monkeypatch, capsys):
    words = ["--history", "8", "--history-new", "3", "--speed-model", "--budget", "4", "--chunk", "2"]
    monkeypatch.setattr(import_module("latency"), "HISTORIES", (2, 8))
    _, data = run("latency", monkeypatch, capsys, *words)
    assert [line["history"] for line in data["lengths"]] == [2, 8]
    assert [(len(line["old_ms"]), len(line["young_ms"])) for line in data["lengths"]] == [(2, 2), (2, 2)]


def test_prefill_memory(monkeypatch, capsys, here):
    words = ["--contexts", "40", "--budget", "8", "--chunk", "16"]
    text, data = run("prefill_memory", monkeypatch, capsys, *words)
    (cell,) = data["cells"]
    assert cell["full_bytes"] == 40 * 128
    assert cell["block_bytes"] == 9 * 2 * (64 + 8) + 24 + 16 * 2
    samples = {name: found[0].get("sample") for name, found in cell["systems"].items()}
    # a whole prompt is attended to in full, so its first token is that of a dense cache
    assert samples["kvkeep h2o 8 whole"] == samples["transformers whole"] == samples["transformers by 16"]
    assert samples["kvpress SnapKV"] is None
    assert "kvpress SnapKV: " in text


def test_reading(monkeypatch, capsys):
    words = ["--contexts", "40", "--budget", "8", "--chunk", "16", "--repeats", "1", "--policies", "h2o", "full"]
    script, logits = import_module("reading"), {}
    monkeypatch.setattr(
        script,
        "interleaved",
        lambda tasks, *_, **__: {name: [float(len(logits.setdefault(name, task())))] for name, task in tasks.items()},
    )
    text, _ = run("reading", monkeypatch, capsys, *words)
    assert list(logits) == [
        "transformers whole",
        *("transformers by 16", "h2o whole", "h2o by 16", "full whole", "full by 16"),
    ]
    for name in ("transformers by 16", "h2o whole", "full whole", "full by 16"):
        torch.testing.assert_close(logits[name], logits["transformers whole"])
    assert "h2o by 16" in text


@pytest.mark.parametrize("name", ["throughput", "prefill_memory", "real"])
def test_a_later_run_that_fails_leaves_the_others(monkeypatch, capsys, here, name):
    cells, calls = import_module("lib.cells"), []
    honest = cells.run

    def second_fails(system, work):
        calls.append(system.name)
        return {"skipped": "ended by SIGKILL"} if calls.count(system.name) == 2 else honest(system, work)

    monkeypatch.setattr(cells, "run", second_fails)
    small = {
        "throughput": ["--workloads", "20+4", "--kv-mib", "1", "--scale", "0.001"],
        "prefill_memory": ["--contexts", "40", "--budget", "8", "--chunk", "16"],
        "real": ["--rows", "1", "--contexts", "20", "--budget", "8", "--new", "4", str(model_folders.folder())],
    }[name]
    layers = [] if name == "real" else ["--layers", "1"]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *small, *layers, "--threads", "1", "--repeats", "2"])
    import_module(name).main()
    text = " ".join(capsys.readouterr().out.split())
    assert "transformers" in text
    assert "run 2 of 2: ended by SIGKILL" in text


def test_a_dense_cache_for_which_there_is_no_room_says_so():
    peers, child = import_module("peers"), import_module("peers.__main__")
    work = {"model": "", "dtype": "float32", "threads": 1, "vocabulary": 9, "prompt_tokens": 1, "new_tokens": 1}
    found = child.measure("transformers", peers.Work(**work, requests=1, options={"rows": 0}))
    assert found == {"skipped": "not one row of its cache fits into the memory"}


def test_a_peer_that_fails_says_so_in_its_row(monkeypatch):
    cells, peers = import_module("lib.cells"), import_module("peers")
    work = peers.Work(model="", dtype="float32", threads=1, vocabulary=9, requests=1, prompt_tokens=1, new_tokens=1)
    found = cells.run(cells.System("other", "nobody", {}), work)
    assert found["skipped"].startswith("failed: there is no peer 'nobody'")


def test_what_takes_too_long_ends_after_a_batch():
    peers = import_module("peers")
    done = peers.in_batches([[1]] * 5, 2, 0.0, lambda part: peers.Outcome(len(part), 1.0, [[7]] * len(part), [0.5]))
    assert (done.rows, done.seconds, len(done.tokens)) == (2, 1.0, 2)
    done = peers.in_batches([[1]] * 3, 2, None, lambda part: peers.Outcome(len(part), 1.0, [[7]] * len(part), [0.5]))
    assert (done.rows, done.seconds, len(done.tokens), done.first_s) == (2, 2.0, 3, [0.5, 1.5])


def test_a_workload_is_two_numbers():
    throughput = import_module("throughput")
    assert throughput.lengths("512+32") == (512, 32)
    for text in ("512", "512+", "0+4", "a+b"):
        with pytest.raises(throughput.argparse.ArgumentTypeError, match="PROMPT"):
            throughput.lengths(text)


def test_the_machine_is_described_with_its_kernel():
    lib = import_module("lib")
    assert lib.machine()["kernel"].startswith(("native", "torch ("))
    assert lib.machine()["kvkeep"] == kvkeep.__version__


@pytest.mark.slow
def test_prefill_memory_of_several_policies(monkeypatch, capsys, here):
    words = ["--contexts", "40", "--budget", "8", "--chunk", "16", "--dtype", "bfloat16", "--repeats", "2", "--pages"]
    words += ["--policies", "snapkv:window=4", "full"]
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "")
    text, data = run("prefill_memory", monkeypatch, capsys, *words)
    systems = data["cells"][0]["systems"]
    names = ["kvkeep snapkv:window=4 8 whole", "kvkeep full 41 whole", "kvkeep full 41 by 16"]
    assert all(len(systems[name]) == 2 for name in names)
    assert "bfloat16" in text
    assert "memory in use" in text
    assert os.environ["MALLOC_MMAP_THRESHOLD_"] == str(2**20)


@pytest.fixture
def qwen(monkeypatch):
    """A small model of the other shape, whose heads are wider than its width divided by their number."""
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "num_attention_heads": 4}
    lib = import_module("lib")
    config = lib.Qwen3Config(**{**lib.QWEN3.to_diff_dict(), **small, "num_key_value_heads": 2, "layer_types": None})
    monkeypatch.setattr(lib, "QWEN3", config)


def test_a_shape_with_a_name_has_its_own_layers_dtype_and_heads(monkeypatch, capsys):
    lib, sizes = import_module("lib"), import_module("lib.sizes")
    options = lib.with_shapes(lib.arguments("x")).parse_args(["--shape", "qwen3-0.6b"])
    lib.settle_shape(options)
    assert (options.layers, options.dtype) == (28, "bfloat16")
    config = lib.speed_config(28, "qwen3-0.6b")
    assert sizes.token_bytes(config, torch.bfloat16) == 28 * 8 * 2 * 128 * 2
    with torch.device("meta"):
        model = lib.AutoModelForCausalLM.from_config(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == 0.60


@pytest.mark.usefixtures("qwen")
def test_decode_of_another_shape(monkeypatch, capsys):
    decode = import_module("decode")
    monkeypatch.setattr(decode, "measure_bandwidth", lambda device: Bandwidth(1e9, 5e8))
    words = ["--shape", "qwen3-0.6b", "--rows", "2", "--contexts", "20", "--repeats", "1", "--budgets", "8"]
    text, data = run("decode", monkeypatch, capsys, *words)
    assert "2 rows x 20 tokens, bfloat16" in text
    one = data["cells"][0]["systems"]["h2o 8 (40%)"]
    assert one["bytes"] - data["weights"] == 2 * 9 * 2 * 2 * 16 * 2


@pytest.mark.usefixtures("qwen")
def test_prefill_memory_of_another_shape(monkeypatch, capsys, here):
    words = ["--shape", "qwen3-0.6b", "--contexts", "40", "--budget", "8", "--chunk", "16"]
    _, data = run("prefill_memory", monkeypatch, capsys, *words)
    assert data["cells"][0]["full_bytes"] == 40 * 2 * 2 * 16 * 2


@pytest.mark.long
@pytest.mark.usefixtures("qwen")
def test_a_plan_names_the_bytes_that_exist(monkeypatch, capsys):
    plan = import_module("plan")
    monkeypatch.setattr(plan, "measure_bandwidth", lambda device: Bandwidth(1e9, 5e8))
    text, data = run("plan", monkeypatch, capsys, "--rows", "2", "--contexts", "20", "--budget", "8", "--repeats", "1")
    pairs = data["cells"][0]["pairs"]
    for what in ("weights, MiB", "cache of 2 rows, h2o 8, MiB"):
        assert pairs[what]["measured"] == pytest.approx(pairs[what]["planned"], rel=0.05)
    assert pairs["tokens/s, h2o 8"]["planned"] > pairs["tokens/s, full cache"]["planned"]
    assert "measured / planned" in text


def test_novel(monkeypatch, capsys, tmp_path):
    words = ["--tokens", "90", "--parts", "3", "--budget", "8", "--chunk", "16"]
    text, data = run("novel", monkeypatch, capsys, *words)
    assert [part["tokens"] for part in data["parts"]] == [30, 60, 90]
    assert len({part["cache_bytes"] for part in data["parts"]}) == 1
    assert "90 tokens by 16" in text
    file = tmp_path / "novel.txt"
    file.write_bytes(b"\x01\x02\x03" * 5)
    _, data = run("novel", monkeypatch, capsys, *words, "--text", str(file), "--positions", "slot")
    assert data["parts"][-1]["tokens"] == 90


@pytest.mark.parametrize(("content", "complaint"), [(None, "cannot be read: No such file"), (b"", "is empty")])
def test_a_novel_that_cannot_be_read_is_one_line(monkeypatch, capsys, tmp_path, content, complaint):
    file = tmp_path / "novel.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit, match=complaint):
        run("novel", monkeypatch, capsys, "--text", str(file))


@pytest.mark.parametrize(
    ("name", "words", "complaint"),
    [
        ("novel", ["--policy", "h3o"], "h3o"),
        ("novel", ["--policy", "ahakv", "--budget", "8"], "protects"),
        ("novel", ["--policy", "full", "--tokens", "60", "--budget", "50"], "50"),
        ("plan", ["--policy", "ahakv", "--budget", "8", "--contexts", "20"], "protects"),
        ("plan", ["--policy", "h2o:recent=x"], "recent"),
        ("prefill_memory", ["--policies", "h2o", "h3o"], "h3o"),
        ("prefill_memory", ["--shape", "gpt-5"], "gpt-5"),
    ],
)
@pytest.mark.usefixtures("qwen")
def test_a_mistake_is_a_line(monkeypatch, capsys, name, words, complaint):
    with pytest.raises(SystemExit) as error:
        run(name, monkeypatch, capsys, *words)
    assert complaint in f"{error.value} {capsys.readouterr().err}"


@pytest.mark.slow
def test_http_beside_the_engine(monkeypatch, capsys):
    """Both ways write as many tokens, and a long prompt comes while others run."""
    monkeypatch.delitem(sys.modules, "server", raising=False)  # the tests of the server
    options = ["--streams", "2", "8", "--prompt", "4", "--new", "6", "--long", "32", "--chunk", "8", "--budget", "16"]
    monkeypatch.setattr(import_module("server"), "settle", lambda: None)  # which is for whole processes
    shown, data = run("server", monkeypatch, capsys, *options, "--repeats", "1", "--singles", "2")
    assert all(words in shown for words in ("2 streams", "8 streams", "first token", "longest stall"))
    assert [one["streams"] for one in data["speeds"]] == [2, 8]
    assert all(len(seconds) == 1 for one in data["speeds"] for seconds in one["seconds"].values())
    assert len(data["first"]["ms"]["http"]) == len(data["first"]["ms"]["alone"]) == 2
    assert min(*data["stall"]["ms"]["alone"], *data["stall"]["ms"]["http"]) > 0


@pytest.mark.long
def test_a_benchmark_of_the_server_that_fails_ends(monkeypatch):
    monkeypatch.delitem(sys.modules, "server", raising=False)  # the tests of the server
    server = import_module("server")
    monkeypatch.setattr(server, "settle", lambda: None)
    options = {"embedded": True, "dtype": "float32", "policy": "h2o", "budget": 16, "chunk": 8, "streams": [1]}
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), server.both(server.argparse.Namespace(**options)):
        raise KeyboardInterrupt
    assert threading.active_count() == before


@pytest.mark.slow
def test_the_simulator_beside_an_engine(monkeypatch, capsys):
    small = ("--rows", "2", "--prompt", "4-9", "--new", "2-4", "--chunk", "8", "--budget", "8")
    shown, data = run("fleet", monkeypatch, capsys, *small, "--requests", "4", "--steps", "2", "--loads", "0.5")
    assert all(words in shown for words in ("50%", "first token, p50", "tokens/s", "own steps", "within 15% of 5"))
    (one,) = data["runs"]
    assert min(*one["measured"].values(), *one["simulated"].values(), *one["foretold"].values()) > 0
    _, alone = run("fleet", monkeypatch, capsys, *small, "--steps", "2", "--steps-only")
    assert alone["runs"] == []
    assert {"decode", "prompt", "ratios"} <= set(alone["steps"])
    assert min(alone["steps"]["ratios"]) > 0


@pytest.mark.slow
def test_later_turns_of_a_conversation(monkeypatch, capsys):
    """Two servers of the embedded model, one of which goes on from its memory."""
    words = [str(embedded()), "--context", "120", "--turns", "2", "--new", "4", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["conversation.py", *words])
    import_module("conversation").main()
    table = capsys.readouterr().out
    found = json.loads(table.splitlines()[-1])
    assert "1 of 1 conversations have equal texts in both ways (float32)" in table
    assert found["runs"]["auto"][0]["cached"][1] > 0.8 * found["runs"]["auto"][0]["prompt"][1]
    assert found["runs"]["fresh"][0]["cached"] == [0, 0]


def test_tokens_that_the_peer_has_read_already_are_counted(monkeypatch):
    conversation, asked = import_module("conversation"), []

    def ask(question):
        asked.append(len(question["prompt"]))
        return {"answers": [{"tokens": [5], "times": [0.5]}], "cached": len(asked)}

    peer = conversation.argparse.Namespace(terminate=lambda: None)
    monkeypatch.setattr(conversation.llama_cpp, "start", lambda model, threads: (peer, ask))
    options = {"model": str(embedded()), "context": 40, "clients": 1, "turns": 2, "new": 1}
    (talk,) = conversation.beside(conversation.argparse.Namespace(**options))
    assert (talk.cached, talk.prompt) == ([2, 3], asked[1:])
