"""What tests that feed a layer by hand mean by their tensors."""

from kvkeep.types import Phase


def phase_of(tokens):
    """One token per row is a generated one, several are a prompt: ``(B, H, T, D)``."""
    return Phase.DECODE if tokens.shape[2] == 1 else Phase.PREFILL
