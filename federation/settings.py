"""The run config of a federation: Flower's flat mapping, parsed once into frozen, typed models.

`Settings.from_run_config` reports every problem together, each with the key, the value seen, what is allowed and a
fix. Defaults written here are the only ones; ``pyproject.toml`` repeats them for Flower's command line, and a test
compares the two.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationError, ValidationInfo, field_validator

from federation import privacy_rules, registry
from federation.metrics import check_selection_metric
from federation.secure_sum import MAX_SITES

Scalar = bool | int | float | str
DIGITS = ("digits", "digits-mosaic", "digits-reports", "digits-mosaic-private")
"""Embedded data without real sites; all but the first are mosaics."""


class SettingsError(ValueError):
    """Every problem of a run config at once; ``problems`` lists them."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        super().__init__("\n".join([f"{count} problem{'s' * (count > 1)} in the run config:", *self.problems]))


class Area(BaseModel):
    """One section of the run config. Strings from a command line are accepted where they parse."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """``rounds = true`` would be read as 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("Input should not be a flag (true or false)")
        return value


class FederationArea(Area):
    """How sites are found, chosen, waited for and weighed."""

    rounds: int = Field(10, ge=1, le=100_000, description="training rounds")
    min_sites: int = Field(2, ge=1, description="usable replies a round needs; fewer end the run with an error")
    expected_sites: int = Field(0, ge=0, description="sites to wait for at the start; 0: those of the partition")
    sites_per_round: int = Field(0, ge=0, description="sites drawn for training in a round; 0: all")
    stratify: bool = Field(False, description="draw the sites of a round evenly over their modalities")
    timeout_s: float = Field(3600.0, gt=0, description="seconds a site has for one reply")
    wait_s: float = Field(300.0, ge=0, description="seconds to wait for expected sites before going on without them")
    weighting: Literal["num_examples", "equal"] = Field("num_examples", description="weight of a site in the mean")
    max_site_share: float = Field(1.0, gt=0, le=1, description="largest share of one site among all; 1: no cap")
    norm_bound: float = Field(0.0, ge=0, description="L2 norm an update is scaled down to; 0: no bound")


class DataArea(Area):
    """Which samples, and in simulation which site holds which of them."""

    root: str = Field(
        "digits-mosaic", min_length=1, description="an embedded name (digits-mosaic) or a folder, zip, csv, npz"
    )
    labels: str = Field("", description="comma-separated label names in the federation's order; empty: all")
    image_size: int = Field(16, ge=8, le=1024, description="side of the square input in pixels")
    channels: Literal[1, 3] = Field(1, description="1 grey, 3 RGB")
    mosaic: Literal["none", "grid", "corner_max"] = Field("none", description="mosaics of a single-label root")
    partition: Literal[
        "iid",
        "by_site",
        "dirichlet",
        "dirichlet_class",
        "dirichlet_client",
        "dirichlet_balanced",
        "n_classes_per_site",
        "beta_gamma",
        "long_tail",
        "label_clusters",
        "listed",
        "own",
    ] = Field("beta_gamma", description="who holds which sample in simulation; own: hospitals, each with its own data")
    index_lists: str = Field("", description="for 'listed': a name in the data's splits.json, one list a site")
    num_sites: int = Field(5, ge=1, le=10_000, description="simulated sites (by_site takes them from the data)")
    site_columns: str = Field("site", description="comma-separated columns that name a real site")
    alpha: float = Field(0.5, gt=0, description="Dirichlet concentration over single labels")
    beta: float = Field(0.5, gt=0, description="Dirichlet concentration over multi-label classes")
    gamma: float = Field(0.5, gt=0, le=1, description="share of classes visible at a site")
    invisible_labels: Literal["keep", "zero", "drop"] = "keep"
    classes_per_site: int = Field(2, ge=1, description="for 'n_classes_per_site': classes that a site holds")
    cluster_share: float = Field(
        0.0, ge=0, le=1, description="for 'label_clusters': sites as a share of the labels; 0: num_sites of them"
    )
    rho: float = Field(20.0, ge=1, description="largest class over smallest class in a long tail")
    profiles: str = Field("", description="simulated modalities, e.g. paired:2,image:3,text:1; empty: as the data is")
    pairing: str = Field("", description="share of samples that are pairs at the paired sites, e.g. 0.9,0.3")
    unpaired: Literal["alternate", "drop_text", "drop_image", "split"] = "alternate"
    never_reports: str = Field("", description="labels a site never records, e.g. site-00:Edema|Mass,site-03:Hernia")
    never_fraction: float = Field(1.0, ge=0, le=1, description="share of such positives that are lost in training")
    lost_labels: float = Field(0.0, ge=0, le=1, description="share of the training annotations that nobody wrote down")
    lost_mode: Literal["drop_positive", "unknown_entries"] = Field(
        "drop_positive", description="positives that read absent, or any entries that read unknown"
    )
    label_sources: str = Field("", description="who labelled a site's data, e.g. site-01:auto,site-02:reviewed")
    min_samples: int = Field(16, ge=1, description="training samples every simulated site gets at least")
    cache_dir: str = Field("", description="folder of decoded images; empty: below the runs folder")

    @field_validator("channels", mode="before")
    @classmethod
    def _number_in_text(cls, value: Any) -> Any:
        """A Literal takes no "3" for 3, as the numbers of the other fields do."""
        return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


