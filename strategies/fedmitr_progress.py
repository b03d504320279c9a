"""Where a job stands: a log line, a status file, checkpoints of two generations, and the signal to stop.

No image and no weight is ever logged.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.supercore import log
from torch import Tensor

from federation import wire
from federation.files import load_tensors, save_tensors, write_atomic
from strategies.fedmitr_uploads import JobError, State

LOG_S = 30.0
STATUS_S = 5.0
ESTIMATE_S = 2.0
SLOW_S = 60.0
"""Seconds between two log lines and two status files; seconds of a stage after which the CPU's time is estimated, and
how long it has to be to be warned of."""
GENERATIONS = 2


class JobStopped(RuntimeError):
    """The job was asked to stop and has saved its work."""


class Monitor:
    """Called after every step of a stage; says where it stands, saves when it is time, and stops when it is asked to.

    ``stop``: whether to stop now. ``folder`` gets ``status.json``.
    """

    def __init__(
        self, folder: Path, device: torch.device, checkpoint_s: float, stop: Callable[[], bool] | None = None
    ) -> None:
        self._path = folder / "status.json"
        self._device = device
        self._checkpoint_s = checkpoint_s
        self._stop = stop or (lambda: False)
        self._is_slow = device.type == "cpu"
        self._logged = self._saved = time.monotonic()
        self._stage, self._total, self._first, self._started, self._written = "", 1.0, 0.0, 0.0, 0.0

    def stage(self, name: str, total: float, done: float, **where: Any) -> None:
        """A stage begins, or goes on after ``done`` of ``total``."""
        self._stage, self._total, self._first = name, max(1.0, total), done
        self._started = time.monotonic()
        self._write(done, None, where)
        log(INFO, "\tstage %s: %s", name, _described(where))

    def step(
        self,
        done: float,
        *,
        loss: Callable[[], float] | None = None,
        save: Callable[[], None] | None = None,
        **where: Any,
    ) -> None:
        """One step of the stage is done. ``loss`` is asked only when it is shown. Raises JobStopped after saving."""
        stops, now = self._stop(), time.monotonic()
        if save is not None and (stops or now - self._saved >= self._checkpoint_s):
            save()
            self._saved = now
        if stops or now - self._written >= STATUS_S:
            self._write(done, loss() if loss else None, where)
        if now - self._logged >= LOG_S:
            eta = self._eta_s(done)
            log(INFO, "\tstage %s: %s, %s left", self._stage, _described(where), _duration(eta))
            self._logged = now
        if self._is_slow and now - self._started >= ESTIMATE_S and (self._eta_s(done) or 0.0) >= SLOW_S:
            self._is_slow = False
            log(
                WARNING,
                "\tno GPU is used; on this CPU stage %s takes about %s more. Fewer fedmitr.inv_iters or kd_epochs, a "
                "smaller pool, more training.threads or a GPU make it shorter",
                self._stage,
                _duration(self._eta_s(done)),
            )
        if stops:
            raise JobStopped(f"the job was stopped in stage {self._stage} and saved; run it again to go on")

    def done(self, **facts: Any) -> None:
        """The job is over."""
        self._stage = "done"
        self._write(self._total, None, facts)

    def _eta_s(self, done: float) -> float | None:
        gone = done - self._first
        return None if gone <= 0 else (time.monotonic() - self._started) / gone * max(0.0, self._total - done)

    def _write(self, done: float, loss: float | None, where: Mapping[str, Any]) -> None:
        status = {
            "stage": self._stage,
            **where,
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "share": round(min(1.0, done / self._total), 4),
            "eta_s": None if (eta := self._eta_s(done)) is None else round(eta),
            "device": str(self._device),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "pid": os.getpid(),
        }
        write_atomic(self._path, json.dumps(status, indent=1).encode())
        self._written = time.monotonic()


def _described(where: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in where.items())


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


# -- checkpoints ------------------------------------------------------------------------------------------------------


def save_checkpoint(folder: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Writes the next generation, whole or not at all, and drops all but the two newest. ``about`` is plain JSON."""
    known = _generations(folder)
    number = 1 + (int(known[-1].stem.partition("-")[2]) if known else 0)
    on_cpu = {name: value.detach().cpu() for name, value in tensors.items()}
    header = {"about": json.dumps(about, sort_keys=True)}
    header["sha256"] = _hash(header["about"], on_cpu)
    save_tensors(folder / f"checkpoint-{number:06d}.safetensors", on_cpu, header)
    for old in _generations(folder)[:-GENERATIONS]:
        old.unlink(missing_ok=True)


def load_checkpoint(folder: Path) -> tuple[State, dict[str, Any]] | None:
    """The newest whole checkpoint, or None where there is none."""
    for path in reversed(_generations(folder)):
        with contextlib.suppress(OSError):
            tensors, header = load_tensors(path)
            if header.get("sha256") == _hash(header.get("about", ""), tensors):
                return tensors, json.loads(header["about"])
        log(WARNING, "\tcheckpoint %s is damaged; taking the one before", path.name)
    return None


def drop_checkpoints(folder: Path) -> None:
    """Removes every generation, when what they led to is on the disk."""
    for path in _generations(folder):
        path.unlink(missing_ok=True)


def _generations(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.safetensors"))


def _hash(about: str, tensors: Mapping[str, Tensor]) -> str:
    return wire.state_sha256({about: tensors})


def check_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Writes down what a run of the job is made of, or compares. Raises JobError that names what differs."""
    path = folder / "plan.json"
    if not path.exists():
        write_atomic(path, json.dumps(plan, indent=1, sort_keys=True).encode())
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    now = json.loads(json.dumps(plan))
    differing = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if differing:
        lines = [f"{key}: the job has {before.get(key)!r}, asked for is {now.get(key)!r}" for key in differing]
        raise JobError(
            f"the work in {folder} was made with other settings or uploads; give the same or start a new job:\n"
            + "\n".join(lines)
        )


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Keeps other processes out of a folder; with ``wait`` until it is free, else raises JobError."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise JobError(f"another process works in {folder}; wait for it, or see its status.json") from error
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[Callable[[], bool]]:
    """Gives the question whether SIGTERM came; the handler there was is back after the block.

    Signals reach the main thread only; elsewhere the answer is always no.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
