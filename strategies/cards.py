"""Site cards: what every site says of itself in round 0, frozen into one table for the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import RecordDict

from federation import wire

MAX_SAMPLES = 10**8


class CardError(ValueError):
    """Cards that cannot be frozen into a table; the message shows the values that differ."""


@dataclass(frozen=True)
class SiteCard:
    """One site as it described itself. ``positives`` and ``negatives`` are per label, -1 where suppressed.

    ``extra``: the numbers that the method declares in ``profile_extra``.
    """

    node_id: int
    site: str
    labels: tuple[str, ...]
    task: str
    schema: str
    modalities: tuple[str, ...]
    data_sha256: str
    split_sizes: Mapping[str, int]
    positives: tuple[int, ...]
    negatives: tuple[int, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_train(self) -> int:
        return self.split_sizes["train"]


def read_card(node_id: int, content: RecordDict, registered: str | None = None) -> SiteCard:
    """The card in a profile reply that already fits `wire.profile_payload`. Raises CardError for absurd values.

    ``registered``: the name that the node's key was registered under; a site may not call itself otherwise.
    """
    text, numbers = content[wire.CARD], content[wire.METRICS]
    labels = tuple(text["labels"])
    sizes = {split: int(numbers[f"num_{split}"]) for split in ("train", "val", "test")}
    counts = tuple(tuple(int(value) for value in numbers[key]) for key in ("positives", "negatives"))
    if not wire.SITE_NAME.fullmatch(str(text["site"])):
        raise CardError("the site's name is not 1 to 64 letters, digits, '.', '_', '-' or spaces")
    if registered and registered != text["site"]:
        raise CardError(f"a node registered as {registered!r} calls its site {text['site']!r}")
    if not labels or len(set(labels)) != len(labels):
        raise CardError(f"the label list is empty or names a label twice: {list(labels)[:5]}")
    if any(size > MAX_SAMPLES for size in sizes.values()):
        raise CardError(f"a split of {max(sizes.values())} samples, expected at most {MAX_SAMPLES}")
    if any(len(values) != len(labels) or max(values, default=0) > sizes["train"] for values in counts):
        raise CardError("the per-label counts do not fit the label list and the number of training samples")
    return SiteCard(
        node_id=node_id,
        site=str(text["site"]),
        labels=labels,
        task=str(text["task"]),
        schema=str(text["schema"]),
        modalities=tuple(text["modalities"]),
        data_sha256=str(text["data_sha256"]),
        split_sizes=sizes,
        positives=counts[0],
        negatives=counts[1],
        extra=dict(content[wire.EXTRA]) if wire.EXTRA in content else {},
    )


@dataclass(frozen=True)
class SiteTable:
    """The sites of a run, sorted by name. ``refused`` maps the others to the reason."""

    cards: tuple[SiteCard, ...]
    refused: Mapping[str, str]

    @property
    def labels(self) -> tuple[str, ...]:
        return self.cards[0].labels

    @property
    def task(self) -> str:
        return self.cards[0].task

    @property
    def trainable(self) -> tuple[SiteCard, ...]:
        """Sites with at least one training sample; the others only evaluate."""
        return tuple(card for card in self.cards if card.num_train > 0)

    def sites_with_positives(self, label: int) -> int:
        """At how many sites a label has training positives (a suppressed count is taken for one)."""
        return sum(card.positives[label] != 0 for card in self.cards)


def freeze(cards: Iterable[SiteCard]) -> SiteTable:
    """One table out of all cards; a site that disagrees on labels, task or schema is refused with both values shown.

    What most sites say is the reference, so that one wrong site harms only itself. Raises CardError where there is
    no majority, and where two sites have the same name (nobody can say which is the right one).
    """
    cards = sorted(cards, key=lambda card: (card.site, card.node_id))
    if not cards:
        raise CardError("no site sent a card, so there is nothing to train on")
    twice = sorted(site for site, count in Counter(card.site for card in cards).items() if count > 1)
    if twice:
        raise CardError(f"more than one site is called {', '.join(twice)}; give every site its own name")
    refused: dict[str, str] = {}
    for what in ("labels", "task", "schema"):
        cards = _agreeing(cards, what, refused)
    return SiteTable(tuple(cards), refused)


def _agreeing(cards: list[SiteCard], what: str, refused: dict[str, str]) -> list[SiteCard]:
    ranked = Counter(getattr(card, what) for card in cards).most_common()
    if len(ranked) > 1 and ranked[0][1] == ranked[1][1]:
        said = "; ".join(f"{card.site}: {_short(getattr(card, what))}" for card in cards[:6])
        raise CardError(f"the sites do not agree on {what} and no value has a majority: {said}. {_FIX[what]}")
    expected = ranked[0][0]
    for card in cards:
        if (found := getattr(card, what)) != expected:
            refused[card.site] = f"its {what} is {_short(found)}, the others have {_short(expected)}. {_FIX[what]}"
    return [card for card in cards if card.site not in refused]


_FIX = {
    "labels": "Set data.labels to the federation's label list in its order",
    "task": "Use manifests of one task",
    "schema": "The network, label list or frozen weights differ; use one code version and one run config",
}


def _short(value: object) -> str:
    text = ", ".join(value) if isinstance(value, tuple) else str(value)
    return f"[{text if len(text) <= 300 else text[:297] + '...'}]"
