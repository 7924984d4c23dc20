"""Calibration: passages with branches, limited heads against whole matrices, needs, and patterns of DuoAttention."""

import json
import math
from dataclasses import replace

import model_folders
import pytest
import torch
from transformers import Gemma2Config, GptOssConfig, LlamaConfig

import kvkeep
from kvkeep.calibration import calibrate as calibration
from kvkeep.calibration import duo_attention
from kvkeep.calibration.calibrate import Calibration, CalibrationFile, CalibrationSettings, calibrate, needs
from kvkeep.calibration.head_losses import Loss, LossMeter, NearWindow, Passage, read
from kvkeep.head_profile import Profile
from kvkeep.models import load
from kvkeep.models.support import auto_class
from kvkeep.models.tokenization import Writer
from kvkeep.models.weight_hash import fingerprint
from kvkeep.result_files import Lock

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}
NEAR = NearWindow(2, 5)
IDS = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def small(config, seed=0):
    torch.manual_seed(seed)
    model = auto_class(config).from_config(config).eval().to(torch.float32)
    for parameter in model.parameters():  # so that attention is not nearly uniform
        parameter.data.mul_(3)
    return kvkeep.attach(model)


@pytest.fixture(scope="module")
def llama():
    return small(LlamaConfig(**SIZES))


def text_of(ids, targets=8):
    return Passage(ids, len(ids), (), (targets,))


def logits_of(model, passage, limited=None):
    found, _ = read(model, passage, NEAR, limited)
    return found


# -- passages ----------------------------------------------------------------------------------------------------------


def test_a_passage_without_limits_is_the_model_itself(llama):
    (found,) = logits_of(llama, text_of(IDS))
    with torch.inference_mode():
        want = llama(input_ids=IDS[None], use_cache=False).logits[:, -9:-1]
    assert torch.allclose(found, want, atol=1e-4)


@pytest.mark.parametrize("limits", [None, {0: [[True, False]], 1: [[False, True]]}, {0: [[True, True]]}])
def test_branches_are_texts_of_their_own(llama, limits):
    """Each branch is predicted as if the stem and it were the whole text, whatever stands beside it."""
    limited = limits and {layer: torch.tensor(rows) for layer, rows in limits.items()}
    stem, branches = IDS[:25], (IDS[25:31], IDS[31:40])
    together = Passage(IDS, 25, (6, 9), (2, 4))
    found = logits_of(llama, together, limited)
    for branch, n, logits in zip(branches, (2, 4), found, strict=True):
        (alone,) = logits_of(llama, text_of(torch.cat([stem, branch]), n), limited)
        assert torch.allclose(logits, alone, atol=1e-4)
    assert together.positions.tolist() == [*range(25), *range(25, 31), *range(25, 34)]
    assert [columns.tolist() for columns in together.columns()] == [[28, 29], [35, 36, 37, 38]]


def hidden_by_hand(model, ids, hidden, near):
    """A pass in which heads of some layers are limited by a mask that transformers' own eager attention applies."""
    model.set_attn_implementation("eager")
    place = torch.arange(len(ids))
    distance = place[:, None] - place
    causal = distance >= 0
    close = causal & ((place < near.sinks) | (distance < near.recent))
    hooks = []
    for index, layer in enumerate(model.model.layers):
        sees = torch.stack([close if limited else causal for limited in hidden[index] for _ in range(2)])
        mask = torch.zeros(sees.shape).masked_fill(~sees, -torch.inf)[None]
        hooks.append(
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}), with_kwargs=True
            )
        )
    with torch.inference_mode():
        logits = model(input_ids=ids[None], use_cache=False).logits
    for hook in hooks:
        hook.remove()
    kvkeep.attach(model)
    return logits


@pytest.mark.parametrize("hidden", [[[0, 1], [0, 0]], [[1, 1], [0, 1]], [[0, 0], [1, 0]]])
def test_a_limited_head_sees_its_first_and_newest_tokens(llama, hidden):
    limited = {layer: torch.tensor([row]).bool() for layer, row in enumerate(hidden)}
    (found,) = logits_of(llama, text_of(IDS, 39), limited)
    want = hidden_by_hand(llama, IDS, hidden, NEAR)[:, :-1]
    (full,) = logits_of(llama, text_of(IDS, 39))
    assert torch.allclose(found, want, atol=1e-4)
    assert not torch.allclose(found, full, atol=1e-2)


