"""What does each policy add to a decode step at the same number of slots, against `local`, which keeps no statistic?

    python bench/overhead.py [--rows 8] [--budget 1024] [--repeats 40]

Steps of all policies are interleaved in one run. Two figures: the whole step of a 12-layer model, and the cache
alone (append, attend, observe, evict) in one of its layers. The title says whether the native kernel is active; with
KVKEEP_NATIVE=0 in the environment torch does the work.
"""

from __future__ import annotations

import argparse

import torch
from lib import SPEED_MODEL, interleaved, kernel, median_ms, report, speed_model, spread

import kvkeep

OPTIONS = kvkeep.AttentionOptions(scaling=0.125)


def random_tokens(config, rows: int, T: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of ``T`` tokens."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = config.hidden_size // heads
    return tuple(torch.randn(rows, h, T, dim) for h in (heads, kv_heads, kv_heads))


def model_steps(policies: list[str], rows: int, budget: int):
    model = speed_model()
    token = torch.randint(0, 4096, (rows, 1))

    def stepper(policy: str):
        cache = kvkeep.BoundedCache(model.config, policy=policy, budget=budget)
        for layer in cache.bounded_layers().values():  # the slots are what matters, not how they were filled
            layer.step(*random_tokens(model.config, rows, budget + 8), options=OPTIONS)

        def step():
            with torch.inference_mode():
                model(input_ids=token, past_key_values=cache)

        return step

    return {policy: stepper(policy) for policy in policies}


def layer_steps(policies: list[str], rows: int, budget: int):
    def stepper(policy: str):
        layer = kvkeep.Layer(kvkeep.parse(policy), budget)
        layer.step(*random_tokens(SPEED_MODEL, rows, budget + 8), options=OPTIONS)
        new = random_tokens(SPEED_MODEL, rows, 1)
        return lambda: layer.step(*new, options=OPTIONS)

    return {policy: stepper(policy) for policy in policies}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    evicting = {name for name in kvkeep.available_policies() if kvkeep.parse(name).evicts}
    policies = ["local", *sorted(evicting - {"local"})]
    whole = interleaved(model_steps(policies, options.rows, options.budget), options.repeats)
    alone = interleaved(layer_steps(policies, options.rows, options.budget), 5 * options.repeats)
    rows, data = [], {}
    for policy in policies:
        step, layer = (median_ms(times[policy]) for times in (whole, alone))
        ratio, layer_ratio = step / median_ms(whole["local"]), layer / median_ms(alone["local"])
        rows.append([policy, spread(whole[policy]), f"{ratio:.3f}", spread(alone[policy]), f"{layer_ratio:.3f}"])
        data[policy] = {"step_ms": step, "step_ratio": ratio, "layer_ms": layer, "layer_ratio": layer_ratio}
    report(
        f"Float32, {options.rows} rows x {options.budget} slots, kernel: {kernel()}; ms: median (quartiles)",
        ["policy", "model step", "/ local", "one layer's cache", "/ local"],
        rows,
        {"bench": "overhead", **vars(options), "policies": data},
    )


if __name__ == "__main__":
    main()
