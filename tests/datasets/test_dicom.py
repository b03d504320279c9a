"""DICOM: rescale, then VOI, then MONOCHROME1, each checked against the formulas of PS3.3 written out slowly."""

import io
import math
import sys

import numpy as np
import pytest

from datasets.images import decode_image
from datasets.records import DataError

pydicom = pytest.importorskip("pydicom", reason="the extra 'dicom' (pydicom) is not installed")
from pydicom.dataset import Dataset, FileMetaDataset  # noqa: E402
from pydicom.encaps import encapsulate  # noqa: E402
from pydicom.uid import (  # noqa: E402
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    JPEGBaseline8Bit,
    JPEGLSLossless,
    RLELossless,
)

STORED = np.arange(0, 4096, 118, dtype=np.uint16).reshape(5, 7)


def dicom(
    pixels: np.ndarray = STORED, *, syntax=ExplicitVRLittleEndian, data: bytes | None = None, **elements
) -> bytes:
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.1"
    dataset.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    dataset.Rows, dataset.Columns = pixels.shape[:2]
    dataset.SamplesPerPixel = 3 if pixels.ndim == 3 else 1
    dataset.PhotometricInterpretation = "RGB" if pixels.ndim == 3 else "MONOCHROME2"
    if pixels.ndim == 3:
        dataset.PlanarConfiguration = 0
    dataset.BitsAllocated = 8 * pixels.dtype.itemsize
    dataset.BitsStored = 8 if pixels.dtype.itemsize == 1 else 16
    dataset.HighBit = dataset.BitsStored - 1
    dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
    dataset.PixelData = pixels.tobytes() if data is None else data
    dataset["PixelData"].VR = "OB" if pixels.dtype.itemsize == 1 or data is not None else "OW"
    for name, value in elements.items():
        if value is None:
            delattr(dataset, name)
        else:
            setattr(dataset, name, value)
    buffer = io.BytesIO()
    pydicom.dcmwrite(buffer, dataset, enforce_file_format=True)
    return buffer.getvalue()


def lut(first: int, bits: int, table: list[int]) -> Dataset:
    item = Dataset()
    item.add_new("LUTDescriptor", "US", [len(table), first, bits])
    item.add_new("LUTData", "US", table)
    return item


def linear(x: float, c: float, w: float) -> float:
    """PS3.3 C.11.2.1.2.1 with the output range 0 to 255."""
    if x <= c - 0.5 - (w - 1) / 2:
        return 0
    if x > c - 0.5 + (w - 1) / 2:
        return 255
    return ((x - (c - 0.5)) / (w - 1) + 0.5) * 255


def exact(x: float, c: float, w: float) -> float:
    """PS3.3 C.11.2.1.3.2."""
    if x <= c - w / 2:
        return 0
    return 255 if x > c + w / 2 else ((x - c) / w + 0.5) * 255


def sigmoid(x: float, c: float, w: float) -> float:
    """PS3.3 C.11.2.1.3.1."""
    return 255 / (1 + math.exp(-4 * (x - c) / w))


@pytest.mark.parametrize(
    ("function", "formula"), [(None, linear), ("LINEAR", linear), ("LINEAR_EXACT", exact), ("SIGMOID", sigmoid)]
)
@pytest.mark.parametrize("photometric", ["MONOCHROME2", "MONOCHROME1"])
def test_rescale_then_window_then_inversion(function, formula, photometric):
    extra = {"VOILUTFunction": function} if function else {}
    data = dicom(
        PhotometricInterpretation=photometric,
        RescaleSlope=0.5,
        RescaleIntercept=-100,
        WindowCenter=[900, 10],
        WindowWidth=[700, 10],
        **extra,
    )
    expected = np.array([[formula(x * 0.5 - 100, 900, 700) for x in row] for row in STORED.tolist()])
    if photometric == "MONOCHROME1":
        expected = 255 - expected
    # Half a grey level: the only difference may be the rounding to uint8.
    assert np.abs(decode_image(data, "x") - expected).max() <= 0.5 + 1e-6


def test_order_matters_a_window_before_the_rescale_would_give_black():
    pixels = decode_image(dicom(RescaleSlope=1, RescaleIntercept=-5000, WindowCenter=-3000, WindowWidth=4096), "x")
    assert np.ptp(pixels) > 240


