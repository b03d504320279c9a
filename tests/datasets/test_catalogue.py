from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from datasets.catalogue import open_manifest
from datasets.records import DataError

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def rng_for(purpose: str) -> np.random.Generator:
    return np.random.default_rng(sum(purpose.encode()))


def test_embedded_names_open_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_manifest("digits").task == "multiclass"
    grid = open_manifest("digits-mosaic", rng_for=rng_for, mosaics_per_split={"train": 5, "val": 2, "test": 3})
    assert grid.task == "multilabel" and len(grid) == 10


def test_the_mosaic_switch_turns_a_single_label_root_into_a_multilabel_one():
    counts = {"train": 5, "val": 2, "test": 3}
    corner = open_manifest("digits-mosaic", mosaic="corner_max", rng_for=rng_for, mosaics_per_split=counts)
    assert np.all((corner.table[["tile_0", "tile_3"]] >= 0).to_numpy())
    same = open_manifest("digits", mosaic="corner_max", rng_for=rng_for, mosaics_per_split=counts)
    assert same.checksum == corner.checksum


def test_mosaics_without_a_generator_are_a_programming_error():
    with pytest.raises(ValueError, match="rng_for"):
        open_manifest("digits-mosaic")


def test_a_root_that_does_not_exist_is_named_with_what_was_perhaps_meant(tmp_path):
    (tmp_path / "st-mary.zip").write_bytes(b"")
    with pytest.raises(DataError, match=r"does not exist.*Did you mean '.*st-mary\.zip'"):
        open_manifest(tmp_path / "st-marry.zip")
    with pytest.raises(DataError, match="Did you mean 'digits'"):
        open_manifest("digit")
    with pytest.raises(DataError, match=r"folder '.*nowhere' does not exist either"):
        open_manifest(tmp_path / "nowhere" / "data.zip")
    with pytest.raises(DataError, match="does not exist"):
        open_manifest("")


@pytest.mark.skipif(not (DATA / "d2d_pneumoniamnist28.npz").exists(), reason="../shared/data is not here")
def test_a_pack_opens_by_its_path_and_as_mosaics():
    root = DATA / "d2d_pneumoniamnist28.npz"
    assert len(open_manifest(root)) == 3166
    laid = open_manifest(root, mosaic="grid", rng_for=rng_for, mosaics_per_split={"train": 6, "val": 2, "test": 2})
    assert laid.images.read(0).shape == (56, 56) and len(laid) == 10
