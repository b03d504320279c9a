"""The three terms of FedNCA-ML: BCE, rejection of absent labels, contrast of present labels with the prototypes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.fednca_etf import prototype_products

SELECTIONS = ("topk", "all", "random")
REJECTIONS = ("max_all", "nonself_sum")
CONTRASTS = ("cross_entropy", "cosine", "squared_l2")
MIN_NORM = 1e-12


def known_labels(targets: Tensor, known: Tensor | None = None, *, validate: bool = True) -> Tensor:
    """Which labels are known ``(B, C) bool``: not -1, not nan, and not False in ``known``.

    Raises ValueError for a known label that is neither 0 nor 1, with its place. ``validate=False`` leaves that check
    out, for targets that were checked when they were read (on a GPU the check waits for the device).
    """
    given = (targets != -1) & ~targets.isnan()
    if known is not None:
        if known.shape != targets.shape:
            raise ValueError(f"known has shape {tuple(known.shape)}, targets {tuple(targets.shape)}")
        given = given & (known != 0)
    if validate:
        wrong = given & (targets != 0) & (targets != 1)
        if bool(wrong.any()):
            row, label = wrong.nonzero()[0].tolist()
            value = targets[row, label].item()
            raise ValueError(f"targets[{row}, {label}] is {value}; a label is 1 present, 0 absent or -1 unknown")
    return given


def class_bce(logits: Tensor, targets: Tensor, known: Tensor) -> Tensor:
    """BCE_i = sum_c softplus(-z) y + softplus(z) (1 - y) over the known labels of each sample, ``(B,) float32``.

    ``logits (B, C)`` are z, ``known (B, C) bool``. The whole loss of the ablations without class features.
    """
    logits = logits.float()
    losses = F.softplus(logits) - torch.where(targets == 1, logits, 0.0)
    return torch.where(known, losses, 0.0).sum(dim=1)


def fednca_loss(
    logits: Tensor,
    class_features: Tensor,
    targets: Tensor,
    etf: Tensor,
    *,
    lambda_neg: float,
    lambda_pos: float,
    tau: float = 0.3,
    temperature: float = 0.07,
    known: Tensor | None = None,
    select: str = "topk",
    rejection: str = "max_all",
    contrast: str = "cross_entropy",
    generator: torch.Generator | None = None,
    axis_aligned: bool | None = None,
    validate: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean_i [BCE_i + lambda_neg Neg_i + lambda_pos Pos_i], a float32 scalar, and its parts, each ``(B,) float32``.

    ``logits (B, C, C)`` as in `pairwise_logits`, ``class_features (B, C, D)``, ``targets (B, C)`` with 1 present,
    0 absent, -1 or nan unknown, ``etf (C, D)``. A label that is unknown (or False in ``known (B, C)``) is neither a
    positive nor a negative: it is in no term, not in K and has zero gradient. The mean runs over the samples of the
    batch; nothing is divided by a number of labels. Everything is float32, whatever the network's precision.

    - ``bce``: `class_bce` of the diagonal.
    - ``neg``: sum over the selected negatives (i, c) of max(0, sigmoid(max_j L[i, c, j]) - tau), j = c included.
      ``select="topk"``: the K negatives of the batch with the largest max_j L, K = number of positives in the batch
      (all where there are fewer); ``"random"``: K drawn with ``generator``; ``"all"``. ``rejection="nonself_sum"`` is
      the paper's form: sum_{j != c} max(0, sigmoid(L[i, c, j]) - tau).
    - ``pos``: sum over the positives of -log softmax_j(cos(h, m_j) / temperature) at j = c. ``contrast="cosine"`` and
      ``"squared_l2"`` are the alternatives 1 - cos(h, m_c) and |h - m_c|^2 of the authors' code.

    Choice: max over all prototypes and batch-wide top K (authors' code) over the paper's sum; in a batch without a
    positive ``neg`` is 0 for every ``select``, as there; without a negative it is 0 (there: a crash). A feature of
    length 0 has cosine 0 with every prototype, thus ``pos`` = ln C, and no gradient from ``pos``, which would be 1e12.
    ``parts`` are still attached to the graph: detach what is kept.
    """
    _check_shapes(logits, class_features, targets, etf)
    _check_choice("select", select, SELECTIONS)
    _check_choice("rejection", rejection, REJECTIONS)
    _check_choice("contrast", contrast, CONTRASTS)
    known = known_labels(targets, known, validate=validate)
    present, absent = known & (targets == 1), known & (targets == 0)
    with torch.autocast(logits.device.type, enabled=False):
        logits = logits.float()
        strongest = logits.max(dim=2).values  # (B, C)
        chosen = _selected(strongest.detach(), present, absent, select, generator)
        costs = _rejection(logits, strongest, tau, rejection)
        distances = _contrast(class_features.float(), etf.float(), temperature, contrast, axis_aligned)
        parts = {
            "bce": class_bce(logits.diagonal(dim1=1, dim2=2), targets, known),
            "neg": torch.where(chosen, costs, 0.0).sum(dim=1),
            "pos": torch.where(present, distances, 0.0).sum(dim=1),
        }
        return (parts["bce"] + lambda_neg * parts["neg"] + lambda_pos * parts["pos"]).mean(), parts