def test_inside_only_the_targets_are_limited(llama):
    """The logits of each target are those of a pass in which that target's query alone is limited."""
    limited, inside = {0: torch.tensor([[True, True]]), 1: torch.tensor([[True, False]])}, replace(NEAR, inside=True)
    branched = Passage(IDS, 25, (6, 9), (1, 1))
    found, _ = read(llama, branched, inside, limited)
    for text, logits in zip((IDS[:31], torch.cat([IDS[:25], IDS[31:]])), found, strict=True):
        (alone,), _ = read(llama, text_of(text, 1), inside, limited)
        assert torch.allclose(logits, alone, atol=1e-4)
        (later,), (full,) = logits_of(llama, text_of(text, 1), limited), logits_of(llama, text_of(text, 1))
        assert not torch.allclose(logits, later, atol=1e-3)
        assert not torch.allclose(logits, full, atol=1e-3)
    (all_rows,), _ = read(llama, text_of(IDS, len(IDS) - 1), inside, limited)
    assert torch.allclose(all_rows, logits_of(llama, text_of(IDS, len(IDS) - 1), limited)[0], atol=1e-4)


def test_long_texts_are_computed_in_blocks(llama, monkeypatch):
    limited = {0: torch.tensor([[True, False]]), 1: torch.tensor([[False, True]])}
    (whole,) = logits_of(llama, text_of(IDS, 39), limited)
    monkeypatch.setattr("kvkeep.calibration.head_losses._BLOCK", 7)
    (blocks,) = logits_of(llama, text_of(IDS, 39), limited)
    assert torch.allclose(whole, blocks, atol=1e-4)


def test_rows_do_not_touch_each_other(llama):
    sets = [set(), {(0, 0)}, {(1, 1)}, {(0, 0), (0, 1), (1, 0), (1, 1)}]
    limited = {n: torch.tensor([[(n, head) in chosen for head in range(2)] for chosen in sets]) for n in range(2)}
    (together,) = logits_of(llama, text_of(IDS), limited)
    for row in range(len(sets)):
        (alone,) = logits_of(llama, text_of(IDS), {n: mask[row : row + 1] for n, mask in limited.items()})
        assert torch.allclose(together[row], alone[0], atol=1e-4)


def test_a_window_that_holds_the_text_hides_nothing(llama):
    limited = {0: torch.tensor([[True, True]]), 1: torch.tensor([[True, True]])}
    (found,), _ = read(llama, text_of(IDS), NearWindow(0, 40), limited)
    (full,) = logits_of(llama, text_of(IDS))
    assert torch.allclose(found, full, atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SIZES, sliding_window=12, query_pre_attn_scalar=8),  # soft caps, a sliding layer
        GptOssConfig(**SIZES, sliding_window=12, num_local_experts=2, num_experts_per_tok=1),  # learned sinks
    ],
    ids=["gemma2", "gpt_oss"],
)
def test_other_attention_is_honoured(config):
    model = small(config)
    everything = {0: torch.tensor([[True, True]]), 1: torch.tensor([[True, True]])}
    (found,), heads = read(model, text_of(IDS), NearWindow(0, 40), everything)
    (full,), _ = read(model, text_of(IDS), NearWindow(0, 40))
    (near,), _ = read(model, text_of(IDS), NEAR, everything)
    assert heads == {0: 2, 1: 2}
    assert torch.allclose(found, full, atol=1e-3)
    assert not torch.allclose(near, full, atol=1e-2)


# -- losses and needs --------------------------------------------------------------------------------------------------


def test_the_loss_of_no_head_is_nothing(llama):
    asked = [Passage(IDS, 25, (6, 9), (2, 4))]
    bench = LossMeter(llama, NEAR, asked, [text_of(IDS)])
    none, one, every = bench.losses([set(), {(0, 1)}, {(0, 0), (0, 1), (1, 0), (1, 1)}])
    assert (none.harmed, none.answers) == (0.0, pytest.approx(0, abs=1e-4))
    assert none.text == pytest.approx(0, abs=1e-6)
    assert 0 < one.text < every.text
    assert bench.questions == 2


def test_many_sets_run_in_batches(llama, monkeypatch):
    bench = LossMeter(llama, NEAR, [], [text_of(IDS)])
    sets = [{(layer, head)} for layer in range(2) for head in range(2)]
    once = bench.losses(sets)
    monkeypatch.setattr("kvkeep.calibration.head_losses.BATCH_TOKENS", 1)
    assert [loss.text for loss in bench.losses(sets)] == pytest.approx([loss.text for loss in once], rel=1e-3)
    assert all(loss.answers is None for loss in once)


