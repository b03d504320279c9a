"""Replies that a site with a valid key could send to break or to steer a run.

Each one must be refused as a whole: named with its reason in the log, the run folder and the report, the round saved,
and every bit of the state as if the site had been silent. The site that sends them trains before it lies, so its own
state files have moved on, and it is honest again afterwards: a leftover anywhere would show in the last round.
"""

from __future__ import annotations

import html
import re
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from federation import wire
from strategies.cards import CardError
from tests.faults.drills import (
    BAD,
    SITES,
    in_rounds,
    lines_of,
    run,
    run_json,
    server_log,
    settings,
    silent,
    state_sha256,
)
from tests.faults.drills import write_data as write
from tests.faults.hostile import (
    DECLARED,
    MODULE,
    SCORES,
    Edit,
    bent,
    big_endian,
    config_for_numbers,
    declared_dtype,
    drop_record,
    everywhere,
    extra,
    header,
    many_extra,
    numbers,
    raw,
    record,
    set_first,
    values,
)

LIMIT = 500
"""Characters of a reason: what a site sends is quoted, never poured, into the logs of the others."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("hostile") / "data.npz")


INVENTED = {
    "-Inf tensor": (values(set_first(-np.inf)), "no finite norm"),
    "1e10 tensor": (values(everywhere(1e10)), "norm is"),
    "integers for floats": (values(lambda a: a.astype(np.int32)), r"is int32\["),
    "half precision": (values(lambda a: a.astype(np.float16)), r"is float16\["),
    "scalar tensor": (values(lambda a: np.float32(0.0).reshape(())), r"expected float32\["),
    "empty tensor": (values(lambda a: np.zeros((0, 1), np.float32)), r"expected float32\["),
    "missing module": (drop_record, "missing 'module.model'"),
    "extra record": (record("module.other", ArrayRecord()), "not declared 'module.other'"),
    "module is a MetricRecord": (record(MODULE, MetricRecord({"weight": 1.0})), "is a MetricRecord"),
    "numbers are a ConfigRecord": (config_for_numbers, "is a ConfigRecord, expected a MetricRecord"),
    "texts that nobody asked for": (record("note", ConfigRecord({"text": "hello"})), "not declared 'note'"),
    "count as a float": (numbers(num_examples=3.0), "found 3.0, expected count"),
    "count 1e12 as a float": (numbers(num_examples=1e12), "expected count"),
    "count as a list": (numbers(num_examples=[3, 3]), "expected count"),
    "count one above the card": (numbers(num_examples=25), "expected 1 to 24"),
    "steps -1": (numbers(num_steps=-1), "found -1, expected count"),
    "loss infinite": (numbers(loss_sum=float("inf")), "found inf, expected real"),
    "for the next round": (numbers(server_round=9), "for round 9"),
    "for a round of before": (numbers(server_round=0), "for round 0"),
    "no round": (numbers(without=("server_round",)), "missing 'server_round'"),
    # bytes that are not what they say
    "big-endian": (raw(big_endian), "header of float32"),
    "declared float32, holds float64": (values(lambda a: a.astype(np.float64)), "float64"),
    "declared dtype is a lie": (declared_dtype("float64"), "float64"),
    "declared dtype is no dtype": (declared_dtype("x" * 100_000), "expected float32"),
    "bytes cut off": (raw(lambda array: replace(array, data=array.data[:-4])), "bytes of values"),
    "bytes appended": (raw(lambda array: replace(array, data=array.data + b"\0" * 4)), "bytes of values"),
    "no bytes": (raw(lambda array: replace(array, data=b"")), "header"),
    "other serialisation": (raw(lambda array: replace(array, stype="pickle" * 10_000)), "serialisation is 'pickle"),
    "pickled objects": (header("{'descr': '|O', 'fortran_order': False, 'shape': (4, 1, 3, 3)}\n"), "header"),
    "structured dtype": (header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (36,)}\n"), "header"),
    "sub-array dtype": (header("{'descr': ('<f4', (36,)), 'fortran_order': False, 'shape': ()}\n"), "header"),
    "empty dtype": (header("{'descr': (), 'fortran_order': False, 'shape': (36,)}\n"), "header"),
    "unhashable header": (header("{[]: 1}\n"), "header"),
    "header that never ends": (header("{'descr': '''\n"), "header"),
    "header of brackets": (header("(" * 3000), "header"),
    "header of minus signs": (header("-" * 3000 + "1"), "header"),
    "another shape in the bytes": (header("{'descr': '<f4', 'fortran_order': False, 'shape': (36,)}\n"), "header"),
    "negative shape in the bytes": (header("{'descr': '<f4', 'fortran_order': False, 'shape': (-36,)}\n"), "header"),
    # what would flood or forge the server's logs and report
    "name of a megabyte": (extra("x" * 1_000_000), "not declared 'xxx"),
    "names by the thousand": (many_extra, "not declared 't0', 't1', 't10' and more"),
    "record name of a megabyte": (record("y" * 1_000_000, MetricRecord()), "not declared 'yyy"),
    "number of a megabyte": (numbers(num_steps=[7] * 300_000), "expected count"),
    "name that forges log lines": (extra("a\n[ROUND 9/9]\x1b[2J"), r"not declared 'a\\n\[ROUND"),
    "name that is a script": (extra("</td><script>alert(1)</script>"), "not declared '</td><script>"),
    # scores, which choose the model
    "negative histogram": (values(set_first(-1), SCORES, "positives"), "scores of 'val' are no histogram"),
    "histogram beyond int64 sums": (values(everywhere(2**62), SCORES, "negatives"), "scores of 'val' are no histogram"),
    "positions beyond their counts": (values(everywhere(2**39), SCORES, "positive_steps"), "exceed their counts"),
    "more scores than samples": (
        values(lambda a: a + np.eye(*a.shape, dtype=a.dtype) * 1000, SCORES, "positives"),
        "samples, expected at most 12 as on the site card",
    ),
    "more suppression than one site has": (values(everywhere(10**6), SCORES, "suppressed"), "suppress"),
    "score count beyond the card": (numbers("loss.val", num_examples=10**9), "expected at most 12"),
    "score loss NaN": (numbers("loss.val", loss_sum=float("nan")), "expected real"),
    "score loss below 0": (numbers("loss.val", loss_sum=-1e9), "loss of 'val' is below 0"),
    "float histogram": (values(lambda a: a.astype(np.float64), SCORES, "positives"), r"is float64\["),
    "scores of another split": (record("scores.test", ArrayRecord()), "not declared 'scores.test'"),
    # refusals, which are quoted by code
    "refusal with an unknown code": (
        lambda content: (content.clear(), record("refusal", ConfigRecord({"code": "PATIENT-Jane-Doe"}))(content)),
        "E-UNKNOWN",
    ),
    "refusal that brings a model": (record("refusal", ConfigRecord({"code": "E-DATA"})), "E-UNKNOWN"),
    "refusal with a text": (
        lambda content: (content.clear(), record("refusal", ConfigRecord({"code": "E-DATA", "note": "x"}))(content)),
        "E-UNKNOWN",
    ),
}


# -- the fourteen, over every method that averages ------------------------------------------------------------------


@pytest.fixture(scope="module", params=["fedavg", "fedprox", "scaffold"])
def drill(request, data, tmp_path_factory):
    """``drill(fault)``: four rounds in which the bad site does that in rounds 2 and 3; and the run with it silent."""
    folder = tmp_path_factory.mktemp(request.param)
    config = settings(data, folder, method=request.param, federation__rounds=4)

    def play(fault):
        with server_log() as log:
            outcome = run(config, {BAD: in_rounds((2, 3), fault)})
        return outcome, log

    honest = run(config)
    quiet, _ = play(silent)
    assert state_sha256(quiet.run_dir) != state_sha256(honest.run_dir), "the drill proves nothing if the site is idle"
    return play, quiet


def assert_refused(outcome, log: list[str], quiet, reason: str) -> None:
    assert state_sha256(outcome.run_dir) == state_sha256(quiet.run_dir)
    assert outcome.model_sha256 == quiet.model_sha256
    assert state_sha256(outcome.run_dir).startswith("4:"), "every round is saved"
    without = ("refused", "missing", "bytes_up")
    assert lines_of(outcome.run_dir, *without) == lines_of(quiet.run_dir, *without)

    rounds = [line for line in lines_of(outcome.run_dir) if line["kind"] == "round"]
    refused = [entry for line in rounds for entry in line["refused"]]
    assert [line["round"] for line in rounds if line["refused"]] == [2, 3]
    assert {entry["site"] for entry in refused} == {BAD}
    assert not any(line["missing"] for line in rounds)
    for entry in refused:
        assert re.search(reason, entry["reason"]), entry["reason"][:LIMIT]
        assert len(entry["reason"]) <= LIMIT
        assert any(BAD in line and entry["reason"] in line for line in log)
    assert max(map(len, log)) < 2 * LIMIT
    page = (outcome.run_dir / "report.html").read_text(encoding="utf-8")
    assert refused[0]["reason"] in html.unescape(page)
    assert "<script>alert" not in page
    assert run_json(outcome.run_dir)["status"] == "completed"


@pytest.mark.parametrize("case", DECLARED)
def test_hostile_reply_leaves_every_bit_as_if_the_site_were_silent(drill, case):
    play, quiet = drill
    edit, reason = DECLARED[case]
    assert_refused(*play(bent(edit)), quiet, reason)


# -- what else a site could think of ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def once(data, tmp_path_factory):
    """The same drill with FedAvg only."""
    config = settings(data, tmp_path_factory.mktemp("once"), federation__rounds=4)

    def play(fault):
        with server_log() as log:
            outcome = run(config, {BAD: in_rounds((2, 3), fault)})
        return outcome, log

    return play, play(silent)[0]


@pytest.mark.parametrize("case", INVENTED)
def test_invented_reply_leaves_every_bit_as_if_the_site_were_silent(once, case):
    play, quiet = once
    edit, reason = INVENTED[case]
    assert_refused(*play(bent(edit)), quiet, reason)


# -- evaluation replies, confusion matrices, message types ------------------------------------------------------------


@pytest.mark.parametrize("split", ["val", "test"])
def test_hostile_scores_at_the_end_are_left_out_and_named(data, tmp_path, split):
    def at_the_end(fault):
        def limited(message, answer):
            hit = message.metadata.message_type == wire.EVALUATE
            return fault(message, answer) if hit and message.content[wire.CONFIG]["evaluate"] == split else answer()

        return run(settings(data, tmp_path), {BAD: limited})

    quiet = at_the_end(silent)
    outcome = at_the_end(bent(values(set_first(-1), f"scores.{split}", "positives")))
    assert outcome.model_sha256 == quiet.model_sha256
    assert lines_of(outcome.run_dir) == lines_of(quiet.run_dir)
    named = run_json(outcome.run_dir)["outstanding"]
    assert [entry["site"] for entry in named] == [BAD]
    assert f"{split} scores: the scores of {split!r} are no histogram" in named[0]["reason"]
    assert "are no histogram" in (outcome.run_dir / "report.html").read_text(encoding="utf-8")
    assert run_json(quiet.run_dir)["outstanding"] == [
        {"site": BAD, "reason": f"{split} scores: no reply within the time limit"}
    ]


def spread(array: np.ndarray) -> None:
    array[...] = 0
    array.flat[:4] = 2**62  # the four add up to 2 ** 64, which int64 takes for 0


CONFUSION = {
    "negative": (set_first(-1), "negative counts"),
    "more than the samples": (set_first(10**6), "expected at most"),
    "a sum that wraps around to nothing": (spread, "expected at most"),
}


@pytest.mark.parametrize("case", CONFUSION)
def test_hostile_confusion_matrix_is_refused(tmp_path, case):
    change, reason = CONFUSION[case]
    config = settings(write_one_label(tmp_path / "one.npz"), tmp_path / "runs", data__labels="", federation__rounds=2)
    outcome = run(config, {BAD: in_rounds((2,), bent(values(change, SCORES, "confusion")))})
    refused = [entry for line in lines_of(outcome.run_dir) if line["kind"] == "round" for entry in line["refused"]]
    assert [entry["site"] for entry in refused] == [BAD]
    assert reason in refused[0]["reason"]
    assert 0 <= outcome.metrics["accuracy"] <= 1


def write_one_label(path):
    rng = np.random.default_rng(3)
    arrays = {f"{split}_images": rng.integers(0, 256, (48, 8, 8), dtype=np.uint8) for split in ("train", "val", "test")}
    labels = {f"{split}_labels": rng.integers(0, 3, (48, 1)) for split in ("train", "val", "test")}
    np.savez(path, **arrays, **labels)
    return path


@pytest.mark.parametrize("lie", ["train", "evaluate", "query.profile", "train.other"])
def test_reply_that_lies_about_its_kind_counts_as_what_was_asked(data, tmp_path, lie):
    """Whom a message went to, for what, is the server's knowledge: the sender's word for it is not read."""

    def fault(message, answer):
        reply = answer()
        reply.metadata.__dict__["_message_type"] = lie
        return reply

    config = settings(data, tmp_path, federation__sites_per_round=3)
    # of the three that train and the one that only scores, everybody lies: sites are drawn anew every round
    assert run(config, dict.fromkeys(SITES, fault)).model_sha256 == run(config).model_sha256


def test_numbers_that_nobody_uses_steer_nothing(data, tmp_path):
    """A step count and a training loss are shown, never used: a lie in them does not move one bit of the model."""
    edit = numbers(num_steps=2**62, loss_sum=-1e308)
    outcome = run(settings(data, tmp_path), dict.fromkeys(SITES, in_rounds((1, 2, 3), bent(edit))))
    assert outcome.model_sha256 == run(settings(data, tmp_path)).model_sha256
    run_json(outcome.run_dir)


def test_losses_that_overflow_leave_a_readable_run_folder(data, tmp_path):
    edit = numbers("loss.val", loss_sum=1.7e308)
    outcome = run(settings(data, tmp_path), dict.fromkeys(SITES, in_rounds((2, 3), bent(edit))))
    run_json(outcome.run_dir)
    for line in (outcome.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        assert "Infinity" not in line and "NaN" not in line


# -- site cards -------------------------------------------------------------------------------------------------------


def card(**changes: object) -> Edit:
    def edit(content: RecordDict) -> None:
        content[wire.CARD] = ConfigRecord({**content[wire.CARD], **changes})

    return edit


CARDS = {
    "absurd number of samples": (numbers(num_train=10**15), "a split of 1000000000000000 samples"),
    "negative number of samples": (numbers(num_train=-5), "found -5, expected count"),
    "NaN samples": (numbers(num_val=float("nan")), "found nan, expected count"),
    "more positives than samples": (numbers(positives=[9999, 1, 1]), "do not fit"),
    "counts of too few labels": (numbers(negatives=[1]), "do not fit"),
    "counts by the million": (numbers(positives=[0] * 300_000), "do not fit"),
    "count of -2": (numbers(positives=[-2, 1, 1]), "expected counts"),
    "name that is a path": (card(site="../../etc/cron.d/x"), "the site's name is not"),
    "name with a line break": (card(site="a\nb"), "the site's name is not"),
    "name that is a list": (card(site=["a", "b"]), "the site's name is not"),
    "name of a megabyte": (card(site="x" * 1_000_000), "at most 200 characters"),
    "no labels": (card(labels=[]), "label list is empty"),
    "a label twice": (card(labels=["cat", "cat", "fox"]), "names a label twice"),
    "labels in another order": (card(labels=["dog", "cat", "fox"]), "its labels is \\[dog, cat, fox\\], the others"),
    "labels as one word": (card(labels="cat"), "do not fit|label"),
    "labels by the thousand": (card(labels=[f"label {i}" for i in range(100_000)]), "labels|do not fit"),
    "another task": (card(task="multiclass"), "its task is \\[multiclass\\]"),
    "another schema": (card(schema="0" * 64), "its schema is"),
    "modalities by the million": (card(modalities=["x"] * 300_000), "modalities"),
    "numbers in place of names": (card(modalities=[1, 2]), "must hold strings"),
    "a picture of a patient": (record("thumbnail", wire.encode({"p": np.zeros(9)})), "not declared 'thumbnail'"),
    "a refusal": (
        lambda content: (content.clear(), record("refusal", ConfigRecord({"code": "E-DATA"}))(content)),
        "E-DATA: the site's data cannot be used",
    ),
}


@pytest.mark.parametrize("case", CARDS)
def test_hostile_card_keeps_that_site_out_and_no_other(data, tmp_path, case):
    edit, reason = CARDS[case]
    with server_log() as log:
        outcome = run(settings(data, tmp_path, federation__rounds=1), {BAD: in_rounds((0,), bent(edit), wire.PROFILE)})
    assert {site["site"] for site in run_json(outcome.run_dir)["sites"]} == set(SITES) - {BAD}
    (entry,) = run_json(outcome.run_dir)["outstanding"]
    assert re.search(reason, entry["reason"]), entry["reason"][:LIMIT]
    assert len(entry["reason"]) < 2 * LIMIT
    assert any(entry["reason"] in line for line in log)
    assert max(map(len, log)) < 3 * LIMIT


def test_text_on_a_card_is_escaped_in_the_report(data, tmp_path):
    script = "<script>alert(1)</script>"
    edit = card(modalities=[script], data_sha256=script)
    outcome = run(settings(data, tmp_path, federation__rounds=1), {BAD: in_rounds((0,), bent(edit), wire.PROFILE)})
    assert script not in (outcome.run_dir / "report.html").read_text(encoding="utf-8")


def test_site_that_takes_another_sites_name_ends_the_run_by_name(data, tmp_path):
    """Without registered keys nobody can say who is the right one; with them the impostor is refused (see cards)."""
    thief = in_rounds((0,), bent(card(site=SITES[0])), wire.PROFILE)
    with pytest.raises(CardError, match=f"more than one site is called {SITES[0]}"):
        run(settings(data, tmp_path), {BAD: thief})
    (folder,) = tmp_path.glob("*-fedavg")
    assert run_json(folder)["status"] == "failed"
