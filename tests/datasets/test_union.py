"""Unions of data roots: small made-up hospitals on disk, and the federation of the real packs where they are."""

import csv
import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from datasets.catalogue import EMBEDDED, open_manifest
from datasets.partition import by_site, check_partition
from datasets.records import DataError
from datasets.site import load_site
from datasets.union import union_manifest
from datasets.union_file import parse_union

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("CONSILIUM_DATA", ROOT.parent / "shared" / "data"))


def write_root(folder: Path, name: str, rows: list[dict[str, str]], *, report: str = "report") -> None:
    """``name/manifest.csv`` with one 4x4 image a row whose ``image`` is not blank; its pixels follow from the names."""
    root = folder / name
    root.mkdir()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with (root / "manifest.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([report if column == "report" else column for column in columns])
        writer.writerows([row.get(column, "") for column in columns] for row in rows)
    for row in rows:
        if row.get("image"):
            level = sum(f"{name}/{row['image']}".encode()) % 256
            Image.fromarray(np.full((4, 4), level, np.uint8)).save(root / row["image"])


def level(name: str) -> int:
    return sum(name.encode()) % 256


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three roots: films of two wards with reports, reports of a clinic, pairs of a surgery with other label names."""
    films = [
        {"image": f"{ward}{n}.png", "report": f"film report {ward}{n}", "patient": f"{n}", "site": ward, "view": view}
        | {"split": split, "label:Edema": str(n % 2), "label:Hernia": "0"}
        for ward, view in (("north", "AP"), ("south", "PA"))
        for n, split in ((1, "train"), (2, "train"), (3, "test"))
    ]
    write_root(tmp_path, "films", films, report="text")
    texts = [
        {"image": f"{n}.png", "report": text, "patient": f"{n}", "split": split, "label:Edema": "1", "label:Cough": "1"}
        for n, split, text in ((1, "test", "clinic one"), (2, "train", "clinic two"), (3, "train", "  "))
    ]
    write_root(tmp_path, "clinic", texts)
    pairs = [
        {"image": "a.png", "report": "both", "patient": "1", "split": "val", "label:Oedema": "1", "label:Mass": "-1"},
        {"image": "b.png", "report": "", "patient": "2", "split": "train", "label:Oedema": "0", "label:Mass": "1"},
        {"image": "", "report": "text alone", "patient": "3", "split": "train", "label:Oedema": "", "label:Mass": "0"},
    ]
    write_root(tmp_path, "surgery", pairs)
    return tmp_path


UNION = """
labels = ["Edema", "Mass", "Hernia"]
[[sources]]
name = "xray"
root = "films"
modality = "image"
site_columns = ["site", "view"]
prefix = ""
label_source = "auto"
[[sources]]
name = "clinic"
root = "clinic"
modality = "text"
[[sources]]
name = "surgery"
root = "surgery"
modality = "paired"
rename = { Oedema = "Edema" }
"""


def write_union(folder: Path, text: str = UNION) -> Path:
    path = folder / "union.toml"
    path.write_text(text, encoding="utf-8")
    return path


def of(manifest, source: str) -> np.ndarray:
    return np.flatnonzero((manifest.table["source"] == source).to_numpy())


def test_every_source_and_its_site_columns_give_the_sites_of_by_site(folder):
    manifest = open_manifest(write_union(folder))
    partition = by_site(manifest.targets, manifest.table, min_samples=1)
    check_partition(partition, manifest.table)
    assert sorted(partition.sites) == ["clinic", "north-AP", "south-PA", "surgery"]
    sizes = {site: [len(rows[split]) for split in ("train", "val", "test")] for site, rows in partition.sites.items()}
    assert sizes == {"north-AP": [2, 0, 1], "south-PA": [2, 0, 1], "clinic": [1, 0, 1], "surgery": [2, 1, 0]}
    prefixed = open_manifest(write_union(folder, UNION.replace('prefix = ""', 'prefix = "city"')))
    assert set(prefixed.table["site"].iloc[of(prefixed, "xray")]) == {"city-north-AP", "city-south-PA"}
    named = open_manifest(write_union(folder, UNION.replace('prefix = ""', "")))
    assert set(named.table["site"].iloc[of(named, "xray")]) == {"xray-north-AP", "xray-south-PA"}


def test_report_text_of_an_image_source_is_nowhere_in_the_table(folder):
    manifest = open_manifest(write_union(folder))
    # The films' reports stood in a column "text", which the manifest reader also keeps under that name.
    assert "film report" not in manifest.table.to_csv()
    assert manifest.table["report"].iloc[of(manifest, "surgery")].tolist() == ["both", "", "text alone"]
    assert manifest.table["report"].iloc[of(manifest, "clinic")].tolist() == ["clinic one", "clinic two"]


class Counting:
    """Images that note which rows are read."""

    def __init__(self, images):
        self.images, self.checksum, self.read_rows = images, images.checksum, []

    def __len__(self):
        return len(self.images)

    def read(self, row):
        self.read_rows.append(row)
        return self.images.read(row)


def test_images_of_a_text_source_are_never_opened_and_the_others_are_the_sources_own(folder):
    opened = {}

    def open_root(root, encoding):
        manifest = open_manifest(root, encoding=encoding)
        opened[Path(root).name] = Counting(manifest.images)
        return replace(manifest, images=opened[Path(root).name])

    manifest = union_manifest(write_union(folder), open_root)
    for row, (source, image) in enumerate(zip(manifest.table["source"], manifest.table["image"], strict=True)):
        if image:
            root = {"xray": "films"}.get(source, source)
            assert manifest.images.read(row).tolist() == np.full((4, 4), level(f"{root}/{image}")).tolist()
        else:
            with pytest.raises(DataError, match=f"source '{source}'"):
                manifest.images.read(row)
    assert set(manifest.table["image"].iloc[of(manifest, "clinic")]) == {""}
    assert opened["clinic"].read_rows == [] and opened["films"].read_rows == list(range(6))
    assert opened["surgery"].read_rows == [0, 1]
    with pytest.raises(DataError, match="counted from 0"):
        manifest.images.read(len(manifest))


def test_labels_meet_by_name_and_absent_ones_are_unknown(folder):
    manifest = open_manifest(write_union(folder))
    assert manifest.labels == ("Edema", "Mass", "Hernia") and manifest.task == "multilabel"
    assert manifest.targets[of(manifest, "xray")].tolist() == [[1, -1, 0], [0, -1, 0], [1, -1, 0]] * 2
    assert manifest.targets[of(manifest, "clinic")].tolist() == [[1, -1, -1]] * 2
    assert manifest.targets[of(manifest, "surgery")].tolist() == [[1, -1, -1], [0, 1, -1], [-1, 0, -1]]
    assert set(manifest.table["label_source"].iloc[of(manifest, "xray")]) == {"auto"}
    turned = open_manifest(write_union(folder), labels=["Hernia", "Edema", "Mass"])
    np.testing.assert_array_equal(turned.targets, manifest.targets[:, [2, 0, 1]])
    with pytest.raises(DataError, match=r"union\.toml lists the labels"):
        open_manifest(write_union(folder), labels=["Edema"])


def test_roots_that_number_people_alike_keep_them_apart_and_one_root_keeps_them_together(folder):
    text = UNION.replace('name = "xray"\n', 'name = "xray"\nwhere = { site = ["north"] }\n')
    text += '[[sources]]\nname = "south"\nroot = "./films"\nmodality = "paired"\nwhere = { site = ["south"] }\n'
    manifest = open_manifest(write_union(folder, text))
    patients = manifest.table["patient"]
    # Patient 1 is in train (films), test (clinic) and val (surgery): other people.
    assert set(patients[patients.str.endswith(":1")]) == {"xray:1", "clinic:1", "surgery:1"}
    assert set(patients.iloc[of(manifest, "south")]) == set(patients.iloc[of(manifest, "xray")])
    check_partition(by_site(manifest.targets, manifest.table, min_samples=1), manifest.table)
    assert "film report south1" in manifest.table["report"].tolist()


def test_checksum_is_the_same_again_and_changes_with_every_part(folder):
    def checksum(text: str = UNION) -> str:
        return open_manifest(write_union(folder, text)).checksum

    first = checksum()
    assert checksum() == first == checksum(UNION + "# a remark\n")
    changed = [UNION.replace('"image"', '"paired"'), UNION.replace('prefix = ""', 'prefix = "x"')]
    changed += [UNION.replace(', "Hernia"', "")]
    assert len({first, *map(checksum, changed)}) == 4
    path = folder / "surgery" / "manifest.csv"
    path.write_text(path.read_text().replace("text alone", "text at last"))
    assert checksum() != first


def test_pixels_checksum_covers_only_what_is_read(folder):
    before = open_manifest(write_union(folder)).images.checksum
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(folder / "clinic" / "1.png")
    assert open_manifest(write_union(folder)).images.checksum == before
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(folder / "surgery" / "a.png")
    assert open_manifest(write_union(folder)).images.checksum != before


def test_embedded_names_and_single_labels_join_and_load_as_sites(tmp_path):
    text = 'labels = ["7", "dog"]\n[[sources]]\nname = "hand"\nroot = "digits"\nmodality = "image"\n'
    manifest = open_manifest(write_union(tmp_path, text))
    digits = open_manifest("digits")
    np.testing.assert_array_equal(manifest.targets[:, 0], digits.targets[:, 7])
    assert (manifest.targets[:, 1] == -1).all() and set(manifest.table["site"]) == {"hand"}
    rows = {"train": np.arange(5)}
    data = load_site(manifest, rows, name="hand", size=8, channels=1, cache_dir=None)
    for row in range(5):
        np.testing.assert_array_equal(data.splits["train"].images[row, :, :, 0], digits.images.read(row))


@given(st.permutations(["xray", "clinic", "surgery"]))
def test_order_of_the_sources_orders_the_rows_and_changes_nothing_else(tmp_path_factory, order):
    folder = tmp_path_factory.mktemp("union")
    for name in ("xray", "clinic", "surgery"):
        write_root(folder, name, [{"image": "a.png", "report": f"of {name}", "label:Edema": "1"}])
    kinds = dict(zip(("xray", "clinic", "surgery"), ("image", "text", "paired"), strict=True))
    parts = [f'[[sources]]\nname = "{name}"\nroot = "{name}"\nmodality = "{kinds[name]}"\n' for name in order]
    manifest = open_manifest(write_union(folder, 'labels = ["Edema"]\n' + "".join(parts)))
    assert manifest.table["site"].tolist() == list(order)
    told = {name: "" if name == "xray" else f"of {name}" for name in order}
    assert dict(zip(manifest.table["site"], manifest.table["report"], strict=True)) == told
    for row, name in enumerate(order):
        if name != "clinic":
            assert manifest.images.read(row)[0, 0] == level(f"{name}/a.png")


# -- what is refused --------------------------------------------------------------------------------------------------

PLAIN = '[[sources]]\nname = "a"\nroot = "films"\nmodality = "image"\n'
LABELS = 'labels = ["Edema"]\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("labels = [", "not valid TOML"),
        ("", r"labels must list.*at least one \[\[sources\]\]"),
        (LABELS + "sources = []", "at least one"),
        (LABELS + "sources = [1]", "at least one"),
        ('labels = ["Edema", 1]\n' + PLAIN, "labels must list"),
        ('labels = ["Edema", "Edema"]\n' + PLAIN, "'Edema' is listed twice"),
        ("extra = 1\n" + LABELS + PLAIN, "extra is unknown"),
        (LABELS + PLAIN + PLAIN, "source 'a' is listed twice"),
        (LABELS + PLAIN + 'modalty = "text"', "modalty is unknown; did you mean modality"),
        (
            LABELS + "[[sources]]\nroot = 1",
            "source 1: root = '1' must be a text; source 1: name is missing; source 1: modality is missing",
        ),
        (LABELS + PLAIN.replace("image", "sound"), "must be image, text or paired"),
        (LABELS + PLAIN + "where = { site = 1 }", "where = .* must be a table of column"),
        (LABELS + PLAIN + 'prefix = ""', "its site has no name"),
        (LABELS + PLAIN + 'rename = { x = "Oedema" }', "rename leads to 'Oedema'"),
        (LABELS + PLAIN + 'label_source = "me"', "must be reviewed, auto or unknown"),
    ],
)
def test_files_of_another_form_are_refused_with_every_problem(text, reason):
    with pytest.raises(DataError, match=reason):
        parse_union(text.encode(), "union.toml")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (('root = "films"', 'root = "filmz"'), r"source 'xray'.*does not exist.*Did you mean '.*films'"),
        (('root = "films"', 'root = "$NO_SUCH_FOLDER/films"'), r"source 'xray'.*\$NO_SUCH_FOLDER, which is not set"),
        (('root = "films"', 'root = "union.toml"'), "source 'xray': root is a union itself"),
        (('root = "surgery"', 'root = "films"'), "sources 'xray' and 'surgery' share 6 rows of one root"),
        (('prefix = ""', 'prefix = ""\nwhere = { view = ["LL"] }'), "source 'xray': no row has view = 'LL'"),
        (('prefix = ""', 'prefix = ""\nwhere = { ward = ["A"] }'), "source 'xray': there is no column 'ward'"),
        (('["site", "view"]', '["city"]'), "source 'xray': there is no column 'city'"),
        (("Oedema =", "Odema ="), "source 'surgery': rename begins at 'Odema'"),
        (('rename = { Oedema = "Edema" }', 'rename = { Oedema = "Mass" }'), "two of its labels would both be 'Mass'"),
        (('rename = { Oedema = "Edema" }', 'where = { site = ["x"] }'), "source 'surgery': no row has site = 'x'"),
        (('["site", "view"]\nprefix = ""', '[]\nprefix = "clinic"'), "both have the site 'clinic'"),
    ],
)
def test_what_a_source_cannot_give_is_refused_with_its_name(folder, change, reason):
    text = UNION.replace(*change)
    assert text != UNION
    with pytest.raises(DataError, match=reason):
        open_manifest(write_union(folder, text))


def test_source_without_anything_of_its_modality_and_a_damaged_image_are_refused_with_its_name(folder):
    write_root(folder, "mute", [{"image": "a.png", "report": "", "label:Edema": "1"}])
    text = LABELS + '[[sources]]\nname = "mute"\nroot = "mute"\nmodality = "{}"\n'
    with pytest.raises(DataError, match="source 'mute': none of its 1 rows has a report"):
        open_manifest(write_union(folder, text.format("text")))
    (folder / "mute" / "a.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"source 'mute': manifest\.csv row 2"):
        open_manifest(write_union(folder, text.format("paired"))).images.read(0)


def test_source_that_shares_no_label_with_the_federation_is_refused(folder):
    text = 'labels = ["Fracture"]\n[[sources]]\nname = "s"\nroot = "surgery"\nmodality = "paired"\n'
    with pytest.raises(DataError, match="source 's': none of its labels"):
        open_manifest(write_union(folder, text))


def test_two_combinations_of_site_columns_with_one_name_are_refused(folder):
    rows = [
        {"image": f"{n}.png", "site": site, "view": view, "label:Edema": "1"}
        for n, (site, view) in enumerate([("a-b", "c"), ("a", "b-c")])
    ]
    write_root(folder, "clash", rows)
    text = LABELS + '[[sources]]\nname = "c"\nroot = "clash"\nmodality = "image"\nsite_columns = ["site", "view"]\n'
    with pytest.raises(DataError, match="source 'c': two combinations"):
        open_manifest(write_union(folder, text))


def test_encoding_is_the_sources_own(folder):
    path = folder / "clinic" / "manifest.csv"
    path.write_bytes(path.read_text().replace("clinic two", "Müller").encode("latin-1"))
    with pytest.raises(DataError, match=r"source 'clinic'.*is not UTF-8"):
        open_manifest(write_union(folder))
    text = UNION.replace('modality = "text"', 'modality = "text"\nencoding = "latin-1"')
    assert "Müller" in open_manifest(write_union(folder, text)).table["report"].tolist()


# -- the real packs ---------------------------------------------------------------------------------------------------


def test_chest_x_ray_sources_make_seven_sites_of_three_kinds(monkeypatch):
    preset = ROOT / "presets" / "sources" / "incongruent-cxr.toml"
    needed = [DATA / name for name in ("d1_cxr_multilabel.zip", "d1b_covid_notes_nc.zip")]
    if missing := [path.name for path in needed if not path.is_file()]:
        pytest.skip(f"real data is absent: {missing} (set CONSILIUM_DATA to the folder of the packs)")
    wheels = sorted(Path(os.environ.get("CONSILIUM_WHEELS", ".")).glob("torchxrayvision-1.5.7-*.whl"))
    if wheels:
        monkeypatch.syspath_prepend(str(wheels[0]))
    if importlib.util.find_spec("torchxrayvision") is None:
        pytest.skip("torchxrayvision 1.5.7 is absent: install the extra 'indiana', or set CONSILIUM_WHEELS")
    monkeypatch.setenv("CONSILIUM_DATA", str(DATA))
    manifest = open_manifest(preset)
    partition = by_site(manifest.targets, manifest.table)
    check_partition(partition, manifest.table)
    sizes = {site: sum(map(len, rows.values())) for site, rows in partition.sites.items()}
    nih = {"nih_a-AP": 567, "nih_a-PA": 433, "nih_b64-AP": 357, "nih_b64-PA": 636}
    assert sizes == {**nih, "indiana": 3955 - 90, "mhh": 243, "notes": 211}

    table, pack = manifest.table, open_manifest(DATA / "d1_cxr_multilabel.zip")
    assert manifest.labels == pack.labels
    for source, site in (("nih", ["nih_a", "nih_b64"]), ("mhh", ["mhh"])):
        rows = np.flatnonzero(pack.table["site"].isin(site))
        np.testing.assert_array_equal(manifest.targets[of(manifest, source)], pack.targets[rows])
    paired = table.iloc[of(manifest, "mhh")]
    assert (paired["report"] != "").all() and set(paired["text_kind"]) == {"structured-labs"}
    assert set(table["report"].iloc[of(manifest, "nih")]) == set(table["text"].iloc[of(manifest, "nih")]) == {""}
    np.testing.assert_array_equal(
        manifest.images.read(int(of(manifest, "mhh")[7])),
        pack.images.read(int(np.flatnonzero(pack.table["site"] == "mhh")[7])),
    )


def test_clinical_notes_pack_gives_reports_and_meets_the_chest_labels_by_name(tmp_path):
    if not (path := DATA / "d1b_covid_notes_nc.zip").is_file():
        pytest.skip(f"real data is absent: {path} (set CONSILIUM_DATA to the folder of the packs)")
    notes = open_manifest(path)
    assert (notes.table["report"].str.split().str.len() > 3).mean() > 0.9
    labels = open_manifest(DATA / "d1_cxr_multilabel.zip").labels
    text = f'labels = {list(labels)}\n[[sources]]\nname = "notes"\nroot = "{path.as_posix()}"\nmodality = "paired"\n'
    manifest = open_manifest(write_union(tmp_path, text))
    known = {label for label, marks in zip(labels, manifest.targets.T, strict=True) if (marks != -1).any()}
    # The table of `datasets.union`.
    assert known == {"Cardiomegaly", "Consolidation", "Effusion", "Pneumothorax", "Pneumonia", "COVID-19"}
    for label in known:
        expected = notes.targets[:, notes.labels.index(label)]
        np.testing.assert_array_equal(manifest.targets[:, labels.index(label)], expected)


def test_embedded_names_are_known_to_the_catalogue():
    assert {"indiana", "indiana-indication", "indiana-findings", "indiana-impression"} <= set(EMBEDDED)
