"""What a backend does: the work of a layer's step on slots.

The rules that every backend follows are defined in one place each: empty slots in `kvkeep.types.EMPTY`, protection in
`kvkeep.kv.ranking.protect`, expiry in `kvkeep.kv.ranking.expire`, the order of eviction in `kvkeep.kv.ranking`.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.attention_stats import Low, LowRows, Mass, MassAndLast, Nothing, RowMasses, Statistic
from kvkeep.kv import ranking
from kvkeep.rotary import Rotation, TextRotation
from kvkeep.types import AttentionOptions, Budget, Ranges, Report, Slots

# What attention is given.


class AttentionInputs(NamedTuple):
    """What a backend attends with, and over. A new argument of attention is a field here.

    Attributes:
        query: new queries.
        slots: keys, values and positions, unordered. With ``T == 1`` the query's own key is among the slots. With
            ``T > 1`` the last ``T`` slots must be the queries' own, in their order, and keys and values of empty slots
            must be finite. Positions may be those of one head if all heads agree.
        now: true positions of the queries, -1 for padding.
        options: scaling, window, soft cap and sinks of the model.
        statistic: what to report to the policy.
    """

    query: Float[Tensor, "B Hq T D"]
    slots: Slots
    now: Int[Tensor, "B T"]
    options: AttentionOptions
    statistic: Statistic = Nothing()


class SecondReading(NamedTuple):
    """Where a prompt would be read again, see `Backend.reread`.

    Attributes:
        length: how many positions later the second reading comes.
        rotation: turns the queries ahead; ``None`` if the model does not rotate them.
    """

    length: Int[Tensor, "B #Hk"]
    rotation: Rotation | TextRotation | None = None


# What a fused decode step needs beside attention: the slots that stay, and the policy's state that it updates.


@dataclass(frozen=True, eq=False)
class SlotLimits:
    """How many slots may stay occupied after a step, and which ones are protected.

    Attributes:
        seen: tokens of each row seen so far, the new one included.
        sinks: number of first positions that are protected.
        recent: number of newest positions that are protected.
        stay: slots that may stay occupied.
        window: sliding window of the layer; expired slots are emptied first.
        prompt: length of each row's prompt, of which the tokens before the newest ``recent`` ones go after all others;
            ``None``: scores alone decide.
    """

    seen: Int[Tensor, " B"]
    sinks: int = 0
    recent: Budget = 0
    stay: Budget = 2**31 - 1  # no limit: positions have 32 bits
    window: int | None = None
    prompt: Int[Tensor, " B"] | None = None

    def ranked(self, scores: Float[Tensor, "B Hk S"], positions: Int[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk S"]:
        """Return the scores by which slots go, the lowest first: a policy's scores, with the largest finite number for
        the tokens of the prompt that `prompt` names, and infinity for protected ones.
        """
        if self.prompt is not None:
            scores = ranking.chosen_last(scores, positions, self.prompt[:, None] - self.recent)
        return ranking.protect(scores, positions, self.seen, sinks=self.sinks, recent=self.recent)


@dataclass(frozen=True, eq=False)
class Ring:
    """How a decode step updates the state of a policy that marks the rows in which a token received little.

    All heads of a row hold equally many tokens. In the ring (see `kvkeep.attention_stats.ring`) the row's bit is set
    for a token that is low in this row, and cleared for the others. A burst brings a head that holds ``n`` tokens,
    more than the budget, down to ``max(n - k·drop, least)`` with the smallest ``k`` that is enough. So ``due`` of the
    last rows belong to the window of the next burst. Where ``m`` is the mass of this row and ``t`` the second sum, the
    first sum becomes ``m + t·[window > 1]`` and the second ``m·[due > 0] + t·[due > 1]``. A padded token has no bit
    and no mass, and is compared with 0 instead of 1.

    Attributes:
        words: the states that hold the bits.
        mass: receives ``m``, so that the caller can tell how much attention the tokens of a burst carried.
        window: number of rows in a window.
        least: number of tokens that a burst leaves at least.
        drop: a burst drops a multiple of this number.
        budget: slots that may stay occupied.
    """

    words: tuple[Float[Tensor, "B Hk S"], ...]
    mass: Float[Tensor, "B Hk S"]
    window: Budget
    least: Budget
    drop: Budget
    budget: Budget


@dataclass(frozen=True, eq=False)
class Added:
    """How a decode step updates the state of a policy whose state is a sum: ``state = decay·state + mass``.

    The state of the new token starts at 0. A row whose token is padding changes nothing.

    Attributes:
        states: the policy's sums, at most two; all receive the same mass.
        is_score: whether the first sum is the score; otherwise the position is.
        ring: bits beside two sums. The two sums are then updated as `Ring` says, and the step evicts nothing.
        lost: the victim's mass, and the mass of all slots that hold a token until then, are added here, where there are
            sums; ``None``: nowhere. With a ring there is no victim.
    """

    states: tuple[Float[Tensor, "B Hk S"], ...]
    is_score: bool
    ring: Ring | None = None
    lost: Float[Tensor, "B Hk 2"] | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors of the policy that the step changes: sums, words and mass of a ring, and ``lost``."""
        ring = () if self.ring is None else (*self.ring.words, self.ring.mass)
        return (*self.states, *ring) if self.lost is None else (*self.states, *ring, self.lost)


