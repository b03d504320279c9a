"""Masked means of modules: golden numbers through the gate, closed forms, and the algebra of `ModularMean`."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from federation import wire
from federation.compression import TopK
from strategies import gate
from strategies.aggregation import ModularMean, StreamingMean, apply_mean

GOLDEN = Path(__file__).parents[1] / "golden" / "incongruent" / "08_partial_aggregation.npz"
PROFILES = {"paired": ("vision", "text", "gate", "fusion", "head"), "image": ("vision", "fusion", "head"),
            "text": ("text", "fusion", "head")}  # fmt: skip

seeds = st.integers(0, 2**32 - 1)


def drawn(seed, count):
    """Updates of ``count`` sites, each with some of three modules, their counts and trust."""
    rng = np.random.default_rng(seed)
    shapes = {"vision": {"w": (2, 3), "b": ()}, "text": {"w": (4,)}, "head": {"w": (2,)}}
    sites = []
    for _ in range(count):
        held = [module for module in shapes if rng.random() < 0.7]
        modules = {
            module: {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes[module].items()}
            for module in held
        }
        sites.append((modules, {module: int(rng.integers(0, 500)) for module in held}, float(rng.uniform(0.1, 1))))
    return sites


def mean_of(updates, names=None):
    mean = ModularMean()
    for name, (modules, counts, trust) in zip(names or itertools.count(), updates, strict=False):
        mean.add(str(name), modules, counts, trust=trust)
    return mean


def assert_same_bits(one, other):
    flat = [{(module, name): value for module in r for name, value in r[module].items()} for r in (one, other)]
    assert set(flat[0]) == set(flat[1])
    for key, value in flat[0].items():
        assert value.dtype == flat[1][key].dtype and value.tobytes() == flat[1][key].tobytes(), key


# -- reference ------------------------------------------------------------------------------------------------------


def golden_replies(golden):
    """Site -> (profile, modules, counts, trust) of the golden file's seven sites; tensors are named ``module.w``."""
    profiles = {1: "paired", 4: "text"} | dict.fromkeys((2, 3, 5, 6, 7), "image")
    for site, profile in sorted(profiles.items()):
        modules, counts = {}, {}
        for key in golden.files:
            kind, _, rest = key.partition("__")
            owner, _, name = rest.partition("__")
            if owner == str(site) and kind == "delta":
                modules.setdefault(name.partition(".")[0], {})[name] = golden[key]
            elif owner == str(site) and kind == "n":
                counts[name] = int(golden[key])
        yield site, profile, modules, counts, float(golden[f"trust__{site}"])


def gated(site, profile, modules):
    """The reply as the update gate gives it to a strategy: a site of a profile may send that profile's modules.

    Site 3 of the golden file sends no fusion although its profile has it; here a site declares what it trains.
    """
    names = [module for module in PROFILES[profile] if (site, module) != (3, "fusion")]
    shapes = {"vision": (3, 2), "text": (4,), "gate": (2,), "fusion": (3,), "head": (2,)}
    specs = {m: {f"{m}.{'b' if m == 'head' else 'w'}": wire.TensorSpec(shapes[m], "float64")} for m in names}
    numbers = {"server_round": 1, "num_examples": 1, "loss_sum": 0.0, "num_steps": 1}
    content = RecordDict({f"module.{module}": wire.encode(arrays) for module, arrays in modules.items()})
    content["metrics"] = MetricRecord(numbers)
    return gate.inspect(content, gate.Expected(f"site-{site}", 1, wire.train_payload(specs), max_examples=1))


def test_golden_partial_aggregation_behind_the_update_gate():
    golden = np.load(GOLDEN)
    mean, rejected = ModularMean(), {}
    for site, profile, modules, counts, trust in golden_replies(golden):
        reply, reason = gated(site, profile, modules)
        if reply is None:
            rejected[site] = reason
        else:
            mean.add(reply.site, reply.modules, counts, trust=trust)
    assert list(rejected) == golden["rejected"].tolist()
    assert "no finite norm" in rejected[5] and "module.text" in rejected[6]

    found, coverage = mean.result(), mean.coverage()
    names = [key.removeprefix("glob__") for key in golden.files if key.startswith("glob__")]
    assert sorted(name for module in found for name in found[module]) == sorted(names)
    for name in names:
        module = name.partition(".")[0]
        before = {name: torch.from_numpy(golden[f"glob__{name}"])}
        after = apply_mean(before, found[module])[name].numpy()
        np.testing.assert_allclose(after, golden[f"new__{name}"], rtol=1e-9, atol=1e-10)
        one = coverage[module][name]
        who = [f"site-{site}" for site in golden[f"who__{name}"]]
        assert one == {"updates": len(who), "sites": who, "weight": golden[f"den__{name}"]}
        # a secure sum adds zeros for what a site lacks, so its numerator is the same
        sums = found[module][name] * one["weight"]
        np.testing.assert_allclose(sums, golden[f"secsum__{name}"], rtol=1e-9, atol=1e-10)
    assert mean.sites == {f"site-{site}" for site in (1, 2, 3, 4, 7)}  # 7 has no samples: there, but behind nothing


