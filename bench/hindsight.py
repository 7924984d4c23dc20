"""What does the future know? H2O's Figure 2 (c, d) and Table 9 on the embedded model, decoded token by token.

    python bench/hindsight.py [--text FILE] [--windows 4] [--window 512] [--ratio 0.2]

The first pass over each window measures what every key receives from all rows. Then
  statistics   h2o with its own mass and with the totals of the window, both also without recent tokens, and local:
               perplexity, the share of the full cache's attention that is held (second half of the window), and the
               overlap (Jaccard) of what is held in the end with what the totals choose
  removal      perplexity of the full cache without the heaviest, random and lightest keys
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from lib import report

from kvkeep import Policy, parse
from kvkeep.cache.hf_layers import handed
from kvkeep.evals import task
from kvkeep.evals.forward import Drive
from kvkeep.evals.task import Options
from kvkeep.evals.tasks.mass import RetainedMass
from kvkeep.evals.tasks.perplexity import Perplexity, feed_in_pieces
from kvkeep.models import tiny
from kvkeep.models.load import find, read_weights
from kvkeep.models.tokenization import Writer
from kvkeep_lab import hindsight
from kvkeep_lab.hindsight import H2OGlobal, Totals

SHARES = (0.01, 0.05, 0.1, 0.2)
Sets = list[frozenset[int]]


def policies(totals: Totals) -> dict[str, Policy]:
    return {
        "full": parse("full"),
        "h2o": parse("h2o"),
        "h2o, totals": H2OGlobal(totals=totals),
        "h2o:recent=0": parse("h2o:recent=0"),
        "h2o:recent=0, totals": H2OGlobal(totals=totals, recent=0),
        "local": parse("local"),
    }


def decode(writer: Writer, policy: Policy, ids: torch.Tensor, budget: int) -> tuple[float, Sets]:
    """Perplexity, and what each layer, row and head holds in the end."""
    drive = Drive(writer, policy, [budget] * len(ids))
    losses = feed_in_pieces(drive, ids, stride=1)
    held = [drive.cache.positions(layer) for layer in drive.cache.bounded_layers()]
    sets = [frozenset(j for j in head if j >= 0) for layer in held for row in layer.tolist() for head in row]
    return math.exp(losses.double().mean().item()), sets


def overlap(one: Sets, other: Sets) -> float:
    """Mean Jaccard index."""
    return sum(len(a & b) / len(a | b) for a, b in zip(one, other, strict=True)) / len(one)


def mass_task(ids: torch.Tensor) -> RetainedMass:
    """Retained mass on these very windows: the first half is the prompt, the second is measured row by row."""
    return RetainedMass(ids, rows=ids.shape[1] // 2, text="")


def statistics(writer: Writer, ids: torch.Tensor, totals: Totals, ratio: float) -> dict[str, dict[str, float]]:
    mass = mass_task(ids)
    mass.prepare(writer)
    ((case, _),) = mass.cases().items()
    budget = max(1, int(ratio * ids.shape[1]))
    found, sets = {}, {}
    for name, policy in policies(totals).items():
        room = budget if policy.evicts else ids.shape[1]
        perplexity, sets[name] = decode(writer, policy, ids, room)
        held = mass.run(writer, case, policy, [room] * len(ids)).score["mass"]
        found[name] = {"perplexity": perplexity, "mass": held}
    for name, row in found.items():
        yardstick = "h2o:recent=0, totals" if "recent=0" in name else "h2o, totals"
        if name not in ("full", yardstick):
            row["overlap"] = overlap(sets[name], sets[yardstick])
    return found


def removal(writer: Writer, ids: torch.Tensor, totals: Totals) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for choose in (totals.heaviest, totals.drawn, totals.lightest):
        for share in (0.0, *SHARES):
            cache = hindsight.without(writer.model, choose(share))
            with torch.inference_mode():
                logits = writer.model(ids, **handed(writer.model, cache)).logits[:, :-1]
            loss = task.nll(logits, ids[:, 1:]).double().mean().item()
            found.setdefault(choose.__name__, {})[f"{share:.0%}"] = math.exp(loss)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="UTF-8 text; the package's own sentences if not given")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--ratio", type=float, default=0.2, help="budget as a share of the window")
    options = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = find(tiny.path())
    writer = Writer(checkpoint, read_weights(checkpoint, "float32", "cpu"))
    text = None if options.text is None else options.text.read_text(encoding="utf-8")
    ids = Perplexity.load(checkpoint, Options(text=text, limit=options.windows, window=options.window)).ids
    totals = hindsight.measure(writer.model, ids)
    kept = statistics(writer, ids, totals, options.ratio)
    gone = removal(writer, ids, totals)
    report(
        f"{len(ids)} windows of {ids.shape[1]} tokens, budget {options.ratio:.0%}",
        ["policy", "perplexity", "mass held", "overlap"],
        [
            [
                name,
                f"{row['perplexity']:.2f}",
                f"{row['mass']:.3f}",
                f"{row['overlap']:.2f}" if "overlap" in row else "",
            ]
            for name, row in kept.items()
        ],
        {},
    )
    report(
        "Perplexity of the full cache without some keys",
        ["keys", *(next(iter(gone.values())))],
        [[name, *(f"{value:.2f}" for value in row.values())] for name, row in gone.items()],
        {"bench": "hindsight", "windows": list(ids.shape), "statistics": kept, "removal": gone},
    )


if __name__ == "__main__":
    main()
