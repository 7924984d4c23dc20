"""Fill slots, empty them or move them: tokens come in, and the weakest are evicted.

`kvkeep.cache.shared_budget` does it for a budget that all layers share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.attention_stats import Statistic
from kvkeep.backends.base import Added, Backend, FusedStep, Ring, SlotLimits
from kvkeep.errors import CapacityError, PolicyError
from kvkeep.kv import lost_mass, ranking
from kvkeep.kv.block import Block, settle
from kvkeep.pins import Spans
from kvkeep.policies._head_budgets import average
from kvkeep.policies._keep_prompt import keeps_share, reading, share_of
from kvkeep.policies.base import Policy
from kvkeep.types import EMPTY, AttentionOptions, Budget, Phase, Slots, State, View

# Budgets of heads from the scores of their tokens: the policy's rule, and what pins need beside it.


def divided(policy: Policy, view: View, score: Float[Tensor, "B Hk S"]) -> Int[Tensor, "B Hk"]:
    """Return the budget of each head, by the scores of its tokens, under a policy that divides a common one. Where pins
    need more, heads with spare slots give some up.

    The sum over a row's heads stays the same. Nothing is written.
    """
    assert policy.spreads is not None
    asked = policy.spreads.heads(policy, view, score)
    if view.pins is None:
        return asked
    asked = view.heads.all(asked)
    needed = _needed(policy, view, asked.sum(dim=-1, keepdim=True) // asked.shape[1])
    # pins come first; what they leave goes to heads by what they ask for beyond their pins
    above = (asked - needed).clamp(min=0)
    free = (asked - needed).sum(dim=-1, keepdim=True)  # not below 0: no head needs more than the mean, rounded down
    shares = above.double() * free / above.sum(dim=-1, keepdim=True).clamp(min=1)  # float32 counts to 2^24 only
    budgets = torch.where((asked < needed).any(dim=-1, keepdim=True), needed + ranking.rounded(shares, free), asked)
    return view.heads.mine(budgets)


def may_stay(
    policy: Policy, view: View, score: Float[Tensor, "B Hk S"], mean: Int[Tensor, "B 1"], *, heads: int
) -> Bool[Tensor, "B Hk S"]:
    """Return which tokens may still stay, whatever the heads of the later layers hold. All others can be evicted at
    once.

    Args:
        policy: a policy whose heads share a budget over the layers.
        view: the heads that have come so far.
        score: of their tokens.
        mean: budget of a head on average.
        heads: number of heads that will share the budget.
    """
    assert policy.spreads is not None
    assert policy.spreads.ceilings is not None
    view = replace(view, budget=mean)  # heads' own budgets are not known before the last layer
    most = policy.spreads.ceilings(policy, view, score, heads)
    if view.pins is not None:
        most = most.maximum(_needed(policy, view, mean)) + 2  # what `divided` may round up
    # NaN has no order, and is the lowest score here as in `ranking.protect`
    best = ranking.keep(score.nan_to_num(nan=-torch.inf), view.positions, most)
    # `most`: a policy may protect a share of the budget, and this is the largest that the head can get
    return (best | protected_slots(policy, replace(view, budget=most))) & (view.positions >= 0)


def _needed(policy: Policy, view: View, mean: Int[Tensor, "B 1"]) -> Int[Tensor, "B heads"]:
    """Return the fewest slots that each head needs for its pinned tokens, sinks and recent tokens, at most the mean."""
    pins = view.pins
    assert pins is not None
    view = replace(view, budget=mean)
    coming = (pins[:, 1::2] - pins[:, ::2]).sum(dim=-1, keepdim=True) + policy.protected(mean)[1]
    # tokens that are still to come count as well: pinned ones, and the recent ones among those that are generated
    needed = view.heads.all(protected_slots(policy, view).sum(dim=-1)).maximum(coming)
    return needed.minimum(mean)  # pins fit into each head's budget, except where they leave with a sliding window


def protected_slots(policy: Policy, view: View) -> Bool[Tensor, "B Hk S"]:
    """Return for each slot whether its token may not be evicted: a sink, a recent token or a pinned one."""
    sinks, recent = policy.protected(view.budget)
    held = ranking.protects(view.positions, view.seen, sinks=sinks, recent=recent, pins=view.pins)
    return held & (view.positions >= 0)


def append(
    policy: Policy,
    block: Block,
    keys: Float[Tensor, "B Hk 1 D"],
    values: Float[Tensor, "B Hk 1 E"],
    positions: Int[Tensor, "B 1"],
    *,
    backend: Backend,
) -> None:
    """Write one token per row into an empty slot of each head, and initialise the policy's state of that slot."""
    slot = backend.append(block.store.slots(), keys, values, positions)
    for name, start in policy.slots.items():
        block.state[name].scatter_(-1, slot, start)


