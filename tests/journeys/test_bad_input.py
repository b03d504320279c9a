"""The bad input of issue 2, each with its outcome: a clear refusal, or a run that goes on and says what it left out."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from client_app.handler import FAILURES
from datasets.records import DataError
from federation.settings import Settings, SettingsError
from server_app import run_folder, runner
from server_app.inprocess import InProcessGrid
from strategies.cards import CardError
from strategies.discovery import QuorumError

QUICK = {
    "reporting.tensorboard": False,
    "federation.rounds": 2,
    "federation.wait_s": 0,
    "training.batch_size": 4,
    "data.image_size": 8,
    "model.width": 4,
    "evaluation.bins": 256,
}


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(run_folder, "BOOTSTRAP_DRAWS", 10)


@pytest.fixture
def simulate(tmp_path, write_hospital):
    """``simulate(rows, **changes)``: one manifest, split by its column ``site``, run in process."""
    from server_app import inprocess

    def run(rows, labels=("cat", "dog"), prepare=None, **changes):
        root = write_hospital(tmp_path / "data", rows, labels)
        if prepare:
            prepare(root)
        dotted = {key.replace("__", "."): value for key, value in changes.items()}
        by_site = {"data.root": str(root), "data.partition": "by_site", "data.min_samples": 1}
        return inprocess.run({**QUICK, **by_site, "reporting.runs_dir": str(tmp_path / "runs"), **dotted})

    return run


@pytest.fixture
def deploy(tmp_path):
    """``deploy({"north": folder, ...}, **changes)``: hospitals with node configs of their own, as on SuperNodes."""

    def run(sites, **changes):
        dotted = {key.replace("__", "."): value for key, value in changes.items()}
        settings = Settings.from_run_config({**QUICK, "reporting.runs_dir": str(tmp_path / "runs"), **dotted})
        nodes = [
            {"site": name, "data-root": str(root), "state-dir": str(tmp_path / f"state-{index}")}
            for index, (name, root) in enumerate(sites)
        ]
        return runner.run(settings, InProcessGrid(nodes, settings.flat()))

    return run


def told(outcome):
    return json.loads((outcome.run_dir / "run.json").read_text())


def records(outcome):
    lines = [json.loads(line) for line in (outcome.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "round"]


def outstanding(outcome):
    return {entry["site"]: entry["reason"] for entry in told(outcome)["outstanding"]}


# -- sizes --------------------------------------------------------------------------------------------------------


def test_empty_site_trains_nothing_and_is_still_measured(simulate, ward):
    outcome = simulate([*ward("north"), *ward("south"), *ward("empty", train=0)])
    assert all(record["accepted"] == ["north", "south"] for record in records(outcome))
    assert [row["site"] for row in outcome.metrics["per_site"]] == ["empty", "north", "south"]
    sizes = {site["site"]: site["num_train"] for site in told(outcome)["sites"]}
    assert sizes == {"empty": 0, "north": 8, "south": 8}


def test_hospital_whose_manifest_has_no_row_is_refused_and_the_others_go_on(deploy, write_hospital, ward, tmp_path):
    north, south = (write_hospital(tmp_path / name, ward(name)) for name in ("north", "south"))
    empty = write_hospital(tmp_path / "empty", [])
    outcome = deploy([("north", north), ("south", south), ("empty", empty)])
    assert (
        outstanding(outcome) == {"node 0002": "E-DATA: the site's data cannot be used"}
        or len(outstanding(outcome)) == 1
    )
    assert records(outcome)[0]["accepted"] == ["north", "south"]


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_site_with_one_sample_trains_without_a_number_that_is_not_finite(simulate, ward, norm):
    outcome = simulate([*ward("north"), *ward("single", train=1)], model__norm=norm)
    for record in records(outcome):
        assert record["accepted"] == ["north", "single"]
        assert all(math.isfinite(loss) for loss in record["train_loss"].values())


def test_batch_plus_one_samples_with_batch_norm_train_every_sample(simulate, ward):
    outcome = simulate([*ward("north"), *ward("odd", train=5)], training__batch_size=4)
    assert records(outcome)[0]["accepted"] == ["north", "odd"]
    assert records(outcome)[0]["weights"]["odd"] == 5


def test_batches_of_one_with_batch_norm_on_the_smallest_images(simulate, ward):
    outcome = simulate([*ward("north"), *ward("south")], training__batch_size=1)
    assert records(outcome)[-1]["accepted"] == ["north", "south"]


# -- labels -------------------------------------------------------------------------------------------------------


def test_class_that_nobody_has_is_undefined_and_named(simulate, ward):
    rows = [{**row, "owl": 0} for site in ("north", "south") for row in ward(site)]
    outcome = simulate(rows, labels=("cat", "dog", "owl"))
    owl = next(row for row in outcome.metrics["per_class"] if row["label"] == "owl")
    assert owl["auroc"] is None and owl["positives"] == 0
    assert outcome.metrics["macro_auroc"] is not None
    run = told(outcome)
    assert any("'owl' has no training positive at any site" in warning for warning in run["warnings"])
    assert {"label": "owl", "reason": "positives at 0 training sites: it would measure the site"} in run[
        "headline_excluded"
    ]


def test_label_of_one_site_only_never_enters_a_headline(simulate, ward):
    rows = [{**row, "owl": 0} for row in ward("north")] + [
        {**row, "owl": index % 2} for index, row in enumerate(ward("south"))
    ]
    outcome = simulate(rows, labels=("cat", "dog", "owl"))
    assert outcome.metrics["excluded_labels"] == ["owl"] and outcome.metrics["auroc_classes"] == 2
    assert next(row for row in outcome.metrics["per_class"] if row["label"] == "owl")["auroc"] is not None


def test_site_whose_labels_are_all_unknown_teaches_nothing_and_stops_nobody(simulate, ward):
    blank = [{**row, "cat": "", "dog": -1} for row in ward("blank")]
    with_blank = simulate([*ward("north"), *ward("south"), *blank])
    assert all(record["accepted"] == ["north", "south"] for record in records(with_blank))
    assert {site["site"]: site["num_train"] for site in told(with_blank)["sites"]}["blank"] == 0
    assert with_blank.metrics["num_examples"] == 8  # the four test samples of each site with known labels


def test_all_labels_unknown_everywhere_ends_before_any_round(simulate, ward):
    rows = [{**row, "cat": "", "dog": ""} for site in ("north", "south") for row in ward(site)]
    with pytest.raises(QuorumError, match=r"0 sites can train, 2 needed \(federation.min_sites\)"):
        simulate(rows)


def test_label_columns_in_another_order_give_the_same_model(deploy, write_hospital, ward, tmp_path):
    plain = [
        ("north", write_hospital(tmp_path / "a", ward("north"))),
        ("south", write_hospital(tmp_path / "b", ward("south"))),
    ]
    turned = write_hospital(tmp_path / "c", ward("south"), label_columns=("dog", "cat"))
    named = {"data__labels": "cat,dog"}
    assert deploy([plain[0], ("south", turned)], **named).model_sha256 == deploy(plain, **named).model_sha256


def test_label_columns_in_another_order_without_a_federation_list_are_shown_side_by_side(
    deploy, write_hospital, ward, tmp_path
):
    sites = [(name, write_hospital(tmp_path / name, ward(name))) for name in ("east", "north")]
    sites.append(("south", write_hospital(tmp_path / "south", ward("south"), label_columns=("dog", "cat"))))
    outcome = deploy(sites)
    assert outstanding(outcome)["south"].startswith("its labels is [dog, cat], the others have [cat, dog]")
    assert records(outcome)[0]["accepted"] == ["east", "north"]
    with pytest.raises(CardError, match=r"do not agree on labels .* north: \[cat, dog\]; south: \[dog, cat\]"):
        deploy(sites[1:])


# -- files --------------------------------------------------------------------------------------------------------


def first_row_of(root, site):
    lines = (root / "manifest.csv").read_text().splitlines()
    return next(number for number, line in enumerate(lines[1:]) if f",{site},train," in line)


def corrupt(root):
    (root / "images" / f"{first_row_of(root, 'broken')}.png").write_bytes(b"\x89PNG\r\n\x1a\nnot an image")


def not_a_number(root):
    row = first_row_of(root, "broken")
    pixels = np.full((8, 8), 0.5, np.float32)
    pixels[3, 3] = np.nan
    np.save(root / "images" / f"{row}.npy", pixels)
    text = (root / "manifest.csv").read_text()
    (root / "manifest.csv").write_text(text.replace(f"images/{row}.png", f"images/{row}.npy"))


@pytest.mark.parametrize(("damage", "story"), [(corrupt, "damaged or truncated"), (not_a_number, "NaN or infinite")])
def test_site_with_an_unreadable_image_is_left_out_and_its_own_log_names_the_row(simulate, ward, damage, story):
    outcome = simulate([*ward("north"), *ward("south"), *ward("broken")], prepare=damage)
    assert list(outstanding(outcome).values()) == ["E-DATA: the site's data cannot be used"]
    assert all(record["accepted"] == ["north", "south"] for record in records(outcome))
    log = (outcome.run_dir / "sites" / "broken" / "site.log").read_text()
    assert story in log and "manifest.csv row" in log
    assert "manifest.csv row" not in (outcome.run_dir / "run.json").read_text()


def test_image_that_does_not_exist_is_named_before_anything_runs(simulate, ward):
    with pytest.raises(DataError, match=r"manifest.csv row 2"):
        simulate([*ward("north"), *ward("south")], prepare=lambda root: (root / "images" / "0.png").unlink())


def test_patient_in_two_splits_is_refused_by_row_and_never_by_name(simulate, ward):
    rows = [*ward("north"), *ward("south")]
    rows[0]["patient"] = rows[9]["patient"] = "PATIENT-Jane-Doe"  # row 2 is in train, row 11 in val
    with pytest.raises(
        DataError, match=r"1 patients are both in train and in val \(for example in rows 2 and 11\)"
    ) as caught:
        simulate(rows)
    assert "Jane" not in str(caught.value)


# -- sites --------------------------------------------------------------------------------------------------------


def test_two_sites_with_the_same_name_end_the_run_and_name_it(deploy, write_hospital, ward, tmp_path):
    roots = [write_hospital(tmp_path / f"d{index}", ward(f"s{index}")) for index in range(3)]
    with pytest.raises(CardError, match=r"more than one site is called st-mary; give every site its own name"):
        deploy([("st-mary", roots[0]), ("st-mary", roots[1]), ("north", roots[2])])


def test_one_site_only_needs_to_be_asked_for(simulate, ward):
    with pytest.raises(QuorumError, match=r"1 sites online after 0 s, 2 needed|1 sites can train, 2 needed"):
        simulate(ward("north"))
    outcome = simulate(ward("north"), federation__min_sites=1)
    assert records(outcome)[0]["accepted"] == ["north"] and outcome.metrics["num_examples"] == 4


def test_more_sites_asked_for_than_exist_is_said_and_all_are_used(simulate, ward, caplog):
    outcome = simulate([*ward("north"), *ward("south")], federation__sites_per_round=7)
    assert "federation.sites_per_round = 7 but 2 sites can train; all are used" in caplog.text
    assert records(outcome)[0]["accepted"] == ["north", "south"]


def test_more_sites_expected_than_come_is_said_and_the_others_go_on(simulate, ward, caplog):
    outcome = simulate([*ward("north"), *ward("south")], federation__expected_sites=4)
    assert "2 of 4 expected sites are online; going on without the others" in caplog.text
    assert records(outcome)[0]["accepted"] == ["north", "south"]


def test_more_simulated_sites_than_samples_is_refused(simulate, ward):
    rows = [*ward("north"), *ward("south")]
    with pytest.raises(DataError, match=r"20 sites of at least 1 training rows were asked for, the data has 16"):
        simulate(rows, data__partition="iid", data__num_sites=20)


# -- names --------------------------------------------------------------------------------------------------------


def test_unknown_run_config_key_ends_before_a_run_folder_is_made(simulate, ward, tmp_path):
    with pytest.raises(SettingsError, match=r"federation.round = 3: unknown key; did you mean federation.rounds\?"):
        simulate(ward("north"), federation__round=3)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("root", "hint"), [("digit-mosaic", "Did you mean 'digits-mosaic'?"), ("/nowhere/at/all", "does not exist either")]
)
def test_data_that_does_not_exist_is_refused_with_a_hint(simulate, ward, tmp_path, root, hint):
    with pytest.raises(DataError, match=r"data root .* does not exist") as caught:
        simulate(ward("north"), data__root=root)
    assert hint in str(caught.value)


def test_data_that_does_not_exist_at_one_hospital_leaves_only_it_out(deploy, write_hospital, ward, tmp_path):
    sites = [(name, write_hospital(tmp_path / name, ward(name))) for name in ("north", "south")]
    outcome = deploy([*sites, ("west", tmp_path / "PATIENT-Jane-Doe")])
    assert list(outstanding(outcome).values()) == ["E-DATA: the site's data cannot be used"]
    assert records(outcome)[0]["accepted"] == ["north", "south"]
    everything = "".join(path.read_text(errors="replace") for path in outcome.run_dir.glob("*.json*"))
    assert "Jane" not in everything


def test_data_errors_are_a_code_of_their_own():
    assert (DataError, "E-DATA") in FAILURES
