"""The dashboard and the table of metrics, generated from the definitions of the metrics."""

from __future__ import annotations

from deployments.runtime.metrics import ALL
from scripts.make_dashboard import DASHBOARD, TABLE, as_json, documented, name, rows


def test_the_dashboard_and_the_table_are_up_to_date() -> None:
    assert DASHBOARD.read_text() == as_json(), "run python -m scripts.make_dashboard"
    assert TABLE.read_text() == documented(), "run python -m scripts.make_dashboard"


def test_every_metric_is_on_the_dashboard() -> None:
    queries = " ".join(query for row in rows() for panel in row.panels for query in panel.queries.values())
    assert [metric.name for metric in ALL if name(metric).removesuffix("_total") not in queries] == []
