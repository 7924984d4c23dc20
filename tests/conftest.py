"""Shapes and types of every annotated function are checked in tests, and only there."""

import os

import torch
from jaxtyping import install_import_hook

install_import_hook("kvkeep", "beartype.beartype")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton
torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for each other
