"""The queue as a hospital uses it: export, label, import, status; what is refused; what the page holds."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from datasets.annotation import main, sample_ids, site_pool
from datasets.annotation_files import export, label_columns, read_answers, thumbnail
from datasets.annotation_pool import Answer, Reason, new_pool, receive, request, utc
from datasets.annotation_store import change, open_pool, read_pool
from datasets.catalogue import open_manifest
from datasets.records import DataError

IDS = ("p/1.png", 'p/"2",<b>.png', "p/3 ü.png", "p/4.png")
NOON = "2026-01-01T12:00:00Z"
PIXELS = np.arange(600, dtype=np.uint16).reshape(20, 30).astype(np.uint8)


def pool_of(task, labels=("cat", 'dog, "big" & <small>')):
    pool = new_pool(labels, task, "sum", IDS)
    return request(pool, IDS[:3], 1, [Reason(f"because <i>{n}</i>", labels[n % 2], n / 3) for n in range(3)])


SINGLE, MULTI = pool_of("multiclass"), pool_of("multilabel")


def rows_of(path):
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline="")))


def answers_file(tmp_path, rows, columns=None, name="answers.csv"):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns or list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    path = tmp_path / name
    path.write_text(text.getvalue(), encoding="utf-8", newline="")
    return path


# -- export -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [SINGLE, MULTI], ids=["single", "multi"])
def test_the_worklist_holds_what_is_pending_with_reason_and_thumbnail(tmp_path, pool):
    home = export(pool, tmp_path, lambda id: PIXELS, side=15)
    rows = rows_of(home / "worklist.csv")
    assert [row["id"] for row in rows] == list(IDS[:3])
    assert rows[1]["reason"] == "because <i>1</i>" and rows[1]["pseudo_label"] == pool.labels[1]
    assert rows[1]["uncertainty"] == "0.333333" and rows[1]["cycle"] == "1"
    assert all(row[column] == "" for row in rows for column in label_columns(pool))
    with Image.open(home / rows[0]["thumbnail"]) as image:
        assert image.size == (15, 10) and image.mode == "L"
    assert home.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in home.rglob("*") if path.is_file()} == {0o600}


def test_the_next_export_leaves_a_filled_table_alone(tmp_path):
    first = export(MULTI, tmp_path, lambda id: PIXELS)
    (first / "worklist.csv").write_text("hours of work")
    second = export(MULTI, tmp_path, lambda id: PIXELS)
    assert (first.name, second.name) == ("0001", "0002") and (first / "worklist.csv").read_text() == "hours of work"


def test_what_is_answered_is_not_exported_again_but_a_dispute_is(tmp_path):
    pool = receive(SINGLE, [Answer(IDS[0], (1, 0), "ann", utc(NOON)), Answer(IDS[1], (1, 0), "ann", utc(NOON))], "last")
    pool = receive(pool, [Answer(IDS[1], (0, 1), "bo", utc(NOON))], "majority")
    assert [row["id"] for row in rows_of(export(pool, tmp_path, lambda id: PIXELS) / "worklist.csv")] == list(IDS[1:3])


def test_an_unreadable_image_does_not_stop_the_others(tmp_path):
    def read(id):
        if id == IDS[1]:
            raise DataError("the file is cut off")
        return PIXELS

    home = export(SINGLE, tmp_path, read)
    assert [bool(row["thumbnail"]) for row in rows_of(home / "worklist.csv")] == [True, False, True]
    assert "The image cannot be shown: the file is cut off" in (home / "label.html").read_text()


def test_nothing_pending_is_said(tmp_path):
    with pytest.raises(DataError, match="nothing is pending"):
        export(new_pool(("cat",), "multilabel", "sum", IDS), tmp_path, lambda id: PIXELS)
    with pytest.raises(DataError, match="side is 0 pixels"):
        export(SINGLE, tmp_path, lambda id: PIXELS, side=0)
    assert not list(tmp_path.iterdir())


def test_a_thumbnail_is_never_enlarged_and_keeps_its_colours():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    with Image.open(io.BytesIO(thumbnail(pixels, 100))) as image:
        np.testing.assert_array_equal(np.asarray(image), pixels)


# -- the page ---------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Elements with their attributes, and text by the element that holds it; fails on elements closed out of order."""

    VOID = frozenset({"meta", "img", "input", "br"})

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + data

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture(params=[SINGLE, MULTI], ids=["single", "multi"])
def page(request, tmp_path):
    home = export(request.param, tmp_path, lambda id: PIXELS)
    return request.param, Page((home / "label.html").read_text(encoding="utf-8"))


def test_the_page_holds_every_id_and_every_label_as_text(page):
    pool, parsed = page
    assert [attrs["data-id"] for attrs in parsed.all("section")] == list(IDS[:3])
    assert len(parsed.all("img")) == 3 and not parsed.all("b")[4:] and not parsed.all("i"), "foreign text is escaped"
    values = [attrs["value"] for attrs in parsed.all("input") if attrs["type"] == "radio"]
    assert values == ([*pool.labels, ""] * 3 if pool.task == "multiclass" else ["1", "0", ""] * 6)
    names = [attrs["name"] for attrs in parsed.all("input") if attrs["type"] == "radio"]
    assert len(set(names)) == (3 if pool.task == "multiclass" else 6)
    assert pool.labels[1] in parsed.texts["span" if pool.task == "multiclass" else "legend"]


