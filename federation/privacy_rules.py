"""Which settings go with differential privacy, as sentences for those that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from federation.settings import PrivacyArea, Settings

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
    if area.dp_at_sites:
        found += cut_noise(area, area.dp_clip * area.dp_noise, "dp_clip * dp_noise")
    return found


def cut_noise(area: PrivacyArea, deviation: float, named: str) -> list[str]:
    """A sentence where the secure sum's range cuts the sites' noise of this standard deviation; none where it fits."""
    reach = TAIL_SIGMAS * deviation
    if not area.secure_sum or reach <= area.secure_range:
        return []
    return [
        f"privacy.secure_range = {area.secure_range} cuts noise of standard deviation {named} = {deviation:g}; use "
        f"privacy.secure_range = {reach:g} or more"
    ]
