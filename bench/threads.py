"""One thread or all of them: the time of a decode step by the size of the weights, alternating, medians.

python bench/threads.py                 # as busy as the machine is
python bench/threads.py --busy 1        # beside processes that compute without end
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import kvkeep
from kvkeep.cache.hf_layers import handed
from kvkeep.models.load import load, quiet
from kvkeep.models.quantized_weights import weight_bytes
from kvkeep.models.threads import advised, cores
from kvkeep.models.tiny import embedded


def models() -> dict[str, torch.nn.Module]:
    found = {"embedded": load(embedded())[0]}
    for width, layers in ((512, 4), (768, 6), (1024, 8)):
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=8,
            vocab_size=2000,
        )
        found[f"llama {width}"] = kvkeep.attach(AutoModelForCausalLM.from_config(config).eval())
    return found


@torch.inference_mode()
def steps(model: torch.nn.Module, count: int) -> list[float]:
    """Seconds of decode steps of one row."""
    cache = kvkeep.BoundedCache(model.config, "h2o", budget=128)
    model(input_ids=torch.arange(5, 205)[None], **handed(model, cache))
    times = []
    for _ in range(count):
        start = time.perf_counter()
        model(input_ids=torch.tensor([[7]]), **handed(model, cache))
        times.append(time.perf_counter() - start)
    return times[2:]


def spin() -> None:
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the model")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    others = [multiprocessing.Process(target=spin, daemon=True) for _ in range(asked.busy)]
    for other in others:
        other.start()
    time.sleep(1)
    print(f"{cores()} cores, load {os.getloadavg()[0]:.1f}, {asked.busy} processes beside the model")
    for name, model in models().items():
        times: dict[int, list[float]] = {1: [], cores(): []}
        for _ in range(asked.rounds):
            for number, seen in times.items():
                torch.set_num_threads(number)
                seen.append(statistics.median(steps(model, 12)))
        medians = {number: 1e3 * statistics.median(seen) for number, seen in times.items()}
        torch.set_num_threads(cores())
        said = ", ".join(f"{number} threads {ms:.2f} ms" for number, ms in medians.items())
        print(f"{name:10} {weight_bytes(model) / 2**20:6.0f} MiB: {said}; advised {advised(model)}")
    for other in others:
        other.terminate()


if __name__ == "__main__":
    with quiet():
        main()
