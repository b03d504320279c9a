"""What `incongruent` reads of a site's samples: which modalities, tokens, label sources. Report text is read here only.

The tokens of a report go into the site's own text encoder and nowhere else. Profiles are those of the project's
incongruent specification, section 2.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from client_app.site import Site, site_logger
from client_app.training import load_batch
from datasets.records import IMAGE, REPORT, SiteData, Split
from datasets.site import class_counts, hidden_labels, is_small
from datasets.transforms import Normalisation, to_input
from federation.cooccurrence import PAIR_COUNTS, absent_label_counts
from federation.settings import Settings
from models.incongruent_asymmetric import SOURCE_SMOOTHING, SOURCE_TRUST, SOURCES
from models.incongruent_exchange import TEXT, VISION
from models.text import Tokenizer, build_tokenizer

EMPTY_REPORT = "."
"""What zero-filling puts in place of a report: something for the encoder to read that says nothing."""


def modality_mask(split: Split, options) -> np.ndarray:
    """Which samples have an image and which a report, ``(n, 2) bool``, as far as this run uses them."""
    if split.present is not None:
        present = split.present.copy()
    else:
        told = [bool(report.strip()) for report in split.reports] or [False] * len(split)
        present = np.column_stack([np.ones(len(split), bool), np.array(told, bool)])
    if options.modality == "image":
        present[:, REPORT] = False
    elif options.modality == "text":
        present[:, IMAGE] = False
    return present


def learnable(split: Split, settings: Settings) -> np.ndarray:
    """Rows with a known label and a modality that this run uses, ``(n,) int64``."""
    known = (split.targets >= 0).any(axis=1)
    return np.flatnonzero(known & modality_mask(split, settings.options).any(axis=1))


def modalities(data: SiteData, settings: Settings) -> list[str]:
    """The modalities of the training samples (of all samples at a site that only evaluates), in the card's words."""
    splits = [data.splits["train"]] if len(data.splits["train"]) else list(data.splits.values())
    found = np.concatenate([modality_mask(split, settings.options) for split in splits]).any(axis=0)
    return [name for name, there in (("image", found[IMAGE]), ("report", found[REPORT])) if there]


@functools.lru_cache(maxsize=2)
def tokenizer(folder: str, vocab_size: int) -> Tokenizer:
    """The run's tokeniser, made once a process."""
    return build_tokenizer(folder, vocab_size=vocab_size)


