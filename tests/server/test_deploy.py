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
parser = pytest.importorskip("prometheus_client.parser")


def read(name):
    return yaml.safe_load((DEPLOY / name).read_text())


def variables():
    """The environment variables that kvkeep serve reads, by its options."""
    command = typer.main.get_command(app).commands["serve"]
    return {f"KVKEEP_{one.name.upper()}" for one in command.params}


@pytest.fixture(scope="module")
def exported():
    """What a server exports that has answered a request and refused one: its metrics, by the names of their samples."""
    with serve(key_tokens=1) as server:
        server.chat()
        assert server.chat().status_code == 429
        families = parser.text_string_to_metric_families(server.client.get("/metrics").text)
        return {sample.name: (family.type, sample.labels) for family in families for sample in family.samples}


BOARD = json.loads((DEPLOY / "grafana/kvkeep.json").read_text())
QUERIES = [(panel["title"], query) for panel in BOARD["panels"] for query in panel["targets"]]
SELECTOR = re.compile(r"(?P<name>[a-z_][\w:]*)\{(?P<labels>[^}]*)\}(?P<range>\[[^]]+\])?")
FUNCTIONS = {"sum", "max", "rate", "by", "le", "histogram_quantile"}


def faults(expression, legend, exported, variables):
    """What is wrong with a query of the dashboard, given what a server exports and the dashboard's variables."""
    found = []
    added = {"job", "instance"}  # by Prometheus
    grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r",\s*", group)}
    for selector in SELECTOR.finditer(expression):
        kind, labels = exported.get(selector["name"], (None, {}))
        asked = set(re.findall(r"(\w+)\s*=?[=~!]~?", selector["labels"]))
        missing = (asked | grouped) - set(labels) - added
        found += [f"{selector['name']} is not exported"] if kind is None else []
        found += [f"{selector['name']} has no label {label}" for label in sorted(missing if kind else ())]
        if bool(selector["range"]) != (kind in ("counter", "histogram")):
            found.append(f"{selector['name']} is a {kind}, so it is {'not ' if selector['range'] else ''}to be a rate")
        if selector["name"].endswith("_bucket") and "le" not in grouped:
            found.append(f"{selector['name']} is summed over its buckets")
    rest = re.sub(r'"[^"]*"', "", SELECTOR.sub("", expression))
    unknown = set(re.findall(r"[a-z_][\w:]+", rest)) - FUNCTIONS - grouped
    found += [f"{name} is no function and no metric with labels" for name in sorted(unknown)]
    used = set(re.findall(r"\$(\w+)", expression))
    found += [f"${name} is no variable" for name in sorted(used - variables - {"__rate_interval"})]
    found += [f"the legend has {{{{{name}}}}}" for name in re.findall(r"\{\{(\w+)\}\}", legend) if name not in grouped]
    return found


VARIABLES = {variable["name"] for variable in BOARD["templating"]["list"]}


def test_every_query_of_the_dashboard_finds_what_it_asks_for(exported):
    wrong = {
        f"{title}, {query['legendFormat']}": found
        for title, query in QUERIES
        if (found := faults(query["expr"], query["legendFormat"], exported, VARIABLES))
    }
    assert wrong == {}
    assert {query["datasource"]["uid"] for _, query in QUERIES} == {"${source}"}


def test_the_variables_of_the_dashboard_find_what_they_ask_for(exported):
    (query,) = [variable["query"]["query"] for variable in BOARD["templating"]["list"] if variable["type"] == "query"]
    name, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", query).groups()
    assert label in exported[name][1]
    assert exported["kvkeep_requests_refused_total"][1] == {"code": "key_tokens", "model_name": NAME}
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(QUERIES) > 15


WRONG = [
    ('sum(kvkeep_row{model_name=~"$model"})', "", "kvkeep_row is not exported"),
    ('sum(kvkeep_rows{model=~"$model"})', "", "kvkeep_rows has no label model"),
    ('sum(rate(kvkeep_rows{model_name=~"$model"}[5m]))', "", "not to be a rate"),
    ('sum(vllm:prompt_tokens_total{model_name=~"$model"})', "", "to be a rate"),
    ('sum(kvkeep_rows{model_name=~"$models"})', "", "$models is no variable"),
    ('sum(kvkeep_rows{model_name=~"$model"})', "{{code}}", "legend"),
    ('sums(kvkeep_rows{model_name=~"$model"})', "", "sums is no function"),
    ('sum(rate(kvkeep_lost_mass_prompt_bucket{model_name="a"}[5m]))', "", "summed over its buckets"),
    ("sum(kvkeep_rows)", "", "no metric with labels"),
]
"""Queries that find nothing or something else, with a legend, and what is wrong with each."""


def test_wrong_queries_are_seen(exported):
    for expression, legend, fault in WRONG:
        assert any(fault in found for found in faults(expression, legend, exported, VARIABLES)), expression


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


def test_nothing_of_compose_is_open_by_a_password_that_everybody_knows():
    compose = read("compose.yml")
    for name, service in compose["services"].items():
        given = {
            key: value for key, value in service.get("environment", {}).items() if "PASSWORD" in key or "KEY" in key
        }
        assert name == "prometheus" or given, name
        assert set(given.values()) <= {f"/run/secrets/{one}" for one in service.get("secrets", ())}, name


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
