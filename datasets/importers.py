"""Published folders as manifests, without copying an image.

CheXpert, NIH ChestX-ray14, MIMIC-CXR, Open-I, VOC, COCO and MedMNIST:

    python -m datasets.importers chexpert SRC DEST --uncertain unknown

writes ``manifest.csv`` and ``manifest.json`` into DEST. When DEST is SRC or a folder above it, the manifest names
the images by relative paths. Elsewhere (read-only media) the sidecar records where they are, and whoever reads the
manifest permits that folder with ``read_manifest(..., image_root=SRC)``.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from datasets.import_chest import POLICY_CELLS, import_chexpert, import_nih
from datasets.import_objects import import_coco, import_voc
from datasets.import_reports import import_mimic, import_openi
from datasets.imported import Imported
from datasets.indiana import SECTIONS
from datasets.labels import CLASS_COLUMN, LABEL_PREFIX
from datasets.manifest import assemble
from datasets.medmnist import medmnist_table, name_by_position
from datasets.records import DataError, Manifest
from datasets.sidecar import Sidecar
from datasets.source import FolderSource
from datasets.tables import Table


def import_medmnist(src: Path, *, labels: Sequence[str] | None = None) -> Imported:
    """A MedMNIST ``.npz``, whose images stay in it; ``labels`` names the classes, which the file only numbers."""
    table, sidecar = medmnist_table(src)
    if sidecar.task == "multiclass":
        count = int(table.frame[CLASS_COLUMN].astype(np.int64).max()) + 1
        return Imported(
            table.frame, tuple(labels or map(str, range(count))), "multiclass", "medmnist", arrays=sidecar.arrays
        )
    table = name_by_position(table, labels) if labels else table
    names = tuple(c.removeprefix(LABEL_PREFIX) for c in table.frame.columns if c.startswith(LABEL_PREFIX))
    return Imported(table.frame, names, "multilabel", "medmnist", arrays=sidecar.arrays)


def write_manifest(
    imported: Imported,
    folder: Path,
    dest: Path,
    *,
    site: str = "",
    missing: Literal["refuse", "skip"] = "refuse",
    overwrite: bool = False,
) -> Manifest:
    """Writes ``manifest.csv`` and ``manifest.json`` into ``dest`` for images below ``folder``; the manifest they hold.

    Everything is checked before a file is written. ``missing="skip"`` leaves out rows whose image is not there, for a
    partial download. Raises DataError like `datasets.manifest.read_manifest`, and when a manifest exists already.
    """
    targets = [dest / "manifest.csv", dest / "manifest.json"]
    present = [path.name for path in targets if path.exists()]
    if present and not overwrite:
        raise DataError(f"{dest} has {present[0]} already; choose another folder, or say --overwrite")
    folder, home = folder.resolve(), dest.resolve()
    inside = folder.is_relative_to(home)
    prefix = f"{folder.relative_to(home).as_posix()}/" if inside and folder != home else ""
    source = FolderSource(home if inside else folder)
    frame = imported.frame
    if imported.arrays:
        arrays = prefix + imported.arrays
    else:
        arrays = ""
        frame = frame.assign(image=(prefix + frame["image"]).where(frame["image"] != "", ""))
        if missing == "skip":
            frame = frame[[not path or source.has(path) for path in frame["image"]]].reset_index(drop=True)
    sidecar = Sidecar(
        labels=imported.labels,
        task=imported.task,
        site=site,
        label_source=imported.label_source,
        image_root="" if inside else str(folder),
        arrays=arrays,
    )
    table = Table("manifest.csv", frame, np.arange(2, len(frame) + 2, dtype=np.int64))
    manifest = assemble(table, sidecar, source, checksum="")
    stated = {key: value for key, value in asdict(sidecar).items() if value}
    dest.mkdir(parents=True, exist_ok=True)
    _replace(targets[0], _csv_text(frame))
    _replace(targets[1], json.dumps(stated, indent=2, ensure_ascii=False) + "\n")
    return manifest


def _csv_text(frame: pd.DataFrame) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(frame.columns)
    writer.writerows(frame.itertuples(index=False, name=None))
    return text.getvalue()


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8", newline="\n")
    os.replace(part, path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m datasets.importers", description=__doc__.partition("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("chexpert", "nih", "mimic", "openi", "voc", "coco", "medmnist"):
        one = kinds.add_parser(kind)
        one.add_argument("src", type=Path, help="the published folder, or the .npz")
        one.add_argument("dest", type=Path, nargs="?", help="where the manifest goes (default: beside the images)")
        one.add_argument("--site", default="", help="name of the hospital, for every row")
        one.add_argument("--missing", choices=("refuse", "skip"), default="refuse", help="rows without an image file")
        one.add_argument("--overwrite", action="store_true")
        if kind in ("chexpert", "mimic"):
            one.add_argument("--uncertain", choices=tuple(POLICY_CELLS), default="unknown", help="what -1 becomes")
            one.add_argument("--blank", choices=tuple(POLICY_CELLS), default="unknown", help="what blank becomes")
        if kind in ("mimic", "openi"):
            one.add_argument(
                "--section", choices=SECTIONS, default="indication", help="the part of a report that is kept"
            )
        if kind == "medmnist":
            one.add_argument("--labels", nargs="+", help="class names in the order of their numbers")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 when the manifest was written, 2 when the data cannot be used."""
    options = _parser().parse_args(arguments)
    src: Path = options.src
    importers: dict[str, Callable[[], Imported]] = {
        "chexpert": lambda: import_chexpert(src, uncertain=options.uncertain, blank=options.blank),
        "nih": lambda: import_nih(src),
        "mimic": lambda: import_mimic(src, section=options.section, uncertain=options.uncertain, blank=options.blank),
        "openi": lambda: import_openi(src, section=options.section),
        "voc": lambda: import_voc(src),
        "coco": lambda: import_coco(src),
        "medmnist": lambda: import_medmnist(src, labels=options.labels),
    }
    folder = src.parent if options.kind == "medmnist" else src
    try:
        if not src.exists():
            raise DataError(f"{src} does not exist; give the {'.npz' if options.kind == 'medmnist' else 'folder'}")
        manifest = write_manifest(
            importers[options.kind](),
            folder,
            options.dest or folder,
            site=options.site,
            missing=options.missing,
            overwrite=options.overwrite,
        )
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    splits = " ".join(f"{split}={count}" for split, count in manifest.table["split"].value_counts().items())
    reports = int((manifest.table["report"].str.strip() != "").sum())
    print(
        f"wrote {options.dest or folder}/manifest.csv samples={len(manifest)} reports={reports} "
        f"labels={len(manifest.labels)} {splits}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
