"""The work of ``kvkeep tune``: check everything, load the model, search, and write the settings that were found.

Bad input is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kvkeep import config, plots
from kvkeep.cli import console
from kvkeep.cli.files import read_text
from kvkeep.cli.loading import check_weights, writer_of
from kvkeep.cli.progress import ProgressBar, resumable
from kvkeep.cli.tune import TuneOptions
from kvkeep.errors import InputError
from kvkeep.evals.forward import Setup
from kvkeep.evals.tune import report
from kvkeep.evals.tune.documents import read_questions
from kvkeep.evals.tune.measure import Case
from kvkeep.evals.tune.plan import TuneArguments, TunePlan, lay_out
from kvkeep.evals.tune.search import CURVE, OnBlock, Progress, TuneRecords, TuneResult, sizes_of, tune
from kvkeep.models import threads
from kvkeep.models.device import enough_memory, parse_device, parse_dtype
from kvkeep.models.load import find, quiet
from kvkeep.models.tiny import embedded
from kvkeep.models.weight_hash import fingerprint
from kvkeep.policies.registry import label
from kvkeep.result_files import as_text, command, finite
from kvkeep.version import __version__

_PURPOSE = "Give some text to plant facts in, or leave --text out for the package's own."
_EMBEDDED = "embedded"


def serve(request: TuneOptions) -> None:
    """Search for the smallest memory that reaches the target, write the settings found, and show them.

    The settings are confirmed on texts that had no part in the choice, if there are enough. The folder is locked while
    the search runs.

    Raises:
        KVKeepError: the request, the model or the folder cannot be used, or nothing reaches the target.
    """
    with quiet(), threads.restored(), enough_memory(parse_device(request.device)):
        records = TuneRecords(request.output)
        check_weights(request)
        wanted = arguments_of(request)
        name = request.model or embedded()
        console.progress(f"loading {name} …")
        checkpoint = find(name, allow_pickle=request.allow_pickle)
        dtype = parse_dtype(request.dtype)
        known = as_text(request.model or _EMBEDDED)
        plan = lay_out(checkpoint, known, wanted, dtype if isinstance(dtype, torch.dtype) else None)
        sizes = sizes_of(plan.measure, request.target, wanted.sizes)
        records.check_free()
        records.check(plan.settings)
        for note in plan.notes:
            console.note(note)
        if not sizes.fresh and not request.quick:
            console.note("there are too few texts to keep some for the confirmation: the same ones choose and confirm.")
        writer = writer_of(checkpoint, request)
        with records.locked():
            records.open({**plan.settings, "weights": fingerprint(writer.model), "dtype": writer.dtype})
            with _progress() as on_block:
                result = tune(
                    plan.measure,
                    plan.ladders,
                    writer,
                    records,
                    target=request.target,
                    limits=wanted.sizes,
                    on_block=on_block,
                )
            _show(request, plan, result, records)


def arguments_of(request: TuneOptions) -> TuneArguments:
    """Return the search that a request asks for, with its files read, after all checks that need no model.

    Raises:
        InputError: the limit leaves nothing to measure, or a file cannot be used.
    """
    text = None if request.text is None else read_text(request.text, kind="text file", purpose=_PURPOSE)
    questions = []
    if request.questions is not None:
        purpose = "Give one JSON object per line."
        content = read_text(request.questions, kind="file of questions", purpose=purpose)
        questions = read_questions(content, request.questions, text)
    setup = Setup(positions=request.positions, layer_budget=request.layer_budget, prefill_chunk=request.prefill_chunk)
    return TuneArguments(
        case=request.case,
        text=text,
        questions=questions,
        context=request.context,
        facts=request.facts,
        seed=request.seed,
        limit=request.limit,
        policies=request.policies,
        budgets=request.budgets,
        setup=setup,
        head_budgets=request.head_budgets,
        quick=request.quick,
    )


@contextmanager
def _progress() -> Iterator[OnBlock]:
    """Yield a function that shows what is measured and how many documents have been read, on a bar of this context.

    After Ctrl-C print a note on how to resume.
    """
    # the rest of the line at its widest; the text is cut to what is left, or to 20 characters on a narrow terminal
    others = len("⠋ , 1000 of about 1000 documents read  100%  0:00:00 ")
    room = max(20, console.err().width - others) if console.err().is_terminal else None
    before: int | None = None
    with resumable(), ProgressBar("spinner", "text", "percent", "bare left", text="starting", total=None) as bar:

        def on_block(progress: Progress) -> None:
            nonlocal before
            # what an earlier run has read would make this one look fast
            before = progress.units if before is None else before
            at = "the full cache" if progress.budget is None else f"{progress.arm} at {progress.budget}"
            total = max(progress.expected, progress.units + 1)  # an estimate that is too low must not end the bar
            bar.show(
                progress.units - before,
                text=f"{console.visible(at)[:room]}, {progress.units} of about {total} documents read",
                total=total - before,
                at_once=True,
            )

        yield on_block


def _show(request: TuneOptions, plan: TunePlan, result: TuneResult, records: TuneRecords) -> None:
    """Draw the curve, write the settings if a budget was chosen, and print the table and the answer, or JSON.

    Raises:
        InputError: no budget reaches the target, and the documents would have sufficed to show it.
    """
    drawn = _draw(request, plan, result)
    if (note := report.weakness(result)) is not None:
        console.note(note)
    if request.quick and result.promises and not result.sizes.fresh:
        console.note("the same texts choose and confirm, which flatters the choice: search without --quick, too.")
    chosen = result.found.chosen
    if chosen is not None:
        _write(request, plan, result, records)
    if request.json:
        told = {"output": str(request.output), "config": None if chosen is None else str(request.output / config.NAME)}
        console.write_json(finite({**told, "case": plan.case, **report.everything(result, plan.full_bytes)}))
    else:
        _print(plan, result)
    if chosen is None and result.promises:
        raise InputError(report.failure(result))
    if chosen is None:
        console.note(report.failure(result))
    elif not request.json:
        console.out().print(console.with_flags(report.answer(result, plan.full_bytes)), soft_wrap=False)
        file = request.output / config.NAME
        shown = {"settings": str(file), **({"curve": str(drawn)} if drawn else {})}
        console.err().print(console.facts({**shown, "use": _use(request, plan.case, result, file)}))


_READ = ("dtype", "load_in", "allow_pickle")
"""Options of a model's weights without which another command would read others, or none."""


