"""`incongruent` over whole federations of tiny hospitals: who is sent what, what stays untouched, what is measured."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from federation import wire
from federation.blocks import four_blocks
from federation.cooccurrence import PAIR_COUNTS, false_positive_lift
from models.incongruent_exchange import CONTEXT, PROTOTYPES
from strategies.aggregation import StreamingMean
from strategies.cards import CardError
from strategies.incongruent import CoverageError
from strategies.scheduling import paired_quota
from tests.strategies.incongruent_wards import LABELS, federate, run_config, ward, wards, write

CANARY = "xylophonitis"
SMALL = {"train": 8, "val": 4, "test": 4}
THREE = {"a-paired": "paired", "c-image": "image", "e-text": "text"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    rows = wards()
    for row in rows:
        row["report"] = row["report"] and f"{row['report']}. {CANARY}"
    return write(tmp_path_factory.mktemp("wards"), rows)


@pytest.fixture(scope="module")
def run(root, tmp_path_factory):
    """A federation of five sites over two rounds with 1 % of the vision change, and everything that was said in it."""
    config = run_config(root, tmp_path_factory.mktemp("runs"), topk_ratio=0.01, critical_labels="cat", model__width=32)
    return federate(config)


def records_of(content):
    return {name.removeprefix(wire.MODULE) for name in content if name.startswith(wire.MODULE)}


def by_profile(run, profile):
    return [(sent, got) for sent, got in run[2].trainings() if sent[wire.CONFIG]["profile"] == profile]


# -- who is sent what (spec 5.3) ---------------------------------------------------------------------------------------


def test_image_only_site_is_never_sent_the_text_encoder_and_sends_none(run):
    assert len(by_profile(run, "image")) == 4
    for sent, got in by_profile(run, "image"):
        assert records_of(sent) == {"vision", "fusion", "head", CONTEXT}
        assert records_of(got) == {"vision", "fusion", "head"}


def test_text_only_site_is_never_sent_the_image_encoder_and_sends_none(run):
    rounds = [(records_of(sent), records_of(got)) for sent, got in by_profile(run, "text")]
    assert rounds == [
        ({"text", "fusion", "head", CONTEXT}, {"fusion", "head", PROTOTYPES}),  # the text goes up in even rounds
        ({"text", "fusion", "head", CONTEXT}, {"text", "fusion", "head", PROTOTYPES}),
    ]


def test_every_message_holds_modules_of_the_profile_only(run):
    """Evaluations too: no message of the whole run brings the text encoder to a site without reports."""
    images_only = {site for site, profile in run[0]._profiles.items() if profile == "image"}
    cards = {got[wire.CARD]["site"] for action, _, got in run[2].heard if action == wire.PROFILE}
    assert images_only < cards
    node_profiles = {}
    for card in run[0].table.cards:
        node_profiles[card.node_id] = run[0]._profiles[card.site]
    for action, sent, node in run[2].addressed:
        if action != wire.PROFILE and node_profiles[node] == "image":
            assert "text" not in records_of(sent) and "gate" not in records_of(sent)


def test_one_percent_of_the_vision_change_is_three_percent_of_its_bytes(run):
    for sent, got in by_profile(run, "image"):
        dense, sparse = (wire.size_bytes(type(sent)({"m": part[f"{wire.MODULE}vision"]})) for part in (sent, got))
        assert dense > 100_000 and sparse <= 0.03 * dense


def test_no_word_of_a_report_is_in_any_record(run):
    for _, sent, got in run[2].heard:
        for content in (sent, got):
            assert CANARY.encode() not in b"".join(wire.digest_parts(content))


def test_absent_modules_do_not_move_by_sites_that_lack_them(run):
    """The text encoder moves in the one round in which it is sent, the gate by paired sites alone."""
    first, second = (run[1].states[i] for i in (2, 3))
    start = run[1].states[1]
    assert wire.state_sha256({"t": first["text"]}) == wire.state_sha256({"t": start["text"]})
    assert wire.state_sha256({"t": second["text"]}) != wire.state_sha256({"t": first["text"]})
    for card in run[0].table.cards:
        gate = [int(record.extra[card.site]["n_gate"]) for record in run[1].records]
        assert gate == ([12, 12] if run[0]._profiles[card.site] == "paired" else [0, 0])


# -- coverage and figures (spec 5.5, 7) --------------------------------------------------------------------------------


def test_coverage_names_every_tensor_with_its_sites(run):
    found = run[1].kept["coverage"]
    assert set(found) == set(run[0].export())
    assert found["text.projection.weight"] == {
        "updates": 3,
        "sites": ["a-paired", "b-paired", "e-text"],
        "last_round": 2,
    }
    assert found["gate.linear.weight"] == {"updates": 4, "sites": ["a-paired", "b-paired"], "last_round": 2}
    assert found["vision.projection.weight"]["sites"] == ["a-paired", "b-paired", "c-image", "d-image"]
    json.dumps(found)


def test_four_blocks_of_every_view_are_those_of_the_histograms(run):
    pools, found = run[1].pools["test-2"], run[1].summaries["test-2"]
    positives = np.sum([card.positives for card in run[0].table.cards], axis=0)
    for view in ("", "both", "image", "text"):
        pool = pools[view]
        by_site = {site: pool.histogram(site).auroc() for site in pool.sites}
        for name, value in four_blocks(pool.histogram().auroc(), by_site, positives).items():
            key = f"{view}_{name}" if view else name
            if key in found:
                assert found[key] == pytest.approx(value, nan_ok=True), key
    assert {"both_macro_auroc", "image_tail_auroc", "text_site_variance", "site_variance"} <= set(found)
    sizes = {view: int(sum(pools[view].histogram().support()).max()) for view in pools}
    assert sizes == {"": 30, "both": 12, "image": 24, "text": 18}


def test_critical_label_is_measured_at_the_threshold_of_validation(run):
    strategy, notes, _ = run
    histogram = notes.pools["val-2"][""].histogram()
    thresholds = histogram.recall_thresholds(0.95)
    assert torch.equal(strategy._critical, torch.from_numpy(thresholds))
    assert histogram.sensitivity(thresholds)[0] >= 0.95
    test = notes.pools["test-2"][""].histogram() if "test-2" in notes.pools else None
    if test is not None:
        assert notes.summaries["test-2"]["recall of cat"] == pytest.approx(test.sensitivity(thresholds)[0])
    assert set(strategy.state_dict()) >= {"critical", "covered/text"}


def test_imputation_without_a_paired_site_is_refused_with_the_profiles(tmp_path):
    small = write(tmp_path / "data", wards({"c-image": "image", "e-text": "text"}, sizes=SMALL))
    with pytest.raises(CardError, match=r"found c-image 'image', e-text 'text'; let such a site take part"):
        federate(run_config(small, tmp_path / "runs", impute=True))


def test_local_epochs_outside_those_of_the_method_are_told_once(root, tmp_path, caplog):
    with caplog.at_level("WARNING", logger="flwr"):
        federate(run_config(root, tmp_path, epochs_image=3, federation__rounds=1, topk_ratio=1.0))
    said = [record.getMessage() for record in caplog.records if "local epochs" in record.getMessage()]
    assert len(said) == 1
    assert said[0].endswith("epochs_paired = 1 (expected 3 to 5), epochs_image = 3 (expected 1 to 2)")


def test_module_that_nobody_trains_ends_the_run_unless_warned(root, tmp_path):
    """The text encoder is always sent in the last round; its only sites fall silent there."""
    rows = wards({"a-image": "image", "b-image": "image", "e-text": "text"}, sizes=SMALL)
    small = write(tmp_path / "data", rows)

    def silent(message, answer):
        return None if message.metadata.message_type == wire.TRAIN else answer()

    config = run_config(small, tmp_path, federation__rounds=1, federation__min_sites=2)
    with pytest.raises(CoverageError, match="nobody ever trained text"):
        federate(config, {"e-text": silent})
    _, notes, _ = federate({**config, "incongruent.coverage": "warn"}, {"e-text": silent})
    assert notes.kept["coverage"]["text.projection.weight"] == {"updates": 0, "sites": [], "last_round": 0}
    assert [entry["site"] for entry in notes.records[0].missing] == ["e-text"]  # the others went on


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Three sites where one label of eight samples is there with another, or neither is."""
    rows = wards(THREE, sizes={"train": 40, "val": 8, "test": 8})
    for number, row in enumerate(rows):
        row |= {"label:cat": int(number % 8 == 0), "label:dog": int(number % 8 == 0)}
    return write(tmp_path_factory.mktemp("together"), rows)


