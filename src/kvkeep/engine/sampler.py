"""From logits to tokens, for all rows at once; each row draws as it would alone.

Randomness is counter-based: the number that decides the n-th token of a request depends on the request's seed, its
sequence and n, not on the batch. The order of the steps is that of transformers: penalties, the mask of a grammar,
temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.engine.constraint import failure, masked
from kvkeep.engine.generation import Generation
from kvkeep.engine.penalties import changed
from kvkeep.engine.request import Logprob
from kvkeep.engine.sampling import Sampling
from kvkeep.errors import KVKeepError, NoNumbersError
from kvkeep.head_sharding import ALONE, Heads
from kvkeep.noise import spread, uniform


def draw(logits: Float[Tensor, "n V"], generations: Sequence[Generation], heads: Heads = ALONE) -> list[int | None]:
    """Return the next token of every row; ``None`` where a logit is NaN, the largest one infinite, or none allowed.

    Args:
        logits: the model's logits, one row per generation.
        generations: the requests. Their `logprobs` get an entry for each token, if asked for.
        heads: the processes that share the model; all take the tokens that the first one has drawn.
    """
    logits = logits.float()
    penalised = masked(changed(logits, generations), generations)
    best, tokens = penalised.max(dim=-1)  # NaN counts as the largest
    drawn = [i for i, one in enumerate(generations) if one.request.sampling.temperature > 0]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        chosen = [generations[i] for i in drawn]
        steps = torch.tensor([len(one.token_ids) for one in chosen], device=logits.device)
        sequences = torch.tensor([one.request.sequence for one in chosen], device=logits.device)
        tokens[index] = choose(penalised[index], [one.request.sampling for one in chosen], steps ^ spread(sequences))
    found: list[int] = heads.first(tokens.masked_fill_(~best.isfinite(), -1)).tolist()
    _note(logits, found, generations)
    return [None if token < 0 else token for token in found]


def whole(token: int | None, one: Generation) -> int:
    """Return the token that was drawn for a request.

    Raises:
        NoNumbersError: none was, because the logits are no numbers.
        KVKeepError: none was, because the engine of its grammar has failed.
    """
    if token is None and one.constraint and one.constraint.error is not None:
        raise KVKeepError(failure(one.constraint.error))
    if token is None:
        raise NoNumbersError
    return token


def choose(logits: Float[Tensor, "n V"], samplings: Sequence[Sampling], steps: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Draw one token per row after temperature, top-k, top-p and min-p.

    Args:
        logits: float32, with penalties applied.
        samplings: how each row draws; temperatures above 0.
        steps: a counter per row: the tokens drawn before, combined with the row's sequence. Rows of equal seeds and
            counters draw with the same random number.
    """

    def column(values: list[float]) -> Float[Tensor, "n 1"]:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    tiny = torch.finfo(torch.float32).tiny  # a temperature that float32 would round to 0 takes the best token
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / column([max(s.temperature, tiny) for s in samplings])
    if any(s.top_k or s.top_p is not None or s.min_p is not None for s in samplings):
        V = logits.shape[-1]
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        top_k = column([float(min(s.top_k or V, V)) for s in samplings])
        out = torch.arange(V, device=logits.device) >= top_k
        p = ordered.masked_fill(out, -torch.inf).softmax(dim=-1)
        top_p = column([1.0 if s.top_p is None else s.top_p for s in samplings])
        out |= ((p.cumsum(dim=-1) - p) >= top_p) & (top_p < 1.0)
        p = ordered.masked_fill(out, -torch.inf).softmax(dim=-1)
        out |= p < column([s.min_p or 0.0 for s in samplings]) * p[:, :1]
        out[:, 0] = False  # the likeliest token stays, even if rounding puts it beyond a limit
        logits = torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(out, -torch.inf))
    seeds = torch.tensor([s.seed for s in samplings], dtype=torch.int64, device=logits.device)
    u = uniform(0, seeds, steps).double()[:, None]
    total = logits.softmax(dim=-1).double().cumsum(dim=-1)
    return (total > u * total[:, -1:]).int().argmax(dim=-1)


def _note(logits: Float[Tensor, "n V"], tokens: Sequence[int], generations: Sequence[Generation]) -> None:
    """Append the log-probabilities of rows that ask for them."""
    for i, (token, one) in enumerate(zip(tokens, generations, strict=True)):
        n = one.request.logprobs
        if n is None or token < 0:
            continue
        one.logprobs.append(logprob(logits[i].log_softmax(dim=-1), token, n))


def logprob(logp: Float[Tensor, " V"], token: int, n: int) -> Logprob:
    """Return the log-probability of a token, and those of the ``n`` likeliest ones."""
    best = logp.topk(min(n, len(logp)))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Logprob(token, float(logp[token]), top)
