"""The comparison command: cells run once, failures and absent data are told, and the figures are those of the runs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import textwrap
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import pytest

from federation.blocks import four_blocks
from federation.settings import Settings
from server_app import compare, compare_workers
from server_app.compare_cells import INDEX, Cell, cell_key, prepare
from server_app.compare_columns import better, column_name, figure
from server_app.compare_figures import WEAKEST_GAIN, WORST_SITE, Figures, read_figures, with_gains
from server_app.compare_html import html_page
from server_app.compare_plan import PlanError, Row, Setting, read_plan
from server_app.compare_stats import spread, t_interval, t_quantile
from server_app.compare_table import page, site_table, without_folders
from server_app.simulate import Interrupted

PLAN = """
title = "Tiny"
seeds = [1, 2]
metrics = ["macro_auroc", "micro_f1"]
gain_row = "near"
notes = "Two rounds teach nobody anything."

[base]
federation.rounds = 2
model.width = 4
evaluation.bins = 256
reporting.tensorboard = false

[settings.digits.data]
root = "digits"
image_size = 8
partition = "iid"
num_sites = 2

[settings.absent]
needs = "nowhere.zip"

[rows.plain]
method = "fedavg"

[rows.broken]
method = "no_such_method"

[rows.near]
method = "fedprox"
fedprox.mu = 0.1
"""


def write_plan(folder, text=PLAN):
    path = folder / "tiny.toml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def table_rows(text, first_header):
    """The rows of the first table below a line that starts so, as lists of cells."""
    lines = text[text.index(first_header) :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| Row"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("| ").split(" | ")])
    return found


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The tiny plan after one call of the command: 2 methods x 2 seeds in one setting, a broken row, absent data."""
    folder = tmp_path_factory.mktemp("compare")
    plan, runs = write_plan(folder), folder / "runs"
    before = os.environ.pop("CONSILIUM_DATA", None)
    code = compare.main([str(plan), "--runs-dir", str(runs), "--jobs", "2"])
    yield plan, runs, plan.with_suffix(".md"), code
    if before is not None:
        os.environ["CONSILIUM_DATA"] = before


def runs_of(runs, row):
    """The run.json of a row by seed, found without the command's own code."""
    method = {"plain": "fedavg", "near": "fedprox"}[row]
    found = [json.loads(path.read_text()) for path in runs.glob(f"*-{method}*/run.json")]
    return {
        run["settings"]["run"]["seed"]: run for run in sorted(found, key=lambda run: run["settings"]["run"]["seed"])
    }


# -- the whole command ------------------------------------------------------------------------------------------------


def test_failing_row_stops_nothing_and_stands_in_its_place_with_its_reason(compared):
    _, runs, out, code = compared
    assert code == compare.FAILED
    text = out.read_text(encoding="utf-8")
    rows = table_rows(text, "## digits")
    assert [row[0] for row in rows] == ["plain", "broken", "near"]
    assert set(rows[1][1:-1]) == {"failed"} and rows[1][-1] == "0"
    assert "- broken, all seeds: failed: SettingsError: " in text and "no method 'no_such_method'" in text
    index = json.loads((runs / INDEX).read_text()).values()
    assert len(index) == len(list(runs.glob("*/run.json"))) == 4
    for entry in index:  # every cell got the run of its own row and seed
        assert json.loads((runs / entry["run"] / "run.json").read_text()) == runs_of(runs, entry["row"])[entry["seed"]]


def test_absent_data_is_skipped_and_said_so(compared):
    text = compared[2].read_text(encoding="utf-8")
    section = text[text.index("## absent") :]
    assert "- all rows: skipped: the data is absent: nowhere.zip" in section and "| Row" not in section


