"""A site in a run with a secure sum: what it answers from message to message, and what it does not answer at all."""

from __future__ import annotations

import json

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from client_app import fedavg, fednca, secure_round
from client_app.app import app
from client_app.training import Update, network_for
from federation import secure_roster as protocol
from federation import wire
from federation.settings import Settings


@pytest.fixture
def ask(hospital):
    """``ask(action)``: the records that the hospital ``north`` answers with, through the real ClientApp."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

    def send(action, *, secure=True, request=()):
        run_config = {**hospital.run_config, "privacy.secure_sum": secure}
        config = {"server_round": 1, "experiment": "exp-1", "last_accepted": 0, "evaluate": ""}
        content = RecordDict({wire.CONFIG: ConfigRecord(config), **dict(request)})
        if action in (wire.TRAIN, wire.EVALUATE, protocol.ASK_MASKED):
            network = network_for(("cat", "dog"), Settings.from_run_config(hospital.run_config))
            content["module.model"] = wire.encode(network.state_dict())
        context = Context(1, 1, hospital.node_config, RecordDict(), run_config)
        return app(Message(content, 1, action, ttl=60.0, group_id="1"), context).content

    return send


def secrets_of(hospital):
    return sorted(path.name for path in (hospital.state / "exp-1").glob("secure_sum/*"))


def test_keys_are_answered_and_kept_for_the_next_message(ask, hospital):
    found = ask(protocol.ASK_KEYS)
    assert protocol.keys_payload().violation(found) is None
    assert secrets_of(hospital) == ["000001-keys.json"]
    again = ask(protocol.ASK_KEYS)
    assert wire.content_sha256(again) != wire.content_sha256(found), "every request begins anew"
    lines = [json.loads(line) for line in (hospital.state / "exp-1" / "egress.jsonl").read_text().splitlines()]
    assert [line["action"] for line in lines] == [protocol.ASK_KEYS] * 2


def test_a_new_run_begins_without_an_earlier_ones_secrets(ask, hospital):
    ask(protocol.ASK_KEYS)
    ask(wire.PROFILE)
    assert secrets_of(hospital) == []


@pytest.mark.parametrize("action", [protocol.ASK_SHARES, protocol.ASK_MASKED, protocol.ASK_UNMASK])
def test_a_message_out_of_turn_is_refused_before_any_training(ask, hospital, monkeypatch, action):
    monkeypatch.setattr(fedavg, "train", lambda *_: pytest.fail("trained"))
    assert ask(action)[wire.REFUSAL]["code"] == "E-MISMATCH"
    ask(protocol.ASK_KEYS)
    if action != protocol.ASK_SHARES:
        assert ask(action)[wire.REFUSAL]["code"] == "E-MISMATCH"
        assert secrets_of(hospital) == ["000001-keys.json"]


def test_a_roster_that_does_not_fit_ends_the_round_here(ask, hospital):
    ask(protocol.ASK_KEYS)
    assert ask(protocol.ASK_SHARES, request={protocol.COHORTS: ConfigRecord({})})[wire.REFUSAL]["code"] == "E-MISMATCH"
    assert secrets_of(hospital) == []


def test_no_plain_update_leaves_a_run_with_a_secure_sum(ask, monkeypatch):
    assert "module.model" in ask(wire.TRAIN, secure=False)
    assert wire.REFUSAL not in ask(wire.EVALUATE)
    monkeypatch.setattr(fedavg, "train", lambda *_: pytest.fail("trained"))
    assert ask(wire.TRAIN)[wire.REFUSAL]["code"] == "E-MISMATCH"


@pytest.mark.parametrize("action", sorted(protocol.ACTIONS))
def test_a_run_without_a_secure_sum_answers_none_of_its_messages(ask, hospital, action):
    assert ask(action, secure=False)[wire.REFUSAL]["code"] == "E-MISMATCH"
    assert secrets_of(hospital) == []


UPDATE = Update({"body": {}, "head": {}}, 37, 1.0, 2)


def test_weights_are_the_servers_as_whole_numbers(opened):
    assert secure_round.example_weights(UPDATE, opened()[1]) == {"body": 37, "head": 37}
    equal = opened(federation__weighting="equal")[1]
    assert secure_round.example_weights(UPDATE, equal) == {"body": 1, "head": 1}


@pytest.mark.parametrize(
    ("aggregation", "weighting", "weight"),
    [("equal", "num_examples", 1), ("num_examples", "num_examples", 37), ("num_examples", "equal", 1)],
)
def test_weights_of_fednca_follow_its_own_switch(opened, aggregation, weighting, weight):
    adam = {"training__optimizer": "adamw", "training__lr": 0.001}
    job = opened(method="fednca", fednca__aggregation=aggregation, federation__weighting=weighting, **adam)[1]
    assert fednca.weights(UPDATE, job) == {"model": weight}
