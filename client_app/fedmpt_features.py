"""The frozen towers at a site, and its pictures as patch features: computed once, then read from its disk.

For every method on patch features; the settings are those of `strategies.fedmpt_area.ClipArea`. There is no
augmentation, so a picture has the same features in every round (project's fedmpt specification, S2 and section 13.4).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from client_app.site import Site
from client_app.training import Job
from datasets.patch_cache import Features, cache_key, load_features
from datasets.records import DataError, Split
from federation.settings import Settings
from models.clip import Clip, patch_features, prepare_images
from models.fedmpt_networks import opened_clip

FEATURES = "features"
GB = 1e9


def site_clip(settings: Settings) -> Clip:
    """The site's own CLIP. Raises DataError where it is absent, or another one than the run's settings name."""
    options = settings.options
    try:
        return opened_clip(options.clip_folder(settings), options.clip_sha256)
    except ValueError as error:
        raise DataError(str(error)) from error


def site_features(site: Site, job: Job, split: str) -> Features:
    """Patch features ``(n, M, D) float16`` of a split's pictures, memory-mapped where they are on the disk.

    Raises DataError as `site_clip` and `datasets.patch_cache.load_features` do.
    """
    part = site.data.splits[split]
    pictures = _Pictures((site.data.checksum, split, *part.images.shape), part, site.cache_dir)
    return _features(pictures, job.settings, job.device, job.precision)


def without_pixels(site: Site, split: str) -> Site:
    """The site with empty pixels in a split, for code that would decode them all and gets features instead."""
    data = site.data
    part = data.splits[split]
    bare = replace(part, images=np.broadcast_to(np.uint8(0), (len(part), 1, 1, 1)))
    return replace(site, data=replace(data, splits={**data.splits, split: bare}))


@dataclass(frozen=True)
class _Pictures:
    """A split of a site as a key of the process's own memory: equal keys mean the same pictures."""

    key: tuple[str | int, ...]
    split: Split = field(compare=False)
    cache_dir: Path | None = field(compare=False)


@functools.lru_cache(maxsize=64)
def _features(pictures: _Pictures, settings: Settings, device: torch.device, precision: torch.dtype | None) -> Features:
    clip, split = site_clip(settings), pictures.split

    @torch.no_grad()
    def compute(rows: np.ndarray) -> np.ndarray:
        pixels = torch.from_numpy(np.ascontiguousarray(split.images[rows])).permute(0, 3, 1, 2).to(device)
        with torch.autocast(device.type, precision, enabled=precision is not None):
            return patch_features(clip, prepare_images(clip, pixels)).float().cpu().numpy()

    clip.model.to(device)
    shape = (len(split), clip.grid[0] * clip.grid[1], clip.dim)
    limit = settings.options.feature_cache_gb * GB if pictures.cache_dir else 0.0
    key = cache_key(*pictures.key, clip.sha256, str(precision))
    folder = (pictures.cache_dir or Path()) / FEATURES
    return load_features(compute, shape, key=key, cache_dir=folder, max_bytes=limit)
