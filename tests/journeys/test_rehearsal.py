"""A whole federation on one machine through the commands that hospitals use; its model is that of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from client_app.egress import verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).resolve().parents[2]


def test_three_hospitals_train_over_tls_what_one_process_trains(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "server_app.rehearsal", "--runs-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1450,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deployed and in-process model are the same" in done.stdout
    report = Path(done.stdout.rpartition("report: ")[2].strip())
    assert report.name == "report.html" and report.is_file()

    run = json.loads((report.parent / "run.json").read_text())
    assert run["status"] == "completed" and run["outstanding"] == []
    assert [site["site"] for site in run["sites"]] == ["county", "st-mary", "university"]
    assert run["final"]["test"]["summary"]["macro_auroc"] > 0.9, "the digits were learnt"

    (folder,) = tmp_path.iterdir()
    for site in ("county", "st-mary", "university"):
        (ledger,) = (folder / "state" / site).glob("*/egress.jsonl")
        assert verify(ledger), "the ledger is whole"
        log = (folder / "logs" / f"{site}.log").read_text()
        assert "INSECURE" not in log and "http://" not in log
    patients = (folder / "data" / "county" / "manifest.csv").read_text()
    server = [path for path in (folder / "state" / "server").rglob("*") if path.is_file()]
    assert "digit" in patients and not any(b"images/0000.png" in path.read_bytes() for path in server)
