"""FedMITR's round on the server: what is asked of whom, what is on the disk when, and what a resumed run asks again."""

from __future__ import annotations

import json
import logging
import shutil
from types import SimpleNamespace

import pytest
import torch

from federation import wire
from federation.files import load_tensors
from federation.settings import Settings, SettingsError
from models.fedmitr_networks import build_vit
from server_app import checkpoint, fedmitr, inprocess, run_folder
from strategies import fedmitr as strategy_file
from strategies.cards import CardError
from strategies.fedmitr import FedMITR
from strategies.fedmitr_job import job_folder, run_job
from strategies.fedmitr_progress import JobStopped
from strategies.fedmitr_uploads import has_begun, read_job, spooled, upload_path
from tests.strategies.fedmitr_wards import TINY, job

ROUND = {
    **TINY,
    "data.partition": "dirichlet",
    "data.num_sites": 3,
    "training.lr": 0.02,
    "training.threads": 1,
    "fedmitr.server": "average",
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """``config(**changes)``: a tiny federation of three hospitals as a run config; bare keys are the method's own."""
    monkeypatch.setattr(run_folder, "BOOTSTRAP_DRAWS", 10)

    def make(**changes):
        dotted = {
            (key if "__" in key else f"fedmitr__{key}").replace("__", "."): value for key, value in changes.items()
        }
        return {**ROUND, "reporting.runs_dir": str(tmp_path / "runs"), **dotted}

    return make


def folder_of(config, outcome):
    return job_folder(Settings.from_run_config(config), outcome.run_dir.name)


def problems(**changes):
    with pytest.raises(SettingsError) as found:
        Settings.from_run_config({**TINY, **{key.replace("__", "."): value for key, value in changes.items()}})
    return found.value.problems


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"federation__rounds": 2}, ("federation.rounds = 2", "use 1")),
        ({"privacy__secure_sum": True}, ("inverts each site's model", "in the clear")),
        ({"federation__norm_bound": 1.0}, ("not scaled", "use 0")),
        ({"model__weights": "w.safetensors"}, ("fedmitr.init_weights",)),
        ({"data__image_size": 18}, ("data.image_size = 18",)),
        ({"fedmitr__model": "swin_tiny_patch4_window7_224"}, ("swin_tiny",)),
        ({"fedmitr__stops": "3,4"}, ("stops increase by at least 2",)),
        ({"fedmitr__stops": "3"}, ("1 stops and 2 ratios",)),
        ({"fedmitr__stops": "3,soon"}, ("'soon'",)),
        ({"fedmitr__ratios": "0.3,1.0"}, ("ratios are from 0 to below 1",)),
        ({"fedmitr__inv_iters": 5}, ("must come before inv_iters=5",)),
        ({"fedmitr__rebirth": True}, ("freeze_stopped",)),
    ],
)
def test_contradictions_are_refused_before_any_site_is_asked(changes, words):
    found = "\n".join(problems(**changes))
    assert all(word in found for word in words), found


def test_dense_inversion_needs_no_schedule():
    settings = Settings.from_run_config({**TINY, "fedmitr.server": "dense_inversion"})
    assert settings.options.inversion("half", 1).stops == ()


def test_a_schedule_that_leaves_too_few_patches_is_warned_of(caplog):
    settings = Settings.from_run_config({**TINY, "fedmitr.ratios": "0.7,0.7"})
    with caplog.at_level(logging.WARNING, "flwr"):
        FedMITR(settings).summary()
    assert "only 1 of 16 patches are left after the last stop" in caplog.text


def test_tasks_that_a_baseline_has_no_loss_for_are_refused_before_training():
    cards = tuple(SimpleNamespace(positives=(20, 20), num_train=40) for _ in range(2))
    strategy = FedMITR(Settings.from_run_config({**TINY, "fedmitr.server": "dense"}))
    strategy.table = SimpleNamespace(trainable=cards)
    with pytest.raises(CardError, match="needs one label an image"):
        strategy.network(("a", "b"), "multilabel")
    assert strategy.network(("a", "b"), "multiclass").num_classes == 2
    strategy.table = SimpleNamespace(trainable=(SimpleNamespace(positives=(-1, 3)),))
    with pytest.raises(CardError, match="no site holds a class with 10 samples"):
        strategy.network(("a", "b"), "multiclass")


