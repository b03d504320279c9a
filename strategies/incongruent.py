"""Incongruent multimodal federation on the server: every module is averaged over the sites that trained it.

Saha, Mishra, Wagner, Kamnitsas, Noble, AAAI 2025 and arXiv 2402.05294; `models.incongruent` has the network, the
project's incongruent specification the formulas. Profiles are frozen from the site cards of round 0: an image-only site
is never sent the text encoder and cannot send one back, since its payload does not declare it.

Choice: a module's mean is the runtime's running mean in float32, not a sum in float64 (spec 5.4): one way of averaging
for all methods; a test holds it against the specification's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from logging import INFO, WARNING

import numpy as np
import torch
from flwr.supercore import log
from torch import nn

from federation import seeding, wire
from federation.blocks import four_blocks
from federation.cooccurrence import MAX_LIFT, PAIR_COUNTS, false_positive_lift
from federation.metrics import none_if_nan
from federation.registry import register
from federation.settings import Settings, names_in
from models.incongruent import (
    MODULES,
    IncongruentNetwork,
    build_incongruent,
    cooccurrence_prior,
    initialise_head,
    profile_modules,
    split_state,
)
from models.incongruent_asymmetric import class_weights, positive_weights
from models.incongruent_exchange import (
    CARD_NUMBERS,
    CONTEXT,
    IMPUTATION,
    PROTOTYPES,
    PUBLIC,
    TRAIN_NUMBERS,
    VIEWS,
)
from models.incongruent_prototypes import PrototypeLibrary, empty_library, update_prototypes
from strategies.aggregation import Arrays, StreamingMean
from strategies.base import FederatedStrategy
from strategies.cards import CardError, SiteCard
from strategies.discovery import QuorumError
from strategies.evaluation import PooledScores
from strategies.gate import Reply
from strategies.incongruent_area import IncongruentArea
from strategies.incongruent_coverage import Coverage, CoverageError
from strategies.incongruent_rules import (
    card_contradiction,
    contradictions,
    epochs_outside,
    no_pairs_to_impute_from,
    pair_count_contradiction,
)
from strategies.progress import Modules
from strategies.scheduling import paired_quota, stratified
from strategies.secure_round import SecureMean

__all__ = ["CoverageError", "Incongruent", "IncongruentArea", "paired_quota"]

BLOCKS = ("macro_auroc", "head_auroc", "tail_auroc", "site_variance", "worst_auroc", "auroc_q10", "class_variance")
MAX_GROWTH = 1.1
"""A reply may count this many times the samples of its site's card (spec 9)."""