@pytest.mark.parametrize("head", ["label_attn", "linear"])
def test_lift_of_false_positives_is_over_pairs_of_the_global_prior(together, tmp_path, head):
    config = run_config(together, tmp_path, head=head, federation__rounds=1, evaluation__every=0)
    strategy, notes, grid = federate(config)
    summary, pool = notes.summaries["test-1"], notes.pools["test-1"][""]
    told = [{name: np.array(v).reshape(3, 3) for name, v in pool.counts[site].items()} for site in pool.sites]
    counts = np.stack([sum(site[name] for site in told) for name in PAIR_COUNTS])
    assert (counts[0] + counts[2]).sum() > 0 and len(told) == 3
    lift, pairs, left_out = false_positive_lift(counts, strategy._prior().numpy())
    assert pairs + left_out == 2  # cat and dog, both ways
    assert summary["cooc_fp_lift_pairs"] == pairs and summary["cooc_fp_lift_left_out"] == left_out
    assert summary["cooc_fp_lift"] == (None if np.isnan(lift) else lift)
    assert not set(PAIR_COUNTS) & set(pool.summary(None, set(), "a-paired"))
    evaluations = [got for action, _, got in grid.heard if action == wire.EVALUATE]
    assert evaluations and all(got["extra.test"] or got["extra.val"] for got in evaluations if "extra.test" in got)
    if head == "label_attn":
        assert torch.equal(strategy.progress.modules["head"]["prior"], strategy._prior().float())


