"""The page of a comparison for a browser: the tables of the Markdown page, and curves over rounds and megabytes.

One self-contained file without script; the browser is forbidden to load anything. Raw HTML in a plan or in a reason is
shown as text.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
import markdown
from markupsafe import Markup

from server_app.compare_cells import Cell
from server_app.compare_columns import better, column_name
from server_app.compare_plan import Plan, Setting
from server_app.report_charts import Chart, Point, line_chart
from server_app.report_template import COLOURS, CSS, DRAW
from server_app.report_words import number

MAX_CURVES = 8
TABLE_CSS = """
td:first-child { text-align: left; position: sticky; left: 0; background: var(--card); white-space: normal;
  min-width: 110px; }
.scroll { margin-bottom: 14px; }
"""
HEADING = "\n## "

TEMPLATE = (
    DRAW
    + """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ css }}</style>
</head>
<body>
<main>
{%- for text, charts, left_out in sections %}
<section>
{{ text }}
{%- if charts %}
<div class="charts">{% for chart in charts %}{{ draw(chart) }}{% endfor %}</div>
<p class="small soft">Validation, means over the seeds that have the round.
{%- if left_out %} Not drawn, since the eight best rows are: {{ left_out|join(", ") }}.{% endif %}</p>
{%- endif %}
</section>
{%- endfor %}
</main>
</body>
</html>
"""
)


def html_page(plan: Plan, cells: Sequence[Cell], text: str) -> str:
    """``text`` is the Markdown page of the same plan and cells (`compare_table.page`)."""
    head, *rest = text.split(HEADING)
    sections = [(_html(head), [], [])]
    for setting, part in zip(plan.settings, rest, strict=True):
        mine = [cell for cell in cells if cell.setting == setting]
        sections.append((_html(HEADING + part), *_charts(plan, setting, mine)))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    style = Markup(CSS + COLOURS + TABLE_CSS)
    return environment.from_string(TEMPLATE).render(title=plan.title, css=style, sections=sections)


def _html(text: str) -> Markup:
    convert = markdown.Markdown(extensions=["tables", "sane_lists"])
    convert.preprocessors.deregister("html_block")
    convert.inlinePatterns.deregister("html")
    scroll = '<div class="scroll" tabindex="0" role="region"><table>'
    return Markup(convert.convert(text).replace("<table>", scroll).replace("</table>", "</table></div>"))


def _charts(plan: Plan, setting: Setting, cells: Sequence[Cell]) -> tuple[list[Chart], list[str]]:
    """The first metric that has a curve, over rounds and over megabytes, and the rows that are not drawn."""
    runs = [(cell.row.name, _read(cell.run_dir)) for cell in cells if cell.is_done and cell.run_dir is not None]
    for metric in plan.metrics:
        by_row: dict[str, list[list[tuple[int, float, float]]]] = defaultdict(list)
        for name, lines in runs:
            by_row[name].append(_curve(lines, metric))
        curves = {name: mean for row in plan.rows if (mean := _mean(by_row[row.name])) for name in [row.name]}
        if curves:
            break
    else:
        return [], []
    best_first = sorted(curves, key=lambda name: curves[name][-1][2], reverse=better(metric) != "lower")
    drawn = [name for name in curves if name in best_first[:MAX_CURVES]]
    title = column_name(metric)
    over_rounds: list[tuple[str, list[Point]]] = [(name, [(n, y) for n, _, y in curves[name]]) for name in drawn]
    over_bytes: list[tuple[str, list[Point]]] = [(name, [(mb, y) for _, mb, y in curves[name]]) for name in drawn]
    charts = [
        line_chart(f"{title}, {setting.name}", "round", over_rounds),
        line_chart(f"{title}, {setting.name}", "megabytes sent and received by all sites", over_bytes),
    ]
    return [chart for chart in charts if chart is not None], [name for name in curves if name not in drawn]


def _read(run_dir: Path) -> list[Mapping]:
    with (run_dir / "metrics.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _curve(lines: Sequence[Mapping], metric: str) -> list[tuple[int, float, float]]:
    """(round, megabytes so far, value on validation) of one run."""
    sent, at = 0.0, {0: 0.0}
    for line in lines:
        if line["kind"] == "round":
            sent += (number(line.get("bytes_down")) or 0) + (number(line.get("bytes_up")) or 0)
            at[line["round"]] = sent / 1e6
    found = []
    for line in lines:
        if line["kind"] == "evaluation" and line["split"] == "val" and line["round"] in at:
            value = number(line["summary"].get(metric))
            if value is not None:
                found.append((line["round"], at[line["round"]], value))
    return sorted(found)


def _mean(curves: Sequence[Sequence[tuple[int, float, float]]]) -> list[tuple[int, float, float]]:
    """The mean curve of a row's seeds, at every round that one of them has."""
    at: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for curve in curves:
        for server_round, megabytes, value in curve:
            at[server_round].append((megabytes, value))
    return [
        (server_round, *(statistics.fmean(part) for part in zip(*at[server_round], strict=True)))
        for server_round in sorted(at)
    ]
