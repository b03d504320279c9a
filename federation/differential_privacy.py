"""Differential privacy of updates: one clip, one noise, one accountant, for every method that averages changes.

Every site scales its update, the float tensors of all its modules as one vector, to an L2 norm of at most C
(``privacy.dp_clip``). With z = ``privacy.dp_noise``, Gaussian noise of standard deviation z * C a value is added either
at each site to its own update (local), or once by the server to the sum of n updates of equal weight, z * C / n on
their mean (central). McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018,
algorithm 1, with a fixed weight a site; the local form is the Gaussian mechanism on a site's own message.

What is protected is a site's update of a round, so with few sites a small epsilon takes much noise. Not covered:
numbers of examples, losses and score histograms, which travel beside the update in plain.

Choice: central counts a site against a site that sends zeros (sensitivity C), local any two updates (2 C), so the
accountant is given z and z / 2. Choice: no amplification by the sampling of sites is claimed, since the seed that draws
them is in the run config. Choice: integer buffers are neither clipped nor noised.
Choice: noise is Box and Muller's transform of a ChaCha20 stream, whose key comes from the operating system at a
hospital and on the server of hospitals, and from `federation.seeding` in a simulation, where the same seed has to give
the same bits. As everywhere with floats, the noise is a double rounded to the tensor's type (Mironov, CCS 2012).
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from federation import seeding
from federation.wire import State

if TYPE_CHECKING:
    from federation.settings import PrivacyArea

PURPOSE = "privacy_noise"
SERVER = ""
"""The server's place where a site's name stands: no site can be called so."""

CHUNK = 2**16
VARIANCE = "running_var"

Modules = Mapping[str, State]
Arrays = Mapping[str, Mapping[str, np.ndarray]]


class PrivacyError(RuntimeError):
    """A run that could not keep or state its privacy guarantee; nothing is published of the round."""


# -- clip -------------------------------------------------------------------------------------------------------------


def update_norm(modules: Modules) -> float:
    """Joint L2 norm over the float tensors of all modules, summed in float64."""
    return math.sqrt(
        math.fsum(
            float(value.double().square().sum())
            for module in sorted(modules)
            for _, value in sorted(modules[module].items())
            if value.is_floating_point()
        )
    )


def clipped(modules: Modules, bound: float) -> dict[str, dict[str, torch.Tensor]]:
    """The update scaled to a joint norm of at most ``bound``; integer buffers, and a shorter update, as they are.

    Rounding to the tensors' types cannot take it beyond the bound: it aims one rounding step below. Raises PrivacyError
    where the norm is not finite.
    """
    norm = update_norm(modules)
    if not math.isfinite(norm):
        raise PrivacyError("the update is not finite, so it cannot be clipped")
    if norm <= bound:
        return {module: dict(state) for module, state in modules.items()}
    step = max(torch.finfo(v.dtype).eps for state in modules.values() for v in state.values() if v.is_floating_point())
    factor = bound / norm * (1 - step)
    return {
        module: {
            name: (value.double() * factor).to(value.dtype) if value.is_floating_point() else value
            for name, value in state.items()
        }
        for module, state in modules.items()
    }


# -- noise ------------------------------------------------------------------------------------------------------------


def noise_key(seed: int, server_round: int, site: str, *, secret: bool) -> bytes:
    """32 bytes that make one noise: from the operating system where ``secret``, else from the run's seed.

    ``site``: the name of who adds it, `SERVER` for the server.
    """
    if secret:
        return os.urandom(32)
    return hashlib.sha256(str(seeding.derive(seed, PURPOSE, server_round, site)).encode()).digest()


def noised(arrays: Arrays, sigmas: Mapping[str, Mapping[str, float]], key: bytes) -> dict[str, dict[str, np.ndarray]]:
    """Float arrays plus Gaussian noise of their standard deviation ``sigmas[module][name]``; the others as they are.

    The noise is drawn in the order of names, so equal keys and shapes give equal noise.
    """
    stream = NoiseStream(key)
    out: dict[str, dict[str, np.ndarray]] = {}
    for module in sorted(arrays):
        out[module] = {}
        for name, value in sorted(arrays[module].items()):
            if np.issubdtype(value.dtype, np.floating):
                noise = stream.normals(value.size).reshape(value.shape) * sigmas[module][name]
                value = np.asarray(value.astype(np.float64) + noise, value.dtype)  # a sum of scalars is no array
            out[module][name] = value
    return out


class NoiseStream:
    """Standard normal numbers out of one 32-byte key; a key is for one stream."""

    def __init__(self, key: bytes) -> None:
        self._stream = Cipher(ChaCha20(key, bytes(16)), None).encryptor()

    def normals(self, count: int) -> np.ndarray:
        """The next ``count`` numbers, ``(count,) float64``."""
        out = np.empty(count)
        for start in range(0, count, CHUNK):
            part = out[start : start + CHUNK]
            pairs = (part.size + 1) // 2
            words = np.frombuffer(self._stream.update(bytes(16 * pairs)), "<u8").reshape(2, pairs)
            uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1): its log is finite
            radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * math.pi * uniform[1]
            part[:] = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[: part.size]
        return out


def mean_sigmas(
    weights: Mapping[str, Mapping[str, float]], sites: Mapping[str, int], sigma: float
) -> dict[str, dict[str, float]]:
    """The noise of the server on means: ``sigma / n`` for every tensor that n sites sent.

    ``weights``: module -> tensor -> sum of the weights behind its mean; ``sites``: module -> sites that sent it.
    Raises PrivacyError where the sites do not weigh 1 each: the sensitivity of the mean is another one then.
    """
    for module, of_tensor in weights.items():
        if uneven := sorted(name for name, weight in of_tensor.items() if weight != sites[module]):
            raise PrivacyError(
                f"tensor {uneven[0]!r} of module {module!r} has weight {of_tensor[uneven[0]]:g} of {sites[module]} "
                "sites; noise on the server needs sites that weigh 1 each: set the method's weights to equal"
            )
    return {module: dict.fromkeys(of_tensor, sigma / sites[module]) for module, of_tensor in weights.items()}


def with_valid_variances(modules: Modules) -> dict[str, dict[str, torch.Tensor]]:
    """The state with BatchNorm variances that noise has made negative set to 0; it changes nothing of the guarantee."""
    return {
        module: {n: v.clamp(min=0) if n.rpartition(".")[2] == VARIANCE else v for n, v in state.items()}
        for module, state in modules.items()
    }


def warnings_of(names: Iterable[str]) -> list[str]:
    """What does not go well with noise in a network with these tensors."""
    if not any(name.rpartition(".")[2] == VARIANCE for name in names):
        return []
    return [
        "privacy.dp adds noise to BatchNorm's running statistics too, which are in the norm that is clipped; "
        "model.norm = 'group' has none"
    ]


# -- accountant -------------------------------------------------------------------------------------------------------


def require_accountant() -> None:
    """Raises PrivacyError where the package that computes epsilon is not installed."""
    if importlib.util.find_spec("dp_accounting") is None:
        raise PrivacyError(
            "privacy.dp needs the package dp-accounting to state its epsilon; install it: python deploy/install.py dp"
        )


def epsilon(noise_multiplier: float, releases: int, delta: float) -> float:
    """Epsilon at ``delta`` after ``releases`` Gaussian mechanisms, an upper bound by Renyi differential privacy.

    ``noise_multiplier``: standard deviation over sensitivity. Mironov, "Renyi Differential Privacy", CSF 2017.
    """
    if releases == 0:
        return 0.0
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(noise_multiplier), releases))
    return float(accountant.get_epsilon(delta))


def statement(area: PrivacyArea, releases: int) -> dict[str, float | int | str]:
    """What can be said after so many rounds, for the log, ``run.json`` and the report."""
    return {
        "mode": area.dp,
        "clip": area.dp_clip,
        "noise": area.dp_noise,
        "delta": area.dp_delta,
        "rounds": releases,
        "epsilon": epsilon(area.dp_noise / area.dp_sensitivity, releases, area.dp_delta),
    }
