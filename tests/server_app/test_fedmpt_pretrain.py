"""The demo's small CLIP: what it is made from, that it is the same twice, and that it reads digits."""

from __future__ import annotations

import json
import re
import threading
import time

import numpy as np
import pytest

from datasets.catalogue import open_manifest
from datasets.embedded import digits
from federation.settings import Settings
from models.clip import clip_sha256, load_clip
from server_app import fedmpt_pretrain, simulate
from server_app.fedmpt_pretrain import TEMPLATE, captions, main, pretrain
from tests.faults.drills import run
from tests.strategies.fedmpt_data import run_config, write_clip

DIGITS = tuple("0123456789")


def tiles_in(manifest):
    """Every 8x8 tile of a manifest's pictures, as bytes."""
    pictures = [manifest.images.read(row) for row in range(len(manifest))]
    return {
        picture[top : top + 8, left : left + 8].tobytes()
        for picture in pictures
        for top in range(0, picture.shape[0], 8)
        for left in range(0, picture.shape[1], 8)
    } - {bytes(64)}


def test_no_digit_of_a_site_is_among_the_public_ones():
    public = digits(part="public")
    private = open_manifest("digits-mosaic-private", rng_for=lambda purpose: np.random.default_rng(0))
    assert private.task == "multilabel" and private.images.read(0).shape == (16, 16)
    assert private.table["split"].value_counts().to_dict() == {"train": 2000, "test": 600, "val": 400}
    assert not tiles_in(public) & tiles_in(private)
    assert not set(public.table["sheet"]) & set(digits(part="private").table["sheet"])
    assert len(public) + len(digits(part="private")) == len(digits())
    assert public.table["split"].value_counts().to_dict() == {"train": 516, "val": 130}


def test_captions_name_what_is_there_and_nothing_else():
    cells = np.array([[3, -1, -1, 3], [-1, 7, 0, -1], [1, 2, 4, 5]] * 200)
    texts = captions(cells, DIGITS, np.random.default_rng(0))
    words = {word: digit for digit, names in fedmpt_pretrain.DIGIT_WORDS.items() for word in names}
    placed = 0
    for row, text in zip(cells, texts, strict=True):
        said = re.findall(r"a ((?:digit )?\w+)(?= and a |\.)", text.partition("photo of ")[2])
        shown = {words[word] for word in said}
        there = {str(label) for label in row if label >= 0}
        is_placed = text.startswith(("upper", "lower"))
        placed += is_placed
        assert shown <= there and (is_placed or shown == there)
    assert 0 < placed < len(texts) / 2
    assert TEMPLATE.format("3") in texts


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder after two steps, and what was said."""
    said = []
    folder = tmp_path_factory.mktemp("made") / "clip"
    return folder, pretrain(folder, steps=2, say=said.append), said


def test_the_folder_is_a_clip_as_sites_load_it(made):
    folder, found, said = made
    clip = load_clip(folder, clip_sha256(folder))
    assert sorted(path.name for path in folder.parent.iterdir()) == ["clip"]
    assert json.loads((folder / "open_clip_config.json").read_text())["preprocess_cfg"]["mean"] == list(clip.mean)
    assert 2e6 < sum(value.numel() for value in clip.model.parameters()) < 4e6
    assert clip.sha256 in said[-1] and f"by chance {found.chance:.3f}" in said[-1]
    assert 0.1 < found.chance < 0.4


def test_the_same_seed_gives_the_same_bytes(made, tmp_path):
    pretrain(tmp_path / "again", steps=2, say=lambda line: None)
    pretrain(tmp_path / "other", seed=2, steps=2, say=lambda line: None)
    assert clip_sha256(tmp_path / "again") == clip_sha256(made[0]) != clip_sha256(tmp_path / "other")


@pytest.fixture
def asked(monkeypatch):
    """Folders for which a training was asked; each gets a random CLIP instead."""
    folders = []

    def trained(folder):
        folders.append(folder)
        write_clip(folder)

    monkeypatch.setattr(fedmpt_pretrain, "pretrain", trained)
    return folders


def test_every_engine_makes_it_once_and_only_where_it_is_asked_for(tmp_path, asked):
    mine = write_clip(tmp_path / "mine")
    config = run_config(tmp_path, mine)
    run(config)
    assert not asked
    config["fedmpt.clip_dir"] = "digits"
    config.pop("data.cache_dir")
    for _ in range(2):
        simulate.make_local_files(simulate.Simulation(simulate.ROOT, config, 4))
        run(config)
    assert asked == [tmp_path / "runs" / ".cache" / "clip-digits"]


def test_a_folder_that_is_there_is_never_written_over(made, capsys):
    assert main([str(made[0])]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.slow
def test_it_reads_digits_clearly_better_than_chance(tmp_path):
    found = pretrain(tmp_path / "clip", say=lambda line: None)
    assert found.map > found.chance + 0.15


def test_workers_that_start_together_make_the_demos_clip_once(tmp_path, monkeypatch):
    made = []

    def slow(folder):
        made.append(folder)
        time.sleep(0.3)
        folder.mkdir()

    monkeypatch.setattr(fedmpt_pretrain, "pretrain", slow)
    settings = Settings.from_run_config({"method": "fedmpt", "data.cache_dir": str(tmp_path / "cache")})
    workers = [threading.Thread(target=fedmpt_pretrain.prepare, args=(settings,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(made) == 1
