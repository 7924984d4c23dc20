"""The command as a whole: version, help, exit codes, closed pipes, Ctrl-C, and a light start."""

from __future__ import annotations

import errno
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import model_folders
import pytest
import torch
import typer
from typer.testing import CliRunner

import kvkeep
from kvkeep.backends.native import native
from kvkeep.cli import console, env, main, options
from kvkeep.errors import InputError, KVKeepError

KVKEEP = [sys.executable, "-c", "from kvkeep.cli.main import run; run()"]


def invoke(*arguments: str):
    return CliRunner().invoke(main.app, list(arguments))


def test_version():
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"kvkeep {kvkeep.__version__}\n")


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_names_all_commands(option: str):
    result = invoke(option)
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("generate", "policies", "env"))


def test_help_of_generate_has_its_groups_and_options(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke("generate", "--help").stdout
    for group in ("Prompt", "KV memory", "Sampling", "Model", "Output"):
        assert f"\n{group}\n" in text
    for option in ("--prompt-file", "--budget", "--prefill-chunk", "--max-new-tokens", "--compare", "--help-all"):
        assert option in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", ["generate", "chat", "serve", "eval"])
def test_the_page_of_a_command_is_short_and_all_of_it_is_a_word_away(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = (invoke(name, word).stdout for word in ("--help", "--help-all"))
    assert len(short.splitlines()) <= 68  # one and a half screens of 45 lines
    assert "--threads" not in short
    assert "--threads" in whole


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["generate", "--bugdet", "3"], ["generate", "--temperature", "x"], ["env", "x", "y"]]
)
def test_usage_errors(arguments: list[str]):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_run_ends_with_130_after_an_interrupt(monkeypatch: pytest.MonkeyPatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "app", interrupt)
    with pytest.raises(SystemExit) as stop:
        main.run()
    assert stop.value.code == 130


