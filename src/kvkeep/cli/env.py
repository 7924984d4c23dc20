"""``kvkeep env``: facts for a bug report."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Annotated, Any

import typer

from kvkeep.cli import console, shell_completion
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.options import Json
from kvkeep.cli.startup import fast_imports
from kvkeep.errors import InputError, PolicyError
from kvkeep.models import folder
from kvkeep.version import __version__

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "huggingface_hub",
    "typer",
    "rich",
    "prompt_toolkit",
)


@one_line_errors
def env(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model, to see how its decode steps would run here.",
            metavar="[MODEL]",
            autocompletion=shell_completion.models,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show versions, devices, memory and policies, as a bug report needs them; and with MODEL, how it would run."""
    if model is not None:
        folder.check(model)
    versions: dict[str, Any] = {
        "kvkeep": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{package: _version(package) for package in _PACKAGES},
    }
    if not json:  # versions need no torch, whose import takes a second, and they stand there even if it fails
        _show(versions)
    if missing := _missing_kernel():
        console.note(missing)
    seen = {**_hardware(), "policies": _policies()} | ({} if model is None else {"model": model, **_prepared(model)})
    if json:
        console.write_json(versions | seen)
    else:
        _show(seen)


def _show(facts: dict[str, Any]) -> None:
    """Print facts in two columns, which begin at the same places in each call."""
    rows = {name.replace("_", " "): _fact_text(name, fact) for name, fact in facts.items()}
    shown = console.out()
    shown.print(console.facts(rows, name_width=max(map(len, _PACKAGES))))
    shown.file.flush()  # a pipe would hold the versions back until the rest is there


def _missing_kernel() -> str | None:
    """Return a sentence on the native kernel of the CPU if it is missing here; ``None`` if it is there."""
    with fast_imports():
        import torch

        from kvkeep.backends import missing_kernel

    return missing_kernel(torch.device("cpu"))


def _prepared(name: str) -> dict[str, str]:
    """Load a model, and return how its weights are stored and how its decode steps run on this machine, and why.

    Raises:
        KVKeepError: the model cannot be loaded.
    """
    said = f"loading {name} …"
    console.progress(said)
    with console.Heartbeat.working(lambda: said):
        with fast_imports():
            from kvkeep.models import prepare, quantized_weights
            from kvkeep.models.load import load, quiet

        with quiet():
            model, _ = load(name)
        return {"weights": quantized_weights.describe(model), "decode_steps": prepare.describe(model)}


def _version(package: str) -> str | None:
    """Return the version of an installed package; ``None`` if it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _hardware() -> dict[str, Any]:
    """Return facts about devices, threads and backends as plain data; the backends' check may compile the kernel."""

    import torch

    devices = [
        {"name": f"cuda:{index}", "model": torch.cuda.get_device_name(index), "memory_bytes": _cuda_bytes(index)}
        for index in range(torch.cuda.device_count())
    ]
    return {
        "cuda": torch.version.cuda,
        "devices": [{"name": "cpu", "model": platform.machine(), "memory_bytes": _memory_bytes()}, *devices],
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "backends": _backends(),
    }


def _backends() -> list[dict[str, str]]:
    """Return the backend of the CPU and of CUDA, if there is one, and why it was chosen, or why there is none.

    The native kernel is compiled if need be.
    """
    import torch

    from kvkeep.backends import choose, why

    found = []
    for kind in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        device = torch.device(kind)
        try:
            name, detail = choose(device, torch.float32).name, why(device, torch.float32)
        except InputError as error:
            name, detail = "none", str(error)
        found.append({"device": kind, "backend": name, "detail": detail})
    return found


def _cuda_bytes(index: int) -> int:
    """Return the bytes of all memory of the GPU with this index."""

    import torch

    return int(torch.cuda.get_device_properties(index).total_memory)


def _memory_bytes() -> int | None:
    """Return the bytes of all main memory; ``None`` if the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return None


def _policies() -> list[str]:
    """Return the names of all policies, with the origin of those from other packages, or the error of listing them."""
    from kvkeep.policies import ENTRY_POINT_GROUP
    from kvkeep.policies.registry import available

    origin = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    try:
        return [f"{name} ({origin[name]})" if name in origin else name for name in available()]
    except (PolicyError, ImportError, AttributeError) as error:
        return [f"cannot be listed: {error}"]


def _fact_text(name: str, fact: Any) -> str:
    """Return a fact as a text for the terminal; one named devices, backends or policies is a list, in its own form."""
    if name == "devices":
        return "\n".join(_show_device(device) for device in fact)
    if name == "backends":
        return "\n".join(f"{device['device']}: {device['backend']} ({device['detail']})" for device in fact)
    if name == "policies":
        return ", ".join(fact)
    return "–" if fact is None else str(fact)


def _show_device(device: dict[str, Any]) -> str:
    """Return a device's name, model and memory as a text."""
    memory = device["memory_bytes"]
    return f"{device['name']}: {device['model']}, {console.show_bytes(memory) if memory else 'unknown memory'}"
