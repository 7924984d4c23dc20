"""One prompt and a job of many go the same way: the same options give the same text, and no global state is touched."""

import json

import model_folders
import pytest
import torch
from commands import completions, run, write
from transformers import LlamaConfig

from kvkeep.batch.input import COMPLETION, parse
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.noise import spread, uniform

from .models import CONFIGS, alone, model
from .test_equal import prompt_of

PROMPT = "the quick brown fox jumps over the lazy dog and the cat " * 2
LONG = PROMPT * 30
DRAWN = ("-t", 1.2, "--top-k", 40, "--top-p", 0.95, "--min-p", 0.001, "--repetition-penalty", 1.1, "--seed", 7)

OPTIONS = [
    (),
    DRAWN,
    ("-b", 8, *DRAWN),
    ("-b", 8, "--prefill-chunk", 5, *DRAWN),
    ("-b", 8, "--prefill-chunk", 1, *DRAWN),
    ("-b", 12, "--policy", "adakv:window=4", *DRAWN),
    ("-b", 8, "--policy", "random", *DRAWN),
    ("-b", 8, "--policy", "spatten", *DRAWN),
    ("-b", 8, "--policy", "spatten", "--prefill-chunk", 5, *DRAWN),
    ("--policy", "full", *DRAWN),
    ("--policy", "pyramidkv:window=4", *DRAWN),
    ("-b", 10, "--layer-budget", "ramp:0.2", *DRAWN),
    ("-b", 8, "--positions", "slot", *DRAWN),
    ("-b", 8, "--dtype", "bfloat16", *DRAWN),
]


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def single(*options, prompt=PROMPT, new=6, family="llama"):
    """The text of one prompt."""
    result = run(model_folders.folder(family), "-p", prompt, "-n", new, "--json", *options)
    assert result.exit_code == 0, result.said
    return json.loads(result.stdout)["text"]


def texts_of(tmp_path, *lines, options=(), new=6, family="llama"):
    """The texts of a job, by the numbers of its lines."""
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    target.unlink(missing_ok=True)
    result = run(model_folders.folder(family), "-i", source, "-o", target, "-n", new, *options)
    assert result.exit_code == 0, result.said
    return [entry[COMPLETION]["text"] for _, entry in sorted(completions(target).items())]


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(map(str, options)) or "greedy")
def test_a_prompt_gives_the_same_text_with_and_without_a_file(tmp_path, options):
    found = texts_of(tmp_path, {"prompt": PROMPT}, {"prompt": "the cat"}, options=options)
    assert found[0] == single(*options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-b", 8, "--prefill-chunk", 5, *DRAWN)])
def test_a_model_with_a_state_goes_the_same_way(tmp_path, options):
    lines = [{"prompt": PROMPT}, {"prompt": "the cat"}]
    found = texts_of(tmp_path, *lines, options=options, family="lfm2")
    assert found[0] == single(*options, family="lfm2")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), DRAWN])
