"""Bytes and text below one data root (a folder or a zip), and never anything outside it.

A manifest is written by people, copied from site to site and unpacked from archives, so every name in it is
treated as hostile: it may neither climb out of the root (``..``, absolute paths, symlinks) nor make the reader
swallow more than it was told to expect (zip bombs, huge files, pipes and devices).
"""

from __future__ import annotations

import codecs
import os
import re
import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from datasets.records import DataError

MAX_IMAGE_BYTES = 256 * 2**20
MAX_TABLE_BYTES = 2**30
MAX_ARRAY_BYTES = 16 * 2**30
MAX_ZIP_ENTRIES = 5_000_000
# Deflate cannot pass 1,032:1 and images rarely pass 30:1. Small blank files may, hence the floor.
MAX_ZIP_RATIO = 200
ZIP_RATIO_FLOOR_BYTES = 16 * 2**20


class Source(Protocol):
    """Read-only access to the files of one data root; names are relative and use forward slashes."""

    root: Path

    def read(self, name: str, *, max_bytes: int = MAX_IMAGE_BYTES) -> bytes:
        """The bytes of one file; raises DataError when it is missing, outside the root or too large."""
        ...

    def has(self, name: str) -> bool:
        """Whether a file of that name can be read; a name that leaves the root raises DataError."""
        ...

    def fingerprint(self, name: str) -> str:
        """What changes when the file changes; "" for a file that is missing. Raises DataError like ``has``."""
        ...


def clean_name(name: str) -> str:
    """A relative path with forward slashes and no ``.`` parts; raises DataError for one that could leave the root.

    Choice: a backslash separates folders, as in manifests written on Windows, so ``a\\b.png`` reads as ``a/b.png``.
    """
    text = name.replace("\\", "/")
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not parts or text.startswith("/") or ".." in parts or "\0" in text or re.match(r"[A-Za-z]:", text):
        raise DataError(
            f"path {shown(name)} is not a file below the data root; "
            "write it relative to the root, without '..', drive letter or leading slash"
        )
    return "/".join(parts)


def shown(value: str, length: int = 80) -> str:
    """A value quoted for an error message, cut to ``length`` characters."""
    return repr(value if len(value) <= length else value[: length - 3] + "...")


