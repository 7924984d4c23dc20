"""The words of ``kvkeep generate`` as values: its memory, its budget, and the options of a batch job."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli import cluster
from kvkeep.cli.files import STANDARD_OUTPUT, place
from kvkeep.cli.generate.request import Batch
from kvkeep.cli.options import parse_bytes, parse_tokens
from kvkeep.cli.usage import exists
from kvkeep.errors import InputError
from kvkeep.scale.remote_files import is_address

JOB = "Batch job"
"""The heading of its options in the help."""
RayWorkers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Run the lines on N engines, each in a process of a cluster of Ray. --max-rows and --kv-memory are then "
        "those of each. Needs the extra kvkeep\\[ray].",
        rich_help_panel=JOB,
    ),
]
RayAddress = Annotated[str | None, cluster.address(JOB)]


def parse_memory(text: str | None) -> str | None:
    """Read ``--memory``, the name of a file.

    Raises:
        InputError: it is empty, or a size.
    """
    if text is None or exists(text):
        return text
    if not text.strip():
        raise InputError("--memory is empty. Give a file that kvkeep remember has written.")
    if text.endswith("B") and text[:1].isdigit():
        raise InputError(
            f"--memory {text} is a size, and --memory takes a file that kvkeep remember has written. For the size of "
            f"all KV memory: --kv-memory {text}"
        )
    return text


def parse_budget(text: str) -> int:
    """Read ``--budget`` as a number of tokens; a share of an unknown length is refused."""
    if text.endswith("%"):
        raise InputError(
            f"--budget {text} is a share of no known length; give a number of tokens, e.g. 512. For a share of a "
            "single prompt there is --keep-ratio, e.g. 0.2."
        )
    return parse_tokens(text, "--budget")


def parse_batch(
    source: str | None,
    output: str | None,
    *,
    skip_bad: bool,
    max_rows: int | None,
    kv_memory: str | None,
    layers: bool,
    workers: int | None,
    address: str | None,
) -> Batch | None:
    """The options of a batch job; ``None`` if there is no ``--input``."""
    if source is None:
        if skip_bad or layers or any(one is not None for one in (output, max_rows, kv_memory, workers, address)):
            raise InputError(
                "--output, --skip-bad, --max-rows, --kv-memory, --compile, --ray-workers and --ray-address belong to a "
                "batch job: give --input FILE."
            )
        return None
    if output is None:
        raise InputError("A batch job needs --output FILE, where its completions go; - is standard output.")
    if output != STANDARD_OUTPUT and not is_address(output):
        output = str(place(output, "--output"))
    if max_rows is not None and max_rows < 1:
        raise InputError(f"--max-rows {max_rows} runs nothing; give 1 or more.")
    cluster.check_workers(workers, address)
    size = None if kv_memory is None else parse_bytes(kv_memory, "--kv-memory")
    return Batch(
        input=source,
        output=output,
        skip_bad=skip_bad,
        max_rows=max_rows,
        kv_memory=size,
        compile=layers,
        workers=workers,
        address=address,
    )
