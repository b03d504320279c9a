"""The simplex equiangular tight frame (ETF): one fixed direction a label, the same at every site from (C, D) alone."""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor


def simplex_etf(num_classes: int, dim: int) -> Tensor:
    """Prototypes ``(C, D) float32``: unit rows with pairwise cosine -1/(C-1), zero in columns from C on.

    FedNCA-ML eq. 1: M = sqrt(C/(C-1)) (I - 11^T/C), padded with zeros. Only two different numbers occur; each is one
    rounded division and square root in float64, so the bytes are the same on every machine.

    Choice: axis aligned as in the authors' code. Raises ValueError unless 2 <= C <= D: with fewer columns the rows
    would be cut and lose their length.

    >>> simplex_etf(2, 4)
    tensor([[ 0.7071, -0.7071,  0.0000,  0.0000],
            [-0.7071,  0.7071,  0.0000,  0.0000]])
    """
    if not 2 <= num_classes <= dim:
        raise ValueError(f"a simplex ETF needs 2 <= classes <= width, got {num_classes} classes and width {dim}")
    own = math.sqrt((num_classes - 1) / num_classes)
    other = -1.0 / math.sqrt(num_classes * (num_classes - 1))
    etf = torch.zeros(num_classes, dim, dtype=torch.float64, device="cpu")  # the CPU also where the default is "meta"
    etf[:, :num_classes] = other
    etf.fill_diagonal_(own)
    return etf.float()


def etf_sha256(etf: Tensor) -> str:
    """Hash of the float32 bytes (little-endian, row by row): what sites compare instead of sending the ETF."""
    values = etf.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)
    return hashlib.sha256(values.tobytes()).hexdigest()


def prototype_products(features: Tensor, etf: Tensor, *, axis_aligned: bool | None = None) -> Tensor:
    """<h, m_j> for every feature and prototype, ``(..., D), (C, D) -> (..., C) float32``, also inside autocast.

    Of an axis aligned ETF only the first C columns are read: C^2 instead of C D products, and the gradient of the other
    columns is exactly zero. ``axis_aligned=None`` looks (on a GPU that waits for the device); an ETF that is trained
    is always read in full, because its padding has a gradient.
    """
    num_classes = len(etf)
    if axis_aligned is None:
        axis_aligned = not etf.requires_grad and not bool(etf[:, num_classes:].any())
    if axis_aligned:
        features, etf = features[..., :num_classes], etf[:, :num_classes]
    with torch.autocast(features.device.type, enabled=False):
        return features.float() @ etf.float().T


def pairwise_logits(
    class_features: Tensor,
    etf: Tensor,
    scale: Tensor | float,
    bias: Tensor | None,
    *,
    normalize: bool = False,
    axis_aligned: bool | None = None,
) -> Tensor:
    """L[b, c, j] = scale <h_bc, m_j> + bias_j ``(B, C, C) float32`` of ``class_features (B, C, D)`` (eq. 9).

    The bias ``(C,)`` belongs to the prototype j, not to the feature's label c. The logit of label c is the diagonal
    L[b, c, c]; row c says which labels the feature of label c looks like. ``normalize`` takes the cosine instead of the
    inner product (an option of the authors' code). Any number of features a sample will do: ``(B, Q, D) -> (B, Q, C)``.
    """
    if class_features.shape[-1] != etf.shape[1]:
        raise ValueError(f"features {tuple(class_features.shape)} do not fit prototypes {tuple(etf.shape)}")
    if normalize:
        class_features, etf = F.normalize(class_features.float(), dim=-1), F.normalize(etf.float(), dim=-1)
    logits = scale * prototype_products(class_features, etf, axis_aligned=axis_aligned)
    return logits if bias is None else logits + bias
