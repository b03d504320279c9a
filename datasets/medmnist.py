"""MedMNIST archives: an .npz with images, labels and official splits, read in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from datasets.images import ArrayImages, read_npy
from datasets.labels import CLASS_COLUMN, LABEL_PREFIX, class_number
from datasets.records import SPLITS, DataError
from datasets.sidecar import Sidecar
from datasets.source import MAX_ARRAY_BYTES, MAX_TABLE_BYTES, FolderSource, Source, ZipSource, shown
from datasets.tables import Table


def medmnist_table(path: Path) -> tuple[Table, Sidecar]:
    """The table and sidecar of a MedMNIST ``.npz``: image paths ``train_images/0``..., official splits, labels.

    One label a sample becomes the column ``label``, several become ``label:0``, ``label:1``...; the file holds no
    names. Rows count from 0 through train, val and test. Raises DataError for files of another layout.
    """
    archive = ZipSource(path)
    frames, labels = [], []
    for split in SPLITS:
        if not archive.has(f"{split}_labels.npy"):
            continue
        label = read_npy(archive.read(f"{split}_labels.npy", max_bytes=MAX_TABLE_BYTES), f"{path.name}/{split}_labels")
        if label.ndim not in (1, 2) or not np.issubdtype(label.dtype, np.integer) or label.size == 0:
            raise DataError(
                f"{path.name}/{split}_labels is {label.dtype} {label.shape}; labels are whole numbers (n, 1) or (n, C)"
            )
        labels.append(label.reshape(len(label), -1).astype(np.int64))
        frames.append(pd.DataFrame({"image": [f"{split}_images/{row}" for row in range(len(label))], "split": split}))
    if not labels or len({label.shape[1] for label in labels}) != 1:
        raise DataError(
            f"{path.name} has no train_labels, val_labels or test_labels of one width; is it a MedMNIST file?"
        )
    frame, stacked = pd.concat(frames, ignore_index=True), np.concatenate(labels)
    columns = [CLASS_COLUMN] if stacked.shape[1] == 1 else [f"{LABEL_PREFIX}{c}" for c in range(stacked.shape[1])]
    marks = {column: pd.Series(stacked[:, place]).astype(str) for place, column in enumerate(columns)}
    table = Table(path.name, frame.assign(**marks).astype(str), np.arange(len(frame), dtype=np.int64))
    return table, Sidecar(task="multiclass" if len(columns) == 1 else "multilabel", arrays=path.name)


def name_by_position(table: Table, labels: Sequence[str]) -> Table:
    """The table of a nameless multi-label file with the federation's names in place of its numbers.

    Raises DataError when the counts differ.
    """
    numbered = [column for column in table.frame.columns if column.startswith(LABEL_PREFIX)]
    if len(numbered) != len(labels):
        raise DataError(f"{table.name} has {len(numbered)} labels, the federation has {len(labels)}: {list(labels)}")
    names = dict(zip(numbered, (LABEL_PREFIX + label for label in labels), strict=True))
    return Table(table.name, table.frame.rename(columns=names), table.lines)


def open_arrays(source: Source, name: str, paths: Sequence[str], rows: Sequence[str]) -> ArrayImages:
    """Images that lie in an .npz below a folder; each path is ``key/number``."""
    if not isinstance(source, FolderSource):
        raise DataError(f"the array file {shown(name)} lies in a zip; unpack the zip and use the folder")
    archive = ZipSource(source.locate(name))
    keys = [path.rpartition("/")[0] for path in paths]
    arrays = {key: _image_array(archive, key) for key in dict.fromkeys(keys)}
    picked = []
    for key, path, row in zip(keys, paths, rows, strict=True):
        number = class_number(path.rpartition("/")[2], len(arrays[key]))
        if number is None:
            raise DataError(f"{row}: {shown(path)} is no image of {name}; write a key and a number, as train_images/0")
        picked.append(number)
    _refuse_other_shapes(arrays, name)
    return ArrayImages(np.stack([arrays[key][number] for key, number in zip(keys, picked, strict=True)]), rows)


def _image_array(archive: ZipSource, key: str) -> np.ndarray:
    name = f"{archive.root.name}/{key}"
    array = read_npy(archive.read(f"{key}.npy", max_bytes=MAX_ARRAY_BYTES), name)
    if array.dtype != np.uint8 or array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[3] not in (1, 3)):
        raise DataError(
            f"{name} is {array.dtype} {array.shape}; images are uint8 (n, H, W) or (n, H, W, 3), volumes are not read"
        )
    return array


def _refuse_other_shapes(arrays: Mapping[str, np.ndarray], name: str) -> None:
    shapes = {key: array.shape[1:] for key, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        raise DataError(f"{name} has images of different shapes: {shapes}; store them as files instead")
