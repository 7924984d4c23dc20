"""Read a document once, keep its memory in a file of constant size, and ask about it many times.

python examples/document.py [MODEL] [TEXT_FILE]      (by default the embedded model, and the story below)
"""

import sys
import tempfile
import time
from pathlib import Path

import kvkeep

STORY = """The lighthouse stands on a hill above the bay. Anna keeps her lantern in the attic. Every evening she climbs
the stairs and looks out at the sea. The name of Anna's cat is Pepper. The cat sleeps on a chair beside the stove. In
winter the storms come from the north, and the fishing boats stay in the harbor for many days. The color of Boris's boat
is green. He painted it in spring. Boris keeps his rope in the cellar. On Sundays the children of the village come up
the hill. They eat bread and honey, and Anna tells them a story about a whale. The road to the village is steep and
narrow."""
QUESTIONS = ("Where does Anna keep her lantern?", "What is the name of Anna's cat?", "Where does Boris keep his rope?")
SHORT = kvkeep.SamplingParams(max_new_tokens=24)


def main(name: str | None = None, file: str | None = None) -> None:
    text = STORY if file is None else Path(file).read_text()
    model, tokenizer = kvkeep.load(name)
    # this policy keeps what a later question may need; `kvkeep remember` uses it, too
    engine = kvkeep.Engine(model, tokenizer, policy="reread:later", budget=128, rows=1)
    with engine, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "document.kvkeep"
        start = time.perf_counter()
        engine.remember(text).save(path)
        print(f"Read in {time.perf_counter() - start:.1f} s; the file has {path.stat().st_size:,} bytes.")
        memory = kvkeep.Snapshot.load(path)  # in another process, or weeks later
        for question in QUESTIONS:
            (result,) = engine.generate(kvkeep.Request(prompt=question, snapshot=memory, sampling=SHORT))
            print(f"{question} {result.text.strip()}  ({result.ttft_s:.2f} s to the first token)")


if __name__ == "__main__":
    main(*sys.argv[1:])
