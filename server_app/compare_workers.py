"""Runs cells in worker processes, each with one torch thread, and survives what a cell does to its worker."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from server_app import inprocess, simulate
from server_app.compare_cells import Cell, reason_of

Engine = Literal["inprocess", "ray"]


def run_cells(cells: Sequence[Cell], jobs: int, finished: Callable[[Cell], None], engine: Engine = "inprocess") -> None:
    """Runs every cell and calls ``finished`` after each, in this process; its cell is completed or failed then.

    A worker that dies (out of memory, a crash in native code) takes the other ones' cells along. Each of them is then
    run alone: the one that does it again has failed, the others lost nothing but time.
    """
    left = deque(cells)
    while left:
        for suspect in _run_until_broken(left, jobs, finished, engine):
            if _run_until_broken(deque([suspect]), 1, finished, engine):
                suspect.status, suspect.reason = "failed", "its process died, twice; is there enough memory?"
                finished(suspect)


def _run_until_broken(left: deque[Cell], jobs: int, finished: Callable[[Cell], None], engine: Engine) -> list[Cell]:
    """Takes cells from ``left`` until none is there; returns those that were being run when a worker died."""
    running: dict[Future[dict[str, str]], Cell] = {}
    with _workers(jobs) as pool, contextlib.suppress(BrokenProcessPool):
        while left or running:
            while left and len(running) < jobs:
                future = pool.submit(
                    run_cell, dict(left[0].run_config), engine
                )  # a broken pool raises here: still in ``left``
                running[future] = left.popleft()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                outcome = future.result()
                cell = running.pop(future)
                if "run_dir" in outcome:
                    cell.status, cell.run_dir = "completed", Path(outcome["run_dir"])
                else:
                    cell.status, cell.reason = "failed", outcome["reason"]
                finished(cell)
    return list(running.values())


@contextlib.contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that end with the block; at once when it is left by an exception."""
    others = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads in an undefined state
    pool = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_start)
    try:
        yield pool
    except BaseException:
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start() -> None:
    """Prepares a worker: one thread, no log, and an end of its own when the command is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the command ends its workers itself
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def run_cell(run_config: Mapping[str, Any], engine: Engine = "inprocess") -> dict[str, str]:
    """One cell in this process: ``run_dir`` of the completed run, or the ``reason`` why there is none."""
    try:
        return {"run_dir": str(_run_on_ray(run_config) if engine == "ray" else inprocess.run(run_config).run_dir)}
    except (Exception, SystemExit) as error:  # whatever ends this cell, the others go on
        return {"reason": reason_of(error)}


def _run_on_ray(run_config: Mapping[str, Any]) -> Path:
    """The run folder of a simulation with a SuperLink of its own; a Ray that runs already is joined (RAY_ADDRESS)."""
    simulation = simulate.Simulation(simulate.ROOT, run_config, simulate.count_sites(run_config, None))
    with simulate.interruptible():
        simulate.make_local_files(simulation)
        exit_code, run_dir = simulate.run(simulation, Console(quiet=True))
    if exit_code != simulate.COMPLETED or run_dir is None:
        where = "" if run_dir is None else f"; {run_dir.name} has the reason"
        raise RuntimeError(f"the simulation on Ray ended with exit code {exit_code}{where}")
    return run_dir
