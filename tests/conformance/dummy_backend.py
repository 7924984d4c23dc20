"""A backend written from the protocol alone: one row and head at a time, over its occupied slots only."""

import itertools

import torch

from kvkeep.attention_stats import ProbabilityRows
from kvkeep.backends import AttentionInputs, Backend
from kvkeep.kv import ranking
from kvkeep.types import EMPTY, Report, Slots


def heads(positions):
    return itertools.product(*map(range, positions.shape[:2]))


class DummyBackend(Backend):
    name = "dummy"
    fuses = True

    def attend(self, inputs):
        query, (keys, values, positions), now, options, statistic = inputs
        positions = positions.expand(keys.shape[:3])
        Hk, S, T = *keys.shape[1:3], query.shape[2]
        wide = torch.promote_types(query.dtype, torch.float32)
        q = query.to(wide).unflatten(1, (Hk, -1))
        p, out = q.new_zeros(*q.shape[:4], S), q.new_zeros(*q.shape[:4], values.shape[-1])
        for row, head in heads(positions):
            held = (positions[row, head] >= 0).nonzero().flatten()
            x = q[row, head] @ keys[row, head, held].to(wide).mT * options.scaling
            if options.softcap is not None:
                x = (x / options.softcap).tanh() * options.softcap
            age = now[row, :, None] - positions[row, head, held]
            hidden = (age < 0) | (age >= (options.window or 2**31))
            x, blind = x.masked_fill(hidden, -torch.inf), hidden.all(dim=-1, keepdim=True)
            if options.sinks is not None:
                x = torch.cat([x, options.sinks.to(wide).view(Hk, -1, 1, 1)[head].expand(-1, T, 1)], dim=-1)
            p[row, head, ..., held] = x.softmax(dim=-1)[..., : len(held)].masked_fill(blind, 0.0)
        if options.top is not None and T == 1:
            p = ranking.only_top(p, positions == now[:, :, None], options.top)
        for row, head in heads(positions):
            held = (positions[row, head] >= 0).nonzero().flatten()
            out[row, head] = p[row, head, ..., held] @ values[row, head, held].to(wide)
        found = statistic.reduce(ProbabilityRows(p, statistic.selects(now), now, positions))
        return out.flatten(1, 2).to(query.dtype), Report({name: sums.float() for name, sums in found.items()})

    def append(self, slots, keys, values, now):
        slot = torch.zeros(*slots.positions.shape[:2], 1, dtype=torch.int64, device=now.device)
        for row, head in heads(slots.positions):
            slot[row, head] = last = int((slots.positions[row, head] == EMPTY).nonzero()[-1])
            for tensor, new in zip(slots, (keys[row, head, 0], values[row, head, 0], now[row, 0]), strict=True):
                tensor[row, head, last] = new
        return slot

    def expire(self, positions, seen, window):
        positions[positions <= (seen - window)[:, None, None]] = EMPTY

    def is_over(self, positions, limit):
        stay = torch.as_tensor(limit).expand(positions.shape[:2])
        return any(int((positions[at] >= 0).sum()) > int(stay[at]) for at in heads(positions))

    def evict(self, positions, score, limits):
        shielded = ranking.protect(score, positions, limits.seen, sinks=limits.sinks, recent=limits.recent)
        stay = torch.as_tensor(limits.stay).expand(positions.shape[:2])
        for at in heads(positions):
            if self.is_over(positions[at][None, None], int(stay[at])):
                positions[at][ranking.weakest(shielded[at][None, None], positions[at][None, None]).flatten()] = EMPTY

    def step(self, step):
        query, slots, new, now, statistic, options, added, limits, _ = step
        slot = self.append(slots, *new, now)
        out, report = self.attend(AttentionInputs(query, Slots(*slots), now, statistic=statistic, options=options))
        for state in added.states:
            fade = torch.where(now >= 0, getattr(statistic, "decay", 1.0), 1.0)[:, :, None]
            state.scatter_(-1, slot, 0.0).mul_(fade).add_(report.mass)
        if limits.window is not None:
            self.expire(slots.positions, limits.seen, limits.window)
        self.evict(slots.positions, added.states[0] if added.is_score else slots.positions.float(), limits)
        return out
