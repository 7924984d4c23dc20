"""Write the digits of kvkeep's results: kept tokens, generated tokens and log-probabilities, a line for each case.

python tools/digits.py --output new.txt                         a few minutes on one core
python tools/digits.py --only /h2o/                             cases whose names hold this text, on the screen
python tools/digits.py --compare tools/records/digits.txt new.txt   the cases that differ; exits with 1 if any does
python tools/digits.py --compare OLD NEW --tolerance 1e-5       log-probabilities may differ by so much

The cases are every policy, backend and kind of store on the embedded model and on five tiny random models, in float32
on one thread. The script goes through public names only, so it runs unchanged when the inside of the code changes. A
case that kvkeep refuses has the name of the error in place of digits.

A line is ``NAME budget=N kept=HASH tokens=FIRST,...:HASH logp=FIRST,SUM:HASH``: a hash of the positions that each
layer and head holds at the end, the first tokens and a hash of all, and the first log-probability, the sum of all and a
hash of all bits. In an engine the shares of attention that were lost count among the log-probabilities. The digits
depend on the processor's instructions and on the versions of the libraries, which the first lines name: compare files
that were written on one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import struct
import sys
import tempfile
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

import kvkeep
from kvkeep.policies.base import own_options

BACKENDS = ("reference", "torch", "native")
VOCABULARY = 61
NEW_TOKENS = 8
BUDGETS = (64, 512)
"""The first budget makes policies evict; the second one is for policies that never do."""
SHOWN_TOKENS = 3
MOST_LAYERS = 8

PROMPT = """Once upon a time there was a fox who lived beside a river. Every morning it went down to the water and
looked for fish. The dog of the farmer is called Rex, and he sleeps in the garden under an old tree. Anna has a red ball
and Tom has a blue one. One day it began to rain, and the children ran into the house. Their mother made some bread and
told them a story about a king who had lost his crown. The king asked everybody in the town, but nobody had seen it."""


# What a change of kvkeep's public names would touch is in these few functions


@contextlib.contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Force a backend for a while, by the documented environment variable; ``None`` leaves the choice to kvkeep."""
    old = os.environ.pop("KVKEEP_BACKEND", None)
    if name is not None:
        os.environ["KVKEEP_BACKEND"] = name
    try:
        yield
    finally:
        os.environ.pop("KVKEEP_BACKEND", None)
        if old is not None:
            os.environ["KVKEEP_BACKEND"] = old


def variants() -> list[str]:
    """Return the strings of all policies' presets, and of policies with another value of each switch or choice."""
    found = []
    for name in kvkeep.available_policies():
        policy: Any = kvkeep.parse(name)
        found += [f"{name}:{preset}" for preset in policy.presets]
        kinds = typing.get_type_hints(type(policy))
        for entry in own_options(type(policy)):
            default = getattr(policy, entry.name)
            choices: tuple[Any, ...] = (
                (True, False) if kinds[entry.name] is bool else typing.get_args(kinds[entry.name])
            )
            others = [value for value in choices if isinstance(value, bool | str) and value != default]
            found += [f"{name}:{entry.name}={str(value).lower()}" for value in others]
    return found


def request(prompt: Any, *, snapshot: Any = None, **options: Any) -> kvkeep.Request:
    """Make a request that reports log-probabilities; ``snapshot`` is the memory that it continues."""
    fields = {entry.name for entry in dataclasses.fields(kvkeep.Request)}
    if snapshot is not None:
        options["snapshot" if "snapshot" in fields else "memory"] = snapshot
    options.setdefault("sampling", kvkeep.SamplingParams(max_new_tokens=NEW_TOKENS))
    return kvkeep.Request(prompt=prompt, logprobs=0, ignore_end=True, **options)


def positions(holder: Any, rows: int = 1) -> list[Any]:
    """Return the sorted positions that each row, layer and head of a cache or a snapshot holds."""
    kept: list[Any] = []
    for layer in range(MOST_LAYERS):
        try:
            held = holder.positions(layer)
        except (kvkeep.UnsupportedOperationError, IndexError):  # no slots in this layer, or no such layer
            continue
        by_row = held.reshape(rows, -1, held.shape[-1]).tolist()
        kept.append([[sorted(position for position in head if position >= 0) for head in row] for row in by_row])
    return kept


# Digits


