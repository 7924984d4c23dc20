"""The official Python client of OpenAI's API."""

from __future__ import annotations

import pytest

from .running import HELLO, NAME, WAIT_S, serve

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client():
    with serve() as running:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as made:
            yield made
        assert running.idle()


def test_chat(client):
    assert [one.id for one in client.models.list()] == [NAME]
    found = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=5, logprobs=True, top_logprobs=1)
    assert found.usage.completion_tokens == 5
    assert len(found.choices[0].logprobs.content) <= 5


def test_stream(client):
    asked = {"model": NAME, "messages": HELLO, "max_tokens": 5, "seed": 3}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].delta.content or "" for one in pieces if one.choices) == whole
    assert pieces[-1].usage.completion_tokens == 5


def test_a_stream_that_is_left_frees_its_row(client):
    with client.chat.completions.create(
        model=NAME, messages=HELLO, max_tokens=100_000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        assert next(iter(stream)).choices


def test_completions(client):
    found = client.completions.create(model=NAME, prompt=["a dog", "a cat"], max_tokens=3, echo=True, logprobs=1)
    assert [one.text[:5] for one in found.choices] == ["a dog", "a cat"]
    assert found.choices[1].logprobs.token_logprobs[0] is None


def test_extra_fields_and_errors(client):
    asked = {"model": NAME, "messages": HELLO, "max_tokens": 2}
    found = client.chat.completions.create(**asked, extra_body={"policy": "h2o", "budget": 64})
    assert found.usage.kvkeep["seen_tokens"] > 2
    with pytest.raises(openai.BadRequestError, match="did you mean policy") as caught:
        client.chat.completions.create(**asked, extra_body={"polici": "h2o"})
    assert (caught.value.param, caught.value.type) == ("polici", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**asked, "model": "other"})
