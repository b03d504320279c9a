"""The manifest format: what is read, what is refused, and that refusals name the file and the row."""

import hashlib
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from datasets.manifest import read_manifest
from datasets.records import DataError
from datasets.splits import check_disjoint, hash_split

BASIC = "image,patient,label:A,label:B\na.png,p1,1,0\nb.png,p2,-1,\nc.png,p3,0,NaN\n"


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 4), value, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for value, name in enumerate("abcdef"):
        (tmp_path / f"{name}.png").write_bytes(png(value))
    return tmp_path


def written(root: Path, table: str | bytes, sidecar: dict | str | None = None, name: str = "manifest.csv") -> Path:
    (root / name).write_bytes(table if isinstance(table, bytes) else table.encode())
    if sidecar is not None:
        (root / "manifest.json").write_text(sidecar if isinstance(sidecar, str) else json.dumps(sidecar))
    return root


def refused(match: str, root: Path, table: str | bytes = BASIC, sidecar=None, **options) -> None:
    with pytest.raises(DataError, match=match):
        read_manifest(written(root, table, sidecar), **options)


# Reading


def test_prefixed_columns_are_labels_and_blanks_are_unknown(root):
    manifest = read_manifest(written(root, BASIC))
    assert manifest.labels == ("A", "B") and manifest.task == "multilabel" and len(manifest) == 3
    assert manifest.targets.dtype == np.int8
    assert manifest.targets.tolist() == [[1, 0], [-1, -1], [0, -1]]
    assert manifest.table["line"].tolist() == [2, 3, 4]
    assert manifest.table["patient"].tolist() == ["p1", "p2", "p3"]
    assert [manifest.images.read(row)[0, 0] for row in range(3)] == [0, 1, 2]
    for column in ("study", "site", "time", "label_source", "report"):
        assert manifest.table[column].tolist() == ["", "", ""]


@pytest.mark.parametrize("kind", ["folder", "file", "zip", "zipped folder", "parquet"])
def test_every_kind_of_root_gives_the_same_samples(root, kind):
    path = written(root, BASIC)
    if kind == "file":
        path = root / "manifest.csv"
    elif kind == "parquet":
        frame = pd.DataFrame({"image": ["a.png", "b.png", "c.png"], "patient": ["p1", "p2", "p3"]})
        frame["label:A"], frame["label:B"] = [1, -1, 0], [0.0, None, np.nan]
        (root / "manifest.csv").unlink()
        frame.to_parquet(root / "manifest.parquet")
    elif kind.startswith("zip"):
        path = root / "site.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for file in [*root.glob("*.png"), root / "manifest.csv"]:
                archive.write(file, file.name if kind == "zip" else f"site/{file.name}")
    manifest = read_manifest(path)
    assert manifest.targets.tolist() == [[1, 0], [-1, -1], [0, -1]]
    assert manifest.table["patient"].tolist() == ["p1", "p2", "p3"]
    assert manifest.images.read(2)[0, 0] == 2


def test_parquet_keeps_booleans_numbers_lists_and_missing_values(root):
    frame = pd.DataFrame({"image": [["a.png", "b.png"], ["c.png"]], "patient": pd.array([12, None], dtype="Int64")})
    frame["label:A"] = [True, False]
    frame["report"] = ["ok", None]
    frame.to_parquet(root / "manifest.parquet")
    manifest = read_manifest(root)
    assert manifest.table["image"].tolist() == ["a.png", "b.png", "c.png"]
    assert manifest.targets.tolist() == [[1], [1], [0]]
    assert manifest.table["patient"].tolist()[:2] == ["12", "12"]
    assert manifest.table["report"].tolist() == ["ok", "ok", ""]
    assert manifest.table["line"].tolist() == [1, 1, 2]


def test_sidecar_names_labels_columns_site_and_encoding(root):
    table = "scan,person,Größe,B,note\na.png,x,1,0,schön\nb.png,y,0,1,\n".encode("latin-1")
    sidecar = {"labels": ["B", "Größe"], "columns": {"image": "scan", "patient": "person", "report": "note"}}
    sidecar |= {"encoding": "latin-1", "site": "st-mary", "label_source": "radiologist"}
    (root / "manifest.json").write_text(json.dumps(sidecar), encoding="utf-8")
    manifest = read_manifest(written(root, table))
    assert manifest.labels == ("B", "Größe") and manifest.targets.tolist() == [[0, 1], [1, 0]]
    assert manifest.table["site"].tolist() == ["st-mary"] * 2
    assert manifest.table["report"].tolist() == ["schön", ""]
    assert manifest.table["scan"].tolist() == ["a.png", "b.png"]


