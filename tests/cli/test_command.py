"""A dataclass of options becomes a command: what is read, checked, shown and run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import typer
from typer.testing import CliRunner

from kvkeep import parameters
from kvkeep.cli.help import Command
from kvkeep.cli.main import app as kvkeep_app
from kvkeep.cli.options import CommandOptions, Option, argument, command, described, option, parse_tokens
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError

TAKEN: list[object] = []


@dataclass(frozen=True, kw_only=True)
class Inherited(CommandOptions):
    """Options that two commands share."""

    shared: str = option("Shared.", default="all", metavar="WORD")


@dataclass(frozen=True, kw_only=True)
class ShortenOptions(Inherited):
    """Shorten a text.

    The second paragraph.

    Attributes:
        tokens: not for the page of help.
    """

    text: str = argument("The text.", metavar="TEXT")
    tokens: int = option("Tokens that stay.", "-n", default="1K", read=parse_tokens, metavar="TOKENS", name="budget")
    odd: bool = option("Odd.", default=False, rare=True)
    plots: bool = option("Draw.", default=True)
    limit: int | None = option("Limit.", default=None, least=1, metavar="N")
    half: int = 0

    def checked(self) -> ShortenOptions:
        """Return the options with a value that follows from another."""
        if self.odd and not self.plots:
            raise InputError("`odd` needs `plots`.")
        return dataclasses.replace(self, half=self.tokens // 2)


@pytest.fixture
def run(monkeypatch):
    TAKEN.clear()
    monkeypatch.setattr(f"{__name__}.work", TAKEN.append)

    def run(*words, where=f"{__name__}:work", code=0):
        app = typer.Typer(pretty_exceptions_enable=False)
        app.command("shorten", cls=Command)(command(ShortenOptions, where))
        app.command("other")(lambda: None)
        done = CliRunner().invoke(app, ["shorten", *words])
        assert done.exit_code == code, (done.output, done.exception)
        return " ".join(done.output.split())

    return run


def work(options: ShortenOptions) -> None:
    """Stand for the work of the command."""


def test_texts_become_values(run):
    run("a text", "-n", "2K", "--no-plots", "--limit", "3")
    (found,) = TAKEN
    assert found == ShortenOptions(text="a text", tokens=2048, plots=False, limit=3, half=1024)


def test_defaults_are_read_like_words(run):
    run("a text")
    (found,) = TAKEN
    assert (found.tokens, found.half, found.shared) == (1024, 512, "all")
    assert ShortenOptions(text="").tokens == 1024


def test_the_function_can_depend_on_the_options(run):
    run("a text", "--odd", where=lambda asked: f"{__name__}:{'work' if asked.odd else 'nothing'}")
    assert len(TAKEN) == 1


def test_errors_name_flags(run):
    assert "--odd needs --plots." in run("a text", "--odd", "--no-plots", code=2)
    assert "--budget 'x' is not a whole number of tokens" in run("a text", "-n", "x", code=2)
    assert not TAKEN


def test_rare_options_are_shown_on_demand(run):
    plain, everything = run("--help"), run("--help-all")
    assert "--odd" not in plain
    assert "--help-all" in plain
    assert "--odd" in everything
    assert all(name in plain for name in ("TEXT", "-n, --budget TOKENS", "Default: 1K.", "--plots / --no-plots"))
    assert "The second paragraph." in plain
    assert "not for the page" not in everything
    assert plain.index("--limit") < plain.index("--shared")


def test_a_description_is_shared():
    shown = described(parameters.KV_BITS, help="Bits.")
    assert isinstance(shown, Option)
    assert (shown.metavar, shown.group, shown.help) == ("BITS", parameters.MEMORY, "Bits.")
    assert shown.complete is not None
    assert ("8", "") in shown.complete("")


@pytest.mark.parametrize("name", ["generate", "serve", "eval"])
def test_pages_of_large_commands_leave_rare_options_out(name):
    plain, everything = (CliRunner().invoke(kvkeep_app, [name, word]).output for word in ("--help", "--help-all"))
    assert "--layer-budget" not in plain
    assert "--layer-budget" in everything


def test_sampling_has_one_description():
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert fields == {name: parameter.default for name, parameter in parameters.SAMPLING_PARAMETERS.items()}


@pytest.mark.parametrize("parameter", parameters.SAMPLING_PARAMETERS.values(), ids=lambda parameter: parameter.name)
def test_ranges_are_those_of_the_library(parameter):
    if parameter.name in ("logit_bias", "min_new_tokens"):
        pytest.skip("no number of its own")
    hot = {} if parameter.name == "temperature" else {"temperature": 1.0}
    for limit, step in ((parameter.least, -1), (parameter.most, 1)):
        if limit is None:
            continue
        if not parameter.excludes_least or limit != parameter.least:
            SamplingParams(**hot, **{parameter.name: parameter.kind(limit)})
        with pytest.raises(InputError, match=parameter.name):
            SamplingParams(**hot, **{parameter.name: parameter.kind(limit + step)})
