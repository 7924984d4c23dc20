"""From logits to tokens, for all rows at once; each row draws as it would alone.

Randomness is counter-based: the number that decides the n-th token of a request depends on the request's seed, its
sequence and n, not on the batch. The order of the steps is that of transformers: penalties, the mask of a grammar,
tokens that the model's makers ban, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as GenericSequence
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.engine.grammar import failure, masked
from kvkeep.engine.request import Logprob
from kvkeep.engine.sampling_params import Biases, SamplingParams
from kvkeep.engine.scheduler import InputBatch, ModelRun
from kvkeep.engine.sequence import Sequence, SequenceStatus
from kvkeep.errors import KVKeepError, NoNumbersError
from kvkeep.head_sharding import Heads
from kvkeep.models.generation_config import BannedTokens
from kvkeep.noise import spread, uniform

# Changes of logits that depend on the tokens of a row: a bias, and penalties for tokens that occurred before.


def changed(logits: Float[Tensor, "n V"], generations: GenericSequence[Sequence]) -> Float[Tensor, "n V"]:
    """Return the logits after the logit bias, `min_new_tokens` and the penalties, in the order of vLLM."""
    logits = _open(_biased(logits, generations), generations)
    logits = _repetition(logits, generations)
    return _counts(logits, generations)


def _asking(generations: GenericSequence[Sequence], asks: Callable[[SamplingParams], bool]) -> list[int]:
    """Return the indices of the rows whose sampling parameters fulfil a condition."""
    return [i for i, sequence in enumerate(generations) if asks(sequence.request.sampling)]


def _biased(logits: Float[Tensor, "n V"], generations: GenericSequence[Sequence]) -> Float[Tensor, "n V"]:
    """Return the logits with ``logit_bias`` added, for the rows that have one."""
    asked = _asking(generations, lambda s: bool(s.logit_bias))
    if not asked:
        return logits
    found = [(i, *pair) for i in asked for pair in cast(Biases, generations[i].request.sampling.logit_bias)]
    rows, tokens, added = zip(*found, strict=True)
    at = torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device)
    return logits.index_put(at, logits.new_tensor(added), accumulate=True)


def _open(logits: Float[Tensor, "n V"], generations: GenericSequence[Sequence]) -> Float[Tensor, "n V"]:
    """Return the logits with minus infinity at the end tokens of rows that have not reached ``min_new_tokens``.

    Rows with a grammar are left as they are.
    """
    early = [
        (i, token)
        for i, sequence in enumerate(generations)
        if len(sequence.token_ids) < sequence.request.sampling.min_new_tokens and not sequence.constraint
        for token in sequence.ends
    ]
    if not early:
        return logits
    rows, tokens = zip(*early, strict=True)
    at = torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device)
    return logits.index_put(at, logits.new_tensor(-torch.inf))


def _repetition(logits: Float[Tensor, "n V"], generations: GenericSequence[Sequence]) -> Float[Tensor, "n V"]:
    """Return the logits after the repetition penalty of the rows that ask for one."""
    asked = _asking(generations, lambda s: s.repetition_penalty != 1.0)
    if not asked:
        return logits
    index = torch.tensor(asked, device=logits.device)
    rows = [generations[i] for i in asked]
    used = torch.stack([_used(sequence, logits) for sequence in rows])
    factors = logits.new_tensor([sequence.request.sampling.repetition_penalty for sequence in rows])[:, None]
    part = logits[index]
    # both make a token less likely: a negative logit is multiplied, a positive one divided
    lowered = torch.where(part < 0, part * factors, part / factors)
    return logits.index_copy(0, index, torch.where(used, lowered, part))


def _counts(logits: Float[Tensor, "n V"], generations: GenericSequence[Sequence]) -> Float[Tensor, "n V"]:
    """Return the logits after the presence and frequency penalties of the rows that ask for them."""
    asked = _asking(generations, lambda s: bool(s.presence_penalty or s.frequency_penalty))
    if not asked:
        return logits
    index = torch.tensor(asked, device=logits.device)
    rows = [generations[i] for i in asked]
    counts = torch.stack([_counted(sequence, logits) for sequence in rows])
    presence = logits.new_tensor([sequence.request.sampling.presence_penalty for sequence in rows])[:, None]
    frequency = logits.new_tensor([sequence.request.sampling.frequency_penalty for sequence in rows])[:, None]
    return logits.index_copy(0, index, logits[index] - frequency * counts - presence * (counts > 0))


def _used(sequence: Sequence, logits: Float[Tensor, "n V"]) -> Tensor:
    """Return a mask ``(V,)`` of the token ids that occur in one sequence's prompt or answer.

    The sequence keeps the mask. Each call adds the answer's latest token alone, so it is called once per token.
    """
    if sequence.used is None:
        with torch.inference_mode(False):  # written in inference mode and out of it
            sequence.used = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        sequence.used[torch.tensor(sequence.prompt, device=logits.device)] = True
    if sequence.token_ids:
        sequence.used[sequence.token_ids[-1]] = True
    return sequence.used


def _counted(sequence: Sequence, logits: Float[Tensor, "n V"]) -> Tensor:
    """Return how often each token id was generated in one sequence, as a tensor ``(V,)``. The sequence keeps the
    tensor, which is updated.
    """
    if sequence.counts is None:
        with torch.inference_mode(False):  # as in `_used`
            sequence.counts = torch.zeros(logits.shape[-1], dtype=torch.float32, device=logits.device)
    for token in sequence.token_ids[sequence.counted :]:
        sequence.counts[token] += 1
    sequence.counted = len(sequence.token_ids)
    return sequence.counts


def without(
    logits: Float[Tensor, "n V"], generations: GenericSequence[Sequence], banned: BannedTokens
) -> Float[Tensor, "n V"]:
    """Return the logits with minus infinity at the tokens that the model's generation config bans.

    The form of an answer goes first: where it allows nothing else, banned tokens are allowed.
    """
    # ids that the model does not have ban nothing, so they are left out below
    V, now = logits.shape[-1], list[tuple[int, int]]()
    for i, sequence in enumerate(generations):
        tokens = {word[-1] for word in banned.words if _ends_with(sequence, word[:-1])}
        now += [(i, token) for token in (tokens if sequence.token_ids else tokens | banned.first) if 0 <= token < V]
    always = torch.tensor([token for token in banned.always if 0 <= token < V], dtype=torch.int64, device=logits.device)
    left = logits.index_fill(1, always, -torch.inf)
    # `view`, since there may be no pairs at all
    rows, last = torch.tensor(now, dtype=torch.int64, device=logits.device).view(-1, 2).unbind(dim=1)
    left = left.index_put((rows, last), logits.new_tensor(-torch.inf))
    formed = torch.tensor([sequence.constraint is not None for sequence in generations], device=logits.device)
    stuck = formed & (left.amax(dim=-1) == -torch.inf)
    return torch.where(stuck[:, None], logits, left)


def _ends_with(sequence: Sequence, tokens: tuple[int, ...]) -> bool:
    """Return whether a sequence, prompt included, ends with these tokens."""
    n = len(tokens)
    last = sequence.token_ids[-n:]
    return (*sequence.prompt[len(sequence.prompt) - n + len(last) :], *last) == tokens


class Sampler:
    """Turns logits into tokens.

    Args:
        together: the processes that the model is split over, if any; all take the tokens that the first one has drawn.
        banned: the tokens that the model's makers ban, if any.
    """

    def __init__(self, together: Heads | None = None, banned: BannedTokens | None = None) -> None:
        self._together, self._banned = together, banned

    def draw(self, logits: Float[Tensor, "n V"], sequences: GenericSequence[Sequence]) -> list[int | None]:
        """Return the next token of every row; ``None`` where no token can be drawn.

        That is where a logit is NaN, where the largest one is infinite, and where a grammar allows none.

        Args:
            logits: the model's logits, one row per sequence.
            sequences: the requests. Their `logprobs` get an entry for each token, if asked for.
        """
        logits = logits.float()
        penalised = changed(logits, sequences)
        if any(sequence.constraint is not None for sequence in sequences):
            penalised = masked(penalised, [sequence.constraint for sequence in sequences])
        if self._banned is not None:
            penalised = without(penalised, sequences, self._banned)
        best, tokens = penalised.max(dim=-1)  # NaN counts as the largest
        drawn = [i for i, sequence in enumerate(sequences) if sequence.request.sampling.temperature > 0]
        if drawn:
            index = torch.tensor(drawn, device=logits.device)
            chosen = [sequences[i] for i in drawn]
            steps = torch.tensor([len(sequence.token_ids) for sequence in chosen], device=logits.device)
            streams = torch.tensor([sequence.request.sequence for sequence in chosen], device=logits.device)
            samplings = [sequence.request.sampling for sequence in chosen]
            # the counter depends on the sequence and the number of its tokens, not on the batch, so a request draws the
            # same anywhere
            tokens[index] = choose(penalised[index], samplings, steps ^ spread(streams))
        tokens = tokens.masked_fill_(~best.isfinite(), -1)
        # rounding may differ between processes, and all of them must go on with the same token
        found: list[int] = (tokens if self._together is None else self._together.first(tokens)).tolist()
        _note(logits, found, sequences)
        return [None if token < 0 else token for token in found]


def whole(token: int | None, sequence: Sequence) -> int:
    """Return the drawn token; raise the reason if none could be drawn.

    Raises:
        NoNumbersError: no token was drawn, because the logits are no numbers.
        KVKeepError: no token was drawn, because the engine of its grammar has failed.
    """
    if token is None and sequence.constraint and sequence.constraint.error is not None:
        raise KVKeepError(failure(sequence.constraint.error))
    if token is None:
        raise NoNumbersError
    return token


def choose(
    logits: Float[Tensor, "n V"], samplings: GenericSequence[SamplingParams], steps: Int[Tensor, " n"]
) -> Int[Tensor, " n"]:
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
    # The largest logit becomes 0 first, so that a tiny temperature makes no logit NaN or +inf.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / column([max(s.temperature, tiny) for s in samplings])
    if any(s.top_k or s.top_p is not None or s.min_p is not None for s in samplings):
        V = logits.shape[-1]
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        top_k = column([float(min(s.top_k or V, V)) for s in samplings])
        out = torch.arange(V, device=logits.device) >= top_k
        p = ordered.masked_fill(out, -torch.inf).softmax(dim=-1)
        top_p = column([1.0 if s.top_p is None else s.top_p for s in samplings])
        # of rows without a top_p, rounding must not take the last tokens
        out |= ((p.cumsum(dim=-1) - p) >= top_p) & (top_p < 1.0)
        p = ordered.masked_fill(out, -torch.inf).softmax(dim=-1)
        out |= p < column([s.min_p or 0.0 for s in samplings]) * p[:, :1]
        out[:, 0] = False  # the likeliest token stays, even if rounding puts it beyond a limit
        logits = torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(out, -torch.inf))
    seeds = torch.tensor([s.seed for s in samplings], dtype=torch.int64, device=logits.device)
    u = uniform(0, seeds, steps).double()[:, None]  # each row has a seed of its own, so the common one is 0
    total = logits.softmax(dim=-1).double().cumsum(dim=-1)
    # float32 probabilities do not sum to 1 exactly; their own sum takes its place
    return (total > u * total[:, -1:]).int().argmax(dim=-1)  # the first one beyond; torch has no argmax of booleans


def _note(logits: Float[Tensor, "n V"], tokens: GenericSequence[int], generations: GenericSequence[Sequence]) -> None:
    """Append each row's log-probabilities to its sequence, if its request asks for them and a token was drawn."""
    for i, (token, sequence) in enumerate(zip(tokens, generations, strict=True)):
        n = sequence.request.logprobs
        if n is None or token < 0:
            continue
        sequence.logprobs.append(logprob(logits[i].log_softmax(dim=-1), token, n))


