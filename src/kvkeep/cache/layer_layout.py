"""The layers of a model's cache and their budgets, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kvkeep import budget as budgets
from kvkeep.budget import Number
from kvkeep.cache.eviction import check_pins
from kvkeep.errors import InputError, UnsupportedModelError, UnsupportedOperationError
from kvkeep.head_profile import Profile
from kvkeep.head_sharding import ALONE, Heads
from kvkeep.kv_bits import check_bits
from kvkeep.pins import Spans
from kvkeep.policies import FALLBACK
from kvkeep.policies._head_budgets import PROFILE, beside, joint_refusal, under
from kvkeep.policies._keep_prompt import check_budget, check_read, keeps_share, share_of
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import parse

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from kvkeep.cache.rotary_probe import Rotations

DEFAULT_BUDGET = 1024
"""Tokens kept per layer and head where nobody says how many."""

_SUPPORTED_TYPES = {
    *("full_attention", "sliding_attention", "linear_attention", "conv", "mamba", "moe", "mlp", "hybrid"),
    *("hybrid_sliding", "attention"),  # the latter in transformers 5.5
}

_CHUNKS = "chunked_attention"
_SHARED = "layers that share the keys of others"
_CROSS = "layers that attend to an image (cross-attention)"
_SEARCH = "each step searches all earlier tokens, so none may be evicted"

_REASONS = {
    _CHUNKS: "a token sees its own chunk of the text only, which kvkeep's attention does not compute",
    _SHARED: "a layer without keys of its own reads them after another layer has evicted some",
    _CROSS: "their keys belong to the image and grow with no token",
    "indexed_attention": _SEARCH,
    "compressed_sparse_attention": _SEARCH,
    "heavily_compressed_attention": "its cache holds summaries of several tokens each, not keys of tokens",
    "reference_sliding_attention": "some tokens outside the sliding window stay visible",
}
"""Why a kind of layer cannot be bounded."""

_MOST_BUDGETS = 256
"""So many budgets are remembered with their spread."""


@dataclass(frozen=True)
class Layout:
    """The layers of a model that hold slots, and how a policy's budget is spread over them.

    Attributes:
        policy: the eviction policy.
        windows: sliding window of each layer with slots, see `windows_of`.
        layer_budget: how budgets are spread over the layers, see `kvkeep.budget.per_layer`.
        head_budget: how the budget is divided among heads; ``None``: by the policy's own rule.
        profile: the budgets of all heads, under ``head_budget="profile:FILE"``.
        positions: the mode in which attention sees positions, ``true`` or ``slot``.
        rotations: the rotary embeddings of the layers that rotate, where slot positions or the policy need them.
        kv_bits: bits of keys and values in the slots, see `kvkeep.kv_bits.check_bits`; ``None``: the model's dtype.
        heads: which KV heads of each layer this process holds.
    """

    policy: Policy
    windows: dict[int, int | None]
    layer_budget: str | Sequence[float]
    positions: Literal["true", "slot"]
    rotations: Rotations
    head_budget: str | None = None
    profile: Profile | None = None
    kv_bits: str | None = None
    heads: Heads = ALONE
    _slots: dict[int, tuple[Number, ...]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        config: PreTrainedConfig,
        policy: Policy,
        *,
        prefill_chunk: int | None = None,
        layer_budget: str | Sequence[float] | None = None,
        positions: str | None = None,
        head_budget: str | None = None,
        kv_bits: str | int | None = None,
    ) -> Layout:
        """Return the layout for a model. The arguments are those of `kvkeep.BoundedCache`.

        Raises:
            InputError: ``positions`` names no mode, or ``kv_bits`` no number of bits.
            UnsupportedOperationError: the policy does not work with ``prefill_chunk`` or with sliding windows, or a
                profile was given and a model that is split.
            UnsupportedModelError: the model has layers whose cache cannot be bounded, or a rotation that the policy
                needs to undo and kvkeep cannot.
        """
        from kvkeep.cache.rotary_probe import position_mode, rotations_for, slot_rotations  # imports transformers

        windows = windows_of(config)
        mode = position_mode(config, positions, own=policy.defaults.positions)
        rotations: Rotations = {}
        if mode == "slot":
            rotations = slot_rotations(config)
        elif policy.unrotates or policy.needs_rotary:
            rotations = rotations_for(config, policy, turns=policy.needs_rotary, foresees=policy.asks)
        heads, own = Heads.of(config), policy.defaults.layer_budget
        asked = layer_budget not in (None, own)
        profile = _profile(head_budget, config, len(windows), heads, layer_budget=asked)
        spread: dict[str, Any] = {"layer_budget": layer_budget, "head_budget": head_budget, "profile": profile}
        rules: dict[str, Any] = {"prefill_chunk": prefill_chunk, "kv_bits": kv_bits}
        return cls.over(windows, policy, **spread, **rules, positions=mode, rotations=rotations, heads=heads)

    @classmethod
    def over(  # noqa: PLR0913  what `of` reads, and the choices of a user
        cls,
        windows: dict[int, int | None],
        policy: Policy,
        *,
        prefill_chunk: int | None = None,
        layer_budget: str | Sequence[float] | None = None,
        head_budget: str | None = None,
        kv_bits: str | int | None = None,
        positions: Literal["true", "slot"] = "true",
        rotations: Rotations | None = None,
        profile: Profile | None = None,
        heads: Heads = ALONE,
    ) -> Layout:
        """Return the layout for a model of which nothing but its layers is known. That suffices where `is_enough` says
        so, which is not checked; elsewhere give the last arguments as well.

        Args:
            windows: sliding window of each layer with slots, see `windows_of`.
            policy: the eviction policy.
            prefill_chunk, layer_budget, head_budget, kv_bits: see `of`.
            positions, rotations, profile, heads: see `Layout`; `of` reads them in a configuration.

        Raises:
            KVKeepError: see `of`.
        """
        kv_bits = check_bits(kv_bits)
        if policy.cascades and (prefill_chunk or any(windows.values())):
            raise UnsupportedOperationError(
                f"{policy} prunes through the layers of a model, which works neither with sliding windows "
                "nor with prefill_chunk (a layer would run ahead of the others; give generate prefill_chunk_size)."
            )
        own = policy.defaults.layer_budget  # which may depend on the rule for heads
        how = own if layer_budget is None else layer_budget
        asked = layer_budget not in (None, own)
        policy = under(policy, head_budget)
        # the heads of all layers can share what layers with sliding windows leave
        beside_windows = str(how).startswith("sliding")
        policy = beside(policy, profile, list(windows))
        why = joint_refusal(
            windows=bool(windows) and all(windows.values()),
            chunk=bool(prefill_chunk),
            layer_budget=asked and not beside_windows and how != "uniform",
            split=heads != ALONE,
        )
        if why and policy.shares_layers:
            if head_budget is not None:
                raise UnsupportedOperationError(f"`head_budget=global` does not go together with {why}.")
            policy = under(policy, "uniform")  # nobody asked for it: it is the policy's own rule
        if policy.shares_layers:
            # scores divide the budget of all layers at once, so a rule for layers would have no effect
            how = how if beside_windows else "uniform"
        return cls(policy, windows, how, positions, rotations or {}, head_budget, profile, kv_bits, heads)

    @staticmethod
    def is_enough(policy: Policy, *, positions: str | None, head_budget: str | None) -> bool:
        """Return whether a model's windows say all that `of` would read in its configuration."""
        rotates = "slot" in (positions, policy.defaults.positions) or policy.unrotates or policy.needs_rotary
        return positions in (None, "true") and not rotates and not str(head_budget).startswith(PROFILE)

    @property
    def undoes(self) -> bool:
        """Return whether the policy needs the model's rotary embedding, to undo rotations or to turn queries."""
        return self.policy.unrotates or self.policy.needs_rotary

    @property
    def sharing(self) -> tuple[int, ...]:
        """Return the numbers of the layers whose heads share one budget: those without a sliding window, or ``()``."""
        full = (number for number, window in self.windows.items() if window is None)
        return tuple(full) if self.policy.shares_layers else ()

    @property
    def policies(self) -> list[Policy]:
        """Return the policy of each layer with slots. In layers that do not share the budget, heads have equal
        budgets.
        """
        sharing, apart = self.sharing, under(self.policy, "uniform") if self.policy.shares_layers else self.policy
        return [self.policy if number in sharing else apart for number in self.windows]

    def spread(self, budget: int | Sequence[int]) -> list[Sequence[Number]]:
        """Return the budget of each layer with slots: a sequence of one number for all rows, or of one per row. Under a
        profile a number is a tuple, see `budget.Number`. Windows do not limit them here, as they do in `slots`.

        Raises:
            BudgetError: the budget is out of range, too small for a layer, or smaller than what the policy protects.
        """
        spread = self._spread(budgets.check_rows(budget))
        sizes = (size for rows in spread for row in rows for size in (row if isinstance(row, tuple) else (row,)))
        for size in dict.fromkeys(sizes):  # equal budgets once, whatever the number of layers
            check_budget(self.policy, size)
        return spread

    def _spread(self, numbers: Sequence[int]) -> list[Sequence[Number]]:
        """Return what `spread` returns, unchecked, from the budgets of all rows or of each."""
        layers = len(self.windows)
        if self.profile is not None:
            heads = [self.profile.budgets(number, self.policy.least) for number in numbers]
            return [[tuple(row[layer]) for row in heads] for layer in range(layers)]
        if self.layer_budget == "uniform":
            return [numbers] * layers
        rule: dict[str, Any] = {"least": self.policy.least, "windows": list(self.windows.values())}
        return list(zip(*(budgets.per_layer(self.layer_budget, n, layers, **rule) for n in numbers), strict=True))

    def slots(self, budget: int) -> list[Number]:
        """Return the budget of each layer for one row: its part of ``budget``, at most its sliding window; under a
        profile a tuple with one number for each KV head.

        Each budget is spread and checked once: an engine asks several times for each request.

        Raises:
            BudgetError: see `spread`.
        """
        if type(budget) is not int:  # True and 1.0 would be taken for 1
            return self._limited(budget)
        if budget not in self._slots:
            if len(self._slots) >= _MOST_BUDGETS:
                self._slots.clear()
            self._slots[budget] = tuple(self._limited(budget))
        return list(self._slots[budget])

    def _limited(self, budget: int) -> list[Number]:
        """Return the checked budget of each layer, at most its sliding window."""
        pairs = zip(self.spread(budget), self.windows.values(), strict=True)
        return [budgets.at_most(number, window) for (number,), window in pairs]

    def check_pins(self, budget: int, pins: Spans) -> None:
        """Refuse pins that do not fit into the budget of some layer.

        Raises:
            BudgetError: a layer's budget is too small for the pins; or see `slots`.
        """
        for number, window in zip(self.slots(budget), self.windows.values(), strict=True):
            check_pins(self.policy, [budgets.smallest(number)], [pins], window=window)

    def check_read(self, budget: int, pins: Spans) -> None:
        """Refuse a prompt that is to stay whole and leaves no room in some layer, see `_keep_prompt.check_read`.

        Args:
            budget: tokens per layer and head.
            pins: all tokens that would have been read, and other pins.

        Raises:
            BudgetError: a layer's budget has no room; or see `slots`.
        """
        for number, window in zip(self.slots(budget), self.windows.values(), strict=True):
            check_read(self.policy, budgets.smallest(number), pins, window=window)

    def room(self, budget: int) -> int | None:
        """Return how many tokens a sequence can have before something must be evicted; ``None`` if every budget holds
        its sliding window.

        Raises:
            BudgetError: see `slots`.
        """
        pairs = zip(map(budgets.smallest, self.slots(budget)), self.windows.values(), strict=True)
        return min((number for number, window in pairs if window is None or number < window), default=None)

    def keeps_all(self, budget: int, tokens: int) -> bool:
        """Return whether a sequence of so many tokens certainly loses none, but to sliding windows.

        Raises:
            BudgetError: see `slots`.
        """
        room = self.room(budget)
        if keeps_share(self.policy):  # to which a prompt is cut, however much room there is
            room = int(share_of(self.policy, min(map(budgets.smallest, self.slots(budget)))))
        return room is None or tokens <= room - (self.policy.grows.room if self.policy.grows else 0)


