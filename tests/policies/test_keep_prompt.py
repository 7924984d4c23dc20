"""A prompt that stays while its answer is generated: against a plain loop over every policy, and the laws."""

import pytest
import torch

import kvkeep
from kvkeep import BudgetError, InputError, Layer
from kvkeep.cache.decode_replay import DecodePath
from kvkeep.errors import PolicyError
from kvkeep.kv.ranking import pinned
from kvkeep.kv.row_copy import put_row, take_row
from kvkeep.policies._keep_prompt import check_read, keeping, with_prompt
from kvkeep.testing import LAWS, Case
from kvkeep.types import AttentionOptions, Phase

OPTIONS = AttentionOptions(scaling=0.35)
POLICIES = [
    *("h2o:recent=2", "local", "streaming_llm:sinks=1", "tova", "keyformer", "ahakv:recent=2", "knorm", "keydiff"),
    *(
        "random",
        "random:mode=reservoir",
        "random:buffer=3,recent=2",
        "vase:buffer=3,recent=2",
        "rkv:buffer=3,window=2",
        "triattention:buffer=3,sinks=1,recent=2",
    ),
    *("scissorhands:window=2,recent=2,drop=3", "scissorhands_release:window=4,recent=2", "h2o_avg:recent=2"),
    *("snapkv:window=2,decode=score", "topk:h2=0.5", "leverage", "sparse_strided:h2=0.25,stride=3"),
    "h2o:decay=0.9,recent=2",
]