def _use(request: TuneOptions, case: Case, result: TuneResult, file: Path) -> str:
    """Return the line of a command that takes the settings: `kvkeep generate` with their file, or after a search for
    later questions `kvkeep remember` with each as an option.
    """
    settings = report.config(result.found, request.model).settings()
    # no option takes weights of layers, as a calibration gives them
    if case != "later" or isinstance(settings.get("layer_budget"), tuple):
        return command("kvkeep generate --config", file, "-f") + " FILE"
    settings["policy"] = label(settings["policy"])
    model = settings.pop("model", None)
    # how the weights that were measured were read, where it was said
    settings |= {name: value for name in _READ if (value := getattr(request, name)) not in (None, False, "auto")}
    flags = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    options = [word for flag, value in flags.items() for word in ((flag,) if value is True else (flag, value))]
    return command("kvkeep remember", *([] if model is None else [model]), *options, "-f") + " FILE -o FILE.kvkeep"


def _print(plan: TunePlan, result: TuneResult) -> None:
    """Print the table of the policies and budgets that were measured."""
    screen = console.out()
    screen.print(report.title(result, plan.case, plan.measure.kind), style="bold")
    filled = console.table(*report.COLUMNS)
    for column in filled.columns[1:-1]:  # numbers; the first is a name, the last a verdict
        column.justify, column.no_wrap = "right", True
    for row in report.lines(result, plan.full_bytes):
        filled.add_row(*map(console.visible, row))
    screen.print(filled)
    screen.print()


def _write(request: TuneOptions, plan: TunePlan, result: TuneResult, records: TuneRecords) -> None:
    """Write the chosen settings as ``kvkeep.toml`` in the folder of the search, with the figures in their own table."""
    heading = f"Written by kvkeep {__version__} tune.\n{report.answer(result, plan.full_bytes)}"
    found = report.config(result.found, request.model)
    text = found.text(heading, report.notes(result, plan.case, plan.full_bytes))
    records.write_bytes(config.NAME, text.encode())


def _draw(request: TuneOptions, plan: TunePlan, result: TuneResult) -> Path | None:
    """Draw the curve and return its file; ``None`` if it is not wanted, or cannot be drawn, which a note says."""
    if not request.plots:
        return None
    if not plots.available():
        console.note(f"no curve: {plots.MISSING}, then run the same command again.")
        return None
    try:
        return plots.draw(request.output / CURVE, [report.curve(result, plan.full_bytes, plan.case)])
    except InputError as error:
        console.note(str(error))
        return None
