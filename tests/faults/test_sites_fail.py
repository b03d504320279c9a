"""Sites that fail while others train: raising, silent, gone, late, twice, in the past. The rounds go on without them,
with the bits they would have had without them; below the quorum the run ends, says why, and can be resumed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from flwr.app import ArrayRecord, Message

from client_app.site import site_names
from federation import wire
from federation.settings import Settings
from server_app import inprocess, runner
from strategies.discovery import QuorumError
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
    write_data,
)

SECRET = "PATIENT-Jane-Doe"
STORY = f"{SECRET} in /data/secret/path.dcm row 17"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("failing") / "data.npz")


@pytest.fixture
def config(data, tmp_path):
    return settings(data, tmp_path, federation__rounds=4)


def raising(message, answer):
    raise RuntimeError(STORY)


def leaving(message, answer):
    raise SystemExit(STORY)


def raising_after_training(message, answer):
    answer()
    raise ValueError(STORY)


def on_grid(run_config, grid: type[inprocess.InProcessGrid]):
    """`inprocess.run` on another grid."""
    parsed = Settings.from_run_config(run_config)
    nodes = [{"partition-id": index, "num-partitions": len(SITES)} for index in range(len(site_names(parsed)))]
    return runner.run(parsed, grid(nodes, parsed.flat()))


def texts_of(run_dir: Path) -> str:
    """Everything a run folder says outside the sites' own folders."""
    files = [path for path in run_dir.rglob("*") if path.is_file() and "sites" not in path.relative_to(run_dir).parts]
    assert len(files) > 4
    return "\n".join(path.read_bytes().decode("utf-8", errors="replace") for path in files)


def troubles(run_dir: Path, kind: str) -> list[tuple[int, str, str]]:
    rounds = [line for line in lines_of(run_dir) if line["kind"] == "round"]
    return [(line["round"], entry["site"], entry["reason"]) for line in rounds for entry in line[kind]]


# -- one site fails ---------------------------------------------------------------------------------------------------

FAILING = {
    "raises": (raising, "the site's app raised an error"),
    "raises after training": (raising_after_training, "the site's app raised an error"),
    "exits": (leaving, "the site's app crashed"),
    "hangs": (silent, "no reply within the time limit"),
}


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
@pytest.mark.parametrize("case", FAILING)
def test_failing_site_is_named_and_the_others_train_on(config, case, method):
    fault, reason = FAILING[case]
    config["method"] = method
    with server_log() as log:
        outcome = run(config, {BAD: in_rounds((2, 3), fault)})
    quiet = run(config, {BAD: in_rounds((2, 3), silent)})
    assert state_sha256(outcome.run_dir) == state_sha256(quiet.run_dir)
    assert outcome.model_sha256 == quiet.model_sha256
    assert troubles(outcome.run_dir, "missing") == [(2, BAD, reason), (3, BAD, reason)]
    assert troubles(outcome.run_dir, "refused") == []
    assert reason in texts_of(outcome.run_dir).replace("&#39;", "'")
    assert any(f"{BAD}: {reason}" in line for line in log)
    assert SECRET not in "\n".join(log) + texts_of(outcome.run_dir)


@pytest.mark.parametrize("case", FAILING)
def test_site_that_fails_before_its_card_takes_no_part(config, case):
    outcome = run(config, {BAD: in_rounds((0,), FAILING[case][0], wire.PROFILE)})
    assert [site["site"] for site in run_json(outcome.run_dir)["sites"]] == [site for site in SITES if site != BAD]
    assert FAILING[case][1] in [entry["reason"] for entry in run_json(outcome.run_dir)["outstanding"]]
    assert SECRET not in texts_of(outcome.run_dir)