def test_prompts_are_read_whole_in_both_ways_however_long_they_are(tmp_path, options):
    """Longer than a chunk of `Engine`'s own default, under a policy that keeps other tokens when it takes chunks."""
    options = ("-b", 16, "--policy", "tova", *options)
    text = single(*options, prompt=LONG, new=8)
    assert texts_of(tmp_path, {"prompt": LONG}, options=options, new=8) == [text]
    assert single(*options, "--prefill-chunk", 512, prompt=LONG, new=8) != text


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--compare",), DRAWN, ("-b", 8, "--policy", "random", *DRAWN)])
@pytest.mark.parametrize("as_job", [False, True])
def test_torchs_own_random_numbers_are_left_alone(tmp_path, options, as_job):
    model_folders.folder("llama")  # draws its weights once
    torch.manual_seed(12345)
    before = torch.get_rng_state()
    if as_job:
        texts_of(tmp_path, {"prompt": PROMPT}, options=[word for word in options if word != "--compare"])
    else:
        single(*options)
    assert torch.initial_seed() == 12345
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_lines_with_the_same_prompt_draw_different_texts(tmp_path):
    lines = [{"prompt": PROMPT}] * 4
    found = texts_of(tmp_path, *lines, options=DRAWN)
    assert len(set(found)) == 4
    assert texts_of(tmp_path, *lines, options=DRAWN) == found
    assert texts_of(tmp_path, *lines, options=(*DRAWN, "--max-rows", 1)) == found
    assert len(set(texts_of(tmp_path, *lines))) == 1  # the likeliest tokens are the same for all


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "random"])
def test_a_line_with_a_seed_of_its_own_is_reproducible_by_it_alone(tmp_path, policy):
    options = ("-b", 8, "--policy", policy, *DRAWN)
    other, own = {"prompt": PROMPT}, {"prompt": PROMPT, "options": {"seed": 5}}
    first, second = texts_of(tmp_path, own, other, options=options)
    assert texts_of(tmp_path, other, other, own, options=options)[2] == first == single(*options, "--seed", 5)
    assert first != second


@pytest.mark.parametrize(("options", "sequence"), [({}, 6), ({"temperature": 1.0}, 6), ({"seed": 0}, 0)])
def test_a_line_is_known_by_its_number_unless_it_names_a_seed(options, sequence):
    raw = json.dumps({"prompt": "a", "options": options}).encode()
    assert parse(7, raw, lambda prompt: [1], SamplingParams()).request.sequence == sequence


@pytest.mark.slow
def test_draws_differ_by_sequence_and_step_and_keep_their_value_for_sequence_0():
    wish = SamplingParams(temperature=1.0, seed=3, max_new_tokens=40)
    prompt = prompt_of(1, 5)
    engine = Engine(model("llama"), budget=64, rows=3)
    requests = [Request(prompt=prompt, sampling=wish, sequence=n) for n in (0, 1, 2**40, -1)]
    found = [result.token_ids for result in engine.generate(requests)]
    assert len(set(found)) == 4
    steps = torch.arange(30)
    numbers = [uniform(0, torch.tensor(3), steps ^ spread(torch.tensor(n))) for n in (0, 1, 2, 2**40, -1)]
    assert torch.equal(numbers[0], uniform(0, torch.tensor(3), steps))  # as it always was
    assert len(torch.cat(numbers).unique()) > 5 * 30 - 2  # no sequence goes on in another one


@pytest.mark.parametrize(
    ("lengths", "together"),
    [((3, 9, 5, 2), 4), ((200, 200, 200), 2), ((100, 200, 100), 3), ((3, 600, 3), 2), ((600, 3, 3), 1)],
)
def test_short_prompts_that_are_read_whole_share_a_run(lengths, together):
    engine = Engine(model("llama"), budget=8, rows=4, prefill_chunk=None)
    for i, length in enumerate(lengths):
        engine.add(Request(prompt=prompt_of(i, length), sampling=SamplingParams(max_new_tokens=2)))
    assert len(engine.step()) == together


@pytest.mark.slow
def test_the_engine_feeds_a_long_prompt_whole_unless_told_otherwise(monkeypatch):
    """So that a policy which goes by the end of the prompt sees it before anything is evicted."""
    sizes = {**CONFIGS["llama"].to_diff_dict(), "max_position_embeddings": 1024}
    monkeypatch.setitem(CONFIGS, "long", LlamaConfig(**sizes))
    prompt, policy = prompt_of(1, 700), "snapkv:window=4"
    asked = [Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=6))]
    (whole,) = Engine(model("long"), policy=policy, budget=24, rows=2).generate(asked)
    assert whole.token_ids == alone("long", prompt, 6, policy, 24, None)
    (pieces,) = Engine(model("long"), policy=policy, budget=24, rows=2, prefill_chunk=512).generate(asked)
    assert pieces.token_ids == alone("long", prompt, 6, policy, 24, 512) != whole.token_ids
