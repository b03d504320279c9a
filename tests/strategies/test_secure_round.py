"""Runs with ``privacy.secure_sum``: the result of a plain run, and a server that never sees an update in plain."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from client_app import fedavg
from client_app.site import site_names
from federation import secure_roster as protocol
from federation import wire
from federation.secure_sum import LEVELS, ModuleSum, SecureSumError, quantise
from federation.settings import Settings, SettingsError
from federation.wire import TensorSpec
from server_app import checkpoint, inprocess, runner
from strategies import base
from strategies.base import FederatedStrategy
from strategies.discovery import QuorumError
from strategies.secure_round import checked_means, cohorts_of
from tests.faults.drills import SITES, lines_of, run, run_json, server_log, settings, write_data
from tests.strategies import secure_split

STEP = 8.0 / (2 * LEVELS)
"""Half a step of the fixed point at the default range: what quantisation may add to a value in one round."""
ROUNDING = 2.0**-22
"""Two float32 roundings of values up to 2: the mean itself, and its sum with the state."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("secure") / "data.npz")


@pytest.fixture
def config(data, tmp_path):
    return settings(data, tmp_path, federation__rounds=2)


SECURE = {"privacy.secure_sum": True}
ADAM = {"training.optimizer": "adamw", "training.lr": 0.001}


def state_of(outcome):
    return checkpoint.load_checkpoint(outcome.run_dir)[0].modules


def assert_same(found, expected, tolerance):
    assert {module: set(state) for module, state in found.items()} == {m: set(state) for m, state in expected.items()}
    for module, state in expected.items():
        for name, value in state.items():
            if value.is_floating_point():
                torch.testing.assert_close(found[module][name], value, rtol=0, atol=tolerance)


def rounds_of(outcome):
    return [line for line in lines_of(outcome.run_dir) if line["kind"] == "round"]


def ledgers_of(outcome):
    for path in sorted((outcome.run_dir / "sites").glob("*/egress.jsonl")):
        yield [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# -- the same result --------------------------------------------------------------------------------------------------


def test_one_round_is_the_plain_one_up_to_half_a_step_of_the_fixed_point(config):
    config["federation.rounds"] = 1
    assert_same(state_of(run(config | SECURE)), state_of(run(config)), STEP + ROUNDING)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"federation.weighting": "equal", "federation.sites_per_round": 3, "evaluation.every": 2},
        {"method": "fedprox"},
        {"method": "fednca", "fednca.head": "etf", **ADAM},
        {"method": "fednca", "fednca.head": "etf", "fednca.aggregation": "num_examples", **ADAM},
        {"method": "spherefed"},
        {"method": "fedlgt", "fedlgt.num_layers": 1},
    ],
    ids=lambda changes: " ".join(f"{key}={value}" for key, value in changes.items()) or "defaults",
)
def test_two_rounds_are_the_plain_ones(config, changes):
    """Round 2 starts a quantisation step away from the plain run; Adam's normalised steps widen that most."""
    config |= {"data.partition": "beta_gamma", "data.min_samples": 8, **changes}
    plain, secure = run(config), run(config | SECURE)
    assert_same(state_of(secure), state_of(plain), 2e-5 if "training.optimizer" in changes else 2e-6)
    ours, theirs = rounds_of(secure), rounds_of(plain)
    for key in ("accepted", "refused", "missing", "weights"):
        assert [line[key] for line in ours] == [line[key] for line in theirs]
    assert secure.metrics["macro_auroc"] == pytest.approx(plain.metrics["macro_auroc"], abs=0.01)


def test_masks_are_fresh_and_the_model_has_the_same_bits(config):
    first, second = run(config | SECURE), run(config | SECURE)
    assert first.model_sha256 == second.model_sha256
    sent = [
        {line["payload_sha256"] for ledger in ledgers_of(run) for line in ledger if "secure" in line["action"]}
        for run in (first, second)
    ]
    assert len(sent[0]) == len(sent[1]) == 4 * 2 * len(SITES) and not sent[0] & sent[1]


# -- what is seen -----------------------------------------------------------------------------------------------------


def test_ledgers_show_masked_arrays_only(config):
    outcome = run(config | SECURE)
    ledgers = list(ledgers_of(outcome))
    assert len(ledgers) == len(SITES)
    for ledger in ledgers:
        assert [line["action"] for line in ledger[1:5]] == [
            protocol.ASK_KEYS,
            protocol.ASK_SHARES,
            protocol.ASK_MASKED,
            protocol.ASK_UNMASK,
        ]
        assert not any(name.startswith(wire.MODULE) for line in ledger for name in line["records"])
        dtypes = {
            kind.partition("[")[0] for line in ledger for record in line["records"].values() for kind in record.values()
        }
        assert dtypes <= {"int64", "uint8", "int", "float", "str", "list"}, "no array of floats leaves"
        assert all(line["purpose"].startswith("secure sum: ") for line in ledger if "secure" in line["action"])


