"""What ``data.root`` may name: data inside a package, or a hospital's own folder, archive or table."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from datasets.embedded import digits
from datasets.manifest import read_manifest
from datasets.mosaics import MOSAICS_PER_SPLIT, mosaic_manifest
from datasets.records import DataError, Manifest

EMBEDDED = ("digits", "digits-mosaic")
MOSAIC_PURPOSE = "mosaic"


def open_manifest(
    root: str | Path,
    *,
    labels: Sequence[str] | None = None,
    encoding: str | None = None,
    mosaic: Literal["none", "grid", "corner_max"] = "none",
    mosaics_per_split: Mapping[str, int] = MOSAICS_PER_SPLIT,
    rng_for: Callable[[str], np.random.Generator] | None = None,
) -> Manifest:
    """The manifest of ``root``: an embedded name, or a folder, zip, csv, parquet or npz of the user's own.

    ``digits`` and ``digits-mosaic`` are the embedded names; they win over a folder of the same name, which is reached
    as ``./digits``. ``mosaic`` turns any single-label root into multi-label mosaics (see `datasets.mosaics`);
    ``digits-mosaic`` is ``digits`` with ``mosaic="grid"`` unless another kind is asked for. ``rng_for`` maps a
    purpose to a seeded generator and is only asked for mosaics, with the purpose "mosaic".
    Raises DataError where the root does not exist or cannot be read, and ValueError for mosaics without ``rng_for``.
    """
    name = str(root)
    if name in EMBEDDED:
        manifest = digits(labels)
        kind = "grid" if name == "digits-mosaic" and mosaic == "none" else mosaic
    else:
        manifest = read_manifest(_existing(root), labels=labels, encoding=encoding)
        kind = mosaic
    if kind == "none":
        return manifest
    if rng_for is None:
        raise ValueError(f"mosaics of {name!r} are drawn at random: pass rng_for, a seeded generator by purpose")
    return mosaic_manifest(manifest, rng_for(MOSAIC_PURPOSE), counts=mosaics_per_split, kind=kind)


def _existing(root: str | Path) -> Path:
    path = Path(root).expanduser()
    if str(root).strip() and path.exists():
        return path
    folder = path.parent
    siblings = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, [*EMBEDDED, *siblings], n=1, cutoff=0.6)
    if near and near[0] in EMBEDDED:
        hint = f" Did you mean {near[0]!r}?"
    elif near:
        hint = f" Did you mean {str(folder / near[0])!r}?"
    elif not folder.is_dir():
        hint = f" The folder {str(folder)!r} does not exist either."
    else:
        hint = ""
    raise DataError(
        f"data root {str(root)!r} does not exist (looked for {str(path.absolute())!r}).{hint} Give one of "
        f"{', '.join(EMBEDDED)}, or the path of a folder, zip, csv, parquet or npz."
    )
