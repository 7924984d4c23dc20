"""Recall: questions over planted facts, by the depth of the asked fact.

The prompt without its last token is one chunk (the papers' semantics) and is then cut to the budget. With ``ask=later``
this chunk is the text alone: it is read and cut once, and each of its questions follows as a chunk of its own in a copy
of that memory. With ``turns`` the text is cut after each turn, and a question follows some turns after its fact. The
last token and the reply are decoded greedily under the budget, see `kvkeep.evals.qa_task`.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from itertools import cycle, islice
from typing import Any, ClassVar, Literal, final

import torch
from jaxtyping import Int

from kvkeep.errors import InputError
from kvkeep.evals import qa_task, task
from kvkeep.evals.forward import PLAIN, Drive, Setup
from kvkeep.evals.qa_task import Replies
from kvkeep.evals.synthetic import sentences
from kvkeep.evals.task import Options, Task, TaskOutcome, check_positions, past_training
from kvkeep.models import tiny
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.tiny.documents import STYLES, Document, document
from kvkeep.models.tiny.recall import Question
from kvkeep.models.tokenization import Writer, encode, encode_chat
from kvkeep.policies.base import Policy
from kvkeep.types import MemoryUsage

# Questions of recall as tokens: texts with planted facts, several questions about each, and what answers them.

Wording = Literal["embedded", "instruction", "plain", "continued"]
"""How a model is asked: `wording_of` chooses, `encoded` has the words."""

NEW_TOKENS = {"embedded": 8, "instruction": 24, "plain": 16, "continued": 8}
"""Tokens of the longest reply, by wording."""

_INSTRUCTION = "Read the text and answer the question at its end with the one word or number asked for, nothing else."

LEAST_DOCUMENTS = 8
"""Fewest texts that questions are spread over, if there are so many questions."""


@dataclass(frozen=True)
class Prompted:
    """A question and its prompt as tokens.

    Attributes:
        question: the question.
        ids: the prompt.
        first: number of tokens that are fed at once and then cut to the budget; the others follow after that. If
            questions are asked later, all questions of a document have these tokens in common.
        document: the number of the text.
        number: the number of the question among those of its text.
    """

    question: Question
    ids: Int[torch.Tensor, " n"]
    first: int
    document: int
    number: int
    chat: ClassVar[bool] = True  # every wording takes the chat template, where there is one


def wording_of(checkpoint: Checkpoint, style: str = "prose") -> Wording:
    """Return how to ask a model: in the embedded model's chat, by instruction in another chat, or without a chat
    template as plain text.

    Texts of the user's own are asked about with the beginning of the answer, since that measures what a small model
    has kept, not how well it follows instructions.
    """
    if STYLES[style].own_text:
        return "continued"
    template = checkpoint.tokenizer.chat_template
    if template is None:
        return "plain"
    own = (resources.files(tiny) / "chat_template.jinja").read_text(encoding="utf-8")
    return "embedded" if str(template).strip() == own.strip() else "instruction"


def ask(
    checkpoint: Checkpoint, options: Options, context: int, n: int, *, documents: int = LEAST_DOCUMENTS
) -> list[Prompted]:
    """Make ``n`` questions, text by text, with prompts of about ``context`` tokens.

    A text is asked about all its facts, or about fewer if ``n`` questions would come from fewer than ``documents``
    texts.

    Raises:
        InputError: the facts alone are longer than the context.
    """
    # no two questions about a text have the same depth
    each = min(options.facts, len(options.depths) or options.facts, math.ceil(n / documents))
    asked: list[Prompted] = []
    for number in range(math.ceil(n / each)):
        asked += _about(checkpoint, options, number, context, each)[: n - len(asked)]
    # the beginning of an answer is no part of the prompt's length, just as the answer is none
    longest = max(len(item.ids) - count_tokens(checkpoint, item.question.lead) for item in asked)
    # a little more is no error: sentences are counted one by one, and together they may be other tokens
    if longest > context * 1.02 + 8:
        raise InputError(
            f"A recall prompt with {options.facts} facts has {longest} tokens, more than the context of {context}. "
            "Give fewer `facts` or longer `contexts`."
        )
    return asked


def _about(checkpoint: Checkpoint, options: Options, number: int, context: int, each: int) -> list[Prompted]:
    """Return ``each`` questions about the text of a number, with prompts of about ``context`` tokens."""
    wording = wording_of(checkpoint, options.documents)
    made = document(
        task.text_seed(options.seed, number),
        n_facts=options.facts,
        n_questions=each,
        # what the wording puts around text, question and answer takes some: all but the words
        tokens=context - len(encoded(checkpoint, wording, "a", "b", "c")) + count_tokens(checkpoint, "a b"),
        depths=[options.depths[(number * each + i) % len(options.depths)] for i in range(each)]
        if options.depths
        else (),
        first_kind=number * options.facts,  # where the text before has ended, so that all kinds are equally frequent
        style=options.documents,
        filler=_sentences(options, number),
        count=lambda text: count_tokens(checkpoint, text),
    )
    ids = [encoded(checkpoint, wording, made.text, ending_of(item), item.lead) for item in made.questions]
    text = _text_tokens(checkpoint, wording, made, ids)
    return [
        Prompted(item, own, text if options.ask == "later" else len(own) - 1, number, i)
        for i, (item, own) in enumerate(zip(made.questions, ids, strict=True))
    ]


def _sentences(options: Options, number: int) -> Iterator[str] | None:
    """Return all sentences of the user's text once, beginning at a place that is drawn for each recall text and going
    on at the text's start. Return ``None`` if the style in ``options.documents`` has sentences of its own.
    """
    if not STYLES[options.documents].own_text or options.text is None:
        return None
    every = sentences(options.text)
    start = random.Random(task.text_seed(options.seed, number)).randrange(len(every))
    return islice(cycle(every), start, start + len(every))


def right(wording: Wording, asked: Question, reply: str) -> bool:
    """Return whether a reply answers the question.

    The embedded model has to give exactly the answer. For other models the first line counts: it has to contain the
    answer, and no value that the text gives for another thing of that kind.
    """
    if wording == "embedded":
        return asked.right(reply)
    line = next(filter(None, (line.strip() for line in reply.splitlines())), "").lower()
    words = set(re.findall(r"[^\W_]+", line))
    others = {choice.lower() for choice in asked.choices} - {asked.answer.lower()}
    return asked.answer.lower() in words and not words & others


def ending_of(asked: Question) -> str:
    """Return the question itself, without the text before it."""
    fact = asked.facts[-1]
    return next(said for template in fact.kind.questions if asked.prompt.endswith(said := fact.say(template)))


def count_tokens(checkpoint: Checkpoint, text: str) -> int:
    """Return the number of tokens of a part of a text."""
    return len(checkpoint.tokenizer.encode(text, add_special_tokens=False))


def _text_tokens(
    checkpoint: Checkpoint, wording: Wording, made: Document, prompts: Sequence[Int[torch.Tensor, "_"]]
) -> int:
    """Return the number of tokens before the questions: the beginning that all prompts share with one more.

    In that prompt `` ;`` stands between the text and the first question. Without it, tokens that all questions begin
    with would count, and so would a token in which the tokenizer joins the text's end with what follows.
    """
    first = made.questions[0]
    other = encoded(checkpoint, wording, f"{made.text} ;", ending_of(first), first.lead)
    return min(_shared(other, ids) for ids in prompts)


def _shared(one: Int[torch.Tensor, " n"], two: Int[torch.Tensor, " m"]) -> int:
    """Return the length of the common beginning of two prompts, which must differ before their ends."""
    size = min(len(one), len(two))
    return int((one[:size] != two[:size]).nonzero()[0])


def encoded(
    checkpoint: Checkpoint, wording: Wording, text: str, ending: str, lead: str = ""
) -> Int[torch.Tensor, " n"]:
    """Return the tokens of a prompt: a text and a question in the wording.

    Args:
        checkpoint: the model.
        wording: how the model is asked.
        text: the text.
        ending: the question.
        lead: the beginning of the answer, which only the wording ``continued`` has.
    """
    # the beginning of the answer is the model's own turn, which it goes on with
    if wording == "continued" and checkpoint.tokenizer.chat_template is not None:
        chat = [{"role": "user", "content": f"{text}\n\n{ending}"}, {"role": "assistant", "content": lead}]
        return encode_chat(checkpoint, chat, add_generation_prompt=False, continue_final_message=True)[0]
    if wording == "continued":
        return encode(checkpoint, f"{text}\n\nQuestion: {ending}\nAnswer: {lead}", raw=True)[0]
    if wording == "embedded":
        return encode(checkpoint, f"{text} {ending}")[0]
    if wording == "instruction":
        return encode(checkpoint, f"{_INSTRUCTION}\n\n{text}\n\n{ending}")[0]
    return encode(checkpoint, f"{text}\n\nQuestion: {ending}\nAnswer:", raw=True)[0]


QUESTIONS = 30
"""Default number of questions per context."""

AFTER = 10
"""Turns between a fact and its question, where a text comes in turns."""


@final
@dataclass(frozen=True)
class Recall(Task):
    """Share of questions answered right, by depth and kind; one case per context.

    Attributes:
        options: the user's choices.
        wording: how the model is asked.
        questions: the questions of each case.
        notes_: what `notes` returns, whose name is taken by the property.
    """

    name: ClassVar[str] = "recall"
    VERSION: ClassVar[int] = 3
    headline: ClassVar[str] = "accuracy"

    options: Options
    wording: Wording
    questions: dict[str, list[Prompted]]
    notes_: tuple[str, ...] = ()

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: Options) -> Recall:
        """Return the task with its questions made.

        Raises:
            InputError: the facts do not fit into a context, the model has too few learned positions, or the number of
                turns cannot be asked about.
        """
        wording = wording_of(checkpoint, options.documents)
        notes: list[str] = []
        for context in options.contexts:
            check_positions(checkpoint, context + NEW_TOKENS[wording], cls.name, "contexts")
            notes += past_training(checkpoint, context + NEW_TOKENS[wording], f"recall context={context}")
        way = ",ask=later" if options.ask == "later" else ""
        if options.turns is not None:
            way, options = f"{way},turns={options.turns}", _early(options, options.turns)
        questions = {
            f"context={context}{way}": ask(checkpoint, options, context, options.limit or QUESTIONS)
            for context in dict.fromkeys(options.contexts)
        }
        return cls(options, wording, questions, tuple(notes))

    def settings(self) -> dict[str, Any]:
        """Return what results depend on: number of questions and facts, look of the texts, depths and wording, and the
        user's text and the turns if there are any.
        """
        return {
            "questions": self.options.limit or QUESTIONS,
            "facts": self.options.facts,
            "documents": self.options.documents,
            "depths": list(self.options.depths) or "spread",
            "wording": self.wording,
            **({"text": task.describe(self.options)} if STYLES[self.options.documents].own_text else {}),
            **({} if self.options.turns is None else {"turns": self.options.turns, "after": AFTER}),
        }

    def cases(self) -> dict[str, list[int]]:
        """Return each context with the lengths of its prompts, or of its texts if questions are asked later."""
        return {case: [self._length(asked) for asked in questions] for case, questions in self.questions.items()}

    @property
    def new_tokens(self) -> int:
        """Return the length of the longest reply, plus that of the longest question if it is asked later."""
        questions = [asked for part in self.questions.values() for asked in part]
        return NEW_TOKENS[self.wording] + max(len(asked.ids) - self._length(asked) for asked in questions)

    @property
    def notes(self) -> list[str]:
        """Return sentences about contexts longer than the model was trained for."""
        return list(self.notes_)

    def run(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], *, setup: Setup = PLAIN
    ) -> TaskOutcome:
        """Ask all questions of a context under a policy, and return the share of right replies."""
        questions, done = self.questions[case], list(self._ask(writer, case, policy, budgets, setup))
        texts = [text for batch in done for text in batch.texts]
        rights = [right(self.wording, q.question, text) for q, text in zip(questions, texts, strict=True)]
        kept = torch.cat([batch.kept for batch in done]).mean(dim=0)
        score = {**_score(questions, rights), "kept": [round(share, 6) for share in kept.tolist()]}
        return TaskOutcome(score, sum((batch.memory for batch in done), MemoryUsage()))

    def _length(self, asked: Prompted) -> int:
        """Return the number of tokens that a budget in percent refers to."""
        return asked.first if self.options.ask == "later" else len(asked.ids)

    def _ask(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], setup: Setup = PLAIN
    ) -> Iterator[Replies]:
        """Yield the replies to a case's questions under a policy, batch by batch."""

        def drive(at: Sequence[int], first: int) -> Drive:
            return Drive(writer, policy, [budgets[i] for i in at], first=first, setup=setup)

        ask = qa_task.later if self.options.ask == "later" else qa_task.inside
        questions, turns = self.questions[case], self.options.turns
        if turns is not None:
            # turns count from 1: the fact's own turn, and `AFTER` later ones
            due = [min(turns, int(asked.question.depth * turns) + 1 + AFTER) for asked in questions]
            ask = partial(qa_task.in_turns, turns=turns, due=due)
        return ask(writer, questions, drive, NEW_TOKENS[self.wording])


