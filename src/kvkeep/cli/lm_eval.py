"""``kvkeep lm-eval``: lm-eval's command line with kvkeep's model type. All words go to lm-eval."""

from __future__ import annotations

from kvkeep.cli.console import one_line_errors
from kvkeep.cli.help import words
from kvkeep.cli.startup import fast_imports


@one_line_errors
def lm_eval() -> None:
    """Run lm-eval with the model type kvkeep: its tasks, scored under eviction.

    All words are lm-eval's own: kvkeep lm-eval run --help. Arguments of --model kvkeep, separated by commas:
    pretrained, policy (options follow plus signs: h2o:recent=8+sinks=4), budget (512 or 20%), question=inside|later,
    examples=inside|later, stride, rows, dtype, device. Needs the extra lm-eval.
    """
    with fast_imports():
        from kvkeep.evals.lm_eval import command  # imports torch, and lm-eval if it is there

    command.run(words())
