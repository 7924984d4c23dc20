"""``kvkeep fleet``. The work is in `kvkeep_lab.cli.fleet.simulation`, the simulator in `kvkeep_lab.fleet`."""

from __future__ import annotations

from kvkeep.cli.main import LOOK, Plugin
from kvkeep.cli.options import command
from kvkeep_lab.cli.fleet.options import FleetOptions

PLUGIN = Plugin(
    command=command(FleetOptions, "kvkeep_lab.cli.fleet.simulation:serve"),
    panel=LOOK,
    examples={
        "kvkeep fleet --rate 4 --memory 1GB --bandwidth 50GB/s": "Devices for four users per second",
        "kvkeep fleet --rate 4 --memory 1GB --steps steps.txt": "With steps that were measured",
    },
)
