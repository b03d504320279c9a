"""Multi-label pictures out of a single-label set: 2x2 mosaics whose label is the union of their tiles' classes.

Source: FedNCA-ML (Peng et al., arXiv 2509.12544) trains on such mosaics of CIFAR-10 and DermaMNIST but publishes no
code for them; the recipe is the one of the project's fednca specification, section 5, paragraph "Mosaic".
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from datasets.images import ArrayImages
from datasets.records import SPLITS, DataError, Images, Manifest

MosaicKind = Literal["grid", "corner_max"]

CELLS = 4  # row by row: top left, top right, bottom left, bottom right
EMPTY = -1
TILE_COLUMNS = tuple(f"tile_{cell}" for cell in range(CELLS))
MOSAICS_PER_SPLIT = {"train": 2000, "val": 400, "test": 600}


class Mosaics(NamedTuple):
    """``pixels (m, 2H, 2W[, 3]) uint8``, ``targets (m, C) int8`` (1 or 0), ``tiles (m, 4) int64`` (-1 = empty cell)."""

    pixels: np.ndarray
    targets: np.ndarray
    tiles: np.ndarray


def mosaic(
    images: np.ndarray,
    classes: np.ndarray,
    rng: np.random.Generator,
    *,
    count: int,
    num_classes: int,
    kind: MosaicKind = "grid",
) -> Mosaics:
    """Lays ``count`` mosaics out of the tiles ``images (n, H, W[, 3]) uint8`` of ``classes (n,)``.

    ``grid``: each mosaic holds k tiles, k uniform on {1..4}, in random cells; empty cells are black.
    ``corner_max`` (NC_MLab, Li et al. 2023): two tiles, each padded to the whole canvas in opposite corners, and the
    pixel maximum of the two. The corners do not overlap, so this is a grid with two cells of a diagonal filled.

    Tiles are dealt like cards: every tile is used once before any is used again, in a new order each time. A mosaic
    laid while the deck runs out may hold one tile twice.

    Choice: corner_max always fills top left and bottom right; the source does not say which opposite corners.
    """
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or len(images) != len(classes):
        raise DataError(
            f"a mosaic needs tiles (n, H, W[, 3]) uint8 and n classes, got {images.dtype} {images.shape} "
            f"and {len(classes)} classes"
        )
    if count < 0 or (count > 0 and len(images) == 0):
        raise DataError(f"cannot lay {count} mosaics out of {len(images)} tiles")
    if kind == "grid":
        order = rng.permuted(np.tile(np.arange(CELLS), (count, 1)), axis=1)
        is_filled = order < rng.integers(1, CELLS + 1, size=(count, 1))
    elif kind == "corner_max":
        is_filled = np.tile([True, False, False, True], (count, 1))
    else:
        raise DataError(f"mosaic kind {kind!r} is unknown; use 'grid' or 'corner_max'")

    tiles = np.full((count, CELLS), EMPTY, dtype=np.int64)
    tiles[is_filled] = _deal(rng, len(images), int(is_filled.sum()))
    targets = np.zeros((count, num_classes), dtype=np.int8)
    targets[np.nonzero(is_filled)[0], np.asarray(classes)[tiles[is_filled]]] = 1
    return Mosaics(_lay(images, tiles), targets, tiles)


def mosaic_manifest(
    manifest: Manifest,
    rng: np.random.Generator,
    *,
    counts: Mapping[str, int] = MOSAICS_PER_SPLIT,
    kind: MosaicKind = "grid",
) -> Manifest:
    """The multi-label manifest of mosaics over a single-label one (digits, blood cells, CIFAR).

    Mosaics of a split use tiles of that split only, so nothing leaks from train to test. ``counts`` says how many
    mosaics each split gets; more than there are tiles is fine (see `mosaic`). The columns ``tile_0`` to ``tile_3``
    keep the row of each cell's tile in ``manifest`` (-1 = empty cell).

    Choice: a split without tiles gets no mosaics. A mosaic is a patient of its own, since its tiles may come from
    several; patients stay apart across splits, not across sites.
    """
    if manifest.task != "multiclass":
        raise DataError("mosaics are made of single-label images; this manifest is multi-label: switch the mosaic off")
    classes = manifest.targets.argmax(axis=1)
    laid, names, rows_of_cells = [], [], []
    for split in SPLITS:
        rows = np.flatnonzero(manifest.table["split"].to_numpy() == split)
        if len(rows) == 0:
            continue
        tiles = _read_tiles(manifest, rows)
        part = mosaic(
            tiles, classes[rows], rng, count=counts.get(split, 0), num_classes=len(manifest.labels), kind=kind
        )
        laid.append(part)
        names += [split] * len(part.tiles)
        rows_of_cells.append(np.where(part.tiles == EMPTY, EMPTY, rows[part.tiles]))
    if not names:
        raise DataError(f"no mosaic was asked for in a split that has tiles: counts={dict(counts)}")
    shapes = sorted({part.pixels.shape[1:] for part in laid})
    if len(shapes) > 1:
        raise DataError(f"tiles differ in size or channels between splits, mosaics would be {shapes}; resize first")

    sites = sorted(set(manifest.table["site"]))
    table = plain_table(names, site=sites[0] if len(sites) == 1 else "mosaic", prefix="mosaic")
    table[list(TILE_COLUMNS)] = np.concatenate(rows_of_cells)
    targets = np.concatenate([part.targets for part in laid])
    images = ArrayImages(np.concatenate([part.pixels for part in laid]))
    checksum = manifest_checksum(manifest.labels, table, targets, images)
    return Manifest(manifest.labels, "multilabel", table, targets, images, checksum)


def plain_table(splits: list[str], *, site: str, prefix: str) -> pd.DataFrame:
    """The manifest table of samples that have nothing but a split: each is a patient of its own, without a report."""
    return pd.DataFrame(
        {
            "patient": [f"{prefix}-{row:05d}" for row in range(len(splits))],
            "study": "",
            "site": site,
            "split": splits,
            "time": "",
            "label_source": "curated",
            "report": "",
            "line": np.arange(1, len(splits) + 1),
        }
    )


def manifest_checksum(labels: tuple[str, ...], table: pd.DataFrame, targets: np.ndarray, images: Images) -> str:
    """SHA-256 (hex) over everything a manifest says: label order, rows, targets and pixels."""
    digest = hashlib.sha256("\x1f".join(labels).encode())
    digest.update(table.to_csv(index=False).encode())
    digest.update(np.ascontiguousarray(targets, dtype=np.int8).tobytes())
    digest.update(images.checksum.encode())
    return digest.hexdigest()


def _deal(rng: np.random.Generator, num_tiles: int, needed: int) -> np.ndarray:
    """``needed`` tile numbers: whole shuffled decks one after the other, the last one cut."""
    if needed == 0:
        return np.empty(0, dtype=np.int64)
    decks = -(-needed // num_tiles)
    return np.concatenate([rng.permutation(num_tiles) for _ in range(decks)])[:needed]


def _lay(images: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    height, width, *channels = images.shape[1:]
    canvas = np.zeros((len(tiles), CELLS, height, width, *channels), dtype=np.uint8)
    is_filled = tiles != EMPTY
    canvas[is_filled] = images[tiles[is_filled]]
    grid = canvas.reshape(len(tiles), 2, 2, height, width, *channels).swapaxes(2, 3)  # (m, 2, H, 2, W[, 3])
    return np.ascontiguousarray(grid).reshape(len(tiles), 2 * height, 2 * width, *channels)


def _read_tiles(manifest: Manifest, rows: np.ndarray) -> np.ndarray:
    tiles = [manifest.images.read(int(row)) for row in rows]
    for row, tile in zip(rows, tiles, strict=True):
        if tile.shape != tiles[0].shape:
            line = manifest.table["line"].iloc[int(row)]
            raise DataError(
                f"row {line}: a mosaic needs tiles of one size, this image is {tile.shape}, the first of its split "
                f"{tiles[0].shape}; resize the images first or switch the mosaic off"
            )
    return np.stack(tiles)
