"""Looks at a hospital's data before its SuperNode starts: the table alone, no image is opened.

    python -m deploy.start_data KITDIR

Exit code 0: it fits the kit; 1: one line an error. `deploy.doctor` looks at every row.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from datasets.catalogue import open_manifest
from datasets.records import DataError
from deploy.doctor_data import table_findings
from deploy.kit import Kit, KitError, node_config, read_kit

TABLES = (".csv", ".parquet", ".zip", "")


def problems(kit: Kit) -> list[str]:
    """What in the data does not fit the kit; empty where all does. Rows are named by number."""
    node = node_config(kit)
    root = Path(str(node.get("data-root", ""))).expanduser()
    if not root.exists() or str(root) == ".":
        return [f"the data root {root} does not exist; set data-root in {kit.path('node_config')}"]
    labels = tuple(kit.listed["labels"])
    if root.suffix.lower() in TABLES:
        found = [finding for finding in table_findings(root, site=kit.name, labels=labels) if finding.level == "error"]
        if found:
            return [f"{finding.sentence}; {finding.fix}" for finding in found]
    try:
        manifest = open_manifest(root, labels=labels)
    except DataError as error:
        return [str(error)]
    named = {str(site) for site in manifest.table["site"] if str(site).strip()}
    if named and kit.name not in named:
        return [
            f"the kit is for {kit.name!r}, but every row that names a site names another one; is it another hospital's "
            "kit? if not, correct the site column or leave it blank"
        ]
    has_training = bool((manifest.table["split"] == "train").any())
    if kit.listed["role"] == "evaluate" and has_training:
        return [f"{kit.name} takes part to evaluate only, but its manifest has training rows; take them out"]
    if kit.listed["role"] == "train" and not has_training:
        return [f"{kit.name} takes part to train, but its manifest has no training row; add some, or ask for the role "
                "'evaluate'"]  # fmt: skip
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        found = problems(read_kit(Path(words[0])))
    except KitError as error:
        found = [str(error)]
    print("\n".join(found), file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
