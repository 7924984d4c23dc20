"""The harm of taking the far past from some heads: answers that are lost, and the distance from the full cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.attention_probe import LayerStep, OnePass, probe_cache
from kvkeep.backends import AttentionInputs, choose, reference
from kvkeep.cache.hf_layers import handed
from kvkeep.errors import InputError, UnsupportedModelError
from kvkeep.evals import task
from kvkeep.evals.forward import BATCH_TOKENS
from kvkeep.models.device import enough_memory
from kvkeep.types import AttentionOptions, Slots

# One pass over a passage in which some heads see its first and its newest tokens only.
#
# A passage is a stem with branches: each branch continues the stem and does not see the others. So a text is read once,
# and every question about it is asked of the same keys. The rows of a batch read the same passage; each takes the far
# past from other heads.

_BLOCK = 128
"""Query rows of a limited head that are computed at a time."""


@dataclass(frozen=True)
class NearWindow:
    """The tokens that a limited head still sees.

    Attributes:
        sinks: number of first tokens.
        recent: number of newest tokens, the query's own among them.
        inside: whether the limit holds for the targets alone, as if the memory were cut after the question. Otherwise
            it holds for the whole passage.
    """

    sinks: int
    recent: int
    inside: bool = False


@dataclass(frozen=True)
class Passage:
    """A stem and its branches, in one row of columns, and the tokens whose prediction counts.

    Attributes:
        ids: token ids of the stem, then of each branch.
        stem: number of tokens of the stem.
        branches: number of tokens of each branch.
        targets: for each branch, or for the stem if there is none, the number of its last tokens that count.
    """

    ids: Int[Tensor, " n"]
    stem: int
    branches: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def positions(self) -> Int[Tensor, " n"]:
        """Return the position of each column in its own text."""
        parts = [torch.arange(self.stem), *(self.stem + torch.arange(length) for length in self.branches)]
        return torch.cat(parts)

    def parts(self) -> Iterator[tuple[slice, Int[Tensor, "_"]]]:
        """Yield, for the stem and then each branch, its own columns, and the indices of all columns that it may see.

        For a branch these are those of the stem and its own.
        """
        stem, start = torch.arange(self.stem), self.stem
        yield slice(0, self.stem), stem
        for length in self.branches:
            yield slice(start, start + length), torch.cat([stem, torch.arange(start, start + length)])
            start += length

    def columns(self) -> list[Int[Tensor, "_"]]:
        """Return for each branch the columns that predict its targets, each one before a target.

        Without branches, these are the columns of the stem.
        """
        # the stem has targets of its own only without branches
        ends = [part.stop for part, _ in self.parts()][bool(self.branches) :]
        return [torch.arange(end - n, end) - 1 for end, n in zip(ends, self.targets, strict=True)]


class LimitedHeads(OnePass):
    """Stands in for a layer: attention over a passage, in which some heads are limited.

    Args:
        passage: the passage that every row reads.
        near: what a limited head sees.
        limited: which heads of each row are limited; ``None``: none.

    Attributes:
        heads: KV heads of the layer, after the step.
    """

    heads = 0

    def __init__(self, passage: Passage, near: NearWindow, limited: Bool[Tensor, "B Hk"] | None) -> None:
        super().__init__()
        self._passage, self._near, self._limited = passage, near, limited

    def attend(self, step: LayerStep) -> Float[Tensor, "B Hq T E"]:
        """Return the layer's attention over the passage, in which limited heads see their near window only.

        Branches do not see each other, since the passage gives the positions. Each limited head of each row is computed
        anew after all heads were computed without limits.
        """
        query, keys, values, options = step.query, step.keys, step.values, step.options
        self.heads = keys.shape[1]
        places, out = self._passage.positions.to(query.device), []
        # by part, since branches have the same positions, by which attention would let them see each other; parts
        # follow each other in the columns, so their outputs do, too
        for part, columns in self._passage.parts():
            columns = columns.to(query.device)
            out.append(_full(query[:, :, part], keys[:, :, columns], values[:, :, columns], places[columns], options))
        whole = torch.cat(out, dim=2)
        if self._limited is not None:
            for head in self._limited.any(dim=0).nonzero().flatten().tolist():
                rows = self._limited[:, head].nonzero().flatten().to(query.device)
                group = slice(head * (G := query.shape[1] // self.heads), (head + 1) * G)
                own = query[rows, group], keys[rows, head, None], values[rows, head, None]
                found = self._of_head(*own, places, _for_heads(options, group)).to(whole.dtype)
                whole[rows, group] = torch.where(self._counts().to(query.device), found, whole[rows, group])
        return whole

    def _counts(self) -> Bool[Tensor, "T 1"]:
        """Return for each column whether the limit of heads holds for its query: for all, or for those that predict
        targets.
        """
        if not self._near.inside:
            return torch.ones(self.columns, 1, dtype=torch.bool)
        counts = torch.zeros(self.columns, 1, dtype=torch.bool)
        counts[torch.cat(self._passage.columns())] = True
        return counts

    def _of_head(
        self,
        query: Float[Tensor, "n G T D"],
        keys: Float[Tensor, "n 1 T D"],
        values: Float[Tensor, "n 1 T E"],
        places: Int[Tensor, " T"],
        options: AttentionOptions,
    ) -> Float[Tensor, "n G T E"]:
        """Return the output of one limited KV head for all columns, as if the limit held for all, in float32.

        It is computed a block of columns at a time.

        Args:
            query: queries of the ``G`` query heads that share the KV head, of the rows in which it is limited.
            keys: its keys in these rows.
            values: its values in these rows.
            places: the position of each column.
            options: those of these query heads.
        """
        out = []
        for part, columns in self._passage.parts():
            columns = columns.to(query.device)
            for first in range(part.start, part.stop, _BLOCK):
                now = places[first : min(first + _BLOCK, part.stop)]
                at = places[columns]
                # the keys that some row of this block sees, so that the far past costs nothing; then row by row
                seen = columns[((at < self._near.sinks) | (at > now[0] - self._near.recent)) & (at <= now[-1])]
                sees = self._sees(now, places[seen], options.window)
                rows = query[:, :, first : first + len(now)].float()
                p = reference.softmax(reference.logits(rows, keys[:, :, seen].float(), sees, options), options.sinks)
                out.append((p @ values[:, :, None, seen].float()).flatten(1, 2))
        return torch.cat(out, dim=2)

    def _sees(self, now: Int[Tensor, " t"], at: Int[Tensor, " S"], window: int | None) -> Bool[Tensor, "1 1 t S"]:
        """Return which keys each query of a limited head sees: the first `sinks` and the newest `recent`, as far as the
        layer's window allows.

        Args:
            now: positions of the queries.
            at: positions of the keys.
            window: the layer's window; ``None``: it has none.
        """
        near = (at < self._near.sinks) | (now[:, None] - at < self._near.recent)
        return reference.visible(now[None], at[None, None], window) & near


def _full(
    query: Float[Tensor, "B Hq t D"],
    keys: Float[Tensor, "B Hk S D"],
    values: Float[Tensor, "B Hk S E"],
    places: Int[Tensor, " S"],
    options: AttentionOptions,
) -> Float[Tensor, "B Hq t E"]:
    """Return the attention of queries to all keys up to each one's position, as heads without a limit have it.

    The queries are those of the last ``t`` keys; ``places`` has the positions of the keys.
    """
    B, t = query.shape[0], query.shape[2]
    slots = Slots(keys, values, places.expand(B, 1, -1))
    now = places[-t:].expand(B, -1)
    out, _ = choose(query.device, query.dtype).attend(AttentionInputs(query, slots, now, options))
    return out


def _for_heads(options: AttentionOptions, group: slice) -> AttentionOptions:
    """Return the attention options of a layer for some of its query heads."""
    sinks = None if options.sinks is None else options.sinks[group]
    return AttentionOptions(options.scaling, options.window, options.softcap, sinks)


@torch.inference_mode()
def read(
    model: Any, passage: Passage, near: NearWindow, limited: Mapping[int, Bool[Tensor, "B Hk"]] | None = None
) -> tuple[list[Float[Tensor, "B _ V"]], dict[int, int]]:
    """Run a passage through a model with some heads limited.

    Args:
        model: the model, attached and in evaluation mode.
        passage: the passage.
        near: what a limited head sees.
        limited: layer → which heads of each row are limited; a layer that is missing has no limits. ``None``: one row
            without limits.

    Returns:
        The logits of the targets, by branch, and the number of KV heads by layer.

    Raises:
        InputError: the device's memory is too small.
    """
    limited = limited or {}
    rows = len(next(iter(limited.values()))) if limited else 1
    cache, layers = probe_cache(model.config, lambda index: LimitedHeads(passage, near, limited.get(index)))
    columns = passage.columns()
    with enough_memory(model.device):
        logits = model(
            input_ids=passage.ids.to(model.device).expand(rows, -1),
            # columns are no positions: every branch goes on where the stem ends
            position_ids=passage.positions.to(model.device).expand(rows, -1),
            **handed(model, cache),
            use_cache=True,
            logits_to_keep=torch.cat(columns).to(model.device),
        ).logits
    return list(logits.split(list(map(len, columns)), dim=1)), {index: layer.heads for index, layer in layers.items()}


HARM = 0.01
"""Share of an answer's probability whose loss counts as harm."""

