"""Whole federations in one process: same seed same bits, every baseline completes, faults end where they should."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from safetensors.torch import load_file

from client_app.egress import verify
from client_app.site import site_names
from federation import wire
from federation.settings import Settings
from server_app import inprocess
from server_app.inprocess import InProcessGrid, copied
from strategies.discovery import QuorumError


def rounds_of(outcome):
    lines = [json.loads(line) for line in (outcome.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "round"]


def values(outcome):
    """The numbers of a result, which do not depend on the time of day."""
    return {key: value for key, value in outcome.metrics.items() if key not in ("per_class", "per_site")}


def test_same_seed_gives_the_same_model_and_metrics_and_another_seed_another(run_tiny):
    first, second, other = run_tiny(seed=5), run_tiny(seed=5), run_tiny(seed=6)
    assert first.model_sha256 == second.model_sha256 != other.model_sha256
    assert first.run_dir != second.run_dir
    assert values(first) == values(second) and first.metrics["per_class"] == second.metrics["per_class"]


def test_where_results_go_and_how_long_to_wait_do_not_change_the_model(run_tiny, tmp_path):
    moved = {
        "reporting__runs_dir": str(tmp_path / "other"),
        "federation__timeout_s": 60,
        "reporting__tensorboard": True,
    }
    assert run_tiny().model_sha256 == run_tiny(**moved).model_sha256


METHODS = ["fedavg", "fedprox", "scaffold", "local", "centralised"]


@pytest.mark.parametrize("method", METHODS)
def test_every_baseline_completes_with_a_sane_table(run_tiny, method):
    outcome = run_tiny(method=method)
    table = outcome.metrics
    assert 0 < table["macro_auroc"] < 1 and table["loss"] > 0
    assert table["num_examples"] == sum(row["num_examples"] for row in table["per_site"]) == 600  # test mosaics
    assert len(table["per_class"]) == 10
    # centralised has a sixth site that only trains, so it has no row of its own
    assert [row["site"] for row in table["per_site"]] == [f"site-0{index}" for index in range(5)]
    run = json.loads((outcome.run_dir / "run.json").read_text())
    assert run["status"] == "completed" and run["method"] == method
    assert run["model_sha256"] == outcome.model_sha256
    saved = load_file(outcome.run_dir / "model.safetensors")
    assert wire.state_sha256({"model": saved}) == outcome.model_sha256
    assert (outcome.run_dir / "report.html").exists()
    for record in rounds_of(outcome):
        assert len(record["accepted"]) == (1 if method == "centralised" else 5)
        assert record["refused"] == record["missing"] == []
        assert all(loss > 0 for loss in record["train_loss"].values())


def test_training_lowers_the_loss(run_tiny):
    outcome = run_tiny(federation__rounds=4, training__epochs=2)
    first, last = (np.mean(list(record["train_loss"].values())) for record in (rounds_of(outcome)[i] for i in (0, -1)))
    assert last < first


def test_methods_that_should_differ_do_and_those_that_should_not_do_not(run_tiny):
    """mu = 0 takes the proximal term out; scaffold's correction is zero only in the first round."""
    fedavg = run_tiny().model_sha256
    assert run_tiny(method="fedprox", fedprox__mu=0).model_sha256 == fedavg
    assert run_tiny(method="fedprox", fedprox__mu=0.5).model_sha256 != fedavg
    assert run_tiny(method="scaffold").model_sha256 != fedavg
    one_round = {"federation__rounds": 1, "training__epochs": 1}
    assert run_tiny(method="scaffold", **one_round).model_sha256 == run_tiny(**one_round).model_sha256


def test_single_label_digits_over_dirichlet_sites(run_tiny):
    outcome = run_tiny(
        data__root="digits",
        data__partition="dirichlet",
        data__image_size=8,
        data__num_sites=3,
        evaluation__selection_metric="balanced_accuracy",
    )
    table = outcome.metrics
    assert 0 < table["accuracy"] < 1 and 0 <= table["worst_recall"] <= table["balanced_accuracy"] < 1
    assert table["num_examples"] == 382  # the digits' test sheets
    header = json.loads((outcome.run_dir / "run.json").read_text())
    assert header["task"] == "multiclass" and header["selection_metric"] == "balanced_accuracy"


