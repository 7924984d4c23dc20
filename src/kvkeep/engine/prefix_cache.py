"""Common beginnings of prompts: the memory at the borders of prompt chunks is kept, and used again.

A prompt is read in chunks, and the policy evicts after each of them. So the memory after the first chunks depends on
their tokens alone, and prompts with the same first chunks can share it. The key is a hash of the tokens so far.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as GenericSequence
from itertools import islice
from typing import cast

from kvkeep import pins as spans
from kvkeep.engine.drops import due
from kvkeep.engine.kv_manager import KVManager
from kvkeep.engine.sampling_params import whole_within
from kvkeep.engine.sequence import Sequence
from kvkeep.errors import InputError
from kvkeep.snapshot.contents import Contents


def check_prefix_memory(most_bytes: object, chunk: int | None) -> int:
    """Return ``prefix_memory`` as an integer of bytes, after checking its range, and that prompts are read in chunks.

    Raises:
        InputError: the value is no whole number of 0 or more, or prompts are read whole, so that there is nothing to
            share.
    """
    found = whole_within("prefix_memory", most_bytes, 0, 2**63 - 1)
    if found and chunk is None:
        raise InputError(
            f"prefix_memory={found} has no effect without a `prefill_chunk`: a prompt that is read whole shares its "
            "memory with no other prompt. Give a `prefill_chunk`, or leave `prefix_memory` out."
        )
    return found


class PrefixCache:
    """Memories at the borders of prompt chunks in main memory, least recently used first.

    Args:
        most_bytes: the most that all of them may take; 0 keeps none.
        chunk: tokens of a chunk; ``None`` if prompts are read whole, and have no borders.
        weights: returns a hash of the model's weights as they are now, with an adapter.
        length_key: returns a value that is equal for prompts of two lengths if their beginnings may be shared.
        recall: returns an earlier chat's memory with which a prompt begins, if it has more tokens than the number.

    Attributes:
        held_bytes: bytes of all memories.
    """

    def __init__(
        self,
        most_bytes: int,
        chunk: int | None,
        weights: Callable[[str | None], str],
        length_key: Callable[[int], Hashable] = lambda n: None,
        recall: Callable[[Sequence, int], Contents | None] = lambda sequence, tokens: None,
    ) -> None:
        # without chunks nothing is kept, and 1 only spares the divisions below a case of their own
        self._most_bytes, self._chunk = most_bytes if chunk else 0, chunk or 1
        self._weights, self._length_key = weights, length_key
        self._found: OrderedDict[Hashable, Contents] = OrderedDict()
        self._recall = recall
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._found)

    def find(self, sequence: Sequence) -> Contents | None:
        """Return the longest memory with which a request's prompt begins: that of a common beginning, which ends at a
        border of chunks before the prompt's last token, or that of an earlier chat, if it is longer. It counts as used.

        Return ``None`` if there is none of either kind.
        """
        border = self._border(sequence)
        return self._recall(sequence, 0 if border is None else border.seen) or border

    def _border(self, sequence: Sequence) -> Contents | None:
        """Return the longest stored memory with which a prompt begins, and which leaves a token of it to read; ``None``
        if there is none. It counts as used.
        """
        if not self._found:
            return None
        # at least one token must be left to read, since the first answer token needs its logits
        borders = islice(self._borders(sequence), (len(sequence.prompt) - 1) // self._chunk)
        key = next((key for key in reversed(list(borders)) if key in self._found), None)
        if key is None:
            return None
        self._found.move_to_end(key)
        return self._found[key]

    def keep(self, sequence: Sequence, rows: KVManager) -> None:
        """Store a copy of a row whose sequence has just read whole chunks of its prompt, and drop the least recently
        used copies beyond the limit. If there is an equal copy, only mark that as used.

        Store nothing for a request that continues a memory, has generated tokens, stands within a chunk, or is larger
        than the limit.
        """
        if (
            not self._most_bytes
            or sequence.row is None
            or sequence.load
            or sequence.recalled
            or sequence.token_ids
            or sequence.fed % self._chunk
        ):
            return
        if rows.memory_of(sequence.row).occupied_bytes > self._most_bytes:
            return
        key = next(islice(self._borders(sequence), sequence.fed // self._chunk - 1, None))
        if key not in self._found:
            contents = _taken(sequence, rows)
            self._found[key] = contents
            self.held_bytes += contents.nbytes
        self._found.move_to_end(key)
        while self.held_bytes > self._most_bytes:
            self.held_bytes -= self._found.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Drop all stored prefixes."""
        self._found.clear()
        self.held_bytes = 0

    def _borders(self, sequence: Sequence) -> Iterator[Hashable]:
        """Yield the cache key of each chunk boundary in a prompt: a hash of the tokens before it, with the settings on
        which their memory depends.
        """
        if sequence.borders is None:
            sequence.borders = list(_hashes(sequence.prompt, self._chunk))
        weights, length = self._weights(sequence.request.adapter), self._length_key(len(sequence.prompt))
        for digest in sequence.borders:
            yield sequence.settings, weights, length, digest


def _taken(sequence: Sequence, rows: KVManager) -> Contents:
    """Return a copy of a row in main memory, without pins of tokens that are still to be read: other prompts may differ
    there.
    """
    contents = rows.take(cast(int, sequence.row))
    pins = contents.layers[0].pins if contents.layers else ()
    return contents.pinned(spans.within(pins, sequence.fed)) if spans.end(pins) > sequence.fed else contents


def _hashes(tokens: GenericSequence[int], chunk: int) -> Iterator[bytes]:
    """Yield a hash of the first chunk of tokens, a hash of the first two chunks, and so on, without a last chunk that
    is not full.
    """
    digest = hashlib.blake2b(digest_size=16)
    for end in range(chunk, len(tokens) + 1, chunk):
        # eight bytes for each id, so that no two lists of ids have the same bytes
        digest.update(array("q", tokens[end - chunk : end]).tobytes())
        yield digest.digest()


# The first moment of a request in its row.


def begin(sequence: Sequence, row: int, rows: KVManager, prefixes: PrefixCache) -> None:
    """Put a request into its row, for the first time or again: with its swapped-out memory, the memory that it
    continues, a stored beginning of its prompt, or nothing. Tokens that are due to be dropped are left out.

    The request's status and, the first time, the number of its tokens that count as read are set.
    """
    hosted = sequence.hosted
    contents = hosted.load() if hosted else _first_contents(sequence, prefixes)
    sequence.start()
    if contents is not None and (gone := due(sequence.drops, contents.seen)):
        contents = contents.without(gone)
    # a memory that was swapped out has the beginning already
    known = sequence.reading.known if sequence.reading is not None and hosted is None else 0
    rows.begin(
        row,
        policy=sequence.policy,
        budget=sequence.budget,
        sequence=sequence.request.sequence,
        pins=sequence.pins,
        prompt_tokens=len(sequence.to_read),
        contents=contents,
        known=known,
    )
    sequence.hosted = None
    if hosted is None:
        sequence.fed = sequence.cached = contents.seen if contents else known


def _first_contents(sequence: Sequence, prefixes: PrefixCache) -> Contents | None:
    """Return the memory with which a request first enters a row: the one that it continues, or else a stored beginning
    of its prompt, unless log-probabilities of the prompt are asked for. Return ``None`` if there is none.
    """
    if sequence.load and (contents := sequence.load()) is not None:
        return contents
    return None if sequence.scored else prefixes.find(sequence)
