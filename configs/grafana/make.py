"""Writes the dashboard: `python -m shoal.configs.grafana.make > configs/grafana/shoal.json`."""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.configs.grafana.panels import CLUSTER, MODEL, ROWS, Panel, Row

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 24, 8


def dashboard() -> dict[str, Any]:
    return {
        "__inputs": [],
        "__requires": [{"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"}],
        "uid": "shoal",
        "title": "Shoal",
        "description": "An LLM serving cluster on Ray: traffic, cache, engines, placement, health.",
        "tags": ["shoal", "llm", "ray"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": list(_variables())},
        "annotations": {"list": []},
        "panels": list(_panels(ROWS)),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
    }
    info = "ray_shoal_build_info"
    yield _variable("cluster", "Cluster", f"label_values({info}, shoal_cluster)")
    yield _variable("model", "Model", f"label_values({info}{{{CLUSTER}}}, model_name)", many=True)
    engines = f'{info}{{{MODEL}, role="engine"}}'
    yield _variable("engine", "Engine", f"label_values({engines}, process)", many=True)


def _variable(name: str, label: str, query: str, *, many: bool = False) -> dict[str, Any]:
    every = {"text": "All", "value": "$__all"}
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,  # with the time range: engines come and go
        "sort": 1,
        "multi": many,
        "includeAll": many,
        "allValue": ".*" if many else None,
        "current": every if many else {},
        "hide": 0,
    }


def _panels(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """In lines from left to right; each row's title is a line of its own."""
    panel_id, y = 1, 0
    for row in rows:
        yield {
            "id": panel_id,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            "panels": [],
        }
        panel_id, y, x = panel_id + 1, y + 1, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + HEIGHT
            yield _panel(panel, panel_id, {"x": x, "y": y, "w": panel.width, "h": HEIGHT})
            panel_id, x = panel_id + 1, x + panel.width
        y += HEIGHT


def _panel(panel: Panel, panel_id: int, position: dict[str, int]) -> dict[str, Any]:
    is_table = panel.kind == "table"
    return {
        "id": panel_id,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": {"showHeader": True} if is_table else _GRAPH_OPTIONS,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "range": not is_table,
                "instant": is_table,
                "format": "table" if is_table else "time_series",
            }
            for i, query in enumerate(panel.queries)
        ],
        **({"transformations": [_WITHOUT_TIME_AND_VALUE]} if is_table else {}),
    }


def _field(panel: Panel) -> dict[str, Any]:
    field: dict[str, Any] = {"unit": panel.unit}
    if panel.min is not None:
        field["min"] = panel.min
    if panel.kind == "timeseries":
        field["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 25 if panel.stacked else 0,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return field


_GRAPH_OPTIONS = {
    "legend": {
        "displayMode": "table",
        "placement": "bottom",
        "showLegend": True,
        "calcs": ["lastNotNull", "max"],
    },
    "tooltip": {"mode": "multi", "sort": "desc"},
}
_WITHOUT_TIME_AND_VALUE = {
    "id": "organize",
    "options": {"excludeByName": {"Time": True, "Value": True}},
}


if __name__ == "__main__":
    json.dump(dashboard(), sys.stdout, indent=1)
    sys.stdout.write("\n")
