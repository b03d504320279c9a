"""The README's page on writing a method, followed to the letter in an empty folder outside the tree."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def blocks() -> dict[str, str]:
    """The README's Python blocks by the file name in their first line."""
    found = re.findall(r"```python\n# (\S+)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return dict(found)


def test_the_readme_has_a_method_of_two_files_and_a_way_to_run_it():
    assert set(blocks()) == {"my_method/strategy.py", "my_method/site.py", "try_it.py"}


def test_a_method_written_from_the_readme_runs_and_differs_from_fedavg(tmp_path):
    for name, text in blocks().items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "try_it.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    model_sha256, macro_auroc, run_dir = done.stdout.split()[-3:]
    run = json.loads((Path(run_dir) / "run.json").read_text())
    assert run["method"] == "my_method.strategy:PowerMean"
    assert run["settings"]["power"] == {"exponent": 0.5}
    assert run["model_sha256"] == model_sha256
    assert 0 < float(macro_auroc) <= 1
    weights = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in weights if line["kind"] == "round")
    sizes = {site["site"]: site["num_train"] for site in run["sites"]}
    assert first["weights"] == {site: sizes[site] ** 0.5 for site in sizes}
