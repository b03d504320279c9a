"""Several data roots as one federation, as a TOML file lists them (see `datasets.union_file`).

A site's modality is what its hospital has, so an image source loses its report text here and the images of a text
source are never opened. Rows that have nothing of their source's modality are left out.

Labels meet by name. As an example, the clinical notes of the chest X-ray packs on the 14 NIH names and COVID-19:

| federation | notes | |
| --- | --- | --- |
| Cardiomegaly, Consolidation, Effusion, Pneumothorax | the same names | mined from the note, which so leaks them |
| Pneumonia, COVID-19 | the same names | causes, curated by the source |
| Infiltration | none | their Opacity is wider, so it is no substitute: unknown |
| Nodule, Mass | none | their Nodule_or_Cavity does not say which: unknown |
| Atelectasis, Edema, Emphysema, Fibrosis, Hernia, Pleural_Thickening | none | not recorded: unknown |
| none | Viral, Bacterial, Fungal, ARDS, GroundGlass, Interstitial, outcomes | not asked for |

What a report is, the packs say in the column ``text_kind``, which stays in the table: ``free-text note`` (a clinician's
words), ``structured-labs`` (a sentence made from laboratory values, Hannover), ``metadata`` (a sentence from age, sex
and view, NIH: no report at all, which is why the NIH sites take part with images only); Indiana's is the section.

Choice: sources of one root share its patients; identifiers of different roots are different people, so the first
source's name goes before each. A row belongs to one source.
Choice: a single-label source joins as multi-label rows with one positive.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from datasets.records import UNKNOWN, DataError, Images, Manifest
from datasets.source import MAX_TABLE_BYTES, FolderSource, shown
from datasets.union_file import UnionSource, parse_union

NO_IMAGE = -1
_VARIABLE = re.compile(r"\$(?:\{\w+\}|\w+)")

Opener = Callable[[str, str | None], Manifest]
"""Opens a root (a path or an embedded name) with an encoding."""


class UnionImages:
    """Images of a union: each row is read from its own source, and a row of a text source from none.

    ``parts`` are (source name, images); ``part (n,) int64`` says which of them a row comes from, ``rows (n,) int64``
    which row it is there, ``NO_IMAGE`` for none. ``checksum`` covers the sources that are read and the rows taken.
    """

    def __init__(self, parts: Sequence[tuple[str, Images]], part: np.ndarray, rows: np.ndarray) -> None:
        self.parts, self.part, self.rows = list(parts), part, rows
        digest = hashlib.sha256()
        for number, (_, images) in enumerate(self.parts):
            places = np.flatnonzero((part == number) & (rows != NO_IMAGE))
            if len(places):
                digest.update(images.checksum.encode())
                digest.update(np.stack([places, rows[places]]).astype("<i8").tobytes())
        self.checksum = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise DataError(f"image {row} does not exist; there are {len(self)}, counted from 0")
        name, images = self.parts[self.part[row]]
        if self.rows[row] == NO_IMAGE:
            raise DataError(f"source {shown(name)}: row {row} of the union has no image; leave it out")
        try:
            return images.read(int(self.rows[row]))
        except DataError as error:
            raise DataError(f"source {shown(name)}: {error}") from error


def union_manifest(
    path: Path, open_root: Opener, *, embedded: Collection[str] = (), labels: Sequence[str] | None = None
) -> Manifest:
    """The sources that a TOML file lists as one multi-label manifest, in the file's order.

    ``labels`` is the federation's list: the file's labels in any order. ``table`` has the further columns ``image``
    ("" where a row has none), ``source`` and ``modality``; a column that a source lacks is "" in its rows; ``site`` is
    one site for each source and its ``site_columns``, ready for `partition.by_site`.
    The checksum covers every source's own, the rows, and the targets.
    Raises DataError for a file that is not as above (all problems together), for what a source cannot give (naming
    the source), for a row in two sources and for a site in two.
    """
    data = FolderSource(path.parent).read(path.name, max_bytes=MAX_TABLE_BYTES)
    names, sources = parse_union(data, path.name)
    if labels is not None:
        if sorted(labels) != sorted(names):
            raise DataError(f"{path.name} lists the labels {list(names)}, the federation has {list(labels)}")
        names = tuple(labels)
    places = [_place(source, path, embedded) for source in sources]
    opened: dict[tuple[str, str], Manifest] = {}
    for source, place in zip(sources, places, strict=True):
        if (place, source.encoding) not in opened:
            opened[place, source.encoding] = _open(source, place, open_root)

    owner = {place: source.name for place, source in reversed(list(zip(places, sources, strict=True)))}
    manifests = [opened[place, source.encoding] for source, place in zip(sources, places, strict=True)]
    rows = [_rows(source, manifest) for source, manifest in zip(sources, manifests, strict=True)]
    _refuse_shared_rows(sources, places, rows)
    tables = [
        _table(source, manifest, part, owner[place])
        for source, manifest, part, place in zip(sources, manifests, rows, places, strict=True)
    ]
    _refuse_shared_sites(sources, tables)
    table = pd.concat(tables, ignore_index=True).fillna("")
    targets = np.concatenate(
        [_targets(source, m, names)[part] for source, m, part in zip(sources, manifests, rows, strict=True)]
    )
    has_image = (table["image"] != "").to_numpy()
    images = UnionImages(
        [(source.name, manifest.images) for source, manifest in zip(sources, manifests, strict=True)],
        np.repeat(np.arange(len(sources)), [len(part) for part in rows]),
        np.where(has_image, np.concatenate(rows), NO_IMAGE),
    )
    digest = hashlib.sha256("\x1f".join([*names, *(manifest.checksum for manifest in manifests)]).encode())
    digest.update(table.to_csv(index=False).encode("utf-8", "surrogatepass"))
    digest.update(np.ascontiguousarray(targets).tobytes())
    return Manifest(names, "multilabel", table, targets, images, digest.hexdigest())


def _place(source: UnionSource, path: Path, embedded: Collection[str]) -> str:
    """The embedded name, or the resolved path, that a source's root means."""
    if source.root in embedded:
        return source.root
    root = os.path.expandvars(source.root)
    if absent := _VARIABLE.search(root):
        raise DataError(
            f"{path.name}: source {shown(source.name)}: root names the variable {absent[0]}, which is not set; "
            "set it to the folder, or write the path"
        )
    place = (path.parent / Path(root).expanduser()).resolve()
    if place.suffix.lower() == ".toml":
        raise DataError(f"{path.name}: source {shown(source.name)}: root is a union itself; list its sources here")
    return str(place)


