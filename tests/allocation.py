"""What tensors take, by the count of torch's own allocator for the CPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that exist at once during some work, beyond what existed before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    found = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    totals = [event["args"]["Total Allocated"] for event in found]
    return max(totals) - (totals[0] - found[0]["args"]["Bytes"])
