"""Preflight of a site's data: every row, named by its number and never by what stands in it.

The data room refuses a manifest at its first fault and names files and cells; this walks on to the last fault and
names rows only, so that its report can be sent away. Rows count as a spreadsheet shows them, the header is row 1.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from datasets.catalogue import EMBEDDED, open_manifest
from datasets.labels import LABEL_PREFIX, mark_of
from datasets.manifest import IMAGE_SEPARATOR, SPLIT_NAMES, find_sidecar, find_table, known_fields
from datasets.records import PRESENT, SPLITS, DataError, Manifest
from datasets.sidecar import Sidecar, parse_sidecar
from datasets.site import class_counts, present_modalities
from datasets.source import MAX_TABLE_BYTES, Source, clean_name
from datasets.tables import Table, parse_table
from deploy.doctor_finding import Finding, error, ok, rows, warning

MODALITIES = ("image", "report")
ARTICLE = {"image": "an image", "report": "a report"}
Cells = Sequence[str]
Lines = Sequence[int]


def data_findings(
    root: str,
    *,
    site: str,
    labels: Sequence[str] = (),
    modalities: Sequence[str] = (),
    min_train: int = 1,
    min_positives: int = 1,
) -> list[Finding]:
    """All checks of one data root. ``labels``: the federation's list, empty where it is not known here.

    ``modalities``: out of `MODALITIES`, what the federation expects of this site, empty where that is not known here;
    ``min_train`` and ``min_positives``: training samples, and positives of a label, that the federation asks for.
    """
    findings: list[Finding] = []
    has_table = root not in EMBEDDED and Path(root).suffix.lower() not in (".npz", ".whl", ".toml")
    if has_table:
        if not root.strip() or not Path(root).expanduser().exists():
            return [error("data-root", "the data root does not exist", "set data-root in the node config")]
        findings = table_findings(Path(root).expanduser(), site=site, labels=labels)
    if any(finding.level == "error" for finding in findings):
        return findings
    try:
        manifest = open_manifest(root, labels=tuple(labels) or None)
    except DataError as problem:
        return [*findings, _refused("data-manifest", "the manifest is refused", problem)]
    findings += check_modalities(manifest, modalities) if modalities else []
    return [*findings, *image_findings(manifest), *count_findings(manifest, min_train, min_positives)]


def table_findings(root: Path, *, site: str, labels: Sequence[str] = ()) -> list[Finding]:
    """What can be said of the table alone: encoding, columns, label cells, splits, duplicates, patients, paths."""
    try:
        source, name = find_table(root)
        sidecar_name, sidecar_data = find_sidecar(source, name)
        sidecar = parse_sidecar(sidecar_data, sidecar_name) if sidecar_name else Sidecar()
        table = parse_table(source.read(name, max_bytes=MAX_TABLE_BYTES), name, sidecar.encoding)
        fields = known_fields(table, sidecar)
    except DataError as problem:
        if isinstance(problem.__cause__, UnicodeDecodeError | LookupError) or "byte order mark" in str(problem):
            fix = 'save the table as UTF-8, or state its encoding in manifest.json, as in {"encoding": "gbk"}'
            return [_refused("data-encoding", "the table's text cannot be read", problem, fix)]
        return [_refused("data-table", "the table cannot be read", problem)]
    lines = [int(line) for line in table.lines]
    columns = {record: [str(cell) for cell in fields[record]] for record in fields.columns}
    return [
        *label_findings(table, sidecar, labels),
        check_splits(columns["split"], lines),
        check_paths(columns["image"], lines),
        *([] if sidecar.arrays else [check_present(source, sidecar.image_folder, columns["image"], lines)]),
        check_duplicates(columns["image"], lines),
        check_leakage(columns["patient"], columns["split"], lines),
        check_site(columns["site"], lines, site),
    ]


def label_findings(table: Table, sidecar: Sidecar, labels: Sequence[str]) -> list[Finding]:
    """Label names against the federation's list, and the cells of every label column."""
    found = label_columns([str(column) for column in table.frame.columns], sidecar.labels, labels)
    lines = [int(line) for line in table.lines]
    findings = [check_label_names(list(found), labels)] if found and labels else []
    return findings + [
        check_label_cells(label, [str(cell) for cell in table.frame[column]], lines)
        for label, column in found.items()
        if column
    ]


def label_columns(columns: Sequence[str], listed: Sequence[str] | None, labels: Sequence[str]) -> dict[str, str]:
    """Label -> its column, "" where there is none; empty for a table of one class a row.

    >>> label_columns(["image", "label:cat", "label:dog"], None, [])
    {'cat': 'label:cat', 'dog': 'label:dog'}
    """
    names = [column.removeprefix(LABEL_PREFIX) for column in columns if column.startswith(LABEL_PREFIX)]
    names = list(listed or names) or [name for name in labels if name in columns]
    placed = {name: next((c for c in (LABEL_PREFIX + name, name) if c in columns), "") for name in names}
    return placed if any(placed.values()) else {}


