"""Decode steps as CUDA graphs: a whole step, eviction included, is recorded once and then started with one call.

A step of a small model is a thousand kernels of a few microseconds each, and Python takes longer to start them than the
GPU to run them. A recorded step has a fixed number of rows, so there is one graph for each of a few numbers of rows.
Spare rows are fed padding, which enters no slot. The tensors that a graph reads and writes (slots, state, counters)
stay in place for as long as the engine keeps its rows.

A recorded step must run the same kernels on the same memory every time. So no operation in it may hand a number to
Python, have a result whose shape depends on numbers, or move data between host and device. `NoWaiting` refuses all of
them before a capture. It refuses them on a CPU as well, where nothing waits, so that tests without a GPU find them.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvkeep.cache.hf_layers import handed
from kvkeep.engine.kv_manager import KVManager, Owner
from kvkeep.engine.scheduler import InputBatch
from kvkeep.models.checkpoint import Model
from kvkeep.policies.base import Policy
from kvkeep.types import Phase

_log = logging.getLogger(__name__)

WARM_UPS = 2
"""Runs before a capture, in which kernels are compiled and libraries allocate their workspaces."""

MOST_REFUSED = 64
"""Number of policies whose refusal is remembered; requests may name any number of them."""

_Run = Callable[[], Tensor]


def bucket(rows: int, most: int) -> int:
    """Return the number of rows of the graph that serves this many rows: the least of 1, 2, 4, 6, 8, 12, 16, 24, …
    that is no less, but at most ``most``, the number of all rows.
    """
    size = 1
    while size < rows:
        # steps between powers of two keep padding below a third of the rows
        size = size * 3 // 2 if size > 2 and size & (size - 1) == 0 else 1 << size.bit_length()
    return min(size, most)


def refusal(policy: Policy) -> str | None:
    """Return the reason why a policy's decode steps cannot be recorded, or ``None`` if they can."""
    if policy.cascades or policy.shares_layers:
        return "its layers look at each other's slots, or have slots that a prompt divides anew"
    if not policy.evicts or policy.grows:
        return "it asks in every step whether there is room left"
    return None


class Graphs:
    """Recorded decode steps of one model over the first rows of an engine.

    Args:
        model: the model, attached.
        options: arguments of the model's forward that are the same in every step.

    Attributes:
        refused: policies whose steps run unrecorded, each with the reason.
    """

    def __init__(self, model: Model, options: dict[str, Any]) -> None:
        self.refused: dict[Policy, str] = {}
        self._model = model
        self._options = options
        self._steps: dict[tuple[Owner, int], _Step] = {}
        self._memory: tuple[KVManager, int] | None = None
        self._pool: Any = None

    def run(self, batch: InputBatch, rows: KVManager) -> Float[Tensor, "n V"] | None:
        """Run a decode step as a CUDA graph, recorded on first use, and return its logits, which the next replay
        overwrites.

        Return ``None``, with nothing changed in the rows, for a prefill, a batch that does not begin with the first
        row, rows of several policies, or if the step cannot be recorded.
        """
        decodes = batch.start == 0 and batch.phase is Phase.DECODE
        size = bucket(len(batch.rows), rows.count)
        owner = rows.sole(0, size) if decodes else None  # rows of several owners have too many orders to record
        if owner is None or owner.policy in self.refused:
            return None
        if self._memory != (rows, rows.version):  # recorded steps read and write tensors that were replaced
            self.clear()
            self._memory = (rows, rows.version)
        if (owner, size) not in self._steps:
            try:
                self._steps[owner, size] = self._record(owner.policy, size, rows)
            except WaitError as reason:
                self._refuse(owner.policy, str(reason))
                # a refused policy is never looked up again, and a recorded step holds device memory
                unused = [key for key in self._steps if key[0].policy == owner.policy]
                for key in unused:
                    del self._steps[key]
                rows.renew()  # the attempt ended in the middle of a layer
                self._memory = (rows, rows.version)  # the tensors are the same
                return None
        return self._steps[owner, size].run(batch)[: len(batch.rows)]

    def clear(self) -> None:
        """Drop all recorded steps, and with them the references to the rows that they read and write."""
        self._steps.clear()
        self._memory = self._pool = None

    def _record(self, policy: Policy, size: int, rows: KVManager) -> _Step:
        """Return a decode step recorded for ``size`` rows. Recording runs the step on padding, which enters no slot.

        Raises:
            WaitError: the step cannot be recorded.
        """
        if reason := refusal(rows.ruled(policy)):
            raise WaitError(reason)
        step = _Step(self._model, self._options, size, rows.part(0, size, Phase.DECODE))
        step.forward()  # what is copied to the device once, for good, is there afterwards
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
        """Remember, and log once, that steps under a policy are not recorded."""
        if len(self.refused) >= MOST_REFUSED:
            self.refused.clear()
        self.refused[policy] = reason
        _log.warning(
            "Decode steps under %s are not recorded as CUDA graphs, which would be faster: %s.", policy, reason
        )


