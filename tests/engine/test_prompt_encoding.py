"""What a memory stands for, as files note it, and questions about a text that was remembered."""

import pytest
import torch

from kvkeep.engine import Request
from kvkeep.engine.drops import Drop
from kvkeep.engine.prompt_encoding import ConversationHistory, question_of
from kvkeep.errors import InputError, SnapshotError
from kvkeep.models.tokenization import Opening
from kvkeep.snapshot.snapshot import SnapshotAbout

USER = {"role": "user", "content": "Who?"}
ANSWER = {"role": "assistant", "content": "Anna."}


def about(tokens=5, **note):
    ids = None if tokens is None else torch.arange(tokens)
    return SnapshotAbout(None, ids, note, pins=((0, 2),), budgets=(8, 8), nbytes=1, written=0.0)


def test_a_history_is_what_the_file_says(no_checked_annotations):
    noted = {"pending": [7], "messages": [USER, ANSWER], "shortest": 3, "drops": [(4, [(1, 2)])], "starts": [-1, 2]}
    found = ConversationHistory.described(about(**noted))
    assert (list(found.ids), found.pending, found.messages) == ([0, 1, 2, 3, 4], (7,), (USER, ANSWER))
    assert (found.shortest, found.drops, found.starts) == (3, (Drop(4, ((1, 2),)),), (-1, 2))
    assert (found.pins, found.budgets) == (((0, 2),), (8, 8))


def test_a_note_that_no_session_writes_is_refused(no_checked_annotations):
    with pytest.raises(SnapshotError, match="does not say which tokens it stands for"):
        ConversationHistory.described(about(tokens=None))
    for note in [
        {"pending": 5},
        {"pending": ["x"]},
        {"messages": 5},
        {"opening": 5},
        {"shortest": "x"},
        {"shortest": 6},
        {"drops": [(6, [(1, 2)])]},
        {"messages": [USER, ANSWER], "starts": [0]},
        {"starts": [-2]},
    ]:
        with pytest.raises(SnapshotError, match="The snapshot's note is none that a session writes"):
            ConversationHistory.described(about(**note))


def test_a_question_follows_a_remembered_text_as_the_text_was_read():
    templated, raw = Opening("end."), Opening("end.", raw=True)
    assert question_of(Request(prompt="Who?"), templated) == ("Who?", ())
    assert question_of(Request(prompt="Who?", raw=True), raw) == ("Who?", ())
    assert question_of(Request(messages=[USER, ANSWER, USER]), templated) == ("Who?", (ANSWER, USER))
    system = {"role": "system", "content": "Be kind."}
    for request, opening, said in [
        (Request(prompt="Who?", raw=True), templated, "made with the chat template, so `raw=True` has no place"),
        (Request(messages=[USER]), raw, "holds a text without the chat template, so it is followed by a prompt"),
        (Request(messages=[system, USER]), templated, "a text as the beginning of the user's first message, so"),
    ]:
        with pytest.raises(InputError, match=said):
            question_of(request, opening)
