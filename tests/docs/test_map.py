"""The map in docs/index.md is true: it names the rooms that exist, and a key goes the way that is described."""

import re
import sys
from pathlib import Path

import pytest
import torch
from test_architecture import FLOOR, SRC

import kvkeep
from kvkeep import backends
from kvkeep.backends.native import native
from kvkeep.cache.layer import Layer
from kvkeep.types import AttentionOptions, Phase

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/index.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OPTIONS = AttentionOptions(scaling=1.0)


def section(title):
    (found,) = re.findall(rf"^## {title}\n(.*?)^## ", PAGE, flags=re.DOTALL | re.MULTILINE)
    return found


def test_the_map_names_every_room_and_no_other():
    lines = re.findall(r"^  (\w+[./].*)$", section("Where things are"), flags=re.MULTILINE)
    names = {name for line in lines for name in re.split(r" {3,}", line)[0].split()}
    exist = {path.name + "/" * path.is_dir() for path in SRC.iterdir() if path.suffix in ("", ".py")}
    assert names == {name for name in exist if not name.startswith("__")} - {"version.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    for name in re.findall(r"(?<!\w)(?:lab/)?(?:src|tests|bench|examples|tools)/[\w/.-]+\.\w+", page.read_text()):
        assert (ROOT / name).exists(), name


VIRTUAL = {"copy_keys", "copy_values"}
"""Methods of `lazy.LazySlots` that its subclasses define in higher rooms."""


def calls_between_modules(work):
    """Every call from one module into another: the two modules, and the name of what is called."""
    found = []

    def watch(frame, event, argument):
        if event != "call" or not inside(frame):
            return
        caller = frame.f_back
        while caller is not None and not inside(caller):
            caller = caller.f_back
        if caller is not None and inside(caller) != inside(frame):
            found.append((inside(caller), inside(frame), frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


def inside(frame):
    """The module of a frame's code; for backends and policies, of which any may run, the package alone."""
    path = Path(frame.f_code.co_filename)
    if SRC not in path.parents:
        return None
    parts = path.relative_to(SRC).with_suffix("").parts
    return parts[0] if parts[0] in ("backends", "policies") else ".".join(parts)


def floor(place):
    return FLOOR[place.partition(".")[0]]


def step(layer, tokens, phase):
    query, keys, values = (torch.randn(1, heads, tokens, 8) for heads in (4, 2, 2))
    with torch.inference_mode():
        layer.step(query, keys, values, options=OPTIONS, phase=phase)


@pytest.fixture(params=["tova", "keydiff", "topk"])
def layer(request, monkeypatch):
    """A layer whose slots are all taken, under a policy that no backend does in one call."""
    if native().library is None:
        pytest.skip("no compiler here")
    monkeypatch.setenv(backends.SWITCH, "native")
    layer = Layer(kvkeep.parse(request.param), 8)
    step(layer, 20, Phase.PREFILL)
    step(layer, 1, Phase.DECODE)
    return layer


@pytest.mark.parametrize(("table", "tokens", "phase"), [(0, 1, Phase.DECODE), (1, 12, Phase.PREFILL)])
def test_a_key_goes_the_way_that_is_described(table, tokens, phase, layer):
    tables = re.split(r"\n\|---.*\n", section("A key's way"))[1:]
    line = r"^\| (\d) \| `([\w.]+)` \| `([\w.]+)` \| `(?:\w+\.)?(\w+)` \|"
    rows = re.findall(line, tables[table], flags=re.MULTILINE)
    way = [(start, end, name) for _, start, end, name in rows]
    assert 8 <= len(way) <= 9
    found = calls_between_modules(lambda: step(layer, tokens, phase))
    rest = iter(found)
    assert all(move in rest for move in way), found
    assert all(floor(end) <= floor(start) for start, end, _ in way)
    climbs = [move for move in found if floor(move[1]) > floor(move[0]) and move[2] not in VIRTUAL]
    assert len(climbs) <= 2, climbs
