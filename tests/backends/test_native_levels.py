"""The kernel that a wheel brings: a library for each level of processors, of which the best is loaded."""

import ctypes
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvkeep.backends.native import build, levels

ROOT = Path(__file__).parents[2]

ANY = ctypes.CDLL(None)
"""Some library."""

OLD = frozenset(["fpu", "sse", "sse2", "ht", "lm"])
V2 = OLD | frozenset(["cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"])
V3 = V2 | frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"])
V4 = V3 | frozenset(["avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"])
PROCESSORS = {
    "Nehalem": (V2, "x86-64"),
    "Sandy Bridge": (V2 | {"avx"}, "x86-64"),
    "Haswell": (V3, "x86-64-v3"),
    "Zen 3": (V3 | {"sse4a", "vaes"}, "x86-64-v3"),
    "Alder Lake, which has VNNI for short vectors only": (V3 | {"avx_vnni"}, "x86-64-v3"),
    "Knights Landing, which lacks half of AVX-512": (V3 | {"avx512f", "avx512cd", "avx512er"}, "x86-64-v3"),
    "Skylake": (V4, "x86-64-v4"),
    "Ice Lake": (V4 | {"avx512_vnni", "avx512_vbmi2"}, "x86-64-v4-vnni"),
    "Zen 4": (V4 | {"avx512_vnni", "avx512_bf16"}, "x86-64-v4-bf16"),
    "Sapphire Rapids": (V4 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}, "x86-64-v4-amx"),
    "a system that hides AMX's registers": (V4 | {"avx512_vnni", "avx512_bf16", "amx_bf16"}, "x86-64-v4-bf16"),
    "a system that hides AVX-512": (V3 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"}, "x86-64-v3"),
    "a system that says nothing": (frozenset(), "x86-64"),
}


@pytest.mark.parametrize(("features", "best"), PROCESSORS.values(), ids=PROCESSORS.keys())
def test_the_best_level_that_a_processor_runs(features, best):
    assert levels.runnable("x86_64", features)[0].name == best
    assert levels.runnable("x86_64", features)[-1].name == "x86-64"


def test_levels_of_other_architectures():
    assert [level.name for level in levels.runnable("aarch64", frozenset({"fp", "asimd"}))] == ["aarch64"]
    assert [level.name for level in levels.runnable("arm64", frozenset())] == ["arm64"]
    assert levels.runnable("riscv64", frozenset()) == []


def test_a_wheel_for_macos_is_compiled_as_apples_compiler_wants_it(monkeypatch, tmp_path):
    pytest.importorskip("hatchling")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    (level,) = levels.runnable("arm64", frozenset())
    commands = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
        hook = runpy.run_path(str(ROOT / "hatch_build.py"))
        assert hook["compiled"]("clang++", vars(levels), level, tmp_path) is None
    compiling, linking = (" ".join(command) for command in commands)
    assert "-Xpreprocessor -fopenmp" in compiling
    assert "-dynamiclib -undefined dynamic_lookup" in linking  # OpenMP's functions are torch's
    assert "-shared" not in linking


