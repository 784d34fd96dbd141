"""/metrics of a real sidecar: names and units by Prometheus' conventions, both formats, and numbers that are true."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

import mmcache
from mmcache.histograms import Histogram
from mmcache.server.metric_table import METRICS
from mmcache.server.stats import OUTCOMES
from tests.mmcache.http_asks import ask
from tests.mmcache.support import SidecarProcess, eventually, image

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
UNITS = ("seconds", "bytes", "ratio", "info")
PLAIN_UNITS = ("_ms", "_milliseconds", "_mb", "_kib", "_percent", "_us", "_microseconds")


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with SidecarProcess(tmp_path_factory.mktemp("metrics"), store="auto", http="127.0.0.1:0") as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def address(scraped: SidecarProcess) -> str:
    return str(scraped.stats()["http"])


def families(address: str) -> dict[str, Family]:
    return {family.name: family for family in parse_text(ask(address, "/metrics").text)}


def value(address: str, family: str, sample: str = "", **labels: str) -> float:
    """Of a sample; 0 if there is none."""
    name = f"mmcache_{family}"
    wanted = f"{name}{sample}"
    found = families(address)[name].samples
    return sum(one.value for one in found if one.name == wanted and labels.items() <= one.labels.items())


def test_both_formats_are_whole(address: str) -> None:
    text = ask(address, "/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    openmetrics = ask(address, "/metrics", Accept=OPENMETRICS)
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert openmetrics.text.endswith("# EOF\n")
    assert openmetrics.text.count("# EOF") == 1
    plain = {family.name.removesuffix("_info") for family in parse_text(text.text)}
    assert plain == {family.name for family in parse_openmetrics(openmetrics.text)}
    for page in (text.text, openmetrics.text):
        headers = re.findall(r"^# (?:HELP|TYPE) (\S+)", page, re.MULTILINE)
        assert all(headers.count(name) == 2 for name in headers), "each family has its two lines once"


def test_every_metric_is_described_and_named_by_the_conventions(address: str) -> None:
    found = families(address)
    assert len(found) > len(METRICS)
    for name, family in found.items():
        assert len(family.documentation) > 10, name
        assert family.documentation.endswith("."), name
        assert family.type in ("gauge", "counter", "histogram"), name
        assert name.startswith(("mmcache_", "process_")), name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name), name
        assert not name.endswith(PLAIN_UNITS), f"{name}: base units only"
        if family.type == "histogram":
            assert name.endswith("_seconds")
        for sample in family.samples:
            if name.startswith("mmcache_"):
                assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
            assert all(re.fullmatch(r"[a-z][a-z_]*", label) for label in sample.labels), sample
            assert math.isfinite(sample.value)
        for unit in UNITS[:2]:  # the unit comes last
            assert unit not in name or name.endswith(unit), name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say(address: str) -> None:
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=ask(address, "/metrics").body, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_every_counter_that_the_table_names_is_there(address: str) -> None:
    """Who renames one in the statistics is told here."""
    found = families(address)
    may_be_empty = {"item_errors", "rank_deaths"}
    for metric in METRICS:
        samples = found[f"mmcache_{metric.name}"].samples
        assert samples or metric.name in may_be_empty, metric
        assert {sample.labels.get(metric.label, "") for sample in samples} >= {label for _, label in metric.keys}


def test_numbers_move_with_what_happens(scraped: SidecarProcess, address: str) -> None:
    before = {name: value(address, name, "_total") for name in ("requests", "items")}
    encoded = value(address, "item_results", "_total", result="encoded")
    with scraped.connect() as client:
        for _ in range(2):
            for lease in client.encode([image(501), image(502)]):
                lease.release()
        eventually(lambda: value(address, "leases_active") == 0, "the leases end")
        assert value(address, "connections") == 1
    assert value(address, "requests", "_total") == before["requests"] + 2
    assert value(address, "items", "_total") == before["items"] + 4
    assert value(address, "item_results", "_total", result="encoded") == encoded + 2
    assert value(address, "request_duration_seconds", "_count", outcome="hit") >= 1
    assert value(address, "request_duration_seconds", "_count", outcome="miss") >= 1
    for name in ("decode_duration", "queue_wait", "encode_duration", "lease_age", "loop_lag"):
        assert value(address, f"{name}_seconds", "_count") > 0, name
    for tier in ("pool", "lmdb"):
        assert value(address, "lookup_duration_seconds", "_count", tier=tier) > 0
    assert 0 < value(address, "encode_duration_seconds", "_sum") < 60


def test_failures_are_counted_by_error(scraped: SidecarProcess, address: str) -> None:
    with scraped.connect() as client, pytest.raises(mmcache.EncodeError, match="1 of 1 items failed"):
        client.encode([b"no picture at all"])
    assert value(address, "item_errors", "_total") > 0
    assert value(address, "request_duration_seconds", "_count", outcome="failed") > 0


def test_buckets_add_up(address: str) -> None:
    found = [family for family in families(address).values() if family.type == "histogram"]
    assert len(found) == 8
    for family in found:
        series: dict[str, list[tuple[float, float]]] = {}
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                labels = {name: text for name, text in sample.labels.items() if name != "le"}
                series.setdefault(str(labels), []).append((float(sample.labels["le"]), sample.value))
        counts = {
            str(sample.labels): sample.value for sample in family.samples if sample.name.endswith("_count")
        }  # fmt: skip
        assert series.keys() == counts.keys()
        for labels, buckets in series.items():
            assert buckets == sorted(buckets)
            assert [count for _, count in buckets] == sorted(count for _, count in buckets)
            assert buckets[-1] == (math.inf, counts[labels])


def test_many_scrapes_at_once_are_all_answered(address: str) -> None:
    with ThreadPoolExecutor(16) as threads:
        pages = list(threads.map(lambda _: ask(address, "/metrics"), range(48)))
    assert {page.status for page in pages} == {200}
    assert all(list(parse_text(page.text)) for page in pages)


def test_a_histogram_counts_what_equals_a_bound_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for number in (0.5, 1.0, 1.5, 2.0):
        histogram.observe(number)
    histogram.observe(7.0, times=3)
    assert list(histogram.cumulative()) == [(1.0, 2), (2.0, 4), (None, 7)]
    assert histogram.total == 26.0
    assert len(histogram) == 7


def test_outcomes_are_all_shown(address: str) -> None:
    samples = families(address)["mmcache_request_duration_seconds"].samples
    assert {sample.labels["outcome"] for sample in samples} == set(OUTCOMES)


def test_the_docs_list_every_metric(address: str) -> None:
    rows = re.findall(r"^\| `(mmcache_\w+)` \| (\w+) \|", DOCS.read_text(), re.MULTILINE)
    shown = {
        (name + "_total" * (family.type == "counter"), family.type)
        for name, family in families(address).items()
        if name.startswith("mmcache_")
    }
    assert len(rows) == len(set(rows))
    assert set(rows) == shown
