"""Tables and plots, made from rows alone."""

import math
import re
import struct

import pytest

from kvkeep import plots
from kvkeep.errors import InputError, pip_install
from kvkeep.evals import curves, report
from kvkeep.evals.confidence import of_mean, of_share
from kvkeep.evals.results import MEASURES, over

POLICIES = ("local", "h2o", "tova")


def row(task, policy, budget, score, tokens=1000, seed=0, **more):
    share = {"5%": 0.05, "20%": 0.2, "300": 0.3, "100%": 1.01}[budget]
    held = int(1e6 * share)
    return {
        "task": task,
        "case": "context=1",
        "policy": policy,
        "budget": budget,
        "seed": seed,
        **more,
        "budget_tokens": share * tokens,
        "text_tokens": tokens,
        "score": score,
        "memory": {"allocated_bytes": held, "full_bytes": 10**6},
    }


def recall(policy, budget, accuracy, **more):
    by_depth = [[int(tenth >= 8), 2] for tenth in range(10)]
    score = {"accuracy": accuracy, "by_depth": by_depth, "kept": [0.05] * 8 + [0.2, 0.4]}
    if accuracy is not None:
        score |= {"right": round(40 * accuracy), "n": 40}
    return row("recall", policy, budget, score, **more)


def rows():
    cells = [(policy, budget) for policy in POLICIES for budget in ("20%", "5%", "300")]
    return [
        recall("full", "100%", 0.9),
        *(recall(policy, budget, 0.25) for policy, budget in cells),
        row("perplexity", "full", "100%", {"perplexity": 5.0}),
        *(row("perplexity", policy, budget, {"perplexity": 123.4}) for policy, budget in cells),
        *(row("agreement", policy, budget, {"agreement": 0.5, "kl": 0.012}) for policy, budget in cells),
        *(row("mass", policy, budget, {"mass": 0.876, "regret": 0.05}) for policy, budget in cells),
    ]


def size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_tables_have_policies_down_and_budgets_across_in_order():
    found = {table.title: table for table in report.tables(rows())}
    recalls = found["recall, % right (context=1, inside)"]
    assert recalls.columns == ["5%", "20%", "300", "100%"]
    assert recalls.rows["full"] == ["", "", "", "90%"]
    assert recalls.rows["tova"] == ["25%", "25%", "25%", ""]
    assert found["perplexity (context=1)"].rows["h2o"] == ["123", "123", "123", ""]
    assert found["KL(full ‖ bounded), nats (context=1)"].rows["h2o"] == ["0.0120", "0.0120", "0.0120"]
    assert found["KV memory held, % of a full cache (recall, context=1, inside)"].rows["local"] == [
        "5%",
        "20%",
        "30%",
        "",
    ]
    assert len(found) == 7


@pytest.mark.parametrize(
    ("value", "shown"),
    [(57.0, "57.0"), (58.21, "58.2"), (1234.5, "1234"), (99.96, "100"), (0.00123, "0.00123"), (0.0, "0")],
)
def test_numbers_of_a_column_have_equally_many_digits(value, shown):
    row = {"task": "perplexity", "score": {"perplexity": value}}
    assert next(m for m in MEASURES if m.key == "perplexity").show([row]) == shown


def test_a_grid_that_is_not_finished_has_empty_cells():
    (table, *_) = report.tables([recall("full", "100%", 1.0), recall("h2o", "5%", 0.5), recall("tova", "20%", 0.1)])
    assert table.rows == {"full": ["", "", "100%"], "h2o": ["50%", "", ""], "tova": ["", "10%", ""]}
    assert report.tables([]) == []


