"""Conversations that a client sends whole each time: their memories are sessions, found by the token ids of a prompt.

A finished chat becomes a session that the engine has named itself. A later prompt that begins with its tokens goes on
from it, and only the rest is read. While nothing was evicted, a memory can be cut back to any of its beginnings, so one
session serves all of a conversation's edited and repeated turns. Otherwise each turn stays a session of its own.
"""

from __future__ import annotations

import logging
import time
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from kvkeep.cache.prompt_kv import PromptKV, PromptReading, rows_to_read
from kvkeep.engine.admission import Settled
from kvkeep.engine.drops import Drop, Drops, LeftOut, Told, dropped, left_out, missing_messages, told_apart
from kvkeep.engine.kv_manager import KVManager
from kvkeep.engine.prompt_encoding import ConversationHistory
from kvkeep.engine.sampling_params import whole_within
from kvkeep.engine.sequence import Sequence
from kvkeep.engine.session import Session, SessionHost, Sessions
from kvkeep.engine.session_store import State
from kvkeep.errors import InputError, KVKeepError, SnapshotError
from kvkeep.models.device import reason_of
from kvkeep.parameters import CONVERSATION_TTL, CONVERSATIONS
from kvkeep.pins import end, spans, within
from kvkeep.policies._keep_prompt import keeps_whole
from kvkeep.snapshot.contents import Contents
from kvkeep.snapshot.fingerprint import Fingerprint
from kvkeep.snapshot.snapshot import Pending, Snapshot, SnapshotAbout

Mode = Literal["auto", "continue", "fresh"]
MODES: tuple[Mode, ...] = get_args(Mode)

LEAST_TOKENS = 16
"""A memory of fewer tokens is not worth a copy; vLLM's blocks have as many."""
_REASONS = 1024
"""Requests of which it is known why they were read anew."""
_PIECE = 1024
"""Tokens that are compared at once: only in the piece that differs is each token looked at."""
_log = logging.getLogger(__name__)

ANOTHER_READING = (
    "Messages before the last ones were left out. Those that stay were read in their presence, and a chat goes on from "
    "such a memory under conversations=continue alone. Send all messages, with drop_message."
)
"""Why a memory of which messages were left out does not serve under ``auto``."""
REWRITTEN = (
    "Messages before the last ones were left out, and the chat template writes those that stay in another way then: "
    "send all messages, with drop_message."
)
"""Why a memory of which messages were left out does not serve under a template."""


def usable_tokens(
    past: ConversationHistory,
    prompt: GenericSequence[int],
    mode: Mode,
    drops: Drops = (),
    *,
    for_later: bool = False,
    to_read: int = 1,
) -> int:
    """Return how many tokens of a memory serve a prompt that goes on from it; 0: the prompt is read anew.

    This is the rule of ``auto``: go on while the memory has evicted nothing, or if its policy has chosen what to keep
    for any later question. Another memory that has evicted tokens was cut for the question before, and goes on under
    ``continue`` alone. Both go on as a whole or not at all.

    Args:
        past: the tokens that the memory stands for, and to how many it can be cut back.
        prompt: the new tokens.
        mode: ``auto``, ``continue`` or ``fresh``.
        drops: what leaves the memory while the prompt is read. A memory serves if it has dropped just that by then.
        for_later: whether the memory's policy keeps tokens for questions that it does not know.
        to_read: last tokens of the prompt that are read although a memory that has evicted nothing has them: the last
            one tells the next token, and the policy may choose by the attention of more.
    """
    done = len(past.drops)
    if mode == "fresh" or past.drops != drops[:done]:
        return 0
    shared = common_beginning(past.ids, prompt)
    # beyond the place of a drop that is still to come, the memory has read tokens in the presence of those that go
    found = min([shared, len(prompt) - 1, *(drop.after for drop in drops[done:])])
    if past.shortest is None:
        return found if (mode == "continue" or for_later) and found == len(past.ids) else 0
    found = min(found, len(prompt) - to_read)
    return found if found >= past.shortest else 0


