"""The job of `fedmitr` on three sites' real uploads: its order, its seeds, the rows of its table."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

from federation import seeding
from models.fedmitr import ensemble_logits
from models.inversion import advance, finish, start
from strategies import fedmitr_generate, fedmitr_progress
from strategies.aggregation import StreamingMean
from strategies.fedmitr_job import ensemble_predict, rows, run_job
from strategies.fedmitr_uploads import Job, read_job
from tests.strategies.fedmitr_wards import HOLDS, job, pictures, pool_of, sha256, trained

# -- reference --------------------------------------------------------------------------------------------------------


def test_the_average_is_the_streaming_mean_of_the_uploads(tmp_path):
    result = run_job(job(tmp_path, server="average").folder)
    initial, done = trained()
    mean = StreamingMean()
    for site in sorted(HOLDS):
        change, its_card = done[site]
        mean.add(site, {name: value.float().numpy() for name, value in change.items()}, its_card.num_train)
    expected = {name: value + torch.from_numpy(mean.result()[name]) for name, value in initial.items()}
    assert sha256(result.state) == sha256(expected)
    assert result.facts["is_average"]


def test_every_batch_is_the_inversion_of_its_sites_model_with_its_own_seed(tmp_path):
    made = job(tmp_path)
    run_job(tmp_path)
    inversion = made.options.inversion("half", 1)
    targets = fedmitr_generate.targets_of(made, inversion)
    assert set(targets.sites.tolist()) == {0, 1}  # west has one class
    for site, name in enumerate(("east", "north")):
        labels = targets.labels[targets.sites == site]
        mine = [shard for shard in pool_of(tmp_path) if len(shard["images"])]
        found = [shard for shard in mine if any(torch.equal(shard["labels"], part) for part in labels.split(4))]
        for number, part in enumerate(labels.split(4)):
            state = start(made.model(site), part, inversion, seeding.generator(1, "inversion", number, name))
            advance(made.model(site), state, inversion, inversion.inv_iters)
            expected = finish(made.model(site), state, inversion)
            assert any(torch.equal(shard["images"], expected.images.half()) for shard in found)


def test_the_ensemble_is_the_weighted_mean_of_the_sites_logits(tmp_path):
    made = job(tmp_path)
    images = pictures("val")[0][:6]
    with torch.no_grad():
        each = torch.stack([made.model(site)(2 * images - 1) for site in range(3)])
    counts = torch.tensor([trained()[1][site][1].positives for site in sorted(HOLDS)]).float()
    share = torch.where(counts.sum(0) > 0, counts / counts.sum(0).clamp(min=1), 1 / 3)
    found = ensemble_predict(tmp_path, images, batch_size=4)
    torch.testing.assert_close(found, (share[:, None] * each).sum(0), rtol=1e-4, atol=1e-5)
    uniform = ensemble_predict(tmp_path, images, {"fedmitr.ensemble_weight": "uniform"})
    torch.testing.assert_close(uniform, ensemble_logits(each, None), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_student_learns_what_the_uploads_know(tmp_path):
    """The mean of two sites' models knows little; distilling both on images that were inverted from them gives more."""
    numbers = {"pool_size": 120, "inv_batch": 40, "inv_iters": 60, "stops": "10,20", "kd_epochs": 25, "server": "kd"}
    job(tmp_path, sites=("east", "north"), **numbers)
    images, classes = pictures("test")
    known = classes < 8

    def accuracy(state):
        network = read_job(tmp_path).network().eval()
        network.load_state_dict(state)
        with torch.no_grad():
            return (network(2 * images - 1).argmax(dim=1) == classes)[known].float().mean().item()

    average = accuracy(run_job(tmp_path, {"fedmitr.server": "average"}, name="average").state)
    assert accuracy(run_job(tmp_path).state) > average + 0.03


# -- properties -------------------------------------------------------------------------------------------------------


