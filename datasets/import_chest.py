"""Importers of chest radiograph collections: CheXpert and NIH ChestX-ray14."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from datasets.imported import Imported, read_lines, read_table
from datasets.labels import LABEL_PREFIX
from datasets.records import DataError
from datasets.source import FolderSource, shown
from datasets.splits import hash_split
from datasets.tables import Table

Policy = Literal["unknown", "positive", "negative"]
POLICY_CELLS: dict[Policy, str] = {"unknown": "", "positive": "1", "negative": "0"}

CHEXPERT_LABELS = (
    "No Finding",
    "Enlarged Cardiomediastinum",
    "Cardiomegaly",
    "Lung Opacity",
    "Lung Lesion",
    "Edema",
    "Consolidation",
    "Pneumonia",
    "Atelectasis",
    "Pneumothorax",
    "Pleural Effusion",
    "Pleural Other",
    "Fracture",
    "Support Devices",
)
NIH_LABELS = (
    "Atelectasis",
    "Cardiomegaly",
    "Effusion",
    "Infiltration",
    "Mass",
    "Nodule",
    "Pneumonia",
    "Pneumothorax",
    "Consolidation",
    "Edema",
    "Emphysema",
    "Fibrosis",
    "Pleural_Thickening",
    "Hernia",
)


def import_chexpert(src: Path, *, uncertain: Policy = "unknown", blank: Policy = "unknown") -> Imported:
    """CheXpert: ``train.csv``, ``valid.csv`` (our val) and, where present, ``test.csv``.

    ``uncertain`` says what the labeller's -1 becomes, ``blank`` what a finding that was not mentioned becomes.
    Raises DataError for a folder without these files and for cells outside 1, 0, -1 and blank.

    Choice: both are unknown unless asked for otherwise, so that no label is invented (U-Ignore in Irvin et al. 2019).
    """
    source = FolderSource(src)
    files = (("train.csv", "train", "chexpert-labeler"), ("valid.csv", "val", "radiologists"))
    parts = [
        _chexpert_part(source, name, split, label_source, {"-1": POLICY_CELLS[uncertain], "": POLICY_CELLS[blank]})
        for name, split, label_source in (*files, ("test.csv", "test", "radiologists"))
        if source.has(name)
    ]
    if not parts:
        raise DataError(f"{src} has neither train.csv nor valid.csv; give the folder that CheXpert was unpacked into")
    return Imported(pd.concat(parts, ignore_index=True).fillna(""), CHEXPERT_LABELS)


def _chexpert_part(
    source: FolderSource, name: str, split: str, label_source: str, policy: dict[str, str]
) -> pd.DataFrame:
    table = read_table(source, name, ("Path", *CHEXPERT_LABELS))
    # The published paths begin with the archive's own folder, which is the folder given.
    paths = table.frame["Path"].str.replace(r"^CheXpert[^/]*/", "", regex=True)
    parts = paths.str.split("/")
    known = {"image": paths, "patient": parts.str[1], "study": parts.str[1:3].str.join("/"), "split": split}
    marks = chexpert_marks(table, policy)
    own = table.frame.drop(columns=["Path", *CHEXPERT_LABELS])
    return pd.concat([pd.DataFrame({**known, "label_source": label_source}), own, marks], axis=1)


def chexpert_marks(table: Table, policy: Mapping[str, str]) -> pd.DataFrame:
    """The 14 label columns ``label:...`` of a CheXpert-labelled table; ``policy`` says what "-1" and "" become."""
    cells = {"1": "1", "1.0": "1", "0": "0", "0.0": "0", "-1.0": policy["-1"], **policy}
    return pd.DataFrame({LABEL_PREFIX + label: _recode(table, label, cells) for label in CHEXPERT_LABELS})


def _recode(table: Table, column: str, cells: dict[str, str]) -> pd.Series:
    codes, values = pd.factorize(table.frame[column].str.strip())
    read = [cells.get(value) for value in values]
    table.refuse_cell(column, codes, values, read, "is no CheXpert label; these are 1.0, 0.0, -1.0 and blank")
    return pd.Series(np.asarray(read, dtype=object)[codes], index=table.frame.index)


def import_nih(src: Path) -> Imported:
    """NIH ChestX-ray14: ``Data_Entry_2017.csv`` (or ``_v2020``), images anywhere below, official lists if present.

    "No Finding" is 0 for all 14 labels. Raises DataError for unknown findings and images that no list or folder has.

    Choice: the official train_val list is divided by patient hash, an eighth of the patients for val. Without the
    lists there is no split column, and the manifest reader's own hash decides.
    """
    source = FolderSource(src)
    names = [name for name in ("Data_Entry_2017_v2020.csv", "Data_Entry_2017.csv") if source.has(name)]
    if not names:
        raise DataError(f"{src} has no Data_Entry_2017.csv; give the folder that ChestX-ray14 was unpacked into")
    table = read_table(source, names[0], ("Image Index", "Finding Labels", "Patient ID"))
    frame = table.frame
    codes, values = pd.factorize(frame["Finding Labels"])
    found = [_nih_findings(value) for value in values]
    table.refuse_cell("Finding Labels", codes, values, found, f"names none of {', '.join(NIH_LABELS)}, No Finding")
    marks = {
        LABEL_PREFIX + label: np.asarray([str(int(label in findings)) for findings in found], dtype=object)[codes]
        for label in NIH_LABELS
    }
    below = files_by_name(src, ".png")
    # An image that is not there keeps its plain name, and is refused or skipped with all other missing ones.
    known = {"image": [below.get(name, name) for name in frame["Image Index"]], "patient": frame["Patient ID"]}
    if source.has("train_val_list.txt") or source.has("test_list.txt"):
        known["split"] = _nih_splits(source, table)
    own = frame.drop(columns=["Finding Labels", "Patient ID"])
    joined = pd.concat([pd.DataFrame(known, index=frame.index), own, pd.DataFrame(marks, index=frame.index)], axis=1)
    return Imported(joined, NIH_LABELS, label_source="nih-text-mining")


def _nih_findings(cell: str) -> set[str] | None:
    findings = {finding.strip() for finding in cell.split("|")}
    if findings == {"No Finding"}:
        return set()
    return findings if findings <= set(NIH_LABELS) else None


def _nih_splits(source: FolderSource, table: Table) -> np.ndarray:
    patients = table.frame["Patient ID"].to_numpy(dtype=object)
    test = set(read_lines(source, "test_list.txt"))
    training = set(read_lines(source, "train_val_list.txt"))
    divided = hash_split(patients, {"train": 7 / 8, "val": 1 / 8})
    for row, image in enumerate(table.frame["Image Index"]):
        if (image in test) == (image in training):
            raise table.error(row, f"image {shown(image)} must be in one of train_val_list.txt and test_list.txt")
    return np.where(table.frame["Image Index"].isin(test).to_numpy(), "test", divided)


def files_by_name(folder: Path, suffix: str) -> dict[str, str]:
    """Relative path of every file with the suffix below a folder, by its bare name; links are not followed."""
    found: dict[str, str] = {}
    for parent, _, files in os.walk(folder):
        for file in files:
            if file.lower().endswith(suffix):
                path = Path(parent, file).relative_to(folder).as_posix()
                if file in found:
                    raise DataError(f"{file} is below {folder} twice: {found[file]} and {path}; remove one")
                found[file] = path
    return found