def test_error_inside_a_site_leaves_as_a_code_and_the_story_stays(config, monkeypatch):
    from client_app import fedavg

    train = fedavg.train

    def failing(site, modules, job):
        print(STORY)
        if site.name == BAD and job.server_round == 2:
            raise KeyError(STORY)
        return train(site, modules, job)

    monkeypatch.setattr(fedavg, "train", failing)
    with server_log() as log:
        outcome = run(config)
    assert troubles(outcome.run_dir, "refused") == [(2, BAD, "E-INTERNAL: the site's code failed")]
    assert SECRET not in "\n".join(log) + texts_of(outcome.run_dir)
    assert STORY in (outcome.run_dir / "sites" / BAD / "site.log").read_text(encoding="utf-8")
    monkeypatch.undo()
    quiet = run(config, {BAD: in_rounds((2,), silent)})
    assert state_sha256(outcome.run_dir) == state_sha256(quiet.run_dir)


# -- replies that come late, twice, or from the past ------------------------------------------------------------------


class LateGrid(inprocess.InProcessGrid):
    """The bad site's answer of round 2 comes when round 3 is under way, and then with whatever is pulled."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._late: list[Message] = []
        self.handed_over = 0

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        kept = [reply for reply in replies if not self._is_late(reply)]
        self._late += [reply for reply in replies if self._is_late(reply)]
        if any(reply.metadata.group_id == "3" for reply in replies):
            self.handed_over += len(self._late)
            kept = self._late + kept
        return kept

    def _is_late(self, reply: Message) -> bool:
        return reply.metadata.src_node_id == self._nodes[SITES.index(BAD)] and reply.metadata.group_id == "2"


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_late_reply_is_not_taken_by_the_next_round(config, method):
    config["method"] = method
    handed_over = []

    class Grid(LateGrid):
        def pull_messages(self, message_ids):
            replies = super().pull_messages(message_ids)
            handed_over.append(self.handed_over)
            return replies

    outcome = on_grid(config, Grid)
    assert handed_over[-1] > 0, "the late reply must have been offered"
    quiet = run(config, {BAD: in_rounds((2,), silent)})
    assert state_sha256(outcome.run_dir) == state_sha256(quiet.run_dir)
    assert troubles(outcome.run_dir, "missing") == [(2, BAD, "no reply within the time limit")]


def spoiled(reply: Message) -> Message:
    """A second answer to the same message, with other weights."""
    content = inprocess.copied(reply.content)
    for name, record in list(content.array_records.items()):
        arrays = {key: value * 2 for key, value in wire.decode(record).items()} if name.startswith("module.") else None
        content[name] = record if arrays is None else wire.encode(arrays)
    second = Message(content, reply_to=reply)
    second.metadata.__dict__.update(reply.metadata.__dict__)
    return second


class TwiceGrid(inprocess.InProcessGrid):
    """Every reply of the bad site comes twice, in one pull."""

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        bad = self._nodes[SITES.index(BAD)]
        return [copy for reply in replies for copy in ([reply, spoiled(reply)] if _from(reply, bad) else [reply])]


def _from(reply: Message, node_id: int) -> bool:
    return reply.metadata.src_node_id == node_id


def test_second_reply_to_one_message_counts_for_nothing(config):
    assert on_grid(config, TwiceGrid).model_sha256 == run(config).model_sha256


class ImpostorGrid(inprocess.InProcessGrid):
    """The bad site answers in the name of its neighbour as well, before that one does."""

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        for reply in replies:
            if _from(reply, self._nodes[0]) and reply.metadata.group_id == "2":
                reply.metadata.__dict__["_src_node_id"] = self._nodes[SITES.index(BAD)]
        return replies


def test_reply_from_another_node_than_was_asked_is_dropped(config):
    outcome = on_grid(config, ImpostorGrid)
    quiet = run(config, {SITES[0]: in_rounds((2,), silent)})
    assert state_sha256(outcome.run_dir) == state_sha256(quiet.run_dir)
    assert troubles(outcome.run_dir, "missing") == [
        (2, SITES[0], "the reply came from another node than the message went to")
    ]


def test_reply_for_an_old_round_is_refused(config):
    """A site that sends round 1's answer again: the round in it is not the one that was asked for."""
    kept = []

    def replay(message, answer):
        reply = answer()
        if not kept:
            kept.append(inprocess.copied(reply.content))
        return Message(inprocess.copied(kept[0]), reply_to=message)

    outcome = run(config, {BAD: in_rounds((1, 2, 3), replay)})
    # the evaluation that travels from round 2 on is missing in round 1's answer, so what is wrong first is its records
    assert {(number, site) for number, site, _ in troubles(outcome.run_dir, "refused")} == {(2, BAD), (3, BAD)}
    quiet = run(config, {BAD: in_rounds((2, 3), silent)})
    assert state_sha256(outcome.run_dir) == state_sha256(quiet.run_dir)

    config["evaluation.every"] = 0
    kept.clear()
    outcome = run(config, {BAD: in_rounds((1, 2, 3), replay)})
    assert troubles(outcome.run_dir, "refused") == [
        (number, BAD, f"the reply is for round 1, expected round {number}") for number in (2, 3)
    ]


