"""Decode, eviction and prefill on a GPU: how near to what the memory allows, and to transformers?

    python bench/gpu.py [--out gpu.json]                # all parts; no cell begins after --limit-s, 400 seconds
    python bench/gpu.py --only a,d                      # some
    python bench/gpu.py --only b --out gpu.json         # adds to what the file has
    python bench/gpu.py --dry-run                       # tiny shapes on a CPU: does the script run?

Parts: (k) are the kernels right on this device, (a) bandwidth of the decode kernel, (b) decode steps of an 8 B-shaped
random Llama, (c) what eviction adds to a layer's step, (d) what a report adds to a prompt's attention, (e) throughput,
(f) speed over the length of the history, (h) attention over slots of 8 and 4 bits. They run in the order k, a, h, c, d,
b, f, e. With --out every part is written when it is done and is not done again, unless --only names it. Without a CUDA
device the exit code is 2.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch
from lib import finish, show
from lib import gpu as shared
from lib import gpu_check as check
from lib import gpu_codes as codes
from lib import gpu_layer as layer
from lib import gpu_model as model

from kvkeep.backends.triton import launch
from kvkeep.result_files import write_whole

PARTS = {
    "k": (check, check.check),
    "a": (layer, layer.bandwidth),
    "h": (codes, codes.codes),
    "c": (layer, layer.overhead),
    "d": (layer, layer.prefill),
    "b": (model, model.decode),
    "f": (model, model.histories),
    "e": (model, model.throughput),
}

REFUSED = 2


def letters(text: str) -> list[str]:
    """``a,b``: some of the parts."""
    found = [one for one in text.replace(",", "") if one in PARTS]
    if not found or len(found) < len(text.replace(",", "")):
        raise argparse.ArgumentTypeError(f"{text!r}: name parts as in a,b; there are {','.join(sorted(PARTS))}")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=letters, help="parts to do, even if --out has them, for example a,b")
    parser.add_argument("--out", type=Path, help="file that collects the parts")
    parser.add_argument(
        "--limit-s", type=float, default=400.0, help="no cell begins later; the last takes up to two minutes"
    )
    parser.add_argument("--slice-s", type=float, help="in part e: no step begins later; 45 seconds if not given")
    parser.add_argument("--compile", action="store_true", help="in part b: compiled layers beside plain ones")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    return parser.parse_args()


def earlier(path: Path | None, device: str) -> dict:
    """What a file has from before, if it is from this device."""
    if path is None or not path.exists():
        return {}
    data = json.loads(path.read_text())
    return data["parts"] if data["device"] == device else {}


def targets(parts: dict) -> dict[str, dict]:
    """The project's targets, where they were measured."""
    found = {}

    def say(name: str, value: float | None, *, least: float | None = None, most: float | None = None) -> None:
        if value is not None:
            met = value >= least if least is not None else value <= most
            found[name] = {"measured": value, "target": least if least is not None else most, "met": met}

    shares = [one["share"] for one in parts.get("a", []) if one["rows"] >= 64 and one["slots"] >= 1024]
    say("decode kernel, share of the copy bandwidth at 64 x 1024 and more", min(shares, default=None), least=0.75)
    ratios = {one["name"]: one["vs local"] for one in parts.get("c", [])}
    say("h2o over local, one layer", ratios.get("h2o"), most=1.05)
    bounded = [one for one in parts.get("b", []) if one["name"] == "kvkeep h2o"]
    say("decode MBU, best budget", max((one["mbu"] for one in bounded), default=None), least=0.65)
    ours = [one["tokens_per_s"] for one in bounded if one["attended"] == 1025]
    theirs = [
        one["tokens_per_s"] for one in parts.get("b", []) if one["name"] in model.DENSE and one["attended"] == 32769
    ]
    say("budget 1024 over the best dense at 32k, times", ours[0] / max(theirs) if ours and theirs else None, least=20)
    reports = [one["vs SDPA"]["SDPA + window"] for one in parts.get("d", [])]
    say("report of a window over SDPA alone", max(reports, default=None), most=1.25)
    reports = [one["vs SDPA"]["SDPA + all rows"] for one in parts.get("d", []) if "SDPA + all rows" in one["vs SDPA"]]
    say("report of all rows over SDPA alone", max(reports, default=None), most=1.6)
    for bits, least in (("8", 1.6), ("4", 2.2)):
        faster = [one["faster"] for one in parts.get("h", []) if one["bits"] == bits and one["rows"] >= 64]
        say(f"slots of {bits} bits over 16 at 64 rows and more", min(faster, default=None), least=least)
    return found


def measure(bench: shared.Bench, wanted: list[str], parts: dict, save) -> None:
    """Do the parts; one that fails says so and lets the others be done."""
    for name in wanted:
        room, run = PARTS[name]
        start = time.monotonic()
        found = []
        with bench.survives(name):
            found = run(bench)
        if not found:
            continue
        title, columns, rows = room.lines(name, found, bench)
        show(f"{title}; took {time.monotonic() - start:.0f} s", columns, rows)
        parts[name] = found
        save()


def main() -> int:
    options = arguments()
    if not options.dry_run and not torch.cuda.is_available():
        print(
            "bench/gpu.py needs a CUDA device, and torch sees none. --dry-run tries the script on a CPU.",
            file=sys.stderr,
        )
        return REFUSED
    device = torch.device("cpu" if options.dry_run else "cuda")
    name = "dry run" if options.dry_run else torch.cuda.get_device_name(device)
    sizes = shared.DRY if options.dry_run else shared.FULL
    if options.slice_s is not None:
        sizes = replace(sizes, slice_s=options.slice_s)
    bench = shared.Bench(device, sizes, end=time.monotonic() + options.limit_s, compile=options.compile)
    parts = earlier(options.out, name)
    wanted = [one for one in PARTS if one in options.only] if options.only else [p for p in PARTS if p not in parts]
    print(f"{name}: {bench.copy_speed / 1e9:.0f} GB/s copied; kernels: {launch.kernels().detail}")

    def data() -> dict:
        return {
            "bench": "gpu",
            "device": name,
            "copy_bytes_per_s": bench.copy_speed,
            "kernels": launch.kernels().detail,
            "triton": next((one.version for one in metadata.distributions(name="triton")), None),
            "cuda": torch.version.cuda,
            "parts": parts,
            "targets": targets(parts),
            "notes": bench.notes,
        }

    def save() -> None:
        if options.out is not None:
            write_whole(options.out, json.dumps(data()).encode())

    measure(bench, wanted, parts, save)
    rows = [
        [name, f"{one['measured']:.2f}", f"{one['target']}", "yes" if one["met"] else "no"]
        for name, one in targets(parts).items()
    ]
    show("targets, where they were measured", ["", "measured", "target", "met"], rows, bench.notes)
    finish(data())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
