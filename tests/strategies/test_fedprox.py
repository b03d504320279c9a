"""FedProx against a plain loop, and FedAvg where mu is 0."""

from __future__ import annotations

import pytest
import torch

from client_app import fedavg, fedprox
from federation.settings import SettingsError


def test_two_rounds_are_those_of_a_plain_loop(plain_loop, plain_settings, trained):
    mu = 2.0
    settings = plain_settings(method="fedprox", fedprox__mu=mu)
    strategy, _ = trained(settings)
    # the gradient of mu / 2 * ||w - w_received||^2 is mu * (w - w_received)
    expected = plain_loop(settings, 2, lambda site, name, gradient, value, received: gradient + mu * (value - received))
    for name, value in expected.items():
        torch.testing.assert_close(strategy.progress.modules["model"][name], value, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_a_sites_update_is_fedavgs_bit_by_bit_if_and_only_if_mu_is_0(opened, mu):
    from client_app.training import network_for

    torch.manual_seed(0)
    site, job = opened(method="fedprox", fedprox__mu=mu, training__epochs=2)
    modules = {"model": network_for(("cat", "dog"), job.settings).state_dict()}
    ours, plain = fedprox.train(site, modules, job).modules, fedavg.train(site, modules, job).modules
    same = all(torch.equal(ours["model"][name], plain["model"][name]) for name in plain["model"])
    assert same is (mu == 0.0)


def test_a_larger_mu_keeps_the_sites_nearer_to_the_received_model(opened):
    from client_app.training import network_for
    from strategies.initial import state_norm

    torch.manual_seed(0)
    moved = []
    for mu in (0.0, 1.0, 20.0):
        site, job = opened(method="fedprox", fedprox__mu=mu, training__epochs=5)
        network = network_for(("cat", "dog"), job.settings)
        torch.manual_seed(0)
        parameters = dict(network_for(("cat", "dog"), job.settings).named_parameters())
        network.load_state_dict(parameters, strict=False)
        change = fedprox.train(site, {"model": network.state_dict()}, job).modules["model"]
        moved.append(state_norm({name: change[name] for name in parameters}))
    assert moved[0] > moved[1] > moved[2]


def test_mu_below_zero_is_refused(plain_settings):
    with pytest.raises(SettingsError, match=r"fedprox.mu = -0.1: .*greater than or equal to 0; the default is 0.01"):
        plain_settings(method="fedprox", fedprox__mu=-0.1)