def test_reply_with_another_sites_tensors_still_counts_once(config):
    """What a record object shares with another reply does not matter: nothing of a reply is written to."""
    shared = []

    def same(message, answer):
        reply = answer()
        shared.append(reply.content["module.model"])
        reply.content["module.model"] = ArrayRecord(dict(shared[0]))
        return reply

    outcome = run(config, dict.fromkeys(SITES, in_rounds((1,), same)))
    assert run_json(outcome.run_dir)["status"] == "completed"


# -- below the quorum -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "local"])
def test_below_the_quorum_the_run_fails_by_name_and_a_resume_ends_in_the_same_bits(config, tmp_path, method):
    config |= {"method": method, "federation.min_sites": 3}
    whole = run(config)
    gone = {site: in_rounds((3, 4), fault) for site, fault in ((SITES[0], leaving), (BAD, silent))}
    with pytest.raises(QuorumError, match=r"round 3: 2 usable replies, 3 needed \(federation.min_sites\)"):
        run(config, gone)
    folder = max(tmp_path.glob(f"*-{method}*"), key=lambda path: path.stat().st_mtime_ns)
    assert folder != whole.run_dir
    told = run_json(folder)
    assert told["status"] == "failed"
    reason = next(warning for warning in told["warnings"] if "QuorumError" in warning)
    assert f"{SITES[0]}: the site's app crashed" in reason and f"{BAD}: no reply within the time limit" in reason
    assert "QuorumError" in (folder / "report.html").read_text(encoding="utf-8")
    assert SECRET not in texts_of(folder)

    with pytest.raises(QuorumError):  # the sites are still away: the run stays where it is
        run({**config, "resume": str(folder)}, gone)
    assert run_json(folder)["status"] == "failed"
    resumed = run({**config, "resume": str(folder)})
    assert resumed.run_dir == folder
    assert resumed.model_sha256 == whole.model_sha256
    assert state_sha256(folder) == state_sha256(whole.run_dir)
    assert lines_of(folder) == lines_of(whole.run_dir)
    assert run_json(folder)["status"] == "completed"


def test_too_few_cards_end_the_run_before_round_1_with_every_reason(config, tmp_path):
    config["federation.min_sites"] = 3
    faults = {SITES[0]: in_rounds((0,), raising, wire.PROFILE), BAD: in_rounds((0,), silent, wire.PROFILE)}
    with pytest.raises(QuorumError, match="2 sites can train, 3 needed"):
        run(config, faults)
    (folder,) = tmp_path.glob("*-fedavg")
    told = run_json(folder)
    assert told["status"] == "failed"
    assert "the site's app raised an error" in str(told["warnings"]) and "no reply within" in str(told["warnings"])
    assert SECRET not in texts_of_failed(folder)


def texts_of_failed(folder: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.*"))


def test_no_site_at_all_is_a_failure_not_a_wait_for_ever(config):
    with pytest.raises(QuorumError, match="no site sent a card"):
        run(config, dict.fromkeys(SITES, in_rounds((0,), silent, wire.PROFILE)))