class FolderSource:
    """Files below a folder. Symlinks are followed as long as they end inside the folder."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).resolve()
        self._folders: dict[str, str] = {}

    def locate(self, name: str) -> Path:
        """Where a file really is; raises DataError when a symlink leads out of the root."""
        folder, _, file = clean_name(name).rpartition("/")
        # A hundred thousand images share a few folders: resolving each folder once keeps the check cheap.
        if folder not in self._folders:
            self._folders[folder] = self._inside(self.root / folder, name)
        path = os.path.join(self._folders[folder], file)
        return Path(self._inside(path, name) if os.path.islink(path) else path)

    def _inside(self, path: str | os.PathLike[str], name: str) -> str:
        real = os.path.realpath(path)
        if not Path(real).is_relative_to(self.root):
            raise DataError(
                f"{shown(name)} is a link that leads out of the data root; put the file itself below the root"
            )
        return real

    def read(self, name: str, *, max_bytes: int = MAX_IMAGE_BYTES) -> bytes:
        # A pipe must not hang the reader, nor a link that was swapped in after the check be followed.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        try:
            descriptor = os.open(self.locate(name), flags)
            with os.fdopen(descriptor, "rb") as file:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise DataError(f"{shown(name)} is not a regular file; name an image or table file")
                _refuse_large(name, found.st_size, max_bytes)
                data = file.read(max_bytes + 1)
        except (OSError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            reason = getattr(error, "strerror", None) or "it cannot be opened"
            raise DataError(f"{shown(name)} cannot be read ({reason}); check the path and the permissions") from error
        _refuse_large(name, len(data), max_bytes)
        return data

    def has(self, name: str) -> bool:
        return self.fingerprint(name) != ""

    def fingerprint(self, name: str) -> str:
        """Size and modification time (ns)."""
        try:
            found = os.stat(self.locate(name))
        except (OSError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            return ""
        return f"{found.st_size}:{found.st_mtime_ns}" if stat.S_ISREG(found.st_mode) else ""


class ZipSource:
    """Files inside a zip, read in place. A process that inherits or unpickles it opens its own handle.

    Choice: when everything lies in one top folder (a zipped folder), that folder is the root.
    Choice: encrypted entries, links, duplicate names and methods other than stored and deflated are refused.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._opened: tuple[int, zipfile.ZipFile] | None = None
        entries = self._file().infolist()
        if len(entries) > MAX_ZIP_ENTRIES:
            raise DataError(
                f"{self.root.name} has {len(entries)} entries, the limit is {MAX_ZIP_ENTRIES}; unpack it into a folder"
            )
        self._entries, self._duplicates = _index_entries(entries)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_opened": None}

    def _file(self) -> zipfile.ZipFile:
        # A forked child shares the parent's file offset; reading through it would return another entry's bytes.
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                self._opened = (os.getpid(), zipfile.ZipFile(self.root))
            except Exception as error:  # zipfile raises many kinds on hostile bytes
                raise DataError(f"{self.root.name} is not a readable zip ({error}); copy or make it again") from error
        return self._opened[1]

    def close(self) -> None:
        """Closes the handle; a later read opens it again."""
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None

    def read(self, name: str, *, max_bytes: int = MAX_IMAGE_BYTES) -> bytes:
        key = clean_name(name)
        where = f"{shown(name)} in {self.root.name}"
        if key in self._duplicates:
            raise DataError(f"{where} is stored more than once; make the zip again with one entry a file")
        if key not in self._entries:
            raise DataError(f"{where} does not exist; check the path in the manifest")
        entry = self._entries[key]
        _refuse_entry(entry, where)
        _refuse_large(where, entry.file_size, max_bytes)
        if entry.file_size > max(ZIP_RATIO_FLOOR_BYTES, MAX_ZIP_RATIO * entry.compress_size):
            raise DataError(
                f"{where} expands from {entry.compress_size} to {entry.file_size} bytes, more than {MAX_ZIP_RATIO}:1, "
                "like a zip bomb; if it is genuine, unpack the zip and use the folder"
            )
        try:
            with self._file().open(entry) as file:
                return file.read(max_bytes)
        except DataError:
            raise
        except Exception as error:  # zlib, CRC, truncation, bad headers: zipfile has no common base for them
            raise DataError(f"{where} is damaged ({error}); copy or make the zip again") from error

    def has(self, name: str) -> bool:
        return clean_name(name) in self._entries

    def fingerprint(self, name: str) -> str:
        """Size and CRC-32, as the zip states them."""
        entry = self._entries.get(clean_name(name))
        return f"{entry.file_size}:{entry.CRC:08x}" if entry else ""


def _index_entries(entries: Sequence[zipfile.ZipInfo]) -> tuple[dict[str, zipfile.ZipInfo], set[str]]:
    """Entries by cleaned name, and the names stored twice. Entries whose own name is hostile cannot be asked for."""
    index: dict[str, zipfile.ZipInfo] = {}
    duplicates: set[str] = set()
    for entry in entries:
        try:
            name = clean_name(entry.filename)
        except DataError:
            continue
        if entry.is_dir() or name.startswith("__MACOSX/"):
            continue
        if name in index:
            duplicates.add(name)
        index[name] = entry
    tops = {name.partition("/")[0] if "/" in name else "" for name in index}
    if len(tops) != 1 or tops == {""}:
        return index, duplicates
    cut = len(tops.pop()) + 1
    return {name[cut:]: entry for name, entry in index.items()}, {name[cut:] for name in duplicates}


