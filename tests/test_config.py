"""kvkeep.toml: what is read, what is written, and every mistake in one line."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.config import Config
from kvkeep.errors import InputError

FULL = Config(
    model="org/model",
    policy="h2o:recent=8,sinks=4",
    budget=512,
    layer_budget=(1.0, 0.5),
    head_budget="ada:0.2",
    positions="slot",
    prefill_chunk=256,
    guard=0.1,
    keep_prompt=True,
    dtype="bfloat16",
    load_in="int8",
)


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "kvkeep.toml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize("config", [FULL, Config(), Config(layer_budget="ramp:0.2", keep_prompt=False)])
def test_what_is_written_is_read(config, file):
    text = config.text("Found by a search:\n98 % kept.", {"case": "later", "target": 0.98, "measured_on": 440})
    assert Config.read(file(text)) == config
    assert text.startswith("# Found by a search:\n# 98 % kept.\n")


@given(st.text(min_size=1).filter(str.strip).filter(lambda text: text.isprintable() or "\x7f" in text or "\n" in text))
def test_every_name_is_written_so_that_it_can_be_read(name):
    import tomllib

    if any("\ud800" <= char <= "\udfff" for char in name):
        return
    assert Config.of(tomllib.loads(Config(model=name).text(name))).model == name


@pytest.mark.whole
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("polcy = 'h2o'", "Did you mean 'policy'?"),
        ("Budget = 5", "Did you mean 'budget'?"),
        ("layer-budget = 'ramp'", "Did you mean 'layer_budget'?"),
        ("zzz = 5", "There are: model, policy,"),
        ("policy = 'h20'", "Did you mean 'h2o'?"),
        ("policy = 'h2o:recnt=3'", "recnt"),
        ("policy = 'os:system'", "names a module, which a file may not"),
        ("policy = 3", "is not a text"),
        ("policy = ''", "Unknown policy"),
        ("budget = '512'", "is not a whole number of tokens"),
        ("budget = true", "is not a whole number of tokens"),
        ("budget = 0", "from 1 on"),
        ("budget = 99999999999999999999999", "from 1 on"),
        ("layer_budget = 'rammp:3'", "rammp"),
        ("layer_budget = [1, 'x']", "is not a rule"),
        ("layer_budget = []", "is not a rule"),
        ("layer_budget = [0, 1]", "a weight above 0 for each layer"),
        ("layer_budget = [nan]", "is not a rule"),
        ("head_budget = 'adda'", "Unknown head budget"),
        ("head_budget = 3", "is not a text"),
        ("positions = 'slots'", "is not 'true' or 'slot'"),
        ("positions = true", "is not 'true' or 'slot'"),
        ("guard = 1.5", "is not a share from 0 to 1"),
        ("guard = nan", "is not a share from 0 to 1"),
        ("prefill_chunk = -1", "from 1 on"),
        ("[budget]\na = 1", "is not a whole number"),
        ("budget = 1\nbudget = 2", "is no TOML"),
        ("budget", "is no TOML"),
        (b"\xff\xfe", "is no TOML"),
        ("a = " + "[" * 100000, "kvkeep.toml"),
        (b"#" * (2**20 + 1), "is larger than"),
    ],
)
def test_a_mistake_is_one_line(line, said, file):
    with pytest.raises(InputError) as error:
        Config.read(file(line))
    message = str(error.value)
    assert said in message
    assert "kvkeep.toml" in message
    assert "\n" not in message
    assert len(message) < 600


def test_a_folder_and_a_pipe_are_named_as_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InputError, match=r"is no file\. Give the kvkeep"):
            Config.read(place)


def test_places_that_are_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path, tmp_path / "none.toml", tmp_path / "pipe", "a\0b", "/dev/zero"):
        with pytest.raises(InputError):
            Config.read(name)
