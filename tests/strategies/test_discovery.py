"""Round 0 with a grid that only pretends: waiting, quorum, refused sites, idle nodes, registered names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from federation import wire
from strategies import discovery
from strategies.cards import CardError
from strategies.discovery import QuorumError, collect_table, wait_for_nodes


class Clock:
    """Time that passes only where the code sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    found = Clock()
    monkeypatch.setattr(discovery, "time", found)
    return found


class Nodes:
    """A grid on which nodes come online: ``arrivals`` maps a node id to the second it appears."""

    def __init__(self, clock, arrivals):
        self.clock, self.arrivals = clock, arrivals

    def get_node_ids(self):
        return [node for node, at in self.arrivals.items() if self.clock.now >= at]


def test_expected_sites_are_waited_for(clock):
    grid = Nodes(clock, {3: 0, 1: 10, 2: 40})
    assert wait_for_nodes(grid, expected=3, quorum=2, wait_s=300) == [1, 2, 3]
    assert 40 <= clock.now < 41


def test_without_an_expected_number_the_quorum_is_enough(clock):
    assert wait_for_nodes(Nodes(clock, {5: 0, 4: 0}), expected=0, quorum=2, wait_s=300) == [4, 5]
    assert clock.now == 0


def test_after_the_waiting_time_the_run_goes_on_with_a_quorum_and_says_so(clock, caplog):
    assert wait_for_nodes(Nodes(clock, {1: 0, 2: 5}), expected=4, quorum=2, wait_s=60) == [1, 2]
    assert 60 <= clock.now < 61
    assert "2 of 4 expected sites are online; going on without the others" in caplog.text


def test_too_few_nodes_after_the_waiting_time_end_the_run_naming_the_settings(clock):
    with pytest.raises(
        QuorumError, match=r"1 sites online after 60 s, 2 needed \(federation.min_sites, federation.wait"
    ):
        wait_for_nodes(Nodes(clock, {1: 0}), expected=4, quorum=2, wait_s=60)


def test_waiting_is_said_at_once_and_then_every_half_minute(clock, caplog):
    with caplog.at_level("INFO", logger="flwr"):
        wait_for_nodes(Nodes(clock, {1: 0, 2: 100}), expected=2, quorum=2, wait_s=300)
    said = [record.getMessage() for record in caplog.records if "waiting for sites" in record.getMessage()]
    assert said == ["waiting for sites: 1 online, 2 expected"] * 4  # at 0, 30, 60 and 90 s


# -- the table ----------------------------------------------------------------------------------------------------


def card(site, **changes):
    text = {
        "site": site,
        "labels": ["cat", "dog"],
        "task": "multilabel",
        "schema": "abc",
        "modalities": ["image"],
        "data_sha256": "0" * 64,
    }
    numbers = {"num_train": 10, "num_val": 2, "num_test": 3, "positives": [4, 5], "negatives": [6, 5]}
    for key, value in changes.items():
        (text if key in text else numbers)[key] = value
    return RecordDict({"card": ConfigRecord(text), "metrics": MetricRecord(numbers)})


def refusal(code):
    return RecordDict({"refusal": ConfigRecord({"code": code})})


class Cards:
    """A grid whose nodes answer the profile query with these records, an error for None. ``names``: registered."""

    def __init__(self, answers, names=None):
        self.answers, self.names, self.sent = answers, names or {}, {}

    def get_nodes(self):
        return [SimpleNamespace(node_id=node, name=self.names.get(node, "")) for node in self.answers]

    def push_messages(self, messages):
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{message.metadata.dst_node_id}"
            self.sent[f"m{message.metadata.dst_node_id}"] = message
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids):
        out = []
        for message_id in message_ids:
            message = self.sent[message_id]
            answer = self.answers[message.metadata.dst_node_id]
            out.append(Message(Error(8) if answer is None else answer, reply_to=message))
        return out


def table_of(grid, quorum=2):
    return collect_table(grid, sorted(grid.answers), RecordDict(), wire.profile_payload(), quorum=quorum, timeout_s=5.0)


def test_cards_become_a_table_by_site_name():
    table = table_of(Cards({1: card("south"), 2: card("north")}))
    assert [(found.site, found.node_id) for found in table.cards] == [("north", 2), ("south", 1)]
    assert table.labels == ("cat", "dog") and not table.refused


BAD = {
    "a crash": (None, "the site's app crashed"),
    "a refusal": (refusal("E-DATA"), "E-DATA: the site's data cannot be used"),
    "an undeclared card": (card("west", num_extra=4), "numbers of 'metrics': not declared 'num_extra'"),
    "a card of another kind": (RecordDict(), "records: missing 'card', 'metrics'"),
    "an absurd card": (card("west", num_train=10**9), "expected at most 100000000"),
    "a card with other labels": (card("west", labels=["a", "b"]), "its labels is [a, b], the others have [cat, dog]"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_site_that_cannot_take_part_is_named_and_the_others_go_on(name):
    answer, reason = BAD[name]
    table = table_of(Cards({1: card("north"), 2: card("south"), 3: answer}))
    assert [found.site for found in table.cards] == ["north", "south"]
    ((who, why),) = table.refused.items()
    assert who in ("west", "node 0002") and reason in why


def test_a_node_without_a_site_of_the_partition_is_idle_and_not_refused():
    table = table_of(Cards({1: card("north"), 2: card("south"), 3: refusal("E-EMPTY")}))
    assert len(table.cards) == 2 and not table.refused


def test_a_registered_node_is_called_by_its_name_and_cannot_take_anothers():
    answers = {1: card("north"), 2: card("south"), 3: card("north-2"), 4: None}
    table = table_of(Cards(answers, {1: "north", 3: "south-2", 4: "west"}))
    assert [found.site for found in table.cards] == ["north", "south"]
    assert table.refused == {
        "south-2": "a node registered as 'south-2' calls its site 'north-2'",
        "west": "the site's app crashed",
    }


def test_too_few_sites_that_can_train_end_the_run_with_every_reason():
    answers = {1: card("north"), 2: card("empty", num_train=0, positives=[0, 0], negatives=[0, 0]), 3: None}
    with pytest.raises(QuorumError, match=r"1 sites can train, 2 needed .*; node 0002: the site's app crashed"):
        table_of(Cards(answers))


def test_no_card_at_all_ends_the_run_with_every_reason():
    with pytest.raises(QuorumError, match="no site sent a card: node 0000: the site's app crashed; node 0001: E-DATA"):
        table_of(Cards({1: None, 2: refusal("E-DATA")}))


def test_two_sites_of_one_name_end_the_run():
    with pytest.raises(CardError, match="more than one site is called north"):
        table_of(Cards({1: card("north"), 2: card("north"), 3: card("south")}))