Head: TypeAlias = tuple[int, int]
"""A layer's number in the model, and a KV head of it."""


@dataclass(frozen=True)
class Loss:
    """The harm of limiting some heads.

    Attributes:
        harmed: share of the answers that lose more than `HARM` of their probability; ``None`` if the model knows none.
            A head that is needed harms many of them a little, and chance harms few of them much.
        answers: share of the answers' probability that is lost: ``1 - p / p_full``, at least 0, mean over questions.
        text: KL divergence of the next-token distribution from that of the full cache, in nats, mean over tokens.
    """

    harmed: float | None
    answers: float | None
    text: float


@dataclass(eq=False)
class LossMeter:
    """Measures losses on some passages.

    Args:
        model: the model, attached and in evaluation mode.
        near: what a limited head sees.
        asked: passages that end with answers.
        texts: passages of running text.

    Attributes:
        heads: layer → number of KV heads, of all layers with keys.
    """

    model: Any
    near: NearWindow
    asked: Sequence[Passage]
    texts: Sequence[Passage]
    heads: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Run the model on all passages without limits, and keep its outputs for comparison.

        Raises:
            UnsupportedModelError: the layers differ in their number of KV heads.
            InputError: the model's probabilities are NaN, or the device's memory is too small.
        """
        self._answers: list[Float[Tensor, "1 questions"]] = []
        self._texts: list[Float[Tensor, "targets V"]] = []
        for passage in self.asked:
            logits, self.heads = read(self.model, passage, self.near)
            self._answers.append(_log_probabilities(passage, logits))
        for passage in self.texts:
            (rows,), self.heads = read(self.model, passage, self.near)
            self._texts.append(rows[0])  # the full cache's logits; answers keep their probability alone
        if any(bool(losses.isnan().any()) for losses in (*self._answers, *self._texts)):
            raise InputError(
                "The model's next-token probabilities are no numbers on these texts, so no head can be compared. Try "
                "another dtype (float16 overflows first), or look whether the weights are damaged."
            )
        if len(set(self.heads.values())) != 1:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has layers of these numbers of KV heads: "
                f"{sorted(set(self.heads.values()))}. A profile needs the same number in all layers."
            )

    @property
    def questions(self) -> int:
        """Return the number of questions that the model answers right under the full cache."""
        return sum(len(passage.branches) for passage in self.asked)

    def losses(self, sets: Sequence[Collection[Head]]) -> list[Loss]:
        """Return the loss of each set of heads, whose heads are limited together. Sets are rows of batches.

        Raises:
            InputError: the device's memory is too small.
        """
        longest = max(len(passage.ids) for passage in (*self.asked, *self.texts))
        size = max(1, BATCH_TOKENS // longest)
        return [loss for at in range(0, len(sets), size) for loss in self._batch(sets[at : at + size])]

    def _batch(self, sets: Sequence[Collection[Head]]) -> list[Loss]:
        """Return the loss of limiting each set of heads. One row of the batch stands for one set; all run at once."""
        limited = {
            layer: torch.tensor([[(layer, head) in chosen for head in range(n)] for chosen in sets])
            for layer, n in self.heads.items()
        }
        lost, distance = [torch.zeros(len(sets), 0)], torch.zeros(len(sets))  # there may be no question
        for passage, full in zip(self.asked, self._answers, strict=True):
            logits, _ = read(self.model, passage, self.near, limited)
            lost.append((1 - (_log_probabilities(passage, logits) - full).exp()).clamp(min=0).cpu())
        for passage, full_rows in zip(self.texts, self._texts, strict=True):
            (rows,), _ = read(self.model, passage, self.near, limited)
            distance += torch.stack([task.kl(full_rows, row).mean() for row in rows]).cpu() / len(self.texts)
        shares, none = torch.cat(lost, dim=1).double(), [None] * len(sets)
        harmed = (shares > HARM).double().mean(dim=1).tolist() if self.questions else none
        answers = shares.mean(dim=1).tolist() if self.questions else none
        return [Loss(*three) for three in zip(harmed, answers, distance.tolist(), strict=True)]


def _log_probabilities(passage: Passage, logits: Sequence[Float[Tensor, "B _ V"]]) -> Float[Tensor, "B questions"]:
    """Return the log-probability of each answer of a passage in each row: the sum over its tokens.

    Args:
        passage: a passage whose targets are answers.
        logits: for each branch, those that predict its targets.
    """
    found = []
    for part, columns in zip(logits, passage.columns(), strict=True):
        targets = passage.ids[columns + 1].to(part.device).expand(len(part), -1)
        found.append(-task.nll(part, targets).sum(dim=1))
    return torch.stack(found, dim=1)
