"""What one site has labelled, asked for and not yet asked for, as one value with three transitions.

A pool is a set of facts that only grows: what was given, what was requested, what readers answered. What is labelled
and what is pending follows from the facts alone, so answers may arrive late, in parts, twice and in any order, and
the pool is the same. See the project's fairfal specification, sections 2, 14 and 17.

Choice: a sample is labelled once every label that some reader marked is decided; until then it stays pending, and a
pending sample is never picked again. A reader's newer mark replaces that reader's older one under every rule but
``first``. A tie in time is broken by the reader's name, then by the marks.
Choice: a blank takes nothing back; a reader who errs marks the sample again, with the right label.
Choice: a label that no reader marked is unknown (-1), so a multi-label sample may be labelled in part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np

from datasets.records import ABSENT, PRESENT, UNKNOWN, DataError, Task
from datasets.source import shown

Rule = Literal["first", "last", "majority", "agree"]
"""Who is right where readers differ: the earliest mark, the latest, the most readers, or what two readers share."""
RULES: tuple[Rule, ...] = get_args(Rule)

Value = TypeVar("Value")

Marks = tuple[int, ...]
"""One value a label: 1 present, 0 absent, -1 unknown. With one label a sample, exactly one is 1 and the rest 0."""


class Reason(NamedTuple):
    """Why a sample was picked: a sentence, the pseudo-label ("" for none) and the uncertainty (None where random)."""

    text: str
    pseudo_label: str = ""
    uncertainty: float | None = None


class Request(NamedTuple):
    """A sample that was picked in a cycle, counted from 1."""

    cycle: int
    reason: Reason


class Answer(NamedTuple):
    """What one reader said of one sample; ``time`` is from `utc`, ``reader`` from `reader_name`."""

    id: str
    marks: Marks
    reader: str
    time: str


@dataclass(frozen=True)
class Pool:
    """The samples of one site. ``ids`` are row keys in a fixed order; they never leave the site.

    ``given`` are labels known without a reader: the first labelled set, and a simulation's oracle. ``rule`` holds
    for all answers, old and new.
    """

    labels: tuple[str, ...]
    task: Task
    data_sha256: str
    ids: tuple[str, ...]
    given: Mapping[str, Marks] = field(default_factory=dict)
    requests: Mapping[str, Request] = field(default_factory=dict)
    answers: frozenset[Answer] = frozenset()
    rule: Rule = "majority"

    @cached_property
    def known_ids(self) -> frozenset[str]:
        return frozenset(self.ids)

    @cached_property
    def labelled(self) -> dict[str, Marks]:
        """Marks of every labelled sample, in the order of ``ids``."""
        by_id = groupby(sorted(self.answers), key=lambda answer: answer.id)
        decided = {id: decide(group, self.rule, self.task) for id, group in by_id}
        known = decided | dict(self.given)
        return {id: marks for id in self.ids if (marks := known.get(id)) is not None}

    @cached_property
    def pending(self) -> tuple[str, ...]:
        """Samples that were requested and have no label yet, in the order of ``ids``."""
        return tuple(id for id in self.ids if id in self.requests and id not in self.labelled)

    @cached_property
    def unlabelled(self) -> tuple[str, ...]:
        """Samples that may still be picked, in the order of ``ids``."""
        return tuple(id for id in self.ids if id not in self.requests and id not in self.given)

    @cached_property
    def disputed(self) -> tuple[str, ...]:
        """Pending samples that have answers: the rule does not decide between them."""
        answered = {answer.id for answer in self.answers}
        return tuple(id for id in self.pending if id in answered)

    @property
    def cycle(self) -> int:
        """The last cycle with a request; 0 before the first."""
        return max((request.cycle for request in self.requests.values()), default=0)

    def picked(self, cycle: int) -> tuple[str, ...]:
        """What was requested in one cycle, in the order of ``ids``: a restarted site asks here before it picks."""
        return tuple(id for id in self.ids if id in self.requests and self.requests[id].cycle == cycle)

    def targets(self) -> np.ndarray:
        """Targets of the labelled samples, ``(n, C) int8`` (1, 0, -1), row i for the i-th key of `labelled`."""
        return np.array(list(self.labelled.values()), dtype=np.int8).reshape(len(self.labelled), len(self.labels))


def new_pool(
    labels: Sequence[str],
    task: Task,
    data_sha256: str,
    ids: Iterable[str],
    given: Mapping[str, Sequence[int]] | None = None,
) -> Pool:
    """A pool before its first cycle; ``given`` is the first labelled set, marks by id.

    Raises DataError for an id that is twice there, blank, padded, not printable, or begins with ``=``, ``+``, ``-``
    or ``@`` (a spreadsheet would run it), for given ids that are not in the pool, and for marks that do not fit.
    """
    keys = tuple(map(str, ids))
    if len(set(keys)) != len(keys):
        raise DataError(f"sample {shown(Counter(keys).most_common(1)[0][0])} is twice in the pool; an id is one sample")
    for id in keys:
        if not id or id != id.strip() or not id.isprintable() or id[0] in "=+-@":
            raise DataError(f"sample id {shown(id)} cannot stand in a table: use printable text without = + - @ first")
    pool = Pool(tuple(labels), task, data_sha256, keys)
    _known(pool, given or {})
    return replace(pool, given={id: _fitting(pool, id, marks) for id, marks in (given or {}).items()})


def request(pool: Pool, ids: Sequence[str], cycle: int, reasons: Sequence[Reason]) -> Pool:
    """The pool with these samples pending. A sample that this cycle requested already stays as it is.

    Raises DataError for an unknown sample, one that is labelled or was picked in another cycle, a pseudo-label that
    is no label, and an uncertainty that is not finite.
    """
    if cycle < 1 or len(ids) != len(reasons) or len(set(ids)) != len(ids):
        raise DataError(f"cycle {cycle}, {len(ids)} ids, {len(reasons)} reasons; cycles count from 1, ids are distinct")
    _known(pool, ids)
    added: dict[str, Request] = {}
    for id, reason in zip(map(str, ids), reasons, strict=True):
        before = pool.requests.get(id)
        if before is not None and before.cycle == cycle:
            continue
        if before is not None or id in pool.given:
            raise DataError(
                f"sample {shown(id)} is labelled or was picked in another cycle; pick from the unlabelled ones"
            )
        if reason.pseudo_label and reason.pseudo_label not in pool.labels:
            raise DataError(f"sample {shown(id)}: the pseudo-label {shown(reason.pseudo_label)} is no label")
        uncertainty = None if reason.uncertainty is None else float(reason.uncertainty)
        if uncertainty is not None and not math.isfinite(uncertainty):
            raise DataError(f"sample {shown(id)} has the uncertainty {uncertainty}; leave such samples out")
        added[id] = Request(int(cycle), Reason(reason.text, reason.pseudo_label, uncertainty))
    return replace(pool, requests={**pool.requests, **added})


def receive(pool: Pool, answers: Iterable[Answer], rule: Rule) -> Pool:
    """The pool with all answers that have no `objection`; twice the same answer is one. ``rule`` replaces the old one.

    Raises DataError for another rule than `RULES`.
    """
    if rule not in RULES:
        raise DataError(f"the conflict rule is {shown(rule)}; use one of {', '.join(RULES)}")
    taken = frozenset(answer for answer in answers if objection(pool, answer) is None)
    return replace(pool, answers=pool.answers | taken, rule=rule)


def oracle(pool: Pool, ids: Sequence[str], targets: np.ndarray) -> Pool:
    """The pool with the true labels of requested samples, ``targets (n, C) int8``: a simulation's reader.

    Raises DataError for a sample that was not requested, has another label, or marks that do not fit.
    """
    rows = np.asarray(targets)
    if rows.shape != (len(ids), len(pool.labels)):
        raise DataError(f"targets have the shape {rows.shape}, expected {(len(ids), len(pool.labels))}")
    _known(pool, ids)
    added = {str(id): _fitting(pool, id, marks) for id, marks in zip(ids, rows.tolist(), strict=True)}
    for id, marks in added.items():
        if id not in pool.requests or pool.labelled.get(id, marks) != marks:
            raise DataError(f"sample {shown(id)} was not requested, or has another label; the oracle answers requests")
    return replace(pool, given={**pool.given, **added})


def objection(pool: Pool, answer: Answer) -> str | None:
    """Why an answer cannot be taken, None where it can."""
    if answer.id not in pool.requests:
        known = answer.id in pool.known_ids
        return f"sample {shown(answer.id)} {'was never requested' if known else 'is not in this pool'}"
    if answer.id in pool.given:
        return f"sample {shown(answer.id)} has a true label already"
    return misfit(answer.marks, pool.labels, pool.task)


def misfit(marks: Sequence[int], labels: Sequence[str], task: Task) -> str | None:
    """What is wrong with marks, None where they fit: one a label, one of them 1 (multiclass) or known (multilabel)."""
    if len(marks) != len(labels) or not set(marks) <= {PRESENT, ABSENT, UNKNOWN}:
        return f"marks {shown(str(list(marks)))} do not fit {len(labels)} labels with 1, 0 or -1"
    if task == "multiclass" and sorted(marks) != [ABSENT] * (len(labels) - 1) + [PRESENT]:
        return "a sample has exactly one class"
    return "no label is marked" if set(marks) == {UNKNOWN} else None


def decide(answers: Iterable[Answer], rule: Rule, task: Task) -> Marks | None:
    """The marks of one sample from all its answers, None where the rule decides not yet.

    ``majority``: what more readers say than anything else. ``agree``: the only thing that two readers or more say;
    so a third reader settles a dispute. Single-label answers are compared whole, multi-label ones label by label.
    """
    ordered = sorted(answers, key=lambda answer: (answer.time, answer.reader, answer.marks))
    if task == "multiclass":
        return _verdict([(answer.reader, answer.marks) for answer in ordered], rule)
    marks: list[int] = []
    for values in zip(*(answer.marks for answer in ordered), strict=True):
        votes = [(answer.reader, value) for answer, value in zip(ordered, values, strict=True) if value != UNKNOWN]
        value = _verdict(votes, rule) if votes else UNKNOWN
        if value is None:
            return None
        marks.append(value)
    return tuple(marks)


def reader_name(text: str) -> str:
    """A reader's name as it is compared: lower case, single blanks. Raises DataError for a blank or long one.

    Choice: case does not count, or ``agree`` would take Ann and ann for two readers.
    """
    name = " ".join(text.casefold().split())
    if not name or len(name) > 64 or not name.isprintable():
        raise DataError(f"the reader is {shown(text)}; write a name of 1 to 64 characters")
    return name


def utc(text: str) -> str:
    """An ISO 8601 time as UTC with microseconds, so that text order is time order; raises DataError.

    Choice: a time without a zone is UTC.
    """
    try:
        time = datetime.fromisoformat(text.strip())
        return (time.replace(tzinfo=time.tzinfo or UTC)).astimezone(UTC).isoformat(timespec="microseconds")
    except (ValueError, OverflowError) as error:
        raise DataError(f"the time is {shown(text)}; write it as 2026-01-31T14:05:00Z") from error


def _verdict(votes: Sequence[tuple[str, Value]], rule: Rule) -> Value | None:
    """The value of (reader, value) votes that are ordered by time."""
    if rule == "first":
        return votes[0][1]
    if rule == "last":
        return votes[-1][1]
    counts = Counter(dict(votes).values())  # the newest of each reader
    needed = 2 if rule == "agree" else max(counts.values())
    leaders = [value for value, count in counts.items() if count >= needed]
    return leaders[0] if len(leaders) == 1 else None


def _known(pool: Pool, ids: Iterable[str]) -> None:
    unknown = [id for id in ids if id not in pool.known_ids]
    if unknown:
        raise DataError(f"sample {shown(str(unknown[0]))} is not in the pool ({len(unknown)} such ids)")


def _fitting(pool: Pool, id: str, marks: Sequence[int]) -> Marks:
    if wrong := misfit(marks, pool.labels, pool.task):
        raise DataError(f"sample {shown(str(id))}: {wrong}")
    return tuple(map(int, marks))
