"""FedNCA-ML as a federation: the mean of algorithm 1, what travels, ablations by config alone, and bad input."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from federation import wire
from federation.settings import Settings, SettingsError
from models.fednca import simplex_etf
from server_app import run_folder, runner
from server_app.inprocess import InProcessGrid
from strategies.cards import CardError
from strategies.discovery import QuorumError
from strategies.fednca import FedNCA
from strategies.initial import seeded
from tests.faults.drills import LABELS, SITES, lines_of, run, run_json, settings, write_data

QUICK = {
    "method": "fednca",
    "training__optimizer": "adamw",
    "training__lr": 1e-3,
    "federation__wait_s": 0,
    "data__image_size": 16,  # a map of 2x2 cells: of a single one the attention could choose nothing
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("fednca") / "data.npz")


@pytest.fixture
def config(data, tmp_path):
    """``config(**changes)``: a run config of the method over four tiny sites with three labels; the width is 16."""

    def make(**changes):
        return settings(data, tmp_path / "runs", **{**QUICK, **changes})

    return make


@pytest.fixture(autouse=True)
def quick_export(monkeypatch):
    """The exported program costs more than a tiny run; one test looks at the real one."""
    monkeypatch.setattr("strategies.fednca.export_network", lambda network, **options: b"a program")


@pytest.fixture
def deploy(tmp_path, monkeypatch):
    """``deploy({"north": folder, ...}, **changes)``: hospitals with data of their own, one round."""
    monkeypatch.setattr(run_folder, "BOOTSTRAP_DRAWS", 2)

    def go(sites, **changes):
        quick = {"reporting__tensorboard": False, "model__width": 4, "evaluation__bins": 256}
        quick |= {"federation__rounds": 1, "training__batch_size": 4, **QUICK, **changes}
        parsed = Settings.from_run_config(
            {"reporting.runs_dir": str(tmp_path / "runs"), **{k.replace("__", "."): v for k, v in quick.items()}}
        )
        nodes = [
            {"site": name, "data-root": str(root), "state-dir": str(tmp_path / f"state-{name}")}
            for name, root in sites.items()
        ]
        return runner.run(parsed, InProcessGrid(nodes, parsed.flat()))

    return go


def watching(sites, seen):
    """Faults that only look: every message down and every reply up, ``(site, action, message, reply)``."""

    def look(site):
        def fault(message, answer):
            reply = answer()
            seen.append((site, message.metadata.message_type, message.content, reply.content))
            return reply

        return fault

    return {site: look(site) for site in sites}


def rounds_of(outcome):
    return [line for line in lines_of(outcome.run_dir) if line["kind"] == "round"]


def start_of(run_config):
    """The initial state that the server sends."""
    parsed = Settings.from_run_config(run_config)
    return seeded(lambda: FedNCA(parsed).network(LABELS, "multilabel"), parsed).state_dict()


def mean_of(start, replies, weigh):
    """Plain weighted mean of the changes on the start, in float64; counters take the largest value."""
    weights = [weigh(reply) for reply in replies]
    changes = [wire.tensors(wire.decode(reply["module.model"])) for reply in replies]
    mean = {}
    for name, value in start.items():
        if value.is_floating_point():
            total = sum(w * c[name].double() for w, c in zip(weights, changes, strict=True)) / sum(weights)
            mean[name] = (value.double() + total).float()
        else:
            mean[name] = torch.stack([change[name] for change in changes]).amax(0)
    return mean


# -- the mean ---------------------------------------------------------------------------------------------------------

UNEVEN = {
    "data__num_sites": 2,
    "data__partition": "beta_gamma",
    "data__beta": 0.2,
    "data__gamma": 1.0,
    "data__min_samples": 8,
    "federation__rounds": 1,
}


@pytest.mark.parametrize(
    ("changes", "weigh"),
    [
        ({}, lambda reply: 1),
        ({"federation__weighting": "num_examples"}, lambda reply: 1),  # the runtime's default does not win
        ({"fednca__aggregation": "num_examples"}, lambda reply: reply["metrics"]["num_examples"]),
    ],
    ids=["default", "runtime-weighting", "num_examples"],
)
def test_model_is_the_mean_of_the_two_sites_changes(config, changes, weigh):
    seen, run_config = [], config(**UNEVEN, **changes)
    outcome = run(run_config, watching(("site-00", "site-01"), seen))
    replies = [reply for _, action, _, reply in seen if action == wire.TRAIN]
    sizes = [reply["metrics"]["num_examples"] for reply in replies]
    assert len(replies) == 2 and max(sizes) > 1.2 * min(sizes)  # else both weightings would agree
    start = start_of(run_config)
    found = load_file(outcome.run_dir / "model.safetensors")
    for name, value in mean_of(start, replies, weigh).items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-6)
    (record,) = rounds_of(outcome)
    assert sorted(record["weights"].values()) == sorted(float(weigh(reply)) for reply in replies)


def test_one_client_only_is_its_local_training(config):
    seen, run_config = [], config(data__num_sites=1, federation__min_sites=1, federation__rounds=1)
    outcome = run(run_config, watching(("site-00",), seen))
    (reply,) = [reply for _, action, _, reply in seen if action == wire.TRAIN]
    start = start_of(run_config)
    found = load_file(outcome.run_dir / "model.safetensors")
    for name, value in mean_of(start, [reply], lambda reply: 1).items():
        torch.testing.assert_close(found[name], value, atol=1e-7, rtol=1e-6)


def test_partial_participation_averages_those_that_answered(config):
    """Two of four sites are drawn and one of them is silent in round 1: the mean is over one, not over two."""
    seen, run_config = [], config(federation__sites_per_round=2, federation__min_sites=1, federation__rounds=1)
    faults = watching(SITES, seen)
    drawn = rounds_of(run(run_config, watching(SITES, [])))[0]["accepted"]
    assert len(drawn) == 2

    def silent_in_training(message, answer):
        return None if message.metadata.message_type == wire.TRAIN else answer()

    outcome = run(run_config, {**faults, drawn[1]: silent_in_training})
    (record,) = rounds_of(outcome)
    assert record["accepted"] == [drawn[0]] and [entry["site"] for entry in record["missing"]] == [drawn[1]]
    (reply,) = [reply for _, action, _, reply in seen if action == wire.TRAIN]
    start = start_of(run_config)
    found = load_file(outcome.run_dir / "model.safetensors")
    for name, value in mean_of(start, [reply], lambda reply: 1).items():
        torch.testing.assert_close(found[name], value, atol=1e-7, rtol=1e-6)


# -- what travels -----------------------------------------------------------------------------------------------------


def test_the_etf_is_in_no_message(config):
    seen, run_config = [], config(federation__rounds=2)
    run(run_config, watching(SITES, seen))
    etf = simplex_etf(len(LABELS), 16).numpy().tobytes()
    names, arrays = set(), 0
    for _, _, down, up in seen:
        for content in (down, up):
            for record_name, record in content.array_records.items():
                names |= {f"{record_name}/{name}" for name in record}
                arrays += len(record)
                assert not [name for name, array in record.items() if etf in array.data]
    state = start_of(run_config)
    modules = {name for name in names if name.startswith("module.")}
    assert modules == {f"module.model/{name}" for name in state} and arrays > 100
    assert not [name for name in names if "etf" in name or "prototype" in name or "feature" in name]


def test_site_with_another_etf_is_refused_by_schema_and_the_others_go_on(config, monkeypatch):
    def turned(message, answer):
        with monkeypatch.context() as patch:
            patch.setattr("models.fednca.simplex_etf", lambda classes, dim: -simplex_etf(classes, dim))
            return answer()

    outcome = run(config(federation__rounds=1), {SITES[2]: turned})
    (entry,) = run_json(outcome.run_dir)["outstanding"]
    assert entry["site"] == SITES[2] and entry["reason"].startswith("its schema is [")
    assert "frozen weights differ" in entry["reason"]
    assert rounds_of(outcome)[0]["accepted"] == [SITES[0], SITES[1], SITES[3]]


def test_site_with_another_label_order_or_number_is_refused_with_both_lists(deploy, write_hospital, ward, tmp_path):
    def folder(name, **options):
        return write_hospital(tmp_path / name, [{**row, "owl": 0} for row in ward(name)], **options)

    sites = {name: folder(name) for name in ("east", "north", "west")}
    sites["turned"] = folder("turned", label_columns=("dog", "cat"))
    sites["wide"] = folder("wide", labels=("cat", "dog", "owl"))
    outcome = deploy(sites)
    told = {entry["site"]: entry["reason"] for entry in run_json(outcome.run_dir)["outstanding"]}
    assert told["turned"].startswith("its labels is [dog, cat], the others have [cat, dog]")
    assert told["wide"].startswith("its labels is [cat, dog, owl], the others have [cat, dog]")
    with pytest.raises(CardError, match=r"north: \[cat, dog\]; turned: \[dog, cat\]"):
        deploy({name: sites[name] for name in ("north", "turned")})


# -- numbers in the run folder ----------------------------------------------------------------------------------------


def test_loss_parts_and_collapse_numbers_arrive_in_metrics_jsonl(config):
    lines = lines_of(run(config(federation__rounds=2)).run_dir)
    for record in (line for line in lines if line["kind"] == "round"):
        assert set(record["extra"]) == set(SITES)
        for site, parts in record["extra"].items():
            assert set(parts) == {"bce", "neg", "pos"} and all(math.isfinite(part) for part in parts.values())
            # mean of the epoch's batches, all of one size here: the loss is the sum of its parts at lambda 1
            assert sum(parts.values()) == pytest.approx(record["train_loss"][site], rel=1e-4)
    summaries = [line["summary"] for line in lines if line["kind"] == "evaluation"]
    assert {line["split"] for line in lines if line["kind"] == "evaluation"} == {"val", "test"}
    for summary in summaries:
        assert summary["collapse_labels"] == 3 and summary["collapse_within"] > 0 < summary["collapse_between"]
        assert -1 <= summary["collapse_cosine"] <= 1


def test_collapse_goes_on_while_it_trains(config):
    outcome = run(config(federation__rounds=4, training__epochs=4, training__lr=0.01))
    pooled = [line["summary"] for line in lines_of(outcome.run_dir)
              if line["kind"] == "evaluation" and line["scope"] == "pooled" and line["split"] == "val"]  # fmt: skip
    assert pooled[-1]["collapse_cosine"] > pooled[0]["collapse_cosine"] + 0.1
    assert outcome.metrics["macro_auroc"] > 0.9


# -- ablations by config alone ----------------------------------------------------------------------------------------

ABLATIONS = {
    "linear": {"head": "linear"},
    "etf": {"head": "etf"},
    "etf, trained": {"head": "etf", "etf_trainable": True},
    "ladm without regularisers": {"lambda_neg": 0.0, "lambda_pos": 0.0},
    "ladm and rejection": {"lambda_pos": 0.0},
    "ladm and contrast": {"lambda_neg": 0.0},
    "both": {},
    "random queries": {"queries": "learnable_random"},
    "queries from the etf": {"queries": "learnable_etf_init"},
    "trained etf": {"etf_trainable": True},
    "no position": {"position": False},
    "paper's head": {"logit_scale_init": 1.0, "learnable_scale": False, "use_bias": False},
    "normalised head": {"head_normalize": True},
    "paper's rejection": {"rejection": "nonself_sum"},
    "all negatives": {"rejection_select": "all"},
    "random negatives": {"rejection_select": "random"},
    "cosine": {"contrast": "cosine"},
    "squared distance": {"contrast": "squared_l2"},
    "published schedule": {"lr_schedule": "official_restart"},
}
HASHES: dict[str, str] = {}


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablation_runs_by_config_alone(config, name):
    changes = {f"fednca__{key}": value for key, value in ABLATIONS[name].items()}
    outcome = run(config(federation__rounds=1, **changes))
    state = load_file(outcome.run_dir / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in state.values())
    (record,) = rounds_of(outcome)
    parts = {key: sum(site[key] for site in record["extra"].values()) for key in ("bce", "neg", "pos")}
    has_features = ABLATIONS[name].get("head", "ladm") == "ladm"
    assert record["accepted"] == list(SITES) and parts["bce"] > 0
    assert (parts["neg"] > 0, parts["pos"] > 0) == (has_features, has_features)
    exports = has_features and "head_normalize" not in ABLATIONS[name]
    assert (outcome.run_dir / "inference.pt2").exists() == exports
    assert outcome.model_sha256 not in HASHES.values()  # the switch does something
    HASHES[name] = outcome.model_sha256


def test_exported_program_gives_the_models_scores_without_this_code(config, monkeypatch):
    monkeypatch.undo()
    outcome = run(config(federation__rounds=1))
    extra = {"model.json": ""}
    program = torch.export.load(str(outcome.run_dir / "inference.pt2"), extra_files=extra).module()
    images = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    found = program(images)
    network = FedNCA(Settings.from_run_config(config())).network(LABELS, "multilabel")
    network.load_state_dict(load_file(outcome.run_dir / "model.safetensors"), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(found["probabilities"], network.eval()(images).sigmoid(), atol=1e-5, rtol=1e-4)
    assert json.loads(extra["model.json"])["labels"] == list(LABELS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"queries": "learnable_random", "head": "etf"}, r"queries = 'learnable_random' needs fednca.head = 'ladm'"),
        ({"etf_trainable": True, "head": "linear"}, r"etf_trainable = true needs a head with an ETF"),
        ({"num_heads": 3}, r"num_heads = 3 does not divide the width 16 of small_cnn; use 4"),
        ({"backbone": "resnet19"}, r"fednca.backbone = 'resnet19': no backbone 'resnet19'; there are small_cnn"),
        ({"tau": 1.0}, r"fednca.tau = 1.0"),
    ],
)
def test_options_that_make_no_network_are_refused_before_anything_runs(config, tmp_path, changes, reason):
    with pytest.raises(SettingsError, match=reason):
        run(config(**{f"fednca__{key}": value for key, value in changes.items()}))
    assert not (tmp_path / "runs").exists()


SGD = {"training__optimizer": "sgd", "training__lr": 0.05}


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, True),  # the preset of the other methods
        ({"training__lr": 0.005}, True),
        ({"training__lr": 0.002}, False),
        ({"training__lr": 0.01, "training__momentum": 0.0}, False),  # as long a step as 0.001 with momentum
        ({"fednca__head": "etf"}, True),
        ({"fednca__head": "linear"}, False),
        ({"training__optimizer": "adamw"}, False),
    ],
    ids=str,
)
def test_sgd_at_a_rate_that_diverges_is_refused_with_one_that_does_not(config, changes, refused):
    run_config = config(**{**SGD, **changes})
    if not refused:
        Settings.from_run_config(run_config)
        return
    with pytest.raises(SettingsError, match=r"sum over the labels .*'adamw' with training.lr = 0.001") as error:
        Settings.from_run_config(run_config)
    assert len(error.value.problems) == 1


# -- ImageNet's statistics --------------------------------------------------------------------------------------------


def test_sites_train_and_measure_on_the_statistics_of_the_run(config):
    runs = {
        name: run(config(data__channels=3, model__normalise=name, federation__rounds=1))
        for name in ("half", "imagenet")
    }
    assert runs["half"].model_sha256 != runs["imagenet"].model_sha256
    assert runs["half"].metrics["loss"] != runs["imagenet"].metrics["loss"]
    assert run_json(runs["imagenet"].run_dir)["settings"]["model"]["normalise"] == "imagenet"


@pytest.mark.parametrize(("normalise", "warnings"), [("half", 1), ("imagenet", 0)])
def test_given_weights_on_other_statistics_are_used_with_a_warning(config, monkeypatch, tmp_path, normalise, warnings):
    said = []
    monkeypatch.setattr("strategies.initial.log", lambda level, text: said.append(text))
    start = start_of(config(data__channels=3))
    weights = {name.removeprefix("backbone."): value + 1 for name, value in start.items() if "backbone" in name}
    save_file(weights, tmp_path / "weights.safetensors")
    path = str(tmp_path / "weights.safetensors")
    state = start_of(config(data__channels=3, model__weights=path, model__normalise=normalise))
    assert all(torch.equal(state[f"backbone.{name}"], value) for name, value in weights.items())
    assert len(said) == warnings and all("model.normalise = 'imagenet'" in text for text in said)


# -- the same bits ----------------------------------------------------------------------------------------------------


def dying(server_round):
    def fault(message, answer):
        if message.metadata.message_type == wire.TRAIN and message.content["config"]["server_round"] >= server_round:
            raise SystemExit(1)
        return answer()

    return dict.fromkeys(SITES, fault)


def test_same_seed_same_hash_and_a_stopped_run_goes_on_to_it(config, tmp_path):
    random = {"fednca__rejection_select": "random"}
    whole, again = (run(config(reporting__runs_dir=str(tmp_path / name), **random)) for name in ("one", "two"))
    assert whole.model_sha256 == again.model_sha256 and whole.metrics == again.metrics
    assert run(config(seed=2, reporting__runs_dir=str(tmp_path / "three"), **random)).model_sha256 != whole.model_sha256
    with pytest.raises(QuorumError, match="round 2: 0 usable replies"):
        run(config(**random), dying(2))
    (stopped,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir() and not path.name.startswith("."))
    resumed = run(config(resume=str(stopped), **random))
    assert resumed.model_sha256 == whole.model_sha256 and resumed.metrics == whole.metrics
    assert lines_of(stopped) == lines_of(whole.run_dir)


# -- labels -----------------------------------------------------------------------------------------------------------


def hospitals(write_hospital, tmp_path, rows_of_site, labels=("cat", "dog")):
    return {name: write_hospital(tmp_path / name, rows, labels) for name, rows in rows_of_site.items()}


def test_class_missing_at_a_site_and_at_all_sites(deploy, write_hospital, ward, tmp_path):
    labels = ("cat", "dog", "owl")
    rows = {
        "north": [{**row, "owl": 0} for row in ward("north")],
        "south": [{**row, "owl": 0, "dog": 0} for row in ward("south")],
    }
    outcome = deploy(hospitals(write_hospital, tmp_path, rows, labels))
    told = run_json(outcome.run_dir)
    assert told["warnings"] == ["label 'owl' has no training positive at any site: nothing can be learnt of it"]
    by_label = {row["label"]: row for row in outcome.metrics["per_class"]}
    assert by_label["owl"]["auroc"] is None and by_label["dog"]["auroc"] is not None
    assert all(math.isfinite(part) for site in rounds_of(outcome)[0]["extra"].values() for part in site.values())


def test_unknown_labels_of_one_site_leave_the_others_their_say(deploy, write_hospital, ward, tmp_path):
    rows = {"north": ward("north"), "south": [{**row, "dog": "nan"} for row in ward("south")]}
    rows["empty"] = [{**row, "dog": "", "cat": -1} for row in ward("empty")]
    outcome = deploy(hospitals(write_hospital, tmp_path, rows))
    (record,) = rounds_of(outcome)
    assert record["accepted"] == ["north", "south"] and record["weights"] == {"north": 1.0, "south": 1.0}
    assert all(np.isfinite(list(parts.values())).all() for parts in record["extra"].values())
    assert {site["site"]: site["num_train"] for site in run_json(outcome.run_dir)["sites"]}["empty"] == 0


def test_label_that_is_neither_0_nor_1_is_refused_at_its_site_with_the_row(deploy, write_hospital, ward, tmp_path):
    rows = {name: ward(name) for name in ("north", "south", "wrong")}
    rows["wrong"][2]["dog"] = 0.5
    outcome = deploy(hospitals(write_hospital, tmp_path, rows))
    (entry,) = run_json(outcome.run_dir)["outstanding"]
    assert entry["reason"] == "E-DATA: the site's data cannot be used"
    (log,) = (tmp_path / "state-wrong").glob("*/site.log")
    assert "row 4" in log.read_text() and "dog" in log.read_text()


def test_empty_site_and_site_of_one_sample(deploy, write_hospital, ward, tmp_path):
    rows = {"north": ward("north"), "single": ward("single", train=1), "empty": ward("empty", train=0)}
    outcome = deploy(hospitals(write_hospital, tmp_path, rows))
    (record,) = rounds_of(outcome)
    assert record["accepted"] == ["north", "single"] and not record["refused"] and not record["missing"]
    assert [row["site"] for row in outcome.metrics["per_site"]] == ["empty", "north", "single"]


@pytest.mark.parametrize("value", [0, 1])
def test_all_zero_and_all_positive_batches(deploy, write_hospital, ward, tmp_path, value):
    alike = [{**row, "cat": value, "dog": value} if row["split"] == "train" else row for row in ward("alike")]
    outcome = deploy(hospitals(write_hospital, tmp_path, {"north": ward("north"), "alike": alike}))
    parts = rounds_of(outcome)[0]["extra"]["alike"]
    assert parts["neg"] == 0 and (parts["pos"] > 0) is bool(value) and math.isfinite(parts["bce"])


def test_batches_of_one_sample(deploy, write_hospital, ward, tmp_path):
    rows = {name: ward(name, train=3) for name in ("north", "south")}
    outcome = deploy(hospitals(write_hospital, tmp_path, rows), training__batch_size=1, model__norm="group")
    assert rounds_of(outcome)[0]["accepted"] == ["north", "south"]


@pytest.mark.parametrize("count", [1, 17])
def test_label_list_without_room_in_the_etf_is_refused_before_round_1(deploy, write_hospital, ward, tmp_path, count):
    labels = tuple(f"l{number:02d}" for number in range(count))
    rows = {
        name: [{**row, **{label: (i + j) % 2 for j, label in enumerate(labels)}} for i, row in enumerate(ward(name))]
        for name in ("north", "south")
    }
    sites = hospitals(write_hospital, tmp_path, rows, labels)
    with pytest.raises(ValueError, match=f"needs 2 <= classes <= width, got {count} classes and width 16"):
        deploy(sites)
    assert not list((tmp_path / "runs").glob("*/metrics.jsonl"))
    with pytest.raises(SettingsError, match=rf"data.labels names {count} labels?, the ETF .* room for 2 to 16"):
        deploy(sites, data__labels=",".join(labels))
    assert deploy(sites, fednca__head="linear").metrics["num_examples"] == 8  # no ETF, so no bounds


def test_update_of_a_site_that_diverged_is_left_out(config):
    def poison(message, answer):
        reply = answer()
        if message.metadata.message_type == wire.TRAIN:
            arrays = {name: value.copy() for name, value in wire.decode(reply.content["module.model"]).items()}
            arrays["head.logit_scale"][...] = np.nan
            reply.content["module.model"] = wire.encode(arrays)
        return reply

    outcome = run(config(federation__rounds=1), {SITES[1]: poison})
    (record,) = rounds_of(outcome)
    assert [entry["site"] for entry in record["refused"]] == [SITES[1]] and len(record["accepted"]) == 3
    assert all(torch.isfinite(value).all() for value in load_file(outcome.run_dir / "model.safetensors").values())
