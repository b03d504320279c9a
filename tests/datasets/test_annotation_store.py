"""The pool on disk: whatever is killed or damaged, what was confirmed is there, and nothing else is believed."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from datasets import annotation_store
from datasets.annotation_pool import Answer, Reason, new_pool, oracle, receive, request, utc
from datasets.annotation_store import JOURNAL, POOL, change, check_data, open_pool, read_pool
from datasets.records import DataError

BLANK = new_pool(
    ("cat", "dog"), "multilabel", "sum-1", [f"örtlich/{n}.png" for n in range(6)], {"örtlich/0.png": (1, 0)}
)
IDS = BLANK.ids
NOON = utc("2026-01-01T12:00:00Z")
STEPS = (
    lambda pool: request(pool, IDS[1:3], 1, [Reason('uncertain,\n"dog"', "dog", 1 / 3), Reason("random")]),
    lambda pool: receive(pool, [Answer(IDS[1], (1, -1), "ann", NOON), Answer(IDS[1], (0, 1), "bo", NOON)], "agree"),
    lambda pool: request(pool, IDS[3:5], 2, [Reason("far from all")] * 2),
    lambda pool: oracle(pool, IDS[3:4], np.array([[0, -1]])),
    lambda pool: receive(pool, [Answer(IDS[1], (1, 1), "cy", NOON)], "agree"),
)


def histories():
    """The pool before and after every step."""
    pools = [BLANK]
    for step in STEPS:
        pools.append(step(pools[-1]))
    return pools


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "state" / "pool"
    open_pool(home, BLANK)
    for step in STEPS:
        change(home, step)
    return home


def test_a_restarted_site_finds_the_pool_as_it_was(folder):
    pool = read_pool(folder)
    assert pool == histories()[-1] == open_pool(folder, BLANK)
    assert pool.labelled == {IDS[0]: (1, 0), IDS[1]: (1, 1), IDS[3]: (0, -1)} and pool.pending == (IDS[2], IDS[4])
    assert pool.requests[IDS[1]].reason == Reason('uncertain,\n"dog"', "dog", 1 / 3)


def test_files_are_private(folder):
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_journal_cut_at_any_byte_is_the_pool_before_the_change_that_was_cut(folder):
    data, pools = (folder / JOURNAL).read_bytes(), histories()
    for size_bytes in range(len(data) + 1):
        (folder / JOURNAL).write_bytes(data[:size_bytes])
        assert read_pool(folder) == pools[data[:size_bytes].count(b"\n")]


def test_a_change_after_a_kill_replaces_the_cut_line(folder):
    data = (folder / JOURNAL).read_bytes()
    ends = [0, *(at + 1 for at, byte in enumerate(data) if byte == ord("\n"))]
    for step, (start, end) in enumerate(itertools.pairwise(ends)):
        for size_bytes in (start, start + 1, (start + end) // 2, end - 1):
            (folder / JOURNAL).write_bytes(data[:size_bytes])
            for again in STEPS[step:]:
                change(folder, again)
            assert (folder / JOURNAL).read_bytes() == data


def test_a_change_that_could_not_be_flushed_may_be_repeated(folder, monkeypatch):
    late = Answer(IDS[4], (0, 0), "ann", NOON)

    def fail(_):
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        change(folder, lambda pool: receive(pool, [late], "last"))
    monkeypatch.undo()
    assert late in change(folder, lambda pool: receive(pool, [late], "last")).answers
    assert read_pool(folder).labelled[IDS[4]] == (0, 0)


def test_the_same_answers_again_write_nothing(folder):
    before = (folder / JOURNAL).read_bytes()
    for step in (STEPS[0], STEPS[1], STEPS[4]):
        change(folder, step)
    assert (folder / JOURNAL).read_bytes() == before


def test_an_error_in_a_transition_leaves_the_pool(folder):
    with pytest.raises(DataError, match="not in the pool"):
        change(folder, lambda pool: request(pool, ["nobody"], 3, [Reason("x")]))
    assert read_pool(folder) == histories()[-1]


def test_a_pool_never_shrinks(folder):
    for smaller in (histories()[2], BLANK, new_pool(("cow",), "multilabel", "sum-1", ["a"])):
        with pytest.raises(DataError, match="only grows"):
            change(folder, lambda pool, smaller=smaller: smaller)
    assert read_pool(folder) == histories()[-1]


def test_a_changed_byte_in_a_confirmed_line_is_an_error(folder):
    data = (folder / JOURNAL).read_bytes()
    for at, byte in ((data.index(b"ann"), b"x"), (2, b"}"), (data.index(b'"sha256": "') + 11, b"-"), (5, b"\xff")):
        (folder / JOURNAL).write_bytes(data[:at] + byte + data[at + 1 :])
        with pytest.raises(DataError, match=r"journal\.jsonl line \d is damaged"):
            read_pool(folder)
    lines = data.splitlines(keepends=True)
    (folder / JOURNAL).write_bytes(b"".join(lines[:1] + lines[2:]))
    with pytest.raises(DataError, match="line 2 is damaged"):
        read_pool(folder)


def test_a_lost_file_is_an_error_and_never_an_empty_pool(folder):
    kept = (folder / POOL).read_bytes()
    (folder / POOL).unlink()
    with pytest.raises(DataError, match=r"no pool\.json; restore it"):
        open_pool(folder, BLANK)
    (folder / POOL).write_bytes(kept)
    (folder / JOURNAL).unlink()
    with pytest.raises(DataError, match="restore it from a copy"):
        open_pool(folder, BLANK)


def test_a_site_killed_while_it_made_the_pool_makes_it_again(tmp_path, monkeypatch):
    def killed(path, data, mode=0o600):
        if path.name == POOL:
            raise KeyboardInterrupt
        path.write_bytes(data)

    monkeypatch.setattr(annotation_store, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        open_pool(tmp_path, BLANK)
    monkeypatch.undo()
    assert open_pool(tmp_path, BLANK) == BLANK


def test_another_checksum_is_refused_with_both_values(folder):
    other = new_pool(BLANK.labels, "multilabel", "sum-2", IDS, BLANK.given)
    with pytest.raises(DataError, match=r"checksum sum-1, this site's data has sum-2"):
        open_pool(folder, other)
    with pytest.raises(DataError, match=r"sum-1.*sum-2"):
        check_data(read_pool(folder), "sum-2", folder)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (new_pool(("cat", "cow"), "multilabel", "sum-1", IDS), r"other labels .*'dog'.*'cow'"),
        (new_pool(("cat", "dog"), "multiclass", "sum-1", IDS), "other task .*multilabel, now multiclass"),
        (new_pool(("cat", "dog"), "multilabel", "sum-1", IDS[1:]), "other ids"),
        (new_pool(("cat", "dog"), "multilabel", "sum-1", IDS), "other given"),
    ],
)
def test_a_pool_of_another_site_is_refused(folder, other, message):
    with pytest.raises(DataError, match=message):
        open_pool(folder, other)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "damaged"),
        (b"[]", "damaged"),
        (b'{"version": 1}', "damaged"),
        (b'{"version": 2}', "has the version 2, this code reads 1"),
    ],
)
def test_a_pool_file_that_cannot_be_read_is_an_error(folder, data, message):
    (folder / POOL).write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_pool(folder)


def test_an_empty_folder_is_no_pool(tmp_path):
    with pytest.raises(DataError, match="is this the folder of a pool"):
        read_pool(tmp_path)
    with pytest.raises(DataError, match="is this the folder of a pool"):
        change(tmp_path / "nowhere", lambda pool: pool)
