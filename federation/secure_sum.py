"""The arithmetic of the secure sum: fixed-point vectors, masks that cancel, keys and sealed shares.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, for the vectors of
the project's incongruent specification, section 6.1: one ``[w, clipped, w * change]`` for every module, summed over the
sites that have the module. `federation.secure_roster` says what travels, `client_app.secure_sum` and
`strategies.secure_sum` are the two halves of the protocol.

A site adds to its vector a self mask, and for every other site of the cohort a pairwise mask that one of the two adds
and the other subtracts. The self mask is why a vector that arrives late, after the pairwise masks of its site were
given out, still shows nothing. The server is honest but curious, and may collude with less than a third of the sites.
It relays the public keys, which nobody signs, and it may learn a site's part from two sums that differ by that site, so
it is trusted not to swap keys and not to repeat rounds.

Choice: sums are modulo 2^64. Modulo 2^32 would halve the bytes, but ``w * change`` has to fit: 200,000 examples would
leave 13 bits for a change. With 64 the weights stay exact integers, and with a range of 8 a step is 3e-8.
Choice: keys and seeds come from the operating system, not from `federation.seeding`: a seed in the run config would be
known to the server. The masks cancel exactly, so the result does not depend on them.
Choice: of Flower's primitives only Shamir's sharing is used. Its mask generator folds a key to 32 bits for a Mersenne
twister, its rounding draws from NumPy's global state, and its keys are P-384 in PEM, ten
times as long to share.
Choice: integer buffers (BatchNorm's step counter) are not summed: their largest value cannot be read from a sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from federation.wire import FLOAT_DTYPES, TensorSpec, WireError

LEVELS = 2**28
"""Fixed-point value of the end of the declared range."""

MAX_WEIGHT = 10**8
"""Largest weight of one site: as many examples as a site card may claim."""

MAX_SITES = 256
"""MAX_SITES * MAX_WEIGHT * LEVELS stays below 2^63, so no sum wraps around."""

MIN_COHORT = 3
"""Fewest sites of a sum: of two, each learns the other's part."""

HEADER = 2
"""Entries before the values: the weight, and how many values were clipped."""

KEY_BYTES = 32
TAG_BYTES = 16
CHUNK = 2**17

Specs = Mapping[str, TensorSpec]


class SecureSumError(WireError):
    """A key, share, vector or request that the protocol does not allow, or a round that cannot be unmasked."""


@dataclass(frozen=True)
class ModuleSum:
    """One module's decoded sum: the weighted mean change, empty where the weights are all 0.

    ``clipped``: values cut to the declared range, over all ``num_sites`` sites.
    """

    mean: Mapping[str, np.ndarray]
    weight: int
    clipped: int
    num_sites: int


def threshold(num_sites: int) -> int:
    """Shares that rebuild a secret shared among ``num_sites`` sites.

    Choice: floor(2n/3) + 1 (Bonawitz et al., section 6.2). A server that tells some sites that X survived and others
    that X dropped needs 2t answers, so it cannot get both of X's secrets unless a third of the sites help it.
    """
    return 2 * num_sites // 3 + 1


def summed(specs: Specs) -> dict[str, TensorSpec]:
    """The float tensors of a module in the order of their names: the vector's layout."""
    return {name: specs[name] for name in sorted(specs) if specs[name].dtype in FLOAT_DTYPES}


def vector_size(specs: Specs) -> int:
    """Entries of a module's vector, header included."""
    return HEADER + sum(math.prod(spec.shape) for spec in summed(specs).values())


def quantise(
    change: Mapping[str, np.ndarray | torch.Tensor], weight: int, specs: Specs, value_range: float
) -> np.ndarray:
    """One module's change as ``[w, clipped, w * q]``, ``(vector_size,) uint64`` in two's complement.

    ``q = rint(LEVELS * x / value_range)`` after a cut to ``[-value_range, value_range]``, so an unclipped value is off
    by at most ``value_range / (2 LEVELS)``. Weight 0 (the module was not updated here) gives zeros.
    Raises SecureSumError for a weight outside 0 to MAX_WEIGHT, for tensors that are absent, misshapen or not finite.
    """
    _check_range(value_range)
    if isinstance(weight, bool) or not isinstance(weight, int) or not 0 <= weight <= MAX_WEIGHT:
        raise SecureSumError(f"the weight is {weight!r}, expected a whole number from 0 to {MAX_WEIGHT}")
    vector = np.zeros(vector_size(specs), np.int64)
    if weight == 0:
        return vector.view(np.uint64)
    start, clipped = HEADER, 0
    for name, spec in summed(specs).items():
        if name not in change or tuple(change[name].shape) != spec.shape:
            found = list(change[name].shape) if name in change else "absent"
            raise SecureSumError(f"tensor {name!r} is {found}, expected {list(spec.shape)}")
        values = np.asarray(change[name], np.float64).reshape(-1)
        if not np.isfinite(values).all():
            raise SecureSumError(f"tensor {name!r} holds a value that is not finite; it cannot be sent")
        clipped += int(np.count_nonzero(np.abs(values) > value_range))
        fixed = np.rint(np.clip(values, -value_range, value_range) * (LEVELS / value_range))
        np.multiply(fixed.astype(np.int64), weight, out=vector[start : start + values.size])
        start += values.size
    vector[:HEADER] = weight, clipped
    return vector.view(np.uint64)


