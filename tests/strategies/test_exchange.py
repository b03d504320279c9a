"""One exchange: fixed order, one reply held at a time, and no site that can stop it."""

from __future__ import annotations

import gc
import weakref

import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from federation import wire
from strategies import exchange as exchange_module
from strategies.exchange import ERRORS, NO_REPLY, OTHER_SENDER, exchange, failure

NAMES = {11: "north", 22: "east", 33: "south"}


class FakeGrid:
    """Answers from ``sites``: node id -> function of the message, giving a reply, a list of them, or None."""

    def __init__(self, sites):
        self.sites = sites
        self.sent = {}
        self.pulls = []
        self.replies = []

    def push_messages(self, messages):
        ids = []
        for number, message in enumerate(messages, 1):
            message.metadata.__dict__["_message_id"] = f"m{number}"
            self.sent[f"m{number}"] = message
            ids.append(f"m{number}")
        return ids

    def pull_messages(self, message_ids):
        self.pulls += message_ids
        found = []
        for message_id in message_ids:
            answer = self.sites[self.sent[message_id].metadata.dst_node_id](self.sent[message_id])
            found += answer if isinstance(answer, list) else [answer] if answer else []
        self.replies += [weakref.ref(reply) for reply in found]
        return found


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    monkeypatch.setattr(exchange_module, "POLL_S", 0.01)


def honest(message):
    return Message(RecordDict({"metrics": MetricRecord({"node": message.metadata.dst_node_id})}), reply_to=message)


def silent(message):
    return None


def failed(code=8, reason="PATIENT-Jane-Doe in /data"):
    return lambda message: Message(Error(code, reason), reply_to=message)


def refusing(code):
    return lambda message: Message(RecordDict({"refusal": ConfigRecord({"code": code})}), reply_to=message)


def messages():
    return [Message(RecordDict(), node, wire.TRAIN, ttl=60.0, group_id="1") for node in NAMES]


def ask(grid, timeout_s=5.0):
    return list(exchange(grid, messages(), NAMES, timeout_s))


def by_site(replies):
    return {NAMES[reply.metadata.src_node_id]: reply for reply in replies}


def test_replies_come_in_the_order_of_site_names_whoever_answers_first():
    replies = ask(FakeGrid(dict.fromkeys(NAMES, honest)))
    assert [NAMES[reply.metadata.src_node_id] for reply in replies] == ["east", "north", "south"]
    assert [reply.content["metrics"]["node"] for reply in replies] == [22, 11, 33]


def test_a_silent_site_is_an_error_reply_after_the_time_limit_and_the_others_are_there():
    grid = FakeGrid({11: silent, 22: honest, 33: honest})
    replies = by_site(ask(grid, timeout_s=0.05))
    assert failure(replies["north"]) == ERRORS[NO_REPLY] == "no reply within the time limit"
    assert failure(replies["east"]) == failure(replies["south"]) == ""


def test_what_is_there_already_is_taken_even_after_the_time_limit():
    replies = by_site(ask(FakeGrid({11: honest, 22: silent, 33: honest}), timeout_s=0.0))
    assert failure(replies["east"]) and not failure(replies["north"]) and not failure(replies["south"])


def test_a_site_that_needs_a_while_is_waited_for():
    calls = []

    def slow(message):
        calls.append(1)
        return honest(message) if len(calls) >= 4 else None

    replies = by_site(ask(FakeGrid({11: slow, 22: honest, 33: honest})))
    assert not failure(replies["north"]) and len(calls) == 4


def test_outstanding_sites_are_named_while_waiting(monkeypatch, caplog):
    monkeypatch.setattr(exchange_module, "REMIND_S", 0.02)
    with caplog.at_level("INFO", logger="flwr"):
        ask(FakeGrid({11: silent, 22: honest, 33: silent}), timeout_s=0.2)
    reminders = [record.getMessage() for record in caplog.records if "not yet read" in record.getMessage()]
    assert reminders and reminders[0].endswith("not yet read: north, south")
    assert len(reminders) < 15  # reminded at intervals, not at every poll


