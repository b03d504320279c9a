"""The packs of real data, compared with a plain reading of the same files."""

import csv
import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets.cache import load_pixels
from datasets.importers import main
from datasets.manifest import read_manifest

DATA = Path(os.environ.get("CONSILIUM_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
PACKS = {
    "d1_cxr_multilabel.zip": (2236, 15),
    "d1b_covid_notes_nc.zip": (211, 17),
    "d2_bloodcells64.zip": (9200, 8),
    "d2b_mednist64.zip": (5100, 6),
    "d2c_cifar10_subset.zip": (10000, 10),
    "d3_coco_multilabel.zip": (53, 80),
    "d3b_coco_multilabel_nc.zip": (85, 80),
}


def pack(name: str) -> Path:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"real data is absent: {path} (set CONSILIUM_DATA to the folder of the packs)")
    return path


@pytest.mark.parametrize("name", PACKS)
def test_pack_reads_like_a_plain_csv_reader_sees_it(name):
    path = pack(name)
    manifest = read_manifest(path)
    count, num_labels = PACKS[name]
    assert len(manifest) == count and manifest.targets.shape == (count, num_labels)
    with zipfile.ZipFile(path) as archive:
        info = json.loads(archive.read("info.json"))
        rows = list(csv.DictReader(io.StringIO(archive.read("metadata.csv").decode())))
        names = info.get("labels") or info["classes"]
        assert manifest.labels == tuple(names)
        if "label" in rows[0]:
            expected = np.eye(num_labels, dtype=int)[[int(row["label"]) for row in rows]]
        else:
            expected = np.array([[int(row[label]) for label in names] for row in rows])
        np.testing.assert_array_equal(manifest.targets, expected)
        assert manifest.table["split"].tolist() == [row["split"] for row in rows]
        assert manifest.table["report"].tolist() == [row.get("text", "") for row in rows]
        for row in range(0, count, max(1, count // 20)):
            image = Image.open(io.BytesIO(archive.read("images/" + rows[row]["file"])))
            np.testing.assert_array_equal(manifest.images.read(row), np.asarray(image))


def test_chest_pack_keeps_its_sites_and_masks_what_hannover_does_not_record():
    manifest = read_manifest(pack("d1_cxr_multilabel.zip"))
    hannover = (manifest.table["site"] == "mhh").to_numpy()
    assert manifest.table["site"].value_counts().to_dict() == {"nih_a": 1000, "nih_b64": 993, "mhh": 243}
    assert (manifest.targets[hannover, :14] == -1).all()
    # The pack's README: all 240 positives of COVID-19 are Hannover's.
    assert (manifest.targets[:, 14] == 1).sum() == (manifest.targets[hannover, 14] == 1).sum() == 240


def test_unpacked_folder_gives_the_same_manifest_and_pixels_as_the_zip(tmp_path):
    path = pack("d3_coco_multilabel.zip")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "unpacked")
    packed, unpacked = read_manifest(path), read_manifest(tmp_path / "unpacked")
    assert packed.checksum == unpacked.checksum
    np.testing.assert_array_equal(packed.targets, unpacked.targets)
    rows = np.arange(len(packed))
    first = load_pixels(packed, rows, size=32, channels=3, cache_dir=tmp_path / "cache")
    second = load_pixels(unpacked, rows, size=32, channels=3, cache_dir=None)
    np.testing.assert_array_equal(first, second)


def test_medmnist_file_is_read_and_imported(tmp_path):
    path = pack("d2d_pneumoniamnist28.npz")
    manifest = read_manifest(path, labels=["normal", "pneumonia"])
    assert manifest.table["split"].value_counts().to_dict() == {"train": 2428, "val": 270, "test": 468}
    with np.load(path, allow_pickle=False) as arrays:
        np.testing.assert_array_equal(manifest.targets[:2428].argmax(1), arrays["train_labels"][:, 0])
        np.testing.assert_array_equal(manifest.images.read(2428 + 5), arrays["val_images"][5])
    assert main(["medmnist", str(path), str(tmp_path), "--labels", "normal", "pneumonia"]) == 0
    again = read_manifest(tmp_path, image_root=path.parent)
    assert again.images.checksum == manifest.images.checksum
    np.testing.assert_array_equal(again.targets, manifest.targets)
