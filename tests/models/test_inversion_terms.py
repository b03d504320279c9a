"""Patch ids under jitter, kept counts and priors against the authors' numbers, rolled pictures and slow loops."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.inversion_terms import (
    keep_counts,
    pixel_places,
    recomputed_count,
    shift_ids,
    total_variation_l1,
    total_variation_l2,
    total_variation_l2_of,
)
from models.vit_tokens import all_patches, patch_pixels, take

GOLDEN = Path(__file__).parents[1] / "golden" / "fedmitr"
FORMS = json.loads((GOLDEN / "case10_closed_forms.json").read_text())


def golden_shifts():
    with np.load(GOLDEN / "case02_jitter_index.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


# -- reference --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "out", "grid", "patch"), [("abs_idx", "out_p16_g14", 14, 16), ("abs_idx_g7", "out_p32_g7", 7, 32)]
)
def test_shifted_ids_are_the_authors(ids, out, grid, patch):
    data = golden_shifts()
    for (down, right, flip), expected in zip(data["offsets"].tolist(), data[out], strict=True):
        assert torch.equal(shift_ids(data[ids], grid, down, right, bool(flip), patch), expected)


def test_offsets_may_be_tensors_one_a_row():
    data = golden_shifts()
    down, right, flip = data["offsets"][:, :, None].unbind(1)  # (9, 1) each
    found = shift_ids(data["abs_idx"][:1].expand(9, -1), 14, down, right, flip, 16)
    assert torch.equal(found, data["out_p16_g14"][:, 0])


@pytest.mark.parametrize("offset", range(-28, 29))
def test_a_shift_is_rounded_to_whole_patches(offset):
    rows = FORMS["patch_shift_p16"][str(offset)] % 14
    assert shift_ids(torch.tensor([1]), 14, offset, 0, False, 16).item() == 14 * rows + 1
    assert shift_ids(torch.tensor([1]), 14, 0, offset, False, 16).item() == rows + 1


@pytest.mark.parametrize("name", FORMS["kept_counts"])
def test_kept_counts_are_the_closed_form(name):
    patches, _, schedule = name.partition("_")
    ratio, _, times = schedule.partition("x")
    assert keep_counts(int(patches), [float(ratio)] * int(times)) == FORMS["kept_counts"][name]


@pytest.mark.parametrize("name", FORMS["final_mask_count"])
def test_recomputed_counts_are_the_closed_form(name):
    tokens, _, schedule = name.partition("_")
    ratio, _, times = schedule.partition("x")
    assert recomputed_count(int(tokens) - 1, [float(ratio)] * int(times)) == FORMS["final_mask_count"][name]


def test_a_product_that_rounds_to_nothing_keeps_one_patch():
    assert keep_counts(10, (0.7,)) == FORMS["kept_counts_float_trap"]["10_r0.7"]
    assert FORMS["kept_counts_float_trap"]["10_r0.9"] == [0] and keep_counts(10, (0.9,)) == [1]
    assert keep_counts(5, ()) == [] and keep_counts(7, (0.0, 0.99, 0.99)) == [7, 1, 1]


def slow_total_variation(images, power):
    """The four differences, pair by pair, in float64: the sum of norms (power 2) or of mean magnitudes (power 1)."""
    images = images.double().numpy()
    total = 0.0
    for down, right in ((0, 1), (1, 0), (1, 1), (-1, 1)):
        pairs = [
            images[b, c, y, x] - images[b, c, y + down, x + right]
            for b, c, y, x in np.ndindex(images.shape)
            if 0 <= y + down < images.shape[2] and x + right < images.shape[3]
        ]
        total += math.sqrt(sum(d * d for d in pairs)) if power == 2 else sum(map(abs, pairs)) / len(pairs)
    return total


def test_total_variation_is_that_of_a_slow_loop():
    images = torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    assert total_variation_l2(images).item() == pytest.approx(slow_total_variation(images, 2), rel=1e-5)
    assert total_variation_l1(images).item() == pytest.approx(slow_total_variation(images, 1), rel=1e-5)


# -- property ---------------------------------------------------------------------------------------------------------


@given(down=st.integers(-40, 40), right=st.integers(-40, 40), flip=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_shift_is_a_permutation_and_a_flip_undoes_itself(down, right, flip):
    ids = all_patches(1, 49)
    moved = shift_ids(ids, 7, down, right, flip, 8)
    assert torch.equal(moved.sort(dim=1).values, ids)
    assert torch.equal(shift_ids(shift_ids(ids, 7, 0, 0, True, 8), 7, 0, 0, True, 8), ids)
    assert shift_ids(torch.tensor([0]), 7, down, right, flip, 8).item() == 0
    whole = shift_ids(ids, 7, 8 * down, 8 * right, False, 8)  # whole patches go back exactly
    assert torch.equal(shift_ids(whole, 7, -8 * down, -8 * right, False, 8), ids)


def test_no_jitter_leaves_ids_alone_and_16_pixels_are_a_row():
    ids = all_patches(2, 196)
    assert torch.equal(shift_ids(ids, 14, 0, 0, False, 16), ids)
    assert torch.equal(shift_ids(ids[:, :14], 14, 16, 0, False, 16), ids[:, 14:28])


@given(down=st.integers(-9, 9), right=st.integers(-9, 9), flip=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_pixel_places_are_those_of_a_rolled_and_mirrored_picture(down, right, flip, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(2, 3, 12, 12, generator=generator)
    ids = torch.stack([torch.randperm(9, generator=generator)[:4] + 1 for _ in range(2)])
    rolled = images.roll((down, right), dims=(2, 3))
    rolled = rolled.flip(3) if flip else rolled
    places = pixel_places(ids, 3, 4, down, right, flip)
    found = images.flatten(2).gather(2, places[:, None].expand(-1, 3, -1))
    expected = take(patch_pixels(rolled, 4), ids - 1)
    assert torch.equal(found.view(2, 3, 4, 16).transpose(1, 2).flatten(2), expected)


def test_jitter_may_differ_from_image_to_image():
    images = torch.arange(2 * 64.0).view(2, 1, 8, 8)
    down, flip = torch.tensor([[3], [-2]]), torch.tensor([[0], [1]])
    places = pixel_places(all_patches(2, 4), 2, 4, down, down, flip)
    found = images.flatten(2).gather(2, places[:, None]).view(2, 4, 16)
    for row, (offset, mirror) in enumerate(((3, False), (-2, True))):
        rolled = images[row : row + 1].roll((offset, offset), dims=(2, 3))
        assert torch.equal(found[row], patch_pixels(rolled.flip(3) if mirror else rolled, 4)[0])


@pytest.mark.parametrize("copies", [1, 4, 9])
def test_copies_cost_the_square_root_of_their_number(copies):
    images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(3))
    many = total_variation_l2(images.repeat(copies, 1, 1, 1)).item()
    assert many == pytest.approx(math.sqrt(copies) * total_variation_l2(images).item(), rel=1e-5)
    grouped = total_variation_l2_of(images.repeat(copies, 1, 1, 1).view(copies, 2, 3, 6, 6))
    torch.testing.assert_close(grouped, total_variation_l2(images).expand(copies))


def test_a_constant_picture_costs_nothing_and_its_gradient_is_finite():
    images = torch.full((2, 3, 5, 5), 0.7).requires_grad_()
    loss = total_variation_l2(images)
    (gradient,) = torch.autograd.grad(loss, images)
    assert loss.item() == 0 and (gradient == 0).all()


def test_the_written_out_slope_is_that_of_differentiating_the_norms():
    groups = torch.randn(2, 2, 3, 5, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    groups[1, :, :, :, :] = groups[1, :1, :1]  # one group of equal channels
    assert torch.autograd.gradcheck(
        lambda x: total_variation_l2_of(x) * torch.tensor([1.0, -3.0]), groups.requires_grad_()
    )
