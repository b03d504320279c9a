"""The vision transformers that `fedmitr` trains at the sites, inverts and distils into: timm's, by name.

The project's fedmitr specification, section 1. Pretrained weights come from a local file whose SHA-256 is checked:
hospitals are offline, and nothing is ever downloaded here.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import timm
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from models.vit_tokens import check_vit, grid_of

OWN = "vit"
"""Name of the network that is described by patch, width, depth and heads instead of a published name."""
HEAD = "head."


class VitOptions(Protocol):
    """What describes a network: the method's settings of these names."""

    model: str
    patch: int
    width: int
    depth: int
    heads: int
    init_sha256: str


def build_vit(
    options: VitOptions, *, num_labels: int, image_size: int, channels: int, weights: str | Path = ""
) -> VisionTransformer:
    """A vision transformer ``(B, channels, S, S) float32 -> (B, num_labels)``, drawn from torch's current generator.

    ``options.model``: ``vit``, made of ``patch``, ``width``, ``depth`` and ``heads``, or a plain vision transformer of
    timm by name, such as ``deit_tiny_patch16_224`` or ``vit_small_patch14_dinov2``; both take ``image_size`` only.
    Choice: the first layer has as many channels as the data. Published weights need 3, and ``data.channels = 3``
    repeats grey pixels, so there is one way from one channel to three and it is the data's.

    ``weights``: see `load_body`. Raises ValueError for an unknown name and for sizes that do not fit.
    """
    if options.model == OWN:
        vit = _own(options, num_labels, image_size, channels)
    elif timm.is_model(options.model):
        shape = {"num_classes": num_labels, "img_size": image_size, "in_chans": channels}
        try:
            vit = timm.create_model(options.model, pretrained=False, **shape)
        except TypeError as error:
            raise ValueError(f"fedmitr.model = {options.model!r} is no vision transformer ({error})") from None
    else:
        raise ValueError(
            f"fedmitr.model = {options.model!r} is unknown; use {OWN!r} or a name of timm, e.g. deit_tiny_patch16_224"
        )
    check_vit(vit)
    if weights:
        load_body(vit, Path(weights).expanduser(), options.init_sha256)
    return vit


def _own(options: VitOptions, num_labels: int, image_size: int, channels: int) -> VisionTransformer:
    if options.width % options.heads:
        raise ValueError(f"fedmitr.heads = {options.heads} does not divide fedmitr.width = {options.width}")
    return VisionTransformer(
        img_size=image_size,
        patch_size=options.patch,
        in_chans=channels,
        num_classes=num_labels,
        embed_dim=options.width,
        depth=options.depth,
        num_heads=options.heads,
    )


def load_body(vit: VisionTransformer, path: Path, sha256: str) -> None:
    """Everything but the head from a safetensors file of a network of this kind; the head belongs to other classes.

    ``sha256`` is what the file's checksum has to be. Position embeddings of another grid are resampled (bicubic, as
    timm does it). Raises ValueError for another file, and for tensors that are absent, unknown or of another shape.
    """
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise ValueError(
            f"{path.name} has the SHA-256 {found}, fedmitr.init_sha256 is {sha256!r}; compare the first with what the "
            "publisher states, and set it where they agree"
        )
    given = {name: value for name, value in load_file(path).items() if not name.startswith(HEAD)}
    wanted = {name: value for name, value in vit.state_dict().items() if not name.startswith(HEAD)}
    if "pos_embed" in given:
        size, prefix = [grid_of(vit)] * 2, vit.num_prefix_tokens
        given["pos_embed"] = resample_abs_pos_embed(given["pos_embed"], size, num_prefix_tokens=prefix)
    wrong = [name for name in sorted({*given, *wanted}) if _shape(given, name) != _shape(wanted, name)]
    if wrong:
        described = "; ".join(f"{name}: {_shape(given, name)}, expected {_shape(wanted, name)}" for name in wrong[:3])
        raise ValueError(
            f"{path.name} does not fit the network in {len(wrong)} tensors ({described}); give a file of the same "
            "model, and data.channels = 3 where its first layer has 3"
        )
    vit.load_state_dict({**vit.state_dict(), **given}, strict=True)


def _shape(state: dict[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None