def test_closed_form_of_the_specification():
    # section 9: 1 with 100 and 4 with 300 samples, a third site without the tensor: 3.25
    mean = ModularMean()
    mean.add("a", {"m": {"w": np.float32([1])}}, {"m": 100})
    mean.add("b", {"m": {"w": np.float32([4])}}, {"m": 300})
    mean.add("c", {"m": {"v": np.float32([9])}}, {"m": 1000})
    assert mean.result()["m"]["w"] == 3.25 and mean.result()["m"]["v"] == 9.0


@given(seeds, st.integers(1, 6), st.sampled_from([0.0, 0.5, 1.0, 4.0]))
def test_each_tensor_is_numpys_weighted_average_over_its_senders(seed, count, zeta):
    updates = drawn(seed, count)
    mean = ModularMean()
    for site, (modules, counts, trust) in enumerate(updates):
        mean.add(str(site), modules, counts, trust=trust, zeta=zeta)
    found = mean.result()
    for module in ("vision", "text", "head"):
        senders = [(m[module], c[module] * t**zeta) for m, c, t in updates if module in m and c[module] > 0]
        assert (module in found) == bool(senders)
        for name in senders[0][0] if senders else ():
            exact = np.average([m[name].astype(float) for m, _ in senders], axis=0, weights=[w for _, w in senders])
            np.testing.assert_allclose(found[module][name], exact, atol=1e-5)  # float32, values near 3, 6 sites
            assert mean.coverage()[module][name]["weight"] == pytest.approx(sum(w for _, w in senders))


@given(seeds, st.integers(1, 6))
def test_one_module_of_all_sites_is_the_streaming_mean_bit_by_bit(seed, count):
    rng = np.random.default_rng(seed)
    plain, modular = StreamingMean(), ModularMean({"model": ["w", "n"]})
    for site in range(count):
        arrays = {"w": rng.normal(size=5).astype(np.float32), "n": np.array(site)}
        weight = int(rng.integers(1, 100))
        plain.add(str(site), arrays, weight)
        modular.add(str(site), {"model": arrays}, {"model": weight})
    assert_same_bits(modular.result(), {"model": plain.result()})


# -- properties -----------------------------------------------------------------------------------------------------


@given(seeds, st.integers(1, 6))
def test_renaming_the_sites_changes_no_bit(seed, count):
    updates = drawn(seed, count)
    renamed = mean_of(updates, [f"hospital {chr(90 - index)}" for index in range(count)])
    assert_same_bits(mean_of(updates).result(), renamed.result())


@given(seeds, st.integers(1, 6))
def test_the_order_of_adding_changes_the_mean_by_rounding_only(seed, count):
    updates = drawn(seed, count)
    order = np.random.default_rng(seed).permutation(count).tolist()
    straight, turned = mean_of(updates), mean_of([updates[site] for site in order], order)
    for module, arrays in straight.result().items():
        for name, value in arrays.items():
            np.testing.assert_allclose(turned.result()[module][name], value, atol=1e-5)  # float32, values near 3
    for module, tensors in straight.coverage().items():
        for name, one in tensors.items():
            other = turned.coverage()[module][name]
            assert set(one["sites"]) == set(other["sites"]) and one["weight"] == pytest.approx(other["weight"])


@given(seeds, st.integers(1, 6))
def test_the_order_of_modules_and_tensors_in_a_reply_changes_no_bit(seed, count):
    updates = drawn(seed, count)
    turned = [
        ({m: dict(reversed(modules[m].items())) for m in reversed(modules)}, counts, trust)
        for modules, counts, trust in updates
    ]
    assert_same_bits(mean_of(updates).result(), mean_of(turned).result())


