"""Importers of chest radiographs with their reports: MIMIC-CXR and Open-I (Indiana University).

Neither set may be passed on, so a person downloads it and names the folder. The manifest then holds one section of
each report, the indication unless asked for otherwise: the labels of both sets were read out of findings and
impression (the project's incongruent specification, section 7), so those two all but state them.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from datasets.import_chest import CHEXPERT_LABELS, NIH_LABELS, POLICY_CELLS, Policy, chexpert_marks, files_by_name
from datasets.imported import Imported
from datasets.indiana import (
    MAX_ARCHIVE_BYTES,
    MAX_XML_BYTES,
    ChestReport,
    Section,
    by_number,
    mesh_marks,
    parse_report,
    read_archive,
)
from datasets.labels import LABEL_PREFIX
from datasets.records import DataError
from datasets.source import MAX_TABLE_BYTES, FolderSource, Source, ZipSource, decode_text, shown
from datasets.tables import Table, parse_csv

MIMIC_TABLES: Mapping[str, tuple[str, ...]] = {
    "chexpert": ("subject_id", "study_id", *CHEXPERT_LABELS),
    "metadata": ("dicom_id", "subject_id", "study_id"),
    "split": ("dicom_id", "split"),
}
MIMIC_REPORTS = "mimic-cxr-reports"
MAX_REPORT_BYTES = 2**20
MIMIC_SPLITS = {"train": "train", "validate": "val", "test": "test"}

# A report has no fixed headings; these are the usual ones of each section.
HEADINGS: Mapping[Section, tuple[str, ...]] = {
    "indication": (
        "INDICATION",
        "CLINICAL INDICATION",
        "REASON FOR EXAM",
        "REASON FOR EXAMINATION",
        "HISTORY",
        "CLINICAL HISTORY",
        "CLINICAL INFORMATION",
    ),
    "findings": ("FINDINGS", "FINDINGS AND IMPRESSION"),
    "impression": ("IMPRESSION", "CONCLUSION", "FINDINGS AND IMPRESSION"),
}
_HEADING = re.compile(r"^[ \t]*([A-Z][A-Z /]*[A-Z])[ \t]*:", re.MULTILINE)


def import_mimic(
    src: Path, *, section: Section = "indication", uncertain: Policy = "unknown", blank: Policy = "unknown"
) -> Imported:
    """MIMIC-CXR-JPG with the reports of MIMIC-CXR: the 14 CheXpert labels, one sample a film.

    Read are ``mimic-cxr-2.0.0-chexpert``, ``-metadata`` and ``-split`` (``.csv`` or ``.csv.gz``, of any version),
    images as ``files/p10/p10000032/s50414267/NAME.jpg``, and reports as ``.../s50414267.txt`` below
    ``mimic-cxr-reports`` (folder or ``.zip``) or beside the images. The films of one study share its report and its
    ``study``. The labeller's -1 becomes ``uncertain``, a finding nobody mentions ``blank``. Raises DataError for a
    folder without the three tables, for films without a split, and for cells outside 1, 0, -1 and blank.

    Choice: reports may be absent, as for a site that holds images only; a study that was not labelled is unknown in
    all labels.
    Choice: all views are taken; ``ViewPosition`` stays a column.
    """
    source = FolderSource(src)
    marked, films, splits = (_mimic_table(source, kind) for kind in MIMIC_TABLES)
    study = films.frame["study_id"]
    marks = chexpert_marks(marked, {"-1": POLICY_CELLS[uncertain], "": POLICY_CELLS[blank]})
    marks.index = pd.Index(marked.frame["study_id"])
    _refuse_repeated(marked, "study_id")
    _refuse_repeated(splits, "dicom_id")
    marks = marks.reindex(study, fill_value="").reset_index(drop=True)

    patient = films.frame["subject_id"]
    folders = "files/p" + patient.str[:2] + "/p" + patient + "/s" + study
    known = pd.DataFrame(
        {
            "image": folders + "/" + films.frame["dicom_id"] + ".jpg",
            "report": _mimic_reports(source, folders, section),
            "patient": patient,
            "study": study,
            "split": _mimic_splits(films, splits),
        }
    )
    own = films.frame.drop(columns=["subject_id", "study_id"])
    return Imported(pd.concat([known, own, marks], axis=1), CHEXPERT_LABELS, label_source="auto")


def _mimic_table(source: FolderSource, kind: str) -> Table:
    pattern = re.compile(rf"mimic-cxr-[\d.]+-{kind}\.csv(\.gz)?")
    names = sorted(path.name for path in source.root.iterdir() if pattern.fullmatch(path.name))
    if not names:
        raise DataError(
            f"{source.root} has no mimic-cxr-2.0.0-{kind}.csv.gz; give the folder that holds the tables of "
            "MIMIC-CXR-JPG and its 'files'"
        )
    name = names[-1]
    data = source.read(name, max_bytes=MAX_TABLE_BYTES)
    table = parse_csv(_gunzip(data, name) if name.endswith(".gz") else data, name)
    missing = [column for column in MIMIC_TABLES[kind] if column not in table.frame.columns]
    if missing:
        raise DataError(f"{name} lacks the columns {missing}; is it the published file?")
    return table


def _gunzip(data: bytes, name: str) -> bytes:
    """The content, of at most ``MAX_TABLE_BYTES``; raises DataError for damage and for more."""
    unpacking = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        content = unpacking.decompress(data, MAX_TABLE_BYTES)
    except zlib.error as error:
        raise DataError(f"{name} is no readable gzip file ({error}); download it again") from error
    if not unpacking.eof:
        raise DataError(f"{name} is cut off, or larger than {MAX_TABLE_BYTES} bytes; download it again")
    return content


def _refuse_repeated(table: Table, column: str) -> None:
    repeated = np.flatnonzero(table.frame[column].duplicated().to_numpy())
    if len(repeated):
        value = table.frame[column].iloc[repeated[0]]
        raise table.error(int(repeated[0]), f"{column} {shown(value)} is there twice; is it the published file?")


def _mimic_splits(films: Table, splits: Table) -> list[str]:
    stated = dict(zip(splits.frame["dicom_id"], splits.frame["split"], strict=True))
    codes, values = pd.factorize(films.frame["dicom_id"].map(stated).fillna("none"))
    read = [MIMIC_SPLITS.get(value) for value in values]
    films.refuse_cell("split", codes, values, read, f"is no split; the published ones are {', '.join(MIMIC_SPLITS)}")
    return [str(read[code]) for code in codes]


def _mimic_reports(source: FolderSource, folders: pd.Series, section: Section) -> list[str]:
    """The section of every film's report, "" where there is no report. A study is read once."""
    places: list[tuple[Source, str]] = [(source, "files/"), (source, f"{MIMIC_REPORTS}/files/")]
    if source.has(f"{MIMIC_REPORTS}.zip"):
        packed = ZipSource(source.locate(f"{MIMIC_REPORTS}.zip"))
        places += [(packed, ""), (packed, "files/")]  # a zip's only top folder is its root, so "files/" may be gone
    codes, studies = pd.factorize(folders)
    texts = [_mimic_report(places, f"{study.removeprefix('files/')}.txt", section) for study in studies]
    return [texts[code] for code in codes]


