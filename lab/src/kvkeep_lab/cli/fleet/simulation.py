"""The work of ``kvkeep fleet``: read the load, simulate both caches, and print a table or JSON.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from rich.text import Text

from kvkeep.cli import console, plan_run
from kvkeep.errors import InputError, show_bytes, three_digits
from kvkeep.models.device import parse_device
from kvkeep.models.load import quiet
from kvkeep.planning.bandwidth import measure_bandwidth
from kvkeep.policies.registry import label, spec
from kvkeep_lab.cli.fleet.options import FleetOptions
from kvkeep_lab.fleet.device import Progress
from kvkeep_lab.fleet.load import FleetLoad, Trace, read_trace
from kvkeep_lab.fleet.setup import Fleet
from kvkeep_lab.fleet.sizing import FleetResult, bounded, paged, plan_for
from kvkeep_lab.fleet.steps import read_steps
from kvkeep_lab.loadtest.percentiles import SHARES, spread
from kvkeep_lab.loadtest.plan import Lengths, Line

_LENGTHS = {
    "prompt_tokens": "128",
    "max_new_tokens": "64",
    "sessions": "1",
    "turns": "1",
    "between": "60",
}
_DRAWN = ("rate", "sessions", "turns", "between", "prompt_tokens", "max_new_tokens")
_FIELDS = {"prompt_tokens": "prompt_tokens", "new_tokens": "max_new_tokens"}
"""What a line of a file may say, and the option for lines that do not."""
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
    """Return the load that options describe.

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
        for option in (_FIELDS[name] for name in _said_by(trace.lines)):
            if given[option] is not None:
                raise InputError(f"`{option}` was given, and every line of {file} says it.")
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


def _said_by(lines: Sequence[Line]) -> list[str]:
    """Return what every line of a file says; nothing without lines."""
    return [name for name in _FIELDS if lines and all(getattr(line, name) for line in lines)]


def _words(given: dict[str, Any], *, lines: bool) -> str:
    """Return a load that is drawn, in words."""
    said = {name: given[name] or text for name, text in _LENGTHS.items()}
    sessions = "" if said["sessions"] == "1" else f" with {said['sessions']} conversations each"
    lengths = "lengths of a file" if lines else f"{said['prompt_tokens']} + {said['max_new_tokens']} tokens"
    words = f"{given['rate']:g} users per second{sessions}, {lengths}"
    if said["turns"] == "1" and not sessions:
        return words
    return f"{words}, {said['turns']} turns, {said['between']} s between them"


def _kind(device: str, machines: dict[str, Any], *, measure: bool) -> str:
    """Return the type of the devices; they need not be here unless they are measured."""
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


# What the command prints: a table for people, or plain data for programs.

NAMES = ("kvkeep", "full cache in pages")

_FAR_OFF = 0.2
"""Relative error of a measured step's line from which on it is worth a note."""


class Loaded(NamedTuple):
    """A load, and how it is described."""

    load: FleetLoad
    words: str
    failed: int


def describe(fleet: Fleet, loaded: Loaded, ours: FleetResult, theirs: FleetResult) -> dict[str, Any]:
    """Return a simulation as plain data; times in seconds, sizes in bytes."""
    made, load = fleet.plan, loaded.load
    drawn = (*(name for name in _FIELDS if name not in _said_by(load.lines)), "sessions", "turns", "between")
    settings = {name: str(getattr(load, name)) for name in drawn}
    return {
        "model": made.setting.outline.name,
        "policy": spec(made.setting.policy),
        "budget": made.setting.budget,
        "kv_bits": made.setting.kv_bits,
        "memory_bytes": fleet.memory,
        "weights_bytes": made.bounded.weight_bytes,
        "bandwidth": made.bandwidth,
        "compute": fleet.compute,
        "device": fleet.device,
        "steps": "limits" if fleet.steps is None else {"measured": vars(fleet.steps)},
        "prefill_chunk": fleet.chunk,
        "load": {"words": loaded.words, **({} if load.trace else {"rate": load.rate, **settings})},
        "requests": load.requests if not load.trace else sum(map(len, load.trace)),
        "left_out": loaded.failed,
        "seed": load.seed,
        "limits": {"first_token_s": fleet.first_token, "per_token_s": fleet.per_token},
        "bounded": _describe(ours),
        "paged": _describe(theirs),
        "notes": notes(fleet, loaded, ours, theirs),
    }


def _describe(found: FleetResult) -> dict[str, Any]:
    log = found.log
    if found.devices is None:
        return {"devices": None, "reason": found.reason}
    seconds = _device_seconds(found)
    return {
        "devices": found.devices,
        "keeps_the_limits": found.carried,
        "simulated_devices": found.simulated,
        "rows": found.rows,
        "rows_used_mean": log.row_s / seconds,
        "rows_used_most": log.rows_most,
        "memory_bytes": found.memory_bytes,
        "first_token_s": spread(log.first_s),
        "per_token_s": spread(log.token_s),
        "new_tokens_per_s": log.new_tokens / seconds * found.devices,
        "read_tokens_per_s": log.read_tokens / seconds * found.devices,
        "read_again": log.reread_tokens / max(1, log.read_tokens),
        "busy": log.busy_s / seconds,
        "waiting_most": log.waiting_most,
        "interrupted": log.preempted,
        "messages": log.ended,
        "rows_to_host_bytes_per_s": log.row_bytes / seconds,
        "host_to_disk_bytes_per_s": log.disk_bytes / seconds,
        "host_bytes": log.host_most * found.row_bytes,
        "disk_bytes": (log.kept_most - log.host_most) * found.row_bytes,
        "conversations_kept": log.kept_most,
    }


def _device_seconds(found: FleetResult) -> float:
    """Return the seconds of the simulation times its devices."""
    return max(1e-9, found.log.seconds * found.simulated)


