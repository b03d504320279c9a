"""The one door out of a site: what is not declared stays, and whoever edits the ledger is found out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from client_app.egress import GENESIS, EgressError, Ledger, main, release, verify
from federation import wire
from federation.wire import TensorSpec

PAYLOAD = wire.train_payload({"model": {"w": TensorSpec((2, 2), "float32"), "n": TensorSpec((), "int64")}})


def reply(**changes):
    arrays = {"w": np.ones((2, 2), np.float32), "n": np.array(4)} | changes.pop("arrays", {})
    numbers = {"server_round": 1, "num_examples": 8, "loss_sum": 2.5, "num_steps": 3} | changes
    return RecordDict({"module.model": wire.encode(arrays), "metrics": MetricRecord(numbers)})


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "egress.jsonl")


def send(ledger, server_round=1):
    return release(reply(server_round=server_round), PAYLOAD, ledger, server_round=server_round, action="train")


@pytest.fixture
def five(ledger):
    """A whole ledger of five replies; each test edits its file."""
    for server_round in range(1, 6):
        send(ledger, server_round)
    return ledger


def lines(ledger):
    return ledger.path.read_text().splitlines(keepends=True)


# -- the gate -------------------------------------------------------------------------------------------


def test_a_declared_reply_leaves_unchanged_and_has_its_line(ledger):
    content = reply()
    before = wire.content_sha256(content)
    assert release(content, PAYLOAD, ledger, server_round=1, action="train") is content
    assert wire.content_sha256(content) == before
    (line,) = map(json.loads, lines(ledger))
    assert line["round"] == 1 and line["action"] == "train" and line["purpose"] == PAYLOAD.purpose
    assert line["records"]["module.model"] == {"n": "int64[]", "w": "float32[2, 2]"}
    assert line["records"]["metrics"]["loss_sum"] == "float"  # its kind, not its value
    assert line["bytes"] == wire.size_bytes(content) and line["payload_sha256"] == before
    assert line["line"] == 1 and line["previous"] == GENESIS


def with_record(**records):
    content = reply()
    for name, record in records.items():
        content[name] = record
    return content


REFUSED = {
    "an extra record": (lambda: with_record(notes=ConfigRecord({"report": "lungs clear"})), "not declared 'notes'"),
    "an extra tensor": (lambda: reply(arrays={"images": np.zeros((4, 8, 8), np.uint8)}), "not declared 'images'"),
    "an extra number": (lambda: reply(patient=17), "not declared 'patient'"),
    "another shape": (lambda: reply(arrays={"w": np.ones((2, 3), np.float32)}), "expected float32[2, 2]"),
    "another dtype": (lambda: reply(arrays={"w": np.ones((2, 2))}), "is float64[2, 2]"),
    "a NaN": (lambda: reply(arrays={"w": np.float32([[1, np.nan], [1, 1]])}), "module.model/w is not finite"),
    "an infinity": (lambda: reply(arrays={"w": np.float32([[1, np.inf], [1, 1]])}), "module.model/w is not finite"),
    "a NaN loss": (lambda: reply(loss_sum=float("nan")), "loss_sum: found nan"),
    "a missing record": (lambda: RecordDict({"metrics": reply()["metrics"]}), "missing 'module.model'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_declared_does_not_leave_and_writes_no_line(ledger, name):
    make, reason = REFUSED[name]
    with pytest.raises(EgressError, match=r"the reply to train may not leave: ") as caught:
        release(make(), PAYLOAD, ledger, server_round=1, action="train")
    assert reason in str(caught.value)
    assert not ledger.path.exists() and not ledger.head.exists()


def test_large_but_finite_values_may_leave(ledger):
    # their squares overflow float32; the norm is taken in float64, so only what is not finite is held back
    content = reply(arrays={"w": np.full((2, 2), 1e38, np.float32)})
    assert release(content, PAYLOAD, ledger, server_round=1, action="train") is content


def test_the_line_is_on_disk_before_the_reply_leaves(ledger, monkeypatch):
    def crash(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="no space"):
        send(ledger)


# -- the chain ------------------------------------------------------------------------------------------


def test_every_line_follows_from_the_one_before(five):
    entries = [json.loads(line) for line in lines(five)]
    assert [entry["line"] for entry in entries] == [1, 2, 3, 4, 5]
    assert [entry["previous"] for entry in entries] == [GENESIS, *(entry["sha256"] for entry in entries[:-1])]
    outcome = verify(five.path)
    assert outcome and outcome.entries == 5 and outcome.last_sha256 == entries[-1]["sha256"]
    assert str(outcome) == "5 entries, unbroken"


def test_a_ledger_that_does_not_exist_yet_is_whole_and_empty(tmp_path):
    outcome = verify(tmp_path / "egress.jsonl")
    assert outcome and outcome.entries == 0


def changed(rows):
    rows[2] = rows[2].replace('"bytes": ', '"bytes": 1')
    return rows


def rehashed(rows):
    """Line 3 changed by someone who knows how its own hash is made."""
    from client_app.egress import _line_sha256

    entry = json.loads(rows[2]) | {"bytes": 0}
    rows[2] = json.dumps(entry | {"sha256": _line_sha256(entry)}) + "\n"
    return rows


TAMPERED = {
    "content changed": (changed, 3, "its content was changed"),
    "content changed and hashed again": (rehashed, 4, "does not follow the line before"),
    "removed": (lambda rows: rows[:2] + rows[3:], 3, "does not follow the line before"),
    "first removed": (lambda rows: rows[1:], 1, "does not follow the line before"),
    "added": (lambda rows: [*rows[:3], rows[1], *rows[3:]], 4, "does not follow the line before"),
    "swapped": (lambda rows: [rows[0], rows[2], rows[1], *rows[3:]], 2, "does not follow the line before"),
    "last cut off": (lambda rows: rows[:-1], 5, "5 entries were written (the end was cut off)"),
    "last two cut off": (lambda rows: rows[:-2], 4, "5 entries were written (the end was cut off)"),
    "all cut off": (lambda rows: [], 1, "5 entries were written"),
    "half a line": (lambda rows: [*rows[:4], rows[4][:50]], 5, "cannot be read as an entry"),
    "no JSON": (lambda rows: [*rows[:1], "hello\n", *rows[2:]], 2, "cannot be read as an entry"),
    "a JSON list": (lambda rows: [*rows[:1], "[1, 2]\n", *rows[2:]], 2, "cannot be read as an entry"),
    "a blank line": (lambda rows: [*rows[:3], "\n", *rows[3:]], 4, "cannot be read as an entry"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_verify_names_the_first_bad_line_and_what_is_wrong_with_it(five, name):
    tamper, line, reason = TAMPERED[name]
    five.path.write_text("".join(tamper(lines(five))))
    outcome = verify(five.path)
    assert not outcome and outcome.line == line and reason in outcome.reason
    assert str(outcome).startswith(f"line {line}: ")


def test_a_replaced_end_is_noticed(five, tmp_path):
    other = Ledger(tmp_path / "other.jsonl")
    for server_round in (1, 2, 3, 4, 9):
        send(other, server_round)
    five.path.write_bytes(other.path.read_bytes())
    outcome = verify(five.path)
    assert not outcome and outcome.line == 5 and "the end was replaced" in outcome.reason


def test_a_lost_head_is_noticed(five):
    five.head.unlink()
    outcome = verify(five.path)
    assert not outcome and "head file is gone" in outcome.reason


@pytest.mark.parametrize("text", ["", "no json", "[]", "{}", '{"entries": "five", "sha256": 1}'])
def test_a_damaged_head_is_noticed_and_not_a_traceback(five, text):
    five.head.write_text(text)
    outcome = verify(five.path)
    assert not outcome and "head file" in outcome.reason
    with pytest.raises(EgressError, match="the ledger is damaged"):
        send(five, 6)


def test_unusual_line_separators_in_a_purpose_do_not_break_a_line(ledger):
    ledger.append({"purpose": "one\u2028two\x85three\x0bfour"})
    ledger.append({"purpose": "next"})
    assert verify(ledger.path) and verify(ledger.path).entries == 2


# -- crashes --------------------------------------------------------------------------------------------


def test_a_line_torn_by_a_crash_is_cut_off_by_the_next_reply(five):
    whole = five.path.read_bytes()
    for kept in (1, 40, len(lines(five)[0]) - 1):
        five.path.write_bytes(whole + whole[:kept])
        assert verify(five.path).line == 6
        send(five, 6)
        assert verify(five.path) and verify(five.path).entries == 6
        five.path.write_bytes(whole)
        five.head.write_text(json.dumps({"entries": 5, "sha256": json.loads(lines(five)[-1])["sha256"]}))


def test_a_crash_between_the_line_and_the_head_is_no_damage(five):
    head = five.head.read_bytes()
    send(five, 6)
    five.head.write_bytes(head)  # as if the process had died before it wrote the head
    assert verify(five.path) and verify(five.path).entries == 6
    send(five, 7)
    assert verify(five.path) and verify(five.path).entries == 7


def test_nothing_leaves_while_the_end_of_the_ledger_is_damaged(five):
    five.path.write_text("".join([*lines(five)[:4], lines(five)[4].replace('"round": 5', '"round": 6')]))
    before = five.path.read_bytes()
    with pytest.raises(EgressError, match="nothing leaves until it is looked at: line 5: its content was changed"):
        send(five, 6)
    assert five.path.read_bytes() == before


def test_nothing_leaves_after_the_end_was_cut_off(five):
    five.path.write_text("".join(lines(five)[:3]))
    with pytest.raises(EgressError, match="the end was cut off"):
        send(five, 6)


@pytest.mark.parametrize("how", ["deleted", "emptied"])
def test_a_ledger_that_was_removed_is_not_begun_anew(five, how):
    five.path.unlink()
    if how == "emptied":
        five.path.touch()
    with pytest.raises(EgressError, match="5 entries were written"):
        send(five, 6)


def test_only_the_owner_can_read_a_ledger(five):
    assert five.path.stat().st_mode & 0o777 == 0o600 and five.head.stat().st_mode & 0o777 == 0o600


# -- the command ----------------------------------------------------------------------------------------


def test_command_says_0_for_whole_1_for_damaged_2_for_no_file(five, tmp_path, capsys):
    assert main(["verify", str(five.path)]) == 0
    assert "5 entries, unbroken" in capsys.readouterr().out
    five.path.write_text("".join(changed(lines(five))))
    assert main(["verify", str(five.path)]) == 1
    assert "line 3: its content was changed" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "nothing.jsonl")]) == 2


def test_command_runs_as_a_module(five):
    root = Path(__file__).parents[2]
    five.path.write_text("".join(lines(five)[:-1]))
    done = subprocess.run(
        [sys.executable, "-m", "client_app.egress", "verify", str(five.path)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "line 5: " in done.stdout
