"""The page of a comparison in Markdown: per setting one table of figures and one of paired differences.

Rows stand in the order of the plan, so a row that loses stays where it is, and so does one that failed.
"""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from server_app.compare_cells import Cell
from server_app.compare_columns import EXTRA, better, column_name, figure, signed
from server_app.compare_figures import BYTES, WEAKEST_GAIN, WORST_LABEL, WORST_SITE, Figures, read_figures, with_gains
from server_app.compare_plan import DATA_ROOT, Plan, Row, Setting
from server_app.compare_stats import Spread, paired, spread, t_interval
from server_app.report_words import NOT_DEFINED, data_size, number_of
from server_app.run_folder import versions

CONFIDENCE = 0.95
FEW_SEEDS = 10
NOT_MEASURED = "-"
"""A figure that no run of a row has or can define, as one from text where there is no text."""

Pairs = Sequence[tuple[Mapping[str, float | None], Mapping[str, float | None]]]
"""Values of a row and of the first row at the same seed."""


def page(plan: Plan, cells: Sequence[Cell], *, command: str, jobs: int, written: str) -> str:
    """The whole page. ``written``: date and time in words."""
    done = {id(cell): read_figures(cell.run_dir) for cell in cells if cell.is_done and cell.run_dir is not None}
    parts = [f"# {plan.title}", *_provenance(cells, list(done.values()), command, written)]
    if plan.notes.strip():
        parts.append(plan.notes.strip())
    parts += [_how_to_read(plan, jobs), _rows_described(plan)]
    for setting in plan.settings:
        mine = [cell for cell in cells if cell.setting == setting]
        parts += _section(plan.of(setting), setting, mine, done)
    return "\n\n".join(parts) + "\n"


def without_folders(text: str) -> str:
    """The text with every absolute path shortened: a page that is shared names no folder of one machine.

    >>> without_folders("no file /data/packs/a.zip here")
    'no file .../a.zip here'
    """
    text = text.replace(f"{Path.cwd()}{os.sep}", "")
    return re.sub(r"(?<![\w.:/~-])/(?:[^\s/'\"`|,;:()]+/)+([^\s/'\"`|,;:()]+)", r".../\1", text)