def test_the_page_loads_nothing_and_runs_its_own_script_only(page):
    _, parsed = page
    (policy,) = [attrs["content"] for attrs in parsed.all("meta") if "http-equiv" in attrs]
    digest = base64.b64encode(hashlib.sha256(parsed.texts["script"].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    assert all(attrs["src"].startswith("data:image/png;base64,") for attrs in parsed.all("img"))
    links = [
        value for _, attrs in parsed.elements for name, value in attrs.items() if name in ("href", "src", "action")
    ]
    assert len(links) == len(parsed.all("img")) and not any(
        name.startswith("on") for _, a in parsed.elements for name in a
    )
    assert not re.search(r"https?://|url\(|@import", parsed.texts["style"] + parsed.texts["script"])


def test_the_page_suits_a_phone_and_a_dark_room(page):
    _, parsed = page
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in parsed.all("meta")
    assert "prefers-color-scheme: dark" in parsed.texts["style"]


# -- import -----------------------------------------------------------------------------------------------------------


def test_single_label_answers_are_class_names(tmp_path):
    path = answers_file(
        tmp_path,
        [
            {"id": IDS[0], "reader": "Ann", "time": NOON, "label": SINGLE.labels[1]},
            {"id": IDS[1], "reader": "Ann", "time": NOON, "label": ""},
        ],
    )
    answers, refusals = read_answers(path, SINGLE)
    assert answers == (Answer(IDS[0], (0, 1), "ann", utc(NOON)),) and refusals == ()


def test_multi_label_answers_are_marks_and_blanks_stay_unknown(tmp_path):
    cat, dog = label_columns(MULTI)
    rows = [
        {"id": id, "reader": "Ann", "time": NOON, cat: left, dog: right}
        for id, left, right in zip(IDS[:3], ("1", "0.0", ""), ("", "-1", ""), strict=True)
    ]
    answers, refusals = read_answers(answers_file(tmp_path, rows), MULTI)
    assert [answer.marks for answer in answers] == [(1, -1), (0, -1)] and refusals == ()
    answers, _ = read_answers(answers_file(tmp_path, rows, ["id", "reader", "time", cat, dog]), MULTI)
    assert len(answers) == 2


def test_bad_rows_are_refused_with_row_and_reason_and_the_rest_is_taken(tmp_path):
    fine = {"id": IDS[0], "reader": "ann", "time": NOON, "label": "cat"}
    bad = [
        ({"id": "nobody"}, "'nobody' is not in this pool"),
        ({"id": IDS[3]}, "was never requested"),
        ({"label": "cow"}, "'cow' is no class"),
        ({"reader": " "}, "write a name"),
        ({"time": "noon"}, "write it as 2026"),
        ({"time": ""}, "write it as 2026"),
    ]
    path = answers_file(tmp_path, [fine, *({**fine, **change} for change, _ in bad), {**fine, "id": IDS[1]}])
    answers, refusals = read_answers(path, SINGLE)
    assert [answer.id for answer in answers] == [IDS[0], IDS[1]]
    assert [refusal.line for refusal in refusals] == [3, 4, 5, 6, 7, 8]
    for refusal, (_, why) in zip(refusals, bad, strict=True):
        assert why in refusal.why


def test_a_mark_for_an_unknown_label_is_refused_a_blank_one_is_not(tmp_path):
    cat, _ = label_columns(MULTI)
    rows = [
        {"id": IDS[0], "reader": "a", "time": NOON, cat: "1", "label:cow": ""},
        {"id": IDS[1], "reader": "a", "time": NOON, cat: "1", "label:cow": "0"},
        {"id": IDS[2], "reader": "a", "time": NOON, cat: "yes", "label:cow": ""},
    ]
    answers, refusals = read_answers(answers_file(tmp_path, rows), MULTI)
    assert [answer.id for answer in answers] == [IDS[0]]
    assert [refusal.line for refusal in refusals] == [3, 4]
    assert "'cow' is no label" in refusals[0].why and "'yes' is no mark" in refusals[1].why


def test_reader_and_time_stand_in_for_blank_cells_only(tmp_path):
    rows = [{"id": IDS[0], "reader": "", "label": "cat"}, {"id": IDS[1], "reader": "Bo", "label": "cat"}]
    answers, _ = read_answers(answers_file(tmp_path, rows), SINGLE, reader="Ann", time=NOON)
    assert [(answer.reader, answer.time) for answer in answers] == [("ann", utc(NOON)), ("bo", utc(NOON))]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "id,reader\nx,y\n", 'id,label\n"x,cat\n', "id,label\nx\n"])
def test_a_file_that_is_no_table_of_answers_is_refused_whole(tmp_path, text):
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=r"x\.csv"):
        read_answers(path, SINGLE)
    with pytest.raises(DataError, match="cannot be read"):
        read_answers(tmp_path / "nowhere.csv", SINGLE)


