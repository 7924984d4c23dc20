"""Replicas of a server: what is checked before one starts, and how many a load needs. Without Ray."""

import re
import sys
import types

import pytest
from typer.testing import CliRunner

from kvkeep.cli.main import app
from kvkeep.cli.serve import parse_replicas
from kvkeep.errors import InputError, pip_install
from kvkeep.scale import cluster, ray_serve, ray_serve_replicas
from kvkeep.scale.cluster import Need, Node, check_room
from kvkeep.scale.ray_serve import application, need_serve
from kvkeep.scale.ray_serve_replicas import by_free_rows


def node():
    return Node("10.0.0.1", 4, 0, 10**10, {})


@pytest.mark.parametrize(
    ("text", "found"), [(None, None), ("1", (1, 1)), (" 2 ", (2, 2)), ("1-4", (1, 4)), ("3-3", (3, 3))]
)
def test_numbers_of_replicas(text, found):
    assert parse_replicas(text, None) == found


@pytest.mark.parametrize("text", ["", "two", "-1", "1-", "1-2-3", "1.5", "²", "1e3", "0x2"])
def test_no_numbers_of_replicas(text):
    with pytest.raises(InputError, match=r"--ray-replicas .* is not a number; give 2, or the least and the most: 1-4"):
        parse_replicas(text, None)


@pytest.mark.parametrize("text", ["0", "4-1", "0-3", "9999", "1-99999999999999"])
def test_numbers_of_replicas_out_of_range(text):
    with pytest.raises(InputError, match="is out of range; give 1 to 1024"):
        parse_replicas(text, None)


def test_an_address_needs_replicas():
    with pytest.raises(InputError, match="give --ray-replicas N, too"):
        parse_replicas(None, "auto")
    with pytest.raises(InputError, match="--ray-address is empty"):
        parse_replicas("2", " ")


def refused(*words):
    found = CliRunner().invoke(app, ["serve", *map(str, words)])
    assert found.exit_code == 2, found.output
    assert "Traceback" not in found.output
    return " ".join(found.output.split())


@pytest.mark.usefixtures("no_ray")
def test_without_ray_the_error_names_the_extra():
    assert f"Ray is not installed: {pip_install('ray')}." in refused("--ray-replicas", 2)
    with pytest.raises(InputError, match="Ray is not installed"):
        application(replicas=2)


@pytest.fixture
def with_ray(monkeypatch):
    """A package of Ray that is new enough, as far as checks go."""

    def use(version="2.60.0", **more):
        made = types.ModuleType("ray")
        made.__version__, made.__path__ = version, []
        for name, value in more.items():
            setattr(made, name, value)
        monkeypatch.setitem(sys.modules, "ray", made)
        monkeypatch.delitem(sys.modules, "ray.serve", raising=False)
        monkeypatch.setattr(cluster, "need_ray", lambda: made)
        monkeypatch.setattr(ray_serve, "need_ray", lambda: made)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        return made

    return use


def test_ray_without_serve_and_old_ray_are_refused(with_ray):
    with_ray()
    with pytest.raises(InputError, match=re.escape(f"Ray Serve is not installed: {pip_install('ray')}")):
        need_serve()
    with_ray("2.59.1", serve="serve")
    with pytest.raises(InputError, match=r"This is Ray 2.59.1, and replicas need 2.60"):
        need_serve()
    with_ray("3.0.0.dev0", serve="serve")
    assert need_serve() == "serve"


def test_an_address_without_a_cluster_is_refused_before_the_model_is_read(with_ray):
    with_ray(serve="serve")
    assert "--ray-address 127.0.0.1:1" in refused("--ray-replicas", 2, "--ray-address", "127.0.0.1:1")
    assert "is no address of a cluster" in refused("--ray-replicas", 2, "--ray-address", "nowhere")


def test_replicas_that_do_not_fit_are_refused_with_what_would():
    with pytest.raises(InputError, match=r"5 replicas of 1 CPU each do not fit .*, 4 would: .* Give `ray_replicas=4`"):
        check_room([node()], Need(), 5, what="replica", option="ray_replicas")


def context(rows, busy, target=1):
    metrics = {"rows": dict(enumerate(rows)), "busy": dict(enumerate(busy))}
    return types.SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=target)


@pytest.mark.parametrize(
    ("rows", "busy", "wanted"),
    [([8], [0], 0), ([8], [6.4], 1), ([8], [8], 1.25), ([8, 8], [8, 20], 4.375), ([8, 8, 8], [1, 0, 0], 0.15625)],
)
def test_a_fifth_of_all_rows_shall_be_free(rows, busy, wanted):
    assert by_free_rows(context(rows, busy)) == (pytest.approx(wanted), {})


@pytest.mark.parametrize("found", [None, {}, {"rows": {}}, {"rows": {"a": 0}, "busy": {"a": 3}}])
def test_without_numbers_of_replicas_nothing_changes(found):
    asked = types.SimpleNamespace(aggregated_metrics=found, target_num_replicas=3)
    assert by_free_rows(asked) == (3, {})


def test_replicas_that_are_known():
    ray_serve_replicas.note("place", {"a": 1, "b": 2})
    ray_serve_replicas.drop("place", "a")
    ray_serve_replicas.drop("place", "nobody")
    ray_serve_replicas.drop("elsewhere", "a")
    assert ray_serve_replicas.of("place") == {"b": 2}
    assert ray_serve_replicas.of("elsewhere") == ray_serve_replicas.of("nowhere") == {}
