"""FedMPT's prompts and text features against the authors' layouts and encoder, and its network as a whole."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from open_clip import SimpleTokenizer
from open_clip.transformer import QuickGELU, TextTransformer

from federation import seeding
from models.clip import random_clip
from models.fedmpt import (
    CONDITIONS,
    asymmetric_loss_probabilities,
    build_fedmpt,
    encode_text,
    frozen_sha256,
    prompt_tokens,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "fedmpt"
CLASSES = ("dog", "traffic_light", "pleural effusion")


@pytest.fixture(scope="module")
def tokenizer():
    return SimpleTokenizer()


@pytest.fixture(scope="module")
def clip():
    with seeding.scope(1, "clip"):
        return random_clip()


def network_of(clip, conditions=CONDITIONS[:3], classes=CLASSES, seed=2, **options):
    with seeding.scope(seed, "prompts"):
        return build_fedmpt(
            conditions,
            classes,
            tokenizer=clip.tokenizer,
            embeddings=clip.embeddings,
            dim=clip.dim,
            **{"rank": 4, **options},
        )


# -- prompt layout ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "betas"), [("COND4_CLS4", (4, 4)), ("COND5_CLS7", (5, 7))])
def test_rows_are_the_authors_and_keep_both_words_of_a_condition(tokenizer, layout, betas):
    golden = json.loads((GOLDEN / "off_prompt_layout.json").read_text())["layouts"][layout]
    tokens = prompt_tokens(golden["conditions"], golden["classes"], *betas, tokenizer)
    assert tokens.ids.shape == (5, 3, golden["total_len"])
    rows = {(row["cond"], row["cls"]): row for row in golden["rows"]}
    for n, condition in enumerate(golden["conditions"]):
        for c, name in enumerate(golden["classes"]):
            expected, eot = rows[condition, name]["ids"], rows[condition, name]["eot_index"]
            if " " in condition:  # the authors' code lost the second word and wrote a literal x before the class
                second, stray = 2 + betas[0], 2 + sum(betas)
                assert expected[stray] == 343
                expected = [
                    *expected[:second],
                    tokenizer.encode(condition)[1],
                    *expected[second:stray],
                    *expected[stray + 1 :],
                ]
            found = tokens.ids[n, c].tolist()
            assert found[: len(expected)] == expected and not any(found[eot + 1 :])
            assert tokens.eot[n, c] == eot and tokens.prefix[n] == eot - len(tokenizer.encode(f"{name}."))


def test_without_conditions_one_row_a_class_is_left(tokenizer):
    tokens = prompt_tokens([], ["dog", "cat"], 4, 2, tokenizer)
    assert tokens.ids[:, 0, :6].tolist() == [[49406, -101, -102, 1929, 269, 49407]]
    assert tokens.counts == (0, 2)


@pytest.mark.parametrize(
    ("conditions", "classes", "said"),
    [
        (["pose"], [], "no class name"),
        (["pose"], ["dog", " _"], "class is empty"),
        ([""], ["dog", "cat"], "condition is empty"),
        (["pose"], ["traffic_light", "cat", "Traffic light"], "'traffic_light' and 'Traffic light'"),
        (["pose"], ["dog", "cat " * 70], "77"),
    ],
)
def test_names_that_make_no_prompt_are_refused(tokenizer, conditions, classes, said):
    with pytest.raises(ValueError, match=said):
        prompt_tokens(conditions, classes, 4, 4, tokenizer)


def test_trained_tokens_stand_in_the_frozen_ones(clip):
    network = network_of(clip, beta_cond=2)
    tokens = prompt_tokens(CONDITIONS[:3], CLASSES, 2, 4, clip.tokenizer)
    prompts = network.prompt()
    assert prompts.shape == (3, 3, 77, 32)
    torch.testing.assert_close(prompts[1, 2, 1:3], network.prompt.cond[1])
    end = int(tokens.prefix[2])
    torch.testing.assert_close(prompts[2, 0, end - 4 : end], network.prompt.cls)
    frozen = tokens.ids >= 0
    torch.testing.assert_close(prompts[frozen], clip.embeddings[tokens.ids[frozen]])
    torch.testing.assert_close(network.prompt(9), prompts[:, :, :9])


def test_class_tokens_start_as_a_photo_of_a(clip):
    words = clip.embeddings[clip.tokenizer.encode("a photo of a")]
    torch.testing.assert_close(network_of(clip).prompt.cls.detach(), words)
    for other in (network_of(clip, cls_ctx_init="random"), network_of(clip, beta_cls=5)):
        assert 0.01 < other.prompt.cls.std() < 0.03
    with pytest.raises(ValueError, match="cls_ctx_init"):
        network_of(clip, cls_ctx_init="zero")


# -- text features ----------------------------------------------------------------------------------------------------


def golden_tower():
    """The authors' small text encoder, and its prompts, end tokens, features and gradients."""
    with np.load(GOLDEN / "off_text_encoder.npz") as arrays:
        data = {name: torch.from_numpy(arrays[name]) for name in arrays}
    tower = TextTransformer(
        context_length=20, vocab_size=30, width=16, heads=2, layers=2, output_dim=8, act_layer=QuickGELU
    )
    weights = {name[2:]: value for name, value in data.items() if name.startswith("w.")}
    weights = {
        f"transformer.{name}" if name.startswith("resblocks") else name: value for name, value in weights.items()
    }
    weights["token_embedding.weight"] = tower.token_embedding.weight
    tower.load_state_dict(weights, strict=True)
    return tower.eval().requires_grad_(False), data


