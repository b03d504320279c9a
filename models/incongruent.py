"""`incongruent`: one image-and-report model for sites that hold pairs, images only, or reports only.

Saha, Mishra, Wagner, Kamnitsas, Noble, "Incongruent Multimodal Federated Learning for Medical Vision and Language-based
Multi-label Disease Detection", AAAI 2025, and "Examining Modality Incongruity in Multimodal Federated Learning",
arXiv 2402.05294. Only the abstracts could be read; the formulas are those of the project's incongruent specification,
section 3. A site builds and trains only the modules of its profile, so what it lacks cannot be harmed by it.

What travels, float32, d = 256, C labels: the modules of `MODULES` that a site's profile needs (`profile_modules`), each
as its own record of tensors. gate 263,680 numbers, fusion 264,448, head 331,776 + 257 C (and the prior, C x C); vision
and text are the encoders with a projection. Serving needs ``vision``, ``fusion``, ``head``: never a report.

The parts, by topic: `vision`, `text`, `incongruent_fusion`, `incongruent_head`, `incongruent_network`,
`incongruent_losses`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from models.incongruent_fusion import (
    ATTENTION_MASKS,
    FUSIONS,
    GATES,
    AttentionFusion,
    FusionGate,
    GatedFusion,
    PooledFusion,
    attention_mask,
    imputation_net,
)
from models.incongruent_head import HEADS, build_head, cooccurrence_prior, initialise_head, prevalence_bias
from models.incongruent_losses import asymmetric_loss, contrastive_loss, pairing_weight, prototype_loss
from models.incongruent_network import MODULES, Encoding, Features, IncongruentNetwork
from models.text import VOCAB_SIZE, build_text_encoder, build_tokenizer
from models.vision import build_vision_encoder

__all__ = [
    "ATTENTION_MASKS",
    "FUSIONS",
    "GATES",
    "HEADS",
    "MODULES",
    "NETWORK_OPTIONS",
    "PROFILE_MODULES",
    "Encoding",
    "Features",
    "GatedFusion",
    "IncongruentNetwork",
    "asymmetric_loss",
    "attention_mask",
    "build_incongruent",
    "build_tokenizer",
    "contrastive_loss",
    "cooccurrence_prior",
    "initialise_head",
    "load_modules",
    "module_of",
    "pairing_weight",
    "prevalence_bias",
    "profile_modules",
    "prototype_loss",
    "split_state",
]

PROFILE_MODULES = {
    "paired": ("vision", "text", "gate", "fusion", "head"),
    "image": ("vision", "fusion", "head"),
    "text": ("text", "fusion", "head"),
}
"""What a site of a profile trains with the gated fusion. Both encoders and the gate only where there are pairs."""

NETWORK_OPTIONS = (
    "fusion",
    "gate",
    "attn_mask",
    "head",
    "lambda_co",
    "dim",
    "text",
    "text_dir",
    "vocab_size",
    "source_input",
)
"""Arguments of `build_incongruent` that are settings of a run."""


def module_of(name: str) -> str:
    """The module that a full tensor name of the network's state dict belongs to. Raises ValueError for another name.

    >>> module_of("vision.projection.weight")
    'vision'
    """
    module = name.partition(".")[0]
    if module not in MODULES:
        raise ValueError(f"{name!r} is in none of the modules {', '.join(MODULES)}")
    return module


def split_state(network: IncongruentNetwork) -> dict[str, dict[str, Tensor]]:
    """The state dict by module, in the order of `MODULES`, for the modules that are built.

    Names are relative to the module: ``projection.weight``, as ``getattr(network, module).state_dict()`` has them.
    """
    return {module: dict(getattr(network, module).state_dict()) for module in network.built}


def load_modules(network: IncongruentNetwork, states: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Loads `split_state`'s result; every module that is built must be there, and fit. Others are not looked at.

    Raises ValueError for an absent module, RuntimeError (torch's, with the names) where tensors do not fit.
    """
    if absent := [module for module in network.built if module not in states]:
        raise ValueError(f"the state has no module {', '.join(absent)}; there are {', '.join(sorted(states))}")
    for module in network.built:
        getattr(network, module).load_state_dict(dict(states[module]), strict=True)


