"""The work of ``kvkeep eval``: check everything, load the model, fill the grid, and show tables and plots.

Bad input is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from kvkeep import plots
from kvkeep.cli import console
from kvkeep.cli.cluster import (
    PROCESS_BYTES,
    ended_with_its_cluster,
    interruptible,
    model_recipe,
    room_for,
    whole,
    whole_policy,
    whole_rule,
)
from kvkeep.cli.eval import EvalOptions
from kvkeep.cli.files import read_text
from kvkeep.cli.progress import EvalBar, eval_progress
from kvkeep.errors import InputError, KVKeepError, show_bytes
from kvkeep.evals import confidence, curves, leaderboard, tasks
from kvkeep.evals import report as reports
from kvkeep.evals.arms import split_arms
from kvkeep.evals.datasets import HUB
from kvkeep.evals.forward import BATCH_TOKENS, Setup
from kvkeep.evals.grid import GridArguments, Planned, RequestedBudget
from kvkeep.evals.recipes import find as find_recipe
from kvkeep.evals.records import Records
from kvkeep.evals.records import merge as merge_folders
from kvkeep.evals.records import read as read_folders
from kvkeep.evals.results import grouped
from kvkeep.evals.run import CellRunner, Grid, PartSource, cells_to_run, lay_out, manifest, run
from kvkeep.evals.task import Options
from kvkeep.models import threads
from kvkeep.models.device import parse_device, parse_dtype
from kvkeep.models.load import find, quiet, read_weights
from kvkeep.models.quantized_weights import check_format
from kvkeep.models.tiny import embedded
from kvkeep.models.tokenization import Writer
from kvkeep.planning.bandwidth import measure_bandwidth
from kvkeep.planning.families import outline
from kvkeep.planning.outline import Outline
from kvkeep.planning.plan import plan
from kvkeep.result_files import as_text, command
from kvkeep.scale.cluster import check_ray
from kvkeep.scale.driver import ModelRecipe, pool_size, run_pieces, running
from kvkeep.scale.worker import CELLS, ModelFacts
from kvkeep.scale.worker_pool import Item, WorkerPool, WorkResult

# ``kvkeep eval --dry-run``: what a grid costs, before weights are read.

_MOST_SHOWN = 20  # cases of a table


@dataclass(frozen=True)
class Expected:
    """The cost of one cell.

    Attributes:
        planned: the cell.
        tokens: tokens of its longest row, new ones included.
        rows: rows that run at once.
        cache_bytes, full_bytes: bytes of their caches, and of full ones.
        peak_bytes: the most bytes at once, weights included.
        weight_bytes: bytes of the weights.
        decode_bytes: bytes that all its decode steps read if every reply is as long as the longest.
    """

    planned: Planned
    tokens: int
    rows: int
    cache_bytes: int
    full_bytes: int
    peak_bytes: int
    weight_bytes: int
    decode_bytes: float


def expect(grid: Grid, dtype: str) -> list[Expected]:
    """Return the estimated cost of each cell of the grid, in the grid's order.

    Raises:
        KVKeepError: the model cannot be planned.
    """
    model = outline(grid.checkpoint.name)
    return [_of(model, planned, part.task.new_tokens, dtype) for part in grid.parts for planned in part.planned]


def _of(model: Outline, planned: Planned, new: int, dtype: str) -> Expected:
    """Return what a cell of the grid is expected to take: rows at once, bytes, and bytes that decoding reads.

    Args:
        model: what is known of the model without its weights.
        planned: the cell.
        new: the most new tokens of a row.
        dtype: the value of ``--dtype``.
    """
    longest, count = max(planned.lengths), len(planned.lengths)
    rows = min(count, max(1, BATCH_TOKENS // longest))
    made = plan(model, planned.policy, max(planned.budgets), context=longest + new, dtype=dtype, rows=rows)
    return Expected(
        planned,
        longest + new,
        rows,
        rows * made.bounded.row_bytes,
        rows * made.full.row_bytes,
        made.bounded.peak_bytes(rows),
        made.bounded.weight_bytes,
        math.ceil(count / rows) * new * made.bounded.read_bytes(rows),
    )


def show(grid: Grid, dtype: str, device: str, about: Mapping[str, str]) -> None:
    """Print the largest cell of each case, and the memory and time of the whole grid; measure the machine for that.

    Args:
        grid: the cells.
        dtype: the value of ``--dtype``.
        device: that of ``--device``.
        about: further lines, name → text.
    """
    expected = expect(grid, dtype)
    screen = console.out()
    table = console.table("case", "cells", "rows", "tokens", "at once", "caches", "full caches")
    for column in table.columns[1:]:
        column.justify = "right"
    cases = grouped(expected, lambda cost: f"{cost.planned.cell.task} {cost.planned.cell.case}")
    for case in list(cases)[:_MOST_SHOWN]:
        table.add_row(*_line(case, cases[case]))
    screen.print(table)
    if len(cases) > _MOST_SHOWN:
        screen.print(f"and {len(cases) - _MOST_SHOWN} more cases", style="dim")
    screen.print()
    console.progress("measuring the memory of this machine …")
    speed = measure_bandwidth(parse_device(device)).best
    screen.print(
        console.facts(
            {
                **about,
                "cells": str(len(expected)),
                "tokens to read": f"{sum(sum(cost.planned.lengths) for cost in expected):,}",
                "peak memory": f"{show_bytes(max(cost.peak_bytes for cost in expected))}, weights included",
                "decoding": f"{_time(sum(cost.decode_bytes for cost in expected) / speed)} at {speed / 1e9:.3g} GB/s",
            }
        )
    )
    console.note(
        "nothing was run. Decoding is counted as if every reply were as long as the longest. Reading the prompts takes "
        "time on top, which depends on arithmetic, not on memory."
    )


def _line(case: str, own: Sequence[Expected]) -> list[str]:
    """Return a case's line of the table of ``--dry-run``: its name, then figures of its cells.

    Args:
        case: the name.
        own: the costs of its cells. Rows and tokens are shown of the first one, bytes of the largest.
    """
    first = own[0]
    # the full cache has a column of its own
    bounded = [cost for cost in own if cost.planned.policy.evicts] or own
    return [
        console.visible(case),
        *(str(len(own)), str(len(first.planned.lengths)), str(first.tokens), str(first.rows)),
        show_bytes(max(cost.cache_bytes for cost in bounded)),
        show_bytes(max(cost.full_bytes for cost in own)),
    ]


def _time(seconds: float) -> str:
    """Return a time as text with two parts at most: ``3 h 20 min``, ``4 min 10 s``, ``0.4 s``."""
    if seconds < 60:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


# Tables of results in the width of a terminal.

_GAP = 2
"""Spaces between two columns."""


def parts(source: reports.Table, width: int) -> Iterator[Table]:
    """Yield a table of results for a terminal of this width; several if its columns do not fit beside each other.

    Each has the names of the policies, which may be folded, in its first column.
    """
    names = [console.visible(policy) for policy in source.rows]
    longest = min(max(map(len, ("policy", *names))), width // 2)  # figures get half of the line at least
    columns = list(zip(map(console.visible, source.columns), *source.rows.values(), strict=True))
    for some in _fitting(columns, width - longest - _GAP):
        part = console.table("policy", *(column[0] for column in some))
        part.columns[0].overflow, part.columns[0].max_width = "fold", longest
        for column in part.columns[1:]:
            column.justify, column.no_wrap = "right", True
        for row, name in enumerate(names, 1):
            part.add_row(name, *(column[row] for column in some))
        yield part


def _fitting(columns: Sequence[Sequence[str]], room: int) -> Iterator[Sequence[Sequence[str]]]:
    """Yield the columns (a title and its cells each) in groups that fit into ``room`` characters.

    A column that is wider is a group of its own.
    """
    group: list[Sequence[str]] = []
    left = room
    for column in columns:
        size = max(map(len, column)) + _GAP
        if group and size > left:
            yield group
            group, left = [], room
        group.append(column)
        left -= size
    yield group


# The paper of a recipe.


def _recipe_facts(name: str | None) -> dict[str, str]:
    """Return what a recipe repeats, and the paper's model: name → text; an empty mapping without a recipe."""
    if name is None:
        return {}
    recipe = find_recipe(name)
    return {"recipe": f"{name}: {recipe.title}", "the paper's model": recipe.model}


