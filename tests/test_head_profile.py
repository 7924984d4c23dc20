"""Profiles of heads: budgets that add up, files of strangers, and models that a profile does not belong to."""

import itertools
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

import kvkeep
from kvkeep import head_profile
from kvkeep.head_profile import Profile

MODEL = {"name": "a model", "model_type": "llama", "layers": 3, "kv_heads": 2, "head_dim": 8}
GOOD = {
    "format": "kvkeep-profile",
    "version": 1,
    "model": MODEL,
    "weights": None,
    "heads": [[0.0, 0.0], [0.25, 1.0], [0.0, 1.0]],
    "least": 12,
    "measured": {"tokens": 512},
}


def made(heads=GOOD["heads"], least=12, **more):
    shape = {"layers": len(heads), "kv_heads": len(heads[0])}
    return Profile(model={**MODEL, **shape}, heads=tuple(map(tuple, heads)), least=least, **more)


def config(**changes):
    fields = {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    text = SimpleNamespace(**{**fields, **changes})
    return SimpleNamespace(get_text_config=lambda decoder: text)


# -- budgets -----------------------------------------------------------------------------------------------------------


def test_heads_that_need_the_past_share_what_the_others_leave():
    assert made().budgets(100, 12) == [[12, 12], [79, 243], [12, 242]]


@pytest.mark.parametrize("budget", [40, 100, 400])
def test_a_head_that_needs_nothing_gets_its_first_and_newest_tokens(budget):
    assert made(least=36).budgets(budget)[0] == [36, 36]
    assert made(least=36).budgets(budget, 38)[0] == [38, 38]


@pytest.mark.parametrize("budget", range(1, 72))
def test_no_head_that_needs_something_loses_slots_at_a_small_budget(budget):
    (_, (some, much), _) = made(least=36).budgets(budget)
    assert budget <= some <= much


def test_a_budget_of_the_least_or_less_is_the_same_for_all():
    assert made().budgets(12) == made().budgets(12, 12) == [[12, 12]] * 3
    assert made().budgets(5, 12) == [[5, 5]] * 3
    assert made().budgets(1) == [[1, 1]] * 3


def test_heads_that_need_nothing_are_limited_unless_no_head_needs_anything():
    assert made().limited() == [(True, True), (False, False), (True, False)]
    assert made([[0.0, 0.0], [0.0, 1e-300]]).limited() == [(True, True), (True, False)]
    assert made([[0.0, 0.0]] * 3).limited() == made([[0.3, 1.0]] * 3).limited() == [(False, False)] * 3


def test_heads_that_all_need_the_same_get_the_same():
    assert made([[0.0, 0.0]] * 3).budgets(10) == [[10, 10]] * 3
    assert made([[0.3, 0.3]] * 3).budgets(10) == [[10, 10]] * 3


def test_no_head_gets_more_than_it_can_use():
    assert made().budgets(100, 12, most=170) == [[30, 30], [170, 170], [30, 170]]
    assert made().budgets(100, 12, most=100) == [[100, 100]] * 3
    assert made().budgets(100, 12, most=7) == [[100, 100]] * 3


@pytest.mark.parametrize("seed", range(40))
def test_budgets_add_up_whatever_the_needs(seed):
    rng = random.Random(seed)
    layers, heads = rng.randint(1, 9), rng.randint(1, 5)
    needs = [[rng.choice([0.0, 1.0, rng.random(), 1e-300]) for _ in range(heads)] for _ in range(layers)]
    budget, least = rng.choice([1, 7, 100, 12345, 2**50]), rng.choice([1, 4, 50])
    most = rng.choice([None, budget + 1, 2 * budget])
    if most is not None:
        most = min(most, 2**50)
    found = made(needs, least=rng.randint(1, 64)).budgets(budget, least, most=most)
    assert [len(layer) for layer in found] == [heads] * layers
    assert sum(map(sum, found)) == layers * heads * budget
    assert min(map(min, found)) >= min(least, budget)
    assert most is None or max(map(max, found)) <= most
    assert all(type(number) is int for layer in found for number in layer)
    order = sorted(zip(itertools.chain(*needs), itertools.chain(*found), strict=True))
    assert all(b >= a - 1 for (_, a), (_, b) in itertools.pairwise(order))  # who needs more gets no less


@pytest.mark.parametrize("numbers", [(0, 1), (-3, 1), (10, 0), (2**51, 1), (10, 2**60)])
def test_numbers_out_of_range_are_refused(numbers):
    with pytest.raises(kvkeep.BudgetError, match="outside 1"):
        made().budgets(*numbers)


def test_dividing_the_slots_of_a_large_model_is_quick():
    rng = random.Random(0)
    found = made([[rng.random() for _ in range(128)] for _ in range(128)]).budgets(4096, 20, most=8192)
    assert sum(map(sum, found)) == 128 * 128 * 4096


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_comes_back_as_it_was_saved(tmp_path):
    path = tmp_path / "heads.json"
    before = made(weights="abc", measured={"tokens": 512, "loss": [float("nan")]})
    before.save(path)
    after = Profile.load(path)
    assert after.sinks == 4
    assert (after.heads, after.least, after.weights, after.model) == (before.heads, 12, "abc", before.model)
    assert after.measured == {"tokens": 512, "loss": [None]}
    assert [file.name for file in tmp_path.iterdir()] == ["heads.json"]
    after.save(path)
    assert Profile.load(path) == after


def without(name):
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "Expecting value"),
        ("[]", 'has no "format"'),
        ("null", 'has no "format"'),
        ("{" * 100_000, "is no profile"),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps(without("format")), 'has no "format"'),
        (json.dumps({**GOOD, "format": 7}), 'has no "format"'),
        (json.dumps({**GOOD, "version": 2}), "its version is 2"),
        (json.dumps({**GOOD, "version": "1"}), "its version is '1'"),
        (json.dumps(without("model")), "which model"),
        (json.dumps({**GOOD, "model": []}), "which model"),
        (json.dumps({**GOOD, "measured": 3}), "how it was measured"),
        (json.dumps({**GOOD, "weights": 3}), "neither a hash nor null"),
        (json.dumps(without("least")), '"least" is None'),
        (json.dumps({**GOOD, "least": True}), '"least" is True'),
        (json.dumps({**GOOD, "least": 0}), '"least" is 0'),
        (json.dumps({**GOOD, "least": 2**60}), '"least" is 11529'),
        (json.dumps({**GOOD, "sinks": -1}), '"sinks" is -1'),
        (json.dumps({**GOOD, "sinks": 1.5}), '"sinks" is 1.5'),
        (json.dumps(without("heads")), "a list of layers"),
        (json.dumps({**GOOD, "heads": []}), "a list of layers"),
        (json.dumps({**GOOD, "heads": [[], [], []]}), "a list of layers"),
        (json.dumps({**GOOD, "heads": [1, 2, 3]}), "a list of layers"),
        (json.dumps({**GOOD, "heads": [[0.1, 0.2], [0.3], [0.1, 0.2]]}), "the same number of heads"),
        (json.dumps({**GOOD, "heads": [[0.1, 0.2]]}), 'has 1 × 2 numbers, but "model" says layers: 3'),
        (json.dumps({**GOOD, "heads": [[0.1]] * 3}), 'has 3 × 1 numbers, but "model" says kv_heads: 2'),
        (json.dumps({**GOOD, "heads": [[0.1, 1.5]] * 3}), "layer 0, head 1 is 1.5"),
        (json.dumps({**GOOD, "heads": [[0.1, -0.1]] * 3}), "layer 0, head 1 is -0.1"),
        (json.dumps({**GOOD, "heads": [[0.1, True]] * 3}), "layer 0, head 1 is True"),
        (json.dumps({**GOOD, "heads": [[0.1, "1"]] * 3}), "layer 0, head 1 is '1'"),
        (json.dumps({**GOOD, "heads": [[0.1, None]] * 3}), "layer 0, head 1 is None"),
        (json.dumps({**GOOD, "heads": [[0.1, float("nan")]] * 3}), "not finite"),
        (json.dumps({**GOOD, "heads": [[0.1, float("inf")]] * 3}), "not finite"),
        (json.dumps({**GOOD, "heads": [[0.5] * 300] * 300}), "more than 65536"),
        ('{"format": "\\ud800"}', "is no profile"),
    ],
)
def test_a_file_of_a_stranger_is_refused(tmp_path, content, said):
    path = tmp_path / "heads.json"
    path.write_text(content)
    with pytest.raises(kvkeep.InputError) as error:
        Profile.load(path)
    assert said in str(error.value)
    assert "heads.json" in str(error.value)
    assert len(str(error.value)) < 600


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(kvkeep.InputError, match="cannot be read: No such file"):
        Profile.load(tmp_path / "missing.json")
    with pytest.raises(kvkeep.InputError, match="is no file"):
        Profile.load(tmp_path)
    with pytest.raises(kvkeep.InputError, match="is no file"):
        Profile.load("/dev/zero")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(kvkeep.InputError, match="is no profile"):
        Profile.load(tmp_path / "bytes.json")


