"""From a folder of finished measurements to its pictures, its page and one JSON object; needs no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvkeep import plots
from kvkeep.errors import InputError, KVKeepError
from kvkeep.research.analysis import page
from kvkeep.research.analysis.elsewhere import ELSEWHERE
from kvkeep.research.analysis.folder import AGAIN, ALL, PAGE, Folder
from kvkeep.research.analysis.groups import MEASUREMENTS
from kvkeep.research.analysis.measure import Claim, Measurement, Reading
from kvkeep.research.analysis.recommend import Advice, advise

_LONGEST = 200


@dataclass(frozen=True, eq=False)
class Found:
    """A measurement's file, read.

    Attributes:
        kind: the measurement.
        record: what the file holds.
        reading: its sentences; ``None`` if it was skipped.
        claims: its lines in the table of claims.
    """

    kind: type[Measurement]
    record: dict[str, Any]
    reading: Reading | None = None
    claims: tuple[Claim, ...] = ()


def read(folder: Folder) -> list[Found]:
    """All finished measurements of a folder, in the page's order.

    Raises:
        InputError: a file is damaged.
    """
    records = [(kind, record) for kind in MEASUREMENTS if (record := folder.record(kind.name, kind.VERSION))]
    return [_read(folder, kind, record) for kind, record in records]


def _read(folder: Folder, kind: type[Measurement], record: dict[str, Any]) -> Found:
    """One measurement, with all that is made of its numbers but the picture."""
    if "skipped" in record:
        return Found(kind, record)
    with _undamaged(folder, kind):
        result = record["result"]
        advise({kind.name: result}, "")  # so that the advice of all of them finds nothing wrong
        return Found(kind, record, kind.reading(result), tuple(kind.claims(result)))


@contextmanager
def _undamaged(folder: Folder, kind: type[Measurement], *, drawn: bool = False) -> Iterator[None]:
    """Blame the file for whatever its numbers break: what a measurement itself writes breaks nothing.

    Args:
        folder: where the file is.
        kind: the measurement.
        drawn: whether a picture is drawn of it, which matplotlib may be to blame for.

    Raises:
        InputError: something broke.
    """
    try:
        yield
    except KVKeepError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if drawn:
            plots.check()
        why = f"{type(error).__name__}: {error}"[:_LONGEST]
        raise InputError(
            f"{folder.path / kind.name}.json does not hold what the measurement {kind.name} writes: it was changed or "
            f"damaged ({why}). {AGAIN}"
        ) from error


def write(folder: Folder) -> tuple[Path, dict[str, Any]]:
    """Write the page, the pictures, if matplotlib is installed, and everything as one JSON object.

    Returns:
        The page's path, and the object.

    Raises:
        InputError: the folder holds no analysis, a file of it is damaged, or it cannot be written.
    """
    run = folder.manifest()
    found = read(folder)
    results = {one.kind.name: one.record["result"] for one in found if one.reading is not None}
    advice = advise(results, "" if run["model"] == page.EMBEDDED else run["model"])
    claims = [*(claim for one in found for claim in one.claims), *ELSEWHERE]
    sections = [_section(folder, one) for one in found]
    for part in sections:
        if part.picture is not None:
            folder.write_bytes(f"{part.kind.name}.png", part.picture)
    written = folder.write_bytes(PAGE, page.html(run, sections, claims, advice).encode())
    return written, folder.write(ALL, _everything(run, found, claims, advice))


def _section(folder: Folder, found: Found) -> page.Section:
    """A measurement as the page shows it, with its picture."""
    pictures = plots.available()
    with _undamaged(folder, found.kind, drawn=pictures):
        return page.section(found.kind, found.record, pictures=pictures)


def _everything(run: dict[str, Any], found: Sequence[Found], claims: Sequence[Claim], advice: Advice) -> dict[str, Any]:
    measured = {
        one.kind.name: {**one.record, **({} if one.reading is None else {"reading": asdict(one.reading)})}
        for one in found
    }
    return {"run": run, "measurements": measured, "claims": [*map(asdict, claims)], "recommendation": asdict(advice)}
