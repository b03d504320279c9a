"""Decoded pixels on disk: decode once, map into memory ever after.

A cache file is a plain .npy followed by the SHA-256 of what stands before it, so that a damaged file is noticed
and rebuilt. Files are readable by their owner only: pixels are patient data.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import PIL

from datasets.images import DECODER_VERSION, convert_pixels
from datasets.records import DataError, Manifest
from federation.files import locked

DIGEST_BYTES = 32


def load_pixels(
    manifest: Manifest, rows: Sequence[int] | np.ndarray, *, size: int, channels: int, cache_dir: Path | None
) -> np.ndarray:
    """Pixels of the asked rows in the asked order: read-only uint8 ``(n, size, size, channels)``.

    ``cache_dir=None`` keeps them in memory; otherwise they are a memory map of a file there, shared by every
    process that asks for the same. Resizing and grey to RGB as in `datasets.images.convert_pixels`.
    Raises DataError for an image that cannot be read and for a folder that cannot be written.
    """
    rows = np.asarray(rows, dtype=np.int64)
    if channels not in (1, 3) or size < 1:
        raise DataError(f"size {size} and channels {channels} make no image; use a size of 1 or more, channels 1 or 3")
    if rows.ndim != 1 or (len(rows) and not 0 <= rows.min() <= rows.max() < len(manifest.images)):
        raise DataError(f"rows must be one list of numbers from 0 to {len(manifest.images) - 1}")
    shape = (len(rows), size, size, channels)
    if cache_dir is None or not len(rows):
        pixels = np.empty(shape, dtype=np.uint8)
        for position, row in enumerate(rows):
            pixels[position] = convert_pixels(manifest.images.read(int(row)), size=size, channels=channels)
        pixels.flags.writeable = False
        return pixels
    path = Path(cache_dir) / f"{cache_key(manifest.images.checksum, rows, size=size, channels=channels)}.npy"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            if not is_intact(path, shape):
                _write(path, shape, (manifest.images.read(int(row)) for row in rows))
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise DataError(
            f"the pixel cache {path.parent} cannot be used ({error.strerror}); choose another folder or switch it off"
        ) from error


def cache_key(checksum: str, rows: np.ndarray, *, size: int, channels: int) -> str:
    """SHA-256 (hex) of everything the pixels depend on, the decoding code and Pillow's version included."""
    decoder = [DECODER_VERSION, PIL.__version__]
    digest = hashlib.sha256(json.dumps([checksum, size, channels, decoder]).encode())
    digest.update(np.ascontiguousarray(rows, dtype="<i8"))
    return digest.hexdigest()


def is_intact(path: Path, shape: tuple[int, ...]) -> bool:
    """Whether a cache file holds a uint8 array of ``shape`` and ends with the digest of its content."""
    size_bytes = int(np.prod(shape))
    try:
        with path.open("rb") as file:
            remaining = os.fstat(file.fileno()).st_size - DIGEST_BYTES
            if remaining < size_bytes:
                return False
            digest = hashlib.sha256()
            while remaining:
                block = file.read(min(2**20, remaining))
                if not block:
                    return False
                digest.update(block)
                remaining -= len(block)
            if file.read() != digest.digest():
                return False
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (FileNotFoundError, ValueError):
        return False
    return found.shape == shape and found.dtype == np.uint8


class _Hashing:
    """A file whose writes are digested on the way, so that the content is not read back."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)


def _write(path: Path, shape: tuple[int, ...], images: Iterator[np.ndarray]) -> None:
    _, size, _, channels = shape
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:16], suffix=".part")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            hashing = _Hashing(file)
            np.lib.format.write_array_header_1_0(hashing, header)
            for image in images:
                hashing.write(convert_pixels(image, size=size, channels=channels).tobytes())
            file.write(hashing.digest.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
