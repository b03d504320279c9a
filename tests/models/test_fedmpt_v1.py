"""The scores of the authors' first code, against their output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models.fedmpt_v1 import official_v1_logits

GOLDEN = Path(__file__).parents[1] / "golden" / "fedmpt" / "off_v1_aggregate.npz"


@pytest.mark.parametrize("temperature", [1, 4])
def test_logits_are_the_authors(temperature):
    with np.load(GOLDEN) as arrays:
        data = {name: torch.from_numpy(arrays[name]) for name in arrays}
    tokens = data["image_tokens"].transpose(1, 2)  # stored channels first
    found = official_v1_logits(tokens, data["text"], 5, float(temperature))
    torch.testing.assert_close(found, data[f"logits_temp{temperature}"], rtol=0, atol=2e-4)
    assert found.abs().max() < 0.3


@pytest.mark.parametrize("rows", [5, 12])
def test_text_that_is_no_grid_is_refused(rows):
    with pytest.raises(ValueError, match="5 conditions"):
        official_v1_logits(torch.ones(1, 6, 8), torch.ones(rows, 8), 5)
