"""Site cards: what most sites say is the reference, and who says something else is shown both values."""

from __future__ import annotations

import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from federation import wire
from strategies.cards import MAX_SAMPLES, CardError, SiteCard, freeze, read_card


def content(**changes):
    """A profile reply: two labels, ten training samples."""
    text = {
        "site": "st-mary",
        "labels": ["cat", "dog"],
        "task": "multilabel",
        "schema": "abc",
        "modalities": ["image"],
        "data_sha256": "0" * 64,
    }
    numbers = {"num_train": 10, "num_val": 2, "num_test": 3, "positives": [4, -1], "negatives": [6, 0]}
    for key, value in changes.items():
        (text if key in text else numbers)[key] = value
    return RecordDict({"card": ConfigRecord(text), "metrics": MetricRecord(numbers)})


def card(site="st-mary", node_id=1, registered=None, **changes) -> SiteCard:
    return read_card(node_id, content(site=site, **changes), registered)


def test_a_card_is_read_as_it_was_sent():
    found = card(node_id=7)
    assert (found.node_id, found.site, found.labels, found.task) == (7, "st-mary", ("cat", "dog"), "multilabel")
    assert found.num_train == 10 and found.split_sizes == {"train": 10, "val": 2, "test": 3}
    assert found.positives == (4, -1) and found.negatives == (6, 0)
    assert wire.profile_payload().violation(content()) is None


ABSURD = {
    "a path as name": ({"site": "../etc"}, "the site's name is not"),
    "a long name": ({"site": "x" * 65}, "the site's name is not"),
    "an empty name": ({"site": ""}, "the site's name is not"),
    "a name with a line break": ({"site": "st\nmary"}, "the site's name is not"),
    "no labels": ({"labels": [], "positives": [], "negatives": []}, "the label list is empty"),
    "a label twice": ({"labels": ["cat", "cat"]}, "names a label twice"),
    "more samples than people": ({"num_train": MAX_SAMPLES + 1}, "expected at most 100000000"),
    "too few counts": ({"positives": [4]}, "per-label counts do not fit"),
    "more positives than samples": ({"positives": [11, 0]}, "per-label counts do not fit"),
    "more negatives than samples": ({"negatives": [11, 0]}, "per-label counts do not fit"),
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_values_are_refused(name):
    changes, reason = ABSURD[name]
    with pytest.raises(CardError, match=reason):
        read_card(1, content(**changes))


def test_a_registered_node_cannot_speak_for_another_hospital():
    with pytest.raises(CardError, match="registered as 'north' calls its site 'st-mary'"):
        card(registered="north")
    assert card(registered="st-mary").site == "st-mary"


def test_cards_are_frozen_by_name_in_any_order_of_arrival():
    cards = [card("c", 1), card("a", 3), card("b", 2, num_train=0, positives=[0, 0], negatives=[0, 0])]
    table = freeze(cards)
    assert [found.site for found in table.cards] == ["a", "b", "c"] and not table.refused
    assert [found.site for found in table.trainable] == ["a", "c"]
    assert freeze(reversed(cards)) == table


MINORITIES = {
    "labels": (["dog", "cat"], "its labels is [dog, cat], the others have [cat, dog]. Set data.labels"),
    "task": ("multiclass", "its task is [multiclass], the others have [multilabel]. Use manifests of one task"),
    "schema": ("xyz", "its schema is [xyz], the others have [abc]. The network, label list"),
}


@pytest.mark.parametrize("what", MINORITIES)
def test_a_site_that_disagrees_with_most_is_refused_with_both_values(what):
    value, reason = MINORITIES[what]
    table = freeze([card("a"), card("b"), card("odd", **{what: value})])
    assert [found.site for found in table.cards] == ["a", "b"]
    assert table.refused["odd"].startswith(reason)


def test_the_majority_is_taken_among_those_that_agree_so_far():
    # z and y have other labels; of the rest, two say schema abc and one xyz
    table = freeze(
        [card("a"), card("b"), card("c", schema="xyz"), card("y", labels=["e", "f"]), card("z", labels=["g", "h"])]
    )
    assert [found.site for found in table.cards] == ["a", "b"] and set(table.refused) == {"c", "y", "z"}


@pytest.mark.parametrize("what", MINORITIES)
def test_a_tie_has_no_majority_and_shows_every_sites_value(what):
    value, _ = MINORITIES[what]
    shown = ", ".join(value) if isinstance(value, list) else value
    with pytest.raises(CardError, match=f"do not agree on {what} and no value has a majority") as caught:
        freeze([card("a"), card("b", **{what: value})])
    assert f"b: [{shown}]" in str(caught.value) and "a: [" in str(caught.value)


def test_two_sites_of_one_name_cannot_be_told_apart():
    with pytest.raises(CardError, match="more than one site is called a, b; give every site its own name"):
        freeze([card("a", 1), card("b", 2), card("a", 3), card("b", 4), card("c", 5)])


def test_no_card_is_no_table():
    with pytest.raises(CardError, match="no site sent a card"):
        freeze([])


def test_a_suppressed_count_is_a_positive_one():
    table = freeze([card("a", positives=[4, -1]), card("b", positives=[0, 0])])
    assert table.sites_with_positives(0) == 1 and table.sites_with_positives(1) == 1


def test_a_long_label_list_is_cut_in_the_message():
    many = [f"label {index}" for index in range(100)]
    counts = {"positives": [0] * 100, "negatives": [0] * 100}
    table = freeze([card("a"), card("b"), card("odd", labels=many, **counts)])
    assert "..." in table.refused["odd"] and len(table.refused["odd"]) < 600
