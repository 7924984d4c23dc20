"""The work behind lm-eval's model type, without lm-eval: log-likelihoods under eviction, answers, protocols."""

import dataclasses
import functools

import model_folders
import pytest
import torch

from kvkeep import parse
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import KVKeepError
from kvkeep.evals.forward import Drive, Setup
from kvkeep.evals.grid import RequestedBudget
from kvkeep.evals.lm_eval import scoring
from kvkeep.evals.lm_eval.command import Arguments, bounded_of, budget_of, sampling_of
from kvkeep.evals.lm_eval.scoring import BoundedModel, ContextPair, EvaluationProtocol, GenerationPrompt
from kvkeep.models import load as loading
from kvkeep.models.load import quiet
from kvkeep.models.tokenization import Writer

IDS = torch.randint(3, 250, (200,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread(), quiet():
        yield


@functools.cache
def writer(family="llama"):
    with quiet():
        checkpoint = loading.find(model_folders.folder(family))
        return Writer(checkpoint, loading.read_weights(checkpoint))


def bounded(policy="full", budget=8, family="llama", **options):
    return BoundedModel(writer=writer(family), policy=parse(policy), budget=RequestedBudget(tokens=budget), **options)


def pair(start, context, new, first=None):
    ids = tuple(IDS[start : start + context + new])
    return ContextPair(ids[:context], ids[context:], max(1, context - 1) if first is None else first, context)


PAIRS = [pair(0, 20, 3), pair(0, 20, 1), pair(40, 9, 5), pair(60, 1, 4), pair(80, 15, 1), pair(0, 20, 7)]


@functools.cache
def dense(family, ids, new):
    with torch.no_grad():
        logits = writer(family).model(torch.tensor([ids])).logits[0, -new - 1 : -1].float()
    wanted = torch.tensor(ids[-new:])
    total = logits.log_softmax(-1).gather(-1, wanted[:, None]).sum().item()
    return total, bool((logits.argmax(-1) == wanted).all())


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_with_the_full_cache_scores_are_those_of_one_forward_pass(family, stride):
    pairs = [one for one in PAIRS if len(one.context) + len(one.continuation) < model_folders.POSITIONS]
    found = dict(scoring.scores(bounded(family=family, stride=stride, rows=2), pairs))
    assert sorted(found) == list(range(len(pairs)))
    for place, one in enumerate(pairs):
        total, greedy = dense(family, one.context + one.continuation, len(one.continuation))
        assert found[place][0] == pytest.approx(total, abs=1e-4)
        assert found[place][1] == greedy


def alone(policy, budget, one):
    """A plain loop: the first part at once, the rest of the context, its last token, then token by token."""
    drive = Drive(writer(), parse(policy), [budget])
    fed = [one.context[: one.first], one.context[one.first : -1], one.context[-1:], *((t,) for t in one.continuation)]
    total = 0.0
    for i, part in enumerate(fed[:-1]):
        if part:
            logits = drive.feed(torch.tensor([part]), last_only=True)[0, -1].float()
        if i >= 2:
            total += logits.log_softmax(-1)[fed[i + 1][0]].item()
    return total


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["local", "h2o", "snapkv:window=4"])
def test_evicting_scores_are_those_of_each_pair_alone(policy):
    pairs = [pair(0, 20, 3), pair(0, 20, 1), pair(0, 20, 6), pair(40, 19, 5), pair(40, 19, 2), pair(70, 16, 2, first=9)]
    found = dict(scoring.scores(bounded(policy, rows=2), pairs))
    for place, one in enumerate(pairs):
        assert found[place][0] == pytest.approx(alone(policy, 8, one), abs=1e-4)
    full = dict(scoring.scores(bounded(), pairs))
    assert any(abs(found[i][0] - full[i][0]) > 1e-3 for i in range(len(pairs)))


def test_a_context_is_read_once_for_all_its_continuations(monkeypatch):
    feed, sizes = Drive.feed, []
    monkeypatch.setattr(
        Drive, "feed", lambda self, ids, *rest, **more: sizes.append(ids.shape[1]) or feed(self, ids, *rest, **more)
    )
    choices = [dataclasses.replace(pair(0, 20, 3), continuation=(i, i + 1)) for i in range(3, 7)]
    assert len(dict(scoring.scores(bounded("h2o"), choices))) == 4
    assert sizes.count(19) == 1


def test_each_context_has_an_identity_of_its_own(monkeypatch):
    found, read = [], scoring._read

    def watched(drive, groups):
        logits = read(drive, groups)
        found.extend(drive.cache.bounded_layers()[0].block.sequences.tolist())
        return logits

    monkeypatch.setattr(scoring, "_read", watched)
    pairs = [pair(10 * i, 12 + (i * 5) % 7, 2) for i in range(7)]  # which are read in another order
    assert len(dict(scoring.scores(bounded("random", rows=2), pairs))) == 7
    assert sorted(found) == [*range(7)]


def test_a_share_is_of_the_length_that_the_pair_names():
    share = dataclasses.replace(bounded("local"), budget=RequestedBudget(ratio=0.4))
    ten = dataclasses.replace(pair(0, 20, 3), length=20)
    assert dict(scoring.scores(share, [ten])) == dict(scoring.scores(bounded("local", 8), [ten]))


def wish(start, n, first, new=4, until=()):
    return GenerationPrompt(tuple(IDS[start : start + n]), first, n, until, SamplingParams(max_new_tokens=new))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "local", "h2o"])
