"""Clients that need an environment of their own, `make test-clients`; elsewhere these tests are not collected."""

import os

import pytest

_OURS = ["test_langchain.py", "test_llm.py", "test_lm_eval_http.py", "test_schemathesis.py"]
collect_ignore = [] if os.environ.get("KVKEEP_CLIENTS") else _OURS
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")


@pytest.fixture(scope="session")
def server():
    from server.running import serve

    with serve(max_new_tokens=40) as running:
        yield running
        assert running.idle()
