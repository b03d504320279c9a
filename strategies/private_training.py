"""The server's part of differential privacy: hold updates to the clip, add the noise, count what was released."""

from __future__ import annotations

from collections.abc import Mapping
from logging import INFO, WARNING

from flwr.supercore import log

from federation import differential_privacy as privacy
from federation.settings import Settings
from strategies.aggregation import StreamingMean
from strategies.progress import Modules, Progress, RoundRecord
from strategies.secure_round import SecureMean


class PrivateTraining:
    """The part of `FederatedStrategy` that `privacy.dp` switches on; see `federation.differential_privacy`.

    The server clips again what it sees, so that no site can do more to the mean than its noise hides; under the masks
    of a secure sum it has to trust the sites' own clip.
    """

    settings: Settings
    progress: Progress
    record: RoundRecord

    def _begin_privacy(self, resumed: bool) -> None:
        """Warns of what noise is bad for; a round that was under way when a run was stopped counts as released."""
        if not self.settings.privacy.dp_clips:
            return
        self.progress.releases += int(resumed)
        for warning in privacy.warnings_of(name for state in self.progress.modules.values() for name in state):
            log(WARNING, "%s", warning)

    def _update_bound(self) -> float:
        """L2 norm that the server scales an update down to, 0 for none."""
        area, bound = self.settings.privacy, self.settings.federation.norm_bound
        if not area.dp_at_server:
            return bound  # what sites have noised is longer than the clip
        return min(bound, area.dp_clip) if bound else area.dp_clip

    def _released(
        self, means: Mapping[str, StreamingMean | SecureMean], server_round: int
    ) -> Mapping[str, StreamingMean | SecureMean]:
        """The means as the state may take them up, noised where the server does that; counts the release.

        Raises PrivacyError where sites weigh differently.
        """
        area = self.settings.privacy
        if not area.dp_clips:
            return means
        self.progress.releases += 1
        self._state_privacy()
        if not area.dp_at_server:
            return means
        sites = {module: len(mean.sites) for module, mean in means.items()}
        results = {module: mean.result() for module, mean in means.items()}
        weights = {module: dict(mean.weights) for module, mean in means.items()}
        sigmas = privacy.mean_sigmas(weights, sites, area.dp_clip * area.dp_noise)
        is_secret = self.settings.data.partition == "own"  # hospitals; else a simulation, which can be repeated
        key = privacy.noise_key(self.settings.seed, server_round, privacy.SERVER, secret=is_secret)
        noised = privacy.noised(results, sigmas, key)
        return {module: SecureMean(mean.sites, mean.weights, noised[module]) for module, mean in means.items()}

    def _state_privacy(self) -> None:
        """Puts into the round's record, and the log, what can be said after it."""
        self.record.privacy = said = privacy.statement(self.settings.privacy, self.progress.releases)
        words = "\t├── privacy: epsilon %.3g at delta %g after %s rounds"
        log(INFO, words, said["epsilon"], said["delta"], said["rounds"])

    def _after_noise(self, modules: Modules) -> Modules:
        """The next state, with what noise must not have done undone."""
        return privacy.with_valid_variances(modules) if self.settings.privacy.dp_clips else modules
