"""What an `incongruent` site keeps between rounds: its model alone, its text between uploads, what was not sent yet.

The project's incongruent specification, sections 4.6, 6.2 and 6.3. All of it is bound to the last round of this site
that the server accepted; what is lost starts from nothing, and the site's log says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from client_app.site import Site, site_logger
from client_app.training import Job, Modules, change
from federation import seeding, wire
from models.incongruent import IncongruentNetwork, split_state
from models.incongruent_exchange import TEXT, VISION

OWN, OWN_TEXT, PREVIOUS = "own", "text", "previous"


def own_model(site: Site, job: Job) -> Modules:
    """The modules that a site which trains alone goes on with; none before its first round."""
    state = site.load_state(OWN, job.last_accepted) if job.last_accepted else None
    return {} if state is None else _by_module(state)


def own_text(received: Modules, site: Site, job: Job) -> Modules:
    """The site's own text encoder, as long as the global one has not moved since it was saved (spec 6.3).

    Choice: the global text moves in every upload round, also in one where no site with reports took part.
    """
    options = job.settings.options
    if TEXT not in received or options.text_skip == "freeze" or options.alone or not job.last_accepted:
        return {}
    since = range(job.last_accepted, job.server_round)
    if any(options.uploads_text(earlier, job.settings.federation.rounds) for earlier in since):
        return {}
    return {TEXT: state} if (state := _loaded(OWN_TEXT, site, job)) else {}


def previous_model(site: Site, job: Job) -> Modules:
    """The site's model after its last accepted round, for MOON; none before."""
    return _by_module(_loaded(PREVIOUS, site, job) or {}) if job.settings.options.moon_weight else {}


def keep_model(network: IncongruentNetwork, site: Site, job: Job) -> None:
    """Saves what the next round starts from at this site."""
    options, states = job.settings.options, split_state(network)
    flat = {f"{module}/{name}": value for module, state in states.items() for name, value in state.items()}
    if options.alone:
        site.save_state(OWN, job.server_round, flat, job.last_accepted)
    elif TEXT in states and options.text_skip == "accumulate" and options.text_every > 1:
        site.save_state(OWN_TEXT, job.server_round, states[TEXT], job.last_accepted)
    if options.moon_weight:
        site.save_state(PREVIOUS, job.server_round, flat, job.last_accepted)


def changes_to_send(
    network: IncongruentNetwork, received: Modules, trained: tuple[str, ...], site: Site, job: Job
) -> dict[str, dict[str, Any]]:
    """Changes of the trained modules, sparse where the run wants it; what is not sent waits in the residual.

    Choice: a residual of a module that is not sent in this round waits too; its age counts from the last accepted
    round, so the rounds between two uploads of the text make it no older.
    """
    options, states, sent = job.settings.options, split_state(network), {}
    for module, state in states.items():
        topk = options.compressor(module)
        if topk is None:
            if module in trained:
                sent[module] = change(received[module], state)
            continue
        residual = _loaded(f"residual-{module}", site, job, needed=module == VISION and module in trained)
        if module in trained:
            dense, indices = change(received[module], state), None
            if topk.index == "shared_seed":
                draws = seeding.numpy_generator(job.settings.seed, f"sparse/{module}", job.server_round)
                indices = topk.shared_indices(wire.spec_of(dense), draws)
            age = job.server_round - job.last_accepted
            sent[module], residual = topk.encode(dense, residual, age=age, indices=indices)
        if residual is not None:
            site.save_state(f"residual-{module}", job.server_round, residual, job.last_accepted)
    return sent


def _loaded(name: str, site: Site, job: Job, needed: bool = True) -> dict[str, Tensor] | None:
    """A kept state of the last accepted round. One that should be there and is not is told to the log (spec 9)."""
    state = site.load_state(name, job.last_accepted) if job.last_accepted else None
    if state is None and job.last_accepted and needed:
        site_logger(site.folder).warning(
            "round=%s the kept %s of round %s is lost; going on without", job.server_round, name, job.last_accepted
        )
    return state


def _by_module(flat: Mapping[str, Tensor]) -> Modules:
    modules: Modules = {}
    for key, value in flat.items():
        module, _, name = key.partition("/")
        modules.setdefault(module, {})[name] = value
    return modules