def test_answers_are_those_of_each_prompt_alone(policy):
    wishes = [wish(0, 20, 19), wish(40, 12, 6), wish(60, 1, 1), wish(80, 17, 16), wish(100, 15, 10)]
    few = bounded(policy, 8, rows=2)
    found = dict(scoring.answers(few, wishes))
    assert found == {i: next(scoring.answers(few, [one]))[1] for i, one in enumerate(wishes)}
    assert all(isinstance(text, str) for text in found.values())


def test_answers_are_generated_in_caches_of_the_same_options(monkeypatch):
    given, made = [], scoring.Engine
    monkeypatch.setattr(scoring, "Engine", lambda *args, **more: given.append(more) or made(*args, **more))
    setup = Setup(positions="slot", layer_budget="pyramid", head_budget="ada:0.2", kv_bits="4", prefill_chunk=8)
    next(scoring.answers(bounded("local", setup=setup), [wish(0, 20, 19)]))
    assert given[0].items() >= dataclasses.asdict(setup).items()


@pytest.mark.slow
def test_the_first_token_of_an_answer_depends_on_the_cut():
    """The last token of a prompt follows the cut, so even an answer of one token shows what was lost."""
    wishes = [wish(start, 24, 23, new=1) for start in range(0, 120, 8)]
    assert dict(scoring.answers(bounded(), wishes)) != dict(scoring.answers(bounded("local", 3), wishes))


# protocol


PROMPT = "A text.\n\nQuestion: one? Answer: 1\n\nAnother text.\nQuestion: two? Answer:"


CUTS = [
    (EvaluationProtocol(question="later"), "A text.\n\nQuestion: one? Answer: 1\n\nAnother text."),
    (EvaluationProtocol(examples="later"), "A text.\n\nQuestion: one? Answer: 1"),
    (
        EvaluationProtocol(question="later", examples="later"),
        "A text.\n\nQuestion: one? Answer: 1\n\nAnother text.",
    ),
    (EvaluationProtocol(question="later", question_mark="Answer:"), PROMPT.removesuffix("Answer:")),
    (EvaluationProtocol(question="later", question_mark="?!"), ""),
]


def test_prompts_are_cut_before_the_last_mark():
    for protocol, head in CUTS:
        assert PROMPT[: protocol.place(PROMPT)] == head
        encode = functools.partial(writer().checkpoint.tokenizer.encode, add_special_tokens=False)
        ids = encode(PROMPT)
        first = protocol.first(PROMPT, ids, encode)
        assert PROMPT.startswith(writer().checkpoint.tokenizer.decode(ids[:first]))
        assert len(head) - 4 <= len(writer().checkpoint.tokenizer.decode(ids[:first])) <= len(head)


def test_a_prompt_that_begins_with_its_question_has_nothing_to_cut():
    later = EvaluationProtocol(question="later")
    assert later.place("Question: one?") == later.place("\nQuestion: one?") == 0
    assert "question_mark" in str(later.no_cut("Question: one?", 0))


WRONG_ARGUMENTS = [
    ({"polcy": "h2o"}, "polcy"),
    ({"stride": 0}, "stride"),
    ({"rows": "many"}, "rows"),
    ({"max_length": True}, "max_length"),
]


def test_wrong_model_arguments_are_refused():
    for options, said in WRONG_ARGUMENTS:
        with pytest.raises(KVKeepError, match=said):
            Arguments.of(options)


WRONG_PROTOCOLS = [{"question": "never"}, {"examples": "x"}, {"question_mark": ""}]


def test_wrong_protocols_are_refused():
    for options in WRONG_PROTOCOLS:
        with pytest.raises(KVKeepError, match=next(iter(options))):
            EvaluationProtocol(**options)


WRONG_BUDGETS = ["", "x", "%", "0", "-5", "0%", "120%", "nan%", "inf", "1e3"]


def test_wrong_budgets_are_refused():
    for text in WRONG_BUDGETS:
        with pytest.raises(KVKeepError):
            budget_of(text)


def test_a_budget_below_what_the_policy_protects_is_refused_before_weights_are_read(monkeypatch):
    monkeypatch.setattr("kvkeep.evals.lm_eval.command.read_weights", None)
    with pytest.raises(KVKeepError):
        bounded_of(Arguments(pretrained=str(model_folders.folder()), policy="h2o:recent=20", budget="8"))


def test_arguments_as_lm_eval_reads_them():
    asked = Arguments.of({"budget": 512, "positions": True, "batch_size": "4", "question_mark": "\\nQ:"})
    assert (asked.budget, asked.positions, asked.rows, asked.question_mark) == ("512", "true", 4, "\nQ:")
    assert Arguments.of({"batch_size": 1, "max_batch_size": None}).rows == 16


def test_sampling_of_a_task():
    until, sampling = sampling_of({"until": ["\n", "\n"], "do_sample": False, "temperature": 0.7}, 9, "</s>")
    assert until == ("\n", "</s>")
    assert (sampling.max_new_tokens, sampling.temperature) == (9, 0.0)
    assert sampling_of({"until": "x", "temperature": 0.7, "max_gen_toks": 3}, 9, "")[1].temperature == 0.7
    empty = dict.fromkeys(("until", "temperature", "top_p", "max_gen_toks"))  # null in a task's file
    assert sampling_of({**empty, "do_sample": True}, 9, "</s>") == sampling_of({"do_sample": True}, 9, "</s>")
    assert sampling_of({"do_sample": None, "temperature": 0.7}, 9, "")[1].temperature == 0.7
