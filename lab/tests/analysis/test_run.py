"""Which measurements are made, what is skipped and why, what a folder keeps, and how a stopped run goes on."""

import errno
import json
import os
from dataclasses import replace

import model_folders
import pytest
import torch

from kvkeep.errors import InputError
from kvkeep.models import load
from kvkeep.models.tokenization import Writer
from kvkeep_lab.analysis import run as running
from kvkeep_lab.analysis.job import AnalysisJob, find, read
from kvkeep_lab.analysis.measure import Measurement, Reading, Skipped
from kvkeep_lab.analysis.report import AnalysisFolder
from kvkeep_lab.analysis.run import run

TEXT = "the quick brown fox jumps over the lazy dog and the cat. " * 12
N = 36


class Sums(Measurement):
    """Adds up what it is shown."""

    name, source, title = "sums", "nobody, Figure 1", "Sums"
    reads = frozenset({"attention", "mlp"})
    least_tokens = 4

    def __init__(self, context):
        super().__init__(context)
        self.weight, self.entries, self.tokens = 0.0, [], 0

    def rows(self, rows):
        self.weight += rows.weights.sum().item()
        self.entries.append((rows.first, rows.layer))

    def mlp(self, mlp):
        self.tokens += len(mlp.residual)

    def result(self):
        facts = {"weight": self.weight, "order": self.entries, "tokens": self.tokens}
        return {**facts, "words": "".join(self.context.words), "nothing": float("nan")}

    @classmethod
    def reading(cls, result):
        return Reading("p", "h", "m", "agree")

    @classmethod
    def draw(cls, result, axes):
        axes.plot([0, 1], [0, result["weight"]])


class Controlled(Sums):
    name, control, reads = "controlled", True, frozenset({"attention"})


class Running(Sums):
    name, reads = "running", frozenset({"model"})
    calls = 0

    def runs(self, subject, progress):
        type(self).calls += 1
        progress(0.5)
        self.weight = float(subject.model(input_ids=subject.tokens[None]).logits.shape[1])


class Both(Running):
    name, control, reads = "both", True, frozenset({"attention", "model"})

    def rows(self, rows):
        self.entries.append(rows.layer)


class Units(Sums):
    name, reads = "units", frozenset({"units"})


class Stopped(Running):
    name = "stopped"

    def runs(self, subject, progress):
        raise KeyboardInterrupt


class Refusing(Sums):
    name = "refusing"

    def rows(self, rows):
        raise Skipped("This cannot be.")


class Long(Sums):
    name, least_tokens = "long", 10_000


KINDS = (Sums, Controlled, Refusing, Long, Running)


@pytest.fixture(scope="module")
def writer():
    with model_folders.one_thread():
        checkpoint = load.find(model_folders.folder())
        yield Writer(checkpoint, load.read_weights(checkpoint))


def job(writer, kinds, **changes):
    options = {"seed": 0, "text": TEXT, "tokens": N} | changes
    text = read(writer.checkpoint, "fox.txt", options["text"], options["tokens"])
    return AnalysisJob("a model", writer.checkpoint, text, kinds, options["seed"])


