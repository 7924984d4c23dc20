import dataclasses
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from kvkeep.models import tiny
from kvkeep.models.tiny.recall import HELD_OUT

ROOT = Path(__file__).parents[2]
if not (ROOT / "tools" / "train_tiny").is_dir():
    pytest.skip("the training script is not part of this copy", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from tools.train_tiny import corpus, curriculum, grammar, pools  # noqa: E402
from tools.train_tiny.documents import Recall, Shape, _statements  # noqa: E402
from tools.train_tiny.evaluate import deciles  # noqa: E402
from tools.train_tiny.model import WeightedLoss, build  # noqa: E402
from tools.train_tiny.observe import first_share, small_share, top_share  # noqa: E402
from tools.train_tiny.optim import Optimizer, orthogonalise  # noqa: E402
from tools.train_tiny.parallel import Replicas  # noqa: E402
from tools.train_tiny.quick import Outcome, answer_all, questions  # noqa: E402
from tools.train_tiny.words import Words, collect  # noqa: E402

SHAPE = Shape(facts=(3, 8), filler=0.7)
LETTERS = [first + second for first in "bcdfgklmnprst" for second in "aeiou"]
WORDS = Words(
    common=tuple(f"word{first}{last}" for first in LETTERS for last in LETTERS),
    rare=tuple(f"rare{pair}" for pair in LETTERS),
    names=tuple(f"Name{pair}" for pair in LETTERS),
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(Path(tiny.__file__).parent / "tokenizer.json"))


@pytest.fixture(scope="module")
def texts(tokenizer):
    story = "The sun was warm. A bird sang in the tree. They walked home in the evening and were glad. "
    return corpus.encode([story * 200] * 2, tokenizer, sentence_share=1.0)


@pytest.fixture(scope="module")
def recall(tokenizer, texts):
    return Recall(tokenizer, WORDS, [texts])


@pytest.mark.parametrize("seed", range(20))
def test_rows_have_the_wanted_length_and_weighted_answers(recall, tokenizer, seed):
    ids, weights = recall.row(random.Random(seed), 400, SHAPE)
    assert ids.shape == weights.shape == (400,)
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    pieces = text.split("<|assistant|>")
    for i, piece in enumerate(pieces[1:-1], 1):
        answer = piece.split("<|end|>")[0].strip()
        assert answer.endswith(".") or answer in "".join(pieces[:i])
    assert (weights == 8.0).sum() >= 4


@pytest.mark.long
def test_nothing_held_out_is_in_a_recall_document(recall, tokenizer):
    words = set()
    for seed in range(150):
        ids, _ = recall.row(random.Random(seed), 300, SHAPE)
        words |= {w.strip(".,:?'").removesuffix("'s") for w in tokenizer.decode(ids.tolist()).split()}
    assert not words & {*HELD_OUT.names, *HELD_OUT.things}


def test_words_of_the_texts_are_sorted_by_what_they_can_serve_as(tokenizer, tmp_path):
    text = (
        "The sun saw Gudrunna and her frimblet, then the thimble and Tamsin. You mustn't, Destruction is destruction. "
    )
    words = collect([text * 5], tokenizer)
    assert words.names == ("Gudrunna",)  # neither the evaluation's name nor the first word of a sentence
    assert words.rare == ("destruction", "frimblet")
    assert "then" in words.common
    words.save(tmp_path / "words.json")
    assert Words.load(tmp_path / "words.json") == words


def test_wordings_are_not_shared():
    for kind in pools.KINDS:
        other = HELD_OUT.kind(kind.name)
        assert not {*kind.statements, *kind.corrections, *kind.questions} & {
            *other.statements, *other.corrections, *other.questions,
        }  # fmt: skip
        for template in (*kind.statements, *kind.corrections, *other.statements, *other.corrections):
            assert template.index("{value}") > max(template.index("{owner}"), template.index("{thing}"))


@pytest.mark.slow
def test_no_wording_of_the_training_has_a_phrase_of_the_evaluation():
    rng = random.Random(4)
    held_out = [text for kind in HELD_OUT.kinds for text in (*kind.statements, *kind.corrections, *kind.questions)]
    assert all(any(phrase in text.lower() for phrase in grammar.HELD_OUT_PHRASES) for text in held_out)
    phrases = {word for phrase in grammar.HELD_OUT_PHRASES for word in re.findall("[a-z]+", phrase)}
    words = dataclasses.replace(WORDS, common=tuple(sorted(phrases - {"owner", "thing"})) * 4)  # would be, by chance
    lexica = [pools.draw_lexicon(rng, words) for _ in range(60)]
    for kind in (*pools.KINDS, *(kind for lexicon in lexica for kind in lexicon.kinds)):
        for text in (*kind.statements, *kind.corrections, *kind.questions):
            assert not [phrase for phrase in grammar.HELD_OUT_PHRASES if phrase in text.lower()], text


@pytest.mark.parametrize("kind", [kind.name for kind in HELD_OUT.kinds])
def test_grammar_puts_keys_before_values_and_leaves_no_gap(kind):
    rng = random.Random(5)
    for _ in range(300):
        ask = grammar.ask(kind, rng)
        assert set(re.findall("{[a-z]+}", ask)) == {"{owner}", "{thing}"}
        for text in (grammar.statement(kind, rng), grammar.correction(kind, rng)):
            assert set(re.findall("{[a-z]+}", text)) == {"{owner}", "{thing}", "{value}"}
            assert text.index("{value}") > max(text.index("{owner}"), text.index("{thing}"))
            assert not {"#", "%", "@"} & {*text, *ask}


def test_the_last_correction_is_what_is_asked_for():
    rng = random.Random(2)
    lexicon = pools.draw_lexicon(rng, WORDS)
    for _ in range(30):
        facts = [f for f in _draw(lexicon, rng) if f.kind.name == "number"]
        said, last = _statements(rng, facts, lexicon, changes=True)
        for fact in last:
            about = [s for s in said if {fact.owner.lower(), fact.thing} <= set(re.findall("[a-z]+", s.lower()))]
            assert not about or fact.value in about[-1]


def _draw(lexicon, rng):
    from kvkeep.models.tiny.recall import draw_facts

    return draw_facts(lexicon, rng, 6, ["number"])


def test_weighted_loss_is_cross_entropy():
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    targets, weights = torch.randint(0, 11, (50,)), torch.rand(50)
    total, each = WeightedLoss.apply(hidden, weight, targets, weights, 16)
    expected = torch.nn.functional.cross_entropy(hidden @ weight.t(), targets, reduction="none")
    torch.testing.assert_close(each, expected.detach())
    ours = torch.autograd.grad(total, (hidden, weight))
    theirs = torch.autograd.grad((expected * weights).sum(), (hidden, weight))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(2, 16, 40), (3, 40, 16)])
