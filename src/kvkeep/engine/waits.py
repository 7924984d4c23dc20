"""What would make the host wait for the device, found before a CUDA graph is captured.

A captured step must be the same kernels on the same memory every time. An operation that hands a number to Python,
whose result's shape depends on numbers, or that moves data between host and device can do neither; `NoWaiting`
refuses all of them, on a CPU as well, where nothing waits, so that tests without a GPU find them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

OPERATORS = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "_unique2",
        "allclose",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "lift_fresh",  # a tensor made of Python's numbers
        "masked_select",
        "nonzero",
        "nonzero_numpy",
        "unique_consecutive",
        "unique_dim",
    )
)
"""Operators that read the device's memory on the host, or the host's on the device."""

METHODS = frozenset({"__array__", "cpu", "item", "numpy", "tolist"})
"""Methods of tensors that do so without an operator."""


class WaitError(Exception):
    """An operation that waits; whoever enters `NoWaiting` catches it."""


class NoWaiting:
    """A context in which whatever waits for the device raises `WaitError`.

    Compiled layers run uncompiled in it: torch compiles nothing while somebody watches its operations, and does not
    come back to code that it met like this.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> None:
        try:
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._stack.enter_context(_Operators())
            self._stack.enter_context(_Methods())
        except BaseException:  # nobody will leave what was entered
            self._stack.close()
            raise

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


class _Operators(TorchDispatchMode):
    """Refuses operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name in OPERATORS or _is_masked(name, args) or _is_counted(func, kwargs or {}) or _moves(name, args, kwargs):
            raise WaitError(f"the step waits for the device in {name}, {_where()}")
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    """Refuses methods of tensors."""

    def __init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in METHODS and isinstance(args[0] if args else None, Tensor):
            raise WaitError(f"the step waits for the device in Tensor.{name}, {_where()}")
        return func(*args, **(kwargs or {}))


def _where() -> str:
    """The file and line that asked, torch's own aside."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    asked = [frame for frame in frames if not {"torch", "jaxtyping"} & set(Path(frame.filename).parts)]
    return f"{Path(asked[-1].filename).name}:{asked[-1].lineno}"


def _is_masked(name: str, args: Sequence[Any]) -> bool:
    """Indexing with a mask: the shape of the result depends on how many are true."""
    if name not in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _is_counted(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Repeating by numbers on the device, without saying how many there will be."""
    return str(func) == "aten.repeat_interleave.Tensor" and kwargs.get("output_size") is None


def _moves(name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """A copy between host and device."""
    if name == "aten::_to_copy":
        device = (kwargs or {}).get("device")
        return device is not None and torch.device(device).type != args[0].device.type
    return name == "aten::copy_" and args[0].device.type != args[1].device.type
