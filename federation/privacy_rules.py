"""Which settings go with differential privacy, as sentences for those that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from federation.settings import Settings

TAIL_SIGMAS = 5
"""Noise beyond this many standard deviations may be cut by the secure sum's range: one value in two million."""


def contradictions(settings: Settings, strategy: type[Any]) -> list[str]:
    """A sentence with the fix for each combination that protects nothing or means nothing."""
    area, found = settings.privacy, []
    if not area.dp_clips:
        return []
    on = f"privacy.dp = {area.dp!r}"
    if not (getattr(strategy, "secure_summable", True) and getattr(strategy, "sends_changes", True)):
        found.append(
            f"method = {settings.method!r} with {on}: clipping and noise are for methods whose sites send, whole, the "
            "changes of weights that are averaged; choose another method or privacy.dp = 'none'"
        )
    if area.dp_noise == 0:
        found.append(f"privacy.dp_noise = 0 with {on}: without noise nothing is private; use 1 or more, or dp = 'none'")
    if area.dp_at_server and settings.federation.weighting != "equal":
        found.append(
            f"federation.weighting = {settings.federation.weighting!r} with {on}: a site's weight would be part of "
            "what is protected; use 'equal'"
        )
    reach = TAIL_SIGMAS * area.dp_clip * area.dp_noise
    if area.secure_sum and area.dp_at_sites and reach > area.secure_range:
        found.append(
            f"privacy.secure_range = {area.secure_range} cuts noise of standard deviation dp_clip * dp_noise = "
            f"{area.dp_clip * area.dp_noise:g}; use privacy.secure_range = {reach:g} or more"
        )
    return found
