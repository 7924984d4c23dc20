"""What is hidden in a long text: a needle at every depth, a passkey, and a value in a dictionary."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from kvkeep.evals import grading
from kvkeep.evals.qa_task import Item, QATask, TaskCase, fitting, prompt_of
from kvkeep.evals.synthetic import NOISE, Haystack, planted, values
from kvkeep.evals.task import Options, describe
from kvkeep.models.checkpoint import Checkpoint

_NEW = 32  # tokens of a reply; a UUID has 36 characters
_CITIES = (
    *("Lisbon", "Oslo", "Vienna", "Prague", "Dublin", "Athens", "Warsaw"),
    *("Madrid", "Helsinki", "Cairo", "Lima", "Quito", "Seoul", "Hanoi"),
)
_Maker = Callable[[random.Random, float, int], Item]
"""Makes an item from what draws its words, the depth of its answer, and a number of sentences, lines or pairs."""


def _cases(
    checkpoint: Checkpoint, options: Options, task: type[QATask], make: _Maker, least: int
) -> dict[str, TaskCase]:
    """Return a case for each context, with items as long as fit into it, whose answers stand at the depths in turn.

    Without depths in ``options`` they are spread evenly over the items.

    Args:
        checkpoint: the model.
        options: the user's choices.
        task: whose items they are.
        make: makes an item.
        least: fewest parts of an item, such as sentences.
    """
    made = {}
    for length in dict.fromkeys(options.contexts):
        n = options.limit or task.items
        depths = options.depths or [(i + 0.5) / n for i in range(n)]
        about = f"{task.name} with a context of {length} and {_NEW} new tokens"
        prompts = []
        for number in range(n):
            seed, depth = f"{task.name} {options.seed} {number}", depths[number % len(depths)]

            def item(size: int, seed: str = seed, depth: float = depth) -> Item:  # of this turn of the loop
                return make(random.Random(seed), depth, size)

            prompts.append(
                prompt_of(checkpoint, fitting(checkpoint, item, length - _NEW, least, about), options.ask, number)
            )
        made[f"length={length}"] = TaskCase(
            prompts, _NEW, lambda item, reply: grading.contains_all(reply, item.answers)
        )
    return made


@final
@dataclass(frozen=True)
class Needle(QATask):
    """Needle in a haystack: a sentence at a depth of a text; its score by depth and context is the heat map."""

    name: ClassVar[str] = "needle"
    VERSION: ClassVar[int] = 1

    @classmethod
    def make(
        cls, checkpoint: Checkpoint, options: Options, about: dict[str, Any], notes: list[str]
    ) -> dict[str, TaskCase]:
        """Return a case for each context, with a needle at the depths in turn."""
        about |= {"text": describe(options), "depths": list(options.depths) or "spread"}
        haystack = Haystack(options.text, options.seed)

        def item(drawn: random.Random, depth: float, size: int) -> Item:
            """Return the item with the needle among ``size`` sentences."""
            (number,), city = values("numbers", drawn, 1), drawn.choice(_CITIES)
            needle = f"The special magic {city} number is: {number}."
            text = planted(haystack.first(size), [needle], [depth])
            return Item(
                text=f"Read the text and answer the question about it.\n\n{text}",
                question=f"\n\nWhat is the special magic {city} number? Answer with the number alone.",
                lead=f" The special magic {city} number is",
                answers=(number,),
                depth=depth,
            )

        return _cases(checkpoint, options, cls, item, least=1)


@final
@dataclass(frozen=True)
class Passkey(QATask):
    """Passkey retrieval (Mohtashami and Jaggi, 2023): a number in noise that repeats."""

    name: ClassVar[str] = "passkey"
    VERSION: ClassVar[int] = 1

    @classmethod
    def make(
        cls, checkpoint: Checkpoint, options: Options, about: dict[str, Any], notes: list[str]
    ) -> dict[str, TaskCase]:
        """Return a case for each context, with a pass key at the depths in turn."""
        about |= {"depths": list(options.depths) or "spread"}

        def item(drawn: random.Random, depth: float, size: int) -> Item:
            """Return the item with the pass key among ``size`` lines of noise."""
            key = str(drawn.randint(10000, 99999))
            lines = [NOISE] * size
            lines.insert(round(depth * size), f"The pass key is {key}. Remember it. {key} is the pass key.")
            task = "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
            return Item(
                text=f"{task}I will quiz you about the important information there.\n\n" + "\n".join(lines),
                question="\n\nWhat is the pass key?",
                lead=" The pass key is",
                answers=(key,),
                depth=depth,
            )

        return _cases(checkpoint, options, cls, item, least=1)


@final
@dataclass(frozen=True)
class KeyValue(QATask):
    """Key-value retrieval (Liu et al., 2023): the value of a UUID in a JSON object of UUIDs."""

    name: ClassVar[str] = "kv_retrieval"
    VERSION: ClassVar[int] = 1

    @classmethod
    def make(
        cls, checkpoint: Checkpoint, options: Options, about: dict[str, Any], notes: list[str]
    ) -> dict[str, TaskCase]:
        """Return a case for each context, with the asked pair at the depths in turn."""
        about |= {"depths": list(options.depths) or "spread"}

        def item(drawn: random.Random, depth: float, size: int) -> Item:
            """Return the item with ``size`` pairs, of which the one at ``depth`` is asked for."""
            found = values("uuids", drawn, 2 * size)  # all different, so that no value is a key
            pairs = list(zip(found[::2], found[1::2], strict=True))
            key, value = pairs[min(size - 1, int(depth * size))]  # depth 1 is the last pair
            return Item(
                text=f"Extract the value of the key in the JSON object below.\n\n{json.dumps(dict(pairs))}",
                question=f'\n\nKey: "{key}"',
                lead="\nCorresponding value:",
                answers=(value,),
                depth=depth,
            )

        return _cases(checkpoint, options, cls, item, least=1)
