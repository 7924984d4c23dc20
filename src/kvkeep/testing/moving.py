"""A layer whose rows can be moved to another one by way of files, for the law about saved memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from kvkeep.cache.layer import Layer
from kvkeep.policies.base import Policy
from kvkeep.snapshot import Contents, Fingerprint, Snapshot, new_block, put, take
from kvkeep.testing.case import Case, Tape
from kvkeep.types import Phase


class Fed:
    """A layer and the columns that it has been fed.

    Args:
        policy: the layer's policy.
        case: the shape of the experiment.
    """

    def __init__(self, policy: Policy, case: Case) -> None:
        self.case = case
        self.cascade = policy.cascades(1) if policy.cascades else None
        options: dict[str, Any] = {"prefill_chunk": case.chunk, "kv_bits": case.kv_bits}
        self.layer = Layer(policy, case.budget, index=1, cascade=self.cascade, **options)

    def feed(self, tape: Tape, stop: int) -> Tensor:
        """Feed the columns up to ``stop``: the prompt, or a generated token. Return the output, 0 for padding."""
        start = self.layer.columns
        real = tape.real[:, start:stop]
        phase = Phase.PREFILL if start < self.case.prompt else Phase.DECODE
        out = self.layer.step(*tape.at(slice(start, stop)), options=self.case.options, phase=phase, real=real)
        return out.masked_fill(~real[:, None, :, None], 0)

    def move_to(self, other: Fed) -> None:
        """Save every row to a file, and put what the files hold into a layer that was never fed."""
        rows = [take([self.layer.block], row, cascade=self.cascade) for row in range(self.case.rows)]
        read = [self._through_a_file(row) for row in rows]
        dtype = self.layer.store.dtype
        block = new_block(other.layer, [row.layers[0] for row in read], self.case.rows, dtype=dtype)
        for number, row in enumerate(read):
            put(row, [block], number, cascade=other.cascade)
        other.layer.hold(block, columns=self.layer.columns)

    def _through_a_file(self, contents: Contents) -> Contents:
        """A row as a file holds it."""
        settings: dict[str, Any] = {"budget": self.case.budget, "kv_bits": self.case.kv_bits}
        dtype = str(self.layer.store.dtype).removeprefix("torch.")
        made = Fingerprint(model="a law", config="", policy="", dtype=dtype, **settings)
        with tempfile.TemporaryDirectory() as folder:
            Snapshot(contents, made).save(Path(folder, "row"))
            return Snapshot.load(Path(folder, "row")).contents
