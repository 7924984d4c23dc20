"""Models that are split over processes: tokens and kept positions are those of one process.

Processes add up the outputs of their heads in another order, so logits differ by rounding. They are compared with a
tolerance; tokens and positions are compared exactly, on models whose logits and scores have no ties.
"""

import pytest
import ranks
import torch

from kvkeep.policies.registry import available

OPTIONS = dict.fromkeys(("snapkv", "pyramidkv", "adakv", "restkv", "defensivekv"), "window=8")


def cases():
    """Every policy, and the ways of a cache."""
    for name in available():
        policy = f"{name}:{OPTIONS[name]}" if name in OPTIONS else name
        yield {"policy": policy, "budget": 90 if name in ("full", "topk_dynamic") else 40}
    yield {"policy": "tova", "budget": [30, 24]}
    yield {"policy": "adakv:window=8", "budget": [30, 24]}
    yield {"policy": "defensivekv:window=8", "budget": 30, "prefill_chunk": 16}
    yield {"policy": "adakv:window=8,alpha=0", "budget": 24, "prefill_chunk": 16, "pins": [(3, 12)]}
    yield {"policy": "scissorhands", "budget": 30, "pins": [(0, 5)]}
    yield {"policy": "spatten:delta=0.5", "budget": 40}  # the second layer chooses by what the first one has added up
    for policy in ("h2o", "topk:h2=0.5", "nacl:decode=score", "ahakv", "random", "leverage", "expected_attention"):
        yield {"policy": policy, "budget": 40, "head_budget": "ada:0.2", "prefill_chunk": 20}
    for kv_bits in ("8", "4", "k8v4"):
        yield {"policy": "h2o", "budget": 40, "kv_bits": kv_bits}
    yield {"policy": "adakv:window=8", "budget": 30, "prefill_chunk": 16, "kv_bits": "8"}
    yield {"policy": "tova:per_head=true", "budget": 40, "positions": "slot"}
    yield {"policy": "topk_dynamic:share=0.3", "budget": 90}
    yield {"policy": "random:mode=reservoir", "budget": 30, "sequences": [7, 9]}


def compare(alone, shared, most=1e-3):
    """Compare a case on one process with the same on several."""
    for one in shared:
        assert one["tokens"] == alone["tokens"]
        torch.testing.assert_close(torch.tensor(one["logits"]), torch.tensor(alone["logits"]), rtol=most, atol=most)
    for layer, whole in enumerate(alone["positions"]):
        rows = [[head for one in shared for head in one["positions"][layer][row]] for row in range(len(whole))]
        assert [[_held(head) for head in row] for row in rows] == [[_held(head) for head in row] for row in whole]


def _held(head):
    """The tokens of a head; heads with budgets of their own have different numbers of empty slots in a copy."""
    return [position for position in head if position >= 0]


@pytest.mark.long
def test_heads_that_share_their_tokens_are_those_of_one_process(tmp_path):
    folder = ranks.save_model(tmp_path)
    asked = [{"policy": "tova", "budget": 30}, {"policy": "adakv:window=8", "budget": 30, "kv_bits": "8"}]
    alone, shared = ranks.generate(folder, asked), ranks.run(2, ranks.generate, folder, asked)
    for number, most in enumerate((1e-3, 1e-2)):  # a number at the border of two codes gets either
        compare(alone[number], [one[number] for one in shared], most)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("count", [2, 4])