class ModelArea(Area):
    """The network."""

    name: Literal["small_cnn", "resnet18"] = "small_cnn"
    width: int = Field(32, ge=4, le=512, description="channels of small_cnn's first layer")
    norm: Literal["batch", "group"] = "batch"
    weights: str = Field("", description="safetensors file with initial backbone weights, the same at every site")
    normalise: Literal["half", "imagenet"] = Field(
        "half", description="pixels to input: half is -1 to 1; imagenet is what ImageNet weights expect"
    )


class TrainingArea(Area):
    """Local training at a site."""

    epochs: int = Field(1, ge=1, le=1000, description="local epochs a round")
    batch_size: int = Field(32, ge=1, le=65_536)
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = Field(0.05, gt=0, le=100)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(1e-5, ge=0, le=1)
    augment: Literal["none", "flip", "crop_flip"] = "none"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "auto"] = Field("float32", description="auto: mixed where a probe allows it")
    threads: int = Field(1, ge=1, le=256, description="CPU threads of one site; changes the sums, so keep it fixed")


class EvaluationArea(Area):
    """What is measured, and on what the model is chosen."""

    every: int = Field(1, ge=0, description="rounds between two evaluations; 0: only at the end")
    bins: int = Field(1024, ge=256, le=65_536, description="bins of a score histogram")
    selection_metric: str = Field("macro_auroc", description="validation metric that chooses the model")
    min_selection_positives: int = Field(
        1, ge=1, description="pooled validation positives a label needs to have a say in choosing the model"
    )
    min_label_sites: int = Field(2, ge=1, description="sites that need positives for a label to enter a headline")
    exclude: str = Field("", description="comma-separated labels that never enter a headline")


class PrivacyArea(Area):
    """What a site holds back."""

    min_cell: int = Field(0, ge=0, le=1000, description="smaller counts, and what tells them, do not leave; 0: none")
    secure_sum: bool = Field(False, description="updates travel under masks; the server learns their sum only")
    secure_range: float = Field(8.0, gt=0, le=1e6, description="largest change of one value; larger ones are cut")
    min_cohort: int = Field(3, ge=3, le=MAX_SITES, description="sites of a module's secure sum; fewer freeze it")
    dp: Literal["none", "central", "local"] = Field(
        "none", description="differential privacy of updates: noise by the server on the mean, or by every site"
    )
    dp_clip: float = Field(1.0, gt=0, le=1e6, description="L2 norm that an update is scaled down to with dp")
    dp_noise: float = Field(1.0, ge=0, le=1e6, description="standard deviation of the noise, as a multiple of dp_clip")
    dp_delta: float = Field(1e-5, gt=0, lt=1, description="delta at which epsilon is stated")

    @property
    def dp_clips(self) -> bool:
        """Whether updates are clipped and noised at all."""
        return self.dp != "none"

    @property
    def dp_at_server(self) -> bool:
        return self.dp == "central"

    @property
    def dp_at_sites(self) -> bool:
        return self.dp_clips and not self.dp_at_server

    @property
    def dp_sensitivity(self) -> int:
        """Sensitivity of what is noised, as a multiple of dp_clip (`federation.differential_privacy`, first choice)."""
        return 2 if self.dp_at_sites else 1


class ReportingArea(Area):
    """Where results go."""

    runs_dir: str = Field("runs", min_length=1, description="folder that gets one folder a run")
    tensorboard: bool = True


class MethodArea(Area):
    """Base of every method's own section, which is named after the method."""


AREAS: dict[str, type[Area]] = {
    "federation": FederationArea,
    "data": DataArea,
    "model": ModelArea,
    "training": TrainingArea,
    "evaluation": EvaluationArea,
    "privacy": PrivacyArea,
    "reporting": ReportingArea,
}