def test_needs_are_shares_of_the_largest():
    alone = [[Loss(0.0, 0.0, 0.0), Loss(0.5, 0.2, 1.0)], [Loss(0.1, 0.1, 0.25), Loss(0.02, 0.0, 0.0)]]
    found = needs(alone, questions=50)
    assert found[0] == (0.0, 1.0)
    assert found[1] == (round(math.sqrt((0.08 / 0.48 + 0.25) / 2), 3), 0.0)  # harm to one answer of 50 is chance


def test_a_model_that_knows_no_answer_is_measured_on_the_text():
    alone = [[Loss(None, None, 0.01), Loss(None, None, 0.04)]]
    assert needs(alone, questions=0) == ((0.5, 1.0),)


def test_a_text_on_which_nothing_matters_gives_no_needs():
    alone = [[Loss(None, None, 1e-6), Loss(0.0, 0.0, 1e-9)]]
    assert needs(alone, questions=0) == ((0.0, 0.0),)


# -- passages of questions ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def writer():
    checkpoint = load.find(str(model_folders.folder()))
    return Writer(checkpoint, load.read_weights(checkpoint, "float32", "cpu"))


def test_documents_share_their_text(writer):
    one, two = calibration.documents(writer.checkpoint, n=2, questions=3, tokens=1400, seed=0)
    assert [asked.document for asked in (*one, *two)] == [0, 0, 0, 1, 1, 1]
    assert len({asked.question.prompt for asked in one}) == 3
    stem = one[0].first
    assert all(asked.first == stem and torch.equal(asked.ids[:stem], one[0].ids[:stem]) for asked in one)
    assert 1000 < stem < max(len(asked.ids) for asked in one) <= 1400
    assert calibration.documents(writer.checkpoint, n=0, questions=3, tokens=1400, seed=0) == []


def test_the_same_seed_gives_the_same_documents(writer):
    one, same, other = (
        calibration.documents(writer.checkpoint, n=1, questions=2, tokens=1400, seed=seed)[0] for seed in (1, 1, 2)
    )
    one, same, other = ([asked.question for asked in found] for found in (one, same, other))
    assert one == same != other


def test_a_context_that_is_too_short_for_the_facts_is_refused(writer):
    with pytest.raises(kvkeep.InputError, match="have no room for 16 facts"):
        calibration.documents(writer.checkpoint, n=1, questions=2, tokens=200, seed=0)


@pytest.mark.parametrize("together", [True, False])
def test_answers_follow_their_questions(writer, monkeypatch, together):
    """The replies are forced here, since random weights know nothing."""
    (document,) = calibration.documents(writer.checkpoint, n=1, questions=2, tokens=1400, seed=0)
    replies = [[5, 6, 7], [8]]
    monkeypatch.setattr(calibration, "_replies", lambda writer, asked: replies)
    monkeypatch.setattr(calibration, "right", lambda wording, asked, reply: True)
    made = calibration.answered(writer, document, together=together)
    assert len(made) == (1 if together else 2)
    found = [passage.ids[columns + 1].tolist() for passage in made for columns in passage.columns()]
    assert found == replies
    texts = [torch.cat([p.ids[: p.stem], p.ids[part]]) for p in made for part, _ in list(p.parts())[1:]]
    for prompt, reply, text in zip(document, replies, texts, strict=True):
        assert text.tolist() == [*prompt.ids.tolist(), *reply]


# -- the whole ---------------------------------------------------------------------------------------------------------

SETTINGS = CalibrationSettings(sinks=2, recent=6, context=80, documents=0, questions=1, windows=2)
TEXT = "the quick brown fox jumps over the lazy dog and the cat. " * 20


def job(writer, **changes):
    return Calibration(model="tiny", checkpoint=writer.checkpoint, text=changes.pop("text", TEXT), settings=SETTINGS)


def test_a_calibration_gives_a_profile_of_this_model(writer, tmp_path):
    stages = []
    with CalibrationFile.open(tmp_path / "p.part") as part:
        profile = calibrate(job(writer), writer, part, lambda what, share: stages.append((what, share)))
        part.remove()
    profile.check(writer.model.config, layers=2)
    profile.check_weights(lambda: fingerprint(writer.model))
    assert len(profile.heads) == 2
    assert max(map(max, profile.heads)) == 1.0
    assert profile.least == 8
    assert [step["heads"] for step in profile.measured["together"]] == [1, 2, 3, 4]
    assert not list(tmp_path.iterdir())
    assert stages == sorted(stages, key=lambda stage: [s for s, _ in stages].index(stage[0]))
    profile.save(tmp_path / "heads.json")
    assert Profile.load(tmp_path / "heads.json").heads == profile.heads


