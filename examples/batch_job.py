"""Answer many prompts in a fixed amount of KV memory, write each answer when it is there, and resume after a stop.

python examples/batch_job.py [MODEL] [ANSWERS]      (by default the embedded model, and answers.jsonl)
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import kvkeep

ANIMALS, PLACES = ("dog", "cat", "fox", "bird"), ("garden", "river", "market", "hill")
PROMPTS = {
    f"{animal}-{place}": f"Once upon a time a {animal} came to the {place}. It"
    for animal in ANIMALS
    for place in PLACES
}
MEMORY_BYTES = 4 * 2**20


def answered(path: Path) -> set[str]:
    """Return the prompts that an earlier run has answered. A line that was cut in the middle is removed."""
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(path, len(whole))  # the answers before it are not touched
        print("An answer was cut, and is made again.")
    return {json.loads(line)["id"] for line in whole.splitlines()}


def main(name: str | None = None, target: str = "answers.jsonl") -> None:
    path = Path(target)
    done = answered(path)
    left = [key for key in PROMPTS if key not in done]
    print(f"{len(done)} prompts are answered, {len(left)} are left.")
    model, tokenizer = kvkeep.load(name)
    sampling = kvkeep.SamplingParams(max_new_tokens=20)
    line = None
    with (
        kvkeep.Engine(model, tokenizer, budget=64, kv_memory=MEMORY_BYTES) as engine,
        path.open("a", encoding="utf-8") as file,
    ):
        print(f"{engine.rows} rows of {engine.row_bytes:,} bytes run at once.")

        def requests() -> Iterator[kvkeep.Request]:  # taken as rows become free, so the list may be of any length
            for key in left:
                yield kvkeep.Request(prompt=PROMPTS[key], sampling=sampling)

        for place, result in engine.run(requests()):
            if result.error:  # not written, so the next run tries it again
                print(f"{left[place]} has no answer: {result.error}")
                continue
            line = {"id": left[place], "text": result.text, "finish_reason": result.finish_reason}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
    print(f"The last answer: {line}" if left else "Nothing is left to do.")


if __name__ == "__main__":
    main(*sys.argv[1:])
