"""The report: what it says, that nothing it prints is markup, and how it looks in a browser."""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from federation.metrics import ScoreHistogram
from federation.summaries import per_class_table, summarise
from server_app.report import write_report
from server_app.report_charts import line_chart, nice_ticks
from server_app.report_words import data_size, duration, plain, round_ranges

LABELS = [
    "Atelectasis",
    "Cardiomegaly",
    "COVID-19",
    "Effusion",
    "Infiltration",
    "Mass",
    "Nodule",
    "Pneumonia",
    "Pneumothorax",
    "Consolidation",
    "Edema",
    "Emphysema",
    "Fibrosis",
    "Pleural thickening",
    "Hernia",
]
SITES = ["mhh", "nih_a AP", "nih_a PA", "nih_b64 AP", "nih_b64 PA"]
ROUNDS = 20
EXCLUDED = {"COVID-19"}


def evaluated(generator, strength, examples):
    """Summary and table of made-up scores that separate better with `strength`; Hernia never has a positive."""
    prevalence = np.array([*np.linspace(0.02, 0.3, len(LABELS) - 1), 0.0])
    targets = (generator.random((examples, len(LABELS))) < prevalence).astype(int)
    separation = strength * np.linspace(0.7, 2.0, len(LABELS))[generator.permutation(len(LABELS))]
    histogram = ScoreHistogram(len(LABELS), 256)
    histogram.update(1 / (1 + np.exp(-generator.normal(targets * separation - 2.0, 1.0))), targets)
    thresholds = histogram.best_thresholds()
    summary = summarise(histogram, LABELS, thresholds=thresholds, excluded=EXCLUDED, bootstrap_draws=20)
    return summary | {"loss": 0.5 / (1 + strength), "num_examples": examples}, per_class_table(
        histogram, LABELS, thresholds=thresholds, excluded=EXCLUDED
    )


def full_run(sites=SITES):
    """`run.json` and the records of `metrics.jsonl` of a finished run as the run folder writes them."""
    generator = np.random.default_rng(0)
    summary, table = evaluated(generator, 1.0, 3000)
    run = {
        "method": "fedavg",
        "status": "completed",
        "experiment": "chest X-rays by site",
        "started": "2025-11-29 14:02:11",
        "finished": "2025-11-29 14:14:59",
        "seconds": 768.2,
        "task": "multilabel",
        "num_parameters": 11_184_207,
        "model_sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "labels": LABELS,
        "selected_round": 16,
        "selection_metric": "macro_auroc",
        "selection_value": 0.8123,
        "headline_excluded": [{"label": "COVID-19", "reason": "known at one site only"}],
        "versions": {"consilium": "0.1.0", "flwr": "1.42.0", "torch": "2.9.0", "python": "3.11.7"},
        "settings": {
            "training": {"learning_rate": 0.001, "batch_size": 32, "device": "auto", "weight_decay": 1e-05},
            "federation": {"rounds": ROUNDS, "min_sites": 3, "weighting": "num_examples", "timeout_s": 600},
            "data": {"root": "d1_cxr_multilabel.zip", "partition": "by_site"},
        },
        "sites": [
            {
                "site": site,
                "num_train": 1500 - 200 * (index % 5),
                "num_val": 180,
                "num_test": 600,
                "positives": [None if index == label == 1 else 20 + 9 * label for label in range(len(LABELS) - 1)]
                + [0],
                "modalities": ["image"],
                "checksum": "ab12" * 16,
            }
            for index, site in enumerate(sites)
        ],
        "outstanding": [],
        "final": {
            "test": {
                "summary": summary,
                "per_class": table,
                "per_site": [
                    {
                        "site": site,
                        "num_examples": 600,
                        "summary": evaluated(generator, 0.8 + 0.1 * (index % 5), 600)[0],
                    }
                    for index, site in enumerate(sites)
                ],
            }
        },
        "warnings": ["Hernia has no positive example at any site: its values are not defined."],
    }
    records = []
    for server_round in range(1, ROUNDS + 1):
        refused = (
            [{"site": sites[0], "reason": "a tensor of the reply is not finite"}]
            if server_round in (3, 4, 5, 9)
            else []
        )
        missing = [{"site": sites[-1], "reason": "no reply within 600 s"}] if server_round == 7 else []
        records.append(
            {
                "kind": "round",
                "round": server_round,
                "seconds": 36.5,
                "bytes_down": 223_684_140,
                "bytes_up": 223_684_140 - 44_736_828 * len(refused + missing),
                "accepted": sites[len(refused) : len(sites) - len(missing)],
                "refused": refused,
                "missing": missing,
                "train_loss": {
                    site: 0.3 / np.sqrt(server_round) + 0.02 * (index % 5)
                    for index, site in enumerate(sites[len(refused) : len(sites) - len(missing)])
                },
            }
        )
        for scope in ("pooled", *sites):
            strength = 1.1 - 0.9 / server_round
            values, rows = evaluated(generator, strength, 400)
            records.append(
                {"kind": "evaluation", "round": server_round, "split": "val", "scope": scope, "summary": values}
                | ({"per_class": rows} if scope == "pooled" else {})
            )
    return run, records


