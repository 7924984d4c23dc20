"""Windows of the analysed text for measurements that run the model themselves, and the loss on them."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.evals import metrics
from kvkeep.handing import PhasedCache
from kvkeep.research.analysis.measure import Skipped, Subject


def windows(subject: Subject, *, rows: int, length: int, room: int = 0) -> Int[Tensor, "N T"]:
    """Windows spread evenly over the text, each with the begin token in front if the text has one.

    Args:
        subject: the model and its text.
        rows: windows, or fewer where they would overlap.
        length: tokens of each, or fewer if the text or the model's table of positions is shorter.
        room: positions that must stay free for tokens that are generated.

    Raises:
        Skipped: the model has fewer positions than that.
    """
    begin, body = _without_begin(subject)
    limit = subject.writer.checkpoint.position_limit
    free = length if limit is None else min(length, limit - room)
    length = min(free - len(begin), len(body))
    if length < 2:
        raise Skipped(f"the model has {limit} positions, too few for a window of text and {room} new tokens")
    rows = max(1, min(rows, len(body) // length))
    last = len(body) - length
    starts = [0] if rows == 1 else [last * row // (rows - 1) for row in range(rows)]
    return torch.stack([torch.cat([begin, body[start : start + length]]) for start in starts])


def _without_begin(subject: Subject) -> tuple[Int[Tensor, " b"], Int[Tensor, " n"]]:
    has_begin = int(subject.tokens[0]) == subject.tokenizer.bos_token_id
    return subject.tokens[:has_begin], subject.tokens[has_begin:]


@torch.inference_mode()
def loss(model: Any, ids: Int[Tensor, "B T"], cache: PhasedCache | None = None) -> float:
    """Mean loss in nats of every token but the first of each row, in one pass."""
    ids = ids.to(model.device)
    given: dict[str, Any] = {"use_cache": False} if cache is None else {"past_key_values": cache, "use_cache": True}
    logits: Tensor = model(input_ids=ids, **given).logits
    return float(metrics.nll(logits[:, :-1], ids[:, 1:]).double().mean())


def guesses(model: Any) -> float:
    """The loss in nats of a model that knows nothing: all tokens of the vocabulary alike."""
    return math.log(model.config.get_text_config(decoder=True).vocab_size)
