"""Clip, noise and accountant: exact bounds, the right spread, and epsilon as the library itself computes it."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from federation import differential_privacy as privacy
from federation.differential_privacy import PrivacyError
from federation.settings import Settings, SettingsError

needs_accountant = pytest.mark.skipif(
    importlib.util.find_spec("dp_accounting") is None, reason="dp-accounting (extra dp) is not installed"
)
KEY = bytes(range(32))


def update(scale=1.0, dtype=torch.float32):
    draws = torch.Generator().manual_seed(3)
    return {
        "head": {"w": (torch.randn(7, 5, generator=draws) * scale).to(dtype)},
        "body": {"b": (torch.randn(11, generator=draws) * scale).to(dtype), "steps": torch.tensor(10**6)},
    }


# -- clip -------------------------------------------------------------------------------------------------------------


def test_the_norm_is_that_of_all_float_tensors_as_one_vector():
    modules = update()
    plain = math.sqrt(float((modules["head"]["w"].double() ** 2).sum() + (modules["body"]["b"].double() ** 2).sum()))
    assert privacy.update_norm(modules) == pytest.approx(plain, rel=1e-12)  # the counter of a million is not in it


@given(
    scale=st.floats(1e-3, 1e4),
    bound=st.floats(1e-3, 1e3),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
)
def test_a_clipped_update_is_never_longer_than_the_bound_and_points_the_same_way(scale, bound, dtype):
    before = update(min(scale, 1e3) if dtype == torch.float16 else scale, dtype)
    after = privacy.clipped(before, bound)
    norm, found = privacy.update_norm(before), privacy.update_norm(after)
    assert found <= bound
    if norm <= bound:
        assert all(torch.equal(after[m][n], before[m][n]) for m in before for n in before[m])
    elif bound / norm * 1e-1 > torch.finfo(dtype).tiny:  # else half precision rounds small values away
        assert found == pytest.approx(bound, rel=4 * torch.finfo(dtype).eps)


def test_integer_buffers_are_neither_clipped_nor_noised():
    modules = privacy.clipped(update(100.0), 1.0)
    assert int(modules["body"]["steps"]) == 10**6
    arrays = {m: {n: v.numpy() for n, v in state.items()} for m, state in modules.items()}
    sigmas = {m: dict.fromkeys(state, 3.0) for m, state in arrays.items()}
    noised = privacy.noised(arrays, sigmas, KEY)
    assert noised["body"]["steps"] == 10**6 and noised["body"]["steps"].dtype == np.int64
    assert not np.array_equal(noised["body"]["b"], arrays["body"]["b"])


def test_what_was_given_is_not_written_to():
    before = update(100.0)
    copy = {m: {n: v.clone() for n, v in state.items()} for m, state in before.items()}
    privacy.clipped(before, 1.0)
    assert all(torch.equal(before[m][n], copy[m][n]) for m in before for n in before[m])


def test_an_update_that_is_not_finite_is_refused():
    with pytest.raises(PrivacyError, match="not finite"):
        privacy.clipped({"m": {"w": torch.tensor([1.0, float("inf")])}}, 1.0)


# -- noise ------------------------------------------------------------------------------------------------------------


def test_noise_is_normal_with_the_declared_standard_deviation():
    count, sigma = 400_000, 2.5
    noise = privacy.noised({"m": {"w": np.zeros(count)}}, {"m": {"w": sigma}}, KEY)["m"]["w"]
    # Standard errors: of the mean sigma / sqrt(n), of the deviation sigma / sqrt(2 n); five of each.
    assert abs(noise.mean()) < 5 * sigma / math.sqrt(count)
    assert abs(noise.std() - sigma) < 5 * sigma / math.sqrt(2 * count)
    for sigmas, share in ((1, 0.682689), (2, 0.954500), (3, 0.997300)):
        spread = math.sqrt(share * (1 - share) / count)
        assert abs((np.abs(noise) < sigmas * sigma).mean() - share) < 5 * spread
    neighbours = np.corrcoef(noise[:-1], noise[1:])[0, 1]
    halves = np.corrcoef(noise[: count // 2], noise[count // 2 :])[0, 1]
    assert max(abs(neighbours), abs(halves)) < 5 / math.sqrt(count // 2)


def test_a_single_number_stays_an_array():
    noised = privacy.noised({"m": {"scale": np.float32(3) * np.ones(())}}, {"m": {"scale": 0.5}}, KEY)["m"]["scale"]
    assert isinstance(noised, np.ndarray) and noised.shape == () and noised != 3


def test_each_tensor_has_its_own_noise_of_its_own_size():
    arrays = {"a": {"x": np.zeros(50_000, np.float32)}, "b": {"x": np.zeros(50_000, np.float32)}}
    noised = privacy.noised(arrays, {"a": {"x": 1.0}, "b": {"x": 4.0}}, KEY)
    assert noised["a"]["x"].dtype == np.float32
    assert noised["a"]["x"].std() == pytest.approx(1, rel=0.02) and noised["b"]["x"].std() == pytest.approx(4, rel=0.02)
    assert abs(np.corrcoef(noised["a"]["x"], noised["b"]["x"])[0, 1]) < 0.03


@pytest.mark.parametrize("count", [0, 1, 2, 3, privacy.CHUNK - 1, privacy.CHUNK, privacy.CHUNK + 1])
def test_any_number_of_values_can_be_drawn(count):
    first, again = (privacy.NoiseStream(KEY).normals(count) for _ in range(2))
    assert first.shape == (count,) and np.isfinite(first).all() and np.array_equal(first, again)


def test_in_a_simulation_a_key_follows_from_seed_round_and_site():
    key = privacy.noise_key(1, 2, "north", secret=False)
    assert key == privacy.noise_key(1, 2, "north", secret=False) and len(key) == 32
    others = [(2, 2, "north"), (1, 3, "north"), (1, 2, "south"), (1, 2, privacy.SERVER)]
    assert len({key, *(privacy.noise_key(*other, secret=False) for other in others)}) == 5


def test_at_a_hospital_no_key_comes_twice_and_none_follows_from_the_run():
    keys = {privacy.noise_key(1, 2, "north", secret=True) for _ in range(20)}
    assert len(keys) == 20 and privacy.noise_key(1, 2, "north", secret=False) not in keys


def test_noise_on_a_mean_is_that_on_the_sum_over_the_number_of_sites():
    sigmas = privacy.mean_sigmas({"m": {"w": 4.0}, "n": {"v": 2.0}}, {"m": 4, "n": 2}, 3.0)
    assert sigmas == {"m": {"w": 0.75}, "n": {"v": 1.5}}
    with pytest.raises(PrivacyError, match="'w' of module 'm' has weight 130 of 4 sites"):
        privacy.mean_sigmas({"m": {"w": 130.0}}, {"m": 4}, 3.0)


def test_negative_variances_become_zero_and_nothing_else_changes():
    state = {"m": {"bn.running_var": torch.tensor([-1.0, 2.0]), "bn.running_mean": torch.tensor([-1.0, 2.0])}}
    after = privacy.with_valid_variances(state)
    assert after["m"]["bn.running_var"].tolist() == [0.0, 2.0] and after["m"]["bn.running_mean"].tolist() == [-1.0, 2.0]
    assert privacy.warnings_of(state["m"]) and not privacy.warnings_of(["bn.running_mean", "w"])


# -- accountant -------------------------------------------------------------------------------------------------------


def gaussian_epsilon(multiplier, releases, delta):
    """The exact epsilon of composed Gaussian mechanisms, by bisection of Balle and Wang, ICML 2018, theorem 8."""
    mu = math.sqrt(releases) / multiplier

    def phi(x):
        return 0.5 * math.erfc(-x / math.sqrt(2))

    low, high = 0.0, 10.0 + mu * mu + 10 * mu
    for _ in range(200):
        middle = (low + high) / 2
        exact = phi(mu / 2 - middle / mu) - math.exp(middle) * phi(-mu / 2 - middle / mu)
        low, high = (middle, high) if exact > delta else (low, middle)
    return high


@needs_accountant
@pytest.mark.parametrize(("multiplier", "releases"), [(4.0, 1), (4.0, 30), (8.0, 100), (20.0, 1000)])
def test_epsilon_is_that_of_the_library_and_never_below_the_exact_one(multiplier, releases):
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    for _ in range(releases):
        accountant.compose(GaussianDpEvent(multiplier))
    found = privacy.epsilon(multiplier, releases, 1e-5)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)
    exact = gaussian_epsilon(multiplier, releases, 1e-5)
    assert exact <= found <= 1.35 * exact  # Renyi's bound is a little loose


@needs_accountant
def test_nothing_released_costs_nothing_and_noise_at_sites_counts_half():
    assert privacy.epsilon(1.0, 0, 1e-5) == 0
    area = {"privacy.dp_noise": 8.0, "federation.weighting": "equal"}
    said = {
        mode: privacy.statement(Settings.from_run_config({**area, "privacy.dp": mode}).privacy, 10)
        for mode in ("central", "local")
    }
    assert said["central"]["epsilon"] == privacy.epsilon(8.0, 10, 1e-5)
    assert said["local"]["epsilon"] == privacy.epsilon(4.0, 10, 1e-5) > said["central"]["epsilon"]


def test_a_missing_accountant_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(PrivacyError, match=r"python deploy/install.py dp"):
        privacy.require_accountant()


# -- settings ---------------------------------------------------------------------------------------------------------


REFUSED = {
    "no noise": ({"privacy.dp": "local", "privacy.dp_noise": 0.0}, "privacy.dp_noise = 0"),
    "weights in plain": ({"privacy.dp": "central"}, "federation.weighting = 'num_examples'"),
    "control variates": ({"privacy.dp": "local", "method": "scaffold"}, "method = 'scaffold'"),
    "models that are not averaged": ({"privacy.dp": "local", "method": "local"}, "method = 'local'"),
    "sparse uploads": (
        {"privacy.dp": "local", "method": "incongruent", "incongruent.topk_ratio": 0.05},
        "method = 'incongruent' with privacy.dp = 'local'",
    ),
    "noise beyond the secure range": (
        {"privacy.dp": "local", "privacy.secure_sum": True, "privacy.dp_noise": 4.0},
        "privacy.secure_range = 20 or more",
    ),
    "an unknown place": ({"privacy.dp": "both"}, "privacy.dp = 'both'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_protects_nothing_is_refused(name):
    config, words = REFUSED[name]
    with pytest.raises(SettingsError) as caught:
        Settings.from_run_config(config)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"privacy.dp": "central", "federation.weighting": "equal"},
        {"privacy.dp": "central", "federation.weighting": "equal", "privacy.secure_sum": True},
        {"privacy.dp": "local"},
        {"privacy.dp": "local", "privacy.secure_sum": True},
        {"privacy.dp": "local", "method": "fedprox"},
        {"privacy.dp_noise": 0.0},
    ],
    ids=str,
)
def test_what_makes_sense_is_taken(config):
    assert Settings.from_run_config(config).privacy.dp == config.get("privacy.dp", "none")
