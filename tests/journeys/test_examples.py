"""The examples, run as a user runs them: train on a folder, then predict on images with the model that it left."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def folder(tmp_path, write_hospital, ward):
    rows = [row for name in ("north", "south") for row in ward(name, train=12, val=4, test=4)]
    return write_hospital(tmp_path / "data", rows)


def test_train_on_a_folder_then_predict_on_images_with_maps(tmp_path, folder):
    trained = run(ROOT / "examples" / "train_in_process.py", folder, "--rounds", 1, "--image-size", 8, folder=tmp_path)
    assert trained.returncode == 0, trained.stderr[-2000:]
    report = Path(trained.stdout.split("report: ")[1].strip())
    assert (tmp_path / report).is_file()

    done = run(ROOT / "examples" / "predict.py", report.parent, folder / "images", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    with (tmp_path / "predictions" / "scores.csv").open(encoding="utf-8") as file:
        header, *rows = list(csv.reader(file))
    assert header == ["image", "cat", "dog"]
    assert [row[0] for row in rows] == sorted(path.name for path in (folder / "images").iterdir())
    assert all(0 <= float(score) <= 1 for row in rows for score in row[1:])
    pictures = sorted((tmp_path / "predictions").glob("*.png"))
    assert pictures
    with Image.open(pictures[0]) as picture:
        assert picture.width == 2 * picture.height  # the image and one map


def test_an_empty_folder_is_told_in_one_sentence(tmp_path, run_tiny):
    (tmp_path / "none").mkdir()
    run_dir = run_tiny(federation__rounds=1).run_dir
    done = run(ROOT / "examples" / "predict.py", run_dir, tmp_path / "none", folder=tmp_path)
    assert done.returncode == 1 and "no image in" in done.stderr
