"""FairFAL as a federation: cycles, one gamma, what travels, and sites that are late, small, silent or wrong."""

from __future__ import annotations

import json
import math

import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from safetensors.torch import load_file

from client_app import fairfal as client_fairfal
from client_app.site import open_site
from federation import seeding, wire
from federation.settings import Settings, SettingsError
from models.fairfal_exchange import ANSWERS, area_under_curve
from server_app.checkpoint import load_checkpoint
from strategies.discovery import QuorumError
from strategies.fairfal import FairFAL
from strategies.initial import seeded
from tests.faults.drills import in_rounds, server_log, silent
from tests.strategies.fairfal_data import LABELS, SITES, config_of, run, watching, write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("fairfal") / "data.npz")


@pytest.fixture
def config(data, tmp_path):
    return lambda **changes: config_of(data, tmp_path / "runs", **changes)


@pytest.fixture(scope="module")
def watched(data, tmp_path_factory):
    """Three cycles with every message seen: the outcome and the messages."""
    seen = []
    runs = tmp_path_factory.mktemp("watched")
    return run(config_of(data, runs, federation__rounds=6), faults=watching(seen)), seen


def trained_with(seen, server_round):
    """The training messages of a round."""
    return [c for _, action, _, c, _ in seen if action == wire.TRAIN and c["config"]["server_round"] == server_round]


def cycles(outcome):
    return json.loads((outcome.run_dir / "cycles.json").read_text())


def labelled(outcome, site, cycle):
    return json.loads((outcome.run_dir / "sites" / site / "labelled" / f"{cycle:04d}.json").read_text())["marks"]


# -- the outer loop ---------------------------------------------------------------------------------------------------


def test_each_cycle_adds_the_budget_and_keeps_what_was_labelled(watched):
    outcome, _ = watched
    for site in SITES:
        sets = [set(labelled(outcome, site, cycle)) for cycle in (1, 2, 3)]
        assert [len(ids) for ids in sets] == [4, 8, 12]  # int(66 * 0.2 / 3) = 4
        assert sets[0] < sets[1] < sets[2]
    page = cycles(outcome)
    assert page["labelled"] == dict.fromkeys(SITES, 12)
    assert [point["ratio"] for point in page["curve"]] == [12 / 66, 24 / 66, 36 / 66]


def test_only_labelled_rows_train_and_the_server_hears_their_number_only(watched):
    _, seen = watched
    trained = [
        (content["config"]["server_round"], reply[wire.METRICS]["num_examples"])
        for _, action, _, content, reply in seen
        if action == wire.TRAIN
    ]
    assert {(number, count) for number, count in trained} == {(1, 4), (2, 4), (3, 8), (4, 8), (5, 12), (6, 12)}


def test_every_cycle_begins_with_new_first_weights_of_its_own(watched, config):
    _, seen = watched
    settings = Settings.from_run_config(config(federation__rounds=6))
    strategy = FairFAL(settings)

    def weights(cycle):
        if cycle == 1:
            return seeded(lambda: strategy.network(LABELS, "multiclass"), settings).state_dict()
        with seeding.scope(settings.seed, "initial_weights", cycle):
            return strategy.network(LABELS, "multiclass").state_dict()

    for server_round, cycle in ((1, 1), (3, 2), (5, 3)):
        sent = [wire.modules_of(content)["model"] for content in trained_with(seen, server_round)]
        assert all(torch.equal(state[name], value) for state in sent for name, value in weights(cycle).items())


def test_the_query_of_a_cycle_sees_the_last_model_of_the_one_before(watched):
    _, seen = watched
    asked = [wire.modules_of(c)["model"] for _, _, q, c, _ in seen if q == "select" and c["config"]["cycle"] == 3]
    last = [c for _, a, _, c, _ in seen if a == wire.EVALUATE and c["config"]["server_round"] == 4]
    assert len(asked) == 3 and last
    measured = wire.modules_of(last[0])["model"]
    assert all(torch.equal(asked[0][name], value) for name, value in measured.items())


def test_warm_start_goes_on_with_the_last_model(config):
    seen = []
    run(config(fairfal__cycle_init="warm"), faults=watching(seen))
    asked = next(wire.modules_of(c)["model"] for _, _, q, c, _ in seen if q == "select" and c["config"]["cycle"] == 2)
    sent = next(
        wire.modules_of(c)["model"] for _, a, _, c, _ in seen if a == wire.TRAIN and c["config"]["server_round"] == 3
    )
    assert all(torch.equal(asked[name], value) for name, value in sent.items())