def check_label_names(found: Sequence[str], expected: Sequence[str]) -> Finding:
    """The manifest's labels against the federation's; the order does not matter, the federation's is taken."""
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        words = [f"missing {', '.join(missing)}"] * bool(missing) + [f"not asked for {', '.join(extra)}"] * bool(extra)
        return error(
            "data-labels",
            f"the manifest has other labels than the federation: {'; '.join(words)}",
            "add a blank column for a label this site does not record, remove those nobody asked for",
        )
    return ok("data-labels", f"{len(expected)} labels, as in the federation")


def check_label_cells(label: str, cells: Cells, lines: Lines) -> Finding:
    """Cells are 1, 0, or -1 or blank for unknown."""
    if bad := [line for line, cell in zip(lines, cells, strict=True) if mark_of(cell) is None]:
        return error(
            "data-label-values",
            f"label {label}: {rows(bad)} hold something else than a label value",
            "write 1, 0, or -1 or blank for unknown",
        )
    return ok("data-label-values", f"label {label}: every cell is a label value")


def check_splits(cells: Cells, lines: Lines) -> Finding:
    """A split is named in every row or in none."""
    named = [cell.strip().lower() for cell in cells]
    if not any(named):
        return ok("data-splits", "no split column: patients are split by a hash")
    if bad := [line for line, cell in zip(lines, named, strict=True) if cell not in SPLIT_NAMES]:
        fix = f"write {', '.join(SPLITS)}, or leave the whole column out"
        return error("data-splits", f"{rows(bad)} name no split", fix)
    return ok("data-splits", "every row names its split")


def check_paths(cells: Cells, lines: Lines) -> Finding:
    """Paths stay below the data root."""
    bad = []
    for line, part in _parts(cells, lines):
        try:
            clean_name(part)
        except DataError:
            bad.append(line)
    if bad:
        return error("data-paths", f"{rows(bad)} name an image outside the data root", "write paths relative to it")
    return ok("data-paths", "every path stays below the data root")


def check_present(source: Source, image_folder: str, cells: Cells, lines: Lines) -> Finding:
    """Every image is there, below the root, below ``image_folder``, or below ``images``."""
    folders = [f"{folder}/" if folder else "" for folder in ((image_folder, "") if image_folder else ("", "images"))]

    def is_there(part: str) -> bool:
        try:
            return any(source.has(folder + clean_name(part)) for folder in folders)
        except DataError:
            return False

    if missing := [line for line, part in _parts(cells, lines) if not is_there(part)]:
        return error("data-missing", f"{rows(missing)}: the image is missing", "copy these images, or remove the rows")
    return ok("data-missing", "every image is there")


def check_duplicates(cells: Cells, lines: Lines) -> Finding:
    """An image is named once."""
    first: dict[str, int] = {}
    twice: set[int] = set()
    for line, part in _parts(cells, lines):
        place = part.replace("\\", "/").removeprefix("./")
        if place in first:
            twice |= {first[place], line}
        first.setdefault(place, line)
    if twice:
        return error("data-duplicates", f"{rows(twice)} name an image that another row names too", "keep one of them")
    return ok("data-duplicates", "every image is named once")


def _parts(cells: Cells, lines: Lines) -> list[tuple[int, str]]:
    """Row and path of every image; a cell may name several."""
    return [
        (line, part.strip())
        for line, cell in zip(lines, cells, strict=True)
        for part in cell.split(IMAGE_SEPARATOR)
        if part.strip()
    ]


def check_leakage(patients: Cells, splits: Cells, lines: Lines) -> Finding:
    """A patient is in one split only; blank identifiers are patients of one row."""
    seen: dict[str, dict[str, int]] = {}
    for patient, split, line in zip(patients, splits, lines, strict=True):
        if patient.strip().lower() not in ("", "nan") and (name := SPLIT_NAMES.get(split.strip().lower())):
            seen.setdefault(patient, {}).setdefault(name, line)
    shared = [found for found in seen.values() if len(found) > 1]
    if shared:
        return error(
            "data-leakage",
            f"{len(shared)} patients are in more than one split, for example in {rows(shared[0].values())}",
            "give each patient one split, or leave the split column out",
        )
    if not any(patient.strip() for patient in patients):
        fix = "fill the column 'patient', or make sure that no patient has images in two splits"
        return warning("data-leakage", "no row names its patient, so nobody can say whether splits share one", fix)
    return ok("data-leakage", "no patient is in two splits")


