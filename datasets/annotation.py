"""The annotation queue of a real site: the samples that active learning picked, on their way to readers and back.

    python -m datasets.annotation export FOLDER --data ROOT
    python -m datasets.annotation import FOLDER answers.csv --rule agree
    python -m datasets.annotation status FOLDER

FOLDER is the site's folder of the pool, which the site's training process opens with `open_pool` and `site_pool` and
changes with `change`; both may run at the same time. ``export`` writes what is pending as a table with thumbnails and
a page to label from, ``import`` takes answers back, late, in parts or twice, and the next cycle starts with what has
arrived. Nothing here talks to the network: row keys, labels and names of readers stay at the site.

The parts: `datasets.annotation_pool` (the value and its transitions), `datasets.annotation_store` (on disk),
`datasets.annotation_files` (tables and thumbnails), `datasets.annotation_page` (the page).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from datasets.annotation_files import PAGE, THUMBNAIL_SIDE, WORKLIST, export, read_answers
from datasets.annotation_pool import RULES, Pool, new_pool, receive
from datasets.annotation_store import change, check_data, read_pool
from datasets.catalogue import open_manifest
from datasets.records import PRESENT, UNKNOWN, DataError, Manifest
from datasets.site import sample_ids as sample_ids


def site_pool(manifest: Manifest) -> Pool:
    """The blank pool of a manifest's training rows; rows whose label the manifest states are labelled from the start.

    Row i of the train split has ``ids[i]``. The data checksum is the manifest's: the table and its sidecar.
    """
    ids = sample_ids(manifest)
    rows = np.flatnonzero(manifest.table["split"].to_numpy() == "train").tolist()
    is_known = (manifest.targets == PRESENT if manifest.task == "multiclass" else manifest.targets != UNKNOWN).any(1)
    given = {ids[row]: manifest.targets[row].tolist() for row in rows if is_known[row]}
    return new_pool(manifest.labels, manifest.task, manifest.checksum, [ids[row] for row in rows], given)


def _export(folder: Path, root: str, side: int) -> int:
    pool = read_pool(folder)
    manifest = open_manifest(root, labels=pool.labels)
    check_data(pool, manifest.checksum, folder)
    rows = {id: row for row, id in enumerate(sample_ids(manifest))}
    home = export(pool, folder, lambda id: manifest.images.read(rows[id]), side=side)
    print(f"exported pending={len(pool.pending)} cycle={pool.cycle} table={home / WORKLIST} page={home / PAGE}")
    return 0


def _import(folder: Path, path: Path, rule: str | None, reader: str, time: str) -> int:
    before = read_pool(folder)
    answers, refusals = read_answers(path, before, reader=reader, time=time)
    after = change(folder, lambda pool: receive(pool, answers, rule or pool.rule))
    for refusal in refusals:
        print(f"{path.name} row {refusal.line}: not taken: {refusal.why}", file=sys.stderr)
    new = len(set(answers) - before.answers)
    print(
        f"imported answers={len(answers)} new={new} refused={len(refusals)} rule={after.rule} "
        f"labelled={len(after.labelled)} pending={len(after.pending)} disputed={len(after.disputed)}"
    )
    return 1 if refusals else 0


def _status(folder: Path) -> int:
    pool = read_pool(folder)
    print(f"samples={len(pool.ids)} labelled={len(pool.labelled)} pending={len(pool.pending)}", end=" ")
    print(f"disputed={len(pool.disputed)} unlabelled={len(pool.unlabelled)} rule={pool.rule}")
    pending = set(pool.pending)
    for cycle in range(1, pool.cycle + 1):
        picked = pool.picked(cycle)
        print(f"cycle={cycle} requested={len(picked)} pending={len(pending.intersection(picked))}")
    for reader, count in sorted(Counter(answer.reader for answer in pool.answers).items()):
        print(f"reader={reader!r} answers={count}")
    for id in pool.disputed:
        print(f"disputed={id!r}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m datasets.annotation", description=__doc__.partition("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    one = actions.add_parser("export", help="write what is pending for a reader")
    one.add_argument("folder", type=Path, help="the folder of the pool")
    one.add_argument("--data", required=True, help="the site's data root, for the images")
    one.add_argument("--side", type=int, default=THUMBNAIL_SIDE, help="longest side of a thumbnail in pixels")
    one = actions.add_parser("import", help="take a reader's answers")
    one.add_argument("folder", type=Path, help="the folder of the pool")
    one.add_argument("answers", type=Path, help="the page's download, or the filled table")
    one.add_argument("--rule", choices=RULES, help="who is right where readers differ (default: the rule so far)")
    one.add_argument("--reader", default="", help="who answered the rows that name nobody")
    one.add_argument("--time", default="", help="when, for rows without a time, as 2026-01-31T14:05:00Z")
    one = actions.add_parser("status", help="how many samples are labelled, pending, unlabelled")
    one.add_argument("folder", type=Path, help="the folder of the pool")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 when all went well, 1 when rows were refused and the rest taken, 2 when nothing was done."""
    options = _parser().parse_args(arguments)
    try:
        if options.action == "export":
            return _export(options.folder, options.data, options.side)
        if options.action == "import":
            return _import(options.folder, options.answers, options.rule, options.reader, options.time)
        return _status(options.folder)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