# -- a hospital's commands --------------------------------------------------------------------------------------------


@pytest.fixture
def ward_pool(tmp_path, write_hospital):
    """A hospital whose first two of eight training samples are labelled, three of the others requested."""
    rows = [{"cat": 1, "dog": 0}, {"cat": 0}, *({} for _ in range(6)), {"split": "test", "cat": 1}]
    root = write_hospital(tmp_path / "data", rows)
    pool = site_pool(open_manifest(root))
    folder = tmp_path / "pool"
    open_pool(folder, pool)
    picks = pool.unlabelled[:3]
    change(folder, lambda kept: request(kept, picks, 1, [Reason("uncertain", "cat", 0.9)] * 3))
    return folder, root, picks


def run(*arguments):
    return main([str(argument) for argument in arguments])


def fill(path, marks, name="filled.csv"):
    rows = rows_of(path)
    for row in rows:
        row |= marks.get(row["id"], {})
    return answers_file(path.parent, rows, name=name)


def test_the_pool_of_a_manifest_holds_its_training_rows(ward_pool):
    folder, root, picks = ward_pool
    pool = read_pool(folder)
    assert pool.ids == sample_ids(open_manifest(root))[:8] and pool.data_sha256 == open_manifest(root).checksum
    assert pool.labelled == {pool.ids[0]: (1, 0), pool.ids[1]: (0, -1)} and pool.pending == picks


def test_a_manifest_without_image_paths_has_row_numbers_as_ids():
    assert sample_ids(open_manifest("digits"))[:2] == ("row 0", "row 1")


def test_export_label_import_and_again(ward_pool, capsys):
    folder, root, picks = ward_pool
    assert run("export", folder, "--data", root) == 0
    home = folder / "worklists" / "0001"
    assert len(list((home / "thumbnails").iterdir())) == 3
    first = fill(home / "worklist.csv", {picks[0]: {"reader": "Ann", "time": NOON, "label:cat": 1}})
    assert run("import", folder, first) == 0
    assert "new=1 refused=0 rule=majority labelled=3 pending=2" in capsys.readouterr().out
    rest = fill(home / "worklist.csv", {id: {"label:dog": 0} for id in picks[1:]}, "rest.csv")
    assert run("import", folder, rest, "--reader", "Bo", "--time", NOON) == 0
    capsys.readouterr()
    journal = (folder / "journal.jsonl").read_bytes()
    assert run("import", folder, first) == run("import", folder, rest, "--reader", "Bo", "--time", NOON) == 0
    assert capsys.readouterr().out.count("new=0") == 2 and (folder / "journal.jsonl").read_bytes() == journal
    assert read_pool(folder).labelled[picks[1]] == (-1, 0)
    assert run("export", folder, "--data", root) == 2 and "nothing is pending" in capsys.readouterr().err


def test_two_readers_must_agree_where_the_rule_says_so(ward_pool, capsys):
    folder, root, picks = ward_pool
    run("export", folder, "--data", root)
    table = folder / "worklists" / "0001" / "worklist.csv"
    for reader, mark, labelled in (("ann", 1, 2), ("bo", 0, 2), ("cy", 1, 3)):
        filled = fill(table, {picks[0]: {"reader": reader, "time": NOON, "label:cat": mark}})
        assert run("import", folder, filled, "--rule", "agree") == 0
        assert f"rule=agree labelled={labelled} " in capsys.readouterr().out
        if reader == "bo":
            assert run("status", folder) == 0 and f"disputed={picks[0]!r}" in capsys.readouterr().out
    run("status", folder)
    out = capsys.readouterr().out
    assert "samples=8 labelled=3 pending=2 disputed=0 unlabelled=3 rule=agree" in out
    assert "cycle=1 requested=3 pending=2" in out and "reader='bo' answers=1" in out


def test_refused_rows_are_printed_and_the_rest_is_kept(ward_pool, capsys):
    folder, _, picks = ward_pool
    said = {"reader": "ann", "time": NOON, "label:cat": 1}
    path = answers_file(folder, [{"id": "nobody", **said}, {"id": picks[0], **said}])
    assert run("import", folder, path) == 1
    captured = capsys.readouterr()
    assert captured.err == "answers.csv row 2: not taken: sample 'nobody' is not in this pool\n"
    assert "answers=1 new=1 refused=1" in captured.out and picks[0] in read_pool(folder).labelled


def test_export_from_other_data_names_both_checksums(ward_pool, tmp_path, write_hospital, capsys):
    folder, _, _ = ward_pool
    other = write_hospital(tmp_path / "other", [{"cat": 1, "dog": 0}] * 3)
    assert run("export", folder, "--data", other) == 2
    err = capsys.readouterr().err
    assert read_pool(folder).data_sha256 in err and open_manifest(other).checksum in err


def test_a_folder_without_a_pool_is_an_error(tmp_path, capsys):
    assert run("status", tmp_path) == 2 and "is this the folder of a pool" in capsys.readouterr().err