def result_of(path, name):
    return json.loads((path / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def finished(writer, tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    stages = []
    run(job(writer, KINDS), writer, AnalysisFolder(path), lambda what, share: stages.append((what, share)))
    return path, stages


def test_every_row_adds_up_to_one_and_comes_in_order(finished, writer, monkeypatch):
    found = result_of(finished[0], "sums")["result"]
    assert found["weight"] == pytest.approx(N * 2 * 4, rel=1e-5)
    assert found["order"] == [[0, 0], [0, 1]]
    assert found["tokens"] == N * 2
    assert found["words"] == writer.show_token(0) + writer.text_of(read(writer.checkpoint, "", TEXT, N).tokens.tolist())


def test_a_measurement_knows_the_windows_of_the_layers(tmp_path):
    with model_folders.one_thread():
        checkpoint = load.find(model_folders.folder("gemma3"))
        of = Writer(checkpoint, load.read_weights(checkpoint))
    windows = type("Windows", (Sums,), {"name": "windows", "result": lambda self: {"of": self.context.windows}})
    run(job(of, [windows]), of, AnalysisFolder(tmp_path))
    assert result_of(tmp_path, "windows")["result"] == {"of": [100, None]}


def test_numbers_that_json_cannot_hold_are_null(finished):
    assert result_of(finished[0], "sums")["result"]["nothing"] is None


def test_a_control_has_the_result_of_other_weights(finished):
    found = result_of(finished[0], "controlled")["result"]
    assert found["random"]["weight"] == pytest.approx(N * 2 * 4, rel=1e-5)
    assert found["random"]["order"] == found["order"]
    assert "random" not in result_of(finished[0], "sums")["result"]


def test_random_weights_are_other_weights_of_the_same_seed(writer):
    from kvkeep.models.load import with_random_weights

    before = torch.random.get_rng_state()
    one, same, other = (with_random_weights(writer, seed).model for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = [model.get_input_embeddings().weight for model in (one, same, other, writer.model)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])
    assert one.dtype == writer.model.dtype


def test_skips_say_why(finished):
    assert result_of(finished[0], "refusing")["skipped"] == "This cannot be."
    assert "36 tokens; this needs 10000" in result_of(finished[0], "long")["skipped"]


class Needy(Running):
    name = "needy"

    def result(self):
        return {"loss": float("nan")}

    @classmethod
    def reading(cls, result):
        return Reading("p", f"{result['loss'] > 1}", "m", "agree")


def test_a_model_that_yields_no_numbers_is_said_so(writer, tmp_path):
    """As one in a dtype that is too narrow for it: a file with null in place of its numbers would look damaged."""
    model = load.read_weights(writer.checkpoint)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0] = float("nan")
    attention = type("Attention", (Sums,), {"name": "attention", "reads": frozenset({"attention"})})
    run(job(writer, (attention, Needy)), Writer(writer.checkpoint, model), AnalysisFolder(tmp_path))
    for name in ("attention", "needy"):
        assert "no number (NaN)" in result_of(tmp_path, name)["skipped"]


def test_a_control_that_yields_no_numbers_skips_its_measurement(writer, tmp_path, monkeypatch):
    drawn = running.with_random_weights

    def broken(*args):
        found = drawn(*args)
        with torch.no_grad():
            found.model.model.layers[1].self_attn.q_proj.weight[0] = float("nan")
        return found

    monkeypatch.setattr(running, "with_random_weights", broken)
    run(job(writer, (Controlled,)), writer, AnalysisFolder(tmp_path))
    assert result_of(tmp_path, "controlled")["skipped"].startswith("With random weights, its control: What the model")


@pytest.mark.parametrize("part", ["no_mlp", "no_units"])
def test_what_the_model_does_not_show_is_a_reason_to_skip(writer, tmp_path, monkeypatch, part):
    look = running.look
    monkeypatch.setattr(running, "look", lambda *args: replace(look(*args), **{part: "it has none"}))
    run(job(writer, (Sums, Units)), writer, AnalysisFolder(tmp_path))
    reasons = {name: result_of(tmp_path, name).get("skipped") for name in ("sums", "units")}
    assert (
        reasons
        == {
            "no_mlp": {"sums": "The model's MLP blocks cannot be shown: it has none.", "units": None},
            "no_units": {
                "sums": None,
                "units": "The hidden units of the model's MLP blocks cannot be shown: it has none.",
            },
        }[part]
    )


def test_a_measurement_may_read_run_and_have_a_control(writer, tmp_path):
    run(job(writer, (Both,)), writer, AnalysisFolder(tmp_path))
    found = result_of(tmp_path, "both")["result"]
    assert found["weight"] == N  # of its run
    assert found["order"] == found["random"]["order"] == [0, 1]


@pytest.mark.parametrize(
    ("reads", "part", "said"),
    [
        ("attention", "rows", "lacking reads attention but takes no rows"),
        ("mlp", "mlp", "lacking reads MLP blocks but takes none"),
        ("model", "runs", "lacking reads the model but has no runs"),
    ],
)
def test_a_measurement_that_lacks_what_it_declares_is_named(writer, tmp_path, reads, part, said):
    parts = {"name": "lacking", "reads": frozenset({reads}), part: getattr(Measurement, part)}
    with pytest.raises(NotImplementedError, match=said):
        run(job(writer, (type("Lacking", (Sums,), parts),)), writer, AnalysisFolder(tmp_path))


def test_runs_of_their_own_and_stages(finished):
    path, stages = finished
    assert result_of(path, "running")["result"]["weight"] == N
    assert ("reading the text", 1.0) in stages
    assert ("reading it with random weights", 1.0) in stages
    assert ("Sums", 0.5) in stages


class Cheap(Running):
    name, effort = "cheap", 1


class Dear(Running):
    name, effort = "dear", 3


def test_the_cheapest_runs_come_first_and_the_time_of_the_rest_is_told(writer, tmp_path):
    told = []

    def on_record(waiting, seconds):
        told.append(([kind.name for kind in waiting], seconds))

    run(job(writer, [Sums, Dear, Cheap]), writer, AnalysisFolder(tmp_path), on_record=on_record)
    names, seconds = zip(*told, strict=True)
    assert names == (["dear", "cheap"], ["dear"], [])
    assert seconds[0] is None
    assert seconds[1] == pytest.approx(3 * result_of(tmp_path, "cheap")["seconds"])


def test_the_seconds_of_what_only_reads_the_walk_are_not_those_of_runs():
    pace = running.Pace()
    pace.add(Sums, {"seconds": 100.0})
    assert pace.seconds([Dear]) is None
    pace.add(Cheap, {"seconds": 2.0})
    assert pace.seconds([Dear, Sums]) == 6.0


def test_provenance(finished, writer):
    found = json.loads((finished[0] / "run.json").read_text())
    assert found["model"] == "a model"
    assert found["text_name"] == "fox.txt"
    assert found["text"].startswith("sha256:")
    assert (found["n_tokens"], found["n_layers"], found["n_heads"], found["n_kv_heads"]) == (N, 2, 4, 2)
    assert {"weights", "dtype", "device", "seed", "kvkeep", "torch", "transformers", "python"} <= set(found)
    assert result_of(finished[0], "sums")["version"] == 1


def test_the_same_again_makes_nothing(finished, writer, monkeypatch):
    calls = Running.calls
    monkeypatch.setattr(running, "walk", None)
    run(job(writer, KINDS), writer, AnalysisFolder(finished[0]))
    assert Running.calls == calls


def test_another_version_is_measured_anew(writer, tmp_path, monkeypatch):
    run(job(writer, [Running]), writer, AnalysisFolder(tmp_path))
    calls = Running.calls
    monkeypatch.setattr(Running, "VERSION", 2)
    run(job(writer, [Running]), writer, AnalysisFolder(tmp_path))
    assert Running.calls == calls + 1
    assert result_of(tmp_path, "running")["version"] == 2


def test_what_is_finished_is_kept_when_the_run_is_stopped(writer, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(job(writer, [Sums, Stopped, Running]), writer, AnalysisFolder(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "sums.json"}
    before = (tmp_path / "sums.json").stat().st_mtime_ns
    run(job(writer, [Sums, Running]), writer, AnalysisFolder(tmp_path))
    assert (tmp_path / "sums.json").stat().st_mtime_ns == before
    assert (tmp_path / "running.json").exists()


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"seed": 1}, "the seed"), ({"tokens": 20}, "the number of tokens"), ({"text": TEXT[4:]}, "text")],
)
def test_a_folder_of_another_run_is_refused(finished, writer, changes, what):
    with pytest.raises(InputError, match=what):
        run(job(writer, [Sums], **changes), writer, AnalysisFolder(finished[0]))


