"""The four messages of a secure sum at a site: from the message to the answer, with the secrets kept in between.

`client_app.secure_sum` makes the answers; here they get what the site knows: its folder, its settings, its training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NamedTuple

from flwr.app import RecordDict

from client_app import secure_sum
from client_app.secure_sum import Answer, Secrets
from client_app.site import Site
from client_app.training import Job, Update
from federation import wire
from federation.secure_roster import ASK_KEYS, ASK_MASKED, ASK_SHARES, ASK_UNMASK
from federation.secure_sum import Specs

FOLLOWS = {ASK_SHARES: "keys", ASK_MASKED: "shares", ASK_UNMASK: "masked"}
"""The answer that has to come before an action, by the action."""


class Trained(NamedTuple):
    """A finished local training: the update, the tensors of its modules, and the reply without them.

    ``declared``: the declaration of the evaluation in the reply.
    """

    update: Update
    specs: Mapping[str, Specs]
    content: RecordDict
    declared: wire.Payload


def answer(
    action: str,
    request: RecordDict,
    site: Site,
    job: Job,
    *,
    half: ModuleType,
    train: Callable[[], Trained],
) -> tuple[RecordDict, wire.Payload]:
    """The answer to one of the four messages; what the next one needs is on the disk before this one leaves.

    ``train``: the method's local training, called for the masked vectors only. Raises SecureSumError.
    """
    if action == ASK_KEYS:
        secure_sum.begin(site.folder)
        found = secure_sum.site_keys(site.name, job.server_round)
    else:
        secrets = secure_sum.take(site.folder, job.server_round, FOLLOWS[action])
        found = _next(action, secrets, request, job, half, train)
    if found.secrets is not None:
        secure_sum.keep(site.folder, found.secrets)
    return found.content, found.payload


def _next(
    action: str,
    secrets: Secrets,
    request: RecordDict,
    job: Job,
    half: ModuleType,
    train: Callable[[], Trained],
) -> Answer:
    area, experiment = job.settings.privacy, str(job.config["experiment"])
    if action == ASK_SHARES:
        return secure_sum.site_shares(secrets, request, experiment=experiment, min_cohort=area.min_cohort)
    if action == ASK_UNMASK:
        return secure_sum.site_unmask(secrets, request, min_cohort=area.min_cohort)
    update, specs, content, declared = train()
    return secure_sum.site_masked(
        secrets,
        request,
        update.modules,
        getattr(half, "weights", example_weights)(update, job),
        specs=specs,
        value_range=area.secure_range,
        min_cohort=area.min_cohort,
        reply=(content, wire.train_payload({}, declared, getattr(half, "TRAIN_EXTRA", None))),
    )


def example_weights(update: Update, job: Job) -> dict[str, int]:
    """What `FederatedStrategy.weigh` gives, for every module that was trained; a half with other weights has its own.

    A site half's ``weights(update, job)``: module -> whole number; a module without one adds nothing to the sum.
    """
    weight = 1 if job.settings.federation.weighting == "equal" else update.num_examples
    return dict.fromkeys(update.modules, weight)
