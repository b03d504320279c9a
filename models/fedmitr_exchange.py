"""Numbers of `fedmitr` that travel beside the model, for both halves of the method."""

from __future__ import annotations

NO_GUARANTEE = -1.0
TRAIN_NUMBERS = {"epsilon": "real"}
"""``epsilon``: what DP-SGD spent on one training image at ``fedmitr.dp_delta``; `NO_GUARANTEE` without DP-SGD."""
