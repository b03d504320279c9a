"""`incongruent` at one site: what it reads, trains, keeps and sends, and what happens where something is missing."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from client_app import handler, incongruent, incongruent_memory, incongruent_samples, incongruent_teachers
from client_app.egress import verify
from client_app.incongruent_objective import Around, objective
from client_app.incongruent_samples import read_samples
from client_app.site import open_site
from client_app.training import Diverged, Job
from datasets.records import IMAGE, REPORT, DataError
from federation import wire
from federation.cooccurrence import PAIR_COUNTS
from federation.differential_privacy import update_norm
from federation.metrics import ScoreHistogram
from federation.settings import Settings
from models.incongruent import MODULES, IncongruentNetwork, split_state
from models.incongruent_exchange import CONTEXT, PROTOTYPES
from models.incongruent_prototypes import empty_library
from strategies.initial import seeded
from tests.strategies.incongruent_wards import LABELS, run_config, ward, write

SIZES = {"train": 8, "val": 4, "test": 4}


@pytest.fixture
def at(tmp_path):
    """``at(profile, rows=None, **changes)``: a site, the modules that it is sent, and ``job(round, last_accepted)``."""

    def make(profile="paired", rows=None, consents=None, **changes):
        root = write(tmp_path / f"data-{profile}", rows or ward("a", profile, SIZES))
        hospital = {"site": "a", "data-root": str(root), "state-dir": str(tmp_path / "state")}
        settings = Settings.from_run_config(run_config(root, tmp_path / "runs", **{"federation__rounds": 9, **changes}))
        site = replace(open_site(settings, hospital, tmp_path), consents=consents)
        network = seeded(lambda: incongruent.build(LABELS, settings, MODULES), settings)
        context = {"class_weights": torch.ones(3), **empty_library(3, settings.options.dim)._asdict()}
        states = split_state(network)
        sent = {name: states[name] for name in settings.options.site_modules(profile)}

        def job(server_round=1, last_accepted=0):
            config = {"profile": profile}
            return Job(settings, server_round, last_accepted, config, torch.device("cpu"))

        return site, {**sent, CONTEXT: context}, job

    return make


@pytest.fixture
def trained(monkeypatch):
    """States of the networks as they are after training, in the order of the trainings."""
    seen = []
    original = incongruent.keep_model

    def keep(network, site, job):
        seen.append({name: {k: v.clone() for k, v in state.items()} for name, state in split_state(network).items()})
        original(network, site, job)

    monkeypatch.setattr(incongruent, "keep_model", keep)
    return seen


def same(one, other):
    return wire.state_sha256({"m": one}) == wire.state_sha256({"m": other})


# -- what is absent (spec 3.2, 9) --------------------------------------------------------------------------------------


def test_planted_nan_in_an_absent_image_changes_no_bit(at, monkeypatch):
    rows = ward("a", "paired", SIZES)
    for row in rows[::3]:
        row["image"] = ""
    site, modules, job = at(rows=rows)
    clean = incongruent.train(site, modules, job())
    original = incongruent_samples.load_batch

    def planted(split, picked, *rest):
        images, targets = original(split, picked, *rest)
        images[~torch.from_numpy(split.present[picked, IMAGE])] = float("nan")
        return images, targets

    monkeypatch.setattr(incongruent_samples, "load_batch", planted)
    dirty = incongruent.train(site, modules, job())
    assert set(clean.modules) == set(dirty.modules)
    for name, state in clean.modules.items():
        assert wire.content_sha256(RecordDict({"m": wire.encode(state)})) == wire.content_sha256(
            RecordDict({"m": wire.encode(dirty.modules[name])})
        ), name


def planting(monkeypatch, bad):
    """From here on the images of these rows of the training split are not numbers."""
    original = incongruent_samples.load_batch

    def planted(split, picked, *rest):
        images, targets = original(split, picked, *rest)
        images[torch.from_numpy(np.isin(picked, bad))] = float("nan")
        return images, targets

    monkeypatch.setattr(incongruent_samples, "load_batch", planted)


@pytest.mark.parametrize("profile", ["paired", "image"])
def test_one_bad_image_of_200_is_left_out_and_three_are_an_error(at, monkeypatch, profile):
    sizes = {"train": 200, "val": 4, "test": 4}
    site, modules, job = at(profile, rows=ward("a", profile, sizes), impute=True, training__batch_size=50)
    planting(monkeypatch, [7])
    update = incongruent.train(site, modules, job())
    assert np.isfinite(update.loss_sum)
    for state in update.modules.values():
        assert all(torch.as_tensor(value).double().isfinite().all() for value in state.values())
    assert "of 200 samples seen in all epochs 1 were left out for an image" in (site.folder / "site.log").read_text()
    planting(monkeypatch, [7, 8, 9])
    with pytest.raises(DataError, match="3 of 200 images"):
        incongruent.train(site, modules, job())


def test_sample_whose_scores_are_not_finite_is_left_out_of_the_batch(at, monkeypatch):
    """The rest gives the loss that it gives alone; a batch with nothing left costs nothing."""
    site, modules, job = at(align_lambda=0.0, prox_mode="off")
    original = IncongruentNetwork.fuse

    def fuse(self, image, text, present, **named):
        seen = original(self, image, text, present, **named)
        factors = torch.ones(len(present), 1)
        factors[0] = float("nan") if len(present) > 2 else 1.0
        return seen._replace(logits=seen.logits * factors)

    alone = parts_of(site, modules, job(), [1, 2])[0]
    monkeypatch.setattr(IncongruentNetwork, "fuse", fuse)
    value, totals = parts_of(site, modules, job(), [0, 1, 2])
    assert value.isfinite() and totals["bad logits"] == 1 and totals["samples"] == 2
    assert value.item() == pytest.approx(alone.item(), rel=0.5)  # the dropout of another draw
    planting(monkeypatch, [0, 1])
    value, totals = parts_of(site, modules, job(), [0, 1])
    assert value == 0 and totals["bad images"] == 2 and totals["samples"] == 0


def test_scores_that_are_not_finite_for_more_than_one_in_a_hundred_are_divergence(at):
    site, modules, job = at()
    network, _ = incongruent._opened(site, {n: s for n, s in modules.items() if n in MODULES}, job(), "train")
    incongruent._check_left_out(network, Counter({"samples": 99, "bad logits": 1}), site, job())
    with pytest.raises(Diverged, match="2 of 100 samples"):
        incongruent._check_left_out(network, Counter({"samples": 98, "bad logits": 2}), site, job())


@pytest.mark.parametrize("profile", ["image", "text"])
def test_site_of_one_modality_leaves_gate_and_imputation_as_they_came(at, trained, profile):
    """With MIN it is sent the gate and the net that it can use; none of their bits move, and neither is sent back."""
    site, modules, job = at(profile, impute=True, topk_ratio=1.0)
    update = incongruent.train(site, modules, job(2))
    own, net = ("vision", "min_v2t") if profile == "image" else ("text", "min_t2v")
    assert set(trained[0]) == {own, "gate", "fusion", "head", net}
    assert same(trained[0]["gate"], modules["gate"]) and same(trained[0][net], modules[net])
    assert not same(trained[0][own], modules[own]) and not same(trained[0]["fusion"], modules["fusion"])
    assert set(update.modules) - {PROTOTYPES} == {own, "fusion", "head"}
    assert update.extra["n_gate"] == 0 and update.extra[f"n_{own}"] == 8


def test_odd_reports_and_images_are_absent_or_cut(at):
    rows = ward("a", "paired", SIZES)
    rows[0]["report"], rows[1]["report"] = " \n ", "word " * 500
    rows[2]["patient"], rows[2]["report"] = rows[3]["patient"], rows[3]["report"]  # one report, two films
    site, _, job = at(rows=rows)
    samples = read_samples(site.data.splits["train"], job().settings, MODULES)
    assert samples.there[:, REPORT].tolist() == [False] + [True] * 7
    assert samples.tokens.shape[1] == 128
    assert samples.studies[2] == samples.studies[3] and len(samples.studies.unique()) == 7


def test_log_tells_what_was_dropped_unreadable_or_cut(at, tmp_path):
    rows = ward("a", "paired", SIZES)
    rows[1]["report"], rows[2]["report"] = "word " * 500, ""
    _, _, job = at()
    root = write(tmp_path / "broken", rows)
    for row in (rows[0], rows[2]):
        (root / row["image"]).write_bytes(b"no image")
    node = {"site": "a", "data-root": str(root), "state-dir": str(tmp_path / "state")}
    site = replace(open_site(job().settings, node, tmp_path), consents=None)
    handler.profile(site, job().settings, incongruent)
    log = (site.folder / "site.log").read_text()
    assert "train: 7 samples stay; dropped: 1, images that could not be read: 2" in log
    assert "train: 1 of 7 reports are longer than the text encoder reads and were cut" in log
    assert "val:" not in log and rows[0]["patient"] not in log


def test_image_that_cannot_be_decoded_is_an_absent_one(at, tmp_path):
    rows = ward("a", "paired", SIZES)
    site, modules, job = at(rows=rows)
    root = write(tmp_path / "broken", rows)
    (root / rows[0]["image"]).write_bytes(b"no image")
    node = {"site": "a", "data-root": str(root), "state-dir": str(tmp_path / "state")}
    site = replace(open_site(job().settings, node, tmp_path), consents=None)
    assert site.data.splits["train"].unreadable == 1
    update = incongruent.train(site, modules, job(2))
    assert update.extra["n_vision"] == 7 and update.extra["n_gate"] == 7 and update.extra["n_text"] == 8


def test_split_holds_a_modality_that_the_profile_lacks(at):
    """Profiles are those of the training samples; a test image at a site of reports is not looked at."""
    rows = ward("a", "text", SIZES)
    rows[-1]["image"] = "late.png"
    site, modules, job = at("text", rows=rows)
    scores = incongruent.evaluate(site, modules, job(2), "test")
    assert {view: found.num_examples for view, found in scores.items()} == {"": 4, "both": 0, "image": 0, "text": 4}


# -- the objective (spec 4) --------------------------------------------------------------------------------------------


def parts_of(site, modules, job, rows, profile="paired", precision=None):
    network, samples = incongruent._opened(site, {n: s for n, s in modules.items() if n in MODULES}, job, "train")
    totals = Counter()
    around = Around(profile, incongruent._frozen_copy(network), None, modules[CONTEXT], 8, 8, precision)
    draws = torch.Generator().manual_seed(0)
    loss = objective(network.train(), samples, around, job.settings.options, draws, totals)
    value = loss(*samples.load(np.asarray(rows), "none", draws))
    value.backward()
    return value.detach(), totals


def test_one_pair_in_a_batch_has_no_contrastive_term(at):
    site, modules, job = at()
    assert parts_of(site, modules, job(), [0])[1]["contrastive"] == 0
    assert parts_of(site, modules, job(), [0, 1, 2])[1]["contrastive"] > 0


def test_batch_without_a_known_label_costs_nothing_and_has_no_nan(at):
    site, modules, job = at(align_lambda=0.0, prox_mode="off")
    site.data.splits["train"].targets.setflags(write=True)
    site.data.splits["train"].targets[:2] = -1
    value, _ = parts_of(site, modules, job(), [0, 1])
    assert value == 0


def test_losses_stay_in_float32_where_the_network_is_in_half_precision(at):
    site, modules, job = at(mad_lambda=0.5)
    exact, _ = parts_of(site, modules, job(), range(8))
    rough, totals = parts_of(site, modules, job(), range(8), precision=torch.bfloat16)
    assert rough.dtype == torch.float32 and torch.isfinite(rough)
    assert rough.item() == pytest.approx(exact.item(), rel=0.1)  # bfloat16 keeps 8 bits
    assert totals["distillation"] >= 0


def test_teacher_is_the_global_model_while_the_site_goes_on_with_its_own_text(at, monkeypatch):
    site, modules, job = at("text")
    incongruent.train(site, modules, job(1))
    seen, original = [], incongruent._fitted

    def fitted(network, samples, rows, around, *rest):
        seen.append(
            (split_state(around.reference)["text"], {k: v.clone() for k, v in split_state(network)["text"].items()})
        )
        return original(network, samples, rows, around, *rest)

    monkeypatch.setattr(incongruent, "_fitted", fitted)
    incongruent.train(site, modules, job(2, 1))
    assert same(seen[0][0], modules["text"]) and not same(seen[0][1], modules["text"])


# -- between rounds (spec 6.2, 6.3) ------------------------------------------------------------------------------------


def test_text_gathered_on_an_older_global_text_is_dropped(at):
    site, modules, job = at("text", text_every=3)
    site.save_state("text", 1, {"w": torch.ones(1)}, 0)
    site.save_state("text", 3, {"w": torch.ones(1)}, 1)

    def own(server_round, last_accepted):
        return incongruent_memory.own_text(modules, site, job(server_round, last_accepted))

    assert set(own(2, 1)) == set(own(3, 1)) == {"text"}
    assert own(4, 1) == {}  # missed the upload of round 3
    assert own(4, 3) == {}  # was in it: the global text has what was gathered
    assert own(1, 0) == {}


def test_evaluation_measures_the_global_text_and_not_the_sites_own(at):
    site, modules, job = at("text")
    before = incongruent.evaluate(site, modules, job(1), "val")
    incongruent.train(site, modules, job(1))
    after = incongruent.evaluate(site, modules, job(2, 1), "val")
    for view in before:
        for name, counts in before[view].arrays.items():
            assert np.array_equal(counts, after[view].arrays[name]), (view, name)


def test_site_alone_evaluates_and_goes_on_with_its_own_model(at):
    site, modules, job = at(alone=True)
    before = incongruent.evaluate(site, modules, job(1), "val")[""]
    update = incongruent.train(site, modules, job(1))
    after = incongruent.evaluate(site, modules, job(2, 1), "val")[""]
    assert update.modules == {} and before.loss_sum != after.loss_sum


def test_residual_of_the_text_waits_for_the_next_upload(at):
    """Sampled text and two rounds between uploads: the round in between must not lose what was not sent."""
    site, modules, job = at("text", text_fraction=0.5)
    sent = incongruent.train(site, modules, job(2)).modules["text"]
    assert len(sent["val"]) == -(-sum(v.numel() for v in modules["text"].values()) // 2)
    waiting = site.load_state("residual-text", 2)
    assert any(value.abs().max() > 0 for value in waiting.values())
    assert "text" not in incongruent.train(site, modules, job(3, 2)).modules
    assert same(site.load_state("residual-text", 3), waiting)


def test_sent_and_residual_add_up_to_the_change(at, trained):
    site, modules, job = at("image", topk_ratio=0.1)
    incongruent.train(site, modules, job(1))
    update = incongruent.train(site, modules, job(2, 1))
    topk, specs = job().settings.options.compressor("vision"), wire.spec_of(modules["vision"])
    arrays = {name: np.asarray(value) for name, value in update.modules["vision"].items()}
    sent, kept, first = (
        topk.decode(arrays, specs),
        site.load_state("residual-vision", 2),
        site.load_state("residual-vision", 1),
    )
    for name, value in modules["vision"].items():
        if value.is_floating_point():  # BatchNorm's statistics travel whole and leave nothing behind
            change = trained[1]["vision"][name] - value
            torch.testing.assert_close(
                torch.from_numpy(sent[name]) + kept.get(name, 0.0), change + first.get(name, 0.0)
            )


def test_lost_residual_counts_as_nothing_and_the_log_says_so(at):
    site, modules, job = at("image", topk_ratio=0.1)
    lines, handler_ = [], logging.Handler()
    handler_.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger(f"consilium.site.{site.folder}")
    logger.addHandler(handler_)
    incongruent.train(site, modules, job(5, 4))
    logger.removeHandler(handler_)
    assert lines == ["round=5 the kept residual-vision of round 4 is lost; going on without"]


# -- limits on the text (spec 6.3) -------------------------------------------------------------------------------------


def sent_by(at, profile="paired", rounds=((2, 0),), consents=None, **changes):
    """What leaves in the last of these (round, last accepted round), by record and name, as tensors; and the site."""
    site, modules, job = at(profile, consents=consents, **changes)
    for one in rounds:
        update = incongruent.train(site, modules, job(*one))
    sent = {m: {name: torch.as_tensor(value) for name, value in state.items()} for m, state in update.modules.items()}
    return sent, site


def length_of_text(sent):
    return update_norm({"text": sent["text"]})


def assert_rest_same(one, other):
    assert set(one) == set(other) and len(one) > 2
    assert all(same(one[record], other[record]) for record in set(one) - {"text"})


@pytest.mark.parametrize(
    ("rounds", "changes"),
    [
        ([(2, 0)], {}),
        ([(3, 0), (4, 3)], {}),  # gathered over two rounds
        ([(2, 0), (3, 2)], {"text_every": 1, "text_fraction": 0.5}),  # with a residual
    ],
    ids=["one round", "two rounds", "residual"],
)
def test_no_text_change_leaves_longer_than_the_clip_and_no_other_bit_changes(at, rounds, changes):
    free, _ = sent_by(at, rounds=rounds, **changes)
    clip = 0.5 * length_of_text(free)
    held, _ = sent_by(at, rounds=rounds, text_clip=clip, **changes)
    assert 0.999 * clip < length_of_text(held) <= clip
    for name, value in free["text"].items():
        torch.testing.assert_close(held["text"][name], value / 2)
    assert_rest_same(free, held)


def test_text_change_within_the_clip_leaves_with_the_same_bits(at):
    plain, _ = sent_by(at, "text")
    for clip in (0.0, 2 * length_of_text(plain)):
        other, _ = sent_by(at, "text", text_clip=clip)
        assert same(plain["text"], other["text"])
        assert_rest_same(plain, other)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_noise_on_the_text_is_sigma_times_the_clip_and_stays_out_of_the_rest(at, fraction):
    """Standard deviation and mean of n values, each within 5 standard errors; what waits for later gets none."""
    clip, sigma = 0.05, 2.0
    quiet, site = sent_by(at, text_fraction=fraction, text_clip=clip)
    waiting = site.load_state("residual-text", 2)
    noisy, site = sent_by(at, text_fraction=fraction, text_clip=clip, text_sigma=sigma)
    noise = torch.cat([(noisy["text"][name] - value).double().reshape(-1) for name, value in quiet["text"].items()])
    assert float(noise.std()) == pytest.approx(clip * sigma, rel=5 / np.sqrt(2 * len(noise)))
    assert abs(float(noise.mean())) < 5 * clip * sigma / np.sqrt(len(noise))
    assert_rest_same(quiet, noisy)
    assert (waiting is None) == (fraction == 1)
    assert waiting is None or same(waiting, site.load_state("residual-text", 2))


def test_noise_on_the_text_repeats_in_a_simulation_and_never_at_a_hospital(at):
    limits = {"text_clip": 0.05, "text_sigma": 1.0}
    first, again = (sent_by(at, "text", **limits)[0] for _ in range(2))
    assert same(first["text"], again["text"])
    consents = frozenset({"text-module", "text-prototypes"})
    first, again = (sent_by(at, "text", consents=consents, **limits)[0] for _ in range(2))
    assert not same(first["text"], again["text"])
    assert_rest_same(first, again)


def test_site_without_text_sends_none_and_all_else_as_without_limits(at):
    plain, _ = sent_by(at, "image")
    limited, _ = sent_by(at, "image", text_clip=0.05, text_sigma=1.0)
    assert set(plain) == {"vision", "fusion", "head"}
    assert_rest_same(plain, limited)


# -- zero-filling, teachers, noise -------------------------------------------------------------------------------------


def test_zero_filling_shows_blanks_at_evaluation_too_and_counts_no_blank_in_prototypes(at):
    rows = ward("a", "paired", SIZES)
    for row in rows[:4]:
        row["report"] = ""
    site, modules, job = at(rows=rows, agg_mode="zero_fill", proto_min_patients=3)
    samples = read_samples(site.data.splits["train"], job().settings, MODULES)
    index, images, _ = samples.load(np.arange(8), "none", torch.Generator())
    seen, tokens, present = samples.seen(index, images, torch.tensor([[True, False]]).expand(8, 2))
    assert present.all() and torch.equal(seen, images) and (tokens == samples.blank).all()
    seen, tokens, present = samples.seen(index, images, torch.tensor([[False, True]]).expand(8, 2))
    assert (seen == -1).all() and torch.equal(tokens, samples.tokens) and present.all()
    released = incongruent.train(site, modules, job(2)).modules[PROTOTYPES]["released"]
    told = (site.data.splits["train"].targets[4:] == 1).sum(axis=0)
    assert torch.equal(released, torch.from_numpy(told >= 3))


def test_teachers_leave_a_site_out_of_the_round_that_it_was_in_and_no_other(at, tmp_path):
    site, _, job = at(loot=True, public_root="digits-reports", public_samples=2)
    total, own = torch.full((2, 8), 6.0), torch.full((2, 8), 2.0)
    context = {"public_sum": total, "public_sites": torch.tensor([3])}
    site.save_state("public", 4, {"embeddings": own}, 3)
    assert torch.equal(incongruent_teachers._teachers(context, site, job(5, 4)), torch.full((2, 8), 2.0))
    assert torch.equal(incongruent_teachers._teachers(context, site, job(6, 4)), total / 3)
    assert incongruent_teachers._teachers({**context, "public_sites": torch.tensor([0])}, site, job(1)) is None
    alone = {**context, "public_sites": torch.tensor([1])}
    assert incongruent_teachers._teachers(alone, site, job(5, 4)) is None


def test_noise_of_a_hospital_is_not_the_servers_to_know(at):
    site, _, job = at()
    known = [incongruent._noise(site, job()).initial_seed() for _ in range(2)]
    secret = [incongruent._noise(replace(site, consents=frozenset()), job()).initial_seed() for _ in range(2)]
    assert known[0] == known[1] and len({*known, *secret}) == 3


# -- profile and consent (spec 5.1, 6.3) -------------------------------------------------------------------------------


def test_site_refuses_to_change_its_profile(at):
    site, modules, job = at("image")
    incongruent.profile(site, job().settings)
    other, _, _ = at("paired")
    with pytest.raises(DataError, match="took part as 'image' and its data now make it 'paired'"):
        incongruent.profile(replace(other, folder=site.folder), job().settings)
    with pytest.raises(DataError, match="round 0 froze it as 'image'"):
        incongruent.train(other, modules, job())


def test_card_hides_small_cells_and_counts_by_modality(at):
    site, _, job = at(privacy__min_cell=3)
    found = incongruent.profile(site, job().settings)
    assert (found["images"], found["reports"], found["pairs"]) == (8, 8, 8)
    assert found["pair_counts"] == [4, -1, -1, -1, 4, -1, -1, -1, 4]  # two of eight rows show any two labels


# -- false positives by co-occurrence (spec 3.5) ----------------------------------------------------------------------


def asked(**changes):
    return Settings.from_run_config(run_config("unused", "unused", **changes))


def test_evaluation_tells_of_every_two_labels_how_often_an_absent_one_is_called(at):
    """All labels are known, so the calls with and without label i are all false calls of label j."""
    site, modules, job = at(rows=ward("a", "paired", {**SIZES, "test": 16}))
    modules["head"]["bias"] = torch.tensor([0.0, 9.0, -9.0])
    scores = incongruent.evaluate(site, modules, job(2), "test")
    told = {name: np.array(values).reshape(3, 3) for name, values in scores[""].extra.items()}
    assert set(told) == set(PAIR_COUNTS)
    assert (told["with_i"] == 4 - 4 * np.eye(3)).all() and (told["without_i"] == 4 + 4 * np.eye(3)).all()
    false = ScoreHistogram.from_arrays(scores[""].arrays).counts(0.5).fp
    assert false[1] == 8 and false[2] == 0
    off = ~np.eye(3, dtype=bool)
    assert np.array_equal((told["with_i_called"] + told["without_i_called"])[off], np.tile(false, (3, 1))[off])
    for view in ("both", "image", "text"):  # the difference of two views would tell of few samples
        assert scores[view].extra == {name: [] for name in PAIR_COUNTS}


def test_reply_with_these_counts_passes_the_sites_gate(at):
    site, modules, job = at("image")
    config = {"server_round": 2, "experiment": "exp", "last_accepted": 0, "evaluate": "val", "profile": "image"}
    content, declared = handler.evaluated(modules, site, replace(job(2), config=config), incongruent)
    assert declared.violation(content) is None
    assert set(content["extra.val"]) == set(content["extra.val@both"]) == set(PAIR_COUNTS)


@pytest.mark.parametrize(
    ("least", "calls", "hidden"),
    [
        (10, 10, []),
        (11, 11, [(0, 1), (1, 0)]),  # ten samples have both labels, which follows from those that have one
        (5, 4, [(0, 1)]),
        (5, 16, [(0, 1)]),  # four that are not called follow from those that are
        (5, 0, []),  # zero is no small count
        (5, 20, []),
    ],
)
def test_pair_with_a_small_cell_or_one_that_follows_is_told_nothing_of(least, calls, hidden):
    """Of 20 samples with label 0 and not label 1, ``calls`` are called label 1; elsewhere half are called either."""
    targets = np.array([(1, 1)] * 10 + [(1, 0)] * 20 + [(0, 1)] * 30 + [(0, 0)] * 30)
    called = np.repeat(np.arange(90) % 2 == 0, 2).reshape(90, 2)
    called[10:30, 1] = np.arange(20) < calls
    found = incongruent_samples.cooccurrence_numbers(called, targets, "multilabel", asked(privacy__min_cell=least))
    told = np.array([found[name] for name in PAIR_COUNTS]).reshape(4, 2, 2)
    assert [pair for pair in ((0, 1), (1, 0)) if (told[:, *pair] == -1).all()] == hidden
    assert ((told == -1).all(axis=0) == (told == -1).any(axis=0)).all()  # whole or not at all
    if (0, 1) not in hidden:
        assert told[:, 0, 1].tolist() == [20, calls, 30, 15]


def test_pair_of_a_label_that_no_count_is_told_of_is_hidden_with_it():
    """Three samples lack label 0, so its counts are hidden; label 1 is unknown in them, so no cell is small."""
    targets = np.array([(1, 1)] * 10 + [(1, 0)] * 10 + [(0, -1)] * 3)
    called = np.zeros((23, 2), bool)
    for least, shown in ((3, 10), (5, -1)):
        found = incongruent_samples.cooccurrence_numbers(called, targets, "multilabel", asked(privacy__min_cell=least))
        assert found["with_i"][1] == shown


@pytest.mark.parametrize("consents", ["", "text-module", "text-prototypes", "text-module, text-prototypes"])
def test_hospital_sends_text_by_its_own_consent_only(at, tmp_path, consents):
    _, modules, job = at("text")
    settings = job().settings
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    node = {"site": "a", "data-root": str(tmp_path / "data-text"), "state-dir": str(tmp_path / "node")}
    node |= {"consents": consents} if consents else {}
    config = {"server_round": 2, "experiment": "exp", "last_accepted": 0, "evaluate": "", "profile": "text"}
    content = RecordDict({wire.CONFIG: ConfigRecord(config)})
    for name, state in modules.items():
        content[wire.MODULE + name] = wire.encode(state)
    message = Message(content, 1, wire.TRAIN, ttl=60.0, group_id="2")
    reply = handler.answer(message, Context(1, 1, node, RecordDict(), settings.flat())).content
    if "," in consents:
        assert {f"{wire.MODULE}text", f"{wire.MODULE}{PROTOTYPES}"} < set(reply)
    else:
        assert set(reply) == {wire.REFUSAL} and reply[wire.REFUSAL]["code"] == "E-CONSENT"
    assert verify(tmp_path / "node" / "exp" / "egress.jsonl")
