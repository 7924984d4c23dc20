"""The work of ``kvkeep calibrate``: check everything, load the model, measure, and write the profile.

Bad input is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from kvkeep.calibration import duo_attention, triattention
from kvkeep.calibration.calibrate import QUICK, Calibration, CalibrationFile, CalibrationSettings, calibrate
from kvkeep.cli import console
from kvkeep.cli.calibrate import CalibrateOptions
from kvkeep.cli.files import read_text
from kvkeep.cli.loading import check_weights, writer_of
from kvkeep.cli.progress import resumable, staged
from kvkeep.errors import InputError
from kvkeep.head_profile import Profile
from kvkeep.models import threads
from kvkeep.models.files import cached_if_unreachable, locate
from kvkeep.models.load import find, quiet, read_config
from kvkeep.models.tiny import embedded

# What ``kvkeep calibrate`` prints about a profile.

_FEW = 8
"""Heads of a layer whose needs are shown with two digits; more are shown in tenths."""

_ENOUGH = 12
"""Right answers from which needs can be told; with fewer they rest on the text."""

_SMALL = 0.005  # shown as 0.00


def show(request: CalibrateOptions, profile: Profile) -> None:
    """Print the needs of the heads and what can be limited together, as tables; with ``--json`` the whole profile."""
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
    """Return a reason why the profile says less than it seems to; ``None`` if there is none."""
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
    """Return a table of the heads' needs of the far past (0 to 1), a row for each layer; a dash is a need of 0."""
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
    """Return a table of what it costs, in answers and in KL, to limit so many heads together; a row for each number."""
    filled = console.table("heads limited together", "answers lost", "KL on the text")
    for step in steps:
        lost = "–" if step["answers"] is None else f"{100 * step['answers']:.1f} %"
        filled.add_row(str(step["heads"]), lost, f"{step['text']:.4f} nats")
    return filled


def _facts(request: CalibrateOptions, profile: Profile) -> dict[str, str]:
    """Return the lines below the tables, name → text: right answers, number of heads without needs, profile's file."""
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


EMBEDDED = "the embedded model"


def serve(request: CalibrateOptions) -> None:
    """Measure a model or import a pattern, write the profile or the statistics of queries, and print a summary.

    Raises:
        KVKeepError: the request or the model cannot be used, or the profile cannot be written.
        Exit: the user pressed Ctrl-C; finished layers are safe.
    """
    duo_pattern = request.from_duo
    try:
        with quiet(), threads.restored():
            if request.purpose == "triattention":
                _write_queries(request)
                return
            profile = _measure(request) if duo_pattern is None else _import(request, duo_pattern)
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(console.INTERRUPTED) from interrupt
    show(request, profile)


def _import(request: CalibrateOptions, path: str) -> Profile:
    """Write a profile made from a pattern of DuoAttention, and return it.

    Raises:
        InputError: a text was given, no model was, or the pattern cannot be read.
    """
    if request.text is not None:
        raise InputError("--from-duo measures nothing, so --text has no use. Leave one of them out.")
    if request.model is None:
        raise InputError("--from-duo needs the MODEL that the pattern was trained for; only its configuration is read.")
    name = locate(request.model)
    with cached_if_unreachable(name):
        config = read_config(name)
    profile = duo_attention.imported(path, config, name=request.model, sparsity=request.sparsity)
    _save(profile, request)
    return profile


def _measure(request: CalibrateOptions) -> Profile:
    """Measure every head, write the profile and return it. Layers that a stopped run has finished are not run again."""
    job = prepare(request)
    for note in job.notes():
        console.note(note)
    part_path = request.output.with_name(request.output.name + ".part")
    with resumable(lambda: _stopped(part_path)), CalibrationFile.open(part_path) as part:
        writer = writer_of(job.checkpoint, request)
        with staged() as on_stage:
            profile = calibrate(job, writer, part, on_stage)
        _save(profile, request)
        part.remove()
    return profile


def _write_queries(request: CalibrateOptions) -> None:
    """Measure the mean queries of every head, write TriAttention's file, and print a summary."""
    job = prepare(replace(request, documents=0))  # documents hold planted facts, for needs of heads alone
    for note in job.notes():
        console.note(note)
    texts = [passage.ids for passage in job.windows]
    writer = writer_of(job.checkpoint, request)
    content = triattention.statistics(writer, texts)
    # again: such a file may have come into being while the model ran
    request.check_output()
    triattention.save(content, request.output)
    heads, tokens = len(content["stats"]), sum(map(len, texts))
    if request.json:
        console.write_json({"file": str(request.output), "heads": heads, "tokens": tokens, **content["metadata"]})
        return
    console.out().print(
        console.facts(
            {
                "queries": f"{heads} heads, means over {console.count(tokens, 'token')} of {len(texts)} texts",
                "use": f"--policy triattention:calibration={request.output}",
            }
        )
    )


def prepare(request: CalibrateOptions) -> Calibration:
    """Check a request, cheap tests first, and return the calibration that it asks for, which has not been run.

    No weights are read.

    Raises:
        KVKeepError: the request or the model cannot be used.
    """
    if request.sparsity is not None:
        raise InputError("--sparsity belongs to --from-duo. A measured profile has each head's own number.")
    text = None
    if request.text is not None:
        text = read_text(request.text, kind="text file", purpose="Give some text to calibrate on with --text FILE.")
    settings = _settings(request)
    check_weights(request)
    name = request.model or embedded()
    console.progress(f"loading {name} …")
    checkpoint = find(name, allow_pickle=request.allow_pickle)
    if request.context is None and checkpoint.trained_length is not None:
        settings = replace(settings, context=min(settings.context, checkpoint.trained_length))
    return Calibration(model=request.model or EMBEDDED, checkpoint=checkpoint, text=text, settings=settings)


def _settings(request: CalibrateOptions) -> CalibrationSettings:
    """Return the settings that the options give, before texts are cut to the model's trained length.

    Raises:
        InputError: a number is out of range, or there is no such case.
    """
    given = {"context": request.context, "documents": request.documents}
    return CalibrationSettings(
        sinks=request.sinks,
        recent=request.recent,
        case=request.case,
        seed=request.seed,
        **{**(QUICK if request.quick else {}), **{name: n for name, n in given.items() if n is not None}},
    )


def _save(profile: Profile, request: CalibrateOptions) -> None:
    """Write the profile, after another check that it overwrites nothing: the file may be new since the first one."""
    request.check_output()
    profile.save(request.output)


def _stopped(part: Path) -> str:
    """Return the note to print after Ctrl-C: where finished layers are kept, or that nothing was written."""
    if not part.exists():
        return "stopped; nothing was written"
    return f"stopped. Finished layers are in {part}; run the same command again to go on."
