"""The app's package `datasets` against Hugging Face's of the same name: ours wins wherever the app runs.

Every journey runs with a second `datasets` on the import path behind the app, as `pip install datasets` would put it: a
minimal stand-in that looks installed (so that `is_datasets_available()` is true), and the real one where there is one.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

from server_app.processes import ProcessFamily
from server_app.superlink import FlowerCli, SuperLink, command, environment, free_port
from tests.server_app.tiny_app import write_app

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("server_app", "client_app", "strategies", "models", "datasets", "federation")

pytestmark = pytest.mark.slow


def real_datasets_is_installed() -> bool:
    try:
        return importlib.metadata.version("datasets") != ""
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(params=["stand-in", "real"])
def import_path(request, tmp_path) -> dict[str, str]:
    """Environment variables that put the other `datasets` behind the app."""
    if request.param == "real":
        if not real_datasets_is_installed():
            pytest.skip("Hugging Face datasets is not installed; the stand-in covers the names")
        return {}
    site = tmp_path / "site-packages"
    (site / "datasets").mkdir(parents=True)
    (site / "datasets" / "__init__.py").write_text('__version__ = "5.2.0"\nHUGGING_FACE = True\n')
    (site / "datasets-5.2.0.dist-info").mkdir()
    (site / "datasets-5.2.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: datasets\nVersion: 5.2.0\n"
    )
    return {"PYTHONPATH": str(site)}


def python(code: str, env: dict[str, str], cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def is_ours(path: str, root: Path = ROOT) -> bool:
    return Path(path).resolve() == (root / "datasets" / "__init__.py").resolve()


def test_the_other_package_is_really_there(import_path, tmp_path):
    code = "import datasets, transformers.utils as u; print(datasets.__version__, u.is_datasets_available())"
    assert python(code, import_path, cwd=tmp_path).endswith(" True")


def test_ours_wins_in_a_python_started_in_the_folder(import_path):
    assert is_ours(python("import datasets; print(datasets.__file__)", import_path))


@pytest.mark.parametrize(
    "how", [["-m", "pytest"], ["-c", "import sys, pytest; sys.path.remove(''); sys.exit(pytest.main())"]]
)
def test_ours_wins_in_pytest_from_any_folder(import_path, tmp_path, how):
    probe = tmp_path / "test_probe.py"
    probe.write_text(f"import datasets\n\ndef test_it():\n    assert datasets.__file__.startswith({str(ROOT)!r})\n")
    done = subprocess.run(
        [sys.executable, *how, "-q", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), str(probe)],
        cwd=tmp_path,
        env={**os.environ, **import_path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_ours_wins_in_this_very_process():
    import datasets

    assert is_ours(datasets.__file__)


SERVER_SAYS = (
    'import datasets\nPath(config["out"]).write_text(json.dumps({"server": datasets.__file__, "sites": answers}))'
)
CLIENT_SAYS = "import datasets, transformers.utils\nanswer['file'] = datasets.__file__"


@pytest.fixture
def app(tmp_path) -> Path:
    """A tiny app with our own `datasets` inside and our refusing build backend named, as in the real one."""
    folder = write_app(
        tmp_path / "app",
        server=SERVER_SAYS,
        client=CLIENT_SAYS,
        config={"out": '""'},
        build_system='[build-system]\nrequires = []\nbuild-backend = "no_wheel"\nbackend-path = ["deploy"]',
        more_packages=("datasets",),
    )
    shutil.copytree(ROOT / "datasets", folder / "datasets", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "deploy", folder / "deploy", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def the_bundled_one(path: str) -> bool:
    """Flower installs the bundle under apps/PUBLISHER.NAME.VERSION.HASH of its home."""
    return re.search(r"/apps/tests\.tiny-app\.0\.1\.0\.\w+/datasets/__init__\.py$", path) is not None


def test_ours_wins_in_the_server_and_in_ray_workers(import_path, app, tmp_path):
    out = tmp_path / "said.json"
    arguments = ["--app", str(app), "--sites", "3", "--timeout", "240", "-c", f"sites=3 out='{out}'"]
    done = subprocess.run(
        [sys.executable, "-m", "server_app.simulate", *arguments],
        cwd=ROOT,
        env={**os.environ, **import_path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(out.read_text())
    assert the_bundled_one(said["server"])
    assert len(said["sites"]) == 3
    assert all(the_bundled_one(site["file"]) for site in said["sites"])


def test_ours_wins_on_supernodes(import_path, app, tmp_path, monkeypatch):
    for name, value in import_path.items():
        monkeypatch.setenv(name, value)
    out, nodes = tmp_path / "said.json", []
    with SuperLink(tmp_path / "link", "--insecure") as link:
        try:
            for partition in range(2):
                nodes.append(start_supernode(tmp_path / f"node-{partition}", link.address, partition))
            cli = FlowerCli(tmp_path, link.address)
            config = tmp_path / "run.toml"
            config.write_text(f"sites = 2\nout = {json.dumps(str(out))}\n")
            run_id = cli.submit(app, config)
            status = wait_for_end(cli, run_id)
            assert status.is_completed, f"{status}\n{link.log_tail()}"
        finally:
            left = [pid for node in nodes for pid in node.stop()]
    assert left == []
    said = json.loads(out.read_text())
    assert the_bundled_one(said["server"])
    assert [the_bundled_one(site["file"]) for site in said["sites"]] == [True, True]
    homes = {Path(site["file"]).parents[3] for site in said["sites"]}
    assert homes == {tmp_path / "node-0", tmp_path / "node-1"}, "each site runs its own copy"


def start_supernode(home: Path, address: str, partition: int) -> ProcessFamily:
    home.mkdir()
    listen = ["--host", "127.0.0.1", "--port", str(free_port())]
    node = ["--node-config", f"partition-id={partition} num-partitions=2"]
    with (home / "log").open("wb") as log:
        return ProcessFamily(
            subprocess.Popen(
                [command("flower-supernode"), "--insecure", "--superlink", address, *listen, *node],
                cwd=home,
                env=environment(home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )


def wait_for_end(cli: FlowerCli, run_id: str, limit_s: float = 240.0):
    deadline = time.monotonic() + limit_s
    while not (status := cli.status(run_id)).is_finished:
        assert time.monotonic() < deadline, status
        time.sleep(2)
    return status


FORWARDS = {
    "timm": """
