from __future__ import annotations

import pytest
import torch

from datasets.transforms import random_crop, random_flip, to_input


def pixels(batch=5, height=6, width=8, channels=3, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, height, width, channels), generator=generator).to(torch.uint8)


def test_half_maps_black_to_minus_one_and_white_to_one():
    images = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 2, 1)
    assert to_input(images).flatten().tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("channels", [1, 3])
def test_input_is_batch_channel_height_width_float32(channels):
    images = pixels(channels=channels)
    inputs = to_input(images)
    assert inputs.shape == (5, channels, 6, 8) and inputs.dtype == torch.float32 and inputs.is_contiguous()
    expected = (images[3, 2, 4, channels - 1].item() / 255 - 0.5) / 0.5
    assert inputs[3, channels - 1, 2, 4].item() == pytest.approx(expected, abs=1e-6)


def test_imagenet_statistics_are_those_of_torchvision():
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    images = pixels()
    expected = functional.normalize(
        images.permute(0, 3, 1, 2).float() / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    )
    torch.testing.assert_close(to_input(images, normalise="imagenet"), expected, rtol=0, atol=1e-6)


def test_grey_repeats_to_three_equal_channels():
    inputs = to_input(pixels(channels=1), channels=3)
    assert inputs.shape[1] == 3 and torch.equal(inputs[:, 0], inputs[:, 2])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"channels": 1}, "3 channels into 1"),
        ({"normalise": "none"}, "normalise"),
    ],
)
def test_conversions_that_lose_something_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        to_input(pixels(), **arguments)
    with pytest.raises(ValueError, match="ImageNet statistics"):
        to_input(pixels(channels=1), normalise="imagenet")
    with pytest.raises(ValueError, match="uint8"):
        to_input(pixels().float())


def test_an_empty_batch_passes_through_every_transform():
    empty = pixels(batch=0)
    generator = torch.Generator().manual_seed(0)
    assert to_input(random_crop(random_flip(empty, generator), generator, padding=2)).shape == (0, 3, 6, 8)


def test_flip_mirrors_some_pictures_whole_and_leaves_the_others():
    images = pixels(batch=200)
    flipped = random_flip(images, torch.Generator().manual_seed(1))
    is_same = (flipped == images).flatten(1).all(1)
    is_mirrored = (flipped == images.flip(2)).flatten(1).all(1)
    assert torch.all(is_same | is_mirrored)
    assert 60 < is_mirrored.sum() < 140  # binomial(200, 1/2), more than five sigma


@pytest.mark.parametrize(("probability", "expected"), [(0.0, 0), (1.0, 1)])
def test_flip_probability_of_zero_and_one_is_exact(probability, expected):
    images = pixels()
    flipped = random_flip(images, torch.Generator().manual_seed(1), probability=probability)
    assert torch.equal(flipped, images.flip(2) if expected else images)


def test_crop_is_a_window_of_the_padded_picture():
    """Slow re-computation: every picture equals one of the (2p+1)^2 windows of its black frame."""
    images, padding = pixels(batch=40, height=4, width=5), 2
    cropped = random_crop(images, torch.Generator().manual_seed(3), padding=padding)
    framed = torch.zeros(40, 8, 9, 3, dtype=torch.uint8)
    framed[:, 2:6, 2:7] = images
    corners = set()
    for picture in range(40):
        matches = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if torch.equal(framed[picture, top : top + 4, left : left + 5], cropped[picture])
        ]
        assert matches
        corners.add(matches[0])
    assert len(corners) > 10


def test_augmentation_follows_its_generator_and_leaves_the_batch_alone():
    images = pixels()
    before = images.clone()
    torch.manual_seed(0)
    first = random_crop(
        random_flip(images, torch.Generator().manual_seed(5)), torch.Generator().manual_seed(6), padding=1
    )
    torch.manual_seed(1)
    again = random_crop(
        random_flip(images, torch.Generator().manual_seed(5)), torch.Generator().manual_seed(6), padding=1
    )
    assert torch.equal(first, again) and torch.equal(images, before)
    with pytest.raises(ValueError, match="padding"):
        random_crop(images, torch.Generator(), padding=-1)


def test_transforms_keep_the_device_of_the_batch():
    """On torch's meta device a hidden move to the CPU would raise or change the device."""
    images = pixels().to("meta")
    assert to_input(images, normalise="imagenet").device.type == "meta"
    assert random_flip(images, torch.Generator()).device.type == "meta"