def test_mean_and_sd_are_those_of_the_run_folders(compared):
    _, runs, out, _ = compared
    rows = {row[0]: row for row in table_rows(out.read_text(encoding="utf-8"), "## digits")}
    for name in ("plain", "near"):
        for column, metric in ((1, "macro_auroc"), (2, "micro_f1"), (4, "worst_auroc")):
            first, second = (run["final"]["test"]["summary"][metric] for run in runs_of(runs, name).values())
            mean, sd = (first + second) / 2, abs(first - second) / math.sqrt(2)  # ddof 1 of two values
            assert rows[name][column].replace("*", "").startswith(f"{mean:.3f} ± {sd:.3f}")
        worst = [
            min(site["summary"]["macro_auroc"] for site in run["final"]["test"]["per_site"])
            for run in runs_of(runs, name).values()
        ]
        assert rows[name][3].replace("*", "").startswith(f"{sum(worst) / 2:.3f} ± ")
        assert rows[name][-1] == "2"


def test_differences_are_paired_by_seed_and_carry_students_interval(compared):
    _, runs, out, _ = compared
    text = out.read_text(encoding="utf-8")
    (broken, near) = table_rows(text, "Difference to `plain`")
    plain, other = runs_of(runs, "plain"), runs_of(runs, "near")
    gaps = [
        other[seed]["final"]["test"]["summary"]["macro_auroc"] - plain[seed]["final"]["test"]["summary"]["macro_auroc"]
        for seed in (1, 2)
    ]
    mean = sum(gaps) / 2
    half = 12.7062 * abs(gaps[0] - gaps[1]) / 2  # t of one degree at 95 %, times the standard error of two values
    assert near[1] == f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"
    assert broken[1:] == ["not defined"] * 5 + ["0 of 2"]


def test_weakest_site_is_that_of_the_row_named_and_its_gain_is_paired_by_seed(compared):
    _, runs, out, _ = compared
    rows = {row[0]: row for row in table_rows(out.read_text(encoding="utf-8"), "## digits")}
    macros = {
        name: [
            {site["site"]: site["summary"]["macro_auroc"] for site in run["final"]["test"]["per_site"]}
            for run in runs_of(runs, name).values()
        ]
        for name in ("plain", "near")
    }
    gains = []
    for plain, near in zip(macros["plain"], macros["near"], strict=True):
        weakest = min(near, key=near.get)
        gains.append(plain[weakest] - near[weakest])
    mean, sd = sum(gains) / 2, abs(gains[0] - gains[1]) / math.sqrt(2)
    assert rows["plain"][5].replace("*", "").startswith(f"{mean:.3f} ± {sd:.3f}")
    assert rows["near"][5].replace("*", "").startswith("0.000 ± 0.000")
    assert "Weakest site's gain" in out.read_text(encoding="utf-8")


def test_best_mean_of_a_column_is_bold_and_the_order_stays(compared):
    rows = table_rows(compared[2].read_text(encoding="utf-8"), "## digits")
    figures = {row[0]: float(re.search(r"\d\.\d+", row[1])[0]) for row in rows if row[0] != "broken"}
    bold = {row[0] for row in rows if row[1].startswith("**")}
    assert bold == {name for name, value in figures.items() if value == max(figures.values())}


def test_page_says_how_it_was_made_and_names_no_folder_of_this_machine(compared):
    plan, _, out, _ = compared
    text = out.read_text(encoding="utf-8")
    assert "`python -m server_app.compare .../tiny.toml --runs-dir .../runs --jobs 2`" in text
    assert "torch " in text and "2 seeds are few" in text and "Two rounds teach nobody anything." in text
    assert str(plan.parent) not in text


def test_second_call_runs_nothing_and_writes_the_same_tables(compared, monkeypatch, capsys):
    plan, runs, out, _ = compared
    before = table_rows(out.read_text(encoding="utf-8"), "## digits")
    monkeypatch.setattr(compare_workers, "ProcessPoolExecutor", None)  # a worker would be an error
    again = out.with_name("again.md")
    assert compare.main([str(plan), "--runs-dir", str(runs), "--out", str(again)]) == compare.FAILED
    told = capsys.readouterr().out
    assert told.count("cached: digits / ") == 4 and "4 cached, 2 cannot run, 6 skipped" in told.replace("\n", " ")
    assert table_rows(again.read_text(encoding="utf-8"), "## digits") == before


