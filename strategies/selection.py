"""Which sites train in a round: seeded draws from the table, never from Flower's node ids, which differ by run."""

from __future__ import annotations

import numpy as np

from federation import seeding
from federation.settings import Settings
from strategies.cards import SiteCard


def drawn_sites(cards: list[SiteCard], settings: Settings, server_round: int) -> list[SiteCard]:
    """All sites, or ``federation.sites_per_round`` drawn without replacement, stratified if asked; sorted by name."""
    fed = settings.federation
    if not fed.sites_per_round or fed.sites_per_round >= len(cards):
        return cards
    rng = seeding.numpy_generator(settings.seed, "select_sites", server_round)
    if fed.stratify:
        return evenly_over_modalities(cards, fed.sites_per_round, rng)
    return [cards[index] for index in sorted(rng.choice(len(cards), fed.sites_per_round, replace=False))]


def evenly_over_modalities(cards: list[SiteCard], count: int, rng: np.random.Generator) -> list[SiteCard]:
    """``count`` sites drawn as evenly over the modality profiles as these allow, sorted by site name.

    Each profile gets the same number; what a small profile cannot give is dealt round robin to the others.
    """
    groups: dict[tuple[str, ...], list[SiteCard]] = {}
    for card in cards:
        groups.setdefault(card.modalities, []).append(card)
    shuffled = [[group[i] for i in rng.permutation(len(group))] for _, group in sorted(groups.items())]
    chosen: list[SiteCard] = []
    while len(chosen) < count:
        for group in shuffled:
            if group and len(chosen) < count:
                chosen.append(group.pop())
    return sorted(chosen, key=lambda card: card.site)
