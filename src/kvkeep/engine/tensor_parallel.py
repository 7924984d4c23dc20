"""Engines of a model that is split over processes: what they cannot do, and how they find out that they differ.

Each process has an engine and gives it the same requests in the same order. Which request runs when depends on these
alone, so all engines take the same steps, and no process has to tell the others what to do; chosen tokens come from the
first one. Whatever would depend on a clock, a thread or a file of one process is refused.

Processes that were given different requests would send each other numbers of different meanings, and would get wrong
tokens without an error. So before each step they compare one number, and what they were given only if that differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch

from kvkeep.engine.sequence import Sequence
from kvkeep.errors import InputError, UnsupportedOperationError
from kvkeep.head_sharding import Heads, sharing
from kvkeep.snapshot.snapshot import Snapshot

Description: TypeAlias = dict[str, Any]
"""What a request or an engine was given, by name: token ids of a prompt, and texts."""

_ELSEWHERE = {"prompt", "messages", "tools", "raw", "sampling", "policy", "budget", "guard", "stop"}
"""Fields of requests that are described by what the engine has made of them."""

_REMEDY = "Give all processes the same options, and the same requests in the same order."


def check_split(config: Any, **asked: object) -> None:
    """Refuse options that would let the engines of several processes take different steps.

    Args:
        config: the model's configuration.
        asked: options by name.

    Raises:
        UnsupportedOperationError: an option is set to a true value, and the model is split.
    """
    together = sharing(config)
    if together.ranks > 1 and (name := next((name for name, value in asked.items() if value), None)):
        raise UnsupportedOperationError(
            f"The model is split over {together.ranks} processes, whose engines take the same steps, and `{name}` "
            "depends on one process alone. Leave it out."
        )


class EngineAgreement:
    """The processes whose engines run one model together, and what each of them is about to run.

    Args:
        together: the processes; more than one, since an engine that is alone has nobody to agree with.
        device: of the model.
        settings: options of the engine, by name.
    """

    def __init__(self, together: Heads, device: torch.device, settings: Mapping[str, object]) -> None:
        self._together, self._device = together, device
        self._settings = {name: _shown(value) for name, value in settings.items()}
        self._known: list[_DescribedRequest] = []

    def check(self, live: Iterable[Sequence]) -> None:
        """Compare the options of this process's engine, and its requests with their progress, with those of the other
        processes, and raise an error in all of them if they differ. Every process must call it.

        Cost: a number from each process; a request is described once.

        Raises:
            InputError: the options or the requests differ, or other processes have ended.
        """
        try:
            if not self._together.alike(self._digest(live), self._device):
                mine = json.dumps({"engine": self._settings, "requests": self._requests()})
                found = [json.loads(text) for text in self._together.texts(mine, self._device)]
                raise InputError(f"{difference(found)} {_REMEDY}")
        # what torch.distributed raises if a process has ended, or does not answer in time
        except RuntimeError as error:
            raise InputError(
                "The processes that run the model together have lost each other: one has ended, or does something "
                f"else. {_REMEDY} The report was: {error!s:.200}"
            ) from error

    def _digest(self, live: Iterable[Sequence]) -> int:
        """Return a hash of the engine's settings, and of its requests and their progress. Equal engines have equal
        hashes.
        """
        before = {request.of.id: request for request in self._known}
        self._known = [_known(sequence, before.get(sequence.id)) for sequence in live]
        parts = (part for request in self._known for part in (request.digest, request.reached))
        told = (repr(self._settings).encode(), *parts)
        # 8 bytes with a sign, since processes compare it as an int64
        return int.from_bytes(hashlib.blake2b(b"".join(told), digest_size=8).digest(), "big", signed=True)

    def _requests(self) -> dict[int, Description]:
        """Return a description of each request and its progress, by number."""
        return {known.of.id: {**known.asked, **progress(known.of)} for known in self._known}


@dataclass(frozen=True)
class _DescribedRequest:
    """A request that has been described.

    Attributes:
        of: the request.
        asked: what the request was given.
        digest: a hash of ``asked``.
    """

    of: Sequence
    asked: Description
    digest: bytes

    @property
    def reached(self) -> bytes:
        """Return the request's progress as bytes for the hash: tokens read, and tokens generated."""
        return b"%d,%d;" % (self.of.fed, len(self.of.token_ids))