@dataclass(frozen=True)
class Samples:
    """One split as the network takes it. With ``zero_fill`` what is absent is a black image or an empty report."""

    split: Split
    normalise: Normalisation
    there: Tensor  # (n, 2) bool: what is really there
    present: Tensor  # (n, 2) bool: what the network is given in training
    tokens: Tensor | None  # (n, L) int64
    blank: Tensor | None  # (L,) int64: the empty report of zero-filling, None without it
    sources: Tensor  # (n,) int64, positions in SOURCES
    studies: Tensor  # (n,) int64
    patients: Tensor  # (n,) int64

    def load(self, rows: np.ndarray, augment: str, draws: torch.Generator) -> tuple[Tensor, Tensor | None, Tensor]:
        """Rows, images ``(B, ch, H, W)`` (None where no row has one) and targets ``(B, C)`` of a batch."""
        images, targets = load_batch(self.split, rows, augment, draws, self.normalise)
        index = torch.from_numpy(rows)
        return index, images if self.present[index, IMAGE].any() else None, targets

    def seen(self, rows: Tensor, images: Tensor, shown: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Images, tokens and presence of samples of which only ``shown (B, 2) bool`` is let through.

        What is not shown is absent; with zero-filling it is blank, as the network was trained.
        """
        tokens = self.tokens_of(rows)
        if self.blank is None or tokens is None:
            return images, tokens, shown
        black = to_input(torch.zeros(1, 1, 1, images.shape[1], dtype=torch.uint8), normalise=self.normalise)
        hidden = ~shown.to(images.device)
        images = torch.where(hidden[:, IMAGE, None, None, None], black.to(images.device), images)
        return images, torch.where(shown[:, REPORT, None], tokens, self.blank), torch.ones_like(shown)

    def tokens_of(self, rows: Tensor) -> Tensor | None:
        """Tokens ``(B, L) int64`` of rows; None at a site without a text encoder."""
        return None if self.tokens is None else self.tokens[rows]


def read_samples(split: Split, settings: Settings, modules: Collection[str]) -> Samples:
    """A split's inputs as far as a network with these modules takes them; reports are tokenised once."""
    options = settings.options
    there, tokens, blank = torch.from_numpy(modality_mask(split, options)), None, None
    there[:, IMAGE] &= VISION in modules
    if TEXT in modules:
        reports = list(split.reports) or [""] * len(split)
        zero_fill = options.agg_mode == "zero_fill"
        if zero_fill:
            reports = [report if told else EMPTY_REPORT for report, told in zip(reports, there[:, REPORT], strict=True)]
        tokens = tokenizer(options.text_dir, options.vocab_size)([*reports, EMPTY_REPORT]).ids
        tokens, blank = tokens[:-1], tokens[-1] if zero_fill else None
        there[:, REPORT] &= (tokens != 0).any(dim=1)
    else:
        there[:, REPORT] = False
    present = there.clone() if blank is None else torch.ones_like(there)
    count = len(split)
    codes = np.arange(count) if split.studies is None else split.studies
    patients = np.arange(count) if split.patients is None else split.patients
    names = np.full(count, "unknown") if split.sources is None else split.sources
    sources = np.array([SOURCES.index(name) for name in names], dtype=np.int64)
    return Samples(
        split,
        settings.model.normalise,
        there,
        present,
        tokens,
        blank,
        *(torch.from_numpy(np.asarray(part, np.int64)) for part in (sources, codes, patients)),
    )


def trust_of(sources: Tensor, options) -> Tensor:
    """Confidence in the labels of samples by their source ``(B,) float32``; 1 where the run does not weigh them."""
    table = torch.tensor([SOURCE_TRUST[name] if options.trust else 1.0 for name in SOURCES])
    return table[sources]


def smoothing_of(sources: Tensor, options) -> tuple[Tensor, Tensor]:
    """(eps_pos, eps_neg) of samples by their label source, each ``(B,) float32``."""
    table = torch.tensor([SOURCE_SMOOTHING[name] if options.trust else (0.0, 0.0) for name in SOURCES])
    return table[sources].unbind(dim=1)


def card_numbers(site: Site, settings: Settings) -> Mapping[str, int | list[int]]:
    """What the card says of modalities: counts by modality and positives of every two labels, small cells hidden.

    Of a label that the card tells no count of, no pair is told either: its pair with itself is its positives.
    """
    split, options = site.data.splits["train"], settings.options
    rows = learnable(split, settings)
    present, positive = modality_mask(split, options)[rows], (split.targets[rows] == 1).astype(np.int64)
    pairs = positive.T @ positive
    least = settings.privacy.min_cell
    hidden = hidden_labels(class_counts(split.targets[rows]), least, site.data.task)
    shown = np.where(is_small(pairs, least) | hidden[:, None] | hidden, -1, pairs)
    reads = bool(present[:, REPORT].any())
    sha256 = tokenizer(options.text_dir, options.vocab_size).sha256 if reads else "0"
    if reads:
        _log_truncated(site, settings)
    return {
        "images": int(present[:, IMAGE].sum()),
        "reports": int(present[:, REPORT].sum()),
        "pairs": int(present.all(axis=1).sum()),
        "pair_counts": [int(value) for value in shown.ravel()],
        "tokenizer": int(sha256[:15], 16),
    }


def _log_truncated(site: Site, settings: Settings) -> None:
    """A line in the site's log for every split with reports that are longer than the text encoder reads."""
    read = tokenizer(settings.options.text_dir, settings.options.vocab_size)
    for name, split in site.data.splits.items():
        if cut := read(split.reports).truncated:
            site_logger(site.folder).warning(
                "%s: %s of %s reports are longer than the text encoder reads and were cut", name, cut, len(split)
            )


def cooccurrence_numbers(
    called: np.ndarray, targets: np.ndarray, task: str, settings: Settings
) -> Mapping[str, list[int]]:
    """`absent_label_counts` of an evaluated split, ``called (n, C) bool`` and ``targets (n, C)``, small cells hidden.

    Of an ordered pair all four counts are told or none. None where one of them is small, or a count that follows from
    them and the scores' histograms: samples with both labels, with j alone, and those that were not called. None of a
    label of which `hidden_labels` tells no count. What is left is not a fair sample of pairs: those with few false
    positives are hidden first.
    """
    counts, least = absent_label_counts(called, targets), settings.privacy.min_cell
    present, present_called, absent, absent_called = counts
    positive = (targets == 1).astype(np.int64)
    follow = [present.T, positive.T @ positive, present - present_called, absent - absent_called]
    label = hidden_labels(class_counts(targets), least, task)
    hidden = is_small(np.stack([*counts, *follow]), least).any(axis=0) | label[:, None] | label
    return {name: np.where(hidden, -1, part).ravel().tolist() for name, part in zip(PAIR_COUNTS, counts, strict=True)}
