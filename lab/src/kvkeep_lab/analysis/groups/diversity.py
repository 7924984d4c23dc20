"""A8: is text that is written under eviction as diverse as under the full cache (H2O, Appendix C.1)?

Every policy continues the same prompts with the same random numbers, to the same length: tokens that would end a text
are never drawn. Self-BLEU compares the texts with each other, distinct n-grams count over all texts, and repetition
counts inside each text. The paper gives neither order nor smoothing of its Self-BLEU. Orders 2 to 5 are reported, with
counts of 0 smoothed and without smoothing.

BLEU is that of Papineni et al. (2002): the geometric mean of the clipped precisions of orders 1 to N with equal
weights, times the brevity penalty against the reference of the closest length.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, final

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.engine.sampler import choose
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.evals.forward import Drive
from kvkeep.models.generation_config import ends_of
from kvkeep.models.tokenization import Writer
from kvkeep.policies.registry import parse
from kvkeep_lab.analysis.groups import _shared
from kvkeep_lab.analysis.measure import Axes, Measurement, Progress, Reading, Result, Subject, Verdict

POLICIES = ("full", "h2o", "scissorhands", "ahakv", "streaming_llm", "local")
"""The papers' methods, and the two that ignore attention."""

BUDGET = 0.2
"""Kept share of prompt and continuation together."""

PROMPTS, PROMPT, NEW = 16, 128, 96
"""Number of prompts, tokens of each, and new tokens of each."""

TEMPERATURE = 0.7
"""Hot enough that prompts and seeds differ, cool enough that a model's own repetitions show."""

ORDERS, MAIN = (2, 3, 4, 5), 4
"""Orders of Self-BLEU, and the order for the verdict, which is BLEU's usual one."""

REPEATED = (2, 3, 4)

SURE = 2.0
"""Least difference in standard errors that counts as a difference."""


@final
class WrittenDiversity(Measurement):
    """Self-BLEU, distinct n-grams and repetition of short continuations under each policy."""

    name: ClassVar[str] = "diversity"
    source: ClassVar[str] = "H2O, Appendix C.1"
    title: ClassVar[str] = "Text written with heavy hitters alone stays diverse"
    reads: ClassVar[frozenset[str]] = frozenset({"model"})
    least_tokens: ClassVar[int] = 2 * PROMPT
    effort: ClassVar[int] = 54

    def runs(self, subject: Subject, progress: Progress) -> None:
        """Continue the prompts under every policy."""
        prompts = _shared.windows(subject, rows=PROMPTS, length=PROMPT, room=NEW)
        budget = int(BUDGET * (prompts.shape[1] + NEW))
        found = {}
        for number, name in enumerate(POLICIES):
            room = prompts.shape[1] + NEW if name == "full" else budget
            texts = continuations(subject.writer, name, room, prompts, seed=subject.seed)
            found[name] = {**described(texts), "example": subject.writer.text_of(texts[0])}
            progress((number + 1) / len(POLICIES))
        facts = {"prompts": len(prompts), "prompt_tokens": prompts.shape[1], "new_tokens": NEW, "budget": budget}
        self._found: Result = {**facts, "temperature": TEMPERATURE, "policies": found}

    def result(self) -> Result:
        """Return the numbers of each policy, and its first text."""
        return self._found

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Return the reading: it agrees if H2O repeats no more across texts than the full cache, and local does."""
        found = {name: one["self_bleu_smooth"][str(MAIN)] for name, one in result["policies"].items()}
        inside = {name: one["repeated"]["3"] for name, one in result["policies"].items()}
        verdict = _verdict(result)
        return Reading(
            paper="Self-BLEU of LLaMA-7B on XSUM prompts is 0.0057 with the full cache, 0.0051 with H2O and 0.0436 "
            "with the newest tokens alone; lower is more diverse.",
            here=f"Self-BLEU-{MAIN} of {result['prompts']} texts of {result['new_tokens']} tokens: "
            + ", ".join(f"{name} {value:.3f}" for name, value in found.items())
            + "; 3-grams repeated within a text: "
            + ", ".join(f"{name} {inside[name]:.0%}" for name in ("full", "h2o", "local"))
            + ".",
            meaning=_MEANING[verdict],
            verdict=verdict,
        )

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw Self-BLEU and repetition as two marks per policy."""
        found = result["policies"]
        places = range(len(found))
        bleus = [measured["self_bleu_smooth"][str(MAIN)] for measured in found.values()]
        axes.plot(places, bleus, marker="o", linestyle="none", color="black", label=f"Self-BLEU-{MAIN}")
        inside = [measured["repeated"]["3"] for measured in found.values()]
        axes.plot(places, inside, marker="x", linestyle="none", color="black", label="repeated 3-grams")
        axes.set_xticks(list(places), list(found), rotation=20)
        axes.set_ylabel("share (lower is more diverse)")
        axes.set_ylim(0, None)
        axes.legend(fontsize=8)


_MEANING: dict[Verdict, str] = {
    "agree": "H2O does not pay for its small cache with repetition; keeping the newest tokens alone does.",
    "differ": "At this budget H2O writes more alike than the full cache: look at the texts and raise the budget.",
    "cannot tell": "Differences between these few short texts are within chance; judge diversity on your own prompts.",
}


