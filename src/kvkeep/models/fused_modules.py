"""Modules whose work for a few rows is one call of the native kernel, and the trial that finds out which may be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from kvkeep.backends import choose, layer_ops

SCALES = (0.001, 1.0, 3.0, 10.0, 30.0)
"""Sizes of the random numbers of a trial."""

LARGE = 100.0
"""The largest output of a linear layer in a trial: models that limit theirs do so at 7 to 20."""

_TRIED_NUMBERS = 64
"""Numbers of each row in a trial of an activation."""

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Of the largest number of a row, by dtype."""

CALLS = "_calls"
"""Attribute of a fused layer: addresses of its weights, which are no part of a copy."""

FORWARD = "_attention_forward"
"""Attribute of a fused layer: the function that its attention's class had in the trial; no part of a copy either, since
a function that was put into a class cannot be pickled."""

_MIXED: dict[tuple[type[nn.Module], type[nn.Module], object], type[nn.Module]] = {}

_LINEAR_FORWARD = nn.Linear.forward
"""Torch's own: where somebody has replaced it, the replacement is called."""


class FusedQKV:
    """The projections of query, key and value, called in turn with one tensor: the first call computes all outputs.

    The other outputs are kept until their layers ask for them with the very same tensor, once.
    """

    def __init__(self, layers: list[FusedLinear]) -> None:
        self._layers = layers
        self._held: tuple[Tensor | None, dict[int, Tensor]] = (None, {})

    def output(self, layer: FusedLinear, x: Tensor) -> Tensor | None:
        """Return the output of one of the projections for ``x``; ``None`` if the kernel has not computed it. The first
        projection's call computes all three, and the others are handed out once each, for the very same tensor.
        """
        if layer is not self._layers[0]:
            asked, others = self._held
            return others.pop(id(layer), None) if asked is x else None
        self._held = (None, {})
        outputs = layer_ops.products(x, self._layers)
        if outputs is None:
            return None
        self._held = (x, {id(other): out for other, out in zip(self._layers[1:], outputs[1:], strict=True)})
        return outputs[0]


class FusedLinear(nn.Linear):
    """A linear layer whose products with a few rows are computed by the native kernel, from the plain weights.

    In a dtype in which torch is slow on this processor, products with many rows widen the weights, a piece at a time.
    """

    _qkv: FusedQKV | None = None

    def forward(self, input: Float[Tensor, "*n in"]) -> Float[Tensor, "*n out"]:  # noqa: A002  # torch's name
        """Return the product with the weights, plus the bias."""
        if nn.Linear.forward is not _LINEAR_FORWARD:
            return nn.Linear.forward(self, input)  # not `super()`: see `unmixed`
        qkv: FusedQKV | None = vars(self).get("_qkv")  # read once: another thread may take it away, see `unmixed`
        if qkv is not None and (out := qkv.output(self, input)) is not None:
            return out
        outputs = layer_ops.products(input, (self,))
        if outputs is not None:
            return outputs[0]
        wide = layer_ops.widened(input, self)
        return nn.Linear.forward(self, input) if wide is None else wide


class FusedHead(nn.Linear):
    """The last linear layer of a model in half precision. Its outputs, the logits, are float32.

    Half precision has steps of 1/8 between 16 and 32, where the logits of likely tokens are: in it the best two are
    often equal, and the first of the vocabulary wins.
    """

    def forward(self, input: Float[Tensor, "*n in"]) -> Float[Tensor, "*n out"]:  # noqa: A002  # torch's name
        """Return the logits; in half precision where torch computes them, as it does for training."""
        logits = None if nn.Linear.forward is not _LINEAR_FORWARD else layer_ops.logits(input, self)
        return nn.Linear.forward(self, input) if logits is None else logits


class GateParts(NamedTuple):
    """The linear layers of a feed-forward layer.

    Attributes:
        modules: its modules, of which one may be both gate and up.
        gate: goes through the activation.
        up: what the gate is multiplied with; ``None``: nothing.
        down: takes the products.
    """

    modules: tuple[nn.Linear, ...]
    gate: nn.Linear | layer_ops.Linear
    up: nn.Linear | layer_ops.Linear | None
    down: nn.Linear


_JOINED = "gate_up_proj"
_FEED_FORWARD = (
    ("gate_proj", "up_proj", "down_proj"),
    (_JOINED, "down_proj"),
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("up_proj", "down_proj"),
)
"""Names of the linear layers of feed-forward layers, in the order of their use; without a gate from the third on."""


