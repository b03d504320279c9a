"""Synthetic reports of mosaics: what they say is true, what they leave out is as often as asked, all from a seed."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets.catalogue import open_manifest
from datasets.mosaics import EMPTY, TILE_COLUMNS
from datasets.records import DataError
from datasets.sentences import DIGIT_WORDS, PLACES, mosaic_sentences
from federation.seeding import numpy_generator

LABELS = tuple(DIGIT_WORDS)
DENIED = re.compile(r"\b(no|absent|without)\b")


def mentions(text: str) -> tuple[set[int], set[int]]:
    """Labels that a text affirms and denies, read sentence by sentence with the words there are."""
    affirmed, denied = set(), set()
    for sentence in text.lower().rstrip(".").split(". "):
        for label, words in enumerate(DIGIT_WORDS.values()):
            if any(re.search(rf"\b{word}\b", sentence) for word in words):
                (denied if DENIED.search(sentence) else affirmed).add(label)
    return affirmed, denied


def some_cells(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(EMPTY, len(LABELS), (count, 4))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), omission=st.floats(0, 1), negation=st.floats(0, 1))
def test_a_mention_is_true_and_a_denied_label_absent(seed, omission, negation):
    cells = some_cells(seed, 12)
    texts = mosaic_sentences(LABELS, cells, np.random.default_rng(seed), omission=omission, negation=negation)
    for text, row in zip(texts, cells, strict=True):
        affirmed, denied = mentions(text)
        shown = set(row[row != EMPTY])
        assert affirmed <= shown and not denied & shown and text.strip()


def test_a_label_stands_with_the_place_of_each_of_its_tiles():
    cells = np.array([[7, EMPTY, EMPTY, 7], [EMPTY, 3, EMPTY, EMPTY]])
    for seed in range(20):
        both, one = mosaic_sentences(LABELS, cells, np.random.default_rng(seed), omission=0, negation=0)
        assert [any(place in both.lower() for place in names) for names in PLACES] == [True, False, False, True]
        assert [any(place in one.lower() for place in names) for names in PLACES] == [False, True, False, False]


def test_present_labels_go_unmentioned_and_absent_ones_are_denied_as_often_as_asked():
    cells = some_cells(0, 4000)
    texts = mosaic_sentences(LABELS, cells, np.random.default_rng(1), omission=0.3, negation=0.1)
    shown = (cells[:, :, None] == np.arange(10)).any(axis=1)
    read = [mentions(text) for text in texts]
    affirmed = np.array([[label in said for label in range(10)] for said, _ in read])
    denied = np.array([[label in said for label in range(10)] for _, said in read])
    # about 13,000 present and 27,000 absent labels: four sigmas are 0.016 and 0.007
    assert affirmed[shown].mean() == pytest.approx(0.7, abs=0.016)
    assert denied[~shown].mean() == pytest.approx(0.1, abs=0.007)


def test_nothing_to_say_is_still_a_report():
    silent = mosaic_sentences(LABELS, some_cells(0, 5), np.random.default_rng(0), omission=1, negation=0)
    assert set(silent) == {"Image reviewed."}
    assert mosaic_sentences(LABELS, some_cells(0, 0), np.random.default_rng(0)) == []


def test_a_label_without_words_goes_by_its_name():
    (text,) = mosaic_sentences(
        ("mast {cell}", "other"), np.array([[0, -1, -1, -1]]), np.random.default_rng(0), omission=0, negation=0
    )
    assert "mast {cell}" in text.lower()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"omission": 1.5}, "omission is a probability"),
        ({"negation": float("nan")}, "negation is a probability"),
        ({"cells": np.array([[10, 0, 0, 0]])}, "label numbers from 0 to 9"),
        ({"cells": np.zeros((2, 3), int)}, r"got \(2, 3\)"),
    ],
)
def test_what_makes_no_text_is_refused(arguments, words):
    cells = arguments.pop("cells", np.zeros((1, 4), int))
    with pytest.raises(DataError, match=words):
        mosaic_sentences(LABELS, cells, np.random.default_rng(0), **arguments)


@pytest.fixture(scope="module")
def opened():
    def open_seeded(root, seed=1, **changes):
        counts = {"train": 60, "val": 20, "test": 20}
        return open_manifest(
            root, rng_for=lambda purpose: numpy_generator(seed, purpose), mosaics_per_split=counts, **changes
        )

    return open_seeded


def test_digits_reports_are_the_digits_mosaics_with_a_true_report_each(opened):
    told, silent = opened("digits-reports"), opened("digits-mosaic")
    assert np.array_equal(told.targets, silent.targets)
    assert np.array_equal(told.table[list(TILE_COLUMNS)], silent.table[list(TILE_COLUMNS)])
    assert told.images.checksum == silent.images.checksum and told.checksum != silent.checksum
    assert set(told.table["text_kind"]) == {"synthetic"} and (silent.table["report"] == "").all()
    for text, target in zip(told.table["report"], told.targets, strict=True):
        affirmed, denied = mentions(text)
        assert affirmed <= set(np.flatnonzero(target)) and not denied & set(np.flatnonzero(target))


def test_reports_follow_their_seed_and_the_label_order(opened):
    assert opened("digits-reports").checksum == opened("digits-reports").checksum
    assert opened("digits-reports").checksum != opened("digits-reports", seed=2).checksum
    backwards = opened("digits-reports", labels=LABELS[::-1])
    for text, target in zip(backwards.table["report"], backwards.targets, strict=True):
        assert {9 - label for label in mentions(text)[0]} <= set(np.flatnonzero(target))
