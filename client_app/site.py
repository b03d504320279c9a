"""A site: its name, its data, its folder. Opened from the run config in simulation, from the node's own config in a
hospital; nothing after this file can tell which.

A hospital's node config names ``site``, ``data-root`` and ``state-dir``; these always win over what the server sends.
A simulated node has ``partition-id`` only: it is that site of the partition.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from datasets.catalogue import open_manifest
from datasets.class_partitions import dirichlet_class, dirichlet_client, n_classes_per_site
from datasets.incongruence import Incongruence, apply_incongruence, parse_incongruence
from datasets.index_lists import index_lists
from datasets.label_clusters import by_label_clusters, clusters_for, mask_labels
from datasets.partition import (
    Partition,
    beta_gamma,
    by_site,
    dirichlet,
    equal_sites,
    hide_labels,
    iid,
    listed,
    long_tail,
    pooled_train,
)
from datasets.records import DataError, Manifest, SiteData
from datasets.site import load_site
from federation import registry, seeding, wire
from federation.files import save_tensors
from federation.settings import DataArea, Settings, names_in

EXPERIMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
STARTED_FROM = "started_from"


class ConsentError(RuntimeError):
    """The method asks for something that the site's own config does not allow to travel."""


class IdleNode(Exception):
    """A simulated node beyond the partition's last site."""


@dataclass(frozen=True)
class Site:
    """One opened site. ``folder`` holds its ledger, log and state for this experiment.

    ``consents``: what the hospital's own node config allows to travel that is kept back by default; None in a
    simulation, which has nobody to ask. ``cache_dir``: where what can be computed again lies, for all experiments.
    """

    name: str
    data: SiteData
    folder: Path
    consents: frozenset[str] | None = None
    cache_dir: Path | None = None

    def check_consent(self, what: str) -> None:
        """Raises ConsentError unless the hospital's node config names this among its ``consents``."""
        if self.consents is not None and what not in self.consents:
            raise ConsentError(
                f"the method would send {what!r}, which this site's node config does not allow; add it to 'consents' "
                "there, or take part with another setting"
            )

    def save_state(self, name: str, server_round: int, state: Mapping[str, torch.Tensor], last_accepted: int) -> None:
        """Keeps tensors as they are after a round, atomically, and drops those that no round can start from again.

        Three stay: this round's, those of ``last_accepted``, which it started from, and those which that round had
        started from. A server that lost its newest checkpoint goes back by one round, and rounds that it refused lie
        between, so the newest files are not the ones that count. A repeated round overwrites its own state.
        """
        path = self._state_file(name, server_round)
        save_tensors(path, {key: value.cpu() for key, value in state.items()}, {STARTED_FROM: str(last_accepted)})
        before = self._state_file(name, last_accepted)
        kept = {path, before}
        if before.exists():
            with safe_open(before, framework="pt") as file:
                kept.add(self._state_file(name, int(file.metadata()[STARTED_FROM])))
        for old in set(path.parent.glob(f"{name}-*.safetensors")) - kept:
            old.unlink(missing_ok=True)

    def load_state(self, name: str, server_round: int) -> dict[str, torch.Tensor] | None:
        """Tensors as they were after exactly this round, or None where there are none."""
        path = self._state_file(name, server_round)
        return load_file(path) if path.exists() else None

    def _state_file(self, name: str, server_round: int) -> Path:
        return self.folder / "state" / f"{name}-{server_round:06d}.safetensors"


def open_folder(settings: Settings | None, node_config: Mapping[str, Any], experiment: str) -> Path:
    """The site's folder for one experiment, made with mode 0700; needs no data, so that failures can be logged.

    A hospital's folder needs no settings either. Raises ValueError for a name that is not a plain folder name.
    """
    if not EXPERIMENT.fullmatch(experiment):
        raise ValueError("the experiment's name is not letters, digits, '.', '_' and '-'")
    if is_hospital(node_config):
        folder = Path(str(node_config["state-dir"])).expanduser() / experiment
    elif settings is None:
        raise ValueError("a simulated site's folder is below reporting.runs_dir, so it needs the settings")
    else:
        runs = Path(settings.reporting.runs_dir).expanduser()
        folder = runs / experiment / "sites" / _simulated_name(settings, node_config)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder.absolute()


