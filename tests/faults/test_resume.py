"""Runs that are killed with SIGKILL anywhere and resumed end in the uninterrupted run's bits; damaged checkpoints are
passed over; what does not fit the run is refused by name, and the folder stays as it was.
"""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from client_app.egress import verify
from federation import wire
from models import networks
from server_app import checkpoint
from server_app.checkpoint import ResumeError
from strategies.cards import CardError
from tests.faults.drills import (
    BAD,
    LABELS,
    SITES,
    KillSwitch,
    count_moments,
    in_rounds,
    killed,
    lines_of,
    run,
    run_json,
    settings,
    silent,
    state_sha256,
    write_data,
)

METHODS = ("fedavg", "scaffold", "local")
QUICK = {"fedavg": 7, "scaffold": 7, "local": 6}
assert sum(QUICK.values()) == 20
SLOW = 50


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = write_data(tmp_path_factory.mktemp("resume") / "data.npz")
    run(
        settings(path, path.parent / "first", federation__rounds=1)
    )  # fills the pixel cache: a moment only a first run has
    return path


class Drill:
    """One method: its uninterrupted run, and runs that are killed and resumed until they end."""

    def __init__(self, data: Path, folder: Path, method: str, **changes) -> None:
        self.folder, self.number = folder, 0
        self.config = settings(data, folder / "whole", method=method, **changes)
        self.moments, self.whole = count_moments(self.config)

    def fresh(self) -> dict:
        """The settings of a run in a folder of its own."""
        self.number += 1
        return {**self.config, "reporting.runs_dir": str(self.folder / f"runs-{self.number}")}

    def kill(self, *switches: KillSwitch, after_s: float | None = None) -> dict:
        """A run that is killed, resumed and killed again; returns the settings that continue it."""
        config = self.fresh()
        for switch in switches or (None,):
            was_killed = killed(config, switch, after_s)
            assert was_killed or switch is None, "the moment never came"
            folders = list(Path(config["reporting.runs_dir"]).glob("*-*"))
            config["resume"] = str(folders[0]) if folders else ""
        return config

    def finish(self, config: dict) -> Path:
        """Resumes to the end; a run that was killed before its first checkpoint is refused so, and started anew."""
        try:
            outcome = run(config)
        except ResumeError as error:
            assert "no whole checkpoint" in str(error)
            assert not list(Path(config["resume"]).glob("checkpoints/round-*")), "a checkpoint must be of use"
            outcome = run({**config, "resume": ""})
        assert outcome.model_sha256 == self.whole.model_sha256
        assert state_sha256(outcome.run_dir) == state_sha256(self.whole.run_dir)
        assert lines_of(outcome.run_dir) == lines_of(self.whole.run_dir)
        assert run_json(outcome.run_dir)["status"] == "completed"
        for site in SITES:
            assert verify(outcome.run_dir / "sites" / site / "egress.jsonl"), site
        return outcome.run_dir


@pytest.fixture(scope="module", params=METHODS)
def drill(request, data, tmp_path_factory):
    return Drill(data, tmp_path_factory.mktemp(request.param), request.param)


def points(drill: Drill, count: int, seed: int) -> list[KillSwitch]:
    rng = random.Random(seed)
    return [KillSwitch(at, rng.choice((0, 1, 17))) for at in sorted(rng.sample(range(1, drill.moments + 1), count))]


# -- kills ------------------------------------------------------------------------------------------------------------


def test_killed_at_any_moment_the_resumed_run_has_the_same_bits(drill):
    for switch in points(drill, QUICK[drill.config["method"]], seed=1):
        drill.finish(drill.kill(switch))


@pytest.mark.slow
def test_fifty_kill_points_each_give_the_same_bits(drill):
    for switch in points(drill, SLOW, seed=2):
        drill.finish(drill.kill(switch))


