"""What does each policy add to a decode step at the same number of slots, against `local`, which keeps no statistic?

    python bench/overhead.py [--policies all] [--rows 8] [--budget 1024] [--repeats 15]
    python bench/overhead.py --policies h2o h2o+ada snapkv snapkv+ada     # heads that share a pool
    python bench/overhead.py --policies h2o h2o@4 h2o+ada h2o+ada@4       # slots of 8 or 4 bits

Steps of all policies are interleaved in one run. Two figures, both with the policy's own positions: the whole step of a
12-layer model, fused or packed, and the cache alone (append, attend, observe, evict) in one of its layers. The title
says whether the native kernel is active; with KVKEEP_BACKEND=torch in the environment torch does the work.
"""

from __future__ import annotations

import torch
from lib import arguments, finish, interleaved, kernel, median_ms, positive, show, speed_config, speed_model, spread
from transformers import LlamaConfig

import kvkeep
from kvkeep.cache.hf_layers import handed
from kvkeep.cache.layer_layout import Layout
from kvkeep.kv_bits import check_bits
from kvkeep.models.prepare import fuse_modules, prepare_for_rows
from kvkeep.policies._head_budgets import under
from kvkeep.types import Phase

OPTIONS = kvkeep.AttentionOptions(scaling=0.125)
POLICIES = ["h2o", "ahakv", "scissorhands", "tova", "streaming_llm"]


def random_tokens(config: LlamaConfig, rows: int, T: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of ``T`` tokens."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = config.hidden_size // heads
    return tuple(torch.randn(rows, h, T, dim, dtype=dtype) for h in (heads, kv_heads, kv_heads))


def parts(name: str) -> tuple[str, str | None, str | None]:
    """Policy, head budget and bits of a name such as ``h2o+ada@4``."""
    name, _, bits = name.partition("@")
    policy, _, rule = name.partition("+")
    return policy, rule or None, check_bits(bits or None)


def model_steps(policies: list[str], rows: int, budget: int, layers: int, dtype: torch.dtype):
    model = speed_model(dtype, layers)
    fuse_modules(model)
    prepare_for_rows(model, rows)
    token = torch.randint(0, model.config.vocab_size, (rows, 1))

    def stepper(name: str):
        policy, rule, bits = parts(name)
        cache = kvkeep.BoundedCache(model.config, policy=policy, budget=budget, head_budget=rule, kv_bits=bits)
        for layer in cache.bounded_layers().values():  # the slots are what matters, not how they were filled
            layer.step(*random_tokens(model.config, rows, budget + 8, dtype), options=OPTIONS, phase=Phase.PREFILL)

        def step():
            with torch.inference_mode():
                model(input_ids=token, **handed(model, cache))

        return step

    return {policy: stepper(policy) for policy in policies}


def layer_steps(policies: list[str], rows: int, budget: int, dtype: torch.dtype):
    config = speed_config(1)

    def stepper(name: str):
        policy, rule, bits = parts(name)
        policy = under(kvkeep.parse(policy), rule)
        layout = Layout.of(config, policy)
        rotation = layout.rotations.get(0) if layout.positions == "slot" else None
        layer = kvkeep.Layer(policy, budget, rotation=rotation, kv_bits=bits)
        layer.step(*random_tokens(config, rows, budget + 8, dtype), options=OPTIONS, phase=Phase.PREFILL)
        new = random_tokens(config, rows, 1, dtype)
        return lambda: layer.step(*new, options=OPTIONS, phase=Phase.DECODE)

    return {policy: stepper(policy) for policy in policies}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="beside local; all: every one that evicts")
    parser.add_argument("--rows", type=positive, default=8)
    parser.add_argument("--budget", type=positive, default=1024)
    parser.add_argument("--repeats", type=positive, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    evicting = [name for name in kvkeep.available_policies() if kvkeep.parse(name).evicts]
    asked = evicting if options.policies == ["all"] else options.policies
    policies = list(dict.fromkeys(["local", *asked]))
    dtype, shape = getattr(torch, options.dtype), (options.rows, options.budget)
    whole = interleaved(model_steps(policies, *shape, options.layers, dtype), options.repeats)
    alone = interleaved(layer_steps(policies, *shape, dtype), 5 * options.repeats)
    rows, data = [], {}
    for policy in policies:
        step, layer = (median_ms(times[policy]) for times in (whole, alone))
        ratio, layer_ratio = step / median_ms(whole["local"]), layer / median_ms(alone["local"])
        rows.append([policy, spread(whole[policy]), f"{ratio:.3f}", spread(alone[policy]), f"{layer_ratio:.3f}"])
        data[policy] = {"step_ms": step, "step_ratio": ratio, "layer_ms": layer, "layer_ratio": layer_ratio}
    show(
        f"{options.dtype}, {options.rows} rows x {options.budget} slots, kernel: {kernel()}; ms: median (quartiles)",
        ["policy", "model step", "/ local", "one layer's cache", "/ local"],
        rows,
    )
    finish({"bench": "overhead", **vars(options), "policies": data})


if __name__ == "__main__":
    main()
