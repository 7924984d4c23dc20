"""What docs/server.md shows runs, and names all routes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import running

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()


@pytest.mark.slow
def test_the_pages_python_runs(capsys, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.setattr(running, "NAME", "embedded")
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
    with running.serve(engine={"conversation_memory": 2**28}) as server:
        names = {}
        exec(code.replace("http://127.0.0.1:8000", server.url), names)
        names["client"].close()
        names["http"].close()
        said = capsys.readouterr().out
    assert "'kept_tokens': " in said
    assert re.findall(r"'cached_tokens': (\d+)", said)[-1] != "0"


def test_the_page_names_every_route():
    with running.serve() as server:
        paths = server.client.get("/openapi.json").json()["paths"]
    for path in paths:
        if path.startswith("/v1/sessions/{name}/"):
            assert f"/{path.rpartition('/')[2]}`" in PAGE, path
        else:
            assert path.partition("/{")[0] in PAGE, path
