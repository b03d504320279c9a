"""A pool on disk: ``pool.json``, written once, and ``journal.jsonl``, to which every change adds one line.

A change is on the disk before the caller hears of it, so a site may be killed at any moment. A line that was cut off
by a kill was never confirmed and is dropped; any other damage is an error, since labels are a reader's hours. Every
line carries a hash over itself and the line before; the first follows from ``pool.json``. The files hold row keys and
names of readers: they are readable by their owner only and nothing here sends them anywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets.annotation_pool import Answer, Pool, Reason, Request
from datasets.records import DataError
from federation.files import locked, write_atomic

VERSION = 1
POOL = "pool.json"
JOURNAL = "journal.jsonl"


def open_pool(folder: Path, blank: Pool) -> Pool:
    """The pool kept in a folder, made from ``blank`` (see `datasets.annotation_pool.new_pool`) where there is none.

    Raises DataError where the kept pool is of other data, labels or samples, and like `read_pool`.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(folder / ".lock"):
        journal = folder / JOURNAL
        if not (folder / POOL).exists():
            if journal.exists() and journal.stat().st_size:
                raise DataError(f"{folder} has a {JOURNAL} but no {POOL}; restore it, or choose an empty folder")
            write_atomic(journal, b"")
            write_atomic(folder / POOL, _pool_bytes(blank))  # last: with it there is a pool
        base, _ = _read_base(folder)
    check_data(base, blank.data_sha256, folder)
    for name in ("labels", "task", "ids", "given"):
        kept, now = getattr(base, name), getattr(blank, name)
        if kept != now:
            shown = f": {kept}, now {now}" if name in ("labels", "task") else ""
            raise DataError(f"the pool in {folder} has other {name} than this site{shown}; choose another folder")
    return read_pool(folder)


def check_data(pool: Pool, data_sha256: str, folder: Path) -> None:
    """Raises DataError, naming both checksums, where a pool was made of other data."""
    if pool.data_sha256 != data_sha256:
        raise DataError(
            f"the pool in {folder} was made of data with the checksum {pool.data_sha256}, this site's data has "
            f"{data_sha256}; restore the data, or start a new pool in another folder"
        )


def read_pool(folder: Path) -> Pool:
    """The pool as it is now. Raises DataError where there is none, or where a file is damaged or of another version."""
    base, head = _read_base(folder)
    return _replayed(base, head, folder)[0]


def change(folder: Path, transition: Callable[[Pool], Pool]) -> Pool:
    """Applies a transition to the kept pool and returns it when it is on the disk; nothing changed writes nothing.

    Processes wait for each other. An error in ``transition`` leaves the pool as it was. Raises DataError like
    `read_pool`, and where a transition takes something away.
    """
    with locked(folder / ".lock"):
        base, head = _read_base(folder)
        before, head, size_bytes = _replayed(base, head, folder)
        after = transition(before)
        facts = _facts(before, after)
        if facts:
            line = {"facts": facts, "sha256": _chained(head, facts)}
            _append(folder / JOURNAL, json.dumps(line, ensure_ascii=False).encode() + b"\n", size_bytes)
    return after


def _append(path: Path, line: bytes, at: int) -> None:
    """Writes a line at byte ``at``, over what a killed process may have left there, and flushes it to the disk."""
    with path.open("r+b") as file:
        file.truncate(at)
        file.seek(at)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _facts(before: Pool, after: Pool) -> dict[str, Any]:
    """What ``after`` knows and ``before`` did not, as JSON values; empty parts are left out."""
    kept = replace(after, given=before.given, requests=before.requests, answers=before.answers, rule=before.rule)
    grown = (
        before.given.items() <= after.given.items()
        and before.requests.items() <= after.requests.items()
        and before.answers <= after.answers
    )
    if kept != before or not grown:
        raise DataError("a pool only grows: the transition took something away, or changed its labels or samples")
    facts = {
        "given": {id: marks for id, marks in after.given.items() if id not in before.given},
        "requests": {id: item for id, item in after.requests.items() if id not in before.requests},
        "answers": sorted(after.answers - before.answers),
        "rule": after.rule if after.rule != before.rule else "",
    }
    return {name: fact for name, fact in facts.items() if fact}


def _with_facts(pool: Pool, facts: dict[str, Any]) -> Pool:
    given = {id: tuple(marks) for id, marks in facts.get("given", {}).items()}
    requests = {id: Request(cycle, Reason(*why)) for id, (cycle, why) in facts.get("requests", {}).items()}
    answers = {Answer(id, tuple(marks), reader, time) for id, marks, reader, time in facts.get("answers", ())}
    return replace(
        pool,
        given={**pool.given, **given},
        requests={**pool.requests, **requests},
        answers=pool.answers | answers,
        rule=facts.get("rule", pool.rule),
    )


def _replayed(base: Pool, head: str, folder: Path) -> tuple[Pool, str, int]:
    """The pool after every whole line, the hash of the last one, and the bytes up to its end."""
    try:
        data = (folder / JOURNAL).read_bytes()
    except OSError as error:
        raise DataError(f"{folder / JOURNAL} cannot be read ({error.strerror}); restore it from a copy") from error
    size_bytes = data.rfind(b"\n") + 1
    pool = base
    for number, text in enumerate(data[:size_bytes].splitlines(), start=1):
        try:
            line = json.loads(text)
            facts, stated = line["facts"], line["sha256"]
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{folder / JOURNAL} line {number} is damaged; restore it from a copy") from error
        head = _chained(head, facts)
        if head != stated:
            raise DataError(
                f"{folder / JOURNAL} line {number} is damaged: its checksum is {head}, the line states {stated}; "
                "restore it from a copy"
            )
        pool = _with_facts(pool, facts)
    return pool, head, size_bytes


def _chained(head: str, facts: dict[str, Any]) -> str:
    return hashlib.sha256(f"{head}\n{json.dumps(facts, ensure_ascii=False)}".encode()).hexdigest()


def _pool_bytes(pool: Pool) -> bytes:
    names = ("labels", "task", "data_sha256", "ids", "given", "rule")
    return json.dumps({"version": VERSION, **{name: getattr(pool, name) for name in names}}).encode() + b"\n"


def _read_base(folder: Path) -> tuple[Pool, str]:
    """The pool of ``pool.json`` and the hash of its bytes."""
    path = folder / POOL
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); is this the folder of a pool?") from error
    try:
        stated = json.loads(data)
        version = stated.pop("version")
        if version != VERSION:
            raise DataError(f"{path} has the version {version}, this code reads {VERSION}; use the code that wrote it")
        given = {id: tuple(marks) for id, marks in stated.pop("given").items()}
        labels, ids = tuple(stated.pop("labels")), tuple(stated.pop("ids"))
        return Pool(labels=labels, ids=ids, given=given, **stated), hashlib.sha256(data).hexdigest()
    except DataError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is damaged; restore it from a copy") from error
