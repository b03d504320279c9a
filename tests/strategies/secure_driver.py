"""A secure round in memory: hospitals that keep nothing but their files between messages, and sites that go silent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import MetricRecord, RecordDict

from client_app import secure_sum as half
from federation import wire
from federation.wire import TensorSpec
from strategies.secure_sum import SecureRound

RANGE = 8.0
EXPERIMENT = "drill"
SPECS = {
    "body": {
        "w": TensorSpec((2, 3), "float32"),
        "b": TensorSpec((), "float32"),
        "steps": TensorSpec((), "int64"),
    },
    "head": {"w": TensorSpec((4,), "float64")},
}
TRAIN = wire.train_payload({})


@dataclass
class Hospital:
    """A site; every call of `answer` stands for a process of its own."""

    name: str
    folder: Path
    changes: Mapping[str, Mapping[str, np.ndarray]]
    weights: Mapping[str, int]
    server_round: int = 1
    min_cohort: int = 3
    sent: dict[str, RecordDict] = field(default_factory=dict)

    def answer(self, stage: str, request: RecordDict) -> RecordDict:
        if stage == "keys":
            half.begin(self.folder)
            found = half.site_keys(self.name, self.server_round)
        elif stage == "shares":
            found = half.site_shares(
                half.take(self.folder, self.server_round, "keys"),
                request,
                experiment=EXPERIMENT,
                min_cohort=self.min_cohort,
            )
        elif stage == "masked":
            found = half.site_masked(
                half.take(self.folder, self.server_round, "shares"),
                request,
                self.changes,
                self.weights,
                specs={module: SPECS[module] for module in self.changes},
                value_range=RANGE,
                min_cohort=self.min_cohort,
                reply=(training_reply(self.server_round), TRAIN),
            )
        else:
            secrets = half.take(self.folder, self.server_round, "masked")
            found = half.site_unmask(secrets, request, min_cohort=self.min_cohort)
        if found.secrets is not None:
            half.keep(self.folder, found.secrets)
        assert found.payload.violation(found.content) is None
        self.sent[stage] = found.content
        return found.content


def training_reply(server_round: int = 1) -> RecordDict:
    numbers = {"server_round": server_round, "num_examples": 5, "loss_sum": 1.0, "num_steps": 1}
    return RecordDict({wire.METRICS: MetricRecord(numbers)})


def hospitals(folder: Path, count: int, *, modules: Mapping[str, Collection[int]] | None = None, seed: int = 0):
    """``count`` hospitals ``a``, ``b``, ... with drawn changes; ``modules``: module -> who has it, by number."""
    rng = np.random.default_rng(seed)
    modules = modules or {module: range(count) for module in SPECS}
    out = {}
    for number in range(count):
        name = chr(ord("a") + number)
        own = {module: drawn(rng, module) for module in SPECS if number in modules.get(module, ())}
        weights = {module: int(rng.integers(1, 1000)) for module in own}
        out[name] = Hospital(name, folder / name, own, weights)
    return out


def drawn(rng: np.random.Generator, module: str) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(rng.normal(size=spec.shape), spec.dtype)
        if spec.dtype.startswith("float")
        else np.asarray(7, spec.dtype)
        for name, spec in SPECS[module].items()
    }


def secure_round(sites: Mapping[str, Hospital], **changes) -> SecureRound:
    cohorts = {module: [name for name, site in sites.items() if module in site.changes] for module in SPECS}
    options = {"experiment": EXPERIMENT, "server_round": 1, "cohorts": cohorts, "specs": SPECS, "value_range": RANGE}
    return SecureRound(**{**options, **changes})


def run(sites: Mapping[str, Hospital], lost: Mapping[str, Collection[str]] | None = None, server=None):
    """A whole round; ``lost``: stage -> sites that answer but whose reply never arrives. Returns server and sums."""
    server = server or secure_round(sites)
    requests = dict.fromkeys(sites, RecordDict())
    for stage, add, following in (
        ("keys", server.add_keys, server.share_requests),
        ("shares", server.add_shares, server.masked_requests),
        ("masked", server.add_masked, server.unmask_requests),
        ("unmask", server.add_unmask, server.result),
    ):
        for name, request in requests.items():
            content = sites[name].answer(stage, request)
            if name not in (lost or {}).get(stage, ()):
                add(name, content)
        requests = following()
    return server, requests


def plain_mean(sites: Mapping[str, Hospital], names: Collection[str], module: str) -> dict[str, np.ndarray]:
    """The weighted mean in float64, tensor by tensor."""
    total = sum(sites[name].weights[module] for name in names)
    return {
        tensor: sum(sites[n].weights[module] * sites[n].changes[module][tensor].astype(np.float64) for n in names)
        / total
        for tensor, spec in SPECS[module].items()
        if spec.dtype.startswith("float")
    }