def _profile(
    head_budget: str | None, config: PreTrainedConfig, layers: int, heads: Heads, *, layer_budget: bool
) -> Profile | None:
    """Load and check the head profile that ``head_budget`` names as ``profile:FILE``; return ``None`` for other rules.

    ``layer_budget`` says whether the user gave a rule for layers as well, ``layers`` how many layers have slots.

    Raises:
        InputError: `layer_budget` was given as well, or the file cannot be used for this model.
        UnsupportedOperationError: the model is split over processes.
    """
    if head_budget is None or not head_budget.startswith(f"{PROFILE}:"):
        return None
    if layer_budget:
        raise InputError("A profile gives every layer its budget: leave out `layer_budget`.")
    profile = Profile.load(head_budget.partition(":")[2])
    profile.check(config, layers=layers)
    if heads != ALONE:
        raise UnsupportedOperationError(
            "head_budget=profile does not work with a model that is split over processes: run it in one, or use "
            "head_budget=ada."
        )
    return profile


def windows_of(config: PreTrainedConfig) -> dict[int, int | None]:
    """Return the sliding window of each layer with keys and values, by its number; ``None`` for full attention.

    Layers that have nothing but a state of fixed size (state-space, convolution) are left out.

    Raises:
        UnsupportedModelError: the model has layers whose cache cannot be bounded.
    """
    from transformers import cache_utils  # here, since plans of most models need only the rest of this module

    together = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
    # the second of them is not in transformers 5.5
    states = (getattr(cache_utils, name) for name in together if hasattr(cache_utils, name))
    with_keys = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer, *states)
    _check_layer_types(config.get_text_config(decoder=True))
    try:
        layers = cache_utils.DynamicCache(config=config).layers
    except AttributeError as error:
        raise UnsupportedModelError(
            f"{type(config).__name__} describes no layers of a decoder that generates text ({error!s:.120})."
        ) from error
    if not layers:  # transformers 5.5 for Gemma 4
        raise UnsupportedModelError(
            f"This version of transformers makes a cache without layers for {type(config).__name__}: there is nothing "
            "to bound. Update transformers."
        )
    return {
        i: layer.sliding_window if isinstance(layer, cache_utils.DynamicSlidingWindowLayer) else None
        for i, layer in enumerate(layers)
        if type(layer) in with_keys  # not isinstance: a subclass may hold something else than keys of tokens
    }


