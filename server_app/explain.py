"""Where a trained model looks, on a page for people who may see the images.

    python -m server_app.explain RUN_DIR [--data PATH] [--images 4] [--out FILE.html]

For a simulation on public data, or for a hospital that looks at its own images: RUN_DIR needs ``run.json`` and
``model.safetensors`` only, and --data names the hospital's folder. For every label the page shows the test images with
that label which the model scores highest, with overlays. **The page holds patient images and must not leave the site**;
it is readable by its owner only, and nothing here runs in a federation.

A method's site half may give ``build(labels, settings)``, its network, and ``explain(network, images, label)``, its
maps by title, each ``(B, H, W)``; without them the network is the configured one and the map its Grad-CAM.
"""

from __future__ import annotations

import argparse
import base64
import functools
import importlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import matplotlib.image
import numpy as np
import torch
from markupsafe import Markup
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from client_app import training
from datasets.cache import load_pixels
from datasets.catalogue import open_manifest
from datasets.records import DataError, Manifest
from datasets.transforms import to_input
from federation import registry, seeding, wire
from federation.files import write_atomic
from federation.settings import Settings, SettingsError
from models.losses import probabilities
from server_app import explain_template, report_template

Maps = dict[str, Tensor]
BATCH = 64
SHOWN_PX = 224
MOST_OPAQUE = 0.6
COLOURS = "inferno"
MEANINGS = {
    "attention": "share of each cell in what the model drew for this label, mean over its heads; an even veil means "
    "that it looked everywhere",
    "Grad-CAM": "cells that speak for the label in the last feature map (Selvaraju et al. 2017); a clear picture means "
    "that none does",
    "transport": "where the label's mass comes from: the share of each patch in what was transported to the label, "
    "mixed by the gate",
    "gate": "one bar a condition, from the top in the order of the run's list, as long as its weight for this image",
}


class ExplainError(RuntimeError):
    """The page cannot be made; the message says what to change."""


@dataclass(frozen=True)
class Trained:
    """A run's model: ``network`` in evaluation mode, and ``maps(images, label)`` of it."""

    settings: Settings
    labels: tuple[str, ...]
    task: str
    thresholds: tuple[float, ...]
    server_round: str
    network: nn.Module
    maps: Callable[[Tensor, int], Maps]


# -- the model --------------------------------------------------------------------------------------------------------


def load_model(run_dir: Path) -> Trained:
    """The selected model of a run. Raises ExplainError where the folder holds none, or it is not what it says."""
    settings = _settings(run_dir / "run.json")
    method = registry.find(settings.method)
    if not method.strategy.selects_model:
        raise ExplainError(f"a run of {settings.method!r} has no common model: every site keeps its own")
    path = run_dir / "model.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        labels, thresholds = tuple(json.loads(header["labels"])), json.loads(header["thresholds"])
        task, server_round, model_sha256 = header["task"], header["round"], header["sha256"]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ExplainError(f"{path} cannot be read ({error}); give the folder of a completed run") from error
    if wire.state_sha256({"model": state}) != model_sha256:
        raise ExplainError(f"{path} is damaged: its tensors do not have the hash that its header names")
    half = importlib.import_module(method.site)
    network = training.on_meta(labels, settings, getattr(half, "build", training.network_for))
    try:
        network.to_empty(device="cpu").load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ExplainError(f"{path} does not fit the network of its settings; use the run's code version") from error
    own: Callable[..., Maps] = getattr(half, "explain", last_map_grad_cam)
    return Trained(
        settings,
        labels,
        task,
        tuple(thresholds or [0.5] * len(labels)),
        server_round,
        network.eval(),
        functools.partial(own, network),
    )


def _settings(path: Path) -> Settings:
    try:
        areas: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["settings"]
        flat = {
            (key if area == "run" else f"{area}.{key}"): value for area in areas for key, value in areas[area].items()
        }
        return Settings.from_run_config({**flat, "resume": ""})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = str(error) if isinstance(error, OSError | SettingsError) else "it is no run's description"
        raise ExplainError(f"{path} cannot be used: {reason}; give the folder of a completed run") from error


