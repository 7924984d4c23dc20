"""One choice of backend: per device and dtype, or forced; `kvkeep env` shows it."""

import json

import pytest
import torch
from typer.testing import CliRunner

import kvkeep
from kvkeep import backends
from kvkeep.backends.native import Native, native
from kvkeep.backends.triton import launch
from kvkeep.backends.triton.launch import Kernels
from kvkeep.cli import main
from kvkeep.errors import InputError
from kvkeep.models import load
from kvkeep.types import Phase

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def machine(monkeypatch):
    """A machine with or without a native kernel, and with Triton's kernels on some devices."""
    monkeypatch.delenv(backends.SWITCH, raising=False)

    def make(*, compiled=True, devices=("cuda",)):
        found = Native(native().library, "kernel.so") if compiled else Native(None, "no C++ compiler was found")
        monkeypatch.setattr(backends, "native", lambda: found)
        there = Kernels(frozenset(devices), f"on {', '.join(devices) or 'none'}")
        monkeypatch.setattr(launch, "kernels", lambda: there)

    return make


needs_the_kernel = pytest.mark.skipif(native().library is None, reason=native().detail)


@needs_the_kernel
@pytest.mark.parametrize(
    ("compiled", "devices", "device", "dtype", "name", "why"),
    [
        (True, ("cuda",), CPU, torch.float32, "native", "kernel.so"),
        (True, ("cuda", "cpu"), CPU, torch.bfloat16, "native", "kernel.so"),
        (
            *(True, ("cuda",), CPU, torch.float64, "torch"),
            "the native kernel reads float32, bfloat16, float16, and no float64",
        ),
        (False, ("cuda",), CPU, torch.float32, "torch", "no C++ compiler was found"),
        (True, ("cuda",), CUDA, torch.float16, "triton", "on cuda"),
        (True, (), CUDA, torch.float16, "torch", "on none"),
        (True, ("cuda",), torch.device("mps"), torch.float16, "torch", "on cuda"),
    ],
)
def test_the_fastest_that_can_is_chosen_and_says_why(machine, compiled, devices, device, dtype, name, why):
    machine(compiled=compiled, devices=devices)
    assert backends.choose(device, dtype).name == name
    assert backends.why(device, dtype) == why


@needs_the_kernel
@pytest.mark.parametrize("name", ["native", "triton", "torch", "reference"])
def test_the_environment_forces_one(machine, monkeypatch, name):
    machine(devices=("cuda", "cpu"))
    monkeypatch.setenv(backends.SWITCH, name)
    assert backends.choose(CPU, torch.float32).name == name
    assert backends.choose(CPU, torch.float32) is backends.choose(CPU, torch.float32)
    assert backends.why(CPU, torch.float32) == f"KVKEEP_BACKEND={name}"


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("fast", CPU, "KVKEEP_BACKEND='fast' is no backend. There are native, reference, torch, triton"),
        ("native", CPU, r"KVKEEP_BACKEND=native cannot run on cpu: no C\+\+ compiler was found"),
        ("native", CUDA, "KVKEEP_BACKEND=native cannot run on cuda: it runs on CPUs only"),
        ("triton", CPU, "KVKEEP_BACKEND=triton cannot run on cpu: on cuda"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(machine, monkeypatch, name, device, message):
    machine(compiled=False)
    monkeypatch.setenv(backends.SWITCH, name)
    with pytest.raises(InputError, match=message):
        backends.choose(device, torch.float32)


def test_one_that_is_added_can_be_forced(monkeypatch):
    class Mine(backends.KINDS["torch"]):
        name = "mine"

    monkeypatch.setitem(backends.KINDS, "mine", Mine)
    monkeypatch.setenv(backends.SWITCH, "mine")
    layer = kvkeep.Layer(kvkeep.parse("h2o"), 8)
    layer.step(
        *(torch.randn(1, 2, 3, 4) for _ in range(3)), options=kvkeep.AttentionOptions(scaling=1.0), phase=Phase.PREFILL
    )
    assert type(layer._backend) is Mine


@pytest.mark.parametrize(
    ("value", "name", "detail"),
    [
        ("", "torch", "no C++ compiler was found"),
        ("torch", "torch", "KVKEEP_BACKEND=torch"),
        ("no", "none", "KVKEEP_BACKEND='no' is no backend"),
    ],
)
def test_env_says_which_and_why(machine, monkeypatch, value, name, detail):
    machine(compiled=False)
    monkeypatch.setenv(backends.SWITCH, value)
    done = CliRunner().invoke(main.app, ["env", "--json"])
    found = json.loads(done.stdout)["backends"][0]
    assert (done.exit_code, found["device"], found["backend"]) == (0, "cpu", name)
    assert detail in found["detail"]


MISSING = "There is no native kernel for this CPU, so torch computes in its place"


def test_without_a_kernel_a_line_says_so_and_what_to_do(machine, monkeypatch):
    machine(compiled=False)
    said = backends.missing_kernel(CPU)
    assert said.startswith(MISSING)
    assert "no C++ compiler was found. Install a C++ compiler" in said
    assert backends.missing_kernel(CUDA) is None
    monkeypatch.setenv(backends.SWITCH, "torch")
    assert backends.missing_kernel(CPU) is None


@needs_the_kernel
def test_with_a_kernel_nothing_is_said(machine):
    machine(compiled=True)
    assert backends.missing_kernel(CPU) is None


@pytest.mark.parametrize(
    "words",
    [
        ("env",),
        ("env", "--json"),
        ("generate", "-p", "Once", "-n", "1"),
        ("eval", "--tasks", "recall", "--limit", "1", "-o", "results"),
    ],
)
def test_a_command_without_a_kernel_says_so_in_its_first_line(machine, caplog, words, tmp_path, monkeypatch):
    machine(compiled=False)
    monkeypatch.chdir(tmp_path)
    load._warn_once.cache_clear()
    done = CliRunner().invoke(main.app, [*words])
    assert done.exit_code == 0
    first = " ".join(done.stderr.split()) if words[0] == "env" else caplog.messages[0]
    assert first.removeprefix("note: ").startswith(MISSING)


@pytest.mark.slow
def test_a_wrong_name_is_a_line_and_exit_code_2(monkeypatch):
    monkeypatch.setenv(backends.SWITCH, "fast")
    done = CliRunner().invoke(main.app, ["generate", "--prompt", "Once"])
    assert done.exit_code == 2
    assert "KVKEEP_BACKEND='fast' is no backend" in " ".join(done.output.split())
    assert "Traceback" not in done.output
