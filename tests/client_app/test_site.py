"""A site's own words win over the server's, and what it keeps between rounds is what the server counted."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from client_app.site import IdleNode, is_hospital, open_folder, open_site, site_logger, site_names, write_partition
from datasets.records import DataError
from federation.settings import Settings


def state(value):
    return {"w": torch.full((2,), float(value)), "n": torch.tensor(int(value))}


def kept(site, name="control"):
    return sorted(path.name for path in (site.folder / "state").glob(f"{name}-*"))


# -- who decides where the data is ----------------------------------------------------------------------------------


def test_a_hospitals_own_data_root_wins_over_the_servers(hospital, tmp_path, opened):
    site, _ = opened(data__root=str(tmp_path / "elsewhere"), data__partition="iid", data__num_sites=2)
    assert site.name == "north" and len(site.data.splits["train"]) == 9
    assert site.folder == hospital.state / "exp-1"
    assert not (tmp_path / "runs").exists()  # reporting.runs_dir is the server's, not the hospital's


def test_a_hospital_is_known_by_three_keys_and_one_missing_key_is_named():
    full = {"site": "north", "data-root": "d", "state-dir": "s"}
    assert is_hospital(full) and not is_hospital({"partition-id": 0, "num-partitions": 5})
    with pytest.raises(DataError, match="the node config lacks state-dir;"):
        is_hospital({"site": "north", "data-root": "d"})
    with pytest.raises(DataError, match="the node config lacks site, data-root, state-dir"):
        is_hospital({})


def test_a_sites_folder_is_private_and_made_without_opening_the_data(hospital):
    settings = Settings.from_run_config(hospital.run_config)
    folder = open_folder(settings, {**hospital.node_config, "data-root": "/nowhere"}, "exp-1")
    assert folder.is_dir() and folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("experiment", ["../up", "..", ".hidden", "a/b", "a\\b", "", "a b", "x" * 129, "nül", "a\n"])
def test_an_experiment_that_is_no_plain_name_is_refused(hospital, experiment):
    with pytest.raises(ValueError, match="experiment's name"):
        open_folder(Settings.from_run_config(hospital.run_config), hospital.node_config, experiment)
    assert not hospital.state.exists()


def test_two_experiments_of_one_hospital_keep_their_state_apart(hospital):
    settings = Settings.from_run_config(hospital.run_config)
    sites = [
        open_site(settings, hospital.node_config, open_folder(settings, hospital.node_config, name))
        for name in ("exp-1", "exp-2")
    ]
    sites[0].save_state("control", 1, state(1), 0)
    assert sites[1].load_state("control", 1) is None


# -- simulation -------------------------------------------------------------------------------------------------------


def simulated(tmp_path, **changes):
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return Settings.from_run_config({"reporting.runs_dir": str(tmp_path / "runs"), "data.num_sites": 3, **dotted})


def test_a_node_is_the_site_of_its_number_and_the_sites_share_no_sample(tmp_path):
    settings = simulated(tmp_path)
    sites = []
    for index in range(3):
        node_config = {"partition-id": index, "num-partitions": 3}
        folder = open_folder(settings, node_config, "exp")
        assert folder == (tmp_path / "runs" / "exp" / "sites" / f"site-0{index}").absolute()
        sites.append(open_site(settings, node_config, folder))
    assert [site.name for site in sites] == site_names(settings)
    assert sum(len(site.data.splits["test"]) for site in sites) == 600  # all test mosaics, each once
    assert len({site.data.checksum for site in sites}) == 3


def test_a_node_beyond_the_last_site_is_idle(tmp_path):
    settings = simulated(tmp_path)
    node_config = {"partition-id": 3, "num-partitions": 9}
    folder = open_folder(settings, node_config, "exp")
    assert folder.name == "node-003"
    with pytest.raises(IdleNode, match="node 3 of a partition of 3 sites"):
        open_site(settings, node_config, folder)


def test_another_seed_deals_other_samples(tmp_path):
    node_config = {"partition-id": 0}
    one, other = (open_site(simulated(tmp_path, seed=seed), node_config, tmp_path).data.checksum for seed in (1, 2))
    assert one != other


def test_the_centralised_bound_has_one_more_site_and_the_others_do_not_train(tmp_path):
    settings = simulated(tmp_path, method="centralised")
    assert site_names(settings) == ["pooled", "site-00", "site-01", "site-02"]
    sizes = [len(open_site(settings, {"partition-id": index}, tmp_path).data.splits["train"]) for index in range(4)]
    assert sizes[0] > 0 and sizes[1:] == [0, 0, 0]


@pytest.mark.parametrize(
    ("partition", "more"),
    [("n_classes_per_site", {"classes_per_site": 2}), ("dirichlet_client", {}), ("dirichlet_class", {})],
)
def test_single_label_partitions_by_name(tmp_path, partition, more):
    wish = {f"data__{key}": value for key, value in more.items()}
    settings = simulated(tmp_path, data__root="digits", data__partition=partition, data__num_sites=4, **wish)
    sites = [open_site(settings, {"partition-id": index}, tmp_path).data for index in range(4)]
    assert all(len(site.splits["train"]) for site in sites)
    if partition == "n_classes_per_site":
        assert [int((site.splits["train"].targets == 1).any(axis=0).sum()) for site in sites] == [2] * 4


def test_label_clusters_make_a_site_for_each_share_of_the_labels(tmp_path):
    settings = simulated(tmp_path, data__partition="label_clusters", data__cluster_share=0.3)
    assert len(site_names(settings)) == 3


@pytest.mark.parametrize("mode", ["drop_positive", "unknown_entries"])
def test_lost_labels_are_lost_in_training_only(tmp_path, mode):
    whole, masked = (
        open_site(
            simulated(tmp_path, data__lost_labels=share, data__lost_mode=mode), {"partition-id": 0}, tmp_path
        ).data
        for share in (0.0, 0.5)
    )
    before, after = whole.splits["train"].targets, masked.splits["train"].targets
    lost = before != after
    assert (after[lost] == (0 if mode == "drop_positive" else -1)).all()
    of = before == 1 if mode == "drop_positive" else np.ones_like(lost)
    assert 0.4 < lost[of].mean() < 0.6
    for split in ("val", "test"):
        np.testing.assert_array_equal(whole.splits[split].targets, masked.splits[split].targets)
    assert whole.checksum != masked.checksum


def test_partition_is_written_once(tmp_path):
    path = tmp_path / "partition.json"
    write_partition(simulated(tmp_path), path)
    first = path.read_bytes()
    write_partition(simulated(tmp_path, seed=99), path)
    assert path.read_bytes() == first


# -- state ------------------------------------------------------------------------------------------------------------


def test_state_comes_back_as_it_was_after_exactly_that_round(opened):
    site, _ = opened()
    site.save_state("control", 3, state(3), 2)
    found = site.load_state("control", 3)
    assert found["w"].tolist() == [3.0, 3.0] and found["n"] == 3 and found["n"].dtype == torch.int64
    assert site.load_state("control", 2) is None and site.load_state("other", 3) is None


def test_this_round_the_one_it_started_from_and_the_one_before_that_are_kept(opened):
    site, _ = opened()
    for server_round in range(1, 6):
        site.save_state("control", server_round, state(server_round), server_round - 1)
    assert kept(site) == [f"control-00000{server_round}.safetensors" for server_round in (3, 4, 5)]


def test_the_last_round_that_the_server_took_survives_several_refused_ones(opened):
    site, _ = opened()
    site.save_state("control", 1, state(1), 0)
    for server_round in (2, 3, 4, 5):  # the server took round 1 and none of these
        site.save_state("control", server_round, state(server_round), 1)
    assert site.load_state("control", 1)["n"] == 1 and len(kept(site)) == 2
    site.save_state("control", 6, state(6), 5)
    # a server that lost its newest checkpoint, that of round 5, repeats round 5 from round 1
    assert kept(site) == [f"control-00000{server_round}.safetensors" for server_round in (1, 5, 6)]


def test_a_repeated_round_overwrites_its_own_state_and_leaves_the_one_before(opened):
    site, _ = opened()
    for server_round in (1, 2):
        site.save_state("control", server_round, state(server_round), server_round - 1)
    site.save_state("control", 2, state(20), 1)
    assert site.load_state("control", 1)["n"] == 1 and site.load_state("control", 2)["n"] == 20


def test_states_of_two_names_do_not_count_for_each_other(opened):
    site, _ = opened()
    for server_round in (1, 2, 3):
        site.save_state("own", server_round, state(server_round), server_round - 1)
    site.save_state("control", 3, state(3), 2)
    assert len(kept(site, "own")) == 3 and len(kept(site, "control")) == 1


def test_saved_state_does_not_follow_the_tensor_it_came_from(opened):
    site, _ = opened()
    values = state(1)
    site.save_state("control", 1, values, 0)
    values["w"] += 5
    assert site.load_state("control", 1)["w"].tolist() == [1.0, 1.0]


# -- log --------------------------------------------------------------------------------------------------------------


def test_the_sites_log_is_its_own_and_reaches_no_other_logger(opened, caplog):
    site, _ = opened()
    logger = site_logger(site.folder)
    assert site_logger(site.folder) is logger and len(logger.handlers) == 1
    with caplog.at_level(logging.DEBUG):
        logger.info("report of PATIENT-Jane-Doe read")
    assert "Jane" not in caplog.text
    assert "PATIENT-Jane-Doe" in (site.folder / "site.log").read_text()
