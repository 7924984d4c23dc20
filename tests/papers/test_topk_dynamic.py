"""Top-K as an oracle: everything is held, a generated token attends to the largest probabilities alone."""

import pytest
import torch

from kvkeep import AttentionOptions, Layer, parse
from kvkeep.types import Phase

from .loops import dot, softmax


def by_loops(query, keys, values, *, share, renormalise):
    """policies.md §15, reading 1, for one query head: ``int(share * (cnt - 1))`` largest and the newest."""
    p = softmax([0.5 * dot(query, key) for key in keys])
    n = int(share * (len(keys) - 1))
    older = sorted(range(len(keys) - 1), key=p.__getitem__, reverse=True)[:n]
    used = {*older, len(keys) - 1}
    total = sum(p[j] for j in used) if renormalise else 1.0
    return [sum(p[j] / total * values[j][e] for j in used) for e in range(len(values[0]))]


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.95])
def test_uses_the_largest_probabilities(share, renormalise):
    g = torch.Generator().manual_seed(1)
    query, keys, values = (torch.randn(2, heads, 40, 6, generator=g) for heads in (4, 2, 2))
    policy = parse(f"topk_dynamic:share={share},renormalise={str(renormalise).lower()}")
    layer = Layer(policy, 40)
    options = AttentionOptions(scaling=0.5)
    layer.step(query[:, :, :20], keys[:, :, :20], values[:, :, :20], options=options, phase=Phase.PREFILL)
    for t in range(20, 40):
        at = slice(t, t + 1)
        out = layer.step(query[:, :, at], keys[:, :, at], values[:, :, at], options=options, phase=Phase.DECODE)
        for row in range(2):
            for head in range(4):
                want = by_loops(
                    query[row, head, t].tolist(),
                    keys[row, head // 2, : t + 1].tolist(),
                    values[row, head // 2, : t + 1].tolist(),
                    share=share,
                    renormalise=renormalise,
                )
                torch.testing.assert_close(
                    out[row, head, 0].double(), torch.tensor(want).double(), rtol=1e-4, atol=1e-5
                )


def test_the_prompt_is_attended_in_full_and_a_share_of_1_is_the_full_cache():
    g = torch.Generator().manual_seed(2)
    query, keys, values = (torch.randn(1, 2, 30, 4, generator=g) for _ in range(3))
    outs = []
    for policy in ("full", "topk_dynamic", "topk_dynamic:share=0.1"):
        layer = Layer(parse(policy), 30)
        options = AttentionOptions(scaling=0.5)
        first = layer.step(query[:, :, :20], keys[:, :, :20], values[:, :, :20], options=options, phase=Phase.PREFILL)
        last = [
            layer.step(
                query[:, :, t : t + 1],
                keys[:, :, t : t + 1],
                values[:, :, t : t + 1],
                options=options,
                phase=Phase.DECODE,
            )
            for t in range(20, 30)
        ]
        outs.append((first, torch.cat(last, dim=2)))
    assert torch.equal(outs[0][0], outs[2][0])
    assert torch.equal(outs[0][1], outs[1][1])
    assert not torch.allclose(outs[0][1], outs[2][1])
