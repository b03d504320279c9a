"""The exported file: equal to the network, for any batch, in a process that has none of our code."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from datasets.transforms import to_input
from models.fednca import build_fednca, etf_sha256, simplex_etf
from models.fednca_export import FoldedNetwork, export_network
from models.fednca_maps import attention_maps

LABELS = ("atelectasis", "effusion", "mass", "nodule", "pneumonia")
OUTSIDE = """
import json, sys
import numpy, torch
extra = {"model.json": ""}
program = torch.export.load("model.pt2", extra_files=extra).module()
out = program(torch.from_numpy(numpy.load("images.npy")))
numpy.savez("out.npz", **{name: value.numpy() for name, value in out.items()})
ours = [name for name in sys.modules if name.partition(".")[0] in ("models", "timm", "torchvision")]
print(json.dumps({"card": json.loads(extra["model.json"]), "ours": ours}))
"""


def trained(backbone="small_cnn", seed=0, **options):
    """A network with every parameter and running statistic off its initial value, attention far from uniform."""
    torch.manual_seed(seed)
    sizes = {"channels": 1, "image_size": 16, "width": 8} if backbone == "small_cnn" else {}
    network = build_fednca(backbone, num_labels=5, **{**sizes, **options})
    with torch.no_grad():
        for value in network.parameters():
            value += (0.05 if backbone == "small_cnn" else 0.005) * torch.randn_like(value)
        if network.kind == "ladm":
            network.ladm.attention.in_proj_weight[: 2 * network.dim] *= 5  # queries and keys: sharp attention
        network.train()
        shape = (8, options.get("channels", 1 if backbone == "small_cnn" else 3))
        size = options.get("image_size", 16)
        network(torch.randn(*shape, size, size))
    return network.eval()


def pictures(count, channels=1, size=16, seed=7):
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(seed))


def load(content):
    extra = {"model.json": ""}
    program = torch.export.load(io.BytesIO(content), extra_files=extra).module()
    return program, json.loads(extra["model.json"])


@torch.no_grad()
def assert_same(program, network, images):
    found = program(images)
    torch.testing.assert_close(found["probabilities"], network(images).sigmoid(), atol=1e-5, rtol=0)
    torch.testing.assert_close(found["attention"], attention_maps(network, images), atol=1e-5, rtol=0)


def test_file_runs_in_a_process_without_our_code(tmp_path):
    network, images = trained(), pictures(3)
    (tmp_path / "model.pt2").write_bytes(
        export_network(network, labels=LABELS, channels=1, image_size=16, card={"pixels": "0..255 to -1..1"})
    )
    np.save(tmp_path / "images.npy", images.numpy())
    # -I: neither the working folder nor PYTHONPATH is searched, so no file of ours can be found
    done = subprocess.run(
        [sys.executable, "-I", "-c", OUTSIDE], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout)
    assert said["ours"] == []
    assert said["card"] == {
        "labels": list(LABELS),
        "input": [1, 16, 16],
        "outputs": ["probabilities", "attention"],
        "etf_sha256": etf_sha256(simplex_etf(5, 32)),
        "pixels": "0..255 to -1..1",
    }
    with np.load(tmp_path / "out.npz") as out, torch.no_grad():
        np.testing.assert_allclose(out["probabilities"], network(images).sigmoid().numpy(), atol=1e-5)
        np.testing.assert_allclose(out["attention"], attention_maps(network, images).numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"position": False},
        {"queries": "learnable_random"},
        {"etf_trainable": True},
        {"logit_scale_init": 1.0, "learnable_scale": False, "use_bias": False},
        {"norm": "group"},
        {"num_heads": 2},
    ],
    ids=str,
)
def test_folded_network_is_the_network(options):
    network, images = trained(**options), pictures(6)
    maps = attention_maps(network, images)
    assert maps.amax(dim=(2, 3)).mean() > 0.3  # far from 1/4: the test would see a wrong score
    with torch.no_grad():
        assert_same(FoldedNetwork(network, (2, 2)), network, images)


@pytest.mark.parametrize(
    ("backbone", "options"),
    [("resnet18", {"image_size": 64}), ("vit_tiny_patch16_224", {"image_size": 32, "patch_size": 8})],
)
def test_every_batch_size_runs_on_the_larger_backbones(backbone, options):
    network = trained(backbone, **options)
    program, _ = load(export_network(network, labels=LABELS, channels=3, image_size=options["image_size"]))
    for count in (1, 2, 5):
        assert_same(program, network, pictures(count, 3, options["image_size"]))


def test_file_of_a_network_on_imagenet_statistics_takes_minus_one_to_one_too():
    network = trained(channels=3)
    pixels = torch.randint(0, 256, (3, 16, 16, 3), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    program, _ = load(export_network(network, labels=LABELS, channels=3, image_size=16, normalise="imagenet"))
    found = program(to_input(pixels))
    images = to_input(pixels, normalise="imagenet")
    torch.testing.assert_close(found["probabilities"], network(images).sigmoid(), atol=1e-5, rtol=0)
    torch.testing.assert_close(found["attention"], attention_maps(network, images), atol=1e-5, rtol=0)


def test_file_holds_raw_weights_and_no_picture_of_a_patient():
    content = export_network(trained(), labels=LABELS, channels=1, image_size=16)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = archive.namelist()
        for name in names:
            if name.endswith("_config.json"):
                entries = json.loads(archive.read(name))["config"].values()
                assert not any(entry["use_pickle"] for entry in entries)
        (sample,) = [name for name in names if "sample_inputs" in name]
        arguments, _ = torch.load(io.BytesIO(archive.read(sample)), weights_only=True)
    assert (arguments[0] == 0).all()


def test_export_leaves_the_network_as_it_was():
    network = trained().train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    export_network(network, labels=LABELS, channels=1, image_size=16)
    assert network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_attention_and_head_need_no_key_value_or_class_feature():
    folded = FoldedNetwork(trained(), (2, 2))
    own = {name: tuple(value.shape) for name, value in folded.named_buffers() if not name.startswith("backbone.")}
    assert own == {"directions": (40, 32, 1), "offsets": (40, 4), "constant": (5,)}  # 2 * 5 labels * 4 heads


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ({"head": "etf"}, {}, "an exported model and its attention maps need head='ladm'"),
        ({"head_normalize": True}, {}, "cannot be folded"),
        ({}, {"labels": LABELS[:4]}, "4 labels for a network of 5"),
        ({}, {"card": {"labels": []}}, r"the card's keys \['labels'\] are written by the export itself"),
    ],
)
def test_what_cannot_be_exported_is_refused(options, changes, reason):
    with pytest.raises(ValueError, match=reason):
        export_network(trained(**options), **{"labels": LABELS, "channels": 1, "image_size": 16} | changes)
