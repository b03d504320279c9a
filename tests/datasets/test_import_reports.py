"""MIMIC-CXR and Open-I in miniature, laid out as published, with invented reports."""

import gzip
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasets.import_chest import CHEXPERT_LABELS, NIH_LABELS
from datasets.import_reports import HEADINGS, section_of
from datasets.manifest import read_manifest
from tests.datasets.test_importers import imported, put, row_of
from tests.datasets.test_indiana import REPORTS, archive, report_xml

REPORT = """                                 FINAL REPORT
 EXAMINATION:  CHEST (PA AND LAT)

 INDICATION:  Cough and fever,
   ?pneumonia.

 FINDINGS:

 The lungs are clear: no effusion.

 IMPRESSION:  No acute process.
"""
# subject, study, film, split
FILMS = (
    ("10000032", "50414267", "02aa804e", "train"),
    ("10000032", "50414267", "174413ec", "train"),
    ("10000980", "50985099", "6ad03ed1", "validate"),
    ("11000011", "51029426", "be0d6a59", "test"),
)


def film_path(subject: str, study: str, film: str) -> str:
    return f"files/p{subject[:2]}/p{subject}/s{study}/{film}.jpg"


def put_gz(path: Path, lines: list[str]) -> None:
    put(path, gzip.compress(("\n".join(lines) + "\n").encode()))


@pytest.fixture
def mimic(tmp_path: Path) -> Path:
    root = tmp_path / "mimic-cxr-jpg"
    header = ",".join(["subject_id", "study_id", *sorted(CHEXPERT_LABELS)])
    marks = dict.fromkeys(CHEXPERT_LABELS, "") | {"Edema": "1.0", "Fracture": "0.0", "Pneumonia": "-1.0"}
    cells = ",".join(marks[label] for label in sorted(CHEXPERT_LABELS))
    # The last study is in no line of the labeller.
    labelled = [f"10000032,50414267,{cells}", f"10000980,50985099,{cells}"]
    put_gz(root / "mimic-cxr-2.0.0-chexpert.csv.gz", [header, *labelled])
    lines = [f"{film},{subject},{study},PA,3056,2544" for subject, study, film, _ in FILMS]
    put_gz(root / "mimic-cxr-2.0.0-metadata.csv.gz", ["dicom_id,subject_id,study_id,ViewPosition,Rows,Columns", *lines])
    lines = [f"{film},{study},{subject},{split}" for subject, study, film, split in reversed(FILMS)]
    put_gz(root / "mimic-cxr-2.0.0-split.csv.gz", ["dicom_id,study_id,subject_id,split", *lines])
    for subject, study, film, _ in FILMS:
        put(root / film_path(subject, study, film))
    put(root / "mimic-cxr-reports/files/p10/p10000032/s50414267.txt", REPORT)
    return root


def test_mimic_films_share_study_report_and_labels(mimic, capsys):
    assert imported("mimic", mimic, "--site", "boston") == 0
    assert "samples=4 reports=2 labels=14" in capsys.readouterr().out
    manifest = read_manifest(mimic)
    assert manifest.labels == CHEXPERT_LABELS
    assert manifest.table["image"].tolist() == [film_path(*film[:3]) for film in FILMS]
    assert manifest.table["report"].tolist() == ["Cough and fever, ?pneumonia."] * 2 + ["", ""]
    assert manifest.table["split"].tolist() == ["train", "train", "val", "test"]
    assert manifest.table["patient"].tolist() == [film[0] for film in FILMS]
    assert manifest.table["study"].tolist() == [film[1] for film in FILMS]
    assert manifest.table["ViewPosition"].tolist() == ["PA"] * 4 and set(manifest.table["label_source"]) == {"auto"}
    marks = row_of(manifest, film_path(*FILMS[1][:3]))
    assert marks["Edema"] == 1 and marks["Fracture"] == 0 and marks["Pneumonia"] == -1 and marks["Lung Lesion"] == -1
    assert set(row_of(manifest, film_path(*FILMS[3][:3])).values()) == {-1}
    assert manifest.images.read(0).shape == (4, 4)


@pytest.mark.parametrize(
    ("section", "text"),
    [("findings", "The lungs are clear: no effusion."), ("impression", "No acute process.")],
)
def test_mimic_policies_and_section_are_asked_for_by_name(mimic, section, text):
    assert imported("mimic", mimic, "--section", section, "--uncertain", "positive", "--blank", "negative") == 0
    manifest = read_manifest(mimic)
    assert manifest.table["report"].tolist()[0] == text
    marks = row_of(manifest, film_path(*FILMS[0][:3]))
    assert marks["Pneumonia"] == 1 and marks["Lung Lesion"] == 0
    # A study nobody labelled stays unknown: "blank" is for findings that a labelled report does not mention.
    assert set(row_of(manifest, film_path(*FILMS[3][:3])).values()) == {-1}


@pytest.mark.parametrize("top", ["files", "mimic-cxr-reports/files", "beside"])
def test_mimic_reports_are_read_from_their_zip_or_beside_the_films(mimic, top):
    (mimic / "mimic-cxr-reports/files/p10/p10000032/s50414267.txt").unlink()
    if top == "beside":
        put(mimic / "files/p10/p10000032/s50414267.txt", REPORT)
    else:
        with zipfile.ZipFile(mimic / "mimic-cxr-reports.zip", "w") as file:
            file.writestr(f"{top}/p10/p10000032/s50414267.txt", REPORT)
    assert imported("mimic", mimic) == 0
    assert read_manifest(mimic).table["report"].tolist()[:3] == ["Cough and fever, ?pneumonia."] * 2 + [""]