@pytest.fixture(scope="module")
def finished():
    return full_run()


def written(folder, run, records):
    """The text of the report of a run folder with these two files; None leaves a file out."""
    folder.mkdir(exist_ok=True)
    if run is not None:
        (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    if records is not None:
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
        )
    path = write_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


class Page(HTMLParser):
    """Tags, attributes and visible text of a page; fails on a tag left open."""

    VOID = frozenset(("meta", "line", "circle", "polyline", "br"))

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def test_headline_says_what_where_how_well_and_where_worst(tmp_path, finished):
    run, records = finished
    text = Page(written(tmp_path / "run", run, records)).text
    summary = run["final"]["test"]["summary"]
    assert (
        "fedavg trained one model for 15 labels at 5 sites (mhh, nih_a AP, nih_a PA, nih_b64 AP and nih_b64 PA)" in text
    )
    assert "in 20 rounds and 12 min 48 s." in text
    assert (
        f"held-out test data of all sites (3,000 examples) its mean AUROC over labels is {summary['macro_auroc']:.3f}"
        in text
    )
    assert f"95 % interval {summary['macro_auroc_low']:.3f} to {summary['macro_auroc_high']:.3f}" in text
    weakest = min(run["final"]["test"]["per_site"], key=lambda site: site["summary"]["macro_auroc"])
    assert f"It does worst at {weakest['site']} ({weakest['summary']['macro_auroc']:.3f})" in text
    assert f"on {summary['worst_auroc_label']} (AUROC {summary['worst_auroc']:.3f}" in text
    assert "The model kept is that of round 16, the best on validation data by mean AUROC over labels (0.812)" in text
    assert "Not in the averages: COVID-19 (known at one site only)." in text
    assert "Without an AUROC, and so in no average: Hernia." in text


def test_tables_hold_support_intervals_reasons_and_settings(tmp_path, finished):
    run, records = finished
    text = Page(written(tmp_path / "run", run, records)).text
    row = run["final"]["test"]["per_class"][0]
    assert f"Atelectasis {row['positives']:,} {row['negatives']:,} {row['auroc']:.3f}" in text
    assert f"{row['sensitivity_low']:.3f} to {row['sensitivity_high']:.3f}" in text
    assert "Site Examples AUROC, mean over labels AUROC, weakest label" in text
    assert "F1, mean over labels Loss mhh" in text
    assert "mhh refused 3-5, 9 a tensor of the reply is not finite" in text
    assert "nih_b64 PA missing 7 no reply within 600 s" in text
    assert "8.72 GB" in text, "20 rounds of twice 223.7 MB, less five replies of 44.7 MB"
    for value in ("learning_rate 0.001", "weight_decay 1e-05", "flwr 1.42.0", run["model_sha256"], "11,184,207"):
        assert value in text


def test_undefined_is_said_in_words_and_suppressed_too(tmp_path, finished):
    run, records = finished
    text = Page(written(tmp_path / "run", run, records)).text
    hernia = text[text.index("Hernia 0 3,000") :]
    assert hernia.startswith("Hernia 0 3,000 not defined not defined not defined not defined")
    assert re.search(r"Cardiomegaly 29 suppressed 29 29 29", text)
    assert "None" not in text and "nan" not in text.lower().split()


