"""Who trained which module of an `incongruent` run, so that nothing is served as it was initialised (spec 5.5)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

PREFIX = "covered/"


class CoverageError(RuntimeError):
    """A module of the model was never trained by anybody (spec 5.5)."""


@dataclass
class Coverage:
    """A table by module, ``(K, 2) int64``: updates that were taken from each of K sites, and the round of the last.

    Choice: by module and not by tensor, since a site sends a module whole or not at all.
    """

    tables: dict[str, torch.Tensor] = field(default_factory=dict)

    def note(self, module: str, senders: Collection[str], sites: Sequence[str], server_round: int) -> None:
        """Counts one round's senders of a module; with none it is known and untrained."""
        table = self.tables.setdefault(module, torch.zeros(len(sites), 2, dtype=torch.int64))
        for row in (sites.index(site) for site in senders):
            table[row, 0] += 1
            table[row, 1] = server_round

    def untrained(self) -> list[str]:
        """Modules that nobody has trained."""
        return sorted(module for module, table in self.tables.items() if not table[:, 0].any())

    def by_tensor(self, sites: Sequence[str], names: Mapping[str, Iterable[str]]) -> dict[str, dict[str, object]]:
        """Plain values for JSON: full tensor name to updates, sites and last round (0 for never)."""
        found = {}
        for module in sorted(self.tables):
            table = self.tables[module]
            entry = {
                "updates": int(table[:, 0].sum()),
                "sites": [site for site, (count, _) in zip(sites, table.tolist(), strict=True) if count],
                "last_round": int(table[:, 1].max()),
            }
            found |= {f"{module}.{name}": entry for name in sorted(names[module])}
        return found

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {f"{PREFIX}{module}": table.clone() for module, table in self.tables.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores what `state_dict` gave; other names are not looked at."""
        self.tables = {
            name.removeprefix(PREFIX): table.clone() for name, table in state.items() if name.startswith(PREFIX)
        }
