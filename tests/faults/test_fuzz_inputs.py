"""A thousand damaged manifests, images and DICOM files: each is read right or refused with a DataError.

Damage is drawn from a seed: flipped bits, cuts, repeats, insertions of values that break parsers. Whatever else
escapes (a struct error, a hang, an allocation of the size that a header claims) fails the case it came from.
"""

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from datasets.images import decode_image
from datasets.manifest import read_manifest
from datasets.records import DataError

CASES = {"manifest": 250, "sidecar": 50, "parquet": 50, "archive": 50, "array": 50, "image": 350, "dicom": 200}
assert sum(CASES.values()) == 1000

GREY = np.arange(256, dtype=np.uint8).reshape(16, 16)
BINARY = [b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xff" * 8, b"\x7f\xff\xff\xff", b"\xc3\x28", b"\xd6\xd0"]
TEXT = [
    b"-1",
    b"nan",
    b"1e999",
    b"9" * 40,
    b'"',
    b"\n",
    b"\r",
    b",",
    b"|",
    b"../",
    b"/",
    b"\\",
    b"label:",
    b"train",
    b"{",
]
NASTY = BINARY + TEXT
INJURIES = {"flip": 0.4, "overwrite": 0.25, "insert": 0.2, "delete": 0.07, "repeat": 0.04, "cut": 0.04}
TABLE = b"image,patient,site,split,report,label:A,label:B\na.png,p1,s,train,ok,1,0\nb.png,p2,s,test,,,-1\n"
SIDECAR = {"labels": ["A", "B"], "task": "multilabel", "columns": {"image": "image"}, "site": "s", "encoding": "utf-8"}


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """The bytes after one or a few random injuries; most are small, so that parsers are reached behind the headers."""
    for _ in range(rng.geometric(0.8)):
        kind = rng.choice(list(INJURIES), p=list(INJURIES.values()))
        place, length = int(rng.integers(0, len(data) + 1)), int(rng.integers(1, 9))
        before, after = data[:place], data[place:]
        if kind == "flip" and after:
            data = before + bytes([after[0] ^ 1 << int(rng.integers(0, 8))]) + after[1:]
        elif kind == "overwrite":
            data = before + rng.bytes(length) + after[length:]
        elif kind == "insert":
            data = before + NASTY[rng.integers(0, len(NASTY))] + after
        elif kind == "delete":
            data = before + after[length:]
        elif kind == "repeat":
            data = before + after[: 4 * length] + after
        elif kind == "cut":
            data = before
    return data


def encoded(array: np.ndarray, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, kind, **options)
    return buffer.getvalue()


def saved(save: Callable[..., None], *content: object, **named: object) -> bytes:
    buffer = io.BytesIO()
    save(buffer, *content, **named)
    return buffer.getvalue()


PICTURES = [
    encoded(GREY, "PNG"),
    encoded(GREY.astype(np.uint16) * 200, "PNG"),
    encoded(np.stack([GREY] * 3, -1), "PNG"),
    encoded(GREY, "JPEG"),
    encoded(np.stack([GREY] * 3, -1), "JPEG", exif=bytes(Image.Exif())),
    encoded(GREY / np.float32(255), "TIFF"),
    encoded(GREY, "TIFF", compression="tiff_lzw"),
    saved(np.save, GREY),
    saved(np.save, GREY / 255),
]


def check_manifest(root: Path) -> None:
    manifest = read_manifest(root)
    assert manifest.targets.dtype == np.int8 and manifest.targets.shape == (len(manifest), len(manifest.labels))
    assert set(np.unique(manifest.targets)) <= {-1, 0, 1} and len(manifest.images) == len(manifest) > 0
    assert set(manifest.table["split"]) <= {"train", "val", "test"}
    for row in range(len(manifest)):
        check_pixels(manifest.images.read(row))


def check_pixels(pixels: np.ndarray) -> None:
    assert pixels.dtype == np.uint8 and pixels.size
    assert pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)


def manifest_case(root: Path, rng: np.random.Generator) -> None:
    (root / "a.png").write_bytes(PICTURES[0])
    (root / "b.png").write_bytes(PICTURES[1])
    encoding = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "gbk"][rng.integers(0, 5)]
    (root / "manifest.csv").write_bytes(damaged(TABLE.decode().replace("ok", "正常").encode(encoding), rng))
    check_manifest(root)


def sidecar_case(root: Path, rng: np.random.Generator) -> None:
    for name in ("a.png", "b.png"):
        (root / name).write_bytes(PICTURES[0])
    (root / "manifest.csv").write_bytes(TABLE)
    (root / "manifest.json").write_bytes(damaged(json.dumps(SIDECAR, indent=8).encode(), rng))
    check_manifest(root)


