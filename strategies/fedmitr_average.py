"""The plain average of a job's uploads, which the sites score beside the final model: FedMITR can lose to it (spec 5).

It goes to the sites, as FedAvg's does, so it is made only where no site by itself can take another's model out of it.
"""

from __future__ import annotations

from collections.abc import Collection
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.supercore import log

from federation.files import load_tensors, save_tensors
from strategies.evaluation import POOLED, PooledScores
from strategies.fedmitr_uploads import Job, JobError, State, read_job

PAGE = "plain_average"
"""Name of the run folder's page."""
FILE = "average.safetensors"
MIN_UPLOADS = 3
"""Of two uploads, a site that knows its own and the average knows the other."""
FIGURES = ("macro_auroc", "balanced_accuracy", "accuracy", "worst_recall", "macro_ap")
"""What is compared: figures that no threshold enters, higher is better."""


def keep_average(job: Job) -> None:
    """Writes the average before the uploads are deleted; the job does not end for want of it."""
    path = job.folder / FILE
    if not _why_not(job) and not path.exists():
        try:
            save_tensors(path, job.average())
        except (OSError, JobError) as error:
            log(WARNING, "\tthe plain average is not kept, so it cannot be compared with: %s", error)


def to_score(folder: Path) -> tuple[State | None, str]:
    """The average that sites may be asked to score, or None and why."""
    try:
        reason = _why_not(read_job(folder))
        return (None, reason) if reason else (load_tensors(folder / FILE)[0], "")
    except (OSError, JobError):
        return None, "the job's folder does not hold it"


def _why_not(job: Job) -> str:
    if job.options.server in ("average", "ensemble"):
        return "the final model is that average"
    if not job.options.score_average:
        return "fedmitr.score_average is false"
    if len(job.uploads) < MIN_UPLOADS:
        return f"of fewer than {MIN_UPLOADS} uploads, a site could take another's model out of it"
    return ""


def compared(
    final: PooledScores, average: PooledScores, excluded: Collection[str]
) -> dict[str, dict[str, list[float]]]:
    """Scope -> figure -> [of the final model, of the average], where both are defined.

    Sites that scored both; all together only where no site scored one of them alone.
    """
    same = [POOLED] * (final.sites == average.sites)
    scopes = same + [site for site in final.sites if site in average.sites]
    found = {}
    for scope in scopes:
        pairs = [pool.summary(None, set(excluded), scope) for pool in (final, average)]
        names = [name for name in FIGURES if all(one.get(name) is not None for one in pairs)]
        found[scope] = {name: [float(one[name]) for one in pairs] for name in names}
    return found


def log_compared(page: dict[str, Any]) -> None:
    """One line of the comparison, and a warning where the final model loses."""
    if reason := page.get("not_scored"):
        log(INFO, "\tthe plain average of the uploads is not scored: %s", reason)
        return
    pooled = page["figures"].get(POOLED, {})
    shown = ", ".join(f"{name} {final:.4f}, {average:.4f}" for name, (final, average) in pooled.items())
    log(INFO, "\t├── test of the final model, of the plain average of the uploads: %s", shown or "not the same sites")
    if lost := [name for name, (final, average) in pooled.items() if average > final]:
        log(WARNING, "\tthe plain average does better by %s (fedmitr.server = 'average')", ", ".join(lost))
