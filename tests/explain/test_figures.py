"""Pictures for scripts: their numbers are the record's, and their files are PNG."""

import math
import random

import pytest
import torch
from PIL import Image

from explain.records import record
from kvkeep.errors import InputError
from kvkeep.explain import explanation

CELLS = 200


def steps(run):
    """Tokens that are read after each moment of a run, counted from the sizes of its steps."""
    prompt, chunk = len(record().tokens), record().chunk
    sizes = [min(chunk, prompt - first) for first in range(0, prompt, chunk)] + [1] * len(run.answer)
    return torch.tensor(sizes).cumsum(0).tolist()


def test_strips_show_what_each_head_holds():
    moment, rng = 4, random.Random(0)
    for one, run in zip(explanation.strips(record(), moment), record().runs, strict=True):
        assert run.policy in one.title
        assert one.lines[3] == "{}.{}".format(*record().heads[3])
        assert len(one.columns) == run.ledger.read
        read = steps(run)[moment]
        for _ in range(CELLS):
            head, token = rng.randrange(len(one.lines)), rng.randrange(len(one.columns))
            dropped, value = int(run.ledger.dropped[head, token]), one.values[head][token]
            if token >= read:
                assert math.isnan(value)
            else:
                assert value == (100 if dropped < 0 or dropped > moment else 0)


def test_times_are_shares_of_heads_at_every_moment():
    for one, run in zip(explanation.times(record()), record().runs, strict=True):
        assert len(one.lines) == len(steps(run)) == run.ledger.moments
        for moment, read in enumerate(steps(run)):
            dropped = run.ledger.dropped[:, :read]
            held = ((dropped < 0) | (dropped > moment)).double().mean(dim=0)
            assert torch.allclose(torch.tensor(one.values[moment][:read]).double(), 100 * held, atol=1e-4)
            assert all(map(math.isnan, one.values[moment][read:]))


def test_many_positions_share_a_column(monkeypatch):
    fine = torch.tensor(explanation.times(record())[0].values[-1])
    monkeypatch.setattr(explanation, "_MOST_COLUMNS", 50)
    one = explanation.times(record())[0]
    step = -(-len(fine) // 50)
    assert one.columns[:3] == ["0", str(step), str(2 * step)]
    assert len(one.columns) == -(-len(fine) // step)
    for column, part in enumerate(fine.split(step)):
        assert one.values[-1][column] == pytest.approx(float(part.mean()), rel=1e-5)


def test_maps_have_layers_down_and_heads_across():
    answer = -(-len(record().tokens) // record().chunk)
    for one, run in zip(explanation.lost(record()), record().runs, strict=True):
        assert len(one.lines) * len(one.columns) == len(record().heads)
        for number, (layer, head) in enumerate(record().heads):
            mean = run.missed.lost[answer:, number].mean()
            assert one.values[layer][head] == pytest.approx(100 * float(mean), rel=1e-5)


def test_a_token_lives_until_each_head_drops_it():
    token = 40  # read in the second moment
    for one, run in zip(explanation.lives(record(), token), record().runs, strict=True):
        for number, (layer, head) in enumerate(record().heads):
            dropped = int(run.ledger.dropped[number, token])
            there = (dropped - 1) / (run.ledger.moments - 1) if dropped >= 0 else 1.0
            assert one.values[layer][head] == pytest.approx(100 * there, rel=1e-5)


@pytest.mark.slow
def test_pictures_are_files(tmp_path):
    folder = tmp_path / "some" / "pictures"
    paths = record().draw(folder, moment=2, token=3)
    assert [path.name for path in paths] == ["strips.png", "times.png", "lost.png", "token.png"]
    for path in paths:
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert len(image.convert("RGB").getcolors(2**24)) > 20
    with pytest.raises(InputError, match=r"strips\.png exists"):
        record().draw(folder)
    assert len(record().draw(str(folder), overwrite=True)) == 3


def test_a_place_without_room_for_pictures_is_refused_before_any_is_drawn(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file is no folder"):
        explanation.check(tmp_path / "file" / "new", overwrite=False)
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "lost.png").symlink_to("nowhere")  # a link without an end takes the name as well
    with pytest.raises(InputError, match=r"lost\.png exists"):
        explanation.check(folder, overwrite=False)
    monkeypatch.setattr(explanation.os, "access", lambda path, mode: False)
    for place in (folder, folder / "a" / "b"):
        with pytest.raises(InputError, match=rf"Nothing can be written to the folder {folder}\."):
            explanation.check(place, overwrite=True)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("options", "said"),
    [({"moment": 999}, "moment=999"), ({"token": -9999}, "token=-9999"), ({"token": True}, "token=True")],
)
def test_places_that_do_not_exist(tmp_path, options, said):
    with pytest.raises(InputError, match=said):
        record().draw(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_matplotlib_is_named_when_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(explanation, "available", lambda: False)
    with pytest.raises(InputError, match=r"kvkeep\[plots\]"):
        record().draw(tmp_path / "new")
    assert not (tmp_path / "new").exists()
