"""Where a site computes, without a GPU at hand: what is picked, pinned and freed."""

from __future__ import annotations

import pytest
import torch

from client_app import device
from client_app.device import computing, pick_device, pick_precision
from federation.settings import SettingsError, TrainingArea


@pytest.mark.parametrize(
    ("wanted", "there", "picked"),
    [
        ("auto", False, "cpu"),
        ("auto", True, "cuda"),
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_the_gpu_is_used_where_there_is_one_unless_forbidden(monkeypatch, wanted, there, picked):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert pick_device(wanted).type == picked


def test_a_gpu_that_is_asked_for_and_absent_is_said_with_a_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"training.device = 'cuda' .* no CUDA device; use 'auto' or 'cpu'"):
        pick_device("cuda")


@pytest.mark.parametrize("wanted", ["float32", "auto"])
def test_a_cpu_computes_in_single_precision(wanted):
    assert pick_precision(wanted, torch.device("cpu")) is None


def test_mixed_precision_is_never_used_unasked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert pick_precision("float32", torch.device("cuda")) is None


class CpuAsGpu:
    """A device that says it is a GPU and computes on the CPU, so that the probe's arithmetic can run."""

    type = "cuda"


@pytest.mark.parametrize(("scale", "expected"), [(1.0, torch.bfloat16), (float("nan"), None), (1.5, None)])
def test_mixed_precision_needs_a_probe_that_is_finite_and_close(monkeypatch, scale, expected):
    linspace = torch.linspace

    class Rough:
        """Stands for the autocast product: exact times ``scale``."""

        calls = 0

        def __init__(self, values):
            self.values = values

        def reshape(self, *shape):
            self.values = self.values.reshape(*shape)
            return self

        def __matmul__(self, other):
            Rough.calls += 1
            return self.values @ other.values * (scale if Rough.calls % 2 == 0 else 1.0)

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch, "linspace", lambda *args, device: Rough(linspace(*args)))
    monkeypatch.setattr(torch, "autocast", lambda *_: torch.inference_mode(False))
    assert pick_precision("auto", CpuAsGpu()) is expected


def test_a_gpu_without_bfloat16_stays_in_single_precision(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert pick_precision("auto", torch.device("cuda")) is None


def test_threads_are_pinned_inside_and_put_back_also_after_an_error():
    before = torch.get_num_threads()
    with computing(TrainingArea(threads=3, device="cpu")) as (found, precision):
        assert torch.get_num_threads() == 3 and found.type == "cpu" and precision is None
    assert torch.get_num_threads() == before
    with pytest.raises(ZeroDivisionError), computing(TrainingArea(threads=2, device="cpu")):
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("fails", [False, True])
def test_the_gpus_cache_is_freed_at_the_end_also_after_an_error(monkeypatch, fails):
    freed = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    monkeypatch.setattr(device, "pick_precision", lambda *_: None)
    try:
        with computing(TrainingArea(device="auto")) as (found, _):
            assert found.type == "cuda" and not freed
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert freed == [True]
