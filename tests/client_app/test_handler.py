"""Whatever happens inside a site, only a declared reply or a code leaves it; the story stays in the site's log."""

from __future__ import annotations

import json
import logging
import sys
import warnings

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.supercore.task_identity import TaskIdentity

import client_app.app
import client_app.fedavg
import client_app.incongruent
from client_app import handler
from client_app.egress import EgressError, verify
from client_app.site import IdleNode
from client_app.training import Diverged, Update, network_for
from datasets.records import DataError
from federation import wire
from federation.settings import Settings, SettingsError
from federation.wire import WireError

PATIENT = "PATIENT-Jane-Doe"
PLACE = "/mnt/pacs/1953-04-01/scan.dcm"
SECRET = f"cannot read {PLACE} of {PATIENT}"
INCONGRUENT = {"method": "incongruent"}


@pytest.fixture
def ask(hospital):
    """``ask(action)``: the reply of the hospital's handler, and its serialised bytes."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

    def send(action=wire.TRAIN, *, evaluate="", experiment="exp-1", run_config=(), node_config=None, entry=None):
        run_config = {**hospital.run_config, **dict(run_config)}
        config = {"server_round": 1, "experiment": experiment, "last_accepted": 0, "evaluate": evaluate}
        content = RecordDict({wire.CONFIG: ConfigRecord(config)})
        if action != wire.PROFILE:
            network = network_for(("cat", "dog"), Settings.from_run_config(hospital.run_config))
            content["module.model"] = wire.encode(network.state_dict())
        message = Message(content, 1, action, ttl=60.0, group_id="1")
        context = Context(1, 1, node_config or hospital.node_config, RecordDict(), run_config)
        reply = (entry or handler.answer)(message, context)
        return reply, message_to_proto(reply).SerializeToString()

    return send


def log_of(hospital):
    for logger in list(logging.Logger.manager.loggerDict):
        for found in getattr(logging.getLogger(logger), "handlers", []):
            found.flush()
    return (hospital.state / "exp-1" / "site.log").read_text()


def ledger_of(hospital):
    path = hospital.state / "exp-1" / "egress.jsonl"
    assert verify(path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def code(reply):
    assert not reply.has_error()
    assert set(reply.content) == {wire.REFUSAL} and set(reply.content[wire.REFUSAL]) == {"code"}
    return reply.content[wire.REFUSAL]["code"]


def chained():
    try:
        raise KeyError(SECRET)
    except KeyError as error:
        raise RuntimeError(f"while looking at {SECRET}") from error


class Unprintable(Exception):
    """An exception that fails again where it is logged."""

    def __str__(self):
        raise ValueError(SECRET)


def raising(error):
    def train(*_):
        raise error

    return train


FAILURES = {
    "data": (raising(DataError(SECRET)), "E-DATA"),
    "a missing file": (raising(FileNotFoundError(2, SECRET, PLACE)), "E-DATA"),
    "a full disk": (raising(OSError(28, SECRET)), "E-DATA"),
    "settings": (raising(SettingsError([SECRET])), "E-SETTINGS"),
    "egress": (raising(EgressError(SECRET)), "E-EGRESS"),
    "divergence": (raising(Diverged(SECRET)), "E-DIVERGED"),
    "wire": (raising(WireError(SECRET)), "E-MISMATCH"),
    "memory": (raising(MemoryError(SECRET)), "E-MEMORY"),
    "GPU memory": (raising(torch.OutOfMemoryError(SECRET)), "E-MEMORY"),
    "an idle node": (raising(IdleNode(SECRET)), "E-EMPTY"),
    "a key": (raising(KeyError(SECRET)), "E-INTERNAL"),
    "a value": (raising(ValueError(SECRET)), "E-INTERNAL"),
    "torch": (raising(RuntimeError(SECRET)), "E-INTERNAL"),
    "a division": (raising(ZeroDivisionError(SECRET)), "E-INTERNAL"),
    "text": (raising(UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET)), "E-INTERNAL"),
    "a chain of causes": (lambda *_: chained(), "E-INTERNAL"),
    "several at once": (raising(ExceptionGroup(SECRET, [ValueError(SECRET)])), "E-INTERNAL"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_leaves_as_a_code_and_its_story_stays_in_the_log(ask, hospital, monkeypatch, capfd, name):
    train, expected = FAILURES[name]
    monkeypatch.setattr(client_app.fedavg, "train", train)
    reply, data = ask()
    assert code(reply) == expected
    assert PATIENT.encode() not in data and b"pacs" not in data and b"Traceback" not in data
    printed = capfd.readouterr()
    assert PATIENT not in printed.out + printed.err
    log = log_of(hospital)
    assert PATIENT in log and "Traceback" in log and expected in log
    (line,) = ledger_of(hospital)
    assert line["records"] == {"refusal": {"code": "str"}} and line["purpose"] == wire.REFUSAL_PAYLOAD.purpose
    assert PATIENT not in json.dumps(line)


def test_every_code_that_a_site_can_send_is_declared():
    assert {found for _, found in handler.FAILURES} <= set(wire.CODES)


def test_an_exception_that_cannot_be_printed_still_leaves_as_a_code(ask, monkeypatch, capfd):
    monkeypatch.setattr(client_app.fedavg, "train", raising(Unprintable()))
    reply, data = ask()
    assert code(reply) == "E-INTERNAL" and PATIENT.encode() not in data
    printed = capfd.readouterr()
    assert PATIENT not in printed.out + printed.err


def test_a_log_that_cannot_be_written_prints_nothing_either(ask, hospital, monkeypatch, capfd):
    def full(*_):
        raise OSError(28, SECRET)

    monkeypatch.setattr(client_app.fedavg, "train", raising(ValueError(SECRET)))
    with monkeypatch.context() as broken:
        broken.setattr(logging.FileHandler, "flush", full)
        reply, _ = ask()
    assert code(reply) == "E-INTERNAL"
    assert len(ledger_of(hospital)) == 1
    printed = capfd.readouterr()
    assert PATIENT not in printed.out + printed.err


@pytest.mark.parametrize("fails", [False, True])
def test_prints_and_warnings_stay_in_the_log_whether_or_not_training_fails(
    ask, hospital, monkeypatch, capfd, recwarn, fails
):
    honest = client_app.fedavg.train

    def train(site, modules, job):
        print("loading", SECRET)
        print("progress of", PATIENT, file=sys.stderr)
        warnings.warn(f"low contrast in {SECRET}", stacklevel=1)
        if fails:
            raise DataError("no more")
        return honest(site, modules, job)

    monkeypatch.setattr(client_app.fedavg, "train", train)
    reply, data = ask()
    assert (wire.REFUSAL in reply.content) is fails
    assert PATIENT.encode() not in data
    printed = capfd.readouterr()
    assert PATIENT not in printed.out + printed.err
    assert not [warning for warning in recwarn if PATIENT in str(warning.message)]
    log = log_of(hospital)
    assert (
        f"loading {SECRET}" in log
        and f"progress of {PATIENT}" in log
        and f"UserWarning: low contrast in {SECRET}" in log
    )


def test_the_story_of_a_missing_data_folder_stays_at_the_site(ask, hospital):
    node_config = {**hospital.node_config, "data-root": f"/nowhere/{PATIENT}"}
    reply, data = ask(wire.PROFILE, node_config=node_config)
    assert code(reply) == "E-DATA" and PATIENT.encode() not in data
    assert PATIENT in log_of(hospital)


def test_a_run_config_that_is_not_valid_here_leaves_as_a_code(ask):
    reply, data = ask(run_config={"training.lr": SECRET})
    assert code(reply) == "E-SETTINGS" and PATIENT.encode() not in data


@pytest.mark.parametrize("experiment", ["../evil", "..", "a/b", "", "x" * 200, "a\0b"])
def test_an_experiment_that_is_no_plain_name_makes_no_folder(ask, hospital, tmp_path, experiment):
    before = sorted(tmp_path.rglob("*"))
    reply, _ = ask(experiment=experiment)
    assert code(reply) == "E-INTERNAL"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_cuda_device_that_is_absent_is_a_matter_of_settings(ask, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reply, _ = ask(run_config={"training.device": "cuda"})
    assert code(reply) == "E-SETTINGS"


def test_an_undeclared_result_of_a_method_does_not_leave(ask, hospital, monkeypatch):
    leak = {"model": {}, "images": {"scan": torch.zeros(8, 8)}}
    monkeypatch.setattr(client_app.fedavg, "train", lambda *_: Update(leak, 9, 1.0, 1))
    reply, _ = ask()
    assert code(reply) == "E-EGRESS"
    assert "not declared 'module.images'" in log_of(hospital)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_result_that_is_not_finite_does_not_leave(ask, monkeypatch, value):
    honest = client_app.fedavg.train

    def train(site, modules, job):
        update = honest(site, modules, job)
        update.modules["model"]["head.weight"][0, 0] = value
        return update

    monkeypatch.setattr(client_app.fedavg, "train", train)
    assert code(ask()[0]) == "E-EGRESS"


def test_an_honest_reply_holds_what_is_declared_and_its_line_says_so(ask, hospital):
    reply, _ = ask(evaluate="val")
    assert set(reply.content) == {"metrics", "module.model", "scores.val", "loss.val"}
    assert reply.content["metrics"]["num_examples"] == 9 and reply.content["metrics"]["server_round"] == 1
    (line,) = ledger_of(hospital)
    assert line["action"] == "train" and line["round"] == 1
    assert line["payload_sha256"] == wire.content_sha256(reply.content)


def test_a_small_count_on_the_card_is_suppressed_where_asked(ask):
    shown = ask(wire.PROFILE)[0].content["metrics"]
    assert list(shown["positives"]) == [4, 4] and list(shown["negatives"]) == [5, 5]
    hidden = ask(wire.PROFILE, run_config={"privacy.min_cell": 5})[0].content["metrics"]
    assert list(hidden["positives"]) == list(hidden["negatives"]) == [-1, -1]


@pytest.mark.parametrize(("half", "names"), [(client_app.fedavg, {}), (client_app.incongruent, INCONGRUENT)])
def test_no_field_of_the_card_tells_a_suppressed_count(opened, half, names):
    """Every number of cats from none to all nine: a card that suppresses it is the same for several of them."""
    site, job = opened(privacy__min_cell=4, **names)
    targets, cards = site.data.splits["train"].targets, {}
    for positives in range(10):
        targets[:, 0] = np.arange(9) < positives
        content = handler.profile(site, job.settings, half)
        said = {name: dict(content[name]) for name in (wire.METRICS, wire.EXTRA) if name in content}
        assert (said[wire.METRICS]["positives"][0] == -1) is (positives in (1, 2, 3, 6, 7, 8))
        cards.setdefault(json.dumps(said, sort_keys=True), []).append(positives)
    assert sorted(cards.values()) == [[0], [1, 2, 3, 6, 7, 8], [4], [5], [9]]


def test_the_last_fence_turns_any_failure_into_a_code(ask, monkeypatch):
    def broken(*_):
        raise RuntimeError(SECRET)

    monkeypatch.setattr(handler, "answer", broken)
    reply, data = ask(entry=client_app.app._answer)
    assert code(reply) == "E-INTERNAL" and PATIENT.encode() not in data
