"""``kvkeep plan``: its options. The work is in `kvkeep.cli.plan_run`, the arithmetic in `kvkeep.planning`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvkeep.cli.options import (
    BUDGET,
    DEVICE,
    DTYPE,
    GGUF,
    HEAD_BUDGET,
    JSON,
    KV_BITS,
    LAYER_BUDGET,
    MODEL_WORD,
    POLICY,
    POSITIONS,
    PREFILL_CHUNK,
    CommandOptions,
    argument,
    check_policy,
    option,
    parse_budget,
    parse_bytes,
    parse_tokens,
)
from kvkeep.errors import InputError
from kvkeep.models import folder
from kvkeep.models.dtype_names import check_dtype
from kvkeep.parameters import MEMORY, MODEL
from kvkeep.policies import DEFAULT

MACHINE = "Machine"


def parse_speed(text: str, option: str = "--bandwidth") -> float:
    """Return the bytes per second that a text means: ``100GB/s``, ``3.35 TB/s``.

    Raises:
        InputError: the text is not a number with a unit, or the speed is not above 0.
    """
    example = "100GB/s"
    if not text.rstrip().endswith("/s"):
        raise InputError(f"{option} {text!r} is not a size per second; write e.g. {example}.")
    return float(parse_bytes(text.rstrip().removesuffix("/s"), option, example=example))


@dataclass(frozen=True, kw_only=True)
class PlanningOptions(CommandOptions):
    """The options of a command that counts a model's memory from its configuration."""

    inherited_first: ClassVar[bool] = True
    model: str | None = argument(
        MODEL_WORD, help="A hub name, a folder, a GGUF file, or a config.json. Default: the embedded model."
    )
    gguf: str | None = option(GGUF)
    policy: str = option(POLICY, default=DEFAULT)
    budget: float | int | None = option(
        BUDGET,
        help="Tokens kept per layer and head, e.g. 512, 4K (4096), 4k (4000), or a share of the context as 20%. "
        "Default: 1024, or the context if that is shorter or the policy is full.",
        read=parse_budget,
    )
    layer_budget: str | list[float] | None = option(LAYER_BUDGET)
    head_budget: str | None = option(HEAD_BUDGET)
    kv_bits: str | None = option(KV_BITS)
    positions: Literal["true", "slot"] | None = option(POSITIONS)
    context: int | None = option(
        "Length of every row, prompt and new tokens. Default: the model's trained length.",
        read=parse_tokens,
        default=None,
        metavar="TOKENS",
        group=MEMORY,
    )
    prefill_chunk: int | None = option(
        PREFILL_CHUNK, help="Prompt tokens that are fed in one step, counted over all rows. Default: one whole prompt."
    )
    dtype: str = option(
        DTYPE, complete=None, help="Dtype of weights and cache: float32, bfloat16, float16, or auto: the checkpoint's."
    )
    weights_dtype: str | None = option(
        "Dtype of the weights, if it differs from the cache's.", default=None, metavar="NAME", group=MODEL, rare=True
    )
    weights_memory: int | None = option(
        "Size of all weights, if you know it, e.g. 18GB. Default: counted from the configuration, quantised weights "
        "with their scales.",
        read=parse_bytes,
        default=None,
        metavar="SIZE",
        group=MODEL,
        rare=True,
    )
    memory: int | None = option(
        "Memory for everything, e.g. 24GiB (2^30 each), 24GB (10^9 each), 512MiB.",
        read=parse_bytes,
        default=None,
        metavar="SIZE",
        group=MACHINE,
    )
    bandwidth: float | None = option(
        "Bandwidth of the memory, e.g. 100GB/s, to predict tokens/s.",
        read=parse_speed,
        default=None,
        metavar="SPEED",
        group=MACHINE,
    )
    measure: bool = option(
        "Measure --device for tokens/s: its bandwidth, and products with weights.", default=False, group=MACHINE
    )
    device: str = option(DEVICE)

    def checked(self) -> PlanningOptions:
        """Return the options themselves, after a check that not two options give the memory's speed.

        Raises:
            InputError: both were given.
        """
        if self.bandwidth is not None and self.measure:
            raise InputError("--bandwidth and --measure were both given; one of them says how fast the memory is.")
        return self

    def check_values(self) -> None:
        """Refuse a model, a policy or a dtype that does not exist.

        Raises:
            KVKeepError: one of them cannot be used.
        """
        if self.model is not None:
            folder.check(self.model, config_file=True)
        for dtype in (self.dtype, self.weights_dtype or "auto"):
            check_dtype(dtype)
        check_policy(self.policy)

    def arguments(self) -> dict[str, Any]:
        """Return the options as arguments of `kvkeep.planning.plan.plan`, by name."""
        names = (
            *("model", "policy", "layer_budget", "head_budget", "kv_bits", "positions", "context", "prefill_chunk"),
            *("dtype", "weights_dtype", "weights_memory", "memory", "bandwidth"),
        )
        return {
            **{name: getattr(self, name) for name in names},
            "budget": self.budget if isinstance(self.budget, int) else None,
            "keep_ratio": self.budget if isinstance(self.budget, float) else None,
        }


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PlanningOptions):
    """Show how many rows fit into a memory, and how fast they can be, before a model is loaded.

    Only the model's configuration is read: a hub name, a folder or a config.json is enough.
    """

    rows: int | None = option(
        "Show whether N rows fit, and how fast they can be.", default=None, metavar="N", group=MEMORY
    )
    host_rows: int = option("Sequences that wait in main memory.", default=0, metavar="N", group=MEMORY, rare=True)
    json: bool = option(JSON)

    def arguments(self) -> dict[str, Any]:
        """Return the options as arguments of `kvkeep.planning.plan.plan`, by name, with the numbers of rows."""
        return {**super().arguments(), "rows": self.rows, "host_rows": self.host_rows}
