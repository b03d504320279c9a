"""The page of the report, as a Jinja template: a Python file, because only Python files travel in the app bundle.

It holds no script and loads nothing: its policy line forbids the browser to. Everything it prints is escaped.
"""

CSS = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1a2230; --soft: #5b6675; --line: #d9dee6;
  --good: #17692f; --good-bg: #e3f4e7; --bad: #a02116; --bad-bg: #fdeae7; --note: #7a4d00; --note-bg: #fff3d9;
  --c0: #1f5fa8; --c1: #c2500a; --c2: #1a7f4b; --c3: #7b3fb5; --c4: #a61e63; --c5: #6b6a12; --c6: #0e7d8c;
  --c7: #555f6e; }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161c; --card: #1b2129; --text: #e6eaf0; --soft: #9aa6b5; --line: #323b47;
    --good: #84d69a; --good-bg: #17331f; --bad: #f7a59b; --bad-bg: #43201c; --note: #f0c674; --note-bg: #3a2e13;
    --c0: #74b1f2; --c1: #f5a05c; --c2: #6fce9b; --c3: #c49bf0; --c4: #f08cbb; --c5: #cfcd6a; --c6: #66cfdd;
  --c7: #b3bdca; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, "Segoe UI", Roboto,
  sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 10px; }
h3 { font-size: .95rem; margin: 0 0 6px; }
p { margin: 0 0 10px; overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px;
  margin-top: 16px; }
.soft, .unit { color: var(--soft); }
.small, .unit { font-size: .85rem; }
.unit { display: block; white-space: nowrap; }
.badge { display: inline-block; border-radius: 99px; padding: 1px 10px; font-size: .85rem; font-weight: 600; }
.good { color: var(--good); background: var(--good-bg); }
.bad { color: var(--bad); background: var(--bad-bg); }
.note { color: var(--note); background: var(--note-bg); }
.lead { font-size: 1.08rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 150px), 1fr)); gap: 12px;
  margin: 14px 0; }
.figures div { border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.figures b { display: block; font-size: 1.25rem; line-height: 1.8rem; white-space: nowrap; }
.figures b.words { font-size: 1.05rem; hyphens: auto; white-space: normal; overflow-wrap: anywhere; }
.warnings { border-radius: 8px; padding: 10px 14px; margin: 0 0 12px; }
.warnings li { overflow-wrap: anywhere; }
ul { margin: 0; padding-left: 1.2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 20px; }
figure { margin: 0; min-width: 0; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--line); stroke-width: 1; }
.mark { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 3; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: .85rem; color: var(--soft); margin-top: 4px; }
.legend span { overflow-wrap: anywhere; }
.legend i { display: inline-block; width: 14px; height: 3px; vertical-align: middle; margin-right: 5px; }
.scroll { overflow-x: auto; margin: 0 -4px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line); vertical-align: top;
  white-space: nowrap; }
th { font-weight: 600; color: var(--soft); }
thead th { vertical-align: bottom; }
th:first-child { text-align: left; }
tbody th { color: var(--text); min-width: 132px; max-width: 260px; white-space: normal; overflow-wrap: anywhere; }
th:first-child { position: sticky; left: 0; background: var(--card); }
thead th { white-space: normal; }
th .unit { font-weight: 400; white-space: normal; }
table.words th, table.words td { text-align: left; }
table.words td:last-child { white-space: normal; overflow-wrap: anywhere; min-width: 180px; width: 60%; }
tr.weak th, tr.weak td { background: var(--bad-bg); }
tr.out td, tr.out th { color: var(--soft); }
.range { width: 110px; height: 18px; margin-top: 3px; }
.pairs { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); gap: 18px; }
.pairs table { table-layout: fixed; }
.pairs th, .pairs td { white-space: normal; overflow-wrap: anywhere; text-align: left; padding: 4px 6px;
  position: static; }
.pairs th { color: var(--soft); font-weight: 400; }
details { margin-top: 12px; }
summary { cursor: pointer; font-weight: 600; padding: 4px 0; }
code { font-size: .85em; overflow-wrap: anywhere; }
dt { font-weight: 600; }
dd { margin: 0 0 8px; color: var(--soft); }
@media (max-width: 600px) {
  svg text { font-size: 15px; }
  section { padding: 14px 12px; }
  th, td { padding: 5px 7px; }
  th:first-child { max-width: 132px; } }
@media print { body { background: none; } section { break-inside: avoid; } }
"""

COLOURS = "\n".join(
    f".s{i} {{ stroke: var(--c{i}); }} .f{i} {{ fill: var(--c{i}); background: var(--c{i}); }}" for i in range(8)
)

DRAW = """
{%- macro draw(chart) %}
<figure>
<h3>{{ chart.title }}</h3>
<svg viewBox="0 0 440 250" role="img" aria-label="{{ chart.title }}">
{%- for tick in chart.y_ticks %}
<line class="grid" x1="50" x2="426" y1="{{ tick.at }}" y2="{{ tick.at }}"/>
<text x="44" y="{{ tick.at + 4 }}" text-anchor="end">{{ tick.text }}</text>
{%- endfor %}
{%- for tick in chart.x_ticks %}
<text x="{{ tick.at }}" y="229" text-anchor="middle">{{ tick.text }}</text>
{%- endfor %}
<text x="238" y="246" text-anchor="middle">{{ chart.x_label }}</text>
{%- if chart.mark is not none %}
<line class="mark" x1="{{ chart.mark }}" x2="{{ chart.mark }}" y1="14" y2="212"/>
{%- endif %}
{%- for line in chart.lines %}
{%- set colour = loop.index0 % 8 %}
{%- for points in line.stretches %}
<polyline class="curve s{{ colour }}" points="{{ points }}"/>
{%- endfor %}
{%- for x, y in line.dots %}
<circle class="f{{ colour }}" cx="{{ x }}" cy="{{ y }}" r="4"/>
{%- endfor %}
{%- endfor %}
</svg>
<figcaption class="legend">
{%- for line in chart.lines %}
<span><i class="f{{ loop.index0 % 8 }}"></i>{{ line.name }} <b>{{ line.last }}</b></span>
{%- endfor %}
{%- if chart.mark is not none %}<span>dashed: the round kept</span>{% endif %}
</figcaption>
</figure>
{%- endmacro %}
"""
"""The macro ``draw(chart)``: a `report_charts.Chart` as inline SVG with its legend."""

TEMPLATE = (
    DRAW
    + """{%- macro cell(content, tag="td") %}
