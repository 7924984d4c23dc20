"""Health, metrics and sessions of several replicas as one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def health(found: Mapping[str, Mapping[str, Any]], *, draining: bool) -> tuple[dict[str, Any], int]:
    """The health of all replicas: sums of rows, and each replica's own; and the status of the answer.

    Args:
        found: replica → its health.
        draining: whether the router is about to end.
    """
    ready = any(one["status"] == "ready" for one in found.values()) and not draining
    sums = {name: sum(one[name] for one in found.values()) for name in ("rows", "rows_free", "waiting")}
    body = {
        "status": "draining" if draining else "ready" if ready else "starting",
        **sums,
        "row_bytes": max((one["row_bytes"] for one in found.values()), default=0),
        "replicas": {name: dict(one) for name, one in sorted(found.items())},
    }
    return body, 200 if ready else 503


def metrics(found: Mapping[str, str], own: str) -> str:
    """The metrics of all replicas and of the router, each sample with a label ``replica``.

    Args:
        found: replica → its metrics as text for Prometheus.
        own: those of the router.
    """
    families: dict[str, list[str]] = {}
    for replica, text in [*sorted(found.items()), ("router", own)]:
        family, heads = "", list[str]()
        for line in text.splitlines():
            if line.startswith("#"):
                heads = [*heads, line] if heads and line.split(" ", 3)[2] == family else [line]
                family = line.split(" ", 3)[2]
                continue
            families.setdefault(family, list(heads)).append(_labelled(line, replica))
    count = ["# HELP kvkeep_replicas Replicas that answer.", "# TYPE kvkeep_replicas gauge"]
    lines = [line for family in families.values() for line in family]
    return "\n".join([*lines, *count, f"kvkeep_replicas {len(found)}"]) + "\n"


def _labelled(sample: str, replica: str) -> str:
    """A sample with a label more."""
    end = min(place for place in (sample.find("{"), sample.find(" ")) if place >= 0)
    name, rest = sample[:end], sample[end:]
    return f'{name}{{replica="{replica}"' + (f",{rest[1:]}" if rest[0] == "{" else f"}}{rest}")


def sessions(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The list of sessions of all replicas, each once."""
    data = {entry["id"]: entry for one in found.values() for entry in one["data"]}
    return {"object": "list", "data": [data[name] for name in sorted(data)]}
