"""A file is whole or not there, whatever happens in the middle of writing it."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from federation.files import load_tensors, replacing, save_tensors, write_atomic


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_with_its_folders_and_private(tmp_path):
    path = tmp_path / "a" / "b" / "state.bin"
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new" and names(path.parent) == ["state.bin"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_mode_is_what_was_asked_for_also_over_an_old_file(tmp_path):
    path = tmp_path / "run.json"
    write_atomic(path, b"one")
    write_atomic(path, b"two", 0o644)
    assert path.stat().st_mode & 0o777 == 0o644 and path.read_bytes() == b"two"


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "no space left"), KeyboardInterrupt()])
def test_a_failure_in_the_middle_leaves_the_old_content_and_no_litter(tmp_path, monkeypatch, step, error):
    path = tmp_path / "state.bin"
    write_atomic(path, b"old")

    def fail(*_):
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(error)):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and names(tmp_path) == ["state.bin"]


def test_an_error_of_the_writer_leaves_the_old_content(tmp_path):
    path = tmp_path / "state.bin"
    write_atomic(path, b"old")
    with pytest.raises(ValueError, match="half"), replacing(path) as temporary:
        temporary.write_bytes(b"ha")
        raise ValueError("half")
    assert path.read_bytes() == b"old" and names(tmp_path) == ["state.bin"]


def test_the_bytes_are_on_the_disk_before_the_name_points_to_them(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("replace"), replace(*paths)))
    write_atomic(tmp_path / "x", b"data")
    assert order == ["fsync", "replace", "fsync"]  # the file, the name, the folder's entry


def test_tensors_and_their_header_come_back(tmp_path):
    path = tmp_path / "m.safetensors"
    turned = torch.arange(6.0).reshape(2, 3).T  # not contiguous, with a gradient: as a network gives it
    save_tensors(path, {"w": turned.clone().requires_grad_(), "t": turned, "n": torch.tensor(3)}, {"round": "7"})
    found = load_file(path)
    assert torch.equal(found["w"], turned) and torch.equal(found["t"], turned) and found["n"] == 3
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"round": "7"}
    assert path.stat().st_mode & 0o777 == 0o600 and names(tmp_path) == ["m.safetensors"]


def test_tensors_and_header_are_read_back_and_a_part_is_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    save_tensors(path, {"x": torch.arange(3)}, {"about": "three"})
    tensors, header = load_tensors(path)
    assert tensors["x"].tolist() == [0, 1, 2] and header == {"about": "three"}
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match="no whole safetensors file"):
        load_tensors(path)
    with pytest.raises(FileNotFoundError):
        load_tensors(tmp_path / "absent.safetensors")
