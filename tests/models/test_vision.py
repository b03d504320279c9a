"""The vision encoder of method `incongruent`: pooled features, tokens, and the sizes of the specification."""

from __future__ import annotations

import pytest
import timm
import torch

from models.fednca_backbones import build_backbone
from models.vision import build_vision_encoder


def encoder(name, image_size=32, **options):
    torch.manual_seed(0)
    return build_vision_encoder(name, dim=16, image_size=image_size, **options).eval()


def images(size=32, channels=3, count=2):
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(1))


def test_a_feature_map_is_averaged_and_its_cells_are_the_tokens():
    model, batch = encoder("small_cnn", channels=1, width=8), images(channels=1)
    cells = model.backbone(batch)  # (B, 32, 4, 4)
    z, tokens, valid = model(batch, with_tokens=True)
    torch.testing.assert_close(z, model.projection(cells.mean(dim=(2, 3))))
    assert tokens.shape == (2, 16, 16) and valid.shape == (2, 16) and valid.all()
    torch.testing.assert_close(tokens[:, 5], model.projection(cells[:, :, 1, 1]))
    torch.testing.assert_close(tokens.mean(dim=1), z)  # a projection is linear
    assert model(batch)[1] is None and torch.equal(model(batch)[0], z)


def test_a_vision_transformer_gives_timms_feature_and_its_patches():
    model, batch = encoder("tiny_vit"), images()
    z, tokens, _ = model(batch, with_tokens=True)
    torch.testing.assert_close(z, model.projection(model.backbone(batch)))
    assert tokens.shape == (2, 16, 16)
    torch.testing.assert_close(tokens, model.projection(model.backbone.forward_features(batch)[:, 1:]))


def test_a_named_vision_transformer_is_timms():
    model, batch = encoder("vit_tiny_patch16_224", image_size=32), images()
    twin = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=0, img_size=32).eval()
    twin.load_state_dict(model.backbone.state_dict(), strict=True)
    torch.testing.assert_close(model(batch)[0], model.projection(twin(batch)))


def test_a_vision_transformer_without_class_token_averages_its_patches():
    model = encoder("vit_base_patch16_siglip_gap_224", image_size=32)
    z, tokens, _ = model(images(), with_tokens=True)
    torch.testing.assert_close(z, tokens.mean(dim=1))


def test_other_backbones_keep_their_state_names():
    model = encoder("resnet18")
    assert set(model.backbone.state_dict()) == set(build_backbone("resnet18", image_size=32)[0].state_dict())


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [
        ("resnet18", 224, 11_176_512),
        ("resnet50", 224, 23_508_032),
        ("vit_tiny_patch16_224", 224, 5_524_416),
        ("vit_small_patch16_224", 224, 21_665_664),
        ("tiny_vit", 32, 113_600),
    ],
)
def test_backbones_have_the_published_numbers_of_parameters(name, size, count):
    with torch.device("meta"):
        model = build_vision_encoder(name, dim=256, image_size=size)
    assert sum(parameter.numel() for parameter in model.backbone.parameters()) == count


def test_the_projection_of_resnet50_has_524544_numbers():
    with torch.device("meta"):
        projection = build_vision_encoder("resnet50", dim=256).projection
    assert sum(parameter.numel() for parameter in projection.parameters()) == 524_544


def test_unknown_names_and_sizes_that_do_not_tile_are_refused():
    with pytest.raises(ValueError, match="no backbone 'alexnet'"):
        build_vision_encoder("alexnet", dim=8)
    with pytest.raises(ValueError, match="8 pixels do not tile 30"):
        build_vision_encoder("tiny_vit", dim=8, image_size=30)