def test_a_folder_of_another_command_or_of_unknown_origin_is_refused(tmp_path):
    (tmp_path / "sparsity.json").write_text("{}\n")
    with pytest.raises(InputError, match=r"sparsity.json but no run.json"):
        AnalysisFolder(tmp_path).check({})
    (tmp_path / "run.json").write_text('{"model": "m", "tasks": {}}')
    with pytest.raises(InputError, match="another run: the command"):
        AnalysisFolder(tmp_path).check({})
    (tmp_path / "run.json").write_text("torn")
    with pytest.raises(InputError, match="cannot be read"):
        AnalysisFolder(tmp_path).check({})
    with pytest.raises(InputError, match="is a file"):
        AnalysisFolder(tmp_path / "run.json")


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be"):
        AnalysisFolder(tmp_path / "file" / "below").open({})


def test_a_full_disk_loses_nothing(writer, tmp_path, monkeypatch):
    calls = []
    sync = os.fsync

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 5:  # run.json and one measurement, each with its folder, had room
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"No space left on device. Finished measurements are safe.*goes on"):
        run(job(writer, [Sums, Running]), writer, AnalysisFolder(tmp_path))
    (kept,) = {path.name for path in tmp_path.iterdir()} - {"run.json"}  # and no torn file
    before = (tmp_path / kept).stat().st_mtime_ns
    run(job(writer, [Sums, Running]), writer, AnalysisFolder(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "sums.json", "running.json"}
    assert (tmp_path / kept).stat().st_mtime_ns == before


def test_a_second_writer_is_refused_while_measurements_are_made(writer, tmp_path):
    def second(what, share):
        with pytest.raises(InputError, match="Another run is writing to"):
            run(job(writer, [Sums]), writer, AnalysisFolder(tmp_path))

    run(job(writer, [Running]), writer, AnalysisFolder(tmp_path), second)
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "running.json"}


def test_find_keeps_the_page_order_and_refuses_unknown_names():
    names = [kind.name for kind in find(["all"])]
    assert set(names) - {kind.name for kind in find([])} == {"local_global", "removal"}
    assert len(set(names)) == len(names) > 3
    assert [kind.name for kind in find(names[1::-1])] == names[:2]
    with pytest.raises(InputError, match=r"no measurement 'sparse'. Known: sparsity,"):
        find(["sparse"])


def test_how_much_is_read_and_what_is_said_about_it(writer):
    trained = model_folders.TRAINED_LENGTH
    default = read(writer.checkpoint, "f", TEXT, None)
    assert len(default.tokens) == trained
    assert default.notes == []
    longer = read(writer.checkpoint, "f", TEXT, trained + 5)
    assert "made for 40 tokens; what it does with the other 5" in longer.notes[0]
    short = read(writer.checkpoint, "f", TEXT[:100], trained)
    assert f"only {len(short.tokens)} tokens" in short.notes[0]
    for tokens in (0, 1):  # one would be the begin token alone
        with pytest.raises(InputError, match=f"max_tokens={tokens} leaves nothing"):
            read(writer.checkpoint, "f", TEXT, tokens)
    assert len(read(writer.checkpoint, "f", TEXT, 2).tokens) == 2


def test_learned_positions_are_a_limit():
    checkpoint = load.find(model_folders.folder("gpt2"))
    found = read(checkpoint, "f", TEXT, 100)
    assert len(found.tokens) == model_folders.POSITIONS
    assert "learned positions for 32" in found.notes[0]
