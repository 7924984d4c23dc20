"""What ``kvkeep calibrate`` prints about a profile."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from kvkeep.cli import console
from kvkeep.cli.calibrate.request import Request
from kvkeep.head_profile import Profile

_FEW = 8
"""Heads of a layer whose needs are shown with two digits; more are shown in tenths."""

_ENOUGH = 12
"""Questions that say something."""

_SMALL = 0.005


def show(request: Request, profile: Profile) -> None:
    """Print the needs of the heads, and what can be limited together; or everything as JSON."""
    if (doubt := _doubt(profile)) is not None:
        console.note(doubt)
    if request.json:
        console.write_json({"file": str(request.output), **profile.as_dict()})
        return
    screen = console.out()
    screen.print(_needs(profile))
    screen.print()
    if together := profile.measured.get("together"):
        screen.print(_together(together))
        screen.print()
    screen.print(console.facts(_facts(request, profile)))


def _doubt(profile: Profile) -> str | None:
    """A reason why the profile says less than it seems to; ``None`` if there is none."""
    known, asked = profile.measured.get("known", 0), profile.measured.get("questions", 0)
    if not any(map(any, profile.heads)):
        return "no head needs the far past here, so all get the same budget. Try a longer or another text."
    if asked and known < _ENOUGH:
        how = "alone" if known == 0 else "for the most part"
        return (
            f"with the full cache the model answers {known} of {asked} questions about planted facts, so the needs "
            f"rest on the text {how}."
        )
    return None


def _needs(profile: Profile) -> Table:
    """The needs: a row for each layer."""
    if len(profile.heads[0]) <= _FEW:
        filled = console.table("layer", *(f"head {head}" for head in range(len(profile.heads[0]))))
        for layer, row in enumerate(profile.heads):
            filled.add_row(str(layer), *("–" if need == 0 else f"{need:.2f}" for need in row))
        return filled
    filled = console.table("layer", "need of each head, in tenths")
    for layer, row in enumerate(profile.heads):
        filled.add_row(str(layer), " ".join("–" if need == 0 else f"{10 * need:.0f}" for need in row))
    return filled


def _together(steps: list[dict[str, Any]]) -> Table:
    """The harm of limiting more and more heads together."""
    filled = console.table("heads limited together", "answers lost", "KL on the text")
    for step in steps:
        lost = "–" if step["answers"] is None else f"{100 * step['answers']:.1f} %"
        filled.add_row(str(step["heads"]), lost, f"{step['text']:.4f} nats")
    return filled


def _facts(request: Request, profile: Profile) -> dict[str, str]:
    measured, everything = profile.measured, [need for layer in profile.heads for need in layer]
    idle = sum(need <= _SMALL for need in everything)
    found = {
        "heads": f"{idle} of {len(everything)} need nothing but {profile.least} first and newest tokens",
        "profile": str(request.output),
    }
    if measured.get("questions"):
        known = f"{measured['known']} of {console.count(measured['questions'], 'question')}"
        return {"answers": f"{known} right under the full cache", **found}
    return found