def notes(fleet: Fleet, loaded: Loaded, ours: FleetResult, theirs: FleetResult) -> list[str]:
    """Return what the user may not expect."""
    said = [line for line in plan_run.notes(fleet.plan) if "nothing is evicted" not in line]
    if fleet.steps is not None and fleet.steps.error > _FAR_OFF:
        said.append(f"the lines through the measured steps are off by up to {fleet.steps.error:.0%}.")
    if fleet.steps is not None and not fleet.steps.decode[2]:
        said.append(
            "the measured steps do not tell what a slot costs; a step of the full cache counts as one of kvkeep's."
        )
    if loaded.failed:
        said.append(f"{console.count(loaded.failed, 'request')} of the trace failed there and are left out.")
    for name, one in zip(NAMES, (ours, theirs), strict=True):
        if one.reason:
            said.append(f"{name}: {one.reason}")
        elif not one.carried:
            said.append(f"{name}: the limits are missed with {console.count(one.devices or 0, 'device')}.")
    return said


def show(fleet: Fleet, loaded: Loaded, ours: FleetResult, theirs: FleetResult, file: str | None) -> None:
    """Print the table for people."""
    screen = console.out()
    screen.print(console.facts(_head(fleet, loaded, file)))
    screen.print()
    table = console.table("", *NAMES)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, cell in _lines(fleet, ours, theirs).items():
        table.add_row(name, *("–" if result.devices is None else cell(result) for result in (ours, theirs)))
    screen.print(table)
    for line in notes(fleet, loaded, ours, theirs):
        console.note(line)


def _head(fleet: Fleet, loaded: Loaded, file: str | None) -> dict[str, str]:
    made = fleet.plan
    setting, limits = made.setting, [f"first token within {fleet.first_token:g} s"]
    if fleet.per_token is not None:
        limits.append(f"{console.show_seconds(fleet.per_token)} per token")
    speeds = [] if made.bandwidth is None else [f"{show_bytes(round(made.bandwidth))}/s"]
    speeds += [] if fleet.compute is None else [f"{three_digits(fleet.compute / 1e12)} TFLOP/s"]
    how = "steps at these limits" if file is None else f"steps measured, {file}"
    chunk = "prompts read whole" if fleet.chunk is None else f"chunks of {fleet.chunk}"
    bits = "" if setting.kv_bits is None else f", kv_bits {setting.kv_bits}"
    return {
        "model": setting.outline.name,
        "policy": f"{label(setting.policy)}, budget {setting.budget}{bits}, {chunk}",
        "device": f"{', '.join([show_bytes(fleet.memory), *speeds])} ({fleet.device}); {how}",
        "load": loaded.words,
        "limits": f"{', '.join(limits)}, in 99 % of the answers",
    }


def _lines(fleet: Fleet, ours: FleetResult, theirs: FleetResult) -> dict[str, Callable[[FleetResult], str]]:
    """Return the lines of the table: the name of each, and its cell."""
    lines: dict[str, Callable[[FleetResult], str]] = {
        "devices": lambda result: f"{result.devices}",
        "rows of each": lambda result: f"{result.rows}" if result is ours else f"up to {result.rows}",
        "sequences at once, mean": lambda result: three_digits(result.log.row_s / _device_seconds(result)),
        "sequences at once, most": lambda result: f"{result.log.rows_most}",
        "memory of each": lambda result: show_bytes(result.memory_bytes),
    }
    for words, key in {"first token": "first_s", "time per token": "token_s"}.items():
        for share in (f"p{SHARES[0]:g}", f"p{SHARES[-1]:g}"):
            lines[f"{words}, {share}"] = _share_of(key, share)
    lines |= {
        "new tokens/s, all devices": lambda result: console.show_rate(
            result.log.new_tokens / _device_seconds(result) * (result.devices or 0)
        ),
        "busy": lambda result: f"{result.log.busy_s / _device_seconds(result):.0%}",
        "waiting at once, most": lambda result: f"{result.log.waiting_most}",
        "prompt tokens read again": lambda result: f"{result.log.reread_tokens / max(1, result.log.read_tokens):.0%}",
        "sequences interrupted": lambda result: f"{result.log.preempted / max(1, result.log.ended):.1%}",
    }
    if ours.log.kept_most:
        lines |= {
            "idle conversations, on each": lambda result: (
                f"{result.log.kept_most}" if result is ours else "in free pages"
            ),
            "in main memory of each": _ours(ours, lambda log: show_bytes(log.host_most * ours.row_bytes)),
            "rows ↔ main memory": _ours(ours, lambda log: _flow(log.row_bytes, ours)),
        }
        if fleet.host_memory is not None:
            lines["on the disk of each"] = _ours(
                ours, lambda log: show_bytes((log.kept_most - log.host_most) * ours.row_bytes)
            )
            lines["main memory ↔ disk"] = _ours(ours, lambda log: _flow(log.disk_bytes, ours))
    return lines


def _share_of(key: str, share: str) -> Callable[[FleetResult], str]:
    """Return the cell of a percentile of the times that a log has under this name."""
    return lambda result: _time(spread(getattr(result.log, key)), share)


def _ours(ours: FleetResult, cell: Callable[[Any], str]) -> Callable[[FleetResult], str]:
    """Return a cell that the full cache has nothing for."""
    return lambda result: cell(result.log) if result is ours else "–"


def _flow(count: int, found: FleetResult) -> str:
    return f"{show_bytes(round(count / _device_seconds(found)))}/s"


def _time(values: dict[str, float] | None, share: str) -> str:
    if values is None:
        return "–"
    seconds = values[share]
    return f"{three_digits(1000 * seconds)} ms" if seconds < 1 else console.show_seconds(seconds)
