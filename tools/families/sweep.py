"""Trials of many families, each in a process of its own with a time limit."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import transformers
from families.trial import UNTRIED, WRONG, Outcome, trial
from transformers.models.auto import modeling_auto

import kvkeep

LIMIT_S = 120
Pair = tuple[str, str]
SHARED = [(transformers, "LlamaForCausalLM"), *((kvkeep, name) for name in ("attach", "BoundedCache", "Engine"))]
"""Imported once, before the processes part: it takes longer than a trial."""


def families() -> list[Pair]:
    """Model type and class of each decoder of text, or of images and text, that transformers has."""
    found: list[Pair] = []
    for name in ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"):
        for family, model in getattr(modeling_auto, name).items():
            pair = (family, model if isinstance(model, str) else model[0])
            found += [] if pair in found else [pair]
    return sorted(found)


def sweep(pairs: Iterable[Pair], limit_s: float = LIMIT_S) -> Iterator[Outcome]:
    """The outcome of each family; a process that dies or hangs harms no other."""
    torch.set_num_threads(1)
    _ = [getattr(module, name) for module, name in SHARED]
    for family, model in pairs:
        handle, path = tempfile.mkstemp(suffix=".json")
        os.close(handle)
        child = os.fork()
        if not child:
            _report(family, model, Path(path))
        ended = _wait(child, limit_s)
        text = Path(path).read_text()
        Path(path).unlink()
        died = "it did not end" if not ended else "its process died"
        yield Outcome(**json.loads(text)) if text else Outcome(family, model, WRONG, died)


def _report(family: str, model: str, path: Path) -> None:
    """Try one family out and leave: for a process of its own."""
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        warnings.simplefilter("ignore")
        try:
            kind = getattr(transformers, model)
        except Exception as error:  # its module needs a package that is not here
            outcome = Outcome(family, model, UNTRIED, f"{type(error).__name__}: {error!s:.200}")
        else:
            outcome = trial(family, kind)
        path.write_text(json.dumps(outcome.record()))
    finally:
        os._exit(0)


def _wait(child: int, limit_s: float) -> bool:
    """Whether a process ended in time; if not, it is killed."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


if __name__ == "__main__":  # python -m families.sweep FAMILY ...
    for outcome in sweep([pair for pair in families() if pair[0] in sys.argv[1:]]):
        print(outcome.family, outcome.model, outcome.status, outcome.why, sep=" | ")
