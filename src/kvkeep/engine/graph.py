"""Decode steps as CUDA graphs: the whole step, eviction included, is recorded once and then started in one call.

A small model's step is a thousand kernels of a few microseconds, and Python needs longer to start them than the GPU
to run them. A recorded step has a fixed number of rows, so there is one graph for each of a few numbers of rows; rows
that nobody needs are padding, which enters no slot. What the graphs read and write (slots, state, counters) stays
where it is for as long as the engine keeps its rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.engine.rows import Rows
from kvkeep.engine.scheduler import Batch
from kvkeep.engine.waits import NoWaiting, WaitError
from kvkeep.models.load import Model
from kvkeep.policies.base import Policy
from kvkeep.types import Phase

_log = logging.getLogger(__name__)

WARM_UPS = 2
"""Runs before a capture: kernels are compiled and libraries take their workspaces."""

MOST_REFUSED = 64
"""Policies whose refusal is remembered."""

_Run = Callable[[], Tensor]


def bucket(rows: int, most: int) -> int:
    """The number of rows of the graph that serves so many: powers of two and one and a half times these."""
    size = 1
    while size < rows:
        size = size * 3 // 2 if size > 2 and size & (size - 1) == 0 else 1 << size.bit_length()
    return min(size, most)


def refusal(policy: Policy) -> str | None:
    """Why a policy's decode steps cannot be recorded, or ``None``."""
    if policy.cascades:
        return "its layers share tables that are made anew in every step"
    if not policy.evicts or policy.grows:
        return "it asks in every step whether there is room left"
    return None


class Graphs:
    """Decode steps of one model over the first rows of an engine.

    Args:
        model: the model, attached.
        options: of the model's forward, the same in every step.

    Attributes:
        refused: why steps run one by one instead, per policy.
    """

    def __init__(self, model: Model, options: dict[str, Any]) -> None:
        self.refused: dict[Policy, str] = {}
        self._model = model
        self._options = options
        self._steps: dict[tuple[Policy, int], _Step] = {}
        self._memory: tuple[Rows, int] | None = None
        self._pool: Any = None

    def run(self, batch: Batch, rows: Rows) -> Float[Tensor, "n V"] | None:
        """The logits of a decode step; ``None`` if it is none, or cannot be recorded: then nothing was done."""
        decodes = batch.start == 0 and batch.phase is Phase.DECODE
        size = bucket(len(batch.rows), rows.count)
        policy = rows.sole(0, size) if decodes else None  # rows of several policies have too many orders to record
        if policy is None or policy in self.refused:
            return None
        if self._memory != (rows, rows.version):
            self.clear()
            self._memory = (rows, rows.version)
        if (policy, size) not in self._steps:
            try:
                self._steps[policy, size] = self._record(policy, size, rows)
            except WaitError as reason:
                self._refuse(policy, str(reason))
                self._steps = {key: step for key, step in self._steps.items() if key[0] != policy}  # not used any more
                rows.renew()  # the attempt ended in the middle of a layer
                self._memory = (rows, rows.version)  # the tensors are the same
                return None
        return self._steps[policy, size].run(batch)[: len(batch.rows)]

    def clear(self) -> None:
        """Let go of what was recorded, and of the rows that it reads and writes."""
        self._steps.clear()
        self._memory = self._pool = None

    def _record(self, policy: Policy, size: int, rows: Rows) -> _Step:
        """Record a step over so many rows, all of them padding: it may be run any number of times and changes nothing.

        Raises:
            WaitError: the step cannot be recorded.
        """
        if reason := refusal(policy):
            raise WaitError(reason)
        step = _Step(self._model, self._options, size, rows.part(0, size, Phase.DECODE))
        with NoWaiting():
            step.forward()
        if self._model.device.type == "cuda":
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            try:
                step.capture(self._pool)
            except RuntimeError as error:  # nothing was run but padding
                raise WaitError(str(error).partition("\n")[0]) from error
        return step

    def _refuse(self, policy: Policy, reason: str) -> None:
        if len(self.refused) >= MOST_REFUSED:
            self.refused.clear()
        self.refused[policy] = reason
        _log.warning(
            "Decode steps under %s are not recorded as CUDA graphs, which would be faster: %s.", policy, reason
        )


class _Step:
    """A decode step with inputs that stay in their place.

    Args:
        model: the model, attached.
        options: of its forward.
        size: rows.
        cache: these rows' slots.
    """

    def __init__(self, model: Model, options: dict[str, Any], size: int, cache: object) -> None:
        self._model, self._options, self._cache = model, options, cache
        with torch.inference_mode(False):  # written in inference mode and out of it
            self._inputs = torch.zeros((3, size, 1), dtype=torch.long, device=model.device)
            self._real = torch.zeros((size, 1), dtype=torch.bool, device=model.device)
        self._replay: _Run | None = None

    def run(self, batch: Batch) -> Float[Tensor, "size V"]:
        """Feed the batch's tokens."""
        padding = [0] * (self._real.shape[0] - len(batch.rows))
        ids = [*(tokens[0] if tokens else 0 for tokens in batch.tokens), *padding]
        positions = [*batch.positions, *padding]
        real = [*map(len, batch.tokens), *padding]
        pinned = self._inputs.is_cuda  # a new one each time: the last one may still be on its way
        host = torch.tensor([ids, positions, real], pin_memory=pinned)[..., None]
        self._inputs.copy_(host, non_blocking=True)
        return (self._replay or self.forward)()

    def forward(self) -> Float[Tensor, "size V"]:
        """One step, as it is recorded."""
        self._real.copy_(self._inputs[2])
        out = self._model(
            input_ids=self._inputs[0],
            position_ids=self._inputs[1],
            attention_mask=self._real,
            past_key_values=self._cache,
            use_cache=True,
            **self._options,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def capture(self, pool: Any) -> None:
        """Record `forward`; from now on `run` replays it."""
        before = torch.cuda.current_stream(self._model.device)
        stream = torch.cuda.Stream(self._model.device)  # the default one for captures may be on another device
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self.forward()
        before.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.stream(before),  # a capture that fails stays on its stream
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            logits = self.forward()

        def replay() -> Tensor:
            graph.replay()
            return logits

        self._replay = replay
