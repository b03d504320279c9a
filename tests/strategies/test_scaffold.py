"""SCAFFOLD against a plain loop of algorithm 1, option II, and the identities of its control variates."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from federation import wire
from server_app.inprocess import run


def reference(plain_loop, settings, rounds):
    """The model and the server's variate after a loop with every variate in plain dictionaries."""
    lr = settings.training.lr
    server: dict[str, torch.Tensor] = {}
    own: dict[str, dict[str, torch.Tensor]] = {}
    changes: list[dict[str, torch.Tensor]] = []

    def zero(table, name, like):
        return table.setdefault(name, torch.zeros_like(like))

    def gradient_of(site, name, gradient, value, received):
        return gradient + zero(server, name, value) - zero(own.setdefault(site, {}), name, value)

    def after_site(site, received, network, steps):
        new = {
            name: own[site][name] - server[name] + (received[name] - value.detach()) / (steps * lr)
            for name, value in network.items()
        }
        changes.append({name: new[name] - own[site][name] for name in new})
        own[site] = new

    def after_round():
        for name in server:
            server[name] = server[name] + sum(change[name] for change in changes) / len(changes)  # |S| = N
        changes.clear()

    state = plain_loop(settings, rounds, gradient_of, after_site, after_round)
    return state, server, own


def test_two_rounds_are_those_of_a_plain_loop(plain_loop, plain_settings, trained):
    settings = plain_settings(method="scaffold")
    strategy, _ = trained(settings)
    state, server, _ = reference(plain_loop, settings, 2)
    found = strategy.progress.modules
    assert any(value.abs().max() > 1e-3 for value in server.values())  # else the correction was never at work
    for name, value in state.items():
        torch.testing.assert_close(found["model"][name], value, atol=2e-5, rtol=1e-4)
    for name, value in server.items():
        # a variate is a difference of weights over steps * lr = 0.25 or so: four times their rounding and more
        torch.testing.assert_close(found["control"][name], value, atol=2e-4, rtol=1e-3)


def kept_controls(run_dir, server_round):
    paths = sorted((run_dir / "sites").glob(f"*/state/control-{server_round:06d}.safetensors"))
    return [load_file(path) for path in paths]


def test_the_servers_variate_is_the_mean_of_the_sites_variates(plain_settings, trained):
    strategy, run_dir = trained(plain_settings(method="scaffold"))
    sites = kept_controls(run_dir, 2)
    assert len(sites) == 3
    for name, value in strategy.progress.modules["control"].items():
        mean = torch.stack([site[name] for site in sites]).mean(0)
        torch.testing.assert_close(value, mean, atol=1e-5, rtol=1e-4)


def test_variates_cover_the_parameters_only_and_start_at_zero(plain_settings):
    from strategies.scaffold import Scaffold

    strategy = Scaffold(plain_settings(method="scaffold"))
    modules = strategy.build(strategy.network(("a", "b"), "multilabel"))
    buffers = {name for name in modules["model"] if name.rpartition(".")[2].startswith(("running", "num_batches"))}
    assert set(modules["control"]) == set(modules["model"]) - buffers and buffers
    assert all(not value.any() for value in modules["control"].values())


def test_the_variates_mean_is_equal_whatever_the_models_weighting(plain_settings, trained):
    strategy, run_dir = trained(plain_settings(method="scaffold", federation__weighting="num_examples"))
    sites = kept_controls(run_dir, 2)
    name = "head.weight"
    counts = [float(card.num_train) for card in strategy.table.trainable]
    assert len(set(counts)) > 1
    weighted = sum(count * site[name] for count, site in zip(counts, sites, strict=True)) / sum(counts)
    found = strategy.progress.modules["control"][name]
    assert not torch.allclose(found, weighted, atol=1e-5, rtol=1e-4)


def test_a_site_whose_reply_is_refused_keeps_the_variate_that_the_server_knows(plain_settings, monkeypatch):
    """site-01's second reply is poisoned: its third round has to start from its variate of round 1."""
    import client_app.scaffold as half

    seen = []
    own_control = half.own_control

    def watched(site, like, last_accepted):
        found = own_control(site, like, last_accepted)
        if site.name == "site-01":
            seen.append((last_accepted, wire.state_sha256({"": found})))
        return found

    def poison(message, answer):
        reply = answer()
        if message.metadata.message_type == wire.TRAIN and message.content["config"]["server_round"] == 2:
            arrays = {name: value.copy() for name, value in wire.decode(reply.content["module.control"]).items()}
            arrays["head.bias"][0] = float("inf")
            reply.content["module.control"] = wire.encode(arrays)
        return reply

    monkeypatch.setattr(half, "own_control", watched)
    settings = plain_settings(method="scaffold", federation__rounds=3)
    run(settings.flat(), faults={"site-01": poison})
    assert [accepted for accepted, _ in seen] == [0, 1, 1]
    assert seen[1][1] == seen[2][1] != seen[0][1]
