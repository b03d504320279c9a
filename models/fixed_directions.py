"""Directions that no site trains and nobody sends: every site draws them for itself and has the same bytes."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

GRID = 2.0**24
"""Directions are drawn in float64 and rounded to multiples of 1/GRID. Choice: processors differ in the last bits of a
logarithm or of a matrix factorisation (1e-16), and the sites compare hashes; after rounding the bytes are the same."""


def unit_vectors(count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Random directions ``(count, dim) float32``, uniform on the sphere, lengths 1 up to rounding (6e-8 a number)."""
    return _rounded(torch.nn.functional.normalize(_normal(count, dim, generator), dim=1))


def orthonormal_rows(count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Random directions ``(count, dim) float32``, each of length 1 and at right angles to all others.

    Raises ValueError where ``count`` exceeds ``dim``: so many right angles do not exist.
    """
    if not 1 <= count <= dim:
        raise ValueError(f"{count} directions at right angles need a width of at least {count}, got width {dim}")
    columns, triangle = torch.linalg.qr(_normal(dim, count, generator))
    # the factorisation leaves the sign of every column open; with a positive diagonal it is unique
    return _rounded((columns * triangle.diagonal().sign()).T)


def directions_sha256(*directions: Tensor) -> str:
    """Hash of shapes and float32 bytes (little-endian, row by row): what sites compare instead of sending them."""
    digest = hashlib.sha256()
    for values in directions:
        digest.update(f"{tuple(values.shape)}".encode())
        digest.update(values.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """On the CPU also where the default device is "meta", as while a network is laid out without memory."""
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64, device="cpu")


def _rounded(values: Tensor) -> Tensor:
    return ((values * GRID).round() / GRID).float().contiguous()
