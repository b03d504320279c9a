"""One manifest format for every site: a table with one row a sample, its images beside it, and a small sidecar.

The table is ``manifest.csv``, ``manifest.parquet`` or, for a pack, ``metadata.csv``; the sidecar, ``manifest.json``
or a pack's ``info.json``, says which columns are labels. A MedMNIST ``.npz`` is read as it is.

Columns, by the first of these names that is present, or by the sidecar's ``columns``:

| record | names in the table |
| --- | --- |
| image | image, file, path; several paths, separated by ``|``, make one sample each |
| report | report, text |
| patient, study, site, time, split, label_source | the same |

Label cells are 1, 0, and blank, -1 or NaN for unknown. A sidecar may also state ``task``, ``encoding``, a ``site``
and a ``label_source`` for rows that name none, the ``image_folder`` below the root, and ``arrays``, an .npz that
holds the images (their paths are then ``key/number``).

Choice: without a split column, a patient's split follows from a hash of the patient's identifier, so it needs no
seed and stays the same when rows are added, removed or reordered: 70 % train, 10 % val, 20 % test on average.
Choice: a blank patient is a patient of one row; its identifier begins with a space, which no stated one can.
Choice: one identifier is one patient across all sites of a manifest, since the opposite reading could leak.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from datasets.images import FileImages
from datasets.labels import read_targets
from datasets.medmnist import medmnist_table, name_by_position, open_arrays
from datasets.records import SPLITS, DataError, Images, Manifest
from datasets.sidecar import COLUMN_NAMES, Sidecar, parse_sidecar
from datasets.source import MAX_TABLE_BYTES, FolderSource, Source, clean_name, open_source, shown
from datasets.splits import check_disjoint, hash_split
from datasets.tables import Table, parse_table

TABLE_NAMES = ("manifest.parquet", "manifest.csv", "metadata.csv")
SIDECAR_NAMES = ("manifest.json", "info.json")
IMAGE_SEPARATOR = "|"
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def read_manifest(
    root: str | Path,
    *,
    labels: Sequence[str] | None = None,
    encoding: str | None = None,
    image_root: str | Path | None = None,
) -> Manifest:
    """Every sample below ``root``: a folder, a zip, the table itself, or a MedMNIST ``.npz``.

    ``labels`` is the federation's list: columns in another order follow it, a missing or extra one is refused.
    Class numbers without class names take the federation's names by position. ``encoding`` is that of a CSV that is
    neither UTF-8 nor UTF-16. ``image_root`` permits images in a folder outside the manifest's own (read-only media).

    ``table`` has the further column ``image``: the path of the sample's image, "" where a report stands alone.
    Columns that became targets are left out of it.

    Raises DataError: no table or labels, bad label values, images missing or named twice, a patient in two splits,
    paths that leave the root, unreadable text. It names the file, the row, and what to do.
    """
    path = Path(root)
    if path.suffix.lower() == ".npz":
        return _read_npz(path, labels)
    source, name = find_table(path)
    data = source.read(name, max_bytes=MAX_TABLE_BYTES)
    sidecar_name, sidecar_data = find_sidecar(source, name)
    sidecar = parse_sidecar(sidecar_data, sidecar_name) if sidecar_name else Sidecar()
    table = parse_table(data, name, encoding or sidecar.encoding)
    source = _image_source(source, sidecar, sidecar_name, image_root)
    return assemble(table, sidecar, source, labels=labels, checksum=_checksum(data, sidecar_data))


def assemble(
    table: Table, sidecar: Sidecar, source: Source, *, labels: Sequence[str] | None = None, checksum: str
) -> Manifest:
    """The manifest of a parsed table whose images lie below ``source``; raises DataError like `read_manifest`."""
    if not len(table):
        raise DataError(f"{table.name} has a header but no samples; add at least one row")
    fields = known_fields(table, sidecar)
    names, task, targets, used = read_targets(table, sidecar, labels)
    samples, paths = _one_image_a_sample(table, fields["image"])
    _refuse_twice(table, samples, paths)
    _refuse_empty(table, samples, paths, fields["report"])
    patients = _patients(fields["patient"], table, samples, paths)
    splits = _splits(table, fields, sidecar, samples, patients)
    check_disjoint(patients, splits, table.lines[samples], table.name)

    own = {column for column in fields.columns if column in table.frame.columns}
    rest = [column for column in table.frame.columns if column not in used | own | {"line"}]
    frame = pd.concat([fields, table.frame[rest]], axis=1).iloc[samples].reset_index(drop=True)
    frame = frame.assign(image=paths, patient=patients, split=splits, line=table.lines[samples])
    images, paths = _open_images(table, sidecar, source, samples, paths)
    return Manifest(names, task, frame.assign(image=paths), targets[samples], images, checksum)


def find_table(path: Path) -> tuple[Source, str]:
    """The source and the table's name in it; a zip holds its own sidecar and images, a lone table its folder's."""
    if path.suffix.lower() in (".csv", ".parquet"):
        if not path.is_file():
            raise DataError(f"manifest {path} does not exist; set the data root to a folder, a zip or a manifest file")
        return FolderSource(path.parent), path.name
    source = open_source(path)
    found = [name for name in TABLE_NAMES if source.has(name)]
    if not found:
        raise DataError(
            f"{path} has none of {', '.join(TABLE_NAMES)}; write a manifest, or make one from a published set with "
            "'python -m datasets.importers'"
        )
    if set(found) >= {"manifest.parquet", "manifest.csv"}:
        raise DataError(f"{path} has both manifest.parquet and manifest.csv; keep one, or name the file itself")
    return source, found[0]


def find_sidecar(source: Source, table_name: str) -> tuple[str, bytes]:
    """Name and bytes of the table's own sidecar (``site_a.json`` for ``site_a.csv``) or the folder's; else "", b""."""
    for name in dict.fromkeys((f"{Path(table_name).stem}.json", *SIDECAR_NAMES)):
        if source.has(name):
            return name, source.read(name, max_bytes=MAX_TABLE_BYTES)
    return "", b""


def _image_source(source: Source, sidecar: Sidecar, sidecar_name: str, image_root: str | Path | None) -> Source:
    if image_root is not None:
        return open_source(image_root)
    if sidecar.image_root:
        # A manifest can come from anywhere, so it cannot by itself open another folder; a person can.
        raise DataError(
            f"{sidecar_name} says that the images lie in {shown(sidecar.image_root, 200)}, outside the data root; "
            "permit it with image_root, or import into that folder or one above it"
        )
    return source


def _checksum(table_data: bytes, sidecar_data: bytes) -> str:
    """SHA-256 (hex) of the table's bytes followed by the sidecar's, each after its length."""
    digest = hashlib.sha256()
    for data in (table_data, sidecar_data):
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def known_fields(table: Table, sidecar: Sidecar) -> pd.DataFrame:
    """The eight known columns as stripped strings, "" where the table has none; reports keep their spaces."""
    frame = table.frame
    for record, column in sidecar.columns.items():
        if column not in frame.columns:
            raise DataError(
                f"{table.name} has no column {shown(column)}, which the sidecar names for {record}; "
                f"its columns are {shown(', '.join(frame.columns), 300)}"
            )
    fields = {}
    for record, known in COLUMN_NAMES.items():
        names = (sidecar.columns[record],) if record in sidecar.columns else known
        column = next((name for name in names if name in frame.columns), None)
        cells = frame[column] if column else pd.Series("", index=frame.index, dtype=str)
        fields[record] = cells if record == "report" else cells.str.strip()
    for record in ("site", "label_source"):
        default = getattr(sidecar, record)
        fields[record] = fields[record].mask(fields[record] == "", default) if default else fields[record]
    return pd.DataFrame(fields)


def _one_image_a_sample(table: Table, cells: pd.Series) -> tuple[np.ndarray, list[str]]:
    """The table row of each sample, ``(n,) int64``, and its cleaned image path ("" for none)."""
    samples: list[int] = []
    paths: list[str] = []
    for row, cell in enumerate(cells):
        for part in [part.strip() for part in cell.split(IMAGE_SEPARATOR) if part.strip()] or [""]:
            try:
                paths.append(clean_name(part) if part else "")
            except DataError as error:
                raise table.error(row, str(error)) from error
            samples.append(row)
    return np.asarray(samples, dtype=np.int64), paths


def _refuse_twice(table: Table, samples: np.ndarray, paths: Sequence[str]) -> None:
    seen: dict[str, int] = {}
    for row, path in zip(samples, paths, strict=True):
        if path and path in seen:
            raise table.error(
                row, f"image {shown(path)} is named in row {table.lines[seen[path]]} already; keep one of the two"
            )
        seen[path] = row


def _refuse_empty(table: Table, samples: np.ndarray, paths: Sequence[str], reports: pd.Series) -> None:
    blank = reports.str.strip().to_numpy() == ""
    for row, path in zip(samples, paths, strict=True):
        if not path and blank[row]:
            raise table.error(
                row, "neither an image path nor a report; fill the column 'image' (or 'report'), or remove the row"
            )


def _patients(cells: pd.Series, table: Table, samples: np.ndarray, paths: Sequence[str]) -> np.ndarray:
    """Patient of each sample, ``(n,) object``; a blank or NaN one becomes " " and what identifies the row.

    The row's first image path identifies it, so that the hashed split does not move when rows are reordered.
    """
    stated = cells.to_numpy(dtype=object)
    own: dict[int, str] = {}
    for row, path in zip(samples, paths, strict=True):
        own.setdefault(row, f" {path or table.lines[row]}")
    blank = {row for row, cell in enumerate(stated) if cell.lower() in ("", "nan")}
    return np.asarray([own[row] if row in blank else stated[row] for row in samples], dtype=object)


def _splits(
    table: Table, fields: pd.DataFrame, sidecar: Sidecar, samples: np.ndarray, patients: np.ndarray
) -> np.ndarray:
    cells = fields["split"].str.lower()
    if (cells == "").all():
        return hash_split(patients)
    codes, values = pd.factorize(cells)
    read = [SPLIT_NAMES.get(value) for value in values]
    column = sidecar.columns.get("split", "split")
    table.refuse_cell(column, codes, values, read, f"is no split; write {', '.join(SPLITS)}, or leave the column out")
    return np.asarray(read, dtype=object)[codes][samples]


def _open_images(
    table: Table, sidecar: Sidecar, source: Source, samples: np.ndarray, paths: list[str]
) -> tuple[Images, list[str]]:
    """The images of the samples, and their paths as they are found below the source."""
    rows = [f"{table.name} row {line}" for line in table.lines[samples]]
    if sidecar.arrays:
        return open_arrays(source, sidecar.arrays, paths, rows), paths
    folder = _image_folder(source, sidecar.image_folder, next((path for path in paths if path), ""))
    placed = [f"{folder}/{path}" if folder and path else path for path in paths]
    return FileImages(source, placed, rows), placed


def _image_folder(source: Source, stated: str, first: str) -> str:
    """The folder that the paths are relative to, found by the first: the stated one, the root, or ``images``."""
    folders = (stated, "") if stated else ("", "images")
    for folder in folders:
        try:
            if first and source.has(f"{folder}/{first}" if folder else first):
                return folder
        except DataError:  # a link out of the root: FileImages refuses it again, with its row
            return folder
    return folders[0]


def _read_npz(path: Path, labels: Sequence[str] | None) -> Manifest:
    if not path.is_file():
        raise DataError(f"array file {path} does not exist; set the data root to a folder, a zip or a manifest file")
    table, sidecar = medmnist_table(path)
    if sidecar.task == "multilabel" and labels is not None:
        table = name_by_position(table, labels)
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    return assemble(table, sidecar, FolderSource(path.parent), labels=labels, checksum=checksum)
