"""`incongruent` from a config to a result: every switch, every edge case of the specification's section 9, a kill."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from federation import wire
from federation.registry import find
from federation.settings import Settings, SettingsError
from models.incongruent_exchange import CONTEXT
from server_app import inprocess
from strategies.cards import CardError
from strategies.discovery import QuorumError
from strategies.gate import Reply
from tests.faults.drills import KillSwitch, count_moments, killed, run, state_sha256
from tests.strategies.incongruent_wards import LABELS, Listening, Notes, federate, run_config, ward, wards, write

SIZES = {"train": 6, "val": 3, "test": 3}
THREE = {"a-paired": "paired", "c-image": "image", "e-text": "text"}
QUICK = {"federation__rounds": 1, "evaluation__every": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write(tmp_path_factory.mktemp("wards"), wards(THREE, sizes=SIZES))


SWITCHES = {
    "paper": {"fusion": "attention", "attn_mask": "mixed", "impute": True, "infer_impute": True, "mad_lambda": 0.5},
    "s2s": {"fusion": "attention", "attn_mask": "s2s", "head": "linear", "source_input": True},
    "mean": {"fusion": "mean", "cons_mode": "class", "reweight": "pos_weight", "prox_mode": "params"},
    "zero_concat": {"fusion": "zero_concat", "cons_mode": "kl", "reweight": "none", "prox_mode": "output"},
    "scalar gate": {"gate": "scalar", "trust": False, "topk_dtype": "float16", "prox_mode": "off"},
    "shared seed": {"topk_index": "shared_seed", "text_fraction": 0.5, "proto_lambda": 0.0, "decay": "exp"},
    "text limits": {"text_clip": 0.1, "text_sigma": 0.5, "text_fraction": 0.5},
    "fedprox": {"agg_mode": "fedavg_full", "fedprox_mu": 0.01, "agg_count": "client_samples", "fill": "all"},
    "zero_fill": {"agg_mode": "zero_fill", "align_lambda": 0.0, "cons_lambda": 0.0, "decay": "linear"},
    "balance": {"profile_balance": "equal", "clip": 0.0, "topk_ratio": 1.0, "proto_sigma": 0.1},
    "image": {"modality": "image"},
    "text": {"modality": "text", "text_skip": "freeze"},
    "alone": {"alone": True},
    "pooled": {"pooled": True},
}


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_runs_a_round(root, tmp_path, name):
    minimum = 1 if name in ("image", "text", "pooled") else 2
    config = run_config(root, tmp_path, **QUICK, federation__min_sites=minimum, **SWITCHES[name])
    strategy, notes, _ = federate(config)
    assert not notes.records[0].refused and not notes.records[0].missing
    assert all(torch.isfinite(value).all() for value in strategy.export().values())
    started, ended = notes.states[1], notes.states[-1]
    moved = {
        m for m in started if m != CONTEXT and wire.state_sha256({m: started[m]}) != wire.state_sha256({m: ended[m]})
    }
    expected = {
        "image": {"vision", "fusion", "head"},
        "text": {"text", "fusion", "head"},
        "alone": set(),
        "mean": {"vision", "text", "fusion", "head"},
    }
    assert moved == expected.get(name, set(started) - {CONTEXT})


def test_site_contrast_and_leave_one_out_teachers_run_from_the_second_round(root, tmp_path):
    changes = {"moon_weight": 1.0, "loot": True, "public_root": str(root), "public_samples": 4, "loot_loss": "mse"}
    config = run_config(root, tmp_path, **{**QUICK, "federation__rounds": 2, "data__min_samples": 1}, **changes)
    strategy, notes, _ = federate(config)
    assert notes.records[0].extra["c-image"]["loss_contrast"] == 0
    assert notes.records[1].extra["c-image"]["loss_contrast"] > 0
    context = strategy.progress.modules[CONTEXT]
    assert int(context["public_sites"]) == 3 and context["public_sum"].abs().sum() > 0


# -- edge cases (spec 9) -----------------------------------------------------------------------------------------------


def test_label_without_positives_is_undefined_and_harms_nothing(tmp_path):
    rows = [{**row, "label:fox": 0} for row in wards(THREE, sizes=SIZES)]
    strategy, notes, _ = federate(run_config(write(tmp_path / "d", rows), tmp_path, **QUICK))
    context = strategy.progress.modules[CONTEXT]
    assert context["class_weights"][2] == 1 and not context["available"][2]
    assert not strategy.progress.modules["head"]["prior"][2].any()
    assert np.isnan(notes.pools["test-1"][""].histogram().auroc()[2])


def test_one_site_runs_and_its_variance_is_zero(tmp_path):
    data = write(tmp_path / "d", ward("only", "paired", SIZES))
    _, notes, _ = federate(run_config(data, tmp_path, **QUICK, federation__min_sites=1))
    assert notes.summaries["test-1"]["site_variance"] == 0


def test_without_a_paired_site_there_is_no_gate_and_the_run_goes_on(tmp_path):
    data = write(tmp_path / "d", wards({"c-image": "image", "e-text": "text"}, sizes=SIZES))
    config = run_config(data, tmp_path, **QUICK)
    strategy, notes, _ = federate(config)
    assert set(strategy.progress.modules) == {"vision", "text", "fusion", "head", CONTEXT}
    assert {record.extra["e-text"]["loss_contrastive"] for record in notes.records} == {0}
    with pytest.raises(QuorumError, match="no site with pairs"):
        federate({**config, "incongruent.no_pair": "abort"})


def test_without_any_report_there_is_no_text_encoder(tmp_path):
    data = write(tmp_path / "d", wards({"c-image": "image", "d-image": "image"}, sizes=SIZES))
    strategy, notes, _ = federate(run_config(data, tmp_path, **QUICK))
    assert set(strategy.progress.modules) == {"vision", "fusion", "head", CONTEXT}
    assert not any(name.startswith("text") for name in notes.kept["coverage"])


def test_round_without_any_reply_ends_with_the_state_that_was(root, tmp_path):
    def silent(message, answer):
        return None if message.metadata.message_type == wire.TRAIN else answer()

    states = []

    class Kept(find("incongruent").strategy):
        def _check_quorum(self, server_round):
            states.append(self.progress.server_round)
            super()._check_quorum(server_round)

    settings = Settings.from_run_config(run_config(root, tmp_path, **QUICK))
    nodes = [{"partition-id": index, "num-partitions": 3} for index in range(3)]
    strategy, notes = Kept(settings, "silent"), Notes()
    with pytest.raises(QuorumError, match="0 usable replies"):
        strategy.start(Listening(nodes, settings.flat(), dict.fromkeys(range(3), silent)), observer=notes)
    assert states == [0] and len(notes.states) == 2
    assert wire.state_sha256(strategy.progress.modules) == wire.state_sha256(notes.states[1])


@pytest.fixture(scope="module")
def ended(root, tmp_path_factory):
    return federate(run_config(root, tmp_path_factory.mktemp("runs"), **QUICK, topk_ratio=1.0))


def reply_of(ended, site, **changes):
    """An honest reply of a site as the gate hands it on, with changes to its numbers."""
    strategy, _, grid = ended
    number = [card.site for card in strategy.table.cards].index(site)
    content = grid.trainings()[number][1]
    modules = {n.removeprefix(wire.MODULE): wire.decode(content[n]) for n in content if n.startswith(wire.MODULE)}
    numbers = {wire.METRICS: dict(content[wire.METRICS]), wire.EXTRA: {**content[wire.EXTRA], **changes}}
    return Reply(site, 1, modules, {}, numbers, 1.0)


@pytest.mark.parametrize(
    ("site", "changes", "message"),
    [
        ("a-paired", {"n_vision": 7}, "counts 7 samples behind vision"),
        ("c-image", {"n_gate": 1}, "counts 1 samples behind gate"),
        ("e-text", {"n_vision": 6}, "counts 6 samples behind vision"),
        ("e-text", {"trust": 1.5}, "trust in its labels is 1.5"),
        ("e-text", {"trust": -0.1}, "trust in its labels is -0.1"),
    ],
)
def test_reply_that_claims_more_than_its_card_is_refused(ended, site, changes, message):
    ended[0].received(reply_of(ended, site))
    with pytest.raises(wire.WireError, match=message):
        ended[0].received(reply_of(ended, site, **changes))


def test_prototype_sums_longer_than_the_reports_allow_are_refused(ended):
    reply = reply_of(ended, "e-text")
    reply.modules["prototypes"]["sums"] = np.full((3, 8), 10.0, np.float32)
    with pytest.raises(wire.WireError, match="text directions add up to"):
        ended[0].received(reply)
    ended[0]._sums.clear()


def test_huge_site_is_held_to_its_share(root, tmp_path):
    strategy, _, _ = federate(run_config(root, tmp_path, **QUICK, federation__max_site_share=0.34))
    reply = Reply(
        "a-paired", 1, {}, {}, {wire.METRICS: {"num_examples": 6000}, wire.EXTRA: {"n_head": 6000, "trust": 1.0}}, 1
    )
    assert strategy.weigh(reply, "head") == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pairs": 7}, "counts 7 pairs of 6 images"),
        ({"images": 9}, "counts 9 images"),
        ({"pair_counts": [0, 0]}, "pairs of labels do not fit"),
    ],
)
def test_card_that_contradicts_itself_is_named(ended, changes, message):
    strategy = find("incongruent").strategy(ended[0].settings)
    cards = [
        replace(card, extra={**card.extra, **(changes if card.site == "a-paired" else {})})
        for card in ended[0].table.cards
    ]
    strategy.table = replace(ended[0].table, cards=tuple(cards))
    with pytest.raises(CardError, match=f"the card of a-paired contradicts itself: .*{message}"):
        strategy.network(LABELS, "multilabel")


def test_site_that_lies_about_its_profile_is_refused_by_the_update_gate(root, tmp_path):
    """An image-only site that sends a text encoder, as if it had pairs."""

    def liar(message, answer):
        reply = answer()
        if message.metadata.message_type == wire.TRAIN:
            reply.content["module.text"] = wire.encode({"projection.bias": np.ones(8, np.float32)})
        return reply

    _, notes, _ = federate(run_config(root, tmp_path, **QUICK), {"c-image": liar})
    assert [entry["site"] for entry in notes.records[0].refused] == ["c-image"]
    assert "not declared 'module.text'" in notes.records[0].refused[0]["reason"]
    assert "c-image" not in notes.kept["coverage"]["vision.projection.weight"]["sites"]


MASKED = {"privacy__secure_sum": True, "topk_index": "shared_seed", "proto_lambda": 0.0}


def test_masks_change_nothing_of_the_noised_text_but_its_fixed_point(tmp_path):
    """Three sites with reports, so that a sum is made of the text; noise comes before the masks, whose seeds vary."""
    data, ended = write(tmp_path / "d", wards(sizes=SIZES)), []
    few = {"federation__min_sites": 3, "coverage": "warn"}  # the gate has two sites and stays frozen
    for limits in ({"text_clip": 1e-9}, {"text_clip": 0.5, "text_sigma": 0.2}):
        for masks in ({**MASKED, "privacy__secure_sum": False}, MASKED):
            config = run_config(data, tmp_path, **QUICK, **few, **limits, **masks)
            strategy, _, _ = federate(config)
            ended.append(torch.cat([value.reshape(-1) for value in strategy.progress.modules["text"].values()]))
    assert float((ended[0] - ended[1]).abs().max()) < 1e-4 and float((ended[2] - ended[3]).abs().max()) < 1e-4
    noise = (ended[3] - ended[1]).double()
    assert float(noise.std()) == pytest.approx(0.1 / np.sqrt(3), rel=0.1)  # a third of each site's, and 1/300 of clip


CONTRADICTIONS = {
    "above incongruent.start": {"start": 0.1, "end": 0.2},
    "not divisible by the 4 heads": {"dim": 10},
    "needs public samples": {"loot": True},
    "needs incongruent.impute": {"infer_impute": True},
    "sends nothing": {"alone": True, "pooled": True},
    "no module to fill in": {"modality": "image", "agg_mode": "zero_fill"},
    "has no meaning here": {"federation__weighting": "equal"},
    "set text_clip too": {"text_sigma": 1.0},
    "cuts noise of standard deviation text_clip . text_sigma = 4; use privacy.secure_range = 20": {
        "privacy__secure_range": 19.0,
        "text_clip": 2.0,
        "text_sigma": 2.0,
        **MASKED,
    },
    "method = 'incongruent' with privacy.dp = 'local'": {
        "privacy__dp": "local",
        "topk_ratio": 1.0,
        "text_clip": 1.0,
        "text_sigma": 1.0,
    },
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_settings_that_contradict_each_other_are_refused_at_the_start(root, tmp_path, message):
    with pytest.raises(SettingsError, match=message):
        inprocess.run(run_config(root, tmp_path, **CONTRADICTIONS[message]))


# -- the same bits -----------------------------------------------------------------------------------------------------


def test_killed_between_two_rounds_and_resumed_it_ends_in_the_same_bits(root, tmp_path):
    """Residuals, the text between uploads, prototypes, coverage and thresholds all come back."""
    config = run_config(root, tmp_path / "whole", federation__rounds=3, critical_labels="cat")
    moments, whole = count_moments(config)
    again = {**config, "reporting.runs_dir": str(tmp_path / "killed")}
    assert killed(again, KillSwitch(moments // 2))
    (folder,) = (tmp_path / "killed").glob("*-incongruent")
    resumed = run({**again, "resume": str(folder)})
    assert resumed.model_sha256 == whole.model_sha256
    assert state_sha256(resumed.run_dir) == state_sha256(whole.run_dir)
    assert (resumed.run_dir / "coverage.json").read_bytes() == (whole.run_dir / "coverage.json").read_bytes()
