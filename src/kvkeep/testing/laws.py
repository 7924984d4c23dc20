"""The laws that every policy must obey."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from kvkeep.backends import AttentionInputs, reference
from kvkeep.budget import per_head
from kvkeep.cache.layer import Layer
from kvkeep.errors import BudgetError
from kvkeep.pins import spans
from kvkeep.policies._keep_prompt import keeps_share, share_of
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import available, parse, spec
from kvkeep.testing.case import Case, Fed, Tape, held, outputs, replay, run, run_shared
from kvkeep.types import EMPTY, Phase, Slots, State, View

MARGIN = 1e-5
"""Decisions with a smaller margin may fall either way in float32. The comparison of a sequence ends there."""

Law: TypeAlias = Callable[[Policy, Case], None]

LAWS: dict[str, Law] = {}
"""Name → law. A law takes a policy and a `Case` and raises ``AssertionError`` when it is broken."""


def _law(check: Law) -> Law:
    """Register a check in `LAWS` as a law, and return the law. In it, a policy that never evicts gets a budget for all
    tokens.
    """

    @functools.wraps(check)
    def law(policy: Policy, case: Case) -> None:
        check(policy, case if policy.evicts else replace(case, budget=case.prompt + case.steps))

    LAWS[check.__name__] = law
    return law


def fills(policy: Policy) -> bool:
    """Return whether a policy always uses its budget to the last slot, once it has seen that many tokens.

    One that bursts, grows or spreads its budget over heads may leave slots of a head empty, and so does one that cuts a
    prompt to a share of the budget, see `keep_prompt`.
    """
    return not (policy.bursts or policy.grows or policy.spreads or keeps_share(policy))


@_law
def never_over_budget(policy: Policy, case: Case) -> None:
    """Check that after every step at most ``budget`` slots of each head are occupied, by distinct tokens that were
    seen.
    """
    for moment in run(policy, case):
        for row, seen in zip(moment.positions.tolist(), moment.layer.seen.tolist(), strict=True):
            # heads that share a budget may have more than their part, but not together
            together = sum(position != EMPTY for head in row for position in head)
            assert together <= case.budget * case.heads, f"{together} slots of {case.heads} heads are occupied"
            for head in row:
                held = [position for position in head if position != EMPTY]
                assert len(held) <= case.budget or policy.spreads, (
                    f"{len(held)} slots are occupied, budget {case.budget}"
                )
                assert len(held) == len(set(held)), f"a token is held twice: {held}"
                # other policies may leave slots empty, but never evict all
                least = min(case.budget if fills(policy) else 1, seen)
                assert len(held) >= least, f"{len(held)} held of {seen} seen, budget {case.budget}"


@_law
def slots_hold_the_originals(policy: Policy, case: Case) -> None:
    """Check that each slot has the key and value of its position, bit for bit, quantized at most once."""
    tape = Tape.random(case)
    held_tape = tape.held(case.kv_bits)
    for moment in run(policy, case, tape):
        store = moment.layer.store.slots()
        for row in range(case.rows):
            own = held_tape.row(row)
            for head in range(case.heads):
                held = store.positions[row, head] >= 0
                index = store.positions[row, head, held].long()
                assert torch.equal(store.keys[row, head, held], own.keys[0, head, index])
                assert torch.equal(store.values[row, head, held], own.values[0, head, index])


@_law
def enough_budget_is_full_attention(policy: Policy, case: Case) -> None:
    """Check that with a budget of the whole length the output equals dense causal attention.

    Quantized slots are compared with `replay`, for their content depends on when a token has entered its slot.
    """
    case = replace(case, budget=case.prompt + case.steps)
    if case.kv_bits is not None:
        slots_do_not_matter(policy, case)
        return
    tape = Tape.random(case)
    out = torch.cat([moment.out for moment in run(policy, case, tape)], dim=2)
    for row in range(case.rows):
        own = tape.row(row)
        n = own.keys.shape[2]
        positions = torch.arange(n, dtype=torch.int32)
        want, _ = reference.attend(
            AttentionInputs(
                own.query,
                Slots(own.keys, own.values, positions.expand(1, case.heads, n)),
                positions[None].long(),
                case.options,
            )
        )
        torch.testing.assert_close(out[row : row + 1, :, tape.real[row]].double(), want, rtol=1e-4, atol=1e-5)


@_law
def repeatable(policy: Policy, case: Case) -> None:
    """Check that the same input gives the same result, bit for bit."""
    for one, two in zip(run(policy, case), run(policy, case), strict=True):
        assert torch.equal(one.positions, two.positions), "two runs kept different tokens"
        assert torch.equal(one.out, two.out), "two runs gave different outputs"


@_law
def spec_round_trip(policy: Policy, case: Case) -> None:
    """Check that ``parse(spec(policy))`` equals the policy. An unregistered policy has no spec and passes."""
    if type(policy) in available().values():
        assert parse(spec(policy)) == policy


@_law
def protected_tokens_stay(policy: Policy, case: Case) -> None:
    """Check that the first and newest tokens that the policy protects are held after every step.

    A policy that never evicts passes, and one whose recent window differs by row.
    """
    if not policy.evicts or not isinstance(policy.protected(case.budget)[1], int):
        return
    for moment in run(policy, case):
        # heads may have budgets of their own, by which a policy says what it protects
        each = per_head([case.budget], case.rows, case.heads, torch.device("cpu"))
        each = each if isinstance(moment.layer.block.budget, int) else moment.layer.block.budget.expand_as(each)
        rows = zip(moment.positions.tolist(), moment.layer.seen.tolist(), each.tolist(), strict=True)
        for row, seen, numbers in rows:
            for head, number in zip(row, numbers, strict=True):
                # a prompt that was cut to a share had the protection of a budget of that size
                sinks, recent = policy.protected(int(share_of(policy, number)) if keeps_share(policy) else number)
                shielded = {*range(min(sinks, seen)), *range(max(0, seen - int(recent)), seen)}
                assert shielded <= set(head), f"protected tokens {sorted(shielded - set(head))} were evicted"


@_law
def pinned_tokens_stay(policy: Policy, case: Case) -> None:
    """Check that pinned tokens are held after every step, and that beside them the policy keeps what `replay` keeps.

    A case whose budget allows no pins passes.
    """
    if (pinned := _with_pins(policy, case)) is None:
        return
    wanted = {position for start, stop in pinned.pins for position in range(start, stop)}
    for moment in run(policy, pinned):
        for row, seen in zip(moment.positions.tolist(), moment.layer.seen.tolist(), strict=True):
            there = {position for position in wanted if position < seen}
            for head in row:
                assert there <= set(head), f"pinned tokens {sorted(there - set(head))} were evicted"
    if case.steps < MANY:  # `replay` gathers the whole history in each step
        LAWS["slots_do_not_matter"](policy, pinned)


MANY = 100
"""Steps of a case that is too long for `replay`."""


def _with_pins(policy: Policy, case: Case) -> Case | None:
    """Return the case with as many tokens pinned as the budget allows, up to 4, in two spans; ``None`` if it allows
    none.
    """
    for n in (4, 3, 2, 1):
        first = 1 + case.seed % 3  # another place for another seed
        # two spans with a gap between them, the second smaller and smaller until the policy can take both
        pins = spans([(first, first + 1), (first + 3, first + 2 + n)])
        try:
            policy.check_pins(case.budget, pins)
        except BudgetError:
            continue
        return replace(case, pins=pins)
    return None


@_law
def rows_permute(policy: Policy, case: Case) -> None:
    """Check that reordering the rows of a batch reorders the result."""
    tape = Tape.random(case)
    order = torch.arange(case.rows).flip(0)
    turned = Tape(tape.query[order], tape.keys[order], tape.values[order], tape.real[order])
    for one, two in zip(run(policy, case, tape), run(policy, case, turned), strict=True):
        assert torch.equal(one.positions[order], two.positions), "a row's result depends on its place"


@_law
def heads_permute(policy: Policy, case: Case) -> None:
    """Check that reordering the KV heads (with their query heads) reorders the result.

    Policies are exempt if their randomness is keyed by head, or if heads share a budget: a remainder goes to the first
    of equal heads.
    """
    if policy.stochastic or policy.spreads:
        return
    tape = Tape.random(case)
    order = torch.arange(case.heads).flip(0)
    query_order = (order[:, None] * case.group + torch.arange(case.group)).flatten()
    turned = Tape(tape.query[:, query_order], tape.keys[:, order], tape.values[:, order], tape.real)
    for one, two in zip(run(policy, case, tape), run(policy, case, turned), strict=True):
        assert torch.equal(one.positions[:, order], two.positions), "a head's result depends on its place"


@_law
def heads_are_independent(policy: Policy, case: Case) -> None:
    """Check that KV heads keep tokens independently, unless the heads decide together or share a budget."""
    if policy.shares_heads or policy.spreads or case.heads < 2:
        return
    tape = Tape.random(case)
    other = Tape(tape.query.clone(), tape.keys.clone(), tape.values.clone(), tape.real)
    # all heads but the first get other contents
    other.query[:, case.group :] *= -3.0
    other.keys[:, 1:] = other.keys[:, 1:].flip(-1)
    for one, two in zip(run(policy, case, tape), run(policy, case, other), strict=True):
        assert torch.equal(one.positions[:, 0], two.positions[:, 0]), "head 0 depends on the other heads"


@_law
def processes_share_the_heads(policy: Policy, case: Case) -> None:
    """Check that a layer whose heads are divided among two processes keeps the same tokens as an undivided one, and has
    the same outputs.

    The layer has twice the heads of the case, so that each process has as many as the case. A policy that looks at all
    heads of a layer has to ask `View.heads` for them.
    """
    case = replace(case, heads=2 * case.heads)
    tape, outs = Tape.random(case), list[tuple[Tensor, Tensor]]()
    # closed, so that its threads end with a failed comparison as well
    with closing(run_shared(policy, case, tape, 2)) as together:
        for step, (one, parts) in enumerate(zip(run(policy, case, tape), together, strict=True)):
            whole, shared = held([one]), held(parts)
            assert whole == shared, f"step {step}: one process keeps {whole}, two keep {shared}"
            outs.append((outputs(parts), one.out))
    real = tape.real[:, None, :, None]  # what a padded query gets is undefined
    torch.testing.assert_close(*(torch.cat(out, dim=2) * real for out in zip(*outs, strict=True)), rtol=1e-4, atol=1e-5)


@_law
def slots_do_not_matter(policy: Policy, case: Case) -> None:
    """Check that a padded batch in unordered slots keeps the tokens of `replay`: each row alone, without slots."""
    tape = Tape.random(case)
    moments = [(m.positions.clone(), m.out) for m in run(policy, case, tape)]
    for row in range(case.rows):
        own = tape.row(row)
        first = max(0, len(moments) - own.real.shape[1])  # the step of its first token, if its prompt is padding
        for step, (kept, out, margin) in enumerate(replay(policy, case, own), start=first):
            if margin < MARGIN:
                break
            positions, got = moments[step][0][row], moments[step][1][row : row + 1]
            held = [[p for p in head if p != EMPTY] for head in positions.tolist()]
            wanted = [[p for p in head if p != EMPTY] for head in kept[0].tolist()]
            assert held == wanted, f"row {row}, step {step}: kept {held}, without slots {wanted}"
            # the output of the prompt begins with its padding, which `replay` does not have
            real = got[:, :, got.shape[2] - out.shape[2] :]
            torch.testing.assert_close(real.double(), out, rtol=1e-4, atol=1e-5)


@_law
def chunks_compose(policy: Policy, case: Case) -> None:
    """Check that a prompt that a layer splits into chunks gives the same result as these chunks fed one by one."""
    # at least 2, so that the last chunk can be shorter; without padding, since the chunks are fed without a mask
    size = max(2, case.chunk or 7)
    case = replace(case, prompt=3 * size + case.seed % size, steps=0, chunk=size, padding=0)
    if not policy.evicts:
        case = replace(case, budget=case.prompt)
    tape = Tape.random(case)
    (whole,) = run(policy, case, tape)
    # 1 as in `run`: random policies draw by the layer's number
    layer = Layer(policy, case.budget, index=1, kv_bits=case.kv_bits)
    chunks = [slice(start, start + size) for start in range(0, case.prompt, size)]
    outs = [layer.step(*tape.at(at), options=case.options, phase=Phase.PREFILL) for at in chunks]
    assert torch.equal(layer.store.positions.sort(dim=-1).values, whole.positions)
    torch.testing.assert_close(torch.cat(outs, dim=2), whole.out, rtol=1e-5, atol=1e-6)


@_law
def scores_are_finite_numbers(policy: Policy, case: Case) -> None:
    """Check that no score of an occupied slot is NaN, since NaN has no order."""
    seen: list[Tensor] = []

    class Spy(type(policy)):  # type: ignore[misc]  # mypy takes no value for a base
        def score(self, view: View, state: State) -> Tensor:
            """Return the policy's scores, and note those of occupied slots in ``seen``."""
            score: Tensor = super().score(view, state)
            seen.append(score[view.positions >= 0])
            assert score.dtype == torch.float32, f"scores are {score.dtype}, not float32"
            return score

    # the same policy in another class, whatever the arguments of its own are
    spy = object.__new__(Spy)
    spy.__dict__.update(policy.__dict__)
    for _ in run(spy, case):
        pass
    assert not any(score.isnan().any() for score in seen), "a score is NaN"  # without a prompt `full` has no scores


@_law
def saving_and_restoring_changes_nothing(policy: Policy, case: Case) -> None:
    """Check that rows saved to files at any step go on bit for bit in a new layer, as if never saved."""
    tape, end = Tape.random(case), case.prompt + case.steps
    moment = case.prompt + (case.seed % case.steps if case.steps else 0)
    if not bool(tape.real[:, :moment].any(dim=1).all()):
        return  # a row without a token
    old, new = (Fed(policy, case) for _ in range(2))
    # the prompt in one step; a case without one begins with a generated token
    for stop in range(case.prompt or 1, moment + 1):
        old.feed(tape, stop)
    old.move_to(new)
    for stop in range(moment + 1, end + 1):
        one, two = (fed.feed(tape, stop) for fed in (old, new))
        assert torch.equal(one, two), f"column {stop - 1} has another output after saving at column {moment}"
        held = [fed.layer.store.positions for fed in (old, new)]
        assert torch.equal(*held), f"after column {stop - 1} other slots are occupied"
