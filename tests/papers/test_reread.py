"""Reread: what a second reading of the prompt attends to, from the queries of the first one."""

import pytest
import torch
from phases import phase_of
from transformers import GPT2Config, LlamaConfig

import kvkeep
from kvkeep import AttentionOptions, BudgetError, Layer, parse
from kvkeep.attention_stats import Nothing
from kvkeep.backends import AttentionInputs, SecondReading, reference
from kvkeep.rotary import Rotation
from kvkeep.types import Phase, Slots, View

from .cases import CHAT, DECODE, Case, family, variant
from .lockstep import compare, lockstep, make_layer, retained

CASES = [
    *family("reread:recent=3,sinks=1", budgets=(3, 5, 16)),
    *variant("reread", budgets=(9, 24)),
    *variant("reread:recent=0,sinks=0", budgets=(1, 16)),
    *family("reread:recent=3,sinks=1,decode=score", budgets=(5, 16)),
    Case("reread:recent=2", 12, CHAT, chunk=1, heads=1),
]
OPTIONS = AttentionOptions(scaling=0.4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeps_what_is_read_again(case):
    compare(case)


def normal(heads, n, seed=0):
    return torch.randn(2, heads, n, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scores_of(layer):
    """The state by position, of the tokens held."""
    order = layer.store.positions.argsort(dim=-1)
    return layer.state["again"].gather(-1, order)


@pytest.mark.parametrize("scaling", [1.0, 1.3])
@pytest.mark.parametrize("mode", ["true", "slot"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_it_is_a_second_reading(dtype, mode, scaling):
    """The same tokens once more behind the text: each key gets exactly what the turned queries say, partial rotation,
    YaRN's factor and padding included."""
    n, rotation = 23, Rotation(torch.tensor([1.0, 0.2, 0.01]), scaling=scaling)
    query, keys, values = normal(4, n), normal(2, n, 1), normal(2, n, 2)
    places = torch.arange(n).expand(2, 1, n)
    layer = Layer(parse("reread"), 40, rotation=rotation if mode == "slot" else None)
    layer.rotary = rotation if mode == "true" else None
    real = torch.arange(n + 3) >= torch.tensor([[3], [3]])
    padded = [torch.nn.functional.pad(x, (0, 0, 3, 0), value=9.0) for x in (query, keys, values)]
    turned = [torch.cat([x[:, :, :3], rotation.apply(x[:, :, 3:], places)], dim=2) for x in padded[:2]]
    turned = [x.to(dtype) for x in turned]
    layer.step(*turned, padded[2].to(dtype), options=OPTIONS, phase=phase_of(query), real=real)

    twice, twice_keys = (
        rotation.apply(torch.cat([x, x], dim=2), torch.arange(2 * n)[None, None]) for x in (query, keys)
    )
    p = reference.probabilities(
        twice[:, :, n + 1 :],
        twice_keys,
        torch.arange(n + 1, 2 * n).expand(2, -1),
        torch.arange(2 * n).expand(2, 2, -1),
        OPTIONS,
    )
    torch.testing.assert_close(scores_of(layer)[:, :, -n:].double(), p.amax(dim=(2, 3))[..., :n], rtol=1e-4, atol=1e-6)


def test_the_memory_of_a_long_prompt_is_a_few_blocks(monkeypatch):
    """The result does not depend on the blocks, down to one row."""
    found = []
    for least, size in ((1, 1), (7, 10_000), (1, 2**24)):
        monkeypatch.setattr("kvkeep.backends.base.BLOCK_BYTES", {"cpu": size})
        monkeypatch.setattr("kvkeep.backends.base.LEAST_ROWS", least)
        layer = Layer(parse("reread"), 64)
        layer.step(normal(4, 40), normal(2, 40, 1), normal(2, 40, 2), options=OPTIONS, phase=phase_of(normal(4, 40)))
        found.append(scores_of(layer))
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[1], found[2])


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        AttentionOptions(scaling=0.4, softcap=1.5),
        AttentionOptions(scaling=0.4, window=9),
        AttentionOptions(scaling=0.4, sinks=torch.tensor([0.5, 2.0, -1.0, 9.0])),
    ],
    ids=["plain", "softcap", "window", "sinks"],
)
def test_the_work_in_blocks_is_the_definition(options):
    positions = torch.cat([torch.tensor([4, -1, 7, 2]), torch.arange(11, 30)]).expand(2, 2, -1).int()
    now = torch.arange(11, 30).repeat(2, 1).index_fill(1, torch.tensor([3]), -1)
    slots = Slots(normal(2, 23, 1).nan_to_num(), normal(2, 23, 2), positions)
    rotation, length = Rotation(torch.tensor([0.7, 0.1])), torch.tensor([[30], [30]])
    given = (normal(4, 19), slots, now)
    want = reference.reread(AttentionInputs(*given, options=options), SecondReading(length=length, rotation=rotation))
    backend = kvkeep.backends.choose(torch.device("cpu"), torch.float32)
    got = backend.reread(AttentionInputs(*given, options=options), SecondReading(length=length, rotation=rotation))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)
    assert (got[:, :, 1] == 0).all()
    _, report = backend.attend(AttentionInputs(*given, statistic=Nothing(), options=options))
    assert report.sums == {}


