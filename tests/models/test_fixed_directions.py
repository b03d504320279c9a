"""Directions that every site draws for itself: lengths, angles, and bytes that do not depend on the machine."""

from __future__ import annotations

import pytest
import torch

from models.fixed_directions import GRID, directions_sha256, orthonormal_rows, unit_vectors


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("count", "dim"), [(1, 4), (10, 16), (14, 512), (8, 8)])
def test_orthonormal_rows_have_length_one_and_right_angles(count, dim):
    rows = orthonormal_rows(count, dim, draws())
    assert rows.shape == (count, dim) and rows.dtype == torch.float32
    # entries are rounded to multiples of 2^-24, so products of rows are off by a few of them
    torch.testing.assert_close(rows.double() @ rows.double().T, torch.eye(count).double(), atol=1e-6, rtol=0)


def test_more_right_angles_than_the_width_has_are_refused():
    with pytest.raises(ValueError, match="9 directions at right angles need a width of at least 9, got width 8"):
        orthonormal_rows(9, 8, draws())


def test_unit_vectors_have_length_one_and_any_number():
    rows = unit_vectors(40, 8, draws())
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(40), atol=1e-6, rtol=0)


@pytest.mark.parametrize("make", [unit_vectors, orthonormal_rows])
def test_last_bits_of_the_arithmetic_do_not_reach_the_bytes(make):
    """Every number is a multiple of 2^-24, while processors differ by 1e-16 or so."""
    rows = make(5, 32, draws()).double() * GRID
    assert torch.equal(rows, rows.round())


@pytest.mark.parametrize("make", [unit_vectors, orthonormal_rows])
def test_the_hash_is_that_of_the_seed_also_on_meta(make):
    with torch.device("meta"):
        one = make(5, 16, draws(1))
    assert one.device.type == "cpu"
    assert (
        directions_sha256(one) == directions_sha256(make(5, 16, draws(1))) != directions_sha256(make(5, 16, draws(2)))
    )


def test_the_hash_sees_shape_order_and_a_single_bit():
    rows = unit_vectors(4, 6, draws())
    changed = rows.clone()
    changed[3, 5] += 2**-20
    hashes = {
        directions_sha256(*given) for given in ((rows,), (rows.view(6, 4),), (rows.flip(0),), (changed,), (rows,) * 2)
    }
    assert len(hashes) == 5
