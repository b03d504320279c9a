"""The server's job of a FedMITR run as a command: run it, go on with it, look at it.

    python -m server_app.fedmitr runs/20260101-120000-fedmitr/job            run or go on; SIGTERM saves and stops
    python -m server_app.fedmitr runs/.../job --status                       where it stands
    python -m server_app.fedmitr runs/.../job --preview sheet.png            some synthetic images, where it is allowed

The model is ``run/final.safetensors`` in the folder. A federation that was killed in its job may be continued with
``resume=`` before or after: it takes what the job has.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.nn import functional

from federation.files import load_tensors, write_atomic
from strategies.fedmitr_job import RUN, JobError, JobStopped, complete
from strategies.fedmitr_progress import stop_on_sigterm
from strategies.fedmitr_uploads import read_job

AUDIT = "audit.jsonl"
SHEET = 8
"""Images along a side of a preview."""


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 done, 1 refused, 3 stopped and to be continued."""
    parser = argparse.ArgumentParser(prog="python -m server_app.fedmitr", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder with job.json that a run left")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="print where the job stands")
    what.add_argument("--preview", type=Path, metavar="PNG", help="write a sheet of synthetic images; is recorded")
    given = parser.parse_args(arguments)
    try:
        if given.status:
            print(status(given.folder))
        elif given.preview:
            preview(given.folder, given.preview)
        else:
            with stop_on_sigterm() as stop:
                result = complete(given.folder, stop)
            print(f"model sha256: {result.facts['model_sha256']}\n{given.folder / RUN / 'final.safetensors'}")
    except JobStopped as stopped:
        print(stopped, file=sys.stderr)
        return 3
    except (JobError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def status(folder: Path) -> str:
    """The newest status as text, one fact a line. Raises JobError for a folder without a job."""
    job = read_job(folder)
    path = folder / RUN / "status.json"
    if not path.exists():
        return f"{len(job.uploads)} uploads, not begun"
    facts = json.loads(path.read_text(encoding="utf-8"))
    return "\n".join(f"{name}: {value}" for name, value in facts.items() if value is not None)


def preview(folder: Path, path: Path) -> None:
    """Writes up to 64 synthetic images as one picture and notes in ``audit.jsonl`` who may have seen them.

    Raises JobError unless ``fedmitr.allow_preview`` is true in the job, and where no image is there.
    """
    from matplotlib import image as picture

    if not read_job(folder).options.allow_preview:
        raise JobError("fedmitr.allow_preview is false: synthetic images may resemble patients and are not shown")
    shards = sorted(folder.glob("pool-*/shard-*.safetensors"))
    if not shards:
        raise JobError(f"{folder} holds no synthetic images; they are deleted unless fedmitr.keep_synthetic is true")
    images = []
    for shard in shards:
        images += list(load_tensors(shard)[0]["images"].float())
    chosen = images[:: -(-len(images) // SHEET**2)]
    framed = [functional.pad(image.expand(3, -1, -1), (1, 1, 1, 1)) for image in chosen]
    framed += [framed[0] * 0] * (-len(framed) % SHEET)
    rows = [torch.cat(framed[first : first + SHEET], dim=2) for first in range(0, len(framed), SHEET)]
    drawn = io.BytesIO()
    picture.imsave(drawn, torch.cat(rows, dim=1).permute(1, 2, 0).numpy(), format="png")
    note = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "action": "preview", "images": len(chosen)}
    audit = folder / AUDIT
    before = audit.read_bytes() if audit.exists() else b""
    write_atomic(audit, before + json.dumps(note).encode() + b"\n")
    write_atomic(path, drawn.getvalue())


if __name__ == "__main__":
    sys.exit(main())