@given(seeds, st.integers(1, 5))
def test_a_module_of_no_weight_is_as_if_it_had_not_been_sent(seed, count):
    updates = drawn(seed, count)
    extra = {"text": {"w": np.full(4, 1e9, np.float32)}, "gate": {"w": np.ones(2, np.float32)}}
    silent = [(extra, {"text": 0, "gate": 0}, 1.0), (extra, {"text": 7, "gate": 7}, 0.0)]
    assert_same_bits(mean_of([*updates, *silent]).result(), mean_of(updates).result())


def test_without_zeta_trust_does_not_weigh():
    mean = ModularMean()
    mean.add("a", {"m": {"w": np.float32([1])}}, {"m": 1}, trust=0.0, zeta=0.0)
    assert mean.coverage()["m"]["w"] == {"updates": 1, "sites": ["a"], "weight": 1.0}


def test_sparse_updates_count_zero_where_nothing_was_sent():
    topk, specs = TopK(0.5), {"w": wire.TensorSpec((2,), "float32")}
    mean = ModularMean()
    for site, change in (("a", [8.0, 1.0]), ("b", [1.0, 4.0])):
        sent, _ = topk.encode({"w": np.float32(change)})
        mean.add(site, {"vision": topk.decode(sent, specs)}, {"vision": {"a": 1, "b": 3}[site]})
    assert mean.result()["vision"]["w"].tolist() == [2.0, 3.0]  # 8 * 1 / 4 and 4 * 3 / 4


# -- coverage -------------------------------------------------------------------------------------------------------


def test_coverage_tells_who_updated_what_and_what_nobody_did():
    mean = ModularMean()
    assert mean.result() == {} and mean.coverage() == {}
    mean.add("a", {"vision": {"w": np.float32([1]), "b": np.float32([1])}}, {"vision": 2}, trust=0.5)
    mean.add("b", {"vision": {"w": np.float32([1])}, "text": {"w": np.float32([1])}}, {"vision": 4, "text": 0})
    assert mean.coverage() == {
        "vision": {
            "b": {"updates": 1, "sites": ["a"], "weight": 1.0},
            "w": {"updates": 2, "sites": ["a", "b"], "weight": 5.0},
        }
    }
    expected = {"vision": ["w", "b", "c"], "text": ["w"], "head": []}
    assert mean.uncovered(expected) == {"text": ["w"], "vision": ["c"]}
    assert mean.uncovered({"vision": ["w"]}) == {}


# -- refusals -------------------------------------------------------------------------------------------------------

W = {"w": np.float32([2])}
REFUSED = {
    "a site twice": (("a", {"m": W}, {"m": 1}), {}, "site 'a' was added before"),
    "a site twice, other module": (("a", {"k": W}, {"k": 1}), {}, "site 'a' was added before"),
    "no count": (("b", {"k": W, "m": W}, {"k": 1}), {}, "count of 'b' for module 'm' is None"),
    "negative count": (("b", {"k": W, "m": W}, {"k": 1, "m": -1}), {}, "for module 'm' is -1"),
    "infinite count": (("b", {"k": W, "m": W}, {"k": 1, "m": float("inf")}), {}, "for module 'm' is inf"),
    "NaN trust": (("b", {"m": W}, {"m": 1}), {"trust": float("nan")}, "trust of 'b' is nan"),
    "trust above 1": (("b", {"m": W}, {"m": 1}), {"trust": 1.01}, "trust of 'b' is 1.01"),
    "negative zeta": (("b", {"m": W}, {"m": 1}), {"zeta": -1.0}, "zeta is -1.0"),
    "module not declared": (("b", {"m": W, "x": W}, {"m": 1, "x": 1}), {}, r"module 'x', expected one of \['k', 'm'\]"),
    "tensor not declared": (("b", {"k": W, "m": {"v": W["w"]}}, {"k": 1, "m": 1}), {}, r"sent \['v'\] in module 'm'"),
    "not declared at count 0": (("b", {"x": W}, {"x": 0}), {}, "module 'x'"),
    "another dtype": (("b", {"k": W, "m": {"w": np.float64([2])}}, {"k": 1, "m": 1}), {}, "'w' of 'b' is float64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_reply_changes_nothing_in_any_module(name):
    arguments, options, reason = REFUSED[name]
    mean = ModularMean({"m": ["w"], "k": ["w"]})
    mean.add("a", {"m": W, "k": W}, {"m": 1, "k": 1})
    before, coverage = mean.result(), mean.coverage()
    before = {module: {n: value.copy() for n, value in arrays.items()} for module, arrays in before.items()}
    with pytest.raises(ValueError, match=reason):
        mean.add(*arguments, **options)
    assert_same_bits(mean.result(), before)
    assert mean.coverage() == coverage and mean.sites == {"a"}