def check_site(cells: Cells, lines: Lines, site: str) -> Finding:
    """Rows that name a site name this one: all rows of the manifest are taken, whatever they name."""
    if other := [line for line, cell in zip(lines, cells, strict=True) if cell.strip() and cell.strip() != site]:
        fix = "is this another site's data? all rows are used; remove those of others, or correct the column"
        return warning("data-site", f"{len(other)} rows name another site than {site}: {rows(other)}", fix)
    return ok("data-site", "no row names another site")


def image_findings(manifest: Manifest) -> list[Finding]:
    """Opens and decodes every image; the same pixels in two splits are the same patient under two names."""
    lines, splits = (list(manifest.table[column]) for column in ("line", "split"))
    has_image = [bool(path) for path in manifest.table["image"]] if "image" in manifest.table.columns else None
    bad: list[int] = []
    held: dict[bytes, dict[str, int]] = {}
    for row, line in enumerate(lines):
        if has_image is not None and not has_image[row]:
            continue
        try:
            pixels = manifest.images.read(row)
        except DataError:
            bad.append(int(line))
            continue
        digest = hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).digest()
        held.setdefault(digest, {}).setdefault(str(splits[row]), int(line))
    findings = []
    if bad:
        fix = "copy these files again or convert them; DICOM needs the extra: python deploy/install.py dicom"
        findings.append(error("data-images", f"{rows(bad)}: the image cannot be decoded", fix))
    if shared := [found for found in held.values() if len(found) > 1]:
        sentence = f"{len(shared)} images are in two splits with the same pixels, for example in"
        fix = "remove the copies: a model is not to be measured on what it was trained on"
        findings.append(warning("data-copies", f"{sentence} {rows(shared[0].values())}", fix))
    return findings or [ok("data-images", f"all images open, of {len(manifest)} samples")]


def check_modalities(manifest: Manifest, expected: Sequence[str]) -> list[Finding]:
    """What the rows hold against what the federation was told that this site holds."""
    has_any = present_modalities(manifest).any(axis=0)
    found = [name for name, is_there in zip(MODALITIES, has_any, strict=True) if is_there]
    said = f"the federation expects {' and '.join(expected)} of this site"
    if missing := [name for name in expected if name not in found]:
        sentence = f"{said}, no row has {' or '.join(ARTICLE[name] for name in missing)}"
        fix = "fill the columns, or have the operator correct the site's modalities in federation.yaml"
        return [error("data-modalities", sentence, fix)]
    if extra := [name for name in found if name not in expected]:
        fix = "if they are to be used, have the operator correct the site's modalities in federation.yaml"
        return [
            warning("data-modalities", f"{said}, rows have {' and '.join(ARTICLE[name] for name in extra)} too", fix)
        ]
    return [ok("data-modalities", f"the rows have {' and '.join(found)}, as the federation expects")]


def count_findings(manifest: Manifest, min_train: int, min_positives: int) -> list[Finding]:
    """Samples by split and label against what the federation asks for."""
    is_train = (manifest.table["split"] == "train").to_numpy()
    targets = manifest.targets[is_train]
    usable = int((targets >= 0).any(axis=1).sum())
    sizes = {split: int((manifest.table["split"] == split).sum()) for split in SPLITS}
    counted = ", ".join(f"{size} {split}" for split, size in sizes.items())
    findings = [ok("data-counts", f"samples: {counted}")]
    if usable < min_train:
        sentence = f"{usable} training samples with a label, the federation asks for {min_train}"
        findings = [error("data-counts", sentence, "add samples or labels, or take part by evaluation only")]
    positives = class_counts(targets).positives
    rare = [label for label, count in zip(manifest.labels, positives, strict=True) if count < min_positives]
    if rare and usable:
        sentence = f"labels with fewer than {min_positives} training positives here: {', '.join(rare)}"
        findings.append(warning("data-positives", sentence, "the site can still take part: others teach these labels"))
    for split in ("val", "test"):
        if not sizes[split]:
            sentence = (
                f"no {split} sample: this site has no say in {'choosing' if split == 'val' else 'judging'} the model"
            )
            findings.append(warning(f"data-{split}", sentence, f"give some patients the split {split}"))
    if not (manifest.targets == PRESENT).any():
        findings.append(error("data-positives", "no label is positive in any row", "check the label columns"))
    return findings


OWN_MESSAGE = (
    "for the full story, which may name files and cells: "
    "python -c \"from datasets.catalogue import open_manifest; open_manifest('DATA-ROOT')\""
)


def _refused(code: str, what: str, problem: DataError, fix: str = OWN_MESSAGE) -> Finding:
    """A refusal of the data room in a sentence that quotes none of it but row and line numbers."""
    numbers = [int(number) for number in re.findall(r"\b(?:row|rows|line) (\d+)", str(problem))]
    where = f" at {rows(numbers)}" if numbers else ""
    return error(code, f"{what}{where}", fix)
