"""Tables of bench/bits.py, from rows that are made up, and the commands that it runs."""

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
if not BENCH.is_dir():
    pytest.skip("the benchmarks are not part of this copy", allow_module_level=True)
sys.path.insert(0, str(BENCH))

import bits  # noqa: E402

for name in [name for name in sys.modules if name.partition(".")[0] == "lib"]:
    del sys.modules[name]  # other tests import the scripts' folder anew
sys.path.remove(str(BENCH))

from kvkeep.evals.arms import split_arms  # noqa: E402
from kvkeep.evals.report import share_tables  # noqa: E402


def row(policy, kv_bits, budget, right, case="context=1024"):
    asked = [[text, i, int(right(text, i))] for text in range(10) for i in range(8)]
    setup = "" if kv_bits == "16" else f"kv-bits={kv_bits}"
    score = {"asked": asked, "perplexity": 30.0 + 10 * asked[0][2]}
    cell = {"task": "recall", "case": case, "policy": policy, "setup": setup, "budget": budget, "seed": 0}
    return {**cell, "score": score, "budget_tokens": 200.0, "text_tokens": 1000.0}


RECALL = [
    row("full", "16", "100%", lambda text, i: i > 0),
    row("full", "4", "100%", lambda text, i: i > 3),
    row("h2o", "16", "20%", lambda text, i: i > 1),
    row("h2o", "8", "40%", lambda text, i: i > 0),
    row("h2o", "8", "20%", lambda text, i: i > 1),
    row("h2o", "4", "20%", lambda text, i: i > 4),
]
LOSSES = [{**one, "task": "perplexity", "case": "window=1024,stride=16"} for one in RECALL]


@pytest.fixture
def output(tmp_path):
    for folder, rows in (("inside", RECALL), ("perplexity", LOSSES)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return tmp_path


def test_tables_compare_bits_at_a_budget_and_at_the_same_bytes(output):
    found = {title: body for title, _, body in bits.tables(output)}
    recall = next(
        body for title, body in found.items() if title.startswith("recall, inside, 1024 tokens, 80 questions")
    )
    lines = ["`full` 16", "`full` 4", "`h2o` 16", "`h2o` 8", "`h2o` 4"]
    assert [" ".join(line[:2]) for line in recall] == lines
    twenty = 2  # the smallest budget with results comes first
    assert recall[2][twenty].startswith("86 (")
    assert not recall[3][twenty].endswith("*")
    assert recall[4][twenty].startswith("43 (")
    assert recall[4][twenty].endswith("*")  # clearly worse than in the model's dtype
    (same,) = next(body for title, body in found.items() if title.startswith("the same bytes; recall"))
    assert [cell[:3] for cell in same] == ["`h2", "86 ", "100", "", ""]
    # slots of "16 bits" have 32 where perplexity is computed in float32
    (losses,) = (title for title in found if "perplexity" in title and ";" in title)
    assert losses == "tokens that take the same bytes beside bfloat16; perplexity, float32"


def test_pages_get_the_tables_between_their_marks(output):
    found = {"bits": list(bits.tables(output)), "bits in short": list(bits.in_short(output))}
    page = output / "page.md"
    page.write_text("a\n<!-- bits: begin -->\nold\n<!-- bits: end -->\nb\n")
    bits.write(page, found)
    text = page.read_text()
    assert "old" not in text
    assert "| policy | bits | 20% | 40% | 100% |" in text
    assert "papers' settings" not in text
    assert text.startswith("a\n")
    assert text.endswith("b\n")
    short = output / "short.md"
    short.write_text("<!-- bits in short: begin --><!-- bits in short: end -->")
    bits.write(short, found)
    assert "| H2O, Table 6 | `h2o` | 20% | 4 |" in short.read_text()
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="no marks"):
        bits.write(page, found)
    assert page.read_text() == "no marks"


def test_every_command_names_policies_and_bits_that_exist(tmp_path):
    for step in bits.steps(400, 40):
        words = step.command(tmp_path)
        arms = split_arms(words[words.index("--policies") + 1])
        assert {arm.kv_bits for arm in arms if arm.policy.evicts} <= set(bits.BITS)


def test_the_papers_settings_and_the_same_bytes_are_among_the_cells():
    planned = list(bits.steps(9, 2))
    found = [(step.folder, policy, share) for step in planned for policy in step.policies for share in step.budgets]
    assert len(found) == len({*found})
    for folder in ("perplexity", "inside"):
        split = {(folder, f"{policy}@{kv}", share) for policy in bits.POLICIES for kv, share in bits.SPLIT.items()}
        papers = {(folder, f"{name}@{kv}", share) for name, (_, share) in bits.PAPERS.items() for kv in bits.BITS}
        assert split | papers <= {*found}


def test_a_full_cache_of_4_bits_is_no_reference():
    (table,) = share_tables(RECALL)
    assert "the full cache answers 70 of 80 questions" in table.title
    assert "full (kv-bits=4)" in str(table)
