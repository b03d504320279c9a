"""DICOM pixels as a reading screen would show them: modality rescale, then VOI window, then MONOCHROME1 inversion.

The order is that of DICOM PS3.3 C.11 (grayscale transformations): window centre and width are stated in rescaled
units, and inversion belongs to the presentation. pydicom is the extra ``dicom`` and is imported when first needed.

Choice: the first VOI transformation counts; a VOI LUT goes before a window, as a LUT is the more exact statement.
Choice: with no VOI transformation the window is the image's own minimum to maximum, as viewers do.
Choice: one frame a file; colour as RGB or YBR with 8 bits; no overlays, no presentation states, no palette.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from datasets.images import check_size, stretch
from datasets.records import DataError
from datasets.source import shown

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

DEFLATED = b"1.2.840.10008.1.2.1.99"
META_BYTES = 4096


def decode_dicom(data: bytes, name: str) -> np.ndarray:
    """Pixels of a DICOM file (PS3.10, with preamble): uint8 ``(H, W)``, or ``(H, W, 3)`` for colour.

    Raises DataError naming ``name`` for damage, several frames, a compression nothing here decodes, and when
    pydicom is not installed.
    """
    try:
        import pydicom
    except ImportError as error:
        raise DataError(f"{name} is DICOM, which needs pydicom; install the extra: pip install '.[dicom]'") from error
    # pydicom inflates such a file without a limit before anything of it can be checked.
    if DEFLATED in data[:META_BYTES]:
        raise DataError(f"{name} is a deflated DICOM file; convert it to explicit VR little endian")
    try:
        dataset = pydicom.dcmread(io.BytesIO(data))
        _check_frame(dataset, name)
        return _present(_stored_pixels(dataset, name), dataset, name)
    except DataError:
        raise
    except Exception as error:  # pydicom and its codecs raise whatever damaged elements lead to
        raise DataError(f"{name} is a damaged DICOM file ({error}); export it again") from error


def _check_frame(dataset: Dataset, name: str) -> None:
    if "Rows" not in dataset or "Columns" not in dataset:
        raise DataError(f"{name} has no image (Rows and Columns are absent); is it a report or a structured object?")
    check_size(int(dataset.Rows), int(dataset.Columns), name)
    frames = int(dataset.get("NumberOfFrames") or 1)
    if frames != 1:
        raise DataError(f"{name} has {frames} frames; export one frame a file")


def _stored_pixels(dataset: Dataset, name: str) -> np.ndarray:
    from pydicom.pixels import pixel_array

    syntax = dataset.file_meta.TransferSyntaxUID
    try:
        return pixel_array(dataset, index=0)
    except Exception as error:  # a missing codec and a damaged stream fail alike
        if not syntax.is_compressed:
            raise
        raise DataError(
            f"{name} is compressed as {shown(syntax.name)} and cannot be decoded ({shown(str(error), 160)}); "
            "convert it to explicit VR little endian, or install pylibjpeg with its plugins"
        ) from error


def _present(stored: np.ndarray, dataset: Dataset, name: str) -> np.ndarray:
    """Stored values ``(H, W)`` or ``(H, W, 3)`` as uint8 of the same shape."""
    photometric = str(dataset.get("PhotometricInterpretation", "")).strip().upper()
    is_colour = stored.ndim == 3 and stored.shape[2] == 3 and photometric.startswith(("RGB", "YBR"))
    if is_colour and stored.dtype == np.uint8:
        return np.ascontiguousarray(stored)
    if stored.ndim != 2 or photometric not in ("MONOCHROME1", "MONOCHROME2"):
        raise DataError(
            f"{name} has photometric interpretation {shown(photometric)} with {stored.dtype} {stored.shape}; "
            "readable are MONOCHROME1, MONOCHROME2 and 8-bit RGB or YBR"
        )
    rescaled = rescale(stored, dataset, name)
    if not np.isfinite(rescaled).all():
        raise DataError(f"{name} has pixels that are NaN or infinite after its rescale; check slope and intercept")
    grey = window(rescaled, dataset, name)
    return 255 - grey if photometric == "MONOCHROME1" else grey


def rescale(stored: np.ndarray, dataset: Dataset, name: str) -> np.ndarray:
    """Modality values, float64 ``(H, W)``: through the Modality LUT or slope and intercept, whichever is present."""
    if dataset.get("ModalityLUTSequence"):
        values, _ = _look_up(stored, dataset.ModalityLUTSequence[0], dataset, name)
        return values
    slope, intercept = dataset.get("RescaleSlope"), dataset.get("RescaleIntercept")
    return stored.astype(np.float64) * (1.0 if slope is None else float(slope)) + float(intercept or 0.0)


def window(values: np.ndarray, dataset: Dataset, name: str) -> np.ndarray:
    """uint8 ``(H, W)`` through the first VOI transformation, PS3.3 C.11.2: LUT, LINEAR, LINEAR_EXACT or SIGMOID."""
    if dataset.get("VOILUTSequence"):
        mapped, top = _look_up(np.rint(values), dataset.VOILUTSequence[0], dataset, name)
        return stretch(mapped, 0.0, top)
    center, width = _first(dataset.get("WindowCenter")), _first(dataset.get("WindowWidth"))
    if center is None or width is None:
        return stretch(values, float(values.min()), float(values.max()))
    function = str(dataset.get("VOILUTFunction") or "LINEAR").strip().upper()
    if not (np.isfinite(center) and np.isfinite(width) and width > 0):
        raise DataError(f"{name} has window centre {center:g} and width {width:g}; the width must be above 0")
    if function == "SIGMOID":
        # The exponent is bounded because exp overflows beyond 709; at 50 the curve is flat already.
        return stretch(1 / (1 + np.exp(np.clip(-4 * (values - center) / width, -50, 50))), 0.0, 1.0)
    if function == "LINEAR_EXACT":
        return stretch(values, center - width / 2, center + width / 2)
    if function == "LINEAR":
        # C.11.2.1.2.1 counts the width in whole steps: 255 lies at c - 0.5 + (w - 1) / 2. Widths below 1 are a step.
        half = max(width - 1, 0.0) / 2
        return stretch(values, center - 0.5 - half, center - 0.5 + half)
    raise DataError(f"{name} has the VOI LUT function {shown(function)}; DICOM has LINEAR, LINEAR_EXACT and SIGMOID")


def _first(value: object) -> float | None:
    if value is None or value == "":
        return None
    # A several-valued element (a choice of windows) is a pydicom MultiValue; the first is the preferred one.
    if not isinstance(value, (str, int, float)) and hasattr(value, "__len__"):
        return float(value[0]) if len(value) else None
    return float(value)


def _look_up(values: np.ndarray, item: Dataset, dataset: Dataset, name: str) -> tuple[np.ndarray, float]:
    """Values through a DICOM lookup table, float64, and the top of its output range (PS3.3 C.11.1.1).

    Values below the table take its first entry, values beyond it the last.
    """
    entries, first, bits = (int(part) for part in item.LUTDescriptor)
    entries = entries or 2**16
    if first >= 2**15 and values.min() < 0:
        first -= 2**16  # read as unsigned although the image is signed
    raw = item.LUTData
    if isinstance(raw, bytes):
        order = "<" if dataset.original_encoding[1] else ">"
        table = np.frombuffer(raw, dtype=np.uint8 if len(raw) < 2 * entries else f"{order}u2")
    else:
        table = np.atleast_1d(np.asarray(raw))
    if not 1 <= bits <= 16 or len(table) < entries:
        raise DataError(
            f"{name} has a lookup table that states {entries} entries of {bits} bits but holds {len(table)}"
        )
    index = np.clip(values - first, 0, entries - 1).astype(np.int64)
    return table[index].astype(np.float64), float(2**bits - 1)