def test_every_site_keeps_a_ledger_with_one_line_for_every_exchange(run_tiny):
    outcome = run_tiny()
    ledgers = sorted((outcome.run_dir / "sites").glob("*/egress.jsonl"))
    assert len(ledgers) == 5
    for ledger in ledgers:
        assert verify(ledger)
        actions = [json.loads(line)["action"] for line in ledger.read_text().splitlines()]
        # card, two rounds of which the second carries round 1's scores, last validation, test: R + 3 exchanges
        assert actions == ["query.profile", "train", "train", "evaluate", "evaluate"]


def silent(message, answer):
    return None


def crashing(message, answer):
    raise SystemExit(1)


def leaking(message, answer):
    raise RuntimeError("PATIENT-Jane-Doe")


def poisoned(message, answer):
    reply = answer()
    if message.metadata.message_type == wire.TRAIN:
        arrays = {name: value.copy() for name, value in wire.decode(reply.content["module.model"]).items()}
        arrays["head.weight"][0, 0] = np.nan
        reply.content["module.model"] = wire.encode(arrays)
    return reply


def in_training(fault):
    return lambda message, answer: fault(message, answer) if message.metadata.message_type == wire.TRAIN else answer()


FAULTS = {
    "silent": (silent, "missing", "no reply within the time limit"),
    "killed": (crashing, "missing", "the site's app crashed"),
    "raising": (leaking, "missing", "the site's app raised an error"),
    "NaN": (poisoned, "refused", "tensor 'head.weight' of module 'model' has no finite norm"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_site_is_named_and_the_model_is_that_of_the_others(run_tiny, name):
    fault, where, reason = FAULTS[name]
    quick = {"federation__timeout_s": 0.3, "federation__rounds": 1, "evaluation__every": 0}
    outcome = run_tiny(faults={"site-02": in_training(fault)}, **quick)
    without = run_tiny(faults={"site-02": in_training(crashing)}, **quick)
    (record,) = rounds_of(outcome)
    (entry,) = record[where]
    assert entry["site"] == "site-02" and reason in entry["reason"]
    assert record["accepted"] == ["site-00", "site-01", "site-03", "site-04"]
    assert outcome.model_sha256 == without.model_sha256
    assert "Jane" not in (outcome.run_dir / "metrics.jsonl").read_text() + (outcome.run_dir / "run.json").read_text()


def test_too_few_usable_replies_end_the_run_and_the_folder_says_why(run_tiny, tmp_path):
    bad = {f"site-0{index}": in_training(crashing) for index in range(4)}
    with pytest.raises(QuorumError, match=r"round 1: 1 usable replies, 2 needed .*site-00: the site's app crashed"):
        run_tiny(faults=bad)
    (run_dir,) = [path for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")]
    run = json.loads((run_dir / "run.json").read_text())
    assert run["status"] == "failed" and "1 usable replies" in run["warnings"][-1]
    assert not (run_dir / "model.safetensors").exists() and (run_dir / "report.html").exists()


def test_records_are_copied_at_the_border():
    content = RecordDict({"module.model": wire.encode({"w": np.zeros(2, np.float32)})})
    twin = copied(content)
    twin["module.model"].clear()
    assert list(content["module.model"]) == ["w"]


def test_a_node_keeps_its_context_over_the_run_and_no_other_sees_it(monkeypatch):
    seen = []

    def app(message: Message, context: Context) -> Message:
        seen.append((context.node_id, context.node_config["partition-id"], id(context)))
        return Message(RecordDict(), reply_to=message)

    monkeypatch.setattr(inprocess, "client_app", app)
    grid = InProcessGrid([{"partition-id": 0}, {"partition-id": 1}], {})
    for _ in range(2):
        messages = [Message(RecordDict(), node, "train", ttl=9.0, group_id="1") for node in grid.get_node_ids()]
        assert len(grid.send_and_receive(messages)) == 2
    assert len({context for _, _, context in seen}) == 2
    assert seen[0] == seen[2] and seen[1] == seen[3]


def test_a_reply_is_given_once(monkeypatch):
    monkeypatch.setattr(inprocess, "client_app", lambda message, context: Message(RecordDict(), reply_to=message))
    grid = InProcessGrid([{"partition-id": 0}], {})
    (node,) = grid.get_node_ids()
    ids = grid.push_messages([Message(RecordDict(), node, "train", ttl=9.0, group_id="1")])
    assert len(grid.pull_messages(ids)) == 1 and grid.pull_messages(ids) == []


def test_simulated_sites_are_those_of_the_partition():
    settings = Settings.from_run_config({"data.num_sites": 3})
    assert site_names(settings) == ["site-00", "site-01", "site-02"]