def tokens(n, *, rows=1, seed=0):
    """Queries, keys and values of ``n`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, heads, n, 8, generator=generator) for heads in (4, 2, 2))


def feed(layer, n, phase, *, rows=1, seed=0, real=None):
    return layer.step(*tokens(n, rows=rows, seed=seed), options=OPTIONS, phase=phase, real=real)


def held(layer, row=0):
    return [{j for j in head if j >= 0} for head in layer.store.positions[row].tolist()]


def layer_of(policy, budget, keep, **options):
    return Layer(keeping(kvkeep.parse(policy), keep), budget, **options)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_of_a_prompt_stays_and_generated_tokens_compete(policy):
    """The plain rule: what was read never goes, whatever the policy thinks of it, and the budget is never exceeded."""
    layer = layer_of(policy, 24, True)
    feed(layer, 13, Phase.PREFILL)
    for step in range(50):
        feed(layer, 1, Phase.DECODE, seed=step)
        assert all({*range(13)} <= head and len(head) <= 24 for head in held(layer))
    assert any(j > 24 for j in held(layer)[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_share_of_a_prompt_is_cut_once_and_then_stays(policy):
    plain, layer = layer_of(policy, 12, None), layer_of(policy, 24, 0.5)
    feed(layer, 40, Phase.PREFILL)
    cut = held(layer)
    assert all(len(head) <= 12 for head in cut)
    for step in range(50):
        feed(layer, 1, Phase.DECODE, seed=step)
        assert all(first <= now and len(now) <= 24 for first, now in zip(cut, held(layer), strict=True))
    if policy in ("local", "streaming_llm:sinks=1", "tova", "knorm", "keydiff", "random:mode=reservoir"):
        feed(plain, 40, Phase.PREFILL)  # policies whose scores do not depend on the budget
        assert cut == held(plain)


@pytest.mark.parametrize("policy", ["local", "tova", "random", "rkv:buffer=3,window=2", "scissorhands:window=2,drop=3"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_a_later_turn_keeps_what_it_reads_but_not_the_answer_before(policy, chunk):
    layer = layer_of(policy, 40, True, prefill_chunk=chunk)
    feed(layer, 12, Phase.PREFILL)
    for step in range(60):
        feed(layer, 1, Phase.DECODE, seed=step)
    feed(layer, 9, Phase.PREFILL, seed=99)
    for step in range(30):
        feed(layer, 1, Phase.DECODE, seed=step)
    for head in held(layer):
        assert {*range(12), *range(72, 81)} <= head
        assert len(head & {*range(12, 72)}) < 15


def test_a_share_is_of_all_that_came_before_the_answer():
    layer = layer_of("local", 24, 0.5)
    feed(layer, 30, Phase.PREFILL)
    for step in range(20):
        feed(layer, 1, Phase.DECODE, seed=step)
    feed(layer, 6, Phase.PREFILL)
    assert held(layer) == [{*range(44, 56)}] * 2
    for step in range(40):
        feed(layer, 1, Phase.DECODE, seed=step)
    assert held(layer) == [{*range(44, 56), *range(84, 96)}] * 2


@pytest.mark.parametrize("keep", [True, 0.5])
@pytest.mark.parametrize("policy", ["h2o:recent=2", "random", "rkv:buffer=3,window=2"])
def test_rows_of_a_batch_keep_their_own_prompts(policy, keep):
    lengths, T = (6, 11, 9), 11
    real = torch.tensor([[column >= T - n for column in range(T)] for n in lengths])
    whole = layer_of(policy, 16, keep, sequences=[7, 8, 9])
    together, queries = tokens(T, rows=3), [tokens(1, rows=3, seed=step) for step in range(25)]
    whole.step(*together, options=OPTIONS, phase=Phase.PREFILL, real=real)
    for query in queries:
        whole.step(*query, options=OPTIONS, phase=Phase.DECODE)
    for row, n in enumerate(lengths):
        alone = layer_of(policy, 16, keep, sequences=[7 + row])
        alone.step(*(x[row : row + 1, :, T - n :] for x in together), options=OPTIONS, phase=Phase.PREFILL)
        for query in queries:
            alone.step(*(x[row : row + 1] for x in query), options=OPTIONS, phase=Phase.DECODE)
        assert held(alone) == held(whole, row)


KEPT = [(law, policy, keep) for n, law in enumerate(LAWS) for keep in (1, 0.5) for policy in POLICIES[n % 7 :: 7]]


@pytest.mark.parametrize(("law", "policy", "keep"), KEPT)
def test_the_laws_hold(law, policy, keep):
    """Prompts that leave room, in chunks and with padding; each law with every seventh policy."""
    for seed, chunk in ((0, None), (1, 4)):
        prompt = 9 if keep == 1 else 30
        case = Case(
            prompt=prompt, steps=14, budget=20, rows=2, heads=2, group=2, dim=4, chunk=chunk, padding=2, seed=seed
        )
        if law == "chunks_compose":
            case = Case(prompt=9, steps=0, budget=40, rows=1, heads=2, group=2, dim=4, chunk=3, seed=seed)
        if (law, keep) in (("pinned_tokens_stay", 1), ("enough_budget_is_full_attention", 0.5)):
            continue  # the law pins as many as fit, and here the prompt is pinned beside them; a share is cut anyway
        LAWS[law](keeping(kvkeep.parse(policy), keep), case)


@pytest.mark.parametrize("keep", [True, 0.5])
@pytest.mark.parametrize("window", [6, 100])
def test_a_sliding_window_still_forgets(keep, window):
    """A budget that holds the window has nothing to keep; a smaller one keeps the prompt until the window passes it."""
    layer = layer_of("local", 20, keep, window=window)
    feed(layer, 10, Phase.PREFILL)
    for step in range(85):
        feed(layer, 1, Phase.DECODE, seed=step)
    assert (0 in held(layer)[0]) == (window == 100)
    for step in range(30):
        feed(layer, 1, Phase.DECODE, seed=step)
    assert not held(layer)[0] & {*range(10)}


@pytest.mark.parametrize("keep", [True, 0.5])
@pytest.mark.parametrize("bits", ["8", "k8v4"])
def test_quantized_slots_stay(keep, bits):
    layer = layer_of("h2o:recent=2", 20, keep, kv_bits=bits)
    feed(layer, 15, Phase.PREFILL)
    first = held(layer)
    for step in range(40):
        feed(layer, 1, Phase.DECODE, seed=step)
    assert all(before <= now for before, now in zip(first, held(layer), strict=True))
    assert len(first[0]) == (15 if keep is True else 10)


@pytest.mark.parametrize("keep", [True, 0.5])
@pytest.mark.parametrize("policy", ["h2o:recent=2", "local", "snapkv:window=2,decode=score"])
def test_steps_stay_on_the_fast_path_after_one_prompt(policy, keep):
    layer = layer_of(policy, 24, keep)
    feed(layer, 12, Phase.PREFILL)
    for step in range(30):
        feed(layer, 1, Phase.DECODE, seed=step)
    if layer._backend.fuses:
        assert layer.paths.path in (DecodePath.FUSED, DecodePath.REPLAY)
    feed(layer, 3, Phase.PREFILL)
    feed(layer, 1, Phase.DECODE)
    if keep is True:  # two spans, of which a kernel knows nothing; a share protects all before the answer
        assert layer.paths.path is DecodePath.PLAIN
        assert "pins" in layer.paths.why


@pytest.mark.parametrize("keep", [True, 0.5])
@pytest.mark.parametrize("policy", ["h2o:recent=2", "random", "scissorhands:window=2,recent=2,drop=3"])
def test_a_row_that_was_copied_goes_on_bit_for_bit(policy, keep):
    old, new = (layer_of(policy, 24, keep) for _ in range(2))
    feed(old, 14, Phase.PREFILL)
    feed(new, 1, Phase.PREFILL, seed=5)
    for step in range(20):
        feed(old, 1, Phase.DECODE, seed=step)
    put_row(new.block, 0, take_row(old.block, 0))
    new.columns = old.columns
    new.find_lead()
    for step in range(20):
        one, two = (feed(layer, 1, Phase.DECODE, seed=50 + step) for layer in (old, new))
        assert torch.equal(one, two)
        assert torch.equal(old.store.positions, new.store.positions)


def test_a_reset_forgets_what_was_kept():
    layer = layer_of("local", 10, True)
    for _ in range(2):
        feed(layer, 6, Phase.PREFILL)
        for step in range(20):
            feed(layer, 1, Phase.DECODE, seed=step)
        assert {*range(6)} < held(layer)[0]
        layer.reset()
    feed(layer, 3, Phase.PREFILL)
    for step in range(20):
        feed(layer, 1, Phase.DECODE, seed=step)
    assert held(layer)[0] == {0, 1, 2, *range(16, 23)}


def test_a_prompt_without_room_is_refused_and_nothing_has_changed():
    layer = layer_of("streaming_llm:sinks=2", 16, True)
    feed(layer, 10, Phase.PREFILL)
    before = held(layer)
    with pytest.raises(BudgetError, match=r"keeps all 16 tokens that were read.* at least 17,.* keep_prompt=0\.5"):
        feed(layer, 6, Phase.PREFILL)
    assert held(layer) == before
    feed(layer, 5, Phase.PREFILL)  # one slot is left for new tokens
    feed(layer, 1, Phase.DECODE)


def test_no_budget_is_named_where_none_is_enough():
    class All(kvkeep.Policy):
        def protected(self, budget):
            return 0, budget

        def score(self, view, state):
            return view.positions.float()

    with pytest.raises(BudgetError, match=r"budget of 8\. Let the prompt be cut first: keep_prompt=0\.5"):
        check_read(keeping(All(), True), 8, ((0, 6),))


def test_a_share_that_leaves_no_room_is_refused_at_once():
    with pytest.raises(BudgetError, match=r"keep_prompt=0\.9 keeps 14 of 16 slots.*h2o:recent=8 needs others.* 22"):
        layer_of("h2o:recent=8", 16, 0.9)
    with pytest.raises(BudgetError, match=r"keep_prompt=0\.1 leaves a prompt 1 of 16 slots.*protects"):
        layer_of("streaming_llm:sinks=4", 16, 0.1)
    with pytest.raises(BudgetError, match="pinned"):
        layer_of("local", 16, 0.5, pins=[((0, 9),)])


@pytest.mark.parametrize("wrong", [0, -0.5, 1.5, float("nan"), "half", 2, [0.5]])
def test_what_is_no_share_is_refused(wrong):
    with pytest.raises(InputError, match="keep_prompt="):
        keeping(kvkeep.parse("h2o"), wrong)
    with pytest.raises(PolicyError, match="keep_prompt"):
        kvkeep.parse(f"h2o:keep_prompt={wrong}")


@pytest.mark.parametrize(("text", "share"), [("true", 1.0), ("True", 1.0), ("1", 1.0), ("false", None), ("none", None)])
def test_a_string_says_it_as_options_do(text, share):
    with pytest.raises(InputError, match="keep_prompt="):
        keeping(kvkeep.parse("h2o"), text)  # the argument itself is no text
    assert kvkeep.parse(f"h2o:keep_prompt={text}").keep_prompt == share


def test_a_policy_carries_the_option_in_its_string():
    kept = keeping(kvkeep.parse("h2o:recent=2"), True)
    assert kvkeep.spec(kept) == "h2o:keep_prompt=1.0,recent=2"
    assert kvkeep.parse(kvkeep.spec(kept)) == kept != kvkeep.parse("h2o:recent=2")
    assert keeping(kept, False) == kvkeep.parse("h2o:recent=2")
    assert keeping(kept, None) is kept
    assert keeping(kvkeep.parse("h2o"), None, 0.5).keep_prompt == 0.5


def test_bounds_of_prompts_and_pins_together():
    """Against the union of sets, for spans that touch, overlap or lie behind the prompt, and for no prompt."""
    last = 2**31 - 1
    rows = [(), ((0, 3),), ((2, 5),), ((5, 8),), ((6, 9), (12, 14)), ((0, 1), (4, 5)), ((1, 2), (4, 9))]
    for prompt in range(12):
        for pins in rows:
            flat = [bound for span in pins for bound in span]
            table = torch.tensor([flat + [last] * (4 - len(flat))], dtype=torch.int32)
            found = pinned(torch.arange(16)[None, None], with_prompt(table, torch.tensor([prompt])))
            wanted = {*range(prompt)} | {j for start, stop in pins for j in range(start, stop)}
            assert {j for j, is_in in enumerate(found[0, 0].tolist()) if is_in} == wanted
        alone = pinned(torch.arange(16)[None, None], with_prompt(None, torch.tensor([prompt])))
        assert alone.sum() == prompt