def test_a_table_may_have_its_own_sidecar(root):
    written(root, "image,A,B\na.png,1,0\n", {"labels": ["A"]}, name="north.csv")
    (root / "north.json").write_text('{"labels": ["B"], "site": "north"}')
    manifest = read_manifest(root / "north.csv")
    assert manifest.labels == ("B",) and manifest.table["site"].tolist() == ["north"]


def test_pack_layout_is_read_through_info_json(root):
    (root / "images").mkdir()
    (root / "a.png").rename(root / "images" / "a.png")
    (root / "info.json").write_text('{"task": "free text", "classes": ["cat", "dog"], "n": 1}')
    manifest = read_manifest(written(root, "file,label,class,split\na.png,1,dog,train\n", name="metadata.csv"))
    assert manifest.task == "multiclass" and manifest.labels == ("cat", "dog")
    assert manifest.targets.tolist() == [[0, 1]]
    assert manifest.table["image"].tolist() == ["images/a.png"]
    assert manifest.table["class"].tolist() == ["dog"]


@pytest.mark.parametrize(
    ("cells", "labels", "expected"),
    [
        (["0", "2", "1"], None, ("0", "1", "2")),
        (["0", "2.0", "1"], ("x", "y", "z"), ("x", "y", "z")),
        (["dog", "cat", "dog"], None, ("cat", "dog")),
        (["dog", "cat", "dog"], ("eel", "dog", "cat"), ("eel", "dog", "cat")),
    ],
)
def test_single_label_cells_are_numbers_or_names(root, cells, labels, expected):
    table = "image,label\n" + "".join(f"{image}.png,{cell}\n" for image, cell in zip("abc", cells, strict=True))
    manifest = read_manifest(written(root, table), labels=labels)
    assert manifest.labels == expected and manifest.task == "multiclass"
    names = [expected[int(float(cell))] if cell[0].isdigit() else cell for cell in cells]
    assert [expected[place] for place in manifest.targets.argmax(1)] == names
    assert (manifest.targets.sum(1) == 1).all()


def test_class_numbers_follow_the_sidecar_and_are_then_reordered_by_name(root):
    sidecar = {"labels": ["cat", "dog"], "task": "multiclass"}
    manifest = read_manifest(written(root, "image,label\na.png,0\nb.png,dog\n", sidecar), labels=["dog", "cat"])
    assert manifest.labels == ("dog", "cat") and manifest.targets.tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_separators_and_unicode_encodings_are_recognised(root, separator, encoding):
    text = f"image{separator}report{separator}label:肺炎\r\na.png{separator}中文报告{separator}1\r\n"
    manifest = read_manifest(written(root, text.encode(encoding)))
    assert manifest.labels == ("肺炎",) and manifest.table["report"].tolist() == ["中文报告"]


def test_gbk_is_read_when_stated_and_refused_otherwise(root):
    data = "image,report,label:A\na.png,肺部感染,1\n".encode("gbk")
    refused(r"manifest\.csv line 2 is not UTF-8", root, data)
    assert read_manifest(root, encoding="gbk").table["report"].tolist() == ["肺部感染"]


def test_reports_keep_commas_quotes_and_lines_and_rows_count_records(root):
    table = 'image,report,label:A\na.png,"two\nlines, ""quoted""",1\n\nb.png, spaced ,x\n'
    refused(r"manifest\.csv row 4, column|manifest\.csv row 4: column", root, table)
    manifest = read_manifest(written(root, table.replace(",x\n", ",0\n")))
    assert manifest.table["report"].tolist() == ['two\nlines, "quoted"', " spaced "]
    assert manifest.table["line"].tolist() == [2, 4]


def test_several_images_in_a_cell_are_samples_of_one_patient(root):
    manifest = read_manifest(written(root, "image,study,label:A\na.png|b.png,s1,1\nc.png,s2,0\n"))
    assert manifest.table["image"].tolist() == ["a.png", "b.png", "c.png"]
    assert manifest.table["study"].tolist() == ["s1", "s1", "s2"]
    patients = manifest.table["patient"].tolist()
    assert patients[0] == patients[1] != patients[2]


def test_report_without_an_image_is_a_sample_and_its_pixels_are_refused(root):
    manifest = read_manifest(written(root, "image,report,label:A\n,clear lungs,0\na.png,,1\n"))
    assert manifest.table["image"].tolist() == ["", "a.png"]
    with pytest.raises(DataError, match=r"manifest\.csv row 2 has no image"):
        manifest.images.read(0)


