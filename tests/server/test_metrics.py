"""Numbers for Prometheus: vLLM's names, and counts that agree with the answers."""

from __future__ import annotations

import pytest

from .running import NAME, keys, serve

VLLM = ("prompt_tokens_total", "generation_tokens_total", "request_success_total", "num_requests_running")
VLLM += ("num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total")
VLLM += ("num_preemptions_total", "request_prompt_tokens_sum", "request_generation_tokens_sum")
VLLM += tuple(
    f"{name}_seconds_count"
    for name in (
        *("time_to_first_token", "inter_token_latency", "e2e_request_latency"),
        *("request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time"),
        "request_time_per_output_token",
    )
)


def read(server):
    lines = server.client.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


@pytest.mark.long
def test_counts_are_those_of_the_answers():
    with serve() as server:
        used = [server.chat(max_tokens=3).json()["usage"], server.chat(max_tokens=2, n=2).json()["usage"]]
        server.chat(policy="h20")
        server.post("/v1/sessions")
        found = read(server)
        model = f'{{model_name="{NAME}"}}'
        assert found[f"vllm:generation_tokens_total{model}"] == sum(one["completion_tokens"] for one in used) == 7
        assert found[f"vllm:prompt_tokens_total{model}"] == used[0]["prompt_tokens"] + 2 * used[1]["prompt_tokens"]
        assert found[f'vllm:request_success_total{{finished_reason="length",model_name="{NAME}"}}'] == 3
        assert found[f"vllm:num_requests_running{model}"] == 0
        assert found[f"kvkeep_row_bytes{model}"] == server.engine.row_bytes
        assert found[f"kvkeep_sessions_open{model}"] == 1
        for name in VLLM:
            assert any(line.startswith(f"vllm:{name}{{") for line in found), name
        assert found[f"vllm:time_to_first_token_seconds_count{model}"] == 3


def test_numbers_need_a_key():
    with serve(keys=keys("anna-anna")) as server:
        server.refused(server.client.get("/metrics"), 401)
        assert server.client.get("/metrics", headers={"Authorization": "Bearer anna-anna"}).status_code == 200


@pytest.mark.long
def test_bytes_of_sessions_are_counted_where_they_lie(tmp_path):
    options = {"session_dir": str(tmp_path)}
    with serve(engine=options, **options) as server:
        names = [f'kvkeep_session_{place}_bytes{{model_name="{NAME}"}}' for place in ("row", "memory", "disk")]
        assert [read(server)[name] for name in names] == [0, 0, 0]
        server.post("/v1/sessions", {"id": "trip"})
        server.chat(session_id="trip")
        kept = server.client.get("/v1/sessions/trip").json()["kv_bytes"]
        row, memory, disk = (read(server)[name] for name in names)
        assert row == disk == 0
        assert memory >= kept > 0
        server.post("/v1/sessions/trip/save")
        assert read(server)[names[2]] == sum(path.stat().st_size for path in tmp_path.glob("*.kvkeep")) > 0
        server.client.delete("/v1/sessions/trip")
        assert read(server)[names[2]] == 0
