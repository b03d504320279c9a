"""Where a trained network looked: attention maps of all labels and a Grad-CAM map of one, without changing it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def attention_maps(network: nn.Module, images: Tensor) -> Tensor:
    """Head-mean attention of every label over the feature map's cells ``(B, C, H, W) float32``; each map sums to one.

    ``network``: a `FedNCANetwork` with label attention, in evaluation mode. Choice: the plain mean of the heads; the
    authors' code takes the three largest and a second softmax, which makes every map look flat.
    """
    _require_eval(network)
    network.require_ladm("attention maps")
    return network.ladm.forward_with_maps(network.backbone(images), network.queries)[1].float()


def grad_cam(network: nn.Module, images: Tensor, label: int) -> Tensor:
    """Evidence for one label over the feature map's cells ``(B, H, W) float32``, at least 0, in units of its logit.

    Grad-CAM (Selvaraju et al. 2017, eq. 1 and 2) at the backbone's last map: relu(sum_k w_k F_k) with w_k the mean
    over cells of the gradient of the label's logit. Works for every head of a `FedNCANetwork` in evaluation mode; no
    gradient is left in the parameters.
    """
    _require_eval(network)
    if not 0 <= label < network.num_labels:
        raise ValueError(f"label {label} is not one of {network.num_labels}")
    with torch.no_grad():
        feature_map = network.backbone(images)
    with torch.enable_grad():
        feature_map = feature_map.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(network.logits_of(feature_map)[:, label].sum(), feature_map)
    weights = gradient.mean(dim=(2, 3), keepdim=True)
    return (weights * feature_map.detach()).sum(dim=1).relu().float()


def _require_eval(network: nn.Module) -> None:
    if network.training:  # batch statistics would mix the samples, and the running ones would move
        raise ValueError("maps are of a network in evaluation mode; call network.eval() first")
