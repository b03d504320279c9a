"""Sites that fail in one of the four exchanges of a secure sum: the sum of the others, or a round that ends by name."""

from __future__ import annotations

import re

import pytest
import torch

from federation import wire
from federation.secure_roster import ASK_KEYS, ASK_MASKED, ASK_SHARES, ASK_UNMASK, MASKED, PUBLIC_KEYS, SHARES
from server_app import checkpoint
from strategies.discovery import QuorumError
from tests.faults import hostile
from tests.faults.drills import BAD, SITES, in_rounds, run, run_json, settings, silent, state_sha256, write_data
from tests.faults.ray_drills import copy_app, simulated
from tests.faults.test_sites_fail import STORY, raising_after_training, texts_of, troubles

STAGES = (ASK_KEYS, ASK_SHARES, ASK_MASKED, ASK_UNMASK)
LATER = 2e-6
"""What a quantisation step in one round may grow to in two more rounds of these few SGD steps."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("secure") / "data.npz")


@pytest.fixture
def config(data, tmp_path):
    return settings(data, tmp_path, federation__rounds=3, privacy__secure_sum=True)


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory):
    """The final state of plain runs in which the site was there, or silent in round 2."""
    config = settings(data, tmp_path_factory.mktemp("plain"), federation__rounds=3)
    there, gone = run(config), run(config, {BAD: in_rounds((2,), silent)})
    return {True: modules_of(there), False: modules_of(gone)}


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A secure run in which nothing goes wrong."""
    return run(settings(data, tmp_path_factory.mktemp("whole"), federation__rounds=3, privacy__secure_sum=True))


def modules_of(outcome):
    return checkpoint.load_checkpoint(outcome.run_dir)[0].modules["model"]


def assert_near(found, expected):
    for name, value in expected.items():
        if value.is_floating_point():
            torch.testing.assert_close(found[name], value, rtol=0, atol=LATER)


@pytest.mark.parametrize("fault", [silent, raising_after_training], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("stage", STAGES)
def test_a_site_lost_in_any_exchange_leaves_the_sum_of_the_others(config, plain, stage, fault):
    """Whoever is lost after its masked vector still counts: its masks are rebuilt from the others' shares."""
    outcome = run(config, {BAD: in_rounds((2,), fault, stage)})
    counted = stage == ASK_UNMASK
    assert_near(modules_of(outcome), plain[counted])
    assert [(number, site) for number, site, _ in troubles(outcome.run_dir, "missing")] == [(2, BAD)]
    assert troubles(outcome.run_dir, "refused") == []
    assert STORY not in texts_of(outcome.run_dir)
    leftover = list((outcome.run_dir / "sites" / BAD / "secure_sum").glob("*"))
    assert leftover == [], "the next round's keys clear what the lost one left"


HOSTILE = {
    "a key that hides nothing": (ASK_KEYS, PUBLIC_KEYS, "mask", lambda a: a * 0, "small order"),
    "a key of another length": (
        ASK_KEYS,
        PUBLIC_KEYS,
        "mask",
        lambda a: a[:16],
        r"is uint8\[16\], expected uint8\[32\]",
    ),
    "short shares": (ASK_SHARES, SHARES, SITES[0], lambda a: a[:-1], "expected uint8"),
    "a short vector": (ASK_MASKED, MASKED, "model", lambda a: a[:-1], "expected int64"),
    "floats for a vector": (ASK_MASKED, MASKED, "model", lambda a: a.astype("float64"), "expected int64"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_reply_that_the_protocol_does_not_allow_makes_its_site_a_dropout(config, plain, case):
    stage, record, name, change, reason = HOSTILE[case]
    bent = hostile.bent(hostile.values(change, record, name))
    outcome = run(config, {BAD: in_rounds((2,), bent, stage)})
    assert_near(modules_of(outcome), plain[False])
    ((number, site, found),) = troubles(outcome.run_dir, "refused")
    assert (number, site) == (2, BAD)
    assert re.search(reason, found)


def test_a_masked_reply_passes_the_update_gate_too(config):
    bent = hostile.bent(hostile.numbers(num_examples=10**6))
    outcome = run(config, {BAD: in_rounds((2,), bent, ASK_MASKED)})
    ((_, _, reason),) = troubles(outcome.run_dir, "refused")
    assert reason == "num_examples is 1000000, expected 1 to 24 as on the site card"


def test_changed_shares_are_noticed_by_the_site_that_they_were_for(config, plain):
    """The receiver says E-MISMATCH and drops out; the sender's vector counts."""
    bent = hostile.bent(hostile.values(lambda a: a ^ 1, SHARES, SITES[0]))
    outcome = run(config, {BAD: in_rounds((2,), bent, ASK_SHARES)})
    assert troubles(outcome.run_dir, "refused") == [(2, SITES[0], f"E-MISMATCH: {wire.CODES['E-MISMATCH']}")]


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        (ASK_KEYS, "no module has the 3 sites that a sum needs"),
        (ASK_SHARES, "2 of 4 sites sent shares, 3 needed to unmask a sum"),
        (ASK_MASKED, "2 of 4 sites sent a masked vector, 3 needed to unmask a sum"),
        (ASK_UNMASK, "2 of 4 sites sent their shares to unmask, 3 needed to unmask a sum"),
    ],
)
def test_too_few_survivors_end_the_round_by_name_and_a_resume_ends_in_the_same_bits(
    config, tmp_path, whole, stage, told
):
    gone = dict.fromkeys((SITES[0], BAD), in_rounds((2,), silent, stage))
    with pytest.raises(QuorumError, match=f"round 2 of the secure sum: {told}; the state is kept .*{BAD}: no reply"):
        run(config, gone)
    (folder,) = tmp_path.glob("*-fedavg")
    assert run_json(folder)["status"] == "failed"
    assert checkpoint.load_checkpoint(folder)[0].server_round == 1
    resumed = run({**config, "resume": str(folder)})
    assert resumed.model_sha256 == whole.model_sha256
    assert state_sha256(folder) == state_sha256(whole.run_dir)


def test_the_quorum_of_the_settings_holds_before_anything_is_unmasked(config):
    asked = []

    def counted(message, answer):
        asked.append(message.metadata.message_type)
        return answer()

    config["federation.min_sites"] = 4
    with pytest.raises(QuorumError, match=r"round 2: 3 usable replies, 4 needed \(federation.min_sites\)"):
        run(config, {BAD: in_rounds((2,), silent, ASK_MASKED), SITES[0]: counted})
    assert asked.count(ASK_MASKED) == 2 and asked.count(ASK_UNMASK) == 1


@pytest.mark.slow
def test_on_ray_the_model_has_the_bits_of_the_run_in_process(config, whole, tmp_path):
    """Fresh masks, other processes from message to message, one site gone for good after its masked vector."""
    planted = f"""
from flwr.app import ConfigRecord, Message, RecordDict


def answer(message, context, honest):
    if context.node_config["partition-id"] == 1 and message.metadata.message_type == {ASK_UNMASK!r}:
        return Message(RecordDict({{"refusal": ConfigRecord({{"code": "E-INTERNAL"}})}}), reply_to=message)
    return honest(message, context)
"""
    app = copy_app(tmp_path / "app", planted)
    on_ray = simulated(app, {**config, "federation.timeout_s": 300.0}, sites=len(SITES))
    assert on_ray.exit_code == 0, on_ray.logs[-3000:]
    assert run_json(on_ray.run_dir)["model_sha256"] == whole.model_sha256
    assert [site for _, site, _ in troubles(on_ray.run_dir, "refused")] == [BAD] * 3