def _refuse_entry(entry: zipfile.ZipInfo, where: str) -> None:
    if entry.flag_bits & 0x1:
        raise DataError(f"{where} is encrypted; unpack the zip with its password and use the folder")
    if stat.S_ISLNK(entry.external_attr >> 16):
        raise DataError(f"{where} is a symbolic link; store the file itself in the zip")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{where} uses an unusual compression; make the zip again with 'deflate'")


def _refuse_large(name: str, size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise DataError(f"{name} has {size_bytes} bytes, the limit is {max_bytes}; is it the right file?")


def open_source(root: str | os.PathLike[str]) -> FolderSource | ZipSource:
    """The data root as a source: a folder, or a ``.zip`` file; raises DataError for anything else."""
    path = Path(root)
    if path.is_dir():
        return FolderSource(path)
    if path.is_file() and zipfile.is_zipfile(path):
        return ZipSource(path)
    if not path.exists():
        raise DataError(f"data root {path} does not exist; set it to a folder, a zip or a manifest file")
    raise DataError(f"data root {path} is neither a folder nor a zip; set it to a folder, a zip or a manifest file")


# UTF-32 first: its little-endian mark begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def decode_text(data: bytes, name: str, encoding: str | None = None) -> str:
    """The text of a file, without byte order mark; raises DataError rather than return wrong characters.

    Order: 1. a byte order mark (UTF-8, UTF-16, UTF-32) decides; 2. ``encoding`` when given; 3. zero bytes mean
    UTF-16 without a mark; 4. UTF-8, strictly; 5. refused, naming the first line and the encodings that would fit.

    Choice: GBK and Latin-1 are never guessed. Latin-1 reads any bytes at all, and a GBK reading of "Müller" or of
    Korean text succeeds with wrong characters, so only a person can say which it is: ``encoding="gbk"`` here, or
    ``"encoding": "gbk"`` in the sidecar. A byte order mark that contradicts ``encoding`` is refused as well.
    """
    for mark, unicode in _MARKS:
        if data.startswith(mark):
            if encoding is not None and not _same_family(encoding, unicode):
                raise DataError(
                    f"{name} begins with the byte order mark of {unicode}, but encoding is set to "
                    f"{shown(encoding)}; drop that setting"
                )
            return _decode(data[len(mark) :], unicode, name)
    if encoding is not None:
        return _decode(data, encoding, name)
    if b"\0" in data:
        return _decode(data, _utf16_order(data), name)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        fits = [candidate for candidate in ("gbk", "latin-1") if _decodes(data, candidate)]
        raise DataError(
            f"{name} line {line} is not UTF-8; save it as UTF-8, or state its encoding "
            f'(it could be {" or ".join(fits)}) as "encoding" in the sidecar'
        ) from error


def _same_family(encoding: str, unicode: str) -> bool:
    """Whether a stated encoding agrees with a byte order mark: utf-16 and utf-16-le do, latin-1 does not."""
    try:
        stated = codecs.lookup(encoding).name.replace("-sig", "")
    except (LookupError, ValueError):
        return False
    return stated in (unicode, unicode[:-3])


def _utf16_order(data: bytes) -> str:
    """utf-16-le or utf-16-be: whichever reads more separators, digits and Latin letters out of the bytes."""

    def ascii_count(codec: str) -> int:
        return sum(character < "\x7f" for character in data[:8192].decode(codec, errors="replace"))

    return max(("utf-16-le", "utf-16-be"), key=ascii_count)


def _decodes(data: bytes, encoding: str) -> bool:
    try:
        data.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _decode(data: bytes, encoding: str, name: str) -> str:
    try:
        text = data.decode(encoding)
    except LookupError as error:
        raise DataError(
            f"encoding {shown(encoding)} for {name} is unknown; use utf-8, utf-16, gbk or latin-1"
        ) from error
    except ValueError as error:
        raise DataError(f"{name} is not valid {encoding} ({error}); save it as UTF-8") from error
    if "\0" in text:
        raise DataError(f"{name} holds zero bytes, so it is not text; is it the right file?")
    return text
