"""``kvkeep bench-server``. The work is in `report` beside it, and in `kvkeep_lab.loadtest`."""

from __future__ import annotations

from kvkeep.cli.main import MEASURE, Plugin
from kvkeep.cli.options import command
from kvkeep_lab.cli.bench_server.options import BenchServerOptions

PLUGIN = Plugin(
    command=command(BenchServerOptions, "kvkeep_lab.cli.bench_server.report:serve"),
    panel=MEASURE,
    examples={
        "kvkeep bench-server http://127.0.0.1:8000": "100 requests, 4 per second",
        "kvkeep bench-server URL --prompt-tokens 64-512 -n ~100": "Lengths that differ",
        "kvkeep bench-server URL --turns 4 --sessions": "Conversations that kvkeep remembers",
    },
)
