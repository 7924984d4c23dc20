"""A replica of a server, without Ray: it answers for itself alone, and leaves its sessions to the next one."""

import asyncio
import json

import pytest

pytest.importorskip("fastapi")

from kvkeep.errors import InputError
from kvkeep.scale import ray_serve
from kvkeep.scale.driver import ModelRecipe
from kvkeep.scale.ray_serve import Replica, ReplicaRecipe
from kvkeep.server.replicas import RESPONSE, SESSION, Received
from kvkeep.server.settings import ServerSettings

OWNER = "everybody"


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_serve, "settle", lambda: None)  # it is for processes that serve until they end
    recipe = ReplicaRecipe(
        model=ModelRecipe(model=None, device="cpu"),
        settings=ServerSettings(name="tiny", session_dir=str(tmp_path)),
        engine={"budget": 96, "rows": 1},
    )
    begun = []

    def make(name):
        begun.append(Replica(recipe, name))
        return begun[-1]

    yield make
    for one in begun:
        one.__del__()


def ask(one, to, path, body):
    """Status and body of an answer; ``None`` if the replica is not meant."""

    async def whole():
        raw = json.dumps(body).encode()
        return [message async for message in one.ask(to, Received("POST", path, body=raw))]

    messages = asyncio.run(whole())
    if messages == [None]:
        return None
    return messages[0]["status"], json.loads(b"".join(message.get("body", b"") for message in messages))


def turn(one, to):
    body = {"messages": [{"role": "user", "content": "Once"}], "session_id": "trip", "max_tokens": 2}
    return ask(one, to, "/v1/chat/completions", body)


def holds(one, *key):
    return asyncio.run(one.holds(*key))


@pytest.mark.long
def test_a_replica_that_ends_leaves_its_sessions_to_the_next_one(made, tmp_path):
    one = made("one")
    assert ask(one, "two", "/v1/sessions", {"id": "trip"}) is None
    assert not holds(one, "one", SESSION, OWNER, "trip")
    assert ask(one, "one", "/v1/sessions", {"id": "trip"})[0] == 201
    status, first = turn(one, "one")
    assert status == 200
    assert holds(one, "one", SESSION, OWNER, "trip")
    assert not holds(one, "two", SESSION, OWNER, "trip")
    assert not holds(one, "one", RESPONSE, OWNER, "trip")
    one.__del__()
    one.__del__()
    assert [path.name for path in (tmp_path / "replica-one").iterdir()] == ["everybody--trip.kvkeep"]
    two = made("two")
    status, second = turn(two, "two")
    assert status == 200, second
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1
    assert not (tmp_path / "replica-one").exists()


def test_what_a_replica_tells_ray_serve(made):
    one = made("one")
    facts = asyncio.run(one.facts())
    assert (facts.rows, facts.weights) == (1, one._weights)
    assert asyncio.run(one.record_routing_stats()) == {"rows": 1}
    assert asyncio.run(one.record_autoscaling_stats()) == {"rows": 1, "busy": 0}


def test_a_replica_that_cannot_be_made_leaves_nothing_behind(made, tmp_path, monkeypatch):
    (tmp_path / "replica-one").write_text("")
    with pytest.raises(InputError, match="cannot be shared by servers"):
        made("one")
