"""The network of method `incongruent`: two encoders, a fusion and a head, built without what a site does not need.

The project's incongruent specification, sections 3.2, 3.3, 3.6 and 3.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.incongruent_fusion import mean_weights, zero_absent
from models.text import restore_buffers

MODULES = ("vision", "text", "gate", "fusion", "head", "min_v2t", "min_t2v")
"""Children of the network; every parameter and buffer is in exactly one."""


class Encoding(NamedTuple):
    """One modality of a batch: ``z (B, d)``; for fusion by attention ``tokens (B, n, d)`` and ``valid (B, n) bool``.

    Rows without the modality are zero, their tokens not valid.
    """

    z: Tensor
    tokens: Tensor | None = None
    valid: Tensor | None = None


class Features(NamedTuple):
    """Everything that losses look at. z of an absent modality is zero, also where the fusion was given a guess.

    ``present``: as given; ``imputed``: what the fusion saw besides, guessed. ``gate``: weights ``(B, 2, d)`` of the two
    modalities, None for the fusions without weights.
    """

    z_image: Tensor  # (B, d)
    z_text: Tensor  # (B, d)
    present: Tensor  # (B, 2) bool
    imputed: Tensor  # (B, 2) bool
    gate: Tensor | None
    f: Tensor  # (B, d)
    logits: Tensor  # (B, C)


class IncongruentNetwork(nn.Module):
    """Encoders, fusion and head, without the modules that a site does not need (None).

    ``forward``: ``images (B, ch, H, W)`` or None, ``tokens (B, L) int64`` or None, ``present (B, 2) bool`` (image,
    report) to logits ``(B, C)``. Encoders run on the rows that have their modality only; nothing that stands in another
    row has an influence. ``sources (B,) int64``: label source where the fusion takes it (0 reviewed, 1 auto, 2
    unknown); None counts as reviewed. ``impute=True``: an absent modality is guessed by MIN where its net is there.

    Without ``gate`` a gated network takes samples with one modality only, whose weight is 1 whatever the gate holds.
    Raises ValueError for a sample with nothing present or with a modality that the network has no encoder for.
    Dropout and the ``mixed`` mask draw from torch's global generators, in training mode only.
    """

    def __init__(self, parts: Mapping[str, nn.Module], *, fusion: str, dim: int) -> None:
        super().__init__()
        self.fusion_kind, self.dim = fusion, dim
        for name in MODULES:
            self.add_module(name, parts.get(name))

    @property
    def built(self) -> tuple[str, ...]:
        """Names of the modules that this network holds."""
        return tuple(name for name in MODULES if getattr(self, name) is not None)

    @property
    def backbone(self) -> nn.Module:
        """The image encoder without its projection, which `model.weights` may initialise."""
        return self.vision.backbone

    def train(self, mode: bool = True) -> IncongruentNetwork:
        """As of any module; a module without anything to train stays in evaluation mode, so no BatchNorm moves."""
        super().train(mode)
        for name in self.built:
            part = getattr(self, name)
            if not any(value.requires_grad for value in part.parameters()):
                part.eval()
        return self

    def forward(
        self,
        images: Tensor | None,
        tokens: Tensor | None,
        present: Tensor,
        *,
        impute: bool = False,
        sources: Tensor | None = None,
    ) -> Tensor:
        return self.features(images, tokens, present, impute=impute, sources=sources).logits

    def features(
        self,
        images: Tensor | None,
        tokens: Tensor | None,
        present: Tensor,
        *,
        impute: bool = False,
        sources: Tensor | None = None,
    ) -> Features:
        """Logits and what led to them."""
        present = present.bool()
        image, text = self.encode(images, tokens, present)
        return self.fuse(image, text, present, impute=impute, sources=sources)

    def encode(self, images: Tensor | None, tokens: Tensor | None, present: Tensor) -> tuple[Encoding, Encoding]:
        """What the encoders give, image and report. It can be fused again with less present (`fuse`)."""
        if present.ndim != 2 or present.shape[1] != 2 or not present.any(dim=1).all():
            raise ValueError(f"present {tuple(present.shape)} must be (B, 2) with an image or a report in every row")
        return self._encode("vision", images, present[:, 0]), self._encode("text", tokens, present[:, 1])

    def fuse(
        self,
        image: Encoding,
        text: Encoding,
        present: Tensor,
        *,
        impute: bool = False,
        sources: Tensor | None = None,
    ) -> Features:
        """From encodings on. ``present`` may be less than what was encoded: a teacher sees more than its student."""
        given = [
            encoding._replace(z=zero_absent(encoding.z, present[:, column]))
            for column, encoding in enumerate((image, text))
        ]
        seen, imputed = given, torch.zeros_like(present)
        if impute:
            seen, imputed = self._imputed(given, present)
        shown = present | imputed
        weights = None
        if self.fusion_kind == "attention":
            blocks = [_token_block(encoding, shown[:, column]) for column, encoding in enumerate(seen)]
            f = self.fusion(*blocks[0], *blocks[1], sources)
        else:
            z_image, z_text = seen[0].z, seen[1].z
            weights = self._weights(z_image, z_text, shown)
            f = self.fusion(z_image, z_text, shown, weights, sources)
        return Features(given[0].z, given[1].z, present, imputed, weights, f, self.head(f))

    def _encode(self, module: str, inputs: Tensor | None, present: Tensor) -> Encoding:
        rows = present.nonzero().squeeze(1)
        encoder = getattr(self, module)
        if not len(rows):
            like = next(self.head.parameters())
            return Encoding(torch.zeros(len(present), self.dim, dtype=like.dtype, device=present.device))
        if encoder is None or inputs is None:
            what = "this network was built without it" if encoder is None else "it was given no input"
            raise ValueError(f"{len(rows)} samples need {module!r}, but {what}")
        dense = len(rows) == len(present)
        parts = encoder(inputs if dense else inputs[rows], with_tokens=self.fusion_kind == "attention")
        if not dense:
            parts = (None if part is None else _scattered(part, rows, len(present)) for part in parts)
        return Encoding(*parts)

    def _weights(self, z_image: Tensor, z_text: Tensor, present: Tensor) -> Tensor | None:
        if self.fusion_kind == "zero_concat":
            return None
        if self.gate is not None:
            return self.gate(z_image, z_text, present)
        if self.fusion_kind == "gated" and present.all(dim=1).any():
            raise ValueError("a sample has both modalities, but this network was built without 'gate'")
        return mean_weights(present, self.dim, z_image.dtype)

    def _imputed(self, given: list[Encoding], present: Tensor) -> tuple[list[Encoding], Tensor]:
        """Encodings with guesses in place of what is absent. No gradient passes a guess (spec 3.6)."""
        seen, imputed = list(given), [torch.zeros_like(present[:, column]) for column in (0, 1)]
        for column, net in ((0, self.min_t2v), (1, self.min_v2t)):
            if net is None:
                continue
            rows = imputed[column] = present[:, 1 - column] & ~present[:, column]
            with torch.no_grad():
                guess = net(given[1 - column].z)
            z, tokens, valid = given[column]
            z = torch.where(rows[:, None], guess, z)
            if tokens is not None:  # a guess is one token
                tokens = torch.cat([guess[:, None].to(tokens.dtype), tokens], dim=1)
                valid = torch.cat([rows[:, None], valid & ~rows[:, None]], dim=1)
            seen[column] = Encoding(z, tokens, valid)
        return seen, torch.stack(imputed, dim=1)

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> IncongruentNetwork:
        """As of any module; the text model's position numbers, which no state dict brings back, are written again."""
        super().to_empty(device=device, recurse=recurse)
        if self.text is not None:
            restore_buffers(self.text)
        return self


def _scattered(part: Tensor, rows: Tensor, batch: int) -> Tensor:
    """``part`` in its rows of a batch, zeros (False) in the others."""
    return part.new_zeros(batch, *part.shape[1:]).index_copy(0, rows, part)


def _token_block(encoding: Encoding, shown: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and which of them may be read. A modality that no encoder gave tokens of is its z, one token."""
    if encoding.tokens is None:
        return encoding.z[:, None], shown[:, None]
    return encoding.tokens, encoding.valid & shown[:, None]
