"""Geometry of the report's line charts, as plain numbers and strings: the template draws them as inline SVG.

Drawn by the page itself rather than as pictures: text stays text, colours follow the reader's light or dark scheme.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 14, 38

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Tick:
    """A grid line: where it lies in the drawing, and what it says."""

    at: float
    text: str


@dataclass(frozen=True)
class Line:
    """One curve: its unbroken stretches as SVG `points`, its single dots, and the last value as text."""

    name: str
    stretches: tuple[str, ...]
    dots: tuple[tuple[float, float], ...]
    last: str


@dataclass(frozen=True)
class Chart:
    """One drawing of WIDTH x HEIGHT units; `mark` is the x of a vertical line, None for none."""

    title: str
    x_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]
    mark: float | None


def line_chart(
    title: str, x_label: str, series: Sequence[tuple[str, Sequence[Point]]], mark_x: float | None = None
) -> Chart | None:
    """A chart of named curves of (x, y) points; a y of None is a gap, and a series without any y is left out.

    None where nothing is left to draw. `mark_x` draws a vertical line at that x, if it is inside the chart.
    """
    series = [(name, points) for name, points in series if any(y is not None for _, y in points)]
    xs = [x for _, points in series for x, y in points if y is not None]
    ys = [y for _, points in series for _, y in points if y is not None]
    if not xs:
        return None
    x_values, y_values = nice_ticks(min(xs), max(xs)), nice_ticks(min(ys), max(ys))
    x_low, x_high = min(xs), max(xs)
    y_low, y_high = min(y_values[0], min(ys)), max(y_values[-1], max(ys))

    def across(x: float) -> float:
        share = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def up(y: float) -> float:
        share = (y - y_low) / (y_high - y_low) if y_high > y_low else 0.5
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    lines = []
    for name, points in series:
        stretches: list[list[tuple[float, float]]] = [[]]
        for x, y in points:
            if y is None:
                stretches.append([])
            else:
                stretches[-1].append((across(x), up(y)))
        last = next(y for _, y in reversed(points) if y is not None)
        lines.append(
            Line(
                name,
                tuple(" ".join(f"{x},{y}" for x, y in part) for part in stretches if len(part) > 1),
                tuple(part[0] for part in stretches if len(part) == 1),
                f"{last:.3f}",
            )
        )
    return Chart(
        title,
        x_label,
        tuple(Tick(across(x), text) for x, text in _texts(x_values) if x_low <= x <= x_high),
        tuple(Tick(up(y), text) for y, text in _texts(y_values)),
        tuple(lines),
        across(mark_x) if mark_x is not None and x_low <= mark_x <= x_high else None,
    )


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten, from at or below `low` to at or above `high`."""
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        return [low - margin, low, low + margin]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [multiple * step for multiple in range(first, last + 1)]


def _texts(values: Sequence[float]) -> list[tuple[float, str]]:
    """Each value with as many decimals as the steps between them need."""
    step = values[1] - values[0]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(value, f"{value:,.{decimals}f}") for value in values]