def profile_modules(profile: str, *, fusion: str = "gated", impute: bool = False) -> tuple[str, ...]:
    """Modules that a site of this profile must be sent. Raises ValueError for an unknown profile.

    Fusions other than ``gated`` have no gate. ``impute``: also the MIN nets that the site can use and, for what they
    guess, the gate; a site without pairs keeps these as they are.
    """
    if profile not in PROFILE_MODULES:
        raise ValueError(f"profile {profile!r} is unknown; there are {', '.join(PROFILE_MODULES)}")
    wanted = set(PROFILE_MODULES[profile])
    if impute:
        wanted |= {"gate", *({"min_v2t"} if "vision" in wanted else ()), *({"min_t2v"} if "text" in wanted else ())}
    if fusion != "gated":
        wanted -= {"gate"}
    return tuple(module for module in MODULES if module in wanted)


def build_incongruent(
    num_labels: int,
    *,
    modules: Collection[str] = PROFILE_MODULES["paired"],
    fusion: str = "gated",
    gate: str = "vector",
    attn_mask: str = "full",
    head: str = "label_attn",
    lambda_co: float = 0.5,
    dim: int = 256,
    vision: str = "small_cnn",
    channels: int = 3,
    image_size: int = 224,
    width: int = 32,
    norm: str = "batch",
    text: str = "tiny",
    text_dir: str = "",
    vocab_size: int = VOCAB_SIZE,
    source_input: bool = False,
) -> IncongruentNetwork:
    """The network with only the named ``modules``, initial weights from torch's current generator.

    ``vision``, ``channels``, ``image_size``, ``width``, ``norm``: see `build_vision_encoder`; ``text``, ``text_dir``,
    ``vocab_size``: see `build_text_encoder`. ``dim``: shared width d, divisible by 4. ``gate`` is a choice of the gated
    fusion, ``attn_mask`` of that by attention. ``source_input``: the fusion is told the label source (spec 4.1).

    >>> import torch
    >>> network = build_incongruent(14, modules=("vision", "fusion", "head"), vision="tiny_vit", image_size=32)
    >>> network(torch.zeros(2, 3, 32, 32), None, torch.tensor([[True, False]] * 2)).shape
    torch.Size([2, 14])
    """
    _check(modules, fusion, dim)
    shape = {"channels": channels, "image_size": image_size, "width": width, "norm": norm}
    builders = {
        "vision": lambda: build_vision_encoder(vision, dim=dim, **shape),
        "text": lambda: build_text_encoder(text, dim=dim, folder=text_dir, vocab_size=vocab_size),
        "gate": lambda: FusionGate(dim, gate),
        "fusion": lambda: (
            AttentionFusion(dim, mask=attn_mask, sources=source_input)
            if fusion == "attention"
            else PooledFusion(dim, concat=fusion == "zero_concat", sources=source_input)
        ),
        "head": lambda: build_head(head, dim, num_labels, lambda_co=lambda_co),
        "min_v2t": lambda: imputation_net(dim),
        "min_t2v": lambda: imputation_net(dim),
    }
    return IncongruentNetwork({name: builders[name]() for name in MODULES if name in modules}, fusion=fusion, dim=dim)


def _check(modules: Collection[str], fusion: str, dim: int) -> None:
    if fusion not in FUSIONS:
        raise ValueError(f"fusion={fusion!r} is unknown; there are {', '.join(FUSIONS)}")
    if unknown := sorted(set(modules) - set(MODULES)):
        raise ValueError(f"no module {', '.join(unknown)}; there are {', '.join(MODULES)}")
    if lacking := sorted({"fusion", "head"} - set(modules)):
        raise ValueError(f"a network needs {', '.join(lacking)}, got only {', '.join(modules)}")
    if not {"vision", "text"} & set(modules):
        raise ValueError("a network needs 'vision' or 'text'")
    if "gate" in modules and fusion != "gated":
        raise ValueError(f"fusion={fusion!r} has no gate; use profile_modules(profile, fusion={fusion!r})")
    if dim < 4 or dim % 4:
        raise ValueError(f"dim={dim} must be divisible by the 4 heads of the attention layers")
