"""The page a reader labels from: one HTML file that works offline and loads nothing, images included.

Its policy line lets the browser run this one script and nothing else. The script keeps the answers in the browser
until the reader clears them, so that closing the page loses nothing, and writes them as a CSV file to import.

Choice: what the model says is folded away, so that the reader can look at the image first.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import jinja2
from markupsafe import Markup


class Case(NamedTuple):
    """One sample on the page; ``picture`` is a data URI, or "" with ``trouble`` saying why there is none."""

    id: str
    picture: str
    trouble: str
    reason: str
    pseudo_label: str
    uncertainty: str
    cycle: int


def render(cases: Sequence[Case], *, labels: Sequence[str], columns: Sequence[str], single: bool) -> str:
    """The page as text; every id, label and reason is escaped. ``columns`` are the label columns of the answers.

    ``single``: a sample has one of the labels. Otherwise each label is present, absent or left open.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    named = json.dumps([[case.id for case in cases], list(labels), list(columns)])
    return environment.from_string(TEMPLATE).render(
        cases=cases,
        labels=labels,
        columns=json.dumps(list(columns)),
        single=single,
        key=hashlib.sha256(named.encode()).hexdigest(),
        css=Markup(CSS),  # ours, no foreign text in it, like the script
        script=Markup(SCRIPT),
        script_sha256=Markup(base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()),
    )


CSS = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1a2230; --soft: #5b6675; --line: #c9d0da;
  --accent: #1f5fa8; --accent-text: #fff; --done: #17692f; }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161c; --card: #1b2129; --text: #e6eaf0; --soft: #9aa6b5; --line: #3d4855;
    --accent: #74b1f2; --accent-text: #10151b; --done: #84d69a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, "Segoe UI", Roboto,
  sans-serif; }