def test_no_message_of_a_run_holds_an_update_in_plain(config, monkeypatch):
    """Every reply is looked at as it reaches the server, beside what each site had trained."""
    replies, updates, train = [], {}, fedavg.train

    class Watched(inprocess.InProcessGrid):
        def pull_messages(self, message_ids):
            found = super().pull_messages(message_ids)
            replies.extend((self._nodes.index(m.metadata.src_node_id), inprocess.copied(m.content)) for m in found)
            return found

    def watched(site, modules, job):
        update = train(site, modules, job)
        updates[site.name, job.server_round] = (update.modules["model"], update.num_examples)
        return update

    monkeypatch.setattr(fedavg, "train", watched)
    parsed = Settings.from_run_config(config | SECURE)
    nodes = [{"partition-id": index, "num-partitions": len(SITES)} for index in range(len(site_names(parsed)))]
    runner.run(parsed, Watched(nodes, parsed.flat()))
    masked = [(SITES[index], content) for index, content in replies if protocol.MASKED in content]
    assert len(masked) == len(updates) == 2 * len(SITES)
    for site, content in masked:
        change, weight = updates[site, content[wire.METRICS]["server_round"]]
        plain = quantise(change, weight, wire.spec_of(change), 8.0)
        vector = wire.decode(content[protocol.MASKED])["model"].view(np.uint64)
        assert vector.shape == plain.shape and not (vector == plain).any()
        # a plain entry is below 2^34 (24 examples, change below 8); of random ones, a share of 2^-29 would be
        assert (np.abs(vector.view(np.int64)) > 2**40).all()
    for _, content in replies:
        assert not any(name.startswith(wire.MODULE) for name in content)
        assert not any(
            array.dtype.startswith("float") for r in wire.array_records(content).values() for array in r.values()
        )


def test_a_plain_training_message_is_not_answered_with_an_update(config, monkeypatch):
    """A server that forgets its own setting gets a code instead of a model."""
    monkeypatch.setattr(
        base.FederatedStrategy,
        "_train_securely",
        lambda self, grid, server_round: self.aggregate_train(
            server_round, self._replies(grid, self.configure_train(server_round, self.arrays, {}, grid))
        ),
    )
    with pytest.raises(QuorumError, match="E-MISMATCH"):
        run(config | SECURE)


# -- cohorts of modules -----------------------------------------------------------------------------------------------


def split(config, **sites):
    options = {f"{secure_split.NAME}.{module}": ",".join(names) for module, names in sites.items()}
    return {**config, "method": "tests.strategies.secure_split:Split", **options}


def test_modules_are_summed_over_the_sites_that_train_them(config):
    config = split(config, body=SITES[:3], head=SITES[1:])
    config["federation.rounds"] = 1
    assert_same(state_of(run(config | SECURE)), state_of(run(config)), STEP + ROUNDING)


def test_module_of_too_few_sites_is_frozen_and_said_so(config):
    config = split(config, body=SITES[:3], head=SITES[2:])
    with server_log() as log:
        outcome = run(config | SECURE)
    reason = "2 of 2 sites sent keys, 3 needed"
    assert [line["frozen"] for line in rounds_of(outcome)] == [{"head": reason}] * 2
    assert [line["accepted"] for line in rounds_of(outcome)] == [list(SITES[:3])] * 2
    assert any(f"module head stays as it is: {reason}" in line for line in log)
    assert reason in (outcome.run_dir / "report.html").read_text(encoding="utf-8")
    plain = state_of(run(split(config, body=SITES[:3], head=())))  # nobody trains the head: it keeps its start
    assert_same(state_of(outcome), plain, 2e-6)
    first = next(line for line in lines_of(outcome.run_dir) if line["kind"] == "evaluation" and line["round"] == 1)
    assert first["summary"]["num_examples"] == 48, "the site without a summed module still scores what it got"


def test_a_run_without_any_large_enough_cohort_ends_with_the_numbers(config):
    config = split(config, body=SITES[:2], head=SITES[2:])
    with pytest.raises(QuorumError, match=r"round 1 of the secure sum: no module has the 3 sites that a sum needs"):
        run(config | SECURE)


def test_min_cohort_of_the_settings_is_kept_to_by_both_sides(config):
    outcome = run(split(config, body=SITES, head=SITES[1:]) | SECURE | {"privacy.min_cohort": 4})
    assert [line["frozen"] for line in rounds_of(outcome)] == [{"head": "3 of 3 sites sent keys, 4 needed"}] * 2


def test_values_beyond_the_range_are_cut_and_counted(config):
    with server_log() as log:
        outcome = run(config | SECURE | {"privacy.secure_range": 1e-3})
    clipped = [line["clipped"]["model"] for line in rounds_of(outcome)]
    assert all(count > 100 for count in clipped)
    assert any(f"{clipped[0]} values cut to +-0.001" in line for line in log)
    assert "privacy.secure_range were cut" in (outcome.run_dir / "report.html").read_text(encoding="utf-8")
    assert run_json(outcome.run_dir)["status"] == "completed"


