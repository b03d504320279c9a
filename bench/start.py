"""Start: from `inprocess.run` to the first training message, after imports."""

from __future__ import annotations

import subprocess
import sys
import tempfile

from bench.rows import Row

REPEATS = 5

CHILD = """
import sys, time
from server_app import inprocess, report
from torch.utils import tensorboard
from federation import wire

def first_training(message, answer):
    if message.metadata.message_type == wire.TRAIN:
        print("START", time.perf_counter() - started, flush=True)
        sys.stdout.flush()
        import os
        os._exit(0)
    return answer()

config = {"reporting.runs_dir": sys.argv[1], "federation.rounds": 1}
started = time.perf_counter()
inprocess.run(config, faults={"site-00": first_training})
"""


def measure() -> list[Row]:
    """Seconds in a fresh process with a cold pixel cache: settings, mosaics, partition, cards, initial weights."""
    values = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, "-c", CHILD, folder], capture_output=True, text=True, check=True)
        values.append(float(done.stdout.split("START")[1].split()[0]))
    return [Row("start to first round in process, five sites", "s", values, target="<= 2")]
