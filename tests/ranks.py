"""Processes of tensor parallelism for tests: gloo over loopback, given a job of this module, and killed when it is late.

A rank of one process is a plain process without torch.distributed, so it is the reference for the others.
"""

import json
import os
import tempfile
import time
import traceback
from pathlib import Path

import processes

LIMIT_S = 240
"""Seconds after which processes that wait for each other are killed."""


def run(ranks, job, *args):
    """Run a job of this module on so many processes, and return what each has returned.

    Raises:
        AssertionError: one of them failed, or did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = [processes.start(_rank, rank, ranks, folder, job.__name__, args) for rank in range(ranks)]
        deadline = time.monotonic() + LIMIT_S
        for one in started:
            one.join(max(0.0, deadline - time.monotonic()))
        late = [one for one in started if one.is_alive()]
        for one in late:
            one.kill()
            one.join()
        found = [_read(Path(folder) / f"{rank}.json") for rank in range(ranks)]
    errors = [one["error"] for one in found if "error" in one]
    assert not errors, "\n".join(errors)
    assert not late, f"{len(late)} processes had not ended after {LIMIT_S} seconds"
    return [one["found"] for one in found]


def _read(path):
    return json.loads(path.read_text()) if path.exists() else {"error": f"{path.stem} has left nothing"}


def _rank(rank, ranks, folder, job, args):
    import torch

    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_RANK=str(rank))
    try:
        if ranks > 1:
            store = torch.distributed.FileStore(f"{folder}/store", ranks)
            torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        found = {"found": globals()[job](*args)}
    except BaseException:
        found = {"error": f"rank {rank} of {ranks}:\n{traceback.format_exc()}"}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # without waiting for ranks that have failed


def save_model(folder, kind="llama", *, kv_heads=4, heads=8, **others):
    """Save a model of random weights, large enough that no two tokens are nearly alike."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16)
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](
        **sizes, num_attention_heads=heads, num_key_value_heads=kv_heads, **others
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    model.save_pretrained(folder)
    return str(folder)


def load_model(folder):
    """Load it in the way of the running processes."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import kvkeep
    from kvkeep.models.load import quiet

    split = {}
    if torch.distributed.is_initialized():
        split["distributed_config"] = DistributedConfig(tp_size=torch.distributed.get_world_size())
    with quiet():
        return kvkeep.attach(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **split).eval())


def prompts(*lengths):
    """Texts of random tokens, padded on the left."""
    import torch

    made = [torch.randint(2, 128, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    ids = torch.zeros((len(lengths), max(lengths)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(made):
        ids[row, -len(text) :] = text
        mask[row, -len(text) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


# -- jobs --------------------------------------------------------------------------------------------------------------


def generate(folder, cases):
    """Tokens, kept positions, logits and lost mass of ``model.generate`` for each case: arguments of `BoundedCache`."""
    import kvkeep
    from kvkeep.argument import handed

    model, found = load_model(folder), []
    for case in cases:
        cache = kvkeep.BoundedCache(model.config, **case)
        options = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        told = {"return_dict_in_generate": True, "output_logits": True}
        out = model.generate(**prompts(60, 47), **handed(model, cache), **options, **told)
        layers = sorted(cache.bounded_layers())
        found.append(
            {
                "tokens": out.sequences[:, -14:].tolist(),
                "logits": [row.tolist() for row in out.logits],
                "positions": [[[sorted(head) for head in row] for row in cache.positions(n).tolist()] for n in layers],
            }
        )
    return found


def refused(folder, case):
    """The error of loading a model and making a cache for it."""
    import kvkeep
    from kvkeep.errors import KVKeepError

    try:
        kvkeep.BoundedCache(load_model(folder).config, **case)
    except KVKeepError as error:
        return f"{type(error).__name__}: {error}"
    return None
