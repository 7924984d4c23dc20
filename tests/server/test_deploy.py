"""The files of ``deploy/``: each can be read, and the dashboard asks for metrics that the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvkeep.cli.main import app

from .running import NAME, serve

DEPLOY = Path(__file__).parents[2] / "deploy"
if not DEPLOY.is_dir():
    pytest.skip("the files of deployment are not part of this copy", allow_module_level=True)
yaml = pytest.importorskip("yaml")

METRIC = re.compile(r"\b(?:vllm:|kvkeep_|process_)\w+")


def read(name):
    return yaml.safe_load((DEPLOY / name).read_text())


def variables():
    """The environment variables that kvkeep serve reads, by its options."""
    command = typer.main.get_command(app).commands["serve"]
    return {f"KVKEEP_{one.name.upper()}" for one in command.params}


def test_every_metric_of_the_dashboard_is_exported():
    board = json.loads((DEPLOY / "grafana/kvkeep.json").read_text())
    asked = {name for panel in board["panels"] for one in panel["targets"] for name in METRIC.findall(one["expr"])}
    asked |= set(METRIC.findall(board["templating"]["list"][1]["query"]["query"]))
    assert len(asked) > 15
    with serve(key_tokens=1) as server:
        server.chat()
        assert server.chat().status_code == 429
        text = server.client.get("/metrics").text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert asked <= {re.match(r"[\w:]+", line)[0] for line in lines}
    assert f'kvkeep_requests_refused_total{{code="key_tokens",model_name="{NAME}"}} 1.0' in lines
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_files_of_compose_agree():
    compose = read("compose.yml")
    service = compose["services"]["kvkeep"]
    assert set(service["environment"]) <= variables()
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    for one in compose["services"].values():
        for mount in one.get("volumes", ()):
            source = mount.partition(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in compose["volumes"], mount
        assert set(one.get("secrets", ())) <= set(compose["secrets"])
    over = read("compose.cuda.yml")["services"]
    assert set(over) <= set(compose["services"])
    (job,) = read("prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["kvkeep:8000"]}]
    assert job["authorization"]["credentials_file"] == service["environment"]["KVKEEP_KEY_FILE"]
    (source,) = read("grafana/datasources.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = read("grafana/dashboards.yml")["providers"]
    assert any(
        mount.partition(":")[2].startswith(provider["options"]["path"])
        for mount in compose["services"]["grafana"]["volumes"]
    )


def test_the_image_has_what_the_server_needs():
    text = (DEPLOY / "Dockerfile").read_text()
    assert set(re.findall(r"KVKEEP_\w+", text)) <= variables()
    assert {"DEVICE", "TORCH", "TORCH_INDEX"} <= set(re.findall(r"^ARG (\w+)", text, flags=re.MULTILINE))
    args = read("compose.cuda.yml")["services"]["kvkeep"]["build"]["args"]
    assert args["DEVICE"] in re.findall(r"(\w+)\) extras=", text)
    root = DEPLOY.parent
    copied = [name for line in re.findall(r"^COPY (.+)$", text, flags=re.MULTILINE) for name in line.split()[:-1]]
    assert copied
    assert all((root / name).exists() for name in copied)
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert {f"!{name}" for name in copied} <= set(kept)
    extras = (root / "pyproject.toml").read_text()
    assert all(f"\n{name} = [" in extras for name in ("server", "gpu"))


def test_the_settings_of_the_container_can_be_used(tmp_path, monkeypatch):
    """With the variables of compose.yml, in the form that a container sees."""
    for name, value in read("compose.yml")["services"]["kvkeep"]["environment"].items():
        monkeypatch.setenv(name, re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value))
    (tmp_path / "key").write_text("0123456789abcdef\n")
    monkeypatch.setenv("KVKEEP_KEY_FILE", str(tmp_path / "key"))
    found = CliRunner().invoke(app, ["serve", "--check"])
    assert "can be used" in found.output, found.output


def test_prometheus_and_clients_of_compose_reach_the_server():
    """By the names that compose.yml allows, and by no other."""
    given = read("compose.yml")["services"]["kvkeep"]["environment"]["KVKEEP_ALLOWED_HOST"]
    (job,) = read("prometheus.yml")["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    names = tuple(re.sub(r"\$\{\w+:-(.*?)\}", r"\1", given).split())
    with serve(allowed_hosts=names) as server:
        found = [
            server.client.get("/metrics", headers={"Host": host}) for host in (target, "localhost:8000", "evil.example")
        ]
    assert [answer.status_code for answer in found] == [200, 200, 403]
