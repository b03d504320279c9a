"""Round 0: wait for the sites, ask each for its card, freeze the table."""

from __future__ import annotations

import time
from logging import INFO, WARNING

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from federation import wire
from strategies.cards import CardError, SiteCard, SiteTable, freeze, read_card
from strategies.exchange import exchange, failure

REMIND_S = 30.0


class QuorumError(RuntimeError):
    """Fewer usable replies or sites than a round needs. The run ends here and can be resumed."""


def wait_for_nodes(grid: Grid, *, expected: int, quorum: int, wait_s: float) -> list[int]:
    """Node ids, sorted, once ``expected`` are online, or after ``wait_s`` with at least ``quorum``.

    Logs who is missing while it waits. Raises QuorumError where the time is over and the quorum is not there.
    """
    started = time.monotonic()
    remind_s = 0.0
    while len(node_ids := sorted(grid.get_node_ids())) < max(expected, quorum):
        waited_s = time.monotonic() - started
        if waited_s >= wait_s:
            if len(node_ids) >= quorum:
                log(WARNING, "%s of %s expected sites are online; going on without the others", len(node_ids), expected)
                break
            raise QuorumError(
                f"{len(node_ids)} sites online after {wait_s:g} s, {quorum} needed "
                "(federation.min_sites, federation.wait_s)"
            )
        if waited_s >= remind_s:
            log(INFO, "waiting for sites: %s online, %s expected", len(node_ids), max(expected, quorum))
            remind_s = waited_s + REMIND_S
        time.sleep(0.2)
    return node_ids


def collect_table(
    grid: Grid, node_ids: list[int], content: RecordDict, payload: wire.Payload, *, quorum: int, timeout_s: float
) -> SiteTable:
    """Asks every node for its card and freezes the table; a site that cannot take part is in ``table.refused``.

    ``payload``: what a card has to be, see `wire.profile_payload`.

    A node whose key was registered under a name must call its site so: nobody can speak for another hospital.
    Raises CardError (see `cards.freeze`), and QuorumError where fewer than ``quorum`` sites can train.
    """
    registered = {int(node.node_id): str(node.name) for node in grid.get_nodes() if getattr(node, "name", "")}
    names = {node_id: registered.get(node_id, f"node {index:04d}") for index, node_id in enumerate(node_ids)}
    messages = [Message(content, node_id, wire.PROFILE, ttl=timeout_s, group_id="0") for node_id in node_ids]
    cards: list[SiteCard] = []
    refused: dict[str, str] = {}
    for reply in exchange(grid, messages, names, timeout_s):
        node_id = reply.metadata.src_node_id
        reason = failure(reply) or payload.violation(reply.content)
        if reason and reason.startswith("E-EMPTY"):
            log(INFO, "\t%s has no site in this partition; it stays idle", names[node_id])
        elif reason:
            refused[names[node_id]] = reason
        else:
            try:
                cards.append(read_card(node_id, reply.content, registered.get(node_id)))
            except CardError as error:
                refused[names[node_id]] = str(error)
    table = _frozen(cards, refused)
    for site, reason in sorted(table.refused.items()):
        log(WARNING, "\tsite refused: %s: %s", site, reason)
    if len(table.trainable) < quorum:
        reasons = "".join(f"; {site}: {reason}" for site, reason in sorted(table.refused.items()))
        raise QuorumError(f"{len(table.trainable)} sites can train, {quorum} needed (federation.min_sites){reasons}")
    log(INFO, "sites: %s", ", ".join(card.site for card in table.cards))
    return table


def _frozen(cards: list[SiteCard], refused: dict[str, str]) -> SiteTable:
    if not cards:
        raise QuorumError(
            "no site sent a card: " + "; ".join(f"{site}: {why}" for site, why in sorted(refused.items()))
        )
    table = freeze(cards)
    return SiteTable(table.cards, {**refused, **table.refused})
