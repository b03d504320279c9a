"""Names of what travels in `incongruent` beside the network's modules, for both halves of the method.

The project's incongruent specification, sections 5.1, 5.3 and 7. `strategies.incongruent_area` says when what is sent.
"""

from __future__ import annotations

from models.incongruent_network import MODULES

VISION, TEXT, GATE = "vision", "text", "gate"
IMPUTATION = ("min_v2t", "min_t2v")
PROFILES = ("paired", "image", "text")
VIEWS = ("both", "image", "text")
"""Samples scored with both modalities, with the image only, with the report only (spec 7)."""

CONTEXT = "context"
"""What a site is told beside the network: class weights, prototypes, and the sum of the public embeddings."""
PROTOTYPES, PUBLIC = "prototypes", "public"
"""What a site sends beside changes: its sums of text directions, its embeddings of the public samples."""

LOSS_PARTS = ("classification", "contrastive", "consistency", "prototype", "output", "distillation", "contrast")
TRAIN_NUMBERS = {
    **{f"n_{module}": "count" for module in MODULES},
    "trust": "real",
    **{f"loss_{part}": "real" for part in LOSS_PARTS},
}
"""Numbers in a training reply: samples behind each module, mean trust in the labels, mean of each term of the loss."""

CARD_NUMBERS = {"images": "count", "reports": "count", "pairs": "count", "pair_counts": "counts", "tokenizer": "count"}
"""Numbers on a site card: samples by modality, positives of every two labels ``(C * C)``, the tokeniser's hash."""
