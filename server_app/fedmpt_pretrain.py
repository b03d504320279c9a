"""A small CLIP for the demo: trained on public mosaics of handwritten digits and synthetic captions, in minutes.

    python -m server_app.fedmpt_pretrain OUT_FOLDER [--seed 1]

The folder gets ``open_clip_config.json`` and ``open_clip_model.safetensors``, as `models.clip` reads them. The digits
are those of the public sheets (`datasets.embedded`), so no picture of a site of ``digits-mosaic-private`` is among
them; the last public sheet is kept for the zero-shot figure that is printed at the end.

Towers and loss are open_clip's own. Choice: the image tower pools its patches by their mean instead of a class token,
so that the patches themselves, which the method reads, are aligned with the texts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from datasets.embedded import digits
from datasets.mosaics import EMPTY, mosaic
from datasets.records import Manifest
from datasets.sentences import DIGIT_WORDS, PLACES
from federation import seeding
from federation.files import locked, save_tensors, write_atomic
from federation.ranking import mean_average_precision
from federation.settings import Settings
from models.clip import CONFIG_FILE, WEIGHTS_FILE, Clip, build_towers, clip_sha256, load_clip, prepare_images
from models.fedmpt import CONDITIONS
from models.fedmpt_pretraining import contrastive_loss, text_features, tokenizer_of
from strategies.fedmpt_area import DIGITS

MODEL = {
    "embed_dim": 64,
    "quick_gelu": True,
    "vision_cfg": {
        "image_size": 32,
        "layers": 2,
        "width": 96,
        "head_width": 32,
        "patch_size": 8,
        "pool_type": "avg",
    },
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 4, "layers": 2},
}
"""3.5 million parameters, 3.2 million of them token embeddings; 4 x 4 patches, four a digit."""
MEAN, STD = (0.3, 0.3, 0.3), (0.35, 0.35, 0.35)
STEPS, BATCH, LR, WARM_UP = 600, 128, 2e-3, 50
CHECKED_MOSAICS = 600
TEMPLATE = "a photo of a {}."
PLACED = 0.1


class ZeroShot(NamedTuple):
    """Mean average precision of the template's text features on mosaics of the checked sheet, beside chance."""

    map: float
    chance: float


def pretrain(folder: Path, *, seed: int = 1, steps: int = STEPS, say: Callable[[str], None] = print) -> ZeroShot:
    """Trains the model, writes the folder, whole or not at all, and says how it does; the same seed, the same bytes.

    One CPU thread, since the number of threads changes the sums.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        public = digits(part="public")
        model = _trained(public, seed, steps, say)
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            write_atomic(unfinished / CONFIG_FILE, json.dumps(_config(), indent=1).encode())
            save_tensors(unfinished / WEIGHTS_FILE, model.state_dict())
            os.replace(unfinished, folder)
        except OSError:
            if not folder.exists():  # else another process was faster, and the same seed gives the same bytes
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        found = zero_shot(load_clip(folder), public, seed)
    finally:
        torch.set_num_threads(threads)
    say(f"zero-shot mAP {found.map:.3f}, by chance {found.chance:.3f}; SHA-256 {clip_sha256(folder)}")
    return found


def prepare(settings: Settings) -> None:
    """Makes the demo's CLIP where a simulation asks for it and this machine has none yet; one process does."""
    folder = settings.options.clip_folder(settings)
    if settings.options.clip_dir != DIGITS or folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            print(f"training a small CLIP on public digits, once for this machine, into {folder}", flush=True)
            pretrain(folder)


def _config() -> dict:
    return {"model_cfg": MODEL, "preprocess_cfg": {"mean": MEAN, "std": STD}}


# -- data -------------------------------------------------------------------------------------------------------------


