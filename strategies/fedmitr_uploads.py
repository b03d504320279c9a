"""The folder of a job: uploads on the disk as they arrive, and the one file that says what the job is.

Every accepted upload is a file of its own before the next reply is pulled, so the server holds one model at a time and
a run that is killed asks only the sites that have not sent theirs. The folder is the server's alone (mode 0700): it
holds every site's model in the clear.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.supercore import log
from torch import Tensor, nn

from federation.files import load_tensors, save_tensors, write_atomic
from federation.settings import Scalar, Settings
from models.fedmitr_networks import build_vit
from strategies.aggregation import StreamingMean, apply_mean, capped_weights
from strategies.cards import SiteCard

JOB, INITIAL, UPLOADS, LATE = "job.json", "initial.safetensors", "uploads", "late"
FORMAT = 1

State = dict[str, Tensor]


class JobError(RuntimeError):
    """A job that cannot be started or continued; the message says why and what to do."""


@dataclass(frozen=True)
class Upload:
    """One site's upload. ``positives`` and ``negatives`` by label as on its card, -1 where suppressed.

    ``num_examples`` it trained on, ``extra`` numbers that came with it, ``sha256`` of the file.
    """

    site: str
    num_examples: int
    positives: tuple[int, ...]
    negatives: tuple[int, ...]
    extra: dict[str, float]
    sha256: str


@dataclass(frozen=True)
class Job:
    """What a job is made of. ``uploads`` in the order of the sites' names, which is the order of every sum.

    ``left_out``: the sites that were asked and whose uploads are not there, ``site``, ``kind`` (``refused`` or
    ``missing``) and ``reason`` of each.
    """

    folder: Path
    settings: Settings
    labels: tuple[str, ...]
    task: str
    uploads: tuple[Upload, ...]
    left_out: tuple[dict[str, str], ...] = ()

    @property
    def weights(self) -> dict[str, float]:
        """Each site's weight in the plain average, as ``federation.weighting`` and ``max_site_share`` say."""
        fed = self.settings.federation
        if fed.weighting == "equal":
            return dict.fromkeys((upload.site for upload in self.uploads), 1.0)
        counts = {upload.site: float(upload.num_examples) for upload in self.uploads}
        return capped_weights(counts, fed.max_site_share)

    @property
    def counts(self) -> Tensor:
        """Samples by site and class ``(K, C) int64``; suppressed ones are 0."""
        return torch.tensor([upload.positives for upload in self.uploads]).clamp(min=0)

    @property
    def negatives(self) -> Tensor:
        """Samples that are known not to have a label, by site and label ``(K, C) int64``; suppressed ones are 0.

        Where the positives are suppressed too it is 1: such a label is known at the site, and absent in its targets.
        """
        told = torch.tensor([upload.negatives for upload in self.uploads])
        positives = torch.tensor([upload.positives for upload in self.uploads])
        return torch.where((told < 0) & (positives < 0), 1, told.clamp(min=0))

    @property
    def options(self) -> Any:
        """The method's own settings."""
        return self.settings.options

    def network(self) -> nn.Module:
        """The network that every site trained, its weights from torch's current generator."""
        return vit_of(self.settings, len(self.labels))

    def initial(self) -> State:
        """The state that every site started from."""
        return load_tensors(self.folder / INITIAL)[0]

    def change(self, site: int) -> State:
        """What a site sent, float32. Raises JobError where the file is not the one that the job began with."""
        upload = self.uploads[site]
        path = upload_path(self.folder, upload.site)
        if not path.exists() or file_sha256(path) != upload.sha256:
            raise JobError(
                f"the upload of {upload.site} is {'another file' if path.exists() else 'gone'}, the job began with "
                f"SHA-256 {upload.sha256}; restore {path} or start a new job"
            )
        return {name: value.float() for name, value in load_tensors(path)[0].items()}

    def model(self, site: int) -> nn.Module:
        """One site's model, in evaluation mode on the CPU."""
        change = self.change(site)
        network = self.network()
        network.load_state_dict({name: value + change[name] for name, value in self.initial().items()}, strict=True)
        return network.eval()

    def average(self) -> State:
        """The initial state plus the weighted mean of the changes, one upload in memory at a time.

        The base's own mean cannot be used: a resumed run does not have the sites that sent before it was killed.
        """
        mean, weights = StreamingMean(), self.weights
        for place, upload in enumerate(self.uploads):
            change = {name: value.numpy() for name, value in self.change(place).items()}
            mean.add(upload.site, change, weights[upload.site])
        return apply_mean(self.initial(), mean.result())

    def changed(self, changes: Mapping[str, Scalar]) -> Job:
        """The same uploads under other settings. Raises SettingsError."""
        settings = Settings.from_run_config({**self.settings.flat(), **changes})
        return replace(self, settings=settings)


def vit_of(settings: Settings, num_labels: int, *, pretrained: bool = False) -> nn.Module:
    """The network of these settings; with ``pretrained``, its body from ``fedmitr.init_weights`` where given."""
    data, options = settings.data, settings.options
    weights = options.init_weights if pretrained else ""
    return build_vit(
        options, num_labels=num_labels, image_size=data.image_size, channels=data.channels, weights=weights
    )


