"""The settings of `promptclip`, for server and sites."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from strategies.fedmpt_area import ClipArea


class PromptClipArea(ClipArea):
    """Which baseline; the optimiser and the rounds are those of the shared areas."""

    variant: Literal["zero_shot", "poscoop", "dualcoop", "tpg", "mvp", "otp", "ram"] = Field(
        "dualcoop", description="see models.promptclip and models.promptclip_variants; zero_shot trains nothing"
    )
    num_tokens: int = Field(4, ge=1, le=64, description="trained tokens of a context; 4 start as 'a photo of a'")
    gain: float = Field(5.0, gt=0, le=100, description="factor of the scores; 1 where cosines are far apart")

    def network_options(self) -> dict[str, Any]:
        """Arguments of `models.promptclip_variants.build_promptclip` that are settings of the run."""
        return self.model_dump(include={"variant", "num_tokens", "gain"})
