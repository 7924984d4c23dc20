"""Policies that look behind the rotation, on a model whose kinds of layers rotate differently: the plain loops get the
keys without the rotation that transformers' own function takes from them, layer by layer.
"""

import functools
from dataclasses import replace

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import apply_rotary_pos_emb

import kvkeep
from kvkeep import Layer
from kvkeep.types import Phase

from .loops import Step, TooCloseError, average, softmax
from .oracles import rule
from .rules_reread import Reread

WINDOW, PROMPT, NEW = 24, 50, 6
CONFIG = Gemma3TextConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    query_pre_attn_scalar=4,
    layer_types=["sliding_attention", "full_attention"] * 2,
    sliding_window=WINDOW,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    },
    eos_token_id=None,
    pad_token_id=0,
)


def build(seed=0):
    torch.manual_seed(seed)
    model = Gemma3ForCausalLM(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return kvkeep.attach(model)


def angles(model, number, positions):
    """transformers' own cosines and sines for a layer."""
    kind, x = CONFIG.layer_types[number], torch.zeros(1)
    return model.model.rotary_emb(x, torch.as_tensor(positions)[None], kind)


def turned(model, number, x, positions, *, back=False):
    cos, sin = angles(model, number, positions)
    return apply_rotary_pos_emb(x[None], x[None], cos, -sin if back else sin)[0][0]


def ahead(model, number, by, x, positions):
    """Vectors as the model would have rotated them ``by`` positions later."""
    plain = turned(model, number, x[None], positions, back=True)
    return turned(model, number, plain, torch.tensor(positions) + by)[0]


class RereadHere(Reread):
    """`Reread` with logits of rotated keys: queries of the second reading are those of the text's end and on."""

    turn = None

    def prompt_scores(self, step):
        found = dict.fromkeys(range(len(step.keys)), 0.0)
        for queries in step.vectors:
            ahead = self.turn(queries, step.queries)
            for position, query, later in zip(step.queries, queries, ahead, strict=True):
                logits = step.scaling * (later @ step.keys.T)
                first = step.scaling * (step.keys[self.seen_from(position) : position + 1] @ query)
                total = logits.exp().sum() + first.exp().sum()
                if position:
                    found = {j: max(found[j], float(logits[j].exp() / total)) for j in found}
        return found


def expected(model, number, steps, policy, budget):
    """What the loops keep of one row in a layer after its steps, for each head."""
    window = WINDOW if CONFIG.layer_types[number] == "sliding_attention" else None
    query = torch.cat([q for q, _, _ in steps], dim=1)
    keys = torch.cat([k for _, k, _ in steps], dim=1)
    plain = turned(model, number, keys, torch.arange(keys.shape[1]), back=True).double()
    query, keys = query.double(), keys.double()
    heads, scaling = len(keys), CONFIG.query_pre_attn_scalar**-0.5
    rules = []
    for _ in range(heads):
        made = rule(policy, min(budget, window or budget), 1, layer=number, sequence=0)
        if isinstance(made, Reread):
            made.__class__ = RereadHere
            made.seen_from = lambda p: max(0, p + 1 - window) if window else 0
        rules.append(made)
    kept, seen = [[] for _ in range(heads)], 0
    for q, _, phase in steps:
        new = list(range(seen, seen + q.shape[1]))
        seen += len(new)
        for head, one in enumerate(rules):
            group = query[head * 2 : head * 2 + 2]
            rows = []
            for p in new:
                shown = [j for j in kept[head] + new if j <= p and (window is None or j > p - window)]
                mine = [softmax((scaling * keys[head, shown] @ each[p]).tolist()) for each in group]
                rows.append([dict(zip(shown, row, strict=True)) for row in mine])
            step = Step(
                new,
                [average(row) for row in rows],
                [[row[g] for row in rows] for g in range(2)],
                plain[head, :seen].tolist(),
                [],
                phase is Phase.DECODE,
                [group[g, new] for g in range(2)],
                scaling,
            )
            if isinstance(one, RereadHere):
                step = replace(step, keys=keys[head, :seen])
                one.turn = functools.partial(ahead, model, number, seen)
            held = [j for j in kept[head] + new if window is None or j > seen - window]
            # a token that the window has passed is gone before a policy sees it
            one.look(0, step if isinstance(one, RereadHere) else replace(step, queries=[j for j in new if j in held]))
            kept[head] = one.cut(0, held, seen, decode=phase is Phase.DECODE)
    return kept


POLICIES = [
    "keydiff:recent=4,sinks=2,rotated=false",
    "leverage:recent=4,sinks=2",
    "blend:recent=4,sinks=2,window=4,kernel=3",
    "reread:recent=4,sinks=2",
]


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("policy", POLICIES)
def test_each_layer_keeps_what_the_loops_keep(policy, monkeypatch):
    steps, own = {}, Layer.step

    def noted(layer, query, keys, values, *, options, phase, real=None):
        steps.setdefault(layer._index, []).append((query[0].clone(), keys[0].clone(), phase))
        return own(layer, query, keys, values, options=options, phase=phase, real=real)

    monkeypatch.setattr(Layer, "step", noted)
    for seed in range(20):
        steps.clear()
        model, generator = build(seed), torch.Generator().manual_seed(seed)
        ids = torch.randint(1, 97, (1, PROMPT + NEW), generator=generator)
        cache = kvkeep.BoundedCache(CONFIG, policy, 14)
        model(ids[:, :PROMPT], past_key_values=cache)
        for t in range(PROMPT, PROMPT + NEW):
            model(ids[:, t : t + 1], past_key_values=cache)
        try:
            want = {n: expected(model, n, mine, policy, 14) for n, mine in steps.items()}
        except TooCloseError:
            continue
        for number, heads in want.items():
            found = [sorted(head[head >= 0].tolist()) for head in cache.positions(number)[0]]
            assert found == heads, (number, seed)
        return
    raise AssertionError("no seed decides clearly")


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [64, 16])
@pytest.mark.parametrize("policy", [*POLICIES, "expected_attention:recent=4,sinks=2", "keydiff:document"])
def test_an_engine_writes_what_generate_writes(policy, chunk):
    """Texts of different lengths at once, in chunks, under policies that look behind the rotation of each layer.

    In float64: rows of several texts round otherwise than one, and among random keys scores come close to each other.
    """
    model, generator = build().double(), torch.Generator().manual_seed(5)
    prompts = [torch.randint(1, 97, (n,), generator=generator).tolist() for n in (30, 50, 41)]
    engine = kvkeep.Engine(model, None, policy=policy, budget=14, prefill_chunk=chunk, rows=3)
    results = engine.generate(
        [kvkeep.Request(prompt=ids, sampling=kvkeep.SamplingParams(max_new_tokens=8)) for ids in prompts]
    )
    for ids, result in zip(prompts, results, strict=True):
        cache = kvkeep.BoundedCache(CONFIG, policy, 14, prefill_chunk=chunk)
        out = model.generate(torch.tensor([ids]), past_key_values=cache, max_new_tokens=8, do_sample=False)
        assert list(result.token_ids) == out[0, len(ids) :].tolist()


