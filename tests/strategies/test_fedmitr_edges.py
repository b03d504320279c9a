"""Edge cases of a job of `fedmitr` (specification, section 10), what it leaves on the disk, what it says meanwhile."""

from __future__ import annotations

import dataclasses
import json
import logging
import stat

import pytest
import torch

from federation import seeding
from federation.files import load_tensors, save_tensors
from models.inversion import advance, start
from strategies import fedmitr_average, fedmitr_generate, fedmitr_progress
from strategies.fedmitr_average import to_score
from strategies.fedmitr_generate import targets_of
from strategies.fedmitr_job import JobError, complete, ensemble_predict, rows, run_job
from strategies.fedmitr_uploads import begin, read_job, spool, spooled, upload_path
from tests.strategies.fedmitr_wards import HOLDS, LABELS, job, pictures, pool_of, settings, sha256, trained


def test_one_upload_is_its_own_ensemble_and_said_so(tmp_path):
    made = job(tmp_path, sites=("east",))
    facts = run_job(tmp_path).facts
    assert "one upload, of east" in facts["warnings"][0]
    images = pictures("val")[0][:4]
    with torch.no_grad():
        alone = made.model(0)(2 * images - 1)
    torch.testing.assert_close(ensemble_predict(tmp_path, images), alone)


def test_a_site_of_one_class_is_not_inverted_and_stays_in_the_ensemble(tmp_path):
    job(tmp_path)
    facts = run_job(tmp_path).facts
    assert any("west: fewer than two classes" in warning for warning in facts["warnings"])
    labels = torch.cat([shard["labels"] for shard in pool_of(tmp_path)])
    assert 8 not in labels  # only west has eights
    assert set(facts["sites"]) == set(HOLDS)
    assert facts["sites"]["west"]["not_inverted"] == "fewer than two classes of 10"
    assert not any("not_inverted" in facts["sites"][site] for site in ("east", "north"))


def test_the_facts_say_how_many_images_each_site_gave_and_on_what_device(tmp_path):
    job(tmp_path)
    facts = run_job(tmp_path).facts
    given = {site: facts["sites"][site]["images"] for site in HOLDS}
    assert given["west"] == 0 and min(given["east"], given["north"]) > 0
    assert sum(given.values()) == facts["images"] == 12 and facts["device"] == "cpu"
    assert "by_site" not in facts  # said once, with the sites
    by_generator = run_job(tmp_path, rows()["dense"], name="dense").facts
    assert not any({"images", "not_inverted"} & set(told) for told in by_generator["sites"].values())


def test_a_class_that_nobody_holds_or_too_rarely_is_never_asked_for(tmp_path):
    made = job(tmp_path, min_class_count=10**6)
    with pytest.raises(JobError, match=r"no site holds a class with 1000000 samples"):
        run_job(tmp_path)
    assert made.counts[:, 9].sum() == 0
    facts = run_job(tmp_path, {"fedmitr.min_class_count": 10}, name="lower").facts
    assert any("9: never asked for" in warning for warning in facts["warnings"])
    assert set(torch.cat([shard["labels"] for shard in pool_of(tmp_path)]).tolist()) <= set(range(8))


def test_suppressed_counts_are_no_targets(tmp_path):
    initial, done = trained()
    for site in ("east", "north"):
        change, its_card = done[site]
        hidden = tuple(-1 if label == 3 else count for label, count in enumerate(its_card.positives))
        spool(tmp_path, type(its_card)(**{**its_card.__dict__, "positives": hidden}), change, its_card.num_train)
    begin(tmp_path, settings(), LABELS, "multiclass", initial)
    run_job(tmp_path)
    assert 3 not in torch.cat([shard["labels"] for shard in pool_of(tmp_path)])


def test_the_last_of_two_uploads_counts_and_a_late_one_is_kept_aside(tmp_path, caplog):
    _, done = trained()
    change, its_card = done["east"]
    with caplog.at_level(logging.WARNING, "flwr"):
        assert spool(tmp_path, its_card, {name: value * 0 for name, value in change.items()}, 7)
        made = job(tmp_path)  # sends east's a second time
        assert not spool(tmp_path, its_card, change, 5)
    assert run_job(tmp_path, {"fedmitr.server": "average"}).facts["late"] == ["east"]
    assert "sent a second upload; the last one counts" in caplog.text
    assert "after the job had begun: kept, not used" in caplog.text
    assert (tmp_path / "late" / "east.safetensors").exists()
    assert made.uploads[0].num_examples == its_card.num_train
    torch.testing.assert_close(made.change(0), {name: value.float() for name, value in change.items()})


