"""Writes a condition file with a local language model, once and offline; no run ever asks a model.

    python -m server_app.conditions --model FOLDER --labels cat,dog,sofa --out file.json
    python -m server_app.conditions --model FOLDER --data FOLDER_OR_ZIP --out file.json --domain "chest X-ray"

FOLDER holds an instruction model as transformers saves it; nothing is downloaded. With --data the prompts speak of the
label combinations that the training rows have, each at least --min-count times; else of all pairs of --labels. Only
label names enter a prompt. Review the file before you use it: `fedmpt.conditions = "file.json"`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from datasets.catalogue import open_manifest
from datasets.records import DataError
from federation import seeding
from federation.files import write_atomic
from federation.settings import names_in
from models.condition_writer import (
    CONDENSE,
    DESCRIBE,
    MORE,
    LocalModel,
    label_combinations,
    label_pairs,
    write_conditions,
)
from models.conditions import ConditionError, condition_file

MAX_COMBINATIONS = 50


def write_file(
    model: LocalModel,
    out: Path,
    *,
    labels: Sequence[str] = (),
    data: str = "",
    count: int = 5,
    min_count: int = 5,
    domain: str = "picture",
    seed: int = 1,
) -> dict[str, Any]:
    """Writes the condition file and returns its content. Raises ConditionError and DataError."""
    labels, together = _asked_about(tuple(labels), data, min_count, seed)
    with seeding.scope(seed, "conditions"):
        written = write_conditions(model, labels, together, count, domain)
    provenance = {
        "kind": "language model",
        "model": model.folder.name,
        "model_sha256": model.sha256(),
        "decoding": "greedy",
        "transformers": version("transformers"),
        "prompts": [DESCRIBE, CONDENSE, MORE],
        "domain": domain,
        "combinations": [[labels[number] for number in numbers] for numbers in together],
        "min_count": min_count if data else 0,
        "seed": seed,
        "scenes": list(written.scenes),
        "date": datetime.now(UTC).date().isoformat(),
    }
    content = condition_file(written.conditions, labels, provenance)
    write_atomic(out, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode(), 0o644)
    return content


def _asked_about(
    labels: tuple[str, ...], data: str, min_count: int, seed: int
) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    """The label names and the sets of label numbers to ask about."""
    if not data:
        if len(labels) < 2:
            raise ConditionError(f"--labels names {len(labels)} labels, at least 2 are needed; or give --data")
        return labels, label_pairs(len(labels), seeding.numpy_generator(seed, "conditions"), MAX_COMBINATIONS)
    manifest = open_manifest(data, labels=labels or None, rng_for=lambda name: seeding.numpy_generator(seed, name))
    rows = np.asarray(manifest.targets)[manifest.table["split"].to_numpy() == "train"]
    together = label_combinations(rows, min_count=min_count, limit=MAX_COMBINATIONS)
    if not together:
        raise ConditionError(
            f"no two labels appear together in {min_count} training rows of the data; lower --min-count, or give "
            "--labels alone"
        )
    return manifest.labels, together


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 when the file was written, 2 when it cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m server_app.conditions", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a transformers folder, never downloaded")
    parser.add_argument("--labels", default="", help="comma-separated label names (default: those of --data)")
    parser.add_argument("--data", default="", help="folder, zip, table or embedded name whose labels are counted")
    parser.add_argument("--count", type=int, default=5, metavar="N", help="conditions to write (default: 5)")
    parser.add_argument("--min-count", type=int, default=5, help="rows a combination needs (default: 5)")
    parser.add_argument("--domain", default="picture", help="what a sample is, e.g. 'chest X-ray' (default: picture)")
    parser.add_argument("--seed", type=int, default=1, help="of the pairs that are drawn from many labels")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    options = parser.parse_args(arguments)
    if options.count < 1 or options.min_count < 1:
        parser.error("--count and --min-count are at least 1")
    try:
        content = write_file(
            LocalModel(options.model),
            options.out,
            labels=names_in(options.labels),
            data=options.data,
            count=options.count,
            min_count=options.min_count,
            domain=options.domain,
            seed=options.seed,
        )
    except (ConditionError, DataError, OSError) as error:
        print(f"conditions: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}: {', '.join(content['conditions'])}; SHA-256 {content['sha256']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
