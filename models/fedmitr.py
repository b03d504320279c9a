"""FedMITR: one-shot federated learning of vision transformers by sparse inversion and token relabelling.

Shen, Hao, Li, Cao, Hao, Yang, "Provable Sparse Inversion and Token Relabel Enhanced One-shot Federated Learning with
ViTs", arXiv 2605.10748; the project's fedmitr specification. Every site trains a vision transformer and uploads it
once. The server inverts each model into images, keeping the patches that it looks at; the ensemble of all models says
what the other patches show; a global model learns the label on the first and the ensemble's opinion on the second.

What travels up, once a site: the state dict (DeiT-tiny with 10 labels: 22,124,840 bytes in float32), and the class
counts where they are shared. Down: the initial model and, at the end, the global one.

The parts, in the order of the method: `fedmitr_targets` (which labels), `inversion` (stage A), `fedmitr_ensemble`
(stage B), `fedmitr_training` (stage C), `fedmitr_losses`; beside it `fedmitr_baselines` and, at a site,
`fedmitr_audit`. What the paper leaves open is a named choice in each and an argument.
"""

from __future__ import annotations

from models.fedmitr_audit import Audit, has_memorised, memorisation_audit
from models.fedmitr_ensemble import (
    Teacher,
    cached_teacher,
    class_count_weights,
    ensemble_logits,
    label_count_weights,
    normalised,
)
from models.fedmitr_losses import js_divergence, kd_loss, label_loss, relabel_loss, token_relabel_loss
from models.fedmitr_targets import Targets, sample_label_vectors, sample_targets, teaching_sites
from models.fedmitr_training import OBJECTIVES, DistilSettings, batch_loss, optimiser_of, train_epoch, train_step

__all__ = [
    "OBJECTIVES",
    "Audit",
    "DistilSettings",
    "Targets",
    "Teacher",
    "batch_loss",
    "cached_teacher",
    "class_count_weights",
    "ensemble_logits",
    "has_memorised",
    "js_divergence",
    "kd_loss",
    "label_count_weights",
    "label_loss",
    "memorisation_audit",
    "normalised",
    "optimiser_of",
    "relabel_loss",
    "sample_label_vectors",
    "sample_targets",
    "teaching_sites",
    "token_relabel_loss",
    "train_epoch",
    "train_step",
]
