"""How much of its text a memory can still tell: its fidelity, measured on passages of the text itself.

Some passages, spread over the text, are quoted to copies of the memory. Each is a cue and then the tokens that are to
be told. How probable the model finds those is compared with two bounds that need no memory at all: what it makes of the
cue alone, and what it makes of the cue right after the passage. The first has read nothing of the text, the second has
just read what counts. So no full cache is needed, and a text of any length can be measured.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.hf_layers import handed
from kvkeep.errors import InputError
from kvkeep.models.adapters import adapters_of
from kvkeep.models.device import device_of
from kvkeep.models.tokenization import SEPARATOR, Writer, check_length
from kvkeep.policies.base import Policy
from kvkeep.snapshot.fidelity import Fidelity
from kvkeep.snapshot.snapshot import Snapshot
from kvkeep.types import Phase

CUE, TOLD = 12, 6
"""Tokens of a passage that are given, and tokens after them that are to be told.

More passages make the measurement better, more told tokens do not; see ``lab/log/evaluation.md``.
"""
FEWEST, MOST, SPACING = 5, 32, 224
"""Passages of a text: one for so many of its tokens, within these bounds."""

_BEGINNING = 4
"""First tokens of the text that stand before every bound: models attend to the first token whatever it is."""
_BOUNDED = 8
"""Every so many passages one is quoted after itself: that bound hardly differs between passages."""
_LEAST_GAIN = 0.5
"""Nats per token that a model must gain from having just read a passage. Below, it cannot quote at all."""
_COPIED_BYTES = 2**28
"""Bytes that copies of a memory may take at once; a single copy may take more."""


def places(ids: Sequence[int], number: int | None = None) -> list[int]:
    """Return at which tokens the passages of a text begin, in ascending order: one in each of equal parts of the text,
    where the tokens that are to be told (the last `TOLD` of a passage) are rarest.

    A token counts the less the more often it occurs in the text, so names and numbers are told rather than phrases.
    A text of fewer tokens than two passages has none.

    Args:
        ids: the tokens of the text.
        number: of passages; by default as many as keep the measurement cheap beside the reading.
    """
    length, rarity = CUE + TOLD, Counter(ids)
    number = min(number or max(FEWEST, min(MOST, len(ids) // SPACING)), len(ids) // length)
    if number < 2:  # no error can be told of a single one
        return []
    sums = [0.0]
    for token in ids:
        sums.append(sums[-1] + 1 / rarity[token])
    # the last place is that of a passage which ends with the text
    parts = [(len(ids) - length + 1) * i // number for i in range(number + 1)]
    return [
        max(range(start, stop), key=lambda place: sums[place + length] - sums[place + CUE])
        for start, stop in pairwise(parts)
    ]


class Passages:
    """Passages of a text with their bounds, on which any number of memories of the text can be measured.

    Args:
        writer: the model.
        ids: the tokens of the text.
        adapter: the name of the adapter that the model reads with; ``None``: the base model.
        number: of passages, see `places`.

    Raises:
        InputError: no fidelity can be measured: the text is too short, or too long for a quotation to follow it; or the
            model cannot quote.
    """

    def __init__(
        self, writer: Writer, ids: Sequence[int], *, adapter: str | None = None, number: int | None = None
    ) -> None:
        self._model, self._adapter, starts = writer.model, adapter, places(ids, number)
        if not starts:
            raise InputError(f"a text of {len(ids)} tokens has no two passages of {CUE + TOLD}")
        between = writer.checkpoint.tokenizer.encode(SEPARATOR, add_special_tokens=False)
        # + 1: the check leaves out the last token, which is not read where a text is generated
        check_length(writer.checkpoint, len(ids), len(between) + CUE + TOLD + 1)
        self._between = torch.tensor(between, dtype=torch.long)
        self._ids = torch.tensor([ids[start : start + CUE + TOLD] for start in starts])
        first, some = torch.tensor(ids[:_BEGINNING]), self._ids[::_BOUNDED]
        self._untold = self._told([first, self._between, self._ids])
        told = self._told([first, self._between, some, self._between, some])
        # in the others a model that has just read the passage would be as far from certainty
        self._gain = told.mean() - self._untold
        if not float(self._gain.mean()) > _LEAST_GAIN:  # so NaN is refused as well
            raise InputError("the model does not quote what it has just read")

    def __len__(self) -> int:
        return len(self._ids)

    def measure(self, snapshot: Snapshot, policy: Policy) -> Fidelity:
        """Return how much of the text a memory can still tell: the share, from 0 to 1, of what the model gains from
        having just read a passage, with its standard error. The snapshot stays as it is.

        Args:
            snapshot: the memory.
            policy: its policy.

        Raises:
            UnsupportedOperationError: the policy prunes through the layers.
        """
        rows = max(1, _COPIED_BYTES // max(1, snapshot.nbytes))
        parts = []
        for part in self._ids.split(rows):
            # copies of each part, since states beside the slots go on with what is read
            cache = BoundedCache.from_snapshots(self._model.config, [snapshot] * len(part), policy=policy)
            cache.phase = Phase.PROBE
            parts.append(self._told([self._between, part], cache))
        gain = torch.cat(parts) - self._untold
        share = float(gain.sum() / self._gain.sum())
        # the error of a ratio of sums over a sample
        left, n = gain - share * self._gain, len(gain)
        error = float(left.square().sum().mul(n / (n - 1)).sqrt() / self._gain.sum())
        return Fidelity(min(1.0, max(0.0, share)), error, n)  # by chance a sample may leave the range

    @torch.inference_mode()
    def _told(self, pieces: Sequence[Int[Tensor, "*_"]], cache: BoundedCache | None = None) -> Float[Tensor, " n"]:
        """Return the mean log-probability of the last `TOLD` tokens in each row of joined pieces, as float64 in main
        memory.

        Args:
            pieces: token ids, which are read one after the other. Pieces without rows stand in every row.
            cache: what was read before, a row for each row of pieces; ``None``: nothing.
        """
        n = max(len(piece) for piece in pieces if piece.ndim == 2)
        ids = torch.cat([piece if piece.ndim == 2 else piece.expand(n, -1) for piece in pieces], dim=1)
        ids = ids.to(device_of(self._model))
        named = adapters_of(self._model)
        takes = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        with nullcontext() if named is None else named.activated(self._adapter):
            logits: Tensor = self._model(
                input_ids=ids,
                **({"use_cache": False} if cache is None else {**handed(self._model, cache), "use_cache": True}),
                **({"logits_to_keep": TOLD + 1} if takes else {}),
            ).logits
        # logits tell the next token, so the last ones are of no use
        logp = logits[:, -TOLD - 1 : -1].float().log_softmax(dim=-1)
        return logp.gather(-1, ids[:, -TOLD:, None])[..., 0].mean(dim=1).double().cpu()


def smallest(reaches: Callable[[int], bool], least: int, most: int, *, factor: float = 1.1) -> int:
    """Return the smallest budget that reaches a fidelity, up to a factor, if more tokens never tell less.

    Args:
        reaches: returns whether a budget reaches it.
        least: the smallest budget that is tried.
        most: a budget that reaches the fidelity, about which ``reaches`` is not asked.
        factor: how much larger than the smallest one the answer may be.
    """
    fails = least - 1
    while most - fails > 1 and most > factor * fails:
        # budgets are compared by their ratio: the answer lies anywhere between few tokens and all
        middle = min(most - 1, max(fails + 1, round(math.sqrt(max(1, fails) * most))))
        if reaches(middle):
            most = middle
        else:
            fails = middle
    return most
