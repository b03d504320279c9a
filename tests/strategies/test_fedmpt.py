"""FedMPT on the server: what travels and how much, who trains at which rate, what is averaged, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from client_app import fedmpt as site_half
from client_app import handler
from federation import registry, wire
from federation.settings import Settings, SettingsError
from models.clip import clip_sha256
from models.fedmpt_networks import opened_clip
from strategies.aggregation import ModularMean
from strategies.cards import CardError, SiteCard, SiteTable
from strategies.fedmpt_area import cosine_lr
from strategies.gate import Reply
from strategies.initial import seeded
from tests.strategies.fedmpt_data import WIDE, run_config, write_clip

GOLDEN = Path(__file__).parents[1] / "golden" / "fedmpt"
LABELS = ("cat", "dog", "fox")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("wide"), config=WIDE)


@pytest.fixture
def strategy_of(tmp_path, clip):
    """``strategy_of(clip, sites=4, **changes)``: the strategy in its initial state over made-up site cards."""

    def make(folder=clip, sites=4, labels=LABELS, **changes):
        settings = Settings.from_run_config(run_config(tmp_path, folder, **changes))
        strategy = registry.find("fedmpt").strategy(settings)
        cards = tuple(card(f"site-{index:02d}", 10 ** (index + 1), labels) for index in range(sites))
        strategy.table = SiteTable(cards, {})
        strategy.progress.modules = strategy.build(seeded(lambda: strategy.network(labels, "multilabel"), settings))
        return strategy

    return make


def card(site, num_train, labels=LABELS):
    sizes, ones = {"train": num_train, "val": 1, "test": 1}, (1,) * len(labels)
    return SiteCard(num_train, site, labels, "multilabel", "", ("image",), "", sizes, ones, ones)


def reply(site, arrays, num_examples=1):
    numbers = {wire.METRICS: {"num_examples": num_examples}}
    return Reply(site, 1, {"model": arrays}, {}, numbers, 0.0, {"model": arrays})


# -- what travels (spec 3, oracle 6) ----------------------------------------------------------------------------------


def test_eight_arrays_of_192709_numbers_travel_and_float16_halves_them(strategy_of, wide):
    defaults = {"num_conditions": 5, "adapter_rank": 32}
    strategy = strategy_of(wide, **defaults)
    state = strategy.progress.modules["model"]
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "prompt.cond": (5, 4, 512),
        "prompt.cls": (4, 512),
        "head.adapter.down": (5, 32, 512),
        "head.adapter.up": (5, 512, 32),
        "head.gate.w1": (32, 512),
        "head.gate.b1": (32,),
        "head.gate.w2": (5, 32),
        "head.gate.b2": (5,),
    }
    network = strategy.network(LABELS, "multilabel")
    assert sum(value.numel() for value in network.parameters() if value.requires_grad) == 192_709

    def uploaded(strategy):
        """Bytes of an update as it is sent."""
        specs = strategy.update_specs(strategy.table.cards[0], 1)["model"]
        return sum(
            len(array.data) for array in wire.encode({n: np.zeros(s.shape, s.dtype) for n, s in specs.items()}).values()
        )

    whole, half = uploaded(strategy), uploaded(strategy_of(wide, upload_dtype="float16", **defaults))
    headers = 8 * 128
    assert whole == 4 * 192_709 + headers <= 780_000
    assert half == 2 * 192_709 + headers
    assert (
        sum(
            p.numel()
            for p in strategy_of(wide, num_conditions=7, adapter_rank=32).network(LABELS, "multilabel").parameters()
        )
        == 262_407
    )


def test_the_start_does_not_depend_on_whether_the_process_has_opened_clip_before(strategy_of):
    """On Ray the server opens it first, in one process a site does."""
    first = strategy_of().progress.modules
    opened_clip.cache_clear()
    assert wire.state_sha256(strategy_of().progress.modules) == wire.state_sha256(first)


def test_a_half_precision_change_is_averaged_in_single_precision(strategy_of):
    strategy = strategy_of(upload_dtype="float16")
    state = strategy.progress.modules["model"]
    sent = {name: np.full(value.shape, 0.1, np.float16) for name, value in state.items()}
    changes = strategy.received(reply("site-00", sent))["model"]
    assert {value.dtype.name for value in changes.values()} == {"float32"}
    mean = ModularMean()
    mean.add("site-00", {"model": changes}, {"model": 1})
    moved = strategy.combine(mean.means, 1)["model"]
    for name, value in state.items():
        torch.testing.assert_close(moved[name], value + float(np.float16(0.1)))


# -- who trains, at which rate ----------------------------------------------------------------------------------------


def test_the_rate_is_the_cosine_of_the_specification(strategy_of):
    """Oracle 11: R = 50."""
    told = [cosine_lr(0.001, r + 1, 50) for r in (0, 10, 25, 49)]
    assert told == pytest.approx([0.001, 0.000904508, 0.0005, 9.866e-7], rel=1e-4)
    strategy = strategy_of(federation__rounds=50, training__lr=0.001)
    assert strategy.round_config(strategy.table.cards[0], 26) == {"lr": pytest.approx(0.0005)}


@pytest.mark.parametrize(
    ("share", "sites", "count"), [(0.1, 10, 1), (0.1, 4, 1), (0.29, 100, 29), (0.5, 5, 2), (1.0, 5, 5)]
)
def test_a_share_of_the_sites_trains_drawn_anew_every_round(strategy_of, share, sites, count):
    strategy = strategy_of(sites=sites, participation=share, federation__min_sites=1)
    rounds = [[card.site for card in strategy.select_sites(r)] for r in range(1, 9)]
    assert all(len(set(chosen)) == count and chosen == sorted(chosen) for chosen in rounds)
    assert rounds == [[card.site for card in strategy.select_sites(r)] for r in range(1, 9)]
    if share < 1:
        assert len({tuple(chosen) for chosen in rounds}) > 1


# -- the mean (spec 3, oracle 10) -------------------------------------------------------------------------------------


def test_the_mean_is_the_authors_plain_one_whatever_the_sizes(strategy_of):
    golden = np.load(GOLDEN / "off_fedavg.npz", allow_pickle=False)
    strategy = strategy_of(sites=3)
    mean = ModularMean()
    for index, card in enumerate(strategy.table.cards):
        arrays = {name: golden[f"client{index}_{name}"] for name in ("weight", "bias")}
        sent = reply(card.site, arrays, card.num_train)
        mean.add(card.site, sent.changes, {"model": strategy.weigh(sent, "model")})
    for name in ("weight", "bias"):
        np.testing.assert_allclose(mean.result()["model"][name], golden[f"avg_{name}"], atol=1e-6)


def test_sites_weigh_the_same_or_their_examples(strategy_of):
    for aggregate, expected in (("uniform", [1, 1, 1]), ("num_examples", [10, 100, 1000])):
        strategy = strategy_of(sites=3, aggregate=aggregate)
        sent = [reply(card.site, {}, card.num_train) for card in strategy.table.cards]
        assert [strategy.weigh(one, "model") for one in sent] == expected


# -- what is refused (spec 10) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data__labels": "cat"}, "is one label: its probability is 1 always"),
        ({"conditions": "pose, Pose"}, "fedmpt.conditions = 'pose, Pose': .* are the same"),
        ({"conditions": "no-such-file.json"}, "fedmpt.conditions = 'no-such-file.json': .* cannot be read"),
        ({"model__weights": "resnet.safetensors"}, "takes its towers from fedmpt.clip_dir"),
        ({"model__normalise": "imagenet", "data__channels": 3}, "normalised as the CLIP folder says"),
        ({"data__partition": "own", "clip_dir": "digits"}, "is for simulations"),
        ({"participation": 0.5, "federation__sites_per_round": 2}, "both say how many sites"),
        ({"participation": 0.25}, "is 1 site in a round, below federation.min_sites = 2"),
        ({"participation": 0.5, "privacy__secure_sum": True}, "is 2 sites in a round, below privacy.min_cohort = 3"),
        ({"upload_dtype": "float16", "privacy__secure_sum": True}, "made for float32"),
        ({"upload_dtype": "float16", "privacy__dp": "local"}, "made for float32"),
        (
            {"condition_prompts": False, "beta_cls": 0, "adapter_rank": 0, "gate": "uniform"},
            "trains nothing",
        ),
        ({"variant": "official_v1", "beta_cls": 0, "beta_cond": 0}, "trains nothing"),
        ({"asl_clip": 1.0}, "less than 1"),
    ],
)
def test_contradictions_are_named_before_anything_starts(tmp_path, clip, changes, said):
    config = run_config(tmp_path, clip, **changes)
    with pytest.raises(SettingsError, match=said):
        Settings.from_run_config(config)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (("cat",), "there are 1 classes, at least 2 are needed"),
        (("traffic_light", "cat", "Traffic light"), "'traffic_light' and 'Traffic light' read the same"),
        (("cat", " _"), "name of a class is empty"),
        (("cat", "dog " * 70), "the text tower reads 77"),
    ],
)
def test_labels_that_make_no_prompt_are_refused_by_the_server_with_the_reason(strategy_of, labels, said):
    strategy = strategy_of()
    with pytest.raises(CardError, match=said):
        strategy.network(labels, "multilabel")
    site_half.build(labels, strategy.settings)  # the site's card gets through, so that the server can say so


def test_one_label_a_sample_is_refused(strategy_of):
    with pytest.raises(CardError, match="multiclass"):
        strategy_of().network(LABELS, "multiclass")


def test_other_towers_conditions_names_or_prompts_are_another_schema(strategy_of, tmp_path):
    """Server and site compare one hash; where they differ, both are shown."""
    other = write_clip(tmp_path / "other", seed=2)
    strategy = strategy_of()

    def schema(labels=LABELS, **changes):
        return handler.schema(labels, "multilabel", strategy_of(**changes).settings, site_half)

    ours = schema()
    strategy.table = SiteTable(tuple(replace(card, schema=ours) for card in strategy.table.cards), {})
    strategy._start_state()
    theirs = {
        schema(folder=other),
        schema(conditions="pose, color"),
        schema(conditions="color, pose"),
        schema(beta_cls=5),
        schema(labels=LABELS[::-1]),
    }
    assert len({*theirs, ours}) == 6
    for found in theirs:
        strategy.table = SiteTable(tuple(replace(card, schema=found) for card in strategy.table.cards), {})
        with pytest.raises(CardError, match=f"{found}, the server's {ours}"):
            strategy._start_state()


def test_a_clip_that_is_not_the_agreed_one_is_refused_with_both_hashes(strategy_of, clip):
    with pytest.raises(CardError, match=f"{clip_sha256(clip)}, expected 00"):
        strategy_of(clip_sha256="00" * 32)
    with pytest.raises(CardError, match=r"has no open_clip_config\.json"):
        strategy_of(clip.parent / "nowhere")