def _tiles(public: Manifest, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Digits ``(n, 8, 8) uint8`` of a split and their classes."""
    rows = np.flatnonzero(public.table["split"].to_numpy() == split)
    return np.stack([public.images.read(int(row)) for row in rows]), public.targets[rows].argmax(axis=1)


def _mosaics(
    tiles: np.ndarray, classes: np.ndarray, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels ``(m, 16, 16)``, targets ``(m, 10)`` and the class of every cell ``(m, 4)``, -1 for an empty one."""
    laid = mosaic(tiles, classes, rng, count=count, num_classes=10)
    return laid.pixels, laid.targets, np.where(laid.tiles == EMPTY, EMPTY, classes[laid.tiles])


def captions(cells: np.ndarray, labels: Sequence[str], rng: np.random.Generator) -> list[str]:
    """One text for each mosaic of ``cells (n, 4)``: "a photo of a 3 and a 7.", or one of its tiles and where it is.

    Half of the first kind stand behind one of the method's condition phrases, which say nothing here. Choice: only one
    text in ten names a place, since places alone tell two mosaics apart and digits need not be read then.
    """
    texts = []
    for row in cells:
        filled = [cell for cell in rng.permutation(len(row)) if row[cell] != EMPTY]
        words = [_word(labels, row[cell], rng) for cell in filled]
        if rng.random() < PLACED:
            texts.append(f"{PLACES[filled[0]][0]} {TEMPLATE.format(words[0])}")
        else:
            phrase = f"{rng.choice(CONDITIONS)} " if rng.random() < 0.5 else ""
            texts.append(phrase + TEMPLATE.format(" and a ".join(dict.fromkeys(words))))
    return texts


def _word(labels: Sequence[str], label: int, rng: np.random.Generator) -> str:
    """The label itself two times of three, else one of its other words."""
    return labels[label] if rng.random() < 2 / 3 else str(rng.choice(DIGIT_WORDS[labels[label]]))


# -- training ---------------------------------------------------------------------------------------------------------


def _trained(public: Manifest, seed: int, steps: int, say: Callable[[str], None]) -> nn.Module:
    with seeding.scope(seed, "initial_weights"):
        model = build_towers(MODEL)
    tokenizer = tokenizer_of(model)
    decayed = [value for value in model.parameters() if value.ndim > 1]
    plain = [value for value in model.parameters() if value.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.98))
    tiles, classes = _tiles(public, "train")
    rng = seeding.numpy_generator(seed, "captions")
    clip = Clip(model, tokenizer, 0, MODEL["vision_cfg"]["image_size"], (0, 0), "", MEAN, STD)
    for step in range(steps):
        pixels, _, cells = _mosaics(_varied(tiles, rng), classes, BATCH, rng)
        texts = tokenizer(captions(cells, public.labels, rng))
        images = prepare_images(clip, torch.from_numpy(pixels)[:, None])
        for group in optimiser.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = contrastive_loss(model, images, texts)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        if step % 100 == 0 or step == steps - 1:
            say(f"step {step + 1} of {steps}: loss {float(loss.detach()):.3f}")
    return model


def _varied(tiles: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Tiles ``(n, 8, 8) uint8``, each turned, sheared, stretched and shifted a little: other hands write otherwise."""
    shape = (len(tiles), 2)
    scale, shear, shift = rng.uniform(0.85, 1.2, shape), rng.uniform(-0.3, 0.3, shape), rng.uniform(-0.25, 0.25, shape)
    rows = [scale[:, 0], shear[:, 0], shift[:, 0], shear[:, 1], scale[:, 1], shift[:, 1]]
    matrices = torch.from_numpy(np.stack(rows, axis=1).reshape(-1, 2, 3)).float()
    pixels = torch.from_numpy(tiles)[:, None].float()
    grid = F.affine_grid(matrices, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, align_corners=False)[:, 0].round().to(torch.uint8).numpy()


@torch.no_grad()
def zero_shot(clip: Clip, public: Manifest, seed: int) -> ZeroShot:
    """How the cosine of a mosaic with "a photo of a 3." ranks mosaics of the checked sheet, without any tuning."""
    pixels, targets, _ = _mosaics(*_tiles(public, "val"), CHECKED_MOSAICS, seeding.numpy_generator(seed, "checked"))
    texts = clip.tokenizer([TEMPLATE.format(label) for label in public.labels])
    text = F.normalize(text_features(clip.model, texts), dim=1)
    picture, _ = clip.model.visual(prepare_images(clip, torch.from_numpy(pixels)[:, None]))
    scores = (F.normalize(picture, dim=1) @ text.T).numpy()
    return ZeroShot(mean_average_precision(scores, targets), float(targets.mean()))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 when the folder was written."""
    parser = argparse.ArgumentParser(
        prog="python -m server_app.fedmpt_pretrain", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where the CLIP goes; must not exist yet")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.folder.exists():
        print(f"fedmpt_pretrain: {options.folder} is there already; name a new folder", file=sys.stderr)
        return 2
    pretrain(options.folder, seed=options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
