"""What a session's turns get alone: one cache, fed piece by piece."""

import torch

import kvkeep
from kvkeep.engine import Engine
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.types import Phase

from .models import DEVICE, model

BUDGET = 10


def engine_of(policy="h2o", budget=BUDGET, name="llama", **options):
    return Engine(model(name), policy=policy, budget=budget, **{"rows": 2, **options})


def short(new=4, **options):
    return SamplingParams(max_new_tokens=new, **options)


class Alone:
    """A conversation of token ids with a cache of its own.

    The last token of each answer is read together with what follows it, as a part of the next prompt.
    """

    def __init__(self, policy="h2o", budget=BUDGET, chunk=None, name="llama", **options):
        self._model, self._chunk = model(name), chunk
        self._cache = kvkeep.BoundedCache(self._model.config, policy, budget, **options)
        self._pending = []

    @torch.inference_mode()
    def ask(self, tokens, new=4):
        ids, out = [*self._pending, *tokens], []
        self._cache.phase = Phase.PREFILL
        for piece in torch.tensor([ids], device=DEVICE).split(self._chunk or len(ids), dim=1):
            logits = self._model(input_ids=piece, past_key_values=self._cache).logits
        self._cache.phase = Phase.DECODE
        while True:
            out.append(int(logits[0, -1].argmax()))
            if len(out) == new:
                self._pending = out[-1:]
                return tuple(out)
            logits = self._model(input_ids=torch.tensor([out[-1:]], device=DEVICE), past_key_values=self._cache).logits


def answers(turns, new=4, **options):
    """The answers to several turns of one conversation."""
    alone = Alone(**options)
    return [alone.ask(turn, new) for turn in turns]


def host_of(session):
    """Return the engine that runs a session's turns."""
    return session._host.step.__self__