def _early(options: Options, turns: int) -> Options:
    """Return a copy of the options whose depths lie in the beginning of a text that `AFTER` further turns follow.

    Raises:
        InputError: there are no such turns, questions do not come later, or a turn would have less than two tokens.
    """
    if options.ask != "later":
        raise InputError("turns: a question some turns after its fact comes later than the cut; add `ask=later`.")
    if turns <= AFTER:
        raise InputError(f"turns={turns} leaves no fact that is asked {AFTER} turns later; give {AFTER + 1} or more.")
    if 2 * turns > min(options.contexts):
        raise InputError(
            f"turns={turns} leaves less than two tokens of {min(options.contexts)} for a turn; give fewer."
        )
    share = 1 - AFTER / turns  # the part of the text that so many turns follow
    spread = options.depths or [(i + 0.5) / options.facts for i in range(options.facts)]
    return replace(options, depths=tuple(share * depth for depth in spread))


def _score(questions: Sequence[Prompted], rights: Sequence[bool]) -> dict[str, Any]:
    """Return the record of a cell: accuracy, each question's result, and the share that guessing would get.

    Beside them are pairs of right answers and questions for each tenth of the text, and for each kind of fact.
    """
    by_depth = [[0, 0] for _ in range(task.TENTHS)]
    by_kind: dict[str, list[int]] = {}
    for asked, ok in zip(questions, rights, strict=True):
        for group in (
            by_depth[task.tenth_of(asked.question.depth)],
            by_kind.setdefault(asked.question.kind, [0, 0]),
        ):
            group[0] += ok
            group[1] += 1
    return {
        "accuracy": sum(rights) / len(rights),
        "right": sum(rights),
        "n": len(rights),
        "guess": sum(1 / len(asked.question.choices) for asked in questions) / len(questions),
        "by_depth": by_depth,
        "by_kind": by_kind,
        "asked": [[q.document, q.number, int(ok)] for q, ok in zip(questions, rights, strict=True)],
        "rights": "".join(str(int(ok)) for ok in rights),
    }
