"""How little an MLP block turns the residual stream, which Scissorhands' Theorem 3.1 assumes."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep_lab.analysis.groups._shared import by_layer, mean, show
from kvkeep_lab.analysis.measure import Axes, ClaimLine, Context, Measurement, Mlp, Reading, Result, Verdict

HIGH = 0.9
"""Least cosine that counts as close to 1; its δ of 0.1 already allows an error of √(2δ) = 0.45 in Lemma B.1."""

MOST = 0.75
"""Share of the layers in which the cosine has to be that high."""

DOMINATED = 1 / 3
"""Largest part of the stream's norm that the stream dominates: at a right angle it still leaves a cosine of 0.95."""

FEW = 0.5
"""Share of layers below which the assumption does not describe the model."""


def turned(residual: Float[Tensor, "R hidden"], output: Float[Tensor, "R hidden"]) -> Float[Tensor, "R 3"]:
    """Return the cosine of a token's stream before and after the block, and the norms of stream and block output."""
    before, added = residual.double(), output.double()
    cosine = torch.cosine_similarity(before, before + added, dim=-1)
    return torch.stack([cosine, before.norm(dim=-1), added.norm(dim=-1)], dim=-1).float()


@final
class Residual(Measurement):
    """Cosine and norms across each MLP block, over the tokens of the text."""

    name: ClassVar[str] = "residual"
    source: ClassVar[str] = "Scissorhands, Figure 10"
    title: ClassVar[str] = "MLP blocks hardly turn the residual stream"
    reads: ClassVar[frozenset[str]] = frozenset({"mlp"})
    least_tokens: ClassVar[int] = 64

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._found = torch.full((context.n_layers, context.n_tokens, 3), torch.nan)

    def mlp(self, mlp: Mlp) -> None:
        """Keep three numbers per token."""
        self._found[mlp.layer, mlp.first : mlp.first + len(mlp.residual)] = turned(mlp.residual, mlp.output)

    def result(self) -> Result:
        """Return the cosine per layer (mean, lowest twentieth, minimum), and medians of norms and their ratio."""
        cosine, stream, added = self._found.double().unbind(dim=-1)
        return {
            "cosine": cosine.mean(dim=1).tolist(),
            "cosine_p05": cosine.quantile(0.05, dim=1).tolist(),
            "cosine_min": cosine.amin(dim=1).tolist(),
            "stream_norm": stream.median(dim=1).values.tolist(),
            "added_norm": added.median(dim=1).values.tolist(),
            "norm_ratio": (added / stream).median(dim=1).values.tolist(),
        }

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Count the layers whose mean cosine is at least `HIGH`."""
        cosine, ratio = result["cosine"], result["norm_ratio"]
        high = sum(value >= HIGH for value in cosine)
        return Reading(
            paper="The cosine between input and output of an MLP block with its skip connection is close to 1 across "
            "OPT's layers, because the input's norm dominates (Figure 10).",
            here=f"The cosine is {show(mean(cosine))} on average, {show(min(cosine))} in the lowest layer and at least "
            f"{HIGH} in {high} of {len(cosine)}; what a block adds is {show(mean(ratio))} of the stream's norm.",
            meaning=_meaning(high / len(cosine)),
            verdict=_verdict(high / len(cosine)),
        )

    @classmethod
    def claims(cls, result: Result) -> tuple[ClaimLine, ...]:
        """Return claims about the cosine, and about the paper's reason for it."""
        found, ratio = cls.reading(result), result["norm_ratio"]
        small = sum(value <= DOMINATED for value in ratio) / len(ratio)
        return (
            ClaimLine("MLP blocks hardly turn the residual stream", cls.source, found.paper, found.here, found.verdict),
            ClaimLine(
                "The norm of the stream is far above that of what a block adds",
                "Scissorhands, Section 3.3",
                "Said of OPT models, as the reason for the cosine.",
                f"What a block adds has {show(min(ratio))} to {show(max(ratio))} of the stream's norm.",
                _verdict(small),
            ),
        )

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw cosine and ratio of norms by layer."""
        series = {
            "cosine, mean": result["cosine"],
            "cosine, lowest twentieth": result["cosine_p05"],
            "norm added / norm of the stream": result["norm_ratio"],
        }
        by_layer(axes, series, y="across the MLP block")


def _verdict(share: float) -> Verdict:
    if share >= MOST:
        return "agree"
    return "differ" if share < FEW else "cannot tell"


def _meaning(share: float) -> str:
    if share >= MOST:
        return "Theorem 3.1's assumption is met in most layers, so its reason why importance persists can hold here."
    return (
        "Theorem 3.1's assumption is not met in every layer: trust the measured persistence ratio, not the theorem, "
        "when you set the budget of a policy that looks back."
    )
