"""The page of overlays: whose images it shows, what lies over them, who may read it, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import re
import stat

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from client_app.training import on_meta
from federation.settings import Settings
from models.networks import SmallCNN, resnet18
from server_app import explain
from server_app.explain import ExplainError
from tests.faults.drills import LABELS, run, settings, write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("explain") / "data.npz")


@pytest.fixture(scope="module")
def run_of(data, tmp_path_factory):
    """``run_of(method, **changes)``: the folder of a finished run at 16 pixels; the same run is made once."""
    made = {}

    def make(method, **changes):
        key = json.dumps([method, changes])
        if key not in made:
            runs = tmp_path_factory.mktemp("runs")
            quick = {"federation__rounds": 2, "data__image_size": 16, "training__optimizer": "adamw"}
            made[key] = run(settings(data, runs, method=method, training__lr=0.01, **{**quick, **changes})).run_dir
        return made[key]

    return make


def pictures(page):
    """Every picture on the page as pixels, and its description."""
    found = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="([^"]*)"', page)
    return [(np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB")), alt) for text, alt in found]


# -- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes", "titles"),
    [
        ("fednca", {}, ["image", "attention", "Grad-CAM"]),
        ("fednca", {"fednca__head": "etf"}, ["image", "Grad-CAM"]),
        ("fedavg", {}, ["image", "Grad-CAM"]),
        ("fedavg", {"model__name": "resnet18", "federation__rounds": 1}, ["image", "Grad-CAM"]),
    ],
)
def test_page_shows_every_label_with_the_overlays_of_its_method(run_of, tmp_path, method, changes, titles):
    out = tmp_path / "page.html"
    assert explain.write_page(run_of(method, **changes), images=2, out=out) == out
    page = out.read_text(encoding="utf-8")
    assert [alt for _, alt in pictures(page)] == [
        f"{label}: {title}" for label in LABELS for _ in (1, 2) for title in titles
    ]
    assert all(picture.shape == (224, 224, 3) for picture, _ in pictures(page))
    assert "This page holds patient images. It must not leave the site." in page
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_page_runs_nothing_and_loads_nothing(run_of, tmp_path):
    page = explain.write_page(run_of("fednca"), out=tmp_path / "p.html").read_text(encoding="utf-8")
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page
    assert "<script" not in page and not re.search(r"""(?:src|href)=["'](?!data:)|url\(|https?:""", page)


def test_shown_are_the_highest_scored_positives_with_their_true_labels(run_of, tmp_path):
    trained = explain.load_model(run_of("fednca"))
    manifest = explain.open_data(trained, None)
    rows = np.flatnonzero(manifest.table["split"].to_numpy() == "test")
    scores, targets = explain.scores_of(trained, manifest, rows), manifest.targets[rows]
    page = explain.render(trained, manifest, 3)
    sections = page.split("<section>")[2:]
    for label, section in enumerate(sections):
        by_score = sorted(
            (row for row in range(len(rows)) if targets[row, label] == 1), key=lambda row: -scores[row, label]
        )
        lines = [int(manifest.table["line"].iloc[rows[row]]) for row in by_score[:3]]
        assert [int(line) for line in re.findall(r"row (\d+)", section)] == lines
        shown = [float(score) for score in re.findall(r"score <b>([\d.]+)</b>", section)]
        assert shown == [round(float(scores[row, label]), 3) for row in by_score[:3]]
        truth = [", ".join(np.array(LABELS)[targets[row] == 1]) for row in by_score[:3]]
        assert re.findall(r"true labels: ([^\n<;]*)", section) == truth
    # the plain picture is the image as the model takes it, its pixels as squares
    first = explain.pixels_of(trained, manifest, rows[explain.highest_positives(scores, targets, 0, 1)])[0, :, :, 0]
    assert np.array_equal(pictures(page)[0][0][::14, ::14, 0], first)


def test_words_from_the_data_are_escaped(data, tmp_path):
    hostile = "<b>cat</b>"
    changes = {"data__labels": f"{hostile},dog,fox", "federation__rounds": 1}
    page = explain.write_page(run(settings(data, tmp_path / "runs", **changes)).run_dir, images=1).read_text()
    assert hostile not in page and "&lt;b&gt;cat&lt;/b&gt;" in page


def test_label_without_a_positive_says_so(run_of):
    trained = explain.load_model(run_of("fednca"))
    manifest = explain.open_data(trained, None)
    manifest.targets[:, 2] = np.where(manifest.targets[:, 2] == 1, -1, 0)  # unknown instead of present
    page = explain.render(trained, manifest, 1)
    assert page.count("No test image is known to show it.") == 1 and len(pictures(page)) == 2 * 3


def test_a_hospital_looks_at_its_own_images(write_hospital, ward, tmp_path, capsys):
    roots = [write_hospital(tmp_path / name, [*ward("north"), *ward("south")]) for name in ("public", "own")]
    by_site = {"data__partition": "by_site", "data__min_samples": 1, "data__labels": "cat,dog", "federation__rounds": 1}
    outcome = run(settings(roots[0], tmp_path / "runs", **by_site))
    described = json.loads((outcome.run_dir / "run.json").read_text())
    described["settings"]["data"] |= {"partition": "own", "root": "digits-mosaic"}  # as of a deployed run
    (outcome.run_dir / "run.json").write_text(json.dumps(described))
    assert explain.main([str(outcome.run_dir)]) == 2
    assert "name yours with --data" in capsys.readouterr().err
    out = tmp_path / "own.html"
    assert explain.main([str(outcome.run_dir), "--data", str(roots[1]), "--images", "1", "--out", str(out)]) == 0
    assert "must not leave the site" in capsys.readouterr().out
    assert [alt.partition(":")[0] for _, alt in pictures(out.read_text())] == ["cat", "cat", "dog", "dog"]
    assert not (outcome.run_dir / "explain.html").exists()