import timm
model = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, patch_size=16, depth=1, num_classes=3)
assert model(torch.randn(2, 3, 32, 32)).shape == (2, 3)
model = timm.create_model("resnet10t", pretrained=False, num_classes=3)
assert model(torch.randn(2, 3, 64, 64)).shape == (2, 3)
""",
    "open_clip": """
import open_clip
model = open_clip.CLIP(
    embed_dim=16,
    vision_cfg=dict(image_size=32, layers=1, width=32, head_width=16, patch_size=16),
    text_cfg=dict(context_length=8, vocab_size=64, width=32, heads=2, layers=1),
)
image, text, _ = model(torch.randn(2, 3, 32, 32), torch.randint(0, 64, (2, 8)))
assert image.shape == text.shape == (2, 16)
""",
    "transformers": """
from transformers import BertConfig, BertModel, ViTConfig, ViTModel
small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
assert BertModel(BertConfig(vocab_size=64, **small))(torch.randint(0, 64, (2, 5))).last_hidden_state.shape == (2, 5, 32)
pixels = torch.randn(2, 3, 32, 32)
assert ViTModel(ViTConfig(image_size=32, patch_size=16, **small))(pixels).last_hidden_state.shape == (2, 5, 32)
""",
}


@pytest.mark.parametrize("library", FORWARDS)
def test_models_of_other_libraries_still_run(import_path, library):
    code = f"import datasets, torch\n{FORWARDS[library]}\nprint(datasets.__file__)"
    assert is_ours(python(code, import_path).splitlines()[-1])


def test_pip_install_is_refused_and_touches_nothing(tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "__pycache__", ".*cache"))
    for how in ([str(tree)], ["-e", str(tree)]):
        target = tmp_path / "target"
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), *how],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode != 0, how
        assert "deploy/install.py" in done.stdout + done.stderr, "the refusal must say what to do instead"
        assert not (target / "datasets").exists()


def test_bundle_holds_the_six_rooms_and_nothing_else(tmp_path):
    tree = tmp_path / "consilium"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "__pycache__", ".*cache"))
    subprocess.run([command("flwr"), "build", "--app", str(tree)], cwd=tmp_path, env=environment(tmp_path), check=True)
    (fab,) = tmp_path.glob("*.fab")
    names = zipfile.ZipFile(fab).namelist()
    assert {name.split("/")[0] for name in names} == {*ROOMS, "pyproject.toml", ".info"}
    wanted = {str(path.relative_to(tree)) for room in ROOMS for path in (tree / room).rglob("*.py")}
    assert wanted <= set(names), f"left out: {sorted(wanted - set(names))}"
    assert fab.stat().st_size < 2 << 20, "Flower refuses bundles above 10 MiB; ours is code only"


def test_build_backend_is_the_refusing_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["build-system"] == {"requires": [], "build-backend": "no_wheel", "backend-path": ["deploy"]}
    assert not any(line.startswith("datasets") for line in project["project"]["dependencies"])
    assert "\ndatasets==" not in (ROOT / "constraints.txt").read_text()