def test_the_state_folder_may_be_elsewhere(tmp_path):
    settings = Settings.from_run_config({**TINY, "fedmitr.state_dir": str(tmp_path)})
    assert job_folder(settings, "exp") == tmp_path / "exp"


# -- the round --------------------------------------------------------------------------------------------------------


def test_the_run_is_one_round_whose_model_is_the_jobs(config):
    given = config()
    outcome = inprocess.run(given)
    folder = folder_of(given, outcome)
    made = read_job(folder)
    assert [upload.site for upload in made.uploads] == ["site-00", "site-01", "site-02"]
    assert outcome.model_sha256 == run_job(folder).facts["model_sha256"]
    run = json.loads((outcome.run_dir / "fedmitr.json").read_text())
    assert run["is_average"] and run["sites"]["site-00"]["epsilon"] == -1.0
    # What a site sent is its change in float16, as its reply declared.
    tensors = made.change(0)
    network = build_vit(made.options, num_labels=10, image_size=16, channels=1)
    assert {name: value.shape for name, value in tensors.items()} == {
        name: value.shape for name, value in network.state_dict().items()
    }


def test_uploads_and_images_are_gone_after_the_run_unless_they_are_kept(config):
    given = config(keep_synthetic=False, server="fedmitr", pool_size=8, kd_epochs=1)
    outcome = inprocess.run(given)
    folder = folder_of(given, outcome)
    assert not list(folder.rglob("shard-*")) and not list(folder.rglob("site-*"))
    assert (folder / "run" / "final.safetensors").exists()
    report = (outcome.run_dir / "report.html").read_text(encoding="utf-8").partition("The server&#39;s job")[2]
    assert "8 synthetic images" in report and "were deleted when the model had been read back" in report
    assert wire.state_sha256({"model": run_job(folder).state}) == outcome.model_sha256


def test_a_multi_label_task_is_inverted_and_distilled(config):
    changes = {"data__root": "digits-mosaic", "data__partition": "beta_gamma", "pool_size": 8, "kd_epochs": 1}
    given = config(server="fedmitr", **changes)
    outcome = inprocess.run(given)
    (pool,) = folder_of(given, outcome).glob("pool-*")
    labels = torch.cat([load_tensors(shard)[0]["labels"] for shard in sorted(pool.glob("shard-*"))])
    assert labels.shape == (8, 10) and labels.max() == 1
    assert not json.loads((outcome.run_dir / "fedmitr.json").read_text())["is_average"]


def test_a_site_that_is_missing_or_sends_nan_is_left_out_and_named(config):
    def silent(message, answer):
        return None if message.metadata.message_type == wire.TRAIN else answer()

    def poisoned(message, answer):
        reply = answer()
        if message.metadata.message_type == wire.TRAIN:
            arrays = wire.tensors(wire.decode(reply.content["module.model"]))
            reply.content["module.model"] = wire.encode({name: value * torch.nan for name, value in arrays.items()})
        return reply

    def larger(message, answer):
        reply = answer()
        if message.metadata.message_type == wire.TRAIN:
            arrays = wire.decode(reply.content["module.model"])
            reply.content["module.model"] = wire.encode({**arrays, "head.bias": arrays["head.bias"].repeat(2)})
        return reply

    given = config(federation__min_sites=1, federation__timeout_s=2.0, data__num_sites=4)
    outcome = inprocess.run(given, faults={"site-00": silent, "site-02": poisoned, "site-03": larger})
    folder = folder_of(given, outcome)
    assert [upload.site for upload in spooled(folder)] == ["site-01"] == list(read_job(folder).weights)
    rounds = [json.loads(line) for line in (outcome.run_dir / "metrics.jsonl").read_text().splitlines()]
    (record,) = [line for line in rounds if line["kind"] == "round"]
    assert [entry["site"] for entry in record["missing"]] == ["site-00"]
    reasons = {entry["site"]: entry["reason"] for entry in record["refused"]}
    assert "no finite norm" in reasons["site-02"] and "head.bias" in reasons["site-03"]


