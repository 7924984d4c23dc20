"""What the parts of bench/gpu.py share: sizes, the device's clock, recorded steps, and slots that are filled."""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvkeep
from kvkeep.kv.block import Block
from kvkeep.kv.store import inference
from kvkeep.types import Phase
from lib import twin

Step = Callable[[], object]

RUN_OUT = (torch.OutOfMemoryError, MemoryError)


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        config: the model of the parts that run one.
        heads: query heads, KV heads and head dim of the parts that run one layer.
        dtype: of weights, keys and values.
        buffer_bytes: what is copied to learn the memory's speed; the blocks that calls go round have a quarter or less.
        rows: of the decode kernel.
        slots: of the decode kernel.
        layer: rows and slots of the comparison of policies.
        budgets: tokens kept in decode steps.
        contexts: tokens that a dense cache holds.
        prompts: tokens of a prompt of one layer.
        window: rows that count where a window of them is asked for.
        workloads: prompt and new tokens of the throughput.
        ratio: budget of the throughput, as a share of both.
        histories: tokens seen before the steps that are timed.
        history_rows: rows of these.
        most_rows: no batch is larger.
        throughput_rows: nor one of the throughput, whose prompts take their time.
        repeats: of what is timed.
        slice_s: of the throughput: no step begins later.
    """

    config: LlamaConfig
    heads: tuple[int, int, int] = (32, 8, 128)
    dtype: torch.dtype = torch.bfloat16
    buffer_bytes: int = 2**32
    rows: Sequence[int] = (1, 16, 64, 256)
    slots: Sequence[int] = (512, 1024, 2048)
    layer: tuple[int, int] = (64, 1024)
    budgets: Sequence[int] = (512, 1024, 2048)
    contexts: Sequence[int] = (4096, 16384, 32768)
    prompts: Sequence[int] = (4096, 16384, 32768)
    window: int = 32
    workloads: Sequence[tuple[int, int]] = ((2048, 2048), (7000, 1024))
    ratio: float = 0.2
    histories: Sequence[int] = (1024, 4096, 16384, 65536, 262144)
    history_rows: int = 2
    most_rows: int = 1024
    throughput_rows: int = 128
    repeats: int = 20
    slice_s: float = 45.0


def llama(layers: int, width: int, inner: int, vocabulary: int, heads: tuple[int, int]) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=2**20,
        eos_token_id=None,
    )


FULL = Sizes(llama(32, 4096, 14336, 128256, (32, 8)))
"""An 8 B model's shapes."""

DRY = Sizes(
    llama(2, 32, 48, 64, (4, 2)),
    heads=(4, 2, 16),
    dtype=torch.float32,
    buffer_bytes=2**16,
    rows=(1, 2),
    slots=(8,),
    layer=(2, 40),
    budgets=(8,),
    contexts=(12,),
    prompts=(24,),
    window=4,
    workloads=((12, 3),),
    ratio=0.6,
    histories=(16, 32),
    history_rows=1,
    most_rows=2,
    throughput_rows=2,
    repeats=2,
    slice_s=60.0,
)
"""Everything once, as small as it gets: for a machine without a GPU, to see that the script runs."""


