"""How long does the page of `kvkeep explain` take to make, to open and to follow the slider?

    python bench/explain.py [--tokens 2000] [--policies h2o snapkv local] [--repeats 3] [--model 28x8]

The page is made of a text with planted facts; `--model LAYERSxHEADS` takes a model with random weights and that many
layers and KV heads instead of the embedded one. The times in the browser need Chromium and the package playwright: the
page is open when its script has drawn it, and the slider has been followed when the frame after a move is drawn.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers
from lib import arguments, policy, positive, report

import kvkeep
from kvkeep.models.tiny.recall import question

OPENED = "performance.getEntriesByName('drawn')[0].startTime"
MOVED = """async () => {
    const slider = document.getElementById("time"), took = [];
    for (let moment = Number(slider.max); moment >= 0; moment--) {
        const begun = performance.now();
        slider.value = moment;
        slider.dispatchEvent(new Event("input", { bubbles: true }));
        await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
        took.push(performance.now() - begun);
    }
    return took;
}"""
WATCH = """new MutationObserver(() => performance.mark("drawn"))
    .observe(document, { attributes: true, subtree: true, attributeFilter: ["data-ready"] });"""


def shape(text: str) -> tuple[int, int]:
    """Layers and KV heads, from the command line."""
    if not (found := re.fullmatch(r"([1-9]\d{0,2})x([1-9]\d{0,2})", text)):
        raise argparse.ArgumentTypeError(f"{text} is not LAYERSxHEADS, such as 28x8")
    return int(found[1]), int(found[2])


def random_model(layers: int, heads: int, vocabulary: int) -> transformers.PreTrainedModel:
    """A model with narrow layers and random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": 2 * heads, "num_key_value_heads": heads}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, max_position_embeddings=2**20)).eval()


def in_browser(path: Path, repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds until the page was open, and those of each move of the slider; empty without a browser."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        return [], []
    opened: list[float] = []
    moved: list[float] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-quic"])
        for _ in range(repeats):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.add_init_script(WATCH)
            page.goto(f"file://{path}")
            page.wait_for_selector("html[data-ready]")
            opened.append(page.evaluate(OPENED))
            moved += page.evaluate(MOVED)
            page.close()
        browser.close()
    return opened, moved


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=positive, default=2000)
    parser.add_argument("--policies", type=policy, nargs="+", default=["h2o", "snapkv", "local"])
    parser.add_argument("--repeats", type=positive, default=3, help="how often the page is opened")
    parser.add_argument("--model", type=shape, help="layers and KV heads of a random model")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = kvkeep.load()
    if options.model:
        model = random_model(*options.model, len(tokenizer))
    asked = question(3, kind="word", n_facts=4, tokens=options.tokens)
    begun = time.perf_counter()
    found = kvkeep.explain(model, asked.prompt, tokenizer=tokenizer, policies=options.policies, budget=0.2)
    made = found.to_html()
    seconds = time.perf_counter() - begun
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(made, encoding="utf-8")
        opened, moved = in_browser(path, options.repeats)
    times = [
        *([f"{statistics.median(opened):.0f} ms"] if opened else ["no browser"]),
        *([f"{statistics.median(moved):.0f} ms, at most {max(moved):.0f}"] if moved else ["no browser"]),
    ]
    size = len(made.encode())
    columns = ["", "made", "page", "open", "a move of the slider"]
    row = [", ".join(options.policies), f"{seconds:.1f} s", f"{size / 1e6:.2f} MB", *times]
    data = {"seconds": seconds, "bytes": size, "tokens": len(found.tokens), "heads": len(found.heads)}
    title = f"{len(found.tokens)} tokens, {len(found.heads)} heads"
    report(title, columns, [row], {**data, "opened_ms": opened, "moved_ms": moved})


if __name__ == "__main__":
    main()
