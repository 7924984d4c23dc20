"""The result of a search in words, as a table, as a picture, and as a ``kvkeep.toml``."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, fields, replace
from typing import Any

from kvkeep.config import Config
from kvkeep.errors import show_bytes
from kvkeep.evals.results import ABLE_PERCENT
from kvkeep.evals.tune.measure import Candidate, Case, KeptQuality, Kind, most, needed
from kvkeep.evals.tune.search import LEAST_WINDOWS, SearchResult, TuneResult
from kvkeep.plots import Panel, Series
from kvkeep.result_files import in_full

COLUMNS = ("policy", "budget", "memory", "of full", "kept", "at least", "")
"""Titles of the table of `lines`. The last column, a verdict, needs none."""

_MEANING: dict[Case, str] = {
    "later": "right answers to questions after the text was cut",
    "inside": "right answers to questions at the end of the text",
    "stream": "the full cache's perplexity, relative to the candidate's",
}
_NOUN: dict[Kind, str] = {"answers": "questions", "loss": "tokens"}


def lines(result: TuneResult, full_bytes: int) -> list[tuple[str, ...]]:
    """Return the table's lines, with a text for each of `COLUMNS`.

    First come the confirmed candidates, the smallest memory first; then, for each other arm, the smallest budget with
    which it reached the target in the search, or else its largest one.
    """
    confirmed = dict(sorted(result.found.confirmed.items(), key=lambda item: item[0].row_bytes))
    rows = [
        _line(candidate, quality, full_bytes, _verdict(result, candidate, quality))
        for candidate, quality in confirmed.items()
    ]
    named = {candidate.arm for candidate in confirmed}
    for ladder in result.ladders:
        if ladder and ladder[0].arm not in named:
            candidate = _place(result, ladder)
            # these documents have chosen the budget, so their interval promises nothing
            quality = (
                replace(result.searched[candidate], low=math.nan) if result.promises else result.searched[candidate]
            )
            rows.append(_line(candidate, quality, full_bytes, "searched"))
    return rows


def _place(result: TuneResult, ladder: tuple[Candidate, ...]) -> Candidate:
    """Return the smallest measured candidate that reached the target, or else the largest one."""
    measured = [candidate for candidate in ladder if candidate in result.searched]
    enough = (candidate for candidate in measured if result.searched[candidate].share >= result.target)
    return next(enough, measured[-1])


def _verdict(result: TuneResult, one: Candidate, found: KeptQuality) -> str:
    """Return the last word of a confirmed candidate's line: ``chosen``, ``passes`` or ``fails``.

    Where nothing is promised, it says whether the share is at the target.
    """
    if one == result.found.chosen:
        return "chosen"
    if not result.promises:
        return "at the target" if found.share >= result.target else "below target"
    return "passes" if found.passes(result.target) else "fails"


def _line(one: Candidate, found: KeptQuality, full_bytes: int, verdict: str) -> tuple[str, ...]:
    """Return a candidate's line of the table, with a text for each of `COLUMNS`."""
    share = one.row_bytes / full_bytes
    return (
        one.arm.label,
        str(one.budget),
        show_bytes(one.row_bytes),
        f"{share:.0%}",
        _percent(found.share),
        _percent(found.low),
        verdict,
    )


def _percent(share: float) -> str:
    """Return a share in percent, rounded down, so that none looks as if it had reached a target that it missed."""
    # 1e-9: a share of whole tenths may be a little less in floats
    return "–" if math.isnan(share) else f"{math.floor(1000 * share + 1e-9) / 10:.1f}%"


def title(result: TuneResult, case: Case, kind: Kind) -> str:
    """Return the heading of the table: what is shown, and of how many questions or tokens in how many texts."""
    first, last = result.sizes.confirm
    left = result.asked - result.answered
    out = f"; {left} that the full cache cannot answer are left out" if kind == "answers" and left else ""
    units = "" if kind == "answers" else " in a single text" if last - first == 1 else f" in {last - first} texts"
    return f"{_MEANING[case]}, % of the full cache's, {result.answered} {_NOUN[kind]}{units}{out}"


def answer(result: TuneResult, full_bytes: int) -> str:
    """Return the answer in one sentence, for a search that has chosen a candidate."""
    one, found = result.found.chosen, result.found.kept
    assert one is not None
    assert found is not None
    setting, memory = f"{one.arm.label} with a budget of {one.budget}", show_bytes(one.row_bytes)
    size = f"{memory} per row: {one.row_bytes / full_bytes:.0%} of the full cache."
    if result.promises:
        return (
            f"{setting} keeps {_percent(found.share)} of the full cache's quality, at least {_percent(found.low)} with "
            f"95 % confidence, in {size}"
        )
    return f"{setting} kept {_percent(found.share)} of the full cache's quality here, in {size} {_doubt(result)}"


def _doubt(result: TuneResult) -> str:
    """Return why the questions or texts of a search are too few to promise the target, and how many it takes."""
    documents, answered = result.documents, result.answered
    if result.kind == "loss":
        texts = "A single text" if documents == 1 else f"{documents} texts"
        return (
            f"{texts} cannot promise {result.target:.4g}: it takes {LEAST_WINDOWS}. Raise `limit`, or give a longer "
            "`text` or a shorter `context`."
        )
    enough, among = needed(result.target, answered / documents)
    of_texts = f" about {among} texts" if enough > among else ""
    said = "One question" if answered == 1 else f"{answered} questions"
    shown = (
        f": if all are right, they show that {_percent(most(answered, documents))} or more is kept"
        if documents > 1
        else ""
    )
    return (
        f"{said} cannot promise {result.target:.4g}{shown}. That takes {enough} questions{of_texts} that the full "
        "cache answers."
    )


