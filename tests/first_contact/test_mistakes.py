"""Mistakes of first users: exit code 2, one line that says what is wrong and what to do, no traceback, no output."""

from __future__ import annotations

import os
import shlex

import memories
import model_folders
import pytest
from typer.testing import CliRunner

from kvkeep.cli.main import app

WIDTH = 80
MOST_LINES = 4
"""Lines of the longest message on a terminal of 80 columns."""

MISTAKES = {
    # the command
    "nonsense": "kvkeep --help lists all commands",
    "generat -p Once": "Did you mean kvkeep generate?",
    "Generate -p Once": "Did you mean kvkeep generate?",
    "gen -p Once": "Did you mean kvkeep generate?",
    "policy": "Did you mean kvkeep policies?",
    "polices show h2o": "Did you mean kvkeep policies?",
    "help generate": "Did you mean kvkeep --help?",
    "run -p Once": "Did you mean kvkeep generate?",
    "talk": "Did you mean kvkeep chat?",
    "chatt": "Did you mean kvkeep chat?",
    "rember": "Did you mean kvkeep remember?",
    "version": "Did you mean kvkeep --version?",
    "'Why is the sky blue?'": "kvkeep generate -p 'Why is the sky blue?'",
    "Why is the sky blue": "kvkeep generate -p 'Why is the sky blue'",
    "Qwen/Qwen3-0.6B": "kvkeep generate Qwen/Qwen3-0.6B -p TEXT",
    "{model} -p Once": "kvkeep generate {model} -p TEXT",
    "report.txt": "kvkeep generate --prompt-file report.txt",
    "-p Once": "Options follow the command: kvkeep generate -p",
    "--policy h2o generate -p Once": "Options follow the command: kvkeep generate --policy",
    "--json policies": "Options follow the command",
    "policies h2o": "kvkeep policies show h2o",
    "policies shwo": "Did you mean kvkeep policies show?",
    "policies show": "needs NAME",
    "policies show h3o": "Did you mean 'h2o'?",
    "env x y": "takes 1 word and options",
    "demo gpt2": "takes nothing but options",
    "--": "Missing command",
    "''": "kvkeep --help lists all commands",
    "policies --json show h2o": "Options follow the command: kvkeep policies show",
    "policies show h2o tova": "takes 1 word and options",
    "plan {model} x": "takes 1 word and options",
    # names of options
    "generate --bugdet 16 -p Once": "Did you mean --budget?",
    "generate --max_new_tokens 16 -p Once": "Did you mean --max-new-tokens?",
    "generate --max-tokens 16 -p Once": "Here it is called --max-new-tokens",
    "generate --cache-size 16 -p Once": "Here it is called --budget",
    "generate --bf16 -p Once": "Here it is called --dtype bfloat16",
    "generate --system-prompt x -p Once": "Here it is called --system",
    "generate --model gpt2 -p Once": "The model is the first word: kvkeep generate MODEL",
    "generate -m gpt2 -p Once": "The model is the first word",
    "generate --memory 2GiB -p Once": "--kv-memory 2GiB",
    "generate --nonsense -p Once": "See kvkeep generate --help",
    "generate -x -p Once": "See kvkeep generate --help",
    "plan --temperature 1": "It belongs to kvkeep generate",
    "plan --max-new-tokens 16": "It belongs to kvkeep generate",
    "generate -policy h2o -p Once": "-policy needs two hyphens: --policy",
    "generate -budget=16 -p Once": "-budget needs two hyphens: --budget=16",
    "generate —policy h2o -p Once": "Write options with hyphens: --policy",
    "generate –p Once": "Write options with hyphens",
    "generate --version": "kvkeep --version",
    # values that are missing or too many
    "generate -p": "-p needs a value: -p TEXT",
    "generate -p --budget 16": "-p has no value, since --budget follows it",
    "generate -p Once -n=4": "write -n 4",
    "generate -p=Once": "write -p Once",
    "generate -p Once -n": "-n needs a value: -n TOKENS",
    "generate -p Once --policy": "--policy needs a value: --policy POLICY",
    "generate -p Once --policy --json": "--policy has no value, since --json follows it",
    "generate --json=true -p Once": "--json takes no value: write --json alone",
    "eval": "Give --output DIR",
    "eval -o": "-o needs a value: -o DIR",
    "analyze": "needs --text FILE and --output DIR",
    "analyze --text report.txt": "needs --output DIR",
    "calibrate": "needs --output FILE",
    "calibrate -o": "-o needs a value: -o FILE",
    # the prompt
    "generate": "Give --prompt TEXT, --prompt-file FILE, or - for standard input",
    "generate {model}": "Give --prompt TEXT",
    "generate hello": "If hello is the prompt: -p hello",
    "generate 'Why is the sky blue?'": "kvkeep generate -p 'Why is the sky blue?'",
    "generate {model} 'Why is the sky blue?'": "For a prompt: -p 'Why is the sky blue?'",
    "generate -p Once upon": "needs quotes: -p 'Once upon'",
    "generate -p Once upon a": "needs quotes: -p 'Once upon a'",
    "generate -p Once upon a time": "needs quotes: -p 'Once upon a time'",
    "generate {model} -p Once upon a time": "needs quotes: -p 'Once upon a time'",
    "generate {model} -p Once -b 16 32": "Unexpected argument '32'",
    "generate -p “Once upon a time”": "needs quotes: -p 'Once upon a time'",
    "generate ' '": "leave it out for the embedded model",
    "generate -f ''": "The name of the prompt file is empty",
    "generate -- -p": "Give --prompt TEXT",
    "generate Once upon a time": "needs quotes: -p 'Once upon a time'",
    "generate -p ''": "The prompt is empty",
    "generate -p ' '": "The prompt is empty",
    "generate -p report.txt": "To read the file: --prompt-file report.txt",
    "generate report.txt": "to continue its text: --prompt-file report.txt",
    "generate -f nothing.txt": "nothing.txt cannot be read: No such file",
    "generate -p Once --config folder": "folder is no file. Give the kvkeep.toml",
    "generate -i nothing.jsonl -o out.jsonl": "nothing.jsonl cannot be read: No such file",
    "generate -f folder": "folder cannot be read: Is a directory",
    "generate -f empty.txt": "is empty",
    "generate -f latin.txt": "Convert it, e.g. with iconv",
    "generate -p Once -f report.txt": "one prompt is enough",
    "generate -p -": "Standard input is empty",
    "generate -": "Standard input is empty",
    "generate - -p Once": "one prompt is enough",
    "generate {model} -p Once --system Brief": "has no chat template",
    "generate {model} -p Once --system Brief --raw": "--raw leaves out the chat template",
    "generate {model} -p Once --system ''": "--system is empty",
    "generate {model} -p Once --pin-system": "give --system TEXT",
    "generate {model} -p Once --guard 1.5": "--guard 1.5 is no share of attention; give a number from 0 to 1",
    "generate {model} -p Once --guard 0.1 --policy local": "its statistic shows no attention mass",
    "generate {model} -p 'Once upon a time' --guard 0.1 --prefill-chunk 1": "Leave --guard or --prefill-chunk",
    # the model
    "generate nothing/here/model -p Once": "does not exist",
    "generate ./nothing -p Once": "does not exist",
    "generate folder -p Once": "has no config.json",
    "generate report.txt -p Once": "give the folder that holds config.json",
    "generate no:name -p Once": "neither a local folder nor a hub name",
    "generate '' -p Once": "leave it out for the embedded model",
    "plan 'my model'": "A text of several words is no model",
    # numbers and units
    "generate {model} -p Once --budget 0": "--budget 0",
    "generate {model} -p Once --budget -16": "--budget -16",
    "generate -p Once --budget lots": "write e.g. 1024, 4K",
    "chat --budget 20%": "a conversation has no known length",
    "generate -i prompts.jsonl -o - --budget 20%": "the lines of a batch job differ in length",
    "generate -p Once --budget 2GiB": "write e.g. 1024, 4K",
    "generate -p Once --budget 1.5": "not a whole number",
    "generate {model} -p Once --budget 120%": "is outside 0 … 100%",
    "generate -p Once --budget 0%": "the share of the text's tokens that stay",
    "generate -p Once --keep-ratio 0.2": "Here it is called --budget 20%",
    "generate {model} -p Once -n 0": "--max-new-tokens 0",
    "generate -p Once -n ten": "write e.g. 1024",
    "generate -p Once --temperature hot": "is not a number; write e.g. --temperature 0.5",
    "generate {model} -p Once -t -1": "--temperature -1",
    "generate {model} -p Once --top-p 0.9": "--top-p, --top-k and --min-p have no effect",
    "generate -p Once --top-k 1.5": "is not a whole number; write e.g. --top-k 8",
    "generate -p Once --seed x": "is not a whole number",
    "generate -p Once --threads 0": "--threads 0",
    "generate -p Once --threads two": "is not a whole number",
    "demo --seed -1": "--seed -1 is out of range",
    "plan --memory 24": "write e.g. 24GiB",
    "plan --memory 24gb": "write e.g. 24GiB",
    "plan --memory -24GiB": "is not above 0",
    "plan --bandwidth 100": "write e.g. 100GB/s",
    "plan --budget 200%": "outside 0 … 100%",
    "plan --rows 0": "give 1 or more",
    "plan --bandwidth 100GB/s --measure": "one of them",
    # choices
    "generate {model} -p Once --policy h3o": "Did you mean 'h2o'?",
    "generate {model} -p Once --policy H2O": "Unknown policy 'H2O'. Did you mean 'h2o'?",
    "generate {model} -p Once --policy h2o:recnt=4": "Did you mean 'recent'?",
    "generate {model} -p Once --policy h2o:recent": "write h2o:recent=VALUE",
    "generate {model} -p Once --policy h2o:recent=x": "is not a whole number",
    "generate {model} -p Once --policy h2o:recent=8,sinks=8 --budget 8": "at least 16",
    "generate {model} -p Once --policy full --budget 4 -n 40": "Give --budget",
    "generate {model} -p Once --dtype bf16": "bfloat16",
    "generate {model} -p Once --device gpu": "Available",
    "generate {model} -p Once --load-in int5": "Known: ",
    "generate -p Once --positions slots": "use true or slot",
    "generate -p Once --layer-budget slope": "use uniform, ramp:0.2",
    "eval {model} -o out --tasks recal": "Did you mean",
    "eval {model} -o out --policies h3o": "Did you mean 'h2o'?",
    "eval {model} -o out --text nothing.txt --tasks perplexity": "nothing.txt cannot be read",
    "eval -o out --report out": "--output and --report were both given",
    "eval --report folder": "has no results",
    "analyze --text nothing.txt -o out": "nothing.txt cannot be read",
    "analyze {model} --text word.txt -o out": "Give a longer --text.",
    "explain": "needs --text FILE",
    "explain -f report.txt": "Give --output page.html, or --terminal",
    "explain {model} -f empty.txt -o out": "Give some text to read",
    "theory --only ahakv-gian": "Did you mean ahakv-gain?",
    "theory --only x": "kvkeep theory without --only names all",
    # memories and conversations
    "remember": "needs --text FILE and --output FILE",
    "remember -f report.txt": "needs --output FILE",
    "remember report.txt -o out": "needs --text FILE",
    "remember -f report.txt -o": "-o needs a value: -o FILE",
    "remember {model} -f nothing.txt -o out": "nothing.txt cannot be read: No such file",
    "remember {model} -f empty.txt -o out": "Give the model some text to remember",
    "remember {model} -f latin.txt -o out": "Convert it, e.g. with iconv",
    "remember {model} -f report.txt -o report.txt": "--overwrite to replace it",
    "remember {model} -f report.txt -o folder": "Give the name of a file",
    "remember {model} -f report.txt -o no/out": "Make it first",
    "remember {model} -f report.txt -o -": "give a name such as report.kvkeep",
    "remember {model} -f report.txt -o out --system Brief": "has no chat template, so there is no place for a --system",
    "remember {model} -f report.txt -o out --policy full -b 2": "Give --budget",
    "remember {model} -f report.txt -o out --append": "See kvkeep remember --help",
    "generate {model} --memory report.kvkeep": "Give --prompt TEXT",
    "generate {model} --memory nothing.kvkeep -p Once": "nothing.kvkeep cannot be read: No such file",
    "generate {model} --memory report.txt -p Once": "it is no safetensors file",
    "generate {model} --memory folder -p Once": "it is no regular file",
    "generate {model} --memory '' -p Once": "--memory is empty",
    "generate --memory report.kvkeep -p Once": "Give the MODEL that it was made with",
    "generate {model} --memory report.kvkeep -p Once -b 32": "Leave --budget out",
    "generate {model} --memory report.kvkeep -p Once --policy tova": "Leave --policy out",
    "generate {model} --memory report.kvkeep -p Once --compare": "for prompts without one",
    "generate {model} --memory report.kvkeep -p ''": "The prompt is empty",
    "chat {model} --session a/b": "no path separators",
    "chat {model} -s": "-s needs a value: -s NAME",
    "chat {model} --memory nothing.kvkeep": "nothing.kvkeep cannot be read: No such file",
    "chat {model} --system Brief": "has no chat template, so there is no place for a --system",
    "chat {model} --sessions report.txt": "Give another folder with --sessions",
    "chat {model} --json": "give --list, too",
    "chat {model} -p Once": "It belongs to kvkeep generate",
    "chat 'Why is the sky blue?'": "A text of several words is no model",
    # batch jobs
    "generate -i prompts.jsonl": "needs --output FILE",
    "generate -o answers.jsonl -p Once": "give --input FILE",
    "generate -i prompts.jsonl -o out.jsonl -p Once": "for a single one",
    "generate -i prompts.jsonl -o out.jsonl --system Brief": "for a single one",
    "generate -i prompts.jsonl -o out.jsonl --guard -1": "--guard -1.0 is no share of attention",
    "generate {model} -i nothing.jsonl -o out.jsonl": "nothing.jsonl",
    "generate {model} -i report.txt -o out.jsonl": "Line 1 cannot be run",
    "generate {model} -i budgets.jsonl -o out.jsonl -n 4": "Ask for less, or give the engine a larger --budget.",
    "generate {model} -i prompts.jsonl -o out.jsonl --max-rows 0": "give 1 or more",
    "generate {model} -i prompts.jsonl -o out.jsonl --kv-memory 2": "is not a size with a unit",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with files of the wrong kinds, in which a user types, without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "report.txt").write_text("A report of some words.\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "word.txt").write_text("Once")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once"}\n')
    (tmp_path / "budgets.jsonl").write_text('{"prompt": "Once", "options": {"budget": 4096}}\n')
    (tmp_path / "folder").mkdir()
    monkeypatch.setenv("KVKEEP_SESSIONS", str(tmp_path / "sessions"))
    memories.save(tmp_path / "report.kvkeep")
    return tmp_path