def test_nothing_from_outside_becomes_markup(tmp_path, finished):
    evil = "<script>alert(1)</script>\"'&{{ 7 * 7 }}"
    run, records = full_run([evil, "b", "c"])
    run |= {"experiment": evil, "method": evil, "status": evil, "warnings": [evil], "versions": {evil: evil}}
    run |= {"labels": [evil, *LABELS[1:]], "settings": {evil: {evil: evil}}, "outstanding": [evil]}
    run["headline_excluded"] = [{"label": evil, "reason": evil}]
    run["final"]["test"]["per_class"][0]["label"] = evil
    records[0]["refused"] = [{"site": evil, "reason": evil}]
    page = Page(written(tmp_path / "run", run, records))
    plain_page = Page(written(tmp_path / "plain", *finished))
    assert "script" not in page.tags
    assert set(page.tags) == set(plain_page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert evil in page.text


def test_page_needs_nothing_beside_it(tmp_path, finished):
    page = written(tmp_path / "run", *finished)
    assert not re.search(r"""\b(src|srcset|href|data)=|url\(""", page)
    assert "@import" not in page and "http:" not in page and "https:" not in page
    assert "default-src 'none'" in page
    assert len(page) < 400_000


def test_same_files_give_the_same_page(tmp_path, finished):
    assert written(tmp_path / "a", *finished) == written(tmp_path / "b", *finished)


def test_running_and_failed_runs_have_a_page(tmp_path, finished):
    run, records = finished
    early = {key: value for key, value in run.items() if key not in ("final", "finished", "selected_round")}
    text = Page(written(tmp_path / "running", early | {"status": "running"}, records[:13])).text
    assert "The run is not complete: running." in text
    assert "On the validation (round 2, not the final test) data" in text
    failed = early | {"status": "failed", "error": "round 1: 1 usable reply, 3 needed", "outstanding": ["mhh"]}
    text = Page(written(tmp_path / "failed", failed, [])).text
    assert "The run failed: round 1: 1 usable reply, 3 needed" in text
    assert "There is no result yet." in text
    assert "mhh outstanding at the end no reply in time" in text


def test_missing_and_damaged_files_are_named_on_the_page(tmp_path, finished):
    assert "run.json is missing" in written(tmp_path / "empty", None, None)
    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "run.json").write_text('{"method": "fed', encoding="utf-8")
    (folder / "metrics.jsonl").write_text('{"kind": "round", "round": 1}\n[1]\n{"kind": "eva', encoding="utf-8")
    text = Page(written(folder, None, None)).text
    assert "run.json cannot be read" in text
    assert "2 damaged lines of metrics.jsonl were left out." in text
    assert "The round" in text
    assert "run.json holds no object but a list" in written(tmp_path / "list", [], None)


def test_result_without_any_defined_figure_says_so(tmp_path, finished):
    run = finished[0] | {
        "final": {"test": {"summary": summarise(ScoreHistogram(15), LABELS), "per_class": [], "per_site": []}}
    }
    text = Page(written(tmp_path / "run", run, None)).text
    assert "No figure of the result is defined." in text


def test_unknown_summary_keys_are_printed_and_multiclass_leads_with_its_accuracy(tmp_path):
    summary = {"balanced_accuracy": 0.91, "accuracy": 0.93, "dice": 0.5, "worst_recall": 0.7, "worst_recall_label": "8"}
    sites = [{"site": name, "num_examples": 10, "summary": summary} for name in "ab"]
    run = {"method": "local", "status": "completed", "final": {"test": {"summary": summary, "per_site": sites}}}
    text = Page(written(tmp_path / "run", run, [])).text
    assert "its balanced accuracy is 0.910" in text
    assert "Balanced accuracy Recall, weakest label dice a 10 0.930 0.910 0.700 8 0.500 b 10 0.930" in text
    assert "It does worst" not in text, "two equal sites: none is the weakest"


def test_equal_site_mean_stands_beside_the_pooled_headline(tmp_path, finished):
    run, records = finished
    own = [site["summary"]["macro_auroc"] for site in run["final"]["test"]["per_site"]]
    text = Page(written(tmp_path / "run", run, records)).text
    sentence = "Equal-site mean, the mean over 5 sites of each site's own mean AUROC over labels: "
    assert f"{sentence}{sum(own) / 5:.3f}." in text
    sites = [dict(site) for site in run["final"]["test"]["per_site"]]
    sites[0]["summary"] = sites[0]["summary"] | {"macro_auroc": None}
    final = {"test": run["final"]["test"] | {"per_site": sites}}
    text = Page(written(tmp_path / "undefined", run | {"final": final}, records)).text
    four = sentence.replace("5 sites", "4 sites")
    assert f"{four}{sum(own[1:]) / 4:.3f} (1 site without a value left out)." in text


