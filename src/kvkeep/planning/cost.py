"""Bytes of a cache from the model's shapes, the rows that fit, and the speed that a bandwidth allows.

``docs/plan.md`` says what is counted and what is not; ``docs/layouts.md`` draws the tensors behind the formulas.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvkeep.budget import Number
from kvkeep.errors import UnsupportedOperationError
from kvkeep.kv_bits import KV_BITS, check_dim, n_normals, scale_halves, transforms_keys

# Bytes of keys, values and what lies beside them, from the shapes of a model's layers.
#
# ``docs/layouts.md`` draws the tensors behind the formulas.

_HALF = 2
"""Bytes of the scale of a group of codes."""

_POSITION = 4
_COUNTERS = 24
"""Bytes of a row's three int64 counters: tokens seen, tokens of the prompt, identity."""

_SEEN = 16
"""Bytes of two of them, which each layer has for itself."""

_RANGE = 24
"""Bytes of a head's budget, first entry and number of entries in a pool."""

_LOST = 16
"""Bytes of a head's four float32 sums of attention mass, evicted and all."""


@dataclass(frozen=True)
class LayerShape:
    """The shape of one layer's keys and values.

    Attributes:
        kv_heads: number of KV heads.
        key_dim: numbers in a key.
        value_dim: numbers in a value.
        window: sliding window in tokens; ``None``: full attention.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes of one token's keys and values in all heads; a number has ``itemsize`` bytes."""
        return self.kv_heads * (self.key_dim + self.value_dim) * itemsize

    def slot_bytes(self, itemsize: int, kv_bits: str | None) -> int:
        """Return the bytes of one token's keys and values in the slots of all heads, scales included.

        Args:
            itemsize: bytes of a number where slots have the model's dtype.
            kv_bits: bits of keys and values, a name of `kvkeep.kv_bits.KV_BITS`; ``None``: the model's dtype.
        """
        if kv_bits is None:
            return self.token_bytes(itemsize)
        pairs = list(zip((self.key_dim, self.value_dim), KV_BITS[kv_bits], strict=True))
        for dim, bits in pairs:
            check_dim(dim, bits)
        return self.kv_heads * sum(dim * bits // 8 + _HALF * scale_halves(dim, bits) for dim, bits in pairs)

    def transform_bytes(self, kv_bits: str | None) -> int:
        """Return the bytes of a row's tensors of `kvkeep.kv.slot_codec.KeyTransform` in all heads of the layer; 0
        unless keys have 4 bits.
        """
        each = 1 + _FLOAT32 * n_normals(self.key_dim)
        return self.kv_heads * self.key_dim * each if transforms_keys(kv_bits) else 0

    def widened_bytes(self, itemsize: int) -> int:
        """Return the bytes of a token's float32 copy in all heads, which attention makes; 0 if the cache is float32."""
        return self.token_bytes(_FLOAT32) if itemsize < _FLOAT32 else 0


def full_bytes(layers: Iterable[LayerShape], tokens: int, itemsize: int) -> int:
    """Return the bytes of one row of so many tokens in a full cache, all layers together.

    A layer with a sliding window holds at most the window. ``itemsize``: bytes of a number in keys and values.
    """
    return sum(
        (tokens if layer.window is None else min(tokens, layer.window)) * layer.token_bytes(itemsize)
        for layer in layers
    )


def block_bytes(
    layer: LayerShape,
    budget: Number,
    itemsize: int,
    *,
    states: int = 0,
    per_head: int = 0,
    own_budgets: int = 0,
    kv_bits: str | None = None,
) -> int:
    """Return the bytes that kvkeep allocates for one row in one layer, by the formula of ``docs/layouts.md``.

    Args:
        layer: the layer's shape.
        budget: tokens that stay, at most the window; of each head where heads have budgets of their own.
        itemsize: bytes of a number in keys and values.
        states: float32 numbers of policy state per slot.
        per_head: float32 numbers of policy state per KV head.
        own_budgets: budgets that are stored for the row: one if rows differ, one per KV head if heads differ.
        kv_bits: see `LayerShape.slot_bytes`.
    """
    heads, beside = layer.kv_heads, _POSITION + _FLOAT32 * states
    own = heads * (_LOST + _FLOAT32 * per_head) + _COUNTERS + 8 * own_budgets + layer.transform_bytes(kv_bits)
    if isinstance(budget, int):
        # one slot more than the budget: a new token comes before another one goes
        return (budget + 1) * (layer.slot_bytes(itemsize, kv_bits) + heads * beside) + own
    pool = heads * (-(-sum(budget) // heads) + 1) + 1  # one entry belongs to no head
    # 16: each head's first entry and number of entries in the pool
    return pool * (layer.slot_bytes(itemsize, kv_bits) // heads + beside) + own + 16 * heads


def joint_bytes(
    layers: Sequence[LayerShape],
    budget: int,
    itemsize: int,
    *,
    states: int = 0,
    per_head: int = 0,
    kv_bits: str | None = None,
) -> int:
    """Return the bytes that kvkeep allocates for one row in all these layers, if their heads share one pool.

    The arguments are those of `block_bytes`; ``budget`` is the mean of all heads.

    Raises:
        UnsupportedOperationError: the layers' heads have different shapes.
    """
    if len({(layer.key_dim, layer.value_dim, layer.kv_heads) for layer in layers}) > 1:
        raise UnsupportedOperationError(
            "`head_budget=global` needs layers with heads of one shape, and those of this model differ. Use "
            "`head_budget=ada` or a profile."
        )
    heads, one = sum(layer.kv_heads for layer in layers), layers[0].slot_bytes(itemsize, kv_bits) // layers[0].kv_heads
    pool = heads * (budget + 1) + 1  # one entry belongs to no head
    own = heads * (_LOST + _FLOAT32 * per_head + _RANGE) + _COUNTERS + _SEEN * (len(layers) - 1)
    own += sum(layer.transform_bytes(kv_bits) for layer in layers)
    return pool * (one + _POSITION + _FLOAT32 * states) + own


_FLOAT32 = 4
_ORDER = 32
"""Bytes per slot and head while a layer ranks its slots: scores, positions, indices, marks."""

_TURN = 20
"""Bytes per number of a key while keys are rotated to their rank: angles and halves in float32, and the result."""


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture-of-experts model.

    Attributes:
        parameters: number of parameters of all experts in all layers.
        count: number of experts in a layer.
        used: number of experts that a token is sent to.
    """

    parameters: int = 0
    count: int = 1
    used: int = 1

    def touched(self, rows: int) -> float:
        """Return the number of the experts' parameters that a decode step of so many rows is expected to read, if
        tokens choose their experts evenly.
        """
        return self.parameters * (1.0 - (1.0 - self.used / self.count) ** rows)


@dataclass(frozen=True)
class Packed:
    """Weights that are stored in fewer bits than their dtype has.

    Attributes:
        parameters: number of these weights.
        size: their bytes, with scales and zero points.
        expert_parameters: number of these weights in `Experts`.
        expert_size: the bytes of these.
    """

    parameters: int = 0
    size: int = 0
    expert_parameters: int = 0
    expert_size: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model as numbers.

    Attributes:
        layers: the layers with keys and values.
        parameters: number of all parameters, shared ones counted once.
        hidden: hidden size.
        widest: size of a token's widest activation inside a layer.
        query_heads: number of query heads.
        vocabulary: number of logits after a token.
        looked_up: number of parameters in tables of which a step reads a few lines only, such as input embeddings.
        experts: the experts, of which a step reads a part.
    """

    layers: tuple[LayerShape, ...]
    parameters: int
    hidden: int
    widest: int
    query_heads: int
    vocabulary: int
    looked_up: int = 0
    experts: Experts = Experts()

    def read(self, rows: int) -> float:
        """Return the number of parameters that a decode step of so many rows is expected to read.

        Tables that are only looked up are left out, and of experts those count that some token chooses.
        """
        return self.parameters - self.looked_up - self.experts.parameters + self.experts.touched(rows)

    def activation_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of the activations of so many tokens in a layer: two of the hidden size, three of the widest
        activation, with ``itemsize`` bytes a number.
        """
        return tokens * (2 * self.hidden + 3 * self.widest) * itemsize

    def logits_bytes(self, itemsize: int) -> int:
        """Return the bytes of the logits after one row's last token, with ``itemsize`` bytes a number, and of their
        float32 copy.
        """
        return self.vocabulary * (itemsize + _FLOAT32)


@dataclass(frozen=True)
class Workspace:
    """The blocks in which attention works.

    Attributes:
        block_bytes: size of a block of float32 logits; one line of logits may be larger.
        blocks: number of blocks at once: logits, soft-capped logits, probabilities, and the noise of some policies.
        widened_slots: slots that a decode step widens to float32 at a time.
        turned: whether keys are rotated to their rank in the cache.
        decoded: bytes of a number in the copies that a step makes of slots of codes; 0 if there are none.
    """

    block_bytes: int
    blocks: int
    widened_slots: int
    turned: bool = False
    decoded: int = 0

    def slot_bytes(self, layer: LayerShape) -> int:
        """Return the working memory, in bytes, that a layer needs for each slot (of all heads) while it ranks slots,
        rotates keys and decodes quantized slots.
        """
        copies = layer.token_bytes(self.decoded) + layer.kv_heads * layer.key_dim * _FLOAT32 if self.decoded else 0
        return layer.kv_heads * (_ORDER + (_TURN * layer.key_dim if self.turned else 0)) + copies


def prompt_bytes(
    model: ModelShape, budgets: Sequence[int], tokens: int, itemsize: int, *, fresh: bool, workspace: Workspace
) -> int:
    """Return the working memory, in bytes, of a step that feeds prompt tokens to a bounded cache.

    Counted are activations, attention's blocks, the last logits, and in the largest layer: the new keys and values, the
    same joined with the slots (unless the slots are empty), their float32 copy, and the tokens that move into slots.

    Args:
        model: the model.
        budgets: budget of each layer.
        tokens: prompt tokens that are fed together.
        itemsize: bytes of a number in activations, keys and values.
        fresh: whether the slots are empty.
        workspace: the blocks in which attention works.
    """
    layers = []
    for layer, budget in zip(model.layers, budgets, strict=True):
        joined = 0 if fresh else tokens + budget + 1  # + 1 here and below: a block has a slot more than its budget
        kept = min(budget + 1, joined or tokens)
        seen = joined or tokens
        layers.append(
            (tokens + joined + kept) * layer.token_bytes(itemsize)
            + seen * (layer.widened_bytes(itemsize) + workspace.slot_bytes(layer))
        )
    # logits are computed in blocks, of which the smallest has one line: all keys for one token
    line = model.query_heads * (tokens + (0 if fresh else max(budgets) + 1)) * _FLOAT32
    attention = workspace.blocks * min(tokens * line, max(workspace.block_bytes, line))
    return model.activation_bytes(tokens, itemsize) + max(layers) + attention + model.logits_bytes(itemsize)


def step_bytes(model: ModelShape, budgets: Sequence[int], itemsize: int, *, workspace: Workspace) -> int:
    """Return the working memory, in bytes, of one row in a decode step of a bounded cache.

    The arguments are those of `prompt_bytes`.
    """
    slots = [budget + 1 for budget in budgets]
    layers = [
        min(n, workspace.widened_slots) * layer.widened_bytes(itemsize) + n * workspace.slot_bytes(layer)
        for layer, n in zip(model.layers, slots, strict=True)
    ]
    attention = workspace.blocks * model.query_heads * max(slots) * _FLOAT32
    return model.activation_bytes(1, itemsize) + max(layers) + attention + model.logits_bytes(itemsize)


def full_prompt_bytes(model: ModelShape, tokens: int, itemsize: int) -> int:
    """Return the working memory, in bytes, of a step that feeds prompt tokens to a full cache, whose attention needs
    none of its own: activations, the new keys and values of the largest layer, and the last logits.
    """
    new = tokens * max(layer.token_bytes(itemsize) for layer in model.layers)
    return model.activation_bytes(tokens, itemsize) + new + model.logits_bytes(itemsize)


def full_step_bytes(model: ModelShape, itemsize: int) -> int:
    """Return the working memory, in bytes, of one row in a decode step of a full cache, whose attention needs none of
    its own: activations and logits.
    """
    return model.activation_bytes(1, itemsize) + model.logits_bytes(itemsize)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of running a model with one kind of cache.

    Attributes:
        model: the model.
        weight_itemsize: bytes of a parameter.
        row_bytes: bytes that a row holds all the time.
        prompt_bytes: working memory of a step that feeds prompts, for all rows together.
        step_bytes: working memory of one row in a decode step.
        packed: the quantised weights; the others have ``weight_itemsize`` bytes each.
        known_bytes: bytes of all weights, if they are known better than by this count.
    """

    model: ModelShape
    weight_itemsize: int
    row_bytes: int
    prompt_bytes: int
    step_bytes: int
    packed: Packed = Packed()
    known_bytes: int | None = None

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights: the known ones, else those that are counted."""
        return self._counted_bytes if self.known_bytes is None else self.known_bytes

    @property
    def _counted_bytes(self) -> int:
        """Return the bytes of all weights as counted: packed ones as packed, the rest in the dtype of weights."""
        return (self.model.parameters - self.packed.parameters) * self.weight_itemsize + self.packed.size

    def peak_bytes(self, rows: int) -> int:
        """Return the most bytes that exist at once with so many rows: weights, rows, and the working memory of the
        prompt's step or of a decode step, whichever is more.
        """
        return self.weight_bytes + rows * self.row_bytes + max(self.prompt_bytes, rows * self.step_bytes)

    def most_rows(self, memory_bytes: int) -> int:
        """Return the largest number of rows that fit into a memory, with weights and working memory; 0 if none does."""
        return bisect.bisect_right(range(1, memory_bytes // self.row_bytes + 1), memory_bytes, key=self.peak_bytes)

    def read_bytes(self, rows: int) -> float:
        """Return the bytes that a decode step of so many rows reads: the weights it uses, once, and each row's
        cache.
        """
        return self._read_weights(rows) + rows * self.row_bytes

    def tokens_per_s(self, rows: int, bandwidth: float, products: float | None = None) -> float:
        """Return the tokens per second of all rows together, if reading weights and caches is all that takes time.

        Args:
            rows: number of rows.
            bandwidth: bytes per second that the memory can be read with.
            products: bytes of weights per second that products with these rows read; ``None``: the bandwidth is the
                only limit.
        """
        weights = self._read_weights(rows) / (products or bandwidth)
        return rows / (weights + rows * self.row_bytes / bandwidth)

    @property
    def crossover_rows(self) -> int:
        """Return the smallest number of rows with which a decode step reads at least as much cache as weights."""
        most = self.weight_bytes // self.row_bytes + 1
        return 1 + bisect.bisect_left(
            range(1, most), True, key=lambda rows: rows * self.row_bytes >= self._read_weights(rows)
        )

    def _read_weights(self, rows: int) -> float:
        """Return the weight bytes that a step of these rows reads; known bytes are spread like the counted ones."""
        experts, packed = self.model.experts, self.packed
        size = self.weight_itemsize
        expert_bytes = (experts.parameters - packed.expert_parameters) * size + packed.expert_size
        unread: float = self.model.looked_up * size
        # without experts `expert_bytes` is 0, and the share below would divide by 0
        if experts.parameters:
            unread += expert_bytes * (1.0 - experts.touched(rows) / experts.parameters)
        return (self._counted_bytes - unread) * self.weight_bytes / self._counted_bytes