def _mimic_report(places: Sequence[tuple[Source, str]], name: str, section: Section) -> str:
    for source, folder in places:
        if source.has(folder + name):
            return section_of(decode_text(source.read(folder + name, max_bytes=MAX_REPORT_BYTES), name), section)
    return ""


def section_of(report: str, section: Section) -> str:
    """One section of a report in plain text, white space collapsed; "" where no heading of it is found.

    A heading is a line's beginning in capitals up to a colon (``HEADINGS``); its section ends at the next one.

    >>> section_of("INDICATION:  Cough.\\n FINDINGS:  Clear lungs.\\n  IMPRESSION: Normal.", "findings")
    'Clear lungs.'
    """
    _, *parts = _HEADING.split(report)
    bodies = [body for heading, body in zip(parts[::2], parts[1::2], strict=True) if heading in HEADINGS[section]]
    return " ".join(" ".join(bodies).split())


def import_openi(src: Path, *, section: Section = "indication") -> Imported:
    """Open-I: reports as XML files or ``NLMCXR_reports.tgz``, films as ``.png`` anywhere below; the 14 NIH labels.

    The labels follow from the collection's MeSH codes (`indiana.MESH`). A report with several films gives one sample
    a film, all of one ``study``; one without films is a sample of text. Raises DataError where there are no reports
    or no images, and for damaged XML.

    Choice: the publisher names no patients and no split: a report is a patient, the manifest reader's hash the split.
    Choice: a report without films and without the section is left out; lateral films are taken as well, since the
    collection does not say which they are.
    """
    reports = _openi_reports(src)
    below = files_by_name(src, ".png")
    if not below:
        raise DataError(f"{src} has no .png below it; unpack NLMCXR_png.tgz there, or open the data root 'indiana'")
    marks = mesh_marks(reports).astype(str)
    rows = []
    for report, present in zip(reports, marks, strict=True):
        text = report.sections[section]
        # A film that is not there keeps its plain name, and is refused or skipped with all other missing ones.
        films = [below.get(f"{image}.png", f"{image}.png") for image in report.images]
        rows += [(film, text, report.number, report.number, *present) for film in films or ([""] if text else [])]
    columns = ["image", "report", "patient", "study", *(LABEL_PREFIX + label for label in NIH_LABELS)]
    return Imported(pd.DataFrame(rows, columns=columns), NIH_LABELS, label_source="reviewed")


def _openi_reports(src: Path) -> list[ChestReport]:
    source = FolderSource(src)
    files = files_by_name(src, ".xml")
    if not files and source.has("NLMCXR_reports.tgz"):
        return read_archive(source.read("NLMCXR_reports.tgz", max_bytes=MAX_ARCHIVE_BYTES), "NLMCXR_reports.tgz")
    if not files:
        raise DataError(f"{src} has neither .xml below it nor NLMCXR_reports.tgz; give the folder with both downloads")
    return by_number((parse_report(source.read(p, max_bytes=MAX_XML_BYTES), p) for p in files.values()), src.name)
