from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets.embedded import digits
from datasets.manifest import read_manifest
from datasets.mosaics import EMPTY, TILE_COLUMNS, mosaic, mosaic_manifest
from datasets.records import SPLITS, DataError

BLOOD = Path(__file__).resolve().parents[3] / "shared" / "data" / "d2_bloodcells64.zip"


def tiles(count: int, shape: tuple[int, ...] = (3, 4)) -> np.ndarray:
    """Tiles of one value each, 1 upwards, so that a tile is recognised in a mosaic."""
    values = np.arange(1, count + 1, dtype=np.uint8).reshape(count, *[1] * len(shape))
    return np.broadcast_to(values, (count, *shape)).copy()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_tiles=st.integers(1, 40),
    count=st.integers(0, 50),
    kind=st.sampled_from(["grid", "corner_max"]),
    shape=st.sampled_from([(3, 4), (3, 4, 3)]),
)
def test_a_mosaic_shows_its_tiles_and_the_union_of_their_classes(seed, num_tiles, count, kind, shape):
    images = tiles(num_tiles, shape)
    classes = np.arange(num_tiles) % 5
    laid = mosaic(images, classes, np.random.default_rng(seed), count=count, num_classes=6, kind=kind)
    assert laid.pixels.shape == (count, 6, 8, *shape[2:]) and laid.pixels.dtype == np.uint8
    for pixels, targets, cells in zip(*laid, strict=True):
        for cell, tile in enumerate(cells):
            row, column = divmod(cell, 2)
            window = pixels[row * 3 : row * 3 + 3, column * 4 : column * 4 + 4]
            assert np.all(window == (0 if tile == EMPTY else images[tile]))
        assert set(np.flatnonzero(targets)) == {classes[tile] for tile in cells if tile != EMPTY}
    uses = np.bincount(laid.tiles[laid.tiles != EMPTY], minlength=num_tiles)
    assert uses.max(initial=0) - uses.min() <= 1  # no tile is used again before all are used up


def test_the_number_of_tiles_is_uniform_and_cells_are_random():
    laid = mosaic(tiles(50), np.zeros(50, int), np.random.default_rng(0), count=8000, num_classes=1)
    filled = (laid.tiles != EMPTY).sum(axis=1)
    # binomial(8000, 1/4): sigma 39; each cell is filled with probability 2.5/4: sigma 43
    assert np.all(np.abs(np.bincount(filled, minlength=5)[1:] - 2000) < 200)
    assert np.all(np.abs((laid.tiles != EMPTY).sum(axis=0) - 5000) < 220)


def test_corner_max_is_the_pixel_maximum_of_two_padded_tiles():
    """Re-computed as the recipe says it: pad both to the canvas in opposite corners, take the maximum."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (6, 4, 4)).astype(np.uint8)
    laid = mosaic(images, np.arange(6), rng, count=10, num_classes=6, kind="corner_max")
    for pixels, _, (first, _, _, second) in zip(*laid, strict=True):
        expected = np.maximum(np.pad(images[first], ((0, 4), (0, 4))), np.pad(images[second], ((4, 0), (4, 0))))
        assert np.array_equal(pixels, expected)


def test_digits_mosaics_are_multilabel_and_made_of_their_own_split():
    source = digits()
    manifest = mosaic_manifest(source, np.random.default_rng(0), counts={"train": 600, "val": 50, "test": 70})
    assert manifest.task == "multilabel" and manifest.labels == source.labels
    assert manifest.images.read(0).shape == (16, 16)
    assert manifest.table["split"].value_counts().to_dict() == {"train": 600, "test": 70, "val": 50}
    cells = manifest.table[list(TILE_COLUMNS)].to_numpy()
    split_of_tile = source.table["split"].to_numpy()
    for row in range(len(manifest)):
        used = cells[row][cells[row] != EMPTY]
        assert set(split_of_tile[used]) == {manifest.table["split"].iloc[row]}
        assert np.array_equal(manifest.targets[row], source.targets[used].max(axis=0))
    assert set(np.unique(manifest.targets)) == {0, 1}
    top_left = source.images.read(int(cells[0, 0])) if cells[0, 0] != EMPTY else np.zeros((8, 8))
    assert np.array_equal(manifest.images.read(0)[:8, :8], top_left)


def test_mosaics_follow_their_generator():
    first, again, other = (mosaic_manifest(digits(), np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.checksum == again.checksum != other.checksum
    assert len(first) == 3000


def test_a_split_without_tiles_gets_no_mosaics_and_multilabel_data_is_refused():
    source = digits()
    split = source.table["split"].replace("val", "train")
    without_val = dataclasses.replace(source, table=source.table.assign(split=split))
    manifest = mosaic_manifest(without_val, np.random.default_rng(0), counts=dict.fromkeys(SPLITS, 5))
    assert manifest.table["split"].tolist() == ["train"] * 5 + ["test"] * 5
    with pytest.raises(DataError, match="single-label"):
        mosaic_manifest(manifest, np.random.default_rng(0))


def test_tiles_of_different_sizes_are_refused_with_the_row():
    class Uneven:
        checksum = "uneven"

        def __len__(self):
            return len(digits())

        def read(self, row):
            return np.zeros((8, 8 if row != 5 else 9), np.uint8)

    uneven = dataclasses.replace(digits(), images=Uneven())
    with pytest.raises(DataError, match="row 6"):
        mosaic_manifest(uneven, np.random.default_rng(0))


def test_bad_mosaic_arguments_are_refused():
    with pytest.raises(DataError, match="uint8"):
        mosaic(tiles(3).astype(float), np.zeros(3, int), np.random.default_rng(0), count=1, num_classes=1)
    with pytest.raises(DataError, match="0 tiles"):
        mosaic(tiles(0), np.zeros(0, int), np.random.default_rng(0), count=1, num_classes=1)
    with pytest.raises(DataError, match="cutmix"):
        mosaic(tiles(3), np.zeros(3, int), np.random.default_rng(0), count=1, num_classes=1, kind="cutmix")


@pytest.mark.skipif(not BLOOD.exists(), reason="../shared/data/d2_bloodcells64.zip is not here")
def test_blood_cells_become_128_pixel_mosaics():
    manifest = mosaic_manifest(
        read_manifest(BLOOD), np.random.default_rng(0), counts={"train": 8, "val": 0, "test": 4}, kind="grid"
    )
    assert manifest.images.read(0).shape == (128, 128, 3)
    assert manifest.targets.shape == (12, 8) and np.all(manifest.targets.sum(axis=1) >= 1)