def test_smoke_plan_has_all_five_methods_and_their_baselines(tmp_path, capsys):
    assert compare.main(["--smoke", "--dry-run", "--runs-dir", str(tmp_path / "runs")]) == compare.COMPLETED
    told = capsys.readouterr().out
    assert "66 cells: 66 to run" in told
    for method in ("fednca", "fairfal", "incongruent", "fedmitr", "fedmpt"):
        assert told.count(f" / {method} / seed") == 3, method


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_smoke_runs_to_its_end_and_writes_both_pages(tmp_path):
    runs = tmp_path / "runs"
    assert compare.main(["--smoke", "--runs-dir", str(runs)]) == compare.COMPLETED
    page = (runs / "smoke.md").read_text(encoding="utf-8")
    assert "66 with a completed run, 0 failed" in page and (runs / "smoke.html").is_file()


def test_dry_run_tells_the_states_and_writes_nothing(compared, tmp_path, capsys):
    plan = write_plan(tmp_path)
    assert compare.main([str(plan), "--runs-dir", str(tmp_path / "runs"), "--dry-run"]) == compare.COMPLETED
    told = capsys.readouterr().out
    assert "to run: digits / plain / seed 1" in told and "cannot run: digits / broken / seed 2: SettingsError" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.toml"]


def test_cell_is_run_again_when_its_run_is_gone_or_its_settings_changed(compared, tmp_path):
    plan, runs, _, _ = compared
    moved = tmp_path / "runs"
    moved.mkdir()
    (moved / INDEX).write_bytes((runs / INDEX).read_bytes())
    states = [cell.status for cell in prepare(read_plan(plan), moved) if cell.row.name == "plain"]
    assert states == ["waiting", "waiting", "skipped", "skipped"]
    changed = write_plan(tmp_path, PLAN.replace("mu = 0.1", "mu = 0.2"))
    states = {cell.row.name: cell.status for cell in prepare(read_plan(changed), runs) if cell.setting.name == "digits"}
    assert states == {"plain": "cached", "broken": "failed", "near": "waiting"}


def test_change_of_the_code_between_cells_is_told_and_they_can_be_run_again(compared, monkeypatch, capsys):
    plan, runs, _, _ = compared
    cells = prepare(read_plan(plan), runs)
    next(cell for cell in cells if cell.is_done).code = "older"
    text = page(read_plan(plan), cells, command="", jobs=1, written="")
    assert "**The code changed between cells**" in text and "older (1 cell)" in text
    monkeypatch.setattr(compare, "code_state", lambda: "newer")
    arguments = [str(plan), "--runs-dir", str(runs), "--dry-run"]
    assert compare.main(arguments) == compare.COMPLETED
    assert "4 cached cells made by another state of the code" in capsys.readouterr().out
    assert compare.main([*arguments, "--rerun-changed"]) == compare.COMPLETED
    assert capsys.readouterr().out.count("to run: digits / ") == 4


# -- workers ----------------------------------------------------------------------------------------------------------


class FakePool:
    """Runs at once what is submitted; ``deadly`` rows kill their worker and with it everything after."""

    def __init__(self, deadly):
        self.deadly, self.broken = deadly, False

    def submit(self, _, run_config, engine):
        future = Future()
        self.broken |= run_config["row"] in self.deadly
        if self.broken:
            future.set_exception(BrokenProcessPool("a worker died"))
        else:
            future.set_result({"run_dir": run_config["row"]})
        return future


@pytest.fixture
def fake_pools(monkeypatch):
    """``fake_pools(*deadly)`` replaces the workers and returns the list of the pools that were opened, by size."""

    def install(*deadly):
        opened = []

        @contextlib.contextmanager
        def workers(jobs):
            opened.append(jobs)
            yield FakePool(deadly)

        monkeypatch.setattr(compare_workers, "_workers", workers)
        return opened

    return install


def cells_named(*names):
    return [Cell(Setting("s", {}), Row(name, {}), 1, run_config={"row": name}) for name in names]


