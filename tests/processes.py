"""Processes for tests that kill, close and race: forked from a server that has no threads, whatever a test run has.

A process that is forked from one with threads (torch's, OpenMP's) waits for ever for those that it does not have.
"""

import multiprocessing
import os
import sys
import traceback

NOBODY = "a pipe that nobody reads"
"""A standard output for `kvkeep`."""

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["kvkeep.cli.main", "kvkeep.cli.generate_batch", "kvkeep.models.load", "transformers"])


def kvkeep(*words, closed=(), out=os.devnull, err=os.devnull):
    """Start the command line in a process of its own.

    Args:
        words: of the command, without its name.
        closed: numbers of the standard streams that are closed, as by ``<&-``.
        out: file that its standard output goes to, or `NOBODY`.
        err: file that its errors go to.
    """
    process = _FORKS.Process(target=_run, args=([*map(str, words)], tuple(closed), str(out), str(err)))
    process.start()
    return process


def start(function, *args):
    """Start a function of a module."""
    process = _FORKS.Process(target=function, args=args)
    process.start()
    return process


def _run(words, closed, out, err):
    import torch

    torch.set_num_threads(1)
    for number, (name, path) in enumerate({"stdin": os.devnull, "stdout": out, "stderr": err}.items()):
        if number in closed:
            os.close(number)
            setattr(sys, name, None)
            continue
        file = _pipe() if path == NOBODY else os.open(path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if number else 0))
        os.dup2(file, number)
        setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115  the process ends
    code = 120  # as Python ends when a stream cannot be flushed
    try:
        found = _exit_code(["kvkeep", *words])
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        code = found
    finally:
        os._exit(code)


def _pipe():
    """The end for writing of a pipe whose other end is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def _exit_code(words):
    from kvkeep.cli import main

    sys.argv = words
    try:
        main.run()
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 70
    return 0
