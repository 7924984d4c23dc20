"""Heat maps: numbers in small ones, a bar of colours beside large ones; and what drawing asks of the installation."""

import math
import os
import sys
from types import ModuleType

import pytest

from kvkeep import plots
from kvkeep.errors import InputError
from kvkeep.plots import Heat, charts


def heat(lines=2, columns=2, **more):
    values = [[float(line * columns + column) for column in range(columns)] for line in range(lines)]
    names = {"columns": [f"c{n}" for n in range(columns)], "lines": [f"l{n}" for n in range(lines)]}
    return Heat(**{"title": "lost, %", "x_label": "head", "y_label": "layer", "values": values, **names, **more})


def grid(figure):
    """Places of the maps, as rows and columns."""
    found = figure.axes[0].get_subplotspec().get_gridspec()
    return found.nrows, found.ncols


def test_a_small_map_has_its_numbers_in_the_cells():
    figure = charts.heat_map([heat(values=[[0.4, 56.0], [math.nan, 99.6]])])
    (axes,) = figure.axes
    assert [(text.get_position(), text.get_text(), text.get_color()) for text in axes.texts] == [
        ((0, 0), "0", "white"),
        ((1, 0), "56", "black"),  # on a bright cell
        ((1, 1), "100", "black"),
    ]
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("lost, %", "head", "layer")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["l0", "l1"]


def test_a_large_map_has_a_bar_of_colours_and_a_label_here_and_there():
    for lines, columns, shown in ((2, 13, ["c0", "c2", "c4"]), (49, 2, ["c0", "c1"])):
        figure = charts.heat_map([heat(lines, columns)])
        axes, _bar = figure.axes
        assert list(axes.texts) == []
        assert [label.get_text() for label in axes.get_xticklabels()][:3] == shown
    assert [label.get_text() for label in axes.get_yticklabels()][:3] == ["l0", "l5", "l10"]


def test_maps_stand_side_by_side_unless_one_is_wide():
    assert grid(charts.heat_map([heat()] * 2)) == (1, 2)
    assert grid(charts.heat_map([heat()] * 4)) == (2, 2)
    assert grid(charts.heat_map([heat(), heat(wide=True)])) == (2, 1)
    one, many = charts.heat_map([heat()]), charts.heat_map([heat(lines=40)])
    assert one.get_figheight() < many.get_figheight() == pytest.approx(6.0)


def test_without_matplotlib_there_are_no_plots(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    for refused in (lambda: plots.picture(print), lambda: plots.draw(tmp_path / "a.png", [heat()])):
        with pytest.raises(InputError, match=r"^There are no plots: matplotlib is not installed: .*kvkeep\[plots\]"):
            refused()
    assert list(tmp_path.iterdir()) == []


def test_a_backend_of_the_environment_is_kept_for_the_caller(monkeypatch):
    """Matplotlib is imported without it, since it may not exist."""
    seen, fake = [], ModuleType("fake")
    fake.rcParams, fake.sheet = {}, lambda fill, panels: b"png"

    def imported(name):
        seen.append((name, os.environ.get("MPLBACKEND")))
        return fake

    monkeypatch.delitem(sys.modules, "matplotlib")
    monkeypatch.setenv("MPLBACKEND", "tkagg")
    monkeypatch.setattr(plots, "import_module", imported)
    assert plots.picture(print) == b"png"
    assert seen == [("kvkeep.plots.charts", None), ("matplotlib", None)]
    assert fake.rcParams == {"backend": "tkagg"}
    assert os.environ["MPLBACKEND"] == "tkagg"
