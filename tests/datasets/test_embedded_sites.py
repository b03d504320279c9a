"""The digits in hospitals' folders: everything is there once, and each folder stands alone."""

from __future__ import annotations

import numpy as np

from datasets.embedded import digits
from datasets.embedded_sites import write_digit_sites
from datasets.manifest import read_manifest


def test_every_digit_is_at_one_site_with_its_split_and_label(tmp_path):
    write_digit_sites(tmp_path, ("north", "south", "west"))
    whole = digits()
    rows = {patient: row for row, patient in enumerate(whole.table["patient"])}
    seen = []
    for site in ("north", "south", "west"):
        own = read_manifest(tmp_path / site, labels=whole.labels)
        assert set(own.table["site"]) == {site} and set(own.table["split"]) == {"train", "val", "test"}
        for row in range(0, len(own), 50):
            there = rows[own.table["patient"][row]]
            assert own.table["split"][row] == whole.table["split"][there]
            assert np.array_equal(own.targets[row], whole.targets[there])
            assert np.array_equal(own.images.read(row), whole.images.read(there))
        seen += list(own.table["patient"])
    assert sorted(seen) == sorted(rows)