def _known(sequence: Sequence, before: _DescribedRequest | None) -> _DescribedRequest:
    """Return the description of a request, reusing the one made before for the same sequence object.

    A session's turn gets a new object once its prompt is known.
    """
    if before is not None and before.of is sequence:
        return before
    asked = described(sequence)
    return _DescribedRequest(sequence, asked, hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).digest())


def progress(sequence: Sequence) -> Description:
    """Return how far a request has got. This differs in a process whose engine takes other steps."""
    return {"tokens that were read": str(sequence.fed), "new tokens": str(len(sequence.token_ids))}


def described(sequence: Sequence) -> Description:
    """Return, as a mapping, everything that a request's tokens and memory depend on."""
    asked = {name: _shown(value) for name, value in _values(sequence.request) if name not in _ELSEWHERE}
    sampling = {name: _shown(value) for name, value in _values(sequence.request.sampling)}
    of_engine = {
        "policy": sequence.policy,
        "budget": sequence.budget,
        "guard": sequence.request.guard,
        "ends": sorted(sequence.ends),
    }
    of_engine |= {
        "stop": sorted({*sequence.request.stop}),
        "tokens in memory": sequence.held,
        "pins in memory": sequence.held_pins,
    }
    shown = {name: _shown(value) for name, value in of_engine.items()}
    return {"number": sequence.id, "prompt": list(sequence.prompt), **asked, **sampling, **shown}


def _values(of: Any) -> list[tuple[str, object]]:
    """Return the fields of a dataclass as pairs of name and value."""
    return [(field.name, getattr(of, field.name)) for field in fields(of)]


def _shown(value: object) -> str:
    """Return a value as text. A memory is shown by its fingerprint, since its tokens are part of the prompt."""
    return repr(value.fingerprint if isinstance(value, Snapshot) else value)


def difference(found: GenericSequence[Mapping[str, Any]]) -> str:
    """Return a sentence that says how the first process that differs from process 0 differs from it.

    Args:
        found: ``engine`` and ``requests`` of each process.
    """
    first = found[0]
    rank, other = next(
        ((rank, description) for rank, description in enumerate(found) if description != first),
        # hashes that differed although the descriptions are equal: the order in which requests came is not described
        (len(found) - 1, found[-1]),
    )
    between = f"in process 0 and {{}} in process {rank}."
    for name, value in first["engine"].items():
        if other["engine"][name] != value:
            return f"The engines have different options: `{name}` is {value} {between.format(other['engine'][name])}"
    mine, theirs = first["requests"], other["requests"]
    for number in dict.fromkeys([*mine, *theirs]):
        if number not in mine or number not in theirs:
            who, without = (0, rank) if number in mine else (rank, 0)
            return f"Process {who} has request {number}, and process {without} does not."
        if mine[number] != theirs[number]:
            if (place := _place(mine[number], theirs)) is not None:
                return f"Request {number} of process 0 is request {place} of process {rank}: their order differs."
            return f"Request {number} differs: {_part(mine[number], theirs[number], between)}"
    return f"Processes 0 and {rank} have added the same requests in different orders."


def _place(asked: Description, among: Mapping[str, Description]) -> str | None:
    """Return the number under which another process knows an equal request with equal progress; ``None`` if it knows
    none.
    """
    rest = {name: value for name, value in asked.items() if name != "number"}
    return next(
        (number for number, description in among.items() if rest | {"number": description["number"]} == description),
        None,
    )


def _part(mine: Description, theirs: Description, between: str) -> str:
    """Return a clause that says what differs first between two descriptions of a request, which must differ.

    Args:
        mine: what process 0 was given.
        theirs: what the other process was given.
        between: the end of the clause, with ``{}`` where the other process's value stands.
    """
    name = next(name for name, value in mine.items() if theirs[name] != value)
    if name != "prompt":
        return f"`{name}` is {mine[name]:.200} {between.format(theirs[name][:200])}"
    one, two = mine[name], theirs[name]
    at = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
    if at is None:
        return f"its prompt has {len(one)} tokens {between.format(len(two))}"
    return f"token {at} of its prompt is {one[at]} {between.format(two[at])}"
