"""Tools of operators: every metric in the dashboard, the alerts and the documentation is one that a served model
really exports, with the labels that are asked for.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from hydra_engine.config import EngineConfig, ServerConfig
from hydra_engine.engine import Engine
from hydra_engine.server.app import build_app
from hydra_engine.server.http.listening import listen
from hydra_engine.server.state import STATE
from hydra_engine.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "hydra-engine.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text(encoding="utf-8"))
SCRAPE = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text(encoding="utf-8"))
DOCUMENT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")

ADDED_BY_PROMETHEUS = {"job", "instance"}
QUESTION = {"model": "demo", "messages": [{"role": "user", "content": "What is two plus three?"}], "temperature": 0}

_NAME = re.compile(r"\b(?:(?:vllm|hydra):[a-z0-9_]+|(?:http|process)_[a-z_]+|up)\b(?!\()")
_SELECTOR = re.compile(r"([a-z0-9_:]+)\{([^}]*)\}")
_GROUPING = re.compile(r"\bby \(([a-z_, ]+)\)")

Page = dict[str, set[str]]  # names of samples, and the labels that each has


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def body(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the demo model behind the real server, on two instances, after one answer."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.touch(0o600)
    keys.write_text("ops:secret-of-ops\n")
    engine = Engine.create_unstarted(EngineConfig(model="demo", topology="EP+D", threads=1))
    app = build_app(engine, ServerConfig(port=0, api_key_file=str(keys)), model_name="demo")
    await engine.astart()
    try:
        engine.add_observer(app[STATE].metrics.requests.add)
        app[STATE].metrics.traffic.count_lag(0.001)
        listening = await listen(app, "127.0.0.1", 0)
        async with aiohttp.ClientSession(listening.url, headers={"X-Api-Key": "secret-of-ops"}) as http:
            async with http.post("/v1/chat/completions", json=QUESTION) as response:
                assert response.status == 200, await response.text()
                assert "five" in await response.text()
            async with http.get("/metrics") as response:
                text = await response.text()
        await listening.close()
        return text
    finally:
        await engine.aclose()


@pytest.fixture(scope="module")
def page(body: str) -> Page:
    found: Page = defaultdict(set)
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found | {"up": set()}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for annotation in DASHBOARD["annotations"]["list"]:
        if "expr" in annotation:
            yield annotation["name"], annotation["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


def expressions() -> list[tuple[str, str]]:
    return [*dashboard_expressions(), *((rule["alert"], rule["expr"]) for rule in rules())]


def names_in(expression: str) -> set[str]:
    without_values = re.sub(r'"[^"]*"', '""', expression)
    return set(_NAME.findall(without_values))


@pytest.mark.parametrize(("where", "expression"), expressions(), ids=lambda one: str(one)[:40])
def test_every_expression_asks_for_what_is_there(page: Page, where: str, expression: str) -> None:
    names = names_in(expression)
    assert names, f"{where} asks for nothing: {expression}"
    assert names <= set(page), f"{where}: {names - set(page)} is not exported"
    for name, matchers in _SELECTOR.findall(expression):
        asked = set(re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", matchers))
        assert asked <= page[name] | ADDED_BY_PROMETHEUS, f"{where}: {name} has no {asked - page[name]}"
    for grouping in _GROUPING.findall(expression):
        asked = {label.strip() for label in grouping.split(",")}
        known = set().union(*(page[name] for name in names)) | ADDED_BY_PROMETHEUS
        assert asked <= known, f"{where}: nothing has {asked - known}"
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_an_expression_with_a_wrong_name_would_be_found(page: Page) -> None:
    assert not names_in('sum(rate(hydra:no_such_total{a="hydra:b"}[5m]))') <= set(page)
    assert names_in('up{job="x"} == 0') == {"up"}


def test_every_panel_says_what_it_shows() -> None:
    assert len(panels()) >= 30 and len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in panels():
        defaults = panel["fieldConfig"]["defaults"]
        assert panel["title"] and len(panel["description"]) > 20 and defaults["unit"], panel["title"]
        assert all(
            target["legendFormat"] and target["datasource"] == panel["datasource"] for target in panel["targets"]
        )
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]]
    assert len(set(places)) == len(places), "two panels lie on each other"
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Overview", "Stages", "Caches", "Limits and budgets", "Instances", "HTTP"]
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == [
        *("datasource", "job", "instance", "model_name")
    ]


def test_alerts_are_whole() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules()) >= 8
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
        used = set(re.findall(r"\$labels\.([a-z_]+)", rule["annotations"]["summary"]))
        grouped = {label.strip() for found in _GROUPING.findall(rule["expr"]) for label in found.split(",")}
        assert not grouped or used <= grouped, f"{rule['alert']} tells labels that its expression drops"
    (job,) = SCRAPE["scrape_configs"]
    assert job["job_name"] == "hydra-engine" and SCRAPE["rule_files"] == ["alerts.yml"]
    assert (ROOT / "deploy" / SCRAPE["rule_files"][0]).exists()


def test_the_document_has_every_metric_and_no_other(body: str) -> None:
    """Names are those that Prometheus shows: counters with `_total`, of histograms only the name."""
    exported = set()
    for family in text_string_to_metric_families(body):
        if not family.name.startswith(("process_", "python_")):
            exported.add(family.name + ("_total" if family.type == "counter" else ""))
    table = DOCUMENT.split("## Metrics")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    documented = set(re.findall(r"`((?:vllm:|hydra:|http_)[a-z0-9_]+)", "\n".join(line.split("|")[1] for line in rows)))
    assert documented == exported
    elsewhere = names_in(DOCUMENT) - {"up"}
    assert {name for name in elsewhere if name.startswith(("vllm:", "hydra:"))} <= exported


def test_the_document_tells_every_label(body: str) -> None:
    table = DOCUMENT.split("## Metrics")[1].split("\n## ")[0]
    own: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            labels = set(sample.labels) - {"model_name", "engine", "le", "engine_instance", "role"}
            own[family.name + ("_total" if family.type == "counter" else "")] = labels
    for name, labels in own.items():
        told = re.search(rf"^\| `{name}(?:\{{([a-z_,]+)\}})?`", table, re.MULTILINE)
        if not name.startswith(("process_", "python_")) and labels:
            assert told and set((told[1] or "").split(",")) == labels, name


def test_the_page_is_valid_in_both_formats(body: str) -> None:
    families = list(text_string_to_metric_families(body))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation for family in families)
    text, kind = Metrics("m").page("application/openmetrics-text;version=1.0.0;escaping=underscores,*/*;q=0.1", None)
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in openmetrics.text_string_to_metric_families(text.decode())}
    assert "vllm:request_success" in names and "hydra:stage_queue_seconds" in names


def test_the_document_has_every_flag_of_this_room() -> None:
    for flag in ("--access-log", "--log-format", "--log-level", "--enable-log-requests", "--otlp-endpoint"):
        assert f"`{flag}" in DOCUMENT
    for rule in rules():
        assert rule["alert"] in DOCUMENT, rule["alert"]