# -- checks of the sum ------------------------------------------------------------------------------------------------


def test_cohorts_follow_from_what_every_site_sends():
    spec = {"w": TensorSpec((2,), "float32")}
    sites = {"b": {"body": spec}, "a": {"body": spec, "head": spec}}
    assert cohorts_of(sites) == ({"body": ["a", "b"], "head": ["a"]}, {"body": spec, "head": spec})
    with pytest.raises(SecureSumError, match="b sends other tensors of module 'body' than a"):
        cohorts_of(sites | {"b": {"body": {"w": TensorSpec((3,), "float32")}}})


def total(mean, weight=12):
    return {"body": ModuleSum({"w": np.float32(mean)}, weight, 0, 3)}


MEMBERS = {"body": {"a": 5.0, "b": 4.0, "c": 3.0}}


def test_a_checked_mean_reads_as_any_mean():
    mean = checked_means(total([3.0, 4.0]), MEMBERS, 5.0)["body"]
    assert mean.sites == {"a", "b", "c"} and mean.weights == {"w": 12.0}
    np.testing.assert_array_equal(mean.result()["w"], np.float32([3.0, 4.0]))


def test_a_module_that_nobody_updated_has_no_mean():
    assert checked_means({"body": ModuleSum({}, 0, 0, 3)}, MEMBERS, 5.0) == {}


@pytest.mark.parametrize(
    ("sums", "reason"),
    [
        (total([3.0, 4.1]), "norm of the mean of module 'body' is 5.08, expected at most 5"),
        (total([np.inf, 0.0]), "is inf, expected at most 5"),
        (total([np.nan, 0.0]), "is nan, expected at most 5"),
        (total([1.0, 1.0], weight=13), "weigh 13 together, expected at most 12"),
    ],
)
def test_a_sum_that_cannot_be_is_refused(sums, reason):
    with pytest.raises(SecureSumError, match=reason):
        checked_means(sums, MEMBERS, 5.0)


def test_sites_that_give_themselves_more_weight_end_the_round_with_the_state_kept(config, monkeypatch):
    monkeypatch.setattr(fedavg, "weights", lambda update, job: {"model": 2 * update.num_examples}, raising=False)
    with pytest.raises(QuorumError, match="weigh 192 together, expected at most 96 by their examples"):
        run(config | SECURE)


# -- refusals before any work -----------------------------------------------------------------------------------------


class Weighing(FederatedStrategy):
    def weigh(self, reply, module):
        return 0.5


class Receiving(FederatedStrategy):
    def received(self, reply):
        return {}


class Declared(Weighing):
    secure_summable = True

    def weigh(self, reply, module):
        return 1.0


class Below(Declared):
    pass


def test_a_method_that_weighs_or_reads_replies_itself_has_to_say_that_it_can_be_summed():
    assert FederatedStrategy.secure_summable
    assert not Weighing.secure_summable and not Receiving.secure_summable
    assert Declared.secure_summable and Below.secure_summable


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": "local"}, "method = 'local' with privacy.secure_sum = true: .* choose another method"),
        ({"method": "centralised"}, "method = 'centralised' with privacy.secure_sum = true"),
        ({"method": "scaffold"}, "method = 'scaffold' with privacy.secure_sum = true"),
        ({"federation.norm_bound": 1.0}, "federation.norm_bound = 1.0 .* use 0 and bound every value"),
        ({"federation.max_site_share": 0.5}, "federation.max_site_share = 0.5 .* use 1, or federation.weighting"),
        ({"data.num_sites": 2}, "data.num_sites = 2 is below privacy.min_cohort = 3"),
        ({"federation.expected_sites": 2}, "federation.expected_sites = 2 is below privacy.min_cohort = 3"),
        (
            {"federation.sites_per_round": 3, "privacy.min_cohort": 4},
            "sites_per_round = 3 is below privacy.min_cohort = 4",
        ),
        ({"data.num_sites": 300}, "data.num_sites = 300 .* use federation.sites_per_round = 256 or less"),
        ({"privacy.min_cohort": 2}, "privacy.min_cohort = 2: Input should be greater than or equal to 3"),
        ({"privacy.secure_range": 0}, "privacy.secure_range = 0"),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_fix(changes, reason):
    with pytest.raises(SettingsError, match=reason) as caught:
        Settings.from_run_config(SECURE | changes)
    assert len(caught.value.problems) == 1
    if "privacy" not in next(iter(changes)):
        Settings.from_run_config(changes)  # it is the secure sum that it does not go with


def test_many_sites_are_fine_where_few_are_drawn():
    Settings.from_run_config(SECURE | {"data.num_sites": 300, "federation.sites_per_round": 20})
