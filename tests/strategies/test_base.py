"""The round protocol: who is chosen, how much each counts, how few exchanges it takes, and what it never does."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from flwr.app import Message

from client_app.site import site_names
from federation import registry, wire
from federation.settings import Settings
from server_app.inprocess import InProcessGrid
from strategies.aggregation import capped_weights
from strategies.base import FederatedStrategy
from strategies.cards import CardError, SiteCard, SiteTable
from strategies.fedavg import FedAvg
from strategies.initial import state_norm
from strategies.progress import Progress
from strategies.selection import evenly_over_modalities

IMAGES, BOTH = ("image",), ("image", "report")


def card(site, modalities=IMAGES, train=100, node_id=0):
    sizes = {"train": train, "val": 10, "test": 10}
    return SiteCard(node_id, site, ("cat",), "multilabel", "s", modalities, "d", sizes, (50,), (50,))


def strategy_of(cards, **changes):
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    found = FedAvg(Settings.from_run_config({"data.num_sites": 20, **dotted}))
    found.table = SiteTable(tuple(cards), {})
    return found


def chosen(strategy, server_round):
    return [found.site for found in strategy.select_sites(server_round)]


# -- selection ----------------------------------------------------------------------------------------------------

TEN = [card(f"site-{index}") for index in range(10)]


@pytest.mark.parametrize("asked", [0, 10, 11])
def test_all_sites_train_unless_fewer_are_asked_for(asked):
    assert chosen(strategy_of(TEN, federation__sites_per_round=asked), 1) == [found.site for found in TEN]


def test_selection_is_seeded_by_round_and_sorted_by_name():
    rounds = [chosen(strategy_of(TEN, federation__sites_per_round=4, seed=3), r) for r in range(1, 40)]
    again = [chosen(strategy_of(TEN, federation__sites_per_round=4, seed=3), r) for r in range(1, 40)]
    assert rounds == again
    assert rounds != [chosen(strategy_of(TEN, federation__sites_per_round=4, seed=4), r) for r in range(1, 40)]
    assert all(names == sorted(set(names)) and len(names) == 4 for names in rounds)
    assert len({tuple(names) for names in rounds}) > 20
    # 39 rounds of 4 of 10: 15.6 each on average; a site outside 6..26 would be 3 standard deviations off
    assert all(6 <= count <= 26 for count in Counter(name for names in rounds for name in names).values())


def test_round_7_draws_the_same_whether_or_not_rounds_1_to_6_happened():
    straight = strategy_of(TEN, federation__sites_per_round=4)
    for server_round in range(1, 7):
        straight.select_sites(server_round)
    assert chosen(straight, 7) == chosen(strategy_of(TEN, federation__sites_per_round=4), 7)


def test_a_site_without_training_samples_is_never_chosen():
    cards = [*TEN[:3], card("empty", train=0)]
    assert "empty" not in chosen(strategy_of(cards), 1)


def test_stratified_selection_takes_every_profile_evenly():
    cards = [card(f"i{index}") for index in range(8)] + [card("b0", BOTH), card("b1", BOTH)]
    strategy = strategy_of(cards, federation__sites_per_round=4, federation__stratify=True)
    for server_round in range(1, 20):
        names = chosen(strategy, server_round)
        assert names == sorted(set(names)) and sum(name.startswith("b") for name in names) == 2
    assert len({tuple(chosen(strategy, server_round)) for server_round in range(1, 20)}) > 5


def test_what_a_small_profile_cannot_give_comes_from_the_others():
    cards = [card(f"i{index}") for index in range(5)] + [card("b0", BOTH)]
    names = [found.site for found in evenly_over_modalities(cards, 5, np.random.default_rng(0))]
    assert "b0" in names and len(set(names)) == 5


# -- weights --------------------------------------------------------------------------------------------------------


class Counted:
    """As much of a reply as `weigh` reads."""

    def __init__(self, num_examples):
        self.num_examples = num_examples


def test_weight_is_the_number_of_examples_or_one():
    assert strategy_of(TEN).weigh(Counted(37), "model") == 37.0
    assert strategy_of(TEN, federation__weighting="equal").weigh(Counted(37), "model") == 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "num_examples"),
        ({"federation.weighting": "equal"}, "equal"),
        ({"method": "fairfal", "fairfal.rounds_per_cycle": 10}, "num_examples"),
        ({"method": "fednca", "training.lr": 0.001}, "equal"),
        ({"method": "fednca", "training.lr": 0.001, "fednca.aggregation": "num_examples"}, "num_examples"),
        ({"method": "fedmpt"}, "equal"),
        ({"method": "fedmpt", "fedmpt.aggregate": "num_examples"}, "num_examples"),
        ({"method": "local"}, "none, nothing is averaged"),
        ({"method": "incongruent"}, "module_samples of each module times trust in the labels"),
        ({"method": "incongruent", "incongruent.agg_mode": "fedavg_full"}, "num_examples times trust in the labels"),
    ],
    ids=str,
)
def test_the_log_says_by_what_the_sites_weigh(changes, said, caplog):
    settings = Settings.from_run_config(changes)
    strategy = registry.find(settings.method).strategy(settings)
    with caplog.at_level("INFO", logger="flwr"):
        strategy.summary()
    assert f"weighting: {said}; quorum" in caplog.text
    if said in ("equal", "num_examples"):
        assert strategy.weigh(Counted(37), "model") == {"equal": 1.0, "num_examples": 37.0}[said]


def weights_of(outcome):
    import json

    lines = [json.loads(line) for line in (outcome.run_dir / "metrics.jsonl").read_text().splitlines()]
    return next(line["weights"] for line in lines if line["kind"] == "round")


def test_no_site_weighs_more_than_its_share_of_the_federation(run_tiny):
    plain = weights_of(run_tiny(federation__rounds=1))
    capped = weights_of(run_tiny(federation__rounds=1, federation__max_site_share=0.25))
    assert max(plain.values()) / sum(plain.values()) > 0.25  # else this shows nothing
    assert capped == pytest.approx(capped_weights(plain, 0.25))


def test_equal_weighting_weighs_every_site_alike(run_tiny):
    assert set(weights_of(run_tiny(federation__rounds=1, federation__weighting="equal")).values()) == {1.0}


# -- the loop -------------------------------------------------------------------------------------------------------


class CountingGrid(InProcessGrid):
    """Counts exchanges (pushes) and what went out in each."""

    def __init__(self, *args):
        super().__init__(*args)
        self.exchanges: list[list[Message]] = []

    def push_messages(self, messages):
        messages = list(messages)
        self.exchanges.append(messages)
        return super().push_messages(messages)


class Notes:
    """An observer that remembers."""

    def __init__(self):
        self.rounds, self.evaluations, self.checkpoints, self.best = [], [], [], {}

    def sites_known(self, table, modules, headline_excluded):
        self.start = {name: {k: v.clone() for k, v in state.items()} for name, state in modules.items()}

    def round_done(self, record):
        self.rounds.append(record)

    def evaluated(self, server_round, split, pools, thresholds):
        self.evaluations.append((server_round, split, tuple(pools[""].sites)))

    def left_out(self, split, entries):
        raise AssertionError("everyone answers here")

    def keep_best(self, server_round, modules):
        self.best[server_round] = {name: dict(state) for name, state in modules.items()}

    def load_best(self, server_round):
        return self.best[server_round]

    def checkpoint(self, progress):
        self.checkpoints.append(progress.server_round)


def play(tiny, strategy_class: type[FederatedStrategy] = FedAvg, sites_config=(), start=(), **changes):
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    settings = Settings.from_run_config({**tiny, **dotted})
    names = site_names(settings)
    nodes = [{"partition-id": index, "num-partitions": len(names)} for index in range(len(names))]
    grid = CountingGrid(nodes, {**settings.flat(), **dict(sites_config)})
    strategy, notes = strategy_class(settings, "exp"), Notes()
    strategy.start(grid, observer=notes, **dict(start))
    return strategy, grid, notes


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_run_of_r_rounds_takes_r_plus_3_exchanges(tiny, rounds):
    _, grid, notes = play(tiny, federation__rounds=rounds)
    # the cards, R trainings that carry the evaluation of the round before, the last validation, the test
    assert len(grid.exchanges) == rounds + 3
    kinds = [{message.metadata.message_type for message in messages} for messages in grid.exchanges]
    assert kinds == [{"query.profile"}, *[{"train"}] * rounds, {"evaluate"}, {"evaluate"}]
    assert [entry[:2] for entry in notes.evaluations] == [(r, "val") for r in range(1, rounds + 1)] + [
        (max(notes.best), "test")
    ]


def test_sites_that_do_not_train_in_a_round_are_asked_for_scores_in_the_same_exchange(tiny):
    _, grid, notes = play(tiny, federation__rounds=2, federation__sites_per_round=2)
    second = Counter(message.metadata.message_type for message in grid.exchanges[2])
    assert second == {"train": 2, "evaluate": 3}
    assert notes.evaluations[0] == (1, "val", tuple(f"site-0{index}" for index in range(5)))
    assert [len(record.accepted) for record in notes.rounds] == [2, 2]


@pytest.mark.parametrize(("every", "measured"), [(0, [4]), (1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3, 4])])
def test_validation_comes_as_often_as_asked_and_always_at_the_end(tiny, every, measured):
    _, _, notes = play(tiny, federation__rounds=4, evaluation__every=every)
    assert [server_round for server_round, split, _ in notes.evaluations if split == "val"] == measured


def test_every_message_expires_with_the_round_and_names_it(tiny):
    _, grid, _ = play(tiny, federation__rounds=1, federation__timeout_s=123)
    assert {message.metadata.ttl for messages in grid.exchanges for message in messages} == {123.0}
    assert [messages[0].metadata.group_id for messages in grid.exchanges] == ["0", "1", "1", "1"]


def test_the_test_split_is_measured_once_on_the_best_validated_model(tiny):
    strategy, _, notes = play(tiny, federation__rounds=3)
    assert [entry for entry in notes.evaluations if entry[1] == "test"] == [
        (strategy.progress.best_round, "test", tuple(f"site-0{index}" for index in range(5)))
    ]
    kept = notes.best[strategy.progress.best_round]
    assert wire.state_sha256(strategy.progress.modules) == wire.state_sha256(kept)


def test_every_round_is_checkpointed_and_the_start_before_it(tiny):
    assert play(tiny, federation__rounds=3)[2].checkpoints == [0, 1, 2, 3]


def test_a_norm_bound_limits_how_far_one_round_moves_the_model(tiny):
    def moved(**changes):
        strategy, _, notes = play(tiny, federation__rounds=1, **changes)
        state = strategy.progress.modules["model"]
        return state_norm({name: value - notes.start["model"][name] for name, value in state.items()})

    assert moved(federation__norm_bound=0.01) <= 0.01 * (1 + 1e-5) < moved()


def test_a_norm_bound_that_no_update_reaches_changes_nothing(tiny):
    plain, bounded = (play(tiny, federation__rounds=1, federation__norm_bound=b)[0] for b in (0, 1e6))
    assert wire.state_sha256(plain.progress.modules) == wire.state_sha256(bounded.progress.modules)


def test_given_initial_arrays_replace_the_seeded_ones(tiny):
    _, _, plain = play(tiny, federation__rounds=1)
    ones = {name: torch.ones_like(value) for name, value in plain.start["model"].items()}
    _, _, notes = play(tiny, federation__rounds=1, start={"initial_arrays": wire.encode(ones)})
    assert wire.state_sha256(notes.start) == wire.state_sha256({"model": ones})


def test_given_initial_arrays_that_do_not_fit_are_refused(tiny):
    with pytest.raises(ValueError, match="module 'model' changed its tensors"):
        play(tiny, start={"initial_arrays": wire.encode({"w": torch.zeros(1)})})


# -- what it never does -----------------------------------------------------------------------------------------------


def test_sites_with_other_settings_than_the_server_are_refused_with_both_values(tiny):
    with pytest.raises(CardError, match=r"the sites' schema is \w{64}, the server's \w{64}: they run other code"):
        play(tiny, sites_config={"model.width": 8})


def losing(modules):
    return {"model": {name: value for name, value in modules["model"].items() if name != "head.bias"}}


def shrinking(modules):
    return {"model": {**modules["model"], "head.bias": modules["model"]["head.bias"][:-1]}}


BROKEN = {
    "a lost tensor": losing,
    "a smaller tensor": shrinking,
    "a lost module": lambda modules: {},
    "another dtype": lambda modules: {"model": {k: v.double() for k, v in modules["model"].items()}},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_smaller_or_other_state_is_never_kept(tiny, name):
    class Broken(FedAvg):
        def combine(self, means, server_round):
            return BROKEN[name](super().combine(means, server_round))

    kept = []

    class Watched(Broken):
        def start(self, *args, observer, **kwargs):
            try:
                return super().start(*args, observer=observer, **kwargs)
            finally:
                kept.append((observer.checkpoints, wire.spec_of(self.progress.modules["model"])))

    with pytest.raises(ValueError, match="module 'model' changed its tensors"):
        play(tiny, Watched)
    ((checkpoints, specs),) = kept
    assert checkpoints == [0] and "head.bias" in specs


def test_resuming_with_changed_data_shows_both_checksums(tiny):
    strategy, _, _ = play(tiny, federation__rounds=1)
    known = {found.site: found.data_sha256 for found in strategy.table.cards}
    progress = Progress(1, dict(strategy.progress.modules))
    with pytest.raises(CardError, match=r"the data of site-03 changed: checksum \w{64}, the run had old"):
        play(tiny, start={"resume_from": progress, "data_sha256": {**known, "site-03": "old"}})


def test_resuming_with_another_model_is_refused(tiny):
    progress = Progress(1, {"model": {"w": torch.zeros(1)}})
    with pytest.raises(ValueError, match="module 'model' changed its tensors"):
        play(tiny, start={"resume_from": progress})


def test_labels_known_at_one_site_only_or_named_never_enter_a_headline():
    rare = SiteCard(1, "a", ("x", "y", "z"), "multilabel", "s", IMAGES, "d", {"train": 9}, (5, 5, 0), (4, 4, 9))
    common = SiteCard(2, "b", ("x", "y", "z"), "multilabel", "s", IMAGES, "d", {"train": 9}, (5, 0, 0), (4, 9, 9))
    strategy = strategy_of([rare, common], evaluation__exclude="x")
    assert strategy._headline_excluded() == {
        "x": "named in evaluation.exclude",
        "y": "positives at 1 training site: it would measure the site",
        "z": "positives at 0 training sites: it would measure the site",
    }