def test_python_m_kvkeep_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["kvkeep", "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("kvkeep", run_name="__main__")
    assert not stop.value.code
    assert capsys.readouterr().out == f"kvkeep {kvkeep.__version__}\n"


def end_of_run(monkeypatch: pytest.MonkeyPatch, stdout: int | None, command: Callable[[], None]) -> SystemExit:
    """How ``kvkeep`` ends with this file as its standard output and a command of our own."""
    monkeypatch.setattr(main, "app", command)
    with open(os.devnull if stdout is None else stdout, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as stop:
            main.run()
    return stop.value


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_standard_output_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    full = os.open("/dev/full", os.O_WRONLY)
    assert end_of_run(monkeypatch, full, lambda: print("text")).code == 1
    assert capsys.readouterr().err == "error: Standard output cannot be written: No space left on device.\n"


@pytest.mark.skipif(os.name == "nt", reason="pipes of another kind")
def test_a_standard_output_that_nobody_reads_ends_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    reader, writer = os.pipe()
    os.close(reader)
    assert end_of_run(monkeypatch, writer, lambda: print("text")).code == 1
    assert capsys.readouterr().err == ""


def test_what_the_system_refuses_is_no_fault_of_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refused() -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    assert end_of_run(monkeypatch, None, refused).code == 1
    assert capsys.readouterr().err == "error: The system refused what this command needs: Cannot allocate memory.\n"


def test_an_error_of_a_file_that_no_command_expects_is_not_hidden(monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "weights")

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(FileNotFoundError, match="weights"):
        main.run()


def test_a_closed_standard_stream_gets_a_file_that_fails_as_it_does(monkeypatch: pytest.MonkeyPatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    main._open_closed_streams()
    stdin, stdout, stderr = sys.stdin, sys.stdout, sys.stderr
    with stderr:
        stderr.write("nobody reads this\n")
    with stdin, pytest.raises(OSError, match="Bad file descriptor"):
        stdin.read()
    with pytest.raises(OSError, match="Bad file descriptor"), stdout:
        print("text", file=stdout, flush=True)


def test_interrupt_in_a_command_ends_with_130_and_no_traceback(monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(console, "write_json", interrupt)
    result = invoke("env", "--json")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_real_command_one_line_and_exit_code(tmp_path: Path):
    command = [*KVKEEP, "generate", "--prompt-file", str(tmp_path / "nothing")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"error: The prompt file {tmp_path / 'nothing'} cannot be read: No such file or directory.\n"


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="pipes of another kind")
def test_closed_pipe_gives_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*KVKEEP, "policies", "--json"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == ""


def test_pipe_that_closes_while_text_is_written(monkeypatch: pytest.MonkeyPatch):
    def closed(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(console, "write_json", closed)
    result = invoke("env", "--json")
    assert result.exit_code == 1
    assert result.stderr == ""


def test_command_line_itself_starts_without_torch():
    """Modules of the command line, with a stand-in for the package's ``__init__``, which may import what it likes."""
    script = f"""
import sys, types
package = types.ModuleType("kvkeep")
package.__path__ = [{str(Path(kvkeep.__file__).parent)!r}]
sys.modules["kvkeep"] = package
import kvkeep.cli.main
assert not {{"torch", "transformers", "numpy"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.long
def test_a_policy_of_this_package_is_shown_without_torch():
    program = """
import sys
from typer.testing import CliRunner
from kvkeep.cli.main import app
assert "NACL" in CliRunner().invoke(app, ["policies", "show", "nacl"]).output
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.long
def test_help_of_every_command_needs_no_torch():
    script = """
import sys
from typer.testing import CliRunner
from typer.main import get_command
from kvkeep.cli.main import app
names = list(get_command(app).commands)
for words in ([], *([name] for name in names), ["policies", "list"], ["policies", "show"]):
    assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0, words
assert len(names) >= 17
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(("fused", "words"), [("1", "all 2 layers as one call"), ("0", "KVKEEP_FUSED=0 was given")])
def test_env_says_how_a_model_would_run(monkeypatch, fused, words):
    monkeypatch.setenv("KVKEEP_FUSED", fused)
    facts = json.loads(invoke("env", str(model_folders.folder()), "--json").stdout)
    assert words in facts["decode_steps"] or native().library is None
    assert facts["model"] == str(model_folders.folder())
    assert "does not exist" in invoke("env", "./nothing-there").stderr


def test_env_says_that_it_loads(monkeypatch):
    monkeypatch.setattr(env.console, "BEATS_S", (0.001, 0.05))
    assert f"loading {model_folders.folder()} …" in invoke("env", str(model_folders.folder())).stderr


def test_facts_of_packages_and_graphics_cards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(env, "_PACKAGES", ("torch", "nowhere-to-be-found"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=24 * 10**9))
    facts = json.loads(invoke("env", "--json").stdout)
    assert facts["torch"] == torch.__version__
    assert facts["nowhere-to-be-found"] is None
    assert facts["devices"][1:] == [{"name": "cuda:0", "model": "Card 0", "memory_bytes": 24 * 10**9}]
    shown = [line.split() for line in invoke("env").stdout.splitlines()]
    assert ["nowhere-to-be-found", "–"] in shown
    assert ["cuda:0:", "Card", "0,", "24.0", "GB"] in shown


def test_versions_are_shown_before_torch_is_imported(monkeypatch):
    def broken():
        raise OSError("libtorch_cpu.so: cannot open shared object file")

    monkeypatch.setattr(env, "_missing_kernel", broken)
    result = invoke("env")
    assert result.exit_code != 0
    shown = [line.split() for line in result.stdout.splitlines()]
    assert ["kvkeep", kvkeep.__version__] in shown
    assert not any(line[:1] == ["devices"] for line in shown)


# arguments of Python as flags


@console.one_line_errors
def fail(
    message: str,
    max_rows: Annotated[int | None, typer.Option()] = None,
    budgets: Annotated[str, typer.Option("--budgets", "-b")] = "1",
    kv_memory: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    raw: Annotated[bool, typer.Option("--raw")] = False,
    model: Annotated[str | None, typer.Argument(metavar="MODEL")] = None,
) -> None:
    raise KVKeepError(message)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Give `budgets`.", "Give --budgets."),
        ("Give `budgets=3,4`, or fewer.", "Give --budgets 3,4, or fewer."),
        ("budgets=0 keeps nothing", "--budgets 0 keeps nothing"),
        ("Line 3: budgets=0 keeps nothing", "Line 3: budgets=0 keeps nothing"),
        ("local:budgets=3 is odd", "local:budgets=3 is odd"),
        ("budget=0 keeps nothing", "--budgets 0 keeps nothing"),
        ("Use fewer `rows`.", "Use fewer --max-rows."),
        ("Use `raw=True`.", "Use --raw."),
        ("Use `raw=False`.", "Use --no-raw."),
        ("Give a `model`.", "Give a MODEL."),
        ("Give `kv_memory=24000000`.", "Give --kv-memory 24MB."),
        ("Give `kv_memory=24000001`.", "Give --kv-memory 24000001B."),
        ("Lower `prefill_chunk`.", "Lower prefill chunk."),
        ("prefill_chunk=0 takes no token", "prefill_chunk=0 takes no token"),
        ("Log in with `hf auth login`.", "Log in with `hf auth login`."),
    ],
)
def test_a_message_names_the_flags_of_its_command(capsys: pytest.CaptureFixture[str], message: str, line: str):
    with pytest.raises(typer.Exit):
        fail(message)
    assert capsys.readouterr().err == f"error: {line}\n"


def test_a_message_outside_of_a_command_stays_readable(capsys: pytest.CaptureFixture[str]):
    console.error("budgets=0 is not a `prefill_chunk`")
    assert capsys.readouterr().err == "error: budgets=0 is not a prefill chunk\n"


# numbers


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1024", 1024), ("4K", 4096), ("4k", 4000), ("1.5k", 1500), ("1M", 2**20), ("2m", 2_000_000), ("-3", -3)],
)
def test_tokens(text: str, tokens: int):
    assert options.parse_tokens(text, "--budget") == tokens


@pytest.mark.parametrize("text", ["", "k", "K", "1.5", "nan", "inf", "infk", "1e400", "4kk", "0x10", "4 K x"])
def test_tokens_that_are_none(text: str):
    with pytest.raises(InputError, match="whole number"):
        options.parse_tokens(text, "--budget")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (12_345, "12.3 kB"), (999_500, "1.00 MB"), (5 * 10**12, "5.00 TB")],
)
def test_bytes(number: int, text: str):
    assert console.show_bytes(number) == text


@pytest.mark.parametrize(
    ("factor", "text"), [(4.0, "4.0×"), (0.951, "1.0×"), (0.95, "0.95×"), (0.04, "0.04×"), (123.45, "123.5×")]
)
def test_factor(factor: float, text: str):
    assert console.show_factor(factor) == text


@pytest.mark.parametrize("size", ["0", "1", "8", "-80", "80x24", "99999", ""])
def test_a_terminal_of_an_impossible_width_has_the_default_width(monkeypatch, size):
    monkeypatch.setenv("COLUMNS", size)
    main._forget_odd_widths()
    assert "COLUMNS" not in os.environ


@pytest.mark.parametrize("size", ["20", "80", "1000"])
def test_the_width_of_a_terminal_is_believed(monkeypatch, size):
    monkeypatch.setenv("COLUMNS", size)
    monkeypatch.setenv("LINES", "5")
    main._forget_odd_widths()
    assert os.environ["COLUMNS"] == size
    assert os.environ["LINES"] == "5"