def weakness(result: TuneResult) -> str | None:
    """Return a note if the full cache answers less than `ABLE_PERCENT` % of the questions, so that the table says
    little; else ``None``.
    """
    if result.kind == "loss" or 100 * result.answered >= ABLE_PERCENT * result.asked:
        return None
    return (
        f"the full cache answers {result.answered} of {result.asked} questions, fewer than {ABLE_PERCENT:.0f} %: the "
        "model is too weak for them to show what eviction costs. Ask your own (`questions`), or `case=stream`."
    )


def failure(result: TuneResult) -> str:
    """Return the text of the error that no budget reaches the target, with the best confirmed candidate."""
    best = result.found.best
    found = result.found.confirmed[best]
    confidence = " with 95 % confidence" if result.promises else ""
    return (
        f"No budget keeps {100 * result.target:.4g} % of the full cache's quality{confidence}. The best finalist was "
        f"{best}: {_percent(found.share)}, at least {_percent(found.low)}. Give a lower target, more questions "
        "(`limit`) or larger `budgets`, or keep the full cache."
    )


def curve(result: TuneResult, full_bytes: int, case: Case) -> Panel:
    """Return a plot of the kept quality over the memory of a row: a line for each policy that was measured, and the
    target.
    """
    series = [
        _series(name, [candidate for candidate in ladder if candidate in result.searched], result, full_bytes)
        for ladder in result.ladders
        if ladder and any(candidate in result.searched for candidate in ladder)
        for name in [ladder[0].arm.label]
    ]
    goal = Series("target", x=[100.0], y=[100 * result.target], reference=True)
    return Panel(
        title=f"{_MEANING[case]}\n% of the full cache's; bars are 95 % intervals of the confirmation",
        x_label="memory of a row, % of the full cache's",
        series=[goal, *series],
        y_range=(None, 103.0),  # room for markers at 100
    )


def _series(name: str, measured: list[Candidate], result: TuneResult, full_bytes: int) -> Series:
    """Return a policy's kept share over its memory, both in percent, with intervals where it was confirmed."""
    confirmed = result.found.confirmed
    qualities = [
        confirmed.get(candidate, replace(result.searched[candidate], low=math.nan, high=math.nan))
        for candidate in measured
    ]
    return Series(
        name,
        x=[100 * candidate.row_bytes / full_bytes for candidate in measured],
        y=[100 * quality.share for quality in qualities],
        interval=[(100 * quality.low, 100 * quality.high) for quality in qualities],
    )


def config(found: SearchResult, model: str | None) -> Config:
    """Return the settings of the chosen candidate, which there has to be, as a configuration.

    Args:
        found: the result of the search.
        model: the model's name or folder; ``None`` for the embedded one.
    """
    one = found.chosen
    assert one is not None
    setup = {field.name: getattr(one.arm.setup, field.name) for field in fields(one.arm.setup)}
    rule, colon, file = (setup["head_budget"] or "").partition(":")
    if rule == "profile":
        # whoever reads the settings may stand in another folder
        setup["head_budget"] = rule + colon + os.path.abspath(in_full(file))
    return Config(model=model, policy=one.arm.policy, budget=one.budget, **setup)


def notes(result: TuneResult, case: Case, full_bytes: int) -> dict[str, str | int | float]:
    """Return how the chosen settings were found, for the table of notes in ``kvkeep.toml``: case, shares and bytes.

    A candidate must have been chosen.
    """
    one, found = result.found.chosen, result.found.kept
    assert one is not None
    assert found is not None
    return {
        "case": case,
        "target": result.target,
        "kept": round(found.share, 4),
        "at_least": round(found.low, 4),
        "measured_on": result.answered,
        "row_bytes": one.row_bytes,
        "full_bytes": full_bytes,
    }


def everything(result: TuneResult, full_bytes: int) -> dict[str, Any]:
    """Return all numbers of a search as plain data, for programs; a number that is not known is NaN."""
    chosen = result.found.chosen
    return {
        "target": result.target,
        "chosen": None if chosen is None else _plain(chosen, result.found.confirmed[chosen], full_bytes),
        "confirmed": [_plain(candidate, quality, full_bytes) for candidate, quality in result.found.confirmed.items()],
        "searched": [_plain(candidate, quality, full_bytes) for candidate, quality in result.searched.items()],
        "asked": result.asked,
        "answered": result.answered,
        "fresh": result.sizes.fresh,
        "promises": result.promises,
        "full_bytes": full_bytes,
    }


def _plain(one: Candidate, found: KeptQuality, full_bytes: int) -> dict[str, Any]:
    """Return a candidate, with the options that it names, and its quality as plain data; shares may be NaN."""
    return {
        "policy": one.arm.policy,
        **{name: value for name, value in asdict(one.arm.setup).items() if value is not None},
        "budget": one.budget,
        "row_bytes": one.row_bytes,
        "of_full": one.row_bytes / full_bytes,
        "kept": found.share,
        "at_least": found.low,
        "at_most": found.high,
        "measured_on": found.weight,
    }
