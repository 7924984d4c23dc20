"""The depth of the facts that a model names after eviction: an equivalent of AhaKV's passage retrieval.

The questions are about planted facts (`kvkeep.models.tiny.recall`), and the prompt is cut to a fifth. A reply that is a
value in the text points to the place of its fact. A policy that forgets the end of a text makes replies point to its
beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from kvkeep import budget as budgets
from kvkeep.errors import InputError
from kvkeep.evals.forward import Drive, left_padded
from kvkeep.evals.qa_task import decode_greedily
from kvkeep.evals.task import Options
from kvkeep.evals.tasks.recall import NEW_TOKENS, Prompted, Wording, ask, right, wording_of
from kvkeep.models.generation_config import ends_of
from kvkeep.models.tiny.recall import Question
from kvkeep.models.tokenization import Writer
from kvkeep.policies.registry import parse
from kvkeep_lab.analysis.groups._shared import lines, mean, percent
from kvkeep_lab.analysis.measure import (
    Axes,
    Context,
    Measurement,
    Progress,
    Reading,
    Result,
    Skipped,
    Subject,
    Verdict,
)

POLICIES = ("full", "h2o", "ahakv")
"""The policies of Figure 7, and ``full``, which shows whether the model can do the task at all."""

CONTEXT = 512
QUESTIONS = 40
KEEP_RATIO = 0.2

ABLE = 0.5
"""Share of right answers under the full cache below which the model cannot do the task, so eviction proves nothing."""

FIFTHS = 5
SURE = 2.0
"""Least distance of a shift or a difference from 0, in standard errors."""


@dataclass(frozen=True)
class Reply:
    """The result of one question.

    Attributes:
        right: whether the reply is right.
        asked: depth of the asked fact, from 0 to 1.
        named: depth of the fact whose value the reply is; ``None`` if the reply is no value in the text.
    """

    right: bool
    asked: float
    named: float | None


def named_depth(question: Question, reply: str) -> float | None:
    """Return the depth of the fact whose value is the reply; of several such facts, that of the asked one.

    ``None`` if the reply is the value of no fact of the asked kind in the text.
    """
    said = reply.strip().rstrip(".").lower()
    asked = question.facts[-1]
    if said == asked.value.lower():
        return question.depth
    for fact in question.facts:
        if fact.kind.name == asked.kind.name and fact.value.lower() == said:
            places = [question.prompt.find(fact.say(text)) for text in fact.kind.statements]
            return max(places) / len(question.prompt) if max(places) >= 0 else None
    return None


def shift(replies: Sequence[Reply]) -> tuple[float | None, float | None]:
    """Return the excess of replies that point to the second half over questions that do, and its standard error.

    Replies that name no fact do not count; both are ``None`` if fewer than two do.
    """
    moves = torch.tensor(
        [float(reply.named >= 0.5) - float(reply.asked >= 0.5) for reply in replies if reply.named is not None]
    )
    if len(moves) < 2:
        return None, None
    return moves.mean().item(), (moves.std() / len(moves) ** 0.5).item()


def summary(replies: Sequence[Reply]) -> Result:
    """Return accuracy by fifth of the text, and the depths of replies and of the questions' facts."""
    fifths = [[reply.right for reply in replies if _fifth(reply.asked) == number] for number in range(FIFTHS)]
    asked = _histogram([reply.asked for reply in replies])
    named = _histogram([reply.named for reply in replies if reply.named is not None])
    moved, error = shift(replies)
    return {
        "accuracy": mean([float(reply.right) for reply in replies]),
        "rights": "".join(str(int(reply.right)) for reply in replies),
        "by_fifth": [mean(map(float, rights)) for rights in fifths],
        "by_half": [
            mean(float(reply.right) for reply in replies if (reply.asked >= 0.5) == late) for late in (False, True)
        ],
        "asked": asked,
        "named": named,
        "names_a_fact": sum(reply.named is not None for reply in replies) / len(replies),
        "total_variation": sum(abs(a - b) for a, b in zip(asked, named, strict=True)) / 2,
        "shift": moved,
        "shift_error": error,
    }


def _fifth(depth: float) -> int:
    return min(FIFTHS - 1, int(depth * FIFTHS))


def _histogram(depths: Sequence[float]) -> list[float]:
    counts = [sum(_fifth(depth) == number for depth in depths) for number in range(FIFTHS)]
    return [count / max(1, len(depths)) for count in counts]