# -- the maps ---------------------------------------------------------------------------------------------------------


def test_generic_grad_cam_of_a_linear_head_is_its_class_activation_map():
    # The logit is w . mean(F) + b: the gradient of every cell is w / (H W), so the map is relu(w . F) / (H W).
    torch.manual_seed(0)
    network, images = SmallCNN(channels=1, num_labels=5, width=8).eval(), torch.randn(3, 1, 24, 24)
    expected = torch.einsum("d,bdhw->bhw", network.head.weight[2], network.features(images)).relu() / 9
    found = explain.last_map_grad_cam(network, images, 2)["Grad-CAM"]
    torch.testing.assert_close(found, expected.detach(), atol=1e-6, rtol=1e-5)
    assert all(value.grad is None for value in network.parameters()) and not network._forward_hooks


def test_generic_grad_cam_of_resnet_is_of_its_last_map():
    torch.manual_seed(0)
    network, images = resnet18(channels=3, num_labels=4, image_size=64).eval(), torch.randn(2, 3, 64, 64)
    features = {}
    network.layer4.register_forward_hook(lambda _, __, output: features.update(last=output))
    found = explain.last_map_grad_cam(network, images, 1)["Grad-CAM"]
    expected = torch.einsum("d,bdhw->bhw", network.fc.weight[1], features["last"]).relu() / 64
    torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=1e-4)


def test_overlay_is_clear_at_zero_and_strongest_at_the_maximum():
    image = np.full((8, 8, 3), 100, np.uint8)
    assert np.array_equal(explain.overlay(image, torch.zeros(2, 2)), image)
    laid = explain.overlay(image, torch.tensor([[0.0, 0.0], [0.0, 3.0]])).astype(int)
    change = np.abs(laid - 100).sum(axis=2)
    assert change[0, 0] == 0 and change[-1, -1] == change.max() > 100
    brighter = explain.overlay(image, torch.tensor([[0.0, 0.0], [0.0, 30.0]]))
    assert np.array_equal(laid, brighter)  # a map has its own scale


# -- what is refused --------------------------------------------------------------------------------------------------


def copied(run_dir, tmp_path, change=lambda state, header: None):
    """The two files of a run in a folder of their own, the model changed."""
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "run.json").write_bytes((run_dir / "run.json").read_bytes())
    with safe_open(run_dir / "model.safetensors", framework="pt") as file:
        header, state = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(state, header)
    save_file(state, folder / "model.safetensors", header)
    return folder


def test_two_files_of_a_run_are_enough(run_of, tmp_path):
    folder = copied(run_of("fednca"), tmp_path)
    assert explain.write_page(folder, images=1) == folder / "explain.html"


def test_damaged_model_is_refused(run_of, tmp_path):
    def change(state, header):
        state["head.bias"] += 1

    with pytest.raises(ExplainError, match="damaged: its tensors do not have the hash"):
        explain.load_model(copied(run_of("fednca"), tmp_path, change))


def test_file_without_a_header_is_refused(run_of, tmp_path):
    with pytest.raises(ExplainError, match=r"cannot be read .*completed run"):
        explain.load_model(copied(run_of("fednca"), tmp_path, lambda state, header: header.clear()))


@pytest.mark.parametrize(
    "text", [None, "", "[]", '{"settings": 3}', '{"settings": {"run": {"method": "fednca", "x": 1}}}']
)
def test_folder_that_is_no_run_is_refused(tmp_path, text, capsys):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    assert explain.main([str(tmp_path)]) == 2
    assert "give the folder of a completed run" in capsys.readouterr().err


def test_run_without_a_common_model_is_refused(run_of):
    with pytest.raises(ExplainError, match="no common model: every site keeps its own"):
        explain.load_model(run_of("local"))


def test_data_without_a_test_split_or_with_other_labels_are_refused(run_of, write_hospital, ward, tmp_path, capsys):
    run_dir = run_of("fednca")
    rows = [{**row, "fox": 0} for row in ward("north", test=0)]
    untested = write_hospital(tmp_path / "untested", rows, LABELS)
    assert explain.main([str(run_dir), "--data", str(untested)]) == 2
    assert "no test split" in capsys.readouterr().err
    other = write_hospital(tmp_path / "other", ward("north"))
    assert explain.main([str(run_dir), "--data", str(other)]) == 2
    assert "fox" in capsys.readouterr().err
    assert not (run_dir / "explain.html").exists()


def test_loaded_network_is_the_runs(run_of):
    trained = explain.load_model(run_of("fedavg"))
    assert not trained.network.training and trained.labels == LABELS
    described = json.loads((run_of("fedavg") / "run.json").read_text())
    flat = {
        (k if area == "run" else f"{area}.{k}"): v
        for area, keys in described["settings"].items()
        for k, v in keys.items()
    }
    assert trained.settings == Settings.from_run_config(flat)
    names = on_meta(LABELS, trained.settings).state_dict().keys()
    assert list(names) == list(trained.network.state_dict().keys())
