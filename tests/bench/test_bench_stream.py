"""Streams: what is asked, and that one which was stopped anywhere goes on as if it had not been."""

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvkeep

BENCH = Path(__file__).parents[2] / "bench"
if not BENCH.is_dir():
    pytest.skip("the benchmarks are not part of this copy", allow_module_level=True)

POLICIES = ("streaming_llm", "h2o")


@pytest.fixture
def stream(scripts, monkeypatch):
    """The script, with windows of 30 tokens, the third of which is saved."""
    module = import_module("stream")
    monkeypatch.setattr(module, "WINDOW", 30)
    monkeypatch.setattr(module, "SAVE_EVERY", 3)
    return module


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    return kvkeep.attach(LlamaForCausalLM(config).eval())


def test_both_policies_are_asked_at_four_sizes_in_slot_positions_and_past_the_trained_length(stream):
    found = stream.runs(4_000_000, 256)
    sizes = {(run.policy, run.budget, run.positions) for run in found if run.question == "sizes"}
    assert sizes == {(policy, size, "slot") for policy in POLICIES for size in (64, 128, 256, 512)}
    streams = [run for run in found if run.question == "stream"]
    assert {(run.policy, run.positions) for run in streams} == {(policy, "slot") for policy in POLICIES}
    assert all(run.tokens >= 4_000_000 for run in streams)
    true = {(run.policy, run.positions) for run in found if run.question == "true"}
    assert true == {(policy, "true") for policy in (*POLICIES, "full")}
    assert len({run.name for run in found}) == len(found)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("windows", [2, 3, 5])
def test_a_stopped_stream_goes_on_as_if_it_had_not_been(stream, model, tmp_path, monkeypatch, policy, windows):
    ids = torch.randint(0, 32, (100,), generator=torch.Generator().manual_seed(1))
    run = stream.Run("stream", policy, 12, "slot", 210, 4)
    (whole := tmp_path / "whole").mkdir()
    (parts := tmp_path / "parts").mkdir()
    stream.Stream(run, model, ids, whole).go()
    one = stream.Stream(run, model, ids, parts)
    measure, left = one._window, [windows]

    def stop_after_some():
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return measure()

    monkeypatch.setattr(one, "_window", stop_after_some)
    with pytest.raises(KeyboardInterrupt):
        one.go()
    other = stream.Stream(run, model, ids, parts)
    assert other.done == windows // 3 * 3 * 30  # what was saved; the windows after it are measured again
    other.go()
    kept = ("tokens", "perplexity", "allocated_bytes", "full_bytes")
    found, expected = ([[row[key] for key in kept] for row in stream.rows_of(folder)] for folder in (parts, whole))
    assert found == expected
    assert [row[0] for row in found] == list(range(30, 211, 30))
    assert len({row[2] for row in found}) == 1
    assert stream.Stream(run, model, ids, parts).done == 210


@pytest.mark.slow
def test_a_finished_stream_is_summed_up_and_drawn(stream, model, tmp_path, capsys):
    ids = torch.arange(50) % 32
    for policy in POLICIES:
        stream.Stream(stream.Run("stream", policy, 8, "slot", 60, 4), model, ids, tmp_path).go()
        stream.Stream(stream.Run("sizes", policy, 8, "slot", 60, 1), model, ids, tmp_path).go()
    stream.summarise(tmp_path)
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(data["runs"]) == 4
    for found in data["runs"].values():
        assert found["tokens"] == 60
        assert len(found["cache_bytes"]) == 1
        assert found["peak_rss_mb"][0] > 0
    assert (tmp_path / "stream.png").read_bytes().startswith(b"\x89PNG")


class Touch:
    """What a hostile checkpoint makes of the one who loads it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("kind", ["code", "other data", "no blocks", "torn", "text"])
def test_a_checkpoint_of_somebody_else_is_refused_and_runs_nothing(stream, model, tmp_path, kind):
    run = stream.Run("stream", "h2o", 8, "slot", 90, 4)
    ids = torch.arange(50) % 32
    stream.Stream(run, model, ids, tmp_path).go()
    state = tmp_path / f"{run.name}.pt"
    if kind == "torn":
        state.write_bytes(state.read_bytes()[:1000])
    elif kind == "text":
        state.write_text("hello")
    else:
        parts = {"code": {0: Touch(tmp_path / "touched")}, "no blocks": {0: 1, 1: 2}, "other data": [1, 2, 3]}
        torch.save({"done": 60, "blocks": parts[kind]}, state)
    with pytest.raises(SystemExit, match=r"\.pt is no stream that this script saved .* Remove it"):
        stream.Stream(run, model, ids, tmp_path)
    assert not (tmp_path / "touched").exists()


@pytest.mark.long
def test_pictures_and_checkpoints_do_not_follow_links(stream, model, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (out := tmp_path / "out").mkdir()
    run = stream.Run("stream", "h2o", 8, "slot", 90, 4)
    for name in (f"{run.name}.part", "stream.png"):
        (out / name).symlink_to(victim)
    stream.Stream(run, model, torch.arange(50) % 32, out).go()
    stream.summarise(out)
    assert victim.read_text() == "precious"
