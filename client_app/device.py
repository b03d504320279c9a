"""Where a site computes: device, precision, threads. No other file of the site half names a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from federation.settings import SettingsError, TrainingArea


def pick_device(wanted: str) -> torch.device:
    """``auto``: the GPU where there is one. Raises SettingsError where ``cuda`` is asked for and absent."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SettingsError(["training.device = 'cuda' but this machine offers no CUDA device; use 'auto' or 'cpu'"])
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def pick_precision(wanted: str, device: torch.device) -> torch.dtype | None:
    """The autocast dtype, or None for float32. ``auto``: bfloat16 where a probe on the device is finite and close."""
    if wanted == "float32" or device.type != "cuda" or not torch.cuda.is_bf16_supported():
        return None
    probe = torch.linspace(-2, 2, 64 * 64, device=device).reshape(64, 64)
    exact = probe @ probe
    with torch.autocast(device.type, torch.bfloat16):
        rough = (probe @ probe).float()
    fine = bool(torch.isfinite(rough).all()) and bool(torch.allclose(rough, exact, rtol=0.05, atol=1.0))
    return torch.bfloat16 if fine else None


@contextlib.contextmanager
def computing(area: TrainingArea) -> Iterator[tuple[torch.device, torch.dtype | None]]:
    """Pins the CPU threads inside the block (their number changes the sums) and frees the GPU's cache after it."""
    device = pick_device(area.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(area.threads)
    try:
        yield device, pick_precision(area.precision, device)
    finally:
        torch.set_num_threads(threads)
        if device.type == "cuda":
            torch.cuda.empty_cache()
