"""Shapes and types of every annotated function are checked in tests, and only there."""

import torch
from jaxtyping import install_import_hook

install_import_hook("kvkeep", "beartype.beartype")
torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for each other
