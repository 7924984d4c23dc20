"""What does a chat still know of its system message after thirty turns, with the message pinned and without?

    python bench/system_message.py MODEL --text FILE --output ROWS.jsonl [--turns 30] [--budgets 256,512]

Each conversation begins with a system message that states facts about persons. Then a user sends a few sentences of the
text in each turn and asks what happens there, and the model answers in a few words. In the end the facts are asked for,
each in a copy of the conversation. A model without a chat template reads the same as plain text. As in `kvkeep chat`,
the memory is cut after each turn. The full cache comes first: it says whether the model can tell at all. Rows that the
file has already of the same model, text and turns are not measured again.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

from conversation_recall import difference, next_turn
from lib import finish, positive, show
from lib.rows import named, save, saved

import kvkeep
from kvkeep import SamplingParams
from kvkeep.evals.synthetic import sentences
from kvkeep.evals.tasks import recall
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.load import find
from kvkeep.models.tiny.documents import Document, document
from kvkeep.models.tokenization import encode, encode_chat

FACTS = 4
TOLD = "Keep these facts in mind for the whole conversation."
ASKED = "What happens here?"
SENTENCES = 3
NEW = 16
LOOK = "text-dev"


def begun(checkpoint: Checkpoint, system: str, question: str) -> tuple[list[int], int]:
    """The tokens of the first turn, and how many of them are the system message's."""
    if checkpoint.tokenizer.chat_template is None:
        head = encode(checkpoint, system, raw=True)[0].tolist()
        return [*head, *next_turn(checkpoint, question, "")], len(head)
    said = {"role": "system", "content": system}
    first, other = (
        encode_chat(checkpoint, [said, {"role": "user", "content": text}])[0].tolist() for text in (question, "!")
    )
    return first, next(n for n, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1])


def made(number: int, count: Any) -> Document:
    """Facts and questions about them, with a sentence between the facts."""
    filler = iter(["That is all there is to it."] * FACTS)
    return document(
        9000 + number, n_facts=FACTS, n_questions=FACTS, tokens=40 * FACTS, first_kind=number * FACTS, style=LOOK,
        filler=filler, count=count,
    )  # fmt: skip


def rights(
    engine: kvkeep.Engine, checkpoint: Checkpoint, number: int, pinned: bool, text: list[str], turns: int
) -> list[bool]:
    """Hold a conversation, and return which facts of its system message are known in the end."""
    told = made(number, lambda part: recall.count_tokens(checkpoint, part))
    pieces = iter(text[number * turns * SENTENCES :])
    users = [f"{' '.join(islice(pieces, SENTENCES))}\n\n{ASKED}" for _ in range(turns)]
    first, held = begun(checkpoint, f"{TOLD} {told.text}", users[0])
    talk = engine.session(pins=((0, held),) if pinned else ())
    short = SamplingParams(max_new_tokens=NEW, temperature=0.0)
    for turn, user in enumerate(users):
        talk.ask(first if turn == 0 else next_turn(checkpoint, user, ""), short)
    wording, found = recall.wording_of(checkpoint, LOOK), []
    for question in told.questions:
        (copy,) = talk.fork()
        asked = next_turn(checkpoint, recall.ending_of(question), question.lead)
        reply = copy.ask(asked, SamplingParams(max_new_tokens=recall.NEW_TOKENS[wording], temperature=0.0))
        found.append(recall.right(wording, question, reply.text))
        copy.close()
    talk.close()
    return found


def main() -> None:
    """Measure what is missing, and show the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="hub name, folder or GGUF file")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--turns", type=positive, default=30)
    parser.add_argument("--conversations", type=positive, default=12)
    parser.add_argument("--budgets", type=lambda words: [int(word) for word in words.split(",")], default=[256, 512])
    parser.add_argument("--policy", default=str(kvkeep.policies.CONVERSATION))
    options = parser.parse_args()
    whole = options.text.read_text(encoding="utf-8")
    text, needed = sentences(whole), options.conversations * options.turns * SENTENCES
    if len(text) < needed:
        parser.error(
            f"{options.text} has {len(text)} sentences, and {options.conversations} conversations of {options.turns} "
            f"turns need {needed}: give a longer text, or fewer of them"
        )
    checkpoint = find(options.model)
    model, _ = kvkeep.load(options.model)
    arms = [("full", 0, False), *((options.policy, b, pin) for b in options.budgets for pin in (True, False))]
    rows: dict[tuple[str, int, bool, int], list[bool]] = {}
    about = {"model": options.model, "turns": options.turns, "of": named(whole)}
    for row in saved(options.output, about):
        rows[row["policy"], row["budget"], row["pinned"], row["number"]] = row["right"]
    engines = {
        arm: kvkeep.Engine(model, checkpoint.tokenizer, policy=arm[0], budget=arm[1] or 6000, rows=1) for arm in arms
    }
    for number in range(options.conversations):
        for arm in arms:
            if (*arm, number) in rows:
                continue
            right = rights(engines[arm], checkpoint, number, arm[2], text, options.turns)
            rows[*arm, number] = right
            line = {"policy": arm[0], "budget": arm[1], "pinned": arm[2], "number": number, "right": right}
            save(options.output, [{**about, **line}])
    base = [mean(rows[*arms[0], n]) for n in range(options.conversations)]
    lines = []
    for arm in arms:
        mine = [value for n in range(options.conversations) for value in rows[*arm, n]]
        # facts of one memory are not independent, conversations are
        means = [mean(rows[*arm, n]) for n in range(options.conversations)]
        apart = "" if arm == arms[0] else difference(means, base)
        pinned = "" if arm == arms[0] else "pinned" if arm[2] else "free"
        lines.append([arm[0], str(arm[1] or ""), pinned, f"{sum(mine)} of {len(mine)}", apart])
    title = f"{Path(options.model).name}: facts of the system message after {options.turns} turns"
    show(title, ["policy", "budget", "system", "right", "points to full"], lines, [])
    finish({"bench": "system_message", "model": options.model, "lines": lines})


if __name__ == "__main__":
    main()
