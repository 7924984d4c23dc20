"""The work of ``kvkeep eval``: check everything, load the model, fill the grid, and show tables and plots.

Bad input is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvkeep import plots
from kvkeep.cli import console
from kvkeep.cli.eval import expected, recipes
from kvkeep.cli.eval.bar import progress
from kvkeep.cli.eval.request import Request
from kvkeep.cli.eval.tables import parts
from kvkeep.cli.files import read_text
from kvkeep.cli.workers import ended_with_its_cluster
from kvkeep.errors import InputError
from kvkeep.evals import confidence, curves, leaderboard, records, tasks
from kvkeep.evals import report as reports
from kvkeep.evals.attention_probe import Setup
from kvkeep.evals.grid import Asked, Wanted, split_arms
from kvkeep.evals.records import Records
from kvkeep.evals.run import Grid, lay_out, manifest, run
from kvkeep.evals.task import Options
from kvkeep.models import threads
from kvkeep.models.device import parse_device, parse_dtype
from kvkeep.models.load import embedded, find, quiet, read_weights
from kvkeep.models.quantized_weights import check_format
from kvkeep.models.tokenization import Writer
from kvkeep.result_files import as_text, command
from kvkeep.scale.cluster import check_ray

EMBEDDED = "embedded"
"""Name of the embedded model in results."""

_PURPOSE = "Give some text to measure on, or leave --text out for the package's own."


@ended_with_its_cluster()
def serve(request: Request) -> None:
    """Measure, write the results and show them.

    Raises:
        KVKeepError: the request, the model or the folder cannot be used.
    """
    if request.workers is not None:
        check_ray(request.ray_address)
    with quiet(), threads.restored():
        if request.dry_run:
            grid = prepare(request)
            for note in grid.notes:
                console.note(note)
            expected.show(grid, request.dtype, request.device, recipes.facts(request.recipe))
            return
        records = Records(request.output)
        grid = prepare(request)
        records.check_free()
        records.check(manifest(grid))
        for note in grid.notes:
            console.note(note)
        todo = sum(planned.cell not in records.done for planned in grid.planned)
        if todo < len(grid.planned):
            console.progress(f"{console.count(len(grid.planned) - todo, 'cell')} of {len(grid.planned)} already done")
        if request.workers is None:
            _run_here(grid, request, records, todo)
            _show(request, records)
        else:
            from kvkeep.cli.eval import far

            _show(request, records, workers=far.run(grid, request, records))


def _run_here(grid: Grid, request: Request, records: Records, todo: int) -> None:
    """Run the cells in this process."""
    writer = Writer(
        grid.checkpoint, read_weights(grid.checkpoint, request.dtype, request.device, load_in=request.load_in)
    )
    threads.use(writer.model, request.threads)
    with progress(todo) as bar:
        run(grid, writer, records, bar.begin)


def report(request: Request) -> None:
    """Show the results of a finished folder.

    Raises:
        InputError: the folder has no results, or they cannot be read.
    """
    records = Records(request.output)
    if not records.rows:
        raise InputError(
            f"{request.output} has no results. Make some with {command('kvkeep eval --output', request.output)}."
        )
    _show(request, records)


def merge(request: Request, folders: Sequence[Path]) -> None:
    """Join folders of results, and show them.

    Raises:
        InputError: they are of different runs, or cannot be read or written.
    """
    records, doubled = records.merge(folders, request.output)
    if doubled:
        console.note(f"{console.count(doubled, 'cell')} had other scores in a later folder; the first one's stay.")
    _show(request, records)


def page(request: Request, folders: Sequence[Path]) -> None:
    """Write the leaderboard of folders of results.

    Raises:
        InputError: they cannot stand in one table, or cannot be read or written.
    """
    paths = leaderboard.write(leaderboard.board(records.read(folders)), request.output)
    if request.json:
        console.write_json({"output": str(request.output), "pages": [str(path) for path in paths]})
    else:
        console.err().print(console.facts({"pages": ", ".join(map(str, paths))}))


def prepare(request: Request) -> Grid:
    """Check a request, cheap tests first, without reading weights.

    Raises:
        KVKeepError: the request or the model cannot be used.
    """
    policies, kv_bits = zip(*split_arms(request.policies), strict=True)
    kinds = tasks.find(request.tasks)
    budgets = [Asked(ratio=b) if isinstance(b, float) else Asked(tokens=b) for b in request.budgets]
    setup = Setup(
        positions=request.positions,
        layer_budget=request.layer_budget,
        head_budget=request.head_budget,
        kv_bits=request.kv_bits,
        prefill_chunk=request.prefill_chunk,
    )
    options = _options(request)
    parse_dtype(request.dtype)
    check_format(request.load_in)
    parse_device(request.device)
    name = request.model or embedded()
    console.progress(f"loading {name} …")
    checkpoint = find(name, allow_pickle=request.allow_pickle, weights=not request.dry_run)
    wanted = Wanted(policies=policies, budgets=budgets, setup=setup, kv_bits=kv_bits)
    grid = lay_out(checkpoint, as_text(request.model or EMBEDDED), kinds, wanted, options)
    return grid if request.shard is None else grid.shard(*request.shard)


def _options(request: Request) -> list[Options]:
    """The options of tasks, once for each seed."""
    options = Options(
        seed=request.seeds[0],
        limit=request.limit,
        text=None if request.text is None else read_text(request.text, kind="text file", purpose=_PURPOSE),
        contexts=request.contexts,
        facts=request.facts,
        documents=request.documents,
        depths=request.depths,
        ask=request.ask,
        turns=request.turns,
        window=request.window,
        stride=request.stride,
        data=request.data,
        shots=request.shots,
        parts=request.parts,
    )
    return [options, *(replace(options, seed=seed) for seed in request.seeds[1:])]


def _show(request: Request, records: Records, **more: Any) -> None:
    """Print the tables, draw the plots, and print the paths of all files.

    Args:
        request: the options of the command.
        records: the folder.
        more: further entries of the JSON object.
    """
    pictures = _draw(request, records)
    if request.json:
        paths = [str(path) for path in pictures]
        sure = confidence.as_json(records.rows)
        console.write_json({"output": str(request.output), "plots": paths, "rows": records.rows, **sure, **more})
        return
    screen = console.out()
    if request.recipe is not None:
        recipes.show_table(request.recipe, records.rows)
    for found in [
        *reports.tables(records.rows, confidence.of_cell),
        *confidence.share_tables(records.rows),
        *confidence.difference_tables(records.rows),
    ]:
        screen.print(console.visible(found.title), style="bold")
        for part in parts(found, screen.width):
            screen.print(part)
        screen.print()
    for note in confidence.notes(records.rows):
        console.note(note)
    console.err().print(console.facts(_places(request, pictures)))


def _draw(request: Request, records: Records) -> Sequence[Path]:
    if not request.plots:
        return []
    if not plots.available():
        console.note(f"no plots: {plots.MISSING}, then {command('kvkeep eval --report', request.output)}.")
        return []
    try:
        return curves.plots(records.rows, request.output)
    except InputError as error:
        if not isinstance(error.__cause__, OSError):
            raise InputError(f"{error} Leave the plots out with --no-plots.") from error
        console.note(str(error))  # e.g. a folder of somebody else: tables are shown all the same
        return []


def _places(request: Request, pictures: Sequence[Path]) -> dict[str, str]:
    drawn = {"plots": ", ".join(path.name for path in pictures)} if pictures else {}
    return {"results": str(request.output / "results.jsonl"), **drawn}
