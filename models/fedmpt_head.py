"""Patches and class prompts to probabilities: adapters, transport and gate of FedMPT (spec S3 to S7)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from models.fedmpt_transport import SOLVERS, sinkhorn

AGGREGATIONS = ("ot", "patch_softmax")
MARGINALS = ("scaled", "raw")
SIMILARITIES = ("softmax", "cosine")
GATES = ("router", "std", "uniform")
SMALLEST_NORM = 1e-6


class Adapters(nn.Module):
    """Bottleneck adapters, one a condition: ``down (N, r, D)`` and ``up (N, D, r)``, without bias (spec S3).

    Draws from torch's current generator. Choice: with the residual ``down`` is Kaiming-uniform and ``up`` zero, so that
    a fresh adapter changes nothing; without it (the seed's literal formula) both are N(0, 1 / fan_in).
    """

    def __init__(self, num_conditions: int, dim: int, rank: int, *, residual: bool = True, scale: float = 1.0) -> None:
        super().__init__()
        self.residual, self.scale = residual, scale
        down, up = torch.empty(num_conditions, rank, dim), torch.zeros(num_conditions, dim, rank)
        if residual:
            for matrix in down:
                nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))
        else:
            nn.init.normal_(down, std=dim**-0.5)
            nn.init.normal_(up, std=rank**-0.5)
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)

    def forward(self, patches: Tensor, text: Tensor) -> Tensor:
        """Cosines of the adapted patches, see `adapted_cosines`."""
        return adapted_cosines(patches, text, self.down, self.up, scale=self.scale, residual=self.residual)


class Router(nn.Module):
    """Gate logits ``(B, N)`` of mean patches ``(B, D)``: w2 ReLU(w1 x + b1) + b2 (spec S7).

    Choice: w2, b1 and b2 are zero at the start, so that the gate is uniform; w1 is Kaiming-uniform as in `nn.Linear`.
    """

    def __init__(self, num_conditions: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.empty(hidden, dim)), nn.Parameter(torch.zeros(hidden))
        self.w2, self.b2 = nn.Parameter(torch.zeros(num_conditions, hidden)), nn.Parameter(torch.zeros(num_conditions))
        nn.init.kaiming_uniform_(self.w1, a=math.sqrt(5))

    def forward(self, features: Tensor) -> Tensor:
        return (features @ self.w1.T + self.b1).relu() @ self.w2.T + self.b2


class FedMPTHead(nn.Module):
    """``forward(patches (B, M, D), text (N, C, D))`` gives probabilities ``(B, C) float32`` and how they came about.

    The defaults are the `paper` variant. Ablations: ``rank=0`` has no adapters; ``aggregation="patch_softmax"`` no
    transport: every class looks at the patches by softmax over patches of kappa cos / tau; ``gate="uniform"`` no gate,
    ``"std"`` that of the authors' first code (spread of the condition's scores). Other readings of the source:
    ``marginal_on``, ``psi_similarity``, ``psi_rescale`` (off: psi itself, at most 1 / C), ``detach_plan`` (off:
    gradients through the plan and its marginal), ``adapter_residual``. ``ot_solver``: see `sinkhorn`.

    Choice: the plan of ``patch_softmax`` is scaled to column sums 1 / C and detached, as the transport's is.
    """

    def __init__(
        self,
        num_conditions: int,
        dim: int,
        rank: int = 32,
        *,
        kappa: float = 20.0,
        tau: float = 4.0,
        ot_reg: float = 0.2,
        ot_iters: int = 20,
        ot_solver: str = "auto",
        adapter_scale: float = 1.0,
        adapter_residual: bool = True,
        aggregation: str = "ot",
        marginal_on: str = "scaled",
        detach_plan: bool = True,
        psi_similarity: str = "softmax",
        psi_rescale: bool = True,
        gate: str = "router",
        gate_hidden: int = 32,
        gate_temp: float = 1.0,
    ) -> None:
        super().__init__()
        for name, value, choices in (
            ("aggregation", aggregation, AGGREGATIONS),
            ("marginal_on", marginal_on, MARGINALS),
            ("psi_similarity", psi_similarity, SIMILARITIES),
            ("gate", gate, GATES),
            ("ot_solver", ot_solver, SOLVERS),
        ):
            if value not in choices:
                raise ValueError(f"{name}={value!r} is unknown; there are {', '.join(choices)}")
        if num_conditions < 1 or rank < 0:
            raise ValueError(f"num_conditions={num_conditions} must be at least 1 and rank={rank} at least 0")
        self.num_conditions, self.dim = num_conditions, dim
        self.kappa, self.tau, self.gate_temp = kappa, tau, gate_temp
        self.ot_reg, self.ot_iters, self.ot_solver = ot_reg, ot_iters, ot_solver
        self.aggregation, self.marginal_on, self.detach_plan = aggregation, marginal_on, detach_plan
        self.psi_similarity, self.psi_rescale, self.gate_kind = psi_similarity, psi_rescale, gate
        self.adapter = (
            Adapters(num_conditions, dim, rank, residual=adapter_residual, scale=adapter_scale) if rank else None
        )
        self.gate = Router(num_conditions, dim, gate_hidden) if gate == "router" else None

    def forward(self, patches: Tensor, text: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Probabilities ``(B, C)`` in [0, 1] and the intermediates by name, still attached to the graph.

        ``patches (B, M, D)`` any float type, ``text (N, C, D)`` or, the same for all conditions, ``(1, C, D)``; neither
        needs unit length. Computed in float32 (float64 stays), autocast off. ``cos``, ``sim``, ``cost``, ``plan``
        ``(B, N, M, C)``, ``a (B, N, M)``, ``psi``, ``cond_prob`` ``(B, N, C)``, ``gate (B, N)``, and ``omega (B, N)``
        where there is a router. With ``patch_softmax`` there is no ``cost`` and no ``a``.

        Raises ValueError for shapes that do not fit and for C = 1: a softmax over one class is always 1.
        """
        self._check(patches, text)
        with torch.autocast(patches.device.type, enabled=False):
            patches, text = _wide(patches), _wide(text).expand(self.num_conditions, -1, -1)
            cos = plain_cosines(patches, text) if self.adapter is None else self.adapter(patches, text)
            sim = (self.kappa * cos).softmax(dim=3)
            found = {"cos": cos, "sim": sim}
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach_plan):
                found.update(self._transported(cos, sim))
            chosen = sim if self.psi_similarity == "softmax" else cos
            found["psi"] = (found["plan"] * chosen).sum(dim=2)
            found["cond_prob"] = found["psi"] * (text.shape[1] if self.psi_rescale else 1)
            found.update(self._gated(patches, found["cond_prob"]))
            return (found["gate"][:, :, None] * found["cond_prob"]).sum(dim=1).clamp(0, 1), found

    def _transported(self, cos: Tensor, sim: Tensor) -> dict[str, Tensor]:
        """The plan, and for transport its cost and row sums (spec S4, S5)."""
        num_classes = cos.shape[3]
        if self.aggregation == "patch_softmax":
            return {"plan": (self.kappa * cos / self.tau).softmax(dim=2) / num_classes}
        strength = cos.amax(dim=3) * (self.kappa if self.marginal_on == "scaled" else 1.0)
        a, cost = (strength / self.tau).softmax(dim=2), 1 - sim
        b = cos.new_full((num_classes,), 1 / num_classes)
        plan = sinkhorn(cost.flatten(0, 1), a.flatten(0, 1), b, self.ot_reg, self.ot_iters, solver=self.ot_solver)
        return {"a": a, "cost": cost, "plan": plan.view_as(cost)}

    def _gated(self, patches: Tensor, scores: Tensor) -> dict[str, Tensor]:
        """Weights of the conditions ``(B, N)``, which sum to 1 (spec S7)."""
        if self.gate is not None:
            omega = self.gate(patches.mean(dim=1))
            return {"omega": omega, "gate": (omega / self.gate_temp).softmax(dim=1)}
        if self.gate_kind == "std":
            return {"gate": (scores.std(dim=2) / self.gate_temp).softmax(dim=1)}
        return {"gate": torch.full_like(scores[:, :, 0], 1 / self.num_conditions)}

    def _check(self, patches: Tensor, text: Tensor) -> None:
        shapes = patches.ndim == 3 and text.ndim == 3 and len(text) in (1, self.num_conditions)
        if not shapes or patches.shape[2] != self.dim or text.shape[2] != self.dim or not patches.shape[1]:
            raise ValueError(
                f"expected patches (B, M, {self.dim}) and text ({self.num_conditions}, C, {self.dim}), got "
                f"{tuple(patches.shape)} and {tuple(text.shape)}"
            )
        if text.shape[1] < 2:
            raise ValueError("one class has probability 1 always (softmax over classes); add a class 'no finding'")


