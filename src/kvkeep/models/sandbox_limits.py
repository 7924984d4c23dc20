"""A bound on memory and answers line by line, for the scripts of `kvkeep.models.sandbox`. Only Python itself."""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress


def limit_memory(more_bytes: int) -> None:
    """Limit the memory that this process may still allocate, where the system can."""
    with suppress(ImportError, OSError, ValueError):  # not Linux, or a limit above that of the user
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, used + more_bytes))


def serve(answer: Callable[[str], Mapping[str, object]], more_bytes: int) -> None:
    """Answer each line of standard input by one line of JSON, after saying that the process is ready and limiting its
    memory.
    """
    # whatever a library prints must not be taken for an answer
    answers, sys.stdout = sys.stdout, sys.stderr
    print("{}", file=answers, flush=True)
    limit_memory(more_bytes)
    for line in sys.stdin:
        print(json.dumps(answer(line)), file=answers, flush=True)
