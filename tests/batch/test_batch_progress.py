"""The progress of a batch job: it moves with tokens, expects what lines have shown, and draws only on a terminal."""

import io
import random

import pytest
import torch
from commands import run, write
from rich.console import Console

import kvkeep
from kvkeep import Engine, Request, SamplingParams
from kvkeep.batch.survey import Pace, TokenCounts
from kvkeep.cli import console, generate_batch
from kvkeep.cli import progress as bars
from kvkeep.models.load import watched


def test_a_job_moves_with_tokens_read_and_written():
    pace = Pace(TokenCounts(300, 30), 0.0)
    assert (pace.done, pace.total, pace.seconds_left()) == (0, 330, None)
    for _ in range(3):
        pace.begin(TokenCounts(100, 10))
    pace.read_in_part(50.0, 1.0)
    assert (pace.done, pace.total, pace.reading_rate) == (50, 330, 50)
    assert (pace.seconds_left(), pace.seconds_to_read) == (None, 5)  # nobody knows how long writing takes
    pace.step(100, 1, 2.0)
    assert (pace.done, pace.total, pace.writing_rate) == (101, 330, 0.5)
    pace.step(0, 1, 2.5)
    assert pace.done == 102
    assert pace.seconds_left() == pytest.approx(200 * 0.02 + 28 * 0.5)


def test_lines_that_end_early_shorten_the_rest():
    pace = Pace(TokenCounts(20, 2000), 0.0)
    pace.begin(TokenCounts(1, 100))
    pace.step(1, 1, 1.0)
    assert pace.total == 2020
    pace.end(TokenCounts(1, 100), 1, 25)
    assert pace.total == 20 + 25 + 0.25 * 1900
    pace.begin(TokenCounts(1, 100))
    assert pace.total == 20 + 125 + 0.625 * 1800  # a running line may use all of its tokens


def test_refused_and_failed_requests_count_no_more():
    pace = Pace(TokenCounts(30, 30), 0.0)
    for read, written in ((0, 0), (10, 4)):
        pace.begin(TokenCounts(10, 10))
        pace.end(TokenCounts(10, 10), read, written)
    assert pace.total == 10 + 10 + 4 + 0.2 * 10


def test_no_order_of_events_leaves_the_bounds():
    rng = random.Random(7)
    for _ in range(50):
        works = [TokenCounts(rng.randrange(1, 50), rng.randrange(1, 20)) for _ in range(rng.randrange(1, 8))]
        pace, now = Pace(TokenCounts(sum(w.prompt for w in works), sum(w.new for w in works)), 0.0), 0.0
        waiting, reading, writing = list(works), [], []
        while waiting or reading or writing:
            now += rng.random()
            if waiting and rng.random() < 0.5:
                reading.append(waiting.pop())
                pace.begin(reading[-1])
            elif reading and rng.random() < 0.5:
                pace.read_in_part(rng.random() * 60, now)  # with padding, more than there is
            elif reading:
                writing.append([reading.pop(0), 1])
                pace.step(writing[-1][0].prompt, 1, now)
            elif writing:
                one = writing.pop(rng.randrange(len(writing)))
                pace.end(one[0], one[0].prompt, one[1])
            assert 0 <= pace.done <= pace.total <= sum(map(sum, works)) + 1e-6
            assert pace.seconds_left() is None or pace.seconds_left() >= 0
        assert pace.done == pytest.approx(pace.total)


@pytest.mark.parametrize("chunk", [None, 5])
def test_reading_is_seen_layer_by_layer_and_the_result_stays(chunk):
    model, tokenizer = kvkeep.load()
    request = Request(prompt=list(range(1, 21)), sampling=SamplingParams(max_new_tokens=3))
    seen = []
    with Engine(model, tokenizer, budget=16, rows=2, prefill_chunk=chunk) as engine:
        (plain,) = engine.generate(request)
        with watched(engine.model, seen.append):
            (found,) = engine.generate(request)
    n_layers = model.config.num_hidden_layers
    assert len(seen) == n_layers * (1 if chunk is None else 4)
    assert sum(seen) == pytest.approx(20)
    assert found.token_ids == plain.token_ids
    assert not any(part._forward_hooks for part in model.modules())


def test_a_model_without_a_list_of_layers_is_read_unseen():
    model, _ = kvkeep.load()
    model.config.num_hidden_layers += 1
    try:
        with watched(model, pytest.fail), torch.inference_mode():
            model(torch.tensor([[1, 2, 3]]))
    finally:
        model.config.num_hidden_layers -= 1


def drawn(monkeypatch, width):
    """Everything that a terminal of this width is sent."""
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=width, highlight=False, color_system=None)
    monkeypatch.setattr(console, "err", lambda: terminal)
    return screen


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
def test_a_job_of_one_line_shows_progress(tmp_path, monkeypatch, width):
    line = {"prompt": "Once upon a time " * 30, "options": {"max_new_tokens": 60, "ignore_end": True}}
    source, screen = write(tmp_path / "in.jsonl", line), drawn(monkeypatch, width)
    assert run("-i", source, "-o", tmp_path / "out.jsonl", "--budget", 40).exit_code == 0
    shown = screen.getvalue()
    assert "1 of 1 line" in shown
    assert "tokens/s, 0:00:00 left" in shown
    assert "100%" in shown
    found = [text for text in shown.replace("\r", "\n").split("\n") if " of 1 line" in text]
    assert found
    assert max(map(len, found)) <= width + 20  # with codes that move the cursor


def test_a_job_with_nothing_to_do_loads_no_model_and_draws_no_bar(tmp_path, monkeypatch):
    source = write(tmp_path / "in.jsonl", {"prompt": "Hello", "options": {"max_new_tokens": 2}})
    assert run("-i", source, "-o", tmp_path / "out.jsonl").exit_code == 0
    screen = drawn(monkeypatch, 80)
    monkeypatch.setattr(generate_batch, "_load", lambda *given: pytest.fail("the model was loaded"))
    assert run("-i", source, "-o", tmp_path / "out.jsonl").exit_code == 0
    assert "1 of 1 line were done before; nothing is left to do" in screen.getvalue()
    assert "%" not in screen.getvalue()


@pytest.mark.slow
def test_the_share_grows_while_one_line_is_read_and_written(tmp_path, monkeypatch):
    seen, draw = [], bars.BatchBar._draw
    monkeypatch.setattr(
        bars.BatchBar, "_draw", lambda self: (draw(self), seen.append(self._pace.done / self._pace.total))
    )
    drawn(monkeypatch, 80)
    line = {"prompt": "Once upon a time " * 30, "options": {"max_new_tokens": 60, "ignore_end": True}}
    source = write(tmp_path / "in.jsonl", line)
    assert run("-i", source, "-o", tmp_path / "out.jsonl", "--budget", 40).exit_code == 0
    assert seen == sorted(seen)
    assert len({round(share, 2) for share in seen}) > 30
    assert (seen[0], seen[-1]) == (0, 1)


def test_without_a_terminal_nothing_is_drawn_or_watched(tmp_path, monkeypatch):
    monkeypatch.setattr("kvkeep.cli.progress.watched", pytest.fail)
    source = write(tmp_path / "in.jsonl", {"prompt": "Hello", "options": {"max_new_tokens": 2}})
    result = run("-i", source, "-o", tmp_path / "out.jsonl")
    assert (result.exit_code, "%" in result.output) == (0, False)
    assert "note: 1 of 1 line in " in result.output