def open_site(settings: Settings, node_config: Mapping[str, Any], folder: Path) -> Site:
    """The site's data, from the process's cache where it was opened before. Raises DataError and IdleNode."""
    reads = _reads_reports(settings)
    if is_hospital(node_config):
        root, cache = str(node_config["data-root"]), Path(str(node_config["state-dir"])).expanduser() / "cache"
        data = _hospital_data(settings.data, root, str(node_config["site"]), str(cache), reads)
    else:
        cache = Path(settings.data.cache_dir or Path(settings.reporting.runs_dir) / ".cache").expanduser()
        data = _simulated_data(*_simulation_key(settings), str(cache), reads, _partition_id(node_config))
    consents = frozenset(names_in(str(node_config.get("consents", "")))) if is_hospital(node_config) else None
    return Site(data.name, data, folder, consents, cache)


def is_hospital(node_config: Mapping[str, Any]) -> bool:
    """Whether a node names its own data; else it is a simulated one. Raises DataError where it is neither."""
    missing = [key for key in ("site", "data-root", "state-dir") if key not in node_config]
    if missing and "partition-id" not in node_config:
        raise DataError(
            f"the node config lacks {', '.join(missing)}; a hospital's node names site, data-root and state-dir"
        )
    return not missing


def _partition_id(node_config: Mapping[str, Any]) -> int:
    return int(node_config["partition-id"])


def _reads_reports(settings: Settings) -> bool:
    return bool(getattr(registry.find(settings.method).strategy, "reads_reports", False))


@functools.lru_cache(maxsize=4)
def _hospital_data(area: DataArea, root: str, name: str, cache: str, reads_reports: bool) -> SiteData:
    manifest = open_manifest(root, labels=names_in(area.labels) or None)
    rows = {split: np.flatnonzero(manifest.table["split"].to_numpy() == split) for split in ("train", "val", "test")}
    return load_site(
        manifest,
        rows,
        name=name,
        size=area.image_size,
        channels=area.channels,
        cache_dir=Path(cache),
        reads_reports=reads_reports,
    )


# -- simulation -------------------------------------------------------------------------------------------------------


def site_names(settings: Settings) -> list[str]:
    """Names of the simulated sites, sorted: as many nodes as a simulation needs. Raises DataError."""
    return sorted(_federation(*_simulation_key(settings))[1].sites)


def write_partition(settings: Settings, path: Path) -> None:
    """Writes the simulated partition as JSON unless the file is there."""
    if not path.exists():
        _federation(*_simulation_key(settings))[1].write(path, seed=settings.seed)


def _simulation_key(settings: Settings) -> tuple[DataArea, int, bool]:
    strategy = registry.find(settings.method).strategy
    pooled = bool(getattr(strategy, "pools_training_data", False) or getattr(settings.options, "pooled", False))
    return settings.data, settings.seed, pooled


def _simulated_name(settings: Settings, node_config: Mapping[str, Any]) -> str:
    index = _partition_id(node_config)
    try:
        return site_names(settings)[index]
    except (DataError, IndexError):
        return f"node-{index:03d}"


@functools.lru_cache(maxsize=4)
def _federation(area: DataArea, seed: int, pooled: bool) -> tuple[Manifest, Partition, np.ndarray | None]:
    """The manifest as the sites see it, who holds what, and which row has an image and a report (None: as it is)."""
    manifest = open_manifest(
        area.root,
        labels=names_in(area.labels) or None,
        mosaic=area.mosaic,
        rng_for=functools.partial(seeding.numpy_generator, seed),
    )
    partition = _partition(manifest, area, seed)
    if wrong := sorted(name for name in partition.sites if not wire.SITE_NAME.fullmatch(name)):
        raise DataError(
            f"site {wrong[0]!r} cannot be a site's name: use 1 to 64 letters, digits, '.', '_', '-', blanks"
        )
    manifest, present = replace(manifest, targets=_annotated(manifest, partition, area, seed)), None
    if wish := _incongruence(partition, area):
        draws = functools.partial(seeding.numpy_generator, seed)
        manifest, present = apply_incongruence(manifest, partition, wish, draws)
        partition = replace(partition, arguments={**partition.arguments, "incongruence": asdict(wish)})
    if pooled:
        partition = pooled_train(manifest.targets, manifest.table, partition)
    return manifest, partition, present


