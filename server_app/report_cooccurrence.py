"""False positives by co-occurrence in the report; only runs whose method measures them have it.

See `federation.cooccurrence`.
"""

from collections.abc import Mapping
from typing import Any

from federation.cooccurrence import MAX_LIFT
from server_app.report_words import number, number_of, plain


def cooccurrence_words(summary: Mapping[str, Any]) -> list[str]:
    """How much more often absent labels are called where one that goes with them is there, in a sentence or two."""
    if "cooc_fp_lift" not in summary:
        return []
    lift = number(summary["cooc_fp_lift"])
    pairs, left_out = (int(number(summary.get(f"cooc_fp_lift_{name}")) or 0) for name in ("pairs", "left_out"))
    without = f"{number_of(left_out, 'pair')} without a value left out"
    if lift is None:
        return [f"False positives by co-occurrence: not defined, {without}."]
    text = f"Absent labels are called {plain(lift)} times as often where one that goes with them is there, a mean over "
    text += f"{number_of(pairs, 'pair')} of labels" + (f" ({without})." if left_out else ".")
    return [text + (f" Above {MAX_LIFT:g}: that labels go together acts as a cause." if lift > MAX_LIFT else "")]
