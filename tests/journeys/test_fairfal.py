"""FairFAL as people meet it: the same bits twice, after a kill anywhere, and a hospital whose readers label late."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from datasets.annotation import main
from datasets.annotation_store import read_pool
from federation import wire
from strategies.discovery import QuorumError
from tests.faults.drills import KillSwitch, count_moments, killed, lines_of, run_json, state_sha256
from tests.strategies.fairfal_data import LABELS, SITES, config_of, pictures, run, run_hospitals, write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = write_data(tmp_path_factory.mktemp("fairfal") / "data.npz")
    run(config_of(path, path.parent / "first", federation__rounds=2))  # fills the pixel cache: only a first run does
    return path


def kept_by_sites(folder):
    """Bytes of every site's labelled sets and of what each has in its queue."""
    return {
        (path.parents[1].name, path.name): path.read_bytes()
        for site in SITES
        for path in (
            *(folder / "sites" / site / "labelled").glob("[0-9]*.json"),
            folder / "sites" / site / "annotation/journal.jsonl",
        )
    }


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The uninterrupted run, its settings, and how many moments it could be killed at."""
    config = config_of(data, tmp_path_factory.mktemp("whole"))
    moments, outcome = count_moments(config)
    return config, moments, outcome


def test_the_same_seed_gives_the_same_model_picks_and_lines(whole, tmp_path):
    config, _, first = whole
    second = run({**config, "reporting.runs_dir": str(tmp_path)})
    assert second.model_sha256 == first.model_sha256
    assert kept_by_sites(second.run_dir) == kept_by_sites(first.run_dir)
    assert lines_of(second.run_dir) == lines_of(first.run_dir)
    other = run({**config, "reporting.runs_dir": str(tmp_path), "seed": 2})
    assert kept_by_sites(other.run_dir) != kept_by_sites(first.run_dir)


@pytest.mark.parametrize("share", [0.2, 0.45, 0.52, 0.6, 0.68, 0.8])
def test_a_run_killed_anywhere_and_resumed_ends_in_the_same_bits(whole, tmp_path, share):
    """Between the shares lie the first picks, training, gamma, the second picks, and training on them."""
    config, moments, outcome = whole
    config = {**config, "reporting.runs_dir": str(tmp_path)}
    assert killed(config, KillSwitch(int(share * moments)))
    (folder,) = tmp_path.glob("*-*")
    resumed = run({**config, "resume": str(folder)})
    assert resumed.model_sha256 == outcome.model_sha256
    assert state_sha256(folder) == state_sha256(outcome.run_dir)
    assert kept_by_sites(folder) == kept_by_sites(outcome.run_dir)
    assert lines_of(folder, "bytes_down") == lines_of(outcome.run_dir, "bytes_down")
    assert (folder / "cycles.json").read_text() == (outcome.run_dir / "cycles.json").read_text()


def test_a_server_that_lost_its_newest_checkpoint_goes_back_to_an_older_cycle(whole, tmp_path):
    config, _, outcome = whole
    folder = tmp_path / "run-x"
    shutil.copytree(outcome.run_dir, folder)
    old = sorted((folder / "checkpoints").glob("round-*"))
    assert len(old) == 2
    old[-1].write_bytes(b"torn")
    resumed = run({**config, "reporting.runs_dir": str(tmp_path), "resume": str(folder)})
    assert resumed.model_sha256 == outcome.model_sha256
    assert kept_by_sites(folder) == kept_by_sites(outcome.run_dir)


def test_the_report_shows_learning_curves_and_the_balance_of_the_labels(whole):
    *_, outcome = whole
    page = (outcome.run_dir / "report.html").read_text()
    for title in ("Test, at the end of each cycle", "smallest class over largest", "classes with a label"):
        assert title in page


# -- readers ----------------------------------------------------------------------------------------------------------


WARDS = ("north", "south")


def write_ward(folder, seed, known):
    """A hospital of 24 pictures, of which ``known`` have a label in its own table; returns folder and the truth."""
    (folder / "images").mkdir(parents=True)
    truth = np.random.default_rng(seed).integers(0, 3, 32)
    rows = []
    for number, (picture, label) in enumerate(zip(pictures(truth, seed), truth, strict=True)):
        Image.fromarray(picture).save(folder / "images" / f"{number:02d}.png")
        split = "train" if number < 24 else "test"
        named = LABELS[label] if number < known or split == "test" else ""
        rows.append([f"images/{number:02d}.png", split, named])
    with (folder / "manifest.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "split", "label"], *rows])
    (folder / "manifest.json").write_text(
        json.dumps({"task": "multiclass", "labels": list(LABELS), "unlabelled": True})
    )
    return {f"images/{number:02d}.png": LABELS[label] for number, label in enumerate(truth)}


@pytest.fixture
def wards(tmp_path):
    """``wards(known)``: node configs of two hospitals, their folders and their truths."""

    def make(known):
        truths = {name: write_ward(tmp_path / name, seed, known) for seed, name in enumerate(WARDS)}
        nodes = [
            {"site": name, "data-root": str(tmp_path / name), "state-dir": str(tmp_path / f"state-{name}")}
            for name in WARDS
        ]
        return nodes, truths

    return make


def settings_of(tmp_path, **changes):
    quick = config_of(tmp_path, tmp_path / "runs", fairfal__labels="readers", **changes)
    drop = ("data.root", "data.num_sites", "data.cache_dir", "data.partition")
    return {key.replace(".", "__"): value for key, value in quick.items() if key not in drop} | {
        "data__partition": "own"
    }


def pool_folder(tmp_path, ward, experiment=None):
    (folder,) = (tmp_path / f"state-{ward}").glob(experiment or "*-*")
    return folder / "annotation"


def read(tmp_path, ward, truth, *, every=1):
    """A reader exports the worklist, labels every n-th row of its table and imports the table."""
    folder = pool_folder(tmp_path, ward)
    assert main(["export", str(folder), "--data", str(tmp_path / ward)]) == 0
    path = sorted((folder / "worklists").iterdir())[-1] / "worklist.csv"
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows[::every]:
        row |= {"reader": "ann", "time": "2026-01-01T12:00:00Z", "label": truth[row["id"]]}
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    assert main(["import", str(folder), str(path)]) == 0
    return {row["id"] for row in rows[::every]}, {row["id"] for row in rows}


def test_answers_that_arrive_late_and_in_part_start_the_next_cycle(tmp_path, wards, capsys):
    nodes, truths = wards(known=6)
    answered = {}

    def reader(message, answer):
        """In round 3, the first of cycle 2, Ann labels every second row of what north picked until then."""
        reply = answer()
        if message.metadata.message_type == wire.TRAIN and message.content["config"]["server_round"] == 3:
            answered["north"], answered["listed"] = read(tmp_path, "north", truths["north"], every=2)
        return reply

    outcome = run_hospitals(nodes, {0: reader}, **settings_of(tmp_path, federation__rounds=6))
    folder = pool_folder(tmp_path, "north")
    pool = read_pool(folder)
    cycles = [
        json.loads((folder.parent / "labelled" / f"{cycle:04d}.json").read_text())["marks"] for cycle in (1, 2, 3)
    ]
    assert [len(marks) for marks in cycles[:2]] == [6, 6], "what is asked for now is labelled by nobody yet"
    assert set(cycles[2]) == set(cycles[0]) | answered["north"] and len(answered["north"]) >= 4
    for id in answered["north"]:
        assert LABELS[cycles[2][id].index(1)] == truths["north"][id]
    assert set(pool.pending) == (answered["listed"] - answered["north"]) | set(pool.picked(3))
    assert not set(pool.picked(3)) & answered["listed"], "a pending image is not picked again"
    assert not (outcome.run_dir / "sites").exists(), "nothing of a hospital's folder is with the run"
    assert main(["status", str(folder)]) == 0 and "cycle=3 requested=" in capsys.readouterr().out
    assert run_json(outcome.run_dir)["status"] == "completed"


def test_hospitals_without_a_label_wait_for_their_readers_and_resume(tmp_path, wards):
    nodes, truths = wards(known=0)
    config = settings_of(tmp_path, federation__rounds=2)
    with pytest.raises(QuorumError, match="label and import them, then resume"):
        run_hospitals(nodes, **config)
    (folder,) = (tmp_path / "runs").iterdir()
    for ward in WARDS:
        answered, listed = read(tmp_path, ward, truths[ward])
        assert answered == listed and len(listed) == 4
    outcome = run_hospitals(nodes, **config, resume=str(folder))
    assert json.loads((outcome.run_dir / "cycles.json").read_text())["labelled"] == {"north": 4, "south": 4}
    assert outcome.metrics["num_examples"] == 16
