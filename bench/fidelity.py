"""Does a memory's own number say how many questions it can answer?

    python bench/fidelity.py MODEL --text FILE --output ROWS.jsonl [--texts 4] [--policies "reread:later, h2o, ..."]

Each text of `kvkeep eval --documents text-dev --ask later` is read under each policy at one budget. A row has the share
of its 8 questions that are answered right, the memory's fidelity, and the share of attention mass (all queries of the
text, layers without a window) that the kept tokens carry. Rows that the file has already of the same model, text and
options are not measured again. In the end come Spearman's rank correlations of both numbers with the answers, over all
rows but those of the full cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lib import policies, positive, show
from lib.rows import named, save, saved

from kvkeep import parse
from kvkeep.engine.passages import Passages
from kvkeep.evals import qa_task
from kvkeep.evals.forward import Drive
from kvkeep.evals.task import Options
from kvkeep.evals.tasks import recall
from kvkeep.models.load import find, read_weights
from kvkeep.models.tokenization import Writer

FACTS = 8
POLICIES = "reread:later, reread, keydiff:later, snapkv, h2o, tova, local"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name of the hub")
    parser.add_argument("--text", type=Path, required=True, help="whose sentences stand between the facts")
    parser.add_argument("--output", type=Path, required=True, help="a file of rows, to which new ones are added")
    parser.add_argument("--texts", type=positive, default=4)
    parser.add_argument("--context", type=positive, default=1000)
    parser.add_argument("--budget", type=float, default=0.2, help="as a share of the text")
    parser.add_argument("--passages", type=positive, help="by default as many as `kvkeep remember` quotes")
    parser.add_argument("--policies", type=policies, default=POLICIES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=positive, default=1)
    return parser.parse_args()


def mass_of(writer: Writer, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """Each token's mass over all queries of a text, by layer without a window: (Hk, n)."""
    drive = Drive(writer, parse("h2o:recent=0"), [len(ids)])
    drive.feed(ids[None], last_only=True)
    found = {}
    for number, layer in drive.cache.bounded_layers().items():
        if layer.window is None:
            (mass,) = layer.block.of_slots().values()
            order = layer.store.positions[0, :, : len(ids)].argsort(dim=-1)
            found[number] = mass[0, :, : len(ids)].gather(-1, order)
    return found


def kept_mass(drive: Drive, mass: dict[int, torch.Tensor]) -> float:
    """The share of the mass that the kept tokens carry, mean over layers and heads."""
    shares = []
    for number, each in mass.items():
        for positions, own in zip(drive.cache.positions(number)[0], each, strict=True):
            shares.append(float(own[positions[positions >= 0].long()].sum() / own.sum()))
    return sum(shares) / len(shares)


def measured(writer: Writer, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows; new ones are added to the file as they come."""
    text = options.text.read_text(encoding="utf-8")
    asked = Options(text=text, contexts=(options.context,), facts=FACTS, documents="text-dev", ask="later", limit=FACTS)
    n = FACTS * options.texts
    prompts = recall.ask(writer.checkpoint, asked, options.context, n, documents=options.texts)
    about = {
        "model": options.model,
        "dtype": options.dtype,
        "of": named(text),
        "context": options.context,
        "share": options.budget,
        "quoted": options.passages,
    }
    rows = saved(options.output, about)
    done = {(row["text"], row["policy"]) for row in rows}
    for number in range(options.texts):
        mine = [prompt for prompt in prompts if prompt.document == number]
        left = [name for name in dict.fromkeys(["full", *options.policies]) if (number, name) not in done]
        for row in of_text(writer, mine, left, options) if left else ():
            rows.append({**about, "text": number, **row})
            save(options.output, rows[-1:])
            print(rows[-1], flush=True)
    return rows


def of_text(writer: Writer, prompts: Sequence[Any], policies: Sequence[str], options: argparse.Namespace):
    """The rows of one text, without its number."""
    ids = prompts[0].ids[: prompts[0].first]
    passages = Passages(writer, ids.tolist(), number=options.passages)
    mass, wording = mass_of(writer, ids), recall.wording_of(writer.checkpoint, "text-dev")
    for name in policies:
        policy = parse(name)
        budget = int(options.budget * len(ids)) if policy.evicts else len(ids) + 256
        drive = Drive(writer, policy, [budget])
        drive.feed(ids[None], last_only=True)
        fidelity = passages.measure(drive.cache.snapshot(), policy)
        replies = qa_task.texts(writer, drive.copies([0] * len(prompts)), prompts, recall.NEW_TOKENS[wording])
        right = [recall.right(wording, q.question, reply) for q, reply in zip(prompts, replies, strict=True)]
        shares = {"fidelity": fidelity.share, "error": fidelity.error, "mass": kept_mass(drive, mass)}
        yield {"policy": name, "budget": budget, "passages": len(passages), "right": sum(right), **shares}


def ranks(values: Sequence[float]) -> torch.Tensor:
    """The rank of each value; equal ones share their mean rank."""
    x = torch.tensor(values, dtype=torch.float64)
    return (x[:, None] > x).sum(1) + ((x[:, None] == x).sum(1) - 1) / 2


def spearman(one: Sequence[float], two: Sequence[float]) -> float:
    return float(torch.corrcoef(torch.stack([ranks(one), ranks(two)]))[0, 1])


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    checkpoint = find(options.model)
    rows = measured(Writer(checkpoint, read_weights(checkpoint, options.dtype, "cpu")), options)
    cut = [row for row in rows if row["policy"] != "full"]
    lines = []
    for name in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == name]
        means = [f"{sum(row[key] for row in own) / len(own):.2f}" for key in ("fidelity", "mass")]
        lines.append([name, f"{sum(row['right'] for row in own)} of {FACTS * len(own)}", *means])
    show("means", ["policy", "right", "fidelity", "kept mass"], lines)
    right = [row["right"] for row in cut]
    for key in ("fidelity", "mass"):
        print(f"rank correlation of {key} with right answers: {spearman([row[key] for row in cut], right):.2f}")
    print(f"{len(cut)} memories")


if __name__ == "__main__":
    main()
