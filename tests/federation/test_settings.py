"""The door of a run: everything wrong is named at once, everything right has one default."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from pydantic import Field, ValidationError

from federation import registry
from federation.registry import register
from federation.settings import AREAS, MethodArea, Settings, SettingsError, flatten, names_in

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def problems_of(run_config):
    with pytest.raises(SettingsError) as caught:
        Settings.from_run_config(run_config)
    return caught.value.problems


def test_every_problem_is_reported_at_once_with_key_value_range_and_default():
    problems = problems_of(
        {"federation.rounds": 0, "training.lr": -0.5, "model.name": "resnet99", "training.batchsize": 8, "seed": -3}
    )
    assert len(problems) == 5
    text = {line.split(" = ")[0]: line for line in problems}
    assert text["federation.rounds"].startswith("federation.rounds = 0: ")
    assert "greater than or equal to 1" in text["federation.rounds"] and "default is 10" in text["federation.rounds"]
    assert "-0.5" in text["training.lr"] and "greater than 0" in text["training.lr"]
    assert "'small_cnn' or 'resnet18'" in text["model.name"] and "'resnet99'" in text["model.name"]
    assert "did you mean training.batch_size?" in text["training.batchsize"]
    assert "-3" in text["seed"]


def test_the_message_counts_the_problems_and_holds_each():
    with pytest.raises(SettingsError, match="2 problems in the run config:") as caught:
        Settings.from_run_config({"federation.rounds": 0, "training.lr": 0})
    assert all(problem in str(caught.value) for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("training.learning_rate", "training."),
        ("federation.round", "federation.rounds"),
        ("trainig.lr", "training.lr"),
        ("sed", "seed"),
        ("data.num_site", "data.num_sites"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_known_one(key, nearest):
    (problem,) = problems_of({key: 1})
    assert problem.startswith(f"{key} = 1: unknown key") and f"did you mean {nearest}" in problem


def test_unknown_key_like_no_other_points_to_the_file_with_all_keys():
    assert problems_of({"zzzzqqqq": "x"}) == ("zzzzqqqq = 'x': unknown key; see pyproject.toml",)


def test_unknown_method_lists_those_there_are_and_does_not_hide_other_problems():
    problems = problems_of({"method": "fedavgg", "training.lr": 0})
    assert len(problems) == 2
    assert all(name in problems[0] for name in ("fedavg", "fedprox", "package.module:Name"))


CONTRADICTIONS = {
    "fewer sites drawn than needed": (
        {"federation.sites_per_round": 2, "federation.min_sites": 3},
        ["federation.sites_per_round = 2", "federation.min_sites = 3"],
    ),
    "fewer sites made than needed": (
        {"data.num_sites": 2, "federation.min_sites": 3},
        ["data.num_sites = 2", "federation.min_sites = 3"],
    ),
    "more sites drawn than made": (
        {"federation.sites_per_round": 9, "data.num_sites": 5},
        ["federation.sites_per_round = 9", "data.num_sites = 5"],
    ),
    "embedded data has no real sites": ({"data.partition": "by_site"}, ["by_site", "digits-mosaic"]),
    "dirichlet over mosaics": ({"data.partition": "dirichlet"}, ["dirichlet", "beta_gamma"]),
    "mixed precision on a CPU": (
        {"training.device": "cpu", "training.precision": "auto"},
        ["training.precision", "training.device"],
    ),
    "ImageNet statistics on grey images": ({"model.normalise": "imagenet"}, ["model.normalise", "data.channels = 1"]),
    "misspelt selection metric": ({"evaluation.selection_metric": "macro_aurok"}, ["macro_aurok", "'macro_auroc'"]),
    "scaffold needs plain steps": ({"method": "scaffold", "training.optimizer": "adamw"}, ["scaffold", "adamw", "sgd"]),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradiction_names_both_fields(name):
    run_config, words = CONTRADICTIONS[name]
    (problem,) = problems_of(run_config)
    assert all(word in problem for word in words)


def test_two_contradictions_are_reported_together():
    assert len(problems_of({"data.partition": "by_site", "evaluation.selection_metric": "nothing_like_it"})) == 2


# Flower does not check types: a float may arrive as an int, a number or a flag as a string.
@pytest.mark.parametrize(
    ("key", "given", "read"),
    [
        ("training.lr", 1, 1.0),
        ("training.lr", "0.1", 0.1),
        ("federation.rounds", "7", 7),
        ("federation.rounds", 7.0, 7),
        ("seed", "12", 12),
        ("reporting.tensorboard", "false", False),
        ("reporting.tensorboard", 0, False),
        ("federation.stratify", "true", True),
        ("data.channels", "3", 3),
        ("data.channels", 3.0, 3),
        ("data.labels", "a, b", "a, b"),
    ],
)
def test_a_value_of_another_type_is_read_where_it_means_the_same(key, given, read):
    found = Settings.from_run_config({key: given}).flat()[key]
    assert found == read and type(found) is type(read)


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("training.lr", float("nan")),
        ("training.lr", float("inf")),
        ("training.lr", "nan"),
        ("federation.timeout_s", float("inf")),
        ("federation.rounds", float("nan")),
        ("federation.rounds", 2.5),
        ("federation.rounds", "many"),
        ("federation.rounds", True),
        ("training.lr", True),
        ("reporting.tensorboard", "perhaps"),
        ("data.root", 5),
        ("data.root", ""),
        ("data.channels", 2),
        ("fedprox.mu", float("nan")),
    ],
)
def test_not_a_number_and_other_nonsense_is_refused(key, given):
    (problem,) = problems_of({"method": "fedprox", key: given})
    assert problem.startswith(f"{key} = {given!r}: ")


def test_defaults_are_those_of_pyproject_in_both_directions():
    written = flatten(PYPROJECT)
    known = Settings().flat()
    for name in registry.names():
        if not name.startswith("test-"):  # toy methods that other tests register
            section = registry.find(name).settings()  # not a whole config: the common defaults do not suit every method
            known |= {f"{name}.{key}": value for key, value in section.model_dump().items()}
    assert set(written) == set(known)
    for key, value in known.items():
        assert written[key] == value and type(written[key]) is type(value), key


def test_settings_without_any_key_are_the_defaults():
    assert Settings.from_run_config({}) == Settings()


def test_flat_is_read_back_to_the_same_settings():
    settings = Settings.from_run_config({"method": "fedprox", "fedprox.mu": 0.3, "training.lr": 0.25, "seed": 9})
    assert Settings.from_run_config(settings.flat()) == settings
    assert settings.flat()["fedprox.mu"] == 0.3


def test_nested_tables_and_dotted_keys_are_the_same():
    nested = Settings.from_run_config({"training": {"lr": 0.2}, "federation": {"rounds": 4}})
    assert nested == Settings.from_run_config({"training.lr": 0.2, "federation.rounds": 4})


@pytest.mark.parametrize("preset", sorted((ROOT / "presets").glob("*.toml")), ids=lambda path: path.stem)
def test_presets_parse_and_only_name_known_keys(preset):
    values = flatten(tomllib.loads(preset.read_text()))
    if values.get("data.partition") == "by_site":
        values["data.root"] = "a-pack.zip"  # such a preset gets its data from the command line
    settings = Settings.from_run_config(values)
    assert {key: settings.flat()[key] for key in values} == values


@pytest.mark.parametrize("area", [None, *AREAS, "options"])
def test_settings_are_frozen(area):
    settings = Settings.from_run_config({"method": "fedprox"})
    target = getattr(settings, area) if area else settings
    name = next(iter(type(target).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(target, name, getattr(target, name))


def test_sections_of_other_methods_are_ignored():
    settings = Settings.from_run_config({"method": "fedavg", "fedprox.mu": 5.0})
    assert "fedprox.mu" not in settings.flat()
    assert settings == Settings.from_run_config({"method": "fedavg"})


def test_a_wrong_value_in_the_chosen_methods_section_is_named():
    (problem,) = problems_of({"method": "fedprox", "fedprox.mu": -1})
    assert problem.startswith("fedprox.mu = -1: ")


class ToyArea(MethodArea):
    strength: float = Field(0.5, ge=0, le=1)


class Toy:
    """A strategy of a user's own; only its registration matters here."""


