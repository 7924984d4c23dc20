"""The contract of a measurement: what it is given, block by block, and what it hands back."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.models.text import Writer

Result: TypeAlias = dict[str, Any]
"""What a measurement found: numbers, strings, lists and dictionaries that JSON can hold."""

Axes: TypeAlias = Any
"""A pair of matplotlib's axes, which only the room `kvkeep.plots` imports."""

Progress: TypeAlias = Callable[[float], object]
"""Called with the share of a measurement's own runs that is done, from 0 to 1."""

Verdict: TypeAlias = Literal["agree", "differ", "cannot tell"]

READS = frozenset({"attention", "mlp", "units", "model"})
"""What a measurement can ask for; ``units`` beside ``mlp`` by those that cannot do without `Mlp.units`."""


@dataclass(frozen=True)
class Context:
    """What a measurement may know before it starts.

    Attributes:
        n_tokens: tokens of the text.
        n_layers: layers with attention, which are numbered from 0 without gaps.
        n_heads: query heads of each.
        n_kv_heads: key-value heads of each.
        tokens: the text; the first one is the begin token where the tokenizer has one.
        words: the piece of text of each token.
        seed: of whatever is drawn.
    """

    n_tokens: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    tokens: Int[Tensor, " n_tokens"]
    words: tuple[str, ...]
    seed: int


@dataclass(frozen=True, eq=False)
class Rows:
    """Consecutive rows of the causal attention matrix of one layer under the full cache. On the CPU; read-only.

    Attributes:
        layer: which.
        first: index of the first row in the text, from 0.
        weights: softmax probabilities; 0 after the row's own column and outside a sliding window. A row adds up to 1,
            or to less where a model has learned attention sinks.
        values: values of the keys.
        logits: what the softmax was given: scaled, soft-capped where the model does that, minus infinity where a row
            does not see.
    """

    layer: int
    first: int
    weights: Float[Tensor, "Hq R S"]
    values: Float[Tensor, "Hk S E"]
    logits: Float[Tensor, "Hq R S"]


@dataclass(frozen=True, eq=False)
class Mlp:
    """The MLP block of one layer at consecutive tokens. On the CPU; read-only.

    Attributes:
        layer: which.
        first: index of the first token in the text, from 0.
        residual: the residual stream that enters the block, before its norm.
        output: what the block adds to the stream.
        units: hidden activations after the non-linearity (gated blocks: act(gate)); ``None`` if the block has no such
            thing for every token (a mixture of experts, for example).
    """

    layer: int
    first: int
    residual: Float[Tensor, "R hidden"]
    output: Float[Tensor, "R hidden"]
    units: Float[Tensor, "R n_units"] | None


@dataclass(frozen=True)
class Reading:
    """What a person should take from a measurement; three sentences that stated rules make from its numbers.

    Attributes:
        paper: what the paper reports, with its figure, table or equation.
        here: what this model shows on this text.
        meaning: what that means for choosing a policy and a budget.
        verdict: whether both agree.
    """

    paper: str
    here: str
    meaning: str
    verdict: Verdict


@dataclass(frozen=True)
class Claim:
    """One line of the table of claims.

    Attributes:
        text: the claim, in our own words.
        source: where it stands, e.g. ``H2O, Figure 2a``.
        paper: what the paper reports on its models.
        here: what this model shows.
        verdict: whether both agree.
    """

    text: str
    source: str
    paper: str
    here: str
    verdict: Verdict


@dataclass(frozen=True)
class Subject:
    """What a measurement with runs of its own works on.

    Attributes:
        writer: the model, attached and in evaluation mode, with configuration and tokenizer (``writer.checkpoint``).
        tokens: the text.
        seed: of whatever is drawn.
        random: the same architecture with weights drawn as for training; made anew by each call.
    """

    writer: Writer
    tokens: Int[Tensor, " n_tokens"]
    seed: int
    random: Callable[[], Writer]

    @property
    def model(self) -> Any:
        """The model: ``model(input_ids=…, past_key_values=…)``."""
        return self.writer.model

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.writer.checkpoint.tokenizer


class Measurement(abc.ABC):
    """One measurement of the papers on one text.

    The walk calls `rows` and `mlp` for every layer and block, in order: all layers of a block before the next block.
    Then `runs` is called once if ``model`` is among ``reads``. What it keeps must not grow with the square of the text.

    Attributes:
        name: what ``--only``, files and JSON call it.
        source: where the paper has it, e.g. ``H2O, Figure 2a``.
        title: one line for the page.
        reads: what it asks for, of `READS`.
        VERSION: raised with every change of what is computed; older results are then measured anew.
        least_tokens: shorter texts are skipped.
        control: whether a model of random weights is walked, too; its result stands in ``result["random"]``.
        panels: pairs of axes of its picture, one below the other; with more than one, `draw` is given a tuple.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    title: ClassVar[str]
    reads: ClassVar[frozenset[str]]
    VERSION: ClassVar[int] = 1
    least_tokens: ClassVar[int]
    control: ClassVar[bool] = False
    panels: ClassVar[int] = 1

    def __init__(self, context: Context) -> None:
        self.context = context

    def rows(self, rows: Rows) -> None:
        """Take some rows of one layer's attention."""
        raise NotImplementedError(f"{self.name} reads attention but takes no rows")

    def mlp(self, mlp: Mlp) -> None:
        """Take some tokens of one layer's MLP block."""
        raise NotImplementedError(f"{self.name} reads MLP blocks but takes none")

    def runs(self, subject: Subject, progress: Progress) -> None:
        """Run the model: generations, bounded caches, masked passes."""
        raise NotImplementedError(f"{self.name} reads the model but has no runs")

    @abc.abstractmethod
    def result(self) -> Result:
        """What was found."""

    @classmethod
    @abc.abstractmethod
    def reading(cls, result: Result) -> Reading:
        """What a person should take from it."""

    @classmethod
    @abc.abstractmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw it; must read without colour: markers, line styles, labels at the lines."""

    @classmethod
    def claims(cls, result: Result) -> tuple[Claim, ...]:
        """Its lines in the table of claims; one, made from the reading, unless there is more to say."""
        found = cls.reading(result)
        return (Claim(cls.title, cls.source, found.paper, found.here, found.verdict),)


class Skipped(Exception):  # noqa: N818  no error: the run goes on
    """Raised by a measurement that cannot be made on this model or text, with the reason as a sentence."""
