"""The page: one HTML file with its pictures inside, for a person to read from top to bottom. It needs no network.

Every word on it comes from a measurement's reading, from stated rules or from the run itself. Everything is escaped.
"""

from __future__ import annotations

import base64
import html as markup
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from kvkeep import plots
from kvkeep_lab.analysis.measure import ClaimLine, Measurement, Reading, Verdict
from kvkeep_lab.analysis.recommend import Advice

_SIGNS: dict[Verdict, tuple[str, str]] = {
    "agree": ("✓ agree", "agree"),
    "differ": ("✗ differ", "differ"),
    "cannot tell": ("? cannot tell", "cannot"),
}

_PAPERS = {
    "H2O": "H2O: heavy hitters",
    "Scissorhands": "Scissorhands: the persistence of importance",
    "AhaKV": "AhaKV: scores without bias",
}
_COMMON = "All three: what a budget costs"

EMBEDDED = "embedded"
"""The embedded model's name in results."""


def escape(text: str) -> str:
    """Return text for the page; a number and its per cent sign stay on one line."""
    return re.sub(r"(\d) ?%", "\\1\u00a0%", markup.escape(text))


@dataclass(frozen=True, eq=False)
class Section:
    """One measurement on the page.

    Attributes:
        kind: the measurement.
        reading: its interpretation; ``None`` if it was skipped.
        skipped: why it was skipped.
        picture: PNG; ``None`` if it was skipped or there are no pictures.
    """

    kind: type[Measurement]
    reading: Reading | None
    skipped: str | None
    picture: bytes | None


def section(kind: type[Measurement], record: Mapping[str, Any], *, pictures: bool) -> Section:
    """Return the section of a measurement, from its record."""
    if "skipped" in record:
        return Section(kind, None, record["skipped"], None)
    result = record["result"]
    drawn = plots.picture(lambda axes: kind.draw(result, axes), kind.panels) if pictures else None
    return Section(kind, kind.reading(result), None, drawn)


def html(run: Mapping[str, Any], sections: Sequence[Section], claims: Sequence[ClaimLine], advice: Advice) -> str:
    """Return the whole page.

    Args:
        run: the content of ``run.json``.
        sections: the measurements, in their order.
        claims: the table of claims.
        advice: the next step, and the risks.
    """
    name = "The embedded model" if run["model"] == EMBEDDED else run["model"]
    title = f"{name}: what its attention looks at"
    body = [_head(title, run), _in_short(advice, claims), *_chapters(sections), _table(claims), _advice(advice)]
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join([*body, _origin(run, sections)])
        + "\n</body>\n</html>\n"
    )


def _head(title: str, run: Mapping[str, Any]) -> str:
    notes = "".join(f"<p><strong>Note.</strong> {escape(note)}</p>" for note in run["notes"])
    said = {name: escape(str(run[name])) for name in ("n_tokens", "text_name", "n_layers", "n_heads", "n_kv_heads")}
    return (
        f"<h1>{escape(title)}</h1>\n<p>The first {said['n_tokens']} tokens of <code>{said['text_name']}</code> "
        f"under the full cache: {said['n_layers']} layers, {said['n_heads']} query and {said['n_kv_heads']} key-value "
        "heads each. Every figure is followed by what the paper reports on its models, what this model shows on this "
        f"text, and what that means for choosing a policy and a budget.</p>{notes}"
    )


def _in_short(advice: Advice, claims: Sequence[ClaimLine]) -> str:
    """Return a summary for readers in a hurry."""
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in _SIGNS}
    said = escape(advice.short)
    if advice.risks:
        said += f" What is at risk stands beside it ({len(advice.risks)}): read that first."
    return (
        f'<div class="box"><p><strong>In short.</strong> {said} Of {len(claims)} claims of the papers, '
        f"this model agrees with {counts['agree']} and differs on {counts['differ']}; {counts['cannot tell']} cannot "
        'be told here. <a href="#claims">The table</a>, <a href="#recommendation">what follows, and what '
        "is at risk</a>.</p></div>"
    )


def _chapters(sections: Sequence[Section]) -> Iterable[str]:
    for name, part in groupby(sections, key=lambda section: _chapter(section.kind)):
        yield f"<h2>{escape(name)}</h2>"
        yield from map(_show, part)


def _chapter(kind: type[Measurement]) -> str:
    papers = {part.strip().split(",")[0] for part in kind.source.split(";")}
    return _PAPERS.get(papers.pop(), _COMMON) if len(papers) == 1 else _COMMON


def _show(part: Section) -> str:
    kind, reading = part.kind, part.reading
    head = f'<h3 id="{kind.name}">{escape(kind.title)}</h3>\n<p class="source">{escape(kind.source)}'
    if reading is None:
        return f"{head}</p>\n<p>Skipped: {escape(part.skipped or '')}</p>"
    picture = "" if part.picture is None else _image(part.picture, f"{kind.title}. {reading.here}")
    said = {"The paper": reading.paper, "This model": reading.here, "For your choice": reading.meaning}
    lines = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in said.items())
    return f"{head} · {_verdict(reading.verdict)}</p>\n{picture}<dl>{lines}</dl>"


def _image(data: bytes, says: str) -> str:
    code = base64.b64encode(data).decode("ascii")
    return f'<figure><img alt="{escape(says)}" src="data:image/png;base64,{code}"></figure>\n'


def _verdict(verdict: Verdict) -> str:
    sign, name = _SIGNS[verdict]
    return f'<span class="verdict {name}">{sign}</span>'


def _table(claims: Sequence[ClaimLine]) -> str:
    heads = ("claim", "on their models", "this model", "verdict")
    rows = []
    for claim in claims:
        source = f'{escape(claim.text)}<br><span class="soft">{escape(claim.source)}</span>'
        cells = (source, escape(claim.paper), escape(claim.here), _verdict(claim.verdict))
        rows.append("".join(f'<td data-label="{head}">{cell}</td>' for head, cell in zip(heads, cells, strict=True)))
    return (
        '<h2 id="claims">The claims, one by one</h2>\n<div class="wide"><table><thead><tr>'
        + "".join(f"<th>{head}</th>" for head in heads)
        + "</tr></thead><tbody>\n"
        + "\n".join(f"<tr>{row}</tr>" for row in rows)
        + "\n</tbody></table></div>"
    )


def _advice(advice: Advice) -> str:
    line = f"<dt>Command</dt><dd><code>{escape(advice.command)}</code></dd>"
    return (
        '<h2 id="recommendation">What follows for this model and text</h2>\n'
        f'<div class="box"><p>{escape(advice.short)}</p><dl>{line}</dl></div>\n'
        f"<h3>What is at risk</h3>\n{_list(advice.risks)}\n"
        '<p class="soft">Each line names its rule (R3, R4, …); docs/choose-a-policy.md states them. They are rules, '
        "not taste: the same measurements give the same warnings.</p>"
    )


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _origin(run: Mapping[str, Any], sections: Sequence[Section]) -> str:
    names = ("model", "weights", "dtype", "device", "text_name", "text", "n_tokens", "seed")
    versions = ("kvkeep", "torch", "transformers", "python")
    rows = [(name.replace("_", " "), run[name]) for name in names] + [(name, run[name]) for name in versions]
    made = ", ".join(f"{part.kind.name} {part.kind.VERSION}" for part in sections)
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in rows)
    return (
        f"<h2>Where this comes from</h2>\n<table><tbody>{cells}<tr><th>measurements and their versions</th>"
        f"<td>{escape(made)}</td></tr></tbody></table>"
    )
