"""Importers of photograph collections with annotated objects: Pascal VOC and COCO."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

from datasets.imported import Imported, parse_xml, read_lines
from datasets.labels import LABEL_PREFIX
from datasets.records import DataError
from datasets.source import MAX_TABLE_BYTES, FolderSource, decode_text, shown

VOC_LABELS = (
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)
MAX_XML_BYTES = 16 * 2**20


def import_voc(src: Path) -> Imported:
    """Pascal VOC, one year's folder: ``ImageSets/Main``, ``Annotations``, ``JPEGImages``; 20 classes.

    Raises DataError for XML that is damaged, declares a DTD or an entity, or names another class.

    Choice: objects marked difficult count as present, since the image does show them.
    Choice: ``trainval.txt`` is train where there is no separate ``train.txt`` and ``val.txt``; a test set without
    any annotation (as VOC2012's) is left out.
    """
    source = FolderSource(src)
    sets = {split: f"ImageSets/Main/{split}.txt" for split in ("train", "val", "test")}
    if not source.has(sets["train"]) and not source.has(sets["val"]):
        sets = {"train": "ImageSets/Main/trainval.txt", "test": sets["test"]}
    rows = []
    for split, name in sets.items():
        images = read_lines(source, name)
        if split == "test" and not any(source.has(f"Annotations/{image}.xml") for image in images):
            continue
        for image in images:
            present = voc_classes(source.read(f"Annotations/{image}.xml", max_bytes=MAX_XML_BYTES), f"{image}.xml")
            rows.append((f"JPEGImages/{image}.jpg", split, *(str(int(label in present)) for label in VOC_LABELS)))
    if not rows:
        raise DataError(f"{src} has no image lists in ImageSets/Main; give one year's folder, as VOCdevkit/VOC2007")
    columns = ["image", "split", *(LABEL_PREFIX + label for label in VOC_LABELS)]
    return Imported(pd.DataFrame(rows, columns=columns), VOC_LABELS, label_source="voc")


def voc_classes(data: bytes, name: str) -> set[str]:
    """Names of the classes an annotation shows; raises DataError for bad XML, DTDs, entities, unknown classes."""
    root = parse_xml(data, name, "VOC annotations")
    # Only direct children: a person's parts (head, hand, foot) have names too.
    present = {(item.findtext("name") or "").strip() for item in root.findall("object")}
    odd = sorted(present - set(VOC_LABELS))
    if odd:
        raise DataError(f"{name} has an object of class {shown(odd[0])}; VOC's are {', '.join(VOC_LABELS)}")
    return present


def import_coco(src: Path) -> Imported:
    """COCO instances: every ``annotations/instances_*.json``, with the categories of the files in order of their ids.

    An image shows a category when it has at least one annotation of it, crowds included. Raises DataError for files
    that disagree about the categories and for annotations of images or categories nobody lists.

    Choice: ``instances_val2017`` is our val, ``instances_train2017`` our train; there is no public test annotation.
    """
    source = FolderSource(src)
    folder = src / "annotations"
    names = sorted(path.name for path in folder.glob("instances_*.json")) if folder.is_dir() else []
    parts: list[pd.DataFrame] = []
    labels: tuple[str, ...] = ()
    for name in names:
        subset = name.removeprefix("instances_").removesuffix(".json")
        split = next((split for split in ("train", "val", "test") if subset.startswith(split)), None)
        if split is None:
            raise DataError(f"{name} is named after no split; rename it to instances_train..., _val... or _test...")
        listed, files, marks = coco_marks(source.read(f"annotations/{name}", max_bytes=MAX_TABLE_BYTES), name)
        if labels and listed != labels:
            raise DataError(f"{name} lists other categories than the files before it; import the sets one by one")
        labels = listed
        places = (f"{subset}/", f"images/{subset}/", "images/", "")
        place = next((place for place in places if files and source.has(place + files[0])), places[0])
        frame = pd.DataFrame({"image": [place + file for file in files], "split": split})
        columns = [LABEL_PREFIX + label for label in labels]
        parts.append(pd.concat([frame, pd.DataFrame(marks.astype(str), columns=columns)], axis=1))
    if not parts:
        raise DataError(f"{src} has no annotations/instances_*.json; give the folder that holds COCO's annotations")
    return Imported(pd.concat(parts, ignore_index=True), labels, label_source="coco")


def coco_marks(data: bytes, name: str) -> tuple[tuple[str, ...], list[str], np.ndarray]:
    """Category names (C), image file names (n) and presence ``(n, C) int8`` (1, 0) of one instances file."""
    try:
        document = json.loads(decode_text(data, name))
        categories = sorted((int(one["id"]), str(one["name"])) for one in document["categories"])
        images = {int(one["id"]): str(one["file_name"]) for one in document["images"]}
        rows = {image: row for row, image in enumerate(images)}
        columns = {category: column for column, (category, _) in enumerate(categories)}
        marks = np.zeros((len(rows), len(columns)), dtype=np.int8)
        for one in document["annotations"]:
            marks[rows[int(one["image_id"])], columns[int(one["category_id"])]] = 1
    except DataError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        raise DataError(f"{name} is no COCO instances file ({type(error).__name__}: {error}); copy it again") from error
    return tuple(label for _, label in categories), list(images.values()), marks