def gate_parts(module: nn.Module) -> GateParts | None:
    """Return the linear layers of a feed-forward layer, if they are fused ones; ``None`` otherwise.

    Gate and up may be joined: the first half of the outputs is the gate then. Where nothing is called a gate, the first
    layer is in its place, and there is no up.
    """
    own: dict[str, Any] = module._modules
    names = next((names for names in _FEED_FORWARD if all(map(own.get, names))), None)
    modules = [] if names is None else [own[name] for name in names]
    linear = tuple(layer for layer in modules if type(layer) is FusedLinear)
    if names is None or len(linear) < len(names):  # a subclass may have a `forward` of its own
        return None
    *first, down = linear
    if len(first) == 2:
        return GateParts(linear, first[0], first[1], down)
    if names[0] != _JOINED:
        return GateParts(linear, first[0], None, down)
    halves = layer_ops.split(first[0], 2 * [first[0].out_features // 2])
    return None if halves is None else GateParts(linear, halves[0], halves[1], down)


class FusedGate(nn.Module):
    """Mixed into a feed-forward layer, with a gate or without: one call for its products."""

    _activation: int
    as_tried: Described

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output, from the fused kernel where it can compute it."""
        out = None
        # in training it may drop some of its output
        if len(args) == 1 and not (kwargs or self.training or any(map(is_heard, self.children()))):
            parts = gate_parts(self) if is_as_tried(self) else None
            if parts is not None:
                out = layer_ops.gated(args[0], parts.gate, parts.up, parts.down, self._activation)
        return unmixed(FusedGate, type(self)).forward(self, *args, **kwargs) if out is None else out


class FusedNorm(nn.Module):
    """Mixed into a norm by the root mean square, or a layer norm: one call."""

    weight: nn.Parameter
    _plus: float
    _is_centred: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Normalise the last axis, and return the result."""
        out, by = None, norm_of(self)
        if len(args) == 1 and not kwargs and by is not None and has_own_forward(self):
            out = layer_ops.norm(args[0], by)
        return unmixed(FusedNorm, type(self)).forward(self, *args, **kwargs) if out is None else out


EPSILON = ("variance_epsilon", "eps")
"""Names under which norms have what they add to the mean of the squares."""


def epsilon_of(norm: nn.Module) -> object:
    """Return what a norm adds to the mean of the squares; ``None`` if it does not say."""
    return next((vars(norm)[name] for name in EPSILON if name in vars(norm)), None)


def norm_of(norm: FusedNorm) -> layer_ops.Norm | None:
    """Return a fused norm in the form that the kernel takes; ``None`` if it has no weight any more, or does not say
    what it adds to the mean, as a float.
    """
    epsilon, weight = epsilon_of(norm), norm._parameters.get("weight")
    if weight is None or not isinstance(epsilon, float):
        return None
    return layer_ops.Norm(weight, epsilon, norm._plus, norm._parameters.get("bias"), norm._is_centred)


TRIAL: ContextVar[bool] = ContextVar("TRIAL", default=False)
"""Whether a decoder is being tried."""


class PromptHook:
    """A forward hook that has nothing to do in a step of one token per row, which may be made without calling it.

    Args:
        hook: is called with the module, its arguments and its output.
    """

    def __init__(self, hook: Callable[[nn.Module, tuple[Any, ...], Any], None]) -> None:
        self._hook = hook

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Call the hook that this object was made of, unless a decoder is being tried, see `TRIAL`."""
        if not TRIAL.get():
            self._hook(module, args, output)


def is_heard(module: nn.Module) -> bool:
    """Return whether calling a module runs more than its class's ``forward``: a hook, its own or one of all modules,
    other than a `PromptHook`, or a ``forward`` of its own; also if somebody has replaced ``nn.Linear.forward``.
    """
    hooks = module._forward_hooks
    if hooks and any(type(hook) is not PromptHook for hook in hooks.values()):
        return True
    return bool(module._forward_pre_hooks) or "forward" in module.__dict__ or has_global_hooks()


def has_global_hooks() -> bool:
    """Return whether torch has hooks that every module calls, or somebody has replaced ``nn.Linear.forward``."""
    return bool(_global_forward_hooks or _global_forward_pre_hooks) or nn.Linear.forward is not _LINEAR_FORWARD


_OF_FUSED = {"_qkv", "_activation", "as_tried", "_plus", "_is_centred", "attention_options"}
_USUAL = {*vars(nn.Module()), *_OF_FUSED}
"""Attributes that every module has, and those of fused modules."""

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))

Described: TypeAlias = tuple[tuple[str, str, object], ...]
"""Attributes with plain values: the name of the child that has it, or "" for the module's own; its name; the value. The
name "" stands for the child's class."""


def described(module: nn.Module) -> Described:
    """Return the plain values and functions on which a module's output may depend besides its weights: the attributes
    of the module and of its children without parameters, and the classes of these children.
    """
    entries: list[tuple[str, str, object]] = []
    for name, part in [("", module), *module._modules.items()]:
        # norms and linear layers are left out: what they are told is read anew in each step
        if part is None or (part._parameters and part is not module):
            continue
        if name:
            entries.append((name, "", _name_of_class(part)))
        entries += [
            (name, key, value)
            for key, value in vars(part).items()
            if key not in _USUAL and isinstance(value, (*_PLAIN, FunctionType, BuiltinFunctionType))
        ]
    return tuple(entries)


def is_as_tried(module: nn.Module) -> bool:
    """Return whether a fused module still has the values that `described` found when it was fused, and its class the
    same ``forward``; otherwise the trial proves nothing.
    """
    for name, key, value in vars(module)["as_tried"]:
        part = module._modules.get(name) if name else module
        if part is None or (_name_of_class(part) if not key else vars(part).get(key, _GONE)) != value:
            return False
    return has_own_forward(module)


_GONE = object()
"""Stands for an attribute that a module no longer has; ``None`` could be its value."""


def _name_of_class(module: nn.Module) -> str:
    """Return the full name of a module's class."""
    kind = type(module)  # a fused one has the name of its own class
    return f"{kind.__module__}.{kind.__qualname__}"


def has_own_forward(module: nn.Module) -> bool:
    """Return whether the class of a fused module has the ``forward`` that it had when the module was fused."""
    kind: Any = type(module)
    return kind.plain.forward is kind.plain_forward if "plain_forward" in vars(kind) else False


def alike(module: nn.Module) -> tuple[object, ...]:
    """Return a key that is equal for modules that differ in their weights alone, so that one trial is enough for all.

    It has the classes, shapes and attributes of all parts, a layer's number included, since a ``forward`` may compute
    with it. An object that is no plain value is only equal to itself, as a configuration is that all layers share; and
    so is a module with buffers.
    """
    key: list[object] = []
    for name, part in module.named_modules():
        attributes = tuple(
            (attribute, value if _is_plain(value) else id(value))
            for attribute, value in vars(part).items()
            if attribute not in _USUAL
        )
        weights = tuple((weight, None if x is None else (x.shape, x.dtype)) for weight, x in part._parameters.items())
        alone = id(part) if part._buffers else None  # buffers count as neither weights nor attributes here
        key.append((name, type(part), attributes, weights, alone))
    return tuple(key)


def _is_plain(value: object) -> bool:
    """Return whether a value is a plain one, or a tuple of such, as a layer norm's shape is."""
    return all(isinstance(part, _PLAIN) for part in (value if isinstance(value, tuple) else (value,)))


Trials: TypeAlias = dict[tuple[object, ...], Any]
"""What trials have found, by `alike`."""


@torch.inference_mode()
def agrees(
    module: nn.Module,
    weight: Tensor,
    width: int,
    kernel: Callable[[Tensor], Tensor | None],
    reach: Sequence[nn.Linear | layer_ops.Linear | None] = (),
    *,
    mean: float = 0.0,
) -> bool:
    """Return whether the kernel gives the outputs of a module on random numbers of several sizes, up to rounding.

    One size for each layer in ``reach`` makes its outputs so large that limits on them would show. A module that fails
    on such input does not match.

    Args:
        module: the module.
        weight: one of its weights, whose dtype the numbers have.
        width: of a vector that it takes.
        kernel: returns what the kernel makes of the numbers; ``None``: it cannot.
        reach: linear layers that read the numbers.
        mean: of the numbers before they are scaled.
    """
    draw, scales = torch.Generator().manual_seed(0), torch.tensor(SCALES)
    layers = [layer for layer in reach if layer is not None]
    x = torch.randn(len(SCALES) + len(layers), 1, width, generator=draw) + mean
    for layer, row in zip(layers, x[len(SCALES) :], strict=True):
        most = linear(row.to(weight.dtype), layer.weight, layer.bias).abs().max().float()
        scales = torch.cat((scales, (LARGE / most)[None]))
    x = x * scales[:, None, None]
    try:
        expected = module(x.to(weight.dtype))
    except Exception:  # it takes something else
        return False
    output = kernel(x.to(weight.dtype))
    return output is not None and is_close(output, expected)


def activation_of(module: nn.Module) -> int | None:
    """Return which of `layer_ops.ACTIVATIONS` a module computes; ``None`` if it is none of them.

    It is tried in float32, whatever the model's dtype, since rounding hides the differences of some.
    """
    # with the identity as its weights, a feed-forward layer computes its activation alone
    same = layer_ops.Linear(
        nn.Parameter(torch.eye(_TRIED_NUMBERS, dtype=torch.float32, device="cpu"), requires_grad=False), None
    )

    def agrees_with(activation: int) -> bool:
        kernel = functools.partial(layer_ops.gated, gate=same, up=None, down=same, activation=activation)
        return agrees(module, same.weight, _TRIED_NUMBERS, kernel, (same,))

    return next(filter(agrees_with, layer_ops.ACTIVATIONS), None)


def is_close(found: Tensor, expected: object) -> bool:
    """Return whether a tensor equals another one of its shape and dtype up to rounding: by `TOLERANCE`, for each number
    as a share of the largest in its row.
    """
    if not isinstance(expected, Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    limit = TOLERANCE[found.dtype] * expected.float().abs().amax(dim=-1, keepdim=True)
    return bool(((found.float() - expected.float()).abs() <= limit).all())


def mixed(mixin: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """Return a cached subclass of a module's class in which the mixin's ``forward`` comes first.

    It has the name of the module's class, by which other libraries know it, and that class itself as ``plain``.
    """
    key = mixin, kind, kind.forward  # a function that is put into the class later would not be called
    if key not in _MIXED:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        kept = {"plain": kind, "plain_forward": staticmethod(kind.forward)}
        _MIXED[key] = type(kind.__name__, (mixin, kind), {**names, **kept, "__reduce_ex__": _reduced})
    return _MIXED[key]


def unmixed(mixin: type[nn.Module], kind: Any) -> Any:
    """Return the class that a module of the class ``kind`` has without a mixin.

    Its ``forward`` takes the place of that of ``super()``, which fails if another thread has taken the mixin away since
    the call began.
    """
    return kind.plain if issubclass(kind, mixin) else kind


def _reduced(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Return how to copy or pickle a module whose class was made by `mixed`, since no file defines that class."""
    _, mixin, kind, *_ = type(module).__mro__
    return _blank, (mixin, kind), {name: value for name, value in vars(module).items() if name not in {CALLS, FORWARD}}


def _blank(mixin: type[nn.Module], kind: type[nn.Module]) -> nn.Module:
    """Return an empty module of a class made by `mixed`."""
    module: nn.Module = object.__new__(mixed(mixin, kind))
    return module


# Which modules may be fused.


def fusable(modules: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return the plain linear layers whose weights the kernel can read."""
    return [module for module in modules if type(module) is nn.Linear and is_kernels(module.weight)]


def fuse_linear(layers: list[nn.Linear]) -> None:
    """Turn linear layers into fused ones, in place."""
    for layer in layers:
        layer.__class__ = FusedLinear


def fuse_head(model: Any) -> None:
    """Change the class of the linear layer that computes a model's logits, if it is fused already, in place, to fit its
    dtype: `FusedHead` in half precision, else `FusedLinear`, which can be packed. Other layers stay as they are.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if isinstance(head, FusedLinear | FusedHead):
        kind = FusedHead if head.weight.dtype.itemsize < torch.float32.itemsize else FusedLinear
        object.__setattr__(head, "__class__", kind)


def open_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules of a model except those inside compiled ones."""
    # a compiled module has been traced with its parts as they were
    compiled = {id(m) for top in model.modules() if top._compiled_call_impl is not None for m in top.modules()}
    return (module for module in model.modules() if id(module) not in compiled)


def is_still(module: nn.Module) -> bool:
    """Return whether a module is in evaluation mode, without hooks and without a ``forward`` of its own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not (module.training or any(hooks) or "forward" in vars(module))


def is_kernels(weight: object) -> bool:
    """Return whether the kernel runs on this processor and can read a weight: a contiguous tensor on the CPU, in a
    dtype that trials know.
    """
    if not layer_ops.is_readable(weight) or weight.dtype not in TOLERANCE or not weight.is_contiguous():
        return False
    return weight.is_cpu and choose(weight.device, weight.dtype).has_layer_ops
