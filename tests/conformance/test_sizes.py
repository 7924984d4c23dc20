"""The definition's results, whatever the sizes of a backend's vectors, tiles, splits and blocks."""

import itertools
import platform

import pytest
import torch

from kvkeep.attention_stats import Low, Mass
from kvkeep.backends import AttentionInputs
from kvkeep.backends import torch as plain
from kvkeep.backends.native import Native, bindings, build
from kvkeep.backends.triton import launch
from kvkeep.backends.triton import ops as triton_ops
from kvkeep.types import AttentionOptions

from .bounds import check
from .cases import DTYPES, GREAT_SINK, GREAT_SINK_AND_ALL, NOW, backend_of, chunk, on, token

PLAIN = AttentionOptions(scaling=0.2)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have vectors of one length")
@pytest.mark.parametrize("flags", [["-mno-avx512f"], ["-mno-avx"]], ids=["8 floats", "4 floats"])
def test_shorter_vectors(flags, tmp_path, monkeypatch):
    backend = backend_of("native")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *flags))
    library = build._opened(build._compile(build._compiler(), tmp_path, "short"))
    monkeypatch.setattr(bindings, "native", lambda: Native(library, "short vectors"))
    for (D, S), dtype in itertools.product([(7, 3), (16, 17), (40, 70), (64, 257)], DTYPES):
        check(backend, token(S, D, 3, dtype), Low(live=True), GREAT_SINK_AND_ALL)
        check(backend, token(S, D, 3, dtype), Mass(gain=1.5), PLAIN)
        check(backend, chunk(33, S, D, 3, dtype=dtype, pads=4), Low(live=True), PLAIN)
        check(backend, chunk(33, S, D, 3, dtype=dtype, pads=4), Mass(gain=1.5), PLAIN)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("limit", [1, 700, 2**20])
def test_blocks_of_rows(limit, shared, monkeypatch):
    monkeypatch.setattr(plain, "BLOCK_BYTES", limit)
    given, options = chunk(T=9, S=12, E=4, pads=3, shared=shared), AttentionOptions(scaling=0.5, window=9)
    check(backend_of("torch"), *on("torch", given, Mass(rows=2), options))


@pytest.fixture
def kernels(monkeypatch):
    """Triton's kernels, and not torch for them."""
    monkeypatch.setattr(launch, "notice", pytest.fail)
    return backend_of("triton")


@pytest.mark.long
@pytest.mark.parametrize(("S", "splits"), [(48, 1), (49, 2), (70, 2), (80, 2), (81, 3)])
def test_small_tiles_and_many_splits(kernels, monkeypatch, S, splits):
    monkeypatch.setattr(launch, "DECODE", {"": {1024: launch.Decode(16, 32, 4, 1)}})
    query, slots, now = token(S, 40, 3, torch.bfloat16, E=24)
    slots.positions[2, :, :-1], slots.positions[2, :, -1] = -1, NOW  # all that a row holds is in the last slot
    slots.keys[2, :, -1], slots.values[2, :, -1] = 0.5, 2.0
    check(kernels, *on("triton", (query, slots, now), Mass(gain=2.0), GREAT_SINK_AND_ALL))
    assert triton_ops.Scratch(*on("triton", query, slots, now, GREAT_SINK), keeps=False).splits == splits


@pytest.mark.slow
@pytest.mark.parametrize("statistic", [Mass(), Mass(gain=1.5), Low()], ids=["mass", "gain", "low"])
def test_tiles_that_a_window_has_passed(kernels, monkeypatch, statistic):
    monkeypatch.setattr(launch, "CPU", launch.CPU._replace(rows=16, slots=64))
    given = chunk(T=150, S=70, G=1, Hk=1, D=16, pads=20)
    check(kernels, *on("triton", given, statistic, AttentionOptions(scaling=0.3, window=24)))


@pytest.mark.long
@pytest.mark.parametrize("statistic", [Mass(), Mass(rows=5, gain=1.5), Low()], ids=["mass", "gain", "low"])
def test_a_report_in_two_splits(kernels, monkeypatch, statistic):
    monkeypatch.setattr(launch, "splits", lambda programs, like: 2)
    given = on("triton", chunk(S=70, pads=5))[0]
    out, report = check(kernels, given, statistic, AttentionOptions(scaling=0.3))
    again, same = kernels.attend(AttentionInputs(*given, statistic=statistic, options=AttentionOptions(scaling=0.3)))
    assert out.equal(again)
    assert all(report.sums[name].equal(same.sums[name]) for name in statistic.fields)