def job_folder(settings: Settings, experiment: str) -> Path:
    """Where the job of a run lies: ``fedmitr.state_dir``/experiment, or ``job`` in the run's folder."""
    if settings.options.state_dir:
        return Path(settings.options.state_dir).expanduser().absolute() / experiment
    return Path(settings.reporting.runs_dir).expanduser().absolute() / experiment / "job"


def upload_path(folder: Path, site: str) -> Path:
    return folder / UPLOADS / f"{site}.safetensors"


def has_begun(folder: Path) -> bool:
    """Whether the uploads of this job are closed: it is computing, or it is done."""
    return (folder / JOB).exists()


def private_folder(folder: Path) -> Path:
    """Makes a folder that only its owner can look into."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    return folder


def spool(
    folder: Path,
    card: SiteCard,
    change: Mapping[str, Tensor],
    num_examples: int,
    extra: Mapping[str, float] | None = None,
) -> bool:
    """Writes one accepted upload with what the site's card says; False where the job has begun.

    It is kept aside then until `clear`, never to be used. A run itself spools nothing so late: the platform drops a
    reply that comes after ``federation.timeout_s``. A second upload of a site before the job begins replaces the first.
    """
    private_folder(folder)
    site, late = card.site, has_begun(folder)
    path = folder / LATE / f"{site}.safetensors" if late else upload_path(folder, site)
    if late:
        log(WARNING, "\tthe upload of %s came after the job had begun: kept, not used", site)
    elif path.exists():
        log(WARNING, "\t%s sent a second upload; the last one counts", site)
    private_folder(path.parent)
    about = {
        "site": site,
        "num_examples": num_examples,
        "positives": card.positives,
        "negatives": card.negatives,
        "extra": dict(extra or {}),
    }
    save_tensors(path, change, {"about": json.dumps(about)})
    return not late


def spooled(folder: Path) -> list[Upload]:
    """The uploads on the disk, sorted by site, whether or not their sites are there today."""
    found = []
    for path in (folder / UPLOADS).glob("[!.]*.safetensors"):
        about = json.loads(load_tensors(path)[1]["about"])
        found.append(_upload(about | {"sha256": file_sha256(path)}))
    return sorted(found, key=lambda upload: upload.site)


def _upload(about: dict[str, Any]) -> Upload:
    return Upload(**(about | {name: tuple(about[name]) for name in ("positives", "negatives")}))


def late_sites(folder: Path) -> list[str]:
    """Sites whose uploads were spooled after the job had begun and are not deleted yet, sorted."""
    return sorted(path.stem for path in (folder / LATE).glob("[!.]*.safetensors"))


def begin(
    folder: Path,
    settings: Settings,
    labels: tuple[str, ...],
    task: str,
    initial: Mapping[str, Tensor],
    left_out: Iterable[Mapping[str, str]] = (),
) -> Job:
    """Closes the uploads and writes down what the job is. ``initial``: the state that the sites started from.

    ``left_out``: see `Job`; a run that is killed in its job has it from here, for the sites are not asked again.
    """
    save_tensors(folder / INITIAL, initial)
    about = {
        "format": FORMAT,
        "settings": settings.flat() | {"resume": ""},
        "labels": list(labels),
        "task": task,
        "uploads": [asdict(upload) for upload in spooled(folder)],
        "left_out": [dict(entry) for entry in left_out],
    }
    write_atomic(folder / JOB, json.dumps(about, indent=1).encode())
    return read_job(folder)


def read_job(folder: Path) -> Job:
    """The job in a folder. Raises JobError where there is none."""
    try:
        about = json.loads((folder / JOB).read_text(encoding="utf-8"))
        uploads = tuple(_upload(one) for one in about["uploads"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise JobError(
            f"{folder} holds no job ({type(error).__name__}: {error}); give the folder with {JOB} that a run left"
        ) from error
    if about["format"] != FORMAT:
        raise JobError(f"{folder / JOB} has format {about['format']}, this code reads {FORMAT}; use the code it is of")
    settings = Settings.from_run_config(about["settings"])
    return Job(folder, settings, tuple(about["labels"]), about["task"], uploads, tuple(about.get("left_out", ())))


def clear(folder: Path) -> None:
    """Deletes what could show a patient or a site: all uploads, synthetic images, checkpoints, cached outputs.

    The late ones too: they are uploads. ``job.json``, the plain average and the folders' ``final.safetensors``,
    ``result.json``, ``plan.json`` and ``status.json`` stay.
    """
    for name in (UPLOADS, LATE):
        shutil.rmtree(folder / name, ignore_errors=True)
    for pool in folder.glob("pool-*"):
        shutil.rmtree(pool)
    (folder / INITIAL).unlink(missing_ok=True)
    for pattern in ("*/teacher-*.safetensors", "*/checkpoint-*.safetensors"):
        for path in folder.glob(pattern):
            path.unlink()
    log(INFO, "\tuploads, synthetic images and checkpoints of the job are deleted")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