def mistake(words, **options):
    """The message that a command line gets."""
    with model_folders.one_thread():
        result = CliRunner().invoke(app, words, env={"COLUMNS": str(WIDTH)}, **options)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr.strip()


@pytest.mark.parametrize("line", MISTAKES)
def test_the_message_names_the_remedy(line, place):
    folder = str(model_folders.folder())
    said = mistake(shlex.split(line.replace("{model}", folder)))
    assert MISTAKES[line].replace("{model}", folder) in said
    assert len(said) <= MOST_LINES * WIDTH
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    "line", ["generate -p --help", "generate --bugdet 3 --help", "plan a b c --help", "analyze --help"]
)
def test_help_is_shown_whatever_else_is_wrong(line):
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: kvkeep {line.split()[0]} ")


@pytest.mark.parametrize(
    "line", ["generate {model} -p '-5 degrees'", "generate {model} -p '— a list'", "generate {model} -p '-' "]
)
def test_texts_that_look_like_options_are_no_mistakes(line):
    words = shlex.split(line.replace("{model}", str(model_folders.folder())))
    with model_folders.one_thread():
        assert CliRunner().invoke(app, [*words, "-n", "1"], input="a text").exit_code == 0


def test_there_are_enough_of_them():
    assert len(MISTAKES) >= 60


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(place):
    (place / "report.txt").chmod(0)
    assert "report.txt cannot be read: Permission denied" in mistake(["generate", "-f", "report.txt"])


def test_text_that_is_not_utf8():
    surrogate = b"caf\xe9".decode(errors="surrogateescape")  # what the shell's bytes become
    said = mistake(["generate", str(model_folders.folder()), "-p", surrogate])
    assert "is not UTF-8 text" in said


@pytest.mark.parametrize("word", ["\x1b[31mred", "a\x00b", "x" * 10_000, "\u202eevil", "{model}", "[red]", "%s"])
def test_words_that_could_steer_a_terminal_or_fill_it(word, place):
    for words in (
        [word],
        [f"--{word}"],
        ["generate", f"--{word}", "-p", "Once"],
        ["generate", "-p", "Once", "-n", word],
    ):
        said = mistake(words)
        assert "\x1b" not in said
        assert "\u202e" not in said
        assert len(said) < 1000
    assert "a text" in mistake(["plan", f"{word} a"]).lower() or len(word) > 1000
