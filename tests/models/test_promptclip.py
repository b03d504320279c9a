"""The prompt-tuning baselines: one head, and what each of them trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from federation import seeding
from models.clip import patch_features, random_clip
from models.fedmpt_text import encode_text
from models.promptclip import mean_direction, name_features, pooled
from models.promptclip_variants import (
    ITERATIONS,
    RAM_REG,
    RAM_TEACHER,
    VARIANTS,
    build_promptclip,
    constrained_transport,
    partial_transport,
)

LABELS = ("cat", "tv_monitor", "potted plant")
CLASSES, DIM, WIDTH, TOKENS = len(LABELS), 32, 32, 4


@pytest.fixture(scope="module")
def clip():
    with seeding.scope(1, "clip"):
        return random_clip()


@pytest.fixture(scope="module")
def images(clip):
    return torch.randn(5, 3, clip.image_size, clip.image_size, generator=torch.Generator().manual_seed(1))


def made(clip, variant, labels=LABELS, num_tokens=TOKENS):
    with seeding.scope(2, "prompts"):
        network = build_promptclip(clip, labels, variant, num_tokens=num_tokens)
        draws = torch.Generator().manual_seed(3)
        for value in network.parameters():  # off the start, where gradients may vanish by symmetry
            value.data += 0.02 * torch.randn(value.shape, generator=draws)
    return network


def scores(network, clip, images):
    patches = network.patches(clip, images if network.reads_pixels else patch_features(clip, images))
    return network(patches, network.text_features(clip.model))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_baseline_gives_logits_and_trains_nothing_of_clip(variant, clip, images):
    network = made(clip, variant)
    found = scores(network, clip, images)
    assert found.shape == (5, CLASSES) and found.dtype == torch.float32 and found.isfinite().all()
    found.sum().backward()
    without = [name for name, value in network.named_parameters() if value.grad is None or not value.grad.any()]
    # softmax over keys does not see what is added to all of them, so the keys' bias has no gradient
    assert [name for name in without if name != "key.bias"] == []
    assert all(value.grad is None for value in clip.model.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_pictures_do_not_see_each_other_and_classes_have_no_order(variant, clip, images):
    network = made(clip, variant).eval()
    with torch.no_grad():
        together = scores(network, clip, images)
        singly = torch.cat([scores(network, clip, image[None]) for image in images])
        torch.testing.assert_close(together, singly, rtol=1e-4, atol=1e-3)
        start, order = (build_promptclip(clip, names, variant) for names in (LABELS, LABELS[::-1]))
        state = {
            name: value.flip(-3) if value.ndim == 4 and value.shape[1] == CLASSES else value
            for name, value in start.state_dict().items()
        }
        if "negative" in state:
            state["negative"] = state["negative"].flip(0)
        order.load_state_dict(state)
        turned = scores(order.eval(), clip, images).flip(1)
        torch.testing.assert_close(scores(start.eval(), clip, images), turned, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("poscoop", {"context": TOKENS * WIDTH, "negative": CLASSES * DIM}),
        ("dualcoop", {"context": 2 * CLASSES * TOKENS * WIDTH}),
        ("otp", {"context": TOKENS * WIDTH, "negative": CLASSES * DIM}),
    ],
)
def test_what_travels_is_what_the_docstring_says(variant, expected, clip):
    travelling = build_promptclip(clip, LABELS, variant).modules_that_travel()
    assert {name: value.numel() for name, value in travelling["model"].items()} == expected
    assert set(travelling.get("own", {})) == ({"own"} if variant == "otp" else set())


def test_baselines_start_as_clip_is(clip, images):
    patches, names = patch_features(clip, images), name_features(clip, LABELS)
    expected = 5 * (pooled(patches, names[None]) - pooled(patches, mean_direction(names).expand(1, CLASSES, -1)))
    for variant in ("zero_shot", "poscoop", "tpg"):
        found = scores(build_promptclip(clip, LABELS, variant), clip, images)
        torch.testing.assert_close(found, expected[:, 0], rtol=1e-4, atol=1e-3)


def test_a_score_is_the_pooled_similarity_of_the_patches(clip):
    draws = torch.Generator().manual_seed(4)
    patches, text = torch.randn(2, 6, DIM, generator=draws), torch.randn(1, CLASSES, DIM, generator=draws)
    found = pooled(patches, text)
    for picture in range(2):
        for label in range(CLASSES):
            o = 20 * nn.functional.cosine_similarity(patches[picture], text[0, label][None], dim=1)
            assert float(found[picture, 0, label]) == pytest.approx(float((o * o.softmax(0)).sum()), abs=1e-4)


def test_contexts_are_read_between_the_start_and_the_class_name(clip):
    network = made(clip, "dualcoop")
    text = network.text_features(clip.model)
    rows = clip.embeddings[network.tokens.ids[0].clamp(min=0)].clone()
    for side in range(2):
        for label in range(CLASSES):
            row = rows[label].clone()
            row[1 : 1 + TOKENS] = network.context[side, label]
            full = encode_text(clip.model, row[None], network.tokens.eot[0, label][None], "full")
            torch.testing.assert_close(text[side, label], full[0], rtol=1e-4, atol=1e-5)


def test_names_are_read_as_a_photo_of_them(clip):
    ids = [clip.tokenizer.sot_token_id, *clip.tokenizer.encode("a photo of a tv monitor."), clip.tokenizer.eot_token_id]
    rows = clip.embeddings[torch.tensor([ids])]
    expected = encode_text(clip.model, rows, torch.tensor([len(ids) - 1]), "full")[0]
    torch.testing.assert_close(name_features(clip, LABELS)[1], expected, rtol=1e-4, atol=1e-5)


def test_the_class_mean_ignores_how_long_features_are():
    features = torch.tensor([[2.0, 0.0], [0.0, 0.5]])
    torch.testing.assert_close(mean_direction(features), torch.tensor([0.5, 0.5]))


def test_one_label_and_two_that_read_the_same_are_refused(clip):
    with pytest.raises(ValueError, match="at least 2"):
        build_promptclip(clip, ("cat",), "poscoop")
    with pytest.raises(ValueError, match="read the same"):
        build_promptclip(clip, ("tv_monitor", "tv monitor"), "poscoop")


def test_the_hash_tells_variants_names_and_order_apart(clip):
    hashes = {
        build_promptclip(clip, labels, variant, num_tokens=tokens).frozen_sha256
        for labels, variant, tokens in (
            (LABELS, "poscoop", 4),
            (LABELS[::-1], "poscoop", 4),
            (LABELS, "dualcoop", 4),
            (LABELS, "poscoop", 5),
        )
    }
    assert len(hashes) == 4


# -- transports -------------------------------------------------------------------------------------------------------


def test_a_patch_may_stay_unmatched_and_no_prompt_goes_short():
    cost = torch.rand(3, 12, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    cost[:, 0] = 2.0  # a patch that nothing resembles
    plan = partial_transport(cost, 0.8, 0.1, 200)
    torch.testing.assert_close(plan.sum(dim=1), torch.full((3, 2), 0.4, dtype=torch.float64))
    assert (plan.sum(dim=2) <= 1 / 12 + 1e-4).all() and (plan.sum(dim=2)[:, 0] < 1e-6).all()


def test_the_constrained_plan_is_the_best_one():
    """No feasible step from it lowers <P, 1 - S> - eps H(P) + lambda KL(P, Q)."""
    draws = torch.Generator().manual_seed(6)
    cosines, teacher = (0.2 * torch.randn(1, 5, 4, generator=draws, dtype=torch.float64) for _ in range(2))
    plan = constrained_transport(cosines, teacher)
    agreed = (20 * teacher).softmax(dim=2)

    def objective(p):
        cost = 1 - (20 * cosines).softmax(dim=2)
        return float((p * cost + RAM_REG * p * p.log() + RAM_TEACHER * p * (p / agreed).log()).sum())

    best, size = objective(plan), float(plan.min()) / 2
    for _ in range(20):
        step = torch.randn(1, 5, 4, generator=draws, dtype=torch.float64)
        step = step - step.mean(dim=1, keepdim=True) - step.mean(dim=2, keepdim=True) + step.mean()
        assert objective(plan + size * step / step.abs().max()) > best
    assert plan.sum(dim=1)[0].tolist() == pytest.approx([0.25] * 4), f"{ITERATIONS} iterations end on the columns"
