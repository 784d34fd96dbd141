"""The dashboard and the alerts ask for metrics and labels that a real sidecar has, and Prometheus understands them."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from promql_parser import AggregateExpr, MatchOp, VectorSelector

import mmcache
from mmcache.server.metric_table import METRICS
from tests.mmcache.http_asks import ask
from tests.mmcache.redis_server import free_port
from tests.mmcache.support import SidecarProcess, eventually, image

DEPLOY = Path(__file__).parent.parent / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
OF_THE_SCRAPE = {"instance", "job"}
"""Labels that Prometheus adds."""
OF_PROMETHEUS = {"up"}
NO_SAMPLES_YET = {"mmcache_rank_deaths_total"}


def plain(query: str) -> str:
    """A query of the dashboard with what Grafana fills in."""
    return query.replace("$__rate_interval", "5m").replace("$instance", ".*")


QUERIES = [
    *[(panel["title"], plain(target["expr"])) for panel in PANELS for target in panel["targets"]],
    *[(rule["alert"], rule["expr"]) for rule in ALERTS],
]


class Exposed(dict[str, dict[str, set[str]]]):
    """Of each sample's name the labels, and the values that were seen of each."""


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    folder = tmp_path_factory.mktemp("dashboard")
    with SidecarProcess(folder, store="auto", http=f"127.0.0.1:{free_port()}") as sidecar:
        with sidecar.connect() as client:
            client.encode([image(1)])[0].release()
            with suppress(mmcache.EncodeError):
                client.encode([b"no picture"])
        yield sidecar


@pytest.fixture(scope="module")
def exposed(scraped: SidecarProcess) -> Exposed:
    found = Exposed()
    for family in text_string_to_metric_families(ask(scraped.stats()["http"], "/metrics").text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, defaultdict(set))
            for name, value in sample.labels.items():
                labels[name].add(value)
    for metric in METRICS:
        if (name := f"mmcache_{metric.name}_total") in NO_SAMPLES_YET:
            found.setdefault(name, defaultdict(set))[metric.label].add("")
    return found


def selectors(query: str) -> list[VectorSelector]:
    found: list[VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(query), visit)
    return found


def grouped_by(query: str) -> set[str]:
    found: set[str] = set()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, AggregateExpr) and node.modifier is not None:
            found.update(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(query), visit)
    return found


def test_there_are_queries() -> None:
    assert len(PANELS) > 30
    assert len(ALERTS) >= 10
    assert len(selectors("a / b{c='d'}")) == 2
    assert grouped_by("sum by (x, y) (rate(a[5m]))") == {"x", "y"}


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{title}-{n}" for n, (title, _) in enumerate(QUERIES)])
def test_every_metric_and_label_of_a_query_exists(exposed: Exposed, title: str, query: str) -> None:
    asked = selectors(query)
    assert asked, title
    known: set[str] = set()
    for selector in asked:
        if selector.name in OF_PROMETHEUS:
            continue
        assert selector.name in exposed, f"{title}: no metric {selector.name}"
        labels = exposed[selector.name]
        known |= labels.keys()
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels.keys() | OF_THE_SCRAPE, f"{title}: {selector.name} has no {matcher.name}"
            if matcher.name in OF_THE_SCRAPE:
                continue
            if matcher.op == MatchOp.Equal:
                assert matcher.value in labels[matcher.name], f"{title}: {matcher.name} is never {matcher.value}"
            else:
                assert any(re.fullmatch(matcher.value, value) for value in labels[matcher.name])
    assert grouped_by(query) <= known | OF_THE_SCRAPE, title


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_every_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert shown <= grouped_by(plain(target["expr"])), "a legend names what the query drops"
        if "_seconds" in target["expr"] and "process_" not in target["expr"]:
            assert panel["fieldConfig"]["defaults"]["unit"] == "s"
        if "_bytes" in target["expr"]:
            assert panel["fieldConfig"]["defaults"]["unit"] == "bytes"


def test_panels_lie_beside_each_other() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = set(
            itertools.product(
                range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
            )
        )  # fmt: skip
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_variables_are_those_that_queries_use(exposed: Exposed) -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    used = {name for panel in PANELS for target in panel["targets"] for name in re.findall(r"\$(\w+)", target["expr"])}
    assert used - {"__rate_interval"} == variables.keys() - {"datasource"}
    (metric,) = re.findall(r"label_values\((\w+), instance\)", variables["instance"]["definition"])
    assert metric in exposed


def test_every_alert_says_what_to_do() -> None:
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert len(rule["annotations"]["action"]) > 20


def test_grafana_is_given_the_dashboard_and_its_source() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "mmcache.yml").read_text())["providers"]
    assert source["type"] == "prometheus"
    assert provider["options"]["path"].startswith("/")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_fire_when_they_should_and_not_before() -> None:
    command = ["promtool", "test", "rules", str(Path(__file__).with_name("alerts_test.yml"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_a_real_prometheus_answers_every_query(scraped: SidecarProcess, tmp_path: Path) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yml")]
    (job,) = config["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [scraped.stats()["http"]]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--web.listen-address={address}",
               f"--storage.tsdb.path={tmp_path}/data", "--log.level=error"]  # fmt: skip

    def answer(query: str) -> list[Any]:
        reply = ask(address, f"/api/v1/query?query={quote(query)}")
        found = json.loads(reply.body)
        assert found["status"] == "success", found
        result = found["data"]["result"]
        assert isinstance(result, list)
        return result

    def has_scraped() -> bool:
        with suppress(ConnectionError, ValueError):
            return bool(answer("count_over_time(mmcache_ready[1m]) > 2"))
        return False

    with subprocess.Popen(command) as prometheus:
        try:
            eventually(has_scraped, "it has scraped the sidecar", 120)
            empty = [title for title, query in QUERIES[: -len(ALERTS)] if not answer(query)]
            firing = [rule["alert"] for rule in ALERTS if answer(f'ALERTS{{alertname="{rule["alert"]}"}}')]
        finally:
            prometheus.terminate()
    assert empty == ["Deaths of ranks"], "no rank has died; everything else has data"
    assert set(firing) <= {"MmcacheItemsFail", "MmcacheLoopLags"}, "one item of two failed; the machine may be slow"
