"""Processes of tensor parallelism for tests: gloo over loopback, given a job of this module, killed when they are late.

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
    """Save a model of random weights, in which no two tokens are nearly alike."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](
        **sizes, num_attention_heads=heads, num_key_value_heads=kv_heads, **others
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
            else:  # under norms with equal weights all keys of Qwen3 have the same length, a tie for knorm
                parameter.mul_(0.5 + torch.rand_like(parameter))
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
    from kvkeep.cache.hf_layers import handed

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


def run_engine(folder, cases, requests):
    """The results of engines with these options, all with the same requests."""
    import kvkeep

    model, found = load_model(folder), []
    for options in cases:
        with kvkeep.Engine(model, **options) as engine:
            results = engine.generate([_request(one) for one in requests])
        names = ("token_ids", "finish_reason", "budget", "guarded", "error")
        losses = [(one.lost_mass.prompt, one.lost_mass.decode) for one in results]
        found.append({"loss": losses, **{name: [getattr(one, name) for one in results] for name in names}})
    return found


def _request(asked):
    """A request from the length of its random prompt and other options."""
    from kvkeep import Request, SamplingParams

    sampling = SamplingParams(**asked.get("sampling", {}))
    rest = {name: value for name, value in asked.items() if name not in ("length", "sampling")}
    return Request(prompt=prompts(asked["length"])["input_ids"][0].tolist(), sampling=sampling, **rest)


def disagree(folder, cases):
    """The errors of engines whose processes are given something else each: options, and requests as for `_request`.

    After each error all processes give the same to a new engine, which has to work.
    """
    import kvkeep
    from kvkeep.errors import InputError

    model, found = load_model(folder), []
    rank = torch_rank()
    for case in cases:
        options = {"policy": "h2o", "budget": 24, "rows": 2} | case.get("options", [{}, {}])[rank]
        with kvkeep.Engine(model, **options) as engine:
            try:
                found.append([one.token_ids for one in engine.generate([_request(one) for one in case["asked"][rank]])])
            except InputError as error:
                found.append(str(error))
    with kvkeep.Engine(model, policy="h2o", budget=24) as engine:
        return [*found, [list(one.token_ids) for one in engine.generate([_request({"length": 9})])]]


def cancel_in_one(folder):
    """The error of engines of which one has cancelled a request between two steps."""
    import kvkeep
    from kvkeep.errors import InputError

    with kvkeep.Engine(load_model(folder), policy="h2o", budget=24) as engine:
        for length in (9, 12):
            engine.add(_request({"length": length, "sampling": {"max_new_tokens": 9}}))
        engine.step()
        if torch_rank() == 1:
            engine.cancel(0)
        try:
            engine.step()
        except InputError as error:
            return str(error)


def leave_others(folder):
    """The error of the first process, once the second has ended without a word."""
    import kvkeep
    from kvkeep.errors import InputError

    with kvkeep.Engine(load_model(folder), policy="h2o", budget=24) as engine:
        if torch_rank() == 1:
            return None
        try:
            engine.generate([_request({"length": 9})])
        except InputError as error:
            return str(error)


def torch_rank():
    import torch

    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def converse(folder, policy):
    """Turns of a session, a fork from its memory, and a request that continues it."""
    import kvkeep

    model = load_model(folder)
    with kvkeep.Engine(model, policy=policy, budget=24, rows=2, prefill_chunk=16, prefix_memory=2**24) as engine:
        memory = engine.prefix(prompts(50)["input_ids"][0].tolist())
        told = [_request({"length": n, "memory": memory, "sampling": {"max_new_tokens": 9}}) for n in (5, 7, 5)]
        found = [one.token_ids for one in engine.generate(told)]
        with engine.session(snapshot=memory) as session:
            found += [session.ask(_request({"length": n, "sampling": {"max_new_tokens": 8}})).token_ids for n in (4, 6)]
    return {"tokens": found, "weights": memory.fingerprint.weights, "config": memory.fingerprint.config}


def save_snapshots(folder, cases, to):
    """Read a text under each case, save the memory, and go on with it."""
    import torch

    import kvkeep

    model, found = load_model(folder), []
    for number, case in enumerate(cases):
        cache = kvkeep.BoundedCache(model.config, **case)
        with torch.inference_mode():
            model(**cache.continue_with(prompts(60)["input_ids"]))
        snapshot = cache.snapshot()
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            snapshot.save(f"{to}/{number}.kvk")
        found.append(_go_on(model, cache))
    return found


def continue_snapshots(folder, cases, at):
    """Go on with the memories that other processes have saved."""
    import kvkeep

    model = load_model(folder)
    read = [kvkeep.Snapshot.load(f"{at}/{number}.kvk") for number in range(len(cases))]
    return [_go_on(model, kvkeep.BoundedCache.from_snapshots(model.config, [one])) for one in read]


def _go_on(model, cache):
    import torch

    ids = torch.cat([prompts(60)["input_ids"], prompts(11)["input_ids"]], dim=1)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    out = model.generate(**cache.continue_with(ids), **options)
    held = [[sorted(head) for head in cache.positions(n)[0].tolist()] for n in sorted(cache.bounded_layers())]
    return {"tokens": out[0, -12:].tolist(), "positions": held}