def caches_latents(config: PreTrainedConfig) -> bool:
    """Return whether a model caches latents (multi-head latent attention) that it expands to keys and values before
    it attends.
    """
    return getattr(config.get_text_config(decoder=True), "kv_lora_rank", None) is not None


def _check_layer_types(config: PreTrainedConfig) -> None:
    """Refuse a model with layers whose cache cannot be bounded, with the reason.

    Raises:
        UnsupportedModelError: the model has such layers.
    """
    types = set(getattr(config, "layer_types", None) or ())
    # what some configurations say elsewhere than in `layer_types`
    if getattr(config, "attention_chunk_size", None) is not None:
        types.add(_CHUNKS)
    if getattr(config, "num_kv_shared_layers", None) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        types.add(_SHARED)
    if getattr(config, "cross_attention_layers", None):
        types.add(_CROSS)
    if strange := sorted(types - _SUPPORTED_TYPES):
        why = _REASONS.get(strange[0], "kvkeep does not know how such a layer remembers")
        raise UnsupportedModelError(
            f"{type(config).__name__} has {', '.join(strange)}, whose cache kvkeep cannot bound: {why}. Run this model "
            "without kvkeep."
        )


def default_policy(config: PreTrainedConfig, name: str) -> Policy:
    """Return the policy of the string ``name``, which commands take by default, or `FALLBACK` on a model that it does
    not run on, such as one without rotary positions.
    """
    policy = parse(name)
    try:
        Layout.of(config, policy)
    except (UnsupportedModelError, UnsupportedOperationError):
        return parse(FALLBACK)
    return policy


def default_budget(policy: Policy, tokens: int, others: Iterable[Policy] = ()) -> int:
    """Return the default budget for rows of ``tokens`` tokens: as many if the policy never evicts; else as many, but no
    fewer than any of the policies protects, and at most `DEFAULT_BUDGET`.

    Args:
        policy: the eviction policy.
        tokens: of the longest row; more slots than tokens would be waste.
        others: policies that get the same budget.
    """
    if not policy.evicts:
        return tokens
    protected = (sum(map(int, each.protected(tokens))) for each in (policy, *others))
    return min(DEFAULT_BUDGET, max(tokens, *protected))


def rule_for_layers(budget: int, tokens: int) -> str | None:
    """Return the rule that spreads the budget of rows of at most so many tokens over layers: ``uniform`` where it holds
    all of them, so that no layer evicts; ``None`` otherwise, which is the policy's own.

    A policy's own rule, which gives some layers less than the budget, would evict there what has room.
    """
    return "uniform" if tokens <= budget else None
