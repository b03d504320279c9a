"""A method for tests with two modules, each trained by the sites that are named; both halves in one file."""

from __future__ import annotations

from pydantic import Field

from client_app import evaluation, fedavg
from client_app.training import on_meta
from federation import wire
from federation.registry import register
from federation.settings import MethodArea
from strategies.base import FederatedStrategy

NAME = "test-secure-split"


class SplitArea(MethodArea):
    head: str = Field("", description="comma-separated sites that train the head")
    body: str = Field("", description="comma-separated sites that train the body")


def parts(state):
    return {
        "body": {name: value for name, value in state.items() if not name.startswith("head")},
        "head": {name: value for name, value in state.items() if name.startswith("head")},
    }


def own(options, site):
    return tuple(module for module in ("body", "head") if site in getattr(options, module).split(","))


class Split(FederatedStrategy):
    def build(self, network):
        return parts(network.state_dict())

    def trained_modules(self, card, server_round):
        return own(self.options, card.site)

    def export(self):
        return {name: value for module in self.progress.modules.values() for name, value in module.items()}


def joined(modules):
    return {"model": {**modules["body"], **modules["head"]}}


def specs(labels, settings):
    return {name: wire.spec_of(state) for name, state in parts(on_meta(labels, settings).state_dict()).items()}


def update_specs(modules, site, job):
    return {name: wire.spec_of(modules[name]) for name in own(job.settings.options, site.name)}


def train(site, modules, job):
    done = fedavg.train(site, joined(modules), job)
    changes = parts(done.modules["model"])
    return done.__class__(
        {name: changes[name] for name in own(job.settings.options, site.name)},
        done.num_examples,
        done.loss_sum,
        done.num_steps,
    )


def evaluate(site, modules, job, split):
    return evaluation.evaluate(site, joined(modules), job, split)


register(NAME, Split, settings=SplitArea, site=__name__)