# -- beside the plain average -----------------------------------------------------------------------------------------


def scored(monkeypatch):
    """Site and SHA-256 of the model of every evaluation message that is sent, in order."""
    seen = []
    given = FedMITR._message

    def message(self, action, card, *arguments):
        made = given(self, action, card, *arguments)
        if action == wire.EVALUATE:
            arrays = wire.tensors(wire.decode(made.content["module.model"]))
            seen.append((card.site, made.content["config"]["evaluate"], wire.state_sha256({"model": arrays})))
        return made

    monkeypatch.setattr(FedMITR, "_message", message)
    return seen


def average_of(outcome):
    return json.loads((outcome.run_dir / "plain_average.json").read_text())


def test_the_plain_average_is_scored_on_the_test_samples_of_the_same_sites(config, monkeypatch):
    plain = inprocess.run(config())  # fedmitr.server = average
    sent = scored(monkeypatch)
    given = config(server="kd", pool_size=8, kd_epochs=1, keep_synthetic=False)
    outcome = inprocess.run(given)
    assert outcome.model_sha256 != plain.model_sha256
    sites = ["site-00", "site-01", "site-02"]
    assert sent[-3:] == [(site, "test", plain.model_sha256) for site in sites]  # one message more a site, at the end
    assert [(site, split) for site, split, _ in sent[:-3]] == [(s, split) for split in ("val", "test") for s in sites]
    assert {model for _, _, model in sent[:-3]} == {outcome.model_sha256}
    figures = average_of(outcome)["figures"]
    assert set(figures) == {"pooled", *sites}
    for name, (final, average) in figures["pooled"].items():
        assert (final, average) == (outcome.metrics[name], plain.metrics[name])
    report = (outcome.run_dir / "report.html").read_text(encoding="utf-8")
    assert "Beside the plain average of the uploads" in report
    run = json.loads((outcome.run_dir / "run.json").read_text())
    assert run["final"]["test"]["summary"]["accuracy"] == outcome.metrics["accuracy"]
    assert run["model_sha256"] == outcome.model_sha256


def test_nothing_of_the_result_depends_on_the_average_being_scored(config, monkeypatch):
    changes = {"server": "kd", "pool_size": 8, "kd_epochs": 1}
    outcome = inprocess.run(config(**changes))
    sent = scored(monkeypatch)
    without = inprocess.run(config(**changes, score_average=False))
    assert (without.model_sha256, without.metrics) == (outcome.model_sha256, outcome.metrics)
    assert {model for _, _, model in sent} == {without.model_sha256}
    assert average_of(without) == {"not_scored": "fedmitr.score_average is false"}


@pytest.mark.parametrize("sites", [1, 2])
def test_an_average_that_gives_a_model_away_goes_to_no_site(config, monkeypatch, sites):
    """Who has its own upload and the average of two has the other's."""
    sent = scored(monkeypatch)
    given = config(data__num_sites=sites, federation__min_sites=1, server="kd", pool_size=8, kd_epochs=1)
    outcome = inprocess.run(given)
    assert {model for _, _, model in sent} == {outcome.model_sha256}
    assert "fewer than 3 uploads" in average_of(outcome)["not_scored"]
    assert not list(folder_of(given, outcome).rglob("average.safetensors"))
    assert "fewer than 3 uploads" in (outcome.run_dir / "report.html").read_text(encoding="utf-8")


def test_where_the_average_is_the_result_it_is_not_scored_twice(config, monkeypatch):
    sent = scored(monkeypatch)
    outcome = inprocess.run(config())
    assert len(sent) == 6 and average_of(outcome) == {"not_scored": "the final model is that average"}