def _show_recipe(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the paper's figures beside ours, and notes on how the measurements differ."""
    recipe, screen = find_recipe(name), console.out()
    compared = recipe.table(rows)
    screen.print(console.visible(compared.title), style="bold")
    for part in parts(compared, screen.width):
        screen.print(part)
    for note in recipe.notes(rows):
        screen.print(f"  {console.visible(note)}", style="dim")
    screen.print()


EMBEDDED = "embedded"
"""Name of the embedded model in results."""

_PURPOSE = "Give some text to measure on, or leave --text out for the package's own."


@ended_with_its_cluster()
def serve(request: EvalOptions) -> None:
    """Measure what has not been measured, write the results, and show them; with ``--dry-run`` only print the costs.

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
            show(grid, request.dtype, request.device, _recipe_facts(request.recipe))
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
            _show(request, records, workers=run_on_ray(grid, request, records, todo))


def _run_here(grid: Grid, request: EvalOptions, records: Records, todo: int) -> None:
    """Load the model, and run the cells without a row in this process."""
    writer = Writer(
        grid.checkpoint, read_weights(grid.checkpoint, request.dtype, request.device, load_in=request.load_in)
    )
    threads.use(writer.model, request.threads)
    with eval_progress(todo) as bar:
        run(grid, writer, records, bar.begin)


def show_report(request: EvalOptions) -> None:
    """Print the results that a folder holds, and draw the plots again.

    Raises:
        InputError: the folder has no results, or the results cannot be read.
    """
    records = Records(request.output)
    if not records.rows:
        raise InputError(
            f"{request.output} has no results. Make some with {command('kvkeep eval --output', request.output)}."
        )
    _show(request, records)


def merge(request: EvalOptions) -> None:
    """Write the results of several folders into one, and show them.

    Raises:
        InputError: the folders are of different runs, or cannot be read or written.
    """
    records, doubled = merge_folders(request.folders, request.output)
    if doubled:
        console.note(f"{console.count(doubled, 'cell')} had other scores in a later folder; the first one's stay.")
    _show(request, records)


def page(request: EvalOptions) -> None:
    """Write the leaderboard of folders of results, and print its paths.

    Raises:
        InputError: the folders cannot stand in one table, or cannot be read or written.
    """
    paths = leaderboard.write(leaderboard.board(read_folders(request.folders)), request.output)
    if request.json:
        console.write_json({"output": str(request.output), "pages": [str(path) for path in paths]})
    else:
        console.err().print(console.facts({"pages": ", ".join(map(str, paths))}))


def prepare(request: EvalOptions) -> Grid:
    """Check a request, cheap tests first, and return the grid, without reading weights; with ``--shard`` its share.

    Raises:
        KVKeepError: the request or the model cannot be used.
    """
    arms = split_arms(request.policies)
    kinds = tasks.find(request.tasks)
    budgets = [RequestedBudget(ratio=b) if isinstance(b, float) else RequestedBudget(tokens=b) for b in request.budgets]
    setup = Setup(
        positions=request.positions,
        layer_budget=request.layer_budget,
        head_budget=request.head_budget,
        kv_bits=request.kv_bits,
        prefill_chunk=request.prefill_chunk,
    )
    options = _options(request)
    # refuses an unknown dtype before the model is loaded
    parse_dtype(request.dtype)
    check_format(request.load_in, parse_device(request.device))
    name = request.model or embedded()
    console.progress(f"loading {name} …")
    checkpoint = find(name, allow_pickle=request.allow_pickle, weights=not request.dry_run)
    wanted = GridArguments(arms=arms, budgets=budgets, setup=setup)
    grid = lay_out(checkpoint, as_text(request.model or EMBEDDED), kinds, wanted, options)
    return grid if request.shard is None else grid.shard(*request.shard)


def _options(request: EvalOptions) -> list[Options]:
    """Return the options of the tasks, once for each pair of a seed and a way to ask."""
    options = Options(
        seed=request.seeds[0],
        limit=request.limit,
        text=None if request.text is None else read_text(request.text, kind="text file", purpose=_PURPOSE),
        contexts=request.contexts,
        facts=request.facts,
        documents=request.documents,
        ask=request.ask[0],
        turns=request.turns,
        window=request.window,
        stride=request.stride,
        prompt_tokens=request.prompt_tokens,
        new_tokens=request.new_tokens,
        draw=request.draw,
        data=request.data,
        shots=request.shots,
        parts=request.parts,
    )
    return [replace(options, seed=seed, ask=ask) for seed in request.seeds for ask in request.ask]


def _show(request: EvalOptions, records: Records, **more: Any) -> None:
    """Draw the plots, and print the tables, notes and paths of all files; with ``--json`` one JSON object.

    Args:
        request: the options of the command.
        records: the folder.
        more: further entries of the JSON object.
    """
    pictures = _draw(request, records)
    if request.json:
        paths = [str(path) for path in pictures]
        sure = {**confidence.as_json(records.rows), "weak": [asdict(case) for case in reports.weaknesses(records.rows)]}
        console.write_json({"output": str(request.output), "plots": paths, "rows": records.rows, **sure, **more})
        return
    screen = console.out()
    if request.recipe is not None:
        _show_recipe(request.recipe, records.rows)
    for tabled in [
        *reports.tables(records.rows),
        *reports.share_tables(records.rows),
        *reports.difference_tables(records.rows),
    ]:
        screen.print(console.visible(tabled.title), style="bold")
        for part in parts(tabled, screen.width):
            screen.print(part)
        screen.print()
    for note in (*reports.weakness_notes(records.rows), *reports.notes(records.rows)):
        console.note(note)
    console.err().print(console.facts(_places(request, pictures)))


def _draw(request: EvalOptions, records: Records) -> Sequence[Path]:
    """Draw the plots and return their files; ``[]`` if they are not wanted or cannot be drawn, which a note says.

    Raises:
        InputError: the plots cannot be drawn, for another reason than that their files cannot be written.
    """
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


def _places(request: EvalOptions, pictures: Sequence[Path]) -> dict[str, str]:
    """Return where results and plots are, for the last lines: name → path of the results, names of the plots."""
    drawn = {"plots": ", ".join(path.name for path in pictures)} if pictures else {}
    return {"results": str(request.output / "results.jsonl"), **drawn}


# An evaluation on workers of Ray: this process hands out the cells, and writes the rows as they come.


@dataclass(frozen=True, kw_only=True)
class CellRecipe:
    """What a worker needs to run cells; see `kvkeep.scale.worker.MakeModelWorker`.

    Attributes:
        model: the model.
        name: its name in results.
        sources: what the parts of the grid are made from.
    """

    model: ModelRecipe
    name: str
    sources: tuple[PartSource, ...]

    def __call__(self) -> CellRunner:
        """Load the model, and return what runs cells on it.

        Raises:
            KVKeepError: the model cannot be used here.
        """
        return CellRunner(self.model.load(), self.name, self.sources)


def run_on_ray(grid: Grid, request: EvalOptions, records: Records, todo: int) -> int:
    """Run every cell without a row on workers of Ray, and return the number of workers, not more than cells.

    Args:
        grid: the grid.
        request: the options of the command.
        records: the folder for the rows.
        todo: the number of cells without a row.

    Raises:
        KeyboardInterrupt: the user ended it; what is finished is written.
        InputError: there is no cluster, the workers do not fit or cannot begin, the folder cannot be used, or a cell
            cannot be run.
    """
    assert request.workers is not None
    for planned in grid.planned:
        whole_policy(planned.policy)  # refuses a path that no policy's string can hold while nothing has started
    size = pool_size(request.workers, todo, piece="cell", tell=console.note)
    console.progress(f"starting {console.count(size, 'worker')} …")
    with (
        interruptible() as stopped,
        running(
            lambda: _pool(grid, request, size),
            size,
            threads=request.threads,
            address=request.ray_address,
            stopped=stopped,
        ) as pool,
        eval_progress(todo) as bar,
    ):
        if not stopped():
            _fill(grid, records, pool, bar, stopped)
        if stopped():
            raise KeyboardInterrupt
    return size


def _pool(grid: Grid, request: EvalOptions, size: int) -> WorkerPool[ModelFacts]:
    """Return a pool of workers, not started yet, after checking that the Ray cluster has room for them. The cluster
    must have been joined.
    """
    need, device = room_for(
        size, _bytes(grid, request), device=request.device, threads=request.threads, address=request.ray_address
    )
    sources = tuple(
        PartSource(type(part.task), replace(part.options, data=_folder(part.options.data)), part.task.settings())
        for part in grid.parts
    )
    recipe = CellRecipe(model=model_recipe(request, device), name=grid.name, sources=sources)
    return WorkerPool(CELLS, recipe, size, need, tell=console.note)


def _bytes(grid: Grid, request: EvalOptions) -> int:
    """Return the bytes of main memory of a worker, as ``--dry-run`` counts; 0 for a model that cannot be planned."""
    with suppress(KVKeepError):
        less = request.load_in is not None  # nobody knows how many bytes these weights have
        peaks = [cost.peak_bytes - less * cost.weight_bytes for cost in expect(grid, request.dtype)]
        return PROCESS_BYTES + max(peaks, default=0)
    return 0


def _folder(data: str | None) -> str | None:
    """Return the value of ``--data`` for a worker: ``hub`` and ``None`` as they are, a folder by its full path."""
    return data if data == HUB else whole(data)


def _fill(
    grid: Grid, records: Records, pool: WorkerPool[ModelFacts], bar: EvalBar, stopped: Callable[[], bool]
) -> None:
    """Run the cells without a row on workers, and write the rows as they come, until all are done or ``stopped()``.

    Raises:
        InputError: a cell could not be run, the folder cannot be used, or a worker computes in another dtype.
    """
    about = pool.facts.about
    with cells_to_run(grid, records, about) as queue:

        def take(worker: int) -> Item | None:
            if (item := queue.take(worker)) is None:
                return None
            number, piece = item
            # a worker stands in another folder
            policy, setup = whole_policy(piece.planned.policy), piece.planned.setup
            setup = replace(setup, head_budget=whole_rule(setup.head_budget))
            return number, replace(piece, planned=replace(piece.planned, policy=policy, setup=setup))

        def write(answer: WorkResult) -> str | None:
            if answer.whole["dtype"] != about["dtype"]:
                return f"A worker computes in {answer.whole['dtype']}, others in {about['dtype']}. Give `dtype`."
            bar.end(queue.write(answer.number, answer.whole))
            return None

        outcome = run_pieces(pool, take, write, stopped)
    outcome.check(lambda failed: _unfinished(failed, queue.cells))


def _unfinished(failed: Mapping[int, str], cells: Mapping[int, Planned]) -> str:
    """Return the error message for cells whose workers have died.

    Args:
        failed: number of a cell → reason.
        cells: all cells that were to run, by number.
    """
    first = min(failed)
    return (
        f"{console.count(len(failed), 'cell')} of {len(cells)} {'has' if len(failed) == 1 else 'have'} no row, first "
        f"{cells[first].cell}: {failed[first]}. Perhaps a node has too little memory for it. All other rows are "
        "written; the same command tries again."
    )
