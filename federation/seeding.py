"""Every random draw of a federation, as a pure function of (seed, purpose, round, site).

Nothing is drawn from a process's global state, so the same run gives the same bits in one process, on Ray and
deployed, and a resumed run needs no saved generator: round 7 draws the same numbers whether or not rounds 1 to 6
happened in this process.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import numpy as np
import torch


def derive(seed: int, purpose: str, server_round: int = 0, site: str = "") -> int:
    """A 63-bit seed for one purpose, independent of every other purpose, round and site.

    >>> derive(7, "batches", 1, "st-mary") == derive(7, "batches", 1, "st-mary")
    True
    >>> derive(7, "batches", 1, "st-mary") == derive(7, "batches", 2, "st-mary")
    False
    """
    text = f"{seed}\x1f{purpose}\x1f{server_round}\x1f{site}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, purpose: str, server_round: int = 0, site: str = "") -> torch.Generator:
    """A torch CPU generator for one purpose; see `derive`."""
    return torch.Generator().manual_seed(derive(seed, purpose, server_round, site))


def numpy_generator(seed: int, purpose: str, server_round: int = 0, site: str = "") -> np.random.Generator:
    """A NumPy generator for one purpose; see `derive`."""
    return np.random.default_rng(derive(seed, purpose, server_round, site))


@contextlib.contextmanager
def scope(seed: int, purpose: str, server_round: int = 0, site: str = "") -> Iterator[None]:
    """Seeds torch's global generators inside the block and restores them after it.

    For draws that take no generator argument: parameter initialisation and dropout.
    """
    number = derive(seed, purpose, server_round, site)
    if torch.cuda.is_available():
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(number)
            yield
        return
    # Without a GPU only the CPU's generator counts, and torch.manual_seed would note a traceback for each absent kind.
    state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(number)
        yield
    finally:
        torch.set_rng_state(state)
