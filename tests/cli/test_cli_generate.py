"""``kvkeep generate``: what it prints, and every bad input as one line and exit code 2."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import model_folders
import pytest
import torch
from typer.testing import CliRunner

import kvkeep
from kvkeep.cache.layer_layout import DEFAULT_BUDGET
from kvkeep.cli import console, generate_run
from kvkeep.cli.main import app
from kvkeep.engine import Engine
from kvkeep.engine.detokenizer import TextPieces
from kvkeep.engine.model_runner import ModelRunner
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.models import tiny
from kvkeep.models.load import find, load, quiet
from kvkeep.models.tokenization import encode
from kvkeep.policies import DEFAULT

PROMPT = "the quick brown fox jumps over the lazy dog and the cat"


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def invoke(*arguments: object, model: Path | None = None, stdin: bytes | None = None):
    where = [] if model is None else [str(model)]
    return CliRunner().invoke(app, ["generate", *where, *map(str, arguments)], input=stdin)


def generate(*arguments: object, model: Path | None = None, stdin: bytes | None = None):
    result = invoke(*arguments, model=model or model_folders.folder(), stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def as_json(*arguments: object, model: Path | None = None, stdin: bytes | None = None):
    return json.loads(generate(*arguments, "--json", model=model, stdin=stdin).stdout)


def refused(*arguments: object, model: Path | None = None, stdin: bytes | None = None) -> str:
    """The one line that a bad input gets."""
    result = invoke(*arguments, model=model, stdin=stdin)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def expected_ids(budget: int, new_tokens: int, policy: str = DEFAULT, prompt: str = PROMPT) -> list[int]:
    """The tokens that `generate` of transformers gives."""
    with quiet():
        model, tokenizer = load(model_folders.folder())
        cache = kvkeep.BoundedCache(model.config, policy, budget=budget)
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(
            **inputs, past_key_values=cache, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
        )
    return output[0, inputs["input_ids"].shape[1] :].tolist()


# what comes out


def test_text_on_stdout_and_a_summary_on_stderr():
    result = generate("--prompt", PROMPT, "--budget", 8, "-n", 6)
    ids = expected_ids(8, 6)
    assert result.stdout.removesuffix("\n") == model_folders.tokenizer().decode(ids, skip_special_tokens=True)
    tokens = len(model_folders.tokenizer()(PROMPT)["input_ids"])
    summary = " ".join(result.stderr.split())
    for words in (
        f"{tokens} tokens in",
        "6 tokens, ",
        "tokens/s",
        f"{DEFAULT}, budget 8",
        "float32 on cpu",
        "compression",
    ):
        assert words in summary


def test_json_is_the_only_thing_on_stdout_and_adds_up():
    result = as_json("-p", PROMPT, "-b", 8, "-n", 6, "--policy", "h2o:recent=2")
    assert result["policy"] == "h2o:recent=2"
    assert result["token_ids"] == expected_ids(8, 6, "h2o:recent=2")
    assert result["new_tokens"] == 6
    assert result["finish_reason"] == "length"
    assert result["ttft_s"] > 0
    assert result["tpot_s"] > 0
    memory = result["memory"]
    seen = result["prompt_tokens"] + 5  # the last token is never run through the model
    assert memory["full_bytes"] == seen * 2 * 2 * 2 * 8 * 4  # layers × heads × (K, V) × head dim × float32
    assert memory["compression"] == pytest.approx(memory["full_bytes"] / memory["allocated_bytes"])


def test_same_command_same_tokens_and_greedy_by_default():
    assert as_json("-p", PROMPT, "-n", 4)["token_ids"] == as_json("-p", PROMPT, "-n", 4, "--seed", 5)["token_ids"]


def test_drawing_follows_the_seed():
    drawn = [
        as_json("-p", PROMPT, "-n", 4, "-t", 1.5, "--top-p", 0.95, "--top-k", 50, "--seed", seed)["token_ids"]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_full_policy_gets_a_budget_for_prompt_and_new_tokens():
    result = as_json("-p", PROMPT, "-n", 5, "--policy", "full")
    assert result["budget"] == result["prompt_tokens"] + 5


def test_default_budget():
    result = generate("-p", PROMPT, "-n", 5)
    assert "budget 17;" in result.stderr  # the prompt's 12 tokens and 5 new ones: no more slots than tokens
    assert "nothing was evicted" in result.stderr
    assert f"{DEFAULT_BUDGET}" in invoke("--help").stdout
    assert as_json("-p", "the", "-n", 1, "--policy", "streaming_llm:sinks=9")["budget"] == 9


def test_a_budget_may_be_a_share_of_the_prompt():
    result = as_json("-p", PROMPT, "-n", 5, "--budget", "50%")
    assert result["budget"] == result["prompt_tokens"] // 2


def test_units_of_tokens():
    result = as_json("-p", PROMPT, "-n", "2", "-b", "1K", "--prefill-chunk", "1k")
    assert (result["budget"], result["prefill_chunk"]) == (1024, 1000)


def test_prefill_chunk_reaches_the_cache_and_the_model(monkeypatch: pytest.MonkeyPatch):
    widths = []
    monkeypatch.setenv("KVKEEP_FUSED", "0")  # else there is a trial of a few tokens, too
    forward = torch.nn.Embedding.forward

    def watch(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        if not ids.is_meta:  # the trial before weights are read
            widths.append(ids.shape[1])
        return forward(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", watch)
    whole = as_json("-p", PROMPT, "-n", 4)
    assert widths.pop(0) == 1  # shows the engine what a row is
    assert widths[0] == whole["prompt_tokens"]
    assert set(widths[1:]) == {1}
    widths.clear()
    chunked = as_json("-p", PROMPT, "-n", 4, "--prefill-chunk", 3)
    assert max(widths) == 3
    assert chunked["token_ids"] == whole["token_ids"]


ANALYSED = {"name": "persistence", "result": {"read": 8, "by_prefix": {"8": {"ratio": [0.0, None]}, "4": {}}}}


@pytest.mark.parametrize("content", ["[0.0, 1.0]", '{"persistence": [0.0, 1.0]}', json.dumps(ANALYSED)])
def test_a_budget_by_layer_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str):
    file = tmp_path / "persistence.json"
    file.write_text(content)
    engines = []
    stream = Engine.stream
    monkeypatch.setattr(Engine, "stream", lambda self, *a: engines.append(self) or stream(self, *a))
    generate("-p", PROMPT, "-b", 12, "-n", 2, "--layer-budget", f"calibrated:{file}")
    assert [block.budget for block in engines[0]._kv._blocks] == [21, 3]


def test_dtype():
    result = as_json("-p", PROMPT, "-n", 2, "--dtype", "bfloat16", "--device", "cpu")
    assert (result["dtype"], result["device"]) == ("bfloat16", "cpu")


def test_model_that_ends_its_text(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m")
    third = expected_ids(1024, 3)[2]
    model_folders.edit_json(folder / "generation_config.json", eos_token_id=third)
    result = as_json("-p", PROMPT, "-n", 50, model=folder)
    assert result["finish_reason"] == "stop"
    assert result["new_tokens"] <= 3
    assert "the model ended its text" in generate("-p", PROMPT, "-n", 50, model=folder).stderr


def test_longer_than_the_model_was_trained_for():
    result = generate("-p", PROMPT, "-n", model_folders.TRAINED_LENGTH, "-b", 8)
    assert f"the {model_folders.TRAINED_LENGTH} that the model was trained for" in " ".join(result.stderr.split())


def test_prompt_from_a_file_and_from_stdin(tmp_path: Path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbf" + PROMPT.encode() + b"\r\n")
    given = as_json("-p", PROMPT, "-n", 4)["token_ids"]
    assert as_json("-f", file, "-n", 4)["token_ids"] == given
    assert as_json("--prompt-file", "-", "-n", 4, stdin=PROMPT.encode() + b"\n")["token_ids"] == given


def test_embedded_model_is_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiny, "path", model_folders.folder)
    result = invoke("-p", PROMPT, "-n", 2, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["model"] == str(model_folders.folder())


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    folder = model_folders.copy(tmp_path / "chat")
    model_folders.edit_json(folder / "tokenizer_config.json", chat_template=model_folders.TEMPLATE)
    return folder


def test_chat_template_is_applied_unless_raw(chat_model: Path):
    checkpoint = find(chat_model)
    filled = checkpoint.tokenizer.decode(encode(checkpoint, "hello")[0])
    assert filled == "<s>user: hello</s><s>assistant:"
    assert checkpoint.tokenizer.decode(encode(checkpoint, "hello", raw=True)[0]) == "hello"
    plain, raw = (as_json("-p", "hello", "-n", 1, *option, model=chat_model) for option in ([], ["--raw"]))
    assert plain["prompt_tokens"] == encode(checkpoint, "hello").shape[1] > raw["prompt_tokens"]


# comparison


def test_compare_with_a_budget_that_suffices():
    result = generate("-p", PROMPT, "-n", 4, "--compare")
    assert "none; all 4 tokens are equal" in result.stdout
    assert "of the attention" not in result.stdout


def test_compare_says_what_was_lost(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    said = generate("-p", PROMPT, "-b", 4, "-n", 6, "--policy", "h2o", "--compare").stdout.splitlines()
    (line,) = [line for line in said if line.startswith("lost")]
    assert re.search(r"% of the attention at the prompt's end, \S+ % in each new token's step", line)


def test_compare_finds_the_first_difference():
    result = as_json("-p", PROMPT, "-b", 4, "-n", 6, "--policy", "h2o", "--compare")
    bounded, full = result["token_ids"], result["full"]["token_ids"]
    assert full == expected_ids(1024, 6)
    first = next(index for index in range(6) if bounded[index] != full[index])
    found = result["comparison"]
    assert found["first_index"] == first
    assert found["bounded_token"] == model_folders.tokenizer().decode([bounded[first]])
    assert found["full_token"] == model_folders.tokenizer().decode([full[first]])
    assert found["equal_tokens"] == sum(a == b for a, b in zip(bounded, full, strict=True))
    assert result["full"]["memory"]["allocated_bytes"] == result["memory"]["full_bytes"]


@pytest.mark.parametrize("options", [("--positions", "slot"), ("--layer-budget", "ramp:0.2"), ("--prefill-chunk", 3)])
def test_compare_with_a_full_cache_that_knows_nothing_of_the_other_options(options: tuple[object, ...]):
    result = as_json("-p", PROMPT, "-b", 6, "-n", 6, "--policy", "tova", "--compare", *options)
    assert result["full"]["token_ids"] == expected_ids(1024, 6)
    assert result["full"]["memory"]["allocated_bytes"] == result["memory"]["full_bytes"]


@pytest.mark.parametrize("width", [50, 80, 120])
def test_compare_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = generate("-p", PROMPT, "-b", 4, "-n", 6, "--policy", "h2o", "--compare").stdout.splitlines()
    assert max(map(len, lines)) == width
    assert sum("full cache" in line and "╭" in line for line in lines) == 1
    assert any("h2o" in line and "full cache" in line and "╭" in line for line in lines) == (width >= 60)
    for name in ("new tokens", "KV memory", "compression", "first difference", "agreement"):
        assert any(line.startswith(name) for line in lines)


def test_compare_of_a_text_that_does_not_fill_its_budget_has_no_compression():
    lines = generate("-p", PROMPT, "-b", 512, "-n", 2, "--policy", "h2o", "--compare").stdout.splitlines()
    (line,) = (line for line in lines if line.startswith("compression"))
    assert line.split() == ["compression", "none", "1.0×"]


def letter(token: int) -> str:
    return chr(ord("a") + token)


@pytest.mark.parametrize(
    ("bounded", "full", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], (None, None, None, 3, 3)),
        ([1, 2, 3], [1, 5, 3], (1, "c", "f", 3, 2)),
        ([1, 2], [1, 2, 3], (2, None, "d", 2, 2)),
        ([1, 2, 3], [1, 2], (2, "d", None, 2, 2)),
        ([1], [2, 3], (0, "b", "c", 1, 0)),
    ],
)
def test_difference(bounded: list[int], full: list[int], expected: tuple[object, ...]):
    found = generate_run.measure(bounded, full, letter)
    assert expected == (
        found.first_index,
        found.bounded_token,
        found.full_token,
        found.compared_tokens,
        found.equal_tokens,
    )
    assert found.agreement_ratio == found.equal_tokens / found.compared_tokens


# pieces of text


@pytest.mark.parametrize("text", ["plain words here", "naïve café – 漢字 🙂🏽 done", "🙂", "line\nbreak\n", " x"])
def test_pieces_add_up_to_the_text_and_are_whole_characters(text: str):
    tokenizer = model_folders.tokenizer()
    pieces = TextPieces(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True))
    parts = [pieces.add(token) for token in tokenizer(text)["input_ids"]]
    assert "".join(parts) + pieces.end() == text
    assert "\ufffd" not in "".join(parts)
    assert pieces.end() == ""


def test_half_a_character_at_the_end_is_handed_out_last():
    tokenizer = model_folders.tokenizer()
    pieces = TextPieces(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True))
    ids = tokenizer("a🙂")["input_ids"][:-1]
    assert "".join(pieces.add(token) for token in ids) == "a"
    assert pieces.end() == "\ufffd"


def test_a_piece_costs_no_more_at_the_end_of_a_long_text():
    lengths = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return "x" * len(ids)

    pieces = TextPieces(decode)
    assert "".join(pieces.add(1) for _ in range(100)) == "x" * 100
    assert max(lengths) == 2


def test_terminal_gets_no_control_characters():
    assert console.printable("a\x1b[31m\tb\nc\x07\x9b") == "a[31m\tb\nc"


def test_the_line_is_ended_whatever_happens(capsys: pytest.CaptureFixture[str]):
    def interrupted() -> None:
        with console.streamed_text() as write:
            write("half a ")
            write("line")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with console.streamed_text() as write:
        write("a line\n")
    with console.streamed_text():
        pass
    assert capsys.readouterr().out == "half a line\na line\n"


def failing(error: BaseException, after: int):
    """The engine's runner, that fails once the prompt and some tokens have run."""
    plain, left = ModelRunner.run, [after]

    def run(*arguments: object):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return plain(*arguments)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError("a kernel failed"), MemoryError()])