def last_map_grad_cam(network: nn.Module, images: Tensor, label: int) -> Maps:
    """Grad-CAM (Selvaraju et al. 2017) at the last feature map of more than one cell, for any convolutional network."""
    found: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 4 and (output.shape[2:].numel() > 1 or not found):
            found.append(output)

    hooks = [layer.register_forward_hook(keep) for layer in network.modules()]
    try:
        with torch.enable_grad():
            logits = network(images.clone().requires_grad_())
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        return {}
    (gradient,) = torch.autograd.grad(logits[:, label].sum(), found[-1])
    weights = gradient.mean(dim=(2, 3), keepdim=True)
    return {"Grad-CAM": (weights * found[-1].detach()).sum(dim=1).relu().float()}


# -- the images -------------------------------------------------------------------------------------------------------


def open_data(trained: Trained, data: str | None) -> Manifest:
    """The run's own data, or those of ``data`` with the run's labels. Raises DataError and ExplainError."""
    area = trained.settings.data
    if data is None and area.partition == "own":
        raise ExplainError("the hospitals of this run have their data themselves; name yours with --data")
    return open_manifest(
        data or area.root,
        labels=trained.labels,
        mosaic=area.mosaic,
        rng_for=functools.partial(seeding.numpy_generator, trained.settings.seed),
    )


def pixels_of(trained: Trained, manifest: Manifest, rows: np.ndarray) -> np.ndarray:
    """``(n, S, S, ch) uint8`` as the model takes them."""
    area = trained.settings.data
    return load_pixels(manifest, rows, size=area.image_size, channels=area.channels, cache_dir=None)


def input_of(trained: Trained, pixels: np.ndarray) -> Tensor:
    """``(n, S, S, ch) uint8`` as network input, as in training."""
    return to_input(torch.from_numpy(pixels.copy()), normalise=trained.settings.model.normalise)


def scores_of(trained: Trained, manifest: Manifest, rows: np.ndarray) -> np.ndarray:
    """Scores ``(n, C) float32`` of these rows, a batch in memory at a time."""
    found = np.zeros((len(rows), len(trained.labels)), np.float32)
    for start in range(0, len(rows), BATCH):
        images = input_of(trained, pixels_of(trained, manifest, rows[start : start + BATCH]))
        with torch.no_grad():
            found[start : start + BATCH] = probabilities(trained.network(images), trained.task).numpy()
    return found


def highest_positives(scores: np.ndarray, targets: np.ndarray, label: int, count: int) -> np.ndarray:
    """Positions of the ``count`` highest-scored samples that are known to show a label, the highest first."""
    shown = np.flatnonzero(targets[:, label] == 1)
    return shown[np.argsort(-scores[shown, label], kind="stable")][:count]


# -- the page ---------------------------------------------------------------------------------------------------------


def render(trained: Trained, manifest: Manifest, count: int) -> str:
    """The page as text; every word that comes from data or settings is escaped."""
    rows = np.flatnonzero(manifest.table["split"].to_numpy() == "test")
    if not len(rows):
        raise ExplainError("the data have no test split, and training images would flatter the model")
    scores, targets = scores_of(trained, manifest, rows), manifest.targets[rows]
    titles: dict[str, None] = {}
    labels = []
    for label, name in enumerate(trained.labels):
        chosen = highest_positives(scores, targets, label, count)
        pixels = pixels_of(trained, manifest, rows[chosen])
        cases = []
        for position, pictures in zip(chosen, _pictures(trained, pixels, label), strict=True):
            titles |= dict.fromkeys(title for title, _ in pictures[1:])
            cases.append(
                {
                    "score": f"{scores[position, label]:.3f}",
                    "found": scores[position, label] >= trained.thresholds[label],
                    "line": int(manifest.table["line"].iloc[rows[position]]),
                    "truth": _names(trained.labels, targets[position] == 1),
                    "unknown": _names(trained.labels, targets[position] < 0),
                    "pictures": pictures,
                }
            )
        labels.append({"name": name, "threshold": f"{trained.thresholds[label]:.3f}", "cases": cases})
    page = {
        "title": "Where the model looks",
        "model": f"Model of round {trained.server_round} of a {trained.settings.method} run; {len(rows)} test images.",
        "images": count,
        "maps": [(title, MEANINGS.get(title, "as the method defines it")) for title in titles],
        "labels": labels,
    }
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    css = Markup(report_template.CSS + explain_template.CSS)  # ours, no foreign text in it
    return environment.from_string(explain_template.TEMPLATE).render(page=page, css=css)