class FusedStep(NamedTuple):
    """All that a decode step needs which a backend makes as a whole.

    Attributes:
        query: the query of each row's token.
        slots: the slots, without the token.
        new: its key and value.
        now: its true position, -1 for padding.
        statistic: what the policy adds up.
        options: what the model's attention asks for.
        added: the state that the step updates.
        limits: the slots that stay.
        ranges: where each head's slots lie in a pool; slots and states are then those of the whole pool, for every head
            the same. ``None``: they lie side by side. Only a backend that reads pools is given any.
    """

    query: Float[Tensor, "B Hq 1 D"]
    slots: Slots
    new: tuple[Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]]
    now: Int[Tensor, "B 1"]
    statistic: Statistic
    options: AttentionOptions
    added: Added
    limits: SlotLimits
    ranges: Ranges | None = None

    @property
    def suits_kernels(self) -> bool:
        """Return whether kernels can be told what the step asks for. They have one window, for what is attended to and
        for what expires.
        """
        return self.options.top is None and self.options.window == self.limits.window and is_known(self.statistic)


# A prompt read again after itself, without reading it: its own queries, turned ahead, against all of its keys.
#
# Under rotary positions the query at position ``p + n`` is the query at ``p``, turned by the constant angle of ``n``
# positions. So the attention that each key would receive in a second reading follows from queries and keys that exist
# while the prompt is read. The matrix exists for one block of query rows at a time.

BLOCK_BYTES = {"cpu": 2**22, "other": 2**25}
"""Size of one block of logits, of which about four exist at once: on a CPU they should stay in its caches."""

LEAST_ROWS = 16
"""Query rows of the smallest block. With fewer of them the products of matrices take longer."""


