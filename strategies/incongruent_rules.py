"""What of `incongruent` contradicts itself: settings before anything starts (spec 14), a card in round 0 (spec 5.1)."""

from __future__ import annotations

from collections.abc import Mapping

from federation.cooccurrence import PAIR_COUNTS
from federation.privacy_rules import cut_noise
from federation.settings import Settings
from strategies.cards import SiteCard


def contradictions(settings: Settings) -> list[str]:
    """A sentence with the fix for each."""
    options, found = settings.options, []
    if options.end > options.start:
        found.append(
            f"incongruent.end = {options.end} is above incongruent.start = {options.start}: the share of paired sites "
            "falls over the rounds; swap them"
        )
    if options.dim % 4:
        found.append(
            f"incongruent.dim = {options.dim} is not divisible by the 4 heads of the attention; "
            f"use {4 * (options.dim // 4)}"
        )
    if options.loot and not options.public_root:
        found.append("incongruent.loot = true needs public samples; set incongruent.public_root or loot = false")
    if options.infer_impute and not options.impute:
        found.append("incongruent.infer_impute = true needs incongruent.impute = true: nothing else trains the nets")
    if options.alone and (options.pooled or options.loot):
        found.append("incongruent.alone = true sends nothing, so it goes with neither pooled nor loot; unset one")
    if options.modality != "any" and options.is_full:
        found.append(
            f"incongruent.modality = {options.modality!r} leaves no module to fill in for incongruent.agg_mode = "
            f"{options.agg_mode!r}; use 'partial'"
        )
    if settings.federation.weighting == "equal":
        found.append(
            "federation.weighting = 'equal' has no meaning here: a module weighs by the samples behind it; use "
            "'num_examples', and federation.max_site_share against one huge site"
        )
    if options.pooled and settings.data.partition == "own":
        found.append("incongruent.pooled = true pools samples, which hospitals do not; it is for simulations")
    if options.text_sigma and not options.text_clip:
        found.append(
            f"incongruent.text_sigma = {options.text_sigma} is a multiple of incongruent.text_clip, which is 0, so no "
            "noise would be added; set text_clip too"
        )
    found += cut_noise(settings.privacy, options.text_clip * options.text_sigma, "text_clip * text_sigma")
    if getattr(settings.privacy, "secure_sum", False):
        if options.topk_ratio < 1 and options.topk_index == "magnitude":
            found.append(
                "privacy.secure_sum needs the same coordinates from all sites, incongruent.topk_index = 'magnitude' "
                "lets each choose; use 'shared_seed' or topk_ratio = 1"
            )
        if options.profile_balance == "equal":
            found.append(
                "privacy.secure_sum adds whole numbers, incongruent.profile_balance = 'equal' makes weights fractions; "
                "use 'none'"
            )
        if options.proto_lambda > 0 or options.loot:
            found.append(
                "privacy.secure_sum hides single sites, but incongruent.proto_lambda > 0 and incongruent.loot send a "
                "site's own sums in plain; set proto_lambda = 0 and loot = false"
            )
    return found


def no_pairs_to_impute_from(profiles: Mapping[str, str], options) -> str:
    """Why the imputation nets cannot be had with these sites' profiles, "" where they can (spec 9)."""
    wanted = [name for name in ("impute", "infer_impute") if getattr(options, name)]
    if not wanted or "paired" in profiles.values():
        return ""
    found = ", ".join(f"{site} {profile!r}" for site, profile in sorted(profiles.items()))
    return (
        f"incongruent.{wanted[0]} = true needs what is learnt from pairs of an image and its report, so at least one "
        f"site must have the profile 'paired'; found {found}; let such a site take part, or set impute and "
        "infer_impute = false"
    )


EPOCHS = {"paired": (3, 5), "image": (1, 2), "text": (1, 2)}
"""Local epochs that the specification expects of each profile, from and to (4.9)."""


def epochs_outside(profiles: Mapping[str, str], options) -> list[str]:
    """Settings of local epochs, of the profiles that are there, that are outside `EPOCHS`."""
    there = [name for name in EPOCHS if name in profiles.values()]
    wrong = [name for name in there if not EPOCHS[name][0] <= options.epochs(name) <= EPOCHS[name][1]]
    return [
        f"epochs_{name} = {options.epochs(name)} (expected {EPOCHS[name][0]} to {EPOCHS[name][1]})" for name in wrong
    ]


def card_contradiction(card: SiteCard, profile: str) -> str:
    """What in a card does not fit its own counts, "" where all does."""
    counts, size = card.extra, len(card.labels)
    if max(counts["images"], counts["reports"]) > card.num_train:
        return f"it counts {counts['images']} images and {counts['reports']} reports of {card.num_train} samples"
    if counts["pairs"] > min(counts["images"], counts["reports"]):
        return f"it counts {counts['pairs']} pairs of {counts['images']} images and {counts['reports']} reports"
    needed = {"image": "images", "text": "reports"}.get(profile)
    if needed and card.num_train and not counts[needed]:
        return f"its profile is {profile!r} and it counts no {needed}"
    if len(counts["pair_counts"]) != size**2 or max(counts["pair_counts"]) > card.num_train:
        return f"its counts of pairs of labels do not fit {size} labels and {card.num_train} samples"
    return ""


def pair_count_contradiction(numbers: Mapping[str, list[int]], size: int, num_labels: int) -> str:
    """What in an evaluation's counts of pairs of labels no site with ``size`` samples can have, "" where nothing."""
    tables = [numbers[name] for name in PAIR_COUNTS]
    if found := {len(table) for table in tables} - {num_labels**2 if size else 0}:
        return f"it tells {max(found)} counts of pairs of labels, which do not fit {num_labels} labels"
    if (largest := max((value for table in tables for value in table), default=0)) > size:
        return f"it counts {largest} samples of a pair of labels, its card allows {size} samples"
    for cell in zip(*tables, strict=True):
        if -1 in cell and set(cell) != {-1}:
            return "it hides the counts of a pair of labels in part"
        if cell[1] > cell[0] or cell[3] > cell[2]:
            return "it counts more calls than samples of a pair of labels"
    return ""
