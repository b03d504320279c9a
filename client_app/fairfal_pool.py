"""A site's pool of images in FairFAL: what is labelled, what readers were asked for, each cycle's labelled set.

The project's fairfal specification, sections 2 and 14. The pool is that of `datasets.annotation`, in the site's folder
``annotation``, so that readers can work on it while a run goes on. The labelled set of a cycle is frozen when the site
first trains in it, in ``labelled/CYCLE.json``: what arrives later counts from the next cycle on, and a restarted site
trains on the same images again. Row keys and labels stay in these files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from client_app.site import IdleNode, Site
from client_app.training import usable
from datasets.annotation_pool import Marks, Pool, new_pool
from datasets.annotation_store import open_pool
from datasets.records import DataError, Split
from federation.files import write_atomic
from federation.settings import Settings

POOL, LABELLED = "annotation", "labelled"


class NothingLabelled(IdleNode):
    """The site has no labelled sample yet, so it has nothing to train on."""


def pool_rows(split: Split, settings: Settings) -> np.ndarray:
    """Rows of the training split that are in the pool, ``(N,) int64``.

    All of them where readers label; with an oracle those whose label the data know, which it can tell.
    """
    return np.arange(len(split)) if settings.options.labels == "readers" else usable(split)


def open_site_pool(site: Site, settings: Settings) -> Pool:
    """The site's pool as it is now; made at the first call. Raises DataError where it is of other data.

    With readers, what the manifest states is labelled from the start; with an oracle nothing is.
    """
    split = site.data.splits["train"]
    given: dict[str, list[int]] = {}
    if settings.options.labels == "readers":
        given = {split.ids[row]: split.targets[row].tolist() for row in usable(split)}
    ids = [split.ids[row] for row in pool_rows(split, settings)]
    blank = new_pool(site.data.labels, site.data.task, site.data.manifest_sha256, ids, given)
    return open_pool(site.folder / POOL, blank)


def known_at(pool: Pool, cycle: int) -> dict[str, Marks]:
    """Labelled samples that a cycle can learn from, marks by id in the order of the pool: none was picked after it.

    A server that lost its newest checkpoint asks for an older cycle again; the site then has picks of a newer one.
    """
    return {
        id: marks for id, marks in pool.labelled.items() if id not in pool.requests or pool.requests[id].cycle <= cycle
    }


def rows_of(site: Site, ids: Mapping[str, Marks] | tuple[str, ...]) -> np.ndarray:
    """Rows of the training split of these samples, ``(n,) int64``, in their order."""
    row_of = {id: row for row, id in enumerate(site.data.splits["train"].ids)}
    return np.array([row_of[id] for id in ids], dtype=np.int64)


def labelled_part(site: Site, marks: Mapping[str, Marks]) -> Site:
    """The site as its training sees it: the labelled samples and no other, with the labels that they were given.

    Raises NothingLabelled.
    """
    if not marks:
        raise NothingLabelled("no sample has its label yet; label the worklist, import it, and resume")
    split = site.data.splits["train"]
    part = Split(split.images[rows_of(site, marks)], np.array(list(marks.values()), dtype=np.int8))
    return replace(site, data=replace(site.data, splits={**site.data.splits, "train": part}))


def frozen_labels(site: Site, settings: Settings, cycle: int) -> dict[str, Marks]:
    """The labelled set of a cycle, frozen at the first call that finds any. Raises DataError for a damaged file."""
    path = site.folder / LABELLED / f"{cycle:04d}.json"
    if path.exists():
        try:
            return {id: tuple(marks) for id, marks in json.loads(path.read_bytes())["marks"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is damaged; delete it, and the labels that are known now count") from error
    marks = known_at(open_site_pool(site, settings), cycle)
    if marks:
        content = {"cycle": cycle, "labels": list(site.data.labels), "marks": marks}
        write_atomic(path, json.dumps(content).encode())
    return marks
