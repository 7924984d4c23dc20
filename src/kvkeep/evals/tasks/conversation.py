"""A conversation of many turns with a fact in each; the memory is cut after every turn, and a fact is asked at the end.

The next turn is never known when the memory is cut, whatever ``ask`` says about the last one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch

from kvkeep.evals import grading, task
from kvkeep.evals import qa_task as replying
from kvkeep.evals.forward import Drive, Setup, left_padded
from kvkeep.evals.qa_task import Item, ItemPrompt, QATask, Replies, TaskCase, fitting, prompt_of
from kvkeep.evals.synthetic import Haystack, values, words
from kvkeep.evals.task import Options, describe
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.tokenization import Writer, encode
from kvkeep.policies.base import Policy

_NEW = 16  # tokens of a reply
_TURN = "\nUser: "


@final
@dataclass(frozen=True)
class Conversation(QATask):
    """Share of asked facts that the reply has, by the turn in which they were told."""

    name: ClassVar[str] = "conversation"
    VERSION: ClassVar[int] = 1

    @classmethod
    def make(
        cls, checkpoint: Checkpoint, options: Options, about: dict[str, Any], notes: list[str]
    ) -> dict[str, TaskCase]:
        """Return a case for each context, with conversations of as many turns as facts.

        Each asks for the fact of one turn, which lies at the depths of ``options`` in turn; by default they are spread
        evenly over the conversations.
        """
        about |= {"text": describe(options), "depths": list(options.depths) or "spread"}
        n, made = options.limit or cls.items, {}
        for length in dict.fromkeys(options.contexts):
            named = f"conversation with a context of {length}, {options.facts} turns and {_NEW} new tokens"
            depths = options.depths or [(i + 0.5) / n for i in range(n)]
            prompts = []
            for number in range(n):
                depth = depths[number % len(depths)]
                maker = _maker(options, number, depth)
                item = fitting(checkpoint, maker, length - _NEW, 0, named)  # the facts alone are a conversation, too
                prompts.append(prompt_of(checkpoint, item, options.ask, number))
            made[f"length={length},turns={options.facts}"] = TaskCase(
                prompts, _NEW, lambda item, reply: grading.contains_all(reply, item.answers)
            )
        return made

    def _ask(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], setup: Setup
    ) -> Iterator[Replies]:
        """Yield the reply at the end of each conversation, whose memory is cut after every turn."""
        for number, prompt in enumerate(self.made[case].prompts):  # one by one, since turns end at different tokens
            drive = Drive(writer, policy, [budgets[number]], first=number, setup=setup)
            edges = [*_edges(writer.checkpoint, prompt), prompt.first]
            for start, stop in zip([0, *edges], edges, strict=False):
                if stop > start:  # the last turn may end where the first part does
                    drive.feed(*left_padded([prompt.ids[start:stop]]), last_only=True)
            lengths, cache = [prompt.first], drive.cache
            tenths = [task.kept_by_tenth(cache.positions(i), lengths) for i in cache.bounded_layers()]
            texts = replying.texts(writer, drive, [prompt], self.made[case].new)
            yield Replies(texts, torch.stack(tenths).mean(0).cpu(), drive.cache.memory())


def _maker(options: Options, number: int, depth: float) -> Any:
    """Return a function that makes a conversation of ``options.facts`` turns, with a given number of further sentences.

    Args:
        options: the user's choices.
        number: the conversation's number, which together with the seed chooses names, codes and sentences.
        depth: where the turn lies whose fact is asked for, as a share of the turns.
    """
    drawn = random.Random(f"conversation {options.seed} {number}")
    names, codes = words(drawn, options.facts), values("numbers", drawn, options.facts)
    asked = min(options.facts - 1, int(depth * options.facts))  # depth 1 is the last turn
    haystack = Haystack(options.text, options.seed * task.ITEMS_APART + number)

    def item(size: int) -> Item:
        """Return the conversation with ``size`` further sentences, which are dealt out to the turns."""
        filler, said = haystack.first(size), []
        for turn, (name, code) in enumerate(zip(names, codes, strict=True)):
            own = filler[turn :: options.facts]
            said.append(f"{_TURN}{' '.join([*own, f'The code of {name} is {code}.'])}\nAssistant: I see.")
        question = f"{_TURN}What is the code of {names[asked]}?"
        lead = f"\nAssistant: The code of {names[asked]} is"
        return Item(text="".join(said), question=question, lead=lead, answers=(codes[asked],), depth=depth, chat=False)

    return item


def _edges(checkpoint: Checkpoint, prompt: ItemPrompt) -> list[int]:
    """Return the number of tokens from a prompt's start to the end of each turn, at most those of its first part."""
    found, text = [], ""
    for turn in prompt.item.text.split(_TURN)[1:]:  # nothing stands before the first turn
        text += f"{_TURN}{turn}"
        ids = encode(checkpoint, text, raw=True)[0]
        size = min(len(ids), len(prompt.ids))
        # a tokenizer may join the end of a turn with what follows: a turn ends with the last equal token
        differs = (ids[:size] != prompt.ids[:size]).nonzero()
        found.append(min(int(differs[0]) if len(differs) else size, prompt.first))
    return found
