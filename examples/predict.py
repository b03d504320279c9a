"""Predicts on a folder of images with a run's model, and draws where it looked.

    python examples/predict.py runs/<run> path/to/images --out predictions

Reads `run.json` and `model.safetensors` of the run, writes predictions/scores.csv (one row an image, one column a
label) and one picture an image and label above its threshold. Scores and pictures belong to patients: keep them where
the images are.
"""

import argparse
import csv
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datasets.images import convert_pixels, decode_image
from models.losses import probabilities
from server_app.explain import Trained, enlarged, input_of, load_model, overlay

SUFFIXES = {".png", ".jpg", ".jpeg", ".dcm"}


def main() -> None:
    """Scores every image of the folder, in the order of their names."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("run", type=Path, help="folder of a completed run")
    options.add_argument("images", type=Path, help="folder of PNG, JPEG or DICOM files")
    options.add_argument("--out", type=Path, default=Path("predictions"))
    chosen = options.parse_args()

    trained = load_model(chosen.run)
    files = sorted(path for path in chosen.images.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        sys.exit(f"no image in {chosen.images}: looked for {', '.join(sorted(SUFFIXES))}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    with (chosen.out / "scores.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["image", *trained.labels])
        for number, path in enumerate(files):
            pixels = pixels_of(trained, path)
            images = input_of(trained, pixels[None])
            with torch.no_grad():
                scores = probabilities(trained.network(images), trained.task)[0].tolist()
            table.writerow([path.relative_to(chosen.images), *(f"{score:.4f}" for score in scores)])
            for label, score in enumerate(scores):
                if score >= trained.thresholds[label]:
                    draw(trained, images, pixels, label, chosen.out / f"{number:04d}-{label:02d}.png")
    print(f"{len(files)} images scored: {chosen.out / 'scores.csv'}")


def pixels_of(trained: Trained, path: Path) -> np.ndarray:
    """The image as the model takes it, ``(S, S, channels) uint8``."""
    area = trained.settings.data
    return convert_pixels(decode_image(path.read_bytes(), path.name), size=area.image_size, channels=area.channels)


def draw(trained: Trained, images: torch.Tensor, pixels: np.ndarray, label: int, path: Path) -> None:
    """The image, and beside it the model's maps of one label laid over it."""
    plain = enlarged(pixels)
    overlays = [overlay(plain, values[0].detach()) for values in trained.maps(images, label).values()]
    Image.fromarray(np.concatenate([plain, *overlays], axis=1)).save(path)


if __name__ == "__main__":
    main()
