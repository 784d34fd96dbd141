"""The metrics: one snapshot of the counters a scrape, rendered family by family so that the loop goes on in between."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from copy import copy
from typing import TYPE_CHECKING

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from mmcache._version import __version__
from mmcache.histograms import Histogram
from mmcache.server.logs import num_suppressed
from mmcache.server.metric_table import METRICS, Metric

if TYPE_CHECKING:
    from mmcache.server.coordinator import Coordinator
    from mmcache.server.front import Front

END = b"# EOF\n"
HEADER = re.compile(rb"^#.*\n", re.MULTILINE)
SAMPLES_AT_ONCE = 20
"""What the loop renders in one turn: about a quarter of a millisecond."""


class Exposition:
    """Renders the metrics of what `front` stands for."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._process = ProcessCollector(registry=None)
        self._running: dict[str, asyncio.Task[tuple[str, bytes]]] = {}

    async def render(self, accept: str) -> tuple[str, bytes]:
        """Content type and text. Who asks while the same is being rendered for another gets that."""
        _, content_type = choose_encoder(accept)
        task = self._running.get(content_type)
        if task is None:
            task = self._running[content_type] = asyncio.get_running_loop().create_task(self._render(accept))
            task.add_done_callback(lambda _: self._running.pop(content_type))
        return await asyncio.shield(task)

    async def _render(self, accept: str) -> tuple[str, bytes]:
        encode, content_type = choose_encoder(accept)
        parts: list[bytes] = []
        for family in self._families():
            for start in range(0, max(1, len(family.samples)), SAMPLES_AT_ONCE):
                text = encode(_Part(family, start)).removesuffix(END)
                parts.append(HEADER.sub(b"", text) if start else text)
                await asyncio.sleep(0)
        if content_type.startswith("application/openmetrics-text"):
            parts.append(END)
        return content_type, b"".join(parts)

    def _families(self) -> Iterator[Family]:
        yield InfoMetricFamily("mmcache_build", "The release.", {"version": __version__})
        answers = CounterMetricFamily("mmcache_http_requests", "Answers over HTTP.", labels=["code"])
        for status, num in sorted(self._front.server.num_answers.items()):
            answers.add_metric([str(status)], num)
        yield answers
        yield CounterMetricFamily("mmcache_log_suppressed", "Log records that were sampled away.", num_suppressed())
        if (home := self._front.home) is not None:
            yield from _of_snapshot(home.snapshot())
            yield from _of_histograms(home)
        yield from self._process.collect()


class _Part(Collector):
    """Some samples of a family, for an encoder that wants to collect."""

    def __init__(self, family: Family, start: int) -> None:
        self._family = copy(family)
        self._family.samples = family.samples[start : start + SAMPLES_AT_ONCE]

    def collect(self) -> Iterator[Family]:
        yield self._family


def _of_snapshot(counters: Mapping[str, object]) -> Iterator[Family]:
    what = {name: str(counters[name]) for name in ("model", "fingerprint", "device", "dtype")}
    yield InfoMetricFamily("mmcache_model", "The model that is served.", what)
    for metric in METRICS:
        yield _family(metric, counters)


def _family(metric: Metric, counters: Mapping[str, object]) -> Family:
    """With what there is of it: a counter that is not there has no sample."""
    kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    family = kind(f"mmcache_{metric.name}", metric.help, labels=[metric.label] if metric.label else [])
    found = _at(counters, metric.path)
    if not metric.label:
        _add(family, [], found)
    elif isinstance(found, Mapping):
        for key, value in metric.keys or [(key, key) for key in found if key not in metric.but]:
            _add(family, [value], _at(found, f"{key}.{metric.field}" if metric.field else key))
    return family


def _add(family: GaugeMetricFamily | CounterMetricFamily, labels: list[str], value: object) -> None:
    if isinstance(value, int | float):
        family.add_metric(labels, value)


def _at(counters: object, path: str) -> object:
    for name in path.split("."):
        if not isinstance(counters, Mapping):
            return None
        counters = counters.get(name)
    return counters


def _of_histograms(home: Coordinator) -> Iterator[Family]:
    stats, store, batches = home.stats, home.store, home.scheduler.batches
    yield _histogram(
        "request_duration", "From a request's arrival until all of it is settled.", "outcome", stats.request_seconds
    )
    yield _histogram(
        "lookup_duration", "Of one look-up of one request's keys in a tier.", "tier",
        {"pool": stats.lookup_seconds, **store.find_seconds},
    )  # fmt: skip
    yield _histogram("read_duration", "Of one embedding's way out of a tier of the store.", "tier", store.read_seconds)
    yield _histogram("decode_duration", "Of one item, waiting for a decoder included.", "", {"": stats.decode_seconds})
    yield _histogram("queue_wait", "Of one item, until its batch begins.", "priority", batches.queue_seconds)
    yield _histogram("encode_duration", "Of one batch.", "", {"": batches.encode_seconds})
    yield _histogram("lease_age", "Of leases when they ended.", "", {"": stats.lease_seconds})
    yield _histogram("loop_lag", "How late the coordinator's loop is, 50 times a second.", "", {"": home.lag.seconds})


def _histogram(name: str, text: str, label: str, by_value: Mapping[str, Histogram]) -> Family:
    family = HistogramMetricFamily(f"mmcache_{name}_seconds", text, labels=[label] if label else [])
    for value, histogram in by_value.items():
        buckets = [("+Inf" if bound is None else repr(bound), count) for bound, count in histogram.cumulative()]
        family.add_metric([value] if label else [], buckets, histogram.total)
    return family