def test_the_features_of_the_processor(monkeypatch):
    monkeypatch.setattr(levels, "processor", lambda: "x86_64\nmodel name\t: avx\nflags\t\t: fpu avx2 fma")
    assert levels.features() == {"fpu", "avx2", "fma"}
    monkeypatch.setattr(levels, "processor", lambda: "aarch64\nFeatures\t: fp asimd\nCPU part\t: 0xd0c")
    assert levels.features() == {"fp", "asimd"}
    monkeypatch.setattr(levels, "processor", lambda: "arm64 arm")
    assert levels.features() == frozenset()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with some libraries, on a processor with AVX2, without a compiler; what is opened is collected.

    An empty file cannot be loaded.
    """
    opened = []

    def load(path):
        opened.append(path.name.partition(".")[0])
        if not path.read_bytes():
            raise OSError("file too short")
        return ANY

    monkeypatch.setattr(levels, "FOLDER", tmp_path)
    monkeypatch.setattr(levels, "features", lambda: V3)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "_bound", load)
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(**contents):
        for name, content in contents.items():
            (tmp_path / levels.library_name(name.replace("_", "-"), content)).write_bytes(content)
        return build.native.__wrapped__(), opened

    return make


def test_the_library_of_the_best_level_is_loaded(package):
    found, opened = package(x86_64_v4=b"fastest", x86_64_v3=b"fast", x86_64=b"plain")
    assert (found.library, Path(found.detail).name) == (ANY, levels.library_name("x86-64-v3", b"fast"))
    assert opened == ["kernel-x86-64-v3"]


def test_a_library_that_cannot_be_loaded_is_replaced_by_the_next_one_with_a_warning(package, caplog):
    found, opened = package(x86_64_v3=b"", x86_64=b"plain")
    assert found.library is ANY
    assert opened == ["kernel-x86-64-v3", "kernel-x86-64"]
    assert "cannot be loaded, and a slower one takes its place: file too short." in caplog.text


def test_without_a_library_that_can_be_loaded_the_kernel_is_compiled(package):
    found, _ = package(x86_64_v3=b"", x86_64=b"")
    assert found.detail.startswith("no C++ compiler was found")


def test_a_library_that_was_cut_off_is_not_loaded(tmp_path):
    """Loading it would end the process."""
    whole = b"a library of the kernel"
    path = tmp_path / levels.library_name("x86-64", whole)
    path.write_bytes(whole[:10])
    with pytest.raises(OSError, match="it is damaged"):
        build._bound(path)
    path.write_bytes(whole)
    with pytest.raises(OSError, match=r"file too short|invalid ELF header|no suitable image"):
        build._bound(path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this clone."""
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_a_wheel_has_a_library_for_every_level_and_names_its_platform(wheel):
    wanted = {f"kernel-{level.name}" for level in levels.LEVELS if level.machine == platform.machine()}
    names = {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    assert {name.partition(".")[0] for name in names} == wanted
    assert wheel.name.endswith(f"_{platform.machine()}.whl" if wanted else "-py3-none-any.whl")
    assert "-py3-none-" in wheel.name


@pytest.mark.slow
def test_a_wheel_runs_its_kernel_in_a_new_environment_without_a_compiler(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, str(wheel)], check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    environment = {"PATH": str(python.parent), "HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}

    def run(*words):
        command = [str(python.with_name("kvkeep")), *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    said = run("env", "--json")
    (cpu,) = (entry for entry in json.loads(said.stdout)["backends"] if entry["device"] == "cpu")
    assert cpu["backend"] == "native"
    assert Path(cpu["detail"]).is_relative_to(packages)
    assert "kernel" not in said.stderr
    assert run("generate", "-p", "Once upon a time", "-n", "4").stdout.strip()
    assert not (tmp_path / "home" / ".cache" / "kvkeep").exists()


RUNNABLE = levels.runnable(platform.machine(), levels.features())
NUMBERS = [f"backends/test_native{name}.py" for name in ("", "_prefill", "_narrow", "_small")]


@pytest.mark.slow
@pytest.mark.parametrize("level", RUNNABLE, ids=[level.name for level in RUNNABLE])
def test_every_level_computes_what_the_reference_computes(level, wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "kvkeep" / "backends" / "native"
    (library,) = levels.libraries(level.name, folder)
    for path in {*folder.glob("*.so")} - {library}:
        path.unlink()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = "from kvkeep.backends.native import native; print(native().detail)"
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(library)
    tests = [ROOT / "tests" / name for name in (*NUMBERS, "conformance/test_backends.py")]
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, tests)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.slow
def test_without_a_compiler_a_wheel_is_built_that_fits_every_system(tmp_path):
    sources, tools = tmp_path / "sources", tmp_path / "bin"
    tools.mkdir()
    shutil.copytree(ROOT, sources, ignore=shutil.ignore_patterns(".*", "bench", "docs", "lab", "tests"))
    words = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    done = subprocess.run(words, cwd=sources, env={"PATH": str(tools)}, check=True, capture_output=True, text=True)
    (path,) = tmp_path.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    assert "No C++ compiler was found" in done.stdout + done.stderr
