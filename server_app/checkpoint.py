"""Checkpoints: one safetensors file a round, whole or not there, the two newest kept.

A file holds the global modules, the method's own tensors, and as JSON in its header everything else a resumed run needs
or must agree with. It names its own content's hash, so a damaged file is noticed and the one before is taken.
Random state: every draw is a function of (seed, purpose, round, site), so the seed and the round are all of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from logging import WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.supercore import log
from safetensors import SafetensorError, safe_open

from federation import wire
from federation.files import save_tensors
from federation.settings import RUNTIME_KEYS, Settings
from strategies.progress import Modules, Progress

FOLDER = "checkpoints"
GENERATIONS = 2
FORMAT = 1


class ResumeError(ValueError):
    """A run folder that cannot be continued with these settings; the message shows both values."""


@dataclass(frozen=True)
class Facts:
    """What a checkpoint was made with, compared at resume. ``data_sha256``: site -> checksum of its data."""

    settings: dict[str, Any]
    labels: list[str]
    task: str
    architecture: str
    data_sha256: dict[str, str]
    metrics_bytes: int = 0


def architecture_sha256(modules: Modules) -> str:
    """SHA-256 of all module, tensor, shape and dtype names."""
    return wire.schema_sha256((), "", {name: wire.spec_of(state) for name, state in modules.items()})


def save_checkpoint(run_dir: Path, progress: Progress, facts: Facts) -> Path:
    """Writes the state after a round and drops all but the two newest. Refuses to write a state without tensors."""
    tensors = {
        f"module/{module}/{name}": value for module, state in progress.modules.items() for name, value in state.items()
    }
    if not tensors:
        raise ValueError("the state has no tensors; an empty state is never written")
    tensors |= {f"method/{name}": value for name, value in progress.method.items()}
    scalars = {f.name: getattr(progress, f.name) for f in fields(progress) if f.name not in ("modules", "method")}
    header = {"format": FORMAT, "progress": scalars, "facts": asdict(facts)}
    header["sha256"] = _hash(header, tensors)
    path = run_dir / FOLDER / f"round-{progress.server_round:06d}.safetensors"
    save_tensors(path, tensors, {"consilium": json.dumps(header)})
    for old in _files(run_dir)[:-GENERATIONS]:
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(run_dir: Path) -> tuple[Progress, Facts]:
    """The newest whole checkpoint. Raises ResumeError where there is none."""
    for path in reversed(_files(run_dir)):
        try:
            return _read(path)
        except (SafetensorError, ValueError, KeyError, TypeError, OSError) as error:
            log(WARNING, "checkpoint %s is damaged (%s); taking the one before", path.name, type(error).__name__)
    raise ResumeError(f"{run_dir} holds no whole checkpoint; it stopped before its first round ended. Start a new run")


def _files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / FOLDER).glob("round-*.safetensors"))


def _read(path: Path) -> tuple[Progress, Facts]:
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["consilium"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    if header["format"] != FORMAT or header.pop("sha256") != _hash(header, tensors):
        raise ValueError("content and hash differ")
    progress = Progress(**header["progress"])
    for name, value in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "module":
            module, _, key = rest.partition("/")
            progress.modules.setdefault(module, {})[key] = value
        else:
            progress.method[rest] = value
    return progress, Facts(**header["facts"])


def _hash(header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    return wire.state_sha256({json.dumps(header, sort_keys=True): tensors})


def check_same_settings(facts: Facts, settings: Settings) -> None:
    """Raises ResumeError for settings that shape the arithmetic and differ, naming both values of each."""
    now = settings.flat()
    keys = sorted((set(facts.settings) | set(now)) - RUNTIME_KEYS)
    differing = [key for key in keys if facts.settings.get(key) != now.get(key)]
    if differing:
        lines = [f"{key}: the run has {facts.settings.get(key)!r}, asked for is {now.get(key)!r}" for key in differing]
        raise ResumeError(
            "this run was made with other settings; give the same or start a new run:\n" + "\n".join(lines)
        )
