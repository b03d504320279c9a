"""The Indiana reports: in an invented archive of the published layout, and, where it is, in the real package."""

import importlib.util
import io
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from datasets.catalogue import open_manifest
from datasets.import_chest import NIH_LABELS
from datasets.indiana import MESH, ChestReport, indiana, mesh_marks, parse_report, read_archive, reports_archive
from datasets.records import DataError
from datasets.splits import hash_split


def report_xml(number: int, *, indication="", findings="", impression="", mesh=(), images=()) -> bytes:
    """An invented report, laid out as the collection's are."""
    parts = {"COMPARISON": "None", "INDICATION": indication, "FINDINGS": findings, "IMPRESSION": impression}
    texts = "".join(f'<AbstractText Label="{label}">{text}</AbstractText>' for label, text in parts.items())
    codes = "".join(f"<major>{code}</major>" for code in mesh)
    films = "".join(f'<parentImage id="{image}"><figureId>F1</figureId></parentImage>' for image in images)
    return (
        f'<?xml version="1.0" encoding="utf-8"?><eCitation><meta type="rr"/><uId id="CXR{number}"/><MedlineCitation>'
        f"<Article><Abstract>{texts}</Abstract></Article></MedlineCitation><MeSH>{codes}<automatic>Hernia</automatic>"
        f"</MeSH>{films}</eCitation>"
    ).encode()


REPORTS = {
    "2.xml": report_xml(2, indication="Cough", findings="Clear lungs.", mesh=["normal"]),
    "10.xml": report_xml(10, indication="Fall\n  from stairs", mesh=["Cardiomegaly/mild", "Pulmonary Edema"]),
    "1.xml": report_xml(1, findings="Scarring.", mesh=["Thickening/pleura/apical", "Pulmonary Fibrosis"]),
}


def archive(reports: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        for name, data in reports.items():
            member = tarfile.TarInfo(f"ecgen-radiology/{name}")
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "torchxrayvision-1.5.7-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("torchxrayvision/__init__.py", "raise RuntimeError('imported')")
        file.writestr("torchxrayvision/data/NLMCXR_reports.tgz", archive(REPORTS))
        file.writestr("torchxrayvision-1.5.7.dist-info/METADATA", "")
    return path


def test_reports_of_a_wheel_are_text_without_images(wheel):
    manifest = indiana(wheel=wheel)
    # CXR1 has no indication, so nothing of it is left.
    assert manifest.table["report"].tolist() == ["Cough", "Fall from stairs"]
    assert manifest.table["patient"].tolist() == ["CXR2", "CXR10"]
    assert set(manifest.table["site"]) == {"indiana"} and set(manifest.table["image"]) == {""}
    present = [{label for label, mark in zip(NIH_LABELS, row, strict=True) if mark} for row in manifest.targets]
    assert present == [set(), {"Cardiomegaly", "Edema"}]
    assert len(manifest.images) == len(manifest) == 2
    with pytest.raises(DataError, match="no image, only text"):
        manifest.images.read(0)


def test_section_decides_the_text_and_the_rows(wheel):
    findings = indiana(section="findings", wheel=wheel)
    assert findings.table["report"].tolist() == ["Scarring.", "Clear lungs."]
    assert set(findings.table["text_kind"]) == {"findings"}
    assert findings.checksum != indiana(wheel=wheel).checksum


def test_labels_follow_the_federations_order_and_other_lists_are_refused(wheel):
    manifest, turned = indiana(wheel=wheel), indiana(NIH_LABELS[::-1], wheel=wheel)
    np.testing.assert_array_equal(turned.targets, manifest.targets[:, ::-1])
    assert turned.labels == NIH_LABELS[::-1] and turned.checksum != manifest.checksum
    with pytest.raises(DataError, match="source of a union"):
        indiana(["Cardiomegaly"], wheel=wheel)


def test_wheel_as_data_root_and_package_on_the_path_are_the_same_and_nothing_is_imported(wheel, monkeypatch, tmp_path):
    by_path = open_manifest(wheel)
    monkeypatch.syspath_prepend(str(wheel))
    assert open_manifest("indiana").checksum == by_path.checksum
    with zipfile.ZipFile(wheel) as file:
        for name in ("torchxrayvision/__init__.py", "torchxrayvision/data/NLMCXR_reports.tgz"):
            file.extract(name, tmp_path / "site-packages")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    assert open_manifest("indiana-indication").checksum == by_path.checksum
    assert len(open_manifest("indiana-findings")) == 2 and "torchxrayvision" not in sys.modules
    with pytest.raises(DataError, match="none of the 3 Indiana reports has the section"):
        open_manifest("indiana-impression")


def test_absent_package_and_wrong_wheels_say_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="extra 'indiana'"):
        open_manifest("indiana")
    with pytest.raises(DataError, match="does not exist"):
        indiana(wheel=tmp_path / "absent.whl")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as file:
        file.writestr("other/__init__.py", "")
    with pytest.raises(DataError, match=r"other\.whl does not hold torchxrayvision"):
        indiana(wheel=tmp_path / "other.whl")


