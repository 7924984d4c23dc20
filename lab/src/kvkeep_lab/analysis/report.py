"""The folder of an analysis, and the page, pictures and JSON object that are written from it; needs no model.

``run.json`` describes the run, and every finished measurement has a file of its own. A file is written beside its place
and moved there, so it is whole or absent, and finished measurements are always safe.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvkeep import plots
from kvkeep.errors import InputError, KVKeepError
from kvkeep.result_files import (
    MANIFEST,
    Results,
    Schema,
    check_same,
    command,
    finite,
    first_fault,
    list_of,
    read_object,
    text_value,
    whole_number,
)
from kvkeep_lab.analysis import page
from kvkeep_lab.analysis.groups import MEASUREMENTS
from kvkeep_lab.analysis.measure import ClaimLine, Measurement, Reading
from kvkeep_lab.analysis.recommend import Advice, advise

PAGE = "index.html"
ALL = "analysis.json"
KIND = "kvkeep analyze"

_SAME = {
    "kind": "the command",
    "model": "the model",
    "weights": "the model's weights",
    "dtype": "the dtype",
    "text": "the text",
    "n_tokens": "the number of tokens",
    "seed": "the seed",
}
_RUN: Schema = {
    **dict.fromkeys(("n_tokens", "n_layers", "n_heads", "n_kv_heads", "seed"), whole_number(least=None)),
    **dict.fromkeys(("model", "weights", "dtype", "device", "text_name", "text"), text_value()),
    **dict.fromkeys(("kvkeep", "torch", "transformers", "python"), text_value()),
    "notes": list_of(text_value()),
}
_REMEDY = "Restore it, or choose another `output` folder."
_LONGEST = 200

AGAIN = "Remove it, and the same command measures it again."
"""The remedy for a damaged file of a measurement."""


class AnalysisFolder(Results):
    """Finished measurements, read from a folder and added to it.

    Args:
        path: the folder; it need not exist yet.

    Raises:
        InputError: the path is no folder.
    """

    names = (PAGE, ALL, *(f"{kind.name}.{end}" for kind in MEASUREMENTS for end in ("json", "png")))

    @property
    def safe(self) -> str:
        """Return a sentence that finished measurements are safe."""
        return "Finished measurements are safe."

    def check(self, manifest: dict[str, Any]) -> None:
        """Refuse a folder that holds another run.

        Args:
            manifest: the run, as far as it is known.

        Raises:
            InputError: the folder holds another run, or it is unknown which one.
        """
        found = read_object(self.path / MANIFEST, _REMEDY)
        if found is not None:
            check_same(self.path, found, {"kind": KIND, **manifest}, _SAME)
        else:
            self.check_new()

    def open(self, manifest: dict[str, Any]) -> None:
        """Write the description of the run; the folder has to be `locked`.

        Raises:
            InputError: see `check`; or the file cannot be written.
        """
        self.check(manifest)
        self.write(MANIFEST, {"kind": KIND, **manifest})

    def manifest(self) -> dict[str, Any]:
        """Return the description of the run.

        Raises:
            InputError: there is no run, or the file is damaged.
        """
        found = read_object(self.path / MANIFEST, _REMEDY)
        if found is None or found.get("kind") != KIND:
            make = command("kvkeep analyze --text FILE --output", self.path)
            raise InputError(f"{self.path} holds no analysis. Make one with {make}.")
        if (wrong := first_fault(found, _RUN)) is not None:
            raise InputError(f"{self.path / MANIFEST} does not say what was run: {wrong}. {_REMEDY}")
        return found

    def record(self, name: str, version: int) -> dict[str, Any] | None:
        """Return a finished measurement; ``None`` if there is none of this version.

        Raises:
            InputError: its file is damaged.
        """
        path = self.path / f"{name}.json"
        found = read_object(path, AGAIN)
        if found is None or found.get("version") != version:
            return None
        kind, part = (str, found["skipped"]) if "skipped" in found else (dict, found.get("result"))
        if not isinstance(part, kind):
            raise InputError(f"{path} holds neither a result nor why there is none. {AGAIN}")
        return found

    def write(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        """Write a JSON file at once and return its content: numbers that JSON cannot hold are null.

        Raises:
            InputError: the file cannot be written; everything before is safe.
        """
        text = json.dumps(finite(value), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        self.write_bytes(name, text.encode())
        written: dict[str, Any] = json.loads(text)
        return written


# -- the page ----------------------------------------------------------------------------------------------------------


def _line(text: str, source: str, paper: str, where: str) -> ClaimLine:
    return ClaimLine(text, source, paper, f"not measured here: {where}", "cannot tell")


ELSEWHERE = (
    _line(
        "Eviction works together with 4-bit quantisation",
        "H2O, Table 6; Scissorhands, Table 4",
        "both together are no worse than either",
        "kvkeep eval --kv-bits 4",
    ),
    _line(
        "Streams far beyond the trained length",
        "H2O, Figure 5",
        "perplexity stays low over millions of tokens",
        "python bench/stream.py",
    ),
    _line(
        "More tokens per second",
        "H2O, Tables 3 to 5; AhaKV, Figure 8",
        "up to 3 times FlexGen's; up to 1.9 times lower latency",
        "python bench/throughput.py",
    ),
    _line(
        "Accuracy on few-shot tasks and long texts",
        "H2O, Figure 4; Scissorhands, Figure 3; AhaKV, Table 1",
        "kept at 20 % (H2O), 15 to 30 % (Scissorhands), with 1000 tokens (AhaKV)",
        "kvkeep eval, with tasks of this model's size",
    ),
    _line(
        "The theorems",
        "H2O, section 4; Scissorhands, Theorems 3.1 and 4.1; AhaKV, section 3",
        "proved",
        "kvkeep theory",
    ),
)
"""Claims that one pass over one text cannot check, and where this project checks them."""


@dataclass(frozen=True, eq=False)
class MeasurementFile:
    """A measurement's file, read.

    Attributes:
        kind: the measurement.
        record: the content of the file.
        reading: its interpretation; ``None`` if it was skipped.
        claims: its lines in the table of claims.
    """

    kind: type[Measurement]
    record: dict[str, Any]
    reading: Reading | None = None
    claims: tuple[ClaimLine, ...] = ()


def read(folder: AnalysisFolder) -> list[MeasurementFile]:
    """Return all finished measurements of a folder, in the page's order.

    Raises:
        InputError: a file is damaged.
    """
    records = [(kind, record) for kind in MEASUREMENTS if (record := folder.record(kind.name, kind.VERSION))]
    return [_read(folder, kind, record) for kind, record in records]


def _read(folder: AnalysisFolder, kind: type[Measurement], record: dict[str, Any]) -> MeasurementFile:
    """Return one measurement, with everything that is made of its numbers except the picture."""
    if "skipped" in record:
        return MeasurementFile(kind, record)
    with _undamaged(folder, kind):
        return MeasurementFile(kind, record, *interpret(kind, record["result"]))


def interpret(kind: type[Measurement], result: dict[str, Any]) -> tuple[Reading, tuple[ClaimLine, ...]]:
    """Return what is said of a measurement's numbers, as its file holds them.

    Numbers that the measurement does not write raise errors of many kinds.
    """
    advise({kind.name: result}, "")  # the advice of all measurements must not fail
    return kind.reading(result), tuple(kind.claims(result))


@contextmanager
def _undamaged(folder: AnalysisFolder, kind: type[Measurement], *, drawn: bool = False) -> Iterator[None]:
    """Blame the file for every error that its numbers cause: a measurement's own numbers cause none.

    Args:
        folder: the folder of the file.
        kind: the measurement.
        drawn: whether a picture is drawn; then matplotlib may be the cause.

    Raises:
        InputError: there was an error.
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


