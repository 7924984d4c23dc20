"""What does a chat still know about its first message, turns later, if its memory was cut to a budget meanwhile?

    python bench/split_texts.py novels essays --output DIR
    python bench/conversation_recall.py MODEL --documents text-test --text DIR/test.txt --output RUN.jsonl

Each conversation begins with a text into which facts are planted and a question about one of them; each later turn asks
about another. A client sends the whole conversation each time. Arms are a policy and a way to treat conversations
(`--conversations` of `kvkeep serve`), such as ``reread:later/auto``: an engine each, which take each conversation in
turn, so that their seconds can be compared. A question ends with the beginning of its answer, as in `kvkeep eval
--tasks recall --documents text-test`. ``full/auto`` is the full cache.

Recall counts the turns after the first one. Seconds are those until the first token, summed over all turns, over those
of the first arm. Intervals are 95 % ones of the paired difference to the first arm, by conversations. The file has a
line for each conversation and arm, with all that it depends on; a second call goes on after the last one.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev

from lib import finish, policy, positive, show
from lib.rows import named, save, saved

import kvkeep
from kvkeep import Request, SamplingParams
from kvkeep.engine.conversations import MODES
from kvkeep.evals.task import Options
from kvkeep.evals.tasks import recall
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.load import find
from kvkeep.models.tokenization import encode_chat

ARMS = "snapkv:default/fresh,snapkv:default/continue,reread:later/fresh,reread:later/continue,keydiff:later/continue"
ROOM = 200
"""Tokens of the questions and answers after the first, at most, for each budget of the full cache."""


@dataclass(frozen=True)
class Talk:
    """A conversation under an arm.

    Attributes:
        arm: its name.
        number: of the text.
        budget: tokens that were kept.
        right: for each turn, whether its answer was right.
        first_s: seconds until the first token of each turn.
        cached: tokens of each turn's prompt that were not read again.
        tokens: of each turn's prompt.
        replies: the answers.
    """

    arm: str
    number: int
    budget: int
    right: list[bool]
    first_s: list[float]
    cached: list[int]
    tokens: list[int]
    replies: list[str]


def next_turn(checkpoint: Checkpoint, question: str, lead: str) -> list[int]:
    """Return the tokens between an answer and the next one, the beginning of which is given."""
    if checkpoint.tokenizer.chat_template is None:
        text = f"\n\nQuestion: {question}\nAnswer: {lead}"
        return checkpoint.tokenizer.encode(text, add_special_tokens=False)
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    after = [{"role": "user", "content": question}, {"role": "assistant", "content": lead}]
    told = {"add_generation_prompt": False, "continue_final_message": True}
    head, whole = (encode_chat(checkpoint, chat, **told)[0].tolist() for chat in (before, before + after))
    assert whole[: len(head)] == head
    return whole[len(head) :]


def talk(
    engine: kvkeep.Engine, checkpoint: Checkpoint, asked: Sequence[recall.Prompted], arm: str, budget: int
) -> Talk:
    """Hold a conversation about a text."""
    wording, made = recall.wording_of(checkpoint, "text-dev"), Talk(arm, asked[0].document, budget, [], [], [], [], [])
    ids = asked[0].ids.tolist()
    for turn, item in enumerate(asked):
        if turn:
            ids += next_turn(checkpoint, recall.ending_of(item.question), item.question.lead)
        name = f"conv_{asked[0].document}_{turn}"
        sampling = SamplingParams(max_new_tokens=recall.NEW_TOKENS[wording], temperature=0.0)
        request = Request(prompt=ids, sampling=sampling, stop=("\n",), chat=True, owner="client", keep_as=name)
        (result,) = engine.generate(request)
        if result.error:
            raise SystemExit(f"{arm}: {result.error}")
        ids += result.token_ids[:-1] if result.end_token else result.token_ids
        made.right.append(recall.right(wording, item.question, result.text))
        made.first_s.append(result.ttft_s or math.nan)
        made.cached.append(result.cached_tokens)
        made.tokens.append(result.prompt_tokens)
        made.replies.append(result.text)
    return made


def talks(options: argparse.Namespace, done: set[tuple[str, int, int]]) -> Iterator[Talk]:
    """Hold all conversations that are not done, text by text."""
    checkpoint = find(options.model)
    model, _ = kvkeep.load(options.model, dtype=options.dtype)
    about = Options(
        documents=options.documents, text=options.text.read_text(encoding="utf-8"), facts=options.turns, ask="later"
    )
    asked = recall.ask(checkpoint, about, options.context, options.conversations * options.turns, documents=1)
    texts = [list(items) for _, items in groupby(asked, key=lambda item: item.document)]
    longest = max(len(item.ids) for item in asked)
    engines = {}
    for share in options.budgets:
        for arm in options.arms:
            policy, _, way = arm.rpartition("/")
            budget = longest + options.turns * ROOM if policy == "full" else int(longest * share)
            kept = {"conversations": way, "conversation_memory": 2**30, "layer_budget": options.layer_budget}
            engine = kvkeep.Engine(model, checkpoint.tokenizer, policy=policy, budget=budget, rows=1, **kept)
            engine.generate(Request(prompt=[1] * 40, sampling=SamplingParams(max_new_tokens=2)))  # what is built first
            engines[arm, budget] = engine
    for items in texts:
        for (arm, budget), engine in engines.items():
            if (arm, items[0].document, budget) not in done:
                yield talk(engine, checkpoint, items, arm, budget)


def difference(values: Sequence[float], base: Sequence[float]) -> str:
    """Return the mean of paired differences in points, with the half of its 95 % interval."""
    apart = [100 * (value - other) for value, other in zip(values, base, strict=True)]
    half = 1.96 * stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
    return f"{mean(apart):+.1f} ± {half:.1f}"


def lines(found: Sequence[Talk]) -> list[list[str]]:
    """Return a line of the table for each arm and budget."""
    by: dict[tuple[int, str], dict[int, Talk]] = defaultdict(dict)
    for held in found:
        by[held.budget, held.arm][held.number] = held
    made, first = [], {}
    for (budget, arm), held in by.items():
        base = first.setdefault(budget, held)
        numbers = [number for number in held if number in base]
        shares, others = ([mean(group[n].right[1:]) for n in numbers] for group in (held, base))
        seconds, of_base = (sum(sum(group[n].first_s) for n in numbers) for group in (held, base))
        later = [held[n] for n in numbers]
        cached = sum(sum(t.cached[1:]) for t in later) / sum(sum(t.tokens[1:]) for t in later)
        n = sum(len(t.right) - 1 for t in later)
        apart = "" if held is base else difference(shares, others)
        made.append(
            [str(budget), arm, f"{mean(shares):.1%}", apart, f"{seconds / of_base:.2f}", f"{cached:.0%}", str(n)]
        )
    return made


def arms(text: str) -> list[str]:
    """Arms from the command line; a policy's options have commas as well, so an arm ends with its way."""
    found, arm = [], ""
    for piece in text.split(","):
        arm = f"{arm},{piece}" if arm else piece.strip()
        name, _, way = arm.rpartition("/")
        if way in MODES:
            found.append(f"{policy(name)}/{way}")
            arm = ""
    if arm or not found:
        raise argparse.ArgumentTypeError(f"{arm!r} has none of the ways {', '.join(MODES)} behind its policy")
    return found