@dataclass
class Digits:
    """The numbers of a case."""

    budget: int
    kept: list[Any] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add_result(self, result: kvkeep.Result) -> None:
        """Add the tokens of an engine's result, their log-probabilities, and the attention that evicted tokens had."""
        if result.error is not None:
            raise SystemExit(f"A request ended with an error: {result.error}")
        self.tokens += result.token_ids
        self.logprobs += [entry.value for entry in result.logprobs]
        self.logprobs += [entry.value for entry in result.prompt_logprobs]
        lost = dataclasses.astuple(result.lost_mass)
        self.logprobs += [float(share) for share in lost if isinstance(share, float)]

    def line(self) -> str:
        """Write the numbers."""
        shown = ",".join(map(str, self.tokens[:SHOWN_TOKENS]))
        bits = b"".join(struct.pack("<d", value) for value in self.logprobs)
        first, total = (self.logprobs[0], sum(self.logprobs)) if self.logprobs else (0.0, 0.0)
        parts = {
            "budget": str(self.budget),
            "kept": short_hash(repr(self.kept).encode()) if self.kept else "",
            "tokens": f"{shown}:{short_hash(repr(self.tokens).encode())}",
            "logp": f"{first:.9g},{total:.9g}:{short_hash(bits)}",
        }
        return " ".join(f"{name}={part}" for name, part in parts.items() if part)


def short_hash(data: bytes) -> str:
    """Return the first characters of a hash."""
    return hashlib.sha256(data).hexdigest()[:8]


# Models


COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GATED: dict[str, Any] = {**COMMON, "intermediate_size": 48, "num_key_value_heads": 2}
LAYERS = ["sliding_attention", "full_attention", "full_attention"]
MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
}
CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**GATED),
    "qwen3": lambda: transformers.Qwen3Config(**GATED, head_dim=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**GATED, "num_hidden_layers": 3}, head_dim=16, sliding_window=80, layer_types=LAYERS
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**COMMON, intermediate_size=48),
    "falcon-h1": lambda: transformers.FalconH1Config(**GATED, **MAMBA, mamba_chunk_size=8),
}
EMBEDDED = "embedded"
MODELS = (EMBEDDED, *CONFIGS)


@cache
def load(name: str) -> tuple[Any, Any]:
    """Return a model in evaluation mode that kvkeep is attached to, and its tokenizer, if it has one."""
    if name == EMBEDDED:
        return kvkeep.load(dtype="float32", device="cpu")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)  # with usual weights attention is nearly uniform, and every policy much the same
    return kvkeep.attach(model), None


@cache
def prompts(name: str) -> tuple[tuple[int, ...], ...]:
    """Return three prompts of a model, the first one the longest."""
    if name == EMBEDDED:
        ids = tuple(load(name)[1](PROMPT)["input_ids"])
    else:
        generator = torch.Generator().manual_seed(1)
        ids = tuple(torch.randint(3, VOCABULARY, (110,), generator=generator).tolist())
    return ids[:110], ids[:1] + ids[9:96], ids[:1] + ids[40:103]


def batch(name: str, rows: int) -> dict[str, torch.Tensor]:
    """Return a model's first prompts as a batch that is padded on the left."""
    chosen = prompts(name)[:rows]
    width = max(map(len, chosen))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in chosen])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in chosen])
    return {"input_ids": ids, "attention_mask": mask}


# Kinds of cases


def with_cache(name: str, policy: str, options: Mapping[str, Any], budget: int) -> Digits:
    """Run a padded batch through transformers' ``generate`` with a bounded cache."""
    model, _ = load(name)
    with tempfile.TemporaryDirectory() as folder:
        if options.get("head_budget") == "profile":
            options = {**options, "head_budget": f"profile:{head_profile(name, folder)}"}
        bounded = kvkeep.BoundedCache(model.config, policy, budget, **options)
    return generated(model, {**batch(name, 2), "past_key_values": bounded}, bounded, Digits(budget))


def generated(model: Any, inputs: Mapping[str, Any], bounded: Any, digits: Digits) -> Digits:
    """Generate greedily, and add tokens, their log-probabilities and what the cache holds at the end."""
    out = model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = out.sequences[:, -NEW_TOKENS:]
    logprobs = torch.stack(out.logits, dim=1).double().log_softmax(-1).gather(-1, new[..., None])
    digits.kept += positions(bounded, len(new))
    digits.tokens += new.flatten().tolist()
    digits.logprobs += logprobs.flatten().tolist()
    return digits


