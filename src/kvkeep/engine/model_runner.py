"""One run of the model over some rows, through the same cache and attention as ``generate``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.cache.hf_layers import HandingLayer, PhasedCache, handed
from kvkeep.engine.budget_guard import Trial
from kvkeep.engine.cuda_graphs import Graphs
from kvkeep.engine.kv_manager import KVManager
from kvkeep.engine.sampler import is_scored, score
from kvkeep.engine.scheduler import InputBatch, ModelRun
from kvkeep.errors import UnsupportedModelError
from kvkeep.models.adapters import adapters_of
from kvkeep.models.checkpoint import Model
from kvkeep.models.device import device_of
from kvkeep.models.rotary import LengthRule
from kvkeep.models.weight_hash import adapters
from kvkeep.rotary import reading
from kvkeep.types import AttentionOptions, Phase, Stepper

# One run of the model over several batches: each layer steps batch by batch.


class RunPart(NamedTuple):
    """A batch within the tokens of a run.

    Attributes:
        rows: number of rows.
        length: tokens of each row, padding included.
        real: which tokens are real; ``None``: all.
        cache: the batch's rows.
        lengths: see `_Input`; ``None`` if rotary frequencies do not follow them.
    """

    rows: int
    length: int
    real: Bool[Tensor, "n T"] | None
    cache: PhasedCache
    lengths: Int[Tensor, "n T"] | None = None


class Joined:
    """Takes the steps of batches whose tokens lie one after the other in a single row, and holds nothing itself.

    Args:
        parts: the batches, in the order of their tokens.
        steppers: the layer of each batch.
    """

    def __init__(self, parts: Sequence[RunPart], steppers: Sequence[Stepper]) -> None:
        self._parts, self._steppers = parts, steppers

    def step(
        self,
        query: Float[Tensor, "1 Hq N D"],
        keys: Float[Tensor, "1 Hk N D"],
        values: Float[Tensor, "1 Hk N E"],
        *,
        options: AttentionOptions,
        phase: Phase,
        real: Bool[Tensor, "1 N"] | None = None,
    ) -> Float[Tensor, "1 Hq N E"]:
        """Run `kvkeep.Layer.step` for each batch on its own tokens, in its own phase. Return the outputs as one row."""
        done, start = [], 0
        for part, stepper in zip(self._parts, self._steppers, strict=True):
            stop = start + part.rows * part.length
            mine = (_rows(tensor[:, :, start:stop], part.rows) for tensor in (query, keys, values))
            with reading(part.lengths):  # the whole run has the lengths of all batches
                out = stepper.step(*mine, options=options, phase=part.cache.phase or phase, real=part.real)
            done.append(out.transpose(0, 1).flatten(1, 2)[None])  # (n, Hq, T, E) → (1, Hq, n·T, E)
            start = stop
        return torch.cat(done, dim=2)


def _rows(tensor: Float[Tensor, "1 H N D"], rows: int) -> Float[Tensor, "n H T D"]:
    """Return a view of one row, which holds the tokens of ``rows`` equally long sequences one after the other, as that
    many rows.
    """
    _, H, N, D = tensor.shape
    return tensor.view(H, rows, N // rows, D).transpose(0, 1)


def joined(parts: Sequence[RunPart]) -> PhasedCache:
    """Return a cache for one run of the model over all batches, as if their tokens were one sequence."""
    layers: list[Any] = []
    for same in zip(*(part.cache.layers for part in parts), strict=True):
        layers.append(HandingLayer(Joined(parts, [layer.stepper for layer in same]), same[0].window))
    cache = PhasedCache(layers=layers)
    # `Joined.step` runs each batch in its own phase, so this one is of no account
    cache.phase, cache.latent = parts[0].cache.phase, parts[0].cache.latent
    return cache


_ALONE = {
    "kosmos-2.5": "counts positions in a way of its own",
    "recurrent_gemma": "keeps the state of a sequence in the model instead of the cache",
}
"""Model types that cannot run several sequences at once, and why."""


class ModelRunner:
    """Runs a model over batches.

    Args:
        model: the model, attached.
        graphs: whether decode steps are recorded as CUDA graphs. On other devices nothing is recorded, but steps run
            as they would be recorded.

    Attributes:
        graphs: the recorded steps, or ``None``.

    Raises:
        UnsupportedModelError: the model's forward cannot run sequences of different lengths at once.
    """

    def __init__(self, model: Model, *, graphs: bool = False) -> None:
        self._model = model
        known = inspect.signature(model.forward).parameters
        why = _ALONE.get(model.config.model_type, None if "position_ids" in known else "takes no position_ids")
        if why is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} {why}, so an engine cannot run sequences of different lengths on it. Use "
                "model.generate with a BoundedCache."
            )
        keeps = known.get("logits_to_keep")
        # tokens are padded in front, so the last logits of a row are those of its last token
        self._options: dict[str, Any] = {} if keeps is None else {"logits_to_keep": 1}
        # the annotation says whether the model takes the places of tokens, or only how many of the last ones
        self._keeps_any = keeps is not None and "Tensor" in str(keeps.annotation)
        self._rule = LengthRule.of(model)
        # frequencies that follow the length of a text are chosen by the host in each step, which cannot be recorded
        self.graphs = Graphs(model, self._options) if graphs and not self._rule else None
        self._named, self._adapters = adapters_of(model), ""

    def check_adapters(self) -> bool:
        """Return whether nobody but the engine has switched, scaled or turned off the model's adapters since the last
        call. If somebody has, the present state of the adapters is what later calls compare with.
        """
        if self._named is not None:
            return self._named.check()
        # adapters that kvkeep has not loaded: there is nothing but their state to compare
        here, before = adapters(self._model), self._adapters
        self._adapters = here
        return here == before

    @torch.inference_mode()
    def run(self, run: ModelRun, rows: KVManager) -> Float[Tensor, "n V"]:
        """Run the model, write the rows' slots, and return the logits after each row's last token.

        The next run may overwrite the logits. Guarded rows are reduced to their chosen budgets, and log-probabilities
        of prompts noted. The adapter of the run's rows, which is the same for all, is activated.
        """
        if self._named is None:
            return self._run(run, rows)
        with self._named.activated(run.requests[0].request.adapter):
            return self._run(run, rows)

    def _run(self, run: ModelRun, rows: KVManager) -> Float[Tensor, "n V"]:
        """Run the model under the adapters that are active now. A decode step is replayed as a CUDA graph where that
        can be done.
        """
        graphs = self.graphs if len(run.batches) == 1 else None
        if graphs is not None and (logits := graphs.run(run.batches[0], rows)) is not None:
            return logits
        trials = [Trial(batch, rows) if batch.chooses_budgets else None for batch in run.batches]
        caches = [_part(batch, rows, trial) for batch, trial in zip(run.batches, trials, strict=True)]
        given = [_Input.of(batch, device_of(self._model)) for batch in run.batches]
        last = self._last(given, caches, run if is_scored(run) else None)
        for trial in trials:
            if trial is not None:
                trial.settle()
        return last

    def _last(
        self, given: Sequence[_Input], caches: Sequence[PhasedCache], scored: ModelRun | None
    ) -> Float[Tensor, "n V"]:
        """Run the model once over all batches, and return the logits after each row's last token. Several batches are
        joined into one sequence.

        Args:
            given: the tokens of each batch.
            caches: the rows of each batch.
            scored: the run, if log-probabilities of its prompts are asked for.
        """
        if len(given) == 1:
            options = {} if scored else self._options
            logits = self._logits(given[0], caches[0], options)
            if scored:
                score(scored, logits)
            return logits[:, -1]
        parts = [
            RunPart(len(batch.ids), batch.ids.shape[1], batch.real, cache, batch.lengths if self._rule else None)
            for batch, cache in zip(given, caches, strict=True)
        ]
        ids = torch.cat([batch.ids.flatten() for batch in given])
        positions = torch.cat([batch.positions.flatten() for batch in given])
        lengths = torch.cat([batch.lengths.flatten() for batch in given])
        # no mask of real tokens: each part has its own
        together, ends = _Input(ids[None], positions[None], None, lengths[None]), _last_tokens(parts, ids.device)
        if self._keeps_any and not scored:
            return self._logits(together, joined(parts), {"logits_to_keep": ends})[0]
        logits = self._logits(together, joined(parts), {})
        if scored:
            score(scored, logits)
        return logits[0, ends]

    def _logits(self, given: _Input, cache: PhasedCache, options: dict[str, Any]) -> Float[Tensor, "n T V"]:
        """Run the model on the tokens of one batch, or of several joined ones, and return its logits: after all tokens,
        or after those that ``options`` ask for.

        Args:
            given: the tokens.
            cache: the rows that they belong to, whose slots are written.
            options: further arguments of the model's forward.
        """
        with reading(given.lengths if self._rule else None):
            out: Tensor = self._model(
                input_ids=given.ids,
                position_ids=given.positions,
                attention_mask=given.real,
                **handed(self._model, cache),
                use_cache=True,
                **options,
            ).logits
        return out

    def forget(self) -> None:
        """Drop all recorded steps, because the rows that they read and write are about to be freed."""
        if self.graphs is not None:
            self.graphs.clear()


class _Input(NamedTuple):
    """The tokens of a batch as tensors.

    Attributes:
        ids: the token ids.
        positions: the position of each token in its sequence.
        real: which tokens are real; ``None``: all.
        lengths: tokens of each token's text up to the end of its prompt, or up to the token if that is later.
    """

    ids: Int[Tensor, "n T"]
    positions: Int[Tensor, "n T"]
    real: Bool[Tensor, "n T"] | None
    lengths: Int[Tensor, "n T"]

    @classmethod
    def of(cls, batch: InputBatch, device: torch.device) -> _Input:
        """Return the tokens of a batch, padded in front: the last column holds every row's last token."""
        T = max(map(len, batch.tokens))
        ids, positions, real = [], [], []
        for first, tokens in zip(batch.positions, batch.tokens, strict=True):
            pad = T - len(tokens)
            ids.append([0] * pad + list(tokens))
            # padding has no position, and 0 is one that every model has
            positions.append([0] * pad + list(range(first, first + len(tokens))))
            real.append([False] * pad + [True] * len(tokens))
        mask = None if all(map(all, real)) else torch.tensor(real, device=device)
        ends = [max(row) + 1 for row in positions]
        prompts = [0 if sequence is None else len(sequence.to_read) for sequence in batch.rows]
        # in main memory, since only models whose frequencies follow the length ever look at them
        lengths = torch.tensor(list(map(max, ends, prompts)))[:, None].expand(-1, T)
        return cls(torch.tensor(ids, device=device), torch.tensor(positions, device=device), mask, lengths)


def _part(batch: InputBatch, rows: KVManager, trial: Trial | None) -> PhasedCache:
    """Return the KV cache over the rows of a batch. If a trial of smaller budgets is given, it watches every layer."""
    watch = None if trial is None else trial.watch
    readings = (
        [None if sequence is None else sequence.reading for sequence in batch.rows]
        if batch.phase is Phase.PREFILL
        else []
    )
    return rows.part(batch.start, batch.stop, batch.phase, fresh=batch.fresh, watch=watch, readings=readings)


def _last_tokens(parts: Sequence[RunPart], device: torch.device) -> Int[Tensor, " n"]:
    """Return the index of every row's last token among the tokens of all parts, which lie one after the other."""
    found: list[int] = []
    start = 0
    for part in parts:
        stop = start + part.rows * part.length
        found += range(start + part.length - 1, stop, part.length)
        start = stop
    return torch.tensor(found, device=device)