def test_a_calibration_goes_on_after_a_stop(writer, tmp_path, monkeypatch):
    whole = run_once(writer, tmp_path / "whole.part")
    asked = []
    original = LossMeter.losses

    def losses(self, sets):
        if len(asked) == 1:
            raise KeyboardInterrupt
        asked.append(sets)
        return original(self, sets)

    monkeypatch.setattr(LossMeter, "losses", losses)
    with pytest.raises(KeyboardInterrupt), CalibrationFile.open(tmp_path / "p.part") as part:
        calibrate(job(writer), writer, part)
    lines = (tmp_path / "p.part").read_bytes()
    assert lines.count(b"\n") == 2  # the run and its first layer
    (tmp_path / "p.part").write_bytes(lines + b'{"row": "layer", "la')  # a power cut
    asked.clear()
    monkeypatch.setattr(LossMeter, "losses", lambda self, sets: asked.append(sets) or original(self, sets))
    assert run_once(writer, tmp_path / "p.part").heads == whole.heads
    assert asked[0] == [{(1, 0)}, {(1, 1)}]  # the first layer is not measured again


def run_once(writer, path):
    with CalibrationFile.open(path) as part:
        profile = calibrate(job(writer), writer, part)
        part.remove()
    return profile


def test_another_calibration_is_not_gone_on_with(writer, tmp_path):
    path = tmp_path / "p.part"
    with CalibrationFile.open(path) as part:
        calibrate(job(writer), writer, part)
    with (
        CalibrationFile.open(path) as part,
        pytest.raises(kvkeep.InputError, match="another calibration: text was sha256"),
    ):
        calibrate(job(writer, text=TEXT + "more"), writer, part)
    with (
        CalibrationFile.open(path),
        pytest.raises(kvkeep.InputError, match="Another run is writing"),
        CalibrationFile.open(path),
    ):
        pass
    assert path.exists()


@pytest.mark.whole
@pytest.mark.parametrize(
    "content",
    [
        b"mine\n",
        b"[1]\n",
        b'{"row": 3}\n',
        b'{"row": "layer", "layer": 0, "losses": [[1]]}\n' * 2,
        b'{"row": "layer", "layer": 0, "losses": "all"}\n' * 2,
        b"\xff\xfe\n",
    ],
)
def test_a_damaged_file_of_progress_is_refused(writer, tmp_path, content):
    path = tmp_path / "p.part"
    path.write_bytes(content)
    with pytest.raises(kvkeep.InputError), CalibrationFile.open(path) as part:
        calibrate(job(writer), writer, part)
    assert path.read_bytes() == content


def test_a_line_of_progress_without_its_numbers_is_refused_and_with_too_few_is_measured_again(writer, tmp_path):
    path = tmp_path / "p.part"
    with CalibrationFile.open(path) as part:
        whole = calibrate(job(writer), writer, part)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["row"] for line in lines] == ["run", "layer", "layer", "together"]

    def damage(number, **entries):
        found = [*lines[:number], lines[number] | entries, *lines[number + 1 :]]
        kept = [{key: value for key, value in line.items() if value is not None} for line in found]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    for number, entry in ((1, "losses"), (3, "losses"), (3, "sizes")):
        damage(number, **{entry: None})
        with path.open("a") as file:  # else it could be the last line of a run that was stopped
            file.write(json.dumps(lines[1]) + "\n")
        with pytest.raises(kvkeep.InputError, match=entry), CalibrationFile.open(path) as part:
            calibrate(job(writer), writer, part)
    damage(3, losses=lines[3]["losses"][:-1])
    with CalibrationFile.open(path) as part:
        assert calibrate(job(writer), writer, part).measured == whole.measured


def test_progress_that_another_run_removes_in_between_is_not_written_to_nowhere(tmp_path, monkeypatch):
    path, lock = tmp_path / "p.part", Lock.__init__

    def late(self, target, name):
        path.unlink()
        lock(self, target, name)

    monkeypatch.setattr(Lock, "__init__", late)
    with pytest.raises(kvkeep.InputError, match="has just finished"), CalibrationFile.open(path):
        pass


def test_a_folder_in_the_place_of_the_progress_is_refused(tmp_path):
    (tmp_path / "p.part").mkdir()
    with pytest.raises(kvkeep.InputError, match="is no file"), CalibrationFile.open(tmp_path / "p.part"):
        pass


@pytest.mark.whole
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recent": 0}, "recent=0 is too small"),
        ({"sinks": -1}, "sinks=-1"),
        ({"windows": 0}, "windows=0"),
        ({"questions": 17}, "more than the 16 facts"),
        ({"case": "stream"}, "case='stream' is neither later nor inside"),
        ({"context": 40}, "context=40 is too short"),
    ],
)
def test_settings_out_of_range_are_refused(changes, said):
    with pytest.raises(kvkeep.InputError, match=said):
        CalibrationSettings(**changes)


