"""``kvkeep analyze``. The work is in `kvkeep_lab.cli.analyze.analysis`."""

from __future__ import annotations

from kvkeep.cli.main import MEASURE, Plugin
from kvkeep.cli.options import command
from kvkeep_lab.cli.analyze.options import AnalyzeOptions

PLUGIN = Plugin(
    command=command(AnalyzeOptions, "kvkeep_lab.cli.analyze.analysis:serve"),
    panel=MEASURE,
    examples={
        "kvkeep analyze MODEL --text report.txt -o page": "Write a page with figures and risks",
    },
)