def decode_sum(total: np.ndarray, num_sites: int, specs: Specs, value_range: float) -> ModuleSum:
    """The weighted mean ``sum(w * q) / sum(w)`` of an unmasked sum ``(vector_size,) uint64``, in the tensors' dtypes.

    Raises SecureSumError where a number is beyond what ``num_sites`` sites can add up to: a mask is still in it, or a
    site did not keep to the fixed point.
    """
    _check_range(value_range)
    if total.shape != (vector_size(specs),) or total.dtype != np.uint64:
        raise SecureSumError(f"the sum is {total.dtype}{list(total.shape)}, expected uint64[{vector_size(specs)}]")
    weight, clipped = (int(value) for value in total[:HEADER].view(np.int64))
    values = total[HEADER:].view(np.int64)
    limit = weight * LEVELS
    if not (
        0 <= weight <= num_sites * MAX_WEIGHT
        and 0 <= clipped <= num_sites * values.size
        and -limit <= int(values.min(initial=0)) <= int(values.max(initial=0)) <= limit
    ):
        raise SecureSumError(
            f"the sum over {num_sites} sites is outside the declared range: a mask is still in it, or a site did not "
            "keep to the fixed point; the round's change is not used"
        )
    mean, start = {}, 0
    for name, spec in summed(specs).items() if weight else ():
        stop = start + math.prod(spec.shape)
        scaled = values[start:stop] / weight * (value_range / LEVELS)
        mean[name] = scaled.astype(spec.dtype).reshape(spec.shape)
        start = stop
    return ModuleSum(mean, weight, clipped, num_sites)


def _check_range(value_range: float) -> None:
    if not (math.isfinite(value_range) and value_range > 0):
        raise SecureSumError(f"the value range is {value_range}, expected a positive finite number")


def add_mask(vector: np.ndarray, seed: bytes, *, subtract: bool = False) -> None:
    """Adds the ChaCha20 stream of a 32-byte seed to ``(n,) uint64`` in place, modulo 2^64; or takes it off again.

    A seed makes one mask and no more: the stream starts at nonce 0.
    """
    stream = Cipher(ChaCha20(seed, bytes(16)), None).encryptor()
    blank = memoryview(bytes(8 * CHUNK))
    change = np.subtract if subtract else np.add
    for start in range(0, vector.size, CHUNK):  # piece by piece: the mask is never whole in memory
        part = vector[start : start + CHUNK]
        change(part, np.frombuffer(stream.update(blank[: part.nbytes]), "<u8"), out=part)


def new_private_key() -> bytes:
    """A fresh X25519 private key, 32 bytes."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """The public key of a private one, 32 bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def check_public_key(public: bytes) -> None:
    """Raises SecureSumError for bytes that are no X25519 key, or a point that agrees on 0 with every key."""
    agreed_key(new_private_key(), public, "check")


def agreed_key(private: bytes, public: bytes, purpose: str) -> bytes:
    """The 32 bytes that two sites derive for one purpose: X25519, then HKDF-SHA256. Raises SecureSumError."""
    if len(public) != KEY_BYTES:
        raise SecureSumError(f"a public key has {len(public)} bytes, expected {KEY_BYTES}")
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise SecureSumError("a public key is a point of small order, which hides nothing") from error
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose.encode()).derive(shared)


def seal(key: bytes, plain: bytes) -> bytes:
    """Encrypts and signs under a key that is used this once (so the nonce may be 0): TAG_BYTES longer."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), plain, None)


def unseal(key: bytes, sealed: bytes) -> bytes:
    """Raises SecureSumError where the bytes are not what was sealed under this key."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, None)
    except InvalidTag as error:
        raise SecureSumError("sealed shares were changed, or the sites do not have the same key table") from error
