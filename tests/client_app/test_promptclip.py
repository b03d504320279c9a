"""The baselines at a site: what is trained on the features, what leaves and what stays."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from client_app import promptclip
from federation import seeding
from federation.settings import SettingsError
from federation.wire import WireError
from models.clip import CONFIG_FILE, TINY, WEIGHTS_FILE, random_clip
from models.promptclip_variants import VARIANTS


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    with seeding.scope(1, "clip"):
        save_file(random_clip().model.state_dict(), folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"model_cfg": TINY}))
    return folder


@pytest.fixture
def at_site(opened, clip_folder):
    """``at_site(variant, **changes)``: site, the modules that a server sends, and a job at rate 0.01."""

    def make(variant, *, last_accepted=0, server_round=1, **changes):
        site, job = opened(
            server_round=server_round,
            last_accepted=last_accepted,
            config={"lr": 0.01},
            method="promptclip",
            promptclip__variant=variant,
            promptclip__clip_dir=str(clip_folder),
            **changes,
        )
        network = promptclip.build(site.data.labels, job.settings)
        return site, network.modules_that_travel(), job

    return make


def moved(update):
    return {name: bool(value.any()) for name, value in update.modules["model"].items()}


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - {"zero_shot"}))
def test_training_moves_what_travels_and_scores_are_as_declared(variant, at_site):
    site, modules, job = at_site(variant, training__epochs=2)
    update = promptclip.train(site, modules, job)
    specs = promptclip.update_specs(modules, site, job)
    assert set(specs) == {"model"} and set(update.modules["model"]) == set(specs["model"])
    still = [name for name, moves in moved(update).items() if not moves]
    # at the start of tpg the last layer is zero, so nothing before it moves in the first step, and its key's bias never
    assert still == [] or (variant == "tpg" and still == ["key.bias"])
    assert update.num_examples == 9 and update.num_steps == 4 and "own" not in update.modules
    scores = promptclip.evaluate(site, modules, job, "test")
    assert scores.num_examples == 4 and scores.arrays["positives"].sum() == 4


def test_zero_shot_sends_and_changes_nothing(at_site):
    site, modules, job = at_site("zero_shot")
    update = promptclip.train(site, modules, job)
    assert (update.modules, update.num_examples, update.num_steps) == ({}, 9, 0)
    assert promptclip.update_specs(modules, site, job) == {} and not (site.folder / "state").exists()


def test_a_site_alone_keeps_its_model_and_is_scored_by_it(at_site):
    site, modules, job = at_site("poscoop", promptclip__alone=True)
    update = promptclip.train(site, modules, job)
    assert update.modules == {} and promptclip.update_specs(modules, site, job) == {}
    own = site.load_state(promptclip.STATE, 1)
    assert set(own) == {"context", "negative"} and not torch.equal(own["context"], modules["model"]["context"])
    later_site, _, later = at_site("poscoop", promptclip__alone=True, last_accepted=1, server_round=2)
    assert torch.equal(promptclip.received(later_site, modules, later).context.detach(), own["context"])
    assert torch.equal(promptclip.received(site, modules, job).context.detach(), modules["model"]["context"])


def test_the_local_context_stays_and_goes_on_where_it_was(at_site):
    site, modules, job = at_site("otp")
    update = promptclip.train(site, modules, job)
    assert set(update.modules["model"]) == {"context", "negative"}
    own = site.load_state(promptclip.STATE, 1)
    assert set(own) == {"own"} and not torch.equal(own["own"], modules["own"]["own"])
    later_site, _, later = at_site("otp", last_accepted=1, server_round=2)
    assert torch.equal(promptclip.received(later_site, modules, later).own.detach(), own["own"])


def test_the_rate_is_the_rounds(at_site, opened):
    site, modules, job = at_site("poscoop")
    fast = promptclip.train(site, modules, job).modules["model"]["context"]
    still_job = type(job)(job.settings, 1, 0, {"lr": 0.0}, job.device)
    still = promptclip.train(site, modules, still_job).modules["model"]["context"]
    assert fast.any() and not still.any()


def test_labels_that_make_no_prompt_are_refused(at_site):
    _, _, job = at_site("poscoop")
    with pytest.raises(SettingsError, match="read the same"):
        promptclip.build(("tv_monitor", "tv monitor"), job.settings)


def test_a_row_without_a_known_label_is_not_counted(at_site):
    site, modules, job = at_site("zero_shot")
    site.data.splits["train"].targets[0] = -1
    try:
        assert promptclip.train(site, modules, job).num_examples == 8
    finally:
        site.data.splits["train"].targets[0] = (0, 0)


def test_what_does_not_fit_is_refused(at_site):
    site, _, job = at_site("poscoop")
    with pytest.raises(WireError, match="do not fit"):
        promptclip.train(site, {"model": {"context": torch.zeros(1, 1, 5, 32)}}, job)


def test_the_schema_has_both_modules(at_site):
    site, _, job = at_site("otp")
    found = promptclip.specs(site.data.labels, job.settings)
    assert set(found) == {"model", "own"} and set(found["own"]) == {"own"}
