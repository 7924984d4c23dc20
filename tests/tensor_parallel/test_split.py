"""How kvkeep finds out that a model is split over processes, and what it refuses by name. No process is started."""

import json
import threading
from types import SimpleNamespace

import model_folders
import pytest
import torch
from transformers import DeepseekV3Config, FalconConfig, LlamaConfig, Qwen3Config
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli import distributed
from kvkeep.cli.main import app
from kvkeep.engine.tensor_parallel import check_split
from kvkeep.errors import InputError, ShapeError, UnsupportedModelError, UnsupportedOperationError
from kvkeep.head_sharding import ALONE, Heads, number_of_heads, sharing
from kvkeep.types import AttentionOptions, Phase


def of(config, **sizes):
    config.distributed_config = SimpleNamespace(**sizes)
    return Heads.of(config)


@pytest.fixture
def model():
    with model_folders.one_thread():
        return kvkeep.load(model_folders.folder(), device="cpu")[0]


@pytest.fixture
def two(model, monkeypatch):
    """As the second of two processes, once there is a model."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)


def test_a_model_that_is_not_split_has_all_heads_in_one_process():
    assert Heads.of(LlamaConfig()) is ALONE
    assert of(LlamaConfig(), tp_size=1) is ALONE
    x = torch.rand(2, 3, 5)
    assert ALONE.all(x) is ALONE.all_slots(x, 0.0) is ALONE.mine(x) is x
    assert ALONE.first(x.int()).tolist() == x.int().tolist()
    assert ALONE.numbers(3, x.device).tolist() == [0, 1, 2]
    assert ALONE.most(4, x.device) == 4


def test_the_share_of_a_process_follows_from_the_configuration(two):
    assert of(LlamaConfig(num_attention_heads=8, num_key_value_heads=4), tp_size=2) == Heads(1, 2, 4)
    assert of(Qwen3Config(num_attention_heads=8, num_key_value_heads=2), tp_size=2) == Heads(1, 2, 2)
    assert Heads(1, 2, 4).numbers(2, torch.device("cpu")).tolist() == [2, 3]
    assert Heads(1, 2, 4).mine(torch.arange(4)[None]).tolist() == [[2, 3]]


def test_a_plan_that_leaves_the_keys_whole_leaves_all_heads_to_every_process(two):
    assert of(LlamaConfig(), tp_size=2, tp_plan={}) is ALONE
    gathered = {f"layers.*.self_attn.{name}_proj": "colwise_gather_output" for name in "qkv"}
    config = LlamaConfig()
    assert of(config, tp_size=2, tp_plan=gathered) is ALONE
    assert sharing(config) == Heads(1, 2)  # other layers are split, so engines have to take the same steps
    with pytest.raises(UnsupportedOperationError, match="`host_rows` depends on one process"):
        check_split(config, host_rows=2)
    of(config, tp_size=2, tp_plan={})
    assert sharing(config) is ALONE


@pytest.mark.parametrize(
    ("config", "sizes", "said"),
    [
        (LlamaConfig(num_attention_heads=8, num_key_value_heads=2), {"tp_size": 4}, "the 2 KV heads .* Start 1 or 2"),
        (LlamaConfig(num_attention_heads=6, hidden_size=48), {"tp_size": 4}, "the 6 KV heads .* 1 or 2 or 3"),
        (DeepseekV3Config(), {"tp_size": 2, "tp_plan": {"k_proj": "colwise"}}, "latents"),
        (LlamaConfig(), {"tp_size": 2, "pp_size": 2}, "pp_size=2"),
        (LlamaConfig(), {"tp_size": 1, "fsdp_size": 2}, "fsdp_size=2"),
    ],
)
def test_heads_that_cannot_be_divided_are_refused_by_name(config, sizes, said, two):
    with pytest.raises(UnsupportedModelError, match=said):
        of(config, **sizes)


def test_a_model_that_is_split_by_layers_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"loaded with pp_size=2\. kvkeep follows tensor parallelism alone"):
        sharing(SimpleNamespace(distributed_config=SimpleNamespace(tp_size=2, pp_size=2)))


def test_layers_with_different_numbers_of_heads_are_refused():
    with pytest.raises(UnsupportedModelError, match="no single number of KV heads"):
        number_of_heads(SimpleNamespace(num_attention_heads=8, num_key_value_heads=[8, 4]), 2)


def test_processes_that_do_not_run_are_missed():
    with pytest.raises(InputError, match=r"for 2 processes .* Start them with torchrun"):
        of(LlamaConfig(), tp_size=2)


def test_a_layer_with_other_heads_than_expected_is_refused(two):
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4)
    config.distributed_config = SimpleNamespace(tp_size=2)
    (layer,) = kvkeep.BoundedCache(config, "h2o", 8).bounded_layers().values()
    keys = torch.rand(1, 4, 3, 16)
    with pytest.raises(ShapeError, match="keys of 4 heads to one of 2 processes"):
        layer.step(keys, keys, keys, options=AttentionOptions(0.25), phase=Phase.PREFILL)


def test_a_cache_of_another_configuration_is_refused(model, two):
    cache = kvkeep.BoundedCache(model.config, "h2o", 8)
    model.config.distributed_config = SimpleNamespace(tp_size=2)
    with pytest.raises(InputError, match=r"Make it from that of the loaded model"):
        model(input_ids=torch.ones(1, 3, dtype=torch.int64), past_key_values=cache)


def test_a_profile_of_heads_is_refused(two, tmp_path):
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4, hidden_size=64)
    from kvkeep.head_profile import describe

    about = {"name": "a", "layers": 1, **describe(config)}
    path = tmp_path / "profile.json"
    heads = {"weights": None, "heads": [[0.0, 0.1, 0.2, 0.3]], "least": 4, "sinks": 1, "measured": {}}
    path.write_text(json.dumps({"format": "kvkeep-profile", "version": 1, "model": about, **heads}))
    kvkeep.BoundedCache(config, "h2o", 16, head_budget=f"profile:{path}")
    config.distributed_config = SimpleNamespace(tp_size=2)
    with pytest.raises(UnsupportedOperationError, match="split over processes"):
        kvkeep.BoundedCache(config, "h2o", 16, head_budget=f"profile:{path}")


@pytest.mark.parametrize("option", [{"host_rows": 2}, {"session_dir": "here"}, {"graphs": True}])
def test_an_engine_refuses_what_depends_on_one_process(option, two):
    config = LlamaConfig()
    check_split(config, **option)
    config.distributed_config = SimpleNamespace(tp_size=2)
    check_split(config, host_rows=0, session_dir=None, graphs=False)
    with pytest.raises(UnsupportedOperationError, match=f"`{next(iter(option))}` depends on one process"):
        check_split(config, **option)


def test_a_model_is_only_split_by_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=r"which sets RANK\. Start this program with torchrun"):
        kvkeep.load(model_folders.folder(), tp=True)
    with pytest.raises(InputError, match="load_in=fp8"):
        split_options(load_in="fp8")
    with pytest.raises(InputError, match="`device=cuda:7` names too few"):
        split_options(device="cuda:7")
    with pytest.raises(UnsupportedModelError, match="no plan by which 'falcon' models"):
        split_options(FalconConfig())


def split_options(config=None, *, device="auto", load_in=None):
    from kvkeep.models import load

    return load.split_options(config or LlamaConfig(), device=device, load_in=load_in)


def test_the_shorter_slots_of_a_process_follow_after_empty_ones(monkeypatch):
    """Two threads stand for two processes."""
    meet, boxes = threading.Barrier(2), {}
    ranks = threading.local()

    def all_gather(found, sent):
        boxes[ranks.number] = sent
        meet.wait(60)
        for place, one in enumerate(found):
            one.copy_(boxes[place])
        meet.wait(60)

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    results = {}

    def work(rank, mine):
        ranks.number = rank
        results[rank] = Heads(rank, 2, 2).all_slots(mine, -1.0).tolist()

    given = {0: torch.tensor([[[1.0, 2.0, 3.0]]]), 1: torch.tensor([[[4.0]]])}
    threads = [threading.Thread(target=work, args=one) for one in given.items()]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert results[0] == results[1] == [[[1.0, 2.0, 3.0], [-1.0, -1.0, 4.0]]]


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """As the first of two processes of torchrun."""
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def test_a_world_without_torchrun_is_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")  # as in a container of a cluster
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert distributed.processes() == 1
    assert distributed.leads()
    assert distributed.told({"a": [1]}) == {"a": [1]}


def test_other_commands_are_refused_once(started, monkeypatch, capfd):
    """The first process says it; another one leaves it the time for that, since torchrun ends all when one fails."""
    waits = []
    monkeypatch.setattr(distributed.time, "sleep", waits.append)
    for rank, said, waited in (("0", "kvkeep serve runs in one", []), ("1", "", [distributed.WAIT_S])):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end, distributed.quiet_followers(["serve", "--port", "1"]):
            pass
        assert end.value.code == 2
        shown = capfd.readouterr()
        assert said in shown.err
        assert bool(shown.err) == bool(said)
        assert waits == waited


@pytest.mark.parametrize("arguments", [["-"], ["-p", "-"], ["--prompt-file", "-"], ["-i", "-", "-o", "out.jsonl"]])
def test_standard_input_cannot_be_shared(started, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["generate", *arguments], input="a text")
    assert done.exit_code == 2
    assert "cannot share standard input" in done.output


def test_compiled_layers_are_refused(started, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    done = CliRunner().invoke(app, ["generate", "-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--compile"])
    assert done.exit_code == 2
    assert "--compile does not go together" in done.output
    assert not (tmp_path / "out.jsonl").exists()
