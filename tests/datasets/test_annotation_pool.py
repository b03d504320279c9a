"""The pool: its transitions, its conflict rules, and that neither order nor repetition of answers matters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasets.annotation_pool import (
    RULES,
    Answer,
    Reason,
    decide,
    new_pool,
    objection,
    oracle,
    reader_name,
    receive,
    request,
    utc,
)
from datasets.records import DataError

IDS = tuple(f"images/{letter}.png" for letter in "abcdef")
CAT, DOG, OWL = (1, 0, 0), (0, 1, 0), (0, 0, 1)
WHY = Reason("uncertain", "dog", 0.5)


def single(given=None):
    return new_pool(("cat", "dog", "owl"), "multiclass", "sum", IDS, given)


def multi(given=None):
    return new_pool(("cat", "dog", "owl"), "multilabel", "sum", IDS, given)


def asked(pool, *ids, cycle=1):
    return request(pool, ids, cycle, [WHY] * len(ids))


def said(id, marks, reader="ann", minute=0):
    return Answer(id, marks, reader, utc(f"2026-01-01T00:{minute:02d}:00Z"))


# -- transitions ------------------------------------------------------------------------------------------------------


def test_a_sample_is_unlabelled_then_pending_then_labelled():
    pool = single({IDS[0]: CAT})
    assert pool.unlabelled == IDS[1:] and pool.labelled == {IDS[0]: CAT} and pool.pending == () and pool.cycle == 0
    pool = asked(pool, IDS[2], IDS[1])
    assert pool.pending == IDS[1:3] and pool.unlabelled == IDS[3:] and pool.cycle == 1
    pool = receive(pool, [said(IDS[1], OWL)], "majority")
    assert pool.labelled == {IDS[0]: CAT, IDS[1]: OWL} and pool.pending == (IDS[2],)
    np.testing.assert_array_equal(pool.targets(), [CAT, OWL])
    assert pool.targets().dtype == np.int8


def test_a_pool_without_labels_has_empty_targets_of_the_right_width():
    assert single().targets().shape == (0, 3)


def test_the_next_cycle_starts_with_what_has_arrived_and_late_answers_still_count():
    pool = receive(asked(single(), *IDS[:3]), [said(IDS[0], CAT)], "majority")
    pool = asked(pool, IDS[3], cycle=2)
    assert list(pool.labelled) == [IDS[0]] and pool.pending == IDS[1:4] and pool.unlabelled == IDS[4:]
    pool = receive(pool, [said(IDS[1], DOG, minute=50)], "majority")
    assert list(pool.labelled) == list(IDS[:2]) and pool.picked(1) == IDS[:3] and pool.picked(2) == (IDS[3],)


def test_a_repeated_request_of_one_cycle_changes_nothing():
    pool = asked(single(), *IDS[:2])
    assert asked(pool, *IDS[:2]) == pool


@pytest.mark.parametrize(
    ("ids", "cycle", "reasons", "message"),
    [
        (IDS[1:2], 2, [WHY], "picked in another cycle"),
        (IDS[:1], 2, [WHY], "is labelled"),
        (("nobody",), 1, [WHY], "not in the pool"),
        (IDS[2:4], 1, [WHY], "reasons"),
        ((IDS[2], IDS[2]), 1, [WHY, WHY], "distinct"),
        (IDS[2:3], 0, [WHY], "from 1"),
        (IDS[2:3], 1, [Reason("x", "cow")], "is no label"),
        (IDS[2:3], 1, [Reason("x", "", float("nan"))], "leave such samples out"),
    ],
)
def test_a_request_that_cannot_be_is_refused(ids, cycle, reasons, message):
    with pytest.raises(DataError, match=message):
        request(asked(single({IDS[0]: CAT}), IDS[1]), ids, cycle, reasons)


def test_the_oracle_labels_what_was_requested_and_nothing_else():
    pool = asked(single(), *IDS[:2])
    done = oracle(pool, IDS[:2], np.array([CAT, DOG], dtype=np.int8))
    assert done.labelled == {IDS[0]: CAT, IDS[1]: DOG} and done.pending == ()
    assert oracle(done, IDS[:1], np.array([CAT])) == done
    for ids, rows in [((IDS[2],), [CAT]), (IDS[:1], [DOG])]:
        with pytest.raises(DataError, match="not requested, or has another label"):
            oracle(done, ids, np.array(rows))
    with pytest.raises(DataError, match="exactly one class"):
        oracle(pool, IDS[:1], np.array([(1, 1, 0)]))
    with pytest.raises(DataError, match="shape"):
        oracle(pool, IDS[:1], np.array(CAT))


@pytest.mark.parametrize("id", ["", " a", "a\n", "=1+1", "-a", "@a"])
def test_an_id_that_cannot_stand_in_a_table_is_refused(id):
    with pytest.raises(DataError, match="cannot stand in a table"):
        new_pool(("cat",), "multilabel", "sum", ["fine", id])


def test_ids_are_distinct_and_given_ids_are_in_the_pool():
    with pytest.raises(DataError, match="twice"):
        new_pool(("cat",), "multilabel", "sum", ["a", "b", "a"])
    with pytest.raises(DataError, match="not in the pool"):
        single({"z": CAT})


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (said("nobody", CAT), "not in this pool"),
        (said(IDS[3], CAT), "never requested"),
        (said(IDS[0], CAT), "never requested"),
        (said(IDS[2], CAT), "true label already"),
        (said(IDS[1], (1, 1, 0)), "exactly one class"),
        (said(IDS[1], (1, -1, -1)), "exactly one class"),
        (said(IDS[1], (1, 0)), "do not fit"),
        (said(IDS[1], (2, 0, 0)), "do not fit"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused_and_the_rest_is_taken(answer, message):
    pool = oracle(asked(single({IDS[0]: CAT}), *IDS[1:3]), IDS[2:3], np.array([DOG]))
    assert message in objection(pool, answer)
    after = receive(pool, [answer, said(IDS[1], OWL)], "majority")
    assert after.answers == {said(IDS[1], OWL)} and after.labelled[IDS[1]] == OWL


@pytest.mark.parametrize(
    ("rule", "expected"), [("first", CAT), ("last", OWL), ("majority", DOG), ("agree", DOG)], ids=str
)
def test_the_rules_differ_where_readers_differ(rule, expected):
    answers = [said(IDS[0], CAT, "ann", 1), said(IDS[0], DOG, "bo", 2), said(IDS[0], DOG, "cy", 3)]
    answers.append(said(IDS[0], OWL, "ann", 4))  # ann corrects herself
    assert decide(answers, rule, "multiclass") == expected


@pytest.mark.parametrize(("rule", "expected"), [("majority", CAT), ("agree", None), ("first", CAT), ("last", CAT)])
def test_one_reader_is_enough_but_for_agree(rule, expected):
    assert decide([said(IDS[0], CAT, minute=1), said(IDS[0], CAT, minute=2)], rule, "multiclass") == expected


@pytest.mark.parametrize("rule", ["majority", "agree"])
def test_a_tie_stays_pending_until_a_third_reader_settles_it(rule):
    pool = asked(single(), IDS[0])
    pool = receive(pool, [said(IDS[0], CAT, "ann"), said(IDS[0], DOG, "bo")], rule)
    assert pool.pending == pool.disputed == (IDS[0],) and pool.labelled == {}
    pool = receive(pool, [said(IDS[0], DOG, "cy")], rule)
    assert pool.labelled == {IDS[0]: DOG} and pool.disputed == ()


def test_agree_does_not_choose_between_two_pairs():
    answers = [said(IDS[0], marks, reader) for reader, marks in zip("abcd", (CAT, CAT, DOG, DOG), strict=True)]
    assert decide(answers, "agree", "multiclass") is None


def test_multilabel_answers_in_parts_add_up_label_by_label():
    parts = [said(IDS[0], (1, -1, -1), minute=1), said(IDS[0], (-1, 0, -1), minute=2)]
    for rule in ("first", "last", "majority"):
        assert decide(parts, rule, "multilabel") == (1, 0, -1)


def test_multilabel_stays_pending_while_a_marked_label_is_undecided():
    ann, bo = said(IDS[0], (1, 0, -1), "ann"), said(IDS[0], (1, 1, -1), "bo")
    assert decide([ann, bo], "agree", "multilabel") is None
    assert decide([ann, bo, said(IDS[0], (-1, 1, -1), "cy")], "agree", "multilabel") == (1, 1, -1)


def test_another_rule_holds_for_old_answers_too():
    pool = receive(asked(single(), IDS[0]), [said(IDS[0], CAT, "ann", 1), said(IDS[0], DOG, "bo", 2)], "first")
    assert pool.labelled == {IDS[0]: CAT}
    assert receive(pool, [], "last").labelled == {IDS[0]: DOG} and receive(pool, [], "agree").labelled == {}
    with pytest.raises(DataError, match="conflict rule"):
        receive(pool, [], "loudest")


@st.composite
def chunks(draw):
    """Answers with repetitions, in some order, cut into imports."""
    marks = st.tuples(*[st.sampled_from((-1, 0, 1))] * 3).filter(lambda row: set(row) != {-1})
    answer = st.builds(said, st.sampled_from(IDS), marks, st.sampled_from(("ann", "bo", "cy")), st.integers(0, 5))
    answers = draw(st.lists(answer, max_size=12))
    again = draw(st.permutations(answers + draw(st.lists(st.sampled_from(answers)) if answers else st.just([]))))
    cut = sorted(draw(st.lists(st.integers(0, len(again)), max_size=3)))
    return answers, [again[a:b] for a, b in zip([0, *cut], [*cut, len(again)], strict=True)]


@given(chunks(), st.sampled_from(RULES))
def test_any_order_of_partial_imports_gives_the_same_pool(drawn, rule):
    answers, parts = drawn
    start = asked(multi(), *IDS[:4])
    pool = start
    for part in parts:
        pool = receive(pool, part, rule)
    whole = receive(start, answers, rule)
    assert pool == whole and pool.labelled == whole.labelled
    groups = (set(pool.labelled), set(pool.pending), set(pool.unlabelled))
    assert sorted(id for group in groups for id in group) == sorted(IDS)
    assert replace(pool, answers=frozenset()) == replace(start, rule=rule)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from((CAT, DOG, OWL)), st.integers(0, 9)), min_size=1))
def test_majority_equals_a_plain_count(votes):
    answers = [said(IDS[0], marks, reader, minute) for reader, marks, minute in votes]
    newest = {r: max((m, marks) for reader, marks, m in votes if reader == r)[1] for r, _, _ in votes}
    counts = {marks: list(newest.values()).count(marks) for marks in (CAT, DOG, OWL)}
    best = [marks for marks, count in counts.items() if count == max(counts.values())]
    assert decide(answers, "majority", "multiclass") == (best[0] if len(best) == 1 else None)


# -- names and times --------------------------------------------------------------------------------------------------


def test_readers_are_compared_without_case_and_blanks():
    assert reader_name("  Dr  ANN ") == reader_name("dr ann") == "dr ann"
    for name in ("", "  ", "a\x00", "x" * 65):
        with pytest.raises(DataError, match="the reader is"):
            reader_name(name)


def test_times_of_any_zone_sort_as_text():
    assert utc("2026-01-01T12:00:00+02:00") == utc("2026-01-01T10:00:00.000Z") == utc("2026-01-01 10:00")
    assert utc("2026-01-01T10:00:00.5Z") > utc("2026-01-01T10:00:00Z")
    for text in ("", "yesterday", "0001-01-01T00:00:00+12:00"):
        with pytest.raises(DataError, match="write it as"):
            utc(text)
