"""The report of a one-shot run: whose uploads the server's job used, what it made of them, and what it never shows."""

from __future__ import annotations

import copy
import json

import pytest

from server_app.report import write_report
from tests.server_app.test_report import Page

FACTS = {
    "server": "fedmitr",
    "images": 1980,
    "dropped": 20,
    "patches_high": 46,
    "patches_low": 150,
    "is_average": False,
    "seconds": {"A": 3725.0, "B": 42.0, "C": 605.5},
    "pool": "pool-0123456789abcdef",
    "device": "cpu",
    "sites": {
        "east": {"num_examples": 570, "epsilon": 3.25, "images": 1000, "dropped": 0},
        "north": {"num_examples": 582, "epsilon": -1.0, "images": 980, "dropped": 20},
        "west": {
            "num_examples": 114,
            "epsilon": -1.0,
            "images": 0,
            "dropped": 0,
            "not_inverted": "fewer than two classes of 10",
        },
    },
    "late": ["harbour"],
    "warnings": ["no site holds 10 samples of nine: never asked for in synthetic images"],
    "model_sha256": "ab" * 32,
}
RUN = {
    "method": "fedmitr",
    "status": "completed",
    "labels": ["eight", "nine"],
    "sites": [{"site": site, "num_train": 100} for site in ("east", "north", "west", "south", "lake")],
    "settings": {
        "fedmitr": {
            "server": "fedmitr",
            "model": "deit_tiny_patch16_224",
            "init_weights": "weights/secret_place.safetensors",
            "state_dir": "jobs/secret_place",
            "stops": "50,100,200,300",
            "inv_iters": 4000,
            "kd_epochs": 200,
            "ensemble_weight": "class_count",
            "keep_synthetic": False,
        }
    },
}
ROUND = {
    "kind": "round",
    "round": 1,
    "accepted": ["east", "north", "west"],
    "refused": [{"site": "south", "reason": "E-WITHHELD: a check of the site's own keeps its update back"}],
    "missing": [{"site": "lake", "reason": "no reply within 600 s"}],
}