def plain_cosines(patches: Tensor, text: Tensor) -> Tensor:
    """Cosines ``(B, N, M, C)`` of patches ``(B, M, D)`` and class features ``(N, C, D)``; 0 for a zero vector."""
    products = patches.flatten(0, 1) @ _unit(text).flatten(0, 1).T
    cosines = products / _length(patches.square().sum(dim=2)).flatten()[:, None]
    return cosines.view(*patches.shape[:2], *text.shape[:2]).transpose(1, 2)


def adapted_cosines(
    patches: Tensor, text: Tensor, down: Tensor, up: Tensor, *, scale: float = 1.0, residual: bool = True
) -> Tensor:
    """Cosines ``(B, N, M, C)`` of z = f + scale up (down f) with the class features; z is never built (spec 13.5).

    ``patches (B, M, D)``, ``text (N, C, D)``, ``down (N, r, D)``, ``up (N, D, r)``. With h = down f:
    <z, t> = <f, t> + scale h . (up' t) and |z|^2 = |f|^2 + 2 scale h . (up' f) + scale^2 h' (up' up) h. All products
    with f are one matrix product. ``residual=False``: z = scale up (down f). A z below 1e-6 counts as that long.
    """
    text, num_classes, rank = _unit(text), text.shape[1], down.shape[1]
    sides = [text, down, up.mT] if residual else [down]
    products = patches.flatten(0, 1) @ torch.cat(sides, dim=1).flatten(0, 1).T  # (B M, N (C + 2 r))
    products = products.unflatten(1, (len(text), -1)).transpose(0, 1)
    h = products[:, :, num_classes : num_classes + rank] if residual else products
    mixed = torch.bmm(h, torch.cat([up.mT @ text.mT, up.mT @ up], dim=2))  # (N, B M, C + r)
    dots = scale * mixed[:, :, :num_classes]
    squares = scale**2 * (h * mixed[:, :, num_classes:]).sum(dim=2)
    if residual:
        dots = dots + products[:, :, :num_classes]
        crossed = (h * products[:, :, num_classes + rank :]).sum(dim=2)
        squares = squares + 2 * scale * crossed + patches.square().sum(dim=2).flatten()
    cosines = dots / _length(squares)[:, :, None]
    return cosines.unflatten(1, patches.shape[:2]).transpose(0, 1)


def transport_maps(plan: Tensor, gate: Tensor) -> Tensor:
    """Where each class gets its mass from ``(B, C, M)``: C plan, mixed by the gate; every map sums to 1.

    ``plan (B, N, M, C)`` and ``gate (B, N)`` as in the intermediates of `FedMPTHead`.
    """
    return plan.shape[3] * torch.einsum("bn,bnmc->bcm", gate, plan)


def _length(squares: Tensor) -> Tensor:
    return squares.clamp(min=SMALLEST_NORM**2).sqrt()


def _unit(vectors: Tensor) -> Tensor:
    return vectors / _length(vectors.square().sum(dim=-1, keepdim=True))


def _wide(values: Tensor) -> Tensor:
    """float32, or float64 where the values are that already."""
    return values if values.dtype == torch.float64 else values.float()
