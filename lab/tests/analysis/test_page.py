"""The page: all of it in one file, everything escaped, every verdict in words, readable without pictures."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from kvkeep import plots
from kvkeep.errors import InputError
from kvkeep_lab.analysis import page, report
from kvkeep_lab.analysis.groups import MEASUREMENTS, budgets
from kvkeep_lab.analysis.groups.budgets import Budgets
from kvkeep_lab.analysis.groups.sparsity import Sparsity
from kvkeep_lab.analysis.measure import READS, ClaimLine
from kvkeep_lab.analysis.recommend import Advice
from kvkeep_lab.analysis.report import ELSEWHERE, AnalysisFolder

RUN = {
    "model": "evil <b>model</b>",
    "weights": "abc",
    "dtype": "float32",
    "device": "cpu",
    "text_name": "no&vel.txt",
    "text": "sha256:00",
    "n_tokens": 512,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "seed": 0,
    "notes": ["A <note>."],
    "kvkeep": "1",
    "torch": "2",
    "transformers": "5",
    "python": "3",
}
SPARSE = {"sparsity_by_layer": [0.97, 0.99], "sparsity": 0.98, "square_by_layer": [0.98, 0.99]}
DOCS = Path(__file__).parents[3] / "docs"
ADVICE = Advice("Use <it>.", "kvkeep tune", ("R3: a & b", "R4: c"))
CLAIM = ClaimLine("a <claim>", "H2O, Figure 1", "they & we", "here", "differ")


class Reader(HTMLParser):
    """Tags with their attributes, and whether all of them are closed."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(text):
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def whole():
    sections = [
        page.section(Sparsity, {"result": SPARSE}, pictures=True),
        page.section(Budgets, {"skipped": "The text is <short>."}, pictures=True),
    ]
    return page.html(RUN, sections, [CLAIM, *ELSEWHERE], ADVICE)


def test_it_asks_nobody_for_anything(whole):
    found = read(whole)
    for tag, attributes in found.tags:
        assert tag not in ("script", "link", "iframe", "object")
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png;base64,"))
    assert "url(" not in whole
    assert "http" not in re.sub(r"data:[^\"]*|http-equiv", "", whole)
    assert any("default-src 'none'" in (a.get("content") or "") for _, a in found.tags)


def test_what_it_shows_is_escaped(whole):
    text = read(whole).text
    for shown in ("evil <b>model</b>", "no&vel.txt", "A <note>.", "a <claim>", "they & we", "Use <it>.", "R3: a & b"):
        assert shown in text
    assert "Skipped: The text is <short>." in text


def test_the_picture_is_a_png_with_words(whole):
    (image,) = [attributes for tag, attributes in read(whole).tags if tag == "img"]
    assert base64.b64decode(image["src"].partition(",")[2]).startswith(b"\x89PNG")
    assert "98\u00a0% on average" in image["alt"]


def test_verdicts_are_words_and_counts_add_up(whole):
    text = read(whole).text
    assert "✗ differ" in text
    assert f"Of {1 + len(ELSEWHERE)} claims of the papers, this model agrees with 0 and differs on 1;" in text
    assert f"{len(ELSEWHERE)} cannot be told here" in text


def test_narrow_windows_get_names_in_the_cells(whole):
    labels = [a["data-label"] for tag, a in read(whole).tags if tag == "td" and "data-label" in a]
    assert labels[:4] == ["claim", "on their models", "this model", "verdict"]
    assert "max-width: 40rem" in whole
    assert "prefers-color-scheme: dark" in whole
    assert 'name="viewport"' in whole


def test_chapters_come_from_the_papers(whole):
    text = read(whole).text
    assert text.index("H2O: heavy hitters") < text.index("Attention is sparse") < text.index("All three")


def test_the_docs_list_every_measurement():
    text = (DOCS / "analyze.md").read_text()
    for kind in MEASUREMENTS:
        assert f"| `{kind.name}` | {kind.source} |" in text


def test_the_embedded_models_page_is_small_and_asks_nobody():
    text = (DOCS / "analyze-embedded.html").read_text()
    found = read(text)
    assert len(text) < 1_500_000
    for tag, attributes in found.tags:
        assert tag != "script"
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png;base64,"))
    assert "/work" not in found.text
    assert "/tmp" not in found.text
    assert "kvkeep tune" in found.text
    for kind in MEASUREMENTS:
        assert f'id="{kind.name}"' in text


def test_every_measurement_keeps_the_contract():
    names = [kind.name for kind in MEASUREMENTS]
    assert len(set(names)) == len(names)
    for kind in MEASUREMENTS:
        assert kind.reads <= READS
        assert kind.reads
        assert kind.least_tokens >= 1
        assert re.fullmatch(r"[a-z][a-z0-9_]*", kind.name)
        assert kind.source.split(",")[0] in ("H2O", "Scissorhands", "AhaKV")
        assert kind.title
        assert kind.name not in ("run", "analysis", "index")