# -- patterns of DuoAttention ------------------------------------------------------------------------------------------

PATTERN = "6.054687500000000000e-01\t0.000000000000000000e+00\n1.1\t-0.2\n"


@pytest.fixture
def pattern(tmp_path):
    (tmp_path / "full_attention_heads.tsv").write_text(PATTERN)
    (tmp_path / "config.json").write_text(json.dumps({"sink_size": 128, "recent_size": 256, "lr": 0.02}))
    return tmp_path


def test_a_pattern_becomes_a_profile(pattern):
    config = LlamaConfig(**SIZES)
    for path in (pattern, pattern / "full_attention_heads.tsv"):
        found = duo_attention.imported(str(path), config, name="some/model")
        assert found.heads == ((0.60546875, 0.0), (1.0, 0.0))
        assert found.least == 384
        assert found.weights is None
        found.check(config, layers=2)
    assert duo_attention.imported(str(pattern), config, name="m", sparsity=0.75).heads == ((0.0, 0.0), (1.0, 0.0))
    assert duo_attention.imported(str(pattern), config, name="m", sparsity=0.25).heads == ((1.0, 0.0), (1.0, 1.0))
    (pattern / "config.json").unlink()
    assert duo_attention.imported(str(pattern), config, name="m").least == 320


@pytest.mark.whole
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no table"),
        ("0.1\t0.2\n0.3\n", "the same number of heads"),
        ("0.1\tnan\n0.3\t0.4\n", "Line 1"),
        ("0.1\t0.2\n0.3\tx\n", "Line 2"),
        ("\x00\x01", "Line 1"),
        ("0.1\t0.2\n", "has 1 layers of 2 heads, and some/model has 2 of 2 KV heads"),
        ("0.1\n0.2\n", "has 2 layers of 1 heads"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern, content, said):
    (pattern / "full_attention_heads.tsv").write_text(content)
    with pytest.raises(kvkeep.InputError, match=said):
        duo_attention.imported(str(pattern), LlamaConfig(**SIZES), name="some/model")


@pytest.mark.whole
@pytest.mark.parametrize("content", ["", "[]", "{}", '{"sink_size": "1", "recent_size": 2}', '{"sink_size": 1}'])
def test_a_pattern_whose_sizes_are_damaged_is_refused(pattern, content):
    (pattern / "config.json").write_text(content)
    with pytest.raises(kvkeep.InputError, match="does not say sink_size and recent_size"):
        duo_attention.imported(str(pattern), LlamaConfig(**SIZES), name="m")


def test_empty_lines_of_a_pattern_say_nothing_and_a_large_file_is_none(pattern, monkeypatch):
    plain = duo_attention.imported(str(pattern), LlamaConfig(**SIZES), name="m")
    (pattern / "full_attention_heads.tsv").write_text(PATTERN.replace("\n", "\n\n \n"))
    assert duo_attention.imported(str(pattern), LlamaConfig(**SIZES), name="m").heads == plain.heads
    (pattern / "config.json").write_text(" " * 300)
    monkeypatch.setattr(duo_attention, "MOST_BYTES", 200)
    with pytest.raises(kvkeep.InputError, match=r"config\.json has 300 bytes, and no pattern has more than 200"):
        duo_attention.imported(str(pattern), LlamaConfig(**SIZES), name="m")


def test_files_that_are_none_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none.tsv", "/dev/zero"):
        with pytest.raises(kvkeep.InputError):
            duo_attention.imported(str(path), LlamaConfig(**SIZES), name="m")


# -- the embedded model ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_embedded_model_recalls_with_its_last_three_layers(tmp_path):
    """The finding of docs/calibration.md: five of the six heads of layers 0 to 2 need nothing, alone and together."""
    checkpoint = load.find(load.embedded())
    own = Writer(checkpoint, load.read_weights(checkpoint, "auto", "cpu"))
    whole = Calibration(model="embedded", checkpoint=checkpoint, text=None, settings=CalibrationSettings())
    with CalibrationFile.open(tmp_path / "p.part") as part:
        profile = calibrate(whole, own, part)
    early, late = profile.heads[:3], profile.heads[3:]
    assert sum(need == 0 for layer in early for need in layer) >= 5
    assert min(map(min, late)) > 0.3
    assert min(profile.heads[3]) > 0.7
    together = {step["heads"]: step for step in profile.measured["together"]}
    assert together[5]["answers"] < 0.01
    assert together[12]["answers"] > 0.9
    assert profile.measured["known"] >= 90
