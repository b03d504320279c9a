"""Indiana University chest X-ray reports: the XML of the collection, and the copy that a package carries.

3,955 reports in English (Demner-Fushman et al., JAMIA 2016; CC BY-NC-ND 4.0, de-identified by the publisher) lie in
the package torchxrayvision. They are read there, in memory, whenever they are needed: nothing is copied or written.

Which section is the text decides what is measured (the project's incongruent specification, section 7): the labels
are codes that people gave after reading findings and impression, so these two all but state them. The indication was
written before the images were read. It is the honest text and the default everywhere.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import itertools
import os
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pandas as pd

from datasets.import_chest import NIH_LABELS
from datasets.imported import parse_xml
from datasets.records import DataError, Manifest
from datasets.source import ZipSource, shown
from datasets.splits import hash_split

Section = Literal["indication", "findings", "impression"]
SECTIONS: tuple[Section, ...] = get_args(Section)

PACKAGE = "torchxrayvision"
ARCHIVE = "data/NLMCXR_reports.tgz"
SITE = "indiana"
MAX_XML_BYTES = 2**20
MAX_ARCHIVE_BYTES = 256 * 2**20

# Beginnings of words in the collection's MeSH codes ("Thickening/pleura/apical"); any of them makes the label present.
MESH: Mapping[str, tuple[str, ...]] = {
    "Atelectasis": ("atelectas",),
    "Cardiomegaly": ("cardiomegaly",),
    "Effusion": ("pleural effusion",),
    "Infiltration": ("infiltrate",),
    "Mass": ("mass",),
    "Nodule": ("nodule",),
    "Pneumonia": ("pneumonia",),
    "Pneumothorax": ("pneumothorax", "hydropneumothorax"),
    "Consolidation": ("consolidation",),
    "Edema": ("pulmonary edema",),
    "Emphysema": ("emphysema",),
    "Fibrosis": ("fibrosis",),
    "Pleural_Thickening": ("thickening/pleura", "pleura/thickening"),
    "Hernia": ("hernia",),
}


@dataclass(frozen=True)
class ChestReport:
    """One report: its number in the collection (``CXR1``), its text by section, its codes, its films' names."""

    number: str
    sections: Mapping[Section, str]
    mesh: tuple[str, ...]
    images: tuple[str, ...]


@dataclass(frozen=True)
class NoImages:
    """Images of a manifest that has only text: ``count`` rows, none of which can be read."""

    count: int
    checksum: str = hashlib.sha256(b"no images").hexdigest()

    def __len__(self) -> int:
        return self.count

    def read(self, row: int) -> np.ndarray:
        """Raises DataError."""
        raise DataError(f"row {row} has no image, only text; leave it out where pixels are needed")


def indiana(
    labels: Sequence[str] | None = None, *, section: Section = "indication", wheel: str | Path | None = None
) -> Manifest:
    """The packaged reports as a manifest of text only: one site, ``indiana``, the 14 NIH labels, no images.

    ``labels`` is the federation's list: the 14 names in any order. ``wheel`` names a downloaded torchxrayvision
    wheel; without it the installed package is used, which is found but never imported. Raises DataError for other
    labels, and where the package or its archive is absent.

    Choice: the publisher names no patients, so every report is a patient of its own; the split follows from its number
    (`splits.hash_split`), for no official one exists.
    Choice: a report whose section is blank is left out, since nothing of it remains: 90 of 3,955 have no indication.
    Choice: a label without its code is absent, since the coders read the whole report.
    """
    chosen = NIH_LABELS if labels is None else tuple(labels)
    if sorted(chosen) != sorted(NIH_LABELS):
        raise DataError(
            f"the Indiana reports have the labels {list(NIH_LABELS)}, in any order; got {list(chosen)}. "
            "For other lists name them as a source of a union"
        )
    archive = reports_archive(wheel)
    reports = read_archive(archive, Path(ARCHIVE).name)
    targets = mesh_marks(reports)[:, [NIH_LABELS.index(label) for label in chosen]]
    texts = [report.sections[section] for report in reports]
    numbers = [report.number for report in reports]
    table = pd.DataFrame(
        {
            "image": "",
            "report": texts,
            "patient": numbers,
            "study": numbers,
            "site": SITE,
            "time": "",
            "split": hash_split(numbers),
            "label_source": "reviewed",
            "text_kind": section,
            "line": np.arange(1, len(reports) + 1),
        }
    )
    kept = np.flatnonzero(table["report"] != "")
    if not len(kept):
        raise DataError(f"none of the {len(reports)} Indiana reports has the section {section!r}; choose another")
    digest = hashlib.sha256("\x1f".join([section, *chosen]).encode())
    digest.update(archive)
    table = table.iloc[kept].reset_index(drop=True)
    return Manifest(chosen, "multilabel", table, targets[kept], NoImages(len(kept)), digest.hexdigest())


