"""The heads of method `incongruent`: the prior's closed form, plain loops, and where an untrained head starts."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from models.incongruent_head import (
    LabelAttentionHead,
    build_head,
    cooccurrence_prior,
    initialise_head,
    prevalence_bias,
)


def head_of(dim=8, labels=5, **options):
    torch.manual_seed(0)
    head = LabelAttentionHead(dim, labels, **options)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
        head.prior.copy_(torch.randn(labels, labels).clamp(-2, 2))
    return head.eval()


# -- prior ------------------------------------------------------------------------------------------------------------


def test_prior_has_its_closed_form():
    # N = 1000, N_i = N_j = 100, N_ij = 50: p = 101/1002, P = (50 + 10 p) / 110
    prior = cooccurrence_prior(np.array([[100, 50], [50, 100]]), np.array([100, 100]), 1000)
    assert prior.dtype == torch.float64 and prior.shape == (2, 2)
    share = Fraction(101, 1002)
    assert prior[0, 1].item() == pytest.approx(math.log((50 + 10 * share) / 110 / share), abs=1e-12)
    assert prior[0, 1].item() == pytest.approx(1.526134573, abs=1e-8)  # the specification's, which is 4e-9 off
    assert prior[0, 1] == prior[1, 0] and (prior.diagonal() == 0).all()


@given(arrays(np.int64, (4, 4), elements=st.integers(0, 300)), arrays(np.int64, 4, elements=st.integers(0, 300)))
def test_prior_is_that_of_plain_loops(pairs, counts):
    found = cooccurrence_prior(pairs, counts, 300)
    for i in range(4):
        for j in range(4):
            p = (counts[j] + 1) / 302
            together = counts[i] * p if pairs[i, j] < 10 else pairs[i, j]
            expected = 0.0 if i == j else math.log((together + 10 * p) / (counts[i] + 10) / p)
            assert found[i, j].item() == pytest.approx(min(max(expected, -2), 2), abs=1e-12)


def test_a_label_without_positives_and_rare_pairs_have_no_prior():
    prior = cooccurrence_prior(torch.tensor([[50, 9, 0], [9, 40, 0], [0, 0, 0]]), torch.tensor([50, 40, 0]), 100)
    torch.testing.assert_close(prior, torch.zeros(3, 3, dtype=torch.float64), atol=1e-12, rtol=0)


def test_prior_is_clipped_on_both_sides():
    # always together: log(1 / p) > 2; a pair that never occurs is only seen as rare where min_count lets it be
    assert cooccurrence_prior([[20, 20], [20, 20]], [20, 20], 100_000)[0, 1] == 2
    assert cooccurrence_prior([[900, 0], [0, 900]], [900, 900], 1000, alpha=1, min_count=0)[0, 1] == -2


@pytest.mark.parametrize(
    ("pairs", "counts", "match"),
    [
        ([[1, 1]], [1, 1], r"pair_counts \(C, C\)"),
        ([[1, -1], [-1, 1]], [1, 1], "between 0 and num_examples=10"),
        ([[1, 1], [1, 1]], [1, 11], "between 0 and num_examples=10"),
        ([[1, math.nan], [1, 1]], [1, 1], "between 0 and num_examples=10"),
    ],
)
def test_counts_that_do_not_fit_are_refused(pairs, counts, match):
    with pytest.raises(ValueError, match=match):
        cooccurrence_prior(pairs, counts, 10)


# -- head -------------------------------------------------------------------------------------------------------------


def test_logits_are_those_of_plain_loops():
    head, f = head_of().double(), torch.randn(3, 8, dtype=torch.float64)
    query, key, value = head.attention.in_proj_weight.chunk(3)
    for row, found in enumerate(head(f)):
        x = f[row] @ head.project.weight.T + head.labels
        y = torch.zeros_like(x)
        for start in range(0, 8, 2):
            cut = slice(start, start + 2)
            for label in range(5):
                scores = (x @ key[cut].T) @ (query[cut] @ x[label]) / math.sqrt(2) + 0.5 * head.prior[label]
                y[label, cut] = scores.softmax(dim=0) @ (x @ value[cut].T)
        read = x + y @ head.attention.out_proj.weight.T
        expected = (head.norm(read) * head.weight).sum(dim=1) + head.bias
        torch.testing.assert_close(found, expected)


def test_inference_and_training_kernels_agree():
    head, f = head_of(), torch.randn(3, 8)
    with torch.no_grad():
        found = head(f)
    torch.testing.assert_close(found, head(f).detach())


def test_bfloat16_autocast_stays_near():
    head, f = head_of(), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = head(f)
    torch.testing.assert_close(found.float(), head(f), atol=0.2, rtol=0.1)


def test_the_prior_biases_attention_and_is_no_logit():
    # Labels whose tokens agree read the same whatever the weights are: a prior alone says nothing.
    head, f = head_of(), torch.randn(3, 8)
    with torch.no_grad():
        head.labels.copy_(head.labels[:1].expand(5, 8))
        before = head(f)
        head.prior.fill_(2).fill_diagonal_(0)
        torch.testing.assert_close(head(f), before)
    other, blind = head_of(), head_of(lambda_co=0.0)
    assert not torch.allclose(other(f), blind(f)) and not blind.prior.requires_grad
    blind.prior.zero_()
    other.prior.zero_()
    assert torch.equal(other(f), blind(f))


def test_prior_is_a_buffer_that_travels_with_the_head():
    head = head_of()
    assert "prior" in head.state_dict() and "prior" not in dict(head.named_parameters())
    twin = LabelAttentionHead(8, 5).eval()
    twin.load_state_dict(head.state_dict(), strict=True)
    f = torch.randn(2, 8)
    assert torch.equal(twin(f), head(f))


def test_bias_starts_at_the_clipped_log_odds():
    prevalence = torch.tensor([0.0, 0.001, 0.2, 0.5, 0.9, 1.0])
    expected = [-6.0, -6.0, math.log(0.25), 0.0, 0.0, 0.0]
    assert prevalence_bias(prevalence).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["label_attn", "linear"])
def test_an_initialised_head_has_bias_and_prior(name):
    head, prior = build_head(name, 8, 3), torch.full((3, 3), 0.25, dtype=torch.float64)
    initialise_head(head, torch.tensor([0.1, 0.2, 0.3]), prior)
    assert head.bias.tolist() == pytest.approx([math.log(p / (1 - p)) for p in (0.1, 0.2, 0.3)], abs=1e-6)
    assert head.bias.requires_grad
    if name == "label_attn":
        assert torch.equal(head.prior, prior.float())
        initialise_head(head, torch.tensor([0.1, 0.2, 0.3]))
        assert torch.equal(head.prior, prior.float())


def test_linear_head_is_a_linear_layer():
    head, f = build_head("linear", 8, 3), torch.randn(2, 8)
    torch.testing.assert_close(head(f), f @ head.weight.T + head.bias)


def test_unknown_head_and_odd_width_are_refused():
    with pytest.raises(ValueError, match="head='mlp' is unknown; there are label_attn, linear"):
        build_head("mlp", 8, 3)
    with pytest.raises(ValueError, match="width 6 is not divisible"):
        build_head("label_attn", 6, 3)
