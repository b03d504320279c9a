"""The same seed gives the same model, bit by bit, in one process and on Ray, twice each."""

from __future__ import annotations

import pytest

from tests.faults.drills import lines_of, run, run_json, settings, state_sha256, write_data
from tests.faults.ray_drills import copy_app, simulated

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_same_seed_same_bits_in_process_and_on_ray_twice(tmp_path, method):
    data = write_data(tmp_path / "data.npz")
    app = copy_app(tmp_path / "app")
    config = settings(data, tmp_path / "runs", method=method, federation__timeout_s=120.0)
    folders = [run(config, as_it_is=True).run_dir, run(config, as_it_is=True).run_dir]
    for _ in range(2):
        done = simulated(app, config, sites=4)
        assert done.exit_code == 0, done.logs[-5000:]
        folders.append(done.run_dir)
    assert len({*folders}) == 4
    assert len({run_json(folder)["model_sha256"] for folder in folders}) == 1
    assert len({state_sha256(folder) for folder in folders}) == 1
    assert all(lines_of(folder) == lines_of(folders[0]) for folder in folders)
    other = run({**config, "seed": 2}).run_dir
    assert run_json(other)["model_sha256"] != run_json(folders[0])["model_sha256"]
