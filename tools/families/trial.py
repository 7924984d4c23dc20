"""One family's trial: a tiny random model in plain transformers, and the same model with kvkeep."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from families.shrink import configured

import kvkeep
from kvkeep.cache.hf_layers import handed

NEW = 6
LENGTH = 20
FULL, SMALL = 64, 8
LARGEST = 120_000_000
"""Numbers of a model that is still tried."""

RUNS, GENERATE, REFUSED, UNTRIED, WRONG = "runs", "runs in generate", "refused", "not tried", "WRONG"


@dataclass(frozen=True)
class Outcome:
    """What became of a family.

    Attributes:
        family: transformers' model type.
        model: the model's class.
        status: ``runs``, ``runs in generate`` (not in an engine), ``refused``, ``not tried`` or ``WRONG``.
        why: the error, where it does not run.
    """

    family: str
    model: str
    status: str
    why: str = ""

    def record(self) -> dict[str, str]:
        """The outcome as JSON holds it."""
        return asdict(self)


class TrialError(Exception):
    """Something that ends a trial, with what it means."""

    def __init__(self, status: str, why: object) -> None:
        super().__init__(status)
        self.status, self.why = status, why if isinstance(why, str) else f"{type(why).__name__}: {why!s:.200}"


def trial(family: str, kind: Any) -> Outcome:
    """Try one family out."""
    try:
        status = _run(family, kind)
    except TrialError as end:
        return Outcome(family, kind.__name__, end.status, " ".join(end.why.split()))
    return Outcome(family, kind.__name__, status)


def _run(family: str, kind: Any) -> str:
    _step(UNTRIED, lambda: _check_configuration(family))
    model = _step(UNTRIED, lambda: build(family, kind))
    ids = torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(LENGTH) >= torch.tensor([[0], [6]])).long()
    ids = ids.masked_fill(mask == 0, 0)
    try:
        want = [_greedy(model, ids[:1], None), _greedy(model, ids, mask)]
        failure = None if torch.isfinite(want[0].scores).all() else RuntimeError("its logits are not finite")
    except Exception as error:  # whatever the model's own code raises
        failure = error
    _step(WRONG, lambda: kvkeep.BoundedCache(kvkeep.attach(model).config, "h2o", FULL))
    if failure is not None:
        raise TrialError(UNTRIED, failure)
    for rows, expected in zip((1, 2), want, strict=True):
        given = mask if rows == 2 else None
        _step(WRONG, lambda rows=rows, given=given, expected=expected: _same(model, ids[:rows], given, expected))
    _step(WRONG, lambda: _bounded(model, ids[:1]))
    return _engine(model, ids[0])


def _step(otherwise: str, run: Any) -> Any:
    """Run a part of a trial; kvkeep's refusals end it as refused, other errors as said."""
    try:
        return run()
    except kvkeep.UnsupportedModelError as error:
        raise TrialError(REFUSED, str(error)) from error
    except TrialError:
        raise
    except Exception as error:  # whatever the model's own code raises
        raise TrialError(otherwise, error) from error


def _check_configuration(family: str) -> None:
    """Refuse what the configuration alone shows, whether or not its model can be made here."""
    config = configured(family)
    with suppress(AttributeError, TypeError, ValueError):  # what a configuration lacks, its model will say
        kvkeep.BoundedCache(config, "h2o", FULL)


def build(family: str, kind: Any) -> Any:
    """A tiny model with random weights, large enough in scale that attention is not uniform."""
    config = configured(family)
    with torch.device("meta"):
        try:
            numbers = sum(p.numel() for p in kind(config).parameters())
        except AttributeError:  # the decoder of a model with other parts
            config = config.get_text_config(decoder=True)
            numbers = sum(p.numel() for p in kind(config).parameters())
    if numbers > LARGEST:
        raise ValueError(f"it has {numbers:,} numbers even with few layers and heads")
    torch.manual_seed(0)
    model = kind(config).eval().float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            _fill(parameter, generator)
    return model


def _fill(parameter: Any, generator: torch.Generator) -> None:
    finite = bool(torch.isfinite(parameter).all())
    if parameter.ndim >= 2 and finite and parameter.std() > 1e-3:
        parameter.mul_(3.0)
    elif parameter.ndim >= 2:  # some families leave weights to the checkpoint
        parameter.copy_(0.08 * torch.randn(parameter.shape, generator=generator))
    elif not finite:
        parameter.zero_()


@dataclass(frozen=True)
class Text:
    """Tokens, and the logits that they were chosen by."""

    tokens: torch.Tensor
    scores: torch.Tensor


def _greedy(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, cache: Any = None) -> Text:
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask}
    how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    out = model.generate(**given, **handed(model, cache), **how, output_logits=True, return_dict_in_generate=True)
    return Text(out.sequences, torch.stack(out.logits))


def _same(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, want: Text) -> None:
    """Refute that a budget of the whole length gives what transformers gives."""
    cache = kvkeep.BoundedCache(model.config, "h2o", FULL)
    got = _greedy(model, ids, mask, cache)
    error = (got.scores - want.scores).abs().max() / want.scores.abs().max()
    if not torch.equal(got.tokens, want.tokens) or not error < 1e-3:
        raise TrialError(WRONG, f"logits differ by {float(error):.0e} with {len(ids)} rows")
    if not any(layer.columns for layer in cache.bounded_layers().values()):
        raise TrialError(WRONG, "the cache is not used")


def _bounded(model: Any, ids: torch.Tensor) -> None:
    """Refute that a small budget is kept."""
    cache = kvkeep.BoundedCache(model.config, "h2o", SMALL)
    scores = _greedy(model, ids, None, cache).scores
    held = [int((layer.store.positions >= 0).sum(-1).max()) for layer in cache.bounded_layers().values()]
    if max(held) > SMALL or not torch.isfinite(scores).all():
        raise TrialError(WRONG, f"{max(held)} tokens are held in a budget of {SMALL}")


def _engine(model: Any, ids: torch.Tensor) -> str:
    """Whether an engine gives two texts at once what ``generate`` gives each."""
    texts = (ids, ids.flip(0)[:-3])
    asked = [
        kvkeep.Request(
            prompt=tuple(text.tolist()), sampling=kvkeep.SamplingParams(max_new_tokens=NEW + 2 * i), ignore_end=True
        )
        for i, text in enumerate(texts)
    ]
    try:
        engine = kvkeep.Engine(model, policy="h2o", budget=SMALL, rows=2, prefill_chunk=None)
    except kvkeep.UnsupportedModelError:
        return GENERATE
    results = _step(WRONG, lambda: engine.generate(asked))
    for text, result in zip(texts, results, strict=True):
        want = _greedy(model, text[None], None, kvkeep.BoundedCache(model.config, "h2o", SMALL)).tokens[0, len(text) :]
        if list(result.token_ids)[:NEW] != want.tolist():
            raise TrialError(WRONG, f"the engine differs from generate ({result.error or 'other tokens'})")
    return RUNS