def test_dying_worker_fails_its_own_cell_only(fake_pools):
    opened = fake_pools("c")
    cells, finished = cells_named(*"abcdef"), []
    compare_workers.run_cells(cells, 3, lambda cell: finished.append(cell.row.name))
    assert {cell.row.name: cell.status for cell in cells} == dict.fromkeys("abdef", "completed") | {"c": "failed"}
    assert sorted(finished) == list("abcdef") and "its process died" in cells[2].reason
    assert all(cell.run_dir == Path(cell.row.name) for cell in cells if cell.row.name != "c")
    assert opened[0] == 3 and opened.count(1) >= 1 and opened[-1] == 3


def test_interrupted_command_keeps_the_cells_that_were_finished(compared, tmp_path, monkeypatch):
    plan, runs, _, _ = compared
    cells = [cell for cell in prepare(read_plan(plan), runs) if cell.status == "cached"]
    done = {cell.key: cell.run_dir for cell in cells}
    runs_after, result = tmp_path / "runs", tmp_path / "page.md"
    answers = iter(cells)

    class Interrupting(FakePool):
        def submit(self, _, run_config, engine):
            if not (cell := next(answers, None)) or cell is cells[2]:
                raise Interrupted(signal.SIGINT)
            copied = runs_after / cell.run_dir.name
            shutil.copytree(cell.run_dir, copied)
            future = Future()
            future.set_result({"run_dir": str(copied)})
            return future

    monkeypatch.setattr(compare_workers, "_workers", lambda jobs: contextlib.nullcontext(Interrupting(())))
    arguments = [str(plan), "--runs-dir", str(runs_after), "--out", str(result), "--jobs", "1"]
    assert compare.main(arguments) == 128 + signal.SIGINT
    again = [cell.status for cell in prepare(read_plan(plan), runs_after) if cell.key in done]
    assert sorted(again) == ["cached", "cached", "waiting", "waiting"] and not result.exists()


# -- parts ------------------------------------------------------------------------------------------------------------


def test_key_of_a_cell_follows_the_data_and_not_where_results_go(tmp_path):
    first, second = tmp_path / "a.zip", tmp_path / "b.zip"
    first.write_bytes(b"1"), second.write_bytes(b"2")

    def key(root, **more):
        return cell_key(Settings.from_run_config({"data.root": str(root), **more}))

    assert key(first) == key(first, **{"reporting.runs_dir": "elsewhere"}) != key(second)
    before = key(first)
    first.write_bytes(b"12")
    assert key(first) != before
    before = key(tmp_path)
    (tmp_path / "manifest.csv").write_text("image")
    assert key(tmp_path) != before


def test_data_is_found_beside_the_plan_or_in_the_folder_of_the_variable(tmp_path, monkeypatch):
    text = PLAN.replace('"nowhere.zip"', '"packs/here.zip"')
    path, packs = write_plan(tmp_path, text), tmp_path / "packs"
    plan = read_plan(path)
    absent = plan.settings[1]
    monkeypatch.delenv("CONSILIUM_DATA", raising=False)
    assert plan.data_path(absent) is None
    packs.mkdir()
    (packs / "here.zip").write_bytes(b"")
    assert plan.data_path(absent) == packs / "here.zip"
    config = plan.run_config(absent, plan.rows[2], 7, tmp_path / "runs")
    assert config["data.root"] == str(packs / "here.zip") and config["fedprox.mu"] == 0.1 and config["seed"] == 7
    other = tmp_path / "other"
    other.mkdir()
    (other / "here.zip").write_bytes(b"")
    monkeypatch.setenv("CONSILIUM_DATA", str(other))
    assert plan.data_path(absent) == other / "here.zip"


def test_every_problem_of_a_plan_is_told_at_once(tmp_path, capsys):
    path = write_plan(
        tmp_path,
        """
        seeds = [1, 1]
        metrics = "macro_auroc"
        colour = "red"
        [base]
        seed = 3
        [settings.one]
        data.labels = ["a"]
        [rows.plain]
        skip = ["two"]
        """,
    )
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    for part in ("seeds = [1, 1]", "metrics = ", "colour is unknown", "seed is set", "data.labels = ['a']", "'two'"):
        assert part in str(caught.value)
    assert compare.main([str(path)]) == compare.UNUSABLE and "seeds = [1, 1]" in capsys.readouterr().err
    assert compare.main([str(tmp_path / "no.toml")]) == compare.UNUSABLE
    assert "cannot be read" in capsys.readouterr().err