def test_neither_the_order_of_arrival_nor_of_the_work_changes_a_bit(tmp_path, monkeypatch):
    job(tmp_path / "a")
    job(tmp_path / "b", sites=("west", "north", "east"))
    first = run_job(tmp_path / "a")
    given = fedmitr_generate.groups_of
    # A second worker would take other groups first; here the sites are inverted the other way round, one after another.
    made = read_job(tmp_path / "b")
    inversion = made.options.inversion("half", 1)
    groups = given(fedmitr_generate.targets_of(made, inversion), 4, 1)
    folder = tmp_path / "b" / fedmitr_generate.pool_name(made, inversion)
    folder.mkdir()
    monitor = fedmitr_progress.Monitor(folder, torch.device("cpu"), 1e9)
    for number in reversed(range(len(groups))):
        work = fedmitr_generate._Inversion(made, inversion, folder, number, groups[number], monitor, 0)
        work.run(made.model(groups[number].site), folder / f"shard-{number:05d}.safetensors")
    second = run_job(tmp_path / "b")
    for one, other in zip(pool_of(tmp_path / "a"), pool_of(tmp_path / "b"), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert first.facts["model_sha256"] == second.facts["model_sha256"]


def test_one_seed_gives_one_model_and_another_another(tmp_path):
    job(tmp_path, pool_size=8, kd_epochs=1)
    hashes = [run_job(tmp_path, changes, name=name).facts["model_sha256"] for name, changes in
              (("a", {}), ("b", {}), ("c", {"seed": 2}))]  # fmt: skip
    assert hashes[0] == hashes[1] != hashes[2]


def test_one_sites_model_is_in_memory_at_a_time(tmp_path, monkeypatch):
    alive, most = weakref.WeakSet(), []
    given = Job.model

    def counted(self, site):
        gc.collect()
        network = given(self, site)
        alive.add(network)
        most.append(len(alive))
        return network

    monkeypatch.setattr(Job, "model", counted)
    job(tmp_path)
    run_job(tmp_path)
    assert len(most) == 2 + 3  # two are inverted, three are asked as teachers
    assert max(most) <= 2  # the next is built while the name of the one before is let go


def test_rows_of_one_table_share_a_pool_where_only_the_student_differs(tmp_path):
    job(tmp_path)
    names = ("fedmitr", "fedmitr_uniform", "no_relabel", "hard_low", "kd")
    found = {name: run_job(tmp_path, rows()[name], name=name).facts for name in names}
    assert len({facts["pool"] for facts in found.values()}) == 1 == len(list(tmp_path.glob("pool-*")))
    assert len({facts["model_sha256"] for facts in found.values()}) == len(names)
    assert len({facts["seconds"]["A"] for facts in found.values()}) == 1


@pytest.mark.parametrize("name", ["no_sparsity", "dense_inversion", "dense", "coboosting", "fedftg", "ensemble"])
def test_every_other_row_gives_a_model_too(tmp_path, name, caplog):
    job(tmp_path, pool_size=8, kd_epochs=2)
    with caplog.at_level(logging.WARNING, "flwr"):
        result = run_job(tmp_path, rows()[name], name=name)
    average = sha256(run_job(tmp_path, rows()["average"], name="average").state)
    assert all(value.isfinite().all() for value in result.state.values())
    assert (result.facts["model_sha256"] == average) == (name == "ensemble") == result.facts["is_average"]
    assert ("3 models, not one" in caplog.text) == (name == "ensemble")
    if name in ("no_sparsity", "dense_inversion"):
        assert (result.facts["patches_high"], result.facts["patches_low"]) == (16, 0)


@pytest.mark.parametrize(
    ("changes", "images", "high"),
    [
        ({"freeze_stopped": True, "merge_batches": 2}, 12, 7),
        ({"freeze_stopped": True, "rebirth": True, "ratios": ""}, 12, 5),  # 4 labels, 3 sparse images of each
        ({"high_set": "recompute", "iterate": "best"}, 12, 8),
        ({"low_set": "alive_tail"}, 12, 4),
        ({"relabel_mode": "token"}, 12, 7),
        ({"ensemble_weight": "label_count", "global_init": "fresh", "train_scope": "head"}, 12, 7),
        ({"ratios": "0,0"}, 12, 16),
        ({"stops": "", "ratios": "", "global_init": "pretrained", "flip": False}, 12, 16),
    ],
)
def test_every_switch_of_the_three_stages_runs(tmp_path, changes, images, high):
    job(tmp_path, **changes)
    facts = run_job(tmp_path).facts
    assert (facts["images"], facts["patches_high"]) == (images, high)
    for shard in pool_of(tmp_path):
        both = torch.cat([shard["high"], shard["low"]], dim=1).sort(dim=1).values
        assert all(len(row.unique()) == len(row) for row in both)
        assert shard["images"].min() >= 0 and shard["images"].max() <= 1


def test_merged_batches_are_the_images_that_they_are_alone(tmp_path):
    for name, together in (("alone", 1), ("merged", 2)):
        job(tmp_path / name, freeze_stopped=True, merge_batches=together, pool_size=20, kd_epochs=1)
        run_job(tmp_path / name)
    alone, merged = (
        torch.cat([shard["images"] for shard in pool_of(tmp_path / name)]).float() for name in ("alone", "merged")
    )
    assert len(pool_of(tmp_path / "merged")) < len(pool_of(tmp_path / "alone"))
    assert (alone - merged).abs().mean() < 0.01
