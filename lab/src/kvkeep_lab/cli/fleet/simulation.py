"""The work of ``kvkeep fleet``: read the load, simulate both caches, and print a table or JSON.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rich.text import Text

from kvkeep.cli import console
from kvkeep.errors import InputError
from kvkeep.models.device import parse_device
from kvkeep.models.load import quiet
from kvkeep.planning.bandwidth import measure_bandwidth
from kvkeep_lab.cli.fleet.options import FleetOptions
from kvkeep_lab.cli.fleet.table import Loaded, describe, show
from kvkeep_lab.fleet.device import Progress
from kvkeep_lab.fleet.load import FleetLoad
from kvkeep_lab.fleet.setup import Fleet
from kvkeep_lab.fleet.sizing import bounded, paged, plan_for
from kvkeep_lab.fleet.steps import read_steps
from kvkeep_lab.fleet.trace import Trace, read_trace
from kvkeep_lab.loadtest.lengths import Lengths

_LENGTHS = {
    "prompt_tokens": "128",
    "max_new_tokens": "64",
    "sessions": "1",
    "turns": "1",
    "between": "60",
}
_DRAWN = ("rate", "sessions", "turns", "between", "prompt_tokens", "max_new_tokens")
_KINDS = ("cpu", "cuda")


def serve(request: FleetOptions) -> None:
    """Simulate a fleet and print what happens.

    Raises:
        KVKeepError: an option, the trace or the model cannot be used, or no number of devices carries the load.
    """
    machines, asked = request.machines(), request.arguments()
    device, measure = request.device, request.measure
    if (file := machines.pop("steps", None)) is not None:
        machines["steps"] = read_steps(file)
    loaded = read_load(request.load())
    kind = _kind(device, machines, measure=measure)
    if measure:
        console.progress(f"measuring the memory of {device} …")
        asked["bandwidth"] = measure_bandwidth(parse_device(device)).best
    console.progress("reading the configuration of the model …")
    with quiet():
        made = plan_for(loaded.load, **asked)
    fleet = Fleet(plan=made, load=loaded.load, rows=request.rows, chunk=request.prefill_chunk, device=kind, **machines)
    with _shown("kvkeep") as progress:
        ours = bounded(fleet, progress)
    with _shown("a full cache in pages") as progress:
        theirs = paged(fleet, progress)
    if request.json:
        console.write_json(describe(fleet, loaded, ours, theirs))
    else:
        show(fleet, loaded, ours, theirs, file)


def read_load(given: dict[str, Any]) -> Loaded:
    """The load that options describe.

    Raises:
        InputError: they describe none, or two.
    """
    file = given["input"]
    trace = Trace((), (), 0) if file is None else read_trace(file)
    if trace.turns:
        if both := next((name for name in _DRAWN if given[name] is not None), None):
            raise InputError(f"`{both}` was given, and {file} is a trace with times that says it.")
        if given["requests"] is not None:
            raise InputError(f"`requests` was given, and {file} is a trace with times: all its messages are simulated.")
        words = f"{console.count(sum(map(len, trace.turns)), 'message')} of a trace"
        if len(trace.turns) < sum(map(len, trace.turns)):
            words += f", in {console.count(len(trace.turns), 'conversation')}"
    elif given["rate"] is None:
        raise InputError('A fleet needs an arrival `rate`, e.g. `rate=4`, or an `input` whose lines have times, "at".')
    else:
        words = _words(given, lines=bool(trace.lines))
    lengths = {name: Lengths.read(given[name] or text, name) for name, text in _LENGTHS.items()}
    load = FleetLoad(
        rate=1.0 if given["rate"] is None else given["rate"],
        prompt_tokens=lengths["prompt_tokens"],
        new_tokens=lengths["max_new_tokens"],
        sessions=lengths["sessions"],
        turns=lengths["turns"],
        between=lengths["between"],
        lines=trace.lines,
        trace=trace.turns,
    )
    load = replace(load, **{name: given[name] for name in ("requests", "seed") if given[name] is not None})
    return Loaded(load, words, trace.failed)


def _words(given: dict[str, Any], *, lines: bool) -> str:
    """A load that is drawn, in words."""
    said = {name: given[name] or text for name, text in _LENGTHS.items()}
    sessions = "" if said["sessions"] == "1" else f" with {said['sessions']} conversations each"
    lengths = "lengths of a file" if lines else f"{said['prompt_tokens']} + {said['max_new_tokens']} tokens"
    words = f"{given['rate']:g} users per second{sessions}, {lengths}"
    if said["turns"] == "1" and not sessions:
        return words
    return f"{words}, {said['turns']} turns, {said['between']} s between them"


def _kind(device: str, machines: dict[str, Any], *, measure: bool) -> str:
    """The type of the devices; they need not be here unless they are measured."""
    if device in _KINDS and not measure:
        return device
    if device == "auto" and "steps" in machines and machines["steps"].device in _KINDS:
        return str(machines["steps"].device)
    return parse_device(device).type


@contextmanager
def _shown(what: str) -> Iterator[Progress]:
    """Show how far a simulation is, on a terminal."""
    screen = console.err()
    status = screen.status("")
    try:

        def progress(share: float) -> None:
            if screen.is_terminal:
                status.update(Text(f"simulating {what}: {share:.0%}", "dim"))
                status.start()

        yield progress
    finally:
        status.stop()
