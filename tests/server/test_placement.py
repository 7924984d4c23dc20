"""What a request needs of its replica, and which one it gets."""

import json

import pytest

pytest.importorskip("fastapi")

from kvkeep.server import router
from kvkeep.server.replicas import RESPONSE, SESSION, PlacementRequest, Places, beginnings, wish_of

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("method", "path", "body", "held", "fresh"),
    [
        ("POST", "/v1/sessions", {"id": "a"}, (SESSION, "a"), "a"),
        ("POST", "/v1/sessions", {}, None, None),
        ("POST", "/v1/sessions", {"id": 7}, None, None),
        ("GET", "/v1/sessions/a", {}, (SESSION, "a"), None),
        ("GET", "/v1/sessions/a/positions", {}, (SESSION, "a"), None),
        ("POST", "/v1/sessions/a/fork", {"id": "b"}, (SESSION, "a"), "b"),
        ("POST", "/v1/sessions/a/rewind", {"turns": 1, "id": "b"}, (SESSION, "a"), None),
        ("DELETE", "/v1/sessions/a", {}, (SESSION, "a"), None),
        ("POST", CHAT, {"session_id": "a", "messages": []}, (SESSION, "a"), None),
        ("POST", CHAT, {"session_id": ["a"]}, None, None),
        ("POST", CHAT, {"session_id": "a" * 10**6}, None, None),
        ("GET", f"/v1/sessions/{'a' * 10**4}", {}, (SESSION, "a" * 128), None),
        ("POST", "/v1/completions", {"session_id": "a"}, None, None),
        ("POST", "/v1/responses", {"previous_response_id": "r"}, (RESPONSE, "r"), None),
        ("POST", "/v1/responses", {"input": "x"}, None, None),
        ("GET", "/v1/responses/r", {}, (RESPONSE, "r"), None),
        ("GET", "/v1/models", {}, None, None),
        ("POST", "/tokenize", {"prompt": "x" * 2000}, None, None),
    ],
)
def test_what_a_request_goes_on_with(method, path, body, held, fresh):
    found = wish_of(method, path, body)
    assert (found.held, found.fresh) == (held, fresh)


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1], [2]]}, 2),
        ({"prompt": "a", "n": 10**9}, 1),
        ({"prompt": "a", "n": "3"}, 1),
    ],
)
def test_rows_of_a_request(body, rows):
    assert wish_of("POST", "/v1/completions", body).rows == rows


def test_beginnings_are_equal_as_far_as_prompts_are():
    text = "x" * 512 + "y" * 512
    one, other = beginnings({"prompt": text + "a" * 512}), beginnings({"prompt": text + "b" * 512})
    assert len(one) == len(other) == 3
    assert one[1:] == other[1:]
    assert one[0] != other[0]
    assert beginnings({"prompt": text, "budget": 4})[0] != one[1]
    assert beginnings({"prompt": text, "policy": "h2o"})[0] != one[1]
    assert beginnings({"prompt": "x" * 511}) == []
    assert len(beginnings({"prompt": "x" * 10**6})) == 64
    assert beginnings({"prompt": "\ud800" * 600}) != []
    assert beginnings({"messages": [{"role": "user", "content": text}]})


def test_of_long_lists_only_the_compared_part_is_written():
    messages = [{"role": "user", "content": "x" * 100}] * 10_000
    long, longer = beginnings({"messages": messages}), beginnings({"messages": [*messages, {"n": object()}]})
    assert long == longer  # what no beginning reaches is not looked at
    assert len(long) == 64
    assert wish_of("POST", CHAT, {"messages": [{"n": object()}]}, prefixes=False).beginnings == ()


def test_the_emptiest_replica_is_chosen_and_all_in_turn():
    places, here = Places(), {"one": 2, "two": 4}
    assert {places.choose(PlacementRequest(), here) for _ in range(2)} == {"one", "two"}
    with places.taken("one", 1), places.taken("two", 1):
        assert places.choose(PlacementRequest(), here) == "two"  # a quarter of its rows
        with places.taken("two", 2):
            assert places.choose(PlacementRequest(), here) == "one"
    assert not places.busy


def test_a_warm_replica_is_chosen_while_it_has_a_free_row():
    places, here = Places(), {"one": 1, "two": 1}
    wish = PlacementRequest(beginnings=(b"long", b"short"))
    warm = places.choose(wish, here)
    assert all(places.choose(PlacementRequest(beginnings=(b"new", b"short")), here) == warm for _ in range(3))
    with places.taken(warm, 1):
        other = places.choose(wish, here)
        assert other != warm
    assert places.choose(wish, here) == other  # it has read it now, too
    assert places.choose(wish, {warm: 1}) == warm


def test_what_ended_replicas_held_is_unknown():
    places = Places()
    places.note((SESSION, "o", "a"), "one")
    assert places.find((SESSION, "o", "a"), {"one": 1}) == "one"
    assert places.find((SESSION, "o", "a"), {"two": 1}) is None
    assert places.find((SESSION, "p", "a"), {"one": 1}) is None
    assert places.find((RESPONSE, "o", "a"), {"one": 1}) is None


def test_places_are_bounded(monkeypatch):
    from kvkeep.server import replicas

    monkeypatch.setattr(replicas, "_MOST_KNOWN", 2)
    places = Places()
    for name in "abc":
        places.note((SESSION, "o", name), "one")
    assert [places.find((SESSION, "o", name), {"one": 1}) for name in "abc"] == [None, "one", "one"]


def test_metrics_of_replicas_stand_in_one_family_each():
    text = '# HELP a A.\n# TYPE a gauge\na 1.0\n# HELP b B.\n# TYPE b counter\nb{x="} 1"} 2.0\n'
    found = router.metrics({"two": text, "one": text}, "").splitlines()
    assert found[:4] == ["# HELP a A.", "# TYPE a gauge", 'a{replica="one"} 1.0', 'a{replica="two"} 1.0']
    assert found[4:8] == [
        "# HELP b B.",
        "# TYPE b counter",
        *(f'b{{replica="{n}",x="}} 1"}} 2.0' for n in ("one", "two")),
    ]
    assert router.metrics({}, "").splitlines()[-1] == "kvkeep_replicas 0"


def test_health_of_no_replica_is_not_ready():
    body, status = router.health({}, draining=False)
    assert (body["status"], body["rows"], status) == ("starting", 0, 503)
    one = {"status": "draining", "rows": 2, "rows_free": 1, "waiting": 0, "row_bytes": 3}
    assert router.health({"a": one}, draining=False)[1] == 503
    assert router.health({"a": one, "b": {**one, "status": "ready"}}, draining=False)[0]["rows"] == 4
    assert json.dumps(router.sessions({"a": {"data": [{"id": "x"}]}, "b": {"data": [{"id": "x"}, {"id": "w"}]}}))
    assert [one["id"] for one in router.sessions({"a": {"data": [{"id": "x"}, {"id": "w"}]}})["data"]] == ["w", "x"]
