"""Are the kernels right on this device? Before anything is timed: against float64, and against what torch does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import LlamaForCausalLM

import kvkeep
from kvkeep.attention_stats import Low, Mass, Statistic
from kvkeep.backends import SWITCH, AttentionInputs, choose, reference
from kvkeep.backends.triton import prefill_ops
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.types import AttentionOptions, Phase, Slots
from lib.gpu import DRY, Bench, fill

HALF, FULL = 1e-2, 1e-4
"""Largest error that is let pass, relative in the 2-norm: rounding of the output in half precision, and of the rest."""

DIFFERENT = 1e-3
"""Share of slots that may hold another token: two masses that agree to the last bits go in either order."""

ATTENTIONS = [
    # tokens, dtype, head dim, group, soft cap, window and sinks, statistic
    (1, torch.bfloat16, 128, 4, False, Mass()),
    (1, torch.float16, 256, 2, False, Low(live=True)),
    (1, torch.float32, 80, 1, True, Mass(gain=1.5)),
    (150, torch.bfloat16, 128, 4, False, Mass()),
    (150, torch.float16, 64, 2, True, Low()),
    (150, torch.float32, 128, 1, False, Mass(rows=20, gain=1.5)),
]
POLICIES = ("local", "h2o", "ahakv", "scissorhands", "tova")


def check(bench: Bench) -> list[dict]:
    """(k) Every kernel once, with empty slots, rows of different lengths and padding."""
    found: list[dict] = []
    asked = [*ATTENTIONS, *POLICIES, "recorded steps"]
    for one in bench.cells(asked, "k"):
        with bench.survives(f"k: {one}"):
            if isinstance(one, tuple):
                found += _attention(bench, *one)
            else:
                found += _layer(bench, one) if one in POLICIES else _recorded(bench)
    wrong = [one["name"] for one in found if not one["error"] <= one["limit"]]
    if wrong:
        bench.notes.append(f"k: WRONG, so no other figure means anything: {'; '.join(wrong)}")
    return found


def _attention(
    bench: Bench, tokens: int, dtype: torch.dtype, dim: int, group: int, all_options: bool, statistic: Statistic
) -> Iterator[dict]:
    """Output and report against the reference in float64."""
    rows, kv_heads, slots = 3, 2, 40 if bench.sizes is DRY else 700
    chunk = tokens if tokens > 1 else 0
    query = bench.random(rows, kv_heads * group, tokens, dim, dtype=dtype)
    keys, values = (bench.random(rows, kv_heads, slots + chunk, dim, dtype=dtype) for _ in range(2))
    held = torch.rand(rows, kv_heads, 2 * slots, device=bench.device).argsort(dim=-1)[..., :slots].int()
    held[1] = held[1].masked_fill(torch.rand(held[1].shape, device=bench.device) < 0.7, -1)
    at = (2 * slots + torch.arange(tokens, device=bench.device)).repeat(rows, 1)
    at[2, : max(1, tokens // 3)] = -1
    held = torch.cat([held, at[:, None, -chunk:].expand(-1, kv_heads, -1).int()], dim=-1) if chunk else held
    plain = AttentionOptions(scaling=dim**-0.5)
    sinks = torch.linspace(-1.0, 1.0, kv_heads * group, device=bench.device)
    options = AttentionOptions(dim**-0.5, window=slots, softcap=5.0, sinks=sinks) if all_options else plain
    slots = Slots(keys, values, held)
    limit = FULL if dtype == torch.float32 else HALF
    want, report = reference.attend(AttentionInputs(query, slots, at, options, statistic))
    if chunk and bench.on_gpu:
        found = prefill_ops.attend(AttentionInputs(query, slots, at, options, statistic), output="triton")
        assert found is not None
    else:
        found = choose(query.device, dtype).attend(AttentionInputs(query, slots, at, options, statistic))
    name = f"{'prompt' if chunk else 'token'}, {str(dtype)[6:]}, head dim {dim}, {type(statistic).__name__}"
    real = (at >= 0)[:, None, :, None]
    yield {"name": f"{name}: output", "error": _error(found[0] * real, want * real), "limit": limit}
    for field, sums in report.sums.items():  # a count may differ where a probability is next to its threshold
        limit = HALF if field == "low" else FULL
        yield {"name": f"{name}: {field}", "error": _error(found[1].sums[field], sums), "limit": limit}


def _layer(bench: Bench, policy: str) -> Iterator[dict]:
    """Some whole decode steps, in kernels and in torch."""
    kernels, torchs = _steps(bench, policy), None
    with by_torch():
        torchs = _steps(bench, policy)
    yield {"name": f"{policy}: output", "error": _error(kernels[0], torchs[0].double()), "limit": HALF}
    differ = (kernels[1] != torchs[1]).double().mean().item()
    yield {"name": f"{policy}: share of slots that differ", "error": differ, "limit": DIFFERENT}


@torch.inference_mode()
def _steps(bench: Bench, policy: str) -> tuple[torch.Tensor, torch.Tensor]:
    heads, kv_heads, dim = bench.sizes.heads
    torch.manual_seed(0)
    budget = 40 if bench.sizes is DRY else 700
    layer = kvkeep.Layer(kvkeep.parse(policy), budget)
    fill(layer, *(bench.random(3, kv_heads, budget, dim) for _ in range(2)), tokens=4 * budget)
    real = torch.tensor([[True], [True], [False]], device=bench.device)
    outs = []
    for _ in range(4):
        new = [bench.random(3, h, 1, dim) for h in (heads, kv_heads, kv_heads)]
        phase = Phase.DECODE if new[0].shape[2] == 1 else Phase.PREFILL
        outs.append(layer.step(*new, options=AttentionOptions(scaling=dim**-0.5), phase=phase, real=real)[:2])
    return torch.cat(outs), layer.store.positions.clone()


def _recorded(bench: Bench) -> Iterator[dict]:
    """Tokens of recorded steps beside those of steps that are not, of a small model in float32."""
    torch.manual_seed(0)
    model = kvkeep.attach(LlamaForCausalLM(DRY.config).eval().to(bench.device))
    asked = [Request(prompt=list(range(i, i + 20)), sampling=SamplingParams(max_new_tokens=20)) for i in (1, 30)]
    tokens = []
    for graphs in (True, False):
        engine = Engine(model, policy="h2o", budget=16, rows=2, graphs=graphs)
        tokens.append([one for result in engine.generate(asked) for one in result.token_ids])
    differ = sum(one != other for one, other in zip(*tokens, strict=True)) / len(tokens[0])
    yield {"name": "recorded steps: share of tokens that differ", "error": differ, "limit": 0.0}


@contextmanager
def by_torch() -> Iterator[None]:
    """Without kernels."""
    before = os.environ.get(SWITCH, "")
    os.environ[SWITCH] = "torch"
    try:
        yield
    finally:
        os.environ[SWITCH] = before


def _error(found: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in the 2-norm; infinite if something is no number."""
    error = ((found.double() - want).norm() / want.norm().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


def lines(part: str, found: list[dict], bench: Bench) -> tuple[str, list[str], list[list[str]]]:
    """A part's table: title, columns, rows."""
    rows = [
        [one["name"], f"{one['error']:.1e}", f"{one['limit']:.0e}", "yes" if one["error"] <= one["limit"] else "NO"]
        for one in found
    ]
    return "(k) are the kernels right?", ["", "error", "limit", "right"], rows
