"""Draws the training log for the model card."""

from __future__ import annotations

import csv
from pathlib import Path


def draw(log: Path, picture: Path) -> None:
    """Loss and recall over the tokens seen, as one small PNG; the stages of growing length are marked."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with log.open(newline="") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    seen = [row["tokens"] / 1e6 for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), dpi=80, layout="constrained")
    for key, label in (("novel_loss", "held-out authors"), ("story_loss", "held-out stories")):
        left.plot(seen, [row[key] for row in rows], label=label)
    left.set(xlabel="million tokens", ylabel="nats per token", ylim=(1, 7))
    for key, label in (("recall_words", "words"), ("recall_numbers", "four digits")):
        right.plot(seen, [100 * row[key] for row in rows], label=label)
    right.set(xlabel="million tokens", ylabel="exact recall, %", ylim=(0, 102))
    lengths = [row["length"] for row in rows]
    for axes in (left, right):
        for i in range(1, len(rows)):
            if lengths[i] != lengths[i - 1]:
                axes.axvline(seen[i], color="0.8", zorder=0)
                axes.text(seen[i], axes.get_ylim()[0], f"{lengths[i]:.0f}", fontsize=6, va="bottom", rotation=90)
        axes.legend(fontsize=8)
    figure.savefig(picture)
    plt.close(figure)
