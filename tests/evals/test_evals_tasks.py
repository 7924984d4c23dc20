"""Each task on a tiny random model, against loops that are written out here."""

import dataclasses
import functools
import itertools
import json
import math
import re
from dataclasses import replace
from importlib import resources

import model_folders
import pytest
import torch
from sweeps import sweep
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvkeep import BoundedCache, parse
from kvkeep.errors import InputError
from kvkeep.evals import qa_task
from kvkeep.evals.forward import Drive, left_padded
from kvkeep.evals.grid import RequestedBudget
from kvkeep.evals.task import Options, kept_by_tenth, windows
from kvkeep.evals.tasks import TASKS, find, recall
from kvkeep.evals.tasks.agreement import Agreement
from kvkeep.evals.tasks.continuation import Continuation
from kvkeep.evals.tasks.mass import RetainedMass
from kvkeep.evals.tasks.perplexity import Perplexity, feed_in_pieces
from kvkeep.evals.tasks.recall import Recall
from kvkeep.models import load as loading
from kvkeep.models import tiny
from kvkeep.models.load import quiet
from kvkeep.models.tiny.documents import STYLES, document
from kvkeep.models.tiny.recall import HELD_OUT, question
from kvkeep.models.tokenization import Writer

OPTIONS = Options(limit=3, window=50, contexts=(300,), facts=2)
EVERYTHING = 10_000


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread(), quiet():
        yield


@functools.cache
def writer(family="llama"):
    with quiet():
        checkpoint = loading.find(model_folders.folder(family))
        return Writer(checkpoint, loading.read_weights(checkpoint))


def load(task, options=OPTIONS):
    return task.load(writer().checkpoint, options)


def run(task, policy, budget):
    (case, lengths), *more = task.cases().items()
    assert not more
    return task.run(writer(), case, parse(policy), budget if isinstance(budget, list) else [budget] * len(lengths))


@functools.cache
def prepared(kind):
    task = load(kind)
    task.prepare(writer())
    return task


# text


def test_own_text_is_the_same_for_a_seed_and_differs_between_rows_and_seeds():
    first, again, other = (windows(writer().checkpoint, Options(seed=seed), rows=2, length=200) for seed in (0, 0, 1))
    assert first.shape == (2, 200)
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, other)
    assert (first[:, 0] == writer().checkpoint.tokenizer.bos_token_id).all()


def test_a_file_is_cut_into_windows_that_follow_each_other():
    text = "the quick brown fox jumps over the lazy dog and the cat " * 20
    found = windows(writer().checkpoint, Options(text=text), rows=3, length=21)
    ids = torch.tensor(writer().checkpoint.tokenizer(text)["input_ids"])
    assert torch.equal(found[:, 1:].flatten(), ids[:60])


def test_seeds_take_windows_in_turn():
    text = "the quick brown fox jumps over the lazy dog and the cat " * 20
    ids = torch.tensor(writer().checkpoint.tokenizer(text)["input_ids"])
    n = len(ids) // 20  # windows of the whole text
    for seed in range(n):
        found = windows(writer().checkpoint, Options(text=text, seed=seed), rows=4, length=21)
        assert found[:, 1:].tolist() == [
            ids[20 * (place % n) : 20 * (place % n) + 20].tolist() for place in range(4 * seed, 4 * seed + 4)
        ]
    few = [windows(writer().checkpoint, Options(text=text, seed=seed), rows=n + 1, length=21) for seed in (0, 1)]
    assert torch.equal(*few)
    assert len(few[0]) == n


def test_own_sentences_are_enough_for_tokens_of_any_size():
    """A vocabulary in which whole sentences are tokens needs more of them than one of letters."""
    inner = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(".", "merged_with_previous")
    coarse = PreTrainedTokenizerFast(tokenizer_object=inner)
    checkpoint = dataclasses.replace(writer().checkpoint, tokenizer=coarse)
    assert windows(checkpoint, Options(), rows=2, length=30).tolist() == [[0] * 30] * 2


def test_a_short_file_is_one_short_window_and_a_very_short_one_is_refused():
    text = "the quick brown fox jumps over the lazy dog and the cat " * 2
    n = len(writer().checkpoint.tokenizer(text)["input_ids"])
    assert windows(writer().checkpoint, Options(text=text), rows=3, length=500).shape == (1, n + 1)
    with pytest.raises(InputError, match="only 1 tokens"):
        windows(writer().checkpoint, Options(text="the"), rows=3, length=500)


@pytest.mark.parametrize("text", [None, "the quick brown fox jumps over the lazy dog and the cat " * 2])
def test_a_window_with_room_for_the_begin_token_alone_is_refused(text):
    """As `kvkeep eval --tasks agreement --prompt-tokens 1` asks for."""
    with pytest.raises(InputError, match="begin token alone"):
        windows(writer().checkpoint, Options(text=text), rows=1, length=1)
    assert windows(writer().checkpoint, Options(text=text), rows=1, length=2).shape == (1, 2)


# perplexity