def fused_step(
    policy: Policy,
    block: Block,
    view: View,
    new: tuple[Float[Tensor, "B Hq 1 D"], Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"], Int[Tensor, "B 1"]],
    *,
    statistic: Statistic,
    options: AttentionOptions,
    window: int | None,
) -> FusedStep:
    """Return the description of a decode step that a backend makes in one call: append, attend, observe and evict.

    Args:
        policy: one for which `kvkeep.cache.decode_replay.why_not_fused` has no reason.
        block: the slots as they lie in memory, without the new token.
        view: the block's slots as the policy sees them.
        new: the query, key, value and position of each row's token; the position of padding is -1.
        statistic: what the policy wants.
        options: what the model's attention asks for.
        window: sliding window of the layer.
    """
    added, (query, key, value, now) = _added(policy, block, view), new
    if policy.bursts is not None:  # such a step evicts nothing, and so protects nothing
        limits = SlotLimits(view.seen, window=window)
    else:
        stay = limit(policy, view, block.state, window=window)
        sinks, recent = policy.protected(view.budget)
        # only where tokens slide does their score depend on where the prompt ends
        prompt = view.prompt if policy.sums is not None and policy.sums.slides else None
        # pins of the first positions are to a kernel what sinks are
        limits = SlotLimits(view.seen, max(sinks, block.lead), recent, stay, window, prompt)
    slots, ranges = block.store.in_ranges()
    return FusedStep(query, slots, (key, value), now, statistic, options, added, limits, ranges)


def fused(
    policy: Policy, block: Block, view: View, step: FusedStep, *, window: int | None, backend: Backend
) -> Float[Tensor, "B Hq 1 E"] | None:
    """Let the backend run a step of `fused_step`. For a policy that evicts in bursts, evict afterwards.

    Returns:
        The attention output; ``None`` if the backend declines the step, and then nothing has changed.
    """
    out, ring = backend.step(step), step.added.ring
    if policy.bursts is None or out is None:
        return out
    if evict(policy, block, view, window=window, backend=backend) and ring is not None:
        block.lost[..., 2] += lost_mass.of_evicted(ring.mass, block.store.positions >= 0)  # the rest has been counted
    return out


def _added(policy: Policy, block: Block, view: View) -> Added:
    """Return the tensors of a policy's state, and of the mass lost, which a backend's fused step updates in place."""
    lost = block.lost[..., 2:]  # the two sums of decode steps: evicted mass, and all mass (`lost_mass`)
    if policy.tally is None and policy.bursts is not None:
        return Added((), is_score=False, lost=lost)  # a policy that rests between bursts
    state = {name: block.store.of_heads(held) for name, held in block.of_slots().items()}
    if policy.tally is None:
        assert policy.sums is not None
        score = policy.sums.score
        # the backend takes the first sum for the score
        names = sorted(policy.slots, key=lambda name: name != score)
        return Added(tuple(state[name] for name in names), score is not None, lost=lost)
    # a policy with a tally has words of bits, then two sums; the step writes its own mass into the empty tensor
    *words, mass, due = (state[name] for name in policy.slots)
    window, least, drop = policy.tally.sizes(policy, view.budget)
    ring = Ring(tuple(words), mass.new_empty(mass.shape), window, least, drop, view.budget)
    return Added((mass, due), is_score=False, ring=ring, lost=lost)


def evict(policy: Policy, block: Block, view: View, *, window: int | None, backend: Backend) -> bool:
    """Evict after a decode step: empty the worst slots of every head that holds more than its budget. No token is
    moved.

    Args:
        policy: scores the slots and says how many stay; it may leave fewer than the budget.
        block: the slots, with the new token among them.
        view: the block's slots as the policy sees them.
        window: sliding window of the layer; expired slots are emptied first, see `ranking.expire`.
        backend: does the work.

    Returns:
        Whether a slot may have been emptied, apart from expired ones.
    """
    held = block.store.positions  # the view has the same tensor: a token that expires here has expired there, too
    if window is not None:
        backend.expire(held, block.seen, window)
    if policy.bursts is not None and policy.bursts.waits and not backend.is_over(held, view.budget):
        return False
    stays = limit(policy, view, block.state, window=window)
    # sums at hand are a score that costs nothing: the backend then finds out itself which rows are over
    at_hand = policy.slots and policy.bursts is None and not policy.stochastic
    # counting is cheaper than scoring, and while the slots fill up no row is over its budget
    if not at_hand and not backend.is_over(held, stays):
        return False
    if policy.bursts is not None:
        held.masked_fill_(~ranking.keep(shielded(policy, view, block.state), held, stays), EMPTY)
        return True
    sinks, recent = policy.protected(view.budget)
    score = _scores(policy, view, block.state)
    if view.pins is not None:  # a backend knows of sinks and recent tokens only
        score = ranking.above_all(score, ranking.pinned(held, view.pins))
    backend.evict(held, score, SlotLimits(view.seen, sinks, recent, stays))
    return True


def cut(
    policy: Policy,
    block: Block,
    view: View,
    state: State,
    *,
    window: int | None,
    used: int,
    chunk: Slots | None = None,
    divides: bool = True,
) -> Bool[Tensor, "B Hk S"]:
    """Evict after a prefill chunk: of slots and chunk together, keep the best tokens with their state. Tokens that
    have a slot stay in it.

    The state of heads is written as it is.

    Args:
        policy: scores the tokens and says how many stay.
        block: the slots, which are overwritten.
        view: slots and chunk together; tokens that have left the sliding window are marked as empty.
        state: the policy's state for slots and chunk.
        window: sliding window of the layer.
        used: slots among the view's tokens, which come first.
        chunk: the chunk; ``None``: the view shows the slots of another block.
        divides: whether heads that divide a budget may get other budgets.

    Returns:
        Whether each token stays.
    """
    tokens = None
    if divides and policy.spreads is not None:
        tokens = block.store.tokens(view, used=used)  # first: slots that are divided anew lose their content
        block.spread(head_budgets(policy, view, state))
        view, chunk = replace(view, budget=block.budget), None  # no token has a slot any more
    stays = kept(policy, view, state, window=window)
    # numbers of heads have no slot to move to, so they are written as they are
    of_slots = {name: x for name, x in state.items() if name not in block.heads}
    settle(block, view, stays, of_slots, used=used, chunk=chunk, tokens=tokens)
    block.remember({name: x for name, x in state.items() if name in block.heads})
    return stays


def kept(
    policy: Policy, view: View, state: State, score: Float[Tensor, "B Hk S"] | None = None, *, window: int | None = None
) -> Bool[Tensor, "B Hk S"]:
    """Return a mask of the tokens that stay after a prefill chunk: the protected and the best ones of each head, as
    many as `limit` allows, or all if they are fewer. Empty slots are left out.

    Args:
        policy: scores the tokens and says how many stay.
        view: the tokens.
        state: the policy's state for these tokens.
        score: their scores; by default those that the policy gives now, if any token must go.
        window: sliding window of the layer.
    """
    view = reading(policy, view, window=window)
    most = limit(policy, view, state, window=window)
    there = view.positions >= 0
    # on a GPU the question itself would make the host wait
    if there.is_cpu and bool((there.sum(dim=-1) <= most).all()):
        return there
    score = _scores(policy, view, state) if score is None else score
    return ranking.keep(_shielded(policy, view, score), view.positions, most)


def head_budgets(policy: Policy, view: View, state: State) -> Int[Tensor, "B Hk"]:
    """Return the budgets that a policy gives to a layer's heads by its scores, see `divided`. Nothing is written."""
    return divided(policy, view, scored(policy, view, state))


def scored(policy: Policy, view: View, state: State) -> Float[Tensor, "B Hk S"]:
    """Return the policy's scores, computed as if each head had the mean of the heads' budgets: they divide the budget,
    so they must not depend on how it was divided before.
    """
    return _scores(policy, replace(view, budget=average(view)), state)


def limit(policy: Policy, view: View, state: State, *, window: int | None = None) -> Budget:
    """Return how many slots of each head may stay occupied after this step: the budget, or what a policy with bursts or
    growth says.

    A row whose budget holds the sliding window keeps all of its budget.

    Args:
        policy: may leave a part of the budget free.
        view: what the policy may look at.
        state: the policy's state.
        window: sliding window of the layer.
    """
    if policy.bursts is not None:
        stays: Budget = policy.bursts.stays(policy, view, state)
        if view.pins is not None:  # a burst ends at the protected tokens
            least = protected_slots(policy, view).sum(dim=-1)
            stays = torch.maximum(torch.as_tensor(stays, device=least.device), least)
    elif policy.grows is not None:
        stays = policy.grows.stays(view)
    else:
        return view.budget
    if window is None:
        return stays
    # where the budget holds the window, tokens expire before any has to go
    if isinstance(view.budget, int):
        return view.budget if view.budget >= window else stays
    return torch.where(view.budget >= window, view.budget, torch.as_tensor(stays, device=view.budget.device))


def all_stay(policy: Policy, budget: Int[Tensor, "B 1"], *, window: int | None) -> Int[Tensor, "B 1"]:
    """Return how many tokens a row may have seen at the end of a prompt so that certainly none of them has to go, not
    even from the sliding window.

    Args:
        policy: may leave a part of the budget free: for generated tokens, or beside a prompt that it cuts to a share.
        budget: of every head of each row.
        window: sliding window of the layer, which the oldest token leaves once it is full.
    """
    most = torch.as_tensor(share_of(policy, budget)) if keeps_share(policy) else budget
    most = most - (policy.grows.room if policy.grows else 0)
    return most if window is None else most.clamp(max=window - 1)


def shielded(policy: Policy, view: View, state: State) -> Float[Tensor, "B Hk S"]:
    """Return the policy's scores, raised to infinity for protected tokens (`ranking.protect`)."""
    return _shielded(policy, view, _scores(policy, view, state))


def _shielded(policy: Policy, view: View, score: Float[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk S"]:
    """Return the given scores, raised to infinity for protected tokens (`ranking.protect`)."""
    sinks, recent = policy.protected(view.budget)
    return ranking.protect(score, view.positions, view.seen, sinks=sinks, recent=recent, pins=view.pins)


def _scores(policy: Policy, view: View, state: State) -> Float[Tensor, "B Hk S"]:
    """Return the policy's scores after a check of their dtype and shape, adjusted for heads that keep only first and
    newest tokens.

    Raises:
        PolicyError: the policy's scores are no floats, or not one for each slot.
    """
    score: object = policy.score(view, state)
    if isinstance(score, Tensor):
        if score.is_floating_point() and score.shape == view.positions.shape:
            return score if policy.near is None else policy.near.score(view, score)
        kind = f"{str(score.dtype).removeprefix('torch.')} of the shape {tuple(score.shape)}"
    else:
        kind = f"an object of the type {type(score).__name__}"
    raise PolicyError(
        f"{type(policy).__name__}.score returned {kind}. It must return floats of the shape of view.positions, here "
        f"{tuple(view.positions.shape)}: for whole numbers add .float()."
    )


# Room for what may not be evicted: the tokens of policies that never evict, and pins. It is checked before a step.


def check_room(
    policy: Policy, block: Block, T: int, real: Bool[Tensor, "B T"] | None, *, phase: Phase, window: int | None
) -> None:
    """Refuse new tokens that neither fit into the budget nor can be made room for by eviction.

    A policy that evicts has room for any number, unless its budget grows with generated tokens (`Policy.grows`).
    Probes are not stored, and need none.

    Args:
        policy: the eviction policy.
        block: the slots.
        T: new tokens per row.
        real: which of them are no padding; ``None``: all.
        phase: what the tokens are.
        window: sliding window of the layer.

    Raises:
        CapacityError: a row would hold more tokens than its budget, which does not hold the window.
    """
    grows = policy.grows is not None and phase is Phase.DECODE
    if phase is Phase.PROBE or (policy.evicts and not grows):
        return
    coming = T if real is None else real.sum(dim=1, keepdim=True)
    seen = block.seen[:, None] + coming
    if not policy.evicts and isinstance(block.budget, int) and bool((seen <= block.budget).all()):
        return  # the usual case, without a look at the slots
    _check(block, block.held() + coming, window=window)


def _check(block: Block, needed: Int[Tensor, "B n"], *, window: int | None) -> None:
    """Refuse a step after which a row would need more slots than its budget.

    Args:
        block: the slots and their budgets.
        needed: slots that each row would occupy in each head, or in all heads.
        window: sliding window of the layer. A budget that holds the whole window has room for any number of tokens.

    Raises:
        CapacityError: a row would hold more tokens than its budget, which does not hold the window.
    """
    if isinstance(block.budget, int) and bool((needed <= block.budget).all()):
        return  # the usual case, without the operators below
    room = torch.as_tensor(block.budget, device=needed.device).expand_as(needed)
    endless = torch.zeros_like(needed, dtype=torch.bool) if window is None else room >= window
    # the first one is enough for a message
    for row, head in (~endless & (needed > room)).nonzero()[:1].tolist():
        n, budget = int(needed[row, head]), int(room[row, head])
        raise CapacityError(
            f"Row {row} has reached {n} tokens, its budget is {budget}, and this policy "
            "never evicts here. Give a budget of at least the prompt plus its new tokens (under decode=grow: more "
            "room), or another policy."
        )


def check_pins(policy: Policy, budgets: Sequence[int], pins: Sequence[Spans], *, window: int | None) -> None:
    """Refuse pins that do not fit into the budget of their row (where `keeps_share`: into that share of it) beside what
    the policy protects. A policy that never evicts, or a budget that holds the window, takes any pins.

    Args:
        policy: protects tokens of its own.
        budgets: one number for all rows, or one per row.
        pins: one entry for all rows, or one per row.
        window: sliding window of the layer. Where the budget holds all of it, no token has to go before it expires.

    Raises:
        BudgetError: a row's pinned and protected tokens are more than its budget.
    """
    rows = max(len(budgets), len(pins))
    for row in range(rows if pins else 0):
        budget = budgets[row if len(budgets) == rows else 0]
        if window is None or budget < window:
            room = int(share_of(policy, budget)) if keeps_share(policy) else budget
            policy.check_pins(room, pins[row if len(pins) == rows else 0])