def test_report_writes_page_pictures_and_numbers(tmp_path, monkeypatch):
    folder = AnalysisFolder(tmp_path)
    folder.open(RUN)
    about = {"version": 1, "source": "s", "title": "t"}
    folder.write("sparsity.json", {"name": "sparsity", **about, "result": SPARSE})
    folder.write("budgets.json", {"name": "budgets", **about, "skipped": "Too short."})
    written, everything = report.write(folder)
    assert written.read_text().startswith("<!doctype html>")
    assert (tmp_path / "sparsity.png").read_bytes().startswith(b"\x89PNG")
    assert set(everything["measurements"]) == {"sparsity", "budgets"}
    assert everything["measurements"]["sparsity"]["reading"]["verdict"] == "agree"
    assert everything["claims"][0]["source"] == "H2O, Figure 2a"
    assert everything["recommendation"]["command"].startswith("kvkeep tune ")
    monkeypatch.setattr(plots, "available", lambda: False)
    written, _ = report.write(folder)
    assert "<img" not in written.read_text()
    assert "98\u00a0% on average" in written.read_text()


def test_a_report_needs_an_analysis(tmp_path):
    with pytest.raises(InputError, match="holds no analysis"):
        report.write(AnalysisFolder(tmp_path))


def test_a_number_keeps_its_per_cent_sign():
    assert page.escape("5 % of 20%, a % b <") == "5\u00a0% of 20\u00a0%, a % b &lt;"


def test_the_style_reads_without_colour():
    style = (page.Path(page.__file__).parent / "page.css").read_text()
    colours = set(re.findall(r"#([0-9a-fA-F]{6})\b", style))
    assert colours
    for colour in colours:  # greys but for a trace
        parts = [int(colour[i : i + 2], 16) for i in (0, 2, 4)]
        assert max(parts) - min(parts) <= 4


FOUND = {
    "n_text": 400,
    "n_tokens": 500,
    "nll": 3.0,
    "perplexity": 20.1,
    "nll_first": 3.0,
    "nll_again": 1.0,
    "gain": 2.0,
    "budgets": [0.04, 0.1, 0.2, 0.5],
    "policies": {
        name: {
            "excess": [None, 0.1, 0.01, 0.0],
            "error": [None, 0.01, 0.001, 0.0],
            "kept": [None, 0.1, 0.4, 0.9],
            "kept_by_depth": [None, [0.1] * 4, [0.4] * 4, [0.9] * 4],
        }
        for name in ("local", "h2o", "scissorhands", "ahakv")
    },
}


def test_budgets_can_be_drawn_where_a_policy_cannot_run():
    found = page.section(Budgets, {"result": FOUND}, pictures=True)
    assert found.picture.startswith(b"\x89PNG")
    assert "H2O at 20 % costs +1.0%" in found.reading.here
    assert found.reading.verdict == "agree"
    verdicts = [claim.verdict for claim in Budgets.claims(FOUND)]
    assert verdicts == ["agree", "cannot tell", "agree", "cannot tell"]


def test_budgets_compare_by_standard_errors():
    better = {**FOUND["policies"], "local": {**FOUND["policies"]["local"], "excess": [None, 0.1, 0.2, 0.0]}}
    assert Budgets.claims({**FOUND, "policies": better})[1].verdict == "agree"
    worse = {**FOUND["policies"], "h2o": {**FOUND["policies"]["h2o"], "excess": [None, 0.1, 0.2, 0.0]}}
    assert Budgets.claims({**FOUND, "policies": worse})[1].verdict == "differ"
    assert Budgets.reading({**FOUND, "policies": worse}).verdict == "differ"


def test_budgets_that_all_cost_too_much_are_said_so():
    dear = {
        name: {**found, "excess": [None, 0.3, 0.2, 0.1], "error": [None, 0.0, 0.0, 0.0]}
        for name, found in FOUND["policies"].items()
    }
    reading = Budgets.reading({**FOUND, "policies": dear})
    assert reading.meaning.startswith("No policy here is within 2 % of the full cache's perplexity at any of these")
    assert reading.verdict == "differ"


def test_what_is_left_of_a_second_reading():
    """Losses made by hand: 2 nats, passages again 1; a bounded cache has 1.5 there, and 0.25 more in the text."""
    plan = budgets.BudgetTexts.of(torch.arange(600), 600)
    assert plan.n_text == 600 - 4 * budgets.PASSAGE
    assert plan.tokens[plan.n_text :].tolist()[: budgets.PASSAGE] == list(
        range(plan.starts[0], plan.starts[0] + budgets.PASSAGE)
    )
    full = torch.full((599,), 2.0)
    full[plan.n_text :] = 1.0
    bounded = full.clone()
    bounded[: plan.n_text - 1] += 0.25
    bounded[plan.n_text :] = 1.5
    found = budgets.compare(plan, full, bounded)
    assert found["excess"] == pytest.approx(0.25)
    assert found["error"] == pytest.approx(0.0, abs=1e-9)
    assert found["kept"] == pytest.approx(0.5)
    assert found["kept_by_depth"] == pytest.approx([0.5] * 4)
    facts = budgets.summary(plan, full)
    assert facts["gain"] == pytest.approx(1.0)
    assert facts["nll"] == pytest.approx(2.0)
    assert budgets.compare(plan, full, None)["kept"] is None


def test_an_error_of_kvkeeps_own_is_not_blamed_on_the_file(tmp_path, monkeypatch):
    def fail(result):
        raise InputError("The model is too large.")

    folder = AnalysisFolder(tmp_path)
    monkeypatch.setattr(Sparsity, "reading", fail)
    about = {"version": Sparsity.VERSION, "seconds": 1.0}
    folder.write("run.json", RUN)
    folder.write("sparsity.json", {"name": "sparsity", **about, "result": SPARSE})
    with pytest.raises(InputError, match=r"^The model is too large\.$"):
        report.read(folder)