def test_federation_order_reorders_columns_by_name(root):
    manifest = read_manifest(written(root, BASIC), labels=["B", "A"])
    assert manifest.labels == ("B", "A") and manifest.targets.tolist() == [[0, 1], [-1, -1], [-1, 0]]
    plain = read_manifest(written(root, BASIC.replace("label:", "")), labels=["B", "A"])
    np.testing.assert_array_equal(plain.targets, manifest.targets)


def test_checksum_is_that_of_the_table_and_sidecar_bytes(root):
    def checksum(table: bytes, sidecar: bytes) -> str:
        parts = b"".join(len(part).to_bytes(8, "little") + part for part in (table, sidecar))
        return hashlib.sha256(parts).hexdigest()

    assert read_manifest(written(root, BASIC)).checksum == checksum(BASIC.encode(), b"")
    sidecar = {"labels": ["A", "B"]}
    assert read_manifest(written(root, BASIC, sidecar)).checksum == checksum(
        BASIC.encode(), json.dumps(sidecar).encode()
    )


# Labels refused


@pytest.mark.parametrize("cell", ["2", "yes", "0.5", "-2", "inf", "1,5"])
def test_label_value_that_is_none_is_refused_with_row_column_and_value(root, cell):
    refused(rf"manifest\.csv row 3: column 'label:B': '{cell}' is no label", root, BASIC.replace("-1,", f'-1,"{cell}"'))


@pytest.mark.parametrize(
    ("labels", "lists"),
    [
        (["A"], r"missing \[\], extra \['B'\]"),
        (["A", "B", "C"], r"missing \['C'\], extra \[\]"),
        (["A", "X"], r"missing \['X'\], extra \['B'\]; .*\['A', 'X'\].*\['A', 'B'\]"),
        (["A", "A", "B"], "listed twice"),
        ([], "empty"),
    ],
)
def test_other_labels_than_the_federations_are_refused_with_both_lists(root, labels, lists):
    refused(lists, root, labels=labels)


def test_unmarked_labels_are_refused_with_what_to_do(root):
    refused(r"does not say which columns are labels; name them 'label:", root, "image,A\na.png,1\n")
    refused("no column for the labels", root, "image,A\na.png,1\n", {"labels": ["A", "B"]})
    refused("other labels than the sidecar", root, BASIC, {"labels": ["A"]})


@pytest.mark.parametrize("cell", ["", "-1", "nan", "2", "bird", "1e9", "1.5"])
def test_single_label_cell_without_a_class_is_refused(root, cell):
    sidecar = {"labels": ["cat", "dog"], "task": "multiclass"}
    refused(
        rf"manifest\.csv row 3: column 'label': '{cell}' is no class",
        root,
        f"image,label\na.png,0\nb.png,{cell}\n",
        sidecar,
    )


@pytest.mark.parametrize("cells", [("", ""), ("-1", "0"), ("nan", "cat"), ("0", "70000")])
def test_single_label_cells_without_a_class_list_are_checked_as_well(root, cells):
    refused("is no class", root, f"image,label\na.png,{cells[0]}\nb.png,{cells[1]}\n")


# Tables refused


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("", "no header row"),
        ("image,label:A\n", "no samples"),
        ("image,label:A\na.png\n", r"row 2 has 1 fields, the header has 2"),
        ("image,label:A\na.png,1,2\n", r"row 2 has 3 fields"),
        ('image,label:A\na.png,"1\n', r"row 2 is not valid CSV"),
        ("image,image,label:A\na.png,b.png,1\n", "'image' more than once"),
        ("image,label:A\na.png,1\na.png,0\n", r"row 3: image 'a\.png' is named in row 2 already"),
        ("image,label:A\na.png,1\n./a.png,0\n", r"row 3: image 'a\.png' is named in row 2 already"),
        ("image,label:A\n,1\n", "row 2: neither an image path nor a report"),
        ("image,label:A\na.png,1\nz.png,1\n", r"row 3: image 'z\.png' does not exist"),
        ("image,label:A\n../a.png,1\n", r"row 2: path '\.\./a\.png' is not a file below the data root"),
        ("image,label:A\n/etc/passwd,1\n", "row 2: path '/etc/passwd'"),
        ("image,split,label:A\na.png,train,1\nb.png,,1\n", "row 3: column 'split': '' is no split"),
        ("image,split,label:A\na.png,trian,1\n", "row 2: column 'split': 'trian' is no split"),
        (b"image,label:A\na.png,\xff\n", "line 2 is not UTF-8"),
        (b"\x89PNG\r\n\x1a\n\0\0", "manifest"),
    ],
)
def test_damaged_tables_are_refused_with_their_row(root, table, reason):
    refused(reason, root, table)


