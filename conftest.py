"""Shapes and types of every annotated function are checked in tests, and only there."""

import functools
import gc
import os
import signal
import ssl

import annotations
import comparable_model
import hypothesis
import jaxtyping
import pytest
import sweeps
import torch
import trials
import typer.main
import typer.testing

gc.set_threshold(10_000)  # most of what is collected earlier dies by itself
gc.disable()  # until all is collected: what an import makes is no garbage
annotations.install("kvkeep")
annotations.install("kvkeep_lab")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; tests of Ctrl-C would wait forever
    signal.signal(signal.SIGINT, signal.default_int_handler)
ssl.create_default_context = functools.cache(
    ssl.create_default_context
)  # HTTP clients would each read all certificates
typer.testing._get_command = functools.cache(typer.main.get_command)  # it would be made anew for each command of a test
hypothesis.settings.register_profile("same", derandomize=True, database=None)  # the same examples in every run
hypothesis.settings.load_profile("same")
torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for each other


def pytest_addoption(parser):
    sweeps.add_option(parser)
    parser.addoption("--check-annotations", type=int, default=4, metavar="N", help="in one test of N")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Before the marks are looked at."""
    sweeps.choose(config, items)


def pytest_collection_finish():
    """Collections of garbage leave out what lives as long as the run: looking through that takes a second each."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    one_in = item.config.getoption("--check-annotations")
    annotations.begin_test(checking=sweeps.is_one_in(item.nodeid, one_in) or "slow" in item.keywords)
    trials.begin_test(item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Name a failed test at once: the summary never comes if a long run is ended from outside."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(AtOnce(reporter))


class AtOnce:
    """Prints the name of each test that fails, when it fails."""

    def __init__(self, reporter):
        self._reporter = reporter

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._reporter.write(f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.1f} s)\n")


@pytest.fixture
def no_checked_annotations():
    """As for users: elsewhere in the tests an annotation catches a wrong type before the function does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def only_new_garbage():
    """For tests that collect garbage: what is older lives on unseen. Looking through it all takes a second."""
    gc.freeze()


@pytest.fixture(scope="session")
def comparable():
    """The embedded model in float32, for tests that compare a text of many with the same text alone.

    In bfloat16, which the checkpoint has, a processor without bfloat16 instructions lets the rounding of a product
    depend on the number of rows, so a text depends on what runs beside it, and on how a process lays out its weights.
    """
    return comparable_model.Comparable()