class Incongruent(FederatedStrategy):
    """Masked means by module, frozen profiles, a stratified schedule, and a library of text prototypes."""

    reads_reports = True
    profile_extra = CARD_NUMBERS
    train_extra = TRAIN_NUMBERS
    evaluation_extra = PAIR_COUNTS
    views = VIEWS
    secure_summable = True
    contradictions = staticmethod(contradictions)

    def __init__(self, settings: Settings, experiment: str = "experiment") -> None:
        super().__init__(settings, experiment)
        self.selects_model = not self.options.alone
        self._profiles: dict[str, str] = {}
        self._sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._public: dict[str, torch.Tensor] = {}
        self._coverage = Coverage()
        self._critical = torch.zeros(0)

    # -- round 0 (spec 5.1) ---------------------------------------------------------------------------------------

    def network(self, labels: tuple[str, ...], task: str) -> IncongruentNetwork:
        """Every module that some site can train. Raises CardError where the cards contradict themselves."""
        if task != "multilabel":
            raise CardError(f"incongruent needs multi-label data, the sites have a {task} task")
        self._freeze_profiles()
        if problem := no_pairs_to_impute_from(self._profiles, self.options):
            raise CardError(problem)
        modules = {module for profile in self._profiles.values() for module in self.options.site_modules(profile)}
        if self.options.impute:
            modules |= set(IMPUTATION)
        return build_incongruent(
            len(labels),
            modules=tuple(module for module in MODULES if module in modules),
            vision=self.options.vision or self.settings.model.name,
            **self.settings.network_shape(),
            **self.options.network_options,
        )

    def build(self, network: nn.Module) -> Modules:
        """The network by module, its head started from the global counts, and the context that sites are told."""
        assert isinstance(network, IncongruentNetwork)
        counts, _, known, _ = self._global_counts()
        initialise_head(network.head, counts / known.clamp(min=1), self._prior())
        options = self.options
        weights = {
            "effective": lambda: class_weights(counts, options.reweight_beta),
            "pos_weight": lambda: positive_weights(counts, known),
            "none": lambda: torch.ones(len(counts)),
        }[options.reweight]()
        library = empty_library(len(counts), options.dim)
        context = {"class_weights": weights.float(), **library._asdict()}
        if options.loot:
            context |= {
                "public_sum": torch.zeros(options.public_samples, options.dim),
                "public_sites": torch.zeros(1, dtype=torch.int64),
            }
        return {**split_state(network), CONTEXT: context}

    def shared_modules(self) -> tuple[str, ...]:
        return ("fusion", "head")

    def _freeze_profiles(self) -> None:
        for card in self.table.cards:
            profile = self.options.profile_of(card.modalities)
            if profile == "image" and card.extra["reports"] and self.options.modality == "any":
                log(WARNING, "\t%s says it has images only and counts reports; it takes part with images", card.site)
            if profile == "paired" and card.extra["pairs"] < 2:
                log(WARNING, "\t%s has both modalities but %s pairs", card.site, card.extra["pairs"])
            if wrong := card_contradiction(card, profile):
                raise CardError(
                    f"the card of {card.site} contradicts itself: {wrong}; mend its manifest or leave it out"
                )
            self._profiles[card.site] = profile
        kinds = {card.extra["tokenizer"] for card in self.table.cards if card.extra["tokenizer"]}
        if len(kinds) > 1:
            raise CardError(
                "the sites with reports use different tokenisers; give all the same incongruent.text_dir or vocab_size"
            )
        if "paired" not in self._profiles.values() and self.options.modality == "any":
            log(WARNING, "no site has pairs: the gate stays as it starts and nothing aligns images with reports")
        if outside := epochs_outside(self._profiles, self.options):
            log(WARNING, "unusual local epochs, the method expects others: incongruent.%s", ", ".join(outside))
        log(INFO, "profiles: %s", ", ".join(f"{site} {profile}" for site, profile in sorted(self._profiles.items())))

    def _global_counts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Positives ``(C,)``, pairs of positives ``(C, C)``, known entries ``(C,)``, samples; suppressed ones as 0."""
        cards, size = self.table.trainable, len(self.table.labels)

        def total(values: list) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64).clamp(min=0).sum(dim=0)

        positives = total([card.positives for card in cards])
        known = positives + total([card.negatives for card in cards])
        pairs = total([card.extra["pair_counts"] for card in cards]).reshape(size, size)
        return positives, pairs, known, sum(card.num_train for card in cards)

    def _prior(self) -> torch.Tensor:
        """B ``(C, C) float64`` of the sites' cards (spec 3.5), whether or not the head reads it."""
        counts, pairs, _, total = self._global_counts()
        return cooccurrence_prior(pairs, counts, max(total, int(counts.max())))

    # -- a round (spec 5.2 to 5.4) --------------------------------------------------------------------------------

    def quorum(self) -> int:
        return 1 if self.options.pooled else super().quorum()

    def select_sites(self, server_round: int) -> list[SiteCard]:
        """The stratified draw with a decaying floor of paired sites."""
        cards, fed, options = list(self.table.trainable), self.settings.federation, self.options
        paired = [card for card in cards if self._profiles[card.site] == "paired"]
        if not paired and options.no_pair == "abort":
            raise QuorumError("no site with pairs is there and incongruent.no_pair = 'abort'; use 'proceed' or wait")
        count = min(fed.sites_per_round or len(cards), len(cards))
        rounds = options.rounds_of_decay(fed.rounds)
        quota = paired_quota(count, len(paired), server_round, options.start, options.end, rounds, options.decay)
        others = [card for card in cards if card not in paired]
        draws = seeding.numpy_generator(self.settings.seed, "select_sites", server_round)
        chosen = stratified(paired, others, count, quota, options.fill, draws)
        return sorted(chosen, key=lambda card: card.site)

    def sent_modules(self, card: SiteCard, server_round: int) -> tuple[str, ...]:
        """The modules of the site's profile, never another."""
        held = self.options.site_modules(self._profiles[card.site])
        return (CONTEXT, *(module for module in held if module in self.progress.modules))

    def round_config(self, card: SiteCard, server_round: int) -> dict[str, int | float | str]:
        return {"profile": self._profiles[card.site]}

    def trained_modules(self, card: SiteCard, server_round: int) -> tuple[str, ...]:
        last = self.settings.federation.rounds
        return self.options.trained_modules(self._profiles[card.site], server_round, last)

    def update_specs(self, card: SiteCard, server_round: int) -> dict[str, dict[str, wire.TensorSpec]]:
        specs = {module: wire.spec_of(state) for module, state in self.progress.modules.items()}
        profile, last = self._profiles[card.site], self.settings.federation.rounds
        return self.options.sent_specs(specs, profile, server_round, last, len(self.table.labels))

    def received(self, reply: Reply) -> Mapping[str, Arrays]:
        """Dense changes; prototype sums and public embeddings are put aside. Raises WireError for absurd counts."""
        self._check_counts(reply)
        self._check_pair_counts(reply)
        changes = {}
        for module, arrays in reply.modules.items():
            if module == PROTOTYPES:
                self._sums[reply.site] = self._checked_sums(reply.site, wire.tensors(arrays))
            elif module == PUBLIC:
                self._public[reply.site] = wire.tensors(arrays)["embeddings"]
            else:
                changes[module] = self._dense(module, arrays, reply.server_round)
        return changes

    def _checked_sums(self, site: str, sent: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Prototype sums and their flags. A patient adds 1 at most, so the sums are bounded (spec 4.4)."""
        reports = next(card for card in self.table.cards if card.site == site).extra["reports"]
        length, limit = float(torch.linalg.vector_norm(sent["sums"].double())), MAX_GROWTH * reports
        if not self.options.proto_sigma and length > limit:
            raise wire.WireError(f"its text directions add up to {length:.4g}, {reports} reports allow {limit:.4g}")
        return sent["sums"], sent["released"]

    def _dense_mean(self, module: str, mean: SecureMean, server_round: int) -> SecureMean:
        """A secure sum adds what was sent; with shared coordinates it is made dense afterwards."""
        if self.options.compressor(module) is None:
            return mean
        state = self.progress.modules[module]
        counters = {name: value.numpy() for name, value in state.items() if not value.is_floating_point()}
        return replace(mean, mean=self._dense(module, {**counters, **mean.mean}, server_round))

    def _dense(self, module: str, arrays: Arrays, server_round: int) -> Arrays:
        topk = self.options.compressor(module)
        if topk is None:
            return arrays
        specs = wire.spec_of(self.progress.modules[module])
        indices = None
        if topk.index == "shared_seed":
            draws = seeding.numpy_generator(self.settings.seed, f"sparse/{module}", server_round)
            indices = topk.shared_indices(specs, draws)
        return topk.decode(arrays, specs, indices=indices)

    def _check_counts(self, reply: Reply) -> None:
        if wire.EXTRA not in reply.numbers:
            return
        card = next(card for card in self.table.cards if card.site == reply.site)
        extra, there = reply.numbers[wire.EXTRA], card.extra
        limits = dict.fromkeys(("gate", *IMPUTATION), there["pairs"]) | {
            "vision": there["images"],
            "text": there["reports"],
        }
        for module in MODULES:
            found, limit = extra[f"n_{module}"], MAX_GROWTH * limits.get(module, card.num_train)
            if found > limit:
                raise wire.WireError(f"it counts {found} samples behind {module}, its card allows {limit:.0f}")
        if not 0 <= extra["trust"] <= 1:
            raise wire.WireError(f"its trust in its labels is {extra['trust']}, expected 0 to 1")

    def _check_pair_counts(self, reply: Reply) -> None:
        for split in reply.scores:
            card = next(card for card in self.table.cards if card.site == reply.site)
            size = card.split_sizes.get(split, 0)  # a view tells no pair
            numbers = reply.numbers[f"{wire.EXTRA}.{split}"]
            if wrong := pair_count_contradiction(numbers, size, len(self.table.labels)):
                raise wire.WireError(wrong)

    @property
    def weighting(self) -> str:
        count = "num_examples" if self.options.is_full else f"{self.options.agg_count} of each module"
        return f"{count} times trust in the labels"

    def weigh(self, reply: Reply, module: str) -> float:
        """Samples behind this module at the site, times the trust in its labels (spec 5.4); 0 leaves it out."""
        options, extra = self.options, reply.numbers[wire.EXTRA]
        count = extra[f"n_{module}"]
        if options.is_full or (options.agg_count == "client_samples" and count):
            count = reply.num_examples
        weight = min(float(count), self.weight_ceiling) * float(extra["trust"]) ** options.trust_zeta
        if options.profile_balance == "equal" and module in self.shared_modules():
            mine = self._profiles[reply.site]
            weight /= sum(card.num_train for card in self._selected if self._profiles[card.site] == mine)
        return weight

    def combine(self, means: Mapping[str, StreamingMean], server_round: int) -> Modules:
        if self.settings.privacy.secure_sum:
            means = {module: self._dense_mean(module, mean, server_round) for module, mean in means.items()}
        modules = super().combine(means, server_round)
        sums = [self._sums[site] for site in sorted(self._sums)]
        context = modules[CONTEXT]
        library = PrototypeLibrary(*(context[name] for name in PrototypeLibrary._fields))
        if self.options.proto_lambda and not self.options.alone:
            size = len(self.table.labels), self.options.dim
            library = update_prototypes(
                library,
                torch.stack([total for total, _ in sums]) if sums else torch.zeros(0, *size),
                torch.stack([released for _, released in sums]) if sums else torch.zeros(0, size[0], dtype=torch.bool),
                min_sites=self.options.proto_min_sites,
                momentum=self.options.proto_momentum,
                max_age=self.options.proto_max_age,
            )
        context |= library._asdict()
        if self._public:
            context["public_sum"] = torch.stack([self._public[site] for site in sorted(self._public)]).sum(dim=0)
            context["public_sites"] = torch.tensor([len(self._public)])
        self._sums, self._public = {}, {}
        self._cover(means, server_round)
        return modules

    # -- coverage (spec 5.5) --------------------------------------------------------------------------------------

    def _cover(self, means: Mapping[str, StreamingMean], server_round: int) -> None:
        """Counts who trained what; at the end every module must have been trained by somebody."""
        sites = [card.site for card in self.table.cards]
        for module in self._trainable():
            self._coverage.note(module, means[module].sites if module in means else (), sites, server_round)
        last, never = self.settings.federation.rounds, self._coverage.untrained()
        if never and server_round == min(5, last):
            log(WARNING, "\tnobody has trained %s yet", ", ".join(never))
        if server_round < last or self._observer is None:
            return
        self._observer.keep("coverage", self._coverage.by_tensor(sites, self.progress.modules))
        if never and self.options.coverage == "error":
            raise CoverageError(
                f"nobody ever trained {', '.join(never)}: the model would be served as it was initialised. See "
                "coverage.json; let such sites take part, or set incongruent.coverage = 'warn'"
            )

    def _trainable(self) -> list[str]:
        if self.options.alone:
            return []
        profiles = set(self._profiles.values())
        modules = {module for profile in profiles for module in profile_modules(profile, fusion=self.options.fusion)}
        if "paired" in profiles and self.options.impute:
            modules |= set(IMPUTATION)
        return [module for module in MODULES if module in modules and module in self.progress.modules]

    # -- evaluation (spec 7) --------------------------------------------------------------------------------------

    def figures(self, pools: Mapping[str, PooledScores]) -> dict[str, float | None]:
        """The four blocks of every view, and how critical labels do at the threshold that finds nearly all of them."""
        found: dict[str, float | None] = {}
        positives = self._global_counts()[0].numpy()
        hidden = [label in self.headline_excluded for label in self.table.labels]

        def auroc(pool: PooledScores, *scope: str) -> np.ndarray:
            return np.where(hidden, np.nan, pool.histogram(*scope).auroc())

        for view, pool in pools.items():
            by_site = {site: auroc(pool, site) for site in pool.sites}
            blocks = four_blocks(auroc(pool), by_site, positives)
            names = BLOCKS if view else BLOCKS[1:]
            found |= {f"{view}_{name}" if view else name: none_if_nan(blocks[name]) for name in names}
        return found | self._critical_figures(pools[""]) | self._cooccurrence_figures(pools[""])

    def _critical_figures(self, pool: PooledScores) -> dict[str, float | None]:
        labels, histogram = names_in(self.options.critical_labels), pool.histogram()
        if self._split == "val":
            self._critical = torch.from_numpy(histogram.recall_thresholds(self.options.critical_recall))
        if not labels or not len(self._critical):
            return {}
        thresholds = self._critical.numpy()
        recall, precision = histogram.sensitivity(thresholds), histogram.ppv(thresholds)
        found: dict[str, float | None] = {}
        for label in labels:
            index = self.table.labels.index(label)
            found |= {f"recall of {label}": none_if_nan(recall[index])}
            found |= {f"precision of {label}": none_if_nan(precision[index])}
        return found

    def _cooccurrence_figures(self, pool: PooledScores) -> dict[str, float | None]:
        """False positives where a label that goes with the absent one is there, over those where it is not (spec 3.5).

        What a site hides is left out of the sums. Warns once, of the test, where the prior acts as a cause.
        """
        size = len(self.table.labels)
        counts = np.zeros((len(PAIR_COUNTS), size, size), np.int64)
        for site in pool.sites:
            told = np.array([pool.counts[site][name] for name in PAIR_COUNTS]).reshape(counts.shape)
            counts += told.clip(min=0)
        lift, pairs, left_out = false_positive_lift(counts, self._prior().numpy())
        if lift > MAX_LIFT and self._split == "test":
            log(
                WARNING,
                "\tabsent labels are called %.1f times as often where one that goes with them is there (mean of %s "
                "pair%s): that labels go together acts as a cause",
                lift,
                pairs,
                "s" * (pairs != 1),
            )
        names = ("cooc_fp_lift", "cooc_fp_lift_pairs", "cooc_fp_lift_left_out")
        return dict(zip(names, (none_if_nan(lift), pairs, left_out), strict=True))

    # -- the result -----------------------------------------------------------------------------------------------

    def export(self) -> dict[str, torch.Tensor]:
        """The network's tensors by their full names; an image-only hospital needs vision, fusion and head of them."""
        return {
            f"{module}.{name}": value
            for module in MODULES
            for name, value in self.progress.modules.get(module, {}).items()
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"critical": self._critical, **self._coverage.state_dict()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._critical = state["critical"]
        self._coverage.load_state_dict(state)


register("incongruent", Incongruent, settings=IncongruentArea, site="client_app.incongruent")
