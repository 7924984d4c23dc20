"""The embedded model: a Llama of five million parameters that uses all of its 2 048 tokens of context.

``path()`` returns a folder for ``from_pretrained``; its ``README.md`` is the model card. `kvkeep.models.tiny.recall`
makes long texts with questions about them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvkeep.errors import ModelFileError

__all__ = ["embedded", "path"]

WEIGHTS = "model.safetensors"
CHECKSUM = "model.safetensors.sha256"


def path() -> Path:
    """Check the checksum of the embedded model's weights, and return the model's folder.

    Returns:
        A folder that ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained`` load.

    Raises:
        ModelFileError: The weights are missing or corrupted.

    Cost:
        Reads the weights once (10 MB).
    """
    folder = Path(__file__).parent
    checksum = folder / CHECKSUM
    words = checksum.read_text(encoding="utf-8", errors="replace").split() if checksum.is_file() else []
    if not words:
        raise ModelFileError(f"{checksum} is missing or empty: the installation is incomplete; install kvkeep again")
    check(folder / WEIGHTS, words[0])
    return folder


def embedded() -> str:
    """Return the folder of the embedded model, see `path`.

    Raises:
        ModelFileError: its files are missing or corrupted; the message says to give another model.
    """
    remedy = "Give a `model`: a hub name such as Qwen/Qwen3-0.6B, or a local folder."
    try:
        return str(path())
    except FileNotFoundError as error:
        raise ModelFileError(f"This installation of kvkeep has no embedded model. {remedy}") from error
    except ModelFileError as error:
        raise ModelFileError(f"The embedded model cannot be used: {str(error).rstrip('.')}. {remedy}") from error


def check(weights: Path, expected: str) -> None:
    """Raise a `ModelFileError` unless the file's SHA-256 is the expected one."""
    if not weights.is_file():
        raise ModelFileError(f"{weights} is missing: the installation is incomplete; install kvkeep again")
    found = hashlib.sha256(weights.read_bytes()).hexdigest()
    if found != expected:
        raise ModelFileError(
            f"{weights} is corrupted: its SHA-256 is {found[:12]}..., it should be {expected[:12]}...; "
            "the model would answer nonsense; install kvkeep again"
        )
