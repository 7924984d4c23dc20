"""The work of ``kvkeep analyze``: check everything, load the model, measure, and write the page.

Bad input is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvkeep import plots
from kvkeep.cli import console
from kvkeep.cli.cluster import ended_with_its_cluster
from kvkeep.cli.files import STANDARD_INPUT, read_text
from kvkeep.cli.progress import resumable, staged
from kvkeep.models import load, threads
from kvkeep.models.device import parse_device, parse_dtype
from kvkeep.models.load import quiet
from kvkeep.models.quantized_weights import check_format
from kvkeep.models.tokenization import Writer
from kvkeep.scale.cluster import check_ray
from kvkeep_lab.analysis import page, report
from kvkeep_lab.analysis.job import AnalysisJob, find, read
from kvkeep_lab.analysis.report import AnalysisFolder
from kvkeep_lab.analysis.run import run
from kvkeep_lab.cli.analyze.options import AnalyzeOptions

_PURPOSE = "Give some text to analyse with --text FILE."


@ended_with_its_cluster()
def serve(request: AnalyzeOptions) -> None:
    """Measure, write the page and print a summary.

    Raises:
        KVKeepError: the request, the model or the folder cannot be used.
    """
    if request.workers is not None:
        check_ray(request.ray_address)
    with quiet(), threads.restored():
        folder = AnalysisFolder(request.output)
        job = prepare(request)
        folder.check_free()
        folder.check(job.manifest())
        report.read(folder)
        for note in job.text.notes:
            console.note(note)
        with ExitStack() as held:
            workers = _measure(job, request, folder, held)
            written, everything = report.write(folder)
    _show(request, written, everything, **({} if workers is None else {"workers": workers}))


def _measure(job: AnalysisJob, request: AnalyzeOptions, folder: AnalysisFolder, held: ExitStack) -> int | None:
    """Make the measurements that the folder lacks; return the number of workers of Ray.

    Args:
        job: the analysis.
        request: the options of the command.
        folder: gets the results.
        held: holds the folder's lock from here on.
    """
    if request.workers is not None:
        from kvkeep_lab.cli.analyze import far

        return far.run(job, request, folder, held)
    writer = Writer(
        job.checkpoint, load.read_weights(job.checkpoint, request.dtype, request.device, load_in=request.load_in)
    )
    threads.use(writer.model, request.threads)
    held.enter_context(folder.locked())
    with resumable(), staged() as on_stage:
        run(job, writer, folder, on_stage)
    return None


def prepare(request: AnalyzeOptions) -> AnalysisJob:
    """Check a request, cheap tests first, without reading weights.

    Raises:
        KVKeepError: the request or the model cannot be used.
    """
    kinds = find(request.only)
    text = read_text(request.text, kind="text file", purpose=_PURPOSE)
    parse_dtype(request.dtype)
    check_format(request.load_in)
    parse_device(request.device)
    name = request.model or load.embedded()
    console.progress(f"loading {name} …")
    checkpoint = load.find(name, allow_pickle=request.allow_pickle)
    file = "standard input" if request.text == STANDARD_INPUT else Path(request.text).name
    tokens = read(checkpoint, file, text, request.max_tokens)
    return AnalysisJob(request.model or page.EMBEDDED, checkpoint, tokens, kinds, request.seed)


def _show(request: AnalyzeOptions, written: Path, everything: dict[str, Any], **more: Any) -> None:
    """Print the verdicts, the next step and the path of the page.

    Args:
        request: the options of the command.
        written: the page.
        everything: the results as an object of JSON.
        more: further entries of that object.
    """
    if not plots.available():
        console.note(f"no pictures: {plots.MISSING}, then run the same command again.")
    if request.json:
        console.write_json({"output": str(request.output), "page": str(written), **everything, **more})
        return
    screen = console.out()
    filled = console.table("measurement", "verdict", "this model shows")
    for name, record in everything["measurements"].items():
        said = record.get("reading")
        verdict, here = ("skipped", record["skipped"]) if said is None else (said["verdict"], said["here"])
        filled.add_row(name, verdict, console.visible(here))
    screen.print(filled)
    screen.print()
    screen.print(console.visible(everything["recommendation"]["short"]))
    console.err().print(console.facts({"page": str(written)}))