def calibrated(name: str, policy: str, options: Mapping[str, Any], budget: int) -> Digits:
    """Run a batch with a file of mean queries, as TriAttention's official code writes it."""
    config = load(name)[0].config
    heads, half = config.num_attention_heads, config.hidden_size // config.num_attention_heads // 2
    generator = torch.Generator().manual_seed(2)
    stats = {}
    for layer, head in itertools.product(range(config.num_hidden_layers), range(heads)):
        real, imaginary, more = torch.randn(3, half, generator=generator)
        length = torch.hypot(real, imaginary) + more.abs()
        stats[f"layer{layer:02d}_head{head:02d}"] = {
            "q_mean_real": real,
            "q_mean_imag": imaginary,
            "q_abs_mean": length,
        }
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"stats": stats}, f"{folder}/queries.pt")
        return with_cache(name, f"{policy}:calibration={folder}/queries.pt", options, budget)


def with_snapshot(name: str, policy: str, options: Mapping[str, Any], budget: int) -> Digits:
    """Read a prompt, save its memory to a file, and continue it in a new cache."""
    model, _ = load(name)
    first, more = list(prompts(name)[0]), list(prompts(name)[1][1:12])
    bounded = kvkeep.BoundedCache(model.config, policy, budget, **options)
    model(**bounded.continue_with(first))
    with tempfile.TemporaryDirectory() as folder:
        bounded.snapshot().save(f"{folder}/memory.kvkeep")
        read = kvkeep.Snapshot.load(f"{folder}/memory.kvkeep")
    again = kvkeep.BoundedCache.from_snapshots(model.config, [read])
    digits = Digits(budget, positions(read))
    return generated(model, again.continue_with(first + more), again, digits)


def with_engine(name: str, policy: str, options: Mapping[str, Any], budget: int) -> Digits:
    """Run three requests in two rows of an engine."""
    digits = Digits(budget)
    asked = [request(prompt) for prompt in prompts(name)]
    with engine(name, policy, budget, options) as running:
        for result in running.generate(asked):
            digits.add_result(result)
    return digits


def engine(name: str, policy: str, budget: int, options: Mapping[str, Any]) -> kvkeep.Engine:
    """Make an engine of two rows."""
    model, tokenizer = load(name)
    return kvkeep.Engine(model, tokenizer, policy=policy, budget=budget, **{"rows": 2, **options})


def together(name: str, policy: str, options: Mapping[str, Any], budget: int) -> Digits:
    """Run requests of this policy beside requests of others in an engine's rows."""
    digits = Digits(budget)
    asked = []
    for other in ("h2o", "local", "streaming_llm:sinks=2", "tova", "knorm", "random"):
        asked += [request(prompts(name)[1], policy=other, sequence=3, budget=48), request(prompts(name)[0])]
    with engine(name, policy, budget, {**options, "rows": 4}) as running:
        for result in running.generate(asked):
            digits.add_result(result)
    return digits


def in_sessions(name: str, policy: str, options: Mapping[str, Any], budget: int) -> Digits:
    """Have two turns in a session, fork it, rewind it, and go on from its file in another engine."""
    digits = Digits(budget)
    first, second, third = ([*prompt[:60]] for prompt in prompts(name))
    with tempfile.TemporaryDirectory() as folder:
        options = {**options, "session_dir": folder}
        with engine(name, policy, budget, options) as running:
            session = running.session(name="a")
            digits.add_result(session.ask(request(first)))
            before = session.snapshot()
            digits.kept += positions(before)
            fork = session.fork(1)[0]
            digits.add_result(session.ask(request(second)))
            digits.add_result(fork.ask(request(third)))
            session.rewind(before)
            session.pin([(3, 7)])
            digits.add_result(session.ask(request(third)))
            session.close()
        with engine(name, policy, budget, options) as running:
            session = running.session(name="a")
            digits.add_result(session.ask(request(second)))
            digits.kept += positions(session.snapshot())
    return digits


def with_prefix(name: str, policy: str, options: Mapping[str, Any], budget: int) -> Digits:
    """Continue a text that was read once by two requests, and share beginnings of prompts."""
    digits = Digits(budget)
    first, second, third = (list(prompt) for prompt in prompts(name))
    with engine(name, policy, budget, options) as running:
        memory = running.prefix(first)
        digits.kept += positions(memory)
        for result in running.generate([request(second[:20], snapshot=memory), request(third[:20], snapshot=memory)]):
            digits.add_result(result)
    with engine(name, policy, budget, {**options, "prefill_chunk": 32, "prefix_memory": 2**24}) as running:
        for prompt in (first, first[:70] + second[:10], first[:40] + third[:30]):
            digits.add_result(running.generate(request(prompt))[0])
    return digits