def _open(source: UnionSource, place: str, open_root: Opener) -> Manifest:
    try:
        return open_root(place, source.encoding or None)
    except DataError as error:
        raise DataError(f"source {shown(source.name)}: {error}") from error


def _rows(source: UnionSource, manifest: Manifest) -> np.ndarray:
    """Rows of a source's manifest that ``where`` picks and that have something of its modality, ``(m,) int64``."""
    table = manifest.table
    _require_columns(source, table, [*source.where, *source.site_columns])
    picked = np.ones(len(table), dtype=bool)
    for column, values in source.where.items():
        cells = table[column].astype(str)
        absent = sorted(set(values) - set(cells))
        if absent:
            raise DataError(f"source {shown(source.name)}: no row has {column} = {shown(absent[0])}; correct 'where'")
        picked &= cells.isin(values).to_numpy()
    has_image = (_image_names(source, table) != "").to_numpy()
    has_report = (table["report"].str.strip() != "").to_numpy()
    usable = {"image": has_image, "text": has_report, "paired": has_image | has_report}[source.modality]
    rows = np.flatnonzero(picked & usable)
    if not len(rows):
        raise DataError(
            f"source {shown(source.name)}: none of its {int(picked.sum())} rows has "
            f"{'an image' if source.modality == 'image' else 'a report'}; correct 'modality' or 'where'"
        )
    return rows


def _require_columns(source: UnionSource, table: pd.DataFrame, columns: Sequence[str]) -> None:
    missing = [column for column in columns if column not in table.columns]
    if missing:
        raise DataError(
            f"source {shown(source.name)}: there is no column {shown(missing[0])}; its columns are "
            f"{shown(', '.join(map(str, table.columns)), 300)}"
        )


