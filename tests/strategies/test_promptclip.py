"""Federations of the baselines: what is averaged, what is never sent back, and the figures they are compared by."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from federation import seeding
from federation.settings import Settings, SettingsError
from models.clip import CONFIG_FILE, TINY, WEIGHTS_FILE, random_clip
from strategies.cards import CardError


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A tiny CLIP and a folder of cached pictures and features, for all runs of this file."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "clip").mkdir()
    with seeding.scope(1, "clip"):
        save_file(random_clip().model.state_dict(), folder / "clip" / WEIGHTS_FILE)
    (folder / "clip" / CONFIG_FILE).write_text(json.dumps({"model_cfg": TINY}))
    return folder


@pytest.fixture
def run_clip(run_tiny, shared):
    def run(variant, **changes):
        return run_tiny(
            method="promptclip",
            promptclip__variant=variant,
            promptclip__clip_dir=str(shared / "clip"),
            data__cache_dir=str(shared / "cache"),
            data__num_sites=3,
            training__lr=0.002,
            **changes,
        )

    return run


def exported(outcome):
    return load_file(outcome.run_dir / "model.safetensors")


def test_dualcoop_learns_and_comes_out_the_same_twice(run_clip):
    first, second = (run_clip("dualcoop", federation__rounds=3) for _ in range(2))
    assert first.model_sha256 == second.model_sha256
    assert exported(first)["context"].shape == (2, 10, 4, 32)
    metrics = first.metrics
    assert metrics["map"] > run_clip("zero_shot", federation__rounds=1).metrics["map"]
    assert metrics["map_labels"] == 10 and metrics["official_map"] == pytest.approx(metrics["map"])
    assert metrics["official_best_of1_optimistic"] >= metrics["of1"] - 0.01
    assert 0 < metrics["cf1_tuned"] < 1


def test_zero_shot_and_sites_alone_leave_the_global_state_as_it_was(run_clip):
    zero, alone = run_clip("zero_shot"), run_clip("poscoop", promptclip__alone=True)
    for name, value in exported(zero).items():
        assert torch.equal(value, exported(alone)[name])
    assert alone.metrics["map"] != zero.metrics["map"], "each site is scored by its own model"
    assert len(list(alone.run_dir.glob("sites/*/state/own-*.safetensors"))) >= 3


def test_sites_with_tensors_of_their_own_are_measured_in_the_last_round(run_clip):
    outcome = run_clip("otp")
    assert json.loads((outcome.run_dir / "run.json").read_text())["selected_round"] == 2
    assert set(exported(outcome)) == {"context", "negative", "own"}


def test_unknown_labels_teach_nothing(run_clip):
    full = run_clip("poscoop", federation__rounds=1)
    lost = run_clip("poscoop", federation__rounds=1, data__lost_labels=0.9, data__lost_mode="unknown_entries")
    change = {name: value - exported(lost)[name] for name, value in exported(full).items()}
    assert change["context"].any() and lost.metrics["map"] > 0


def test_one_label_a_sample_is_refused(run_clip):
    with pytest.raises(CardError, match="needs multi-label data"):
        run_clip("poscoop", data__root="digits", data__partition="iid")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model.weights": "some.safetensors"}, "takes its towers from"),
        ({"promptclip.variant": "zero_shot", "promptclip.alone": True}, "trains nothing"),
        ({"promptclip.variant": "maple"}, "promptclip.variant = 'maple'"),
        ({"privacy.secure_sum": True}, "secure_sum = true"),
    ],
)
def test_settings_that_make_no_run_are_refused(wrong, message):
    with pytest.raises(SettingsError, match=message):
        Settings.from_run_config({"method": "promptclip", **wrong})
