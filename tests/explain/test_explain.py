"""`kvkeep.explain`: its arguments, its JSON, its page, and what it refuses."""

import copy
import functools
import json

import model_folders
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvkeep
from explain.records import POLICIES, record, shown, tables, text
from kvkeep.cache.layer_layout import DEFAULT_BUDGET
from kvkeep.errors import (
    BudgetError,
    InputError,
    KVKeepError,
    PolicyError,
    UnsupportedModelError,
    UnsupportedOperationError,
)
from kvkeep.explain.explain import MOST_NEW_TOKENS, _prompt, _slots, check, explain, refuse_states
from kvkeep.explain.explanation import MOST_MOMENTS, moments, shades, short_floats, unpacked
from kvkeep.explain.runs import pieces
from kvkeep.models.load import find, read_weights
from kvkeep.policies import DEFAULT, LATER


def test_the_name_is_a_function_and_a_room():
    import kvkeep.explain.explanation as room

    assert callable(kvkeep.explain)
    assert room.page
    found = kvkeep.explain(None, text(60), policies=["local"], budget=20, max_new_tokens=1)
    assert found.runs[0].policy == "local"


def test_json_and_page_have_the_same_content():
    found = json.loads(record().to_json())
    assert found == shown(record().to_html())
    assert [run["policy"] for run in found["runs"]] == list(POLICIES)
    assert {
        *("schema", "kvkeep", "model", "question", "command", "notes", "tokens", "case", "chunk", "prompt_ends"),
        *("budget", "heads", "answer", "runs"),
    } == found.keys()
    assert "".join(found["tokens"]).count(text()) == 1


def test_tables_have_the_shapes_that_the_page_describes():
    for run in json.loads(record().to_json())["runs"]:
        H, n = len(record().heads), len(record().tokens) + len(run["answer"])
        M, A = -(-len(record().tokens) // record().chunk) + len(run["answer"]), len(run["answer"])
        shapes = {"dropped": (H, n), "scores": (H, n), "total": (H, n), "rivals": (M, H), "rival_scores": (M, H)}
        shapes |= {"mass": (M, n), "lost": (M, H), "attended": (A, n), "full": (A, n), "missed": (A, n)}
        assert {name: tuple(found.shape) for name, found in tables(run).items()} == shapes


def test_a_page_asks_nothing_of_the_network():
    page = record().to_html()
    assert "default-src 'none'" in page
    assert not any(word in page for word in ("http://www.w3.org/1999", "https://", "<link", "src="))


QUESTION = "Where does Boris keep his rope?"
SAMPLING = kvkeep.SamplingParams(max_new_tokens=6)


@pytest.mark.long
def test_the_default_is_what_generate_does():
    found = kvkeep.explain(None, text(), question=QUESTION, budget=80, max_new_tokens=6)
    model, tokenizer = kvkeep.load()
    engine = kvkeep.Engine(model, tokenizer, policy=DEFAULT, budget=80, rows=1)
    (wanted,) = engine.generate(kvkeep.Request(prompt=f"{text()}\n\n{QUESTION}", sampling=SAMPLING))
    assert [run.policy for run in found.runs] == [DEFAULT]
    assert tuple(found.runs[0].ledger.answered.ids) == wanted.token_ids
    assert found.prompt_ends == [wanted.prompt_tokens]


@pytest.mark.slow
def test_a_later_question_is_what_remember_does():
    found = kvkeep.explain(None, text(), question=QUESTION, case="later", budget=80, max_new_tokens=6)
    model, tokenizer = kvkeep.load()
    engine = kvkeep.Engine(model, tokenizer, policy=LATER, budget=80, rows=1)
    asked = kvkeep.Request(prompt=QUESTION, snapshot=engine.remember(text()), sampling=SAMPLING)
    (wanted,) = engine.generate(asked)
    assert [run.policy for run in found.runs] == [LATER]
    assert tuple(found.runs[0].ledger.answered.ids) == wanted.token_ids
    assert found.prompt_ends == [wanted.cached_tokens, wanted.prompt_tokens]
    assert [found.read(moment) for moment in range(3)] == [*found.prompt_ends, wanted.prompt_tokens + 1]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"policies": ["local"], "budget": 20, "max_new_tokens": 1},
        {"question": QUESTION, "case": "later", "budget": 0.5, "prefill_chunk": 30, "max_new_tokens": 2, "raw": True},
    ],
)
def test_the_call_on_the_page_makes_the_same_page(options):
    found = kvkeep.explain(None, text(60), **options)
    again = eval(found.command, {"kvkeep": kvkeep, "text": text(60)})
    assert again.to_json() == found.to_json()