def with_sampling(name: str, policy: str, options: Mapping[str, Any], budget: int) -> Digits:
    """Draw tokens, pin a span, and ask for the prompt's log-probabilities."""
    digits = Digits(budget)
    drawn = kvkeep.SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.8, top_p=0.9, top_k=20, seed=7)
    asked = [
        request(prompts(name)[0], sampling=drawn, sequence=5),
        request(prompts(name)[1], sampling=drawn, pins=[(2, 9)]),
        request(prompts(name)[2], prompt_logprobs=0),
    ]
    with engine(name, policy, budget, options) as running:
        for result in running.generate(asked):
            digits.add_result(result)
    return digits


def guarded(name: str, policy: str, options: Mapping[str, Any], budget: int) -> Digits:
    """Let guards choose a part of twice the budget."""
    digits = Digits(budget)
    with engine(name, policy, 2 * budget, options) as running:
        for result in running.generate([request(prompt, guard=0.2) for prompt in prompts(name)]):
            digits.tokens.append(result.budget)
            digits.add_result(result)
    return digits


# The list of cases


Kind = Callable[[str, str, Mapping[str, Any], int], Digits]


@dataclass(frozen=True)
class Case:
    """A run whose digits are written."""

    model: str
    backend: str | None
    policy: str
    store: str
    kind: Kind = with_cache
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name that begins the case's line."""
        return f"{self.model}/{self.backend or 'auto'}/{self.policy}/{self.store}"

    def line(self) -> str:
        """Run the case at the first budget at which its policy can run, and write its line."""
        refusal = ""
        for budget in BUDGETS:
            try:
                with backend(self.backend), torch.inference_mode():
                    return f"{self.name} {self.kind(self.model, self.policy, self.options, budget).line()}"
            except kvkeep.KVKeepError as error:
                refusal = refusal or type(error).__name__
                if not isinstance(error, kvkeep.BudgetError | kvkeep.CapacityError):
                    break
        return f"{self.name} refused={refusal}"


def head_profile(name: str, folder: str) -> str:
    """Write a file with the need of each head of a model, and return its path."""
    config = load(name)[0].config
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    needs = [[(3 * layer + 2 * head) % 5 / 4 for head in range(heads)] for layer in range(layers)]
    facts = {"name": name, "model_type": config.model_type, "layers": layers, "kv_heads": heads}
    text = {"format": "kvkeep-profile", "version": 1, "model": facts, "weights": None, "heads": needs, "least": 20}
    path = Path(folder) / f"{name}.json"
    path.write_text(json.dumps({**text, "sinks": 4, "measured": {}}))
    return str(path)


STORES: dict[str, dict[str, Any]] = {
    "ada": {"head_budget": "ada"},
    "global": {"head_budget": "global"},
    "profile": {"head_budget": "profile"},
    "8": {"kv_bits": "8"},
    "4": {"kv_bits": "4"},
    "k8v4": {"kv_bits": "k8v4"},
    "ada+4": {"head_budget": "ada", "kv_bits": "4"},
    "global+8": {"head_budget": "global", "kv_bits": "8"},
    "slot": {"positions": "slot"},
    "slot+8": {"positions": "slot", "kv_bits": "8"},
    "chunks": {"prefill_chunk": 24},
    "ada+chunks": {"head_budget": "ada", "prefill_chunk": 24},
    "pins": {"pins": [(2, 9), (30, 33)]},
    "pyramid": {"layer_budget": "pyramid:4"},
}


ENGINES: dict[str, dict[str, Any]] = {
    "ada": {"head_budget": "ada"},
    "global+4": {"head_budget": "global", "kv_bits": "4"},
    "8": {"kv_bits": "8"},
    "slot": {"positions": "slot"},
    "chunks": {"prefill_chunk": 24},
    "turns": {"rows": 1, "host_rows": 2},
}
KINDS: dict[str, Kind] = {
    "snapshot": with_snapshot,
    "engine": with_engine,
    "together": together,
    "sessions": in_sessions,
    "prefix": with_prefix,
    "sampling": with_sampling,
    "guard": guarded,
}
FEW = ("h2o", "snapkv", "leverage", "scissorhands", "adakv")
"""Policies that differ in what they ask of attention and of the store, for what not every policy has to show."""


