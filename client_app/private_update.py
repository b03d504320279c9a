"""The site's part of differential privacy: clip the update, and where the run asks sites to, add the noise."""

from __future__ import annotations

from dataclasses import replace

from client_app.site import Site, site_logger
from client_app.training import Job, Update
from federation import wire
from federation.differential_privacy import clipped, noise_key, noised, update_norm
from federation.settings import SettingsError


def protected(update: Update, site: Site, job: Job) -> Update:
    """The update as it may be sent; unchanged where `privacy.dp` is off. See `federation.differential_privacy`.

    A hospital's noise comes from the operating system and is another one each time a round is asked for; that of a
    simulated site from the run's seed. Raises SettingsError at a hospital whose server would take it from the seed too.
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
    modules = clipped(update.modules, area.dp_clip)
    site_logger(site.folder).info(
        "round=%s norm of the update %.4g, clipped to %g", job.server_round, update_norm(update.modules), area.dp_clip
    )
    if area.dp_at_sites:
        key = noise_key(job.settings.seed, job.server_round, site.name, secret=is_hospital)
        arrays = {module: {n: v.numpy() for n, v in state.items()} for module, state in modules.items()}
        sigma = area.dp_clip * area.dp_noise
        sigmas = {module: dict.fromkeys(state, sigma) for module, state in arrays.items()}
        modules = {module: wire.tensors(state) for module, state in noised(arrays, sigmas, key).items()}
    return replace(update, modules=modules)
