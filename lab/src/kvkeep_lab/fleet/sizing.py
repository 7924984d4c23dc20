"""How many devices a load needs, and what happens on them: kvkeep's cache beside a paged full cache.

    load = FleetLoad(rate=4, prompt_tokens=Lengths.read("~200", "x"), new_tokens=Lengths.read("~150", "x"))
    fleet = Fleet(plan=plan_for(load, "Qwen/Qwen3-0.6B", memory=24 * 2**30, bandwidth=1e12), load=load)
    bounded(fleet).devices, paged(fleet).devices

``docs/fleet.md`` says what is simulated and what is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvkeep.engine.scheduler import MIXED_TOKENS, pace_of
from kvkeep.errors import InputError
from kvkeep.planning.cost import full_prompt_bytes, full_step_bytes
from kvkeep.planning.plan import Plan, plan
from kvkeep_lab.fleet.bounded import Bounded, DeviceRows
from kvkeep_lab.fleet.device import Device, Log, Progress
from kvkeep_lab.fleet.load import LEAST_RATE, MOST_THINKING, Arrivals, FleetLoad
from kvkeep_lab.fleet.paged import PAGE, Paged, Pages, TooLongError
from kvkeep_lab.fleet.setup import MOST_DEVICES, Fleet
from kvkeep_lab.fleet.steps import Limits, Steps
from kvkeep_lab.loadtest.percentiles import percentile

_QUIET = 1e-5
"""Users per second that no device feels."""


@dataclass(frozen=True)
class FleetResult:
    """What devices of one kind do under a load.

    Attributes:
        devices: their number; ``None`` if no number carries the load.
        rows: the most sequences at once on each.
        log: what was noted on one device, or on all together for a trace.
        simulated: devices of which the log is, those of a trace that have nothing to do among them.
        carried: whether the limits are kept.
        memory_bytes: the most of a device's memory that is taken.
        row_bytes: of an idle conversation in main memory.
        reason: why no number carries it.
    """

    devices: int | None
    rows: int
    log: Log
    simulated: int = 1
    carried: bool = True
    memory_bytes: int = 0
    row_bytes: int = 0
    reason: str | None = None


Make = Callable[[Arrivals], Device]


def plan_for(load: FleetLoad, model: Any = None, *, context: int | None = None, **options: Any) -> Plan:
    """Return a plan whose rows are as long as the conversations of a load; arguments as for `plan`.

    Prompts are read in chunks of the longest message, unless ``prefill_chunk`` is given.

    Args:
        load: what comes.
        model: a name, a folder or an outline.
        context: tokens of a row in place of that.
        options: further arguments of `plan`.

    Raises:
        KVKeepError: as for `plan`.
    """
    pool = load.pool
    longest = max(talk.total for talk in pool)
    message = max(turn.prompt for talk in pool for turn in talk.turns)
    if options.get("prefill_chunk") is None and message < longest:
        options["prefill_chunk"] = message  # a turn reads its message, not the whole conversation
    return plan(model, context=context or longest, **options)


def bounded(fleet: Fleet, progress: Progress | None = None) -> FleetResult:
    """Simulate kvkeep under a load, and return what its devices do.

    Raises:
        InputError: no number of devices carries the load, the rows do not fit, or too many conversations are open
            on one device.
    """
    made, setting = fleet.plan, fleet.plan.setting
    row_bytes, slots = made.bounded.row_bytes, setting.budget + 1
    rows = DeviceRows(
        count=fleet.row_count,
        slots=slots,
        row_bytes=row_bytes,
        chunk=fleet.chunk,
        decode_every=fleet.decode_every or pace_of(fleet.device),
        mixed_tokens=MIXED_TOKENS.get(fleet.device, 0),
        copy_s=row_bytes / fleet.bus,
        disk_s=row_bytes / fleet.disk,
        host_rows=None if fleet.host_memory is None else fleet.host_memory // row_bytes,
    )
    steps = _steps(fleet, row_bytes / slots)
    start = fleet.load.counted_from
    found = _search(fleet, lambda come: Bounded(steps, come, rows, counted_from=start), steps, rows.count, progress)
    if found.devices is None:
        raise InputError(f"No number of devices carries this load: {found.reason}")
    return replace(found, memory_bytes=made.bounded.peak_bytes(rows.count), row_bytes=row_bytes)


def paged(fleet: Fleet, progress: Progress | None = None) -> FleetResult:
    """Simulate a full cache in pages in the same memory, and return what its devices do.

    If a conversation does not fit, or no number of devices carries the load, the result has no devices and a reason.

    Raises:
        InputError: too many conversations are open on one device.
    """
    made, setting = fleet.plan, fleet.plan.setting
    shape, size = setting.outline.shape, setting.dtype.itemsize
    pages = Pages(
        space=max(0, fleet.memory - made.full.weight_bytes),
        page_bytes=PAGE * setting.token_bytes,
        prompt_bytes=full_prompt_bytes(shape, fleet.paged_tokens, size),
        step_bytes=full_step_bytes(shape, size),
        step_tokens=fleet.paged_tokens,
    )
    steps = _steps(fleet, float(setting.token_bytes))
    start = fleet.load.counted_from
    try:
        found = _search(fleet, lambda come: Paged(steps, come, pages, counted_from=start), steps, pages.rows, progress)
    except TooLongError as error:
        reason = f"a conversation reaches {error.tokens} tokens, and a device has room for {error.room}."
        return FleetResult(None, 0, Log(), carried=False, reason=reason)
    return replace(found, memory_bytes=made.full.weight_bytes + found.log.used_bytes)


def _steps(fleet: Fleet, slot_bytes: float) -> Steps:
    """Return what runs cost with slots of this size."""
    if fleet.steps is not None:
        return fleet.steps
    assert fleet.plan.bandwidth is not None
    return Limits.of(
        fleet.plan.bounded,
        slot_bytes,
        bandwidth=fleet.plan.bandwidth,
        compute=fleet.compute,
        device=fleet.device,
    )


def _search(fleet: Fleet, make: Make, steps: Steps, rows: int, progress: Progress | None) -> FleetResult:
    """Return the result of the smallest number of devices that carries the load, or of the number that is asked for.

    A trace is dealt out anew to each number of devices, so a smaller number may happen to bear it although the number
    below the found one does not. Nothing but trying all of them would tell.
    """
    if fleet.devices is not None:
        return _tried(fleet, make, fleet.devices, rows, progress, whole=True)
    load = fleet.load
    most = len(load.trace) or MOST_DEVICES
    pace = min(load.rate, _QUIET, max(LEAST_RATE, 1.0 / (1.0 + load.waiting_s)))
    quiet = load if load.trace else replace(load, rate=pace, requests=min(load.requests, 400))
    alone = _tried(replace(fleet, load=quiet), make, most if load.trace else 1, rows, progress, whole=True)
    if not alone.carried:
        return replace(alone, devices=None, reason=_too_slow(fleet, alone.log))
    low = max(0, math.ceil(load.open_talks / MOST_THINKING) - 1)  # of so few devices, none can be simulated
    high = low + 1 if load.trace else max(low + 1, _guess(fleet, steps, rows))
    while not (found := _tried(fleet, make, min(high, most), rows, progress)).carried:
        if high >= most:
            return replace(found, devices=None, reason=f"{most} are not enough.")
        low, high = high, max(high + 1, 2 * high)
    high = min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        tried = _tried(fleet, make, middle, rows, progress)
        low, high, found = (low, middle, tried) if tried.carried else (middle, high, found)
    return found


def _guess(fleet: Fleet, steps: Steps, rows: int) -> int:
    """Estimate how many devices have the time for all prompts and answers; fewer may do if these share runs."""
    load, pool = fleet.load, fleet.load.pool
    turns = [turn for talk in pool for turn in talk.turns]
    prompt = sum(turn.prompt for turn in turns) / len(turns)
    new = sum(turn.new for turn in turns) / len(turns)
    many = 2**16
    read_s = steps.seconds(0, 0.0, many) / many
    step_s = steps.seconds(rows, 0.0) / rows
    least = 0.9 * load.turns_per_s() * (prompt * read_s + (new - 1) * step_s)
    return max(1, min(MOST_DEVICES, math.floor(least)))


def _tried(
    fleet: Fleet, make: Make, devices: int, rows: int, progress: Progress | None, *, whole: bool = False
) -> FleetResult:
    """Return what happens with a number of devices.

    Args:
        whole: whether the simulation goes to its end also when the limits are missed.
    """
    load, log = fleet.load, Log()
    places = min(devices, len(load.trace)) if load.trace else 1  # the other devices have nothing to do
    counted = (sum(map(len, load.trace)) or load.requests) - load.counted_from
    late_left = counted // 100
    for place in range(places):
        come = Arrivals(load, devices, place)
        hopeless = None if whole else (fleet.first_token, late_left)
        share = partial(_share, progress, place, places) if progress else None
        one = make(come).run(hopeless=hopeless, progress=share)
        log = _joined(log, one)
        if one.hopeless:
            break
        late_left -= sum(first > fleet.first_token for first in one.first_s)
    return FleetResult(devices, rows, log, devices if load.trace else 1, _is_carried(fleet, log))


def _share(progress: Progress, place: int, places: int, part: float) -> None:
    progress((place + part) / places)


def _joined(one: Log, other: Log) -> Log:
    """Return what happened on devices side by side."""
    made = Log()
    for name, value in vars(one).items():
        also = getattr(other, name)
        most = name.endswith("_most") or name in ("seconds", "used_bytes", "hopeless")
        setattr(made, name, max(value, also) if most else value + also)
    return made


def _is_carried(fleet: Fleet, log: Log) -> bool:
    if log.hopeless:
        return False
    if log.first_s and percentile(sorted(log.first_s), 99.0) > fleet.first_token:
        return False
    return fleet.per_token is None or not log.token_s or percentile(sorted(log.token_s), 99.0) <= fleet.per_token


def _too_slow(fleet: Fleet, log: Log) -> str:
    """Return why a load is not carried that hardly uses a device."""
    first = percentile(sorted(log.first_s), 99.0)
    if first > fleet.first_token:
        return (
            f"without other requests the first token takes {first:.3g} s in 1 % of the answers, and `first_token` is "
            f"{fleet.first_token:g} s. Allow more, or shorten the prompts."
        )
    token = percentile(sorted(log.token_s), 99.0)
    return (
        f"without other requests a token takes {token:.3g} s in 1 % of the answers, and `per_token` is "
        f"{fleet.per_token:g} s. Allow more, or take a smaller `budget` or fewer bits."
    )
