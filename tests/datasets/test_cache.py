"""The pixel cache: decode once, survive damage and company, stay private."""

import multiprocessing
import os
import stat
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from datasets.cache import cache_key, load_pixels
from datasets.images import ArrayImages, convert_pixels
from datasets.records import DataError, Manifest

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 10, 8, 3), dtype=np.uint8)


class CountingImages(ArrayImages):
    """Leaves one file a read in a folder, so that reads count across processes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(PIXELS)
        self.folder = folder

    def read(self, row: int) -> np.ndarray:
        (self.folder / f"{row}-{os.getpid()}-{os.urandom(4).hex()}").touch()
        return super().read(row)


@pytest.fixture
def reads(tmp_path: Path) -> Path:
    (tmp_path / "reads").mkdir()
    return tmp_path / "reads"


@pytest.fixture
def manifest(reads: Path) -> Manifest:
    targets = np.zeros((6, 1), np.int8)
    return Manifest(("A",), "multilabel", pd.DataFrame(index=range(6)), targets, CountingImages(reads), "c")


def expected(rows, size: int, channels: int) -> np.ndarray:
    return np.stack([convert_pixels(PIXELS[row], size=size, channels=channels) for row in rows])


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("size", "channels"), [(4, 1), (10, 3)])
def test_pixels_have_the_asked_order_shape_and_values(manifest, tmp_path, cached, size, channels):
    rows = [4, 0, 4, 2]
    pixels = load_pixels(manifest, rows, size=size, channels=channels, cache_dir=tmp_path / "c" if cached else None)
    assert pixels.shape == (4, size, size, channels) and pixels.dtype == np.uint8 and not pixels.flags.writeable
    np.testing.assert_array_equal(pixels, expected(rows, size, channels))
    assert isinstance(pixels, np.memmap) == cached


def test_second_request_reads_no_image(manifest, reads, tmp_path):
    first = load_pixels(manifest, np.arange(3), size=4, channels=1, cache_dir=tmp_path / "c")
    again = load_pixels(manifest, [0, 1, 2], size=4, channels=1, cache_dir=tmp_path / "c")
    np.testing.assert_array_equal(first, again)
    assert len(list(reads.iterdir())) == 3


def test_key_depends_on_images_rows_size_and_channels():
    rows = np.arange(3)
    keys = {
        cache_key("a", rows, size=4, channels=1),
        cache_key("b", rows, size=4, channels=1),
        cache_key("a", rows[::-1], size=4, channels=1),
        cache_key("a", rows, size=5, channels=1),
        cache_key("a", rows, size=4, channels=3),
    }
    assert len(keys) == 5
    assert cache_key("a", rows.astype(np.int32).astype(np.int64), size=4, channels=1) in keys


@pytest.mark.parametrize("damage", ["flip", "header", "cut", "empty", "longer", "other"])
def test_damaged_file_is_rebuilt(manifest, reads, tmp_path, damage):
    load_pixels(manifest, [0, 1], size=4, channels=1, cache_dir=tmp_path / "c")
    (path,) = (tmp_path / "c").glob("*.npy")
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-40] ^= 1
    elif damage == "header":
        data[3] ^= 1
    elif damage == "longer":
        data += b"\0"
    elif damage == "other":
        np.save(path, np.zeros((2, 4, 4, 1), np.uint8))
        data = bytearray(path.read_bytes())
    path.write_bytes(bytes(data[: {"cut": 100, "empty": 0}.get(damage, len(data))]))
    pixels = load_pixels(manifest, [0, 1], size=4, channels=1, cache_dir=tmp_path / "c")
    np.testing.assert_array_equal(pixels, expected([0, 1], 4, 1))
    assert len(list(reads.iterdir())) == 4


def test_only_the_owner_can_read_the_cache(manifest, tmp_path):
    load_pixels(manifest, [0], size=4, channels=1, cache_dir=tmp_path / "c")
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "c").iterdir()} == {0o600}


def test_image_that_fails_leaves_no_file_behind(manifest, tmp_path):
    class Broken(ArrayImages):
        def read(self, row: int) -> np.ndarray:
            if row == 2:
                raise DataError("m.csv row 4: damaged")
            return super().read(row)

    broken = Manifest(("A",), "multilabel", manifest.table, manifest.targets, Broken(PIXELS), "c")
    with pytest.raises(DataError, match=r"m\.csv row 4"):
        load_pixels(broken, [0, 1, 2], size=4, channels=1, cache_dir=tmp_path / "c")
    assert [path.suffix for path in (tmp_path / "c").iterdir()] == [".lock"]


def _ask(manifest: Manifest, folder: Path, barrier) -> None:
    barrier.wait()
    pixels = load_pixels(manifest, [0, 1, 2, 3], size=4, channels=3, cache_dir=folder)
    np.testing.assert_array_equal(pixels, expected([0, 1, 2, 3], 4, 3))


def test_processes_that_ask_together_decode_once_and_all_get_the_pixels(manifest, reads, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    processes = [context.Process(target=_ask, args=(manifest, tmp_path / "c", barrier)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(list(reads.iterdir())) == 4


def test_no_rows_are_an_empty_array(manifest, tmp_path):
    for folder in (None, tmp_path / "c"):
        assert load_pixels(manifest, [], size=4, channels=1, cache_dir=folder).shape == (0, 4, 4, 1)


def test_impossible_requests_are_refused(manifest, tmp_path):
    for rows, size, channels in [([6], 4, 1), ([-1], 4, 1), ([0], 0, 1), ([0], 4, 2), ([[0]], 4, 1)]:
        with pytest.raises(DataError):
            load_pixels(manifest, rows, size=size, channels=channels, cache_dir=None)


def test_folder_that_cannot_be_used_is_refused(manifest, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="pixel cache"):
        load_pixels(manifest, [0], size=4, channels=1, cache_dir=tmp_path / "file")
