"""The server's job of `fedmitr`: from a folder of uploads to one global model, in three stages that survive a kill.

A job is a folder, made by `strategies.fedmitr_uploads` (mode 0700; nothing in it ever leaves the server)::

    job.json                 settings, labels, task, and of each site: samples, counts by class, SHA-256 of its upload
    initial.safetensors      the model that every site started from
    uploads/SITE.safetensors what a site sent: its change, in the dtype that it was sent in
    average.safetensors      the plain average of three uploads or more, which sites score beside the final model
    late/                    what was spooled after the job had begun: never used, kept until the final model is there
    pool-HASH/               stage A: synthetic images, one file a group of batches; rows of a table share it
    NAME/                    one run of the job: plan.json, teacher-*.safetensors (stage B), checkpoint-*.safetensors
                             (stage C), final.safetensors, result.json, status.json

**A**: each site's model is inverted on its own. **B**: the ensemble's outputs on the pool, one model at a time.
**C**: the student learns from the pool. A killed job that is run again goes on where it was, to the same bits.

For a table of methods on the same uploads::

    for name, changes in rows().items():
        result = run_job(folder, changes, name=name)          # goes on, or gives at once what is there
        result.state                                          # the model, {tensor: value}, on the CPU
        result.facts                                          # see `Result`
        logits = ensemble_predict(folder, images)             # for the row "ensemble", which is not one model

No reply of a run gets into ``late``: the platform drops those that come after ``federation.timeout_s``. Only what an
operator or another process gives to `fedmitr_uploads.spool` on the folder does.

A folder with uploads is what a run with ``fedmitr.server = "average"`` and ``fedmitr.keep_synthetic = true`` leaves
(``job_folder(settings, experiment)``). `run_job` deletes nothing; `complete` does, after the final model was verified.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from logging import WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.supercore import log
from torch import Tensor

from federation import wire
from federation.files import load_tensors, save_tensors, write_atomic
from federation.settings import Scalar, Settings
from models.fedmitr import OBJECTIVES, ensemble_logits, normalised
from strategies.fedmitr_area import FedMITRArea
from strategies.fedmitr_average import keep_average
from strategies.fedmitr_baselines import METHODS as BY_GENERATOR
from strategies.fedmitr_baselines import distil_by_generator
from strategies.fedmitr_distil import distil, ensemble_weights, teach, teachers
from strategies.fedmitr_generate import generate, not_inverted, pool_name, warnings_of
from strategies.fedmitr_progress import JobStopped, Monitor, check_plan, drop_checkpoints, locked
from strategies.fedmitr_uploads import Job, JobError, State, clear, job_folder, late_sites, private_folder, read_job

__all__ = ["JobError", "JobStopped", "Result", "complete", "ensemble_predict", "job_folder", "rows", "run_job"]

RUN = "run"
"""Name of the run of a job that a federation itself does."""
NOT_PLANNED = ("resume", "training.device", "fedmitr.checkpoint_s", "fedmitr.state_dir", "fedmitr.score_average")
"""Keys that a continued job may change: they say where and when, or what else is scored, never what is made."""


@dataclass(frozen=True)
class Result:
    """What a job came to. ``state``: the global model by tensor name, on the CPU.

    ``facts``: ``server``, ``is_average`` (the model is the plain average), ``images`` and ``dropped`` of the pool,
    ``patches_high`` and ``patches_low``, ``seconds`` by stage (those of a pool that was there are the ones it took),
    ``device``, ``sites`` (of each its examples, the numbers that it sent, with a pool ``images`` and ``dropped``, and
    ``not_inverted`` with the reason where its model was asked for none), ``late`` sites (spooled after it
    began), ``warnings``, ``model_sha256``.
    """

    state: State
    facts: dict[str, Any]


def rows() -> dict[str, dict[str, Scalar]]:
    """Every row of the comparison, name -> changes of the settings: FedMITR, its ablations, the baselines.

    Numbers of the baselines that are not FedMITR's are their papers' (spec 8).
    """
    server = "fedmitr.server"
    no_stops: dict[str, Scalar] = {"fedmitr.stops": "", "fedmitr.ratios": "", "fedmitr.rebirth": False}
    return {
        "fedmitr": {server: "fedmitr"},
        "fedmitr_uniform": {server: "fedmitr", "fedmitr.ensemble_weight": "uniform"},
        "no_sparsity": {server: "whole_ce", **no_stops},
        "no_relabel": {server: "high_only"},
        "hard_low": {server: "hard_low"},
        "kd": {server: "kd"},
        "dense_inversion": {server: "dense_inversion"},
        "average": {server: "average"},
        "ensemble": {server: "ensemble"},
        "ensemble_uniform": {server: "ensemble", "fedmitr.ensemble_weight": "uniform"},
        "dense": {server: "dense", "fedmitr.kd_T": 20.0, "fedmitr.kd_lr": 0.005},
        "coboosting": {server: "coboosting", "fedmitr.kd_T": 4.0},
        "fedftg": {server: "fedftg", "fedmitr.kd_T": 1.0},
    }


def run_job(
    folder: Path,
    changes: Mapping[str, Scalar] | None = None,
    *,
    name: str = RUN,
    stop: Callable[[], bool] | None = None,
) -> Result:
    """Runs the job in ``folder``, or goes on with it, or gives the result that is there.

    ``changes`` of the job's settings; ``name`` of the sub-folder that holds this run's work; ``stop``: asked after
    every step whether to save and stop. Raises JobError for a job that cannot go on (other settings or uploads than it
    began with, a full disk, a loss that is not finite), JobStopped, SettingsError.
    """
    job = read_job(folder).changed(changes or {})
    work = private_folder(folder / name)
    with locked(work, wait=False), _computing(job.settings) as device:
        check_plan(work, _plan(job))
        if (work / "result.json").exists():
            return read_result(work)
        if wrong := unfit(job.options, job.task, job.counts):
            raise JobError(wrong)
        monitor = Monitor(work, device, job.options.checkpoint_s, stop)
        found = warnings_of(job)
        for warning in found:
            log(WARNING, "\t%s", warning)
        try:
            state, facts = _computed(job, work, device, monitor)
            result = _kept(job, work, state, facts | {"device": _device_name(device)}, found)
        except OSError as error:
            raise JobError(
                f"the job stopped at its last checkpoint: {error}. Make room, or mend the disk, and run it again"
            ) from error
        except torch.OutOfMemoryError as error:
            raise JobError(
                f"the device ran out of memory: {error}. Take a smaller fedmitr.inv_batch or kd_batch in a new job, "
                "for the images depend on it"
            ) from error
        monitor.done(server=job.options.server)
        return result


def complete(folder: Path, stop: Callable[[], bool] | None = None) -> Result:
    """`run_job` as the settings of the job say, then deletes what could show a patient unless they say to keep it.

    The plain average, where the sites may score it, stays.
    """
    result = run_job(folder, stop=stop)
    job = read_job(folder)
    keep_average(job)
    if not job.options.keep_synthetic:
        clear(folder)
    return result


def _computed(job: Job, work: Path, device: torch.device, monitor: Monitor) -> tuple[State, dict[str, Any]]:
    """The stages that ``fedmitr.server`` names."""
    server, data = job.options.server, job.settings.data
    if server in ("average", "ensemble"):
        if server == "ensemble":
            log(WARNING, "\tfedmitr.server = 'ensemble' is %s models, not one: the average is saved", len(job.uploads))
        return job.average(), {"is_average": True, "seconds": {}}
    if server in BY_GENERATOR:
        started = time.monotonic()
        state = distil_by_generator(job, work, device, monitor)
        return state, {"is_average": False, "seconds": {"C": time.monotonic() - started}}
    normalise = job.settings.model.normalise
    inversion = job.options.inversion(normalise, data.channels)
    pool, facts = generate(job, inversion, device, monitor)
    objective = _objective(job)
    started = time.monotonic()
    view = OBJECTIVES[objective]
    teacher = None if view is None else teach(job, pool, view, work, device, monitor)
    taught = time.monotonic()
    state = distil(
        job, pool, teacher, job.options.distillation(objective, normalise, data.channels), work, device, monitor
    )
    seconds = {"A": facts.pop("seconds"), "B": taught - started, "C": time.monotonic() - taught}
    return state, {**facts, "is_average": False, "seconds": seconds, "pool": pool_name(job, inversion)}


def unfit(options: FedMITRArea, task: str, counts: Tensor) -> str:
    """Why no job with these settings can be made of sites with ``counts (K, C)`` samples by class; "" where it can."""
    if task == "multilabel" and options.server in BY_GENERATOR:
        return (
            f"fedmitr.server = {options.server!r} needs one label an image and the task has several; use 'fedmitr', "
            "'kd', 'dense_inversion', 'average' or 'ensemble'"
        )
    if task == "multilabel" and options.ensemble_weight == "label_count":
        return "fedmitr.ensemble_weight = 'label_count' needs one label an image; use 'class_count'"
    if options.server not in ("average", "ensemble") and not bool((counts >= options.min_class_count).any()):
        return (
            f"no site holds a class with {options.min_class_count} samples that it may tell (fedmitr.min_class_count, "
            "privacy.min_cell), so there is nothing to ask its model for; lower these as far as the sites agree to"
        )
    return ""


def _objective(job: Job) -> str:
    """What the student learns of a pool (`models.fedmitr.OBJECTIVES`).

    Choice: DeepInversion's images are distilled as a whole, as plain distillation on FedMITR's images is.
    """
    server = job.options.server
    named = {"fedmitr": job.options.relabel_mode, "kd": "whole_kd", "dense_inversion": "whole_kd"}
    return named.get(server, server)


def _kept(job: Job, work: Path, state: State, facts: dict[str, Any], found: list[str]) -> Result:
    """The model is on the disk before anything else is done, read again and compared; then the facts."""
    model_sha256 = wire.state_sha256({"model": state})
    path = work / "final.safetensors"
    save_tensors(path, state, {"sha256": model_sha256})
    if wire.state_sha256({"model": load_tensors(path)[0]}) != model_sha256:
        raise JobError(f"{path} does not hold what was written; look at the disk and run the job again")
    made = facts.pop("by_site", {})
    facts = {
        "server": job.options.server,
        **facts,
        "sites": _told_of_sites(job, made),
        "late": late_sites(job.folder),
        "warnings": found,
        "model_sha256": model_sha256,
    }
    write_atomic(work / "result.json", json.dumps(facts, indent=1).encode())
    drop_checkpoints(work)
    return Result(state, facts)


def _told_of_sites(job: Job, made: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, Any]]:
    """What the facts say of each site; ``made``: of each what its model was inverted to, empty without a pool."""
    silent = not_inverted(job) if made else {}
    return {
        upload.site: {"num_examples": upload.num_examples, **upload.extra}
        | dict(made.get(upload.site, {}))
        | ({"not_inverted": silent[upload.site]} if upload.site in silent else {})
        for upload in job.uploads
    }


def _device_name(device: torch.device) -> str:
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def read_result(work: Path) -> Result:
    """The result in a run's folder. Raises JobError where the model is not the one that was written."""
    facts = json.loads((work / "result.json").read_text(encoding="utf-8"))
    path = work / "final.safetensors"
    state = load_tensors(path)[0] if path.exists() else {}
    if wire.state_sha256({"model": state}) != facts["model_sha256"]:
        raise JobError(f"{path} is not the model that the job ended with; restore it")
    return Result(state, facts)


