"""The dashboard as it is shipped: what a Grafana and a Prometheus would stumble over."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from shoal.configs.grafana.make import dashboard
from tests.exported_metrics import told_to_ray

SHIPPED = Path(__file__).parents[2] / "configs" / "grafana" / "shoal.json"
BOARD: dict[str, Any] = json.loads(SHIPPED.read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


def selectors(node: Any) -> list[Any]:
    """Of the metrics that a parsed query reads."""
    if isinstance(node, promql_parser.VectorSelector):
        return [node]
    children = [
        getattr(node, name, None) for name in ("lhs", "rhs", "expr", "vector_selector", "vs", "param")
    ]
    children += list(getattr(node, "args", None) or [])
    return [found for child in children if child is not None for found in selectors(child)]


def test_it_is_what_is_made() -> None:
    made = "python -m shoal.configs.grafana.make > configs/grafana/shoal.json"
    assert dashboard() == BOARD, f"run {made}"


def test_it_has_its_rows() -> None:
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Traffic and latency", "Cache", "Engines", "Router and placement", "Health"]


def test_panels_are_named_once_lie_beside_each_other_and_say_what_they_show() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for one, other in combinations([panel["gridPos"] for panel in BOARD["panels"]], 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below, (one, other)
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_everything_is_asked_of_the_chosen_prometheus() -> None:
    variables = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "cluster", "model", "engine"]
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    asking = [*PANELS, *(target for panel in PANELS for target in panel["targets"])]
    asking += [variable for variable in variables.values() if variable["type"] == "query"]
    assert all(who["datasource"] == chosen for who in asking)
    for _, query in QUERIES:
        assert set(re.findall(r"\$(\w+)", query)) <= {*variables, "__rate_interval"}


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[title for title, _ in QUERIES])
def test_each_query_parses_and_reads_what_is_exported_of_this_cluster(title: str, query: str) -> None:
    read = selectors(promql_parser.parse(query.replace("$__rate_interval", "1m")))
    assert read and len(read) == query.count("ray_shoal_") == query.count('shoal_cluster="$cluster"')
    for selector in read:
        assert selector.name in told_to_ray(), f"{title}: nobody exports {selector.name}"


def test_a_wrong_name_and_a_wrong_query_are_noticed() -> None:
    (selector,) = selectors(promql_parser.parse("sum by (a) (rate(ray_shoal_typo_total[5m])) + 1"))
    assert selector.name not in told_to_ray()
    with pytest.raises(ValueError, match="unclosed"):
        promql_parser.parse("sum(rate(ray_shoal_requests_total[5m])")
