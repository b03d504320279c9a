"""Jobs of `fedmitr` that are killed anywhere end in the uninterrupted job's bits; what does not fit is refused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from federation.files import load_tensors, save_tensors
from strategies import fedmitr_generate, fedmitr_progress
from strategies.fedmitr_job import JobError, JobStopped, run_job
from strategies.fedmitr_progress import load_checkpoint, save_checkpoint
from strategies.fedmitr_uploads import JOB
from tests.strategies.fedmitr_wards import job

ROOT = Path(__file__).parents[2]
SMALL = {"pool_size": 9, "inv_batch": 3, "inv_iters": 8, "stops": "2,5", "kd_epochs": 3, "checkpoint_s": 0.0}


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it is done."""


def killer(after):
    """A ``stop`` that kills in its call number ``after``, before anything of that step is saved."""
    left = [after]

    def stop():
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return False

    return stop


def until_done(folder, after, name="run"):
    """The result of a job that is killed every ``after`` steps, and how often that was."""
    deaths = 0
    while True:
        try:
            return run_job(folder, name=name, stop=killer(after)), deaths
        except Killed:
            deaths += 1
            assert deaths < 200, "the job does not get on"


def left_by(folder):
    """Every tensor that a job has made, by file."""
    files = sorted([*folder.glob("pool-*/shard-*.safetensors"), *folder.glob("run/teacher-*.safetensors")])
    return {str(path.relative_to(folder)): load_tensors(path)[0] for path in files}


@pytest.fixture
def small_steps(monkeypatch):
    """One iteration of the inversion a step, whatever the machine's speed."""
    monkeypatch.setattr(fedmitr_generate, "CHUNK_S", 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"freeze_stopped": True, "merge_batches": 2, "iterate": "best", "sites": ("east",)},
        {"freeze_stopped": True, "rebirth": True, "ratios": "", "relabel_mode": "token"},
        {"server": "coboosting"},
    ],
    ids=["default", "merged", "rebirth", "generator"],
)
def test_a_job_that_is_killed_every_few_steps_ends_in_the_same_bits(tmp_path, small_steps, changes, monkeypatch):
    monkeypatch.setattr("strategies.fedmitr_distil.BLOCK", 4)  # several blocks of teacher outputs
    given = {**SMALL, "checkpoint_s": 1e9, **changes}
    job(tmp_path / "whole", **given)
    job(tmp_path / "cut", **{**given, "checkpoint_s": 0.0})
    whole = run_job(tmp_path / "whole")
    cut, deaths = until_done(tmp_path / "cut", 1 if "server" in changes else 5)
    assert deaths >= 2
    assert cut.facts["model_sha256"] == whole.facts["model_sha256"]
    one, other = left_by(tmp_path / "whole"), left_by(tmp_path / "cut")
    pools = [{path.partition("/")[2]: tensors for path, tensors in each.items()} for each in (one, other)]
    assert pools[0].keys() == pools[1].keys()
    for name, tensors in pools[0].items():
        assert all(value.equal(pools[1][name][key]) for key, value in tensors.items())


def test_a_stopped_job_saves_first_and_goes_on_from_there(tmp_path, small_steps):
    job(tmp_path, **{**SMALL, "checkpoint_s": 1e9})
    calls = []

    def stop():
        calls.append(1)
        return len(calls) == 6

    with pytest.raises(JobStopped, match="stopped in stage A and saved"):
        run_job(tmp_path, stop=stop)
    (pool,) = tmp_path.glob("pool-*")
    _, about = load_checkpoint(pool)
    assert about["group"] == 0
    assert int(load_checkpoint(pool)[0]["0/iteration"]) == 6
    assert json.loads((tmp_path / "run" / "status.json").read_text())["iteration"] == 6
    assert run_job(tmp_path).facts["images"] == 9


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, small_steps):
    job(tmp_path / "whole", **SMALL)
    job(tmp_path / "cut", **SMALL)
    whole = run_job(tmp_path / "whole")
    with pytest.raises(Killed):
        run_job(tmp_path / "cut", stop=killer(5))
    newest = sorted((tmp_path / "cut").glob("pool-*/checkpoint-*.safetensors"))
    assert len(newest) == 2
    content = bytearray(newest[-1].read_bytes())
    content[-20] ^= 1
    newest[-1].write_bytes(content)
    assert run_job(tmp_path / "cut").facts["model_sha256"] == whole.facts["model_sha256"]


def test_other_settings_or_uploads_are_refused_by_name(tmp_path, small_steps):
    job(tmp_path, **SMALL)
    with pytest.raises(Killed):
        run_job(tmp_path, stop=killer(3))
    with pytest.raises(JobError, match=r"fedmitr\.kd_T: the job has 4\.0, asked for is 2\.0"):
        run_job(tmp_path, {"fedmitr.kd_T": 2.0})
    about = json.loads((tmp_path / JOB).read_text())
    about["uploads"][0]["num_examples"] += 1
    (tmp_path / JOB).write_text(json.dumps(about))
    with pytest.raises(JobError, match="upload of east: the job has"):
        run_job(tmp_path)


