"""The sampler: the authors' picks, the dense computation in plain loops, invariants, and pools at the edge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import fairfal_select
from models.fairfal_select import Samples, class_quotas, picks_by_class, select

GOLDEN = Path(__file__).parents[1] / "golden" / "fairfal" / "case05_balanced_sampler.npz"
SCENARIOS = (
    "plain",
    "shortfall",
    "absent",
    "more_than_pool",
    "no_anchors",
    "fewer_than_classes",
    "all_anchors_k2",
    "cosine",
)


def drawn(seed=0, pool=60, labelled=12, classes=4, width=5):
    """Arguments of `select` without the budget: factors as of a network, so that residuals sum to 0."""
    generator = torch.Generator().manual_seed(seed)

    def factors(count):
        logits = torch.randn(count, classes, generator=generator, dtype=torch.float64)
        one_hot = torch.eye(classes, dtype=torch.float64)[logits.argmax(dim=1)]
        return one_hot - logits.softmax(dim=1), torch.randn(count, width, generator=generator).double().relu()

    pool_factors, anchor_factors = factors(pool), factors(labelled)
    return {
        "uncertainty": torch.rand(pool, generator=generator, dtype=torch.float64),
        "pseudo_labels": torch.randint(classes, (pool,), generator=generator),
        "residuals": pool_factors[0],
        "features": pool_factors[1],
        "anchor_residuals": anchor_factors[0],
        "anchor_features": anchor_factors[1],
        "anchor_labels": torch.randint(classes, (labelled,), generator=generator),
    }


def slow_select(given_inputs, budget, kappa, anchor_mode="same_class"):
    """The method as it reads: dense embeddings, one sample at a time."""
    values = {name: value.numpy() for name, value in given_inputs.items()}
    classes = values["residuals"].shape[1]
    dense = [np.outer(r, z).ravel() for r, z in zip(values["residuals"], values["features"], strict=True)]
    anchors = [
        np.outer(r, z).ravel() for r, z in zip(values["anchor_residuals"], values["anchor_features"], strict=True)
    ]
    labels = values["pseudo_labels"]
    quotas = class_quotas(np.bincount(labels, minlength=classes), budget)
    picks = []
    for label, quota in enumerate(quotas):
        bucket = sorted(np.flatnonzero(labels == label), key=lambda i: (-values["uncertainty"][i], i))
        candidates = bucket[: max(1, int(kappa * quota))] if quota else []
        covered = [
            g for g, y in zip(anchors, values["anchor_labels"], strict=True) if y == label or anchor_mode == "all"
        ]
        chosen = []
        while len(chosen) < quota:
            rest = [i for i in candidates if i not in chosen]
            around = covered + [dense[i] for i in chosen]
            chosen.append(max(rest, key=lambda i: min((((dense[i] - g) ** 2).sum() for g in around), default=np.inf)))
        picks += chosen
    return sorted(picks)


# -- golden -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_picks_are_the_authors(scenario):
    with np.load(GOLDEN, allow_pickle=False) as file:
        golden = {name.partition("__")[2]: file[name] for name in file.files if name.startswith(f"{scenario}__")}
    bucket = np.bincount(golden["class_scores"].argmax(axis=1), minlength=golden["class_scores"].shape[1])
    assert class_quotas(golden["bucket"], int(golden["n_total"])) == golden["quota"].tolist()
    assert bucket.tolist() == golden["bucket"].tolist()
    num_anchors = len(golden["y_lab"]) if golden["use_anchors"] else 0
    tensors = {name: torch.from_numpy(golden[name]) for name in ("uncertainty", "R_unl", "Z_unl", "R_lab", "Z_lab")}
    labels = torch.from_numpy(golden["class_scores"]).argmax(dim=1)
    y_lab = torch.from_numpy(golden["y_lab"])[:num_anchors]
    options = {"anchor_mode": str(golden["anchor_mode"]), "distance": str(golden["distance"])}
    budget, kappa = int(golden["n_total"]), float(golden["over_sample_k"])
    pool = Samples(tensors["R_unl"], tensors["Z_unl"], labels)
    labelled = Samples(tensors["R_lab"][:num_anchors], tensors["Z_lab"][:num_anchors], y_lab)
    picks = picks_by_class(tensors["uncertainty"], pool, labelled, budget, kappa, **options)
    for positions, expected in zip(picks, golden["per_class_in_pick_order"], strict=True):
        assert golden["ids"][positions.numpy()].tolist() == expected[expected >= 0].tolist()
    found = select(
        golden["uncertainty"], labels, golden["R_unl"], golden["Z_unl"], *labelled, budget, kappa=kappa, **options
    )
    assert sorted(golden["ids"][found.numpy()].tolist()) == golden["selected"].tolist()


# -- against the dense computation ------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(1, 70),
    kappa=st.sampled_from([1, 1.5, 4]),
    labelled=st.sampled_from([0, 1, 12]),
    anchor_mode=st.sampled_from(["same_class", "all"]),
)
@settings(max_examples=40, deadline=None)
def test_factors_give_the_picks_of_dense_embeddings(seed, budget, kappa, labelled, anchor_mode):
    inputs = drawn(seed, labelled=labelled)
    found = select(**inputs, budget=budget, kappa=kappa, anchor_mode=anchor_mode).tolist()
    assert found == slow_select(inputs, budget, kappa, anchor_mode)


@pytest.mark.parametrize("batch", [1, 5, 12, 256])
@pytest.mark.parametrize("anchor_mode", ["same_class", "all"])
def test_picks_do_not_depend_on_how_many_classes_go_together(batch, anchor_mode, monkeypatch):
    inputs = drawn(1, pool=90, labelled=20, classes=11)
    expected = slow_select(inputs, 30, 3, anchor_mode)
    monkeypatch.setattr(fairfal_select, "BATCH", batch)
    assert select(**inputs, budget=30, kappa=3, anchor_mode=anchor_mode).tolist() == expected


# -- invariants -------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10_000), budget=st.integers(0, 80))
@settings(max_examples=40, deadline=None)
def test_picks_are_unique_in_the_pool_and_do_not_depend_on_its_order(seed, budget):
    inputs = drawn(seed)
    found = select(**inputs, budget=budget)
    assert len(found) == len(set(found.tolist())) == min(budget, 60) and found.dtype == torch.int64
    assert torch.equal(found, found.sort().values)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
    shuffled = {
        name: value if name.startswith("anchor") else value[order] for name, value in inputs.items()
    }  # fmt: skip
    assert order[select(**shuffled, budget=budget)].sort().values.tolist() == found.tolist()


@given(seed=st.integers(0, 10_000), scale=st.sampled_from([1e-6, 0.3, 1e5]))
@settings(max_examples=20, deadline=None)
def test_picks_do_not_depend_on_the_scale_of_features(seed, scale):
    inputs = drawn(seed)
    scaled = {name: value * scale if name.endswith("features") else value for name, value in inputs.items()}
    assert torch.equal(select(**scaled, budget=17), select(**inputs, budget=17))


def test_equal_images_are_ties_and_the_more_uncertain_wins():
    inputs = drawn(3, pool=8, labelled=0, classes=2)
    for name in ("residuals", "features"):
        inputs[name][:] = inputs[name][0].clone() + 0.1  # all eight are one point
    inputs["pseudo_labels"][:] = 0
    inputs["uncertainty"] = torch.tensor([0.1, 0.7, 0.3, 0.7, 0.2, 0.6, 0.5, 0.4])
    assert select(**inputs, budget=3, kappa=2).tolist() == [1, 3, 5]


def test_embeddings_of_length_zero_are_picked_by_uncertainty():
    inputs = drawn(3, classes=2)
    inputs["features"][:] = 0
    inputs["anchor_features"][:] = 0
    inputs["pseudo_labels"][:] = 1
    expected = inputs["uncertainty"].argsort(descending=True)[:5].sort().values
    assert torch.equal(select(**inputs, budget=5), expected)


def test_a_class_without_anchors_starts_with_its_most_uncertain():
    inputs = drawn(4, classes=2)
    inputs["pseudo_labels"][:] = 1
    inputs["anchor_labels"][:] = 0
    found = select(**inputs, budget=1).tolist()
    assert found == [int(inputs["uncertainty"].argmax())]
    assert select(**inputs, budget=1, anchor_mode="all").tolist() != found


def test_a_multilabel_image_anchors_each_of_its_labels():
    inputs = drawn(5, labelled=6)
    one_label = torch.tensor([0, 1, 2, 3, 0, 1])
    one_hot = torch.eye(4, dtype=torch.int8)[one_label]
    inputs["anchor_labels"] = one_label
    single = select(**inputs, budget=15)
    inputs["anchor_labels"] = one_hot
    assert torch.equal(select(**inputs, budget=15), single)
    inputs["anchor_labels"] = torch.ones_like(one_hot)  # every image has every label
    assert torch.equal(select(**inputs, budget=15), select(**inputs, budget=15, anchor_mode="all"))


def test_class_weights_reach_the_picks():
    inputs = drawn(6)
    found = select(**inputs, budget=8, class_weights=[0, 0, 1, 0])
    assert set(inputs["pseudo_labels"][found].tolist()) == {2}


@pytest.mark.parametrize(("pool", "budget"), [(0, 5), (7, 0), (7, 7), (7, 99)])
def test_small_pools_are_taken_as_far_as_they_go(pool, budget):
    assert len(select(**drawn(7, pool=pool), budget=budget)) == min(pool, budget)


def test_inputs_are_left_as_they_were_and_numpy_is_welcome():
    inputs = drawn(8)
    before = {name: value.clone() for name, value in inputs.items()}
    found = select(**inputs, budget=9)
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)
    assert torch.equal(select(**{name: value.numpy() for name, value in inputs.items()}, budget=9), found)


# -- the door ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["uncertainty", "residuals", "features", "anchor_residuals", "anchor_features"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_counted(name, value):
    inputs = drawn(9)
    inputs[name][2], inputs[name][5] = value, value
    with pytest.raises(ValueError, match=r"2 of \d+ (pool|labelled) samples have values that are not finite"):
        select(**inputs, budget=3)


@pytest.mark.parametrize("name", ["pseudo_labels", "anchor_labels"])
@pytest.mark.parametrize("label", [-1, 4])
def test_labels_of_no_class_are_refused(name, label):
    inputs = drawn(9)
    inputs[name][1] = label
    with pytest.raises(ValueError, match=f"1 labels are none of 4 classes, the first is {label}"):
        select(**inputs, budget=3)


@pytest.mark.parametrize(
    "name", ["uncertainty", "pseudo_labels", "residuals", "features", "anchor_residuals", "anchor_labels"]
)
def test_lengths_that_do_not_fit_are_refused(name):
    inputs = drawn(9)
    inputs[name] = inputs[name][:-1]
    with pytest.raises(ValueError, match=r"expected|labels of"):
        select(**inputs, budget=3)


def test_widths_that_do_not_fit_are_refused():
    inputs = drawn(9)
    inputs["anchor_features"] = inputs["anchor_features"][:, :-1]
    with pytest.raises(ValueError, match=r"labelled: expected residuals \(N, 4\) and features \(N, 5\)"):
        select(**inputs, budget=3)


def test_options_that_there_are_not_are_refused():
    for wrong, message in (
        ({"kappa": 0.5}, "kappa=0.5 gives fewer candidates"),
        ({"anchor_mode": "none"}, "anchor_mode='none' is unknown"),
        ({"distance": "l1"}, "distance='l1' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            select(**drawn(9), budget=3, **wrong)