def test_cells_of_a_model_that_is_too_weak_are_marked():
    weak = [recall("full", "100%", 0.5), recall("h2o", "5%", 0.25), recall("h2o", "20%", 0.5)]
    able = [{**row, "case": "context=2"} for row in (recall("full", "100%", 0.75), recall("h2o", "5%", 0.25))]
    (one, other, *_) = report.tables([*weak, *able])
    assert one.rows == {"full": ["", "", "50% †"], "h2o": ["25% †", "50% †", ""]}
    assert other.rows == {"full": ["", "75%"], "h2o": ["25%", ""]}
    said, remedy = report.weakness_notes([*weak, *able])
    assert said.startswith(
        "† recall, context=1, inside: the full cache is right in 50 % of the cases, fewer than 70 %."
    )
    assert remedy == "† With this model recall (context=2, inside) can tell."
    perplexity = row("perplexity", "full", "100%", {"perplexity": 5.0})
    assert report.weakness_notes([*weak, perplexity])[-1] == "† With this model perplexity can tell."
    assert "`tasks=perplexity,continuation,agreement,mass`" in report.weakness_notes(weak)[-1]
    assert [(weakness.task, weakness.percent) for weakness in report.weaknesses(weak)] == [("recall", 50.0)]
    assert report.weaknesses([recall("full", "100%", 0.7)]) == []


def test_without_a_full_cache_nothing_is_known_about_the_model():
    found = [recall("h2o", "5%", 0.25)]
    assert report.weakness_notes(found) == []
    assert report.tables(found)[0].rows == {"h2o": ["25%"]}
    assert report.weakness_notes(rows()) == []


def test_memory_is_that_of_the_part_with_most_rows():
    found = [recall("h2o", "5%", 0.5), recall("h2o", "20%", 0.5), recall("h2o", "5%", 0.5)]
    found[2]["case"] = "context=1,ask=later"
    assert report.tables(found)[-1].title == "KV memory held, % of a full cache (recall, context=1, inside)"
    assert report.tables(found[1:])[-1].title == "KV memory held, % of a full cache (recall, context=1, later)"


def test_another_setup_is_a_line_of_its_own():
    found = [recall("h2o", "5%", 0.5), recall("h2o", "5%", 0.75, setup="positions=slot"), recall("h2o", "20%", 1.0)]
    (table, *_) = report.tables(found)
    assert table.rows == {"h2o": ["50%", "100%"], "h2o (positions=slot)": ["75%", ""]}
    assert [series.name for series in curves.quality(found)[0].series] == ["h2o", "h2o (positions=slot)"]


def several_seeds():
    return [
        *(recall("full", "100%", accuracy, seed=seed) for seed, accuracy in enumerate((0.8, 0.9, 1.0))),
        *(recall("h2o", "5%", accuracy, seed=seed) for seed, accuracy in enumerate((0.1, 0.2, 0.6))),
        *(row("perplexity", "h2o", "5%", {"perplexity": p}, seed=s) for s, p in enumerate((100.0, 104.0, 105.0))),
        row("agreement", "h2o", "5%", {"agreement": 0.5, "kl": 0.1}),
    ]


def test_tables_over_seeds_say_mean_and_half_of_the_range():
    found = {table.title: table for table in report.tables(several_seeds())}
    recalls = found["recall, % right (context=1, inside), mean ± half of the range over 3 seeds"]
    assert recalls.rows == {"full": ["", "90±10%"], "h2o": ["30±25%", ""]}
    assert found["perplexity (context=1), mean ± half of the range over 3 seeds"].rows == {"h2o": ["103±2.5"]}
    assert found["agreement with the full cache, % (context=1)"].rows == {"h2o": ["50%"]}
    assert found["KV memory held, % of a full cache (recall, context=1, inside)"].rows["h2o"] == ["5%", ""]


def test_a_run_that_is_not_finished_says_how_many_seeds_there_are():
    (table, *_) = report.tables(several_seeds()[:-4])
    assert table.title.endswith("over 3 seeds")
    (table, *_) = report.tables([*several_seeds()[:4], recall("tova", "5%", None, seed=0)])
    assert table.title.endswith("over 1 to 3 seeds")
    assert table.rows["h2o"] == ["10%", ""]
    assert table.rows["tova"] == ["–", ""]


