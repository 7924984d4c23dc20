"""What benchmarks share: the model for speed, interleaved timing, a table for people and one JSON line last."""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, Qwen3Config

import kvkeep
from kvkeep.backends import choose, why
from kvkeep.evals.arms import split_policies
from kvkeep.models.packed_weights import PackedLinear

SPEED_MODEL = LlamaConfig(
    vocab_size=4096,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    max_position_embeddings=2**20,
    eos_token_id=None,
)
"""About 82 M random weights; for speed only shapes matter. Nothing ends a text early."""

QWEN3 = Qwen3Config(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rope_theta=1_000_000.0,
    tie_word_embeddings=True,
    eos_token_id=None,
)
"""Qwen3-0.6B's shape: about 0.6 G weights, drawn at random."""

LLAMA = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rope_theta=500_000.0,
    eos_token_id=None,
)
"""Llama-3.1-8B's shape. On a small machine one or two of its layers show the cost of each: `--layers 1`."""

SHAPES = {"speed": "float32", "qwen3-0.6b": "bfloat16", "llama-8b": "bfloat16"}
"""Shapes of models, and the dtype of each unless the command line says otherwise."""

WIDTH = 100
"""Columns of a table that is written to a file."""


def arguments(doc: str) -> argparse.ArgumentParser:
    """A parser with the options that most benchmarks share; the first line of their description is shown."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--layers", type=positive, default=SPEED_MODEL.num_hidden_layers, help="fewer: a quick look")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    return parser


def positive(text: str) -> int:
    """A whole number of 1 or more, from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return number


def with_shapes(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """An option for the shape of the model, on which the number of layers and the dtype then depend."""
    parser.add_argument(
        "--shape", choices=[*SHAPES], default="speed", help="the model: a small one, or one with a name"
    )
    parser.set_defaults(layers=None, dtype=None)
    return parser


def settle_shape(options: argparse.Namespace) -> None:
    """Fill in what the shape of the model decides."""
    options.layers = options.layers or config_of(options.shape).num_hidden_layers
    options.dtype = options.dtype or SHAPES[options.shape]


def config_of(shape: str) -> PreTrainedConfig:
    """The configuration of a shape."""
    return {"qwen3-0.6b": QWEN3, "llama-8b": LLAMA}.get(shape, SPEED_MODEL)


def policy(text: str) -> str:
    """A policy string, from the command line."""
    try:
        kvkeep.parse(text)
    except kvkeep.KVKeepError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def policies(text: str) -> list[str]:
    """A list of policies, from the command line; an option with a comma before it continues the policy before."""
    try:
        return [str(one) for one in split_policies(text)]
    except kvkeep.KVKeepError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def speed_config(layers: int, shape: str = "speed") -> PreTrainedConfig:
    """The model for speed, or one of another shape, with another number of layers."""
    config = copy.deepcopy(config_of(shape))
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * layers
    return config


def speed_model(
    dtype: torch.dtype = torch.float32,
    layers: int = SPEED_MODEL.num_hidden_layers,
    *,
    attach: bool = True,
    shape: str = "speed",
) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(speed_config(layers, shape), dtype=torch.float32).eval().to(dtype)
    return kvkeep.attach(model) if attach else model


def twin(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A second model on the same weights, to be compiled."""
    packed = (module for module in model.modules() if isinstance(module, PackedLinear))
    shared = [*model.parameters(), *model.buffers(), *packed]
    return copy.deepcopy(model, {id(one): one for one in shared})


def interleaved(
    tasks: Mapping[str, Callable[[], object]],
    repeats: int,
    warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every task, in turn, so that a drift of the machine meets all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for repeat in range(-warmup, repeats):
        for name, task in tasks.items():
            start = clock()
            task()
            if repeat >= 0:
                times[name].append(clock() - start)
    return times


def counted(rows: int) -> str:
    return f"{rows} row" if rows == 1 else f"{rows} rows"


def median_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds)


def spread(seconds: list[float]) -> str:
    """Median and quartiles in milliseconds."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else 3 * seconds
    return f"{1e3 * middle:.2f} ({1e3 * low:.2f}-{1e3 * high:.2f})"


def kernel() -> str:
    """Whether decode steps run in the native kernel, and if not, what does them, and why."""
    cpu, dtype = torch.device("cpu"), torch.float32
    name = choose(cpu, dtype).name
    return name if name == "native" else f"{name} ({why(cpu, dtype)})"


def machine() -> dict[str, object]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvkeep": kvkeep.__version__,
        "kernel": kernel(),
    }


def show(title: str, columns: list[str], rows: list[list[str]], notes: Iterable[str] = ()) -> None:
    """Print a table for people, and what there is to say about its rows."""
    table = Table(title=title, title_justify="left", caption="\n".join(notes), caption_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table)


def report(title: str, columns: list[str], rows: list[list[str]], data: Mapping[str, object]) -> None:
    """Print a table for people and then one line of JSON for machines."""
    show(title, columns, rows)
    finish(data)


def finish(data: Mapping[str, object]) -> None:
    """One line of JSON for machines, the last of the output."""
    print(json.dumps({**data, "machine": machine()}))