@pytest.fixture
def judged(together, tmp_path, monkeypatch):
    """``judged(split, by_site)``: the figures of an ended run for other counts of cat (0) and dog (1) at its sites."""
    config = run_config(together, tmp_path, federation__rounds=1, evaluation__every=0)
    strategy, notes, _ = federate(config)

    def figures(split, *by_site):
        pools = notes.pools["test-1"]
        shown = {}
        for site, values in zip(pools[""].sites, by_site, strict=True):
            tables = np.zeros((4, 3, 3), np.int64)
            tables[:, 0, 1] = values
            shown[site] = {name: table.ravel().tolist() for name, table in zip(PAIR_COUNTS, tables, strict=True)}
        monkeypatch.setattr(pools[""], "counts", shown)
        monkeypatch.setattr(strategy, "_split", split)
        found = strategy.figures(pools)
        return tuple(found[f"cooc_fp_lift{name}"] for name in ("", "_pairs", "_left_out"))

    return figures


HIDDEN = (-1, -1, -1, -1)


def test_hidden_counts_are_left_out_of_the_sums_and_a_lift_above_two_is_warned_of(judged, caplog):
    with caplog.at_level("WARNING", logger="flwr"):
        assert judged("test", (10, 4, 40, 4), HIDDEN, (10, 2, 10, 6)) == (pytest.approx(1.5), 1, 1)
        assert judged("val", (10, 5, 10, 1), HIDDEN, HIDDEN) == (pytest.approx(5), 1, 1)
        assert judged("test", HIDDEN, HIDDEN, HIDDEN) == (None, 0, 2)
        assert judged("test", (10, 4, 10, 2), HIDDEN, HIDDEN) == (pytest.approx(2), 1, 1)
    assert "absent labels" not in caplog.text
    with caplog.at_level("WARNING", logger="flwr"):
        judged("test", (10, 5, 10, 1), HIDDEN, HIDDEN)
    assert "absent labels are called 5.0 times as often" in caplog.text and "mean of 1 pair" in caplog.text


