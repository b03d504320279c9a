"""What a site does to an update before it leaves: clip it, and where the run asks sites to, add noise."""

from __future__ import annotations

from dataclasses import replace

from client_app.site import Site, site_logger
from client_app.training import Job, Modules, Update
from federation import wire
from federation.differential_privacy import clipped, noise_key, noised, update_norm
from federation.settings import SettingsError


def protected(update: Update, site: Site, job: Job) -> Update:
    """The update as it may be sent; unchanged where `privacy.dp` is off. See `federation.differential_privacy`.

    Raises SettingsError at a hospital whose server would take its noise from the run's seed.
    """
    area, is_hospital = job.settings.privacy, site.consents is not None  # a simulated site has nobody to ask
    if not area.dp_clips:
        return update
    if is_hospital and area.dp_at_server and job.settings.data.partition != "own":
        raise SettingsError(
            [
                f"data.partition = {job.settings.data.partition!r} with privacy.dp = {area.dp!r} at a hospital: the "
                "server would draw its noise from the run's seed, which the sites know; use 'own'"
            ]
        )
    sigma = area.dp_clip * area.dp_noise if area.dp_at_sites else 0.0
    return replace(update, modules=limited(update.modules, area.dp_clip, sigma, site, job))


def limited(modules: Modules, clip: float, sigma: float, site: Site, job: Job) -> Modules:
    """Modules scaled to a joint L2 norm of at most ``clip``, plus Gaussian noise of standard deviation ``sigma``.

    ``sigma``: 0 for no noise. A hospital's noise comes from the operating system and is another one each time a round
    is asked for; that of a simulated site from the run's seed, the same at every call: call it once a round.
    """
    names, norm = ", ".join(sorted(modules)), update_norm(modules)
    site_logger(site.folder).info("round=%s norm of %s %.4g, clipped to %g", job.server_round, names, norm, clip)
    modules = clipped(modules, clip)
    if not sigma:
        return modules
    key = noise_key(job.settings.seed, job.server_round, site.name, secret=site.consents is not None)
    arrays = {module: {n: v.numpy() for n, v in state.items()} for module, state in modules.items()}
    sigmas = {module: dict.fromkeys(state, sigma) for module, state in arrays.items()}
    return {module: wire.tensors(state) for module, state in noised(arrays, sigmas, key).items()}