def write(
    folder: AnalysisFolder, *, drawn: dict[str, page.Section] | None = None, note: str | None = None
) -> tuple[Path, dict[str, Any]]:
    """Write the page, everything as one JSON object, and the pictures if matplotlib is installed.

    Args:
        folder: the folder.
        drawn: sections by the names of measurements, which are not drawn again; new ones are added.
        note: a note on the page, beside those of the run.

    Returns:
        The page's path, and the object.

    Raises:
        InputError: the folder holds no analysis, a file in it is damaged, or it cannot be written.
    """
    run = folder.manifest()
    found = read(folder)
    results = {finding.kind.name: finding.record["result"] for finding in found if finding.reading is not None}
    advice = advise(results, "" if run["model"] == page.EMBEDDED else run["model"])
    claims = [*(claim for finding in found for claim in finding.claims), *ELSEWHERE]
    drawn = {} if drawn is None else drawn
    for finding in found:
        if finding.kind.name not in drawn:
            part = drawn[finding.kind.name] = _section(folder, finding)
            if part.picture is not None:
                folder.write_bytes(f"{part.kind.name}.png", part.picture)
    sections = [drawn[finding.kind.name] for finding in found]
    shown = run if note is None else {**run, "notes": [*run["notes"], note]}
    written = folder.write_bytes(PAGE, page.html(shown, sections, claims, advice).encode())
    return written, folder.write(ALL, _everything(run, found, claims, advice))


def _section(folder: AnalysisFolder, found: MeasurementFile) -> page.Section:
    """Return the section of a measurement, with its picture if matplotlib is installed."""
    pictures = plots.available()
    with _undamaged(folder, found.kind, drawn=pictures):
        return page.section(found.kind, found.record, pictures=pictures)


def _everything(
    run: dict[str, Any], found: Sequence[MeasurementFile], claims: Sequence[ClaimLine], advice: Advice
) -> dict[str, Any]:
    measured = {
        finding.kind.name: {
            **finding.record,
            **({} if finding.reading is None else {"reading": asdict(finding.reading)}),
        }
        for finding in found
    }
    return {"run": run, "measurements": measured, "claims": [*map(asdict, claims)], "recommendation": asdict(advice)}
