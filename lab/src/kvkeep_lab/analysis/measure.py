"""The interface of a measurement: its inputs, which arrive block by block, and its result."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.models.tokenization import Writer

Result: TypeAlias = dict[str, Any]
"""The result of a measurement: numbers, strings, lists and dictionaries that JSON can hold."""

Axes: TypeAlias = Any
"""A pair of matplotlib's axes; only the room `kvkeep.plots` imports matplotlib."""

Progress: TypeAlias = Callable[[float], object]
"""Called with the finished share of a measurement's own runs, from 0 to 1."""

Verdict: TypeAlias = Literal["agree", "differ", "cannot tell"]

READS = frozenset({"attention", "mlp", "units", "model"})
"""The inputs that a measurement can request; ``units`` together with ``mlp`` if it needs `Mlp.units`."""


@dataclass(frozen=True)
class Context:
    """Facts about text and model that a measurement knows before it starts.

    Attributes:
        n_tokens: number of tokens of the text.
        n_layers: number of layers with attention; these are numbered from 0 without gaps.
        n_heads: query heads of each layer.
        n_kv_heads: KV heads of each layer.
        tokens: the text, after the begin token if the tokenizer has one.
        words: the piece of text of each token.
        seed: seed of random choices.
        windows: tokens that a row of each layer sees, its own included; ``None``: all before it.
    """

    n_tokens: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    tokens: Int[Tensor, " n_tokens"]
    words: tuple[str, ...]
    seed: int
    windows: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Consecutive rows of one layer's causal attention matrix under the full cache. On the CPU; read-only.

    Attributes:
        layer: number of the layer.
        first: index of the first row in the text, from 0.
        weights: softmax probabilities; 0 after the row's own column and outside a sliding window. A row sums to 1, or
            to less in a model with learned attention sinks.
        values: values of the keys.
        logits: input of the softmax: scaled, soft-capped if the model does that, minus infinity for keys that a row
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
        layer: number of the layer.
        first: index of the first token in the text, from 0.
        residual: the residual stream that enters the block, before its norm.
        output: the block's contribution to the stream.
        units: hidden activations after the non-linearity (in gated blocks act(gate)); ``None`` if the block has none
            for every token, as in a mixture of experts.
    """

    layer: int
    first: int
    residual: Float[Tensor, "R hidden"]
    output: Float[Tensor, "R hidden"]
    units: Float[Tensor, "R n_units"] | None


@dataclass(frozen=True)
class Reading:
    """The interpretation of a measurement, in sentences that stated rules make from its numbers.

    Attributes:
        paper: the paper's result, with its figure, table or equation.
        here: this model's result on this text.
        meaning: the consequence for choosing a policy and a budget.
        verdict: whether both results agree.
    """

    paper: str
    here: str
    meaning: str
    verdict: Verdict


@dataclass(frozen=True)
class ClaimLine:
    """One line of the table of claims.

    Attributes:
        text: the claim in our own words.
        source: where the paper states it, e.g. ``H2O, Figure 2a``.
        paper: the paper's result on its models.
        here: this model's result.
        verdict: whether both results agree.
    """

    text: str
    source: str
    paper: str
    here: str
    verdict: Verdict


@dataclass(frozen=True)
class Subject:
    """The model and text of a measurement that runs the model itself.

    Attributes:
        writer: the model, attached and in evaluation mode, with configuration and tokenizer (``writer.checkpoint``).
        tokens: the text.
        seed: seed of random choices.
        random: makes the same architecture with weights drawn as for training, anew in each call.
    """

    writer: Writer
    tokens: Int[Tensor, " n_tokens"]
    seed: int
    random: Callable[[], Writer]

    @property
    def model(self) -> Any:
        """Return the model: ``model(input_ids=…, past_key_values=…)``."""
        return self.writer.model

    @property
    def tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return self.writer.checkpoint.tokenizer


class Measurement(abc.ABC):
    """One measurement of the papers on one text.

    The walk calls `rows` and `mlp` for every layer and block, in order: all layers of a block before the next block.
    Then `runs` is called once if ``model`` is in ``reads``. The state of a measurement must not grow with the square of
    the text.

    Attributes:
        name: its name in ``--only``, files and JSON.
        source: where the paper has it, e.g. ``H2O, Figure 2a``.
        title: one line for the page.
        reads: its inputs, of `READS`.
        VERSION: incremented whenever the computation changes; older results are then measured again.
        least_tokens: shorter texts are skipped.
        effort: time of its runs beside that of others: seconds with the embedded model on one thread, about. Workers
            that share an analysis begin with the longest.
        slow: whether it takes so long with a real model that it has to be asked for by name.
        control: whether a model of random weights is walked as well; its result is in ``result["random"]``.
        panels: pairs of axes of its picture, one below the other; with more than one, `draw` gets a tuple.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    title: ClassVar[str]
    reads: ClassVar[frozenset[str]]
    VERSION: ClassVar[int] = 1
    least_tokens: ClassVar[int]
    effort: ClassVar[int] = 0
    slow: ClassVar[bool] = False
    control: ClassVar[bool] = False
    panels: ClassVar[int] = 1

    def __init__(self, context: Context) -> None:
        self.context = context

    def rows(self, rows: AttentionRows) -> None:
        """Take some rows of one layer's attention."""
        raise NotImplementedError(f"{self.name} reads attention but takes no rows")

    def mlp(self, mlp: Mlp) -> None:
        """Take some tokens of one layer's MLP block."""
        raise NotImplementedError(f"{self.name} reads MLP blocks but takes none")

    def runs(self, subject: Subject, progress: Progress) -> None:
        """Run the model: generations, bounded caches, masked passes.

        Raises:
            Skipped: the measurement is impossible on this model or text.
        """
        raise NotImplementedError(f"{self.name} reads the model but has no runs")

    @abc.abstractmethod
    def result(self) -> Result:
        """Return the numbers that were found.

        Raises:
            Skipped: the measurement is impossible on this model or text.
        """

    @classmethod
    @abc.abstractmethod
    def reading(cls, result: Result) -> Reading:
        """Return the interpretation of a result."""

    @classmethod
    @abc.abstractmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw the result. It must be legible without colour: markers, line styles, labels at the lines."""

    @classmethod
    def claims(cls, result: Result) -> tuple[ClaimLine, ...]:
        """Return its lines in the table of claims; by default one line, made from the reading."""
        found = cls.reading(result)
        return (ClaimLine(cls.title, cls.source, found.paper, found.here, found.verdict),)


class Skipped(Exception):  # noqa: N818  no error: the run goes on
    """Raised by a measurement that is impossible on this model or text, with the reason as a sentence."""