def test_a_batch_that_diverges_is_tried_again_then_dropped_and_reported(tmp_path, monkeypatch, caplog):
    job(tmp_path)
    given, calls = fedmitr_generate.finish, []

    def broken(network, state, settings):
        calls.append(state.labels)
        if len(calls) in (1, 2, 3):  # the first batch twice, the second once
            raise FloatingPointError("the inversion's loss was not finite")
        return given(network, state, settings)

    monkeypatch.setattr(fedmitr_generate, "finish", broken)
    with caplog.at_level(logging.WARNING, "flwr"):
        facts = run_job(tmp_path).facts
    assert (facts["images"], facts["dropped"]) == (8, 4)
    assert sum(told["dropped"] for told in facts["sites"].values()) == 4
    assert "dropped: its loss was not finite twice" in caplog.text
    again, plain = pool_of(tmp_path)[1], read_job(tmp_path)
    inversion = plain.options.inversion("half", 1)
    state = start(plain.model(0), again["labels"], inversion, seeding.generator(1, "inversion again", 1, "east"))
    advance(plain.model(0), state, inversion, 99)
    assert torch.equal(given(plain.model(0), state, inversion).images.half(), again["images"])


def test_a_pool_of_nothing_but_diverged_batches_is_an_error(tmp_path, monkeypatch):
    job(tmp_path)

    def broken(*_):
        raise FloatingPointError("not finite")

    monkeypatch.setattr(fedmitr_generate, "finish", broken)
    with pytest.raises(JobError, match=r"lower fedmitr\.inv_lr"):
        run_job(tmp_path)


def test_a_student_that_diverges_is_an_error_with_the_fix(tmp_path):
    job(tmp_path, kd_lr=1e30, kd_clip=1e30)
    with pytest.raises(JobError, match=r"loss is nan.*lower fedmitr\.kd_lr"):
        run_job(tmp_path)


def test_a_damaged_or_absent_upload_is_refused_by_name(tmp_path):
    job(tmp_path)
    path = upload_path(tmp_path, "north")
    tensors, header = load_tensors(path)
    save_tensors(path, {name: value * 2 for name, value in tensors.items()}, header)
    with pytest.raises(JobError, match="the upload of north is another file"):
        run_job(tmp_path)
    path.unlink()
    with pytest.raises(JobError, match="the upload of north is gone"):
        run_job(tmp_path)


def test_multi_label_sites_are_inverted_by_label_vectors(tmp_path):
    job(tmp_path, task="multilabel", sites=("east", "north"))
    facts = run_job(tmp_path).facts
    assert facts["images"] == 12
    labels = torch.cat([shard["labels"] for shard in pool_of(tmp_path)])
    assert labels.shape == (12, 10) and set(labels.unique().tolist()) <= {0, 1}
    assert labels[:, 8:].sum() == 0 and labels[:, :8].sum() > 0
    assert not any("not_inverted" in told for told in facts["sites"].values())
    with pytest.raises(JobError, match="needs one label an image"):
        run_job(tmp_path, rows()["dense"], name="dense")
    with pytest.raises(JobError, match="label_count"):
        run_job(tmp_path, {"fedmitr.ensemble_weight": "label_count"}, name="by_label")


def test_a_label_of_suppressed_counts_is_known_and_absent_in_its_sites_targets(tmp_path):
    initial, done = trained()
    for site in ("east", "north"):
        change, its_card = done[site]
        hidden = {
            name: tuple(-1 if label == 3 else count for label, count in enumerate(getattr(its_card, name)))
            for name in ("positives", "negatives")
        }
        spool(tmp_path, dataclasses.replace(its_card, **hidden), change, its_card.num_train)
    made = begin(tmp_path, settings(), LABELS, "multilabel", initial)
    assert made.counts[:, 3].tolist() == [0, 0] and made.negatives[:, 3].tolist() == [1, 1]
    labels = targets_of(made, made.options.inversion("half", 1)).labels
    assert set(labels[:, 3].tolist()) == {0} and labels[:, 4].sum() > 0