class Settings(BaseModel):
    """Everything a run is made of, checked. ``options`` is the method's own section."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    method: str = Field("fedavg", min_length=1)
    seed: int = Field(1, ge=0, lt=2**63)
    resume: str = Field("", description="run folder to continue")
    federation: FederationArea = FederationArea()
    data: DataArea = DataArea()
    model: ModelArea = ModelArea()
    training: TrainingArea = TrainingArea()
    evaluation: EvaluationArea = EvaluationArea()
    privacy: PrivacyArea = PrivacyArea()
    reporting: ReportingArea = ReportingArea()
    options: SerializeAsAny[MethodArea] = MethodArea()

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> Settings:
        """Parses Flower's flat run config (nested tables are flattened first).

        Keys that are absent take their defaults; sections of methods other than the chosen one are ignored.
        Raises SettingsError with every unknown key (and the nearest known one), wrong value and contradiction.
        """
        flat = flatten(run_config)
        problems: list[str] = []
        method = None
        try:
            method = registry.find(str(flat.get("method", cls.model_fields["method"].default)))
        except registry.UnknownMethod as error:
            problems.append(f"method = {flat.get('method')!r}: {error}")
        areas = {**AREAS, **({method.name: method.settings} if method else {})}
        ignored = set(registry.candidates()) - set(areas)
        top = [name for name in ("method", "seed", "resume") if name in flat]
        values: dict[str, dict[str, Scalar]] = {name: {} for name in areas}
        known = [*cls._top(), *(f"{name}.{key}" for name, area in areas.items() for key in area.model_fields)]
        for key, value in flat.items():
            section, _, name = key.partition(".")
            if key in top or section in ignored:
                continue
            if section in areas and name in areas[section].model_fields:
                values[section][name] = value
            else:
                problems.append(_unknown(key, value, known))
        parsed = {name: _parse(area, values[name], f"{name}.", problems) for name, area in areas.items()}
        if method:
            parsed["options"] = parsed.pop(method.name)
        head = _parse(_Head, {name: flat[name] for name in top}, "", problems)
        if problems or head is None:
            raise SettingsError(problems)
        settings = cls(**{**head.model_dump(), **parsed})
        if problems := contradictions(settings):
            raise SettingsError(problems)
        return settings

    @staticmethod
    def _top() -> tuple[str, ...]:
        return ("method", "seed", "resume")

    def network_shape(self) -> dict[str, Any]:
        """What every network is built with besides its name: input size and channels, width, normalisation."""
        data, model = self.data, self.model
        return {"channels": data.channels, "image_size": data.image_size, "width": model.width, "norm": model.norm}

    def flat(self) -> dict[str, Scalar]:
        """The resolved run config as one flat mapping, method section included."""
        out: dict[str, Scalar] = {name: getattr(self, name) for name in self._top()}
        for name in AREAS:
            out.update({f"{name}.{key}": value for key, value in getattr(self, name).model_dump().items()})
        section = registry.find(self.method).name
        out.update({f"{section}.{key}": value for key, value in self.options.model_dump().items()})
        return out

    def fingerprint(self) -> str:
        """SHA-256 of everything that shapes the arithmetic (not where results go or how long to wait)."""
        shaping = {key: value for key, value in self.flat().items() if key not in RUNTIME_KEYS}
        return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()


RUNTIME_KEYS = frozenset(
    {
        "resume",
        "data.root",
        "data.cache_dir",
        "reporting.runs_dir",
        "reporting.tensorboard",
        "federation.timeout_s",
        "federation.wait_s",
        "training.device",
    }
)
"""Keys that may differ between a run and its resumption: they change where and how long, never what."""


class _Head(Area):
    method: str = Field("fedavg", min_length=1)
    seed: int = Field(1, ge=0, lt=2**63)
    resume: str = ""


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Nested tables as one level of dotted keys.

    >>> flatten({"training": {"lr": 0.1}, "seed": 3})
    {'training.lr': 0.1, 'seed': 3}
    """
    out: dict[str, Scalar] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            out.update(flatten(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = value
    return out


def names_in(text: str) -> tuple[str, ...]:
    """Names of a comma-separated setting, stripped; empty parts are dropped."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def contradictions(settings: Settings) -> list[str]:
    """Sentences for values that are fine alone and wrong together."""
    fed, data, training = settings.federation, settings.data, settings.training
    found = []
    if fed.sites_per_round and fed.sites_per_round < fed.min_sites:
        found.append(
            f"federation.sites_per_round = {fed.sites_per_round} is below federation.min_sites = {fed.min_sites}: "
            "no round could ever succeed; raise the first or lower the second"
        )
    draws_sites = data.partition not in ("by_site", "listed", "own") and not data.cluster_share
    if draws_sites and data.num_sites < fed.min_sites:
        found.append(
            f"data.num_sites = {data.num_sites} is below federation.min_sites = {fed.min_sites}: "
            "no round could ever succeed; add sites or lower federation.min_sites"
        )
    if draws_sites and fed.sites_per_round > data.num_sites:
        found.append(
            f"federation.sites_per_round = {fed.sites_per_round} but data.num_sites = {data.num_sites}: "
            "more sites are asked for than exist; use 0 for all"
        )
    if data.partition == "by_site" and data.root in DIGITS:
        found.append(f"data.partition = 'by_site' but data.root = {data.root!r} has no real sites; choose another one")
    single = data.partition.startswith("dirichlet") or data.partition == "n_classes_per_site"
    if single and (data.root in DIGITS[1:] or data.mosaic != "none"):
        found.append(f"data.partition = {data.partition!r} needs one label a sample; use 'beta_gamma' for mosaics")
    if data.cluster_share and data.partition != "label_clusters":
        found.append(
            f"data.cluster_share = {data.cluster_share} but data.partition = {data.partition!r}: only 'label_clusters' "
            "makes sites out of a share of the labels; use 0"
        )
    if (data.partition == "listed") != bool(data.index_lists):
        found.append(
            f"data.partition = {data.partition!r} with data.index_lists = {data.index_lists!r}: 'listed' takes its "
            "sites from lists that data.index_lists names, and no other partition does"
        )
    model = settings.model
    if (model.name, model.norm, training.batch_size) == ("resnet18", "batch", 1) and data.image_size < 16:
        found.append(
            f"training.batch_size = 1 and data.image_size = {data.image_size}: ResNet-18's last map is one pixel then, "
            "and BatchNorm cannot train on one value; use batch_size 2 or model.norm = 'group'"
        )
    if model.normalise == "imagenet" and data.channels != 3:
        found.append(
            f"model.normalise = 'imagenet' has statistics for 3 channels but data.channels = {data.channels}; use 3, "
            "which repeats grey images, or 'half'"
        )
    if training.device == "cpu" and training.precision == "auto":
        found.append("training.precision = 'auto' needs a GPU but training.device = 'cpu'; use 'float32'")
    try:
        check_selection_metric(settings.evaluation.selection_metric)
    except ValueError as error:
        found.append(f"evaluation.selection_metric = {settings.evaluation.selection_metric!r}: {error}")
    strategy = registry.find(settings.method).strategy
    if settings.privacy.secure_sum:
        found += _unsummable(settings, bool(getattr(strategy, "secure_summable", True)), draws_sites)
    found += privacy_rules.contradictions(settings, strategy)
    return found + list(getattr(strategy, "contradictions", lambda _: [])(settings))


def _unsummable(settings: Settings, summable: bool, draws_sites: bool) -> list[str]:
    """What does not go together with a server that sees no single update."""
    fed, data, found = settings.federation, settings.data, []
    on = "privacy.secure_sum = true"
    if not summable:
        found.append(
            f"method = {settings.method!r} with {on}: its server needs more than the mean of the updates with whole "
            "numbers as weights; choose another method or privacy.secure_sum = false"
        )
    if fed.norm_bound:
        found.append(
            f"federation.norm_bound = {fed.norm_bound} with {on}: nobody sees the norm of a single update; use 0 and "
            "bound every value with privacy.secure_range"
        )
    if fed.max_site_share < 1:
        found.append(
            f"federation.max_site_share = {fed.max_site_share} with {on}: a site weighs what it says itself; use 1, or "
            "federation.weighting = 'equal'"
        )
    for key, count in (
        ("federation.expected_sites", fed.expected_sites),
        ("federation.sites_per_round", fed.sites_per_round),
        ("data.num_sites", data.num_sites if draws_sites else 0),
    ):
        if count and count < settings.privacy.min_cohort:
            found.append(
                f"{key} = {count} is below privacy.min_cohort = {settings.privacy.min_cohort} with {on}: the sum of so "
                "few sites shows their parts; add sites or use privacy.secure_sum = false"
            )
    if draws_sites and min(fed.sites_per_round or data.num_sites, data.num_sites) > MAX_SITES:
        found.append(
            f"data.num_sites = {data.num_sites} with {on}: use federation.sites_per_round = {MAX_SITES} or less"
        )
    return found


def _parse(area: type[Area], values: dict[str, Scalar], prefix: str, problems: list[str]) -> Area | None:
    try:
        return area(**values)
    except ValidationError as error:
        for item in error.errors():
            name = ".".join(str(part) for part in item["loc"])
            field = area.model_fields.get(name)
            hint = f"; the default is {field.default!r}" if field is not None else ""
            problems.append(f"{prefix}{name} = {item['input']!r}: {item['msg']}{hint}")
    return None


def _unknown(key: str, value: Scalar, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, 1, 0.4)
    return f"{key} = {value!r}: unknown key" + (f"; did you mean {near[0]}?" if near else "; see pyproject.toml")