register("test-settings-toy", Toy, settings=ToyArea, site="client_app.fedavg")


def test_a_method_outside_the_tree_is_named_by_module_and_class(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "users_own", sys.modules[__name__])
    settings = Settings.from_run_config({"method": "users_own:Toy", "test-settings-toy.strength": "0.75"})
    assert settings.options == ToyArea(strength=0.75)
    assert settings.flat()["test-settings-toy.strength"] == 0.75
    (problem,) = problems_of({"method": "users_own:Toy", "test-settings-toy.strength": 2})
    assert problem.startswith("test-settings-toy.strength = 2")


def test_fingerprint_follows_what_shapes_the_numbers_and_nothing_else():
    base = Settings.from_run_config({})
    same = {"reporting.runs_dir": "elsewhere", "federation.timeout_s": 5, "data.cache_dir": "c", "resume": "x"}
    assert Settings.from_run_config(same).fingerprint() == base.fingerprint()
    for key, value in {"seed": 2, "training.lr": 0.06, "model.width": 8, "federation.weighting": "equal"}.items():
        assert Settings.from_run_config({key: value}).fingerprint() != base.fingerprint(), key


def test_names_of_a_list_are_stripped_and_blanks_dropped():
    assert names_in(" a, b c ,,d ") == ("a", "b c", "d")
    assert names_in("") == ()