def test_a_share_has_wilsons_interval():
    """Figures of Newcombe (1998), and the ends, where the plain interval is empty."""
    assert of_share(81, 263) == pytest.approx((25.53, 36.62), abs=0.01)
    assert of_share(15, 148) == pytest.approx((6.24, 16.05), abs=0.01)
    assert of_share(0, 20) == pytest.approx((0, 16.11), abs=0.01)
    assert of_share(20, 20) == pytest.approx((83.89, 100), abs=0.01)
    assert all(math.isnan(limit) for limit in of_share(0, 0))


def test_a_mean_over_seeds_has_students_interval():
    assert of_mean(over([100.0, 104.0, 105.0])) == pytest.approx((103 - 6.572, 103 + 6.572), abs=0.01)
    assert of_mean(over([1.0, 1.0]).times(100.0)) == (100, 100)
    assert of_mean(over([float(n) for n in range(100)]))[0] == pytest.approx(49.5 - 5.757, abs=0.02)
    assert all(math.isnan(limit) for limit in of_mean(over([1.0])))
    assert all(math.isnan(limit) for limit in of_mean(over([1.0, math.nan])))


def test_plots_have_intervals_of_95_percent():
    (panel, perplexity, agreement) = curves.quality(several_seeds())
    assert panel.title == "recall, % right\ncontext=1, inside\nmean of 3 seeds, with 95 % intervals"
    full, h2o = panel.series
    assert (h2o.x, h2o.y) == ([5.0], [pytest.approx(30.0)])
    assert h2o.interval == [of_share(36, 120)]
    assert full.interval == [of_share(108, 120)]
    assert perplexity.series[0].interval == [of_mean(over([100.0, 104.0, 105.0]))]
    assert agreement.title == "agreement with the full cache, %\ncontext=1"
    assert agreement.series[0].interval == ()


def test_one_seed_has_intervals_of_its_answers():
    (panel,) = curves.quality([recall("h2o", "5%", 0.25), recall("h2o", "20%", 0.5)])
    assert panel.title.endswith("context=1, inside\nwith 95 % intervals")
    assert panel.series[0].interval == [of_share(10, 40), of_share(20, 40)]


def test_depth_and_kept_over_seeds():
    found = several_seeds()[:6]
    found[3]["score"]["by_depth"] = [[2, 2]] * 10
    found[3]["score"]["kept"] = [0.1] * 10
    (depth,) = curves.depth(found)
    assert depth.series[1].y == pytest.approx([100 / 3] * 4 + [200 / 3])
    assert depth.series[1].interval == [of_share(4, 12)] * 4 + [of_share(8, 12)]
    (kept,) = curves.kept(found)
    assert kept.series[1].y == pytest.approx([20 / 3] * 8 + [50 / 3, 30])
    assert kept.series[1].interval[0] == pytest.approx(of_mean(over([10.0, 5.0, 5.0])))


def test_intervals_of_many_lines_are_left_out():
    policies = [f"h2o:recent={n}" for n in range(curves.MOST_INTERVALS + 1)]
    found = [recall(policy, "5%", 0.1 * seed, seed=seed) for policy in policies for seed in (0, 1)]
    (few,) = curves.quality(found[:-2])
    assert all(series.interval == [of_share(4, 80)] for series in few.series)
    (many,) = curves.quality(found)
    assert many.title.endswith("\nmean of 2 seeds")
    assert all(series.interval == () and series.y == [5.0] for series in many.series)


@pytest.mark.slow
def test_a_long_legend_makes_the_picture_higher_not_the_panels_smaller(tmp_path):
    few, many = ([recall(f"h2o:recent={n}", "5%", 0.5) for n in range(count)] for count in (2, 24))
    (tmp_path / "few").mkdir()
    heights = [size(curves.plots(found, folder)[0])[1] for found, folder in ((few, tmp_path / "few"), (many, tmp_path))]
    assert heights[1] > heights[0] + 5 * 15


def test_contexts_are_no_seeds():
    found = [*several_seeds()[3:6], *({**r, "case": "context=2"} for r in several_seeds()[3:6])]
    assert "3 seeds" in curves.depth(found)[0].title
    assert "seeds" not in curves.depth([r for r in found if r["seed"] == 1])[0].title