class _Step:
    """A decode step whose inputs stay at one place in memory.

    Args:
        model: the model, attached.
        options: arguments of the model's forward.
        size: number of rows.
        cache: the slots of these rows.
    """

    def __init__(self, model: Model, options: dict[str, Any], size: int, cache: object) -> None:
        self._model, self._options, self._cache = model, options, cache
        with torch.inference_mode(False):  # written in inference mode and out of it
            # token ids, positions, and whether a token is real: one tensor, so that one transfer brings all of them
            self._inputs = torch.zeros((3, size, 1), dtype=torch.long, device=model.device)
            self._real = torch.zeros((size, 1), dtype=torch.bool, device=model.device)
        self._replay: _Run | None = None

    def run(self, batch: InputBatch) -> Float[Tensor, "size V"]:
        """Copy the batch's tokens into the step's inputs, replay the step (or run it, if it was not captured), and
        return the logits of all its rows, padding included.
        """
        padding = [0] * (self._real.shape[0] - len(batch.rows))
        ids = [*(tokens[0] if tokens else 0 for tokens in batch.tokens), *padding]
        positions = [*batch.positions, *padding]
        real = [*map(len, batch.tokens), *padding]
        pinned = self._inputs.is_cuda  # a new one each time: the last one may still be on its way
        host = torch.tensor([ids, positions, real], pin_memory=pinned)[..., None]
        self._inputs.copy_(host, non_blocking=True)
        return (self._replay or self.forward)()

    def forward(self) -> Float[Tensor, "size V"]:
        """Run the step unrecorded on the inputs that `run` has last written, and return the logits."""
        self._real.copy_(self._inputs[2])  # a mask is boolean; so one transfer from the host brings everything
        out = self._model(
            input_ids=self._inputs[0],
            position_ids=self._inputs[1],
            attention_mask=self._real,
            **handed(self._model, self._cache),
            use_cache=True,
            **self._options,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def capture(self, pool: Any) -> None:
        """Record `forward` as a CUDA graph, which `run` replays from then on."""
        before = torch.cuda.current_stream(self._model.device)
        stream = torch.cuda.Stream(self._model.device)  # the default one for captures may be on another device
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self.forward()
        before.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may use the device meanwhile
        with (
            torch.cuda.stream(before),  # a capture that fails stays on its stream
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            logits = self.forward()

        def replay() -> Tensor:
            """Run the recorded step, and return its logits: the same tensor each time, with new numbers."""
            graph.replay()
            return logits

        self._replay = replay


_WAITING = {
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"),
        *("_unique2", "unique_consecutive", "unique_dim", "bincount", "masked_select", "nonzero", "nonzero_numpy"),
        "lift_fresh",  # a tensor made of Python's numbers
    )
}
"""Operators for which the host waits for the device's memory, or the device for the host's."""

_WAITING_METHODS = {"__array__", "cpu", "item", "numpy", "tolist"}
"""Methods of tensors for which the host waits without calling an operator."""


class WaitError(Exception):
    """An operation made the host wait for the device; whoever enters `NoWaiting` catches this error."""


class NoWaiting:
    """A context in which every operation that makes the host wait for the device raises `WaitError`.

    Compiled layers run uncompiled in this context: torch compiles nothing while a mode watches its operations, and
    afterwards never compiles code that it has met under one.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> None:
        """Let torch compile nothing and show each operation to the two modes that refuse the waiting ones."""
        try:
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._stack.enter_context(_Operators())
            self._stack.enter_context(_Methods())
        except BaseException:  # `__exit__` is not called when `__enter__` fails
            self._stack.close()
            raise

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


class _Operators(TorchDispatchMode):
    """Refuses operators that wait."""

    # torch's own has no annotations, so a typed caller may not call it; this one may be called
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call an operator, unless it waits.

        Raises:
            WaitError: it waits.
        """
        name = func._schema.name
        if name in _WAITING or _is_masked(name, args) or _is_counted(func, kwargs or {}) or _moves(name, args, kwargs):
            raise WaitError(f"the step waits for the device in {name}, {_where()}")
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    """Refuses methods of tensors that wait."""

    def __init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function or method of torch, unless it is a method of a tensor that waits.

        Raises:
            WaitError: it waits.
        """
        name = getattr(func, "__name__", "")
        if name in _WAITING_METHODS and isinstance(args[0] if args else None, Tensor):
            raise WaitError(f"the step waits for the device in Tensor.{name}, {_where()}")
        return func(*args, **(kwargs or {}))


def _where() -> str:
    """Return, as ``file.py:line``, where the innermost frame outside of torch, jaxtyping and this module is: the
    operation that was refused.
    """
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    # jaxtyping's frames are there if its check of shapes is on
    asked = [frame for frame in frames if not {"torch", "jaxtyping"} & set(Path(frame.filename).parts)]
    return f"{Path(asked[-1].filename).name}:{asked[-1].lineno}"


def _is_masked(name: str, args: Sequence[Any]) -> bool:
    """Return whether an operator indexes with a mask (boolean, or uint8 as in old code), so that the shape of its
    result depends on the mask's values.
    """
    if name not in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _is_counted(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator is a ``repeat_interleave`` without ``output_size``, which reads the size of its result
    from the device.
    """
    return str(func) == "aten.repeat_interleave.Tensor" and kwargs.get("output_size") is None


def _moves(name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Return whether an operator copies a tensor to a device of another type, as from host to GPU."""
    if name == "aten::_to_copy":
        device = (kwargs or {}).get("device")
        return device is not None and torch.device(device).type != args[0].device.type
    return name == "aten::copy_" and args[0].device.type != args[1].device.type
