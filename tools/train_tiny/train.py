"""The training loop: resumes from its checkpoint, measures as it goes."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kvkeep.models.tiny import WEIGHTS

from . import corpus, quick
from .curriculum import Mixture, Stage, rate_factor, stage_at, total_tokens
from .documents import Recall
from .model import build
from .optim import Optimizer
from .parallel import Replicas
from .paths import LOG, PACKAGE
from .prepare import load_tokenizer
from .words import Words

SEED = 7
CHECKPOINT_EVERY_S = 240.0
MEASURE_EVERY = 500_000
COLUMNS = ("tokens", "length", "rate", "train_loss", "answer_loss", "facts", "recall_words", "recall_numbers",
           "novel_loss", "story_loss", "tokens_per_s")  # fmt: skip


class Trainer:
    """Model, optimizer and data of one run, and how far it has come."""

    def __init__(self, work: Path, device: str, scale: float, *, onward: bool = False) -> None:
        self.work, self.device, self.scale = work, device, scale
        self.tokenizer = load_tokenizer(work)
        self.begin = self.tokenizer.token_to_id(corpus.BEGIN)
        self.model: Any = build(SEED, device)
        if onward:
            self.model.load_state_dict(load_file(PACKAGE / WEIGHTS), strict=False)  # the output is the embedding
        self.optimizer = Optimizer(self.model)
        threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)) if device == "cpu" else 1
        self.replicas = Replicas(self.model, threads=threads, piece_tokens=2048 if device == "cpu" else 65536)
        self.seen = self.begun = tokens_trained() if onward else 0
        self.mixture = self._mixture()
        self.validation = {n: corpus.load(work / f"validation_{n}.npz") for n in ("novels", "stories")}
        self.filler = json.loads((work / "validation_filler.json").read_text())
        if self._checkpoint.exists():
            self._resume()

    @property
    def _checkpoint(self) -> Path:
        return self.work / "checkpoint.pt"

    def _mixture(self) -> Mixture:
        novels, stories = corpus.load(self.work / "novels.npz"), corpus.load(self.work / "stories.npz")
        words = Words.load(self.work / "words.json")
        return Mixture(Recall(self.tokenizer, words, (novels, stories)), novels, stories, self.begin)

    def save(self) -> None:
        """Write the checkpoint; a crash in the middle leaves the last one whole."""
        temporary = self._checkpoint.with_suffix(".part")
        torch.save({"seen": self.seen, "begun": self.begun, "optimizer": self.optimizer.state()}, temporary)
        os.replace(temporary, self._checkpoint)

    def _resume(self) -> None:
        state = torch.load(self._checkpoint, map_location=self.device, weights_only=True)
        self.seen, self.begun = state["seen"], state["begun"]
        self.optimizer.load(state["optimizer"])

    def step(self) -> tuple[float, float]:
        """One batch; returns the loss per token and per answer token."""
        rng = random.Random(f"{SEED}/{self.seen}")
        tokens, weights = self.mixture.batch(rng, stage_at(self.seen, self.scale))
        tokens, weights = tokens.to(self.device), weights.to(self.device)
        each = self.replicas.gradients(tokens, weights)
        self.optimizer.step(rate_factor(self.seen, self.scale, self.begun))
        self.seen += tokens.numel()
        answers = weights[:, 1:] >= 4
        return each.mean().item(), each[answers].mean().item()

    def measure(self) -> dict[str, float]:
        """Recall at this stage's length and loss on held-out text, with the averaged weights."""
        with self.optimizer.averaged():
            return self._measure(stage_at(self.seen - 1, self.scale))

    def _measure(self, stage: Stage) -> dict[str, float]:
        facts = min(16, stage.shape.facts[1])
        asked = quick.questions(
            self.tokenizer, self.filler["novels"], n=120, facts=facts, tokens=stage.length, seed=1000
        )
        outcomes = quick.answer_all(self.model, self.tokenizer, asked)
        text = {
            f"{name[:-1] if name == 'novels' else 'story'}_loss": quick.text_loss(
                self.model, corpus, rows=12, length=min(512, stage.length), begin=self.begin
            )
            for name, corpus in self.validation.items()
        }
        words = quick.share(outcomes, *quick.KINDS[:-1])
        return {"length": stage.length, "facts": facts, "recall_words": words,
                "recall_numbers": quick.share(outcomes, "number"), **text}  # fmt: skip


def tokens_trained() -> int:
    """Tokens that the weights of the package have had."""
    return int(LOG.read_text().splitlines()[-1].split(",")[0])


def train(work: Path, *, device: str, scale: float, onward: bool = False) -> None:
    """Train until the curriculum is done, ``onward`` from the weights of the package or from nothing.

    Safe to stop and start again at any time: the checkpoint in the work folder goes before.
    """
    trainer = Trainer(work, device, scale, onward=onward)
    if onward and not (work / "log.csv").exists():
        shutil.copyfile(LOG, work / "log.csv")
    forget_after(work / "log.csv", trainer.seen)
    (work / "train.pid").write_text(str(os.getpid()))
    saved, started, measured, window = time.monotonic(), time.monotonic(), trainer.seen, []
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    while trainer.seen < total_tokens(scale) and not stopped:
        window.append(trainer.step())
        if len(window) % 20 == 0:
            loss, answer = means(window[-20:])
            print(f"{trainer.seen:>10,} loss {loss:.3f} answers {answer:.3f}", flush=True)
        if trainer.seen >= measured + MEASURE_EVERY or trainer.seen >= total_tokens(scale):
            record(trainer, window, (trainer.seen - measured) / (time.monotonic() - started))
            window, started, measured = [], time.monotonic(), trainer.seen
        if time.monotonic() - saved > CHECKPOINT_EVERY_S:
            trainer.save()
            saved = time.monotonic()
    trainer.save()


def forget_after(log: Path, seen: int) -> None:
    """Drop the lines of a log that are newer than the checkpoint: what they tell of was lost, and comes again."""
    if log.exists():
        head, *lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join([head, *(line for line in lines if int(line.split(",")[0]) <= seen)]))


def means(window: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean loss per token and per answer token; a batch of running text has no answers."""
    losses, answers = zip(*window, strict=True)
    with_answers = [answer for answer in answers if not math.isnan(answer)]
    return sum(losses) / len(losses), sum(with_answers) / max(1, len(with_answers))


def record(trainer: Trainer, window: list[tuple[float, float]], speed: float) -> None:
    """Measure, and add one line to the log."""
    loss, answer = means(window)
    line = {"tokens": trainer.seen, "rate": rate_factor(trainer.seen, trainer.scale, trainer.begun),
            "train_loss": loss, "answer_loss": answer, "tokens_per_s": speed, **trainer.measure()}  # fmt: skip
    path = trainer.work / "log.csv"
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerow({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()})
    print(" ".join(f"{k}={line[k]:.3f}" for k in COLUMNS), flush=True)
