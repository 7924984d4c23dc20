"""Finished folders of ``kvkeep eval`` and ``kvkeep analyze``, made without a model, and ways to damage them."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

FINISHED = json.loads(
    (Path(__file__).parents[1] / "lab" / "tests" / "analysis" / "finished.json").read_text(encoding="utf-8")
)
"""What an analysis of a tiny random model wrote: file → content, numbers rounded."""

SCORES: dict[str, dict[str, Any]] = {
    "recall": {"accuracy": 0.25, "by_depth": [[tenth // 8, 2] for tenth in range(10)], "kept": [0.1] * 10},
    "perplexity": {"perplexity": 12.5},
    "agreement": {"agreement": 0.5, "kl": 0.012},
    "mass": {"mass": 0.876, "regret": None},
}

RUN = {
    "model": "m",
    "weights": "abc",
    "dtype": "float32",
    "tasks": {task: {"version": 1, "windows": 2} for task in SCORES},
}


def row(task: str = "perplexity", policy: str = "local", budget: str = "20%", **changes: Any) -> dict[str, Any]:
    plain = {
        "task": task,
        "case": "window=40",
        "policy": policy,
        "budget": budget,
        "seed": 0,
        "setup": "",
        "budget_tokens": {"20%": 8.0, "12": 12.0, "100%": 41.0}[budget],
        "text_tokens": 40.0,
        "score": SCORES[task],
        "memory": {"allocated_bytes": 200, "full_bytes": 1000},
    }
    return {**plain, **changes}


def rows() -> list[dict[str, Any]]:
    cells = (("full", "100%"), ("local", "20%"), ("local", "12"))
    return [row(task, *cell) for task in SCORES for cell in cells]


def lines(found: list[Any]) -> bytes:
    return "".join(json.dumps(part) + "\n" for part in found).encode()


def evaluation(folder: Path, found: list[Any] | None = None) -> Path:
    """A finished folder of ``kvkeep eval``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(RUN))
    (folder / "results.jsonl").write_bytes(lines(rows() if found is None else found))
    return folder


def analysis(folder: Path, *without: str) -> Path:
    """A finished folder of ``kvkeep analyze``: all its measurements, but neither page nor pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in FINISHED.items():
        if name not in without:
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def put(content: Any, path: str, value: Any) -> Any:
    """A copy with another value at ``a.b.0``; without the entry for `Ellipsis`."""
    copied = json.loads(json.dumps(content))
    *way, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
    place = copied
    for key in way:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return copied


# what no file of results looks like; the damage of a whole file

CONTENTS = {
    "empty": b"",
    "binary": b"\xff\xfe\x00\x01" * 50,
    "zeros": b"\x00" * 100 + b"\n" + b"\x00" * 100,
    "a list": b"[1, 2]\n",
    "a number": b"7\n",
    "null": b"null\n",
    "a string": b'"text"\n',
    "words": b"hello\n",
    "nested": b"[" * 100_000,
    "nested objects": b'{"a":' * 500 + b"1" + b"}" * 500 + b"\n",
    "long number": b"1" * 6000 + b"\n",
    "UTF-16": '{"task": "recall"}\n'.encode("utf-16"),
}

ODD = [
    *(None, True, -1, 0, 1.5, 1e308, -1e308, 5e-324, 2**70, 10**400, float("nan"), float("inf")),
    *("", "x", "\x1b[31m", "<b>", "[bold]", "$\\frac{$", "_x", "\ud800", "\u202e", "a" * 2000, "-5%", "nan%"),
    *([], [[]], {}, {"a": 1}, [1, 2], ["x"]),
]


def replaced(path: Path, kind: str) -> None:
    """Put something that is no file in a file's place."""
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind == "a link to nothing":
        path.symlink_to(path.parent / "nothing")
    elif kind == "a link to itself":
        path.symlink_to(path)
    else:
        os.mkfifo(path)


KINDS = ("a folder", "a link to nothing", "a link to itself", "a pipe")


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([path] if path else []), *(place for key, part in parts for place in _places(part, (*path, key)))]


def _mutated(content: Any, drawn: random.Random) -> Any:
    """One entry left out, moved to another name, cut short, doubled, or of another kind."""
    if not (places := _places(content)):
        return drawn.choice(ODD)
    *way, last = drawn.choice(places)
    place = content
    for key in way:
        place = place[key]
    how = drawn.randrange(5)
    if how == 0:
        del place[last]
    elif how == 1 and isinstance(place, dict):
        place[drawn.choice(["x", "_a", "$", "\x1b[31m"])] = place.pop(last)
    elif how == 2 and isinstance(place[last], list):
        place[last] = drawn.choice([place[last][:1], place[last] * 2])
    else:
        place[last] = drawn.choice(ODD)
    return content


def mutate(path: Path, drawn: random.Random) -> None:
    """Damage a file of JSON or of JSON lines as a person, a disk or a program might."""
    data, how = path.read_bytes(), drawn.random()
    if how < 0.1:
        flipped = bytearray(data)
        for _ in range(3):
            flipped[drawn.randrange(len(data))] = drawn.randrange(256)
        path.write_bytes(flipped)
    elif how < 0.15:
        path.write_bytes(data[: drawn.randrange(len(data))])
    elif how < 0.2:
        shutil.copy(drawn.choice([other for other in path.parent.iterdir() if other != path]), path)
    elif path.suffix == ".jsonl":
        found = [json.loads(line) for line in data.splitlines()]
        number = drawn.randrange(len(found))
        found[number] = _mutated(found[number], drawn)
        path.write_bytes(lines(found))
    else:
        content = json.loads(data)
        for _ in range(drawn.randrange(1, 3)):
            content = _mutated(content, drawn)
        path.write_text(json.dumps(content))
