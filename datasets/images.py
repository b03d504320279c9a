"""Pixels as uint8: from PNG, JPEG, TIFF and .npy bytes, from DICOM, and from arrays in memory.

The kind of a file is read from its first bytes, not from its name. Everything ends as ``(H, W)`` grey or
``(H, W, 3)`` RGB uint8 at native size, or as a DataError that names the file.

Choice: the EXIF orientation is applied, because every viewer shows the image that way.
Choice: transparency is dropped, not blended; a palette becomes RGB.
Choice: 16-bit grey maps the range [0, 2**k - 1] to [0, 255], k the smallest of 8, 10, 12, 14, 16 that holds the
brightest pixel. Detectors deliver such depths inside 16-bit files; a window taken from each image's own extremes
would hang on one burnt-in marker instead. 16-bit RGB keeps its high byte (Pillow's reading).
Choice: float images must be finite and lie in [0, 1]; anything else has no stated meaning and is refused.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from datasets.records import DataError
from datasets.source import Source, shown

DECODER_VERSION = 1
# Below Pillow's own threshold for a decompression bomb, and above any radiograph or mammogram.
MAX_PIXELS = 2**26
MAX_SIDE = 2**16
BIT_DEPTHS = (8, 10, 12, 14, 16)
NPY_MAGIC = b"\x93NUMPY"
_PILLOW_FORMATS = {b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG", b"II*\0": "TIFF", b"MM\0*": "TIFF"}
_ORIENTATION_TAG = 0x0112
_ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(data: bytes, name: str) -> np.ndarray:
    """Pixels of one image file: uint8 ``(H, W)`` or ``(H, W, 3)``; raises DataError naming ``name``.

    Readable: PNG and JPEG (8 and 16 bit), TIFF with one page (8, 16 bit, float), ``.npy``, and DICOM with the
    extra ``dicom``.
    """
    # A TIFF may hide in a DICOM preamble (dual-personality files); DICOM is asked first so that it reads as DICOM.
    if data[128:132] == b"DICM":
        from datasets.dicom import decode_dicom

        return decode_dicom(data, name)
    if data.startswith(NPY_MAGIC):
        return _from_npy(data, name)
    for magic, kind in _PILLOW_FORMATS.items():
        if data.startswith(magic):
            return _from_pillow(data, name, kind)
    raise DataError(f"{name} is neither PNG, JPEG, TIFF, .npy nor DICOM (its first bytes: {data[:8]!r}); convert it")


def check_size(height: int, width: int, name: str) -> None:
    """Raises DataError for an empty image and for one too large to be anything but a decompression bomb."""
    if height < 1 or width < 1 or height * width > MAX_PIXELS or max(height, width) > MAX_SIDE:
        raise DataError(
            f"{name} is {height} x {width} pixels; images need 1 to {MAX_PIXELS} pixels with sides up to {MAX_SIDE}"
        )


def _from_pillow(data: bytes, name: str, kind: str) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(data), formats=(kind,)) as image:
            check_size(image.height, image.width, name)
            if kind == "TIFF" and getattr(image, "n_frames", 1) > 1:
                raise DataError(f"{name} has several pages; store one image a file")
            image.load()
            image = _upright(image)
            if image.mode.startswith("I") or image.mode == "F":
                return grey_to_uint8(np.asarray(image), name)
            return np.array(image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB"))
    except DataError:
        raise
    except Exception as error:  # Pillow raises a dozen unrelated kinds on hostile bytes
        raise DataError(f"{name} is a damaged or truncated {kind} ({error}); copy it again") from error


def _upright(image: Image.Image) -> Image.Image:
    # exif_transpose rewrites the whole EXIF block and fails on blocks that viewers accept; the tag is all we need.
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # unreadable EXIF says nothing about orientation: the pixels stand as stored
        return image
    return image.transpose(_ORIENTATIONS[orientation]) if orientation in _ORIENTATIONS else image


def _from_npy(data: bytes, name: str) -> np.ndarray:
    array = read_npy(data, name)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim != 2 and not (array.ndim == 3 and array.shape[2] == 3):
        raise DataError(f"{name} has shape {array.shape}; an image is (H, W), (H, W, 1) or (H, W, 3)")
    check_size(array.shape[0], array.shape[1], name)
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    return grey_to_uint8(array, name)


def read_npy(data: bytes, name: str) -> np.ndarray:
    """The array in .npy bytes; raises DataError for damage and for pickled objects, which are never loaded."""
    try:
        return np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # a hostile header fails in the parser, in dtype, or in the allocation
        raise DataError(f"{name} is not a readable .npy array ({error}); write it again with numpy.save") from error


def grey_to_uint8(values: np.ndarray, name: str) -> np.ndarray:
    """Integers up to 16 bit, or floats in [0, 1], as uint8 of the same shape, by the windows stated above."""
    if np.issubdtype(values.dtype, np.floating):
        bad = int(np.count_nonzero(~np.isfinite(values)))
        if bad:
            raise DataError(f"{name} has {bad} pixels that are NaN or infinite; replace them or leave the image out")
        low, high = float(values.min()), float(values.max())
        if low < 0 or high > 1:
            raise DataError(f"{name} has float pixels from {low:g} to {high:g}; scale them into 0 to 1 first")
        return stretch(values, 0.0, 1.0)
    if not np.issubdtype(values.dtype, np.integer):
        raise DataError(f"{name} has pixels of type {values.dtype}; store 8 or 16 bit integers or floats in 0 to 1")
    low, high = int(values.min()), int(values.max())
    depth = next((bits for bits in BIT_DEPTHS if high < 2**bits), None)
    if low < 0 or depth is None:
        raise DataError(f"{name} has integer pixels from {low} to {high}; the readable range is 0 to 65535")
    return stretch(values, 0.0, float(2**depth - 1))


def stretch(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """uint8 of the same shape: ``low`` and below become 0, ``high`` and above 255, linear and rounded between."""
    span = max(high - low, np.finfo(np.float32).tiny)  # a constant image has no span; it becomes 0
    scaled = np.clip((values.astype(np.float64) - low) / span, 0.0, 1.0)
    return np.rint(scaled * 255).astype(np.uint8)


def convert_pixels(pixels: np.ndarray, *, size: int, channels: int) -> np.ndarray:
    """One image as ``(size, size, channels) uint8``, from uint8 ``(H, W)`` or ``(H, W, 3)``; channels is 1 or 3.

    Choice: the aspect ratio is not kept, so nothing is cut off or padded; bilinear with antialiasing (Pillow).
    RGB becomes grey by ITU-R 601 luma before resizing, grey becomes RGB by repetition after it.
    """
    image = Image.fromarray(pixels)
    if channels == 1 and image.mode != "L":
        image = image.convert("L")
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    array = np.asarray(image)
    if array.ndim == 2:
        array = np.repeat(array[:, :, None], channels, axis=2)
    return array


class ArrayImages:
    """Images held in one array: uint8 ``(n, H, W)``, ``(n, H, W, 1)`` or ``(n, H, W, 3)``.

    ``names`` (one an image) replace the plain number in error messages. ``checksum`` covers shape and bytes.
    """

    def __init__(self, array: np.ndarray, names: Sequence[str] | None = None) -> None:
        if array.dtype != np.uint8 or array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[3] not in (1, 3)):
            raise DataError(
                f"an image array is uint8 (n, H, W), (n, H, W, 1) or (n, H, W, 3), not {array.dtype} {array.shape}"
            )
        if len(array):
            check_size(array.shape[1], array.shape[2], "the image array")
        self.array = array[..., 0] if array.ndim == 4 and array.shape[3] == 1 else array
        self.names = names
        digest = hashlib.sha256(repr(self.array.shape).encode())
        digest.update(np.ascontiguousarray(self.array).data.cast("B") if self.array.size else b"")
        self.checksum = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.array)

    def read(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise DataError(f"image {row} does not exist; there are {len(self)}, counted from 0")
        return self.array[row].copy()


class FileImages:
    """Images in files below a source, decoded when read; "" stands for a sample that has no image.

    ``rows`` name each sample in error messages ("manifest.csv row 12"). Every file must exist now; whether it can
    be decoded shows when it is read.

    Choice: ``checksum`` covers each path with its size and modification time (folder) or CRC-32 (zip) instead of
    all bytes, since reading a hospital's archive to the end at every start would take hours.
    """

    def __init__(self, source: Source, paths: Sequence[str], rows: Sequence[str] | None = None) -> None:
        self.source = source
        self.rows = rows if rows is not None else [f"image {row}" for row in range(len(paths))]
        self.paths = list(paths)
        digest = hashlib.sha256()
        missing: list[int] = []
        for row, path in enumerate(self.paths):
            try:
                mark = source.fingerprint(path) if path else "-"
            except DataError as error:
                raise DataError(f"{self.rows[row]}: {error}") from error
            if not mark:
                missing.append(row)
            digest.update(f"{path}\0{mark}\n".encode("utf-8", "surrogatepass"))
        if missing:
            first = missing[0]
            raise DataError(
                f"{self.rows[first]}: image {shown(self.paths[first])} does not exist below {source.root.name} "
                f"({len(missing)} of {len(self)} images are missing); paths are relative to the data root"
            )
        self.checksum = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise DataError(f"image {row} does not exist; there are {len(self)}, counted from 0")
        if not self.paths[row]:
            raise DataError(f"{self.rows[row]} has no image, only text; leave it out where pixels are needed")
        try:
            return decode_image(self.source.read(self.paths[row]), self.paths[row])
        except DataError as error:
            raise DataError(f"{self.rows[row]}: {error}") from error