def test_a_step_that_fails_leaves_the_text_and_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
):
    whole = generate("-p", PROMPT, "-n", 9).stdout
    monkeypatch.setattr(ModelRunner, "run", failing(error, after=3))
    result = invoke("-p", PROMPT, "-n", 9, model=model_folders.folder())
    assert result.exit_code == 2
    assert result.stdout.endswith("\n")
    assert 1 < len(result.stdout) < len(whole)
    assert whole.startswith(result.stdout.removesuffix("\n"))
    assert f"error: The text ends after 3 new tokens, since a step failed. {type(error).__name__}" in result.stderr
    assert not caplog.records  # the error is told once
    assert ("a smaller budget or a prefill_chunk" in result.stderr) == isinstance(error, MemoryError)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("options", "written"), [([], True), (["--json"], False), (["--compare"], False)])
@pytest.mark.parametrize("after", [0, 3])
def test_an_interrupt_leaves_the_text_and_one_line(
    monkeypatch: pytest.MonkeyPatch, options: list[str], written: bool, after: int
):
    whole = generate("-p", PROMPT, "-n", 9).stdout
    monkeypatch.setattr(ModelRunner, "run", failing(KeyboardInterrupt(), after))
    result = invoke("-p", PROMPT, "-n", 9, *options, model=model_folders.folder())
    assert result.exit_code == 130
    assert whole.startswith(result.stdout.removesuffix("\n"))
    assert bool(result.stdout) == (written and after > 0)
    assert result.stdout.endswith("\n") == bool(result.stdout)
    assert result.stderr == "note: stopped before the end of the text\n"


# bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "h2p"], ["Unknown policy 'h2p'", "Did you mean 'h2o'"]),
        (["--policy", "h2o:recnt=3"], ["no option 'recnt'", "Did you mean 'recent'"]),
        (["--policy", "h2o:recent=x"], ["not a whole number"]),
        (["--policy", "h2o:graduate=replce"], ["Did you mean 'replace'"]),
        (["--budget", 0], ["--budget 0", "smallest budget is 1"]),
        (["--budget", -5], ["--budget -5"]),
        (["--budget", "many"], ["--budget 'many'", "1024, 4K"]),
        (["--budget", "1.0001k"], ["whole number"]),
        (["--budget", "99999999999999999999"], ["larger than"]),
        (
            ["--budget", 8, "--policy", "h2o:sinks=4,recent=5"],
            ["error: h2o:recent=5,sinks=4 protects 4 first and 5 recent", "at least 9"],
        ),
        (["--budget", 4, "--policy", "full"], ["does not evict generated tokens", "budget is 4"]),
        (["--budget", "0%"], ["--budget 0%", "0 … 100%"]),
        (["--budget", "150%"], ["--budget 150%", "0 … 100%"]),
        (["--budget", "nan%"], ["--budget nan%"]),
        (["--keep-ratio", 0.5], ["no option --keep-ratio", "--budget 20%"]),
        (["--prefill-chunk", 0], ["--prefill-chunk 0 takes no token"]),
        (
            ["--layer-budget", "slope"],
            ["'slope' is no rule", "uniform, ramp:0.2, pyramid:20, taper:0.5, sliding:0.25 or calibrated:FILE"],
        ),
        (["--layer-budget", "ramp:2"], ["'ramp:2' is out of range"]),
        (["--layer-budget", "calibrated:nothing"], ["nothing is no JSON list of persistence ratios"]),
        (["--layer-budget", f"calibrated:{__file__}"], ["is no JSON list of persistence ratios"]),
        (["--positions", "slots"], ["--positions 'slots' is not a mode"]),
        (["--max-new-tokens", 0], ["--max-new-tokens 0"]),
        (["--temperature", -1], ["--temperature -1"]),
        (["--temperature", "nan"], ["--temperature nan"]),
        (["--temperature", 1, "--top-p", 0], ["--top-p 0", "[1e-06, 1]"]),
        (["--temperature", 1, "--top-k", 0], ["--top-k 0"]),
        (["--top-p", 0.5], ["--top-p, --top-k and --min-p have no effect without a --temperature"]),
        (["--seed", -1], ["--seed -1"]),
        (["--dtype", "bf16"], ["Unknown dtype 'bf16'", "bfloat16"]),
        (["--device", "gpu"], ["'gpu'", "Available"]),
        (["--device", "cuda:99"], ["'cuda:99'", "Available"]),
        (["--prompt-file", "x"], ["--prompt and --prompt-file"]),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_bad_options(arguments: list[object], words: list[str]):
    line = refused("-p", PROMPT, *arguments, model=model_folders.folder())
    assert all(word in line for word in words), line


