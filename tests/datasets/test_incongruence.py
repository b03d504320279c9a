"""The federation builder: who loses which modality and which labels, how much of it, and nothing else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets.images import ArrayImages
from datasets.incongruence import Incongruence, apply_incongruence, assign_profiles, parse_incongruence
from datasets.mosaics import plain_table
from datasets.partition import Partition, beta_gamma, check_partition, iid, pooled_train
from datasets.records import IMAGE, REPORT, SPLITS, DataError, Manifest
from datasets.site import load_site, present_modalities
from federation.seeding import numpy_generator

LABELS = ("Edema", "Mass", "Hernia")


class CountingImages(ArrayImages):
    """Remembers which rows were opened."""

    def __init__(self, count: int) -> None:
        super().__init__(np.full((count, 4, 4), 9, np.uint8))
        self.opened: list[int] = []

    def read(self, row: int) -> np.ndarray:
        self.opened.append(row)
        return super().read(row)


def complete(count: int = 240, seed: int = 0) -> Manifest:
    """Paired samples, three of a patient, 60 % train and 20 % val and test."""
    rng = np.random.default_rng(seed)
    patients = np.arange(count) // 3
    split = np.array(["train", "train", "train", "val", "test"])[patients % 5]
    table = plain_table(split.tolist(), site="all", prefix="p").assign(
        patient=[f"patient-{number}" for number in patients],
        report=[f"report {row}" for row in range(count)],
        time=[f"2020-{row % 12 + 1:02d}-{row % 28 + 1:02d}" for row in range(count)],
    )
    targets = (rng.random((count, 3)) < 0.4).astype(np.int8)
    return Manifest(LABELS, "multilabel", table, targets, CountingImages(count), "base")


def rng_for(purpose: str) -> np.random.Generator:
    return numpy_generator(5, purpose)


def six_sites(manifest: Manifest) -> Partition:
    return iid(manifest.targets, manifest.table, np.random.default_rng(0), num_sites=6)


def rows_of(partition: Partition, site: str) -> np.ndarray:
    return np.concatenate(list(partition.sites[site].values()))


# -- profiles ---------------------------------------------------------------------------------------------------------


def test_six_sites_are_two_paired_three_image_and_one_text_by_name():
    names = [f"site-{number:02d}" for number in (5, 3, 1, 0, 2, 4)]
    assert list(assign_profiles(names).items()) == [
        ("site-00", "paired"),
        ("site-01", "paired"),
        ("site-02", "image"),
        ("site-03", "image"),
        ("site-04", "image"),
        ("site-05", "text"),
    ]


@settings(max_examples=100, deadline=None)
@given(
    num_sites=st.integers(1, 60),
    paired=st.floats(0, 50),
    image=st.floats(0, 50),
    text=st.floats(0, 50),
)
def test_a_ratio_is_met_within_one_site_or_refused(num_sites, paired, image, text):
    names = [f"s{number}" for number in range(num_sites)]
    shares = {"paired": paired, "image": image, "text": text}
    try:
        profiles = list(assign_profiles(names, **shares).values())
    except DataError as error:
        assert "leave none" in str(error) or "one of them above 0" in str(error)
        return
    assert len(profiles) == num_sites
    for profile, share in shares.items():
        assert abs(profiles.count(profile) - num_sites * share / sum(shares.values())) < 1
        assert (profiles.count(profile) > 0) == (share > 0)


def test_the_published_ratios_of_multimodal_to_unimodal_fit_eight_sites():
    names = [str(number) for number in range(8)]
    assert list(assign_profiles(names, paired=1, image=3, text=0).values()).count("paired") == 2
    assert list(assign_profiles(names, paired=3, image=1, text=0).values()).count("paired") == 6


# -- modalities -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rate=st.floats(0, 1),
    unpaired=st.sampled_from(["alternate", "drop_text", "drop_image", "split"]),
    count=st.integers(30, 120),
)
def test_the_pairing_rate_is_met_within_one_sample(seed, rate, unpaired, count):
    manifest = complete(count)
    partition = iid(manifest.targets, manifest.table, np.random.default_rng(seed), num_sites=2)
    wish = Incongruence({"site-00": "paired", "site-01": "paired"}, {"site-00": rate}, unpaired)
    _, present = apply_incongruence(manifest, partition, wish, lambda purpose: numpy_generator(seed, purpose))
    rows = rows_of(partition, "site-00")
    assert abs(present[rows].all(axis=1).mean() - rate) <= 1 / len(rows)
    for part in partition.sites["site-00"].values():
        assert not len(part) or abs(present[part].all(axis=1).mean() - rate) <= 1 / len(part)
    assert present.any(axis=1).all()  # a sample loses one modality, never both
    assert present[rows_of(partition, "site-01")].all()
    lost = ~present[rows]
    if unpaired in ("drop_text", "drop_image"):
        assert not lost[:, IMAGE if unpaired == "drop_text" else REPORT].any()
    else:
        assert abs(int(lost[:, IMAGE].sum()) - int(lost[:, REPORT].sum())) <= len(SPLITS)


def test_samples_that_lack_a_modality_already_count_as_unpaired():
    manifest = complete(100)
    report = manifest.table["report"].mask(np.arange(100) % 2 == 0, " \t")
    partition = iid(manifest.targets, manifest.table, np.random.default_rng(0), num_sites=1)
    half = dataclasses.replace(manifest, table=manifest.table.assign(report=report))
    for rate, expected in ((0.9, 50), (0.5, 50), (0.2, 20)):
        wish = Incongruence({"site-00": "paired"}, {"site-00": rate})
        _, present = apply_incongruence(half, partition, wish, rng_for)
        assert present.all(axis=1).sum() == pytest.approx(expected, abs=1)


def test_split_takes_the_image_of_the_earlier_and_the_report_of_the_later_half():
    manifest = complete()
    partition = iid(manifest.targets, manifest.table, np.random.default_rng(0), num_sites=1)
    wish = Incongruence({"site-00": "paired"}, {"site-00": 0.3}, "split")
    _, present = apply_incongruence(manifest, partition, wish, rng_for)
    times = manifest.table["time"].to_numpy(dtype=str)
    for part in partition.sites["site-00"].values():
        without_image, without_report = part[~present[part, IMAGE]], part[~present[part, REPORT]]
        assert len(without_image) and max(times[without_image]) <= min(times[without_report])


def test_a_unimodal_site_has_nothing_of_the_other_modality_and_its_files_stay_closed(tmp_path):
    manifest = complete()
    partition = six_sites(manifest)
    wish = Incongruence(assign_profiles(list(partition.sites)), {"site-00": 0.9, "site-01": 0.3})
    seen, present = apply_incongruence(manifest, partition, wish, rng_for)
    expected = {"image": (True, False), "text": (False, True)}
    for site, profile in wish.profiles.items():
        manifest.images.opened.clear()
        arguments = {"name": site, "size": 4, "channels": 1, "cache_dir": tmp_path, "reads_reports": True}
        data = load_site(seen, partition.sites[site], present=present, **arguments)
        for split, samples in data.splits.items():
            part = partition.sites[site][split]
            assert len(samples) == len(part) and np.array_equal(samples.present, present[part])
            if profile in expected:
                assert (samples.present == expected[profile]).all()
            assert (samples.images.max(axis=(1, 2, 3), initial=0) == np.where(present[part, IMAGE], 9, 0)).all()
            told = samples.reports or ("",) * len(part)
            assert [bool(text) for text in told] == present[part, REPORT].tolist()
        rows = rows_of(partition, site)
        assert sorted(manifest.images.opened) == sorted(rows[present[rows, IMAGE]])


def test_nothing_moves_the_partition_is_disjoint_complete_and_patients_stay_whole():
    manifest = complete()
    partition = beta_gamma(
        manifest.targets, manifest.table, np.random.default_rng(0), num_sites=6, beta=1, gamma=1, min_size=6
    )
    wish = Incongruence(assign_profiles(list(partition.sites)), {"site-00": 0.5}, never_reports={"site-01": ("Edema",)})
    seen, present = apply_incongruence(manifest, partition, wish, rng_for)
    check_partition(partition, seen.table)
    assert len(seen) == len(manifest) == len(present)
    kept = [column for column in seen.table.columns if column not in ("report", "label_source")]
    pd.testing.assert_frame_equal(seen.table[kept], manifest.table[kept])
    site_of_row = np.full(len(manifest), "", dtype=object)
    for site in partition.sites:
        site_of_row[rows_of(partition, site)] = site
    assert pd.Series(site_of_row).groupby(manifest.table["patient"].to_numpy()).nunique().max() == 1
    # The centralised upper bound pools the same samples, with what they lost.
    pooled = pooled_train(seen.targets, seen.table, partition)
    samples = load_site(
        seen, pooled.sites["pooled"], name="pooled", size=4, channels=1, cache_dir=None, present=present,
        reads_reports=True,
    ).splits["train"]  # fmt: skip
    assert len(samples) == (manifest.table["split"] == "train").sum()
    assert not samples.present.all(axis=0).any()


def test_what_a_site_loses_depends_on_the_seed_and_on_no_other_site():
    manifest = complete()
    partition = six_sites(manifest)
    alone = Incongruence(
        {"site-01": "paired"}, {"site-01": 0.5}, never_reports={"site-01": ("Mass",)}, never_fraction=0.5
    )
    among = dataclasses.replace(alone, profiles={**assign_profiles(list(partition.sites)), "site-01": "paired"})
    first, again, other = (
        apply_incongruence(manifest, partition, wish, lambda purpose, seed=seed: numpy_generator(seed, purpose))
        for wish, seed in ((alone, 1), (alone, 1), (alone, 2))
    )
    assert first[0].checksum == again[0].checksum and np.array_equal(first[1], again[1])
    assert len({manifest.checksum, first[0].checksum, other[0].checksum}) == 3
    together = apply_incongruence(manifest, partition, among, lambda purpose: numpy_generator(1, purpose))
    rows = rows_of(partition, "site-01")
    assert np.array_equal(together[1][rows], first[1][rows])
    assert np.array_equal(together[0].targets[rows], first[0].targets[rows])
    # A site that no wish names keeps all it had, and the source is not written to.
    assert first[1][rows_of(partition, "site-00")].all()
    assert np.array_equal(manifest.targets, complete().targets) and (manifest.table["report"] != "").all()


# -- labels -----------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), fraction=st.floats(0, 1))
def test_hidden_positives_are_training_ones_of_that_site_and_label_and_their_source_is_auto(seed, fraction):
    manifest = complete(seed=1)
    partition = six_sites(manifest)
    wish = Incongruence(
        {}, never_reports={"site-02": ("Mass", "Edema")}, never_fraction=fraction, label_sources={"site-02": "reviewed"}
    )
    seen, present = apply_incongruence(manifest, partition, wish, lambda purpose: numpy_generator(seed, purpose))
    train = partition.sites["site-02"]["train"]
    changed = np.argwhere(seen.targets != manifest.targets)
    assert set(changed[:, 0]) <= set(train) and set(changed[:, 1]) <= {0, 1}
    assert (manifest.targets[tuple(changed.T)] == 1).all() and (seen.targets[tuple(changed.T)] == 0).all()
    for label in (0, 1):
        positives = int((manifest.targets[train, label] == 1).sum())
        assert (changed[:, 1] == label).sum() == pytest.approx(fraction * positives, abs=0.5 + 1e-9)
    sources = seen.table["label_source"]
    assert (sources[np.unique(changed[:, 0])] == "auto").all()
    rest = np.setdiff1d(rows_of(partition, "site-02"), changed[:, 0])
    assert (sources[rest] == "reviewed").all()
    assert (sources[rows_of(partition, "site-03")] == "curated").all()
    for split in ("val", "test"):
        rows = (manifest.table["split"] == split).to_numpy()
        assert np.array_equal(seen.targets[rows], manifest.targets[rows])
    assert present.all()


def test_a_table_with_image_paths_shows_what_is_absent_too():
    manifest = complete(60)
    manifest = dataclasses.replace(manifest, table=manifest.table.assign(image=[f"{row}.png" for row in range(60)]))
    partition = iid(manifest.targets, manifest.table, np.random.default_rng(0), num_sites=2)
    wish = Incongruence({"site-00": "text", "site-01": "paired"}, {"site-01": 0.5})
    seen, present = apply_incongruence(manifest, partition, wish, rng_for)
    assert np.array_equal(present_modalities(seen), present)


# -- plain settings ---------------------------------------------------------------------------------------------------

NAMES = [f"site-{number:02d}" for number in range(6)]


def test_settings_are_read_as_they_are_written():
    read = parse_incongruence(
        NAMES,
        profiles="paired:2, image:3, text:1",
        pairing="0.9, 0.3",
        unpaired="drop_text",
        never_reports="site-00: Edema|Mass, site-03: Hernia",
        never_fraction=0.5,
        label_sources="site-01: auto",
    )
    assert read == Incongruence(
        assign_profiles(NAMES),
        {"site-00": 0.9, "site-01": 0.3},
        "drop_text",
        {"site-00": ("Edema", "Mass"), "site-03": ("Hernia",)},
        0.5,
        {"site-01": "auto"},
    )
    assert parse_incongruence(NAMES, profiles="paired:1,image:1", pairing="0.5").pairing == dict.fromkeys(
        NAMES[:3], 0.5
    )
    assert parse_incongruence(NAMES, profiles="") == Incongruence({})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"profiles": "paired"}, "'paired' is not name:value"),
        ({"profiles": "paired:1,paired:2"}, "a name of its own"),
        ({"profiles": "both:2"}, "'both'; use paired, image, text"),
        ({"profiles": "paired:two"}, "'two' is no number"),
        ({"profiles": "paired:-1,image:2"}, "numbers from 0 on"),
        ({"profiles": "paired:nan"}, "numbers from 0 on"),
        ({"profiles": "paired:0"}, "one of them above 0"),
        ({"profiles": "paired:100,text:1"}, r"\['text'\] are asked for but 6 sites"),
        ({"pairing": "0.9,0.3,0.1"}, "3 rates for 2 paired sites"),
        ({"pairing": "0.9,1.3"}, "pairing rate of site 'site-01' is a share from 0 to 1, got 1.3"),
        ({"pairing": "nan"}, "share from 0 to 1"),
        ({"pairing": "0.5", "profiles": "image:1"}, "1 rates for 0 paired sites"),
        ({"unpaired": "sometimes"}, "'sometimes'; use alternate"),
        ({"never_fraction": 2}, "never_fraction is a share"),
        ({"never_reports": "site-00"}, "not name:value"),
        ({"label_sources": "site-00:rumour"}, "'rumour'; use reviewed, auto, unknown"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(DataError, match=words):
        parse_incongruence(NAMES, **{"profiles": "paired:2,image:3,text:1", **changes})


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (Incongruence({"nowhere": "image"}), "no site 'nowhere'; the sites are site-00"),
        (Incongruence({}, never_reports={"site-00": ("Cough",)}), "never reports 'Cough', but the labels are"),
        (Incongruence({"site-00": "text"}), "profile 'text' but no training sample"),
    ],
)
def test_wishes_that_the_data_cannot_grant_are_refused(wish, words):
    manifest = complete()
    silent = dataclasses.replace(manifest, table=manifest.table.assign(report=" "))
    with pytest.raises(DataError, match=words):
        apply_incongruence(silent, six_sites(manifest), wish, rng_for)


def test_a_single_label_sample_keeps_its_label():
    manifest = dataclasses.replace(complete(), task="multiclass")
    with pytest.raises(DataError, match="exactly one label"):
        apply_incongruence(
            manifest, six_sites(manifest), Incongruence({}, never_reports={"site-00": ("Mass",)}), rng_for
        )
    with pytest.raises(DataError, match="is no paired site"):
        Incongruence({"a": "image"}, {"a": 0.5})