def test_reports_come_by_number_whatever_their_order_in_the_archive():
    numbers = [report.number for report in read_archive(archive(REPORTS), "r.tgz")]
    assert numbers == ["CXR1", "CXR2", "CXR10"]
    assert read_archive(archive(dict(reversed(REPORTS.items()))), "r.tgz") == read_archive(archive(REPORTS), "r.tgz")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"not a tar", "no readable archive"),
        (archive(REPORTS)[:200], "no readable archive"),
        (archive({}), "holds no reports"),
        (archive({"1.xml": REPORTS["1.xml"], "01.xml": REPORTS["1.xml"]}), "'CXR1' twice"),
        (archive({"1.xml": b" " * (2**20 + 1)}), "too large"),
    ],
)
def test_damaged_archives_are_refused(data, reason):
    with pytest.raises(DataError, match=reason):
        read_archive(data, "r.tgz")


@pytest.mark.parametrize(
    ("xml", "reason"),
    [
        ('<!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;">]><eCitation>&c;</eCitation>', "declares a DTD"),
        ('<!DOCTYPE a SYSTEM "file:///etc/passwd"><eCitation/>', "declares a DTD"),
        ("<eCitation>&undefined;</eCitation>", "not valid XML"),
        ("<eCitation><uId", "not valid XML"),
        ("<eCitation/>", "no report number"),
        ('<eCitation><uId id=" "/></eCitation>', "no report number"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_hostile_or_damaged_xml_is_refused_in_every_encoding(xml, reason, encoding):
    with pytest.raises(DataError, match=reason):
        parse_report(xml.encode(encoding), "1.xml")


def test_codes_become_marks_as_a_plain_loop_finds_them():
    codes = ["Opacity/lung", "Massive aorta", "Hydropneumothorax", "Pleura/thickening", "Pneumonia/bilateral", "normal"]
    codes += ["Pleural Effusion/small", "Effusion", "Granuloma", "Infiltrate/lung", "Bullous Emphysema", "Edema"]
    reports = [ChestReport(f"CXR{n}", {}, (code.lower(), "hernia, hiatal"), ()) for n, code in enumerate(codes)]
    marks = mesh_marks(reports)
    assert marks.shape == (len(codes), 14) and marks.dtype == np.int8
    for row, report in enumerate(reports):
        for column, label in enumerate(NIH_LABELS):
            starts = [code[at:] for code in report.mesh for at in [m.start() for m in re.finditer(r"\b\w", code)]]
            expected = any(start.startswith(word) for start in starts for word in MESH[label])
            assert marks[row, column] == expected, (report.mesh, label)


# -- the real package -------------------------------------------------------------------------------------------------

# Positives of the 3,955 reports as the data notes of the project count them, with an independent reader.
PUBLISHED = {
    "Cardiomegaly": 375,
    "Atelectasis": 332,
    "Effusion": 161,
    "Nodule": 111,
    "Emphysema": 106,
    "Infiltration": 65,
    "Hernia": 50,
    "Pleural_Thickening": 47,
    "Edema": 46,
    "Pneumonia": 42,
    "Consolidation": 30,
    "Pneumothorax": 27,
    "Fibrosis": 24,
    "Mass": 17,
}


def real_wheel() -> Path | None:
    """The wheel in the folder CONSILIUM_WHEELS; None for the installed package; skips where there is neither."""
    found = sorted(Path(os.environ.get("CONSILIUM_WHEELS", ".")).glob("torchxrayvision-1.5.7-*.whl"))
    if not found and importlib.util.find_spec("torchxrayvision") is None:
        pytest.skip("torchxrayvision 1.5.7 is absent: install the extra 'indiana', or set CONSILIUM_WHEELS")
    return found[0] if found else None


def test_real_reports_have_the_published_counts():
    reports = read_archive(reports_archive(real_wheel()), "NLMCXR_reports.tgz")
    assert len(reports) == 3955 and sum("normal" in report.mesh for report in reports) == 1391
    counted = dict(zip(NIH_LABELS, mesh_marks(reports).sum(axis=0, dtype=int).tolist(), strict=True))
    assert counted == PUBLISHED


def test_real_indications_are_split_by_the_hash_and_blank_ones_left_out():
    manifest = indiana(wheel=real_wheel())
    assert len(manifest) == 3955 - 90
    assert manifest.table["split"].tolist() == hash_split(manifest.table["patient"].tolist()).tolist()
    shares = manifest.table["split"].value_counts(normalize=True)
    # Five standard deviations of 3,865 draws: 0.037 at a share of 0.7.
    assert abs(shares["train"] - 0.7) < 0.037 and set(shares.index) == {"train", "val", "test"}
