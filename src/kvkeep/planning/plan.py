"""A plan: how many rows of a model fit into a memory and how fast they can be, from its configuration alone.

    found = plan("Qwen/Qwen3-0.6B", budget=1024, context=32_000, memory=24 * 2**30)
    found.bounded.most_rows(found.memory), found.full.most_rows(found.memory)

``docs/plan.md`` says what is counted and what is not.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from kvkeep import budget as budgets
from kvkeep.backends.torch import BLOCK_BYTES, WIDEN_SLOTS
from kvkeep.budget import Number, by_head, largest
from kvkeep.cache.layer_layout import Layout, default_budget
from kvkeep.errors import BudgetError, InputError, show_bytes
from kvkeep.kv.block import numbers
from kvkeep.kv_bits import check_bits
from kvkeep.models.device import DTYPES, parse_dtype
from kvkeep.models.tiny import embedded
from kvkeep.planning import cost
from kvkeep.planning.cost import Cost, LayerShape, Packed
from kvkeep.planning.families import outline
from kvkeep.planning.outline import Outline, Scheme
from kvkeep.policies import DEFAULT
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import label, parse

# What a plan is made for: a model, an eviction policy, and the lengths of its rows.

_BLOCKS = 3
_BLOCKS_WITH_NOISE = 9
"""Blocks of logits that attention holds at once, without and with a random number for each (keyformer)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, an eviction policy and the lengths of its rows; all values are checked.

    Attributes:
        outline: the model.
        policy: the eviction policy.
        budget: tokens per layer and head on average.
        layer_budget: how the budget is spread over the layers; ``None``: the policy's own rule.
        head_budget: how the budget is divided among heads; ``None``: by the policy's own rule.
        kv_bits: bits of keys and values in the slots of kvkeep's cache; ``None``: its dtype.
        positions: ``true`` or ``slot``; ``None``: the policy's own mode.
        context: tokens of a row, prompt and new ones.
        chunk: prompt tokens that are fed in one step, of all rows together.
        dtype: of the cache.
        weights_dtype: of the weights, or of the rest if weights are quantised.
        scheme: how quantised weights are counted; ``None``: all have ``weights_dtype``.
        weights_memory: bytes of all weights as the user gave them, or as a GGUF file packs them; ``None``: they are
            counted.
    """

    outline: Outline
    policy: Policy
    budget: int
    layer_budget: str | list[float] | None
    positions: Literal["true", "slot"] | None
    context: int
    chunk: int
    dtype: torch.dtype
    weights_dtype: torch.dtype
    scheme: Scheme | None = None
    weights_memory: int | None = None
    head_budget: str | None = None
    kv_bits: str | None = None

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token's keys and values in all layers of a full cache."""
        return cost.full_bytes(self.outline.shape.layers, 1, self.dtype.itemsize)

    @property
    def reads_whole(self) -> bool:
        """Return whether a whole context is fed in one step."""
        return self.chunk == self.context

    def layout(self) -> Layout:
        """Return how kvkeep's cache is laid out: its layers, their policies and the rules for their budgets.

        Raises:
            KVKeepError: there can be no such cache.
        """
        found, spread = self.outline, {"layer_budget": self.layer_budget, "head_budget": self.head_budget}
        rules: dict[str, Any] = {**spread, "kv_bits": self.kv_bits}
        known = Layout.is_enough(self.policy, positions=self.positions, head_budget=self.head_budget)
        if isinstance(found.source, str) and known:
            return Layout.over(found.windows, self.policy, **rules)
        return Layout.of(found.config, self.policy, positions=self.positions, **rules)

    def layer_budgets(self) -> list[int]:
        """Return each layer's budget; where its heads differ, their mean, rounded up."""
        shapes = self.outline.shape.layers
        return [-(-sum(each) // len(each)) for each in map(_by_head, self.numbers(), shapes)]

    def numbers(self) -> list[Number]:
        """Return each layer's budget; if the policy divides it among the KV heads, a tuple of one number for each."""
        return [_number(*layer) for layer in self._layers()]

    def _layers(self) -> list[tuple[Policy, Number, LayerShape]]:
        """Return the policy, the budget and the shape of each layer with slots, in order."""
        layout = self.layout()
        shapes = dict(zip(self.outline.indices, self.outline.shape.layers, strict=True))
        each = zip(layout.windows, layout.policies, layout.slots(self.budget), strict=True)
        # layers that got no keys and values when the model was run have no shape
        return [(policy, number, shapes[index]) for index, policy, number in each if index in shapes]

    def _sharing(self) -> list[LayerShape]:
        """Return the shapes of the layers whose heads all share one budget; ``[]`` if none do."""
        return [shape for policy, _, shape in self._layers() if policy.shares_layers]

    def bounded(self) -> Cost:
        """Return the cost with kvkeep's cache."""
        model, size, per_layer = self.outline.shape, self.dtype.itemsize, self.layer_budgets()
        workspace = cost.Workspace(
            block_bytes=BLOCK_BYTES,
            blocks=_BLOCKS_WITH_NOISE if self.policy.stochastic else _BLOCKS,
            widened_slots=WIDEN_SLOTS,
            turned=self.layout().positions == "slot",
            decoded=0 if self.kv_bits is None else size,
        )
        return Cost(
            **self._weights(),
            row_bytes=self._slot_bytes(),
            prompt_bytes=cost.prompt_bytes(
                model, per_layer, self.chunk, size, fresh=self.reads_whole, workspace=workspace
            )
            + self._waiting_bytes(),
            step_bytes=cost.step_bytes(model, per_layer, size, workspace=workspace),
        )

    def _slot_bytes(self) -> int:
        """Return the bytes that one row takes in kvkeep's cache, all layers together, with what lies beside the
        slots.
        """
        sharing, size = self._sharing(), self.dtype.itemsize
        apart = [(_number(*layer), layer[2]) for layer in self._layers() if not layer[0].shares_layers]
        # layers that share a budget put the same into it
        numbers = [number for policy, number, _ in self._layers() if policy.shares_layers]
        joint = cost.joint_bytes(sharing, largest(numbers), size, **self._beside(sharing[0])) if sharing else 0
        return joint + sum(
            cost.block_bytes(
                shape,
                number,
                size,
                own_budgets=shape.kv_heads if isinstance(number, tuple) else 0,
                **self._beside(shape),
            )
            for number, shape in apart
        )

    def _beside(self, layer: LayerShape) -> dict[str, Any]:
        """Return how many numbers the policy stores per slot and per head of a layer, and the KV bits, as arguments of
        `cost.block_bytes`.
        """
        per_head = numbers(self.policy.summaries, key_dim=layer.key_dim, value_dim=layer.value_dim)
        return {"states": len(self.policy.slots), "per_head": per_head, "kv_bits": self.kv_bits}

    def _waiting_bytes(self) -> int:
        """Return the bytes that layers with a shared budget hold until the last of them has attended.

        Only then is it known which head keeps how much. The result is 0 if no layers share a budget.
        """
        size, held = self.dtype.itemsize, 0 if self.reads_whole else self.budget + 1
        numbers_each = 4 * (3 + len(self.policy.slots))  # position, score, mass and state
        return sum(
            self.chunk * layer.token_bytes(size)
            + held * layer.slot_bytes(size, self.kv_bits)
            + (self.chunk + held) * layer.kv_heads * numbers_each
            for layer in self._sharing()[1:]  # all but the last one, which waits for nobody
        )

    def full(self) -> Cost:
        """Return the bytes that a full cache takes: those of the weights, of one row of `context` tokens, and the
        working memory of a step. The number of rows is given to the methods of `Cost`.
        """
        model, size = self.outline.shape, self.dtype.itemsize
        return Cost(
            **self._weights(),
            row_bytes=cost.full_bytes(model.layers, self.context, size),
            prompt_bytes=cost.full_prompt_bytes(model, self.chunk, size),
            step_bytes=cost.full_step_bytes(model, size),
        )

    def _weights(self) -> dict[str, Any]:
        """Return the arguments of `Cost` that describe the weights."""
        return {
            "model": self.outline.shape,
            "weight_itemsize": self.weights_dtype.itemsize,
            "packed": Packed() if self.scheme is None else self.outline.packed,
            "known_bytes": self.weights_memory,
        }

    @property
    def is_packed(self) -> bool:
        """Return whether the weights are counted as a GGUF file packs them."""
        return self.weights_memory is not None and self.weights_memory == self.outline.file_bytes

    @property
    def weights_format(self) -> str:
        """Return in words how the weights are stored, to follow "the weights take 1 GB"."""
        if self.weights_memory is not None:
            return "packed as in the file" if self.is_packed else "as given"
        rest = name_of(self.weights_dtype)
        return f"in {rest}" if self.scheme is None else f"in {self.scheme}; the rest in {rest}"


def _number(policy: Policy, number: Number, shape: LayerShape) -> Number:
    """Return a layer's budget, as a tuple of one number for each KV head where the policy divides it among them."""
    return _by_head(number, shape) if policy.spreads else number


def _by_head(number: Number, layer: LayerShape) -> tuple[int, ...]:
    """Return a layer's budget as one number for each of its KV heads."""
    return by_head([number], layer.kv_heads)[0]


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


_MOST_ROWS = 2**31 - 1
"""As many as `kvkeep.engine.swapping.MOST_HOST_ROWS`; the bytes of more need not fit into a float."""

_MOST_BYTES = 2**63 - 1  # torch counts bytes in 64 bits

STAGED_ROWS = 2
"""Rows that are on their way, see `kvkeep.engine.host_copies.COPIES`."""


@dataclass(frozen=True)
class Plan:
    """The costs of a setting with a full cache and with kvkeep's.

    Attributes:
        setting: the model, the policy and the lengths.
        full: cost with a full cache.
        bounded: cost with kvkeep's cache.
        memory: bytes of memory for everything; ``None`` if unknown.
        rows: number of rows that was asked about; ``None`` if none was.
        bandwidth: bytes per second that the memory can be read with; ``None`` if unknown.
        host_rows: sequences that wait in main memory, see `Engine`.
        products: rows of a step → bytes of weights per second that its products read, where that was measured.
    """

    setting: Setting
    full: Cost
    bounded: Cost
    memory: int | None
    rows: int | None
    bandwidth: float | None
    host_rows: int = 0
    products: Mapping[int, float] = field(default_factory=dict)

    def tokens_per_s(self, one: Cost, rows: int) -> float | None:
        """Return the tokens per second, of all rows together, that decode steps of so many rows make with one kind of
        cache; ``None`` if the bandwidth is unknown.

        It is an upper limit if the step's products were not timed.
        """
        return None if self.bandwidth is None else one.tokens_per_s(rows, self.bandwidth, self.products.get(rows))

    @property
    def host_bytes(self) -> int:
        """Return the bytes of main memory for the sequences that wait there; 0 without swapping."""
        return self.host_rows * self.bounded.row_bytes

    @property
    def staged_bytes(self) -> int:
        """Return the bytes on a CUDA device for rows that are being swapped to or from main memory; 0 without
        swapping.
        """
        return STAGED_ROWS * self.bounded.row_bytes if self.host_rows else 0


def plan(  # noqa: PLR0913  each decides about bytes
    model: str | os.PathLike[str] | Outline | None = None,
    policy: Policy | str = DEFAULT,
    budget: int | None = None,
    *,
    keep_ratio: float | None = None,
    context: int | None = None,
    prefill_chunk: int | None = None,
    layer_budget: str | list[float] | None = None,
    head_budget: str | None = None,
    kv_bits: str | int | None = None,
    positions: Literal["true", "slot"] | None = None,
    dtype: str = "auto",
    weights_dtype: str | None = None,
    weights_memory: int | None = None,
    memory: int | None = None,
    rows: int | None = None,
    bandwidth: float | None = None,
    host_rows: int = 0,
) -> Plan:
    """Return a plan of a model's memory and speed before it is loaded; no weights and no tokenizer are read.

    Args:
        model: a hub name, a folder, a config.json or a GGUF file, or the `outline` of one; by default the embedded
            model.
        policy: the eviction policy, or its name with options.
        budget: tokens kept per layer and head; see `default_budget`.
        keep_ratio: instead of ``budget``: the share of the context that is kept, in (0, 1].
        context: tokens of a row, prompt and new ones; by default the model's trained length.
        prefill_chunk: prompt tokens that are fed in one step, of all rows together; ``None`` for a whole prompt.
        layer_budget: how the budget is spread over layers, see `BoundedCache`.
        head_budget: how the budget is divided among heads, see `BoundedCache`.
        kv_bits: bits of keys and values in the slots, see `BoundedCache`.
        positions: ``true`` or ``slot``, see `BoundedCache`.
        dtype: ``auto`` (the checkpoint's), ``float32``, ``bfloat16`` or ``float16``.
        weights_dtype: dtype of the weights if it differs from the cache's; quantised ones are counted in it, too.
        weights_memory: bytes of all weights, if you know them better than the configuration says.
        memory: bytes for weights, rows and working memory together.
        rows: a number of rows to plan for.
        bandwidth: bytes per second, e.g. from `measure_bandwidth`.
        host_rows: sequences that wait in main memory, see `Engine`.

    Raises:
        InputError: an argument is out of range, or not one row fits into ``memory``.
        BudgetError: the budget is out of range, or too small for the policy.
        PolicyError: there is no such policy, or an option of it is wrong.
        ModelFileError: the configuration cannot be read.
        UnsupportedModelError: kvkeep cannot run the model.
    """
    chosen = parse(policy) if isinstance(policy, str) else policy
    kinds = [parse_dtype(text) for text in (dtype, weights_dtype or dtype)]
    _check_tokens(context=context, prefill_chunk=prefill_chunk)
    _check_machine(rows, host_rows, memory, weights_memory, bandwidth)
    if model is None:
        found = replace(outline(embedded()), name="embedded")  # not a path inside the package
    else:
        found = model if isinstance(model, Outline) else outline(model)
    length = _context(found, context)
    own = found.dtype or torch.float32
    setting = Setting(
        outline=found,
        policy=chosen,
        budget=_budget(budget, keep_ratio, chosen, length),
        layer_budget=layer_budget,
        head_budget=head_budget,
        kv_bits=check_bits(kv_bits),
        positions=positions,
        context=length,
        chunk=min(prefill_chunk or length, length),
        dtype=kinds[0] if isinstance(kinds[0], torch.dtype) else own,
        weights_dtype=kinds[1] if isinstance(kinds[1], torch.dtype) else own,
        scheme=found.scheme if weights_dtype in (None, "auto") else None,
        weights_memory=found.file_bytes
        if weights_memory is None and weights_dtype in (None, "auto")
        else weights_memory,
    )
    costs = setting.full(), setting.bounded()
    made = Plan(setting, *costs, memory=memory, rows=rows, bandwidth=bandwidth, host_rows=host_rows)
    _check_rows(made)
    return made


def _check_tokens(**numbers: int | None) -> None:
    """Refuse numbers of tokens below 1. ``None`` is no number.

    Raises:
        InputError: there is such a number.
    """
    for name, tokens in numbers.items():
        if tokens is not None and tokens < 1:
            raise InputError(f"{name}={tokens} is not above 0; give 1 token or more.")


def _check_machine(
    rows: int | None, host_rows: int, memory: int | None, weights_memory: int | None, bandwidth: float | None
) -> None:
    """Refuse numbers that are too large for any machine, and a bandwidth, bytes of weights or waiting sequences out of
    range. ``None`` passes.

    Raises:
        InputError: there is such a number.
    """
    if type(host_rows) is not int or host_rows < 0:
        raise InputError(f"host_rows={host_rows!r:.40} is no number of sequences that wait in main memory: 0 or more.")
    counts, sizes = {"rows": rows, "host_rows": host_rows}, {"memory": memory, "weights_memory": weights_memory}
    for given, most in ((counts, _MOST_ROWS), (sizes, _MOST_BYTES)):
        for name, number in given.items():
            if number is not None and number > most:
                raise InputError(f"{name} is above {most}, more than any machine holds; give fewer.")
    if weights_memory is not None and weights_memory < 1:
        raise InputError(f"weights_memory={weights_memory} is not above 0; give the bytes of all weights.")
    if bandwidth is not None and not 0 < bandwidth <= _MOST_BYTES:
        raise InputError(f"bandwidth={bandwidth!r:.40} is no speed: give bytes per second, above 0 and up to 2^63.")


def _context(found: Outline, asked: int | None) -> int:
    """Return the tokens of a row: the number that was asked for, or else the length that the model was trained for.

    Raises:
        InputError: there is no length, or it is beyond the model's learned positions.
    """
    context = asked or found.trained_length
    if context is None:
        raise InputError(f"{found.name} does not say what length it was trained for; give `context`, in tokens.")
    if found.position_limit is not None and context > found.position_limit:
        raise InputError(
            f"{found.name} has learned positions for {found.position_limit} tokens, and `context` is {context}. No "
            "eviction policy changes that: ask for less, or choose a model with rotary positions."
        )
    return context


def _budget(budget: int | None, keep_ratio: float | None, policy: Policy, context: int) -> int:
    """Return the budget in tokens: the given one, the share of the context, or the default.

    Raises:
        InputError: both arguments are given.
        BudgetError: the budget is out of range, or too small for a policy that never evicts.
    """
    if budget is not None and keep_ratio is not None:
        raise InputError("`budget` and `keep_ratio` were both given; one of them says how much to keep.")
    if keep_ratio is not None:
        budget = budgets.from_ratio(keep_ratio, context)
    if budget is None:
        return default_budget(policy, context)
    budgets.check(budget)
    if not policy.evicts and budget < context:
        raise BudgetError(
            f"{label(policy)} never evicts, so a budget of {budget} does not hold a context of {context} tokens. Give "
            "that budget, or a policy that evicts."
        )
    return budget


def _check_rows(made: Plan) -> None:
    """Refuse a plan for less than one row, or into whose memory not one row fits. The error has a remedy.

    Raises:
        InputError: there is no row.
    """
    if made.rows is not None and made.rows < 1:
        most = "" if made.memory is None else f"; {max(0, made.bounded.most_rows(made.memory))} would fit"
        raise InputError(f"rows={made.rows} asks for nothing: give 1 or more{most}.")
    if made.memory is None or made.bounded.most_rows(made.memory):
        return
    raise InputError(_too_large(made, made.memory))


def _too_large(made: Plan, memory: int) -> str:
    """Return the error message about a memory into which not one row fits, with values that would fit."""
    setting, weights, need = made.setting, made.bounded.weight_bytes, made.bounded.peak_bytes(1)
    row = f"{label(setting.policy)} with a budget of {setting.budget}"
    in_dtype = f"the weights take {show_bytes(weights)} {setting.weights_format}"
    if weights > memory:
        smaller = min(kind.itemsize for kind in DTYPES.values()) * setting.outline.shape.parameters
        half = f" ({show_bytes(smaller)} in bfloat16)" if smaller < weights else ""
        return f"`memory` is {show_bytes(memory)}, and {in_dtype}{half}. One row of {row} fits into {show_bytes(need)}."
    smaller_budget = _largest(range(setting.policy.least, setting.budget), memory, lambda n: replace(setting, budget=n))
    shorter_chunk = _largest(range(1, setting.chunk), memory, lambda n: replace(setting, chunk=n))
    ways = [f"`budget={n}`" for n in smaller_budget] + [f"`prefill_chunk={n}`" for n in shorter_chunk]
    ways.append(f"`memory={-(-need // 10**6) * 10**6}`")  # rounded up, so that it is enough
    return (
        f"Not one row fits into the `memory` of {show_bytes(memory)}: {in_dtype}, a row of {row} "
        f"{show_bytes(made.bounded.row_bytes)}, and a step with {setting.chunk} prompt tokens works in "
        f"{show_bytes(made.bounded.prompt_bytes)}. What fits: {', or '.join(ways)}."
    )


def _largest(numbers: range, memory: int, change: Callable[[int], Setting]) -> list[int]:
    """Return the largest of the numbers with which one row fits into the memory, as a list of one; ``[]`` if there is
    none, or if one that is tried is too small for the policy.

    Args:
        numbers: in rising order; a larger one takes more memory.
        memory: in bytes.
        change: returns the setting with a number.
    """
    try:
        fitting = bisect.bisect_left(numbers, True, key=lambda n: change(n).bounded().peak_bytes(1) > memory)
    except BudgetError:  # the policy, or how the budget is spread, has no use for so small a budget
        return []
    return [numbers[fitting - 1]] if fitting else []
