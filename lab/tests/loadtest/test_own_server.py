"""``kvkeep bench-server`` against our own server."""

from __future__ import annotations

import json
import os

import pytest
from server.running import serve
from typer.testing import CliRunner

from kvkeep.cli.main import app


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("KVKEEP_", "OPENAI_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


def numbers(url, *words):
    asked = ["bench-server", url, "--json", "--rate", "inf", "--warmup", "0", *map(str, words)]
    found = CliRunner().invoke(app, asked)
    assert found.exit_code == 0, (found.output, found.exception)
    return json.loads(found.stdout)


@pytest.mark.slow
def test_our_own_server_with_prefixes_and_sessions():
    options = {"rows": 4, "budget": 64, "engine": {"prefill_chunk": 16, "prefix_memory": 2**24}}
    with serve(**options, max_new_tokens=8) as server:
        found = numbers(server.url, "--requests", 8, "--prompt-tokens", 6, "-n", "2-5", "--prefix-tokens", 40)
        assert (found["completed"], found["errors"]) == (8, {})
        assert found["cached_tokens"] > 0
        talks = ("--requests", 2, "--turns", 2, "--sessions", "--prompt-tokens", 4, "-n", 3)
        found = numbers(server.url, *talks, "--warmup", 1)
        assert (found["completed"], found["errors"]) == (4, {})
        assert server.client.get("/v1/sessions").json()["data"] == []
        assert server.idle()