def test_mimic_partial_download_and_a_newer_unpacked_table_are_read(mimic):
    (mimic / film_path(*FILMS[0][:3])).unlink()
    newer = gzip.decompress((mimic / "mimic-cxr-2.0.0-split.csv.gz").read_bytes()).replace(b"validate", b"train")
    put(mimic / "mimic-cxr-2.1.0-split.csv", newer)
    assert imported("mimic", mimic) == 2
    assert imported("mimic", mimic, "--missing", "skip") == 0
    assert read_manifest(mimic).table["split"].tolist() == ["train", "train", "test"]


def test_mimic_damage_is_refused_with_the_row(mimic, capsys):
    path = mimic / "mimic-cxr-2.0.0-chexpert.csv.gz"
    good = gzip.decompress(path.read_bytes())
    for content, reason in (
        (gzip.compress(good)[:-20], "is cut off"),
        (b"no gzip", "no readable gzip"),
        (gzip.compress(good.replace(b"-1.0", b"-2.0")), "row 2: column 'Pneumonia': '-2.0'"),
        (gzip.compress(good.replace(b"50985099", b"50414267")), "row 3: study_id '50414267' is there twice"),
        (gzip.compress(good.replace(b"Edema", b"Oedema")), "lacks the columns ['Edema']"),
    ):
        put(path, content)
        assert imported("mimic", mimic) == 2
        assert reason in capsys.readouterr().err
    put(path, gzip.compress(good))
    for second, reason in (("174413ec,val", "'val' is no split"), ("other,train", "'none' is no split")):
        put_gz(mimic / "mimic-cxr-2.0.0-split.csv.gz", ["dicom_id,split", "02aa804e,train", second])
        assert imported("mimic", mimic) == 2
        assert f"row 3: column 'split': {reason}" in capsys.readouterr().err
    assert not (mimic / "manifest.csv").exists()


@given(st.dictionaries(st.sampled_from(["indication", "findings", "impression"]), st.text("ab :.\n", max_size=20)))
def test_every_section_comes_back_without_its_neighbours(texts):
    report = "".join(f" {HEADINGS[section][0]}: {text}\n" for section, text in texts.items())
    for section in HEADINGS:
        assert section_of(report, section) == " ".join(texts.get(section, "").split())


def test_joint_headings_count_for_both_sections_and_a_report_without_headings_has_none():
    joint = "FINDINGS AND IMPRESSION: Clear.\nNOTIFICATION: phoned."
    assert section_of(joint, "findings") == section_of(joint, "impression") == "Clear."
    assert section_of("Clear lungs, see indication: none", "indication") == ""


@pytest.fixture
def openi(tmp_path: Path) -> Path:
    root = tmp_path / "openi"
    films = ("CXR5_IM-0001-1001", "CXR5_IM-0001-2001")
    reports = {**REPORTS, "5.xml": report_xml(5, indication="Wheeze", mesh=["Emphysema"], images=films)}
    for name, data in reports.items():
        put(root / "NLMCXR_reports" / "ecgen-radiology" / name, data)
    for film in films:
        put(root / "NLMCXR_png" / f"{film}.png")
    return root


def test_openi_films_share_their_report_and_texts_without_films_stay(openi):
    assert imported("openi", openi) == 0
    manifest = read_manifest(openi)
    assert manifest.labels == NIH_LABELS
    # CXR1 has neither film nor indication.
    assert manifest.table["patient"].tolist() == ["CXR2", "CXR5", "CXR5", "CXR10"]
    assert manifest.table["report"].tolist() == ["Cough", "Wheeze", "Wheeze", "Fall from stairs"]
    assert [path.rpartition("/")[2][:4] for path in manifest.table["image"]] == ["", "CXR5", "CXR5", ""]
    assert set(manifest.table["label_source"]) == {"reviewed"}
    assert manifest.targets[1].tolist() == manifest.targets[2].tolist()
    assert manifest.targets[1].sum() == manifest.targets[1][NIH_LABELS.index("Emphysema")] == 1


def test_openi_reports_are_read_from_their_archive_and_missing_films_are_refused_or_skipped(openi, capsys):
    reports = {path.name: path.read_bytes() for path in (openi / "NLMCXR_reports" / "ecgen-radiology").iterdir()}
    assert imported("openi", openi, "--section", "findings") == 0
    unpacked = read_manifest(openi)
    for path in (openi / "NLMCXR_reports" / "ecgen-radiology").iterdir():
        path.unlink()
    put(openi / "NLMCXR_reports.tgz", archive(reports))
    assert imported("openi", openi, "--section", "findings", "--overwrite") == 0
    assert read_manifest(openi).checksum == unpacked.checksum
    next((openi / "NLMCXR_png").iterdir()).unlink()
    assert imported("openi", openi, "--overwrite") == 2
    assert "1 of 4 images are missing" in capsys.readouterr().err
    assert imported("openi", openi, "--overwrite", "--missing", "skip") == 0
    assert len(read_manifest(openi)) == 3


@pytest.mark.parametrize("kind", ["mimic", "openi"])
def test_folder_of_another_kind_is_refused_with_what_to_give(tmp_path, capsys, kind):
    assert imported(kind, tmp_path) == 2
    assert "give the folder" in capsys.readouterr().err
