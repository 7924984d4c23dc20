"""Saved memories on the command line: a memory brings its settings.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from kvkeep.cli.generate.request import Request
from kvkeep.engine.prompt_encoding import Past
from kvkeep.errors import InputError, SnapshotError
from kvkeep.models.load import Checkpoint
from kvkeep.policies.registry import parse
from kvkeep.result_files import in_full
from kvkeep.snapshot import Fingerprint, Snapshot
from kvkeep.snapshot.fingerprint import hash_of_config, name_of_policy, policy_named, rule


@dataclass(frozen=True)
class Memory:
    """A memory from a file.

    Attributes:
        file: its name in messages.
        snapshot: the memory.
        digest: a hash of the file's content.
    """

    file: str
    snapshot: Snapshot
    digest: str

    @classmethod
    def read(cls, file: str, *, shown: str | None = None) -> Memory:
        """Read a file that ``kvkeep remember`` or ``kvkeep chat`` has written.

        Args:
            file: its name.
            shown: its name in messages; by default the same.

        Raises:
            SnapshotError: it cannot be read, or is no memory whose tokens are known.
        """
        snapshot = Snapshot.load(file)
        Past.of(snapshot)  # refuses a memory without token ids
        with in_full(file).open("rb") as content:
            return cls(shown or file, snapshot, hashlib.file_digest(content, "sha256").hexdigest()[:16])

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Refuse another model before its weights are read.

        Raises:
            SnapshotError: the memory was made with a model of another configuration.
        """
        made = self.snapshot.fingerprint
        if made.config != hash_of_config(checkpoint.config):
            raise SnapshotError(
                f"{self.file} is a memory of the model {made.model}, and {checkpoint.name} has another configuration. "
                f"Give the model that it was made with, or read the text again with {checkpoint.name}."
            )


def settled(request: Request, memory: Memory | None) -> Request:
    """The request with the settings of its memory, which are the only ones under which it means anything.

    Raises:
        InputError: an option was given that is not the memory's.
        SnapshotError: its policy is not registered, and was not named.
    """
    if memory is None:
        return request
    made = memory.snapshot.fingerprint
    for flag, given, own in _settings(request, made):
        if given is not None and given != own:
            shown = "none" if own is None else own
            raise InputError(
                f"{flag} {given} is not that of {memory.file}, {shown}, and a memory means nothing under other "
                f"settings. Leave {flag} out."
            )
    if not request.names_policy:
        policy_named(made.policy)  # a file may name any module, which the user has not named
    return replace(
        request,
        policy=request.policy if request.names_policy else made.policy,
        budget=made.budget,
        prefill_chunk=made.chunk,
        layer_budget=made.layer_budget if isinstance(made.layer_budget, str) else list(made.layer_budget),
        head_budget=made.head_budget,
        kv_bits=made.kv_bits,
        positions="slot" if made.positions == "slot" else "true",
        dtype=made.dtype or request.dtype,
    )


def _settings(request: Request, made: Fingerprint) -> list[tuple[str, object, object]]:
    """The options that a memory decides: flag, given value, the memory's value."""
    layer_budget = None if request.layer_budget is None else rule(request.layer_budget)
    return [
        ("--policy", name_of_policy(parse(request.policy)) if request.names_policy else None, made.policy),
        ("--budget", request.budget, made.budget),
        ("--prefill-chunk", request.prefill_chunk, made.chunk),
        ("--layer-budget", layer_budget, made.layer_budget),
        ("--head-budget", request.head_budget, made.head_budget),
        ("--kv-bits", request.kv_bits, made.kv_bits or "16"),
        ("--positions", request.positions, made.positions),
        ("--dtype", None if request.dtype == "auto" else request.dtype, made.dtype or request.dtype),
    ]
