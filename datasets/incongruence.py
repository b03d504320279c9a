"""The federation builder for sites that differ in modality: who has images, reports or both, and whose labels to trust.

It takes images, reports and labels away from a complete simulation, on top of any `datasets.partition`; it adds
nothing and moves no row, so a partition's disjointness and unsplit patients stay as they are. Each site draws from a
generator of its own, so what one site loses does not depend on the others.

Source: the project's incongruent specification, section 8, "Federation builder", steps 2 to 5.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from datasets.partition import Partition
from datasets.records import ABSENT, IMAGE, LABEL_SOURCES, PRESENT, REPORT, SPLITS, DataError, Manifest
from datasets.site import present_modalities

Profile = Literal["paired", "image", "text"]
Unpaired = Literal["alternate", "drop_text", "drop_image", "split"]
PROFILES: tuple[Profile, ...] = get_args(Profile)


@dataclass(frozen=True)
class Incongruence:
    """What each site lacks; sites are named as in the partition.

    ``profiles``: the modalities of a site; one that is not named keeps what its data has.
    ``pairing``: share of a paired site's samples that keep both modalities; 1 where it is not named.
    ``unpaired``: what the others lose: the report and the image in turn (``alternate``), always the same one
    (``drop_text``, ``drop_image``), or by time (``split``).
    ``never_reports``: labels that a site's annotation misses; ``never_fraction`` of their training positives read 0.
    ``label_sources``: where a site's labels come from, one of `LABEL_SOURCES`.

    Choice: ``split``, which the source only names, cuts the unpaired samples in the order of the column ``time``: the
    earlier half is older than the image archive and has a report only, the later half still waits for its report.

    Raises DataError for unknown words and for numbers outside [0, 1].
    """

    profiles: Mapping[str, Profile]
    pairing: Mapping[str, float] = field(default_factory=dict)
    unpaired: Unpaired = "alternate"
    never_reports: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    never_fraction: float = 1.0
    label_sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for site, profile in self.profiles.items():
            _one_of(f"the profile of site {site!r}", profile, PROFILES)
        for site, rate in self.pairing.items():
            if self.profiles.get(site) != "paired":
                raise DataError(f"site {site!r} has a pairing rate but is no paired site; leave the rate out")
            _share(f"the pairing rate of site {site!r}", rate)
        for site, source in self.label_sources.items():
            _one_of(f"the label source of site {site!r}", source, LABEL_SOURCES)
        _one_of("unpaired", self.unpaired, get_args(Unpaired))
        _share("never_fraction", self.never_fraction)


def assign_profiles(
    names: Sequence[str], *, paired: float = 2, image: float = 3, text: float = 1
) -> dict[str, Profile]:
    """The profile of each site: the first of the sorted names are paired, the next image, the last text.

    The numbers are counts where they add up to the sites there are, else a ratio, rounded by largest remainder (ties
    in the order above). The defaults are the specification's six sites. Raises DataError for a ratio that leaves a
    profile asked for without a site.

    >>> assign_profiles(["c", "a", "b", "d"], paired=1, image=3, text=0)
    {'a': 'paired', 'b': 'image', 'c': 'image', 'd': 'image'}
    """
    shares = np.array([paired, image, text], dtype=np.float64)
    if not np.isfinite(shares).all() or shares.min() < 0 or shares.sum() == 0:
        raise DataError(f"profiles are numbers from 0 on, one of them above 0; got {paired}, {image} and {text}")
    exact = len(names) * shares / shares.sum()
    counts = np.floor(exact + 1e-9).astype(np.int64)
    rest = len(names) - counts.sum()
    counts[np.argsort(counts - exact, kind="stable")[:rest]] += 1
    if empty := [
        profile for profile, share, count in zip(PROFILES, shares, counts, strict=True) if share and not count
    ]:
        raise DataError(
            f"the profiles {empty} are asked for but {len(names)} sites leave none for them; use more sites or "
            "other numbers"
        )
    return dict(zip(sorted(names), np.repeat(PROFILES, counts).tolist(), strict=True))


def apply_incongruence(
    manifest: Manifest,
    partition: Partition,
    incongruence: Incongruence,
    rng_for: Callable[[str], np.random.Generator],
) -> tuple[Manifest, np.ndarray]:
    """The manifest as its sites see it, and which row has an image and which a report, ``(n, 2) bool``.

    Reports that are absent are "" in the new manifest; an absent image shows in the mask, and as an empty path where
    the table has the column ``image``. Targets, label sources and the checksum change too, in copies.
    ``rng_for`` maps a purpose to a seeded generator; the purposes are "pairing/SITE" and "never_reports/SITE".

    A paired site keeps round(r n) pairs of its n samples where the data has as many, in each split in proportion: the
    rate is met within 1/n in each split and over the site. A unimodal site has nothing of the other modality.

    Choice: val and test lose modalities like train, since the hospital that lacks them lacks them there too; labels
    are hidden in train only. Single samples lose a modality, not whole studies, so that the rate is met.
    Choice: a sample with a hidden positive has the label source auto, whatever its site's is.

    Raises DataError for sites and labels that do not exist, and for a site that is left without a training sample.
    """
    named = {*incongruence.profiles, *incongruence.never_reports, *incongruence.label_sources}
    if strange := sorted(named - set(partition.sites)):
        raise DataError(f"there is no site {strange[0]!r}; the sites are {', '.join(sorted(partition.sites))}")
    present, targets = present_modalities(manifest), manifest.targets.copy()
    sources = manifest.table["label_source"].to_numpy(dtype=object, copy=True)
    times = manifest.table["time"].to_numpy(dtype=str)
    for site in sorted(partition.sites):
        rows = partition.sites[site]
        together = np.concatenate([rows[split] for split in SPLITS])
        had_samples = present[rows["train"]].any()
        profile = incongruence.profiles.get(site)
        if profile == "image":
            present[together, REPORT] = False
        elif profile == "text":
            present[together, IMAGE] = False
        elif profile == "paired":
            rate = incongruence.pairing.get(site, 1.0)
            _unpair(present, [rows[split] for split in SPLITS], rate, incongruence.unpaired, times, rng_for, site)
        if had_samples and not present[rows["train"]].any():
            raise DataError(
                f"site {site!r} has the profile {profile!r} but no training sample with that modality; give it "
                "another profile"
            )
        if site in incongruence.label_sources:
            sources[together] = incongruence.label_sources[site]
        hidden = _hidden_positives(manifest, rows["train"], incongruence, rng_for, site)
        targets[hidden[:, 0], hidden[:, 1]] = ABSENT
        sources[hidden[:, 0]] = "auto"

    table = manifest.table.assign(label_source=sources, report=manifest.table["report"].where(present[:, REPORT], ""))
    if "image" in table.columns:
        table["image"] = table["image"].where(present[:, IMAGE], "")
    checksum = _checksum(manifest.checksum, present, targets, sources)
    return replace(manifest, table=table, targets=targets, checksum=checksum), present


def parse_incongruence(
    names: Sequence[str],
    *,
    profiles: str,
    pairing: str = "",
    unpaired: Unpaired = "alternate",
    never_reports: str = "",
    never_fraction: float = 1.0,
    label_sources: str = "",
) -> Incongruence:
    """An `Incongruence` out of plain settings, for the sites ``names``; an empty text asks for nothing.

    ``profiles``: "paired:2,image:3,text:1", see `assign_profiles`. ``pairing``: "0.9,0.3", one rate for each paired
    site in the order of their names, or one for all. ``never_reports``: "site-00:Edema|Mass,site-03:Hernia".
    ``label_sources``: "site-00:reviewed,site-01:auto". Raises DataError for what cannot be read.
    """
    shares = {profile: _number("profiles", text) for profile, text in _pairs("profiles", profiles).items()}
    for profile in shares:
        _one_of("profiles", profile, PROFILES)
    by_site = assign_profiles(names, **{profile: shares.get(profile, 0) for profile in PROFILES}) if shares else {}
    paired = sorted(site for site, profile in by_site.items() if profile == "paired")
    rates = [_number("pairing", text) for text in pairing.split(",") if text.strip()]
    if len(rates) not in {0, 1, len(paired)} or (rates and not paired):
        raise DataError(
            f"pairing = {pairing!r} has {len(rates)} rates for {len(paired)} paired sites; give one for each"
        )
    missed = _pairs("never_reports", never_reports)
    return Incongruence(
        by_site,
        dict(zip(paired, rates * len(paired) if len(rates) == 1 else rates, strict=True)) if rates else {},
        unpaired,
        {site: tuple(label.strip() for label in text.split("|") if label.strip()) for site, text in missed.items()},
        never_fraction,
        _pairs("label_sources", label_sources),
    )


def _unpair(
    present: np.ndarray,
    parts: Sequence[np.ndarray],
    rate: float,
    unpaired: Unpaired,
    times: np.ndarray,
    rng_for: Callable[[str], np.random.Generator],
    site: str,
) -> None:
    """Takes, in place, one modality from a drawn part of each split's pairs.

    The pairs to keep are the steps of the rounded running total, so that the splits' roundings do not add up.
    """
    rng = rng_for(f"pairing/{site}")
    sizes = [present[part].any(axis=1).sum() for part in parts]
    kept = np.diff(np.rint(rate * np.cumsum(sizes)).astype(np.int64), prepend=0)
    for part, keep in zip(parts, kept, strict=True):
        pairs = part[present[part].all(axis=1)]
        lonely = rng.permutation(pairs)[: max(0, len(pairs) - keep)]
        if unpaired == "alternate":
            lost = np.where(np.arange(len(lonely)) % 2 == 0, REPORT, IMAGE)
        elif unpaired == "split":
            lonely = lonely[np.lexsort((lonely, times[lonely]))]
            lost = np.where(np.arange(len(lonely)) < len(lonely) // 2, IMAGE, REPORT)
        else:
            lost = np.full(len(lonely), REPORT if unpaired == "drop_text" else IMAGE)
        present[lonely, lost] = False


def _hidden_positives(
    manifest: Manifest,
    rows: np.ndarray,
    incongruence: Incongruence,
    rng_for: Callable[[str], np.random.Generator],
    site: str,
) -> np.ndarray:
    """Pairs (row, label) ``(m, 2) int64`` of the training positives that a site's annotation misses."""
    missed = incongruence.never_reports.get(site, ())
    if strange := [label for label in missed if label not in manifest.labels]:
        raise DataError(f"site {site!r} never reports {strange[0]!r}, but the labels are {list(manifest.labels)}")
    if missed and manifest.task == "multiclass":
        raise DataError(f"site {site!r} cannot leave {missed[0]!r} unreported: each sample has exactly one label here")
    hidden = [np.empty((0, 2), dtype=np.int64)]
    rng = rng_for(f"never_reports/{site}")
    for label in sorted(manifest.labels.index(name) for name in set(missed)):
        positives = rows[manifest.targets[rows, label] == PRESENT]
        drawn = rng.permutation(positives)[: round(incongruence.never_fraction * len(positives))]
        hidden.append(np.column_stack([drawn, np.full(len(drawn), label)]))
    return np.concatenate(hidden)


def _checksum(before: str, present: np.ndarray, targets: np.ndarray, sources: np.ndarray) -> str:
    digest = hashlib.sha256(before.encode())
    digest.update(np.packbits(present).tobytes())
    digest.update(np.ascontiguousarray(targets, dtype=np.int8).tobytes())
    digest.update("\x1f".join(sources).encode())
    return digest.hexdigest()


def _pairs(name: str, text: str) -> dict[str, str]:
    """ "a:1,b:2" as a mapping; raises DataError for an entry without a colon or value, and for a name twice."""
    read: dict[str, str] = {}
    for entry in text.split(","):
        key, colon, value = (part.strip() for part in entry.partition(":"))
        if not entry.strip():
            continue
        if not (key and colon and value) or key in read:
            raise DataError(f"{name} = {text!r}: {entry.strip()!r} is not name:value with a name of its own")
        read[key] = value
    return read


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise DataError(f"{name}: {text.strip()!r} is no number") from error


def _share(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise DataError(f"{name} is a share from 0 to 1, got {value}")


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise DataError(f"{name} is {value!r}; use {', '.join(known)}")
