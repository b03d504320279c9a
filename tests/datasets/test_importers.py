"""Published folders in miniature, each as its publisher lays it out, and what they become."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets.import_chest import CHEXPERT_LABELS, NIH_LABELS
from datasets.import_objects import VOC_LABELS, voc_classes
from datasets.importers import main
from datasets.manifest import read_manifest
from datasets.records import DataError


def put(path: Path, content: str | bytes | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        buffer = io.BytesIO()
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(buffer, "JPEG" if path.suffix == ".jpg" else "PNG")
        content = buffer.getvalue()
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def imported(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def row_of(manifest, image: str) -> dict[str, int]:
    row = manifest.table["image"].tolist().index(image)
    return dict(zip(manifest.labels, manifest.targets[row].tolist(), strict=True))


@pytest.fixture
def chexpert(tmp_path: Path) -> Path:
    root = tmp_path / "CheXpert-v1.0-small"
    header = ",".join(["Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *CHEXPERT_LABELS]) + "\n"
    marks = ["1.0", "", "-1.0", "0.0"] + [""] * 10
    first = "train/patient00001/study1/view1_frontal.jpg"
    second = "valid/patient64541/study1/view1_lateral.jpg"
    put(root / first), put(root / second)
    put(root / "train.csv", header + f"CheXpert-v1.0-small/{first},Female,68,Frontal,AP," + ",".join(marks) + "\n")
    put(root / "valid.csv", header + f"CheXpert-v1.0-small/{second},Male,70,Lateral,," + ",".join(["0.0"] * 14) + "\n")
    return root


@pytest.mark.parametrize(("policy", "mark"), [(None, -1), ("unknown", -1), ("positive", 1), ("negative", 0)])
def test_chexpert_uncertain_follows_the_policy_and_blank_stays_unknown(chexpert, policy, mark):
    assert imported("chexpert", chexpert, *(["--uncertain", policy] if policy else [])) == 0
    manifest = read_manifest(chexpert)
    marks = row_of(manifest, "train/patient00001/study1/view1_frontal.jpg")
    assert marks["No Finding"] == 1 and marks["Lung Opacity"] == 0
    assert marks["Cardiomegaly"] == mark and marks["Enlarged Cardiomediastinum"] == -1 and marks["Fracture"] == -1


def test_chexpert_keeps_view_patient_study_split_and_source(chexpert):
    assert imported("chexpert", chexpert, "--blank", "negative", "--site", "stanford") == 0
    manifest = read_manifest(chexpert)
    assert manifest.labels == CHEXPERT_LABELS
    assert manifest.table["Frontal/Lateral"].tolist() == ["Frontal", "Lateral"]
    assert manifest.table["patient"].tolist() == ["patient00001", "patient64541"]
    assert manifest.table["study"].tolist() == ["patient00001/study1", "patient64541/study1"]
    assert manifest.table["split"].tolist() == ["train", "val"]
    assert manifest.table["site"].tolist() == ["stanford"] * 2
    assert manifest.table["label_source"].tolist() == ["chexpert-labeler", "radiologists"]
    assert row_of(manifest, "train/patient00001/study1/view1_frontal.jpg")["Fracture"] == 0


def test_chexpert_cell_that_is_no_label_is_refused_with_its_row(chexpert, capsys):
    text = (chexpert / "train.csv").read_text().replace(",-1.0,", ",-2.0,")
    put(chexpert / "train.csv", text)
    assert imported("chexpert", chexpert) == 2
    assert "train.csv row 2: column 'Cardiomegaly': '-2.0'" in capsys.readouterr().err
    assert not (chexpert / "manifest.csv").exists()


@pytest.fixture
def nih(tmp_path: Path) -> Path:
    # The published header: its last columns carry a comma inside their names and an empty one follows.
    header = (
        "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position,"
        "OriginalImage[Width,Height],OriginalImagePixelSpacing[x,y],\n"
    )
    rows = [
        ("00000001_000.png", "Cardiomegaly|Emphysema", "1", "images_001/images"),
        ("00000001_001.png", "No Finding", "1", "images_001/images"),
        ("00000002_000.png", "Pleural_Thickening", "2", "images_012/images"),
    ]
    for image, _, _, folder in rows:
        put(tmp_path / "nih" / folder / image)
    lines = "".join(
        f"{image},{found},0,{patient},058Y,M,PA,2682,2749,0.143,0.143,\n" for image, found, patient, _ in rows
    )
    put(tmp_path / "nih" / "Data_Entry_2017.csv", header + lines)
    put(tmp_path / "nih" / "train_val_list.txt", "00000001_000.png\n00000001_001.png\n")
    put(tmp_path / "nih" / "test_list.txt", "00000002_000.png\n")
    return tmp_path / "nih"


def test_nih_findings_become_marks_and_no_finding_is_all_zero(nih):
    assert imported("nih", nih) == 0
    manifest = read_manifest(nih)
    assert manifest.labels == NIH_LABELS and manifest.table["View Position"].tolist() == ["PA"] * 3
    marks = row_of(manifest, "images_001/images/00000001_000.png")
    assert {label for label, mark in marks.items() if mark == 1} == {"Cardiomegaly", "Emphysema"}
    assert set(row_of(manifest, "images_001/images/00000001_001.png").values()) == {0}
    assert manifest.table["patient"].tolist() == ["1", "1", "2"]


def test_nih_official_lists_decide_the_split_and_without_them_the_hash_does(nih):
    assert imported("nih", nih) == 0
    splits = read_manifest(nih).table["split"].tolist()
    assert splits[2] == "test" and splits[0] == splits[1] and splits[0] in ("train", "val")
    (nih / "train_val_list.txt").unlink(), (nih / "test_list.txt").unlink()
    assert imported("nih", nih, "--overwrite") == 0
    assert "split" not in (nih / "manifest.csv").read_text().partition("\n")[0].split(",")


def test_nih_unknown_finding_missing_image_and_unlisted_image_are_refused(nih, capsys):
    table = (nih / "Data_Entry_2017.csv").read_text()
    put(nih / "Data_Entry_2017.csv", table.replace("Emphysema", "Emphysem"))
    assert imported("nih", nih) == 2
    assert "row 2: column 'Finding Labels': 'Cardiomegaly|Emphysem'" in capsys.readouterr().err
    put(nih / "Data_Entry_2017.csv", table)
    put(nih / "test_list.txt", "")
    assert imported("nih", nih) == 2
    assert "row 4: image '00000002_000.png' must be in one of" in capsys.readouterr().err
    put(nih / "test_list.txt", "00000002_000.png\n")
    (nih / "images_012" / "images" / "00000002_000.png").unlink()
    assert imported("nih", nih) == 2
    assert "1 of 3 images are missing" in capsys.readouterr().err
    assert imported("nih", nih, "--missing", "skip") == 0
    assert len(read_manifest(nih)) == 2


def voc_xml(*names: str, difficult: int = 0) -> str:
    objects = "".join(
        f"<object><name>{name}</name><difficult>{difficult}</difficult>"
        "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part></object>"
        for name in names
    )
    return f'<?xml version="1.0" encoding="utf-8"?><annotation><filename>x.jpg</filename>{objects}</annotation>'


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    root = tmp_path / "VOC2007"
    for image, xml in {
        "000001": voc_xml("dog", "person", "dog"),
        "000002": voc_xml("sofa", difficult=1),
        "000003": voc_xml(),
    }.items():
        put(root / "Annotations" / f"{image}.xml", xml)
        put(root / "JPEGImages" / f"{image}.jpg")
    put(root / "ImageSets" / "Main" / "train.txt", "000001\n")
    put(root / "ImageSets" / "Main" / "val.txt", "000002\n")
    put(root / "ImageSets" / "Main" / "test.txt", "000003\n")
    return root


def test_voc_objects_become_marks_difficult_ones_included_and_parts_ignored(voc):
    assert imported("voc", voc) == 0
    manifest = read_manifest(voc)
    assert manifest.labels == VOC_LABELS and manifest.table["split"].tolist() == ["train", "val", "test"]
    present = [{label for label, mark in zip(VOC_LABELS, row, strict=True) if mark} for row in manifest.targets]
    assert present == [{"dog", "person"}, {"sofa"}, set()]


def test_voc_test_set_without_annotations_is_left_out(voc):
    (voc / "Annotations" / "000003.xml").unlink()
    assert imported("voc", voc) == 0
    assert read_manifest(voc).table["split"].tolist() == ["train", "val"]


@pytest.mark.parametrize(
    ("xml", "reason"),
    [
        ('<!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;">]><annotation>&c;</annotation>', "declares a DTD"),
        ('<!DOCTYPE a SYSTEM "file:///etc/passwd"><annotation/>', "declares a DTD"),
        ("<annotation>&undefined;</annotation>", "not valid XML"),
        ("<annotation><object>", "not valid XML"),
        (voc_xml("unicorn"), "'unicorn'"),
        ("<annotation><object/></annotation>", "class ''"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_hostile_or_damaged_xml_is_refused_in_every_encoding(xml, reason, encoding):
    with pytest.raises(DataError, match=reason):
        voc_classes(xml.encode(encoding), "000001.xml")


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    root = tmp_path / "coco"
    categories = [{"id": 18, "name": "dog"}, {"id": 1, "name": "person"}]
    for subset, first in (("train2017", 10), ("val2017", 20)):
        images = [{"id": first + place, "file_name": f"{first + place:012}.jpg"} for place in range(2)]
        for image in images:
            put(root / subset / image["file_name"])
        boxes = [{"image_id": first, "category_id": 18, "iscrowd": 1}, {"image_id": first, "category_id": 1}]
        document = {"categories": categories, "images": images, "annotations": boxes}
        put(root / "annotations" / f"instances_{subset}.json", json.dumps(document))
    return root


def test_coco_annotations_become_marks_in_order_of_category_ids(coco):
    assert imported("coco", coco) == 0
    manifest = read_manifest(coco)
    assert manifest.labels == ("person", "dog")
    assert manifest.table["image"].tolist()[0] == "train2017/000000000010.jpg"
    assert manifest.targets.tolist() == [[1, 1], [0, 0], [1, 1], [0, 0]]
    assert manifest.table["split"].tolist() == ["train", "train", "val", "val"]


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("images"),
        lambda document: document["annotations"].append({"image_id": 99, "category_id": 1}),
        lambda document: document["annotations"].append({"image_id": 10, "category_id": 99}),
        lambda document: document["categories"].append(None),
        lambda document: document["images"].append({"id": "x", "file_name": "y"}),
        lambda document: document["images"].append({"id": 5, "file_name": "../../etc/passwd"}),
    ],
)
def test_damaged_coco_files_are_refused(coco, capsys, change):
    path = coco / "annotations" / "instances_train2017.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    assert imported("coco", coco) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("multi", [False, True])
def test_medmnist_manifest_reads_like_the_file_itself(tmp_path, multi):
    rng = np.random.default_rng(0)
    arrays = {}
    for split in ("train", "val", "test"):
        arrays[f"{split}_images"] = rng.integers(0, 256, (5, 6, 6, 3), dtype=np.uint8)
        arrays[f"{split}_labels"] = rng.integers(0, 2, (5, 3)) if multi else np.arange(5)[:, None] % 3
    np.savez(tmp_path / "m.npz", **arrays)
    names = ["x", "y", "z"]
    assert imported("medmnist", tmp_path / "m.npz", "--labels", *names) == 0
    manifest, direct = read_manifest(tmp_path), read_manifest(tmp_path / "m.npz", labels=names)
    assert manifest.labels == direct.labels and manifest.task == direct.task
    np.testing.assert_array_equal(manifest.targets, direct.targets)
    assert manifest.images.checksum == direct.images.checksum
    np.testing.assert_array_equal(manifest.images.read(7), arrays["val_images"][2])


def test_manifest_above_the_images_names_them_relatively(voc):
    assert imported("voc", voc, voc.parent) == 0
    assert read_manifest(voc.parent).table["image"].tolist()[0] == "VOC2007/JPEGImages/000001.jpg"


def test_manifest_elsewhere_needs_the_readers_permission(voc, tmp_path):
    assert imported("voc", voc, tmp_path / "other" / "place") == 0
    with pytest.raises(DataError, match="permit it with image_root"):
        read_manifest(tmp_path / "other" / "place")
    assert len(read_manifest(tmp_path / "other" / "place", image_root=voc)) == 3
    assert not list((tmp_path / "other").rglob("*.jpg"))


def test_existing_manifest_is_kept_unless_told_otherwise(voc, capsys):
    put(voc / "manifest.csv", "mine")
    assert imported("voc", voc) == 2
    assert "--overwrite" in capsys.readouterr().err and (voc / "manifest.csv").read_text() == "mine"
    assert imported("voc", voc, "--overwrite") == 0


@pytest.mark.parametrize("kind", ["chexpert", "nih", "voc", "coco", "medmnist"])
def test_folder_of_another_kind_or_none_is_refused_with_what_to_give(tmp_path, capsys, kind):
    empty = put(tmp_path / "x.npz", b"") if kind == "medmnist" else tmp_path
    assert imported(kind, empty) == 2 and imported(kind, tmp_path / "absent") == 2
    assert capsys.readouterr().err.count("error: ") == 2