def logprob(logp: Float[Tensor, " V"], token: int, n: int) -> Logprob:
    """Return the log-probability of a token, together with the ``n`` likeliest tokens and theirs."""
    best = logp.topk(min(n, len(logp)))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Logprob(token, float(logp[token]), top)


# The log-probabilities of a prompt's own tokens, noted while the prompt is read.

_AT_ONCE = 64
"""Tokens whose logits are copied and normalised together."""


def is_scored(run: ModelRun) -> bool:
    """Return whether a run needs the logits of every token, for the log-probabilities of a prompt."""
    return run.reads and any(map(_is_scored, run.requests))


def _is_scored(sequence: Sequence) -> bool:
    """Return whether a request asks for log-probabilities of its prompt, and reads the prompt for the first time."""
    return sequence.scored and sequence.status is SequenceStatus.PREFILL and not sequence.read_again


def score(run: ModelRun, logits: Float[Tensor, "n T V"]) -> None:
    """Append, to each request of a run that asks for them, the log-probabilities of the prompt tokens that follow the
    tokens of the run.

    Call it before `ModelRun.commit`.

    Args:
        run: the run.
        logits: after all tokens, batch after batch. Several batches are one sequence, see `ModelRunner`.
    """
    flat, start = logits.flatten(0, 1), 0
    for batch in run.batches:
        width = max(map(len, batch.tokens))
        for place, (sequence, tokens) in enumerate(zip(batch.rows, batch.tokens, strict=True)):
            if sequence is not None and _is_scored(sequence):
                end = start + (place + 1) * width
                sequence.prompt_logprobs += _scores(sequence, flat[end - len(tokens) : end])
        start += _size(batch, width)


def _size(batch: InputBatch, width: int) -> int:
    """Return the number of a batch's tokens, padding to ``width`` tokens in each row included."""
    return len(batch.rows) * width


def _scores(sequence: Sequence, logits: Float[Tensor, "T V"]) -> Iterator[Logprob]:
    """Yield the log-probability of each prompt token that follows one of the tokens just fed, in order, with those of
    the likeliest ones. After the prompt's last token none follows.

    Args:
        sequence: the request, whose count of fed tokens does not have these yet.
        logits: after each token just fed.
    """
    follow = sequence.prompt[sequence.fed + 1 : sequence.fed + 1 + len(logits)]
    for at in range(0, len(follow), _AT_ONCE):
        part = follow[at : at + _AT_ONCE]
        logp = logits[at : at + len(part)].float().log_softmax(dim=-1)
        yield from (
            logprob(row, token, sequence.request.prompt_logprobs or 0) for row, token in zip(logp, part, strict=True)
        )