def test_orthogonalise(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)).float())
    assert values.min() > 0.5
    assert values.max() < 1.4


@pytest.mark.slow
def test_replicas_give_the_gradient_of_the_whole_batch():
    model = build(0, "cpu").float()
    rows, weights = torch.randint(0, 4096, (6, 24)), torch.rand(6, 24)
    Replicas(model, threads=1, piece_tokens=10_000).gradients(rows, weights)
    whole = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    Replicas(model, threads=2, piece_tokens=48).gradients(rows, weights)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_optimizer_learns_and_goes_on_where_it_was():
    model = build(0, "cpu")
    optimizer, replicas = Optimizer(model), Replicas(model, threads=1, piece_tokens=10_000)
    rows, weights = torch.randint(0, 4096, (4, 32)), torch.ones(4, 32)
    before = replicas.gradients(rows, weights).mean().item()
    for _ in range(6):
        optimizer.step(1.0)
        after = replicas.gradients(rows, weights).mean().item()
    assert after < before - 1
    other = build(1, "cpu")
    Optimizer(other).load(optimizer.state())
    assert torch.equal(other.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.slow
def test_training_goes_on_where_it_was_killed(tokenizer, texts, tmp_path, monkeypatch):
    from tools.train_tiny import train

    def work(name):
        folder = tmp_path / name
        folder.mkdir()
        tokenizer.save(str(folder / "tokenizer.json"))
        WORDS.save(folder / "words.json")
        for part in ("novels", "stories", "validation_novels", "validation_stories"):
            corpus.save(texts, folder / f"{part}.npz")
        (folder / "validation_filler.json").write_text(json.dumps({"novels": ["The sun was warm."] * 50}))
        return folder

    stage = curriculum.Stage(640, 64, 1.0, Shape((2, 3), 0.1, plain=1.0), 128)
    monkeypatch.setattr(curriculum, "STAGES", (stage,))
    monkeypatch.setattr(train, "MEASURE_EVERY", 256)
    monkeypatch.setattr(train.Trainer, "_measure", lambda *_: dict.fromkeys(train.COLUMNS[5:-1], 0.0) | {"length": 64})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    whole, broken = work("whole"), work("broken")
    train.train(whole, device="cpu", scale=1.0)

    def killed(trainer, honest=train.Trainer.step):
        if trainer.seen >= 384:
            raise KeyboardInterrupt  # the line of 256 tokens is in the log, the checkpoint has fewer
        found = honest(trainer)
        if trainer.seen == 128:
            trainer.save()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            train.train(broken, device="cpu", scale=1.0)
    assert [line.split(",")[0] for line in (broken / "log.csv").read_text().splitlines()] == ["tokens", "256"]
    train.train(broken, device="cpu", scale=1.0)
    logs = [[line.split(",")[:-1] for line in (f / "log.csv").read_text().splitlines()] for f in (whole, broken)]
    assert [line[0] for line in logs[1]] == ["tokens", "384", "640"]
    assert logs[0][-1][0] == "640"
    weights = [torch.load(f / "checkpoint.pt", weights_only=True)["optimizer"]["weights"] for f in (whole, broken)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_rate_rises_and_falls():
    total = curriculum.total_tokens(1.0)
    factors = [curriculum.rate_factor(int(total * i / 100), 1.0) for i in range(101)]
    assert factors[0] < 0.5
    assert max(factors) == 1.0
    assert factors[-1] == 0.02
    assert curriculum.stage_at(total + 1, 1.0) == curriculum.STAGES[-1]
    assert curriculum.STAGES[-1].length > 2048  # the end of the context is not the edge of the training
    assert curriculum.rate_factor(total // 2, 1.0, begun=total // 2) < 0.5  # a fresh optimizer warms up


def test_a_mixed_stage_has_shorter_batches_with_facts_that_fit():
    stage = curriculum.Stage(1, 3072, 1.0, Shape((8, 28), 0.9), shorter=0.5)
    drawn = [stage.drawn(random.Random(i)) for i in range(400)]
    counts = Counter((one.length, one.shape.facts) for one in drawn)
    assert counts.keys() == {(3072, (8, 28)), (1536, (8, 28)), (768, (8, 24)), (512, (8, 16))}
    assert 150 < counts[3072, (8, 28)] < 250
    assert {one.batch_tokens for one in drawn} == {8192}
    assert dataclasses.replace(stage, shorter=0.0).drawn(random.Random(0)).length == 3072


def test_questions_fit_the_context_and_are_spread(tokenizer):
    asked = questions(tokenizer, None, n=30, facts=16, tokens=512, seed=1)
    assert all(470 <= len(tokenizer.encode(q.prompt).ids) <= 512 for q in asked)
    tenths = deciles([Outcome(q, True) for q in asked])
    assert np.nansum(tenths) >= 9


@pytest.mark.slow
def test_one_pass_gives_the_verdict_of_decoding(tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.path()).eval()
    asked = questions(tokenizer, None, n=10, facts=12, tokens=260, seed=3)
    for outcome in answer_all(model, tokenizer, asked):
        prompt = tokenizer.encode(f"<|begin|><|user|> {outcome.question.prompt}<|end|><|assistant|>").ids
        out = model.generate(torch.tensor([prompt]), max_new_tokens=8)[0, len(prompt) :]
        assert outcome.question.right(tokenizer.decode(out.tolist())) is outcome.right


def test_attention_measures():
    rows = torch.zeros(1, 100, 100)
    rows[0, :, 0] = 0.9
    rows[0, :, 1] = 0.1
    assert first_share(rows).item() == pytest.approx(0.9)
    assert top_share(rows, 0.01).item() == pytest.approx(0.9)
    assert top_share(rows, 0.02).item() == pytest.approx(1.0)
    count = sum(range(65, 101))
    assert small_share(rows).item() == pytest.approx(1 - 2 * 36 / count)


def test_authors_and_stories(tmp_path):
    assert corpus.author(Path("Hardy_Tess_1891.txt")) == corpus.author(Path("ENG18711_Hardy.txt")) == "Hardy"
    known = corpus.names_in("one day, Lily ran. then Lily sat. and Lily ate. with Lily, by Lily. he saw Lily and Lily.")
    assert corpus.recase('lily ran. "hi," said lily. i am here.', known) == 'Lily ran. "Hi," said Lily. I am here.'
    assert corpus.recase("it's lily's. let's go.", {*known, "s"}) == "It's Lily's. Let's go."
    (tmp_path / "novels").mkdir()
    (tmp_path / "novels" / "Hardy_A_1880.txt").write_text("He  came in. " * 50)
    (tmp_path / "novels" / "Eliot_B_1880.txt").write_text("Other. " * 50)
    (held_out,) = corpus.novels(tmp_path, held_out=True)
    assert held_out.endswith("He came in. He came in.")


def test_cleaned_text_has_plain_quotes_and_paragraphs():
    assert corpus.clean("\ufeffHe  said “no”.\r\n\r\nShe\r\nleft—now.") == 'He said "no".\nShe left--now.'