def ensemble_predict(
    folder: Path, images: Tensor, changes: Mapping[str, Scalar] | None = None, *, batch_size: int = 256
) -> Tensor:
    """The ensemble's logits ``(B, C) float32`` on pixels in [0, 1] ``(B, ch, H, W)``, one model in memory at a time.

    ``fedmitr.ensemble_weight`` says how sites are weighed; ``label_count`` is by class, for the labels are not known.
    """
    job = read_job(folder).changed(changes or {})
    with _computing(job.settings) as device, torch.no_grad():
        logits = [
            torch.cat(
                [
                    model.eval()(normalised(part.to(device), mean, std)).float().cpu()
                    for part in images.split(batch_size)
                ]
            )
            for model, mean, std in teachers(job, device)
        ]
    return ensemble_logits(torch.stack(logits), ensemble_weights(job))


def _plan(job: Job) -> dict[str, Any]:
    """What the work of a run depends on, to be compared when it goes on."""
    plan: dict[str, Any] = {key: value for key, value in job.settings.flat().items() if key not in NOT_PLANNED}
    for upload in job.uploads:
        plan[f"upload of {upload.site}"] = asdict(upload)
    return plan


@contextlib.contextmanager
def _computing(settings: Settings) -> Iterator[torch.device]:
    """The device of ``training.device`` and the CPU threads of ``training.threads``, which change the sums."""
    wanted = settings.training.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise JobError("training.device = 'cuda' but this machine offers no CUDA device; use 'auto' or 'cpu'")
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.training.threads)
    try:
        yield torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")
    finally:
        torch.set_num_threads(threads)
