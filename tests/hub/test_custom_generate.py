"""The repository for the hub works from a local copy, as transformers loads it."""

import re
import shutil
from pathlib import Path

import model_folders
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, dynamic_module_utils

import kvkeep
from kvkeep.cache.hf_layers import CACHE_ARGUMENTS, handed

ROOT = Path(__file__).parents[2]
if not (ROOT / "hub").is_dir():
    pytest.skip("the repository for the hub is not part of this copy", allow_module_level=True)
README = (ROOT / "hub" / "README.md").read_text()


@pytest.fixture(scope="module")
def plain():
    return AutoModelForCausalLM.from_pretrained(model_folders.folder()).eval()


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the repository, whose code transformers puts into a folder of the test."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    return str(shutil.copytree(ROOT / "hub", tmp_path / "bounded"))


def generate(model, folder, ids=((5, 6, 7, 8, 9, 10, 11, 12),), **kwargs):
    ids = torch.tensor(ids)
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, custom_generate=folder, trust_remote_code=True, **(arguments | kwargs))


def test_text_is_that_of_a_bounded_cache(plain, copied):
    found = generate(plain, copied, policy="h2o", budget=6)
    cache = kvkeep.BoundedCache(plain.config, "h2o", 6)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    wanted = kvkeep.attach(plain).generate(
        ids, max_new_tokens=12, do_sample=False, pad_token_id=0, **handed(plain, cache)
    )
    assert found.tolist() == wanted.tolist()


def test_the_cache_of_the_result_is_bounded_and_has_the_options(plain, copied):
    out = generate(plain, copied, budget=6, policy="knorm", kv_bits=8, prefill_chunk=4, return_dict_in_generate=True)
    cache = next(out[name] for name in CACHE_ARGUMENTS if name in out)
    assert isinstance(cache, kvkeep.BoundedCache)
    assert int((cache.positions(0)[0, 0] >= 0).sum()) == 6
    assert kvkeep.spec(cache.policy) == "knorm"
    assert cache.row_snapshots.settings.kv_bits == "8"


def test_batches_beams_and_samples_work(plain, copied):
    rows = generate(plain, copied, [[5, 6, 7, 8], [9, 10, 11, 12]], budget=6, num_beams=2)
    assert rows.shape[0] == 2
    torch.manual_seed(0)
    assert generate(plain, copied, budget=6, do_sample=True, max_new_tokens=3).shape[1] == 11


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"policy": "h3o"}, kvkeep.PolicyError, "h3o"),
        ({"budget": 0}, kvkeep.BudgetError, "budget=0"),
        ({"past_key_values": DynamicCache()}, kvkeep.InputError, "makes the cache itself"),
        ({"no_such_argument": 1}, ValueError, "no_such_argument"),
    ],
)
def test_what_cannot_be_used_is_refused(plain, copied, arguments, error, words):
    with pytest.raises(error, match=words):
        generate(plain, copied, **arguments)


def test_the_code_is_trusted_first(plain, copied):
    with pytest.raises(ValueError, match="trust_remote_code"):
        plain.generate(torch.tensor([[5, 6]]), custom_generate=copied, trust_remote_code=False)


def test_the_cards_code_runs(copied, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    code = code.replace("Qwen/Qwen3-0.6B", str(model_folders.folder())).replace("kvkeep/bounded", copied)
    exec(code.replace("=512", "=8").replace("=100", "=4"), {})
    assert capsys.readouterr().out.strip()


def test_the_card_has_the_metadata_by_which_the_hub_finds_it():
    head = README.split("---")[1]
    assert "library_name: transformers" in head
    assert "- custom_generate" in head
    needed = dict(re.findall(r"(\w+)>=(.*)", (ROOT / "hub/custom_generate/requirements.txt").read_text()))
    assert needed["kvkeep"] == kvkeep.__version__