def test_how_often_it_saves_may_change(tmp_path, small_steps):
    job(tmp_path, **SMALL)
    with pytest.raises(Killed):
        run_job(tmp_path, stop=killer(3))
    assert run_job(tmp_path, {"fedmitr.checkpoint_s": 60.0}).facts["images"] == 9


def test_a_full_disk_stops_the_job_at_its_last_checkpoint(tmp_path, small_steps, monkeypatch):
    job(tmp_path / "whole", **SMALL)
    job(tmp_path / "cut", **SMALL)
    whole = run_job(tmp_path / "whole")
    saved = []

    def full(path, tensors, header=None):
        saved.append(path)
        if len(saved) > 4:
            raise OSError(28, "No space left on device", str(path))
        save_tensors(path, tensors, header)

    monkeypatch.setattr(fedmitr_progress, "save_tensors", full)
    with pytest.raises(JobError, match=r"stopped at its last checkpoint: .*No space left.*Make room"):
        run_job(tmp_path / "cut")
    (pool,) = (tmp_path / "cut").glob("pool-*")
    assert int(load_checkpoint(pool)[0]["0/iteration"]) == 4
    monkeypatch.undo()
    assert run_job(tmp_path / "cut").facts["model_sha256"] == whole.facts["model_sha256"]


def test_a_second_process_is_kept_out(tmp_path):
    job(tmp_path, **SMALL)
    (tmp_path / "run").mkdir()
    with fedmitr_progress.locked(tmp_path / "run", wait=False), pytest.raises(JobError, match="another process works"):
        run_job(tmp_path)


def test_two_generations_are_kept(tmp_path):
    for number in range(4):
        save_checkpoint(tmp_path, {"x": torch.tensor([number])}, {"number": number})
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2
    assert load_checkpoint(tmp_path)[1] == {"number": 3}
    assert load_checkpoint(tmp_path / "nothing") is None


# -- real signals -----------------------------------------------------------------------------------------------------


SLOW_TEACHERS = """
import sys, time
from strategies import fedmitr_distil
from server_app.fedmitr import main

given = fedmitr_distil.teachers

def slow(*arguments):
    for teacher in given(*arguments):
        time.sleep(1)
        yield teacher

fedmitr_distil.teachers = slow
sys.exit(main(sys.argv[1:]))
"""
"""The command with a stage B that lasts a second a site: by itself it is over before a signal can arrive."""


def started(folder, code=""):
    program = ["-c", code] if code else ["-m", "server_app.fedmitr"]
    arguments = [sys.executable, *program, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def stage_of(folder):
    try:
        return json.loads((folder / "run" / "status.json").read_text())["stage"]
    except OSError:
        return ""


@pytest.mark.slow
def test_a_real_kill_in_every_stage_ends_in_the_same_bits(tmp_path):
    long = {"pool_size": 60, "inv_batch": 10, "inv_iters": 60, "stops": "5,10", "kd_epochs": 40, "checkpoint_s": 0.05}
    job(tmp_path / "whole", **long)
    job(tmp_path / "cut", **long)
    whole = run_job(tmp_path / "whole")
    rng, killed = random.Random(5), []
    for _ in range(20):
        process = started(tmp_path / "cut", "" if "B" in killed else SLOW_TEACHERS)
        wanted = next((stage for stage in "ABC" if stage not in killed), "")
        deadline = time.monotonic() + 120
        while wanted and process.poll() is None and stage_of(tmp_path / "cut") != wanted:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        if not wanted or process.poll() is not None:
            break
        time.sleep(rng.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            killed.append(stage_of(tmp_path / "cut"))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert {"A", "B", "C"} <= set(killed)
    assert run_job(tmp_path / "cut").facts["model_sha256"] == whole.facts["model_sha256"]
    assert whole.facts["model_sha256"] in output


@pytest.mark.slow
def test_sigterm_saves_and_exits(tmp_path):
    job(tmp_path, **{**SMALL, "inv_iters": 4000, "pool_size": 40, "checkpoint_s": 1e9})
    process = started(tmp_path)
    deadline = time.monotonic() + 120
    while stage_of(tmp_path) != "A" and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3 and "stopped in stage A and saved" in output
    (pool,) = tmp_path.glob("pool-*")
    assert load_checkpoint(pool) is not None or list(pool.glob("shard-*"))


@pytest.mark.slow
def test_a_disk_that_is_really_full_leaves_a_job_that_goes_on(tmp_path):
    job(tmp_path / "whole", **SMALL)
    job(tmp_path / "cut", **SMALL)
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000)); "
    code = limit + "from server_app.fedmitr import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cut")], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and "stopped at its last checkpoint" in done.stderr
    whole = run_job(tmp_path / "whole")
    assert run_job(tmp_path / "cut").facts["model_sha256"] == whole.facts["model_sha256"]