def test_a_multi_label_site_without_a_label_of_enough_samples_is_named(tmp_path):
    job(tmp_path, task="multilabel", sites=("east", "west"), min_class_count=115)
    facts = run_job(tmp_path).facts
    assert facts["sites"]["west"]["not_inverted"] == "no label of 115 samples"
    assert any(text.startswith("west: no label of 115 samples; not inverted") for text in facts["warnings"])


# -- what is left behind ----------------------------------------------------------------------------------------------


def test_the_folder_is_the_servers_alone_and_is_emptied_after_the_model_is_there(tmp_path):
    folder = tmp_path / "job"
    job(folder, keep_synthetic=False)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(not path.stat().st_mode & 0o077 for path in folder.rglob("*") if path.is_file())
    result = complete(folder)
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    run = {f"run/{name}" for name in ("final.safetensors", "result.json", "plan.json", "status.json", "lock")}
    assert left == {"job.json", "average.safetensors", *run}
    assert complete(folder).facts == result.facts  # a second time it is read, not computed
    assert sha256(complete(folder).state) == result.facts["model_sha256"]


def test_a_job_that_cannot_keep_the_average_gives_its_model_all_the_same(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    job(tmp_path, server="kd")
    monkeypatch.setattr(fedmitr_average, "save_tensors", full)
    with caplog.at_level(logging.WARNING, "flwr"):
        result = complete(tmp_path)
    assert sha256(result.state) == result.facts["model_sha256"]
    assert "the plain average is not kept" in caplog.text and "No space left" in caplog.text
    assert to_score(tmp_path) == (None, "the job's folder does not hold it")


def test_the_average_that_is_kept_is_that_of_the_row_average(tmp_path):
    job(tmp_path, server="kd", keep_synthetic=False)
    alone = sha256(read_job(tmp_path).average())
    complete(tmp_path)
    state, reason = to_score(tmp_path)
    assert sha256(state) == alone and reason == ""


def test_with_keep_synthetic_everything_stays(tmp_path):
    job(tmp_path)
    complete(tmp_path)
    assert [upload.site for upload in spooled(tmp_path)] == sorted(HOLDS)
    assert pool_of(tmp_path)


def test_a_final_model_that_is_not_what_was_written_is_not_given_out(tmp_path):
    job(tmp_path, server="average")
    run_job(tmp_path)
    tensors, header = load_tensors(tmp_path / "run" / "final.safetensors")
    save_tensors(tmp_path / "run" / "final.safetensors", {name: value + 1 for name, value in tensors.items()}, header)
    with pytest.raises(JobError, match="is not the model that the job ended with"):
        run_job(tmp_path)


def test_a_folder_without_a_job_says_so(tmp_path):
    with pytest.raises(JobError, match="holds no job"):
        run_job(tmp_path)


# -- progress ---------------------------------------------------------------------------------------------------------


def test_the_status_file_says_where_the_job_is_and_never_shows_an_image(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fedmitr_progress, "STATUS_S", 0.0)
    monkeypatch.setattr(fedmitr_progress, "LOG_S", 0.0)
    monkeypatch.setattr(fedmitr_progress, "ESTIMATE_S", 0.0)
    monkeypatch.setattr(fedmitr_progress, "SLOW_S", 0.0)
    monkeypatch.setattr(fedmitr_generate, "CHUNK_S", 0.0)
    job(tmp_path)
    seen = []

    def look():
        path = tmp_path / "run" / "status.json"
        seen.append(json.loads(path.read_text()))
        return False

    with caplog.at_level(logging.INFO, "flwr"):
        run_job(tmp_path, stop=look)
    by_stage = {stage: [one for one in seen if one["stage"] == stage] for stage in "ABC"}
    assert {"site", "batch", "iteration", "loss", "images_done", "eta_s", "device"} <= set(by_stage["A"][-1])
    assert by_stage["A"][-1]["site"] == "2/3" and by_stage["A"][-1]["loss"] > 0
    assert by_stage["C"][-1]["epochs"] == 2
    shares = [one["share"] for one in by_stage["A"]]
    assert shares == sorted(shares) and shares[-1] <= 1
    assert caplog.text.count("on this CPU stage A takes about") == 1
    assert json.loads((tmp_path / "run" / "status.json").read_text())["stage"] == "done"
