"""The page of overlays, as a Jinja template: a Python file, because only Python files travel in the app bundle.

It holds no script and loads nothing: its policy line forbids the browser to. Everything it prints is escaped.
"""

CSS = """
.keep { border: 2px solid var(--bad); border-radius: 10px; padding: 12px 16px; margin: 12px 0 0; }
.cases { display: grid; gap: 18px; }
.case { border-top: 1px solid var(--line); padding-top: 12px; }
.row { display: flex; flex-wrap: wrap; gap: 12px; margin: 8px 0 0; }
.row figure { width: 224px; }
.row img { display: block; width: 100%; height: auto; border-radius: 6px; background: #000; }
.row figcaption { color: var(--soft); font-size: .85rem; }
@media (max-width: 600px) { .row figure { width: calc(50% - 6px); } }
"""

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>{{ css }}</style>
</head>
<body>
<main>
<header>
<h1>{{ page.title }}</h1>
<p class="keep bad"><b>This page holds patient images. It must not leave the site.</b>
Do not send it, do not put it into a shared folder, and delete it when you have looked.</p>
</header>

<section>
<p>{{ page.model }}</p>
<p>For each label the {{ page.images }} test images that show it and that the model scores highest. These are the
model's best cases: they tell where it looks when it is right, not how often it is. The overlay is brightest where the
map of that image is largest and clear where it is zero; maps of two images have no common scale.</p>
{%- for name, meaning in page.maps %}
<p class="small soft"><b>{{ name }}</b>: {{ meaning }}</p>
{%- endfor %}
</section>

{%- for label in page.labels %}
<section>
<h2>{{ label.name }}</h2>
{%- if not label.cases %}
<p class="soft">No test image is known to show it.</p>
{%- endif %}
<div class="cases">
{%- for case in label.cases %}
<div class="case">
<span class="badge {{ "good" if case.found else "bad" }}">{{ "found" if case.found else "missed" }}</span>
score <b>{{ case.score }}</b>, threshold {{ label.threshold }}
<span class="soft">&middot; row {{ case.line }} &middot; true labels: {{ case.truth }}
{%- if case.unknown %}; unknown: {{ case.unknown }}{% endif %}</span>
<div class="row">
{%- for title, uri in case.pictures %}
<figure><img src="{{ uri }}" alt="{{ label.name }}: {{ title }}"><figcaption>{{ title }}</figcaption></figure>
{%- endfor %}
</div>
</div>
{%- endfor %}
</div>
</section>
{%- endfor %}
</main>
</body>
</html>
"""
