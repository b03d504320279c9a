"""A hospital's own limits: what they refuse leaves as a code, what they are stays in the site's log."""

from __future__ import annotations

import sys
from datetime import datetime, time

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from client_app import handler
from client_app.egress import Ledger, verify
from client_app.training import network_for
from federation import wire
from federation.limits import LimitError, Limits, MethodRefused, OutOfHours, UploadTooLarge, is_within, parse_limits
from federation.settings import Settings

NOON = datetime(2026, 6, 1, 12, 0).astimezone()


@pytest.fixture
def ask(hospital):
    """``ask(action, server_round, **limits)``: the reply of a hospital whose node config has these limits."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

    def send(action=wire.TRAIN, server_round=1, *, method="fedavg", **node_config):
        run_config = {**hospital.run_config, "method": method}
        config = {"server_round": server_round, "experiment": "exp-1", "last_accepted": 0, "evaluate": ""}
        content = RecordDict({wire.CONFIG: ConfigRecord(config)})
        if action == wire.TRAIN:
            network = network_for(("cat", "dog"), Settings.from_run_config(hospital.run_config))
            content["module.model"] = wire.encode(network.state_dict())
        message = Message(content, 1, action, ttl=60.0, group_id="1")
        reply = handler.answer(
            message, Context(1, 1, {**hospital.node_config, **node_config}, RecordDict(), run_config)
        )
        return reply.content[wire.REFUSAL]["code"] if wire.REFUSAL in reply.content else reply.content

    return send


def log_of(hospital):
    return (hospital.state / "exp-1" / "site.log").read_text()


def at(monkeypatch, hour, minute=0):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 6, 1, hour, minute)

    monkeypatch.setattr(handler, "datetime", Clock)


# -- the rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "inside"),
    [("18:00", True), ("23:59", True), ("00:00", True), ("05:59", True), ("06:00", False), ("12:00", False)],
)
def test_hours_may_span_midnight(now, inside):
    assert is_within(time.fromisoformat(now), time(18), time(6)) is inside
    assert is_within(time.fromisoformat(now), time(6), time(18)) is not inside


def test_a_node_config_without_limits_limits_nothing():
    found = parse_limits({"site": "north", "data-root": "/data", "state-dir": "/state", "consents": "a"})
    assert found == Limits()
    found.check("anything", NOON)
    found.check_upload(10**12, 10**12, 1)


def test_limits_are_read_with_either_spelling():
    expected = Limits(frozenset({"fedavg", "fednca"}), (time(18), time(6, 30)), 1_500_000)
    for mark in "-_":
        keys = ("allowed_methods", "allowed_hours", "max_upload_mb")
        values = ("fedavg, fednca,", "18:00-06:30", 1.5)
        assert parse_limits({key.replace("_", mark): v for key, v in zip(keys, values, strict=True)}) == expected


@pytest.mark.parametrize(
    "config",
    [
        {"allowed_hours": "18-6"},
        {"allowed_hours": "18:00-24:00"},
        {"allowed_hours": "06:00-06:00"},
        {"max_upload_mb": "much"},
        {"max_upload_mb": -1},
        {"max_upload_mb": float("nan")},
        {"max_upload_mb": True},
        {"allowed_method": "fedavg"},
        {"max-upload": 3},
    ],
    ids=str,
)
def test_a_limit_that_cannot_be_read_refuses_everything(ask, hospital, config):
    with pytest.raises(LimitError):
        parse_limits(config)
    assert ask(wire.PROFILE, **config) == "E-LIMITS"
    assert next(iter(config)).replace("-", "_") in log_of(hospital)


def test_a_method_and_an_hour_that_are_not_allowed():
    with pytest.raises(MethodRefused, match="allowed_methods = fednca"):
        Limits(methods=frozenset({"fednca"})).check("fedavg", NOON)
    with pytest.raises(OutOfHours, match="at 12:00, allowed_hours = 18:00-06:00"):
        Limits(hours=(time(18), time(6))).check("fedavg", NOON)


def test_an_upload_is_weighed_to_the_byte():
    Limits(max_upload_bytes=100).check_upload(60, 40, 1)
    with pytest.raises(UploadTooLarge):
        Limits(max_upload_bytes=100).check_upload(60, 41, 1)


# -- at the site ------------------------------------------------------------------------------------------------------


def test_a_refused_method_leaves_as_a_code_and_its_code_is_never_imported(ask, hospital):
    assert ask(allowed_methods="fednca") == "E-METHOD"
    assert ask(wire.PROFILE, allowed_methods="fednca,fedprox") == "E-METHOD"
    assert ask(method="antigravity_method:Name", allowed_methods="fedavg") == "E-METHOD"
    assert "antigravity_method" not in sys.modules
    assert "not among allowed_methods = fednca" in log_of(hospital)
    assert wire.METRICS in ask(allowed_methods="fedavg")


def test_outside_its_hours_a_site_says_so_and_reads_no_data(ask, hospital, monkeypatch):
    at(monkeypatch, 12)
    monkeypatch.setattr(handler, "open_site", lambda *_: pytest.fail("the data were opened"))
    assert ask(allowed_hours="18:00-06:00") == "E-HOURS"
    assert "a message at 12:00, allowed_hours = 18:00-06:00" in log_of(hospital)
    monkeypatch.undo()
    at(monkeypatch, 23, 30)
    assert wire.METRICS in ask(allowed_hours="18:00-06:00")


def test_a_round_sends_no_more_than_allowed_over_all_its_replies(ask, hospital):
    size = wire.size_bytes(ask())
    path = hospital.state / "exp-1" / "egress.jsonl"
    assert Ledger(path).sent_bytes(1) == size and Ledger(path).sent_bytes(2) == 0
    for room, expected in ((0.5, "E-UPLOAD"), (1.0, "sent"), (1.5, "E-UPLOAD")):
        found = ask(server_round=2, max_upload_mb=room * size / 1e6)
        assert found == expected or (expected == "sent" and wire.METRICS in found)
    assert wire.METRICS in ask(server_round=3, max_upload_mb=size / 1e6)
    assert "MB more exceed max_upload_mb" in log_of(hospital)
    assert verify(path) and Ledger(path).sent_bytes(2) == size


def test_the_profile_and_refusals_are_no_upload(ask):
    assert wire.CARD in ask(wire.PROFILE, max_upload_mb=0.000001)
    assert ask(max_upload_mb=0.000001) == "E-UPLOAD"


def test_every_limit_has_its_code_and_the_most_special_one_is_found_first():
    order = [kind for kind, _ in handler.FAILURES]
    kinds = [LimitError, *LimitError.__subclasses__()]
    assert set(kinds) <= set(order) and order.index(LimitError) == max(map(order.index, kinds))
    assert {code for kind, code in handler.FAILURES if kind in kinds} <= set(wire.CODES)
