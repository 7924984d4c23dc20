"""The statistics for TriAttention: the queries of the model's own projections, in the shape of the official loader."""

import json
from types import SimpleNamespace

import model_folders
import pytest
import torch
from typer.testing import CliRunner

import kvkeep
from kvkeep.calibration.triattention import QueryMeans, _rotation, save, statistics
from kvkeep.cli.main import app
from kvkeep.errors import PolicyError, UnsupportedModelError
from kvkeep.models.load import find, read_weights
from kvkeep.models.tokenization import Writer
from kvkeep.policies._queries import heads_of
from kvkeep.rotary import Rotation

TEXT = "the quick brown fox jumps over the lazy dog and the cat. " * 20


def writer_of(family):
    checkpoint = find(str(model_folders.folder(family)))
    return Writer(checkpoint, read_weights(checkpoint, device="cpu"))


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def official(path):
    """What the official loader makes of a file: complex means and mean lengths by layer and head."""
    payload = torch.load(path, map_location="cpu", weights_only=True)
    metadata = payload["metadata"]
    for key in ("prompt_template", "use_chat_template", "system_prompt", "attn_implementation", "dtype", "rope_style"):
        assert key in metadata
    found = {}
    for layer, head in [tuple(item) for item in metadata["sampled_heads"]]:
        entry = payload["stats"][f"layer{layer:02d}_head{head:02d}"]
        mean = torch.complex(*(entry[key].to(torch.float32) for key in ("q_mean_real", "q_mean_imag")))
        assert mean.shape == entry["q_abs_mean"].shape == (metadata["head_dim"] // 2,)
        found[layer, head] = mean, entry["q_abs_mean"]
    return metadata, found


def test_means_are_those_of_the_models_own_projections(tmp_path):
    writer = writer_of("llama")
    texts = [torch.randint(3, 50, (n,), generator=torch.Generator().manual_seed(n)) for n in (40, 25)]
    save(statistics(writer, texts), tmp_path / "q.pt")
    metadata, found = official(tmp_path / "q.pt")
    seen, config = {}, writer.model.config

    def hook(layer):
        return lambda module, given, out: seen.setdefault(layer, []).append(out[0])

    hooks = [
        layer.self_attn.q_proj.register_forward_hook(hook(number))
        for number, layer in enumerate(writer.model.model.layers)
    ]
    with torch.no_grad():
        for ids in texts:
            writer.model(input_ids=ids[None])
    for handle in hooks:
        handle.remove()
    heads, dim = config.num_attention_heads, metadata["head_dim"]
    assert len(found) == config.num_hidden_layers * heads
    for layer, parts in seen.items():
        queries = torch.cat(parts).unflatten(-1, (heads, dim)).double()
        pairs = torch.complex(*queries.chunk(2, dim=-1))
        for head in range(heads):
            mean, length = found[layer, head]
            torch.testing.assert_close(mean, pairs[:, head].mean(dim=0).to(mean.dtype), rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(length, pairs[:, head].abs().mean(dim=0).float(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_the_policy_reads_the_file(family, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "novel.txt").write_text(TEXT)
    words = ("--for", "triattention", "--text", "novel.txt", "--context", 80, "-o", "q.pt")
    done = CliRunner().invoke(app, ["calibrate", str(model_folders.folder(family)), *map(str, words)])
    assert done.exit_code == 0, done.output
    assert "--policy triattention:calibration=q.pt" in done.stdout
    metadata, found = official("q.pt")
    assert heads_of("q.pt").keys() == found.keys()
    generate = ("generate", str(model_folders.folder(family)), "-p", TEXT[:60], "-b", "24", "-n", "20", "--json")
    policy = "triattention:calibration=q.pt,buffer=4,recent=4"
    done = CliRunner().invoke(app, [*generate, "--policy", policy])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["token_ids"]) > 1
    again = CliRunner().invoke(app, ["calibrate", str(model_folders.folder(family)), *map(str, words)])
    assert again.exit_code == 2
    assert "--overwrite" in again.output
    assert metadata["num_traces"] >= 1


def test_a_file_that_is_written_anew_is_read_again_once_a_policy_is_checked(tmp_path):
    path, writer = tmp_path / "q.pt", writer_of("llama")
    policy, seen = kvkeep.parse(f"triattention:calibration={path}"), []
    for first in (3, 30):
        save(statistics(writer, [torch.arange(first, first + 17)]), tmp_path / "new.pt")
        (tmp_path / "new.pt").replace(path)
        before = heads_of(str(path))[0, 0].query
        policy.check(4096)
        seen += [before, heads_of(str(path))[0, 0].query]
    first, checked, later, again = seen
    assert torch.equal(first, checked)
    assert torch.equal(checked, later)  # a run goes on with what it began with
    assert not torch.equal(later, again)
    path.write_bytes(b"broken")
    with pytest.raises(PolicyError):
        policy.check(4096)
    assert heads_of(str(path))[0, 0].query is again  # nor does a broken file harm it
    path.unlink()
    assert heads_of(str(path))[0, 0].query is again
    with pytest.raises(PolicyError, match="there is no such file"):
        policy.check(4096)


def test_a_model_without_rotary_positions_is_refused():
    with pytest.raises(UnsupportedModelError, match="needs rotary positions"):
        statistics(writer_of("gpt2"), [torch.arange(10)])


def test_a_model_that_rotates_a_part_of_each_head_is_refused(no_checked_annotations):
    """The format has no place for the dims that stay."""
    probe = QueryMeans(Rotation(torch.tensor([1.0, 0.3])))
    with pytest.raises(UnsupportedModelError, match="rotates 4 of 8 dims of a head"):
        probe.take(SimpleNamespace(query=torch.zeros(1, 4, 3, 8)))
    with pytest.raises(UnsupportedModelError, match="Layer 3 has no rotary positions"):
        _rotation({}, 3)


def test_the_file_of_another_model_is_refused(tmp_path):
    save(statistics(writer_of("llama"), [torch.arange(3, 20)]), tmp_path / "q.pt")
    content = torch.load(tmp_path / "q.pt", weights_only=True)
    del content["stats"]["layer01_head00"]
    torch.save(content, tmp_path / "short.pt")
    writer = writer_of("llama")
    cache = kvkeep.BoundedCache(writer.model.config, f"triattention:calibration={tmp_path / 'short.pt'}", 16)
    with pytest.raises(PolicyError, match="some heads of layer 1"), torch.no_grad():
        writer.model(input_ids=torch.arange(3, 43)[None], past_key_values=cache)


def test_bad_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, said in (
        (("--for", "heds"), "is nothing to calibrate for"),
        (("--for", "triattention", "--from-duo", "x"), "Leave one out"),
    ):
        done = CliRunner().invoke(app, ["calibrate", str(model_folders.folder("llama")), "-o", "x.pt", *words])
        assert done.exit_code == 2
        assert said in done.output
