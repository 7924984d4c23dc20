"""What does it bring that requests under several policies share a batch?

    python bench/mixed.py [--policies h2o tova ahakv scissorhands] [--each 4] [--budget 256] [--new 128] [--repeats 3]

The same requests through one engine: together, each policy in its own rows of the batch; and one policy after another,
as an engine must that knows one policy at a time. Beside these, all of them under the first policy: what is left
between it and ``together`` is the price of several steps in every layer. Packed weights, interleaved; medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from lib import arguments, finish, interleaved, median_ms, positive, show, speed_model, spread

import kvkeep


def tasks(options: argparse.Namespace, answers: dict[str, list[Sequence[int]]]) -> dict[str, Callable[[], None]]:
    """The three ways; what they generate is left in ``answers``."""
    model = speed_model(getattr(torch, options.dtype), options.layers)
    kvkeep.pack_weights(model, if_faster=True)
    random = torch.Generator().manual_seed(1)
    shape = (options.each * len(options.policies), options.prompt)
    prompts = torch.randint(0, model.config.vocab_size, shape, generator=random).tolist()
    wish = kvkeep.SamplingParams(max_new_tokens=options.new)
    engine = kvkeep.Engine(model, policy=options.policies[0], budget=options.budget, rows=len(prompts))

    def run(name: str, policies: list[str], batches: int) -> Callable[[], None]:
        share, size = len(prompts) // len(policies), len(prompts) // batches
        requests = [
            kvkeep.Request(prompt=prompt, sampling=wish, policy=policies[i // share])
            for i, prompt in enumerate(prompts)
        ]

        def task() -> None:
            parts = [requests[i : i + size] for i in range(0, len(requests), size)]
            answers[name] = [one.token_ids for part in parts for one in engine.generate(part)]

        return task

    return {
        "together": run("together", options.policies, 1),
        "one policy after another": run("one policy after another", options.policies, len(options.policies)),
        "all under the first": run("all under the first", options.policies[:1], 1),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--policies", nargs="+", default=["h2o", "tova", "ahakv", "scissorhands"])
    parser.add_argument("--each", type=positive, default=4, help="requests of each policy")
    parser.add_argument("--budget", type=positive, default=256)
    parser.add_argument("--prompt", type=positive, default=16)
    parser.add_argument("--new", type=positive, default=128)
    parser.add_argument("--repeats", type=positive, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    answers: dict[str, list[Sequence[int]]] = {}
    times = interleaved(tasks(options, answers), options.repeats, warmup=1)
    count, first = options.each * len(options.policies), median_ms(times["together"])
    same = sum(a == b for a, b in zip(answers["together"], answers["one policy after another"], strict=True))
    rows = []
    for name, seconds in times.items():
        ms = median_ms(seconds)
        rows.append([name, spread(seconds), f"{1e3 * count * options.new / ms:.0f}", f"{ms / first:.2f}x"])
    show(
        f"{count} requests of {options.prompt} + {options.new} tokens, {options.dtype}, {options.budget} slots",
        ["", "ms (quartiles)", "new tokens/s", "together is faster"],
        rows,
        [f"Policies: {', '.join(options.policies)}. {same} of {count} requests have the same tokens both ways."],
    )
    finish({"bench": "mixed", **vars(options), "seconds": times, "same": same})


if __name__ == "__main__":
    main()
