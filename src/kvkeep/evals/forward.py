"""How evaluations run a model: the options of a bounded cache, and batches that are fed piece by piece."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep import budget as budgets
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.hf_layers import handed, state_part
from kvkeep.cache.prompt_kv import LayerPrompts, PromptKV, PromptReading, rows_to_read
from kvkeep.cache.rotary_probe import position_mode
from kvkeep.errors import BudgetError
from kvkeep.head_profile import Profile
from kvkeep.kv_bits import check_bits
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.rotary import follows_length
from kvkeep.models.tokenization import Writer
from kvkeep.policies.base import Policy

BATCH_TOKENS = 16_384
"""Most prompt tokens that run through the model at once."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The options of a `BoundedCache` beside policy and budget; by default the policy's own.

    Attributes:
        positions: ``true`` or ``slot``; ``None`` for the policy's own mode.
        layer_budget: how the budget is spread over the layers; ``None`` for the policy's own rule.
        head_budget: how the budget is divided among heads; ``None`` for the policy's own rule.
        kv_bits: bits of keys and values in the slots; ``None`` for the model's dtype.
        prefill_chunk: tokens of a prompt that a layer takes at once; ``None`` for all.

    Raises:
        BudgetError: there is no such rule for layers, or a number is out of range.
    """

    positions: str | None = None
    layer_budget: str | tuple[float, ...] | None = None
    head_budget: str | None = None
    kv_bits: str | None = None
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        """Check the rule for layers and the chunk. The cache checks the others, for which it needs model and policy.

        Raises:
            BudgetError: there is no such rule, its number is out of range, or the chunk takes no token.
        """
        if isinstance(self.layer_budget, str):
            # checks the rule, for which the numbers do not matter
            budgets.per_layer(self.layer_budget, budget=1, layers=1)
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise BudgetError(f"The prefill chunk {self.prefill_chunk} takes no token; give 1 or more.")

    def cache(self, checkpoint: Checkpoint, policy: Policy, numbers: Sequence[int], *, first: int = 0) -> BoundedCache:
        """Return an unused cache for one batch, made with these options. No memory for slots is taken yet.

        Args:
            checkpoint: the model.
            policy: the eviction policy.
            numbers: tokens kept per layer and head, one number per row.
            first: identity of the first row for policies with randomness; the others count up from it.
        """
        return BoundedCache(
            checkpoint.config,
            policy,
            list(numbers),
            prefill_chunk=self.prefill_chunk,
            sequences=list(range(first, first + len(numbers))),
            layer_budget=self.layer_budget,
            head_budget=self.head_budget,
            positions=self.positions,
            kv_bits=self.kv_bits,
        )

    def differences(self, checkpoint: Checkpoint, policy: Policy) -> str:
        """Return the options that differ from the policy's own, e.g. ``positions=slot,layer-budget=ramp:0.2``; empty if
        none does. An option that names the policy's own mode or rule is no difference.

        Raises:
            UnsupportedModelError: slot positions were asked for, and the model cannot have them.
        """
        # the rule of a policy that divides budgets by itself has no name
        rule, own = policy.defaults.layer_budget, "its own" if policy.spreads else "uniform"
        found = {
            "positions": (_mode(checkpoint, self.positions, policy), _mode(checkpoint, None, policy)),
            "layer-budget": (_rule(self.layer_budget or rule), _rule(rule)),
            "head-budget": (_shared(self.head_budget or own), own),
            "kv-bits": (str(check_bits(self.kv_bits)), str(None)),
            "prefill-chunk": (str(self.prefill_chunk), str(None)),
        }
        return ",".join(f"{name}={asked}" for name, (asked, own) in found.items() if asked != own)


PLAIN = Setup()
"""The policy's own options."""