@pytest.mark.parametrize("mode", ["full", "trimmed", "shared_prefix"])
@pytest.mark.parametrize("grid", [True, False])
def test_every_mode_gives_the_authors_features_and_gradients(mode, grid):
    tower, data = golden_tower()
    lead = (3, 4) if grid else (12,)
    prompts = data["prompts"].view(*lead, 20, 16).clone().requires_grad_()
    found = encode_text(tower, prompts, data["eot_index"].view(lead), mode)
    torch.testing.assert_close(found, data["features"].view(*lead, 8), rtol=0, atol=1e-5)
    (found * data["grad_out"].view_as(found)).sum().backward()
    gradient, expected = (value.view(3, 4, 20, 16) for value in (prompts.grad, data["grad_prompts"]))
    if mode != "shared_prefix":
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5)
    for n, length in enumerate((1 + 4 + data["cond_len"] + 4).tolist()):
        torch.testing.assert_close(gradient[n, :, length:], expected[n, :, length:], rtol=0, atol=1e-5)
        shared = gradient[n, :, :length].sum(dim=0), expected[n, :, :length].sum(dim=0)
        torch.testing.assert_close(*shared, rtol=0, atol=1e-5)


def test_modes_agree_on_the_gradients_of_the_trained_tokens(clip):
    network, found = network_of(clip), {}
    weights = torch.randn(3, 3, clip.dim, generator=torch.Generator().manual_seed(0))
    for mode in ("full", "trimmed", "shared_prefix"):
        features = network.text_features(clip.model, mode)
        gradients = torch.autograd.grad((features * weights).sum(), [network.prompt.cond, network.prompt.cls])
        found[mode] = (features, *gradients)
    for mode in ("trimmed", "shared_prefix"):
        for mine, full in zip(found[mode], found["full"], strict=True):
            assert (mine - full).norm() < 1e-5 * full.norm()


@pytest.mark.parametrize("beta_cond", [0, 3])
@pytest.mark.parametrize("conditions", [(), ("pose",), ("pose", "scene type")])
def test_prefixes_of_any_length_are_shared(clip, conditions, beta_cond):
    network = network_of(clip, conditions, ("dog", "dog house"), beta_cond=beta_cond, beta_cls=0)
    full, shared = (network.text_features(clip.model, mode) for mode in ("full", "shared_prefix"))
    torch.testing.assert_close(shared, full, rtol=0, atol=1e-5)
    found = encode_text(clip.model, network.prompt(), network.eot, "shared_prefix")  # prefixes found by comparing rows
    torch.testing.assert_close(found, full, rtol=0, atol=1e-5)


def test_rows_that_share_nothing_are_read_trimmed(clip):
    prompts, eot = torch.randn(2, 2, 9, 32), torch.tensor([[8, 4], [3, 0]])
    shared, full = (encode_text(clip.model, prompts, eot, mode) for mode in ("shared_prefix", "full"))
    torch.testing.assert_close(shared, full, rtol=0, atol=1e-5)


def test_a_tower_with_other_blocks_is_read_trimmed():
    tower = TextTransformer(context_length=12, vocab_size=30, width=16, heads=2, layers=2, output_dim=8, qk_norm=True)
    tower.eval().requires_grad_(False)
    prompts, eot = torch.randn(2, 9, 16), torch.tensor([8, 5])
    prompts[1, :4] = prompts[0, :4]
    shared, full = (encode_text(tower, prompts, eot, mode) for mode in ("shared_prefix", "full"))
    torch.testing.assert_close(shared, full, rtol=0, atol=1e-5)