def _image_names(source: UnionSource, table: pd.DataFrame) -> pd.Series:
    """The column ``image``; arrays in memory have none, so their rows get a name each."""
    if "image" in table.columns:
        return table["image"]
    return pd.Series([f"{source.name}/{row}" for row in range(len(table))], index=table.index, dtype=str)


def _table(source: UnionSource, manifest: Manifest, rows: np.ndarray, owner: str) -> pd.DataFrame:
    """The rows of one source as they stand in the union."""
    frame = manifest.table.assign(image=_image_names(source, manifest.table)).iloc[rows].reset_index(drop=True)
    text = {column: frame[column].astype(str) for column in frame.columns if column != "line"}
    frame = frame.assign(**text)
    beginning = source.name if source.prefix is None else source.prefix
    columns = [frame[column].str.strip().replace("", "unstated") for column in source.site_columns]
    first, *further = [pd.Series(beginning, index=frame.index, dtype=str)] * bool(beginning) + columns
    site = first.str.cat(further, sep="-") if further else first
    if columns and len(pd.concat(columns, axis=1).drop_duplicates()) != site.nunique():
        raise DataError(
            f"source {shown(source.name)}: two combinations of {list(source.site_columns)} would be one site's name; "
            "rename a value"
        )
    changed = {
        "site": site,
        "patient": _prefixed(owner, frame["patient"]),
        "study": _prefixed(owner, frame["study"]),
        "source": source.name,
        "modality": source.modality,
    }
    if source.modality == "text":
        changed["image"] = ""
    if source.modality == "image":
        # The table keeps the column that the report was taken from under its own name as well.
        copies = [column for column in frame.columns if frame[column].equals(frame["report"])]
        changed |= dict.fromkeys(["report", *copies], "")
    if source.label_source:
        changed["label_source"] = source.label_source
    return frame.assign(**changed)


def _prefixed(owner: str, identifiers: pd.Series) -> pd.Series:
    return (f"{owner}:" + identifiers).where(identifiers != "", "")


def _targets(source: UnionSource, manifest: Manifest, names: Sequence[str]) -> np.ndarray:
    """Targets of all rows of a source in the union's labels, ``(n, C) int8``; -1 for labels it does not record."""
    odd = sorted(set(source.rename) - set(manifest.labels))
    if odd:
        raise DataError(
            f"source {shown(source.name)}: rename begins at {shown(odd[0])}, its labels are {list(manifest.labels)}"
        )
    meant = [source.rename.get(label, label) for label in manifest.labels]
    twice = sorted({name for name in meant if meant.count(name) > 1 and name in names})
    if twice:
        raise DataError(f"source {shown(source.name)}: two of its labels would both be {shown(twice[0])}; rename one")
    if not set(meant) & set(names):
        raise DataError(
            f"source {shown(source.name)}: none of its labels {list(manifest.labels)} is one of the federation's "
            f"{list(names)}; state 'rename'"
        )
    targets = np.full((len(manifest), len(names)), UNKNOWN, dtype=np.int8)
    for column, name in enumerate(names):
        if name in meant:
            targets[:, column] = manifest.targets[:, meant.index(name)]
    return targets


def _refuse_shared_rows(sources: Sequence[UnionSource], places: Sequence[str], rows: Sequence[np.ndarray]) -> None:
    taken: dict[str, dict[int, str]] = {}
    for source, place, part in zip(sources, places, rows, strict=True):
        holders = taken.setdefault(place, {})
        shared = [row for row in part.tolist() if row in holders]
        if shared:
            raise DataError(
                f"sources {shown(holders[shared[0]])} and {shown(source.name)} share {len(shared)} rows of one root; "
                "a row belongs to one source: tell them apart with 'where'"
            )
        holders.update(dict.fromkeys(part.tolist(), source.name))


def _refuse_shared_sites(sources: Sequence[UnionSource], tables: Sequence[pd.DataFrame]) -> None:
    holders: dict[str, str] = {}
    for source, table in zip(sources, tables, strict=True):
        for site in sorted(set(table["site"])):
            if site in holders:
                raise DataError(
                    f"sources {shown(holders[site])} and {shown(source.name)} both have the site {shown(site)}; "
                    "state a 'prefix' for one"
                )
            holders[site] = source.name
