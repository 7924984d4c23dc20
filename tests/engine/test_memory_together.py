"""Sessions, prefixes, equal prompts, pins and guards of several policies in one engine, each as it is alone."""

import random
from dataclasses import dataclass, replace

import pytest
from sweeps import sweep

import kvkeep
from kvkeep import Snapshot
from kvkeep.engine import Engine, Request, scheduler
from kvkeep.engine.sampling_params import SamplingParams

from .models import model
from .test_equal import prompt_of

POLICIES = ("h2o:recent=2", "scissorhands:window=1,recent=1,drop=2", "spatten", "adakv:window=2", "random")
POLICIES += ("tova", "snapkv:window=2,decode=grow", "topk_dynamic")
BUDGET = 16


@dataclass
class Talk:
    """A conversation of one kind: its turns one after the other, and the answers so far."""

    kind: str
    policy: str
    turns: list[Request]
    found: list[tuple[object, ...]]


def talks_of(rng, chunk):
    """Conversations whose turns pin some of their own tokens; the first turn of some chooses its budget."""
    for _ in range(5):
        policy = rng.choice([name for name in POLICIES if not (chunk and kvkeep.parse(name).cascades)])
        kind, turns, before = rng.choice(["session", "session", "prefix", "equal"]), [], 0
        guarded = not chunk and policy in ("h2o:recent=2", "tova") and kind != "prefix" and rng.random() < 0.5
        for i in range(3):
            n, new = rng.choice([5, 9]) + 8 * (i == 0), rng.randint(1, 5)
            pins = ((before + 1, before + 3),) if rng.random() < 0.5 and i < 2 and not guarded else ()
            guard = 0.7 if i == 0 and guarded else None
            sampling = SamplingParams(max_new_tokens=new, temperature=rng.choice([0.0, 0.8]))
            turns.append(Request(prompt=prompt_of(rng.randrange(3), n), sampling=sampling, pins=pins, guard=guard))
            before += n + new
        yield Talk(kind, policy, turns, [])


def shown(result):
    return result.error, result.token_ids, result.budget, result.guarded


def tell(engine, talk, path=None):
    """Hold a conversation, pausing after each answer. With a path its memory goes through a file, or lies on a disk."""
    kind, budget = talk.kind, 64 if talk.policy in POLICIES[-2:] else BUDGET
    if kind == "equal":
        for _ in range(2 if path else 1):
            found = engine.generate([replace(talk.turns[0], policy=talk.policy, budget=budget)] * (3 if path else 1))
            talk.found.extend({shown(one) for one in found} - set(talk.found))
            yield
        return
    name = f"talk-{id(talk)}" if path else None
    session = engine.session(policy=talk.policy, budget=budget, name=name)
    for turn in talk.turns:
        if kind == "prefix" and (told := session.token_ids):
            memory = session.snapshot()
            if path:
                memory.save(path)
                memory = Snapshot.load(path)
            question = replace(turn, snapshot=memory, pins=())
            talk.found.append(shown(engine.generate(question)[0]))
            assert session.token_ids == told
        talk.found.append(shown(session.ask(turn)))
        if path:
            session.close()
            session = engine.session(name=name)
        yield


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "chunk"), sweep([(n, c) for n in range(12) for c in (None, 6)], lambda c: c[0] < 4))
def test_each_gets_what_it_gets_alone(seed, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "SHORTEST", 4)
    rng, options = random.Random(seed), {"policy": "h2o:recent=2", "budget": 64, "prefill_chunk": chunk}
    talks = list(talks_of(rng, chunk))
    shelf = {"session_dir": tmp_path / "idle", "session_memory": rng.choice([0, 3000]), "rows": rng.randint(1, 3)}
    if chunk:
        shelf["prefix_memory"] = 10**7
    with Engine(model("llama"), **options, **shelf) as engine:
        going = [tell(engine, talk, tmp_path / f"{i}.kvkeep") for i, talk in enumerate(talks)]
        while going:
            one = rng.choice(going)
            if next(one, going) is going:
                going.remove(one)
        assert not engine.busy
    for talk in talks:
        alone = replace(talk, found=[])
        with Engine(model("llama"), **options, rows=1) as engine:
            list(tell(engine, alone))
        assert talk.found == alone.found, talk.policy
