"""What benchmarks share: the model for speed, interleaved timing, a table for people and one JSON line last."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import kvkeep

SPEED_MODEL = LlamaConfig(
    vocab_size=4096,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    max_position_embeddings=2**20,
)
"""About 83 M random weights; for speed only shapes matter."""


def speed_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return kvkeep.attach(LlamaForCausalLM(SPEED_MODEL).eval().to(dtype))


def interleaved(tasks: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 3) -> dict[str, list[float]]:
    """Seconds of every task, in turn, so that a drift of the machine meets all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for repeat in range(-warmup, repeats):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            if repeat >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def median_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds)


def spread(seconds: list[float]) -> str:
    """Median and quartiles in milliseconds."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return f"{1e3 * middle:.2f} ({1e3 * low:.2f}-{1e3 * high:.2f})"


def machine() -> dict[str, object]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvkeep": kvkeep.__version__,
    }


def report(title: str, columns: list[str], rows: list[list[str]], data: Mapping[str, object]) -> None:
    """Print a table for people and then one line of JSON for machines."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    print(json.dumps({**data, "machine": machine()}))
