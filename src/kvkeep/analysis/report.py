"""From a folder of finished measurements to its pictures, its page and one JSON object; needs no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvkeep import plots
from kvkeep.analysis import page
from kvkeep.analysis.elsewhere import ELSEWHERE
from kvkeep.analysis.folder import Folder
from kvkeep.analysis.groups import MEASUREMENTS
from kvkeep.analysis.measure import Claim, Measurement
from kvkeep.analysis.recommend import Advice, advise

PAGE = "index.html"
ALL = "analysis.json"


def write(folder: Folder) -> tuple[Path, dict[str, Any]]:
    """Write the page, the pictures, if matplotlib is installed, and everything as one JSON object.

    Returns:
        The page's path, and the object.

    Raises:
        InputError: the folder holds no analysis, or cannot be written.
    """
    run = folder.manifest()
    records = [(kind, record) for kind in MEASUREMENTS if (record := folder.record(kind.name, kind.VERSION))]
    done = [(kind, record["result"]) for kind, record in records if "result" in record]
    claims = [*(claim for kind, result in done for claim in kind.claims(result)), *ELSEWHERE]
    advice = advise({kind.name: result for kind, result in done}, "" if run["model"] == page.EMBEDDED else run["model"])
    sections = [page.section(kind, record, pictures=plots.available()) for kind, record in records]
    for part in sections:
        if part.picture is not None:
            folder.write_bytes(f"{part.kind.name}.png", part.picture)
    written = folder.write_bytes(PAGE, page.html(run, sections, claims, advice).encode())
    return written, folder.write(ALL, _everything(run, records, claims, advice))


def _everything(
    run: dict[str, Any],
    records: Sequence[tuple[type[Measurement], dict[str, Any]]],
    claims: Sequence[Claim],
    advice: Advice,
) -> dict[str, Any]:
    measured = {
        kind.name: {**record, **({"reading": asdict(kind.reading(record["result"]))} if "result" in record else {})}
        for kind, record in records
    }
    return {"run": run, "measurements": measured, "claims": [*map(asdict, claims)], "recommendation": asdict(advice)}
