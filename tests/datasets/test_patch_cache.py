"""The cache of patch features: when it computes, when it reads, what it refuses, and what it leaves on the disk."""

from __future__ import annotations

import os
import stat
import time

import numpy as np
import pytest

from datasets import patch_cache
from datasets.patch_cache import SUFFIX, cache_key, is_intact, load_features
from datasets.records import DataError

SHAPE = (70, 3, 4)


@pytest.fixture
def tower():
    """A stand-in for an image tower that counts the pictures it has seen."""

    class Tower:
        seen = 0

        def __call__(self, rows):
            self.seen += len(rows)
            return np.broadcast_to(rows[:, None, None] / 8, (len(rows), *SHAPE[1:])).astype(np.float32)

    return Tower()


def load(tower, folder, key="k", shape=SHAPE, max_bytes=1e6):
    return load_features(tower, shape, key=key, cache_dir=folder, max_bytes=max_bytes)


def test_features_are_computed_once_in_batches_and_read_ever_after(tower, tmp_path):
    first, again = load(tower, tmp_path / "f"), load(tower, tmp_path / "f")
    assert tower.seen == 70 and first.dtype == np.float16 and isinstance(again, np.memmap)
    for found in (first, again):
        np.testing.assert_array_equal(found[:, 1, 2], np.arange(70, dtype=np.float16) / 8)
        assert not found.flags.writeable
    load(tower, tmp_path / "f", key="another tower")
    assert tower.seen == 140


def test_files_are_private_and_no_part_is_left(tower, tmp_path):
    load(tower, tmp_path / "f")
    (path,) = (tmp_path / "f").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    def dies(rows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(dies, tmp_path / "f", key="other")
    assert list((tmp_path / "f").iterdir()) == [path]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other shape"])
def test_a_damaged_file_is_noticed_and_computed_again(tower, tmp_path, damage):
    load(tower, tmp_path)
    path = tmp_path / f"k{SUFFIX}"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-100] ^= 1
    path.write_bytes({"cut": data[:-50], "empty": b""}.get(damage, bytes(data)))
    shape = (69, 3, 4) if damage == "other shape" else SHAPE
    assert not is_intact(path, shape)
    found = load(tower, tmp_path, shape=shape)
    assert tower.seen == 70 + shape[0] and is_intact(path, shape)
    np.testing.assert_array_equal(found[:, 0, 0], np.arange(shape[0], dtype=np.float16) / 8)


def test_the_longest_unused_files_go_first_when_the_folder_is_full(tower, tmp_path):
    one_file = 70 * 3 * 4 * 2 + 500
    for age, key in ((30, "old"), (20, "older use"), (10, "young")):
        load(tower, tmp_path, key=key)
        then = time.time() - age
        os.utime(tmp_path / f"{key}{SUFFIX}", (then, then))
    load(tower, tmp_path, key="old")  # used again
    load(tower, tmp_path, key="new", max_bytes=3 * one_file)
    assert {path.name.removesuffix(SUFFIX) for path in tmp_path.iterdir()} == {"old", "young", "new"}


def test_what_nobody_used_for_a_month_is_removed(tower, tmp_path):
    load(tower, tmp_path, key="old")
    then = time.time() - (patch_cache.UNUSED_DAYS + 1) * 86_400
    os.utime(tmp_path / f"old{SUFFIX}", (then, then))
    load(tower, tmp_path, key="new")
    assert [path.name for path in tmp_path.iterdir()] == [f"new{SUFFIX}"]


@pytest.mark.parametrize("max_bytes", [0, 1679])
def test_features_beyond_the_limit_stay_in_memory(tower, tmp_path, max_bytes):
    found = load(tower, tmp_path / "f", max_bytes=max_bytes)
    assert tower.seen == 70 and not (tmp_path / "f").exists() and not found.flags.writeable
    assert load(tower, tmp_path / "f", shape=(0, 3, 4)).shape == (0, 3, 4)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])  # 1e6 is infinite in float16
def test_features_that_are_not_finite_are_refused_and_not_kept(tmp_path, value):
    def broken(rows):
        features = np.zeros((len(rows), *SHAPE[1:]))
        features[rows == 66] = value
        return features

    with pytest.raises(DataError, match="picture 66 are not finite"):
        load(broken, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tower, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"the feature cache .*file.* cannot be used"):
        load(tower, tmp_path / "file")


def test_the_key_depends_on_every_part_and_on_the_version(monkeypatch):
    keys = {cache_key("data", "train", 16), cache_key("data", "val", 16), cache_key("data", "train", 8)}
    monkeypatch.setattr(patch_cache, "PREPROCESS_VERSION", 99)
    assert len({*keys, cache_key("data", "train", 16)}) == 4
