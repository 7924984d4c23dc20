"""What ``kvkeep fleet`` prints: a table for people, or plain data for programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvkeep.cli import console, plan_run
from kvkeep.errors import show_bytes, three_digits
from kvkeep.policies.registry import spec
from kvkeep_lab.fleet.load import FleetLoad
from kvkeep_lab.fleet.setup import Fleet
from kvkeep_lab.fleet.sizing import FleetResult
from kvkeep_lab.loadtest.percentiles import SHARES, spread

NAMES = ("kvkeep", "full cache in pages")

_FAR_OFF = 0.2
"""Relative error of a measured step's line from which on it is worth a note."""


class Loaded(NamedTuple):
    """A load, and how it is described."""

    load: FleetLoad
    words: str
    failed: int


def describe(fleet: Fleet, loaded: Loaded, ours: FleetResult, theirs: FleetResult) -> dict[str, Any]:
    """A simulation as plain data; times in seconds, sizes in bytes."""
    made, load = fleet.plan, loaded.load
    settings = {name: str(getattr(load, name)) for name in ("prompt_tokens", "new_tokens", "sessions")}
    settings |= {name: str(getattr(load, name)) for name in ("turns", "between")}
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
    """Seconds of the simulation times its devices."""
    return max(1e-9, found.log.seconds * found.simulated)


def notes(fleet: Fleet, loaded: Loaded, ours: FleetResult, theirs: FleetResult) -> list[str]:
    """What the user may not expect."""
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
        table.add_row(name, *("–" if one.devices is None else cell(one) for one in (ours, theirs)))
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
        "policy": f"{spec(setting.policy)}, budget {setting.budget}{bits}, {chunk}",
        "device": f"{', '.join([show_bytes(fleet.memory), *speeds])} ({fleet.device}); {how}",
        "load": loaded.words,
        "limits": f"{', '.join(limits)}, in 99 % of the answers",
    }


def _lines(fleet: Fleet, ours: FleetResult, theirs: FleetResult) -> dict[str, Callable[[FleetResult], str]]:
    """The lines of the table: the name of each, and its cell."""
    lines: dict[str, Callable[[FleetResult], str]] = {
        "devices": lambda one: f"{one.devices}",
        "rows of each": lambda one: f"{one.rows}" if one is ours else f"up to {one.rows}",
        "sequences at once, mean": lambda one: three_digits(one.log.row_s / _device_seconds(one)),
        "sequences at once, most": lambda one: f"{one.log.rows_most}",
        "memory of each": lambda one: show_bytes(one.memory_bytes),
    }
    for words, key in {"first token": "first_s", "time per token": "token_s"}.items():
        for share in (f"p{SHARES[0]:g}", f"p{SHARES[-1]:g}"):
            lines[f"{words}, {share}"] = _share_of(key, share)
    lines |= {
        "new tokens/s, all devices": lambda one: console.show_rate(
            one.log.new_tokens / _device_seconds(one) * (one.devices or 0)
        ),
        "busy": lambda one: f"{one.log.busy_s / _device_seconds(one):.0%}",
        "waiting at once, most": lambda one: f"{one.log.waiting_most}",
        "prompt tokens read again": lambda one: f"{one.log.reread_tokens / max(1, one.log.read_tokens):.0%}",
        "sequences interrupted": lambda one: f"{one.log.preempted / max(1, one.log.ended):.1%}",
    }
    if ours.log.kept_most:
        lines |= {
            "idle conversations, on each": lambda one: f"{one.log.kept_most}" if one is ours else "in free pages",
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
    """The cell of a percentile of the times that a log has under this name."""
    return lambda one: _time(spread(getattr(one.log, key)), share)


def _ours(ours: FleetResult, cell: Callable[[Any], str]) -> Callable[[FleetResult], str]:
    """A cell that the full cache has nothing for."""
    return lambda one: cell(one.log) if one is ours else "–"


def _flow(count: int, found: FleetResult) -> str:
    return f"{show_bytes(round(count / _device_seconds(found)))}/s"


def _time(values: dict[str, float] | None, share: str) -> str:
    if values is None:
        return "–"
    seconds = values[share]
    return f"{three_digits(1000 * seconds)} ms" if seconds < 1 else console.show_seconds(seconds)
