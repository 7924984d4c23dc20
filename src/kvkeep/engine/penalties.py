"""Changes of logits that depend on the tokens of a row: a bias, and penalties for tokens that occurred before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.engine.generation import Generation
from kvkeep.engine.sampling import Biases, Sampling


def changed(logits: Float[Tensor, "n V"], generations: Sequence[Generation]) -> Float[Tensor, "n V"]:
    """Return the logits after bias, ends that come too early, and penalties, in the order of vLLM."""
    logits = _open(_biased(logits, generations), generations)
    logits = _repetition(logits, generations)
    return _counts(logits, generations)


def _asking(generations: Sequence[Generation], asks: Callable[[Sampling], bool]) -> list[int]:
    """Return the rows whose sampling asks for something."""
    return [i for i, one in enumerate(generations) if asks(one.request.sampling)]


def _biased(logits: Float[Tensor, "n V"], generations: Sequence[Generation]) -> Float[Tensor, "n V"]:
    """Return the logits with the biases of the rows that have some."""
    asked = _asking(generations, lambda s: bool(s.logit_bias))
    if not asked:
        return logits
    found = [(i, *pair) for i in asked for pair in cast(Biases, generations[i].request.sampling.logit_bias)]
    rows, tokens, added = zip(*found, strict=True)
    at = torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device)
    return logits.index_put(at, logits.new_tensor(added), accumulate=True)


def _open(logits: Float[Tensor, "n V"], generations: Sequence[Generation]) -> Float[Tensor, "n V"]:
    """Return the logits with minus infinity for the ends of rows that must get more tokens."""
    early = [
        (i, token)
        for i, one in enumerate(generations)
        if len(one.token_ids) < one.request.sampling.min_new_tokens and not one.constraint
        for token in one.ends
    ]
    if not early:
        return logits
    rows, tokens = zip(*early, strict=True)
    at = torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device)
    return logits.index_put(at, logits.new_tensor(-torch.inf))


def _repetition(logits: Float[Tensor, "n V"], generations: Sequence[Generation]) -> Float[Tensor, "n V"]:
    """Return the logits after the repetition penalty of the rows that ask for one."""
    asked = _asking(generations, lambda s: s.repetition_penalty != 1.0)
    if not asked:
        return logits
    index = torch.tensor(asked, device=logits.device)
    rows = [generations[i] for i in asked]
    used = torch.stack([_used(one, logits) for one in rows])
    factors = logits.new_tensor([one.request.sampling.repetition_penalty for one in rows])[:, None]
    part = logits[index]
    lowered = torch.where(part < 0, part * factors, part / factors)
    return logits.index_copy(0, index, torch.where(used, lowered, part))


def _counts(logits: Float[Tensor, "n V"], generations: Sequence[Generation]) -> Float[Tensor, "n V"]:
    """Return the logits after the presence and frequency penalties of the rows that ask for them."""
    asked = _asking(generations, lambda s: bool(s.presence_penalty or s.frequency_penalty))
    if not asked:
        return logits
    index = torch.tensor(asked, device=logits.device)
    rows = [generations[i] for i in asked]
    counts = torch.stack([_counted(one, logits) for one in rows])
    presence = logits.new_tensor([one.request.sampling.presence_penalty for one in rows])[:, None]
    frequency = logits.new_tensor([one.request.sampling.frequency_penalty for one in rows])[:, None]
    return logits.index_copy(0, index, logits[index] - frequency * counts - presence * (counts > 0))


def _used(one: Generation, logits: Float[Tensor, "n V"]) -> Tensor:
    """Return a mask of the tokens that occur in a row so far; it is kept from step to step."""
    if one.used is None:
        with torch.inference_mode(False):  # written in inference mode and out of it
            one.used = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        one.used[torch.tensor(one.prompt, device=logits.device)] = True
    if one.token_ids:
        one.used[one.token_ids[-1]] = True
    return one.used


def _counted(one: Generation, logits: Float[Tensor, "n V"]) -> Tensor:
    """Return how often each token was generated in a row so far; it is kept from step to step."""
    if one.counts is None:
        with torch.inference_mode(False):
            one.counts = torch.zeros(logits.shape[-1], dtype=torch.float32, device=logits.device)
    for token in one.token_ids[one.counted :]:
        one.counts[token] += 1
    one.counted = len(one.token_ids)
    return one.counts
