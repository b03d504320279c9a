"""FedLGT's network, states and loss: what label tokens are told, what the loss asks, and what unknown labels do."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from models.fedlgt import build_fedlgt, fedlgt_loss, label_states, random_masks, read_embeddings, unsure


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def small(name="small_cnn", num_labels=7, **options):
    torch.manual_seed(0)
    return build_fedlgt(name, num_labels=num_labels, draws=draws(), channels=1, image_size=16, width=8, **options)


def images_of(count=4):
    return torch.randn(count, 1, 16, 16, generator=draws(3))


def labelled(batch=6, labels=7, unknown=0.3):
    targets = torch.randint(0, 2, (batch, labels), generator=draws(1), dtype=torch.int8)
    return torch.where(torch.rand(batch, labels, generator=draws(2)) < unknown, -1, targets)


# -- network ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hidden", "width"), [("small_cnn", 0, 32), ("small_cnn", 20, 20), ("resnet18", 64, 64)]
)
def test_network_gives_one_logit_a_label_at_the_configured_width(name, hidden, width):
    network = small(name, hidden=hidden).eval()
    logits = network(images_of())
    assert logits.shape == (4, 7) and logits.dtype == torch.float32
    assert network.head.weight.shape == (7, width) and len(network.layers) == 3
    assert {layer.self_attn.num_heads for layer in network.layers} == {4}


def test_a_layer_has_six_squares_of_its_width():
    network = small()
    assert sum(value.numel() for value in network.layers[0].parameters()) == 6 * 32**2 + 10 * 32


def test_logits_are_those_of_a_plain_loop_over_samples_and_labels():
    network, images = small().eval(), images_of(3)
    states = torch.randint(0, 3, (3, 7), generator=draws(4))
    with torch.no_grad():
        found = network(images, states)
        for sample in range(3):
            feature_map = network.backbone(images[sample : sample + 1])[0]
            tokens = [feature_map[:, y, x] for y in range(2) for x in range(2)]
            for label in range(7):
                tokens.append(network.label_embeddings[label] + network.state_embeddings[states[sample, label]])
            sequence = network.norm(torch.stack(tokens))[None]
            for layer in network.layers:
                attended = layer.self_attn(sequence, sequence, sequence, need_weights=False)[0]
                sequence = layer.norm1(sequence + attended)
                sequence = layer.norm2(sequence + layer.linear2(F.relu(layer.linear1(sequence))))
            for label in range(7):
                expected = sequence[0, 4 + label] @ network.head.weight[label] + network.head.bias[label]
                assert found[sample, label].item() == pytest.approx(expected.item(), abs=2e-5)


def test_without_states_every_label_is_unknown():
    network, images = small().eval(), images_of()
    unknown = network(images, torch.zeros(4, 7, dtype=torch.int64))
    assert torch.equal(network(images), unknown)
    assert not torch.equal(network(images, torch.full((4, 7), 2)), unknown)


def test_what_one_label_is_told_reaches_the_others():
    network, images = small().eval(), images_of(1)
    one = torch.zeros(1, 7, dtype=torch.int64)
    told = one.clone()
    told[0, 2] = 2
    assert ((network(images, told) - network(images, one)).abs() > 1e-6).all()


def test_embeddings_are_in_no_state_dict_and_keep_their_bits_in_training():
    network = small()
    before = [network.label_embeddings.clone(), network.state_embeddings.clone()]
    assert not any("embeddings" in name for name in [*network.state_dict(), *dict(network.named_parameters())])
    optimiser = torch.optim.SGD(network.parameters(), lr=1.0, weight_decay=0.1)
    states = label_states(labelled(4), random_masks(4, 7, draws()))
    fedlgt_loss(network(images_of(), states), labelled(4), states).backward()
    optimiser.step()
    assert torch.equal(network.label_embeddings, before[0]) and torch.equal(network.state_embeddings, before[1])
    assert not network.state_embeddings[0].any()


def test_a_network_made_on_meta_and_emptied_has_its_embeddings_again():
    with torch.device("meta"):
        made = build_fedlgt("small_cnn", num_labels=7, draws=draws(), channels=1, image_size=16, width=8)
    network, images = small(), images_of()
    made.to_empty(device="cpu").load_state_dict(network.state_dict(), strict=True)
    assert made.frozen_sha256 == network.frozen_sha256
    assert torch.equal(made.eval()(images), network.eval()(images))
    assert torch.equal(copy.deepcopy(made)(images), made(images))


def test_a_width_that_the_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="width 30 is not divisible by 4 heads"):
        small(hidden=30)


def test_half_precision_network_still_gives_float32_logits_and_loss():
    network, targets = small(), labelled(4)
    states = label_states(targets, random_masks(4, 7, draws()))
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(images_of(), states)
    assert logits.dtype == fedlgt_loss(logits, targets, states).dtype == torch.float32


# -- embeddings from a file -------------------------------------------------------------------------------------------


def write(path, **changes):
    """Embeddings of seven labels, 12 numbers each, with other tensors in place of or beside them."""
    tensors = {"labels": torch.randn(7, 12, generator=draws()), "states": torch.randn(2, 12, generator=draws(1))}
    save_file({**tensors, **changes}, path)
    return path


def test_embeddings_of_a_file_are_used_projected_and_hashed(tmp_path):
    path = write(tmp_path / "clip.safetensors")
    labels, states = read_embeddings(path, 7)
    network = small(label_embeddings=str(path))
    assert torch.equal(network.label_embeddings, labels) and torch.equal(network.state_embeddings[1:], states)
    assert not network.state_embeddings[0].any()
    assert network.label_projection.weight.shape == (32, 12) and network(images_of()).shape == (4, 7)
    other = small(label_embeddings=str(write(tmp_path / "other.safetensors", states=states + 2**-10)))
    assert len({network.frozen_sha256, other.frozen_sha256, small().frozen_sha256}) == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": torch.zeros(6, 12)}, r"expected labels \(7, E\) and states \(2, E\)"),
        ({"states": torch.zeros(3, 12)}, r"expected labels \(7, E\) and states \(2, E\)"),
        ({"states": torch.zeros(2, 8)}, r"expected labels \(7, E\)"),
        ({"prompts": torch.zeros(1)}, "prompts"),
        ({"labels": torch.full((7, 12), torch.nan)}, "not finite"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_its_shapes(tmp_path, changes, reason):
    with pytest.raises(ValueError, match=reason):
        read_embeddings(write(tmp_path / "wrong.safetensors", **changes), 7)


def test_other_bytes_are_no_embeddings(tmp_path):
    (tmp_path / "text.safetensors").write_bytes(b"cat, dog")
    with pytest.raises(ValueError, match=r"text.safetensors is no safetensors file"):
        read_embeddings(tmp_path / "text.safetensors", 7)


# -- states and masks -------------------------------------------------------------------------------------------------


def test_states_tell_known_labels_that_are_not_hidden():
    targets = torch.tensor([[1, 0, -1, 1, 0, -1]], dtype=torch.int8)
    hidden = torch.tensor([[False, False, False, True, True, True]])
    assert label_states(targets, hidden).tolist() == [[2, 1, 0, 0, 0, 0]]


def test_unsure_are_the_scores_within_the_band():
    scores = torch.tensor([0.40, 0.479, 0.481, 0.50, 0.519, 0.521, 0.9])
    assert unsure(scores.logit(), 0.48, 0.52).tolist() == [False, False, True, True, True, False, False]
    assert unsure(torch.zeros(1), 0.5, 0.5).tolist() == [True]  # both ends count


def test_random_masks_tell_every_number_of_labels_up_to_three_quarters_evenly():
    hidden = random_masks(4000, 10, draws())
    told = (~hidden).sum(dim=1).bincount(minlength=11)
    assert told[8:].sum() == 0
    # 4000 draws over 8 numbers: 500 each, sd 21
    assert ((told[:8] - 500).abs() < 5 * 21).all()
    assert ((~hidden).float().mean(dim=0) - 0.35).abs().max() < 0.05  # no label is preferred: 3.5 of 10 told


def test_random_masks_follow_from_their_generator():
    assert torch.equal(random_masks(5, 9, draws(4)), random_masks(5, 9, draws(4)))
    assert not torch.equal(random_masks(5, 9, draws(4)), random_masks(5, 9, draws(5)))


# -- loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_labels", ["masked", "all"])
def test_loss_is_that_of_a_plain_loop(loss_labels):
    logits, targets = 2 * torch.randn(6, 7, generator=draws()), labelled()
    states = label_states(targets, random_masks(6, 7, draws(5)))
    total = 0.0
    for sample in range(6):
        for label in range(7):
            target = targets[sample, label]
            if target >= 0 and (loss_labels == "all" or states[sample, label] == 0):
                total += float(F.binary_cross_entropy_with_logits(logits[sample, label], target.float()))
    assert float(fedlgt_loss(logits, targets, states, loss_labels)) == pytest.approx(total / 6, rel=1e-5)


@pytest.mark.parametrize("loss_labels", ["masked", "all"])
def test_unknown_labels_have_zero_gradient(loss_labels):
    logits, targets = torch.randn(6, 7, generator=draws()).requires_grad_(), labelled()
    states = label_states(targets, random_masks(6, 7, draws(5)))
    (gradient,) = torch.autograd.grad(fedlgt_loss(logits, targets, states, loss_labels), logits)
    asked = (targets >= 0) & ((states == 0) if loss_labels == "masked" else True)
    assert asked.any() and (gradient[~asked] == 0).all() and (gradient[asked] != 0).all()


def test_a_batch_without_a_question_costs_nothing():
    targets = labelled(unknown=0)
    logits = torch.randn(6, 7).requires_grad_()
    states = label_states(targets, torch.zeros(6, 7, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(loss := fedlgt_loss(logits, targets, states), logits)
    assert loss.item() == 0 and not gradient.any()