def test_signed_values_keep_their_sign():
    stored = np.array([[-1000, 0, 1000]], dtype=np.int16)
    pixels = decode_image(dicom(stored, WindowCenter=0.5, WindowWidth=2001), "x")
    np.testing.assert_array_equal(pixels, [[0, 128, 255]])  # 127.5 rounds to the even 128


def test_voi_lut_goes_before_the_window_and_clamps_at_its_ends():
    stored = np.array([[0, 10, 11, 12, 13, 500]], dtype=np.uint16)
    data = dicom(stored, VOILUTSequence=[lut(10, 12, [0, 1000, 3000, 4095])], WindowCenter=5, WindowWidth=2)
    expected = np.rint(np.array([[0, 0, 1000, 3000, 4095, 4095]]) / 4095 * 255)
    np.testing.assert_array_equal(decode_image(data, "x"), expected)


def test_modality_lut_takes_the_place_of_slope_and_intercept():
    stored = np.array([[0, 1, 2, 3]], dtype=np.uint16)
    data = dicom(stored, ModalityLUTSequence=[lut(0, 16, [0, 300, 200, 100])], WindowCenter=150.5, WindowWidth=301)
    np.testing.assert_array_equal(decode_image(data, "x"), [[0, 255, 170, 85]])


def test_without_any_window_the_image_spans_its_own_range():
    stored = np.array([[1000, 1500, 2000]], dtype=np.uint16)
    np.testing.assert_array_equal(decode_image(dicom(stored), "x"), [[0, 128, 255]])
    np.testing.assert_array_equal(decode_image(dicom(stored * 0 + 7), "x"), [[0, 0, 0]])


def test_colour_is_returned_as_stored():
    rgb = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    np.testing.assert_array_equal(decode_image(dicom(rgb), "x"), rgb)


def test_run_length_and_jpeg_are_decoded():
    dataset = pydicom.dcmread(io.BytesIO(dicom()))
    dataset.compress(RLELossless)
    buffer = io.BytesIO()
    dataset.save_as(buffer)
    np.testing.assert_array_equal(decode_image(buffer.getvalue(), "x"), decode_image(dicom(), "x"))

    from PIL import Image

    grey = np.tile(np.arange(0, 256, 4, dtype=np.uint8), (64, 1))
    jpeg = io.BytesIO()
    Image.fromarray(grey).save(jpeg, "JPEG", quality=95)
    data = dicom(grey, syntax=JPEGBaseline8Bit, data=encapsulate([jpeg.getvalue()]), WindowCenter=128, WindowWidth=256)
    assert np.abs(decode_image(data, "x").astype(int) - grey).max() <= 3  # JPEG at quality 95


def test_compression_that_nothing_decodes_is_refused_with_a_way_out():
    data = dicom(syntax=JPEGLSLossless, data=encapsulate([b"\xff\xd8\xff\xf7garbage!"]))
    with pytest.raises(DataError, match=r"scan\.dcm is compressed as 'JPEG-LS.*explicit VR little endian"):
        decode_image(data, "scan.dcm")


@pytest.mark.parametrize(
    ("elements", "reason"),
    [
        ({"Rows": None}, "no image"),
        ({"Rows": 60000, "Columns": 60000}, "60000 x 60000 pixels"),
        ({"NumberOfFrames": 2}, "2 frames"),
        ({"PixelData": b"ab"}, "damaged"),
        ({"WindowCenter": 10, "WindowWidth": 0}, "must be above 0"),
        ({"WindowCenter": 10, "WindowWidth": 5, "VOILUTFunction": "CUBIC"}, "CUBIC"),
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "PALETTE COLOR"),
        ({"VOILUTSequence": [lut(0, 40, [1])]}, "lookup table"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(elements, reason):
    with pytest.raises(DataError, match=rf"(?s)scan\.dcm.*{reason}"):
        decode_image(dicom(**elements), "scan.dcm")


def test_deflated_file_is_refused_before_it_is_inflated():
    with pytest.raises(DataError, match="deflated"):
        decode_image(dicom(syntax=DeflatedExplicitVRLittleEndian), "x")


def test_truncated_file_is_refused():
    data = dicom()
    for end in (133, 200, len(data) // 2, len(data) - 3):
        with pytest.raises(DataError, match=r"scan\.dcm"):
            decode_image(data[:end], "scan.dcm")


def test_missing_pydicom_is_refused_with_the_extra_to_install(monkeypatch):
    data = dicom()
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(DataError, match=r"pip install '\.\[dicom\]'"):
        decode_image(data, "x")
