"""Synthetic text for mosaics: report-like sentences that say, incompletely, what a mosaic shows and where.

Nothing here is a real report. The sentences stand in where a demo or a test needs image and text pairs offline (the
synthetic generator of the project's incongruent specification, section 8). They have what makes real reports hard for
a label: synonyms, findings that go unmentioned, negations, no fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from datasets.mosaics import CELLS, EMPTY, TILE_COLUMNS, manifest_checksum
from datasets.records import PRESENT, DataError, Manifest

DIGIT_WORDS = {
    str(digit): (str(digit), word, f"digit {word}")
    for digit, word in enumerate(("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"))
}
PLACES = (  # row by row, as the cells of a mosaic
    ("upper left", "top left"),
    ("upper right", "top right"),
    ("lower left", "bottom left"),
    ("lower right", "bottom right"),
)
FINDINGS = ("there is a {word} in the {place}", "{word} {place}", "a {word} is seen {place}", "{place} shows a {word}")
NEGATIONS = ("no {word} seen", "there is no {word}", "{word} is absent", "without evidence of a {word}")
NOTHING = "image reviewed"
KIND = "synthetic"


def mosaic_sentences(
    labels: Sequence[str],
    cells: np.ndarray,
    rng: np.random.Generator,
    *,
    omission: float = 0.2,
    negation: float = 0.15,
    words: Mapping[str, Sequence[str]] = DIGIT_WORDS,
) -> list[str]:
    """Synthetic text for each mosaic of ``cells (n, 4) int`` (label number of each cell's tile, -1 = empty).

    A present label is left unmentioned with probability ``omission``, else named once with the place of each of its
    tiles; an absent label is denied with probability ``negation``. Sentences stand in random order, each label under
    one of its ``words`` (a label without words: its name). Where nothing is said the text is "Image reviewed.".

    Choice: a mention is never false, and a label that is present is never denied; a report's errors are omissions.
    Raises DataError for probabilities outside [0, 1] and cells that are no label.
    """
    for name, value in (("omission", omission), ("negation", negation)):
        if not 0 <= value <= 1:
            raise DataError(f"{name} is a probability from 0 to 1, got {value}")
    if cells.ndim != 2 or cells.shape[1] != CELLS or np.any((cells < EMPTY) | (cells >= len(labels))):
        raise DataError(f"cells are (n, {CELLS}) label numbers from 0 to {len(labels) - 1} or -1, got {cells.shape}")
    shape = (len(cells), len(labels))
    shows = (cells[:, :, None] == np.arange(len(labels))).any(axis=1)  # (n, C)
    is_said = rng.random(shape) >= np.where(shows, omission, 1 - negation)
    word_draw, form_draw, order_draw = rng.random((3, *shape))
    place_draw = rng.random(cells.shape)
    texts = []
    for row in range(len(cells)):
        said = np.flatnonzero(is_said[row])
        sentences = []
        for label in said[np.argsort(order_draw[row, said], kind="stable")]:
            word = _pick(words.get(labels[label], (labels[label],)), word_draw[row, label])
            tiles = np.flatnonzero(cells[row] == label)
            place = " and ".join(_pick(PLACES[cell], place_draw[row, cell]) for cell in tiles)
            form = _pick(FINDINGS if len(tiles) else NEGATIONS, form_draw[row, label])
            sentences.append(form.format(word=word, place=place))
        texts.append(" ".join(f"{text[0].upper()}{text[1:]}." for text in sentences or [NOTHING]))
    return texts


def with_sentences(mosaics: Manifest, source: Manifest, rng: np.random.Generator, *, omission: float = 0.2) -> Manifest:
    """``mosaics`` with a synthetic report in every row; ``source`` is the single-label manifest they were laid from.

    The column ``text_kind`` says "synthetic". Images and targets are the same; the checksum is another.
    """
    tiles = mosaics.table[list(TILE_COLUMNS)].to_numpy()
    classes = (source.targets == PRESENT).argmax(axis=1)
    cells = np.where(tiles == EMPTY, EMPTY, classes[tiles])
    reports = mosaic_sentences(mosaics.labels, cells, rng, omission=omission)
    table = mosaics.table.assign(report=reports, text_kind=KIND)
    checksum = manifest_checksum(mosaics.labels, table, mosaics.targets, mosaics.images)
    return replace(mosaics, table=table, checksum=checksum)


def _pick(choices: Sequence[str], draw: float) -> str:
    """One of ``choices`` by a uniform draw from [0, 1)."""
    return choices[int(draw * len(choices))]