@pytest.mark.parametrize(
    ("record", "name", "values", "reason"),
    [
        ("extra.test", "with_i", [0] * 8, "8 counts of pairs"),
        ("extra.test", "with_i", [9] * 9, "8 samples"),
        ("extra.test", "without_i_called", [2**62] * 9, "8 samples"),
        ("extra.test", "with_i_called", [7] * 9, "more calls than samples"),
        ("extra.test", "with_i", [-1] * 9, "in part"),
        ("extra.test@image", "with_i", [0] * 9, "9 counts of pairs"),
    ],
)
def test_counts_that_no_site_can_have_are_refused_and_the_run_goes_on(together, tmp_path, record, name, values, reason):
    def liar(message, answer):
        reply = answer()
        if record in reply.content:
            reply.content[record][name] = values
        return reply

    config = run_config(together, tmp_path, federation__rounds=1, evaluation__every=0)
    _, notes, _ = federate(config, {"c-image": liar})
    assert [entry["site"] for entry in notes.left] == ["c-image"] and reason in notes.left[0]["reason"]
    assert notes.pools["test-1"][""].sites == ["a-paired", "e-text"]


# -- the mean (spec 5.4) -----------------------------------------------------------------------------------------------


def test_with_pairs_everywhere_the_mean_is_that_of_fedavg(tmp_path):
    """r = 1, trust 1, everything sent whole: every module is the mean by samples of what all sites sent."""
    rows = ward("a", "paired", SMALL) + ward("b", "paired", {**SMALL, "train": 6}, shift=1)
    config = run_config(
        write(tmp_path / "data", rows),
        tmp_path,
        topk_ratio=1.0,
        text_every=1,
        federation__rounds=1,
        evaluation__every=0,
    )
    strategy, notes, grid = federate(config)
    trainings = grid.trainings()
    start = {name: state for name, state in notes.states[1].items() if name != CONTEXT}
    assert set(start) == {"vision", "text", "gate", "fusion", "head"}
    for module, state in start.items():
        mean = StreamingMean()
        for site, weight, (_, got) in zip("ab", (8, 6), trainings, strict=True):
            mean.add(site, wire.decode(got[f"{wire.MODULE}{module}"]), weight)
        for name, change in mean.result().items():
            expected = state[name] + torch.from_numpy(change) if state[name].is_floating_point() else change
            assert np.array_equal(strategy.progress.modules[module][name], expected), (module, name)


def test_full_averaging_dilutes_a_branch_that_partial_averaging_does_not(tmp_path):
    """One of two equal sites has reports: its text change counts whole, or half under FedAvg of everything."""
    rows = ward("a", "paired", SMALL) + ward("b", "image", SMALL)
    data, moved = write(tmp_path / "data", rows), {}
    for mode in ("partial", "fedavg_full"):
        config = run_config(
            data, tmp_path, agg_mode=mode, text_every=1, topk_ratio=1.0, federation__rounds=1, evaluation__every=0
        )
        strategy, notes, grid = federate(config)
        sent = wire.tensors(wire.decode(grid.trainings()[0][1][f"{wire.MODULE}text"]))["projection.weight"]
        moved[mode] = (
            strategy.progress.modules["text"]["projection.weight"] - notes.states[1]["text"]["projection.weight"]
        )
        moved[mode] /= sent
    assert torch.allclose(moved["partial"].nanmedian(), torch.tensor(1.0), atol=1e-3)
    assert torch.allclose(moved["fedavg_full"].nanmedian(), torch.tensor(0.5), atol=1e-3)


# -- the schedule (spec 5.2) -------------------------------------------------------------------------------------------


def test_every_round_holds_its_quota_of_paired_sites(run):
    strategy = run[0]
    strategy.settings = strategy.settings.model_copy(
        update={"federation": strategy.settings.federation.model_copy(update={"sites_per_round": 3, "rounds": 20})}
    )
    drawn = [strategy.select_sites(server_round) for server_round in range(1, 21)]
    for server_round, cards in enumerate(drawn, 1):
        paired = sum(strategy._profiles[card.site] == "paired" for card in cards)
        assert len(cards) == 3 and paired >= paired_quota(3, 2, server_round, 0.6, 0.2, 10)
        assert [card.site for card in cards] == sorted(card.site for card in cards)
    assert [card.site for card in strategy.select_sites(7)] == [card.site for card in drawn[6]]


def test_labels_are_the_settings(run):
    assert run[0].table.labels == LABELS