def test_row_that_skips_a_setting_has_no_run_there(tmp_path):
    path = write_plan(tmp_path, PLAN.replace('method = "fedavg"', 'method = "fedavg"\nskip = ["digits"]'))
    cells = prepare(read_plan(path), tmp_path / "runs")
    assert {cell.row.name for cell in cells if cell.status == "waiting"} == {"near"}
    assert {cell.reason for cell in cells if cell.row.name == "plain"} >= {"the plan skips it"}


def test_spread_leaves_out_what_is_undefined():
    assert spread([0.25, None, 0.75]).count == 2 and spread([0.25, None, 0.75]).mean == 0.5
    assert spread([0.1, 0.4, 0.7]).sd == pytest.approx(statistics.stdev([0.1, 0.4, 0.7]))
    assert spread([0.3]).sd is None and spread([None]).mean is None and t_interval([0.3]) is None


def test_quantiles_of_student_are_those_of_the_tables():
    """Two-sided 95 % and 99 % points as printed in every table of the t distribution."""
    for degrees, t95, t99 in ((1, 12.706, 63.657), (2, 4.303, 9.925), (3, 3.182, 5.841), (10, 2.228, 3.169)):
        assert t_quantile(0.95, degrees) == pytest.approx(t95, abs=5e-4)
        assert t_quantile(0.99, degrees) == pytest.approx(t99, abs=5e-4)
    with pytest.raises(ValueError, match="degrees"):
        t_quantile(0.95, 0)


def test_undefined_site_is_no_worst_site(tmp_path):
    sites = [{"site": "a", "summary": {"macro_auroc": None}}, {"site": "b", "summary": {"macro_auroc": 0.7}}]
    test = {"summary": {"macro_auroc": None, "labels": ["x"]}, "per_site": sites}
    (tmp_path / "run.json").write_text(json.dumps({"seconds": 3.0, "final": {"test": test}}))
    (tmp_path / "metrics.jsonl").write_text("")
    found = read_figures(tmp_path)
    assert found.values[WORST_SITE] == 0.7 and found.worst == {WORST_SITE: "b"}
    assert (
        found.values["macro_auroc"] is None and found.values["bytes_per_round"] is None and found.bytes == (None, None)
    )


def figures_of(sites=None, **values):
    return Figures(values, {}, (None, None), {}, sites or {})


def test_gain_at_the_weakest_site_is_that_of_the_four_blocks():
    alone = {"a": 0.7, "b": 0.55, "c": 0.55}
    mine = {"a": 0.6, "b": 0.75, "c": 0.9}
    found = with_gains({"fed": {1: figures_of(mine)}, "alone": {1: figures_of(alone)}}, "alone")
    by_site, local_only = ({site: [value] for site, value in row.items()} for row in (mine, alone))
    blocks = four_blocks([0.5], by_site, [1], local_only)  # of one label, so a site's mean is that label's AUROC
    assert found["fed"][1].values[WEAKEST_GAIN] == pytest.approx(blocks["weakest_gain"], abs=1e-15)
    assert found["fed"][1].worst[WEAKEST_GAIN] == "b"
    assert found["alone"][1].values[WEAKEST_GAIN] == 0.0


def test_row_without_the_weakest_site_or_without_its_seed_has_no_gain():
    """Images only: the weakest site has reports, and the gain of another one would not be its."""
    figures = {
        "images": {1: figures_of({"a": 0.8}), 2: figures_of({"a": 0.8, "b": 0.9})},
        "alone": {1: figures_of({"a": 0.7, "b": 0.6})},
    }
    found = with_gains(figures, "alone")
    assert found["images"][1].values[WEAKEST_GAIN] is None
    assert found["images"][2].values[WEAKEST_GAIN] is None and WEAKEST_GAIN not in found["images"][2].worst
    assert WEAKEST_GAIN not in figures["images"][1].values