def dense_losses(ids):
    with torch.no_grad():
        logits = writer().model(ids).logits[:, :-1]
    return -logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def test_full_cache_has_the_models_own_perplexity():
    task = load(Perplexity)
    score = run(task, "full", EVERYTHING).score
    assert score["perplexity"] == pytest.approx(math.exp(dense_losses(task.ids).mean()), rel=1e-4)
    assert score["n"] == 3 * 49
    assert sum(bucket["n"] for bucket in score["buckets"]) == score["n"]


@pytest.mark.parametrize("policy", ["h2o", "tova", "local"])
def test_budget_of_the_whole_window_is_the_full_cache(policy):
    task = load(Perplexity)
    assert run(task, policy, 50).score["nll"] == pytest.approx(run(task, "full", 50).score["nll"], abs=1e-5)


@pytest.mark.parametrize(("policy", "budget", "stride"), [("full", 50, 16), ("full", 50, 1), ("h2o", 12, 1)])
def test_pieces_give_what_single_tokens_give(policy, budget, stride):
    ids = load(Perplexity).ids
    cache = BoundedCache(writer().model.config, policy, budget)
    losses = []
    with torch.no_grad():
        for t in range(49):
            logits = writer().model(ids[:, t : t + 1], past_key_values=cache).logits[:, -1].float()
            losses.append(-logits.log_softmax(-1).gather(-1, ids[:, t + 1 : t + 2]))
    found = feed_in_pieces(Drive(writer(), parse(policy), [budget] * 3), ids, stride)
    torch.testing.assert_close(found, torch.cat(losses, dim=1), rtol=0, atol=2e-5)


def test_eviction_changes_only_positions_past_the_budget():
    ids = load(Perplexity).ids
    found = feed_in_pieces(Drive(writer(), parse("local"), [12] * 3), ids, 4)
    expected = dense_losses(ids)
    torch.testing.assert_close(found[:, :12], expected[:, :12], rtol=0, atol=2e-5)
    assert (found[:, 16:] - expected[:, 16:]).abs().amax() > 1e-3


def test_bucket_means_are_those_of_the_losses():
    options = Options(limit=2, window=150)
    task = load(Perplexity, options)
    losses = dense_losses(task.ids)  # column j is the loss of position j + 1
    buckets = run(task, "full", 150).score["buckets"]
    assert [(bucket["from"], bucket["to"]) for bucket in buckets] == [(1, 64), (64, 128), (128, 150)]
    for bucket in buckets:
        part = losses[:, bucket["from"] - 1 : bucket["to"] - 1]
        assert bucket["nll"] == pytest.approx(part.mean().item(), abs=1e-4)
        assert bucket["n"] == part.numel()


# agreement


@pytest.mark.parametrize("policy", ["full", "h2o", "random"])
def test_room_for_everything_agrees_with_the_full_cache(policy):
    score = run(prepared(Agreement), policy, 40).score
    assert score["agreement"] == 1.0
    assert score["kl"] == pytest.approx(0.0, abs=1e-6)
    assert score["n"] == 3 * prepared(Agreement).new


def test_agreement_follows_the_full_caches_own_greedy_text():
    task = prepared(Agreement)
    with torch.no_grad():
        expected = writer().model.generate(
            task.ids, attention_mask=torch.ones_like(task.ids), max_new_tokens=task.new, do_sample=False
        )
    assert torch.equal(task.references[0].tokens, expected[:, task.ids.shape[1] :])


def test_agreement_and_kl_of_an_evicting_cache_against_a_loop():
    task = prepared(Agreement)
    model, n = writer().model, task.ids.shape[1]
    whole = torch.cat([task.ids, task.references[0].tokens], dim=1)
    with torch.no_grad():
        full = model(whole).logits[:, n:].log_softmax(-1)
        cache = BoundedCache(model.config, "local", 6)
        model(whole[:, :n], past_key_values=cache)
        parts = [model(whole[:, t : t + 1], past_key_values=cache).logits for t in range(n, n + task.new)]
    bounded = torch.cat(parts, dim=1).log_softmax(-1)
    score = run(task, "local", 6).score
    assert score["agreement"] == pytest.approx((full.argmax(-1) == bounded.argmax(-1)).float().mean().item())
    assert score["kl"] == pytest.approx((full.exp() * (full - bounded)).sum(-1).mean().item(), abs=1e-5)
    assert score["kl"] > 1e-3
    assert sum(score["kl_by_part"]) / len(score["kl_by_part"]) == pytest.approx(score["kl"])
    equal = (full.argmax(-1) == bounded.argmax(-1)).tolist()
    firsts = [row.index(False) if False in row else len(row) for row in equal]
    assert score["first_difference"] == pytest.approx(sum(firsts) / len(firsts))