@dataclass
class Bench:
    """The device, what is measured on it, and how long that may take.

    Attributes:
        device: where.
        sizes: what.
        end: no cell begins later, in seconds of `time.monotonic`.
        notes: what there is to say below the tables.
        lost: whether the device has stopped answering.
        compile: whether decode steps are measured with compiled layers, too.
    """

    device: torch.device
    sizes: Sizes
    end: float = math.inf
    notes: list[str] = field(default_factory=list)
    lost: bool = False
    compile: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def model(self) -> LlamaForCausalLM:
        """The model with random weights, made where it runs."""
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.sizes.dtype)
        try:
            with torch.device(self.device):
                return LlamaForCausalLM(self.sizes.config).eval()
        finally:
            torch.set_default_dtype(before)

    @cached_property
    def compiled(self) -> LlamaForCausalLM:
        """The same weights, with compiled layers."""
        model = twin(self.model)
        if not kvkeep.compile_layers(model, "inductor" if self.on_gpu else "eager"):
            self.notes.append("No layer could be compiled; the log says why.")
        return model

    @cached_property
    def copy_speed(self) -> float:
        """Bytes per second that the memory reads and writes when a large buffer is copied."""
        source = self.random(self.sizes.buffer_bytes // 4, dtype=torch.float32)
        target = torch.empty_like(source)
        return 2 * self.sizes.buffer_bytes / middle(self.seconds(lambda: target.copy_(source)))

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype or self.sizes.dtype, device=self.device)

    def free_bytes(self) -> int:
        """What can be allocated; without a GPU a made-up number that is small."""
        self.tidy()
        if not self.on_gpu:
            return 2**20
        return torch.cuda.mem_get_info(self.device)[0]

    def tidy(self) -> None:
        """Give back what nobody holds any more."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def seconds(self, step: Step, repeats: int | None = None) -> list[float]:
        """Seconds of single calls by the device's own clock, after some that do not count."""
        count = repeats or self.sizes.repeats
        for _ in range(3):
            step()
        if not self.on_gpu:
            return [_timed(step) for _ in range(count)]
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        torch.cuda.synchronize(self.device)
        for start, stop in pairs:
            start.record()
            step()
            stop.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) / 1e3 for start, stop in pairs]

    def recorded(self, step: Step, name: str) -> Step:
        """A call as a CUDA graph, so that Python's time to start it is not measured; where there is none, the call."""
        if not self.on_gpu:
            return step
        before = torch.cuda.current_stream(self.device)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        before.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(before), torch.cuda.graph(graph, stream=stream):
                step()
        except RUN_OUT:
            raise
        except RuntimeError as error:
            self.notes.append(f"{name}: not recorded as a CUDA graph: {first_line(error)}")
            return step
        return graph.replay

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end

    def cells(self, asked: Sequence[object], name: str) -> Iterator[object]:
        """What is asked, one by one, until the time is over or the device is lost."""
        for one in asked:
            if self.lost or self.is_over:
                why = "the device does not answer any more" if self.lost else "the time was over"
                self.notes.append(f"{name}: {one} and what follows was not run: {why}")
                return
            yield one

    @contextmanager
    def survives(self, name: str) -> Iterator[None]:
        """Go on without what does not fit into memory, or fails, and say so."""
        try:
            yield
        except RUN_OUT:
            self.notes.append(f"{name}: out of memory")
        except Exception as error:
            traceback.print_exc()
            self.notes.append(f"{name}: failed: {type(error).__name__}: {first_line(error)}")
        try:
            self.tidy()
        except RuntimeError:  # after a fault in a kernel every call fails
            self.lost = True


def _timed(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def middle(seconds: Sequence[float]) -> float:
    return statistics.median(seconds)


def fill(layer: kvkeep.Layer, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
    """Bring a layer into the state of having seen so many tokens: the newest half of its slots, and older ones."""
    rows, heads, kept, _ = keys.shape
    if not layer.allocated:
        layer.hold(inference(Block)(keys, values, numbers=layer.budgets, starts=layer.policy.slots), columns=0)
    newest = kept - kept // 2
    recent = torch.arange(tokens - newest, tokens, device=keys.device)
    older = torch.linspace(0, tokens - newest - 1, kept - newest, device=keys.device).round().long()
    positions = torch.cat([older, recent]).expand(rows, heads, kept)
    layer.store.fill(keys, values, positions.to(torch.int32))
    for state in layer.state.values():
        state[..., :kept] = torch.rand((rows, heads, kept), device=keys.device)
    layer.block.advance(tokens, None, Phase.PREFILL)
    layer.columns = tokens
