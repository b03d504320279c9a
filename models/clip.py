"""CLIP's two towers, frozen: from a local folder whose SHA-256 is checked, or small and random; nothing is downloaded.

A CLIP folder is open_clip's own layout: ``open_clip_config.json`` (``model_cfg`` and, optionally, ``preprocess_cfg``)
and ``open_clip_model.safetensors``. Sections as in the project's fedmpt specification, S2.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import center_crop, resize

# open_clip takes seconds to import, and no other method needs it: it is imported where it is used.

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

VIT_B_16 = {
    "embed_dim": 512,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 224, "layers": 12, "width": 768, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12},
}
"""OpenAI's ViT-B/16, whose weights need QuickGELU: 149,620,737 parameters."""
TINY = {
    "embed_dim": 32,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
"""Two layers of width 32, patches of 8 pixels: for tests."""


@dataclass(frozen=True)
class Clip:
    """A frozen CLIP. ``model`` is also its text tower (`models.fedmpt_text`); ``dim`` is the joint width D.

    ``sha256``: of configuration and weights, "" for random weights. ``mean``, ``std``: how pictures are normalised.
    """

    model: nn.Module
    tokenizer: Any
    dim: int
    image_size: int
    grid: tuple[int, int]
    sha256: str
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD

    @property
    def embeddings(self) -> Tensor:
        """Token embeddings ``(V, W)``."""
        return self.model.token_embedding.weight


def load_clip(folder: str | Path, sha256: str = "") -> Clip:
    """The CLIP of a local folder, frozen and on the CPU; raises ValueError unless its `clip_sha256` is ``sha256``.

    Without ``sha256`` any is taken; sites compare theirs afterwards. Also raises ValueError for a missing file, for
    weights that do not fit the configuration, and for towers that open_clip would have to fetch.
    """
    folder = Path(folder)
    found = clip_sha256(folder)
    if sha256 and found != sha256:
        raise ValueError(f"CLIP {folder.name} has SHA-256 {found}, expected {sha256}; all sites need the same files")
    config = _json(folder / CONFIG_FILE)
    if not isinstance(config.get("model_cfg"), dict):
        raise ValueError(f"{CONFIG_FILE} of {folder.name} has no model_cfg; save it as open_clip does")
    model = build_towers(config["model_cfg"])
    from open_clip import load_checkpoint

    try:
        load_checkpoint(model, str(folder / WEIGHTS_FILE), strict=True)
    except (RuntimeError, KeyError, OSError, SafetensorError) as error:
        raise ValueError(f"{WEIGHTS_FILE} of {folder.name} does not fit its {CONFIG_FILE}: {error}") from error
    preprocessing = config.get("preprocess_cfg", {})
    mean, std = (tuple(preprocessing.get(key, given)) for key, given in (("mean", MEAN), ("std", STD)))
    return _frozen(model, found, mean, std)


def random_clip(config: Mapping[str, Any] = TINY) -> Clip:
    """A frozen CLIP with weights from torch's current generator; ``config`` as open_clip's ``model_cfg``."""
    return _frozen(build_towers(config), "", MEAN, STD)


def build_towers(config: Mapping[str, Any]) -> nn.Module:
    """`open_clip.CLIP` with a vision transformer and CLIP's text tower, trainable, from torch's current generator.

    Raises ValueError for towers of other makes: they read tokens in other ways, and open_clip would download them.
    """
    from open_clip import CLIP

    config = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    config.pop("custom_text", None)
    vision, text = config.get("vision_cfg", {}), config.get("text_cfg", {})
    foreign = [key for key in ("timm_model_name", "hf_model_name", "hf_tokenizer_name") if key in {**vision, **text}]
    if foreign or not isinstance(vision.get("layers", 12), int):
        raise ValueError(
            f"expected a vision transformer and a text tower of CLIP's own make, found {foreign or vision}"
        )
    try:
        return CLIP(**config)
    except TypeError as error:
        raise ValueError(f"this is no configuration of a CLIP: {error}") from error


def clip_sha256(folder: Path) -> str:
    """SHA-256 (hex) of a CLIP folder: configuration, then weights. Raises ValueError where one is missing."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder.name} has no {name}; a CLIP folder holds {CONFIG_FILE} and {WEIGHTS_FILE}, as open_clip "
                "saves them (other weight files must be converted to safetensors first)"
            )
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@torch.no_grad()
def patch_features(clip: Clip, images: Tensor) -> Tensor:
    """Patch features ``(B, M, D)`` of prepared images ``(B, 3, S, S)``: last block, ln_post, projected, no class token.

    They are not normalised. Source: spec S2; the tokens that open_clip returns lack the projection.
    """
    _, tokens = clip.model.visual(images)
    return tokens @ clip.model.visual.proj


def prepare_images(clip: Clip, images: Tensor, fit: str = "crop") -> Tensor:
    """Images ``(B, ch, H, W) uint8``, ch 1 or 3, as CLIP reads them ``(B, 3, S, S) float32`` (spec S2).

    ``crop``: shorter side to S, bicubic, and the centre of it; ``pad``: longer side to S and black borders, for
    pictures whose edges matter. Grey is repeated. There is no augmentation, so features can be cached.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3) or fit not in ("crop", "pad"):
        raise ValueError(
            f"expected (B, 1 or 3, H, W) uint8 and fit crop or pad, got {tuple(images.shape)} {images.dtype}, {fit!r}"
        )
    size, sides = clip.image_size, images.shape[2:]
    reference = min(sides) if fit == "crop" else max(sides)
    target = [size if side == reference else max(1, size * side // reference) for side in sides]
    scaled = resize(images, target, InterpolationMode.BICUBIC, antialias=True)
    scaled = center_crop(scaled, [size, size]).float() / 255  # fills up with black what is smaller
    mean, std = (torch.tensor(values, device=images.device)[:, None, None] for values in (clip.mean, clip.std))
    return (scaled.expand(-1, 3, -1, -1) - mean) / std


def _frozen(model: nn.Module, sha256: str, mean: tuple[float, ...], std: tuple[float, ...]) -> Clip:
    from open_clip import SimpleTokenizer

    model.eval().requires_grad_(False)
    model.visual.output_tokens = True
    tokenizer = SimpleTokenizer(context_length=model.context_length)
    if tokenizer.vocab_size != model.vocab_size:
        raise ValueError(f"the text tower has {model.vocab_size} tokens, CLIP's tokeniser has {tokenizer.vocab_size}")
    image_size = model.visual.image_size
    return Clip(model, tokenizer, model.visual.proj.shape[1], image_size[0], model.visual.grid_size, sha256, mean, std)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} of {path.parent.name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} of {path.parent.name} holds no settings")
    return content
