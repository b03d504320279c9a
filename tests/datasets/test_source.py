"""Reading below a data root: nothing outside it, nothing larger than expected, no wrong characters."""

import os
import pickle
import stat
import zipfile
from pathlib import Path

import pytest

from datasets.records import DataError
from datasets.source import FolderSource, ZipSource, clean_name, decode_text, open_source

TEXT = "file,befund\na.png,Größe 中文\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "images").mkdir(parents=True)
    (root / "images" / "a.png").write_bytes(b"pixels")
    (tmp_path / "secret.txt").write_bytes(b"secret")
    return root


def zipped(path: Path, files: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    "name",
    ["../secret.txt", "images/../../secret.txt", "/etc/passwd", "C:\\x", "\\\\host\\x", "..\\x", "", ".", "a\0b"],
)
def test_names_that_could_leave_the_root_are_refused(folder, name):
    for source in (open_source(folder), open_source(zipped(folder.parent / "r.zip", {"../secret.txt": b"secret"}))):
        with pytest.raises(DataError, match="below the data root"):
            source.read(name)


def test_backslashes_and_dots_are_cleaned():
    assert clean_name(".\\images//./a.png") == "images/a.png"


def test_symlinks_are_followed_inside_the_root_and_refused_outside(folder):
    (folder / "inner.png").symlink_to(folder / "images" / "a.png")
    (folder / "outer.png").symlink_to(folder.parent / "secret.txt")
    (folder / "up").symlink_to(folder.parent)
    source = FolderSource(folder)
    assert source.read("inner.png") == b"pixels"
    for name in ("outer.png", "up/secret.txt"):
        with pytest.raises(DataError, match="leads out of the data root"):
            source.read(name)
        with pytest.raises(DataError, match="leads out of the data root"):
            source.has(name)


def test_root_may_itself_be_a_symlink(folder):
    (folder.parent / "link").symlink_to(folder)
    assert FolderSource(folder.parent / "link").read("images/a.png") == b"pixels"


def test_a_sibling_whose_name_begins_like_the_root_is_outside(folder):
    sibling = folder.parent / "root2"
    sibling.mkdir()
    (sibling / "x").write_bytes(b"x")
    (folder / "x").symlink_to(sibling / "x")
    with pytest.raises(DataError, match="leads out"):
        FolderSource(folder).read("x")


def test_pipes_folders_loops_and_missing_files_are_refused_without_hanging(folder):
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    for name in ("pipe", "images", "loop", "absent", "x" * 5000, "\ud800"):
        with pytest.raises(DataError):
            FolderSource(folder).read(name)
        assert not FolderSource(folder).has(name)


def test_large_files_are_refused_in_folder_and_zip(folder):
    archive = zipped(folder.parent / "r.zip", {"images/a.png": b"pixels", "b": b""})
    for source in (FolderSource(folder), ZipSource(archive)):
        assert source.read("images/a.png", max_bytes=6) == b"pixels"
        with pytest.raises(DataError, match="6 bytes, the limit is 5"):
            source.read("images/a.png", max_bytes=5)


def test_zip_bomb_is_refused_by_its_ratio_and_a_small_blank_file_is_not(tmp_path):
    source = ZipSource(zipped(tmp_path / "b.zip", {"bomb": bytes(32 * 2**20), "blank": bytes(2**20)}))
    with pytest.raises(DataError, match="like a zip bomb"):
        source.read("bomb")
    assert source.read("blank") == bytes(2**20)


def test_zip_whose_header_lies_about_the_size_is_refused(tmp_path):
    path = zipped(tmp_path / "l.zip", {"a": bytes(100_000), "b": b"b"})
    data = path.read_bytes()
    # 100,000 as the header stores it; claim 10 bytes so that every limit is passed.
    path.write_bytes(data.replace((100_000).to_bytes(4, "little"), (10).to_bytes(4, "little")))
    with pytest.raises(DataError, match="damaged"):
        ZipSource(path).read("a")