def test_killed_again_while_it_resumes(drill):
    rng = random.Random(3)
    for _ in range(2):
        first = KillSwitch(rng.randrange(drill.moments // 4, drill.moments // 2))
        second = KillSwitch(rng.randrange(1, drill.moments // 3))
        drill.finish(drill.kill(first, second))


def test_killed_by_the_clock(drill):
    """At whatever instruction it happens to be, in the middle of a write too."""
    rng = random.Random(4)
    for _ in range(2):
        drill.finish(drill.kill(after_s=rng.uniform(0.05, 0.6)))


DRIVER = """
import sys, json
from tests.faults.drills import KillSwitch
import pytest
from server_app import inprocess

with pytest.MonkeyPatch.context() as patch:
    KillSwitch(int(sys.argv[2])).install(patch)
    inprocess.run(json.loads(sys.argv[1]))
"""


def test_killed_in_a_process_of_its_own(data, tmp_path):
    """The resuming process shares nothing with the killed one: no cache, no import, no open file."""
    drill = Drill(data, tmp_path, "scaffold")
    config = drill.fresh()
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(config), str(drill.moments // 2)],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == -9, done.stderr.decode()[-2000:]
    (folder,) = Path(config["reporting.runs_dir"]).glob("*-scaffold")
    assert run_json(folder)["status"] == "running"
    drill.finish({**config, "resume": str(folder)})


def test_completed_run_that_is_resumed_says_the_same_again(drill):
    config = drill.fresh()
    folder = run(config).run_dir
    assert drill.finish({**config, "resume": str(folder)}) == folder


def test_refused_rounds_before_the_kill_leave_no_trace_in_a_sites_state(data, tmp_path):
    """The site's state of the last accepted round is older than its two newest files, and still the one that counts."""
    config = settings(data, tmp_path, method="scaffold", federation__rounds=6)

    def unheard(message, answer):
        answer()  # the site works and keeps its state, and the reply is lost

    quiet = run(config, {BAD: in_rounds((2, 3, 4), silent)})
    lost = run(config, {BAD: in_rounds((2, 3, 4), unheard)})
    assert state_sha256(lost.run_dir) == state_sha256(quiet.run_dir)
    assert len(list((lost.run_dir / "sites" / BAD / "state").glob("*.safetensors"))) <= 3


# -- damaged checkpoints ----------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff" * 4096)


def flip_a_value(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


def change_the_round(path: Path) -> None:
    data = path.read_bytes()
    assert data.count(b'server_round\\": 3') == 1
    path.write_bytes(data.replace(b'server_round\\": 3', b'server_round\\": 1'))


DAMAGES = (cut, empty, garbage, flip_a_value, change_the_round)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_checkpoint_falls_back_to_the_one_before(drill, damage):
    config = drill.kill(KillSwitch(drill.moments - 25))
    newest = max(Path(config["resume"]).glob("checkpoints/round-*"))
    assert newest.stem == "round-000003"
    damage(newest)
    drill.finish(config)


@pytest.mark.parametrize("method", ["scaffold", "local"])
def test_fallback_in_the_middle_of_a_round_finds_the_sites_older_state(data, tmp_path, method):
    """The sites have gone two rounds further than the checkpoint that is left."""
    drill = Drill(data, tmp_path, method, federation__rounds=4)
    config = drill.fresh()

    def last_site_dies(message, answer):
        answer()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, {SITES[-1]: in_rounds((4,), last_site_dies)})
    (folder,) = Path(config["reporting.runs_dir"]).glob("*-*")
    cut(folder / "checkpoints" / "round-000003.safetensors")
    drill.finish({**config, "resume": str(folder)})


def test_best_model_of_the_checkpoint_before_is_still_there_after_a_fallback(data, tmp_path):
    """A site that is missing at the resume changes the scores, so the older best may stay the best to the end."""
    config = settings(data, tmp_path, federation__rounds=3, federation__min_sites=1)

    def died(message, answer):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, {SITES[0]: in_rounds((3,), died, wire.EVALUATE)})
    (folder,) = tmp_path.glob("*-fedavg")
    progress, _ = checkpoint.load_checkpoint(folder)
    assert (progress.server_round, progress.best_round) == (3, 2), "the drill needs a best model that changed last"
    cut(folder / "checkpoints" / "round-000003.safetensors")
    before, _ = checkpoint.load_checkpoint(folder)
    assert before.best_round == 1
    assert (folder / "checkpoints" / "best-000001.safetensors").exists()
    unscored = {site: in_rounds((1, 2, 3), silent) for site in SITES[1:]}
    assert run({**config, "resume": str(folder)}, unscored).model_sha256


def test_no_single_flipped_byte_of_a_checkpoint_goes_unnoticed(data, tmp_path):
    folder = run(settings(data, tmp_path, federation__rounds=1)).run_dir
    path = max(folder.glob("checkpoints/round-*"))
    whole, before = path.read_bytes(), state_sha256(folder)
    facts = checkpoint.load_checkpoint(folder)[1]
    older = min(folder.glob("checkpoints/round-*"))
    older.unlink()
    rng = random.Random(5)
    header = int.from_bytes(whole[:8], "little") + 8
    places = [*range(8), *rng.sample(range(8, header), 250), *rng.sample(range(header, len(whole)), 100)]
    unnoticed = []
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(damaged))
        try:
            progress, found = checkpoint.load_checkpoint(folder)
        except ResumeError:
            continue
        same = f"{progress.server_round}:{wire.state_sha256({**progress.modules, 'method': progress.method})}" == before
        if not same or found != facts:
            unnoticed.append(place)
    assert unnoticed == []


def test_folder_with_damaged_checkpoints_only_is_refused_by_name(data, tmp_path):
    config = settings(data, tmp_path)
    folder = run(config).run_dir
    for path in folder.glob("checkpoints/round-*"):
        cut(path)
    with pytest.raises(ResumeError, match="holds no whole checkpoint"):
        run({**config, "resume": str(folder)})


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(data, tmp_path):
    """A completed run on data of its own that may be changed, its settings, and a picture of its folder."""
    own = tmp_path / "own.npz"
    shutil.copy(data, own)
    config = settings(own, tmp_path / "runs", federation__rounds=2)
    folder = run(config).run_dir
    return {**config, "resume": str(folder)}, own, folder


def picture(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_untouched(folder: Path, before: dict[str, bytes]) -> None:
    after = picture(folder)
    differing = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    # the sites answered for their cards, which their own ledgers and logs say
    assert {name for name in differing if not name.startswith("sites/")} == set()


CHANGED = {
    "training.lr": (0.01, r"training.lr: the run has 0.05, asked for is 0.01"),
    "seed": (2, "seed: the run has 1, asked for is 2"),
    "model.width": (8, "model.width: the run has 4, asked for is 8"),
    "model.norm": ("group", "model.norm: the run has 'batch', asked for is 'group'"),
    "federation.rounds": (3, "federation.rounds: the run has 2, asked for is 3"),
    "method": ("fedprox", "method: the run has 'fedavg', asked for is 'fedprox'"),
    "data.labels": ("dog,cat,fox", "data.labels: the run has 'cat,dog,fox', asked for is 'dog,cat,fox'"),
}


@pytest.mark.parametrize("key", CHANGED)
def test_changed_setting_is_refused_with_both_values(finished, key):
    config, _, folder = finished
    value, message = CHANGED[key]
    before = picture(folder)
    with pytest.raises(ResumeError, match=message):
        run({**config, key: value})
    assert picture(folder) == before


def test_settings_that_shape_no_number_may_change(finished, tmp_path):
    config, own, folder = finished
    whole = run_json(folder)["model_sha256"]
    moved = shutil.move(own, tmp_path / "moved.npz")
    changes = {"data.root": str(moved), "federation.timeout_s": 9.0, "federation.wait_s": 1.0}
    assert run({**config, **changes}).model_sha256 == whole


def test_changed_data_are_refused_with_both_checksums(finished):
    config, own, folder = finished
    old = {site["site"]: site["checksum"] for site in run_json(folder)["sites"]}
    before = picture(folder)
    write_data(own, seed=1)
    with pytest.raises(CardError, match=f"the data of {SITES[0]} changed: checksum [0-9a-f]+") as refusal:
        run({**config, "data.cache_dir": str(own.parent / "other-cache")})
    assert old[SITES[0]] in str(refusal.value)
    assert_untouched(folder, before)
    assert run_json(folder)["status"] == "completed"


def test_changed_label_list_is_refused_with_both_lists(write_hospital, ward, tmp_path):
    rows = [row for site in ("north", "south") for row in ward(site, train=20, val=8, test=8)]
    root = write_hospital(tmp_path / "data", rows)
    config = settings(root, tmp_path / "runs", data__labels="", data__partition="by_site", federation__rounds=2)
    folder = run(config).run_dir
    before = picture(folder)
    table = root / "manifest.csv"
    for header in ("label:dog,label:cat", "label:cat,label:hen"):
        with table.open(newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))
        lines[0][4:] = header.split(",")
        with table.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(lines)
        said = ", ".join(name.removeprefix("label:") for name in header.split(","))
        with pytest.raises(CardError, match=f"the label list changed: the sites have {said}, the run had cat, dog"):
            run({**config, "resume": str(folder), "data.cache_dir": str(tmp_path / said)})  # opened anew, as by a site
        assert_untouched(folder, before)


def test_changed_architecture_is_refused_with_both_forms(finished, monkeypatch):
    """Same settings, other code: a layer that has grown since."""
    config, _, folder = finished
    before = picture(folder)
    original = networks.build_network

    def wider(*arguments, **named):
        return original(*arguments, **{**named, "width": 6})

    for name, module in list(sys.modules.items()):
        if name.startswith(("client_app.", "strategies.")) and hasattr(module, "build_network"):
            monkeypatch.setattr(module, "build_network", wider)
    with pytest.raises(ValueError, match=r"float32\[4.*\] before, float32\[6.*\] now|float32\[6.*before, float32\[4"):
        run(config)
    assert_untouched(folder, before)


def test_folder_that_is_none_and_folder_of_another_place_are_refused(finished, tmp_path):
    config = finished[0]
    with pytest.raises(ResumeError, match="is no folder"):
        run({**config, "resume": str(tmp_path / "nowhere")})
    with pytest.raises(ResumeError, match=r"is not in reporting\.runs_dir"):
        run({**config, "reporting.runs_dir": str(tmp_path / "elsewhere")})


def test_resume_of_a_failed_run_that_is_refused_keeps_what_the_folder_says(data, tmp_path):
    own = tmp_path / "own.npz"
    shutil.copy(data, own)
    config = settings(own, tmp_path / "runs", federation__min_sites=4)
    with pytest.raises(RuntimeError, match="round 2"):
        run(config, {BAD: in_rounds((2,), silent)})
    (folder,) = (tmp_path / "runs").glob("*-fedavg")
    before = run_json(folder)
    write_data(own, seed=1)
    with pytest.raises(CardError):
        run({**config, "resume": str(folder), "data.cache_dir": str(tmp_path / "other-cache")})
    after = run_json(folder)
    assert after["status"] == "failed" and after["sites"] == before["sites"] and after["labels"] == list(LABELS)
    assert [*before["warnings"]] == after["warnings"][: len(before["warnings"])]
    assert "the data of" in after["warnings"][-1]
    with pytest.raises(CardError):  # and the folder is still one that can be resumed with the right data
        run({**config, "resume": str(folder), "data.cache_dir": str(tmp_path / "other-cache")})
    shutil.copy(data, own)
    assert run({**config, "resume": str(folder)}).model_sha256


def test_checkpoint_holds_no_state_without_tensors(data, tmp_path):
    folder = run(settings(data, tmp_path, federation__rounds=1)).run_dir
    progress, facts = checkpoint.load_checkpoint(folder)
    progress.modules = {}
    with pytest.raises(ValueError, match="empty state is never written"):
        checkpoint.save_checkpoint(folder, progress, facts)
    progress.modules = {"model": {"w": torch.from_numpy(np.zeros(2, np.float32))}}
    checkpoint.save_checkpoint(folder, progress, facts)