def main() -> None:
    """Hold the conversations, and show the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="hub name, folder or GGUF file")
    parser.add_argument("--documents", choices=["text-dev", "text-test"], default="text-dev")
    parser.add_argument("--text", type=Path, required=True, help="the text of the same half")
    parser.add_argument("--context", type=positive, default=1000, help="tokens of the first turn")
    parser.add_argument("--turns", type=positive, default=10)
    parser.add_argument("--conversations", type=positive, default=34)
    parser.add_argument("--budgets", type=lambda words: [float(word) for word in words.split(",")], default=[0.5, 0.25])
    parser.add_argument("--arms", type=arms, default=ARMS)
    parser.add_argument("--layer-budget", help="how budgets are spread over the layers; by default the policy's own")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    about = {
        "model": options.model,
        "dtype": options.dtype,
        "documents": options.documents,
        "of": named(options.text.read_text(encoding="utf-8")),
        "context": options.context,
        "turns": options.turns,
        "layer_budget": options.layer_budget,
    }
    found = [Talk(**{one.name: row[one.name] for one in fields(Talk)}) for row in saved(options.output, about)]
    for held in talks(options, {(held.arm, held.number, held.budget) for held in found}):
        save(options.output, [{**about, **asdict(held)}])
        found.append(held)
    title = f"{Path(options.model).name}: {options.turns} turns about {options.context} tokens"
    columns = ["budget", "arm", "right", "to the first arm", "seconds", "not read again", "n"]
    show(title, columns, lines(found), [f"{options.documents}, facts of turn 1, asked for in the turns after it"])
    finish({"bench": "conversation_recall", "model": options.model, "lines": lines(found)})


if __name__ == "__main__":
    main()
