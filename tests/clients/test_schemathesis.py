"""schemathesis: requests that are made from the OpenAPI document, as it describes them and otherwise."""

from __future__ import annotations

import logging
import os
from collections import Counter
from contextlib import suppress
from itertools import product

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from server.running import serve

REQUESTS = int(os.environ.get("KVKEEP_REQUESTS", "300"))
"""In all, spread over all operations; continuous integration makes 2 000."""


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("sessions"))
    options = {"session_dir": folder, "prefill_chunk": 256, "prefix_memory": 2**20}
    limits = {"max_new_tokens": 4, "max_model_len": 512, "max_sessions": 64, "request_timeout_s": 60.0}
    with serve(engine=options, session_dir=folder, **limits) as running:
        yield running


def test_no_request_fails_the_server(fuzzed, caplog):
    schema = schemathesis.openapi.from_dict(fuzzed.client.get("/openapi.json").json())
    schema.config.update(base_url=fuzzed.url)
    operations = [found.ok() for found in schema.get_all_operations()]
    each, made = -(-REQUESTS // sum(bool(one.body) for one in operations)), []
    assert len(operations) >= 20
    for operation, mode in product(operations, schemathesis.GenerationMode):
        _attack(operation, each if operation.body else 10, made, mode)
    assert len(made) >= REQUESTS
    print(Counter(made))
    assert fuzzed.idle()
    assert fuzzed.chat().status_code == 200
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR] == []


def _attack(operation, count, made, mode):
    """Send requests to an operation, as its schema allows them or not."""

    @settings(
        max_examples=max(1, count // 2),
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def attack(case):
        if isinstance(case.body, dict) and mode is schemathesis.GenerationMode.POSITIVE:
            case.body = _few(case.body, len(made))
        answer = case.call(timeout=90)
        made.append((operation.label, answer.status_code))
        assert answer.status_code < 500 or answer.status_code == 503, (case.as_curl_command(), answer.text)
        assert "Traceback" not in answer.text

    with suppress(Unsatisfiable):  # an operation without parameters cannot be asked in a wrong way
        attack()


def _few(body, number):
    """A body that is likely to be answered: without names that the server does not have, and with few fields."""
    kept = {name: value for name, value in body.items() if name in ("messages", "prompt", "input", "tokens")}
    rest = [
        name for name in sorted(body) if name not in (*kept, "model", "policy", "session_id", "previous_response_id")
    ]
    return kept | {name: body[name] for name in rest[number % 7 :: 7]}
