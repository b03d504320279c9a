"""Real simulations: one in which a site lies, one fails with a patient's name in its mouth and one is killed, and one
in which a site sends every hostile reply there is, one a round.
"""

from __future__ import annotations

import re

import pytest

from federation import wire
from tests.faults import hostile
from tests.faults.drills import BAD, in_rounds, lines_of, run, run_json, settings, silent, state_sha256, write_data
from tests.faults.ray_drills import copy_app, simulated
from tests.faults.test_sites_fail import STORY, texts_of, troubles

pytestmark = pytest.mark.slow

SITES = [f"site-0{index}" for index in range(6)]
LIAR, RAISER, VICTIM = SITES[1], SITES[3], SITES[5]
PLANTED = f"""
import logging
import os
import signal
import time
import warnings

from flwr.app import ArrayRecord

from federation import wire


def answer(message, context, honest):
    site = "site-0%s" % context.node_config["partition-id"]
    late = message.metadata.message_type == "train" and int(message.content["config"]["server_round"]) == 2
    if site == {RAISER!r} and late:
        return failing(message, context, honest)
    reply = honest(message, context)
    if site == {LIAR!r} and late:
        record = reply.content["module.model"]
        name = sorted(record)[0]
        values = wire.decode_array(record[name]).copy()
        values.flat[0] = float("nan")
        reply.content["module.model"] = ArrayRecord({{**record, name: wire.encode_array(values)}})
    if site == {VICTIM!r} and late:
        time.sleep(5)  # the other worker answers for all other sites meanwhile: a dead one fails whatever it is given
        os.kill(os.getpid(), signal.SIGKILL)
    return reply


def failing(message, context, honest):
    from client_app import fedavg

    train = fedavg.train

    def fails(*arguments):
        print({STORY!r})
        warnings.warn({STORY!r})
        logging.getLogger("consilium.site.anything").info({STORY!r})
        raise KeyError({STORY!r})

    fedavg.train = fails
    try:
        return honest(message, context)
    finally:
        fedavg.train = train
"""
"""Faults at the border of the ClientApp, and one inside the method's own training."""


@pytest.fixture(scope="module")
def drill(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    data = write_data(folder / "data.npz")
    config = settings(
        data,
        folder / "runs",
        data__num_sites=6,
        federation__rounds=2,
        federation__min_sites=3,
        federation__timeout_s=60.0,
    )
    return simulated(copy_app(folder / "app", PLANTED), config, len(SITES)), config


def test_run_with_a_liar_a_failure_and_a_killed_worker_completes(drill):
    done, _ = drill
    assert done.exit_code == 0, done.logs[-5000:]
    assert run_json(done.run_dir)["status"] == "completed"
    refused = {site: (number, reason) for number, site, reason in troubles(done.run_dir, "refused")}
    assert refused[LIAR][0] == 2 and "no finite norm" in refused[LIAR][1]
    assert refused[RAISER] == (2, "E-INTERNAL: the site's code failed")
    missing = [(number, site) for number, site, _ in troubles(done.run_dir, "missing")]
    assert (2, VICTIM) in missing
    assert {site for _, site in missing} == {VICTIM}, "the others had answered before the worker died"


def test_model_is_bit_equal_to_the_in_process_run_with_the_same_absences(drill, tmp_path):
    """What the dead worker fails afterwards (Flower hands it out again) is read from the record and played again."""
    done, config = drill
    absent_in_training = {
        (line["round"], entry["site"])
        for line in lines_of(done.run_dir)
        if line["kind"] == "round"
        for entry in line["refused"] + line["missing"]
    }
    absent_at_the_end = {(entry["reason"].split()[0], entry["site"]) for entry in run_json(done.run_dir)["outstanding"]}

    def fault(site):
        def play(message, answer):
            if message.metadata.message_type == wire.EVALUATE:
                return None if (message.content[wire.CONFIG]["evaluate"], site) in absent_at_the_end else answer()
            rounds = [number for number, other in absent_in_training if other == site]
            return in_rounds(rounds, silent)(message, answer)

        return play

    here = {**config, "reporting.runs_dir": str(tmp_path), "federation.timeout_s": 0.02}
    again = run(here, {site: fault(site) for site in SITES}, as_it_is=True)
    assert state_sha256(again.run_dir) == state_sha256(done.run_dir)
    assert again.model_sha256 == run_json(done.run_dir)["model_sha256"]
    without = ("refused", "missing", "bytes_up")
    assert lines_of(again.run_dir, *without) == lines_of(done.run_dir, *without)


def test_no_word_of_the_failing_sites_story_reaches_the_server(drill):
    done, _ = drill
    for word in ("PATIENT-Jane-Doe", "/data/secret", "path.dcm"):
        assert word not in done.logs
        assert word not in texts_of(done.run_dir)
    assert STORY in (done.run_dir / "sites" / RAISER / "site.log").read_text(encoding="utf-8")


LIAR_OF_MANY_TALES = f"""
from client_app import hostile

CASES = list(hostile.DECLARED.values())


def answer(message, context, honest):
    reply = honest(message, context)
    if message.metadata.message_type == "train" and context.node_config["partition-id"] == {SITES.index(BAD)}:
        edit, _ = CASES[int(message.content["config"]["server_round"]) - 1]
        edit(reply.content)
    return reply
"""


def test_every_hostile_reply_is_refused_on_ray_with_the_bits_of_the_silent_site(tmp_path):
    data, rounds = write_data(tmp_path / "data.npz"), len(hostile.DECLARED)
    config = settings(data, tmp_path / "runs", federation__rounds=rounds, federation__timeout_s=120.0)
    done = simulated(copy_app(tmp_path / "app", LIAR_OF_MANY_TALES), config, 4)
    assert done.exit_code == 0, done.logs[-5000:]
    refused = troubles(done.run_dir, "refused")
    assert [(number, site) for number, site, _ in refused] == [(number, BAD) for number in range(1, rounds + 1)]
    for (_, _, reason), (case, (_, expected)) in zip(refused, hostile.DECLARED.items(), strict=True):
        assert re.search(expected, reason), f"{case}: {reason}"
    quiet = run({**config, "federation.timeout_s": 0.02}, {BAD: in_rounds(range(1, rounds + 1), silent)})
    assert state_sha256(done.run_dir) == state_sha256(quiet.run_dir)
    assert run_json(done.run_dir)["model_sha256"] == quiet.model_sha256