def test_every_policy_is_that_of_one_process(kind, count, tmp_path):
    folder, asked = ranks.save_model(tmp_path, kind), list(cases())
    (alone,), shared = ranks.run(1, ranks.generate, folder, asked), ranks.run(count, ranks.generate, folder, asked)
    wrong = []
    for number, case in enumerate(asked):
        try:
            most = 1e-2 if "kv_bits" in case else 1e-3  # a number at the border of two codes gets either
            compare(alone[number], [one[number] for one in shared], most)
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_engines_take_the_same_steps_on_all_ranks(count, tmp_path):
    folder = ranks.save_model(tmp_path)
    requests = [
        {"length": 40, "sampling": {"max_new_tokens": 12}},
        {"length": 25, "sampling": {"max_new_tokens": 20, "temperature": 1.0, "top_p": 0.9, "seed": 3}, "sequence": 1},
        {"length": 61, "sampling": {"max_new_tokens": 7, "repetition_penalty": 1.2}},
        {"length": 33, "sampling": {"max_new_tokens": 15, "temperature": 0.7}, "policy": "tova", "sequence": 2},
        {"length": 33, "sampling": {"max_new_tokens": 15, "temperature": 0.7}, "policy": "tova", "sequence": 5},
        {"length": 90, "sampling": {"max_new_tokens": 5}, "budget": 20},
    ]
    engines = [
        {"policy": "h2o", "budget": 32, "rows": 3},
        {"policy": "adakv:window=8", "budget": 32, "rows": 2, "prefill_chunk": 16},
        {"policy": "spatten", "budget": 32, "rows": 2},
        {"policy": "snapkv:window=8", "budget": 64, "rows": 3, "guard": 0.3},
        {"policy": "adakv:window=8", "budget": 64, "rows": 2, "guard": 0.3},
        {"policy": "defensivekv:window=8", "budget": 32, "kv_memory": 2**20},
        {"policy": "nacl", "budget": 32, "rows": 2, "prefill_chunk": 16, "prefix_memory": 2**20, "kv_bits": "8"},
    ]
    (alone,) = ranks.run(1, ranks.run_engine, folder, engines, requests)
    assert any(one["guarded"][0] is not None for one in alone)
    for shared in ranks.run(count, ranks.run_engine, folder, engines, requests):
        for options, mine, whole in zip(engines, shared, alone, strict=True):
            for name in ("finish_reason", "error", "token_ids", "budget", "guarded"):
                assert mine[name] == whole[name], (options, name)
            for loss, expected in zip(mine["loss"], whole["loss"], strict=True):
                assert loss == pytest.approx(expected, abs=1e-4), options


@pytest.mark.slow
def test_sessions_and_remembered_texts_go_on_in_two_processes(tmp_path):
    folder = ranks.save_model(tmp_path)
    for policy in ("h2o", "adakv:window=8"):
        (alone,) = ranks.run(1, ranks.converse, folder, policy)
        assert ranks.run(2, ranks.converse, folder, policy) == [alone, alone]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_memory_of_two_processes_goes_on_in_one_and_in_four(kind, tmp_path):
    folder = ranks.save_model(tmp_path / "model", kind)
    asked = [
        {"policy": "h2o", "budget": 24},
        {"policy": "tova", "budget": 24},
        {"policy": "adakv:window=8", "budget": 24},
        {"policy": "spatten", "budget": 24},
        {"policy": "leverage", "budget": 24},
        {"policy": "scissorhands", "budget": 24},
        {"policy": "random", "budget": 24, "kv_bits": "8"},
        {"policy": "h2o", "budget": 24, "pins": [(3, 9)], "head_budget": "ada:0.1"},
        {"policy": "snapkv:window=8", "budget": 24, "head_budget": "ada:0.1", "kv_bits": "8"},
    ]
    (reference,) = ranks.run(1, ranks.save_snapshots, folder, asked, str(tmp_path))
    saved = ranks.run(2, ranks.save_snapshots, folder, asked, str(tmp_path))
    _same(reference, saved, asked)
    for count in (1, 2, 4):
        _same(reference, ranks.run(count, ranks.continue_snapshots, folder, asked, str(tmp_path)), asked)


def _same(reference, shared, asked):
    for number, case in enumerate(asked):
        whole = reference[number]
        assert all(one[number]["tokens"] == whole["tokens"] for one in shared), case
        for layer, heads in enumerate(whole["positions"]):
            mine = [head for one in shared for head in one[number]["positions"][layer]]
            assert [_held(head) for head in mine] == [_held(head) for head in heads], case
