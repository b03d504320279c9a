"""Entropic optimal transport between the patches of a picture and the classes (spec S5)."""

from __future__ import annotations

import torch
from torch import Tensor

SOLVERS = ("auto", "kernel", "log", "pot")
SMALLEST_KERNEL_REG = 0.02


def sinkhorn(cost: Tensor, a: Tensor, b: Tensor, reg: float, iterations: int = 20, *, solver: str = "auto") -> Tensor:
    """Plans ``(P, M, C)``: argmin <plan, cost> - reg H(plan) with row sums ``a`` and column sums ``b`` (spec S5).

    ``cost (P, M, C)`` in [0, 1], ``a (P, M)`` and ``b (P, C)`` or ``(C,)`` sum to 1. A fixed number of iterations from
    r = c = 1: r = a / (K c), c = b / (K' r), K = exp(-cost / reg), so that a problem's plan does not depend on the
    others in the batch. Column sums are exact, row sums as good as converged. Works in float32 at least, autocast off;
    gradients flow where the arguments ask for them.

    ``solver``: ``kernel`` as above, safe in float32 for reg >= 0.02; ``log`` the same in logarithms, for smaller reg
    and other costs; ``auto`` picks between the two; ``pot`` is `ot.solve_batch`, without gradients, the oracle.
    Choice: 20 iterations and no stop rule, where the authors' code stops a whole batch at once.

    >>> sinkhorn(torch.zeros(1, 2, 2), torch.tensor([[0.25, 0.75]]), torch.tensor([0.5, 0.5]), 0.2)
    tensor([[[0.1250, 0.1250],
             [0.3750, 0.3750]]])
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver={solver!r} is unknown; there are {', '.join(SOLVERS)}")
    if cost.ndim != 3 or a.shape != cost.shape[:2] or b.shape not in (cost.shape[::2], cost.shape[2:]):
        raise ValueError(
            f"expected cost (P, M, C), a (P, M) and b (P, C) or (C,), got {tuple(cost.shape)}, {tuple(a.shape)}, "
            f"{tuple(b.shape)}"
        )
    if not reg > 0 or iterations < 1:
        raise ValueError(f"reg={reg} must be above 0 and iterations={iterations} at least 1")
    with torch.autocast(cost.device.type, enabled=False):
        cost = cost if cost.dtype == torch.float64 else cost.float()
        a, b = a.to(cost), b.to(cost).expand(cost.shape[::2])
        if solver == "pot":
            return _pot(cost, a, b, reg, iterations)
        if solver == "log" or (solver == "auto" and reg < SMALLEST_KERNEL_REG):
            return _log(cost, a, b, reg, iterations)
        return _kernel(cost, a, b, reg, iterations)


def _kernel(cost: Tensor, a: Tensor, b: Tensor, reg: float, iterations: int) -> Tensor:
    kernel = (cost / -reg).exp()
    columns = torch.ones_like(b)
    for _ in range(iterations):
        rows = a / (kernel * columns[:, None, :]).sum(dim=2)
        columns = b / (kernel * rows[:, :, None]).sum(dim=1)
    return kernel * rows[:, :, None] * columns[:, None, :]


def _log(cost: Tensor, a: Tensor, b: Tensor, reg: float, iterations: int) -> Tensor:
    scores, log_a, log_b = cost / -reg, a.log(), b.log()
    columns = torch.zeros_like(b)
    for _ in range(iterations):
        rows = log_a - (scores + columns[:, None, :]).logsumexp(dim=2)
        columns = log_b - (scores + rows[:, :, None]).logsumexp(dim=1)
    return (scores + rows[:, :, None] + columns[:, None, :]).exp()


def _pot(cost: Tensor, a: Tensor, b: Tensor, reg: float, iterations: int) -> Tensor:
    # POT is imported where it is used: it takes seconds, and only comparisons need it.
    import ot

    solved = ot.solve_batch(cost, reg, a, b, max_iter=iterations, tol=0.0, method="log_sinkhorn", grad="detach")
    return solved.plan