class Drive:
    """Feeds one batch through a model with a cache of its own.

    Args:
        writer: the model.
        policy: the eviction policy.
        budgets: tokens kept per layer and head, one per row.
        first: identity of the first row for policies with randomness; the others count up from it.
        setup: the cache's other options.

    Attributes:
        cache: the cache.
        budgets: tokens kept per layer and head, one per row.
        known: tokens of all rows that were read before, see `go_on_from`.
    """

    cache: BoundedCache

    def __init__(self, writer: Writer, policy: Policy, budgets: Sequence[int], *, first: int = 0, setup: Setup = PLAIN):
        """Make an unused cache with a row for each budget; the model does not run yet."""
        self.model = writer.model
        self.budgets = tuple(budgets)
        self.cache = setup.cache(writer.checkpoint, policy, budgets, first=first)
        self.known = 0
        self._real: Tensor | None = None
        self._chunk = setup.prefill_chunk

    @torch.inference_mode()
    def feed(
        self, ids: Int[Tensor, "B n"], real: Bool[Tensor, "B n"] | None = None, *, last_only: bool = False
    ) -> Float[Tensor, "B m V"]:
        """Run ``n`` new columns through the model and its cache, which then evicts, and return the logits.

        Args:
            ids: token ids.
            real: which of the columns are tokens, the others being padding; ``None``: all, and so were all columns that
                were fed before.
            last_only: compute the logits of the last column only.

        Returns:
            Logits of all ``n`` columns, or of the last one.
        """
        ids = ids.to(self.model.device)
        out = self.model(
            input_ids=ids,
            **handed(self.model, self.cache),
            use_cache=True,
            logits_to_keep=int(last_only),  # 0 stands for all
            **({} if real is None else self._padding(real.to(ids.device))),
        )
        # what was read before belongs to the tokens of this call alone, see `_follow`
        for layer in self.cache.bounded_layers().values():
            layer.prompts = None
        logits: Tensor = out.logits
        return logits

    @property
    def end_rows(self) -> int | None:
        """Return how many of a prompt's last tokens must be read so that the policy chooses as if all were, although
        the others were read before; ``None`` if the policy, the model, or reading in chunks does not allow that.
        """
        policy, stateful = self.cache.policy, any(state_part(layer) is not None for layer in self.cache.layers)
        # not if tokens are evicted between chunks, if a layer has one state for all tokens, or if a second reading's
        # queries, or all queries and keys (`follows_length`), are turned by the length of the whole prompt
        anew = policy.rereads or self._chunk is not None or stateful
        return None if anew or any(map(follows_length, self.model.modules())) else rows_to_read(policy)

    def beginning(self, ids: Int[Tensor, " n"]) -> PromptKV | None:
        """Read the beginning of a prompt into the only row, which is unused, and return the keys and values of all its
        tokens from before the eviction; ``None`` if they could not be kept.
        """
        # any number of bytes but 0, under which nothing would be kept
        reading, layers = PromptReading(nbytes=1), self.cache.bounded_layers()
        self._follow([reading])
        self.feed(ids[None], last_only=True)
        return reading.taken(len(ids), len(layers))

    def go_on_from(self, before: PromptKV) -> None:
        """Let all rows, which are unused, begin with tokens that were read before; the next `feed` takes them."""
        self.known = before.tokens
        self._follow([PromptReading(before)] * len(self.budgets))

    def _follow(self, readings: Sequence[PromptReading]) -> None:
        """Give the rows' readings to all layers, which use them when the next tokens are fed."""
        for place, layer in enumerate(self.cache.bounded_layers().values()):
            layer.prompts = LayerPrompts(place, readings)

    def copies(self, rows: Sequence[int]) -> Drive:
        """Return the same model with copies of the cache of some rows; a row may be given several times.

        The copy and the original go on independently: nothing that is fed to one changes the other.
        """
        memories = {row: self.cache.snapshot(row) for row in set(rows)}
        copied = [memories[row] for row in rows]
        other = copy.copy(self)
        other.budgets = tuple(self.budgets[row] for row in rows)
        other.cache = BoundedCache.from_snapshots(self.model.config, copied, policy=self.cache.policy)
        seen = torch.tensor([memory.seen for memory in copied], device=self.model.device)
        width = int(seen.max())
        # rows of different lengths are padded on the left
        other._real = torch.arange(width, device=seen.device) >= width - seen[:, None]
        return other

    def _padding(self, real: Bool[Tensor, "B n"]) -> dict[str, Tensor]:
        """Return the model's arguments for rows with padding: the mask over all columns so far, and the new columns'
        positions. The new columns are remembered.
        """
        self._real = real if self._real is None else torch.cat([self._real, real], dim=1)
        positions = self.known + self._real.long().cumsum(dim=1)[:, -real.shape[1] :] - 1
        # padding before a row's first token is at -1, which is no position; it counts for nothing
        return {"attention_mask": self._real.long(), "position_ids": positions.clamp(min=0)}


def batches(lengths: Sequence[int]) -> list[slice]:
    """Split rows of these lengths into batches, all of as many rows but the last one, as slices.

    A batch has at most `BATCH_TOKENS` columns in all its rows together, but at least one row.
    """
    # all rows of a batch are as wide as its longest, which may be the longest of all
    size = max(1, BATCH_TOKENS // max(lengths))
    return [slice(start, start + size) for start in range(0, len(lengths), size)]


def left_padded(rows: Sequence[Int[Tensor, "_"]]) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Return rows of different lengths as one batch, padded on the left with 0, and a mask of the columns that are
    tokens.
    """
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(width) >= width - lengths[:, None]


def _mode(checkpoint: Checkpoint, asked: str | None, policy: Policy) -> str:
    """Return the position mode: the one that was asked for, else the policy's own, else true positions."""
    return position_mode(checkpoint.config, asked, own=policy.defaults.positions)


def _shared(rule: str) -> str:
    """Return the name of a head budget rule. A profile's name has a hash of its content, since its file may change."""
    name, _, file = rule.partition(":")
    if name != "profile":
        return rule
    content = json.dumps(Profile.load(file).as_dict(), sort_keys=True)
    return f"{name}:{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def _rule(how: str | tuple[float, ...]) -> str:
    """Return the name of a layer budget rule with its parameter; a list of layer weights is shown as a hash."""
    if not isinstance(how, str):
        return f"calibrated:{hashlib.sha256(repr(how).encode()).hexdigest()[:8]}"
    name, _, number = how.partition(":")
    return name if name == "uniform" else f"{name}:{float(number or budgets.RULES[name]):g}"