def test_a_huge_file_is_not_read(tmp_path):
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(head_profile.MOST_BYTES + 1)
    with pytest.raises(kvkeep.InputError, match="has 16777217 bytes"):
        Profile.load(path)


def test_a_failed_write_leaves_the_old_profile(tmp_path):
    made().save(tmp_path / "heads.json")
    with pytest.raises(kvkeep.InputError, match="cannot be written"):
        made().save(tmp_path / "heads.json" / "below")
    assert Profile.load(tmp_path / "heads.json") == Profile.load(tmp_path / "heads.json")


def test_numbers_are_checked_in_python_too():
    with pytest.raises(kvkeep.InputError, match="layer 0, head 1 is 2"):
        made([[0.0, 2.0]])


# -- models ------------------------------------------------------------------------------------------------------------


def test_a_profile_fits_its_own_model():
    made().check(config())
    made(weights="abc").check(config(), layers=3)
    made(weights=None).check_weights(lambda: "abc")
    made(weights="abc").check_weights(lambda: "abc")
    made(weights="abc").check_weights(lambda: None)
    made().check(config(num_key_value_heads=None, num_attention_heads=2))  # every head has keys of its own
    made().check(config(head_dim=None))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "qwen3"}, "its model type is llama, here it is qwen3"),
        ({"num_key_value_heads": 4}, "its number of KV heads is 2, here it is 4"),
        ({"head_dim": 16}, "its head dimension is 8, here it is 16"),
    ],
)
def test_a_profile_of_another_model_is_refused(changes, said):
    with pytest.raises(kvkeep.InputError) as error:
        made().check(config(**changes))
    assert said in str(error.value)
    assert "calibrate this model" in str(error.value)


