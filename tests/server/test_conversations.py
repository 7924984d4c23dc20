"""A client sends its conversation whole each time: only what is new is read, with the texts of a fresh reading."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from .running import events, keys, serve

A, B, C = "Once upon a time there was a dog called Rex, who lived in a garden.", "What did the dog do?", "And then?"
MEMORY = {"conversation_memory": 2**28}


@pytest.fixture(scope="module")
def server():
    with serve(budget=256, engine=MEMORY) as running:
        yield running
        assert running.idle()


def said(text):
    return {"role": "user", "content": text}


def answered(server, messages, **body):
    answer = server.chat(messages=messages, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(found):
    return found["usage"]["prompt_tokens_details"]["cached_tokens"]


def talk(server, texts=(A, B, C), **body):
    """The answers to a conversation whose client sends everything again; and its messages."""
    messages, found = [], []
    for text in texts:
        messages = [*messages, said(text)]
        found.append(answered(server, messages, **body))
        messages = [*messages, found[-1]["choices"][0]["message"]]
    return found, messages


def texts_of(found):
    return [one["choices"][0]["message"]["content"] for one in found]


@pytest.fixture(scope="module")
def fresh():
    with serve(budget=256) as server:
        yield server


@pytest.mark.long
@pytest.mark.parametrize("body", [{}, {"temperature": 2, "seed": 5, "max_tokens": 12}, {"stop": ["a"]}], ids=str)
def test_each_turn_reads_what_is_new_and_gets_the_texts_of_a_fresh_reading(server, fresh, body):
    found, _ = talk(server, user=str(body), **body)
    assert texts_of(found) == texts_of(talk(fresh, **body)[0])
    for before, after in itertools.pairwise(found):
        assert cached(after) >= before["usage"]["prompt_tokens"]
    assert cached(found[0]) == 0


def test_the_openai_client_goes_on_also_in_streams(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages, usage = [], None
    for text in (A, B, C):
        messages.append(said(text))
        options = {"stream_options": {"include_usage": True}, "max_tokens": 8, "temperature": 0, "user": "streams"}
        parts = list(client.chat.completions.create(model="tiny", messages=messages, stream=True, **options))
        content = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        messages.append({"role": "assistant", "content": content})
        before, usage = usage, parts[-1].usage
        if before is not None:
            assert usage.prompt_tokens_details.cached_tokens >= before.prompt_tokens


@pytest.mark.slow
def test_an_edited_message_and_another_answer_fork(server, fresh):
    _, messages = talk(server, user="edits")
    for others in (
        messages[:3],
        [*messages[:2], said("Who is Rex?")],
        [*messages[:1], {**messages[1], "content": "x"}],
    ):
        others = [*others, said(B)] if others[-1]["role"] == "assistant" else others
        found = answered(server, others, user="edits")
        assert cached(found) > 16
        assert texts_of([found]) == texts_of([answered(fresh, others)])
    again = answered(server, [*messages, said("Go on.")], user="edits")
    assert cached(again) > again["usage"]["prompt_tokens"] - 30


@pytest.mark.long
def test_several_answers_are_each_continued(server):
    found = answered(server, [said(A)], n=3, temperature=2, seed=3, user="several", max_tokens=12)
    for choice in found["choices"]:
        then = answered(server, [said(A), choice["message"], said(B)], user="several")
        assert cached(then) >= found["usage"]["prompt_tokens"] // 1 - 1


@pytest.mark.slow
def test_users_salts_and_policies_are_kept_apart(server):
    _, messages = talk(server, user="one", cache_salt="s")
    then = [*messages, said("Go on.")]
    for body in ({}, {"user": "two", "cache_salt": "s"}, {"user": "one"}, {"user": "one", "cache_salt": "t"}):
        assert cached(answered(server, then, **body)) == 0
    for body in ({"policy": "h2o"}, {"budget": 200}, {"pins": [[0, 5]]}, {"guard": 0.5}):
        assert cached(answered(server, then, user="one", cache_salt="s", **body)) == 0
    assert cached(answered(server, then, user="one", cache_salt="s")) > 0
    server.refused(server.chat(cache_salt=5))


@pytest.mark.long
def test_another_key_gets_nothing_and_sees_nothing():
    with serve(budget=256, engine=MEMORY, keys=keys("first-key", "second-key")) as server:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("first-key", "second-key"))

        def ask(messages, headers):
            body = {"messages": messages, "max_tokens": 4, "temperature": 0}
            return server.post("/v1/chat/completions", body, headers=headers).json()

        first = ask([said(A)], one)
        then = [said(A), first["choices"][0]["message"], said(B)]
        assert cached(ask(then, two)) == 0
        assert cached(ask(then, one)) > 0
        (listed,) = server.client.get("/v1/sessions", headers=one).json()["data"]
        (other,) = server.client.get("/v1/sessions", headers=two).json()["data"]
        assert listed["id"] != other["id"]
        assert server.client.delete(f"/v1/sessions/{other['id']}", headers=one).status_code == 404


@pytest.mark.slow
def test_conversations_are_listed_continued_by_name_copied_and_deleted():
    with serve(budget=256, engine=MEMORY) as server:
        _, messages = talk(server)
        (entry,) = server.client.get("/v1/sessions").json()["data"]
        name = entry["id"]
        assert name.startswith("conv_")
        card = server.client.get(f"/v1/sessions/{name}").json()
        assert [message["content"] for message in card["messages"]] == [message["content"] for message in messages]
        assert card["kv_bytes"] > 0
        assert server.client.get(f"/v1/sessions/{name}/positions").json()["positions"][0] == 0
        assert server.post(f"/v1/sessions/{name}/fork", {"id": "mine"}).status_code == 201
        assert cached(answered(server, [said("Why?")], session_id="mine")) > 0
        assert server.client.delete(f"/v1/sessions/{name}").status_code == 200
        assert cached(answered(server, [*messages, said("Go on.")])) == 0
        assert server.client.get("/v1/sessions/mine").status_code == 200


def test_a_conversation_that_was_opened_makes_room_for_others():
    with serve(budget=256, engine=MEMORY) as server:
        talk(server, (A,))
        (entry,) = server.client.get("/v1/sessions").json()["data"]
        server.client.get(f"/v1/sessions/{entry['id']}")
        server.engine.session(name=f"everybody--{entry['id']}").close(delete=True)
        assert server.client.get(f"/v1/sessions/{entry['id']}").status_code == 404


@pytest.mark.long
def test_parallel_chats_have_conversations_of_their_own(server, fresh):
    wanted = {n: texts_of(talk(fresh, (f"{A} {n}", B, C))[0]) for n in range(6)}
    found = {}

    def work(n):
        found[n] = talk(server, (f"{A} {n}", B, C), user="parallel")[0]

    threads = [threading.Thread(target=work, args=(n,)) for n in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {n: texts_of(talk) for n, talk in found.items()} == wanted
    assert all(cached(talk[2]) >= talk[1]["usage"]["prompt_tokens"] for talk in found.values())


@pytest.mark.long
def test_the_same_conversation_at_once(server, fresh):
    first, messages = talk(server, (A,), user="once")
    then = [[*messages, said(f"{B} {n}")] for n in (1, 1, 2, 2, 3)]
    found = [None] * len(then)

    def work(n):
        found[n] = answered(server, then[n], user="once", max_tokens=12)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(then))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts_of(found) == [texts_of([answered(fresh, each, max_tokens=12)])[0] for each in then]
    assert all(cached(one) >= first[0]["usage"]["prompt_tokens"] for one in found)


def test_a_client_that_leaves_changes_nothing(server):
    first, messages = talk(server, (A,), user="leaves")
    body = {"messages": [*messages, said(B)], "max_tokens": 200, "ignore_eos": True, "stream": True, "user": "leaves"}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    assert server.idle()
    assert cached(answered(server, [*messages, said(B)], user="leaves")) >= first[0]["usage"]["prompt_tokens"]


def test_a_response_without_a_previous_one_goes_on(server):
    def respond(given, **more):
        body = {"input": given, "max_output_tokens": 4, "temperature": 0, "user": "responses", **more}
        answer = server.post("/v1/responses", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def read(found):
        return found["usage"]["input_tokens_details"]["cached_tokens"]

    first = respond(A)
    answer = {"role": "assistant", "content": first["output"][0]["content"][0]["text"]}
    second = respond([said(A), answer, said(B)])
    assert read(second) >= first["usage"]["input_tokens"]
    assert respond(B, previous_response_id=first["id"])["output"][0]["content"] == second["output"][0]["content"]
    chat = answered(server, [said(A), answer, said(B)], user="responses")  # a chat is the same conversation
    assert cached(chat) >= first["usage"]["input_tokens"]


JOINED = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "policy", "goes_on"),
    [
        ("auto", "snapkv:default", False),
        ("auto", "reread:chat", True),
        ("continue", "snapkv:default", True),
        ("fresh", "reread:chat", False),
    ],
)
def test_modes_of_a_memory_that_has_evicted(mode, policy, goes_on, monkeypatch):
    """Under ``auto`` a memory goes on if its policy keeps tokens for any later question."""
    with serve(budget=40, engine={**MEMORY, "policy": policy, "conversations": mode}) as server:
        # the answer's text becomes the tokens that the model wrote
        monkeypatch.setattr(server.served.checkpoint.tokenizer, "chat_template", JOINED)
        found, _ = talk(server, (A, B, C, B), max_tokens=12, guided_choice=["dog"])
        reads = [cached(one) for one in found]
        assert (reads[-1] > found[-2]["usage"]["prompt_tokens"]) == goes_on
        assert (reads[1] > 0) == (mode != "fresh")


@pytest.mark.slow
def test_two_questions_at_once_go_on_from_one_memory_that_has_evicted(monkeypatch):
    with serve(budget=40, engine={**MEMORY, "policy": "reread:chat"}) as server:
        monkeypatch.setattr(server.served.checkpoint.tokenizer, "chat_template", JOINED)
        found, messages = talk(server, (A, B, C), max_tokens=12, guided_choice=["dog"])
        held = found[-1]["usage"]["prompt_tokens"]

        def ask(text):
            answer = answered(server, [*messages, said(text)], max_tokens=8, temperature=0)
            return texts_of([answer])[0], cached(answer)

        questions = ("Who is Rex?", "Where did he live?", "Who is Rex?")
        with ThreadPoolExecutor(3) as threads:
            together = list(threads.map(ask, questions))
        assert min(reused for _, reused in together) >= held  # from the last prompt as it was, all three
        assert [text for text, _ in together] == [ask(text)[0] for text in questions]
        assert together[0][0] == together[2][0]


@pytest.mark.slow
def test_a_memory_that_has_evicted_is_found_again_after_a_restart_and_by_its_policy_alone(tmp_path, monkeypatch):
    kept = {**MEMORY, "session_dir": str(tmp_path)}
    with serve(budget=40, engine={**kept, "policy": "reread:chat"}) as server:
        monkeypatch.setattr(server.served.checkpoint.tokenizer, "chat_template", JOINED)
        found, messages = talk(server, (A, B, C), max_tokens=12, guided_choice=["dog"])
        held = found[-1]["usage"]["prompt_tokens"]
    for policy, goes_on in (("reread:later", False), ("reread:chat", True)):
        with serve(budget=40, engine={**kept, "policy": policy}) as server:
            answer = answered(server, [*messages, said("Who is Rex?")], max_tokens=4)
            assert (cached(answer) > held) == goes_on, policy


TRIMS = """{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and not loop.last %}\
{{ m.content.split('</think>')[-1] | trim }}{% else %}{{ m.content }}{% endif %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.mark.slow
def test_a_template_that_rewrites_earlier_answers_reads_again_what_it_has_changed(fresh):
    with serve(budget=256, engine=MEMORY) as server:
        tokenizer = server.served.checkpoint.tokenizer
        before = tokenizer.chat_template
        tokenizer.chat_template = TRIMS
        try:
            messages = [said(A)]
            for text in (B, C):
                first = answered(server, messages)
                thought = {"role": "assistant", "content": f"hm, hm</think> {texts_of([first])[0]}"}
                messages = [*messages, thought, said(text)]
                then = answered(server, messages)
                assert 16 < cached(then) <= first["usage"]["prompt_tokens"]
                assert texts_of([then]) == texts_of([answered(fresh, messages)])
        finally:
            tokenizer.chat_template = before


def test_what_a_stream_says_of_its_usage(server):
    _, messages = talk(server, (A,), user="usage")
    asked = {"messages": [*messages, said(B)], "stream": True, "stream_options": {"include_usage": True}}
    found = events(server.chat(**asked, user="usage"))
    assert found[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
    assert json.dumps(found)


@pytest.mark.slow
def test_conversations_that_made_room_for_others_take_no_room_among_open_sessions():
    with serve(budget=256, engine={"conversation_memory": 200_000}, max_sessions=3) as server:
        seen = set()
        for n in range(8):
            answered(server, [said(f"{n} {A}")])
            (name,) = {entry["id"] for entry in server.client.get("/v1/sessions").json()["data"]} - seen
            seen.add(name)
            assert server.client.get(f"/v1/sessions/{name}").status_code == 200
        assert server.post("/v1/sessions", {"id": "mine"}).status_code == 201


@pytest.mark.long
def test_a_conversation_that_is_forgotten_while_a_client_opens_it_is_no_new_session(monkeypatch):
    with serve(budget=256, engine=MEMORY) as server:
        answered(server, [said(A)])
        (entry,) = server.client.get("/v1/sessions").json()["data"]
        open_session = server.engine.session

        def late(**options):
            monkeypatch.undo()
            open_session(name=options["name"]).close(delete=True)
            return open_session(**options)

        monkeypatch.setattr(server.engine, "session", late)
        assert server.client.get(f"/v1/sessions/{entry['id']}").status_code == 404
        assert server.client.get("/v1/sessions").json()["data"] == []


@pytest.mark.slow
def test_sixty_four_clients_at_once_get_what_each_gets_alone(fresh):
    """They share eight rows, so each of them waits, and no longer than the others."""
    clients = 64

    def hold(server, number):
        texts = [f"{A} Its number was {number}.", B, "Who saw it?", C]
        found, _ = talk(server, texts, user=f"client {number}", max_tokens=8, temperature=0)
        return texts_of(found), [cached(turn) for turn in found]

    with serve(budget=256, rows=8, engine=MEMORY, max_queue=clients) as server, ThreadPoolExecutor(clients) as threads:
        together = list(threads.map(lambda number: hold(server, number), range(clients)))
        assert server.idle()
    for number, (texts, reused) in enumerate(together):
        assert texts == hold(fresh, number)[0], number
        assert reused[0] < 30
        assert min(reused[1:]) > 0, number