@pytest.mark.parametrize(
    ("sidecar", "reason"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "must be an object"),
        ('{"site": "\\ud800"}', "not valid JSON"),
        ({"lables": ["A"]}, r"unknown key 'lables'; did you mean 'labels'\?"),
        ({"labels": "A"}, "must be a list of names"),
        ({"labels": ["A", 1]}, "must be a list of names"),
        ({"labels": ["A", "A"]}, "listed twice"),
        ({"task": "guess"}, "multilabel or multiclass"),
        ({"site": 3}, "site must be a text"),
        ({"columns": {"image": "nowhere"}}, "no column 'nowhere'"),
        ({"columns": {"img": "image"}}, "columns names 'img'"),
        ({"columns": ["image"]}, "must map"),
        ({"encoding": "klingon"}, "klingon"),
        ({"image_folder": "../.."}, r"manifest\.json: image_folder path '\.\./\.\.' is not"),
        ({"image_root": "/media/cxr"}, "outside the data root; permit it with image_root"),
    ],
)
def test_bad_sidecars_are_refused(root, sidecar, reason):
    refused(reason, root, BASIC, sidecar)


def test_image_root_permits_another_folder_and_nothing_outside_that(root, tmp_path_factory):
    home = written(tmp_path_factory.mktemp("manifests"), BASIC, {"image_root": str(root)})
    assert read_manifest(home, image_root=root).images.read(1)[0, 0] == 1
    with pytest.raises(DataError, match="below the data root"):
        read_manifest(written(home, BASIC.replace("a.png", "../a.png")), image_root=root)


def test_link_out_of_the_root_is_refused_with_its_row(root):
    (root / "a.png").unlink()
    (root / "a.png").symlink_to("/etc/hostname")
    refused(r"manifest\.csv row 2: 'a\.png' is a link that leads out", root)


def test_root_without_or_with_two_manifests_is_refused(root):
    with pytest.raises(DataError, match=r"none of manifest\.parquet"):
        read_manifest(root)
    (root / "manifest.parquet").write_bytes(b"PAR1")
    refused("keep one", root)
    with pytest.raises(DataError, match="not a readable Parquet"):
        read_manifest(root / "manifest.parquet")
    for path in (root / "no.csv", root / "no.npz", root / "no"):
        with pytest.raises(DataError, match="does not exist"):
            read_manifest(path)


def test_parquet_text_that_is_not_utf8_is_refused(root):
    frame = pd.DataFrame({"image": ["a.png"], "report": ["normal-chest"], "label:A": [1]})
    frame.to_parquet(root / "manifest.parquet", compression=None, use_dictionary=False)
    data = (root / "manifest.parquet").read_bytes()
    (root / "manifest.parquet").write_bytes(data.replace(b"normal-chest", b"normal-\xff\xfe\xfdst"))
    with pytest.raises(DataError, match=r"manifest\.parquet is not a readable Parquet file"):
        read_manifest(root)


# Patients and splits


def test_patient_in_two_splits_is_refused_by_count_and_rows_without_the_identifier(root):
    rows = ["a.png,SECRET1,train", "b.png,x,val", "c.png,SECRET1,test", "d.png,y,train", "e.png,y ,test"]
    table = "image,patient,split,label:A\n" + "".join(f"{row},1\n" for row in rows)
    reason = r"2 patients are both in train and in test \(for example in rows 2 and 4\)"
    with pytest.raises(DataError, match=reason) as error:
        read_manifest(written(root, table))
    assert "SECRET1" not in str(error.value)


def test_blank_patients_are_patients_of_their_own(root):
    table = "image,patient,split,label:A\na.png,,train,1\nb.png,,test,1\nc.png,nan,val,1\nd.png,NaN,test,0\n"
    assert read_manifest(written(root, table)).table["patient"].nunique() == 4


@pytest.mark.parametrize(
    ("written_as", "split"), [("Train", "train"), ("VALID", "val"), ("validation", "val"), ("testing", "test")]
)
def test_usual_split_names_are_understood(root, written_as, split):
    manifest = read_manifest(written(root, f"image,split,label:A\na.png,{written_as},1\n"))
    assert manifest.table["split"].tolist() == [split]