<{{ tag }}>{{ content.text }}{% if content.unit %}<span class="unit">{{ content.unit }}</span>{% endif %}</{{ tag }}>
{%- endmacro %}
{%- macro grid(table) %}
<div class="scroll" tabindex="0" role="region" aria-label="{{ table.title }}">
<table{% if table.wordy %} class="words"{% endif %}>
<thead><tr>{% for name in table.columns %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{%- for row in table.rows %}
<tr class="{{ row.mark }}"><th scope="row">{{ row.name }}{% if row.note %}<span class="unit">{{ row.note }}</span>
{%- endif %}</th>
{%- for content in row.cells %}{{ cell(content) }}{% endfor %}
</tr>
{%- endfor %}
</tbody>
</table>
</div>
{%- endmacro %}
{%- macro pairs(title, rows) %}
<div><h3>{{ title }}</h3>
<table><tbody>
{%- for name, value in rows %}
<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{%- endfor %}
</tbody></table></div>
{%- endmacro -%}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>{{ css }}</style>
</head>
<body>
<main>
<header>
<h1>{{ page.title }}</h1>
<p class="soft"><span class="badge {{ page.status_mark }}">{{ page.status }}</span> {{ page.when }}</p>
</header>

<section>
{%- if page.warnings %}
<div class="warnings note"><ul>{% for text in page.warnings %}<li>{{ text }}</li>{% endfor %}</ul></div>
{%- endif %}
{%- for text in page.lead %}
<p class="lead">{{ text }}</p>
{%- endfor %}
{%- if page.figures %}
<div class="figures">
{%- for name, value, note in page.figures %}
<div><span class="small soft">{{ name }}</span>
<b{% if not value[:1].isdigit() %} class="words"{% endif %}>{{ value }}</b>
<span class="small soft">{{ note }}</span></div>
{%- endfor %}
</div>
{%- endif %}
{%- for text in page.remarks %}
<p class="soft">{{ text }}</p>
{%- endfor %}
</section>

{%- if page.charts %}
<section>
<h2>How training went</h2>
<div class="charts">{% for chart in page.charts %}{{ draw(chart) }}{% endfor %}</div>
</section>
{%- endif %}

{%- if page.labels %}
<section>
<h2>{{ page.labels.title }}</h2>
{{ grid(page.labels) }}
<p class="small soft">{{ page.labels.caption }}</p>
</section>
{%- endif %}

{%- if page.sites %}
<section>
<h2>{{ page.sites.title }}</h2>
{{ grid(page.sites) }}
<p class="small soft">{{ page.sites.caption }}</p>
</section>
{%- endif %}

{%- if page.one_shot %}
<section>
<h2>{{ page.one_shot.title }}</h2>
{%- for text in page.one_shot.sentences %}
<p>{{ text }}</p>
{%- endfor %}
{%- for table in page.one_shot.tables %}
<h3>{{ table.title }}</h3>
{{ grid(table) }}
{%- if table.caption %}
<p class="small soft">{{ table.caption }}</p>
{%- endif %}
{%- endfor %}
<div class="pairs">{% for title, rows in page.one_shot.pairs %}{{ pairs(title, rows) }}{% endfor %}</div>
</section>
{%- endif %}

<section>
<h2>Refused replies and missing sites</h2>
{%- if page.trouble %}
{{ grid(page.trouble) }}
<p class="small soft">{{ page.trouble.caption }}</p>
{%- else %}
<p>{{ page.no_trouble }}</p>
{%- endif %}
{%- if page.rounds %}
<details><summary>{{ page.rounds.title }}</summary>
{{ grid(page.rounds) }}
</details>
{%- endif %}
</section>

{%- if page.data %}
<section>
<h2>{{ page.data.title }}</h2>
{{ grid(page.data) }}
{%- if page.positives %}
<details open><summary>{{ page.positives.title }}</summary>
{{ grid(page.positives) }}
</details>
{%- endif %}
<p class="small soft">{{ page.data.caption }}</p>
</section>
{%- endif %}

<section>
<h2>How it was made</h2>
<div class="pairs">{% for title, rows in page.made %}{{ pairs(title, rows) }}{% endfor %}</div>
{%- if page.settings %}
<details open><summary>Settings</summary>
<div class="pairs">{% for title, rows in page.settings %}{{ pairs(title, rows) }}{% endfor %}</div>
</details>
{%- endif %}
{%- if page.all_figures %}
<details><summary>All figures of the result</summary>
<div class="pairs">{{ pairs("", page.all_figures) }}</div>
</details>
{%- endif %}
</section>

<section>
<h2>Words used here</h2>
<dl class="small">
{%- for word, meaning in page.glossary %}
<dt>{{ word }}</dt><dd>{{ meaning }}</dd>
{%- endfor %}
</dl>
</section>
</main>
</body>
</html>
"""
)
