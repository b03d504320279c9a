"""Tiny random CLIPs on disk, and runs of `fedmpt` over three labels that train in a second."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from federation import seeding
from models.clip import CONFIG_FILE, TINY, WEIGHTS_FILE, build_towers
from tests.faults.drills import LABELS as LABELS
from tests.faults.drills import settings, write_data

SMALL = {**TINY, "vision_cfg": {**TINY["vision_cfg"], "patch_size": 16}}
"""Four patches."""
WIDE = {
    "embed_dim": 512,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 1},
}
"""The widths that the method sees of a ViT-B/16, with one layer."""


def write_clip(folder: Path, *, seed: int = 1, config=SMALL) -> Path:
    """A CLIP folder with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    with seeding.scope(seed, "clip"):
        model = build_towers(config)
    (folder / CONFIG_FILE).write_text(json.dumps({"model_cfg": config}))
    save_file(model.state_dict(), folder / WEIGHTS_FILE)
    return folder


def run_config(folder: Path, clip: Path, **changes) -> dict:
    """Two rounds at four sites on data below ``folder``; keys with ``__`` for the dot, without a dot the method's."""
    data = folder / "data.npz"
    if not data.exists():
        write_data(data)
    dotted = {key if "__" in key else f"fedmpt__{key}": value for key, value in changes.items()}
    usual = {"training__lr": 0.01, "federation__rounds": 2, "fedmpt__num_conditions": 2, "fedmpt__adapter_rank": 4}
    return settings(data, folder / "runs", method="fedmpt", **{**usual, "fedmpt__clip_dir": str(clip), **dotted})