def test_a_site_that_does_not_score_the_average_leaves_the_result_as_it_is(config):
    asked = []

    def tired(message, answer):
        if message.metadata.message_type == wire.EVALUATE:
            asked.append(message)
            if len(asked) == 3:
                return None
        return answer()

    changes = {"server": "kd", "pool_size": 8, "kd_epochs": 1}
    given = config(**changes, federation__timeout_s=2.0, federation__min_sites=1)
    outcome = inprocess.run(given, faults={"site-01": tired})
    assert outcome.metrics["num_examples"] == inprocess.run(config(**changes)).metrics["num_examples"]
    assert set(average_of(outcome)["figures"]) == {"site-00", "site-02"}  # no sum over other sites
    outstanding = json.loads((outcome.run_dir / "run.json").read_text())["outstanding"]
    assert [(entry["site"], entry["reason"].partition(":")[0]) for entry in outstanding] == [
        ("site-01", "plain average scores")
    ]


def test_a_run_that_was_killed_after_its_round_still_scores_the_average(config, monkeypatch, tmp_path):
    given = config(server="kd", pool_size=8, kd_epochs=1, keep_synthetic=False)
    whole = inprocess.run(given)
    real = FedMITR._finish

    def killed(self, *_):
        raise JobStopped("killed")

    monkeypatch.setattr(FedMITR, "_finish", killed)
    with pytest.raises(JobStopped):
        inprocess.run(given)
    monkeypatch.setattr(FedMITR, "_finish", real)
    (cut,) = [path for path in (tmp_path / "runs").glob("*-fedmitr*") if path != whole.run_dir]
    assert not list((cut / "job").rglob("site-*"))  # the uploads are gone
    resumed = inprocess.run({**given, "resume": str(cut)})
    assert (resumed.model_sha256, resumed.metrics) == (whole.model_sha256, whole.metrics)
    assert average_of(resumed) == average_of(whole)


def test_a_run_whose_job_folder_is_gone_ends_without_the_average(config, monkeypatch):
    real = strategy_file.to_score

    def gone(folder):
        shutil.rmtree(folder)
        return real(folder)

    monkeypatch.setattr(strategy_file, "to_score", gone)
    outcome = inprocess.run(config(server="kd", pool_size=8, kd_epochs=1))
    assert average_of(outcome) == {"not_scored": "the job's folder does not hold it"}


# -- resume -----------------------------------------------------------------------------------------------------------


def asked(monkeypatch):
    """Sites that get a training message, in order."""
    sites = []
    given = FedMITR.configure_train

    def configure_train(self, *arguments):
        for message in given(self, *arguments):
            if message.metadata.message_type == wire.TRAIN:
                sites.append(self._sent[message.metadata.dst_node_id].card.site)
            yield message

    monkeypatch.setattr(FedMITR, "configure_train", configure_train)
    return sites


def test_a_run_that_was_killed_in_its_job_asks_no_site_again(config, monkeypatch, tmp_path):
    given = config(server="kd", pool_size=8, kd_epochs=2)
    whole = inprocess.run(given)
    real = strategy_file.complete

    def killed(folder, stop):
        steps = iter(range(5))
        run_job(folder, stop=lambda: next(steps, 5) == 4)

    monkeypatch.setattr(strategy_file, "complete", killed)
    with pytest.raises(JobStopped):
        inprocess.run(given)
    monkeypatch.setattr(strategy_file, "complete", real)
    (cut,) = [path for path in (tmp_path / "runs").glob("*-fedmitr*") if path != whole.run_dir]
    assert has_begun(cut / "job") and checkpoint.load_checkpoint(cut)[0].server_round == 0
    sites = asked(monkeypatch)
    resumed = inprocess.run({**given, "resume": str(cut)})
    assert sites == []
    assert resumed.model_sha256 == whole.model_sha256
    assert resumed.metrics["accuracy"] == whole.metrics["accuracy"]
    lines = [json.loads(line) for line in (cut / "metrics.jsonl").read_text().splitlines()]
    (record,) = [line for line in lines if line["kind"] == "round"]
    assert record["accepted"] == ["site-00", "site-01", "site-02"]
    assert set(record["extra"]) == set(record["accepted"])


