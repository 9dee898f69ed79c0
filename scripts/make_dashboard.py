"""Generates the Grafana dashboard and the table in docs/metrics.md from deployments/runtime/metrics.py.

python -m scripts.make_dashboard
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from deployments.runtime import metrics as m

ROOT = Path(__file__).parent.parent
DASHBOARD = ROOT / "docs" / "grafana" / "headrace.json"
TABLE = ROOT / "docs" / "metrics.md"
BEGIN, END = "<!-- made by scripts/make_dashboard.py -->\n\n", "\n<!-- end -->\n"

_WIDTH, _HEIGHT, _IN_A_ROW = 24, 8, 3


def name(metric: m.Metric, part: str = "") -> str:
    """Returns the name in Prometheus: Ray prefixes `ray_`, and appends `_total` for counters."""
    return f"ray_{metric.name}{part}" + ("" if isinstance(metric, m.Gauge) else "_total")


def now(gauge: m.Gauge, *by: str, where: str = "") -> str:
    return f"sum by ({', '.join(by)}) ({name(gauge)}{where})"


def rate(counter: m.Metric, *by: str, where: str = "", part: str = "") -> str:
    return f"sum by ({', '.join(by)}) (rate({name(counter, part)}{where}[$__rate_interval]))"


def quantile(q: float, histogram: m.Histogram, *by: str, where: str = "") -> str:
    return f"histogram_quantile({q}, {rate(histogram, 'le', *by, where=where, part='_bucket')})"


def hit_rate(where: str = "") -> str:
    hits, misses = (rate(counter, "cache", where=where) for counter in (m.CACHE_HITS, m.CACHE_MISSES))
    return f"{hits} / ({hits} + {misses})"


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str  # Grafana's name for it
    queries: dict[str, str]  # legend -> PromQL
    stacked: bool = False
    help: str = ""


@dataclass(frozen=True)
class Row:
    title: str
    panels: list[Panel] = field(default_factory=list)


def half_and_most(histogram: m.Histogram, *by: str, where: str = "") -> dict[str, str]:
    legend = " ".join(f"{{{{{tag}}}}}" for tag in by)
    return {
        f"{legend} p{round(100 * q)}".strip(): quantile(q, histogram, *by, where=where) for q in (0.5, 0.95)
    }


def rows() -> list[Row]:
    return [
        Row(
            "Why is the GPU waiting?",
            [
                Panel(
                    "Starvation",
                    "percentunit",
                    {"{{stage}}": rate(m.STARVATION, "stage")},
                    stacked=True,
                    help="Share of time in which the engine had room while requests waited in this stage.",
                ),
                Panel(
                    "What requests wait for before the model",
                    "none",
                    {"{{stage}}": now(m.PREPARING, "stage")},
                ),
                Panel(
                    "The engine's answers",
                    "none",
                    {
                        "running": now(m.IN_FLIGHT, where='{stage="Model"}'),
                        "waiting": now(m.QUEUED, where='{stage="Model"}'),
                        "capacity": now(m.ENGINE_CAPACITY),
                    },
                ),
            ],
        ),
        Row(
            "Requests",
            [
                Panel(
                    "Requests by outcome",
                    "reqps",
                    {"{{endpoint}} {{outcome}}": rate(m.REQUEST_SECONDS, "endpoint", "outcome", **_COUNT)},
                ),
                Panel("End to end", "s", half_and_most(m.REQUEST_SECONDS, "endpoint")),
                Panel("Time to first token", "s", half_and_most(m.FIRST_TOKEN)),
                Panel("Between tokens", "s", half_and_most(m.INTER_TOKEN)),
                Panel("Intake of bodies", "s", half_and_most(m.INTAKE_SECONDS, "endpoint")),
                Panel("Bodies", "Bps", {"{{endpoint}}": rate(m.BODY_BYTES, "endpoint")}),
                Panel("Bodies in flight", "bytes", {"{{replica}}": now(m.BYTES_IN_FLIGHT, "replica")}),
                Panel("Worst lag of the event loop", "s", {"{{replica}}": now(m.LOOP_LAG, "replica")}),
            ],
        ),
        *map(_stage, _STAGES),
        Row(
            "Failures",
            [
                Panel(
                    "Errors",
                    "cps",
                    {"{{stage}} {{modality}} {{kind}}": rate(m.CALL_ERRORS, "stage", "modality", "kind")},
                ),
                Panel("Retries", "cps", {"{{stage}} {{kind}}": rate(m.CALL_RETRIES, "stage", "kind")}),
                Panel(
                    "Cancelled calls",
                    "cps",
                    {"{{stage}} {{modality}}": rate(m.CALL_CANCELLATIONS, "stage", "modality")},
                ),
            ],
        ),
        Row(
            "Caches",
            [
                Panel("Hit rate", "percentunit", {"{{cache}}": hit_rate()}),
                Panel("Hits", "cps", {"{{cache}}": rate(m.CACHE_HITS, "cache")}),
                Panel("Misses", "cps", {"{{cache}}": rate(m.CACHE_MISSES, "cache")}),
                Panel("Joined work in flight", "cps", {"{{cache}}": rate(m.CACHE_JOINS, "cache")}),
                Panel("Evictions", "cps", {"{{cache}}": rate(m.CACHE_EVICTIONS, "cache")}),
                Panel("Memory", "bytes", {"{{cache}}": now(m.CACHE_BYTES, "cache")}),
            ],
        ),
        Row(
            "Engine",
            [
                Panel(
                    "Batch occupancy",
                    "percentunit",
                    {"running": f"{now(m.IN_FLIGHT, where=_MODEL)} / {now(m.ENGINE_CAPACITY)}"},
                ),
                Panel(
                    "Tokens",
                    "cps",
                    {
                        "prompt": rate(m.ENGINE_PROMPT_TOKENS),
                        "prompt, found in the cache": rate(m.CACHE_HITS, where='{cache="prefix"}'),
                        "generated": rate(m.ENGINE_TOKENS),
                    },
                ),
                Panel(
                    "Tokens in a step",
                    "none",
                    {"tokens": f"({_COMPUTED}) / {rate(m.ENGINE_STEPS)}"},
                    help="Of answers, and of prompts as far as they were not in the cache.",
                ),
                Panel(
                    "KV cache",
                    "percentunit",
                    {"in use": f"{now(m.ENGINE_KV_USED)} / {now(m.ENGINE_KV_TOKENS)}"},
                ),
                Panel("Prefix hit rate", "percentunit", {"{{cache}}": hit_rate('{cache="prefix"}')}),
                Panel("Encoder cache", "bytes", {"{{cache}}": now(m.CACHE_BYTES, "cache", where=_ENCODER)}),
                Panel("Preemptions", "cps", {"answers": rate(m.ENGINE_PREEMPTIONS)}),
            ],
        ),
    ]


_COUNT = {"part": "_bucket", "where": '{le="+Inf"}'}  # of a histogram: its observations
_MODEL, _ENCODER = '{stage="Model"}', '{cache="encoder"}'
_COMPUTED = " ".join(
    [
        rate(m.ENGINE_PROMPT_TOKENS),
        "-",
        rate(m.CACHE_HITS, where='{cache="prefix"}'),
        "+",
        rate(m.ENGINE_TOKENS),
    ]
)
_STAGES = ("Tokenizer", "MediaLoader", "EmbeddingLoader", "MMPreprocessor", "Model")
_HAS_BYTES = ("MediaLoader", "EmbeddingLoader", "MMPreprocessor")


def _stage(stage: str) -> Row:
    of_stage, of_all = f'{{stage="{stage}"}}', f'{{stage="{stage}", le="+Inf"}}'
    of_parts = f'{{stage=~"{stage}(.fetch|.decode)?"}}'  # MediaLoader has two parts
    panels = [
        Panel(
            "Queued and in flight",
            "none",
            {
                "{{stage}} queued": now(m.QUEUED, "stage", where=of_parts),
                "{{stage}} in flight": now(m.IN_FLIGHT, "stage", where=of_parts),
            },
        ),
        Panel("Open calls", "none", {"{{modality}}": now(m.CALLS_OPEN, "modality", where=of_stage)}),
        Panel(
            "Calls",
            "cps",
            {"{{modality}}": rate(m.CALL_SERVICE, "modality", part="_bucket", where=of_all)},
        ),
        Panel("Queue time", "s", half_and_most(m.CALL_QUEUE, "modality", where=of_stage)),
        Panel("Service time", "s", half_and_most(m.CALL_SERVICE, "modality", where=of_stage)),
    ]
    if stage in _HAS_BYTES:
        flow = {
            "{{modality}} in": rate(m.CALL_BYTES_IN, "modality", where=of_stage),
            "{{modality}} out": rate(m.CALL_BYTES_OUT, "modality", where=of_stage),
        }
        panels.append(Panel("Bytes", "Bps", flow))
    return Row(stage, panels)


def dashboard() -> dict[str, object]:
    panels: list[dict[str, object]] = []
    y = 0
    for row in rows():
        panels.append(_placed({"type": "row", "title": row.title, "collapsed": False}, 0, y, _WIDTH, 1))
        y += 1
        width = _WIDTH // _IN_A_ROW
        for index, panel in enumerate(row.panels):
            x = index % _IN_A_ROW * width
            panels.append(_placed(_panel(panel), x, y + index // _IN_A_ROW * _HEIGHT, width, _HEIGHT))
        y += -(-len(row.panels) // _IN_A_ROW) * _HEIGHT
    for number, each in enumerate(panels, 1):
        each["id"] = number
    return {
        "uid": "headrace",
        "title": "Headrace",
        "tags": ["headrace", "ray"],
        "schemaVersion": 38,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
            ]
        },
        "panels": panels,
    }


_SOURCE = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _placed(panel: dict[str, object], x: int, y: int, width: int, height: int) -> dict[str, object]:
    return panel | {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(panel: Panel) -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    stacking = {"stacking": {"mode": "normal"}, "fillOpacity": 60} if panel.stacked else {"fillOpacity": 8}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": stacking}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend, "datasource": source}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def table() -> str:
    lines = [
        "| metric | type | unit | tags | meaning |",
        "| -- | -- | -- | -- | -- |",
    ]  # as mdformat writes it
    for metric in m.ALL:
        tags = ", ".join(f"`{tag}`" for tag in metric.tags)
        shown = f"ray_{metric.name}" if isinstance(metric, m.Histogram) else name(metric)
        lines.append(f"| `{shown}` | {metric.kind} | {metric.unit} | {tags} | {metric.help} |")
    return "\n".join(lines) + "\n"


def documented() -> str:
    """Returns the up-to-date text of docs/metrics.md."""
    before, _, rest = TABLE.read_text().partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


def main() -> None:
    DASHBOARD.parent.mkdir(exist_ok=True)
    DASHBOARD.write_text(as_json())
    TABLE.write_text(documented())


def as_json() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    main()
