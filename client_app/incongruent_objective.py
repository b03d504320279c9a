"""The loss of `incongruent` at a site (the project's incongruent specification, section 4.8).

L = L_cls + la omega L_con + lc L_cons + lp L_proto + L_prox + nu L_out + lm L_mad.
A term whose inputs are missing is 0. A sample whose image or logits are not finite is left out (spec section 9).
The frozen global model runs once a batch for all terms that look at it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from client_app.incongruent_samples import Samples, smoothing_of, trust_of
from datasets.records import IMAGE
from models.incongruent import IncongruentNetwork
from models.incongruent_asymmetric import asymmetric_loss
from models.incongruent_losses import (
    consistency_loss,
    contrastive_loss,
    mad_loss,
    moon_loss,
    output_penalty,
    pairing_weight,
    prototype_loss,
)
from models.incongruent_network import Encoding, Features


@dataclass(frozen=True)
class Around:
    """What the loss looks at beside the batch: the frozen global model, the site's previous one, the context."""

    profile: str
    reference: IncongruentNetwork
    previous: IncongruentNetwork | None
    context: dict[str, Tensor]
    num_pairs: int
    num_records: int
    precision: torch.dtype | None = None


def objective(
    network: IncongruentNetwork, samples: Samples, around: Around, options, draws: torch.Generator, totals: Counter[str]
) -> Callable[[Tensor, Tensor | None, Tensor], Tensor]:
    """The loss of a batch ``(rows, images, targets)``; adds every term, times the batch, to ``totals``.

    So with ``bad images`` and ``bad logits``, the samples that are left out because theirs are not finite.
    """
    context, unimodal = around.context, around.profile != "paired"
    omega = pairing_weight(around.num_pairs, around.num_records, options.align_rho)
    needs_reference = (
        (options.cons_lambda > 0 and around.profile == "image")
        or (unimodal and options.prox_mode in ("both", "output"))
        or options.mad_lambda > 0
        or around.previous is not None
    )

    def half(device: torch.device) -> torch.autocast:
        """The networks may run in half precision; every loss is float32 (spec 9)."""
        return torch.autocast(device.type, around.precision, enabled=around.precision is not None)

    def loss_of(rows: Tensor, images: Tensor | None, targets: Tensor) -> Tensor:
        bad = _has_bad_image(images, samples.present[rows.cpu()])
        totals["bad images"] += int(bad.sum())
        return loss_of_sound(*_without(bad, rows, images, targets))

    def loss_of_sound(rows: Tensor, images: Tensor | None, targets: Tensor) -> Tensor:
        if not len(rows):
            return torch.zeros((), device=targets.device, requires_grad=True)
        device = targets.device
        index = rows.cpu()
        present, sources = samples.present[index].to(device), samples.sources[index]
        tokens = samples.tokens_of(index)
        tokens = None if tokens is None else tokens.to(device)
        known = targets >= 0
        with half(device):
            image, text = network.encode(images, tokens, present)
            seen = network.fuse(image, text, present, impute=options.impute, sources=sources.to(device))
        bad = ~seen.logits.isfinite().all(dim=1)
        if bad.any():  # again without them: a masked loss still sends 0 * NaN back through them
            totals["bad logits"] += int(bad.sum())
            return loss_of_sound(*_without(bad.cpu(), rows, images, targets))
        parts = {"classification": _classification(seen, targets, known, sources, context, options)}
        pairs = samples.there[index].all(dim=1).to(device)
        if options.align_lambda * omega > 0:
            parts["contrastive"] = (
                options.align_lambda * omega * _contrast(seen, pairs, samples.studies[index], targets, options)
            )
        if options.proto_lambda > 0 and around.profile == "image":
            parts["prototype"] = options.proto_lambda * prototype_loss(
                seen.z_image, targets, known, context["prototypes"], context["available"], options.proto_temperature
            )
        if needs_reference:
            with torch.no_grad(), half(device):
                given = around.reference.features(
                    images, tokens, present, impute=options.impute, sources=sources.to(device)
                )
            parts |= _towards_global(network, seen, given, image, text, targets, known, pairs, sources.to(device))
            if around.previous is not None:
                with torch.no_grad(), half(device):
                    before = around.previous.features(
                        images, tokens, present, impute=options.impute, sources=sources.to(device)
                    ).f
                parts["contrast"] = options.moon_weight * moon_loss(seen.f, given.f, before)
        totals["samples"] += len(targets)
        for name, value in parts.items():
            totals[name] += float(value.detach()) * len(targets)
        return sum(parts.values())

    def _towards_global(
        network: IncongruentNetwork,
        seen: Features,
        given: Features,
        image: Encoding,
        text: Encoding,
        targets: Tensor,
        known: Tensor,
        pairs: Tensor,
        sources: Tensor,
    ) -> dict[str, Tensor]:
        found = {}
        if options.cons_lambda > 0 and around.profile == "image":
            rows = seen.present[:, IMAGE]
            found["consistency"] = options.cons_lambda * consistency_loss(
                seen.z_image[rows],
                given.z_image[rows],
                targets[rows],
                known[rows],
                context["prototypes"],
                context["available"],
                mode=options.cons_mode,
            )
        if unimodal and options.prox_mode in ("both", "output"):
            found["output"] = options.prox_nu * output_penalty(seen.f, given.f)
        if options.mad_lambda > 0:
            student, shown = _student(network, image, text, seen, pairs, sources)
            found["distillation"] = options.mad_lambda * mad_loss(
                student, given.logits, shown, given.present | given.imputed, options.mad_temperature
            )
        return found

    def _student(
        network: IncongruentNetwork, image: Encoding, text: Encoding, seen: Features, pairs: Tensor, sources: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same samples with one modality of each pair dropped at random; unimodal ones as they are (spec 4.6)."""
        if not pairs.any():
            return seen.logits, seen.present
        dropped = torch.randint(0, 2, (len(pairs),), generator=draws).to(pairs.device)
        shown = seen.present.clone()
        shown[pairs, dropped[pairs]] = False
        with half(shown.device):
            return network.fuse(image, text, shown, sources=sources).logits, shown

    return loss_of


def _has_bad_image(images: Tensor | None, present: Tensor) -> Tensor:
    """Samples with an image that is not finite, ``(B,) bool``. What stands in place of an absent one is not looked at.

    Found before the networks run: one such image would spoil BatchNorm's statistics of its whole batch.
    """
    if images is None:
        return torch.zeros(len(present), dtype=torch.bool)
    return present[:, IMAGE] & ~images.flatten(1).sum(dim=1).isfinite().cpu()


def _without(bad: Tensor, rows: Tensor, images: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """The batch without its bad samples, ``bad (B,) bool`` on the CPU."""
    if not bad.any():
        return rows, images, targets
    rows, images, targets = (None if part is None else part[~bad.to(part.device)] for part in (rows, images, targets))
    return rows, images, targets


def _classification(
    seen: Features, targets: Tensor, known: Tensor, sources: Tensor, context: dict[str, Tensor], options
) -> Tensor:
    eps_pos, eps_neg = (part.to(targets.device) for part in smoothing_of(sources, options))
    return asymmetric_loss(
        seen.logits,
        targets,
        known,
        gamma_pos=options.gamma_pos,
        gamma_neg=options.gamma_neg,
        shift=options.shift,
        trust=trust_of(sources, options).to(targets.device),
        class_weights=context["class_weights"],
        pos_weight_only=options.reweight == "pos_weight",
        eps_pos=eps_pos,
        eps_neg=eps_neg,
    )


def _contrast(seen: Features, pairs: Tensor, studies: Tensor, targets: Tensor, options) -> Tensor:
    return contrastive_loss(
        seen.z_image[pairs],
        seen.z_text[pairs],
        studies.to(pairs.device)[pairs],
        targets[pairs],
        options.align_temperature,
        options.align_eta,
    )
