"""Paired comparison over seeds, against SciPy and by hand; how even labelled sets are, from the files of a run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.stats import wilcoxon

from federation.summaries import recalls
from server_app.compare_stats import paired
from server_app.report_labels import label_balance, label_charts, read_curve, read_labelled


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(4))
def test_p_is_scipys_exact_one(count, seed):
    values = np.random.default_rng(seed).normal(0.3, 1, count)
    found = paired(values.tolist())
    assert found.p_above == pytest.approx(wilcoxon(values, alternative="greater", method="exact").pvalue)
    assert found.p_below == pytest.approx(wilcoxon(values, alternative="less", method="exact").pvalue)


def test_ties_share_their_rank_and_zeros_have_none():
    # |d| = 1, 1, 2 have the ranks 1.5, 1.5, 3; sums of at least 4.5 come from {3, 1.5} twice and from all three
    found = paired([1.0, -1.0, 2.0, 0.0])
    assert found.p_above == 3 / 8 and found.share_above == 0.5 and found.count == 4
    assert paired([0.0, 0.0]).p_above == 1.0


def test_shift_is_the_median_of_walsh_averages():
    assert paired([0.1, 0.2, 0.6]).shift == pytest.approx(np.median([0.1, 0.15, 0.35, 0.2, 0.4, 0.6]))
    assert paired([0.1] * 5).p_above == 1 / 32  # the smallest that 5 pairs can have
    assert paired([]).shift is None


def test_recall_is_hits_over_true_and_none_without_an_example():
    assert recalls([[3, 1, 0], [0, 0, 0], [1, 1, 2]]) == [0.75, None, 0.5]


def write(folder, site, cycle, marks):
    path = folder / "sites" / site / "labelled" / f"{cycle:04d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cycle": cycle, "labels": ["a", "b"], "marks": marks}))


def test_balance_is_over_all_sites_and_charts_follow_the_cycles(tmp_path):
    assert read_labelled(tmp_path) == [] and label_balance([]) is None and label_charts([]) == []
    write(tmp_path, "north", 1, {"x": [1, 0], "y": [1, 0]})
    write(tmp_path, "north", 2, {"x": [1, 0], "y": [1, 0], "z": [0, 1]})
    write(tmp_path, "south", 2, {"x": [1, -1]})
    records = read_labelled(tmp_path)
    assert [record["cycle"] for record in records] == [1, 2]
    assert records[1]["sites"] == {"north": [2, 1], "south": [1, 0]}
    assert label_balance(records) == 1 / 3
    (tmp_path / "cycles.json").write_text(json.dumps({"curve": [{"cycle": 1, "ratio": 0.1, "accuracy": 0.5}]}))
    titles = [chart.title for chart in label_charts([*read_curve(tmp_path), *records])]
    assert len(titles) == 3 and "smallest class over largest" in titles[1]
    (tmp_path / "sites" / "south" / "labelled" / "0002.json").write_text("{")
    assert label_balance(read_labelled(tmp_path)) == 1 / 2, "a damaged file is passed over"
