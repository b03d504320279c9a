"""FedAvg against a plain loop over sites, batches and parameters."""

from __future__ import annotations

import torch


def test_two_rounds_are_those_of_a_plain_loop(plain_loop, plain_settings, trained):
    settings = plain_settings()
    strategy, _ = trained(settings)
    expected = plain_loop(settings, 2, lambda site, name, gradient, value, received: gradient)
    found = strategy.progress.modules["model"]
    assert set(found) == set(expected)
    for name, value in expected.items():
        # the loop sums in another order: about ten float32 roundings of values near 1
        torch.testing.assert_close(
            found[name], value, atol=2e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