def parquet_case(root: Path, rng: np.random.Generator) -> None:
    (root / "a.png").write_bytes(PICTURES[0])
    frame = pd.DataFrame({"image": ["a.png"], "patient": [1], "label:A": [1.0], "report": ["text"]})
    (root / "manifest.parquet").write_bytes(damaged(saved(lambda file: frame.to_parquet(file)), rng))
    check_manifest(root)


def archive_case(root: Path, rng: np.random.Generator) -> None:
    with zipfile.ZipFile(root / "whole.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {"manifest.csv": TABLE, "a.png": PICTURES[0], "b.png": PICTURES[3]}.items():
            archive.writestr(name, data)
    (root / "site.zip").write_bytes(damaged((root / "whole.zip").read_bytes(), rng))
    check_manifest(root / "site.zip")


def array_case(root: Path, rng: np.random.Generator) -> None:
    arrays = {"train_images": np.stack([GREY] * 3), "train_labels": np.arange(3)[:, None]}
    (root / "set.npz").write_bytes(damaged(saved(np.savez, **arrays), rng))
    check_manifest(root / "set.npz")


def image_case(root: Path, rng: np.random.Generator) -> None:
    check_pixels(decode_image(damaged(PICTURES[rng.integers(0, len(PICTURES))], rng), "x"))


def dicom_case(root: Path, rng: np.random.Generator) -> None:
    # The preamble holds nothing; damage there would only test that zeros are skipped.
    data = dicom_file(rng)
    check_pixels(decode_image(data[:132] + damaged(data[132:], rng), "x"))


def dicom_file(rng: np.random.Generator) -> bytes:
    """A small valid file, uncompressed or run-length encoded, with one of the presentations that DICOM offers."""
    import pydicom
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, ImplicitVRLittleEndian, RLELossless

    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    syntax = [ExplicitVRLittleEndian, ImplicitVRLittleEndian, RLELossless][rng.integers(0, 3)]
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian if syntax is RLELossless else syntax
    dataset.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.1"
    dataset.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    dataset.PatientID = "p"
    dataset.Rows, dataset.Columns = GREY.shape
    dataset.SamplesPerPixel, dataset.PixelRepresentation = 1, int(rng.integers(0, 2))
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 16, 12, 11
    dataset.PhotometricInterpretation = ["MONOCHROME1", "MONOCHROME2"][rng.integers(0, 2)]
    dataset.PixelData = (GREY.astype(np.uint16) * 7).tobytes()
    dataset["PixelData"].VR = "OW"
    if rng.integers(0, 2):
        dataset.RescaleSlope, dataset.RescaleIntercept = 2, -100
    if rng.integers(0, 2):
        dataset.WindowCenter, dataset.WindowWidth = [500, 40], [900, 80]
        dataset.VOILUTFunction = ["LINEAR", "LINEAR_EXACT", "SIGMOID"][rng.integers(0, 3)]
    elif rng.integers(0, 2):
        item = Dataset()
        item.add_new("LUTDescriptor", "US", [4, 0, 8])
        item.add_new("LUTData", "US", [0, 50, 100, 255])
        dataset.VOILUTSequence = [item]
    if syntax is RLELossless:
        dataset.compress(RLELossless)
    return saved(lambda file: pydicom.dcmwrite(file, dataset, enforce_file_format=True))


RUNNERS = {
    "manifest": manifest_case,
    "sidecar": sidecar_case,
    "parquet": parquet_case,
    "archive": archive_case,
    "array": array_case,
    "image": image_case,
    "dicom": dicom_case,
}


@pytest.mark.parametrize("kind", CASES)
def test_undamaged_input_is_read(kind, tmp_path, monkeypatch):
    if kind == "dicom":
        pytest.importorskip("pydicom", reason="the extra 'dicom' (pydicom) is not installed")
    monkeypatch.setitem(globals(), "damaged", lambda data, rng: data)
    RUNNERS[kind](tmp_path, np.random.default_rng(1))


# Decoders warn about what they then refuse or repair; here that is the point.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CASES)
def test_damaged_input_is_read_right_or_refused(kind, tmp_path):
    if kind == "dicom":
        pytest.importorskip("pydicom", reason="the extra 'dicom' (pydicom) is not installed")
    refused = 0
    for case in range(CASES[kind]):
        root = tmp_path / str(case)
        root.mkdir()
        try:
            RUNNERS[kind](root, np.random.default_rng([case, len(kind)]))
        except DataError as error:
            assert str(error)
            refused += 1
        except Exception as error:
            error.add_note(f"case {case} of {kind}")
            raise
    # Some must break and some survive, or the damage tests nothing.
    assert 0 < refused < CASES[kind]