def collapsed(within, between, cosine, labels):
    return dict(
        zip(
            ("collapse_within", "collapse_between", "collapse_cosine", "collapse_labels"),
            (within, between, cosine, labels),
            strict=True,
        )
    )


def test_neural_collapse_is_drawn_by_site_where_a_run_measures_it(tmp_path, finished):
    """The third site has no label with two examples: its zeros are no cosine of 0, and enter no mean."""
    run, records = json.loads(json.dumps(finished))
    numbers = {
        "mhh": collapsed(2.0, 4.0, 0.6, 5),
        "nih_a AP": collapsed(1.0, 4.0, 0.8, 5),
        "nih_a PA": collapsed(0.0, 0.0, 0.0, 0),
    }
    run["final"]["test"]["summary"] |= collapsed(1.2, 3.3, 0.5, 4.0)
    run["final"]["test"]["per_site"] = run["final"]["test"]["per_site"][:3]
    for site in run["final"]["test"]["per_site"]:
        site["summary"] |= numbers[site["site"]]
    for record in records:
        if record["kind"] == "evaluation" and record["scope"] in numbers:
            record["summary"] |= numbers[record["scope"]]
    page = written(tmp_path / "run", run, records)
    text = Page(page).text
    assert page.count("<svg viewBox") == 6 and written(tmp_path / "none", *finished).count("<svg viewBox") == 4
    assert "Validation by site: Cosine to the label's direction" in text
    cosines = text[text.index("Validation by site: Cosine") :]
    assert re.match(r"(.*?) mhh 0\.600 nih_a AP 0\.800 dashed", cosines)
    ratios = text[text.index("Validation by site: Scatter within labels over between") :]
    assert re.match(r"(.*?) mhh 0\.500 nih_a AP 0\.250 dashed", ratios)
    table = text[text.index("By site, held-out test data") :]
    assert re.search(r"mhh .*?0\.600 0\.500.*? nih_a AP .*?0\.800 0\.250.*? nih_a PA .*?not defined not defined", table)
    assert "Cosine to the label's direction 0.700 Scatter within labels over between 0.375" in text, "equal-site means"
    assert "collapse" not in text.replace("Neural collapse", "")


def test_collapse_of_no_site_is_not_defined(tmp_path, finished):
    run = json.loads(json.dumps(finished[0]))
    run["final"]["test"]["summary"] |= collapsed(0.0, 0.0, 0.0, 0.0)
    for site in run["final"]["test"]["per_site"]:
        site["summary"] |= collapsed(0.0, 0.0, 0.0, 0)
    text = Page(written(tmp_path / "run", run, [])).text
    assert "Cosine to the label's direction not defined Scatter within labels over between not defined" in text


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ((3.25, 4, 2), "3.250 times as often where one that goes with them is there, a mean over 4 pairs of labels (2 "
         "pairs without a value left out). Above 2: that labels go together acts as a cause."),
        ((1.5, 1, 0), "1.500 times as often where one that goes with them is there, a mean over 1 pair of labels."),
        ((None, 0, 2), "not defined, 2 pairs without a value left out."),
    ],
)  # fmt: skip
def test_lift_of_false_positives_stands_with_the_pairs_it_is_a_mean_of(tmp_path, finished, figures, said):
    run = json.loads(json.dumps(finished[0]))
    names = ("cooc_fp_lift", "cooc_fp_lift_pairs", "cooc_fp_lift_left_out")
    run["final"]["test"]["summary"] |= dict(zip(names, figures, strict=True))
    text = Page(written(tmp_path / "run", run, [])).text
    assert said in text and ("acts as a cause" in said) == ("acts as a cause" in text)
    assert "cooc" not in text
    assert "goes with them" not in Page(written(tmp_path / "none", *finished)).text


def test_many_sites_are_drawn_as_weakest_median_and_best(tmp_path):
    page = written(tmp_path / "run", *full_run([f"site-{i:02d}" for i in range(12)]))
    assert "median of 12 sites" in page
    assert "and 6 more" in page


def test_chart_has_gaps_where_a_value_is_undefined_and_dots_for_single_values():
    chart = line_chart("t", "round", [("a", [(1, 0.5), (2, 0.6), (3, None), (4, 0.7)]), ("b", [(1, None)])], mark_x=4)
    assert [line.name for line in chart.lines] == ["a"]
    assert len(chart.lines[0].stretches) == 1 and len(chart.lines[0].dots) == 1
    assert chart.lines[0].last == "0.700"
    assert chart.mark == chart.lines[0].dots[0][0]
    assert line_chart("t", "round", [("a", [(1, None)])]) is None
    single = line_chart("t", "round", [("a", [(1, 0.0)])])
    assert single.lines[0].dots


