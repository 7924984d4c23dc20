"""The work of ``kvkeep plan``: find the model's shapes, do the arithmetic, refuse what cannot fit.

Importing this module imports torch and transformers. What the user sees is made in `kvkeep.cli.plan.report`.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvkeep import budget as budgets
from kvkeep.backends.torch import BLOCK_BYTES, WIDEN_SLOTS
from kvkeep.cache import BoundedCache
from kvkeep.cli import console
from kvkeep.cli.generate.request import DEFAULT_BUDGET
from kvkeep.cli.plan import Request
from kvkeep.errors import BudgetError, InputError
from kvkeep.models.device import DTYPES, parse_device, parse_dtype
from kvkeep.models.load import embedded
from kvkeep.models.quiet import quiet
from kvkeep.planning import cost
from kvkeep.planning.bandwidth import Bandwidth, measure_bandwidth
from kvkeep.planning.cost import Cost
from kvkeep.planning.shapes import Outline, outline
from kvkeep.policies.base import Policy
from kvkeep.registry import parse, spec

_BLOCKS = 3
_BLOCKS_WITH_NOISE = 9
"""Blocks of logits that attention holds at once, without and with a random number for each (keyformer)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a plan is about; everything is checked.

    Attributes:
        outline: the model.
        policy: the eviction policy.
        budget: tokens per layer and head on average.
        layer_budget: how the budget is spread over the layers; ``None``: the policy's own way.
        positions: which ones attention sees; ``None``: the policy's own mode.
        context: tokens of a row.
        chunk: prompt tokens that are fed in one step.
        dtype: of the cache.
        weights_dtype: of the weights.
    """

    outline: Outline
    policy: Policy
    budget: int
    layer_budget: str | list[float] | None
    positions: str | None
    context: int
    chunk: int
    dtype: torch.dtype
    weights_dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return cost.full_bytes(self.outline.shape.layers, 1, self.dtype.itemsize)

    def cache(self) -> BoundedCache:
        """The cache, which allocates nothing before it is used.

        Raises:
            KVKeepError: the cache cannot be made.
        """
        return BoundedCache(
            self.outline.config, self.policy, self.budget, layer_budget=self.layer_budget, positions=self.positions
        )

    def layer_budgets(self) -> list[int]:
        """Each layer's budget.

        Raises:
            KVKeepError: the cache cannot be made.
        """
        layers = self.cache().bounded_layers()
        return [max(layers[index].budgets) for index in self.outline.indices]

    def bounded(self) -> Cost:
        """What kvkeep's cache takes."""
        model, size, per_layer = self.outline.shape, self.dtype.itemsize, self.layer_budgets()
        blocks = [
            cost.block_bytes(
                layer,
                budget,
                size,
                states=len(self.policy.slots),
                own_budgets=layer.kv_heads if self.policy.spreads else 0,
            )
            for layer, budget in zip(model.layers, per_layer, strict=True)
        ]
        shared = cost.shared_bytes(per_layer[0], per_layer[-1]) if self.policy.cascades else 0
        fresh = self.chunk == self.context
        workspace = cost.Workspace(
            block_bytes=BLOCK_BYTES,
            blocks=_BLOCKS_WITH_NOISE if self.policy.stochastic else _BLOCKS,
            widened_slots=WIDEN_SLOTS,
            turned=self.cache().position_mode == "slot",
        )
        return Cost(
            model=model,
            weight_itemsize=self.weights_dtype.itemsize,
            row_bytes=sum(blocks) + shared,
            prompt_bytes=cost.prompt_bytes(model, per_layer, self.chunk, size, fresh=fresh, workspace=workspace),
            step_bytes=cost.step_bytes(model, per_layer, size, workspace=workspace),
        )

    def full(self) -> Cost:
        """What a full cache takes."""
        model, size = self.outline.shape, self.dtype.itemsize
        return Cost(
            model=model,
            weight_itemsize=self.weights_dtype.itemsize,
            row_bytes=cost.full_bytes(model.layers, self.context, size),
            prompt_bytes=cost.full_prompt_bytes(model, self.chunk, size),
            step_bytes=cost.full_step_bytes(model, size),
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer.

    Attributes:
        setting: what it is about.
        full: with a full cache.
        bounded: with kvkeep's.
        memory: bytes that there are; ``None`` if nobody asked.
        rows: rows that were asked about.
        bandwidth: bytes per second; ``None`` if it is not known.
        measured: how it was found out; ``None`` if it was given.
        device: where it was measured.
    """

    setting: Setting
    full: Cost
    bounded: Cost
    memory: int | None
    rows: int | None
    bandwidth: float | None
    measured: Bandwidth | None
    device: str | None


def serve(request: Request) -> None:
    """Do what ``kvkeep plan`` was asked for.

    Raises:
        KVKeepError: something in the request or the model cannot be used, or not one row fits.
    """
    from kvkeep.cli.plan import report

    with quiet():
        plan = prepare(request)
    report.show(plan, json=request.json)


def prepare(request: Request) -> Plan:
    """Check a request, from the cheapest test to the dearest, and answer it.

    Raises:
        KVKeepError: see `serve`.
    """
    policy = parse(request.policy)
    dtypes = [parse_dtype(text) for text in (request.dtype, request.weights_dtype or request.dtype)]
    device = parse_device(request.device)
    name = request.model or embedded()
    console.progress(f"reading the configuration of {name} …")
    setting = _setting(request, policy, outline(name), dtypes)
    plan = Plan(
        setting=setting,
        full=setting.full(),
        bounded=setting.bounded(),
        memory=request.memory,
        rows=request.rows,
        bandwidth=None if request.bandwidth is None else float(request.bandwidth),
        measured=None,
        device=None,
    )
    _check_rows(plan)
    if not request.measure:
        return plan
    console.progress(f"measuring the memory of {device} …")
    measured = measure_bandwidth(device)
    return replace(plan, bandwidth=measured.best, measured=measured, device=str(device))


def _setting(request: Request, policy: Policy, found: Outline, dtypes: list[torch.dtype | str]) -> Setting:
    context = request.context or found.trained_length
    if context is None:
        raise InputError(f"{found.name} does not say what length it was trained for; give --context TOKENS.")
    if found.position_limit is not None and context > found.position_limit:
        raise InputError(
            f"{found.name} has learned positions for {found.position_limit} tokens, and --context is {context}. No "
            "eviction policy changes that: ask for less, or choose a model with rotary positions."
        )
    own = found.dtype or torch.float32
    dtype, weights_dtype = (kind if isinstance(kind, torch.dtype) else own for kind in dtypes)
    return Setting(
        outline=found,
        policy=policy,
        budget=_budget(request.budget, policy, context),
        layer_budget=request.layer_budget,
        positions=request.positions,
        context=context,
        chunk=min(request.prefill_chunk, context),
        dtype=dtype,
        weights_dtype=weights_dtype,
    )


def _budget(asked: float | int | None, policy: Policy, context: int) -> int:
    """The budget in tokens; by default as `generate` chooses it."""
    if asked is None:
        sinks, recent = policy.protected(context)
        return min(DEFAULT_BUDGET, max(context, sinks + int(recent))) if policy.evicts else context
    budget = budgets.from_ratio(asked, context) if isinstance(asked, float) else asked
    budgets.check(budget)
    if not policy.evicts and budget < context:
        raise BudgetError(
            f"{spec(policy)} never evicts, so a budget of {budget} does not hold a context of {context} tokens. Give "
            "that budget, or a policy that evicts."
        )
    return budget


def _check_rows(plan: Plan) -> None:
    """Refuse what leaves nothing to plan, and say what would fit."""
    if plan.rows is not None and plan.rows < 1:
        most = "" if plan.memory is None else f"; {max(0, plan.bounded.most_rows(plan.memory))} would fit"
        raise InputError(f"--rows {plan.rows} asks for nothing: give 1 or more{most}.")
    if plan.memory is None or plan.bounded.most_rows(plan.memory):
        return
    raise InputError(_too_large(plan, plan.memory))


def _too_large(plan: Plan, memory: int) -> str:
    """Why not one row fits, and what would."""
    setting, weights = plan.setting, plan.bounded.weight_bytes
    size, need = console.show_bytes, plan.bounded.peak_bytes(1)
    in_dtype = f"the weights take {size(weights)} in {name_of(setting.weights_dtype)}"
    if weights > memory:
        smaller = min(kind.itemsize for kind in DTYPES.values()) * setting.outline.shape.parameters
        half = f" ({size(smaller)} in bfloat16)" if smaller < weights else ""
        return (
            f"--memory is {size(memory)}, and {in_dtype}{half}. One row of {spec(setting.policy)} with a budget of "
            f"{setting.budget} fits into {size(need)}."
        )
    smaller_budget = _largest(range(setting.policy.least, setting.budget), memory, lambda n: replace(setting, budget=n))
    shorter_chunk = _largest(range(1, setting.chunk), memory, lambda n: replace(setting, chunk=n))
    ways = [f"--budget {n}" for n in smaller_budget] + [f"--prefill-chunk {n}" for n in shorter_chunk]
    return (
        f"Not one row fits into --memory {size(memory)}: {in_dtype}, a row of {spec(setting.policy)} with a budget of "
        f"{setting.budget} {size(plan.bounded.row_bytes)}, and a step with {setting.chunk} prompt tokens works in "
        f"{size(plan.bounded.prompt_bytes)}. What fits: {', or '.join([*ways, f'--memory {-(-need // 10**6)}MB'])}."
    )


def _largest(numbers: range, memory: int, change: Callable[[int], Setting]) -> list[int]:
    """The largest of the numbers with which one row fits, if there is one."""
    try:
        fitting = bisect.bisect_left(numbers, True, key=lambda n: change(n).bounded().peak_bytes(1) > memory)
    except BudgetError:  # the policy, or how the budget is spread, has no use for so small a budget
        return []
    return [numbers[fitting - 1]] if fitting else []


def name_of(dtype: torch.dtype) -> str:
    """A dtype as the user writes it."""
    return str(dtype).removeprefix("torch.")