@torch.inference_mode()
def continuations(
    writer: Writer, policy: str, budget: int, prompts: Int[Tensor, "N T"], *, seed: int
) -> list[list[int]]:
    """Continue all prompts at once by `NEW` tokens; the same seed draws the same random numbers under every policy."""
    drive = Drive(writer, parse(policy), [budget] * len(prompts))
    rows = [SamplingParams(temperature=TEMPERATURE, seed=seed * PROMPTS + row) for row in range(len(prompts))]
    ends = sorted(ends_of(writer.model, writer.checkpoint.tokenizer))
    tokens, given = [], prompts
    for step in range(NEW):
        logits = drive.feed(given, last_only=True)[:, -1].float().cpu()
        logits[:, ends] = -torch.inf
        given = choose(logits, rows, torch.full((len(rows),), step))[:, None]
        tokens.append(given)
    texts: list[list[int]] = torch.cat(tokens, dim=1).tolist()
    return texts


def described(texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the numbers of one policy, which has written two texts or more."""
    smooth = {str(n): self_bleu(texts, n, smooth=True) for n in ORDERS}
    return {
        "self_bleu": {str(n): _mean(self_bleu(texts, n, smooth=False)) for n in ORDERS},
        "self_bleu_smooth": {n: _mean(values) for n, values in smooth.items()},
        "bleus": smooth[str(MAIN)],
        "distinct": {str(n): distinct(texts, n) for n in (1, 2, 3)},
        "repeated": {str(n): _mean([repeated(text, n) for text in texts]) for n in REPEATED},
    }


def difference(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the mean difference over the same prompts, and its standard error, which is infinite for one prompt."""
    pairs = [a - b for a, b in zip(one, other, strict=True)]
    mean = _mean(pairs)
    if len(pairs) < 2:
        return mean, math.inf
    return mean, math.sqrt(sum((pair - mean) ** 2 for pair in pairs) / (len(pairs) - 1) / len(pairs))


def _verdict(result: Result) -> Verdict:
    bleus = {name: one["bleus"] for name, one in result["policies"].items()}
    h2o, h2o_error = difference(bleus["h2o"], bleus["full"])
    local, local_error = difference(bleus["local"], bleus["full"])
    if h2o > SURE * h2o_error:
        return "differ"
    return "agree" if local > SURE * local_error else "cannot tell"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# -- counts of n-grams -------------------------------------------------------------------------------------------------

Text = Sequence[int]
Counts = Counter[tuple[int, ...]]

EPSILON = 0.1
"""The replacement for a count of 0 in smoothing (method 1 of Chen and Cherry, 2014)."""


def ngrams(text: Text, n: int) -> Counts:
    """Return the count of each run of ``n`` tokens."""
    return Counter(tuple(text[start : start + n]) for start in range(len(text) - n + 1))


def bleu(text: Text, references: Sequence[Text], order: int, *, smooth: bool) -> float:
    """Return the BLEU of a text against one reference or more, in [0, 1]; 0 for a text of fewer tokens than ``order``.

    Args:
        text: the text to judge.
        references: the texts to compare it with.
        order: length of the longest n-grams that count.
        smooth: replace a count of 0 by `EPSILON`; otherwise one such order makes the result 0.
    """
    total = 0.0
    for n in range(1, order + 1):
        own = ngrams(text, n)
        most: Counts = Counter()
        for reference in references:
            most |= ngrams(reference, n)  # the largest count in any one reference
        found = float(sum((own & most).values()))
        if not own or (found == 0 and not smooth):
            return 0.0
        total += math.log((found or EPSILON) / sum(own.values()))
    return _brevity(len(text), [len(reference) for reference in references]) * math.exp(total / order)


def _brevity(length: int, others: Sequence[int]) -> float:
    """Return the brevity penalty: 1 for a text of at least the length of the reference that is closest in length.

    Of two references that are equally close, the shorter counts.
    """
    closest = min(others, key=lambda other: (abs(other - length), other))
    return 1.0 if length >= closest else math.exp(1 - closest / length)


def self_bleu(texts: Sequence[Text], order: int, *, smooth: bool) -> list[float]:
    """Return the BLEU of each of two or more texts against all others.

    Their mean is Self-BLEU, which is low for diverse texts.
    """
    return [bleu(text, [*texts[:i], *texts[i + 1 :]], order, smooth=smooth) for i, text in enumerate(texts)]


def distinct(texts: Sequence[Text], n: int) -> float:
    """Return different n-grams per n-gram, over all texts together: 1 if none occurs twice, 0 if there is none."""
    total: Counts = Counter()
    for text in texts:
        total += ngrams(text, n)
    return len(total) / max(1, sum(total.values()))


def repeated(text: Text, n: int) -> float:
    """Return the share of a text's n-grams that occurred earlier in it; 0 if there is none."""
    counts = ngrams(text, n)
    return 1 - len(counts) / sum(counts.values()) if counts else 0.0
