"""Pictures of lines: legible without colour, with a legend that fits, and with nothing hidden."""

import io
import math
from itertools import pairwise

import pytest
from PIL import Image

from kvkeep import plots
from kvkeep.plots import Panel, Series, charts

LONG = "snapkv:decode=score,window=8,kernel=13,recent=64 (layer-budget=pyramid:20,positions=slot)"


def panel(*series, **more):
    return Panel(title="recall, % right", x_label="budget, %", series=series, **more)


def series(name, *heights, **more):
    return Series(name, x=[1.0 + n for n in range(len(heights))], y=list(map(float, heights)), **more)


def drawn(figure):
    figure.canvas.draw()
    return figure


def test_no_two_of_sixty_lines_look_alike_without_colour():
    looks = [charts._style(number, reference=False) for number in range(60)]
    grey = {(str(look["linestyle"]), look["marker"], look.get("markerfacecolor")) for look in looks}
    assert len(grey) == 60
    neighbours = pairwise(looks)
    assert all(a["marker"] != b["marker"] and a["linestyle"] != b["linestyle"] for a, b in neighbours)
    references = [charts._style(number, reference=True) for number in range(4)]
    assert len({str(look["linestyle"]) for look in references}) == 4


@pytest.mark.long
@pytest.mark.parametrize("names", [["a"], [LONG], [LONG, "h2o", "a" * 400], [f"{LONG}{n}" for n in range(20)]])
@pytest.mark.parametrize("panels", [1, 3, 7])
def test_the_legend_and_the_titles_fit(names, panels):
    one = panel(*(series(name, n, 2 + n) for n, name in enumerate(names)))
    figure = drawn(charts.line_charts([one] * panels))
    (legend,) = figure.legends
    inside, frame = legend.get_window_extent(), figure.bbox
    assert frame.x0 <= inside.x0 < inside.x1 <= frame.x1
    assert frame.y0 <= inside.y0 < inside.y1 <= frame.y1
    heights = [axes.get_position().height * figure.get_figheight() for axes in figure.axes]
    assert min(heights) > 1.5
    for axes in figure.axes:
        assert axes.get_tightbbox().y0 >= inside.y1 - 1


def test_equal_lines_are_named_and_drawn_beside_each_other():
    one = panel(series("a", 1, 2), series("b", 1, 2), series("c", 2, 1), series("d", 1), series("e", 1, 2))
    assert one.equal() == [["a", "b", "e"]]
    figure = drawn(charts.line_charts([one]))
    assert figure.axes[0].get_xlabel() == "budget, %\nequal: a = b = e"
    places = [line.get_transform().transform((1, 1))[0] for line in figure.axes[0].lines]
    assert places == sorted(places)
    assert all(math.isclose(b - a, charts.NUDGE * charts.DPI) for a, b in pairwise(places))


def test_lines_that_differ_stay_in_their_places():
    figure = drawn(charts.line_charts([panel(series("a", 1, 2), series("b", 1, 3))]))
    assert figure.axes[0].get_xlabel() == "budget, %"
    assert len({line.get_transform().transform((1, 1))[0] for line in figure.axes[0].lines}) == 1


def test_a_reference_is_not_equal_to_a_line():
    assert panel(series("full", 1, reference=True), series("a", 1)).equal() == []


def test_a_long_note_is_cut():
    one = panel(*(series(f"{LONG}{n}", 1, 2) for n in range(30)))
    label = charts.line_charts([one]).axes[0].get_xlabel()
    assert label.count("\n") == charts.NOTE_LINES
    assert label.endswith("…")


def test_intervals_lie_at_their_points_and_are_seen_whole():
    one = panel(
        series("a", 10, 20, interval=[(5.0, 15.0), (math.nan, math.nan)]),
        series("b", 10, 30, interval=[(8.0, 12.0), (25.0, 60.0)]),
        series("full", 50, reference=True, interval=[(45.0, 55.0)]),
        log_x=True,
    )
    figure = drawn(charts.line_charts([one]))
    (axes,) = figure.axes
    bars = [found for found in axes.collections if hasattr(found, "get_segments")]
    assert [segment[:, 1].tolist() for segment in bars[1].get_segments()] == [[8, 12], [25, 60]]
    low, high = axes.get_ylim()
    assert low < 5 < 60 < high


@pytest.mark.parametrize("values", [[math.nan, math.nan], [math.inf, 1.0], [0.0, 0.0], [1e300, -1e300]])
def test_odd_numbers_make_a_picture_or_an_error(values, tmp_path):
    one = panel(series("a", *values, interval=[(values[0], values[1])] * 2), series("b", *values))
    path = plots.draw(tmp_path / "odd.png", [one])
    assert Image.open(io.BytesIO(path.read_bytes())).size[0] > 300


def test_long_names_are_broken_after_commas():
    assert charts.Legend.of([LONG.partition(" ")[0]], 4.2).labels == [
        "snapkv:decode=score,window=8,kernel=13,\nrecent=64"
    ]


@pytest.mark.parametrize("name", ["", "   ", "$x^", "a\nb", "é" * 120, "\x1b[31m"])
def test_odd_names_are_drawn(name, tmp_path):
    assert plots.draw(tmp_path / "odd.png", [panel(series(name, 1, 2), series("b", 1, 2))]).stat().st_size > 1000