def reports_archive(wheel: str | Path | None = None) -> bytes:
    """The bytes of ``NLMCXR_reports.tgz`` in a torchxrayvision wheel, or in the installed package; raises DataError."""
    return _from_package() if wheel is None else _from_wheel(Path(wheel))


def read_archive(data: bytes, name: str) -> list[ChestReport]:
    """Every report in the bytes of ``NLMCXR_reports.tgz``, by number; raises DataError for damage and odd XML."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            files = [member for member in archive if member.isfile() and member.name.endswith(".xml")]
            large = [member.name for member in files if member.size > MAX_XML_BYTES]
            if large or sum(member.size for member in files) > MAX_ARCHIVE_BYTES:
                raise DataError(f"{name} holds files too large to be reports ({large[:1]}); download it again")
            texts = {member.name: archive.extractfile(member).read() for member in files}
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name} is no readable archive of reports ({error}); download it again") from error
    return by_number((parse_report(text, member) for member, text in texts.items()), name)


def by_number(reports: Iterable[ChestReport], name: str) -> list[ChestReport]:
    """The reports in the order of their numbers; raises DataError for none at all and for a number used twice."""
    ordered = sorted(reports, key=lambda report: (len(report.number), report.number))
    if not ordered:
        raise DataError(f"{name} holds no reports (.xml); give the collection as it was published")
    for one, other in itertools.pairwise(ordered):
        if one.number == other.number:
            raise DataError(f"{name} holds the report {shown(one.number)} twice; remove one")
    return ordered


def parse_report(data: bytes, name: str) -> ChestReport:
    """One XML file of the collection; raises DataError for damage, a DTD, entities, and a report without number."""
    root = parse_xml(data, name, "these reports")
    number = root.find("uId")
    if number is None or not number.get("id", "").strip():
        raise DataError(f'{name} has no report number (<uId id="CXR1"/>); is it a report of this collection?')
    texts = {part.get("Label", "").lower(): " ".join((part.text or "").split()) for part in root.iter("AbstractText")}
    return ChestReport(
        number.get("id", "").strip(),
        {section: texts.get(section, "") for section in SECTIONS},
        tuple((code.text or "").strip().lower() for code in root.iter("major")),
        tuple(image.get("id", "").strip() for image in root.iter("parentImage")),
    )


def mesh_marks(reports: Sequence[ChestReport]) -> np.ndarray:
    """Labels from the codes, ``(n, 14) int8`` (1 present, 0 absent) in the order of ``NIH_LABELS``; see ``MESH``."""
    codes = pd.Series(["\n".join(report.mesh) for report in reports], dtype=str)
    patterns = (rf"\b(?:{'|'.join(map(re.escape, MESH[label]))})" for label in NIH_LABELS)
    return np.stack([codes.str.contains(pattern).to_numpy(dtype=np.int8) for pattern in patterns], axis=1)


def _from_wheel(wheel: Path) -> bytes:
    if not wheel.is_file():
        raise DataError(f"the wheel {wheel} does not exist; download {PACKAGE} without its dependencies")
    source = ZipSource(wheel)
    # A wheel holds the package's folder and a .dist-info beside it, so the names keep the package's.
    if not source.has(f"{PACKAGE}/{ARCHIVE}"):
        raise DataError(f"{wheel.name} does not hold {PACKAGE}/{ARCHIVE}; use the wheel of {PACKAGE} 1.5.7")
    return source.read(f"{PACKAGE}/{ARCHIVE}", max_bytes=MAX_ARCHIVE_BYTES)


def _from_package() -> bytes:
    # Found, not imported: the package's own imports are heavy, and its archive is a file beside them.
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations or not hasattr(found.loader, "get_data"):
        raise DataError(
            f"the Indiana reports lie in the package {PACKAGE}, which is not installed; install the extra "
            "'indiana' (torchxrayvision 1.5.7), or name its wheel as the data root"
        )
    path = os.path.join(next(iter(found.submodule_search_locations)), *ARCHIVE.split("/"))
    try:
        return found.loader.get_data(path)
    except OSError as error:
        raise DataError(f"the installed {PACKAGE} has no {ARCHIVE}; install version 1.5.7") from error
