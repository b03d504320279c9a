"""The network of method `incongruent`: what is absent cannot touch anything, and a site holds only what it needs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.incongruent import (
    FUSIONS,
    MODULES,
    NETWORK_OPTIONS,
    PROFILE_MODULES,
    IncongruentNetwork,
    build_incongruent,
    load_modules,
    module_of,
    profile_modules,
    split_state,
)

BOTH, IMAGE, TEXT = (True, True), (True, False), (False, True)
PRESENT = torch.tensor([BOTH, IMAGE, TEXT, BOTH, IMAGE, TEXT])
ALL = ("vision", "text", "gate", "fusion", "head", "min_v2t", "min_t2v")


def network_of(profile="paired", *, fusion="gated", impute=False, modules=None, **options):
    """A small network with every parameter off its initial value; equal modules have equal weights."""
    if modules is None:
        modules = profile_modules(profile, fusion=fusion, impute=impute)
    torch.manual_seed(0)
    shape = {"vision": "tiny_vit", "image_size": 16, "channels": 1, "dim": 16, "vocab_size": 50}
    network = build_incongruent(5, modules=modules, fusion=fusion, **{**shape, **options})
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            draws = torch.Generator().manual_seed(sum(map(ord, name)))
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draws))
    return network.eval()


def batch(present=PRESENT):
    draws = torch.Generator().manual_seed(1)
    images = torch.randn(len(present), 1, 16, 16, generator=draws)
    tokens = torch.randint(3, 50, (len(present), 6), generator=draws)
    tokens[:, 0] = 1
    tokens[::2, 4:] = 0
    return images, tokens, present


def poisoned(present=PRESENT):
    """The same batch with NaN in images that are absent and other words in reports that are."""
    images, tokens, _ = batch(present)
    images[~present[:, 0]] = torch.nan
    tokens[~present[:, 1]] = 49
    return images, tokens, present


def gradients(network, loss):
    network.zero_grad()
    loss.backward()
    return {name: value.grad for name, value in network.named_parameters()}


# -- what is absent ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fusion", FUSIONS)
def test_planted_values_in_absent_inputs_change_nothing(fusion):
    network = network_of(fusion=fusion)
    clean, found = network.features(*batch()), network.features(*poisoned())
    assert all(torch.equal(a, b) for a, b in zip(clean, found, strict=True) if a is not None)
    assert found.logits.isfinite().all() and found.logits.shape == (6, 5)
    before = gradients(network, clean.logits.square().sum())
    after = gradients(network, found.logits.square().sum())
    assert all(torch.equal(after[name], before[name]) for name in before if before[name] is not None)
    assert all(value.isfinite().all() for value in after.values() if value is not None)


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize(("pattern", "trained", "other"), [(IMAGE, "vision", "text"), (TEXT, "text", "vision")])
def test_a_lone_modality_gives_the_other_branch_no_gradient(fusion, pattern, trained, other):
    network = network_of(fusion=fusion)
    found = gradients(network, network(*batch(torch.tensor([pattern] * 4))).square().sum())
    moved = {module_of(name) for name, value in found.items() if value is not None and (value != 0).any()}
    assert moved == {trained, "fusion", "head"}  # and not the gate
    assert all(value is None for name, value in found.items() if module_of(name) == other)


def test_gate_of_a_lone_modality_is_exactly_one():
    gate = network_of().features(*batch()).gate
    assert torch.equal(gate[~PRESENT.all(dim=1)], PRESENT[~PRESENT.all(dim=1)][:, :, None].expand(4, 2, 16).float())
    torch.testing.assert_close(gate.sum(dim=1), torch.ones(6, 16))


@pytest.mark.parametrize("fusion", FUSIONS)
@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(6)), count=st.integers(1, 6))
def test_a_samples_logits_do_not_depend_on_its_batch(fusion, order, count):
    network, (images, tokens, present) = network_of(fusion=fusion), batch()
    rows = torch.tensor(order[:count])
    with torch.no_grad():
        found = network(images[rows], tokens[rows], present[rows])
        torch.testing.assert_close(found, network(images, tokens, present)[rows], atol=1e-5, rtol=1e-4)


def test_encoders_run_on_the_rows_that_have_their_modality():
    network, seen = network_of(), {}
    for module in ("vision", "text"):
        network.get_submodule(module).register_forward_pre_hook(lambda _, given, m=module: seen.update({m: given[0]}))
    images, tokens, present = batch()
    network(images, tokens, present)
    assert torch.equal(seen["vision"], images[present[:, 0]]) and torch.equal(seen["text"], tokens[present[:, 1]])
    seen.clear()
    network(images, None, torch.tensor([IMAGE] * 6))
    assert set(seen) == {"vision"}


def test_batch_norm_of_an_encoder_does_not_see_absent_images():
    network = network_of(vision="small_cnn", width=8).train()
    twin = network_of(vision="small_cnn", width=8).train()
    images, tokens, present = poisoned()
    network(images, tokens, present)
    twin.vision(images[present[:, 0]])
    for name, value in twin.vision.named_buffers():
        assert torch.equal(network.vision.get_buffer(name), value)


def test_features_of_absent_modalities_are_zero():
    found = network_of().features(*poisoned())
    assert (found.z_image[~PRESENT[:, 0]] == 0).all() and (found.z_text[~PRESENT[:, 1]] == 0).all()
    assert torch.equal(found.present, PRESENT) and not found.imputed.any()


@pytest.mark.parametrize("fusion", FUSIONS)
def test_encodings_can_be_fused_again_with_less_present(fusion):
    # A teacher sees a pair, its student the image alone: one pass of the encoders serves both.
    network, (images, tokens, _) = network_of(fusion=fusion), batch()
    both, image = torch.tensor([BOTH] * 6), torch.tensor([IMAGE] * 6)
    encodings = network.encode(images, tokens, both)
    torch.testing.assert_close(network.fuse(*encodings, both).logits, network(images, tokens, both))
    torch.testing.assert_close(network.fuse(*encodings, image).logits, network(images, None, image))


@pytest.mark.parametrize(
    ("present", "match"),
    [
        (torch.zeros(6, 2, dtype=torch.bool), "an image or a report in every row"),
        (torch.ones(6, 3, dtype=torch.bool), r"must be \(B, 2\)"),
    ],
)
def test_samples_with_nothing_present_are_refused(present, match):
    with pytest.raises(ValueError, match=match):
        network_of()(*batch()[:2], present)


def test_a_modality_without_input_is_refused():
    with pytest.raises(ValueError, match="4 samples need 'vision', but it was given no input"):
        network_of()(None, *batch()[1:])


# -- profiles and modules ---------------------------------------------------------------------------------------------


def test_every_parameter_and_buffer_is_in_exactly_one_module():
    network = network_of(modules=ALL)
    names = set(network.state_dict())
    assert {module_of(name) for name in names} == set(MODULES)
    split = split_state(network)
    assert {f"{module}.{name}" for module, state in split.items() for name in state} == names
    assert sum(len(state) for state in split.values()) == len(names)
    with pytest.raises(ValueError, match=r"'backbone\.weight' is in none of the modules"):
        module_of("backbone.weight")


@pytest.mark.parametrize("profile", PROFILE_MODULES)
def test_a_site_holds_the_modules_of_its_profile_only(profile):
    network = network_of(profile)
    assert network.built == PROFILE_MODULES[profile]
    assert {module_of(name) for name, _ in network.named_parameters()} == set(PROFILE_MODULES[profile])


def test_an_image_only_site_holds_nothing_of_the_text_encoder():
    network = network_of("image")
    assert network.text is None and not any("text" in name for name in network.state_dict())
    with pytest.raises(ValueError, match="samples need 'text', but this network was built without it"):
        network(*batch())


@pytest.mark.parametrize(("profile", "pattern"), [("image", IMAGE), ("text", TEXT)])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_unimodal_site_computes_what_the_whole_network_does(profile, pattern, fusion):
    whole, part = network_of(fusion=fusion), network_of(profile, fusion=fusion)
    load_modules(part, split_state(whole))
    images, tokens, _ = batch()
    present = torch.tensor([pattern] * 6)
    assert torch.equal(part(images, tokens, present), whole(images, tokens, present))


def test_pairs_need_the_gate():
    network = network_of(modules=("vision", "text", "fusion", "head"))
    images, tokens, present = batch()
    with pytest.raises(ValueError, match="built without 'gate'"):
        network(images, tokens, present)
    lone = ~present.all(dim=1)
    assert torch.equal(
        network(images[lone], tokens[lone], present[lone]), network_of()(images[lone], tokens[lone], present[lone])
    )


@pytest.mark.parametrize(
    ("profile", "fusion", "impute", "expected"),
    [
        ("paired", "gated", False, PROFILE_MODULES["paired"]),
        ("image", "gated", True, ("vision", "gate", "fusion", "head", "min_v2t")),
        ("text", "gated", True, ("text", "gate", "fusion", "head", "min_t2v")),
        ("paired", "attention", True, ("vision", "text", "fusion", "head", "min_v2t", "min_t2v")),
        ("image", "mean", False, ("vision", "fusion", "head")),
    ],
)
def test_what_a_profile_is_sent(profile, fusion, impute, expected):
    assert profile_modules(profile, fusion=fusion, impute=impute) == expected
    assert network_of(profile, fusion=fusion, impute=impute).built == expected


def test_modules_load_into_a_network_that_was_made_without_memory():
    network = network_of(modules=ALL)
    with torch.device("meta"):
        other = build_incongruent(5, modules=ALL, vision="tiny_vit", image_size=16, channels=1, dim=16, vocab_size=50)
    other.to_empty(device="cpu")
    load_modules(other, split_state(network))
    assert torch.equal(other.eval()(*batch()), network(*batch()))


def test_modules_that_are_absent_or_do_not_fit_are_refused():
    network, state = network_of(), split_state(network_of())
    with pytest.raises(ValueError, match="the state has no module gate"):
        load_modules(network, {name: value for name, value in state.items() if name != "gate"})
    del state["head"]["bias"]
    with pytest.raises(RuntimeError, match="bias"):
        load_modules(network, state)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"modules": ("vision", "fusion", "head", "audio")}, "no module audio"),
        ({"modules": ("vision", "text", "gate")}, "a network needs fusion, head"),
        ({"modules": ("fusion", "head")}, "needs 'vision' or 'text'"),
        ({"modules": ("vision", "gate", "fusion", "head"), "fusion": "mean"}, "fusion='mean' has no gate"),
        ({"fusion": "sum"}, "fusion='sum' is unknown; there are gated, mean, zero_concat, attention"),
        ({"dim": 18}, "dim=18 must be divisible"),
        ({"head": "mlp"}, "head='mlp' is unknown"),
        ({"gate": "matrix"}, "gate='matrix' is unknown"),
        ({"fusion": "attention", "modules": ("vision", "fusion", "head"), "attn_mask": "half"}, "'half' is unknown"),
    ],
)
def test_networks_that_make_no_sense_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        build_incongruent(5, **{"vision": "tiny_vit", "image_size": 16, "dim": 16, **changes})


def test_an_unknown_profile_is_refused():
    with pytest.raises(ValueError, match="profile 'audio' is unknown; there are paired, image, text"):
        profile_modules("audio")


def test_the_same_seed_gives_the_same_weights():
    def built():
        torch.manual_seed(7)
        return build_incongruent(5, vision="tiny_vit", image_size=16, dim=16, vocab_size=50).state_dict()

    first, second = built(), built()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_options_are_arguments_of_the_builder():
    import inspect

    assert set(NETWORK_OPTIONS) < set(inspect.signature(build_incongruent).parameters)


def test_sizes_are_those_of_the_specification():
    with torch.device("meta"):
        network = build_incongruent(14, modules=ALL, vision="resnet50", text="base", vocab_size=30522)
    sizes = {module: sum(value.numel() for value in getattr(network, module).parameters()) for module in network.built}
    assert sizes == {
        "vision": 23_508_032 + 524_544,
        "text": 108_891_648 + 196_864,
        "gate": 263_680,
        "fusion": 264_448,
        "head": 335_374,
        "min_v2t": 131_584,
        "min_t2v": 131_584,
    }


# -- imputation, sources, modes ---------------------------------------------------------------------------------------


def test_imputation_trains_with_every_fusion():
    for fusion in FUSIONS:
        network = network_of(modules=[name for name in ALL if name != "gate" or fusion == "gated"], fusion=fusion)
        found = gradients(network, network(*poisoned(), impute=True).square().sum())
        assert all(value.isfinite().all() for value in found.values() if value is not None)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_imputation_fills_what_is_absent_for_the_fusion_alone(fusion):
    modules = [name for name in ALL if name != "gate" or fusion == "gated"]
    network = network_of(modules=modules, fusion=fusion)
    plain, guessed = network.features(*poisoned()), network.features(*poisoned(), impute=True)
    assert torch.equal(guessed.imputed, ~PRESENT) and torch.equal(guessed.present, PRESENT)
    assert torch.equal(guessed.z_image, plain.z_image) and torch.equal(guessed.z_text, plain.z_text)
    moved = (guessed.logits != plain.logits).any(dim=1)
    assert moved[~PRESENT.all(dim=1)].all()
    torch.testing.assert_close(guessed.logits[PRESENT.all(dim=1)], plain.logits[PRESENT.all(dim=1)])


def test_imputed_features_are_those_of_the_nets():
    network = network_of(modules=ALL)
    plain, guessed = network.features(*batch()), network.features(*batch(), impute=True)
    z_image = torch.where(PRESENT[:, :1], plain.z_image, network.min_t2v(plain.z_text))
    z_text = torch.where(PRESENT[:, 1:], plain.z_text, network.min_v2t(plain.z_image))
    full = torch.ones(6, 2, dtype=torch.bool)
    gate = network.gate(z_image, z_text, full)
    torch.testing.assert_close(guessed.gate, gate)
    torch.testing.assert_close(guessed.f, network.fusion(z_image, z_text, full, gate))


def test_no_gradient_passes_a_guess():
    network, present = network_of(modules=ALL), torch.tensor([IMAGE] * 6)
    found = gradients(network, network(*batch(present), impute=True).square().sum())
    for name, value in found.items():
        if module_of(name) in ("text", "min_v2t", "min_t2v"):
            assert value is None
    # The image's own path stays: it is as if the report's feature were a constant.
    encodings = network.encode(*batch(present)[:2], present)
    constant = network.min_v2t(encodings[0].z).detach()
    gate = network.gate(encodings[0].z, constant, torch.ones_like(present))
    f = network.fusion(encodings[0].z, constant, torch.ones_like(present), gate)
    again = gradients(network, network.head(f).square().sum())
    torch.testing.assert_close(again["vision.projection.weight"], found["vision.projection.weight"])


def test_an_image_site_imputes_reports_without_a_text_encoder():
    for fusion in FUSIONS:
        network = network_of("image", fusion=fusion, impute=True)
        images = batch()[0]
        found = network.features(images, None, torch.tensor([IMAGE] * 6), impute=True)
        assert torch.equal(found.imputed, torch.tensor([[False, True]] * 6)) and found.logits.isfinite().all()
        with pytest.raises(ValueError, match="need 'text'"):
            network(images, None, torch.tensor([TEXT] * 6), impute=True)


@pytest.mark.parametrize("fusion", ["gated", "attention"])
def test_label_source_is_an_input_where_it_was_asked_for(fusion):
    network = network_of(fusion=fusion, source_input=True)
    reviewed, auto = torch.zeros(6, dtype=torch.int64), torch.ones(6, dtype=torch.int64)
    assert torch.equal(network(*batch(), sources=reviewed), network(*batch()))
    assert (network(*batch(), sources=auto) != network(*batch())).any(dim=1).all()
    blind = network_of(fusion=fusion)
    assert torch.equal(blind(*batch(), sources=auto), blind(*batch()))


@pytest.mark.parametrize("fusion", ["gated", "attention"])
def test_training_mode_draws_from_torchs_generator_only(fusion):
    network = network_of(fusion=fusion).train()
    torch.manual_seed(5)
    first, second = network(*batch()), network(*batch())
    torch.manual_seed(5)
    assert torch.equal(network(*batch()), first) and not torch.equal(first, second)
    assert torch.equal(network.eval()(*batch()), network(*batch()))


@pytest.mark.parametrize("fusion", FUSIONS)
def test_bfloat16_autocast_gives_finite_logits_near_the_exact_ones(fusion):
    network = network_of(fusion=fusion)
    with torch.autocast("cpu", torch.bfloat16):
        found = network(*batch())
    torch.testing.assert_close(found.float(), network(*batch()), atol=0.15, rtol=0.1)


def test_float64_stays_float64():
    network = network_of("image").double()
    assert network(batch()[0].double(), None, torch.tensor([IMAGE] * 6)).dtype == torch.float64
    assert isinstance(network, IncongruentNetwork)