def test_a_run_that_was_killed_in_its_job_still_names_the_sites_that_it_went_on_without(config, monkeypatch, tmp_path):
    def silent(message, answer):
        return None if message.metadata.message_type == wire.TRAIN else answer()

    real = strategy_file.complete

    def killed(folder, stop):
        raise JobStopped("killed")

    given = config(federation__min_sites=1, federation__timeout_s=2.0)
    monkeypatch.setattr(strategy_file, "complete", killed)
    with pytest.raises(JobStopped):
        inprocess.run(given, faults={"site-01": silent})
    monkeypatch.setattr(strategy_file, "complete", real)
    (cut,) = (tmp_path / "runs").glob("*-fedmitr*")
    inprocess.run({**given, "resume": str(cut)})
    lines = [json.loads(line) for line in (cut / "metrics.jsonl").read_text().splitlines()]
    (record,) = [line for line in lines if line["kind"] == "round"]
    assert record["accepted"] == ["site-00", "site-02"]
    assert [entry["site"] for entry in record["missing"]] == ["site-01"]


def test_a_run_that_was_killed_while_uploads_came_asks_the_others_only(config, monkeypatch, tmp_path):
    given = config()
    whole = inprocess.run(given)
    real = strategy_file.spool

    def full(folder, card, *arguments):
        if card.site == "site-02":
            raise OSError(28, "No space left on device")
        return real(folder, card, *arguments)

    monkeypatch.setattr(strategy_file, "spool", full)
    with pytest.raises(OSError, match="No space left"):
        inprocess.run(given)
    monkeypatch.setattr(strategy_file, "spool", real)
    (cut,) = [path for path in (tmp_path / "runs").glob("*-fedmitr*") if path != whole.run_dir]
    assert [upload.site for upload in spooled(cut / "job")] == ["site-00", "site-01"]
    sites = asked(monkeypatch)
    resumed = inprocess.run({**given, "resume": str(cut)})
    assert sites == ["site-02"]
    assert resumed.model_sha256 == whole.model_sha256


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_runs_a_job_and_says_where_it_stands(tmp_path, capsys):
    job(tmp_path, server="average")
    assert fedmitr.main([str(tmp_path), "--status"]) == 0
    assert "3 uploads, not begun" in capsys.readouterr().out
    assert fedmitr.main([str(tmp_path)]) == 0
    assert run_job(tmp_path).facts["model_sha256"] in capsys.readouterr().out
    assert fedmitr.main([str(tmp_path), "--status"]) == 0
    assert "stage: done" in capsys.readouterr().out


def test_the_command_refuses_a_folder_without_a_job(tmp_path, capsys):
    assert fedmitr.main([str(tmp_path)]) == 1
    assert "holds no job" in capsys.readouterr().err


def test_a_preview_needs_leave_and_is_recorded(tmp_path, capsys):
    job(tmp_path / "closed", pool_size=8, kd_epochs=1)
    assert fedmitr.main([str(tmp_path / "closed"), "--preview", str(tmp_path / "x.png")]) == 1
    assert "allow_preview is false" in capsys.readouterr().err
    job(tmp_path / "open", pool_size=8, kd_epochs=1, allow_preview=True)
    assert fedmitr.main([str(tmp_path / "open"), "--preview", str(tmp_path / "x.png")]) == 1
    assert "holds no synthetic images" in capsys.readouterr().err
    assert fedmitr.main([str(tmp_path / "open")]) == 0
    for _ in range(2):
        assert fedmitr.main([str(tmp_path / "open"), "--preview", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    notes = [json.loads(line) for line in (tmp_path / "open" / "audit.jsonl").read_text().splitlines()]
    assert [note["images"] for note in notes] == [8, 8]


def test_an_upload_is_a_file_before_the_next_reply_is_pulled(config, monkeypatch, tmp_path):
    """The replies' bytes do not pile up: when a site is folded, those before it are on the disk."""
    seen = []
    real = FedMITR._fold

    def fold(self, mean, reply):
        seen.append([upload.site for upload in spooled(self._folder)])
        assert upload_path(self._folder, reply.site).exists()
        real(self, mean, reply)

    monkeypatch.setattr(FedMITR, "_fold", fold)
    inprocess.run(config())
    assert seen == [["site-00"], ["site-00", "site-01"], ["site-00", "site-01", "site-02"]]