def test_questions_that_come_later_have_panels_of_their_own():
    found = [*several_seeds()[3:6], *({**r, "case": "context=1,ask=later"} for r in several_seeds()[3:6])]
    assert [panel.title.split("\n")[0] for panel in curves.depth(found)] == [
        "recall at 5%, % right",
        "recall at 5%, ask=later, % right",
    ]


@pytest.mark.long
def test_intervals_are_drawn(tmp_path):
    plain = [r for r in several_seeds() if r["seed"] == 0]
    (tmp_path / "plain").mkdir()
    for one, many in zip(curves.plots(plain, tmp_path / "plain"), curves.plots(several_seeds(), tmp_path), strict=True):
        assert many.read_bytes() != one.read_bytes()


def test_an_evicting_policy_with_room_for_the_whole_text_is_no_full_cache():
    cells = [("full", 1.0), ("h2o", 0.75), ("topk_dynamic", 0.5), ("mine:Policy", 0.75)]
    found = [recall(policy, "100%", accuracy) for policy, accuracy in cells]
    found += [recall(policy, "20%", 0.25) for policy in ("h2o", "mine:Policy")]
    for panels in (curves.depth(found), curves.kept(found)):
        few, all_ = ({series.name: series for series in panel.series} for panel in panels)
        assert few.keys() == all_.keys() == {policy for policy, _ in cells}
        assert [name for name, series in few.items() if series.reference] == ["full", "topk_dynamic"]
    assert curves.depth(found)[0].series[1].y == curves.depth(found[-2:])[0].series[0].y
    assert report.weaknesses([found[1], found[4]]) == []  # nothing is known of a full cache
    assert len(curves.quality(found)[0].series[1].x) == 2


@pytest.mark.slow
def test_plots_are_pngs_of_a_sensible_size(tmp_path):
    paths = curves.plots(rows(), tmp_path)
    assert [path.name for path in paths] == ["quality.png", "depth.png", "kept.png"]
    for path in paths:
        width, height = size(path)
        assert 400 <= width <= 2000
        assert 300 <= height <= 2000
    assert size(paths[0])[1] > size(paths[1])[1]  # two rows of panels


def test_only_what_was_measured_is_drawn(tmp_path):
    only = [r for r in rows() if r["task"] == "mass"]
    assert [path.name for path in curves.plots(only, tmp_path)] == ["quality.png"]


def test_curves_hold_the_rows_numbers():
    quality = curves.quality(rows())
    assert [panel.title.split("\n")[0] for panel in quality] == [
        "recall, % right",
        "perplexity",
        "agreement with the full cache, %",
        "retained attention mass, %",
    ]
    full, local, *_ = quality[0].series
    assert full.reference
    assert (full.x, full.y) == ([100.0], [90.0])
    assert (local.x, local.y) == ([5.0, 20.0, 30.0], [25.0, 25.0, 25.0])
    depth = curves.depth(rows())
    assert [panel.title.split("\n")[0] for panel in depth] == [
        f"recall at {budget}, % right" for budget in ("5%", "20%", "300")
    ]
    assert depth[0].series[1].y == [0, 0, 0, 0, 50]
    assert depth[0].series[1].x == [10, 30, 50, 70, 90]
    kept = curves.kept(rows())
    assert kept[0].series[1].y == pytest.approx([5] * 8 + [20, 40])


def test_depths_without_questions_are_left_out():
    lonely = recall("local", "5%", 1.0)
    lonely["score"]["by_depth"] = [[0, 0]] * 9 + [[1, 1]]
    (panel,) = curves.depth([lonely])
    assert (panel.series[0].x, panel.series[0].y) == ([90], [100])


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=re.escape(pip_install("plots"))):
        curves.plots(rows(), tmp_path)


@pytest.mark.slow
def test_a_picture_that_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match="cannot be written: No such file"):
        curves.plots(rows(), tmp_path / "missing")