@pytest.mark.parametrize(
    ("low", "high"), [(0.61, 0.83), (1, 20), (0, 8723.7), (-3, 4), (0.5, 0.5), (0, 0), (1e-4, 3e-4)]
)
def test_ticks_enclose_the_data_in_even_steps(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low + 1e-9 and ticks[-1] >= high - 1e-9
    assert 3 <= len(ticks) <= 8
    np.testing.assert_allclose(np.diff(ticks), ticks[1] - ticks[0])


def test_values_in_words():
    assert [plain(value) for value in (None, float("nan"), True, 12345, 0.81234, 0.0, 1e-05, [], ["a", 2])] == [
        "not defined", "not defined", "yes", "12,345", "0.812", "0.000", "1e-05", "none", "a, 2",
    ]  # fmt: skip
    assert [duration(value) for value in (3.21, 768.2, 7322, None)] == [
        "3.2 s",
        "12 min 48 s",
        "2 h 2 min",
        "not defined",
    ]
    assert [data_size(value) for value in (8.7237e9, 1_500_000, 1200, None)] == [
        "8.72 GB",
        "1.5 MB",
        "1.2 kB",
        "not defined",
    ]
    assert round_ranges([4, 3, 5, 9, 9, 1]) == "1, 3-5, 9"


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MEASURE = """<script>
const wide = [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll")
  && e.getBoundingClientRect().right > innerWidth + 1);
document.title = JSON.stringify({width: innerWidth, page: document.documentElement.scrollWidth,
  wide: wide.map(e => e.tagName + " " + e.textContent.slice(0, 40)), charts: document.querySelectorAll("svg").length,
  smallest: Math.min(...[...document.querySelectorAll("main *")].map(e => parseFloat(getComputedStyle(e).fontSize)))});
</script>"""


def browse(page, profile, *options):
    """Runs headless Chromium on a local page, with a profile of its own and no network service; its standard output."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"]
    command += [f"--user-data-dir={profile}", *options, page.as_uri()]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, errors
    return output


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: the page's layout is not checked")
@pytest.mark.parametrize("width", [1280, 390])
def test_page_fits_its_window_in_chromium(tmp_path, finished, width):
    """Chromium windows have a least width of some 500, so the phone is a frame of 390 in a wider window."""
    run, records = finished
    long_name = "a-hospital-with-a-very-long-name-" * 3
    run = run | {"warnings": [long_name], "settings": run["settings"] | {"method": {long_name: long_name}}}
    page = written(tmp_path / "run", run, records)
    policy = re.search(r"<meta http-equiv=[^>]*>", page).group()
    framed = page.replace(policy, "").replace("</body>", MEASURE + "</body>")
    (tmp_path / "framed.html").write_text(framed, encoding="utf-8")
    holder = tmp_path / "holder.html"
    holder.write_text(
        f'<body style="margin:0"><iframe src="framed.html" style="border:0;width:{width}px;height:6000px"></iframe>'
        "<script>onload = () => document.title = document.querySelector('iframe').contentDocument.title</script>",
        encoding="utf-8",
    )
    dom = browse(
        holder,
        tmp_path / "profile",
        f"--window-size={max(width, 600)},900",
        "--allow-file-access-from-files",
        "--dump-dom",
    )
    measured = json.loads(
        re.search(r"<title>(.*?)</title>", dom, re.S).group(1).replace("&gt;", ">").replace("&amp;", "&")
    )
    assert measured["width"] == width
    assert measured["page"] <= width
    assert measured["wide"] == []
    assert measured["charts"] == 4
    assert measured["smallest"] >= 12


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: the page is not drawn")
def test_chromium_draws_the_page_as_it_is(tmp_path, finished):
    page = tmp_path / "run" / "report.html"
    written(page.parent, *finished)
    picture = tmp_path / "page.png"
    browse(page, tmp_path / "profile", "--window-size=1280,1400", f"--screenshot={picture}")
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1280, 1400)
    # a page whose styles or charts were blocked would compress to a few thousand bytes of plain text or white
    assert len(data) > 60_000