def common_beginning(one: array[int], other: GenericSequence[int]) -> int:
    """Return the number of equal tokens at the beginning of both."""
    most = min(len(one), len(other))
    for start in range(0, most, _PIECE):
        stop = min(start + _PIECE, most)
        mine, theirs = tuple(one[start:stop]), tuple(other[start:stop])
        if mine != theirs:
            return start + next(n for n, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
    return most


class Reader(NamedTuple):
    """Who may go on from a memory. Two readers that differ in anything never share one.

    Attributes:
        owner: of the request, such as an API key and a user behind it.
        salt: a further word that separates memories, vLLM's ``cache_salt``.
        settled: policy, budget and adapter.
        sequence: identity for everything random, under a policy that draws random numbers.
    """

    owner: str
    salt: str
    settled: Settled
    sequence: int = 0

    @property
    def asks_later(self) -> bool:
        """Return whether the reader's policy keeps what a second reading of the text would look up, so that its memory
        serves questions that were not known, and not what one question needs.
        """
        return self.settled.policy.rereads

    @classmethod
    def of(cls, sequence: Sequence) -> Reader:
        """Return who reads: a request's owner and salt, its policy, budget and adapter, and its identity for random
        numbers (0 if the policy draws none). Only requests with the same reader go on from each other's memories.
        """
        request, policy = sequence.request, sequence.policy
        settled = Settled(policy, sequence.budget, request.adapter)
        number = request.sequence if policy.stochastic else 0
        return cls(request.owner, request.cache_salt or "", settled, number)


class KeptPrompt(NamedTuple):
    """A prompt's token ids, and its keys and values as they were before anything was evicted.

    Attributes:
        ids: the token ids.
        kv: the keys and values.
        fingerprint: the model, its weights and the settings with which the prompt was read.
    """

    ids: array[int]
    kv: PromptKV
    fingerprint: Fingerprint

    def usable(self, prompt: GenericSequence[int], to_read: int) -> int:
        """Return how many first tokens of another prompt need not be read, since this kept prompt has their keys and
        values; the last ``to_read`` ones are read in any case.

        Return 0 if the other prompt has not all of this one's tokens, and its keys and values cannot be cut back.
        """
        shared = min(common_beginning(self.ids, prompt), len(prompt) - to_read)
        return shared if shared == len(self.ids) or self.kv.whole else 0

    def begins(self, longer: KeptPrompt) -> bool:
        """Return whether ``longer`` begins with all tokens of this kept prompt."""
        return common_beginning(self.ids, longer.ids) == len(self.ids)


@dataclass(eq=False)
class KeptConversation:
    """A session that the engine has named itself.

    Attributes:
        session: the session.
        reader: who may go on from it.
        used: seconds since 1970 at which a prompt used it last.
        prompt_tokens: tokens of its last prompt.
        continued: whether a later turn is kept in another session.
        writing: whether a new memory for it is on its way to the disk.
        prompt: its last prompt as it was before tokens of it were evicted; ``None``: nothing was, or it had to go.
    """

    session: Session
    reader: Reader
    used: float = field(default_factory=time.time)
    prompt_tokens: int = 0
    continued: bool = False
    writing: bool = False
    prompt: KeptPrompt | None = None
    _told: tuple[ConversationHistory, tuple[Told, ...]] | None = None

    def told(self, starts: frozenset[int]) -> tuple[Told, ...]:
        """Return the messages in the session's tokens up to its last finished turn, each with the positions and ids of
        its tokens that were not dropped. They are told apart once for each turn.

        Args:
            starts: tokens of which each begins a message.
        """
        past = self.past
        if self._told is None or self._told[0] is not past:
            self._told = past, told_apart(past.ids, starts, past.dropped)
        return self._told[1]

    @property
    def idle(self) -> bool:
        """Return whether nothing is about to replace the session's memory: no turn runs or waits, and no new memory is
        on its way to the disk.
        """
        return not self.writing and not self.session.running

    @property
    def nbytes(self) -> int:
        """Return the bytes of the session's memory, in main memory or a file, and of its prompt as it was before
        evictions, if that is kept.
        """
        return self.session.nbytes + (0 if self.prompt is None else self.prompt.kv.nbytes)

    @property
    def last_used(self) -> float:
        """Return when a prompt last went on from the session, or its memory was last replaced, as by a turn under its
        name; in seconds since 1970.
        """
        return max(self.used, self.session.memory.replaced)

    @property
    def past(self) -> ConversationHistory:
        """Return the session's history to the end of its last finished turn: the same object until a turn ends."""
        return self.session.history


class Conversations:
    """The memories of finished chats, least recently used first. Whoever uses them has the engine's turn.

    Args:
        sessions: of the engine; each memory is one of them.
        host: returns what a session needs of the engine. Holding that itself would keep the engine alive.
        most_bytes: the most that all of them may take, in main memory and in files; 0 keeps none.
        most_prompt_bytes: the most of it that prompts as they were before evictions may take; those of requests that
            run may take as much again. 0 keeps none.
        rows: returns the engine's rows.
        mode: how a prompt that continues a memory is read, see `usable_tokens`.
        ttl_s: seconds after which a memory that nobody used is forgotten.

    Raises:
        InputError: a value is out of range.
    """

    def __init__(
        self,
        sessions: Sessions,
        host: Callable[[], SessionHost],
        *,
        rows: Callable[[], KVManager],
        most_bytes: int,
        most_prompt_bytes: int = 0,
        mode: str,
        ttl_s: float,
    ) -> None:
        found = next((known for known in MODES if known == mode), None)
        if found is None:
            raise InputError(f"conversations={mode!r:.40} is unknown; give one of {', '.join(CONVERSATIONS.words)}.")
        if not CONVERSATION_TTL.allows(ttl_s):
            raise InputError(f"conversation_ttl={ttl_s!r:.40} is no time; give seconds above 0.")
        self._most_bytes = whole_within("conversation_memory", most_bytes, 0, 2**63 - 1)
        self._sessions, self._make_host, self._mode, self._ttl_s = sessions, host, found, ttl_s
        self._rows, self._most_prompt_bytes = rows, min(most_prompt_bytes, self._most_bytes)
        self._reasons: OrderedDict[int, str] = OrderedDict()
        self._entries: OrderedDict[str, KeptConversation] = OrderedDict()
        # of requests that run: one that ends in any way takes its own along
        self._readings: weakref.WeakSet[PromptReading] = weakref.WeakSet()
        if self.active:
            self._open_saved()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def _host(self) -> SessionHost:
        """Return what a session needs of the engine."""
        return self._make_host()

    @property
    def active(self) -> bool:
        """Return whether memories are kept and looked for: there are bytes for them, and the mode is not ``fresh``."""
        return bool(self._most_bytes) and self._mode != "fresh"

    @property
    def nbytes(self) -> int:
        """Return the bytes of all memories, in main memory or in files, and of the prompts kept beside them."""
        return sum(entry.nbytes for entry in self._entries.values())

    def find(self, sequence: Sequence, beyond: int = 0) -> Contents | None:
        """Return the longest memory of an earlier chat with which a request's prompt begins, cut back to the tokens
        that they share. It counts as used.

        Return ``None`` if there is none, for a request without an owner or with a guard, and if looking for it fails.
        Return ``None`` as well where the longest one has evicted tokens, and the earlier prompt itself is kept: this
        becomes the beginning of ``sequence.reading``, and the policy then chooses anew among all tokens.

        Args:
            sequence: the request, which is about to be read. Its ``reading`` is set where the prompt's keys and values
                are known or to be kept, and it is marked as ``recalled`` if a memory or a kept prompt serves.
            beyond: a memory of so many tokens is there already, so only longer ones count.
        """
        # a guarded request chooses its budget at the end of a prompt that was read from its beginning
        if not self.active or not sequence.request.owner or sequence.levels:
            return None
        try:
            return self._find(sequence, beyond)
        except Exception as error:  # no memory for a copy, for example: the prompt is read anew
            _log.warning("A conversation was not continued: %s", reason_of(error))
            sequence.recalled, sequence.reading = False, None
            return None

    def _find(self, sequence: Sequence, beyond: int) -> Contents | None:
        """Return what `find` returns, and set what it sets, for a request that may go on from a memory. Forget expired
        memories before. Raise whatever fails.
        """
        self.expire()
        least = max(beyond + 1, LEAST_TOKENS)
        known = self._known(sequence, least)
        # under `auto` a memory takes the place of the kept prompt only if it has evicted nothing
        if known is not None and self._mode == "auto":
            contents = self._memory(sequence, known[1].tokens, whole=True)
        else:
            contents = self._memory(sequence, least)
        if contents is None and known is not None:
            entry, before = known
            self._touch(entry)
            sequence.recalled = True
            sequence.reading = self._reading(sequence, before)
        elif contents is None or contents.shortest(self._rows().windows) is not None:
            # a memory that has evicted tokens does not tell what the prompt was before
            sequence.reading = self._reading(sequence)
        return contents

    def _reading(self, sequence: Sequence, before: PromptKV | None = None) -> PromptReading | None:
        """Return what is known of a prompt that is about to be read, and kept of it: its beginning that was read
        ``before``, and the bytes that the prompt will take if it is worth keeping; these count as taken from now on.
        Return ``None`` if there is neither.
        """
        nbytes = len(sequence.prompt) * self._rows().token_bytes if self._keeps_prompt(sequence) else 0
        if before is None and not nbytes:
            return None
        self._readings.add(reading := PromptReading(before, nbytes=nbytes))
        return reading

    def _memory(self, sequence: Sequence, least: int, *, whole: bool = False) -> Contents | None:
        """Return the longest memory with which a prompt begins, cut back to what they share; ``None`` if there is none.

        Mark the memory as used, and the sequence as recalled. If the client has left messages of the memory out, put
        them into the sequence's prompt again, with the drops by which they leave. Forget memories that cannot be read.

        Args:
            sequence: the request, which is about to be read.
            least: the fewest tokens that count.
            whole: return ``None`` if the longest memory has evicted tokens.
        """
        while (best := self._best(sequence, least)) is not None:
            entry, tokens, shorter = best
            if whole and entry.past.shortest is None:
                return None
            try:
                contents = entry.session.memory.contents()
            except (KVKeepError, OSError) as error:  # another model's, or its file has gone: the prompt is read anew
                _log.warning("The conversation %s cannot be continued, and is forgotten: %s", entry.session.name, error)
                self._forget(entry)
                if entry.session.closed:
                    continue
                return None  # it is about to get a new memory
            if contents is None:  # a session that has just been closed
                return None
            contents = contents.cut_back(tokens)
            self._touch(entry)
            sequence.recalled = True
            if shorter is not None:  # `kvkeep.engine.prefix_cache.begin` drops what is due
                rest = sequence.prompt[shorter.shared :]
                new = (Drop(tokens, shorter.spans),) if shorter.spans else ()
                sequence.recall((*entry.past.ids[:tokens], *rest), (*entry.past.drops, *new))
            return contents
        return None

    def _keeps_prompt(self, sequence: Sequence) -> bool:
        """Return whether a prompt's keys and values are to be kept as they are before evictions: the request's memory
        may be kept, tokens may have to go, a later prompt could go on from them, and there are bytes left for them.
        """
        if not self._most_prompt_bytes or not self.wants(sequence) or not _may_resume(sequence):
            return False
        rows, tokens = self._rows(), len(sequence.prompt)
        taken = sum(reading.nbytes for reading in self._readings)  # by requests that run
        fits = taken + tokens * rows.token_bytes <= self._most_prompt_bytes
        # where there are states beside keys and values, these alone are nothing to go on from
        return fits and not rows.alone and self._may_evict(sequence)

    def _may_evict(self, sequence: Sequence) -> bool:
        """Return whether the budget may be too small for a request's prompt and all tokens that it may generate."""
        tokens = len(sequence.prompt) + sequence.request.sampling.max_new_tokens
        return self._rows().may_evict(sequence.policy, sequence.budget, tokens)

    def _to_read(self, sequence: Sequence) -> int:
        """Return how many of a prompt's last tokens are read, whatever a memory has of them: 1, or as many as the
        policy needs to see before it evicts.
        """
        return (rows_to_read(sequence.policy) or 1) if self._may_evict(sequence) else 1

    def _known(self, sequence: Sequence, least: int) -> tuple[KeptConversation, PromptKV] | None:
        """Return the conversation of the same reader whose last prompt, kept as it was, shares most tokens with a
        request's prompt, and the keys and values of these tokens. Drop kept prompts of other weights.

        Return ``None`` if all share fewer than ``least`` tokens, or the request cannot go on from a kept prompt.
        """
        if not _may_resume(sequence):
            return None
        reader, best = Reader.of(sequence), None
        to_read = self._to_read(sequence)
        mine = [entry for entry in reversed(self._entries.values()) if entry.prompt and entry.reader == reader]
        fingerprint = self._host.admission.fingerprint(*reader.settled) if mine else None
        for entry in mine:
            if entry.prompt is None or entry.prompt.fingerprint != fingerprint:
                entry.prompt = None  # the model's weights have changed since
                continue
            tokens = entry.prompt.usable(sequence.prompt, to_read)
            if tokens >= least and self._turns_alike(tokens, sequence, entry.prompt.ids):
                best, least = (entry, entry.prompt.kv, tokens), tokens + 1
        return None if best is None else (best[0], best[1].first(best[2]))

    def _best(self, sequence: Sequence, least: int) -> tuple[KeptConversation, int, LeftOut | None] | None:
        """Return the conversation from which a prompt has least to read, how many tokens of its memory serve, and what
        the client has left out of it (``None``: nothing). Return ``None`` if none serves for ``least`` tokens or more.
        Note why a memory of which messages were left out does not serve.
        """
        best = self._longest(sequence, least)
        most = least - 1 if best is None else best[1]
        # a memory from which messages were left out, if it leaves even less to read
        shorter = max(self._shorter(sequence, most), key=lambda found: found[1].shared, default=None)
        if shorter is not None:
            entry, found = shorter
            if not (why := self._against(sequence, entry, found)):
                return entry, found.tokens, found
            self._note_reason(sequence, why)
        # no memory serves to its end, although the chat goes on from the messages of one: they became other tokens
        elif (best is None or best[1] < len(best[0].past.ids)) and any(
            self._missing(sequence, entry) for entry in self._entries.values()
        ):
            self._note_reason(sequence, REWRITTEN)
        return None if best is None else (*best, None)

    def _note_reason(self, sequence: Sequence, why: str) -> None:
        """Note why a request does not go on from a memory, for its result and for `reason`. Only the reasons of the
        last `_REASONS` requests are kept.
        """
        sequence.read_anew = self._reasons[sequence.id] = why
        while len(self._reasons) > _REASONS:
            self._reasons.popitem(last=False)

    def reason(self, number: int) -> str:
        """Return why the request of a number does not go on from a memory of which its client has left out messages.
        Return an empty text if it does, if there is no such memory, or if too many reasons were noted since.
        """
        return self._reasons.get(number, "")

    def _shorter(self, sequence: Sequence, most: int) -> Iterator[tuple[KeptConversation, LeftOut]]:
        """Yield the conversations of which a prompt leaves out messages, each with what it leaves out, if more than
        ``most`` tokens of the prompt are shared. The most recently used one comes first.
        """
        starts = self._host.admission.words.turn_starts
        # drops of a request count positions of its own prompt, which are others with the messages in it again; and
        # without tokens that begin a message, messages cannot be told apart
        if sequence.drops or not starts:
            return
        reader, told = Reader.of(sequence), told_apart(sequence.prompt[:-1], starts)  # one token is left to read
        for entry in reversed(self._entries.values()):
            ids = entry.past.ids
            if entry.reader != reader or len(ids) <= most:
                continue
            found = left_out(entry.told(starts), told)
            # a memory of which nothing is or was left out is for `_longest` alone
            if found is None or found.shared <= most or not (found.spans or entry.past.drops):
                continue
            shortest = len(ids) if entry.past.shortest is None else entry.past.shortest
            whole = found.tokens == len(ids)  # the tokens of the answer say the same as its message
            if found.tokens >= shortest and (whole or self._missing(sequence, entry) is not None):
                yield entry, found

    def _against(self, sequence: Sequence, entry: KeptConversation, found: LeftOut) -> str:
        """Return why a prompt may not go on from a memory of which it leaves out messages; empty if it may: the mode is
        ``continue``, pins are the same, and positions and frequencies allow it.
        """
        if self._mode != "continue":
            return ANOTHER_READING
        gone = (*entry.past.dropped, *found.spans)
        # behind the first token that is left out, a position of the prompt is another one in the memory
        if sequence.pins != within(entry.session.pins, found.tokens) or end(sequence.pins) > min(
            start for start, _ in gone
        ):
            return "Tokens are pinned that the conversation does not pin, or behind the messages that are left out."
        tokens = found.tokens + len(sequence.prompt) - found.shared
        admission = self._host.admission
        if why := admission.rule.refusal(found.tokens, tokens, of=len(entry.past.ids)):
            return why
        if not admission.fits(tokens, sequence.request.sampling):
            return "With the messages that are left out, the conversation is longer than the model was trained for."
        return ""

    def _missing(self, sequence: Sequence, entry: KeptConversation) -> int | None:
        """Return how many messages of a kept conversation the chat of a request leaves out; ``None`` if the chat does
        not go on from this conversation, has another reader, or its messages are not known.
        """
        if entry.reader != Reader.of(sequence):
            return None
        return missing_messages(entry.past.messages, sequence.request.noted_messages)

    def _longest(self, sequence: Sequence, least: int) -> tuple[KeptConversation, int] | None:
        """Return the conversation of the same reader and pins whose memory serves for most tokens of a prompt, and how
        many these are; ``None`` if all serve for fewer than ``least``.
        """
        reader, best = Reader.of(sequence), None
        rules: dict[str, Any] = {"for_later": reader.asks_later, "to_read": self._to_read(sequence)}
        for entry in reversed(self._entries.values()):  # of equally long ones the last used is taken
            if entry.reader != reader:
                continue
            tokens = usable_tokens(entry.past, sequence.prompt, self._mode, sequence.drops, **rules)
            pins = within(entry.session.pins, tokens)
            asked = within(sequence.pins, tokens)
            # a prompt that stays whole pins what is held of it, and so whatever the memory pins
            same = pins == asked or (keeps_whole(sequence.policy) and spans((*pins, *asked)) == asked)
            fits = same and self._turns_alike(tokens, sequence, entry.past.ids)
            if fits and tokens >= least:
                best, least = (entry, tokens), tokens + 1
        return best

    def _turns_alike(self, tokens: int, sequence: Sequence, ids: array[int]) -> bool:
        """Return whether the first ``tokens`` tokens of the text ``ids`` have the same keys as in a request's prompt: a
        model may rotate them by the length of the whole text.
        """
        return self._host.admission.rule.refusal(tokens, len(sequence.prompt), of=len(ids)) is None

    def wants(self, sequence: Sequence) -> bool:
        """Return whether the memory of a finished request may be kept, so that a copy of it is worth its time.

        It may not if no memories are kept at all, if the request has no name to keep it under, or if it has a guard:
        `find` leaves these out as well.
        """
        return self.active and sequence.request.keep_as is not None and not sequence.levels

    def keep(self, sequence: Sequence, contents: Contents) -> Pending | None:
        """Keep the memory of a finished request for which `wants` is true, if a later prompt may go on from it.

        Return the write to the disk for which the request's last event waits; ``None`` if there is none. If keeping
        the memory fails, only log it: the conversation goes on from an earlier turn.
        """
        try:
            return self._keep(sequence, contents)
        except Exception as error:  # a tokenizer that fails, for example
            _log.warning("A conversation was not kept: %s", error)
            return None

    def _keep(self, sequence: Sequence, contents: Contents) -> Pending | None:
        """Keep the memory of a finished request in a new session, or in that of an earlier turn for which it serves as
        well. Return the write for which the request's last event waits; ``None`` if there is none, or if the memory is
        not worth keeping, as when another one covers it.
        """
        past = self._history(sequence, contents)
        reader = Reader.of(sequence)
        longer = (*past.ids, *past.pending, 0)  # the shortest prompt of a next turn, whatever its last token is
        useful = usable_tokens(past, longer, self._mode, past.drops, for_later=reader.asks_later)
        fingerprint = self._host.admission.fingerprint(*reader.settled)
        prompt = self._prompt_of(sequence, past, fingerprint)
        if not (useful or prompt) or contents.nbytes > self._most_bytes:
            return None
        mates = [entry for entry in self._entries.values() if entry.reader == reader and _same_pins(entry.past, past)]
        if (same := next((entry for entry in mates if _covers(entry.past, past)), None)) is not None:
            self._touch(same)
            return None
        replaced = self._replaced(past, mates)
        # one of them gets the memory, and the others are forgotten once it is kept
        target = replaced.pop() if replaced else self._made(sequence, reader)
        if target is None:
            return None

        def finish() -> None:
            """Give the conversation its prompt, and forget what the new memory and the new prompt take the place of."""
            for mate in mates:
                if prompt is not None and mate.prompt is not None and mate.prompt.begins(prompt):
                    mate.prompt = None  # the new one serves in its place
            target.prompt_tokens, target.prompt = len(sequence.prompt), prompt
            for other in replaced:
                self._forget(other)

        snapshot = Snapshot(contents, fingerprint, past.tokens)
        return self._kept(target, past, snapshot, finish)

    def _prompt_of(self, sequence: Sequence, past: ConversationHistory, fingerprint: Fingerprint) -> KeptPrompt | None:
        """Return the prompt of a finished chat as it was before evictions. Return ``None`` if its memory can still be
        cut back, if its keys and values were not kept as a whole, or if they are too large.
        """
        if sequence.reading is None or past.shortest is not None:
            return None
        kv = sequence.reading.taken(len(sequence.prompt), len(self._rows().windows))
        if kv is None or kv.nbytes > self._most_prompt_bytes:
            return None
        return KeptPrompt(array("i", sequence.prompt), kv, fingerprint)

    def _replaced(self, past: ConversationHistory, mates: GenericSequence[KeptConversation]) -> list[KeptConversation]:
        """Return those of ``mates`` whose next turn a new memory is, and for which it serves as well.

        Of the others, those that differ from it in their last answer at most are marked as ``continued``: they are the
        first to go.

        Args:
            past: what the new memory stands for.
            mates: conversations of the same reader and pins.
        """
        found = []
        for entry in mates:
            shared = common_beginning(entry.past.ids, past.ids)
            if shared < entry.prompt_tokens:
                continue
            # what was dropped from a conversation is gone for its earlier turns, too: one memory is enough
            before = entry.past.drops
            drops = past.drops != before == past.drops[: len(before)]  # more than before, and the same ones first
            cut = past.shortest is not None and past.shortest <= shared and past.drops == before
            same = (cut or drops) and self._says(past.ids[shared:], entry.past.ids[shared:])
            # such a memory itself serves no other question, only its prompt did
            idle = self._mode == "auto" and entry.past.shortest is None and not entry.reader.asks_later
            entry.continued = not (entry.idle and (same or idle))
            if not entry.continued:
                found.append(entry)
        return found

    def _says(self, ids: array[int], beginning: array[int]) -> bool:
        """Return whether the text of ``ids`` begins with that of ``beginning``, white space and special tokens aside:
        the text of an answer may become other tokens than were drawn.
        """
        if not beginning:
            return True
        # more tokens than the beginning has: the same text may take more of them
        text, wanted = (self._host.admission.text_of(part[: 2 * len(beginning) + 8]) for part in (ids, beginning))
        return bool(wanted) and text.startswith(wanted)

    def _kept(
        self,
        entry: KeptConversation,
        past: ConversationHistory,
        snapshot: Snapshot,
        replace: Callable[[], None],
    ) -> Pending | None:
        """Give a conversation its new memory. Once this is kept, call ``replace``, which forgets what it takes the
        place of, and forget conversations beyond the limits.

        Return the write for which the request's last event waits; ``None`` if the memory is kept already.
        """

        def cancel() -> None:
            """Leave the conversation as it was, or forget it if the memory would have been its first one."""
            entry.writing = False
            if not entry.past.ids:  # it is a new one
                self._forget(entry)

        def finish() -> None:
            """Take the written memory over, or log why that failed, and leave the conversation as it was."""
            try:
                if pending is not None:
                    pending.finish()
            except Exception as error:  # a full disk, for example: the answer is there all the same
                _log.warning("A conversation was not kept: %s", error)
                cancel()
                return
            entry.writing = False
            replace()
            self._touch(entry)
            self._trim()

        pending = entry.session.memory.go_on(past, snapshot, written=True)
        if pending is not None:
            entry.writing = True
            return Pending(pending.writing, finish, cancel)
        finish()
        return None

    def _made(self, sequence: Sequence, reader: Reader) -> KeptConversation | None:
        """Add a conversation without a memory under the name that a request gives it, and return it; ``None`` if the
        name is taken.
        """
        name = sequence.request.keep_as
        assert name is not None
        if name in self._sessions.names:
            _log.warning("A conversation was not kept: there is a session %s already.", name)
            return None
        state, seed = State(ConversationHistory()), sequence.request.sequence
        session = self._added(name, reader, state, seed)
        self._entries[name] = entry = KeptConversation(session, reader)
        return entry

    def _added(self, name: str, reader: Reader, state: State, seed: int) -> Session:
        """Return a new session of the engine with this name, policy, budget and adapter. Once it is closed, its
        conversation is forgotten.
        """
        # weak, since the session is held here: an engine that nobody holds is freed without the collector of cycles
        note, on_close = _note(reader, name), weakref.WeakMethod(self._closed)

        def closed(session: Session) -> None:
            """Forget the session's conversation, if the conversations are still there."""
            if (forget := on_close()) is not None:
                forget(session)

        return self._sessions.add(self._host, name, reader.settled, state, seed=seed, note=note, on_close=closed)

    def _closed(self, session: Session) -> None:
        """Forget the conversation of a session that was closed, and its prompt, unless another session has the name."""
        entry = self._entries.get(session.name or "")
        if entry is not None and entry.session is session:
            entry.prompt = None
            del self._entries[session.name or ""]

    def _history(self, sequence: Sequence, contents: Contents) -> ConversationHistory:
        """Return the tokens and messages that the memory of a finished chat stands for, and to how many tokens it can
        be cut back.
        """
        ids = array("i", (*sequence.prompt, *sequence.token_ids))
        n, messages = contents.seen, sequence.request.noted_messages
        said = sequence.tail.text if sequence.tail else ""
        answered = (*messages, {"role": "assistant", "content": said}) if messages else ()
        shortest, drops = contents.shortest(self._rows().windows, dropped(sequence.drops)), sequence.drops
        if shortest is not None and drops:  # what was dropped does not come back
            shortest = max(shortest, drops[-1].after)
        history = ConversationHistory(ids[:n], tuple(ids[n:]), answered, shortest=shortest, drops=drops)
        return history.held_in(contents)

    def _open_saved(self) -> None:
        """Open the conversations of the engine's session folder, the oldest first, then forget those that are expired
        or beyond the limits. Files of other sessions, or of another model, stay as they are.
        """
        for kept, about in self._sessions.described():
            try:
                if (found := _reader_of(about, kept.name)) is None:
                    continue
                settled = self._host.admission.settle(None, None, about.fingerprint)
                past = ConversationHistory.described(about)
                number = whole_within("sequence", about.note.get("sequence", 0), -(2**63), 2**63 - 1)
            except KVKeepError as error:
                _log.warning("The conversation %s cannot be used: %s", kept.name, error)
                continue
            assert kept.name is not None
            reader = Reader(*found, settled, number if settled.policy.stochastic else 0)
            state = State(past, kept)
            session = self._added(kept.name, reader, state, number)
            # files do not note where the last prompt ended
            entry = KeptConversation(session, reader, used=about.written, prompt_tokens=len(past.ids))
            self._entries[kept.name] = entry
        self.expire()
        self._trim()

    def _touch(self, entry: KeptConversation) -> None:
        """Mark a conversation as the most recently used one, unless it was closed meanwhile."""
        name = entry.session.name
        if name is not None and not entry.session.closed:
            entry.used = time.time()
            self._entries[name] = entry
            self._entries.move_to_end(name)

    def expire(self) -> None:
        """Forget the conversations that nobody has used for longer than the limit, with their files, and those whose
        sessions were closed. One that is about to get a new memory stays.
        """
        before = time.time() - self._ttl_s
        for entry in list(self._entries.values()):
            if entry.last_used < before or entry.session.closed:
                self._forget(entry)

    def _trim(self) -> None:
        """Forget the least recently used conversations beyond the limits of bytes, earlier turns of others first.

        Of each the kept prompt goes before the memory. One that is about to get a new memory stays.
        """
        over = self.nbytes - self._most_bytes
        prompts = sum(entry.prompt.kv.nbytes for entry in self._entries.values() if entry.prompt is not None)
        for entry in sorted(self._entries.values(), key=lambda entry: (not entry.continued, entry.last_used)):
            if entry.prompt is not None and (over > 0 or prompts > self._most_prompt_bytes):
                over, prompts = over - entry.prompt.kv.nbytes, prompts - entry.prompt.kv.nbytes
                entry.prompt = None
            if over > 0 and entry.idle:
                over -= entry.session.nbytes
                self._forget(entry)

    def _forget(self, entry: KeptConversation) -> None:
        """Forget a conversation, and delete its file. One that is about to get a new memory stays."""
        if entry.session.closed:
            self._closed(entry.session)
        elif entry.idle:
            entry.session.discard()


def _may_resume(sequence: Sequence) -> bool:
    """Return whether a request could go on from a prompt as it was before evictions: it drops no tokens, and its policy
    can choose among all tokens once it has seen the last ones.
    """
    return not sequence.drops and rows_to_read(sequence.policy) is not None


def _begins(past: ConversationHistory, longer: ConversationHistory) -> bool:
    """Return whether the tokens of ``longer`` begin with all tokens of ``past``."""
    return len(past.ids) <= len(longer.ids) and longer.ids[: len(past.ids)] == past.ids


def _same_pins(one: ConversationHistory, other: ConversationHistory) -> bool:
    """Return whether two memories pin the same among their first tokens, as far as both have them."""
    tokens = min(len(one.ids), len(other.ids))
    return within(one.pins, tokens) == within(other.pins, tokens)


def _covers(past: ConversationHistory, beginning: ConversationHistory) -> bool:
    """Return whether the memory of ``past`` can be cut back to the tokens of ``beginning``, so that it serves in its
    place.
    """
    serves = past.shortest is not None and past.shortest <= len(beginning.ids) and past.drops == beginning.drops
    return serves and _begins(beginning, past)


# What a file notes of its reader, beside the policy, the budget and the adapter of its fingerprint.

_NOTE = "conversation"


def _note(reader: Reader, name: str) -> dict[str, Any]:
    """Return what the file of a conversation notes: owner and salt of its reader, and the name under which it was kept,
    which tells it from a copy under another name.
    """
    return {_NOTE: {"owner": reader.owner, "salt": reader.salt, "name": name}}


def _reader_of(about: SnapshotAbout, name: str | None) -> tuple[str, str] | None:
    """Return the owner and the salt that a session's file notes; ``None`` if the session is not one that the engine
    keeps of a chat under this name.

    A copy under another name, such as a fork, is its client's own session, and never expires.

    Raises:
        SnapshotError: the note is of another form.
    """
    found = about.note.get(_NOTE)
    if not isinstance(found, Mapping) or found.get("name") != name:
        return None
    owner, salt = found.get("owner"), found.get("salt")
    if not isinstance(owner, str) or not isinstance(salt, str) or not owner:
        raise SnapshotError("The note of the file is none that an engine writes.")
    return owner, salt