def test_the_result_is_the_last_rounds_model_and_the_areas_are_trapezoids(watched):
    outcome, _ = watched
    progress, _ = load_checkpoint(outcome.run_dir)
    kept = load_file(outcome.run_dir / "model.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in progress.modules["model"].items())
    curve = {point["ratio"]: point["accuracy"] for point in cycles(outcome)["curve"]}
    a, b, c = curve.values()
    assert outcome.metrics["aulc_accuracy"] == pytest.approx((a + 2 * b + c) / 4)
    assert outcome.metrics["accuracy"] == c and outcome.metrics["label_ratio"] == 36 / 66
    assert area_under_curve({0.2: 1.0}) is None
    assert all(0 <= row["recall"] <= 1 for row in outcome.metrics["per_class"])


# -- gamma ------------------------------------------------------------------------------------------------------------


def test_gamma_is_sent_once_and_its_plain_mean_is_frozen(watched):
    outcome, seen = watched
    gammas = [reply[wire.EXTRA]["gamma"] for *_, reply in seen if wire.EXTRA in reply and "gamma" in reply[wire.EXTRA]]
    assert len(gammas) == 3 and all(0 < gamma <= 1 for gamma in gammas)
    told = {(c["config"]["cycle"], c["config"].get("gamma_bar")) for _, _, q, c, _ in seen if q == "select"}
    mean = math.fsum(gammas) / 3
    assert told == {(1, None), (2, mean), (3, mean)} and cycles(outcome)["gamma_bar"] == mean


def test_a_gamma_that_is_none_is_left_out_and_too_few_are_asked_again(config):
    def lies(value):
        def fault(message, answer):
            reply = answer()
            if wire.EXTRA in reply.content and "gamma" in reply.content[wire.EXTRA]:
                reply.content[wire.EXTRA] = MetricRecord({"gamma": value})
            return reply

        return fault

    seen = []
    faults = watching(seen)
    stats = in_rounds({3}, lies(0.0), wire.ASK)
    looks = faults[SITES[0]]
    faults[SITES[0]] = lambda message, answer: looks(message, lambda: stats(message, answer))
    with server_log() as lines:
        run(config(federation__rounds=6, fairfal__min_gamma_sites=3), faults=faults)
    assert any("gamma is 0.0" in line for line in lines) and any("asked again" in line for line in lines)
    told = {(c["config"]["cycle"], c["config"].get("gamma_bar")) for _, _, q, c, _ in seen if q == "select"}
    assert (2, 1.0) in told and all(bar not in (None, 1.0) for cycle, bar in told if cycle == 3)


@pytest.mark.parametrize("skips", [False, True])
def test_a_site_of_one_class_lifts_the_mean_gamma_unless_it_is_left_out(config, monkeypatch, skips):
    def of_one_class(site):
        labels = whole(site)
        return torch.zeros_like(labels) if site.name == SITES[0] else labels

    whole = client_fairfal._labels
    monkeypatch.setattr(client_fairfal, "_labels", of_one_class)
    seen = []
    with server_log() as lines:
        outcome = run(config(fairfal__skip_single_class=skips), faults=watching(seen))
    gammas = {site: reply[wire.EXTRA]["gamma"] for site, _, q, _, reply in seen if q == "stats"}
    assert gammas[SITES[0]] == (0.0 if skips else 1.0)
    counted = [gamma for site, gamma in gammas.items() if not skips or site != SITES[0]]
    assert cycles(outcome)["gamma_bar"] == pytest.approx(sum(counted) / len(counted))
    assert any("one class only is labelled there" in line for line in lines) == skips


def test_gamma_refresh_moves_the_mean_and_random_asks_for_none(config):
    seen = []
    run(config(federation__rounds=6, fairfal__gamma_momentum=0.5), faults=watching(seen))
    assert sum(q == "stats" for _, _, q, _, _ in seen) == 6
    seen.clear()
    run(config(fairfal__rule="random"), faults=watching(seen))
    assert {q for _, a, q, _, _ in seen if a == wire.ASK} == {"select"}


# -- what travels -----------------------------------------------------------------------------------------------------


def test_no_message_holds_ids_class_counts_or_features(watched, data):
    outcome, seen = watched
    ids = set()
    for site in SITES:
        ids |= set(labelled(outcome, site, 3))
    actions = set()
    for _, action, question, content, reply in seen:
        actions.add((action, question))
        for records in (content, reply):
            for name, record in records.items():
                if isinstance(record, ArrayRecord):
                    assert name == "module.model" or (name.startswith("scores.") and action == wire.EVALUATE)
                    continue
                texts = [v for v in record.values() if isinstance(v, str)]
                texts += [text for v in record.values() if isinstance(v, list) for text in v if isinstance(text, str)]
                assert not ids & set(texts)
                for key, value in record.items():
                    if isinstance(value, list) and not isinstance(value[0], str):
                        # the card's counts by label, all of them withheld
                        assert action == wire.PROFILE and key in ("positives", "negatives") and set(value) == {-1}
        if action == wire.ASK:
            assert set(reply) == {wire.METRICS, wire.EXTRA} and set(reply[wire.EXTRA]) == set(ANSWERS[question])
    assert actions == {
        (wire.PROFILE, ""),
        (wire.ASK, "select"),
        (wire.ASK, "stats"),
        (wire.TRAIN, ""),
        (wire.EVALUATE, ""),
    }


def test_scores_are_of_validation_and_test_images_only(watched):
    _, seen = watched
    splits = {name for *_, reply in seen for name in reply if name.startswith("scores.")}
    assert splits == {"scores.val", "scores.test"}


# -- sites that are late, small or silent -----------------------------------------------------------------------------


def test_a_site_that_misses_a_query_keeps_its_labels_and_gets_the_next_one(config):
    outcome = run(config(federation__rounds=6), faults={SITES[1]: in_rounds({3}, silent, wire.ASK)})
    assert [len(labelled(outcome, SITES[1], cycle)) for cycle in (1, 2, 3)] == [4, 4, 8]
    assert [len(labelled(outcome, SITES[0], cycle)) for cycle in (1, 2, 3)] == [4, 8, 12]
    outstanding = json.loads((outcome.run_dir / "run.json").read_text())["outstanding"]
    assert {entry["site"] for entry in outstanding} == {SITES[1]}


def test_a_site_that_misses_the_first_query_picks_without_labels_and_trains_later(config):
    seen = []
    faults = watching(seen)
    faults[SITES[2]] = in_rounds({1}, silent, wire.ASK)
    outcome = run(config(), faults=faults)
    trained = {(site, c["config"]["server_round"]) for site, a, _, c, _ in seen if a == wire.TRAIN}
    assert {number for _, number in trained} == {1, 2, 3, 4} and SITES[2] not in {site for site, _ in trained}
    assert len(labelled(outcome, SITES[2], 2)) == 4
    log = (outcome.run_dir / "sites" / SITES[2] / "site.log").read_text()
    assert "nothing is labelled: the global model alone" in log


def test_a_used_up_pool_gives_what_it_has_then_nothing_and_trains_on(config):
    outcome = run(config(federation__rounds=6, fairfal__label_share=0.6))
    sizes = [len(labelled(outcome, SITES[0], cycle)) for cycle in (1, 2, 3)]
    assert sizes == [13, 22, 22] and cycles(outcome)["curve"][-1]["ratio"] == 1.0
    assert "the budget is 13, 9 samples are left" in (outcome.run_dir / "sites" / SITES[0] / "site.log").read_text()


def test_one_site_alone_works_and_its_gamma_is_the_mean(config):
    outcome = run(config(data__num_sites=1, federation__min_sites=1))
    assert 0 < cycles(outcome)["gamma_bar"] <= 1


def test_every_site_is_asked_also_where_few_train(config):
    seen = []
    faults = watching(seen)
    run(config(federation__sites_per_round=2), faults=faults)
    asked = {(site, c["config"]["cycle"]) for site, _, q, c, _ in seen if q == "select"}
    assert asked == {(site, cycle) for site in SITES for cycle in (1, 2)}
    assert sum(a == wire.TRAIN for _, a, _, _, _ in seen) == 8


def test_an_absurd_answer_is_not_believed(config):
    def boasts(message, answer):
        reply = answer()
        if wire.EXTRA in reply.content and "num_selected" in reply.content[wire.EXTRA]:
            numbers = {"num_selected": 10**6, "num_labelled": 10**6}
            reply.content = RecordDict({**reply.content, wire.EXTRA: MetricRecord(numbers)})
        return reply

    with server_log() as lines:
        outcome = run(config(), faults={SITES[0]: boasts})
    assert any("not believed" in line for line in lines)
    assert set(cycles(outcome)["labelled"]) == {SITES[1], SITES[2]}


# -- switches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimiser", ["fedprox", "scaffold"])
def test_other_optimisers_run_and_change_the_model(config, optimiser):
    plain = run(config(training__epochs=2))  # in a round of one step both corrections are 0
    other = run(config(training__epochs=2, fairfal__optimiser=optimiser, fairfal__mu=1.0))
    assert other.model_sha256 != plain.model_sha256
    assert cycles(other)["labelled"] == cycles(plain)["labelled"]


def test_scaffolds_variates_begin_anew_with_every_cycle(config):
    seen = []
    run(config(fairfal__optimiser="scaffold"), faults=watching(seen))
    for server_round, is_zero in ((1, True), (2, False), (3, True), (4, False)):
        sent = next(
            wire.modules_of(c)["control"]
            for _, a, _, c, _ in seen
            if a == wire.TRAIN and c["config"]["server_round"] == server_round
        )
        assert all(not value.any() for value in sent.values()) == is_zero


def test_proportional_budgets_follow_the_pools(config):
    uneven = {"data__partition": "dirichlet", "data__alpha": 0.3, "data__min_samples": 6}
    outcome = run(config(**uneven, fairfal__budget_mode="proportional"))
    sizes = {s["site"]: s["num_train"] for s in json.loads((outcome.run_dir / "run.json").read_text())["sites"]}
    counts = {site: len(labelled(outcome, site, 1)) for site in SITES}
    assert sum(counts.values()) == 12 and len(set(sizes.values())) > 1
    assert all(abs(counts[site] - 12 * sizes[site] / 66) < 1 for site in SITES)


def test_global_inverse_budgets_come_from_noisy_counts(config):
    seen = []
    run(config(fairfal__class_budget="global_inverse", fairfal__count_noise=0.01), faults=watching(seen))
    counts = [reply[wire.EXTRA]["noisy_counts"] for _, _, q, _, reply in seen if q == "counts"]
    weights = next(
        c["config"]["class_weights"] for _, _, q, c, _ in seen if q == "select" and c["config"]["cycle"] == 2
    )
    totals = [sum(column) for column in zip(*counts, strict=True)]
    assert sum(totals) == 12
    inverse = [1 / max(total, 1) for total in totals]
    assert weights == pytest.approx([value / sum(inverse) for value in inverse])


def test_multi_label_data_run_and_rules_for_one_label_are_refused(tmp_path):
    data = write_data(tmp_path / "multi.npz", multilabel=True)
    outcome = run(config_of(data, tmp_path / "runs"))
    assert outcome.metrics["aulc_macro_auroc"] is not None
    assert [len(labelled(outcome, SITES[0], cycle)) for cycle in (1, 2)] == [4, 8]
    with pytest.raises(ValueError, match=r"fairfal.rule = 'logo' is for single-label data"):
        run(config_of(data, tmp_path / "runs", fairfal__rule="logo"))


CONTRADICTIONS = {
    "part of a cycle": ({"federation__rounds": 5}, "federation.rounds = 5 is no multiple"),
    "nothing given": ({"fairfal__first_round": "given"}, "nothing is labelled at the start"),
    "scaffold with AdamW": ({"fairfal__optimiser": "scaffold", "training__optimizer": "adamw"}, "use 'sgd'"),
    "picture too small": ({"fairfal__backbone": "cnn4conv"}, "use 16 or more"),
    "first weights": ({"model__weights": "w.safetensors"}, "every cycle begins with random weights"),
    "unknown rule": ({"fairfal__rule": "oracle"}, "fairfal.rule = 'oracle'"),
    "kappa below 1": ({"fairfal__kappa": 0.5}, "fairfal.kappa = 0.5"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_name_the_setting(config, name):
    changes, text = CONTRADICTIONS[name]
    with pytest.raises(SettingsError, match=text.replace(".", r"\.")):
        Settings.from_run_config(config(**changes))


def test_too_few_labelled_sites_end_the_run_with_what_to_do(config):
    with pytest.raises(QuorumError, match="0 sites have labelled samples, 2 needed"):
        run(config(), faults=dict.fromkeys(SITES, in_rounds({1}, silent, wire.ASK)))


def test_the_schema_covers_the_network(config, tmp_path):
    settings = Settings.from_run_config(config())
    site = open_site(settings, {"partition-id": 0}, tmp_path)
    assert len(site.data.splits["train"].ids) == 22 and len(set(site.data.splits["train"].ids)) == 22
