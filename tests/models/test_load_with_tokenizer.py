"""`kvkeep.load`: one line from a name to a model and a tokenizer that everything else takes."""

import inspect

import model_folders
import pytest
import torch

import kvkeep
from kvkeep.errors import InputError, ModelFileError
from kvkeep.models import load as files
from kvkeep.models.load import quiet


@pytest.fixture(autouse=True)
def _silent():
    with quiet():
        yield


def test_an_engine_takes_what_load_returns():
    engine = kvkeep.Engine(*kvkeep.load(model_folders.folder()), policy="local", budget=16, rows=1)
    (result,) = engine.generate("the quick brown fox", kvkeep.SamplingParams(max_new_tokens=3))
    assert len(result.token_ids) == 3
    assert result.text


def test_the_tokenizer_is_that_of_tokenizers_where_mistral_common_is_installed(monkeypatch):
    seen, honest = [], files.AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        files.AutoTokenizer, "from_pretrained", lambda *args, **given: seen.append(given) or honest(*args, **given)
    )
    kvkeep.load(model_folders.folder())
    assert [given["mistral_format"] for given in seen] == [False]


def test_without_an_argument_it_is_the_embedded_model():
    model, tokenizer = kvkeep.load()
    assert model.config._attn_implementation == "kvkeep"
    assert not model.training
    assert tokenizer.name_or_path == files.embedded()


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_device_and_dtype_are_names_or_torchs_own(dtype, device):
    model, _ = kvkeep.load(model_folders.folder(), device=device, dtype=dtype)
    assert (model.dtype, model.device.type) == (torch.bfloat16, "cpu")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"dtype": "bf16"}, InputError, "Unknown dtype 'bf16'. Did you mean 'bfloat16'"),
        ({"dtype": torch.int8}, InputError, "Unknown dtype 'int8'"),
        ({"dtype": None}, InputError, "Unknown dtype 'None'"),
        ({"device": "gpu"}, InputError, "Device 'gpu' cannot be used here. Available: auto, cpu"),
        ({"device": "meta"}, InputError, "Device 'meta' cannot"),
        ({"device": 7}, InputError, "Device '7' cannot"),
        ({"device": None}, InputError, "Device 'None' cannot"),
        ({"name_or_path": 7}, InputError, "7 is neither a hub name nor a folder"),
        ({"name_or_path": b"folder"}, InputError, "is neither a hub name nor a folder"),
        ({"name_or_path": "./nowhere"}, ModelFileError, "does not exist"),
        ({"name_or_path": ""}, ModelFileError, "neither a local folder nor a hub name|file|folder"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_sentence(options, error, said, no_checked_annotations):
    with pytest.raises(error, match=said):
        kvkeep.load(**{"name_or_path": model_folders.folder(), **options})


def test_the_options_are_the_same_as_inside():
    inside = inspect.signature(files.load).parameters
    assert set(inspect.signature(kvkeep.load).parameters) == set(inside)