@final
class RecallDepth(Measurement):
    """Accuracy and the depth of named facts, under the full cache, H2O and AhaKV."""

    name: ClassVar[str] = "recall_depth"
    source: ClassVar[str] = "AhaKV, Figure 7"
    title: ClassVar[str] = "Where in a text a model finds facts after eviction"
    reads: ClassVar[frozenset[str]] = frozenset({"model"})
    least_tokens: ClassVar[int] = 1
    effort: ClassVar[int] = 125

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._found: Result = {}

    def runs(self, subject: Subject, progress: Progress) -> None:
        """Ask the same questions under each policy.

        Raises:
            Skipped: the model has too few positions or tokens that are too small, or it fails under the full cache.
        """
        writer = subject.writer
        wording = wording_of(writer.checkpoint)
        limit = writer.checkpoint.trained_length
        if limit is not None and limit < CONTEXT + NEW_TOKENS[wording]:
            raise Skipped(f"The questions need {CONTEXT + NEW_TOKENS[wording]} positions, the model has {limit}.")
        try:
            questions = ask(writer.checkpoint, Options(seed=subject.seed), CONTEXT, QUESTIONS)
        except InputError as error:
            raise Skipped(str(error)) from error
        for number, policy in enumerate(POLICIES):
            self._found[policy] = summary(_replies(writer, policy, questions, wording))
            if policy == "full" and self._found[policy]["accuracy"] < ABLE:
                accuracy = percent(self._found[policy]["accuracy"])
                raise Skipped(f"The model answers only {accuracy} of the questions right under the full cache.")
            progress((number + 1) / len(POLICIES))

    def result(self) -> Result:
        """Return, per policy, accuracy by fifth of the text and the depths of named facts."""
        return {"questions": QUESTIONS, "context": CONTEXT, "keep_ratio": KEEP_RATIO, "policies": self._found}

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Return the reading: it agrees if H2O's replies point to the first half, and AhaKV's less so.

        H2O's do if they point there more often than the questions.
        """
        full, h2o, ahakv = (result["policies"][name] for name in POLICIES)
        return Reading(
            paper="Asked for one of 30 paragraphs, LLaMA-3-8B under H2O names mostly those of the first half; under "
            "AhaKV the answers are spread like the truth (Figure 7).",
            here=f"At {percent(result['keep_ratio'])} of {result['context']} tokens H2O gets "
            f"{percent(h2o['accuracy'])} of {result['questions']} questions right ({_halves(h2o)}), AhaKV "
            f"{percent(ahakv['accuracy'])} ({_halves(ahakv)}), the full cache {percent(full['accuracy'])}. "
            f"Replies point to the second half more often than questions by {_signed(h2o)} under H2O "
            f"and {_signed(ahakv)} under AhaKV.",
            meaning=_meaning(h2o, ahakv),
            verdict=_verdict(h2o, ahakv),
        )

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw accuracy by fifth of the text under each policy."""
        middles = [(number + 0.5) / FIFTHS for number in range(FIFTHS)]
        series = {name: (middles, result["policies"][name]["by_fifth"]) for name in POLICIES}
        lines(axes, series, x="depth of the asked fact", y="share of right answers")
        axes.set_ylim(0, 1.03)


def _replies(writer: Writer, policy: str, questions: Sequence[Prompted], wording: Wording) -> list[Reply]:
    """Read all prompts but for their last tokens as one chunk, cut them, and decode greedily."""
    ratio = 1.0 if policy == "full" else KEEP_RATIO
    numbers = [budgets.from_ratio(ratio, len(asked.ids)) for asked in questions]
    room = NEW_TOKENS[wording] + 1 if policy == "full" else 0
    drive = Drive(writer, parse(policy), [number + room for number in numbers])
    drive.feed(*left_padded([asked.ids[:-1] for asked in questions]), last_only=True)
    logits = drive.feed(*left_padded([asked.ids[-1:] for asked in questions]), last_only=True)
    ends = ends_of(writer.model, writer.checkpoint.tokenizer, chat=True)
    texts = [writer.text_of(row) for row in decode_greedily(drive, logits, NEW_TOKENS[wording], ends)]
    return [
        Reply(right(wording, asked.question, text), asked.question.depth, named_depth(asked.question, text))
        for asked, text in zip(questions, texts, strict=True)
    ]


def _halves(found: Result) -> str:
    return f"of the first half {percent(found['by_half'][0])}, of the second {percent(found['by_half'][1])}"


def _signed(found: Result) -> str:
    if found["shift"] is None:
        return "an unknown part"
    return f"{100 * found['shift']:+.0f} ± {100 * found['shift_error']:.0f} %"


def _verdict(h2o: Result, ahakv: Result) -> Verdict:
    if h2o["shift"] is None or ahakv["shift"] is None:
        return "cannot tell"
    early = h2o["shift"] + SURE * h2o["shift_error"] < 0
    if early and abs(ahakv["shift"]) < abs(h2o["shift"]):
        return "agree"
    return "differ" if early or h2o["shift"] - SURE * h2o["shift_error"] > 0 else "cannot tell"


def _difference(one: str, other: str) -> tuple[float, float]:
    """Return the mean difference of right answers to the same questions, and its standard error."""
    gaps = torch.tensor([float(a) - float(b) for a, b in zip(one, other, strict=True)])
    return gaps.mean().item(), (gaps.std() / len(gaps) ** 0.5).item()


def _meaning(h2o: Result, ahakv: Result) -> str:
    gap, error = _difference(ahakv["rights"], h2o["rights"])
    if abs(gap) <= SURE * error:
        return "So few questions do not tell h2o and ahakv apart; choose between them by the other figures."
    better, worse = ("ahakv", "h2o") if gap > 0 else ("h2o", "ahakv")
    return f"For questions at the end of a prompt prefer {better}: it answers {percent(abs(gap))} more than {worse}."