def test_no_prompt():
    assert "--prompt-file FILE" in refused(model=model_folders.folder())


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_empty_prompt(tmp_path: Path, prompt: str):
    (tmp_path / "prompt").write_text(prompt)
    assert "empty" in refused("-p", prompt)
    assert "empty" in refused("-f", tmp_path / "prompt")
    assert "Standard input is empty" in refused("-f", "-", stdin=prompt.encode())


def test_prompt_file_that_is_missing_or_a_directory(tmp_path: Path):
    assert "The prompt file" in refused("-f", tmp_path / "nothing")
    assert "No such file" in refused("-f", tmp_path / "nothing")
    assert "directory" in refused("-f", tmp_path)


def test_prompt_that_is_not_utf8(tmp_path: Path):
    (tmp_path / "prompt").write_bytes("naïve".encode("latin-1"))
    assert "not UTF-8 text: byte 2 is 0xef" in refused("-f", tmp_path / "prompt")
    assert "Standard input is not UTF-8" in refused("-f", "-", stdin=b"\xff\xfe")
    surrogate = b"\xff".decode(errors="surrogateescape")  # what the shell's bytes become in an argument
    assert "not UTF-8" in refused("-p", f"a{surrogate}", model=model_folders.folder())


def test_model_folder_without_config(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m", "config.json")
    assert "no config.json" in refused("-p", PROMPT, model=folder)


def test_weights_that_are_not_safetensors(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m")
    with quiet():
        torch.save(load(folder)[0].state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "--allow-pickle" in refused("-p", PROMPT, model=folder)
    given = as_json("-p", PROMPT, "-n", 3, "--allow-pickle", model=folder)["token_ids"]
    assert given == expected_ids(1024, 3)


def test_unsupported_model():
    assert "attention interface" in refused("-p", PROMPT, model=model_folders.folder("falcon"))


def test_no_such_model(tmp_path: Path):
    assert "does not exist" in refused("-p", PROMPT, model=tmp_path / "nothing")
    assert "neither a local folder nor a hub name" in refused("-p", PROMPT, model=Path("no:name"))
    assert "too long" in refused("-p", PROMPT, model=Path("a" * 5000))


def test_a_dash_reads_standard_input():
    alone = as_json("-p", PROMPT, "-n", 5)
    piped = as_json("-", "-n", 5, stdin=PROMPT.encode())
    assert piped["token_ids"] == alone["token_ids"]
    assert "both given" in refused("-", "-p", PROMPT, model=model_folders.folder())
    assert "both given" in refused("-", "-f", "x", model=model_folders.folder())
    assert "Unexpected argument 'words'" in refused("words", model=model_folders.folder())
    assert "Standard input is empty" in refused(model=Path("-"), stdin=b"")


@pytest.mark.parametrize(("words", "remedy"), [(5, "at most"), (40, "shorten the prompt")])
def test_more_tokens_than_learned_positions(words: int, remedy: str):
    line = refused("-p", "cat " * words, "-n", 30, model=model_folders.folder("gpt2"))
    assert f"learned positions for {model_folders.POSITIONS} tokens" in line
    assert remedy in line


def test_learned_positions_that_suffice():
    model = model_folders.folder("gpt2")
    prompt_tokens = as_json("-p", "cat", "-n", 1, model=model)["prompt_tokens"]
    room = model_folders.POSITIONS - prompt_tokens + 1
    assert as_json("-p", "cat", "-n", room, model=model)["new_tokens"] == room
    assert f"at most {room} new tokens" in refused("-p", "cat", "-n", room + 1, model=model)


def test_tokenizer_of_another_model(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m")
    model_folders.edit_json(folder / "config.json", vocab_size=10)
    assert "do not belong together" in refused("-p", PROMPT, model=folder)


def test_chat_template_that_fails(chat_model: Path):
    model_folders.edit_json(chat_model / "tokenizer_config.json", chat_template="{{ raise_exception('no user') }}")
    assert "--raw" in refused("-p", PROMPT, model=chat_model)


def test_everything_is_refused_before_weights_are_read(tmp_path: Path):
    folder = model_folders.copy(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"")
    assert "at least 9" in refused("-p", PROMPT, "-b", 8, "--policy", "h2o:sinks=4,recent=5", model=folder)
    assert "weights cannot be read" in refused("-p", PROMPT, "-b", 9, "--policy", "h2o:sinks=4,recent=5", model=folder)


def test_json_does_not_change_errors():
    assert "h2p" in refused("-p", PROMPT, "--policy", "h2p", "--json", model=model_folders.folder())


def test_a_traceback_keeps_the_exit_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVKEEP_DEBUG", "1")
    result = invoke("-p", PROMPT, "--policy", "h2p", model=model_folders.folder())
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: Unknown policy")


def test_a_model_folder_can_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(model_folders.folder(), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert generate("-p", PROMPT, "-n", 1, model=Path("model")).exit_code == 0


def test_numbers_of_sampling_are_checked_in_the_api_too():
    with pytest.raises(kvkeep.InputError, match="seed"):
        SamplingParams(seed=2**63)


@pytest.mark.long
@pytest.mark.parametrize("budget", [[], ["-b", "90"]])
def test_what_fits_is_kept_in_layers_with_windows_too(budget):
    """The default policy gives such layers half of a budget, but not where the budget holds the whole text."""
    told = (*budget, "-p", PROMPT, "-n", "40", "--dtype", "float32", "--temperature", "0")
    gemma = model_folders.folder("gemma3")
    result = generate(*told, model=gemma)
    assert "nothing was evicted" in " ".join(result.stderr.split())
    assert result.stdout.split() == generate(*told, "--policy", "full", model=gemma).stdout.split()
    found = as_json(*told, model=gemma)
    assert (found["layer_budget"], found["lost_mass"]["decode"]) == ("uniform", 0)
    assert as_json(*told, "--layer-budget", "sliding:0.5", model=gemma)["lost_mass"]["decode"] > 0
    heads = as_json(*told, "--head-budget", "ada", model=gemma)
    assert (heads["layer_budget"], heads["lost_mass"]["decode"]) == ("uniform", 0)