def turned(query: Float[Tensor, "B Hq T D"], again: SecondReading) -> Float[Tensor, "B Hq T D"]:
    """Return a prompt's queries as a second reading has them: turned by `SecondReading.length` positions; themselves if
    the model does not rotate them.
    """
    length, rotation = again
    if rotation is None:
        return query
    by = length.repeat_interleave(query.shape[1] // length.shape[1], dim=1)
    return rotation.ahead(query, by)


def reread(inputs: AttentionInputs, again: SecondReading) -> Float[Tensor, "B Hk S"]:
    """Compute `Backend.reread` in torch. On a CPU one head of one row is done after the other, which saves memory."""
    query, slots, now, options, _ = inputs
    second, (B, Hk, S, _) = turned(query, again), slots.keys.shape
    if query.device.type != "cpu":
        return _rate(query, second, slots, now, options)
    G, found = query.shape[1] // Hk, query.new_empty((B, Hk, S), dtype=torch.float32)
    positions = slots.positions.expand(B, Hk, S)
    for row, head in itertools.product(range(B), range(Hk)):
        b, h, g = slice(row, row + 1), slice(head, head + 1), slice(head * G, head * G + G)
        mine = replace(options, sinks=None if options.sinks is None else options.sinks[g])
        held = Slots(slots.keys[b, h], slots.values[b, h], positions[b, h])
        found[b, h] = _rate(query[b, g], second[b, g], held, now[b], mine)
    return found


def _rate(
    query: Float[Tensor, "B Hq T D"],
    again: Float[Tensor, "B Hq T D"],
    slots: Slots,
    now: Int[Tensor, "B T"],
    options: AttentionOptions,
) -> Float[Tensor, "B Hk S"]:
    """Return the largest share that each key gets from any row and query head of the second reading, in float32; 0 for
    empty slots. It is computed in blocks of rows.

    Args:
        query: queries of the first reading.
        again: the same queries, turned ahead for the second one.
        slots: see `AttentionInputs`.
        now: positions of the queries in the first reading.
        options: see `AttentionInputs`.
    """
    B, Hq, T, D = query.shape
    Hk, S = slots.keys.shape[1:3]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = slots.keys.to(wide)
    first, second = (x.to(wide).reshape(B, Hk, Hq // Hk, T, D) for x in (query, again))
    empty = _bias(slots.positions[:, :, None, None] < 0, wide)
    # infinity in the denominator: what the first token and padding see gets a share of 0
    counts = torch.where(now >= 1, 0.0, torch.inf).to(wide)[:, None, None]
    found = torch.full((B, Hk, S), -torch.inf, dtype=wide, device=query.device)
    for part in _blocks(T, S * B * Hq * keys.element_size(), query.device):
        n = S - T + part.stop  # keys after the block's last row are in its future
        seen = _logits(first[:, :, :, part], keys[:, :, :n], options)
        known = _total(seen, _bias(_hidden(slots.positions[:, :, :n], now[:, part], options), wide), options)
        logits = _logits(second[:, :, :, part], keys, options).add_(empty)
        total = torch.logaddexp(logits.logsumexp(dim=-1), known).add_(counts[..., part])
        torch.maximum(found, logits.sub_(total[..., None]).flatten(2, 3).amax(dim=2), out=found)
    return found.exp().float()


def _blocks(T: int, row_bytes: int, device: torch.device) -> Iterator[slice]:
    """Return an iterator over slices of ``T`` rows, with as many rows as `BLOCK_BYTES` hold of ``row_bytes`` each, but
    at least `LEAST_ROWS`; the last slice may have fewer.
    """
    size = BLOCK_BYTES["cpu" if device.type == "cpu" else "other"]
    rows = max(LEAST_ROWS, size // row_bytes)
    return (slice(start, min(start + rows, T)) for start in range(0, T, rows))


def _bias(hidden: Bool[Tensor, "*A"], dtype: torch.dtype) -> Float[Tensor, "*A"]:
    """Return minus infinity for hidden keys and 0 for others, to be added: much faster on a CPU than filling by a
    mask.
    """
    return torch.where(hidden, -torch.inf, 0.0).to(dtype)


def _logits(
    query: Float[Tensor, "B Hk G T D"], keys: Float[Tensor, "B Hk S D"], options: AttentionOptions
) -> Float[Tensor, "B Hk G T S"]:
    """Return scaled and soft-capped logits."""
    logits = (query.flatten(2, 3) * options.scaling @ keys.mT).view(*query.shape[:4], -1)
    return logits if options.softcap is None else options.softcap * torch.tanh(logits / options.softcap)


def _hidden(
    positions: Int[Tensor, "B #Hk S"], now: Int[Tensor, "B T"], options: AttentionOptions
) -> Bool[Tensor, "B #Hk 1 T S"]:
    """Return whether each key is hidden from each row of the first reading."""
    keys, rows = positions[:, :, None, None], now.to(positions.dtype)[:, None, None, :, None]
    hidden = (keys < 0) | (keys > rows)
    return hidden if options.window is None else hidden | (keys <= rows - options.window)


def _total(
    logits: Float[Tensor, "B Hk G T S"], bias: Float[Tensor, "B #Hk 1 T S"], options: AttentionOptions
) -> Float[Tensor, "B Hk G T"]:
    """Return for each row the log of the sum of exponentials over the keys that it sees, and of the model's sink.

    ``logits`` are changed in place.
    """
    total = logits.add_(bias).logsumexp(dim=-1)
    if options.sinks is None:
        return total
    return torch.logaddexp(total, options.sinks.to(total.dtype).view(1, *total.shape[1:3], 1))


@runtime_checkable
class Repeat(Protocol):
    """A decode step whose slots, state and limits are known: it is told the tokens."""

    def takes(
        self, query: Float[Tensor, "B Hq 1 D"], keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"]
    ) -> bool:
        """Return whether the tensors of a new token have the shapes, dtypes and device of the recorded step's."""

    def __call__(
        self,
        query: Float[Tensor, "B Hq 1 D"],
        keys: Float[Tensor, "B Hk 1 D"],
        values: Float[Tensor, "B Hk 1 E"],
        now: Int[Tensor, "B 1"],
    ) -> Float[Tensor, "B Hq 1 E"] | None:
        """Run the step with tokens that it `takes`, and return the output; ``None``, with nothing changed, if it
        cannot.
        """


class Backend(abc.ABC):
    """Attends over slots, and fills and empties them in place. Stateless: one object serves every layer.

    Attributes:
        name: the name for ``KVKEEP_BACKEND``.
        fuses: whether `step` ever does anything.
        tallies: whether `step` knows `Added.ring`.
        pools: whether it reads and writes slots in a pool (`kvkeep.kv.pooled_store.PoolSlots`) where they lie.
        codes: whether it reads and writes slots that hold codes (`kvkeep.kv.slot_codec.CodedSlots`) where they lie.
        has_layer_ops: whether the functions of `kvkeep.backends.native.layer_ops` run beside it.
    """

    name: ClassVar[str]
    fuses: ClassVar[bool] = False
    tallies: ClassVar[bool] = False
    pools: ClassVar[bool] = False
    codes: ClassVar[bool] = False
    has_layer_ops: ClassVar[bool] = False

    @abc.abstractmethod
    def attend(self, inputs: AttentionInputs) -> tuple[Float[Tensor, "B Hq T E"], Report]:
        """Attend over occupied slots and reduce the policy's statistic in the same pass.

        Returns:
            The output in the query's dtype, and the report, its fields of shape ``(B, Hk, S)`` in float32. Rows of
            padding get an undefined, finite output.
        """

    def reread(self, inputs: AttentionInputs, again: SecondReading) -> Float[Tensor, "B Hk S"]:
        """Return the largest attention share that each key would get if the prompt were read again after itself.

        A query of the second reading attends to all occupied slots and to what it attended to in the first one. The
        first token's queries and those of padding do not count; sliding windows end in the first reading.

        Args:
            inputs: the first reading.
            again: the second reading.

        Returns:
            Probabilities in float32; 0 for empty slots.
        """
        return reread(inputs, again)

    def attend_twice(
        self, inputs: AttentionInputs, again: SecondReading
    ) -> tuple[Float[Tensor, "B Hq T E"], Report, Float[Tensor, "B Hk S"]]:
        """Return the results of `attend` and of `reread`. A kernel for both can reuse what each query saw first."""
        out, report = self.attend(inputs)
        return out, report, self.reread(inputs, again)

    @abc.abstractmethod
    def append(
        self, slots: Slots, keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"], now: Int[Tensor, "B 1"]
    ) -> Int[Tensor, "B Hk 1"]:
        """Write one token per row into an empty slot of each head, in place, and return the slots.

        The backend may take any empty slot. A padded token (position -1) leaves its slot empty. Slots may have any
        strides, and another dtype than the token, which is then rounded.
        """

    @abc.abstractmethod
    def expire(self, positions: Int[Tensor, "B Hk S"], seen: Int[Tensor, " B"], window: int) -> None:
        """Empty the slots that a sliding window has passed, in place; see `kvkeep.kv.ranking.expire`."""

    @abc.abstractmethod
    def is_over(self, positions: Int[Tensor, "B Hk S"], limit: Budget) -> bool:
        """Return whether a head may hold more than its limit; always ``True`` where the host would wait for the
        answer.
        """

    @abc.abstractmethod
    def evict(self, positions: Int[Tensor, "B Hk S"], score: Float[Tensor, "B Hk S"], limits: SlotLimits) -> None:
        """Empty, in place, one slot of every head that holds more than its limit; ``limits.window`` is not used.

        The victim is that of `kvkeep.kv.ranking.weakest` by the scores of `SlotLimits.ranked`.
        """

    def step(self, step: FusedStep) -> Float[Tensor, "B Hq 1 E"] | None:
        """Append, attend, add the report to the policy's sums, expire and evict, fused and in place; return the output.

        With `Added.ring` no slot is emptied. Return ``None``, with nothing changed, if the backend cannot do the step.
        """
        return None

    def repeat(self, step: FusedStep) -> Repeat | None:
        """Return the same `step` as an object that is given other tokens only; ``None`` if the backend cannot repeat
        it.
        """
        return None

    def at_ranks(self, rotation: Rotation) -> Backend:
        """Return this backend for slot positions: attention rotates each key to its rank among its head's tokens.

        Args:
            rotation: the model's rotary embedding.

        Returns:
            A backend whose `attend` and `append` take queries and keys unrotated. Its `step` takes them as the model
            rotated them.
        """
        return AtRanks(self, rotation)


class AtRanks(Backend):
    """Attention under slot positions by any backend: all keys are rotated before it starts.

    Args:
        backend: does the work.
        rotation: the model's rotary embedding.
    """

    name = "at_ranks"

    def __init__(self, backend: Backend, rotation: Rotation):
        self.backend, self.rotation = backend, rotation

    def attend(self, inputs: AttentionInputs) -> tuple[Float[Tensor, "B Hq T E"], Report]:
        """Attend as `Backend.attend`, after a copy of query and keys is rotated to the tokens' ranks; both come
        unrotated.
        """
        return self.backend.attend(self._rotated(inputs))

    def reread(self, inputs: AttentionInputs, again: SecondReading) -> Float[Tensor, "B Hk S"]:
        """Compute `Backend.reread` with query and keys rotated to ranks. ``again`` is not used: each head rereads the
        tokens that it holds.
        """
        return self.backend.reread(self._rotated(inputs), self._after_held(inputs))

    def attend_twice(
        self, inputs: AttentionInputs, again: SecondReading
    ) -> tuple[Float[Tensor, "B Hq T E"], Report, Float[Tensor, "B Hk S"]]:
        """Return the results of `attend` and `reread`, with query and keys rotated to ranks once. As there, ``again``
        is not used.
        """
        return self.backend.attend_twice(self._rotated(inputs), self._after_held(inputs))

    def _rotated(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return the inputs with copies of query and keys that are rotated to their tokens' ranks in each head."""
        query, slots, now, *_ = inputs
        query, keys = self.rotation.at_ranks(query, slots.keys, slots.positions, now)
        return inputs._replace(query=query, slots=slots._replace(keys=keys))

    def _after_held(self, inputs: AttentionInputs) -> SecondReading:
        """Return a second reading that comes as many positions later as each head holds tokens, since under ranks these
        are the positions 0, 1, 2 and so on.
        """
        return SecondReading((inputs.slots.positions >= 0).sum(dim=-1), self.rotation)

    def append(
        self, slots: Slots, keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"], now: Int[Tensor, "B 1"]
    ) -> Int[Tensor, "B Hk 1"]:
        """Append as the inner backend does; keys are stored unrotated."""
        return self.backend.append(slots, keys, values, now)

    def expire(self, positions: Int[Tensor, "B Hk S"], seen: Int[Tensor, " B"], window: int) -> None:
        """Empty the slots that a sliding window has passed, by the inner backend."""
        self.backend.expire(positions, seen, window)

    def is_over(self, positions: Int[Tensor, "B Hk S"], limit: Budget) -> bool:
        """Return whether a head may hold more than its limit, as the inner backend says."""
        return self.backend.is_over(positions, limit)

    def evict(self, positions: Int[Tensor, "B Hk S"], score: Float[Tensor, "B Hk S"], limits: SlotLimits) -> None:
        """Empty one slot of every head over its limit, by the inner backend."""
        self.backend.evict(positions, score, limits)


# A policy's statistic as numbers that compiled kernels take.


class WantedReport(NamedTuple):
    """The report of one decode step.

    Attributes:
        second: the field beside the mass: ``last``, ``low`` or none.
        counts: whether a row counts: one number per row, above 0 if it does, or one for all, 0 if none does.
        gain: factor on the logits before the reported softmax; ``None`` to report attention's own probabilities.
        decay: weight of a row relative to the one after it.
        last: newest position; decay counts from it, and ``last`` reports its row.
        theta: divides the threshold of ``low``.
        live: whether the threshold of ``low`` follows from the number of visible keys; otherwise from the position.
    """

    second: str | None = None
    counts: int | Int[Tensor, " B"] = -1
    gain: float | Float[Tensor, " B"] | None = None
    decay: float = 1.0
    last: int | Int[Tensor, " B"] = 0
    theta: float = 1.0
    live: bool = False


def is_known(statistic: Statistic) -> bool:
    """Return whether the decode kernels, native and Triton's, can report the statistic."""
    kind = type(statistic)  # no isinstance: LowRows, a kind of Low, has fields that they do not know
    return kind is Nothing or kind is Low or (kind in (Mass, MassAndLast) and cast(Mass, statistic).noise is None)


def wanted(statistic: Statistic) -> WantedReport | None:
    """Return the report that a statistic asks for which `is_known`; ``None`` if it is `Nothing`."""
    if isinstance(statistic, Mass):
        second = "last" if isinstance(statistic, MassAndLast) else None
        plain = isinstance(statistic.gain, float) and statistic.gain == 1.0
        gain = None if plain else statistic.gain
        return WantedReport(second, statistic.rows, gain, statistic.decay, statistic.last)
    if isinstance(statistic, Low):
        return WantedReport("low", statistic.rows, theta=statistic.theta, live=statistic.live)
    return None


class RowSums(NamedTuple):
    """The report of many rows: sums over rows, each with a weight per row.

    Attributes:
        masses: weights of the sums of probabilities.
        lows: weights of the sums that count keys below their share.
        gain: factor on the logits of the probabilities that are summed, per row of the batch; ``None`` for 1.
        theta: see `Low`.
        live: see `Low`.
    """

    masses: list[Float[Tensor, "B T"]]
    lows: list[Float[Tensor, "B T"]]
    gain: Float[Tensor, " B"] | None = None
    theta: float = 1.0
    live: bool = False


def sums_wanted(statistic: Statistic, queries: Int[Tensor, "B T"]) -> RowSums | None:
    """Return the weights with which a statistic sums over the queries at these positions, one tensor for each of its
    fields, in their order: first sums of probabilities, then counts of low keys.

    Return ``None`` for a statistic that is no such sum, or has noise.
    """
    kind, selected = type(statistic), statistic.selects(queries)
    if kind is Nothing:
        return RowSums([], [])
    if isinstance(statistic, LowRows):
        masses = [*statistic.weights(selected, queries).values()]  # two of masses come first, then one for each word
        return RowSums(masses[:2], masses[2:], theta=statistic.theta, live=statistic.live)
    if isinstance(statistic, RowMasses):
        return RowSums(statistic.weights_of(selected, queries), [])
    if isinstance(statistic, Low):
        return RowSums([selected.float()], [selected.float()], theta=statistic.theta, live=statistic.live)
    if kind not in (Mass, MassAndLast) or cast(Mass, statistic).noise is not None:
        return None
    mass = cast(Mass, statistic)
    plain = isinstance(mass.gain, float) and mass.gain == 1.0
    gain = None if plain else torch.as_tensor(mass.gain, dtype=torch.float32, device=queries.device)
    masses = [mass.weights(selected, queries)]
    if isinstance(statistic, MassAndLast):
        newest = torch.as_tensor(mass.last, device=queries.device).view(-1, 1)
        masses.append(mass.weights(selected & (queries == newest), queries))
    return RowSums(masses, [], None if gain is None else gain.expand(len(queries)))