def test_a_text_that_fits_is_noted():
    found = kvkeep.explain(None, text(60), max_new_tokens=2)
    said = f"Nothing is evicted: {found.budget} slots hold all of the text and the answer. Try a budget of 20%."
    assert found.notes == [said]
    assert not (found.runs[0].ledger.dropped >= 0).any()


def test_the_word_at_which_answers_part():
    for run in record().runs:
        ids, answer = run.ledger.answered.ids, record().answer
        same = next((i for i, (a, b) in enumerate(zip(run.answer, answer, strict=False)) if a != b), None)
        assert run.parting == same
        assert (run.agreement == 1.0) == (run.parting is None)
        assert run.parting is None or run.parting < len(ids)
    assert any(run.parting is not None for run in record().runs)


@functools.cache
def loaded():
    return kvkeep.load()


def test_a_text_that_is_too_long_for_its_moments_the_model_or_a_page_is_noted_or_refused(monkeypatch):
    checkpoint = find(str(model_folders.folder()))
    model, message = read_weights(checkpoint), "the quick brown fox jumps over the lazy dog. " * 20

    def prompt():
        asked = check(["local"], 20, prefill_chunk=2, max_new_tokens=3, case="inside")
        return _prompt(checkpoint, model, message, message, asked, raw=True)

    found, notes = prompt()
    n, trained = len(found.ids), model_folders.TRAINED_LENGTH
    assert (found.chunk, sum(found.sizes)) == (2, n)
    assert notes == [f"The text is longer than the {trained} tokens that the model was trained for."]
    monkeypatch.setattr("kvkeep.explain.explain.trained_length", lambda config: n + 3)
    monkeypatch.setattr("kvkeep.explain.explain._MOST_CHUNKS", 8)
    found, notes = prompt()
    assert found.chunk == -(-n // 8) > 2
    assert notes == [
        f"Time is sampled: {n} tokens were read in chunks of {found.chunk} instead of 2, so that there are at most "
        f"{MOST_MOMENTS} moments."
    ]
    monkeypatch.setattr("kvkeep.explain.explain._MOST_TOKENS", n - 1)
    with pytest.raises(InputError, match=f"The text has {n} tokens, more than the {n - 1} of a page. Give a part of"):
        prompt()


def test_a_share_grows_to_what_policies_protect_and_a_default_may_evict_nothing():
    def slots(policies, budget, tokens):
        notes = []
        return _slots(
            check(policies, budget, prefill_chunk=None, max_new_tokens=3, case="inside"), tokens, notes
        ), notes

    note = "The budget is 20 tokens, so that every policy has room for the tokens that it protects."
    assert slots(["streaming_llm:sinks=20", "local"], 0.1, 100) == (20, [note])
    assert slots(["local"], 0.1, 100) == (10, [])
    assert slots(["full"], 0.1, 100) == (10, [])
    assert slots(["local"], 7, 100) == (7, [])
    assert slots(["full"], None, 5000) == (5003, [])
    assert slots(["local"], None, 5000) == (DEFAULT_BUDGET, [])
    assert slots(["local"], None, 100)[1][0].startswith("Nothing is evicted: 103 slots hold all")


@pytest.mark.slow
def test_long_time_is_sampled_and_the_page_says_so():
    found = kvkeep.explain(None, text(500), policies=["local"], budget=64, prefill_chunk=1, max_new_tokens=2)
    assert found.chunk > 1
    assert "Time is sampled" in found.notes[0]
    assert found.runs[0].ledger.moments <= MOST_MOMENTS


@pytest.mark.slow
def test_a_policy_that_never_evicts_has_room_for_everything():
    found = kvkeep.explain(None, text(80), policies=["full", "h2o"], budget=0.5, max_new_tokens=2)
    assert found.runs[0].agreement == 1.0


@pytest.mark.slow
def test_a_share_of_a_short_text_grows_to_what_policies_protect():
    found = kvkeep.explain(None, text(80), policies=["local", "snapkv"], budget=0.2, max_new_tokens=2)
    assert found.budget == 32
    assert found.notes == ["The budget is 32 tokens, so that every policy has room for the tokens that it protects."]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["scissorhands", "adakv", "streaming_llm", "keydiff", "reread", "tova", "knorm"])
def test_other_kinds_of_policies(policy):
    found = kvkeep.explain(None, text(150), policies=[policy], budget=60, prefill_chunk=32, max_new_tokens=3)
    ledger = found.runs[0].ledger
    assert ledger.read == len(found.tokens) + len(found.runs[0].answer)
    assert int((ledger.dropped >= 0).sum())
    assert ledger.total[:, : ledger.read].isfinite().all()