def test_hash_split_is_disjoint_stable_and_near_its_fractions():
    patients = np.array([f"p{number % 3000}" for number in range(9000)], dtype=object)
    splits = hash_split(patients)
    check_disjoint(patients, splits, np.arange(9000), "m")
    # Binomial with n = 3000: one standard deviation is below 0.9 %, so 4 % is beyond four of them.
    for split, fraction in {"train": 0.7, "val": 0.1, "test": 0.2}.items():
        assert abs(np.mean(splits == split) - fraction) < 0.04
    order = np.random.default_rng(0).permutation(9000)[:5000]
    np.testing.assert_array_equal(hash_split(patients[order]), splits[order])


def test_hash_split_of_known_patients_never_changes():
    # Written down once: a change would move patients between train and test of a running federation.
    expected = ["train"] * 5 + ["val"] * 2 + ["train"] * 3 + ["val", "train", "test", "train", "train", "test"]
    assert hash_split([f"p{number}" for number in range(16)]).tolist() == expected


def test_split_does_not_move_when_rows_are_reordered_or_added(root):
    rows = [f"{image}.png,1\n" for image in "abcdef"]
    first = read_manifest(written(root, "image,label:A\n" + "".join(rows[:4])))
    second = read_manifest(written(root, "image,label:A\n" + "".join(reversed(rows))))
    after = dict(zip(second.table["image"], second.table["split"], strict=True))
    assert all(after[image] == split for image, split in zip(first.table["image"], first.table["split"], strict=True))


# MedMNIST


def test_medmnist_file_is_read_with_its_official_splits(tmp_path):
    arrays = {
        f"{split}_images": np.full((count, 4, 4), count, np.uint8)
        for split, count in [("train", 3), ("val", 1), ("test", 2)]
    }
    arrays |= {
        f"{split}_labels": np.arange(len(arrays[f"{split}_images"]))[:, None] for split in ("train", "val", "test")
    }
    np.savez(tmp_path / "m.npz", **arrays)
    manifest = read_manifest(tmp_path / "m.npz", labels=["x", "y", "z"])
    assert manifest.labels == ("x", "y", "z") and manifest.targets.argmax(1).tolist() == [0, 1, 2, 0, 0, 1]
    assert manifest.table["split"].tolist() == ["train"] * 3 + ["val"] + ["test"] * 2
    assert [manifest.images.read(row)[0, 0] for row in range(6)] == [3, 3, 3, 1, 2, 2]
    assert manifest.checksum == hashlib.sha256((tmp_path / "m.npz").read_bytes()).hexdigest()
    assert read_manifest(tmp_path / "m.npz").labels == ("0", "1", "2")
    with pytest.raises(DataError, match="is no class"):
        read_manifest(tmp_path / "m.npz", labels=["x", "y"])


def test_multi_label_medmnist_takes_the_federations_names_by_position(tmp_path):
    np.savez(tmp_path / "m.npz", test_images=np.zeros((2, 4, 4, 3), np.uint8), test_labels=np.array([[1, 0], [0, 1]]))
    assert read_manifest(tmp_path / "m.npz").labels == ("0", "1")
    assert read_manifest(tmp_path / "m.npz", labels=["P", "Q"]).targets.tolist() == [[1, 0], [0, 1]]
    with pytest.raises(DataError, match="has 2 labels, the federation has 1"):
        read_manifest(tmp_path / "m.npz", labels=["P"])


def test_other_npz_files_are_refused(tmp_path):
    contents = [
        {"x": np.zeros(3)},
        {"train_labels": np.zeros((2, 1), int)},
        {"train_labels": np.zeros((2, 1)), "train_images": np.zeros((2, 4, 4), np.uint8)},
        {"train_labels": np.zeros((3, 1), int), "train_images": np.zeros((2, 4, 4), np.uint8)},
        {"train_labels": np.zeros((2, 1), int), "train_images": np.zeros((2, 4, 4, 4), np.uint8)},
        {"train_labels": np.array([[None]], dtype=object), "train_images": np.zeros((1, 4, 4), np.uint8)},
    ]
    for content in contents:
        np.savez(tmp_path / "m.npz", **content)
        with pytest.raises(DataError, match=r"m\.npz"):
            read_manifest(tmp_path / "m.npz")
    (tmp_path / "m.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError, match=r"m\.npz is not a readable zip"):
        read_manifest(tmp_path / "m.npz")