def test_wrong_arguments_of_the_text_encoder_are_refused(clip):
    encode = partial(encode_text, clip.model, torch.zeros(2, 9, 32), torch.tensor([8, 5]))
    with pytest.raises(ValueError, match="fast"):
        encode("fast")
    for prompts in (torch.zeros(2, 9, 31), torch.zeros(2, 78, 32), torch.zeros(3, 9, 32)):
        with pytest.raises(ValueError, match="expected prompts"):
            encode_text(clip.model, prompts, torch.tensor([8, 5]))
    tower = TextTransformer(context_length=12, vocab_size=30, width=16, heads=2, layers=1, no_causal_mask=True)
    with pytest.raises(ValueError, match="causal"):
        encode_text(tower, torch.zeros(1, 9, 16), torch.tensor([3]), "trimmed")


# -- the whole network ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_conditions", "expected"), [(5, 192_709), (7, 262_407)])
def test_network_of_clips_size_has_the_papers_arrays(tokenizer, num_conditions, expected):
    """Spec 3 and 11.6; 512 is the width of the tokens and of the joint space."""
    network = build_fedmpt(
        CONDITIONS[:num_conditions], CLASSES, tokenizer=tokenizer, embeddings=torch.randn(49408, 512), dim=512
    )
    arrays = {f"{part}.{name}": tuple(value.shape) for part, module in network.travelling().items()
              for name, value in module.state_dict().items()}  # fmt: skip
    n = num_conditions
    assert arrays == {
        "prompt.cond": (n, 4, 512), "prompt.cls": (4, 512),
        "adapter.down": (n, 32, 512), "adapter.up": (n, 512, 32),
        "gate.w1": (32, 512), "gate.b1": (32,), "gate.w2": (n, 32), "gate.b2": (n,),
    }  # fmt: skip
    assert sum(value.numel() for value in network.parameters() if value.requires_grad) == expected
    assert len(network.state_dict()) == 8


def test_a_step_moves_every_array_and_leaves_clip_alone(clip):
    network = network_of(clip)
    before = {name: value.clone() for name, value in clip.model.state_dict().items()}
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    patches, targets = torch.randn(4, 16, clip.dim), torch.tensor([[1, 0, 0], [0, 1, 1], [0, 0, 1], [0, 0, 0]])
    start, losses = {name: value.clone() for name, value in network.state_dict().items()}, []
    for _ in range(8):
        optimiser.zero_grad()
        loss = asymmetric_loss_probabilities(network(patches, network.text_features(clip.model))[0], targets)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(not torch.equal(value, start[name]) for name, value in network.state_dict().items())
    assert all(value.grad is None for value in clip.model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in clip.model.state_dict().items())


def test_ablations_leave_their_arrays_out(clip):
    network = network_of(clip, (), num_adapters=3)
    assert {name: sorted(part.state_dict()) for name, part in network.travelling().items()} == {
        "prompt": ["cls"], "adapter": ["down", "up"], "gate": ["b1", "b2", "w1", "w2"]
    }  # fmt: skip
    assert network(torch.randn(2, 5, clip.dim), network.text_features(clip.model))[0].shape == (2, 3)
    bare = network_of(clip, rank=0, gate="uniform", aggregation="patch_softmax")
    assert sorted(bare.travelling()) == ["prompt"]


def test_the_same_seed_makes_the_same_network_and_one_class_is_refused(clip):
    first, second, other = (network_of(clip, seed=seed).state_dict() for seed in (2, 2, 3))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["prompt.cond"], other["prompt.cond"])
    with pytest.raises(ValueError, match="no finding"):
        network_of(clip, classes=("dog",))


def test_whatever_sites_must_hold_alike_is_in_the_hash(tokenizer):
    def of(conditions=("pose",), classes=("dog", "cat"), betas=(4, 4), sha256="a" * 64):
        return frozen_sha256(conditions, classes, prompt_tokens(conditions, classes, *betas, tokenizer), sha256)

    others = [of(("color",)), of(classes=("cat", "dog")), of(betas=(4, 5)), of(betas=(5, 4)), of(sha256="b" * 64)]
    assert of() == of() and len({of(), *others}) == 6