def test_an_error_of_a_node_is_told_in_our_words_not_in_the_nodes():
    replies = by_site(ask(FakeGrid({11: failed(8), 22: failed(2), 33: failed(77)})))
    assert failure(replies["north"]) == "the site's app crashed"
    assert failure(replies["east"]) == "the site's app raised an error"
    assert failure(replies["south"]) == "unknown error (Flower code 77)"
    assert not any("Jane" in failure(reply) for reply in replies.values())


def test_a_refusal_is_told_by_its_code():
    replies = by_site(ask(FakeGrid({11: refusing("E-DATA"), 22: refusing("E-PATIENT-Jane"), 33: honest})))
    assert failure(replies["north"]) == "E-DATA: the site's data cannot be used"
    assert failure(replies["east"]) == "E-UNKNOWN: the refusal code is not known to this version"


@pytest.mark.parametrize(
    "record", [ConfigRecord({"code": ["E-DATA"], "more": "x"}), ConfigRecord({}), MetricRecord({"code": 1})]
)
def test_a_refusal_that_is_not_declared_so_is_unknown(record):
    (message, *_) = messages()
    message.metadata.__dict__["_message_id"] = "m1"
    reply = Message(RecordDict({"refusal": record}), reply_to=message)
    assert failure(reply).startswith("E-UNKNOWN")


def test_a_refusal_beside_other_records_is_no_way_around_the_gate():
    (message, *_) = messages()
    message.metadata.__dict__["_message_id"] = "m1"
    records = {"refusal": ConfigRecord({"code": "E-DATA"}), "module.model": wire.encode({})}
    assert failure(Message(RecordDict(records), reply_to=message)).startswith("E-UNKNOWN")


def test_a_reply_from_another_node_is_not_taken_for_the_sites():
    def forged(message):
        reply = honest(message)
        reply.metadata.__dict__["_src_node_id"] = 33
        return reply

    replies = ask(FakeGrid({11: forged, 22: honest, 33: honest}))
    north = replies[1]
    assert failure(north) == ERRORS[OTHER_SENDER]
    assert NAMES[north.metadata.src_node_id] == "north"  # accounted to whom the message went


def test_what_the_superlink_says_of_a_node_that_went_away_is_the_sites_failure():
    """It answers under a node id of its own; the site is missing, nobody has forged anything."""

    def gone(message):
        reply = Message(Error(NO_REPLY, "node unavailable"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = 1
        return reply

    north = ask(FakeGrid({11: gone, 22: honest, 33: honest}))[1]
    assert NAMES[north.metadata.src_node_id] == "north" and failure(north) == ERRORS[NO_REPLY]


def test_a_reply_to_another_message_is_not_taken():
    def misplaced(message):
        reply = honest(message)
        reply.metadata.__dict__["_reply_to_message_id"] = "m99"
        return reply

    replies = by_site(ask(FakeGrid({11: misplaced, 22: honest, 33: honest}), timeout_s=0.05))
    assert failure(replies["north"]) == ERRORS[NO_REPLY]


def test_a_reply_sent_twice_is_given_once():
    replies = ask(FakeGrid({11: lambda message: [honest(message), honest(message)], 22: honest, 33: honest}))
    assert len(replies) == 3


def test_one_reply_is_held_at_a_time_and_pulled_when_asked_for():
    grid = FakeGrid(dict.fromkeys(NAMES, honest))
    stream = exchange(grid, messages(), NAMES, 5.0)
    assert grid.pulls == []
    for number in (1, 2, 3):
        reply = next(stream)
        assert len(grid.pulls) == number
        del reply
        gc.collect()
        assert sum(ref() is not None for ref in grid.replies) == 0


def test_an_exchange_with_nobody_is_empty():
    assert list(exchange(FakeGrid({}), [], {}, 1.0)) == []
