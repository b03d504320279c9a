"""Neural collapse in the report: how near a site's features are to the fixed directions of their labels.

Only runs whose method measures it have these figures; see `models.fednca_collapse`.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from server_app.report_words import number

COLLAPSE = ("collapse_cosine", "collapse_ratio")
MEASURED = ("collapse_within", "collapse_between", "collapse_cosine", "collapse_labels")
COLLAPSE_WORDS = (
    "Neural collapse",
    "Features of examples with a finding, on their way to the fixed direction of that label: the cosine to it goes to "
    "1, the scatter within labels over that between labels to 0. Measured over labels with two such examples at a "
    "site; not defined at a site with fewer than two such labels.",
)


def with_collapse(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A site's summary with cosine and ratio of the scatters in place of what travelled; None where undefined.

    A site that could not measure sends zeros with a count of zero labels. A summary without any is unchanged.
    """
    if "collapse_labels" not in summary:
        return dict(summary)
    within, between, cosine, labels = (number(summary.get(key)) or 0 for key in MEASURED)
    figures = {
        "collapse_cosine": cosine if labels else None,
        "collapse_ratio": within / between if labels and between > 0 else None,
    }
    return {key: value for key, value in summary.items() if key not in MEASURED} | figures


def pooled_collapse(summary: Mapping[str, Any], sites: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The pooled summary with the mean over the sites that could measure it; ``sites``: results of `with_collapse`.

    Choice: sites count alike, since features of two sites are not pooled; the mean in ``metrics.jsonl`` is weighted
    by examples and has the zeros of sites that could not measure in it.
    """
    if "collapse_labels" not in summary:
        return dict(summary)
    values = {key: [v for site in sites if (v := number(site.get(key))) is not None] for key in COLLAPSE}
    figures = {key: statistics.fmean(found) if found else None for key, found in values.items()}
    return {key: value for key, value in summary.items() if key not in MEASURED} | figures