def test_a_setting_may_name_the_rows_that_make_sense_there(tmp_path):
    plan = read_plan(write_plan(tmp_path, PLAN))
    first = replace(plan.settings[0], rows=("near",))
    plan = replace(plan, settings=(first, *plan.settings[1:]))
    assert {row.name for setting, row, _ in plan.cells() if setting == first} == {"near"}
    assert plan.of(first).gain_row == "near" and len(plan.of(plan.settings[-1]).rows) == len(plan.rows)
    with pytest.raises(PlanError, match="rows names 'nobody', no such row"):
        read_plan(write_plan(tmp_path, PLAN + '\n[settings.other]\nrows = ["nobody"]\n'))


def test_every_site_stands_with_its_gain_and_a_row_without_it_says_so():
    figures = {
        "images": {1: figures_of({"a": 0.8}), 2: figures_of({"a": 0.9})},
        "alone": {1: figures_of({"a": 0.7, "b": 0.6}), 2: figures_of({"a": 0.6, "b": 0.5})},
    }
    lines = site_table(figures, "alone").splitlines()
    assert lines[0] == "| Row | a | b |"
    assert lines[2] == "| images | 0.850 (+0.200) | - |"
    assert lines[3] == "| alone | 0.650 | 0.550 |"


def test_gain_row_that_does_not_exist_is_refused_and_without_one_there_is_no_such_column(compared, tmp_path):
    with pytest.raises(PlanError, match="gain_row = 'nobody' is no row; there are plain, broken, near"):
        read_plan(write_plan(tmp_path, PLAN.replace('gain_row = "near"', 'gain_row = "nobody"')))
    plan = read_plan(write_plan(tmp_path, PLAN.replace('gain_row = "near"', "")))
    text = page(plan, prepare(plan, compared[1]), command="", jobs=1, written="")
    assert "Weakest site" not in text and "Site by site" not in text and "AUROC, worst site" in text


def test_figures_of_a_view_have_readable_names_and_a_better_side():
    assert column_name("image_macro_auroc") == "AUROC, mean over labels (image)"
    assert column_name("text_tail_auroc") == "AUROC, rare labels (text)"
    assert column_name("head_auroc") == "AUROC, frequent labels" and column_name("macro_f1") == "F1, mean over labels"
    assert column_name("recall of Edema") == "recall of Edema"
    for key in ("both_macro_auroc", "head_auroc", "text_auroc_q10", WORST_SITE, WEAKEST_GAIN, "neg_loss", "accuracy"):
        assert better(key) == "higher"
    for key in ("site_variance", "image_class_variance", "loss", "bytes_per_round", "seconds"):
        assert better(key) == "lower"
    assert better("num_examples") == "" == better("worst_auroc_label")
    assert figure("site_variance", 0.00452) == "0.0045" and figure("macro_auroc", 0.85849) == "0.858"


def test_figure_that_a_row_does_not_measure_is_a_dash(compared, tmp_path):
    plan = read_plan(write_plan(tmp_path, PLAN.replace('"micro_f1"', '"text_macro_auroc"')))
    text = page(plan, prepare(plan, compared[1]), command="", jobs=1, written="")
    assert table_rows(text, "## digits")[0][2] == "-"
    assert table_rows(text, "Difference to `plain`")[1][2] == "-"


def test_absolute_paths_lose_their_folders_and_ratios_keep_their_slash():
    assert without_folders("'/data/x/a.zip' is absent, see a/b and 3 / 4") == "'.../a.zip' is absent, see a/b and 3 / 4"


def test_page_for_a_browser_has_the_tables_and_curves_and_shows_foreign_html_as_text(compared, tmp_path):
    plan = read_plan(write_plan(tmp_path, PLAN.replace("nobody anything.", "nobody <script>alert(1)</script>.")))
    cells = prepare(plan, compared[1])
    found = html_page(plan, cells, page(plan, cells, command="", jobs=1, written=""))
    assert "&lt;script&gt;" in found and "<script" not in found and "default-src 'none'" in found
    assert found.count("<section>") == 1 + len(plan.settings)
    assert found.count("<svg") == 2 and "megabytes sent and received" in found  # one setting has runs
    assert '<table>\n<thead>\n<tr>\n<th style="text-align: left;">Row' in found or "<th>Row</th>" in found