def _provenance(cells: Sequence[Cell], figures: Sequence[Figures], command: str, written: str) -> list[str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    machine = f"{os.cpu_count()} cores, {gpu}, {platform.system()}"
    made_with = {_listed(found.run["versions"]): None for found in figures if "versions" in found.run}
    states = Counter(cell.code for cell in cells if cell.is_done)
    counts = Counter(cell.status for cell in cells)
    lines = [
        f"Made by `{without_folders(command)}` on {written}; {machine}.",
        "Versions: " + "; other cells: ".join(made_with or {_listed(versions()): None}) + ".",
        f"Cells: {number_of(len(cells), 'cell')}, {counts['completed'] + counts['cached']} with a completed run, "
        f"{counts['failed']} failed, {counts['skipped']} skipped.",
    ]
    if len(states) > 1:
        shares = ", ".join(f"{code} ({number_of(count, 'cell')})" for code, count in states.most_common())
        lines.append(
            f"**The code changed between cells**: states {shares}. `--rerun-changed` runs the older ones again."
        )
    elif states:
        lines.append(f"State of the code: {next(iter(states))}.")
    return ["\n".join(lines)]


def _listed(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _how_to_read(plan: Plan, jobs: int) -> str:
    seeds = ("seeds " if len(plan.seeds) > 1 else "seed ") + ", ".join(map(str, plan.seeds))
    first = "the first row" if any(setting.rows for setting in plan.settings) else f"`{plan.rows[0].name}`"
    few = (
        f" {number_of(len(plan.seeds), 'seed')} {'is' if len(plan.seeds) == 1 else 'are'} few: the standard deviation "
        "is itself uncertain, the intervals are wide and not corrected for the number of comparisons, and an interval "
        "that holds 0 shows no difference, not that there is none."
        if len(plan.seeds) < FEW_SEEDS
        else " The intervals are not corrected for the number of comparisons."
    )
    gain = (
        f" The weakest site is the one where `{plan.gain_row}` has the lowest mean AUROC at the same seed; its gain is "
        "the row's mean AUROC there minus that one, - where the row does not measure that site."
        if plan.gain_row
        else ""
    )
    return (
        f"Figures are those of the test data: mean ± standard deviation (ddof = 1) over the {seeds}; a "
        "seed draws the partition, the first weights and the order of training. Bold: the best mean of a column among "
        "the rows with most seeds; rows stand in the order of the plan. The worst site is the one with the lowest mean "
        f"AUROC over labels on its own test examples.{gain} Differences are those to {first} at the same seed, with "
        f"Student's {CONFIDENCE:.0%} interval of their mean.{few} Seconds were taken with up to "
        f"{number_of(jobs, 'cell')} at a time on this machine, a run's with start, evaluation, export and "
        "report: a rough guide, no benchmark."
    )


def _section(plan: Plan, setting: Setting, cells: Sequence[Cell], done: Mapping[int, Figures]) -> list[str]:
    needed = {DATA_ROOT: setting.needs} if setting.needs else {}
    parts = [f"## {setting.name}", " ".join([_described({**needed, **setting.run_config}), setting.note]).strip()]
    rows = {row.name: [cell for cell in cells if cell.row == row] for row in plan.rows}
    figures = {name: {cell.seed: done[id(cell)] for cell in mine if id(cell) in done} for name, mine in rows.items()}
    if plan.gain_row:
        figures = with_gains(figures, plan.gain_row)
    if any(figures.values()):
        parts.append(_figures_table(plan, rows, figures))
        if plan.gain_row:
            parts += [_PER_SITE.format(plan.gain_row), site_table(figures, plan.gain_row)]
        if len(plan.rows) > 1:
            parts += [f"Difference to `{plan.rows[0].name}`:", _differences_table(plan, figures)]
            if len(plan.seeds) > 2:
                parts += [_PAIRED.format(plan.rows[0].name), _paired_table(plan, figures)]
    troubled = [cell for cell in cells if cell.status in ("failed", "skipped", "waiting")]
    if troubled:
        parts.append("Without a result:\n\n" + "\n".join(_troubles(plan.rows, troubled, len(plan.seeds))))
    return parts


def _rows_described(plan: Plan) -> str:
    lines = [
        f"All rows: {_described(plan.base)}. A row's own settings win over those of a table, and those over these."
    ]
    lines += [f"- {row.name}: {_described(row.run_config)} {row.note}".rstrip() for row in plan.rows]
    return "\n".join([lines[0], "", *lines[1:]])


def _described(run_config: Mapping[str, Any]) -> str:
    """A run config in one line, data by its name."""
    shown = (f"{key} = {Path(str(value)).name if key == DATA_ROOT else value}" for key, value in run_config.items())
    return f"`{', '.join(shown)}`" if run_config else "no settings of its own"


def _troubles(rows: Iterable[Row], cells: Sequence[Cell], num_seeds: int) -> list[str]:
    """One line for all seeds of a row that ended alike, and one line for all rows where every cell did."""
    if len({(cell.status, cell.reason) for cell in cells}) == 1 and len(cells) == num_seeds * len(list(rows)):
        return [f"- all rows: {cells[0].status}: {without_folders(cells[0].reason)}"]
    seeds: dict[tuple[str, str, str], list[str]] = {}
    for cell in sorted(cells, key=lambda cell: list(rows).index(cell.row)):
        seeds.setdefault((cell.row.name, cell.status, cell.reason), []).append(str(cell.seed))
    return [
        f"- {name}, {'all seeds' if len(found) == num_seeds else 'seed ' + ', '.join(found)}: {status}"
        + (f": {without_folders(reason)}" if reason else "")
        for (name, status, reason), found in seeds.items()
    ]


# -- tables -----------------------------------------------------------------------------------------------------------


def _figures_table(plan: Plan, rows: Mapping[str, Sequence[Cell]], figures: Mapping[str, Mapping[int, Figures]]) -> str:
    columns = _columns(plan, EXTRA)
    spreads = {
        name: {key: spread([found.values.get(key) for found in by_seed.values()]) for key in columns}
        for name, by_seed in figures.items()
    }
    best = {key: _best(key, spreads, figures) for key in columns}
    lines = []
    for name, by_seed in figures.items():
        if not by_seed:
            lines.append([name, *[rows[name][0].status] * len(columns), "0"])
            continue
        cells = [_cell(key, spreads[name][key], list(by_seed.values()), best[key]) for key in columns]
        lines.append([name, *cells, _share(len(by_seed), len(plan.seeds))])
    return _markdown(["Row", *map(column_name, columns), "Seeds"], lines)


def _columns(plan: Plan, extra: Iterable[str]) -> list[str]:
    """The plan's metrics, then the others; the gain only where the plan says over which row."""
    return [
        *plan.metrics,
        *(key for key in extra if key not in plan.metrics and (key != WEAKEST_GAIN or plan.gain_row)),
    ]


def _cell(key: str, found: Spread, figures: Sequence[Figures], best: str | None) -> str:
    if found.mean is None:
        return NOT_MEASURED
    shown = figure(key, found.mean)
    text = f"**{shown}**" if shown == best else shown
    if key == BYTES:
        down, up = (spread([run.bytes[way] for run in figures]).mean for way in (0, 1))
        return text + f" ({data_size(down)} / {data_size(up)})"
    text += f" ± {NOT_DEFINED if found.sd is None else figure(key, found.sd, like=found.mean)}"
    if found.count < len(figures):
        text += f" (n = {found.count})"
    names = {run.worst.get(key) for run in figures} - {None}
    return text + (f" ({'label ' * (key == WORST_LABEL)}{names.pop()})" if len(names) == 1 else "")


def _best(
    key: str, spreads: Mapping[str, Mapping[str, Spread]], figures: Mapping[str, Mapping[int, Figures]]
) -> str | None:
    """The best mean as it is shown, so that rows that look alike are marked alike; None where a figure has no side."""
    choose = {"lower": min, "higher": max}.get(better(key))
    if choose is None:
        return None
    most = max(map(len, figures.values()))
    means = [
        found[key].mean
        for name, found in spreads.items()
        if len(figures[name]) == most and found[key].count == most and found[key].mean is not None
    ]
    return figure(key, choose(means)) if len({figure(key, mean) for mean in means}) > 1 else None


def _differences_table(plan: Plan, figures: Mapping[str, Mapping[int, Figures]]) -> str:
    columns = _columns(plan, (WORST_SITE, WORST_LABEL, WEAKEST_GAIN))
    base = figures[plan.rows[0].name]
    lines = []
    for row in plan.rows[1:]:
        pairs = [(found.values, base[seed].values) for seed, found in figures[row.name].items() if seed in base]
        cells = [_difference(key, pairs) for key in columns]
        lines.append([row.name, *cells, _share(len(pairs), len(plan.seeds))])
    return _markdown(["Row", *map(column_name, columns), "Seeds in common"], lines)


_PER_SITE = (
    "Site by site: mean AUROC over labels on the site's own test examples, and in brackets its gain over `{}` at the "
    "same seed; both are means over the seeds:"
)


def site_table(figures: Mapping[str, Mapping[int, Figures]], gain_row: str) -> str:
    """One line a row and one column a site, of all the sites that any run has."""
    sites = sorted({site for by_seed in figures.values() for found in by_seed.values() for site in found.sites})
    alone = {seed: found.sites for seed, found in figures[gain_row].items()}
    lines = []
    for name, by_seed in figures.items():
        line = [name]
        for site in sites:
            mean = spread([found.sites.get(site) for found in by_seed.values()]).mean
            gains = [
                found.sites[site] - alone[seed][site]
                for seed, found in by_seed.items()
                if site in found.sites and site in alone.get(seed, {})
            ]
            gain = f" ({signed(WORST_SITE, spread(gains).mean)})" if gains and name != gain_row else ""
            line.append(NOT_MEASURED if mean is None else figure(WORST_SITE, mean) + gain)
        lines.append(line)
    return _markdown(["Row", *sites], lines)


_PAIRED = (
    "The same differences, seed by seed: their Hodges-Lehmann shift, the share of seeds in which the row is above "
    "`{}`, and the smaller one-sided p of Wilcoxon's signed ranks (exact; not corrected for the number of comparisons):"
)


def _paired_table(plan: Plan, figures: Mapping[str, Mapping[int, Figures]]) -> str:
    base = figures[plan.rows[0].name]
    lines = []
    for row in plan.rows[1:]:
        pairs = [(found.values, base[seed].values) for seed, found in figures[row.name].items() if seed in base]
        lines.append([row.name, *(_paired_cell(key, pairs) for key in plan.metrics)])
    return _markdown(["Row", *map(column_name, plan.metrics)], lines)


def _paired_cell(key: str, pairs: Pairs) -> str:
    found = paired(_gaps(key, pairs))
    if found.shift is None or found.share_above is None or found.p_below is None or found.p_above is None:
        return NOT_MEASURED if pairs else NOT_DEFINED
    side, p = min(("below", found.p_below), ("above", found.p_above), key=lambda pair: pair[1])
    return f"{signed(key, found.shift)}, {found.share_above:.0%} above, p {side} {p:.3f}"


def _difference(key: str, pairs: Pairs) -> str:
    differences = _gaps(key, pairs)
    found, interval = spread(differences), t_interval(differences, CONFIDENCE)
    if found.mean is None:
        return NOT_MEASURED if pairs else NOT_DEFINED
    if interval is None:
        return f"{signed(key, found.mean)} (interval {NOT_DEFINED})"
    return f"{signed(key, found.mean)} ({signed(key, interval[0])} to {signed(key, interval[1])})"


def _gaps(key: str, pairs: Pairs) -> list[float]:
    """Row minus first row, at every seed where both have the figure."""
    values = [(mine.get(key), first.get(key)) for mine, first in pairs]
    return [mine - first for mine, first in values if mine is not None and first is not None]


def _share(count: int, wanted: int) -> str:
    return str(count) if count == wanted else f"{count} of {wanted}"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
