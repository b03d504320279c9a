"""Secure sum: what masks cost beside the plain way of an update, per MB of update, at a site and at the server.

Plain: encoded at the site; decoded, gated and averaged at the server. Secure: quantised, masked and encoded; added,
unmasked and decoded. Keys, shares and the transport of four exchanges are in none of the rows: they cost the same for a
model of any size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from flwr.app import MetricRecord, RecordDict

from bench.rows import Row, alternate, seconds
from client_app import secure_sum as half
from client_app.secure_sum import Answer
from federation import wire
from federation.secure_sum import MIN_COHORT
from server_app.runner import SERVER_THREADS
from strategies import gate
from strategies.aggregation import StreamingMean
from strategies.secure_sum import SecureRound

SITES = [f"site-{index:02d}" for index in range(10)]
VALUES = 1_000_000
SIZE_MB = 4 * VALUES / 1e6
REPEATS = 7
MODULE, EXPERIMENT, RANGE, WEIGHT = "model", "bench", 8.0, 100
NUMBERS = {"server_round": 1, "num_examples": WEIGHT, "loss_sum": 1.0, "num_steps": 4}


def measure() -> list[Row]:
    """Milliseconds per MB of float32 update, ours masked, the peer's plain; then the bytes of one update."""
    torch.set_num_threads(SERVER_THREADS)
    update = {"weight": torch.randn(VALUES // 1000, 1000, generator=torch.Generator().manual_seed(0)) * 0.01}
    plain = RecordDict({wire.MODULE + MODULE: wire.encode(update), wire.METRICS: MetricRecord(NUMBERS)})
    whole = _Round(update)
    threads = f"{len(SITES)} sites, {SERVER_THREADS} thread"
    masked, encoded = alternate(
        lambda: _per_mb(lambda: whole.masked(SITES[0])), lambda: _per_mb(lambda: wire.encode(update)), REPEATS
    )
    rows = [Row("site: quantised, masked for nine others, encoded", "ms/MB", masked, "encoded", encoded, note=threads)]
    expected = gate.Expected("site", 1, wire.train_payload({MODULE: wire.spec_of(update)}), 1000, 1000.0)
    for lost in (0, 1):
        there = SITES[lost:]
        summed, folded = alternate(
            lambda there=there: _server(update, there),
            lambda there=there: _per_mb(lambda: _folded(plain, expected, there), len(there)),
            REPEATS,
        )
        what = f"server: added, unmasked, decoded; {lost} of {len(SITES)} sites lost after its shares"
        rows.append(Row(what, "ms/MB", summed, "decoded, gated, averaged", folded, note=f"{threads}; per site's MB"))
    sizes = [wire.size_bytes(content) / 1e6 for content in (whole.masked(SITES[0]).content, plain)]
    rows.append(Row("an update on its way up", "MB", sizes[:1], "plain", sizes[1:], note="64 bits a value"))
    return rows


class _Round:
    """A secure round in memory, up to the masked vectors; every site has the same update."""

    def __init__(self, update: dict[str, torch.Tensor]) -> None:
        self.update, self.specs = update, {MODULE: wire.spec_of(update)}
        self.server = SecureRound(
            experiment=EXPERIMENT, server_round=1, cohorts={MODULE: SITES}, specs=self.specs, value_range=RANGE
        )
        self.secrets = {}
        for site in SITES:
            self.server.add_keys(site, self._kept(site, half.site_keys(site, 1)))
        for site, request in self.server.share_requests().items():
            answer = half.site_shares(self.secrets[site], request, experiment=EXPERIMENT, min_cohort=MIN_COHORT)
            self.server.add_shares(site, self._kept(site, answer))
        self.requests = self.server.masked_requests()

    def masked(self, site: str) -> Answer:
        """The site's third answer; its secrets stay as they are, so that it can be timed again."""
        return half.site_masked(
            self.secrets[site],
            self.requests[site],
            {MODULE: self.update},
            {MODULE: WEIGHT},
            specs=self.specs,
            value_range=RANGE,
            min_cohort=MIN_COHORT,
            reply=(RecordDict({wire.METRICS: MetricRecord(NUMBERS)}), wire.train_payload({})),
        )

    def _kept(self, site: str, answer: Answer) -> RecordDict:
        self.secrets[site] = answer.secrets
        return answer.content


def _server(update: dict[str, torch.Tensor], there: list[str]) -> float:
    """Milliseconds per MB to add the vectors of these sites and to unmask their sum."""
    rehearsal = _Round(update)
    answers = {site: rehearsal.masked(site) for site in there}
    server = rehearsal.server
    added = seconds(lambda: [server.add_masked(site, answer.content) for site, answer in answers.items()])
    for site, request in server.unmask_requests().items():
        shares = half.site_unmask(answers[site].secrets, request, min_cohort=MIN_COHORT)
        server.add_unmask(site, shares.content)
    return 1e3 * (added + seconds(server.result)) / (SIZE_MB * len(there))


def _per_mb(work: Callable[[], object], updates: int = 1) -> float:
    return 1e3 * seconds(work) / (SIZE_MB * updates)


def _folded(content: RecordDict, expected: gate.Expected, sites: list[str]) -> dict:
    mean = StreamingMean()
    for site in sites:
        reply, reason = gate.inspect(content, expected)
        assert reply is not None, reason
        mean.add(site, reply.modules[MODULE], reply.num_examples)
    return mean.result()
