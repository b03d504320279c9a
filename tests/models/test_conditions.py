"""Condition files, and what is read out of a chatty model's replies."""

from __future__ import annotations

import json

import numpy as np
import pytest

from models.condition_writer import (
    SCENES_A_COMBINATION,
    label_combinations,
    label_pairs,
    lines_in,
    phrases_in,
    write_conditions,
)
from models.conditions import (
    FOLDER,
    ConditionError,
    checked,
    condition_file,
    conditions_in,
    content_sha256,
    load_conditions,
    shipped,
)

# -- files ------------------------------------------------------------------------------------------------------------


def test_the_shipped_files_are_whole_and_say_where_they_come_from():
    assert shipped() == ("chest-xray", "natural-images", "remote-sensing")
    for name in shipped():
        assert len(load_conditions(name)) == 5
        content = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        assert content["provenance"]["source"] and content["provenance"]["date"]


def test_the_natural_list_is_the_authors():
    from models.fedmpt import CONDITIONS

    assert load_conditions("natural-images") == CONDITIONS[:5]


def test_a_setting_names_a_shipped_list_a_file_or_phrases(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(condition_file(["background", "pose"], ["cat"], {"kind": "test"})))
    assert conditions_in("chest-xray") == load_conditions("chest-xray")
    assert conditions_in(str(path)) == ("background", "pose")
    assert conditions_in(" scene type,pose ") == ("scene type", "pose")
    assert conditions_in("pose") == ("pose",)


def test_a_misspelt_shipped_name_is_no_condition():
    with pytest.raises(ConditionError, match="did you mean 'chest-xray'"):
        conditions_in("chestxray")


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ([], "no condition"),
        (["pose", " "], "empty"),
        (["scene type", "Scene_Type"], "the same"),
        (["x" * 61], "longer than 60"),
    ],
)
def test_lists_that_no_prompt_can_be_made_of_are_refused(conditions, message):
    with pytest.raises(ConditionError, match=message):
        checked(conditions)


def test_an_empty_part_of_a_list_is_refused():
    with pytest.raises(ConditionError, match="empty"):
        conditions_in("pose,,background")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conditions": ["background", "light"]}, "changed after it was written"),
        ({"provenance": {"kind": "other"}}, "changed after it was written"),
        ({"version": 2}, "version 2, this code reads 1"),
        ({"format": "other"}, "no condition file"),
        ({"note": "x"}, "has the keys"),
    ],
)
def test_a_file_that_is_not_as_it_was_written_is_refused(tmp_path, change, message):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**condition_file(["background", "pose"], [], {}), **change}))
    with pytest.raises(ConditionError, match=message):
        load_conditions(path)


def test_a_file_with_a_right_hash_is_checked_all_the_same(tmp_path):
    content = {**condition_file(["pose"], [], {}), "conditions": ["pose", "pose"]}
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**content, "sha256": content_sha256(content)}))
    with pytest.raises(ConditionError, match="the same"):
        load_conditions(path)
    path.write_text(
        json.dumps({**content, "conditions": "pose", "sha256": content_sha256({**content, "conditions": "pose"})})
    )
    with pytest.raises(ConditionError, match="expected a list"):
        load_conditions(path)


def test_no_file_and_no_json_are_told_apart(tmp_path):
    with pytest.raises(ConditionError, match="cannot be read"):
        load_conditions(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConditionError, match="no JSON"):
        load_conditions(tmp_path / "bad.json")


# -- replies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        "- background\n- pose\n- lighting",
        "Sure! Here are three:\n\n1. **Background** - what is behind\n2. **Pose**: how it stands\n3. Lighting.\n\nBye!",
        'The conditions are ["background", "pose", "lighting"].',
        "Conditions: background, pose, lighting",
        "<think>1. colour? no\n2. shape</think>\n* Background\n* POSE_\n* lighting",
        "1) Background\n2) Pose (standing or lying)\n3) lighting\n4) Backgrounds",
    ],
)
def test_the_same_conditions_are_read_from_every_manner_of_writing(reply):
    assert phrases_in(reply) == ["background", "pose", "lighting"]


def test_labels_sentences_and_numbers_are_no_conditions():
    reply = "- Cats\n- 42\n- what else there is to see around it\n- pose"
    assert phrases_in(reply, ["cat"]) == ["pose"]


def test_nothing_is_read_from_nothing():
    assert phrases_in("") == [] and lines_in("<think>a thought that never ends") == []


# -- the two stages ---------------------------------------------------------------------------------------------------


class Model:
    """Gives prepared replies and keeps the prompts."""

    def __init__(self, *replies):
        self.replies, self.prompts = list(replies), []

    def __call__(self, prompt):
        self.prompts.append(prompt)
        return self.replies.pop(0)


def test_scenes_of_every_combination_are_condensed_into_conditions():
    model = Model("- a cat on a sofa", "- a dog by a cat\n- a cat on a sofa", "- background\n- pose\n- light")
    written = write_conditions(model, ["cat", "dog", "sofa"], [(0, 2), (0, 1)], 2)
    assert written.conditions == ("background", "pose")
    assert written.scenes == ("a cat on a sofa", "a dog by a cat")
    assert "cat, sofa" in model.prompts[0] and "cat, dog" in model.prompts[1]
    assert "- a cat on a sofa\n- a dog by a cat" in model.prompts[2] and "exactly 2" in model.prompts[2]


def test_a_model_is_asked_again_for_what_is_missing():
    model = Model("- a scene", "- pose", "- pose\n- background")
    assert write_conditions(model, ["a", "b"], [(0, 1)], 2).conditions == ("pose", "background")
    assert "name 1 others" in model.prompts[2] and model.prompts[2].endswith("- pose")


def test_a_model_that_says_too_little_is_refused():
    with pytest.raises(ConditionError, match="described no scene"):
        write_conditions(Model(""), ["a", "b"], [(0, 1)], 2)
    with pytest.raises(ConditionError, match="1 of 2 conditions"):
        write_conditions(Model("- s", "- pose", "- pose", "no more:"), ["a", "b"], [(0, 1)], 2)


def test_no_combination_gives_more_scenes_than_asked_for():
    many = "\n".join(f"- scene {number}" for number in range(20))
    written = write_conditions(Model(many, "- pose"), ["a", "b"], [(0, 1)], 1)
    assert len(written.scenes) == SCENES_A_COMBINATION


def test_combinations_are_counted_and_rare_ones_left_out():
    rows = [[1, 1, 0]] * 6 + [[0, 1, 1]] * 7 + [[1, 1, 1]] * 4 + [[1, 0, 0]] * 9 + [[-1, 1, 1]]
    assert label_combinations(np.array(rows)) == [(1, 2), (0, 1)]
    assert label_combinations(np.array(rows), min_count=4) == [(1, 2), (0, 1), (0, 1, 2)]
    assert label_combinations(np.array(rows), limit=1) == [(1, 2)]


def test_pairs_are_drawn_where_there_are_many():
    assert label_pairs(3, np.random.default_rng(0)) == [(0, 1), (0, 2), (1, 2)]
    drawn = label_pairs(20, np.random.default_rng(0), limit=10)
    assert len(set(drawn)) == 10 and drawn == label_pairs(20, np.random.default_rng(0), limit=10)
