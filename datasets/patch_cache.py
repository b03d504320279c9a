"""Patch features on disk: what a frozen image tower says of a site's pictures, computed once, mapped into memory after.

A cache file is a plain .npy of float16 followed by the SHA-256 of what stands before it, so that a damaged file is
noticed and computed again. Features are derived from patients' images: files are readable by their owner only, and
files that nobody used for a month are removed. Withdrawn patients change the data's checksum, and so the file's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datasets.images import DECODER_VERSION
from datasets.records import DataError
from federation.files import replacing

PREPROCESS_VERSION = 1
"""Raise it where the way from cached pixels to patch features changes."""
SUFFIX = ".patches.npy"
DIGEST_BYTES = 32
ROWS_AT_ONCE = 64
UNUSED_DAYS = 30

Features = NDArray[np.float16]


def cache_key(*parts: str | int) -> str:
    """SHA-256 (hex) of what features depend on, the versions of decoding and preprocessing included.

    For a site's split: its data's checksum, the split, the size of its pixels, the SHA-256 of the image tower.
    """
    versions = (DECODER_VERSION, PREPROCESS_VERSION)
    return hashlib.sha256("\x1f".join(str(part) for part in (*versions, *parts)).encode()).hexdigest()


def load_features(
    compute: Callable[[np.ndarray], np.ndarray],
    shape: tuple[int, int, int],
    *,
    key: str,
    cache_dir: Path,
    max_bytes: float,
) -> Features:
    """Features ``(n, M, D) float16`` of n rows, read-only: the file of this key, or computed and kept.

    ``compute`` takes row numbers (at most 64) and gives ``(rows, M, D)``. Features larger than ``max_bytes`` stay in
    memory; of the others the folder keeps at most so many bytes, the least recently used files going first. Raises
    DataError for features that are not finite and for a folder that cannot be written.
    """
    size_bytes = int(np.prod(shape)) * 2
    if not shape[0] or size_bytes > max_bytes:
        features = np.empty(shape, np.float16)
        _fill(features, compute)
        features.flags.writeable = False
        return features
    path = cache_dir / f"{key}{SUFFIX}"
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_intact(path, shape):
            path.touch()
        else:
            _write(path, shape, compute)
            _clean(cache_dir, max_bytes, keep=path)
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise DataError(
            f"the feature cache {cache_dir} cannot be used ({error.strerror}); free it, or switch it off"
        ) from error


def is_intact(path: Path, shape: tuple[int, int, int]) -> bool:
    """Whether a cache file holds float16 features of this shape and ends with the digest of its content."""
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) < DIGEST_BYTES:
                return False
            end = file.seek(-DIGEST_BYTES, 2)
            expected = file.read()
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (FileNotFoundError, ValueError):
        return False
    return found.shape == shape and found.dtype == np.float16 and _digest(path, end) == expected


def _write(path: Path, shape: tuple[int, int, int], compute: Callable[[np.ndarray], np.ndarray]) -> None:
    with replacing(path) as temporary:
        features = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.float16, shape=shape)
        _fill(features, compute)
        features.flush()
        del features
        digest = _digest(temporary, temporary.stat().st_size)
        with temporary.open("ab") as file:
            file.write(digest)


def _fill(features: np.ndarray, compute: Callable[[np.ndarray], np.ndarray]) -> None:
    for start in range(0, len(features), ROWS_AT_ONCE):
        rows = np.arange(start, min(start + ROWS_AT_ONCE, len(features)))
        with np.errstate(over="ignore"):
            found = np.asarray(compute(rows)).astype(np.float16)
        finite = np.isfinite(found).all(axis=(1, 2))
        if not finite.all():
            raise DataError(
                f"the patch features of picture {rows[~finite][0]} are not finite in float16; are the image tower's "
                "weights whole?"
            )
        features[rows] = found


def _digest(path: Path, size: int) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size and (block := file.read(min(2**20, size))):
            digest.update(block)
            size -= len(block)
    return digest.digest()


def _clean(folder: Path, max_bytes: float, keep: Path) -> None:
    """Removes what nobody used for a month, then the longest unused files beyond ``max_bytes``; never ``keep``."""
    files = {}
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # another process cleans too
            stat = path.stat()
            if path != keep:
                files[path] = (stat.st_mtime, stat.st_size)
    left = max_bytes - keep.stat().st_size
    oldest = time.time() - UNUSED_DAYS * 86_400
    for path, (used, size) in sorted(files.items(), key=lambda entry: entry[1], reverse=True):
        left -= size
        if used < oldest or left < 0:
            path.unlink(missing_ok=True)