def _annotated(manifest: Manifest, partition: Partition, area: DataArea, seed: int) -> np.ndarray:
    """The targets that the sites' annotators wrote down: without hidden labels, and in training without lost ones."""
    targets = hide_labels(manifest.targets, partition)
    if not area.lost_labels:
        return targets
    if manifest.task == "multiclass":
        raise DataError("data.lost_labels: every sample has exactly one label here, and none can be lost; use 0")
    rows = np.flatnonzero(manifest.table["split"].to_numpy() == "train")
    draws = seeding.numpy_generator(seed, "lost-labels")
    targets[rows] = mask_labels(targets[rows], area.lost_labels, area.lost_mode, draws)
    return targets


def _incongruence(partition: Partition, area: DataArea) -> Incongruence | None:
    if not (area.profiles or area.pairing or area.never_reports or area.label_sources):
        return None
    return parse_incongruence(
        sorted(partition.sites),
        profiles=area.profiles,
        pairing=area.pairing,
        unpaired=area.unpaired,
        never_reports=area.never_reports,
        never_fraction=area.never_fraction,
        label_sources=area.label_sources,
    )


def _partition(manifest: Manifest, area: DataArea, seed: int) -> Partition:
    targets, table, num_sites = manifest.targets, manifest.table, area.num_sites
    rng = seeding.numpy_generator(seed, "partition")
    if area.partition == "by_site":
        return by_site(targets, table, columns=names_in(area.site_columns), min_samples=area.min_samples)
    if area.partition == "own":
        raise DataError("data.partition = 'own' is for hospitals; a simulation needs to be told who holds what")
    if area.partition == "iid":
        return iid(targets, table, rng, num_sites=num_sites)
    if area.partition == "label_clusters":
        share = area.cluster_share
        count = clusters_for(share, len(manifest.labels)) if share else num_sites
        return by_label_clusters(targets, table, num_sites=count)
    if area.partition == "n_classes_per_site":
        return n_classes_per_site(targets, table, rng, num_sites=num_sites, num_classes=area.classes_per_site)
    if area.partition == "dirichlet_client":
        return dirichlet_client(targets, table, rng, num_sites=num_sites, alpha=area.alpha)
    if area.partition == "dirichlet_class":
        return dirichlet_class(targets, table, rng, num_sites=num_sites, alpha=area.alpha, min_size=area.min_samples)
    if area.partition == "dirichlet":
        return dirichlet(targets, table, rng, num_sites=num_sites, alpha=area.alpha, min_size=area.min_samples)
    if area.partition == "dirichlet_balanced":
        return equal_sites(targets, table, rng, num_sites=num_sites, alpha=area.alpha, ratio=area.rho)
    if area.partition == "listed":
        lists = index_lists(area.root, area.index_lists, seed)
        return listed(targets, table, rng, name=area.index_lists, lists=lists)
    if area.partition == "long_tail":
        return long_tail(
            targets, table, rng, num_sites=num_sites, ratio=area.rho, alpha=area.alpha, min_size=area.min_samples
        )
    return beta_gamma(
        targets,
        table,
        rng,
        num_sites=num_sites,
        beta=area.beta,
        gamma=area.gamma,
        invisible_labels=area.invisible_labels,
        min_size=area.min_samples,
    )


@functools.lru_cache(maxsize=64)
def _simulated_data(area: DataArea, seed: int, pooled: bool, cache: str, reads_reports: bool, index: int) -> SiteData:
    manifest, partition, present = _federation(area, seed, pooled)
    names = sorted(partition.sites)
    if index >= len(names):
        raise IdleNode(f"node {index} of a partition of {len(names)} sites")
    name = names[index]
    return load_site(
        manifest,
        partition.sites[name],
        name=name,
        size=area.image_size,
        channels=area.channels,
        cache_dir=Path(cache),
        present=present,
        reads_reports=reads_reports,
    )


def site_logger(folder: Path) -> logging.Logger:
    """The site's own log, ``site.log`` in its folder. Nothing written to it leaves the site."""
    logger = logging.getLogger(f"consilium.site.{folder}")
    if not logger.handlers:
        logger.propagate = False
        logger.setLevel(logging.INFO)
        handler = logging.FileHandler(folder / "site.log", encoding="utf-8", delay=True)
        handler.handleError = lambda record: None  # the default prints the message to stderr, which Ray forwards
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
    return logger