def _selected(
    strongest: Tensor, present: Tensor, absent: Tensor, select: str, generator: torch.Generator | None
) -> Tensor:
    """Which negatives are rejected ``(B, C) bool``. Ranks by a stable sort: K stays on the device, ties keep order."""
    if select == "all":
        return absent & present.any()
    if select == "random":
        if generator is None:
            raise ValueError("select='random' needs a generator")
        draws = torch.rand(absent.shape, generator=generator, device=generator.device)
        strongest = draws.to(strongest.device)
    order = strongest.masked_fill(~absent, -torch.inf).flatten().argsort(descending=True, stable=True)
    within = torch.arange(order.numel(), device=order.device) < present.sum()
    return torch.zeros_like(within).scatter(0, order, within).view_as(absent) & absent


def _rejection(logits: Tensor, strongest: Tensor, tau: float, rejection: str) -> Tensor:
    """Cost of every pair, were it a selected negative, ``(B, C)``."""
    if rejection == "max_all":
        return (strongest.sigmoid() - tau).relu()
    gated = (logits.sigmoid() - tau).relu()
    return gated.sum(dim=2) - gated.diagonal(dim1=1, dim2=2)


def _contrast(features: Tensor, etf: Tensor, temperature: float, contrast: str, axis_aligned: bool | None) -> Tensor:
    """Distance of every pair's feature to its own prototype, ``(B, C)``."""
    products = prototype_products(features, etf, axis_aligned=axis_aligned)  # (B, C, C)
    if contrast == "squared_l2":
        own = products.diagonal(dim1=1, dim2=2)
        return features.square().sum(dim=2) - 2 * own + etf.square().sum(dim=1)
    lengths = torch.linalg.vector_norm(features, dim=2, keepdim=True)
    inverse = 1 / (lengths.clamp(min=MIN_NORM) * torch.linalg.vector_norm(etf, dim=1).clamp(min=MIN_NORM))
    cosines = torch.where(lengths > MIN_NORM, products * inverse, (products * inverse).detach())
    if contrast == "cosine":
        return 1 - cosines.diagonal(dim1=1, dim2=2)
    scaled = cosines / temperature
    others = scaled.masked_fill(torch.eye(len(etf), dtype=torch.bool, device=etf.device), -torch.inf).logsumexp(dim=2)
    # = logsumexp over all j minus the own one, but keeps its digits where the feature lies on its prototype (1e-7)
    return F.softplus(others - scaled.diagonal(dim1=1, dim2=2))


def _check_shapes(logits: Tensor, class_features: Tensor, targets: Tensor, etf: Tensor) -> None:
    batch, labels = targets.shape if targets.ndim == 2 else (0, 0)
    shapes = tuple(logits.shape), tuple(class_features.shape[:2]), class_features.ndim, len(etf)
    if not batch or shapes != ((batch, labels, labels), (batch, labels), 3, labels):
        raise ValueError(
            f"expected logits (B, C, C), class_features (B, C, D), targets (B, C), etf (C, D) with B >= 1, got "
            f"{tuple(logits.shape)}, {tuple(class_features.shape)}, {tuple(targets.shape)}, {tuple(etf.shape)}"
        )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; there are {', '.join(choices)}")
