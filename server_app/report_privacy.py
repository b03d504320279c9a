"""What the report says of differential privacy: the guarantee in two sentences, with what it does not cover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server_app.report_words import number, plain


def privacy_words(run: Mapping[str, Any]) -> list[str]:
    """Sentences for `run.json`'s ``differential_privacy``; none where a run has no such entry."""
    found = run.get("differential_privacy")
    if not isinstance(found, Mapping) or number(found.get("epsilon")) is None:
        return []
    where = "by the server, once, to their mean" if found.get("mode") == "central" else "by each site to its own"
    return [
        f"Differential privacy of a site's updates: epsilon at most {plain(found['epsilon'])} at delta "
        f"{found.get('delta')} over {plain(found.get('rounds'))} rounds. Updates were clipped to a norm of "
        f"{plain(found.get('clip'))}, and noise of {plain(found.get('noise'))} times that was added "
        f"{where}. Numbers of examples, losses and score histograms are not covered."
    ]


def spent_words(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence where sites trained with DP-SGD and said what it spent (``epsilon`` of their reply; -1: they did not).

    The last round that a site trained in counts.
    """
    told: dict[str, float] = {}
    for record in rounds:
        for site, extra in (record.get("extra") or {}).items():
            if (found := number(extra.get("epsilon"))) is not None and found >= 0:
                told[site] = found
    if not told:
        return []
    listed = ", ".join(f"{site} {plain(epsilon)}" for site, epsilon in sorted(told.items()))
    return [
        f"Differential privacy of single training images, by each site's own account: epsilon {listed}. Counts, losses "
        "and scores are not covered, and a patient with several images is covered less."
    ]
