"""``python -m tools.train_tiny all --data DIR --work DIR`` trains the embedded model from nothing."""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    """Run one step, or all of them in order."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_tiny", description=__doc__)
    parser.add_argument("step", choices=("prepare", "train", "evaluate", "export", "all"))
    parser.add_argument("--data", type=Path, required=True, help="folder with novels/ and tinystories/")
    parser.add_argument("--work", type=Path, required=True, help="folder for token files and checkpoints")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the token budget (try 10 on a GPU)")
    parser.add_argument(
        "--onward", action="store_true", help="go on from the package's weights and tokenizer, not from nothing"
    )
    parser.add_argument("--questions", type=int, default=400, help="word questions per context length in `evaluate`")
    options = parser.parse_args()
    steps = ("prepare", "train", "export", "evaluate") if options.step == "all" else (options.step,)
    for step in steps:
        run(step, options)


def run(step: str, options: argparse.Namespace) -> None:
    """Run one step; the imports wait for it, since help needs no torch."""
    if step == "prepare":
        from .prepare import prepare

        prepare(options.data, options.work, onward=options.onward)
    elif step == "train":
        from .train import train

        train(options.work, device=options.device, scale=options.scale, onward=options.onward)
    elif step == "export":
        from .export import export

        export(options.work)
    else:
        from .evaluate import report

        report(options.work, options.device, options.questions)


if __name__ == "__main__":
    main()
