"""The router before replicas: sessions stay with their holder, others go where there is room, deaths are one error."""

from __future__ import annotations

import json
import threading
import time

import pytest

from .routed import fronted
from .running import WAIT_S, events, httpx, keys

CHAT, COMPLETE, SESSIONS = "/v1/chat/completions", "/v1/completions", "/v1/sessions"
LONG = {"prompt": "A", "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with fronted(folder=tmp_path_factory.mktemp("sessions")) as running:
        yield running


@pytest.fixture
def mortal(tmp_path):
    """Replicas that a test may kill."""
    with fronted(folder=tmp_path) as running:
        yield running


def make(running, name):
    answer = running.post(SESSIONS, {"id": name})
    assert answer.status_code == 201, answer.text


def turn(running, name, text="And then?", **more):
    return running.chat(messages=[{"role": "user", "content": text}], session_id=name, **more)


def holder(running, name, owner="everybody"):
    (found,) = [one for one, app in running.replicas.apps.items() if app.state.sessions.holds(owner, name)]
    return found


def made_at(running, name):
    """Make a session, and return the replica that has it."""
    make(running, name)
    return holder(running, name)


def asked(running, work):
    """The replicas that get requests while some work is done."""
    before = len(running.replicas.asked)
    work()
    return [replica for replica, _ in running.replicas.asked[before:]]


def settle(running, rows):
    """Wait until the router counts so many rows as taken: an answer arrives before its row is counted as free."""
    end = time.monotonic() + WAIT_S
    while sum(running.queue._places.busy.values()) != rows:
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.long
def test_turns_of_a_session_stay_with_its_replica(two):
    names = [f"stay-{n}" for n in range(4)]
    for name in names:
        make(two, name)
    homes = {name: holder(two, name) for name in names}
    assert set(homes.values()) == {"one", "two"}
    for name in names * 2:
        assert asked(two, lambda: turn(two, name)) == [homes[name]]  # noqa: B023  called at once
    for name in names:
        assert two.client.get(f"{SESSIONS}/{name}").json()["seen_tokens"] > 8
        assert two.client.delete(f"{SESSIONS}/{name}").status_code == 200


@pytest.mark.long
def test_forks_and_rewinds_are_done_by_the_holder(two):
    make(two, "trunk")
    home = holder(two, "trunk")
    for _ in range(2):
        assert turn(two, "trunk").status_code == 200
    assert two.post(f"{SESSIONS}/trunk/fork", {"id": "branch"}).status_code == 201
    assert holder(two, "branch") == home
    assert asked(two, lambda: turn(two, "branch")) == [home]
    assert two.post(f"{SESSIONS}/trunk/rewind", {"turns": 1}).status_code == 200
    assert two.post(f"{SESSIONS}/trunk/fork").status_code == 201
    ids = [one["id"] for one in two.client.get(SESSIONS).json()["data"]]
    assert {"trunk", "branch"} < set(ids)
    assert len(ids) == len(set(ids))
    for name in ids:
        two.client.delete(f"{SESSIONS}/{name}")


def test_a_name_is_given_once_on_all_replicas(two):
    make(two, "once")
    other = next(name for name in ("a", "b", "c") if not make(two, name) and holder(two, name) != holder(two, "once"))
    assert turn(two, other).status_code == 200
    for answer in (two.post(SESSIONS, {"id": "once"}), two.post(f"{SESSIONS}/{other}/fork", {"id": "once"})):
        assert "There is a session once already" in two.refused(answer, 409)["message"]
    for name in ("once", "a", "b", "c"):
        two.client.delete(f"{SESSIONS}/{name}")


def test_many_who_make_one_name_at_once_get_it_once(two):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(two.post(SESSIONS, {"id": "race"}).status_code)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [201, *[409] * 7]
    two.client.delete(f"{SESSIONS}/race")


@pytest.mark.long
def test_an_answer_is_continued_where_it_is_kept(two):
    first = two.post("/v1/responses", {"input": "Once upon a time", "max_output_tokens": 3}).json()
    (home,) = [one for one, app in two.replicas.apps.items() if app.state.responses.holds("everybody", first["id"])]
    body = {"input": "And then?", "previous_response_id": first["id"], "max_output_tokens": 3}
    for _ in range(3):
        assert asked(two, lambda: two.post("/v1/responses", body)) == [home]
    assert two.client.get(f"/v1/responses/{first['id']}").json()["id"] == first["id"]
    assert two.client.delete(f"/v1/responses/{first['id']}").status_code == 200
    two.refused(two.post("/v1/responses", body), 404)


@pytest.mark.long
def test_others_go_where_rows_are_free(two):
    with two.client.stream("POST", COMPLETE, json={**LONG, "stream": True}):
        busy = two.replicas.asked[-1][0]
        two.replicas.held.add(busy)
        try:
            for _ in range(4):
                assert asked(two, two.complete) == [*({"one", "two"} - {busy})]
                settle(two, rows=1)
        finally:
            two.replicas.held.clear()
    settle(two, rows=0)
    assert set(asked(two, lambda: [two.complete() for _ in range(4)])) == {"one", "two"}


@pytest.mark.long
def test_answers_are_those_of_one_server_and_so_are_refusals(two):
    assert {two.complete(prompt="A dog").json()["choices"][0]["text"] for _ in range(4)} == {
        two.complete(prompt="A dog").json()["choices"][0]["text"]
    }
    found = events(two.complete(stream=True))
    assert "".join(one["choices"][0]["text"] for one in found) == two.complete().json()["choices"][0]["text"]
    two.refused(two.client.post(COMPLETE, content=b"{"), 400)
    two.refused(two.client.post(COMPLETE, content=b'[{"session_id": 1}]'), 400)
    two.refused(two.post(CHAT, {"session_id": 7}), 400)
    two.refused(two.client.get("/v1/nothing"), 404)
    two.refused(turn(two, "nobody"), 404)
    two.refused(two.client.get(f"{SESSIONS}/../../etc"), 404)
    assert two.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert two.client.get("/openapi.json").json()["info"]["title"] == "kvkeep"
    assert two.client.get("/").headers["content-type"].startswith("text/html")
    two.refused(two.client.post(COMPLETE, content=b"x" * (17 * 2**20)), 413)


def test_health_and_metrics_are_of_all_replicas(two):
    found = two.client.get("/health").json()
    assert (found["status"], found["rows"], found["rows_free"], found["waiting"]) == ("ready", 4, 4, 0)
    assert {name: one["rows"] for name, one in found["replicas"].items()} == {"one": 2, "two": 2}
    sessions = {made_at(two, f"metrics-{n}"): f"metrics-{n}" for n in range(4)}
    for name in ("one", "two"):  # a histogram has no samples before its first request
        assert turn(two, sessions[name]).status_code == 200
    lines = two.client.get("/metrics").text.splitlines()
    for name in ("one", "two"):
        assert f'kvkeep_rows{{replica="{name}",model_name="tiny"}} 2.0' in lines
    assert "kvkeep_replicas 2" in lines
    assert len([line for line in lines if line.startswith("# TYPE kvkeep_rows ")]) == 1
    from prometheus_client.parser import text_string_to_metric_families

    families = {one.name: one for one in text_string_to_metric_families("\n".join(lines) + "\n")}
    histogram = families["vllm:time_to_first_token_seconds"]
    assert {sample.labels["replica"] for sample in histogram.samples} == {"one", "two"}
    assert "process_resident_memory_bytes" in families


def test_a_dead_replica_is_left_out(mortal):
    mortal.replicas.dead.add("one")
    assert mortal.client.get("/health").json()["rows"] == 2
    assert "kvkeep_replicas 1" in mortal.client.get("/metrics").text
    mortal.replicas.dead.add("two")
    assert "No replica" in mortal.refused(mortal.complete(), 503)["message"]
    health = mortal.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "starting")