@pytest.fixture
def page(tmp_path):
    """``page(facts=, run=, average=)``: HTML of the report of a run folder; None leaves a file out."""

    def write(facts=FACTS, run=RUN, average=None):
        (tmp_path / "run.json").write_text(json.dumps(run))
        (tmp_path / "metrics.jsonl").write_text(json.dumps(ROUND) + "\n")
        for name, content in (("fedmitr.json", facts), ("plain_average.json", average)):
            if content is not None:
                (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return write_report(tmp_path).read_text(encoding="utf-8")

    return write


def section(html):
    """Text of the section about the job; "" where there is none."""
    _, there, rest = html.partition("<h2>The server&#39;s job</h2>")
    return Page(f"<p>{rest.partition('</section>')[0]}</p>").text if there else ""


def changed(**facts):
    return {**copy.deepcopy(FACTS), **facts}


def test_every_site_stands_with_what_became_of_its_upload_and_why(page):
    text = section(page())
    assert "east used 570 1,000 3.250 inverted" in text
    assert "north used 582 980 none inverted; 20 images left out, their loss was no number" in text
    assert "west used 114 0 none not inverted: fewer than two classes of 10; kept in the ensemble" in text
    assert "south refused - - - E-WITHHELD: a check of the site's own keeps its update back" in text
    assert "lake missing - - - no reply within 600 s" in text
    assert "harbour late - - - it came after the job had begun: kept, not used" in text


def test_it_says_what_was_made_how_long_it_took_and_on_what(page):
    text = section(page())
    assert "of 3 uploads by fedmitr itself." in text
    assert "1,980 synthetic images" in text and "46 patches count as rich" in text and "150 as poor" in text
    assert "no site holds 10 samples of nine: never asked for in synthetic images" in text
    assert "Synthetic images 1 h 2 min" in text and "All models' answers on them 42.0 s" in text
    assert "Training the global model 10 min 6 s" in text and "Device cpu" in text
    assert "deleted" in text


def test_the_settings_that_were_in_force_are_shown_and_others_are_not(page):
    text = section(page())
    assert "stops 50,100,200,300" in text and "ensemble_weight class_count" in text and "inv_iters 4,000" in text
    assert "secret_place" not in text and "pool-" not in text and "<img" not in page()


@pytest.mark.parametrize(
    ("server", "words", "gone"),
    [
        ("average", "the plain average of the uploads", ("inv_iters", "kd_epochs", "synthetic images")),
        ("dense_inversion", "DeepInversion", ("stops",)),
        ("dense", "DENSE", ("inv_iters", "stops")),
        ("kd", "plain distillation", ()),
        ("later_method", "later_method", ()),
    ],
)
def test_a_baseline_is_named_and_shows_only_what_it_reads(page, server, words, gone):
    sites = {"east": {"num_examples": 5, "epsilon": -1.0}}
    facts = changed(server=server, sites=sites, late=[], is_average=server == "average")
    if server in ("average", "dense"):
        for name in ("images", "dropped", "patches_high", "patches_low", "pool"):
            del facts[name]
    facts["warnings"] = []
    text = section(page(facts, {**RUN, "settings": {"fedmitr": {**RUN["settings"]["fedmitr"], "server": server}}}))
    assert words in text
    assert not any(word in text for word in gone), text
    assert "Epsilon" not in text  # nobody has one


def test_uploads_that_are_kept_are_said_to_be_kept(page):
    run = {**RUN, "settings": {"fedmitr": {**RUN["settings"]["fedmitr"], "keep_synthetic": True}}}
    assert "kept on the server" in section(page(run=run))


# -- beside the plain average -----------------------------------------------------------------------------------------


def beside(**pooled):
    figures = {"pooled": pooled, "east": {"accuracy": [0.75, 0.5]}, "north": {"accuracy": [0.7, 0.7]}}
    return {"split": "test", "figures": figures}


def test_the_plain_average_stands_beside_the_final_model(page):
    text = section(page(average=beside(accuracy=[0.81, 0.79], macro_auroc=[0.9, 0.95])))
    assert "Beside the plain average of the uploads" in text
    assert "All sites: Accuracy 0.810 0.790 +0.020" in text
    assert "All sites: AUROC, mean over labels 0.900 0.950 -0.050" in text
    assert "east: Accuracy 0.750 0.500 +0.250" in text and "north: Accuracy 0.700 0.700 0.000" in text
    assert "The plain average of the uploads does better on the test data by AUROC, mean over labels" in text


def test_a_final_model_that_loses_nowhere_is_not_said_to_lose(page):
    assert "does better" not in section(page(average=beside(accuracy=[0.81, 0.81])))


def test_an_average_that_was_not_scored_is_said_with_the_reason(page):
    text = section(page(average={"not_scored": "fedmitr.score_average is false"}))
    assert "The plain average of the uploads was not scored beside it: fedmitr.score_average is false." in text
    assert "Beside the plain average" not in text


def test_without_a_sum_over_the_same_sites_only_single_sites_are_compared(page):
    average = beside()
    del average["figures"]["pooled"]
    text = section(page(average=average))
    assert "east: Accuracy 0.750" in text and "All sites" not in text


def test_a_run_without_such_a_job_or_with_a_damaged_page_has_no_section(page):
    assert section(page(facts=None)) == ""
    assert section(page(facts='{"server": ')) == ""
    assert section(page(facts="[1, 2]")) == ""
    assert section(page(facts={"curve": []})) == ""


def test_the_page_of_an_older_run_is_shown_as_far_as_it_goes(page):
    facts = {"server": "fedmitr", "sites": {"east": {"num_examples": 5}}, "seconds": {"A": 2.0}}
    text = section(page(facts))
    assert "east used 5" in text and "Synthetic images 2.0 s" in text
    assert "south refused" in text  # from the round


def test_names_of_sites_and_reasons_are_no_markup(page):
    facts = changed(sites={"<script>x</script>": {"num_examples": 1, "images": 0, "not_inverted": "<b>"}})
    html = page(facts)
    assert "<script" not in html and "<b>no" not in html