main, .bar { max-width: 900px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.4rem; line-height: 1.25; margin: 0 0 6px; }
h2 { font-size: .9rem; font-weight: 600; margin: 0 0 8px; overflow-wrap: anywhere; }
p { margin: 0 0 10px; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.case { display: flex; flex-wrap: wrap; gap: 16px; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 16px; margin-top: 16px; scroll-margin-bottom: 120px; }
.case.answered { border-color: var(--done); }
.case.answered h2::before { content: "\\2713  "; color: var(--done); }
.picture { flex: 1 1 260px; max-width: 100%; }
.picture img { display: block; width: 100%; max-width: 384px; height: auto; border-radius: 6px; background: #000; }
.picture img.wide { max-width: 100%; }
.choices { flex: 1 1 280px; min-width: 0; }
fieldset { border: 0; margin: 0 0 4px; padding: 0; min-width: 0; }
legend { padding: 0; overflow-wrap: anywhere; }
.row { display: flex; flex-wrap: wrap; align-items: center; justify-content: space-between; gap: 2px 12px;
  border-top: 1px solid var(--line); padding: 4px 0; }
.row legend { float: left; flex: 1 1 120px; }
.chips { display: flex; flex-wrap: wrap; gap: 6px; }
.chips label { position: relative; cursor: pointer; max-width: 100%; }
.chips input { position: absolute; opacity: 0; width: 1px; height: 1px; }
.chips span { display: flex; align-items: center; min-height: 40px; padding: 4px 14px; border: 1px solid var(--line);
  border-radius: 20px; overflow-wrap: anywhere; }
.chips :checked + span { background: var(--accent); border-color: var(--accent); color: var(--accent-text); }
.chips :checked + span.open { background: none; border-color: var(--soft); color: var(--soft); }
.chips :focus-visible + span { outline: 2px solid var(--text); outline-offset: 2px; }
button, input[type=text] { font: inherit; min-height: 42px; border-radius: 8px; border: 1px solid var(--line);
  padding: 4px 12px; background: var(--card); color: var(--text); max-width: 100%; }
button { cursor: pointer; }
button.main { background: var(--accent); border-color: var(--accent); color: var(--accent-text); font-weight: 600; }
details { margin-top: 10px; }
summary { cursor: pointer; min-height: 28px; }
.foot { position: sticky; bottom: 0; background: var(--card); border-top: 1px solid var(--line); }
.bar { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 12px; padding: 10px 16px; }
.bar input { flex: 1 1 140px; min-width: 0; }
.bar span { flex: 1 1 120px; }
@media (max-width: 600px) { main { padding: 12px; } .case { padding: 12px; } .bar { padding: 8px 12px; } }
"""

SCRIPT = """
"use strict";
const main = document.querySelector("main");
const columns = JSON.parse(main.dataset.columns);
const single = main.dataset.single === "1";
const kept = "annotation-" + main.dataset.key;
const cases = [...document.querySelectorAll(".case")];
const reader = document.querySelector("#reader");
const note = document.querySelector("#note");
let answers = cases.map(() => null);

function keep() {
  try { localStorage.setItem(kept, JSON.stringify({reader: reader.value, answers})); } catch (error) { /* private */ }
}
function show() {
  cases.forEach((section, i) => section.classList.toggle("answered", answers[i] !== null));
  note.textContent = answers.filter(answer => answer !== null).length + " of " + cases.length + " answered";
}
function marksOf(section) {
  if (single) {
    const chosen = section.querySelector("input:checked");
    return [chosen ? chosen.value : ""];
  }
  return [...section.querySelectorAll("fieldset")].map(field => field.querySelector("input:checked").value);
}
function changed(i) {
  const marks = marksOf(cases[i]);
  answers[i] = marks.some(mark => mark !== "") ? {time: new Date().toISOString(), marks} : null;
  keep();
  show();
}
function restore(i) {
  const fields = [...cases[i].querySelectorAll("fieldset")];
  fields.forEach((field, j) => field.querySelectorAll("input").forEach(input => {
    input.checked = input.value === (answers[i] ? answers[i].marks[j] : "");
  }));
}
function quoted(cell) { return '"' + String(cell).replace(/"/g, '""') + '"'; }
function table() {
  const rows = [["id", "reader", "time", ...columns]];
  cases.forEach((section, i) => {
    if (answers[i]) rows.push([section.dataset.id, reader.value.trim(), answers[i].time, ...answers[i].marks]);
  });
  return "\\ufeff" + rows.map(row => row.map(quoted).join(",")).join("\\r\\n") + "\\r\\n";
}
function download() {
  if (!reader.value.trim()) { note.textContent = "Your name first, please."; reader.focus(); return; }
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([table()], {type: "text/csv"}));
  link.download = "answers-" + new Date().toISOString().slice(0, 19).replace(/:/g, "") + ".csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
function clear() {
  if (!confirm("Forget all answers on this page?")) return;
  answers = cases.map(() => null);
  try { localStorage.removeItem(kept); } catch (error) { /* private */ }
  cases.forEach((_, i) => restore(i));
  show();
}
try {
  const found = JSON.parse(localStorage.getItem(kept));
  if (found && found.answers.length === cases.length) { answers = found.answers; reader.value = found.reader; }
} catch (error) { /* private, or not ours */ }
cases.forEach((section, i) => {
  restore(i);
  section.addEventListener("change", () => changed(i));
  const rest = section.querySelector(".rest");
  if (rest) rest.addEventListener("click", () => {
    section.querySelectorAll("fieldset").forEach(field => {
      if (field.querySelector("input:checked").value === "") field.querySelector('input[value="0"]').checked = true;
    });
    changed(i);
  });
  const picture = section.querySelector("img");
  if (picture) picture.addEventListener("click", () => picture.classList.toggle("wide"));
});
reader.addEventListener("input", keep);
document.querySelector("#download").addEventListener("click", download);
document.querySelector("#clear").addEventListener("click", clear);
show();
"""

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:; \
script-src 'sha256-{{ script_sha256 }}'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ cases|length }} images to label</title>
<style>{{ css }}</style>
</head>
<body>
<main data-columns="{{ columns }}" data-single="{{ 1 if single else 0 }}" data-key="{{ key }}">
<h1>{{ cases|length }} image{{ "" if cases|length == 1 else "s" }} to label</h1>
<p><b>This page holds patient images. It must not leave the site.</b></p>
<p class="soft">{% if single %}Choose one label for each image.{% else %}Say for each label whether the image shows
it; leave open what cannot be told.{% endif %} Answers stay in this browser until you clear them. Download them at any
time, also in parts: a later file adds to an earlier one.</p>
{% for case in cases %}
<section class="case" data-id="{{ case.id }}">
<div class="picture">
<h2>{{ case.id }}</h2>
{% if case.picture %}
<img src="{{ case.picture }}" alt="Image {{ loop.index }} of {{ cases|length }}" loading="lazy">
{% else %}
<p class="soft">The image cannot be shown: {{ case.trouble }}</p>
{% endif %}
<details><summary>What the model says</summary>
<p class="soft">Cycle {{ case.cycle }}{% if case.pseudo_label %} &middot; suggests <b>{{ case.pseudo_label }}</b>
{% endif %}
{% if case.uncertainty %} &middot; uncertainty {{ case.uncertainty }}{% endif %}<br>{{ case.reason }}</p></details>
</div>
<div class="choices">
{% set number = loop.index0 %}
{% if single %}
<fieldset><legend class="soft">Label</legend><div class="chips">
{% for label in labels %}
<label><input type="radio" name="c{{ number }}" value="{{ label }}"><span>{{ label }}</span></label>
{% endfor %}
<label><input type="radio" name="c{{ number }}" value=""><span class="open">not answered</span></label>
</div></fieldset>
{% else %}
{% for label in labels %}
{% set place = loop.index0 %}
<fieldset class="row"><legend>{{ label }}</legend><div class="chips">
{% for value, word in (("1", "yes"), ("0", "no"), ("", "open")) %}
<label><input type="radio" name="c{{ number }}-{{ place }}" value="{{ value }}">\
<span{% if not value %} class="open"{% endif %}>{{ word }}</span></label>
{% endfor %}
</div></fieldset>
{% endfor %}
<button type="button" class="rest">The rest: no</button>
{% endif %}
</div>
</section>
{% endfor %}
</main>
<div class="foot"><div class="bar">
<span id="note" role="status"></span>
<input type="text" id="reader" placeholder="Your name" aria-label="Your name" autocomplete="off" maxlength="64">
<button type="button" id="clear">Clear</button>
<button type="button" class="main" id="download">Download answers</button>
</div></div>
<script>{{ script }}</script>
</body>
</html>
"""
