"""Measures the model of the package on held-out material and writes the model card."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from . import corpus, quick
from .card import write_card
from .observe import observe
from .paths import PACKAGE
from .prepare import load_tokenizer
from .train import tokens_trained

CONTEXTS = (512, 1024, 2048)
SEED = 100_000
RESULTS = Path(__file__).parent / "results.json"
SAMPLES = (("Once upon a time", 1), ("One day, a little girl named Lily", 2), ("Tom and his dog were", 3))


def recall_table(model: Any, tokenizer: Tokenizer, filler: list[str] | None, tokens: int, n: int) -> dict[str, Any]:
    """Exact recall of one fact among 16, asked at the end: ``n`` words, ``n`` corrected ones, ``n / 4`` numbers."""
    common: dict[str, Any] = {"facts": 16, "tokens": tokens, "seed": SEED}
    words = quick.answer_all(
        model, tokenizer, quick.questions(tokenizer, filler, n=n, kinds=quick.KINDS[:-1], **common)
    )
    numbers = quick.answer_all(
        model, tokenizer, quick.questions(tokenizer, filler, n=n // 4, kinds=("number",), **common)
    )
    corrected = quick.answer_all(
        model,
        tokenizer,
        quick.questions(tokenizer, filler, n=n, kinds=quick.KINDS[:-1], corrected=True, **common),
    )
    return {
        "words": quick.share(words),
        "numbers": quick.share(numbers),
        "corrected": quick.share(corrected),
        "kinds": {kind: quick.share(words, kind) for kind in quick.KINDS[:-1]},
        "deciles": deciles(words),
        "questions": n,
        "guess": float(np.mean([1 / len(o.question.choices) for o in words])),
    }


def deciles(outcomes: list[quick.Outcome]) -> list[float]:
    """Recall by tenth of the text in which the fact stands."""
    tenths: list[list[bool]] = [[] for _ in range(10)]
    for outcome in outcomes:
        tenths[min(9, int(outcome.question.depth * 10))].append(outcome.right)
    return [float(np.mean(t)) if t else math.nan for t in tenths]


@torch.no_grad()
def story(model: Any, tokenizer: Any, start: str, seed: int) -> str:
    """150 tokens after a beginning, drawn at temperature 0.7 from the 40 most likely tokens."""
    torch.manual_seed(seed)
    ids = tokenizer(tokenizer.bos_token + " " + start, return_tensors="pt").to(model.device)
    out = model.generate(**ids, do_sample=True, temperature=0.7, top_k=40, max_new_tokens=150)
    return tokenizer.decode(out[0], skip_special_tokens=True).strip()


def attention_rows(work: Path, tokenizer: Tokenizer, filler: list[str]) -> list[torch.Tensor]:
    """Two recall texts and two passages of held-out novels, 2 048 tokens each."""
    asked = quick.questions(tokenizer, filler, n=2, facts=16, tokens=2048, seed=SEED)
    rows = [tokenizer.encode(f"<|begin|><|user|> {q.prompt}<|end|><|assistant|>").ids for q in asked]
    novels, begin = corpus.load(work / "validation_novels.npz"), tokenizer.token_to_id(corpus.BEGIN)
    rows += [[begin, *novels.row(random.Random(i), 2047).tolist()] for i in range(2)]
    return [torch.tensor(row) for row in rows]


def measure(work: Path, device: str, n: int) -> dict[str, Any]:
    """Everything the card says."""
    tokenizer = load_tokenizer(work)
    model = AutoModelForCausalLM.from_pretrained(PACKAGE).to(device).eval()
    filler = json.loads((work / "validation_filler.json").read_text())
    begin = tokenizer.token_to_id(corpus.BEGIN)
    results: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "recall": {}, "text": {}}
    for name, sentences, count in (("novels", filler["novels"], n), ("own", None, n // 4)):
        for tokens in CONTEXTS:
            results["recall"][f"{name}/{tokens}"] = table = recall_table(model, tokenizer, sentences, tokens, count)
            print(name, tokens, {k: table[k] for k in ("words", "numbers", "corrected", "deciles")}, flush=True)
    for name in ("novels", "stories"):
        texts = corpus.load(work / f"validation_{name}.npz")
        for length in (512, 2048):
            rows = 65536 // length if name == "novels" else 8192 // length
            loss = quick.text_loss(model, texts, rows=rows, length=length, begin=begin)
            results["text"][f"{name}/{length}"] = {"nats": loss, "perplexity": math.exp(loss)}
    fast = AutoTokenizer.from_pretrained(PACKAGE)
    results["samples"] = [{"seed": seed, "text": story(model, fast, start, seed)} for start, seed in SAMPLES]
    results["attention"] = observe(PACKAGE, attention_rows(work, tokenizer, filler["novels"]))
    return results


def report(work: Path, device: str, n: int) -> None:
    """Measure, keep the figures next to the script, and write the card."""
    results = measure(work, device, n)
    results["tokens_trained"] = tokens_trained()
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_card(results, PACKAGE / "README.md")