def test_generated_tokens_do_not_compete():
    chosen = []
    for _, turn in lockstep(Case("reread:recent=4", 16, (40, *DECODE))):
        chosen = chosen or [[head[:12] for head in row] for row in turn.kept]
        for kept_row, chosen_row, seen in zip(turn.kept, chosen, turn.seen, strict=True):
            assert kept_row == [[*head, *range(seen - 4, seen)] for head in chosen_row]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_key_that_is_no_number_breaks_its_head_alone(dtype, bad):
    given = [normal(heads, 30, seed).to(dtype) for heads, seed in ((4, 0), (2, 1), (2, 2))]
    clean, layer = (Layer(parse("reread:recent=2,sinks=1"), 9) for _ in range(2))
    clean.step(*[x.clone() for x in given], options=OPTIONS, phase=phase_of(given[1]))
    given[1][0, 0, 11] = bad
    layer.step(*given, options=OPTIONS, phase=phase_of(given[1]))
    assert [len(head) for row in retained(layer) for head in row] == [9] * 4
    assert torch.equal(layer.state["again"][1], clean.state["again"][1])


def test_logits_far_above_the_first_reading():
    """Keys that only the turned queries meet: the sum of exponentials overflows without the largest logit."""
    rotation = Rotation(torch.tensor([torch.pi / 40]))  # a half turn after 40 positions
    query, keys = torch.zeros(1, 2, 40, 2), torch.zeros(1, 1, 40, 2)
    query[..., 0], keys[..., 0] = 30.0, -30.0
    slots, now = Slots(keys, keys, torch.arange(40).view(1, 1, 40).int()), torch.arange(40)[None]
    inputs = AttentionInputs(query, slots, now, AttentionOptions(scaling=1.0))
    backend = kvkeep.backends.choose(torch.device("cpu"), torch.float32)
    _, _, again = backend.attend_twice(inputs, SecondReading(torch.tensor([[40]]), rotation))
    torch.testing.assert_close(again, torch.full((1, 1, 40), 1 / 40))


LLAMA = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 61, "intermediate_size": 32}


def test_a_model_without_rotary_positions_is_refused():
    with pytest.raises(kvkeep.UnsupportedModelError, match=r"needs rotary positions .* for example leverage"):
        kvkeep.BoundedCache(GPT2Config(), "reread", 16)
    layers = kvkeep.BoundedCache(LlamaConfig(**LLAMA), "reread", 16).bounded_layers()
    assert all(layer.rotary is not None for layer in layers.values())


def test_more_protected_than_the_budget_is_refused():
    with pytest.raises(BudgetError):
        make_layer(Case("reread", 3, (1,)))


def test_shares_of_heads_compare_by_the_length_of_their_values():
    """Of tokens that are there; among the heads of one layer, and with equal heads not at all."""
    positions = torch.tensor([[[0, 1, 2], [-1, 1, 2]]])
    values = torch.tensor([[[[3.0, 4.0]] * 3, [[9.0, 9.0], [0.0, 1.0], [0.0, 3.0]]]])
    again = torch.tensor([[[0.5, 0.1, 0.2], [0.0, 0.3, 0.4]]])
    seen = torch.tensor([3])
    view = View(
        positions=positions,
        keys=values,
        values=values,
        seen=seen,
        budget=2,
        new=seen,
        prompt=seen,
        phase=Phase.PREFILL,
        layer=0,
        sequences=torch.zeros(1, dtype=torch.int64),
    )
    torch.testing.assert_close(parse("reread").score(view, {"again": again}), again)
    want = again * torch.tensor([[[5.0], [2.0]]])
    torch.testing.assert_close(parse("reread:later").score(view, {"again": again}), want)
