"""A hub that does not answer: models of the cache load at once, and other names fail at once."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import model_folders
import pytest
from huggingface_hub import constants

from kvkeep.errors import ModelFileError
from kvkeep.models import files
from kvkeep.models.load import find, load, quiet

NAME = "someone/something-of-kvkeep-tests"
CLOSED = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, and a hub whose port is closed."""
    monkeypatch.delenv("HF_HUB_ETAG_TIMEOUT", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with quiet(), model_folders.one_thread():
        yield tmp_path / "cache"


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that answers every question with an error."""

    class Refusal(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Refusal)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


def in_cache(cache: Path, *without: str) -> None:
    """Put a model into the hub's cache."""
    home = cache / f"models--{NAME.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    (home / "snapshots").mkdir()
    model_folders.copy(home / "snapshots" / ("0" * 40), *without)


def test_a_name_that_is_not_in_the_cache_fails_at_once():
    start = time.perf_counter()
    with pytest.raises(ModelFileError, match=r"hub cannot be reached, and someone/.* neither a local folder") as caught:
        find(NAME)
    assert time.perf_counter() - start < 20  # transformers would try again for every file
    assert "\n" not in str(caught.value)
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.usefixtures("silent")
def test_a_hub_that_never_answers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "PATIENCE_S", 0.2)
    with pytest.raises(ModelFileError, match="hub cannot be reached"):
        find(NAME)


@pytest.mark.usefixtures("silent")
def test_the_hubs_own_variable_sets_the_patience(monkeypatch: pytest.MonkeyPatch):
    for text, patience in (("0.1", 120.0), ("a while", 0.1)):
        monkeypatch.setattr(files, "PATIENCE_S", patience)
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", text)
        start = time.perf_counter()
        assert not files._answers()
        assert time.perf_counter() - start < 60


@pytest.mark.usefixtures("busy")
def test_a_patience_of_nothing_is_the_default_as_it_is_for_the_hub(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "PATIENCE_S", 60.0)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0")
    assert files._answers()


@pytest.mark.usefixtures("busy")
def test_an_error_is_an_answer():
    with files.cached_if_unreachable(NAME):
        assert not constants.HF_HUB_OFFLINE


def test_a_model_of_the_cache_loads_without_a_hub(cache: Path):
    in_cache(cache)
    start = time.perf_counter()
    model, _ = load(NAME)
    assert time.perf_counter() - start < 20
    assert model.config.model_type == "llama"
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("missing", ["config.json", "tokenizer*", "*.safetensors"])
def test_a_part_of_a_model_in_the_cache(cache: Path, missing: str):
    in_cache(cache, missing)
    with pytest.raises(ModelFileError, match=r"^The hub cannot be reached, and") as caught:
        load(NAME)
    assert "\n" not in str(caught.value)


def test_a_user_who_forbids_requests_is_told_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(files, "_answers", lambda: pytest.fail("the hub was asked"))
    with pytest.raises(ModelFileError, match="since HF_HUB_OFFLINE is set"):
        find(NAME)
    assert constants.HF_HUB_OFFLINE


def test_folders_and_impossible_names_ask_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "_answers", lambda: pytest.fail("the hub was asked"))
    find(model_folders.folder())
    for name in ("my model", "Qwen/", "a..b/c", "café/x", "a" * 97, "-x"):
        with pytest.raises(ModelFileError, match="neither a local folder nor a hub name"):
            find(name)


def test_threads_share_the_switch():
    """The hub stays switched off until the last of several threads is done."""
    first, second = threading.Event(), threading.Event()
    seen: list[bool] = []

    def short() -> None:
        with files.cached_if_unreachable(NAME):
            first.set()
            second.wait(60)

    def long() -> None:
        first.wait(60)
        with files.cached_if_unreachable(NAME):
            second.set()
            one.join(60)
            seen.append(constants.HF_HUB_OFFLINE)

    one, other = threading.Thread(target=short), threading.Thread(target=long)
    one.start()
    other.start()
    other.join(120)
    assert seen == [True]
    assert not constants.HF_HUB_OFFLINE


def test_what_the_cache_lacks_is_said_to_be_on_the_hub(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = r"^The hub cannot be reached, and the local cache lacks a part of a/b, or it is damaged"
    with pytest.raises(ModelFileError, match=said), files.cached_if_unreachable("a/b"):
        raise ModelFileError("it has no tokenizer")
    with pytest.raises(ModelFileError, match=r"^The hub cannot be reached: once$"), files.cached_if_unreachable("a/b"):
        raise ModelFileError(f"{files.UNREACHABLE}: once")