def test_zip_links_duplicates_odd_compression_and_encryption_are_refused(tmp_path):
    path = tmp_path / "z.zip"
    with zipfile.ZipFile(path, "w") as archive:
        link = zipfile.ZipInfo("link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("twice", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("twice", b"2")
        archive.writestr("bz", b"x" * 1000, zipfile.ZIP_BZIP2)
        archive.writestr("locked", b"x")
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"locked") - 46  # its central directory record; the flags stand 8 bytes in
    data[entry + 8] |= 1
    path.write_bytes(bytes(data))
    source = ZipSource(path)
    for name, reason in {"link": "symbolic", "twice": "more than once", "bz": "unusual", "locked": "encrypted"}.items():
        with pytest.raises(DataError, match=reason):
            source.read(name)


def test_damaged_zip_is_refused_when_opened_or_read(tmp_path):
    path = zipped(tmp_path / "d.zip", {"a": os.urandom(1000), "b": b"b"})
    data = bytearray(path.read_bytes())
    data[200] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"'a' in d\.zip is damaged"):
        ZipSource(path).read("a")
    path.write_bytes(bytes(data[:-30]))
    with pytest.raises(DataError):
        open_source(path)


def test_zipped_folder_has_its_folder_as_root(tmp_path):
    source = ZipSource(zipped(tmp_path / "f.zip", {"set/m.csv": b"m", "set/images/a.png": b"a", "__MACOSX/x": b"x"}))
    assert source.read("m.csv") == b"m" and source.read("images/a.png") == b"a" and not source.has("x")


def test_zip_source_survives_pickling_and_forking(tmp_path):
    source = ZipSource(zipped(tmp_path / "p.zip", {f"f{i}": bytes([i]) * 10_000 for i in range(20)}))
    assert pickle.loads(pickle.dumps(source)).read("f3") == b"\3" * 10_000
    children = []
    for child in range(4):
        pid = os.fork()
        if pid == 0:
            right = all(source.read(f"f{i}") == bytes([i]) * 10_000 for i in range(20) for _ in range(20))
            os._exit(0 if right else 1)
        children.append((child, pid))
    assert all(source.read(f"f{i}") == bytes([i]) * 10_000 for i in range(20) for _ in range(20))
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for _, pid in children] == [0] * 4


def test_root_that_is_absent_or_no_zip_is_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        open_source(tmp_path / "absent")
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(DataError, match="neither a folder nor a zip"):
        open_source(tmp_path / "x.txt")


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode("utf-8"),
        TEXT.encode("utf-8-sig"),
        TEXT.encode("utf-16"),
        b"\xff\xfe" + TEXT.encode("utf-16-le"),
        b"\xfe\xff" + TEXT.encode("utf-16-be"),
        TEXT.encode("utf-16-le"),
        TEXT.encode("utf-16-be"),
        TEXT.encode("utf-32"),
    ],
)
def test_unicode_is_read_right_with_and_without_a_mark(data):
    assert decode_text(data, "m.csv") == TEXT


@pytest.mark.parametrize(("encoding", "text"), [("gbk", "a,中文报告\n"), ("latin-1", "a,Müller\n")])
def test_legacy_encodings_are_refused_unless_stated(encoding, text):
    data = b"x,y\n" + text.encode(encoding)
    with pytest.raises(DataError, match=r"m\.csv line 2 is not UTF-8.*it could be .*" + encoding):
        decode_text(data, "m.csv")
    assert decode_text(data, "m.csv", encoding) == "x,y\n" + text


def test_mark_that_contradicts_the_stated_encoding_is_refused():
    for encoding in ("latin-1", "gbk", "cp1252", "utf-16"):
        with pytest.raises(DataError, match="drop that setting"):
            decode_text(TEXT.encode("utf-8-sig"), "m.csv", encoding)
    assert decode_text(TEXT.encode("utf-8-sig"), "m.csv", "utf-8") == TEXT
    assert decode_text(TEXT.encode("utf-16"), "m.csv", "UTF-16") == TEXT


def test_binary_and_unknown_encodings_are_refused():
    with pytest.raises(DataError):
        decode_text(b"PK\x03\x04\0\0\0\0\0\0\0\0abc", "m.csv")
    for encoding in ("klingon", "rot13", "a\0b"):
        with pytest.raises(DataError):
            decode_text(b"a,b", "m.csv", encoding)
