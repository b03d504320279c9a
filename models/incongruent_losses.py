"""The terms of a site's objective in Incongruent: classification, alignment of modalities, ties to the global model.

Saha, Mishra, Wagner, Kamnitsas, Noble, "Incongruent Multimodal Federated Learning for Medical Vision and
Language-based Multi-label Disease Detection", AAAI 2025. The authors' code is not public: the formulas are those of the
project's incongruent specification, section 4, named below as "spec 4.1" and so on.

Every loss but `prox_penalty` is a plain mean: a scalar that does not grow with the batch and that the caller multiplies
by its lambda. Half precision is computed in float32 and float64 stays float64. A loss without a valid row or entry is
exactly 0 and still attached to the graph. What comes from the global model, a previous model or the server has no
gradient. The first term has its own file, `incongruent_asymmetric`; the text prototypes that a site receives are made
in `incongruent_prototypes`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.incongruent_asymmetric import (
    SOURCE_SMOOTHING,
    SOURCE_TRUST,
    SOURCES,
    asymmetric_elements,
    asymmetric_loss,
    check_shape,
    class_weights,
    positive_weights,
    wide,
)
from models.losses import proximal_term

__all__ = [
    "CONSISTENCY_MODES",
    "LOOT_LOSSES",
    "SOURCES",
    "SOURCE_SMOOTHING",
    "SOURCE_TRUST",
    "asymmetric_elements",
    "asymmetric_loss",
    "class_weights",
    "consistency_loss",
    "contrastive_loss",
    "contrastive_targets",
    "loot_loss",
    "loot_teachers",
    "mad_loss",
    "moon_loss",
    "output_penalty",
    "pairing_weight",
    "positive_weights",
    "prototype_loss",
    "prox_penalty",
    "unit",
]

CONSISTENCY_MODES = ("sample", "class", "kl")
LOOT_LOSSES = ("cos", "mse")
MIN_NORM = 1e-8
MIN_PAIRS, MIN_PAIR_RATE = 2, 0.05
MIN_CLASS_POSITIVES = 2


def unit(vectors: Tensor) -> Tensor:
    """Rows divided by their length, at least 1e-8 (spec 3.2).

    Choice: a shorter row has no gradient, which would be 1e8 times the loss's.
    """
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    scaled = vectors / lengths.clamp(min=MIN_NORM)
    return torch.where(lengths > MIN_NORM, scaled, scaled.detach())


# -- level 1: pairs of image and report (spec 4.2) --------------------------------------------------------------------


def pairing_weight(num_pairs: int, num_records: int, rho: float = 1.0) -> float:
    """How much a site's contrastive loss counts: (pairs / records)^rho, 0 below 2 pairs or 5 % (spec 4.2).

    >>> pairing_weight(30, 100), pairing_weight(1, 100)
    (0.3, 0.0)
    """
    if not 0 <= num_pairs <= num_records:
        raise ValueError(f"{num_pairs} pairs of {num_records} records: expected between 0 and all of them")
    if num_pairs < MIN_PAIRS or num_pairs / num_records < MIN_PAIR_RATE:
        return 0.0
    return (num_pairs / num_records) ** rho


def contrastive_targets(study: Tensor, labels: Tensor, eta: float = 0.5, dtype: torch.dtype = torch.float32) -> Tensor:
    """How much each report belongs to each image ``(P, P)``, rows sum to 1 (spec 4.2).

    (1 - eta) G + eta J: G is uniform over the pairs of the same ``study (P,) int``, J the Jaccard index of the label
    sets, two empty ones being equal, each row divided by its sum. ``labels (P, C)``: 1 present; Choice: an unknown
    label is like an absent one.
    """
    same = (study[:, None] == study).to(dtype)
    positive = (labels == 1).to(dtype)
    both, sizes = _product(positive, positive.T), positive.sum(dim=1)
    union = sizes[:, None] + sizes - both
    jaccard = torch.where(union > 0, both / union.clamp(min=1), 1.0)
    return (1 - eta) * same / same.sum(dim=1, keepdim=True) + eta * jaccard / jaccard.sum(dim=1, keepdim=True)


def contrastive_loss(
    z_image: Tensor,
    z_text: Tensor,
    study: Tensor,
    labels: Tensor,
    temperature: float = 0.07,
    eta: float = 0.5,
) -> Tensor:
    """Symmetric InfoNCE over the real pairs of a batch, towards `contrastive_targets` (spec 4.2).

    ``z_image``, ``z_text`` ``(P, d)``, row by row image and report of one sample, as projected; ``study (P,) int``,
    ``labels (P, C)``. Fewer than two pairs, or one study, is 0.
    """
    check_shape("z_text", z_text, z_image.shape)
    check_shape("study", study, z_image.shape[:1])
    z_image, z_text = wide(z_image), wide(z_text)
    if len(z_image) < MIN_PAIRS:
        return z_image[:0].sum() + z_text[:0].sum()
    scores = _product(unit(z_image), unit(z_text).T) / temperature
    wanted = contrastive_targets(study, labels, eta, scores.dtype)
    loss = (F.cross_entropy(scores, wanted) + F.cross_entropy(scores.T, wanted)) / 2
    return torch.where((study != study[0]).any(), loss, 0.0)


# -- level 2: the global encoder (spec 4.3) ---------------------------------------------------------------------------


def consistency_loss(
    features: Tensor,
    global_features: Tensor,
    targets: Tensor,
    known: Tensor,
    prototypes: Tensor,
    available: Tensor,
    *,
    mode: str = "sample",
    temperature: float = 0.5,
) -> Tensor:
    """How far a site's projected features ``(B, d)`` are from the frozen global encoder's of the same rows (spec 4.3).

    - ``sample``: 1 - cosine of each row.
    - ``class``: 1 - cosine of the two class means, a mean over the labels with two positives or more in the batch.
    - ``kl``: KL(global || local) of softmax(u . p_c / temperature) over the available prototypes.

    ``targets``, ``known`` ``(B, C)``; ``prototypes (C, d)`` unit rows, ``available (C,) bool``. Raises ValueError for
    another mode.
    """
    check_shape("global_features", global_features, features.shape)
    features, reference = wide(features), wide(global_features).detach()
    if mode == "sample":
        return _mean(1 - _cosines(features, reference))
    if mode == "class":
        positive = _is_label(targets, known, 1).to(features.dtype).T  # (C, B)
        distances = 1 - _cosines(_product(positive, features), _product(positive, reference))  # sums point as means do
        return _mean_where(distances, positive.sum(dim=1) >= MIN_CLASS_POSITIVES)
    if mode == "kl":
        ours, theirs = (
            (_prototype_scores(values, prototypes, available) / temperature)
            .masked_fill(~available, torch.finfo(values.dtype).min)
            .log_softmax(dim=1)
            for values in (features, reference)
        )
        divergences = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=1)
        return _mean_where(divergences, available.any().expand(len(divergences)))
    raise ValueError(f"mode={mode!r} is unknown; there are {', '.join(CONSISTENCY_MODES)}")


# -- level 3: text prototypes of other sites (spec 4.4) ---------------------------------------------------------------


def prototype_loss(
    features: Tensor,
    targets: Tensor,
    known: Tensor,
    prototypes: Tensor,
    available: Tensor,
    temperature: float = 0.1,
) -> Tensor:
    """Pulls features to the prototypes of their positives, against those of their negatives (spec 4.4, receiver).

    Mean over the samples with a positive P and a negative N, both known and available, of the mean over c in P of
    -log[e^{s_c} / (e^{s_c} + sum_{n in N} e^{s_n}]], s = u . p / temperature. Positives do not repel each other.

    ``features (B, d)`` as projected, ``targets``, ``known`` ``(B, C)``, ``prototypes (C, d)`` unit rows, ``available
    (C,) bool``.
    """
    check_shape("prototypes", prototypes, (targets.shape[1], features.shape[1]))
    positive, negative = (_is_label(targets, known, label) & available for label in (1, 0))
    scores = _prototype_scores(wide(features), prototypes, available) / temperature
    against = scores.masked_fill(~negative, torch.finfo(scores.dtype).min).logsumexp(dim=1, keepdim=True)
    costs = torch.where(positive, F.softplus(against - scores), 0.0)  # = -log of the quotient, without a quotient
    each = costs.sum(dim=1) / positive.sum(dim=1).clamp(min=1)
    return _mean_where(each, positive.any(dim=1) & negative.any(dim=1))


# -- ties to the global model (spec 4.5, 4.6) -------------------------------------------------------------------------


def prox_penalty(fusion: nn.Module, reference: Mapping[str, Tensor], mu: float = 0.01) -> Tensor:
    """mu / 2 ||theta - theta_global||^2 of the fusion module alone (spec 4.5); 0 for a fusion without parameters."""
    if next(fusion.parameters(), None) is None:
        return torch.zeros(())
    return proximal_term(fusion, dict(reference), mu)


def output_penalty(fused: Tensor, global_fused: Tensor) -> Tensor:
    """Mean over the rows of ||f - f_global||^2 / d, for fused features ``(B, d)`` (spec 4.5)."""
    check_shape("global_fused", global_fused, fused.shape)
    gaps = (wide(fused) - wide(global_fused).detach()).square().mean(dim=1)
    return _mean(gaps)


def mad_loss(
    logits: Tensor,
    teacher_logits: Tensor,
    present: Tensor,
    teacher_present: Tensor,
    temperature: float = 2.0,
) -> Tensor:
    """Distillation from the global model where it sees more modalities than the student (spec 4.6).

    T^2 times the mean of KL(Bern(sigmoid(t / T)) || Bern(sigmoid(s / T))) over the rows where ``teacher_present`` has
    more modalities than ``present``, both ``(B, 2) bool``. ``logits``, ``teacher_logits`` ``(B, C)``. Choice: a mean
    over labels too, as `asymmetric_loss` has it; the source leaves that open.
    """
    check_shape("teacher_logits", teacher_logits, logits.shape)
    student, teacher = wide(logits) / temperature, wide(teacher_logits).detach() / temperature
    divergences = sum(
        (sign * teacher).sigmoid() * (F.logsigmoid(sign * teacher) - F.logsigmoid(sign * student)) for sign in (1, -1)
    )
    return temperature**2 * _mean_where(divergences.mean(dim=1), teacher_present.sum(dim=1) > present.sum(dim=1))


def moon_loss(fused: Tensor, global_fused: Tensor, previous_fused: Tensor, temperature: float = 0.5) -> Tensor:
    """Contrast of fused features ``(B, d)`` with the global model's and the site's previous ones (spec 4.6).

    Mean of -log softmax([cos(f, f_global), cos(f, f_previous)] / T)[0] (MOON, Li et al. 2021, eq. 3). A site without a
    previous model has no such term.
    """
    fused, towards, away = wide(fused), wide(global_fused).detach(), wide(previous_fused).detach()
    costs = F.softplus((_cosines(fused, away) - _cosines(fused, towards)) / temperature)
    return _mean(costs)


# -- leave-one-out teachers (spec 4.7) --------------------------------------------------------------------------------


def loot_teachers(total: Tensor, embeddings: Tensor, num_sites: int) -> Tensor:
    """Mean embedding of the other sites, (S - e) / (K - 1), without gradient (spec 4.7).

    ``total (n, d)``: sum S over the K sites of their embeddings of n public samples. ``embeddings``: one site's
    ``(n, d)``, as at the site, or all sites' ``(K, n, d)``, as at the server. Raises ValueError below two sites.
    """
    if num_sites < 2:
        raise ValueError(f"{num_sites} site has no other site as a teacher; leave-one-out needs at least 2")
    return ((wide(total) - wide(embeddings)) / (num_sites - 1)).detach()


def loot_loss(embeddings: Tensor, teachers: Tensor, kind: str = "cos") -> Tensor:
    """Distance of embeddings ``(n, d)`` from their teachers: mean of 1 - cosine, or ``mse`` over numbers (spec 4.7)."""
    check_shape("teachers", teachers, embeddings.shape)
    if kind not in LOOT_LOSSES:
        raise ValueError(f"kind={kind!r} is unknown; there are {', '.join(LOOT_LOSSES)}")
    embeddings, teachers = wide(embeddings), wide(teachers).detach()
    gaps = 1 - _cosines(embeddings, teachers) if kind == "cos" else (embeddings - teachers).square().mean(dim=1)
    return _mean(gaps)


# -- parts ------------------------------------------------------------------------------------------------------------


def _mean(values: Tensor) -> Tensor:
    """The mean, 0 where there are no values."""
    return values.sum() / max(len(values), 1)


def _mean_where(values: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, values, 0.0).sum() / valid.sum().clamp(min=1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in the precision of its inputs, which autocast would lower."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right


def _cosines(left: Tensor, right: Tensor) -> Tensor:
    return (unit(left) * unit(right)).sum(dim=-1)


def _prototype_scores(features: Tensor, prototypes: Tensor, available: Tensor) -> Tensor:
    """u . p_c ``(B, C)``; 0 for a prototype that is not available, whatever stands in its row."""
    return _product(unit(features), torch.where(available[:, None], prototypes.to(features), 0.0).T)


def _is_label(targets: Tensor, known: Tensor, label: int) -> Tensor:
    return known.bool() & (targets == label)
