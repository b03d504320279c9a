"""CLIP's towers from a folder: the check of its hash, what is refused, patch features and prepared pictures."""

from __future__ import annotations

import json

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from federation import seeding
from models.clip import (
    TINY,
    VIT_B_16,
    build_towers,
    clip_sha256,
    load_clip,
    patch_features,
    prepare_images,
    random_clip,
)


@pytest.fixture(scope="module")
def clip():
    with seeding.scope(1, "clip"):
        return random_clip()


@pytest.fixture
def folder(tmp_path, clip):
    (tmp_path / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": TINY, "preprocess_cfg": {"mean": [0.5] * 3}})
    )
    save_file(clip.model.state_dict(), tmp_path / "open_clip_model.safetensors")
    return tmp_path


def test_a_folder_gives_the_same_towers_frozen(clip, folder):
    found = load_clip(folder, clip_sha256(folder))
    assert found.sha256 == clip_sha256(folder) and found.mean == (0.5,) * 3 and found.std == clip.std
    for name, value in clip.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value)
    assert not found.model.training and not any(value.requires_grad for value in found.model.parameters())
    assert (found.dim, found.image_size, found.grid) == (32, 32, (4, 4))


def test_other_files_than_agreed_are_refused_with_both_hashes(folder):
    agreed = clip_sha256(folder)
    config = folder / "open_clip_config.json"
    config.write_text(config.read_text().replace("true", "false"))  # other activations, the same weights
    with pytest.raises(ValueError, match=agreed) as refused:
        load_clip(folder, agreed)
    assert clip_sha256(folder) in str(refused.value) and str(folder.parent) not in str(refused.value)


def test_missing_and_broken_files_are_refused(folder):
    config, weights = folder / "open_clip_config.json", folder / "open_clip_model.safetensors"
    good = config.read_text()
    config.write_text(json.dumps({"model_cfg": {**TINY, "embed_dim": 16}}))
    with pytest.raises(ValueError, match="does not fit"):
        load_clip(folder)
    for text, said in (("{", "cannot be read"), ("[]", "no settings"), ("{}", "no model_cfg")):
        config.write_text(text)
        with pytest.raises(ValueError, match=said):
            load_clip(folder)
    config.write_text(good)
    weights.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="does not fit"):
        load_clip(folder)
    weights.unlink()
    with pytest.raises(ValueError, match="converted to safetensors"):
        load_clip(folder)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("text_cfg", {"hf_model_name": "roberta-base"}),
        ("vision_cfg", {"timm_model_name": "convnext_base"}),
        ("vision_cfg", {"layers": [3, 4, 6, 3]}),
    ],
)
def test_towers_of_other_makes_are_refused_before_anything_is_fetched(part, change):
    with pytest.raises(ValueError, match="CLIP's own make"):
        build_towers({**TINY, part: {**TINY[part], **change}})
    with pytest.raises(ValueError, match="configuration"):
        build_towers({**TINY, "shape": 3})


def test_vit_b_16_is_open_clips_and_has_its_size():
    assert open_clip.get_model_config("ViT-B-16-quickgelu") == VIT_B_16
    with torch.device("meta"):
        assert sum(value.numel() for value in build_towers(VIT_B_16).parameters()) == 149_620_737


def test_patch_features_are_the_last_blocks_tokens_projected(clip):
    images = torch.randn(2, 3, 32, 32)
    visual = clip.model.visual
    states = visual.ln_post(visual.transformer(visual._embeds(images)))
    found = patch_features(clip, images)
    assert found.shape == (2, 16, 32)
    torch.testing.assert_close(found, states[:, 1:] @ visual.proj, rtol=0, atol=1e-6)
    torch.testing.assert_close(states[:, 0] @ visual.proj, visual(images)[0], rtol=0, atol=1e-6)


def test_pictures_are_prepared_as_open_clip_does(clip):
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (6, 9, 3), np.uint8)).resize((90, 61), Image.Resampling.BICUBIC)
    expected = open_clip.image_transform(32, is_train=False, mean=clip.mean, std=clip.std)(small)
    found = prepare_images(clip, torch.from_numpy(np.array(small)).permute(2, 0, 1)[None])
    assert found.shape == (1, 3, 32, 32)
    # open_clip rounds to whole grey levels after resizing: 1 / 255 over the smallest std
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1.5 / 255 / 0.26)


def test_padding_keeps_the_whole_picture_and_grey_is_repeated(clip):
    white = torch.full((1, 1, 64, 40), 255, dtype=torch.uint8)
    mean, std = torch.tensor(clip.mean)[:, None, None], torch.tensor(clip.std)[:, None, None]
    padded = prepare_images(clip, white, "pad")[0] * std + mean
    assert padded.shape == (3, 32, 32)
    torch.testing.assert_close(padded[:, :, 6:26], torch.ones(3, 32, 20))  # 40 of 64 wide: 20 of 32, 6 on each side
    torch.testing.assert_close(padded[:, :, [0, 5, 26, 31]], torch.zeros(3, 32, 4), rtol=0, atol=1e-6)
    same = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    torch.testing.assert_close(prepare_images(clip, same) * std + mean, same / 255)
    for wrong in (same.float(), same[0], same[:, :2]):
        with pytest.raises(ValueError, match="uint8"):
            prepare_images(clip, wrong)