def test_agreement_along_long_answers_after_short_prompts():
    task = load(Agreement, replace(OPTIONS, prompt_tokens=5, new_tokens=30))
    assert (task.ids.shape[1], task.new) == (5, 30)
    assert list(task.cases()) == ["prompt=5,new=30"]
    drawn, again, other = (
        load(Agreement, replace(OPTIONS, prompt_tokens=5, new_tokens=30, draw=True, seed=seed)) for seed in (1, 1, 2)
    )
    assert list(drawn.cases()) == ["prompt=5,new=30,drawn"]
    for made in (drawn, again, other):
        made.prepare(writer())
    texts = [made.references[0].tokens.tolist() for made in (drawn, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert run(drawn, "full", [35] * len(drawn.ids)).score["kl"] == 0.0
    with pytest.raises(InputError, match="new_tokens=0"):
        Options(new_tokens=0)


@pytest.mark.parametrize("policy", ["local", "h2o"])
def test_budgets_side_by_side_have_the_scores_of_each_alone(policy):
    task, budgets = prepared(Agreement), (6, 40, 11)
    alone = [run(task, policy, budget).score for budget in budgets]
    together = task.under_budgets(writer(), parse(policy), budgets)
    assert len({score["kl"] for score in alone}) == len(budgets)
    for one, other in zip(alone, together, strict=True):
        assert one.keys() == other.keys()
        assert all(one[name] == pytest.approx(other[name], abs=1e-5) for name in one)


def test_budgets_side_by_side_take_no_more_than_a_batch_at_once(monkeypatch):
    task, feed, sizes = prepared(Agreement), Drive.feed, []
    rows, length = task.ids.shape
    wanted = task.under_budgets(writer(), parse("h2o"), (6, 40, 11))
    monkeypatch.setattr("kvkeep.evals.forward.BATCH_TOKENS", 2 * rows * length)
    monkeypatch.setattr(
        Drive, "feed", lambda self, ids, *rest, **more: sizes.append(len(ids)) or feed(self, ids, *rest, **more)
    )
    found = task.under_budgets(writer(), parse("h2o"), (6, 40, 11))
    assert set(sizes) == {2 * rows, rows}
    for one, other in zip(wanted, found, strict=True):
        assert all(one[name] == pytest.approx(other[name], abs=1e-5) for name in one)


def test_the_end_of_text_is_left_out_of_the_continuation(monkeypatch):
    task = load(Agreement)
    wanted = int(prepared(Agreement).references[0].tokens[0, 0])
    monkeypatch.setattr(writer().model.generation_config, "eos_token_id", wanted)
    task.prepare(writer())
    assert (task.references[0].tokens != wanted).all()


# mass


def test_mass_of_everything_is_one():
    score = run(prepared(RetainedMass), "full", 40).score
    assert score["mass"] == pytest.approx(1.0, abs=1e-5)
    assert score["regret"] == pytest.approx(0.0, abs=1e-5)


def test_mass_of_a_window_is_the_sum_of_the_models_own_attention():
    task, budget = prepared(RetainedMass), 7
    model = writer().model
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            attentions = model(task.ids, output_attentions=True).attentions
    finally:
        loading.attach(model)
    T = task.ids.shape[1]
    expected = []
    for weights in attentions:  # (B, Hq, T, T); two query heads for each KV head
        grouped = weights.unflatten(1, (2, 2)).mean(dim=2)
        rows = [grouped[:, :, t, t - budget : t + 1].sum(-1) for t in range(T - task.rows, T)]
        expected.append(torch.stack(rows, dim=-1).mean(dim=(0, 2)).tolist())
    torch.testing.assert_close(run(task, "local", budget).score["mass_by_head"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", ["h2o", "tova"])
def test_mass_in_the_first_layer_is_that_of_a_real_run(policy):
    task, budget = prepared(RetainedMass), 9  # what the first layer is given depends on tokens only, not on eviction
    T, prompt = task.ids.shape[1], task.ids.shape[1] - task.rows
    cache = BoundedCache(writer().model.config, policy, budget, sequences=[0, 1, 2])
    p = task.full[0]
    held = torch.zeros(3, 2)
    with torch.no_grad():
        writer().model(task.ids[:, :prompt], past_key_values=cache)
        for t in range(prompt, T):
            for row, head in itertools.product(range(3), range(2)):
                slots = {int(j) for j in cache.positions(0)[row, head] if j >= 0}
                held[row, head] += sum(float(p[row, head, t - prompt, j]) for j in slots | {t})
            writer().model(task.ids[:, t : t + 1], past_key_values=cache)
    found = run(task, policy, budget).score["mass_by_head"][0]
    torch.testing.assert_close(found, (held / task.rows).mean(dim=0).tolist(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", ["local", "h2o", "tova", "streaming_llm", "random"])
def test_no_policy_beats_the_best_set_of_each_row(policy):
    score = run(prepared(RetainedMass), policy, 9).score
    assert score["regret"] > 0
    assert score["best_dynamic"] >= score["best_static"] > 0
    assert score["regret"] == pytest.approx(score["best_dynamic"] - score["mass"])
    for best, static, own in zip(
        score["best_dynamic_by_head"], score["best_static_by_head"], score["mass_by_head"], strict=True
    ):
        assert all(b >= max(s, o) for b, s, o in zip(best, static, own, strict=True))


def test_recording_changes_nothing_for_the_model():
    before = dense_losses(prepared(RetainedMass).ids)
    load(RetainedMass).prepare(writer())
    assert torch.equal(before, dense_losses(prepared(RetainedMass).ids))


# recall


def answers(task, policy, budgets):
    """The replies, and what was kept for each question."""
    (case,) = task.cases()
    done = list(task._ask(writer(), case, parse(policy), budgets))
    return [reply for batch in done for reply in batch.texts], torch.cat([batch.kept for batch in done])


def test_prompts_fit_their_context_and_end_with_the_question():
    task = load(Recall)
    for asked in task.questions["context=300"]:
        assert 250 < len(asked.ids) <= 302
        text = writer().checkpoint.tokenizer.decode(asked.ids)
        assert text.endswith("?\nAnswer:")
        assert asked.question.answer in text


def test_replies_are_those_of_generate_row_by_row():
    task = load(Recall)
    asked, model = task.questions["context=300"], writer().model
    budgets = [40, 45, 50]
    found, _ = answers(task, "h2o", budgets)
    for item, budget, reply in zip(asked, budgets, found, strict=True):
        cache = BoundedCache(model.config, "h2o", budget)
        ids = item.ids[None]
        with torch.inference_mode():
            model(ids[:, :-1], past_key_values=cache)
        out = model.generate(
            ids, past_key_values=cache, max_new_tokens=task.new_tokens, do_sample=False, pad_token_id=0
        )
        assert reply == writer().text_of(out[0, ids.shape[1] :].tolist())


LATER = dataclasses.replace(OPTIONS, ask="later")


@pytest.mark.parametrize("template", [None, model_folders.TEMPLATE, "own"])
def test_a_question_that_comes_later_is_cut_off_from_its_text(tmp_path, template):
    folder = model_folders.copy(tmp_path / "m")
    if template is not None:
        own = (resources.files(tiny) / "chat_template.jinja").read_text()
        model_folders.edit_json(folder / "tokenizer_config.json", chat_template=own if template == "own" else template)
    checkpoint = loading.find(folder)
    for asked in recall.ask(checkpoint, LATER, 400, 5):
        ending = recall.ending_of(asked.question)
        text = asked.question.prompt.removesuffix(ending).rstrip()
        assert text[-30:-1] in checkpoint.tokenizer.decode(asked.ids[: asked.first])
        assert ending.split()[0] not in checkpoint.tokenizer.decode(asked.ids[: asked.first])[-10:]
        rest = checkpoint.tokenizer.decode(asked.ids[asked.first :])
        assert ending in rest
        assert len(rest) < len(ending) + 40
    for asked in recall.ask(checkpoint, OPTIONS, 400, 5):
        assert asked.first == len(asked.ids) - 1


@pytest.mark.long
@pytest.mark.parametrize("policy", sweep(["h2o", "snapkv:window=8", "adakv:window=8", "local"], "local".__eq__))
def test_later_questions_are_the_second_turn_of_generate(policy):
    task = load(Recall, LATER)
    asked, model = task.questions["context=300,ask=later"], writer().model
    budgets = [60, 65, 70]
    found, _ = answers(task, policy, budgets)
    for item, budget, reply in zip(asked, budgets, found, strict=True):
        cache = BoundedCache(model.config, policy, budget)
        ids = item.ids[None]
        with torch.inference_mode():
            model(ids[:, : item.first], past_key_values=cache)
            model(ids[:, item.first : -1], past_key_values=cache)
        out = model.generate(
            ids, past_key_values=cache, max_new_tokens=task.new_tokens, do_sample=False, pad_token_id=0
        )
        reply_ids = out[0, ids.shape[1] :][: recall.NEW_TOKENS[task.wording]].tolist()
        assert reply == writer().text_of(reply_ids)


def test_what_is_kept_does_not_depend_on_a_question_that_comes_later():
    task = load(Recall, LATER)
    other = [dataclasses.replace(a, ids=torch.cat([a.ids[: a.first], a.ids[a.first :].flip(0)])) for a in _asked(task)]
    turned = dataclasses.replace(task, questions=dict.fromkeys(task.questions, other))
    (replies, kept), (others, same) = (answers(one, "tova", [40] * 3) for one in (task, turned))
    assert torch.equal(kept, same)
    assert replies != others


def _asked(task):
    (asked,) = task.questions.values()
    return asked


def test_cases_and_lengths_of_later_questions():
    task, before = load(Recall, LATER), load(Recall)
    assert list(task.cases()) == ["context=300,ask=later"]
    assert list(before.cases()) == ["context=300"]
    for later, whole in zip(task.cases()["context=300,ask=later"], before.cases()["context=300"], strict=True):
        assert later < whole <= later + task.new_tokens - 16
    assert task.settings() == before.settings()  # so that both stand in one folder
    score = run(task, "full", [length + task.new_tokens for length in task.cases()["context=300,ask=later"]]).score
    assert score["kept"] == pytest.approx([0.1] * 10, abs=0.005)


def test_room_for_everything_makes_no_difference_to_when_the_question_comes():
    later, before = load(Recall, LATER), load(Recall)
    assert answers(later, "full", [400] * 3)[0] == answers(before, "full", [400] * 3)[0]


SEVERAL = Options(limit=15, contexts=(400,), facts=4, ask="later")
"""Eight texts, two questions about each but for the last."""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "random", "snapkv:window=8", "spatten", "adakv:window=8", "full"])
def test_questions_about_one_text_are_asked_in_copies_of_one_memory(policy, monkeypatch):
    task, reads = load(Recall, SEVERAL), []
    asked, feed = _asked(task), Drive.feed
    assert [(item.document, item.number) for item in asked] == [(i // 2, i % 2) for i in range(15)]

    def counted(self, ids, *rest, **options):
        reads.append(len(ids) if ids.shape[1] > 100 else 0)
        return feed(self, ids, *rest, **options)

    monkeypatch.setattr(Drive, "feed", counted)
    budgets = [EVERYTHING if policy == "full" else 40 + item.document for item in asked]
    found, kept = answers(task, policy, budgets)
    assert sum(reads) == 8
    for item, budget, reply, shares in zip(asked, budgets, found, kept, strict=True):
        drive = Drive(writer(), parse(policy), [budget], first=item.document)
        assert torch.equal(shares, qa_task.read(drive, [item])[0])
        assert [reply] == qa_task.texts(writer(), drive, [item], recall.NEW_TOKENS[task.wording])


TOGETHER = replace(SEVERAL, ask="inside")
ABLE = [
    *("full", "local", "streaming_llm", "random", "snapkv:window=8", "snapkv:default", "tova", "adakv:window=8"),
    *("pyramidkv:window=8", "ahakv:recent=8", "keydiff", "defensivekv:window=8"),
]
"""Policies under which questions inside share the reading of their text."""


def compare_with_alone(policy, family="llama"):
    """Questions inside, each beside the same question alone; returns the share of their tokens that was read."""
    task, read, feed = Recall.load(writer(family).checkpoint, TOGETHER), [], Drive.feed
    ((case, asked),) = task.questions.items()

    def counted(self, ids, *rest, **options):
        read.append(ids.numel())
        return feed(self, ids, *rest, **options)

    budgets = [EVERYTHING if policy == "full" else 60 + item.document for item in asked]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drive, "feed", counted)
        done = list(task._ask(writer(family), case, parse(policy), budgets))
    found, kept = [reply for batch in done for reply in batch.texts], torch.cat([batch.kept for batch in done])
    for number, (item, budget, reply, shares) in enumerate(zip(asked, budgets, found, kept, strict=True)):
        drive = Drive(writer(family), parse(policy), [budget], first=number)
        torch.testing.assert_close(shares, qa_task.read(drive, [item])[0], rtol=0, atol=1e-6)
        assert [reply] == qa_task.texts(writer(family), drive, [item], recall.NEW_TOKENS[task.wording])
    return sum(read) / sum(len(item.ids) for item in asked)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ABLE)
def test_questions_inside_share_the_reading_of_their_text_where_nobody_can_tell(policy):
    assert compare_with_alone(policy) < 0.75


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "scissorhands", "reread", "topk"])
def test_policies_that_need_every_row_read_each_question_anew(policy):
    assert compare_with_alone(policy) > 1


@pytest.mark.slow
def test_models_with_a_state_read_each_question_anew():
    assert compare_with_alone("tova", "lfm2") > 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["tova", "streaming_llm"])
def test_layers_with_windows_share_readings_as_well(policy):
    assert compare_with_alone(policy, "gemma3") < 0.75


def test_copies_of_a_memory_do_not_change_each_other_or_the_original():
    ids = load(Perplexity).ids
    drive = Drive(writer(), parse("h2o"), [12, 9, 12])
    drive.feed(ids[:, :30])
    before = drive.cache.snapshot(1)
    copies = drive.copies([1, 2, 1])
    logits = copies.feed(ids[[0, 2, 2], 30:33])
    assert copies.budgets == (9, 12, 9)
    assert torch.equal(drive.cache.snapshot(1).positions(), before.positions())
    alone = drive.copies([1])
    torch.testing.assert_close(alone.feed(ids[2:, 30:33])[0], logits[2], rtol=0, atol=1e-5)


def test_so_many_facts_that_no_name_is_left_for_others():
    made = document(0, n_facts=640, n_questions=4, tokens=20_000, style="facts", count=lambda text: len(text.split()))
    assert len(made.questions[0].facts) == 640


TURNS = Options(limit=8, contexts=(300,), facts=4, ask="later", turns=12)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "snapkv:window=8", "keydiff:recent=4", "full"])
def test_a_question_comes_ten_turns_after_its_fact(policy):
    task = load(Recall, TURNS)
    asked = _asked(task)
    budgets = [EVERYTHING if policy == "full" else 40 + item.document for item in asked]
    found, kept = answers(task, policy, budgets)
    turns = set()
    for item, budget, reply, shares in zip(asked, budgets, found, kept, strict=True):
        drive = Drive(writer(), parse(policy), [budget], first=item.document)
        turn = min(12, int(item.question.depth * 12) + 11)
        edges = [item.first * i // 12 for i in range(13)]
        for start, stop in itertools.pairwise(edges[: turn + 1]):
            drive.feed(*left_padded([item.ids[start:stop]]))
        rest = drive.copies([0])
        assert [reply] == qa_task.texts(writer(), drive, [item], recall.NEW_TOKENS[task.wording])
        for start, stop in itertools.pairwise(edges[turn:]):
            rest.feed(*left_padded([item.ids[start:stop]]))
        tenths = [kept_by_tenth(rest.cache.positions(i), [item.first]) for i in rest.cache.bounded_layers()]
        torch.testing.assert_close(shares, torch.stack(tenths).mean(0)[0])
        turns.add(turn)
    assert turns == {11, 12}
    assert list(task.cases()) == ["context=300,ask=later,turns=12"]
    assert task.settings()["turns"] == 12


WRONG_TURNS = [
    ({"turns": 10}, "turns=10 leaves no fact that is asked 10 turns later; give 11 or more"),
    ({"turns": 151}, "turns=151 leaves less than two tokens of 300 for a turn"),
    ({"turns": 12, "ask": "inside"}, "add `ask=later`"),
]


def test_turns_that_cannot_be():
    for options, said in WRONG_TURNS:
        with pytest.raises(InputError, match=said):
            load(Recall, dataclasses.replace(TURNS, **options))


def test_more_questions_are_about_the_same_texts():
    few, many = (_asked(load(Recall, dataclasses.replace(SEVERAL, limit=n))) for n in (16, 32))
    assert [item.document for item in many[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert len({item.document for item in few}) == len({item.document for item in many}) == 8
    text = writer().checkpoint.tokenizer.decode
    assert [text(item.ids[: item.first]) for item in few] == [
        text(many[4 * (i // 2)].ids[: item.first]) for i, item in enumerate(few)
    ]


def test_every_question_is_recorded_with_its_text():
    task = load(Recall, SEVERAL)
    score = run(task, "local", 60).score
    assert [(document, number) for document, number, _ in score["asked"]] == [(i // 2, i % 2) for i in range(15)]
    assert "".join(str(ok) for *_, ok in score["asked"]) == score["rights"]


@pytest.mark.long
def test_scores_count_replies(monkeypatch):
    task = load(Recall, Options(limit=10, contexts=(300,), facts=2))
    answers = iter([asked.question.answer for asked in task.questions["context=300"]])
    monkeypatch.setattr(
        Writer, "text_of", lambda self, ids: next(answers) + ("" if next(turn) % 2 else "x"), raising=True
    )
    turn = iter(range(10))
    score = run(task, "local", 30).score
    assert (score["right"], score["n"], score["accuracy"]) == (5, 10, 0.5)
    assert score["rights"] == "0101010101"
    assert [sum(pair) for pair in zip(*score["by_depth"], strict=True)] == [5, 10]
    assert {kind: n for kind, (_, n) in score["by_kind"].items()} == dict.fromkeys(
        ["colour", "place", "word", "owner", "number"], 2
    )


@pytest.mark.slow
def test_a_window_keeps_the_end_of_the_prompt_and_everything_is_kept_evenly():
    task = load(Recall)
    assert run(task, "local", 20).score["kept"] == [0.0] * 9 + [1.0]
    for share in run(task, "full", EVERYTHING).score["kept"]:
        assert share == pytest.approx(0.1, abs=0.005)


def test_depths_are_where_they_were_asked_for():
    task = load(Recall, Options(limit=4, contexts=(800,), facts=2, depths=(0.0, 1.0)))
    depths = [asked.question.depth for asked in task.questions["context=800"]]
    assert max(depths[0::2]) < 0.3 < 0.6 < min(depths[1::2])


def test_context_too_short_for_the_facts_is_refused():
    with pytest.raises(InputError, match=r"16 facts has \d+ tokens, more than the context of 100"):
        load(Recall, Options(contexts=(100,), facts=16))


@pytest.mark.parametrize(
    ("wording", "reply", "right"),
    [
        ("embedded", " amber", True),
        ("embedded", "It is amber.", False),
        ("instruction", "It is **Amber**.", True),
        ("instruction", "It is amber, not red.", False),
        ("plain", " amber\nQuestion: and red?", True),
        ("plain", " chamber", False),
        ("plain", "", False),
    ],
)
def test_what_counts_as_right(wording, reply, right):
    asked = recall.Question("", "amber", "colour", 0.5, (), ("amber", "red"))
    assert recall.right(wording, asked, reply) is right


@pytest.mark.parametrize(("own", "wording"), [(False, "instruction"), (True, "embedded")])
def test_wording_follows_the_chat_template(tmp_path, own, wording):
    folder = model_folders.copy(tmp_path / "m")
    template = (resources.files(tiny) / "chat_template.jinja").read_text() if own else model_folders.TEMPLATE
    model_folders.edit_json(folder / "tokenizer_config.json", chat_template=template)
    checkpoint = loading.find(folder)
    assert recall.wording_of(checkpoint) == wording
    (asked,) = recall.ask(checkpoint, OPTIONS, 400, 1)
    text = checkpoint.tokenizer.decode(asked.ids)
    assert (asked.question.prompt in text) is own
    assert text.startswith("<s><|user|> " if own else "<s>user: Read the text")
    assert len(asked.ids) <= 402


def test_as_many_facts_as_there_are_names_for_and_no_more():
    with pytest.raises(InputError, match=r"facts=900 is more .* give (\d+) or fewer") as caught:
        Options(facts=900)
    most = int(re.search(r"give (\d+) or fewer", str(caught.value))[1])
    for seed, kind in enumerate(kind.name for kind in HELD_OUT.kinds):
        assert len(question(seed, kind=kind, n_facts=Options(facts=most).facts, tokens=100).facts) == most
    made = {"n_questions": 1, "tokens": 100, "count": lambda text: len(text.split())}
    assert len(document(0, n_facts=most, **made).questions[0].facts) == most
    with pytest.raises(InputError, match=f"facts={most + 1}"):
        Options(facts=most + 1)
    with pytest.raises(ValueError, match="larger than population"):  # so the limit is not too low
        document(0, n_facts=most + 1, **made)


@pytest.mark.parametrize("style", STYLES)
def test_texts_of_every_look_hold_their_facts_and_their_questions(style):
    made = document(3, n_facts=6, n_questions=3, tokens=900, style=style, count=lambda text: len(text.split()))
    depths = [asked.depth for asked in made.questions]
    assert len(depths) == 3
    assert depths == sorted(depths)
    assert 0 <= depths[0] < depths[-1] < 1
    for asked in made.questions:
        fact = asked.facts[-1]
        assert asked.prompt.startswith(made.text)
        assert asked.answer == fact.value
        for one in asked.facts:
            keys = [(other.kind, other.owner, other.thing) for other in asked.facts]
            assert keys.count((one.kind, one.owner, one.thing)) == 1
        said = made.text[round(asked.depth * len(made.text)) :][:90]
        assert fact.thing in said
        if style != "hops":
            assert fact.owner.lower() in said.lower()
    again = document(3, n_facts=6, n_questions=3, tokens=900, style=style, count=lambda text: len(text.split()))
    assert again == made
    assert made != document(4, n_facts=6, n_questions=3, tokens=900, style=style, count=lambda text: len(text.split()))


def test_a_question_over_two_facts_names_an_owner_by_a_thing_of_theirs():
    made = document(5, n_facts=8, n_questions=8, tokens=900, style="hops", count=lambda text: len(text.split()))
    for asked in made.questions:
        fact = asked.facts[-1]
        material, thing = re.fullmatch(r"the owner of the (\S+) (.+)", fact.owner).groups()
        (owner,) = re.findall(rf"{material} {thing} (?:is the property of|belonged to) (\w+)\.", made.text)
        told = made.text[round(asked.depth * len(made.text)) :].partition(".")[0]
        assert owner in told
        assert owner not in asked.prompt[len(made.text) :]
        assert f"the owner of the {material} {thing}" in asked.prompt
        assert asked.answer in told


def test_code_has_its_facts_in_comments_above_lines_of_a_program():
    made = document(5, n_facts=8, n_questions=8, tokens=900, style="code", count=lambda text: len(text.split()))
    lines = made.text.splitlines()
    comments = [line for line in lines if line.startswith("# ")]
    assert len(comments) > 8
    assert len(lines) > len(comments) + 8
    for asked in made.questions:
        assert made.text[round(asked.depth * (len(made.text) - 2)) :].startswith("# ")


def test_other_facts_of_a_text_contradict_none_that_is_asked_about():
    made = document(1, n_facts=8, n_questions=8, tokens=1500, style="facts", count=lambda text: len(text.split()))
    for asked in made.questions:
        fact = asked.facts[-1]
        if fact.kind.name != "owner":
            told = [
                s for s in re.split(r"(?<=[.])\s", made.text) if fact.owner in s and re.search(rf"\b{fact.thing}\b", s)
            ]
            assert len(told) == sum((f.owner, f.thing) == (fact.owner, fact.thing) for f in asked.facts)


# continuation


def test_a_continuation_is_fed_token_by_token_after_the_cut():
    task = load(Continuation, Options(limit=3))
    ids, n = task.ids, task.ids.shape[1] - task.new - 1
    cache = BoundedCache(writer().model.config, "h2o", 9)
    losses = []
    with torch.no_grad():
        writer().model(ids[:, :n], past_key_values=cache)
        for t in range(n, n + task.new):
            logits = writer().model(ids[:, t : t + 1], past_key_values=cache).logits[:, -1].float()
            losses.append(-logits.log_softmax(-1).gather(-1, ids[:, t + 1 : t + 2]))
    score = run(task, "h2o", 9).score
    assert score["nll_by_text"] == pytest.approx(torch.cat(losses, dim=1).mean(dim=1).tolist(), abs=1e-4)
    assert score["nll"] == pytest.approx(sum(score["nll_by_text"]) / 3, abs=1e-5)
    assert score["n"] == 3 * task.new


def test_the_full_caches_continuation_is_the_models_own():
    task = load(Continuation, Options(limit=3))
    expected = dense_losses(task.ids)[:, -task.new :].mean().item()
    assert run(task, "full", EVERYTHING).score["nll"] == pytest.approx(expected, abs=1e-4)


# all


def test_learned_positions_are_an_error_with_a_remedy():
    checkpoint = loading.find(model_folders.folder("gpt2"))
    with pytest.raises(InputError, match=r"recall needs 316 positions.*only 32.*lower `contexts`"):
        Recall.load(checkpoint, OPTIONS)
    with pytest.raises(InputError, match="lower `window`"):
        Perplexity.load(checkpoint, OPTIONS)
    assert Agreement.load(checkpoint, OPTIONS).ids.shape[1] < 32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recall", "perplexity", "continuation", "agreement", "mass"])
def test_every_task_is_plain_data_versioned_and_independent_of_batches(name, monkeypatch):
    task = load(TASKS[name])
    assert task.VERSION >= 1
    task.prepare(writer())
    budgets = [20] * 3 if name == "mass" else [20, 22, 25]
    outcome = run(task, "random", budgets)
    assert task.headline in outcome.score
    json.dumps([task.settings(), outcome.score], allow_nan=False)
    monkeypatch.setattr("kvkeep.evals.forward.BATCH_TOKENS", 1)  # every row alone
    task.prepare(writer())
    alone = run(task, "random", budgets)
    assert alone.score[task.headline] == pytest.approx(outcome.score[task.headline], rel=1e-4)
    assert alone.memory.full_bytes == outcome.memory.full_bytes
    assert alone.memory.occupied_bytes == outcome.memory.occupied_bytes


def test_tasks_by_name():
    assert find("mass, recall,mass") == [RetainedMass, Recall]
    with pytest.raises(InputError, match="Did you mean 'recall'"):
        find("recal")
    with pytest.raises(InputError, match="empty"):
        find(",")


WRONG_OPTIONS = [
    {"limit": 0},
    {"contexts": (0,)},
    {"contexts": ()},
    {"depths": (1.5,)},
    {"stride": 0},
    {"window": 1},
    {"seed": -1},
    {"ask": "never"},
    {"documents": "poem"},
]


def test_options_out_of_range():
    for wrong in WRONG_OPTIONS:
        with pytest.raises(InputError, match=next(iter(wrong))):
            Options(**wrong)


def test_a_padded_batch_gives_each_row_what_it_gets_alone():
    gpt2 = writer("gpt2")  # learned positions: an offset would show
    rows = [torch.arange(5, 15), torch.arange(40, 44)]
    steps = [torch.tensor([[7], [8]]), torch.tensor([[9], [10]])]
    drive = Drive(gpt2, parse("h2o"), [6, 3])
    ids, real = left_padded(rows)
    together = [drive.feed(ids, real, last_only=True), drive.feed(steps[0], torch.tensor([[True], [True]]))]
    together.append(drive.feed(steps[1], torch.tensor([[False], [True]])))  # the first row has ended
    for row, budget in enumerate((6, 3)):
        alone = Drive(gpt2, parse("h2o"), [budget])
        parts = [alone.feed(rows[row][None], last_only=True), *(alone.feed(step[row : row + 1]) for step in steps)]
        for found, expected in list(zip(together, parts, strict=True))[: 2 + row]:
            torch.testing.assert_close(found[row], expected[0], rtol=0, atol=1e-5)


def test_left_padding():
    ids, real = left_padded([torch.tensor([1, 2, 3]), torch.tensor([4])])
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert real.tolist() == [[True, True, True], [False, False, True]]


def test_shares_of_a_text():
    assert [RequestedBudget(ratio=0.2).of(512), RequestedBudget(tokens=7).of(512)] == [102, 7]
    assert [str(RequestedBudget(ratio=0.04)), str(RequestedBudget(ratio=0.125)), str(RequestedBudget(tokens=4096))] == [
        "4%",
        "12.5%",
        "4096",
    ]


NOVEL = " ".join(f"Sentence {number} of a novel is about the sea." for number in range(400))
OWN_TEXT = dataclasses.replace(OPTIONS, documents="text-dev", text=NOVEL, facts=4, ask="later")


@pytest.mark.parametrize("template", [None, model_folders.TEMPLATE])
def test_facts_between_the_sentences_of_a_text_are_asked_for_by_the_beginning_of_the_answer(tmp_path, template):
    folder = model_folders.copy(tmp_path / "m")
    if template is not None:
        model_folders.edit_json(folder / "tokenizer_config.json", chat_template=template)
    checkpoint = loading.find(folder)
    for asked in recall.ask(checkpoint, OWN_TEXT, 400, 4):
        fact = asked.question.facts[-1]
        read, rest = map(checkpoint.tokenizer.decode, (asked.ids[: asked.first], asked.ids[asked.first :]))
        assert "of a novel" in read
        assert fact.say(fact.kind.statements[0]) in read
        assert recall.ending_of(asked.question) in rest
        assert rest.endswith(asked.question.lead)
        assert f"{asked.question.lead} {asked.question.answer}." == fact.say(fact.kind.statements[0])
        assert recall.right("continued", asked.question, f" {asked.question.answer}.\n")


def test_what_rules_are_chosen_by_and_what_tables_measure_has_nothing_in_common():
    dev, test = (STYLES[name].lexicon.kinds for name in ("text-dev", "text-test"))
    for one, other in itertools.product(dev, test):
        assert not {*one.statements, *one.questions} & {*other.statements, *other.questions}
        assert not {*one.values} & {*other.values}


@pytest.mark.parametrize("text", [None, " \n"])
def test_facts_between_the_sentences_of_a_text_need_one(text):
    with pytest.raises(InputError, match="give one with `text`"):
        dataclasses.replace(OWN_TEXT, text=text)
    with pytest.raises(InputError, match=r"facts=51 is more .* give 50 or fewer"):
        dataclasses.replace(OWN_TEXT, facts=51)
