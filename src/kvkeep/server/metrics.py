"""Numbers for Prometheus, by vLLM's names where vLLM has them, and by kvkeep's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

from fastapi import Request, Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Result
from kvkeep.server.errors import RefusalError

_LABEL = "model_name"
_TIMES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_COUNTS = tuple(float(factor * 10**power) for power in range(6) for factor in (1, 2, 5))
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


class Refusals:
    """Counts requests that were refused.

    Args:
        name: the model's name.
        registry: of the counter; by default a new one, which only `text` shows.
    """

    def __init__(self, name: str, registry: CollectorRegistry | None = None) -> None:
        self._name, self._registry = name, registry or CollectorRegistry(auto_describe=False)
        words = "Requests that were refused for a limit, the queue or a time, or cancelled."
        self._count = Counter("kvkeep_requests_refused", words, (_LABEL, "code"), registry=self._registry)

    def note(self, refusal: RefusalError) -> None:
        """Count a request that was refused, by its code, or by its status if it has none."""
        self._count.labels(self._name, refusal.code or str(refusal.status)).inc()

    def text(self) -> str:
        """Return all metrics of the registry, by default this counter alone, in Prometheus's text format."""
        return generate_latest(self._registry).decode()


@runtime_checkable
class OpenSessions(Protocol):
    """What metrics show of a server's sessions."""

    @property
    def count(self) -> int:
        """Return the number of open sessions."""

    @property
    def running(self) -> int:
        """Return how many open sessions have a turn that runs or waits for a row."""


class Metrics:
    """Counts what a server does. Whoever runs requests tells it of each result and each refusal.

    Args:
        engine: the engine.
        name: the model's name.
        sessions: the sessions.
    """

    def __init__(self, engine: Engine, name: str, sessions: OpenSessions) -> None:
        """Make a registry of Prometheus with all counters, histograms and gauges of one server, and of its process."""
        self._engine, self._name, self._sessions = engine, name, sessions
        # its own, since in the process's registry two servers of one process could not have the same names
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Gauges(self._gauges, name))
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._new = self._counter("vllm:generation_tokens", "New tokens.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Tokens of prompts.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Tokens of prompts that were not read again.")
        # a counter with labels is shown only once it has been asked for with their values
        self._counter("vllm:num_preemptions", "Always 0: no request is preempted.").labels(name)
        labels = (_LABEL, "finished_reason")
        self._ended = Counter("vllm:request_success", "Requests that ended.", labels, registry=self._registry)
        times = {
            "vllm:time_to_first_token_seconds": "Time from arrival to the first token.",
            "vllm:inter_token_latency_seconds": "Mean time per token after the first, of a request.",
            "vllm:e2e_request_latency_seconds": "Time from arrival to the last token.",
            "vllm:request_queue_time_seconds": "Time from arrival to a row.",
            "vllm:request_prefill_time_seconds": "Time from a row to the first token.",
            "vllm:request_decode_time_seconds": "Time from the first token to the last.",
            "vllm:request_inference_time_seconds": "Time from a row to the last token.",
            "vllm:request_time_per_output_token_seconds": "Mean time per token after the first, of a request.",
        }
        self._times = {each: self._histogram(each, text, _TIMES) for each, text in times.items()}
        self._sizes = {
            "prompt": self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _COUNTS),
            "new": self._histogram("vllm:request_generation_tokens", "New tokens of a request.", _COUNTS),
        }
        self._lost = self._histogram("kvkeep_lost_mass_prompt", "Attention that a prompt's cut lost.", _SHARES)
        self._refusals = Refusals(name, self._registry)
        ProcessCollector(registry=self._registry)

    async def show(self, request: Request) -> Response:
        """Answer with all metrics in Prometheus's text format."""
        return Response(generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def note(self, result: Result) -> None:
        """Count a request that has ended, in any way, in all counters and histograms. A time or loss that its result
        does not have is left out.
        """
        new = len(result.token_ids)
        self._prompt.labels(self._name).inc(result.prompt_tokens)
        self._new.labels(self._name).inc(new)
        self._queries.labels(self._name).inc(result.prompt_tokens)
        self._hits.labels(self._name).inc(result.cached_tokens)
        self._ended.labels(self._name, result.finish_reason).inc()
        for name, number in (("prompt", result.prompt_tokens), ("new", new)):
            self._sizes[name].labels(self._name).observe(number)
        decode = None if result.tpot_s is None else result.tpot_s * (new - 1)  # the first token belongs to prefill
        whole = None if result.ttft_s is None else result.ttft_s + (decode or 0.0)
        inference = None if result.prefill_s is None else result.prefill_s + (decode or 0.0)
        parts = (result.queued_s, result.prefill_s, decode, inference)
        # in the order of `_times`, where vLLM has two names for the time per token
        seconds_of = (result.ttft_s, result.tpot_s, whole, *parts, result.tpot_s)
        for histogram, seconds in zip(self._times.values(), seconds_of, strict=True):
            if seconds is not None:
                histogram.labels(self._name).observe(seconds)
        if result.lost_mass.prompt is not None:
            self._lost.labels(self._name).observe(result.lost_mass.prompt)

    def note_refusal(self, refusal: RefusalError) -> None:
        """Count a request that was refused, by its code, or by its status if it has none."""
        self._refusals.note(refusal)

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        """Yield name, meaning and value of each gauge as it is now: of the engine's rows, and of sessions."""
        engine, rows = self._engine, max(1, self._engine.rows)  # a closed engine has none
        # more may run than there are rows: sequences that take turns count as running, too
        running, waiting = engine.n_running, engine.n_waiting
        yield "vllm:num_requests_running", "Requests that have a row.", running
        yield "vllm:num_requests_waiting", "Requests that wait for a row.", waiting
        yield "vllm:kv_cache_usage_perc", "Rows that are taken, as a share.", min(1.0, running / rows)
        yield "kvkeep_rows", "Sequences that run at once.", engine.rows
        yield "kvkeep_row_bytes", "Bytes of a row.", engine.row_bytes
        yield "kvkeep_sessions_open", "Sessions that are open.", self._sessions.count
        in_memory, on_disk = engine.session_bytes
        in_rows = engine.row_bytes * self._sessions.running
        yield "kvkeep_session_row_bytes", "Bytes of the rows in which turns of sessions run.", in_rows
        yield "kvkeep_session_memory_bytes", "Bytes of sessions in main memory, with turns to rewind.", in_memory
        yield "kvkeep_session_disk_bytes", "Bytes of the files of sessions.", on_disk

    def _counter(self, name: str, text: str) -> Counter:
        """Register a new counter with the label ``model_name``, and return it. ``text`` is its meaning for users."""
        return Counter(name, text, (_LABEL,), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        """Register a new histogram with the label ``model_name``, and return it. ``text`` is its meaning for users, and
        ``buckets`` are the upper bounds.
        """
        return Histogram(name, text, (_LABEL,), registry=self._registry, buckets=buckets)


class _Gauges(Collector):
    """Hands the numbers of the moment to a registry.

    Args:
        read: yields the name, the meaning and the value of each.
        model: the model's name.
    """

    def __init__(self, read: Callable[[], Iterator[tuple[str, str, float]]], model: str) -> None:
        self._read, self._model = read, model

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Read all gauges, and yield each as a family of Prometheus with one value; called whenever metrics are
        shown.
        """
        for name, text, value in self._read():
            family = GaugeMetricFamily(name, text, labels=(_LABEL,))
            family.add_metric((self._model,), value)
            yield family