def _names(labels: Sequence[str], chosen: np.ndarray) -> str:
    return ", ".join(label for label, is_chosen in zip(labels, chosen, strict=True) if is_chosen)


def _pictures(trained: Trained, pixels: np.ndarray, label: int) -> Iterator[list[tuple[str, str]]]:
    """For each image its own picture and one for every map, as (title, data URI)."""
    if not len(pixels):
        return
    maps = trained.maps(input_of(trained, pixels), label)
    for position, image in enumerate(pixels):
        plain = enlarged(image)
        overlays = [(title, _uri(overlay(plain, found[position]))) for title, found in maps.items()]
        yield [("image", _uri(plain)), *overlays]


def enlarged(image: np.ndarray) -> np.ndarray:
    """``(S, S, 1 or 3) uint8`` as RGB of about the shown size; pixels become squares, nothing is smoothed."""
    times = max(1, SHOWN_PX // len(image))
    return np.repeat(image, 3 // image.shape[2], axis=2).repeat(times, axis=0).repeat(times, axis=1)


def overlay(image: np.ndarray, values: Tensor) -> np.ndarray:
    """The map ``(h, w)`` over an RGB image: opaque where it is largest, clear where it is zero."""
    grown = torch.nn.functional.interpolate(values[None, None].float(), image.shape[:2], mode="bilinear")[0, 0].numpy()
    strength = grown / max(float(grown.max()), np.finfo(np.float32).tiny)
    colours = matplotlib.colormaps[COLOURS](strength)[..., :3] * 255
    opacity = MOST_OPAQUE * strength[..., None]
    return np.rint((1 - opacity) * image + opacity * colours).astype(np.uint8)


def _uri(picture: np.ndarray) -> str:
    file = io.BytesIO()
    matplotlib.image.imsave(file, picture, format="png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


# -- the command ------------------------------------------------------------------------------------------------------


def write_page(run_dir: Path, *, data: str | None = None, images: int = 4, out: Path | None = None) -> Path:
    """Writes the page, readable by its owner only, and returns its path."""
    trained = load_model(run_dir)
    path = out or run_dir / "explain.html"
    write_atomic(path, render(trained, open_data(trained, data), images).encode("utf-8"))
    return path


def _count(text: str) -> int:
    if not 1 <= int(text) <= 100:
        raise argparse.ArgumentTypeError(f"must be 1 to 100, not {text}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 when the page was written, 2 when it cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m server_app.explain", description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path, help="folder of a completed run")
    parser.add_argument("--data", help="folder, zip or table of the images (default: the run's data)")
    parser.add_argument("--images", type=_count, default=4, metavar="N", help="images a label (default: 4)")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="default: explain.html in the run's folder")
    options = parser.parse_args(arguments)
    try:
        path = write_page(options.run_dir, data=options.data, images=options.images, out=options.out)
    except (ExplainError, DataError, registry.UnknownMethod, OSError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    print(f"wrote {path}: it holds patient images and must not leave the site")
    return 0


if __name__ == "__main__":
    sys.exit(main())
