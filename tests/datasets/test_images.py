"""Pixels from PNG, JPEG, TIFF and .npy: right values, stated windows, clear refusals."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets.images import ArrayImages, FileImages, convert_pixels, decode_image
from datasets.records import DataError
from datasets.source import FolderSource

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (5, 7), dtype=np.uint8)
RGB = RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8)


def encoded(array, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image = array if isinstance(array, Image.Image) else Image.fromarray(array)
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("array", [GREY, RGB], ids=["grey", "rgb"])
def test_lossless_eight_bit_files_give_their_pixels(kind, array):
    pixels = decode_image(encoded(array, kind), "x")
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, array)


@pytest.mark.parametrize("array", [GREY, RGB], ids=["grey", "rgb"])
def test_jpeg_gives_what_pillow_decodes(array):
    data = encoded(array, "JPEG")
    np.testing.assert_array_equal(decode_image(data, "x"), np.asarray(Image.open(io.BytesIO(data))))


def test_kind_is_read_from_the_bytes_not_the_name():
    np.testing.assert_array_equal(decode_image(encoded(GREY), "x.jpg"), GREY)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize(("top", "depth"), [(255, 8), (256, 10), (4095, 12), (4096, 14), (16384, 16), (65535, 16)])
def test_sixteen_bit_grey_uses_the_smallest_depth_that_holds_it(kind, top, depth):
    values = np.linspace(0, top, 35).round().astype(np.uint16).reshape(5, 7)
    # The window stated in datasets.images: [0, 2**depth - 1] to [0, 255], rounded half to even.
    expected = np.rint(values / (2**depth - 1) * 255)
    np.testing.assert_array_equal(decode_image(encoded(values, kind), "x"), expected)


def test_sixteen_bit_copy_of_an_eight_bit_image_reads_as_the_original():
    values = np.append(GREY, 255).astype(np.uint16)[None] * 257
    np.testing.assert_array_equal(decode_image(encoded(values), "x")[0, :-1], GREY.ravel())


def test_palette_alpha_and_bilevel_are_read_as_stated():
    palette = Image.fromarray(RGB).convert("P")
    np.testing.assert_array_equal(decode_image(encoded(palette), "x"), np.asarray(palette.convert("RGB")))
    alpha = np.concatenate([RGB, np.full((5, 7, 1), 3, np.uint8)], axis=2)
    np.testing.assert_array_equal(decode_image(encoded(alpha), "x"), RGB)
    bilevel = decode_image(encoded(Image.fromarray(GREY > 99)), "x")
    np.testing.assert_array_equal(bilevel, (GREY > 99) * 255)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_exif_orientation_is_applied(kind, orientation):
    # How a viewer shows a stored array, from the EXIF table: rows and columns of the visual image.
    shown = {1: GREY, 2: GREY[:, ::-1], 3: GREY[::-1, ::-1], 4: GREY[::-1], 5: GREY.T}
    shown |= {6: GREY[::-1].T, 7: GREY[::-1, ::-1].T, 8: GREY[:, ::-1].T}
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(decode_image(encoded(GREY, kind, exif=exif), "x"), shown[orientation])


def test_float_images_in_zero_to_one_are_read():
    values = np.linspace(0, 1, 35, dtype=np.float32).reshape(5, 7)
    expected = np.rint(values.astype(float) * 255)
    np.testing.assert_array_equal(decode_image(encoded(values, "TIFF"), "x"), expected)
    np.testing.assert_array_equal(decode_image(npy(values.astype(np.float64)), "x"), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinite_pixels_are_refused_and_counted(bad):
    values = np.zeros((5, 7), np.float32)
    values[2, 3] = values[0, 0] = bad
    for data in (encoded(values, "TIFF"), npy(values)):
        with pytest.raises(DataError, match="scan has 2 pixels that are NaN or infinite"):
            decode_image(data, "scan")


def test_float_images_without_a_stated_range_are_refused():
    with pytest.raises(DataError, match=r"float pixels from 0 to 255; scale them"):
        decode_image(npy(np.array([[0.0, 255.0]])), "x")


def test_npy_arrays_are_read_or_refused_by_shape_and_type():
    np.testing.assert_array_equal(decode_image(npy(RGB), "x"), RGB)
    np.testing.assert_array_equal(decode_image(npy(GREY[:, :, None]), "x"), GREY)
    np.testing.assert_array_equal(decode_image(npy(GREY > 9), "x"), (GREY > 9) * 255)
    wrong = [
        np.zeros(3),
        np.zeros((2, 2, 4)),
        np.zeros((0, 4)),
        np.full((2, 2), -1),
        np.array([["a"]]),
        np.zeros((1, 1), complex),
    ]
    for array in wrong:
        with pytest.raises(DataError):
            decode_image(npy(array), "x")
    with pytest.raises(DataError, match="npy"):
        decode_image(npy(np.array([{"run": "me"}], dtype=object)), "x")


def test_truncated_and_corrupt_files_are_refused_by_name():
    big = RNG.integers(0, 256, (64, 64), dtype=np.uint8)
    for kind in ("PNG", "JPEG", "TIFF"):
        data = encoded(big, kind)
        for end in (12, len(data) // 2, len(data) - 40):
            with pytest.raises(DataError, match=r"a/b\.img"):
                decode_image(data[:end], "a/b.img")
    for data in (b"", b"GIF89a", b"<svg/>", b"\x93NUMPY\x01\x00\xff\xff{"):
        with pytest.raises(DataError, match=r"a/b\.img"):
            decode_image(data, "a/b.img")


def test_decompression_bombs_are_refused_before_they_are_decoded():
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    with pytest.raises(DataError, match="x"):
        decode_image(b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + bytes(4), "x")
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (10_000, 10_000), (0, 0))
    with pytest.raises(DataError, match="10000 x 10000 pixels"):
        decode_image(npy(huge), "x")


def test_tiff_with_several_pages_is_refused():
    data = encoded(GREY, "TIFF", save_all=True, append_images=[Image.fromarray(GREY)])
    with pytest.raises(DataError, match="several pages"):
        decode_image(data, "x")


def test_convert_resizes_with_antialias_and_changes_channels():
    # Bilinear with antialias halves a 2 x 2 checkerboard to its mean; without it, it would pick one colour.
    checkers = np.indices((64, 64)).sum(0) % 2 * np.uint8(200)
    inner = convert_pixels(checkers.astype(np.uint8), size=16, channels=1)[2:-2, 2:-2]
    assert np.abs(inner.astype(int) - 100).max() <= 1
    assert convert_pixels(GREY, size=9, channels=3).shape == (9, 9, 3)
    np.testing.assert_array_equal(convert_pixels(GREY[:5, :5], size=5, channels=3), np.stack([GREY[:5, :5]] * 3, -1))
    # ITU-R 601: 0.299 R + 0.587 G + 0.114 B
    luma = RGB[:5, :5] @ np.array([0.299, 0.587, 0.114])
    assert np.abs(convert_pixels(RGB[:5, :5], size=5, channels=1)[..., 0] - luma).max() <= 1


def test_array_images_read_copies_and_hash_their_content():
    images = ArrayImages(np.stack([RGB, RGB[::-1]]))
    assert len(images) == 2
    read = images.read(1)
    np.testing.assert_array_equal(read, RGB[::-1])
    read[:] = 0
    np.testing.assert_array_equal(images.read(1), RGB[::-1])
    assert images.checksum == ArrayImages(np.stack([RGB, RGB[::-1]])).checksum
    assert images.checksum != ArrayImages(np.stack([RGB[::-1], RGB])).checksum
    assert ArrayImages(GREY[None, :, :, None]).read(0).shape == (5, 7)
    assert len(ArrayImages(np.zeros((0, 4, 4), np.uint8))) == 0
    for row in (-1, 2):
        with pytest.raises(DataError):
            images.read(row)
    for wrong in (np.zeros((2, 2, 2)), np.zeros((2, 2), np.uint8), np.zeros((1, 2, 2, 4), np.uint8)):
        with pytest.raises(DataError):
            ArrayImages(wrong)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(encoded(GREY))
    (tmp_path / "b.png").write_bytes(encoded(RGB)[:60])
    return tmp_path


def test_file_images_read_and_name_file_and_row(root):
    images = FileImages(FolderSource(root), ["a.png", "b.png", ""], ["m.csv row 2", "m.csv row 3", "m.csv row 4"])
    np.testing.assert_array_equal(images.read(0), GREY)
    with pytest.raises(DataError, match=r"m\.csv row 3: b\.png is a damaged"):
        images.read(1)
    with pytest.raises(DataError, match=r"m\.csv row 4 has no image"):
        images.read(2)
    with pytest.raises(DataError):
        images.read(3)


def test_file_images_refuse_missing_files_and_links_with_their_row(root):
    with pytest.raises(DataError, match=r"image 1: image 'c\.png' does not exist .*1 of 2 images are missing"):
        FileImages(FolderSource(root), ["a.png", "c.png"])
    (root / "out.png").symlink_to("/etc/hostname")
    with pytest.raises(DataError, match=r"image 0: 'out\.png' is a link that leads out"):
        FileImages(FolderSource(root), ["out.png"])


def test_file_images_checksum_changes_with_files_and_paths(root):
    def checksum(*paths: str) -> str:
        return FileImages(FolderSource(root), list(paths)).checksum

    before = checksum("a.png", "b.png")
    assert before == checksum("a.png", "b.png") != checksum("b.png", "a.png")
    (root / "b.png").write_bytes(b"other")
    assert checksum("a.png", "b.png") != before
