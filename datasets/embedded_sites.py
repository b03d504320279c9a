"""The embedded digits as hospitals would hold them: each site a folder with its own manifest and image files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from datasets.embedded import digits
from datasets.imported import Imported
from datasets.importers import write_manifest
from datasets.records import SPLITS


def write_digit_sites(folder: Path, sites: Sequence[str]) -> None:
    """Writes ``folder/SITE`` for every site: manifest.csv, manifest.json and PNG files, nothing that another has.

    The digits of each split are dealt in turn, so every site has about the same number of each and all three splits.
    Raises DataError where a manifest is there already.
    """
    manifest = digits()
    splits = manifest.table["split"].to_numpy()
    for index, site in enumerate(sites):
        rows = np.concatenate([np.flatnonzero(splits == split)[index :: len(sites)] for split in SPLITS])
        root = folder / site
        (root / "images").mkdir(parents=True, exist_ok=True)
        frame = manifest.table.iloc[rows][["patient", "split"]].reset_index(drop=True)
        frame.insert(0, "image", [f"images/{number:04d}.png" for number in range(len(rows))])
        frame["label"] = manifest.targets[rows].argmax(axis=1).astype(str)
        for name, row in zip(frame["image"], rows, strict=True):
            Image.fromarray(manifest.images.read(int(row))).save(root / name)
        write_manifest(Imported(frame, manifest.labels, "multiclass"), root, root, site=site)
