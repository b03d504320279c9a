"""What a hospital allows, from its own node config: which methods, at which hours, and how much leaves it in a round.

    allowed_methods = "fedavg,fednca"     # empty or absent: all
    allowed_hours = "18:00-06:00"         # by the site's clock; absent: always
    max_upload_mb = 200                   # megabytes (1e6 bytes) of tensors a round; 0 or absent: no limit

The server learns that something was not allowed, as a code; what the limit is stands in the site's log.

Choice: hours are looked at when a message arrives, and work that was begun in time is finished and sent. Choice: a
round that is repeated after a crash counts again, since a server could repeat one to get more out: leave room for two.
Choice: a limit that cannot be read refuses everything, as does a key that looks like a limit and is none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, time
from typing import Any

KEYS = ("allowed_methods", "allowed_hours", "max_upload_mb")
HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


class LimitError(RuntimeError):
    """The site's limits cannot be read; nothing is done until they are mended."""


class MethodRefused(LimitError):
    """The site does not take part in this method."""


class OutOfHours(LimitError):
    """A message outside the hours in which the site takes part."""


class UploadTooLarge(LimitError):
    """A reply would take a round beyond what may leave the site. It does not leave."""


@dataclass(frozen=True)
class Limits:
    """A site's limits; the defaults limit nothing, as in a simulation. ``hours``: begin and end, may span midnight."""

    methods: frozenset[str] = frozenset()
    hours: tuple[time, time] | None = None
    max_upload_bytes: int = 0

    def check(self, method: str, now: datetime) -> None:
        """Raises MethodRefused and OutOfHours. ``now``: the site's local time."""
        if self.methods and method not in self.methods:
            raise MethodRefused(f"method {method!r} is not among allowed_methods = {', '.join(sorted(self.methods))}")
        if self.hours and not is_within(now.time(), *self.hours):
            begin, end = self.hours
            raise OutOfHours(f"a message at {now:%H:%M}, allowed_hours = {begin:%H:%M}-{end:%H:%M}")

    def check_upload(self, sent_bytes: int, reply_bytes: int, server_round: int) -> None:
        """Raises UploadTooLarge where a reply would exceed the round's limit. ``sent_bytes``: of the round so far."""
        if self.max_upload_bytes and sent_bytes + reply_bytes > self.max_upload_bytes:
            raise UploadTooLarge(
                f"round {server_round}: {sent_bytes / 1e6:.3f} MB were sent, {reply_bytes / 1e6:.3f} MB more exceed "
                f"max_upload_mb = {self.max_upload_bytes / 1e6:g}"
            )


def is_within(now: time, begin: time, end: time) -> bool:
    """Whether a time of day lies in [begin, end), which spans midnight where the end is the earlier one.

    >>> is_within(time(23), time(18), time(6)), is_within(time(12), time(18), time(6))
    (True, False)
    """
    if begin <= end:
        return begin <= now < end
    return now >= begin or now < end


def parse_limits(node_config: Mapping[str, Any]) -> Limits:
    """The limits in a node config; keys may be written with ``-`` for ``_``. Raises LimitError."""
    given = {key.replace("-", "_"): value for key, value in node_config.items()}
    if unknown := sorted(key for key in given if key.startswith(("allow", "max_")) and key not in KEYS):
        raise LimitError(f"the node config has {unknown[0]!r}, which is no limit; the limits are {', '.join(KEYS)}")
    methods = frozenset(name.strip() for name in str(given.get("allowed_methods", "")).split(",") if name.strip())
    return Limits(methods, _hours(str(given.get("allowed_hours", "")).strip()), _bytes(given.get("max_upload_mb", 0)))


def _hours(text: str) -> tuple[time, time] | None:
    if not text:
        return None
    found = HOURS.fullmatch(text)
    if found is None or found[1] + found[2] == found[3] + found[4]:
        raise LimitError(f"allowed_hours = {text!r}, expected two different times such as 18:00-06:00")
    begin_hour, begin_minute, end_hour, end_minute = map(int, found.groups())
    return time(begin_hour, begin_minute), time(end_hour, end_minute)


def _bytes(value: Any) -> int:
    try:
        megabytes = float(value)
    except (TypeError, ValueError):
        megabytes = -1.0
    if isinstance(value, bool) or not 0 <= megabytes < 1e9:
        raise LimitError(f"max_upload_mb = {value!r}, expected megabytes, or 0 for no limit")
    return round(megabytes * 1e6)
