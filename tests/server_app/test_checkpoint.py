"""Checkpoints: what was written comes back to the bit, what is damaged is not believed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from federation import wire
from federation.settings import RUNTIME_KEYS, Settings
from server_app.checkpoint import (
    FOLDER,
    Facts,
    ResumeError,
    architecture_sha256,
    check_same_settings,
    load_checkpoint,
    save_checkpoint,
)
from strategies.progress import Progress


def progress(server_round=3):
    generator = torch.Generator().manual_seed(server_round)
    return Progress(
        server_round=server_round,
        modules={
            "model": {
                "features.0.weight": torch.randn(2, 3, generator=generator),
                "n": torch.tensor(server_round),
                "empty": torch.zeros(0, 4),
                "half": torch.randn(3, generator=generator).half(),
            },
            "control": {"features.0.weight": torch.randn(2, 3, generator=generator).T},
        },
        accepted={"st-mary": server_round, "north": 1},
        best_round=server_round - 1,
        best_value=0.1 + 0.2,  # a float that a rounded text would change
        best_thresholds=[0.5, 1 / 3],
        method={"queue/ids": torch.arange(4), "phase": torch.tensor(True)},
    )


FACTS = Facts({"seed": 1, "training.lr": 0.05}, ["cat", "dog"], "multilabel", "a" * 64, {"st-mary": "b" * 64}, 1234)


def files(folder):
    return sorted(path.name for path in (folder / FOLDER).iterdir())


def test_everything_comes_back_to_the_bit(tmp_path):
    saved = progress()
    save_checkpoint(tmp_path, saved, FACTS)
    found, facts = load_checkpoint(tmp_path)
    assert facts == FACTS
    assert wire.state_sha256(found.modules) == wire.state_sha256(saved.modules)
    assert wire.state_sha256({"": found.method}) == wire.state_sha256({"": saved.method})
    scalars = {key: value for key, value in vars(found).items() if key not in ("modules", "method")}
    assert scalars == {key: value for key, value in vars(saved).items() if key not in ("modules", "method")}


def test_undefined_values_come_back_undefined(tmp_path):
    save_checkpoint(tmp_path, replace(progress(0), best_value=None, best_thresholds=None, accepted={}), FACTS)
    found, _ = load_checkpoint(tmp_path)
    assert found.best_value is None and found.best_thresholds is None and found.accepted == {}


def test_two_generations_stay_and_the_newest_is_taken(tmp_path):
    for server_round in range(5):
        save_checkpoint(tmp_path, progress(server_round), FACTS)
    assert files(tmp_path) == ["round-000003.safetensors", "round-000004.safetensors"]
    assert load_checkpoint(tmp_path)[0].server_round == 4


def test_a_state_without_tensors_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="an empty state is never written"):
        save_checkpoint(tmp_path, Progress(1), FACTS)
    assert not (tmp_path / FOLDER).exists()


# -- damage -------------------------------------------------------------------------------------------------------


def flipped(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def rewritten(path, change):
    """The same file with a changed header, written as safetensors would."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        header = json.loads(file.metadata()["consilium"])
    change(header)
    save_file(tensors, path, {"consilium": json.dumps(header)})


def without_header(path):
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    save_file(tensors, path)


DAMAGE = {
    "one bit of a tensor": flipped,
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "other bytes": lambda path: path.write_bytes(b"hello" * 100),
    "header gone": without_header,
    "header of another format": lambda path: rewritten(path, lambda header: header.update(format=99)),
    "round changed": lambda path: rewritten(path, lambda header: header["progress"].update(server_round=9)),
    "facts changed": lambda path: rewritten(path, lambda header: header["facts"].update(labels=["dog", "cat"])),
    "hash gone": lambda path: rewritten(path, lambda header: header.pop("sha256")),
    "an unknown field": lambda path: rewritten(path, lambda header: header["progress"].update(more=1)),
    "a folder of that name": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_newest_is_said_and_the_one_before_is_taken(tmp_path, caplog, name):
    save_checkpoint(tmp_path, progress(1), FACTS)
    newest = save_checkpoint(tmp_path, progress(2), FACTS)
    DAMAGE[name](newest)
    found, _ = load_checkpoint(tmp_path)
    assert found.server_round == 1
    assert wire.state_sha256(found.modules) == wire.state_sha256(progress(1).modules)
    assert "round-000002.safetensors is damaged" in caplog.text


def test_without_a_whole_checkpoint_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(ResumeError, match="holds no whole checkpoint"):
        load_checkpoint(tmp_path)
    flipped(save_checkpoint(tmp_path, progress(1), FACTS))
    with pytest.raises(ResumeError, match="holds no whole checkpoint"):
        load_checkpoint(tmp_path)


def test_a_crash_while_writing_leaves_the_generation_before(tmp_path, monkeypatch):
    import os

    save_checkpoint(tmp_path, progress(1), FACTS)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "no space left")))
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(tmp_path, progress(2), FACTS)
    assert files(tmp_path) == ["round-000001.safetensors"] and load_checkpoint(tmp_path)[0].server_round == 1


# -- what has to match ------------------------------------------------------------------------------------------------


def facts_of(settings):
    return Facts(**{**asdict(FACTS), "settings": settings.flat()})


def test_other_settings_are_refused_with_both_values_of_each():
    facts = facts_of(Settings.from_run_config({"training.lr": 0.05, "seed": 1}))
    with pytest.raises(ResumeError, match="made with other settings") as caught:
        check_same_settings(facts, Settings.from_run_config({"training.lr": 0.1, "seed": 2}))
    lines = str(caught.value).splitlines()[1:]
    assert lines == [
        "seed: the run has 1, asked for is 2",
        "training.lr: the run has 0.05, asked for is 0.1",
    ]


def test_another_method_is_refused_with_its_own_section():
    facts = facts_of(Settings.from_run_config({"method": "fedavg"}))
    with pytest.raises(ResumeError, match=r"fedprox\.mu: the run has None, asked for is 0.01"):
        check_same_settings(facts, Settings.from_run_config({"method": "fedprox"}))


def test_where_and_how_long_may_differ():
    changes = {
        "resume": "x",
        "data.root": "elsewhere",
        "data.cache_dir": "c",
        "reporting.runs_dir": "r",
        "reporting.tensorboard": False,
        "federation.timeout_s": 5,
        "federation.wait_s": 6,
        "training.device": "cpu",
    }
    assert set(changes) == RUNTIME_KEYS
    check_same_settings(facts_of(Settings()), Settings.from_run_config(changes))


def test_architecture_is_names_shapes_and_dtypes_and_no_values():
    modules = progress().modules
    other_values = {name: {k: torch.zeros_like(v) for k, v in state.items()} for name, state in modules.items()}
    assert architecture_sha256(modules) == architecture_sha256(other_values)
    renamed = {"model": modules["model"], "controls": modules["control"]}
    wider = {**modules, "control": {"features.0.weight": torch.zeros(3, 3)}}
    assert len({architecture_sha256(found) for found in (modules, renamed, wider)}) == 3