@pytest.mark.long
def test_a_replica_that_ends_before_it_has_a_request_is_replaced(mortal):
    mortal.replicas.gone.update(("one",))
    assert {mortal.complete().status_code for _ in range(4)} == {200}
    assert mortal.replicas.dead == {"one"}


def in_background(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    return thread, found


def killed_mid_answer(mortal, work):
    """What a client gets whose replica ends while it answers."""
    thread, found = in_background(work)
    end = time.monotonic() + WAIT_S
    while not any(engine.n_running for engine in mortal.engines.values()):
        assert time.monotonic() < end
        time.sleep(0.01)
    mortal.replicas.dead.update(name for name, engine in mortal.engines.items() if engine.n_running)
    thread.join(WAIT_S)
    return found[0]


def test_the_death_of_a_replica_is_an_error_object_for_its_answers(mortal):
    error = mortal.refused(killed_mid_answer(mortal, lambda: mortal.post(COMPLETE, LONG)), 503)
    assert (error["code"], error["type"]) == ("replica_lost", "server_error")
    assert mortal.complete().status_code == 200


@pytest.mark.parametrize("named", [False, True])
def test_the_death_of_a_replica_is_the_last_event_of_its_streams(mortal, named):
    def stream():
        body = {"input": "A", "max_output_tokens": 1500, "stream": True} if named else {**LONG, "stream": True}
        with mortal.client.stream("POST", "/v1/responses" if named else COMPLETE, json=body) as answer:
            first.set()
            return answer.status_code, "".join(answer.iter_text())

    first = threading.Event()
    thread, found = in_background(stream)
    assert first.wait(WAIT_S)
    mortal.replicas.held.update(mortal.engines)  # an engine may have written all tokens before this line
    mortal.replicas.dead.add(mortal.replicas.asked[-1][0])
    thread.join(WAIT_S)
    status, text = found[0]
    assert status == 200
    blocks = [block for block in text.split("\n\n") if block]
    if named:
        assert blocks[-1].startswith("event: error\ndata: ")
    else:
        assert blocks.pop() == "data: [DONE]"
    assert json.loads(blocks[-1].partition("data: ")[2])["error"]["code"] == "replica_lost"


def test_a_client_that_leaves_frees_its_row(two):
    with two.client.stream("POST", COMPLETE, json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert sum(engine.n_running for engine in two.engines.values()) == 1
    with pytest.raises(httpx.ReadTimeout):
        two.client.post(COMPLETE, json=LONG, timeout=0.3)
    end = time.monotonic() + WAIT_S
    while any(engine.n_running for engine in two.engines.values()):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.long
def test_a_session_whose_holder_is_about_to_end_is_waited_for(mortal):
    make(mortal, "trip")
    assert turn(mortal, "trip").status_code == 200
    home = holder(mortal, "trip")
    sessions = mortal.replicas.apps[({"one", "two"} - {home}).pop()].state.sessions
    tried, take = [], sessions._leases.take

    def not_yet(name):
        tried.append(name)
        return take(name) if len(tried) > 2 else False

    sessions._leases.take = not_yet
    mortal.replicas.dead.add(home)
    answer = turn(mortal, "trip")
    assert answer.status_code == 200, answer.text
    assert tried[:3] == ["everybody--trip"] * 3
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.long
def test_a_session_that_stays_elsewhere_is_refused_in_the_end(mortal, monkeypatch):
    from kvkeep.server import router

    monkeypatch.setattr(router, "_HELD_S", 0.3)
    make(mortal, "trip")
    assert turn(mortal, "trip").status_code == 200
    home = holder(mortal, "trip")
    mortal.replicas.apps[({"one", "two"} - {home}).pop()].state.sessions._leases.take = lambda name: False
    mortal.replicas.dead.add(home)
    answer = turn(mortal, "trip")
    assert mortal.refused(answer, 503)["code"] == "session_elsewhere"
    assert answer.headers["retry-after"] == "1"


def test_a_holder_that_did_not_answer_in_time_is_found_later(mortal):
    make(mortal, "trip")
    home = holder(mortal, "trip")
    other = ({"one", "two"} - {home}).pop()
    mortal.queue._places.note(("session", "everybody", "trip"), other)  # as if the holder had not answered
    assert turn(mortal, "trip").status_code == 404
    assert asked(mortal, lambda: turn(mortal, "trip")) == [home]


@pytest.mark.long
def test_keys_have_sessions_of_their_own():
    with fronted(keys=keys("key-of-anna", "key-of-bert")) as running:
        assert running.complete().status_code == 401
        assert running.replicas.asked == []
        assert running.client.get("/health").status_code == 200
        assert running.client.get("/metrics").status_code == 401
        running.client.headers["Authorization"] = "Bearer key-of-anna"
        make(running, "trip")
        assert turn(running, "trip").status_code == 200
        running.client.headers["Authorization"] = "Bearer key-of-bert"
        assert running.client.get(SESSIONS).json()["data"] == []
        running.refused(turn(running, "trip"), 404)
        make(running, "trip")
        assert running.client.get("/metrics").status_code == 200


@pytest.mark.slow
def test_prompts_go_where_their_beginning_was_read():
    memory = {"prefill_chunk": 64, "prefix_memory": 2**24}
    story = "Once upon a time there was a dog who lived by the sea. " * 20
    with fronted(prefixes=True, engine=memory, rows=2) as running:
        homes = [asked(running, lambda: running.complete(prompt=f"{story}{n}")) for n in range(4)]  # noqa: B023
        assert homes == [homes[0]] * 4
        answer = running.complete(prompt=f"{story} The end.").json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        others = [asked(running, lambda: running.complete(prompt=f"{n}{story}"))[0] for n in range(4)]  # noqa: B023
        assert set(others) == {"one", "two"}
        chat = [{"role": "user", "content": story}]
        (home,) = asked(running, lambda: running.chat(messages=chat))
        for n in range(3):
            later = [*chat, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": str(n)}]
            assert asked(running, lambda: running.chat(messages=later)) == [home]  # noqa: B023


@pytest.mark.slow
def test_a_conversation_goes_to_its_holder():
    story = "Once upon a time there was a dog who lived by the sea. " * 12
    with fronted(prefixes=True, engine={"conversation_memory": 2**26}, budget=512) as running:
        talks = [[{"role": "user", "content": f"{n} {story}"}] for n in range(3)]
        for number in range(2):
            for messages in talks:
                found = running.chat(messages=messages).json()
                messages += [found["choices"][0]["message"], {"role": "user", "content": "And then?"}]
                assert (found["usage"]["prompt_tokens_details"]["cached_tokens"] > 100) == (number > 0)
        assert len(running.client.get("/v1/sessions").json()["data"]) == 3
        names = [entry["id"] for entry in running.client.get("/v1/sessions").json()["data"]]
        assert all(running.client.get(f"{SESSIONS}/{name}").json()["seen_tokens"] > 100 for name in names)
        assert [running.client.delete(f"{SESSIONS}/{name}").status_code for name in names] == [200] * 3
        assert running.client.get("/v1/sessions").json()["data"] == []


@pytest.mark.long
def test_a_router_that_is_about_to_end_takes_no_requests(mortal):
    mortal.queue.draining = True
    assert "about to end" in mortal.refused(mortal.complete(), 503)["message"]
    health = mortal.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert mortal.client.get("/health?check=live").status_code == 200
    mortal.queue.draining = False
