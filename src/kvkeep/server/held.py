"""What the memory of a session holds, as the API shows it: positions, their tokens, and how many heads hold each."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvkeep.server.entry import Entry
from kvkeep.server.served import Served


def held(entry: Entry, served: Served) -> dict[str, Any]:
    """The positions that a session's memory holds. The answer's size is bounded by the memory's, not by the text's."""
    session = entry.session
    ids = session.token_ids
    layers = session.snapshot().contents.layers if ids else ()
    counts: Counter[int] = Counter()
    heads = 0
    for layer in layers:
        heads += len(layer.positions)
        counts.update(layer.positions[layer.positions >= 0].flatten().tolist())
    return {
        "id": entry.id,
        "object": "session.positions",
        "seen_tokens": len(ids),
        "budget": session.budget,
        "heads": heads,
        "positions": sorted(counts),
        "shares": [round(counts[place] / heads, 4) for place in sorted(counts)],
        "texts": [served.show(ids[place - 1] if place else None, ids[place]) for place in sorted(counts)],
        "pins": [list(span) for span in layers[0].pins] if layers else [],
    }