@torch.no_grad()
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("policy", ["tova", "streaming_llm", "keydiff:rotated=false"])
def test_slot_positions_with_room_for_all_are_true_positions(policy, chunk):
    model, generator = build(), torch.Generator().manual_seed(3)
    ids = torch.randint(1, 97, (2, PROMPT + NEW), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    at = (mask.cumsum(1) - 1).clamp(min=0)
    found = {}
    for mode in ("true", "slot"):
        cache = kvkeep.BoundedCache(CONFIG, policy, PROMPT + NEW, positions=mode, prefill_chunk=chunk)
        assert cache.position_mode == mode
        parts = [slice(0, PROMPT), *(slice(t, t + 1) for t in range(PROMPT, PROMPT + NEW))]
        logits = [
            model(ids[:, p], attention_mask=mask[:, : p.stop], position_ids=at[:, p], past_key_values=cache).logits
            for p in parts
        ]
        found[mode] = torch.cat(logits, dim=1)[mask.bool()]
    torch.testing.assert_close(found["slot"], found["true"], rtol=1e-4, atol=1e-4)
    assert torch.equal(found["slot"].argmax(-1), found["true"].argmax(-1))


def test_memories_made_with_true_positions_still_open():
    """Without being asked, models that had no slot positions keep the mode that their memories were made in."""
    assert kvkeep.BoundedCache(CONFIG, "streaming_llm", 16).position_mode == "true"
    assert kvkeep.BoundedCache(CONFIG, "streaming_llm", 16, positions="slot").position_mode == "slot"