def cases() -> Iterator[Case]:
    """Yield all cases."""
    plain = list(kvkeep.available_policies())
    for model, forced, policy in itertools.product(MODELS, BACKENDS, plain):
        yield Case(model, forced, policy, "dense")
    yield from (Case(EMBEDDED, "native", policy, "dense") for policy in variants())
    for model in MODELS[:2]:
        yield Case(model, "native", "triattention", "calibrated", calibrated)
    for (store, options), policy in itertools.product(STORES.items(), plain):
        yield Case(EMBEDDED, "native", policy, store, options=options)
        yield from (Case("llama", forced, policy, store, options=options) for forced in ("torch", "reference"))
    for (store, kind), policy in itertools.product(KINDS.items(), plain):
        yield Case(EMBEDDED, None, policy, store, kind)
    for (store, kind), model, policy in itertools.product(KINDS.items(), CONFIGS, FEW):
        yield Case(model, None, policy, store, kind)
        if model == "llama":
            yield from (Case(model, forced, policy, store, kind) for forced in ("torch", "reference"))
    for (store, options), policy in itertools.product(ENGINES.items(), FEW):
        yield Case(EMBEDDED, None, policy, f"engine+{store}", with_engine, options)
        yield Case("llama", "torch", policy, f"engine+{store}", with_engine, options)
        yield Case(EMBEDDED, None, policy, f"sessions+{store}", in_sessions, options)
    for store, policy in itertools.product(("ada", "global", "8", "4", "slot", "pins"), FEW):
        yield Case(EMBEDDED, None, policy, f"snapshot+{store}", with_snapshot, STORES[store])


# Writing and comparing


def header() -> list[str]:
    """Return what the digits depend on beside the code."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions["instructions"] = torch.backends.cpu.get_cpu_capability()
    return [f"# {name} {version}" for name, version in versions.items()]


def lines(chosen: Iterable[Case]) -> Iterator[str]:
    """Run cases and yield their lines; say now and then how many are done."""
    every = list(chosen)
    for number, case in enumerate(every):
        if number % 100 == 0:
            print(f"{number} of {len(every)} cases, next {case.name}", file=sys.stderr, flush=True)
        yield case.line()


def read(path: Path) -> dict[str, dict[str, str]]:
    """Return the parts of each case's line of a file; the lines at its beginning are cases without a result."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(" ") if not line.startswith("#") else (line, "", "")
        found[name] = dict(part.split("=", 1) for part in rest.split())
    return found


def numbers(logp: str) -> list[float]:
    """Return the log-probabilities that a line shows."""
    return [float(number) for number in logp.partition(":")[0].split(",")]


def same(name: str, old: str, new: str, tolerance: float) -> bool:
    """Say whether a part of a line is the same; shown log-probabilities may differ by a tolerance."""
    if name != "logp" or tolerance == 0.0:
        return old == new
    return all(abs(a - b) <= tolerance for a, b in zip(numbers(old), numbers(new), strict=True))


def differences(
    old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]], tolerance: float
) -> list[str]:
    """Return a line for each case that is in one file only, or has other digits."""
    found = [f"only in the first file: {name}" for name in old if name not in new]
    found += [f"only in the second file: {name}" for name in new if name not in old]
    for name in old:
        if name not in new:
            continue
        before, after = old[name], new[name]
        parts = [part for part in {**before, **after} if part not in before or part not in after]
        parts += [part for part in before if part in after and not same(part, before[part], after[part], tolerance)]
        if parts:
            shown = (f"{part} {before.get(part, '-')} -> {after.get(part, '-')}" for part in parts)
            found.append(f"{name}: {'; '.join(shown)}")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Write the digits of all cases, or compare two files of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the file to write; by default the screen")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose names hold this text")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="compare two files")
    parser.add_argument("--tolerance", type=float, default=0.0, help="of log-probabilities, in --compare")
    options = parser.parse_args(arguments)
    if options.compare:
        old, new = map(read, options.compare)
        found = differences(old, new, options.tolerance)
        print("\n".join([*found, f"{len(found)} of {len(old)} differ."]))
        sys.exit(1 if found else 0)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", ".past_key_values. is deprecated", FutureWarning)
    chosen = (case for case in cases() if options.only in case.name)
    text = "".join(f"{line}\n" for line in (*header(), *lines(chosen)))
    if options.output:
        options.output.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