def test_layers_and_weights_are_compared_where_they_are_known():
    with pytest.raises(kvkeep.InputError, match="its number of layers with keys is 3, here it is 4"):
        made().check(config(), layers=4)
    with pytest.raises(kvkeep.InputError, match="other weights"):
        made(weights="abc").check_weights(lambda: "def")


def test_a_name_with_half_a_character_can_be_saved(tmp_path):
    one = replace(made(), model={**made().model, "name": "a\ud800b"})
    one.save(tmp_path / "heads.json")
    assert Profile.load(tmp_path / "heads.json").heads == one.heads


FIELDS = {
    "model_type": "model_type",
    "hidden_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "query_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}


def test_the_description_of_a_model_is_what_a_check_compares():
    about = head_profile.describe(config())
    assert about == {
        "model_type": "llama",
        "hidden_layers": 3,
        "hidden_size": 32,
        "query_heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
    }
    made().check(config())
    for name in about:
        other = config(**{FIELDS[name]: 99 if name != "model_type" else "other"})
        with pytest.raises(kvkeep.InputError, match="another model"):
            Profile(model={**MODEL, **about}, heads=made().heads, least=1).check(other)
    strange = config(num_attention_heads=[1, 2], hidden_size="wide", head_dim=None)
    assert head_profile.describe(strange)["head_dim"] is None