@pytest.mark.slow
def test_layers_share_a_budget_in_chunks_too():
    """As they do in an engine, and so in ``kvkeep remember --prefill-chunk``."""
    found = kvkeep.explain(
        None, text(150), question="What?", case="later", budget=60, prefill_chunk=32, max_new_tokens=1
    )
    assert found.runs[0].policy == "reread:later"
    assert len(set(found.runs[0].ledger.answered.budgets)) > 1


def test_a_model_of_your_own_is_left_as_it_was():
    model, tokenizer = kvkeep.load()
    before = copy.deepcopy(dict(model.named_parameters()))
    found = kvkeep.explain(model, text(60), tokenizer=tokenizer, policies=["h2o"], budget=30, max_new_tokens=2)
    assert len(found.runs[0].answer) <= 2
    assert all(torch.equal(before[name], now) for name, now in model.named_parameters())
    with pytest.raises(InputError, match="tokenizer"):
        kvkeep.explain(model, text(60))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"text": "  \n"}, InputError, "empty"),
        ({"text": "a\0b"}, InputError, "binary"),
        ({"text": "a", "raw": True}, InputError, "single token"),
        ({"text": "\ud800"}, InputError, "UTF-8"),
        ({"policies": []}, PolicyError, "one to six"),
        ({"policies": "h2o"}, PolicyError, "list"),
        ({"policies": ["h3o"]}, PolicyError, "Did you mean"),
        ({"policies": [3]}, PolicyError, "no policy"),
        ({"policies": ["h2o", "h2o"]}, InputError, "different"),
        ({"policies": ["spatten"], "prefill_chunk": 16}, UnsupportedOperationError, "prefill_chunk"),
        ({"case": "late"}, InputError, "neither inside nor later"),
        ({"case": "later"}, InputError, "A question that comes later is missing"),
        ({"case": "later", "text": b"a", "question": "Why"}, InputError, "are texts"),
        ({"budget": 0.0}, BudgetError, "outside"),
        ({"budget": 0}, BudgetError, "1"),
        ({"budget": "20%"}, BudgetError, "whole number"),
        ({"budget": 3, "policies": ["h2o:recent=8"]}, BudgetError, "at least 8"),
        ({"prefill_chunk": 0}, KVKeepError, "prefill_chunk"),
        ({"max_new_tokens": MOST_NEW_TOKENS + 1}, InputError, "moments"),
        pytest.param({"text": "word " * 2**18}, InputError, "a part of it", marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_checked_annotations")
def test_refused(given, error, said):
    model, tokenizer = loaded()
    with pytest.raises(error, match=said):
        explain(model, tokenizer=tokenizer, **{"text": text(60), "max_new_tokens": 1} | given)


def test_packed_numbers_come_back():
    dropped = torch.tensor([[-1, 0], [253, 7]], dtype=torch.int16)
    assert unpacked(moments(dropped)).tolist() == [[255, 0], [253, 7]]
    values = torch.rand(7, 5) ** 8 * 40
    assert torch.allclose(unpacked(shades(values)).sqrt(), values.double().sqrt(), atol=0.5 / 255 * 40**0.5)
    assert unpacked(shades(torch.zeros(2, 3))).tolist() == [[0.0] * 3] * 2
    assert shades(torch.zeros(0, 3))["shape"] == [0, 3]


def test_a_table_is_packed_a_few_rows_at_a_time():
    """Of 100 000 tokens and 254 moments the numbers in float64 would take 200 MB, several times."""
    widest = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            widest.append(found.nbytes if isinstance(found, torch.Tensor) and not func.is_view else 0)
            return found

    with Made():
        shades(torch.rand(254, 500))
    assert sorted(widest)[-2] <= 254 * 500  # what was given, and the bytes of the table
    assert unpacked(short_floats(torch.zeros(0, 3))).shape == (0, 3)
    odd = unpacked(short_floats(torch.tensor([[torch.nan, torch.inf, -2.0]])))
    assert odd[0, 0].isnan()
    assert odd[0, 1:].tolist() == [torch.inf, -2.0]


def test_pieces_are_the_text():
    _, tokenizer = kvkeep.load()
    said = "A día 👩‍👩‍👧 שלום\n\tx  y\u2028 \U0001f389" * 3
    ids = tokenizer(said, add_special_tokens=False)["input_ids"]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)
    assert pieces(tokenizer, []) == []


def test_a_model_with_states_is_refused():
    from transformers import Lfm2Config

    config = Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"])
    with pytest.raises(UnsupportedModelError, match="keep a state"):
        refuse_states("some model", config)
