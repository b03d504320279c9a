"""One exchange: push messages to sites, pull the replies one at a time in the order of site names.

The SuperLink keeps a reply until it is pulled, so the server holds one reply at a time and the order of every sum is
fixed, whoever answers first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from federation import wire
from strategies.cards import SiteCard

POLL_S = 0.1
REMIND_S = 30.0

NO_REPLY = 1000
OTHER_SENDER = 1001
ERRORS = {
    1: "the site's app could not be loaded",
    2: "the site's app raised an error",
    3: "the message was gone before the site took it",
    4: "the reply was gone before it was pulled",
    5: "the site's node went away",
    6: "a mod refused the message",
    7: "the site's app bundle is not valid",
    8: "the site's app crashed",
    NO_REPLY: "no reply within the time limit",
    OTHER_SENDER: "the reply came from another node than the message went to",
}
"""Flower's error codes and two of ours, in words. The reason text that comes along is dropped: it may name patients."""


@dataclass(frozen=True)
class Sent:
    """What is remembered of a message while its reply is awaited."""

    card: SiteCard
    action: str
    server_round: int
    evaluated_split: str


def exchange(grid: Grid, messages: Sequence[Message], names: Mapping[int, str], timeout_s: float) -> Iterator[Message]:
    """Sends messages; the iterator gives one reply for each, in the order of the sites' names (node id -> site).

    A site that stays silent until ``timeout_s`` is represented by an error reply, so this never raises for a site. The
    messages must carry ``ttl=timeout_s``, so that they expire at the sites at the same moment. Nothing sent is held
    here; the caller must drop a reply before it asks for the next: then one reply is in memory at a time.
    """
    messages = sorted(messages, key=lambda message: names[message.metadata.dst_node_id])
    ids = list(grid.push_messages(messages))
    waiting = {i: Message(RecordDict(), metadata=m.metadata) for i, m in zip(ids, messages, strict=True)}
    return _replies(grid, waiting, names, _Clock(timeout_s))


def _replies(grid: Grid, waiting: dict[str, Message], names: Mapping[int, str], clock: _Clock) -> Iterator[Message]:
    for message_id in list(waiting):
        yield _wait(grid, message_id, waiting, names, clock)


class _Clock:
    def __init__(self, timeout_s: float) -> None:
        self.started = time.monotonic()
        self.timeout_s = timeout_s
        self._remind_s = REMIND_S

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def is_over(self) -> bool:
        return self.elapsed_s >= self.timeout_s

    def should_remind(self) -> bool:
        due = self.elapsed_s >= self._remind_s
        self._remind_s += REMIND_S if due else 0.0
        return due


def _wait(grid: Grid, message_id: str, waiting: dict[str, Message], names: Mapping[int, str], clock: _Clock) -> Message:
    """The reply to one message; after the time limit, only what is there already or an error reply of ours."""
    while (reply := _pulled(grid, message_id)) is None and not clock.is_over():
        if clock.should_remind():
            outstanding = ", ".join(names[message.metadata.dst_node_id] for message in waiting.values())
            log(INFO, "waiting since %.0f s, not yet read: %s", clock.elapsed_s, outstanding)
        time.sleep(POLL_S)
    sent = waiting.pop(message_id)
    if reply is None:
        return Message(Error(NO_REPLY, ERRORS[NO_REPLY]), reply_to=sent)
    if reply.has_error():  # of a node that went away the SuperLink answers itself, under a node id of its own
        return Message(reply.error, reply_to=sent)
    if reply.metadata.src_node_id != sent.metadata.dst_node_id:
        return Message(Error(OTHER_SENDER, ERRORS[OTHER_SENDER]), reply_to=sent)
    return reply


def _pulled(grid: Grid, message_id: str) -> Message | None:
    return next((m for m in grid.pull_messages([message_id]) if m.metadata.reply_to_message_id == message_id), None)


def failure(message: Message) -> str:
    """Why a reply holds nothing to work on: an error, or a site's refusal by code; "" where it does."""
    if message.has_error():
        return ERRORS.get(int(message.error.code), f"unknown error (Flower code {int(message.error.code)})")
    if wire.REFUSAL not in message.content:
        return ""
    if wire.REFUSAL_PAYLOAD.violation(message.content):
        return "E-UNKNOWN: the refusal is not one that the protocol declares"
    code = str(message.content[wire.REFUSAL]["code"])
    if code not in wire.CODES:
        log(WARNING, "a site sent a refusal code that this version does not know")
        return "E-UNKNOWN: the refusal code is not known to this version"
    return f"{code}: {wire.CODES[code]}"
